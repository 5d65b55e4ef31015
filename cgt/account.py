"""Does recording pay? A recording is a bet that its calls come again; one that was never replayed may be lost.

Per function: the seconds spent on warming and recording, the seconds of an eager call (timed when one runs), and
what replays saved. A recording is made at once where none of its siblings still waits for a first replay, or where
addresses moved (these are learnt once). Else the account decides: what was spent must be covered by what was
saved and by a small share of the time that eager calls would have taken so far. While it is not, calls that no
recording takes run eagerly, found in compiled code (core/verdict.pxi). Never for good: the share grows with each
call, and many calls in a row that look alike are heard, too.
"""

import math
import time

import cgt_core as core
from cgt_core import MISS_META, MISS_OVERLAP, MISS_PLACE, MISS_SAME, MISS_SPEC, MISS_VALUE

from . import errors, options

# Of Miss: what a program varies from call to call. The others are learnt.
VARIES = {MISS_SPEC, MISS_META, MISS_VALUE, MISS_OVERLAP, MISS_PLACE, MISS_SAME}
SAVED = 0.5  # of an eager call, by a replay; the rest is the guard, the launch and what we do not know


def timed_eager(account, function, args, kwargs):
    """The plain function's result; its time is noted."""
    began = time.perf_counter()
    result = function(*args, **kwargs)
    seconds = time.perf_counter() - began
    account.eager = seconds if account.eager is None else min(seconds, account.eager)
    return result


def timed(account, run, *call):
    """run(*call), which warms or records, on the account."""
    began = time.perf_counter()
    try:
        return run(*call)
    finally:
        account.spent += time.perf_counter() - began


def waits(account, f, missed):
    """How many more calls the function must have had before it is recorded here; 0: now. `missed`: core.node_misses
    of this place, where nothing takes the call."""
    alike, unproven = core.fn_hopes(f)
    proven = 0
    for node, why, _ in missed:
        replayed = core.node_facts(node).n_replay > 0
        proven += replayed
        unproven += not replayed and why in VARIES
    if unproven + account.failed < max(1, proven):
        return 0
    if account.eager is None:
        return 1  # which times it
    calls, _, _, replays, *_ = core.fn_counts(f)
    if not account.failed and alike >= account.patience:
        account.patience *= options.PATIENCE
        return 0
    needed = (account.spent / account.eager - SAVED * replays) / options.OVERHEAD
    return max(0, min(math.ceil(needed) - calls, options.COOL_DOWN[1]))


def heard(account):
    """Of so many calls alike in a row Python is told; 0: of none, since a function that failed would fail again."""
    return 0 if account.failed else account.patience


def note_failure(account, why):
    """A warm-up or a recording came to nothing."""
    account.failed += 1
    account.why = why


def reason(account, n, why):
    """A sentence on why the function waits so many calls. `why`: tells what the last recording did not accept."""
    if account.failed:
        return account.why
    if account.eager is None:
        return errors.timed()
    return errors.does_not_pay(account.spent, account.eager, n, why())
