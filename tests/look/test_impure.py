"""Values that Python gives anew each time: such functions run eagerly, and are right at every call; what is asked by
libraries for their own ends does not count."""

import collections
import contextlib
import csv
import datetime
import functools
import gc
import io
import itertools
import logging
import os
import random
import secrets
import sys
import threading
import time
import types
import uuid
import warnings

import numpy
import pytest
import torch
from helpers import line_of
from torch import nn

import cgt

COUNT = itertools.count()
LOG = logging.getLogger(__name__)


def number(text):
    """A number from what is no number."""
    return float(sum(bytes(str(text), "utf-8")) % 1000)


READS = {
    "clock": lambda: time.perf_counter(),
    "wall clock": lambda: time.time_ns() % 10**6,
    "date": lambda: datetime.datetime.now().microsecond,
    "random": lambda: random.random(),
    "randint": lambda: random.randint(0, 10**6),
    "choice": lambda: random.choice(range(10**6)),
    "numpy": lambda: float(numpy.random.rand()),
    "bytes": lambda: number(os.urandom(8)),
    "uuid": lambda: number(uuid.uuid4()),
    "secrets": lambda: secrets.randbelow(10**6),
    "system": lambda: random.SystemRandom().random(),
    "unseeded": lambda: random.Random().random(),
    "counter": lambda: next(COUNT),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_value_that_python_gives_anew_is_that_of_each_call(device, read):
    seen = collections.deque(maxlen=1)

    def f(x):
        value = float(read())
        seen.append(value)
        return x * value

    jitted, x = cgt.jit(f), torch.ones(3, device=device, dtype=torch.float64)
    for k in range(80):  # past a cool-down
        assert jitted(x)[0].item() == seen[0], k
    assert cgt.stats(jitted).replays == cgt.stats(jitted).records == 0
    (reason,) = cgt.stats(jitted).reasons
    assert line_of(f, "read()").rpartition(":")[0] in reason or "draws from numpy" in reason or "COUNT" in reason
    advised = cgt.jit(lambda x, value: x * value)
    value = torch.zeros((), device=device, dtype=torch.float64)
    for _ in range(5):
        value.fill_(read())
        assert torch.equal(advised(x, value), x * value)
    assert cgt.stats(advised).replays == 3


def test_reason_names_the_line(device):
    def f(x):
        return x * time.perf_counter()

    jitted = cgt.jit(f)
    for _ in range(3):
        jitted(torch.ones(3, device=device))
    (reason,) = cgt.stats(jitted).reasons
    assert f"time.perf_counter() at {line_of(f, 'perf_counter')} gives another value" in reason


def test_policy_that_explores_now_and_then_is_right_at_every_call(device):
    net = nn.Linear(4, 3).to(device)

    def act(x):
        if random.random() < 0.3:
            return torch.zeros(3, device=device).index_fill_(0, torch.tensor(random.randrange(3), device=device), 1.0)
        return net(x).softmax(-1)

    def run(f):
        random.seed(3)
        return [f(torch.full((4,), k / 100, device=device)) for k in range(200)] + [random.random()]

    f = cgt.jit(act)
    with torch.no_grad():
        want, got = run(act), run(f)
    assert want.pop() == got.pop() and all(map(torch.equal, got, want))
    assert cgt.stats(f).replays == 0


SOURCES = {
    "count": lambda: itertools.count(3),
    "list": lambda: iter([1.0, 2.0] * 10),
    "dict": lambda: iter(dict.fromkeys(range(20))),
    "generator": lambda: (k for k in itertools.count()),
    "map": lambda: map(float, range(20)),
    "enumerate": lambda: map(sum, enumerate(range(20))),
    "cycle": lambda: itertools.cycle([1, 2, 3]),
    "islice": lambda: itertools.islice(itertools.count(), 2, None),
    "chain": lambda: itertools.chain(range(3), range(30)),
    "zip": lambda: map(sum, zip(range(20), range(20), strict=True)),
    "calls": lambda: iter(functools.partial(next, itertools.count()), -1),
    "csv": lambda: map(lambda row: float(row[0]), csv.reader(str(k) for k in range(20))),
    "text file": lambda: map(float, io.StringIO("\n".join(map(str, range(20))))),
}


@pytest.mark.parametrize("how", ["closure", "attribute", "argument", "tuple"])
@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES.keys())
def test_iterator_that_the_function_advances(device, make, how):
    def outcomes(wrap):
        class Holder:
            pass

        holder, source = Holder(), make()
        holder.source, parts = source, (source, 1)
        f = wrap(
            {
                "closure": lambda x, _: x * next(source),
                "attribute": lambda x, _: x * next(holder.source),
                "argument": lambda x, s: x * next(s.source),
                "tuple": lambda x, _: x * next(parts[0]),
            }[how]
        )
        return f, [f(torch.ones(3, device=device), holder)[0].item() for _ in range(9)]

    _, want = outcomes(lambda f: f)
    f, got = outcomes(cgt.jit)
    assert got == want and cgt.stats(f).replays == 0
    assert any("is an iterator or a file" in reason for reason in cgt.stats(f).reasons), cgt.explain(f)


@pytest.mark.parametrize("name", SOURCES)
def test_iterator_that_is_reached_and_rests_replays_if_it_can_be_asked(device, name):
    source = SOURCES[name]()

    def f(x, more=False):
        return x * next(source) if more else x * 2

    jitted, x = cgt.jit(f), torch.ones(3, device=device)
    for _ in range(6):
        assert torch.equal(jitted(x), x * 2)
    assert (cgt.stats(jitted).replays >= 3) == (name == "generator"), cgt.explain(jitted)
    assert ("CGT303" in cgt.explain(jitted)) == (cgt.stats(jitted).replays == 0)


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES.keys())
def test_iterator_that_a_differentiable_function_advances(device, make):
    """A capture that a graph of autograd's comes out of does not stand in for eager."""

    def outcomes(wrap):
        source, w = make(), torch.ones(3, device=device).requires_grad_()
        f, made = wrap(lambda w: w * next(source)), []
        for _ in range(9):
            f(w).sum().backward()
            made.append(w.grad.tolist())
        return f, made

    _, want = outcomes(lambda f: f)
    f, got = outcomes(cgt.jit)
    assert got == want and cgt.stats(f).replays == 0


def test_iterator_that_only_a_recording_advances_is_told(device):
    """CUDA: the run before it, which watched, took nothing, and the capture cannot stand in for eager."""
    source, s = (k for k in itertools.count()), types.SimpleNamespace(on=False)
    w = torch.ones(3, device=device).requires_grad_()
    f = cgt.jit(lambda w: w * (next(source) if s.on else 2))
    for _ in range(2):
        assert torch.equal(f(w), w * 2)
    s.on, told = True, []
    for k in range(5):
        try:
            assert torch.equal(f(w), w * k)
        except cgt.CgtError as error:
            told.append("cannot be put back" in str(error))
    assert told == ([True] if device.type == "cuda" else []) and next(source) == 5
    assert cgt.stats(f).replays == 0


def test_data_loaders_iterator(device):
    data = torch.utils.data.TensorDataset(torch.arange(40.0, device=device))
    batches = iter(torch.utils.data.DataLoader(data, batch_size=4))

    def f(scale):
        (x,) = next(batches)
        return x * scale

    jitted = cgt.jit(f)
    for k in range(10):
        assert torch.equal(jitted(2.0), torch.arange(4.0 * k, 4.0 * k + 4, device=device) * 2)
    assert cgt.stats(jitted).replays == 0


@pytest.mark.parametrize("how", ["opened", "held", "line by line"])
def test_file_that_the_function_reads(device, tmp_path, how):
    (tmp_path / "numbers").write_text("\n".join(map(str, range(20))))

    def run(wrap):
        with open(tmp_path / "numbers") as file:

            def opened(x):
                return x * float((tmp_path / "numbers").read_text().split()[3])

            def held(x):
                return x * float(file.readline())

            def line_by_line(x):
                for line in file:
                    return x * float(line)

            f = wrap({"opened": opened, "held": held, "line by line": line_by_line}[how])
            return f, [f(torch.ones(3, device=device))[0].item() for _ in range(8)]

    _, want = run(lambda f: f)
    f, got = run(cgt.jit)
    assert got == want and cgt.stats(f).replays == 0 and cgt.stats(f).reasons


@pytest.mark.parametrize(
    "load", [lambda p: torch.load(p)["scale"], lambda p: float(numpy.load(p)), lambda p: float(numpy.fromfile(p)[-1]), lambda p: float(numpy.memmap(p, float)[-1])],
    ids=["torch", "numpy", "fromfile", "memmap"],
)  # fmt: skip
def test_file_that_is_loaded(device, tmp_path, load):
    path = tmp_path / "scale"
    f = cgt.jit(lambda x: x * load(path))
    for k in range(6):
        if "torch" in load.__code__.co_names:
            torch.save({"scale": float(k)}, path)
        else:
            with path.open("wb") as file:
                numpy.save(file, numpy.array(float(k)))
        assert f(torch.ones(3, device=device))[0].item() == k
    assert cgt.stats(f).replays == 0
    assert any(f"{__file__}:" in reason for reason in cgt.stats(f).reasons)


GENERATORS = {
    "Random": (lambda: random.Random(3), lambda g: g.random()),
    "subclass": (lambda: type("Mine", (random.Random,), {})(3), lambda g: g.gauss(0, 1)),
    "numpy": (lambda: numpy.random.default_rng(3), lambda g: float(g.random())),
    "numpy's old": (lambda: numpy.random.RandomState(3), lambda g: float(g.rand())),
}


@pytest.mark.parametrize("make, draw", GENERATORS.values(), ids=GENERATORS.keys())
@pytest.mark.parametrize("where", ["closure", "argument"])
def test_random_generator_of_ones_own(device, make, draw, where):
    def outcomes(wrap):
        g = make()
        f = wrap((lambda x, _: x * draw(g)) if where == "closure" else (lambda x, g: x * draw(g)))
        return f, [f(torch.ones(3, device=device), g)[0].item() for _ in range(8)], draw(g)

    _, *want = outcomes(lambda f: f)
    f, *got = outcomes(cgt.jit)
    assert got == want and cgt.stats(f).replays == 0


def test_seeding_random_inside(device):
    def f(x):
        random.seed(7)
        return x * random.random()

    jitted, x = cgt.jit(f), torch.ones(3, device=device)
    for _ in range(6):
        random.seed(0)
        got, after = jitted(x), random.random()
        random.seed(0)
        assert torch.equal(got, f(x)) and after == random.random()
    assert cgt.stats(jitted).replays == 0


def test_draw_that_depends_on_an_argument(device):
    def f(x, explore=False):
        return x * random.random() if explore else x * 2

    def run(f):
        random.seed(1)
        return [f(torch.full((3,), 1.0 + k, device=device), explore=k % 3 == 2) for k in range(30)], random.random()

    jitted = cgt.jit(f)
    (want, last), (got, mine) = run(f), run(jitted)
    assert all(map(torch.equal, got, want)) and mine == last
    assert cgt.stats(jitted).replays >= 15


class Reads(nn.Module):
    """Does what programs do around their numbers."""

    def __init__(self):
        super().__init__()
        self.linear, self.counter, self.noise = nn.Linear(3, 3), itertools.count(), random.Random(3)

    def forward(self, x):
        LOG.warning("at %s", x.shape)
        warnings.warn("once", stacklevel=1)
        print("here")
        import colorsys  # noqa: F401, PLC0415

        with torch.profiler.record_function("forward"):
            return nn.functional.dropout(self.linear(x), 0.5, self.training)

    def fresh_name(self):
        return next(self.counter) + self.noise.random()


def test_what_libraries_ask_for_their_own_ends_does_not_count(device, capsys):
    model = Reads().to(device)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False, capturable=device.type == "cuda")

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach()

    f = cgt.jit(step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for k in range(6):
            f(torch.full((2, 3), float(k), device=device))
    assert cgt.stats(f).replays >= 3, cgt.explain(f)
    assert "here" in capsys.readouterr().out


def test_garbage_collections_do_not_count(device):
    """Whoever is told of them runs in the middle of the function."""
    told, scales, x = [], {"a": 2.0, "b": 3.0}, torch.ones(3, device=device)
    exec("import time\ndef tell(phase, info): told.append(time.perf_counter())", namespace := {"told": told})
    f = cgt.jit(lambda x: (gc.collect(), x * scales["a"] * scales["b"])[1])
    f(x), f(x)  # what is collected first may have finalizers
    cgt.reset(f)
    f(x)
    gc.callbacks.append(namespace["tell"])
    try:
        for _ in range(4):
            assert torch.equal(f(x), x * 6)
    finally:
        gc.callbacks.remove(namespace["tell"])
    assert told and cgt.stats(f).replays >= 3, cgt.explain(f)


@pytest.mark.skipif(not hasattr(sys, "monitoring"), reason="says something about sys.monitoring")
@pytest.mark.parametrize("raises", [False, True])
def test_calls_are_listened_to_in_code_that_runs_and_no_longer(device, raises):
    during = []

    def listened():
        return [sys.monitoring.get_local_events(tool, function.__code__) for tool in range(6)]

    def function(x):
        during.append(listened())
        if raises:
            raise ValueError
        return x + 1

    with pytest.raises(ValueError) if raises else contextlib.nullcontext():
        cgt.jit(function)(torch.ones(3, device=device))
    assert sum(during[0]) == sys.monitoring.events.CALL and not any(listened())


def test_code_that_a_thread_of_the_run_was_the_first_to_run_is_listened_to(device, short_cool_down):
    def now():
        return time.time()

    def function(x):
        thread = threading.Thread(target=now)
        thread.start()
        thread.join()
        return x * 0 + now()

    f, x = cgt.jit(function), torch.ones(3, dtype=torch.float64, device=device)
    for _ in range(4):
        before = time.time()
        assert before <= f(x)[0].item() <= time.time()
    assert cgt.stats(f).replays == 0 and any("time.time()" in reason for reason in cgt.stats(f).reasons), cgt.explain(f)
