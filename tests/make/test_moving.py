"""Numbers that a call advances (`self.calls += 1`) and does not read otherwise: the function replays, and each replay
advances them as eager would. Where the call could see the number, it runs eagerly, with the line. (test_puts.py: what is
stored and appended.)"""

import collections
import copy
import dataclasses
import operator
import threading
import types

import pytest
import torch
from helpers import in_threads, not_audited, same
from torch import nn
from torch.utils.checkpoint import checkpoint

import cgt
from cgt.look import flow

COUNT = 0
TABLE = {"n": 0}
NUMBERS = [0, 1.5]


class Holder:
    kind = 0  # an attribute of the class, until it is advanced

    def __init__(self):
        self.calls, self.eps, self.total, self.left = 0, 1.0, 0.0, 10
        self.table, self.numbers, self.other = {"n": 0, "m": 0.0}, [0, 2.5], types.SimpleNamespace(n=1)


class Slotted:
    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.weight = 0, nn.Parameter(torch.ones(3))


@dataclasses.dataclass
class Data:
    calls: int = 0


def state_of(o):
    """Everything that a function below could have changed."""
    if isinstance(o, Slotted):
        return o.calls
    found = {k: v for k, v in vars(o).items() if type(v) in (int, float, dict, list, str)}
    return copy.deepcopy(found)


def count(o, x):
    o.calls += 1
    return x * 2


def count_by_name(o, x):
    o.calls = 2 + o.calls
    return x * 2


def decay(o, x):
    o.eps *= 0.99
    o.total += 0.1
    o.left -= 3
    return x - 1


def divide(o, x):
    o.eps /= 3
    o.eps /= 3
    return x - 1


def in_a_loop(o, x):
    for k in range(3):
        o.total -= 0.1
        o.calls += 1
        x = x + k
    return x


def at_two_lines(o, x):
    o.calls += 1
    y = x.sin()
    o.calls += 10
    return y


def in_a_branch(o, x):
    if len(x) > 3:
        o.calls += 1
    else:
        o.left -= 1
    return x.cos()


def nested(o, x):
    def inner(y):
        o.calls += 1
        return y * 2

    return inner(inner(x))


def entries(o, x):
    o.table["n"] += 1
    o.table["m"] += 0.1
    o.numbers[0] += 2
    return x + 1


def of_the_class(o, x):
    o.kind += 1
    return x + 1


def read_on_the_way(o, x):
    o.calls += 1
    y = x * 2 if x.sum() > 0 else x - 5
    o.total += 0.3
    return y


def calls_a_method_of_that_name(o, x):
    o.calls += 1
    return x * Caller().calls()


class Caller:
    def calls(self):
        return 3


ADVANCES = [
    count, count_by_name, decay, divide, in_a_loop, at_two_lines, in_a_branch, nested, entries, of_the_class,
    read_on_the_way, calls_a_method_of_that_name,
]  # fmt: skip


def agree(function, make, device, n=14, between=lambda o, k: None, sizes=(3,)):
    """An eager twin and a jitted one agree on results and on state after each call: the jitted one."""
    ours, theirs = make(), make()
    f = cgt.jit(lambda x: function(ours, x))
    for k in range(n):
        between(ours, k), between(theirs, k)
        x = torch.full((sizes[k % len(sizes)],), k - 4.5, device=device)
        assert torch.equal(f(x), function(theirs, x)), k
        assert same(state_of(ours), state_of(theirs)), (k, state_of(ours), state_of(theirs))
    return f


@pytest.mark.parametrize("advance", ADVANCES, ids=lambda f: f.__name__)
def test_number_that_is_only_advanced_is_as_in_eager_and_the_function_replays(device, advance):
    f = agree(advance, Holder, device, sizes=(3, 3, 3, 5, 5))
    # On the GPU arguments move: each way is recorded twice until they are copied.
    assert cgt.stats(f).replays >= 8 and cgt.stats(f).records <= 5, cgt.explain(f)


@pytest.mark.parametrize("make", [Slotted, Module, Data])
def test_objects_of_other_kinds(device, make):
    f = agree(count, make, device)
    assert cgt.stats(f).replays == 12, cgt.explain(f)


@pytest.mark.parametrize("advance", ADVANCES[:7], ids=lambda f: f.__name__)
def test_what_somebody_else_stores_is_advanced_from_there(device, advance):
    def between(o, k):
        if k == 5:
            o.calls, o.eps, o.total, o.left = -7, float("inf"), 1e-300, 10**40
        if k == 9:
            o.calls, o.eps, o.total = 10**18, float("nan"), -0.0

    f = agree(advance, Holder, device, between=between)
    assert cgt.stats(f).replays >= 11, cgt.explain(f)


class Odd(int):
    def __add__(self, other):
        return Odd(int(self) * 2 + other)


@pytest.mark.parametrize("value", [1.5, True, "text", Odd(3), None, torch.ones(1)], ids=repr)
def test_number_of_another_kind_is_pythons(device, value):
    def between(o, k):
        if k == 6:
            o.calls = value
        if k == 8:
            o.calls = 2

    def guarded(o, x):
        try:
            return count(o, x)
        except TypeError:
            return x * 5

    f = agree(guarded, Holder, device, between=between)
    assert cgt.stats(f).replays >= 6, cgt.explain(f)


def test_number_that_is_gone_raises_as_in_eager(device):
    o = Holder()
    f, x = cgt.jit(lambda x: count(o, x)), torch.ones(3, device=device)
    for _ in range(4):
        f(x)
    del o.calls
    with pytest.raises(AttributeError):
        f(x)
    o.calls = 5
    assert torch.equal(f(x), x * 2) and o.calls == 6


def test_global_variable_and_cell(device):
    global COUNT
    COUNT, n, total = 0, 0, 1.0
    TABLE["n"] = NUMBERS[0] = 0

    def function(x):
        global COUNT
        nonlocal n, total
        COUNT += 1
        n -= 2
        total *= 0.5
        TABLE["n"] += 1
        NUMBERS[0] += 1
        return x * 2

    f = cgt.jit(function)
    for k in range(1, 12):
        x = torch.full((3,), float(k), device=device)
        assert torch.equal(f(x), x * 2)
        assert (COUNT, n, total, TABLE["n"], NUMBERS[0]) == (k, -2 * k, 0.5**k, k, k)
    assert cgt.stats(f).replays >= 8, cgt.explain(f)


def test_other_numbers_than_whole_ones_are_as_in_eager_where_a_gradient_is_pending(device):
    """No live numbers are traced there."""
    ours, theirs, weight = Holder(), Holder(), torch.ones(3, device=device, requires_grad=True)
    f = cgt.jit(lambda x: decay(ours, x) * weight)
    for k in range(8):
        x = torch.full((3,), float(k), device=device)
        assert torch.equal(f(x), decay(theirs, x) * weight) and same(state_of(ours), state_of(theirs))


def test_two_modules_of_one_class_count_apart(device):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x * 2

    def outcomes(wrap):
        model = nn.Sequential(first := Layer(), Layer(), first)
        f, found = wrap(model), []
        for k in range(8):
            found += [f(torch.full((3,), float(k), device=device)), [layer.calls for layer in model]]
        return f, found

    _, want = outcomes(lambda f: f)
    f, got = outcomes(cgt.jit)
    assert same(got, want) and cgt.stats(f).replays == 6, cgt.explain(f)


def test_explain_tells_what_a_replay_advances(device):
    o = Holder()
    f = cgt.jit(lambda x: in_a_loop(o, count(o, x)))
    for _ in range(3):
        f(torch.ones(3, device=device))
    line = count.__code__.co_firstlineno + 1
    assert f"advances o.calls by 4 at {__file__}:{line}" in cgt.explain(f)


# --- what the call could see ----------------------------------------------------------------------


def condition(o, x):
    o.calls += 1
    return x * 2 if o.calls % 3 == 0 else x - 1


def factor(o, x):
    o.eps *= 0.5
    return x * o.eps


def kept_in_a_variable(o, x):
    y = o.calls = o.calls + 1
    return x + y


def passed_on(o, x):
    o.calls += 1
    return x.clamp(max=o.calls)


def in_another_function(o, x):
    return count(o, x) + helper(o)


def helper(o):
    return o.calls


def by_getattr(o, x):
    return count(o, x) + getattr(o, "calls")  # noqa: B009


def by_a_name_that_is_made(o, x):
    return count(o, x) + getattr(o, "ca" + "lls"[: len(x)])


def by_a_getter(o, x):
    return count(o, x) + operator.attrgetter("calls")(o)


GETTER = operator.attrgetter("calls")
LOOK = getattr


def by_a_getter_from_outside(o, x):
    return count(o, x) + GETTER(o)


def by_another_name(o, x):
    return count(o, x) + LOOK(o, "".join(["ca", "lls"]))


def by_vars(o, x):
    return count(o, x) + vars(o)["".join(["ca", "lls"])]


def by_dict(o, x):
    return count(o, x) + sum(v for v in o.__dict__.values() if type(v) is int)


def by_a_copy(o, x):
    return count(o, x) + sum(v for v in copy.copy(o).__reduce_ex__(2)[2].values() if type(v) is int)


def by_a_format(o, x):
    return count(o, x) + int("{0.calls}".format(o))  # noqa: UP030, UP032


def by_reset(o, x):
    if len(x) == 3:
        o.calls = 5
    o.calls += 1
    return x * 2


def by_another_step(o, x):
    o.total += 0.1
    o.total *= 0.5
    return x * 2


def to_another_type(o, x):
    o.left = o.left / 2 if type(o.left) is int else 8
    return x * 2


def entry_by_a_variable(o, x):
    key = "n"
    o.table["n"] += 1
    return x + o.table[key]


def entry_of_all(o, x):
    o.table["n"] += 1
    return x + sum(o.table.values())


def entry_of_the_end(o, x):
    o.numbers[0] += 1
    return x + o.numbers[-2]


def entry_by_an_alias(o, x):
    o.table["n"] += 1
    same = o.table
    return x + len(str(same)) + same["n"]


def to_an_attribute_elsewhere(o, x):
    o.other.n += 1  # repr() would tell
    return x + int(str(o.other)[-2])


def by_position(o, x):
    o.calls += 1
    match o:
        case Data(y):
            return x + y


def whole_data(o, x):
    o.calls += 1
    return x + len(repr(o)) + (2 if o == Data(7) else 0)


SEEN = [by_dict, by_a_copy, by_a_format, to_another_type, entry_by_an_alias, to_an_attribute_elsewhere, whole_data]
COMPUTED_WITH = [
    condition, factor, kept_in_a_variable, passed_on, in_another_function, by_getattr, by_a_name_that_is_made, by_a_getter,
    by_a_getter_from_outside, by_another_name, by_vars, by_another_step, entry_by_a_variable, entry_of_all, entry_of_the_end, by_position,
]  # fmt: skip


@pytest.mark.parametrize("read", SEEN, ids=lambda f: f.__name__)
def test_number_that_the_call_looks_at_keeps_it_from_replaying(device, read):
    f = agree(read, Data if read is whole_data else Holder, device)
    assert cgt.stats(f).replays == 0 and cgt.stats(f).records <= 4, cgt.explain(f)
    told = ("is changed by the function", "asks for an exact type", "is used for more than arithmetic")
    assert any(text in reason for text in told for reason in cgt.stats(f).reasons), cgt.explain(f)


@pytest.mark.parametrize("read", COMPUTED_WITH, ids=lambda f: f.__name__)
def test_number_that_the_call_changes_and_computes_with_replays(device, read):
    f = agree(read, Data if read is by_position else Holder, device)
    assert cgt.stats(f).replays >= 8 and cgt.stats(f).records <= 4, cgt.explain(f)


def test_number_that_is_set_now_and_then_is_as_in_eager(device):
    agree(by_reset, Holder, device, sizes=(3, 3, 5, 5, 5, 3))


def test_reason_names_the_line_that_sees_it(device):
    f = agree(to_another_type, Holder, device)
    line = to_another_type.__code__.co_firstlineno + 1
    assert any(f"{__file__}:{line}" in reason for reason in cgt.stats(f).reasons), cgt.explain(f)


class Setter:
    def __init__(self):
        object.__setattr__(self, "calls", 0)
        object.__setattr__(self, "log", [0, 0])

    def __setattr__(self, name, value):
        object.__setattr__(self, name, value + 1)


class Property:
    def __init__(self):
        self.inside = 0

    @property
    def calls(self):
        return self.inside

    @calls.setter
    def calls(self, value):
        self.inside = 2 * value


class Getter:
    def __init__(self):
        self.calls = 0

    def __getattribute__(self, name):
        found = object.__getattribute__(self, name)
        return found + 1 if name == "calls" else found


class Shared:
    """Two objects with one dict."""

    everything = {}

    def __init__(self):
        self.__dict__ = self.everything
        self.calls = 0


@pytest.mark.parametrize("make", [Setter, Property, Getter])
def test_attribute_that_is_more_than_it_seems(device, make):
    agree(count, make, device)


def test_class_that_learns_to_look(device):
    class Late(Holder):
        pass

    ours, theirs = Late(), Holder()
    f = cgt.jit(lambda x: count(ours, x))
    x = torch.ones(3, device=device)
    for _ in range(5):
        assert torch.equal(f(x), count(theirs, x)) and ours.calls == theirs.calls
    Late.__setattr__ = lambda self, name, value: object.__setattr__(self, name, value * 2)
    before = ours.calls
    f(x)
    assert ours.calls == 2 * (before + 1)


def test_namespace_and_counter_are_left_to_python(device):
    """Their C code reads them as a whole. What they hold is computed all the same."""
    space, counter = types.SimpleNamespace(calls=0), collections.Counter(n=0)

    def function(x):
        space.calls += 1
        counter["n"] += 1
        return x * 2

    f = cgt.jit(function)
    for k in range(1, 9):
        f(torch.ones(3, device=device))
        assert space.calls == counter["n"] == k and type(space.calls) is type(counter["n"]) is int


def test_list_that_is_in_a_tuple_too(device):
    numbers = [0, 1]
    both = (numbers,)

    def function(x):
        numbers[0] += 1
        return x * both[0][0]

    f = cgt.jit(function)
    for k in range(1, 9):
        assert torch.equal(f(torch.ones(3, device=device)), torch.full((3,), float(k), device=device))
    assert numbers == [8, 1] and both[0] is numbers


# --- around the call ------------------------------------------------------------------------------


def test_another_function_that_reads_the_number_sees_todays(device):
    o = Holder()
    f, g = cgt.jit(lambda x: count(o, x)), cgt.jit(lambda x: x * o.calls)
    x = torch.ones(3, device=device)
    for k in range(1, 12):
        f(x)
        assert torch.equal(g(x), x * k)
        if k % 3 == 0:
            cgt.step()
    assert cgt.stats(f).replays == 9


def test_call_that_raises_leaves_what_eager_leaves(device):
    o = Holder()

    def function(x):
        o.calls += 1
        if len(x) == 4:
            raise ValueError
        return x * 2

    f = cgt.jit(function)
    given = {n: torch.ones(n, device=device) for n in (3, 4)}  # which stay where they are
    for n in (3, 3, 3, 4, 3, 4, 4, 3):
        before = o.calls
        try:
            f(given[n])
        except ValueError:
            assert n == 4
        assert o.calls == before + 1
    assert cgt.stats(f).replays >= 3


def test_recording_that_comes_to_nothing_counts_once(device):
    o = Holder()

    def function(x):
        o.calls += 1
        y = x * 2
        if str(o.calls):  # which keeps it from replaying
            o.numbers.append(y)
        return y

    f = cgt.jit(function)
    for k in range(1, 9):
        f(torch.ones(3, device=device))
        assert o.calls == k and len(o.numbers) == 2 + k
    assert cgt.stats(f).replays == 0


def test_inlined_call(device):
    o = Holder()
    inner = cgt.jit(lambda x: count(o, x))
    outer = cgt.jit(lambda x: inner(x) + inner(x * 2))
    for k in range(1, 9):
        x = torch.full((3,), float(k), device=device)
        assert torch.equal(outer(x), x * 6) and o.calls == 2 * k
    assert cgt.stats(outer).replays >= 5, cgt.explain(outer)


@pytest.mark.parametrize("how", ["plain", "checkpoint", "hook", "function"])
def test_training(device, how):
    """The forward counts, and the backward too where it runs code of the user's."""

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, o):
            o.calls += 1
            ctx.o = o
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            ctx.o.left -= 1
            return grad * 2, None

    def body(o, w, x):
        o.calls += 1
        return (w * x).sin()

    def function(o, w, x):
        if how == "checkpoint":
            return checkpoint(body, o, w, x, use_reentrant=False).sum()
        y = Counted.apply(w * x, o) if how == "function" else body(o, w, x)
        if how == "hook":
            y.register_hook(lambda grad: count(o, grad))
        return y.sum()

    def outcomes(wrap):
        o, w, found = Holder(), torch.arange(3.0, device=device).requires_grad_(), []
        f = wrap(lambda x: function(o, w, x))
        for k in range(12):
            w.grad = None
            loss = f(torch.full((3,), 0.1 * k, device=device))
            found += [loss.detach().clone(), state_of(o)]
            loss.backward()
            found += [w.grad.clone(), state_of(o)]
        return f, found

    _, want = outcomes(lambda f: f)
    f, got = outcomes(cgt.jit)
    assert same(got, want)
    if how == "plain":
        assert cgt.stats(f).replays >= 8 and cgt.stats(f).backward.replays >= 7, cgt.explain(f)


def test_hook_that_comes_later_and_reads_the_number(device):
    def outcomes(wrap):
        o, w, found = Holder(), torch.ones(3, device=device).requires_grad_(), []
        f = wrap(lambda x: (count(o, x) * w).sum())
        for k in range(14):
            if k == 6:
                w.register_hook(lambda grad: grad * o.calls)
            w.grad = None
            f(torch.full((3,), 0.1 * k, device=device)).backward()
            found += [w.grad.clone(), o.calls]
        return f, found

    _, want = outcomes(lambda f: f)
    _, got = outcomes(cgt.jit)
    assert same(got, want)


def test_whole_step_counts(device):
    def outcomes(wrap):
        torch.manual_seed(0)
        o, model = Holder(), nn.Linear(3, 1).to(device)
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            o.calls += 1
            o.eps *= 0.9
            return loss.detach()

        f = wrap(step)
        for k in range(10):
            found += [f(torch.full((2, 3), 0.1 * k, device=device)).clone(), state_of(o)]
        return f, found

    _, want = outcomes(lambda f: f)
    f, got = outcomes(cgt.jit)
    assert same(got, want) and cgt.stats(f).replays >= 6, cgt.explain(f)


@not_audited("other threads change what is compared")
def test_threads_count_every_call(device):
    o = Holder()
    f = cgt.jit(lambda x: count(o, x))
    x = torch.ones(3, device=device)
    for _ in range(4):
        f(x)

    def work(k):
        for _ in range(200):
            f(x)

    in_threads(3, work)
    assert o.calls == 604 and cgt.stats(f).replays >= 300


def test_number_that_another_thread_counts_while_it_is_recorded(device):
    """By how much the call itself moves it cannot be told then."""
    o, stop = Holder(), threading.Event()

    def others():
        while not stop.is_set():
            o.left -= 1

    def function(x):
        for _ in range(50):
            x = x + 1
        o.left -= 1
        return x

    thread = threading.Thread(target=others, daemon=True)
    thread.start()
    try:
        f = cgt.jit(function)
        for _ in range(6):
            f(torch.ones(3, device=device))
        assert cgt.stats(f).replays == 0
    finally:
        stop.set()
        thread.join()


# --- flow -----------------------------------------------------------------------------------------


def test_advances_are_found_in_bytecode():
    moves = flow.moves_of(at_two_lines.__code__)
    assert [(a.where, a.name) for a in moves.advances] == [("attribute", "calls")] * 2
    assert ("attribute", "calls") not in moves.others and ("attribute", "calls") in moves.stores
    assert ("attribute", "calls") in flow.moves_of(kept_in_a_variable.__code__).others
    assert flow.moves_of(by_vars.__code__).opens and not moves.opens
