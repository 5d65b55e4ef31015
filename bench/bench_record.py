"""What does a recording cost, and what does it bring, over running the function eagerly?"""

from time import perf_counter

import pytest
import torch
from conftest import wait

import cgt


def ops(n, device):
    """A function of `n` small ops, one after the other."""
    scale, shift = torch.rand(16, device=device), torch.rand(16, device=device)

    def f(x):
        for _ in range(n // 4):
            x = (x * scale + shift).tanh() - shift
        return x

    return f


def seconds(f, *args):
    """Of one call, until the device is done with it."""
    wait()
    begin = perf_counter()
    f(*args)
    wait()
    return perf_counter() - begin


@pytest.mark.parametrize("n", [64, 400])
def test_recording_over_an_eager_run(device, compare, figure, n):
    """The first call of a new function (warm) and the second (record), each over one eager run."""
    plain, x = ops(n, device), torch.rand(16, device=device)

    def warm(calls):
        return sum(seconds(cgt.jit(plain), x) for _ in range(calls))

    def record(calls):
        total = 0
        for _ in range(calls):
            f = cgt.jit(plain)
            f(x)
            total += seconds(f, x)
            assert cgt.stats(f).records == 1
        return total

    def eager(calls):
        return sum(seconds(plain, x) for _ in range(calls))

    us = compare({}, calls=1, rounds=20, record=record, warm=warm, eager=eager)
    figure(f"warming {n} ops over one eager run", us["warm"] / us["eager"], "×", detail=True)
    figure(f"recording {n} ops over one eager run", us["record"] / us["eager"], "×", at_most=6)


@pytest.mark.parametrize("n", [64])
def test_replay_of_small_ops_over_eager(device, compare, settled, figure, n):
    """A chain of ops on 16 numbers. On the host the tape is walked in compiled code; on the GPU it
    is one launch."""
    plain, x = ops(n, device), torch.rand(16, device=device)
    f = settled(cgt.jit(plain), (x,))
    us = compare({"f": f, "plain": plain, "x": x}, calls=10, cgt="f(x)", eager="plain(x)")
    figure(f"replay of {n} small ops", us["cgt"], "µs")
    figure(f"replay of {n} small ops over eager", us["cgt"] / us["eager"], "×", at_most=1.0)
