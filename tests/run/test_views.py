"""Results that are views of other results, both with a history: each call's are parts of one graph, as in eager."""

import contextlib

import pytest
import torch
from helpers import values

import cgt


@pytest.mark.parametrize("order", [(0, 1, 2, 1), (2, 1, 1, 0)])
@pytest.mark.parametrize("change", [False, True])
def test_results_that_are_views_of_a_result(device, order, change):
    """As CLIP returns its logits, and a decoder its last state beside all."""
    w = torch.ones(6, device=device, requires_grad=True)

    def run(wrap):
        def function(x):
            h = (x * w).sin()
            parts = h, h.t(), h[:, 1:3], h.permute(1, 0)[None, ..., -1], h.view(-1), h.flatten()[::2].unsqueeze(1).T
            return [*(parts[k] for k in order), *parts[3:]]

        f, seen = wrap(function), []
        for x in (values(device, 2, 6, seed=k) for k in range(7)):
            given = f(x)
            if change:
                given[0].mul_(2)
            loss = sum((k + 2) * (t.square().sum()) for k, t in enumerate(given))
            loss.backward()
            seen += [w.grad.clone(), *(t.detach().clone() for t in given)]
            seen += [torch.tensor([t._version, t.storage_offset(), *t.stride()]) for t in given]
            assert given[1] is given[3] if order[1] == order[3] else given[1] is given[2]
            w.grad = None
        return f, seen

    (f, got), (_, want) = run(cgt.jit), run(lambda f: f)
    assert all(map(torch.equal, got, want))
    assert cgt.stats(f).replays >= 4 and cgt.stats(f).backward.replays >= 3, cgt.stats(f).reasons


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_gradients_come_as_eager_lays_them_out(device, order):
    """Where a product of matrices meets a transposed gradient it may take another way, which rounds otherwise."""
    w = torch.ones(6, device=device, requires_grad=True)

    def run(wrap):
        def function(x):
            h = (x * w).sin()
            return [(h, h.t())[k] for k in order]

        f, strides = wrap(function), []
        for k in range(6):
            given = f(values(device, 4, 6, seed=k))
            given[order.index(0)].register_hook(lambda g: strides.append((g.shape, g.stride())))
            given[order.index(1)].contiguous().square().sum().backward()
        return f, strides

    (f, got), (_, want) = run(cgt.jit), run(lambda f: f)
    assert got == want and len(got) == 6 and got[0][1][0] == 1  # columns first
    assert cgt.stats(f).replays >= 3, cgt.stats(f).reasons


def test_view_of_what_is_no_result_runs_eagerly(device):
    w = torch.ones(6, device=device, requires_grad=True)
    f = cgt.jit(lambda x: (x * w).unbind(0))
    for k in range(5):
        x = values(device, 2, 6, seed=k)
        one, two = f(x)
        (one.sum() + 2 * two.sum()).backward()
        assert torch.allclose(w.grad, x[0] + 2 * x[1])
        w.grad = None
    assert any("shares memory" in reason for reason in cgt.stats(f).reasons)


class Passing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


@torch.no_grad()
def without_gradients(x):
    return x[:1]


@pytest.mark.parametrize(
    ("function", "word"),
    [(Passing.apply, "custom Function"), (lambda x: x.split(1)[0], "no_grad mode|multiple views"), (without_gradients, "no_grad mode"), (lambda x: x[:1], None)],
    ids=["custom function", "one of several", "without gradients", "slice"],
)
def test_view_of_an_argument_refuses_the_writes_that_eagers_refuses(device, function, word):
    f = cgt.jit(function)
    for k in range(6):
        a, b = torch.rand(2, 2, device=device), torch.rand(1, requires_grad=True, device=device)
        told = []
        for run in (function, f):
            view = run(a.clone())
            with contextlib.nullcontext() if word is None else pytest.raises(RuntimeError, match=word) as error:
                view += b
            told.append(word and str(error.value))
        assert told[0] == told[1], k
    assert cgt.stats(f).replays >= 3
