"""Forward-mode differentiation: tangents that begin and end in a call are computed by ops like any other. Some are zeros
without memory, which ops take and nobody writes; a CUDA graph is not recorded with them."""

import functools

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from helpers import AUDITS_BY_DEFAULT
from torch.utils import _pytree

import cgt

W = [[0.3, -0.2, 0.5], [0.1, 0.4, -0.6], [0.2, 0.7, 0.1]]
FORWARD_MODE = {  # of x and v; w requires grad
    "jvp": lambda x, v, w: torch.func.jvp(lambda x: torch.tanh(w.detach() @ x).softmax(0), (x,), (v,)),
    "zeros": lambda x, v, w: torch.func.jvp(lambda x: (torch.cat([x[1:], x[:1] * 2]), x.mean(), x.detach() * 3), (x,), (v,)),
    "in place": lambda x, v, w: torch.func.jvp(lambda x: x.clone().mul_(2).add_(x.exp()), (x,), (v,)),
    "jacfwd": lambda x, v, w: torch.func.jacfwd(lambda x: torch.where(x > 0, w.detach() @ x, x.exp()))(x),
    "hessian": lambda x, v, w: torch.func.hessian(lambda x: torch.tanh(w.detach() @ x).sum())(x),
    "laplacian": lambda x, v, w: torch.func.vmap(lambda x: torch.func.hessian(lambda x: (w.detach() @ x).sin().sum())(x).trace())(x.expand(4, 3)),
    "dual level": lambda x, v, w: tangent_of(lambda x: torch.nn.functional.layer_norm(w.detach() @ x, (3,)), x, v),
    "a gradient of it": lambda x, v, w: torch.autograd.grad(torch.func.jvp(lambda x: torch.tanh(w @ x), (x,), (v,))[1].square().sum(), w),
    "zeros alone": lambda x, v, w: (x * 2, torch._efficientzerotensor([3], device=x.device) * x),
}  # fmt: skip


def tangent_of(function, x, v):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, v))).tangent


def check(f, device, replays):
    """That it was replayed; on the GPU why not."""
    if device.type == "cpu":
        assert cgt.stats(f).replays >= replays, cgt.explain(f)
    else:
        assert cgt.stats(f).replays == 0 and any("zeros of autograd's" in reason for reason in cgt.stats(f).reasons), cgt.explain(f)


@pytest.mark.parametrize("audit", [None, AUDITS_BY_DEFAULT])
@pytest.mark.parametrize("what", FORWARD_MODE)
def test_forward_mode_inside_replays(device, what, audit):
    w = torch.tensor(W, device=device, requires_grad=True)
    function = functools.partial(FORWARD_MODE[what], w=w)
    f = cgt.jit(function, audit=audit)
    for k in range(8):
        x, v = torch.tensor([0.1, -0.7, 0.4], device=device) * k, torch.tensor([1.0, k, -2.0], device=device)
        want, got = _pytree.tree_leaves(function(x, v)), _pytree.tree_leaves(f(x, v))
        assert [t._is_zerotensor() for t in got] == [t._is_zerotensor() for t in want]
        assert all(map(torch.equal, got, want)), k
    check(f, device, 5)


def test_training_step_on_a_derivative_in_forward_mode_replays(device):
    """A network that is to solve a differential equation."""

    def make(wrap):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

        def step(x):
            optimizer.zero_grad()
            y, slope = torch.func.jvp(model, (x,), (torch.ones_like(x),))
            loss = (slope + y).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return wrap(step), model

    (f, mine), (step, theirs) = make(cgt.jit), make(lambda step: step)
    for k in range(10):
        x = torch.linspace(0, k + 1, 6, device=device)[:, None]
        assert torch.equal(f(x), step(x)), k
    assert all(map(torch.equal, mine.parameters(), theirs.parameters()))
    check(f, device, 6)


def test_calls_in_forward_mode_are_eager(device):
    w = torch.tensor(W, device=device)
    tanh = lambda x: torch.tanh(w @ x)  # noqa: E731
    f = cgt.jit(tanh)
    for k in range(5):
        x = torch.full((3,), 0.1 * k, device=device)
        assert torch.equal(f(x), tanh(x))  # what is recorded knows no tangents
        assert torch.equal(*(tangent_of(one, x, torch.ones_like(x)) for one in (f, tanh)))
    assert any("forward mode" in reason for reason in cgt.stats(f).reasons)


def test_tensors_without_memory_give_their_shape_alone(device):
    f = cgt.jit(lambda x: x * torch.nn.Linear(3, 5, device="meta").weight.numel())
    for k in range(6):
        x = torch.full((3,), float(k), device=device)
        assert torch.equal(f(x), x * 15)
    assert cgt.stats(f).replays >= 3, cgt.explain(f)
    f = cgt.jit(lambda x: (x * 2, x.to("meta")))
    for k in range(6):
        got = f(torch.full((3,), float(k), device=device))
        assert got[1].is_meta and got[0][0] == 2 * k
    assert cgt.stats(f).replays == 0
