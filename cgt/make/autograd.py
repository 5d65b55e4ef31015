"""Differentiable functions: what a forward saves, and its backward as a function of its own.

A recorded call whose result requires grad leaves a graph of autograd's behind. Its edges to the outside are cut
(`sinks` in the core), and what it saved is found by asking `Saved` objects, so that it can be run again for any later
call: with the gradients of that call's results and the tensors which that call saved. Such a run is a function,
`backward`, and is recorded like any other."""

import functools
import threading
from collections.abc import Callable

import cgt_core as core
import torch
from cgt_core import CUDA, FRESH, NONE, WRITES

from ..data import Behind, Draft, Graph, Leaves, OutRow, Plan, SaveRow, Seen, State, maker_of, remember
from ..run import tokens
from ..run.observe import observe, seen_here
from ..run.taps import KEEPS, tap_states
from ..words import errors
from ..words.private import graph_task, may_donate
from ..words.pytree import Flat
from . import describe, facts, trace


def complete(state: State, plan: Plan, seen: Seen, draft: Draft) -> Draft | str:
    """The draft with what a later backward needs, or the sentence that says why it cannot be had."""
    roots = [k for k, o in enumerate(draft.outs) if o.root]
    if not roots:
        return vet_written(draft, seen.run.since) or draft
    if not seen.run.saves:
        seen.again = True
        remember(state, saves=True)
        return errors.first_gradient()
    reason = vet_roots(draft, roots) or vet_arguments(plan, seen, draft)
    if reason is not None:
        return reason
    kept = [one for one in (ref() for ref in seen.autograd.saved) if one is not None]
    saved = [one.tensor for one in kept]
    stale = next((one.tensor for one in kept if core.version_of(one.tensor) != one.version), None)
    if stale is not None:  # by the call itself: nobody would notice at a replay
        return errors.modified(tuple(stale.shape))
    odd = next((t for t in saved if not core.is_plain(t)), None)
    if odd is not None:
        return errors.wrapped_graph(f"what {draft.outs[roots[0]].line} saves", facts.odd_kind([odd]))
    results = [draft.bases[k] if draft.outs[k].hidden else draft.out.tensors[k] for k in roots]
    found = core.sinks_flows(seen.run.plan.sinks, results, seen.run.since)
    if found is None:
        return errors.outer_graph(draft.outs[roots[0]].line)
    joined, single = found
    flows, n_grads = joined + single, len(roots) + len(joined)
    core.sinks_heads(seen.run.plan.sinks, results, joined)
    # The backward of a custom Function may run anything, a reentrant checkpoint's the forward and a
    # backward of its own.
    custom = core.graphs_functions(results, seen.run.since)
    outs = list(draft.outs)  # hidden ones come to these
    saves, saved, kept = find_saves(plan, seen, draft, outs, n_grads)
    graph = Graph(
        sinks=seen.run.plan.sinks, flows=flows, leaves=maker_of(Leaves)(), driver=plan.driver, device=plan.device,
        reached=[(r.path, r.tensor) for r in plan.reached if r.owner == NONE], tokens=kept,
        recomputes=seen.hooked or bool(custom), forward=state.f, grads=n_grads,
        donates=any(map(may_donate, custom)), seeds=seen.seeds,
        constants={sid: name for sid, name in seen.host.made.items() if sid in seen.constants.memory},
        places=[plan.places[k] for k in plan.changes.moving], owners=plan.found.owners,
        lock=threading.RLock(), loose=[],
    )  # fmt: skip
    return draft._replace(outs=outs, behind=Behind(roots, saves, saved, flows, len(joined), graph))


def vet_roots(draft, roots):
    """A sentence if the call's place in the graph cannot be given to a replay's results."""
    memory = [core.storage_id(draft.outs[k].proto) for k in roots]
    for k, sid in zip(roots, memory, strict=True):
        if memory.count(sid) > 1 and not draft.outs[k].hidden:
            return errors.odd_root(draft.out.paths[k])
    return vet_written(draft, 0)


def vet_written(draft, since):
    """A sentence if the run wrote an argument that has a place in the graph, or got another one there since then: a
    replay could not give it that, nor the base of a view."""
    for effect in draft.effects:
        example = draft.slots[effect.slot].example if effect.kind == WRITES else None
        if example is not None and example.grad_fn is not None and example.grad_fn._sequence_nr() >= since:
            return errors.written_root(draft.paths[effect.slot])
    return None


def vet_arguments(plan, seen, draft):
    """A sentence if the run left behind a reference to an argument: where a backward would find the
    recorded call's instead of today's."""
    returned = [id(t) for t in draft.out.tensors]
    for path, t, kept in zip(plan.flat.paths, plan.flat.tensors, seen.autograd.kept, strict=True):
        if kept > returned.count(id(t)):
            return errors.kept_argument(path)
    return None


def find_saves(plan, seen, draft, outs, n_grads):
    """([SaveRow], [(Saved, its base there, metadata, shift in bytes)], {state: (index of its words among the backward's
    arguments, how far it was, the state)}). The former are those arguments, behind `n_grads` gradients. What the run
    made and saved becomes a hidden output, each storage once. A constant of the run stays with its Saved."""
    slots = draft.slots
    made = {core.storage_id(o.proto): SaveRow(NONE, k) for k, o in enumerate(outs) if o.kind == FRESH}
    # A view of a copied argument is one of its buffer: the backward gets the argument.
    for sid, swap in seen.copied.buffers.items():
        made[sid] = SaveRow(describe.slot_at(swap.leaf, draft.near)[0], NONE)
    saves, saved, nowhere = {}, [], SaveRow(NONE, NONE)

    def place(t, version):
        """In which slot's or output's memory t lies, which is saved from now on; None if that does not change."""
        sid = core.storage_id(t)
        found = made.get(sid, SaveRow(describe.slot_at(t, draft.near)[0], NONE))
        if found == nowhere and sid in seen.made and t.numel():
            found = made[sid] = SaveRow(NONE, len(outs))
            outs.append(OutRow(FRESH, NONE, core.alias(t), 0, version, NONE, True, False, seen.made[sid]))
        if found == nowhere or not t.numel():
            return None
        saves.setdefault(found, len(saves))
        return found

    for one in (ref() for ref in seen.autograd.saved):
        if one is None:  # its graph ran or was dropped inside the call
            continue
        t = one.tensor
        constant = plan.driver == CUDA and not t.is_cuda
        found = None if constant else place(t, one.version)
        if found is not None:
            base = slots[found.slot].example if found.out == NONE else outs[found.out].proto
            swap = seen.copied.buffers.get(core.storage_id(t))
            start = base if swap is None else swap.buffer
            saved.append((one, base, describe.ghost(t), core.address(t) - core.address(start)))
    kept = {}
    for sid, token in seen.generators.tokens.items():
        state, words = token.state(), token.words
        if state is not None and (words is not None) == (plan.driver == CUDA):
            at = saves[place(state if words is None else words, 0)]
            kept[sid] = (n_grads + at, token.moved, core.alias(state))  # whose address stays its name
    return list(saves), saved, kept


def cut(draft: Draft) -> None:
    """The recording is a node: cut its graph off from the call that made it."""
    behind, graph = draft.behind, draft.behind.graph
    core.sinks_cut(graph.sinks)
    at = {}
    for k, save in enumerate(behind.saves, graph.grads):
        at[id(draft.slots[save.slot].example if save.out == NONE else draft.outs[save.out].proto)] = k
    for one, base, like, shift in behind.saved:
        graph.leaves.readers.setdefault(at[id(base)], set()).add(id(one))
        one.tensor, one.leaves, one.at, one.like, one.shift = None, graph.leaves, at[id(base)], like, shift


def find_spent(graph: Graph | None, flat: Flat, copied: list, driver: int, parent: int, args: tuple) -> list[tuple]:
    """[(index, tensor), ...]: arguments of a backward whose memory the recording can let go of. Results of the path
    that are read only through the graph, and copies of gradients (a tape lets go of those by itself)."""
    if graph is None or not args[0] or graph.leaves.late:
        return []
    copies = {id(flat.tensors[k]) for k in copied}

    def is_ours(at, t):
        return driver == CUDA and at < graph.grads if id(t) in copies else core.path_proto(parent, t) is not None

    return [row for row in find_dying(graph, args) if is_ours(*row)]


def find_dying(graph: Graph, args: tuple) -> list[tuple[int, torch.Tensor]]:
    """[(index, tensor), ...]: arguments of a backward which that alone still reads, through the graph."""
    read = {*range(graph.grads), *graph.leaves.readers} - {at for at, *_ in graph.tokens.values()}
    return [(k, args[1 + k]) for k, dies in enumerate(args[0] or ()) if dies and k in read]


def was_greedy(plan: Plan) -> bool:
    """Did the recording let go of something too early? The next one will not."""
    return bool(plan.spent and plan.graph.leaves.late)


def tap_states_of(graph):
    """A checkpoint in the graph sets generators to what they were in its forward: in today's, then."""
    seen, thread = observe(graph.driver, graph.device, graph), threading.get_ident()
    return tap_states(
        lambda: threading.get_ident() == thread and core.observer() is None,
        functools.partial(tokens.see_get_state, seen),
        functools.partial(tokens.see_set_state, seen),
    )


def own(grads, saved):
    """Gradients that do not lie in memory of what a call saved. In eager autograd still holds such a tensor
    and copies it for a .grad; here it is an alias that nobody else has."""
    memory = {core.storage_id(t) for t in saved}
    return tuple(g.clone() if g is not None and core.storage_id(g) in memory else g for g in grads)


def backward_of(graph: Graph) -> Callable[..., tuple[torch.Tensor | None, ...]]:
    """The function that runs a recorded graph: a byte per tensor that says whether it dies with the call (a recording
    looks at them, find_spent; None: nothing does; False: the call's own graph is kept), gradients of its results (None:
    not needed), what has come to the tensors that it uses more than once (None: nothing yet), what a call saved; to the
    gradients of the tensors in `flows` (None: not reached). `changed`: indices of what was modified since it was saved,
    which must not be read."""

    hides = graph.driver == CUDA and graph.recomputes
    away = functools.partial(core.sinks_away, graph.sinks)
    backward_of_all = functools.partial(core.sinks_run, graph.sinks)

    def run(leaves, changed):
        seen = seen_here()
        spent = seen.autograd.spent if seen is not None and seen.run.graph is graph else ()
        trace.begin_leaves(graph.leaves, leaves, [graph.grads + k for k in changed], spent)
        grads = leaves[: graph.grads]
        if graph.driver == CUDA:
            core.sinks_here(graph.sinks)
        if graph.driver == CUDA and graph.seeds and core.observer() is None:  # nobody records it
            hand_over = trace.hand_over_seed
            core.heard(lambda: core.observed(core.results(), hand_over, backward_of_all, (grads,), {}))
        else:
            backward_of_all(grads)
        return own(core.sinks_take(graph.sinks, graph.flows), leaves[graph.grads :])

    def backward(spent, *leaves, changed=()):
        brackets = [tap_states_of(graph), (lambda: None, functools.partial(trace.end_leaves, graph.leaves))]
        # Autograd keeps the recorded graph, but each call's own is run once if that one is not kept; a compiled
        # backward may then write what the call saved, as in eager.
        if graph.donates and spent is not False:
            brackets.append(KEEPS.to(lambda: graph_task() == core.sinks_task(graph.sinks), lambda *_: False))
        if hides:
            brackets.append((lambda: away(True), lambda: away(False)))
        return core.locked(graph.lock, lambda: core.within(brackets, lambda: run(leaves, changed)))

    return backward
