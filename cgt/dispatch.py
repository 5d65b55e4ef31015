"""The miss: what to do with a call that no recording accepts. One visible branch, `miss`:

    inside a mode, a capture, another recording  ─► plain      run the function, nothing else
    a verdict stands, or too many recordings     ─► eager      with a reason that explain() tells
    first call of the function                   ─► warm       run it once under observation
    else                                         ─► record     capture (CUDA) or tape (host), launch

All state of a function is one dict, made by `new_state` and held by the closure that `jit` returned:
what its rows in the core borrow (`keep`), and what decides the next miss.
"""

import contextlib
import enum
import functools
import math
import threading
import time
import weakref

import cgt_core as core
import torch
from cgt_core import (
    FITS,
    INPUT,
    MISS_ALIGN,
    MISS_ALIVE,
    MISS_AMBIENT,
    MISS_GRAD,
    MISS_PLACE,
    MISS_POINTER,
    MISS_SAME,
    MISS_SPEC,
    NONE,
    VIEW,
)

from . import account, autograd, describe, errors, impure, options, places, pytree, record, trace
from .private import is_forward_ad, is_reader, outside_dynamo
from .trace import CUDA, HOST

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
WARM = {"runs": 0, "results": []}  # functions warmed so far; weak references to what that returned


def sites():
    """All jitted functions alive. Other threads may make one meanwhile: references are copied in one go."""
    return [site for site in (ref() for ref in SITES.valuerefs()) if site is not None]


def new_site(function, name, opts, graph=None):
    """The jitted form of a function. `graph`: what it runs, if it is the backward of a recording."""
    range_name = "cgt.replay " + name

    def build(f, born):
        state = new_state(f, born, name, opts, graph)
        state["range"] = range_name  # kept for the row

        @outside_dynamo
        def on_miss(spec, args, kwargs):
            return miss(state, function, spec, args, kwargs)

        @outside_dynamo
        def plain(*args, **kwargs):
            return function(*args, **kwargs)

        site = core.make_site(f, on_miss, plain, state["reasons"])
        setattr(site, ATTRIBUTE, state)
        weakref.finalize(site, DOOMED.append, (f, born)).atexit = False
        SITES[f] = site
        return site

    return core.fn_add(options.OUTPUTS.index(opts["outputs"]), graph is not None, range_name, build)


def new_state(f, born, name, opts, graph=None):
    """Everything that Python knows about one jitted function."""
    return {
        "f": f, "born": born, "name": name, "opts": opts, "keep": {}, "programs": {},
        "graph": graph, "saves": False, "refused": None, "past": [0] * 10, "ran": set(), "large": False,
        "drivers": {}, "pointers": {}, "moved": set(), "written": set(),
        "account": account.new_account(), "reasons": {}, "verdicts": {}, "cool": {}, "escapes": 0, "unguarded": [],
        "warm_seconds": 0.0, "warmed": 0, "doubted": False, "range": None,
    }  # fmt: skip


def miss(state, function, spec, args, kwargs):
    """A call that was not replayed: decide, run, return the result."""
    if state["graph"] is not None and not kwargs.keys() <= {"changed"}:
        refuse_gradients(state["graph"], errors.refused_backward("batched" in kwargs))
        told = errors.batched_gradients if "batched" in kwargs else errors.create_graph
        raise errors.CgtError(told(state["name"].removesuffix(BACKWARD)))
    if state["graph"] is not None and "changed" in kwargs:  # right if nothing reads it, as in eager
        return eager(state, function, args, kwargs, errors.saved_changed())
    kind = core.blocker()
    if kind == 0 and torch.cuda.is_initialized() and core.stream_is_capturing(torch.cuda.current_device()):
        kind = 4
    if kind:
        return eager(state, function, args, kwargs, errors.blocked(kind), kind == 1 and is_mine())
    if core.paths_mine():  # a finalizer called us in the middle of a call
        return function(*args, **kwargs)
    sweep()
    call = (state, function, spec, args, kwargs)
    busy = functools.partial(eager, state, function, args, kwargs, errors.busy())
    try:
        reason, result = core.locked(RECORDING, functools.partial(attend, *call), lambda: (None, busy()))
    finally:
        sweep()
    return result if reason is None else eager(state, function, args, kwargs, reason)


def attend(state, function, spec, args, kwargs):
    """Warm or record: (None, the result); or (the reason why the call runs eagerly, None)."""
    flat = pytree.flatten_call(args, kwargs, *state["opts"]["static"])
    reason = verdict(state, spec, flat)
    if reason is not None:
        return reason, None
    spec = find_spec(state, flat) if spec == NONE else spec
    first = driver_of(state, flat) is None
    reason = wait(state, spec, flat, first)
    if reason is not None:
        return reason, None
    run = warm if first or is_behind_warm_up(state, flat) else record_call
    kind = "warm" if run is warm else "record"
    call = (state, function, spec, flat, args, kwargs)
    with torch.profiler.record_function(f"cgt.{kind} {state['name']}"):
        if core.fn_counts(state["f"])[0] == 1:  # eager's first call is slow, too
            return None, run(*call)
        return None, account.timed(state["account"], run, *call)


def wait(state, spec, flat, first):
    """A reason to run eagerly since another recording would not pay yet, or None. Backwards are recorded as
    their forwards are."""
    f = state["f"]
    if state["graph"] is not None or math.isinf(options.OVERHEAD):
        return None
    place = (NONE, NONE) if first else place_in_tree(state, flat, flat.tensors)
    missed = [] if first else core.node_misses(*place, f, spec, list(flat.tensors))
    n = account.waits(state["account"], f, missed)
    if n == 0:
        return None
    reason = account.reason(state["account"], n, lambda: why_missed(state, spec, flat, *place))
    core.verdict_fn(f, reason, core.fn_counts(f)[0] + n, account.heard(state["account"]))
    return reason


def leaf_devices(flat):
    """Warm-up, and the choice of driver, are per function and kinds of device among its arguments."""
    return frozenset(t.device.type for t in flat.tensors)


def driver_of(state, flat):
    """The driver for a call with these leaves; None before the first one."""
    if state["graph"] is not None:
        return state["graph"]["driver"]
    return state["drivers"].get(leaf_devices(flat))


def is_mine():
    """Is the mode around us that of a recording under way in this thread: are we being inlined?"""
    return RECORDING._is_owned()


def eager(state, function, args, kwargs, reason, inlined=False):
    """Run the plain function; `inlined` calls belong to the recording around them."""
    if inlined:
        core.fn_count(state["f"], "calls", -1)
    else:
        count_eager(state, reason)
    graph = state["graph"]
    if graph is None:
        return account.timed_eager(state["account"], function, args, kwargs)
    if graph["proven"]:
        return function(*args, **kwargs)
    seen = trace.observe(graph["driver"], graph=graph)
    result = trace.run(seen, function, args, kwargs)
    prove(state, seen, args)
    return result


# --- backwards --------------------------------------------------------------------------------


def prove(state, seen, leaves):
    """A recorded graph was run under observation: did it read only what belongs to the call?"""
    graph = state["graph"]
    tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
    reason = describe.vet_backward(graph, seen, [*tensors, *(t for _, t in graph["reached"])])
    if reason is not None:
        disprove(graph, reason)


def disprove(graph, reason):
    """A recorded graph cannot be run for other calls: its function is not differentiable by replay. Of
    the very call that was recorded this run was right; of a replayed one it was not."""
    forward = getattr(SITES.get(graph["forward"]), ATTRIBUTE, None)
    kept = forward["keep"].get(graph["node"]) if forward is not None else None
    known = kept is not None and kept["graph"] is graph
    replayed = not known or core.node_facts(graph["node"])["n_replay"] > 0
    refuse_gradients(graph, reason)
    if replayed:
        raise errors.CgtError(errors.stale_backward(reason))


def refuse_gradients(graph, reason):
    """Calls with gradients of this graph's function run eagerly from now on."""
    forward = getattr(SITES.get(graph["forward"]), ATTRIBUTE, None)
    if forward is None:
        return
    forward["refused"] = reason
    core.locked(RECORDING, functools.partial(drop_graphs, forward), lambda: DOOMED.append((forward, GRAPHS)))


def drop_graphs(state):
    """Free a function's recordings with gradients. Another thread may be recording behind one: the caller holds RECORDING."""
    for node in [n for n, kept in state["keep"].items() if kept["graph"] is not None]:
        if node in state["keep"]:  # freeing one frees those behind it
            drop_node(node)


# --- specs, verdicts, limits ------------------------------------------------------------------


def find_spec(state, flat):
    """Add a spec for these arguments. Objects compared by identity are held weakly if they can be:
    a dead one takes its spec and recordings along."""
    f = state["f"]
    program, spec_of = [], []
    for kind, n, obj in flat.program:
        if kind == pytree.SAME and not isinstance(obj, type):
            with contextlib.suppress(TypeError):
                obj = weakref.ref(obj, lambda _, s=spec_of: s and DOOMED.append((state, s[0])))
        program.append((kind, n, obj))
    program = tuple(program)
    if len(state["programs"]) >= options.MAX_SPECS:
        used = {core.node_facts(n)["spec"] for n in core.fn_nodes(f)}
        DOOMED.append((state, next((s for s in state["programs"] if s not in used), NONE)))
    spec_of.append(core.spec_add(f, program, len(flat.tensors), state["programs"], flat.paths))
    return spec_of[0]


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
        elif isinstance(what, dict):
            free_spec(what, which)
        else:
            core.fn_free(what, which)
        DOOMED.pop(next(k for k, one in enumerate(DOOMED) if one is doomed))  # others may have come meanwhile
        bury()


def trim():
    """Give back the memory of pools in which nothing lives, unless something is being recorded."""
    if not is_mine():
        core.locked(RECORDING, record.release_pools, lambda: None)


def bury():
    """Nodes were freed, perhaps of several functions: let go of what they kept alive."""
    freed = core.freed()
    for f, node in freed:
        state = getattr(SITES.get(f), ATTRIBUTE, None)
        kept = state["keep"].pop(node, None) if state is not None else None
        if kept is not None and kept["backward"] is not None:
            counts = core.fn_counts(getattr(kept["backward"], ATTRIBUTE)["f"])
            state["past"] = [a + b for a, b in zip(state["past"], counts, strict=True)]
    nodes = {node for _, node in freed}
    for site in sites() if nodes else ():
        state = getattr(site, ATTRIBUTE)
        state["cool"] = {k: v for k, v in state["cool"].items() if k[1] not in nodes}


def free_spec(state, spec):
    """Free a spec with its recordings, and what they kept alive. The caller holds the paths."""
    if not core.fn_is(state["f"], state["born"]) or state["programs"].pop(spec, None) is None:
        return  # freed or reset since
    state["verdicts"] = {k: v for k, v in state["verdicts"].items() if k is None or k[0] != spec}
    core.spec_free_if(state["f"], state["born"], spec)


def verdict(state, spec, flat):
    """A reason to run eagerly, or None. Verdicts and limits end after a cool-down of calls."""
    for path, tensor in zip(flat.paths, flat.tensors, strict=True):
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            return errors.subclass(path, type(tensor).__name__)
        if not core.is_plain(tensor):
            return errors.odd_tensor(path, trace.odd_kind([tensor]))
    calls = core.fn_counts(state["f"])[0]
    if state["refused"] and torch.is_grad_enabled():
        tell_core(state, spec, flat, state["refused"], calls + options.COOL_DOWN[1])
        return state["refused"]
    if is_forward_ad():
        return errors.forward_mode("around the call")
    for key in (None, key_of(spec, flat)):
        standing = state["verdicts"].get(key)
        if standing is not None and calls < standing[1]:
            return standing[0]
    if driver_of(state, flat) is None:
        return None
    return over_limit(state, spec, flat, *place_in_tree(state, flat, flat.tensors))


def device_of(state, flat):
    """Index of the device on which a call is recorded; -1 is the host."""
    on_cuda = driver_of(state, flat) == CUDA
    return torch.cuda.current_device() if on_cuda else -1


def place_in_tree(state, flat, tensors):
    """(path, node behind which a call with these tensors belongs; NONE: it begins an iteration)."""
    device = device_of(state, flat)
    return core.path_state(device)[0], core.parent_of(device, state["f"], list(tensors))


def over_limit(state, spec, flat, path, parent):
    """A reason to run eagerly because this place in the tree has enough recordings of the function,
    or None: there is room, or the cool-down is over and make_place finds some."""
    nodes = core.children(path, parent, state["f"])
    if len(nodes) < state["opts"]["max_records"]:
        return None
    calls = core.fn_counts(state["f"])[0]
    until, length = state["cool"].get((path, parent), (0, options.COOL_DOWN[0]))
    if until == 0:
        until = calls + length
        state["cool"][path, parent] = (until, min(2 * length, options.COOL_DOWN[1]))
    if calls < until:
        reason = errors.limit(len(nodes), why_missed(state, spec, flat, path, parent))
        if state["graph"] is None:
            core.verdict_place(path, parent, state["f"], reason, until)
        return reason
    return None


def make_place(state, path, parent):
    """Room for one more recording of the function there: after the cool-down the one matched longest ago goes."""
    nodes = core.children(path, parent, state["f"])
    if len(nodes) >= state["opts"]["max_records"]:
        state["cool"][path, parent] = (0, state["cool"][path, parent][1])
        drop_node(nodes[-1])


def key_of(spec, flat):
    """What a verdict is about: structure, ambient state and shapes."""
    return spec, core.ambient(), tuple((t.shape, t.dtype, t.device) for t in flat.tensors)


def condemn(state, spec, flat, reason):
    """Run eagerly from now on, until a cool-down that doubles with each verdict. A function with
    many verdicts and no recording gets one for all its calls: new shapes will not help it."""
    verdicts = state["verdicts"]
    account.note_failure(state["account"], reason)
    many = len(verdicts) >= options.MAX_VERDICTS and not core.fn_nodes(state["f"])
    key = None if many else key_of(spec, flat)
    length = (
        min(2 * verdicts[key][2], options.COOL_DOWN[1]) if key in verdicts else options.COOL_DOWN[0]
    )
    if len(verdicts) > options.MAX_SPECS:
        verdicts.clear()
    until = core.fn_counts(state["f"])[0] + length
    verdicts[key] = (reason, until, length)
    if key is None and state["graph"] is None:
        core.verdict_fn(state["f"], reason, until)
    elif key is not None:
        tell_core(state, spec, flat, reason, until)


def tell_core(state, spec, flat, reason, until):
    """Calls like this one, which no recording takes, need not ask Python before the function was called so often.
    What autograd calls looks at more than its arguments."""
    if state["graph"] is None and spec in state["programs"]:
        core.verdict_spec(spec, list(flat.tensors), reason, until)


def count_eager(state, reason):
    """A call that had to run eagerly, and why. Reasons that name addresses would never end: the oldest go."""
    core.fn_count(state["f"], "eager")
    reasons = state["reasons"]
    reasons[reason] = reasons.get(reason, 0) + 1
    if len(reasons) > options.MAX_REASONS:
        del reasons[next(iter(reasons))]


def why_missed(state, spec, flat, path, parent):
    """A sentence on what the newest recording of this structure did not accept."""
    for node, why, index in core.node_misses(path, parent, state["f"], spec, list(flat.tensors)):
        kept = state["keep"].get(node)
        if kept is None or why in (FITS, MISS_SPEC, MISS_AMBIENT):
            continue
        if why == MISS_ALIVE:
            return errors.still_held(core.dead_line(node, index))
        if why == MISS_PLACE:
            return errors.place_changed(kept["place_paths"][index])
        if why == MISS_GRAD:
            return errors.place_changed(kept["slot_paths"][kept["grads"][index][0]] + ".grad")
        name = kept["slot_paths"][index]
        if why == MISS_POINTER:
            return errors.moved(name, *core.slot_addresses(node, index, list(flat.tensors)))
        if why == MISS_ALIGN:
            return errors.misaligned(name)
        if why == MISS_SAME:
            return errors.other_tensor(name)
        return errors.arguments_changed(name)
    return errors.arguments_changed("a number, string or structure among the arguments, or a mode of torch,")


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
    while len(core.nodes()) >= state["opts"]["max_graphs"]:
        node = core.node_oldest()
        if node is None:
            return
        drop_node(node)


# --- warm --------------------------------------------------------------------------------------


def is_behind_warm_up(state, flat):
    """Does the call use the result of another function's first run, which will not lie there again?
    Then a recording would fit no later call. At most once after each such run."""
    if state["warmed"] == WARM["runs"]:
        return False
    results = [r() for r in WARM["results"]]
    storages = {core.storage_id(t) for t in results if t is not None}
    return any(core.storage_id(t) in storages for t in flat.tensors)


def note_warm(state, flat, result, first):
    """Remember what a warm-up made."""
    WARM["runs"] += first
    state["warmed"] = WARM["runs"]
    given = {core.storage_id(t) for t in flat.tensors}
    try:
        made = pytree.flatten(result, "result").tensors
    except errors.CgtError:  # told when it is recorded
        made = ()
    WARM["results"] = [r for r in WARM["results"] if r() is not None]
    WARM["results"] += [weakref.ref(t) for t in made if core.storage_id(t) not in given]


def warm(state, function, spec, flat, args, kwargs):
    """Run once eagerly, and learn what the function touches."""
    began = time.perf_counter()
    guess = CUDA if any(t.is_cuda for t in flat.tensors) else HOST
    seen = trace.observe(guess, graph=state["graph"], ran=state["ran"])
    before, sources = [describe.memory_of(t) for t in flat.tensors], impure.states(())
    result = trace.run(seen, function, args, kwargs)
    seen["reason"] = seen["reason"] or impure.vet(sources, seen)
    state["warm_seconds"] += time.perf_counter() - began
    note_warm(state, flat, result, driver_of(state, flat) is None)
    driver = CUDA if any(d.type == "cuda" for d in seen["devices"]) else HOST
    note_leaves(state, seen, flat)
    reason = seen["reason"] if guess == driver else None
    for path, t, was in zip(flat.paths, flat.tensors, before, strict=True):
        if describe.memory_of(t) != was:  # a capture could not always be undone
            reason = reason or errors.replaced(path)
    state["saves"] |= bool(describe.pending_in(seen, result))
    if state["graph"] is not None:
        prove(state, seen, args)
    if reason is not None and state["doubted"]:
        condemn(state, spec, flat, reason)  # and warm again after the cool-down
        count_eager(state, reason)
        return result
    core.fn_count(state["f"], "warmups")
    if reason is None:
        state["drivers"][leaf_devices(flat)] = driver
    else:  # a first call may do what no other does: caches that are made lazily
        state["doubted"] = True
    return result


def note_leaves(state, seen, flat):
    """Remember where each argument was and which ones the function writes."""
    for path, tensor in zip(flat.paths, flat.tensors, strict=True):
        state["pointers"][path] = core.address(tensor)
        if core.storage_id(tensor) in seen["written"] | seen["raw"]:
            state["written"].add(path)


# --- record ------------------------------------------------------------------------------------


def record_call(state, function, spec, flat, args, kwargs):
    """Record the call as a node and return its result. Whatever happens, the recording is over then."""
    rec = {"settled": False, "before": None, "seen": None}
    body = functools.partial(record_node, state, function, spec, flat, args, kwargs, rec)
    return core.within([(lambda: None, functools.partial(record.close, rec))], body)


def record_node(state, function, spec, flat, args, kwargs, rec):
    """The same, within."""
    try:
        reason = prepare(state, function, spec, flat, rec)
    except core.DriverError as error:  # no memory for what the last iteration left held
        reason = record.failure(error)
    if reason is not None:
        return eager(state, function, args, kwargs, reason)
    rec["spent"] = autograd.find_spent(rec, args)
    on = record.on_cuda if rec["driver"] == CUDA else record.on_host
    outcome = on(function, args, kwargs, rec)
    if outcome is None:  # nothing ran: the capture failed or was left
        if not autograd.was_greedy(rec):
            condemn(state, spec, flat, rec["reason"])
        return eager(state, function, args, kwargs, rec["reason"])
    result, seen = outcome
    del outcome
    seen["reason"] = seen["reason"] or impure.vet(rec["sources"], seen)
    moved = describe.find_moved(rec)
    if moved and rec["driver"] == CUDA:  # into a capture that has not run
        reason = errors.replaced(moved)
        condemn(state, spec, flat, reason)
        undo(state, rec)
        return eager(state, function, args, kwargs, reason)
    rec["before_run"] = [(*was[:2], None) for was in rec["before_run"]]  # their memory can go
    note_leaves(state, seen, flat)
    try:
        places.settle_empties(rec["places"], rec["lone"], rec["changed"])
        row = vet_code(state, seen) or autograd.vet_spent(rec, seen)
        if row is None:
            row = errors.replaced(moved) if moved else describe.rows(rec, seen, result, args, kwargs)
        if not isinstance(row, str):
            row = autograd.rows(state, rec, seen, row)
        trace.drop_words(seen)
        if not isinstance(row, str):
            row = describe.describe_escapes(state, rec, seen, row) or row
    except Exception as error:  # a gap of ours must not become the user's crash: the result stands
        row = record.failure(error)
    core.paths_lock()  # nobody replays the recording before its own call has the result
    try:
        lost = rec["overtaken"] or core.lost()
        if lost:
            row = errors.lost()
        elif not isinstance(row, str):
            del result
            parts = describe.part_result(row)
            reason = describe.find_alias(state, seen, row) or describe.describe_changes(state, rec, seen)
            row = reason or describe.settle(rec, seen, row)
            if isinstance(row, str):
                result = describe.restore_result(seen, *parts)
            del parts
        if not isinstance(row, str):
            rec["node"] = add_node(state, spec, flat, rec, seen, row)
            rec["seen"] = None
            del row, seen
            result = run_node(state, rec)
            rec["settled"] = True
            return result
        if not lost and rec["driver"] == CUDA and leaves_graph(rec, seen, result):
            if not is_passing(state, seen, lost):
                condemn(state, spec, flat, row)
        elif rec["driver"] == HOST or not lost:  # ran, but cannot be replayed
            return abandon(state, spec, flat, rec, seen, result, row, lost)
        reason = row
        del result
    except core.DriverError as error:
        if rec["driver"] == HOST:
            raise errors.CgtError(
                errors.replay_failed(state["name"], error.args[2], error.args[1])
            ) from error
        reason = record.failure(error)  # nothing was launched: eager is still right
        condemn(state, spec, flat, reason)
    finally:
        core.paths_unlock()
    undo(state, rec)
    return eager(state, function, args, kwargs, reason)


def vet_code(state, seen):
    """A sentence if code ran for the first time where only what ran before was looked at for places."""
    fresh = (seen["ran"] or set()) - state["ran"]
    state["ran"] |= fresh
    if not fresh:
        return None
    seen["again"] = True
    return errors.new_code(min(getattr(code, "co_name", "compiled code") for code in fresh))


def prepare(state, function, spec, flat, rec):
    """Put everything that a recording wants to know before the function runs into `rec`; or return the reason
    why there will be none. Begins an iteration if the call does."""
    driver, device, graph = driver_of(state, flat), device_of(state, flat), state["graph"]
    if graph is None:
        around, ran = look_around(state, function, flat)
    else:
        around, ran = places.Found([], [], graph["reached"], [], [], []), None
    reason = refuse_around(flat, around)
    if reason is not None:
        condemn(state, spec, flat, reason)
        return reason
    found = around.places
    reached, also = reach_tensors(around.tensors, flat)
    for path, tensor, _ in reached:
        if not core.is_plain(tensor):
            reason = errors.odd_tensor(path, trace.odd_kind([tensor]))
            condemn(state, spec, flat, reason)
            return reason
    tensors = describe.all_tensors(flat, reached)
    path, parent = place_in_tree(state, flat, tensors)
    reason = over_limit(state, spec, flat, path, parent)
    if reason is not None:
        return reason
    make_place(state, path, parent)
    make_room(state)
    moves = note_moves(state, spec, flat, path, parent)
    core.with_paths(functools.partial(core.go_on, device, parent, tensors))
    rec |= {
        "flat": flat, "reached": reached, "also": also, "places": found, "unguarded": around.notes,
        "sizes": around.sizes, "sources": impure.states(around.sources), "lone": places.lone_empties(found),
        "changed": changed_places(state, spec, flat, path, parent),
        "ran": ran, "graph": graph, "saves": state["saves"] and torch.is_grad_enabled(),
        "driver": driver, "parent": parent, "moves": moves, "node": None,
        "copied": choose_copied(state, flat, reached, driver, parent, [leaf for _, leaf in moves]),
        "grads": grads_before(flat, reached), "generators": reach_generators(found, flat),
        "versions": [0 if t.is_inference() else t._version for t in tensors],
        "before_run": [
            (describe.memory_of(t), t.requires_grad, alias_of(t, driver, parent)) for t in tensors
        ],
        "ambient": core.ambient(),
    }  # fmt: skip
    rec["sinks"] = record.find_leaves(rec)
    reason = record.vet_leaves(rec)
    if reason is not None:
        condemn(state, spec, flat, reason)
    return reason


def refuse_around(flat, around):
    """A sentence if what the function can read cannot be guarded, or None."""
    if around is None:
        return errors.too_many_places()
    for path, value in [*flat.objects, *((p.path, p.want) for p in around.places)]:
        if is_reader(value):
            return errors.early_bound(path)
    return errors.scripted(around.scripted[0]) if around.scripted else None


def alias_of(t, driver, parent):
    """t's memory as a tensor of its own: a failed capture may have to give it back. Not of a result of the
    path: its holders are counted."""
    if driver == HOST or core.path_proto(parent, t) is not None or t.layout != torch.strided:
        return None
    return core.view_like(t, t, 0)


def run_node(state, rec):
    """Run the recording for the call that made it; what it replaces goes. The caller holds the paths."""
    result = core.run_node(rec["node"], list(rec["flat"].tensors), rec["driver"] == CUDA)
    for old, leaf in rec["moves"]:
        if leaf in rec["copied"]:
            core.node_replace(old)
    bury()
    return result


def undo(state, rec):
    """A capture that was never launched: neither its node nor what it put into places may stay."""
    record.restore_places(rec["before"], None, tensors_only=False)
    core.abort()
    if rec["node"] is not None:
        drop_node(rec["node"])
        core.fn_count(state["f"], "records", -1)
    describe.put_back(rec)
    rec["settled"] = True


def note_moves(state, spec, flat, path, parent):
    """Arguments whose address moved since a pinned recording are copied from now on, if they can be.
    Returns [(recording, leaf that moved)]: what a recording with a copy will replace."""
    moves = []
    for node, why, index in core.node_misses(path, parent, state["f"], spec, list(flat.tensors)):
        if why != MISS_POINTER:
            continue
        leaf, _, written, _, _ = core.node_facts(node)["slots"][index]
        if leaf != NONE and not written and state["opts"]["inputs"] == "auto":
            state["moved"].add(flat.paths[leaf])
            moves.append((node, leaf))
    return moves


def changed_places(state, spec, flat, path, parent):
    """Paths of the places that kept recordings from fitting this call."""
    misses = core.node_misses(path, parent, state["f"], spec, list(flat.tensors))
    return {
        state["keep"][node]["place_paths"][index]
        for node, why, index in misses
        if why == MISS_PLACE
    }


def look_around(state, function, flat):
    """(what find_places finds, None). Where there are too many places: what code reads which ran so far, and
    a set for what runs now; both None if that is not known."""
    roots, arguments = [*flat.objects, *bearers_of_code(flat)], [*zip(flat.paths, flat.tensors, strict=True)]
    if not state["large"]:
        found = places.find_places(function, roots, most=options.MAX_PLACES, arguments=arguments)
        if found is not None:
            return found, None
        state["large"] = True  # not twice: of a large model this takes long
    if None in state["ran"]:
        return None, None
    found = places.find_places(function, roots, ran=state["ran"], arguments=arguments)
    return found, set()


def bearers_of_code(flat):
    """[(name, object)] of the arguments' containers and plain values that have methods of a user's: classes
    of dataclasses, namedtuples and registered containers, classes, members of an enum."""
    classes = [obj[0] for kind, _, obj in flat.program if kind in (pytree.DATACLASS, pytree.CUSTOM)]
    classes += [obj for kind, _, obj in flat.program if kind == pytree.NAMEDTUPLE]
    plain = [obj for kind, _, obj in flat.program if kind == pytree.PLAIN]
    classes += [obj for obj in plain if issubclass(type(obj), type)]
    members = [(places.NAME_OF(type(obj)), obj) for obj in plain if issubclass(type(obj), enum.Enum)]
    return [(places.NAME_OF(cls), cls) for cls in classes] + members


def reach_tensors(named, flat):
    """[(path, tensor, owner)] of those tensors that are not arguments, each once, and of the gradients
    of all. owner: index of the tensor whose .grad it is, in the order of describe.all_tensors; NONE
    for a tensor that was met. And of arguments that are one of these, too: {id: (tensor or None, owner)}."""
    leaves = {id(t) for t in flat.tensors}
    reached, also = {}, {}
    for path, tensor in named:
        if id(tensor) in leaves:
            also[id(tensor)] = (tensor, NONE)
        else:
            reached.setdefault(id(tensor), (path, tensor, NONE))
    named = [*zip(flat.paths, flat.tensors, strict=True), *(r[:2] for r in reached.values())]
    for k, (path, tensor) in enumerate(named):
        grad = tensor.grad if can_have_grad(tensor) else None
        if grad is not None and id(grad) in leaves:
            also[id(grad)] = (also.get(id(grad), (None, NONE))[0], k)
        elif grad is not None:
            reached.setdefault(id(grad), (path + ".grad", grad, k))
    return list(reached.values()), also


def reach_generators(found, flat):
    """Random generators that the function can reach by argument or by place."""
    objects = [*(obj for _, obj in flat.objects), *(p.want for p in found)]
    return [g for g in objects if torch.Generator in type(g).__mro__]  # isinstance asks a metaclass, in Python


def choose_copied(state, flat, reached, driver, parent, moved):
    """Leaves (by index) that the graph copies from wherever they are. The rest is pinned, above all
    results of the path, whose memory stays where it is; unless they moved at this very place. A tensor that
    is several arguments is copied once."""
    how = state["opts"]["inputs"]
    if how == "pinned":
        return []
    ranges = [
        (t, core.address(t), core.address(t) + trace.span(t))
        for t in describe.all_tensors(flat, reached)
    ]
    written = {id(t) for path, t in zip(flat.paths, flat.tensors, strict=True) if path in state["written"]}
    chosen = []
    for k, (path, t) in enumerate(zip(flat.paths, flat.tensors, strict=True)):
        if id(t) in written or type(t) is not torch.Tensor or t.layout != torch.strided:
            continue
        if t.is_cuda != (driver == CUDA):
            continue
        if t.is_conj() or t.is_neg() or t.is_quantized:
            continue
        if how == "auto" and k not in moved and core.path_proto(parent, t) is not None:
            continue
        if how == "auto" and path not in state["moved"]:
            before = state["pointers"].get(path)
            if before is None or before == core.address(t):
                continue
        _, lo, hi = ranges[k]
        if any(x is not t and a < hi and lo < b for x, a, b in ranges):
            continue  # shares bytes with another tensor: a copy would part them
        if not any(flat.tensors[j] is t for j in chosen):
            chosen.append(k)
    return chosen


def grads_before(flat, reached):
    """{slot: identity of .grad} of leaf tensors that can have one."""
    return {
        k: core.grad_id(t)
        for k, t in enumerate(describe.all_tensors(flat, reached))
        if can_have_grad(t)
    }


def can_have_grad(t):
    """May code find a .grad here, now or when it is thawed?"""
    return t.is_leaf and (t.requires_grad or type(t) is torch.nn.Parameter or t.grad is not None)


# --- what becomes of it -----------------------------------------------------------------------


def leaves_graph(rec, seen, result):
    """Does a graph of autograd's come out of this capture? It must only ever run inside of one (attention with dropout
    keeps its random numbers on the device there, and reads them on the host elsewhere)."""
    return rec["graph"] is None and (rec["saves"] or bool(describe.pending_in(seen, result)))


def is_passing(state, seen, lost):
    """Is what kept this recording from being one no verdict: will the next one fare better?"""
    return lost or "again" in seen or ("escaped" in seen and state["escapes"] <= options.ESCAPE_TRIES)


def abandon(state, spec, flat, rec, seen, result, reason, lost):
    """The function ran (host) or was captured whole (CUDA), but cannot be replayed. The host's
    results stand; a capture is launched once and its memory moved out of the pool. The caller holds
    the paths. `lost` is no verdict: next time the path may stand still."""
    if rec["driver"] == CUDA:
        tensors = trace.held(seen)
        alive = {
            core.storage_id(t): t for t in tensors if t.is_cuda and core.storage_id(t) in seen["made"]
        }
        core.run_once(list(alive.values()))
        graphs = [t for t in tensors if t.grad_fn is not None]
        core.graphs_here(graphs, record.stream_of(torch.cuda.current_device()).stream_id)
        trace.fill_tokens(seen, rec["captured"], core.recorded_words())
    core.abort()
    rec["settled"] = True
    if not is_passing(state, seen, lost):
        condemn(state, spec, flat, reason)
    if state["graph"] is not None and not state["graph"]["proven"]:
        prove(state, seen, flat.tensors)  # it ran for real: was it right?
    count_eager(state, reason)
    return result


def add_node(state, spec, flat, rec, seen, row):
    """Hand the rows to the core and keep alive what they borrow; the node."""
    f, out = state["f"], row["out"]
    # Also of what no op touched: code may have asked for a shape, a dtype, requires_grad.
    asked = rec["graph"] is None
    used = [
        k for k, s in enumerate(row["slots"])
        if s[0] != NONE or (asked and s[-1] == NONE) or describe.needs_row(k, s, row)
    ]  # fmt: skip
    index = {k: j for j, k in enumerate(used)} | {NONE: NONE}
    slots = [(*row["slots"][k][:-1], index[row["slots"][k][-1]]) for k in used]
    outs = [
        (kind, index[ref] if kind in (VIEW, INPUT) else ref, proto, shift, version,
         index[g] if g != NONE else NONE, *rest)
        for kind, ref, proto, shift, version, g, *rest in row["outs"]
    ]  # fmt: skip
    grads = [(index[k], *rest) for k, *rest in row["grads"]]
    ret_python = any(op[0] in (pytree.DATACLASS, pytree.CUSTOM) for op in out.program)
    groups, place_paths = describe.group_places(rec["places"])
    site, graph = None, row["graph"]
    if graph is not None:
        autograd.complete(row)
        opts = state["opts"] | {"outputs": "rescue", "inputs": "auto", "static": ((), ())}
        site = new_site(autograd.backward_of(graph), state["name"] + BACKWARD, opts, graph)
    saves = [(index[slot], out) for slot, out in row["saves"]]
    known = {core.storage_id(s[2]) for s in slots} | set(seen["buffers"]) | set(seen["made"])
    loose = [core.twin(t) for sid, t in seen["touched"].items() if sid not in known]
    kept = {
        "graph": graph, "backward": site,
        "objects": (out.program, groups, [s[1] for s in slots], rec.get("captured"), seen["keep"]),
        "slot_paths": [row["paths"][k] for k in used], "place_paths": place_paths,
        "grads": grads, "loose": loose, "seconds": row["seconds"],
    }  # fmt: skip
    node = core.add_node(
        f, spec, rec["ambient"], slots, outs, out.program, ret_python, grads, groups,
        list(flat.tensors), (site, saves, [index[k] for k in row["flows"]], row["joined"]), state["keep"], kept,
    )  # fmt: skip
    if graph is not None:
        graph["node"], graph["loose"] = node, loose
    state["unguarded"] = rec["unguarded"]
    core.fn_count(f, "records")
    state["account"]["failed"] = 0
    return node


def reset_state(state):
    """Free a function's recordings; what it learnt about its arguments goes too. From inside a
    function that is being warmed or recorded, when that is done: its rows are in use."""
    if is_mine():
        DOOMED.append((state, None))
        return

    def free():
        forget(state)
        bury()

    with RECORDING:
        core.with_paths(free)


def forget(state):
    """Free the rows of a function's recordings. The caller holds the paths."""
    if not core.fn_is(state["f"], state["born"]):
        return  # collected since
    core.fn_reset(state["f"])
    # What it runs stays, too: a backward may be pending, or just be at it in another thread.
    fresh = new_state(state["f"], state["born"], state["name"], state["opts"], state["graph"])
    stays = ("reasons", "range", "warm_seconds", "warmed", "keep", "past", "ran")  # bury() empties keep
    state.update({k: v for k, v in fresh.items() if k not in stays})
