"""A Ctrl-C, or any exception of a signal's handler, at whatever moment leaves everything usable.

The sweep is tests/interrupts.py, which says how to run all of it; here a sample, other moments each time. In
a process of its own: a crash is a failure of one test.
"""

import pathlib
import subprocess
import sys

import cgt_core as core
import pytest
import torch
from helpers import values

import cgt
from cgt.run import constants

ROOT = pathlib.Path(__file__).parents[2]
EVERY = 1500  # of some 85,000 moments


def swept(device, *options):
    """What the sweep says in the end; all of it where it failed."""
    command = [sys.executable, "tests/interrupts.py", "--device", device.type, *map(str, options)]
    path = {"PYTHONPATH": str(ROOT), "PATH": ""}
    if device.type == "cpu":
        path["CUDA_VISIBLE_DEVICES"] = ""  # autograd would have threads, which no fork survives
    done = subprocess.run(
        command, cwd=ROOT, env=path, text=True, capture_output=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return int(done.stdout.split()[-6])


@pytest.mark.parametrize("by", ["moment", "timer"])
def test_interrupts_leave_everything_usable(device, by):
    options = ("--every", EVERY) if by == "moment" else ("--microseconds", 2000, "--every", 1000)
    assert swept(device, *options) > 40


def test_an_error_of_what_is_put_back_does_not_hide_the_interrupt():
    """Who catches an exception, and runs the function again, would lose the user's Ctrl-C."""
    ends = [KeyboardInterrupt(), RuntimeError(), RuntimeError()]

    def end():
        raise ends.pop(0)

    def body():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        core.within([(lambda: None, end)], lambda: None)
    assert not ends
    ends = [RuntimeError()] * 3
    with pytest.raises(KeyboardInterrupt):
        core.within([(lambda: None, end)], body)


def test_interrupt_of_a_wait_beside_a_capture(device, monkeypatch):
    """Putting back begins once more, and may not wait where a capture forbids it."""
    if device.type == "cpu":
        pytest.skip("the host driver has no captures")
    stops = []

    class Stream(torch.cuda.Stream):
        def synchronize(self):
            super().synchronize()
            if stops:
                raise stops.pop()

    monkeypatch.setitem(constants.STREAMS, torch.cuda.current_device(), Stream())
    part = cgt.eager(lambda y: y.flip(0) * 2)
    f, x = cgt.jit(lambda x: part(x + 1) - x), values(device)
    f(x)
    stops.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        f(x)
    assert all(torch.equal(f(x), (x + 1).flip(0) * 2 - x) for _ in range(5))
    assert cgt.stats(f).replays >= 3, cgt.explain(f)
