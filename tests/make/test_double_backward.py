"""Backwards that want a graph of their own, and gradients in batches, through replayed calls: those are run once more."""

import pytest
import torch
from helpers import same, values
from torch import nn

import cgt


def several(device, n, seed=0):
    """Rows of six, others in each."""
    return [values(device, 4, 6, seed=seed + k) for k in range(n)]


def test_a_gradient_penalty_through_a_replayed_model(device):
    """The step of a Wasserstein GAN's critic; of its three calls one is differentiated twice."""

    def run(wrap):
        torch.manual_seed(0)
        critic = wrap(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(device))
        opt, seen = torch.optim.SGD(critic.parameters(), lr=0.1), []
        for real, fake in zip(several(device, 12), several(device, 12, seed=99), strict=True):
            opt.zero_grad()
            x = (0.3 * real + 0.7 * fake).requires_grad_()
            loss = critic(fake).mean() - critic(real).mean()
            (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
            (loss + (slope.norm(dim=-1) - 1).square().mean()).backward()
            opt.step()
            seen.append(loss.item())
        return critic, seen, [p.detach().clone() for p in critic.parameters()]

    run(lambda f: f)  # on a GPU the first run of a process differs from all others in the last bit
    critic, *got = run(cgt.jit)
    assert same(got, list(run(lambda f: f)[1:]))
    assert cgt.stats(critic).replays >= 20 and cgt.stats(critic).eager == 0, cgt.explain(critic)


@pytest.mark.parametrize("how", ["is_grads_batched", "vmap"])
def test_batched_gradients_through_a_replayed_call(device, how):
    w = torch.randn(4, 4, device=device, requires_grad=True)

    def function(x):
        return (x @ w).tanh(), (x @ w).exp()

    def jacobian(f, x):
        y, rows = f(x)[0], torch.eye(4, device=device)  # no gradient comes to the other result
        if how == "vmap":
            return torch.vmap(lambda v: torch.autograd.grad(y, x, v, retain_graph=True)[0])(rows)
        return torch.autograd.grad(y, x, rows, is_grads_batched=True)[0]

    f, x = cgt.jit(function), torch.randn(4, device=device, requires_grad=True)
    for _ in range(6):
        assert torch.equal(jacobian(f, x), jacobian(function, x))
    assert cgt.stats(f).replays == 4 and cgt.stats(f).eager == 0


def twice(f, x, w):
    """A gradient of a gradient."""
    (first,) = torch.autograd.grad(f(x), w, create_graph=True)
    return torch.autograd.grad(first.square().sum(), w)[0]


def test_what_python_draws_is_not_run_again(device):
    w = torch.ones(6, device=device, requires_grad=True)
    f = cgt.jit(lambda x: (torch.nn.functional.dropout(x) * w).exp().sum())
    for x in several(device, 4):
        f(x).backward()
    with pytest.raises(cgt.CgtError, match=r"draws random numbers.*\.__wrapped__"):
        twice(f, x, w)
    torch.manual_seed(0)
    want = twice(f.__wrapped__, x, w)
    torch.manual_seed(0)
    assert torch.equal(twice(f, x, w), want)  # eagerly from now on
    assert any("create_graph" in reason for reason in cgt.stats(f).reasons)


WHATS = ["gone", "modified", "replaced", "flag", "parameter", "buffer", "hook", "retained", "hook of an argument"]


@pytest.mark.parametrize("what", WHATS)
def test_a_call_whose_inputs_are_not_what_they_were_is_not_run_again(device, what):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.square = nn.Parameter(torch.full((6,), 0.5, device=device)), True
            self.b = nn.Parameter(torch.zeros(6, device=device))
            self.register_buffer("c", torch.ones(6, device=device))

        def forward(self, x, shift):
            x = x * self.w if self.square else x + self.w
            return ((x + self.b + self.c).exp() + shift).sum()  # autograd saves the power, and neither b nor c

    model = Model()
    f, w = cgt.jit(model), model.w
    for x in several(device, 4):
        f(x, torch.ones_like(x)).backward()
    shift, x = torch.ones_like(x), x.clone().requires_grad_() * 1
    if what == "retained":
        x.retain_grad()
    elif what == "hook of an argument":  # eager does not call it for w's gradient
        x.register_hook(lambda grad: grad * 2)
    y = f(x, shift)
    if what == "gone":  # eager has no use for it any more
        del shift
    elif what == "modified":
        shift.zero_()
    elif what == "parameter":
        with torch.no_grad():
            model.b.add_(1)
    elif what == "buffer":
        model.c.add_(1)
    elif what == "hook":  # it would double the gradient twice
        w.register_hook(lambda grad: grad * 2)
    elif what == "replaced":
        model.w = nn.Parameter(torch.ones(6, device=device))
    elif what == "flag":
        model.square = False
    with pytest.raises(cgt.CgtError, match="CGT408.*__wrapped__"):
        torch.autograd.grad(y, w, create_graph=True)
