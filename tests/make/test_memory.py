"""Activations are freed as in eager: a recorded backward lets go of what it has read for the last time, and
of nothing that is still needed. Whatever it frees, the numbers are those of an eager twin."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

# isort: split
import cgt_core as core

import cgt
from cgt.make import autograd, trace

N = 256
SIZE = N * N * 4  # bytes of every activation and every weight gradient below


def halves(device, layers=4):
    """Two stacks of layers without biases; a tanh saves its result, a linear layer its input."""
    torch.manual_seed(0)
    return [
        nn.Sequential(
            *[m for _ in range(layers) for m in (nn.Linear(N, N, bias=False), nn.Tanh())]
        ).to(device)
        for _ in range(2)
    ]


def grads_of(*models):
    return [p.grad.clone() for m in models for p in m.parameters()]


def compare(device, step, models, iterations=8):
    """step(f, g, x, k): run it with jitted functions and with plain ones, and compare all gradients. The
    jitted ones."""
    twins, fs = copy.deepcopy(models), [cgt.jit(m) for m in models]
    x = torch.randn(N, N, device=device)
    for k in range(iterations):
        for m in (*models, *twins):
            m.zero_grad()
        step(*fs, x, k)
        step(*twins, x, k)
        for p, q in zip(grads_of(*models), grads_of(*twins), strict=True):
            assert torch.equal(p, q), k
    return fs


def check(device, step, models=None, iterations=8):
    """compare(...), and nearly all was replayed."""
    for f in compare(device, step, models or halves(device), iterations):
        s = cgt.stats(f)
        assert s.replays >= 3 and s.backward.replays >= 2 and s.backward.eager == 0, cgt.explain(f)


@pytest.fixture
def spent(monkeypatch):
    """What recordings let go of: a list of bytes, in order."""
    seen = []

    def note(t, plain=core.spend):
        seen.append(t.nbytes)
        return plain(t)

    monkeypatch.setattr(core, "spend", note)
    return seen


def plain(f, g, x, k):
    g(f(x)).square().mean().backward()


def test_two_functions_need_no_more_than_in_eager(device, spent):
    """Eight activations are saved; when a layer's backward computes two gradients from a third there are
    ten. All of it is spent one by one: activations, and the gradient that goes from one function to the
    other. (cuBLAS' workspace, 32 MiB, is in a CUDA pool, too.)"""
    cgt.reset()
    before = cgt.stats().pool_bytes
    check(device, plain)
    assert len(spent) >= 2 * 8 + 1 and set(spent) == {SIZE}
    if device.type == "cpu":
        assert cgt.stats().pool_bytes - before <= 10.1 * SIZE


def test_a_run_of_the_graph_that_ends_as_a_recording_begins(device, spent, monkeypatch):
    """In another thread: what dies is known with the graph's lock only."""
    complete = autograd.complete

    class Lock:
        def __init__(self, graph):
            self.graph, self.lock = graph, graph.lock

        def acquire(self, wait):
            assert wait and self.lock.acquire()
            trace.end_leaves(self.graph.leaves)  # as the other thread does last
            return True

        def release(self):
            self.lock.release()

    def with_lock(*args):
        draft = complete(*args)
        graph = None if isinstance(draft, str) else draft.behind.graph
        if graph is None:
            return draft
        return draft._replace(behind=draft.behind._replace(graph=graph._replace(lock=Lock(graph))))

    monkeypatch.setattr(autograd, "complete", with_lock)
    check(device, plain)
    assert len(spent) >= 8


def test_a_gradient_that_somebody_keeps_is_not_freed(device, spent):
    """What comes to f is a result of g's backward, and a hook has it: sometimes it keeps it."""
    kept = []

    def step(f, g, x, k):
        h = f(x)
        h.register_hook(lambda grad: kept.append((grad, grad.clone())) if k % 3 else None)
        g(h).square().mean().backward()
        assert all(torch.equal(grad, want) for grad, want in kept)

    check(device, step, iterations=14)
    assert spent


class Doubles(torch.autograd.Function):
    """Its backward doubles the gradient in place and hands it on, to two inputs."""

    @staticmethod
    def forward(ctx, x, y):
        return x + y

    @staticmethod
    def backward(ctx, grad):
        grad.mul_(2)
        return grad, grad


class Doubled(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return Doubles.apply(self.inner(x), self.inner(x * 2))


def test_a_gradient_that_is_written_and_handed_on(device, spent):
    first, second = halves(device)
    check(device, plain, [Doubled(first), second])
    assert spent


def test_one_gradient_for_two_results(device, spent):
    """Both results get the same tensor, or views of one: somebody else holds its memory. (Such arguments
    are never copied, so the outermost gradient stays where it is.)"""
    ones = torch.ones(4 * N, N, device=device)
    for join in (torch.add, lambda a, b: torch.cat((a, b))):
        models = [nn.Sequential(m, Pair()) for m in halves(device, layers=2)]

        def step(f, g, x, k, join=join):
            y = join(*g(join(*f(x))))
            y.backward(ones[: len(y)])

        check(device, step, models)
    assert spent


class Pair(nn.Module):
    def forward(self, x):
        return x.sin(), x.cos()


class Upstream:
    """Lives as long as a node of autograd's that has it."""


@pytest.mark.parametrize("retained", [False, True])
def test_a_recording_keeps_nothing_of_what_came_before_it(device, retained):
    """An argument with a history is saved, and autograd's record of that knows where it came from."""
    (first, second), nodes = halves(device, layers=1), []
    f, x = cgt.jit(second), torch.randn(N, N, device=device)
    for _ in range(6):
        h = first(x)
        upstream = Upstream()
        h.grad_fn.metadata["upstream"] = upstream
        nodes.append(weakref.ref(upstream))
        loss = f(h).square().mean()
        if retained:
            loss.backward(retain_graph=True)
        del h, loss, upstream
    gc.collect()
    assert cgt.stats(f).replays >= 3
    assert not any(ref() for ref in nodes)


def test_graphs_that_are_retained_or_never_run_do_not_stay_pending(device):
    """Else an iteration would not end when the first function is called again."""
    for k in (0, 1):
        a, b = halves(device, layers=1)
        f, g, x = cgt.jit(a), cgt.jit(b), torch.randn(N, N, device=device)
        for _ in range(12):
            loss = g(f(x)).square().mean()
            if k:
                loss.backward(retain_graph=True)
            del loss
        assert min(cgt.stats(f).replays, cgt.stats(g).replays) >= 9, cgt.explain(f)


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

    fs = compare(device, plain, [Half(h) for h in halves(device, layers=1)], iterations=9)
    for f in fs:
        s = cgt.stats(f).backward
        assert s.replays >= 4 and s.eager <= 2, cgt.explain(f)
        assert all("read a saved tensor again" in reason for reason in s.reasons)
    assert any(cgt.stats(f).backward.reasons for f in fs)


def test_a_failure_while_it_is_let_go_of(device):
    def step(f, g, x, k):
        if k == 1 and f not in failed:
            failed.append(f)
            core.fault_set("spend", 2, 2)
        plain(f, g, x, k)

    failed = []
    fs = compare(device, step, halves(device), iterations=4)
    reasons = [reason for f in fs for reason in cgt.stats(f).backward.reasons]
    assert any("recording failed" in reason for reason in reasons), reasons


def test_after_step_and_with_an_optimizer(device):
    optimizers = {}

    def step(f, g, x, k):
        cgt.step()
        g(f(x)).square().mean().backward()
        key = id(f)
        if key not in optimizers:
            parameters = [p for h in (f, g) for p in h.parameters()]
            optimizers[key] = torch.optim.SGD(parameters, lr=0.1)
        optimizers[key].step()

    check(device, step, iterations=10)
