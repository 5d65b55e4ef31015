"""Trees: what a program remembers of a call, and what it must not forget."""

import collections
import dataclasses
import enum
import functools
import math
import re
import struct
import subprocess
import sys
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as torch_pytree

from cgt.words import pytree
from cgt.words.errors import CgtError
from cgt.words.pytree import flatten, flatten_call, same_program, unflatten, unflatten_call


class Point(NamedTuple):
    x: Any
    y: Any


class Pixel(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Config:
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any = 0
    total: int = dataclasses.field(default=0, init=False)

    def __post_init__(self):
        object.__setattr__(self, "total", self.total + 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: Any
    y: Any


class Pair:
    def __init__(self, left, right, note):
        self.left, self.right, self.note = left, right, note

    def __getitem__(self, i):
        return (self.left, self.right)[i]


torch_pytree.register_pytree_node(
    Pair,
    lambda pair: ([pair.left, pair.right], pair.note),
    lambda children, note: Pair(*children, note),
)


@dataclasses.dataclass
class Registered:
    x: Any
    y: Any = None


torch_pytree.register_dataclass(Registered)


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    ONE = 1


class Version:
    """Hashable, with a value: an EQUAL leaf."""

    def __init__(self, number):
        self.number = number

    def __eq__(self, other):
        return type(other) is Version and self.number == other.number

    def __hash__(self):
        return hash(self.number)


def told(value):
    """A test's name without addresses: every run, and every worker, has the same."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def a_function():
    pass


# ---- what hypothesis builds -----------------------------------------------------------------

PLAIN_VALUES = [None, ..., NotImplemented, True, False, 0, 1, -1, 2**70, 0.0, -0.0, 1.0, math.nan]
PLAIN_VALUES += [math.inf, 1j, complex(0.0, -0.0), complex(0.0, 0.0), "", "x", b"x", range(3)]
PLAIN_VALUES += [range(0, 4, 2), range(0, 3, 2), slice(1, 2), slice(True, 2), slice(None, -0.0)]
PLAIN_VALUES += [slice(None, 0.0), torch.float32, torch.int64, torch.device("cpu")]
PLAIN_VALUES += [torch.device("cuda", 0), torch.strided, torch.channels_last, torch.Size([1, 2])]
PLAIN_VALUES += [torch.Size([2, 1]), Colour.RED, Colour.BLUE, Level.ONE, int, Point, torch.Tensor]
PLAIN_VALUES += [numpy.float32(1), numpy.float32(math.nan), numpy.float64(0), numpy.float64(-0.0)]
PLAIN_VALUES += [numpy.int64(1), numpy.bool_(True), numpy.datetime64("NaT"), numpy.str_("x")]
EQUAL_VALUES = [Version(1), Version(2), frozenset({1}), numpy.dtype("f4"), list[int]]
SAME_VALUES = [a_function, torch.nn.Linear(1, 1), {1}, bytearray(b"x"), object(), functools, math]
KEYS = ["a", "b", "it's", 0, 1, True, 1.0, None, (1, 2), (1, True), b"k", Colour.RED, Version(3)]


def containers(children):
    pairs = st.tuples(children, children)
    dicts = st.lists(st.tuples(st.sampled_from(KEYS), children), max_size=4).map(dict)
    return st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
        dicts,
        dicts.map(collections.OrderedDict),
        dicts.map(lambda items: collections.defaultdict(list, items)),
        st.lists(children, max_size=3).map(lambda items: collections.deque(items, maxlen=5)),
        *(pairs.map(lambda xy, kind=kind: kind(*xy)) for kind in (Point, Pixel, Config, Frozen)),
        *(pairs.map(lambda xy, kind=kind: kind(*xy)) for kind in (Slotted, Registered)),
        pairs.map(lambda xy: Pair(*xy, note="n")),
        pairs.map(torch.return_types.max),
    )


tensors = st.builds(
    lambda kind, n: kind(torch.arange(float(n))),
    st.sampled_from([torch.Tensor.detach, torch.nn.Parameter]),
    st.integers(1, 3),
)
leaves = tensors | st.sampled_from(PLAIN_VALUES + EQUAL_VALUES + SAME_VALUES)
trees = st.recursive(leaves, containers, max_leaves=12)


# ---- the judge: knows trees another way than pytree.py does ---------------------------------


def parts(tree):
    """(children, what else there is to know, a function that rebuilds) or None for a leaf."""
    kind = type(tree)
    if kind in (list, tuple):
        return list(tree), None, kind
    if kind is collections.deque:
        return list(tree), tree.maxlen, lambda children: kind(children, maxlen=tree.maxlen)
    if kind in (dict, collections.OrderedDict):
        keys = [(type(key), repr(key), key) for key in tree]
        return list(tree.values()), keys, lambda children: kind(zip(tree, children, strict=True))
    if kind is collections.defaultdict:
        keys = [(type(key), repr(key), key) for key in tree]
        factory = tree.default_factory
        return (
            list(tree.values()),
            (factory, keys),
            lambda children: kind(factory, zip(tree, children, strict=True)),
        )
    if kind in (Point, Pixel):
        return list(tree), None, lambda children: kind(*children)
    if kind in (Config, Frozen, Slotted, Registered):
        return [tree.x, tree.y], getattr(tree, "total", None), lambda children: kind(*children)
    if kind is Pair:
        return [tree.left, tree.right], tree.note, lambda children: kind(*children, tree.note)
    if kind is torch.return_types.max:
        return list(tree), None, kind
    return None


def bits(value):
    if isinstance(value, numpy.generic):
        return value.dtype, value.tobytes()
    if isinstance(value, float):
        return struct.pack("d", value)
    if isinstance(value, complex):
        return bits(value.real), bits(value.imag)
    if isinstance(value, (range, slice)):
        return [(type(b), bits(b)) for b in (value.start, value.stop, value.step)]
    return value


def same_tree(left, right, same_tensor=lambda left, right: left is right):
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return same_tensor(left, right)
    opened, other = parts(left), parts(right)
    if opened is None:
        if any(left is value for value in SAME_VALUES):
            return left is right
        return left is right or bits(left) == bits(right)
    if len(opened[0]) != len(other[0]) or opened[1] != other[1]:
        return False
    return all(same_tree(a, b, same_tensor) for a, b in zip(opened[0], other[0], strict=True))


def fits(program, *tree, **static):
    """Would a call follow the program: with this tree, or with these (args, kwargs)?"""
    try:
        flat = flatten(*tree, "x") if len(tree) == 1 else flatten_call(*tree, **static)
    except CgtError:  # as it cannot be compared
        return False
    return same_program(program, flat.program)


def same_shape_of_tree(left, right):
    return same_tree(left, right, same_tensor=lambda left, right: True)


def mutants(tree):
    """Every tree that differs from `tree` in one place."""
    opened = parts(tree)
    if opened is None:
        if isinstance(tree, torch.Tensor):
            other = torch.Tensor.detach if type(tree) is torch.nn.Parameter else torch.nn.Parameter
            yield other(tree)
            yield None
        else:
            yield torch.ones(1)
            yield [tree]
            for value in PLAIN_VALUES + EQUAL_VALUES + SAME_VALUES:
                if not same_tree(tree, value):
                    yield value
        return
    children, _, rebuild = opened
    for i, child in enumerate(children):
        for mutant in mutants(child):
            yield rebuild(children[:i] + [mutant] + children[i + 1 :])
    yield None
    kind = type(tree)
    if kind in (list, tuple, collections.deque):
        yield rebuild(children + [None])
        yield from [rebuild(children[:-1])] if children else []
        yield {list: tuple, tuple: list, collections.deque: list}[kind](children)
    if kind is collections.deque:
        yield collections.deque(children, maxlen=9)
    if isinstance(tree, dict):
        items = list(tree.items())
        make = functools.partial(kind, list) if kind is collections.defaultdict else kind
        yield make([*items, ("new", None)])
        yield (collections.OrderedDict if kind is dict else dict)(items)
        if items:
            yield make(items[:-1])
            yield make([*items[:-1], ("new", items[-1][1])])
        if len(items) > 1:
            yield make(items[::-1])
        if kind is collections.defaultdict:
            yield kind(set, items)
    if kind is Pair:
        yield Pair(*children, "another note")
    kinds = (Point, Pixel, Config, Frozen, Slotted, Registered)
    if kind in kinds:
        yield kinds[kinds.index(kind) - 1](*children)
    if kind is torch.return_types.max:
        yield torch.return_types.min(children)


# ---- statements over all trees --------------------------------------------------------------


@given(trees)
def test_a_round_trip_gives_the_same_tree(tree):
    flat = flatten(tree, "result")
    again = unflatten(flat.program, flat.tensors)
    assert same_tree(tree, again)
    assert len(flat.paths) == len(flat.tensors)


@given(trees)
def test_unflatten_makes_fresh_containers(tree):
    flat = flatten(tree, "result")
    first, second = (unflatten(flat.program, flat.tensors) for _ in range(2))
    mutable = (list, dict, collections.deque, Config, Pair)

    def check(left, right):
        opened, other = parts(left), parts(right)
        if opened:
            assert left is not right or not isinstance(left, mutable)
            for a, b in zip(opened[0], other[0], strict=True):
                check(a, b)

    check(first, second)
    check(tree, first)


@given(trees)
def test_a_program_matches_its_tree_and_gives_its_tensors(tree):
    flat = flatten(tree, "result")
    again = flatten(tree, "result")
    assert fits(flat.program, tree) and list(map(id, again.tensors)) == list(map(id, flat.tensors))
    copy = unflatten(flat.program, [tensor.clone().as_subclass(type(tensor)) for tensor in flat.tensors])
    assert fits(flat.program, copy)
    assert same_shape_of_tree(tree, copy)


@given(trees)
@settings(max_examples=50, deadline=None)
def test_a_program_matches_no_tree_that_differs_in_one_place(tree):
    program = flatten(tree, "result").program
    for mutant in mutants(tree):
        # The judge drops what is the same after all: {"a": 1} with its last key made "a" again.
        assert same_shape_of_tree(tree, mutant) or not fits(program, mutant), mutant


@given(trees, trees)
@example(collections.OrderedDict({1.0: None}), collections.OrderedDict({True: None}))
@example(collections.defaultdict(list, {0.0: None}), collections.defaultdict(list, {-0.0: None}))
def test_two_trees_match_exactly_if_the_judge_says_so(left, right):
    assert fits(flatten(left, "t").program, right) == same_shape_of_tree(left, right)


@given(st.lists(trees, max_size=3), st.dictionaries(st.sampled_from("abc"), trees, max_size=3))
def test_a_call_goes_round_too(args, kwargs):
    args = tuple(args)
    flat = flatten_call(args, kwargs)
    assert flat.program[0] == (pytree.TUPLE, len(args), None)
    assert (pytree.DICT, len(kwargs), tuple(kwargs)) in flat.program
    again = unflatten_call(flat.program, flat.tensors)
    assert same_tree((args, kwargs), again) and type(again) is tuple
    others = [((*args, 1), kwargs), (args, {**kwargs, "new": 1})]
    others += [(args, dict(reversed(kwargs.items())))] if len(kwargs) > 1 else []
    assert not any(same_program(flat.program, flatten_call(*other).program) for other in others)


@given(st.lists(trees, max_size=3), st.dictionaries(st.sampled_from("abc"), trees, max_size=3))
def test_a_path_is_python_that_finds_the_leaf(args, kwargs):
    flat = flatten_call(tuple(args), kwargs)
    names = {"args": args, "kwargs": kwargs}
    for path, leaf in [*zip(flat.paths, flat.tensors, strict=True), *flat.objects]:
        if "<" not in path:  # a key such as <Colour.RED: 1>
            assert eval(path, names) is leaf


# ---- one by one -----------------------------------------------------------------------------


def test_the_kinds_are_the_numbers_that_the_core_compiles_in():
    names = ["TENSOR", "PLAIN", "SAME", "EQUAL", "TUPLE", "LIST", "DICT"]
    names += ["NAMEDTUPLE", "DATACLASS", "CUSTOM"]
    assert [getattr(pytree, name) for name in names] == list(range(10))


def test_a_program_is_what_the_docstring_draws():
    a, b = torch.ones(1), torch.ones(2)
    flat = flatten_call(([a, 3],), {"x": b})
    assert flat.program == (
        (pytree.TUPLE, 1, None),
        (pytree.LIST, 2, None),
        (pytree.TENSOR, 0, torch.Tensor),
        (pytree.PLAIN, 0, 3),
        (pytree.DICT, 1, ("x",)),
        (pytree.TENSOR, 0, torch.Tensor),
    )
    assert flat.tensors == (a, b) and flat.paths == ("args[0][0]", "kwargs['x']")
    assert flat.objects == ()


def kind_of(value, **options):
    return flatten(value, "x", **options).program[0][0]


@pytest.mark.parametrize("value", PLAIN_VALUES, ids=told)
def test_plain_values(value):
    assert kind_of(value) == pytree.PLAIN and flatten(value, "x").objects == ()


@pytest.mark.parametrize("value", [*EQUAL_VALUES, [].append, Config.__eq__.__get__(1)], ids=told)
def test_objects_with_a_value_and_a_hash_are_compared_by_value(value):
    assert kind_of(value) == pytree.EQUAL
    assert flatten([value], "x").objects == (("x[0]", value),)


@pytest.mark.parametrize("value", [*SAME_VALUES, (lambda: 0), torch.Generator()], ids=told)
def test_other_objects_are_compared_by_identity(value):
    assert kind_of(value) == pytree.SAME
    assert flatten({"k": value}, "x").objects == (("x['k']", value),)
    assert not fits(flatten({1}, "x").program, {1})


def test_a_bound_method_made_anew_still_matches():
    module = torch.nn.Linear(1, 1)
    assert fits(flatten(module.forward, "x").program, module.forward)
    assert not fits(flatten(module.forward, "x").program, torch.nn.Linear(1, 1).forward)


@pytest.mark.parametrize(
    ("recorded", "value", "hit"),
    [
        (1, 1, True),
        (1, True, False),
        (1, 1.0, False),
        (0.0, -0.0, False),
        (math.nan, float("nan"), True),
        (math.nan, -math.nan, False),
        (complex(0, -0.0), complex(0, 0.0), False),
        (complex(0, math.nan), complex(0, math.nan), True),
        ("ab", "".join(["a", "b"]), True),
        ("a", b"a", False),
        (None, False, False),
        (range(0, 3, 2), range(0, 4, 2), False),
        (slice(0, 1), slice(0, 1), True),
        (slice(0, 1), slice(False, 1), False),
        (torch.Size([1]), (1,), False),
        (torch.Size([1]), torch.Size([1]), True),
        (torch.device("cuda"), torch.device("cuda", 0), False),
        (Level.ONE, 1, False),
        (numpy.float32(math.nan), numpy.float32(math.nan), True),
        (numpy.float64(0.0), numpy.float64(-0.0), False),
        (numpy.float64(0.0), 0.0, False),
        (numpy.datetime64("2020", "Y"), numpy.datetime64("2020-01", "M"), False),
        (Version(1), Version(1), True),
        (Version(1), Version(2), False),
        ({1: 0}, {True: 0}, False),
        ({(1, 2): 0}, {(1.0, 2): 0}, False),
        ({"a": 0, "b": 0}, {"b": 0, "a": 0}, False),
        (Point(1, 2), (1, 2), False),
        ([1], [], False),
        ([1], [1, 2], False),
        ((), (1,), False),
        (Pair(1, 2, "note"), Pair(1, 2, "another"), False),
    ],
    ids=told,
)
def test_what_hits(recorded, value, hit):
    assert fits(flatten(recorded, "x").program, value) == hit
    assert fits(flatten([recorded], "x").program, [value]) == hit


def test_paths_of_every_container():
    one = torch.ones(1)
    tree = {
        "x": Config([one], Point(1, one)),
        3: collections.OrderedDict(k=one),
        "d": collections.deque([one]),
        "m": torch.max(torch.ones(2, 2), 0),
        "r": Registered(None, one),
        "p": Pair(one, 1, "note"),
    }
    assert flatten_call((tree,), {"it's": one}).paths == (
        "args[0]['x'].x[0]",
        "args[0]['x'].y.y",
        "args[0][3]['k']",
        "args[0]['d'][0]",
        "args[0]['m'][0]",
        "args[0]['m'][1]",
        "args[0]['r'].y",
        "args[0]['p'][0]",
        'kwargs["it\'s"]',
    )


def test_a_tensor_subclass_is_a_tensor_leaf_with_its_exact_type():
    parameter = torch.nn.Parameter(torch.ones(1))
    program = flatten(parameter, "x").program
    assert program == ((pytree.TENSOR, 0, torch.nn.Parameter),)
    assert not fits(program, parameter.data)


def test_what_only_claims_to_be_a_tensor_is_none():
    class Proxy:
        __class__ = torch.Tensor

    assert kind_of(Proxy()) == pytree.SAME


@pytest.mark.parametrize("kind", [Config, Frozen, Slotted])
def test_a_dataclass_is_rebuilt_without_its_init(kind):
    value = kind(torch.ones(1), {"a": 1})
    flat = flatten(value, "x")
    own = len(getattr(value, "__dict__", ()))
    assert flat.program[0][::2] == (pytree.DATACLASS, (kind, tuple(kind.__dataclass_fields__), own))
    again = unflatten(flat.program, flat.tensors)
    assert type(again) is kind and again.y == {"a": 1} and again.y is not value.y
    assert getattr(again, "total", 1) == 1  # __post_init__ would have counted to 2


def test_a_rebuilt_dataclass_runs_no_code_of_its_class():
    made = []

    @dataclasses.dataclass
    class Counted:
        x: Any

        def __post_init__(self):
            made.append(self)

    flat = flatten(Counted(1), "x")
    assert unflatten(flat.program, flat.tensors) == made[0] and len(made) == 1


def test_a_module_is_compared_by_identity_even_if_it_has_a_value():
    class Layer(torch.nn.Module):
        def __eq__(self, other):
            return True

        def __hash__(self):
            return 0

    assert kind_of(Layer()) == pytree.SAME


def test_what_post_init_left_beside_the_fields_is_kept_and_guarded():
    value = Config(1, 2)
    value.scale = 3.0
    program = flatten(value, "x").program
    assert unflatten(program, ()).scale == 3.0
    other = Config(1, 2)
    assert not fits(program, other)
    other.scale = 4.0
    assert not fits(program, other)
    other.scale = 3.0
    assert fits(program, other)


def test_a_dataclass_that_is_a_dict_or_a_module_too_is_one_leaf():
    @dataclasses.dataclass
    class Output(dict):
        x: Any = None

    @dataclasses.dataclass(eq=False)
    class Layer(torch.nn.Module):
        def __post_init__(self):
            super().__init__()

    assert kind_of(Output(torch.ones(1))) == pytree.SAME
    assert kind_of(Layer()) == pytree.SAME


def test_a_torch_return_type_and_a_registered_node_are_custom():
    for value in (torch.max(torch.ones(2, 2), 0), Pair(torch.ones(1), 2, "note")):
        flat = flatten(value, "x")
        kind, _, (custom_type, flatten_fn, context, unflatten_fn) = flat.program[0]
        assert (kind, custom_type) == (pytree.CUSTOM, type(value))
        assert flatten_fn(value)[1] == context
        assert type(unflatten_fn(list(flatten_fn(value)[0]), context)) is type(value)
    assert kind_of(Registered(1)) == pytree.CUSTOM  # registered wins over dataclass


def test_containers_inside_each_other_are_not_cycles():
    shared = [torch.ones(1)]
    flat = flatten([shared, shared, (shared, {"a": shared})], "x")
    assert len(flat.tensors) == 4 and len(set(map(id, flat.tensors))) == 1


def test_a_wrong_number_of_tensors_is_refused():
    program = flatten([torch.ones(1), 2], "x").program
    with pytest.raises(CgtError, match="2 tensors came for a program with 1 tensor leaves"):
        unflatten(program, (torch.ones(1),) * 2)


# ---- static arguments -----------------------------------------------------------------------


def test_static_arguments_are_one_leaf_each():
    call = (torch.ones(1), (1, Config), Frozen(1, 2)), {"mode": (1, 2), "x": (1, 2)}
    static = {"static_argnums": (-1, 1, 9, -9), "static_names": ("mode", "absent")}
    flat = flatten_call(*call, **static)
    assert [op[0] for op in flat.program] == [
        *(pytree.TUPLE, pytree.TENSOR, pytree.EQUAL, pytree.EQUAL),
        *(pytree.DICT, pytree.EQUAL, pytree.TUPLE, pytree.PLAIN, pytree.PLAIN),
    ]
    assert [path for path, _ in flat.objects] == ["args[1]", "args[2]", "kwargs['mode']"]
    assert fits(flat.program, *call, **static) and flat.tensors == (call[0][0],)
    for wrong in ((1.0, Config), (1,), [1, Config]):
        assert not fits(flat.program, (call[0][0], wrong, call[0][2]), call[1], **static)
    assert unflatten_call(flat.program, flat.tensors) == call


def test_a_static_float_is_compared_by_its_bits():
    program = flatten_call((0.0, math.nan), {}, static_argnums=(0, 1)).program
    assert fits(program, (0.0, float("nan")), {}, static_argnums=(0, 1))
    assert not fits(program, (-0.0, float("nan")), {}, static_argnums=(0, 1))


def test_a_static_function_is_compared_by_identity():
    program = flatten_call((a_function,), {}, static_argnums=(0,)).program
    assert program[1] == (pytree.EQUAL, 0, a_function)
    assert fits(program, (a_function,), {}, static_argnums=(0,))
    assert not fits(program, (lambda: 0,), {}, static_argnums=(0,))


@pytest.mark.parametrize(
    ("then", "now", "told"),
    [
        ((1, [2]), (1, [3]), ("args[1][0]", "2", "3")),
        ((1,), (1, "more"), ("args[1]", "nothing", "'more'")),
        (({"a": 1, "b": 2},), ({"a": 1},), ("args[0]['b']", "2", "nothing")),
        ((Config(1, 2),), (Config(1, 3),), ("args[0].y", "2", "3")),
        ((torch.ones(1),), (torch.nn.Parameter(torch.ones(1)),), None),
        ((torch.ones(1),), (1.0,), ("args[0]", "a tensor", "1.0")),
        ((object(),), (object(),), None),
        ((1, 1), (1, 1), None),
    ],
)  # fmt: skip
def test_the_first_leaf_that_differs_is_told(then, now, told):
    recorded = flatten_call(then, {})
    assert pytree.first_difference((recorded.program, recorded.where), flatten_call(now, {})) == told


def test_a_number_that_may_be_any_differs_from_none_that_a_recording_is_for():
    fixed, live = flatten_call((1.0,), {}), flatten_call((2.0,), {}, live={"args[0]"})
    assert pytree.first_difference((fixed.program, fixed.where), live) == ("args[0]", "1.0", "2.0")
    assert pytree.first_difference((live.program, live.where), fixed) is None


# ---- errors ---------------------------------------------------------------------------------


class Broken:
    def __eq__(self, other):
        raise ZeroDivisionError("no")

    __hash__ = object.__hash__


class Elementwise:
    def __eq__(self, other):
        return [True]

    def __hash__(self):
        return 0


class BrokenHashed(Broken):
    def __hash__(self):
        return 0


class TensorTuple(tuple):
    pass


def cyclic_list():
    tree = [1]
    tree.append({"self": tree})
    return tree


def cyclic_dataclass():
    tree = Config(1, 2)
    tree.y = (tree,)
    return tree


ERRORS = {
    "numpy": ({"x": numpy.ones(2)}, "args[0]['x'] is a numpy.ndarray, and cgt cannot compare it"),
    "numpy masked": (numpy.ma.ones(2), "args[0] is a numpy.ma.MaskedArray, and cgt cannot compare"),
    "cycle": (cyclic_list(), "args[0] contains itself, at args[0][1]['self']"),
    "cycle, dataclass": ([cyclic_dataclass()], "args[0][0] contains itself, at args[0][0].y[0]"),
    "== raises": ([BrokenHashed()], "args[0][0] is a BrokenHashed whose == with itself gives Zero"),
    "== is a list": (Elementwise(), "args[0] is a Elementwise whose == with itself gives [True]"),
    "hidden tensor": (TensorTuple([torch.ones(1)]), "args[0] is compared as a whole, but it is or"),
    "slice": (slice(torch.ones(1)), "args[0] is compared as a whole, but it is or holds a tensor"),
    "key": ({torch.ones(1): 1}, "The key tensor([1.]) of args[0] is compared as a whole"),
    "context": (Pair(1, 2, torch.ones(1)), "The pytree context of args[0] is compared as a whole"),
}
STATIC_ERRORS = {
    "list": ([1], "args[0] is static, but this list is not hashable", "Pass a tuple instead."),
    "dict": ({}, "args[0] is static, but this dict", "Pass a tuple of its items instead."),
    "nested": (([1],), "args[0] is static, but this tuple", "Pass something hashable instead."),
    "tensor": (torch.ones(2), "args[0] is compared as a whole, but it is or holds a", "static."),
    "tuple": ((torch.ones(2),), "args[0] is compared as a whole, but it is or holds", "static."),
    "dataclass": (Slotted(torch.ones(2), 1), "args[0] is compared as a whole", "static."),
    "numpy": (numpy.ones(1), "args[0] is a numpy.ndarray", "(array)."),
}


@pytest.mark.parametrize(("value", "start"), ERRORS.values(), ids=ERRORS)
def test_an_error_names_the_leaf_and_what_to_do(value, start):
    with pytest.raises(CgtError) as caught:
        flatten_call((value,), {})
    message = str(caught.value)
    assert message.startswith(f"CGT228: {start}")
    assert message.endswith(".") and ". " in message


@pytest.mark.parametrize(("value", "start", "end"), STATIC_ERRORS.values(), ids=STATIC_ERRORS)
def test_a_static_argument_that_cannot_be_compared_is_refused(value, start, end):
    with pytest.raises(CgtError) as caught:
        flatten_call((value,), {}, static_argnums=(0,))
    assert str(caught.value).removeprefix("CGT228: ").startswith(start) and str(caught.value).endswith(end)


def test_the_advice_of_the_errors_works():
    assert kind_of(torch.from_numpy(numpy.ones(2))) == pytree.TENSOR
    assert kind_of(Broken()) == pytree.SAME  # __hash__ is object's again
    assert kind_of((1, 2), static=("x",)) == pytree.EQUAL


def test_an_equality_that_fails_later_is_a_miss():
    class Moody(Version):
        def __eq__(self, other):
            if other is not self:
                raise ValueError
            return True

        __hash__ = Version.__hash__

    assert not fits(flatten(Moody(1), "x").program, Moody(1))


def test_pytree_works_without_numpy():
    code = "import sys; sys.modules['numpy'] = None; from cgt.words.pytree import flatten; "
    code += "print(flatten([1, object], 'x').program)"
    environment = {"PYTHONPATH": ":".join(sys.path), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment,
        text=True,
        capture_output=True,
        check=True,
    )
    assert "(1, 0, 1)" in done.stdout
