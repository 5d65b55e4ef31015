"""Graphs of autograd's that recordings leave behind: deep ones, and those whose recording is freed meanwhile."""

import threading

import cgt_core as core
import pytest
import torch
from helpers import calls
from torch.utils.flop_counter import FlopCounterMode

import cgt
from cgt.decide import backwards, dispatch, freeing, sites
from cgt.words import errors


def test_graph_of_fifty_thousand_ops(device):
    ops = 20_000 if core.debug_build() else 50_000
    w = torch.ones(2, device=device, requires_grad=True)

    @cgt.jit
    def f(x):
        for _ in range(ops):
            x = x + w
        return x

    x = torch.zeros(2, device=device)
    for k in range(3):
        y = f(x)
        assert torch.equal(y, torch.full_like(y, ops))
        if k != 1:  # the recorded call's graph is dropped, the replayed one's runs
            y.sum().backward()
            assert torch.equal(w.grad, y)
            w.grad = None
        del y
    s = cgt.stats(f)
    assert s.replays == s.backward.records == 1, s.reasons


def test_reset_while_a_recorded_graph_is_tried(device):
    resets = {len}  # sets are not looked into

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            (reset,) = resets
            reset(())
            return grad * 2

    f = cgt.jit(lambda x: Double.apply(x).sum())
    x = torch.ones(3, device=device, requires_grad=True)
    f(x)
    loss = f(x)
    resets.clear()
    resets.add(lambda _: cgt.reset())  # as another thread may: nothing is being recorded
    with FlopCounterMode(display=False):
        loss.backward()
    assert torch.equal(x.grad, torch.full_like(x, 2)) and cgt.stats(f).backward.eager == 1


def test_reset_before_a_backward_that_cannot_be_replayed(device):
    f = cgt.jit(lambda x: (x * x).sum())
    x = torch.ones(3, device=device, requires_grad=True)
    calls(f, 2, x)
    loss = f(x)
    cgt.reset()
    with pytest.raises(cgt.CgtError, match="create_graph"):
        loss.backward(create_graph=True)
    (x * 1).sum().backward()  # autograd's thread lets go of the error before it begins anything else
    assert cgt.stats(f).replays == 1


def in_another_thread(action):
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


def test_gradients_refused_while_another_thread_records_free_nothing_before_it_is_done(device):
    f = cgt.jit(lambda x: (x * x).sum())
    x = torch.ones(3, device=device, requires_grad=True)
    calls(f, 2, x)
    state = getattr(f, sites.ATTRIBUTE)
    (kept,) = [kept for kept in state.keep.values() if kept.graph is not None]
    with sites.RECORDING:
        in_another_thread(lambda: backwards.refuse_gradients(kept.graph, "why"))
        assert len(core.fn_nodes(state.f)) == 1 and state.learnt.refused == ["why"]
    freeing.sweep()
    assert core.fn_nodes(state.f) == []
    assert torch.equal(f(x), (x * x).sum()) and "why" in cgt.stats(f).reasons


def test_recording_that_another_thread_overtakes_before_it_begins(device, monkeypatch):
    f, other, x = cgt.jit(lambda x: x * 2), cgt.jit(lambda x: x + 1), torch.ones(3, device=device)
    for _ in range(3):
        other(x)
    f(x)
    find_spent = dispatch.autograd.find_spent

    def overtaken(*planned):
        in_another_thread(lambda: other(x))
        return find_spent(*planned)

    with monkeypatch.context() as patch:
        patch.setattr(dispatch.autograd, "find_spent", overtaken)
        assert torch.equal(f(x), x * 2)
    assert cgt.stats(f).records == 0 and list(cgt.stats(f).reasons) == [errors.lost()]
    for _ in range(3):
        assert torch.equal(f(x), x * 2)
    assert cgt.stats(f).replays >= 1
