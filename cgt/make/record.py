"""Make a recording: a tape on the host, a capture on CUDA; and undo one that fails.

A recording is a transaction. Whatever fails ends the capture and puts back generators, pool routing, streams, the
garbage collector, and whatever the function replaced by tensors that were never computed."""

import contextlib
import functools
import signal
import traceback
import weakref
from typing import NamedTuple

import cgt_core as core
import torch

from ..cuts import apart, readout, segments
from ..data import Attempt, Call, Draft, Plan, Seen, Words, remember
from ..look import containers, impure, places
from ..numbers import addresses, counters, live
from ..run import observe, tokens, views
from ..run.devices import is_captured, on_stream
from ..run.taps import NOTHING, capture_hidden, tap_exports
from ..words import errors, pytree
from ..words.private import CAPTURE_CHECKS, clear_workspaces
from . import advice, describe, fed, trace
from .optional import collectives, forks

POOLS = {}  # (device index, that of the path) -> the pool (a handle of the core's) in which to record
STREAMS = {}  # device index -> the side stream that records; one, since blocks belong to it
FOREIGN_MEMORY = -4  # ERROR_FOREIGN_MEMORY in driver.pxi


class Before(NamedTuple):
    """What a capture that fails may have changed."""

    places: list  # the plan's own: who holds a container besides decides whether it is one of the call's own
    kept: list  # more of them
    grads: list  # [(tensor, its .grad)]
    sources: list  # see impure.py
    histories: object  # of core.histories
    random: object  # the state of the host's default generator
    # the GPU on which the next recurrent layer would have filled another buffer with cuDNN's random state
    anew: int | None = None
    counters: list = []  # of counters.snapshot
    given: list = []  # of containers.contents: the call's arguments, deques and sets
    gathered: list = []  # of collectives.sizes
    keys: list = []  # of keys_in
    # [(dict of an object or of an optimizer's states, its entries that are no places)]: new code may set some of them
    beside: list = []


def on_side_stream(device):
    """A bracket: the stream that records, ordered after and before the caller's."""
    stream, current = stream_of(device), torch.cuda.current_stream(device)
    go, back = on_stream(stream, current)

    def begin():
        stream.wait_stream(current)
        go()

    def end():
        back()
        current.wait_stream(stream)

    return begin, end


def stream_of(device):
    """The device's side stream, made once."""
    if device not in STREAMS:
        core.load_kernels(device)
        stream = torch.cuda.Stream(device)
        forks.prepare(device, stream)
        segments.room_of(device)  # none of these can be made in a capture
        STREAMS[device] = stream
    return STREAMS[device]


def pool_of(device, home):
    """The private pool there of the path of `home`: one for all recordings, until it is empty or spoilt."""
    if (device, home) not in POOLS:
        POOLS[device, home] = core.pool_new(device, torch.cuda.graph_pool_handle())
    return POOLS[device, home]


def retire_pool(key):
    """Record in another pool from now on. The old one's memory goes with its last recording."""
    core.pool_retire(POOLS.pop(key))


def release_pools() -> None:
    """Give the memory of pools back in which nothing lives any more."""
    for key in [key for key, pool in POOLS.items() if core.pool_nodes(pool) == 0]:
        retire_pool(key)
    core.pools_drop()


def begin(attempt, device, stream=0):
    """Begin a recording behind the node that the path has come to. A pool whose memory somebody else
    keeps cannot be put back to a checkpoint: then another one is used. Another thread may have moved the path since
    the call was planned: what was worked out for the one parent does not hold behind the other."""
    driver, gpus = attempt.plan.driver, (device, *attempt.plan.others)

    def start():
        others = [(d, stream_of(d).cuda_stream, pool_of(d, device)) for d in attempt.plan.others]
        core.begin(driver, device, stream, pool_of(device, device) if driver == core.CUDA else 0, others)

    def go():
        core.pools_drop()
        try:
            start()
        except core.DriverError as error:
            if error.args[0] != FOREIGN_MEMORY:
                raise
            core.abort()
            for d in gpus:
                retire_pool((d, device))
            start()
        attempt.overtaken = core.path_state(device)[1] != attempt.plan.parent

    core.with_paths(go)


def close(attempt: Attempt) -> None:
    """However a recording was left, nothing of it is under way any more. Where an exception leaves a capture that was
    not launched, nothing that it put into places or gradients was ever computed."""
    core.paths_leave()
    core.abort()
    if not attempt.settled and attempt.before is not None and not core.recording_ran():
        # The states of sharded parameters fit together.
        restore_places(attempt.before, attempt.seen, tensors_only=not attempt.plan.found.sharded)
        put_back(attempt.plan)
    attempt.settled = True


def buffer_apart(t, swaps, spare):
    """Memory for a copied slot that is not as far from the tensor as another one is from its own: so an address in one
    of them tells which (addresses.py), although tensors and copies may both lie end to end. `spare`: buffers that were
    not, kept so that they do not come again."""
    while True:
        buffer = observe.buffer_for(t)
        distance = core.address(t) - core.address(buffer)
        if t.numel() == 0 or all(core.address(x) - core.address(other) != distance for x, other in swaps):
            return buffer
        spare.append(buffer)


def end_run(state, plan, seen):
    """The function is done. The graph that it left behind ends at what the call was given and reached; it is known
    which of the copied slots need no copy; and behind all else what was written in the others comes to where the user
    has it."""
    seen.spread = None  # no lane's memory is held any more
    if plan.saves:
        core.sinks_open(plan.sinks, plan.tensors)
    if seen.reason is not None:
        return
    seen.copied.bound.update(addresses.bind(seen, plan))
    remember(state, whole=addresses.is_whole(seen))
    for k in plan.copied:
        t = plan.tensors[k]
        if id(t) in seen.copied.carried and k not in seen.copied.bound:
            (buffer,) = (swap.buffer for swap in seen.copied.swaps[core.storage_id(t)] if swap.leaf is t)
            seen.copied.backs[k] = core.copy_back(buffer, t, core.span(t))


def arguments(call, seen):
    """What the function is called with. Where kernels read arguments that no op shows, exchanging them at ops is not
    enough: a backward, which asks no tensor who it is, gets the copies."""
    return observe.exchange(seen, call.args) if call.state.learnt.hidden and call.state.graph is not None else call.args


def capture(call: Call, attempt: Attempt) -> str | None:
    """Run the function of a planned call once, under observation, while its ops are recorded: `seen` and `result`
    are filled. A sentence if nothing was recorded, and all is as before; None."""
    return (on_cuda if attempt.plan.driver == core.CUDA else on_host)(call, attempt)


def watch(state, attempt, fills, pool=0, made=()):
    """(attempt.seen, which is to show the run; [(tensor, buffer), ...] of slots that it copies). `fills`: the copies
    hold what they are of, by now. `pool`: as of Run. `made`: see fed.buffers."""
    plan, swaps, copies, spare = attempt.plan, [], {}, []
    for k in plan.copied:
        t = plan.tensors[k]
        buffer = made[k] if k in made else buffer_apart(t, swaps, spare)
        if fills:
            observe.fill(buffer, t)
        copies[k] = core.copy(buffer, t, core.span(t))
        swaps.append((t, buffer))
    seen = attempt.seen = observe.observe_plan(state, plan, swaps, attempt.before, pool)
    seen.copied.copies.update(copies)
    seen.copied.movable.update(addresses.begin(state, plan, seen, copies))
    return seen, swaps


def on_host(call, attempt):
    """The function runs for real while the tape is written. What it raises is the user's own."""
    plan = attempt.plan
    try:
        begin(attempt, -1)
        # Code that is given a number of ours may raise where eager's would not.
        if plan.numbers.computes or plan.numbers.sources:
            attempt.before = snapshot(call, plan)
        seen, swaps = watch(call.state, attempt, fills=True)
        seen.alive.memory.extend(buffer for _, buffer in swaps)
        torch.clear_autocast_cache()
        observed = functools.partial(trace.run, seen, call.function, arguments(call, seen), call.kwargs)
        attempt.result = core.within(places.collector_off(), observed)  # cycles of the run stay young
        torch.clear_autocast_cache()
        end_run(call.state, plan, seen)
        if seen.reason is None:
            core.end([])
    except core.DriverError as error:
        core.abort()
        reason = errors.recording_failed(error.args[1], "")
        if attempt.seen is None:
            return reason
        attempt.seen.reason = reason  # the function ran: its result stands, only the recording is lost
    except (observe.Unrecordable, Exception) as error:
        reason = live.why_repeated(attempt.seen, error)
        if live.may_undo(attempt.seen):
            restore_places(attempt.before, attempt.seen, tensors_only=False)
            segments.undo(attempt.seen, 0)
            put_back(plan)
        if reason is None:
            if attempt.seen is not None:
                live.blame(call.state, attempt.seen, None)
                readout.fill(attempt.seen, None)
            raise
        core.abort()
        return reason
    finally:
        attempt.before = None  # what ran stands, or was undone
    return None


def on_cuda(call, attempt):
    """Capture the function; nothing executes. On any failure everything is put back: the caller then runs the
    function eagerly, which raises the user's own exceptions."""
    plan, device = attempt.plan, attempt.plan.device
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        return errors.no_checkpoints(backend)
    try:
        stream = stream_of(device)
    except core.DriverError as error:  # an old one
        return failure(error)
    defaults = [torch.cuda.default_generators[d] for d in (device, *plan.others)]
    reachable = [*defaults, *(g for g in plan.generators if g.device.type == "cuda")]
    generators = list({core.generator_id(g): g for g in reachable}.values())
    # Ordinary memory, made before the capture: kernels of the recording read these words. One of the program's own may
    # draw on any GPU.
    homes = [g.device for g in defaults] + [defaults[0].device] * (len(generators) - len(defaults))
    word_pairs = [torch.zeros(2, dtype=torch.int64, device=where) for where in homes]
    attempt.before, buffers = snapshot(call, plan), fed.buffers(plan)
    handles, captured = [], []
    tap_exports(leaves)

    def run():
        for d in (device, *plan.others):
            with torch.cuda.device(d):
                torch.cuda.current_blas_handle()  # one per thread, and none can be made in a capture
        now = list(map(core.generator_now, generators))
        begin(attempt, device, stream.cuda_stream)
        for g, w, seed_offset in zip(generators, word_pairs, now, strict=True):
            seed, offset = w[0:1], w[1:2]
            core.words(g, seed, offset, seed_offset)
            core.swap_generator(g, seed, offset, handles)
        seen, _ = watch(call.state, attempt, fills=False, pool=POOLS[device, device], made=buffers)
        seen.alive.objects.extend((*generators, *word_pairs, *buffers.values()))
        for g, w, handle in zip(generators, word_pairs, handles, strict=True):
            seen.generators.words[core.generator_id(g)] = Words(handle, w, w)
            observe.note_memory(seen, w)
        attempt.result = trace.run(seen, call.function, arguments(call, seen), call.kwargs)
        end_run(call.state, plan, seen)
        advances = core.restore_generators(handles)
        seen.random |= any(draws for _, draws in advances)
        core.end(advances)
        captured.append(True)

    def leave():
        core.capture_relaxed(False)  # constants.elsewhere may have been interrupted
        core.restore_generators(handles)
        if not captured:
            abort(attempt)  # before the streams are joined again: nobody may wait for a capture

    parallel = bool(call.state.learnt.devices.parallel) and plan.graph is None
    # On the caller's stream.
    back = functools.partial(core.sinks_away, plan.sinks, False, True) if parallel else lambda: None
    brackets = [
        *places.collector_off(),  # a finalizer in a capture may call the driver
        (lambda: None, back),
        (clear_caches, clear_caches),
        *map(on_side_stream, (device, *plan.others)),
        capture_hidden(forks.STREAMS.values),
        own_accumulators(plan, parallel),
        collectives.undisturbed(call.state.learnt.devices.parallel),
        (lambda: None, leave),
    ]
    try:
        core.within(brackets, run)
    except BaseException as error:
        if is_stop(error):  # no second run will follow
            raise
        recover(device, attempt.seen)
        attempt.result, attempt.raised = None, type(error)
        attempt.starved, broken = isinstance(error, torch.OutOfMemoryError), apart.is_broken(error)
        attempt.passing |= broken
        restore_places(attempt.before, attempt.seen, tensors_only=False)
        attempt.settled = True
        if collectives.forget(call.state.learnt.devices.parallel) and attempt.starved:
            raise  # as eager would
        return errors.capture_broken() if broken else (attempt.seen and attempt.seen.reason) or failure(error)
    return None


def recover(device, seen):
    """What a capture refused is told once more: by the next kernel (as the thread's last error), by the next memory
    that is pinned (PyTorch asks the events of the other), by the library whose call it was. The user's call comes after
    that."""
    kernel, pinned = lambda: torch.empty(1, device=f"cuda:{device}").fill_(1), lambda: torch.empty(1, pin_memory=True)
    for body in (kernel, pinned, *(seen.cuts.failed if seen else ())):
        with contextlib.suppress(Exception):  # of zeros an op may say anything
            body()


def leaves(t, stream):
    """A tensor's address is about to leave PyTorch. If it is a result, what keeps the address is to find it there for
    good. `stream`, or None: kernels on it may read the result already, where the next replay writes; the caller's
    stream waits for them."""
    if isinstance(t, torch.UntypedStorage):
        t = torch.empty(0, dtype=torch.uint8, device=t.device).set_(t)
    if isinstance(t, torch.Tensor) and t.is_cuda and core.is_lent(t) and core.observer() is None and not is_captured(t):
        core.held(functools.partial(core.part, t))
        if stream is not None:
            torch.cuda.current_stream(t.device).wait_stream(stream)


def clear_caches():
    """What PyTorch caches per thread and stream must not be of a capture, nor in it of outside."""
    torch.clear_autocast_cache()
    clear_workspaces()


def is_stop(error):
    """Does this exception come from outside, so that running the function again would lose it: Ctrl-C, the end, what
    the handler of a signal raised?"""
    if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
        return True
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


def own_accumulators(plan, parallel):
    """A bracket. A backward inside of a capture must not meet accumulators that run on the caller's stream. A
    differentiable function has its backward outside, and those are the right ones for it; and a recorded
    graph meets none unless it computes forwards again. Other threads must not miss theirs meanwhile. `parallel`: a
    DistributedDataParallel's hooks on them are to run in the capture."""
    if plan.saves or (plan.graph is not None and not plan.graph.recomputes):
        return NOTHING
    away = functools.partial(core.sinks_away, plan.sinks)
    return functools.partial(away, True, parallel), functools.partial(away, False)


def failure(error: BaseException) -> str:
    """A sentence on an exception that left a capture, with the user's line."""
    line, refused = "", None
    for frame, lineno in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_filename
        if not name.startswith(observe.NOT_USER_CODE):
            line = f"{name}:{lineno}"
        if frame.f_code in CAPTURE_CHECKS:
            refused = frame
    if isinstance(error, core.DriverError):
        return errors.recording_failed(error.args[1], line)
    if "set_current_seed" in str(error):  # of PyTorch's generator
        return errors.reseeded(line)
    what = f"{type(error).__name__}: {str(error).split(chr(10))[0].rstrip('.')}"
    return advice.step_reason(refused, line) or errors.recording_failed(what, line)


# --- what a recording does to the call's surroundings, and how it is undone ----------------------


def snapshot(call, plan):
    """What a failed capture may have replaced by tensors that were never computed."""
    grads = [(t, t.grad) for t in plan.tensors if t.is_leaf]  # one that requires none may begin to
    kept = [put.place for put in plan.found.kept]
    histories, random = core.histories(plan.tensors), torch.default_generator.get_state()
    anew = plan.device if plan.driver == core.CUDA and core.dropout_begins_anew(plan.device) else None
    given = containers.contents([*call.args, *call.kwargs.values()])
    holders = [one for _, there in plan.follows.values() for one in there.holders]
    given += [(one, containers.entries(one)) for one in holders if type(one) in (list, dict)]
    given += [(home, containers.entries(home)) for home in containers.unguarded(p.want for p in plan.places)]
    return Before(
        plan.places, kept, grads, plan.sources, histories, random, anew, counters.snapshot(plan), given,
        collectives.sizes(plan.found.sharded), keys_in(plan.places), attributes_beside(plan),
    )  # fmt: skip


def attributes_beside(plan):
    """As of Before."""
    homes = places.dicts_of_owners(plan.found)
    optimizers = [one for one in plan.found.owners.values() if issubclass(type(one), torch.optim.Optimizer)]
    states = [state for one in optimizers if isinstance(state := one.__dict__.get("state"), dict)]
    states += [one for state in states for one in state.values() if isinstance(one, dict)]
    return entries_beside([*homes, *states], plan.places)


def entries_beside(homes, found):
    known = named_in(found)
    return [(home, {key: value for key, value in home.items() if (id(home), key) not in known}) for home in homes]


def named_in(found):
    return {(id(p.home), p.key) for p in found if type(p.key) is str}


def keys_in(found):
    """[(position, keys), ...] of the places that are a dict's length. (To hold the dict would be to share it.)"""
    return [(k, list(dict.keys(p.home))) for k, p in enumerate(found) if p.kind == places.DICT_LEN]


def accept(before: Before) -> None:
    """What is there now was changed for real: a capture that comes to nothing does not put it back, but for places that
    hold one object."""
    before.places[:] = [places.as_now(p) if p.kind in (places.DICT_LEN, places.LIST_LEN) else p for p in before.places]
    before.kept[:] = map(places.as_now, before.kept)
    before.grads[:] = [(t, t.grad) for t, _ in before.grads]
    before.counters[:] = counters.as_now(before.counters)
    before.given[:] = [(home, containers.entries(home)) for home, _ in before.given]
    before.keys[:] = keys_in(before.places)
    before.beside[:] = entries_beside([home for home, _ in before.beside], before.places)


def restore_places(before, seen, tensors_only):
    """Put back what a failed capture replaced in places, gradients and random states; or only where it left tensors of
    its own, whose values were never computed."""

    def spoilt(value):
        made = seen.made if seen is not None else ()
        return not tensors_only or any(core.storage_id(t) in made for t in pytree.tensors_in(value))

    found, kept, grads, sources, histories, random, anew, counted, given, gathered, keys, beside = before
    counters.put_back(counted)
    collectives.let_go(gathered)
    core.histories_restore(histories)
    if anew is not None and not core.dropout_begins_anew(anew):
        core.dropout_undo(anew)
        if seen is not None:
            seen.reason, seen.again = errors.cudnn_dropout(), True
    for home, were in ((found[k].home, set(map(id, were))) for k, were in keys if found[k].kind == places.DICT_LEN):
        for key in [key for key, value in dict.items(home) if id(key) not in were and spoilt(value)]:
            dict.__delitem__(home, key)  # it came since
    for p in (*found, *kept):
        restore_place(p, spoilt)
    restore_beside(beside, found, spoilt)
    containers.restore([one for one in given if not tensors_only or any(map(spoilt, containers.values_of(one[0])))])
    for tensor, grad in grads:
        if tensor.grad is not grad:
            tensor.grad = grad
    if not tensors_only:
        impure.put_back(sources)
        if seen is not None and seen.draws:
            torch.default_generator.set_state(random)


def restore_beside(beside, found, spoilt):
    """Put back the entries that are no places."""
    known = named_in(found)
    for home, were in beside:
        for key in [key for key in home if key not in were and (id(home), key) not in known and spoilt(home[key])]:
            del home[key]
        for key, value in were.items():
            if (now := home.get(key, places.MISSING)) is not value and spoilt(now):
                home[key] = value


def restore_place(p, spoilt):
    """Put back what lies there, or what came to the container behind the place, as far as it is spoilt."""
    if p.kind == places.LIST_LEN:
        more = p.home[p.want :]
        if any(spoilt(v) for v in more):
            p.home[p.want :] = [v for v in more if not spoilt(v)]
    elif p.kind not in (places.DICT_LEN, places.EMPTY):
        now = places.value_at(p)
        if now is not p.want and spoilt(now):
            places.put_back(p)


def put_back(plan):
    """Give those tensors their memory again to which the run gave another. An error where nothing holds it (a result
    of the path): what the tensor has now was never computed."""
    for path, t, was in describe.slots_before(plan):
        if describe.memory_of(t) == was.memory:
            continue
        if was.alias is None:
            raise errors.CgtError(errors.replaced(path))
        t.data = was.alias


def undo(attempt: Attempt) -> None:
    """A capture that was never launched: what it put into places may not stay."""
    if attempt.settled or attempt.before is None:
        return
    restore_places(attempt.before, attempt.seen, tensors_only=False)
    abort(attempt)
    put_back(attempt.plan)
    attempt.settled = True


def abort(attempt):
    """End a capture that comes to nothing. Memory that its segments wrote is as it was."""
    ran = core.segments_ran()
    core.abort()
    if attempt.seen is not None:
        segments.undo(attempt.seen, ran)


class Parts(NamedTuple):
    """What the call's result is made from again, if there will be no node after all."""

    given: list  # tensors of the result, or memory of theirs; None: comes of another one
    left: dict  # output -> weak reference to the tensor that the function made, which somebody else may have, too
    bases: dict  # the same of hidden outputs of which results are views
    grads: list  # (tensor, what its .grad was)
    puts: list  # of EffectRow: what came to places


def part_result(plan: Plan, draft: Draft) -> tuple[Parts, Draft]:
    """(Parts, the draft without the result): let go of the call's result, whose memory becomes the recording's. A
    replay hands out tensors of its own."""
    outs = draft.outs[: len(draft.out.tensors)]
    given = [
        o.proto if o.kind in (core.FRESH, core.SHARED) else None if o.kind in (core.AGAIN, core.PART)
        else draft.slots[o.ref].example if o.kind == core.INPUT else t
        for o, t in zip(outs, draft.out.tensors, strict=True)
    ]  # fmt: skip
    hidden = {k: draft.outs[k] for k in draft.bases}
    bases = {k: draft.slots[o.ref].example if o.kind == core.INPUT else o.proto for k, o in hidden.items()}
    for saved, *_ in draft.behind.saved:
        saved.tensor = None
    sets = [e for e in draft.effects if e.kind == core.SETS_GRAD]
    grads = [(draft.slots[e.slot].example, None if e.out == core.NONE else grad_of(draft.outs, e.out)) for e in sets]
    # The replay of this very call sets them; in a capture nothing has run, and it may read those that were there.
    were = {one.owner: one.tensor for one in plan.reached if one.owner != core.NONE and plan.driver == core.CUDA}
    for e, (owner, _) in zip(sets, grads, strict=True):
        owner.grad = were.get(e.slot)
    came = [e for e in draft.effects if e.kind in (core.PUTS, core.APPENDS)]
    left = dict(enumerate(draft.out.tensors))
    for e in (e for e in came if e.kind == core.PUTS):
        parts = [out for out, _ in e.by.parts] if e.made else [e.out]
        mine = [out for out in parts if out != core.NONE and draft.outs[out].kind != core.READOUT]
        left.update(zip(mine, pytree.tensors_in(places.value_at(plan.places[e.place])), strict=False))
    for put, _ in plan.changes.puts:  # and these
        if put.place.kind == core.LIST_LEN:
            del put.place.home[put.place.want :]
        else:
            places.put_back(put.place)
    left = {k: weakref.ref(t) for k, t in left.items() if isinstance(t, torch.Tensor)}
    return Parts(given, left, bases, grads, came), draft._replace(out=draft.out._replace(tensors=()), bases={})


def grad_of(outs, k):
    """The memory of a gradient, or what is made around such."""
    if outs[k].kind != core.WRAPPER:
        return outs[k].proto
    make, inside, _ = outs[k].ops
    return make([outs[j].proto for j in inside])


def put_of(draft, effect, given, left):
    """What came to a place, or the memory of it."""

    def part(out):
        if out < len(given):
            return given[out]
        row = draft.outs[out]
        if row.kind == core.READOUT:
            return pytree.Readout(row.proto, *row.ops, row.line)
        return left_of(left, out, draft.slots[row.ref].example if row.kind == core.INPUT else row.proto)

    if effect.made:
        make, parts, values = effect.by
        numbers = iter(values)
        return make([next(numbers) if out == core.NONE else part(out) for out, _ in parts])
    return effect.by if effect.out == core.NONE else part(effect.out)


def left_of(left, k, memory):
    """Output k itself, if somebody has it; else its memory."""
    one = left[k]() if k in left else None
    return memory if one is None else one


def restore_result(plan: Plan, seen: Seen, draft: Draft, parts: Parts) -> object:
    """The call's result after all, over the memory in which it was made."""
    outs, whole, made = draft.outs[: len(parts.given)], dict(enumerate(parts.given)) | parts.bases, []
    for k, root in enumerate(draft.behind.roots):
        whole[root] = core.view_like(whole[root], whole[root], 0)
        core.sinks_join(seen.run.plan.sinks, k, whole[root])
    for k, row in enumerate(outs):
        if row.kind == core.PART:
            if not made:
                made += [whole[j] for j in row.ops[0]]
                views.make(made, row.ops[1])
            whole[k] = made[row.ref]
    given = [whole[row.ref if row.kind == core.AGAIN else k] for k, row in enumerate(outs)]
    given = [left_of(parts.left, k, t) for k, t in enumerate(given)]
    for one, base, like, shift in draft.behind.saved:
        one.tensor = core.view_like(base, like, shift)
        one.version = one.tensor._version
        seen.alive.results.append(weakref.ref(one.tensor))
    for owner, proto in parts.grads:
        owner.grad = proto
    put = []
    for effect in parts.puts:
        place, value = plan.places[effect.place], put_of(draft, effect, given, parts.left)
        put.append(value)
        if effect.kind == core.APPENDS:
            place.want.append(value)
        else:
            places.put_back(place._replace(want=value))
    results = (*given, *(proto for _, proto in parts.grads), *(t for value in put for t in pytree.tensors_in(value)))
    seen.alive.results.extend(weakref.ref(t) for t in results if t is not None)
    pairs = zip(outs, given, strict=True)
    leaves = [pytree.Readout(t, o.ops[0], o.line) if o.kind == core.READOUT else t for o, t in pairs]
    leaves = [leaves[o.ref] if o.kind == core.AGAIN else leaf for o, leaf in zip(outs, leaves, strict=True)]
    return pytree.unflatten(draft.out.program, leaves)


def complete(plan: Plan, seen: Seen, draft: Draft) -> str | None:
    """Make of the graph what is launched, and of the recording's memory the pool's; or a sentence that says why there
    can be no node."""
    outs = [o.proto for o in draft.outs if o.kind == core.FRESH]
    early = []
    for effect in draft.effects if draft.keeps_grads else ():
        if effect.kind == core.SETS_GRAD and effect.out != core.NONE:
            row = draft.outs[effect.out]
            early += [draft.outs[k].proto for k in row.ops[1]] if row.kind == core.WRAPPER else [row.proto]
    if plan.driver == core.HOST:
        outs.extend(saved for _, saved, *_ in segments.undo_rows(seen))
    else:
        # A result may be a view of a copied argument's buffer, which is then still allocated.
        buffers = [swap.buffer for swap in seen.copied.buffers.values() if swap.leaf.is_cuda]
        outs.extend(buffer for buffer in buffers if core.storage_address(buffer))  # not let go of
    try:
        core.instantiate()
        seen.reads.spare.clear()
        core.checkpoint(seen.alive.memory, outs, early)
    except core.DriverError as error:
        return errors.recording_failed(error.args[1], "")
    seen.alive.memory.clear()
    return None


def launch_once(attempt: Attempt) -> None:
    """A capture that cannot be replayed runs once for its own call, and its memory moves out of the pool."""
    seen = attempt.seen
    tensors = observe.held(seen)
    alive = {core.storage_id(t): t for t in tensors if t.is_cuda and core.storage_id(t) in seen.made}
    core.instantiate()
    core.run_once(list(alive.values()))
    graphs = [t for t in tensors if t.grad_fn is not None]
    core.graphs_here(graphs, stream_of(attempt.plan.device).stream_id)
    tokens.fill_tokens(seen, core.recorded_words())
