"""Graphs of autograd's that recordings leave behind: deep ones, and those whose recording is freed meanwhile."""

import pytest
import torch
from helpers import calls
from torch.utils.flop_counter import FlopCounterMode

import cgt


def test_graph_of_fifty_thousand_ops(device):
    w = torch.ones(2, device=device, requires_grad=True)

    @cgt.jit
    def f(x):
        for _ in range(50_000):
            x = x + w
        return x

    x = torch.zeros(2, device=device)
    for k in range(3):
        y = f(x)
        assert torch.equal(y, torch.full_like(y, 50_000))
        if k != 1:  # the recorded call's graph is dropped, the replayed one's runs
            y.sum().backward()
            assert torch.equal(w.grad, y)
            w.grad = None
        del y
    s = cgt.stats(f)
    assert s.replays == s.backward.records == 1, s.reasons


def test_reset_while_a_recorded_graph_is_tried(device):
    resets = {len}  # sets are not looked into

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            (reset,) = resets
            reset(())
            return grad * 2

    f = cgt.jit(lambda x: Double.apply(x).sum())
    x = torch.ones(3, device=device, requires_grad=True)
    f(x)
    loss = f(x)
    resets.clear()
    resets.add(lambda _: cgt.reset())  # as another thread may: nothing is being recorded
    with FlopCounterMode(display=False):
        loss.backward()
    assert torch.equal(x.grad, torch.full_like(x, 2)) and cgt.stats(f).backward.eager == 1


def test_reset_before_a_backward_that_cannot_be_replayed(device):
    f = cgt.jit(lambda x: (x * x).sum())
    x = torch.ones(3, device=device, requires_grad=True)
    calls(f, 2, x)
    loss = f(x)
    cgt.reset()
    with pytest.raises(cgt.CgtError, match="create_graph"):
        loss.backward(create_graph=True)
    (x * 1).sum().backward()  # autograd's thread lets go of the error before it begins anything else
    assert cgt.stats(f).replays == 1
