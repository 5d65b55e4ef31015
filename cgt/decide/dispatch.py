"""The miss: what to do with a call that no recording accepts. One visible branch, `miss`:

    inside a mode, a capture, another recording  ─► plain      run the function, nothing else
    a verdict stands, or too many recordings     ─► eager      with a reason that explain() tells
    first call of the function                   ─► warm       run it once under observation
    else                                         ─► record     capture (CUDA) or tape (host), launch

What is handed from one function to the next is declared in data.py. All that Python knows about a function is one
`State`, held by what `jit` returned."""

import contextlib
import functools
import weakref
from collections.abc import Callable

import cgt_core as core
import torch
from cgt_core import CUDA, FRESH, HOST, INPUT, MISS_PLACE, NONE, VIEW

from ..cuts import finite, readout, segments
from ..data import Attempt, Call, Changes, Graph, Kept, Options, State, remember
from ..look import empties, impure, places
from ..make import autograd, describe, escapes, islands, moving, record, trace
from ..make import plan as plans
from ..make.optional import collectives
from ..numbers import counters, live
from ..run import blank, tokens
from ..run.observe import note_strays, observe
from ..run.taps import threads_beside
from ..words import errors, options, private, pytree
from ..words.private import outside_dynamo
from . import account, audit, lessons, logs, padding, verdicts
from .backwards import forward_of, prove, readable, run_again
from .freeing import bury, drop_node, free_exchanging, make_place, make_room, make_way, sweep, vet_dropout
from .sites import ATTRIBUTE, BACKWARD, DOOMED, RECORDING, SITES, disable, is_mine
from .warming import is_to_watch, note_fed, note_tensors, timed_survey, warm

WATCHED = []  # lists to which new functions are added: doctor.py wants to know all that they meet


def new_site(function: Callable[..., object], name: str, opts: Options, graph: Graph | None = None) -> core.Site:
    """The jitted form of a function. `graph`: what it runs, if it is the backward of a recording."""
    range_name = "cgt.replay " + name

    def build(f, born):
        state = State(f, born, name, opts, graph, range_name)
        taken = padding.through(state, miss) if opts.pad else miss

        @outside_dynamo
        def on_miss(spec, args, kwargs, due=False, proves=NONE, audited=False):
            call = Call(state, function, spec, None, args, kwargs)
            if proves != NONE:
                return compare(call, proves, audited)
            return again(call, errors.island_differs(name), islands.take_left()) if due else taken(call)

        @outside_dynamo
        def plain(*args, **kwargs):
            return function(*args, **kwargs)

        site = core.Site(f, on_miss, finite.looked_at(name, plain) if options.NAN else plain, state.reasons)
        site.__name__ = site.__qualname__ = name
        setattr(site, ATTRIBUTE, state)
        weakref.finalize(site, DOOMED.append, (f, born)).atexit = False
        SITES[f] = site
        disable(f)
        for watched in WATCHED if graph is None else ():
            state.blockers = {}
            watched.append(site)
        return site

    return core.fn_add(options.OUTPUTS.index(opts.outputs), graph is not None, range_name, build)


def miss(call):
    """A call that was not replayed: decide, run, return the result."""
    state, graph, kwargs = call.state, call.state.graph, call.kwargs
    if graph is not None and "again" in kwargs:
        return run_again(call, *kwargs["again"])
    if graph is not None and "changed" in kwargs:  # right if nothing reads it, as in eager
        return eager(call, errors.saved_changed())
    kind = core.blocker()
    if torch.cuda.is_initialized():
        gpus = range(torch.cuda.device_count()) if core.see_gpus() else [torch.cuda.current_device()]
        if kind == 0 and any(map(core.path_is_captured, gpus)):
            kind = 4
    if kind:
        inlined = kind == 1 and is_mine()
        verdicts.vet_strict(state, None if inlined else errors.blocked(kind))
        return eager(call, errors.blocked(kind), inlined)
    if core.paths_mine():  # a finalizer called us in the middle of a call
        return call.function(*call.args, **kwargs)
    sweep()

    def busy():
        if is_for_gpu(call):
            core.beside()
        return None, eager(call, errors.busy())

    try:
        try:
            reason, result = core.locked(RECORDING, functools.partial(attend, call), busy)
        finally:
            sweep()
        return result if reason is None else eager(call, reason)
    except torch.OutOfMemoryError:  # it is the user's: who catches it, and tries again with less, finds more
        make_way(call.state)
        raise


def is_for_gpu(call):
    """Does a call that nobody has looked at work on a GPU, as far as its arguments and earlier calls tell?"""
    given = pytree.leaves_in((call.args, call.kwargs))
    warmed = CUDA in call.state.learnt.devices.drivers.values()
    return warmed or any(isinstance(x, torch.Tensor) and x.is_cuda for x in given)


def compare(call, node, audited):
    """A call that this recording takes, and audit.py is to look at. `audited`: in its turn; else addresses moved."""
    replay = functools.partial(SITES[call.state.f], *call.args, **call.kwargs)
    run = functools.partial(audit.run if audited else audit.verify, call, node, replay, give_up)
    try:
        if core.blocker() or core.paths_mine() or is_mine():  # part of a recording, of somebody's capture, of an audit
            return replay()
        sweep()  # a miss inside of it cannot
        return core.locked(RECORDING, run, replay)
    finally:
        audit.plan_next(call.state, node)


def give_up(node, call, reason, untold=()):
    """Do without this recording, which was wrong for the call: for a while without any; or with one that copies what
    this one was told of."""
    call = call._replace(spec=core.node_spec(node))
    drop_node(node)
    if not untold:
        verdicts.condemn(call, reason)
    call.state.learnt.moves.untold.update(untold)
    call.state.reasons[reason] = call.state.reasons.get(reason, 0) + 1


def again(call, reason, answers):
    """Run the function eagerly where eager parts of its call ran already: they are answered with what came of them."""
    if any(answer.unsafe for answer in answers):
        raise errors.CgtError(errors.island_unsafe(call.state.name, reason))
    body = functools.partial(islands.answering, answers, functools.partial(eager, call, reason))
    # Jitted functions inside are plain: these parts are not theirs.
    return core.with_paths(functools.partial(core.lend, body))


def attend(call):
    """Warm or record: (None, the result); or (the reason why the call runs eagerly, None)."""
    state = call.state
    live.learn_arguments(state, call.args, call.kwargs)
    try:
        call = plans.flattened(call)
    except pytree.Incomparable as error:
        reason = str(error)
        verdicts.note_incomparable(state, reason)
        verdicts.vet_strict(state, reason)
        return reason, None
    remember(state, incomparable=0)
    reason = verdicts.find(call)
    verdicts.vet_strict(state, reason)
    reason = reason or vet_dropout(call)
    if reason is not None:
        return reason, None
    program, _ = state.learnt.programs.get(call.spec, (None, None))
    # Between the core's answer and the lock another thread may have reset the function: the spec's row is free then, or
    # another structure's; and numbers may be live by now.
    if program is None or not pytree.same_program(program, call.flat.program):
        call = call._replace(spec=find_spec(state, call.flat))
    first = call.driver is None
    reason = verdicts.wait(call, first)
    if reason is not None:
        return reason, None
    verdicts.vet_replay(state, lambda: verdicts.why_new(call, first))
    run = warm if first else record_call
    kind = "warm" if run is warm else "record"
    why, before = logs.listens("record") and verdicts.why_new(call, first), core.fn_counts(state.f)[:5]
    try:
        with private.named_range(f"cgt.{kind} {state.name}"):
            result = account.timed(state, run, call, first=before[0] == 1)
    except errors.CgtError:
        raise
    except Exception as error:
        verdicts.note_left(call, error, core.fn_counts(state.f)[1:5] != before[1:])
        raise
    if why and core.fn_counts(state.f)[1:3] != before[1:3]:
        logs.tell("record", errors.told_record, state.name, kind, state.learnt.account.last, why)
    return None, result


def eager(call, reason, inlined=False):
    """Run the plain function; `inlined` calls belong to the recording around them."""
    state, graph = call.state, call.state.graph
    if inlined:
        core.fn_count(state.f, "calls", -1)
    else:
        verdicts.vet_replay(state, lambda: reason)
        verdicts.count_eager(state, reason)
    if graph is None:
        return account.timed_eager(state.learnt.account, call.function, call.args, call.kwargs)
    if state.proven:
        return call.function(*call.args, **call.kwargs)
    seen = observe(graph.driver, graph.device, graph, readable(graph, call.args))
    result = trace.run(seen, call.function, call.args, call.kwargs)
    prove(state, seen, call.args)
    return result


# --- specs, verdicts, limits ------------------------------------------------------------------


def find_spec(state, flat):
    """Add a spec for these arguments. Objects compared by identity are held weakly if they can be:
    a dead one takes its spec and recordings along."""
    f = state.f
    program, spec_of = [], []
    for kind, n, obj in flat.program:
        if kind == pytree.SAME and not isinstance(obj, type):
            with contextlib.suppress(TypeError):
                obj = weakref.ref(obj, lambda _, s=spec_of: s and DOOMED.append((state, s[0])))
        program.append((kind, n, obj))
    program = tuple(program)
    mine = [s for s, (known, _) in state.learnt.programs.items() if verdicts.whose(known) == verdicts.whose(program)]
    if len(mine) >= options.MAX_SPECS or len(state.learnt.programs) >= options.MAX_GRAPHS:
        used = {core.node_spec(n) for n in core.fn_nodes(f)}
        DOOMED.append((state, next((s for s in mine or state.learnt.programs if s not in used), NONE)))
    spec_of.append(core.spec_add(f, program, len(flat.tensors), len(flat.numbers), state.learnt.programs, flat.where))
    return spec_of[0]


# --- record ------------------------------------------------------------------------------------


def record_call(call):
    """Record the call as a node and return its result. Whatever happens, the recording is over then."""
    attempt = Attempt()
    over = functools.partial(record.close, attempt)
    result = core.within([(lambda: None, over)], functools.partial(record_node, call, attempt))
    verdicts.vet_strict(call.state, attempt.verdict)
    return result


def record_node(call, attempt):
    """The same, within: a plan, a run, a draft, a node. Where one of these cannot be, what ran for real stands, and
    what did not is undone and runs eagerly."""
    around = timed_survey(call)
    if is_to_watch(call, around):
        return warm(call, around.found.sources)
    reason = verdicts.still_grows(call, around)
    attempt.passing = reason is not None
    reason = reason or prepare(call, attempt, around) or capture(call, attempt)
    if attempt.starved:
        # The next call has their memory, and so has this one, which runs eagerly.
        attempt.passing |= make_way(call.state)
    answers = attempt.seen.cuts.answers if attempt.seen is not None else []
    if reason is None:
        reason = draft_node(call, attempt)
        # Nobody replays the recording before its own call has the result.
        reason, result = core.with_paths(functools.partial(settle, call, attempt, reason))
        if reason is None:
            return result
    if not (attempt.passing or attempt.raised):
        reason = condemned(call, attempt, reason)
    record.undo(attempt)
    if attempt.seen is not None and impure.vet(impure.lasting(attempt.plan.sources), attempt.seen):
        raise errors.CgtError(errors.drawn_in_vain(call.state.name, reason))
    result = again(call, reason, answers) if answers else eager(call, reason)
    if attempt.raised and not attempt.passing:  # eager does not raise: the capture was why
        condemned(call, attempt, reason)
    return result


def prepare(call, attempt, around):
    """attempt.plan: what is decided before the function runs; or the reason why nothing is recorded. Begins an
    iteration if the call does."""
    state = call.state
    reason = around if isinstance(around, str) else impure.unasked(around.found.sources)
    if reason is not None:
        return reason
    path, parent = plans.place_in_tree(call, around.tensors, around.paths)
    reason = verdicts.over_limit(call, path, parent)
    attempt.passing = reason is not None
    if reason is not None:
        return reason
    make_place(call, path, parent)
    make_room(state)
    missed = plans.places_first(plans.misses(call, path, parent))
    around = plans.follow_renewed(call, around, missed)
    if isinstance(around, str):
        return around
    followable = plans.find_followable(call, around)
    mobile = plans.find_mobile(call, around, followable)
    moves = plans.note_moves(state, around, missed, followable, mobile)
    other = [(state.keep[node], index) for node, why, index in missed if why == MISS_PLACE]
    changed = {kept.place_paths[index] for kept, index in other}
    live.learn_places(state, around.found.places, [kept for kept, _ in other], changed)
    try:
        core.with_paths(functools.partial(core.go_on, call.device, parent, around.tensors))
    except core.DriverError as error:  # no memory for what the last iteration left held
        attempt.passing = True
        return record.failure(error)
    plan = plans.plan_call(call, around, parent, followable, mobile, moves, changed)
    if isinstance(plan, str):
        return plan
    attempt.plan = plan
    return None


def capture(call, attempt):
    """Run the function while it is recorded. A sentence if nothing ran, or None."""
    plan = attempt.plan
    reason = record.capture(call, attempt)
    seen = attempt.seen
    if seen is not None:
        learnt = call.state.learnt
        note_fed(call.state, seen, zip(plan.paths, plan.tensors, strict=True))
        computes = learnt.computes if seen.computed is None else seen.computed
        remember(call.state, late=max(learnt.late, seen.late), computes=computes)
        why_uncounted = functools.partial(plans.why_uncounted, call.state, plan.saves)
        told = moving.learn_looked(call.state, seen) or counters.learn(call.state, plan, seen, why_uncounted)
        seen.again = seen.again or told is not None
        reason, seen.reason = reason and (told or reason), told or seen.reason
        live.blame(call.state, seen, reason or seen.reason)
    if reason is not None:
        attempt.passing |= autograd.was_greedy(plan) or (seen is not None and lessons.is_passing(call.state, seen))
        return reason
    seen.reason = seen.reason or impure.vet(plan.sources, seen)
    moved = describe.find_moved(plan)
    if moved and plan.driver == CUDA:  # into a capture that has not run
        return errors.replaced(moved)
    seen.reason = seen.reason or (errors.replaced(moved) if moved else None)
    if plan.driver == CUDA:
        attempt.plan = plan._replace(was=[was._replace(alias=None) for was in plan.was])  # their memory can go
    return None


def draft_node(call, attempt):
    """Describe what was recorded: attempt.draft, or a sentence that says why it cannot be a node."""
    state, plan, seen = call.state, attempt.plan, attempt.seen
    note_tensors(state, seen, zip(plan.paths, plan.tensors, strict=True))
    try:
        if plan.driver == CUDA:
            note_strays(seen, describe.tensors_of(seen, attempt.result))
        empties.settle_empties(plan.places, plan.lone, plan.changed)
        reason = lessons.vet_code(state, seen) or (errors.late_read() if autograd.was_greedy(plan) else None)
        reason = reason or lessons.vet_strays(state, seen) or lessons.vet_follows(state, plan, seen)
        reason = reason or lessons.vet_back(state, plan, seen)
        seen.again = seen.again or reason is not None
        reason = reason or lessons.vet_loose(state, plan, seen) or islands.vet_parts(call.function, plan, seen)
        if reason is None:
            plan = attempt.plan = find_moving(state, plan, seen)
            reason = learn_changes(state, plan, seen)
        draft = reason or describe.rows(plan, seen, attempt.result, call)
        if not isinstance(draft, str):
            state.proven |= plan.graph is not None
            draft = autograd.complete(state, plan, seen, draft)
        tokens.drop_words(seen)
        if not isinstance(draft, str):
            draft = blank.told(seen, [row.proto for row in draft.outs if row.kind == FRESH]) or draft
        if not isinstance(draft, str):
            reason, keeps = segments.vet(seen, draft)
            reason = reason or lessons.escaping(state, seen, escapes.vet_shared(plan, seen, attempt.result))
            reason = reason or lessons.escaping(state, seen, escapes.vet_puts(plan, seen, attempt.result))
            reason = reason or lessons.escaping(state, seen, escapes.vet_escapes(plan, seen, draft))
            draft = reason or draft._replace(keeps_grads=keeps)
    except Exception as error:  # a gap of ours must not become the user's crash: the result stands
        draft = record.failure(error)
    if isinstance(draft, str):
        return draft
    attempt.draft = draft
    return None


def find_moving(state, plan, seen):
    """The plan, with the places that the run changed and did not read; `free` is None where that is not known."""
    ran = moving.counted(state, code_of(state) | seen.code.ran)
    rows = moving.find(plan.places, plan.found.owners, ran, seen) | dict.fromkeys(plan.found.hidden)
    found = moving.find_puts(plan, ran, seen, describe.is_guarded_as)
    if found is None:
        return plan._replace(changes=Changes(free=None))
    more, free, puts = found
    plan.places.extend(more)
    replaced = [k for k in plan.follows if state.opts.outputs == "rescue" and moving.is_replaced(plan.places[k])]
    stored = [k for k in live.stored_in(seen, plan.places) if not (k in free or k in rows or k in replaced)]
    flags = moving.find_flags(plan, {*rows, *free, *stored, *plan.follows}) if not threads_beside() else []
    changed = (*replaced, *stored, *flags, *plan.found.hidden)
    puts = [*puts, *((places.Put("", "", None, plan.places[k]), k) for k in changed)]
    own = range(len(plan.places), len(plan.places) + len(seen.own))
    puts += [(places.Put("", "", None, place), k) for k, place in zip(own, seen.own, strict=True)]
    plan.places.extend(place._replace(want=None) for place in seen.own)
    free = free.union(replaced, own)
    plan.places.extend(moving.class_guards(plan.places, plan.found.owners, [*rows, *free, *stored, *flags]))
    return plan._replace(changes=Changes(rows, free, puts, stored))


def learn_changes(state, plan, seen):
    """A sentence if the run changed places in ways that the next recording will know, or that none can; or None."""
    if plan.changes.free is None:
        return moving.learn_opened(state, plan, seen)
    reason = moving.learn_hidden(state, plan, seen) or moving.learn_replaced(state, plan, seen)
    reason = reason or live.learn_stored(state, plan, seen, lambda: plans.why_untraced(state, plan.saves))
    seen.again = seen.again or reason is not None
    return reason


def code_of(state):
    """The code that ran so far; a backward's counts as its forward's."""
    owner = state if state.graph is None else forward_of(state.graph)
    return owner.ran if owner is not None else set()


def settle(call, attempt, reason):
    """(None, the call's result): of a node that was made and ran, or of what was recorded in vain but ran. Else (the
    reason why there is neither, None). The caller holds the paths."""
    plan, on_host = attempt.plan, attempt.plan.driver == HOST
    lost = attempt.overtaken or core.lost()
    try:
        reason = errors.lost() if lost else reason or make_node(call, attempt)
        if reason is None:
            return None, run_node(call, attempt)
        attempt.passing = lost or lessons.is_passing(call.state, attempt.seen)
        stands = on_host or not (lost or lessons.leaves_graph(plan, attempt.seen, attempt.result))
        if stands:
            return None, abandon(call, attempt, reason)
    except core.DriverError as error:
        if on_host:
            raise errors.CgtError(errors.replay_failed(call.state.name, error.args[2], error.args[1])) from error
        reason = record.failure(error)  # nothing was launched, but for segments: eager is still right
        attempt.passing = False
        if attempt.node != NONE:
            core.undo_writes(attempt.node)
            drop_node(attempt.node)
            core.fn_count(call.state.f, "records", -1)
    attempt.result = None
    return reason, None


def make_node(call, attempt):
    """The draft becomes a node: attempt.node; or a sentence, and the call's result is as it was."""
    state, plan, seen, exact = call.state, attempt.plan, attempt.seen, call.state.learnt.numbers.exact
    attempt.result = None
    parts, attempt.draft = record.part_result(plan, attempt.draft)
    reason = lessons.escaping(state, seen, escapes.vet_aliases(seen, attempt.draft))
    reason = reason or lessons.escaping(state, seen, describe.vet_changes(plan, code_of(state), exact))
    reason = reason or record.complete(plan, seen, attempt.draft)
    if reason is not None:
        attempt.result = record.restore_result(plan, seen, attempt.draft, parts)
        return reason
    del parts
    attempt.node = add_node(call, plan, seen, attempt.draft)
    readout.bring(seen)
    attempt.draft = attempt.seen = None
    return None


def run_node(call, attempt):
    """Run the recording for the call that made it; what it replaces goes. The caller holds the paths."""
    plan = attempt.plan
    result = core.run_node(attempt.node, plans.leaves_of(plan.flat), plan.driver == CUDA)
    for old, moved, first in plan.moves:
        if set(moved).issubset(plan.copied) or (first and any(moved[0] in slots for slots, _ in plan.follows.values())):
            core.node_drop(old, replaced=True)
    bury()
    attempt.settled = True
    return result


# --- what becomes of it -----------------------------------------------------------------------


def abandon(call, attempt, reason):
    """The function ran (host) or was captured whole (CUDA), but cannot be replayed. The host's results stand; a capture
    is launched once and its memory moved out of the pool. The caller holds the paths."""
    state = call.state
    if attempt.plan.driver == CUDA:
        record.launch_once(attempt)
    core.abort()
    attempt.settled = True
    if not attempt.passing:
        reason = condemned(call, attempt, reason)
    if state.graph is not None and not state.proven:
        prove(state, attempt.seen, call.flat.tensors)  # it ran for real: was it right?
    verdicts.count_eager(state, reason)
    return readout.fill(attempt.seen, attempt.result)


def condemned(call, attempt, reason):
    """Nothing like this call is recorded for a while: the reason, in which threads are named that may be why."""
    attempt.verdict = reason = errors.beside_threads(live.absolve(call.state, reason), threads_beside())
    verdicts.condemn(call, reason)
    return reason


def add_node(call, plan, seen, draft):
    """Hand the rows to the core and keep alive what they borrow; the node."""
    state, behind, graph = call.state, draft.behind, draft.behind.graph
    used = describe.used_slots(plan, draft)
    index = {k: j for j, k in enumerate(used)} | {NONE: NONE}
    slots, outs = renumbered(draft, used, index)
    follows, places_of = plan.follows, plan.followable.items()
    followable = {path: k in follows for at, (k, _) in places_of for path in (at, plan.places[k].path)}
    followed = {slot for slots, _ in follows.values() for slot in slots}
    mine = [None if k in followed else s.tensor for k, s in zip(used, slots, strict=True)]
    groups, order = describe.group_places(plan, index, moving.any_lists(plan))
    row_at = {k: j for j, k in enumerate(order)} | {NONE: NONE}
    # Another thread may have moved the version of what this run did not touch.
    effects = [e._replace(slot=index[e.slot], place=row_at[e.place]) for e in draft.effects if e.slot in index]
    grads = [g._replace(slot=index[g.slot]) for g in draft.grads]
    program = draft.out.program
    make = pytree.maker(program) if any(op[0] in (pytree.DATACLASS, pytree.CUSTOM) for op in program) else None
    site = None
    if graph is not None:
        autograd.cut(draft)
        opts = state.opts._replace(outputs="rescue", inputs="auto", static=((), ()), dynamic=(), pad=())
        site = new_site(autograd.backward_of(graph), state.name + BACKWARD, opts, graph)
    saves = [(index[save.slot], save.out) for save in behind.saves]
    loose = describe.loose_in(plan, seen)
    kept = Kept(
        graph, site, (program, groups, effects, mine, plan.also, seen.alive.objects, make),
        [draft.paths[k] for k in used], [plan.places[k].path for k in order], followable, grads, loose,
        moving.told(plan, code_of(state)), live.told(seen.live, plan), core.record_seconds(),
        seen.reads.values, seen.cuts.forks, islands.told(seen), seen.run.ops, seen.trail, frozenset(seen.copied.told),
        audit.changes(seen, draft, loose), seen.random, plan.changed,
    )  # fmt: skip
    node = core.add_node(
        state.f, call.spec, state.keep, kept, plan.ambient, slots, outs, program, make, effects, grads, groups,
        list(plan.flat.tensors), (site, saves, [index[k] for k in behind.flows], behind.joined),
        live.rows_of(seen.live, row_at, index), segments.undo_rows(seen), draft.keeps_grads,
    )  # fmt: skip
    if graph is not None:
        graph.loose.extend([t for t, _ in loose] + seen.generators.dropout)
    islands.settle(seen, plan)
    for buffer in seen.generators.dropout:
        core.node_draws(node, plan.device, buffer)
        remember(state, recurrent=True)
    note_recorded(state, plan, seen, node)
    return node


def renumbered(draft, used, index):
    """The draft's slots and outputs, as rows that name slots by their place among the used ones."""
    slots = [s if s.owner == NONE else s._replace(owner=index[s.owner]) for s in map(draft.slots.__getitem__, used)]
    outs = [o._replace(ref=index[o.ref]) if o.kind in (VIEW, INPUT) else o for o in draft.outs]
    return slots, [o if o.grad_slot == NONE else o._replace(grad_slot=index[o.grad_slot]) for o in outs]


def note_recorded(state, plan, seen, node):
    core.fn_count(state.f, "records")
    learnt = state.learnt
    remember(
        state, unguarded=plan.found.notes, left=0, lessons=0, blamed=None, account=learnt.account._replace(failed=0),
        exchanges=learnt.exchanges or seen.exchanges,
    )  # fmt: skip
    audit.plan_next(state, node, replays=0)
    audit.doubt(state, node)
    if seen.exchanges:
        collectives.watch_groups(free_exchanging)
        collectives.watch_replays(node, plan.device)
