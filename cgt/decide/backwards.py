"""The graph that a recorded call left: is it right for other calls?"""

import functools
import types
from collections.abc import Iterable
from typing import Any

import cgt_core as core
import torch
from cgt_core import FITS, MISS_ALIVE, NONE

from ..data import Call, Graph, Seen, State
from ..look import flow
from ..make import describe
from ..make.plan import learn_code
from ..words import errors, pytree
from .freeing import drop_graphs
from .sites import ATTRIBUTE, BACKWARD, DOOMED, GRAPHS, RECORDING, SITES, is_mine


def readable(graph: Graph, leaves: Iterable[object]) -> list[torch.Tensor]:
    """What a recorded graph may read in a call."""
    return [*(t for t in leaves if isinstance(t, torch.Tensor)), *(t for _, t in graph.reached), *graph.loose]


def prove(state: State, seen: Seen, leaves: Iterable[object]) -> None:
    """A recorded graph, which this function is, was observed: did it read only what belongs to the call?"""
    graph: Graph | Any = state.graph
    reason = describe.vet_backward(graph, seen, readable(graph, leaves))
    if reason is None:
        state.proven = None not in seen.code.ran
    else:  # its function is not differentiable by replay
        node = node_of(graph, forward_of(graph))
        replayed = node == NONE or core.node_replays(node) > 0
        refuse_gradients(graph, reason)
        if replayed:  # of the very call that was recorded this run was right
            raise errors.CgtError(errors.stale_backward(reason))
    learn_backward(graph, seen)


def learn_backward(graph: Graph, seen: Seen) -> list[types.CodeType]:
    """What a backward reads is guarded by its forward, which is recorded anew if it passed over code that runs now. The
    code that can read more."""
    forward = forward_of(graph)
    fresh = []
    if forward is not None:
        fresh = learn_code(forward, seen.code.ran & forward.learnt.passed)
        if graph.places:
            fresh += learn_code(forward, set(flow.that_disturb(seen.code.ran - forward.ran - {None}, forward.ran)))
    if fresh:
        DOOMED.append((forward, GRAPHS))
    return fresh


def forward_of(graph: Graph) -> State | None:
    """The state of the function of whose recording this is the backward, or None."""
    return getattr(SITES.get(graph.forward), ATTRIBUTE, None)


def node_of(graph, forward):
    """The recording of its forward; NONE: it was freed."""
    kept = () if forward is None else list(forward.keep.items())
    return next((node for node, one in kept if one.graph is graph), NONE)


def run_again(call: Call, given: list, flows: list, joined: int, reached: int) -> tuple:
    """The gradients that a backward wants which makes a graph of its own (create_graph=True), or has batched gradients:
    by autograd, of the forward's call run once more from its inputs, as a checkpoint does it. `given`: its tensors;
    `flows`: those to which gradients flow, to the first `joined` from several ops. None: it is gone or was modified.
    `reached`: core.node_reached when it was made.

    Raises:
        CgtError: it cannot be run once more."""
    graph: Graph | Any = call.state.graph
    body = functools.partial(run_forward, call, graph, given, flows, joined, reached)
    busy = lambda: (errors.IS_BUSY, None)  # noqa: E731
    # Jitted functions inside are plain.
    alone = functools.partial(core.with_paths, functools.partial(core.lend, body))
    outcome: Any = busy() if is_mine() else core.locked(RECORDING, alone, busy)
    why, found = outcome
    if why is not None:
        refuse_gradients(graph, errors.refused_backward(why))
        raise errors.CgtError(errors.not_run_again(call.state.name.removesuffix(BACKWARD), why))
    return found


def run_forward(call, graph, given, flows, joined, reached):
    """(None, those gradients), or (half a sentence that says why there are none, None). The caller holds the paths."""
    forward: State | Any = forward_of(graph)
    node = node_of(graph, forward)
    if node == NONE:
        return errors.IS_FREED, None
    kept = forward.keep[node]
    if kept.changes or kept.loose or kept.numbers.sources:
        return errors.DOES_MORE, None
    if any(t is None for t in (*given, *flows)) or core.node_reached(node) != reached:
        return errors.IS_GONE, None
    if any(t._backward_hooks or t.retains_grad for t in flows):  # which this run would call, and the caller's again
        return errors.HAS_HOOKS, None
    found = differentiate(call, functools.partial(results, node, forward, given), given, flows, joined)
    return (errors.READS_OTHERS, None) if found is None else (None, found)


def differentiate(call, again, given, flows, joined):
    """Those gradients, of the tensors in again(); or None where these are not the call's."""
    creates, grads = torch.is_grad_enabled(), call.args[1 : 1 + call.state.graph.grads - joined]
    on = functools.partial(torch.set_grad_enabled, True), functools.partial(torch.set_grad_enabled, creates)
    known = {*map(id, given), *map(id, flows)}
    roots = list({id(t): t for t in core.within([on], again) if t.grad_fn is not None and id(t) not in known}.values())
    if len(roots) != len(grads):
        return None
    asked = [(root, grad) for root, grad in zip(roots, grads, strict=True) if grad is not None]
    rest = [root for root, grad in zip(roots, grads, strict=True) if grad is None]
    outs, given = zip(*asked, strict=True)
    found = torch.autograd.grad(outs, flows, given, retain_graph=True, create_graph=creates, allow_unused=True)
    lost = [t for t, grad in zip(flows, found, strict=True) if grad is None]
    zeros = list(map(torch.zeros_like, rest))
    if lost and (not rest or None in torch.autograd.grad(rest, lost, zeros, retain_graph=True, allow_unused=True)):
        return None  # another parameter lies there meanwhile
    return found


def results(node, forward, given):
    """The tensors in the result of the forward, run once more; none if its recording would not take this call today."""
    facts = core.node_facts(node)
    misses = core.node_misses(facts.path, facts.parent, forward.f, facts.spec, given)
    fits = any(one == node and why in (FITS, MISS_ALIVE) for one, why, _ in misses)
    if not fits or core.node_misplaced(node) != NONE:
        return ()
    args, kwargs = pytree.unflatten_call(forward.learnt.programs[facts.spec][0], given)
    return pytree.flatten(SITES[facts.fn].__wrapped__(*args, **kwargs), "result").tensors


def refuse_gradients(graph: Graph, reason: str) -> None:
    """Calls with gradients of this graph's function run eagerly from now on."""
    forward = forward_of(graph)
    if forward is None:
        return
    forward.learnt.refused[:] = [reason]
    core.locked(RECORDING, functools.partial(drop_graphs, forward), lambda: DOOMED.append((forward, GRAPHS)))
