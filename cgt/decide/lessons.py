"""What a run that was recorded teaches: the recording is right and is kept, or comes to nothing, and then the next one
may fare better (Seen.again)."""

import cgt_core as core
from cgt_core import NONE

from ..data import Plan, Seen, State, remember
from ..make import describe, moving
from ..make.plan import learn_code
from ..numbers.addresses import has_way_back
from ..words import errors, options
from .backwards import learn_backward


def escaping(state: State, seen: Seen, reason: str | None) -> str | None:
    """The reason, noted as one that tells of something that outlived the call; or None."""
    if reason is not None:
        seen.escaped = True
        remember(state, escapes=state.learnt.escapes + 1)
    return reason


def vet_code(state: State, seen: Seen) -> str | None:
    """A sentence if code ran that was not looked at for places: for the first time, or unseen."""
    if None in seen.code.ran:
        return errors.hidden_code()
    if seen.code.imported:
        return errors.imports(min(seen.code.imported))
    fresh = learn_code(state, seen.code.ran) if state.graph is None else learn_backward(state.graph, seen)
    first = min(fresh, key=lambda code: code.co_name, default=None)
    return first and errors.new_code(first.co_name, f"{first.co_filename}:{first.co_firstlineno}")


def vet_follows(state: State, plan: Plan, seen: Seen) -> str | None:
    """A sentence if it is not the same which tensor lies in a place that is followed, or is a gradient that moves, or
    None. Where the function comes to tensors in ways that cannot be followed (a set, a distribution), these may be what
    lies in a place, too, at one call and not at another. Behind a blind all come in such ways."""
    if plan.graph is None and not seen.code.looked and describe.loose_in(plan, seen):
        seen.asks_which = True
        remember(state, asks_which=True)
    first = len(plan.flat.tensors)
    copied = [plan.reached[k - first] for k in plan.copied if k >= first]
    asked = [plan.places[k].path for k in plan.follows if moving.is_asked(seen, plan.places[k])]
    asked += [path for path, t in zip(plan.flat.paths, plan.flat.tensors, strict=True) if id(t) in seen.code.hashed]
    asked += [one.path for one in copied if one.owner != NONE and moving.is_one_asked(seen, [one.tensor])]
    if not asked:
        return None
    remember(state, asks_which=True)
    return errors.asks_which(asked[0])


def vet_back(state: State, plan: Plan, seen: Seen) -> str | None:
    """A sentence if a replay could not write an argument where it lies, nor copy it back there; or None."""
    lost = [plan.paths[k] for k in seen.copied.backs if not has_way_back(plan.tensors[k])]
    state.learnt.moves.fixed.update(lost)
    return errors.no_way_back(lost[0]) if lost else None


def vet_loose(state: State, plan: Plan, seen: Seen) -> str | None:
    """A sentence if other threads ran ops while this one read memory to which nothing leads: one of them may make it
    anew at each call. What the recording before this one met lasts (a cache's)."""
    found = describe.loose_in(plan, seen) if seen.elsewhere else []
    loose = {core.storage_id(t): core.storage_name(t) for t, _ in found}
    known = state.learnt.moves.loose
    if loose.keys() <= known.keys():
        return None
    seen.again = not known
    known.clear()
    known.update(loose)
    return errors.op_elsewhere(seen.elsewhere)


def vet_strays(state: State, seen: Seen) -> str | None:
    """A sentence if kernels that no op shows may have read an argument past its copy, or None."""
    # Of which a backward is given the copies.
    copies = seen.copied.swaps and not (state.learnt.hidden and state.graph is not None)
    remember(state, hidden=state.learnt.hidden or seen.strays)
    return errors.hidden_kernels() if seen.strays and copies else None


def leaves_graph(plan: Plan, seen: Seen, result: object) -> bool:
    """Does a graph of autograd's come out of this capture? It must only ever run inside of one (attention with dropout
    keeps its random numbers on the device there, and reads them on the host elsewhere)."""
    return plan.graph is None and (plan.saves or describe.has_pending(seen, result))


def is_passing(state: State, seen: Seen) -> bool:
    """Is what kept this recording from being one no verdict: will the next one fare better, since this one told what it
    came to nothing by? Not for ever: code made anew at each call would."""
    remember(state, lessons=state.learnt.lessons + seen.again)
    learns = seen.again and state.learnt.lessons <= options.LESSONS
    return learns or (seen.escaped and state.learnt.escapes <= options.ESCAPE_TRIES)
