"""Replays that wait for a rank which is gone come to an end, as collectives that ran eagerly do; all others run undisturbed."""

import signal
import subprocess
import sys
import types
from datetime import timedelta

import pytest
import torch
from helpers import tells

from cgt.ranks import collectives
from cgt.words import private

PATIENCE_S, LONG_S = 3, 12  # the group's timeout; how long the GPU is kept busy
BEGIN = f"""
import datetime, sys, tempfile, time, warnings
import torch, torch.distributed as dist
warnings.simplefilter("ignore")
import cgt

dist.init_process_group("nccl", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1, timeout=datetime.timedelta(seconds={PATIENCE_S}))
torch.cuda._sleep(1)
torch.cuda.synchronize()
began = time.perf_counter()
torch.cuda._sleep(100_000_000)
torch.cuda.synchronize()
CYCLES_PER_S = 100_000_000 / (time.perf_counter() - began)

def slowly_reduced(x):
    torch.cuda._sleep(100_000_000)  # about 60 ms
    y = x * 2
    dist.all_reduce(y)
    return y

def busy(seconds):
    torch.cuda._sleep(int(seconds * CYCLES_PER_S))

x = torch.ones(4, device="cuda")
f, alone = cgt.jit(slowly_reduced), cgt.jit(lambda x: x + 1)
for _ in range(6):
    y, z = f(x), alone(x)
torch.cuda.synchronize()
assert cgt.stats(f).replays >= 3 and cgt.stats(alone).replays >= 3, cgt.explain(f)
time.sleep(1)  # it knows by now how long they take
"""
END = """
print("done", y.tolist())
"""


def run(what):
    program = BEGIN + what + END
    return subprocess.run([sys.executable, "-X", "faulthandler", "-c", program], capture_output=True, text=True, timeout=200)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs a GPU")
class TestProgram:
    @tells("overdue")
    def test_replay_that_does_not_come_to_an_end_ends_the_process(self):
        done = run(f"busy({LONG_S}); y = f(x)")
        assert done.returncode == -signal.SIGABRT and "done" not in done.stdout, done.stderr
        assert f"CGT708: replays on cuda:0 that exchange data with other processes have not ended within {PATIENCE_S} s" in done.stderr, done.stderr
        assert "Fatal Python error: Aborted" in done.stderr  # the fault handler's

    @pytest.mark.parametrize(
        "what", ["for _ in range(160): y = f(x)", f"busy({LONG_S}); y = alone(x)", f"dist.destroy_process_group(); busy({LONG_S}); y = alone(x)"],
        ids=["long queue", "nobody else's", "no group any more"],
    )  # fmt: skip
    def test_what_takes_longer_for_other_reasons_is_left_alone(self, what):
        done = run(what)
        assert done.returncode == 0 and "done" in done.stdout, done.stderr

    def test_what_turns_off_that_of_nccl_turns_off_ours(self, monkeypatch):
        monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        done = run(f"busy({LONG_S}); y = f(x)")
        assert done.returncode == 0 and "done" in done.stdout, done.stderr

    def test_numbers_are_traced_as_without_it(self):
        """Its threads run no Python."""
        done = run(
            "h = cgt.jit(lambda x, k: x * k)\nfor k in range(8): y = h(x, 1.0 + k)\n"
            "assert cgt.stats(h).records <= 2 and cgt.stats(h).replays >= 5, cgt.explain(h)"
        )
        assert done.returncode == 0 and "done" in done.stdout, done.stderr

    def test_streams_that_others_made_are_left_alone(self):
        side, made = torch.cuda.Stream(), torch.cuda.ExternalStream(torch.cuda.Stream().cuda_stream)
        assert collectives.is_lasting(torch.cuda.default_stream()) and collectives.is_lasting(side) and not collectives.is_lasting(made)


def test_timeout_is_that_of_the_most_patient_group_of_nccl(monkeypatch):
    class Group:
        def __init__(self, seconds):
            self.options = types.SimpleNamespace(_timeout=timedelta(seconds=seconds))

        def _get_backend(self, device):
            return self

    assert private.nccl_timeout() is None and not private.groups()
    groups = {Group(40): ("nccl", None), Group(70): ("cpu:gloo,cuda:nccl", None), Group(90): ("gloo", None)}
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_pg_map", groups)
    assert private.nccl_timeout() == 70


def test_a_process_with_a_group_is_known(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        assert private.groups()
    finally:
        torch.distributed.destroy_process_group()
    assert not private.groups()


@pytest.mark.parametrize("value, off", [(None, False), ("0", True), ("3", False)])
def test_variable_that_turns_it_off(monkeypatch, value, off):
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        monkeypatch.delenv(name, raising=False)
    if value is not None:
        monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", value)
    assert collectives.is_unguarded() == off
