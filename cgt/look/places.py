"""Where a function's answer can come from, besides the tensors that it is given.

A replay runs no Python, so a number in a closure, a global, `self.scale` or `group["lr"]` is baked
into the recording. Before a recording, `find_places` walks from the function to everything that
the code can read that ran so far (impure.code_of_function), and writes down each place with the value found there:

    function ── code ──► names that it reads ─┐
        │                                     ▼
        └─ cells, globals, defaults ──► objects ── entries under those names ──► more objects,
                                          │                                      more functions
                                          └─ their classes ── methods under those names ──►┘

What code reads is worked out once for each code object (code.py). Other code can only run if a value changes that this
code reads; if it does in a recording, that is thrown away, and the next one knows it. A name is matched against
every object, because bytecode does not say whose attribute it is; so `self.steps` is a place only
if code that ran names a `.steps`, and then every object that has one is guarded. Strings are names, too
(`getattr(self, key)`): they come as they are met, and what was opened before is asked again for them. A name that
code only stores (`self.last = loss`) is one, too: after the run its place tells what a replay would not
do; and so do the sizes of all that was opened, where a name was not there before. What Python runs without a
name in the bytecode (special methods, setters) counts wherever a class of the user's has it.

torch, numpy and the standard library are *ambient*: their globals are not walked. Only the instances that carry a
user's state are: modules, optimizers, schedulers, gradient scalers; of tensors their hooks, where a backward runs.

No user code runs here, but for what tells what a tensor subclass is made of (wrappers.py): attributes are looked up in
dicts and class dicts, never with getattr, and subclasses are asked with issubclass of a real type, never isinstance
(`__class__` can be faked)."""

import argparse
import collections
import contextvars
import functools
import gc
import math
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Container, Iterable
from typing import Any, NamedTuple

import cgt_core as core
import torch
from cgt_core import ATTR, CELL, DICT_ITEM, DICT_LEN, EMPTY, LIST_ITEM, LIST_LEN, NAMES_ABSENT, TYPE_ATTR
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

from ..data import maker_of
from ..run.taps import is_reader
from ..words import private, wrappers
from ..words.private import SHARDED_FIELDS, SHARDED_KINDS, SHARDED_PARAMETER, is_sharded_module, knows_sharding
from ..words.pytree import is_fixed
from . import blinds, containers
from .bytecode import ENTRY
from .code import HOMES, KERNELS, code_reads, family, is_ambient, parts_of

MISSING, value_at = core.MISSING, core.value_at
DICTS = frozenset(map(id, (dict, collections.defaultdict, collections.OrderedDict)))  # a metaclass may have its own ==
MOST_ENTRIES = 4096  # a larger container is data rather than settings: its entries are not guarded


class Place(NamedTuple):
    kind: int  # PlaceKind
    home: Any  # where it is: a dict, cell, list, type or object; kept alive by this row
    key: Any  # dict key, list index, attribute name; None for CELL and *_LEN
    want: Any  # what is there now; an int for *_LEN; TYPE_ATTR: the raw entry of the class dict;
    # EMPTY: one like it
    path: str  # for messages: model.layers.0.weight, opt.param_groups[0]['lr']


class Put(NamedTuple):
    """A place that the code only stores to, or to whose list it only appends."""

    where: str  # as of flow.Advance
    name: str
    owner: Any  # whose attribute it is; or None
    place: Place  # LIST_LEN of the list that is appended to


HOLD_NUMBERS = (DICT_ITEM, CELL, LIST_ITEM, ATTR)  # kinds of places in which a number can lie
new_place = functools.partial(tuple.__new__, Place)  # what Place(...) does, in a third of the time


class Found(NamedTuple):
    """What find_places found."""

    places: list  # of Place, without duplicates
    notes: list  # sentences about what could not be guarded
    tensors: list  # (path, tensor) of every tensor met, in places or in what cannot change
    sizes: list  # (path, dict, how many entries it has) of what attributes could come to
    sources: list  # (path, object) of what gives another value each time: see is_source
    # id of an object's __dict__ -> the object; None for a dict or list that was met elsewhere than at one place
    owners: dict
    scripted: list  # paths of modules of TorchScript, whose parameters and attributes lie in C++
    passed: set  # code objects of functions that were met and not looked at, since they did not run
    kept: list  # of Put
    hidden: list  # positions of places in which a blind lies while the function is recorded
    rows: set  # paths of places with lists or dicts that are compared as tuples are, by what is in them
    shared: set  # ids of tensors and containers that were met more than once
    taken_over: list  # paths of modules whose parameters fully_shard has spread
    sharded: list  # (path, what it keeps of a parameter; None: this release keeps something else)


class Walk(NamedTuple):
    """The containers that one call of find_places fills; the objects in `seen` stay alive so that
    their ids stay theirs."""

    found: Found
    known: set  # (kind, id of home, key) of each place
    seen: dict  # id -> object, everything visited
    todo: collections.deque  # (rule, object, path): first in first out gives the shortest paths
    open: list  # (reader, object, path): what has to be asked again when the names grow
    names: dict  # every name that may be read, in order of arrival
    probed: dict  # names that code asks for with getattr or hasattr: their absence is an answer
    stored: dict  # names of attributes that code stores or deletes
    rules: dict  # id of type -> the rule of RULES for it
    dicts: dict  # id of type -> what gives its instances' __dict__, or None
    layers: dict  # id of class -> its class dicts that count, see layers_of
    hits: dict  # this round's (id of class, id of names) -> what the class has under the names
    ran: set | None  # code objects that count; None: all
    keeps: Any  # (where, name, owner, value) -> what the code that ran only does under this name: see moving.keeper
    hidden: Any  # paths of those in which a blind lies while the function is recorded (blinds.py)
    renewed: Any  # paths of places to which calls bring other lists or dicts of tensors
    named: dict  # id of a dict -> ((where, name), owner) of the place that leads to it


def find_places(
    function: Callable[..., object], roots: Iterable[tuple[str, object]] = (),
    ran: set[types.CodeType] | None = None, arguments: Iterable[tuple[str, torch.Tensor]] = (),
    most: float | None = None, keeps: Callable[[str, str, object, object], str | None] | None = None,
    hidden: Iterable[str] = (), renewed: Container[str] = (),
) -> Found | None:  # fmt: skip
    """All places from which `function` can read or in which it can store, and what else there is in Found; or
    None if there are more than `most` places.

    `roots`: (path, object) of what comes with the arguments and is neither a tensor nor a plain value. `ran`: code
    objects; only what these read counts. That is enough for a run in which no other code ran: to get to another one, a
    value must change that these read. To it come those that a backward will run. None: what any code reads to which the
    function leads. `arguments`: (path, tensor) of those that are given, of which only the hooks count. `keeps`,
    `hidden`, `renewed`: see Walk."""
    found = maker_of(Found)()
    walk = Walk(found, set(), {}, collections.deque(), [], {}, {}, {}, {}, {}, {}, {}, ran, keeps, hidden, renewed, {})
    most = math.inf if most is None else most
    # Thousands of places are no garbage, and a finalizer could change what is looked at.
    return core.within(collector_off(), lambda: look_everywhere(walk, function, roots, arguments, most))


IS_ENABLED = gc.isenabled


def collector_off() -> list[tuple[Callable[[], object], Callable[[], object]]]:
    """[bracket, ...]: no garbage is collected. The function, which may ask whether it is, hears what was before."""
    told = functools.partial(setattr, gc, "isenabled")
    off: list = [(gc.disable, gc.enable), (functools.partial(told, lambda: True), functools.partial(told, IS_ENABLED))]
    return off if IS_ENABLED() else []


def look_everywhere(walk, function, roots, arguments, most):
    walk.names.update(dict.fromkeys(ALWAYS_READ))
    for code in sorted(walk.ran or (), key=lambda code: (code.co_filename, code.co_firstlineno)):
        read_code(walk, code)
    visit(walk, function, function.__name__ if type(function) is types.FunctionType else "self")
    for path, thing in roots:
        visit(walk, thing, path)
    walk.open.extend((read_argument, tensor, path) for path, tensor in arguments)
    asked = [0, 0]
    if not open_all(walk, asked, most) or (walk_strangers(walk) and not open_all(walk, asked, most)):
        return None
    guard_absences(walk)
    measure(walk)
    return walk.found


def open_all(walk, asked_before, most):
    """Until nothing new is found. False: there are too many places. `asked_before`: how many readers were, and for how
    many names."""
    n_open, n_names = asked_before
    while walk.todo or n_open < len(walk.open) or n_names < len(walk.names):
        while walk.todo:
            rule, thing, path = walk.todo.popleft()
            rule(walk, thing, path)
            if len(walk.found.places) > most:
                return False
        names = frozenset(walk.names)
        fresh = frozenset(list(walk.names)[n_names:])
        walk.hits.clear()
        asked, n_open, n_names = n_open, len(walk.open), len(walk.names)
        for row in range(0 if fresh else asked, n_open):
            reader, thing, path = walk.open[row]
            reader(walk, thing, path, fresh if row < asked else names)
            if len(walk.found.places) > most:
                return False
    asked_before[:] = n_open, n_names
    return True


def walk_strangers(walk):
    """Code that ran and to which nothing led: an object of C's had the function (a deque, a weak reference), or it was
    looked up by its name. What it reads of its module is read all the same. Was there any?"""
    if walk.ran is None:
        return False
    known = {id(one.__code__) for one in walk.seen.values() if type(one) is types.FunctionType}
    met = {inner for code in walk.ran if id(code) in known for inner in family(code)}
    strange = [code for code in walk.ran - met - KERNELS if not code.co_filename.startswith(HOMES)]
    scopes = [getattr(module, "__dict__", {}) for module in list(sys.modules.values())] if strange else []
    files = {scope.get("__file__"): scope for scope in scopes if not is_ambient(scope.get("__name__"))}
    strange = [code for code in strange if code.co_filename in files]
    for code in sorted(strange, key=lambda code: (code.co_filename, code.co_firstlineno)):
        walk_globals(walk, files[code.co_filename], code_reads(code))
    return bool(strange)


# What a visit does with an object is the rule for its type, in the table at the end.


def visit(walk, thing, path, at_place=False):
    cls = type(thing)
    if not at_place and (cls is list or id(cls) in DICTS):
        walk.found.owners[id(thing)] = None
    rule = walk.rules.get(id(cls), MISSING)
    if rule is MISSING:
        rule = walk.rules[id(cls)] = rule_for(cls)
    if rule is None:
        return
    if id(thing) not in walk.seen:
        walk.seen[id(thing)] = thing
        walk.todo.append((rule, thing, path))
    elif rule in HELD:
        walk.found.shared.add(id(thing))


def add(walk, kind, home, key, want, path):
    # other keys by identity: a key's own __hash__ and __eq__ may be a user's code
    mark = (kind, id(home), key if type(key) is str or type(key) is int else id(key))
    if mark not in walk.known:
        walk.known.add(mark)
        walk.found.places.append(new_place((kind, home, key, want, path)))


def add_and_visit(walk, kind, home, key, value, path):
    add(walk, kind, home, key, value, path)
    there = containers.opened(value) if path in walk.renewed and id(value) not in walk.seen else None
    if there is not None and there.changes:
        walk.found.rows.add(path)
        walk_row(walk, value, path)
    else:
        visit(walk, value, path, at_place=True)


def walk_row(walk, row, path):
    """A container that is compared by its tensors alone. What leads to it otherwise finds that it was met."""
    if id(row) in walk.seen:
        walk.found.shared.add(id(row))
    walk.seen[id(row)] = row
    holders, names, entries = containers.parts_held(row)
    walk_class(walk, type(row), path)
    step = "[{!r}]" if len(holders) == 1 else ".{}"
    for name, one in zip(names or range(len(entries)), entries, strict=True):
        if not is_fixed(one):
            (visit if issubclass(type(one), torch.Tensor) else walk_row)(walk, one, path + step.format(name))


def is_kept(walk, kind, home, key, value, path, where, owner, name=None):
    """Does the code only store there, or append to what is there? Then what is there is looked at by nobody."""
    if path in walk.hidden and blinds.fits(value):
        at = len(walk.found.places)
        add(walk, kind, home, key, value, path)
        walk.found.hidden.extend(range(at, len(walk.found.places)))
        return True
    name = name or (path if kind == CELL else key)
    how = walk.keeps(where, name, owner, value) if walk.keeps is not None else None
    if how == "append":
        add(walk, kind, home, key, value, path)
    place = Place(LIST_LEN, value, None, len(value), path) if how == "append" else Place(kind, home, key, value, path)
    mark = ("kept", id(value)) if how == "append" else ("kept", id(home), name)
    if how is not None and mark not in walk.known:
        walk.known.add(mark)
        walk.found.kept.append(Put(where, name, owner, place))
    if walk.keeps is not None and id(type(value)) in DICTS:
        walk.named[id(value)] = (where, name), owner
    return how is not None


def is_kept_entry(walk, entries, key, value, path):
    """The same of an entry of a dict in `walk.named`, by a key that code may name."""
    container, owner = walk.named[id(entries)]
    is_named = is_simple(key) and (type(value) is list or id(type(value)) in DICTS)
    return is_named and is_kept(walk, DICT_ITEM, entries, key, value, path, ENTRY, owner, (container, key))


def is_simple(key: object) -> bool:
    return type(key) is str or type(key) is int  # not `in`: that is a metaclass's __eq__


# Code and functions.


def read_code(walk, code):
    reads = code_reads(code)
    walk.names.update(reads.names)
    walk.probed.update(reads.probed)
    walk.stored.update(reads.stored)
    return reads


def walk_function(walk, function, path):
    scope = function.__globals__
    # both: a decorator of torch.no_grad() has torch's globals and, by functools.wraps, the user's
    # module name; the user's function is then in its closure
    ambient = is_ambient(scope.get("__name__"))
    if ambient and is_ambient(function.__module__):
        walk_ambient_function(walk, function, path)
        return
    add(walk, ATTR, function, "__code__", function.__code__, f"{path}.__code__")
    for key in ("__defaults__", "__kwdefaults__"):
        value = getattr(function, key)
        if value is not None:
            add_and_visit(walk, ATTR, function, key, value, f"{path}.{key}")
    if not ambient:
        walk.open.append((read_attributes, function, path))
    if not (ambient or walk.ran is None or function.__code__ in walk.ran):
        walk.found.passed.update(family(function.__code__))
        return
    reads = read_code(walk, function.__code__)
    walk_cells(walk, function, reads.cells)
    if ambient:
        visit(walk, dict_of(function).get("registry"), f"{path}.registry")  # of functools.singledispatch
    else:
        walk_globals(walk, scope, reads)


def walk_ambient_function(walk, function, path):
    """A function that is wholly torch's or Python's: it may run a backward, or hold the optimizer of a scheduler."""
    if function in RUN_BACKWARD:
        walk.names["backward"] = None
    # A scheduler puts a wrapper around its optimizer's step, which has that weakly.
    for reference in [value_at(Place(CELL, cell, None, None, path)) for cell in function.__closure__ or ()]:
        if type(reference) is weakref.ref and issubclass(type(reference()), torch.optim.Optimizer):
            visit(walk, reference(), path)


def walk_cells(walk, function, names):
    """The variables with these names that the function has of outer functions."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name in names and name != "__class__":  # that is super()'s, it never changes
            try:
                value = cell.cell_contents
            except ValueError:  # the variable has no value yet
                value = MISSING
            if not is_kept(walk, CELL, cell, None, value, name, "variable", None):
                add_and_visit(walk, CELL, cell, None, value, name)


def walk_globals(walk, scope, reads):
    """What code reads of its globals, `scope`, and the modules that it imports."""
    for name in reads.globals:
        value = scope.get(name, MISSING)  # of a builtin, too: a global that comes later hides it
        if not is_kept(walk, DICT_ITEM, scope, name, value, name, "global", None):
            add_and_visit(walk, DICT_ITEM, scope, name, value, name)
    for name in reads.imports:  # absolute, or relative to the function's package
        for full_name in (name, f"{scope.get('__package__')}.{name}".rstrip(".")):
            visit(walk, sys.modules.get(full_name), full_name)


def walk_method(walk, method, path):
    visit(walk, method.__self__, path if path == "self" else f"{path}.__self__")
    visit(walk, getattr(method, "__func__", None), path)  # a builtin's method has none


def walk_partial(walk, partial, path):
    visit(walk, partial.func, path)
    visit(walk, partial.args, f"{path}.args")
    visit(walk, partial.keywords, f"{path}.keywords")
    walk_subclass(walk, partial, path)


def walk_wrapper(walk, wrapper, path):
    visit(walk, unwrapped(wrapper), path)


def walk_property(walk, found, path):
    for accessor in (property.fget, property.fset, property.fdel):
        visit(walk, accessor.__get__(found), path)


def unwrapped(thing):
    """What is inside staticmethod, property, lru_cache and the like; the thing itself if none."""
    for cls, attribute in WRAPPERS:
        if issubclass(type(thing), cls):
            try:
                return unwrapped(object.__getattribute__(thing, attribute))
            except (AttributeError, RecursionError):  # made without its __init__, or a ring
                return None
    return thing


def is_method(raw):
    return type(unwrapped(raw)) is types.FunctionType


def runs_unnamed(members, name, raw):
    """Is this entry of a class dict code that Python runs where no bytecode loads its name? Special methods,
    and what sets or deletes an attribute."""
    if type(name) is str and name[:2] == "__" == name[-2:]:
        is_code = is_method(raw) or class_value(type(raw), "__call__") is not MISSING
        return is_code and name not in NOT_IN_CALLS and not is_generated(members, raw)
    if type(raw) is property:
        return raw.fset is not None or raw.fdel is not None
    return not is_builtin_descriptor(raw) and class_value(type(raw), "__set__") is not MISSING


def is_generated(members, raw):
    """Did dataclasses or attrs write this method? Most of those read every field."""
    function = unwrapped(raw)
    if type(function) is not types.FunctionType or members.keys().isdisjoint(MARKS_OF_GENERATED):
        return False
    body = vars(function).get("__wrapped__", function)
    return type(body) is types.FunctionType and body.__code__.co_filename[:1] == "<"


def is_builtin_descriptor(raw: object) -> bool:
    return issubclass(type(raw), core.BUILTIN_DESCRIPTORS)


def walk_text(walk, text, path):
    # of a subclass, too, a plain one: getattr(self, name) with this name
    walk.names.update(dict.fromkeys(parts_of(str.__str__(text))))
    walk_subclass(walk, text, path)


# Containers. Methods of the builtin type are called, not the object's own: a subclass may override.


def walk_list(walk, entries, path):
    size = list.__len__(entries)
    add(walk, LIST_LEN, entries, None, size, f"len({path})")
    if not is_too_large(walk, size, path):
        for index, value in enumerate(list.__iter__(entries)):
            add_and_visit(walk, LIST_ITEM, entries, index, value, f"{path}[{index}]")
    walk_subclass(walk, entries, path)


def walk_dict(walk, entries, path):
    size, is_named = dict.__len__(entries), id(entries) in walk.named
    add(walk, DICT_LEN, entries, None, size, f"len({path})")
    if not is_too_large(walk, size, path):
        for index, (key, value) in enumerate(list(dict.items(entries))):
            # no repr of other keys: a tensor's would read the device
            text = repr(key) if is_simple(key) else f"<{NAME_OF(type(key))} {index}>"
            path_of = f"{path}[{text}]"
            if not (is_named and is_kept_entry(walk, entries, key, value, path_of)):
                add_and_visit(walk, DICT_ITEM, entries, key, value, path_of)
    if derives(type(entries), (collections.defaultdict,)):
        factory = f"{path}.default_factory"
        add_and_visit(walk, ATTR, entries, "default_factory", entries.default_factory, factory)
    walk_subclass(walk, entries, path)


def walk_tuple(walk, entries, path):  # cannot change, its entries can
    if not is_too_large(walk, tuple.__len__(entries), path):
        for index, value in enumerate(tuple.__iter__(entries)):
            visit(walk, value, f"{path}[{index}]")
    walk_subclass(walk, entries, path)


def walk_around_builtin(walk, entries, path):  # in an attribute of its own
    own = dict_of(entries) or {}
    for field in ("data", "maps"):
        if field in own:
            add_and_visit(walk, DICT_ITEM, own, field, own[field], f"{path}.{field}")
    walk_subclass(walk, entries, path)


def walk_proxy(walk, proxy, path):
    visit(walk, behind_proxy(proxy), path)


def behind_proxy(proxy):
    """The mapping that a read-only one, or a view, shows."""
    (mapping,) = gc.get_referents(proxy)
    return mapping


def walk_opaque(walk, entries, path):
    cls = type(entries)  # of which only the builtin ones may be asked for their length
    if not any(cls is builtin for builtin in OPAQUE) or len(entries):
        walk.found.notes.append(f"{path} is a {NAME_OF(cls)}: guarded by identity, not by its contents.")
    walk_subclass(walk, entries, path)
    kind: Any = next((kind for kind in (set, collections.deque) if derives(cls, (kind,))), None)
    small = kind is not None and kind.__len__(entries) <= MOST_ENTRIES
    inside = [entries()] if cls is weakref.ref else list(kind.__iter__(entries)) if small else []
    # Which ones they are is not guarded; what objects and functions among them hold is.
    kinds = {id(type(one)): type(one) for one in inside}
    held = {k for k, one in kinds.items() if rule_for(one) in (walk_instance, walk_function, walk_method)}
    for value in [one for one in inside if id(type(one)) in held]:
        visit(walk, value, f"an entry of {path}")


def walk_source(walk, source, path):
    walk.found.sources.append((path, source))
    walk_subclass(walk, source, path)


def is_random(cls: type) -> bool:
    """Is this the class of a random generator, Python's or numpy's?"""
    return derives(cls, (random.Random,)) or any(kind_of(base) in RANDOM for base in MRO_OF(cls))


def is_source(cls: type) -> bool:
    """Does an object of this class give another value each time, which no place shows? Iterators are, but for a
    user's own in Python."""
    owners = [base for base in MRO_OF(cls) if has(base, "__next__")]
    return is_random(cls) or any(
        is_ambient(MODULE_OF(base)) or not is_method(CLASS_DICT_OF(base)["__next__"]) for base in owners
    )


def is_too_large(walk, size, path):
    if size > MOST_ENTRIES:
        walk.found.notes.append(
            f"{path} has {size} entries, more than {MOST_ENTRIES}: guarded by identity and length, not by its entries."
        )
    return size > MOST_ENTRIES


def walk_subclass(walk, thing, path):
    if not is_ambient(MODULE_OF(type(thing))):
        walk_instance(walk, thing, path)


# Objects, classes and Python modules: which entries matter depends on the names, so they are
# opened, and find_places has their reader look for each new name.


def walk_instance(walk, thing, path):
    layers_of(walk, type(thing))
    walk.open.append((read_instance, thing, path))


def read_instance(walk, thing, path, names):
    own = own_dict(walk, thing)
    if own is not None:
        read_dict(walk, own, path, names, thing)
    for name, raw in class_hits(walk, type(thing), names):
        if type(raw) is types.MemberDescriptorType:  # __slots__
            try:
                value = raw.__get__(thing)
            except AttributeError:
                value = MISSING
            add_and_visit(walk, ATTR, thing, name, value, f"{path}.{name}")
        elif not is_builtin_descriptor(raw):
            # Python looks for implicit methods and properties on the class alone
            hidden = own is not None and name in own  # type(self).name is read past the object's own
            if own is not None and not hidden and type(raw) is not property and name[:2] != "__":
                add(walk, DICT_ITEM, own, name, MISSING, f"{path}.{name}")
            if not is_method(raw):
                add_class_value(walk, type(thing), name, raw, f"type({path}).{name}" if hidden else f"{path}.{name}")


def read_dict(walk, own, path, names, owner=None):
    for name in [] if names.isdisjoint(own) else [name for name in own if name in names]:
        path_of = f"{path}.{name}"
        if owner is None or not is_kept(walk, DICT_ITEM, own, name, own[name], path_of, "attribute", owner):
            add_and_visit(walk, DICT_ITEM, own, name, own[name], path_of)


def read_attributes(walk, thing, path, names):
    """Of a function or a Python module."""
    read_dict(walk, dict_of(thing), path, names)


def dict_of(thing: object) -> dict[str, Any] | None:
    """The object's `__dict__`, by the descriptor of the builtin type and not by a user's."""
    getter = dict_getter(type(thing))
    return getter and getter(thing)


def dicts_of_owners(found: Found) -> list[dict[str, Any]]:
    """The attributes of the objects that were met."""
    owned = [dict_of(owner) for owner in found.owners.values() if not isinstance(owner, types.ModuleType)]
    return [home for home in owned if home is not None]


def dict_getter(cls):
    descriptor = class_value(cls, "__dict__")
    return descriptor.__get__ if is_builtin_descriptor(descriptor) else None


def own_dict(walk, thing):
    """dict_of, asked once for each class."""
    cls = type(thing)
    if id(cls) not in walk.dicts:
        walk.dicts[id(cls)] = dict_getter(cls)
    getter = walk.dicts[id(cls)]
    return getter and getter(thing)


def layers_of(walk, cls):
    """The (class, class dict, is ambient) of the MRO that carry a user's code or a module's state;
    the first time, opens them for their methods."""
    layers = walk.layers.get(id(cls))
    if layers is None:
        layers = walk.layers[id(cls)] = [
            (base, CLASS_DICT_OF(base), ambient)
            for base in MRO_OF(cls)
            for ambient in [is_ambient(MODULE_OF(base))]
            if base is not torch.nn.Module and (not ambient or issubclass(base, STATEFUL))
        ]
        for members in [members for _, members, ambient in layers if not ambient]:
            unnamed = [name for name, raw in members.items() if runs_unnamed(members, name, raw)]
            walk.names.update(dict.fromkeys(unnamed))
        if layers:
            walk.open.append((read_methods, cls, NAME_OF(cls)))
    return layers


def class_hits(walk, cls, names):
    key = (id(cls), id(names))
    if key not in walk.hits:
        walk.hits[key] = {
            name: class_value(cls, name) for _, members, _ in layers_of(walk, cls) for name in members if name in names
        }.items()
    return walk.hits[key]


def has(cls, name):
    return name in CLASS_DICT_OF(cls)


def read_methods(walk, cls, path, names):
    for name, found in class_hits(walk, cls, names):
        for base, members, ambient in layers_of(walk, cls):
            raw = members.get(name)
            if not is_method(raw) or (ambient and name[:2] == "__"):
                continue
            # what cls finds, and what super() finds behind it
            add(walk, TYPE_ATTR, cls if raw is found else base, name, raw, f"{path}.{name}")
            if not ambient:
                visit(walk, raw, f"{path}.{name}")
                continue
            function = unwrapped(raw)  # read for what it wants of its instance, but not entered
            body = vars(function).get("__wrapped__", function)
            if walk.ran is None and type(body) is types.FunctionType:
                read_code(walk, body.__code__)


def walk_class(walk, cls, path):
    if not is_ambient(MODULE_OF(cls)):
        layers_of(walk, cls)
        walk.open.append((read_class, cls, path))


def read_class(walk, cls, path, names):
    if walk.ran is not None and derives(cls, (torch.autograd.Function,)):
        backward = unwrapped(class_value(cls, "backward"))
        walk.ran.update(family(backward.__code__) if type(backward) is types.FunctionType else ())
    read_methods(walk, cls, path, CALLED_BY_CLASS)
    for name, raw in class_hits(walk, cls, names):
        if not is_method(raw) and not is_builtin_descriptor(raw):
            add_class_value(walk, cls, name, raw, f"{path}.{name}")


def add_class_value(walk, cls, name, found, path):
    """What the class finds under the name, and what super() finds behind that."""
    add_and_visit(walk, TYPE_ATTR, cls, name, found, path)
    for base, members, ambient in layers_of(walk, cls):
        raw = members.get(name, found)
        if raw is not found and not (ambient or is_method(raw) or is_builtin_descriptor(raw)):
            add_and_visit(walk, TYPE_ATTR, base, name, raw, f"{NAME_OF(base)}.{name}")


def walk_python_module(walk, module, path):
    own = dict_of(module) or {}
    name = own.get("__name__")
    if not is_ambient(name):
        walk.open.append((read_attributes, module, path))
    elif name.partition(".")[0] == "torch":
        walk.open.append((read_torch, module, path))


def read_torch(walk, module, path, names):
    """Functions of torch that somebody may replace; what else changes there is torch's own affair."""
    own = dict_of(module)
    for name, value in [(name, own[name]) for name in names if name in own]:
        if is_reader(value):
            continue  # looked up where it is called, it is tapped
        if any(type(value) is kind for kind in (types.FunctionType, types.BuiltinFunctionType, type)):
            add_and_visit(walk, DICT_ITEM, own, name, value, f"{path}.{name}")
        elif issubclass(type(value), types.ModuleType):
            visit(walk, value, f"{path}.{name}")


def guard_absences(walk):
    """hasattr(self, "ema") was false: that is a value too. Last, as an absence leads nowhere. What code stores has a
    place of its own."""
    of_class = {}
    for reader, thing, path in list(walk.open):
        if reader not in OPENED or (reader is read_attributes and not dict_of(thing)):
            continue
        own, cls = (None, thing) if reader is read_class else (own_dict(walk, thing), type(thing))
        if id(cls) not in of_class:
            of_class[id(cls)] = [name for name in walk.probed if class_value(cls, name) is MISSING]
            for base, members, ambient in layers_of(walk, cls) if of_class[id(cls)] else ():
                if not ambient:  # an attribute may come to the class, too
                    entries = behind_proxy(members)
                    add(walk, DICT_LEN, entries, None, len(entries), f"len({NAME_OF(base)}.__dict__)")
        names = [name for name in of_class[id(cls)] if name not in own] if own is not None else []
        for name in [name for name in names if name in walk.stored]:
            add(walk, DICT_ITEM, own, name, MISSING, f"{path}.{name}")
        absent = tuple(name for name in names if name not in walk.stored)
        if absent:
            add(walk, NAMES_ABSENT, own, absent, MISSING, f"an attribute of {path}")


def measure(walk):
    """An attribute that comes to something while the function runs would not come at a replay, and there
    is no place for it."""
    layers = [layer for found in walk.layers.values() for layer in found]
    opened = [(path, own_dict(walk, thing)) for reader, thing, path in walk.open if reader in OPENED]
    owned = [thing for reader, thing, _ in walk.open if reader in (read_instance, read_attributes)]
    for thing in [thing for thing in owned if type(thing) is not types.FunctionType]:
        own = own_dict(walk, thing)
        if walk.found.owners.setdefault(id(own), thing) is not thing:
            walk.found.owners[id(own)] = None
    opened += [(NAME_OF(cls), behind_proxy(members)) for cls, members, ambient in layers if not ambient]
    walk.found.sizes.extend((path, own, len(own)) for path, own in opened if own is not None)


def find_grown(sizes: list[tuple[str, dict | types.MappingProxyType, int]]) -> str | None:
    """The path of the attribute that came to one of these dicts since, or None."""
    for path, own, size in sizes:
        if len(own) > size:
            return f"{path}.{next(reversed(own))}"
    return None


# Tensors: their contents are followed by the recording. Their hooks are code of a backward, so they
# matter where code names one. A hook cannot come to a tensor without a new RemovableHandle: places of
# hooks are compared only if the dict of that class changed.


def walk_tensor(walk, tensor, path):
    walk.found.tensors.append((path, tensor))
    made_of_others = wrappers.is_one(tensor)
    for name, one in wrappers.inside(tensor) if made_of_others else ():
        own = dict_of(tensor) or {}
        at = (DICT_ITEM, own) if name in own else (ATTR, tensor)  # else it is a slot
        add_and_visit(walk, *at, name, one, f"{path}.{name}")
    if (id(type(tensor)) in PLAIN_TENSORS or made_of_others) and tensor.requires_grad:
        walk.open.append((read_tensor, tensor, path))
    if made_of_others:
        walk_subclass(walk, tensor, path)


def read_tensor(walk, tensor, path, names):
    if not NAMES_OF_BACKWARD.isdisjoint(names):
        for field in TENSOR_HOOKS:
            add_and_visit(walk, ATTR, tensor, field, getattr(tensor, field), f"{path}.{field}")


def read_argument(walk, tensor, path, names):
    if not tensor.is_leaf or not tensor.requires_grad or NAMES_OF_BACKWARD.isdisjoint(names):
        return
    if any(getattr(tensor, field) for field in TENSOR_HOOKS):
        visit(walk, tensor, path)  # another tensor would have other hooks: it must be this one
    read_tensor(walk, tensor, path, names)


def told_by(place: Place) -> dict | None:
    """The dict without whose change the place holds what it held, or None: to be compared at each call."""
    if place.kind in (DICT_ITEM, DICT_LEN, NAMES_ABSENT):
        return place.home
    is_hook = place.kind == ATTR and place.key in TENSOR_HOOKS
    return HANDLES if is_hook and issubclass(type(place.home), torch.Tensor) else None


# torch's own bearers of state. Their entries matter without being named.


def walk_module(walk, module, path):
    own = own_dict(walk, module) or {}
    if derives(type(module), (torch.jit.ScriptModule,)):
        walk.found.scripted.append(path)
        return
    for field in ("_parameters", "_buffers", "_modules"):
        entries = own.get(field)
        if issubclass(type(entries), dict):
            add(walk, DICT_ITEM, own, field, entries, f"{path}.{field}")
            size = dict.__len__(entries)
            add(walk, DICT_LEN, entries, None, size, f"len({path}.{field})")
            for name, value in list(dict.items(entries)):
                add_and_visit(walk, DICT_ITEM, entries, name, value, f"{path}.{name}")
    walk_hooks(walk, own, MODULE_HOOKS, path)
    if is_sharded_module(type(module)):
        walk.found.taken_over.append(path)
    visit(walk, torch.nn.functional, "torch.nn.functional")  # in which torch's modules look their functions up
    if id(GLOBAL_HOOKS) not in walk.seen:
        walk.seen[id(GLOBAL_HOOKS)] = GLOBAL_HOOKS
        walk_hooks(walk, vars(torch_module), GLOBAL_HOOKS, "torch.nn.modules.module")
    walk_instance(walk, module, path)


def walk_parallel(walk, module, path):  # DistributedDataParallel makes these anew before it reads them
    walk.known.update(
        (DICT_ITEM, id(own_dict(walk, module)), name) for name in ("modules_buffers", "named_module_buffers")
    )
    walk_module(walk, module, path)


def walk_sharded(walk, one, path):
    """What fully_shard keeps beside a module: settings, and what is under way, which is nothing between two steps."""
    own, is_parameter = dict_of(one) or {}, kind_of(type(one)) == SHARDED_PARAMETER
    if is_parameter or not own:
        walk.found.sharded.append((path, one if own and knows_sharding(one) else None))
    for name in [name for name in own if not is_parameter or name in SHARDED_FIELDS]:
        add(walk, DICT_ITEM, own, name, own[name], f"{path}.{name}")
        if not is_parameter and not issubclass(type(own[name]), (torch.Tensor, torch.nn.Module, tuple)):
            visit(walk, own[name], f"{path}.{name}", at_place=True)
    whole = own.get(private.UNSHARDED) if is_parameter else None
    if whole is not None:  # a step without exchange leaves its gradient there
        add_and_visit(walk, ATTR, whole, "grad", whole.grad, f"{path}.{private.UNSHARDED}.grad")


def walk_optimizer(walk, optimizer, path):
    own = dict_of(optimizer) or {}
    reads_state = walk.ran is None or not private.READS_STATE.isdisjoint(walk.ran)
    for field in ("param_groups", "state") if reads_state else ("param_groups",):  # load_state_dict replaces both
        if field in own:
            add_and_visit(walk, DICT_ITEM, own, field, own[field], f"{path}.{field}")
    walk_hooks(walk, own, OPTIMIZER_HOOKS, path)
    walk_hooks(walk, vars(torch_optimizer), GLOBAL_OPTIMIZER_HOOKS, "torch.optim.optimizer")
    walk_instance(walk, optimizer, path)


def walk_hooks(walk, own, fields, path):
    for field in fields:
        hooks = own.get(field, MISSING)
        if type(hooks) is collections.OrderedDict and not hooks:  # as nearly always
            add(walk, DICT_LEN, hooks, None, 0, f"len({path}.{field})")
        elif hooks is not MISSING:
            visit(walk, hooks, f"{path}.{field}")


MODULE_HOOKS = (  # how they want to be called is told when they are put there
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
GLOBAL_HOOKS = (
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks",
)  # fmt: skip
OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
GLOBAL_OPTIMIZER_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
NAMES_OF_BACKWARD = frozenset(("backward", "grad"))
RUN_BACKWARD = (torch.autograd.backward, torch.autograd.grad)


def differs(place: Place, is_same: Callable[[Any, Any], bool]) -> bool:
    """Does it not hold what it held when it was found, nor something for which `is_same(then, now)`?"""
    if place.kind in (DICT_LEN, LIST_LEN):
        return len(place.home) != place.want
    if place.kind == EMPTY:
        return False
    now, emptiable = value_at(place), type(place.want) in EMPTIABLE
    if now is place.want or (emptiable and is_same_empty(now, place.want)):
        return False
    return not is_same(place.want, now)


def find_changed(
    found: Iterable[Place], is_same: Callable[[Any, Any], bool], moving: Container[int] = ()
) -> Place | None:
    """The first place that differs, but for those whose positions are `moving`; or None."""
    return next((place for k, place in enumerate(found) if k not in moving and differs(place, is_same)), None)


def is_as_found(place: Place) -> bool:
    """Does it hold the very object that was found, or the list as many?"""
    return len(place.home) == place.want if place.kind == LIST_LEN else value_at(place) is place.want


def as_now(place: Place) -> Place:
    """The place with what it holds now."""
    return place if place.kind == EMPTY else place._replace(want=value_at(place))


def differing(found: Iterable[Place], is_same: Callable[[Any, Any], bool]) -> tuple[list[Place], bool]:
    """([place that holds something else than it did], is there more that differs: a length?)."""
    changed = [p for p in found if differs(p, is_same)]
    singles = [p for p in changed if p.kind not in (DICT_LEN, LIST_LEN)]
    return singles, len(singles) < len(changed)


def put_back(place: Place) -> None:
    """Let the place hold again what it held when it was found."""
    home, key, want = place[1:4]
    if place.kind == NAMES_ABSENT:
        for name, value in zip(key, [MISSING] * len(key) if want is MISSING else want, strict=True):
            if value is not MISSING or name in home:
                put_back(Place(DICT_ITEM, home, name, value, ""))
        return
    if place.kind == TYPE_ATTR:
        put_back_in_class(home, key, want)
    elif place.kind in (LIST_ITEM, DICT_ITEM):
        if want is MISSING:
            del home[key]
        elif place.kind == DICT_ITEM or key < len(home):
            home[key] = want
    else:
        descriptor = class_value(type(home), "cell_contents" if place.kind == CELL else key)
        descriptor.__delete__(home) if want is MISSING else descriptor.__set__(home, want)


def put_back_in_class(cls, name, want):
    """The class or one of its bases has another value, or has one in front of the wanted one."""
    owner = next((base for base in MRO_OF(cls) if has(base, name)), cls)
    if has(owner, name):
        type.__delattr__(owner, name)
    if want is not MISSING and class_value(cls, name) is not want:
        type.__setattr__(owner, name, want)


def class_value(cls: type, name: str | None) -> Any:
    """What the class dicts have under the name; no descriptor is asked."""
    return next((CLASS_DICT_OF(base)[name] for base in MRO_OF(cls) if has(base, name)), MISSING)


def is_same_empty(now: Any, want: Any) -> bool:
    """Are these two alike, empty, whatever was in the wanted one since?"""
    if type(now) is not type(want) or now:
        return False
    return type(now) is not collections.defaultdict or now.default_factory is want.default_factory


EMPTIABLE = (list, dict, collections.defaultdict)  # no attributes, no weak references
# The tables. (The descriptors of `type` itself, because a metaclass may override them.)

MRO_OF = type.__dict__["__mro__"].__get__
CLASS_DICT_OF = type.__dict__["__dict__"].__get__
NAME_OF = type.__dict__["__name__"].__get__
MODULE_OF = type.__dict__["__module__"].__get__

OPENED = (read_instance, read_class, read_attributes)

# What counts wherever it is found. Of a user's classes, besides: see runs_unnamed.
ALWAYS_READ = ("forward", "training", "__wrapped__")
NOT_IN_CALLS = frozenset(  # those that make, end and pickle objects, and what evaluates annotations
    ("__init__", "__new__", "__post_init__", "__init_subclass__", "__set_name__", "__del__", "__annotate__")
    + ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__dir__", "__sizeof__", "__annotate_func__")
)
MARKS_OF_GENERATED = ("__dataclass_fields__", "__attrs_attrs__")
CALLED_BY_CLASS = frozenset(  # Foo(x), with its end, and Foo.apply(x)
    ("__init__", "__new__", "__call__", "__del__", "forward", "backward", "setup_context")
)

PLAIN_TENSORS = {id(cls): cls for cls in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)}
HANDLES = behind_proxy(CLASS_DICT_OF(torch.utils.hooks.RemovableHandle))
STATEFUL = (torch.nn.Module, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
OPAQUE = (set, collections.deque, bytearray)
OPAQUE_NAMES = frozenset(  # of what need not be imported
    (("numpy", "ndarray"), ("array", "array"), ("_ctypes", "_CData"), ("mmap", "mmap"), ("builtins", "memoryview"))
    + (("configparser", "RawConfigParser"), ("multiprocessing.sharedctypes", "SynchronizedBase"))
)
RANDOM = frozenset(
    (("numpy.random._generator", "Generator"), ("numpy.random.mtrand", "RandomState"))
    + (("numpy.random.bit_generator", "BitGenerator"),)
)
UNFOLLOWED = (contextvars.ContextVar, threading.local, weakref.ref)
VIEWS = type({}.keys()), type({}.values()), type({}.items())
AROUND_BUILTIN = (collections.UserDict, collections.UserList, collections.UserString, collections.ChainMap)
WRAPPERS = (
    (staticmethod, "__func__"), (classmethod, "__func__"), (property, "fget"), (functools.cached_property, "func"),
    (functools.partialmethod, "func"), (functools._lru_cache_wrapper, "__wrapped__"),
)  # fmt: skip
RULES = (  # the first that fits; None: nothing to walk
    ((str,), walk_text),
    ((torch.Tensor,), walk_tensor),
    ((torch.Size,), None),
    ((frozenset,), walk_subclass),
    ((types.FunctionType,), walk_function),
    ((types.MethodType, types.BuiltinMethodType, types.MethodWrapperType), walk_method),
    ((functools.partial,), walk_partial),
    ((property,), walk_property),
    (tuple(cls for cls, _ in WRAPPERS), walk_wrapper),
    ((types.ModuleType,), walk_python_module),
    ((type,), walk_class),
    ((torch.nn.parallel.DistributedDataParallel,), walk_parallel),
    ((torch.nn.Module,), walk_module),
    ((torch.optim.Optimizer,), walk_optimizer),
    ((*STATEFUL, types.SimpleNamespace, argparse.Namespace), walk_instance),
    ((list,), walk_list),
    ((dict,), walk_dict),
    ((tuple,), walk_tuple),
    ((*OPAQUE, *UNFOLLOWED), walk_opaque),
    (AROUND_BUILTIN, walk_around_builtin),
    ((types.MappingProxyType, *VIEWS), walk_proxy),
)
HELD = (walk_tensor, walk_tuple, walk_list, walk_dict, walk_instance)  # of which it counts how often they are met
RULE_AT = {id(cls): k for k, (classes, _) in reversed([*enumerate(RULES)]) for cls in classes}


def derives(cls: type, classes: Iterable[type]) -> bool:
    """issubclass, without asking abstract base classes, which ask the class."""
    return any(base is other for base in MRO_OF(cls) for other in classes)


def kind_of(cls):
    return MODULE_OF(cls), NAME_OF(cls)


def rule_for(cls):
    found = [RULE_AT[id(base)] for base in MRO_OF(cls) if id(base) in RULE_AT]
    if found:
        return RULES[min(found)][1]
    if any(kind_of(base) in OPAQUE_NAMES for base in MRO_OF(cls)):
        return walk_opaque
    if any(kind_of(base) in SHARDED_KINDS for base in MRO_OF(cls)):
        return walk_sharded
    if is_source(cls):
        return walk_source
    return None if is_ambient(MODULE_OF(cls)) else walk_instance
