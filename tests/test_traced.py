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
            assert torch.equal(f(x), model(x))
    assert cgt.stats(f).replays >= 3


def test_function_of_torchscript_replays(device):
    """It has neither mode nor parameters."""
    double = torch.jit.trace(lambda x: x * 2 + 1, torch.ones(3, device=device))
    f = cgt.jit(lambda x: double(x).relu())
    for k in range(8):
        x = torch.full((3,), k - 3.0, device=device)
        assert torch.equal(f(x), (x * 2 + 1).relu())
    s = cgt.stats(f)
    kept = device.type == "cuda" and any("keeps memory" in reason for reason in s.reasons)  # its fuser does
    assert s.replays >= 4 or kept, cgt.explain(f)
