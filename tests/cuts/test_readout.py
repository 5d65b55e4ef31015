"""Numbers and copies on the host that a function only hands out: it replays, and each call gets today's. Numbers that it only
compares: the outcome chooses the way."""

import functools
import sys
import weakref

import numpy as np
import pytest
import torch
from helpers import in_threads, values
from torch import nn

import cgt
from cgt.cuts import segments
from cgt.look import bytecode, returns


def one(x):
    return x.sum().item()


def twice(x):
    n = x.mean().item()
    return n, n


def in_a_dict(x):
    loss, y = x.sum(), x * 2
    return {"loss": loss.item(), "y": y, "largest": x.max().item()}


def in_lists(x):
    return [x.sum().item(), [x[0].item(), x * 3]], (x.min().item(),)


def kept_in_variables(x):
    total = x.sum()
    n = total.item()
    y = (x * 2).relu() if len(x) > 1 else x
    best = n
    with torch.no_grad():
        z = y + total
    return best, z


def on_some_ways(x):
    n = 0.0
    if x.shape[0] > 2:
        n = (x * 2).sum().item()
    return n, x + 1


def whole_number(x):
    return x.argmax().item(), x * 2


def truth(x):
    return (x.sum() > 3).item(), x * 2


def as_list(x):
    return (x * 2).tolist(), x[:2].int().tolist()


def of_an_argument(x):
    return x[1].item(), x + 1


def dropped(x):
    x.sum().item()
    return x * 2


def in_a_loop(x):
    y, found = x, []
    for _ in range(3):
        y = y * 0.5
    total = y.sum()
    return total.item(), found


def half(x):
    return x.half().sum().item(), x.bfloat16().sum().item(), x.double().sum().item()


def written_afterwards(x):
    y = x * 2
    n = y[0].item()
    y.add_(1)
    return n, y


@torch.no_grad()
def decorated(x):
    return x.sum().item()


FUNCTIONS = [
    one, twice, in_a_dict, in_lists, kept_in_variables, on_some_ways, whole_number, truth, as_list, of_an_argument, dropped,
    in_a_loop, half, written_afterwards, decorated,
]  # fmt: skip


def inputs(device, n=12):
    return [torch.randn(4, generator=torch.Generator().manual_seed(k)).to(device) for k in range(n)]


def alike(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and alike(list(a.values()), list(b.values()))
    return type(a) is type(b) and (a == b or (a != a and b != b))


@pytest.mark.parametrize("moving", [False, True], ids=["same memory", "moving"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_numbers_are_those_of_the_call(function, moving, device):
    f, xs = cgt.jit(function), inputs(device)
    x = xs[0].clone()
    for y in xs:
        x = y.clone() if moving else x.copy_(y)
        assert alike(f(x), function(x))
    assert cgt.stats(f).replays >= 8 and cgt.stats(f).records <= 2, cgt.explain(f)


def test_returned_number_is_the_same_object_in_both_places(device):
    f, x = cgt.jit(twice), torch.ones(3, device=device)
    for _ in range(5):
        a, b = f(x)
        assert a is b


def test_results_of_other_calls_stay(device):
    f = cgt.jit(as_list)
    held = [f(x) for x in inputs(device)]
    assert held == [as_list(x) for x in inputs(device)] and cgt.stats(f).replays > 0


def test_whole_training_step_returns_its_loss(device):
    def program(wrap):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def step(x, y):
            optimizer.zero_grad()
            out = model(x)
            loss = ((out - y) ** 2).mean()
            loss.backward()
            optimizer.step()
            return loss.item(), (out > 0).sum().item()

        run = wrap(step)
        data = torch.randn(12, 16, 5, generator=torch.Generator().manual_seed(1)).to(device)
        x, y = data[0, :, :4].clone(), data[0, :, 4:].clone()
        return [run(x.copy_(d[:, :4]), y.copy_(d[:, 4:])) for d in data], run

    (eager, _), (ours, run) = program(lambda f: f), program(cgt.jit)
    assert ours == eager and cgt.stats(run).replays >= 8, cgt.explain(run)
    assert f"waits for what it hands out on the host: {__file__}:" in cgt.explain(run)


def test_decoding_one_token_at_a_time(device):
    """The commonest read of all: the next token, as a number."""
    torch.manual_seed(0)
    embed, head = nn.Embedding(50, 16).to(device), nn.Linear(16, 50).to(device)
    token = torch.zeros(1, dtype=torch.long, device=device)

    @torch.no_grad()
    def decode(token):
        return head(torch.tanh(embed(token))).argmax(-1).item()

    f, ours, theirs, a, b = cgt.jit(decode), [], [], 3, 3
    for _ in range(40):
        a, b = f(token.fill_(a)), decode(token.fill_(b))
        ours.append(a)
        theirs.append(b)
    assert ours == theirs and len(set(ours)) > 2
    assert cgt.stats(f).replays >= 36, cgt.explain(f)


def test_number_beside_a_result_with_a_history(device):
    w = torch.randn(4, device=device, requires_grad=True)

    def function(x):
        y = w * x
        return y, y.sum().item()

    f = cgt.jit(function)
    for x in inputs(device):
        (a, n), (b, m) = f(x), function(x)
        assert torch.equal(a, b) and n == m
        assert torch.equal(*[torch.autograd.grad(y.sum(), w)[0] for y in (a, b)])
    assert cgt.stats(f).replays >= 8


def test_number_and_a_branch_on_another(device):
    def function(x):
        n = x.sum().item()
        y = x * 2 if x[0] > 0 else x - 1
        return n, y, y.mean().item()

    f = cgt.jit(function)
    for x in inputs(device, 30):
        assert alike(f(x), function(x))
    assert cgt.stats(f).replays >= 20 and cgt.stats(f).records <= 4, cgt.explain(f)


def test_functions_share_the_room_on_the_host(device):
    f, g = cgt.jit(one), cgt.jit(as_list)
    for x in inputs(device):
        a, b, c = f(x), g(x), f(x + 1)
        assert (a, b, c) == (one(x), as_list(x), one(x + 1))
    assert cgt.stats(f).replays and cgt.stats(g).replays


def test_threads_get_their_own(device):
    f = cgt.jit(one)

    def work(k):
        x = torch.full((4,), float(k), device=device)
        for _ in range(50):
            assert f(x) == 4.0 * k

    in_threads(4, work)


# --- comparisons ---------------------------------------------------------------------------------


def positive(x):
    return x * 2 if x.sum().item() > 0 else x - 1


def between(x):
    n = x.mean().item()
    return (x + 1, n) if -0.5 < n <= 0.5 else (x - 1, n)


def reflected(x):
    return x * 2 if x[0].item() <= 0.25 else -x


def of_two(x):
    return x * 2 if x[0].item() < x[1].item() else x * 3


def written_before(x):
    y = x * 1
    n = y.sum().item()
    y.add_(100)
    return y if n > 0 else -y


def counts(x):
    n = (x > 0).sum().item()
    return x * 2 if n >= 2 else x * 3 if n == 1 else x


def until(x):
    rounds = 0
    while x.abs().max().item() > 0.25 and rounds < 20:
        x = x * 0.5
        rounds = rounds + 1
    return x, rounds


def by_a_helper(x):
    return x * 2 if total_of(x) > 0 else x


def nothing_is_equal_to_it(x):
    n = (x[0] * float("nan")).item()
    return x * 2 if n != n else x


def with_another_type(x):
    return x * 2 if x.argmax().item() < 1.5 else x * 3


def of_a_truth(x):
    return x * 2 if (x.sum() > 0).item() == True else x  # noqa: E712


COMPARED = [
    positive, between, reflected, of_two, written_before, counts, until, by_a_helper, nothing_is_equal_to_it, with_another_type,
    of_a_truth,
]  # fmt: skip


@pytest.mark.parametrize("function", COMPARED, ids=lambda f: f.__name__)
def test_number_that_is_compared_chooses_by_the_outcome(function, device):
    f, x = cgt.jit(function), torch.zeros(4, device=device)
    for y in inputs(device, 40):
        x.copy_(y)
        assert alike(f(x), function(x))
    assert cgt.stats(f).replays >= 20, cgt.explain(f)


@pytest.mark.parametrize(
    ("number", "dtype", "other"),
    [
        (0.1, torch.float32, 0.1), (0.1, torch.float64, 0.1), (0.1, torch.bfloat16, 0.1), (0.5, torch.float16, 0.5),
        (float("inf"), torch.float32, 1e300), (float("nan"), torch.float32, 0.0), (-0.0, torch.float32, 0.0),
        (2.0**53, torch.float64, 2**53), (2.0**53, torch.float64, 2**53 + 1), (1.0, torch.float32, True), (3, torch.int8, 300),
        (2**62 + 1, torch.int64, 2**62), (2**53, torch.int64, float(2**53 + 2)), (255, torch.uint8, -1), (True, torch.bool, 1),
        (1, torch.int32, 1.5), (2.5, torch.float32, 10**400),
    ],
)  # fmt: skip
def test_comparison_is_pythons(number, dtype, other, device):
    """To the last bit of 64, whatever the tensor has."""

    def function(x):
        return (
            x.item() < other, x.item() <= other, x.item() > other, x.item() >= other, x.item() == other, x.item() != other,
            other < x.item(), x.item() == x.item(), 1 if x.item() > other else 2,
        )  # fmt: skip

    x = torch.tensor(number, dtype=dtype, device=device)
    f = cgt.jit(function)
    for _ in range(4):
        assert f(x) == function(x)


def test_comparison_with_something_else_is_the_numbers(device):
    t = torch.ones(2, device=device)

    def function(x):
        n = x.sum().item()
        return n == None, n == "a", n != (1, 2)  # noqa: E711

    f, g = cgt.jit(function), cgt.jit(lambda x: t > x.sum().item())
    for x in inputs(device, 5):
        assert f(x) == (False, False, True)
        assert torch.equal(g(x), t > x.sum().item())


# --- helpers -------------------------------------------------------------------------------------


def total_of(x):
    return x.sum().item()


def both_of(x, *, twice=False):
    y = x * 2 if twice else x
    n = total_of(y)
    return n, x.max().item()


class Measures:
    def __init__(self):
        self.inner = None

    def largest(self, x):
        return x.max().item()

    @staticmethod
    def smallest(x):
        return x.min().item()

    def both(self, x):
        return self.largest(x), self.smallest(x), self.inner.largest(x * 2) if self.inner is None else self.inner.largest(x)


def passed_through(function):
    def call(*args, **kwargs):
        y = args[0] * 3
        return function(*args, **kwargs), y

    return call


M = Measures()
M.inner = Measures()
HELPED = {
    "a function": lambda x: (total_of(x), x * 2),
    "with keywords": lambda x: both_of(x + 1, twice=True),
    "a function of a function": lambda x: {"a": both_of(x), "b": total_of(x)},
    "a method": lambda x: [M.largest(x), M.smallest(x)],
    "a method of a method": lambda x: M.both(x),
    "a decorator": passed_through(total_of),
    "no_grad": torch.no_grad()(lambda x: total_of(x)),
}


@pytest.mark.parametrize("name", HELPED)
def test_helpers_hand_out_numbers_too(name, device):
    function = HELPED[name]
    f = cgt.jit(function)
    for x in inputs(device):
        assert alike(f(x), function(x))
    assert cgt.stats(f).replays >= 8, cgt.explain(f)


def test_number_of_a_jitted_function_inside_comes_to_its_caller(device):
    inner = cgt.jit(total_of)

    def function(x):
        n = inner(x)
        return x * n, inner(x * 2) > 0, inner(x + 1)

    f = cgt.jit(function)
    for x in inputs(device, 6):
        assert alike(f(x), function(x)) and inner(x) == total_of(x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams are CUDA's")
def test_number_of_another_stream():
    side = torch.cuda.Stream()

    def function(x):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x
            for _ in range(50):
                y = torch.sin(y) + x
            n = y.sum().item()
        torch.cuda.current_stream().wait_stream(side)
        return n, x * 2

    f = cgt.jit(function)
    for x in inputs("cuda", 6):
        assert alike(f(x), function(x))


def test_variables_of_a_caller_are_not_kept(device):
    """Who called is asked for by names of variables; what lies in the others may go when the function lets it go."""
    gone = []

    def function(x):
        y = x * 2
        there = weakref.ref(y)
        n = total_of(y)
        del y
        gone.append(there() is None)
        return n

    f, x = cgt.jit(function), torch.ones(3, device=device)
    for _ in range(3):
        assert f(x) == 6.0
    assert all(gone) and len(gone) >= 2


NAMESPACES = []


def looks_at_its_caller():
    NAMESPACES.append(sys._getframe(1).f_locals)


def holds_its_variables(x):
    there = locals()
    y = x * 2
    return total_of(y), sorted(there)


def is_looked_at(x):
    looks_at_its_caller()
    y = x * 2
    n = total_of(y)
    return n, sorted(NAMESPACES[-1])


@pytest.mark.parametrize("function", [holds_its_variables, is_looked_at], ids=lambda f: f.__name__)
def test_who_called_is_not_asked_of_a_frames_variables(function, device):
    """Until Python 3.12 that would write to what somebody holds of them; from 3.13 on, that holds the frame."""
    f = cgt.jit(function)
    for x in inputs(device, 5):
        assert f(x) == function(x)
    NAMESPACES.clear()


@pytest.mark.parametrize("wrap", [functools.cache, functools.partial], ids=lambda f: f.__name__)
def test_function_that_is_called_by_way_of_another_object(wrap, device):
    """A cache must not keep what stands for a number; partial hands on what it gets."""
    function = wrap(total_of)
    f, x = cgt.jit(function), torch.ones(3, device=device)
    assert [f(x) for _ in range(5)] == [3.0] * 5 and type(function(x)) is float
    assert (cgt.stats(f).replays > 0) or wrap is functools.cache


@functools.cache
def cached(n):
    return torch.full((3,), float(n)).sum().item()


class Keeper:
    """What is looked at, or kept where we do not see it, is no readout."""

    kept = None

    def __init__(self):
        self.found = []

    def compares(self, x):
        n = x.sum().item()
        return 1 if n > 0 else 2

    def computes(self, x):
        return x.sum().item() * 2

    def asks_its_type(self, x):
        n = x.sum().item()
        return isinstance(n, float)

    def keeps(self, x):
        self.kept = n = x.sum().item()
        return n

    def passes_on(self, x):
        return float(x.sum().item())

    def prints(self, x):
        return f"{x.sum().item():.3f}"

    def makes_a_closure(self, x):
        n = x.sum().item()
        return (lambda: n)()

    def uses_it_as_a_key(self, x):
        return {x.argmax().item(): 1}

    def uses_it_later(self, x):
        n = x.sum().item()
        for _ in range(2):
            x = x * 2
        if len(x) > 3:
            return x + n
        return x

    def uses_it_in_a_handler(self, x):
        n = x.sum().item()
        try:
            raise ValueError
        except ValueError:
            return n + 1

    def looks_into_the_list(self, x):
        found = [x.sum().item()]
        return found[0] + 1

    def looks_at_locals(self, x):
        n = x.sum().item()
        return sorted(locals()), n

    def yields(self, x):
        return [*self.parts(x)]

    def parts(self, x):
        yield x.sum().item()

    def maps(self, x):
        return sum(map(torch.Tensor.item, (x[0], x[1])))

    def maps_a_helper(self, x):
        return sum(map(total_of, (x[:2], x[2:])))

    def sorts_by_a_helper(self, x):
        return sorted((x[:2], x[2:]), key=total_of)[0] * 2

    def calls_a_cached_helper(self, x):
        return cached(3), x * 2

    def calls_through_partial(self, x):
        return functools.partial(total_of, x)() + 1

    def looks_at_what_a_helper_gives(self, x):
        return 1 if total_of(x) > 0 else 2

    def makes_it_by_a_property(self, x):
        self.x = x * 2
        return self.total

    @property
    def total(self):
        return self.x.sum().item() + 1

    def unpacks(self, x):
        a, b = x[:2].tolist()
        return a - b


@pytest.mark.parametrize("name", [name for name in vars(Keeper) if not name.startswith("_") and name not in ("kept", "parts", "total")])
def test_number_that_is_looked_at_is_a_number(name, device):
    ours, theirs = Keeper(), Keeper()
    f, g = cgt.jit(getattr(ours, name)), getattr(theirs, name)
    for x in inputs(device, 6):
        assert alike(f(x), g(x)) and alike(ours.kept, theirs.kept)


def test_call_that_is_no_recording_after_all_has_its_number(device):
    """What was recorded in vain stands: the numbers in it are those of the call."""
    held = []

    def function(x):
        y = x * 2
        held.append(y)
        n = y.sum().item()
        return [n, (x[0].item(), y)], {"n": n}

    f = cgt.jit(function)
    for x in inputs(device, 6):
        got, n = f(x), (x * 2).sum().item()
        assert got[0][0] == got[1]["n"] == n and got[0][1][0] == x[0].item() and torch.equal(got[0][1][1], x * 2)
        held.clear()


def test_result_that_is_refused_has_its_number(device):
    mine = [1, 2]
    mine.append(mine)

    def function(x):
        return x.sum().item(), object(), mine[0]

    f = cgt.jit(function)
    for x in inputs(device, 6):
        assert f(x)[0] == x.sum().item()
    assert cgt.stats(f).replays == 0


def test_more_numbers_than_there_is_room_for(device):
    def function(x):
        return [*map(len, (x, x))], x.tolist()

    f, x = cgt.jit(function), torch.arange(1024.0, device=device)
    for k in range(5):
        assert f(x + k)[1] == (x + k).tolist()
    big = torch.arange(5000.0, device=device)
    g = cgt.jit(lambda x: x.tolist())
    for k in range(4):
        assert g(big + k) == (big + k).tolist()
    assert cgt.stats(g).replays == 0


def test_error_of_the_method_is_the_same(device):
    f = cgt.jit(lambda x: x.item())
    for _ in range(3):
        with pytest.raises(RuntimeError, match="Scalar"):
            f(torch.ones(2, device=device))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on the host .cpu() is the tensor itself")
@pytest.mark.parametrize("how", ["cpu", "numpy", "item", "list"])
def test_copy_on_the_host(how):
    def act(x):
        y = torch.tanh(x * 2)
        if how == "cpu":
            return y.cpu()
        if how == "numpy":
            return y.detach().cpu().numpy(), x
        if how == "item":
            return y.sum().cpu().item()
        a = y.cpu()
        return a.tolist(), a

    f = cgt.jit(act)
    held = []
    for x in inputs("cuda"):
        got, want = f(x), act(x)
        got, want = [one if isinstance(one, tuple) else (one,) for one in (got, want)]
        for a, b in zip(got, want, strict=True):
            assert type(a) is type(b) and np.array_equal(*[v.cpu() if isinstance(v, torch.Tensor) else v for v in (a, b)])
        held.append((got, want))
    for got, want in held:  # no call gets another one's memory
        assert all(np.array_equal(*[v.cpu() if isinstance(v, torch.Tensor) else v for v in pair]) for pair in zip(got, want, strict=True))
    assert cgt.stats(f).replays >= 8, cgt.explain(f)


def function_of(text):
    return function_from(text).__code__


def function_from(text):
    space = {}
    exec(f"def f(x, y=0, *more):\n{text}", space)
    return space["f"]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("    return x.item()", {"returned"}),
        ("    n = x.item(); m = n; return m, [n, {'a': m}]", True),
        ("    n = x.item()\n    while y:\n        y = y - 1\n    return n", True),
        ("    n = x.item()\n    with y:\n        z = y + 1\n    return n, z", True),
        ("    n = x.item()\n    try:\n        y.go()\n    except ValueError:\n        return n\n    return n, 1", True),
        ("    return [x.item(), y.f(1, a=2), y[1:2], -y, not y, f'{y}', (lambda: y)()]", True),
        ("    a, b = x.item(), y\n    a, b = b, a\n    return a, b", True),
        ("    n = x.item()\n    return 1", True),
        ("    n = x.item()\n    n = 2\n    return n + 1", True),
        ("    n = x.item()\n    del n\n    return y", True),
        ("    return x.item() + 1", {"computed", "returned"}),
        ("    return 1 - x.item() / 2 * y", {"computed", "returned"}),
        ("    n = -x.item()\n    n -= y\n    return n", {"computed", "returned"}),
        ("    return ~x.item(), x", False),
        ("    n = x.item()\n    return n * 2 if n > 1 else y", {"compared", "computed", "returned"}),
        ("    return x.item() * 2 > 1", False),
        ("    return x.item() ** 2", False),
        ("    return y - x.item()", False),
        ("    y -= x.item()\n    return y", False),
        ("    return y.n * 2 - x.item()", {"computed", "returned", ("operand", ("y", "n"))}),
        ("    y.n += x.item()", {"computed", ("operand", ("y", "n")), ("attribute", ("y", "n"))}),
        ("    y.a.n = 2 + y.a.n / x.item()", {"computed", ("operand", ("y", "a", "n")), ("attribute", ("y", "a", "n"))}),
        ("    y.n = (0 if y else y.n) + x.item()", False),
        ("    y.n += x.item() + y()", {"computed", ("operand", ("y", "n")), ("attribute", ("y", "n"))}),
        ("    y[0] += x.item()", False),
        ("    return x.item() is None", False),
        ("    return 1 if x.item() > y else 2", {"compared"}),
        ("    n = x.item()\n    return (n if 0 < n < 1 else 2), y", {"compared", "returned"}),
        ("    n = x.item()\n    while n != y:\n        n = x.item()\n    return y", {"compared"}),
        ("    return [x.item() == 1, (y, x.item())]", {"compared"}),
        ("    return x.item() in y", False),
        ("    return (x.item(), 1) == y", {"compared"}),
        ("    return x.item() > 1 or x.item() + 1", {"compared"}),
        ("    return y(x.item())", False),
        ("    return {x.item(): 1}", False),
        ("    return {x.item()}", False),
        ("    y.n = x.item()", {("attribute", ("y", "n"))}),
        ("    y.a.n = n = x.item()\n    return n", {"returned", ("attribute", ("y", "a", "n"))}),
        ("    y.a.append(x.item())", {("appended", ("y", "a"))}),
        ("    y.append((1, x.item()))", {("appended", ("y",))}),
        ("    y.append(x.item(), 1)", False),
        ("    y().append(x.item())", False),
        ("    y().n = x.item()", False),
        ("    y.extend([x.item()])", False),
        ("    global G\n    G = x.item()", {("global", ("G",))}),
        ("    global G\n    G = n = x.item()\n    return y(n)", False),  # the variable has it, too
        ("    y[0] = x.item()", False),
        ("    n = x.item()\n    return [n for _ in y]", None),
        ("    n = x.item()\n    def g(): return n\n    return g", {("variable", ("n",))}),
        ("    n = x.item()\n    try:\n        y()\n    except ValueError:\n        return n + 1\n    return n", {"computed", "returned"}),
        ("    n = x.item()\n    try:\n        y()\n    finally:\n        print(n)\n    return n", False),
        ("    n = x.item()\n    while y:\n        y = y - n\n    return n", False),
        ("    n = x.item()\n    yield n", False),
        ("    return eval('n'), x.item()", False),
        ("    return [*(x.item(), 1)]", None),
        ("    a, b = (x.item(), 1), 2\n    c, d = a\n    return c", False),
        ("    assert x.item()\n    return 1", False),
        ("    return (x.item() or 2)", False),
        ("    raise x.item()", False),
    ],
)  # fmt: skip
def test_what_becomes_of_a_value(text, answer):
    """None: either is right, as Python's compiler has it."""
    code = function_of(text)
    reading = bytecode.read(code)
    load = next(k for k, one in enumerate(reading.steps) if one.name == "item")
    offset = reading.steps[reading.call_of(load)].offset
    assert returns.callee_of(code, offset)[2]
    found = returns.uses_of(code, offset, ("numpy",))
    assert answer is None or (found is not None) == bool(answer)
    assert not isinstance(answer, set) or found == answer


LONG = "".join(f"        y = y.add(0.{k}).mul(1.{k})\n" for k in range(60))  # so long that what jumps over it has an EXTENDED_ARG


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (f"    n = x.item()\n    for k in range(2):\n{LONG}    return n > 2", {"compared"}),
        (f"    n = x.item()\n    while not y:\n{LONG}    return n > 2", {"compared"}),
        (f"    n = x.item()\n    for k in range(2):\n{LONG}    y.append(n)", {("appended", ("y",))}),
        ("    (y if y else x).append(x.item())", False),  # one of two, behind a jump
    ],
)
def test_jumps_in_code_of_any_length(text, answer):
    test_what_becomes_of_a_value(text, answer)


def test_long_function_that_compares_a_value(device):
    f = cgt.jit(function_from(f"    n = x.sum().item()\n    for k in range(2):\n{LONG}    return y + 1 if n > 2 else y"))
    for k in range(6):
        cgt.step()
        x, y = torch.full((3,), float(k), device=device), torch.ones(2, device=device)
        assert torch.equal(f(x, y), f.__wrapped__(x, y))
    assert cgt.stats(f).replays


def test_memory_for_numbers_may_be_made_in_inference_mode(device, monkeypatch):
    monkeypatch.setattr(segments, "ROOMS", {})
    f, g = cgt.jit(lambda x: x.sum().item()), cgt.jit(torch.inference_mode()(lambda x: x.max().item()))
    x = values(device)
    with torch.inference_mode():
        segments.room_of(device.index or 0 if device.type == "cuda" else -1)  # a capture finds it there
        assert [f(x) for _ in range(4)] == [x.sum().item()] * 4
    assert [f(x) for _ in range(4)] == [x.sum().item()] * 4 and [g(x) for _ in range(4)] == [x.max().item()] * 4
    assert cgt.stats(f).replays >= 4 and cgt.stats(g).replays >= 2, cgt.explain(g)


KEPT = 0.0


def test_number_that_a_global_and_a_variable_have(device):
    """The variable hands it to Python, which must not meet what stands for it."""

    def function(x):
        global KEPT
        KEPT = n = x.sum().item()
        return x + 1, str(n)

    f = cgt.jit(function)
    for k in range(6):
        cgt.step()
        x = torch.full((3,), float(k), device=device)
        assert f(x)[1] == str(3.0 * k)
        kept = KEPT
        assert kept == 3.0 * k


def test_only_the_call_itself_counts():
    """What another call gives, from inside of which the tensor is read, is not the tensor's."""
    code = function_of("    return y(x)")
    assert not any(returns.callee_of(code, k)[2] for k in range(0, len(code.co_code), 2))
