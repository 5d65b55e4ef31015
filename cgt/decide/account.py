"""Does recording pay? A recording is a bet that its calls come again; one that was never replayed may be lost.

A process has an allowance: as long as all its functions together spent less, a call is recorded when one of its kind
(structure, values, shapes, modes) came before, and a few at once. This is decided by numbers of calls alone, so that it
is the same on each machine; how many recordings may wait for a first replay is bounded (verdicts.crowd), so a program
that varies its calls has a few for it, and no more.

Beyond it, and where what was tried came to nothing, each function has an account. Only a call of a kind that came
before is recorded: at once where none of its siblings still waits for a first replay and there is room for all kinds,
or where addresses moved (these are learnt once). Else what was spent, and will be again, must be covered by what
replays saved and by a small share of the time that eager calls would have taken so far. Until then calls that no
recording takes run eagerly, found in compiled code (core/verdict.pxi). Never for good: the share grows with each call,
and a kind of which many came is heard, too: compiled code counts them.

Methods of several objects are one function, but each object has its own kinds, and its own room for recordings."""

import math
import time
from collections.abc import Callable
from typing import Any

import cgt_core as core

from ..data import Account, Call, State, remember
from ..words import errors, options

# Of Miss: what a program varies from call to call (FITS: a value that it reads on the way). The others are learnt.
VARIES = {
    core.FITS, core.MISS_SPEC, core.MISS_META, core.MISS_ALIGN, core.MISS_VALUE, core.MISS_NUMBER,
    core.MISS_OVERLAP, core.MISS_PLACE, core.MISS_SAME,
}  # fmt: skip
FREE = 4  # kinds of calls that are new, in a row, before Python looks away; besides a first one of each object
SAVED = 0.5  # of an eager call, by a replay; the rest is the guard, the launch and what we do not know
TOGETHER = [0.0]  # seconds, of the process: what all functions spent


def book(state: State, **entries: Any) -> None:
    """These entries of the function's account have other values from now on."""
    remember(state, account=state.learnt.account._replace(**entries))


def timed_eager(account: Account, function: Callable[..., object], args: tuple, kwargs: dict) -> object:
    """The plain function's result; its time is noted."""
    began = time.perf_counter()
    result = function(*args, **kwargs)
    seconds = time.perf_counter() - began
    account.eager[:] = [min([seconds, *account.eager])]
    return result


def timed(state: State, run: Callable[..., object], *call: Call, first: bool = False) -> object:
    """run(*call), which warms or records, on the account. Eager's first call is slow, too: it is not charged."""
    began = time.perf_counter()
    try:
        return run(*call)
    finally:
        last = time.perf_counter() - began
        charged = 0.0 if first else last
        book(state, last=last, spent=state.learnt.account.spent + charged)
        TOGETHER[0] += charged


def is_allowed(account):
    """Does nobody count yet? A function that was refused has an account of its own at once."""
    return TOGETHER[0] < options.ALLOWANCE and not account.failed


def meet(state: State, kind: tuple, whose: int | None, room: int, came: bool = False) -> int:
    """0 if a call of this kind came before (`came`: while Python looked away), or is recorded at once; else how many
    calls run eagerly before Python sees any again: the more that were new in a row, the more. `whose`: names the object
    whose method is called, or None. `room`: for how many recordings of it."""
    account = state.learnt.account
    if kind in account.met:
        book(state, strange=0)
        return 0
    mine = [one for one, other in account.met.items() if other == whose]
    account.met[kind] = whose
    if len(mine) >= options.MAX_SPECS or len(account.met) > options.MAX_GRAPHS:
        del account.met[next(iter(mine or account.met))]
    strange = 0 if came else account.strange + 1
    book(state, strange=strange)
    if came:
        return 0
    free = FREE + min(len(set(account.met.values())) - 1, options.MAX_SPECS)
    if is_allowed(account) and strange <= free and len(mine) < room and (mine or whose is None):
        return 0
    return min(1 << max(0, strange - free), options.COOL_DOWN[0])


def waits(state: State, missed: list[tuple[int, int, int]], room: int, whose: int | None = None) -> int:
    """How many more calls the function must have had before it is recorded here; 0: now. `missed`: core.node_misses
    of this place, where nothing takes the call; `room`: for how many recordings; `whose`: as of meet."""
    account, (alike, unproven), proven = state.learnt.account, core.fn_hopes(state.f), 0
    for node, why, _ in missed:
        replayed = core.node_replays(node) > 0
        proven += replayed
        unproven += not replayed and why in VARIES
    has_room = sum(one == whose for one in account.met.values()) <= room
    if is_allowed(account) or (has_room and unproven + account.failed < max(1, proven)):
        return 0
    if not account.eager:  # a call that returns times it
        return 1 if state.learnt.left < 2 else options.COOL_DOWN[0]
    calls, _, _, replays, *_ = core.fn_counts(state.f)
    if not account.failed and alike >= account.patience:
        book(state, patience=account.patience * options.PATIENCE)
        return 0
    needed = ((account.spent + account.last) / account.eager[0] - SAVED * replays) / options.OVERHEAD
    return max(0, min(math.ceil(needed) - calls, options.COOL_DOWN[1]))


def reason(account: Account, n: int, why: Callable[[], str]) -> str:
    """A sentence on why the function waits so many calls. `why`: tells what the last recording did not accept."""
    if account.failed:
        return account.why
    if not account.eager:
        return errors.timed()
    return errors.does_not_pay(1e3 * (account.spent + account.last), 1e6 * account.eager[0], why(), n)
