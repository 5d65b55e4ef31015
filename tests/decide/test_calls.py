"""One jitted function, called: what becomes of each call, of its arguments, and of its result.

Tensors stay alive while they are compared, so addresses are stable and counters are exact."""

import collections
import dataclasses
import enum
import functools
import math
from typing import NamedTuple

import cgt_core as core
import numpy as np
import pytest
import torch
from helpers import calls, counts, not_audited, same, tells, values
from torch import nn
from torch.utils import _pytree as torch_pytree

import cgt
from cgt.decide import dispatch


class Pair(NamedTuple):
    a: object
    b: object


@dataclasses.dataclass
class Batch:
    a: object
    b: object
    scale: float = 3.0


@dataclasses.dataclass(frozen=True)
class Options:
    power: int
    name: str = "plain"


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Box:
    """Registered with torch.utils._pytree for the tests of this file."""

    def __init__(self, a, b, note):
        self.a, self.b, self.note = a, b, note


class Scaler:
    def __init__(self, scale):
        self.scale = scale


@pytest.fixture
def box():
    torch_pytree.register_pytree_node(
        Box, lambda x: ([x.a, x.b], x.note), lambda children, note: Box(*children, note)
    )
    yield Box
    torch_pytree._deregister_pytree_node(Box)


# --- the life of a call -----------------------------------------------------------------------


def test_first_call_warms_second_records_third_replays(device):
    f = cgt.jit(lambda x: x * 2 + 1)
    x = values(device)
    for expected in [(1, 0, 0, 0), (1, 1, 0, 0), (1, 1, 1, 0), (1, 1, 2, 0)]:
        assert same(f(x), x * 2 + 1)
        assert counts(f) == expected


def test_a_replay_reads_what_is_in_its_inputs_now(device):
    f = cgt.jit(lambda x: x * 2 + 1)
    x = values(device)
    calls(f, 2, x)
    for k in range(3):
        x.fill_(k)
        assert same(f(x), x * 2 + 1)
    assert counts(f) == (1, 1, 3, 0)


@not_audited("it counts runs of the function")
def test_python_side_effects_happen_while_warming_and_recording_only(device, capsys):
    seen = collections.deque()

    @cgt.jit
    def f(x):
        seen.append(len(x))
        print("ran")
        return x + 1

    calls(f, 6, values(device))
    assert list(seen) == [4, 4]
    assert capsys.readouterr().out == "ran\nran\n"
    assert counts(f) == (1, 1, 4, 0)


def test_what_only_the_first_call_does_costs_one_more_warm_up(device):
    """A cache that is made lazily may need the host."""
    cache = {}

    def scaled(x):
        if "scale" not in cache:
            cache["scale"] = float(x.abs().max())
        return x * cache["scale"]

    f, x = cgt.jit(scaled), values(device)
    for _ in range(6):
        assert torch.equal(f(x), x * x.abs().max())
    assert counts(f) == (2, 1, 3, 0)
    f = cgt.jit(lambda x: x * float(x.abs().max()))
    for _ in range(6):
        assert torch.equal(f(x), x * x.abs().max())
    assert counts(f) == (1, 0, 0, 5)


def test_one_warm_up_serves_every_shape(device):
    f = cgt.jit(lambda x: x.relu() + 1)
    for k, n in enumerate([2, 3, 5]):
        x = values(device, n, 4)
        assert same(calls(f, 3, x), x.relu() + 1)
        assert counts(f) == (1, k + 1, 2 * k + 1, 0)  # only the first shape was warmed


def test_a_call_with_moved_arguments_is_recorded_once_more_and_then_replays(device):
    f = cgt.jit(lambda x: x.exp() - 1)
    inputs = [values(device, seed=k) for k in range(5)]
    calls(f, 3, inputs[0])
    for x in inputs[1:]:
        assert same(f(x), x.exp() - 1)
    assert counts(f) == (1, 2, 4, 0)
    assert same(f(inputs[0]), inputs[0].exp() - 1)
    stats = cgt.stats(f)
    assert stats.replays == 5
    assert stats.rebinds == 4 and stats.copied_bytes == 0


# --- argument trees ---------------------------------------------------------------------------

ARGUMENTS = {  # name: (function, tensors -> (args, kwargs))
    "positional": (lambda a, b: a * 2 + b, lambda a, b: ((a, b), {})),
    "keywords": (lambda a, b: a * 2 + b, lambda a, b: ((), {"b": b, "a": a})),
    "mixed": (lambda a, *, b: a * 2 + b, lambda a, b: ((a,), {"b": b})),
    "varargs": (lambda *t: t[0] * 2 + t[1], lambda a, b: ((a, b), {})),
    "varkwargs": (lambda **t: t["a"] * 2 + t["b"], lambda a, b: ((), {"a": a, "b": b})),
    "default": (lambda a, b, scale=2.0: a * scale + b, lambda a, b: ((a, b), {})),
    "tuple": (lambda p: p[0] * 2 + p[1], lambda a, b: (((a, b),), {})),
    "list": (lambda p: p[0] * 2 + p[1], lambda a, b: (([a, b],), {})),
    "dict": (lambda p: p["a"] * 2 + p["b"], lambda a, b: (({"a": a, "b": b},), {})),
    "int keys": (lambda p: p[7] * 2 + p[-1], lambda a, b: (({7: a, -1: b},), {})),
    "namedtuple": (lambda p: p.a * 2 + p.b, lambda a, b: ((Pair(a, b),), {})),
    "dataclass": (lambda p: p.a * p.scale + p.b, lambda a, b: ((Batch(a, b),), {})),
    "none": (lambda a, n, b: a * 2 + b if n is None else a, lambda a, b: ((a, None, b), {})),
    "ordered": (
        lambda p: list(p.values())[0] * 2 + p["b"],
        lambda a, b: ((collections.OrderedDict(a=a, b=b),), {}),
    ),
    "registered": (lambda p: p.a * 2 + p.b + len(p.note), lambda a, b: ((Box(a, b, "n"),), {})),
    "nested": (
        lambda p, q: p["x"][0].a * 2 + q[1][0]["y"],
        lambda a, b: (({"x": [Pair(a, None)]}, (1, ({"y": b}, "s"))), {}),
    ),
    "empty": (lambda p, q, r, a, b: a * 2 + b, lambda a, b: (((), [], {}, a, b), {})),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_argument_tree_replays_with_new_containers_and_new_tensors(device, box, name):
    function, make = ARGUMENTS[name]
    f = cgt.jit(function)
    tensors = [(values(device, seed=k), values(device, seed=k + 9)) for k in range(4)]
    for a, b in [tensors[0]] * 3 + tensors[1:]:
        args, kwargs = make(a, b)
        assert same(f(*args, **kwargs), function(*args, **kwargs))
    warmups, records, replays, eager = counts(f)
    assert (warmups, eager) == (1, 0)
    assert records in (2, 3) and replays >= 3  # moved leaves are found together or one by one
    args, kwargs = make(*tensors[0])
    assert same(f(*args, **kwargs), function(*args, **kwargs))
    assert counts(f)[2] == replays + 1


def test_dicts_of_either_insertion_order_are_right(device):
    function = lambda p: list(p.values())[0] * 2 + p["b"]  # noqa: E731
    f = cgt.jit(function)
    a, b = values(device), values(device, seed=2)
    for tree in [{"a": a, "b": b}, {"b": b, "a": a}]:
        for _ in range(3):
            assert same(f(tree), function(tree))
    assert counts(f) == (1, 2, 3, 0)


@pytest.mark.parametrize(
    "one, other",
    [
        (lambda a, b: (a, b), lambda a, b: [a, b]),
        (lambda a, b: (a, b), Pair),
        (lambda a, b: (a, b), lambda a, b: (a, b, None)),
        (lambda a, b: (a, b), lambda a, b: ((a, b),)),
        (lambda a, b: {0: a, 1: b}, lambda a, b: collections.OrderedDict({0: a, 1: b})),
        (lambda a, b: {0: a, 1: b}, lambda a, b: {False: a, True: b}),
        (Batch, lambda a, b: Batch(a, b, 4.0)),
    ],
)
def test_another_structure_is_another_child(device, one, other):
    def function(tree):
        leaves = torch_pytree.tree_leaves(vars(tree) if isinstance(tree, Batch) else tree)
        tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
        return tensors[0] * 2 + tensors[1] + len(str(leaves[2:])), type(tree)

    f = cgt.jit(function)
    trees = [make(values(device), values(device, seed=2)) for make in (one, other)]
    for tree in trees:
        for _ in range(3):
            assert same(f(tree), function(tree))
    assert counts(f) == (1, 2, 3, 0)
    assert same(f(trees[0]), function(trees[0]))
    # A number that changes is looked at by itself from then on: the first recording knew it as a constant.
    assert counts(f) == ((1, 3, 3, 0) if one is Batch else (1, 2, 4, 0))


def test_one_tensor_in_two_arguments_is_right_and_replays(device):
    f = cgt.jit(lambda pair, c: pair[0] * 2 + pair[1] * c)
    a, b, c = (values(device, seed=k) for k in range(3))
    for pair in [(a, a)] * 3 + [(a, b)] * 3 + [(b, b)] * 3:
        assert same(f(pair, c), pair[0] * 2 + pair[1] * c)
    stats = cgt.stats(f)
    assert (stats.warmups, stats.eager) == (1, 0) and stats.replays >= 5


def test_an_argument_passed_by_keyword_is_another_child_of_the_same_function(device):
    def function(x, scale=2.0):
        return x * scale

    f = cgt.jit(function)
    x = values(device)
    assert same(calls(f, 3, x), x * 2.0)
    assert same(calls(f, 2, x, scale=2.0), x * 2.0)
    assert same(calls(f, 2, x, 3.0), x * 3.0)
    assert same(calls(f, 2, x=x), x * 2.0)
    assert counts(f) == (1, 4, 4, 0)


def test_python_refuses_wrong_arguments_as_it_does_without_jit(device):
    f = cgt.jit(lambda x, scale=2.0: x * scale)
    x = values(device)
    calls(f, 3, x)
    with pytest.raises(TypeError, match="unexpected keyword argument 'scael'"):
        f(x, scael=1.0)
    with pytest.raises(TypeError, match="positional argument"):
        f()
    assert same(f(x), x * 2.0)
    assert cgt.stats(f).replays == 2


# --- results ----------------------------------------------------------------------------------

RESULTS = {
    "tensor": lambda a: a * 2,
    "tuple": lambda a: (a * 2, a + 1),
    "list": lambda a: [a * 2, a + 1],
    "dict": lambda a: {"z": a * 2, "a": a + 1},
    "namedtuple": lambda a: Pair(a * 2, a + 1),
    "dataclass": lambda a: Batch(a * 2, a + 1, 0.5),
    "ordered": lambda a: collections.OrderedDict(z=a * 2, a=a + 1),
    "registered": lambda a: Box(a * 2, a + 1, "note"),
    "none": lambda a: (None, a * 2, None),
    "plain": lambda a: (a * 2, 1, 1.0, True, "s", b"b", 1j, ..., torch.float16, Color.RED, int),
    "odd floats": lambda a: (a * 2, -0.0, math.nan, math.inf),
    "empty": lambda a: ((), [], {}, a * 2),
    "nested": lambda a: {"x": [(a * 2, Pair(a + 1, None))], "y": {"z": a - 1}},
    "same twice": lambda a: [a.exp()] * 2,
    "shape": lambda a: (a * 2, a.shape, a.device),
}


@pytest.mark.parametrize("name", RESULTS)
def test_every_result_tree_comes_back_in_fresh_containers(device, box, name):
    function = RESULTS[name]
    f = cgt.jit(function)
    a = values(device)
    results = [f(a) for _ in range(4)]
    for result in results:
        assert same(result, function(a))
    assert counts(f) == (1, 1, 2, 0)
    if name not in ("tensor", "none", "plain", "odd floats", "shape", "same twice", "empty"):
        assert len(set(map(id, results))) == 4


@pytest.mark.parametrize("name", ["list", "dict", "dataclass", "ordered", "nested"])
def test_what_a_caller_does_to_a_returned_container_does_not_come_back(device, name):
    function = RESULTS[name]
    f = cgt.jit(function)
    a = values(device)
    for _ in range(4):
        result = f(a)
        assert same(result, function(a))
        entries = vars(result) if name == "dataclass" else result
        entries.clear()
    assert counts(f) == (1, 1, 2, 0)


def test_a_tensor_returned_twice_is_one_tensor(device):
    f = cgt.jit(lambda a: [a.exp()] * 2)
    a = values(device)
    for _ in range(4):
        first, second = f(a)
        assert first is second
        del first, second
    assert counts(f) == (1, 1, 2, 0)


def test_a_function_that_returns_its_arguments_returns_those_of_this_call(device):
    f = cgt.jit(lambda p, q: {"q": q, "p": p})
    pairs = [(values(device, seed=k), values(device, seed=k + 9)) for k in range(4)]
    for a, b in [pairs[0]] * 3 + pairs[1:]:
        result = f(a, b)
        assert list(result) == ["q", "p"] and result["p"] is a and result["q"] is b
    assert counts(f) == (1, 1, 4, 0)


def test_a_static_object_comes_back_as_itself(device):
    f = cgt.jit(lambda x, scaler: (x * scaler.scale, scaler))
    x, scaler = values(device), Scaler(2.0)
    for _ in range(4):
        y, got = f(x, scaler)
        assert got is scaler and same(y, x * 2.0)
        del y
    assert counts(f) == (1, 1, 2, 0)


def test_a_result_that_cannot_be_rebuilt_runs_eagerly_with_its_path_in_the_reason(device):
    class Slotted:
        __slots__ = ("scale",)

        def __init__(self, scale):
            self.scale = scale

    f = cgt.jit(lambda x: (x * 2, {"box": Slotted(x + 1)}))
    x = values(device)
    for _ in range(4):
        y, rest = f(x)
        assert same(y, x * 2) and same(rest["box"].scale, x + 1)
    assert cgt.stats(f).replays == 0 and cgt.stats(f).eager == 3
    assert "result[1]['box'] is a Slotted" in cgt.explain(f)


def test_a_function_without_tensors_replays(device):
    f = cgt.jit(lambda n, names: (n + 1, [*names, "z"]))
    for _ in range(4):
        assert f(3, ["a", "b"]) == (4, ["a", "b", "z"])
    assert counts(f) == (1, 1, 2, 0)
    assert f(5, ["a", "b"]) == (6, ["a", "b", "z"])
    assert counts(f) == (1, 2, 2, 0)


@pytest.mark.parametrize("result", [None, 1, (1, "a", None), [2.5], {"k": (True, ...)}])
def test_a_function_that_returns_constants_replays(device, result):
    f = cgt.jit(lambda x: result)
    for _ in range(4):
        assert same(f(values(device)), result)
    assert counts(f) == (1, 1, 2, 0)


def test_a_function_without_arguments_replays(device):
    x = values(device)
    f = cgt.jit(lambda: x.sin())
    for _ in range(4):
        assert same(f(), x.sin())
    x.mul_(2)
    assert same(f(), x.sin())
    assert counts(f) == (1, 1, 3, 0)


@pytest.mark.parametrize("n", [31, 32, 33, 100])
def test_any_number_of_leaves_goes_in_and_comes_out(device, n):
    function = lambda tensors, last: [t * k for k, t in enumerate(tensors)] + [last]  # noqa: E731
    f = cgt.jit(function)
    for moved in range(2):
        tensors = [values(device, 3, seed=k + moved) for k in range(n)]
        for _ in range(3):
            assert same(f(tensors, "end"), function(tensors, "end"))
    stats = cgt.stats(f)
    assert stats.warmups == 1 and stats.eager == 0
    before = stats.replays
    tensors = [values(device, 3, seed=k + 5) for k in range(n)]
    for _ in range(cgt.stats(f).calls, 200):  # moves are learnt within the limit of recordings
        got = f(tensors, "end")
    assert same(got, function(tensors, "end"))
    assert cgt.stats(f).replays > before


# --- static values ----------------------------------------------------------------------------


def describe(x, value):
    """A tensor and a constant that are different for every two values."""
    return x + sum(repr(value).encode()), value


@pytest.mark.parametrize(
    "one, other",
    [
        (1, 2), (1, True), (0, False), (1, 1.0), (0.0, -0.0), (math.nan, 1.0),
        (math.inf, -math.inf), (1e300, 1e-300), (1j, 1), (complex(0.0, -0.0), 0j), ("a", "b"),
        ("a", b"a"), ("", None),
        (Color.RED, Color.BLUE), (torch.float32, torch.float16), (None, 0), (None, False),
        (2**70, 2**70 + 1), (..., None), (slice(1, 2), slice(1, 3)), (range(3), range(4)),
        (torch.Size([1]), torch.Size([2])), (int, float), (torch.Size([1]), (1,)),
        (frozenset({1}), frozenset({2})), (Options(1), Options(2)), (np.float32(1), np.float32(2)),
    ],
    ids=repr,
)  # fmt: skip
def test_another_static_value_is_another_child(device, one, other):
    f = cgt.jit(describe)
    x = values(device)
    # A number that changes is looked at by itself from then on: the first recording knew it as a constant.
    looked_at = type(one) in (float, Options) or (type(one) is int and one < 2**62)
    last = (1, 3, 3, 0) if type(one) is type(other) and looked_at else (1, 2, 4, 0)
    for value, expected in [(one, (1, 1, 1, 0)), (other, (1, 2, 2, 0)), (one, last)]:
        for _ in range(3 if expected[1] == 1 else 2):
            assert same(f(x, value), describe(x, value))
        assert counts(f) == expected


def test_equal_static_values_are_one_child_whatever_objects_they_are(device):
    f = cgt.jit(describe)
    x = values(device)
    makers = [lambda: float("nan"), lambda: int("123456789"), lambda: "".join(["a", "b"])]
    makers += [lambda: float("2.5"), lambda: complex("1+2j"), lambda: Options(3)]
    for k, make in enumerate(makers):
        for _ in range(3):
            assert same(f(x, make()), describe(x, make()))
        new = k == 5  # the last one's __repr__ is code that never ran
        assert counts(f) == (1, k + 1, 2 * k + 1 - new, new)


def test_an_object_compared_by_identity_is_another_child_for_another_object(device):
    f = cgt.jit(lambda x, scaler: x * scaler.scale)
    x, two, three = values(device), Scaler(2.0), Scaler(3.0)
    for scaler in (two, two, two, three, three, two):
        assert same(f(x, scaler), x * scaler.scale)
    assert counts(f) == (1, 2, 3, 0)


def test_a_function_argument_is_compared_by_identity(device):
    f = cgt.jit(lambda x, function: function(x))
    x = values(device)
    for function in (torch.sin, torch.sin, torch.sin, torch.cos, torch.cos, torch.sin):
        assert same(f(x, function), function(x))
    assert counts(f) == (1, 2, 3, 0)


def test_static_argnums_take_an_argument_as_one_value(device):
    def function(x, sizes, options):
        return x.repeat(sizes) ** options.power

    f = cgt.jit(function, static_argnums=(1, -1))
    x = values(device)
    for sizes, power in [((2, 1), 2)] * 3 + [((1, 2), 2)] * 2 + [((1, 2), 3)] * 2 + [((2, 1), 2)]:
        assert same(f(x, sizes, Options(power)), function(x, sizes, Options(power)))
    assert counts(f) == (1, 3, 4, 0)


def test_one_static_argnum_may_be_an_int(device):
    f = cgt.jit(lambda x, sizes: x.repeat(sizes), static_argnums=1)
    x = values(device)
    assert same(calls(f, 3, x, (1, 2)), x.repeat(1, 2))
    assert same(calls(f, 2, x, (2, 1)), x.repeat(2, 1))
    assert counts(f) == (1, 2, 2, 0)


@pytest.mark.parametrize("names", ["mode", ("mode",), ["mode"]])
def test_static_argnames_take_a_keyword_argument_as_one_value(device, names):
    function = lambda x, mode=("a",): x * len(mode)  # noqa: E731
    f = cgt.jit(function, static_argnames=names)
    x = values(device)
    for mode in [("a", "b")] * 3 + [("a", "b", "c")] * 2 + [("a", "b")]:
        assert same(f(x, mode=mode), x * len(mode))
    assert counts(f) == (1, 2, 3, 0)
    assert same(calls(f, 2, x), x * 1)
    assert counts(f) == (1, 3, 4, 0)


# --- metadata of tensors ----------------------------------------------------------------------


def test_shapes_dtypes_and_strides_are_children_and_going_back_replays(device):
    def function(x):
        return x * 2 + x.dim(), x.shape, x.stride()

    f = cgt.jit(function, max_records=16)
    inputs = [
        values(device, 4, 3),
        values(device, 3, 4),
        values(device, 3, 4).t(),
        values(device, 12),
        values(device, 4, 3, dtype=torch.float64),
        values(device, 4, 3, dtype=torch.bfloat16),
        values(device, 4, 3).to(torch.int32),
        values(device, 1, 3).expand(4, 3),
        values(device, 4, 6)[:, ::2],
    ]
    assert same(f(inputs[0]), function(inputs[0]))
    for k, x in enumerate(inputs):
        assert same(f(x), function(x))
        assert counts(f) == (1, k + 1, 0, 0)
    for k, x in enumerate(inputs):
        assert same(f(x), function(x))
        assert counts(f) == (1, len(inputs), k + 1, 0)


# --- limits and options -----------------------------------------------------------------------


def test_past_max_records_calls_run_eagerly_and_recover(device, monkeypatch):
    monkeypatch.setattr(dispatch.options, "COOL_DOWN", (3, 8))
    f = cgt.jit(lambda t: t["x"] + 1, inputs="fixed", max_records=2)
    inputs = [values(device, seed=k) for k in range(20)]
    for x in inputs[:3]:
        assert same(f({"x": x}), x + 1)
    assert counts(f) == (1, 2, 0, 0)
    for k, x in enumerate(inputs[3:6]):
        assert same(f({"x": x}), x + 1)
        assert counts(f) == (1, 2, 0, k + 1)
        ((reason, times),) = cgt.stats(f).reasons.items()  # found once for all calls of the cool-down
        assert times == k + 1 and "args[0]['x']" in reason and "max_records" in reason
        assert all((hex(inputs[k].data_ptr()) in reason) == core.debug_build() for k in (2, 3))
    assert same(f({"x": inputs[2]}), inputs[2] + 1)  # what is recorded still replays
    assert counts(f) == (1, 2, 1, 3)
    for _ in range(2):  # the cool-down is over: the recording that matched longest ago makes room
        assert same(f({"x": inputs[6]}), inputs[6] + 1)
    assert counts(f) == (1, 3, 2, 3)
    assert same(f({"x": inputs[2]}), inputs[2] + 1)
    assert counts(f) == (1, 3, 3, 3)
    for x in inputs[7:13]:  # the second cool-down is twice as long
        assert same(f({"x": x}), x + 1)
    assert counts(f) == (1, 3, 3, 9)
    assert same(calls(f, 2, {"x": inputs[13]}), inputs[13] + 1)
    assert counts(f) == (1, 4, 4, 9)


def test_past_max_records_the_reason_names_the_value_that_changes(device):
    class Config:
        scale = "0"

    config = Config()
    f = cgt.jit(lambda x: x * float(config.scale), max_records=2)
    x = values(device)
    for k in range(5):
        config.scale = str(k)
        assert same(f(x), x * float(k))
    assert counts(f) == (1, 2, 0, 2)
    assert "config.scale" in cgt.explain(f)


def test_shapes_that_never_settle_reach_the_limit_and_say_which_argument(device):
    f = cgt.jit(lambda x: x * 2, max_records=2)
    for k in range(5):
        x = values(device, k + 1)
        assert same(f(x), x * 2)
    assert counts(f) == (1, 2, 0, 2)
    assert "args[0]" in cgt.explain(f)


def test_a_function_that_cannot_be_replayed_tries_again_after_a_cool_down(device, monkeypatch):
    monkeypatch.setattr(dispatch.options, "COOL_DOWN", (3, 8))
    read = [True]
    f = cgt.jit(lambda x: x * (2 if read[0] and float(x.sum()) * 1 > 0 else 3))
    x = torch.ones(3, device=device)
    for _ in range(3):
        assert same(f(x), x * 2)
    assert cgt.stats(f).replays == 0 and ".item()" not in cgt.explain(f)
    assert "turns a tensor into a Python value" in cgt.explain(f)
    read[0] = False
    for _ in range(10):
        assert same(f(x), x * 3)
    assert cgt.stats(f).replays > 0


def test_copied_inputs_never_record_again_when_addresses_move(device):
    f = cgt.jit(lambda x, y: x * 2 + y, inputs="copied")
    pairs = [(values(device, seed=k), values(device, seed=k + 9)) for k in range(6)]
    for x, y in pairs:
        assert same(f(x, y), x * 2 + y)
    assert counts(f) == (1, 1, 4, 0)
    stats = cgt.stats(f)
    assert stats.rebinds == 8
    # on CUDA the call that records launches the recording too
    assert stats.copied_bytes == (5 if device.type == "cuda" else 4) * 2 * pairs[0][0].nbytes
    assert "copied: args[0], args[1]" in cgt.explain(f)


def test_pinned_inputs_are_recorded_once_per_address(device):
    f = cgt.jit(lambda x: x * 2, inputs="fixed")
    one, two = values(device), values(device, seed=2)
    for x in (one, one, one, two, two, one, two):
        assert same(f(x), x * 2)
    assert counts(f) == (1, 2, 4, 0)
    assert cgt.stats(f).copied_bytes == 0 and cgt.stats(f).rebinds == 0


def test_a_written_input_is_never_copied(device):
    f = cgt.jit(lambda x: x.mul_(2), inputs="copied")
    x = values(device)
    want = x.clone()
    for _ in range(5):
        assert f(x) is x
        assert same(x, want.mul_(2))
    assert counts(f) == (1, 1, 3, 0) and cgt.stats(f).copied_bytes == 0


# --- bad use ----------------------------------------------------------------------------------


def generator(x):
    yield x


async def coroutine(x):
    return x


async def async_generator(x):
    yield x


class Generates(nn.Module):
    def forward(self, x):
        yield x


@pytest.mark.parametrize(
    "what, words",
    [
        (3, "not 3"),
        (torch.ones(1), "not tensor"),
        (Scaler, "not <class"),
        (nn.Linear, "not <class"),
        (generator, "generator is a generator function"),
        (coroutine, "coroutine is a coroutine function"),
        (async_generator, "async_generator is a generator function"),
        (functools.partial(generator), "is a generator function"),
        (functools.partial(coroutine), "is a coroutine function"),
        (Generates(), "is a generator function"),
    ],
)
def test_what_cannot_be_jitted_is_refused_at_decoration(what, words):
    with pytest.raises(TypeError) as error:
        cgt.jit(what)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "option, value",
    [
        ("outputs", "resuce"), ("outputs", None), ("inputs", "pin"), ("inputs", 1),
        ("max_records", 0), ("max_records", -1), ("max_records", 1.5), ("max_records", True),
        ("static_argnums", ("x",)), ("static_argnums", "x"), ("static_argnames", (1,)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("late", [False, True], ids=["jit(f, ...)", "@jit(...)"])
def test_an_unknown_option_value_is_refused_with_its_name(option, value, late):
    with pytest.raises(cgt.CgtError) as error:
        cgt.jit(None if late else len, **{option: value})
    assert f"{option}={value!r}" in str(error.value) and "expected" in str(error.value)


@pytest.mark.parametrize(
    "option, value", [("static_argnames", "nope"), ("static_argnames", ("x", "nope")), ("dynamic", "nope"), ("static_argnums", 2), ("static_argnums", -3)]
)
def test_an_argument_that_the_function_does_not_have_is_refused(option, value):
    with pytest.raises(cgt.CgtError, match=f"{option}=.*expected one of"):
        cgt.jit(lambda x, y=2: x, **{option: value})
    cgt.jit(lambda *args, **others: args, **{option: value})  # may be among these


@pytest.mark.parametrize(
    "options, args, kwargs, words",
    [
        ({"static_argnums": 0}, (np.ones(2),), {}, ["args[0] is a numpy.ndarray"]),
        ({"static_argnums": 1}, (1, [2]), {}, ["args[1] is static", "not hashable", "a tuple"]),
        ({"static_argnums": -1}, (1, {}), {}, ["args[1] is static", "not hashable"]),
        ({"static_argnames": "m"}, (1,), {"m": {3}}, ["kwargs['m'] is static", "frozenset"]),
        ({"static_argnums": 0}, (torch.ones(1),), {}, ["args[0]", "holds a tensor"]),
        ({"static_argnums": 0}, ((torch.ones(1),),), {}, ["args[0]", "holds a tensor"]),
    ],
)
def test_a_static_argument_that_cannot_be_compared_is_refused_with_its_path(device, options, args, kwargs, words):
    f = cgt.jit(lambda *args, **kwargs: torch.ones(2, device=device), **options)
    for _ in range(2):
        with pytest.raises(cgt.CgtError) as error:
            f(*args, **kwargs)
        assert all(word in str(error.value) for word in words), str(error.value)
    for _ in range(3):  # the function is as good as new
        assert same(f(1, 2), torch.ones(2, device=device))
    assert cgt.stats(f).replays == 1


class Moody:
    """Equal to nothing, not even to itself."""

    def __eq__(self, other):
        return False

    def __hash__(self):
        return 1


INCOMPARABLE = {
    "array": ((np.ones(2),), {}, "args[0] is a numpy.ndarray"),
    "array inside": (({"x": [0, np.ones(2)]},), {}, "args[0]['x'][1] is a numpy.ndarray"),
    "array by name": ((), {"a": (np.ones(2),)}, "kwargs['a'][0] is a numpy.ndarray"),
    "unequal": ((Moody(),), {}, "args[0] is a Moody whose == with itself gives False"),
    "key": (({torch.ones(1): 1},), {}, "The key tensor([1.]) of args[0] is compared as a whole"),
}


@tells("not_compared")
@pytest.mark.parametrize("args, kwargs, words", INCOMPARABLE.values(), ids=INCOMPARABLE)
def test_calls_with_an_argument_that_cannot_be_compared_run_eagerly(device, args, kwargs, words):
    calls = []

    @cgt.jit
    def f(*args, **kwargs):
        calls.append((args, kwargs))
        return torch.ones(2, device=device)

    x = torch.ones(2, device=device)
    for n in range(1, 31):
        assert same(f(*args, **kwargs), x)
        assert len(calls) == n and calls[-1][0] == args
    assert cgt.stats(f).eager == 30 and all(words in reason for reason in cgt.stats(f).reasons)


def test_calls_that_can_be_compared_replay_among_those_that_cannot(device):
    f, x = cgt.jit(lambda x: torch.as_tensor(x, device=device) * 2), torch.ones(3, device=device)
    for k in range(40):
        assert same(f(x.fill_(k)), x * 2)
        assert same(f(np.full(3, k, dtype=np.float32)), x * 2)
    stats = cgt.stats(f)
    assert (stats.replays, stats.eager) == (38, 40)


def test_arrays_are_asked_about_now_and_then(device):
    """Many calls in a row with an array: later ones do not come to Python, and one with a tensor is recorded in the end."""
    f, x = cgt.jit(lambda x: torch.as_tensor(x, device=device) * 2), torch.ones(3, device=device)
    for _ in range(100):
        f(np.ones(3, dtype=np.float32))
    for k in range(600):
        assert same(f(x.fill_(k)), x * 2)
    stats = cgt.stats(f)
    assert stats.replays > 50 and stats.eager >= 100


def test_a_list_that_contains_itself_runs_eagerly(device):
    f = cgt.jit(lambda x: None)
    ring = [1]
    ring.append({"again": ring})
    for _ in range(3):
        assert f(ring) is None
    (reason,) = cgt.stats(f).reasons
    assert "args[0] contains itself" in reason and cgt.stats(f).eager == 3


@dataclasses.dataclass
class Point:
    x: torch.Tensor
    late: float = dataclasses.field(init=False)


@pytest.mark.parametrize(
    "when", [lambda k: k % 3 == 0, lambda k: k >= 5], ids=["now and then", "later"]
)
@pytest.mark.parametrize("name", ["extra", "late"])
def test_dataclass_with_an_attribute_beside_its_fields_or_without_one(device, when, name):
    f = cgt.jit(lambda p: p.x * getattr(p, name, 1.0))
    for k in range(12):
        point = Point(values(device, seed=k))
        if when(k):
            setattr(point, name, 2.0)
        assert torch.equal(f(point), point.x * (2.0 if when(k) else 1.0))
    assert counts(f)[1] <= 3 and counts(f)[3] == 0
