"""Numbers that are others at each call, where a call returns them or asks a dict for them: one recording serves all."""

import collections
import copy
from typing import NamedTuple

import pytest
import torch
from helpers import identical, values
from test_live import CALLS, Box, agree

import cgt


def keeps_its_rate(device):
    """A step that returns the rate that it stored, in ways in which people log it."""
    box = Box(lr=0.1, n=0)

    def step(x, way):
        box.n += 1
        before, box.lr = box.lr, box.lr * 0.9 + 0.01
        if way == "pair":
            return x * box.lr, box.lr
        if way == "dict":
            return {"loss": x * before, "lr": box.lr, "before": [before, (box.n, box.n / 2)]}
        if way == "alone":
            return box.n
        if way == "twice":
            return box.lr, box.lr, -box.lr, x
        return x, Pair(box.n, box.lr > 0.05)

    return step, box


class Pair(NamedTuple):
    n: int
    large: bool


@pytest.mark.parametrize("way", ["pair", "dict", "alone", "twice", "named"])
def test_numbers_that_a_call_returns_are_those_of_the_call(device, way):
    agree(lambda: ((made := keeps_its_rate(device))[0], lambda x: (x, way), lambda: [made[1].lr, made[1].n]), [values(device, 8)] * CALLS)


def test_numbers_in_results_of_other_kinds_are_plain_ones(device):
    box = Box(n=0)

    def step(x, kind):
        box.n += 1
        return x * box.n, kind(n=box.n)

    for kind in (Box, collections.OrderedDict, dict):
        f = cgt.jit(step)
        for _ in range(6):
            y, made = f(values(device, 8), kind)
            found = made["n"] if isinstance(made, dict) else made.n
            assert type(found) is int and found == box.n and torch.equal(y, values(device, 8) * box.n)


def test_numbers_that_were_returned_are_nobody_s_afterwards(device):
    """A list of them that the call keeps, too, is one list: as in eager."""
    box, kept = Box(n=0, last=None), []

    def step(x, keeps):
        box.n += 1
        made = [box.n, box.n / 2]
        if keeps:
            box.last = made
        return x * box.n, made

    f = cgt.jit(step)
    for k in range(1, CALLS):
        y, made = f(values(device, 8), k % 5 == 4)
        assert torch.equal(y, values(device, 8) * k) and made == [k, k / 2]
        assert box.last is (made if k % 5 == 4 else kept[-1][-1] if kept else None)
        kept.append((made, list(made), box.last))
    assert all(one == then for one, then, _ in kept) and len({id(one) for one, *_ in kept}) == CALLS - 1
    assert cgt.stats(f).replays >= 15, cgt.explain(f)


ASKED = {  # what is asked for the number of the call; with at least so many replays of 40
    "in": ("x * (2 if box.n in box.counted else 1)", 30),
    "not in": ("x * (2 if box.n not in box.keys else box.keys[box.n])", 30),
    "missing": ("x * box.counted[box.n]", 30),
    "raises": ("x * asked_of(box)", 30),
    "whole": ("x * (box.keys == {3: 1, 9: 2, 20: 5}) + (box.n in box.keys) + max(box.keys)", 30),
    "returned": ("(x * (box.n in box.keys), box.keys)", 30),
    "get": ("x * box.keys.get(box.n, 7)", 0),
    "copied": ("x * copy.deepcopy(box.counted)[box.n]", 0),
    "half": ("x * ((box.n / 2) in box.keys)", 0),
    "entry": ("x * box.keys.setdefault(box.n, 4)", 0),
    "popped": ("x * (box.keys.pop(box.n) if box.n in box.keys else 1)", 0),
    "written": ("x * (box.keys.update({box.n: 1}) or len(box.keys))", 0),
}


def asked_of(box):
    try:
        return box.keys[box.n]
    except KeyError:
        return -1


@pytest.mark.parametrize("between", [False, True], ids=["alone", "written between"])
@pytest.mark.parametrize("name", ASKED)
def test_dicts_that_are_asked_for_a_number(device, name, between):
    text, replays = ASKED[name]

    def build():
        box = Box(n=0, counted=collections.Counter([3, 9, 9, 15]), keys={3: 1, 9: 2, 20: 5})
        scope = {"box": box, "asked_of": asked_of, "copy": copy}
        exec(f"def step(x):\n    box.n += 1\n    return {text}", scope)
        return box, scope["step"]

    (box, plain), (left, jitted) = build(), build()
    f = cgt.jit(jitted)
    for k in range(40):
        x = values(device, 8, seed=k)
        assert identical(f(x), plain(x)), k
        assert vars(left) == vars(box) and list(map(type, vars(left).values())) == list(map(type, vars(box).values()))
        for one in (box, left) if between else ():
            if k == 10:
                one.counted[13] = one.keys[17] = 1
            if k == 22:
                one.keys.pop(20, None)
                one.counted = collections.Counter([30])
    assert cgt.stats(f).replays >= replays - 8 * between, cgt.explain(f)


@pytest.mark.parametrize("how", ["a + b", "a - b", "b - a", "a * b", "a // b", "a % b", "-a", "abs(a)", "int(a)", "a ** (b % 5 - 2)"])
def test_whole_numbers_stay_whole_where_floats_are_not_exact(device, how):
    """Around 2 ** 53 a sum of floats is rounded; and a power of whole numbers is a whole number or a float, as its sign says."""
    function = eval(f"lambda x, a, b: (x, {how})")
    f, x = cgt.jit(function), values(device, 4)
    pairs = [(k + 2, k) for k in range(1, 9)] + [
        (sign * 2**53 + near, other) for sign in (1, -1) for near in (-1, 0, 1) for other in (1, -1, 3, 2**53)
    ]  # fmt: skip
    for a, b in pairs:
        (_, got), (_, want) = f(x, a, b), function(x, a, b)
        assert type(got) is type(want) and got == want, (a, b)
    assert cgt.stats(f).replays > 0


def test_what_outlives_the_call_in_a_deque_is_told_by_where_it_comes_from(device):
    kept, rates = collections.deque(maxlen=2), [0.5 + k for k in range(8)]

    def function(x, a):
        kept.append(x.sum().item())
        return x * a

    f = cgt.jit(function)
    for k, a in enumerate(rates):
        f(values(device, 8, seed=k), a)
    assert list(kept) == [values(device, 8, seed=k).sum().item() for k in range(len(rates))][-2:]
    assert any("computed from a number that is read on the way outlives" in reason for reason in cgt.stats(f).reasons), cgt.explain(f)
