"""What one run of the function shows, begun and asked: the small questions behind trace.py, tokens.py and record.py.

Copied slots. The function keeps the user's own tensors; `swaps` exchanges them for cgt's buffers at
each op, and what the op returns of a buffer is exchanged for the same part of the user's tensor. So views, identities
and Python attributes are those of eager, and nobody gets to see a buffer. Should an op write a
copied slot after all, the buffer is copied back at once and the slot is pinned.
"""

import contextlib
import functools
import gc
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import cgt_core as core
import torch
from cgt_core import CUDA, HOST

from ..data import Graph, Plan, Run, Seen, State, Swap
from ..words import errors, options
from ..words.private import sequence_number

NOT_USER_CODE = (
    os.path.dirname(torch.__file__) + os.sep,
    options.HOME,
    os.path.dirname(os.__file__) + os.sep + "contextlib",
    os.path.join(os.path.dirname(os.path.dirname(torch.__file__)), "typing_extensions"),  # @deprecated
    "<eval_with_key>",  # code that torch.compile made
    "cgt/core/",  # as Cython names its sources
    "cgt_core.py",
)


HERE = __name__.partition(".")[0]


class Unrecordable(BaseException):
    """Leaves the user's function in the middle of a capture; not an Exception, so that the user's
    own `except Exception` does not catch it. Never reaches the user."""


def observe(driver: int, device: int, graph: Graph | None = None, given: list | None = None, **also: Any) -> Seen:
    """For a run that is not recorded. `given`: what a backward may read. `also`: more of Run."""
    allocated = core.allocations(device) if given is not None and driver == CUDA else None
    slots = frozenset(map(core.storage_id, given or ()))
    now = {"since": sequence_number(), "returned": core.results(), "sources": []}
    return Seen(Run(driver, device, graph=graph, slots=slots, allocated=allocated, **(now | also)))


def observe_plan(state: State, plan: Plan, swaps: list[tuple], before: object, pool: int) -> Seen:
    """For the recording of a plan. `swaps`: [(leaf, buffer)] of its copied slots. `before`, `pool`: as of Run."""
    tensors = plan.tensors
    compared, learnt = state.opts.audit and state.opts.audit.every, state.learnt
    run = Run(
        plan.driver, plan.device, plan.others, plan, True, plan.graph, before, pool,
        slots=frozenset(map(core.storage_id, tensors)), since=sequence_number(), returned=core.results(),
        computes=plan.numbers.computes, until=learnt.late, apart=learnt.apart, sources=plan.sources,
        blockers=state.blockers, ops=[] if compared else None, parallel=state.opts.parallel,
    )  # fmt: skip
    seen = Seen(run)
    seen.autograd.leaves.extend(tensors[k] for k in plan.grads)
    seen.autograd.whole.update((core.storage_id(t), t) for _, t in plan.spent)
    note_swaps(seen, swaps)
    shared = {id(tensors[k]) for k in plan.beside}
    seen.copied.shared.extend(row for rows in seen.copied.swaps.values() for row in rows if id(row.leaf) in shared)
    copies = {id(leaf): buffer for leaf, buffer in swaps}
    stay = [t for t in tensors if id(t) not in copies] if swaps else ()
    seen.copied.stay.extend((core.storage_id(t), core.address(t), core.span(t)) for t in stay)
    for at, t in plan.spent:
        memory = [t, copies[id(t)]] if id(t) in copies else [t]
        seen.autograd.spent[at] = (memory, holders(memory))
    return seen


def note_swaps(seen, swaps):
    """From now on ops work on these buffers instead of these leaves."""
    for leaf, buffer in swaps:
        row = Swap(core.address(leaf), core.address(leaf) + core.span(leaf), buffer, leaf)
        seen.copied.swaps.setdefault(core.storage_id(leaf), []).append(row)
        seen.copied.buffers[core.storage_id(buffer)] = row


def lying_in(t: torch.Tensor, parts: Iterable[tuple]) -> list[tuple]:
    """Those of these parts of memory, (address, bytes, ...), that share bytes with t's memory."""
    at = core.storage_address(t)
    end = at + core.storage_bytes(t)
    return [part for part in parts if part[0] < end and at < part[0] + part[1]]


def buffer_for(t: torch.Tensor, inference: bool | None = None, home: str | None = None) -> torch.Tensor:
    """Memory for a copied slot, in the input's own alignment class: kernels choose their vector
    width, and reductions their order, by the address. `inference`: may it be written in that mode alone? As t. `home`:
    another device, where PyTorch would make new memory."""
    n, align = core.span(t), options.ALIGN[t.device.type]
    shift = 0 if home else core.address(t) % align
    empty = functools.partial(torch.empty, shift + n, dtype=torch.uint8, device=home or t.device)
    # Views of it are to be what views of t are.
    room = core.in_inference(t.is_inference() if inference is None else inference, empty)
    assert core.address(room) % align == 0, f"PyTorch's allocator aligns to {align} bytes"
    return room[shift:]


def fill(buffer: torch.Tensor, t: torch.Tensor) -> None:
    """Copy the bytes of t's span, gaps and overlaps included, as the copy node will."""

    def copy():
        whole = core.fixed(t).view(torch.uint8)
        start = core.address(t) - core.storage_address(t)
        buffer.copy_(whole[start : start + buffer.numel()])

    # The function may enter inference mode itself, and be given its own results.
    core.in_inference(buffer.is_inference() or torch.is_inference_mode_enabled(), copy)


def collect() -> None:
    """Free the cycles that the run made: they are not holders. The collector did not run meanwhile, so they are young;
    those that are not would cost a walk through all objects of the process."""
    gc.collect(1)


def holders(tensors: Iterable[torch.Tensor]) -> int:
    """How many hold memory of these tensors."""
    return sum(map(core.storage_holders, tensors))


def tensors_in(values: Iterable[object], into: list[torch.Tensor]) -> list[torch.Tensor]:
    """Collect the tensors among an op's arguments or results, lists of them too."""
    for value in values:
        if isinstance(value, torch.Tensor):
            into.append(value)
        elif isinstance(value, (list, tuple)):
            tensors_in(value, into)
    return into


def touch(seen: Seen, t: torch.Tensor) -> None:
    """The run has to do with t: memory from outside is noted when it is met first."""
    sid = core.storage_id(t)
    if sid in seen.made or sid in seen.copied.buffers or sid in seen.touched:
        return
    if is_stray(seen, t):
        note_memory(seen, t, user_line(seen))
        seen.strays = True
        return
    # Not the tensor: whoever holds the argument itself when the run is over is counted.
    alias = core.alias(t) if core.is_plain(t) else t
    seen.touched[sid] = seen.autograd.whole.get(sid, alias)


def is_stray(seen, t):
    """Was this memory, which no op had made, allocated since the run began?"""
    if not t.is_cuda or core.storage_id(t) in seen.run.slots:
        return False
    if seen.run.allocated is not None:
        return core.storage_address(t) not in seen.run.allocated
    return is_capture(seen) and core.is_of_recording(t)


def note_strays(seen: Seen, tensors: Iterable[torch.Tensor]) -> None:
    """The same of what comes out of the run, where no op may have met it."""
    for t in tensors:
        if core.storage_id(t) not in seen.made and core.storage_id(t) not in seen.copied.buffers and is_stray(seen, t):
            note_memory(seen, t)
            seen.strays = True


def note_memory(seen: Seen, t: torch.Tensor, line: str = "") -> None:
    """The call made this memory, at a line of the user's. While a recording lasts, the name of memory that died is not
    given to other: what was noted by it is not said of that."""
    seen.made[core.storage_id(t)] = line
    if seen.run.recording:
        seen.alive.names.append(core.storage_name(t))


def held(seen: Seen) -> list[torch.Tensor]:
    """The tensors that the run's ops returned, and aliases of ours, that somebody still holds."""
    ours = (r() for r in seen.alive.results)
    return core.alive(seen.run.returned) + [t for t in ours if t is not None]


def references(seen: Seen) -> list[int]:
    """How many references there are to each argument, but for ours."""
    ours = [id(t) for t in seen.touched.values()]
    arguments = seen.run.plan.flat.tensors if seen.run.recording else ()
    return [core.references(t) - ours.count(id(t)) for t in arguments]


NO_LINE = "the backward pass"  # autograd's threads have no frames


def user_line(seen: Seen) -> str:
    return line_in(seen.code.user)


def line_in(files: dict[str, bool]) -> str:
    """file:line of the innermost frame that is neither PyTorch's nor ours, or NO_LINE. `files`: what is known."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        mine = files.get(name)
        if mine is None:
            mine = files[name] = not name.startswith(NOT_USER_CODE)
        if mine:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return NO_LINE


def note_reason(seen: Seen, sentence: str) -> None:
    """The first is why the run cannot be replayed; all of them are kept where somebody asks for them (doctor.py)."""
    if seen.reason is None:
        seen.reason = sentence
        if seen.run.driver == HOST:  # the run goes on, and what is no op writes to the user's memory
            seen.copied.swaps.clear()
    if seen.run.blockers is not None:
        seen.run.blockers[sentence] = seen.run.blockers.get(sentence, 0) + 1


def asks_on(seen: Seen) -> bool:
    """Is it of any use to look for another reason?"""
    return seen.reason is None or seen.run.blockers is not None


def refuse(seen: Seen, sentence: str) -> None:
    """Note why this cannot be replayed, and leave what is in vain: a capture, where nothing ran yet; a body."""
    note_reason(seen, sentence)
    if is_capture(seen) or seen.cuts.bodies:
        raise Unrecordable(sentence)


def is_capture(seen: Seen) -> bool:
    """Does nothing of this run execute?"""
    return seen.run.driver == CUDA and seen.run.recording


def is_host_recording(seen: Seen) -> bool:
    """Is a tape being written that will be kept?"""
    return seen.run.recording and seen.run.driver == HOST and seen.reason is None


def seen_here() -> Seen | None:
    """What the calling thread's run has seen, or None: it is nobody's."""
    return getattr(core.observer(), "args", (None,))[0]


def asker() -> types.FrameType | Any:
    """The innermost frame that is not ours; None on a thread that C++ began, as autograd's for a GPU is."""
    frame: types.FrameType | Any = sys._getframe(1)
    while frame and str(frame.f_globals.get("__name__")).partition(".")[0] == HERE:
        frame = frame.f_back
    return frame


@contextlib.contextmanager
def unseen(seen: Seen) -> Iterator[None]:
    """Ops in here are not the function's (a tensor that C++ detaches is one, under a mode)."""
    before, seen.inside = seen.inside, True
    try:
        yield
    finally:
        seen.inside = before


def swap_of(seen: Seen, t: torch.Tensor) -> Swap | None:
    """The copied slot in whose copy ops find this part of a storage; or None."""
    at, end = core.address(t), core.address(t) + core.span(t)
    return next((row for row in seen.copied.swaps.get(core.storage_id(t), ()) if row.lo <= at and end <= row.hi), None)


def as_views(value: object, place: Callable, done: dict[int, torch.Tensor]) -> Any:
    """The argument with each tensor in it as place(t) says: as a view of another one, so many bytes behind its start;
    None: it stays. `done`: those of the same op. What is one tensor stays one: attention asks whether its query is its
    key, and computes with other kernels if not."""
    if isinstance(value, torch.Tensor):
        if id(value) not in done:
            there = place(value)
            done[id(value)] = value if there is None else core.view_like(there[0], value, there[1])
        return done[id(value)]
    return type(value)([as_views(v, place, done) for v in value]) if isinstance(value, (list, tuple)) else value


def exchange(seen: Seen, value: object, done: dict[int, torch.Tensor] | None = None) -> Any:
    """The argument with copied slots replaced by their buffers. `done`: as of as_views."""
    return as_views(value, functools.partial(in_buffer, seen), {} if done is None else done)


def in_buffer(seen, t):
    sid = core.storage_id(t)
    if sid not in seen.copied.swaps or not t.numel():
        return None
    at, end = core.address(t), core.address(t) + core.span(t)
    row = swap_of(seen, t)
    if row is None and not any(s == sid and lo <= at and end <= lo + n for s, lo, n in seen.copied.stay):
        refuse(seen, errors.beside(user_line(seen)))
    return None if row is None else (row.buffer, at - row.lo)


def fix(seen: Seen, value: object, done: dict[int, torch.Tensor] | None = None) -> Any:
    """The argument with tensors from outside replaced by views of fixed addresses: a storage can be
    given other memory later (a rescue does that), and the tape must not follow. But it must read a
    result of the path where that is written; even now, in another thread, a rescue may part the two, so how far
    it lies from the start is asked of its own storage. `done`: as of as_views."""
    return as_views(value, functools.partial(in_fixed, seen), {} if done is None else done)


def in_fixed(seen, t):
    sid = core.storage_id(t)
    if sid in seen.made or sid in seen.copied.buffers or not sid:
        return None
    if sid not in seen.alive.fixed:
        proto = core.path_proto(seen.run.plan.parent, t)
        seen.alive.fixed[sid] = core.fixed(t) if proto is None else proto
    base = seen.alive.fixed[sid]
    return base, core.address(t) - core.storage_address(t) - base.storage_offset() * base.element_size()


def warn(text: str) -> None:
    """A CgtWarning at the user's line; where warnings are errors no result is lost for one: explain() tells it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(NOT_USER_CODE):
        frame = frame.f_back
    with contextlib.suppress(errors.CgtWarning):
        warnings.warn_explicit(text, errors.CgtWarning, frame.f_code.co_filename, frame.f_lineno)
