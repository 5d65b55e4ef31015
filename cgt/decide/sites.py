"""The jitted functions that are alive, the lock around recordings, and what waits to be freed."""

import threading
import weakref

import cgt_core as core

from ..data import State
from ..words import errors, options

ATTRIBUTE = "_cgt_state"  # of a jitted function: its state
BACKWARD = ".backward"  # behind the name of the function whose backward it is
SITES = weakref.WeakValueDictionary()  # function row -> jitted function, which has ATTRIBUTE
RECORDING = threading.RLock()  # around warming and recording, in the whole process
# What waits to be freed: (function row, born) of collected functions, (state, spec) of specs whose argument objects
# died, (state, None) of functions reset while one was being warmed or recorded, (state, GRAPHS) of those whose
# gradients were refused meanwhile. Freed at the end of the miss, at the next miss or at the next step, never in the
# middle of a call.
DOOMED = []
GRAPHS = "graphs"
FOREVER = 1 << 62  # calls


def states() -> list[State]:
    """Those of all jitted functions alive. Other threads may make one meanwhile: references are copied in one go."""
    return [getattr(site, ATTRIBUTE) for site in (ref() for ref in SITES.valuerefs()) if site is not None]


def disable(f: int) -> None:
    """Where the user wants no cgt, or looks for NaN, no call comes to Python: all run eagerly."""
    if options.DISABLED or options.NAN:
        core.verdict_fn(f, errors.disabled() if options.DISABLED else errors.looked_at(), FOREVER)


def is_mine() -> bool:
    """Is the mode around us that of a recording under way in this thread: are we being inlined?"""
    return RECORDING._is_owned()
