"""Do no harm: what do calls cost that run eagerly, and programs whose recordings are never replayed?"""

import gc
from itertools import count
from time import perf_counter

import pytest
import torch
from conftest import wait
from torch import nn

import cgt
from cgt.words import options

CALLS = 200
ROUNDS = 5


class Thing:
    scale = 1.0


def layers(device):
    return nn.Sequential(*[nn.Linear(256, 256, device=device) for _ in range(8)])


def growing_shapes(device):
    net = layers(device)
    return net, lambda k: (torch.rand(k % CALLS + 1, 256, device=device),)


def changing_numbers(device):
    net, x, seen = layers(device), torch.rand(4, 256, device=device), count()
    return lambda x, k: net(x) * k, lambda k: (x, float(next(seen)))


def fresh_objects(device):
    net, x = layers(device), torch.rand(4, 256, device=device)
    return lambda x, o: net(x) * o.scale, lambda k: (x, Thing())


def branch_on_a_value(device):
    net, x = layers(device), torch.rand(4, 256, device=device)

    def f(x):
        y = net(x)
        return y if y.sum() > 0 else -y

    return f, lambda k: (x,)


def tiny(device):
    x = torch.rand(256, device=device)
    return lambda x: x * 2, lambda k: (x,)


PROGRAMS = (growing_shapes, changing_numbers, fresh_objects, branch_on_a_value, tiny)


@pytest.fixture(autouse=True)
def must_pay(monkeypatch):
    """As users have it."""
    monkeypatch.setattr(options, "OVERHEAD", 0.05)
    monkeypatch.setattr(options, "ALLOWANCE", 0.0)


def seconds_of(f, arguments):
    """Of 200 calls, their arguments made before."""
    made = [arguments(k) for k in range(CALLS)]
    wait()
    began = perf_counter()
    for args in made:
        f(*args)
    seconds = perf_counter() - began
    wait()
    return seconds


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_two_hundred_calls(device, benchmark, figure, program):
    """From the first call on, warming and recording included, over eager's."""
    plain, arguments = program(device)
    with torch.no_grad():
        seconds_of(plain, arguments)
        times = {"eager": [], "cgt": []}

        def once():
            gc.collect()
            times["eager"].append(seconds_of(plain, arguments))
            f = cgt.jit(plain)
            times["cgt"].append(seconds_of(f, arguments))
            cgt.reset(f)

        benchmark.pedantic(once, rounds=ROUNDS)
    us = {k: 1e6 * min(v) / CALLS for k, v in times.items()}
    name = program.__name__.replace("_", " ")
    figure(f"200 calls, {name}: over eager", us["cgt"] / us["eager"], "×", at_most=1.05)
    figure(f"200 calls, {name}: eager", us["eager"], "µs", detail=True)


def test_call_that_is_known_to_run_eagerly(device, compare, figure):
    def plain(x):
        return x if float(f"{x.sum().item():.3f}") > 0 else -x

    x, f = torch.ones(1, device=device), cgt.jit(plain)
    for _ in range(300):
        f(x)
    us = compare({"f": f, "plain": plain, "x": x}, cgt="f(x)", eager="plain(x)")
    s = cgt.stats(f)
    assert s.warmups + s.eager == s.calls
    figure("call that is known to run eagerly, over eager", us["cgt"] - us["eager"], "+ µs", at_most=3)
