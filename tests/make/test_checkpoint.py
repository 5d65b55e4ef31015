"""Activation checkpointing and randomness: inside a jitted function and around one, bit for bit eager's,
and the generator where eager leaves it."""

import pytest
import torch
import torch.nn.functional as F
from test_autograd import both, data, grads_of, same
from torch import nn
from torch.utils.checkpoint import checkpoint

import cgt


class Blocks(nn.Module):
    """Dropout inside and outside of what is recomputed; a checkpoint in a checkpoint."""

    def __init__(self, **how):
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.one, self.two = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.leave, self.how = nn.Linear(16, 4), how

    def block(self, layer, h):
        return h + F.dropout(F.gelu(layer(h)), 0.3, self.training)

    def forward(self, x):
        h = F.dropout(self.enter(x), 0.2, self.training)
        h = checkpoint(self.block, self.one, h, **self.how)
        h = F.dropout(h, 0.1, self.training)
        h = checkpoint(self.block, self.two, h, **self.how)
        return self.leave(h).square().mean()


def let_go(f):
    """What a checkpoint in a recording calls is a method of the module that has the recording: a row of test_footguns.py."""
    if isinstance(f, nn.Module):
        cgt.unjit(f)


WAYS = [
    pytest.param({"use_reentrant": r, "preserve_rng_state": p}, id=f"{'' if r else 'not '}reentrant-{'' if p else 'not '}preserved")
    for r in (True, False)
    for p in (True, False)
]  # fmt: skip


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("whole", [True, False], ids=["whole step", "differentiable"])
def test_inside(device, how, whole):
    def run(wrap):
        model = Blocks(**how).to(device)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            opt.zero_grad()
            loss = model(x)
            loss.backward()
            opt.step()
            return loss.detach()

        f, seen = wrap(step if whole else model), []
        for x in data(device, 12):
            if whole:
                seen.append(f(x).clone())
                continue
            loss = f(x)
            loss.backward()
            seen += [loss.detach().clone(), grads_of(model)]
            opt.step()
            opt.zero_grad()
        return f, [seen, torch.rand(4, device=device)]

    (_, want), (f, got) = both(run, device)
    assert same(want, got)
    s = cgt.stats(f)
    assert s.eager == 0 and s.replays >= 9, cgt.explain(f)
    assert whole or (s.backward.eager == 0 and s.backward.replays >= 8), cgt.explain(f)
    let_go(f)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("order", ["in order", "out of order", "twice"])
def test_two_pending_forwards(device, how, order):
    def run(wrap):
        model = Blocks(**how).to(device)
        f, seen, batches = wrap(model), [], data(device, 20)
        for k in range(0, 20, 2):
            a, b = f(batches[k]), f(batches[k + 1])
            for loss in (a, b) if order == "in order" else (b, a):
                loss.backward(retain_graph=order == "twice")
                seen.append(grads_of(model))
            if order == "twice":
                (a + b).backward()
                seen.append(grads_of(model))
            model.zero_grad()
            seen.append(torch.rand(2, device=device))
        return f, seen

    (_, want), (f, got) = both(run, device)
    assert same(want, got)
    s = cgt.stats(f)
    assert s.replays >= 10 and s.backward.replays >= 8, cgt.explain(f)
    let_go(f)


@pytest.mark.parametrize("how", WAYS)
def test_around(device, how):
    def run(wrap):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.GELU(), nn.Linear(16, 4)).to(device)
        f, seen = wrap(model), []
        for x in data(device, 10):
            x = x.requires_grad_()
            y = checkpoint(f, x * 2, **how)
            y.square().mean().backward()
            seen += [y.detach().clone(), x.grad.clone(), grads_of(model), torch.rand(2, device=device)]
            model.zero_grad()
        return f, seen

    (_, want), (f, got) = both(run, device)
    assert same(want, got)
    s = cgt.stats(f)
    if how["use_reentrant"]:
        assert s.replays >= 10, cgt.explain(f)
    else:
        assert any("use_reentrant=False" in reason for reason in s.reasons)


def test_states_in_any_interleaving_with_eager_ops(device):
    def run(wrap):
        model = Blocks(use_reentrant=False).to(device)
        f, seen = wrap(model), []
        for k, x in enumerate(data(device, 16)):
            if k in (5, 11):
                torch.manual_seed(k)
            loss = f(x)
            seen.append(torch.randn(3, device=device))
            loss.backward()
            seen += [torch.rand(3, device=device), grads_of(model)]
            model.zero_grad()
        return f, seen

    (_, want), (f, got) = both(run, device)
    assert same(want, got)
    assert cgt.stats(f).replays >= 12
    let_go(f)


def test_state_set_to_one_from_outside_runs_eagerly(device):
    state = (torch.cuda if device.type == "cuda" else torch).get_rng_state()

    def fixed(x):
        (torch.cuda if x.is_cuda else torch).set_rng_state(state)
        return F.dropout(x, 0.5)

    f = cgt.jit(fixed)
    x = torch.ones(64, device=device)
    with torch.no_grad():
        want = fixed(x)
        for _ in range(5):
            assert torch.equal(f(x), want)
            torch.rand(3, device=device)
    assert cgt.stats(f).replays == 0


def test_state_kept_outside_is_the_one_of_its_call(device):
    kept = []

    def keeps(x):
        kept.append((torch.cuda if x.is_cuda else torch).get_rng_state())
        return F.dropout(x, 0.5)

    f = cgt.jit(keeps)
    with torch.no_grad():
        x = torch.ones(64, device=device)
        results = [f(x).clone() for _ in range(4)]
    assert device.type == "cuda" or cgt.stats(f).replays == 2  # there a capture only has a token for the state
    for state, want in zip(kept, results, strict=True):
        (torch.cuda if device.type == "cuda" else torch).set_rng_state(state)
        assert torch.equal(F.dropout(x, 0.5), want)
