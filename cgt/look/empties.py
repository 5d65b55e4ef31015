"""Empty containers that come and go.

One that a function, or what runs between its calls, fills and replaces by another empty one (a gradient scaler does) is
a new object at each call. If nobody but its place holds it, that cannot be noticed, so the place may be guarded as
EMPTY: still such a container, still empty, still held by nobody else. All of it is asked before the run and after it,
since what the run itself left behind would not come again."""

import collections
import sys

from cgt_core import CELL, DICT_ITEM, EMPTY

from . import places


def lone_empties(found: list[places.Place]) -> list[int]:
    """Positions of the places whose value is an empty container that nobody else holds."""
    rows = [
        k for k, p in enumerate(found)
        if (p.kind == CELL or (p.kind == DICT_ITEM and places.is_simple(p.key)))
        and any(type(p.want) is cls for cls in places.EMPTIABLE) and not p.want
    ]  # fmt: skip
    ours = count_references(found, rows)
    return [k for k in rows if references(found[k]) == ours[id(found[k].want)] + 1]


def settle_empties(found: list[places.Place], lone: list[int], changed: set[str]) -> None:
    """After the run: make the places EMPTY that the run left just as it found them, but for the container's identity:
    those where it replaced that, and those `changed` since another recording (by path; the others are quicker to guard
    by identity). Lets go of the old containers, which the function may have filled."""
    ours = count_references(found, lone)
    settled = {}
    for k in lone:
        row = found[k]
        now = row._replace(want=places.value_at(row))
        if not places.is_same_empty(now.want, row.want):
            continue
        if now.want is row.want:
            others = references(row) - ours[id(row.want)] - 2  # but for `now` and the place
            alone = row.path in changed and others == 0
        else:
            alone = references(row) == ours[id(row.want)] and references(now) == 2
        if alone:
            settled[k] = row._replace(kind=EMPTY, want=empty_like(row.want))
    # A row of the old container (its length) becomes the guard of its place once more. It is not taken out: the rows
    # behind it are known by their positions.
    instead = {id(found[k].want): row for k, row in settled.items()}
    found[:] = [settled.get(k) or instead.get(id(p.home), p) for k, p in enumerate(found)]


def references(place: places.Place) -> int:
    """How many references there are to the wanted value, that of this row included."""
    return sys.getrefcount(place.want) - COUNTING


def count_references(found: list[places.Place], rows: list[int]) -> dict[int, int]:
    """id of the value wanted by each of `rows` -> how often `found` refers to it."""
    counts = dict.fromkeys([id(found[k].want) for k in rows], 0)
    for thing in (thing for p in found for thing in (p.home, p.want)) if counts else ():
        if id(thing) in counts:
            counts[id(thing)] += 1
    return counts


def empty_like(thing):
    """An empty container of the same kind."""
    if type(thing) is collections.defaultdict:
        return collections.defaultdict(thing.default_factory)
    return type(thing)()


COUNTING = 0
COUNTING = references(places.Place(CELL, None, None, [], "")) - 1  # the call's own
