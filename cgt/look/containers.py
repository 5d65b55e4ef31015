"""Containers among what a call is given: hyperparameters in a dict, a pair of betas, a dataclass of settings.

While a function is recorded, stand-ins take the places of numbers there that change (live.py). A list, a dict and a
dataclass keep their identity, which the function may ask for or store: their entries are exchanged, and put back behind
the run. A tuple is made anew. What a run that comes to nothing did to any of them is undone.

Those of tensors and constants, in places, are told by their shape: calls may make them anew (Opened)."""

import array
import collections
import contextvars
import operator
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from ..words.pytree import is_fixed, is_namedtuple
from . import blinds

# Larger containers are data, and so are longer lists and tuples of nothing but numbers.
MOST_ENTRIES, MOST_IN_ROW, DEEPEST = 64, 8, 4
FIELDS = "__dataclass_fields__"  # the module that tells them would count as code that ran, and opens objects


def parts_of(value: Any) -> list[tuple[str, Any, Any]]:
    """[(step of the path, key, child)] of a container that can be made anew or in place; else, or if large, []."""
    kind = type(value)
    if isinstance(value, (dict, list, tuple)) and len(value) > MOST_ENTRIES:
        return []
    if kind is dict:
        return [(f"[{key!r}]", key, x) for key, x in value.items() if type(key) in (str, int)]
    if kind is list or kind is tuple:
        return [(f"[{k}]", k, x) for k, x in enumerate(value)]
    if is_namedtuple(value):
        return [(f".{name}", k, x) for k, (name, x) in enumerate(zip(kind._fields, value, strict=False))]
    if hasattr(kind, FIELDS) and hasattr(value, "__dict__"):
        # No property in front of it.
        return [(f".{name}", name, x) for name, x in vars(value).items() if getattr(value, name, None) is x]
    return []


Parts = Callable[[Any], list[tuple[str, Any, Any]]]


def open_parts(value: Any) -> list[tuple[str, Any, Any]]:
    """The same, also of an object that Python code makes of its attributes."""
    found = parts_of(value)
    if found or not blinds.is_open(value):
        return found
    return [(f".{name}", name, x) for name, x in vars(value).items()]


class Opened(NamedTuple):
    """A tensor, or a tuple, list, dict or object of nothing but tensors, constants and such."""

    # Of a container (class, names of its entries or None, their shapes), of a tensor None, of a constant (None, None,
    # it), of a number that is live (None, its row, None).
    shape: Any
    tensors: tuple
    holders: tuple  # the container and those in it, of an object its dict, too

    @property
    def changes(self) -> bool:
        """Can somebody write to it?"""
        return any(type(one) in (list, dict) for one in self.holders)


def opened(value: Any) -> Opened | None:
    """None: it is, or contains, something else, or too much, or no tensor."""
    there = open_part(value)
    return there if there is not None and there.tensors else None


def open_part(value: Any, depth: int = DEEPEST) -> Opened | None:
    """The same of what may have no tensor."""
    if issubclass(type(value), torch.Tensor):
        return Opened(None, (value,), ())
    if type(value) is not tuple and is_fixed(value):
        return Opened((None, None, value), (), ())
    holders, names, entries = parts_held(value)
    is_small = holders and len(entries) <= MOST_ENTRIES and depth
    if not (is_small and all(type(name) is str for name in names or ())):
        return None
    found = [open_part(one, depth - 1) for one in entries]
    if None in found:
        return None
    shapes, tensors, inner = zip(*found, strict=True) if found else ((), (), ())
    return Opened((type(value), names, shapes), sum(tensors, ()), sum(inner, holders))


def are_alike(shape: Any, other: Any) -> bool:
    """Of two Opened: may calls make the one out of the other? Constants may be others."""
    if shape is None or other is None or shape[0] is None:
        return shape is other or (shape is not None and other is not None and other[0] is None)
    if shape[:2] != other[:2] or len(shape[2]) != len(other[2]):
        return False
    return all(map(are_alike, shape[2], other[2]))


def with_rows(shape: Any, path: str, rows: dict[str, int]) -> Any:
    """The shape of what lies at this path, where the numbers at these paths are live."""
    if shape is None or shape[0] is None:
        return (None, rows[path], None) if path in rows else shape
    kind, names, inner = shape
    fields = getattr(kind, "_fields", None) if names is None else names if kind is not dict else None
    steps = [f".{name}" for name in fields] if fields else [f"[{name!r}]" for name in names or range(len(inner))]
    return kind, names, tuple(with_rows(one, path + step, rows) for step, one in zip(steps, inner, strict=True))


def parts_held(value: Any) -> tuple[tuple, tuple | None, tuple]:
    """(holders, names, entries) as of Opened; nothing of what is no container."""
    kind = type(value)
    if kind is tuple or (issubclass(kind, tuple) and not kind.__dictoffset__ and is_namedtuple(value)):
        return (value,), None, tuple(tuple.__iter__(value))
    if kind is list:
        return (value,), None, tuple(value)
    if kind is dict:
        return (value,), tuple(value), tuple(value.values())
    if not blinds.is_open(value):
        return (), None, ()
    return (value, vars(value)), tuple(vars(value)), tuple(vars(value).values())


def named(args: tuple, kwargs: dict) -> list[tuple[str, object]]:
    """(path, value) of a call's arguments."""
    return [*((f"args[{k}]", x) for k, x in enumerate(args)), *((f"kwargs[{k!r}]", x) for k, x in kwargs.items())]


def numbers_of(path: str, value: Any, parts: Parts = parts_of, depth: int = DEEPEST) -> list[tuple[str, int | float]]:
    """[(path, number)] of a value: of itself, or of what it contains."""
    if type(value) in (int, float):
        return [(path, value)]
    inside = parts(value) if depth else []
    is_row = isinstance(value, (list, tuple)) and all(type(x) in (int, float) for *_, x in inside)
    if is_row and len(inside) > MOST_IN_ROW:
        return []
    return [one for step, _, x in inside for one in numbers_of(path + step, x, parts, depth - 1)]


def exchange(value: Any, path: str, given: dict[str, object], exchanged: list[tuple], parts: Parts = parts_of) -> Any:
    """The value with `given` in it, by their paths; these are taken out of it. What is exchanged in place is noted:
    (path, home, key, what was there, what is)."""
    if path in given:
        return given.pop(path)
    if not any(one.startswith((path + "[", path + ".")) for one in given):
        return value
    found = [(path + step, key, x, exchange(x, path + step, given, exchanged, parts)) for step, key, x in parts(value)]
    if isinstance(value, tuple) and found:
        now = [one for *_, one in found]
        return tuple(now) if type(value) is tuple else value._make(now)
    for at, key, x, now in found:
        if now is not x:
            home = value if isinstance(value, (dict, list)) else vars(value)
            exchanged.append((at, home, key, x, now))
            home[key] = now
    return value


def put_back(exchanged: list[tuple]) -> str | None:
    """What was there before; the path of an entry that is another one by now, or None."""
    changed = None
    while exchanged:
        at, home, key, was, now = exchanged.pop()
        if (home.get(key) if isinstance(home, dict) else home[key] if key < len(home) else None) is now:
            home[key] = was
        else:
            changed = at
    return changed


def replaced(value: Any, leaf: Callable[[Any], object], done: set[int]) -> Any:
    """The value with leaf(entry) for each entry of its tuples, lists and dicts: tuples anew, the others in place, as
    they may be the user's. They may hold themselves: `done` has ids of those that are."""
    kind = type(value)
    is_row = kind is tuple or is_namedtuple(value)
    if not (is_row or kind is list or kind is dict):
        return leaf(value)
    if id(value) in done:
        return value
    done.add(id(value))
    if is_row:
        parts = [replaced(one, leaf, done) for one in value]
        return value if all(map(operator.is_, parts, value)) else tuple.__new__(kind, parts)
    for key, one in list(enumerate(value) if type(value) is list else value.items()):
        value[key] = replaced(one, leaf, done)
    return value


# --- what they hold ---------------------------------------------------------------------------


def contents(values: Iterable[object]) -> list[tuple[dict | list, list]]:
    """[(dict or list, its entries)] of all that these values are or contain; of a dataclass, the dict of its fields."""
    found, waiting = {}, list(values)
    while waiting:
        value = waiting.pop()
        if not isinstance(value, (dict, list, tuple)):
            if not (hasattr(type(value), FIELDS) and hasattr(value, "__dict__")):
                continue
            value = vars(value)
        if isinstance(value, tuple):
            waiting += value
        elif id(value) not in found:
            found[id(value)] = value, entries(value)
            waiting += values_of(value)
    return list(found.values())


def values_of(home: dict | list) -> Iterable[object]:
    return list.__iter__(home) if isinstance(home, list) else dict.values(home)


ARRAYS: tuple = (bytearray, array.array, *filter(None, [getattr(sys.modules.get("numpy"), "ndarray", None)]))
NO_PLACES = (collections.deque, set, contextvars.ContextVar, threading.local, *ARRAYS)
MOST_BYTES = 1 << 20  # of all arrays together


def unguarded(values: Iterable[object]) -> list[Any]:
    """Those among these whose contents no guard compares, so that an audit does. Of arrays as many as are small
    together, and none that holds objects."""
    found, room = [], MOST_BYTES
    for value in [value for value in values if type(value) in NO_PLACES]:
        if isinstance(value, ARRAYS):
            objects = getattr(getattr(value, "dtype", None), "hasobject", False)
            nbytes = value.nbytes if hasattr(value, "nbytes") else memoryview(value).nbytes
            if objects or nbytes > room:
                continue
            room -= nbytes
        found.append(value)
    return found


def entries(home: Any) -> list:
    """What is in a dict, a list, or one of NO_PLACES: of an array its bytes, of the others what this thread sees."""
    if isinstance(home, dict):
        return list(dict.items(home))
    if isinstance(home, ARRAYS):
        return [bytes(home) if isinstance(home, bytearray) else home.tobytes()]
    if isinstance(home, contextvars.ContextVar):
        return [now] if (now := home.get(NO_PLACES)) is not NO_PLACES else []
    return list(vars(home).items() if isinstance(home, threading.local) else home)


def holds(home: Any, was: list) -> bool:
    """The very objects that it held?"""
    now = entries(home)
    if isinstance(home, ARRAYS):
        return now == was
    if isinstance(home, (dict, threading.local)):
        now, was = [x for pair in now for x in pair], [x for pair in was for x in pair]
    return len(now) == len(was) and all(map(operator.is_, now, was))


def restore(held: Iterable[tuple[Any, list]]) -> None:
    """Let them hold what they held. Past the methods of classes that people made, which may do more."""
    for home, was in held:
        if holds(home, was):
            continue
        if isinstance(home, ARRAYS):
            fill(home, *was)
        elif isinstance(home, contextvars.ContextVar):
            for value in was:  # one that had no value cannot be without one again
                home.set(value)
        else:
            home = vars(home) if isinstance(home, threading.local) else home
            kinds = (list, collections.OrderedDict, dict, collections.deque, set)
            kind: Any = next(k for k in kinds if isinstance(home, k))
            kind.clear(home)
            (kind.extend if kind in (list, collections.deque) else kind.update)(home, was)


def fill(home: Any, data: bytes) -> None:
    """An array has these bytes again. One of NumPy's that cannot be written is another one's, which is not ours."""
    if isinstance(home, bytearray):
        home[:] = data
    elif isinstance(home, array.array):
        home[:] = array.array(home.typecode, data)
    elif home.flags.writeable:
        home[...] = type(home)(home.shape, home.dtype, data)
