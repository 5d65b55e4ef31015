"""Memory that `empty` gave and that no op wrote.

Composite ops of the host's have kernels that are no ops: pooling in one dimension and tensors that C++ makes of numbers
ask for memory and fill it behind the dispatcher's back. A tape would give what was there before. (A capture has the
kernels of the GPU, whoever launches them.)"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import cgt_core as core
import torch

from ..data import Seen
from ..words import errors
from .observe import refuse, unseen
from .tape import EMPTY, is_filled

# Ops in place that take no notice of what they overwrite; all others read it.
FILLS = frozenset(
    "copy_ fill_ zero_ normal_ uniform_ random_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_ _foreach_copy_"
    " _foreach_zero_".split()
)


class Blank(NamedTuple):
    """Memory that `empty` gave and that no op wrote, or not all of it."""

    line: str  # that made it
    geometry: tuple  # (size, stride, offset) of the tensor
    dtype: Any
    left: list  # where a part was written: one tensor of bools, which of its elements were not


def see(
    seen: Seen, facts: Any, inputs: list[torch.Tensor], written: Sequence[torch.Tensor], fresh: list[torch.Tensor]
) -> str | None:
    """An op of the host's ran: the sentence on memory that it read though no op wrote it, or None. For one that makes
    empty memory, or where there is some."""
    packet = facts.packet
    if packet in EMPTY and is_filled():
        return None
    if packet in EMPTY:
        for t in (t for t in fresh if t.numel()):
            sid = core.storage_id(t)
            seen.blank[sid] = Blank(seen.made[sid], (t.size(), t.stride(), t.storage_offset()), t.dtype, [])
        return None
    over = () if facts.reshapes else written
    reads = told(seen, over) if packet.endswith("_") and packet not in FILLS else None
    for t in fresh:  # some are where others were, which are gone
        seen.blank.pop(core.storage_id(t), None)
    for t in over:
        fill(seen, t)
    if reads is not None or not (fresh or over or facts.reads) or packet.endswith("_like") or packet.startswith("new_"):
        return reads  # the others ask for a shape
    return told(seen, [t for t in inputs if not any(t is one for one in over)])


def fill(seen, t):
    """This was written: what is left of the memory around it?"""
    sid = core.storage_id(t)
    one = seen.blank.get(sid)
    if one is None or not t.numel():
        return
    with unseen(seen):
        if t.numel() * t.element_size() >= math.prod(one.geometry[0]) * one.dtype.itemsize:  # no element lies twice
            del seen.blank[sid]
        elif t.dtype == one.dtype:
            if not one.left:
                one.left.append(torch.zeros(core.storage_bytes(t) // t.element_size(), dtype=torch.bool))
                one.left[0].as_strided(*one.geometry).fill_(True)
            one.left[0].as_strided(t.size(), t.stride(), t.storage_offset()).fill_(False)
            if not one.left[0].any():
                del seen.blank[sid]


def told(seen: Seen, tensors: Iterable[torch.Tensor]) -> str | None:
    """The sentence if some of these were not written, or None."""
    for t in tensors:
        one = seen.blank.get(core.storage_id(t))
        if one is not None and is_left(seen, one, t):
            return errors.unseen_kernel(one.line)
    return None


def is_left(seen, one, t):
    """Was some of this not written?"""
    if not one.left or t.dtype != one.dtype:
        return True
    with unseen(seen):
        return bool(one.left[0].as_strided(t.size(), t.stride(), t.storage_offset()).any())


def vet_read(seen: Seen, t: torch.Tensor) -> None:
    """Python is about to read this."""
    strange = told(seen, [t])
    if strange is not None:
        refuse(seen, strange)
