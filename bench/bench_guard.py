"""What does it cost to know that a recording fits: the guard alone, nothing launched?

The function does nothing but look: it makes views, which cost no kernel and no op on the tape. So
its recording is empty, and every tensor is pinned (its address is guarded), as parameters are.
"""

import pytest
import torch
from cgt_core import time_guards

import cgt
from cgt.api import state_of


def looks_at(tensors):
    """A function of one input that touches it and these tensors, which it closes over."""

    def f(x):
        for t in tensors:
            t.view(-1)
        x.view(-1)

    return f


BOUNDS = {17: 0.4, 512: 6}  # µs


@pytest.mark.parametrize("n", [3, 17, 50, 512])
@pytest.mark.parametrize("where", ["closed over", "arguments"])
def test_guard_alone(device, compare, settled, figure, where, n):
    """One argument and n - 1 tensors closed over, or n arguments: metadata and address of each,
    ambient state, what the closure holds; in C, and as a call from Python that finds its recording
    and has nothing to launch."""
    x, *rest = tensors = [torch.rand(4, device=device) for _ in range(n)]
    if where == "closed over":
        f, args = cgt.jit(looks_at(rest)), (x,)
    else:
        f, args = cgt.jit(lambda *xs: looks_at(xs[1:])(xs[0])), tuple(tensors)
    settled(f, args)
    assert cgt.stats(f).graph_nodes == 0
    row = state_of(f).f
    us = compare(
        {"f": f, "args": args, "empty": lambda *args: None},
        calls=1000,
        rounds=100,
        call="f(*args)",
        guard=lambda calls: calls * time_guards(row, args, {}, calls),
        empty="empty(*args)",  # what Python takes for a call
    )
    bound = {"at_most": BOUNDS[n]} if n in BOUNDS else {"detail": True}
    figure(f"guard alone, {n} tensors, {where}", us["guard"], "µs", **bound)
    figure(f"call without a launch, {n} tensors, {where}", us["call"], "µs", detail=True)
