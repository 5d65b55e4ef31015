"""Functions that make, read, return, add to, replace and clear a gradient, called in any order, agree
with eager; and so do the results that somebody holds.

A gradient is an argument that no signature shows: a function may ask whether there is one, read it,
hand it out, and leave another one behind.
"""

import functools

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


# --- arguments that begin to require one ---------------------------------------------------------------


def attacked(net, x):
    x.requires_grad_()
    net(x).square().mean().backward()
    return (x + 0.1 * x.grad.sign()).detach()


def differentiated(net, x):
    x.requires_grad = True
    u = net(x)
    (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    loss = (du.sum(1) - u[:, 0]).square().mean()
    loss.backward()
    return loss.detach()


def only_asked(net, x):
    was = x.requires_grad
    x.requires_grad_()
    return x.detach() * 2 + was


def twice(net, x, y):
    x.requires_grad_(), y.requires_grad_()
    (net(x) * net(y)).sum().backward()
    return x.grad + y.grad


def cleared(net, x):
    x.requires_grad_()
    net(x).sum().backward()
    grad, x.grad = x.grad, None
    return grad * 1


def ends_the_capture(net, x):
    """On the GPU: what the backward left was never computed."""
    x.requires_grad_()
    net(x).sum().backward()
    if x.is_cuda:
        torch.cuda.synchronize()
    return x.grad * 1


BEGIN = [attacked, differentiated, only_asked, twice, cleared, ends_the_capture]
GIVEN = {
    "new each time": lambda k, device, last: torch.randn(4, 3, generator=torch.Generator().manual_seed(k)).to(device),
    "rows": lambda k, device, last: torch.randn(8, 3, generator=torch.Generator().manual_seed(k)).to(device)[k % 4 : k % 4 + 4],
    "the same twice": lambda k, device, last: last if k % 2 else GIVEN["new each time"](k, device, last),
    "the same without": lambda k, device, last: last.requires_grad_(False) if k % 3 and last is not None else GIVEN["new each time"](k, device, last),
}


@pytest.mark.parametrize("inputs", ["auto", "copied", "pinned"])
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("function", BEGIN, ids=lambda f: f.__name__)
def test_argument_that_begins_to_require_one(device, function, given, inputs):
    """What it leaves on the argument, too, and what is held of the last one's."""
    torch.manual_seed(2)
    net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).to(device)

    def run(wrap):
        f, last, found, held = wrap(functools.partial(function, net)), None, [], []
        net.zero_grad()
        for k in range(14):
            x = last = GIVEN[given](k, device, last)
            more = [x if k % 5 == 4 else GIVEN["new each time"](k + 50, device, None)] if function is twice else []
            result = f(x, *more)
            held.append((x, x.grad))
            found += [result.clone(), torch.tensor([x.requires_grad, x.is_leaf])]
            found += [t.grad.clone() for t in (x, *more, *net.parameters()) if t.grad is not None]
            found += [grad.clone() for _, grad in held[-3:] if grad is not None]
        return found, f

    (want, _), (got, f) = run(lambda f: f), run(cgt.jit(inputs=inputs))
    assert len(got) == len(want) and all(map(same, got, want)), cgt.explain(f)
    if given == "new each time" and inputs == "auto" and not (function is ends_the_capture and device.type == "cuda"):
        assert cgt.stats(f).replays >= 8, cgt.explain(f)


def test_part_that_runs_in_between_sees_that_it_does(device):
    seen = []
    look = cgt.eager(lambda x: seen.append((x.requires_grad, x.grad is None)))

    def function(net, x):
        x.requires_grad_()
        net(x).sum().backward()
        look(x)
        return x.grad * 2

    net = torch.nn.Linear(3, 2).to(device)
    f = cgt.jit(function)
    for k in range(8):
        x, y = (GIVEN["new each time"](k, device, None) for _ in range(2))
        assert torch.equal(f(net, x), function(net, y)) and torch.equal(x.grad, y.grad)
    assert set(seen) == {(True, False)} and len(seen) == 16


def test_part_that_runs_in_between_and_finds_it_elsewhere(device):
    """A replay would have it require one behind the part."""
    seen, box = [], [None]
    look = cgt.eager(lambda: seen.append(box[0].requires_grad))

    def function(net, x):
        x.requires_grad_()
        look()
        return torch.autograd.grad(net(x).sum(), x)[0] * 2

    net = torch.nn.Linear(3, 2).to(device).requires_grad_(False)
    f = cgt.jit(function)
    for k in range(8):
        x, y = (GIVEN["new each time"](k, device, None) for _ in range(2))
        box[0] = x
        got = f(net, x)
        box[0] = y
        assert torch.equal(got, function(net, y))
    assert seen == [True] * 16
    assert any("requires_grad" in reason for reason in cgt.stats(f).reasons), cgt.explain(f)


def test_argument_that_begins_to_require_one_for_a_later_backward_runs_eagerly(device):
    net = torch.nn.Linear(3, 2).to(device)
    f = cgt.jit(lambda x: net(x.requires_grad_()))
    for k in range(5):
        x, y = GIVEN["new each time"](k, device, None), GIVEN["new each time"](k, device, None).requires_grad_()
        f(x).sum().backward(), net(y).sum().backward()
        assert torch.equal(x.grad, y.grad)
    assert cgt.stats(f).replays == 0, cgt.explain(f)
