"""Memory that `empty` gave and that no op wrote.

Composite ops of the host's have kernels that are no ops: pooling in one dimension and tensors that C++ makes of numbers
ask for memory and fill it behind the dispatcher's back. A tape would give what was there before. (A capture has the
kernels of the GPU, whoever launches them.)"""

from collections.abc import Iterable
from typing import Any

import cgt_core as core
import torch

from ..data import Seen
from ..words import errors
from .tape import EMPTY, is_filled


def see(
    seen: Seen, facts: Any, inputs: list[torch.Tensor], written: list[torch.Tensor], fresh: list[torch.Tensor]
) -> str | None:
    """An op of the host's ran: the sentence on memory that it read though no op wrote it, or None."""
    packet = facts.packet
    if packet in EMPTY and is_filled():
        return None
    if packet in EMPTY:
        seen.blank |= {core.storage_id(t): seen.made[core.storage_id(t)] for t in fresh if t.numel()}
        return None
    made = set(
        map(core.storage_id, (*fresh, *(() if facts.reshapes else written)))
    )  # some where others were, which are gone
    for sid in made:
        seen.blank.pop(sid, None)
    if not seen.blank or not made or packet.endswith("_like") or packet.startswith("new_"):
        return None  # it asks for a shape
    return told(seen, inputs)


def told(seen: Seen, tensors: Iterable[torch.Tensor]) -> str | None:
    """The sentence if some of these were not written, or None."""
    return next(
        (errors.unseen_kernel(seen.blank[sid]) for sid in map(core.storage_id, tensors) if sid in seen.blank), None
    )
