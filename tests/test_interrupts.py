"""A Ctrl-C, or any exception of a signal's handler, at whatever moment leaves everything usable.

The sweep is tests/interrupts.py, which says how to run all of it; here a sample, other moments each time. In
a process of its own: a crash is a failure of one test.
"""

import pathlib
import subprocess
import sys

import cgt_core as core
import pytest

ROOT = pathlib.Path(__file__).parent.parent
EVERY = 1500 if core.debug_build() else 600  # of some 85,000 moments


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
