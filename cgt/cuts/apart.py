"""Ops that no graph can hold (cuSOLVER's, mostly), and what else runs between two graphs of a recording: how its
tensors leave the one and come into the next.

What such an op returns depends on its arguments alone, so it runs again wherever its call does, and nobody must
remember what came of it. Which ops these are, failed captures tell."""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import cgt_core as core
import torch
from torch.utils import _pytree

from ..data import Seen
from ..run import constants, tape
from ..run.observe import buffer_for, exchange, fix, is_capture, note_memory, tensors_in, unseen, user_line
from ..words import errors
from ..words.private import OpOverload
from . import segments

# On the GPU, without trying: a capture breaks cuSOLVER's handle (torch 2.11); and lstsq, the shapes of whose results
# depend on values with other drivers than the GPU's.
KNOWN = frozenset(("_linalg_eigh", "linalg_lstsq"))


class Apart(NamedTuple):
    """An op that replays call between two segments."""

    op: OpOverload
    args: tuple
    kwargs: dict
    line: str
    results: list  # tensors to which replays bring what it returns

    def run(self) -> None:
        """For the core, behind the segment that leaves its arguments."""
        made = tensors_in((self.op(*self.args, **self.kwargs),), [])
        for mine, x in zip(self.results, made, strict=True):
            slim(mine).copy_(slim(x))


def record(seen: Seen, op: OpOverload, args: tuple, kwargs: dict[str, object]) -> list[torch.Tensor]:
    """End a segment in front of the op under way, run it for real, and return copies that each replay makes anew."""
    given, spec = _pytree.tree_flatten((args, kwargs))
    given = [bring_out(seen, x) if isinstance(x, torch.Tensor) else x for x in given]
    outside, named = _pytree.tree_unflatten(given, spec)
    part = Apart(op, outside, named, user_line(seen), [])
    seen.cuts.apart.append(part)
    run_again = part.run
    seen.alive.objects.append(run_again)  # the core borrows it
    end_segment(seen, run_again, pure=True)

    def run():
        with unseen(seen):
            part.results.extend(copied(x) for x in core.proceed(tensors_in(given, [])))

    constants.for_real(seen, run) if is_capture(seen) else run()
    with unseen(seen):
        results = [bring_in(seen, mine) for mine in part.results]
    if not is_capture(seen):  # no op that the tape was told of
        for x, mine in zip(results, part.results, strict=True):
            seen.alive.memory.append(core.alias(x))
            tape.copy_into(slim(x), slim(mine))
    core.answer(results)
    return results


def is_one(seen: Seen, call: Any) -> bool:
    """Is this an op that no graph can hold? `call`: an ops.OpCall."""
    known = call.facts.packet in KNOWN and any(t.is_cuda for t in call.inputs)
    return known or bool(seen.run.apart and call.op in seen.run.apart)


# A library that waits in a capture may tell its own error alone.
REFUSED = re.compile(r"captur|CUDA error|cu[a-z]+ error")


def learn(seen: Seen, call: Any, error: BaseException) -> None:
    """An op failed: if because of the capture, the next recording runs it between two graphs, where it can."""
    if not is_capture(seen) or not REFUSED.search(str(error)) or is_broken(error):
        return
    made = lambda t: functools.partial(torch.zeros, t.shape, dtype=t.dtype, device=t.device)  # noqa: E731
    zeros = _pytree.tree_map_only(torch.Tensor, made, (call.args, call.kwargs))
    zeros = _pytree.tree_map_only(torch.Generator, lambda _: None, zeros)
    seen.cuts.failed[:] = [functools.partial(repeat, call.op, zeros, (seen.run.device, *seen.run.others))]
    seen.reason = seen.reason or errors.op_apart(str(call.op), user_line(seen))
    if call.facts.pure and not (call.written or call.facts.dynamic) and segments.may_end(seen):
        seen.run.apart.add(call.op)
        seen.again = True


def repeat(op, given, devices):
    """The op, with tensors that are made now; the generators of the host and of these GPUs stay as they are."""
    args, kwargs = _pytree.tree_map_only(functools.partial, lambda make: make(), given)
    with torch.random.fork_rng(devices):
        return op(*args, **kwargs)


def is_broken(error: BaseException) -> bool:
    """Had something else ended the capture (another thread that waited for the device)? The driver's words."""
    return "previous error during capture" in str(error)


# --- tensors and segments --------------------------------------------------------------------------


def bring_out(seen: Seen, t: torch.Tensor) -> torch.Tensor:
    """Memory, laid out as t is, into which each replay copies t. It is the recording's for good: what reads it is no
    op, and the tape's plan, which sees ops, would give it away behind the copy."""
    with unseen(seen):
        room = constants.for_real(seen, lambda: buffer_for(t)) if is_capture(seen) else buffer_for(t)
        mine = core.view_like(room, t, 0)
        slim(mine).copy_(slim(exchange(seen, t)))
    if not is_capture(seen):
        tape.copy_into(slim(mine), fix(seen, slim(exchange(seen, t))))
    note_memory(seen, mine)
    return mine


def bring_in(seen: Seen, mine: torch.Tensor) -> torch.Tensor:
    """A tensor of the recording, into which each replay copies this."""
    note_memory(seen, mine)
    return copied(mine)


def copied(t):
    """A copy that is laid out as t is, gaps included: lstsq's solution is a part of a longer tensor."""
    mine = core.view_like(buffer_for(t), t, 0)
    slim(mine).copy_(slim(t))
    return mine


def slim(t: torch.Tensor) -> torch.Tensor:
    """t, with one element along dimensions in which it is only repeated."""
    return t[tuple(slice(None) if n else slice(1) for n in t.stride())] if t.dim() else t


def end_segment(seen: Seen, part: Callable[[], object], pure: bool = False) -> None:
    """Replays call it behind what was recorded until here, which runs now. `pure`: it is an op."""
    if is_capture(seen):
        segments.end_capture(seen, part=part, pure=pure)
    else:
        core.cut(0, 0, b"", seen.draws, part, pure)
