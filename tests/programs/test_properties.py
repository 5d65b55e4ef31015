"""Random programs, called in random ways, agree bit for bit with eager.

Two worlds run side by side: in one a program is jitted, in the other it is not. Whatever happens to
inputs, results, closure and seed happens in both; after every call everything that can be seen must
be the same, and a call whose key repeats must have been a replay.
"""

import functools
import importlib.util
import pathlib

import cgt_core as core
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import cgt
from cgt.api import state_of
from cgt.decide import freeing

SETTINGS = {
    "deadline": None, "derandomize": True,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}  # fmt: skip
MOST = 64  # elements of a value


def same(got, want):
    """Equal bits; any nan equals any other."""
    assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
    got, want = got.detach(), want.detach()
    nan = want.isnan()
    assert torch.equal(got.isnan(), nan)
    got, want = (torch.where(nan, 0.0, t).contiguous().view(torch.int32) for t in (got, want))
    assert torch.equal(got, want), (got, want)


# --- programs: straight lines of ops over an environment of float32 tensors -----------------------


def fit(b, a):
    """b in a form that broadcasts to a."""
    return b if b.shape == a.shape else b.sum()


def own(t):
    """t, or a copy of it where elements of t share memory and in-place ops are forbidden."""
    return (
        t.clone() if any(s == 0 and n > 1 for n, s in zip(t.shape, t.stride(), strict=True)) else t
    )


def matrix(t):
    return t.reshape(t.shape[0], -1) if t.dim() else t.reshape(1, 1)


def gradient(a):
    leaf = a.detach().clone().requires_grad_()
    (leaf * leaf).sum().backward()
    return leaf.grad


def without_grad(a, b):
    with torch.no_grad():
        return a * 2 + fit(b, a)


OPS = {
    "add": lambda a, b, k, w: a + fit(b, a),
    "scale": lambda a, b, k, w: a * (k / 4 - 1),
    "relu": lambda a, b, k, w: a.relu(),
    "tanh": lambda a, b, k, w: a.tanh(),
    "sum": lambda a, b, k, w: a.sum(k % a.dim()) if a.dim() else a.sum(),
    "cat": lambda a, b, k, w: torch.cat([a.reshape(-1), b.reshape(-1)]),
    "flat": lambda a, b, k, w: a.reshape(-1),
    "transpose": lambda a, b, k, w: a.transpose(0, -1) if a.dim() else a,
    "slice": lambda a, b, k, w: a[k % a.shape[0] :] if a.dim() and a.shape[0] else a,
    "index": lambda a, b, k, w: a[k % a.shape[0]] if a.dim() and a.shape[0] else a * 2,
    "add_": lambda a, b, k, w: own(a).add_(k),
    "mul_": lambda a, b, k, w: own(a).mul_(fit(b, a).clone()),
    "fresh add_": lambda a, b, k, w: (a * 1).add_(fit(b, a)),
    "fill part": lambda a, b, k, w: own(a).view_as(own(a))[..., :1].fill_(k) if a.dim() else a,
    "matmul": lambda a, b, k, w: matrix(a) @ matrix(a).mT,
    "softmax": lambda a, b, k, w: a.softmax(-1) if a.dim() else a,
    "where": lambda a, b, k, w: torch.where(a > 0, a, fit(b, a)),
    "clone": lambda a, b, k, w: a.clone(),
    "expand": lambda a, b, k, w: a.expand(2, *a.shape),
    "dropout": lambda a, b, k, w: F.dropout(a, 0.5, True),
    "noise": lambda a, b, k, w: a + torch.rand_like(a),
    "stack": lambda a, b, k, w: torch.stack([a, a * k]),
    "chunk": lambda a, b, k, w: a.chunk(2)[-1] if a.dim() and a.shape[0] else a,
    "detach": lambda a, b, k, w: a.detach(),
    "no_grad": lambda a, b, k, w: without_grad(a, b),
    "grad": lambda a, b, k, w: gradient(a),
    "closure": lambda a, b, k, w: a * w.mean(),
    "closure add_": lambda a, b, k, w: w.add_(a.mean()),
    "sort": lambda a, b, k, w: a.sort(0).values if a.dim() else a,
    "as_strided": lambda a, b, k, w: (
        a.as_strided((a.numel(),), (1,), a.storage_offset()) if a.is_contiguous() else a
    ),
}


def compile_program(lines, results, w):
    """The op list as a Python closure over `w`."""

    def program(*inputs):
        env = list(inputs)
        for name, i, j, k in lines:
            value = OPS[name](env[i % len(env)], env[j % len(env)], k, w)
            env.append(value if value.numel() <= MOST else value.reshape(-1)[:MOST])
        env = env[::-1]
        return {"list": [env[r % len(env)] for r in results[1:]]}, env[results[0] % len(env)]

    return program


LINES = st.lists(
    st.tuples(
        st.sampled_from(sorted(OPS)), st.integers(0, 9), st.integers(0, 9), st.integers(0, 7)
    ),
    min_size=1,
    max_size=8,
)
RESULTS = st.lists(st.integers(0, 5), min_size=1, max_size=3)
SHAPES = [(3, 4), (4,), (), (2, 2, 2), (1, 5)]
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["stay", "stay", "change", "move", "reshape", "feed"]),
        st.integers(0, 9),
        st.booleans(),
    ),
    min_size=5,
    max_size=5,
)


def generator_states(device):
    states = [torch.get_rng_state()]
    return states + ([torch.cuda.get_rng_state()] if device.type == "cuda" else [])


def tensors_of(result):
    return [*result[0]["list"], result[1]]


def numbers(device, shape, k):
    return torch.randn(shape, generator=torch.Generator().manual_seed(k)).to(device)


class World:
    """One side: the program, its inputs, its closure, and what is held of its results."""

    def __init__(self, device, lines, results, shapes, transform):
        self.device, self.kept, self.held = device, [], []
        self.w = numbers(device, (3,), 99)
        self.function = transform(compile_program(lines, results, self.w))
        self.inputs = [numbers(device, SHAPES[s], 7 * k) for k, s in enumerate(shapes)]

    def event(self, kind, which, k):
        """What happens to the inputs between two calls."""
        i = which % len(self.inputs)
        self.kept.append(self.inputs[i])  # its address is not given out again
        if kind == "change":
            if own(self.inputs[i]) is self.inputs[i]:
                self.inputs[i].mul_(0.5)
            self.w.add_(1)
        elif kind == "move":
            self.inputs[i] = self.inputs[i].clone()
        elif kind == "reshape":
            self.inputs[i] = numbers(self.device, SHAPES[(which + k) % len(SHAPES)], k)
        elif kind == "feed" and self.held:
            self.inputs[i] = self.held[which % len(self.held)]

    def call(self, k, hold):
        torch.manual_seed(k)
        result = tensors_of(self.function(*self.inputs))
        if hold:
            self.held.extend(result)
        return result, generator_states(self.device)


@settings(max_examples=200, **SETTINGS)
@given(
    lines=LINES,
    results=RESULTS,
    shapes=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    events=EVENTS,
    inputs=st.sampled_from(["auto", "auto", "copied"]),
)
def test_random_program_called_in_random_ways_agrees_with_eager(
    device, lines, results, shapes, events, inputs
):
    ours = World(device, lines, results, shapes, lambda f: cgt.jit(f, inputs=inputs))
    theirs = World(device, lines, results, shapes, lambda f: f)
    must_replay = 0
    for k, (kind, which, hold) in enumerate(events):
        if k:
            ours.event(kind, which, k)
            theirs.event(kind, which, k)
        got, state = ours.call(k, hold)
        want, expected = theirs.call(k, hold)
        for a, b in zip(got, want, strict=True):
            same(a, b)
        assert all(map(torch.equal, state, expected))
        for a, b in zip(ours.inputs + ours.held, theirs.inputs + theirs.held, strict=True):
            same(a, b)
        same(ours.w, theirs.w)
        must_replay += k >= 2 and kind in ("stay", "change")
        del got, want, a, b
    core.check_table()
    stats = cgt.stats(ours.function)
    assert stats.calls == 5 == stats.warmups + stats.records + stats.replays + stats.eager
    # Another shape may take another way: code that did not run before costs a recording.
    late = sum(n for reason, n in stats.reasons.items() if "code ran for the first time" in reason)
    assert (stats.warmups, stats.eager) == (1, late) and late <= 1, stats.reasons
    assert stats.replays >= must_replay - late, (stats, events)


@settings(max_examples=40, **SETTINGS)
@given(lines=LINES, results=RESULTS, shapes=st.lists(st.integers(0, 4), min_size=1, max_size=3))
def test_random_program_on_inputs_that_stay_records_once(device, lines, results, shapes):
    ours = World(device, lines, results, shapes, cgt.jit)
    theirs = World(device, lines, results, shapes, lambda f: f)
    versions = [t._version for t in ours.inputs]
    for k in range(5):
        for a, b in zip(ours.call(k, False)[0], theirs.call(k, False)[0], strict=True):
            same(a, b)
        for a, b in zip(ours.inputs, theirs.inputs, strict=True):
            same(a, b)
            assert a._version == b._version, "a replay counts its writes as eager does"
    assert versions == [0] * len(versions)
    stats = cgt.stats(ours.function)
    assert (stats.warmups, stats.records, stats.replays, stats.eager) == (1, 1, 3, 0), stats.reasons


# --- a stateful machine: two functions, a shared closure, holds, drops, steps and resets ----------


class Layer(torch.nn.Module):
    """Parameters that the machine swaps under the jitted function's feet."""

    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.register_buffer("count", torch.zeros_like(weight))
        self.scale = 1.0

    def forward(self, x):
        self.count.add_(x)
        return x * self.weight * self.scale, self.count[1:]


class Side:
    """One world of the machine."""

    def __init__(self, device, transform):
        self.layer = Layer(torch.arange(4.0, device=device))
        self.total = torch.zeros(4, device=device)
        layer, total = self.layer, self.total

        def push(x):
            total.add_(x)
            return {"total": total * 1, "view": x.view(2, 2), "same": x}

        def forward(x, k):
            y, count = layer(x)
            return [F.dropout(y, 0.5, layer.training) + k, count, y]

        self.push, self.forward = transform(push), transform(forward)
        self.pool = [torch.ones(4, device=device)]


class Machine(RuleBasedStateMachine):
    device = torch.device("cpu")

    @initialize()
    def start(self):
        self.ours, self.theirs = Side(self.device, cgt.jit), Side(self.device, lambda f: f)
        self.sides = (self.ours, self.theirs)
        self.calls = 0

    def add(self, results):
        """Results join the pool, as inputs of later calls and under the eyes of the invariant."""
        for side, tensors in zip(self.sides, results, strict=True):
            side.pool.extend(tensors)

    @rule(which=st.integers(0, 9), hold=st.booleans())
    def call_push(self, which, hold):
        self.calls += 1
        results = []
        for side in self.sides:
            result = side.push(side.pool[which % len(side.pool)])
            assert result["same"] is side.pool[which % len(side.pool)]
            results.append([result["total"], result["view"].view(4)])
            del result
        for a, b in zip(*results, strict=True):
            same(a, b)
        if hold:
            self.add(results)

    @rule(which=st.integers(0, 9), k=st.integers(0, 1), hold=st.booleans(), seed=st.integers(0, 3))
    def call_forward(self, which, k, hold, seed):
        self.calls += 1
        results, states = [], []
        for side in self.sides:
            torch.manual_seed(seed)
            y, count, plain = side.forward(side.pool[which % len(side.pool)], k)
            results.append([y, plain])
            same(count, side.layer.count[1:])
            states.append(generator_states(self.device))
            del y, count, plain
        assert all(map(torch.equal, *states))
        for a, b in zip(*results, strict=True):
            same(a, b)
        if hold:
            self.add(results)

    @rule(which=st.integers(0, 9))
    def drop(self, which):
        for side in self.sides:
            if len(side.pool) > 1:
                del side.pool[which % len(side.pool)]

    @rule(which=st.integers(0, 9), k=st.integers(0, 5))
    def write(self, which, k):
        for side in self.sides:
            side.pool[which % len(side.pool)].mul_(0.5).add_(k)

    @rule()
    def write_closure(self):
        for side in self.sides:
            side.total.mul_(0.5)
            side.layer.weight.add_(1)

    @rule(k=st.integers(0, 5))
    def swap_parameter(self, k):
        for side in self.sides:
            side.layer.weight = torch.nn.Parameter(
                torch.full((4,), float(k), device=self.device), requires_grad=False
            )

    @rule(k=st.integers(0, 5))
    def swap_data(self, k):
        for side in self.sides:
            side.layer.weight.data = torch.full((4,), float(k), device=self.device)

    @rule(scale=st.sampled_from([1.0, 2.0]), training=st.booleans())
    def change_settings(self, scale, training):
        for side in self.sides:
            side.layer.scale = scale
            side.layer.train(training)

    @rule(k=st.integers(0, 5))
    def new_tensor(self, k):
        for side in self.sides:
            side.pool.append(torch.full((4,), float(k), device=self.device))

    @rule()
    def step(self):
        cgt.step()

    @rule(both=st.booleans())
    def reset(self, both):
        cgt.reset(None if both else self.ours.push)

    @precondition(lambda self: len(self.ours.pool) > 8)
    @rule()
    def drop_most(self):
        for side in self.sides:
            del side.pool[1:]

    @invariant()
    def everything_in_sight_is_the_same(self):
        if not hasattr(self, "ours"):
            return
        for a, b in zip(self.ours.pool, self.theirs.pool, strict=True):
            same(a, b)
        same(self.ours.total, self.theirs.total)
        same(self.ours.layer.count, self.theirs.layer.count)
        core.check_table()
        stats = [cgt.stats(f) for f in (self.ours.push, self.ours.forward)]
        for s in stats:
            assert s.calls == s.warmups + s.records + s.replays + s.eager
            assert s.eager == 0 or any("max_records" in reason for reason in s.reasons), s.reasons
        assert sum(s.calls for s in stats) == self.calls
        REPLAYS[0] += sum(s.replays for s in stats)

    def teardown(self):
        self.__dict__.pop("ours", None)
        self.__dict__.pop("theirs", None)
        self.__dict__.pop("sides", None)
        freeing.sweep()


REPLAYS = [0]


def test_machine_of_calls_holds_writes_swaps_and_resets_agrees_with_eager(device):
    machine = type("MachineOn" + device.type, (Machine,), {"device": device})
    REPLAYS[0] = 0
    run_state_machine_as_test(
        machine, settings=settings(max_examples=150, stateful_step_count=30, **SETTINGS)
    )
    assert REPLAYS[0] > 100


# --- the same decisions as cgt from scratch ------------------------------------------------------


@functools.cache
def load_scratch():
    path = pathlib.Path(__file__).parents[2] / "docs" / "from_scratch.py"
    spec = importlib.util.spec_from_file_location("from_scratch", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Judge:
    """The functions under test, jitted by one of the two; inputs are never freed in between."""

    def __init__(self, transform):
        self.scale, self.weight = "1", torch.ones(4)  # a number that changes is live to cgt, and not to the model
        self.inputs = [torch.arange(4.0)]
        self.total = torch.zeros(4)
        self.everything = [self.weight]

        def multiply(x, k):
            return x * weight.view(x.shape) * float(scale) + int(k), x.view(-1)[1:]

        def accumulate(x, total):
            total.add_(x.sum())
            return {"total": total, "noise": torch.rand(3) + x.sum()}

        scale, weight = self.scale, self.weight
        cells = dict(zip(multiply.__code__.co_freevars, multiply.__closure__, strict=True))
        self.cells = cells
        self.functions = [transform(multiply), transform(accumulate)]

    def do(self, what, k):
        """One action; the results of a call."""
        if what == "multiply":
            return self.functions[0](self.inputs[-1], str(k % 2))
        if what == "accumulate":
            result = self.functions[1](self.inputs[-1], self.total)
            assert result["total"] is self.total
            return [result["total"].clone(), result["noise"]]
        if what == "new input":
            self.inputs.append(torch.full((4,), float(k)))
        elif what == "shape":
            self.inputs.append(torch.full(((2, 2), (4, 1), (4,))[k % 3], 2.0))
        elif what == "write input":
            self.inputs[-1].add_(k)
        elif what == "scale":
            self.cells["scale"].cell_contents = str(k % 2)
        elif what == "write weight":
            self.cells["weight"].cell_contents.mul_(0.5)
        elif what == "new weight":
            self.everything.append(torch.full((4,), float(k)))
            self.cells["weight"].cell_contents = self.everything[-1]
        elif what == "new total":
            self.everything.append(self.total)
            self.total = torch.zeros(4)
        return []


ACTIONS = ["multiply", "accumulate"] * 5 + [
    "new input", "shape", "write input", "scale", "write weight", "new weight", "new total",
]  # fmt: skip


@settings(max_examples=60, **SETTINGS)
@given(
    plan=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 5)), min_size=4, max_size=25),
    hold=st.booleans(),
)
def test_decisions_are_those_of_cgt_from_scratch(plan, hold):
    """On the CPU only, where the model runs. With inputs="copied" both follow the same rules: they
    copy what is not written, pin the rest, and record whatever no recording accepts."""
    model = load_scratch()
    ours, judge = Judge(lambda f: cgt.jit(f, inputs="copied")), Judge(model.jit)
    held = []
    for k, (what, number) in enumerate(plan):
        results = []
        for side in (ours, judge):
            torch.manual_seed(k)
            results.append(side.do(what, number))
        for a, b in zip(*results, strict=True):
            same(a, b)
        if hold:
            held.append(results)
        for f, g in zip(ours.functions, judge.functions, strict=True):
            stats, facts = cgt.stats(f), model.stats(g)
            if facts["records"] >= model.MAX_RECORDS:
                return  # past the limit each recovers in its own way
            if state_of(f).learnt.moves.followed:
                return  # a place in which another weight came twice: the model follows none
            if [action for action, _ in plan[: k + 1]].count("new total") > 1:
                return  # the model copies what is written and moves; inputs="copied" pins it
            assert (stats.calls, stats.warmups, stats.records, stats.replays) == tuple(
                facts[name] for name in ("calls", "warmups", "records", "replays")
            ), (what, stats.reasons)
        for got, want in held:
            for a, b in zip(got, want, strict=True):
                same(a, b)


@pytest.mark.parametrize("name", sorted(OPS))
def test_every_op_of_the_table_can_be_drawn(device, name):
    """The table above holds no op that is eager by nature."""
    w = numbers(device, (3,), 1)
    program = cgt.jit(compile_program([(name, 0, 1, 3)], [0], w))
    inputs = [numbers(device, (3, 4), 2), numbers(device, (4,), 3)]
    for _ in range(3):
        program(*inputs)
    stats = cgt.stats(program)
    assert (stats.records, stats.replays, stats.eager) == (1, 1, 0), stats.reasons
