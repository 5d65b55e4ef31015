"""Activations are freed as in eager: a recorded backward lets go of what it has read for the last time, and
of nothing that is still needed. Whatever it frees, the numbers are those of an eager twin."""

import copy

import pytest
import torch
from torch import nn

# isort: split
import cgt_core as core

import cgt

N = 256
SIZE = N * N * 4  # bytes of every activation and every weight gradient below


def halves(device, layers=4, seed=0):
    """Two stacks of layers without biases; a tanh saves its result, a linear layer its input."""
    torch.manual_seed(seed)
    return [
        nn.Sequential(
            *[m for _ in range(layers) for m in (nn.Linear(N, N, bias=False), nn.Tanh())]
        ).to(device)
        for _ in range(2)
    ]


def grads_of(*models):
    return [p.grad.clone() for m in models for p in m.parameters()]


def check(device, step, jitted=cgt.jit, iterations=8):
    """step(f, g, x, k): run it with jitted functions and with plain ones, and compare all gradients. The
    jitted ones."""
    a, b = halves(device)
    c, d = copy.deepcopy(a), copy.deepcopy(b)
    f, g = jitted(a), jitted(b)
    x = torch.randn(N, N, device=device)
    for k in range(iterations):
        for models, fs in (((a, b), (f, g)), ((c, d), (c, d))):
            for m in models:
                m.zero_grad()
            step(*fs, x, k)
        for p, q in zip(grads_of(a, b), grads_of(c, d), strict=True):
            assert torch.equal(p, q), k
    for h in (f, g):
        s = cgt.stats(h)
        assert s.replays >= 3 and s.backward.replays >= 2 and s.backward.eager == 0, cgt.explain(h)
    return f, g


@pytest.fixture
def spent(monkeypatch):
    """What recordings let go of: a list of bytes, in order."""
    seen = []

    def note(t, plain=core.spend):
        seen.append(t.nbytes)
        return plain(t)

    monkeypatch.setattr(core, "spend", note)
    return seen


def test_two_functions_need_no_more_than_their_activations(device, spent):
    """16 activations at the end of the forward; each gradient of a weight takes the place of two that
    died. Kept to the end of the backward, they would stand beside eight gradients."""
    cgt.reset()
    before = cgt.stats().pool_bytes

    def step(f, g, x, k):
        g(f(x)).square().mean().backward()

    check(device, step)
    assert len(spent) >= 12 and set(spent) == {SIZE}
    took = cgt.stats().pool_bytes - before
    assert took <= 1.1 * (16 + 4) * SIZE, f"{took / SIZE:.1f} activations"


def test_a_graph_that_is_retained_keeps_everything(device, spent):
    def step(f, g, x, k):
        loss = g(f(x)).square().mean()
        before = len(spent)
        loss.backward(retain_graph=True)
        assert len(spent) == before
        loss.backward()

    check(device, step, iterations=10)
    assert spent


def test_what_the_program_holds_is_not_freed(device, spent):
    """The middle activation is saved by one function, made by the other, and read after the backward."""

    def step(f, g, x, k):
        h = f(x)
        want = h.detach().clone()
        g(h).square().mean().backward()
        assert torch.equal(h, want)

    check(device, step)
    assert spent

    views, wants = [], []

    def view(f, g, x, k):
        h = f(x)
        wants.append(h.detach().clone())
        views.append(h.detach()[3:5])
        g(h).square().mean().backward()
        assert all(torch.equal(v, w[3:5]) for v, w in zip(views, wants, strict=True))

    check(device, view)


def test_held_at_one_call_and_not_at_another(device):
    kept = []

    def step(f, g, x, k):
        h = f(x)
        want = h.detach().clone()
        loss = g(h).square().mean()
        if k % 3 == 0:
            kept.append((h.detach(), want))
        del h
        loss.backward()
        assert all(torch.equal(h, w) for h, w in kept)

    check(device, step, iterations=14)


def test_several_forwards_and_backwards_in_another_order(device, spent):
    def step(f, g, x, k):
        losses = [g(f(x * (1 + j))).square().mean() for j in range(3)]
        for j in (1, 2, 0):
            losses[j].backward()

    check(device, step, iterations=6)
    assert spent


class TwoLooks(torch.autograd.Function):
    """Its backward unpacks what it saved twice, with other work in between."""

    @staticmethod
    def forward(ctx, x):
        y = x.tanh()
        ctx.save_for_backward(y)
        return y * 1

    @staticmethod
    def backward(ctx, grad):
        first = ctx.saved_tensors[0].square()
        other = (grad * first).exp()
        return grad - grad * ctx.saved_tensors[0] * ctx.saved_tensors[0] + 0 * other


def test_a_backward_that_reads_again_what_was_let_go_of(device, spent):
    class Half(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return TwoLooks.apply(self.inner(x))

    def step(f, g, x, k):
        g(f(x)).square().mean().backward()

    a, b = (Half(h) for h in halves(device, layers=1))
    c, d = copy.deepcopy(a), copy.deepcopy(b)
    f, g = cgt.jit(a), cgt.jit(b)
    x = torch.randn(N, N, device=device)
    for _ in range(9):
        for m in (a, b, c, d):
            m.zero_grad()
        step(f, g, x, 0)
        step(c, d, x, 0)
        assert all(
            torch.equal(p, q) for p, q in zip(grads_of(a, b), grads_of(c, d), strict=True)
        )
    for h in (f, g):
        s = cgt.stats(h).backward
        assert s.replays >= 4 and s.eager <= 2, cgt.explain(h)
        assert all("read a saved tensor again" in reason for reason in s.reasons)
    assert any(cgt.stats(h).backward.reasons for h in (f, g))


def test_a_failure_while_it_is_let_go_of(device):
    def step(f, g, x, k):
        if k == 1:
            core.fault_set("spend", 2, 2)
        g(f(x)).square().mean().backward()

    a, b = halves(device)
    c, d = copy.deepcopy(a), copy.deepcopy(b)
    f, g = cgt.jit(a), cgt.jit(b)
    x = torch.randn(N, N, device=device)
    for k in range(4):
        for m in (a, b, c, d):
            m.zero_grad()
        step(f, g, x, k)
        step(c, d, x, None)
        assert all(
            torch.equal(p, q) for p, q in zip(grads_of(a, b), grads_of(c, d), strict=True)
        )
    reasons = {**cgt.stats(f).backward.reasons, **cgt.stats(g).backward.reasons}
    assert any(reason.startswith("recording failed") for reason in reasons), reasons


def test_after_step_and_with_an_optimizer(device):
    optimizers = {}

    def step(f, g, x, k):
        cgt.step()
        g(f(x)).square().mean().backward()
        key = id(f)
        if key not in optimizers:
            parameters = [p for h in (f, g) for p in getattr(h, "__wrapped__", h).parameters()]
            optimizers[key] = torch.optim.SGD(parameters, lr=0.1)
        optimizers[key].step()

    check(device, step, iterations=10)
