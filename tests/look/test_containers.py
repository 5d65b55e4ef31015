"""Numbers that change inside of what a call is given: a dict of hyperparameters, a pair of betas, a dataclass of settings."""

import collections
import dataclasses
import threading

import pytest
import torch
from helpers import tells, values
from hypothesis import given, settings
from hypothesis import strategies as st

import cgt
from cgt.api import state_of
from cgt.look import containers

Pair = collections.namedtuple("Pair", "lr betas")
CALLS = 12


@dataclasses.dataclass
class Settings:
    lr: float
    x: torch.Tensor
    rest: dict


@dataclasses.dataclass(frozen=True)
class Frozen:
    t: int


def check(function, make, replays=CALLS - 3):
    """CALLS calls, each with containers of its own: as eager's, which are left as eager leaves them."""
    f = cgt.jit(function)
    for k in range(CALLS):
        mine, theirs = make(k), make(k)
        parts = [id(x) for x in mine]
        assert torch.equal(f(*mine), function(*theirs)), (k, cgt.explain(f))
        assert repr(mine) == repr(theirs) and [id(x) for x in mine] == parts, k
    assert cgt.stats(f).replays >= replays, cgt.explain(f)
    return f


SHAPES = {
    "dict": (lambda x, c: x * c["lr"] + c["beta"], lambda x, k: (x, {"lr": 0.5 + k, "beta": 2.0})),
    "tuple": (lambda x, c: x * c[0] + c[1], lambda x, k: (x, (0.5 + k, k))),
    "list": (lambda x, c: (x * c[0]).add(x, alpha=c[1]), lambda x, k: (x, [k, 0.25 * k])),
    "namedtuple": (lambda x, c: x * c.lr - c.betas[1], lambda x, k: (x, Pair(0.1 * k, (0.9, 0.5 + k)))),
    "nested": (
        lambda x, c: x * c["groups"][1]["lr"],
        lambda x, k: (x, {"groups": [{"lr": 1.0}, {"lr": 2.0 - k, "name": "a"}]}),
    ),
    "dataclass": (lambda c: c.x * c.lr + c.rest["t"], lambda x, k: (Settings(0.3 * k, x, {"t": k}),)),
    "frozen dataclass": (lambda x, c: x / (c.t + 1.0), lambda x, k: (x, Frozen(k))),
    "tensors beside": (
        lambda c: c["x"] * c["lr"] + c["y"][0],
        lambda x, k: ({"x": x, "y": (x + k, k), "lr": float(k)},),
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_that_change_in_an_argument_are_one_recording(device, shape):
    function, make = SHAPES[shape]
    x = values(device, 6)
    f = check(function, lambda k: make(x, k))
    assert cgt.stats(f).records <= 2, cgt.explain(f)


def test_keyword_arguments(device):
    x, f = values(device, 6), cgt.jit(lambda x, *, options: x * options["lr"])
    for k in range(CALLS):
        assert torch.equal(f(x, options={"lr": 1.5 * k}), x * (1.5 * k))
    assert cgt.stats(f).records == 1 and cgt.stats(f).replays >= CALLS - 3, cgt.explain(f)


trees = st.recursive(
    st.one_of(st.floats(-4, 4, width=32), st.integers(-9, 9), st.sampled_from(["a", None, True])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner, inner), st.dictionaries(st.sampled_from("abc"), inner, max_size=3), st.builds(Pair, inner, inner)
    ),
    max_leaves=6,
)  # fmt: skip


def numbers(tree):
    if isinstance(tree, (int, float)) and not isinstance(tree, bool):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [number for part in parts for number in numbers(part)]


def other(tree, k):
    """The same structure with other numbers."""
    if type(tree) in (int, float):
        return tree + k if k % 3 else tree
    if isinstance(tree, dict):
        return {key: other(x, k) for key, x in tree.items()}
    if type(tree) is list:
        return [other(x, k) for x in tree]
    if isinstance(tree, tuple):
        parts = [other(x, k) for x in tree]
        return tree._make(parts) if hasattr(tree, "_make") else tuple(parts)
    return tree


@settings(deadline=None, max_examples=60)
@given(tree=trees)
def test_any_nesting_agrees_with_eager(tree):
    def function(x, tree):
        for k, number in enumerate(numbers(tree)):
            x = x * number if k % 2 else x + number
        return x

    f, x = cgt.jit(function), torch.arange(4.0)
    for k in range(8):
        mine, theirs = other(tree, k), other(tree, k)
        assert torch.equal(f(x, mine), function(x, theirs)) and repr(mine) == repr(theirs)
    cgt.reset(f)


@settings(deadline=None, max_examples=200)
@given(tree=trees, data=st.data())
def test_what_is_exchanged_comes_back(tree, data):
    found = containers.numbers_of("args[0]", tree)
    given_ = {path: object() for path, _ in found if data.draw(st.booleans())}
    before, exchanged, wanted = repr(tree), [], dict(given_)
    now = containers.exchange(tree, "args[0]", given_, exchanged)
    assert dict(numbers_and_more("args[0]", now, wanted)) == wanted and not given_
    assert containers.put_back(exchanged) is None and repr(tree) == before and not exchanged


def numbers_and_more(path, value, wanted):
    if path in wanted:
        return [(path, value)]
    return [one for step, _, x in containers.parts_of(value) for one in numbers_and_more(path + step, x, wanted)]


@settings(deadline=None, max_examples=200)
@given(tree=trees, data=st.data())
def test_what_a_run_did_to_containers_is_undone(tree, data):
    whole = [tree, collections.OrderedDict(a=1, b=[tree]), Settings(1.0, torch.zeros(1), {"t": [2]})]
    before = repr(whole)
    held = containers.contents([whole])
    homes = [home for home, _ in held]
    assert whole in homes and whole[1] in homes and vars(whole[2]) in homes
    for home in data.draw(st.lists(st.sampled_from(homes), min_size=1)):
        key = data.draw(st.sampled_from([*home, "new"])) if isinstance(home, dict) else 0
        how = data.draw(st.sampled_from(["clear", "put", "take"]))
        if how == "clear":
            home.clear()
        elif isinstance(home, dict):
            home.update({key: 5}) if how == "put" else home.pop(key, None)
        else:
            home.insert(0, 5) if how == "put" else home and home.pop(0)
    containers.restore(held)
    assert repr(whole) == before and containers.contents([whole]) == held


def test_a_tuple_in_a_list_is_not_what_it_holds():
    (home, was), *_ = held = containers.contents([[(5, 5)]])
    home[:] = [5, 5]
    containers.restore(held)
    assert home == [(5, 5)] and home[0] is was[0]


# --- what a function may do with them ---------------------------------------------------------


class Holder:
    pass


@tells("changed_arguments")
@pytest.mark.parametrize(
    "change", [lambda c: c.update(lr=c["lr"] * 0.5), lambda c: c.update(lr=1.0), lambda c: c.pop("lr"), lambda c: c.update(more=1)]
)  # fmt: skip
def test_entry_that_the_function_changes_runs_eagerly(device, change):
    def function(x, c):
        y = x * c["lr"]
        change(c)
        return y

    x = values(device, 6)
    f = check(function, lambda k: (x, {"lr": 1.0 + k}), replays=0)
    assert not cgt.stats(f).replays and any("CGT206" in reason for reason in cgt.stats(f).reasons), cgt.explain(f)


def test_change_before_what_no_recording_can_have_happens_once(device):
    """A capture that comes to nothing is run again, eagerly: what it did to the arguments is undone first."""

    def function(x, c):
        c["n"] += 1
        c["seen"].append(c["n"])
        c.pop("once", None)
        x.data_ptr()
        return x * c["n"]

    x = values(device, 6)
    check(function, lambda k: (x, {"n": 3, "seen": [], "once": k}), replays=0)
    check(function, lambda k: (x, {"n": k, "seen": [0], "once": 1}), replays=0)


def test_container_that_is_stored_is_the_callers(device):
    """And what it holds there, today's number."""
    holders, x = [Holder(), Holder()], values(device, 6)
    for holder in holders:
        holder.options = None

    def store(holder):
        def function(x, c):
            holder.options = c
            return x * c["lr"]

        return function

    f, plain = cgt.jit(store(holders[0])), store(holders[1])
    for k in range(CALLS):
        mine, theirs = {"lr": 1.0 + k}, {"lr": 1.0 + k}
        assert torch.equal(f(x, mine), plain(x, theirs))
        assert holders[0].options is mine and holders[1].options is theirs and mine == theirs, k


def test_tuple_that_is_stored_holds_todays_numbers(device):
    holder, x = Holder(), values(device, 6)
    holder.betas = None

    def function(x, c):
        holder.betas = c
        return x * c[0]

    f = cgt.jit(function)
    for k in range(CALLS):
        assert (
            torch.equal(f(x, (1.0 + k, 2)), x * (1.0 + k))
            and holder.betas == (1.0 + k, 2)
            and type(holder.betas[0]) is float
        ), k


def test_container_that_is_returned(device):
    x, f = values(device, 6), cgt.jit(lambda x, c: (x * c["lr"], c["lr"] + 1, (c["lr"], 2)))
    for k in range(CALLS):
        y, more, pair = f(x, {"lr": 1.0 + k})
        assert torch.equal(y, x * (1.0 + k)) and more == 2.0 + k and pair == (1.0 + k, 2) and type(more) is float, k


def test_number_that_chooses_a_way_or_a_shape(device):
    x = values(device, 6)
    branches = check(lambda x, c: x * c["t"] if c["t"] > 3 else x - c["t"], lambda k: (x, {"t": k % 7}), replays=4)
    assert cgt.stats(branches).records <= 3, cgt.explain(branches)
    check(lambda x, c: x[: c["n"]].sum() * c["lr"], lambda k: (x, {"n": 2 + k % 2, "lr": 0.5}), replays=4)


def test_one_container_given_twice(device):
    def make(k):
        c = {"lr": 1.0 + k}
        return values(device, 6), c, c

    check(lambda x, a, b: x * a["lr"] + b["lr"], make, replays=0)


def test_numbers_come_back_behind_an_exception(device):
    f, x = cgt.jit(lambda x, c: (x * c["lr"])[c["at"]]), values(device, 6)
    for k in range(6):
        f(x, {"lr": 1.0 + k, "at": 0})
    options = {"lr": 9.0, "at": 99}
    with pytest.raises(IndexError):
        f(x, options)
    assert options == {"lr": 9.0, "at": 99} and type(options["lr"]) is float


@pytest.mark.parametrize("length", [9, 1000])
def test_long_lists_of_numbers_are_data(device, length):
    """Nobody looks through them for numbers that change."""
    f, x = cgt.jit(lambda x, c: x * c[0]), values(device, 6)
    for k in range(4):
        assert torch.equal(f(x, [float(k)] * length), x * k)
    assert not state_of(f).learnt.numbers.last


@dataclasses.dataclass
class Slots:
    __slots__ = ("lr",)
    lr: float


class Shown:
    """Another kind of container in which the number has the same path."""

    def __init__(self, lr):
        self.lr = lr


torch.utils._pytree.register_pytree_node(
    Shown, lambda one: ([one.lr], None), lambda parts, _: Shown(*parts), flatten_with_keys_fn=lambda one: ([(torch.utils._pytree.GetAttrKey("lr"), one.lr)], None)
)  # fmt: skip


@pytest.mark.parametrize(
    "kind", [Slots, Shown, lambda lr: collections.OrderedDict(lr=lr), lambda lr: collections.defaultdict(int, lr=lr)]
)
def test_number_that_no_stand_in_can_be_put_for_is_itself(device, kind):
    """It was learnt of another kind of container."""
    x = values(device, 6)

    def function(x, c):
        return x * (c["lr"] if isinstance(c, dict) else c.lr)

    f, first = (
        cgt.jit(function),
        (lambda lr: {"lr": lr}) if isinstance(kind(1.0), dict) else (lambda lr: Settings(lr, x, {})),
    )
    for k in range(24):
        c = (first if k < 4 else kind)(1.0 + k % 9)
        assert torch.equal(f(x, c), function(x, c)), (k, cgt.explain(f))


def test_threads_with_one_dict(device):
    """While one records, its entries are stand-ins: the others wait, or run with numbers."""
    f, x, options, wrong = cgt.jit(lambda x, c: x * c["lr"]), values(device, 6), {"lr": 1.5}, []

    def work():
        for _ in range(40):
            wrong.extend([] if torch.equal(f(x, options), x * 1.5) else [1])

    for k in range(3):
        f(x, {"lr": 1.0 + k})
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and options == {"lr": 1.5} and type(options["lr"]) is float
