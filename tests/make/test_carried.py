"""Written tensors that lie elsewhere at each call: the graph works on a copy and copies it back (design 135). And read ones that share
bytes."""

import functools
import types

import cgt_core as core
import pytest
import torch
from helpers import counts, identical, in_threads, not_audited, tells, values

import cgt


def fresh(device, *shape, seed=0):
    """A tensor of its own memory, where nobody was before it."""
    return values(device, *shape, seed=seed).clone()


def agree(device, function, make, n=20, **options):
    """Calls of both with tensors that make(k) makes anew for each: results, what was written, versions. The jitted function, and what
    its calls were given."""
    f, kept = cgt.jit(function, **options), []
    for k in range(n):
        mine, theirs = make(k), make(k)
        kept.append(mine)
        got, want = f(*mine), function(*theirs)
        assert identical(got, want), k
        for a, b in zip(mine, theirs, strict=True):
            if isinstance(a, torch.Tensor):
                assert torch.equal(a, b) and a._version == b._version, k
        if isinstance(got, torch.Tensor):
            assert next((j for j, a in enumerate(mine) if got is a), None) == next((j for j, b in enumerate(theirs) if want is b), None)
    return f, kept


def in_place(x, y):
    return x.mul_(2).add_(y)


def cache(keys, position, key):
    keys.index_copy_(0, position, key)
    return keys.softmax(0).sum(1)


def both(x, y):
    x.add_(y)
    y.sub_(x)
    return x * y


def part(x, y):
    x[1:3].copy_(y[:2])
    x[:, 0].zero_()
    return x.sum(), x[2]


def compares(x, y):
    x.add_(y)
    return x * 2 if x.sum() > 0 else x - 1


def computes(x, y):
    x.mul_(0.5)
    x.div_(1 + x.norm().item())
    y.add_(1)
    return x + y


def returns_views(x, y):
    x.add_(y)
    return x[1:], x.t(), y.view(-1)


def writes_twice(x, y):
    z = x + 1
    x.copy_(z)
    y.copy_(x * 2)
    x.add_(y)
    return z


def random(x, y):
    x.add_(torch.rand_like(x))
    return torch.nn.functional.dropout(y, 0.5)


FUNCTIONS = [in_place, both, part, compares, computes, returns_views, writes_twice]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_fresh_tensors_at_each_call(device, function, mode):
    with mode():
        f, _ = agree(device, function, lambda k: (fresh(device, 4, 4, seed=k), fresh(device, 4, 4, seed=k + 100)))
    s = cgt.stats(f)
    assert s.replays >= 14 and s.records <= 3, cgt.explain(f)


def test_in_inference_mode(device):
    f, xs = cgt.jit(in_place), []
    with torch.inference_mode():
        for k in range(8):
            x, y = fresh(device, 4, seed=k), fresh(device, 4, seed=k + 50)
            want = x * 2 + y
            assert f(x, y) is x and torch.equal(x, want)
            xs.append(x)
    assert counts(f) == (1, 1, 6, 0)


def test_a_cache_that_is_handed_in_anew(device):
    """Of a decoder that has several sequences under way."""
    caches = [fresh(device, 6, 4, seed=k) for k in range(5)]
    twins = [c.clone() for c in caches]
    f = cgt.jit(cache)
    for k in range(30):
        position, key = torch.tensor([k % 6], device=device), fresh(device, 1, 4, seed=k)
        at = k * 2 % 5
        assert torch.equal(f(caches[at], position, key), cache(twins[at], position, key))
        assert all(map(torch.equal, caches, twins)), k
    s = cgt.stats(f)
    assert s.records <= 2 and s.replays >= 27 and s.eager == 0, cgt.explain(f)
    assert "moving: args[0] (written)" in cgt.explain(f) and s.copied_bytes == 0


def test_random_numbers_are_those_of_eager(device):
    f, kept = cgt.jit(random), []
    for k in range(10):
        outcomes = []
        for function in (f, random):
            torch.manual_seed(k)
            x, y = torch.zeros(4, 4, device=device), torch.ones(4, 4, device=device)
            kept.append(x)
            outcomes.append((function(x, y).clone(), x.clone(), torch.rand(3, device=device)))
        assert identical(*outcomes), k
    assert cgt.stats(f).replays >= 7, cgt.explain(f)


def test_what_lies_in_a_place_and_is_written(device):
    """State of a module that is replaced now and then: a checkpoint is loaded, another agent has its turn."""
    mine, theirs = types.SimpleNamespace(h=fresh(device, 4)), types.SimpleNamespace(h=fresh(device, 4))

    def step(o, x):
        o.h.mul_(0.5).add_(x)
        return o.h * 2

    f = cgt.jit(functools.partial(step, mine))
    for k in range(30):
        if k % 3 == 0:
            mine.h, theirs.h = mine.h.clone(), theirs.h.clone()
        x = fresh(device, 4, seed=k)
        assert torch.equal(f(x), step(theirs, x)) and torch.equal(mine.h, theirs.h), k
    assert cgt.stats(f).replays >= 24, cgt.explain(f)


def test_result_of_another_recording_is_written(device):
    """In place, by the next function, wherever it comes to lie."""
    make, write = cgt.jit(lambda x: (x * 2, x + 1)), cgt.jit(in_place)
    held = []
    for k in range(20):
        cgt.step()
        x = fresh(device, 4, seed=k)
        a, b = make(x)
        one = a if k % 2 else b
        assert write(one, x) is one
        assert torch.equal(one, (x * 2 if k % 2 else x + 1) * 2 + x), k
        held.append((one, one.clone()))
        assert all(torch.equal(t, was) for t, was in held[-4:]), k
    assert cgt.stats(write).replays >= 8, cgt.explain(write)


def test_two_caches_in_one_tensor(device):
    """Keys and values, each a half of it: a write to the one counts as one to the other. Recorded for each address."""
    pairs = [fresh(device, 2, 128, seed=k) for k in range(4)]
    twins = [t.clone() for t in pairs]
    f = cgt.jit(both)
    for k in range(20):
        (a, b), (c, d) = pairs[k * 3 % 4], twins[k * 3 % 4]
        assert torch.equal(f(a, b), both(c, d)) and all(map(torch.equal, pairs, twins)), k
        assert a._version == c._version
    assert cgt.stats(f).records == 4 and cgt.stats(f).replays >= 12, cgt.explain(f)


def test_one_tensor_twice(device):
    f = cgt.jit(in_place)
    for k in range(12):
        x, twin, y = fresh(device, 4, seed=k), fresh(device, 4, seed=k), fresh(device, 4, seed=k + 9)
        if k % 4 == 3:
            assert torch.equal(f(x, x), in_place(twin, twin)) and torch.equal(x, twin), k
        else:
            assert torch.equal(f(x, y), in_place(twin, y)) and torch.equal(x, twin), k
    assert cgt.stats(f).replays >= 5, cgt.explain(f)


@pytest.mark.parametrize("how", ["after", "before", "inside", "same"])
def test_arguments_that_overlap_at_one_call_only(device, how):
    """They did not when it was recorded, and then the order of reads and writes does not show."""

    def write(x, y):
        x.add_(1)
        z = y * 2
        x.mul_(3)
        return z

    f, kept = cgt.jit(write), []
    cuts = {"after": (0, 128), "before": (128, 0), "inside": (0, 0), "same": (0, 0)}[how]
    for k in range(16):
        outcomes = []
        for function in (f, write):
            base = values(device, 512, seed=k).clone()
            (a, b), n = (cuts, 100 if how == "inside" else 200) if k % 5 == 4 else ((0, 256), 200)
            x, y = base[a : a + 200], base[b : b + n] if k % 5 == 4 else base[b : b + n].clone()
            kept.append((base, y))
            outcomes.append((function(x, y).clone(), base))
        assert identical(*outcomes), k
    assert cgt.stats(f).replays >= 4, cgt.explain(f)


@pytest.mark.parametrize("kind", ["gaps", "large"])
@pytest.mark.parametrize("reads", [False, True])
@tells("no_way_back")
def test_what_cannot_be_copied_back_is_told_where_it_lies_or_stays(device, kind, reads, monkeypatch):
    def function(x, y):
        x.add_(1)
        return (x * y).sum() if not reads or y.sum() > -1e9 else x.sum()

    if kind == "large":
        monkeypatch.setattr("cgt.words.options.MAX_CARRIED", (8, 8))

    def make(k):
        x = fresh(device, 4, 6, seed=k)
        return x[:, ::2] if kind == "gaps" else x[:, :3].contiguous(), fresh(device, 4, 3, seed=k + 50)

    f, kept = agree(device, function, make, n=8)
    s = cgt.stats(f)
    if not reads:
        assert counts(f) == (1, 1, 6, 0) and s.copied_bytes == 0, cgt.explain(f)
        return
    assert any("CGT230" in text for text in s.reasons), cgt.explain(f)
    before = s.replays
    for _ in range(4):  # the advice
        f(*kept[-1])
    assert cgt.stats(f).replays >= before + 2, cgt.explain(f)


@pytest.mark.parametrize("kind", ["requires grad", "overlaps", "address", "fixed"])
def test_what_cannot_be_told_apart_is_recorded_for_each_address(device, kind):
    def function(x, y):
        if kind == "address":
            x.data_ptr()
        with torch.no_grad():
            x.add_(1)
        return (x.detach() * y).sum()

    def make(k):
        x, y = fresh(device, 4, 6, seed=k), fresh(device, 4, 3, seed=k + 50)
        if kind == "overlaps":
            return x.view(24)[:12].view(4, 3), x.view(24)[4:16].view(4, 3)
        return x[:2].reshape(4, 3).requires_grad_(kind == "requires grad"), y

    f, kept = agree(device, function, make, n=5, inputs="fixed" if kind == "fixed" else "auto")
    assert cgt.stats(f).records >= 2 or kind == "address", cgt.explain(f)
    if kind == "address" and device.type == "cpu":
        return  # eager there
    before = cgt.stats(f).replays
    for _ in range(4):
        f(*kept[-1])
    assert cgt.stats(f).replays >= before + 2, cgt.explain(f)


@not_audited("a driver call that fails on purpose")
@pytest.mark.parametrize("call", ["copy", "patch", "launch", "end", "instantiate", "checkpoint"])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_failed_driver_call(device, call, after):
    f = cgt.jit(both)
    for k in range(10):
        x, y = fresh(device, 4, seed=k), fresh(device, 4, seed=k + 20)
        a, b = x.clone(), y.clone()
        core.fault_set(call if k in (1, 5) else "", after, 2)
        try:
            got, failed = f(x, y), False
        except cgt.CgtError:
            failed = True
        core.fault_set("", 0, 0)
        if not failed:
            assert torch.equal(got, both(a, b)) and torch.equal(x, a) and torch.equal(y, b), (k, cgt.explain(f))
    core.check_table()
    assert cgt.stats(f).replays >= 1 or cgt.stats(f).eager, cgt.explain(f)


def test_what_was_written_before_an_op_failed_stays_written(device):
    """An index that is out of range, in a call that is recorded and in one that is replayed."""
    if device.type == "cuda":
        pytest.skip("there the failure is the device's, which nothing survives")

    def function(x, index):
        x.add_(1)
        y = x[index]
        x.mul_(2)
        return y

    for bad in (1, 2, 6):
        f = cgt.jit(function)
        for k in range(8):
            x, twin = fresh(device, 4, seed=k), fresh(device, 4, seed=k)
            index = torch.tensor([9 if k == bad else 1])
            for one, t in ((f, x), (function, twin)):
                if k == bad:
                    with pytest.raises(IndexError):
                        one(t, index)
                else:
                    one(t, index)
            assert torch.equal(x, twin), (bad, k)


def test_exception_of_the_functions_own_while_it_is_recorded(device):
    def function(x, stop):
        x.add_(1)
        if stop:
            raise KeyError("mine")
        return x * 2

    f = cgt.jit(function)
    for k in range(8):
        x, twin = fresh(device, 4, seed=k), fresh(device, 4, seed=k)
        for one, t in ((f, x), (function, twin)):
            if k in (1, 5):
                with pytest.raises(KeyError):
                    one(t, True)
            else:
                one(t, False)
        assert torch.equal(x, twin), k
    assert cgt.stats(f).replays >= 3, cgt.explain(f)


def test_in_threads(device):
    f = cgt.jit(in_place)

    def work(j):
        for k in range(20):
            x, y = fresh(device, 4, seed=k + j), fresh(device, 4, seed=k + 30)
            want = x * 2 + y
            assert torch.equal(f(x, y), want) and torch.equal(x, want)

    in_threads(3, work)
    assert cgt.stats(f).replays > 0, cgt.explain(f)


# --- read arguments that share bytes ----------------------------------------------------------------


def test_parts_of_one_tensor_are_copied_each(device):
    """The tokens of a language model, and the same one further on."""
    f, _ = agree(device, lambda a, b: (a - b).square().mean(), lambda k: (t := fresh(device, 4, 9, seed=k), (t[:, :-1], t[:, 1:]))[1])
    assert counts(f) == (1, 1, 18, 0), cgt.explain(f)


@pytest.mark.parametrize("second", ["further on", "inside", "the same", "of another type"])
def test_parts_that_lie_otherwise_at_another_call(device, second):
    """An op on a part of the one may be recorded on the copy of the other."""

    def function(a, b):
        return a[1:].sum() * 2 + b[0] - b[-1], b[:2] * a[:2]

    def make(k):
        t = fresh(device, 40, seed=k)
        if k % 4 == 3:
            return t[:16], t.roll(1)[:16] if second != "of another type" else t.roll(1)[:16].int()
        b = {"further on": t[4:20], "inside": t[2:14], "the same": t[:16].detach(), "of another type": t.view(torch.int32)[4:20]}[second]
        return t[:16], b

    f, _ = agree(device, function, make, n=24)
    assert cgt.stats(f).replays >= 14, cgt.explain(f)


@tells("shared_and_written")
def test_one_of_them_is_written_after_all(device):
    def function(a, b, write):
        y = a * 2
        if write:
            a.add_(1)
        return y + b

    f, kept = cgt.jit(function), []
    for k in range(24):
        outcomes = []
        for one in (f, function):
            t = fresh(device, 4, 9, seed=k)
            kept.append(t)
            outcomes.append((one(t[:, :-1], t[:, 1:], k > 6 and k % 3 == 0).clone(), t))
        assert identical(*outcomes), k
    assert any("CGT229" in reason for reason in cgt.stats(f).reasons), cgt.explain(f)
    assert cgt.stats(f).replays >= 12, cgt.explain(f)
    table = [fresh(device, 4, 9, seed=k) for k in range(12)]  # the advice: the whole tensor
    g = cgt.jit(lambda t, write: function(t[:, :-1], t[:, 1:], write))
    for k, t in enumerate(table):
        want = function((twin := t.clone())[:, :-1], twin[:, 1:], k % 2 == 1)
        assert torch.equal(g(t, k % 2 == 1), want) and torch.equal(t, twin)
    assert cgt.stats(g).replays >= 6, cgt.explain(g)


def statistics(x, y):
    return torch.nn.functional.batch_norm(x, y, y * 2, training=True)


def saved_behind_the_write(x, y):
    y.mul_(2)
    return x * y


def partly_written(x, y):
    y[1:].add_(1)
    return x * y[1:].sum()


def written_between(x, y):
    z = x + y
    y.copy_(x.detach().sin().mean(0))
    return z * y


def saved_before_the_write(x, y):
    z = x * y
    y.add_(1)
    return z


@pytest.mark.parametrize("act", ["nothing", "write", "retain", "hold"])
@pytest.mark.parametrize(
    "function", [statistics, saved_behind_the_write, partly_written, written_between, saved_before_the_write]
)  # fmt: skip
def test_what_is_written_may_move_where_the_result_requires_grad(device, function, act):
    """What is saved before it is written is told by eager's backward, which raises."""
    f, kept, held = cgt.jit(function), [], []

    def backward(result, x):
        try:
            for again in range(2 if act == "retain" else 1):
                (result * (again + 2)).square().sum().backward(retain_graph=act == "retain")
        except RuntimeError as error:
            assert "modified" in str(error)
            return None
        return x.grad

    for k in range(16):
        answers = []
        for run in (f, function):
            x, y = fresh(device, 5, 4, seed=k).requires_grad_(), fresh(device, 4, seed=k + 50)
            kept.append((y, torch.empty(64 * k + 1, device=device)))  # the next one lies elsewhere
            result = run(x, y)
            answers.append((result.detach().clone(), y.clone(), torch.tensor(y._version)))
            if act == "write":
                y.add_(1)
            held.append((result, x))
            del result
        assert identical(*answers)
        if act != "hold" or k % 4 == 3:
            grads = [backward(*one) for one in held]
            assert all(identical(*pair) for pair in zip(grads[::2], grads[1::2], strict=True)), k
            held.clear()
    if function is saved_before_the_write:
        assert cgt.stats(f).replays == 0 and any("CGT413" in reason for reason in cgt.stats(f).reasons)
    else:
        assert cgt.stats(f).replays >= 10, cgt.stats(f).reasons
