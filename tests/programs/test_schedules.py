"""`scheduler.step()` inside of a jitted training step: PyTorch computes the next rate in Python, from numbers that it stored at the last
call. Weights, rates and the state of optimizer and scheduler are eager's after each call, and calls replay."""

import math
import weakref

import pytest
import torch
from helpers import same
from torch import nn, optim
from torch.optim import lr_scheduler as S

import cgt

N = 24


def warm_then_cosine(k):
    return (k + 1) / 5 if k < 5 else max(0.1, 0.5 * (1 + math.cos(math.pi * (k - 5) / 20)))


OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: optim.Adam(p, lr=0.01),
    "adamw, fused": lambda p: optim.AdamW(p, lr=0.02, fused=True),
    "groups": lambda p: optim.AdamW([{"params": p[:1]}, {"params": p[1:], "lr": 0.05}], lr=0.02, foreach=True),
}
SCHEDULES = {  # with the recordings that there may be: one for each way through the schedule
    "lambda": (lambda o: S.LambdaLR(o, lambda k: 0.9**k), 1),
    "warm, then cosine": (lambda o: S.LambdaLR(o, warm_then_cosine), 3),
    "steps": (lambda o: S.StepLR(o, 5), 3),
    "exponential": (lambda o: S.ExponentialLR(o, 0.9), 1),
    "cosine": (lambda o: S.CosineAnnealingLR(o, 30), 1),
    "cosine and back": (lambda o: S.CosineAnnealingLR(o, 8, eta_min=1e-3), 2),
    "one cycle": (lambda o: S.OneCycleLR(o, 0.1, total_steps=60), 2),
    "one cycle, linear": (lambda o: S.OneCycleLR(o, 0.1, total_steps=40, anneal_strategy="linear"), 2),
    "linear": (lambda o: S.LinearLR(o, 0.1, total_iters=6), 2),
    "polynomial": (lambda o: S.PolynomialLR(o, 40, 2.0), 1),
    "warm restarts": (lambda o: S.CosineAnnealingWarmRestarts(o, 7), 2),
    "longer restarts": (lambda o: S.CosineAnnealingWarmRestarts(o, 5, 2), 3),
    "milestones": (lambda o: S.MultiStepLR(o, [6, 6, 13], 0.5), 4),
    "one, then another": (lambda o: S.SequentialLR(o, [S.LinearLR(o, 0.1, total_iters=6), S.ExponentialLR(o, 0.9)], [6]), 4),
    "up and down": (lambda o: S.CyclicLR(o, 0.01, 0.1, step_size_up=4, cycle_momentum=False), 2),
}  # fmt: skip


class Twin:
    """A model with its optimizer, its scheduler and a whole training step."""

    def __init__(self, device, optimizer, schedule):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 3).to(device)
        self.opt = optimizer(list(self.model.parameters()))
        self.schedule = schedule(self.opt)

    def step(self, x):
        self.opt.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.opt.step()
        self.schedule.step()
        return loss.detach()

    def state(self):
        schedule = {k: v for k, v in self.schedule.state_dict().items() if not callable(v) and k != "lr_lambdas"}
        return [*self.model.parameters()], self.opt.state_dict(), schedule, self.schedule.get_last_lr()


def train(device, optimizer, schedule, n=N, between=lambda twin, k: None, wrap=cgt.jit):
    """The jitted step, which agreed with eager after each call. Each batch stays, so that none lies where another lay: how many
    recordings there are does not depend on the allocator."""
    ours, theirs, batches = Twin(device, optimizer, schedule), Twin(device, optimizer, schedule), []
    f = wrap(ours.step)
    for k in range(n):
        x = torch.arange(8.0, device=device).reshape(2, 4).add(k).sin()
        batches.append(x)
        between(ours, k), between(theirs, k)
        assert torch.equal(f(x), theirs.step(x)), k
        assert same(ours.state(), theirs.state()), k
    return f


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_scheduler_steps_inside(device, optimizer, schedule):
    make, records = SCHEDULES[schedule]
    f = train(device, OPTIMIZERS[optimizer], make)
    stats = cgt.stats(f)
    assert stats.records <= records and stats.replays >= N - 3 - records, cgt.explain(f)


def test_what_the_user_sets_between_counts(device):
    def between(twin, k):
        if k == 8:
            twin.opt.param_groups[0]["lr"] = 0.03
        if k == 12:
            twin.schedule.last_epoch = 2
        if k == 15:
            twin.schedule._last_lr = "mine"
        if k == 18:
            twin.opt.load_state_dict(twin.opt.state_dict())

    f = train(device, OPTIMIZERS["sgd"], SCHEDULES["exponential"][0], between=between)
    assert cgt.stats(f).replays >= N - 6, cgt.explain(f)


def test_rates_that_were_handed_out_stay(device):
    """Each step makes another list of rates."""
    held = []
    f = train(
        device,
        OPTIMIZERS["sgd"],
        SCHEDULES["lambda"][0],
        between=lambda twin, k: held.append(twin.schedule.get_last_lr()),
    )
    rates = [one[0] for one in held[::2]]
    assert rates == [one[0] for one in held[1::2]] == [0.1 * 0.9**k for k in range(N)]
    assert len(set(map(id, held))) == 2 * N and cgt.stats(f).replays >= N - 5


def test_rate_that_is_the_decay_for_once(device):
    """The fused optimizer asks for both as floats, so that one call cannot tell them apart."""
    f = train(
        device,
        lambda p: optim.AdamW(p, lr=0.01, weight_decay=0.01, fused=True),
        lambda o: S.LambdaLR(o, lambda k: (k + 1) / 5),
    )
    assert cgt.stats(f).replays >= N - 7, cgt.explain(f)


class Box:
    rates = None


class Doubled(S.ExponentialLR):
    def get_last_lr(self):
        return [2 * rate for rate in super().get_last_lr()]


LOGGED = {  # behind sch.step(), in a function of the step's
    "first": "return loss, sch.get_last_lr()[0]",
    "copy": "return {'loss': loss, 'rates': list(sch.get_last_lr())}",
    "group": "return loss, opt.param_groups[0]['lr'] * 2",
    "kept": "log.append((loss, sch.get_last_lr()[0]))",
    "two": "other.step(); return loss, [one.get_last_lr()[0] for one in (sch, other)]",
    "in two places": "box.rates = sch.get_last_lr()",
    "changed": "sch.get_last_lr()[0] = 7.0; return sch.get_last_lr()",
}


@pytest.mark.parametrize("text", LOGGED.values(), ids=LOGGED)
def test_rates_that_are_read_behind_the_step(device, text):
    def run(wrap):
        torch.manual_seed(0)
        model, log, box = nn.Linear(4, 3).to(device), [], Box()
        opt = optim.SGD(model.parameters(), lr=0.1)
        scope = {"model": model, "opt": opt, "sch": Doubled(opt, 0.9), "other": S.ExponentialLR(opt, 0.8), "log": log, "box": box}
        exec(f"""
def step(x):
    opt.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    opt.step()
    sch.step()
    loss = loss.detach()
    {text}
""", scope)  # fmt: skip
        f, found = wrap(scope["step"]), []
        for k in range(N):
            made = f(torch.arange(8.0, device=device).reshape(2, 4).add(k).sin())
            found.append((made, list(box.rates or ()), box.rates is scope["sch"]._last_lr, list(scope["sch"]._last_lr)))
            if k % 6 == 5:
                scope["sch"]._last_lr[0] = 0.25
        return f, [found, log]

    (f, ours), (_, theirs) = run(cgt.jit), run(lambda f: f)
    assert same(ours, theirs) and (cgt.stats(f).replays >= N - 5 or "return sch" in text), cgt.explain(f)


@pytest.mark.parametrize(
    "text",
    [
        "sch.get_last_lr()[0]", "list(sch.state_dict().values())[-1][0]", "list(vars(sch).values())[-1][0]", "bound()[0]", "function(sch)[0]", "weak()()[0]",
        "sch._last_lr[0]", "(sch.get_last_lr()[0] if len(seen) % 3 else 0)",
    ],
)  # fmt: skip
def test_call_that_reads_the_last_rate_is_as_in_eager(device, text):
    def run(wrap):
        torch.manual_seed(0)
        model = nn.Linear(4, 3).to(device)
        opt = optim.SGD(model.parameters(), lr=0.1)
        sch = S.ExponentialLR(opt, 0.9)
        scope = {"model": model, "opt": opt, "sch": sch, "bound": sch.get_last_lr, "function": S.LRScheduler.get_last_lr, "seen": [], "weak": weakref.WeakMethod(sch.get_last_lr)}
        exec(f"""
def step(x):
    opt.zero_grad()
    (model(x).square().mean() * (1 + {text})).backward()
    opt.step()
    sch.step()
""", scope)  # fmt: skip
        f, found = wrap(scope["step"]), []
        for k in range(12):
            scope["seen"].append(k)
            f(torch.arange(8.0, device=device).reshape(2, 4).add(k).sin())
            found.append(model.weight.detach().clone())
        return found

    assert same(run(cgt.jit), run(lambda f: f))
