"""Recording must pay: where recordings are never replayed, calls run eagerly, and later, or when
calls come to look alike, it is tried again."""

import math
import random
import types
from typing import NamedTuple

import numpy
import pytest
import torch
from helpers import line_of, plain, tells, values
from hypothesis import HealthCheck, given, settings
from test_programs import check, programs
from torch import nn

# isort: split
import cgt_core as core

import cgt
from cgt.decide import account, dispatch, sites
from cgt.make import record
from cgt.words import options


@pytest.fixture(autouse=True)
def must_pay(monkeypatch):
    """As users have it; conftest.py lets everything be recorded at once."""
    monkeypatch.setattr(options, "OVERHEAD", 0.05)
    monkeypatch.setattr(options, "ALLOWANCE", 0.0)


def state_of(f):
    return getattr(f, sites.ATTRIBUTE)


def run(f, calls, plain=None):
    """The stats after these calls (tuples of arguments), each of which agreed with eager."""
    plain = plain or f.__wrapped__
    for args in calls:
        assert torch.equal(f(*args), plain(*args))
    s = cgt.stats(f)
    assert s.calls == s.warmups + s.records + s.replays + s.eager and s.eager == sum(s.reasons.values())
    return s


class Thing:
    scale = 2.0


GROWING = {  # each call is another one
    "shapes": (lambda x: x * 2, lambda device: ((values(device, k + 1),) for k in range(100))),
    "texts": (lambda x, k: x * float(k), lambda device: ((values(device), str(k)) for k in range(100))),
    "objects": (lambda x, o: x * o.scale, lambda device: ((values(device), Thing()) for k in range(100))),
}


class State(NamedTuple):
    k: str
    other: float


class Unspeakable:
    """Compared by value; its own repr raises, which is the user's affair and not a call's."""

    def __init__(self, k):
        self.k = k

    def __eq__(self, other):
        return type(other) is Unspeakable and other.k == self.k

    def __hash__(self):
        return hash(self.k)

    def __repr__(self):
        raise RuntimeError("mine")


class Dict(dict):
    """Of a class that is not known, so it is compared by identity."""


WRAPS = {
    "numpy": numpy.float64, "nested": lambda k: {"t": [str(k)]}, "namedtuple": lambda k: State(str(k), 1.0), "str": str, "object": Unspeakable,
    "function": lambda k: lambda t: t, "set": lambda k: {1, 2}, "dict of a class": lambda k: {"t": [Dict()]}, "iterator": lambda k: iter([1]),
}  # fmt: skip


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS.keys())
def test_the_argument_that_is_another_one_at_each_call_is_named(device, wrap):
    f, x = cgt.jit(lambda x, what: x * 2), values(device)
    for k in range(40):
        assert torch.equal(f(x, wrap(k + 0.5)), x * 2)
    named = {"args[1]", "args[1]['t'][0]", "args[1].k"}
    reasons = cgt.stats(f).reasons
    assert any(f"such arguments. {path} differs at each call" in reason for reason in reasons for path in named), reasons


def test_a_few_shapes_and_a_rate_that_moves(device):
    """Each recording is for one shape, and at first for one rate."""
    nets = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to(device) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    adams = [torch.optim.AdamW(net.parameters(), lr=1e-3) for net in nets]
    rates = [torch.optim.lr_scheduler.LambdaLR(adam, lambda t: min(1.0, t / 100)) for adam in adams]

    def step(k, x):
        adams[k].zero_grad()
        loss = nets[k](x).square().mean()
        loss.backward()
        adams[k].step()
        return loss.detach()

    f = cgt.jit(lambda x: step(0, x))
    for k in range(200):
        x = values(device, 4, (8, 12, 16)[k * k % 7 % 3], 8, seed=k)
        assert torch.equal(f(x), step(1, x)), k
        for rate in rates:
            rate.step()
    assert cgt.stats(f).replays >= 120 and cgt.stats(f).records <= 8, cgt.explain(f)


def test_no_argument_is_named_where_shapes_are_what_is_new(device):
    f = cgt.jit(lambda x, what: x * 2)
    for k in range(40):
        x = values(device, k + 1)
        assert torch.equal(f(x, "ab"[k % 2]), x * 2)
    assert cgt.stats(f).reasons and not any("differs at each call: keep it" in reason for reason in cgt.stats(f).reasons), cgt.stats(f).reasons


@tells("new_kind")
@pytest.mark.parametrize("f, calls", GROWING.values(), ids=GROWING.keys())
def test_calls_that_never_come_again_are_not_recorded(device, f, calls):
    s = run(cgt.jit(f), calls(device))
    assert (s.warmups, s.records, s.replays, s.eager) == (1, 0, 0, 99)
    assert all("first call with such arguments" in told for told in s.reasons)


@tells("does_not_pay")
def test_more_kinds_than_there_is_room_for_must_pay(device):
    """As names of layers do, which come again with each sample."""
    f, x = cgt.jit(lambda x, k: x * float(k)), values(device)
    s = run(f, [(x, str(k % 12)) for k in range(400)])
    assert s.records <= 2 and s.replays <= 70
    told = next(r for r in s.reasons if "recording is paused" in r)
    assert "Keep to a few shapes and values" in told


def test_value_in_a_module_that_changes_at_each_call_is_recorded_once(device):
    thing, x = Thing(), values(device)
    f = cgt.jit(lambda x: x * float(thing.scale))
    for k in range(60):
        thing.scale = str(k)
        assert torch.equal(f(x), x * float(k))
    s = cgt.stats(f)
    # Calls look alike, so it is tried once more.
    assert s.records == 2 and s.replays == 0 and any("thing.scale changes" in told for told in s.reasons)


def test_slices_that_begin_at_other_remainders_must_pay(device):
    """Kernels may differ by it, so each has a recording of its own."""
    f, base = cgt.jit(lambda x: x[2:]), values(device, 64)
    s = run(f, [(base[k : k + 32],) for k in range(9)])
    assert s.records <= 2 and any("has another remainder" in told for told in s.reasons), s.reasons


@pytest.mark.parametrize("ways", [2, 3, 8])
def test_a_few_ways_in_turn_come_to_replay(device, ways):
    f = cgt.jit(lambda x: x * 2, max_records=ways)
    inputs = [values(device, k + 1) for k in range(ways)]
    for rounds in (6, 4):
        before = cgt.stats(f)
        s = run(f, ((x,) for x in inputs * rounds))
    assert s.records == ways and s.replays - before.replays == s.calls - before.calls


def test_addresses_are_learnt_at_once(device):
    f = cgt.jit(lambda x: x * 2)
    x, kept = values(device), [values(device, seed=k) for k in range(6)]
    s = run(f, [(x,), (x,), *((y,) for y in kept)])
    assert s.records <= 2 and s.eager == 0


def test_call_that_stays_is_recorded_though_the_first_ones_varied(device):
    f = cgt.jit(lambda x: x * 2)
    x = values(device, 50)
    s = run(f, [*((values(device, k + 1),) for k in range(5)), *[(x,)] * 60])
    assert s.records == 1 and s.replays > 50


def test_it_is_tried_again_when_it_has_paid(device):
    f = cgt.jit(lambda x: x * 2)
    inputs = [(values(device, k + 1),) for k in range(24)]
    before = run(f, inputs * 8).records
    assert before <= 4
    account.book(state_of(f), eager=[math.inf])  # a slow function: recordings cost next to nothing
    core.verdict_fn(getattr(f, sites.ATTRIBUTE).f, "", 0)
    assert run(f, inputs[15:18]).records == before + 3


def test_what_is_recorded_replays_while_the_rest_waits(device):
    f, x = cgt.jit(lambda x: x * 2), values(device, 99)
    run(f, [(x,)] * 2)
    others = [(values(device, k + 1),) for k in range(40)]
    s = run(f, [call for other in others for call in (other, (x,))])
    assert s.replays >= 40 and s.records < 12 and s.replays + s.records + s.eager == 81


@tells("timed")
def test_function_that_fails_tells_its_own_reason_and_is_not_tried_every_64_calls(device):
    f = cgt.jit(lambda x: x * 2 if float(x.sum()) * 1 > 0 else x)
    x = values(device).abs()
    s = run(f, [(x,)] * 300)
    assert (s.warmups, s.records, s.replays, s.eager) == (1, 0, 0, 299)
    (told,) = [r for r in s.reasons if "timed" not in r]
    assert "_local_scalar_dense" in told


def test_inf_records_at_every_miss(device, monkeypatch):
    monkeypatch.setattr(options, "OVERHEAD", math.inf)
    f = cgt.jit(lambda x: x * 2, max_records=64)
    assert run(f, ((values(device, k + 1),) for k in range(12))).records == 11


def test_objects_that_come_once_come_to_the_limit_too(device, monkeypatch):
    """Their recordings go with them, so there is always room for another one."""
    monkeypatch.setattr(options, "OVERHEAD", math.inf)
    f, x = cgt.jit(lambda layer, x: layer(x) * 2), values(device)
    s = run(f, ((torch.nn.Tanh(), x) for _ in range(20)))
    assert s.records == options.HOPES and s.eager == 11, s.reasons
    assert all(code in why for why in s.reasons for code in ("CGT502", "CGT504"))
    kept = torch.nn.Tanh()
    s = run(f, ((kept, x) for _ in range(100)))
    assert s.replays > 5, s.reasons


def test_replays_pay_for_what_varies(device):
    """So a program that mostly replays tries new ways soon."""
    f = cgt.jit(lambda x: x * 2)
    x = values(device)
    run(f, [(x,)] * 2)
    state = state_of(f)
    missed = [(node, 3, 0) for node in core.fn_nodes(state.f)]
    account.book(state, spent=1.0, last=0.0, eager=[0.1], met={})
    assert account.waits(state, missed, 8) == 10 / 0.05 - 2
    account.book(state, last=0.5)
    assert account.waits(state, missed, 8) == 15 / 0.05 - 2, "the next one costs as much as the last"
    run(f, [(x,)] * 30)
    account.book(state, spent=1.0, last=0.5, eager=[0.1], met={})
    assert account.waits(state, missed, 8) == 0, "it was replayed"
    account.book(state, failed=2)
    assert account.waits(state, missed, 8) == 0, "30 replays saved 1.5 s"
    account.book(state, spent=10.0)
    assert account.waits(state, missed, 8) == (105 - 15) / 0.05 - 32
    account.book(state, failed=0)
    assert account.waits(state, missed, 8) == 0
    account.book(state, met=dict.fromkeys(range(9)))
    assert account.waits(state, missed, 8) > 0, "there is no room for all kinds that came"


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(program=programs)
def test_random_programs_agree_where_recording_must_pay(device, program):
    check(program, device)


# --- within the allowance -----------------------------------------------------------------------


@pytest.fixture
def allowed(monkeypatch):
    """Nobody counts yet, and no clock says how long that lasts."""
    monkeypatch.setattr(options, "ALLOWANCE", math.inf)


@pytest.fixture
def looks(monkeypatch):
    """Grows by one with each call that is warmed or recorded, whatever comes of it."""
    found, timed = [], account.timed
    monkeypatch.setattr(account, "timed", lambda *args, **kwargs: found.append(args[0]) or timed(*args, **kwargs))
    return found


def test_recording_begins_at_once(device, allowed):
    f = cgt.jit(lambda x: x * 2)
    inputs = [(values(device, k + 1),) for k in range(3)]
    s = run(f, inputs * 2)
    assert (s.warmups, s.records, s.replays, s.eager) == (1, 3, 2, 0)
    s = run(f, inputs * 4)
    assert s.records == 3 and s.eager == 0


def test_what_it_costs_is_asked_when_the_allowance_is_spent(device, monkeypatch):
    monkeypatch.setattr(options, "ALLOWANCE", 2.0)
    monkeypatch.setattr(account, "TOGETHER", [-1e6])
    f, x = cgt.jit(lambda x, k: x * float(k)), values(device)
    account.book(state_of(f), spent=1e6, eager=[1e-9])
    s = run(f, [(x, str(k % 6)) for k in range(30)])
    assert s.records == 6 and s.eager <= 4, s.reasons
    account.TOGETHER[0] = options.ALLOWANCE
    s = run(f, [(x, str(k % 2)) for k in range(6, 40)])
    assert s.records == 6
    g = cgt.jit(lambda x, k: x * float(k))
    account.book(state_of(g), spent=1e6, eager=[1e-9])
    assert run(g, [(x, str(k % 6)) for k in range(30)]).eager >= 10


def test_all_functions_share_it(device, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(account, "time", types.SimpleNamespace(perf_counter=lambda: float(next(clock))))
    monkeypatch.setattr(account, "TOGETHER", [0.0])
    monkeypatch.setattr(options, "ALLOWANCE", 3.0)
    for k in range(1, 5):
        f = cgt.jit(lambda x: x * 2)
        assert run(f, [(values(device),)] * 3).replays == 1
        assert account.TOGETHER[0] == k, "the first call is slow in eager, too"
    inputs = [(values(device, n + 1),) for n in range(3)]
    assert run(cgt.jit(lambda x: x * 3), inputs * 2).eager > 0


def test_requests_of_many_shapes_replay_from_the_third_of_each_on(device, allowed):
    """16 sizes and 3 lengths in any order: 48 kinds, of which 300 calls see each some six times."""
    net, order = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(device), random.Random(0)
    kinds = [(n, length, 8) for n in range(1, 17) for length in (4, 8, 12)]
    calls = [(values(device, *order.choice(kinds), seed=k),) for k in range(300)]
    with torch.no_grad():
        s = run(cgt.jit(net.forward), calls, net.forward)
    assert s.replays >= 180 and s.records <= 48 and s.eager <= 90, s.reasons


def test_room_grows_with_what_is_replayed(device, monkeypatch):
    monkeypatch.setattr(options, "OVERHEAD", math.inf)
    f, inputs = cgt.jit(lambda x: x * 2), [(values(device, k + 1),) for k in range(80)]
    s = run(f, inputs[:60])
    assert (s.records, s.eager) == (options.HOPES, 51) and any("CGT502" in told for told in s.reasons), s.reasons
    s = run(f, inputs[1 : options.HOPES + 1])
    assert (s.replays, s.eager) == (options.HOPES, 51)
    s = run(f, inputs[10:40])
    assert s.records == 3 * options.HOPES
    for _ in range(8):
        s = run(f, inputs[1:])
    assert len(core.fn_nodes(state_of(f).f)) == options.MAX_SPECS, s.reasons


def test_kind_that_comes_often_is_recorded_though_each_call_between_is_new(device):
    """Beyond the allowance, and though recordings do not pay: by the counts of kinds, not by calls in a row."""
    f, x = cgt.jit(lambda x: x * 2), values(device, 99)
    account.book(state_of(f), spent=1e6, eager=[1e-9])
    s = run(f, [call for k in range(60) for call in ((x,), (values(device, k + 1),))])
    assert s.records == 1 and s.replays >= 20, s.reasons


def test_reset_forgets_which_kinds_came(device, allowed):
    f, inputs = cgt.jit(lambda x: x * 2), [(values(device, k + 1),) for k in range(20)]
    first = run(f, inputs)
    cgt.reset(f)
    second = run(f, inputs)
    assert (second.records, second.replays) == (2 * first.records, 0)


@pytest.mark.parametrize("f, calls", GROWING.values(), ids=GROWING.keys())
def test_calls_that_never_come_again_leave_it_to_others(device, allowed, f, calls):
    s = run(cgt.jit(f), calls(device))
    assert s.warmups == 1 and s.records <= account.FREE and s.eager >= 95, s.reasons


def test_function_that_was_refused_keeps_to_its_share(device, allowed, looks):
    f = cgt.jit(lambda x: x * 2 if float(x.sum()) * 1 > 0 else x)
    x = values(device).abs()
    run(f, [(x,)] * 60)
    account.book(state_of(f), spent=1.0, eager=[1e-9])
    s = run(f, [(x,)] * 300)
    assert len(looks) == 2 and (s.warmups, s.eager) == (1, 359)


def test_slices_that_begin_at_other_remainders_come_to_the_limit(device, allowed):
    f, base = cgt.jit(lambda x: x[2:], max_records=8), values(device, 64)
    s = run(f, [(base[k : k + 32],) for k in range(16)] * 3)
    assert s.records == 8 and s.replays >= 8
    (told,) = s.reasons
    assert "recorded 8 times already" in told and "has another remainder" in told


def test_blocks_of_a_transformer_replay_in_the_first_ten_calls(device, allowed):
    layers = [nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, device=device).eval() for _ in range(3)]
    blocks = [cgt.jit(layer) for layer in layers]
    with torch.no_grad():
        for k in range(10):
            cgt.step()
            x = y = values(device, 2, 4, 16, seed=k)
            for layer, block in zip(layers, blocks, strict=True):
                x, y = block(x), plain(layer)(y)
            assert torch.equal(x, y)
    assert all(cgt.stats(block).replays >= 7 for block in blocks), [cgt.stats(block) for block in blocks]


# --- calls that come to nothing in other ways ---------------------------------------------------


class Stop(Exception):
    pass


@pytest.fixture
def asked(monkeypatch):
    """Grows by one with each call that compiled code hands to Python."""
    found, miss = [], dispatch.miss
    monkeypatch.setattr(dispatch, "miss", lambda call: found.append(call.state) or miss(call))
    return found


@tells("left")
def test_calls_that_an_exception_leaves_are_counted_and_seldom_looked_at(device, allowed, looks, asked):
    @cgt.jit
    def f(x):
        y = x * 2
        raise Stop(y)

    for k in range(600):
        with pytest.raises(Stop) as caught:
            f(values(device, seed=k))
        assert torch.equal(caught.value.args[0], values(device, seed=k) * 2)
    s = cgt.stats(f)
    assert (s.calls, s.eager, s.warmups, s.records) == (600, 600, 0, 0) and len(looks) <= 3
    assert len(asked) <= 20, "a call that is known to be left costs no Python of ours"
    (told,) = s.reasons
    assert "ends with Stop (raised at " in told and line_of(f.__wrapped__, "raise Stop") in told
    assert told in cgt.explain(f)


def test_calls_that_return_replay_beside_calls_that_an_exception_leaves(device, allowed, looks, short_cool_down):
    @cgt.jit
    def f(x):
        if x.sum() > 0:
            raise Stop
        return x * 2

    for k in range(100):
        x = values(device, seed=k).abs() * (1 if k % 3 == 1 else -1)
        if k % 3 == 1:
            with pytest.raises(Stop):
                f(x)
        else:
            assert torch.equal(f(x), x * 2)
    s = cgt.stats(f)
    assert s.calls == s.warmups + s.records + s.replays + s.eager and s.eager == sum(s.reasons.values())
    assert s.replays >= 30 and len(looks) <= 12, s.reasons


def test_exception_of_the_first_call_keeps_nothing_from_replaying(device, allowed):
    f = cgt.jit(lambda x: x.view(6, 2) * 2)
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        f(values(device, 5))
    s = run(f, [(values(device),)] * 5)
    assert (s.warmups, s.records, s.replays, s.eager) == (1, 1, 3, 1)


def test_code_that_is_made_anew_at_each_call_is_not_learnt_for_ever(device, monkeypatch, looks):
    monkeypatch.setattr(options, "OVERHEAD", math.inf)
    scale = {"w": values(device)}

    def function(x):
        exec("def g(x): return x * w", scale)
        return scale["g"](x)

    s = run(cgt.jit(function), [(values(device, seed=k),) for k in range(60)])
    assert len(looks) <= options.LESSONS + 3 and s.eager + s.replays >= 55, s.reasons


def window(device, n):
    """A function that keeps the last n rows that it was given."""
    held = {"k": torch.zeros(0, 3, device=device)}

    def step(x):
        held["k"] = torch.cat([held["k"], x])[-n:]
        return held["k"].sum(0)

    return step


@tells("grows")
def test_cache_that_grows_is_recorded_when_it_stays(device, monkeypatch, allowed, looks):
    captures, capture = [], record.capture
    monkeypatch.setattr(record, "capture", lambda *args: captures.append(args) or capture(*args))
    f, plain = cgt.jit(window(device, 100)), window(device, 100)
    for k in range(25):
        x = values(device, seed=k)
        assert torch.equal(f(x), plain(x))
    assert len(captures) == 1, "one recording in vain told of the place"
    s = cgt.stats(f)
    assert len(looks) <= 5 and (s.warmups, s.records, s.eager) == (1, 0, 24)
    assert any("held['k'] gets a tensor of another shape" in told for told in s.reasons)
    for k in range(25, 300):
        x = values(device, seed=k)
        assert torch.equal(f(x), plain(x))
    s = cgt.stats(f)
    assert s.records <= 2 and s.replays >= 160 and len(looks) <= 9, cgt.explain(f)


def test_window_that_is_full_soon_replays_soon(device, allowed):
    f, plain = cgt.jit(window(device, 8)), window(device, 8)
    for k in range(60):
        x = values(device, 2, 3, seed=k)
        assert torch.equal(f(x), plain(x))
    assert cgt.stats(f).replays >= 30, cgt.explain(f)


def test_place_whose_tensor_gets_another_shape_once(device, allowed):
    held = {"h": torch.zeros(1, device=device)}

    def step(x):
        held["h"] = torch.tanh(held["h"] + x)
        return held["h"] * 2

    f, mine = cgt.jit(step), torch.zeros(1, device=device)
    for k in range(12):
        x = values(device, seed=k) if k > 0 else values(device, 1)
        mine = torch.tanh(mine + x)
        assert torch.equal(f(x), mine * 2), k
    assert cgt.stats(f).replays >= 5, cgt.explain(f)


# --- methods ------------------------------------------------------------------------------------


def scaled():
    class Scaled(nn.Module):
        def __init__(self, k):
            super().__init__()
            self.k = k

        @cgt.jit(max_records=3)
        def forward(self, x):
            return x * self.k

    return Scaled


@pytest.mark.parametrize("allowance", [math.inf, 0.0], ids=["within", "beyond"])
def test_each_object_has_room_for_its_recordings(device, monkeypatch, allowance):
    monkeypatch.setattr(options, "ALLOWANCE", allowance)
    Scaled = scaled()
    account.book(state_of(Scaled.forward), spent=-1e9)  # recordings cost nothing
    objects = [Scaled(k) for k in range(12)]
    inputs = [values(device, k + 1) for k in range(3)]
    for k in range(60):
        for one in objects:
            assert torch.equal(one(inputs[k % 3]), inputs[k % 3] * one.k)
    s = cgt.stats(Scaled.forward)
    assert s.records == 36 and s.replays >= 500, s.reasons


def test_an_object_of_its_own_for_each_call_is_not_looked_at_for_ever(device, allowed, looks):
    kept = list(map(scaled(), range(150)))
    for one in kept:
        assert torch.equal(one(values(device)), values(device) * one.k)
    assert len(looks) <= 2
