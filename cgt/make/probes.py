"""Look into a function that replays: tensors in the middle of it, by name."""

import cgt_core as core
import torch
from cgt_core import DICT_ITEM

from ..look.places import MISSING, Place
from ..run.observe import seen_here
from ..words import errors

TAPPED = {}  # name -> the tensor of the last call that came to it


def tap(name: str, t: torch.Tensor) -> torch.Tensor:
    """Keep a tensor from the middle of a jitted function readable: `cgt.tapped()[name]` is what the last call had
    there, whether it was warmed, recorded, replayed or ran eagerly. In a replay it costs the memory, which nothing else
    of the recording can use then, and where the tensor was not made by the call, or lasts from one to the next, a copy.

    Args:
        name: a string; the last tensor of this name in a call counts.
        t: any tensor. What is kept is its values, without gradients.

    Returns:
        t itself.

    Raises:
        TypeError: `name` is no string or `t` no tensor.

    >>> import torch, cgt
    >>> @cgt.jit
    ... def f(x):
    ...     hidden = cgt.tap("hidden", x * 2)
    ...     return hidden.sum()
    >>> for k in range(4):
    ...     y = f(torch.full((2,), float(k)))
    >>> cgt.tapped()["hidden"]
    tensor([6., 6.])
    """
    if not isinstance(name, str) or not isinstance(t, torch.Tensor):
        raise TypeError(errors.no_tap(type(name).__name__, type(t).__name__))
    seen = seen_here()
    made = seen is not None and not seen.inside and core.storage_id(t) in seen.made
    # Of a parameter's gradient there is one tensor alone.
    grads = [leaf.grad for leaf in seen.autograd.leaves if leaf.grad is not None] if made else ()
    made = made and core.storage_id(t) not in map(core.storage_id, grads)
    TAPPED[name] = t.detach() if made else t.detach().clone()
    if seen is not None and not any(place.key == name for place in seen.own if place.home is TAPPED):
        seen.own.append(Place(DICT_ITEM, TAPPED, name, MISSING, f"cgt.tapped()[{name!r}]"))
    return t


def tapped() -> dict[str, torch.Tensor]:
    """{name: tensor} of what `cgt.tap` kept last, of all functions.

    Raises:
        CgtError: inside a jitted function, which cannot know what another call left.
    """
    if seen_here() is not None:
        raise errors.CgtError(errors.tapped_inside())
    return dict(TAPPED)
