"""torch.cond and while_loop inside a jitted function: one recording for all values, bit-equal to Python's if and while."""

import cgt_core as core
import pytest
import torch
from helpers import counts, identical, in_threads, replays_after, tells, try_programs, values
from hypothesis import strategies as st
from torch import nn
from torch._higher_order_ops import while_loop
from torch.nn import functional as F

import cgt


def python_cond(pred, true_fn, false_fn, operands=()):
    """What torch.cond means."""
    return true_fn(*operands) if pred else false_fn(*operands)


def python_while(cond_fn, body_fn, carried):
    """What while_loop means."""
    now = tuple(t.clone() for t in carried)
    while cond_fn(*now):
        now = tuple(body_fn(*now))
    return now


def agree(function, calls, records=1, **options):
    """The jitted function, by torch's names, after it agreed with Python at each of these calls; records and the rest
    replayed."""
    f = cgt.jit(lambda *args: function(torch.cond, while_loop, *args), **options)
    for k, args in enumerate(calls):
        torch.manual_seed(k)
        want = function(python_cond, python_while, *(a.clone() if isinstance(a, torch.Tensor) else a for a in args))
        state = torch.rand(1)
        torch.manual_seed(k)
        assert identical(f(*args), want), (k, cgt.explain(f))
        assert torch.equal(torch.rand(1), state), k
    warmups, recorded, replays, eager = counts(f)
    code = sum(n for reason, n in cgt.stats(f).reasons.items() if "for the first time" in reason)
    assert (warmups, recorded, eager) == (1, records, code), cgt.explain(f)
    assert replays == len(calls) - 1 - records - code
    return f


def each_sign(device, n=9):
    """Arguments whose sums have either sign."""
    return [((values(device, 5, seed=k).abs() + 1) * (-1) ** (k // 2),) for k in range(n)]


def refused(sentence, function, *args):
    """The function does at each call what the plain one does: it raises, or runs eagerly for a reason with these words."""
    f, raised = cgt.jit(function), 0
    for k in range(3):
        got, want = [], []
        for one, to in ((f, got), (function, want)):
            torch.manual_seed(k)
            try:
                to.append(one(*(a.detach().clone() for a in args)))
            except Exception as error:
                to.append(type(error))
        assert identical(got, want), (got, want)
        raised += isinstance(want[0], type)
    assert cgt.stats(f).replays == 0 and raised in (0, 3)
    assert raised or sentence in " ".join(cgt.stats(f).reasons), cgt.explain(f)


# --- what works -------------------------------------------------------------------------------------


def branch(cond, loop, x):
    y = x * 2
    z = cond(y.sum() > 0, lambda y: y.sin() + 1, lambda y: y.cos() * 3, (y,))
    return z + y


def closed_over(cond, loop, x):
    y = x + 1
    return cond(x.sum() > 0, lambda: y * 2, lambda: x - y)


def several(cond, loop, x):
    a, b = cond(x.sum() > 0, lambda x: (x + 1, x.sum()), lambda x: (x - 1, x.prod()), (x,))
    return a * b


def nothing_else(cond, loop, x):
    return cond(x.sum() > 0, lambda x: x + 1, lambda x: x.neg(), (x,))


def numbers_choose(cond, loop, x):
    """A predicate of any dtype, with one element."""
    return cond((x > 0).sum().reshape(1), lambda x: x + 1, lambda x: x - 1, (x,))


def in_place_on_own(cond, loop, x):
    def own(x):
        y = x.clone()
        y[0] = 7.0
        return y.mul_(2)

    return cond(x.sum() > 0, own, lambda x: torch.zeros_like(x).add_(x), (x,))


def constants(cond, loop, x):
    """Results that depend on no argument: which one it is does."""
    ones = lambda: torch.ones(5, device=x.device)  # noqa: E731
    return cond(x.sum() > 0, ones, lambda: torch.arange(5.0, device=x.device)) * x


def branch_in_branch(cond, loop, x):
    def inner(x):
        return cond(x.max() > 2, lambda x: x * 5, lambda x: x / 5, (x,))

    return cond(x.sum() > 0, inner, lambda x: x.exp(), (x,))


def two_in_a_row(cond, loop, x):
    y = cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 3, (x,))
    return cond(y.sum() < -20, lambda y: y + 1, lambda y: y.tanh(), (y,)) + x


def under_no_grad(cond, loop, x):
    with torch.no_grad():
        return cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))


BRANCHES = [branch, closed_over, several, nothing_else, numbers_choose, in_place_on_own, constants, branch_in_branch, two_in_a_row, under_no_grad]


@pytest.mark.parametrize("inputs", ["auto", "copied"])
@pytest.mark.parametrize("function", BRANCHES)
def test_both_branches_are_one_recording(device, function, inputs):
    agree(function, each_sign(device), inputs=inputs)


def count_up(cond, loop, x, n):
    i, y = loop(lambda i, y: i < n, lambda i, y: (i + 1, (y * 1.01).sin()), (torch.zeros((), dtype=torch.int64, device=x.device), x))
    return i, y * 2


def until_small(cond, loop, x, n):
    """Of the values alone: for each call's as many rounds as it takes."""
    return loop(lambda y, k: y.abs().max() > 0.1, lambda y, k: (y * 0.7, k + 1), (x * n, n.clone()))


def temporaries(cond, loop, x, n):
    def body(i, y):
        z = y.clone()
        z[0] = 1.0
        z.add_(y).mul_(0.5)
        return i + 1, z - z.mean()

    return loop(lambda i, y: i < n, body, (torch.zeros_like(n), x))


def swapped(cond, loop, x, n):
    """Each takes what the other was."""
    return loop(lambda i, a, b: i < n, lambda i, a, b: (i + 1, b * 1, a + 1), (torch.zeros_like(n), x, x * 3))


def reads_outside(cond, loop, x, n):
    y, w = x.cos(), x.exp()
    return loop(lambda i, z: i * 2 < n + y.numel(), lambda i, z: (i + 1, z * 0.5 + y - w[0]), (n * 0, x))[1] + w


def branch_in_loop(cond, loop, x, n):
    def body(i, y):
        return i + 1, cond(i % 2 == 0, lambda y: y + 1, lambda y: y * 0.5, (y,))

    return loop(lambda i, y: i < n, body, (torch.zeros_like(n), x))


def loop_in_loop(cond, loop, x, n):
    def body(i, y):
        _, y = loop(lambda j, z: j < i, lambda j, z: (j + 1, z * 0.9 + 1), (i * 0, y))
        return i + 1, y

    return loop(lambda i, y: i < n, body, (torch.zeros_like(n), x))


def loop_in_branch(cond, loop, x, n):
    def many(x):
        return loop(lambda i, y: i < n, lambda i, y: (i + 1, y * 0.9), (n * 0, x))[1]

    return cond(x.sum() > 0, many, lambda x: x + 1, (x,))


LOOPS = [count_up, until_small, temporaries, swapped, reads_outside, branch_in_loop, loop_in_loop, loop_in_branch]


@pytest.mark.parametrize("inputs", ["auto", "copied"])
@pytest.mark.parametrize("function", LOOPS)
def test_any_number_of_rounds_is_one_recording(device, function, inputs):
    rounds = (3, 0, 1, 20, 5, 0, 2, 7)
    calls = [(values(device, 5, seed=k) + 0.3, torch.tensor(n, device=device)) for k, n in enumerate(rounds)]
    agree(function, calls, inputs=inputs)
    agree(function, calls[1:], inputs=inputs)  # warmed without a round
    agree(function, calls[4:], inputs=inputs)  # recorded without one


def test_random_numbers_in_bodies_are_eagers(device):
    if device.type == "cuda":
        pytest.skip("refused there: test_draws_in_bodies_on_the_gpu")

    def function(cond, loop, x, n):
        y = F.dropout(x, 0.5)
        y = cond(x.sum() > 0, lambda y: F.dropout(y, 0.5), lambda y: y + torch.rand(5) + torch.rand(5), (y,))
        _, y = loop(lambda i, y: i < n, lambda i, y: (i + 1, F.dropout(y, 0.3) + torch.rand_like(y)), (n * 0, y))
        return y * torch.rand(5)

    agree(function, [(*x, torch.tensor(k % 4)) for k, x in enumerate(each_sign(device, 12))])


def test_operands_and_results_are_trees(device):
    def f(x):
        a = torch.cond(x["a"].sum() > 0, lambda d: {"z": d["a"] * 2}, lambda d: {"z": d["a"] - 1}, (x,))
        (d,) = while_loop(lambda d: d["z"].sum() < 9, lambda d: ({"z": d["z"] + 1},), (a,))
        return d["z"], while_loop(lambda y: y.sum() < 3, lambda y: y + 1, (x["a"],))

    def want(x):
        z = x * 2 if x.sum() > 0 else x - 1
        while z.sum() < 9:
            z = z + 1
        while x.sum() < 3:
            x = x + 1
        return z, x

    g = cgt.jit(f)
    for (x,) in each_sign(device):
        assert identical(g({"a": x}), want(x))
    assert cgt.stats(g).records == 1 and cgt.stats(g).replays >= 6


def test_pytorch_agrees(device):
    """The plain function is PyTorch's, which compiles the bodies."""

    def f(x, n):
        y = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))
        return while_loop(lambda i, y: i < n, lambda i, y: (i + 1, y * 1.5), (n * 0, y))

    g = cgt.jit(f)
    for k, (x,) in enumerate(each_sign(device, 6)):
        n = torch.tensor(k, device=device)
        assert identical(g(x, n), f(x, n))
    assert cgt.stats(g).replays >= 3


def test_beside_values_that_are_read(device):
    def function(cond, loop, x):
        y = cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))
        if y.max() > 2:
            y = y * 2
        return loop(lambda y: y.abs().max() > 0.5, lambda y: (y * 0.5,), (y,))

    agree(function, [((values(device, 5, seed=1).abs() + k % 2) * (1 if k % 4 < 2 else -1),) for k in range(12)], records=2)


def test_a_carried_number_can_be_read_behind(device):
    """What a loop left is no constant, although it began as one."""

    def function(cond, loop, x):
        zero = torch.zeros((), dtype=torch.int64, device=x.device)
        (i,) = loop(lambda i: i < (x > 0).sum(), lambda i: (i + 1,), (zero,))
        return x * (2 if i > 2 else 3)

    agree(function, [(torch.full((5,), 1.0 if k % 2 else -1.0, device=device),) for k in range(10)], records=2)


def test_in_a_training_step(device):
    """Gradients are scaled on the device, as long as they are too large."""

    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(model, optimizer, cond, loop, x):
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                (small,) = loop(lambda g: g.norm() > 0.5, lambda g: (g * 0.7,), (p.grad,))
                p.grad.copy_(cond(loss > 1, lambda g: g * 1.0, lambda g: g * 0.5, (small,)))
        optimizer.step()
        return loss.detach()

    (model, optimizer), (plain, plainly) = make(), make()
    f = cgt.jit(lambda x: step(model, optimizer, torch.cond, while_loop, x))
    for k in range(10):
        x = values(device, 3, 5, seed=k)
        assert identical(f(x), step(plain, plainly, python_cond, python_while, x)), cgt.explain(f)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert cgt.stats(f).replays >= 5, cgt.explain(f)


def test_with_autocast(device):
    """A weight that is cast in a body is not there for what comes behind."""
    layer = nn.Linear(5, 5).to(device).requires_grad_(False)

    def function(cond, loop, x):
        with torch.autocast(device.type, torch.bfloat16):
            y = cond(x.sum() > 0, lambda x: layer(x), lambda x: layer(x + 1) * 2, (x,))
            return y + layer(x)

    agree(function, each_sign(device))


def test_explain_and_stats(device):
    f = agree(several, each_sign(device))
    text = cgt.explain(f)
    assert "with bodies that a replay chooses from: torch.cond at " + __file__ in text
    assert cgt.stats(f).graph_nodes > 4


def test_many_rounds_and_large_memory(device):
    """What lives through all rounds is nobody else's."""

    def function(cond, loop, x, n):
        keep, y = x.sin(), x * 2
        i, y = loop(lambda i, y: i < n, lambda i, y: (i + 1, (y.cos() + keep).softmax(0) * (y * 2).exp().log1p()), (n * 0, y))
        return y + keep, (x + 1).sin() * y.cos()

    calls = [(values(device, 2000, seed=k), torch.tensor(n, device=device)) for k, n in enumerate((2, 3, 300, 0, 17))]
    agree(function, calls)


def test_results_are_held_over_calls(device):
    f, got, want = cgt.jit(lambda x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))), [], []
    for (x,) in each_sign(device):
        got.append(f(x))
        want.append(x + 1 if x.sum() > 0 else x - 1)
        assert identical(got, want)
    assert cgt.stats(f).replays >= 6


def test_in_a_differentiable_function(device):
    """Where no gradient goes, a fork is an op like others."""
    w = values(device, 5).requires_grad_()

    def function(cond, loop, x):
        y = x * w
        with torch.no_grad():
            scale = cond(y.sum() > 0, lambda y: y.sum() + 1, lambda y: y.mean(), (y,))
            (scale,) = loop(lambda s: s > 1, lambda s: (s * 0.5,), (scale,))
        return (y * scale).sum()

    f = cgt.jit(lambda x: function(torch.cond, while_loop, x))
    for (x,) in each_sign(device):
        got, want = [], []
        for to, y in ((got, f(x)), (want, function(python_cond, python_while, x))):
            w.grad = None
            y.backward()
            to.extend((y.detach(), w.grad))
        assert identical(got, want), cgt.explain(f)
    assert cgt.stats(f).records == 1 and cgt.stats(f).replays >= 6, cgt.explain(f)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_in_modes_without_autograd(device, mode):
    with mode():
        agree(branch, each_sign(device))
        agree(count_up, [(*x, torch.tensor(k, device=device)) for k, x in enumerate(each_sign(device))])


def test_a_driver_that_refuses(device, short_cool_down):
    """At any of the calls that record a fork: eager then, and well again later."""
    for k in range(6 if device.type == "cpu" else 1):
        f = cgt.jit(lambda x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,)))
        x = values(device, 5, seed=k)
        want = x + 1 if x.sum() > 0 else x - 1
        assert identical(f(x), want)
        core.fault_set("fork", k, 700)
        assert identical(f(x), want)
        core.fault_set("", 0, 0)
        replays_after(f, x, calls=12)


def test_functions_in_threads(device):
    """Each thread's forks are its own."""

    def work(k):
        function = [branch, two_in_a_row, branch_in_branch][k]
        f = cgt.jit(lambda x: function(torch.cond, while_loop, x))
        for (x,) in each_sign(device):
            assert identical(f(x), function(python_cond, python_while, x))

    branch(torch.cond, while_loop, values(device, 5))  # PyTorch 2.11 breaks where threads have Dynamo compile its first fork at once
    in_threads(3, work)


def test_outside_of_a_jitted_function_nothing_changes(device):
    x = values(device, 5)
    want = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
    f = cgt.jit(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))
    assert identical(f(x), want) and identical(f(x), want) and identical(f(x), want)
    assert identical(torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), want)
    assert identical(python_while(lambda y: y.sum() < 9, lambda y: (y + 1,), (x,)), while_loop(lambda y: y.sum() < 9, lambda y: (y + 1,), (x,)))


# --- what does not ------------------------------------------------------------------------------------


def mutates(x):
    return torch.cond(x.sum() > 99, lambda x: x + 1, lambda x: x.add_(1) * 2, (x,)), x


def mutates_closure(x):
    y = x.clone()
    return torch.cond(x.sum() < 99, lambda: y.add_(1) * 2, lambda: y + 1), y


def mutates_carried(x):
    return while_loop(lambda y: y.sum() < 9, lambda y: (y.add_(1) * 1,), (x,))


@tells("body_writes")
@pytest.mark.parametrize("function", [mutates, mutates_closure, mutates_carried])
def test_a_body_that_writes_its_operands(device, function):
    refused("writes a tensor that the body did not make", function, values(device, 5))


def other_shape(x):
    return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x[0] + 1, (x,))


def other_dtype(x):
    return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: (x > 0), (x,))


def other_strides(x):
    return torch.cond(x.sum() > 0, lambda x: x.outer(x) + 1, lambda x: x.outer(x).t() + 1, (x,))


def other_tree(x):
    return torch.cond(x.sum() > 0, lambda x: (x + 1, x * 2), lambda x: x + 1, (x,))


def returns_operand(x):
    return torch.cond(x.sum() > 0, lambda x: x, lambda x: x + 1, (x,))


def returns_view(x):
    return torch.cond(x.sum() > 0, lambda x: x[1:], lambda x: x[1:] * 2, (x,))


def returns_twice(x):
    return torch.cond(x.sum() > 0, lambda x: [x.sin()] * 2, lambda x: [x.cos()] * 2, (x,))


def returns_number(x):
    return torch.cond(x.sum() > 0, lambda x: (x + 1, 1), lambda x: (x + 2, 1), (x,))


def loop_of_other_shape(x):
    return while_loop(lambda y: y.sum() < 9, lambda y: (y.repeat(2),), (x,))


def loop_passes_on(x):
    return while_loop(lambda y, z: y.sum() < 9, lambda y, z: (y + 1, z), (x, x + 1))


def loop_carries_number(x):
    return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (0, x))


def loop_by_number(x):
    return while_loop(lambda y: (y > 0).sum(), lambda y: (y - 1,), (x,))


def askew(x):
    return while_loop(lambda y: y.sum() < 9, lambda y: (y + 1,), (x[1:],))


KINDS = [other_shape, other_dtype, other_strides, other_tree, returns_operand, returns_view, returns_twice, returns_number,
         loop_of_other_shape, loop_passes_on, loop_carries_number, loop_by_number, askew]  # fmt: skip


@tells("fork_result")
@pytest.mark.parametrize("function", KINDS)
def test_results_of_another_kind_are_pytorchs(device, function):
    refused("Return new tensors from each body", function, values(device, 5))


def test_the_advice_for_results(device):
    def better(x):
        y = torch.cond(x.sum() > 0, lambda x: x[1:].clone(), lambda x: x[1:] * 2, (x,))
        return while_loop(lambda y, z: y.sum() < 9, lambda y, z: (y + 1, z.clone()), (y, x[1:].clone()))

    replays_after(cgt.jit(better), values(device, 5))


@tells("fork_with_grad")
def test_gradients_are_pytorchs(device):
    w = values(device, 5).requires_grad_()

    def operand(x):
        return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * 3, (x,))

    def closure(x):
        return torch.cond(x.sum() > 0, lambda x: x * w, lambda x: x * 3, (x,))

    def rounds(x):
        return while_loop(lambda y: y.sum() < 9, lambda y: (y.abs() + 1,), (x,))[0]

    x = values(device, 5)
    for function, given in ((operand, x.clone().requires_grad_()), (closure, x), (rounds, x.clone().requires_grad_())):
        f = cgt.jit(function)
        for _ in range(4):
            grads = []
            for one in (f, function):
                leaf = given.detach().clone().requires_grad_(given.requires_grad)
                w.grad = None
                one(leaf).square().sum().backward()
                grads.append((leaf.grad, w.grad))
            assert identical(*grads)
        assert any("PyTorch computes its backward in its own way" in reason for reason in cgt.stats(f).reasons)
    with torch.no_grad():  # the advice
        replays_after(cgt.jit(operand), x.requires_grad_())


@tells("fork_raised")
def test_a_body_that_raises(device):
    def for_some(x):
        return torch.cond(x.sum() > 99, lambda x: torch.linalg.cholesky(x), lambda x: x + 1, (x,))

    def always(x):
        return torch.cond(x.sum() > 99, lambda x: x + 1, lambda x: x.view(7), (x,))

    x = -torch.eye(3, device=device)
    if device.type == "cpu":  # on the GPU a body is not run to record it
        refused("Each body is run once", for_some, x)
    refused("Each body is run once", always, x)


def test_a_loop_that_raises_on_the_way(device):
    """At a later round than the one that is recorded."""
    if device.type == "cuda":
        pytest.skip("kernels do not raise")

    def f(x):
        return while_loop(lambda y: y[0, 0] > -12, lambda y: (torch.linalg.cholesky(y + 9).sum() * 0 + y - 1,), (x,))

    g = cgt.jit(f)
    for _ in range(4):
        with pytest.raises(torch.linalg.LinAlgError):
            g(torch.eye(3))
    assert cgt.stats(g).replays == 0


@tells("body_acts")
def test_a_body_that_does_more_than_compute(device):
    def f(x):
        def forks(x):
            with torch.random.fork_rng(devices=[]):
                return x + 1

        return torch.cond(x.sum() > 99, lambda x: x + 2, forks, (x,))

    refused("may do more than compute", f, values(device, 5))


def test_a_body_that_reads(device):
    def f(x):
        return torch.cond(x.sum() > 99, lambda x: x + 1, lambda x: x + (2 if x.max() > 0 else 3), (x,))

    refused("", f, values(device, 5))


def test_a_body_that_keeps_a_tensor(device):
    kept = []

    def f(x):
        def keeps(x):
            kept.append(x + 1)
            return x + 2

        return torch.cond(x.sum() > 99, lambda x: x + 1, keeps, (x,))

    refused("", f, values(device, 5))


@tells("body_draws")
def test_a_generator_of_ones_own_in_a_body(device):
    generator = torch.Generator(device).manual_seed(1)

    def f(x):
        return torch.cond(x.sum() > 99, lambda x: x + 1, lambda x: x + torch.rand(5, generator=generator, device=x.device), (x,))

    refused("draws random numbers", f, values(device, 5))


def test_draws_in_bodies_on_the_gpu(device):
    if device.type == "cpu":
        pytest.skip("recorded there")
    refused(
        "draws random numbers",
        lambda x: torch.cond(x.sum() > 99, lambda x: x + 1, lambda x: F.dropout(x, 0.5), (x,)), values(device, 5),
    )  # fmt: skip


@tells("fork_in_backward")
def test_in_a_backward(device):
    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return torch.cond(g.sum() > 0, lambda g: g * 2, lambda g: g * 3, (g,))

    def f(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(Odd.apply(x).square().sum(), x)[0]

    refused("runs in a backward", f, values(device, 5))


# --- random programs --------------------------------------------------------------------------------

OPS = {"sin": torch.sin, "double": lambda x: x * 2, "shift": lambda x: x - 0.5, "half": lambda x: x * 0.5, "flip": lambda x: x.flip(0)}


def chains(depth):
    """[step, ...]: an op's name, ("if", chain, chain) or ("while", rounds, chain)."""
    step = st.sampled_from(sorted(OPS))
    if depth:
        inner = chains(depth - 1)
        step = step | st.tuples(st.just("if"), inner, inner) | st.tuples(st.just("while"), st.integers(0, 3), inner)
    return st.lists(step, max_size=3)


def run_chain(chain, cond, loop, x, n):
    for step in chain:
        if isinstance(step, str):
            x = OPS[step](x)
        elif step[0] == "if":
            sides = [lambda x, c=c: run_chain(c, cond, loop, x, n).clone() for c in step[1:]]
            x = cond(x.sum() > n - 2, *sides, (x,))
        else:
            body = lambda i, x, c=step[2]: (i + 1, run_chain(c, cond, loop, x, n).clone())  # noqa: E731
            x = loop(lambda i, x, k=step[1]: i < (n + k) % 4, body, (n * 0, x))[1]
    return x


def test_random_programs(device):
    """Ifs and whiles inside each other, for changing values."""

    def check(chain):
        function = lambda cond, loop, x, n: run_chain(chain, cond, loop, x, n) + x  # noqa: E731
        agree(function, [(values(device, 4, seed=k), torch.tensor(k % 4, device=device)) for k in range(6)])

    try_programs(chains(2), check, 60)
