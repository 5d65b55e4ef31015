"""Numbers of floating point that a function reads on the way and computes with (`x / x.norm().item()`, clipping by hand): one recording
serves all of them, what is compared chooses between recordings, and what else becomes of one is as in eager."""

import json
import math

import cgt_core as core
import pytest
import torch
from helpers import not_audited, values
from torch import nn

import cgt


class Box:
    """What a function finds outside, and keeps."""

    def __init__(self, device):
        self.memory, self.scale, self.last, self.log, self.total = torch.zeros(3, device=device), 2.0, None, [], 0.0

    def state(self):
        return [self.memory.tolist(), self.scale, self.last, self.log, self.total]


def divides(o, x):
    return x / x.norm().item()


def arithmetic(o, x):
    n = x.mean().item()
    return x * (1 / (n * n + 1) - 2.5) + abs(n) ** 0.5


def mathematics(o, x):
    return x + math.sqrt(x.abs().sum().item()) * math.tanh(x.max().item())


def clips(o, x):
    norm = x.norm().item()
    if 1.5 / (norm + 1e-6) < 1:
        x = x * (1.5 / (norm + 1e-6))
    return x + 1


def one_of_another(o, x):
    n = 1.0
    for _ in range(3):
        x = x * n
        n = x.mean().item() + n
    return x - n


def limits(o, x):
    return x / max(x.mean().item(), 0.25)


def powers(o, x):
    o.total += 1
    return x * (1 - math.pow(0.9, o.total)) * math.pow(x.abs().mean().item(), 2)


def stops_at_what_is_not_finite(o, x):
    loss = x.mean().item()
    if math.isnan(loss) or math.isinf(loss) or not math.isfinite(loss):
        o.log.append("stopped")
        return x * 0
    return x * loss


def returns(o, x):
    n = x.mean().item()
    return x * n, n, [n, n]


def stores(o, x):
    o.scale = x.abs().mean().item()
    o.memory.mul_(o.scale)
    o.log.append(o.scale)
    return x * o.scale


def goes_on_from_the_last(o, x):
    y = x * o.scale
    o.scale = y.abs().mean().item() + 0.5
    return y + o.scale


def writes_before_and_behind(o, x):
    o.memory.add_(x[0])
    n = o.memory.norm().item()
    o.memory.div_(n + 1)
    return x * 2 if n > 2 else x * n


def draws(o, x):
    n = torch.rand(3, device=x.device).sum().item()
    return x * n + torch.rand_like(x)


def with_another_number(o, x):
    o.total += 1.5
    return x * (x.mean().item() * o.total)


REPLAY = [
    divides, arithmetic, mathematics, clips, one_of_another, limits, powers, stops_at_what_is_not_finite, returns, stores, goes_on_from_the_last, writes_before_and_behind, draws,
    with_another_number,
]  # fmt: skip


def as_text(o, x):
    n = x.mean().item()
    o.last = f"{n:.3f}"
    return x * n


def as_an_int(o, x):
    return x.repeat(int(x.abs().mean().item() * 4) + 1, 1)


def to_c(o, x):
    o.memory.add_(x[0])
    n = x.mean().item()
    o.memory.mul_(n)
    o.last = json.dumps({"n": n * 2})
    return x * n


def by_type(o, x):
    n = x.mean().item()
    return x * n if type(n) is float else x


def is_float(n):
    return type(n) is float


def by_type_in_the_second_call(o, x):
    """Code that tells a stand-in from a number, and was not met before: behind writes, and between."""
    o.memory.add_(x[0])
    o.total += 1
    n = x.mean().item()
    o.memory.mul_(n + 1)
    o.log.append(n)
    if o.total == 2:
        o.last = is_float(n)
    o.memory.sub_(x[1])
    return x * n


def raises_in_the_second_call(o, x):
    o.memory.add_(x[0])
    o.log.append(1)
    n = x.mean().item()
    o.w = x * torch.rand_like(x)
    o.memory.mul_(n + 1)
    if len(o.log) == 2:
        o.last = json.dumps(n)
    return x * n


def returns_more(o, x):
    n = x.mean().item()
    return x * n, n * 2, {"n": n}


def raises(o, x):
    o.memory.add_(x[0])
    return x * (1 / x[0, 0].clamp(min=0).item())


OTHERS = [as_text, as_an_int, to_c, by_type, by_type_in_the_second_call, raises_in_the_second_call, returns_more, raises]


def run(function, o, x):
    try:
        return function(o, x)
    except ZeroDivisionError as error:
        return repr(error)


def agree(function, device, inputs):
    """Jitted and not, on these inputs; the jitted one."""
    f, mine, theirs = cgt.jit(function), Box(device), Box(device)
    for k, x in enumerate(inputs):
        torch.manual_seed(k)
        want = run(function, theirs, x.clone())
        torch.manual_seed(k)
        got = run(f, mine, x.clone())
        assert repr(got) == repr(want) and repr(mine.state()) == repr(theirs.state()), (k, got, want, cgt.explain(f))
        parts = zip(got, want, strict=True) if type(want) is tuple else [(got, want)]
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in parts if isinstance(b, torch.Tensor)), k
    return f


@pytest.mark.parametrize("function", REPLAY, ids=lambda f: f.__name__)
def test_one_recording_serves_all_numbers(device, function):
    f = agree(function, device, [values(device, seed=k) * (1 + k % 3) for k in range(24)])
    s = cgt.stats(f)
    assert s.replays >= 18 and s.records <= 3, cgt.explain(f)


def test_memory_for_numbers_outlives_recordings(device):
    """Where they come to on the host belongs to none of them."""

    def function(o, x):
        n = x[1, 2].item()
        return x * n, n

    for _ in range(3):
        f = agree(function, device, [values(device, seed=k) for k in range(8)])
        assert cgt.stats(f).replays >= 5, cgt.explain(f)


@pytest.mark.parametrize("function", OTHERS, ids=lambda f: f.__name__)
def test_what_else_becomes_of_one_is_as_in_eager(device, function):
    agree(function, device, [values(device, seed=k) for k in range(12)])


def test_explain_says_that_it_is_any(device):
    f = agree(divides, device, [values(device, seed=k) for k in range(4)])
    assert f"test_computed.py:{divides.__code__.co_firstlineno + 1} = any number" in cgt.explain(f)


def test_no_number_that_a_recording_can_have(device):
    """A division by what is zero, a root of what is negative, an infinity: Python says what comes of it, once for all recordings."""

    def function(o, x):
        n = x.sum().item()
        return x * (1 / n) if n > -100 else x + n

    x = torch.ones(4, 3, device=device)
    kinds = [x, -x * 20, x * 2, -x * 30, x * 0, x * math.inf, x * 3, -x * math.inf, x * math.nan, x]
    for one in (function, stops_at_what_is_not_finite):
        agree(one, device, [t for t in kinds for _ in range(3)])


@not_audited("a driver call that fails on purpose")
@pytest.mark.parametrize("call", ["cut", "wait", "launch", "begin", "instantiate", "checkpoint"])
def test_failed_driver_call_while_recording_is_undone(device, call):
    f, mine, theirs = cgt.jit(writes_before_and_behind), Box(device), Box(device)
    for k in range(10):
        x = values(device, seed=k)
        if k == 1:
            core.fault_set(call, 0, 2)
        assert torch.equal(f(mine, x), writes_before_and_behind(theirs, x)), k
        core.fault_set("", 0, 0)
    assert torch.equal(mine.memory, theirs.memory)


class Agent(nn.Module):
    """The update of soft actor-critic, as it is often written: the temperature is read behind its own update."""

    def __init__(self, device):
        super().__init__()
        torch.manual_seed(0)
        self.policy, self.log_alpha = nn.Linear(3, 2), nn.Parameter(torch.zeros(1))
        self.to(device)
        self.alpha = 1.0
        self.first, self.second = torch.optim.Adam(self.policy.parameters(), lr=1e-2), torch.optim.Adam([self.log_alpha], lr=1e-1)

    def update(self, x):
        for _ in range(2):
            pi = torch.distributions.Normal(self.policy(x), 1.0)
            action = pi.rsample()
            loss = (self.alpha * pi.log_prob(action)).mean() + action.square().mean()
            self.first.zero_grad()
            loss.backward()
            self.first.step()
            self.second.zero_grad()
            (-self.log_alpha.exp() * (pi.log_prob(action).detach() + 1)).mean().backward()
            self.second.step()
            self.alpha = self.log_alpha.exp().item()
        return loss.detach()


def test_temperature_that_is_read_behind_its_update(device):
    mine, theirs = Agent(device), Agent(device)
    update = cgt.jit(mine.update)
    for k in range(24):
        x = values(device, seed=k)
        torch.manual_seed(k)
        want = theirs.update(x)
        torch.manual_seed(k)
        assert torch.equal(update(x), want) and mine.alpha == theirs.alpha, (k, cgt.explain(update))
    assert all(map(torch.equal, mine.parameters(), theirs.parameters()))
    assert cgt.stats(update).replays >= 16, cgt.explain(update)
