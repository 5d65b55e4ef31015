"""What does it cost to know what a function can read: once to look around, and at each hit?"""

import torch
from cgt_core import time_guards

import cgt
from cgt.api import state_of
from cgt.look import places


def test_looking_around_a_deep_model(device, compare, figure):
    """48 transformer layers of 10 modules each, when they have been warmed."""
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, device=device)
    model = torch.nn.TransformerEncoder(layer, 48, enable_nested_tensor=False)
    f = cgt.jit(model)
    f(torch.rand(2, 4, 32, device=device))
    ran = state_of(f).ran
    us = compare({"find": places.find_places, "model": model, "ran": ran}, calls=1, rounds=20, look="find(model, (), ran)")
    figure("looking around 48 transformer layers", us["look"] / 1e3, "ms", at_most=20)


def test_guard_of_a_deep_module(device, compare, settled, figure):
    """128 layers that own nothing but a place for each name: what a hit pays for them where nothing was written."""
    deep, flat = torch.nn.Sequential(*(torch.nn.Identity() for _ in range(128))), torch.nn.Identity()
    x, rows = torch.rand(4, device=device), {}
    for name, model in (("deep", deep), ("flat", flat)):
        f = settled(cgt.jit(lambda x, model=model: model(x).view(-1)), (x,))
        rows[name] = f
    us = compare(
        {"x": x},
        calls=1000,
        rounds=50,
        deep=lambda calls: calls * time_guards(state_of(rows["deep"]).f, (x,), {}, calls),
        flat=lambda calls: calls * time_guards(state_of(rows["flat"]).f, (x,), {}, calls),
    )
    figure("places of 128 modules, nothing written", us["deep"] - us["flat"], "µs", detail=True)


def test_state_that_the_call_replaces(device, compare, settled, figure):
    """A recurrent policy of 64 units that keeps its own state, for one observation: self.h = cell(x, self.h)."""

    class Policy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = torch.nn.GRUCell(16, 64), torch.nn.Linear(64, 4)
            self.h = torch.zeros(1, 64, device=device)

        def forward(self, x):
            self.h = self.cell(x, self.h)
            return self.head(self.h)

    x = torch.rand(1, 16, device=device)
    with torch.no_grad():
        ours, plain = Policy().to(device), Policy().to(device)
        us = compare({"f": settled(cgt.jit(ours), (x,)), "x": x, "plain": plain}, cgt="f(x)", eager="plain(x)")
    figure("policy that keeps its state", us["cgt"], "µs")
    figure("policy that keeps its state: over eager", us["cgt"] / us["eager"], "×", at_most=0.5)
