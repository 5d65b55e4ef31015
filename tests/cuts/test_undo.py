"""Values that are read behind writes to memory from outside: a replay that then goes a way nobody recorded undoes what it wrote, and the
call runs from the top, as if nothing had been."""


import cgt_core as core
import pytest
import torch
from helpers import identical, not_audited, tells, values
from torch import nn
from torch.distributions import Normal

import cgt


class World:
    """What a function finds outside: memory, an alias of a part of it, a parameter and how it is trained."""

    def __init__(self, device):
        self.a, self.b = values(device, 4, seed=3), values(device, 2, 4, seed=4)
        self.part, self.count = self.b[1, 1:], torch.zeros(3, dtype=torch.int64, device=device)
        self.w = values(device, 4, seed=5).requires_grad_()
        self.sgd = torch.optim.SGD([self.w], lr=0.1, momentum=0.9)
        self.last = None

    def tensors(self):
        found = [self.a, self.b, self.count, self.w.detach(), self.w.grad, self.last]
        return found + [s["momentum_buffer"] for s in self.sgd.state.values()]


def agree(device, function, inputs, **options):
    """A function of a world and a tensor, jitted and not, on these inputs; the jitted one. All that they leave is the same."""
    f, mine, theirs = cgt.jit(function, **options), World(device), World(device)
    held = []
    for k, x in enumerate(inputs):
        torch.manual_seed(k)
        want, state = function(theirs, x.clone()), torch.rand(1, device=device)
        torch.manual_seed(k)
        got = f(mine, x.clone())
        assert identical(torch.rand(1, device=device), state), k
        held.append((got, want))
        for a, b in zip([got, *mine.tensors()], [want, *theirs.tensors()], strict=True):
            assert (a is None) == (b is None), (k, cgt.explain(f))
            assert a is None or torch.equal(a.detach().nan_to_num(), b.detach().nan_to_num()), (k, a, b, cgt.explain(f))
    assert all(torch.equal(got.nan_to_num(), want.nan_to_num()) for got, want in held)
    return f


def adds(o, x):
    o.a.add_(x)
    return x * 2 if o.a.sum() > 0 else x - 1


def writes_a_part(o, x):
    o.b[0] = x
    if (x > 0).all():
        o.b[1].mul_(0.5)
    return o.b.sum(0) + x


def writes_again_and_again(o, x):
    o.a.add_(x)
    o.a[1:].mul_(0.5)
    o.a[:2].copy_(x[2:])
    o.part.add_(1)
    return o.a + x if (o.b > 1).any() else o.a - x


def overlaps(o, x):
    o.part.add_(x[1:])
    o.b.mul_(0.9)
    y = o.b[1] if o.part.sum() > 0 else o.b[0]
    o.part.sub_(0.1)
    return y * 2 if (o.b.sum(1) > 0).all() else y + x


def counts(o, x):
    o.count[0] += 1
    if x.sum() > 0:
        o.count[1] += 1
        if o.count[1] % 4 == 0:
            o.count[2].zero_()
            return x * 0
    o.count[2] += 2
    return x * o.count[2]


def draws(o, x):
    o.a.add_(torch.rand_like(x))
    y = torch.rand_like(x) if o.a.sum() > x.sum() + 4 else x
    o.a.mul_(0.7)
    return y + torch.rand_like(x)


def trains(o, x):
    o.sgd.zero_grad()
    loss = (o.w * x).square().sum()
    loss.backward()
    o.sgd.step()
    if loss > 1:
        o.a.add_(o.w.detach())
    return loss.detach() * 2


def trains_twice(o, x):
    for _ in range(2):
        y = Normal(o.w * x, 1.0).log_prob(x)  # which looks whether its arguments are valid
        o.sgd.zero_grad()
        y.mean().neg().backward()
        o.sgd.step()
    return y.detach()


def stops_at_bad_gradients(o, x):
    o.a.add_(1)
    loss = (o.w * x).exp().sum()
    o.sgd.zero_grad()
    loss.backward()
    if o.w.grad.abs().sum() > 20:
        o.w.grad.mul_(0.1)
        return loss.detach() * 0
    o.sgd.step()
    return loss.detach()


def replaces_gradients_at_times(o, x):
    o.a.add_(x)
    if (x > 0).all():
        o.w.grad = None
        (o.w * x).sum().backward()
    return o.a * 2


def accumulates(o, x):
    (o.w * x).sum().backward()
    if o.w.grad.sum() > 3:
        o.sgd.step()
        o.w.grad.zero_()
    return o.w.detach() + x


def iterates(o, x):
    o.a.copy_(x)
    n = 0
    while (o.a.abs() > 0.1).any() and n < 9:
        o.a.mul_(0.5)
        n += 1
    return o.a * n


FUNCTIONS = [
    adds, writes_a_part, writes_again_and_again, overlaps, counts, draws, trains, trains_twice, stops_at_bad_gradients,
    replaces_gradients_at_times, accumulates, iterates,
]  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_functions_that_read_behind_writes(device, function):
    inputs = [values(device, 4, seed=k % 3) * (1 if k % 4 else -1) + k % 2 for k in range(60)]
    f = agree(device, function, inputs)
    assert cgt.stats(f).replays >= 30, cgt.explain(f)


def test_the_way_that_nobody_recorded_finds_everything_as_it_was(device):
    """Long the same way, then another: what the replay wrote until it found out must not be there twice."""

    def function(o, x):
        o.a.add_(x)
        o.b[1].mul_(2)
        o.sgd.zero_grad()
        (o.w * x).sum().backward()
        o.sgd.step()
        if o.a.sum() > 100:
            o.a.zero_()
            return x * 0
        o.last = x + 1
        return x + 1

    x = torch.full((4,), 0.5, device=device)
    f = agree(device, function, [x] * 20 + [x * 100, x] + [x] * 10)
    s = cgt.stats(f)
    assert s.replays >= 25 and s.eager + s.records >= 2, cgt.explain(f)


def test_old_gradients_are_there_where_the_call_goes_a_way_that_keeps_them(device):
    o, theirs = World(device), World(device)

    def step(o, x):
        y = (o.w * x).exp()
        if not bool((y < 1e3).all()):
            return y.detach()
        o.sgd.zero_grad()
        y.sum().backward()
        return y.detach()

    f, x = cgt.jit(step), values(device, 4, seed=2)
    for k in range(30):
        now = x * 1e3 if k in (12, 19, 20) else x * (1 + k % 3)
        assert torch.equal(f(o, now), step(theirs, now)), k
        assert torch.equal(o.w.grad, theirs.w.grad), k
    assert cgt.stats(f).replays >= 20, cgt.explain(f)


@tells("read_with_grads")
def test_old_gradient_that_was_looked_at_is_a_reason(device):
    """A way from the top would look at it once more."""
    o, theirs = World(device), World(device)

    def step(o, x):
        y = x if o.w.grad is None else x + o.w.grad.sum()
        if (y > 0).any():
            y = y * 2
        o.w.grad = None
        (o.w * y).sum().backward()
        return y

    f = cgt.jit(step)
    for k in range(12):
        x = values(device, 4, seed=k % 3)
        assert torch.equal(f(o, x), step(theirs, x)) and torch.equal(o.w.grad, theirs.w.grad), k
    assert any("Call zero_grad() first" in reason for reason in cgt.stats(f).reasons), cgt.explain(f)


@pytest.mark.parametrize("jitted", ["both", "update"])
@pytest.mark.parametrize("how", ["raises", "skips", "asks again"])
def test_update_that_clips_checks_and_takes_the_gradients_away(device, how, jitted):
    """Accumulation as people write it. A value is read while the gradients of earlier calls are there, and they are gone when
    the call is over; where it goes another way, or raises, they are what they were."""

    def programs(wrap_micro, wrap_update):
        torch.manual_seed(2)
        net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)

        def micro(x):
            loss = net(x).square().mean() / 2
            loss.backward()
            return loss.detach()

        def update():
            norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1, error_if_nonfinite=how == "raises")
            if how != "raises" and not torch.isfinite(norm):
                optimizer.zero_grad()
                return norm * 0 - 1
            optimizer.step()
            optimizer.zero_grad()
            if how == "asks again" and norm > 0.2:
                return norm * 2
            return norm

        return net, wrap_micro(micro), wrap_update(update)

    plain = lambda function: function  # noqa: E731
    net, micro, update = programs(cgt.jit if jitted == "both" else plain, cgt.jit)
    twin, micro_of_twin, update_of_twin = programs(plain, plain)
    for k in range(60):
        if k % 2 == 0:
            cgt.step()
        x = values(device, 4, 8, seed=k) * (float("nan") if k in (21, 22, 37) else 1 + k % 5)
        assert identical(micro(x), micro_of_twin(x)), k
        if k % 2:
            got, want = (outcome(one) for one in (update, update_of_twin))
            assert type(got) is type(want) and (isinstance(got, RuntimeError) or identical(got, want)), k
        for a, b in zip(net.parameters(), twin.parameters(), strict=True):
            assert identical(a.detach(), b.detach()), k
            assert (a.grad is None) == (b.grad is None) and (a.grad is None or identical(a.grad, b.grad)), k
        if k % 2 and isinstance(want, RuntimeError):
            net.zero_grad(), twin.zero_grad()
    if how != "asks again" and jitted == "both":  # gradients of eager's lie elsewhere each time
        assert cgt.stats(update).replays >= 20, cgt.explain(update)


def outcome(function):
    try:
        return function()
    except RuntimeError as error:
        return error


def test_arguments_and_results_of_the_path(device):
    """What is written is an argument, or what another recording returned."""
    first = cgt.jit(lambda x: x * 2)

    def function(x, y):
        x.add_(y)
        y.mul_(0.5)
        return x * 2 if (x.sum() > y.sum()) else y + x

    f, mine, theirs = cgt.jit(function), torch.zeros(4, device=device), torch.zeros(4, device=device)
    for k in range(40):
        x = values(device, 4, seed=k % 5)
        cgt.step()
        got, want = f(mine, first(x)), function(theirs, x * 2)
        assert torch.equal(got, want) and torch.equal(mine, theirs), k
    assert cgt.stats(f).replays >= 20, cgt.explain(f)


def test_versions_are_those_of_eager(device):
    def function(o, x):
        o.a.add_(x)
        return x * 2 if o.a.sum() > 0 else x

    f, mine, theirs = cgt.jit(function), World(device), World(device)
    for k in range(12):
        x = values(device, 4, seed=k % 3)
        f(mine, x), function(theirs, x)
        assert mine.a._version == theirs.a._version, k


def test_in_inference_mode(device):
    with torch.inference_mode():
        f = agree(device, adds, [values(device, 4, seed=k % 3) for k in range(20)])
    assert cgt.stats(f).replays >= 10, cgt.explain(f)


def test_what_lies_behind_the_last_read_is_not_copied(device):
    """Only what a value is read behind is worth a copy: here one op's, not the optimizer's."""

    def step(o, x):
        o.a.add_(x)
        if o.a.sum() > 0:
            x = x * 2
        o.sgd.zero_grad()
        (o.w * x).sum().backward()
        o.sgd.step()
        return x

    f = agree(device, step, [values(device, 4, seed=k % 3) for k in range(20)])
    assert cgt.stats(f).replays >= 10
    assert "keeps what it overwrites until these are read: 16 B per call" in cgt.explain(f)


@not_audited("a call that fails on purpose")
@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("call", ["cut", "begin", "instantiate", "checkpoint"])
def test_failed_driver_call_while_recording_is_undone(device, call, after):
    f, mine, theirs = cgt.jit(adds), World(device), World(device)
    for k in range(12):
        x = values(device, 4, seed=k % 3)
        if k == 1:
            core.fault_set(call, after, 2)
        assert torch.equal(f(mine, x), adds(theirs, x)) and torch.equal(mine.a, theirs.a), k


@not_audited("a call that fails on purpose")
def test_what_cannot_be_undone_is_an_error(device):
    f, o = cgt.jit(adds), World(device)
    x = torch.ones(4, device=device)
    for _ in range(6):
        f(o, x)
    core.fault_set("move", 0, 2)
    with pytest.raises(cgt.CgtError, match="adds.*driver's move call"):
        f(o, x.fill_(-100))
    theirs = World(device)
    theirs.a.copy_(o.a)  # whatever it is now
    for k in range(6):
        assert torch.equal(f(o, x.fill_(k)), adds(theirs, x)) and torch.equal(o.a, theirs.a), k


class Policy(nn.Module):
    def __init__(self, device):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.mean, self.deviation = nn.Linear(4, 8), nn.Linear(8, 2), nn.Parameter(torch.zeros(2))
        self.to(device)

    def forward(self, x):
        return Normal(self.mean(torch.tanh(self.body(x))), self.deviation.exp())


def test_epochs_of_policy_optimization_replay_as_one(device):
    """Minibatches of PPO, each of which looks at its distribution's arguments behind the update of the one before."""

    def new():
        policy = Policy(device)
        adam = torch.optim.Adam(policy.parameters(), lr=3e-3)

        def update(x, actions, old, advantages):
            for order in torch.randperm(8, device=device).view(2, 4):
                pi = policy(x[order])
                ratio = (pi.log_prob(actions[order]).sum(1) - old[order]).exp()
                loss = -torch.min(ratio * advantages[order], ratio.clamp(0.8, 1.2) * advantages[order]).mean() - 0.01 * pi.entropy().mean()
                adam.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
                adam.step()
            return loss.detach()

        return policy, update

    (policy, update), (theirs, want) = new(), new()
    f = cgt.jit(update)
    for k in range(20):
        batch = [values(device, 8, n, seed=10 * k + n) for n in (4, 2)] + [values(device, 8, seed=10 * k + n) for n in (7, 8)]
        torch.manual_seed(k)
        loss = want(*batch)
        torch.manual_seed(k)
        assert torch.equal(f(*batch), loss), k
    assert all(map(torch.equal, policy.parameters(), theirs.parameters()))
    assert cgt.stats(f).replays >= 16, cgt.explain(f)


def steps_for_the_first_time(o, x):
    """An optimizer makes its state in its first step, here in a recording that comes to nothing behind it."""
    z = x * 1
    if x.sum() > 0:
        z = z + 1
    else:
        o.sgd.step()
    z = z.index_fill_(0, (o.a > z).nonzero()[:, 0], 0.25)  # which no recording has
    o.w.grad = None
    (o.w * z).sum().backward()
    return z + o.w.detach()


def averages(o, x):
    """So does anybody who makes a buffer when it is wanted."""
    if not hasattr(o, "average"):
        o.average = torch.clone(x)
    o.average = o.average * 0.9 + x
    return o.average.sum()


def averages_for_the_first_time(o, x):
    z = x * 1 if x.sum() > 0 else x + averages(o, x)
    return z.index_fill_(0, (o.a > z).nonzero()[:, 0], 0.25)


@pytest.mark.parametrize("function", [steps_for_the_first_time, averages_for_the_first_time])
def test_state_that_is_made_where_a_recording_comes_to_nothing(device, function):
    signs = [1, 1, 1, 1, 1, 1, -1, -1, 1, -1, -1, 1]
    agree(device, function, [(values(device, 4).abs() + 0.1) * sign for sign in signs])
