"""The miss: what to do with a call that no recording accepts. One visible branch, `miss`:

    inside a mode, a capture, another recording  ─► plain      run the function, nothing else
    a verdict stands, or too many recordings     ─► eager      with a reason that explain() tells
    first call of the function                   ─► warm       run it once under observation
    else                                         ─► record     capture (CUDA) or tape (host), launch

What is handed from one function to the next is declared in data.py. All that Python knows about a function is
one `State`, held by what `jit` returned.
"""

import contextlib
import functools
import math
import threading
import time
import weakref

import cgt_core as core
import torch
from cgt_core import (
    AT_PLACE,
    CUDA,
    FRESH,
    HOST,
    INPUT,
    LIVE,
    MISS_PLACE,
    NONE,
    VIEW,
)

from . import (
    account,
    audit,
    autograd,
    blank,
    counters,
    describe,
    devices,
    empties,
    errors,
    flow,
    impure,
    islands,
    live,
    logs,
    moving,
    options,
    places,
    pytree,
    ranks,
    readout,
    record,
    segments,
    tokens,
    trace,
    verdicts,
    verify,
)
from . import budget as budgets
from .addresses import has_way_back
from .data import LEARNT, Attempt, Call, Kept, State, check_draft
from .observe import all_paths, all_tensors, asks_on, note_reason, note_strays, observe
from .plan import (
    device_of,
    driver_of,
    find_followable,
    leaf_devices,
    learn_code,
    leaves_of,
    misplaced,
    misses,
    note_moves,
    place_in_tree,
    places_first,
    plan_call,
    survey,
    why_uncounted,
    why_untraced,
)
from .private import outside_dynamo, without_torch_function
from .taps import threads_beside

ATTRIBUTE = "_cgt_state"  # of a jitted function: its state
BACKWARD = ".backward"  # behind the name of the function whose backward it is

SITES = weakref.WeakValueDictionary()  # function row -> jitted function, which has ATTRIBUTE
RECORDING = threading.RLock()  # around warming and recording, in the whole process
# What waits to be freed: (function row, born) of collected functions, (state, spec) of specs whose
# argument objects died, (state, None) of functions reset while one was being warmed or recorded, (state, GRAPHS) of those
# whose gradients were refused meanwhile.
# Freed at the end of the miss, at the next miss or at the next step, never in the middle of a call.
DOOMED = []
GRAPHS = "graphs"
FOREVER = 1 << 62  # calls
WATCHED = []  # lists to which new functions are added: doctor.py wants to know all that they meet
WARM = {"runs": 0, "results": []}  # functions warmed so far; weak references to what that returned


def sites():
    """All jitted functions alive. Other threads may make one meanwhile: references are copied in one go."""
    return [site for site in (ref() for ref in SITES.valuerefs()) if site is not None]


def new_site(function, name, opts, graph=None, cls=core.Site):
    """The jitted form of a function. `graph`: what it runs, if it is the backward of a recording."""
    range_name = "cgt.replay " + name

    def build(f, born):
        state = State(f, born, name, opts, graph, range_name)
        state.dynamic = live.paths_of_arguments(function, opts.dynamic)
        state.live |= state.dynamic

        @outside_dynamo
        def on_miss(spec, args, kwargs, due=False, proves=NONE, audited=False):
            call = Call(state, function, spec, None, args, kwargs)
            if proves != NONE:
                return compare(call, proves, audited)
            return again(call, errors.island_differs(name), islands.take_left()) if due else miss(call)

        @outside_dynamo
        def plain(*args, **kwargs):
            return function(*args, **kwargs)

        site = cls(f, on_miss, plain, state.reasons)
        site.__name__ = site.__qualname__ = name
        setattr(site, ATTRIBUTE, state)
        weakref.finalize(site, DOOMED.append, (f, born)).atexit = False
        SITES[f] = site
        disable(f)
        for sites in WATCHED if graph is None else ():
            state.blockers = {}
            sites.append(site)
        return site

    return core.fn_add(options.OUTPUTS.index(opts.outputs), graph is not None, range_name, build)


def disable(f):
    """Where the user wants no cgt, no call comes to Python: all run eagerly."""
    if options.DISABLED:
        core.verdict_fn(f, errors.disabled(), FOREVER)


def miss(call):
    """A call that was not replayed: decide, run, return the result."""
    state, graph, kwargs = call.state, call.state.graph, call.kwargs
    if graph is not None and not kwargs.keys() <= {"changed"}:
        refuse_gradients(graph, errors.refused_backward("batched" in kwargs))
        told = errors.batched_gradients if "batched" in kwargs else errors.create_graph
        raise errors.CgtError(told(state.name.removesuffix(BACKWARD)))
    if graph is not None and "changed" in kwargs:  # right if nothing reads it, as in eager
        return eager(call, errors.saved_changed())
    kind = core.blocker()
    if torch.cuda.is_initialized():
        gpus = range(torch.cuda.device_count()) if core.see_gpus() else [torch.cuda.current_device()]
        if kind == 0 and any(map(core.stream_is_capturing, gpus)):
            kind = 4
    if kind:
        inlined = kind == 1 and is_mine()
        verdicts.vet_strict(state, None if inlined else errors.blocked(kind))
        return eager(call, errors.blocked(kind), inlined)
    if core.paths_mine():  # a finalizer called us in the middle of a call
        return call.function(*call.args, **kwargs)
    sweep()
    busy = functools.partial(eager, call, errors.busy())
    try:
        try:
            reason, result = core.locked(RECORDING, functools.partial(attend, call), lambda: (None, busy()))
        finally:
            sweep()
        return result if reason is None else eager(call, reason)
    except torch.OutOfMemoryError:  # it is the user's: who catches it, and tries again with less, finds more
        make_way(call.state)
        raise


def compare(call, node, audited):
    """A call that this recording takes, and that audit.py is to look at; or else verify.py."""
    replay = functools.partial(SITES[call.state.f], *call.args, **call.kwargs)
    run = functools.partial(audit.run if audited else verify.run, call, node, replay, give_up)
    try:
        if core.blocker() or core.paths_mine() or is_mine():  # part of a recording, of somebody's capture, of an audit
            return replay()
        sweep()  # a miss inside of it cannot
        return core.locked(RECORDING, run, replay)
    finally:
        audit.plan_next(call.state, node)


def give_up(node, call, reason, untold=()):
    """Do without this recording, which was wrong for the call: for a while without any; or with one that copies what this one was told of."""
    call = call._replace(spec=core.node_facts(node).spec)
    drop_node(node)
    if not untold:
        verdicts.condemn(call, reason)
    call.state.untold.update(untold)
    call.state.reasons[reason] = call.state.reasons.get(reason, 0) + 1


def again(call, reason, answers):
    """Run the function eagerly where eager parts of its call ran already: they are answered with what came of them."""
    if any(answer.unsafe for answer in answers):
        raise errors.CgtError(errors.island_unsafe(call.state.name, reason))
    body = functools.partial(islands.answering, answers, functools.partial(eager, call, reason))
    return core.with_paths(body, True)  # jitted functions inside are plain: these parts are not theirs


def attend(call):
    """Warm or record: (None, the result); or (the reason why the call runs eagerly, None)."""
    state = call.state
    live.learn_arguments(state, call.args, call.kwargs)
    try:
        call = call._replace(flat=pytree.flatten_call(call.args, call.kwargs, *state.opts.static, state.live))
    except pytree.Incomparable as error:
        reason = str(error)
        verdicts.note_incomparable(state, reason)
        verdicts.vet_strict(state, reason)
        return reason, None
    state.incomparable = 0
    reason = verdicts.find(call)
    verdicts.vet_strict(state, reason)
    reason = reason or vet_dropout(call)
    if reason is not None:
        return reason, None
    if not is_spec(call):
        call = call._replace(spec=find_spec(state, call.flat))
    first = driver_of(state, call.flat) is None
    reason = verdicts.wait(call, first)
    if reason is not None:
        return reason, None
    verdicts.vet_replay(state, lambda: verdicts.why_new(call, first))
    run = warm if first or is_behind_warm_up(state, call.flat) else record_call
    kind = "warm" if run is warm else "record"
    why, before = logs.listens("record") and verdicts.why_new(call, first), core.fn_counts(state.f)[:5]
    try:
        with torch.profiler.record_function(f"cgt.{kind} {state.name}"):
            result = account.timed(state.account, run, call, first=before[0] == 1)
    except errors.CgtError:
        raise
    except Exception as error:
        verdicts.note_left(call, error, core.fn_counts(state.f)[1:5] != before[1:])
        raise
    if why and core.fn_counts(state.f)[1:3] != before[1:3]:
        logs.tell("record", errors.told_record, state.name, kind, state.account.last, why)
    return None, result


def is_mine():
    """Is the mode around us that of a recording under way in this thread: are we being inlined?"""
    return RECORDING._is_owned()


def eager(call, reason, inlined=False):
    """Run the plain function; `inlined` calls belong to the recording around them."""
    state, graph = call.state, call.state.graph
    if inlined:
        core.fn_count(state.f, "calls", -1)
    else:
        verdicts.vet_replay(state, lambda: reason)
        verdicts.count_eager(state, reason)
    if graph is None:
        return account.timed_eager(state.account, call.function, call.args, call.kwargs)
    if graph.proven:
        return call.function(*call.args, **call.kwargs)
    seen = observe(graph.driver, graph.device, graph, readable(graph, call.args))
    result = trace.run(seen, call.function, call.args, call.kwargs)
    prove(graph, seen, call.args)
    return result


# --- backwards --------------------------------------------------------------------------------


def readable(graph, leaves):
    """What a recorded graph may read in a call."""
    return [*(t for t in leaves if isinstance(t, torch.Tensor)), *(t for _, t in graph.reached), *graph.loose]


def prove(graph, seen, leaves):
    """A recorded graph was run under observation: did it read only what belongs to the call?"""
    reason = describe.vet_backward(graph, seen, readable(graph, leaves))
    if reason is None:
        graph.proven = None not in seen.ran
    else:
        disprove(graph, reason)
    learn_backward(graph, seen)


def learn_backward(graph, seen):
    """What a backward reads is guarded by its forward, which is recorded anew if it passed over code that runs now. The
    code that can read more."""
    forward = forward_of(graph)
    fresh = []
    if forward is not None:
        fresh = learn_code(forward, seen.ran & forward.passed)
        if graph.places:
            fresh += learn_code(forward, set(flow.that_disturb(seen.ran - forward.ran - {None}, forward.ran)))
    if fresh:
        DOOMED.append((forward, GRAPHS))
    return fresh


def forward_of(graph):
    """The state of the function of whose recording this is the backward, or None."""
    return getattr(SITES.get(graph.forward), ATTRIBUTE, None)


def disprove(graph, reason):
    """A recorded graph cannot be run for other calls: its function is not differentiable by replay. Of
    the very call that was recorded this run was right; of a replayed one it was not."""
    forward = forward_of(graph)
    kept = forward.keep.get(graph.node) if forward is not None else None
    known = kept is not None and kept.graph is graph
    replayed = not known or core.node_facts(graph.node).n_replay > 0
    refuse_gradients(graph, reason)
    if replayed:
        raise errors.CgtError(errors.stale_backward(reason))


def refuse_gradients(graph, reason):
    """Calls with gradients of this graph's function run eagerly from now on."""
    forward = forward_of(graph)
    if forward is None:
        return
    forward.refused = reason
    core.locked(RECORDING, functools.partial(drop_graphs, forward), lambda: DOOMED.append((forward, GRAPHS)))


def drop_graphs(state):
    """Free a function's recordings with gradients. Another thread may be recording behind one: the caller holds RECORDING."""
    for node in [n for n, kept in state.keep.items() if kept.graph is not None]:
        if node in state.keep:  # freeing one frees those behind it
            drop_node(node)


# --- specs, verdicts, limits ------------------------------------------------------------------


def is_spec(call):
    """Is the call's spec the structure of its arguments, with the numbers that are live by now? Between the core's answer
    and the lock another thread may have reset the function: the spec's row is free then, or another structure's."""
    program, _ = call.state.programs.get(call.spec, (None, None))
    if program is None or pytree.matches_call(program, call.args, call.kwargs) is None:
        return False
    return sum(kind == LIVE for kind, _, _ in program) == len(call.flat.numbers)


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
    mine = [s for s, (known, _) in state.programs.items() if verdicts.whose(known) == verdicts.whose(program)]
    if len(mine) >= options.MAX_SPECS or len(state.programs) >= options.MAX_GRAPHS:
        used = {core.node_facts(n).spec for n in core.fn_nodes(f)}
        DOOMED.append((state, next((s for s in mine or state.programs if s not in used), NONE)))
    spec_of.append(core.spec_add(f, program, len(flat.tensors), len(flat.numbers), state.programs, flat.paths))
    return spec_of[0]


def forget_parent():
    """In the child of a fork: the threads of the parent are not there, one that recorded neither."""
    core.forget(is_mine())
    if not is_mine():
        RECORDING._at_fork_reinit()


def sweep():
    """Free the rows of what was collected since. Never in the middle of a call; while something is
    being recorded, its thread will do it."""
    if DOOMED and not core.paths_mine() and not is_mine():
        core.locked(RECORDING, functools.partial(core.with_paths, free_doomed), lambda: None)


def free_doomed():
    """The caller holds the paths. What is freed may let go of backwards, and doom them."""
    while DOOMED:
        doomed = what, which = DOOMED[-1]
        if which is None:
            forget(what)
        elif which is GRAPHS:
            drop_graphs(what)
        elif isinstance(what, State):
            free_spec(what, which)
        else:
            core.fn_free(what, which)
        DOOMED.pop(next(k for k, one in enumerate(DOOMED) if one is doomed))  # others may have come meanwhile
        bury()


def free_exchanging():
    """A group of processes is about to go: the recordings that exchange data go before it."""
    for state in [getattr(site, ATTRIBUTE) for site in sites()]:
        if state.exchanges:
            reset_state(state)
    sweep()


def trim():
    """Give back the memory of pools in which nothing lives, unless something is being recorded."""
    if not is_mine():
        core.locked(RECORDING, record.release_pools, lambda: None)


def bury():
    """Nodes were freed, perhaps of several functions: let go of what they kept alive."""
    freed = core.freed()
    for f, node in freed:
        state = getattr(SITES.get(f), ATTRIBUTE, None)
        kept = state.keep.pop(node, None) if state is not None else None
        if kept is not None and kept.backward is not None:
            counts = core.fn_counts(getattr(kept.backward, ATTRIBUTE).f)
            state.past = [a + b for a, b in zip(state.past, counts, strict=True)]
    nodes = {node for _, node in freed}
    for site in sites() if nodes else ():
        state = getattr(site, ATTRIBUTE)
        state.cool = {k: v for k, v in state.cool.items() if k[1] not in nodes}


def free_spec(state, spec):
    """Free a spec with its recordings, and what they kept alive. The caller holds the paths."""
    if not core.fn_is(state.f, state.born) or state.programs.pop(spec, None) is None:
        return  # freed or reset since
    state.verdicts = {k: v for k, v in state.verdicts.items() if k is None or k[0] != spec}
    state.account.met = {k: whose for k, whose in state.account.met.items() if k[0] != spec}
    core.spec_free_if(state.f, state.born, spec)


def vet_dropout(call):
    """A sentence if the function's recurrent layers begin with another random state of cuDNN's at this call, or None.
    Recordings with the old one fit no call any more."""
    state = call.state
    if not state.recurrent or driver_of(state, call.flat) != CUDA:
        return None
    for n in core.fn_nodes(state.f):
        if n in state.keep and core.node_is_spent(n):  # freeing one frees those behind it
            drop_node(n)
    return errors.cudnn_dropout() if core.dropout_begins_anew(device_of(state, call.flat)) else None


def make_place(call, path, parent):
    """Room for one more recording of the function there: after the cool-down the one matched longest ago goes."""
    state = call.state
    nodes = verdicts.siblings(call, path, parent)
    if len(nodes) >= state.opts.max_records:
        key = (path, parent, verdicts.whose(call.flat.program))
        state.cool[key] = (0, state.cool[key][1])
        logs.tell("evict", errors.told_evict, state.name, len(nodes))
        drop_node(nodes[-1])


def drop_node(node):
    """Free a recording with those behind it, and what they kept alive."""

    def drop():
        core.node_drop(node)
        bury()

    if core.paths_mine():  # the caller holds the paths already
        drop()
    else:
        core.with_paths(drop)


def make_room(state):
    """Free recordings that ran longest ago, leaves first, until there is room for another one."""
    most = state.opts.memory_budget
    while len(core.nodes()) >= state.opts.max_graphs or (most is not None and budgets.held() > most):
        if not evict(state):
            return


def evict(state):
    """Free the recording that ran longest ago and has none behind it, if there is one."""
    node = core.node_oldest()
    if node is not None:
        logs.tell("evict", errors.told_evict, state.name, len(core.nodes()))
        drop_node(node)
    return node is not None


def make_way(state):
    """The device has no memory left: what could be recorded again goes, and so do pools that are empty. Was there something?"""
    n = len(core.nodes())
    while evict(state):
        pass
    record.release_pools()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return len(core.nodes()) < n


# --- warm --------------------------------------------------------------------------------------


def is_behind_warm_up(state, flat):
    """Does the call use the result of another function's first run, which will not lie there again?
    Then a recording would fit no later call. At most once after each such run."""
    if state.warmed == WARM["runs"]:
        return False
    results = [r() for r in WARM["results"]]
    storages = {core.storage_id(t) for t in results if t is not None}
    return any(core.storage_id(t) in storages for t in flat.tensors)


def note_warm(state, seen, flat, result, first):
    """Remember what a warm-up made."""
    WARM["runs"] += first
    state.warmed = WARM["runs"]
    given = {core.storage_id(t) for t in flat.tensors}
    made = describe.tensors_of(seen, result)
    WARM["results"] = [r for r in WARM["results"] if r() is not None]
    WARM["results"] += [weakref.ref(t) for t in made if core.storage_id(t) not in given]


def warm(call, sources=()):
    """Run once eagerly, and learn what the function touches. `sources`: what it must not take from, see impure.states."""
    began = time.perf_counter()
    state, flat = call.state, call.flat
    around = timed_survey(call) if state.blockers is not None and state.ran else None
    if around is not None:
        sources = () if isinstance(around, str) else around.found.sources
    guess = CUDA if any(t.is_cuda for t in flat.tensors) else HOST
    home = devices.home_of(flat.tensors, state.homes)
    seen = observe(guess, home, state.graph, None if state.graph is None else readable(state.graph, call.args))
    seen.blockers, seen.computes = state.blockers, state.computes is not False and state.graph is None
    before, seen.sources = [describe.memory_of(t) for t in flat.tensors], impure.states(sources)
    anew = guess == CUDA and core.dropout_begins_anew(home)
    result = trace.run(seen, call.function, call.args, call.kwargs)
    counters.learn(state, None, seen, None)
    state.late = max(state.late, seen.late)
    state.computes = seen.computed if state.computes is None else state.computes
    state.ran |= seen.ran - {None}  # what is hidden here must be seen when it is recorded
    if anew and not core.dropout_begins_anew(home):
        seen.reason, state.recurrent = errors.cudnn_dropout(), True
    state.recurrent |= seen.dropout is not None
    for text in (*([around] if isinstance(around, str) else ()), *(impure.moved(seen.sources, seen) if asks_on(seen) else ())):
        note_reason(seen, text)
    state.warm_seconds += time.perf_counter() - began
    note_warm(state, seen, flat, result, driver_of(state, flat) is None)
    driver = CUDA if any(d.type == "cuda" for d in seen.devices) else HOST if seen.devices else guess
    note_tensors(state, seen, zip(flat.paths, flat.tensors, strict=True))
    reason = seen.reason
    if guess != driver:  # it will be looked at once more, where it belongs
        devices.learn_home(state.homes, seen.devices)
        reason = None
    gpus = devices.gpus_of(seen.devices)
    if len(gpus) > 1:
        state.gpus |= gpus
    for path, t, was in zip(flat.paths, flat.tensors, before, strict=True):
        if describe.memory_of(t) != was:  # a capture could not always be undone
            reason = reason or errors.replaced(path)
    pending = bool(describe.pending_in(seen, result))
    state.saves |= pending
    parallel, settles = ranks.learn(state, seen, pending)
    if state.graph is not None:
        prove(state.graph, seen, call.args)
    reason = parallel or reason
    strange = vet_values(call, seen) if reason is None else None
    state.strangers += strange is not None
    waits = settles or (strange is not None and state.strangers < segments.tries(seen.values))
    reason = reason or strange
    if reason is not None and (state.doubted or sources) and not waits:
        verdicts.condemn(call, reason)  # and warm again after the cool-down
        verdicts.count_eager(state, reason)
        verdicts.vet_strict(state, reason)
        return result
    core.fn_count(state.f, "warmups")
    if reason is None:
        state.drivers[leaf_devices(flat)] = driver
    else:  # a first call may do what no other does: caches that are made lazily
        state.doubted = True
    return result


def vet_values(call, seen):
    """A sentence where the function reads values of which there are many, and these did not come before: recordings would
    be for calls that never come again. Or None."""
    wide = segments.wide(seen.values)
    if not wide or math.isinf(options.OVERHEAD):
        return None
    kind = (*verdicts.key_of(call), *(value.bytes for value in wide))
    new = account.meet(call.state.account, kind, verdicts.whose(call.flat.program), room=0)  # allowance or not
    return errors.varying_values(segments.lines_of(wide)) if new else None


def note_tensors(state, seen, named):
    """Remember where each argument was, and what the function reaches, and which of them it writes."""
    state.asks_which |= seen.asks_which
    for path, tensor in named:
        state.pointers[path], sid = core.address(tensor), core.storage_id(tensor)
        if sid in seen.written or sid in seen.raw:
            state.written.add(path)
        if sid in seen.raw:
            state.fixed.add(path)


# --- record ------------------------------------------------------------------------------------


def record_call(call):
    """Record the call as a node and return its result. Whatever happens, the recording is over then."""
    attempt = Attempt()
    result = core.within([(lambda: None, functools.partial(record.close, attempt))], functools.partial(record_node, call, attempt))
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
        attempt.passing |= make_way(call.state)  # the next call has their memory, and so has this one, which runs eagerly
    answers = attempt.seen.answers if attempt.seen is not None else []
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


def timed_survey(call):
    began = time.perf_counter()
    with without_torch_function():  # a tensor's class may refuse to be asked
        around = survey(call)
    call.state.look_seconds += time.perf_counter() - began
    return around


def is_to_watch(call, around):
    """Must the function run once more, to see that it takes nothing from the iterators and files that it reaches? Of a
    capture that does not stand that could not be undone. Each recording is made behind such a run."""
    state = call.state
    if isinstance(around, str) or driver_of(state, call.flat) == HOST or not impure.lasting(around.found.sources):
        return False
    state.watched = not state.watched
    return state.watched


def prepare(call, attempt, around):
    """attempt.plan: what is decided before the function runs; or the reason why nothing is recorded. Begins an
    iteration if the call does."""
    state, flat = call.state, call.flat
    if isinstance(around, str):
        return around
    path, parent = place_in_tree(state, flat, around.tensors)
    reason = verdicts.over_limit(call, path, parent)
    attempt.passing = reason is not None
    if reason is not None:
        return reason
    make_place(call, path, parent)
    make_room(state)
    missed = places_first(misses(call, path, parent))
    followable = find_followable(call, around)
    moves = note_moves(state, around, missed, followable)
    live.learn_places(state, around.found.places, [state.keep[node] for node, why, _ in missed if why == MISS_PLACE], misplaced(state, missed))
    try:
        core.with_paths(functools.partial(core.go_on, device_of(state, flat), parent, around.tensors))
    except core.DriverError as error:  # no memory for what the last iteration left held
        attempt.passing = True
        return record.failure(error)
    changed = misplaced(state, missed)
    plan = plan_call(call, around, parent, followable, moves, changed)
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
        call.state.late = max(call.state.late, seen.late)
        call.state.computes = call.state.computes if seen.computed is None else seen.computed
        told = counters.learn(call.state, plan, seen, why_uncounted(call.state, plan.saves))
        reason, seen.reason = reason and (told or reason), told or seen.reason
        live.blame(call.state, seen, reason or seen.reason)
        call.state.untraced = seen.untraced or call.state.untraced
    if reason is not None:
        attempt.passing |= autograd.was_greedy(plan) or (seen is not None and is_lesson(call.state, seen))
        return reason
    seen.reason = seen.reason or impure.vet(plan.sources, seen)
    moved = describe.find_moved(plan)
    if moved and plan.driver == CUDA:  # into a capture that has not run
        return errors.replaced(moved)
    seen.reason = seen.reason or (errors.replaced(moved) if moved else None)
    attempt.plan = plan._replace(was=[was._replace(alias=None) for was in plan.was])  # their memory can go
    return None


def draft_node(call, attempt):
    """Describe what was recorded: attempt.draft, or a sentence that says why it cannot be a node."""
    state, plan, seen = call.state, attempt.plan, attempt.seen
    note_tensors(state, seen, zip(all_paths(plan), all_tensors(plan), strict=True))
    try:
        note_strays(seen, describe.tensors_of(seen, attempt.result))
        empties.settle_empties(plan.places, plan.lone, plan.changed)
        reason = vet_code(state, seen) or vet_spent(plan, seen) or vet_strays(state, seen) or vet_follows(state, plan, seen)
        reason = reason or vet_loose(state, plan, seen) or islands.vet_parts(call.function, plan, seen) or vet_back(state, plan, seen)
        if reason is None:
            plan = attempt.plan = find_moving(state, plan, seen)
            reason = errors.used_elsewhere(plan.kept[0].place.path) if plan.free is None else moving.learn_replaced(state, plan, seen)
            reason = reason or live.learn_stored(state, plan, seen, why_untraced(state, plan.saves))
        draft = reason or describe.rows(plan, seen, attempt.result, call)
        if not isinstance(draft, str):
            if plan.graph is not None:
                plan.graph.proven = True
            draft = autograd.complete(state, plan, seen, draft)
        tokens.drop_words(seen)
        if not isinstance(draft, str):
            draft = blank.told(seen, [row.proto for row in draft.outs if row.kind == FRESH]) or draft
        if not isinstance(draft, str):
            reason, keeps = segments.vet(seen, draft)
            reason = reason or escaping(state, seen, describe.vet_shared(plan, seen, attempt.result))
            draft = reason or escaping(state, seen, describe.vet_escapes(plan, seen, draft)) or draft._replace(keeps_grads=keeps)
    except Exception as error:  # a gap of ours must not become the user's crash: the result stands
        draft = record.failure(error)
    if isinstance(draft, str):
        return draft
    attempt.draft = draft
    return None


def find_moving(state, plan, seen):
    """The plan, with the places that the run changed and did not read; `free` is None where that is not known."""
    ran = code_of(state) | seen.ran
    rows, found = moving.find(plan.places, plan.owners, ran, seen), moving.find_puts(plan, ran, seen, describe.is_guarded_as)
    if found is None:
        return plan._replace(free=None)
    more, free, puts = found
    plan.places.extend(more)
    replaced = [k for k in plan.follows if state.opts.outputs == "rescue" and moving.is_replaced(plan.places[k])]
    stored = {k: row for k, row in live.stored_in(seen, plan.places).items() if k not in free and k not in rows}
    puts = puts + [(places.Put("", "", None, plan.places[k]), k) for k in (*replaced, *stored)]
    own = range(len(plan.places), len(plan.places) + len(seen.own))
    puts += [(places.Put("", "", None, place), k) for k, place in zip(own, seen.own, strict=True)]
    plan.places.extend(place._replace(want=None) for place in seen.own)
    free = free.union(replaced, own)
    plan.places.extend(moving.class_guards(plan.places, plan.owners, [*rows, *free, *stored]))
    return plan._replace(moving=rows, free=free, puts=puts, stored=stored)


def code_of(state):
    """The code that ran so far; a backward's counts as its forward's."""
    owner = state if state.graph is None else forward_of(state.graph)
    return owner.ran if owner is not None else set()


def settle(call, attempt, reason):
    """(None, the call's result): of a node that was made and ran, or of what was recorded in vain but ran. Else (the reason
    why there is neither, None). The caller holds the paths."""
    plan, on_host = attempt.plan, attempt.plan.driver == HOST
    lost = attempt.overtaken or core.lost()
    try:
        reason = errors.lost() if lost else reason or make_node(call, attempt)
        if reason is None:
            return None, run_node(call, attempt)
        attempt.passing = is_passing(call.state, attempt.seen, lost)
        stands = on_host or not (lost or leaves_graph(plan, attempt.seen, attempt.result))
        if stands:
            return None, abandon(call, attempt, reason)
    except core.DriverError as error:
        if on_host:
            raise errors.CgtError(errors.replay_failed(call.state.name, error.args[2], error.args[1])) from error
        reason = record.failure(error)  # nothing was launched: eager is still right
        attempt.passing = False
        unmake_node(call, attempt)
    attempt.result = None
    return reason, None


def make_node(call, attempt):
    """The draft becomes a node: attempt.node; or a sentence, and the call's result is as it was."""
    state, plan, seen = call.state, attempt.plan, attempt.seen
    attempt.result = None
    parts, attempt.draft = record.part_result(plan, attempt.draft)
    reason = escaping(state, seen, describe.vet_aliases(seen, attempt.draft))
    reason = reason or escaping(state, seen, describe.vet_changes(plan, code_of(state)))
    reason = reason or record.instantiate() or record.checkpoint(plan, seen, attempt.draft)
    if reason is not None:
        attempt.result = record.restore_result(plan, seen, parts)
        return reason
    del parts
    attempt.node = add_node(call, plan, seen, attempt.draft)
    readout.bring(seen)
    attempt.draft = attempt.seen = None
    return None


def run_node(call, attempt):
    """Run the recording for the call that made it; what it replaces goes. The caller holds the paths."""
    plan = attempt.plan
    result = core.run_node(attempt.node, leaves_of(plan.flat), plan.driver == CUDA)
    for old, moved, first in plan.moves:
        if set(moved).issubset(plan.copied) or (first and any(moved[0] in slots for slots in plan.follows.values())):
            core.node_replace(old)
    bury()
    attempt.settled = True
    return result


def unmake_node(call, attempt):
    """It was never launched, but for segments."""
    if attempt.node != NONE:
        core.undo_writes(attempt.node)
        drop_node(attempt.node)
        core.fn_count(call.state.f, "records", -1)


def escaping(state, seen, reason):
    """The reason, noted as one that tells of something that outlived the call; or None."""
    if reason is not None:
        seen.escaped = True
        state.escapes += 1
    return reason


def vet_code(state, seen):
    """A sentence if code ran that was not looked at for places: for the first time, or unseen."""
    if None in seen.ran:
        seen.again = True
        return errors.hidden_code()
    if seen.imported:
        seen.again = True
        return errors.imports(min(seen.imported))
    fresh = learn_code(state, seen.ran) if state.graph is None else learn_backward(state.graph, seen)
    if not fresh:
        return None
    seen.again = True
    return errors.new_code(min(fresh, key=lambda code: code.co_name))


def vet_spent(plan, seen):
    """A sentence if the recording let go of something that was read later, or None."""
    if not autograd.was_greedy(plan):
        return None
    seen.again = True
    return errors.late_read()


def vet_follows(state, plan, seen):
    """A sentence if it is not the same which tensor lies in a place that is followed, or None. Where the function comes to tensors
    in ways that cannot be followed (a set, a distribution), these may be what lies in a place, too, at one call and not at another."""
    if plan.graph is None and describe.loose_in(plan, seen):
        state.asks_which = seen.asks_which = True
    if not (seen.asks_which and plan.follows):
        return None
    seen.again = True
    return errors.asks_which(plan.places[min(plan.follows)].path)


def vet_back(state, plan, seen):
    """A sentence if a replay could not write an argument where it lies, nor copy it back there; or None."""
    tensors, paths = all_tensors(plan), all_paths(plan)
    lost = [paths[k] for k in seen.backs if not has_way_back(tensors[k])]
    if not lost:
        return None
    state.fixed.update(lost)
    seen.again = True
    return errors.no_way_back(lost[0])


def vet_loose(state, plan, seen):
    """A sentence if other threads ran ops while this one read memory to which nothing leads: one of them may make it anew at each call. What
    the recording before this one met lasts (a cache's)."""
    loose = {core.storage_id(t): core.storage_name(t) for t in describe.loose_in(plan, seen)} if seen.elsewhere else {}
    if loose.keys() <= state.loose.keys():
        return None
    seen.again, state.loose = not state.loose, loose
    return errors.op_elsewhere(seen.elsewhere)


def vet_strays(state, seen):
    """A sentence if kernels that no op shows may have read an argument past its copy, or None."""
    copies = seen.swaps and not (state.hidden and state.graph is not None)  # of which a backward is given the copies
    state.hidden |= seen.strays
    if not (seen.strays and copies):
        return None
    seen.again = True
    return errors.hidden_kernels()


# --- what becomes of it -----------------------------------------------------------------------


def leaves_graph(plan, seen, result):
    """Does a graph of autograd's come out of this capture? It must only ever run inside of one (attention with dropout
    keeps its random numbers on the device there, and reads them on the host elsewhere)."""
    return plan.graph is None and (plan.saves or bool(describe.pending_in(seen, result)))


def is_passing(state, seen, lost):
    """Is what kept this recording from being one no verdict: will the next one fare better?"""
    return lost or is_lesson(state, seen) or (seen.escaped and state.escapes <= options.ESCAPE_TRIES)


def is_lesson(state, seen):
    """The same, since this one told what it came to nothing by. Not for ever: code made anew at each call would."""
    state.lessons += seen.again
    return seen.again and state.lessons <= options.LESSONS


def abandon(call, attempt, reason):
    """The function ran (host) or was captured whole (CUDA), but cannot be replayed. The host's
    results stand; a capture is launched once and its memory moved out of the pool. The caller holds
    the paths."""
    state, graph = call.state, call.state.graph
    if attempt.plan.driver == CUDA:
        record.launch_once(attempt)
    core.abort()
    attempt.settled = True
    if not attempt.passing:
        reason = condemned(call, attempt, reason)
    if graph is not None and not graph.proven:
        prove(graph, attempt.seen, call.flat.tensors)  # it ran for real: was it right?
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
    if core.debug_build():
        check_draft(draft)
    used = describe.used_slots(plan, draft)
    index = {k: j for j, k in enumerate(used)} | {NONE: NONE}
    slots = [draft.slots[k]._replace(owner=index[draft.slots[k].owner]) for k in used]
    outs = [
        o._replace(ref=index[o.ref] if o.kind in (VIEW, INPUT) else o.ref, grad_slot=index[o.grad_slot])
        for o in draft.outs
    ]  # fmt: skip
    follows = {k: [index[slot] for slot in slots] for k, slots in plan.follows.items()}
    followable = {path: k in follows for at, (k, _) in plan.followable.items() for path in (at, plan.places[k].path)}
    mine = [None if any(k in slots for slots in follows.values()) else s.tensor for k, s in enumerate(slots)]
    taken = {s.at: k for k, s in reversed([*enumerate(plan.live)]) if s.op == AT_PLACE}  # a tuple's first number
    groups, order = describe.group_places(plan.places, plan.moving, plan.free, follows, taken)
    row_at = {k: j for j, k in enumerate(order)} | {NONE: NONE}
    # Another thread may have moved the version of what this run did not touch.
    effects = [e._replace(slot=index[e.slot], place=row_at[e.place]) for e in draft.effects if e.slot in index]
    grads = [g._replace(slot=index[g.slot]) for g in draft.grads]
    program = draft.out.program
    ret_python = any(op[0] in (pytree.DATACLASS, pytree.CUSTOM) for op in program)
    site = None
    if graph is not None:
        autograd.cut(draft)
        opts = state.opts._replace(outputs="rescue", inputs="auto", static=((), ()), dynamic=(), audit=None)
        site = new_site(autograd.backward_of(graph), state.name + BACKWARD, opts, graph)
    saves = [(index[save.slot], save.out) for save in behind.saves]
    drawn_from = [] if seen.dropout is None else [seen.dropout]  # guarded by itself
    loose = describe.loose_in(plan, seen)
    kept = Kept(
        graph, site, (program, groups, effects, mine, seen.captured, seen.keep),
        [draft.paths[k] for k in used], [plan.places[k].path for k in order], followable, grads, loose, moving.told(plan, code_of(state)),
        live.told(seen.live, plan.places),
        core.record_seconds(), seen.values, seen.forks, islands.told(seen), seen.ops, seen.trail,
        frozenset(seen.told), verify.changes(seen, draft), seen.random,
    )  # fmt: skip
    node = core.add_node(
        state.f, call.spec, plan.ambient, slots, outs, program, ret_python, effects, grads, groups,
        list(plan.flat.tensors), (site, saves, [index[k] for k in behind.flows], behind.joined),
        live.rows_of(seen.live, row_at, index), segments.undo_rows(seen), draft.keeps_grads, state.keep, kept,
    )  # fmt: skip
    if graph is not None:
        graph.node, graph.loose = node, loose + drawn_from
    islands.settle(seen, plan)
    for buffer in drawn_from:
        core.node_draws(node, plan.device, buffer)
        state.recurrent = True
    state.unguarded = plan.unguarded
    core.fn_count(state.f, "records")
    state.account.failed = state.left = state.lessons = 0
    state.blamed = None
    audit.plan_next(state, node)
    verify.begin(state, node)
    if seen.exchanges:
        state.exchanges = True
        ranks.watch_groups(free_exchanging)
        ranks.watch_replays(node, plan.device)
    return node


def reset_state(state):
    """Free a function's recordings; what it learnt about its arguments goes too. From inside a
    function that is being warmed or recorded, when that is done: its rows are in use."""
    if is_mine() or core.paths_mine():
        DOOMED.append((state, None))
        return

    def free():
        forget(state)
        bury()

    with RECORDING:
        core.with_paths(free)


def forget(state):
    """Free the rows of a function's recordings. The caller holds the paths."""
    if not core.fn_is(state.f, state.born):
        return  # collected since
    core.fn_reset(state.f)
    disable(state.f)
    # What it runs stays, too: a backward may be pending, or just be at it in another thread.
    fresh = State(state.f, state.born, state.name, state.opts, state.graph)
    fresh.live |= state.dynamic
    for name in LEARNT:
        setattr(state, name, getattr(fresh, name))
