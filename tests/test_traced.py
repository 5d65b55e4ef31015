"""Jitted functions that torch.jit.trace meets, and modules of TorchScript that jitted functions meet."""

import pytest
import torch
from torch import nn

import cgt

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")


@pytest.mark.parametrize("recorded", [False, True])
def test_trace_through_a_jitted_function(device, recorded):
    linear = nn.Linear(3, 3).to(device).requires_grad_(False)
    f = cgt.jit(lambda x: linear(x).relu() * 2)
    x = torch.ones(2, 3, device=device)
    with torch.no_grad():
        for _ in range(3 * recorded):
            f(x)
        traced = torch.jit.trace(lambda x: f(x) + 1, x)
        for k in range(5):
            x = torch.full((2, 3), float(k), device=device)
            assert torch.equal(traced(x), linear(x).relu() * 2 + 1)
            assert torch.equal(f(x), linear(x).relu() * 2)
    assert any("torch.jit.trace is tracing the call" in reason for reason in cgt.stats(f).reasons)
    assert cgt.stats(f).replays >= 3
