"""cgt without the parts that it can do without: a copy of the package in which their files are missing."""

import shutil
import subprocess
import sys
from pathlib import Path

import cgt_core as core
import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = '''
import math, os, sys
import torch
import cgt
from cgt.words import options

assert cgt.__file__.startswith(os.getcwd()), cgt.__file__
options.OVERHEAD = math.inf
device, missing = torch.device(sys.argv[1]), sys.argv[2:]
for name in missing:
    try:
        __import__(name)
    except ImportError:
        continue
    raise AssertionError(f"{name} is here")


def runs(f, *calls, replays=3):
    """Each call as in eager, and as many were replayed."""
    for x in (*calls, *calls[-1:] * 4):
        got, want = f(x), f.__wrapped__(x)
        assert torch.equal(got, want), (got, want)
    assert cgt.stats(f).replays >= replays, cgt.explain(f)


def eagerly(f, x, code, want=None):
    """Six calls as in eager, none replayed, for this reason."""
    for _ in range(6):
        assert torch.equal(f(x), f.__wrapped__(x) if want is None else want)
    assert cgt.stats(f).replays == 0 and f"CGT{code}" in cgt.explain(f), cgt.explain(f)


x = torch.arange(12.0, device=device).view(4, 3) - 5
runs(cgt.jit(lambda x: torch.relu(x) * 2 + 1), x)
runs(cgt.jit(lambda x: torch.tensor([1.0, 2, 3], device=device) + x), x)


@cgt.jit
def chooses(x):
    return x * 2 if x.sum() > 0 else x - 1


negative = -x.abs()
runs(chooses, x, negative, x, negative)


def train(wrap):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, capturable=device.type == "cuda")

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = wrap(step)
    losses = [step(x).item() for _ in range(8)]
    return losses, [p.detach().clone() for p in model.parameters()], step


losses, weights, step = train(cgt.jit)
plain, wanted, _ = train(lambda f: f)
assert losses == plain and all(map(torch.equal, weights, wanted)), (losses, plain)
assert cgt.stats(step).replays >= 4, cgt.explain(step)

@cgt.jit
@torch.no_grad()
def forks(x):
    return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,))


if "cgt.cuts.forks" in missing:
    eagerly(forks, x, 605, x * 2)
else:
    assert all(torch.equal(forks(x), x * 2) for _ in range(6)) and cgt.stats(forks).replays >= 3, cgt.explain(forks)

import torch.distributed as dist

if dist.is_available():
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)

    @cgt.jit
    def exchanges(x):
        y = x * 2
        dist.all_reduce(y)
        return y

    wrapped = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 5).to(device))
    spread = torch.distributed.fsdp.fully_shard(torch.nn.Linear(3, 5, device=device))
    inner = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 5).to(device))
    if "cgt.ranks" in missing or device.type == "cpu":
        eagerly(exchanges, x, 703)
        eagerly(cgt.jit(lambda x: wrapped(x).detach()), x, 319)
    if "cgt.ranks" in missing:
        eagerly(cgt.jit(lambda x: spread(x).detach()), x, 234)
    want = inner(x)
    assert all(torch.equal(cgt.jit(inner)(x), want) for _ in range(6)) and cgt.stats(inner.module).replays >= 3
    dist.destroy_process_group()
'''


@pytest.mark.parametrize(
    "missing", [[], ["cgt.ranks"], ["cgt.cuts.forks"], ["cgt.ranks", "cgt.cuts.forks"]], ids=lambda names: "+".join(names) or "none"
)
def test_a_copy_without_them_imports_replays_and_says_what_it_lacks(device, missing, tmp_path):
    shutil.copytree(ROOT / "cgt", tmp_path / "cgt", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / Path(core.__file__).name).symlink_to(core.__file__)
    for name in missing:
        path = tmp_path / name.replace(".", "/")
        shutil.rmtree(path) if path.is_dir() else path.with_suffix(".py").unlink()
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run([sys.executable, "program.py", str(device), *missing], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
