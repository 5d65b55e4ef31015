"""Recordings that are told where their inputs lie: the first replay with one of them elsewhere is compared with eager."""

import functools
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import cgt_core as core
import numpy
import pytest
import torch
from cgt_core import COPIED, REBOUND
from helpers import not_audited, tells, values

import cgt
from cgt.api import state_of
from cgt.decide import audit
from cgt.words import options

counted = not_audited("what is compared is counted")


@pytest.fixture(autouse=True)
def nothing_is_proven(monkeypatch):
    monkeypatch.setattr(audit, "PROVEN", set())
    monkeypatch.setattr(options, "VERIFY", None)


def bindings(f):
    return {slot.binding for node in core.fn_nodes(state_of(f).f) for slot in core.node_facts(node).slots if slot.leaf == 0}


def moving(device, n, seed=0):
    """Tensors that lie elsewhere each, and stay alive."""
    return [values(device, 6, 8, seed=seed + k) for k in range(n)]


def run(f, plain, xs):
    """Both give the same, in what they return and in their argument; what was warned of."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for x in xs:
            theirs = x.clone()
            want = plain(theirs)
            assert torch.equal(f(x), want) and torch.equal(x, theirs), cgt.explain(f)
    return [str(one.message) for one in told]


def gram(x):
    return x.t() @ x + x.sum()


@counted
def test_first_replay_at_another_address_is_compared_and_its_kernels_are_known_then(device):
    f, g = cgt.jit(gram), cgt.jit(lambda x: gram(x))
    assert run(f, gram, moving(device, 1) * 5) == [] and state_of(f).audited == 0  # it does not move
    assert run(f, gram, moving(device, 8)) == []
    s = cgt.stats(f)
    assert state_of(f).audited == 1 and bindings(f) == {REBOUND}, cgt.explain(f)
    assert s.eager == 0 and s.calls == 13 == s.warmups + s.records + s.replays and "compared with eager: 1 replays, all alike" in cgt.explain(f)
    assert audit.PROVEN and run(g, gram, moving(device, 8)) == []
    assert state_of(g).audited == 0 and cgt.stats(g).replays == 6 and bindings(g) == {REBOUND}


@counted
@pytest.mark.parametrize("switch", [True, False])
def test_every_recording_is_compared_or_none_is(device, switch, monkeypatch):
    monkeypatch.setattr(options, "VERIFY", switch)
    for _ in range(2):
        f = cgt.jit(gram)
        assert run(f, gram, moving(device, 6)) == []
        assert state_of(f).audited == switch and cgt.stats(f).replays == 4, cgt.explain(f)


@counted
@pytest.mark.parametrize("switch", [True, None])
def test_what_changes_more_than_its_results_is_only_compared_where_it_is_asked_for(device, switch, monkeypatch):
    """State is put back for eager, and another thread could change it meanwhile."""
    monkeypatch.setattr(options, "VERIFY", switch)
    states = [torch.zeros(8, device=device) for _ in range(2)]

    def step(state):
        def function(x):
            state.add_(x.sum(0))
            x.mul_(2)
            return x + state

        return function

    f = cgt.jit(step(states[0]))
    assert run(f, step(states[1]), moving(device, 8)) == []
    assert torch.equal(*states) and state_of(f).audited == (switch is True) and bindings(f) == {REBOUND}, cgt.explain(f)


@counted
def test_random_numbers_are_drawn_once(device):
    f, kept = cgt.jit(lambda x: x * 2 + torch.rand(8, device=device)), moving(device, 8)
    torch.manual_seed(3)
    got = [f(x).clone() for x in kept]
    torch.manual_seed(3)
    assert all(torch.equal(y, x * 2 + torch.rand(8, device=device)) for x, y in zip(kept, got, strict=True))


@counted
def test_forward_whose_backward_is_another_recording(device):
    f, weight = cgt.jit(lambda x, w: (x @ w).tanh()), values(device, 8, 4, seed=9).requires_grad_()
    for x in moving(device, 8):
        (mine,) = torch.autograd.grad(f(x, weight).square().sum(), weight)
        (theirs,) = torch.autograd.grad((x @ weight).tanh().square().sum(), weight)
        assert torch.equal(mine, theirs)
    assert cgt.stats(f).replays >= 5 and cgt.stats(f).eager == 0, cgt.explain(f)


def stale(device, monkeypatch):
    """An array in a closure is guarded by identity."""
    scale = numpy.ones(1)

    def function(x):
        return x * float(scale[0]) + x.sum()

    def before(k):
        scale[0] = 1.0 + (k >= 2)

    return function, before


def wrong_address(device, monkeypatch):
    if device.type == "cpu":
        pytest.skip("on the host the tape's storage is pointed at today's memory: nothing is told an address")
    tell = core.address_words
    monkeypatch.setattr(core, "address_words", lambda handle, words: tell(handle, [(offset, copy, shift + 4) for offset, copy, shift in words]))
    return gram, lambda k: None


@counted
@tells("verified")
@pytest.mark.parametrize("fault", [stale, wrong_address])
def test_what_is_wrong_is_found_by_the_first_such_replay_and_copied_from_then_on(device, fault, monkeypatch):
    function, before = fault(device, monkeypatch)
    f, said = cgt.jit(function), []
    for k, x in enumerate(moving(device, 8)):
        before(k)
        if k == 1 and fault is wrong_address:  # the call that records runs at the addresses of its own, told as wrongly
            f(x)
            continue
        said += run(f, function, [x])
    assert len(said) == 1 and "CGT226" in said[0] and "args[0]" in said[0] and "aten.sum.default" in said[0] and "Eager's values stand" in said[0], said
    assert bindings(f) == {COPIED} and state_of(f).mismatches == 1 and cgt.stats(f).replays >= 4, cgt.explain(f)
    assert said[0] in cgt.stats(f).reasons and "made at" in said[0]


@counted
def test_recording_that_does_not_repeat_itself_proves_nothing(device, monkeypatch):
    """As a sum does not whose order nobody keeps; here it reads a clock, and is said not to."""
    read = functools.partial(time.perf_counter)
    monkeypatch.setattr(audit, "repeats", lambda *run: False)
    f = cgt.jit(lambda x: x.double() * read())
    for x in moving(device, 6):
        f(x)
    state = state_of(f)
    assert (state.audited, state.mismatches, cgt.stats(f).replays) == (1, 0, 4) and bindings(f) == {REBOUND}, cgt.explain(f)
    assert not audit.PROVEN


@counted
def test_exception_in_the_eager_run_is_the_callers(device):
    """The replay could not know."""
    switch = numpy.zeros(1)

    def function(x):
        if switch[0]:
            raise ValueError("not today")
        return x + x.sum()

    f, xs = cgt.jit(function), moving(device, 6)
    run(f, function, xs[:2])
    switch[0] = 1
    with pytest.warns(cgt.CgtWarning, match="eager raises ValueError"), pytest.raises(ValueError, match="not today"):
        f(xs[2])
    switch[0] = 0
    run(f, function, xs[3:])
    assert bindings(f) <= {COPIED}


@counted
def test_many_threads_at_the_first_such_replay(device):
    """One compares, the others wait or replay; each gets its own result."""
    f = cgt.jit(gram)
    run(f, gram, moving(device, 2))
    with ThreadPoolExecutor(4) as pool:
        xs = moving(device, 32, seed=40)
        for x, y in zip(xs, pool.map(lambda x: f(x).clone(), xs), strict=True):
            assert torch.equal(y, gram(x))
    assert state_of(f).audited == 1
