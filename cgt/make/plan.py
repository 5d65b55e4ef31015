"""What is decided before the function runs: what it can read, where in the tree the call belongs, which slots
are copied. Nothing is changed but what the function's State knows of its code."""

import enum
import types
from collections.abc import Iterable
from typing import Any

import cgt_core as core
import torch
from cgt_core import AT_PLACE, COPIED, CUDA, HOST, MISS_META, MISS_PLACE, MISS_POINTER, NONE, PINNED, REBOUND

from ..data import Around, Call, OpenNumbers, Plan, Reached, State, Was, maker_of
from ..look import code, containers, empties, flow, impure, places
from ..numbers import addresses, counters, live
from ..run.devices import home_of
from ..run.taps import is_reader, threads_beside
from ..words import errors, options, pytree, wrappers
from ..words.private import is_gathered, is_traceable
from . import autograd, describe, facts, moving
from .optional import collectives


def is_strict(t):
    """May a tensor refuse what it is asked? Its class has functions of its own, and is no wrapper's."""
    asks = type(t).__torch_function__
    asks = getattr(asks, "__func__", asks)
    plain = torch.Tensor.__torch_function__.__func__, torch.nn.Parameter.__torch_function__
    return asks not in plain and not is_traceable(t)


def will_save(state: State) -> bool:
    """Will a result of a call require grad?"""
    return state.learnt.saves and torch.is_grad_enabled()


def leaf_devices(flat: pytree.Flat) -> frozenset[str]:
    """Warm-up, and the choice of driver, are per function and kinds of device among its arguments."""
    return frozenset({t.device.type for t in flat.tensors})


def place_in_tree(call: Call, tensors: Iterable[torch.Tensor], paths: Iterable[str] = ()) -> tuple[int, int]:
    """(path, node behind which the call, with these tensors, belongs; NONE: it begins an iteration). It does not go on
    from gradients that its recordings replaced without a look at them. `paths`: of the tensors."""
    kept, tensors = call.state.keep.values(), list(tensors)
    rows = [(k.slot_paths[g.slot] + ".grad", k) for k in kept for g in k.grads if not g.was_none]
    dropped = {path for path, _ in rows} - {path for path, one in rows if path in one.slot_paths}
    said = [t for t, path in zip(tensors, paths, strict=True) if path not in dropped] if dropped and paths else tensors
    return core.path_state(call.device)[0], core.parent_of(call.device, call.state.f, tensors, said)


def misses(call: Call, path: int, parent: int) -> list[tuple[int, int, int]]:
    """[(recording, why, index)]: why those here of the call's structure do not take it; newest match first."""
    return core.node_misses(path, parent, call.state.f, call.spec, leaves_of(call.flat))


def places_first(missed: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The same, where a place is why if one is: a guard tells of shapes before it looks at places, but what lies in
    them will be followed, or live, and the recording made anew."""
    told = []
    for node, why, index in missed:
        place = core.node_misplaced(node) if why == MISS_META else NONE
        told.append((node, why, index) if place == NONE else (node, MISS_PLACE, place))
    return told


def flattened(call: Call) -> Call:
    """The call with its arguments flattened, by what is known of the function's numbers now, and where it is recorded.
    Incomparable: an argument cannot be compared from call to call."""
    state, graph, known = call.state, call.state.graph, call.state.learnt.devices
    flat = pytree.flatten_call(call.args, call.kwargs, *state.opts.static, state.learnt.numbers.live)
    if graph is not None:
        return call._replace(flat=flat, driver=graph.driver, device=graph.device)
    driver = known.drivers.get(leaf_devices(flat))
    return call._replace(flat=flat, driver=driver, device=home_of(flat.tensors, known.homes) if driver == CUDA else -1)


def leaves_of(flat: pytree.Flat) -> list[torch.Tensor | int | float]:
    """What the core takes of a call: its tensors, then its live numbers."""
    return [*flat.tensors, *(value for _, value in flat.numbers)]


def survey(call: Call) -> Around | str:
    """Around: what the function can read without its arguments; or a sentence if that cannot be guarded."""
    state, flat, graph = call.state, call.flat, call.state.graph
    if graph is None:
        found = look_around(state, call.function, flat)
    else:
        known = {"places": list(map(places.as_now, graph.places)), "tensors": graph.reached, "owners": graph.owners}
        found = maker_of(places.Found)()._replace(**known)
    reason = refuse_around(flat, found)
    if reason is not None:
        return reason
    reached, also = reach_tensors(found.tensors, flat)
    for one in reached:
        if not core.is_plain(one.tensor) and not wrappers.is_one(one.tensor):
            return errors.odd_tensor(one.path, facts.odd_kind([one.tensor]))
        if is_strict(one.tensor):
            return errors.subclass(one.path, type(one.tensor).__name__)
        if will_save(state) and one.tensor.requires_grad and not core.is_plain(one.tensor):
            return errors.wrapped_graph(one.path, facts.odd_kind([one.tensor]))
    tensors, paths = [one.tensor for one in reached], [one.path for one in reached]
    return Around(found, reached, also, [*flat.tensors, *tensors], [*flat.paths, *paths])


def find_followable(call: Call, around: Around) -> dict[str, tuple[int, int]]:
    """{path: (position of its place, slot)} of reached tensors in whose place another may come, without a gradient's
    noticing; or in that of the tuple in which they are, whose slots are consecutive."""
    state, flat, found = call.state, call.flat, around.found
    if state.graph is not None or state.learnt.asks_which or will_save(state):
        return {}
    mine = [(k, r) for k, r in enumerate(around.reached, len(flat.tensors)) if r.owner == NONE]
    at = {id(r.tensor): (k, r.path) for k, r in mine if id(r.tensor) not in around.also}
    owners = {r.owner for r in around.reached}
    owners.update(k for _, owner, others in around.also.values() for k in (owner, *(k for k, _ in others)))
    graded = {k for k, t in enumerate(around.tensors) if t.requires_grad} if torch.is_grad_enabled() else set()
    followable = {}
    for k, ones in alone_in_places(found).items():
        slots = [at.get(one, (NONE, None)) for one in ones]
        fit = all(slot != NONE and slot not in owners and slot not in graded for slot, _ in slots)
        if fit and [slot for slot, _ in slots] == list(range(slots[0][0], slots[0][0] + len(slots))):
            followable |= {path: (k, slot) for slot, path in slots}
    return followable


def find_mobile(call: Call, around: Around, followable: dict[str, tuple[int, int]]) -> dict[str, int]:
    """{path: slot} of these, and of gradients, which may be other tensors at each call: they are found at their
    parameter. Not where it is asked which tensor one is, nor what autograd may save."""
    learnt, grad = call.state.learnt, torch.is_grad_enabled()
    mobile = {path: slot for path, (_, slot) in followable.items()}
    if call.state.graph is not None or learnt.asks_which or (learnt.saves and grad):
        return mobile
    for k, r in enumerate(around.reached, len(call.flat.tensors)):
        fits = r.owner != NONE and id(r.tensor) not in around.also and not (grad and r.tensor.requires_grad)
        mobile |= {r.path: k} if fits and r.tensor.numel() else {}
    return mobile


def vet_followed(moves, found, followed, follows):
    """A sentence if what is followed is another thread's business, too, or a list or dict whose contents nothing else
    guards is not followed; or None. `followed`, `follows`: the slots of tensors by path, of places by position."""
    stored = next((path for path in followed if path in moves.replaced), None)
    if stored is not None and (beside := threads_beside()):
        return errors.used_elsewhere(stored, ", ".join(beside))
    unguarded = found.rows.difference(found.places[k].path for k in follows)
    moves.followed.difference_update(unguarded)
    return errors.place_changed(min(unguarded)) if unguarded else None


def alone_in_places(found):
    """{position: ids of tensors} of places that alone lead to one, or to a container of such: others may come there,
    and it is these which the function finds. Not where the tensor has hooks that are places, or attributes, which could
    lead back to the function: the core's hold is hidden from the garbage collector."""
    others, alone = {id(p.home) for p in found.places} | found.shared, {}
    for k, p in enumerate(found.places):
        is_one = isinstance(p.want, (torch.Tensor, tuple)) or p.path in found.rows
        is_one = is_one and p.kind in (places.DICT_ITEM, places.CELL, places.LIST_ITEM) and id(p.want) not in others
        there = containers.opened(p.want) if is_one else None
        if there is None:
            continue
        ids = tuple(map(id, there.tensors))
        bear = any(core.has_attributes(t) or not core.is_plain(t) for t in there.tensors)  # more than memory
        if not bear and len(set(ids)) == len(ids) and others.isdisjoint((*map(id, there.holders), *ids)):
            alone[k] = ids
    return alone


def plan_call(
    call: Call, around: Around, parent: int, followable: dict[str, tuple[int, int]],
    mobile: dict[str, int], moves: list[tuple[int, list[int], bool]], changed: set[str],
) -> Plan | str:  # fmt: skip
    """The Plan of a call that goes behind `parent`, or a sentence. `followable`, `mobile`: see find_followable,
    find_mobile. `moves`: as of Plan. `changed`: paths of places that kept others from fitting."""
    state, flat, graph, found, tensors = call.state, call.flat, call.state.graph, around.found, around.tensors
    driver: int | Any = call.driver
    device = call.device
    others = tuple(sorted(state.learnt.devices.gpus - {device})) if driver == CUDA and graph is None else ()
    gathered = next((path for path, one in found.sharded if is_gathered(one)), None)
    # A backward would let go of its memory, and a capture that comes to nothing, too.
    if gathered is not None and torch.is_grad_enabled():
        return errors.gathered(gathered)
    sinks = core.sinks_new(tensors)  # autograd's accumulators are made on the caller's stream, if there are none
    saves = will_save(state)
    hooked = find_hooked(state, saves, sinks)
    if hooked >= 0:
        return errors.hooked_leaf(around.paths[hooked])
    at = {k for path, (k, _) in followable.items() if path in state.learnt.moves.followed}
    followed, follows = {}, {}
    for path, (k, slot) in followable.items():
        if k in at:  # all tensors of a tuple, if one of them is
            followed[path] = slot
            follows.setdefault(k, ([], containers.opened(found.places[k].want)))[0].append(slot)
    reason = vet_followed(state.learnt.moves, found, followed, follows)
    if reason is not None:
        return reason
    fed = state.learnt.moves.fed - state.learnt.moves.written if driver == CUDA and graph is None else frozenset()
    moved = followed.keys() | (state.learnt.moves.swaps.keys() - followable.keys()) | fed
    slots = [(slot, path) for path, slot in mobile.items() if path in moved]
    named = [
        (k, path) for k, path in (*enumerate(flat.paths), *slots)  # if the recording works on memory of their kind
        if (tensors[k].device.index in (device, *others) if tensors[k].is_cuda else driver == HOST or path in fed)
    ]  # fmt: skip
    written = {id(t) for t, path in zip(tensors, around.paths, strict=True) if path in state.learnt.moves.written}
    copied, beside = choose_copied(state, named, tensors, written, len(flat.tensors), parent, moves)
    return Plan(
        flat=flat, **around._asdict(), driver=driver, device=device, others=others, parent=parent, graph=graph,
        saves=saves, places=found.places, lone=empties.lone_empties(found.places), sources=impure.states(found.sources),
        numbers=open_numbers(call, around, saves, follows), changed=changed, followable=followable, follows=follows,
        moves=moves, copied=copied, carries=frozenset(id(tensors[k]) for k in copied if id(tensors[k]) in written),
        beside=beside, spent=autograd.find_spent(graph, flat, copied, driver, parent, call.args),
        grads={k: core.grad_id(t) for k, t in enumerate(tensors) if can_have_grad(t)},
        was=[
            Was(describe.memory_of(t), core.version_of(t), describe.grads_of(t), alias_of(t, driver, parent))
            for t in tensors
        ],
        generators=reach_generators([*(one for _, one in flat.objects), *(p.want for p in found.places)]),
        ambient=core.ambient(), sinks=sinks,
    )  # fmt: skip


def find_hooked(state, saves, sinks):
    """The slot of a leaf that has hooks on its accumulator, where a backward may run inside of the call; or NONE. That
    one would be recorded past hooks on accumulators, which a capture does not even meet."""
    if saves or state.graph is not None or not torch.is_grad_enabled():
        return NONE
    return core.sinks_hooked(sinks, bool(state.learnt.devices.parallel))


def open_numbers(call, around, saves, follows):
    state, flat, found = call.state, call.flat, around.found
    untraced, uncounted = why_untraced(state, saves), why_uncounted(state, saves)
    sources = live.sources_of(flat, found.places, state, untraced, follows)
    may_sum = state.opts.outputs == "rescue" and not (saves or state.graph)
    sums = [s.at for s in sources if s.op == AT_PLACE and s.part == NONE and s.exact is None] if may_sum else []
    return OpenNumbers(
        sources=sources if uncounted else sources + counters.sources_of(state, flat, around),
        wary=untraced is not None,
        computes=state.learnt.computes if untraced is None and state.graph is None else False,
        summed=moving.summed(found.places, found.owners, state.ran, sums) if sums else [],
    )  # fmt: skip


def why_uncounted(state: State, saves: bool) -> str | None:
    """Why no run of this function can have live numbers, or None. Autograd would keep them for a backward that no run
    sees, Dynamo compiles for their type, and other threads would find the stand-ins."""
    if state.graph is not None or saves or runs_compiled(state) or threads_beside():
        return errors.number_saved()
    return state.learnt.untraced


def why_untraced(state: State, saves: bool) -> str | None:
    """The same of numbers that code of the user's sees: type(x) tells stand-ins from them. A run that comes to such
    code for the first time is left (live.watch), so that what was met and did not run counts where none can be."""
    met = state.learnt.passed if HOST in state.learnt.numbers.acts else ()
    return why_uncounted(state, saves) or live.asker(state.ran.union(met))


def refuse_around(flat, around):
    """A sentence if what the function can read cannot be guarded, or None."""
    if around is None:
        return errors.too_many_places()
    # What a wrapper calls lies in its closure.
    told = [(p.path, p.want) for p in around.places if p.key != "__wrapped__"]
    for path, value in [*flat.objects, *told]:
        if is_reader(value):
            return errors.early_bound(path)
    # What another thread puts there meanwhile could not be told from what a recording did that is undone.
    stored = [*(put.place for put in around.kept), *map(around.places.__getitem__, around.hidden)]
    if stored and (beside := threads_beside()):
        return errors.used_elsewhere(stored[0].path, ", ".join(beside))
    known = [one is not None and bool(collectives.DRIVERS) for _, one in around.sharded]
    if (around.taken_over and not known) or not all(known):
        return errors.unknown_sharding(around.taken_over[0])
    return errors.scripted(around.scripted[0]) if around.scripted else None


def look_around(state, function, flat):
    """What the code that ran so far can read, and what is there now; None: too much."""
    roots, arguments = [*flat.objects, *bearers_of_code(flat)], [*zip(flat.paths, flat.tensors, strict=True)]
    if runs_compiled(state):
        return places.find_places(function, roots, None, arguments, options.MAX_PLACES)
    # A backward may run code of the forward's again (recomputation), and would not be seen to keep anything.
    keeps = state.opts.outputs == "rescue" and not will_save(state)
    hidden = {path for path, may in state.learnt.moves.hidden.items() if may} if keeps else ()
    renewed = state.learnt.moves.followed if keeps else ()
    ran = moving.counted(state, state.ran) if keeps else state.ran
    keep = moving.keeper(ran) if keeps and moving.OBJECTS not in state.learnt.moves.hidden else None
    found = places.find_places(function, roots, ran, arguments, None, keep, hidden, renewed)
    state.learnt.passed.update(found.passed)
    return found


def learn_code(state: State, ran: set[types.CodeType]) -> list[types.CodeType]:
    """From now on this counts. The code among it that can read what was not looked at so far."""
    compiled = runs_compiled(state)
    fresh = [] if compiled else code.that_reads_more(ran, state.ran) + flow.that_disturb(ran - state.ran, state.ran)
    state.ran |= ran
    return fresh


def runs_compiled(state: State) -> bool:
    """Does Dynamo run other, unseen code in place of some of the function's? Then all counts that could run."""
    return any(map(code.is_compiled, state.ran))


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
    """([Reached] of those tensors that are not arguments, each once, and of the gradients of all; Around.also)."""
    leaves = {id(t) for t in flat.tensors}
    reached, also = {}, {}
    for path, tensor in named:
        if id(tensor) in leaves:
            also[id(tensor)] = (tensor, NONE, [])
        else:
            reached.setdefault(id(tensor), Reached(path, tensor, NONE))
    named = [*zip(flat.paths, flat.tensors, strict=True), *((r.path, r.tensor) for r in reached.values())]
    first = describe.first_of(tensor for _, tensor in named)
    for k, (path, tensor) in enumerate(named):
        grad = tensor.grad if can_have_grad(tensor) and first[id(tensor)] == k else None
        if grad is None:
            continue
        met, owner, others = also.get(id(grad), (None, NONE, []))
        if owner != NONE or id(grad) in reached:
            also[id(grad)] = (met, owner, [*others, (k, grad)])
        elif id(grad) in leaves:
            also[id(grad)] = (met, k, others)
        else:
            reached[id(grad)] = Reached(path + ".grad", grad, k)
            for name, one in wrappers.inside(grad) if wrappers.is_one(grad) else ():
                reached.setdefault(id(one), Reached(f"{path}.grad.{name}", one, NONE, True))
    return list(reached.values()), also


def reach_generators(objects: list[Any]) -> list[torch.Generator]:
    """The random generators among what a function can reach by argument or by place."""
    kinds = {cls for cls in set(map(type, objects)) if torch.Generator in cls.__mro__}  # isinstance asks the object
    return [g for g in objects if type(g) in kinds] if kinds else []


def choose_copied(state, named, tensors, written, leaves, parent, moves):
    """(slots that the graph copies from wherever they are, of these; {slot: slots with which it shares bytes} of those
    of them that do). The rest is pinned. A tensor that is several arguments is copied once; so are arguments of a
    backward that begin at one address (the gradient of a sum is the sum's own, expanded). `named`: [(slot, path), ...]
    of arguments, and of what is followed. `written`: ids of the tensors that the function writes. `leaves`: so many
    slots are arguments. `moves`: as of Plan."""
    if state.opts.inputs == "fixed" or (state.learnt.hidden and state.graph is None):
        return [], {}
    moved = {k for _, slots, first in moves if not first for k in slots}
    named = [
        (k, path) for k, path in named
        if may_copy(state, path, tensors[k], written) and not stays(state, path, tensors[k], parent, k in moved)
    ]  # fmt: skip
    if not named:
        return [], {}
    ranges = [(t, core.address(t), core.address(t) + core.span(t)) for t in tensors]
    chosen, neighbours = [], {}
    for k, _ in named:
        t, lo, hi = ranges[k]
        beside = [(j, x, a, b) for j, (x, a, b) in enumerate(ranges) if x is not t and a < hi and lo < b]
        if beside and not may_share(state, k, ranges, beside, written, leaves):
            continue
        if not any(tensors[j] is t for j in chosen):
            chosen.append(k)
            if beside and state.graph is None:
                neighbours[k] = [j for j, *_ in beside]
    chosen = [k for k in chosen if id(tensors[k]) not in written or stands_alone(tensors[k], tensors)]
    chosen = only_together(chosen, neighbours, tensors)
    return chosen, {k: js for k, js in neighbours.items() if k in chosen}


def may_copy(state, path, t, written):
    known = type(t) is torch.Tensor or is_swapped(state, path, t) or path in state.learnt.moves.fed
    lasts = id(t) not in written or may_carry(state, path, t)
    simple = known and lasts and t.layout == torch.strided and not t.is_quantized
    # Else its memory was given back, or taken away: the op that reads it raises.
    return simple and bool(core.address(t) or not core.span(t))


def stays(state, path, t, parent, moved):
    """Does this tensor most likely lie at the same address at each call? Above all results of the path do, whose memory
    stays where it is; unless they `moved` at this very place. Of others it is known by the addresses so far."""
    if state.opts.inputs != "auto" or state.opts.pad or path in state.learnt.moves.fed:
        return False  # the user has said that it moves, or is filled up; or the recording works on a copy anyway
    if not moved and core.path_proto(parent, t) is not None:
        return True
    before = state.learnt.moves.pointers.get(path)
    return path not in state.learnt.moves.swaps and (before is None or before == core.address(t))


def may_share(state, k, ranges, beside, written, leaves):
    """May the kth slot be copied, although others share bytes with it: `beside`, each as (slot, its tensor, where it
    begins, where it ends)? In a backward one is copied of all that begin at an address: in which the others lie."""
    t, lo, hi = ranges[k]
    if any(id(x) in written or (x.requires_grad and state.graph is None) for x in (t, *(x for _, x, _, _ in beside))):
        return False  # shares bytes that are written, or to which gradients flow: a copy would part them
    if state.graph is None:
        return True
    if not all(a == lo and x.dtype == t.dtype and j < leaves for j, x, a, _ in beside):
        return False
    return not any(b > hi or (b == hi and j < k) for j, _, _, b in beside)  # lies in another one, which is copied


def only_together(chosen, neighbours, tensors):
    """The chosen slots whose neighbours are all chosen: what shares bytes is copied with the others, or not at all."""
    for _ in range(len(neighbours)):  # each that goes can take its neighbours along
        mine = {id(tensors[k]) for k in chosen}
        chosen = [k for k in chosen if all(id(tensors[j]) in mine for j in neighbours.get(k, ()))]
    return chosen


def stands_alone(t, tensors):
    """Does no other one of these share t's storage, or count its writes? By these it is known what was written."""
    storage, counter = core.storage_id(t), core.version_counter(t)
    others = [x for x in tensors if x is not t]
    return all(core.storage_id(x) != storage and not (counter and core.version_counter(x) == counter) for x in others)


def follow_renewed(call: Call, around: Around, missed: list) -> Around | str:
    """Around, looked at anew where another list, dict or object of tensors was put into a place since something was
    recorded: it is told by what is in it from now on, if it can be followed."""
    state, moves = call.state, call.state.learnt.moves
    rows = [(state.keep[node], index) for node, why, index in missed if why == MISS_PLACE]
    then = {kept.place_paths[index]: describe.rows_of(kept)[index][describe.WANT] for kept, index in rows}
    found = {p.path: p.want for p in around.found.places if p.path in then and p.path not in moves.hidden}
    fresh = {path for path, want in found.items() if path not in moves.followed and is_renewed(then[path], want)}
    if not fresh or state.opts.outputs != "rescue" or will_save(state):
        return around
    moves.followed.update(fresh)
    again = survey(call)
    if isinstance(again, str):
        return again
    followable = find_followable(call, again)
    led = {again.found.places[k].path: path for path, (k, _) in followable.items()}
    moves.followed.update(led[path] for path in fresh & led.keys())
    if fresh <= led.keys():
        return again
    moves.followed.difference_update(fresh - led.keys())
    return survey(call)


def is_renewed(then, now):
    """Is this another list, dict or object of tensors than that one, but like it?"""
    was, there = containers.opened(then), containers.opened(now)
    return bool(was and there and there.changes) and containers.are_alike(was.shape, there.shape)


def note_moves(state: State, around: Around, missed: list, followable: dict, mobile: dict) -> list[tuple]:
    """What the function finds in a place where another tensor came is followed from now on, and arguments whose address
    moved since a pinned recording are copied, if they can be; so are what is followed, and gradients. Returns the
    plan's moves."""
    moves, tensors, gradients = [], around.tensors, mobile.keys() - followable.keys()
    for node, why, index in missed:
        kept = state.keep[node]
        if why == MISS_PLACE:
            slot, place = None, kept.place_paths[index]
            # The first of a tuple.
            name = next((name for name, (k, _) in followable.items() if around.found.places[k].path == place), place)
        elif why == MISS_POINTER:
            slot = core.node_facts(node).slots[index]
            name = place = kept.slot_paths[index]
        else:
            continue
        if kept.followable.get(name) is False and name in followable:
            beside = others_in(kept, node, followable, tensors), moved_too(state, kept, node, mobile, tensors)
            paths = {name}.union(*beside)
            state.learnt.moves.followed.update({place, *paths})
            for path in paths:
                note_swap(state, path)
            moves.append((node, [followable[name][1]], True))
        elif slot is not None and state.opts.inputs == "auto" and (slot.leaf != NONE or name in mobile):
            at = slot.leaf if slot.leaf != NONE else mobile[name]
            if slot.written and not may_carry(state, name, tensors[at]):
                continue
            all_new = gradients.intersection(kept.slot_paths) if name in gradients else ()  # a backward made them
            for path in {name, *all_new, *moved_too(state, kept, node, mobile, tensors)}:
                note_swap(state, path)
            moves.append((node, [at, *moved_before(kept, node, mobile)], False))
    return moves


def moved_too(state, kept, node, mobile, tensors):
    """Paths of those of `mobile` that lie elsewhere than when recorded, and may: a guard stops at the first."""
    slots = core.node_facts(node).slots
    mine = [row for row in zip(kept.slot_paths, slots, strict=True) if row[0] in mobile]
    at = [(path, slot, tensors[mobile[path]]) for path, slot in mine]
    moved = [(path, slot, t) for path, slot, t in at if slot.binding == PINNED and slot.address != core.address(t)]
    return [path for path, slot, t in moved if not slot.written or may_carry(state, path, t)]


def moved_before(kept, node, mobile):
    """Slots that this recording does not pin. One that is made in its place must not pin them again: where two results
    of a path come in other slots at each call, one would be freed for the other without end."""
    named = zip(core.node_facts(node).slots, kept.slot_paths, strict=True)
    loose = [(slot.leaf, path) for slot, path in named if slot.binding in (COPIED, REBOUND)]
    return [leaf if leaf != NONE else mobile[path] for leaf, path in loose if leaf != NONE or path in mobile]


def note_swap(state, name):
    """It moved. A copy of a parameter at each replay must cost less than a recording for each: it does where it is
    replaced all the time."""
    calls, (times, last) = core.fn_counts(state.f)[0], state.learnt.moves.swaps.get(name, (0, -options.SWAPPED_SOON))
    if last != calls:  # several recordings miss it in one call
        state.learnt.moves.swaps[name] = (times + 1 if calls - last < options.SWAPPED_SOON else 1, calls)


def others_in(kept, node, followable, tensors):
    """Paths of places in which another tensor lies than this recording found."""
    at = {path: k for k, path in enumerate(kept.slot_paths)}
    mine = [(path, at[path], tensors[slot]) for path, (_, slot) in followable.items() if path in at]
    return [path for path, k, t in mine if not core.slot_holds(node, k, t)]


def may_carry(state, path, t):
    """Can the graph write this tensor wherever it lies: there, if it can be told where that is, or else in a copy that
    is copied back?"""
    if state.graph is not None or state.opts.inputs != "auto":
        return False
    if t.requires_grad or path in state.learnt.moves.fixed or path in state.learnt.numbers.counters:
        return False
    return addresses.has_way_back(t) or (state.opts.outputs == "rescue" and core.span(t) <= options.MAX_REBOUND)


def is_swapped(state, path, t):
    """Is it a parameter that no gradient flows to, and another one now and then? Where recordings cannot be told of it,
    every few calls."""
    through = torch.is_grad_enabled() and t.requires_grad
    least = 1 if state.learnt.whole and state.graph is None else options.SWAPS
    return type(t) is torch.nn.Parameter and not through and state.learnt.moves.swaps.get(path, (0, 0))[0] >= least


def can_have_grad(t):
    """May code find a .grad here, now or when it is thawed?"""
    return t.is_leaf and (t.requires_grad or type(t) is torch.nn.Parameter or t.grad is not None)


def alias_of(t, driver, parent):
    """t's memory as a tensor of its own: a failed capture may have to give it back. Not of a result of the
    path: its holders are counted."""
    if driver == HOST or core.path_proto(parent, t) is not None or not core.is_plain(t):
        return None
    return core.view_like(t, t, 0)
