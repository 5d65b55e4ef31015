"""From what a run showed (trace.py) to a node's rows: slots, outputs, gradients, places.

Every function returns rows as plain tuples, or the sentence that says why there can be none.
"""

import collections
import gc
import types
import weakref

import cgt_core as core
import torch
from cgt_core import AGAIN, COPIED, FRESH, INPUT, NONE, PINNED, SHARED, TWIN, UNUSED, VALUE, VIEW

from . import errors, places, pytree, trace
from .trace import CUDA

DEFAULT_GENERATORS = (torch.default_generator, *torch.cuda.default_generators)
CODE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.CodeType, torch.Tensor)
CONSTANT_TYPES = (type(None), bool, int, float, complex, str, bytes, range, slice, type)


def all_tensors(flat, reached):
    """Slots in order: every argument leaf, then every reached tensor."""
    return [*flat.tensors, *(t for _, t, _ in reached)]


def rows(rec, seen, result, args, kwargs):
    """Rows for slots, outputs, gradients; or the sentence that says why there can be none."""
    if seen["reason"] is not None:
        return seen["reason"]
    flat = rec["flat"]
    known = {core.generator_id(g) for g in (*DEFAULT_GENERATORS, *rec["generators"])}
    if not known.issuperset(seen["generators"]):
        return errors.new_generator()
    again = pytree.matches_call(flat.program, args, kwargs)
    if again is None or any(a is not b for a, b in zip(again, flat.tensors, strict=True)):
        return errors.changed_arguments("an argument")
    try:
        out = pytree.flatten(result, "result")
    except errors.CgtError as error:
        return str(error)
    slots, paths = describe_slots(rec, seen)
    graph, tensors = rec["graph"], [s[2] for s in slots]
    if graph is not None:
        reason = vet_backward(graph, seen, tensors)
    elif seen["passing"] - {core.storage_id(t) for t in tensors}:
        reason = errors.outer_graph("a backward inside the call")
    else:
        reason = None
    if reason is not None:
        return reason
    reason = vet_constants(out, rec)
    if reason is not None:
        return reason
    near = by_storage(slots)
    outs = describe_outs(rec, seen, out, slots, near)
    if isinstance(outs, str):
        return outs
    returned = {o[1] for o in outs if o[0] in (VIEW, INPUT) and slots[o[1]][0] == NONE != slots[o[1]][-1]}
    owners = {slots[k][-1] for k in returned}
    for k in returned:  # a result is made from the gradient's Python object: it must be the very same
        slots[k] = (NONE, slots[k][2], *slots[k][2:-1], NONE)
    grads = describe_grads(rec, seen, slots, near, outs, paths, owners)
    if isinstance(grads, str):
        return grads
    return {"slots": slots, "paths": paths, "near": near, "outs": outs, "grads": grads, "out": out}


def settle(rec, seen, row):
    """Make the recording's memory the pool's; the row with the seconds that recording took, or the
    sentence that says why there can be no node."""
    outs = [o[2] for o in row["outs"] if o[0] == FRESH]
    if rec["driver"] == CUDA:
        # A result may be a view of a copied argument's buffer, which is then still allocated.
        buffers = [buffer for _, _, buffer, _ in seen["buffers"].values()]
        outs.extend(buffer for buffer in buffers if core.storage_address(buffer))  # not let go of
    try:
        core.checkpoint(seen["memory"], outs)
    except core.DriverError as error:
        return errors.recording_failed(error.args[1], "")
    seen["memory"].clear()
    return row | {"seconds": core.record_seconds()}


def describe_slots(rec, seen):
    """One row per argument leaf, then one per reached tensor that the run touched."""
    flat, reached = rec["flat"], rec["reached"]
    slots, paths, bumped, first_of = [], [], set(), {}
    at = collections.Counter(map(core.address, {id(t): t for t in all_tensors(flat, reached)}.values()))
    copied = {id(flat.tensors[k]): k for k in rec["copies"]}
    for k, t in enumerate(all_tensors(flat, reached)):
        is_leaf = k < len(flat.tensors)
        sid = core.storage_id(t)
        touched = sid in seen["touched"] or sid in seen["written"]
        written = sid in seen["written"]
        version = 0 if t.is_inference() else t._version
        bumps = version - rec["versions"][k]
        if bumps and (sid, version) in bumped:
            bumps = 0  # a view: it shares the counter that is already moved
        bumped.add((sid, version))
        if not touched:
            binding = UNUSED
        elif rec["driver"] == CUDA and not t.is_cuda:
            binding = VALUE
        elif id(t) in copied and id(t) not in seen["mirrored"]:
            binding = COPIED if k == copied[id(t)] else TWIN
        else:
            binding = PINNED
        copy = {COPIED: rec["copies"].get(k), TWIN: copied.get(id(t))}.get(binding, NONE)
        # A gradient is found at the call, and nobody but its owner holds it.
        same, apart = NONE, False
        if is_leaf:
            path, leaf = flat.paths[k], k
            kept, owner = rec["also"].get(id(t), (None, NONE)) if touched else (None, NONE)
            if touched and rec["graph"] is None:
                same = first_of.setdefault(id(t), k)
                same = NONE if same == k else same
                # At another call it could be what another slot is, and gradients would tell.
                apart = t.requires_grad and (binding in (COPIED, TWIN) or at[core.address(t)] > 1)
        else:
            path, _, owner = reached[k - len(flat.tensors)]
            kept, leaf = t if owner == NONE else None, NONE
        slots.append((leaf, kept, t, binding, written, bumps, copy, same, apart, owner))
        paths.append(path)
    return slots, paths


def vet_backward(graph, seen, tensors):
    """A sentence if a recorded graph read a tensor that it was not given: another call's run would read
    the recorded call's."""
    known = {core.storage_id(t) for t in (*tensors, *graph["loose"])}
    read = {sid for sid, t in seen["touched"].items() if t.numel()}
    if known.union(seen["made"], seen["buffers"]).issuperset(read):
        graph["proven"] = True
        return None
    return errors.backward_reads("the backward pass")


def pending_in(seen, result, given=()):
    """The tensors of a result, each once, through which a later backward will go; but for those whose
    id is among `given`."""
    try:
        tensors = pytree.flatten(result, "result").tensors
    except errors.CgtError:
        return []  # told by `rows`
    found = {id(t): t for t in tensors if id(t) not in given}
    return [t for t in found.values() if is_pending(seen, t)]


def is_pending(seen, t):
    """Does t require grad by a graph whose backward has not run inside the call?"""
    return t.requires_grad and t.grad_fn is not None and not trace.is_spent(t, seen["since"])


def vet_constants(out, rec):
    """Static parts of the result must be what every replay may return again."""
    known = {id(obj) for _, obj in rec["flat"].objects} | {id(p.want) for p in rec["places"]}
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
        near.setdefault(core.storage_id(slot[2]), []).append((k, slot[2], slot[3]))
    return near


def slot_at(t, near):
    """(the slot in whose memory t lies, its tensor), or (NONE, None). Several arguments can be parts of one
    storage, and where a part that is copied lies at another call says nothing of the others."""
    lo = core.address(t)
    hi = lo + trace.span(t)
    alike = near.get(core.storage_id(t), ())
    for k, base, _ in alike:
        start = core.address(base)
        if start <= lo and hi <= start + trace.span(base):
            return k, base
    return next(((k, base) for k, base, binding in alike if binding == PINNED), (NONE, None))


def describe_outs(rec, seen, out, slots, near):
    """One row per tensor of the result."""
    by_id = {id(s[2]): k for k, s in reversed(list(enumerate(slots)))}
    outs, first_of, seen_ids = [], {}, {}
    for path, t in zip(out.paths, out.tensors, strict=True):
        if id(t) in seen_ids:
            outs.append((AGAIN, seen_ids[id(t)], ghost(t), 0, 0, NONE, False, False, ""))
            continue
        seen_ids[id(t)] = len(outs)
        if id(t) in by_id:
            outs.append((INPUT, by_id[id(t)], ghost(t), 0, 0, NONE, False, False, ""))
            continue
        row = describe_tensor(rec, seen, path, t, near, first_of, len(outs))
        if isinstance(row, str):
            return row
        outs.append(row)
    return outs


def ghost(t):
    """t's metadata over memory that nobody owns: a row must not keep the user's memory alive."""
    return core.view_like(core.fixed(t), t, core.address(t) - core.storage_address(t))


def describe_tensor(rec, seen, path, t, near, first_of, index, grad_slot=NONE):
    """The row of one new tensor, or why it cannot be handed out."""
    if type(t) not in (torch.Tensor, torch.nn.Parameter) or t.layout != torch.strided:
        layout = "" if t.layout == torch.strided else f" of layout {t.layout}"
        return errors.strange_output(path, type(t).__name__ + layout)
    if t.requires_grad and t.grad_fn is None:
        return errors.made_leaf(path)
    root = is_pending(seen, t)
    if rec["driver"] == CUDA and not t.is_cuda:
        return errors.host_output(path)
    sid = core.storage_id(t)
    version = 0 if t.is_inference() else t._version
    k, base = slot_at(t, near)
    if k != NONE:
        shift = core.address(t) - core.address(base)
        return errors.odd_root(path) if t.requires_grad else (VIEW, k, ghost(t), shift, 0, NONE, False, False, "")
    if sid in seen["buffers"]:
        lo, _, buffer, leaf = seen["buffers"][sid]
        k, _ = slot_at(leaf, near)
        shift = core.address(t) - core.address(buffer)
        return errors.odd_root(path) if t.requires_grad else (VIEW, k, ghost(t), shift, 0, NONE, False, False, "")
    if sid not in seen["made"]:
        return errors.unknown_output(path)
    line, proto = seen["made"][sid], core.twin(t.detach())
    if sid in first_of:
        return (SHARED, first_of[sid], proto, 0, version, grad_slot, grad_slot != NONE, root, line)
    first_of[sid] = index
    return (FRESH, NONE, proto, 0, version, grad_slot, grad_slot != NONE, root, line)


def describe_grads(rec, seen, slots, near, outs, paths, identical):
    """A row for each tensor that can have a gradient: whether it had one is guarded, since the function
    may ask (a backward does not: there only gradients that it changes have rows). One that the run
    replaced becomes a hidden output; one that it read or added to has a slot of its own. Those of slots in
    `identical` must be the same tensors again."""
    first_of = {core.storage_id(o[2]): k for k, o in enumerate(outs) if o[0] == FRESH}
    grads = []
    for k, before in rec["grads"].items():
        t = slots[k][2]
        now = core.grad_id(t)
        if now == before:
            if rec["graph"] is not None and not (now and touches(seen, t)):
                continue
            grads.append((k, before == 0, True, NONE, before if k in identical else 0))
            continue
        if now == 0:
            grads.append((k, False, False, NONE, before if k in identical else 0))
            continue
        if core.storage_id(t.grad) not in seen["made"]:
            return errors.foreign_grad(paths[k])
        row = describe_tensor(rec, seen, paths[k] + ".grad", t.grad, near, first_of, len(outs), k)
        if isinstance(row, str):
            return row
        outs.append(row)
        grads.append((k, before == 0, False, len(outs) - 1, before if k in identical else 0))
    return grads


def touches(seen, t):
    """Did an op touch t's gradient?"""
    return core.storage_id(t.grad) in seen["touched"]


def memory_of(t):
    """What tells whether somebody gives t other memory. (A rescue by another thread moves the storage's.)"""
    offset = t.storage_offset() if t.layout == torch.strided else 0
    return core.storage_id(t), offset, t.shape


def find_moved(rec):
    """The path of a tensor to which the run gave other memory (`.data =`); or None."""
    return next((path for path, t, before in slots_before(rec) if memory_of(t) != before[0]), None)


def slots_before(rec):
    """(path, tensor, (memory_of, requires_grad) before the run) of what the call was given or reached."""
    paths = [*rec["flat"].paths, *(path for path, *_ in rec["reached"])]
    return zip(paths, all_tensors(rec["flat"], rec["reached"]), rec["before_run"], strict=True)


def put_back(rec):
    """Give such tensors their memory again. An error where nothing holds it (dispatch.alias_of): what the
    tensor has now was never computed."""
    for path, t, before in slots_before(rec):
        if memory_of(t) == before[0]:
            continue
        if before[2] is None:
            raise errors.CgtError(errors.replaced(path))
        t.data = before[2]


def describe_changes(state, rec, seen):
    """A sentence if the run left something else behind that a replay would not: other values in places
    that are guarded, another mode, another requires_grad."""
    changed = places.find_changed(rec["places"], is_guarded_as) or places.find_grown(rec["sizes"])
    if changed is None:
        changed = next((path for path, t, was in slots_before(rec) if t.requires_grad != was[1]), None)
        changed = changed and changed + ".requires_grad"
    if changed is None and core.ambient() != rec["ambient"]:
        changed = "a mode or setting of torch"
    if changed is None:
        return None
    seen["escaped"] = True
    state["escapes"] += 1
    return errors.changed_state(changed)


def describe_escapes(state, rec, seen, row):
    """A sentence if a tensor of the recording outlives the call without being an output: nobody would
    guard it, and a replay would change it under its holder's hands."""
    kept = find_kept_view(rec, seen, row)
    if kept is not None:
        seen["escaped"] = True
        state["escapes"] += 1
        return errors.kept_argument(kept)
    known = {core.storage_id(o[2]) for o in row["outs"]}
    known.update(core.storage_id(t) for t in row["out"].tensors)
    if rec["driver"] == CUDA:
        known.update(seen["constants"])  # numbers on the host, the same at each call
    if row["graph"] is not None:
        known.update(row["graph"]["tokens"])
    alive = find_alive(seen, lambda sid: sid not in known and sid in seen["made"])
    states = {  # on the GPU a state of the CPU's generator is what it is
        sid: ref() for sid, (ref, _, _, words) in seen["tokens"].items()
        if sid not in known and (words or rec["driver"] != CUDA)
    }  # fmt: skip
    alive += [state for state in states.values() if state is not None]
    if not alive:
        return None
    seen["escaped"] = alive
    state["escapes"] += 1
    old = find_replaced(rec["places"], alive)
    if old is not None:
        return errors.place_changed(old)
    names = [
        p.path for p in rec["places"]
        if p.kind == places.DICT_ITEM and any(p.holder.get(p.key) is t for t in alive)
    ]  # fmt: skip
    holder = f", held by {names[0]}" if names else ""
    return errors.kept_tensor(seen["made"].get(core.storage_id(alive[0]), "get_rng_state()"), holder)


def find_kept_view(rec, seen, row):
    """The path of an argument of which somebody kept a view beside the result, or None: at another call it would be a
    view of the recorded call's."""
    flat = rec["flat"]
    known = {id(t) for t in (*all_tensors(flat, rec["reached"]), *row["out"].tensors)}
    path_of = {core.storage_id(t): path for path, t in zip(flat.paths, flat.tensors, strict=True)}
    for attempt in range(2):
        kept = [t for t in core.alive(seen["returned"]) if id(t) not in known and core.storage_id(t) in path_of]
        if not kept:
            return None
        if attempt == 0:
            del kept
            gc.collect()  # cycles are not holders
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


def part_result(row):
    """Let go of the call's result, whose memory becomes the recording's: a replay hands out tensors of
    its own. Returns what restore_result makes it from again."""
    outs, slots, out = row["outs"], row["slots"], row["out"]
    given = []
    for k, (kind, ref, proto, *_) in enumerate(outs[: len(out.tensors)]):
        given.append(
            proto if kind in (FRESH, SHARED) else given[ref] if kind == AGAIN
            else slots[ref][2] if kind == INPUT else out.tensors[k]
        )  # fmt: skip
    for saved, *_ in row["saved"]:
        saved.tensor = None
    row["out"] = out._replace(tensors=())
    grads = [(slots[k][2], outs[o][2]) for k, _, _, o, _ in row["grads"] if o != NONE]
    for owner, _ in grads:
        owner.grad = None  # the replay of this very call sets it
    return out.program, given, grads, row["saved"], row["roots"]


def restore_result(seen, program, given, grads, saved, roots):
    """The call's result after all, over the memory in which it was made."""
    for k, root in enumerate(roots):
        given[root] = core.view_like(given[root], given[root], 0)
        core.sinks_result(seen["sinks"], k, given[root])
    for one, base, like, shift in saved:
        one.tensor = core.view_like(base, like, shift)
        one.version = one.tensor._version
        seen["results"].append(weakref.ref(one.tensor))
    for owner, proto in grads:
        owner.grad = proto
    seen["results"].extend(weakref.ref(t) for t in (*given, *(proto for _, proto in grads)))
    return pytree.unflatten(program, given)


def find_alias(state, seen, row):
    """A sentence if somebody kept a tensor of a result's memory beside the result, which is let go: a
    replay would change it under the holder's hands."""
    memory = {core.storage_id(o[2]) for o in row["outs"] if o[0] in (FRESH, SHARED)}
    memory -= set(seen["tokens"])  # a checkpoint holds it, and will be given another's
    seen["escaped"] = find_alive(seen, lambda sid: sid in memory)
    if not seen["escaped"]:
        del seen["escaped"]
        return None
    state["escapes"] += 1
    return errors.kept_tensor(seen["made"][core.storage_id(seen["escaped"][0])], "")


def find_alive(seen, is_wanted):
    """Tensors that ops of the run returned and somebody still holds, of the storages wanted."""
    for attempt in range(2):
        alive = [t for t in trace.held(seen) if t.numel() and is_wanted(core.storage_id(t))]
        if alive and attempt == 0:
            del alive
            gc.collect()  # cycles are not holders
        else:
            break
    return alive


def needs_row(k, slot, row):
    """Does a reached tensor need a slot: was it, or its gradient, touched, returned, replaced, or does
    a gradient flow to it?"""
    return (
        slot[3] != UNUSED
        or k in row["flows"]
        or any(s[0] == k for s in row["saves"])
        or any(s[-1] == k and s[3] != UNUSED for s in row["slots"])
        or any(o[0] in (VIEW, INPUT) and o[1] == k for o in row["outs"])
        or any(g[0] == k for g in row["grads"])
    )


def group_places(found):
    """Places by the dict that tells of them (the core skips a dict that did not change), the rest in
    one group that is compared at each call."""
    groups, loose = {}, []
    for p in found:
        number = p.want if p.kind in (places.DICT_LEN, places.LIST_LEN) else 0
        number = p.key if p.kind == places.LIST_ITEM else number
        present = p.want is not places.MISSING
        row = (p.kind, is_plain(p.want), p.holder, p.key, p.want, present, number)
        holder = places.watched(p)
        if holder is not None:
            groups.setdefault(id(holder), (holder, []))[1].append((row, p.path))
        else:
            loose.append((row, p.path))
    ordered = list(groups.values()) + ([(None, loose)] if loose else [])
    rows = [(holder, [r for r, _ in members]) for holder, members in ordered]
    return rows, [path for _, members in ordered for _, path in members]


def is_guarded_as(then, now):
    """Would a guard on the one accept the other?"""
    return then is now or (is_plain(then) and pytree.same_value(then, now))


def is_plain(value):
    """Compared by value in a place; anything else by identity."""
    return (
        isinstance(value, (bool, int, float, complex, str, bytes))
        or type(value) in pytree.PLAIN_TYPES
    )
