"""Objects and tensors that a call replaces before anybody looks at what lay there: `self.dist = Normal(mean, std)`,
then `self.dist.log_prob(a)`. Of what the last call left in such a place the class alone is guarded.

While the function is recorded a *blind* lies there. It does what the object does and tells that it was asked, and then
the recording comes to nothing. `is`, id() and type() ask nobody: code that may use them so has no blinds."""

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree

from ..words import pytree
from . import bytecode as b
from .code import KEPT, asks_type

REAL: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # class of a blind, which has one -> what it stands for
QUIET = frozenset(("__new__", "__init__", "__init_subclass__", "__subclasshook__", "__getattribute__", "__class__"))
BARE = (object, types.SimpleNamespace)  # whose methods read an object's attributes without asking for them
NOTHING = torch.empty(0)
IS = b.operations(b.IDENTIFY)


def fits(value: object) -> bool:
    """Can a blind do what this does? It must be a tensor, or what Python code makes of its attributes."""
    return type(value) is torch.Tensor or is_open(value)


def is_open(value: Any) -> bool:
    """Is this what Python code makes of its attributes?"""
    cls = type(value)
    simple = type(cls) is type and pytree.is_simple(cls) and not issubclass(cls, torch.nn.Module)
    free = simple and type(cls.__init_subclass__) is types.BuiltinMethodType
    return free and type(getattr(value, "__dict__", None)) is dict


def empty(kind: type) -> object:
    """An object of such a class that has nothing."""
    if issubclass(kind, torch.Tensor):
        return NOTHING
    return (types.SimpleNamespace if issubclass(kind, types.SimpleNamespace) else object).__new__(kind)


def blind_for(real: Any, look: Callable[[], object]) -> object:
    """What does as the object does, and calls look() before. What comes to a tensor's memory without asking finds the
    same, to which nothing leads."""
    cls = type(real)
    made: Any = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}

    def ask(name):
        return lambda self, *args: (look(), getattr(real, name)(*args))[1]

    def attribute(self, name):
        if name == "__torch_function__":
            return object.__getattribute__(self, name)
        return cls if name == "__class__" else (look(), getattr(real, name))[1]

    def handed(kind, function, types, args=(), kwargs=None):
        look()
        args, kwargs = _pytree.tree_map(lambda x: real if type(x) is kind else x, (args, kwargs or {}))
        return function(*args, **kwargs)

    if cls is torch.Tensor:
        made |= {"__torch_function__": classmethod(handed), "__hash__": ask("__hash__")}
    else:
        raws = [row for base in BARE for row in vars(base).items() if callable(row[1]) and row[0] not in QUIET]
        made |= {name: ask(name) for name, raw in raws if getattr(cls, name, None) is raw}
    kind: Any = type(cls.__name__, (cls,), made)
    REAL[kind] = real
    is_tensor = cls is torch.Tensor
    blind = torch.Tensor._make_subclass(kind, real.detach(), real.requires_grad) if is_tensor else empty(kind)
    kind.__getattribute__ = attribute  # PyTorch asks while it makes one
    return blind


def is_one(value: object) -> bool:
    return type(value) in REAL


@functools.lru_cache(KEPT)
def tells_apart(code: types.CodeType) -> bool:
    """May this code tell a blind from its object: by an id, an exact type, or `is` with what is no constant?"""
    if "id" in code.co_names or not ("type" in code.co_names or b.has(code, IS)):
        return "id" in code.co_names
    reading = b.read(code)
    return any(
        asks_type(reading, at) if step.name == "type" else step.operation in IS and is_between_two(reading, at)
        for at, step in enumerate(reading.steps)
    )


def is_between_two(reading, at):
    last = reading.maker(at, 1)
    return last is None or reading.steps[last].does != b.CONSTANT
