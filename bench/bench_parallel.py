"""What do operations gain that run side by side? Steps as people write them, each recorded twice: its operations in eager's
order, and beside each other. Wall time of a replay, memory, and what recording takes."""

import pathlib
from time import perf_counter

import pytest
import torch
from bench_train import clock, step_of
from torch import nn
from torch.nn import functional as F

# isort: split
import cgt_core as core

import cgt
from cgt.api import state_of

CALLS = 8  # behind which a step is settled
DRAWN = "SAC's critics", pathlib.Path(__file__).parents[1] / "docs" / "plots" / "side_by_side.svg"


def perceptron(*sizes):
    layers = [layer for a, b in zip(sizes, sizes[1:], strict=False) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def adam(params):
    return torch.optim.Adam(params, lr=1e-3, capturable=True)


class Recommender(nn.Module):
    """DLRM: a table of embeddings for each of 26 categories, and two perceptrons."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(10_000, 64, mode="sum") for _ in range(26))
        self.below, self.above = perceptron(13, 512, 256, 64), perceptron(64 * 27, 512, 256, 1)

    def forward(self, dense, categories):
        parts = [self.below(dense), *(table(ids) for table, ids in zip(self.tables, categories, strict=True))]
        return self.above(torch.cat(parts, 1))


def recommender(device, optimizer):
    model = Recommender().to(device)
    dense, clicked = torch.rand(2048, 13, device=device), torch.rand(2048, 1, device=device).round()
    ids = [torch.randint(0, 10_000, (2048, 1), device=device) for _ in range(26)]
    loss = lambda model: F.binary_cross_entropy_with_logits(model(dense, ids), clicked)  # noqa: E731
    return step_of(model, optimizer(model.parameters()), loss)


def ensemble(device):
    """Ten perceptrons on one batch."""
    models = nn.ModuleList(perceptron(64, 256, 256, 1) for _ in range(10)).to(device)
    x, y = torch.rand(256, 64, device=device), torch.rand(256, 1, device=device)
    return step_of(models, adam(models.parameters()), lambda models: sum(F.mse_loss(model(x), y) for model in models))


def critics(device):
    """SAC's update of two critics, with their targets."""
    now = nn.ModuleList(perceptron(32, 256, 256, 1) for _ in range(2)).to(device)
    targets = nn.ModuleList(perceptron(32, 256, 256, 1) for _ in range(2)).to(device).requires_grad_(False)
    actor, optimizer = perceptron(24, 256, 256, 16).to(device), adam(now.parameters())
    seen, then, acted, reward = (torch.rand(256, n, device=device) for n in (24, 24, 8, 1))

    def step():
        with torch.no_grad():
            mean, log_std = actor(then).chunk(2, 1)
            noise = torch.randn_like(mean)
            action = (mean + noise * log_std.clamp(-5, 2).exp()).tanh()
            entropy = (0.5 * noise.square() + log_std).sum(1, keepdim=True)
            there = torch.cat([then, action], 1)
            wanted = reward + 0.99 * (torch.min(*(target(there) for target in targets)) + 0.2 * entropy)
        optimizer.zero_grad()
        here = torch.cat([seen, acted], 1)
        loss = sum(F.mse_loss(critic(here), wanted) for critic in now)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for target, critic in zip(targets.parameters(), now.parameters(), strict=True):
                target.lerp_(critic, 0.005)
        return loss.detach()

    return step


def classifier(device):
    """Four layers, batch 32."""
    model = perceptron(256, 256, 256, 256, 256).to(device)
    x, y = (torch.rand(32, 256, device=device) for _ in range(2))
    return step_of(model, adam(model.parameters()), lambda model: F.mse_loss(model(x), y))


def picture(name):
    """A model of torchvision's on one picture."""

    def make(device):
        models = pytest.importorskip("torchvision").models
        given = {"init_weights": False, "aux_logits": False} if name == "googlenet" else {}
        model = getattr(models, name)(**given).to(device).eval().requires_grad_(False)
        x = torch.rand(1, 3, 224, 224, device=device)
        return lambda: model(x)

    return make


def llama(device):
    """Twelve layers, sixteen tokens, half precision."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "vocab_size": 8000}
    config = transformers.LlamaConfig(num_attention_heads=16, num_key_value_heads=8, **sizes)
    model = transformers.LlamaModel(config).to(device, torch.bfloat16).eval().requires_grad_(False)
    ids, positions = torch.randint(0, 8000, (1, 16), device=device), torch.arange(16, device=device)[None]
    mask = torch.full((1, 1, 16, 16), -1e9, device=device, dtype=torch.bfloat16).triu(1)
    return lambda: model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).last_hidden_state


def bert(device):
    """A step of six layers, eight sentences of 128 words."""
    transformers = pytest.importorskip("transformers")
    model = transformers.BertModel(transformers.BertConfig(num_hidden_layers=6), add_pooling_layer=False).to(device)
    ids, mask = torch.randint(0, 30_000, (8, 128), device=device), torch.zeros(8, 1, 128, 128, device=device)
    loss = lambda model: model(input_ids=ids, attention_mask=mask).last_hidden_state.square().mean()  # noqa: E731
    return step_of(model.train(), adam(model.parameters()), loss)


STEPS = {  # name -> (what makes it, wall time over that of one behind the other)
    "DLRM, SGD": (lambda device: recommender(device, lambda params: torch.optim.SGD(params, 0.1)), 0.45),
    "DLRM, Adam": (lambda device: recommender(device, adam), 0.45),
    "ensemble of 10": (ensemble, 0.5), "SAC's critics": (critics, 0.65), "4 layers, Adam": (classifier, 0.8),
    "GoogLeNet": (picture("googlenet"), 0.65), "ResNet-18": (picture("resnet18"), 0.95), "Llama of 12 layers": (llama, 0.85),
    "BERT of 6 layers": (bert, 0.93),
}  # fmt: skip


def recorded(make, device, parallel):
    """(the jitted step, what its calls gave, seconds that recording took, bytes of its pool)."""
    torch.manual_seed(0)
    before = core.pool_ids()
    f = cgt.jit(make(device), parallel=parallel, audit="0")
    torch.manual_seed(1)
    given = [f().clone() for _ in range(CALLS)]
    assert cgt.stats(f).replays == CALLS - 2, cgt.explain(f)
    (node,) = state_of(f).keep
    pools = core.pool_ids() - before or core.pool_ids()
    nbytes = sum(s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) in pools)
    return f, given, state_of(f).keep[node].seconds[1], nbytes


@pytest.mark.parametrize("name", STEPS)
def test_side_by_side(cuda, compare, figure, name):
    make, bound = STEPS[name]
    chain, want, took, room = recorded(make, cuda, "never")
    cgt.reset(chain)
    torch.cuda.empty_cache()
    beside, got, longer, more = recorded(make, cuda, "always")
    assert all(map(torch.equal, got, want))
    if name == DRAWN[0]:
        cgt.show(beside, DRAWN[1])
    chain, *_ = recorded(make, cuda, "never")
    subjects = {"cgt": clock(beside), "floor": clock(chain)}
    calls = {"cpu": "beside()", "cpu_floor": "chain()"}
    us = compare({"beside": beside, "chain": chain}, calls=20, rounds=12, **subjects, **calls)
    figure(f"{name}: side by side over one behind the other, wall time", us["cgt"] / us["floor"], "×", at_most=bound)
    figure(f"{name}: CPU time of a call, over the same", us["cpu"] / us["cpu_floor"], "×", at_most=1.1)
    figure(f"{name}: recording, over the same", longer / took, "×", at_most=1.3)
    figure(f"{name}: memory of the pool, over the same", more / room, "×", detail=True)


def seconds_to_choose(f, calls):
    began = perf_counter()
    for _ in range(calls):
        f()
    torch.cuda.synchronize()
    return perf_counter() - began


def test_choosing_costs_little(cuda, compare, figure):
    """The first hundred calls, audits and the measure included, over those of a function that does not choose."""
    torch.manual_seed(0)
    took = {how: seconds_to_choose(cgt.jit(ensemble(cuda), parallel=how), 100) for how in ("never", "auto", "never", "auto")}
    compare({}, calls=1, rounds=1, cgt="pass")
    figure("ensemble of 10: its first 100 calls, chosen over not", took["auto"] / took["never"], "×")
