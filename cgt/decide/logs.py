"""What happens on misses, for who watches: loggers cgt.record, cgt.miss, cgt.rescue and cgt.evict, level INFO. Hits say
nothing.

They are Python's to configure. CGT_LOG=record,miss (or all) writes them to stderr without a line of code; rescues,
which no miss comes with, are told only where it names them when cgt is imported."""

import logging
from collections.abc import Callable

import cgt_core as core

from ..data import State
from ..run.observe import warn
from ..words import errors, options

KINDS = ("record", "miss", "rescue", "evict")
LOGGERS = {kind: logging.getLogger(f"cgt.{kind}") for kind in KINDS}


def listens(kind: str) -> bool:
    return LOGGERS[kind].isEnabledFor(logging.INFO)


def tell(kind: str, sentence: Callable[..., str], *parts: object) -> None:
    """`sentence(*parts)`, if somebody listens."""
    if listens(kind):
        LOGGERS[kind].info(sentence(*parts))


def set_up(names: tuple[str, ...], name_of: Callable[[int], str]) -> None:
    """Have these kinds written to stderr. `name_of(f)`: what a function's row is called."""
    wanted = KINDS if "all" in names else names
    for kind in wanted:
        if kind not in KINDS:
            raise errors.CgtError(errors.bad_switch("CGT_LOG", ",".join(names), f"some of {', '.join(KINDS)}, or all"))
    if not wanted:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    for kind in wanted:
        LOGGERS[kind].setLevel(logging.INFO)
        LOGGERS[kind].addHandler(handler)
        LOGGERS[kind].propagate = False
    if "rescue" in wanted:
        core.RESCUED[0] = lambda f, size, line: tell("rescue", errors.told_rescue, name_of(f), size, line)


def warn_of_nothing(state: State) -> None:
    """Once per function: so many calls, and none was replayed. The commonest reason tells what to change."""
    calls, _, _, replays, *_ = core.fn_counts(state.f)
    if state.warned or state.graph is not None or replays or calls < options.WARN_AFTER or not state.reasons:
        return
    state.warned = True
    reason = max(state.reasons, key=state.reasons.__getitem__)
    warn(errors.never_replayed(calls, state.name, reason, state.name.rpartition(".")[2]))
