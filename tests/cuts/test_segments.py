"""Values that a function reads on the way: a recording is a row of segments, and a call goes the way of its values.

Every test compares with eager bit for bit, and says how many calls were replays."""

import cgt_core as core
import pytest
import torch
from helpers import counts, identical, in_threads, refill, replays_after, settle, tells, values
from torch import nn
from torch.nn import functional as F

import cgt
from cgt.cuts import segments
from cgt.words import options


def signed(device, sign, n=4):
    """Numbers of one sign, each call's the same."""
    return (values(device, n).abs() + 1) * sign


def drive(function, calls, **options):
    """The jitted function, after these calls agreed with eager, from the same random state."""
    f = cgt.jit(function, **options)
    for k, args in enumerate(calls):
        torch.manual_seed(k)
        want = function(*[a.clone() if isinstance(a, torch.Tensor) else a for a in args])
        state = torch.rand(1)
        torch.manual_seed(k)
        assert identical(f(*args), want), k
        assert torch.equal(torch.rand(1), state), k
    return f


def branch(x):
    y = x * 2 + 1
    if y.sum() > 0:
        return y.relu() + 1
    return y * -1


def by_count(x):
    n = int((x > 0).sum())
    return x.sin().view(-1)[: n + 1] * n


def by_place(x):
    y = x.clone()
    y[(x > 0).nonzero()[:, 0]] = 0.5
    return y


def masked(x):
    kept = torch.arange(4, device=x.device)[x > 0]
    return x[kept] * 2


def masked_numbers(x):
    y = x.sin()
    return y[y > 0.2] * 2, y.view(2, -1)[:, (x.view(2, -1) > 1.7)[0]], (x.view(2, -1) + 1)[x.view(2, -1) > 0]


def masked_writes(x):
    y = x.clone()
    y[x > 1.5] = x[x > 1.5] * 2
    y[y < -1.5] = 0.0
    return y


def as_list(x):
    first, *_ = (x > 0).tolist()
    return x * 3 if first else x / 3


def on_the_host(x):
    where = (x > 0).cpu()
    return x + (1 if where.all() else 2)


def twice(x):
    y = x.sin()
    if (y > 0).any():
        y = y * 2
        if (y > 1.5).all():
            return y + 1
    return y.cos()


def the_same_twice(x):
    positive = (x > 0).all()
    y = x + 1 if positive else x - 1
    return y * 2 if positive else y * 3


def equal(x):
    return x * 2 if torch.equal(x > 0, x > -1) else x * 3


def until(x):
    n = 0
    while x.abs().max() > 0.5:
        x, n = x * 0.5, n + 1
    return x + n


def in_place(x):
    y = torch.zeros_like(x)
    y.add_(x)
    return y.mul_(2) if y.sum() > 0 else y


def distributed(x):
    """It checks its arguments."""
    mean = x.abs()
    return torch.distributions.Normal(mean, torch.ones_like(mean)).log_prob(x)


READERS = [branch, by_count, by_place, masked, masked_numbers, masked_writes, as_list, on_the_host, twice, the_same_twice, equal, until, in_place, distributed]


@pytest.mark.parametrize("inputs", ["auto", "fixed", "copied"])
@pytest.mark.parametrize("function", READERS, ids=lambda f: f.__name__)
def test_call_goes_the_way_of_its_values(device, function, inputs):
    one, two = signed(device, 1.0), signed(device, -1.0)
    f = drive(function, [(one,)] * 4 + [(two,)] * 4, inputs=inputs)
    s = cgt.stats(f)
    assert (s.warmups, s.eager) == (1, 0) and s.records <= 3, s.reasons  # two, and one where the address moved
    before = s.replays
    for x in (one, two, one, one, two, two):
        assert identical(f(x), function(x))
    s = cgt.stats(f)
    assert s.replays >= before + 5 and s.eager == 0, s.reasons


@pytest.mark.parametrize("function", READERS, ids=lambda f: f.__name__)
def test_value_that_changes_in_one_place_of_memory(device, function):
    x, f = signed(device, 1.0), cgt.jit(function)
    for k in range(24):
        refill(x, (k % 3) - 1.5)
        assert identical(f(x), function(x)), k
    s = cgt.stats(f)
    assert s.replays >= 17 and s.records <= 4, (s, s.reasons)


def test_explain_names_the_values_and_their_lines(device):
    f = drive(branch, [(signed(device, 1.0),)] * 3 + [(signed(device, -1.0),)] * 3, inputs="copied")
    told = cgt.explain(f)
    line = branch.__code__.co_firstlineno + 2
    assert f"test_segments.py:{line} = True" in told and f"test_segments.py:{line} = False" in told


def test_explain_draws_the_ways(device):
    """One segment that both ways share, then a line for each; and behind each what ran behind it."""
    f, last = cgt.jit(twice), cgt.jit(lambda y: y + 1)
    for k in range(9):
        cgt.step()
        last(f(torch.full((4,), (2.0, 0.5, -1.0)[k % 3], device=device)))
    told = cgt.explain().splitlines()
    head = next(k for k, line in enumerate(told) if line.startswith("  twice: ") and "then a value is read at" in line)
    at = [(len(line) - len(line.lstrip()), line.split(":")[0].strip()) for line in told[head : head + 8]]
    assert {(4, "True"), (4, "False"), (6, "True"), (6, "False")} <= set(at), told
    assert sum("<lambda>" in name for _, name in at) == 3, told


def test_value_of_a_result_of_the_path(device):
    first, second = cgt.jit(lambda x: x * 2), cgt.jit(branch)
    for k in range(12):
        x = signed(device, 1.0 if k % 4 < 2 else -1.0)
        cgt.step()
        assert identical(second(first(x)), branch(x * 2)), k
    assert cgt.stats(second).replays >= 6 and cgt.stats(second).eager == 0


@pytest.mark.parametrize("whole", [True, False])
def test_masks_choose_what_is_trained_on(device, whole):
    def new(wrap):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
        opt = torch.optim.SGD(model.parameters(), 0.1)

        def loss_of(x, y, mask):
            return F.cross_entropy(model(x)[mask], y[mask])

        def step(x, y, mask):
            opt.zero_grad()
            loss = (loss_of if whole else wrapped)(x, y, mask)
            loss.backward()
            opt.step()
            return loss.detach()

        wrapped = wrap(loss_of)
        return (wrap(step), step)[not whole], model, wrapped

    (step, model, part), (want, twin, _) = new(cgt.jit), new(lambda f: f)
    for k in range(12):
        x, y = values(device, 6, 4, seed=k), torch.arange(6, device=device) % 3
        mask = torch.arange(6, device=device) % 5 > k % 2
        assert identical(step(x, y, mask), want(x, y, mask)), k
        assert all(map(torch.equal, model.parameters(), twin.parameters())), k
    s = cgt.stats(step if whole else part)
    # A backward of its own meets the mask again, and on CUDA it cannot read.
    assert s.replays >= 6 or (s.reasons and device.type == "cuda" and not whole), s.reasons


def draw(f, function, x, n=60):
    """f's stats after so many calls gave what eager's gave, from one random state on."""
    torch.manual_seed(5)
    want = [function(x) for _ in range(n)]
    torch.manual_seed(5)
    for k in range(n):
        assert identical(f(x), want[k]), k
    return cgt.stats(f)


def test_random_numbers_before_and_behind_a_read(device):
    def function(x):
        y = F.dropout(x, 0.5, True)
        if (y.sum() > 3) & (x.sum() != 0):
            return F.dropout(y, 0.5, True)
        return y + torch.rand_like(y)

    x = signed(device, 1.0, n=8)
    f = cgt.jit(function)
    s = draw(f, function, x)
    assert s.replays >= 50 and s.records == 2 and s.eager == 0, s.reasons


def drops_layers(x, chance=0.5):
    """As LayerDrop does it: the die is cast on the host."""
    for k in range(3):
        if torch.rand([]) < chance:
            continue
        x = F.dropout(x * (k + 2), 0.2, True)
    return x


def draws_in_vain(x):
    torch.rand([])
    return x * 2


def draws_between(x):
    y = F.dropout(x, 0.5, True)
    if (y.sum() > 3) & (x.sum() != 0):
        return y * int(torch.randint(0, 2, ()))
    n = torch.rand(3).argmax()
    return y + torch.rand_like(y) * n.item()


@pytest.mark.parametrize("function, records", [(drops_layers, 8), (draws_in_vain, 1), (draws_between, 5)])
def test_random_numbers_of_the_host_choose_the_way(device, function, records):
    x = signed(device, 1.0, n=8)
    f = cgt.jit(function)
    s = draw(f, function, x)
    assert s.replays >= 40 and s.records <= records and s.eager == 0, s.reasons


def test_random_numbers_of_the_host_of_a_way_nobody_recorded_are_given_back(device):
    def function(x):
        y = F.dropout(x, 0.2, True)
        if torch.rand([]) < 0.5:
            return y * 2
        torch.rand(())
        return y + 1

    x = signed(device, 1.0, n=8)
    f = cgt.jit(function, max_records=1)
    s = draw(f, function, x)
    assert s.replays > 5 and s.eager > 5 and any("read a value at" in reason for reason in s.reasons), s.reasons


def test_layers_that_are_dropped_in_training(device):
    def new(wrap):
        torch.manual_seed(3)
        model = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)).to(device)
        opt = torch.optim.SGD(model.parameters(), 0.1)

        @wrap
        def step(x):
            opt.zero_grad()
            for layer in model:
                if torch.rand([]) < 0.2:
                    continue
                x = F.dropout(layer(x), 0.1, True)
            loss = x.square().sum() + sum(p.sum() for p in model.parameters()) * 1e-3
            loss.backward()
            opt.step()
            return loss.detach()

        return step, model

    (step, model), (want, twin) = new(cgt.jit), new(lambda f: f)
    for k in range(30):
        x = values(device, 3, 4, seed=k)
        torch.manual_seed(k)
        expected, state = want(x), torch.get_rng_state()
        torch.manual_seed(k)
        assert identical(step(x), expected) and torch.equal(torch.get_rng_state(), state), k
        assert all(map(torch.equal, model.parameters(), twin.parameters())), k
    s = cgt.stats(step)
    assert s.replays >= 15 and s.eager == 0, s.reasons


def test_random_number_of_the_host_that_goes_to_the_gpu(device):
    function = lambda x: x * torch.rand(()) + torch.rand(2).to(device).sum()  # noqa: E731
    x = signed(device, 1.0)
    f = cgt.jit(function)
    s = draw(f, function, x, n=8)
    assert s.replays >= 5 if device.type == "cpu" else any("changes a CPU tensor, or draws" in r or "a CPU tensor" in r for r in s.reasons)


def test_random_numbers_of_a_way_nobody_recorded_are_given_back(device):
    """Past the limit a call runs eagerly, with the numbers that eager would have drawn."""

    def function(x):
        y = F.dropout(x, 0.5, True)
        return y * int((y[:2] != 0).sum()) + torch.rand_like(y)  # 0, 1 or 2

    x = signed(device, 1.0, n=8)
    f = cgt.jit(function, max_records=2)
    s = draw(f, function, x)
    assert s.replays > 5 and s.eager > 5 and any("read a value at" in reason for reason in s.reasons), s.reasons


@pytest.mark.parametrize("inputs", ["auto", "copied"])
def test_it_is_differentiable(device, inputs):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, mask):
            h = F.dropout(self.a(x), 0.1, True)
            return self.b(h if mask.all() else h * mask)

    torch.manual_seed(3)
    net, twin = Net().to(device), Net().to(device)
    twin.load_state_dict(net.state_dict())
    f = cgt.jit(net, inputs=inputs)
    opts = [torch.optim.SGD(m.parameters(), 0.1) for m in (net, twin)]
    for k in range(14):
        x, mask = values(device, 3, 4, seed=k), torch.tensor([True, True, k % 5 < 3, True], device=device)
        for model, opt in zip((f, twin), opts, strict=True):
            torch.manual_seed(k)
            opt.zero_grad()
            model(x, mask).square().sum().backward()
            opt.step()
        assert all(map(torch.equal, net.parameters(), twin.parameters())), k
    s = cgt.stats(f)
    assert s.replays >= 8 and s.backward.replays >= 4, s.reasons  # addresses of gradients are learnt


def test_whole_step_that_looks_at_its_gradients(device):
    def new():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1)).to(device)
        opt, skipped = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), torch.zeros((), device=device)

        def step(x):
            opt.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            if torch.stack([p.grad.isfinite().all() for p in model.parameters()]).all():
                opt.step()
            else:
                skipped.add_(1)
            return loss.detach()

        return model, skipped, step

    (a, skipped, step), (b, want_skipped, want) = new(), new()
    f = cgt.jit(step)
    for k in range(20):
        x = values(device, 5, 4, seed=k) * (float("inf") if k in (6, 7, 12) else 1.0)
        torch.manual_seed(k)
        loss = want(x)
        torch.manual_seed(k)
        got = f(x)
        assert identical(got, loss) or (got.isnan() and loss.isnan()), k
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            assert torch.equal(p, q) and identical(p.grad.nan_to_num(), q.grad.nan_to_num()), k
        assert torch.equal(skipped, want_skipped)
    assert cgt.stats(f).replays >= 12, cgt.stats(f).reasons


# --- what is not read ---------------------------------------------------------------------------------


def own_generator(x, generator):
    y = torch.rand(4, device=x.device, generator=generator)
    return x * 2 if y.sum() > 1 else x


def large(x):
    return x.repeat(segments.VALUE_BYTES)[x.repeat(segments.VALUE_BYTES) > 0][:4]


@pytest.mark.parametrize("function", [own_generator, large], ids=lambda f: f.__name__)
def test_value_behind_what_may_not_happen_twice_is_not_read(device, function):
    def more():
        return [torch.Generator(device)] if function is own_generator else []

    f, mine, theirs, x = cgt.jit(function), more(), more(), signed(device, 1.0)
    for k in range(6):
        assert identical(f(x, *mine), function(x, *theirs)), k
    s = cgt.stats(f)
    assert s.replays == s.records == 0 and "test_segments.py" in " ".join(s.reasons)


def test_gradient_that_is_there_when_a_value_is_read(device):
    """A replay that goes another way must not have written over it."""

    def new():
        w = torch.ones(4, device=device, requires_grad=True)

        def step(x):
            if x.sum() > 0:
                w.grad = None
                (w * x).sum().backward()
            return x + 1

        return w, step

    (w, step), (v, want) = new(), new()
    f = cgt.jit(step)
    for k in range(12):
        x = signed(device, 1.0 if k % 3 else -1.0) * (k + 1)
        assert identical(f(x), want(x)) and (w.grad is None) == (v.grad is None)
        assert w.grad is None or torch.equal(w.grad, v.grad), k
    assert cgt.stats(f).replays >= 4, cgt.explain(f)


def test_gradient_that_is_there_at_the_first_of_two_reads(device):
    def new():
        w = torch.ones(4, device=device, requires_grad=True)

        def step(x):
            y = x.exp()
            if (x > 0).all():
                w.grad = None
                (w * y).sum().backward()
            return y * 2 if (y > 1).any() else y - 1

        return w, step

    (w, step), (v, want) = new(), new()
    f = cgt.jit(step)
    for k in range(12):
        x = signed(device, 1.0 if k % 4 < 2 else -1.0)
        assert identical(f(x), want(x)) and (w.grad is None) == (v.grad is None)
        assert w.grad is None or torch.equal(w.grad, v.grad), k
    assert cgt.stats(f).replays >= 4, cgt.explain(f)


@pytest.mark.parametrize("what", ["number", "bool", "tensor", "on the host"])
def test_value_that_the_function_keeps_is_todays(device, what):
    kept = nn.Module()
    kept.last = None

    def function(x):
        positive = x > 0
        kept.last = {
            "number": lambda: int(positive.sum()), "bool": lambda: bool(positive.all()),
            "tensor": positive.nonzero, "on the host": positive.cpu,
        }[what]()  # fmt: skip
        return x * 2

    f = cgt.jit(function, inputs="copied")
    for k in range(16):
        x = signed(device, 1.0 if k // 3 % 2 else -1.0)
        assert identical(f(x), x * 2)
        got, _ = kept.last, function(x)
        assert identical(got, kept.last), k


@tells("reads_too_much")
def test_more_values_than_there_is_room_for(device, monkeypatch):
    def function(x):
        for k in range(6):
            if not (x > k).any():
                break
        return x + k

    monkeypatch.setattr(segments, "ROOM_BYTES", 4 * segments.WORD)
    f, x = cgt.jit(function), signed(device, 1.0) + 10
    for _ in range(4):
        assert identical(f(x), function(x))
    s = cgt.stats(f)
    assert s.replays == 0 and "too many" in " ".join(s.reasons)


def test_mask_of_another_shape_is_eagers_error(device):
    f, x = cgt.jit(lambda x, mask: x[mask] * 2, inputs="copied"), values(device, 6, 4)
    masks = [torch.ones(n, dtype=torch.bool, device=device) for n in (6, 6, 6, 5, 7, 6)]
    masks[3][:] = False
    for mask in masks:
        if len(mask) == 6:
            assert identical(f(x, mask), x[mask] * 2)
        else:
            with pytest.raises(IndexError, match="shape of the mask"):
                f(x, mask)
    assert cgt.stats(f).replays >= 2


# --- limits, faults, errors ---------------------------------------------------------------------------


@tells("another_value")
def test_limit_and_what_it_says(device):
    f = drive(by_count, [(signed(device, 1.0) * (torch.arange(4, device=device) < k),) for k in (0, 1, 2, 3) * 3],
              max_records=2, inputs="copied")  # fmt: skip
    s = cgt.stats(f)
    line = f"test_segments.py:{by_count.__code__.co_firstlineno + 1}"
    assert s.replays >= 2 and any(f"read a value at {__file__}" in r and line in r for r in s.reasons), s.reasons


def test_user_sees_the_errors_of_eager(device):
    def function(x):
        y = x * 2
        if (y > 0).any():
            raise ValueError("positive")
        return y

    f, good, bad = cgt.jit(function, inputs="copied"), signed(device, -1.0), signed(device, 1.0)
    for x in (good, good, good, bad, bad, bad, good, good):
        if x is bad:
            with pytest.raises(ValueError, match="positive"):
                f(x)
        else:
            assert identical(f(x), function(x))
    assert cgt.stats(f).replays >= 3


@pytest.mark.parametrize("call", ["cut", "wait", "launch", "begin", "instantiate", "checkpoint"])
def test_failed_driver_call_while_recording_is_undone(device, call):
    books = core.books()
    f, x = cgt.jit(branch), signed(device, 1.0)
    f(x)
    core.fault_set(call, 0, 2)
    assert identical(f(x), branch(x))
    core.fault_set("", 0, 0)
    if device.type == "cuda" or call not in ("launch", "wait"):  # the host launches nothing while it records
        assert cgt.stats(f).records == 0 and core.books()["nodes"] == books["nodes"]
    replays_after(f, x, calls=200)


@pytest.mark.parametrize("call", ["launch", "wait", "patch"])
@pytest.mark.parametrize("after", [0, 1])
def test_failed_replay_raises_and_the_next_one_is_right(device, call, after):
    if (call, after) in (("wait", 1), ("patch", 1)):
        pytest.skip("there is one such call")
    f, xs = cgt.jit(branch, inputs="copied"), [signed(device, 1.0), signed(device, 2.0)]
    settle(f, branch, xs[0])
    core.fault_set(call, after, 2)
    with pytest.raises(cgt.CgtError, match="branch"):
        f(xs[1])
    for x in (*xs, -xs[0], -xs[0], -xs[1]):
        assert identical(f(x), branch(x))


def test_threads_with_ways_of_their_own(device):
    functions = [cgt.jit(twice, inputs="copied") for _ in range(4)]

    def work(k):
        for j in range(30):
            x = signed(device, 1.0 if (j + k) % 3 else -1.0) * 2
            assert identical(functions[k](x).clone(), twice(x)), (k, j)

    in_threads(4, work)
    for f in functions:  # each has learnt its ways, whoever was in its way
        replays_after(f, signed(device, 2.0), calls=200)


def test_one_function_in_several_threads(device):
    f = cgt.jit(twice, inputs="copied")

    def work(k):
        for j in range(30):
            x = signed(device, 1.0 if (j + k) % 3 else -1.0) * 2
            assert identical(f(x).clone(), twice(x)), (k, j)

    for _ in range(3):  # the others run eagerly while one records
        in_threads(4, work)
    assert cgt.stats(f).replays > 20, cgt.explain(f)


def test_segments_go_with_their_recording(device):
    books = core.books()
    f = drive(branch, [(signed(device, s),) for s in (1.0, 1.0, 1.0, -1.0, -1.0)], inputs="copied")
    assert core.books()["reads"] == books["reads"] + 2
    cgt.reset(f)
    assert core.books()["reads"] == books["reads"]


# --- as users have it: recording must pay --------------------------------------------------------------


@pytest.fixture
def must_pay(monkeypatch):
    monkeypatch.setattr(options, "OVERHEAD", 0.05)
    monkeypatch.setattr(options, "ALLOWANCE", 0.0)


def some_mask(device, k):
    return torch.arange(40, device=device) % (k + 2) == 0


def chosen(x, mask):
    return x.sin()[mask] * 2


@tells("varying_values")
def test_values_that_never_come_again_are_not_recorded(device, must_pay):
    f, x = cgt.jit(chosen), values(device, 40)
    for _ in range(60):
        mask = torch.rand(40, device=device) > 0.5
        assert identical(f(x, mask), chosen(x, mask))
    s = cgt.stats(f)
    assert s.records == 0 and s.warmups == 2 and s.eager == 58
    assert any(f"{__file__}:{chosen.__code__.co_firstlineno + 1} Python reads values that have not come before" in r for r in s.reasons), s.reasons


@pytest.mark.parametrize("values_of", [lambda k: k % 3, lambda k: (3, 1, 0, 2, 2, 1)[k % 6], lambda k: k % 2 * 16], ids=["3", "4", "2"])
def test_few_values_in_turn_are_recorded(device, must_pay, values_of, monkeypatch):
    """None comes twice in a row."""
    monkeypatch.setattr(options, "OVERHEAD", 1e9)  # told by numbers of calls alone, whatever they take
    f, x = cgt.jit(lambda x, at: x[int(at)] * 2), values(device, 20, 64, 64)
    for k in range(200):
        at = torch.tensor(values_of(k), device=device)
        assert identical(f(x, at), x[values_of(k)] * 2)
    assert cgt.stats(f).replays >= 150, cgt.explain(f)


def test_masks_in_turn_are_recorded(device, must_pay):
    f, x, masks = cgt.jit(chosen), values(device, 40), [some_mask(device, k) for k in (1, 2)]
    for k in range(100):
        assert identical(f(x, masks[k % 2]), chosen(x, masks[k % 2]))
    assert cgt.stats(f).replays >= 60, cgt.explain(f)


def test_values_that_come_at_each_call_are_recorded_after_the_second(device, must_pay):
    f, x, mask = cgt.jit(chosen), values(device, 40), some_mask(device, 1)
    for _ in range(10):
        assert identical(f(x, mask), chosen(x, mask))
    assert counts(f) == (2, 1, 7, 0), cgt.stats(f).reasons


def test_segments_do_not_run_in_vain_for_ever(device, must_pay):
    """Told by the bytes that they copy."""
    f, x, mask = cgt.jit(chosen, inputs="copied"), values(device, 40), some_mask(device, 1)
    for _ in range(4):
        f(x, mask)
    before = cgt.stats(f)
    for _ in range(300):
        other = torch.rand(40, device=device) > 0.5
        assert identical(f(x, other), chosen(x, other))
    after = cgt.stats(f)
    each = before.copied_bytes // before.replays
    assert after.replays == before.replays == 1 and after.copied_bytes - before.copied_bytes < 60 * each
    for _ in range(200):  # and they are tried again
        assert identical(f(x, mask), chosen(x, mask))
    assert cgt.stats(f).replays > 100, cgt.explain(f)


def test_counts_that_never_come_again(device, must_pay):
    f = cgt.jit(lambda x: x * int(x.sum()), inputs="copied")
    for k in range(100):
        x = torch.full((4,), k, device=device)
        assert identical(f(x), x * (4 * k))
    assert cgt.stats(f).records == 0, cgt.explain(f)


def test_the_last_token_of_a_batch_of_one(device):
    """A column with one element, whose stride is the row's: contiguous, and no bytes in a row."""
    f = cgt.jit(lambda tokens: tokens * 2 if tokens[:, -1].tolist()[0] > 3 else tokens + 1)
    for k in range(12):
        tokens = torch.full((1, 5), 2 + k % 2 * 4, device=device)
        assert torch.equal(f(tokens), tokens * 2 if k % 2 else tokens + 1)
    assert cgt.stats(f).replays >= 6, cgt.explain(f)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("part", [slice(None), slice(1, None)])
def test_value_is_read_again_behind_a_write_to_its_memory_under_another_name(device, part, given):
    """Two tensors with a storage each: of one array of NumPy's, or by DLPack."""
    one = torch.zeros(4, dtype=torch.int64, device=device)
    other = torch.from_dlpack(one[part])
    assert core.storage_id(one) != core.storage_id(other)

    def function(x, one=one, other=other):
        first = one[2].item()
        other.copy_(x[part])
        return x * one[2].item() + first

    f = cgt.jit(function)
    for k in range(16):
        one.zero_()
        x = torch.full((4,), k % 3, device=device)
        assert identical(f(*((x, one, other) if given else (x,))), x * x[0]) and torch.equal(other, x[part]), k
    assert cgt.stats(f).replays >= 6, cgt.explain(f)


def test_numbers_are_counted_in_as_many_places_as_are_told(device):
    f, counts = cgt.jit(lambda x: torch.bincount(x, minlength=8) * 2), lambda x: torch.bincount(x, minlength=8) * 2
    for k in range(12):
        x = (values(device, 20, seed=k).abs() * 4).long().clamp(max=7)
        x = x.to((torch.int64, torch.int32)[k % 2]) if k < 6 else x[: k - 6]
        assert identical(f(x), counts(x)), k
    assert cgt.stats(f).replays >= 2, cgt.explain(f)


def test_how_many_places_there_are_may_change(device):
    counts = lambda x, n: torch.bincount(x, minlength=n)  # noqa: E731
    f = cgt.jit(counts)
    for k in range(18):
        x = torch.tensor([k % 5, 3, 2], device=device)
        assert identical(f(x, (8, 6, 11)[k % 3]), counts(x, (8, 6, 11)[k % 3])), k
    assert cgt.stats(f).replays >= 9, cgt.explain(f)


@pytest.mark.parametrize("odd", [9, -1])
def test_numbers_without_a_place_are_eagers(device, odd):
    f, counts = cgt.jit(lambda x: torch.bincount(x, minlength=8)), lambda x: torch.bincount(x, minlength=8)
    for k in range(14):
        x = torch.tensor([k % 8, 3, odd if k % 5 == 4 else 2], device=device)
        outcomes = []
        for function in (f, counts):
            try:
                outcomes.append(function(x).tolist())
            except RuntimeError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1], k
    assert cgt.stats(f).replays >= 6, cgt.explain(f)


def test_metric_that_counts(device):
    """A confusion matrix, as torchmetrics keeps one."""
    total, expected = torch.zeros(5, 5, dtype=torch.int64, device=device), torch.zeros(5, 5, dtype=torch.int64, device=device)

    def update(into, scores, target):
        into += torch.bincount(target * 5 + scores.argmax(1), minlength=25).reshape(5, 5)

    f = cgt.jit(update)
    for k in range(10):
        scores, target = values(device, 16, 5, seed=k), (values(device, 16, seed=k).abs() * 3).long().clamp(max=4)
        f(total, scores, target), update(expected, scores, target)
        assert torch.equal(total, expected), k
    assert cgt.stats(f).replays >= 6, cgt.explain(f)
