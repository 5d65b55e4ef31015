"""Replays that are compared with eager: nothing is noticed where they agree, and each of ten planted faults is found, with
eager's values for the call that found it and for all after."""

import array
import collections
import contextvars
import functools
import gc
import queue
import random
import threading
import time
import warnings
import weakref

import cgt_core as core
import numpy
import pytest
import torch
from helpers import AUDITS_BY_DEFAULT, identical, in_threads, plain, tells, values
from torch import nn

import cgt
from cgt.api import state_of
from cgt.data import remember
from cgt.decide import audit
from cgt.look import containers, impure
from cgt.make import describe, islands
from cgt.numbers import live
from cgt.run import blank
from cgt.run.observe import unseen
from cgt.words import options

CALLS = 24
EVERY = "every:1"


# --- where all is well ----------------------------------------------------------------------------


@pytest.mark.parametrize("audit", [AUDITS_BY_DEFAULT, EVERY])
def test_one_way_replaces_a_tensor_and_another_writes_it(device, audit):
    """What each of the two recordings follows is what lies there now, not what lay there when it ran last."""

    class Environment:
        def __init__(self):
            self.x = torch.zeros(2, device=device)

        def step(self, force):
            if self.x.abs().max() > 2:
                self.x = torch.zeros(2, device=device)
            self.x += force
            return self.x.sum()

    mine, theirs = Environment(), Environment()
    f = cgt.jit(mine.step, audit=audit)
    for k in range(3 * CALLS):
        force = values(device, 2, seed=k)
        assert torch.equal(f(force), theirs.step(force)) and torch.equal(mine.x, theirs.x), k
    told = cgt.stats(f)
    assert told.replays >= 2 * CALLS and told.audited >= 6 and state_of(f).mismatches == 0, cgt.explain(f)


class Model:
    """All that a call may change."""

    def __init__(self, device, each=None):
        torch.manual_seed(3)
        random.seed(3)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, 4)).to(device)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), foreach=each)
        self.losses, self.calls, self.state = [], 0, torch.zeros(4, device=device)

    def step(self, x):
        self.optimizer.zero_grad()
        y = self.net(x)
        loss = y.square().mean()
        loss.backward()
        self.optimizer.step()
        self.calls += 1
        self.losses.append(loss.detach())
        self.state.mul_(0.9).add_(y.detach().mean(0))
        return {"loss": loss.detach(), "first": y[0].detach(), "number": loss.item()}

    def __getstate__(self):
        tensors = [*self.net.state_dict().values(), *self.losses, self.state]
        steps = [(s["step"].item(), s["step"]._version) for s in self.optimizer.state.values()]
        return [t.tolist() for t in tensors], [p.grad.tolist() for p in self.net.parameters()], steps, self.calls


def first_of_a_set(t):
    known = {t}
    return lambda: next(iter(known))


def first_of_a_deque(t):
    known = collections.deque([t])
    return lambda: known[0]


def view_of_it(t):
    return first_of_a_set(t[1:].t())


HIDDEN = {"set": first_of_a_set, "deque": first_of_a_deque, "weak reference": weakref.ref, "view": view_of_it}
AROUND = {
    "alone": lambda x: x + 1,
    "then decides": lambda x: x + 1 if x.sum() > 0 else x - 1,
    "then computes": lambda x: x * (x.sum().item() % 5),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_what_is_written_to_tensors_that_cannot_be_followed_is_written_once(device, hidden, around):
    """Neither argument nor place leads there: the memory itself is put back before eager runs."""
    there, want = values(device, 4, 3), values(device, 4, 3)
    ours, theirs = HIDDEN[hidden](there), HIDDEN[hidden](want)

    def call(reach, x):
        reach()[:1].add_(x.sum()).mul_(0.5)
        return AROUND[around](x)

    f = cgt.jit(functools.partial(call, ours), audit="first:2,doubling:1")
    for k in range(CALLS):
        x = values(device, 3, seed=k)
        assert torch.equal(f(x), call(theirs, x)) and torch.equal(there, want), k
    assert cgt.stats(f).replays > CALLS // 2 and cgt.stats(f).audited >= 3, cgt.explain(f)


def count_in(home):
    """One more, in whatever it is."""
    if isinstance(home, contextvars.ContextVar):
        home.set(home.get(0) + 1)
    elif isinstance(home, threading.local):
        home.count = getattr(home, "count", 0) + 1
    else:
        home[0] = home[0] + 1


def told_by(home):
    if isinstance(home, contextvars.ContextVar):
        return home.get(0)
    return getattr(home, "count", 0) if isinstance(home, threading.local) else numpy.asarray(home[0]).astype("int64")


BESIDE = {
    "NumPy's array": lambda: numpy.zeros(3), "a view of one": lambda: numpy.zeros((4, 3), dtype=numpy.int32)[:, 1],
    "bytearray": lambda: bytearray(3), "array": lambda: array.array("d", [0, 0]), "thread's": threading.local,
    "context's": lambda: contextvars.ContextVar("count"), "dates": lambda: numpy.zeros(2, dtype="timedelta64[s]"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BESIDE)
def test_what_changes_beside_tensors_is_told_by_the_first_audit(device, kind):
    """No guard compares these, and no replay changes them."""
    home = BESIDE[kind]()

    def call(x):
        count_in(home)
        return x * 2

    f = cgt.jit(call, audit=AUDITS_BY_DEFAULT)
    with pytest.warns(cgt.CgtWarning, match=f"CGT225.*a {type(home).__name__} holds something else"):
        for k in range(CALLS):
            x = values(device, seed=k)
            assert torch.equal(f(x), x * 2) and int(told_by(home)) == k + 1
    assert cgt.stats(f).audited == 1, cgt.explain(f)


def test_arrays_that_cannot_be_written_or_had_no_value_are_left(device):
    """What is put back: not through a view that may not write, and a variable without a value keeps what it got."""
    base, var, local = numpy.zeros(2), contextvars.ContextVar("var"), threading.local()
    view = base.view()
    view.flags.writeable = False
    held = [(home, containers.entries(home)) for home in containers.unguarded([view, var, local, 3, [1]])]
    base[0], local.n = 1, 2
    var.set(5)
    containers.restore(held)
    assert base[0] == 1 and var.get() == 5 and not vars(local)


def test_arrays_are_looked_into_as_far_as_all_are_small_together(device):
    arrays = [numpy.zeros(1 << 15) for _ in range(6)]  # of 256 KiB
    assert len(containers.unguarded([*arrays, bytearray(3)])) == 4


@pytest.mark.parametrize("home", [numpy.zeros(1 << 18), numpy.array([None, 1], dtype=object)], ids=["large", "objects"])
def test_arrays_that_are_large_or_hold_objects_are_not_compared(device, home):
    f = cgt.jit(lambda x: x * 2 if home is not None else x, audit=EVERY)
    for k in range(6):
        home[1:] = k
        assert torch.equal(f(values(device)), values(device) * 2)
    assert cgt.stats(f).audited >= 3, cgt.explain(f)


def test_a_fault_in_what_is_written_there_is_found(device):
    """The replay misses what the function adds later, for a reason that nobody sees."""
    there, more = values(device, 4, 3), collections.deque()
    reach = first_of_a_set(there)

    def call(x):
        reach().add_(x)
        if more:
            reach().add_(x)
        return x + 1

    f, xs = cgt.jit(call, audit=EVERY), [values(device, 3, seed=k) for k in range(10)]
    for x in xs:
        f(x)
    assert cgt.stats(f).audited, cgt.explain(f)
    more.append(1)
    want = there + 2 * xs[9]
    with pytest.warns(cgt.CgtWarning, match="a tensor that cgt cannot follow, which is written, differs in 12 of 12"):
        f(xs[9])
    assert torch.allclose(there, want)


@pytest.mark.parametrize("schedule", ["every:1", "first:2", "first:1,every:3"])
def test_a_training_step_that_is_compared_is_eagers(device, schedule):
    ours, theirs = Model(device), Model(device)
    f = cgt.jit(ours.step, audit=schedule)
    for k in range(CALLS):
        x = values(device, 5, 8, seed=k)
        torch.manual_seed(k)
        want = theirs.step(x)
        torch.manual_seed(k)
        got = f(x)
        assert all(identical(got[name], want[name]) for name in ("loss", "first")) and got["number"] == want["number"]
        assert ours.__getstate__() == theirs.__getstate__(), cgt.explain(f)
        versions = [[p._version for p in model.net.parameters()] for model in (ours, theirs)]
        assert versions[0] == versions[1]
    state, replays = state_of(f), cgt.stats(f).replays
    assert replays >= CALLS - 4 and state.mismatches == 0, cgt.explain(f)
    expected = {"every:1": replays, "first:2": 2}.get(schedule, 1 + (replays - 1) // 3)
    assert abs(state.audited - expected) <= (schedule != "first:2"), (state.audited, replays)
    assert f"compared with eager: {state.audited} replays, all alike" in cgt.explain(f)


def test_forward_of_a_model_that_is_trained_outside(device):
    torch.manual_seed(1)
    net = nn.Linear(8, 4).to(device)
    f = cgt.jit(net, audit=EVERY)
    for k in range(8):
        x = values(device, 5, 8, seed=k)
        f(x).sum().backward()
        net.zero_grad(set_to_none=False)
    assert cgt.stats(f).replays >= 5 and state_of(f).audited >= 5 and state_of(f).mismatches == 0


def test_a_method_and_a_module_that_is_an_argument(device):
    """Objects that are compared by identity are held weakly."""
    model, inputs = Model(device), values(device, 5, 8)
    model.net.eval()
    functions = cgt.jit(lambda model, x: model.net(x), audit=EVERY), cgt.jit(lambda net, x: net(x), audit=EVERY)
    for f, owner in zip(functions, (model, model.net), strict=True):
        for _ in range(8):
            assert identical(f(owner, inputs), model.net(inputs))
        assert cgt.stats(f).replays >= 5 and state_of(f).audited >= 5 and not state_of(f).mismatches, cgt.explain(f)


def test_two_functions_of_a_path_and_one_inside_another(device):
    inner = cgt.jit(lambda x: x.sin(), audit=EVERY)
    outer = cgt.jit(lambda x: inner(x) + 1, audit=EVERY)
    last, x = cgt.jit(lambda y: y * 2, audit=EVERY), values(device)
    for _ in range(CALLS):
        cgt.step()
        assert identical(last(outer(x)), (x.sin() + 1) * 2)
    for f in (outer, last):
        assert cgt.stats(f).replays >= CALLS - 4 and state_of(f).audited and not state_of(f).mismatches, cgt.explain(f)


def test_eager_parts_run_once(device):
    seen = []

    @cgt.eager
    def look(y):
        seen.append(random.random())
        return y + seen[-1]

    f, x = cgt.jit(lambda x: look(x * 2) + 1, audit=EVERY), values(device)
    for k in range(8):
        got = f(x)
        assert identical(got, x * 2 + seen[-1] + 1) and len(seen) == k + 1
    assert state_of(f).audited >= 4 and not state_of(f).mismatches, cgt.explain(f)


def test_a_part_that_writes_what_was_read_before_is_not_compared(device):
    """It does not run again, and what it wrote to is eager's input."""
    calls, state = [], torch.zeros(3, device=device)

    @cgt.eager
    def part(y):
        calls.append(1)
        if len(calls) % 4 == 0:
            state.add_(1)

    def function(x):
        y = x * 2 + state
        part(y)
        return y

    f, x = cgt.jit(function, audit=EVERY), values(device, 3)
    for k in range(12):
        assert identical(f(x), x * 2 + k // 4)
    assert state.tolist() == [3.0] * 3 and len(calls) == 12
    assert cgt.stats(f).replays >= 8 and state_of(f).audited >= 5 and not state_of(f).mismatches, cgt.explain(f)


def test_what_exchanges_data_is_not_run_twice(device):
    """Other processes would wait for the second time. (Here nobody does: it is said of the function that it exchanges.)"""
    f, x = cgt.jit(lambda x: x * 2, audit="every:1"), values(device)
    for _ in range(4):
        f(x)
    assert state_of(f).audited
    remember(state_of(f), exchanges=True)
    audited, replays = state_of(f).audited, cgt.stats(f).replays
    for k in range(6):
        assert identical(f(x.fill_(k)), x * 2)
    assert state_of(f).audited == audited and cgt.stats(f).replays == replays + 6
    assert "not compared with eager: it exchanges data with other processes" in cgt.explain(f)


def test_arguments_that_cannot_be_compared(device):
    f, x = cgt.jit(lambda x, n: x * 2, audit=EVERY), values(device)
    for k in range(CALLS):
        array = numpy.ones(2)
        assert identical(f(x, array if k % 3 == 0 else 1), x * 2)
    assert cgt.stats(f).replays >= 8 and state_of(f).audited >= 8 and not state_of(f).mismatches, cgt.explain(f)


def test_values_read_on_the_way(device):
    f = cgt.jit(lambda x: x + 1 if x.sum() > 0 else x - 1, audit=EVERY)
    for k in range(CALLS):
        x = values(device, seed=k)
        assert identical(f(x), x + 1 if x.sum() > 0 else x - 1)
    assert state_of(f).audited > 10 and not state_of(f).mismatches, cgt.explain(f)


def test_tolerances(device):
    noise = functools.partial(time.perf_counter)
    for schedule, parts in ((EVERY, True), ("every:1,atol:1e9", False)):
        f = cgt.jit(lambda x: x * noise(), audit=schedule)
        x = values(device).double()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", cgt.CgtWarning)
            for _ in range(6):
                f(x)
        assert bool(state_of(f).mismatches) == parts


# --- planted faults -------------------------------------------------------------------------------


class Holder:
    pass


def stale_scalar(device):
    """An array in a closure is guarded by identity."""
    x, scale = values(device), numpy.ones(1)

    def call(f, k):
        scale[0] = 1.0 + (k >= 5)
        return f(x)

    return lambda x: (x + 1) * float(scale[0]), call


def stale_closure_tensor(device):
    """A name that is computed is not followed."""
    holder, x = Holder(), values(device)
    holder.weight, other = values(device, seed=2), values(device, seed=3)

    def call(f, k):
        if k == 5:
            holder.weight = other
        return f(x)

    return lambda x: x * vars(holder)["wei" + "ght".lower()], call


def wrong_number(device, monkeypatch):
    """A step of a live number becomes another one."""
    rows_of = live.rows_of

    def wrong(trace, *rest):
        return [(op if op != core.MULTIPLIED else core.ADDED, *more) for op, *more in rows_of(trace, *rest)]

    monkeypatch.setattr(live, "rows_of", wrong)
    x = values(device)
    return lambda x, t: x + t * 3.0, lambda f, k: f(x, 0.5 + k)


def overwritten_result(device, monkeypatch):
    """One of two results lies where the other one does."""
    rows = describe.rows

    def wrong(*args):
        draft = rows(*args)
        return draft._replace(outs=[draft.outs[0], draft.outs[0]._replace(kind=core.AGAIN, ref=0), *draft.outs[2:]])

    monkeypatch.setattr(describe, "rows", wrong)
    x = values(device)
    return lambda x: (x + 1, x + 2), lambda f, k: f(x)


def random_numbers_that_stay(device):
    """Eager draws, and the replay does not."""
    x, switch = values(device), numpy.zeros(1)

    def function(x):
        if switch[0]:
            torch.rand(3, device=x.device)
        return x + 1

    def call(f, k):
        switch[0] = k >= 5
        return f(x)

    return function, call


def missed_write(device):
    """What decides whether it writes is not compared."""
    x, state, switch = values(device), torch.zeros(3, device=device), numpy.zeros(1)

    def function(x):
        y = x + state
        if switch[0]:
            state.add_(1)
        return y

    def call(f, k):
        switch[0] = k >= 5
        return f(x)

    return function, call


def wrong_edge(device):
    x, switch = values(device), numpy.ones(1)

    def call(f, k):
        switch[0] = 1 if k < 5 else -1
        return f(x)

    return lambda x: x.sin() if switch[0] > 0 else x.cos(), call


def poisoned_constant(device):
    """Somebody writes into memory of the recording."""
    x = values(device)
    mark = 1234.5

    def call(f, k):
        if k == 5:
            for one in gc.get_objects():
                if type(one) is torch.Tensor and one.dtype == torch.float32 and one.numel() == 3 and one.device == x.device and one[0] == mark:
                    one.data.fill_(7.0)
        return f(x)

    return lambda x: x + torch.tensor([mark, 2.0, 3.0], device=x.device), call


def frozen_random(device, monkeypatch):
    monkeypatch.setattr(impure, "moved", lambda before, seen: iter(()))
    x = values(device)
    draw = functools.partial(random.Random.random, random._inst)
    return lambda x: x * draw(), lambda f, k: f(x)


def frozen_clock(device):
    x = values(device).double()
    read = functools.partial(time.perf_counter)
    return lambda x: x * read(), lambda f, k: f(x)


FAULTS = [
    stale_scalar, stale_closure_tensor, wrong_number, overwritten_result, random_numbers_that_stay, missed_write, wrong_edge,
    poisoned_constant, frozen_random, frozen_clock,
]  # fmt: skip
TELLS = {  # what a message has to name
    stale_scalar: "aten.mul.Tensor(float32[4, 3], 2.0)", wrong_edge: "aten.cos.default", missed_write: "is written by eager, and not by the replay",
    overwritten_result: "result[1] differs in", frozen_random: "aten.mul.Tensor", frozen_clock: "aten.mul.Tensor",
    random_numbers_that_stay: "torch's random generator of", poisoned_constant: "result differs in 12 of 12 elements, by at most",
}  # fmt: skip


@tells("audit", "other_op")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_fault(device, fault, monkeypatch):
    patched = (monkeypatch,) if fault.__code__.co_argcount > 1 else ()
    function, call = fault(device, *patched)
    f = cgt.jit(function, audit=EVERY)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        got = [call(f, k) for k in range(12)]
    said = [str(one.message) for one in told if "audit of" in str(one.message)]
    state = state_of(f)
    assert len(said) == state.mismatches >= 1, cgt.explain(f)
    assert all("Eager's values stand" in text and TELLS.get(fault, "") in text for text in said), said
    assert cgt.stats(f).reasons.keys() >= set(said)
    if fault in (frozen_random, frozen_clock):
        return  # the function itself gives another value at each call
    function, call = fault(device, *patched)
    for k in range(12):
        want = call(function, k)
        if fault is overwritten_result and k == 1:
            continue  # the call that records gets what the recording hands out, and is not compared
        assert all(map(identical, got[k], want)) if type(want) is tuple else identical(got[k], want), k


def test_draws_behind_a_mismatch_are_eagers(device):
    """The state that stands is that of one run."""
    states = []
    for wrap in (functools.partial(cgt.jit, audit=EVERY), lambda function: function):
        torch.manual_seed(5)
        function, call = random_numbers_that_stay(device)
        f = wrap(function)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", cgt.CgtWarning)
            for k in range(12):
                call(f, k)
        states.append(torch.rand(8, device=device))
    assert identical(*states)


def test_eager_that_raises_where_the_replay_does_not(device):
    x, switch = values(device), numpy.zeros(1)

    def function(x):
        if switch[0]:
            raise ValueError("mine")
        return x + 1

    f = cgt.jit(function, audit=EVERY)
    for _ in range(4):
        f(x)
    switch[0] = 1
    with pytest.raises(ValueError, match="mine"), pytest.warns(cgt.CgtWarning, match="eager raises ValueError"):
        f(x)
    assert cgt.stats(f).graph_nodes == 0


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["often", "first:-1", "first:0.5", "every:2,each:3", "rtol:1e-5", "every", "every:nan"])
def test_schedules_that_are_none(text):
    with pytest.raises(cgt.CgtError, match="audit"):
        cgt.jit(torch.sin, audit=text)


def test_schedules():
    assert audit.parse("0") is None and audit.parse("first:2, every:1000") == (2, 1000, 0, 0.0, 0.0)
    following = [audit.number_behind(audit.parse("first:2,doubling:1"), n) for n in range(18)]
    assert following == [1, 2, 4, 4, 8, 8, 8, 8, *[16] * 8, 32, 32]
    assert audit.parse("every:10,rtol:1e-5,atol:1e-8") == (0, 10, 0, 1e-5, 1e-8)


# --- by default -----------------------------------------------------------------------------------


@pytest.fixture
def audited_by_default(monkeypatch):
    monkeypatch.setattr(options, "AUDIT", AUDITS_BY_DEFAULT)


def mute(call):
    """call(), and the warnings of audits that came."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = call()
    return result, [str(one.message) for one in told if "audit of" in str(one.message)]


def test_the_first_two_replays_and_then_powers_of_two(device, audited_by_default):
    f, x = cgt.jit(lambda x: x * 2), values(device)
    for k in range(22):
        assert identical(f(x), x * 2)
        replays = max(0, k - 1)
        assert cgt.stats(f).replays == replays and state_of(f).audited == replays.bit_length()
    assert "compared with eager: 5 replays, all alike" in cgt.explain(f)


def test_each_recording_is_audited(device, audited_by_default):
    f = cgt.jit(lambda x: x * 2)
    for n in (2, 3, 4):
        x = values(device, n)
        for _ in range(6):
            f(x)
    assert cgt.stats(f).records == 3 and state_of(f).audited == 3 * 3


def test_audits_can_be_switched_off(device, audited_by_default):
    f, x = cgt.jit(lambda x: x * 2, audit="0"), values(device)
    for _ in range(8):
        f(x)
    assert cgt.stats(f).replays == 6 and state_of(f).audited == 0


def queue_of(items):
    q = queue.Queue()
    for one in items:
        q.put(one)
    return q.get


def deque_of(items):
    return collections.deque(items).popleft


def set_of(items):
    """Of numbers, since tensors have no order there that comes again."""
    return set(range(len(items))).pop


@pytest.mark.parametrize("source", [queue_of, deque_of, set_of])
def test_what_is_taken_from_elsewhere_is_taken_once(device, source, audited_by_default):
    """One batch for each call, as in eager: no guard sees that it is another one."""
    batches = [values(device, 5, 8, seed=k) for k in range(20)]

    def run(wrap):
        torch.manual_seed(3)
        net, take = nn.Linear(8, 1).to(device), source(batches)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

        def step():
            optimizer.zero_grad()
            batch = take()
            loss = net(batch if isinstance(batch, torch.Tensor) else batches[0] * batch).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        f = wrap(step)
        return [f().item() for _ in batches], [p.tolist() for p in net.parameters()], f

    *want, _ = run(lambda f: f)
    (*got, f), told = mute(lambda: run(cgt.jit))
    assert got == want, cgt.explain(f)
    state = state_of(f)
    assert cgt.stats(f).replays == state.audited == state.mismatches == len(told) == 1, cgt.explain(f)


def test_content_that_no_guard_compares(device, audited_by_default):
    """A deque to which the function appends, and of which it returns nothing."""

    def run(wrap):
        seen = collections.deque(maxlen=3)

        def function(x, k):
            seen.append(len(seen))
            seen.rotate()
            return x + 1

        f = wrap(function)
        return [f(torch.ones(2, device=device), "a").tolist() for _ in range(8)], list(seen)

    got, told = mute(lambda: run(cgt.jit))
    assert got == run(lambda f: f) and len(told) == 1 and "a deque holds" in told[0]


def test_what_changes_later_is_told_by_the_next_audit(device, audited_by_default):
    """And until then it is not: a row of the footguns."""
    x, switch = values(device), numpy.ones(1)
    f = cgt.jit(lambda x: x * float(switch[0]))
    for _ in range(5):
        f(x)  # the third replay is the last
    switch[0] = 3.0
    got, told = mute(lambda: [f(x) for _ in range(3)])
    assert all(identical(one, x * 3) for one in got) and len(told) == 1  # the fourth is audited
    assert "switch" in told[0] and "not guarded" in cgt.explain(f)


@pytest.mark.parametrize("reads", [False, True])
def test_kernels_that_sum_in_any_order_are_told_nothing(device, audited_by_default, reads):
    """What is another number when the recording runs once more is no measure; of its segments, too, if it reads which
    rows a mask chooses and hands out a number, as a training step of a graph network does."""
    if device.type == "cpu":
        pytest.skip("kernels of the host's sum in one order")
    n = 12 << 13
    index, mask = torch.randint(0, 3, (n,), device=device), torch.tensor([True, False, True], device=device)

    def sums(x):
        made = torch.zeros(3, device=device).index_add_(0, index, x.repeat(n // 12))
        return made[mask].sum().item() if reads else made

    f = cgt.jit(sums)
    x = values(device).reshape(-1)
    _, told = mute(lambda: [f(x) for _ in range(20)])
    assert told == [] and cgt.stats(f).replays == 18 and state_of(f).mismatches == 0, cgt.explain(f)


def test_a_tape_that_works_on_what_its_last_run_left_is_told(audited_by_default, monkeypatch):
    """It is another number at each run: on the host that is no reason to believe it."""
    monkeypatch.setattr(blank, "see", lambda *_: None)
    f = cgt.jit(lambda x: torch.nn.functional.max_pool1d(x, 2).add_(1))
    with torch.no_grad():
        for k in range(8):
            x = values("cpu", 1, 2, 8, seed=k)
            (got,), told = mute(lambda x=x: [f(x)])
            assert identical(got, torch.nn.functional.max_pool1d(x, 2).add_(1)) and len(told) == (k == 2), k
    assert state_of(f).mismatches == 1


def test_several_threads(device, audited_by_default):
    """What others do meanwhile is not undone: a function that changes something is then not audited; one that returns results is."""
    total = torch.zeros(3, device=device)
    adds, pure = cgt.jit(lambda x: total.add_(x)), cgt.jit(lambda x: x * 2)
    x = torch.ones(3, device=device)

    def work(k):
        for _ in range(40):
            adds(x)
            assert identical(pure(x), x * 2)

    work(0)
    audited = state_of(adds).audited
    assert audited > 2
    in_threads(3, work)
    assert total.tolist() == [160.0] * 3
    for _ in range(200):
        adds(x)
        pure(x)
    assert state_of(adds).audited == audited and "several threads" in cgt.explain(adds)
    assert state_of(pure).audited > audited, cgt.explain(pure)


def test_another_thread_that_ends_the_iteration_between_a_replay_and_its_comparison(device, audited_by_default, monkeypatch):
    total, take = torch.zeros(3, device=device), audit.islands.take_answers
    f, x, behind = cgt.jit(lambda x: total.add_(x) * 2), torch.ones(3, device=device), []

    def took():
        cgt.step()
        core.stepped(False)
        behind.append(core.path_state(total.get_device())[1])
        return take()

    monkeypatch.setattr(audit.islands, "take_answers", took)
    for k in range(8):
        assert f(x).tolist() == [2.0 * (k + 1)] * 3
    assert state_of(f).audited >= 2 and not state_of(f).mismatches and -1 in behind, cgt.explain(f)


def test_no_room_for_a_second_copy(device, audited_by_default, monkeypatch):
    monkeypatch.setattr(audit, "free_bytes", lambda device: 20)
    total = torch.zeros(3, device=device)
    f, g, x = cgt.jit(lambda x: total.add_(x)), cgt.jit(lambda x: x * 2), torch.ones(3, device=device)
    for _ in range(8):
        f(x)
        g(x)
    assert total.tolist() == [8.0] * 3 and cgt.stats(f).replays == 6
    assert state_of(f).audited == 0 and "no room for a second copy" in cgt.explain(f)
    assert state_of(g).audited == 3  # it writes nothing from outside


def test_eager_that_finds_no_memory(device, audited_by_default):
    """The replay's result stands."""
    total, full = torch.zeros(3, device=device), numpy.zeros(1)

    def function(x):
        total.add_(x)
        if full[0]:
            raise torch.OutOfMemoryError("none left")
        return total * 2

    f, x = cgt.jit(function), torch.ones(3, device=device)
    for k in range(8):
        full[0] = k >= 2
        got, told = mute(lambda: f(x))
        assert got.tolist() == [2.0 * (k + 1)] * 3 and total.tolist() == [k + 1.0] * 3 and not told
    assert cgt.stats(f).replays == 6 and "no room" in cgt.explain(f)


# --- backwards outside of the call ----------------------------------------------------------------


def deep(device, width=8):
    """Many activations that only a backward reads, whose memory it uses for gradients behind them."""
    torch.manual_seed(4)
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.2))]
    return nn.Sequential(*layers).to(device)


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_backward_that_is_compared_is_eagers(device, retain, weighted):
    """`weighted`: it has another gradient at each call."""
    net, x = deep(device), values(device, 5, 8)
    f = cgt.jit(net, audit=EVERY)

    def grads(function, k):
        torch.manual_seed(k)
        net.zero_grad()
        y = function(x.copy_(values(device, 5, 8, seed=k)))
        loss = (y * values(device, 5, 8, seed=k + 100)).sum() if weighted else y.sum()
        loss.backward(retain_graph=retain)
        if retain:
            loss.backward()
        return [p.grad.clone() for p in net.parameters()]

    for k in range(CALLS):
        assert identical(grads(f, k), grads(plain(net), k)), k
    ours = cgt.stats(f).backward
    assert ours.audited >= CALLS - 8, cgt.explain(f)
    assert state_of(f).mismatches == 0 and "all alike" in cgt.explain(f).split(".backward:")[1]


def test_a_backward_reads_beyond_the_view_that_was_saved_first():
    """Both layers' first states are views of one tensor of zeros, of which the backward is given the first. On the host:
    cuDNN has an op for all layers."""
    torch.manual_seed(5)
    net, device = nn.RNN(5, 8, 2), torch.device("cpu")
    f = cgt.jit(net, audit=EVERY)

    def grads(function, x):
        net.zero_grad()
        function(x)[0].square().mean().backward()
        return [p.grad for p in net.parameters()]

    for k in range(10):
        x = values(device, 4, 3, 5, seed=k)
        assert identical(grads(f, x), grads(plain(net), x)), k
    assert cgt.stats(f).backward.audited >= 6 and not state_of(f).mismatches, cgt.explain(f)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_arguments_that_share_the_memory_that_is_written(device, order):
    def function(x, y):
        (x, y)[order[0]].add_(1)
        return x * y

    f, base = cgt.jit(function, audit=EVERY), values(device, 12)
    other = base.clone()
    for _ in range(8):
        assert identical(f(base[:8], base[4:]), function(other[:8], other[4:])) and identical(base, other)
    assert state_of(f).audited >= 3 and not state_of(f).mismatches, cgt.explain(f)


def test_the_first_two_replays_of_a_backward_and_then_powers_of_two(device, audited_by_default):
    net, x = deep(device).eval(), values(device, 5, 8)
    f = cgt.jit(net)
    for _ in range(20):
        f(x).sum().backward()
    ours = cgt.stats(f).backward
    assert ours.replays >= 16 and 4 <= ours.audited <= 6, cgt.explain(f)


def test_a_backward_is_not_compared_where_other_threads_may_use_the_memory_that_it_lets_go_of(device, audited_by_default):
    net, x = deep(device).eval(), values(device, 5, 8)
    f, other = cgt.jit(net), cgt.jit(lambda x: x * 2)
    for _ in range(8):
        f(x).sum().backward()
    audited = cgt.stats(f).backward.audited
    in_threads(2, lambda k: [other(x) for _ in range(4)])
    for _ in range(40):
        f(x).sum().backward()
    ours = cgt.stats(f).backward
    assert ours.replays >= 40 and audited > 1, cgt.explain(f)
    if device.type == "cuda":  # each result has memory of its own where several threads call: a replay lets go of none
        assert ours.audited > audited and not state_of(f).mismatches
    else:
        assert ours.audited == audited and "several threads" in cgt.explain(f).split(".backward:")[1]


def test_a_backward_that_writes_into_what_the_call_saved_is_not_compared(device):
    """As compiled code does. Eager would write into a copy."""
    state, saved = state_of(cgt.jit(torch.relu)), values(device)
    index = saved.get_device()
    assert audit.why_not(state, index, [], [saved[1:]], [saved]) == "donated"
    assert audit.why_not(state, index, [], [saved.clone()], [saved]) is None


def test_eagers_backward_reads_copies_of_what_the_replay_let_go_of(device, monkeypatch):
    """It may be another thread's memory by the time of eager's run."""
    net, x = deep(device).eval(), values(device, 5, 8)
    f, run = cgt.jit(net, audit=EVERY), audit.run_eagerly

    def overwritten(call, *more):
        for k, t in enumerate(spent[-1]):
            core.fixed(t).fill_(float(k))  # as a kernel writes it: no version moves
        return run(call, *more)

    def scope_of(call, node):
        scope = find(call, node)
        spent.append([call.args[k] for k in scope.spent] if isinstance(scope, audit.Scope) else [])
        return scope

    spent, find = [[]], audit.find_scope
    monkeypatch.setattr(audit, "find_scope", scope_of)
    monkeypatch.setattr(audit, "run_eagerly", overwritten)
    for k in range(10):
        x.copy_(values(device, 5, 8, seed=k))
        net.zero_grad()
        f(x).sum().backward()
        got = [p.grad.clone() for p in net.parameters()]
        net.zero_grad()
        plain(net)(x).sum().backward()
        assert identical(got, [p.grad for p in net.parameters()]), k
    assert any(spent) and cgt.stats(f).backward.audited >= 5 and not state_of(f).mismatches, cgt.explain(f)


def test_what_a_backward_reads_and_no_guard_compares(device, audited_by_default):
    switch = numpy.ones(1)

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * float(switch[0])

    w = values(device).requires_grad_()
    f = cgt.jit(Scale.apply)

    def audited():
        backward = cgt.stats(f).backward
        return backward is not None and backward.audited

    def grad():
        (got,) = torch.autograd.grad(f(w).sum(), w)
        return got

    for _ in range(20):  # on a GPU autograd's thread may hold a tensor for longer, which is another recording
        grad()
    assert audited() >= 3
    switch[0], before = 3.0, cgt.stats(f).backward.records
    got, told = mute(lambda: [grad() for _ in range(40)])  # to the next power of two
    assert identical(got[-1], torch.full_like(w, 3.0)), got
    is_told = len(told) == 1 and ".backward" in told[0]
    assert is_told or (not told and cgt.stats(f).backward.records > before), told


# --- beside other threads -------------------------------------------------------------------------


def trains(p):
    (p * 1.0).sum().backward()


def writes(p):
    with torch.no_grad():
        p.add_(1)


@pytest.mark.parametrize("act", [trains, writes])
@pytest.mark.parametrize("audits", [EVERY, AUDITS_BY_DEFAULT])
def test_what_another_thread_does_meanwhile_is_no_fault_of_the_replay(device, act, audits, monkeypatch):
    """Evaluation beside training: the other thread acts between a replay and the run that it is compared with."""
    p = nn.Parameter(torch.ones(8, device=device))
    p.grad = torch.zeros(8, device=device)
    asked, done, plainly, acts = threading.Semaphore(0), threading.Semaphore(0), audit.run_eagerly, []

    def work():
        while asked.acquire() and acts[-1]:
            act(p)
            done.release()

    def beside(*args):
        acts.append(True)
        asked.release()
        done.acquire()
        return plainly(*args)

    monkeypatch.setattr(audit, "run_eagerly", beside)
    f = cgt.jit(lambda x: x * p, audit=audits)
    other = threading.Thread(target=work)
    other.start()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        for k in range(12):
            x = values(device, 8, seed=k)
            assert identical(f(x), x * p.detach())
    n, version = len(acts), p._version
    acts.append(False)
    asked.release()
    other.join()
    assert n >= 3 and state_of(f).mismatches == 0 and cgt.stats(f).replays == 10, cgt.explain(f)
    assert p.grad.tolist() == [n * (act is trains)] * 8 and version == n * (act is writes)


def test_a_part_that_is_given_other_values(monkeypatch):
    """What it returns is no measure, since it is not run again. What it is given is one, on the host."""

    calls, kept = [], []

    def stale(seen, t, bring_out=islands.bring_out):
        with unseen(seen):
            kept.append(t.clone())
            return bring_out(seen, kept[-1])

    monkeypatch.setattr(islands, "bring_out", stale)
    part = cgt.eager(lambda x: calls.append(x.tolist()))
    f, x = cgt.jit(lambda x: (part(x + 1), x * 2)[1], audit=EVERY), torch.zeros(2)
    _, told = mute(lambda: [f(x.fill_(k)) for k in range(4)])
    assert calls == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [3.0, 3.0], [4.0, 4.0]]  # again, with what eager has
    assert "<lambda> (cgt.eager) is given other values" in told[0] and state_of(f).mismatches == 1


@pytest.mark.parametrize("other", [False, True])
def test_a_part_that_is_given_parameters_and_other_kinds(monkeypatch, other):
    """A copy of a Parameter is no Parameter, and as good; another value of it is told."""
    kept = []

    def stale(seen, t, bring_out=islands.bring_out):
        with unseen(seen):
            kept.append(t.detach().clone())
            return bring_out(seen, kept[-1] if other and t is w else t)

    monkeypatch.setattr(islands, "bring_out", stale)
    w = nn.Parameter(torch.ones(2))
    given = {"n": torch.tensor([1, 2]), "b": torch.tensor([True, False]), "z": torch.tensor([1j, float("nan")]), "h": torch.ones(2).half()}
    part = cgt.eager(lambda w, given, k: w.sum() + given["n"].sum())
    f, x = cgt.jit(lambda x: x * part(w, given, 3), audit=EVERY), torch.ones(2)
    with torch.no_grad():
        for k in range(6):
            w.fill_(k)
            result, told = mute(lambda: f(x))
            assert torch.equal(result, x * (w.sum() + 3)) and bool(told) == (other and state_of(f).mismatches == 1 and k == 3), (k, told)
    assert state_of(f).mismatches == other and cgt.stats(f).replays >= 1
