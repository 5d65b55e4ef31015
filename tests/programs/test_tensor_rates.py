"""`Adam(lr=torch.tensor(1e-3))`: the rate is a tensor, which PyTorch's ops are given for a number. Weights and results are eager's after
each call, whatever becomes of the rate between, and calls replay."""

import pytest
import torch
from helpers import same
from torch import nn, optim
from torch.optim import lr_scheduler as S

import cgt

N = 24
MAKERS = {
    "adam": lambda p, lr: optim.Adam(p, lr=lr),
    "adamw, amsgrad": lambda p, lr: optim.AdamW(p, lr=lr, amsgrad=True),
    "adam, fused": lambda p, lr: optim.Adam(p, lr=lr, fused=True),
    "nadam": lambda p, lr: optim.NAdam(p, lr=lr),
    "radam": lambda p, lr: optim.RAdam(p, lr=lr),
    "adamax": lambda p, lr: optim.Adamax(p, lr=lr),
    "adagrad": lambda p, lr: optim.Adagrad(p, lr=lr, lr_decay=0.01),
    "adadelta": lambda p, lr: optim.Adadelta(p, lr=lr),
    "rmsprop": lambda p, lr: optim.RMSprop(p, lr=lr, momentum=0.9),
    "sgd": lambda p, lr: optim.SGD(p, lr=lr, momentum=0.9),
    "sgd, plain": lambda p, lr: optim.SGD(p, lr=lr),
}


def fill(opt, k):
    opt.param_groups[0]["lr"].fill_(0.01 + k * 1e-3)


def replace(opt, k):
    if k % 8 == 5:
        opt.param_groups[0]["lr"] = torch.tensor(0.01 + k * 1e-3, device=opt.param_groups[0]["lr"].device)


BETWEEN = {"stays": lambda opt, k: None, "is written": fill, "is replaced": replace}


def train(device, make, between, schedule=lambda opt: None):
    nets, opts = [], []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(nn.Linear(4, 3).to(device))
        opts.append(make(list(nets[-1].parameters()), torch.tensor(0.01)))
    schedules = list(map(schedule, opts))

    def step(k, x):
        opts[k].zero_grad()
        loss = nets[k](x).square().mean()
        loss.backward()
        opts[k].step()
        return loss.detach()

    f = cgt.jit(lambda x: step(0, x))
    for n in range(N):
        x = torch.arange(8.0, device=device).reshape(2, 4).add(n).sin()
        assert torch.equal(f(x), step(1, x)), n
        assert same(list(nets[0].parameters()), list(nets[1].parameters())), n
        assert same(opts[0].state_dict(), opts[1].state_dict()), n
        for opt in opts:
            between(opt, n)
        for one in filter(None, schedules):
            one.step()
    return cgt.stats(f)


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("name", MAKERS)
def test_rate_that_is_a_tensor(device, name, between):
    s = train(device, MAKERS[name], BETWEEN[between])
    # On a GPU the rate lies on the host, where it is computed with before an op is given it.
    assert s.replays >= N - 8 or device.type == "cuda", s.reasons


def test_rate_that_is_a_tensor_on_a_schedule(device):
    s = train(device, MAKERS["adam"], BETWEEN["stays"], lambda opt: S.CosineAnnealingLR(opt, 30))
    assert s.replays >= N - 4 or device.type == "cuda", s.reasons


@pytest.mark.parametrize("scaled", ["alpha", "foreach", "addcmul", "whole number", "of a list", "requires grad"])
def test_tensor_for_a_number_of_an_op(device, scaled):
    """As eager takes it, or refuses it."""
    makers = {
        "alpha": (lambda p, x, a: p.add_(x, alpha=a * 2), torch.tensor(0.5, device=device)),
        "foreach": (lambda p, x, a: torch._foreach_add_([p[:2], p[2:]], [x[:2], x[2:]], alpha=-a), torch.tensor(0.5, device=device)),
        "addcmul": (lambda p, x, a: p.addcmul_(x, x, value=a + 1), torch.tensor(0.5, device=device, dtype=torch.float64)),
        "whole number": (lambda p, x, a: p.add_(x, alpha=a), torch.tensor(3, device=device)),
        "of a list": (lambda p, x, a: p.add_(x, alpha=a), torch.tensor([0.5], device=device)),
        "requires grad": (lambda p, x, a: p.add_(x, alpha=a), torch.tensor(0.5, device=device, requires_grad=True)),
    }
    write, a = makers[scaled]
    ps = [torch.zeros(4, device=device) for _ in range(2)]

    def tried(function, p, x):
        try:
            function(p, x)
        except Exception as error:
            return type(error), str(error).splitlines()[0]
        return None

    f = cgt.jit(lambda p, x: write(p, x, a))
    for k in range(12):
        x = torch.full((4,), k + 0.5, device=device)
        told = [tried(f, ps[0], x), tried(lambda p, x: write(p, x, a), ps[1], x)]
        assert told[0] == told[1] and torch.equal(*ps), k
        if not a.requires_grad:
            a.add_(1)
    if scaled in ("alpha", "foreach", "addcmul"):
        assert cgt.stats(f).replays >= 8, cgt.explain(f)
