"""What becomes of a value in a code object, from its bytecode: nothing runs here.

    self.calls += 1        an *advance*: what the attribute holds goes through + 1 back to where it was, and nowhere
                           else, so nobody can tell what it is
    y = self.calls         it goes anywhere: one of the `others`, as is each store that is no advance

    self.last = y          it is stored, and while nobody reads it, it may hold anything; so may a list to which all
    self.losses.append(y)  only append

    self.total += y        a *sum*: what it holds goes into arithmetic of which the result goes back

All of it is worked out once for each code object.
"""

import functools
import re
import types
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from . import bytecode as b
from .code import HOMES, KEPT, SCHEDULERS, asked_for, texts_in


class Advance(NamedTuple):
    """A whole number is counted up or down by another one. The name of an entry is (where and name of its container,
    key)."""

    where: str
    name: Any
    line: str


class Moves(NamedTuple):
    """What a code object, without its inner ones, does to what it names."""

    advances: tuple  # of Advance
    others: dict  # (where, name) -> the first line that reads or stores it another way
    stores: set  # all (where, name) that it stores or deletes
    appends: set  # those of which it calls append()
    reads: set  # those that it reads or deletes, but for advances and these
    beside: set  # the same but for what goes into sums of theirs
    opens: str | None  # a line of the user's that may come to what it does not name: vars(self), getattr(self, key)


@functools.lru_cache(KEPT)
def moves_of(code: types.CodeType) -> Moves:
    """The Moves of a code object."""
    reading = b.read(code)
    steps = reading.steps
    stores = [at for at, step in enumerate(steps) if step.does == b.STORE and step.where in (*NAMED, b.ENTRY)]
    advances = {at: found for at in stores if (found := advance_of(code, reading, at))}
    keys, containers = opened_in(reading)
    advanced = keys.union(advances, (read for read, _ in advances.values()))
    appended, summed = appended_in(reading), {at for store in stores for at in summed_at(reading, store)}
    # A scheduler's code looks at whole objects, to save them.
    is_torchs = code.co_filename.startswith(HOMES) and code.co_filename != SCHEDULERS
    mentioned = [(at, key) for at in range(len(steps)) for key in mentions(reading, at)]
    asked = [(at, key) for at, key in mentioned if at not in advanced and steps[at].does != b.STORE]
    called = {(b.ATTRIBUTE, step.name) for step in steps if is_method(step)}
    clean, quiet = advanced | containers, appended | summed
    return Moves(
        advances=tuple(advance for _, advance in advances.values()),
        others={key: line_at(code, reading, at) for at, key in reversed(mentioned) if at not in clean},
        stores={key for at, key in mentioned if steps[at].does in (b.STORE, b.DELETE)},
        appends={key for at, key in asked if at in appended},
        reads={key for at, key in asked if at not in appended} | called,
        beside={key for at, key in asked if at not in quiet} | called,
        opens=None if is_torchs else opens_at(code, reading, mentioned),
    )


def opened_in(reading):
    """(steps that make constant keys, which are no names; steps that read containers of which only entries by such keys
    are taken, which have names of their own)"""
    entries = [at for at, one in enumerate(reading.steps) if one.where == b.ENTRY and place_of(reading, at) is not None]
    keys = {key for at in entries for key in reading.takes[at][-1]}
    opened = Counter(base_of(reading, at) for at in entries)
    return keys, {at for at, n in opened.items() if n == len(reading.users[at])}


def appended_in(reading):
    """The steps that read what is only asked for append(), which is called."""
    methods = [at for at, one in enumerate(reading.steps) if is_method(one) and one.name == "append"]
    lists = {at for one in methods if reading.call_of(one) is not None for at in reading.takes[one][-1]}
    return {at for at in lists - b.UNKNOWN if len(reading.users[at]) == 1}


def opens_at(code, reading, mentioned):
    """The first line that may come to what the code does not name; or None."""
    found = [at for at, key in mentioned if key[1] in OPENERS]
    found += [at for at, step in enumerate(reading.steps) if step.does == b.MATCH]  # by names that the class tells
    if found:
        return line_at(code, reading, min(found))
    computes = not BY_NAME.isdisjoint(code.co_names) and None in asked_for(code, BY_NAME)
    return f"{code.co_filename}:{code.co_firstlineno}" if computes else None


def is_method(step):
    return step.is_called and step.where != b.GLOBAL


def line_at(code: types.CodeType, reading: b.Reading, at: int) -> str:
    return f"{code.co_filename}:{reading.lines[at]}"


def mentions(reading, at):
    """(where, name) of all that a step reads, stores or deletes; but no method that is called: numbers are none."""
    step = reading.steps[at]
    if step.does == b.CONSTANT:
        words = texts_in(step.name)
        if isinstance(step.name, str) and "{" in step.name:  # "{0.calls}".format(self)
            words = re.findall(r"\w+", step.name)
        return [(b.ATTRIBUTE, word) for word in words]
    if not step.where or is_method(step):
        return []
    place = (ALIKE[step.where], step.name) if step.where in ALIKE else place_of(reading, at)
    return [] if place is None else [place]


def place_of(reading: b.Reading, at: int) -> tuple[str, Any] | None:
    """(where, name) of what a step reads or stores; or None. The name of an entry is (place of its container, key)."""
    step = reading.steps[at]
    if step.where in NAMED:
        return step.where, step.name
    if step.where != b.ENTRY or step.does == b.DELETE:
        return None
    container, key = base_of(reading, at), reading.maker(at, -1)
    if container is None or key is None or not is_read(reading, container):
        return None
    one = reading.steps[key]
    is_simple = one.does == b.CONSTANT and type(one.name) in (str, int)
    return (b.ENTRY, (place_of(reading, container), one.name)) if is_simple else None


def is_read(reading: b.Reading, at: int) -> bool:
    """Does this step read what has a place, to whatever end?"""
    step = reading.steps[at]
    return step.does == b.READ and not step.is_called and place_of(reading, at) is not None


def base_of(reading, at):
    """Who made the object or container of what a step reads or stores, if that is always the same step."""
    where = reading.steps[at].where
    return reading.maker(at, -2 if where == b.ENTRY else -1) if where in (b.ENTRY, b.ATTRIBUTE) else None


def advance_of(code, reading, at):
    """(the step that reads, Advance), if what this one stores is an advance of what was there."""
    made = reading.maker(at, 0)
    if made is None or not is_arithmetic(reading, made):
        return None
    op, one, by = reading.steps[made].name, reading.maker(made, 0), reading.maker(made, 1)
    if op == "+" and one is not None and reading.steps[one].does == b.CONSTANT:
        one, by = by, one
    if by is None or one not in summed_at(reading, at):
        return None
    if op not in ("+", "-") or reading.steps[by].does != b.CONSTANT or type(reading.steps[by].name) is not int:
        return None
    return one, Advance(*place_of(reading, at), line_at(code, reading, at))


def summed_at(reading, at):
    """The steps that read what this one stores, if that goes through arithmetic alone and nowhere else."""
    tree = [one for one in tree_of(reading, reading.maker(at, 0)) if one is not None]
    reads = [one for one in tree if is_read(reading, one) and is_same(reading, one, at)]
    used = reads + [one for one in tree if is_arithmetic(reading, one)]
    return reads if all(len(reading.users[one]) == 1 for one in used) else []


def tree_of(reading: b.Reading, at: int | None) -> list[int | None]:
    """The arithmetic that makes what this step makes: operations, and what they begin with; None of what is unclear."""
    tree = [at]
    for one in tree:  # which grows
        if one is not None and is_arithmetic(reading, one):
            tree += [reading.maker(one, 0), reading.maker(one, 1)]
    return tree


def is_arithmetic(reading: b.Reading, at: int) -> bool:
    step = reading.steps[at]
    return step.does == b.COMPUTE and step.name in ARITHMETIC and len(reading.takes[at]) == 2


def is_same(reading, one, other):
    """Do these steps come to the same, of the same object?"""
    if place_of(reading, one) != place_of(reading, other):
        return False
    bases, steps = (base_of(reading, one), base_of(reading, other)), reading.steps
    if None in bases:
        return steps[one].where in (b.GLOBAL, b.VARIABLE)
    first, last = sorted(bases)
    is_variable = steps[first].where == steps[last].where == b.LOCAL and steps[first].name == steps[last].name
    stays = not any(b.changes_local(step, steps[first].name) for step in steps[first:last])
    return first == last or (is_variable and stays and reading.runs[first] == reading.runs[last])


def names_of(reading: b.Reading, at: int | None) -> tuple[str, ...] | None:
    """(variable, attribute, ...) that leads to what this step makes, or None."""
    names: list[str] = []
    while at is not None and reading.steps[at].does == b.READ:
        step = reading.steps[at]
        names.insert(0, step.name)
        if step.where in (b.LOCAL, b.GLOBAL, b.VARIABLE):
            return tuple(names)
        at = reading.maker(at, 0) if step.where == b.ATTRIBUTE and len(reading.takes[at]) == 1 else None
    return None


def that_disturb(fresh: set[types.CodeType], known: set[types.CodeType]) -> list[types.CodeType]:
    """The code among `fresh` that reads what `known` code only advances, stores or appends to, or may come to it."""
    if not fresh:
        return []
    names = {advance[:2] for code in known for advance in advances_of(code)}
    kept = {name for code in keepers(known) for name in moves_of(code).stores | moves_of(code).appends}
    containers = {one for name in kept for one in containers_of(name)}  # asked for entries by constant keys alone
    moves = [(one, moves_of(one)) for one in disturbers(fresh, names | kept)]
    return [
        one for one, found in moves
        if found.opens or not ((names | containers).isdisjoint(found.others) and kept.isdisjoint(found.reads))
    ]  # fmt: skip


def containers_of(name: tuple[str, Any]) -> list[tuple[str, Any]]:
    """(where, name) of the container in which an entry lies, of the one in which that lies, ...; [] if it is none."""
    found = []
    while name[0] == b.ENTRY:
        name = name[1][0]
        found.append(name)
    return found


def keepers(codes: Iterable[types.CodeType]) -> list[types.CodeType]:
    """The code among this that could store under a name, or append to what has one."""
    return [code for code in codes if "append" in code.co_names or b.has(code, STORES)]


@functools.lru_cache(KEPT)
def advances_of(code: types.CodeType) -> tuple[Advance, ...]:
    """moves_of(code).advances, at once where there can be none."""
    return moves_of(code).advances if MAY_ADVANCE.search(code.co_code[::2]) else ()


def disturbers(codes: Iterable[types.CodeType], names: Iterable[tuple[str, object]]) -> list[types.CodeType]:
    """The code among this that could mention one of the (where, name), or open what it does not name."""
    words = {word for _, name in names for word in words_in(name)}
    return [code for code in codes if words and may_mention(code, words)]


def words_in(name):
    return [word for part in name for word in words_in(part)] if isinstance(name, tuple) else [name]


def may_mention(code, words):
    named = {*code.co_names, *code.co_freevars, *code.co_cellvars}
    if not (named.isdisjoint(words) and named.isdisjoint(OPENERS) and named.isdisjoint(BY_NAME)):
        return True
    said = repr(code.co_consts)
    return b.has(code, MATCHES) or any(isinstance(word, str) and word in said for word in words)


NAMED = (b.ATTRIBUTE, b.GLOBAL, b.VARIABLE)
ALIKE = {b.SCOPE: b.GLOBAL, b.SUPER: b.ATTRIBUTE}  # by name; but whose it is, is not known
STORES, MATCHES = b.operations(b.STORE, *NAMED), b.operations(b.MATCH)
QUIET = b.operations(b.NOTHING) | b.operations(b.SWAP) | b.operations(b.READ, b.LOCAL)
MAY_ADVANCE = b.sequence(b.operations(b.COMPUTE), QUIET, STORES | b.operations(b.STORE, b.ENTRY))
ARITHMETIC = ("+", "-", "*", "/")
OPENERS = frozenset(  # of whole objects, namespaces and frames
    "vars globals locals eval exec __dict__ __getattribute__ __getstate__ __reduce__ __reduce_ex__ __globals__"
    " __closure__ cell_contents f_locals f_globals _getframe currentframe getmembers getclosurevars attrgetter deepcopy"
    " asdict astuple dump dumps get_referents get_objects".split()
)
BY_NAME = frozenset(("getattr", "setattr", "delattr"))
