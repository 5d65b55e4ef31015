"""Programs to interrupt (interrupts.py): each wraps a function and gives a call that begins anew each time."""

import torch
from helpers import values
from torch.utils.checkpoint import checkpoint

import cgt


def plain(function, **options):
    return function


def jitted(function, **options):
    return cgt.jit(function, **options)


def inference(wrap, device):
    w, x = values(device, 4, 4, seed=5), values(device, 4, 4)
    f = wrap(lambda x: (x @ w).relu() + 1)
    return f, lambda: [f(x)]


def copied(wrap, device):
    f, kept = wrap(lambda x: (x.sin(), x[1:]), inputs="copied"), []

    def call():
        kept.append(values(device, 4, 4, seed=2))
        return [*f(kept[-1])]

    return f, call


def differentiable(wrap, device):
    w, x = values(device, 4, 4, seed=5).requires_grad_(), values(device, 4, 4)
    f = wrap(lambda x: (x @ w).tanh())

    def call():
        w.grad = None
        y = f(x)
        y.square().sum().backward()
        return [y.detach(), w.grad]

    return f, call


def dropped(wrap, device):
    x = values(device, 4, 4)
    f = wrap(lambda x: torch.nn.functional.dropout(x * 2, 0.5))

    def call():
        torch.manual_seed(3)
        return [f(x), torch.rand(3, device=device)]

    return f, call


def reading(wrap, device):
    """Goes one way, then the other, behind random numbers."""
    x = values(device, 4, 4).abs() + 1

    @wrap
    def f(x):
        y = torch.nn.functional.dropout(x, 0.5)
        return y * 2 if y.sum() > 0 else torch.rand_like(y) - y

    def call():
        torch.manual_seed(3)
        return [f(x), f(-x), torch.rand(3, device=device)]

    return f, call


def checkpointed(wrap, device):
    w, x = values(device, 4, 4, seed=5).requires_grad_(), values(device, 4, 4)
    inner = lambda x: torch.nn.functional.dropout((x * w).tanh(), 0.5)  # noqa: E731
    f = wrap(lambda x: checkpoint(inner, x, use_reentrant=False).sin())

    def call():
        w.grad = None
        torch.manual_seed(3)
        y = f(x)
        y.sum().backward()
        return [y.detach(), w.grad]

    return f, call


def step(wrap, device):
    """A whole step of training."""
    starts = [values(device, 4, 4, seed=5), values(device, 4, seed=6)]
    w, b = parameters = [t.clone().requires_grad_() for t in starts]
    x, optimizer = values(device, 4, 4), torch.optim.SGD(parameters, lr=0.125)

    @wrap
    def f(x):
        optimizer.zero_grad()
        loss = (x @ w + b).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def call():
        with torch.no_grad():
            for parameter, start in zip(parameters, starts, strict=True):
                parameter.copy_(start)
        return [f(x), *(p.detach().clone() for p in parameters)]

    return f, call


def told(wrap, device):
    """Hands out numbers."""
    x = values(device, 4, 4)
    f = wrap(lambda x: (x * 2, x.sum().item(), [x.argmax().item()]))

    def call():
        y, n, (k,) = f(x)
        return [y, torch.tensor(n), torch.tensor(k)]

    return f, call


def nested(wrap, device):
    x = values(device, 4, 4)
    inner = wrap(lambda x: x.sin() + 1)
    f = wrap(lambda x: inner(x) * inner(x.cos()))
    return f, lambda: [f(x), inner(x)]


def eager(wrap, device):
    """Runs eagerly, with a reason."""
    x = values(device, 4, 4)
    f = wrap(lambda x: x * x.sum().item())
    return f, lambda: [f(x)]


def parted(wrap, device):
    """Runs partly eagerly, and seldom otherwise."""
    x, calls = values(device, 4, 4), []

    @cgt.eager
    def part(y):
        calls.append(0)
        return y.flip(0)[: 3 + (len(calls) % 3 > 0)] * 2

    f = wrap(lambda x: part(x + 1).sum(0) - x)
    return f, lambda: [f(x) * 0]  # how often it ran depends on the interrupt


def reset(wrap, device):
    """Records, replays, and is reset, each time."""
    x, is_jitted = values(device, 4, 4), wrap is not plain
    f = wrap(lambda x: x * 2 + 1)

    def call():
        made = [f(x) for _ in range(3)]
        if is_jitted:
            cgt.step()
            cgt.reset()  # which ends that, too
        return made

    return f, call


PROGRAMS = {
    p.__name__: p
    for p in (inference, copied, differentiable, dropped, reading, checkpointed, step, told, nested, parted, eager, reset)
}


def two_calls():
    abs(1)
    abs(2)
