"""Trees: a call's arguments as tensors and a program that describes everything else.

    f([a, 3], x=b)      TUPLE 1            paths    args[0][0]  kwargs['x']
                          LIST 2           tensors  a           b
                            TENSOR
                            PLAIN 3
                        DICT 1 ('x',)
                          TENSOR

A program is a tuple of ops `(kind, n, obj)` in pre-order: after an op come its `n` children, each
followed by its own. Tomorrow's arguments fit if their program is the same (`same_program`); the core compares them
with it in one walk that builds nothing. What a program does not mention is not guarded, so the rule is to be strict:
exact types, 1 is not True, -0.0 is not 0.0.

A program keeps alive every constant and every type that it names, but no tensor.
"""

import collections
import dataclasses
import enum
import functools
import itertools
import operator
import struct
import sys
import types
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from cgt_core import CUSTOM, DATACLASS, DICT, EQUAL, LIST, LIVE, NAMEDTUPLE, NONE, PLAIN, SAME, TENSOR, TUPLE
from torch.utils import _pytree as torch_pytree

from . import errors, wrappers
from .errors import CgtError
from .private import outside_dynamo

PLAIN_TYPES = frozenset(
    {type(None), type(...), type(NotImplemented), bool, int, float, complex, str, bytes, range}
    | {slice, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
)
FIXED_TYPES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
HASHABLE_INSTEAD = {list: "a tuple", dict: "a tuple of its items", set: "a frozenset"}
LEAVES = frozenset((TENSOR, PLAIN, SAME, EQUAL, LIVE))
HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made at run time, not a C type such as dict


class Incomparable(CgtError):
    """An argument that no later call can be compared by, although nothing was said of it."""


ROOT = "result"  # the path of what a call returns or keeps
MOST = 1 << 62  # a whole number that is live is no larger: C computes with it


def array_of(words: torch.Tensor) -> Any:
    """An array of its own."""
    return words.clone().numpy()


class Readout:
    """A leaf of a result that is no tensor: what will be made of bytes on the host. Nobody looks at it (readout.py),
    but for comparisons and arithmetic of a number. It changes when the run is over: the function may keep it, and what
    it could do with it then must end."""

    __slots__ = ("words", "make", "line", "compare", "compute", "read", "row")
    __array_ufunc__ = None  # numpy leaves arithmetic to it

    def __init__(self, words, make, line, compare=None, compute=None, read=None, row=NONE):
        self.words = words  # where a replay leaves the bytes; None: it is only compared
        self.make = make  # of these, what is returned
        self.line = line  # of the user's, that asks for it
        self.compare = compare  # (operator, other) -> bool, while the function runs
        self.compute = compute  # (operator, operands) -> what arithmetic gives, while the function runs
        self.read = read  # () -> the number, while the function runs
        self.row = row  # of the recording's numbers, the one that it is; then nothing is left anywhere

    def _comparison(op: Any):
        return lambda self, other: NotImplemented if self.compare is None else self.compare(op, other)

    __lt__, __le__, __gt__, __ge__ = map(_comparison, (operator.lt, operator.le, operator.gt, operator.ge))
    __eq__, __ne__ = _comparison(operator.eq), _comparison(operator.ne)
    __hash__ = None  # type: ignore[assignment]  # which is how Python says that there is none

    def _arithmetic(op: Any):
        made = lambda one, *given: NotImplemented if one.compute is None else one.compute(op, given)  # noqa: E731
        return (lambda self, *others: made(self, self, *others)), lambda self, other: made(self, other, self)

    __neg__, _ = _arithmetic(operator.neg)
    __add__, __radd__ = _arithmetic(operator.add)
    __sub__, __rsub__ = _arithmetic(operator.sub)
    __mul__, __rmul__ = _arithmetic(operator.mul)
    __truediv__, __rtruediv__ = _arithmetic(operator.truediv)

    def _asked(make: Any):
        return lambda self: Readout(self.words, make, self.line)

    # Torch's methods as they are while nobody observes.
    item, tolist, numpy = map(_asked, (torch.Tensor.item, torch.Tensor.tolist, array_of))


class Flat(NamedTuple):
    program: tuple  # ops
    tensors: tuple  # tensor leaves, in order
    paths: tuple  # of each tensor leaf: "args[0]['x'].w"
    objects: tuple  # (path, object) of every SAME and EQUAL leaf, in order
    numbers: tuple = ()  # (path, number) of every LIVE leaf, in order
    where: tuple = ()  # the path of each op


def flatten(tree: object, path: str, static: Iterable[str] = (), objects: Any = None) -> Flat:
    """Paths begin with `path`; what has one in `static` is one leaf. `objects`: opens those that it knows."""
    return _flattened([(tree, path)], static, objects)


def _flattened(trees, static=(), objects=None, live=()):
    """Trees, each with its path, one after the other. `live`: paths of numbers that are others at each call."""
    out = Flat([], [], [], [], [], [])  # type: ignore[arg-type]  # while they grow
    for tree, path in trees:
        _flatten_into(out, tree, path, frozenset(static), {}, objects, live)
    return Flat(*map(tuple, out))


def flatten_result(result: object, is_made: Callable[[torch.Tensor], bool], is_own: bool) -> Flat:
    """`flatten` of a result, which nobody else holds if it `is_own`. So was made in the call an object that nobody else
    holds, with tensors that the call made (is_made(t)): its attributes are leaves, and a replay makes another one."""
    objects = Objects(is_made, [])
    flat = flatten(result, ROOT, objects=objects)
    return flatten(result, ROOT) if _held_elsewhere(objects.opened, result, objects.opened, is_own) else flat


def find_shared(result: object, is_own: bool) -> list[list | dict]:
    """The lists and dicts of a result that somebody else holds, too. is_own: see flatten_result."""
    ones = [one for one in _met_in([result]) if issubclass(type(one), (list, dict))]
    return _held_elsewhere(ones, result, (), is_own)


def flatten_put(value: object, is_made: Callable[[torch.Tensor], bool], numbers: Container[str]) -> Flat:
    """The same of what the call left in a place. `numbers`: paths of those that are others at each call."""
    return _flattened([(value, ROOT)], (), Objects(is_made, []), numbers)


def find_held(result: object, values: list[list], is_made: Callable[[torch.Tensor], bool]) -> list[object]:
    """Of what can be made anew in these lists, each of whose entries lies in a place of its own besides: those that
    somebody else holds, or that are met once more, inside of another one or in the result."""
    objects, roots = Objects(is_made, []), collections.Counter(id(value) for row in values for value in row)
    came = [value for row in values for value in row]
    _flattened([(one, ROOT) for one in came], objects=objects)
    is_open = _is_made_anew(objects.opened)
    objects.opened.clear()
    ones = [one for one in _met_in(came, is_open) if not issubclass(type(one), tuple)]
    ones = [one for one in ones if issubclass(type(one), (list, dict)) or is_open(one)]
    inside = _holders_inside([result, *came], is_open)
    counted = zip(ones, _references(ones), strict=True)
    others = [(x, n, inside[id(x)], roots[id(x)]) for x, n in counted]
    return [x for x, n, held, places in others if held > max(1, places) or n - PASSING > held + 2 * places]


def tensors_in(value: object) -> tuple[torch.Tensor, ...]:
    """Those in what a call could have made."""
    try:
        return flatten_put(value, lambda _: True, ()).tensors
    except Exception:  # the user's own: it cannot be made anew
        return ()


def leaves_in(tree: object) -> list[object]:
    """What is in tuples, lists and dicts and is none of them."""
    return [one for one in _met_in([tree]) if not issubclass(type(one), (tuple, list, dict))]


class Objects(NamedTuple):
    """Which objects of a result can be made anew."""

    is_made: Callable[[torch.Tensor], bool]
    opened: list  # those that can

    def names_of(self, value):
        """The names of its attributes; None if it is to stay one leaf: instances that are more than their dict, that
        hold nothing of the call's, or that are met twice."""
        state = getattr(value, "__dict__", None)
        if type(state) is not dict or not _is_bare(value) or any(value is one for one in self.opened):
            return None
        if not any(issubclass(type(one), torch.Tensor) and self.is_made(one) for one in _met_in([value], _is_bare)):
            return None
        self.opened.append(value)
        return tuple(state)


def _references(ones):
    return [sys.getrefcount(one) for one in ones]


def _held_elsewhere(ones, result, opened, is_own):
    """Those of these parts of a result that somebody else holds, too."""
    inside = _holders_inside([result], _is_made_anew(opened)) if ones else {}
    counted = zip(ones, _references(ones), strict=True)
    return [one for one, n in counted if (not is_own if one is result else n - PASSING > inside[id(one)])]


def _is_made_anew(opened):
    """A function: may a replay make this object anew, as it may these?"""
    known = set(map(id, opened))
    anew = lambda kind: kind in torch_pytree.SUPPORTED_NODES or dataclasses.is_dataclass(kind)  # noqa: E731
    return lambda one: id(one) in known or anew(type(one))


def _holders_inside(roots, is_open):
    """{id: how many holders it has in these trees}. A registered container may be a dict with attributes, too."""
    inside = collections.Counter(id(child) for one in _met_in(roots, is_open) for child in _children(one, is_open))
    inside.update(map(id, roots))
    return inside


def _met_in(roots, is_open=None):
    """What trees of tuples, lists and dicts consist of, each once; and of those objects of which `is_open` says so."""
    todo, met = list(roots), {}
    while todo:
        one = todo.pop()
        if id(one) not in met:
            met[id(one)] = one
            todo += _children(one, is_open)
    return list(met.values())


def _children(one, is_open):
    children = list(one) if issubclass(type(one), (list, tuple)) else []
    children += dict.values(one) if issubclass(type(one), dict) else ()
    state = getattr(one, "__dict__", None) if is_open is not None and is_open(one) else None
    return children + list(state.values()) if type(state) is dict else children


PASSING = _references([object()])[0]  # what holds an object while it is counted: a list, a name, an argument


# What says how an object is made, copied or let go of.
MAKERS = (
    "__new__", "__del__", "__getattribute__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__",
    "__copy__", "__deepcopy__",
)  # fmt: skip


def is_simple(kind: type) -> bool:
    """Are instances of this class what their dict says, and nothing else?"""
    bases = [base for base in kind.__mro__ if base is not object and base is not types.SimpleNamespace]
    plain = (base.__flags__ & HEAP_TYPE and not vars(base).get("__slots__") for base in bases)
    return all(plain) and not any(name in vars(base) for base in bases for name in MAKERS)


def _is_bare(one):
    """Is it what its dict says, and no module?"""
    return is_simple(type(one)) and not issubclass(type(one), torch.nn.Module)


def flatten_call(
    args: tuple, kwargs: dict, static_argnums: Iterable[int] = (), static_names: Iterable[str] = (),
    live: Container[str] = (),
) -> Flat:  # fmt: skip
    """Flatten a call: its program is that of `args` followed by that of `kwargs`. `live`: see _flattened."""
    static = {f"args[{i + len(args) if i < 0 else i}]" for i in static_argnums}
    static |= {f"kwargs[{name!r}]" for name in static_names}
    return _flattened([(args, "args"), (kwargs, "kwargs")], static, live=live)


def unflatten(program: Collection[tuple], tensors: Sequence[torch.Tensor | Readout]) -> object:
    """Build the tree anew: fresh containers, the recorded constants, these tensors."""
    return maker(program)(_counted(program, tensors))


def unflatten_call(program: Collection[tuple], tensors: Sequence[torch.Tensor]) -> tuple[tuple, dict]:
    """Build `(args, kwargs)` from a program of `flatten_call`."""
    ops, count, given = iter(program), itertools.count(), _counted(program, tensors)
    return _maker(ops, count)(given), _maker(ops, count)(given)


def maker(program: Collection[tuple]) -> Callable[[Sequence], Any]:
    """What builds a program's tree of tensors, as often as it is called: `unflatten` in two steps, the first of which
    takes most of the time."""
    return _maker(iter(program), itertools.count())


def first_difference(
    recorded: tuple[tuple, tuple], flat: Flat, any_of: Collection[int] = (SAME, LIVE)
) -> tuple[str, str, str] | None:
    """(path, what a recorded call had there, what this one has), as texts, of the first leaf in which they differ, but
    for those that may be any: objects, and numbers that follow; or None. `recorded`: (program, where). For messages."""
    numbers = {path: (PLAIN, 0, number) for path, number in flat.numbers}
    then, now = leaves_of(*recorded), leaves_of(flat.program, flat.where) | numbers
    for path in dict.fromkeys((*then, *now)):
        was: Any = then.get(path)
        one: Any = now.get(path)
        if not (was and one and (was[0] in any_of or was[0] == one[0] == TENSOR or _same_op(was, one))):
            return path, told_leaf(was), told_leaf(one)
    return None


def leaves_of(program: tuple, where: tuple) -> dict[str, tuple]:
    """{path: op} of a call's leaves."""
    return {path: op for op, path in zip(program, where, strict=True) if op[0] in LEAVES}


def told_leaf(op: tuple | None) -> str:
    if op is None or op[0] in (TENSOR, SAME):
        return "nothing" if op is None else "a tensor" if op[0] == TENSOR else "an object"
    try:
        return repr(op[2])[:40]
    except Exception:  # the user's own, which no message of ours may raise
        return f"a {type(op[2]).__qualname__}"


def same_program(recorded: tuple, program: tuple) -> bool:
    """Whether what the second one is of fits the first, which may hold objects weakly (dispatch.find_spec)."""
    return len(recorded) == len(program) and all(map(_same_op, recorded, program))


def _same_op(recorded, op):
    (kind, n, was), (now_kind, now_n, now) = recorded, op
    if (kind, n) != (now_kind, now_n):
        return False
    if kind == SAME and type(was) is weakref.ref and type(now) is not weakref.ref:
        return was() is now
    return was is now if kind in (TENSOR, LIVE, SAME, NAMEDTUPLE) else same_value(was, now)


BOUNDS = operator.attrgetter("start", "stop", "step")
PARTS = {complex: operator.attrgetter("real", "imag"), range: BOUNDS, slice: BOUNDS}


def is_fixed(value: Any) -> bool:
    """Is this the same wherever it is?"""
    if type(value) is tuple or type(value) is torch.Size:
        return all(map(is_fixed, tuple.__iter__(value)))
    return any(type(value) is kind for kind in FIXED_TYPES)


def same_value(recorded: Any, value: Any) -> bool:
    """Whether two constants are one value: exact type and ==, stricter where == is too generous.

    Floats are compared by their bits: a nan must not miss for ever, nor -0.0 hit 0.0. Ranges that are equal as
    sequences may differ in `stop`. Tuples, lists and dicts (what torch's pytrees tell of a container) are entered
    because (1,) == (True,). A failing == is a difference: the flatten that follows the miss explains it.
    """
    kind = type(recorded)
    if type(value) is not kind or value is recorded:
        return value is recorded
    if kind is float:
        return struct.pack("d", recorded) == struct.pack("d", value)
    if kind in PARTS:
        return same_value(PARTS[kind](recorded), PARTS[kind](value))
    if kind is tuple or kind is list:
        return len(recorded) == len(value) and all(map(same_value, recorded, value))
    if kind is dict:
        return same_value([*recorded.items()], [*value.items()])
    if _is_numpy(kind, "generic"):
        return recorded.dtype == value.dtype and recorded.tobytes() == value.tobytes()
    try:
        return (recorded == value) is True
    except Exception:
        return False


def _flatten_into(out, value, path, static, ancestors, objects, live):
    """Append to the lists of `out`. `ancestors` maps the id of each open container to its
    path; every one of them is alive further up the stack, so no id is reused."""
    is_static = path in static
    out.where.append(path)
    value = value if objects is None else wrappers.waited_for(value)
    # A proxy would lie to isinstance.
    is_tensor = issubclass(type(value), torch.Tensor) and not is_static and not _is_opened(value, objects)
    if is_tensor or type(value) is Readout:
        out.program.append((TENSOR, 0, type(value) if is_tensor else value))
        out.tensors.append(value if is_tensor else value.words)
        out.paths.append(path)
        return
    if path in live and not is_static and (type(value) is float or (type(value) is int and abs(value) <= MOST)):
        out.program.append((LIVE, 0, type(value)))
        out.numbers.append((path, value))
        return
    opened = None if is_static else _open(value, path, objects)
    if opened is None:
        kind = _leaf_kind(value, path, is_static)
        out.program.append((kind, 0, value))
        if kind != PLAIN:
            out.objects.append((path, value))
        return
    op, children, steps = opened
    if ancestors.setdefault(id(value), path) != path:
        first, instead = ancestors[id(value)], "Pass its parts as separate arguments."
        raise Incomparable(errors.not_compared(first, f"contains itself, at {path}", instead))
    out.program.append(op)
    for child, step in zip(children, steps, strict=True):
        _flatten_into(out, child, path + step, static, ancestors, objects, live)
    del ancestors[id(value)]


def _is_opened(t, objects):
    """Is this tensor a container of others? Autograd knows it as one, so not where it would want to; and a result is
    another one each time, so not one that was there before."""
    opened = not t.requires_grad and wrappers.is_one(t)
    return opened and (objects is None or all(map(objects.is_made, wrappers.plain_inside(t))))


def _open(value, path, objects):
    """A container as (op, children, the path's step to each child), or None for a leaf."""
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        children, context = wrappers.flatten(value)
        obj = (kind, wrappers.flatten, context, wrappers.unflatten)
        return (CUSTOM, len(children), obj), children, _attributes(wrappers.names(value))
    if kind is tuple or kind is list:
        children, op = tuple(value), TUPLE if kind is tuple else LIST
        return (op, len(children), None), children, [f"[{i}]" for i in range(len(children))]
    if kind is dict:
        for key in value:
            _check_comparable(key, f"The key {key!r} of {path}")
        op = (DICT, len(value), tuple(value))
        return op, tuple(value.values()), [f"[{key!r}]" for key in value]
    if _is_plain(value) or isinstance(value, torch.nn.Module):  # even if it is a dataclass too
        return None
    if is_namedtuple(value):
        return (NAMEDTUPLE, len(value), kind), tuple(value), _attributes(kind._fields)
    registered = torch_pytree.SUPPORTED_NODES.get(kind)
    if registered:
        return _open_registered(value, registered, path)
    if dataclasses.is_dataclass(kind):
        return _open_dataclass(value)
    names = objects and objects.names_of(value)
    about = names and (kind, names, len(names))
    return ((DATACLASS, len(names), about), vars(value).values(), _attributes(names)) if names else None


def _attributes(names):
    return [f".{name}" for name in names]


def _open_registered(value, registered, path):
    """The same of a container that somebody registered with torch's pytrees."""
    children, context = registered.flatten_fn(value)
    children = tuple(children)
    _check_comparable(context, f"The pytree context of {path}")
    steps = [f"[{i}]" for i in range(len(children))]
    if registered.flatten_with_keys_fn:
        steps = [str(key) for key, _ in registered.flatten_with_keys_fn(value)[0]]
    obj = (type(value), registered.flatten_fn, context, registered.unflatten_fn)
    return (CUSTOM, len(children), obj), children, steps


def _open_dataclass(value):
    """The same of an instance of a dataclass."""
    kind = type(value)
    if not all(base is object or base.__flags__ & HEAP_TYPE for base in kind.__mro__):
        return None  # it extends dict, say: object.__new__ cannot rebuild that
    names = [field.name for field in dataclasses.fields(kind)]
    # What __post_init__ left beside the fields: the function may read it, so it is guarded too.
    own = getattr(value, "__dict__", ())
    names += sorted(name for name in own if name not in names)
    names = [name for name in names if hasattr(value, name)]  # a field may be set later
    children = tuple(getattr(value, name) for name in names)
    about = (kind, tuple(names), len(own))
    return (DATACLASS, len(names), about), children, _attributes(names)


def is_namedtuple(value: object) -> bool:
    return isinstance(value, tuple) and isinstance(getattr(type(value), "_fields", None), tuple)


def _leaf_kind(value, path, is_static):
    """PLAIN, SAME or EQUAL. A static argument is PLAIN or EQUAL, or refused."""
    kind = type(value)
    if _is_plain(value):
        if kind is slice:
            _check_comparable(BOUNDS(value), path)
        return PLAIN
    refusal = CgtError if is_static else Incomparable
    if _is_numpy(kind) and hasattr(kind, "__array__"):
        what, instead = f"is a {kind.__module__}.{kind.__qualname__}", "Pass a tensor: torch.from_numpy(array)."
        raise refusal(errors.not_compared(path, what, instead))
    try:
        hash(value)
    except Exception as error:
        if not is_static:
            return SAME
        instead = HASHABLE_INSTEAD.get(kind, "something hashable")
        what = f"is static, but this {kind.__qualname__} is not hashable"
        raise CgtError(errors.not_compared(path, what, f"Pass {instead} instead.")) from error
    has_value = kind.__eq__ is not object.__eq__ and kind.__hash__ is not object.__hash__
    if not is_static and (isinstance(value, torch.nn.Module) or not has_value):
        return SAME
    _check_comparable(value, path, refusal)
    return EQUAL


def _check_comparable(value, path, error=Incomparable):
    """Refuse what == cannot compare with tomorrow's value, now and not as misses later."""
    if _is_plain(value):
        return
    if _holds_tensor(value):
        what = "is compared as a whole, but it is or holds a tensor, whose == is no yes or no"
        raise error(errors.not_compared(path, what, "Pass the tensor as an argument that is not static."))
    try:
        equal = value == value
    except Exception as failure:
        equal = failure
    if equal is not True:
        what = f"is a {type(value).__qualname__} whose == with itself gives {equal!r}"
        instead = "Mend __eq__, or drop __eq__ and __hash__ to have it compared by identity."
        raise error(errors.not_compared(path, what, instead)) from (equal if isinstance(equal, Exception) else None)


def _holds_tensor(value):
    # Looked for because (a,) == (a,) is True by identity and (a,) == (b,) is bool(a == b).
    if isinstance(value, (tuple, list, frozenset)):
        return any(map(_holds_tensor, value))
    if dataclasses.is_dataclass(type(value)) and type(value).__eq__ is not object.__eq__:
        names = [field.name for field in dataclasses.fields(value)]
        return any(_holds_tensor(getattr(value, name, None)) for name in names)
    return issubclass(type(value), torch.Tensor)


def _is_plain(value):
    kind = type(value)
    return kind in PLAIN_TYPES or issubclass(kind, (enum.Enum, type)) or _is_numpy(kind, "generic")


def _is_numpy(kind, name=None):
    # By name, so that cgt works without numpy and never imports it.
    bases = [base for base in kind.__mro__ if str(base.__module__).split(".")[0] == "numpy"]
    return any(name is None or base.__name__ == name for base in bases)


def _counted(program, tensors):
    """The tensors, as many as the program has leaves."""
    n_leaves = sum(kind == TENSOR for kind, _, _ in program)
    if n_leaves != len(tensors):
        raise CgtError(f"{len(tensors)} tensors came for a program with {n_leaves} tensor leaves.")
    return tensors


def _maker(ops, count):
    kind, n, obj = next(ops)
    if kind == TENSOR:
        return operator.itemgetter(next(count))
    if kind in (PLAIN, SAME, EQUAL):
        return lambda given: obj
    return functools.partial(_make, kind, obj, [_maker(ops, count) for _ in range(n)])


@outside_dynamo
def _make(kind, obj, makers, given):
    children = [make(given) for make in makers]
    if kind == DICT:
        return dict(zip(obj, children, strict=True))
    if kind == NAMEDTUPLE:
        return tuple.__new__(obj, children)
    if kind == CUSTOM:
        return obj[3](children, obj[2])
    if kind == DATACLASS:
        # Neither __init__ nor __post_init__: the attributes already hold what those two made.
        root = types.SimpleNamespace if issubclass(obj[0], types.SimpleNamespace) else object
        instance = root.__new__(obj[0])
        if not dataclasses.is_dataclass(obj[0]):
            vars(instance).update(zip(obj[1], children, strict=True))
            return instance
        for name, child in zip(obj[1], children, strict=True):
            object.__setattr__(instance, name, child)
        return instance
    return tuple(children) if kind == TUPLE else children
