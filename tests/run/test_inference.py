"""Inference mode, around a call or inside the function: there, ops that are only made of others reach a dispatch
mode whole, and tensors are of another kind. All against an eager twin."""

import pytest
import torch
from helpers import counts, identical, values
from torch import nn

import cgt

INSIDE, AROUND = "inside", "around"


def both(function, where, make, n=8):
    """The jitted function, after n calls that agreed with eager bit for bit."""
    mode = torch.inference_mode()
    eager = mode(function)
    f = cgt.jit(mode(function)) if where == INSIDE else cgt.jit(function)
    jitted = f if where == INSIDE else mode(f)
    for k in range(n):
        x = make(k)
        want, got = eager(x.clone()), jitted(x)
        assert torch.equal(want, got) and want.is_inference() == got.is_inference(), k
    return f


@pytest.mark.parametrize("where", [INSIDE, AROUND])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2 if x.sum() > 12 else x * 3,
        lambda x: x * 2 if (x > 3).all() else x,
        lambda x: x * 2 if any(x > 5) else x,
        lambda x: torch.where(x > 4)[0],
        lambda x: x.repeat_interleave((x % 2 + 1).long()),
    ],
    ids=["sum", "all", "any", "where", "repeat_interleave"],
)
def test_what_depends_on_values_is_never_baked(device, where, function):
    f = both(function, where, lambda k: torch.arange(3.0, device=device) + k)
    s = cgt.stats(f)
    assert s.replays >= 3 and s.records >= 2, s.reasons  # another way where a value changed


@pytest.mark.parametrize("where", [INSIDE, AROUND])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[1] * 2,
        lambda x: x.view(-1) * 2,
        lambda x: x.T @ x,
        lambda x: x.chunk(2)[0].relu().reshape(-1),
    ],
    ids=["row", "view", "product", "chunk"],
)
def test_views_of_an_argument_that_moves(device, where, function):
    kept = []

    def make(k):
        kept.append(values(device, 4, 4, seed=k))
        return kept[-1]

    f = both(function, where, make)
    assert counts(f) == (1, 1, 6, 0) and cgt.stats(f).rebinds == 6


@pytest.mark.parametrize("where", [INSIDE, AROUND])
def test_layers(device, where):
    torch.manual_seed(0)
    attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).to(device).eval()
    f = both(lambda x: attention(x), where, lambda k: values(device, 2, 5, 8, seed=k))
    assert cgt.stats(f).replays == 6, cgt.explain(f)


def test_kernels_that_are_chosen_by_grad_mode(device):
    torch.manual_seed(0)
    lstm = nn.LSTM(2, 3, 2, bidirectional=True).to(device)
    both(lambda x: lstm(x)[0].abs().sum(0), INSIDE, lambda k: values(device, 4, 3, 2, seed=k), 10)


@pytest.mark.parametrize("writes", [False, True])
def test_results_that_are_given_back_from_outside_of_the_mode(device, writes):
    """A state that goes round: `x = f(x)`, with the mode inside."""

    @torch.inference_mode()
    def function(x, y):
        if writes:
            y.add_(x.mean())
        return x.tanh() + y, y * 2

    f = cgt.jit(function)
    mine, theirs = ((values(device, 2, 8), values(device, 2, 8, seed=2)) for _ in range(2))
    for k in range(12):
        cgt.step()
        mine, theirs = f(*mine), function(*theirs)
        assert all(identical(a, b) and a.is_inference() for a, b in zip(mine, theirs, strict=True)), k
    assert cgt.stats(f).replays >= 8, cgt.explain(f)


def test_result_of_an_inner_inference_mode_is_an_inference_tensor(device):
    def function(x):
        with torch.inference_mode():
            return x * 2

    f, x = cgt.jit(function), values(device)
    for _ in range(5):
        y = f(x)
        assert torch.equal(y, x * 2) and y.is_inference()
    assert counts(f) == (1, 1, 3, 0)
