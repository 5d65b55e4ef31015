"""From what a run showed to a node's rows: slots, outputs, gradients, places.

Every function returns rows, or the sentence that says why there can be none, and changes nothing.
"""

import collections
import gc
import types

import cgt_core as core
import torch
from cgt_core import (
    AGAIN,
    APPENDS,
    BY_IDENTITY,
    BY_TYPE,
    BY_VALUE,
    COPIED,
    CUDA,
    DICT_LEN,
    EMPTY,
    FOLLOWS,
    FRESH,
    HOST,
    INPUT,
    IS_NUMBER,
    LIST_LEN,
    NONE,
    NOT_AT_ALL,
    PART,
    PINNED,
    PUTS,
    PUTS_TUPLE,
    READOUT,
    REBOUND,
    REQUIRES_GRAD,
    SETS_GRAD,
    SHARED,
    TENSOR,
    TWIN,
    UNUSED,
    VALUE,
    VIEW,
    WRAPPER,
    WRITES,
)

from . import (
    counters,
    errors,
    live,
    moving,
    places,
    pytree,
    readout,
    trace,
    views,
    wrappers,
)
from .data import Draft, EffectRow, GradRow, OutRow, SlotRow
from .observe import (
    NO_LINE,
    all_paths,
    all_tensors,
    collect,
    held,
    span,
    version_of,
)
from .private import creation_meta, gathered_in, is_gathered

DEFAULT_GENERATORS = (torch.default_generator, *torch.cuda.default_generators)
CODE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.CodeType, torch.Tensor)
CONSTANT_TYPES = (type(None), bool, int, float, complex, str, bytes, range, slice, type)


def rows(plan, seen, result, call):
    """Rows for slots, outputs, gradients; or the sentence that says why there can be none."""
    if seen.reason is not None:
        return seen.reason
    flat = plan.flat
    known = {core.generator_id(g) for g in (*DEFAULT_GENERATORS, *plan.generators)}
    if not known.issuperset(seen.generators):
        return errors.new_generator()
    again = pytree.matches_call(flat.program, call.args, call.kwargs)
    if again is None or any(a is not b for a, b in zip(again, flat.tensors, strict=True)):
        return errors.changed_arguments("the structure of an argument")
    try:
        out = flatten_result(seen, result)
    except errors.CgtError as error:
        return str(error)
    begun = begin_to_require(plan)
    if begun and seen.islands:  # a part that runs in between would meet it as it was
        return errors.changed_state(flat.paths[begun[0]] + ".requires_grad")
    slots, paths, writes = describe_slots(plan, seen)
    lost = next((paths[k] for k in seen.copies if is_lost(plan, slots[k])), None)
    if lost is not None:
        seen.again = True
        return errors.copied_and_written(lost)
    graph, tensors = plan.graph, [s.example for s in slots]
    if graph is not None:
        reason = vet_backward(graph, seen, tensors)
    elif seen.passing - {core.storage_id(t) for t in tensors}:
        reason = errors.outer_graph("a backward inside the call")
    else:
        reason = None
    reason = reason or vet_constants(out, plan)
    if reason is not None:
        return reason
    near = by_storage(slots)
    outs = describe_outs(plan, seen, out, slots, near)
    if isinstance(outs, str):
        return outs
    returned = {o.ref for o in outs if o.kind in (VIEW, INPUT) and slots[o.ref].leaf == NONE != slots[o.ref].owner}
    returned |= {k for k, s in enumerate(slots) if s.owner != NONE and is_used_inside(s.example, slots)}
    owners = {slots[k].owner for k in returned}
    for k in returned:  # a result is made from the gradient's Python object: it must be the very same
        slots[k] = slots[k]._replace(tensor=slots[k].example, owner=NONE)
    found = describe_grads(plan, seen, slots, near, outs, paths, owners)
    if isinstance(found, str):
        return found
    grads, sets, hidden = found
    advances = [row for row in plan.moving.values() if row is not None]
    outs += hidden
    puts = describe_puts(plan, seen, slots, paths, near, outs, out, result)
    if isinstance(puts, str):
        return puts
    return Draft(slots, paths, near, outs, [*writes, *sets, *advances, *puts], grads, out)


def is_used_inside(t, slots):
    """Is this made of others, of which some op met one?"""
    ones = set(map(id, wrappers.plain_inside(t))) - {id(t)}
    return bool(ones) and any(id(s.example) in ones and s.binding != UNUSED for s in slots)


def flatten_result(seen, result):
    """The result as a program and tensors."""
    return pytree.flatten_result(readout.marked(seen, result), lambda t: core.storage_id(t) in seen.made, seen.is_own)


def tensors_of(seen, result):
    """The tensors of a result, or none if it cannot be flattened, which is told elsewhere."""
    try:
        return flatten_result(seen, result).tensors
    except errors.CgtError:
        return ()


def is_lost(plan, slot):
    """Would a slot's copy be made of where it lies today, although it is no longer there at a later call? On the host a rescue gives a
    result of the path other memory; whatever else is pinned is where it was."""
    return slot.binding == PINNED and plan.driver == HOST and core.path_proto(plan.parent, slot.example) is not None


def describe_slots(plan, seen):
    """(a row per argument leaf, then one per reached tensor; their paths; which of them the run wrote)."""
    flat, reached, tensors = plan.flat, plan.reached, all_tensors(plan)
    slots, paths, writes, bumped, first_of = [], [], [], set(), {}
    at = collections.Counter(map(core.address, {id(t): t for t in tensors}.values()))
    copied, counted, begun = copied_with(plan, seen), counters.rows_of(seen), begin_to_require(plan)
    for k, t in enumerate(tensors):
        is_leaf = k < len(flat.tensors)
        sid = core.storage_id(t)
        owner = NONE if is_leaf else reached[k - len(flat.tensors)].owner
        touched = sid in seen.touched or sid in seen.written
        touched |= seen.strays and owner == NONE and (t.is_cuda or not t.dim())  # by a kernel that was not seen, perhaps
        version = version_of(t)
        bumps = version - plan.versions[k]
        if core.version_counter(t) in bumped:
            bumps = 0  # a view: it shares the counter that is already moved
        elif bumps:
            bumped.add(core.version_counter(t))
        if sid in seen.written or bumps:
            writes.append(EffectRow(WRITES, k, bumps))
        if not core.is_plain(t) or not touched and (k not in seen.copies or k in seen.bound):  # what is inside has slots of its own
            binding = UNUSED
        elif plan.driver == CUDA and not t.is_cuda:
            binding = PINNED if sid in counted else VALUE
        elif id(t) in copied and id(tensors[copied[id(t)]]) not in seen.mirrored and (sid not in seen.written or copied[id(t)] in seen.bound.union(seen.backs)):
            binding = TWIN if k != copied[id(t)] else REBOUND if k in seen.bound else COPIED
        else:
            binding = PINNED
        moves = binding in (COPIED, REBOUND)
        copy = seen.copies[k] if moves else copied[id(t)] if binding == TWIN else NONE
        back = copy if binding == REBOUND and sid in seen.written else seen.backs.get(k, NONE) if binding == COPIED else NONE
        # A gradient is found at the call, and nobody but its owner holds it.
        same, apart = NONE, False
        if is_leaf:
            path, leaf = flat.paths[k], k
            kept, owner = plan.also.get(id(t), (None, NONE)) if touched else (None, NONE)
            if touched and plan.graph is None:
                same = first_of.setdefault(id(t), k)
                same = NONE if same == k else same
                # At another call it could be what another slot is, and gradients would tell.
                apart = t.requires_grad and (moves or binding == TWIN or at[core.address(t)] > 1)
        else:
            path, _, owner, _ = reached[k - len(flat.tensors)]
            kept, leaf = t if owner == NONE else None, NONE
        beside = next((j for j in plan.beside.get(k, ()) if j < k and slots[j].binding in (COPIED, REBOUND)), NONE) if moves else NONE
        slots.append(SlotRow(leaf, kept, t, binding, copy, same, apart, owner, back, beside, k in begun))
        paths.append(path)
    return slots, paths, [e._replace(number=counted.get(core.storage_id(tensors[e.slot]), NONE)) for e in writes]


def begin_to_require(plan):
    """Slots of arguments that required no gradient, and do so when the run is over: another tensor each time,
    most likely. Not where a later backward goes through them."""
    if plan.saves or plan.graph is not None:
        return []
    mine = zip(plan.flat.tensors, plan.was, strict=False)
    return [k for k, (t, was) in enumerate(mine) if t.requires_grad and not was.requires_grad and t.is_leaf and core.is_plain(t) and k not in plan.grads]


def loose_in(plan, seen):
    """Aliases of memory that the run read, and neither argument nor place leads to."""
    drawn_from = [] if seen.dropout is None else [seen.dropout]  # guarded by itself
    known = {core.storage_id(t) for t in (*all_tensors(plan), *drawn_from)}.union(seen.buffers, seen.made)
    known.update(core.storage_id(t) for one in plan.sharded if not is_gathered(one) for t in gathered_in(one))  # it gathers these itself
    return [core.alias(t) for sid, t in seen.touched.items() if sid not in known]


def copied_with(plan, seen):
    """id of a tensor -> the slot from whose copy it is read: its own, or that of one at its address that it lies in."""
    tensors, copied = all_tensors(plan), {}
    for k in seen.copies:
        base = tensors[k]
        for t in plan.flat.tensors if plan.graph is not None else ():
            here = core.storage_id(t), core.address(t), t.dtype
            if here == (core.storage_id(base), core.address(base), base.dtype) and span(t) <= span(base):
                copied.setdefault(id(t), k)
    return copied | {id(tensors[k]): k for k in seen.copies}


def vet_backward(graph, seen, tensors):
    """A sentence if a recorded graph read a tensor that it was not given: another call's run would read
    the recorded call's."""
    known = {core.storage_id(t) for t in (*tensors, *graph.loose)}
    read = {sid for sid, t in seen.touched.items() if t.numel()}
    blind = seen.strays and seen.ran - {None}  # code that could hand a kernel, which is not seen, what it kept itself
    if known.union(graph.constants, seen.made, seen.buffers).issuperset(read) and not blind:
        return None
    return errors.backward_reads(NO_LINE)


def pending_in(seen, result, given=()):
    """The tensors of a result, each once, through which a later backward will go; but for those whose
    id is among `given`."""
    found = {id(t): t for t in tensors_of(seen, result) if id(t) not in given}
    return [t for t in found.values() if is_pending(seen, t)]


def is_pending(seen, t):
    """Does t require grad by a graph whose backward has not run inside the call?"""
    return t.requires_grad and t.grad_fn is not None and not trace.is_spent(t, seen.since)


def vet_constants(out, plan):
    """Static parts of the result must be what every replay may return again."""
    known = {id(obj) for _, obj in plan.flat.objects} | {id(p.want) for p in plan.places}
    for path, obj in out.objects:
        if id(obj) not in known and not is_constant(obj):
            return errors.strange_output(path, type(obj).__name__)
    return None


def is_constant(obj):
    """May every replay return it? A function with a closure, say, has what the recorded call made."""
    if isinstance(obj, types.FunctionType):
        return not (obj.__closure__ or obj.__defaults__ or obj.__kwdefaults__)
    return isinstance(obj, (*CONSTANT_TYPES, types.BuiltinFunctionType))


def by_storage(slots):
    """{storage: [(slot, its tensor, binding), ...]}"""
    near = {}
    for k, slot in enumerate(slots):
        near.setdefault(core.storage_id(slot.example), []).append((k, slot.example, slot.binding))
    return near


def slot_at(t, near):
    """(the slot in whose memory t lies, its tensor), or (NONE, None). Several arguments can be parts of one
    storage, and where a part that is copied lies at another call says nothing of the others."""
    lo = core.address(t)
    hi = lo + span(t)
    alike = near.get(core.storage_id(t), ())
    for k, base, _ in alike:
        start = core.address(base)
        if start <= lo and hi <= start + span(base):
            return k, base
    return next(((k, base) for k, base, binding in alike if binding == PINNED), (NONE, None))


def describe_outs(plan, seen, out, slots, near):
    """One row per tensor of the result."""
    by_id = {id(s.example): k for k, s in reversed(list(enumerate(slots)))}
    outs, first_of, seen_ids = [], {}, {}
    first = {id(t): k for k, t in reversed(list(enumerate(out.tensors)))}
    leaves = [obj for kind, _, obj in out.program if kind == TENSOR]
    for path, t, leaf in zip(out.paths, out.tensors, leaves, strict=True):
        ops = ops_of_part(seen, t, first)
        told = type(leaf) is pytree.Readout
        one = leaf if told else t
        if id(one) in seen_ids:
            row = OutRow(AGAIN, seen_ids[id(one)], ghost(t))
        elif id(t) in by_id:
            row = OutRow(INPUT, by_id[id(t)], ghost(t))
        elif told:
            row = OutRow(READOUT, NONE, t, line=leaf.line, ops=(leaf.make,))
        elif ops is not None:
            row = OutRow(PART, first[id(t._base)], ghost(t), ops=ops)
        else:
            row = describe_tensor(plan, seen, path, t, near, first_of, len(outs))
        if isinstance(row, str):
            return row
        seen_ids.setdefault(id(one), len(outs))
        outs.append(row)
    return in_order_of_birth(outs, out.tensors)


def in_order_of_birth(outs, tensors):
    """The rows, of which those that autograd makes again know their turn: gradients that meet are summed in the order in
    which the graph grew."""
    parts = [k for k, o in enumerate(outs) if o.kind == PART]
    parts.sort(key=lambda k: tensors[k].grad_fn._sequence_nr())
    turn = {k: n for n, k in enumerate(parts)}
    return [o._replace(version=turn[k]) if k in turn else o for k, o in enumerate(outs)]


def ops_of_part(seen, t, results):
    """What autograd makes this of one of these results by, whose view it is; or None."""
    if type(t) is not torch.Tensor or not t._is_view() or id(t._base) not in results:
        return None
    return views.ops_of(t, t._base) if is_pending(seen, t) and is_pending(seen, t._base) else None


def ghost(t):
    """t's metadata over memory that nobody owns: a row must not keep the user's memory alive."""
    return core.view_like(core.fixed(t), t, core.address(t) - core.storage_address(t))


def describe_tensor(plan, seen, path, t, near, first_of, index, grad_slot=NONE):
    """The row of one new tensor, or why it cannot be handed out."""
    if type(t) not in (torch.Tensor, torch.nn.Parameter) or t.layout != torch.strided:
        layout = "" if t.layout == torch.strided else f" of layout {t.layout}"
        return errors.strange_output(path, type(t).__name__ + layout)
    if t.requires_grad and t.grad_fn is None:
        return errors.made_leaf(path)
    root = is_pending(seen, t)
    if plan.driver == CUDA and not t.is_cuda:
        return errors.host_output(path)
    sid = core.storage_id(t)
    version = version_of(t)
    k, base = slot_at(t, near)
    if k == NONE and sid in seen.buffers:
        base, leaf = seen.buffers[sid][2:]
        k, _ = slot_at(leaf, near)
    if k != NONE or sid in seen.buffers:
        shift = core.address(t) - core.address(base)
        return errors.odd_root(path) if t.requires_grad else OutRow(VIEW, k, ghost(t), shift, creation_meta(t))
    if sid not in seen.made:
        return errors.unknown_output(path)
    first = first_of.setdefault(sid, index)
    kind, ref = (FRESH, NONE) if first == index else (SHARED, first)
    return OutRow(kind, ref, core.alias(t.detach()), 0, version, grad_slot, grad_slot != NONE, root, seen.made[sid])


def describe_grads(plan, seen, slots, near, outs, paths, identical):
    """(a row for each tensor that can have a gradient, those that the run replaced, hidden outputs): whether it had one
    is guarded, since the function may ask (a backward does not: there only gradients that it changes have rows). One
    that the run replaced becomes a hidden output; one that it read or added to has a slot of its own. Those of slots in
    `identical` must be the same tensors again."""
    first_of = {core.storage_id(o.proto): k for k, o in enumerate(outs) if o.kind == FRESH}
    grads, sets, hidden = [], [], []
    for k, before in [*plan.grads.items(), *((k, 0) for k in begin_to_require(plan))]:
        t = slots[k].example
        now, was = core.grad_id(t), before if k in identical else 0
        if slots[k].begins:
            sets.append(EffectRow(REQUIRES_GRAD, k))
        if now == before:
            if plan.graph is None or (now and touches(seen, t)):
                grads.append(GradRow(k, before == 0, was))
            continue
        grads.append(GradRow(k, before == 0, was))
        if now == 0:
            sets.append(EffectRow(SETS_GRAD, k))
            continue
        if any(core.storage_id(one) not in seen.made for one in wrappers.plain_inside(t.grad)):
            return errors.foreign_grad(paths[k])
        at = len(outs) + len(hidden)
        rows = describe_grad(plan, seen, paths[k] + ".grad", t.grad, near, first_of, at, k)
        if isinstance(rows, str):
            return rows
        hidden += rows
        sets.append(EffectRow(SETS_GRAD, k, out=at + len(rows) - 1))
    return grads, sets, hidden


def describe_grad(plan, seen, path, grad, near, first_of, index, grad_slot):
    """The rows of a new gradient, the last of which is itself; or why it cannot be handed out."""
    if not wrappers.is_one(grad):
        row = describe_tensor(plan, seen, path, grad, near, first_of, index, grad_slot)
        return row if isinstance(row, str) else [row]
    rows, parts = [], wrappers.inside(grad)
    for name, one in parts:
        row = describe_tensor(plan, seen, f"{path}.{name}", one, near, first_of, index + len(rows))
        if isinstance(row, str):
            return row
        if row.kind not in (FRESH, SHARED):
            return errors.strange_output(path, type(grad).__name__)
        rows.append(row._replace(hidden=True, inside=index + len(parts)))
    make = wrappers.maker(grad), tuple(range(index, index + len(parts))), wrappers.names(grad)
    return [*rows, OutRow(WRAPPER, index, ghost(parts[0][1]), 0, version_of(grad), grad_slot, True, ops=make)]


def describe_puts(plan, seen, slots, paths, near, outs, out, result):
    """A row for each thing that the run left in a place. What is not part of the result becomes a hidden output."""
    effects, by_id = [], {id(s.example): k for k, s in reversed(list(enumerate(slots)))}
    first_of = {core.storage_id(o.proto): k for k, o in enumerate(outs) if o.kind == FRESH}
    index = {id(t): k for k, t in reversed(list(enumerate(out.tensors)))}
    came = [(p, at, p.home[p.want :] if p.kind == LIST_LEN else [places.value_at(p)]) for p, at in ((put.place, at) for put, at in plan.puts)]
    shared = readout.shared_in([result, *(values for _, _, values in came)]) if seen.readouts else set()

    def why_not(place, t):
        """See to it that this tensor is an output, index[id(t)]; or a sentence."""
        if type(t) is not torch.Tensor or t.requires_grad:
            return errors.changed_state(place.path)
        if id(t) not in index:
            k = by_id.get(id(t), NONE)
            row = OutRow(INPUT, k, ghost(t), hidden=True) if k != NONE else describe_tensor(
                plan, seen, place.path, t, near, first_of, len(outs))  # fmt: skip
            if isinstance(row, str):
                return row
            index[id(t)] = len(outs)
            outs.append(row._replace(hidden=True))
        row = outs[index[id(t)]]
        if row.kind == VIEW:
            return errors.kept_argument(paths[row.ref])
        is_grad = row.kind == SHARED and outs[row.ref].grad_slot != NONE  # of which there is one tensor alone
        if row.kind not in (FRESH, SHARED, INPUT) or is_grad or (row.kind == INPUT and slots[row.ref].leaf == NONE):
            return errors.changed_state(place.path)
        return None

    for place, at, values in came:
        kind = APPENDS if place.kind == LIST_LEN else PUTS
        for j, value in enumerate(readout.marked(seen, values)):
            told = (value, value.make) if type(value) is pytree.Readout else None if plan.live else readout.pattern(value, is_fixed, shared)
            if told is not None:
                effects.append(EffectRow(kind, NONE, out=len(outs), place=at))
                outs.append(OutRow(READOUT, NONE, told[0].words, hidden=True, line=told[0].line, ops=told[1:]))
                continue
            if is_fixed(value):
                effects.append(EffectRow(kind, NONE, place=at, by=value, number=live.number_put(seen, place, j)))
                continue
            tensors = () if type(value) is tuple and at not in plan.follows else places.tensors_at(value)
            reason = next(filter(None, (why_not(place, t) for t in tensors)), None if tensors else errors.changed_state(place.path))
            if reason is not None:
                return reason
            which = tuple(index[id(t)] for t in tensors)
            effects.append(EffectRow(PUTS_TUPLE, NONE, place=at, by=which) if type(value) is tuple else EffectRow(kind, NONE, out=which[0], place=at))
    return effects


def is_fixed(value):
    """Is this the same wherever it is?"""
    if type(value) is tuple or type(value) is torch.Size:
        return all(map(is_fixed, tuple.__iter__(value)))
    return any(type(value) is kind for kind in (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device))


def touches(seen, t):
    """Did an op touch t's gradient?"""
    return core.storage_id(t.grad) in seen.touched


def memory_of(t):
    """What tells whether somebody gives t other memory. (A rescue by another thread moves the storage's.)"""
    offset = t.storage_offset() if t.layout == torch.strided else 0
    return core.storage_id(t), offset, t.shape


def find_moved(plan):
    """The path of a tensor to which the run gave other memory (`.data =`); or None."""
    return next((path for path, t, before in slots_before(plan) if memory_of(t) != before.memory), None)


def slots_before(plan):
    """(path, tensor, Was) of what the call was given or reached."""
    paths = all_paths(plan)
    return zip(paths, all_tensors(plan), plan.was, strict=True)


def vet_changes(plan, ran):
    """A sentence if the run left something else behind that a replay would not: other values in places
    that are guarded, another mode, another requires_grad. `ran`: the function's code."""
    place = places.find_changed(plan.places, is_guarded_as, {*plan.moving, *plan.free, *plan.stored})
    if place is not None:
        return errors.changed_state(place.path, moving.line_of(place, ran))
    changed = places.find_grown(plan.sizes)
    if changed is None:
        begun = {id(plan.flat.tensors[k]) for k in begin_to_require(plan)}
        changed = next((path for path, t, was in slots_before(plan) if t.requires_grad != was.requires_grad and id(t) not in begun), None)
        changed = changed and changed + ".requires_grad"
    if changed is None and core.ambient() != plan.ambient:
        changed = "a mode or setting of torch"
    return changed and errors.changed_state(changed)


def vet_escapes(plan, seen, draft):
    """A sentence if a tensor of the recording outlives the call without being an output: nobody would
    guard it, and a replay would change it under its holder's hands."""
    kept = find_kept_view(plan, seen, draft)
    if kept is not None:
        return errors.kept_argument(kept)
    known = {core.storage_id(o.proto) for o in draft.outs}
    known.update(core.storage_id(t) for t in draft.out.tensors)
    if draft.behind.graph is not None:
        known.update(draft.behind.graph.tokens)

    def escapes(t):
        sid = core.storage_id(t)
        # The same at each call; unless it came of a value, and another way has another one.
        number = plan.driver == CUDA and not t.is_cuda and sid in seen.constants and not seen.values
        return sid not in known and sid in seen.made and not number

    alive = find_alive(seen, escapes)
    states = [  # on the GPU a state of the CPU's generator is what it is
        token.state() for sid, token in seen.tokens.items()
        if sid not in known and (token.words or plan.driver != CUDA)
    ]  # fmt: skip
    alive += [state for state in states if state is not None]
    if not alive:
        return None
    old = find_replaced(plan.places, alive)
    if old is not None:
        return errors.place_changed(old)
    names = [
        p.path for p in plan.places
        if p.kind == places.DICT_ITEM and any(p.home.get(p.key) is t for t in alive)
    ]  # fmt: skip
    held_by = f", held by {names[0]}" if names else ""
    return errors.kept_tensor(seen.made.get(core.storage_id(alive[0]), "get_rng_state()"), held_by)


def vet_shared(plan, seen, result):
    """A sentence if somebody else holds a list or dict of the result that has to do with what the call made, or came to a place: it
    must stay the very one that the function returned. Asked before the result is taken apart."""
    ones = [p for p in plan.places if p.kind not in (DICT_LEN, LIST_LEN, EMPTY)]
    came = {id(places.value_at(p)) for p in ones if places.value_at(p) is not p.want}

    def is_made(leaf):
        return type(leaf) is pytree.Readout or (isinstance(leaf, torch.Tensor) and core.storage_id(leaf) in seen.made)

    for attempt in range(2):
        shared = pytree.find_shared(result, seen.is_own)
        made = next((leaf for one in shared for leaf in pytree.leaves_in(one) if is_made(leaf)), None)
        if made is None and not any(id(one) in came for one in shared):
            return None
        if attempt == 0:
            del shared, made
            collect()
    if isinstance(made, torch.Tensor):
        return errors.kept_tensor(seen.made[core.storage_id(made)], "")
    held = (p.path for p in ones if any(places.value_at(p) is one for one in shared))
    return errors.changed_state(next(held, "a list or dict of the result"))


def find_kept_view(plan, seen, draft):
    """The path of an argument of which somebody kept a view beside the result, or None: at another call it would be a
    view of the recorded call's."""
    flat = plan.flat
    bases = [t._base for t in draft.out.tensors if t._base is not None]  # autograd's, of what is a view
    known = {id(t) for t in (*all_tensors(plan), *draft.out.tensors, *bases)}
    path_of = {core.storage_id(t): path for path, t in zip(flat.paths, flat.tensors, strict=True)}
    for attempt in range(2):
        kept = [t for t in core.alive(seen.returned) if id(t) not in known and core.storage_id(t) in path_of]
        if not kept:
            return None
        if attempt == 0:
            del kept
            collect()
    return path_of[core.storage_id(kept[0])]


def find_replaced(found, tensors):
    """The path of an object that the run replaced and that leads to one of the tensors, or None. Then
    it is the place that holds it, not the user; and a recording for the old object would fit no call."""
    wanted = {id(t) for t in tensors}
    kinds = places.DICT_ITEM, places.CELL, places.LIST_ITEM
    old = [p for p in found if p.kind in kinds and places.value_at(p) is not p.want]
    return next((p.path for p in old if leads_to(p.want, wanted)), None)


def leads_to(thing, wanted):
    """Is one of the objects wanted, given by their ids, in here? Not through code, which leads everywhere."""
    todo, done = [thing], set()
    while todo:
        one = todo.pop()
        if id(one) in wanted:
            return True
        if id(one) not in done and not issubclass(type(one), CODE):
            done.add(id(one))
            todo.extend(gc.get_referents(one))
    return False


def vet_aliases(seen, draft):
    """A sentence if somebody kept a tensor of a result's memory beside the result, which is let go: a
    replay would change it under the holder's hands."""
    memory = {core.storage_id(o.proto) for o in draft.outs if o.kind in (FRESH, SHARED)}
    memory -= set(seen.tokens)  # a checkpoint holds it, and will be given another's
    alive = find_alive(seen, lambda t: core.storage_id(t) in memory)
    return errors.kept_tensor(seen.made[core.storage_id(alive[0])], "") if alive else None


def find_alive(seen, is_wanted):
    """Tensors that ops of the run returned and somebody still holds, of those wanted."""
    for attempt in range(2):
        alive = [t for t in held(seen) if t.numel() and is_wanted(t)]
        if alive and attempt == 0:
            del alive
            collect()
        else:
            break
    return alive


def used_slots(plan, draft):
    """Which slots get a row: arguments, since code may ask for a shape, a dtype, requires_grad of those that no op
    touches (a backward's does not); and what is reached, if it or its gradient was touched, returned or
    replaced, or a gradient flows to it."""
    used = {*draft.behind.flows, *(s.slot for s in draft.behind.saves), *(g.slot for g in draft.grads)}
    used |= {o.ref for o in draft.outs if o.kind in (VIEW, INPUT)}
    used |= {s.owner for s in draft.slots if s.binding != UNUSED}
    used.update(*plan.follows.values())
    met = plan.graph is None
    apart = {len(plan.flat.tensors) + k for k, one in enumerate(plan.reached) if one.inside}
    return [
        k for k, s in enumerate(draft.slots)
        if s.leaf != NONE or (met and s.owner == NONE and k not in apart) or s.binding != UNUSED or k in used
    ]  # fmt: skip


def group_places(found, moving, free, follows, numbers):
    """(Places by the dict that tells of them (the core skips a dict that did not change), the rest in
    one group that is compared at each call; the positions that they had.)"""
    groups, loose = {}, []
    for k, p in enumerate(found):
        number = p.want if p.kind in (places.DICT_LEN, places.LIST_LEN) else 0
        number = p.key if p.kind == places.LIST_ITEM else number
        present = p.want is not places.MISSING
        guard = BY_VALUE if is_plain(p.want) else BY_IDENTITY
        guard = IS_NUMBER if k in numbers else FOLLOWS if k in follows else NOT_AT_ALL if k in free else BY_TYPE if k in moving else guard
        want = None if k in follows else p.want  # the core has it from the slot
        slots = follows.get(k, [NONE])
        items = len(slots) if k in follows and type(p.want) is tuple else 0
        row = (p.kind, guard, p.home, p.key, want, present, number, numbers.get(k, slots[0]), items)
        teller = places.told_by(p)
        if teller is not None:
            groups.setdefault(id(teller), (teller, []))[1].append((row, k))
        else:
            loose.append((row, k))
    ordered = list(groups.values()) + ([(None, loose)] if loose else [])
    rows = [(teller, [r for r, _ in members]) for teller, members in ordered]
    return rows, [k for _, members in ordered for _, k in members]


def is_guarded_as(then, now):
    """Would a guard on the one accept the other?"""
    return then is now or (is_plain(then) and pytree.same_value(then, now))


def is_plain(value):
    """Compared by value in a place; anything else by identity."""
    return (
        isinstance(value, (bool, int, float, complex, str, bytes))
        or type(value) in pytree.PLAIN_TYPES
    )
