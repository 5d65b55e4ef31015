"""Calls that run eagerly while they are observed: the first of a function, and others of which only a run can tell
whether they can be recorded."""

import math
import time
from collections.abc import Iterable, Sequence

import cgt_core as core
import torch
from cgt_core import CUDA, HOST

from ..cuts import segments
from ..data import Around, Call, Seen, State, remember
from ..look import impure
from ..make import describe, trace
from ..make.optional import collectives
from ..make.plan import leaf_devices, survey
from ..numbers import counters
from ..run import devices
from ..run.observe import asks_on, note_reason, observe
from ..words import errors, options
from ..words.private import without_torch_function
from . import account, verdicts
from .backwards import prove, readable


def warm(call: Call, sources: Sequence[tuple[str, object]] = ()) -> object:
    """Run once eagerly, and learn what it touches. `sources`: what it must not take from (impure.states)."""
    began = time.perf_counter()
    state, flat = call.state, call.flat
    around = timed_survey(call) if state.blockers is not None and state.ran else None
    if around is not None:
        sources = () if isinstance(around, str) else around.found.sources
    guess = CUDA if any(t.is_cuda for t in flat.tensors) else HOST
    home = devices.home_of(flat.tensors, state.learnt.devices.homes)
    before = [describe.memory_of(t) for t in flat.tensors]
    given = None if state.graph is None else readable(state.graph, call.args)
    seen = observe(
        guess, home, state.graph, given, blockers=state.blockers, sources=impure.states(sources),
        computes=state.learnt.computes is not False and state.graph is None,
    )  # fmt: skip
    anew = guess == CUDA and core.dropout_begins_anew(home)
    result = trace.run(seen, call.function, call.args, call.kwargs)
    if anew and not core.dropout_begins_anew(home):  # with another random state of cuDNN's each time
        seen.reason = errors.cudnn_dropout()
        remember(state, recurrent=True)
    driver = CUDA if any(d.type == "cuda" for d in seen.devices) else HOST if seen.devices else guess
    note_run(state, seen, elsewhere=guess != driver)
    moved = impure.moved(seen.run.sources, seen) if asks_on(seen) else ()
    for text in (*([around] if isinstance(around, str) else ()), *moved):
        note_reason(seen, text)
    state.warm_seconds += time.perf_counter() - began
    note_tensors(state, seen, zip(flat.paths, flat.tensors, strict=True))
    reason, waits = judge(call, seen, result, None if guess != driver else seen.reason, before)
    if reason is not None and (state.learnt.doubted or sources) and not waits:
        verdicts.condemn(call, reason)  # and warm again after the cool-down
        verdicts.count_eager(state, reason)
        verdicts.vet_strict(state, reason)
        return result
    core.fn_count(state.f, "warmups")
    if reason is None:
        state.learnt.devices.drivers[leaf_devices(flat)] = driver
    else:  # a first call may do what no other does: caches that are made lazily
        remember(state, doubted=True)
    return result


def note_run(state, seen, elsewhere):
    """Remember what the run showed of the function, whatever its arguments were. `elsewhere`: its work is not where it
    was looked at; it will be once more, where it belongs."""
    if elsewhere:
        devices.learn_home(state.learnt.devices.homes, seen.devices)
    gpus = devices.gpus_of(seen.devices)
    state.learnt.devices.gpus.update(gpus if len(gpus) > 1 else ())
    counters.learn(state, None, seen, lambda: None)
    state.learnt.numbers.acts.update([seen.run.driver] if seen.acts else ())
    learnt = state.learnt
    remember(
        state, late=max(learnt.late, seen.late), recurrent=learnt.recurrent or bool(seen.generators.dropout),
        computes=seen.computed if learnt.computes is None else learnt.computes,
    )  # fmt: skip
    state.ran |= seen.code.ran - {None}  # what is hidden here must be seen when it is recorded


def judge(call, seen, result, reason, before):
    """(why the call cannot be recorded, or None; may the next one be). `before`: where the arguments lay."""
    state, flat = call.state, call.flat
    for path, t, was in zip(flat.paths, flat.tensors, before, strict=True):
        if describe.memory_of(t) != was:  # a capture could not always be undone
            reason = reason or errors.replaced(path)
    pending = describe.has_pending(seen, result)
    remember(state, saves=state.learnt.saves or pending)
    parallel, settles = collectives.learn(state, seen, pending)
    if state.graph is not None:
        prove(state, seen, call.args)
    reason = parallel or reason
    strange = vet_values(call, seen) if reason is None else None
    remember(state, strangers=state.learnt.strangers + (strange is not None))
    are_numbers = all(math.prod(value.shape) == 1 for value in seen.reads.values)
    tries = options.TRIES_OF_NUMBERS if are_numbers else options.TRIES_OF_MASKS
    return reason or strange, settles or (strange is not None and state.learnt.strangers < tries)


def vet_values(call, seen):
    """A sentence where the function reads values of which there are many, and these did not come before: recordings
    would be for calls that never come again. Or None."""
    wide = [value for value in seen.reads.values if len(value.bytes) > 1]
    if not wide or math.isinf(options.OVERHEAD):
        return None
    kind = (*verdicts.key_of(call), *(value.bytes for value in wide))
    new = account.meet(call.state, kind, verdicts.whose(call.flat.program), room=0)  # allowance or not
    return errors.varying_values(segments.lines_of(wide)) if new else None


def note_tensors(state: State, seen: Seen, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Remember where each argument was, and what the function reaches, and which of them it writes."""
    remember(state, asks_which=state.learnt.asks_which or seen.asks_which)
    named = list(named)
    if seen.written - seen.made.keys() - {core.storage_id(t) for _, t in named}:
        state.learnt.moves.written.add(None)
    for path, tensor in named:
        state.learnt.moves.pointers[path], sid = core.address(tensor), core.storage_id(tensor)
        if sid in seen.written or sid in seen.raw:
            state.learnt.moves.written.add(path)
        if sid in seen.raw:
            state.learnt.moves.fixed.add(path)
    note_fed(state, seen, named)


def note_fed(state: State, seen: Seen, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Remember which of these it brings to the GPU, and takes for no number besides."""
    named = [(path, core.storage_id(t)) for path, t in named]
    state.learnt.moves.fed.update(path for path, sid in named if sid in seen.host.fed)
    state.learnt.moves.fed.difference_update(path for path, sid in named if sid in seen.host.numbers)


def timed_survey(call: Call) -> Around | str:
    began = time.perf_counter()
    with without_torch_function():  # a tensor's class may refuse to be asked
        around = survey(call)
    call.state.look_seconds += time.perf_counter() - began
    return around


def is_to_watch(call: Call, around: Around | str) -> bool:
    """Must the function run once more, to see that it takes nothing from the iterators and files that it reaches? Of a
    capture that does not stand that could not be undone. Each recording is made behind such a run."""
    state = call.state
    if isinstance(around, str) or call.driver == HOST or not impure.lasting(around.found.sources):
        return False
    remember(state, watched=not state.learnt.watched)
    return state.learnt.watched
