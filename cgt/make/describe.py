"""From what a run showed to a node's rows: slots, outputs, gradients, places.

Every function returns rows, or the sentence that says why there can be none, and changes nothing."""

import collections
import functools
import types
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

import cgt_core as core
import torch

from ..cuts import readout
from ..data import Call, Draft, EffectRow, GradRow, Graph, Kept, Made, OutRow, Plan, Seen, SlotRow, Was
from ..look import blinds, containers, places
from ..numbers import counters, live
from ..run import views
from ..run.observe import NO_LINE
from ..words import errors, pytree, wrappers
from ..words.private import creation_meta, gathered_in, is_gathered
from . import moving

MOVES = (core.COPIED, core.REBOUND)  # bindings of a slot that moves: its tensor may lie elsewhere at each call
DEFAULT_GENERATORS = (torch.default_generator, *torch.cuda.default_generators)
CONSTANT_TYPES = (type(None), bool, int, float, complex, str, bytes, range, slice, type)


def rows(plan: Plan, seen: Seen, result: object, call: Call) -> Draft | str:
    """Rows for slots, outputs, gradients; or the sentence that says why there can be none."""
    reason = vet_call(plan, seen, call) if seen.reason is None else seen.reason
    if reason is not None:
        return reason
    try:
        out = flatten_result(seen, result)
    except errors.CgtError as error:
        return str(error)
    begun = begin_to_require(plan)
    if begun and seen.cuts.islands:  # a part that runs in between would meet it as it was
        return errors.changed_state(plan.flat.paths[begun[0]] + ".requires_grad")
    slots, paths, writes = describe_slots(plan, seen)
    pinned = [k for k in seen.copied.copies if plan.driver == core.HOST and slots[k].binding == core.PINNED]
    # There a rescue gives a result of the path other memory: one that was pinned would be sought where it lay.
    lost = next((paths[k] for k in pinned if core.path_proto(plan.parent, slots[k].example) is not None), None)
    if lost is not None:
        seen.again = True
        return errors.copied_and_written(lost)
    reason = plan.graph and vet_backward(plan.graph, seen, [s.example for s in slots]) or vet_constants(out, plan)
    if reason is not None:
        return reason
    near = {}
    for k, slot in enumerate(slots):
        near.setdefault(core.storage_id(slot.example), []).append((k, slot.example, slot.binding))
    known = Outputs(plan, seen, slots, paths, near, [], first_of(s.example for s in slots), first_of(out.tensors), {})
    bases = describe_outs(known, out)
    if isinstance(bases, str):
        return bases
    held, owners = hold_gradients(slots, known.outs)
    owners |= {k for _, _, others in plan.also.values() for k, t in others if is_touched(seen, t, core.NONE)}
    found = describe_grads(known, owners)
    if isinstance(found, str):
        return found
    grads, sets = found
    advances = [row for row in plan.changes.moving.values() if row is not None]
    puts = describe_puts(known)
    if isinstance(puts, str):
        return puts
    return Draft(held, paths, near, known.outs, [*writes, *sets, *advances, *puts], grads, out, bases)


class Outputs(NamedTuple):
    """What tells how something that the run left comes to be an output."""

    plan: Plan
    seen: Seen
    slots: list  # as of Draft, like the next three
    paths: list
    near: dict
    outs: list  # those that there are so far: each is described when those before it are
    slot_of: dict  # id of a tensor -> its slot
    output_of: dict  # id of a tensor -> its output
    fresh: dict  # memory -> the output that is FRESH there


def first_of(tensors: Iterable[object]) -> dict[int, int]:
    """id of each -> where it comes first."""
    return {id(t): k for k, t in reversed(list(enumerate(tensors)))}


def vet_call(plan, seen, call):
    """A sentence if the run drew from a generator that nobody knew of, or changed the structure of its arguments."""
    known = {core.generator_id(g) for g in (*DEFAULT_GENERATORS, *plan.generators)}
    if not known.issuperset(seen.generators.given):
        return errors.new_generator()
    flat = plan.flat
    try:
        again = pytree.flatten_call(call.args, call.kwargs, *call.state.opts.static, dict(flat.numbers))
    except errors.CgtError:  # which cannot be compared
        return errors.changed_arguments("the structure of an argument")
    is_same = pytree.same_program(flat.program, again.program)
    if not (is_same and all(a is b for a, b in zip(again.tensors, flat.tensors, strict=True))):
        return errors.changed_arguments("the structure of an argument")
    # Any number fits where one may change: the run may have changed what lies in a container.
    both = zip(flat.numbers, again.numbers, strict=True)
    changed = next((path for (path, was), (_, now) in both if not pytree.same_value(was, now)), None)
    return errors.changed_arguments(changed) if changed is not None else None


def hold_gradients(slots, outs):
    """(the slots, of which gradients that come to the result have no owner any more; these owners): a result is made
    from the gradient's Python object, which must be the very same."""
    returned = {o.ref for o in outs if o.kind in (core.VIEW, core.INPUT)}
    returned = {k for k in returned if slots[k].leaf == core.NONE != slots[k].owner}
    returned |= {k for k, s in enumerate(slots) if s.owner != core.NONE and is_used_inside(s.example, slots)}
    held = [s._replace(tensor=s.example, owner=core.NONE) if k in returned else s for k, s in enumerate(slots)]
    return held, {slots[k].owner for k in returned}


def is_used_inside(t, slots):
    """Is this made of others, of which some op met one?"""
    ones = set(map(id, wrappers.plain_inside(t))) - {id(t)}
    return bool(ones) and any(id(s.example) in ones and s.binding != core.UNUSED for s in slots)


def flatten_result(seen, result):
    """The result as a program and tensors."""
    return pytree.flatten_result(readout.marked(seen, result), lambda t: core.storage_id(t) in seen.made, seen.is_own)


def tensors_of(seen: Seen, result: object) -> tuple[torch.Tensor, ...]:
    """The tensors of a result, or none if it cannot be flattened, which is told elsewhere."""
    try:
        return flatten_result(seen, result).tensors
    except errors.CgtError:
        return ()


class SlotFacts(NamedTuple):
    """What is known of all slots before the first of them has a row."""

    tensors: list  # the slots, as of Plan
    copied: dict  # as of copied_with
    counted: dict  # as of counters.rows_of
    begun: list  # as of begin_to_require
    first: dict  # id of an argument -> the first leaf that it is
    at: dict  # address -> how many tensors begin there


def describe_slots(plan, seen):
    """(a row per argument leaf, then one per reached tensor; their paths; which of them the run wrote)."""
    tensors, leaves, slots = plan.tensors, len(plan.flat.tensors), []
    there = {id(p.want) for p in plan.places}  # an argument that is in a place must be that very tensor
    facts = SlotFacts(
        tensors, copied_with(plan, seen), counters.rows_of(seen), begin_to_require(plan),
        first_of(plan.flat.tensors),
        collections.Counter(map(core.address, {id(t): t for t in tensors}.values())),
    )  # fmt: skip
    for k, t in enumerate(tensors):
        is_leaf = k < leaves
        owner = core.NONE if is_leaf else plan.reached[k - leaves].owner
        touched = is_touched(seen, t, owner)
        binding = binding_of(plan, seen, facts, k, touched)
        copy, back = copies_of(seen, facts, k, binding)
        if is_leaf:
            leaf, (kept, owner, _) = k, plan.also.get(id(t), (t if id(t) in there else None, core.NONE, ()))
            same, apart = identity_of(facts, k, binding) if plan.graph is None else (core.NONE, False)
        else:  # a gradient is found at the call, and nobody but its owner holds it
            leaf, kept, same, apart = core.NONE, t if owner == core.NONE else None, core.NONE, False
        sharing = [j for j in plan.beside.get(k, ()) if j < k and slots[j].binding in MOVES] if binding in MOVES else []
        beside = next(iter(sharing), core.NONE)
        whole = core.storage_id(t) in seen.copied.whole and t.storage_offset() == 0
        slots.append(SlotRow(leaf, kept, t, binding, copy, same, apart, owner, back, beside, k in facts.begun, whole))
    return slots, plan.paths, describe_writes(plan, seen, facts)


def is_touched(seen, t, owner):
    """Did an op read or write this memory, or could a kernel have done so that was not seen?"""
    sid = core.storage_id(t)
    strayed = seen.strays and owner == core.NONE and (t.is_cuda or not t.dim())
    return sid in seen.touched or sid in seen.written or strayed


def binding_of(plan, seen, facts, k, touched):
    """How the kth slot is bound."""
    t, sid = facts.tensors[k], core.storage_id(facts.tensors[k])
    if not core.is_plain(t):  # what is inside has slots of its own
        return core.UNUSED
    if not touched and (k not in seen.copied.copies or k in seen.copied.bound):
        return core.UNUSED
    source = facts.copied.get(id(t), core.NONE)
    if plan.driver == core.CUDA and not t.is_cuda and source == core.NONE:
        return core.PINNED if sid in facts.counted else core.VALUE if t.numel() else core.UNUSED
    if source == core.NONE or id(facts.tensors[source]) in seen.copied.mirrored:
        return core.PINNED
    has_way_back = source in seen.copied.bound or source in seen.copied.backs
    if sid in seen.written and not has_way_back:
        return core.PINNED
    if k != source:
        return core.TWIN
    return core.REBOUND if k in seen.copied.bound else core.COPIED


def copies_of(seen, facts, k, binding):
    """(`copy`, `back`) of the kth slot's row."""
    t = facts.tensors[k]
    if binding == core.TWIN:
        return facts.copied[id(t)], core.NONE
    if binding == core.COPIED:
        return seen.copied.copies[k], seen.copied.backs.get(k, core.NONE)
    if binding == core.REBOUND:
        return seen.copied.copies[k], seen.copied.copies[k] if core.storage_id(t) in seen.written else core.NONE
    return core.NONE, core.NONE


def identity_of(facts, k, binding):
    """(`same`, `apart`) of the row of an argument."""
    t = facts.tensors[k]
    first = facts.first[id(t)]
    # At another call it could be what another slot is, and gradients would tell.
    apart = t.requires_grad and (binding in (*MOVES, core.TWIN) or facts.at[core.address(t)] > 1)
    return core.NONE if first == k else first, apart


def describe_writes(plan, seen, facts):
    """A row for each slot that the run wrote: by how much its version moves, and which number is counted there."""
    writes, bumped = [], set()
    for k, t in enumerate(facts.tensors):
        sid, bumps = core.storage_id(t), core.version_of(t) - plan.was[k].version
        if core.version_counter(t) in bumped:
            bumps = 0  # a view: it shares the counter that is already moved
        elif bumps:
            bumped.add(core.version_counter(t))
        if sid in seen.written or bumps:
            writes.append(EffectRow(core.WRITES, k, bumps, number=facts.counted.get(sid, core.NONE)))
    return writes


def begin_to_require(plan):
    """Slots of arguments that required no gradient, and do so when the run is over: another tensor each time,
    most likely. Not where a later backward goes through them."""
    if plan.saves or plan.graph is not None:
        return []
    begun = [k for k, t in enumerate(plan.flat.tensors) if t.requires_grad and not plan.was[k].grads[0]]
    mine = [(k, plan.tensors[k]) for k in begun if k not in plan.grads]
    return [k for k, t in mine if t.is_leaf and core.is_plain(t)]


def loose_in(plan: Plan, seen: Seen) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """[(alias of memory that the run read, and neither argument nor place leads to, all of that if it is written)]."""
    mine = (*plan.tensors, *seen.generators.dropout)  # the latter is guarded by itself
    known = set(map(core.storage_id, mine)).union(seen.copied.buffers, seen.made)
    # It gathers these itself.
    known.update(core.storage_id(t) for _, one in plan.found.sharded if not is_gathered(one) for t in gathered_in(one))
    loose = [(sid, core.alias(t)) for sid, t in seen.touched.items() if sid not in known]
    return [(t, all_of(t) if sid in seen.written else None) for sid, t in loose]


def all_of(t):
    if not core.is_plain(t) or t._is_zerotensor():
        return t
    return t.as_strided((core.storage_bytes(t) // t.element_size(),), (1,), 0)


def copied_with(plan, seen):
    """id of a tensor -> the slot from whose copy it is read: its own, or that of one at its address that it lies in."""
    tensors, copied = plan.tensors, {}
    for k in seen.copied.copies:
        base = tensors[k]
        for t in plan.flat.tensors if plan.graph is not None else ():
            here = core.storage_id(t), core.address(t), t.dtype
            if here == (core.storage_id(base), core.address(base), base.dtype) and core.span(t) <= core.span(base):
                copied.setdefault(id(t), k)
    return copied | {id(tensors[k]): k for k in seen.copied.copies}


def vet_backward(graph: Graph, seen: Seen, tensors: list[torch.Tensor]) -> str | None:
    """A sentence if a recorded graph read a tensor it was not given: another run would read that very one."""
    known = {core.storage_id(t) for t in (*tensors, *graph.loose)}
    read = {sid for sid, t in seen.touched.items() if t.numel()}
    # Code that could hand a kernel, which no op shows, what it kept itself.
    blind = seen.strays and seen.code.ran - {None}
    if known.union(graph.constants, seen.made, seen.copied.buffers).issuperset(read) and not blind:
        return None
    return errors.backward_reads(NO_LINE)


def has_pending(seen: Seen, result: object) -> bool:
    """Will a later backward go through a tensor of the result?"""
    return any(is_pending(seen, t) for t in tensors_of(seen, result))


def is_pending(seen, t):
    """Does t require grad by a graph whose backward has not run inside the call? If one has, as far as the call made
    the graph, its saved tensors are gone. Asks no hook for them: that of a checkpoint would compute them again."""
    if not t.requires_grad or t.grad_fn is None:
        return False
    try:
        return not core.graphs_freed([t], seen.run.since)
    except RuntimeError:  # of a Python function
        return False


def vet_constants(out, plan):
    """Static parts of the result must be what every replay may return again."""
    known = {id(obj) for _, obj in plan.flat.objects}
    any_object = {*plan.follows, *plan.found.hidden, *plan.changes.free}  # these places are not guarded by identity
    known.update(id(p.want) for k, p in enumerate(plan.places) if k not in any_object)
    for path, obj in out.objects:
        if id(obj) not in known and not is_constant(obj):
            return errors.strange_output(path, type(obj).__name__)
    return None


def is_constant(obj: object) -> bool:
    """May every replay return it? A function with a closure, say, has what the recorded call made."""
    if isinstance(obj, types.FunctionType):
        return not (obj.__closure__ or obj.__defaults__ or obj.__kwdefaults__)
    return isinstance(obj, (*CONSTANT_TYPES, types.BuiltinFunctionType))


def slot_at(t: torch.Tensor, near: dict[int, list[tuple[int, torch.Tensor, int]]]) -> tuple[int, torch.Tensor | None]:
    """(the slot in whose memory t lies, its tensor), or (NONE, None). Several arguments can be parts of one
    storage, and where a part that is copied lies at another call says nothing of the others."""
    lo = core.address(t)
    hi = lo + core.span(t)
    alike = near.get(core.storage_id(t), ())
    for k, base, _ in alike:
        start = core.address(base)
        if start <= lo and hi <= start + core.span(base):
            return k, base
    return next(((k, base) for k, base, binding in alike if binding == core.PINNED), (core.NONE, None))


def describe_outs(known, out):
    """A row per tensor of the result, then hidden ones: {the latter's place: its tensor}; or a sentence."""
    seen, outs, by_id, first = known.seen, known.outs, known.slot_of, dict(known.output_of)
    results = [(path, t) for path, t in zip(out.paths, out.tensors, strict=True) if id(t) not in by_id]
    made = find_views(seen, results, known.near, known.slots)
    if isinstance(made, str):
        return made
    seen_ids = {}
    hidden = dict(enumerate((t for t in made.bases if id(t) not in first), len(out.tensors)))
    first |= {id(t): k for k, t in hidden.items()}
    ops = [first[id(t)] for t in made.bases], made.steps
    leaves = [obj for kind, _, obj in out.program if kind == core.TENSOR]
    paths = [*out.paths, *("what results are views of" for _ in hidden)]
    for path, t, leaf in zip(paths, (*out.tensors, *hidden.values()), (*leaves, *hidden.values()), strict=True):
        told = type(leaf) is pytree.Readout
        one = leaf if told else t
        if id(one) in seen_ids:
            row = OutRow(core.AGAIN, seen_ids[id(one)], ghost(t))
        elif id(t) in by_id:
            row = OutRow(core.INPUT, by_id[id(t)], ghost(t))
        elif told:
            row = OutRow(core.READOUT, leaf.row, t, line=leaf.line, ops=(leaf.make,))
        elif id(t) in made.numbers:
            row = OutRow(core.PART, made.numbers[id(t)], ghost(t), ops=ops)
        else:
            row = describe_tensor(known, path, t)
        if isinstance(row, str):
            return row
        seen_ids.setdefault(id(one), len(outs))
        outs.append(row._replace(hidden=True) if len(outs) in hidden else row)
    return hidden


def find_views(seen, results, near, slots):
    """What autograd makes again: views of arguments, of other results, of what several of them are views of; or why a
    replay could not. `results`: (path, tensor) of those that are no arguments. `near`, `slots`: as of Draft."""
    roots = {id(t): t for _, t in results if type(t) is torch.Tensor and is_pending(seen, t)}
    if not roots:
        return views.find([], [])
    given = {core.storage_id(t): near.get(core.storage_id(t), ()) for _, t in results}
    shared = {k: t for k, t in roots.items() if given[core.storage_id(t)]}
    slots = [slots[k] for rows in given.values() for k, *_ in rows] if shared else []
    bases = [s.example for s in slots if may_be_base(seen, s)]
    made = [t._base for k, t in roots.items() if t._base is not None and k not in shared]
    times = collections.Counter(map(id, made))
    several = {id(t): t for t in made if (times[id(t)] > 1 or id(t) in roots) and core.storage_id(t) in seen.made}
    bases += [t for t in several.values() if is_pending(seen, t)]
    found = views.find([t for k, t in roots.items() if k not in several], list({id(t): t for t in bases}.values()))
    rest = {id(t): t for t in (*roots.values(), *several.values()) if id(t) not in found.numbers}
    if not found.steps or (
        views.are_right(found, list(roots.values()))
        and not views.is_met(found, list(rest.values()), seen.run.since, roots)
    ):
        return found
    return errors.odd_root(next(path for path, t in results if id(t) in found.numbers))


def may_be_base(seen, slot):
    """May a replay make a view of this slot's tensor: does it require grad from the start, and is it not written?"""
    t = slot.example
    return t.requires_grad and not slot.begins and slot.owner == core.NONE and core.storage_id(t) not in seen.written


def ghost(t: torch.Tensor) -> torch.Tensor:
    """t's metadata over memory that nobody owns: a row must not keep the user's memory alive."""
    return core.view_like(core.fixed(t), t, core.address(t) - core.storage_address(t))


def describe_tensor(known, path, t, grad_slot=core.NONE):
    """The row of one new tensor, which will be the next output; or why it cannot be handed out."""
    seen, near = known.seen, known.near
    if type(t) not in (torch.Tensor, torch.nn.Parameter) or t.layout != torch.strided:
        layout = "" if t.layout == torch.strided else f" of layout {t.layout}"
        return errors.strange_output(path, type(t).__name__ + layout)
    if t.requires_grad and t.grad_fn is None:
        return errors.made_leaf(path)
    root = is_pending(seen, t)
    if known.plan.driver == core.CUDA and not t.is_cuda:
        return errors.host_output(path)
    sid = core.storage_id(t)
    version = core.version_of(t)
    k, base = slot_at(t, near)
    if k == core.NONE and sid in seen.copied.buffers:
        base, leaf = seen.copied.buffers[sid][2:]
        k, _ = slot_at(leaf, near)
    if k != core.NONE or sid in seen.copied.buffers:
        shift = core.address(t) - core.address(base)
        made = -1 - (core.version_counter(t) != core.version_counter(base))  # see out_view in the core
        made = creation_meta(t) if t._base is (base if base._base is None else base._base) else made
        return errors.odd_root(path) if t.requires_grad else OutRow(core.VIEW, k, ghost(t), shift, made)
    if sid not in seen.made:
        return errors.unknown_output(path)
    first = known.fresh.setdefault(sid, len(known.outs))
    kind, ref = (core.FRESH, core.NONE) if first == len(known.outs) else (core.SHARED, first)
    return OutRow(
        kind, ref, core.alias(t.detach()), 0, version, grad_slot, grad_slot != core.NONE, root, seen.made[sid]
    )


def describe_grads(known, identical):
    """(a row for each tensor that can have a gradient, those that the run replaced): whether it had one is guarded,
    since the function may ask (a backward does not: there only gradients that it changes have rows). One that the run
    replaced becomes a hidden output; one that it read or added to has a slot of its own. Those of slots in `identical`
    must be the same tensors again."""
    plan, grads, sets = known.plan, [], []
    for k, before in [*plan.grads.items(), *((k, 0) for k in begin_to_require(plan))]:
        t = known.slots[k].example
        now, was = core.grad_id(t), before if k in identical else 0
        if known.slots[k].begins:
            sets.append(EffectRow(core.REQUIRES_GRAD, k))
        if now != before or plan.graph is None or (now and core.storage_id(t.grad) in known.seen.touched):
            grads.append(GradRow(k, before == 0, was))
        if now == before:
            continue
        if now == 0:
            sets.append(EffectRow(core.SETS_GRAD, k))
            continue
        if any(core.storage_id(one) not in known.seen.made for one in wrappers.plain_inside(t.grad)):
            return errors.foreign_grad(known.paths[k])
        reason = describe_grad(known, known.paths[k] + ".grad", t.grad, k)
        if reason is not None:
            return reason
        sets.append(EffectRow(core.SETS_GRAD, k, out=len(known.outs) - 1))
    return grads, sets


def describe_grad(known, path, grad, grad_slot):
    """A new gradient becomes an output, the last by now; or a sentence on why it cannot."""
    outs, at = known.outs, len(known.outs)
    if not wrappers.is_one(grad):
        row = describe_tensor(known, path, grad, grad_slot)
        if isinstance(row, str):
            return row
        outs.append(row)
        return None
    parts = wrappers.inside(grad)
    for name, one in parts:
        row = describe_tensor(known, f"{path}.{name}", one)
        if isinstance(row, str):
            return row
        if row.kind not in (core.FRESH, core.SHARED):
            return errors.strange_output(path, type(grad).__name__)
        outs.append(row._replace(hidden=True, inside=at + len(parts)))
    make = wrappers.maker(grad), tuple(range(at, len(outs))), wrappers.names(grad)
    outs.append(OutRow(core.WRAPPER, at, ghost(parts[0][1]), 0, core.version_of(grad), grad_slot, True, ops=make))
    return None


def describe_puts(known):
    """A row for each thing that the run left in a place. What is not part of the result becomes a hidden output."""
    came = [(p.place, at, j, x) for p, at in known.plan.changes.puts for j, x in enumerate(came_to(p.place))]
    left, made = collections.Counter(id(value) for *_, value in came), {}
    effects = []
    for place, at, j, value in came:
        left[id(value)] -= 1
        row = describe_put(known, place, at, j, readout.marked(known.seen, value))
        if isinstance(row, str):
            return row
        if type(row.by) is Made and (left[id(value)] or id(value) in made):
            first, last = id(value) not in made, not left[id(value)]
            make = functools.partial(make_one, made.setdefault(id(value), []), row.by.make, first, last)
            row = row._replace(by=row.by._replace(make=make))
        effects.append(row)
    return effects


def make_one(box, make, first, last, parts):
    """What comes to several places is one: made for the first, and let go of behind the last."""
    if first:
        box[:] = [make(parts)]
    return box.pop() if last else box[-1]


def came_to(place: places.Place) -> list:
    """What the run left there."""
    return place.home[place.want :] if place.kind == core.LIST_LEN else [places.value_at(place)]


def describe_put(known, place, at, j, value):
    """The row of a value that came to a place, the jth of those appended if that is a list; or a sentence."""
    plan, seen = known.plan, known.seen
    kind = core.APPENDS if place.kind == core.LIST_LEN else core.PUTS
    rows = live.numbers_put(seen, place, j)
    if pytree.is_fixed(value) and rows.keys() <= {pytree.ROOT}:
        return EffectRow(kind, core.NONE, place=at, by=value, number=rows.get(pytree.ROOT, core.NONE))
    try:
        flat = pytree.flatten_put(value, lambda t: core.storage_id(t) in seen.made, rows)
    except errors.CgtError:
        return errors.changed_state(place.path)
    if vet_constants(flat, plan) is not None:
        return errors.changed_state(place.path)
    parts, tensors, program = [], iter(flat.tensors), []
    for op, path in zip(flat.program, flat.where, strict=True):
        if op[0] == pytree.LIVE:
            parts.append((core.NONE, rows[path]))
        elif op[0] == core.TENSOR:
            out = put_output(known, place, next(tensors), op[2], at in plan.follows)
            if isinstance(out, str):
                return out
            parts.append((out, core.NONE))
        program.append((core.TENSOR, 0, None) if op[0] == pytree.LIVE else op)
    if len(program) == len(parts) == 1:
        return EffectRow(kind, core.NONE, out=parts[0][0], place=at)
    plain = {core.TUPLE: tuple, core.LIST: list} if all(op[0] == core.TENSOR for op in program[1:]) else {}
    make = plain.get(program[0][0]) or pytree.maker(program)
    by = Made(make, parts, [number for _, number in flat.numbers])
    return EffectRow(kind, core.NONE, place=at, by=by, made=True)


def put_output(known, place, t, leaf, is_read):
    """The output that comes to a place: of a Readout, which is the leaf itself, or a tensor; or a sentence. Of a graph
    that is spent a replay has nothing left: the next call, if it reads the place, would miss it."""
    if type(leaf) is not pytree.Readout:
        reason = errors.changed_state(place.path) if is_read and t.requires_grad else make_output(known, place, t)
        return reason or known.output_of[id(t)]
    row = OutRow(core.READOUT, core.NONE, leaf.words, hidden=True, line=leaf.line, ops=(leaf.make,))
    known.outs.append(row)
    return len(known.outs) - 1


def make_output(known, place, t):
    """See to it that this tensor is an output, known.output_of[id(t)]; or a sentence."""
    outs, index = known.outs, known.output_of
    if type(t) is not torch.Tensor or is_pending(known.seen, t):
        return errors.changed_state(place.path)
    if id(t) not in index:
        k = known.slot_of.get(id(t), core.NONE)
        if k != core.NONE:
            row = OutRow(core.INPUT, k, ghost(t))
        else:
            row = describe_tensor(known, place.path, t)
        if isinstance(row, str):
            return row
        index[id(t)] = len(outs)
        outs.append(row._replace(hidden=True))
    row = outs[index[id(t)]]
    if row.kind == core.VIEW:
        return errors.kept_argument(known.paths[row.ref])
    is_grad = row.kind == core.SHARED and outs[row.ref].grad_slot != core.NONE  # of which there is one tensor alone
    is_grad |= row.kind == core.INPUT and known.slots[row.ref].owner != core.NONE
    if row.kind not in (core.FRESH, core.SHARED, core.INPUT) or is_grad:
        return errors.changed_state(place.path)
    return None


def memory_of(t: torch.Tensor) -> tuple[int, int | torch.SymInt, torch.Size]:
    """What tells whether somebody gives t other memory. (A rescue by another thread moves the storage's.)"""
    offset = t.storage_offset() if t.layout == torch.strided else 0
    return core.storage_id(t), offset, t.shape


def grads_of(t: torch.Tensor) -> tuple[object, ...]:
    """Does t require grad, and who hears of its gradients?"""
    return t.requires_grad, t.retains_grad, *(t._backward_hooks or ()), *(t._post_accumulate_grad_hooks or ())


def find_moved(plan: Plan) -> str | None:
    """The path of a tensor to which the run gave other memory (`.data =`); or None."""
    return next((path for path, t, before in slots_before(plan) if memory_of(t) != before.memory), None)


def slots_before(plan: Plan) -> Iterator[tuple[str, torch.Tensor, Was]]:
    """(path, tensor, Was) of what the call was given or reached."""
    return zip(plan.paths, plan.tensors, plan.was, strict=True)


def vet_changes(plan: Plan, ran: set[types.CodeType], exact: dict[str, str]) -> str | None:
    """A sentence if the run left something else behind that a replay would not: other values in places
    that are guarded, another mode, another requires_grad. `ran`: the function's code; `exact`: as of data.Numbers."""
    changes = plan.changes
    known = {*changes.moving, *changes.free, *changes.stored, *(at for _, at in changes.puts)}
    place = places.find_changed(plan.places, is_guarded_as, known)
    if place is not None:
        return why_for_one(place, ran, exact) or errors.changed_state(place.path, moving.line_of(place, ran))
    changed = places.find_grown(plan.found.sizes)
    if changed is None:
        begun = {id(plan.flat.tensors[k]) for k in begin_to_require(plan)}
        for path, t, was in slots_before(plan):
            if grads_of(t)[id(t) in begun :] != was.grads[id(t) in begun :]:
                changed = path + ".requires_grad, or a hook of it,"
    if changed is None and core.ambient() != plan.ambient:
        changed = "a mode or setting of torch"
    return changed and errors.changed_state(changed)


def why_for_one(place, ran, exact):
    """A sentence on why a recording is for the one number here; None: there is none, or no code that ran is why."""
    if not live.has_other_numbers(place):
        return None
    if place.path in exact:
        return errors.number_decides(place.path, exact[place.path])
    line = live.asker(ran)
    return line and errors.number_type(line, place.path)


def used_slots(plan: Plan, draft: Draft) -> list[int]:
    """Which slots get a row: arguments, since code may ask for a shape, a dtype, requires_grad of those that no op
    touches (a backward's does not); and what is reached, if it or its gradient was touched, returned or
    replaced, or a gradient flows to it."""
    used = {*draft.behind.flows, *(s.slot for s in draft.behind.saves), *(g.slot for g in draft.grads)}
    used |= {o.ref for o in draft.outs if o.kind in (core.VIEW, core.INPUT)}
    used |= {s.owner for s in draft.slots if s.binding != core.UNUSED}
    used.update(*(slots for slots, _ in plan.follows.values()))
    met = plan.graph is None
    apart = {len(plan.flat.tensors) + k for k, one in enumerate(plan.reached) if one.inside}
    for k, s in enumerate(draft.slots):
        if s.leaf != core.NONE or s.binding != core.UNUSED or (met and s.owner == core.NONE and k not in apart):
            used.add(k)
    return [k for k in range(len(draft.slots)) if k in used]


def group_places(
    plan: Plan, index: dict[int, int], lists: Collection[int]
) -> tuple[list[tuple[object, list[tuple]]], list[int]]:
    """(Places by the dict that tells of them (the core skips a dict that did not change), the rest in
    one group that is compared at each call; the positions that they had.) `index`: of slots in the node."""
    sources = [(row, s) for row, s in enumerate(plan.numbers.sources) if s.op == core.AT_PLACE]
    inside = {s.path: row for row, s in sources if s.part != core.NONE}
    numbers = {s.at: row for row, s in sources if s.part == core.NONE}
    tuples = {s.at: ((), containers.open_part(plan.places[s.at].want)) for _, s in sources if s.part != core.NONE}
    groups, loose, changes, follows = {}, [], plan.changes, tuples | plan.follows
    roles = numbers, follows, changes.free, changes.moving, lists
    kinds = [*zip((core.IS_NUMBER, core.FOLLOWS, core.NOT_AT_ALL, core.BY_TYPE, core.ANY_LIST), roles, strict=True)]
    for k, p in enumerate(plan.places):
        number = p.want if p.kind in (places.DICT_LEN, places.LIST_LEN) else 0
        number = p.key if p.kind == places.LIST_ITEM else number
        present = p.want is not places.MISSING
        guard = core.BY_VALUE if is_plain(p.want) else core.BY_IDENTITY
        guard = next((kind for kind, members in kinds if k in members), guard)
        slots, there = follows.get(k, ((), None))
        first = numbers.get(k, index[slots[0]] if slots else core.NONE)
        # The core has tensors from the slots.
        want = p.want if there is None else containers.with_rows(there.shape, p.path, inside)
        want = blinds.empty(type(want)) if k in plan.found.hidden else want  # the last call's is nobody's business
        row = (p.kind, p.home, p.key, guard, want, present, number, first, len(slots))
        # No dict tells of what is written to a list in it.
        teller = None if there is not None and there.changes else places.told_by(p)
        if teller is not None:
            groups.setdefault(id(teller), (teller, []))[1].append((row, k))
        else:
            loose.append((row, k))
    ordered = list(groups.values()) + ([(None, loose)] if loose else [])
    rows = [(teller, [r for r, _ in members]) for teller, members in ordered]
    return rows, [k for _, members in ordered for _, k in members]


WANT = 4  # in such a row: what the place held when the call was recorded


def rows_of(kept: Kept) -> list[tuple]:
    """Of a recording's places, in the order of their paths."""
    return [row for _, rows in kept.objects[1] for row in rows]


def is_guarded_as(then: object, now: object) -> bool:
    """Would a guard on the one accept the other?"""
    return then is now or (is_plain(then) and pytree.same_value(then, now))


def is_plain(value):
    """Compared by value in a place; anything else by identity."""
    return isinstance(value, (bool, int, float, complex, str, bytes)) or type(value) in pytree.PLAIN_TYPES
