"""What a run leaves behind that a replay could not: memory that outlives the call, names that came to share it."""

import gc
import types

import cgt_core as core
import torch
from cgt_core import AT_PLACE, CUDA, DICT_LEN, EMPTY, FRESH, LIST_LEN, SHARED

from ..data import Draft, Plan, Seen
from ..look import containers, places
from ..run.devices import settle
from ..run.observe import collect, held
from ..words import errors, pytree
from . import describe

# References to a tensor that only a list holds, by a name that no inner function uses: from Python 3.14 on that counts.
ALONE = max(core.references(t) for t in [torch.empty(0)])
CODE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.CodeType, torch.Tensor)


def vet_escapes(plan: Plan, seen: Seen, draft: Draft) -> str | None:
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
        number = plan.driver == CUDA and not t.is_cuda and sid in seen.constants.memory and not seen.reads.values
        return sid not in known and sid in seen.made and not number

    alive = find_alive(seen, escapes)
    states = [  # on the GPU a state of the CPU's generator is what it is
        token.state() for sid, token in seen.generators.tokens.items()
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


def vet_shared(plan: Plan, seen: Seen, result: object) -> str | None:
    """A sentence if somebody else holds a list or dict of the result that has to do with what the call made, or came to
    a place: it must stay the very one that the function returned. Asked before the result is taken apart."""
    if is_from_outside(plan, result):
        return errors.changed_state("a list, dict or object of the result")
    ones = [p for p in plan.places if p.kind not in (DICT_LEN, LIST_LEN, EMPTY)]
    came = {id(places.value_at(p)) for p in ones if places.value_at(p) is not p.want}

    def is_made(leaf):
        return type(leaf) is pytree.Readout or (isinstance(leaf, torch.Tensor) and core.storage_id(leaf) in seen.made)

    def find():
        return [
            one for one in pytree.find_shared(result, seen.is_own)
            if id(one) in came or any(map(is_made, pytree.leaves_in(one)))
        ]  # fmt: skip

    shared = lasting(seen, find)
    if not shared:
        return None
    made = next((leaf for one in shared for leaf in pytree.leaves_in(one) if is_made(leaf)), None)
    if isinstance(made, torch.Tensor):
        return errors.kept_tensor(seen.made[core.storage_id(made)], "")
    held = (p.path for p in ones if any(places.value_at(p) is one for one in shared))
    return errors.changed_state(next(held, "a list or dict of the result"))


def is_from_outside(plan, result):
    """Does it contain what was there before, and may hold other values than tensors at a replay: numbers that move, or
    fields of which nobody asked? (Nothing here may hold it any longer: its holders are counted.)"""
    homes, changes = [home for home, _ in containers.contents([result])], plan.changes
    moved = {*changes.moving, *changes.free, *changes.stored, *(at for _, at in changes.puts)} if homes else ()
    live = [s.at for s in plan.numbers.sources if s.op == AT_PLACE] if homes else ()
    known = {id(plan.places[k].home) for k in (*moved, *live)}.union(id(places.dict_of(p.want)) for p in plan.places)
    return any(
        not isinstance(x, (torch.Tensor, list, dict))
        for home in homes if id(home) in known for x in containers.values_of(home)
    )  # fmt: skip


def vet_puts(plan: Plan, seen: Seen, result: object) -> str | None:
    """A sentence if a list, dict or object that came to a place is somewhere else, too: a replay makes another one
    for the place alone."""
    found = [put.place for put, _ in plan.changes.puts]

    def find():
        came = [[x for x in describe.came_to(p) if not pytree.is_fixed(x)] for p in found]
        return pytree.find_held(result, came, lambda t: core.storage_id(t) in seen.made)

    held = set(map(id, lasting(seen, find)))
    path = next((p.path for p in found if any(leads_to(x, held) for x in describe.came_to(p))), None) if held else None
    return path and errors.changed_state(path)


def find_kept_view(plan, seen, draft):
    """The path of an argument of which somebody kept a view beside the result, or None: at another call it would be a
    view of the recorded call's. (PyTorch keeps some in a result that is a view of theirs, as in `z.mH`.)"""
    flat = plan.flat
    bases = {id(base): base for t in draft.out.tensors if (base := t._base) is not None}  # autograd's, of views
    known = {*bases, *map(id, (*plan.tensors, *draft.out.tensors))}
    path_of = {core.storage_id(t): path for path, t in zip(flat.paths, flat.tensors, strict=True)}
    kept = lasting(seen, lambda: [
        t for t in core.alive(seen.run.returned)
        if id(t) not in known and core.storage_id(t) in path_of
        and (core.references(t) > ALONE or id(t._base) not in bases)
    ])  # fmt: skip
    return path_of[core.storage_id(kept[0])] if kept else None


def find_replaced(found, tensors):
    """The path of an object that the run replaced and that leads to one of the tensors, or None. Then it is the place
    that holds it, not the user; and a recording for the old object would fit no call."""
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


def vet_aliases(seen: Seen, draft: Draft) -> str | None:
    """A sentence if somebody kept a tensor of a result's memory beside the result, which is let go: a
    replay would change it under the holder's hands."""
    memory = {core.storage_id(o.proto) for o in draft.outs if o.kind in (FRESH, SHARED)}
    memory -= set(seen.generators.tokens)  # a checkpoint holds it, and will be given another's
    alive = find_alive(seen, lambda t: core.storage_id(t) in memory)
    return errors.kept_tensor(seen.made[core.storage_id(alive[0])], "") if alive else None


def find_alive(seen, is_wanted):
    """Tensors that ops of the run returned and somebody still holds, of those wanted."""
    return lasting(seen, lambda: [t for t in held(seen) if t.numel() and is_wanted(t)])


def lasting(seen, find):
    """What find() finds, and still does when garbage was collected and autograd's thread is done."""
    if find():  # held by nobody here meanwhile
        collect()
        settle(seen.run.device)
        return find()
    return []
