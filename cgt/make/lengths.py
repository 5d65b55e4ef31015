"""Lengths of packed sequences, which lie on the host and which C++ reads by pointer. A recording is for those that are
known: constants, or values that were read and that each replay compares."""

from collections.abc import Callable
from typing import Any

import torch
from cgt_core import CUDA

from ..cuts import segments
from ..data import Seen
from ..run import constants, observe
from ..run.taps import PACKS, RECURRENT, UNPACKS
from ..words import errors
from .facts import is_guarded


def unknown(seen, lengths):
    """What is to be read before these are known, a list; None: they may not be read."""
    return [] if seen.run.driver == CUDA and is_guarded(seen, lengths) else segments.values_of(seen, [lengths])


def see_kernel(name: str) -> None:
    """An operator is about to run that reads values for which a replay has no op. It comes from the middle of
    PyTorch: no exception may leave, even in a capture."""
    seen = observe.seen_here()
    if seen is not None and not seen.inside and observe.asks_on(seen) and name not in seen.reads.behind:
        observe.note_reason(seen, errors.read_behind(name.replace("::", "."), observe.user_line(seen)))


def see_packed(seen: Seen, plain: Callable, owner: object, name: str, args: tuple, kwargs: dict) -> Any:
    """A function of torch._VF. Its second argument, where that holds whole numbers, is a packed sequence's lengths."""
    lengths: Any = args[1] if len(args) > 1 else None
    packed = not seen.inside and isinstance(lengths, torch.Tensor) and not lengths.is_floating_point()
    values = unknown(seen, lengths) if packed else None
    if values is None:
        return plain(*args, **kwargs)  # which is refused, where it is packed
    if values:
        segments.read(seen, values)
    observe.touch(seen, lengths)  # no op may have read them, and replays compare what was touched
    seen.reads.behind.append(f"aten::{name}.data" if name in RECURRENT else f"aten::{name}")
    try:
        result = plain(*args, **kwargs)
    finally:
        seen.reads.behind.pop()
    if name == PACKS:
        constants.add(seen, result[1])  # which comes of the lengths alone
    if name != UNPACKS:
        return result
    with observe.unseen(seen):  # C++ filled the lengths, and no op did
        told = result[1].tolist()
    return result[0], torch.tensor(told)
