"""Rows of the pipeline: in a capture, an op that depends on its tensors alone runs on one of a few lanes.

Whatever else is launched, by ops of other kinds or by nobody who is seen, goes to the recording's own stream, which
stands behind all lanes, and which all lanes stand behind: an op that does not come here is a barrier.

Memory is known by where it begins: two storages may lie in one place. It lives on the stream that allocated it. Who
lets go of it in another way than by its last tensor (`let_go`) has everything that comes wait for all that was."""

import contextlib
from typing import Any, NamedTuple

import cgt_core as core
import torch

from ..data import Seen
from ..run import observe
from ..words import private
from ..words.private import OpOverload

# Ops that have to do with more than their tensors: random state, memory of a library's handle, other streams.
ELSEWHERE = (
    "_cudnn_rnn", "_thnn_fused", "record_stream", "linalg_", "_linalg", "cholesky", "_cholesky", "lu_", "triangular",
    "_fft", "_sparse", "sparse", "_cudnn_ctc",
)  # fmt: skip
# A lane's memory that others use is held. Of what ops made, at most one part in so many; bytes that may be in any case.
HELD, LEAST_HELD = 5, 1 << 25


class Spread(NamedTuple):
    """What a capture holds of its lanes' memory."""

    home: int  # id of the recording's own stream
    shared: dict  # where a storage from outside begins that shares bytes with another one -> one of these places
    under_way: list  # of the op that runs: (lane, what it reads, what it writes, a tensor for each); or nothing
    holds: dict  # lane -> {memory of it: ({lane that uses it, too: the number of its last such op}, what keeps it)}
    nbytes: list  # [those that ops made so far, those that are held]


def is_wanted(seen: Seen) -> bool:
    """Are ops of this run to be spread?"""
    if seen.run.parallel == "never" or not observe.is_capture(seen):
        return False
    # What exchanges data has streams of its own, and gives memory back behind PyTorch's back.
    return not (seen.run.others or private.groups())


def may_go(op: OpOverload, facts: Any) -> bool:
    """Does it depend on its tensors alone, and launch something?"""
    known = facts.namespace == "aten" and not facts.packet.startswith(ELSEWHERE)
    return known and not (facts.replaces or facts.reshapes or (facts.views and not facts.writes))


def enter(seen: Seen, call: Any) -> None:
    """Choose a lane, and let the op run there."""
    tensors = call.instead if call.instead is not None else call.inputs
    if is_barrier(seen, call) or not all(core.is_plain(t) and (t.is_cuda or not t.dim()) for t in tensors):
        return
    if seen.spread is None:
        home = torch.cuda.current_stream(seen.run.device).stream_id
        seen.spread = Spread(home, places_shared(seen.run.plan.tensors), [], {}, [0, 0])
    spread = seen.spread
    stored = {place_of(spread, t): t for t in tensors if t.is_cuda and core.storage_address(t)}
    written = set(map(id, call.written)) if call.written else ()
    pairs = zip(call.inputs, tensors, strict=True) if call.written else ()
    writes = list(stored.keys() & {place_of(spread, one) for t, one in pairs if id(t) in written})
    reads = [at for at in stored if at not in writes]
    lane = core.lane_run(spread.home, reads, writes, seen.run.parallel == "always")
    spread.under_way.extend((lane, reads, writes, stored))
    if lane in spread.holds:
        release(spread, lane)


def is_barrier(seen, call):
    """Is there more to it than its kernels, or does it run elsewhere: for real, between segments, in a body, on a
    stream of the function's own? None is spread behind a value that was read, where memory of gradients matters, nor
    where somebody asked for memory."""
    odd = call.for_real or call.apart or call.made_of is not None or call.reads or call.dynamic
    around = call.draws or call.aside or seen.inside or seen.cuts.bodies or core.segments_ran() or seen.raw
    return odd or around or not core.is_on_own_stream()


def place_of(spread, t):
    at = core.storage_address(t)
    return spread.shared.get(at, at)


def places_shared(tensors):
    """As of Spread. One storage may be part of another one (from DLPack, say)."""
    spans = sorted({(core.storage_address(t), core.storage_bytes(t)) for t in tensors if core.storage_address(t)})
    shared, (first, end) = {}, (0, 0)
    for at, nbytes in spans:
        if at >= end:
            first = at
        elif at != first:
            shared[at] = first
        end = max(end, at + nbytes)
    return shared


def release(spread, lane):
    """What a lane is behind by now is held no more."""
    for memory, (uses, kept) in list(spread.holds[lane].items()):
        if all(core.lane_passed(lane, *use) for use in uses.items()):
            spread.nbytes[1] -= core.storage_bytes(kept)
            del spread.holds[lane][memory]


def leave(seen: Seen, call: Any) -> None:
    """The lane has one op more. `call`: None where it raised."""
    spread = seen.spread
    if spread is None or not spread.under_way:
        return
    lane, reads, writes, stored = spread.under_way
    spread.under_way.clear()
    fresh = call.fresh if call is not None else ()
    made = {core.storage_address(t): core.storage_bytes(t) for t in fresh if t.is_cuda}
    for memory, home in core.lane_back(lane, reads, writes, list(made)):
        held = spread.holds.setdefault(home, {})
        if memory not in held:
            held[memory] = {}, core.alias(stored[memory])
            spread.nbytes[1] += core.storage_bytes(stored[memory])
        held[memory][0][lane] = core.lane_length(lane)
    spread.nbytes[0] += sum(made.values())
    if spread.nbytes[1] > max(LEAST_HELD, spread.nbytes[0] // HELD):
        let_go(seen)


def give_up(seen: Seen) -> None:
    """It raised. The capture may go on, or be over."""
    with contextlib.suppress(core.DriverError):
        leave(seen, None)


def let_go(seen: Seen) -> None:
    """Memory is free that some lane may still use: all lanes meet, and nothing is held any more."""
    if seen.spread is not None and core.lanes_wait():
        seen.spread.holds.clear()
        seen.spread.nbytes[1] = 0
