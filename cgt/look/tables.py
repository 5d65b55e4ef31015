"""Lists and tuples of numbers from which a number that changes chooses (`betas[t]`): in a recording the core looks them
up.

Something of ours lies in such a list's place while a run is traced (live.py). That is told from the list by who has it
from elsewhere: so no other way may lead to it."""

import array
import gc
import operator
import sys
import types
from typing import Any, NamedTuple

from ..run.observe import collect
from ..words import pytree
from . import empties, places

MAX_ENTRIES = 1 << 16
ROW = 9  # fields of a place's row: the third is where it is, the fifth what it held (describe.py)


class Table(NamedTuple):
    """One of them."""

    proxy: Any  # what lies in its place meanwhile
    entries: Any  # itself
    numbers: array.array


def new(proxy: object, entries: list | tuple) -> Table:
    return Table(proxy, entries, array.array("d" if type(entries[0]) is float else "q", entries))


def is_kept(table: Table) -> bool:
    """Has somebody kept what lay in its place? Who, tells but a look at all that lives."""
    return sys.getrefcount(table.proxy) > ALONE


_one = Table(object(), (), array.array("q"))
ALONE = sys.getrefcount(_one.proxy)  # the row's reference and the question's, as this Python counts them


def is_as_it_was(table: Table) -> bool:
    """Has nobody led to it past its place, and changed it? Then what stood for it has the same entries."""
    mine, theirs = table.proxy, table.entries
    return len(mine) == len(theirs) and all(
        map(operator.is_, list.__iter__(mine) if type(theirs) is list else mine, theirs)
    )


def find(found: list[places.Place], lone: dict[str, places.Place]) -> list[places.Place]:
    """Those of these places in which a table lies to which no other way leads, by which it could be changed past what
    stands for it. `lone`: path -> Place for which that was found, since to ask is to look at all that lives."""
    some = [p for p in found if is_table(p)]
    lists = [p for p in some if type(p.want) is list and (p.path not in lone or lone[p.path].want is not p.want)]
    known = empties.count_references(found, [k for k, p in enumerate(found) if any(p is one for one in lists)])
    # By more than these places, and where it lies.
    asked = [p for p in lists if empties.references(p) != known[id(p.want)] + 1]
    shared = strange_ways(asked)
    if shared:
        collect()
        shared = strange_ways(asked)
    lone.update((p.path, p) for p in lists if id(p.want) not in shared)
    return [p for p in some if id(p.want) not in shared]


def is_table(place):
    """Does a list or tuple of numbers of one kind lie there, that a whole number can choose from?"""
    entries = place.want
    if (
        place.kind not in places.HOLD_NUMBERS
        or type(entries) not in (list, tuple)
        or not 1 < len(entries) <= MAX_ENTRIES
    ):
        return False
    kind = type(entries[0])
    return kind in (int, float) and all(type(x) is kind and (kind is float or abs(x) <= pytree.MOST) for x in entries)


def strange_ways(lists):
    """ids of the lists in these places to which more leads than what is known."""
    known, mine = {id(p.want): p for p in lists}, object()
    holders = gc.get_referrers(*(p.want for p in lists), mine) if lists else ()
    # From Python 3.13 on it finds its own arguments.
    asked = [one for one in holders if type(one) is tuple and one and one[-1] is mine]
    others = [one for one in holders if all(one is not x for x in asked)]
    return {id(x) for one in others for x in gc.get_referents(one) if id(x) in known and is_strange(one, known[id(x)])}


def is_strange(holder, place):
    """Is this no place of ours, no row of a recording, not where the list lies, and no variable of what is running?"""
    row = type(holder) is tuple and len(holder) == ROW and (holder[2] is place.want or holder[4] is place.want)
    ours = row or type(holder) in (places.Place, Table)
    return not (ours or holder is place.home or type(holder) in (types.FrameType, types.GeneratorType))
