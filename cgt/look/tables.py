"""Lists and tuples of numbers from which a number that changes chooses (`betas[t]`): in a recording the core looks them
up.

Something of ours lies in such a list's places while a run is traced (live.py): one for all of them. A list to which the
code can come by another way, too, is none; where one does all the same, and changes it, the run is undone."""

import array
import operator
import sys
from typing import Any, NamedTuple

from ..words import pytree
from . import places

MAX_ENTRIES = 1 << 16


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


def is_table(place: places.Place) -> bool:
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
