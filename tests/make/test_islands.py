"""Functions that run eagerly between two graphs of a recording (cgt.eager)."""

import random
import threading
import time
import types

import cgt_core as core
import pytest
import torch
from helpers import not_audited, same, tells, values
from torch import nn

import cgt
from cgt.decide import sites


class World:
    """What eager parts do to their surroundings."""

    def __init__(self):
        self.seen, self.calls, self.scale = [], 0, 1.0


def looked(world):
    """Keeps a copy of what it is given."""

    @cgt.eager
    def look(x):
        world.calls += 1
        world.seen.append(x)

    return look


def both(make, device, n=10, seed=0):
    """(what the plain function gave for n inputs, what the jitted one did, the jitted one)."""
    outcomes = []
    for wrap in (lambda f: f, cgt.jit):
        world = World()
        f = wrap(make(world))
        x = torch.empty(4, 3, device=device)
        made = []
        for k in range(n):
            y = f(x.copy_(values(device, 4, 3, seed=seed + k)))
            made.append([t.clone() for t in (y if isinstance(y, tuple) else (y,))])
        outcomes.append((made, [t.clone() for t in world.seen], world.calls))
    return outcomes[0], outcomes[1], f


def watching(world):
    look = looked(world)

    def f(x):
        y = x * 2
        look(y)
        return y + 1

    return f


def computing(world):
    @cgt.eager
    def solve(a, scale, names):
        world.calls += 1
        return {"q": torch.linalg.qr(a)[0] * scale, "n": len(names)}

    def f(x):
        found = solve(x.sin(), 2.0, ["a", "b"])
        return found["q"] * found["n"] + x

    return f


def several(world):
    look = looked(world)

    @cgt.eager
    def half(x):
        world.calls += 1
        return x * 0.5, x[1:]  * 1.0

    def f(x):
        a, b = half(x + 1)
        look(a)
        c, _ = half(a.cos())
        look((c - 1)[:2])
        return a + c, b

    return f


def writing(world):
    @cgt.eager
    def write(x):
        world.calls += 1
        x[0] = x[1] * 3

    def f(x):
        y = x + 1
        write(y)
        return y * 2

    return f


def asking(world):
    """A value is read behind it."""
    look = looked(world)

    def f(x):
        y = x * 2
        look(y)
        return y + 1 if y.sum() > 0 else y - 1

    return f


def asked(world):
    """A value is read before it."""
    look = looked(world)

    def f(x):
        y = x * 2
        if y.sum() > 0:
            look(y)
            y = y + 1
        return y.sin()

    return f


@pytest.mark.parametrize("make", [watching, computing, several, writing, asking, asked], ids=lambda f: f.__name__)
def test_runs_once_per_call_between_two_graphs(device, make):
    want, got, f = both(make, device)
    assert same(got[0], want[0]) and same(got[1], want[1]) and got[2] == want[2]
    assert cgt.stats(f).replays >= (3 if make in (asking, asked) else 8), cgt.explain(f)
    assert "runs eagerly between its graphs" in cgt.explain(f)
    core.check_table()


def test_a_shape_is_a_result_as_it_is(device):
    """A pytree of torch's it would be, but comes out of one as a tuple."""

    @cgt.eager
    def shape_of(x):
        return x.sum(0, keepdim=True).shape

    @cgt.jit
    def f(x):
        shape = shape_of(x * 2)
        assert type(shape) is torch.Size
        return x + len(shape)

    for k in range(6):
        x = values(device, seed=k).view(2, -1)
        assert torch.equal(f(x), x + 2)
    assert cgt.stats(f).replays == 4, cgt.explain(f)


def test_inference_mode(device):
    look = looked(World())
    f, x = cgt.jit(lambda x: (look(x * 2), x + 1)[1]), values(device, 4)
    with torch.inference_mode():
        for _ in range(6):
            assert torch.equal(f(x), x + 1)
    assert cgt.stats(f).replays >= 4, cgt.explain(f)


def test_argument_is_a_copy_that_may_be_kept(device):
    world = World()
    f, x = cgt.jit(watching(world)), torch.empty(3, device=device)
    for k in range(8):
        f(x.fill_(k))
    assert [t[0].item() for t in world.seen] == [2.0 * k for k in range(8)]
    assert cgt.stats(f).replays >= 6


def test_moving_inputs_and_a_path(device):
    """Copied inputs, results of the path, step()."""
    world = World()
    a, b, kept = cgt.jit(watching(world)), cgt.jit(lambda y: y * 3), []
    for k in range(10):
        cgt.step()
        kept.append(torch.full((3,), float(k), device=device))
        assert b(a(kept[-1]))[0].item() == (2 * k + 1) * 3
    assert [t[0].item() for t in world.seen] == [2.0 * k for k in range(10)]
    assert cgt.stats(a).replays >= 5 and cgt.stats(b).replays >= 5, cgt.explain(a)


def test_its_code_may_ask_clocks_and_random(device):
    told = []

    @cgt.eager
    def note(x):
        told.append((time.monotonic_ns(), random.random(), x.sum().item()))
        return float(len(told) > 0)

    f, x = cgt.jit(lambda x: x * note(x + 1)), torch.ones(3, device=device)
    random.seed(3)
    for _ in range(8):
        assert torch.equal(f(x), x)
    random.seed(3)
    assert [r for _, r, _ in told] == [random.random() for _ in range(8)]
    assert [t for t, *_ in told] == sorted(t for t, *_ in told) and cgt.stats(f).replays >= 6, cgt.explain(f)


WAYS = {  # what it returns at its k-th call
    "another number": lambda x, k: (x.clone(), 3 if k == 6 else 2),
    "another shape": lambda x, k: (x[: 2 if k == 6 else 3].clone(), 2),
    "another type": lambda x, k: (x.clone(), 2.0 if k == 6 else 2),
    "another structure": lambda x, k: [x.clone(), 2] if k == 6 else (x.clone(), 2),
}


@pytest.mark.parametrize("way", WAYS)
def test_another_result_makes_the_rest_eager_and_the_part_runs_once(device, way):
    def outcomes(wrap):
        calls = []

        @cgt.eager
        def part(x):
            calls.append(x)
            return WAYS[way](x, len(calls))

        @wrap
        def f(x):
            y, n = part(x * 2)
            return (y * n).sum(dim=0)

        return [f(torch.arange(12.0, device=device).view(3, 4) + k) for k in range(12)], len(calls), f

    (want, n, _), (got, m, f) = outcomes(lambda f: f), outcomes(cgt.jit)
    assert same(got, want) and n == m == 12
    told = cgt.stats(f)
    assert told.replays >= 7 and any("something else when the call was recorded" in r for r in told.reasons), cgt.explain(f)


def test_what_it_changes_is_guarded_behind_it(device):
    """The rest of the call reads a flag that the part sets, seldom."""

    def outcomes(wrap):
        s, calls = types.SimpleNamespace(done=False), []

        @cgt.eager
        def act(x):
            calls.append(x)
            s.done = len(calls) % 5 == 0

        @wrap
        def f(x):
            act(x + 1)
            return x * 0 if s.done else x * 2

        return [f(torch.full((3,), 1.0 + k, device=device)).clone() for k in range(20)], len(calls), f

    (want, n, _), (got, m, f) = outcomes(lambda f: f), outcomes(cgt.jit)
    assert same(got, want) and n == m == 20
    assert cgt.stats(f).replays >= 6, cgt.explain(f)


@pytest.mark.parametrize("change", ["count", "store", "append", "grad"])
def test_a_part_that_could_see_what_the_call_changed_before(device, change):
    """A replay changes it at its end."""

    def outcomes(wrap):
        w, log, world = torch.ones(3, device=device).requires_grad_(), [], World()

        @cgt.eager
        def part(x):
            log.append((world.calls, world.scale, len(world.seen), None if w.grad is None else w.grad.clone()))

        def f(x):
            if change == "count":
                world.calls += 1
            elif change == "store":
                world.scale = x * 2
            elif change == "append":
                world.seen.append(x * 2)
            else:
                (w * x).sum().backward()
            part(x)
            return x + 1

        f = wrap(f)
        for k in range(8):
            w.grad = None
            f(torch.full((3,), float(k), device=device))
        return [t for row in log for t in row if t is not None], f

    (want, _), (got, f) = outcomes(lambda f: f), outcomes(cgt.jit)
    assert len(want) == len(got) and all(same(a, b) for a, b in zip(got, want, strict=True))
    assert cgt.stats(f).replays == 0 and "behind changes" in " ".join(cgt.stats(f).reasons), cgt.explain(f)


def test_exceptions_are_the_users_own_and_come_once(device):
    calls = []

    @cgt.eager
    def part(x):
        calls.append(x)
        if len(calls) % 4 == 0:
            raise KeyError(len(calls))
        return x * 2

    f, x = cgt.jit(lambda x: part(x + 1) - 1), torch.ones(3, device=device)
    for k in range(1, 17):
        if k % 4 == 0:
            with pytest.raises(KeyError, match=str(k)):
                f(x)
        else:
            assert torch.equal(f(x), x * 3)
    assert len(calls) == 16 and cgt.stats(f).replays >= 6, cgt.explain(f)
    core.check_table()


def test_what_a_part_changed_stays_where_its_recording_comes_to_nothing(device):
    """An undone capture puts the function's changes back, and not the part's; also where that raised."""

    def outcomes(wrap):
        s, made = types.SimpleNamespace(n=0), []

        @cgt.eager
        def part(x):
            s.n += 1
            if s.n % 5 == 3:
                raise KeyError(s.n)
            return x * 2

        @wrap
        def f(x):
            return part(x + 1) * (1 if s.n >= 0 else 2)

        for k in range(12):
            try:
                made.append(f(torch.full((3,), float(k), device=device)))
            except KeyError as error:
                made.append(error.args)
            made.append(s.n)
        return made

    assert all(map(same, outcomes(cgt.jit), outcomes(lambda f: f)))


def test_a_part_that_calls_jitted_functions_and_resets(device):
    inner = cgt.jit(lambda x: x.sin() + 1)
    calls = []

    @cgt.eager
    def part(x):
        calls.append(inner(x))
        if len(calls) == 6:
            cgt.reset()
        return calls[-1] * 2

    f, x = cgt.jit(lambda x: part(x + 1) - 1), torch.ones(3, device=device)
    for _ in range(5):
        inner(x)
    for _ in range(14):
        assert torch.equal(f(x), ((x + 1).sin() + 1) * 2 - 1)
    assert len(calls) == 14 and cgt.stats(f).replays >= 6, cgt.explain(f)
    core.check_table()


@not_audited("recordings are in use until the audit is over")
def test_a_part_that_resets_its_own_function_and_another_one(device):
    """Their rows are in use until the call is over, and gone then."""
    other, parts = cgt.jit(lambda x: x.cos()), []

    @cgt.eager
    def part(x):
        if len(parts) == 1:
            cgt.reset(parts.pop())
        return x + 1

    f, x = cgt.jit(lambda x: part(x * 2) * 3), torch.ones(3, device=device)
    for which in (f, other):
        for _ in range(6):
            assert torch.equal(f(x), (x * 2 + 1) * 3) and torch.equal(other(x), x.cos())
        parts.append(which)
        before, row = cgt.stats(which), getattr(which, sites.ATTRIBUTE).f
        assert core.fn_nodes(row) and torch.equal(f(x), (x * 2 + 1) * 3) and not core.fn_nodes(row)
        for _ in range(4):
            assert torch.equal(f(x), (x * 2 + 1) * 3) and torch.equal(other(x), x.cos())
        assert cgt.stats(which).warmups == before.warmups + 1
    assert cgt.stats(f).replays >= 6


def test_a_part_that_waits_for_a_thread_that_differentiates_an_earlier_call(device):
    """As it does for autograd's own, on a GPU."""
    w, pending = nn.Parameter(torch.full((3,), 2.0, device=device)), []
    loss = cgt.jit(lambda x: (x * w).sum())

    @cgt.eager
    def part(x):
        while pending:
            thread = threading.Thread(target=pending.pop().backward, daemon=True)
            thread.start()
            thread.join(30)
            assert not thread.is_alive(), "it waits for this call, and this call for it"
        return x + 1

    f, x = cgt.jit(lambda x: part(x * 2) * 3), torch.ones(3, device=device)
    for _ in range(6):
        w.grad, y = None, loss(x)
        with torch.no_grad():
            f(x)
        y.backward()
    for _ in range(4):
        w.grad = None
        pending.append(loss(x))
        with torch.no_grad():
            assert torch.equal(f(x), (x * 2 + 1) * 3)
        assert torch.equal(w.grad, x)
    assert cgt.stats(f).replays >= 6 and cgt.stats(loss).replays >= 6, cgt.explain(f)


def test_arguments_that_the_part_drops(device):
    """The caller's list held the only reference to a tensor that the rest still reads."""
    box = []

    @cgt.eager
    def drop(x):
        box.clear()

    @cgt.jit
    def f(tensors):
        x = tensors[0]
        drop(x + 1)
        return x * 2

    for k in range(8):
        box.append(torch.full((1000,), float(k), device=device))
        want = box[0] * 2
        assert torch.equal(f(box), want)
    core.check_table()


def test_outside_and_nested(device):
    look = looked(world := World())
    x = torch.ones(3, device=device)
    look(x)
    inner = cgt.jit(watching(world))
    f = cgt.jit(lambda x: inner(x) * 2)
    for _ in range(8):
        assert torch.equal(f(x), (x * 2 + 1) * 2)
    assert world.calls == 9 and cgt.stats(f).replays >= 6, cgt.explain(f)


def test_methods_and_modules(device):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.log = nn.Linear(3, 3), []

        @cgt.eager
        def note(self, y):
            self.log.append(y.sum().item())

        def forward(self, x):
            y = self.linear(x)
            self.note(y)
            return y.relu()

    model = Model().to(device)
    f, x = cgt.jit(model), values(device, 2, 3)
    with torch.no_grad():
        for _ in range(8):
            assert torch.equal(f(x), model.linear(x).relu())
    assert len(model.log) == 8 and cgt.stats(f).replays >= 6, cgt.explain(f)


def test_reasons(device):
    def check(f, words, n=8, equal=True):
        f, x = cgt.jit(f), torch.ones(3, device=device)
        plain = f.__wrapped__
        for _ in range(n):
            got, want = f(x), plain(x)
            assert not equal or same(got, want)
        assert cgt.stats(f).replays == 0 and words in " ".join(cgt.stats(f).reasons), cgt.explain(f)

    part = cgt.eager(lambda x: x * 2)
    check(lambda x: part(x.add_(0)).clone(), "behind writes to tensors from outside")
    check(lambda x: part(x * torch.ones(3, device=device, requires_grad=True)).detach(), "requires grad")
    check(lambda x: cgt.eager(lambda y: y)(x * 2) + 1, "returns memory of its arguments")
    check(lambda x: x * len(cgt.eager(lambda y: {1, 2})(x)), "returns an object")
    check(lambda x: x + cgt.eager(lambda y: torch.rand(3).to(device) * 0)(x), "draws torch's random numbers")
    check(lambda x: cgt.eager(lambda o, y: y * 2)(World(), x + 1), "object that the jitted function made")
    check(lambda x: cgt.eager(lambda y: y * 2)(x + 1), "object that the jitted function made")
    writer = cgt.eager(lambda y: y.add_(0) * 0)
    check(lambda x: x + writer(x), "writes to an argument from outside")
    check(lambda x: torch.dropout(x, 0.5, True) * 0 + part(x), "draws torch's random numbers")
    if device.type == "cuda":
        check(lambda x: x + cgt.eager(lambda y: y.cpu())(x).sum().to(device), "not on the device")
    else:
        with pytest.raises(TypeError, match="takes a function"):
            cgt.eager(World)


def test_a_part_that_wrote_outside_where_its_call_goes_another_way(device):
    """It cannot be undone, and the call cannot run again: an error, not another number."""
    state, calls = torch.ones(3, device=device), []

    @cgt.eager
    def part(x):
        calls.append(0)
        if len(calls) == 7:
            state.add_(1)
        return 3 if len(calls) == 7 else 2

    f, x = cgt.jit(lambda x: (x + state) * part(x)), torch.ones(3, device=device)
    for _ in range(6):
        assert torch.equal(f(x), x * 4)
    with pytest.raises(cgt.CgtError, match="wrote to a tensor from outside"):
        f(x)
    assert torch.equal(f(x), x * 6) and len(calls) == 8 and cgt.stats(f).replays >= 4


@tells("island_unsafe")
@tells("island")
@tells("island_differs")
def test_sentences():
    """Above."""


def test_threads(device):
    """Each has its own answers."""
    world = World()
    f, wrong = cgt.jit(watching(world)), []

    def work(k):
        x = torch.full((3,), float(k), device=device)
        for _ in range(30):
            if not torch.equal(f(x), x * 2 + 1):
                wrong.append(k)

    work(0)
    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not wrong and world.calls == 150
    assert cgt.stats(f).replays > 0, cgt.explain(f)
