"""Rows of the pipeline: in a capture, an op that depends on its tensors alone runs on one of a few lanes.

Whatever else is launched, by ops of other kinds or by nobody who is seen, goes to the recording's own stream, which
stands behind all lanes, and which all lanes stand behind: an op that is no row here is a barrier."""

import contextlib
from typing import Any, NamedTuple

import cgt_core as core
import torch

from ..data import Seen
from ..run import observe
from ..words import options
from ..words.private import OpOverload
from . import clocks

STREAMS: dict = {}  # device -> the streams of its lanes
ELSEWHERE = ("_cudnn_rnn", "_thnn_fused_lstm_cell", "record_stream")  # have to do with more than their tensors
HELD = 5  # a lane's memory that others use is held: at most one part in so many of what was made, and
LEAST_HELD = 1 << 25  # bytes that may be held in any case


class Spread(NamedTuple):
    """The lanes of a capture."""

    lanes: clocks.Lanes
    streams: list
    device: int
    home: int  # id of the recording's own stream
    own: list  # [the nodes behind which the recording's own stream stands]
    under_way: list  # of the op that runs: (lane, what it reads, what it writes, a tensor for each); or nothing
    made: list  # [bytes that ops made so far]


def is_wanted(seen: Seen) -> bool:
    """Are ops of this run to be spread?"""
    return bool(options.LANES and observe.is_capture(seen) and not seen.run.others and not seen.ranks.parallel)


def may_go(op: OpOverload, facts: Any) -> bool:
    """Does it depend on its tensors alone, and launch something?"""
    known = facts.namespace == "aten" and facts.packet not in ELSEWHERE
    return known and not (facts.replaces or facts.reshapes or (facts.views and not facts.writes))


def enter(seen: Seen, call: Any) -> None:
    """The op's turn has come."""
    tensors = call.instead if call.instead is not None else call.inputs
    if is_barrier(seen, call) or not all(t.is_cuda or not t.dim() for t in tensors):
        return
    spread = spread_of(seen)
    stored = {core.storage_id(t): t for t in tensors if t.is_cuda}
    written = set(map(id, call.written))
    pairs = zip(call.inputs, tensors, strict=True)
    writes = {core.storage_id(one) for t, one in pairs if id(t) in written}
    reads = stored.keys() - writes
    need = clocks.needs(spread.lanes, reads, writes)
    lane = clocks.choose(spread.lanes, need, range(len(spread.streams)))
    core.lane_set(spread.streams[lane], clocks.enter(spread.lanes, lane, need), options.LANES_STAY)
    spread.under_way.extend((lane, reads, writes, stored))
    core.set_stream(spread.streams[lane], spread.device)


def is_barrier(seen, call):
    """Is there more to it than its kernels, or does it run elsewhere: for real, between segments, in a body, on a
    stream of the function's own? Behind a value that was read, where memory of gradients matters, none is spread."""
    odd = call.for_real or call.apart or call.made_of is not None or call.reads or call.dynamic
    around = call.draws or call.aside or seen.inside or seen.cuts.bodies or core.segments_ran()
    return odd or around or not core.is_on_own_stream()


def spread_of(seen):
    """The run's, with what the recording's own stream did meanwhile behind all lanes, and before what they do next."""
    now, spread = core.lane_ends(0), seen.spread
    if spread is None:
        device = seen.run.device
        lanes, home = clocks.new(options.LANES, now), torch.cuda.current_stream(device).stream_id
        seen.spread = Spread(lanes, streams_of(device), device, home, [now], [], [0])
    elif now != spread.own[0]:
        clocks.meet(spread.lanes, now)
    return seen.spread


def streams_of(device):
    """Made once."""
    if device not in STREAMS:
        STREAMS[device] = [core.lane_new(device) for _ in range(options.LANES)]
    return STREAMS[device]


def leave(seen: Seen, call: Any) -> None:
    """It ran. The recording's own stream stands behind it, too. `call`: None where nothing came of it."""
    spread = seen.spread
    if spread is None or not spread.under_way:
        return
    lane, reads, writes, stored = spread.under_way
    spread.under_way.clear()
    core.set_stream(spread.home, spread.device)
    nodes, fresh = core.lane_ends(spread.streams[lane]), call.fresh if call is not None else ()
    made = {core.storage_id(t): core.storage_bytes(t) for t in fresh if t.is_cuda}
    clocks.leave(spread.lanes, lane, nodes, reads, writes, made, lambda memory: core.alias(stored[memory]))
    spread.made[0] += sum(made.values())
    if held(spread.lanes) > max(LEAST_HELD, spread.made[0] // HELD):
        clocks.meet(spread.lanes, clocks.ends_of(spread.lanes))
    core.lane_set(0, clocks.ends_of(spread.lanes))
    spread.own[0] = core.lane_ends(0)


def give_up(seen: Seen) -> None:
    """It raised. The capture may go on, or be over."""
    with contextlib.suppress(core.DriverError):
        leave(seen, None)


def held(lanes):
    """Bytes that nobody else may need."""
    return sum({core.storage_id(t): core.storage_bytes(t) for rows in lanes.holds for *_, t in rows}.values())


def end(seen: Seen) -> None:
    """The run is over: nothing is held any more."""
    if seen.spread is not None:
        clocks.meet(seen.spread.lanes, [])
