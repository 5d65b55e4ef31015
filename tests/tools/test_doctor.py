"""What keeps a function from being replayed, all of it at once."""

import collections
import copy
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import counts, jit_warm, same, tells, values
from torch import nn

import cgt

ROOT = Path(__file__).resolve().parents[2]
COUNTED, DRAWN = iter(range(1 << 62)), np.random.default_rng(0)


def told(found):
    """However it is wrapped."""
    return " ".join(str(found).split())


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
    assert found.replays == 0 and not found.tried
    first = troubled.__code__.co_firstlineno + 1
    missing = {
        what: line for what, line in PLANTED.items()
        if not any(what in one.text and (line is None or f"{__file__}:{first + line}" in one.text) for one in found.findings)
    }  # fmt: skip
    if device.type == "cuda":  # where .numpy() is the host's own affair, behind a copy that is told
        missing.pop("Tensor.numpy", None)
    assert not missing, str(found)
    assert "things to change, each of which costs the whole replay:" in told(found) and f"  {len(found.findings)}. (1x) " in str(found)


def test_function_without_any(device):
    found = cgt.doctor(lambda x, scale=2.0: x * scale, values(device, 4), scale=3.0)
    assert not found.findings and found.replays >= 4 and found.changed is None
    assert found.tried == ("other values", "two batch sizes in turn")
    assert "  replays with other values, two batch sizes in turn" in str(found) and "A plain call takes" in str(found)
    assert found.seconds > 0 and found.replay_seconds > 0


@tells("waits")
def test_what_costs_is_told(device):
    found = cgt.doctor(lambda x: x * 2 if x.sum() > 0 else x, values(device))
    assert found.replays and any(f"read at {__file__}" in text for text in found.slow) and "note: CGT120: each call waits" in told(found)


def test_a_function_that_replays_with_the_same_values_alone(device):
    found = cgt.doctor(lambda x: x[x > 0].sum(), values(device, 400) - 0.2)
    assert found.replays > 0 and [one.when for one in found.findings] == ["other values"], str(found)
    assert "(1x, with other values) CGT" in told(found) and "two batch sizes in turn" in found.tried


def test_a_cache_that_grows_is_found(device):
    o = SimpleNamespace(cache=torch.zeros(1, 4, device=device))

    def grow(x):
        o.cache = torch.cat([o.cache, x])
        return o.cache.sum()

    before = o.cache
    found = cgt.doctor(grow, values(device, 1, 4))
    assert found.replays == 0 and "o.cache gets a tensor of another shape" in told(found) and o.cache is before


def test_modes_of_modules_are_tried(device):
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)).to(device)
    model[1].eval()
    with torch.no_grad():
        found = cgt.doctor(model, values(device, 6, 4))
    assert "train() and eval() in turn" in found.tried and [m.training for m in model] == [True, False, True]

    def switches(x):
        if model.training:
            return model(x)
        return x * float(x.sum())  # which keeps a call from being replayed

    model.train()
    found = cgt.doctor(switches, values(device, 6, 4))
    assert any(one.when == "train() and eval() in turn" and "CGT101" in one.text for one in found.findings), str(found)


def test_further_arguments_are_called_as_they_are(device):
    def function(x):
        return x * float(x[0]) if len(x) == 3 else x + 1

    found = cgt.doctor(function, values(device, 8), more=[(values(device, 5),), (values(device, 3),)])
    assert "more[0]" in found.tried and {one.when for one in found.findings} == {"more[1]"}, str(found)
    with pytest.raises(RuntimeError):
        cgt.doctor(function, values(device, 8), more=[(torch.ones(2, 2, device=device) @ torch.ones(3, device="cpu"),)])


def test_a_variation_that_the_function_refuses_is_left_out(device):
    def function(x):
        if len(x) != 4:
            raise ValueError("four, please")
        return x * 2

    found = cgt.doctor(function, values(device, 4))
    assert found.tried == ("other values",) and not found.findings


def test_a_variation_in_which_the_function_raises_later_is_left_out(device, monkeypatch):
    given = iter([1.0, 1.0, torch.nan])
    monkeypatch.setattr(sys.modules["cgt.doctor"], "other_values", lambda x: torch.full_like(x, next(given)))

    def function(x):
        if torch.isnan(x).any():
            raise ValueError("no number")
        return x * 2

    found = cgt.doctor(function, values(device, 4))
    assert found.tried == ("two batch sizes in turn",) and not found.findings and next(given, None) is None


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, 0.01),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
}


@pytest.mark.parametrize("seen", [0, 3], ids=["new", "trained"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_nothing_is_changed(device, optimizer, seen):
    """Of weights, buffers, gradients, optimizers, schedules, attributes, containers and random generators."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)).to(device)
    opt = optimizer(model.parameters())
    sch, rng = torch.optim.lr_scheduler.StepLR(opt, 2), torch.Generator(device=device)
    o = SimpleNamespace(n=0, losses=[], last=None, queue=collections.deque([1, 2]), box={"mean": torch.zeros(3, device=device)})

    def step(x, y):
        opt.zero_grad()
        loss = (model(x + torch.randn(x.shape, generator=rng, device=device)) - y).square().mean() + torch.rand(1, device=device).sum()
        loss.backward()
        opt.step()
        sch.step()
        o.n += 1
        o.losses.append(o.n)
        o.queue.append(o.n)
        o.last = loss.detach()
        o.box["mean"].add_(o.last)
        o.box[o.n] = random.random() + np.random.rand()
        return o.last

    x, y = values(device, 8, 4), values(device, 8, 1)
    for _ in range(seen):
        step(x, y)

    def state():
        grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        states = [model.state_dict(), opt.state_dict(), sch.state_dict(), vars(o), x, y]
        draws = [torch.get_rng_state(), rng.get_state(), random.getstate(), np.random.get_state()[1].tolist()]
        draws += [torch.cuda.get_rng_state()] if device.type == "cuda" else []
        return copy.deepcopy([grads, states, draws])

    before, held = state(), [*model.parameters(), *(p.grad for p in model.parameters()), o.losses, o.box, o.last]
    found = cgt.doctor(step, x, y)
    assert found.changed is None and found.calls > 1
    assert same(state(), before)
    now = [*model.parameters(), *(p.grad for p in model.parameters()), o.losses, o.box, o.last]
    assert all(a is b for a, b in zip(now, held, strict=True))


def test_what_cannot_be_put_back_is_told(device, monkeypatch):
    monkeypatch.setattr(sys.modules["cgt.doctor"], "MOST", 1)
    o = SimpleNamespace(a=1, b=2, c=3)
    found = cgt.doctor(lambda x: x * o.a * o.b * o.c, values(device))
    assert "not put back: the function reaches too much" in told(found)


def test_a_function_that_raises_leaves_all_as_it_was(device):
    o = SimpleNamespace(n=0, h=torch.zeros(4, 3, device=device))

    def function(x):
        o.n += 1
        o.h += x
        if o.n == 3:
            raise ZeroDivisionError
        return x

    with pytest.raises(ZeroDivisionError):
        cgt.doctor(function, values(device))
    assert o.n == 0 and not o.h.any()


def test_jitted_functions_are_examined_as_plain_ones(device):
    f = jit_warm(lambda x: x * 2, values(device))
    before = counts(f)
    assert cgt.doctor(f, values(device)).replays > 1 and counts(f) == before
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
