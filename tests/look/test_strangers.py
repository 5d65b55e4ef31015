"""Code and objects to which objects of C's alone lead: deques, sets, weak references, futures, classes that derive from these.
What they read of their module, and what lies in their attributes, is guarded all the same."""

import array
import collections
import concurrent.futures
import contextvars
import ctypes
import functools
import queue
import sys
import threading
import weakref

import pytest
import torch
from helpers import values
from torch import nn
from torch.nn import functional as F

import cgt

CALLS = 20
RATE, COUNT = 1.0, 0


def scaled(x):
    """Reads and counts what is its module's."""
    global COUNT
    COUNT += 1
    return x * RATE


def resolved():
    future = concurrent.futures.Future()
    future.set_result(scaled)
    return future.result


def queued():
    waiting = queue.Queue()
    return lambda: (waiting.put(scaled), waiting.get())[1]


def in_a_variable():
    variable = contextvars.ContextVar("scaled")
    variable.set(scaled)
    return variable.get


def of_a_thread():
    local = threading.local()
    local.scaled = scaled
    return lambda: local.scaled


def in_a_deque():
    row = collections.deque([scaled])
    return lambda: row[0]


def in_a_set():
    row = {scaled}
    return lambda: next(iter(row))


LEADS = {
    "deque": in_a_deque, "set": in_a_set, "weak": lambda: weakref.ref(scaled), "future": resolved, "queue": queued, "variable": in_a_variable,
    "thread": of_a_thread, "globals": lambda: lambda: globals()["sca" + "led"], "module": lambda: lambda: sys.modules[__name__].scaled,
    "name": lambda: lambda: getattr(sys.modules[__name__], "sca" + "led"), "eval": lambda: lambda: eval("scaled"),
}  # fmt: skip


@pytest.mark.parametrize("lead", LEADS.values(), ids=LEADS)
def test_globals_of_a_function_to_which_nothing_leads(device, lead, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "RATE", 1.0)
    monkeypatch.setattr(sys.modules[__name__], "COUNT", 0)
    found = lead()
    f = cgt.jit(lambda x: found()(x) + 1)
    for k in range(CALLS):
        if k == 12:
            monkeypatch.setattr(sys.modules[__name__], "RATE", 5.0)
        x = values(device, 4, seed=k)
        assert torch.equal(f(x), x * (1.0 if k < 12 else 5.0) + 1), k
    assert COUNT == CALLS
    if lead is not in_a_set:  # an iterator is made, which gives another value each time
        assert cgt.stats(f).replays >= CALLS - 6, cgt.explain(f)


class Listener:
    def __init__(self):
        self.calls, self.scale = 0, 1.0

    def __call__(self, x):
        self.calls += 1
        return x * self.scale


@pytest.mark.parametrize("kind", ["deque", "set", "weak"])
def test_objects_in_a_container_that_is_not_looked_into(device, kind):
    one = Listener()
    row = {"deque": collections.deque([one]), "set": {one}, "weak": weakref.ref(one)}[kind]
    f = cgt.jit((lambda x: row()(x) + 1) if kind == "weak" else lambda x: [each(x) for each in row][0] + 1)
    for k in range(CALLS):
        if k == 12:
            one.scale = 5.0
        x = values(device, 4, seed=k)
        assert torch.equal(f(x), x * (1.0 if k < 12 else 5.0) + 1), k
    assert one.calls == CALLS and (kind == "set" or cgt.stats(f).replays >= CALLS - 6), cgt.explain(f)


class InAStructure(ctypes.Structure):
    _fields_ = [("n", ctypes.c_int)]


BASES = {
    "deque": (collections.deque, ()), "set": (set, ()), "frozenset": (frozenset, ()), "bytearray": (bytearray, ()),
    "partial": (functools.partial, (abs,)), "weak": (weakref.ref, (Listener,)), "array": (array.array, ("d",)), "structure": (InAStructure, ()),
}  # fmt: skip


@pytest.mark.parametrize("base", BASES)
def test_attributes_of_a_class_that_derives_from_one_of_these(device, base):
    kind, given = BASES[base]

    class Window(kind):
        def apply(self, x):
            self.calls += 1
            return x * self.scale

    one = Window(*given)
    one.scale, one.calls = 1.0, 0
    f = cgt.jit(lambda x: one.apply(x) + 1)
    for k in range(CALLS):
        if k == 9:
            one.scale = 5.0
        if k == 14:
            Window.apply = lambda self, x: x * 0
        x = values(device, 4, seed=k)
        assert torch.equal(f(x), x * (1.0 if k < 9 else 5.0 if k < 14 else 0.0) + 1), k
    assert one.calls == 14 and cgt.stats(f).replays >= CALLS - 8, cgt.explain(f)


@pytest.mark.parametrize("hook", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_of_all_modules_where_the_function_names_functional(device, hook):
    """`F` leads to the functions in which modules look theirs up: the hooks are found all the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(device)

    def function(x):
        model.zero_grad()
        y = F.relu(model(x)).sum()
        y.backward()
        return y.detach(), model[0].weight.grad.clone()

    register = getattr(torch.nn.modules.module, f"register_module_{hook}_hook")
    changes = {
        "forward": lambda module, given, out: out * 1.25, "forward_pre": lambda module, given: (given[0] * 1.25,),
        "full_backward": lambda module, grads, outs: (grads[0] if grads[0] is None else grads[0] * 2,),
        "full_backward_pre": lambda module, grads: (grads[0] * 2,),
    }  # fmt: skip
    f, handle = cgt.jit(function), None
    try:
        for k in range(CALLS):
            if k == 12:
                handle = register(changes[hook])
            x = values(device, 3, 4, seed=k)
            got = [t.clone() for t in f(x)]
            assert all(map(torch.equal, got, function(x))), k
    finally:
        if handle is not None:
            handle.remove()
    assert cgt.stats(f).replays >= 8, cgt.explain(f)


def test_a_long_deque_is_not_looked_into_and_nothing_else_is_said(device):
    row = collections.deque([Listener()] * 5000)
    f = cgt.jit(lambda x: x * len(row))
    assert all(torch.equal(f(torch.ones(2, device=device)), torch.full((2,), 5000.0, device=device)) for _ in range(6))
    told = cgt.explain(f)
    assert "row is a deque: guarded by identity, not by its contents" in told and "identity and length" not in told
