"""Groups of entries, judged in processes of their own: what crashes or hangs is a verdict, and the group's others go on
in another process.

A worker is forked from this process, which has torch and the databases loaded. On CUDA it imports them itself: a process
that has used CUDA cannot be forked, and some of the databases ask the GPU while they are imported.
"""

import gc
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
from cgt import options

from .entries import programs_of
from .judge import CRASH, LATE, judge

LIMIT_S = 30  # of one entry, or of making a group's samples
FRESH_AFTER = 40  # groups that a forked process judges
AUDITS_OFF = ""  # what replays give by themselves is what is judged


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
    """A process, what it is at, and until when."""

    def __init__(self, device):
        context = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, device), daemon=True)
        self.process.start()
        theirs.close()
        self.group, self.sample, self.done = None, None, 0

    def give(self, group, first, most):
        """The group's entries from the first-th on."""
        self.group, self.sample = group, None
        self.pipe.send((group, first, most))
        self.heard()

    def heard(self):
        self.until = time.monotonic() + LIMIT_S

    def end(self):
        """How it ended: None if it had to be killed."""
        self.process.join(0.5 if time.monotonic() > self.until else 10)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            return None
        return self.process.exitcode


def work(pipe, device):
    """A worker's life: groups come, verdicts go."""
    quiet()
    while task := pipe.recv():
        group, first, most = task
        for k, programs in chosen(programs_of(group, device), most):
            if k >= first:
                pipe.send(("begins", k))
                pipe.send(("judged", k, *judge(programs)))
        gc.collect()
        pipe.send(("ends",))


def quiet():
    """This process judges: one thread, a recording at every miss, and nothing is printed."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    options.OVERHEAD, options.AUDIT, options.WARN_AFTER = math.inf, AUDITS_OFF, math.inf
    nowhere = os.open(os.devnull, os.O_WRONLY)
    sys.stdout.flush()
    for stream in (1, 2):
        os.dup2(nowhere, stream)


def chosen(entries, most):
    """(number, entry) of at most so many, spread over all."""
    stride = math.ceil(len(entries) / most) if most else 1
    return [(k, entry) for k, entry in enumerate(entries) if k % max(stride, 1) == 0]


def run(groups, device, jobs=1, most=None, heard=lambda row: None, tick=lambda group: None):
    """[Row, ...] of all entries. heard(row) is called with each as it comes, tick(group) after each group."""
    waiting, rows, workers = list(reversed(groups)), [], []
    try:
        while waiting or any(w.group for w in workers):
            workers = [w for w in workers if w.group or not retired(w, device)]
            while waiting and len(workers) < jobs and len([w for w in workers if w.group]) < jobs:
                workers.append(Worker(device))
                workers[-1].give(waiting.pop(), 0, most)
            for w in [w for w in workers if not w.group and waiting]:
                w.give(waiting.pop(), 0, most)
            for w in ready(workers):
                found = listen(w)
                if found is None:
                    tick(w.group)
                    w.group, w.done = None, w.done + 1
                elif found and found[0] != "begins":
                    rows.append(Row(w.group.kind, w.group.name, w.group.way, w.group.dtype, *found))
                    heard(rows[-1])
                    if w.process.exitcode is not None:  # the group goes on behind the entry that ended it
                        workers.remove(w)
                        if w.sample is None:
                            tick(w.group)
                        else:
                            workers.append(Worker(device))
                            workers[-1].give(w.group, w.sample + 1, most)
    finally:
        for w in workers:
            w.process.kill()
    return rows


def retired(worker, device):
    """Has it judged its share? It ends, and another one is forked."""
    if device != "cpu" or worker.done < FRESH_AFTER:
        return False
    worker.pipe.send(None)
    worker.process.join()
    return True


def ready(workers):
    """Those that have something to say, or are late."""
    busy = {w.pipe: w for w in workers if w.group}
    spoke = wait(list(busy), timeout=max(0.0, min((w.until for w in busy.values()), default=0.0) - time.monotonic()))
    now = time.monotonic()
    return [w for pipe, w in busy.items() if pipe in spoke or now >= w.until]


def listen(worker):
    """What a worker says: (sample, verdict, note) of an entry; ("begins",); None at the end of its group."""
    late = not worker.pipe.poll()
    try:
        said = ("late",) if late else worker.pipe.recv()
    except (EOFError, ConnectionResetError):
        said = ("gone",)
    if said[0] in ("late", "gone"):
        status = worker.end()
        if late:
            return worker.sample, LATE, f"no answer within {LIMIT_S} s"
        return worker.sample, CRASH, signal.Signals(-status).name if status and status < 0 else f"exit status {status}"
    worker.heard()
    if said[0] == "ends":
        return None
    worker.sample = said[1]
    return ("begins",) if said[0] == "begins" else said[1:]
