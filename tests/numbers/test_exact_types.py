"""Code that tells a number's type, met or run: it keeps numbers from being live where it ran, and is told of numbers."""

import pytest
import torch
from helpers import values
from test_live import CALLS, Box, agree

import cgt


def is_float(number):
    return type(number) is float


def of_type(numbers):
    """Does code that is met, and runs only if a flag says so, see plain numbers?"""
    return numbers if all(map(is_float, numbers)) else "a stand-in"


@pytest.mark.parametrize("begins", [1, 2, 3, 4, 7, CALLS + 1])
def test_code_that_asks_for_a_type_and_has_not_run_keeps_no_number_from_being_live(device, begins):
    """Whenever it runs for the first time, it is told of numbers: behind writes, beside a number that was read, too."""

    def make():
        box = Box(rate=0.5, calls=0, told=None, memory=values(device, 8))

        def function(x):
            box.memory.add_(x)
            box.calls += 1
            rate, mean = box.rate, x.mean().item()
            box.rate = rate * 0.75
            if box.calls == begins + 4:
                box.told = of_type([rate, mean])
            box.memory.mul_(rate)
            return x * mean + rate

        return function, lambda k: (values(device, 8, seed=k),), lambda: [box.rate, box.calls, box.told, box.memory.sum().item()]

    agree(make, range(begins + 3), most=4, replays=max(0, begins - 4))
    agree(make, range(CALLS), most=8, replays=CALLS - 6 if begins > CALLS else 0)


def test_custom_op_before_code_that_asks_for_a_type(device):
    """No run of the host's is left behind one: where such code was met, numbers are plain from the start."""
    with torch.library._scoped_library("cgt_acts", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        box = Box(rate=0.5, calls=0, told=None)

        def function(x):
            y = torch.ops.cgt_acts.twice(x) * box.rate
            box.calls, box.rate = box.calls + 1, box.rate * 0.75
            if box.calls in (3, 4, 5):
                box.told = is_float(box.rate)
            return y

        f = cgt.jit(function)
        for k in range(12):
            x = values(device, 8, seed=k)
            assert torch.equal(f(x), x * 2 * 0.75**k / 2), cgt.explain(f)
        assert box.told is True


@pytest.mark.parametrize(
    ("use", "sentence"),
    [
        (lambda x, k: x * k if type(k) is int else x, "CGT114: the function asks for an exact type"),
        (lambda x, k: x**k, "CGT110: box.k is used for more than arithmetic and operations"),
        (lambda x, k: sum((x for _ in range(k)), x), "CGT110: box.k is used for more than arithmetic and operations"),
    ],
    ids=["type", "power", "range"],
)  # fmt: skip
def test_number_that_the_call_changes_and_that_cannot_be_live_is_told_with_the_line_that_is_why(device, use, sentence):
    box = Box(k=0)

    def function(x):
        box.k += 1
        return use(x, box.k)

    f = cgt.jit(function)
    for _ in range(16):
        f(values(device, 8))
    told = [reason for reason in cgt.stats(f).reasons if reason.startswith(sentence)]
    assert told and f"{__file__}:{use.__code__.co_firstlineno}" in told[0] and "box.k" in told[0], cgt.explain(f)
