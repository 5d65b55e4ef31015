"""Launches whose parameters are set while those before them still wait on the device: each computes with its own."""

import random

import torch
from helpers import identical, values

import cgt

LAUNCHES = {"cpu": 3_000, "cuda": 100_000}


def step(x, rate, t):
    """Some 20 µs of an H100, three times what the host takes: the queue fills up."""
    y = x.mul(rate).add(t)
    for _ in range(4):
        y = y.sin() + x
    return y.view(8, -1)[:, :16].sum(1)


def test_each_launch_has_its_own_address_and_numbers(device):
    n, draw = LAUNCHES[device.type], random.Random(3)
    inputs = [values(device, 64, 1024, seed=k) for k in range(48)]
    calls = [(draw.randrange(len(inputs)), draw.uniform(-2, 2), draw.randrange(-9, 9)) for _ in range(n)]
    f, got = cgt.jit(step), torch.empty(n, 8, device=device)
    for i, (k, rate, t) in enumerate(calls):
        got[i].copy_(f(inputs[k], rate, t))
    s = cgt.stats(f)
    assert s.records <= 4 and s.replays >= n - 12 and s.eager <= 6, cgt.explain(f)
    for i in range(0, n, max(1, n // 4_000)):
        k, rate, t = calls[i]
        assert identical(got[i], step(inputs[k], rate, t)), i
    assert len({tuple(row) for row in got[:1000].tolist()}) > 990


def test_each_launch_writes_to_its_own_address(device):
    """Copied, and copied back: no launch finds what another left, or writes where another should."""
    n, draw = LAUNCHES[device.type] // 4, random.Random(4)
    states = [values(device, 8, 512, seed=k) for k in range(32)]
    theirs = [t.clone() for t in states]

    def advance(state, rate):
        state.mul_(rate).add_(1.0)
        return state[:, 0].clone()

    f = cgt.jit(advance)
    calls = [(draw.randrange(len(states)), draw.uniform(-1, 1)) for _ in range(n)]
    for k, rate in calls:
        f(states[k], rate)
    for k, rate in calls:
        advance(theirs[k], rate)
    assert all(map(identical, states, theirs))
    assert cgt.stats(f).records <= 6 and cgt.stats(f).replays >= n - 20, cgt.explain(f)
