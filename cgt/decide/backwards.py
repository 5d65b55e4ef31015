"""The graph that a recorded call left: is it right for other calls?"""

import functools
import types
from collections.abc import Iterable
from typing import Any

import cgt_core as core
import torch

from ..data import Graph, Seen, State
from ..look import flow
from ..make import describe
from ..make.plan import learn_code
from ..words import errors
from .freeing import drop_graphs
from .sites import ATTRIBUTE, DOOMED, GRAPHS, RECORDING, SITES


def readable(graph: Graph, leaves: Iterable[object]) -> list[torch.Tensor]:
    """What a recorded graph may read in a call."""
    return [*(t for t in leaves if isinstance(t, torch.Tensor)), *(t for _, t in graph.reached), *graph.loose]


def prove(state: State, seen: Seen, leaves: Iterable[object]) -> None:
    """A recorded graph, which this function is, was run under observation: did it read only what belongs to the
    call?"""
    graph: Graph | Any = state.graph
    reason = describe.vet_backward(graph, seen, readable(graph, leaves))
    if reason is None:
        state.proven = None not in seen.code.ran
    else:
        disprove(graph, reason)
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


def disprove(graph, reason):
    """A recorded graph cannot be run for other calls: its function is not differentiable by replay. Of
    the very call that was recorded this run was right; of a replayed one it was not."""
    forward = forward_of(graph)
    nodes = [node for node, kept in list(forward.keep.items()) if kept.graph is graph] if forward is not None else []
    replayed = not nodes or core.node_facts(nodes[0]).n_replay > 0
    refuse_gradients(graph, reason)
    if replayed:
        raise errors.CgtError(errors.stale_backward(reason))


def refuse_gradients(graph: Graph, reason: str) -> None:
    """Calls with gradients of this graph's function run eagerly from now on."""
    forward = forward_of(graph)
    if forward is None:
        return
    forward.learnt.refused[:] = [reason]
    core.locked(RECORDING, functools.partial(drop_graphs, forward), lambda: DOOMED.append((forward, GRAPHS)))
