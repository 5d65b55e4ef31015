"""Whole training steps in one jitted function (forward, backward, optimizer): thirty steps are bit
for bit those of an eager twin."""

import copy
import functools
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cgt

N = 30

# Values are right, but not all calls replay: a recording that reads a gradient keeps its tensor, so
# the recording that made it finds it held and hands out another (decision 20, docs/decisions).
MOVED_GRADIENT = "without step() a held gradient is moved to another address at each iteration"


class Net(nn.Module):
    """Small, with everything that has state: batch norm writes buffers, dropout draws."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.25)
        self.leave = nn.Linear(16, 3)

    def forward(self, x):
        return self.leave(self.drop(F.gelu(self.norm(self.enter(x)))))


def batches(device, n=N):
    """Inputs and targets at different addresses."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 6, generator=generator).to(device),
         torch.randint(3, (8,), generator=generator).to(device))
        for _ in range(n)
    ]  # fmt: skip


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.05, foreach=True),
    "sgd for loop": lambda p: torch.optim.SGD(p, lr=0.05, foreach=False),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True, capturable=True),
}


def identity(f):
    return f


class Trainer:
    """A model with its optimizer and a step that `wrap` may jit. Where gradients are cleared is the
    table below."""

    def __init__(self, device, wrap, optimizer="sgd", zero="start", to_none=True, clip=None):
        torch.manual_seed(0)
        self.model = Net().to(device)
        self.opt = OPTIMIZERS[optimizer](self.model.parameters())
        self.zero, self.to_none = zero, to_none
        model, opt = self.model, self.opt

        def step(x, y):
            if zero == "start":
                opt.zero_grad(set_to_none=to_none)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
            if zero == "end":
                opt.zero_grad(set_to_none=to_none)
            return loss.detach()

        self.step = wrap(step)

    def run(self, data, between=lambda trainer, k: None):
        losses = []
        for k, (x, y) in enumerate(data):
            between(self, k)
            if self.zero == "before":
                self.opt.zero_grad(set_to_none=self.to_none)
            losses.append(self.step(x, y))
            if self.zero == "after":
                self.opt.zero_grad(set_to_none=self.to_none)
        return losses


def final(trainer):
    """All tensors that training changed, by name."""
    found = dict(trainer.model.state_dict())
    for name, p in trainer.model.named_parameters():
        found[name + ".grad"] = p.grad
        for key, value in trainer.opt.state.get(p, {}).items():
            found[f"{name} {key}"] = value
    return found


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(got[name], value), name
        else:
            assert got[name] == value, name


def compare(device, between=lambda trainer, k: None, n=N, **options):
    """Train twice; the jitted function's stats after every loss and final tensor was compared."""
    data = batches(device, n)
    eager, jitted = Trainer(device, identity, **options), Trainer(device, cgt.jit, **options)
    torch.manual_seed(3)
    want = eager.run(data, between)
    torch.manual_seed(3)
    got = jitted.run(data, between)
    for k, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(a, b), f"loss {k}"
    assert len({x.item() for x in want}) > n // 2
    assert_same(final(jitted), final(eager))
    for (name, a), b in zip(jitted.model.named_parameters(), eager.model.parameters(), strict=True):
        assert a._version == b._version, name
    return cgt.stats(jitted.step)


def counts(s):
    return s.warmups, s.records, s.replays, s.eager


ZEROS = [
    ("start", True), ("end", True), ("before", True), ("after", True),
    ("start", False), ("end", False), ("before", False), ("after", False),
]  # fmt: skip


COMBINATIONS = [("momentum", *zero) for zero in ZEROS] + [
    (name, *zero) for name in OPTIMIZERS for zero in (ZEROS[0], ZEROS[6]) if name != "momentum"
]


@pytest.mark.parametrize("optimizer, zero, to_none", COMBINATIONS)
def test_whole_step_is_bit_equal_to_eager(device, optimizer, zero, to_none):
    s = compare(device, optimizer=optimizer, zero=zero, to_none=to_none)
    assert s.warmups == 1 and s.eager == 0, s.reasons
    assert s.records <= 2 and s.replays >= N - 3  # gradients move once where they are kept
    if to_none:
        assert counts(s) == (1, 1, N - 2, 0)


def test_gradients_that_are_never_cleared_add_up(device):
    s = compare(device, zero="never")
    assert s.eager == 0 and s.replays >= N - 3


def test_clipping_inside_the_step(device):
    s = compare(device, clip=0.1, optimizer="momentum")
    assert counts(s) == (1, 1, N - 2, 0), s.reasons


@pytest.mark.parametrize("schedule", ["every third", "first ten", "bursts"])
def test_gradients_none_at_one_call_and_present_at_another(device, schedule):
    clear = {
        "every third": lambda k: k % 3 == 0,
        "first ten": lambda k: k < 10,
        "bursts": lambda k: (k // 4) % 2 == 0,
    }[schedule]

    def between(trainer, k):
        if clear(k):
            trainer.opt.zero_grad()

    s = compare(device, between, zero="never")
    if s.eager:
        pytest.xfail(MOVED_GRADIENT)  # the values above were compared all the same
    assert s.eager == 0 and s.replays >= N // 2, s.reasons


def test_single_gradient_cleared_by_hand(device):
    def between(trainer, k):
        if k % 4 == 0:
            trainer.model.enter.weight.grad = None
        if k % 4 == 2 and trainer.model.leave.bias.grad is not None:
            trainer.model.leave.bias.grad = torch.ones_like(trainer.model.leave.bias)

    compare(device, between, zero="never")


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("zero", ["start", "before", "never"])
def test_gradient_held_by_the_user_is_as_in_eager(device, zero, to_none):
    seen = {}

    def between(trainer, k):
        grads = [p.grad for p in trainer.model.parameters()]
        seen.setdefault(id(trainer), (trainer, []))[1].append(grads)

    compare(device, between, zero=zero, to_none=to_none, n=12)
    (_, first), (_, second) = seen.values()
    for k, (a, b) in enumerate(zip(first, second, strict=True)):
        for x, y in zip(a, b, strict=True):
            assert (x is None) == (y is None), k
            assert x is None or torch.equal(x, y), k
        if k > 1:  # the same tensor as one step before, or another one: as in eager
            was = [x is z for x, z in zip(a, first[k - 1], strict=True)]
            now = [y is z for y, z in zip(b, second[k - 1], strict=True)]
            assert was == now, k


def test_gradient_changed_between_steps(device):
    def between(trainer, k):
        for p in trainer.model.parameters():
            if p.grad is not None and k % 2:
                p.grad.mul_(0.5)

    compare(device, between, zero="never")


def test_learning_rate_changed_in_the_group_takes_effect_at_the_next_step(device):
    def between(trainer, k):
        if k in (10, 20):
            trainer.opt.param_groups[0]["lr"] *= 0.5

    s = compare(device, between, optimizer="momentum")
    assert counts(s) == (1, 2, N - 3, 0), s.reasons


def test_learning_rate_that_comes_back_finds_its_recording(device):
    def between(trainer, k):
        trainer.opt.param_groups[0]["lr"] = 0.05 if k % 2 else 0.01

    s = compare(device, between)
    assert counts(s) == (1, 2, N - 3, 0), s.reasons


def test_other_settings_of_the_group_take_effect(device):
    def between(trainer, k):
        group = trainer.opt.param_groups[0]
        if k == 8:
            group["weight_decay"] = 0.1
        if k == 14:
            group["momentum"] = 0.5
        if k == 20:
            group["nesterov"] = True
        if k == 24:
            group["maximize"] = True

    s = compare(device, between, optimizer="momentum")
    assert counts(s) == (1, 5, N - 6, 0), s.reasons


def test_schedule_that_changes_the_rate_at_every_step_is_never_stale(device):
    def between(trainer, k):
        if not hasattr(trainer, "schedule"):
            trainer.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(trainer.opt, N)
        elif k:
            trainer.schedule.step()

    s = compare(device, between)
    assert s.eager == 0 or any("lr" in reason for reason in s.reasons)


def test_rate_in_a_tensor_is_changed_without_a_new_recording(device):
    def between(trainer, k):
        if k == 0:
            trainer.opt.param_groups[0]["lr"] = torch.tensor(0.01, device=device)
        else:
            trainer.opt.param_groups[0]["lr"].mul_(0.9)

    s = compare(device, between, optimizer="adamw fused")
    if device.type == "cuda":
        assert counts(s) == (1, 1, N - 2, 0), s.reasons


def test_dropout_and_mode_changed_midway(device):
    def between(trainer, k):
        if k == 10:
            trainer.model.eval()
        if k == 16:
            trainer.model.train()
            trainer.model.drop.p = 0.5

    s = compare(device, between)
    assert counts(s) == (1, 3, N - 4, 0), s.reasons


def test_parameter_frozen_and_thawed_midway(device):
    def between(trainer, k):
        if k == 10:
            trainer.model.enter.weight.requires_grad_(False)
        if k == 20:
            trainer.model.enter.weight.requires_grad_(True)

    s = compare(device, between, optimizer="momentum")
    assert s.eager == 0 and s.replays >= N - 8, s.reasons


@pytest.mark.parametrize("optimizer", ["momentum", "adamw fused"])
@pytest.mark.parametrize("assign", [False, True])
def test_state_loaded_midway_is_used(device, optimizer, assign):
    def between(trainer, k):
        if k == 5:
            trainer.saved = copy.deepcopy((trainer.model.state_dict(), trainer.opt.state_dict()))
        if k in (12, 20):
            model, opt = copy.deepcopy(trainer.saved)
            if assign:  # the optimizer keeps the old parameters: give it the new ones
                trainer.model.load_state_dict(model, assign=True)
                for p in trainer.model.parameters():
                    p.requires_grad_()
                trainer.opt.param_groups[0]["params"] = list(trainer.model.parameters())
                trainer.opt.state.clear()
            else:
                trainer.model.load_state_dict(model)
            trainer.opt.load_state_dict(opt)

    s = compare(device, between, optimizer=optimizer)
    assert s.eager == 0 and s.replays >= N - 8, s.reasons


def test_parameters_written_outside_are_used(device):
    def between(trainer, k):
        with torch.no_grad():
            if k == 10:
                trainer.model.enter.weight.mul_(0.5)
            if k == 15:
                trainer.model.leave.weight.data = trainer.model.leave.weight.data * 0.5
            if k == 20:
                trainer.model.norm.reset_running_stats()

    s = compare(device, between)
    assert s.eager == 0 and s.replays >= N - 6, s.reasons


def test_layer_replaced_midway_is_used(device):
    def between(trainer, k):
        if k == 12:
            torch.manual_seed(9)
            trainer.model.leave = nn.Linear(16, 3).to(device)
            trainer.opt.add_param_group({"params": trainer.model.leave.parameters(), "lr": 0.02})

    s = compare(device, between)
    assert s.eager == 0 and s.replays >= N - 7, s.reasons


def test_autocast_inside_the_step(device):
    def train(wrap):
        torch.manual_seed(0)
        model = Net().to(device)
        opt = torch.optim.SGD(model.parameters(), lr=0.05)

        def step(x, y):
            opt.zero_grad()
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            return loss.detach()

        step = wrap(step)
        torch.manual_seed(3)
        return step, [step(x, y) for x, y in data], model.state_dict()

    data = batches(device)
    _, want, want_state = train(identity)
    f, got, got_state = train(cgt.jit)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert_same(got_state, want_state)
    assert counts(cgt.stats(f)) == (1, 1, N - 2, 0)


@pytest.mark.parametrize("steps", [False, True], ids=["without step", "with step"])
@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_accumulate_over_micro_batches(device, to_none, steps):
    def train(wrap):
        torch.manual_seed(0)
        model = Net().to(device)
        opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

        def micro(x, y):
            loss = F.cross_entropy(model(x), y) / 3
            loss.backward()
            return loss.detach()

        micro = wrap(micro)
        torch.manual_seed(3)
        losses = []
        for k, (x, y) in enumerate(data):
            if k % 3 == 0:
                if steps:
                    cgt.step()
                opt.zero_grad(set_to_none=to_none)
            losses.append(micro(x, y))
            if k % 3 == 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                opt.step()
        return micro, losses, model

    data = batches(device)
    _, want, twin = train(identity)
    f, got, model = train(cgt.jit)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert_same(model.state_dict(), twin.state_dict())
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    s = cgt.stats(f)
    if s.eager and not steps:
        pytest.xfail(MOVED_GRADIENT)  # the values above were compared all the same
    assert s.eager == 0 and s.replays >= N - 8, s.reasons


def test_forward_and_optimizer_as_two_jitted_functions(device):
    def train(wrap):
        torch.manual_seed(0)
        model = Net().to(device)
        opt = OPTIMIZERS["adamw fused"](model.parameters())

        def forward(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss.detach()

        forward, update = wrap(forward), wrap(lambda: opt.step())
        torch.manual_seed(3)
        losses = []
        for x, y in data:
            losses.append(forward(x, y))
            nn.utils.clip_grad_value_(model.parameters(), 0.05)
            update()
            opt.zero_grad()
        return (forward, update), losses, model

    data = batches(device)
    _, want, twin = train(identity)
    fs, got, model = train(cgt.jit)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert_same(model.state_dict(), twin.state_dict())
    for f in fs:
        s = cgt.stats(f)
        assert s.eager == 0 and s.replays >= N - 6, s.reasons


def test_two_models_trained_by_one_function(device):
    def train(wrap):
        torch.manual_seed(0)
        models = [Net().to(device) for _ in range(2)]
        opts = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in models]

        def step(model, opt, x, y):
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            return loss.detach()

        step = wrap(step)
        torch.manual_seed(3)
        losses = [step(models[k % 2], opts[k % 2], *data[k]) for k in range(N)]
        return step, losses, models

    data = batches(device)
    _, want, twins = train(identity)
    f, got, models = train(cgt.jit)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    for model, twin in zip(models, twins, strict=True):
        assert_same(model.state_dict(), twin.state_dict())
    s = cgt.stats(f)
    # The second model's optimizer makes its state in a call that was to be recorded.
    assert counts(s) == (1, 2, N - 4, 1), s.reasons


def test_evaluation_between_steps_sees_the_new_parameters(device):
    def train(wrap):
        trainer = Trainer(device, wrap, optimizer="momentum")
        model = trainer.model

        def predict(x):
            return model(x)

        predict = wrap(predict)
        torch.manual_seed(3)
        results = []
        for k, (x, y) in enumerate(data):
            results.append(trainer.step(x, y))
            if k % 3 == 2:
                model.eval()
                with torch.no_grad():
                    results.append(predict(x))
                model.train()
        return (trainer.step, predict), results

    data = batches(device)
    _, want = train(identity)
    (step, predict), got = train(cgt.jit)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert counts(cgt.stats(step)) == (1, 1, N - 2, 0)
    assert counts(cgt.stats(predict)) == (1, 1, N // 3 - 2, 0)


def test_adam_that_reads_its_step_on_the_host(device):
    """As it is without options."""
    def train(wrap):
        torch.manual_seed(0)
        model = Net().to(device)
        opt = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(x, y):
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            return loss.detach()

        step = wrap(step)
        torch.manual_seed(3)
        return step, [step(x, y) for x, y in data], model.state_dict()

    data = batches(device, 12)
    _, want, want_state = train(identity)
    f, got, got_state = train(cgt.jit)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert_same(got_state, want_state)
    s = cgt.stats(f)
    assert counts(s) == (1, 1, 10, 0), s.reasons


def test_advice_for_adam_helps(device):
    s = compare(device, optimizer="adamw fused", n=6)
    assert counts(s) == (1, 1, 4, 0)


def test_loss_with_its_spent_graph_can_be_returned(device):
    torch.manual_seed(0)
    model, twin = Net().to(device), Net().to(device)
    twin.load_state_dict(model.state_dict())

    def make(model):
        opt = torch.optim.SGD(model.parameters(), lr=0.05)

        def step(x, y):
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            return loss

        return step

    f, eager = cgt.jit(make(model)), make(twin)
    data = batches(device, 6)
    torch.manual_seed(3)
    got = [f(x, y) for x, y in data]
    torch.manual_seed(3)
    want = [eager(x, y) for x, y in data]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert counts(cgt.stats(f)) == (1, 1, 4, 0)


def test_user_exception_in_the_backward_leaves_training_usable(device):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, fail):
            ctx.fail = fail
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if ctx.fail:
                raise KeyError("mine")
            return grad, None

    def train(wrap):
        torch.manual_seed(0)
        model = Net().to(device)
        opt = torch.optim.SGD(model.parameters(), lr=0.05)

        def step(x, y, fail):
            opt.zero_grad()
            loss = F.cross_entropy(Fails.apply(model(x), fail), y)
            loss.backward()
            opt.step()
            return loss.detach()

        step = wrap(step)
        torch.manual_seed(3)
        losses = []
        for k, (x, y) in enumerate(data):
            if k in (0, 2, 6):
                with pytest.raises(KeyError, match="mine"):
                    step(x, y, True)
            losses.append(step(x, y, False))
        return step, losses, model.state_dict()

    data = batches(device, 10)
    _, want, want_state = train(identity)
    f, got, got_state = train(cgt.jit)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert_same(got_state, want_state)
    assert cgt.stats(f).replays >= 4


def test_gradient_of_a_gradient(device):
    w = torch.ones(3, device=device, requires_grad=True)
    w.grad = torch.full((3,), 2.0, device=device, requires_grad=True)

    def function(x):
        w.grad.grad = None
        (w.grad * w.grad * x).sum().backward()

    f = cgt.jit(function)
    for k in range(8):
        f(torch.full((3,), float(k), device=device))
        assert torch.equal(w.grad.grad, torch.full((3,), 4.0 * k, device=device))
    s = cgt.stats(f)
    assert s.eager == 0 and s.replays >= 4, s.reasons


def test_parameters_in_one_buffer_count_their_own_versions(device):
    """As those of cuDNN's layers and of flattened models: one storage, a counter each."""

    def train(wrap):
        buffer = torch.arange(8.0, device=device)
        params = [torch.nn.Parameter(torch.zeros(4, device=device)) for _ in range(2)]
        for k, p in enumerate(params):
            p.data = buffer[4 * k : 4 * k + 4]
        opt = torch.optim.SGD(params, lr=0.1)

        def step(x):
            opt.zero_grad()
            loss = sum(p.mul(x).sum() for p in params)
            loss.backward()
            opt.step()
            return loss.detach()

        step, x = wrap(step), torch.ones(4, device=device)
        losses = [step(x).item() for _ in range(6)]
        return losses, [p._version for p in params], step

    want, got = train(lambda f: f), train(cgt.jit)
    assert got[:2] == want[:2] and cgt.stats(got[2]).replays >= 3, cgt.explain(got[2])


def test_step_of_an_optimizer_behind_a_scheduler(device):
    """The scheduler's wrapper of `step` has the optimizer by a weak reference."""
    p = nn.Parameter(torch.zeros(3, device=device))
    optimizer = torch.optim.SGD([p], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    p.grad = torch.ones_like(p)
    step = cgt.jit(optimizer.step)
    for k in range(10):
        p.data.zero_()
        step()
        assert p.tolist() == [-(0.5**k)] * 3
        scheduler.step()
    assert cgt.stats(step).replays >= 5, cgt.explain(step)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_closure_that_lbfgs_calls(device, search):
    """Its state changes between any two calls, and the closure, which clears gradients alone, reads nothing of it."""

    def train(wrap):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn=search)
        x, y = torch.randn(16, 6, device=device), torch.randn(16, 1, device=device)

        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        f = wrap(closure)
        return f, [optimizer.step(f).item() for _ in range(8)], [p.detach() for p in model.parameters()]

    (_, want, params), (f, got, mine) = train(identity), train(cgt.jit)
    assert got == want and all(map(torch.equal, mine, params))
    s = cgt.stats(f)
    assert s.calls >= 32 and s.records <= 2 and s.replays >= s.calls - 4, cgt.explain(f)


STEPS = {
    "named": lambda optimizer: lambda: optimizer.step(),
    "bound": lambda optimizer: (lambda step: lambda: step())(optimizer.step),
    "the method itself": lambda optimizer: optimizer.step,
    "partial": lambda optimizer: functools.partial(optimizer.step),
    "of the class": lambda optimizer: (lambda step: lambda: step(optimizer))(type(optimizer).step),
    "by name": lambda optimizer: lambda: getattr(optimizer, "step")(),  # noqa: B009
    "by a caller": lambda optimizer: (lambda call: lambda: call(optimizer))(operator.methodcaller("step")),
    "behind a scheduler": lambda optimizer: (torch.optim.lr_scheduler.ConstantLR(optimizer, 1), lambda: optimizer.step())[1],
    "read": lambda optimizer: lambda: next(iter(optimizer.state.values()))["momentum_buffer"].mul_(0.5) if optimizer.state else None,
}


@pytest.mark.parametrize("name", STEPS)
def test_state_of_an_optimizer_that_is_replaced_between_calls(device, name):
    """However the step is come by, what it reads is guarded."""

    def train(wrap):
        torch.manual_seed(0)
        model = nn.Linear(6, 3).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = STEPS[name](optimizer)

        def work(x):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            step()

        f, found = wrap(work), []
        for k, (x, _) in enumerate(batches(device, 20)):
            if k in (8, 13):
                for p, state in optimizer.state.items():
                    state["momentum_buffer"] = torch.full_like(p, k / 10)
            f(x)
            found += [p.detach().clone() for p in model.parameters()]
            if name == "read":
                optimizer.step()
        return f, found

    (_, want), (f, got) = train(identity), train(cgt.jit)
    assert all(map(torch.equal, got, want))
    assert cgt.stats(f).replays >= 10, cgt.explain(f)


class Late:
    """A method that runs first behind a step, and names what code around steps of torch's names, too."""

    def __init__(self, device):
        torch.manual_seed(0)
        self.model, self.on, self.profiler = nn.Linear(6, 3).to(device), False, 1.0
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def late(self, x):
        return x * self.profiler

    def step(self, x):
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        self.optimizer.step()
        late = self.late if self.on else None
        return late(x) if late else x * 1


def test_names_of_code_around_steps_are_no_names_that_were_looked_for(device):
    mine, x = Late(device), torch.ones(2, 6, device=device)
    f = cgt.jit(mine.step)
    for k in range(14):
        mine.on, mine.profiler = k >= 5, 3.0 if k >= 10 else 1.0
        assert torch.equal(f(x), x * mine.profiler), k
    assert cgt.stats(f).replays >= 6, cgt.explain(f)
