"""Groups of entries, judged in processes of their own: what crashes or hangs is a verdict, and the group's others go on
in another process.

A worker is forked from this process, which has torch and the databases loaded. On CUDA it imports them itself: a process
that has used CUDA cannot be forked, and some of the databases ask the GPU while they are imported.
"""

import gc
import itertools
import math
import multiprocessing
import os
import signal
import sys
import time
import warnings
from multiprocessing.connection import wait
from typing import NamedTuple

import torch

# isort: split
from cgt.words import options

from .entries import programs_of
from .judge import CRASH, EAGER_RAISES, LATE, first_line, judge

LIMIT_S = 120  # of one entry, or of making a group's samples: processes that share a GPU take turns, and LBFGS waits at each of its many reads
START_S = 90  # of a process that imports everything itself, beside others that do
FRESH_AFTER = 40  # groups that a forked process judges


class Row(NamedTuple):
    """What became of an entry."""

    kind: str
    name: str
    way: str
    dtype: str
    sample: int  # None: of making the samples
    verdict: str
    note: str


class Worker:
    """A process, what it is at, and until when it must answer."""

    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(max(1, torch.cuda.device_count()))))
    gpus = itertools.cycle(visible.split(","))  # each process has the next one

    def __init__(self, device):
        if device == "cuda":
            os.environ["CUDA_VISIBLE_DEVICES"] = str(next(Worker.gpus))  # for what is started here: this process has looked before
        context = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, device), daemon=True)
        self.process.start()
        theirs.close()
        self.group, self.sample, self.until = None, None, time.monotonic() + (0 if device == "cpu" else START_S)
        self.left = FRESH_AFTER if device == "cpu" else math.inf

    def give(self, group, first, most):
        """The group's entries from the first-th on."""
        self.group, self.sample = group, None
        self.pipe.send((group, first, most))
        self.until = max(self.until, time.monotonic()) + LIMIT_S

    def hear(self):
        """What it says: ("begins", sample), ("judged", sample, verdict, note), ("ends",) or ("leaves",). Where it ended, or has not
        answered in time, that is the verdict."""
        try:
            if self.pipe.poll():
                self.until = time.monotonic() + LIMIT_S
                return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            status = self.process.exitcode
            return "judged", self.sample, CRASH, signal.Signals(-status).name if status < 0 else f"exit status {status}"
        self.process.kill()
        self.process.join()
        return "judged", self.sample, LATE, f"no answer within {LIMIT_S} s"

    def dismiss(self):
        """It has judged its share."""
        self.pipe.send(None)
        self.process.join()


def work(pipe, device):
    """A worker's life: groups come, verdicts go."""
    quiet()
    while task := pipe.recv():
        group, first, most = task
        try:
            entries = programs_of(group, device)
        except Exception as error:  # PyTorch's: there are no samples here of this dtype, or on this device
            entries = []
            pipe.send(("judged", None, EAGER_RAISES, first_line(error)))
        for k, programs in chosen(entries, most):
            if k >= first:
                pipe.send(("begins", k))
                with torch.backends.cudnn.flags(enabled=True, deterministic=True):  # convolutions sum in one order
                    found = judge(programs)
                pipe.send(("judged", k, *found))
                if not alive():
                    return pipe.send(("leaves",))
        gc.collect()
        pipe.send(("ends",))


def quiet():
    """This process judges: one thread, a recording at every miss, and nothing is printed."""
    gc.freeze()  # a collection behind each group looks at what came since, not at PyTorch and its databases: half of the time
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    options.OVERHEAD, options.WARN_AFTER = math.inf, math.inf
    options.AUDIT, options.VERIFY = "", False  # what replays give by themselves is what is judged
    nowhere = os.open(os.devnull, os.O_WRONLY)
    sys.stdout.flush()
    for stream in (1, 2):
        os.dup2(nowhere, stream)


def alive():
    """Is the GPU still this process's? After some errors of its kernels whatever comes next raises."""
    try:
        torch.cuda.is_initialized() and torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def chosen(entries, most):
    """(number, entry) of at most so many, spread over all."""
    stride = math.ceil(len(entries) / most) if most else 1
    return [(k, entry) for k, entry in enumerate(entries) if k % max(stride, 1) == 0]


def run(groups, device, jobs=1, most=None, seconds=None, heard=lambda row: None, tick=lambda group: None):
    """[Row, ...] of all entries; with `seconds`, of the groups that begin before these are over. heard(row) is called with each as it
    comes, tick(group) at the end of each group."""
    waiting, rows, busy, idle = [(group, 0) for group in reversed(groups)], [], [], []
    until = time.monotonic() + (seconds or math.inf)
    try:
        while waiting or busy:
            if time.monotonic() > until:
                waiting.clear()
            while waiting and len(busy) < jobs:
                busy.append(idle.pop() if idle else Worker(device))
                busy[-1].give(*waiting.pop(), most)
            for w in ready(busy):
                what, *said = w.hear()
                group = w.group
                if what == "begins":
                    (w.sample,) = said
                elif what == "judged":
                    rows.append(Row(group.kind, group.name, group.way, group.dtype, *said))
                    heard(rows[-1])
                if what == "ends":
                    tick(group)
                    end_group(w, busy, idle)
                elif what == "leaves" or w.process.exitcode is not None:
                    busy.remove(w)  # another one goes on behind the entry that ended it
                    waiting += [(group, w.sample + 1)] if w.sample is not None else []
    finally:
        for w in (*busy, *idle):
            w.process.kill()
    return rows


def end_group(worker, busy, idle):
    """It is free for another one, or has judged its share."""
    busy.remove(worker)
    worker.left -= 1
    if worker.left > 0:
        idle.append(worker)
    else:
        worker.dismiss()


def ready(busy):
    """Those that have something to say, or are late."""
    pipes = {w.pipe: w for w in busy}
    spoke = wait(list(pipes), timeout=max(0.0, min((w.until for w in busy), default=0.0) - time.monotonic()))
    now = time.monotonic()
    return [w for pipe, w in pipes.items() if pipe in spoke or now >= w.until]
