"""Interrupt jitted functions at every moment, and look whether everything is usable afterwards.

    PYTHONPATH=. python tests/interrupts.py                       every moment of every program: hours
    PYTHONPATH=. python tests/interrupts.py --every 50            each fiftieth moment, another one at each run
    PYTHONPATH=. python tests/interrupts.py --microseconds 2000   by a timer: after 1, 2, 3 .. 2000 microseconds
    PYTHONPATH=. python tests/interrupts.py step 1 --device cuda  one program, its second call

A *moment* is where Python would run a signal's handler: at the beginning of a function, after a call, where
a loop jumps back; in cgt's own modules, in what they call (contextlib, torch's Python) and in the user's
function, but not in torch's Python below the user's function, where eager is interrupted as badly. A trace
function counts the moments and raises KeyboardInterrupt at the k-th one. A timer that goes off elsewhere is set again.

On the host each range of moments has a process of its own, forked: a crash is one finding and the sweep goes
on. On CUDA there is one process, and the first finding ends it.
"""

import argparse
import dis
import faulthandler
import functools
import gc
import math
import os
import pathlib
import random
import signal
import sys
import threading
import traceback
import typing

import torch

# isort: split
import cgt_core as core
import interrupt_programs
from helpers import identical
from interrupt_programs import PROGRAMS, jitted, plain, two_calls
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import cgt
from cgt.decide import freeing, sites
from cgt.numbers import standins
from cgt.run import taps
from cgt.words import options

options.OVERHEAD = math.inf  # record at every miss

USERS, CGT = {interrupt_programs.__file__}, str(pathlib.Path(cgt.__file__).parent) + os.sep
SECONDS = 60  # that one attempt may take
CALLS = 4  # of a program, each of them interrupted: the first warms, then records, replays
NEVER = sys.maxsize
JOB = "PYTHONPATH=. python tests/interrupts.py"


# --- interrupts -----------------------------------------------------------------------------------


class Fired(typing.NamedTuple):
    """What became of an attempt."""

    moments: int  # that went by
    where: str  # file:line of the interrupt; "" if there was none
    arrived: bool  # did it reach the caller?
    ignored: bool  # was it printed instead, since a destructor cannot raise; or cleared by PyTorch, which asked for an attribute?


@functools.cache
def moments_of(code):
    """Offsets of instructions before which a handler may run: behind a call, and where a loop jumps back."""
    found, behind = set(), False
    for i in dis.get_instructions(code):
        if behind or i.opname == "JUMP_BACKWARD":
            found.add(i.offset)
        behind = i.opname.startswith("CALL") and "INTRINSIC" not in i.opname
    return found


def counts_in(frame):
    """Is this frame cgt's, the user's function, or below one of cgt's?"""
    if frame.f_code.co_filename in USERS:
        return True
    while frame is not None and frame.f_code.co_filename not in USERS:
        if frame.f_code.co_filename.startswith(CGT):
            return True
        frame = frame.f_back
    return False


def is_asked(frame):
    """Is this frame below a question to what stands for a number? PyTorch asks each argument for __torch_function__, and
    clears whatever is raised there."""
    while frame is not None and frame.f_code is not standins.Float.__getattribute__.__code__:
        frame = frame.f_back
    return frame is not None


def at_moment(k, call):
    """call(), interrupted at its k-th moment."""
    seen, where, asked = 0, "", False

    def interrupt(frame):
        nonlocal seen, where, asked
        seen += 1
        if seen - 1 == k:
            sys.settrace(None)
            where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
            asked = is_asked(frame)
            raise KeyboardInterrupt("at a moment")

    def watch(frame, event, _):
        if event == "call":
            if not counts_in(frame):
                return None
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
            interrupt(frame)
        elif event == "opcode" and frame.f_lasti in moments_of(frame.f_code):
            interrupt(frame)
        return watch

    def watched():
        sys._getframe().f_trace_opcodes = True  # or Python 3.12 sends no opcodes to any frame
        sys.settrace(watch)
        try:
            call()
        finally:
            sys.settrace(None)

    arrived, ignored = caught(watched)
    return Fired(seen, where, arrived, ignored or asked)


def after_microseconds(n, call):
    """call(), interrupted by a timer, at the first of the places meant above."""
    where, over, pause, asked = "", False, 1e-5, False

    def handler(number, frame):
        nonlocal where, pause, asked
        if over:
            return
        if not counts_in(frame):
            pause = min(2 * pause, 1e-4)  # where this is slow (traced, on a busy machine), the next one would come while it runs
            signal.setitimer(signal.ITIMER_REAL, pause)
            return
        where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
        asked = is_asked(frame)
        raise KeyboardInterrupt("by a timer")

    def watched():
        nonlocal over
        signal.setitimer(signal.ITIMER_REAL, n / 1e6)
        try:
            call()
        finally:
            over = True
            signal.setitimer(signal.ITIMER_REAL, 0)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        arrived, ignored = caught(watched)
    finally:
        signal.signal(signal.SIGALRM, before)
    return Fired(0, where, arrived, ignored or asked)


def caught(call):
    """(was a KeyboardInterrupt raised, was one printed as unraisable)."""
    ignored = []
    before, sys.unraisablehook = sys.unraisablehook, lambda told: ignored.append(told.exc_type)
    try:
        call()
        return False, KeyboardInterrupt in ignored
    except KeyboardInterrupt:
        return True, KeyboardInterrupt in ignored
    finally:
        sys.unraisablehook = before


# --- afterwards -----------------------------------------------------------------------------------


def surroundings():
    """All that an interrupted call may leave behind, as it is now."""
    tapped = [t for t in (*vars(taps).values(), *taps.LATE.values()) if isinstance(t, taps.Tap)]
    patched = {
        f"{owner.__name__}.{name}": getattr(owner, name)
        for t in tapped
        for owner, name in t.targets
    }
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return patched | {
        "handlers": [len(t.handlers) for t in tapped],
        "observer": core.observer(),
        "locks": [t.lock.locked() for t in tapped],
        "gc": gc.isenabled(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": [torch.is_autocast_enabled(kind) for kind in kinds],
        "modes": len(_get_current_dispatch_mode_stack()),
        "blocker": core.blocker(),
        "paths": core.paths_mine(),
        "recording": core.books()["recording"],
        "RECORDING": sites.RECORDING._is_owned(),
        "hooks": core.save_hooks(),
        "listeners": core.listeners(),
        "profile": sys.getprofile(),
        "tools": [sys.monitoring.get_tool(k) for k in range(6)]
        if hasattr(sys, "monitoring")
        else [],
        "include": str(torch._C._dispatch_tls_local_include_set()),
        "exclude": str(torch._C._dispatch_tls_local_exclude_set()),
        "capturing": torch.cuda.is_current_stream_capturing,
        "stream": torch.cuda.current_stream() if torch.cuda.is_initialized() else None,
        "generator": id(torch.default_generator),
        "threads": torch.get_num_threads(),
        "excepthook": (sys.excepthook, threading.excepthook),
    }


def check_usable(before, device, program, call, f):
    """Nothing is left behind, the same function is right, and both it and a fresh one replay."""
    after = surroundings()
    wrong = {k: now for k, now in after.items() if now != before.get(k, now)}
    assert not wrong, "left behind: " + ", ".join(
        k if callable(now) else f"{k} {before[k]} -> {now}" for k, now in wrong.items()
    )
    core.stepped(False)
    want = PROGRAMS[program](plain, device)[1]()
    for _ in range(CALLS + 1):
        assert identical(call(), want), "the same function: another result than eager's"
    for name in ("inference", program):
        want = PROGRAMS[name](plain, device)[1]()
        fresh, call_fresh = PROGRAMS[name](jitted, device)
        for _ in range(CALLS + 1):
            assert identical(call_fresh(), want), f"a fresh {name}: another result than eager's"
        told = cgt.stats(fresh)
        assert told.replays or name == "eager", f"a fresh {name} does not replay: {told.reasons}"
    cgt.reset(f)
    for _ in range(CALLS + 1):
        call()
    assert cgt.stats(f).replays or program == "eager", f"no replay any more: {cgt.stats(f).reasons}"
    done = []
    thread = threading.Thread(target=lambda: done.append(call_fresh()), daemon=True)
    thread.start()
    thread.join(SECONDS / 2)
    assert done and identical(done[0], want), "another thread cannot call"
    cgt.reset()
    core.check_table()


def attempt(program, at, interrupt, device):
    """One interrupt in call number `at` of a program. Raises what is wrong afterwards."""
    core.alone()
    gc.collect()
    freeing.sweep()
    before, books = surroundings(), core.books()
    f, call = PROGRAMS[program](jitted, device)
    for _ in range(at):
        call()
    fired = interrupt(call)
    gc.collect()  # frames of a checkpoint may be a ring: they hold a graph whose backward may still come
    print(f" at {fired.where or 'no moment'}", flush=True)
    if fired.where:
        assert fired.arrived or fired.ignored, "the interrupt never arrived"
        try:
            check_usable(before, device, program, call, f)
        finally:
            del f, call
        gc.collect()
        freeing.sweep()
        more = {k: (books[k], n) for k, n in core.books().items() if n > books[k]}
        assert not more, f"rows outlive their functions: {more}"


def warm_up(device):
    """What any program does once in a process: imports, caches, pools."""
    for program in PROGRAMS:
        for wrap in (plain, jitted):
            _, call = PROGRAMS[program](wrap, device)
            for _ in range(CALLS):
                call()
    cgt.reset()
    gc.collect()
    gc.freeze()


# --- sweeps -----------------------------------------------------------------------------------------


def try_all(jobs, device):
    """Attempt one job after the other until one fails: how many were fine."""
    for k, (program, at, kind, n) in enumerate(jobs):
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        how = {"moment": at_moment, "timer": after_microseconds}[kind]
        print(f"{JOB} {program} {at} --{kind} {n}", end="", flush=True)
        try:
            attempt(program, at, functools.partial(how, n), device)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", flush=True)
            traceback.print_exc(limit=-4)
            return k
    faulthandler.cancel_dump_traceback_later()
    return len(jobs)


def try_apart(jobs, device):
    """The same in a forked process: how many jobs it began, how it ended (0: all were fine), what it said of
    the last one."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(write, 1), os.dup2(write, 2), os.close(read)
        faulthandler.enable(file=2)
        os._exit(1 if try_all(jobs, device) < len(jobs) else 0)
    os.close(write)
    with open(read, errors="replace") as pipe:
        said = pipe.read()
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return said.count(JOB), ended, said[said.rfind(JOB) :]


def sweep(jobs, device, chunk=40):
    """Attempt all jobs: how many failed."""
    failed = 0
    if device.type == "cuda":
        return int(try_all(jobs, device) < len(jobs))
    while jobs:
        begun, ended, said = try_apart(jobs[:chunk], device)
        if ended != 0:
            failed += 1
            print(f"exit {ended}: {said}", flush=True)
        jobs = jobs[max(begun, 1) :]
    return failed


def count_moments(program, at, device):
    """How many moments a call has."""
    _, call = PROGRAMS[program](jitted, device)
    for _ in range(at):
        call()
    return at_moment(NEVER, call).moments


def jobs_of(chosen, device, every, microseconds):
    """(program, call, kind, number) of all attempts. `every`: one moment of so many, at random."""
    for program, at in chosen:
        most = microseconds or count_moments(program, at, device)
        for k in range(0, most, every):
            yield (
                program,
                at,
                "timer" if microseconds else "moment",
                min(k + random.randrange(every), most - 1),
            )


def main():
    ask = argparse.ArgumentParser()
    ask.add_argument("program", nargs="?", choices=PROGRAMS)
    ask.add_argument("call", nargs="?", type=int)
    ask.add_argument("--every", type=int, default=1)
    ask.add_argument("--microseconds", type=int, default=0)
    ask.add_argument("--moment", type=int, help="this one alone, in this process")
    ask.add_argument("--timer", type=int, help="after these microseconds, alone, in this process")
    ask.add_argument("--device", default="cpu")
    asked = ask.parse_args()
    torch.set_num_threads(1)
    faulthandler.enable()
    device = torch.device(asked.device)
    at_moment(NEVER, two_calls)  # Python 3.13 instruments at the second time
    assert at_moment(NEVER, two_calls).moments == 3, "Python does not tell of its opcodes"
    warm_up(device)
    for how, n in ((at_moment, asked.moment), (after_microseconds, asked.timer)):
        if n is not None:
            return attempt(asked.program, asked.call, functools.partial(how, n), device)
    programs = [asked.program] if asked.program else list(PROGRAMS)
    calls = range(CALLS) if asked.call is None else [asked.call]
    chosen = [(program, at) for program in programs for at in calls]
    jobs = list(jobs_of(chosen, device, asked.every, asked.microseconds))
    failed = sweep(jobs, device)
    print(f"{len(jobs)} interrupts, {failed} left something unusable")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
