"""Replays that wait for a rank which is gone come to an end, as collectives that ran eagerly do; all others run undisturbed."""

import signal
import subprocess
import sys
import threading
import types
from datetime import timedelta

import pytest
import torch
from helpers import tells

from cgt import private, watchdog

SOON_S, LATE_S = 0.1, 30  # a timeout that passes in a test, and one that does not


class Watched:
    """A stream as the watchdog sees it, and what came of it."""

    def __init__(self, timeout, ends):
        self.replays, self.ended, self.given_up, self.waits = 1, threading.Event(), [], 0
        self.stuck, self.looked, self.told = threading.Event(), threading.Event(), threading.Event()
        if ends:
            self.stuck.set()
        args = lambda: self.replays, self.wait, lambda: timeout, self.give_up, self.ended
        self.thread = threading.Thread(target=watchdog.watch, args=args, daemon=True)
        self.thread.start()

    def wait(self):
        self.waits += 1
        self.stuck.wait(LATE_S)
        self.looked.set()

    def give_up(self, seconds):
        self.given_up.append(seconds)
        self.told.set()

    def end(self):
        self.ended.set()
        self.stuck.set()
        self.thread.join(LATE_S)
        assert not self.thread.is_alive()


def test_stream_that_does_not_end_is_given_up_once():
    one = Watched(SOON_S, ends=False)
    assert one.told.wait(LATE_S)
    one.end()
    assert one.given_up == [pytest.approx(2 * SOON_S)] and one.waits == 1


def test_stream_that_ends_is_looked_at_after_replays_only():
    one = Watched(SOON_S, ends=True)
    assert one.looked.wait(LATE_S)
    threading.Event().wait(5 * SOON_S)
    assert one.waits == 1
    one.looked.clear()
    one.replays += 7
    assert one.looked.wait(LATE_S)
    one.end()
    assert one.waits == 2 and not one.given_up


def test_nothing_is_looked_at_without_a_group(monkeypatch):
    monkeypatch.setattr(watchdog, "SELDOM", SOON_S)
    one = Watched(None, ends=False)
    threading.Event().wait(5 * SOON_S)
    one.end()
    assert not one.waits and not one.given_up


def test_replays_that_are_slow_are_allowed_to_be():
    pace = watchdog.Pace()
    assert pace.allowance(10, 3) == 40  # nothing is known: each may take as long as a collective
    pace.note(seconds=6, replays=3)
    assert pace.allowance(10, 3) == 16
    pace.note(seconds=1, replays=1)
    assert pace.allowance(10, 3) == 16  # the slowest counts
    pace.note(seconds=9, replays=3)
    assert pace.allowance(10, 1) == 13


@tells("overdue")
def test_process_ends_with_what_its_threads_do():
    program = "import torch\nfrom cgt import watchdog\nwatchdog.give_up(1, 12.3)\nprint('still here')"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
    assert done.returncode == -signal.SIGABRT and "still here" not in done.stdout
    assert "CGT708: replays on cuda:1" in done.stderr and "within 12 s" in done.stderr and 'File "<string>", line 3' in done.stderr


def test_timeout_is_that_of_the_most_patient_group_of_nccl(monkeypatch):
    class Group:
        def __init__(self, seconds):
            self.options = types.SimpleNamespace(_timeout=timedelta(seconds=seconds))

        def _get_backend(self, device):
            return self

    assert private.nccl_timeout() is None
    groups = {Group(40): ("nccl", None), Group(70): ("cpu:gloo,cuda:nccl", None), Group(90): ("gloo", None)}
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_world", types.SimpleNamespace(pg_map=groups))
    assert private.nccl_timeout() == 70


@pytest.mark.parametrize("value, off", [(None, False), ("0", True), ("3", False)])
def test_what_turns_off_that_of_nccl_turns_off_ours(monkeypatch, value, off):
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        monkeypatch.delenv(name, raising=False)
    if value is not None:
        monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", value)
    assert watchdog.switched_off() == off


@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams are the GPU's")
def test_streams_that_others_made_are_left_alone():
    side, made = torch.cuda.Stream(), torch.cuda.ExternalStream(torch.cuda.Stream().cuda_stream)
    assert watchdog.is_lasting(torch.cuda.default_stream()) and watchdog.is_lasting(side) and not watchdog.is_lasting(made)
