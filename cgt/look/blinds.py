"""Objects that a call replaces before anybody looks at what lay there: `self.dist = Normal(mean, std)`, then
`self.dist.log_prob(a)`. What the last call left in such a place is not guarded, but for its type.

While the function is recorded a *blind* lies there. It does what the object does and tells whoever wants to know that
it was asked, and then the recording comes to nothing. What asks nobody is `is`, and type(x)."""

import functools
import types
import weakref
from collections.abc import Callable

import torch

from ..words import pytree
from . import bytecode as b
from .code import KEPT, asks_type

KINDS: weakref.WeakSet = weakref.WeakSet()  # classes of blinds
QUIET = frozenset(("__new__", "__init__", "__init_subclass__", "__subclasshook__", "__getattribute__", "__class__"))


def fits(value: object) -> bool:
    """Can a blind do what this does? It must be what Python code makes of its attributes."""
    cls = type(value)
    simple = type(cls) is type and pytree.is_simple(cls) and not issubclass(cls, torch.nn.Module)
    return simple and type(getattr(value, "__dict__", None)) is dict and not has_own(cls, "__init_subclass__")


def has_own(cls, name):
    return any(name in vars(base) for base in cls.__mro__ if base is not object)


def empty(kind: type) -> object:
    """An object of such a class that has nothing."""
    return (types.SimpleNamespace if issubclass(kind, types.SimpleNamespace) else object).__new__(kind)


def blind_for(real: object, look: Callable[[], object]) -> object:
    """What does as the object does, and calls look() before."""

    def ask(name):
        return lambda self, *args: (look(), getattr(real, name)(*args))[1]

    cls = type(real)
    bases = [base for base in cls.__mro__ if base in (object, types.SimpleNamespace)]
    names = {name for base in bases for name, raw in vars(base).items() if callable(raw)} - QUIET
    made = {name: ask(name) for name in names if name == "__setattr__" or not any(
        name in vars(base) for base in cls.__mro__ if base not in bases
    )}  # fmt: skip
    made["__getattribute__"] = lambda self, name: cls if name == "__class__" else (look(), getattr(real, name))[1]
    made |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    kind = type(cls.__name__, (cls,), made)
    KINDS.add(kind)
    return empty(kind)


def is_one(value: object) -> bool:
    return type(value) in KINDS


@functools.lru_cache(KEPT)
def tells_apart(code: types.CodeType) -> bool:
    """May this code tell a blind from its object: does it ask for an exact type, or compare by `is` with what is no
    constant?"""
    if not ("type" in code.co_names or b.has(code, IS)):
        return False
    reading = b.read(code)
    return any(
        (step.name == "type" and asks_type(reading, at)) or (step.operation in IS and is_between_two(reading, at))
        for at, step in enumerate(reading.steps)
    )


def is_between_two(reading, at):
    makers = [reading.maker(at, operand) for operand in (0, 1)]
    return not any(one is not None and reading.steps[one].does == b.CONSTANT for one in makers)


IS = b.operations(b.IDENTIFY)
