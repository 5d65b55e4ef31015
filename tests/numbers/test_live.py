"""Numbers that are others at each call: as arguments and in places, one recording serves all of them, and every value is eager's."""

import _thread
import collections
import contextlib
import dataclasses
import decimal
import functools
import json
import math
import operator
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import time
import types

import pytest
import torch
from helpers import identical, tells, values
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import cgt
from cgt.numbers import live, standins

CALLS = 30
relaxed = settings(deadline=None, suppress_health_check=list(HealthCheck))
RATES = [0.1 * (k + 1) / 7 for k in range(CALLS)]
STEPS = list(range(CALLS))


class Box:
    """An object of a user's, with attributes that code reads and writes."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


def agree(make, numbers, most=3, replays=None):
    """`make()` gives (function, arguments of a call with this number, state): jitted and not, the same results and state."""
    (plain, arguments, state), (jitted, given_to, left) = make(), make()
    f = cgt.jit(jitted)
    for number in numbers:
        want, got = plain(*arguments(number)), f(*given_to(number))
        assert identical(got, want), (number, got, want, cgt.explain(f))
        assert repr(left()) == repr(state()), (number, cgt.explain(f))
        assert [type(x) for x in left()] == [type(x) for x in state()]
    s = cgt.stats(f)
    assert s.records <= most, cgt.explain(f)
    assert s.replays >= (len(numbers) - 6 if replays is None else replays), cgt.explain(f)
    return f


def argument(function):
    """Of a program whose number is its second argument."""
    return lambda device: lambda: (function, lambda number: (values(device, 8), number), tuple)


ARGUMENTS = {
    "factor": lambda x, lr: x * lr,
    "alpha": lambda x, lr: x.add(x.cos(), alpha=-lr),
    "several": lambda x, lr: (x * lr + lr / 3) / (1 + lr) - lr**2,
    "clamp": lambda x, lr: x.clamp(-lr, lr * 0.5),
    "lerp": lambda x, lr: torch.lerp(x, x.cos(), lr),
    "fill": lambda x, lr: torch.full_like(x, lr) + x.new_full((8,), 2 * lr) + torch.full((8,), lr, device=x.device),
    "where": lambda x, lr: torch.where(x > lr, x, lr).masked_fill(x < lr / 2, -lr),
    "addcdiv": lambda x, lr: torch.addcdiv(x, x, x + 3, value=lr),
    "foreach": lambda x, lr: torch._foreach_mul([x, x + 1], [lr, lr / 2])[1] + torch._foreach_add([x], lr)[0],
    "in place": lambda x, lr: x.clone().mul_(lr).add_(1, alpha=lr).div_(lr + 2),
    "on the left": lambda x, lr: (lr - x) * (lr / (x + 2)),
    "maximum": lambda x, lr: x * max(lr, 0.2) + min(lr, 0.3),
    "half": lambda x, lr: x.half() * lr + lr,
    "bfloat16": lambda x, lr: torch.full_like(x, lr, dtype=torch.bfloat16) * x.bfloat16() / (1 + lr),
    "double": lambda x, lr: x.double() * lr / (lr + 1),
    "remainder": lambda x, lr: x % lr + torch.fmod(x, -lr) + lr % (x + 4) + (x * 9).long() % 4,
    "activations": lambda x, lr: F.leaky_relu(x, lr) + F.elu(x, lr) + F.threshold(x, lr, -lr) + F.softplus(x, 1 + lr) + F.hardshrink(x, lr),
    "activations, bfloat16": lambda x, lr: F.leaky_relu_(x.bfloat16(), lr) * F.elu(x.bfloat16(), lr) + F.softplus(x.bfloat16(), lr),
    "unused": lambda x, lr: x + 1,
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_one_recording_serves_all_numbers(device, name):
    agree(argument(ARGUMENTS[name])(device), RATES, most=4)


@pytest.mark.parametrize("mode", ["floor", "trunc"])
def test_division_by_zero_has_a_kernel_of_its_own(device, mode):
    agree(argument(lambda x, lr: torch.div(x, lr, rounding_mode=mode))(device), [0.5, 0.25, 0.0, -0.0, 2.0, 0.0] * 3, most=8, replays=6)


def test_all_that_pytorch_may_ask_a_number_is_answered():
    """Of this release: an AttributeError in the middle of a call is the user's."""
    header = pathlib.Path(torch.__file__).parent / "include/torch/csrc/utils/python_symnode.h"
    text = header.read_text()
    asked = {*re.findall(r'attr\("(\w+)"\)', text), *re.findall(r"c10::SymNode (\w+)\(", text)} - {"dispatch_common_", "dispatch_sym_ite_"}
    assert len(asked) > 40 and {name for name in asked if not hasattr(standins.Node, name)} <= {"n"}  # a constructor's argument


INDICES = {
    "read a slice": lambda x, t: x[t % 5 : t % 5 + 2] * 2,
    "read an element": lambda x, t: x.view(4, 2)[:, t % 2] * 2,
    "from the end": lambda x, t: x[-(t % 3) - 1 :].sum(),
    "write a slice": lambda x, t: x.clone().index_fill_(0, torch.tensor([0], device=x.device), 1)[t % 5 : t % 5 + 2].mul_(2),
    "set a slice": lambda x, t: set_in(x.clone(), slice(t % 5, t % 5 + 2), 7.0),
    "set an element": lambda x, t: set_in(x.clone().view(4, 2), (slice(None), t % 2), x[:4]),
    "narrow": lambda x, t: x.narrow(0, t % 5, 2) + 1,
    "split": lambda x, t: x.split([t % 4 + 1, 7 - t % 4])[0] * 2,
    "view": lambda x, t: x.view(t % 2 + 1, -1).sum(0),
}


def set_in(x, at, value):
    x[at] = value
    return x


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("name", INDICES)
def test_numbers_that_are_indices(device, name, draws):
    """Few values of them, each with a recording of its own; also where the function cannot be run again, since it drew."""
    function = INDICES[name]
    with_dropout = lambda x, t: F.dropout(function(x, t).float(), 0.5)  # noqa: E731
    x, f = values(device, 8), cgt.jit(with_dropout if draws else function, max_records=16)
    for k in range(CALLS):
        torch.manual_seed(k)
        got = f(x, k)
        torch.manual_seed(k)
        assert identical(got, f.__wrapped__(x, k))


ODD = {  # what PyTorch's parser does not take a number of ours for
    "zeros": lambda x, n: torch.zeros(n % 3 + 1, 8, device=x.device) + x,
    "expand": lambda x, n: x[:1].expand(n % 3 + 1, -1).sum() + x,
    "interpolate": lambda x, n: F.interpolate(x.view(1, 1, 2, 4), size=(n % 3 + 2, 4)).sum() + x,
}


@pytest.mark.parametrize("draws", [False, True])
def test_a_row_that_is_returned_is_the_users_memory_whatever_was_written_before(device, draws):
    """Eager's result is a view: what comes to that row later is seen in it."""
    held = []
    for wrap in (lambda function: function, cgt.jit):
        table = torch.zeros(6, 4, device=device)

        def a(x, k, table=table):
            table[k % 6] = F.dropout(x, 0.5) if draws else x
            return table[k % 6], table.mean(0)

        f = wrap(a)
        torch.manual_seed(3)
        held.append([f(values(device, 4, seed=k), k) for k in range(20)] + [(table, table)])
    assert all(identical(mine, theirs) for one, other in zip(*held, strict=True) for mine, theirs in zip(one, other, strict=True))


class Acts:
    """What a function may have done before it raises."""

    def __init__(self, device):
        torch.manual_seed(5)
        self.total, self.calls, self.log, self.seen = torch.zeros(8, device=device), 0, [], {"calls": 0}
        self.net = nn.Linear(8, 1).to(device)
        self.adam = torch.optim.Adam(self.net.parameters(), lr=0.1)

    def act(self, how, x):
        if how == "draws":
            return x + torch.rand(8, device=x.device)
        if how == "writes":
            self.total.add_(x)
        elif how == "counts":
            self.calls += 1
            self.seen["calls"] += 1
        elif how == "appends":
            self.log.append(x * 2)
        elif how == "trains":
            self.adam.zero_grad()
            self.net(x).sum().backward()
            self.adam.step()
        return x

    def state(self):
        return [self.total.clone(), self.calls, dict(self.seen), [t.clone() for t in self.log], [p.detach().clone() for p in self.net.parameters()]]


@pytest.mark.parametrize("how", ["draws", "writes", "counts", "appends", "trains"])
@pytest.mark.parametrize("name", ODD)
def test_what_raises_for_a_stand_in_is_as_if_it_had_not_run(device, name, how):
    """On the host the function runs for real while it is recorded."""
    ours, theirs = Acts(device), Acts(device)
    f = cgt.jit(lambda x, n: ODD[name](ours.act(how, x), n))
    for k in range(24):
        x = values(device, 8, seed=k)
        torch.manual_seed(k)
        got = f(x, k)
        torch.manual_seed(k)
        assert identical(got, ODD[name](theirs.act(how, x), k)), k
        mine, wanted = ours.state(), theirs.state()
        assert mine[1:3] == wanted[1:3] and all(map(identical, (mine[0], *mine[3], *mine[4]), (wanted[0], *wanted[3], *wanted[4]))), k


WHOLE = {
    "factor": lambda x, t: x * t,
    "weight": lambda x, t: x * (t / 1000) + (1 - t / 1000),
    "full": lambda x, t: x + torch.full((8,), t, device=x.device),
    "embedded": lambda x, t: torch.cos(torch.arange(8, device=x.device) * torch.full((1,), t, device=x.device)),
    "tensor": lambda x, t: x + torch.tensor(t, device=x.device) * torch.tensor([t], device=x.device, dtype=torch.float32),
    "tensors": lambda x, t: x[:2] * torch.tensor([t, t + 1], device=x.device) + torch.as_tensor([t, 0.5], device=x.device),
    "whole": lambda x, t: (x * 100).long() * t + t // 3 - t % 7,
    "difference": lambda x, t: x * (t - 1) + (-t) ** 2,
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers(device, name):
    agree(argument(WHOLE[name])(device), STEPS)


def test_comparison_is_what_a_recording_is_for(device):
    def f(x, t):
        if t > 20:
            return x * t
        return x - t if t % 2 == 0 else x + t

    agree(argument(f)(device), STEPS, most=4)


@tells("number_decides")
def test_number_that_decides_a_length_is_exact_and_named(device):
    f = agree(argument(lambda x, n: torch.stack([x * k for k in range(n)]).sum(0))(device), [2, 3] * 15, most=3, replays=20)
    for n in range(4, 18):
        f(values(device, 8), n)
    assert f"args[1] is used for more than arithmetic and operations ({__file__}" in str(cgt.stats(f).reasons)


@pytest.mark.parametrize(
    "look",
    [
        lambda n: [10, 20, 30, 40][n], lambda n: len(range(n)), lambda n: float(f"{n}"), lambda n: {1: 5, 2: 6, 3: 7}.get(n, 9),
        lambda n: math.gamma(n), lambda n: math.log(n, 2), lambda n: n & 1, lambda n: divmod(n, 2)[0], lambda n: round(n / 3), lambda n: hash(n), lambda n: n.bit_length(),
        lambda n: int(n / 2), lambda n: sum([n, n]), lambda n: torch.ones(n).sum().item(), lambda n: 3 if n else 4, lambda n: isinstance(n, int),
        lambda n: [5, 6, 7, 8][-n], lambda n: str(n).count("2"), lambda n: complex(n, 1).real,
    ],
)  # fmt: skip
def test_whatever_looks_at_a_number_sees_the_number(device, look):
    agree(argument(lambda x, n: x * look(n))(device), [1, 2, 3, 1] * 8, most=4, replays=0)


def test_numbers_in_places(device):
    def make():
        box, options = Box(rate=0.1, decay=[0.0]), {"scale": 1.0}

        def function(x):
            return x * box.rate + options["scale"] / 3 - box.decay[0]

        def arguments(number):
            box.rate, options["scale"], box.decay[0] = number, 1 + number, number / 5
            return (values(device, 8),)

        return function, arguments, lambda: [box.rate, options["scale"], *box.decay]

    agree(make, RATES)


@tells("stores_number")
def test_number_that_the_call_changes_and_reads(device):
    def make():
        box = Box(t=0, rate=1.0, last=0.5)

        def function(x):
            box.t += 1
            box.rate = max(0.2, box.rate * 0.9)
            box.last = box.rate / box.t
            return x * (1 - 0.9**box.t) + box.rate

        return function, lambda _: (values(device, 8),), lambda: [box.t, box.rate, box.last]

    f = agree(make, RATES, most=4)
    assert any("From the next call on, replays compute it" in reason for reason in cgt.stats(f).reasons)


def test_constant_that_is_stored_over_what_it_equals(device):
    """In the recorded call nothing changes, and at a replay it does."""
    box = Box(t=1)

    def function(x, a):
        y = x * (box.t**0 + a)
        box.t = int(a + a)
        return y

    f, x = cgt.jit(function), values(device, 8)
    for a in 5 * [1, 1, 0, 0]:
        assert identical(f(x, a), x * (1 + a)), cgt.explain(f)
        assert box.t == 2 * a, cgt.explain(f)
    assert cgt.stats(f).replays >= 4, cgt.explain(f)


def test_numbers_that_are_stored_and_appended(device):
    def make():
        box = Box(rates=[], last=0.0)

        def function(x, rate):
            box.rates.append(rate * 2)
            box.last = rate
            return x * rate

        return function, lambda number: (values(device, 8), number), lambda: [*box.rates, box.last]

    agree(make, RATES)


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw", "fused adam", "fused adamw", "fused sgd"])
def test_learning_rate_on_a_schedule(device, kind):
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
        fused = {"fused": True} if kind.startswith("fused") else {}
        if kind.endswith("sgd"):
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.01, **fused)
        else:
            cls = torch.optim.Adam if kind.endswith("adam") else torch.optim.AdamW
            optimizer = cls(model.parameters(), 0.01, **(fused or {"capturable": device.type == "cuda", "foreach": True}))

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach(), [p.detach().clone() for p in model.parameters()]

        def arguments(number):
            optimizer.param_groups[0]["lr"] = number / 20
            return (values(device, 4, 8),)

        return step, arguments, lambda: [optimizer.param_groups[0]["lr"]]

    agree(make, RATES, most=4, replays=15)


def test_schedulers_of_pytorch(device):
    def make():
        p = torch.zeros(8, device=device)
        optimizer = torch.optim.SGD([nn.Parameter(p)], 0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, CALLS)
        group = optimizer.param_groups[0]

        def function(x):
            return p.add_(x, alpha=-group["lr"]).clone()

        def arguments(_):
            optimizer.step()
            schedule.step()
            return (values(device, 8),)

        return function, arguments, lambda: [group["lr"]]

    agree(make, RATES)


@pytest.mark.parametrize("name", ["sqrt", "exp", "log", "sin", "cos", "tan", "tanh"])
def test_functions_of_math(device, name):
    function = getattr(math, name)
    agree(argument(lambda x, t: x * getattr(math, name)(t + 0.1) + math.sqrt(2))(device), RATES, most=2)
    agree(argument(lambda x, t: x * getattr(math, name)(t + 1))(device), STEPS, most=2)
    agree(argument(lambda x, t: x * function(t + 0.1))(device), RATES, most=9, replays=0)  # kept from before: it gets the number
    assert getattr(math, name) is function


def test_numbers_that_a_function_of_math_does_not_take(device):
    """In the recorded call it does."""
    f, x = cgt.jit(lambda x, t: x * math.log(t)), values(device, 8)
    for t in RATES[:6]:
        assert identical(f(x, t), x * math.log(t))
    for t in (0.0, -1.0, math.inf, 1e-320):
        try:
            want = x * math.log(t)
        except ValueError:
            with pytest.raises(ValueError, match="math domain error|positive"):
                f(x, t)
        else:
            assert identical(f(x, t), want)


def test_sampler_with_a_whole_t(device):
    def make():
        betas = torch.linspace(1e-4, 0.02, CALLS).tolist()
        model = nn.Linear(8, 8).to(device)
        with torch.no_grad():
            for k, p in enumerate(model.parameters()):
                p.copy_(values(device, *p.shape, seed=k))

        @torch.no_grad()
        def denoise(x, t, beta):
            noise = model(x + torch.full((1,), t, device=device) / CALLS)
            return (x - beta * noise) / (1 - beta) ** 0.5

        return denoise, lambda t: (values(device, 2, 8), t, betas[t]), tuple

    agree(make, STEPS[::-1])


@pytest.mark.parametrize("kind", [list, tuple])
def test_tables_of_numbers(device, kind):
    def make():
        box = Box(betas=kind(0.001 * (k + 1) for k in range(CALLS)), counts=kind(range(7, 7 + CALLS)))
        kept = kind(0.5 + 0.01 * k for k in range(CALLS))

        def function(x, t):
            return x * box.betas[t] + kept[t - 1] * box.counts[-t - 1] / (1 - kept[t]) ** 0.5

        return function, lambda t: (values(device, 8), t), lambda: [*box.betas, *box.counts, *kept]

    agree(make, STEPS, most=3)


def test_tables_stay_the_user_s(device):
    box, seen = Box(table=[0.5, 0.25, 0.125, 1.0]), []

    def function(x, t):
        seen.append(box.table)
        if t == 3:
            box.table.append(2.0)
        return x * box.table[t] + len(box.table)

    mine, f = box.table, cgt.jit(function)
    for k in range(12):
        assert torch.equal(f(values(device, 8), k % 4), values(device, 8) * mine[k % 4] + len(mine))
        assert box.table is mine and all(one is mine and type(one) is list for one in seen)
        del mine[4:]
    with pytest.raises(IndexError):
        f(values(device, 8), 9)


def test_tables_to_which_two_ways_lead(device):
    tables = [[0.5, 0.25, 0.125, 1.0] for _ in range(2)]

    def program(table):
        both = (table,)

        def function(x, t):
            y = x * table[t]
            if t == 1:
                both[0][2] += 1
            if t == 2:
                table[0] = table[3] + 1
            return y + table[2] + both[0][0] + table[t - 1]

        return function

    f, g = cgt.jit(program(tables[0])), program(tables[1])
    for t in (0, 3, 0, 1, 2, 3, 1, 1, 2, 0, 3, 2, 1):
        assert torch.equal(f(values(device, 8), t), g(values(device, 8), t)) and tables[0] == tables[1]


def test_table_at_two_places_is_one(device):
    def make():
        table = [0.001 * (k + 1) for k in range(CALLS)]
        one, other = Box(betas=table), Box(betas=table)

        def function(x, t):
            return x * one.betas[t] + other.betas[-t - 1] * (1 if one.betas is other.betas else 2)

        return function, lambda t: (values(device, 8), t), tuple

    agree(make, STEPS, most=3)


@pytest.mark.parametrize(("way", "held"), [(lambda one: one, lambda one: one), (lambda one: (one,), lambda one: one[0]), (lambda one: {"of": (0, one)}, lambda one: one["of"][1])])
def test_list_that_a_call_has_in_its_hand_is_no_table(device, way, held):
    """It must be the one in the place, to `is` as well."""
    box, mine = Box(betas=[0.5, 0.25, 0.125, 1.0]), [0.5, 0.25, 0.125, 1.0]
    given = way(box.betas)
    f = cgt.jit(lambda x, t, given: x * box.betas[t] * (2 if held(given) is box.betas else 3))
    for k in range(12):
        assert torch.equal(f(values(device, 8), k % 4, given), values(device, 8) * mine[k % 4] * 2), k


@pytest.mark.parametrize("shape", [(CALLS,), (CALLS, 8)])
def test_rows_of_a_tensor(device, shape):
    def make():
        table = values(device, *shape, seed=3)
        return lambda x, t: x * table[t] + table[-t - 1], lambda t: (values(device, 8), t), tuple

    agree(make, STEPS)


@tells("row_written", "row_kept")
@pytest.mark.parametrize(
    "use",
    [
        lambda table, t, x: table[t].add_(1) + x, lambda table, t, x: (table[t], x), lambda table, t, x: table[t].view(1),
        lambda table, t, x: table[t] + table.mul_(2)[t], lambda table, t, x: table.index_add_(0, torch.tensor([t], device=x.device), x[:1]).sum() + x,
    ],
)  # fmt: skip
def test_rows_that_are_views_to_the_caller(device, use):
    tables = [values(device, 4).clone() for _ in range(2)]
    f = cgt.jit(lambda x, t: use(tables[0], t, x))
    for k in range(12):
        got, want = f(values(device, 8), k % 4), use(tables[1], k % 4, values(device, 8))
        assert identical(got, want) and torch.equal(*tables), cgt.explain(f)
        if isinstance(got, tuple):
            assert got[0].data_ptr() == tables[0][k % 4].data_ptr()


def test_errors_are_those_of_the_call(device):
    f, g = cgt.jit(lambda x, n: x * (1 / n)), lambda x, n: x * (1 / n)
    for n in (3, 2, 5, 4, 6):
        assert torch.equal(f(values(device, 8), n), g(values(device, 8), n))
    with pytest.raises(ZeroDivisionError):
        f(values(device, 8), 0)
    assert torch.equal(f(values(device, 8), 7), g(values(device, 8), 7))
    assert cgt.stats(f).replays >= 2


def test_numbers_without_end_and_too_large(device):
    def f(x, a):
        return x * a + x.clamp(max=a)

    def double(x, n):
        return x.double() * (n * 3)

    for function, usual, odd in (
        (f, [0.5, 0.25, 0.75], [math.inf, -math.inf, math.nan, 1e308, -0.0, 5e-324, 1e-45, 3.4e38, 7.0, 0.0, 1e30]),
        (double, [3, 4, 5], [2**40, 2**53 + 1, -(2**62), 2**61, 2**62 - 1, 2**63, 2**70, 7]),
    ):
        jitted, x = cgt.jit(function), values(device, 8)
        for a in [*usual, *odd, *usual, *odd]:
            got, want = outcome(jitted, x, a), outcome(function, x, a)
            assert type(got) is type(want) and (identical(got, want) if isinstance(got, torch.Tensor) else str(got) == str(want)), a
        assert cgt.stats(jitted).replays >= 4, cgt.explain(jitted)


def test_another_type_is_another_recording(device):
    f = agree(argument(lambda x, a: x.long() * a)(device), [2, 3, 4, 0.5, 0.25, 5, 0.75, 6, True, False, 7, 0.1], most=8, replays=2)
    assert cgt.stats(f).records >= 2


def test_what_a_function_returns_and_keeps_is_the_number_itself(device):
    kept = []

    def function(x, a):
        kept.append([a, (a, {"a": a})])
        return x * a, a, {"twice": 2 * a}

    f = cgt.jit(function)
    for a in RATES:
        y, same, rest = f(values(device, 8), a)
        assert torch.equal(y, values(device, 8) * a) and (same, rest) == (a, {"twice": 2 * a})
        assert type(same) is float and type(rest["twice"]) is float
    assert kept == [[a, (a, {"a": a})] for a in RATES]
    assert all(type(one[0]) is float and type(one[1][0]) is float and type(one[1][1]["a"]) is float for one in kept)


@tells("number_kept")
def test_what_outlives_the_call_in_a_closure(device):
    made = []

    def function(x, a):
        made.append(lambda: x[:0].sum() + a * 2)
        return x * a

    f = cgt.jit(function)
    for a in RATES:
        assert torch.equal(f(values(device, 8), a), values(device, 8) * a)
    assert any("outlives the call" in reason for reason in cgt.stats(f).reasons)
    assert [float(one()) for one in made] == [pytest.approx(2 * a) for a in RATES]


def test_user_exceptions_leave_numbers_where_they_were(device):
    box = Box(a=1.0)

    def function(x, fail):
        y = x * box.a
        box.a = box.a * 2
        if fail.is_floating_point():
            raise ValueError("mine")
        return y

    f, fine, bad = cgt.jit(function), torch.ones(1, dtype=torch.long, device=device), torch.ones(1, device=device)
    for k in range(12):
        if k % 3 == 2:
            with pytest.raises(ValueError, match="mine"):
                f(values(device, 8), bad)
        else:
            assert torch.equal(f(values(device, 8), fine), values(device, 8) * 2.0**k)
        assert box.a == 2.0 ** (k + 1) and type(box.a) is float


def test_type_is_asked_for(device):
    def function(x, a):
        return x * a if type(a) is float else x * 0

    agree(argument(function)(device), RATES, most=9, replays=0)


def tried(how):
    """How a number is looked at by what takes nothing else, and by who takes another way then."""
    try:
        return how()
    except (TypeError, AttributeError):
        return 60.0


ODDS = {  # what tells a float or an int from what stands for one
    "hasattr __torch_function__": lambda k: 1.0 if hasattr(k, "__torch_function__") else 2.0,
    "is_tensor_like": lambda k: 1.0 if torch.overrides.is_tensor_like(k) else 2.0,
    "hasattr __array__": lambda k: 1.0 if hasattr(k, "__array__") else 2.0,
    "hasattr __dict__": lambda k: 1.0 if hasattr(k, "__dict__") else 2.0,
    "hasattr numerator": lambda k: 1.0 if hasattr(k, "numerator") else 2.0,
    "hasattr node": lambda k: 1.0 if hasattr(k, "node") else 2.0,
    "hasattr fromhex": lambda k: 1.0 if hasattr(k, "fromhex") else 2.0,
    "dir": lambda k: len(dir(k)),
    "setattr": lambda k: tried(lambda: setattr(k, "a", 1) or 1.0),
    "del": lambda k: tried(lambda: delattr(k, "a") or 1.0),
    "json": lambda k: tried(lambda: float(json.dumps(k))),
    "Decimal": lambda k: tried(lambda: float(decimal.Decimal(k))),
    "ldexp": lambda k: tried(lambda: math.ldexp(1.0, int(k) if type(k) is float else k)),
    "pow of three": lambda k: tried(lambda: pow(k, 2, 5)),
    "method of the type": lambda k: tried(lambda: float.__add__(k, 1.0)),
    "reflected": lambda k: 2.0 if (3.0).__le__(k) else 3.0,
    "of the type": lambda k: 2.0 if float.__lt__(1.0, k) else 3.0,
    "by map": lambda k: 2.0 if any(map((1.0).__eq__, [k])) else 3.0,
    "whole": lambda k: tried(lambda: 2.0 if (1).__lt__(k) else 3.0),  # from Python 3.14 on NotImplemented raises there
    "suppressed": lambda k: suppressed(k),
    "bare": lambda k: bare(k),
}


def suppressed(k):
    with contextlib.suppress(TypeError):
        return float(json.dumps(k))
    return 60.0


def bare(k):
    try:
        return float(json.dumps(k))
    except:  # noqa: E722
        return 60.0


@pytest.mark.filterwarnings("ignore:NotImplemented should not be used")
@pytest.mark.parametrize("kind", [float, int])
@pytest.mark.parametrize("name", ODDS)
def test_what_tells_a_stand_in_from_a_number_is_given_the_number(device, name, kind):
    numbers, look = [kind(k // 4) for k in range(16)], ODDS[name]
    agree(argument(lambda x, k: x * look(k))(device), numbers, most=8, replays=6)
    agree(lambda: in_place(device, look), numbers, most=8, replays=6)


def in_place(device, look):
    box = Box(k=0)
    return lambda x: x * look(box.k), lambda k: vars(box).update(k=k) or (values(device, 8),), tuple


@pytest.mark.parametrize("name", ODDS)
def test_number_that_was_read_or_counted_is_the_number_to_what_tells_it(device, name):
    look = ODDS[name]
    f = cgt.jit(lambda x: x * look(x.sum().item()))
    for k in range(10):
        x = torch.full((3,), 1.0 + k / 8, device=device)
        assert torch.equal(f(x), f.__wrapped__(x))
    boxes = Box(k=0), Box(k=0)
    plain, jitted = (counted(box, look) for box in boxes)
    g = cgt.jit(jitted)
    for _ in range(10):
        assert identical(g(values(device, 8)), plain(values(device, 8)))
        assert boxes[0].k == boxes[1].k


def counted(box, look):
    def function(x):
        box.k += 1
        return x * look(box.k)

    return function


def test_attributes_that_numbers_have_not_need_no_recording_of_their_own(device):
    def function(x, lr):
        return x * lr if not hasattr(lr, "shape") and not hasattr(lr, "__array__") else x

    agree(argument(function)(device), RATES)


@tells("number_type")
def test_new_code_that_asks_for_a_type_ends_the_run(device):
    def function(x, a):
        return x * a * (eval("lambda a: 2.0 if type(a) is float else 3.0", {})(a) if a > 0.3 else 1.0)

    f = cgt.jit(function)
    for a in (0.1, 0.2, 0.25, 0.15, 0.5, 0.6, 0.7, 0.2, 0.5, 0.9):
        assert torch.equal(f(values(device, 8), a), function(values(device, 8), a))
    assert any("asks for an exact type" in reason for reason in cgt.stats(f).reasons), cgt.explain(f)


@tells("number_raised")
def test_what_takes_no_stand_in_gets_the_number(device):
    f = cgt.jit(lambda x, a: x * float(decimal.Decimal(a) * 2))
    for a in RATES[:10]:
        assert torch.equal(f(values(device, 8), a), values(device, 8) * float(decimal.Decimal(a) * 2))
    if device.type == "cpu":  # a capture is undone whatever it raised
        assert any("when a stand-in was passed for a number" in reason for reason in cgt.stats(f).reasons), cgt.explain(f)


@tells("number_saved")
def test_differentiable_functions_run_with_the_number(device):
    w = nn.Parameter(values(device, 8))
    f = cgt.jit(lambda x, a: (x * w * a).sum())
    for a in RATES[:12]:
        w.grad = None
        f(values(device, 8), a).backward()
        want = torch.autograd.grad((values(device, 8) * w * a).sum(), w)[0]
        assert torch.equal(w.grad, want)
    assert "a backward outside of the function" in cgt.explain(f)


def test_backward_inside_sees_the_number(device):
    def make():
        w = values(device, 8).requires_grad_()

        def function(x, a):
            (grad,) = torch.autograd.grad(((x * a - w) ** 2 * a / 3).sum(), w)
            return grad

        return function, lambda a: (values(device, 8, seed=2), a), tuple

    agree(make, RATES)


def test_a_thread_without_a_frame_of_pythons_is_told_the_node(monkeypatch):
    """Autograd's, for a GPU: PyTorch's C++ asks there, and what it is not told is a number like any other."""
    node, told, failed = object(), [], []
    monkeypatch.setattr(sys, "unraisablehook", failed.append)
    _thread.start_new_thread(told.extend, (map(getattr, [standins.Float(node)], ["node"]),))
    while not (told or failed):
        time.sleep(0.001)
    assert told == [node] and not failed


def test_values_read_on_the_way(device):
    def function(x, a):
        y = x * a
        return y + a if y.sum() > 1 else y - a

    agree(argument(function)(device), RATES, most=4)


def test_explain_shows_what_is_live(device):
    f = agree(argument(lambda x, a: x * a)(device), RATES)
    assert "numbers that may change: args[1]" in cgt.explain(f)
    f = agree(argument(lambda x, n: x * [1.0, 2.0, 3.0][n])(device), [0, 1, 2] * 10, most=4, replays=10)
    assert f"args[1] ({__file__}" in cgt.explain(f)


def test_dynamic_says_it_beforehand(device):
    f = cgt.jit(lambda x, lr=0.5, *, t=1: x * lr + t, dynamic=("lr", "t"))
    x = values(device, 8)
    for k, a in enumerate(RATES):
        assert torch.equal(f(x, a, t=k), x * a + k)
    s = cgt.stats(f)
    assert (s.records, s.eager) == (1, 0) and s.replays == CALLS - 2, cgt.explain(f)
    with pytest.raises(cgt.CgtError, match="dynamic"):
        cgt.jit(lambda x: x, dynamic=("lr",))


# --- random programs ------------------------------------------------------------------------------

FLOATS = st.floats(-4, 4, allow_nan=False).map(lambda x: round(x, 3))
NUMBER = st.one_of(st.integers(-6, 6), FLOATS)
PLACES = ["box.c", "box.d", "box.entries['k']", "box.row[1]"]
LEAVES = st.one_of(st.sampled_from(["a", "b", "box.c"]), st.sampled_from([*PLACES, "box.pair[0]", "box.pair[-1]"]), NUMBER.map(lambda x: f"({x!r})"))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["+", "-", "*", "/", "//", "%"]), inner, inner).map(lambda t: f"({t[1]} {t[0]} {t[2]})"),
        st.tuples(inner, st.integers(0, 3)).map(lambda t: f"({t[0]} ** {t[1]})"),
        st.tuples(st.sampled_from(["sqrt", "exp", "log", "sin", "cos", "tan", "tanh"]), inner).map(lambda t: f"math.{t[0]}({t[1]})"),
        inner.map(lambda t: f"(-{t})"), inner.map(lambda t: f"abs({t})"),
        st.tuples(inner, inner, inner).map(lambda t: f"({t[0]} if {t[1]} > {t[2]} else {t[1]})"),
        st.tuples(inner, inner).map(lambda t: f"max({t[0]}, {t[1]})"), inner.map(lambda t: f"float({t})"), inner.map(lambda t: f"int({t})"),
    ),
    max_leaves=6,
)  # fmt: skip


FEW = st.sampled_from([0, 1, 2, 0.0, 0.5])  # so that numbers come back
CALLED_WITH = st.one_of(st.tuples(NUMBER, NUMBER, st.one_of(st.none(), NUMBER)), st.tuples(FEW, FEW, st.one_of(st.none(), FEW)))
STORES = ["", "{p} = {}", "if a > b: {p} = {}", "{p} = 0", "{p} += {}; {p} %= 3", "{p}, box.c = box.c, {p}", "box.d = {}; {p} = box.c"]
STORES += ["box.pair = ({}, box.c)", "box.pair = box.pair[::-1]", "{p} = box.pair[0]", "a, box.d = box.pair", "box.pair = (1, 0.5)"]


@settings(relaxed, max_examples=int(os.environ.get("CGT_PROGRAMS", 100)))
@given(
    trees=st.lists(TREES, min_size=1, max_size=3), calls=st.lists(CALLED_WITH, min_size=4, max_size=12),
    store=st.sampled_from(STORES), place=st.sampled_from(PLACES),
    other=st.sampled_from([f"{p} = {{!r}}" for p in PLACES] + ["box.pair = ({!r}, 2)", "box.pair = (0.5, {!r})", "box.pair = ({!r},) * 2"]),
)  # fmt: skip
def test_random_arithmetic_is_python_s(device, trees, calls, store, place, other):
    source = "def f(x, a, b, box):\n" + "".join(f"    x = x.mul({tree}).add(1, alpha={tree})\n" for tree in trees)
    source += f"    {store.format(trees[-1], p=place)}\n    return x\n"
    scope = {"math": math}
    exec(compile(source, "random_arithmetic", "exec"), scope)
    mine, theirs = (Box(c=1, d=0.5, entries={"k": 2}, row=[0, 1, 2], pair=(0.5, 2)) for _ in range(2))
    f = cgt.jit(lambda x, a, b: scope["f"](x, a, b, mine))
    x = torch.linspace(-1, 1, 4, dtype=torch.float64, device=device)
    for a, b, c in calls:
        if c is not None:
            for box in (mine, theirs):
                exec(other.format(c), {"box": box})
        got, want = outcome(f, x, a, b), outcome(scope["f"], x, a, b, theirs)
        assert type(got) is type(want) and (identical(got, want) if isinstance(got, torch.Tensor) else str(got) == str(want)), (source, a, b, c)
        assert repr(vars(mine)) == repr(vars(theirs)), (source, a, b, c)


def outcome(function, *args):
    try:
        return function(*args)
    except (ZeroDivisionError, OverflowError, ValueError, RuntimeError, TypeError) as error:
        return error


def test_module_and_namespace_numbers(device):
    def make():
        box = types.SimpleNamespace(t=0)
        model = nn.Dropout(0.0).to(device)
        model.scale = 1.0

        def function(x):
            box.t = box.t + 1
            return model(x) * model.scale / box.t

        def arguments(number):
            model.scale = number
            return (values(device, 8),)

        return function, arguments, lambda: [box.t, model.scale]

    agree(make, RATES, most=4)


@pytest.mark.parametrize("kind", ["a dict", "a list", "a dataclass"])
def test_a_number_in_an_argument_that_the_call_changes(kind, device):
    """It fits any number, so the recording must see for itself that the call left another one there."""

    @dataclasses.dataclass
    class Config:
        left: int

    def get(c):
        return c.left if kind == "a dataclass" else c["left" if kind == "a dict" else 0]

    def put(c, n):
        setattr(c, "left", n) if kind == "a dataclass" else c.__setitem__("left" if kind == "a dict" else 0, n)

    def function(x, c):
        if get(c) > 0:
            put(c, get(c) - 1)
            x = x * len(str(get(c)))  # exact: a stand-in is looked at
        return x * 2

    ours, theirs = ({"a dict": {"left": 0}, "a list": [0], "a dataclass": Config(0)}[kind] for _ in range(2))
    f, x = cgt.jit(function, audit="0"), values(device, 4)
    for k in range(20):
        if k % 6 == 0:
            put(ours, 3), put(theirs, 3)
        assert identical(f(x, ours), function(x, theirs)) and get(ours) == get(theirs), k


def test_what_a_run_with_stand_ins_left_is_undone_before_it_runs_again(device):
    """In a dict that was not empty, a deque, a set."""
    done, history, seen, x = {"": 1}, collections.deque(), set(), values(device, 4)

    def function(x, rate):
        first = rate not in done
        done[rate] = 1
        history.append(float(rate))
        seen.add(str(len(history)))
        json.dumps(rate)  # takes no stand-in
        return x * rate * (100 if first else 1)

    f = cgt.jit(function)
    for k in range(8):
        assert identical(f(x, 0.1 / (k + 1)), x * (0.1 / (k + 1)) * 100), k
        assert len(history) == len(seen) == k + 1 and len(done) == k + 2


MAKERS = {
    "a nested list": lambda t, n: torch.tensor([[n]], device=t.device),
    "new_tensor": lambda t, n: t.new_tensor(n),
    "data=": lambda t, n: torch.tensor(data=n, device=t.device),
    "asarray": lambda t, n: torch.asarray(n, device=t.device),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_tensors_of_whole_numbers_beyond_32_bits(maker, device):
    """C++ asks a symbolic one for an int."""
    f, t = cgt.jit(lambda t, n: t + MAKERS[maker](t, n)), torch.zeros(1, 1, dtype=torch.int64, device=device)
    for k in range(16):
        n = (0, 2**33 + 5, 2**33 + 7, -(2**34) - 5)[k % 4]
        assert f(t, n).item() == n, k



LARGE = [1e300, -1e300, math.inf, -math.inf, math.nan, 3.4028235e38, 3.40282357e38, 65519.0, 65520.0]
WIDE = [2**54 + 2**30 + 1, -(2**62), 2**24 + 1, 65519, 65520, 2**55 + 2**47 + 1]


@pytest.mark.parametrize("numbers", [LARGE, WIDE], ids=["floats", "whole"])
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128, torch.bool])
def test_tensors_of_numbers_that_their_type_does_not_hold(device, dtype, numbers):
    """Eager's are rounded from 64 bits, to infinity if need be."""
    kind = type(numbers[0])
    make = lambda n, t: (torch.tensor(n, dtype=dtype, device=t.device), torch.tensor([n], dtype=dtype, device=t.device), torch.as_tensor([n, kind(2), True], dtype=dtype, device=t.device))  # fmt: skip  # noqa: E731
    f, t = cgt.jit(lambda n, t: (make(n, t), t + 1)), torch.zeros(1, device=device)
    for k, n in enumerate([kind(k) for k in range(1, 7)] + [one for odd in numbers for one in (odd, kind(2))]):
        assert all(map(identical, f(n, t)[0], make(n, t))), (k, n)
    exact = device.type == "cuda" and dtype in (torch.bool, *live.SHORT)  # no kernel's argument is the number itself
    assert cgt.stats(f).replays >= (0 if exact else len(numbers) + 3), cgt.explain(f)


def test_tensors_of_a_live_number_and_one_of_another_kind(device):
    f, t = cgt.jit(lambda n, t: t * torch.tensor([n, 1j], device=t.device)), torch.ones(2, device=device)
    for k in range(8):
        assert identical(f(k / 3, t), torch.tensor([k / 3, 1j], device=device)), k


SUMS = {
    "first": lambda k: sum([k, 1e16, 1.0, -1e16]),
    "second": lambda k: sum([1e16, k, 1.0, -1e16]),
    "last": lambda k: sum([1e16, 1.0, -1e16, k]),
    "start": lambda k: sum([1e16, 1.0, -1e16], k),
    "several": lambda k: sum([1e16, k, k, k / 3, -1e16]),
    "generator": lambda k: sum(x * k for x in (1e16, 1.0, -1e16, 3.0)),
    "by another name": lambda k: functools.partial(sum)([k, 1e16, 1.0, -1e16]),
    "by map": lambda k: [*map(sum, [[k, 1e16, 1.0, -1e16]])][0],
    "reduced": lambda k: functools.reduce(operator.add, [k, 1e16, 1.0, -1e16]),
    "products": lambda k: getattr(math, "sumprod", lambda p, q: sum(map(operator.mul, p, q)))([k, 1e16, 1.0, -1e16], [1.0, 3.0, k, 3.0]),
    "with whole ones": lambda k: sum([int(k > 1), k, 1e16, 1, -1e16]),
}


@pytest.mark.parametrize("exactly", [True, None])
@pytest.mark.parametrize("kind", [float, int])
@pytest.mark.parametrize("name", SUMS)
def test_sums_of_floats_are_those_of_python(device, monkeypatch, name, kind, exactly):
    """From Python 3.12 on sum() is exact to the last bit, but where one is no float to C."""
    monkeypatch.setattr(standins, "SUMS_EXACTLY", exactly or standins.SUMS_EXACTLY)
    f = agree(argument(lambda x, k: x * SUMS[name](k))(device), [kind(one) for one in (1, 2, 3, 1)] * 8, most=8, replays=16)
    left = any("adds floats with sum()" in reason for reason in cgt.stats(f).reasons)
    assert left == standins.SUMS_EXACTLY, cgt.explain(f)


@pytest.mark.parametrize("exactly", [True, None])
def test_sum_that_was_recorded_for_a_zero_is_one_of_three(device, monkeypatch, exactly):
    monkeypatch.setattr(standins, "SUMS_EXACTLY", exactly or standins.SUMS_EXACTLY)
    function = lambda x, k: x * sum([k, 1e16, 1.0])  # noqa: E731
    f, x = cgt.jit(function, dynamic="k"), torch.ones(3, dtype=torch.float64, device=device)
    for k in (*[0.0] * 4, 1.0, 0.0, 1.0, 3.0):
        assert torch.equal(f(x, k), function(x, k)), k
    assert any("adds floats with sum()" in reason for reason in cgt.stats(f).reasons) == standins.SUMS_EXACTLY


def test_sum_of_two_is_rounded_once(device, monkeypatch):
    """As GradScaler's, of the one GPU that there is."""
    monkeypatch.setattr(standins, "SUMS_EXACTLY", True)
    f = agree(argument(lambda x, k: x * sum(part for part in (k, 1.5)) * sum([k]))(device), RATES)
    assert not any("adds floats with sum()" in reason for reason in cgt.stats(f).reasons)


@pytest.mark.parametrize("exactly", [True, None])
def test_additions_of_the_code_are_followed(device, monkeypatch, exactly):
    monkeypatch.setattr(standins, "SUMS_EXACTLY", exactly or standins.SUMS_EXACTLY)

    def function(x, k):
        total = 0
        for part in (k, 1.5, k / 3):
            total += part
        return x * (1e16 + k + total + (lambda a: 1.0 + a)(k)) + sum([x, x], k)

    agree(argument(function)(device), RATES)


def test_tensor_of_a_number_imports_nothing_in_the_middle_of_a_call():
    # Code that imports run, a finder's of pytest's or beartype's, would count as the function's.
    code = """
        import sys, cgt, torch
        asked = []
        class Finder:
            def find_spec(self, name, *_): asked.append(name)
        sys.meta_path.insert(0, Finder())
        held, x = {}, torch.ones(3)
        f = cgt.jit(lambda x: x * torch.tensor(held["k"]).add_(1))
        for held["k"] in (2.0, 2.0, 2.0, 3.0, 4.0, 5.0):
            assert torch.equal(f(x), x * (held["k"] + 1))
        print(cgt.stats(f).replays, cgt.stats(f).eager, *(name for name in asked if name == "torch.utils._device"))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3 0\n"


@dataclasses.dataclass
class Progress:
    """State with a number, as a training loop hands on."""

    x: object
    n: float


HELD = {
    "dict": lambda x, n: {"x": x, "n": n}, "list": lambda x, n: [x, n], "dataclass": Progress, "inside": lambda x, n: {"a": [x, {"n": n}]},
    "numbers alone": lambda x, n: [n],
}  # fmt: skip


@pytest.mark.parametrize("hand_on", [lambda x, held: held, lambda x, held: (x * 2, [held]), lambda x, held: {"k": held}])
@pytest.mark.parametrize("make", HELD.values(), ids=HELD.keys())
def test_container_among_the_arguments_that_is_handed_out_has_todays_numbers(device, make, hand_on):
    f = cgt.jit(hand_on)
    for k in range(8):
        x = torch.full((3,), float(k), device=device)
        assert identical(f(x, make(x, k + 0.5)), hand_on(x, make(x, k + 0.5))), k
    for _ in range(3):
        assert identical(f(x, make(x, 9.5)), hand_on(x, make(x, 9.5)))
    assert cgt.stats(f).replays >= 2


def counts_in_a_dict(o, x, k):
    o.held["n"] += 1
    return x * 2, o.held


def stores_in_a_dict(o, x, k):
    o.held["n"] = k
    return [o.held, x * 2]


def reads_a_number(o, x, k):
    o.held["n"] = x.sum().item()
    return x * o.held["m"], o.held


def counts_in_a_dataclass(o, x, k):
    o.state.n += 1
    return o.state


def stores_in_a_dataclass(o, x, k):
    o.state.x = x * 2
    return {"state": o.state}


def hands_out_fields(o, x, k):
    o.state.n += k
    return x * 1, vars(o.state)


FROM_OUTSIDE = (
    counts_in_a_dict, stores_in_a_dict, reads_a_number, counts_in_a_dataclass, stores_in_a_dataclass, hands_out_fields,
)  # fmt: skip


@pytest.mark.parametrize("function", FROM_OUTSIDE)
def test_container_from_outside_that_is_handed_out_has_todays_numbers(device, function):
    def run(wrap):
        o, found = Box(held={"n": 1, "m": 2.0}, state=Progress(torch.zeros(3, device=device), 1.0)), []
        f = wrap(lambda x, k: function(o, x, k))
        for k in range(9):
            found.append(repr((f(torch.full((3,), float(k), device=device), k), o.held, o.state)))
            if k in (3, 6):
                o.held["m"], o.state.n = k * 1.5, k * 2.5
        return found

    assert run(cgt.jit) == run(lambda f: f)


def test_container_of_tensors_from_outside_that_is_handed_out_replays(device):
    held = {"a": torch.zeros(3, device=device), "b": [torch.ones(3, device=device)]}
    f = cgt.jit(lambda x: (held["a"].add_(x), held))
    for k in range(6):
        _, out = f(torch.full((3,), float(k), device=device))
        assert out["a"] is held["a"] and out["b"][0] is held["b"][0]
    assert cgt.stats(f).replays == 4
