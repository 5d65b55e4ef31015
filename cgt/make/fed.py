"""What a function on the GPU brings there itself, of tensors on the host that come from outside (`x.to(device)`,
`buffer.copy_(x)`, `rows[i]`): copied slots whose copy is on the other device. Each replay copies what they hold in
front of the graph, and ops work on the copy; so a tensor of which anything else is asked is none."""

from typing import Any

import cgt_core as core
import torch
from cgt_core import CUDA

from ..cuts import segments
from ..data import Plan, Seen
from ..run import observe
from .facts import DYNAMIC, INDEXES, is_guarded, is_hosts


def note(seen: Seen, call: Any) -> None:
    """What this op brings there. A warm-up of a function that has all its arguments on the host notes it, too."""
    if call.facts.copies or call.facts.packet in INDEXES:
        seen.host.fed.update(core.storage_id(t) for t in call.inputs if t.is_cpu and feeds(seen, call, t))


def feeds(seen, call, t):
    """Does this op bring t to the GPU as it was in front of the call? Numbers are rounded there as on the host, but for
    those that an integer cannot hold."""
    sid, graded = core.storage_id(t), t.requires_grad and torch.is_grad_enabled()
    if graded or not core.is_plain(t) or t.is_conj() or t.is_neg():
        return False
    if seen.run.graph is not None or sid in seen.made or sid in seen.written:
        return False
    if call.facts.packet in INDEXES:
        return t.dtype == torch.int64 and call.inputs[0].is_cuda
    given = call.kwargs.get("dtype")
    to = core.dtype_of(given) if given is not None else call.inputs[0].dtype if call.written else t.dtype
    return call.facts.copies and not is_hosts(call) and (to == t.dtype or to.is_floating_point)


def may_use(seen: Seen, call: Any, t: torch.Tensor) -> bool:
    """May this op of a function on the GPU use t, which is on the host: is it a constant, compared at each call, a view
    that others look at, or fed?"""
    sid, facts = core.storage_id(t), call.facts
    if sid in seen.constants.memory or (facts.views and not call.written and sid not in seen.made):
        return True
    number, fed = sid not in seen.made and is_compared(seen, call, t), sid in seen.copied.swaps
    if number and not facts.copies:
        seen.host.numbers.add(sid)
    if fed or not number or (facts.copies and not is_guarded(seen, t)):
        return feeds(seen, call, t) and (fed or not seen.run.recording)
    return True


def is_compared(seen, call, t):
    """Is it a number, or whole ones for the host (lengths), in a tensor that is short enough to be compared?"""
    if t.dim() and (t.is_floating_point() or t.is_complex() or not (is_hosts(call) or call.facts.packet in DYNAMIC)):
        return False
    given = seen.run.plan.tensors if seen.run.plan is not None else ()
    mine = [x for x in given if core.is_plain(x) and core.storage_id(x) == core.storage_id(t)]
    return all(core.span(x) <= segments.VALUE_BYTES for x in mine)


def is_view(seen: Seen, call: Any) -> bool:
    """Is this a view, on the host, of what may be fed? It stays there."""
    return seen.run.driver == CUDA and call.facts.views and is_hosts(call)


def helps(seen: Seen, t: torch.Tensor) -> bool:
    """May the next recording use what this one may not: will it be fed, or compared?"""
    sid = core.storage_id(t)
    return sid in (seen.host.numbers if sid in seen.copied.swaps else seen.host.fed)


def buffers(plan: Plan) -> dict[int, torch.Tensor]:
    """{slot: its copy, which holds what it holds}. Ordinary memory: it is written in front of the graph."""
    home, fed = f"cuda:{plan.device}", [k for k in plan.copied if not plan.tensors[k].is_cuda]
    made = {k: observe.buffer_for(plan.tensors[k], home=home) for k in fed}
    for k, buffer in made.items():
        observe.fill(buffer, plan.tensors[k])
    return made


def wait_for(seen: Seen, call: Any) -> None:
    """Whoever called may overwrite what is fed when the call is over, unless the op says that somebody else waits."""
    lets_go = call.kwargs.get("non_blocking") or (call.facts.packet == "copy_" and len(call.args) > 2 and call.args[2])
    for t in call.inputs if observe.is_capture(seen) and not lets_go else ():
        for row in seen.copied.swaps.get(core.storage_id(t), ()) if t.is_cpu else ():
            copies = seen.copied.copies.items()
            core.feed_waits(next(copy for k, copy in copies if seen.run.plan.tensors[k] is row.leaf))
