"""Jitted functions that torch.jit.trace meets, and modules of TorchScript that jitted functions meet."""

import functools

import pytest
import torch
from helpers import same
from torch import nn

import cgt

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")


@pytest.mark.parametrize("recorded", [False, True])
def test_trace_through_a_jitted_function(device, recorded):
    linear = nn.Linear(3, 3).to(device).requires_grad_(False)
    f = cgt.jit(lambda x: linear(x).relu() * 2)
    x = torch.ones(2, 3, device=device)
    with torch.no_grad():
        for _ in range(3 * recorded):
            f(x)
        traced = torch.jit.trace(lambda x: f(x) + 1, x)
        for k in range(5):
            x = torch.full((2, 3), float(k), device=device)
            assert torch.equal(traced(x), linear(x).relu() * 2 + 1)
            assert torch.equal(f(x), linear(x).relu() * 2)
    assert any("torch.jit.trace is tracing the call" in reason for reason in cgt.stats(f).reasons)
    assert cgt.stats(f).replays >= 3


def scripted(device):
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).to(device)
    return torch.jit.script(model)


CHANGES = {
    "eval": lambda model: model.eval(),
    "replaced": lambda model: setattr(model[0], "weight", nn.Parameter(torch.zeros_like(model[0].weight))),
    "double": lambda model: model.double(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("where", ["itself", "inside", "argument"])
def test_modules_of_torchscript_run_eagerly(device, change, where):
    def outcomes(wrap):
        torch.manual_seed(0)
        model = scripted(device)
        outer = nn.ModuleList([model])
        f = {"itself": lambda: wrap(model), "inside": lambda: wrap(lambda x: outer[0](x)),
             "argument": lambda: functools.partial(wrap(lambda m, x: m(x)), model)}[where]()  # fmt: skip
        found = []
        for k in range(8):
            if k == 4:
                change(model)
            x = torch.ones(2, 3, device=device, dtype=model[0].weight.dtype)
            torch.manual_seed(k)
            found.append(f(x).detach().clone())
        return f, found

    _, want = outcomes(lambda f: f)
    f, got = outcomes(cgt.jit)
    assert same(got, want)
    stats = cgt.stats(getattr(f, "func", f))
    assert stats.replays == 0
    assert any("is a module of TorchScript" in reason for reason in stats.reasons)


def test_module_that_the_scripted_one_was_made_from_replays(device):
    """The advice."""
    model = nn.Linear(3, 3).to(device)
    torch.jit.script(model)
    f = cgt.jit(model)
    with torch.no_grad():
        for k in range(6):
            x = torch.full((2, 3), float(k), device=device)
            assert torch.equal(f(x), model.forward(x))
    assert cgt.stats(f).replays >= 3


def test_function_of_torchscript_replays(device):
    """It has neither mode nor parameters."""
    double = torch.jit.trace(lambda x: x * 2 + 1, torch.ones(3, device=device))
    f = cgt.jit(lambda x: double(x).relu())
    for k in range(8):
        x = torch.full((3,), k - 3.0, device=device)
        assert torch.equal(f(x), (x * 2 + 1).relu())
    s = cgt.stats(f)
    past = device.type == "cuda" and any("kernels that PyTorch does not show" in reason for reason in s.reasons)  # reads x itself
    assert s.replays >= 4 or past, cgt.explain(f)


@torch.jit.script
def scale(x, factor: int):
    """A number of the host's that C++ makes of sizes, as DeBERTa does."""
    return torch.sqrt(torch.tensor(x.size(-1), dtype=torch.float) * torch.tensor(factor, dtype=torch.float))


def agrees_when_trained(f, act, w, x, calls, *args):
    """Jitted alone and trained from outside, f gives and teaches what act does. (That is fused by the fourth call.)"""

    def outcome(function):
        w.grad = None
        y = function(x, *args)
        y.square().sum().backward()
        return y.detach().clone(), w.grad

    for _ in range(4):
        outcome(act)
    for k in range(calls):
        x.copy_(torch.arange(6.0, device=x.device) - k % 7)
        assert same(outcome(f), outcome(act)), f"call {k}"


def test_gradients_past_a_number_that_torchscript_made(device):
    """It is saved for the backward, and the same for each call of the recording."""
    w, x = torch.arange(6.0, device=device).requires_grad_(), torch.zeros(6, device=device)
    act = lambda x, n=3: (x * w / scale(x, n)).square() / scale(w, 2)  # noqa: E731
    f = cgt.jit(act)
    agrees_when_trained(f, act, w, x, 24)
    agrees_when_trained(f, act, w, x, 12, 5)  # another number: another recording
    told = cgt.stats(f)
    assert told.replays >= 24 and told.backward.replays >= 24, cgt.explain(f)


@torch.jit.script
def bucket(x, n: float):
    """Whole numbers and powers of two alone: fused or not, the same bits."""
    return (torch.abs(x) * 2.0 + n) * 4.0 - x


def gathers(x, w):
    positions = bucket(torch.arange(x.shape[-1], device=x.device, dtype=x.dtype) - 3.0, 4.0)
    return bucket(x * 2, 8.0) * w + positions, bucket(w, 2.0)


def trained(x, w):
    (y, _), w.grad = gathers(x, w), None
    y.square().sum().backward()
    return w.grad


def test_gradients_through_what_torchscript_fuses(device):
    """Jitted alone and trained: its backward is fused, too."""
    w, x = torch.arange(6.0, device=device).requires_grad_(), torch.zeros(6, device=device)
    act = lambda x: bucket(x * w, 1.0) * 2 + bucket(w, 2.0)  # noqa: E731
    f = cgt.jit(act)
    agrees_when_trained(f, act, w, x, 24)
    told = cgt.stats(f)
    assert told.replays >= 12 and told.backward.replays >= 12, cgt.explain(f)


@pytest.mark.parametrize("ways", ["stays", "moves", "other weights"])
@pytest.mark.parametrize("function", [gathers, trained], ids=lambda f: f.__name__)
def test_functions_that_torchscript_fuses(device, function, ways):
    """On the GPU fused kernels are no ops, and what they make and read nobody names."""
    weights = [torch.arange(6.0, device=device).requires_grad_(function is trained) for _ in range(2)]
    with torch.no_grad():
        weights[1] += 1
    for w in weights:  # until they are fused
        for _ in range(3):
            function(torch.zeros(6, device=device), w)
    box, x, kept = [weights[0]], torch.zeros(6, device=device), []
    f = cgt.jit(lambda x: function(x, box[0]))
    for k in range(24):
        given = x.copy_(torch.arange(6.0, device=device) - k % 7)
        if ways == "moves":
            given = x.clone()
            kept.append(given)
        if ways == "other weights":
            box[0] = weights[k // 8 % 2]
        want = function(given, box[0])
        want, got = tuple(t.clone() for t in want) if function is gathers else want.clone(), f(given)
        assert same(got, want), f"call {k}"
    told = cgt.stats(f)
    # Where it was fused, that is: behind calls of another kind (with gradients, in a test before) PyTorch may leave it as it is.
    past = device.type == "cuda" and ways == "moves" and any("kernels that PyTorch does not show" in reason for reason in told.reasons)
    assert past or told.replays >= 12, cgt.explain(f)
