"""Memory that `empty` gave and that no op wrote.

Composite ops of the host's have kernels that are no ops: pooling in one dimension and tensors that C++ makes of numbers
ask for memory and fill it behind the dispatcher's back. A tape would give what was there before. (A capture has the
kernels of the GPU, whoever launches them.) Memory of which an op wrote a part is not looked at any more."""

from collections.abc import Iterable, Sequence
from typing import Any

import cgt_core as core
import torch

from ..data import Seen
from ..words import errors
from .observe import refuse
from .tape import EMPTY, is_filled

# Ops in place that take no notice of what they overwrite; all others read it.
FILLS = frozenset(
    "copy_ fill_ zero_ normal_ uniform_ random_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_ index_put_"
    " index_copy_ index_fill_ masked_fill_ masked_scatter_ scatter_ _foreach_copy_ _foreach_zero_".split()
)


def see(seen: Seen, facts: Any, inputs: Sequence, written: Sequence, fresh: Sequence) -> str | None:
    """An op of the host's made empty memory, or ran where there is some: a sentence if it read what no op wrote."""
    packet = facts.packet
    if packet in EMPTY:
        made = {core.storage_id(t): seen.made[core.storage_id(t)] for t in fresh if t.numel()}
        seen.blank.update({} if is_filled() else made)
        return None
    over = () if facts.reshapes else written
    reads = told(seen, over) if packet.endswith("_") and packet not in FILLS else None
    for t in (*fresh, *(t for t in over if t.numel())):  # of the fresh some are where others were, which are gone
        seen.blank.pop(core.storage_id(t), None)
    if reads is not None or not (fresh or over or facts.reads) or packet.endswith("_like") or packet.startswith("new_"):
        return reads  # the others ask for a shape
    return told(seen, inputs)


def told(seen: Seen, tensors: Iterable[torch.Tensor]) -> str | None:
    """The sentence if one of these was not written, or None."""
    lines = [seen.blank[sid] for sid in map(core.storage_id, tensors) if sid in seen.blank]
    return errors.unseen_kernel(lines[0]) if lines else None


def vet_read(seen: Seen, t: torch.Tensor) -> None:
    """Python is about to read this."""
    strange = told(seen, [t])
    if strange is not None:
        refuse(seen, strange)
