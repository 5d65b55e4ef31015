"""Functions that make, read, return, add to, replace and clear a gradient, called in any order, agree
with eager; and so do the results that somebody holds.

A gradient is an argument that no signature shows: a function may ask whether there is one, read it,
hand it out, and leave another one behind.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cgt

ROUNDS = 12


class Weights:
    """Two parameters, and functions of theirs."""

    def __init__(self, device, wrap):
        self.w = torch.ones(3, device=device, requires_grad=True)
        self.v = torch.full((3,), 0.5, device=device, requires_grad=True)
        self.call = {name: wrap(getattr(self, name)) for name in NAMES}

    def backward(self, x):
        (self.w * self.v * x).sum().backward()

    def returned(self, x):
        self.backward(x)
        return self.w.grad

    def viewed(self, x):
        self.backward(x)
        return self.w.grad[1:]

    def asked(self, x):
        return x * 2 if self.w.grad is None else self.w.grad * 2

    def added(self, x):
        if self.w.grad is None:
            return x + 1
        self.w.grad.add_(x)
        return self.w.grad * 1

    def replaced(self, x):
        if self.w.grad is not None:
            self.w.grad = self.w.grad + x

    def cleared(self, x):
        self.w.grad = None

    def plain(self, x):
        return x * 3


NAMES = ("backward", "returned", "viewed", "asked", "added", "replaced", "cleared", "plain")


def run(weights, names, steps, device):
    """Every result and gradient, and what is held of the last results, after every call."""
    x, held, seen = torch.arange(3.0, device=device), [], []
    w, v = weights.w, weights.v
    for k in range(ROUNDS):
        if steps:
            cgt.step()
        for name in names:
            given = w.grad if name == "plain" and w.grad is not None else x
            result = weights.call[name](given)
            if result is not None and k % 4 == 1:
                held.append(result)
            now = [result, w.grad, v.grad, *held[-3:]]
            seen.append([None if t is None else t.detach().clone() for t in now])
        x = x + 1 if k % 3 == 0 else x.add_(1)
        if k % 5 == 0:
            v.grad = None
        if k % 6 == 5:
            w.grad = None
        if k % 7 == 3:
            w.data = torch.full((3,), float(k), device=device)
    return seen


def same(a, b):
    return a is b is None or (a is not None and b is not None and torch.equal(a, b))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(names=st.lists(st.sampled_from(NAMES), min_size=2, max_size=5), steps=st.booleans())
def test_any_order_agrees_with_eager(device, names, steps):
    eager, jitted = Weights(device, lambda f: f), Weights(device, cgt.jit)
    try:
        want, got = (run(each, names, steps, device) for each in (eager, jitted))
        for k, (a, b) in enumerate(zip(got, want, strict=True)):
            assert len(a) == len(b) and all(map(same, a, b)), f"after call {k}"
    finally:
        cgt.reset()


@pytest.mark.parametrize("steps", [False, True], ids=["without step", "with step"])
def test_a_function_that_asks_for_a_gradient_notices_that_one_came(device, steps):
    weights, x = Weights(device, cgt.jit), torch.arange(3.0, device=device)
    for _ in range(5):
        if steps:
            cgt.step()
        assert torch.equal(weights.call["asked"](x), x * 2)
    weights.w.grad = torch.full((3,), 7.0, device=device)
    for _ in range(5):
        if steps:
            cgt.step()
        assert torch.equal(weights.call["asked"](x), torch.full((3,), 14.0, device=device))
    weights.w.grad = None
    assert torch.equal(weights.call["asked"](x), x * 2)
    s = cgt.stats(weights.call["asked"])
    assert s.eager == 0 and s.records <= 3 and s.replays >= 7
