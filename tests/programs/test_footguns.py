"""A table of surprises: what `cgt.jit` does that its user may not expect, each row a test.

docs/footguns.md is the same table for users. A row is intended behaviour: a test shows what happens
and that the advice of the page helps. What is merely wrong is a bug and belongs elsewhere.
"""

import collections
import contextlib
import contextvars
import copy
import functools
import gc
import io
import pathlib
import random
import re
import sys
import time
import types
import weakref

import numpy
import pytest
import torch
from helpers import AUDITS_BY_DEFAULT, counters, in_threads, profiled, tells
from torch._higher_order_ops import while_loop
from torch.utils.checkpoint import checkpoint
from unguarded import AMBIENT, IN_PLACE

import cgt
from cgt.make import trace

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "footguns.md"
TITLES = []


def footgun(title):
    """Mark a test as the row of this title."""

    def mark(test):
        TITLES.append(title)
        return test

    return mark


def firsts(f, *args, calls=6):
    """The first elements of `calls` results."""
    return [f(*args).flatten()[0].item() for _ in range(calls)]


def ones(device, *shape):
    return torch.ones(shape or (3,), device=device)


# --- what Python does happens when the function runs, and a replay does not run it --------------


@footgun("Prints, logging and warnings happen twice, then never again")
def test_prints_happen_when_the_function_is_warmed_and_recorded(device, capsys):
    def f(x):
        print("here")
        return x * 2

    jitted = cgt.jit(f)
    assert firsts(jitted, ones(device)) == [2.0] * 6
    assert capsys.readouterr().out == "here\n" * 2
    assert counters(jitted) == (1, 1, 4, 0)
    jitted = cgt.jit(lambda x: x * 2)
    for _ in range(4):
        print("here", jitted(ones(device))[0].item())  # instead: outside
    assert capsys.readouterr().out == "here 2.0\n" * 4
    assert cgt.stats(jitted).replays >= 1


@footgun("Appending a plain value to a deque stops when replays begin")
def test_appends_of_plain_values_happen_when_warmed_and_recorded(device):
    log, sink = [], collections.deque()
    jitted = cgt.jit(lambda x: (sink.append(len(x)), x * 2)[1])
    assert firsts(jitted, ones(device)) == [2.0] * 6
    assert len(sink) == 2 and counters(jitted) == (1, 1, 4, 0)
    # A list that the function reads is guarded by its length: then it never replays.
    jitted = cgt.jit(lambda x: (log.append(len(x)), x * len(log))[1])
    firsts(jitted, ones(device))
    assert len(log) == 6 and cgt.stats(jitted).replays == 0
    log.clear()
    jitted = cgt.jit(lambda x: (log.append(len(x)), x * 2)[1])  # instead: a list, and do not read it
    firsts(jitted, ones(device))
    assert len(log) == 6 and cgt.stats(jitted).replays == 4
    log.clear()
    jitted = cgt.jit(lambda x: x * 2)  # instead: append outside
    for _ in range(4):
        log.append(jitted(ones(device)).shape[0])
    assert len(log) == 4 and cgt.stats(jitted).replays >= 1


@footgun("A counter that the function reads and looks at keeps it from replaying")
def test_counter_that_the_function_computes_with_replays_and_one_that_it_looks_at_does_not(device):
    steps = 0

    def f(x):
        nonlocal steps
        steps += 1
        return x * steps

    jitted = cgt.jit(f)
    assert firsts(jitted, ones(device)) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert counters(jitted) == (1, 1, 3, 1)
    steps = 0

    def looks(x):
        nonlocal steps
        steps += 1
        return x * float(str(steps))

    jitted = cgt.jit(looks)
    assert firsts(jitted, ones(device)) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert cgt.stats(jitted).replays == 0
    count = torch.zeros((), device=device)

    def on_tensor(x):  # instead: count in a tensor
        count.add_(1)
        return x * count

    jitted = cgt.jit(on_tensor)
    assert firsts(jitted, ones(device)) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert counters(jitted) == (1, 1, 4, 0)


@footgun("A mutable default argument that grows keeps the function from replaying")
def test_mutable_default_is_guarded_and_one_that_changes_records_each_time(device):
    def f(x, seen=[]):  # noqa: B006
        seen.append(1)
        return x * len(seen)

    jitted = cgt.jit(f)
    assert firsts(jitted, ones(device)) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert cgt.stats(jitted).replays == 0

    def constant(x, seen=(1, 2)):  # instead: defaults that stay
        return x * len(seen)

    jitted = cgt.jit(constant)
    assert firsts(jitted, ones(device)) == [2.0] * 6
    assert counters(jitted) == (1, 1, 4, 0)


@footgun("Clocks, `random`, NumPy's random numbers, files and iterators keep the function from replaying")
@pytest.mark.parametrize("source", ["clock", "random", "numpy", "iterator"])
def test_values_that_python_makes_are_those_of_eager(device, source):
    numbers = iter(range(1, 1000))
    read = {
        "clock": time.perf_counter_ns,
        "random": random.random,
        "numpy": numpy.random.rand,
        "iterator": lambda: next(numbers),
    }[source]
    jitted = cgt.jit(lambda x: x * read())
    x = ones(device, 3).double()
    assert len(set(firsts(jitted, x))) == 6 and cgt.stats(jitted).replays == 0
    jitted = cgt.jit(lambda x, number: x * number)  # instead: pass the value as a tensor
    number = torch.zeros((), device=device, dtype=torch.float64)
    for _ in range(6):
        value = float(read())
        number.fill_(value)
        assert jitted(x, number)[0].item() == value
    assert counters(jitted) == (1, 1, 4, 0)


@footgun("A clock that a builtin function reads is not noticed")
def test_clock_that_is_read_by_a_builtin_goes_unnoticed(device):
    read = functools.partial(time.perf_counter)
    jitted, x = cgt.jit(lambda x: x * read()), ones(device).double()
    assert len(set(firsts(jitted, x))) == 2 and counters(jitted) == (1, 1, 4, 0)
    jitted = cgt.jit(lambda x: x * time.perf_counter())  # instead
    assert len(set(firsts(jitted, x))) == 6


@footgun("Seeding a generator, or making one, inside the function keeps it from replaying")
@pytest.mark.parametrize("how", ["seeded", "made"])
def test_generator_seeded_or_made_inside_runs_eagerly(device, how):
    def f(x):
        if how == "seeded":
            torch.manual_seed(3)
            return x + torch.rand_like(x)
        generator = torch.Generator(x.device)
        generator.manual_seed(3)
        return x + torch.rand(x.shape, generator=generator, device=x.device)

    jitted = cgt.jit(f)
    x = ones(device)
    assert len(set(firsts(jitted, x))) == 1
    assert cgt.stats(jitted).replays == 0
    jitted = cgt.jit(lambda x: x + torch.rand_like(x))  # instead: seed outside
    values = []
    for _ in range(4):
        torch.manual_seed(3)
        values += firsts(jitted, x, calls=1)
    assert len(set(values)) == 1 and counters(jitted) == (1, 1, 2, 0)


# --- what is guarded, and what is not ------------------------------------------------------------


@footgun("State of libraries, or behind objects of C's, is noticed by the next audit")
@pytest.mark.parametrize("function, change", AMBIENT.values(), ids=AMBIENT.keys())
def test_state_that_no_guard_compares_is_told_by_the_next_audit(device, function, change, monkeypatch):
    monkeypatch.chdir("/")
    monkeypatch.setattr(sys, "argv", [*sys.argv, "1"])
    monkeypatch.setenv("CGT_OF_A_TEST", "1")
    monkeypatch.setattr(torch, "cgt_of_a_test", 1, raising=False)
    jitted, x = cgt.jit(function, audit=AUDITS_BY_DEFAULT), ones(device)
    change(1)
    before = function(x)
    while cgt.stats(jitted).replays < 2:  # warmed (twice where it could take from a stream), recorded, audited twice
        assert torch.equal(jitted(x), before)
    change(5)
    after = function(x)
    assert not torch.equal(before, after) and torch.equal(jitted(x), before), "nothing noticed it"
    with pytest.warns(cgt.CgtWarning, match="Eager's values stand"):
        assert torch.equal(jitted(x), after)  # the fourth replay
    assert torch.equal(jitted(x), after) and "CGT225" in cgt.explain(jitted) and cgt.stats(jitted).replays == 4
    change(1)
    given = cgt.jit(lambda x, by: x * by)  # instead: an argument
    for k in (1.0, 1.0, 1.0, 5.0):
        assert firsts(given, x, k, calls=1) == [k]


@footgun("A set or deque that changes in place is not noticed")
@pytest.mark.parametrize("make, read, change", IN_PLACE.values(), ids=IN_PLACE.keys())
def test_change_inside_a_container_that_is_guarded_by_identity_goes_unnoticed(device, make, read, change):
    numbers = make([1, 2])
    jitted = cgt.jit(lambda x: x * read(numbers))
    x = ones(device)
    assert firsts(jitted, x, calls=3) == [3.0] * 3
    change(numbers)
    assert firsts(jitted, x, calls=1) == [3.0]
    assert "numbers is a" in cgt.explain(jitted)
    assert "guarded by identity, not by its contents" in cgt.explain(jitted)
    changed = [1, 2]
    jitted = cgt.jit(lambda x: x * sum(changed))
    assert firsts(jitted, x, calls=3) == [3.0] * 3
    changed.remove(2)
    assert firsts(jitted, x, calls=1) == [1.0], "instead: a list, tuple or dict"


@footgun("The contents of a NumPy array are read once")
def test_numpy_array_in_a_closure_is_guarded_by_identity(device):
    array = numpy.ones(3, dtype="float32")
    jitted = cgt.jit(lambda x: x * float(array[0]))
    x = ones(device)
    assert firsts(jitted, x, calls=3) == [1.0] * 3
    array[0] = 5
    assert firsts(jitted, x, calls=1) == [1.0]
    assert "ndarray: guarded by identity" in cgt.explain(jitted)
    jitted = cgt.jit(lambda x, t: x * t[0])  # instead: as a tensor, made outside
    for value in range(5):
        array[0] = value
        assert firsts(jitted, x, torch.from_numpy(array).to(device), calls=1) == [float(value)]


@footgun("An attribute whose name is computed is not guarded")
def test_attribute_read_by_a_computed_name_goes_unnoticed(device):
    class Settings:
        pass

    settings, part = Settings(), "ale"
    settings.scale = 1.0
    jitted = cgt.jit(lambda x: x * vars(settings)["sc" + part])
    x = ones(device)
    assert firsts(jitted, x, calls=3) == [1.0] * 3
    settings.scale = 5.0
    assert firsts(jitted, x, calls=1) == [1.0]
    jitted = cgt.jit(lambda x: x * settings.scale)  # instead: by its name
    assert firsts(jitted, x, calls=3) == [5.0] * 3
    settings.scale = 7.0
    assert firsts(jitted, x, calls=1) == [7.0]


@footgun("What functools.lru_cache remembers is read once")
def test_cleared_cache_goes_unnoticed(device):
    config = {"scale": 1.0}

    @functools.lru_cache
    def scale():
        return config["scale"]

    jitted = cgt.jit(lambda x: x * scale())
    x = ones(device)
    assert firsts(jitted, x, calls=3) == [1.0] * 3
    config["scale"] = 5.0
    assert firsts(jitted, x, calls=3) == [1.0] * 3  # as in eager: it is remembered
    scale.cache_clear()
    assert firsts(jitted, x, calls=1) == [1.0]
    cgt.reset(jitted)  # instead
    assert firsts(jitted, x, calls=4) == [5.0] * 4


@footgun("Context variables, thread locals and weak references are read once")
def test_context_variable_goes_unnoticed(device):
    scale = contextvars.ContextVar("scale", default=1.0)
    jitted = cgt.jit(lambda x: x * scale.get())
    x = ones(device)
    assert firsts(jitted, x, calls=3) == [1.0] * 3
    assert "scale is a ContextVar: guarded by identity" in cgt.explain(jitted)
    scale.set(5.0)
    assert firsts(jitted, x, calls=1) == [1.0]
    jitted = cgt.jit(lambda x, scale: x * scale)
    assert firsts(jitted, x, scale.get(), calls=4) == [5.0] * 4  # instead


@footgun("Another order of a dict's keys in a variable is not noticed")
def test_order_of_keys_in_a_closure_goes_unnoticed(device):
    steps = {"double": 2.0, "add": 1.0}

    def apply(x, steps):
        for name, number in steps.items():
            x = x * number if name == "double" else x + number
        return x

    jitted = cgt.jit(lambda x: apply(x, steps))
    x = ones(device)
    assert firsts(jitted, x, calls=3) == [3.0] * 3
    steps["double"] = steps.pop("double")
    assert firsts(jitted, x, calls=1) == [3.0]
    assert firsts(cgt.jit(apply), x, steps, calls=4) == [4.0] * 4  # instead: an argument


@footgun("Replacing an object's `__dict__` or `__class__` is not noticed")
@pytest.mark.parametrize("what", ["__dict__", "__class__"])
def test_replaced_dict_or_class_of_an_object_goes_unnoticed(device, what):
    class Scale:
        def __init__(self, value):
            self.value = value

        def of(self, x):
            return x * self.value

    class Other(Scale):
        def of(self, x):
            return x * 5

    scale, x = Scale(1.0), ones(device)
    jitted = cgt.jit(lambda x: scale.of(x))
    assert firsts(jitted, x, calls=3) == [1.0] * 3
    setattr(scale, what, {"value": 5.0} if what == "__dict__" else Other)
    assert firsts(jitted, x, calls=1) == [1.0]
    scale = Other(5.0)  # instead: another object
    assert firsts(jitted, x, calls=4) == [5.0] * 4
    assert cgt.stats(jitted).replays >= 3


@footgun("Hooks that come with another argument are not noticed")
def test_hook_of_another_argument_goes_unnoticed(device):
    def gradient(leaf):
        leaf.square().sum().backward()
        return leaf.grad.clone()

    def leaf(scale=None):
        made = ones(device).requires_grad_()
        if scale is not None:
            made.register_hook(lambda g: g * scale)
        return made

    jitted = cgt.jit(gradient, inputs="copied")
    assert [firsts(jitted, leaf(), calls=1)[0] for _ in range(5)] == [2.0] * 5
    assert firsts(jitted, leaf(5.0), calls=1) == [2.0]
    cgt.reset(jitted)  # recorded with a hook, it is right for others
    assert [firsts(jitted, leaf(k), calls=1)[0] for k in (1.0, 2.0, 3.0)] == [2.0, 4.0, 6.0]
    jitted = cgt.jit(lambda leaf, scale: gradient(leaf) * scale, inputs="copied")
    assert [firsts(jitted, leaf(), 5.0, calls=1)[0] for _ in range(5)] == [10.0] * 5  # instead


@footgun("Python attributes of a tensor are not guarded")
def test_attribute_of_a_tensor_goes_unnoticed(device):
    x = ones(device)
    x.scale = 1.0
    jitted = cgt.jit(lambda x: x * x.scale)
    assert firsts(jitted, x, calls=3) == [1.0] * 3
    x.scale = 5.0
    assert firsts(jitted, x, calls=1) == [1.0]
    jitted = cgt.jit(lambda x, scale: x * scale)  # instead: an argument of its own
    for scale in (1.0, 1.0, 1.0, 5.0):
        assert firsts(jitted, x, scale, calls=1) == [scale]


@footgun("`_version`, `retains_grad`, `storage_offset()` and `_base` of an argument are not guarded")
def test_version_of_an_argument_is_not_guarded(device):
    f = cgt.jit(lambda x: x * (2 if x._version == 0 else 3))
    x = ones(device)
    assert firsts(f, x) == [2.0] * 6
    x.add_(0)
    assert firsts(f, x) == [2.0] * 6  # eager: 3
    g = cgt.jit(lambda x, changed: x * (3 if changed else 2))  # instead: a flag
    assert firsts(g, x, True) == [3.0] * 6 and firsts(g, x, False) == [2.0] * 6


@footgun("`x is y` between an argument and another tensor is decided when it is recorded")
def test_identity_of_an_argument_and_a_closure_tensor_is_not_guarded_once_copied(device):
    special, other = ones(device), ones(device)
    jitted = cgt.jit(lambda x: x * (2 if x is special else 3), inputs="copied")
    assert firsts(jitted, other, calls=3) == [3.0] * 3
    assert firsts(jitted, special, calls=1) == [3.0], "eager: 2"
    jitted = cgt.jit(lambda x, flag: x * (2 if flag else 3), inputs="copied")  # instead: a flag
    assert firsts(jitted, other, False, calls=3) == [3.0] * 3
    assert firsts(jitted, special, True, calls=3) == [2.0] * 3


@footgun("An object of your own is compared by identity: a new one is a new recording")
def test_new_object_at_each_call_never_replays(device):
    class Settings:
        def __init__(self, scale):
            self.scale = scale

    jitted = cgt.jit(lambda x, settings: x * settings.scale)
    x = ones(device)
    for _ in range(4):
        assert jitted(x, Settings(2.0))[0].item() == 2.0
    assert cgt.stats(jitted).replays == 0
    kept = Settings(2.0)
    assert firsts(jitted, x, kept, calls=4) == [2.0] * 4  # instead: keep it, or pass plain values
    assert cgt.stats(jitted).replays == 3


@footgun("Objects that are equal are taken for one another")
def test_equal_object_stands_for_the_recorded_one(device):
    class Settings:
        def __init__(self, name, scale):
            self.name, self.scale = name, scale

        def __eq__(self, other):
            return self.name == other.name

        def __hash__(self):
            return hash(self.name)

    jitted = cgt.jit(lambda x, settings: x * settings.scale)
    x = ones(device)
    assert firsts(jitted, x, Settings("a", 1.0), calls=3) == [1.0] * 3
    assert firsts(jitted, x, Settings("a", 5.0), calls=1) == [1.0]
    assert firsts(jitted, x, Settings("b", 5.0), calls=3) == [5.0] * 3  # instead: say that it differs
    assert cgt.stats(jitted).replays == 4


@footgun("The order of a dict's keys is part of its structure")
def test_dict_with_another_order_of_keys_is_recorded_for_itself(device):
    a, b = ones(device), ones(device) * 2
    jitted = cgt.jit(lambda d: d["a"] - d["b"])
    for k in range(8):
        d = {"a": a, "b": b} if k % 2 else {"b": b, "a": a}
        assert jitted(d)[0].item() == -1.0
    assert counters(jitted) == (1, 2, 5, 0)


@footgun("Every new shape, dtype, string or number that is looked at is a new recording")
def test_each_new_value_records_and_past_the_limit_runs_eagerly(device):
    x = ones(device)
    jitted = cgt.jit(lambda x, k: x * float(str(k)), max_records=3)
    assert [firsts(jitted, x, k, calls=1)[0] for k in range(6)] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert counters(jitted) == (1, 3, 0, 2)
    jitted = cgt.jit(lambda x, k: x * k)  # one that is only computed with
    assert [firsts(jitted, x, k, calls=1)[0] for k in range(6)] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert counters(jitted) == (1, 1, 4, 0)
    jitted = cgt.jit(lambda x, k: x * k)  # instead: a tensor, whose value may change
    k = torch.zeros((), device=device)
    for value in range(6):
        k.fill_(value)
        assert firsts(jitted, x, k, calls=1) == [float(value)]
    assert counters(jitted) == (1, 1, 4, 0)


# --- results -----------------------------------------------------------------------------------


@footgun("A result that is still held costs a copy at the next iteration")
def test_held_result_is_rescued_and_a_dropped_one_costs_nothing(device):
    x = ones(device)
    jitted = cgt.jit(lambda x: x * 2)
    for _ in range(6):
        y = jitted(x)  # at each call, the variable still holds the last result
    stats = cgt.stats(jitted)
    assert (stats.replays, stats.rescues, stats.rescued_bytes) == (4, 4, 4 * 12)
    assert "were still held" in cgt.explain(jitted)
    for _ in range(6):
        y = None  # instead: drop it first
        y = jitted(x)
    assert cgt.stats(jitted).rescues == 4 and y is not None


@footgun("Feeding a result back as the next input copies it")
def test_loop_over_its_own_result_rescues_it(device):
    jitted = cgt.jit(lambda x: x + 1)
    x = torch.zeros(3, device=device)
    for _ in range(10):
        x = jitted(x)
    assert x[0].item() == 10.0
    stats = cgt.stats(jitted)
    assert stats.replays >= 6 and stats.copied_bytes == 0 and stats.rescues >= stats.replays - 2
    state = torch.zeros(3, device=device)

    def in_place(x):  # instead: state that is changed in place
        x.add_(1)

    jitted = cgt.jit(in_place)
    for _ in range(10):
        jitted(state)
    assert state[0].item() == 10.0
    stats = cgt.stats(jitted)
    assert (stats.replays, stats.copied_bytes, stats.rescues) == (8, 0, 0)
    jitted = cgt.jit(lambda x: x + 1)
    for _ in range(10):  # or: several calls in an iteration
        cgt.step()
        x = torch.zeros(3, device=device)
        for _ in range(4):
            x = jitted(x)
        assert x[0].item() == 4.0
    stats = cgt.stats(jitted)
    # The first call's input is new every time; the others read the path, and nothing is rescued but the last result.
    assert stats.records <= 8 and stats.replays >= 30 and stats.rescues <= 10


@footgun("The same tensor object comes back, so attributes left on a result are not lasting")
def test_attribute_set_inside_is_there_only_when_the_function_runs(device):
    def f(x):
        y = x * 2
        y.tag = "mine"
        return y

    jitted = cgt.jit(f)
    tags = [getattr(jitted(ones(device)), "tag", None) for _ in range(5)]
    assert tags == ["mine", None, None, None, None]
    double, log = cgt.jit(lambda x: x * 2), []
    for k in range(6):
        y = double(ones(device))
        weakref.finalize(y, log.append, k)
        del y
        assert log == list(range(max(k, 1)))  # one call late, but for the first
    for k in range(6, 9):  # instead: watch a copy
        y = double(ones(device)).clone()
        weakref.finalize(y, log.append, k)
        del y
        assert log[-1] == k
    jitted = cgt.jit(lambda x: (x * 2, "mine"))  # instead: return it
    assert [jitted(ones(device))[1] for _ in range(5)] == ["mine"] * 5
    assert cgt.stats(jitted).replays >= 2


@footgun("A list, dict or dataclass in the result is a new one at each call")
def test_containers_in_the_result_are_new(device):
    def f(state):
        state["x"].add_(1)
        return state

    jitted, state = cgt.jit(f), {"x": ones(device)}
    found = [jitted(state) for _ in range(5)]
    assert found[0] is state and all(r is not state and r["x"] is state["x"] for r in found[2:])
    assert state["x"][0].item() == 6.0  # instead: the one that was passed


@footgun("A padded reduction can be right for some values and wrong for others")
def test_padded_maximum_of_rows_depends_on_the_fill(device):
    def f(x):
        return x.amax(0)

    f, right = cgt.jit(f, pad={"x": {0: (8,)}}, audit=AUDITS_BY_DEFAULT), cgt.jit(f, pad={"x": cgt.Pad({0: (8,)}, float("-inf"))})
    x = ones(device, 5, 2)
    for _ in range(9):  # the first is not padded, and the 8th and 16th of those that are will be compared
        assert torch.equal(f(x), x[0]) and torch.equal(right(x), x[0])
    assert cgt.stats(f).replays >= 3 and cgt.stats(right).replays >= 3
    found = [f(-x) for _ in range(8)]
    assert torch.equal(found[0], 0 * x[0]) and torch.equal(found[-1], -x[0]) and "CGT236" in cgt.explain(f)
    assert torch.equal(right(-x), -x[0])


@footgun("A view of another result has no `_base`")
def test_views_among_results_share_memory_but_have_no_base(device):
    def f(x):
        y = x * 2
        return y, y[1:]

    x = ones(device)
    jitted = cgt.jit(f)
    have = []
    for _ in range(5):
        y, part = jitted(x)
        have.append(part._base is y)
        part.fill_(7)
        assert y[2].item() == 7.0 and part.data_ptr() == y[1:].data_ptr()
        del y, part
    assert have == [True, False, False, False, False]
    for _ in range(3):  # instead: take the view outside, on the result
        y, _ = jitted(x)
        assert y[1:]._base is y
        del y, _
    view = cgt.jit(lambda x: x.view(3, 1))  # a view of an argument has it
    assert [view(x)._base is x for _ in range(5)] == [True] * 5


@footgun("A loss returned after its backward is detached")
def test_loss_after_backward_is_detached_once_recorded(device):
    w, x = torch.ones(3, device=device, requires_grad=True), ones(device)

    def step(x):
        loss = (w * x).sum()
        loss.backward()
        return loss

    jitted = cgt.jit(step)
    needs = []
    for k in range(5):
        w.grad = None
        loss = jitted(x)
        needs.append(loss.requires_grad)
        assert loss.item() == 3.0 and torch.equal(w.grad, ones(device)), k
        del loss
    assert needs == [True, False, False, False, False]
    assert cgt.stats(jitted).replays == 3


@footgun("Double backward runs a replayed call once more")
def test_double_backward_through_a_replayed_call(device):
    w = torch.ones(3, device=device, requires_grad=True)
    jitted, x = cgt.jit(lambda x: (w * x).exp().sum()), ones(device)
    for _ in range(4):
        torch.autograd.grad(jitted(x), w)
    (first,) = torch.autograd.grad(jitted(x), w, create_graph=True)
    assert torch.equal(torch.autograd.grad(first.sum(), w)[0], ones(device).exp())
    jitted = cgt.jit(lambda x: (w * x.bernoulli()).exp().sum())
    for _ in range(4):
        torch.autograd.grad(jitted(x), w)
    with pytest.raises(cgt.CgtError, match="__wrapped__"):
        torch.autograd.grad(jitted(x), w, create_graph=True)
    torch.autograd.grad(jitted(x), w, create_graph=True)  # from then on eagerly


@footgun("A history that was used up raises even where its gradient is not needed")
def test_history_that_was_used_up_behind_an_unused_result(device):
    w = torch.ones(3, device=device, requires_grad=True)
    jitted = cgt.jit(lambda h, x: (h.sin(), x * w))
    for k in range(5):
        h = (w * 2).exp()
        h.sum().backward()
        if k > 1:  # recorded and replayed
            with pytest.raises(RuntimeError, match="second time"):
                jitted(h, ones(device))[1].sum().backward()
        jitted.__wrapped__(h, ones(device))[1].sum().backward()
        jitted(h.detach(), ones(device))[1].sum().backward()

    h = (w * 2).exp()
    history = h * 1
    h.mul_(2)  # which exp saved
    jitted.__wrapped__(history, ones(device))[1].sum().backward()
    with pytest.raises(RuntimeError, match="inplace"):
        jitted(history, ones(device))[1].sum().backward()

    scale = torch.ones(3, device=device)
    history = cgt.jit(lambda a: a * scale)(w * 1)  # its first call: PyTorch's own graph
    scale.mul_(2)
    with pytest.raises(RuntimeError, match="inplace.* is at version 1; expected version 0 instead"):
        jitted(history, ones(device))[1].sum().backward()

    class Third(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            return a * 3

        @staticmethod
        def backward(ctx, grad):
            return grad * 3

    w.grad = None
    u = torch.ones(3, device=device, requires_grad=True)
    jitted(Third.apply(u), ones(device))[1].sum().backward()
    assert torch.equal(u.grad, torch.zeros_like(u)) and torch.equal(w.grad, ones(device)), "eager: u.grad is None"

    class First(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            return a * b

        @staticmethod
        def backward(ctx, grad):
            return grad * 2, None

    before, after = cgt.jit(lambda x: (w * x).exp()), cgt.jit(lambda h: First.apply(w, h))
    for k in range(5):
        h = before(ones(device))
        h.sum().backward()
        w.grad = None
        if k > 1:
            after(h).sum().backward()
            assert torch.equal(w.grad, 2 * ones(device))
        with pytest.raises(RuntimeError, match="second time"):
            h = before.__wrapped__(ones(device))
            h.sum().backward()
            after.__wrapped__(h).sum().backward()


@footgun("What a backward's own code reads is that of the forward")
def test_state_that_changes_between_forward_and_backward(device):
    scale, kept = {"number": 1.0}, torch.ones((), device=device)

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * scale["number"] * kept

    def gradient(f, w, late):
        w.grad = None
        y = f(w)
        scale["number"] = late
        y.sum().backward()
        scale["number"] = 1.0
        return w.grad[0].item()

    w, f = ones(device).requires_grad_(), cgt.jit(lambda x: Scaled.apply(x * 1))
    assert [gradient(f, w, 1.0) for _ in range(8)] == [1.0] * 8
    assert gradient(f, w, 5.0) == 1.0, "eager: 5"
    kept.fill_(5.0)  # instead
    assert gradient(f, w, 1.0) == 5.0


@footgun("Hooks of parameters fire together, after the whole backward of a jitted function")
def test_order_of_hooks(device):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(3, 3).to(device) for _ in range(3)]
    jitted, order = cgt.jit(lambda x: layers[2](layers[1](layers[0](x))).sum()), []
    for k, layer in enumerate(layers):
        layer.weight.register_hook(lambda g, k=k: order.append((k, g.sum().item())))
    found = []
    for f in (jitted.__wrapped__, jitted, jitted, jitted, jitted):
        f(ones(device)).backward()
        found.append(sorted(order))
        order.clear()
    assert found == [found[0]] * 5  # each once, with the same gradients; the order may be another


@footgun("A hook of several tensors belongs outside of the function")
@pytest.mark.parametrize("inside", [True, False])
def test_hook_of_several_tensors_that_the_function_leaves(device, inside):
    def counts(wrap):
        w, v, heard, found = ones(device).requires_grad_(), ones(device).requires_grad_(), [], []
        listen = lambda x: torch.autograd.graph.register_multi_grad_hook([w, x], heard.append)  # noqa: E731
        f = wrap(lambda x: (listen(x) if inside else None, x.detach() * w.detach())[1])
        for _ in range(6):
            h = v * 2
            if not inside:  # instead
                listen(h)
            f(h)
            (h * w).sum().backward()
            found.append(len(heard))
        return found

    as_eager = counts(cgt.jit) == counts(lambda f: f)
    assert as_eager == (not inside or device.type == "cpu")


@footgun("Gradients that add up over several calls want `cgt.step()`")
def test_gradients_that_add_up_replay_behind_a_step(device):
    def train(each):
        w, x = torch.ones(3, device=device, requires_grad=True), torch.arange(3.0, device=device)
        micro = cgt.jit(lambda x: (w * x).sum().backward())
        for _ in range(10):
            if each:
                cgt.step()
            w.grad = None
            for _ in range(3):
                micro(x)
            assert torch.equal(w.grad, 3 * x)
        return cgt.stats(micro)

    assert train(each=False).rescues > 0
    stats = train(each=True)
    assert stats.eager == 0 and stats.replays >= 20


@footgun("In one autocast region around several calls each call casts the weights again")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts_of_weights_do_not_outlive_a_call(device, dtype):
    def train(wrap, around_all, cache):
        def region():
            return torch.autocast(device.type, dtype, cache_enabled=cache)

        w = torch.eye(3, device=device, requires_grad=True)

        def step(x):
            w.grad = None
            with region():
                loss = (x @ w).float().square().mean()
            loss.backward()
            with torch.no_grad():
                w.sub_(w.grad, alpha=0.01)
            return loss.detach()

        f, x = wrap(step), torch.zeros(2, 3, device=device)
        with region() if around_all else contextlib.nullcontext():
            losses = [f(x.fill_(k + 1.0)).item() for k in range(6)]
        assert wrap is not cgt.jit or counters(f) == (1, 1, 4, 0), cgt.stats(f).reasons
        return losses

    stale, fresh = (train(lambda f: f, True, cache) for cache in (True, False))
    assert stale != fresh  # eager goes on with the casts of the first weights
    assert train(cgt.jit, True, True) == fresh
    assert train(cgt.jit, True, False) == fresh  # instead: no cache,
    # or a region of its own for each call
    assert train(cgt.jit, False, True) == train(lambda f: f, False, True) == fresh


@footgun("A jitted module that recomputes, or has hooks of its backward, is let go of by `cgt.unjit`")
@pytest.mark.parametrize("how", ["checkpoint", "hook"])
def test_jitted_module_whose_graph_holds_it_is_let_go_of_by_hand(device, how):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 3)

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=False) if how == "checkpoint" else self.block(x)

        def block(self, x):
            return self.layer(x).relu()

    def gone(let_go):
        model = cgt.jit(Net().to(device))
        if how == "hook":
            model.register_full_backward_hook(lambda *_: None)
        for _ in range(4):
            model(ones(device).requires_grad_()).sum().backward()
        assert cgt.stats(model).replays >= 1, cgt.explain(model)
        there = weakref.ref(model.layer.weight)
        let_go(model)
        del model
        gc.collect()
        cgt.step()
        gc.collect()
        return there() is None

    assert not gone(lambda model: None)
    cgt.reset()
    gc.collect()
    assert gone(cgt.unjit)  # instead


@footgun("What has a jitted module's `__dict__` calls that module")
def test_copy_of_the_dict_of_a_jitted_module(device):
    model = cgt.jit(torch.nn.Linear(3, 3).to(device)).requires_grad_(False)
    replica, x = model._replicate_for_data_parallel(), ones(device)
    replica.weight, replica.bias = torch.zeros_like(model.weight), torch.zeros_like(model.bias)
    assert torch.equal(replica(x), model(x)) and not torch.equal(replica(x), replica.forward(x))
    cgt.unjit(replica)  # instead
    assert replica(x).tolist() == [0.0] * 3 and "_compiled_call_impl" in vars(model)
    assert all(torch.equal(model(x), model.forward(x)) for _ in range(4)) and cgt.stats(model).replays
    for copied in (copy.copy(model), copy.deepcopy(model)):
        assert copied._compiled_call_impl is None and torch.equal(copied(x), model.forward(x))


class Doubles(torch.nn.Module):
    def forward(self, x):
        return x * 2


@footgun("torch.compile with fullgraph=True finds nothing to compile in what is jitted")
def test_what_is_jitted_is_a_break_of_what_is_compiled_around_it(device):
    def compiled(what):
        torch._dynamo.reset()
        return torch.compile(what, backend=lambda graph, _: graphs.append(graph.code) or graph.forward, fullgraph=True)

    x, graphs, model = ones(device), [], Doubles()
    in_place, function = cgt.jit(Doubles()), cgt.jit(lambda x: x * 2)
    model.forward = cgt.jit(model.forward)
    want = [[called(x) for called in (model, in_place, function)] for _ in range(4)][-1][0]
    for called in (model, in_place, function, lambda x: model(x) + 1, lambda x: function(x) + 1):
        with contextlib.suppress(RuntimeError):  # older releases of torch raise nothing
            compiled(called)(x)
    assert " * 2" not in "".join(graphs)
    assert torch.equal(compiled(lambda x: in_place(x) + 1)(x), want + 1) and " * 2" in graphs[-1]
    model.forward = cgt.unjit(model.forward)  # instead
    assert all(" * 2" in (compiled(f)(x), graphs.pop())[1] for f in (model, cgt.unjit(in_place), cgt.unjit(function)))
    f = cgt.jit(compiled(model))  # instead
    assert all(torch.equal(f(x), want) for _ in range(6)) and cgt.stats(f).replays


@footgun("A list that grows, and that the function reads, keeps it from replaying")
def test_tensor_that_outlives_the_call_without_being_returned_runs_eagerly(device):
    history, x = [], ones(device)
    jitted = cgt.jit(lambda x: (history.append(x * 2), x + len(history) - len(history) + 1)[1])
    for k in range(5):
        assert jitted(x * k)[0].item() == k + 1.0
    assert [h[0].item() for h in history] == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert cgt.stats(jitted).replays == 0
    assert any("outlives the call" in reason for reason in cgt.stats(jitted).reasons)
    jitted = cgt.jit(lambda x: (x + 1, x * 2))  # instead: return it
    for _ in range(5):
        history.append(jitted(x)[1])
    assert cgt.stats(jitted).replays == 3
    assert [h[0].item() for h in history[5:]] == [2.0] * 5
    jitted = cgt.jit(lambda x: (history.append(x * 2), x + 1)[1])  # instead: do not read it
    for k in range(5):
        assert jitted(x * k)[0].item() == k + 1.0
    assert [h[0].item() for h in history[10:]] == [0.0, 2.0, 4.0, 6.0, 8.0] and cgt.stats(jitted).replays == 3


# --- where the function runs --------------------------------------------------------------------


@footgun("On the CPU, an op that raises in a replay leaves counters, attributes and gradients as they were")
def test_python_state_is_left_by_a_replay_that_raises():
    table, state = torch.arange(12.0).view(6, 2), types.SimpleNamespace(n=0)

    def f(index):
        state.n += 1
        return torch.nn.functional.embedding(index, table) * state.n

    jitted = cgt.jit(f)
    for _ in range(5):
        jitted(torch.tensor([1]))
    with pytest.raises(IndexError):
        jitted(torch.tensor([9]))
    assert state.n == 5 and cgt.stats(jitted).replays >= 2
    with pytest.raises(IndexError):
        f(torch.tensor([9]))
    assert state.n == 6
    checked = lambda index: jitted(index) if index.max() < len(table) else None  # noqa: E731
    assert checked(torch.tensor([9])) is None and checked(torch.tensor([1])).tolist() == [[14.0, 21.0]], "instead: check before"


@footgun("Both bodies of torch.cond run when they are recorded, and an endless while_loop is endless")
def test_bodies_run_for_their_recording(device):
    x = ones(device)

    def no(x):
        print("no")
        return x - 1

    jitted = cgt.jit(lambda x: torch.cond(x.sum() > 0, lambda x: x + 1, no, (x,)))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert firsts(jitted, x) == [2.0] * 6 and firsts(jitted, -x, calls=1) == [-2.0]
    assert 1 <= out.getvalue().count("no") <= 3 and cgt.stats(jitted).replays >= 4
    bounded = cgt.jit(lambda x: while_loop(lambda x, k: (x.sum() > 0) & (k < 5), lambda x, k: (x + 1, k + 1), (x, k)))  # instead
    k = torch.zeros((), dtype=torch.int64, device=device)
    assert [bounded(x)[1].item() for _ in range(4)] == [5] * 4 and cgt.stats(bounded).replays == 2


@footgun("A number that is read and becomes a text or C's keeps the function from replaying")
def test_number_that_is_worked_with_runs_eagerly(device):
    jitted = cgt.jit(lambda x: x * 2 if float(x.sum()) + 1 > 0 else -x)
    x = ones(device)
    assert firsts(jitted, x) == [2.0] * 6 and firsts(jitted, -x) == [1.0] * 6
    assert cgt.stats(jitted).replays == 0
    ways = (
        lambda x: torch.where(x.sum() > 0, x * 2, -x), lambda x: x * 2 if x.sum() > 0 else -x,
        lambda x: x * 2 if x.sum().item() > 0 else -x, lambda x: x * 2 if x.sum().item() + 1 > 0 else -x,
    )  # fmt: skip
    for function in ways:  # instead
        jitted = cgt.jit(function)
        assert firsts(jitted, x) == [2.0] * 6 and firsts(jitted, -x, calls=1) == [1.0]
        assert cgt.stats(jitted).replays >= 4
    returned = cgt.jit(lambda x: (x * 2, x.sum().item()))
    assert [returned(x)[1] for _ in range(6)] == [3.0] * 6 and cgt.stats(returned).replays >= 4


@footgun("A function marked cgt.eager gets copies, and is called with what the recording was")
def test_eager_parts_get_copies(device):
    kept, calls = [], []

    @cgt.eager
    def part(y):
        kept.append(y)
        calls.append(0)
        return y[: 2 if len(calls) == 5 else 3] * 2  # not like what was recorded: the rest of that call is eager

    @cgt.jit
    def f(x):
        y = x * 2
        n = part(y).sum()
        y[0] = 7
        return y + n

    x = ones(device)
    assert firsts(f, x, calls=8) == [19.0] * 4 + [15.0] + [19.0] * 3
    assert [t[0].item() for t in kept[2:4]] == [2.0, 2.0]  # where a replay called it: not 7
    assert cgt.stats(f).replays >= 4 and len(calls) == 8, cgt.explain(f)
    keep = cgt.eager(lambda y: kept.append(y.clone()))  # instead
    f = cgt.jit(lambda x: (keep(x), x + 1)[1])
    assert firsts(f, x) == [2.0] * 6 and [t[0].item() for t in kept[-6:]] == [1.0] * 6


@footgun("Under torch.set_default_device or another mode every call runs eagerly")
def test_default_device_is_a_mode_that_switches_recording_off(device):
    jitted = cgt.jit(lambda x: x * 2)
    x = ones(device)
    firsts(jitted, x, calls=3)
    with torch.device(device):
        assert firsts(jitted, x, calls=3) == [2.0] * 3
    assert counters(jitted) == (1, 1, 1, 3)
    assert any("set_default_device" in reason for reason in cgt.stats(jitted).reasons)
    assert firsts(jitted, x, calls=1) == [2.0]  # instead: name the device where tensors are made
    assert counters(jitted) == (1, 1, 2, 3)


@footgun("A CPU tensor in a function on the GPU runs eagerly, unless it is one number or is only moved there")
def test_cpu_tensor_in_a_gpu_function_runs_eagerly():
    if not torch.cuda.is_available():
        pytest.skip("says something about GPUs")
    x, table = torch.ones(3, device="cuda"), torch.ones(3)
    jitted = cgt.jit(lambda x, table: x + (table * 2).to(x.device))
    assert firsts(jitted, x, table) == [3.0] * 6
    assert cgt.stats(jitted).replays == 0
    jitted = cgt.jit(lambda x, table: x + table.to(x.device) * 2)  # instead: move it first
    assert firsts(jitted, x, table) == [3.0] * 6
    assert cgt.stats(jitted).replays == 4
    jitted = cgt.jit(lambda x, number: x + number)  # one number is guarded by value
    assert firsts(jitted, x, torch.tensor(2.0)) == [3.0] * 6
    assert firsts(jitted, x, torch.tensor(5.0)) == [6.0] * 6
    assert cgt.stats(jitted).replays == 9


@footgun("The address of a result may be another one later, while you hold it")
def test_address_of_a_result(device):
    jitted, x = cgt.jit(lambda x: x + 1), ones(device)
    firsts(jitted, x, calls=3)
    kept = jitted(x).clone()  # instead
    held = jitted(x)
    left, copied = held.data_ptr(), kept.data_ptr()
    exported = torch.from_dlpack(jitted(x * 3))
    exported_at = exported.data_ptr()
    assert firsts(jitted, x * 5, calls=3) == [6.0] * 3
    assert held[0].item() == kept[0].item() == 2.0 and kept.data_ptr() == copied
    assert exported[0].item() == 4.0 and exported.data_ptr() == exported_at
    assert (held.data_ptr() == left) == (device.type == "cpu")


@footgun("While one thread records, torch.cuda.synchronize() in another one fails")
@tells("capture_broken")
def test_synchronize_while_another_thread_records(monkeypatch):
    if not torch.cuda.is_available():
        pytest.skip("says something about GPUs")
    plain, found = trace.run, []

    def wait():
        for how in (torch.cuda.synchronize, torch.cuda.Stream().synchronize):
            try:
                how()
                found.append("")
            except RuntimeError as error:
                found.append(str(error))

    def run(seen, *call):
        if seen.run.recording and not found:
            in_threads(1, lambda _: wait())
        return plain(seen, *call)

    monkeypatch.setattr(trace, "run", run)
    jitted = cgt.jit(lambda x: x + 1)
    assert firsts(jitted, ones("cuda")) == [2.0] * 6 and cgt.stats(jitted).replays == 3, (found, cgt.explain(jitted))
    assert "another thread called what CUDA forbids" in " ".join(cgt.stats(jitted).reasons)
    assert "captur" in found[0] and found[1] == "", found


@footgun("While other profilers take all of Python's hooks, nothing is recorded")
def test_profilers_of_others_keep_functions_eager(device, short_cool_down):
    jitted, x = cgt.jit(lambda x: x * 2), ones(device)
    with profiled():
        assert firsts(jitted, x) == [2.0] * 6
    assert cgt.stats(jitted).replays == 0 < cgt.stats(jitted).eager
    assert firsts(jitted, x, calls=12) == [2.0] * 12 and cgt.stats(jitted).replays >= 3  # instead: before or afterwards


@footgun("Warming and recording run the function: each of its first two calls is slower")
def test_first_two_calls_run_python_and_reset_makes_two_more(device):
    runs = collections.deque()
    jitted = cgt.jit(lambda x: (runs.append(1), x * 2)[1])
    x = ones(device)
    firsts(jitted, x)
    assert len(runs) == 2
    cgt.reset(jitted)
    firsts(jitted, x)
    assert len(runs) == 4
    assert counters(jitted) == (2, 2, 8, 0)


def test_page_and_table_have_the_same_rows_in_the_same_order():
    assert re.findall("^### (.*)$", PAGE.read_text(), re.M) == TITLES
    assert len(TITLES) >= 12


def test_every_row_of_the_page_says_what_happens_and_what_to_do_instead():
    rows = PAGE.read_text().split("\n### ")[1:]
    assert len(rows) == len(TITLES)
    for row in rows:
        assert re.search(r"\*\*What happens\.\*\* \S", row), row
        assert re.search(r"\*\*Instead\.\*\* \S", row), row
