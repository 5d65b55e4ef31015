"""Kernels that no op shows: composite ops of the host's that fill memory themselves, kernels of torch.cuda.jiterator's."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers import identical, not_audited, tells, values
from torch.cuda import jiterator

import cgt

CALLS = 8


def junk(device):
    """Other numbers in memory that is free."""
    return [torch.full((n,), 7.0, device=device) for n in (1, 2, 4, 16, 64, 256)]


def pooled(x):
    with torch.no_grad():
        return F.max_pool1d(x, 4)


def sizes(x):
    return torch._shape_as_tensor(x) * 2




@tells("unseen_kernel")
@pytest.mark.parametrize("function", [pooled, sizes])
def test_composite_whose_kernel_fills_memory_itself(device, function):
    f = cgt.jit(function)
    for k in range(CALLS):
        x = values(device, 2, 4, 16, seed=k)
        want = function(x)
        junk(device)
        assert identical(f(x), want), k
    if device.type == "cpu":
        assert cgt.stats(f).replays == 0 and "CGT324" in cgt.explain(f)
    elif function is pooled:
        assert cgt.stats(f).replays >= CALLS - 3, cgt.explain(f)


def test_backward_that_makes_a_tensor_of_a_number(device):
    f = cgt.jit(F.affine_grid)
    for k in range(CALLS):
        theta, weights = values(device, 2, 2, 3, seed=k).requires_grad_(), values(device, 2, 1, 5, 2, seed=k + 50)
        want = torch.autograd.grad(F.affine_grid(theta, (2, 3, 1, 5), align_corners=False), theta, weights)
        got = torch.autograd.grad(f(theta, (2, 3, 1, 5), align_corners=False), theta, weights)
        assert identical(got, want), k


@not_audited("what the eager part is given holds what was there before")
def test_empty_memory_that_ops_write(device):
    """Whole, in part, by a view, by out=, by an eager part: nothing is unseen."""
    fill = cgt.eager(lambda t: [t.fill_(3.0)].clear())

    def function(x):
        a, b, c, d = (torch.empty_like(x) for _ in range(4))
        a[0] = x[0]
        a[1:].copy_(x[1:] * 2)
        torch.add(x, 1, out=b)
        torch.sin(x, out=c[...])
        fill(d)
        return a, b, c, d * 2, torch.zeros_like(torch.empty_like(x)), torch.empty(0, device=x.device)

    f = cgt.jit(function)
    for k in range(CALLS):
        x = values(device, seed=k)
        assert identical(f(x), function(x))
    assert cgt.stats(f).replays >= CALLS - 3, cgt.explain(f)


@pytest.mark.parametrize("inputs", ["auto", "copied", "fixed"])
def test_jiterator(device, inputs):
    if device.type == "cpu":
        pytest.skip("torch.cuda.jiterator compiles for GPUs alone")
    unary = jiterator._create_jit_fn("template <typename T> T unary(T x) { return x * x + 1; }")
    scaled = jiterator._create_jit_fn("template <typename T> T scaled(T x, T y, T a) { return x * a + y; }", a=2.0)
    both = jiterator._create_multi_output_jit_fn("template <typename T> void both(T x, T y, T& a, T& b) { a = x + y; b = x - y; }", num_outputs=2)
    for function in (lambda x, y: unary(x), lambda x, y: scaled(x + 1, y, a=3.0), lambda x, y: both(x, y)):
        f, held = cgt.jit(function, inputs=inputs), []
        pair = values(device, 700), values(device, 700, seed=2)
        for k in range(CALLS):
            if inputs != "fixed":
                pair = values(device, 700, seed=k), values(device, 700, seed=k + 50)
                held.append(pair)  # each lies elsewhere
            pair[0].add_(1)
            assert identical(f(*pair), function(*pair)), k
        assert cgt.stats(f).replays >= CALLS - 4, cgt.explain(f)


@tells("casts_inside")
def test_op_that_runs_others_which_autocast_changes(device):
    net = torch.nn.Bilinear(4, 4, 3).to(device)

    def function(x):
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
            return net(x, x + 1)

    f = cgt.jit(function)
    for k in range(CALLS):
        x = values(device, 5, 4, seed=k)
        assert identical(f(x), function(x)), k
    assert cgt.stats(f).replays or (device.type == "cpu" and "CGT326" in cgt.explain(f)), cgt.explain(f)


WRITES = {
    "an op in place": lambda y: y.add_(1),
    "a part in place": lambda y: y[:, 0].add_(1),
    "a view": lambda y: y.view(-1).relu_(),
}
READS = {
    "a list": lambda y: y.tolist(),
    "a number": lambda y: float(y[0, 0, 0]),
    "an item on the way": lambda y: y * y[0, 0, 0].item(),
}


@pytest.mark.parametrize("then", [*WRITES, *READS])
def test_memory_that_a_hidden_kernel_filled_and_that_is_written_or_read_then(device, then):
    def function(x):
        y = pooled(x)
        if then in READS:
            return READS[then](y)
        WRITES[then](y)
        return y

    f = cgt.jit(function, audit="0")
    for k in range(CALLS):
        x = values(device, 2, 4, 16, seed=k)
        want = function(x)
        junk(device)
        assert identical(f(x), want), k
    if device.type == "cpu":
        assert cgt.stats(f).replays == 0 and "CGT324" in cgt.explain(f)


def test_an_audit_tells_of_memory_that_a_hidden_kernel_filled_but_for_a_part(device):
    def function(x):
        y = pooled(x)
        y[:, 0].zero_()
        return y

    f, told = cgt.jit(function, audit="first:2"), 0
    for k in range(CALLS):
        x = values(device, 2, 4, 16, seed=k)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            assert identical(f(x), function(x)), k
        told += sum("CGT225" in str(one.message) for one in heard)
    assert told == (device.type == "cpu"), cgt.explain(f)


def test_memory_that_an_index_fills(device):
    """As transformers' experts do to put tokens back in order."""

    def function(x):
        order = x.argsort()
        back = torch.empty_like(order)
        back[order] = torch.arange(len(x), device=device)
        return x.sort().values[back]

    f = cgt.jit(function)
    for k in range(CALLS):
        x = values(device, seed=k).reshape(-1)
        assert identical(f(x), function(x)), k
    assert cgt.stats(f).replays >= CALLS - 3, cgt.explain(f)


def test_memory_that_is_written_in_parts_and_read_where_it_was(device):
    def function(x):
        y, z = x.new_empty(4, 4), x.new_empty(8)
        y[:, 0] = x
        first = y[:, 0] + 1  # the rest is empty still
        y[:, 1:] = 2
        torch.mul(x, 2, out=z[:4])
        torch.mul(x, 3, out=z[4:])
        return first, y, z

    f = cgt.jit(function)
    for k in range(CALLS):
        x = values(device, 4, seed=k)
        assert identical(f(x), function(x)), k
    assert cgt.stats(f).replays >= CALLS - 3, cgt.explain(f)


def test_memory_where_empty_memory_was_that_is_gone(device):
    """The new one is smaller, and whole."""

    def function(x):
        total = x * 0
        for n in (64, 32, 8):
            x.new_empty(n)  # which dies at once
            total = total + (x[:2] * n).sum()
        return total

    f = cgt.jit(function)
    for k in range(CALLS):
        x = values(device, 4, seed=k)
        assert identical(f(x), function(x)), k
    assert cgt.stats(f).replays >= CALLS - 3, cgt.explain(f)
