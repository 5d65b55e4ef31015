"""Ranks that are gone, or do something else, while this one replays.

NCCL's watchdog looks at collectives that ran eagerly, each with the process group's timeout, and ends a process in which one takes longer:
it would wait forever. Of a replay nobody tells it. So a thread of ours puts an event behind what a stream was given, now and then, and does
as NCCL's does where that does not come to pass. Replays do nothing for it.
"""

import atexit
import faulthandler
import functools
import os
import sys
import threading
import time

import cgt_core as core
import torch

from . import errors
from .private import nccl_timeout

OFTEN, SELDOM = 10, 30  # so many looks in a timeout, and at least one in so many seconds
ENDED = threading.Event()
WATCHED = {}  # device -> streams of torch's, which live as long as the process


class Pace:
    """How long replays took at most, on average between two looks; in seconds. Until it is known each may take the timeout."""

    def __init__(self):
        self.slowest = None

    def allowance(self, timeout, replays):
        """Seconds that so many may take, with one that waits for another rank among them."""
        return timeout + replays * (timeout if self.slowest is None else self.slowest)

    def note(self, seconds, replays):
        self.slowest = max(self.slowest or 0.0, seconds / replays)


def begin(device):
    """A recording that exchanges data was made, and is replayed on the current stream of this device: see to it that replays end."""
    stream = torch.cuda.current_stream(device)
    if switched_off() or not is_lasting(stream):
        return
    new = device not in WATCHED
    streams = WATCHED.setdefault(device, set())
    streams.add(stream.cuda_stream)
    if new:
        wait, given_up = functools.partial(core.stream_wait, device, streams), functools.partial(give_up, device)
        args = functools.partial(core.launches, device), wait, nccl_timeout, given_up, ENDED
        threading.Thread(target=watch, args=args, name=f"cgt watchdog of cuda:{device}", daemon=True).start()


def is_lasting(stream):
    """The default stream and those of torch's pools last as long as the process; one that others made has its address for an id."""
    return stream.stream_id == 0 or stream.stream_id % 2 == 1


def switched_off():
    """By the variable that turns NCCL's off."""
    names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
    return next((os.environ[name] for name in names if name in os.environ), "") == "0"


def watch(launches, wait, timeout, given_up, ended):
    """Until `ended`. `launches()`: replays so far. `wait()`: until what the stream has is done. `timeout()`: seconds, None without a group.
    `given_up(seconds)` is called in another thread, since this one may be stuck in a driver's call."""
    pace, done, since = Pace(), 0, time.monotonic()
    while not ended.wait(min((timeout() or SELDOM) / OFTEN, SELDOM)):
        now, most = launches(), timeout()
        if now == done or most is None:
            continue
        seconds = pace.allowance(most, now - done)
        alarm = threading.Timer(seconds, given_up, [seconds])
        alarm.daemon = True
        alarm.start()
        wait()
        alarm.cancel()
        pace.note(time.monotonic() - since, now - done)
        done, since = now, time.monotonic()


def give_up(device, seconds):
    """As NCCL's watchdog does: the GPU waits for somebody who will not come."""
    print(errors.overdue(device, seconds), file=sys.stderr, flush=True)
    faulthandler.dump_traceback(2)  # sys.stderr may be no file
    os.abort()


atexit.register(ENDED.set)
