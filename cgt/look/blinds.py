"""Objects that a call replaces before anybody looks at what lay there: `self.dist = Normal(mean, std)`, then
`self.dist.log_prob(a)`. What the last call left in such a place is not guarded, but for its type.

While the function is recorded a *blind* lies there. It does what the object does and tells whoever wants to know that
it was asked, and then the recording comes to nothing. What asks nobody is `is`, and type(x)."""

import functools
import types
import weakref
from collections.abc import Callable

import torch
from torch.utils import _pytree

from ..words import pytree
from . import bytecode as b
from .code import KEPT, asks_type

KINDS: weakref.WeakSet = weakref.WeakSet()  # classes of blinds
QUIET = frozenset(("__new__", "__init__", "__init_subclass__", "__subclasshook__", "__getattribute__", "__class__"))


def fits(value: object) -> bool:
    """Can a blind do what this does? It must be a tensor, or what Python code makes of its attributes."""
    cls = type(value)
    if cls is torch.Tensor:
        return True
    simple = type(cls) is type and pytree.is_simple(cls) and not issubclass(cls, torch.nn.Module)
    return simple and type(getattr(value, "__dict__", None)) is dict and not has_own(cls, "__init_subclass__")


def has_own(cls, name):
    return any(name in vars(base) for base in cls.__mro__ if base is not object)


def empty(kind: type) -> object:
    """An object of such a class that has nothing."""
    if issubclass(kind, torch.Tensor):
        return NOTHING
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
    if cls is torch.Tensor:
        made, attribute = blind_tensor(real, look)
    kind = type(cls.__name__, (cls,), made)
    KINDS.add(kind)
    if cls is not torch.Tensor:
        return empty(kind)
    # What asks no Python code finds the same memory, which nothing leads to.
    blind = torch.Tensor._make_subclass(kind, real.detach(), real.requires_grad)
    kind.__getattribute__ = attribute  # PyTorch asks while it makes one
    return blind


def blind_tensor(real, look):
    """The attributes of its class; and what is asked for one. Ops are done with the tensor."""

    def handed(cls, function, types, args=(), kwargs=None):
        look()
        args, kwargs = _pytree.tree_map(lambda x: real if type(x) is cls else x, (args, kwargs or {}))
        return function(*args, **kwargs)

    def attribute(self, name):
        if name == "__torch_function__":
            return object.__getattribute__(self, name)
        return torch.Tensor if name == "__class__" else (look(), getattr(real, name))[1]

    return {"__torch_function__": classmethod(handed), "__hash__": lambda self: (look(), hash(real))[1]}, attribute


def is_one(value: object) -> bool:
    return type(value) in KINDS


@functools.lru_cache(KEPT)
def tells_apart(code: types.CodeType) -> bool:
    """May this code tell a blind from its object: does it ask for an id or an exact type, or compare by `is` with what
    is no constant?"""
    if "id" in code.co_names or not ("type" in code.co_names or b.has(code, IS)):
        return "id" in code.co_names
    reading = b.read(code)
    return any(
        (step.name == "type" and asks_type(reading, at)) or (step.operation in IS and is_between_two(reading, at))
        for at, step in enumerate(reading.steps)
    )


def is_between_two(reading, at):
    makers = [reading.maker(at, operand) for operand in (0, 1)]
    return not any(one is not None and reading.steps[one].does == b.CONSTANT for one in makers)


IS = b.operations(b.IDENTIFY)
NOTHING = torch.empty(0)
