"""Tensors that are made of others (wrapper subclasses): DTensor, what a functional collective returns.

Their class runs ops on what is inside (`__torch_dispatch__`), and those are what a recording is made of: the observer
hands an op on such a tensor on to its class (observe_shim.h). What is inside is found by the protocol of torch's own
tracers, `__tensor_flatten__` and `__tensor_unflatten__`, and only where all of it are plain tensors. These lie in slots
of the class or in the instance's dict: what a property makes is another tensor each time, and nothing would fit."""

from collections.abc import Callable, Iterable
from typing import Any

import cgt_core as core
import torch

from .private import is_pending, is_traceable

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer))
HERE = ...  # where a tensor was
# Attributes of which its class could make something, though they are not in its context.
NUMBERS = frozenset((bool, int, float, str))


def is_one(t: torch.Tensor) -> bool:
    """Is this tensor made of others, each a plain one? (Not a nested one, whose shape is symbols of its own.)"""
    if type(t) in PLAIN or core.is_plain(t) or t.is_nested or not is_traceable(t):
        return False
    try:
        parts = inside(t)
    except Exception:  # the user's own, which nobody has asked for
        return False
    return bool(parts) and all(core.is_plain(one) or is_one(one) for _, one in parts)


def inside(t: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """[(attribute, tensor), ...]"""
    return [(name, value) for name, value in attributes(t)[0] if isinstance(value, torch.Tensor)]


def attributes(t: torch.Tensor) -> tuple[list[tuple[str, object]], object]:
    """([(name, value), ...] of what its class counts as inside, what else it is made of)."""
    names, context = t.__tensor_flatten__()
    return [(name, getattr(t, name)) for name in names], context


def plain_inside(t: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors in it, at any depth; itself, if it is not made of others."""
    return [one for _, part in inside(t) for one in plain_inside(part)] if is_one(t) else [t]


def flatten(t: torch.Tensor) -> tuple[list[torch.Tensor], tuple]:
    """(tensors, all else): what a pytree needs of it. The latter is compared by value."""
    if is_pending(type(t)):
        t.trigger_wait()  # or what is inside may not be there yet
    found, context = attributes(t)
    rest = tuple((name, HERE if isinstance(value, torch.Tensor) else value) for name, value in found)
    beside = tuple((name, value) for name, value in getattr(t, "__dict__", {}).items() if type(value) in NUMBERS)
    tensors = [value for _, value in found if isinstance(value, torch.Tensor)]
    return tensors, (type(t), rest, context, t.shape, t.stride(), beside)


def unflatten(tensors: Iterable[torch.Tensor], about: tuple) -> torch.Tensor:
    """Another one like that, around these tensors."""
    kind, rest, context, shape, stride, _ = about
    tensors = iter(tensors)
    parts = {name: next(tensors) if value is HERE else value for name, value in rest}
    return kind.__tensor_unflatten__(parts, context, shape, stride)


def maker(t: torch.Tensor) -> Callable[[Iterable[torch.Tensor]], torch.Tensor]:
    """A function that makes another one like it, as it is now, around other tensors."""
    about = flatten(t)[1]
    return lambda tensors: unflatten(tensors, about)


def waited_for(value: Any) -> object:
    """What is inside what a functional collective gave: from outside it is that tensor, once somebody waited."""
    return value.elem if is_pending(type(value)) else value


def names(t: torch.Tensor) -> tuple[str, ...]:
    return tuple(name for name, _ in inside(t))
