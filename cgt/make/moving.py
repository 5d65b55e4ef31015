"""Places that a call advances (`self.calls += 1`), stores to (`self.last = loss`) or appends to
(`self.losses.append(loss)`) and does not read otherwise. A replay does the same to what they hold then
(core/places.pxi). The guard of a number asks for its type only; what is stored over, and what is in a list that grows,
is not looked at.

Which numbers they are is told when the function has run, by the bytecode of all code that ran (flow.py): each mention
of the place's name in it must be an advance. An attribute is told by its name alone, so code that reads another
object's attribute of that name keeps it from being one, as do vars(self) and its kin. They are whole numbers, counted
up and down by such: by how much is the difference of what was there before and after. Others are live (live.py)."""

import abc
import collections
import copy
import dataclasses
import functools
import inspect
import json
import operator
import pickle
import pprint
import sys
import types
import typing
from collections.abc import Callable
from typing import NamedTuple

import torch
from cgt_core import ADVANCES, ATTR, CELL, DICT_ITEM, LIST, LIST_ITEM, LIST_LEN, NONE, TYPE_ATTR

from ..cuts import readout
from ..data import EffectRow, Plan, Seen, State
from ..look import blinds, containers, flow, places
from ..look.bytecode import ATTRIBUTE, ENTRY, GLOBAL, VARIABLE
from ..look.code import HOMES, is_ambient, is_compiled
from ..look.flow import advances_of, disturbers, moves_of
from ..look.places import CLASS_DICT_OF, MISSING, MODULE_OF, MRO_OF, Place, Put, class_value, derives, value_at
from ..numbers import live
from ..run.observe import NOT_USER_CODE
from ..run.taps import READS_RATES
from ..words import errors, pytree

FLAGS = (True, False, None)  # what tells one of a few ways to go
NOBODY = object()


class Code(NamedTuple):
    """What the code that ran does to the names that it advances."""

    advances: dict  # (where, name) -> [flow.Advance]
    others: dict  # (where, name) -> the line that reads or stores it another way
    opens: str | None  # see flow.Moves


def find(found: list[Place], owners: dict, ran: set[types.CodeType], seen: Seen) -> dict[int, EffectRow | None]:
    """{position of a place: EffectRow; or None, where this run did not come to it}, of those that the code of `ran`
    advances and does nothing else to."""
    known = code_of(ran)
    if not known.advances or known.opens or is_opened(found, seen):
        return {}
    holders = {}
    for p in found:
        holders.setdefault(id(p.want), []).append(p)
    rows, beside = {}, [moves_of(code) for code in disturbers(seen.code.beside, known.advances)]
    for k, place in enumerate(found):
        if type(place.want) is not int:
            continue
        names = names_of(place, owners, holders, known)
        advances = [advance for name in names for advance in known.advances.get(name, ())]
        if not advances or any(name in known.others for name in names):
            continue
        now = value_at(place)
        if type(now) is int and (now == place.want or not any(stores(beside, name) for name in names)):
            by = now - place.want
            rows[k] = EffectRow(ADVANCES, NONE, place=k, by=by) if by else None
    return rows


def find_puts(
    plan: Plan, ran: set[types.CodeType], seen: Seen, is_same: Callable[[object, object], bool]
) -> tuple[list[Place], frozenset[int], list[tuple[Put, int]]] | None:
    """(rows for Plan.places, Plan.free, Plan.puts): of what the code of `ran` stores or
    appends and does not read. A place that holds what it held is compared: it is not known whether it was stored anew.
    None: this code reads one of them after all, or another thread has to do with one."""
    rows, free, puts = [], [], []
    keeps = None if not plan.found.kept or is_opened(plan.places, seen) else keeper(ran)
    beside = [moves_of(code) for code in disturbers(seen.code.beside, [put[:2] for put in plan.found.kept])]
    for put in plan.found.kept:
        at, place = len(plan.places) + len(rows), put.place
        if place.kind == LIST_LEN:
            at = next(k for k, p in enumerate(plan.places) if p.want is place.home)
            changed = len(place.home) != place.want
        else:
            now = value_at(place)
            changed = readout.marked(seen, now) is not now or not is_same(place.want, now)
            rows.append(place._replace(want=None) if changed else place)  # nobody keeps what was there
            free.extend([at] if changed else [])
        how = keeps and keeps(put.where, put.name, put.owner, place.home if place.kind == LIST_LEN else None)
        containers = flow.containers_of(put[:2])
        names = [put[:2], *containers]
        if how is None or (changed and any(not (one.others.keys() | one.stores).isdisjoint(names) for one in beside)):
            return None
        if containers and not is_at_one_place(plan, plan.places[at].home, len(containers)):
            return None
        puts.extend([(put, at)] if changed else [])
    return rows, frozenset(free), puts


def is_at_one_place(plan, container, depth):
    """Or may code come to it, or to one of so many around it, by other names?"""
    homes = [place.home for place in plan.places if place.want is container]
    if len(homes) != 1 or plan.found.owners.get(id(container), NOBODY) is not NOBODY:
        return False
    return depth == 1 or is_at_one_place(plan, homes[0], depth - 1)


def find_flags(plan: Plan, known: set[int]) -> list[int]:
    """Positions of places, but for those that are `known`, in which the run left another flag than it found, as
    `model.train()` does. The recording is for the one, and a replay stores the other."""
    flipped = []
    for k, place in enumerate(plan.places):
        if k in known or place.kind not in (DICT_ITEM, CELL) or not is_one(place.want, FLAGS):
            continue
        now, owner = value_at(place), plan.found.owners.get(id(place.home))
        # No setter of the user's is told of it.
        if now is not place.want and is_one(now, FLAGS) and (owner is None or is_bare(owner, place.key)):
            flipped.append(k)
    return flipped


def stores(moves, name):
    """Does other code than the function's store under this name? That was at work meanwhile: by how much the call
    itself advanced the place is not known."""
    return any(name in one.stores or (name[0] == ENTRY and name[1][0] in one.others) for one in moves)


def code_of(ran):
    advances, others, opens = {}, {}, None
    for advance in (advance for code in ran for advance in advances_of(code)):
        advances.setdefault(advance[:2], []).append(advance)
    for code in disturbers(ran, advances):
        moves = moves_of(code)
        others |= moves.others
        opens = opens or moves.opens or (code.co_name if is_compiled(code) else None)
    return Code(advances, others, opens)


def keeper(ran: set[types.CodeType]) -> Callable[[str, str, object, object], str | None] | None:
    """keeps(where, name, owner, value): does this code only store under the name ("store"), only append to what is
    there ("append"), or something else (None)?"""
    moves = [moves_of(code) for code in flow.keepers(ran)]
    stores, appends = (set().union(*(getattr(one, field) for one in moves)) for field in ("stores", "appends"))
    others = [moves_of(code) for code in disturbers(ran, stores | appends)]
    if any(one.opens for one in others) or any(map(is_compiled, ran)):
        return None
    reads = set().union(*(one.reads for one in others))
    reads.update(advance[:2] for one in others for advance in one.advances)
    asked = {name for one in others for name in one.others}

    def keeps(where, name, owner, value):
        found, containers = ways_to((where, name)), flow.containers_of((where, name))
        base = containers[-1][1] if containers else name
        if not asked.isdisjoint(way for one in containers for way in ways_to(one)):
            return None  # for more than entries by constant keys
        stored, appended = not stores.isdisjoint(found), not appends.isdisjoint(found)
        if stored == appended or not reads.isdisjoint(found) or (owner is not None and not is_bare(owner, base)):
            return None
        if stored and containers:
            return None
        return "store" if stored else "append" if type(value) is list else None

    return keeps


def ways_to(name):
    """All (where, name) by which code may mean this one: a global variable is an attribute of its module."""
    if name[0] == ENTRY:
        container, key = name[1]
        return [(ENTRY, (way, key)) for way in ways_to(container)]
    return [name, (ATTRIBUTE, name[1])] if name[0] == GLOBAL else [name]


def summed(found: list[Place], owners: dict[int, object], ran: set[types.CodeType], positions: list[int]) -> list[int]:
    """Those of these places that this code reads for sums alone, whose result comes there again (flow.py)."""
    holders, known = {id(p.want): [p] for p in found}, Code({}, {}, None)
    names = {k: [name for name in names_of(found[k], owners, holders, known) if name[0] != ENTRY] for k in positions}
    moves = [moves_of(code) for code in disturbers(ran, [name for found in names.values() for name in found])]
    if any(one.opens for one in moves) or any(map(is_compiled, ran)):
        return []
    return [k for k, mine in names.items() if mine and not any(name in one.beside for name in mine for one in moves)]


def names_of(place, owners, holders, known):
    """All (where, name) by which code can come to the place; [] if there may be more."""
    home, key, owner = place.home, place.key, owners.get(id(place.home), NOBODY)
    if place.kind == CELL:
        return [(VARIABLE, place.path)]
    if place.kind == ATTR:
        return [(ATTRIBUTE, key)] if is_bare(home, key) else []
    if owner is None or place.kind not in (DICT_ITEM, LIST_ITEM):
        return []
    is_scope = place.kind == DICT_ITEM and "__builtins__" in home
    if owner is NOBODY and not is_scope:
        return entry_names(place, owners, holders, known)
    if type(key) is not str or id(home) in holders:
        return []
    if is_scope:
        return [(GLOBAL, key), (ATTRIBUTE, key)] if owner is NOBODY or type(owner) is types.ModuleType else []
    return [(ATTRIBUTE, key)] if is_bare(owner, key) else []


def line_of(place: Place, ran: set[types.CodeType]) -> str | None:
    """A line of the user's in this code that mentions the place and does not only advance it; or None."""
    if place.kind != CELL and not places.is_simple(place.key):
        return None
    users = [moves_of(code).others for code in ran if not code.co_filename.startswith(HOMES)]
    return next((line for others in users for name, line in others.items() if is_of(name, place)), None)


def told(plan: Plan, ran: set[types.CodeType]) -> list[str]:
    """What a replay of the plan's recording does to places, for messages."""
    known, texts = code_of(ran), []
    for place, row in ((plan.places[k], row) for k, row in plan.changes.moving.items() if row is not None):
        lines = {a.line for name, found in known.advances.items() if is_of(name, place) for a in found}
        texts.append(f"advances {place.path} by {row.by} at {', '.join(sorted(lines))}")
    came = [put.place for put, _ in plan.changes.puts]
    return texts + [f"{'appends to' if place.kind == LIST_LEN else 'stores'} {place.path}" for place in came]


def is_of(name, place):
    """Could code mean the place with this (where, name)?"""
    key = name[1][1] if name[0] == ENTRY else name[1]
    return key == (place.path if place.kind == CELL else place.key)


def entry_names(place, owners, holders, known):
    """The same of an entry, where all code asks the container for constant entries alone, found at one place."""
    home, key, held = place.home, place.key, holders.get(id(place.home), ())
    if not (type(home) is dict or type(home) is list) or not places.is_simple(key) or len(held) != 1:
        return []
    containers = names_of(held[0], owners, holders, known)
    names = [(ENTRY, (container, key)) for container in containers]
    entries = [name[1] for name in (*known.advances, *known.others) if name[0] == ENTRY and name[1][0] in containers]
    from_the_end = type(home) is list and any(type(entry) is int and entry < 0 for _, entry in entries)
    return [] if from_the_end or any(container in known.others for container in containers) else names


def is_bare(owner, name):
    """Is the attribute what lies in the object, which nobody but code of its own class and of those around it reads?"""
    cls = type(owner)
    base = next((base for base in MRO_OF(cls) if name in CLASS_DICT_OF(base)), None)
    raw = class_value(cls, name)
    return (
        all(is_known(base) for base in MRO_OF(cls))
        and is_one(class_value(cls, "__setattr__"), SETTERS)
        and class_value(cls, "__getattribute__") is object.__getattribute__
        and (base is None or not is_ambient(MODULE_OF(base)))
        and (raw is MISSING or is_one(type(raw), PLAIN_TYPES))
    )


def is_known(cls):
    """Does Python code alone read objects of this class? (repr() of a SimpleNamespace, C of others do, too.)"""
    if is_one(cls, PLAIN_BASES) or derives(cls, (torch.nn.Module, torch.optim.lr_scheduler.LRScheduler)):
        return True
    compiled = (is_one(type(raw), COMPILED) for raw in CLASS_DICT_OF(cls).values())
    return not is_ambient(MODULE_OF(cls)) and not any(compiled)


def is_one(thing, things):
    """`in`, by identity."""
    return any(thing is one for one in things)


def is_opened(found, seen):
    """Did the run do what may look at whole objects?"""
    files = {code.co_filename for code in seen.code.started if code is not None}
    return not files.isdisjoint(OPENING_FILES) or any(opens(p.want) for p in found)


def learn_opened(state: State, plan: Plan, seen: Seen) -> str:
    """A sentence where the run may read what it seemed to store alone. If it opened objects, nothing seems so from now
    on."""
    if is_opened(plan.places, seen):
        state.learnt.moves.hidden[OBJECTS], seen.again = False, True
    return errors.used_elsewhere(plan.found.kept[0].place.path)


def opens(value):
    """Is this something that reads attributes whose names its caller does not say?"""
    return id(value) in OPENING or is_one(type(value), (operator.attrgetter, operator.methodcaller))


def class_guards(found: list[Place], owners: dict[int, object], positions: list[int]) -> list[Place]:
    """Places that tell whether storing an attribute is still what it was."""
    guards = {}
    for place in map(found.__getitem__, positions):
        owner = place.home if place.kind == ATTR else owners.get(id(place.home))
        if place.kind not in (ATTR, DICT_ITEM) or owner is None or type(owner) is types.ModuleType:
            continue
        for name in (place.key, "__setattr__", "__getattribute__"):
            cls = type(owner)
            path = f"{places.NAME_OF(cls)}.{name}"
            guards[id(cls), name] = Place(TYPE_ATTR, cls, name, class_value(cls, name), path)
    return list(guards.values())


SETTERS = (object.__setattr__, torch.nn.Module.__setattr__)
PLAIN_TYPES = (int, float, bool, type(None), types.MemberDescriptorType)  # what a class may have under the name
COMPILED = (types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType)
PLAIN_BASES = (object, abc.ABC, typing.Generic, typing.Protocol)
OPENING_FILES = frozenset(
    module.__file__ for module in (copy, pickle, dataclasses, inspect, json, json.encoder, pprint, torch.serialization)
)
OPENING = {id(one) for one in (
    vars, globals, locals, eval, exec, getattr, setattr, delattr, operator.attrgetter, copy.copy, copy.deepcopy,
    pickle.dumps, pickle.dump, dataclasses.asdict, dataclasses.astuple, object.__getattribute__, object.__setattr__,
)}  # fmt: skip


def is_replaced(place: Place) -> bool:
    """Did the run put another tensor there, or another container of them? As it was read before, its place is followed,
    and as a replay stores it, free."""
    now = value_at(place)
    if now is place.want:
        return False
    then, there = containers.opened(place.want), containers.opened(now)
    alike = then is not None and there is not None and containers.are_alike(then.shape, there.shape)
    return alike and all(type(one) is torch.Tensor for one in there.tensors)


def is_asked(seen: Seen, place: Place) -> bool:
    """Was it asked, by a hash or an id, which tensor lay there before the run, or lies there now?"""
    return is_one_asked(seen, [*tensors_at(place.want), *tensors_at(value_at(place))])


def is_one_asked(seen: Seen, tensors: list[torch.Tensor]) -> bool:
    """Was it asked, by a hash or an id, which tensor one of these is?"""
    return seen.asks_which or not seen.code.hashed.isdisjoint(map(id, tensors))


def learn_replaced(state: State, plan: Plan, seen: Seen) -> str | None:
    """A sentence if the run put other tensors into places that it read and that are not followed yet, or None. Nor is
    one followed that a place had already to which the run only stores: whether it was stored anew is not known."""
    changed = [plan.places[k].path for k, (_, there) in plan.follows.items() if not holds(plan.places[k], there)]
    if changed:  # a list or dict that the run wrote to
        state.learnt.moves.followed.difference_update(changed)
        return errors.changed_state(changed[0])
    there = {id(put.place.want) for put in plan.found.kept if value_at(put.place) is put.place.want}
    held = {k for k, (_, one) in plan.follows.items() if not there.isdisjoint(map(id, (*one.tensors, *one.holders)))}
    if held:
        stay = {k for k in held if not is_replaced(plan.places[k])}
        state.learnt.moves.followed.difference_update(path for path, (k, _) in plan.followable.items() if k in stay)
        return errors.follows(min(plan.places[k].path for k in held))
    if state.opts.outputs != "rescue":  # what is in a place lasts, whatever becomes of results
        return None
    parts = {id(plan.tensors[slot]): path for path, (_, slot) in plan.followable.items()}
    found = {k: plan.places[k] for k in {k for k, _ in plan.followable.values()} | renewable(plan, parts)}
    found = {k: place for k, place in sorted(found.items()) if is_replaced(place) and not is_asked(seen, place)}
    if not found:
        return None
    at = found.keys() - plan.follows
    names = [place.path for k, place in found.items() if k in at]
    names += [parts[id(t)] for k, place in found.items() if k in at for t in tensors_at(place.want)]
    grown = [place.path for place in found.values() if shapes_at(place.want) != shapes_at(value_at(place))]
    state.learnt.moves.grown.update(dict.fromkeys(grown))
    if not (names or grown):
        return None
    state.learnt.moves.followed.update(names)
    state.learnt.moves.replaced.update(names)
    return errors.grows(grown[0]) if grown else errors.follows(names[0])


def any_lists(plan: Plan) -> set[int]:
    """Positions of places in which any list will do, since the call appends to it and no more. Another one may be what
    the call reads elsewhere: the core asks the other places; arguments, and lists that are followed, are none."""
    if any(there.changes for _, there in plan.follows.values()) or any(op[0] == LIST for op in plan.flat.program):
        return set()
    wants = [id(place.want) for place in plan.places]
    appended = (k for put, k in plan.changes.puts if put.place.kind == LIST_LEN)
    return {k for k in appended if plan.places[k].kind in (DICT_ITEM, CELL) and wants.count(wants[k]) == 1}


def holds(place, there):
    """Is in the container what was there before the run?"""
    now = containers.opened(place.want)
    is_same = now is not None and pytree.same_value(now.shape, there.shape)
    return is_same and all(map(operator.is_, now.tensors, there.tensors))


def renewable(plan, parts):
    """Positions of places that alone lead to lists or dicts of nothing but tensors that could be followed. `parts`:
    ids of these."""
    holders = collections.Counter(id(place.want) for place in plan.places)
    found = [
        (k, containers.opened(p.want)) for k, p in enumerate(plan.places)
        if p.kind in (DICT_ITEM, CELL, LIST_ITEM) and holders[id(p.want)] == 1 and value_at(p) is not p.want
    ]  # fmt: skip
    return {k for k, there in found if there and there.changes and parts.keys() >= {*map(id, there.tensors)}}


def shapes_at(value: object) -> list[torch.Size]:
    """Of the tensors in a place."""
    return [t.shape for t in tensors_at(value)]


def tensors_at(value):
    there = containers.opened(value)
    return () if there is None else there.tensors


# --- objects that are replaced before anybody looks at them -----------------------------------------


def lay_blinds(seen: Seen) -> tuple[Callable[[], object], Callable[[], object]]:
    """A bracket: blinds lie in its run's hidden places, until it stores there."""
    look = seen.code.looked.add
    laid = [(blinds.blind_for(p.want, functools.partial(look, p.path)), p) for p in hidden_of(seen)]

    def begin():
        for blind, place in laid:
            places.put_back(place._replace(want=blind))

    def end():
        take_blinds_away(seen)
        for blind, place in laid:
            if sys.getrefcount(blind) > pytree.PASSING:  # somebody keeps what lay there
                look(place.path)
                live.replace(blind, place.want)
        laid.clear()

    return begin, end


def take_blinds_away(seen: Seen) -> None:
    """Where a blind lies, be it another place's, its object does. Of what comes now it is not known if it looks."""
    for place in hidden_of(seen):
        real = blinds.REAL.get(type(value_at(place)), MISSING)
        if real is not MISSING:
            places.put_back(place._replace(want=real))
            seen.code.looked.add(place.path)


def hidden_of(seen):
    plan = seen.run.plan
    return [plan.places[k] for k in plan.found.hidden] if plan is not None else []


RATES, OBJECTS = "get_last_lr()", "vars()"  # of a scheduler; of whatever it opens: both in Moving.hidden


def counted(state: State, ran: set[types.CodeType]) -> set[types.CodeType]:
    """The code among this that counts as reading: not what hands out a scheduler's rates, where calls make those."""
    return ran if state.learnt.moves.hidden.get(RATES) is False else ran - READS_RATES


def learn_looked(state: State, seen: Seen) -> str | None:
    """A sentence if the run looked at what was hidden from it, or None."""
    state.learnt.moves.hidden.update(dict.fromkeys(seen.code.looked, False))
    return errors.changed_state(min(seen.code.looked)) if seen.code.looked else None


def learn_hidden(state: State, plan: Plan, seen: Seen) -> str | None:
    """A sentence if the run put other objects into places, which it may do before it looks at those there; or None."""
    known, ran = state.learnt.moves.hidden, state.ran | seen.code.ran
    if state.opts.outputs != "rescue" or plan.saves or plan.graph or seen.cuts.islands:
        return None
    found = [(p, value_at(p)) for p in plan.places if p.kind in (DICT_ITEM, CELL) and p.path not in known]
    found = [(p, now) for p, now in found if now is not p.want and type(now) is type(p.want) and blinds.fits(now)]
    names = [p.path for p, now in found if type(now) is not torch.Tensor or now.requires_grad]  # others are followed
    users = [code for code in ran if code is not None and not code.co_filename.startswith(NOT_USER_CODE)]
    if not names or any(map(blinds.tells_apart, users)):
        return None
    known.update(dict.fromkeys(names, True))
    return errors.follows(names[0])
