"""What Python gives another value of each time: clocks, random numbers, files, iterators. A replay would repeat
the recorded one, so a function that asks for such a value runs eagerly.

Seen in two ways. Builtin functions are noticed when they are called (taps.tap_calls); it counts who
calls: torch reads clocks for its own ends, and logging happens when a function is recorded (docs/footguns.md).
What keeps a state is compared before and after the run: the generators of `random` and numpy, and those, iterators
and files that the function can reach (places.find_places).
"""

import builtins
import datetime
import functools
import gc
import io
import os
import pickle
import queue
import random
import socket
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import cgt_core as core

from ..data import Seen
from ..run.observe import asks_on, note_reason
from ..run.taps import tap_calls
from ..words import errors
from ..words.private import READS_STATE, outside_dynamo
from .code import LIBRARIES, code_reads, family, is_ambient, is_compiled, is_read
from .places import is_random

UNKNOWN = object()  # the state of what cannot be asked for it

READS = "read readline readlines readinto read1 readall peek"
IMPURE = {  # core.method_id -> what the builtin function is called in a reason. Of the files only real ones
    core.method_id(getattr(owner, name)): f"{owner.__name__}.{name}".removeprefix("builtins.")
    for owner, names in (
        (time, "time time_ns perf_counter perf_counter_ns monotonic monotonic_ns process_time process_time_ns"),
        (time, "thread_time thread_time_ns clock_gettime clock_gettime_ns localtime gmtime ctime asctime strftime"),
        (datetime.datetime, "now utcnow today"),
        (datetime.date, "today"),
        (os, "urandom getrandom times getloadavg listdir scandir stat lstat access open read pread readlink"),
        (builtins, "input open"),
        (sys.modules.get("numpy"), "fromfile"),  # torch has imported it, where it is there
        (io, "open_code"),
        *((cls, READS) for cls in (io.TextIOWrapper, io.BufferedReader, io.BufferedRandom, io.FileIO)),
        (random.Random.__base__, "random getrandbits seed"),
        (socket.socket.__base__, "recv recv_into recvfrom recvfrom_into"),
        (queue.SimpleQueue, "get get_nowait"),
    )
    for name in names.split()
    if hasattr(owner, name)
}
IMPURE.pop(0, None)  # what is no builtin function everywhere
# Modules whose calls are no draws of the function's, whoever calls them: they write and import. ipykernel and
# pytest stand behind sys.stdout.
QUIET = frozenset(("logging", "warnings", "traceback", "linecache", "importlib", "ipykernel", "_pytest"))
# What these read of files is what the function asked for.
LOADERS = "torch.serialization", "numpy.lib", "numpy._core.memmap", "numpy.core.memmap"


def tap(seen: Seen, is_mine: Callable[[], bool]) -> tuple[Callable[[], object], Callable[[], object]]:
    """A bracket: code that starts is added to seen.code.started; the first impure call, if mine, is the reason."""
    return tap_calls(seen.code.started, IMPURE, functools.partial(note_call, seen, is_mine), seen.code.beside)


def code_of_function(started: set[types.CodeType | None], imported: set[str]) -> set[types.CodeType | None]:
    """The code among this that is the function's, with its inner code: not that of libraries (but for what reads the
    state of optimizers), nor of modules that were just imported, nor that of who is told of garbage collections. None
    in it: some was not seen."""
    collecting = collectors()
    mine = [c for c in list(started) if c is not None]  # a list: other threads' last events may still come
    others = {*collecting, *(c for c in mine if c.co_filename in imported)}
    mine = [c for c in mine if (is_read(c) and c not in others) or is_compiled(c) or c in READS_STATE]
    return {inner for c in mine for inner in family(c)} | ({None} & started)


def asks_ids(ran: set[types.CodeType | None]) -> bool:
    """May it have been asked which tensor one is, by id? (What `is` tells is guarded.)"""
    return any("id" in code_reads(c).globals for c in ran if c is not None)


def imported(started: set[types.CodeType | None]) -> set[str]:
    """Files of modules, but of libraries, that were imported: with their bodies ran what later calls do not run."""
    bodies = {c.co_filename for c in list(started) if c is not None and c.co_name == "<module>" and is_read(c)}
    modules = sys.modules.values() if bodies else ()
    # The rest is somebody's exec.
    return bodies & {getattr(module, "__dict__", {}).get("__file__") for module in list(modules)}


def collectors():
    """Code that is told of garbage collections, whenever one comes (hypothesis has some)."""
    return {getattr(callback, "__code__", None) for callback in gc.callbacks}


@outside_dynamo
def note_call(seen, is_mine, function, frame):
    """One of them is about to be called. No exception may leave: in a capture the reason is told at its end."""
    line = line_of_caller(frame) if asks_on(seen) and is_mine() else None
    if line is not None:
        note_reason(seen, errors.impure(IMPURE[core.method_id(function)], line))


def line_of_caller(frame):
    """file:line of the user's code that comes to this frame, or None if a library asks for its own ends."""
    line, collecting = None, collectors()
    while frame is not None:
        name = frame.f_globals.get("__name__") or ""
        root = name.partition(".")[0]
        if root in QUIET or frame.f_code in collecting:
            return None
        if root == "cgt" or (line is None and root in LIBRARIES and not name.startswith(LOADERS)):
            return line
        if line is None and not is_ambient(name):
            line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return line


# States, of sources: (path, object) of what places.is_source.


def states(sources: Iterable[tuple[str, object]]) -> list[tuple[str, object, object]]:
    """[(path, source, its state)] of these, and of the generators that everybody can reach."""
    mtrand = sys.modules.get("numpy.random.mtrand")
    everybodys = [("random", random._inst)] + ([("numpy.random", mtrand._rand)] if mtrand else [])
    return [(path, source, state_of(source)) for path, source in (*everybodys, *sources)]


def unasked(sources: Iterable[tuple[str, object]]) -> str | None:
    """A sentence if one of these cannot be asked whether it gave something: no run of such a function is recorded."""
    mine = ((path, source) for path, source in sources if not is_random(type(source)))
    return next((errors.advanced(path) for path, source in mine if state_of(source) is UNKNOWN), None)


def lasting(before: list[tuple[str, object, object]]) -> list[tuple[str, object, object]]:
    """Those whose state cannot be put back."""
    return [one for one in before if not is_random(type(one[1]))]


def vet(before: list[tuple[str, object, object]], seen: Seen) -> str | None:
    """A sentence if something gave values since, or may have."""
    return next(moved(before, seen), None)


def moved(before: list[tuple[str, object, object]], seen: Seen) -> Iterator[str]:
    """A sentence for each that did."""
    started = list(seen.code.started)  # a run under way still adds some
    hides = None in started or any(map(is_compiled, started))
    for path, source, state in before:
        is_code = type(state) is types.CodeType
        gave = hides or state in started if is_code else state is UNKNOWN or marked(state) != marked(state_of(source))
        if gave:
            yield (errors.outside_draw if is_random(type(source)) else errors.advanced)(path)


def put_back(before: list[tuple[str, object, Any]]) -> None:
    """Give random generators their states again: a capture drew from them that never ran."""
    for _, source, state in before:
        if is_random(type(source)) and state is not None and marked(state) != marked(state_of(source)):
            if isinstance(source, random.Random):
                random.Random.setstate(source, state)
            else:
                bits_of(source).state = state


def marked(state: object) -> object:
    """Something to compare a state by: numpy's are dicts of arrays."""
    return pickle.dumps(state) if type(state) is dict else state


def state_of(source: Any) -> object:
    """What changes when this gives a value. None: nothing does; of code, a code object that runs when it does. An
    iterator of Python's own, but for a generator, cannot be asked."""
    cls = type(source)
    if is_random(cls):
        if isinstance(source, random.Random):  # the system's has no state, and is seen when it is called
            return None if isinstance(source, random.SystemRandom) else random.Random.getstate(source)
        return bits_of(source).state
    if issubclass(cls, io.IOBase):
        return position(source) if is_ambient(cls.__module__) else None
    if cls is types.GeneratorType:
        return source.gi_code
    return getattr(cls.__next__, "__code__", UNKNOWN)


def bits_of(source):
    """What has the state of one of numpy's generators."""
    return getattr(source, "bit_generator", None) or getattr(source, "_bit_generator", source)


def position(file):
    """Where a file will be read next."""
    try:
        return file.tell() if file.readable() else None
    except ValueError:
        return "closed"
    except OSError:  # is no file, or is being read line by line
        return UNKNOWN
