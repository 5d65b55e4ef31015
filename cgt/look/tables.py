"""Lists and tuples of numbers from which a number that changes chooses (`betas[t]`): in a recording the core looks them
up. Dicts of whole numbers that are asked for one that changes (`epoch in milestones`): it is compared with each of
their keys.

Something of ours lies in such a list's places while a run is traced (live.py): one for all of them. A list to which the
code can come by another way, too, is none; where one does all the same, and changes it, the run is undone."""

import array
import collections
import operator
import sys
from typing import Any, NamedTuple

from ..words import pytree
from . import places

MAX_ENTRIES, MAX_KEYS = 1 << 16, 32
ASKED = (dict, collections.Counter)


class Table(NamedTuple):
    """One of them."""

    proxy: Any  # what lies in its place meanwhile
    entries: Any  # itself
    numbers: array.array


def new(proxy: object, entries: Any) -> Table:
    return Table(proxy, entries, array.array("d" if type(next(iter(entries))) is float else "q", entries))


def is_kept(table: Table) -> bool:
    """Has somebody kept what lay in its place? Who, tells but a look at all that lives."""
    return sys.getrefcount(table.proxy) > ALONE


_one = Table(object(), (), array.array("q"))
ALONE = sys.getrefcount(_one.proxy)  # the row's reference and the question's, as this Python counts them


def is_as_it_was(table: Table) -> bool:
    """Has nobody led to it past its place, and changed it? Then what stood for it has the same entries."""
    mine, theirs = table.proxy, table.entries
    if type(theirs) in ASKED:
        return mine == theirs
    return len(mine) == len(theirs) and all(
        map(operator.is_, list.__iter__(mine) if type(theirs) is list else mine, theirs)
    )


def is_table(place: places.Place) -> bool:
    """Does a list or tuple of numbers of one kind lie there, that a whole number can choose from, or a dict of whole
    numbers, that can be asked for one?"""
    entries = place.want
    asked = type(entries) in ASKED
    if (
        place.kind not in places.HOLD_NUMBERS
        or not (asked or type(entries) in (list, tuple))
        or not 1 - asked < len(entries) <= (MAX_KEYS if asked else MAX_ENTRIES)
    ):
        return False
    kind = int if asked else type(entries[0])
    numbers = [*entries, *(entries.values() if asked else ())]
    return kind in (int, float) and all(type(x) is kind and (kind is float or abs(x) <= pytree.MOST) for x in numbers)
