"""Run the user's function once and note in a `Seen` what it does.

While it is warmed or recorded, an observer below autograd sees every ATen op (autograd's worker thread included) and
takes part in none (observe_shim.h); the few functions that read memory or random states behind the dispatcher's back
are tapped one by one (taps.py)."""

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import cgt_core as core
import torch
from cgt_core import CUDA, HOST

from ..cuts import readout, segments
from ..data import Leaves, Seen
from ..look import impure, returns
from ..numbers import addresses, counters, live
from ..run import blank, constants, observe, taps
from ..run.devices import name_of, one_thread
from ..run.tokens import see_draw, see_get_state, see_set_state
from ..words import errors, wrappers
from ..words.private import OpOverload
from . import lengths, moving
from .facts import KEEPS_SEED, facts_of, is_elsewhere, seeds_on_host
from .ops import mirror, see_op
from .optional import collectives, forks

COPIED_OUT = ("tolist", "__repr__")  # readers that keep nothing of the memory


class Saved:
    """What autograd holds instead of a tensor that it saved, while a differentiable call is recorded:
    the tensor, until the recording is complete; then which argument of the backward it lies in. It changes there, since
    autograd keeps this very object."""

    __slots__ = ("tensor", "version", "leaves", "at", "like", "shift", "__weakref__")


def owned():
    one = object()
    return sys.getrefcount(one)


OWNED = owned()  # references to what a local variable alone holds: the question's may be counted, or borrowed


def run(seen: Seen, function: Callable[..., object], args: tuple, kwargs: dict) -> object:
    """Run the function under observation; its result."""
    reachable = seen.run.plan.generators if seen.run.recording else ()
    for generator in (torch.default_generator, *reachable):
        if generator.device.type == "cpu":
            see_draw(seen, generator, after=True)
    observer, higher_order = functools.partial(see_op, seen), functools.partial(see_higher_order, seen)
    is_mine = lambda: core.observer() is observer  # noqa: E731
    packed = functools.partial(pack, seen.autograd.saved, seen.alive.results)
    transformed = lambda: observe.refuse(seen, errors.transforms(observe.user_line(seen)))  # noqa: E731
    handovers: list = []  # code of the run's that gives work to threads, or waits for them
    regions, saw_regions = taps.tap_regions(
        is_mine, functools.partial(see_region, seen), functools.partial(see_compilation, seen)
    )
    brackets = [
        taps.tap_readers(is_mine, functools.partial(see_reader, seen, function, args)),
        taps.tap_states(is_mine, functools.partial(see_get_state, seen), functools.partial(see_set_state, seen)),
        taps.tap_higher_order(is_mine, higher_order),
        *taps.tap_parallel(is_mine, functools.partial(see_parallel, seen)),
        taps.tap_compiled(is_mine, higher_order),
        (lambda: None, functools.partial(constants.close, seen)),
        taps.SWAPS.to(is_mine, functools.partial(see_swap, seen)),
        taps.HASHES.to(is_mine, functools.partial(see_hash, seen)),
        taps.tap_rates(functools.partial(see_rates, seen)) if seen.run.plan is not None else taps.NOTHING,
        taps.SCALED.to(is_mine, functools.partial(see_scaled, seen)),
        (lambda: None, functools.partial(readout.close, seen)),
        taps.tap_forks(lambda: is_mine() or forks.is_imagined(seen), functools.partial(forks.see_fork, seen)),
        taps.tap_kernels(),
        taps.PACKED.to(is_mine, functools.partial(lengths.see_packed, seen)),
        taps.JITERATED.to(is_mine, functools.partial(see_jiterated, seen)),
        taps.tap_sharding(is_mine),
        *regions,
        *(taps.tap_saves(packed, unpack, is_mine, transformed) if seen.run.saves else ()),
        tap_histories(seen, is_mine),
        impure.tap(seen, is_mine),
        live.tap(seen, is_mine),
        moving.lay_blinds(seen),
        one_thread(seen.run.others),
        (lambda: None, lambda: seen.joins and torch.autograd.set_multithreading_enabled(True)),
        taps.tap_threads(functools.partial(hear, seen, handovers)),  # the last is the first to end
    ]
    counters.begin(seen)
    before = observe.references(seen)
    called = functools.partial(given, seen, observer, function, args, kwargs)
    result = live.close(seen, [core.within(brackets, called)])  # a caller's stack may hold what it passes
    seen.is_own = sys.getrefcount(result) <= OWNED
    if handovers:  # no recording has what the other thread did, and a number of ours was none there
        sentence = errors.op_elsewhere(seen.elsewhere)
        observe.refuse(seen, sentence)
        if seen.live is not None:
            live.leave(seen, sentence)
    seen.code.imported.update(impure.imported(seen.code.started))
    seen.code.ran.update(impure.code_of_function(seen.code.started, seen.code.imported))
    seen.asks_which |= impure.asks_ids(seen.code.ran)
    if seen.run.saves:
        if before != observe.references(seen):
            observe.collect()
        seen.autograd.kept.extend(now - then for then, now in zip(before, observe.references(seen), strict=True))
    if seen.run.recording and not saw_regions():
        observe.refuse(seen, errors.compiles("the function"))
    if seen.reason is None:
        see_draw(seen, torch.default_generator, after=False)
        if any(rng.at is not rng.words for rng in seen.generators.words.values()):
            observe.refuse(seen, errors.reseeded(observe.user_line(seen)))
    return result


def tap_histories(seen, is_mine):
    """A bracket: inside, no backward of the run's goes on through what led to the slots' tensors, which is another one
    each time. Other threads may run theirs."""
    tensors = seen.run.plan.tensors if seen.run.recording and seen.run.graph is None else ()
    nodes, handles = {t.grad_fn for t in tensors} - {None}, []

    def pass_on(_):
        if is_mine():
            observe.refuse(seen, errors.outer_graph("a backward inside the call"))

    return lambda: handles.extend(n.register_prehook(pass_on) for n in nodes), lambda: [one.remove() for one in handles]


def see_swap(seen, plain, owner, name, tensors, kwargs):
    """Two tensors change places, of which nobody may hold a weak reference. No recording knows which is which then."""
    observe.refuse(seen, errors.swapped(observe.user_line(seen)))
    core.forget_results(seen.run.returned)
    seen.alive.results.clear()
    plain(*tensors, **kwargs)


def see_rates(seen, home):
    """The rates of a scheduler with these attributes are read. They are no look at what the last call left, if this one
    made them."""
    plan = seen.run.plan
    guarded = any(p.home is home and p.key == taps.RATES for p in plan.places)
    kept = [put.place for put in plan.found.kept if put.place.home is home and put.place.key == taps.RATES]
    if not (guarded or any(p.want is not home[taps.RATES] for p in kept)):
        seen.code.looked.add(moving.RATES)


def see_scaled(seen, plain, owner, name, args, kwargs):
    """An op that is given a tensor for a number, which C++ would ask for the number itself."""
    for key in kwargs.keys() & {"alpha", "value"}:
        t, to = kwargs[key], next(iter(args[0]), None) if type(args[0]) in (list, tuple) else args[0]
        if not seen.inside and type(t) is torch.Tensor and not (t.requires_grad or t.dim()):
            number = counters.ask(seen, "item", t)
            if number is None and isinstance(to, torch.Tensor) and t.is_cuda == to.is_cuda:
                number = segments.read_number(seen, t)
            kwargs = kwargs if number is None else kwargs | {key: number}
    return plain(*args, **kwargs)


def see_hash(seen, plain, owner, name, args, kwargs):
    """It is asked which tensor one is, past its values, as of a key."""
    seen.code.hashed.add(id(args[0]))
    return plain(*args)


def hear(seen, handovers, op):
    """A thread ran this op meanwhile that nobody sees. Did this run give work to one, or wait for one? Asked before the
    code of other threads counts as its own (tap_calls): they give each other work, too."""
    seen.elsewhere = op.replace("::", ".")
    handovers.extend(taps.HANDOVERS & seen.code.started)


def given(seen, observer, function, args, kwargs):
    """Call the function, which is observed, with what is to stand for its arguments."""
    result = core.observed(seen.run.returned, observer, function, *live.arguments(seen, args, kwargs))
    if seen.ranks.pending and observe.is_capture(seen):
        collectives.wait_pending(seen)
    return result


def see_lift(begins: int) -> None:
    """torch.tensor brings Python's numbers to their device. A capture would copy them from memory of the host's that is
    gone when it is replayed: they are brought for real."""
    seen = observe.seen_here()
    if begins and seen is not None and observe.is_capture(seen) and not seen.inside:
        begin, end = constants.elsewhere(seen)
        seen.constants.lifted[:] = [end]  # an interrupt between the two does no harm
        begin()
    elif not begins and seen is not None and seen.constants.lifted:
        seen.constants.lifted[0]()
        seen.constants.lifted.clear()


def pack(packed, results, t):
    """What autograd keeps of a tensor that it saves. Not the tensor: a result would hold its own graph. The
    graph holds this hook: it must not lead to `seen`, and with it to the call's arguments."""
    saved = Saved()
    saved.tensor = core.view_like(t, t, 0) if core.is_plain(t) else t.detach()
    saved.version = core.version_of(t if core.is_plain(t) else saved.tensor)  # whose counter may be another one
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
            leaves.late.add(saved.at)
            if leaves.tensors[saved.at].is_cuda:  # nothing has run yet
                raise observe.Unrecordable(errors.late_read())
        elif saved.at in leaves.left:
            was_read(leaves, saved.at, id(saved))
        return core.view_like(leaves.tensors[saved.at], saved.like, saved.shift)
    if not saved.tensor.is_inference() and saved.tensor._version != saved.version:
        raise RuntimeError(errors.modified(tuple(saved.tensor.shape), saved.tensor._version, saved.version))
    return saved.tensor


def begin_leaves(leaves: Leaves, tensors: Iterable[Any], changed: Iterable[int], spent: Iterable[int]) -> None:
    """A backward begins, with its graph's lock: others may be at one until then. `spent`: arguments that die."""
    end_leaves(leaves)
    leaves.tensors.extend(tensors)
    leaves.changed.update(changed)
    for at in spent:
        leaves.left[at] = set(leaves.readers.get(at, ()))
        was_read(leaves, at)


def end_leaves(leaves: Leaves) -> None:
    for of_a_run in (leaves.tensors, leaves.left, leaves.read, leaves.gone, leaves.changed):
        of_a_run.clear()


def was_read(leaves, at, reader=None):
    """A reader of that argument came, if it has any left."""
    leaves.left[at].discard(reader)
    if not leaves.left[at]:
        leaves.read.add(at)


def see_higher_order(seen, op):
    """What it runs is no op of a tape's."""
    if not seen.inside:
        observe.refuse(seen, errors.higher_order_op(op.name(), observe.user_line(seen)))


def see_reader(seen, function, args, name, t, arguments):
    """A method that reads memory: fatal on the host, where nobody could replay the reader. What it is to return, where
    that is not its own affair."""
    if seen.inside or wrappers.is_one(t):  # what is inside is read by an op
        return None
    blank.vet_read(seen, t)
    number = counters.ask(seen, name, t)
    if number is not None:
        return number
    if name == "__index__":  # of a list, say: the op that asks could not tell that from an index of a tensor
        if values := segments.values_of(seen, [t]):  # not known yet, and it may be read
            segments.read(seen, values)
        return None
    # On a stream of the function's own the bytes would leave before they are computed.
    beside = observe.is_capture(seen) and torch.cuda.current_stream(seen.run.device) not in forks.STREAMS.values()
    answer = None if beside else readout.note(seen, name, t, arguments, given.__code__, function, args)
    if answer is None and name == "item" and not beside:
        answer = segments.read_number(seen, t, returns.is_index(observe.asker()))
    if answer is not None or name in readout.OPS:
        return answer
    sid = core.storage_id(t)
    if seen.run.driver == CUDA and t.is_cuda and name in ("data_ptr", "untyped_storage"):
        # A kernel outside the dispatcher may read or write there: the address must stay.
        seen.raw.add(sid)
        constants.forget(seen, [t])
        if sid not in seen.made:
            seen.touched.setdefault(sid, t)
            seen.written.add(sid)
            if sid in seen.copied.swaps:
                observe.refuse(seen, errors.memory_read(name, observe.user_line(seen)))
        return None
    if name in COPIED_OUT and sid in seen.constants.memory:
        return None
    if name == "tolist":
        values = segments.values_of(seen, [t])
        if values is not None:
            if values and not t.is_cuda:  # else it is copied first, by an op
                segments.read(seen, values)
            return None
    told = errors.read_behind if name == "ctc_loss" else errors.memory_read
    observe.refuse(seen, told(name, observe.user_line(seen)))
    return None


def see_parallel(seen, name, module):
    """The forward of a module that spreads the work over processes: it does more than its ops."""
    line, why = observe.user_line(seen), collectives.why_not(module, seen.run.driver == HOST, seen.run.saves)
    if why is not None:
        observe.refuse(seen, errors.parallel_module(name, line, why))
        return
    seen.ranks.parallel.append((module, name, line, torch.is_grad_enabled() and module.require_backward_grad_sync))


def hand_over_seed(op: OpOverload, args: tuple, kwargs: dict) -> None:
    """An observer for the backward of a captured forward where nobody records it."""
    core.proceed(seeds_on_host(op, args, kwargs) if facts_of(op).packet in KEEPS_SEED else None)


def see_region(seen, plain, region, inputs):
    """A region that inductor compiled: its kernels are in a CUDA capture but on no tape, and none of its
    ops is looked at. One op as a whole, which reads its inputs, writes some and makes the rest."""
    given = [t for t in inputs if isinstance(t, torch.Tensor)]
    written = [inputs[k] for k in region.mutated_input_idxs]
    vet_region(seen, region, inputs, given)
    seen.acts = True
    for t in given:
        seen.devices.add(t.device)
        if core.storage_id(t) not in seen.made and core.storage_id(t) not in seen.copied.buffers:
            seen.touched.setdefault(core.storage_id(t), t)
    seen.written.update(map(core.storage_id, written))
    known = set(map(core.storage_id, given))
    if seen.copied.swaps:
        inputs[:] = observe.exchange(seen, inputs)
        known.update(core.storage_id(t) for t in inputs if isinstance(t, torch.Tensor))
    del given
    if seen.copied.movable:
        addresses.stay(seen, addresses.touched(seen, observe.tensors_in((inputs,), [])))
    seen.alive.objects.append(region)  # it owns constants and kernels
    seen.inside = True
    try:
        results = plain(region, inputs)  # which empties the list
    finally:
        seen.inside = False
    line = observe.user_line(seen)
    made = observe.tensors_in((results,), [])
    for t in made:
        if core.storage_id(t) not in known:
            observe.note_memory(seen, t, line)
            seen.devices.add(t.device)
    constants.forget(seen, [*made, *written])
    if seen.run.driver == CUDA and not all(t.is_cuda for t in made):
        observe.refuse(seen, errors.compiled_on_host(line))
    seen.alive.results.extend(map(weakref.ref, made))
    if written and seen.copied.swaps:
        mirror(seen, written)
    return results


def vet_region(seen, region, inputs, given):
    if seen.cuts.bodies:
        observe.refuse(seen, errors.body_acts("a compiled region", observe.user_line(seen)))
    devices = {t.device for t in given} | {torch.device(name) for name in region.device_types}
    if seen.run.driver != CUDA or "cpu" in {d.type for d in devices}:
        observe.refuse(seen, errors.compiled_on_host(observe.user_line(seen)))
    elif any(is_elsewhere(seen, t) for t in given):
        home, line = name_of(seen.run.device), observe.user_line(seen)
        observe.refuse(seen, errors.other_device("a compiled region", line, given[0].device, home))
    elif region.fx_kwargs.get("cudagraphs") or any(isinstance(t, torch.Generator) for t in inputs):
        observe.refuse(seen, errors.compiled_with_state(observe.user_line(seen)))


def see_jiterated(seen, plain, owner, name, args, kwargs):
    """A kernel of the user's own, which PyTorch launches without an op: it reads these tensors."""
    *launch, tensors, numbers = args
    tensors = tuple(tensors)
    for t in tensors:
        seen.devices.add(t.device)
        observe.touch(seen, t)
    given = observe.exchange(seen, tensors) if seen.copied.swaps else tensors
    if seen.copied.movable:
        addresses.stay(seen, addresses.touched(seen, given))
    return plain(*launch, given, numbers)


def see_compilation(seen):
    """torch.compile compiles: what it runs to that end must not end up in a recording."""
    if seen.run.recording:
        seen.again = True
        observe.refuse(seen, errors.compiles(observe.user_line(seen)))
