"""What keeps a function from being replayed, all of it at once."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import counts, jit_warm, tells, values

import cgt

ROOT = Path(__file__).resolve().parents[2]
COUNTED, DRAWN = iter(range(1 << 62)), np.random.default_rng(0)


def troubled(x):
    """Twelve things that no recording can hold."""
    a = float(x.sum())
    x = x * a
    b = x.detach().cpu().numpy().sum()
    c = random.random()
    d = time.time()
    torch.zeros(3, device=x.device).set_(torch.ones(4, device=x.device))
    torch.ones(2, device=x.device).resize_(5)
    x.to_sparse()
    n = next(COUNTED)
    torch.quantize_per_tensor(x.cpu(), 0.1, 0, torch.qint8)
    u = torch.unique(x * c)
    w = len(os.urandom(4))
    return x * (float(b) + d + n) + u.numel() + w + DRAWN.random()


PLANTED = {
    "_local_scalar_dense": 1, "Tensor.numpy": 3, "Random.random": 4, "time.time": 5, "set_": 6, "resize_": 7, "_to_sparse": 8, "COUNTED": None,
    "quantize_per_tensor": 10, "_unique2": 11, "os.urandom": 12, "DRAWN": None,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_every_planted_blocker_is_found_in_one_run(device):
    found = cgt.doctor(troubled, values(device, 4).abs() + 0.1)
    assert found.replays == 0 and found.calls <= 2
    first = troubled.__code__.co_firstlineno + 1
    missing = {
        what: line for what, line in PLANTED.items()
        if not any(what in one.text and (line is None or f"{__file__}:{first + line}" in one.text) for one in found.findings)
    }  # fmt: skip
    if device.type == "cuda":  # where .numpy() is the host's own affair, behind a copy that is told
        missing.pop("Tensor.numpy", None)
    assert not missing, str(found)
    assert "things to change, each of which costs the whole replay:" in str(found) and f"  {len(found.findings)}. (1x) " in str(found)


def test_function_without_any(device):
    ran = []
    found = cgt.doctor(lambda x, scale=2.0: (ran.append(1), x * scale)[1], values(device), scale=3.0)
    assert found.replays == 1 and not found.findings and found.calls == 3 and str(found).endswith("1 of 3 calls replayed.")
    assert len(ran) == 3  # a replay appends, too


@tells("waits")
def test_what_costs_is_told(device):
    found = cgt.doctor(lambda x: x * 2 if x.sum() > 0 else x, values(device))
    assert found.replays and any(f"read at {__file__}" in text for text in found.slow) and "note: CGT120: each call waits" in str(found)
    assert found.seconds > 0 and "A replay keeps the CPU for" in str(found)


def test_jitted_functions_are_examined_as_plain_ones(device):
    f = jit_warm(lambda x: x * 2, values(device))
    before = counts(f)
    assert cgt.doctor(f, values(device)).replays == 1 and counts(f) == before
    with pytest.raises(ZeroDivisionError):
        cgt.doctor(lambda x: 1 / 0, values(device))
    with pytest.raises(TypeError):
        cgt.doctor(3)


SCRIPT = """
import sys, torch, cgt

@cgt.jit
def fine(x):
    return x * 2

@cgt.jit
def bad(x):
    y = x * float(x.sum())
    return y + float(x.max())

if __name__ == "__main__":
    x = torch.ones(3)
    for k in range(5):
        fine(x), bad(x)
    print("ran with", sys.argv[1:])
"""


@tells("nothing_jitted")
def test_script(tmp_path):
    def doctor(*words):
        env = dict(os.environ, CGT_OVERHEAD="inf")  # whether a recording pays is asked of the clock
        return subprocess.run([sys.executable, "-m", "cgt", "doctor", *words], cwd=ROOT, env=env, capture_output=True, text=True)

    script, empty = tmp_path / "script.py", tmp_path / "empty.py"
    script.write_text(SCRIPT)
    empty.write_text("")
    done = doctor(str(script), "a", "--b")
    assert done.returncode == 0 and "ran with ['a', '--b']" in done.stdout, done
    assert "fine: 3 of 5 calls replayed." in done.stdout and "bad: 0 of 5 calls replayed. 2 things to change, each" in done.stdout
    assert all(f"{script}:{line} turns a tensor into" in done.stdout for line in (10, 11))
    assert "jits nothing" in doctor(str(empty)).stdout
    assert doctor().returncode == 2 and "usage" in doctor().stderr
