"""Several GPUs in one process: each has recordings, a path and a pool of its own, and a call is recorded where its arguments lie, or else
on the current one, which stays the caller's."""

import contextlib

import torch  # before the core, whose libraries are torch's

# isort: split
import cgt_core as core
import pytest
from helpers import plain, same, tells
from hypothesis import given, settings
from hypothesis import strategies as st

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
            assert same(y, x * 2) and same(one, torch.ones(2, device=f"cuda:{d}")) and one.device.index == d
    assert cgt.stats(f).replays >= 2 * CALLS - 8, cgt.explain(f)


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


def test_random_state_of_another_device():
    """Taken and put back around what is drawn there."""

    def function(x):
        state = torch.cuda.get_rng_state(0)
        y = x + torch.rand(16, device="cuda:0").to(x.device)
        torch.cuda.set_rng_state(state, 0)
        return y

    f = cgt.jit(function)
    for k in range(CALLS):
        x = inputs(k, 1)
        assert same(f(x), function(x))
        torch.rand(2, device="cuda:0")  # moves it on
    assert cgt.stats(f).replays >= CALLS - 4, cgt.explain(f)


@tells("other_device")
def test_random_state_of_a_device_where_nothing_else_is_done():
    def function(x):
        torch.cuda.set_rng_state(torch.cuda.get_rng_state(0), 0)
        return x * 2

    f = cgt.jit(function)
    for k in range(CALLS):
        assert same(f(inputs(k, 1)), inputs(k, 1) * 2)
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


# --- several GPUs in one recording ---


class Spread(torch.nn.Module):
    """A model whose layers lie on two GPUs by turns, and which brings what it computes from one to the other."""

    def __init__(self, layers=4, **kind):
        super().__init__()
        torch.manual_seed(3)
        blocks = [torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, **kind) for _ in range(layers)]
        self.blocks = torch.nn.ModuleList(block.to(f"cuda:{k % 2}") for k, block in enumerate(blocks))

    def forward(self, x):
        for k, block in enumerate(self.blocks):
            x = block(x.to(f"cuda:{k % 2}"))
        return x


def sequences(k, d=0):
    return torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(k)).to(f"cuda:{d}")


@pytest.mark.parametrize("given", [0, 1])
def test_model_on_two_devices_is_one_recording(given, around):
    """Its result, on the other device, is held; its input lies elsewhere each time; and its parameters are changed between calls."""
    model, held = Spread().eval(), []
    f = cgt.jit(model)
    with torch.no_grad():
        for k in range(2 * CALLS):
            for p in model.blocks[k % 4].parameters():
                p.mul_(1.01)
            with around(given):
                x = sequences(k, given)
                want, got = plain(model)(x), f(x)
            assert same(got, want) and got.device.index == 1
            held.append((got, want, x))
            if k % 5 == 4:
                cgt.step()
        assert all(same(got, want) for got, want, _ in held)
    assert cgt.stats(f).replays >= 2 * CALLS - 8, cgt.explain(f)


def test_other_streams_work_comes_before_and_behind():
    """The result is read, and the weight written, on the other device's stream without a wait."""
    weight = torch.ones(512, 512, device="cuda:1")

    def function(x):
        return (x * 2).to("cuda:1") @ weight

    f = cgt.jit(function)
    for k in range(2 * CALLS):
        x = torch.full((512, 512), float(k), device="cuda:0")
        with torch.cuda.device(1):
            torch.cuda._sleep(20_000_000)
            weight.fill_(k + 1)
        y = f(x)
        z = y + 0  # on cuda:1, which is not current
        weight.fill_(-1)
        assert same(z, torch.full((512, 512), 2.0 * k * (k + 1) * 512, device="cuda:1"))
    assert cgt.stats(f).replays >= 2 * CALLS - 8, cgt.explain(f)


def test_state_on_both_devices():
    """Writes to arguments and to what is reached, there and back; a number that is only handed out."""

    def run(wrap):
        total, cache = torch.zeros(16, device="cuda:1"), torch.zeros(4, 16, device="cuda:0")

        def function(x, k):
            y = (x.sum(0) + cache[0]).to("cuda:1")
            total.add_(y)
            cache.index_copy_(0, k, total.to("cuda:0").sin()[None])
            return total * 2, cache.sum(), total.mean().item()

        f = wrap(function)
        found = [f(inputs(k, 0), torch.tensor([k % 4], device="cuda:0")) for k in range(2 * CALLS)]
        return [torch.as_tensor(t).cpu() for one in found for t in one] + [total.cpu(), cache.cpu()], f

    (want, _), (got, f) = run(lambda f: f), run(cgt.jit)
    assert all(map(same, got, want)) and cgt.stats(f).replays >= 2 * CALLS - 8, cgt.explain(f)


def test_recordings_beside_those_of_each_device():
    """Their memory is not that of others: results of all three are held, and what they come from is freed."""
    both, on = cgt.jit(lambda x: ((x * 3).to("cuda:1") + 1).to("cuda:0") - 1), [cgt.jit(lambda x: x.sin() * 2), cgt.jit(lambda x: x.cos() + 1)]
    for k in range(2 * CALLS):
        x, y = inputs(k, 0), inputs(k, 1)
        a, b = on[0](both(on[0](x))), on[1](on[1](y))
        c = both(a)
        assert same(a, ((x.sin() * 2 * 3 + 1) - 1).sin() * 2) and same(b, (y.cos() + 1).cos() + 1) and same(c, (a * 3 + 1) - 1)
        if k % 4 == 3:
            cgt.step()
    assert all(cgt.stats(f).replays >= CALLS for f in (both, *on)), list(map(cgt.explain, (both, *on)))


def test_memory_on_the_other_device_is_shared_by_recordings():
    """As at home: smaller branches find room in that of the largest."""

    def branch(times):
        def function(x):
            y = x.to("cuda:1")
            for _ in range(times):
                y = y.repeat(2) + 1
            return y.mean()

        return function

    x, plain, reserved = torch.ones(1 << 22, device="cuda:0"), [branch(times) for times in (3, 2, 1)], []
    want, fs = [f(x).item() for f in plain], list(map(cgt.jit, plain))
    for f in fs:
        f(x)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(1)
    for _ in range(CALLS):
        for f, value in zip(fs, want, strict=True):
            assert f(x).item() == value
            cgt.step()
            torch.cuda.empty_cache()
            reserved.append(torch.cuda.memory_reserved(1) - before)
    assert all(cgt.stats(f).replays >= CALLS - 2 for f in fs), list(map(cgt.explain, fs))
    assert reserved[-1] == reserved[0] >= 4 * x.nbytes * 5


FUNCTIONS = [
    lambda x: (x.sin() * 2).to("cuda:1") + 1,
    lambda x: ((x.to("cuda:1") * 3).cumsum(0).to("cuda:0"), x.to("cuda:1").cos()),
    lambda x: (x * 0.5 + torch.ones_like(x), (x + 1).to("cuda:0").exp().to("cuda:1").log()),
    lambda x: x.tanh().flip(0),
    lambda x: (x.to("cuda:0").T @ x.to("cuda:0")).to("cuda:1").softmax(0) @ torch.ones(16, 16, device="cuda:1"),
]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_program_on_two_devices(data):
    """Calls on what calls gave, some of which is held and some dropped, in iterations that come again."""
    functions = [cgt.jit(f) for f in FUNCTIONS]
    plan = data.draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5), st.booleans()), min_size=2, max_size=6))
    kept = []
    for k in range(5):
        mine = [(inputs(k, d), inputs(k, d)) for d in (0, 1)]
        for which, of, holds in plan:
            got, want = (torch.nn.functional.normalize(t, dim=0) if t.shape == (8, 16) else t[:8] for t in mine[of % len(mine)])
            got, want = functions[which](got), FUNCTIONS[which](want)
            pairs = list(zip(got, want, strict=True)) if isinstance(got, tuple) else [(got, want)]
            mine += pairs
            if holds:
                kept += pairs
        assert all(same(got, want) for got, want in mine), [cgt.explain(f) for f in functions]
        if data.draw(st.booleans()):
            del mine, got, want, pairs
        cgt.step()
    assert all(same(got, want) for got, want in kept), [cgt.explain(f) for f in functions]
    assert sum(cgt.stats(f).replays for f in functions) >= len(plan), [cgt.explain(f) for f in functions]
    for f in functions:
        cgt.reset(f)


def test_recording_is_freed_while_its_results_are_held():
    f = cgt.jit(lambda x: (x * 2).to("cuda:1") + 1)
    with torch.cuda.device(1):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(1)
    results = [(f(inputs(k, 0)), inputs(k, 0)) for k in range(6)]
    assert cgt.stats(f).replays >= 3, cgt.explain(f)
    cgt.reset(f)
    others = [torch.full((8, 16), 7.0, device="cuda:1") for _ in range(100)]
    assert all(same(y, (x * 2 + 1).to("cuda:1")) for y, x in results)
    del results, others, f
    torch.cuda.synchronize(1)
    assert torch.cuda.memory_allocated(1) <= before


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("call", ["begin", "end", "instantiate", "checkpoint", "launch", "order", "cut", "wait"])
def test_driver_call_that_fails(call, reads):
    def function(x):
        y = (x * 2).to("cuda:1")
        return y + 1 if not reads or y.sum() > 0 else y - 1

    f = cgt.jit(function)
    f(inputs(0, 0))
    core.fault_set(call, 0, 2)
    try:
        for k in range(1, 8):
            x = inputs(k, 0)
            try:
                assert same(f(x), function(x))
            except cgt.CgtError:
                assert call in ("launch", "order", "wait")
    finally:
        core.fault_set("", 0, 0)
    f = cgt.jit(function)
    assert all(same(f(x := inputs(k, 0)), function(x)) for k in range(8)) and cgt.stats(f).replays >= 3, cgt.explain(f)


def trained(wrap, optimizer, steps=2 * CALLS, way="plain", **kind):
    """A model on both devices that is trained for so many whole steps: losses, parameters, gradients, where the generators stand; and what `wrap`
    made of the step."""
    torch.manual_seed(5)
    model = Spread(**kind).train()
    optimizer = optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)

    def forward(x):
        if way != "checkpoints":
            return model(x)
        for k, block in enumerate(model.blocks):
            x = torch.utils.checkpoint.checkpoint(block, x.to(f"cuda:{k % 2}"), use_reentrant=False)
        return x

    def step(x):
        if way != "accumulates":
            optimizer.zero_grad()
        loss = forward(x).square().mean()
        if way == "joins":  # what the first device computed comes there twice more
            loss = loss + (model.blocks[0](x.to("cuda:0")).sum() + sum(p.sum() for p in model.blocks[2].parameters())).to("cuda:1") * 1e-3
        loss.backward()
        if way == "clips":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss.detach()

    f, losses = wrap(step), []
    for k in range(steps):
        losses.append(f(sequences(k, k % 2 if way == "given" else 0)))
        schedule.step()
        cgt.step()
        if way == "accumulates" and k % 5 == 4:
            optimizer.zero_grad(set_to_none=k == 4)
    found = [t.detach().cpu() for p in model.parameters() for t in (p, p.grad) if t is not None]
    return [*(loss.cpu() for loss in losses), *found, *(torch.cuda.get_rng_state(d) for d in (0, 1))], f


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "capturable": lambda p: torch.optim.Adam(p, lr=0.01, capturable=True),
    "one by one": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_whole_step_on_two_devices_is_one_recording(optimizer):
    (want, _), (got, f) = trained(lambda f: f, OPTIMIZERS[optimizer], dropout=0.1), trained(cgt.jit, OPTIMIZERS[optimizer], dropout=0.1)
    assert all(map(same, got, want)) and cgt.stats(f).replays >= 2 * CALLS - 8, cgt.explain(f)


@pytest.mark.parametrize("way", ["accumulates", "checkpoints", "clips", "given", "joins"])
def test_ways_to_train_on_two_devices(way):
    (want, _), (got, f) = (trained(wrap, OPTIMIZERS["SGD"], 4 * CALLS, way, dropout=0.1) for wrap in (lambda f: f, cgt.jit))
    assert all(map(same, got, want)) and cgt.stats(f).replays >= 2 * CALLS, cgt.explain(f)


def test_backward_is_as_threaded_as_before():
    f = cgt.jit(lambda x: (x * 2).to("cuda:1"))
    for k in range(4):
        f(inputs(k, 0))
        assert torch._C._is_multithreading_enabled()


def test_random_numbers_on_two_devices_in_one_recording():
    """Another seed now and then; and draws of the program's own between."""

    def run(wrap):
        f = wrap(lambda x: (torch.nn.functional.dropout(x).to("cuda:1") + torch.rand(16, device="cuda:1")).to("cuda:0") * torch.rand_like(x))
        found = []
        for k in range(2 * CALLS):
            if k % 7 == 0:
                torch.manual_seed(k)
            found += [f(inputs(k, 0)), torch.rand(3, device="cuda:1").cpu()]
        return [*found, *(torch.cuda.get_rng_state(d) for d in (0, 1))], f

    (want, _), (got, f) = run(lambda f: f), run(cgt.jit)
    assert all(map(same, got, want)) and cgt.stats(f).replays >= 2 * CALLS - 8, cgt.explain(f)


def test_numbers_and_inputs_that_change_on_two_devices():
    """Told to the kernels of both, and not copied; where the one is brought to the other it is."""

    def function(x, y, k):
        a = (x * k).to("cuda:1")
        return (a + y * k).clamp(max=k + 1), (x + k).cumsum(0)

    f = cgt.jit(function)
    for k in range(3 * CALLS):
        x, y = inputs(k, 0), inputs(k + 1, 1)
        with torch.cuda.device(k % 2) if k > 2 * CALLS else contextlib.nullcontext():
            assert all(map(same, f(x, y, 0.5 + k), function(x, y, 0.5 + k)))
    assert cgt.stats(f).replays >= 3 * CALLS - 12, cgt.explain(f)


@tells("spread_graph")
def test_backward_outside_of_a_call_on_several_devices():
    model = Spread(dropout=0.0)
    f = cgt.jit(model)
    for k in range(CALLS):
        want, got = plain(model)(sequences(k)), f(sequences(k))
        assert same(got, want)
        grads = [torch.autograd.grad(y.square().sum(), list(model.parameters())) for y in (want, got)]
        assert all(map(same, *grads))
    assert cgt.stats(f).replays == 0 and any("Jit the whole step" in reason for reason in cgt.stats(f).reasons), cgt.explain(f)


@tells("spread_draws")
def test_generator_of_ones_own_on_two_devices():
    """One may draw on any device; a recording's words are on the first."""
    g = torch.Generator("cuda")

    def run(wrap):
        g.manual_seed(3)
        f = wrap(lambda x: torch.rand(8, 16, generator=g, device="cuda:0") + x.to("cuda:0"))
        there = wrap(lambda x: torch.rand(8, 16, generator=g, device="cuda:1").to("cuda:0") + x.to("cuda:0"))
        return [*(one(inputs(k, 1)) for one in (f, there) for k in range(CALLS)), g.get_state()], f, there

    (want, *_), (got, f, there) = run(lambda f: f), run(cgt.jit)
    assert all(map(same, got, want)), [cgt.explain(f), cgt.explain(there)]
    assert cgt.stats(f).replays == 0 and any("draws on cuda:0" in reason for reason in cgt.stats(f).reasons), cgt.explain(f)
    assert cgt.stats(there).replays >= CALLS - 4, cgt.explain(there)


@tells("spread_draws")
def test_dropout_of_a_recurrent_layer_on_the_other_device():
    layer = torch.nn.LSTM(16, 16, num_layers=2, dropout=0.5).to("cuda:1")
    f = cgt.jit(lambda x: layer(x.to("cuda:1"))[0].to("cuda:0"))
    with torch.no_grad():
        for k in range(CALLS):
            assert f(inputs(k, 0)).shape == (8, 16)
        assert cgt.stats(f).replays == 0 and any("cuDNN" in reason for reason in cgt.stats(f).reasons), cgt.explain(f)
        layer.eval()
        g = cgt.jit(lambda x: layer(x.to("cuda:1"))[0].to("cuda:0"))
        for k in range(CALLS):
            assert same(g(inputs(k, 0)), layer(inputs(k, 1))[0].to("cuda:0"))
    assert cgt.stats(g).replays >= CALLS - 6, cgt.explain(g)


def replayed(function, *given, calls=3 * CALLS):
    """f of `function`, called as eager; with what inputs(k, d) gives for each GPU d of `given`."""
    f = cgt.jit(function)
    for k in range(calls):
        xs = [inputs(k, d) for d in given]
        with torch.cuda.device(k // 4 % 2):
            assert all(map(same, torch.utils._pytree.tree_leaves(f(*xs)), torch.utils._pytree.tree_leaves(function(*xs)))), cgt.explain(f)
    return f


def test_value_read_on_either_device_chooses():
    """Before and behind what goes from the one to the other, and what is waited for there."""

    def function(x, y):
        z = (x * 2).to("cuda:1") + y
        if x.sum() > 0:
            z = z.flip(0)
        w = (z @ z.T).to("cuda:0")
        return (w + 1, z) if z.mean() > 0 else (w.cos(), z * 2)

    f = replayed(function, 0, 1, calls=6 * CALLS)
    assert cgt.stats(f).replays >= 3 * CALLS, cgt.explain(f)


def test_number_read_on_another_device_is_computed_with():
    f = replayed(lambda x: (y := x.to("cuda:1")) / y.norm().item(), 0)
    assert cgt.stats(f).replays >= 2 * CALLS, cgt.explain(f)


def test_writes_before_a_value_that_goes_another_way_are_undone():
    def run(wrap):
        seen, total = torch.zeros(16, device="cuda:1"), torch.zeros(16, device="cuda:0")

        def function(x):
            y = x.sum(0)
            total.add_(y)
            seen.add_(y.to("cuda:1"))
            if seen.mean() > 0:
                return seen * 2
            return (total - 1).to("cuda:1")

        f = wrap(function)
        found = [f(inputs(k, 0)) for k in range(6 * CALLS)]
        return [*found, seen, total], f

    with torch.no_grad():
        (want, _), (got, f) = run(lambda f: f), run(cgt.jit)
    assert all(map(same, got, want)) and cgt.stats(f).replays >= CALLS, cgt.explain(f)


def test_eager_part_and_op_apart_between_graphs_of_both_devices():
    shown = []
    look = cgt.eager(lambda x: shown.append(x.sum().item()))

    def looks(x):
        y = (x * 2).to("cuda:1") + 1
        z = y.to("cuda:0")
        look(z)
        return (z * 2).to("cuda:1") + y

    def decomposes(x):
        y = (x @ x.T).to("cuda:1")
        values = torch.linalg.eigvalsh(y + y.T)
        return (values * 2).to("cuda:0") + x.sum()

    assert cgt.stats(f := replayed(looks, 0)).replays >= 2 * CALLS, cgt.explain(f)
    assert shown == [s for k in range(3 * CALLS) for s in [((inputs(k, 0) * 2).to("cuda:1") + 1).to("cuda:0").sum().item()] * 2]
    assert cgt.stats(f := replayed(decomposes, 0)).replays >= 2 * CALLS, cgt.explain(f)


@tells("other_device")
def test_condition_on_several_devices_runs_eagerly():
    def chooses(x):
        y = (x * 2).to("cuda:1")
        return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,)), y

    f = replayed(chooses, 0, calls=CALLS)
    assert cgt.stats(f).replays == 0 and cgt.stats(f).reasons, cgt.explain(f)


def test_value_read_in_a_step_on_several_devices_runs_eagerly():
    model = Spread(dropout=0.0)

    def step(x):
        model.zero_grad()
        y = model(x).square().mean()
        y.backward()
        return y.detach() * 2 if y.item() > 0.5 else y.detach()

    f = cgt.jit(step)
    for k in range(CALLS):
        assert same(f(sequences(k)), step(sequences(k)))
    assert cgt.stats(f).replays == 0 and cgt.stats(f).reasons, cgt.explain(f)


def test_capture_that_fails_leaves_both_devices_as_they_were():
    strange = []

    def function(x):
        y = (x * 2).to("cuda:1")
        if torch.cuda.is_current_stream_capturing() or len(strange) > 1:
            raise ValueError("of mine")
        strange.append(None)
        return y + 1

    f = cgt.jit(function)
    for k in range(4):
        strange.clear()
        assert same(f(inputs(k, 0)), (inputs(k, 0) * 2).to("cuda:1") + 1)
        strange.extend((None, None))
        with pytest.raises(ValueError, match="of mine"):
            f(inputs(k, 0))
        for d in (0, 1):
            with torch.cuda.device(d):
                assert torch.cuda.current_stream() == torch.cuda.default_stream() and not torch.cuda.is_current_stream_capturing()
                torch.cuda.synchronize()


@tells("op_elsewhere")
@pytest.mark.parametrize("train", [False, True])
def test_data_parallel_runs_eagerly(train):
    """It runs each replica in a thread of its own."""
    net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Softplus()).to("cuda:0").train(train)
    model = torch.nn.DataParallel(net, [0, 1])
    f = cgt.jit(model)
    with torch.set_grad_enabled(train):
        for k in range(CALLS):
            net[1].beta = 1.0 + k
            assert same(f(inputs(k, 0)), plain(model)(inputs(k, 0)))
    assert cgt.stats(f).replays == 0 and any("DataParallel" in reason for reason in cgt.stats(f).reasons), cgt.explain(f)


def test_what_raises_in_eager_raises():
    f = cgt.jit(lambda x: x + torch.ones(16, device="cuda"))
    for k in range(4):
        with pytest.raises(RuntimeError, match="same device"):
            f(inputs(k, 1))
        with torch.cuda.device(1):
            assert same(f(inputs(k, 1)), inputs(k, 1) + 1)
