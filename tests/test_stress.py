"""Threads with resets and steps neither hang nor disagree with eager. By hand: tests/stress.py, for longer."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.parametrize("threads", [2, 4])
def test_threads_that_call_reset_and_step_agree_with_eager_and_never_hang(device, threads):
    command = [sys.executable, "tests/stress.py", "--seconds", "3"]
    done = subprocess.run(
        [*command, "--threads", str(threads), "--device", device.type],
        cwd=ROOT, env={"PYTHONPATH": str(ROOT), "PATH": ""}, text=True, capture_output=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    assert int(done.stdout.split()[2]) > 0  # replays
