"""Several GPUs in one process: each has recordings, a path and a pool of its own, and a call is recorded where its arguments lie, or else
on the current one, which stays the caller's."""

import contextlib

import torch  # before the core, whose libraries are torch's

# isort: split
import pytest
from helpers import same, tells

import cgt

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs")
CALLS = 12


def inputs(k, d):
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(k)).to(f"cuda:{d}")


def network(d):
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16)).to(f"cuda:{d}")


@pytest.fixture(params=["current", "not current"])
def around(request):
    """Around a call on that device: is it the current one? It is not changed by the call."""

    @contextlib.contextmanager
    def bracket(d):
        with torch.cuda.device(d) if request.param == "current" else contextlib.nullcontext():
            before = torch.cuda.current_device()
            yield
            assert torch.cuda.current_device() == before

    return bracket


def in_turns(function, around, least, given=inputs):
    """On the one device and the other: as eager, and so many replays."""
    f, held = cgt.jit(function), []
    for k in range(CALLS):
        for d in (0, 1):
            x = given(k, d)
            with around(d):
                want, y = function(x), f(x)
            assert same(y, want) and y.device.index == d
            held.append((y, y.clone()))
        if k % 3 == 2:
            cgt.step()  # on all of them: what is held moves to memory of its own device
    assert cgt.stats(f).replays >= least, cgt.explain(f)
    assert all(same(a, b) for a, b in held)


def branch(x):
    return x * 2 if x.sum() > 0 else x - 1


@pytest.mark.parametrize("function", [lambda x: (x.sin() @ x.T).softmax(-1), branch, lambda x: x + torch.arange(16, device=x.device).flip(0)])
def test_one_function_on_two_devices_in_turns(function, around):
    in_turns(function, around, 2 * CALLS - 12)


def test_random_numbers_are_those_of_the_device(around):
    def run(wrap):
        torch.manual_seed(3)
        f, found = wrap(lambda x: torch.nn.functional.dropout(x) + torch.rand_like(x)), []
        for k in range(CALLS):
            for d in (0, 1):
                with around(d):
                    found.append(f(inputs(k, d)))
        return [*found, *(torch.cuda.get_rng_state(d) for d in (0, 1))], f

    (want, _), (got, f) = run(lambda f: f), run(cgt.jit)
    assert all(map(same, got, want)) and cgt.stats(f).replays >= 2 * CALLS - 8, cgt.explain(f)


def test_what_is_made_where_nobody_says_comes_to_the_current_device():
    f = cgt.jit(lambda: torch.arange(6.0, device="cuda") * 2)
    for _ in range(CALLS):
        for d in (0, 1):
            with torch.cuda.device(d):
                assert same(f(), torch.arange(6.0, device="cuda") * 2)
    assert cgt.stats(f).replays >= 2 * CALLS - 8, cgt.explain(f)


def test_same_argument_under_another_current_device():
    """One result comes to where the argument is, one to the current device."""
    f, x = cgt.jit(lambda x: (x * 2, torch.ones(2, device="cuda"))), inputs(0, 1)
    for _ in range(CALLS):
        for d in (0, 1):
            with torch.cuda.device(d):
                y, one = f(x)
            assert same(y, x * 2) and same(one, torch.ones(2, device=f"cuda:{d}"))
    assert cgt.stats(f).replays >= CALLS - 5 and any("cuda:0" in reason for reason in cgt.stats(f).reasons), cgt.explain(f)


def test_two_models_that_are_trained_side_by_side(around):
    def run(wrap):
        steps, losses = [], []
        for d in (0, 1):
            model = network(d)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

            def step(x, model=model, optimizer=optimizer):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                return loss.detach()

            steps.append((wrap(step), model, schedule))
        for k in range(CALLS):
            for d in (0, 1):
                with around(d):
                    losses.append(steps[d][0](inputs(k, d)).clone())
                steps[d][2].step()
        return [*losses, *(p.detach() for _, model, _ in steps for p in model.parameters())], [step for step, *_ in steps]

    (want, _), (got, jitted) = run(lambda f: f), run(cgt.jit)
    assert all(map(same, got, want)) and all(cgt.stats(f).replays >= CALLS - 5 for f in jitted), list(map(cgt.explain, jitted))


def test_model_that_is_trained_from_outside(around):
    def run(wrap):
        models = [wrap(torch.nn.Sequential(network(d), torch.nn.Dropout(0.2))) for d in (0, 1)]
        optimizers, losses = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models], []
        torch.manual_seed(1)
        for k in range(CALLS):
            for d in (0, 1):
                with around(d):
                    loss = models[d](inputs(k, d)).square().mean()
                    loss.backward()
                    optimizers[d].step()
                    optimizers[d].zero_grad()
                losses.append(loss.detach())
        return [*losses, *(p.detach() for model in models for p in model.parameters())], models

    (want, _), (got, models) = run(lambda f: f), run(cgt.jit)
    assert all(map(same, got, want)) and all(cgt.stats(model).replays >= CALLS - 4 for model in models), list(map(cgt.explain, models))


def test_what_is_reached_says_where_too(around):
    for d in (0, 1):
        x = inputs(0, d)
        f = cgt.jit(lambda x=x: (x * x).sum())
        with around(d):
            for _ in range(CALLS):
                x.mul_(0.9)
                assert same(f(), (x * x).sum())
        assert cgt.stats(f).replays >= CALLS - 3, cgt.explain(f)


def test_function_that_asks_is_told_the_callers_current_device():
    f = cgt.jit(lambda x: x + torch.cuda.current_device())
    for _ in range(CALLS):
        for d in (0, 1):
            with torch.cuda.device(d):
                assert same(f(x := inputs(0, 1)), x + d)
    assert cgt.stats(f).replays >= 2 * CALLS - 8, cgt.explain(f)


@tells("other_device")
def test_random_state_of_another_device():
    function = lambda x: x + torch.cuda.get_rng_state().sum().to(x.device)  # noqa: E731
    f = cgt.jit(function)
    for k in range(CALLS):
        x = inputs(k, 1)
        assert same(f(x), function(x))
        torch.rand(2, device="cuda:0")  # moves it on
    assert cgt.stats(f).replays == 0 and any("cuda:0" in reason for reason in cgt.stats(f).reasons), cgt.explain(f)


def test_eager_part_runs_under_the_callers_current_device():
    seen = []
    look = cgt.eager(lambda x: seen.append((torch.cuda.current_device(), x.sum().item())))

    def function(x):
        y = x * 2
        look(y)
        return y + 1

    f = cgt.jit(function)
    for k in range(CALLS):
        for d in (0, 1):
            x = inputs(k, 1)
            with torch.cuda.device(d):
                assert same(f(x), x * 2 + 1)
    assert [d for d, _ in seen] == [0, 1] * CALLS and [s for _, s in seen] == [(inputs(k, 1) * 2).sum().item() for k in range(CALLS) for _ in (0, 1)]
    assert cgt.stats(f).replays >= 2 * CALLS - 8, cgt.explain(f)


def test_streams_are_those_of_the_device():
    """What comes before the call on the stream that is current on its device, comes before the replay."""
    f, side = cgt.jit(lambda x: x * 2 + 1), torch.cuda.Stream("cuda:1")
    for k in range(CALLS):
        with torch.cuda.stream(side):  # makes cuda:1 current, too
            torch.cuda._sleep(20_000_000)
            x = inputs(k, 1)
            with torch.cuda.device(0):
                y = f(x)
        side.synchronize()
        assert same(y, inputs(k, 1) * 2 + 1)
    assert cgt.stats(f).replays >= CALLS - 4, cgt.explain(f)


def test_argument_that_lies_elsewhere_and_is_not_read():
    f = cgt.jit(lambda x, y: (x * 2, y))
    for k in range(CALLS):
        x, y = inputs(k, 1), inputs(k, 0)
        double, given = f(x, y)
        assert same(double, x * 2) and given is y


def test_choice_on_the_device(around):
    def function(x):
        y = torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,))
        _, y = torch._higher_order_ops.while_loop(lambda k, y: k < 3, lambda k, y: (k + 1, y.sin()), (torch.zeros((), dtype=torch.int64, device=x.device), y))
        return y

    in_turns(function, around, 2 * CALLS - 12)


def test_what_moves_is_told_the_graph(around):
    """Inputs at other addresses, numbers that change, values that are read on the way."""

    def function(x, k):
        y = (x * k).cumsum(0)
        return (y.roll(1, 0) if y.sum().item() > 0 else y) * k

    f, kept = cgt.jit(function), []
    for k in range(3 * CALLS):
        for d in (0, 1):
            kept.append(inputs(k, d))
            with around(d):
                assert same(f(kept[-1], 1.0 + k), function(kept[-1], 1.0 + k))
    assert cgt.stats(f).replays >= 3 * CALLS, cgt.explain(f)


def test_stages_of_a_pipeline():
    """Trained through both; what comes from the one to the other is copied outside of them."""

    def run(wrap):
        first, second = network(0), network(1)
        stages, losses = (wrap(first), wrap(second)), []
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        for k in range(CALLS):
            hidden = stages[0](inputs(k, 0))
            loss = stages[1](hidden.to("cuda:1")).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [*losses, *(p.detach() for p in (*first.parameters(), *second.parameters()))], stages

    (want, _), (got, stages) = run(lambda f: f), run(cgt.jit)
    assert all(map(same, got, want)), list(map(cgt.explain, stages))


@tells("other_device")
@pytest.mark.parametrize(
    "function", [lambda x: x.to("cuda:0") + 1, lambda x: (x * 2, x.sum().to("cuda:0")), lambda x: x * 2 + torch.ones(16, device="cuda").to(x.device)],
    ids=["comes", "leaves", "made elsewhere"],
)  # fmt: skip
def test_copies_from_one_device_to_the_other_run_eagerly(function):
    f = cgt.jit(function)
    for k in range(CALLS):
        x = inputs(k, 1)
        assert all(map(same, torch.utils._pytree.tree_leaves(f(x)), torch.utils._pytree.tree_leaves(function(x))))
    assert cgt.stats(f).replays == 0 and any("cuda:0" in reason for reason in cgt.stats(f).reasons), cgt.explain(f)


def test_what_raises_in_eager_raises():
    f = cgt.jit(lambda x: x + torch.ones(16, device="cuda"))
    for k in range(4):
        with pytest.raises(RuntimeError, match="same device"):
            f(inputs(k, 1))
        with torch.cuda.device(1):
            assert same(f(inputs(k, 1)), inputs(k, 1) + 1)
