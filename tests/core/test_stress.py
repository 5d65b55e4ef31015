"""Threads with resets, steps and questions neither hang nor disagree with eager. By hand: tests/stress.py, for
longer."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch
from helpers import calls, in_threads, values

import cgt
from cgt.decide import dispatch, freeing, sites

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("threads", [2, 4])
def test_threads_that_call_reset_and_step_agree_with_eager_and_never_hang(device, threads):
    command = [sys.executable, "tests/stress.py", "--calls", "300"]
    done = subprocess.run(
        [*command, "--threads", str(threads), "--device", device.type],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True, capture_output=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    assert int(done.stdout.split()[2]) > 0  # replays


@pytest.mark.parametrize("number", [2, 3])
def test_a_function_that_is_reset_behind_a_call_that_looked_for_its_recording(device, number, monkeypatch):
    """As another thread may do before the call has the lock: the structure that was found is gone, or another one has
    its place."""
    f, x, y = cgt.jit(lambda x, n: x * n), values(device), values(device, 2, 5)
    calls(f, 3, x, 2)
    sweep = freeing.sweep

    def reset():
        monkeypatch.setattr(dispatch, "sweep", sweep)
        cgt.reset(f)
        if number != 2:
            calls(f, 3, x, number)

    monkeypatch.setattr(dispatch, "sweep", reset)
    assert torch.equal(f(y, 2), y * 2)
    for n in {2, number}:
        for _ in range(6):
            assert torch.equal(f(y, n), y * n)
    assert cgt.stats(f).replays >= 3 * (number - 1), cgt.explain(f)


def test_reports_may_be_asked_for_while_a_recording_is_freed(device):
    """By what a result's attribute does when it dies: in the middle of the row's end."""
    f, told = cgt.jit(lambda x: (x * 2, x + 1)), []

    class Asks:
        def __del__(self):
            told.extend((cgt.stats(f), cgt.explain(f), cgt.explain()))

    for k in range(2):
        result = calls(f, 3, values(device))[k]
        result.tag = Asks()
        del result
        cgt.reset(f)
    assert [len(told), told[0].records, told[3].records] == [6, 1, 2]


def test_reports_may_be_asked_for_while_other_threads_reset(device):
    f, x = cgt.jit(lambda x: (x * 2, x + 1)), values(device)

    def work(k):
        for _ in range(200):
            if k == 0:
                assert torch.equal(f(x)[0], x * 2)
            elif k == 1:
                cgt.reset(f)
            else:
                assert cgt.stats(f).calls >= 0 and cgt.explain(f) and cgt.explain()

    in_threads(4, work)
    assert cgt.stats(f).calls == 200


def test_functions_may_be_made_while_other_threads_ask_for_all():
    made, before = [cgt.jit(lambda x: x * 2) for _ in range(100)], sys.getswitchinterval()

    def work(k):
        for _ in range(1000):
            if k:
                assert len(sites.states()) >= 100
            else:
                made.append(cgt.jit(lambda x: x * 2))

    sys.setswitchinterval(1e-6)
    try:
        in_threads(3, work)
    finally:
        sys.setswitchinterval(before)
    assert not any(cgt.stats(f).calls for f in made) and len(sites.states()) >= 1100
