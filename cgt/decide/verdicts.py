"""Why a call runs eagerly: it cannot be recorded, recordings do not pay, there are enough of them, or an attempt came
to nothing.

A reason is a sentence. What is decided for calls to come is told to the core (core/verdict.pxi), which then does not
ask again until a cool-down has ended."""

import math
import traceback
import weakref
from collections.abc import Callable

import cgt_core as core
import torch

from ..cuts import segments
from ..data import Around, Call, State, Verdict, remember
from ..make import facts, moving
from ..make.plan import misses, place_in_tree, places_first
from ..run.observe import NOT_USER_CODE
from ..words import errors, options, pytree
from ..words.private import is_forward_ad
from . import account, logs

OF_A_SLOT = {
    core.MISS_ALIGN: errors.misaligned, core.MISS_SAME: errors.other_tensor, core.MISS_VALUE: errors.number_on_host,
}  # fmt: skip


def find(call: Call) -> str | None:
    """A reason to run eagerly, or None. Verdicts and limits end after a cool-down of calls."""
    state, flat = call.state, call.flat
    for path, tensor in zip(flat.paths, flat.tensors, strict=True):
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            return errors.subclass(path, type(tensor).__name__)
        if not core.is_plain(tensor):
            return errors.odd_tensor(path, facts.odd_kind([tensor]))
    calls = core.fn_counts(state.f)[0]
    if state.learnt.refused and torch.is_grad_enabled():
        hand_over(call, call.spec, state.learnt.refused[0], calls + options.COOL_DOWN[1])
        return state.learnt.refused[0]
    if is_forward_ad():
        return errors.forward_mode()
    for key in (None, key_of(call)):
        standing = state.learnt.verdicts.get(key)
        if standing is not None and calls < standing.until:
            hand_over(call, key, standing.reason, standing.until)
            return standing.reason
    return None if call.driver is None else over_limit(call, *place_in_tree(call, flat.tensors))


def crowd(call: Call, path: int, parent: int) -> tuple[list[int], tuple[int, int, int | None]] | None:
    """(the recordings of which this place in the tree has enough, newest match first, or none where it is wasted ones
    that are too many; what Learnt.cool knows that by). None: there is room."""
    state, mine, most = call.state, whose(call.flat.program), call.state.opts.max_records or options.HOPES
    nodes = core.children(path, parent, state.f)
    if mine is not None and len(nodes) >= most:  # those of the same object's calls count
        nodes = [n for n in nodes if whose(state.learnt.programs[core.node_spec(n)][0]) == mine]
    replayed = 0 if state.opts.max_records else sum(core.node_replays(n) > 0 for n in nodes)
    if len(nodes) >= min(most + 2 * replayed, max(most, options.MAX_SPECS)):
        return nodes, (path, parent, mine)
    if wasted(state) >= most:
        return [], (path, parent, None)
    for key in state.learnt.cool.keys() & {(path, parent, mine), (path, parent, None)}:  # a cool-down is over
        state.learnt.cool[key] = (0, state.learnt.cool[key][1])
    return None


def over_limit(call: Call, path: int, parent: int) -> str | None:
    """A reason to run eagerly because there are enough recordings, or None: there is room, or the cool-down is over and
    make_place finds some."""
    state, there = call.state, crowd(call, path, parent)
    if there is None:
        return None
    nodes, key = there
    calls = core.fn_counts(state.f)[0]
    until, length = state.learnt.cool.get(key, (0, options.COOL_DOWN[0]))
    if until == 0:
        until = calls + length
        state.learnt.cool[key] = (until, min(2 * length, options.COOL_DOWN[1]))
    if calls >= until:
        return None
    why = why_missed(call, path, parent) if nodes else errors.new_kind(varying(call))
    reason = errors.limit(len(nodes) or wasted(state), why)
    if key[2] is not None:
        hand_over(call, key_of(call), reason, until)
    elif state.graph is None and not options.STRICT:
        core.verdict_place(path, parent, state.f, reason, until)
    return reason


def wasted(state):
    """How many recordings of the function were freed without a replay since its last replay: those of objects that come
    once go with the objects."""
    replays, freed = core.fn_counts(state.f)[3], core.fn_hopes(state.f)[1]
    if state.learnt.waste[0] != replays:
        remember(state, waste=(replays, freed))
    return freed - state.learnt.waste[1]


def whose(program: tuple) -> int | None:
    """The id of the object whose method is called, the first argument, if it is told from others by who it is; or None.
    Methods of several objects are one function, but what one of them varies is no affair of the others."""
    kind, _, obj = program[1] if len(program) > 1 else (None, 0, None)
    return None if kind != pytree.SAME else id(obj() if isinstance(obj, weakref.ref) else obj)


def wait(call: Call, first: bool) -> str | None:
    """A reason to run eagerly since a recording would not pay yet, or None. Backwards do as their forwards."""
    state, f = call.state, call.state.f
    if state.graph is not None or math.isinf(options.OVERHEAD) or state.blockers is not None:
        return None
    mine, room = whose(call.flat.program), state.opts.max_records or options.HOPES
    new = account.meet(state, (*key_of(call), core.fn_unknown(f)), mine, room, came=core.fn_hopes(f)[0] > 1)
    if new and not first:
        if new == 1:
            return errors.new_kind()
        if new < options.COOL_DOWN[0]:  # to compare the calls costs more than many a call
            account.book(state, varies=varying(call))
        reason = errors.new_kind(state.learnt.account.varies)
        core.verdict_fn(f, reason, core.fn_counts(f)[0] + new, 2)
        return reason
    place = (core.NONE, core.NONE) if first else place_in_tree(call, call.flat.tensors)
    missed = [] if first else [miss for miss in places_first(misses(call, *place)) if not is_learnt(state, *miss)]
    missed = [miss for miss in missed if whose(state.learnt.programs[core.node_spec(miss[0])][0]) == mine]
    n = account.waits(state, missed, room, mine)
    if n == 0:
        return None
    books = state.learnt.account
    reason = account.reason(books, n, lambda: why_missed(call, *place))
    heard = 0 if books.failed else books.patience  # calls alike: one that failed would fail again
    core.verdict_fn(f, reason, core.fn_counts(f)[0] + n, heard)
    return reason


def varying(call):
    """The first argument in which the call's structure, if that is what is new, is not that of the one before it; or
    None."""
    if sum(kind[0] == call.spec for kind in call.state.learnt.account.met) > 1:
        return None
    mine, others = whose(call.flat.program), [*call.state.learnt.programs.items()]
    known = next((one for spec, one in reversed(others) if spec != call.spec and whose(one[0]) == mine), None)
    if known is None:  # those before went with their objects
        return next((path for path, one in call.flat.objects if id(one) != mine), None)
    found = pytree.first_difference(known, call.flat) or pytree.first_difference(known, call.flat, (pytree.LIVE,))
    return None if found is None else found[0]


def is_learnt(state, node, why, index):
    """Is this a miss that will not come again, since what lies in that place is followed, or live, from now on?"""
    if why != core.MISS_PLACE:
        return False
    kept, path = state.keep[node], state.keep[node].place_paths[index]
    # It was recorded for one number, and others follow it already.
    if path in kept.numbers.places and path not in state.learnt.numbers.exact:
        followed = any((path, None) in one.numbers.sources for one in state.keep.values())
        return followed or path not in state.learnt.numbers.live
    return kept.followable.get(path) is False and path not in state.learnt.moves.followed


def key_of(call: Call) -> tuple[int, tuple, tuple]:
    """What a verdict is about: structure, ambient state and shapes."""
    return call.spec, core.ambient(), tuple((t.shape, t.dtype, t.device) for t in call.flat.tensors)


def condemn(call: Call, reason: str, fails: bool = True, length: int | None = None) -> None:
    """Run eagerly from now on, until a cool-down that doubles with each verdict. `fails`: the account is to know. A
    function with many verdicts and no recording gets one for all its calls: new shapes will not help it."""
    state, verdicts = call.state, call.state.learnt.verdicts
    if fails:
        account.book(state, failed=state.learnt.account.failed + 1, why=reason)
    many = len(verdicts) >= options.MAX_VERDICTS and not core.fn_nodes(state.f)
    key = None if many else key_of(call)
    length = min(2 * verdicts[key].length, options.COOL_DOWN[1]) if key in verdicts else length or options.COOL_DOWN[0]
    if len(verdicts) > options.MAX_SPECS:
        verdicts.clear()
    until = core.fn_counts(state.f)[0] + length
    verdicts[key] = Verdict(reason, until, length)
    hand_over(call, key, reason, until)


def still_grows(call: Call, around: Around | str) -> str | None:
    """A sentence if tensors that the call finds in places have other shapes than at the last look, as a cache that
    torch.cat makes longer at each call; or None. To look costs less than a recording that fits no later call."""
    moves, found = call.state.learnt.moves, () if isinstance(around, str) else around.found.places
    for place in found if moves.grown else ():
        shapes = moving.shapes_at(place.want)
        before = moves.grown.get(place.path, shapes)
        if before != shapes:
            moves.grown[place.path], reason = shapes, errors.grows(place.path)
            if before is not None:
                condemn(call, reason, fails=False, length=options.LOOK_AGAIN)
            return reason
    moves.grown.clear()
    return None


def note_left(call: Call, error: Exception, counted: bool) -> None:
    """An exception of the function's left a call that was looked at. `counted`: as one that ran eagerly, already. The
    very first one may be a mistake in the arguments; what comes later will come again, in calls like this."""
    state, lines = call.state, [(frame.f_code.co_filename, at) for frame, at in traceback.walk_tb(error.__traceback__)]
    name, at = next((line for line in reversed(lines) if not line[0].startswith(NOT_USER_CODE)), lines[-1])
    reason = errors.left(type(error).__name__, f"{name}:{at}")
    remember(state, left=state.learnt.left + 1)
    if state.learnt.left > 1 or state.learnt.devices.drivers:
        condemn(call, reason, state.learnt.left > 1, 4 * options.COOL_DOWN[0])
    if not counted:
        count_eager(state, reason)


def note_incomparable(state: State, reason: str) -> None:
    """A call came with arguments that no other call can be compared by. Where many did, those to come most likely do,
    too: Python is not asked for a while."""
    remember(state, incomparable=state.learnt.incomparable + 1)
    if state.blockers is not None:
        state.blockers[reason] = state.blockers.get(reason, 0) + 1
    if state.learnt.incomparable >= options.MAX_VERDICTS and state.graph is None and not options.STRICT:
        length = min(options.COOL_DOWN[0] * state.learnt.incomparable, options.COOL_DOWN[1])
        core.verdict_fn(state.f, reason, asked_by(state, core.fn_counts(state.f)[0] + length))


def hand_over(call, key, reason, until):
    """Calls that a verdict is about, and that no recording takes, need not ask Python before the function was called so
    often. What autograd calls looks at more than its arguments."""
    state = call.state
    if state.graph is not None or options.STRICT:  # which wants to hear of each
        return
    if key is None:
        core.verdict_fn(state.f, reason, asked_by(state, until))
    elif call.spec in state.learnt.programs:
        core.verdict_spec(call.spec, list(call.flat.tensors), reason, asked_by(state, until))


def asked_by(state, until):
    """Python is asked once before, when it is time to say that nothing was replayed (logs.py)."""
    return until if state.warned or core.fn_counts(state.f)[0] >= options.WARN_AFTER else min(until, options.WARN_AFTER)


def why_missed(call, path, parent):
    """A sentence on what the newest recording of this structure did not accept."""
    state, tensors = call.state, list(call.flat.tensors)
    for node, why, index in misses(call, path, parent):
        kept = state.keep.get(node)
        if why == core.MISS_SPEC:
            found = pytree.first_difference(state.learnt.programs[core.node_spec(node)], call.flat)
            if found is not None:
                return errors.arguments_changed(*found)
        if why == core.MISS_AMBIENT:
            return errors.another_mode()
        if kept is None or why == core.MISS_SPEC or (why == core.FITS and not kept.values):
            continue
        if why == core.FITS:
            return errors.another_value(segments.lines_of(kept.values))
        if why == core.MISS_ALIVE:
            return errors.still_held(core.dead_line(node, index))
        if why == core.MISS_PLACE:
            return errors.place_changed(kept.place_paths[index])
        if why == core.MISS_GRAD:
            return errors.place_changed(kept.slot_paths[kept.grads[index].slot] + ".grad")
        if why == core.MISS_NUMBER:
            return kept.numbers.decides.get(index) or errors.number_decides("a number", "no line")
        name = kept.slot_paths[index]
        if why == core.MISS_POINTER:
            return errors.moved(name, *(core.slot_addresses(node, index, tensors) if core.debug_build() else ()))
        if why in OF_A_SLOT:
            return OF_A_SLOT[why](name)
        leaf = core.node_facts(node).slots[index].leaf
        now = tuple(tensors[leaf].shape) if leaf != core.NONE else None
        return errors.arguments_changed(name, core.slot_shape(node, index), now)
    if core.fn_counts(state.f)[2] and not core.children(path, parent, state.f):
        return errors.another_way()
    return errors.arguments_changed("a number, string or structure among the arguments")


def why_new(call: Call, first: bool) -> str:
    place = (core.NONE, core.NONE) if first else place_in_tree(call, call.flat.tensors)
    known = not first and core.children(*place, call.state.f)
    return why_missed(call, *place) if known else errors.unrecorded()


def vet_replay(state: State, reason: Callable[[], str]) -> None:
    """CgtError where replays are required: the call that is about to run is none. `reason()`: why."""
    if core.is_required():
        core.fn_count(state.f, "calls", -1)
        raise errors.CgtError(errors.not_replayed(state.name, reason()))


def vet_strict(state: State, reason: str | None) -> None:
    """CgtError where the user wants no call to run eagerly for good."""
    if options.STRICT and reason is not None:
        raise errors.CgtError(errors.strict(state.name, reason))


def count_eager(state: State, reason: str) -> None:
    """A call that had to run eagerly, and why. Reasons that name addresses would never end: the oldest go."""
    core.fn_count(state.f, "eager")
    logs.tell("miss", errors.told_miss, state.name, reason)
    reasons = state.reasons
    reasons[reason] = reasons.get(reason, 0) + 1
    if len(reasons) > options.MAX_REASONS:
        reasons.pop(list(reasons)[0], None)  # another thread may take it away, too
    logs.warn_of_nothing(state)
