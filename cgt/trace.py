"""Run the user's function once and note in a `Seen` what it does.

While it is warmed or recorded, an observer below autograd sees every ATen op (autograd's worker thread included)
and takes part in none (observe_shim.h); the few functions that read memory or random
states behind the dispatcher's back are tapped one by one (taps.py).
"""

import functools
import sys
import weakref
from typing import NamedTuple

import cgt_core as core
import torch
from cgt_core import CUDA, HOST, NONE

from . import (
    addresses,
    advice,
    apart,
    blank,
    constants,
    counters,
    errors,
    finite,
    forks,
    impure,
    live,
    packed,
    ranks,
    readout,
    scalars,
    segments,
    tape,
    wrappers,
)
from .data import LIVE_NUMBER, NotedOp
from .devices import is_captured, name_of, one_thread
from .observe import (
    Unrecordable,
    asks_on,
    collect,
    exchange,
    fill,
    fix,
    holders,
    is_capture,
    is_host_recording,
    note_memory,
    note_reason,
    references,
    refuse,
    span,
    swap_of,
    tensors_in,
    touch,
    user_line,
    version_of,
)
from .private import has_threads, is_forward_ad
from .taps import (
    HANDOVERS,
    tap_compiled,
    tap_forks,
    tap_higher_order,
    tap_jiterated,
    tap_kernels,
    tap_parallel,
    tap_readers,
    tap_regions,
    tap_saves,
    tap_sharding,
    tap_states,
    tap_swaps,
    tap_threads,
)
from .tokens import how_far, see_draw, see_get_state, see_set_state

aten = torch.ops.aten

# Which arguments of cuDNN's recurrent ops are the share that is dropped, whether it trains, and the buffer from which that is drawn.
DROPOUT = {"_cudnn_rnn": (11, 12, 15), "_cudnn_rnn_backward": (15, 16, 19)}
# Ops that write running mean and variance (arguments 3 and 4) in training (argument 5) without
# saying so in their schema.
SILENT_WRITES = frozenset(
    "native_batch_norm cudnn_batch_norm miopen_batch_norm _batch_norm_impl_index".split()
)
GATHERS = "fsdp::all_gather_copy_in"  # and this one argument 1
# Ops that count from the start of the storage, which a copied slot's buffer does not have.
CASTS_INSIDE = frozenset(("_trilinear", "linalg_pinv"))  # the database of operators has no others
ABSOLUTE = frozenset(("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter"))
CHECKS = frozenset(("_linalg_check_errors",))
DYNAMIC = frozenset(("_pack_padded_sequence",))  # by lengths on the host, though it has no tag for that
# Ops that keep seed and offset of their random numbers for a backward: on the device where a capture is under way, on the
# host elsewhere; and their backwards, which look for them there.
KEEPS_SEED = frozenset(
    f"{name}_attention{end}"
    for name in ("_scaled_dot_product_flash", "_scaled_dot_product_efficient", "_flash", "_efficient")
    for end in ("", "_forward", "_backward")
)
SEED = ("philox_seed", "philox_offset")
# Their schemas tell of no write: allreduce_ and its kin are known by this.
WAITS = ("barrier", "monitored_barrier_")  # in which the host waits
COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")
COPIED_OUT = ("tolist", "__repr__")  # readers that keep nothing of the memory
COPIES = frozenset(("_to_copy", "copy_", "_copy_from"))
INDEX_PUT = frozenset("index_put index_put_ _index_put_impl_ _unsafe_index_put".split())
INDEXES = INDEX_PUT | {"index", "_unsafe_index"}
REPLACES_MEMORY = frozenset("set_ resize_ resize_as_ _resize_output_ resize_storage_bytes_".split())


class OpFacts(NamedTuple):
    """What is known of an op before it runs."""

    packet: str  # name without overload
    writes: tuple  # positions and names of the arguments that it writes
    draws: bool  # takes random numbers
    reads: bool  # its result depends on values that Python sees
    checks: bool  # whether it raises does
    dynamic: bool  # the shape of its result depends on values
    reshapes: bool  # changes a tensor's shape in place
    replaces: bool  # gives a tensor other memory
    absolute: bool  # counts from the start of the storage
    copies: bool  # from one device to another, too
    moves: bool  # brings numbers of the host's to the GPU by a copy, which a capture forbids


@functools.cache
def facts_of(op):
    """The facts of an op, once for each."""
    packet, tags = op.overloadpacket.__name__, op.tags
    return OpFacts(
        packet, tape.writes(op), torch.Tag.nondeterministic_seeded in tags,
        torch.Tag.data_dependent_output in tags, packet in CHECKS, packet in DYNAMIC or torch.Tag.dynamic_output_shape in tags,
        torch.Tag.inplace_view in tags, packet in REPLACES_MEMORY, packet in ABSOLUTE,
        packet in COPIES, packet in COPIES | INDEX_PUT,
    )  # fmt: skip


class Saved:
    """What autograd holds instead of a tensor that it saved, while a differentiable call is recorded:
    the tensor, until the recording is complete; then which argument of the backward it lies in."""

    __slots__ = ("tensor", "version", "leaves", "at", "like", "shift", "__weakref__")


def run(seen, function, args, kwargs):
    """Run the function under observation; its result."""
    for generator in (torch.default_generator, *seen.reachable):
        if generator.device.type == "cpu":
            see_draw(seen, generator, after=True)
    observer, higher_order = functools.partial(see_op, seen), functools.partial(see_higher_order, seen)
    is_mine = lambda: core.observer() is observer  # noqa: E731
    regions, saw_regions = tap_regions(
        is_mine, functools.partial(see_region, seen), functools.partial(see_compilation, seen)
    )
    brackets = [
        tap_readers(is_mine, functools.partial(see_reader, seen, function, args)),
        tap_states(is_mine, functools.partial(see_get_state, seen), functools.partial(see_set_state, seen)),
        tap_higher_order(is_mine, higher_order), *tap_parallel(is_mine, functools.partial(see_parallel, seen)),
        tap_compiled(is_mine, higher_order), (lambda: None, functools.partial(constants.close, seen)),
        tap_swaps(is_mine, functools.partial(see_swap, seen)),
        (lambda: None, functools.partial(readout.close, seen)),
        tap_forks(lambda: is_mine() or forks.is_imagined(seen), functools.partial(forks.see_fork, seen, forks.modules())),
        tap_kernels(), tap_jiterated(is_mine, functools.partial(see_jiterated, seen)), tap_sharding(is_mine), *regions, *packing(seen, is_mine), impure.tap(seen, is_mine), live.tap(seen, is_mine),
        one_thread(seen.others), tap_threads(functools.partial(hear, seen)),  # the last is the first to end
    ]  # fmt: skip
    counters.begin(seen)
    before = references(seen)
    called = functools.partial(given, seen, observer, function, args, kwargs)
    result = live.close(seen, [core.within(brackets, called)])  # a caller's stack may hold what it passes
    finite.close(seen, getattr(function, "__qualname__", "a function"))
    seen.is_own = sys.getrefcount(result) <= 2  # ours and the question's
    if seen.gave_work:
        vet_threads(seen)
    seen.imported = impure.imported(seen.started)
    seen.ran = impure.code_of_function(seen.started, seen.imported)
    seen.asks_which |= impure.asks_which(seen.started, seen.ran)
    if seen.saves:
        if before != references(seen):
            collect()
        seen.kept = [now - then for then, now in zip(before, references(seen), strict=True)]
    if seen.recording and not saw_regions():
        refuse(seen, errors.compiles("the function"))
    if seen.reason is None:
        see_draw(seen, torch.default_generator, after=False)
        if any(rng.at is not rng.words for rng in seen.rng.values()):
            refuse(seen, errors.reseeded(user_line(seen)))
    return result


def see_swap(seen, plain, *tensors):
    """Two tensors change places, of which nobody may hold a weak reference. No recording knows which is which then."""
    refuse(seen, errors.swapped(user_line(seen)))
    core.forget_results(seen.returned)
    seen.results.clear()
    plain(*tensors)


def hear(seen, op):
    """A thread ran this op meanwhile that nobody sees. Did this run give work to one, or wait for one? Asked before the code of other threads
    counts as its own (tap_calls): they give each other work, too."""
    seen.elsewhere, seen.gave_work = op, not HANDOVERS.isdisjoint(seen.started)


def vet_threads(seen):
    """Refuse such a run: no recording has what the other thread did, and a number of ours was none there."""
    sentence = errors.op_elsewhere(seen.elsewhere)
    refuse(seen, sentence)
    if seen.live is not None:
        live.leave(seen, sentence)


def given(seen, observer, function, args, kwargs):
    """Call the function, which is observed, with what is to stand for its arguments."""
    result = core.observed(seen.returned, observer, function, *live.arguments(seen, args, kwargs))
    if seen.pending and is_capture(seen):
        ranks.wait_pending(seen)
    return result


def packing(seen, is_mine):
    """[bracket, ...]: inside, autograd saves through `pack` where a later backward will need it."""
    if not seen.saves:
        return []
    packed = functools.partial(pack, seen.saved, seen.results)
    return tap_saves(packed, unpack, is_mine, lambda: refuse(seen, errors.transforms(user_line(seen))))


def seen_here():
    """What the calling thread's run has seen, or None: it is nobody's."""
    return getattr(core.observer(), "args", (None,))[0]


def see_kernel(name):
    """An operator is about to run that reads values for which a replay has no op. It comes from the middle of
    PyTorch: no exception may leave, even in a capture."""
    seen = seen_here()
    if seen is not None and not seen.inside and asks_on(seen):
        note_reason(seen, errors.read_behind(name.replace("::", "."), user_line(seen)))


def see_lift(begins):
    """torch.tensor brings Python's numbers to their device. A capture would copy them from memory of the host's that is
    gone when it is replayed: they are brought for real."""
    seen = seen_here()
    if begins and seen is not None and is_capture(seen) and not seen.inside:
        begin, seen.lifted = constants.elsewhere(seen)  # an interrupt between the two does no harm
        begin()
    elif not begins and seen is not None and seen.lifted is not None:
        seen.lifted()
        seen.lifted = None


def pack(packed, results, t):
    """What autograd keeps of a tensor that it saves. Not the tensor: a result would hold its own graph. The
    graph holds this hook: it must not lead to `seen`, and with it to the call's arguments."""
    saved = Saved()
    saved.tensor = core.view_like(t, t, 0) if core.is_plain(t) else t.detach()
    saved.version = version_of(t if core.is_plain(t) else saved.tensor)  # whose counter may be another one
    packed.append(weakref.ref(saved))
    results.append(weakref.ref(saved.tensor))
    return saved


def unpack(saved):
    """The tensor, when a backward asks for it."""
    if saved.tensor is None:
        leaves = saved.leaves
        if saved.at in leaves.changed:
            raise RuntimeError(errors.modified(tuple(saved.like.shape)))
        if saved.at in leaves.gone:
            leaves.late = True
            if leaves.tensors[saved.at].is_cuda:  # nothing has run yet
                raise Unrecordable(errors.late_read())
        elif saved.at in leaves.left:
            leaves.was_read(saved.at, id(saved))
        return core.view_like(leaves.tensors[saved.at], saved.like, saved.shift)
    if not saved.tensor.is_inference() and saved.tensor._version != saved.version:
        raise RuntimeError(errors.modified(tuple(saved.tensor.shape), saved.tensor._version, saved.version))
    return saved.tensor


def spend(seen):
    """Let go of what autograd has read for the last time: a result of the path, or the copy of an argument.
    A run under way may still hold some of it."""
    leaves = seen.graph.leaves
    for at in sorted(leaves.read):
        memory, uses = seen.spent[at]
        if holders(memory) > uses:
            continue
        del leaves.left[at]
        leaves.read.remove(at)
        leaves.gone.add(at)
        try:
            if len(memory) == 1:
                core.spend(memory[0])
            else:
                core.storage_empty(memory[1])
        except core.DriverError as error:
            refuse(seen, errors.recording_failed(error.args[1], ""))


def see_higher_order(seen, op):
    """What it runs is no op of a tape's."""
    if not seen.inside:
        refuse(seen, errors.higher_order_op(op.name(), user_line(seen)))


def see_reader(seen, function, args, name, t, arguments):
    """A method that reads memory: fatal on the host, where nobody could replay the reader. What it is to return, where that is
    not its own affair."""
    if seen.inside or wrappers.is_one(t):  # what is inside is read by an op
        return None
    number = counters.ask(seen, name, t)
    if number is not None:
        return number
    # On a stream of the function's own the bytes would leave before they are computed.
    beside = is_capture(seen) and torch.cuda.current_stream(seen.device) not in forks.STREAMS.values()
    answer = None if beside else readout.note(seen, name, t, arguments, given.__code__, function, args)
    if answer is None and name == "item" and not beside:
        answer = segments.read_number(seen, t)
    if answer is not None or name in readout.OPS:
        return answer
    sid = core.storage_id(t)
    if seen.driver == CUDA and t.is_cuda and name in ("data_ptr", "untyped_storage"):
        # A kernel outside the dispatcher may read or write there: the address must stay.
        seen.raw.add(sid)
        constants.forget(seen, [t])
        if sid not in seen.made:
            seen.touched.setdefault(sid, t)
            seen.written.add(sid)
            if sid in seen.swaps:
                refuse(seen, errors.memory_read(name, user_line(seen)))
        return None
    if name in COPIED_OUT and sid in seen.constants:
        return None
    if name == "tolist":
        values = segments.values_of(seen, [t])
        if values is not None:
            if values and not t.is_cuda:  # else it is copied first, by an op
                segments.read(seen, values)
            return None
    told = errors.read_behind if name == "ctc_loss" else errors.memory_read
    refuse(seen, told(name, user_line(seen)))
    return None


def see_parallel(seen, name, module):
    """The forward of a module that spreads the work over processes: it does more than its ops."""
    line, why = user_line(seen), ranks.why_not(module, seen.driver == HOST, seen.saves)
    if why is not None:
        refuse(seen, errors.parallel_module(name, line, why))
        return
    seen.parallel.append((module, name, line, torch.is_grad_enabled() and module.require_backward_grad_sync))


def noted(seen, op, args, kwargs):
    """The op, to be compared with that of another run."""
    live_at = {(k, part) for k, part, _ in core.numbers_of_op()}
    operands = [told_operand(x, (k, NONE) in live_at or (k, 0) in live_at) for k, x in enumerate(args)]
    return NotedOp(str(op), user_line(seen), (*operands, *(f"{name}={told_operand(x, False)}" for name, x in kwargs.items())))


def told_operand(x, is_live):
    if is_live:
        return LIVE_NUMBER
    if isinstance(x, torch.Tensor):
        return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
    if type(x) in (list, tuple):
        return f"[{', '.join(told_operand(one, False) for one in x)}]"
    return str(x) if type(x) is not torch.Generator else "generator"


def see_op(seen, op, args, kwargs):
    """One op: exchange copied slots, run it, note what it read, made and wrote. None: one that a dispatch mode will see
    instead of us."""
    if op is None:
        refuse(seen, errors.mode_inside(user_line(seen)))
        return
    if seen.live is not None:
        live.watch(seen)
    if op.namespace == "profiler" or seen.inside:
        core.proceed(None)
        return
    if seen.ops is not None:
        seen.ops.append(noted(seen, op, args, kwargs))
    if seen.spent:
        spend(seen)
    if seen.saves and core.save_hooks() > 1:
        seen.hooked = True  # a checkpoint's, say, beside ours
    facts = facts_of(op)
    packet = facts.packet
    if packet in KEEPS_SEED:
        seen.seeds = True
    inputs = tensors_in(kwargs.values(), tensors_in(args, []))
    if seen.parallel:
        ranks.see_tensors(seen, inputs)
    if seen.driver == CUDA and not core.is_in_node():  # what a graph from outside saved may be another number each time
        for t in filter(core.is_lone, inputs):
            see_number(seen, t)
    if not asks_on(seen) and not seen.recording and seen.graph is None:  # nothing else is asked of this warm-up
        seen.devices.update(t.device for t in (*inputs, *core.proceed(None)))
        return
    if packet in INDEXES and not (packet in INDEX_PUT and segments.fills(*args)):
        args = segments.unmask(seen, args)
        inputs = tensors_in(kwargs.values(), tensors_in(args, []))
    if packet in ("lift_fresh", "lift_fresh_copy"):
        see_constant(seen, inputs[0])
        return
    if packet == "set_" and not seen.bodies and is_alias_made(seen, args, inputs):
        see_alias(seen, op)
        return
    written = [args[k] if k < len(args) else kwargs.get(name) for k, name in facts.writes]
    if packet in SILENT_WRITES and args[5]:  # training
        written += args[3:5]
    elif op.namespace == "fsdp" and op.name() == GATHERS:
        written.append(args[1])
    if op.namespace in COLLECTIVES:
        seen.exchanges, written = True, written + (inputs if op.namespace == "c10d" else [])
    written = tensors_in(written, [])
    if counters.see(seen, op, facts, args, kwargs, inputs):
        return
    if written and seen.live is not None:
        live.see_written(seen, written)
    numbers = live.note(seen, op, facts, args, kwargs, seen.driver == CUDA and is_hosts(kwargs, inputs)) if seen.live is not None else []
    constant = not numbers and constants.is_constant(seen, op, facts, inputs)
    counts = counters.passes(seen, facts, args, inputs, written)
    asks = (reads_here(seen, facts) or is_dynamic(facts, inputs) or is_to_host(inputs, kwargs)) and not (constant or counts)
    values = segments.values_of(seen, inputs) if asks and constants.is_pure(op, facts) else None
    tells = asks and values is None and segments.tells(seen, packet, inputs)
    constant = constant or values is not None or tells
    if asks and not constant and packet == "masked_select":
        values = segments.values_of(seen, inputs[1:])
    selects = asks and not constant and values is not None
    aside = is_aside(seen, op, facts, kwargs, inputs, written)
    apart_op = apart.is_one(seen, op, facts, inputs)
    if not counts:
        vet_op(seen, op, facts, args, kwargs, inputs, written, constant or selects, aside)
    if apart_op and not constant and not segments.may_end(seen):
        refuse(seen, host_reason(seen, errors.op_apart, op))
    if seen.bodies:
        forks.vet_op(seen, op, facts, kwargs, written)
    known = set()
    for t in inputs:
        sid = core.storage_id(t)
        known.add(sid)
        seen.devices.add(t.device)
        touch(seen, t, bool(seen.parallel) and fills(packet, args, kwargs, t))
    generator = kwargs.get("generator")
    if generator is not None:
        seen.generators[core.generator_id(generator)] = generator
    if written and (seen.until or seen.before is not None):
        segments.save(seen, written)
    for t in written:
        seen.written.add(core.storage_id(t))
    instead = seeds_on_host(op, args, kwargs) if packet in KEEPS_SEED and not seen.recording else None
    if facts.absolute and core.storage_id(inputs[0]) not in seen.made:
        seen.raw.add(core.storage_id(inputs[0]))
        if core.storage_id(inputs[0]) in seen.swaps:
            refuse(seen, errors.absolute(str(op), user_line(seen)))
    if seen.swaps:
        done = {}
        args = exchange(seen, args, done)
        kwargs = {k: exchange(seen, v, done) for k, v in kwargs.items()}
        instead = tensors_in(kwargs.values(), tensors_in(args, []))
    repeats, before = False, None
    movable = addresses.touched(seen, instead) if seen.movable and instead else ()
    if movable and not is_capture(seen):
        addresses.note(seen, op, movable)
        movable = ()
    for_real = is_capture(seen) and constant and (reads_here(seen, facts) or facts.dynamic or apart_op or is_to_host(inputs, kwargs))
    between = apart_op and not constant and seen.recording and seen.reason is None
    if is_capture(seen) and not for_real and brings_to_gpu(facts, kwargs, inputs):
        args, kwargs = (constants.on_device(seen, given) for given in (args, kwargs))
        instead = tensors_in(kwargs.values(), tensors_in(args, []))
    drawn = generator if generator is not None else torch.default_generator
    draws = facts.draws and drawn.device.type == "cpu"
    if draws:
        see_draw(seen, drawn, after=False)
    if tells:
        values = segments.outcome(seen, packet, args, inputs)
    if values:
        segments.read(seen, values)
    if selects and is_capture(seen):
        results = segments.select(seen, *inputs)
    elif for_real:
        results = constants.read(seen, inputs)
    elif between:
        results = apart.record(seen, op, args, kwargs)
    elif is_capture(seen) and packed.is_one(op, args, kwargs):
        results = packed.record(op, args, kwargs)
    else:
        before = core.graph_length() if (numbers or movable) and is_capture(seen) else 0
        moved = how_far(seen) if movable and facts.draws else None
        try:
            results = core.proceed(instead)
        except Exception as error:
            apart.learn(seen, op, facts, args, kwargs, written, error)
            raise
        end = core.graph_length() if movable else 0
        # Not what counts somewhere, a collective or a draw, whose op did: it would do so again.
        repeats = op.namespace in constants.KNOWN and (moved is None or how_far(seen) == moved)
    if op.namespace in COLLECTIVES:  # they may be handed out in one that waits when it is used
        results = [part for t in results for part in wrappers.plain_inside(t)]
    if numbers and is_capture(seen) and (before is None or not scalars.record(seen, op, args, kwargs, numbers, before)):
        live.pin_all(seen, numbers)
    if movable and repeats:
        told = {row: seen.live.steps[row].value for *_, row in numbers}
        addresses.record(seen, op, *(scalars.substitute(op, args, kwargs, numbers, told) if numbers else (args, kwargs)), before, end, movable)
    elif movable:
        addresses.stay(seen, movable)
    seen.draws, seen.random = seen.draws or draws, seen.random or facts.draws
    seen.acts = seen.acts or op.namespace not in constants.KNOWN or (facts.draws and generator is not None)
    if draws:
        see_draw(seen, drawn, after=True)
    if packet in DROPOUT:
        see_dropout(seen, packet, *(args[k] for k in DROPOUT[packet]))
    if generator is not None:
        vet_generator(seen, op, generator, [*results, *written])
    vet_kinds(seen, op, results)
    of_number = not inputs and is_view(op)  # C++ made a tensor of it, whose memory is not the recording's
    seen.keep.extend(map(core.alias, results if of_number else ()))
    fresh = [t for t in results if core.storage_id(t) not in known and not of_number]
    vet_effect(seen, op, fresh, written)
    forks.note_made(seen, fresh)
    ranks.note_pending(seen, op, inputs, fresh)
    line = user_line(seen) if fresh or (written and seen.recording) else ""
    if line and seen.recording:
        seen.trail.append((op, line))
    if fresh:
        strange = vet_gpus(seen, op, inputs, [t for t in fresh if t.is_cuda])
        if strange is not None:
            refuse(seen, strange)
        for t in fresh:
            note_memory(seen, t, line)
            seen.devices.add(t.device)
            if t.device.type == "cpu" and seen.driver == CUDA:
                seen.hosts[core.storage_id(t)] = core.storage_name(t)
                held = not facts.draws and all(is_guarded(seen, one) for one in inputs)
                # Seed and offset lie on the device in a capture.
                constant = constant or packet in KEEPS_SEED or (held and not aside)
    strange = blank.see(seen, facts, inputs, written, fresh) if is_host_recording(seen) else None
    if strange is not None:
        refuse(seen, strange)
    constants.note(seen, op, args, kwargs, constant, fresh, written, for_real)
    if aside:
        seen.drawn.update(map(core.storage_id, fresh))
    if (is_host_recording(seen) and not between) or (aside and fresh and is_capture(seen)):
        append(seen, op, args, kwargs, results, fresh, bool(written), numbers)
    if written and seen.swaps:
        mirror(seen, written)
    finite.note(seen, op, args, kwargs, inputs, fresh, written)


def see_dropout(seen, packet, dropout, train, buffer):
    """cuDNN's recurrent layers are handed its buffer of random state wherever the process has one, and read it if they drop."""
    if dropout and train and is_elsewhere(seen, buffer):
        refuse(seen, errors.spread_draws(packet, user_line(seen), buffer.device, name_of(seen.device)))
    elif not (dropout and train):
        if buffer is not None and seen.dropout is None:
            seen.touched.pop(core.storage_id(buffer), None)
            seen.passing.discard(core.storage_id(buffer))
    elif packet == "_cudnn_rnn":
        seen.acts, seen.dropout = True, core.alias(buffer)
        seen.keep.append(seen.dropout)


def vet_generator(seen, op, generator, drawn):
    """Refuse a draw on another GPU than that on which the words of this generator are, which kernels of the recording read."""
    rng = seen.rng.get(core.generator_id(generator))
    strange = next((t for t in drawn if t.device != rng.words.device), None) if rng is not None else None
    if strange is not None:
        refuse(seen, errors.spread_draws(str(op), user_line(seen), strange.device, name_of(seen.device)))


def hand_over_seed(op, args, kwargs):
    """An observer for the backward of a captured forward where nobody records it."""
    core.proceed(seeds_on_host(op, args, kwargs) if facts_of(op).packet in KEEPS_SEED else None)


def seeds_on_host(op, args, kwargs):
    """What `proceed` wants if a backward of attention runs outside of a capture with seed and offset of a forward that
    was captured: it would read them where they are not. None if they are where it expects them."""
    given = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
    wrong = [id(t) for t in map(given.get, SEED) if t is not None and t.is_cuda and t.dim() == 0 and not is_captured(t)]
    if not wrong:
        return None
    return [t.cpu() if id(t) in wrong else t for t in tensors_in(kwargs.values(), tensors_in(args, []))]


def see_region(seen, plain, region, inputs):
    """A region that inductor compiled: its kernels are in a CUDA capture but on no tape, and none of its
    ops is looked at. One op as a whole, which reads its inputs, writes some and makes the rest."""
    given = [t for t in inputs if isinstance(t, torch.Tensor)]
    written = [inputs[k] for k in region.mutated_input_idxs]
    vet_region(seen, region, inputs, given)
    seen.acts = True
    for t in given:
        seen.devices.add(t.device)
        if core.storage_id(t) not in seen.made and core.storage_id(t) not in seen.buffers:
            seen.touched.setdefault(core.storage_id(t), t)
    seen.written.update(map(core.storage_id, written))
    known = set(map(core.storage_id, given))
    if seen.swaps:
        inputs[:] = exchange(seen, inputs)
        known.update(core.storage_id(t) for t in inputs if isinstance(t, torch.Tensor))
    del given
    if seen.movable:
        addresses.stay(seen, addresses.touched(seen, tensors_in((inputs,), [])))
    seen.keep.append(region)  # it owns constants and kernels
    seen.inside = True
    try:
        results = plain(region, inputs)  # which empties the list
    finally:
        seen.inside = False
    line = user_line(seen)
    made = tensors_in((results,), [])
    for t in made:
        if core.storage_id(t) not in known:
            note_memory(seen, t, line)
            seen.devices.add(t.device)
    constants.forget(seen, [*made, *written])
    if seen.driver == CUDA and not all(t.is_cuda for t in made):
        refuse(seen, errors.compiled_on_host(line))
    seen.results.extend(map(weakref.ref, made))
    if written and seen.swaps:
        mirror(seen, written)
    return results


def vet_region(seen, region, inputs, given):
    """Refuse a compiled region that a replay could not repeat."""
    if seen.bodies:
        refuse(seen, errors.body_acts("a compiled region", user_line(seen)))
    devices = {t.device for t in given} | {torch.device(name) for name in region.device_types}
    if seen.driver != CUDA or "cpu" in {d.type for d in devices}:
        refuse(seen, errors.compiled_on_host(user_line(seen)))
    elif any(is_elsewhere(seen, t) for t in given):
        refuse(seen, errors.other_device("a compiled region", user_line(seen), given[0].device, name_of(seen.device)))
    elif region.fx_kwargs.get("cudagraphs") or any(isinstance(t, torch.Generator) for t in inputs):
        refuse(seen, errors.compiled_with_state(user_line(seen)))


def see_jiterated(seen, plain, code, name, by_reference, outputs, tensors, numbers):
    """A kernel of the user's own, which PyTorch launches without an op: it reads these tensors."""
    tensors = tuple(tensors)
    for t in tensors:
        seen.devices.add(t.device)
        touch(seen, t)
    given = exchange(seen, tensors) if seen.swaps else tensors
    if seen.movable:
        addresses.stay(seen, addresses.touched(seen, given))
    return plain(code, name, by_reference, outputs, given, numbers)


def see_compilation(seen):
    """torch.compile compiles: what it runs to that end must not end up in a recording."""
    if seen.recording:
        seen.again = True
        refuse(seen, errors.compiles(user_line(seen)))


def append(seen, op, args, kwargs, results, fresh, writes, numbers):
    """Put the op on the host's tape, unless it is a view. `numbers`: see live.note."""
    # A freed storage's address could come back.
    seen.memory.extend(map(core.alias, filter(core.is_plain, fresh)))
    if seen.reason is not None or facts_of(op).reshapes or not (fresh or writes or not results):
        return
    if fresh and len(fresh) != len(results):
        refuse(seen, errors.odd_op(str(op), user_line(seen)))
        return
    try:
        done = {}
        kwargs = {k: fix(seen, v, done) for k, v in kwargs.items()}
        tape.append(op, fix(seen, args, done), kwargs, fresh)
        for k, part, row in numbers:
            core.scalar(row, seen.live.steps[row].value, k, part)
    except Exception as error:  # an argument without a boxed form: the op ran, so go on eagerly
        refuse(seen, errors.untaped_op(str(op), user_line(seen), str(error)))


def mirror(seen, written):
    """A copied slot was written through its buffer: bring the user's memory up to date. Where that is done behind all else, only on the
    host, where code may look meanwhile."""
    for t, row in [(one, row) for one in written for row in copies_of(seen, one)]:
        sid, carries = core.storage_id(row.leaf), id(row.leaf) in seen.carries
        # What is written is known by its storage.
        (seen.carried if carries else seen.mirrored).update(id(one.leaf) for one in seen.swaps[sid])
        seen.written.add(sid)
        if carries and is_capture(seen):
            continue
        # An argument may lie in another one's copy, and have bytes there that are gaps of that one's.
        at = core.address(t) - (core.address(row.buffer) if core.storage_id(t) in seen.buffers else row.lo)
        whole = at >= 0 and at + span(t) <= row.hi - row.lo
        to, source = (core.view_like(base, t if whole else row.leaf, at if whole else 0) for base in (row.leaf, row.buffer))
        aten.copy_.default(to, source)
        if is_host_recording(seen) and not carries:
            tape.copy_into(fix(seen, to), source)
    if seen.shared:
        renew_shared(seen, written)


def copies_of(seen, t):
    """[Swap] of the copied slot in whose copy t lies, or of all that it may have to do with."""
    sid = core.storage_id(t)
    if sid in seen.buffers:
        return [seen.buffers[sid]]
    row = swap_of(seen, sid, core.address(t), core.address(t) + span(t)) if sid in seen.swaps else None
    return [row] if row is not None else seen.swaps.get(sid, [])


def renew_shared(seen, written):
    """Copies of what shares bytes with a tensor that was written, though no run before had done so. From the next recording on
    they are where they are."""
    for t in written:
        mine = copies_of(seen, t)
        lo, hi = (mine[0].lo, mine[0].hi) if mine else (core.address(t), core.address(t) + span(t))
        for row in seen.shared:
            if all(row is not one for one in mine) and row.lo < hi and lo < row.hi:
                fill(row.buffer, row.leaf)
                seen.again = True
                refuse(seen, errors.shared_and_written(user_line(seen)))


def see_constant(seen, t):
    """torch.tensor(...) of Python values: the values are guarded, the memory is new every time."""
    core.proceed(None)
    if is_capture(seen) and t.is_cuda and t.numel():
        (t,) = constants.renew(seen, [t])
    note_memory(seen, t, user_line(seen))
    forks.note_made(seen, [t])
    constants.add(seen, t)
    seen.devices.add(t.device)
    if is_host_recording(seen):
        value = t.clone()
        seen.memory.append(core.alias(t))
        seen.keep.append(value)
        tape.copy_into(t, value)


def see_number(seen, t):
    """One that C++ made of Python's numbers: TorchScript does so, and shows it to nobody. (A module of TorchScript, which could
    keep one, is none that is recorded.)"""
    sid = core.storage_id(t)
    if sid in seen.slots or sid in seen.hosts:
        return
    note_memory(seen, t, user_line(seen))
    seen.keep.append(core.alias(t))
    seen.hosts[sid] = core.storage_name(t)
    constants.add(seen, t)


def is_alias_made(seen, args, inputs):
    """Is this how C++ makes a tensor over a storage: set_ of an empty one that the call made? cuDNN's recurrent layers
    take their weights so. (A tape has no place for a storage.)"""
    return (
        seen.driver == CUDA and len(args) > 1 and len(inputs) == 1 and inputs[0].is_cuda and not inputs[0].numel()
        and core.storage_id(inputs[0]) in seen.made
    )  # fmt: skip


def see_alias(seen, op):
    """What set_ returns is another tensor over memory that may be from outside."""
    (t,) = core.proceed(None)
    sid = core.storage_id(t)
    if sid in seen.swaps:
        refuse(seen, errors.replaces_memory(str(op), user_line(seen)))
    else:
        touch(seen, t)


def is_aside(seen, op, facts, kwargs, inputs, written):
    """Is this an op of the host's in a function on the GPU that draws random numbers, or works on such? It runs for real
    while the function is recorded, and a replay runs it beside the graph."""
    if seen.driver != CUDA or seen.graph is not None or seen.bodies or written or op.namespace not in constants.KNOWN:
        return False
    if not is_hosts(kwargs, inputs):
        return False
    draws = facts.draws and kwargs.get("generator") is None
    mine = [t for t in inputs if core.storage_id(t) not in seen.drawn]
    fit = all(core.storage_id(t) in seen.constants or (not t.dim() and is_guarded(seen, t)) for t in mine)
    return fit and (draws or len(mine) < len(inputs))


def is_hosts(kwargs, inputs):
    """Has an op to do with the host alone?"""
    return not any(t.is_cuda for t in inputs) and torch.device(kwargs.get("device") or "cpu").type == "cpu"


def vet_op(seen, op, facts, args, kwargs, inputs, written, constant, aside):
    """Refuse what a replay could not repeat."""
    line = None
    if is_forward_ad():
        line = errors.forward_mode(user_line(seen))
    elif reads_here(seen, facts) and not constant:
        line = host_reason(seen, errors.host_read, op)
    elif is_dynamic(facts, inputs) and not constant:
        line = errors.dynamic_shape(str(op), user_line(seen))
    elif facts.packet in CASTS_INSIDE and seen.driver == HOST and core.casts_inside():
        line = errors.casts_inside(str(op), user_line(seen))
    elif facts.replaces:
        line = errors.replaces_memory(str(op), user_line(seen))
    elif facts.reshapes and core.storage_id(inputs[0]) not in seen.made:
        line = errors.changes_shape(str(op), user_line(seen))
    elif op.namespace in COLLECTIVES and (seen.driver == HOST or facts.packet in WAITS):
        line = errors.collective(str(op), user_line(seen), facts.packet in WAITS)
    elif not all(map(core.is_plain, inputs)):
        line = errors.layout(str(op), user_line(seen), odd_kind(inputs))
    elif (strange := vet_gpus(seen, op, inputs, inputs)) is not None:
        line = strange
    elif facts.packet == "_cudnn_init_dropout_state" and is_capture(seen):
        line = errors.cudnn_dropout()
    elif seen.driver == CUDA and not aside:
        line = vet_mixed(seen, op, facts, kwargs, inputs, written, constant)
    if line is not None:
        refuse(seen, line)


def fills(packet, args, kwargs, t):
    """Does the op write t without reading it?"""
    return kwargs.get("out") is t or (packet == "copy_" and args[0] is t)


def reads_here(seen, facts):
    """Does what an op does depend on values that the host sees, and is that not the tape's own affair?"""
    return facts.reads or (facts.checks and seen.driver == CUDA)


def is_dynamic(facts, inputs):
    """Does the shape of an op's result depend on values?"""
    if facts.packet in apart.KNOWN and any(t.is_cuda for t in inputs):
        return False
    return facts.dynamic and (
        facts.packet != "index" or any(t.dtype in (torch.bool, torch.uint8) for t in inputs[1:])
    )


def brings_to_gpu(facts, kwargs, inputs):
    """Does an op in a capture need memory of the host's on the GPU? A number is an argument of a kernel, mostly; where a mask says
    what it replaces, too (PyTorch fills then, and else counts the mask's elements); and what has to do with the host alone runs
    there and then."""
    moves = facts.moves and not (facts.packet in INDEX_PUT and any(t.dtype == torch.bool for t in inputs[1:-1]))
    return not is_hosts(kwargs, inputs) and any(t.dim() or moves for t in inputs if not t.is_cuda)


def vet_kinds(seen, op, results):
    """Refuse what no recording can hold."""
    if not all(map(core.is_plain, results)):
        refuse(seen, errors.layout(str(op), user_line(seen), odd_kind(results)))


def vet_effect(seen, op, fresh, written):
    """Refuse an op of somebody's that may have done anything: where PyTorch's own return nothing new it is a view, or they
    assert something. (NCCL's kernels are captured.)"""
    if not (fresh or written or op.namespace in constants.KNOWN or op.namespace in COLLECTIVES) and not is_view(op):
        refuse(seen, errors.unknown_effect(str(op), user_line(seen)))


@functools.cache
def is_view(op):
    """Does the op say that what it returns is its argument's memory?"""
    return any(r.alias_info is not None for r in op._schema.returns)


def odd_kind(tensors):
    """What the first of these tensors is that no recording can hold; None if there is none."""
    t = next((t for t in tensors if not core.is_plain(t)), None)
    if t is None:
        return None
    if type(t).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"a {type(t).__name__}, a tensor subclass"
    if t.is_nested or t.is_quantized:
        return "a nested tensor" if t.is_nested else "a quantized tensor"
    return "zeros of autograd's, without memory" if t._is_zerotensor() else f"a tensor of layout {t.layout}"


def host_reason(seen, sentence, op):
    """The sentence on an op that needs the host, or the one that tells an optimizer's user what helps."""
    line = user_line(seen)
    if not asks_on(seen):  # it is not told
        return sentence(str(op), line)
    return advice.step_reason(sys._getframe(1), line) or sentence(str(op), line)


def is_elsewhere(seen, t):
    """Is t on a device that this run does not record?"""
    if t.is_cuda:
        return t.device.index != seen.device or is_host_recording(seen)
    return t.device.type != "cpu"


def vet_gpus(seen, op, inputs, met):
    """A sentence if the run may not use one of `met`, because of its device; or None: a recording forks to the other GPUs that were met
    before. A backward would run in a thread for each GPU, where ops of several are seen at a time: those of this run run in this thread."""
    odd = next((t for t in met if is_elsewhere(seen, t)), None)
    if odd is None:
        return None
    told = str(op), user_line(seen), odd.device, name_of(seen.device)
    if not odd.is_cuda or is_host_recording(seen) or (seen.recording and odd.device.index not in seen.others):
        return errors.other_device(*told)
    if not core.is_in_node():
        torch.autograd.set_multithreading_enabled(False)  # until `run` is over
    outside = seen.graph is not None or (seen.saves and torch.is_grad_enabled() and any(t.requires_grad for t in inputs))
    return errors.spread_graph(*told) if outside or has_threads() else None


def vet_mixed(seen, op, facts, kwargs, inputs, written, constant):
    """CPU tensors in a function on the GPU: only numbers that are guarded or constant."""
    on_cpu = [t for t in inputs if not t.is_cuda and t.numel()]
    if facts.draws and is_hosts(kwargs, inputs):
        return host_reason(seen, errors.cpu_state, op)
    if not on_cpu:
        return host_reason(seen, errors.host_read, op) if is_to_host(inputs, kwargs) and not constant else None
    if facts.copies and len(on_cpu) < len(inputs) and on_cpu[0] is inputs[0]:
        return host_reason(seen, errors.host_read, op)
    for t in on_cpu:
        number = t.dim() == 0 and core.storage_id(t) not in seen.made
        if core.storage_id(t) not in seen.constants and not (number and (not facts.copies or is_guarded(seen, t))):
            return errors.cpu_tensor(str(op), user_line(seen), tuple(t.shape))
    external = any(not t.is_cuda and core.storage_id(t) not in seen.made for t in written)
    if external:
        return host_reason(seen, errors.cpu_state, op)
    return None


def is_guarded(seen, t):
    """Are this CPU tensor's bytes constant, or compared at each call? What an op reads while it is recorded must be; a
    warm-up does not know yet."""
    sid = core.storage_id(t)
    return sid in seen.constants or not t.numel() or (not t.is_cuda and (not seen.recording or sid in seen.slots))


def is_to_host(inputs, kwargs):
    """Does an op with these arguments copy from the GPU to the host?"""
    if kwargs.get("device") is None or torch.device(kwargs["device"]).type != "cpu":
        return False
    return any(t.is_cuda for t in inputs)


def is_spent(t, since):
    """Was t's autograd graph, as far as the call made it, used up by a backward inside the call? Its saved
    tensors are gone. Asks no hook for them: that of a checkpoint would compute them again."""
    try:
        return core.graphs_freed([t], since)
    except RuntimeError:  # of a Python function
        return True
