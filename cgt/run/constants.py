"""Constants: memory that holds the same bytes at each replay, since no argument, no reached tensor and no random number
went into it. Positions from `arange`, masks of shapes, tensors of Python's numbers: what these are is guarded
elsewhere.

A value that depends on constants alone may be read while the function is recorded, and no replay waits for it. On the
host, and while warming, that is just reading. In a capture nothing is computed: the steps that led to what is read are
run for real, on a stream of their own that the capture does not know, with stand-ins for its memory.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import cgt_core as core
import torch

from ..data import Seen
from ..words.private import OpOverload
from .devices import on_stream
from .observe import exchange, is_capture, lying_in, note_memory, tensors_in, unseen
from .taps import Bracket

T = TypeVar("T")

KNOWN = ("aten", "prims", "prim")  # whose ops have no other source than their arguments
READS_FILES = ("from_file",)
STREAMS = {}  # device -> the stream on which steps run


class Piece(NamedTuple):
    """Part of a constant's memory, as an argument of a step."""

    memory: int
    dtype: Any
    size: tuple
    stride: tuple
    offset: int


class Step(NamedTuple):
    """An op of a capture that had only constants to work on."""

    op: Any
    args: tuple  # with a Piece for each tensor of the capture
    kwargs: dict
    makes: list  # memory of its results


def is_constant(seen: Seen, facts: Any, inputs: Iterable[torch.Tensor]) -> bool:
    """Do this op's results depend on constants alone?"""
    return facts.pure and all(core.storage_id(t) in seen.constants.memory or not t.numel() for t in inputs)


def add(seen: Seen, t: torch.Tensor) -> None:
    """This is one. Its name stays its own while the run lasts, its memory does not."""
    seen.constants.memory[core.storage_id(t)] = core.storage_name(t)


def own(seen: Seen, t: torch.Tensor) -> None:
    """One that is made beside the function, for good."""
    sid = core.storage_id(t)
    seen.alive.objects.append(t)
    note_memory(seen, t)
    seen.constants.real[sid] = t
    add(seen, t)


def note(
    seen: Seen,
    op: OpOverload,
    args: tuple,
    kwargs: dict,
    constant: bool,
    fresh: Sequence,
    written: Sequence,
    is_real: bool,
) -> None:
    """The op ran: what it made, or wrote, is constant if all it had was. `is_real`: it did in a capture, too."""
    if not constant:
        forget(seen, (*fresh, *written))
        return
    for t in fresh:
        add(seen, t)
    if is_capture(seen) and not is_real and any(t.is_cuda for t in (*fresh, *written)):
        args, kwargs = as_pieces(seen, args), {k: as_pieces(seen, v) for k, v in kwargs.items()}
        seen.constants.steps.append(Step(op, args, kwargs, list(map(core.storage_id, fresh))))


def forget(seen: Seen, tensors: Iterable[torch.Tensor]) -> None:
    """These are no constants, or not any more; nor is known what was read of them, be it under another name: two
    tensors made of one array of NumPy's have a storage each."""
    for t in tensors:
        seen.constants.memory.pop(core.storage_id(t), None)
        if seen.reads.known:
            seen.reads.known.difference_update(lying_in(t, seen.reads.known))


def close(seen: Seen) -> None:
    """The run is over: nothing holds memory any more."""
    seen.constants.steps.clear()
    seen.constants.real.clear()


def read(seen: Seen, inputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Run the op under way for real, in a capture: it needs the values of constants, or of what a segment left. What it
    made becomes a copy that each replay makes anew, since the function may write it, or return it."""
    results = for_real(seen, lambda: core.proceed([stand_in(seen, t) if t.is_cuda else t for t in inputs]))
    return renew(seen, results)


def renew(seen: Seen, results: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return from the op under way copies of these tensors that were made for real: each replay makes them."""
    results = [anew(seen, t) if t.is_cuda else t for t in results]
    core.answer(results)
    return results


def anew(seen, t):
    """A copy of memory that was filled for real; each replay makes it."""
    seen.alive.objects.append(t)
    with unseen(seen):
        mine = t.clone()
    seen.constants.real[core.storage_id(mine)] = t
    return mine


def on_device(seen: Seen, value: object) -> Any:
    """An op's argument, with constants of the host's as tensors on the device: a replay finds their bytes there."""
    if isinstance(value, torch.Tensor) and not value.is_cuda and value.numel():
        copy = for_real(seen, lambda: value.to(torch.device("cuda", seen.run.device)))
        seen.alive.objects.append(copy)
        return copy
    if isinstance(value, (list, tuple)):
        return type(value)([on_device(seen, v) for v in value])
    return value


def for_real(seen: Seen, body: Callable[[], T]) -> T:
    """body(), now and nobody's, although a capture is under way."""
    return core.within([elsewhere(seen)], body)


def elsewhere(seen: Seen) -> Bracket:
    """A bracket: what is done inside runs for real, on streams that the capture does not know, and is waited for."""
    inside, devices = seen.inside, (seen.run.device, *seen.run.others)
    for device in devices:
        if device not in STREAMS:
            STREAMS[device] = torch.cuda.Stream(device)
    switches = [on_stream(STREAMS[device], torch.cuda.current_stream(device)) for device in devices]

    def begin():
        seen.inside = True
        core.capture_relaxed(True)
        for go, _ in switches:
            go()

    def end():
        try:
            core.capture_relaxed(True)  # again, where an interrupt came below: the capture would break
            for device in devices:
                STREAMS[device].synchronize()
        finally:
            for _, back in switches:
                back()
            core.capture_relaxed(False)
            seen.inside = inside

    return begin, end


def stand_in(seen: Seen, t: torch.Tensor) -> torch.Tensor:
    """What this op can work on: memory that a segment computed, or what a constant of the capture will hold."""
    return real_of(seen, t) if core.storage_id(t) in seen.constants.memory else exchange(seen, t)


def real_of(seen, t):
    """A stand-in for this constant of a capture: what it will hold where the run has come to."""
    for step in seen.constants.steps:
        args, kwargs = (from_pieces(seen, given) for given in (step.args, step.kwargs))
        given = {core.storage_id(one) for one in tensors_in(kwargs.values(), tensors_in(args, []))}
        results = tensors_in((step.op(*args, **kwargs),), [])
        made = [one for one in results if core.storage_id(one) not in given]
        seen.constants.real.update(zip(step.makes, made, strict=True))
    seen.constants.steps.clear()
    return from_pieces(seen, as_pieces(seen, t))


def as_pieces(seen, value):
    """An op's argument, with the memory of the capture by name; a number of the host's as it is now."""
    if isinstance(value, torch.Tensor) and not value.is_cuda:
        return value.clone()
    if isinstance(value, torch.Tensor) and core.storage_id(value) in seen.constants.memory:
        return Piece(core.storage_id(value), value.dtype, value.shape, value.stride(), value.storage_offset())
    if isinstance(value, (list, tuple)) and not isinstance(value, Piece):
        return type(value)([as_pieces(seen, v) for v in value])
    return value


def from_pieces(seen, value):
    """The same, with stand-ins."""
    if isinstance(value, Piece):
        base = seen.constants.real[value.memory]
        piece = torch.empty(0, dtype=value.dtype, device=base.device)
        return piece.set_(base.untyped_storage(), value.offset, value.size, value.stride)
    if isinstance(value, dict):
        return {k: from_pieces(seen, v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([from_pieces(seen, v) for v in value])
    return value
