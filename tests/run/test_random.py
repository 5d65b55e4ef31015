"""Random numbers: a jitted call draws what eager would have drawn, and leaves every generator where
eager would have left it."""

import contextlib
import gc
import threading

import pytest
import torch
import torch.nn.functional as F
from helpers import plain
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import cgt


def numbers(device, n=32):
    return torch.arange(n, device=device) * 0.01 + 0.1


def get_state(device):
    """State of the device's default generator."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_state(device, state):
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def forked(device):
    """Draws inside do not move the generators outside."""
    index = torch.cuda.current_device() if device.type == "cuda" else None
    return torch.random.fork_rng(devices=[] if index is None else [index])


def same(got, want):
    """Bitwise equality of two results."""
    if isinstance(got, torch.Tensor):
        return got.dtype == want.dtype and torch.equal(got, want)
    return len(got) == len(want) and all(map(same, got, want))


def counts(f):
    """(warmups, records, replays, eager) of f."""
    s = cgt.stats(f)
    return s.warmups, s.records, s.replays, s.eager


DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.3, training=True),
    "dropout in place": lambda x: F.dropout(x * 1, 0.5, training=True, inplace=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "feature dropout": lambda x: F.dropout2d(x.view(1, 8, 2, 2), 0.4, training=True),
    "rand": lambda x: torch.rand(5, device=x.device) + x[:5],
    "rand_like": lambda x: torch.rand_like(x) * x,
    "rand double": lambda x: torch.rand(7, device=x.device, dtype=torch.float64),
    "randn": lambda x: torch.randn(3, 33, device=x.device) + x[0],
    "randn_like": lambda x: torch.randn_like(x) + x,
    "randn odd": lambda x: torch.randn(17, device=x.device),
    "randint": lambda x: torch.randint(-5, 1000, (9,), device=x.device),
    "randint_like": lambda x: torch.randint_like(x, 100),
    "randperm": lambda x: torch.randperm(50, device=x.device),
    "bernoulli": lambda x: torch.bernoulli(x),
    "bernoulli p": lambda x: torch.empty_like(x).bernoulli_(0.25),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(x),
    "normal_": lambda x: torch.empty_like(x).normal_(2.0, 3.0),
    "normal of tensors": lambda x: torch.normal(x, x),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 1),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.3),
    "random_": lambda x: torch.empty_like(x, dtype=torch.int64).random_(0, 77),
    "rrelu": lambda x: F.rrelu(x - 0.2, training=True),
    "gumbel": lambda x: F.gumbel_softmax(x.view(4, 8)),
    "poisson": lambda x: torch.poisson(x * 10),
    "several": lambda x: (torch.rand_like(x), F.dropout(x, 0.1), torch.randint(9, (3,), device=x.device)),
    "a large one": lambda x: torch.rand(100_003, device=x.device).sum() + torch.randn(65, device=x.device),
}  # fmt: skip


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
def test_same_seed_gives_the_numbers_of_eager(device, draw):
    x = numbers(device)

    def run(f):
        torch.manual_seed(7)
        results = []
        for k in range(6):
            results.append(f(x))
            results.append(torch.rand(3, device=device))
            if k == 3:
                torch.manual_seed(8)
        return results, get_state(device)

    f = cgt.jit(draw)
    (got, got_state), (want, want_state) = run(f), run(draw)
    assert all(map(same, got, want))
    assert torch.equal(got_state, want_state)
    assert counts(f) == (1, 1, 4, 0), cgt.stats(f).reasons


def test_every_replay_draws_anew(device):
    f = cgt.jit(lambda x: torch.rand_like(x))
    x = numbers(device)
    results = [f(x) for _ in range(6)]
    assert len({tuple(r.tolist()) for r in results}) == 6
    assert counts(f) == (1, 1, 4, 0)


def test_seed_set_between_replays_repeats_the_numbers(device):
    f = cgt.jit(lambda x: F.dropout(x, 0.5) + torch.randn_like(x))
    x = numbers(device)
    f(x), f(x)
    for seed in (0, 1, -5, 2**63, 2**64 - 1, 1):
        torch.manual_seed(seed)
        want = F.dropout(x, 0.5) + torch.randn_like(x)
        after = torch.rand(2, device=device)
        torch.manual_seed(seed)
        assert torch.equal(f(x), want)
        assert torch.equal(torch.rand(2, device=device), after)
    assert counts(f) == (1, 1, 6, 0)


@pytest.mark.parametrize("how", ["forked", "put back", "put back twice"])
def test_numbers_whose_state_is_put_back_are_those_of_the_generator(device, how):
    """The call draws, and leaves the generator where it was."""

    def function(x):
        if how == "forked":
            with forked(device):
                return torch.rand_like(x) * x
        state = get_state(device)
        y = torch.rand_like(x)
        set_state(device, state)
        if how == "put back twice":
            y = y + F.dropout(x, 0.5)
            set_state(device, state)
        return y * x

    f, x = cgt.jit(function), numbers(device)
    for k in range(8):
        if k % 3 == 2:
            torch.manual_seed(k)
        state = get_state(device)
        assert torch.equal(f(x), function(x)) and torch.equal(get_state(device), state), k
        torch.rand(3, device=device)
    assert cgt.stats(f).replays >= 4, cgt.explain(f)


def test_state_taken_and_put_back_repeats_the_numbers(device):
    f = cgt.jit(lambda x: torch.rand_like(x))
    x = numbers(device)
    f(x), f(x)
    torch.rand(5, device=device)
    state = get_state(device)
    first = [f(x) for _ in range(3)]
    set_state(device, state)
    eager = [torch.rand_like(x) for _ in range(3)]
    set_state(device, state)
    again = [f(x) for _ in range(3)]
    assert same(first, eager) and same(again, eager)
    assert counts(f) == (1, 1, 6, 0)


def test_forked_generators_are_left_alone(device):
    f = cgt.jit(lambda x: torch.rand_like(x))
    x = numbers(device)
    for _ in range(4):
        before = get_state(device)
        with forked(device):
            torch.manual_seed(3)
            got = f(x)
            torch.manual_seed(3)
            assert torch.equal(got, torch.rand_like(x))
            del got
        assert torch.equal(get_state(device), before)
    assert counts(f) == (1, 1, 2, 0)


def test_function_without_randomness_does_not_move_the_generator(device):
    f = cgt.jit(lambda x: F.dropout(x.sin() * 2, 0.5, training=False))
    x = numbers(device)
    torch.manual_seed(5)
    torch.rand(3, device=device)
    before = get_state(device)
    for _ in range(5):
        f(x)
        assert torch.equal(get_state(device), before)
    assert counts(f) == (1, 1, 3, 0)


def test_function_on_the_gpu_leaves_the_cpu_generator_alone(device):
    f = cgt.jit(lambda x: torch.rand_like(x))
    x = numbers(device)
    before = torch.get_rng_state()
    for _ in range(4):
        f(x)
    moved = not torch.equal(torch.get_rng_state(), before)
    assert moved == (device.type == "cpu")
    assert counts(f) == (1, 1, 2, 0)


def test_two_functions_share_one_generator(device):
    def run(f, g):
        torch.manual_seed(1)
        return [h(x) for _ in range(5) for h in (f, g, f, torch.rand_like)]

    x = numbers(device)
    plain = (
        lambda x: torch.rand_like(x) + F.dropout(x, 0.5),
        lambda x: torch.randint(99, (3,), device=x.device),
    )
    f, g = map(cgt.jit, plain)
    assert same(run(f, g), run(*plain))
    assert counts(f) == (1, 1, 8, 0) and counts(g) == (1, 1, 3, 0)


def test_dropout_follows_training_and_p(device):
    m = torch.nn.Dropout(0.5)
    f = cgt.jit(m)
    x = numbers(device)

    def run(f):
        torch.manual_seed(2)
        results = []
        for training, p in ((True, 0.5), (False, 0.5), (True, 0.2), (True, 0.5)) * 3:
            m.train(training)
            m.p = p
            results += [f(x), f(x)]
        return results, get_state(device)

    got, want = run(f), run(plain(m))
    assert same(got[0], want[0]) and torch.equal(got[1], want[1])
    assert cgt.stats(f).replays >= 12 and cgt.stats(f).eager == 0


def test_shapes_draw_as_much_as_they_do_in_eager(device):
    def draw(x):
        return torch.randn_like(x), torch.rand(x.shape[0], device=x.device)

    def run(f):
        torch.manual_seed(4)
        return [f(x) for x in xs * 3], get_state(device)

    xs = [numbers(device, n) for n in (3, 1000, 70_000)]
    f = cgt.jit(draw)
    got, want = run(f), run(draw)
    assert same(got[0], want[0]) and torch.equal(got[1], want[1])
    assert counts(f) == (1, 3, 5, 0)


# --- hand-made generators ---------------------------------------------------------------------


def test_generator_in_the_closure(device):
    def run(jitted):
        g = torch.Generator(device).manual_seed(11)
        f = jitted(lambda x: torch.rand(x.shape, generator=g, device=x.device) * x)
        results = []
        for k in range(7):
            results += [f(x), torch.rand(3, generator=g, device=device)]
            if k == 3:
                g.manual_seed(12)
            if k == 4:
                state = g.get_state()
            if k == 5:
                g.set_state(state)
        return f, results, g.get_state()

    x = numbers(device)
    before = get_state(device)
    f, got, got_state = run(cgt.jit)
    _, want, want_state = run(lambda f: f)
    assert same(got, want) and torch.equal(got_state, want_state)
    assert torch.equal(get_state(device), before)  # the default one did not move
    assert counts(f) == (1, 1, 5, 0)


def test_generator_as_an_argument_is_a_static_leaf(device):
    def draw(x, g):
        return torch.empty_like(x).normal_(generator=g) + x

    def run(f):
        a, b = (torch.Generator(device).manual_seed(k) for k in (1, 2))
        order = [a, a, a, b, b, a, b, b, a]
        return [f(x, g) for g in order], a.get_state(), b.get_state()

    x = numbers(device)
    f = cgt.jit(draw)
    assert all(map(same, run(f), run(draw)))
    assert counts(f) == (1, 2, 6, 0)


def test_generator_argument_inside_containers_and_keywords(device):
    def draw(x, *, options):
        return torch.rand(x.shape, generator=options["g"][0], device=x.device)

    def run(f):
        g = torch.Generator(device).manual_seed(1)
        return [f(x, options={"g": (g, 1)}) for _ in range(5)], g.get_state()

    x = numbers(device)
    f = cgt.jit(draw)
    assert all(map(same, run(f), run(draw)))
    assert counts(f) == (1, 1, 3, 0)


def test_two_generators_and_the_default_one(device):
    def run(jitted):
        a, b = (torch.Generator(device).manual_seed(k) for k in (3, 4))
        torch.manual_seed(5)

        def draw(x):
            p = torch.rand(x.shape, generator=a, device=x.device)
            q = torch.randn(x.shape, generator=b, device=x.device)
            return p, q, torch.rand_like(x), torch.rand(3, generator=a, device=x.device)

        f = jitted(draw)
        results = []
        for k in range(6):
            results.append(f(x))
            if k % 2:
                results.append(torch.rand(k, generator=b, device=device))
        return f, results, [a.get_state(), b.get_state(), get_state(device)]

    x = numbers(device)
    f, got, got_states = run(cgt.jit)
    _, want, want_states = run(lambda f: f)
    assert same(got, want) and same(got_states, want_states)
    assert counts(f) == (1, 1, 4, 0)


def test_same_seed_in_two_generators_gives_the_same_numbers(device):
    a, b = (torch.Generator(device).manual_seed(9) for _ in range(2))
    f = cgt.jit(lambda x, g: torch.rand(x.shape, generator=g, device=x.device))
    x = numbers(device)
    for _ in range(4):
        assert torch.equal(f(x, a), f(x, b))
    assert counts(f) == (1, 2, 5, 0)


def test_generator_that_died_is_not_taken_for_a_new_one(device):
    f = cgt.jit(lambda x, g: torch.rand(x.shape, generator=g, device=x.device))
    x = numbers(device)
    for k in range(6):
        g, twin = (torch.Generator(device).manual_seed(k) for _ in range(2))
        for _ in range(3):
            want = torch.rand(x.shape, generator=twin, device=device)
            assert torch.equal(f(x, g), want)
        assert torch.equal(g.get_state(), twin.get_state())
        del g, twin
        gc.collect()
    s = cgt.stats(f)
    assert s.eager == 0 and s.replays >= 6


@pytest.mark.parametrize("first", ["function", "generator"])
def test_function_and_generator_argument_may_die_in_any_order(device, first):
    x = numbers(device)
    g = torch.Generator(device)
    f = cgt.jit(lambda x, g: x + 1)
    for _ in range(3):
        f(x, g)
    assert counts(f) == (1, 1, 1, 0)
    if first == "function":
        del f
        gc.collect()
        del g
    else:
        del g
        gc.collect()
        del f
    gc.collect()
    cgt.step()
    other = cgt.jit(lambda x: x * 3)
    for _ in range(3):
        cgt.step()
        assert torch.equal(other(x), x * 3)
    assert counts(other) == (1, 1, 1, 0)


def test_default_generator_given_by_hand(device):
    if device.type == "cuda":
        torch.cuda.init()  # before, there are no generators
        g = torch.cuda.default_generators[torch.cuda.current_device()]
    else:
        g = torch.default_generator

    def draw(x):
        a = torch.rand(x.shape, generator=g, device=x.device)
        return a, torch.rand_like(x), torch.randn(x.shape, generator=g, device=x.device)

    def run(f):
        torch.manual_seed(3)
        return [f(x) for _ in range(5)], get_state(device)

    x = numbers(device)
    f = cgt.jit(draw)
    assert all(map(same, run(f), run(draw)))
    assert counts(f) == (1, 1, 3, 0)


def test_replaced_closure_generator_is_noticed(device):
    x = numbers(device)
    g = torch.Generator(device).manual_seed(1)
    f = cgt.jit(lambda x: torch.rand(x.shape, generator=g, device=x.device))
    for _ in range(3):
        f(x)
    g = torch.Generator(device).manual_seed(2)
    twin = torch.Generator(device).manual_seed(2)
    for _ in range(3):
        assert torch.equal(f(x), torch.rand(x.shape, generator=twin, device=device))
    assert counts(f) == (1, 2, 3, 0)


# --- with failures ----------------------------------------------------------------------------


def test_exception_after_a_draw_leaves_the_generator_as_in_eager(device):
    def draw(x, fail):
        y = torch.rand_like(x)
        if fail:
            raise KeyError("mine")
        return y + torch.rand_like(x)

    def run(f):
        torch.manual_seed(6)
        results = []
        for fail in (False, True, False, True, True, False, False):
            with contextlib.suppress(KeyError):
                results.append(f(x, fail))
            results.append(get_state(device))
        return results

    x = numbers(device)
    f = cgt.jit(draw)
    assert same(run(f), run(draw))
    assert cgt.stats(f).replays >= 1


def test_function_that_cannot_be_recorded_draws_once(device):
    def draw(x):
        y = torch.rand_like(x)
        return y * (float(y.sum()) * 1 > 0) + torch.rand_like(x)

    def run(f):
        torch.manual_seed(6)
        return [f(x) for _ in range(5)], get_state(device)

    x = numbers(device)
    f = cgt.jit(draw)
    assert all(map(same, run(f), run(draw)))
    s = cgt.stats(f)
    assert s.replays == 0 and s.eager >= 3
    assert any("turns a tensor into a Python value" in reason for reason in s.reasons)


def test_escaping_draw_is_as_in_eager(device):
    def run(jitted):
        torch.manual_seed(6)
        kept = []

        def draw(x):
            kept.append(torch.rand_like(x))
            return kept[-1] + torch.rand_like(x)

        f = jitted(draw)
        return [f(x) for _ in range(5)], kept, get_state(device)

    x = numbers(device)
    assert all(map(same, run(cgt.jit), run(lambda f: f)))


def seeds_inside(x):
    torch.manual_seed(5)
    return torch.rand_like(x)


def forks_inside(x):
    a = torch.rand_like(x)
    with forked(x.device):
        b = torch.rand_like(x)
    return a, b, torch.rand_like(x)


def puts_back_inside(x):
    state = get_state(x.device)
    a = torch.rand_like(x)
    set_state(x.device, state)
    return a, torch.rand_like(x)


def makes_generator_inside(x):
    g = torch.Generator(x.device).manual_seed(3)
    return torch.rand(x.shape, generator=g, device=x.device) + torch.rand_like(x)


def checkpoints(x):
    x = x.detach().requires_grad_()
    y = checkpoint(lambda t: F.dropout(t * 2, 0.5).square(), x, use_reentrant=False)
    (grad,) = torch.autograd.grad(y.sum(), x)
    return y.detach(), grad


def checkpoints_reentrant(x):
    x = x.detach().requires_grad_()
    y = checkpoint(lambda t: F.dropout(t * 2, 0.5).square(), x, use_reentrant=True)
    y.sum().backward()
    return y.detach(), x.grad


SELF_SERVERS = [
    seeds_inside, forks_inside, puts_back_inside, makes_generator_inside, checkpoints,
    checkpoints_reentrant,
]  # fmt: skip


@pytest.mark.parametrize("function", SELF_SERVERS, ids=lambda f: f.__name__)
def test_function_that_handles_generators_itself_is_as_in_eager(device, function):
    def run(f):
        torch.manual_seed(2)
        return [(*f(x), torch.rand(2, device=device)) for _ in range(6)], get_state(device)

    x = numbers(device)
    f = cgt.jit(function)
    assert all(map(same, run(f), run(function)))
    s = cgt.stats(f)
    assert s.calls == 6
    assert s.replays > 0 or s.reasons


# --- any interleaving -------------------------------------------------------------------------

FUNCTIONS = {
    "dropout": lambda x, g: F.dropout(x, 0.5) + torch.rand_like(x),
    "ints": lambda x, g: torch.randint(1000, (5,), device=x.device),
    "own": lambda x, g: torch.rand(x.shape, generator=g, device=x.device) + torch.randn_like(x),
    "none": lambda x, g: x * 2,
}
ACTIONS = st.one_of(
    st.tuples(st.just("call"), st.sampled_from(list(FUNCTIONS))),
    st.tuples(st.just("eager"), st.integers(1, 600)),
    st.tuples(st.just("seed"), st.sampled_from([0, 1, 2**40, 2**64 - 1])),
    st.tuples(st.just("own seed"), st.integers(0, 3)),
    st.tuples(st.just("own eager"), st.integers(1, 9)),
    st.tuples(st.sampled_from(["save", "load", "own save", "own load"]), st.just(0)),
    st.tuples(st.just("fork"), st.sampled_from(list(FUNCTIONS))),
)


def play(program, functions, device):
    """Results and final states of the program with these functions."""
    torch.manual_seed(0)
    x, g = numbers(device), torch.Generator(device).manual_seed(0)
    saved, own_saved, results = get_state(device), g.get_state(), []
    for what, value in program:
        if what == "call":
            results.append(functions[value](x, g))
        elif what == "eager":
            results.append(torch.rand(value, device=device))
        elif what == "seed":
            torch.manual_seed(value)
        elif what == "own seed":
            g.manual_seed(value)
        elif what == "own eager":
            results.append(torch.randn(value, generator=g, device=device))
        elif what == "save":
            saved = get_state(device)
        elif what == "load":
            set_state(device, saved)
        elif what == "own save":
            own_saved = g.get_state()
        elif what == "own load":
            g.set_state(own_saved)
        elif what == "fork":
            with forked(device):
                results += [torch.rand(3, device=device), functions[value](x, g)]
    return results, [get_state(device), g.get_state()]


@settings(max_examples=30, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(program=st.lists(ACTIONS, min_size=8, max_size=50))
def test_any_interleaving_draws_the_numbers_of_eager(device, program):
    jitted = {name: cgt.jit(f) for name, f in FUNCTIONS.items()}
    got, want = play(program, jitted, device), play(program, FUNCTIONS, device)
    assert same(got[0], want[0])
    assert same(got[1], want[1])
    for name, f in jitted.items():
        n = sum(what in ("call", "fork") and value == name for what, value in program)
        assert counts(f) == (min(n, 1), int(n > 1), max(n - 2, 0), 0)


def test_another_thread_that_draws_says_nothing_of_a_function_that_does_not(device):
    stop, began = threading.Event(), threading.Event()

    def draw():
        while not stop.is_set():
            torch.randperm(2000)
            began.set()

    def work(x):
        for _ in range(20):
            x = torch.tanh(x @ x.t() * 0.01)
        return x

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        began.wait(10)
        f, x = cgt.jit(work), torch.randn(64, 64, device=device)
        for _ in range(20):
            assert torch.equal(f(x), work(x))
        assert not any("CGT304" in reason for reason in cgt.stats(f).reasons) and cgt.stats(f).replays >= 12, cgt.explain(f)
    finally:
        stop.set()
        thread.join()
