"""Every switch and default, read once."""

import os

HOME = os.path.dirname(os.path.dirname(__file__)) + os.sep  # of cgt's own code


def is_on(name):
    return os.environ.get(name, "") not in ("", "0")


DISABLED = is_on("CGT_DISABLE")  # jitted functions are plain ones: is it cgt?
STRICT = is_on("CGT_STRICT")  # what cannot be replayed raises
LOG = tuple(filter(None, os.environ.get("CGT_LOG", "").replace(" ", "").split(",")))  # see logs.py
NAN = is_on("CGT_NAN")  # which op made the first NaN or infinity, see finite.py
AUDIT = os.environ.get("CGT_AUDIT", "first:2,doubling:1")  # see cgt.jit
# None: what was not told addresses before, see audit.py.
VERIFY = {"": None, "0": False}.get(os.environ.get("CGT_VERIFY", ""), True)
WARN_AFTER = 20  # calls of a function of which none was replayed, which is then said once
OUTPUTS = ("rescue", "error", "borrow")  # numbers are those of Policy in cgt_core.pxd
INPUTS = ("auto", "fixed", "copied")
MAX_RECORDS = int(os.environ.get("CGT_MAX_RECORDS", "0")) or None  # None: HOPES, and 2 for each that was replayed
HOPES = 8
# Recordings in the whole process, past which those go that ran longest ago and have none behind them;
# also the longest path of one iteration.
MAX_GRAPHS = int(os.environ.get("CGT_MAX_GRAPHS", "1024"))
# Bytes that the recordings of the process may hold, of results, copies of inputs and what the driver takes, before
# another one is made; None: any.
MEMORY_BUDGET = os.environ.get("CGT_MEMORY_BUDGET") or None
# Calls that a function runs eagerly, after a verdict or past the re-record limit, before it may
# record again; doubles with every further verdict, up to the second number.
COOL_DOWN = (64, 4096)
LOOK_AGAIN = 8  # the same where a tensor had another shape: a window of the last eight is full soon
# Share of eager's time that recordings which are not replayed may cost a function; inf: record at every miss.
OVERHEAD = float("inf") if STRICT else float(os.environ.get("CGT_OVERHEAD", "0.05"))
# Seconds that recordings of all functions may take before anybody counts.
ALLOWANCE = float(os.environ.get("CGT_ALLOWANCE", "2"))
PATIENCE = 32  # calls alike after which one is recorded all the same; times itself with each
# Warm-ups of a function that reads values, until one is met that came before: of numbers, which often are of few, and
# of masks.
TRIES_OF_NUMBERS, TRIES_OF_MASKS = 6, 3
PARALLELS = ("auto", "always", "never")
PARALLEL = os.environ.get("CGT_PARALLEL", "never")  # see cgt.jit
MAX_SPECS = 64  # argument structures kept per function, of which the oldest without a recording goes; kinds of calls
MAX_VERDICTS = 4  # reasons against single calls, before one against the function
LESSONS = 16  # recordings in a row of which each came to nothing and should fare better next time, before a verdict
ESCAPE_TRIES = 2  # recordings thrown away because a tensor outlived the call, before a verdict
# Bytes of a tensor that a replay writes in a copy, if it lies elsewhere at each call; on the host, on a GPU. Twice 64
# MiB there and back are some 90 µs of an H100's memory; a function that writes more is not waiting for its launches.
MAX_CARRIED = (1 << 22, 1 << 26)
# Bytes of one, if it is larger or has gaps, which replays are told the address of, or it stays where it is: while it is
# recorded there is a copy.
MAX_REBOUND = 1 << 30
# Times that a parameter is replaced, so many calls after the last time at most, before replays copy it.
SWAPS, SWAPPED_SOON = 4, 64
ALIGN = {"cpu": 64, "cuda": 512}  # bytes; what PyTorch's allocators align to
MAX_REASONS = 64  # different ones that stats() keeps per function
EXPLAIN_ITEMS = 8  # reasons and slots shown in a line of explain()
# Places of a function that runs code compiled by Dynamo, of which all counts that it could run: past this it runs
# eagerly. A model of transformers, whose classes and modules name each other, has a million.
MAX_PLACES = int(os.environ.get("CGT_MAX_PLACES", "5000"))
