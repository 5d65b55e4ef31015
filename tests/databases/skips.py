"""What is left out, a reason a row. What eager refuses, or answers differently each time, needs no row: it is counted as such."""

from fnmatch import fnmatch
from typing import NamedTuple


class Skip(NamedTuple):
    kind: str  # of the database
    name: str  # a pattern
    way: str
    why: str


UNWRITTEN = "returns memory that nobody wrote: eager is only itself by luck"

SKIPS = (
    Skip("*", "*empty", "*", UNWRITTEN),
    Skip("*", "*empty_like", "*", UNWRITTEN),
    Skip("*", "*empty_permuted", "*", UNWRITTEN),
    Skip("*", "*empty_strided", "*", UNWRITTEN),
    Skip("*", "*new_empty", "*", UNWRITTEN),
)


def skip_of(kind, name, way):
    """The first row that leaves it out, or None."""
    return next((s for s in SKIPS if fnmatch(kind, s.kind) and fnmatch(name, s.name) and fnmatch(way, s.way)), None)
