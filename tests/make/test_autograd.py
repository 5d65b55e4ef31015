"""Differentiable functions: a jitted function called with gradients enabled is one autograd node, whose
backward is recorded at its first call. Everything is compared bit for bit with an eager twin."""

import copy
import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from helpers import plain, values
from torch import nn

import cgt
from cgt.words import errors

N = 8


def net(seed=0, drop=0.25):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 16), nn.GELU(), nn.Dropout(drop), nn.Linear(16, 12), nn.LayerNorm(12), nn.Tanh(),
        nn.Linear(12, 4),
    )  # fmt: skip


def data(device, n=N, rows=8):
    """Inputs at addresses of their own."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 6, generator=generator).to(device) for _ in range(n)]


def identity(f):
    return f


def both(run, device):
    """(what run(wrap) gives eagerly, jitted): equal numbers of the generator in both."""
    found = []
    for wrap in (identity, cgt.jit):
        torch.manual_seed(3)
        found.append(run(wrap))
    return found


def same(a, b):
    """Bitwise equality of nested lists of tensors and other things."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def grads_of(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def compare(run, device, replays=1, backwards=1):
    """run(wrap) -> (jitted functions, what to compare). Their statistics."""
    (_, want), (fs, got) = both(run, device)
    assert same(want, got)
    found = []
    for f in fs if isinstance(fs, (list, tuple)) else [fs]:
        s = cgt.stats(f)
        assert s.replays >= replays, cgt.explain(f)
        assert s.backward is not None and s.backward.replays >= backwards, cgt.explain(f)
        found.append(s)
    return found[0] if len(found) == 1 else found


# --- training loops ----------------------------------------------------------------------------


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("steps", [False, True], ids=["without step", "with step"])
def test_training_loop(device, to_none, steps):
    def run(wrap):
        model = net().to(device)
        f = wrap(model)
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        seen = []
        for x in data(device, 12):
            if steps:
                cgt.step()
            loss = f(x).square().mean()
            opt.zero_grad(set_to_none=to_none)
            loss.backward()
            seen += [loss.detach().clone(), grads_of(model)]
            opt.step()
        return f, seen

    s = compare(run, device, replays=9, backwards=8)
    assert s.eager == 0 and s.backward.eager == 0, s


def test_loss_inside_and_everything_frozen_but_one(device):
    def run(wrap):
        model = net().to(device)
        for p in list(model.parameters())[:-2]:
            p.requires_grad_(False)

        def loss_of(x, y):
            return F.cross_entropy(model(x), y)

        f = wrap(loss_of)
        seen = []
        for x in data(device, 12):  # where the targets lie is the allocator's choice
            loss = f(x, torch.arange(8, device=device) % 4)
            loss.backward()
            seen += [loss.detach().clone(), grads_of(model)]
            model.zero_grad()
        return f, seen

    compare(run, device, 5, 5)


def test_accumulation_over_micro_batches(device):
    def run(wrap):
        model = net().to(device)
        f = wrap(model)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        for k, x in enumerate(data(device, 24)):
            loss = f(x).square().mean() / 4
            loss.backward()
            if k % 4 == 3:
                seen.append(grads_of(model))
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                opt.step()
                opt.zero_grad()
        return f, seen

    compare(run, device, 16, 12)


def test_gradients_are_ordinary_memory_of_their_own(device):
    model = net(drop=0.0).to(device)
    f, batches = cgt.jit(model), data(device, 10)
    kept = []
    for x in batches:
        f(x).sum().backward()
        kept.append([p.grad for p in model.parameters()])
        model.zero_grad()
    twin = copy.deepcopy(model)
    for x, got in zip(batches, kept, strict=True):
        twin.zero_grad()
        twin(x).sum().backward()
        assert same([p.grad for p in twin.parameters()], got)
    assert cgt.stats(f).backward.replays >= 6


class Returns(torch.autograd.Function):
    """Its backward returns what it saved."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        return x + w

    @staticmethod
    def backward(ctx, grad):
        return grad, ctx.saved_tensors[0]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, v: x + w,
        lambda x, w, v: (x + w) + v,
        lambda x, w, v: (x + w, x + v),
        lambda x, w, v: (x + w) * 2 + v,
        lambda x, w, v: Returns.apply(x, w) + v * 2,
    ],
    ids=["one", "two", "two results", "one of two", "saved"],
)
def test_gradients_that_pass_through_unchanged_share_no_memory(device, function):
    """AccumulateGrad takes a tensor that nobody else holds: it must see that somebody does."""

    def run(wrap):
        w, v = (torch.ones(3, device=device, requires_grad=True) for _ in range(2))
        x, given = torch.full((3,), 2.0, device=device), torch.full((3,), 5.0, device=device)
        f, seen = wrap(function), []
        for k in range(8):
            if k % 3 == 0:
                w.grad = v.grad = None
            y = f(x, w, v)
            torch.autograd.backward(y, [given] * 2 if isinstance(y, tuple) else given)
            for p in (w, v):
                if p.grad is not None:
                    p.grad.add_(k)
            seen += [None if t is None else t.clone() for t in (w.grad, v.grad, given, x)]
        return f, seen

    compare(run, device, 5, 4)


def test_a_chain_of_jitted_functions(device):
    def run(wrap):
        first, second = net(0).to(device), nn.Linear(4, 3).to(device)
        fs = [wrap(first), wrap(second)]
        seen = []
        for x in data(device, 12):
            y = fs[1](torch.relu(fs[0](x)))
            y.square().sum().backward()
            seen += [y.detach().clone(), grads_of(first), grads_of(second)]
            first.zero_grad()
            second.zero_grad()
        return fs, seen

    compare(run, device, 8, 7)


@pytest.mark.parametrize("use", ["before", "after", "twice", "hooked", "grad", "retained"])
def test_gradients_that_meet_what_eager_code_contributes(device, use):
    """Inside, h and w are used three times and twice: (c + a) + b is not c + (a + b)."""

    def run(wrap):
        torch.manual_seed(4)
        u, v = (torch.randn(6, 6, device=device) for _ in range(2))
        w = torch.randn(6, 6, device=device, requires_grad=True)
        f, seen = wrap(lambda h: (h @ w) * (h @ u).tanh() + h @ v + w.mean()), []
        for x in data(device, 12):
            x.requires_grad_()
            h = x * 1.1
            if use == "hooked":
                h.register_hook(lambda grad: grad * 0.7)
            if use == "after":
                out = f(h) + h.sin() @ w
            elif use == "twice":
                h = h + f(h)
                out = f(h) * h + (h @ w).exp() * 0.01
            else:
                out = h.sin() @ w
                out = out + f(h)
            loss = out.square().sum()
            if use == "grad":
                seen.append(torch.autograd.grad(loss, [h, w]))
                continue
            loss.backward(retain_graph=use == "retained")
            if use == "retained":
                loss.backward()
            seen += [x.grad, w.grad.clone()]
            w.grad = None
        return f, seen

    compare(run, device, 8, 7)


def test_gradients_that_meet_a_sparse_one(device):
    """The embedding's is left to autograd, which knows how to add to it."""

    def run(wrap):
        torch.manual_seed(4)
        w = torch.randn(12, 6, device=device, requires_grad=True)
        f, seen = wrap(lambda h: h @ w.t() + w.sum() * 0.1), []
        for k, x in enumerate(data(device, 12)):
            rows = F.embedding(torch.tensor([k % 5, 3], device=device), w, sparse=True)
            (f(x).square().sum() + rows.sin().sum()).backward()
            seen.append(w.grad.to_dense().clone())
            w.grad = None
        return f, seen

    compare(run, device, 8, 7)


def test_forward_loss_and_optimizer_each_jitted(device):
    def run(wrap):
        model = net().to(device)
        opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        f, loss_of, update = wrap(model), wrap(F.cross_entropy), wrap(lambda: opt.step())
        target = torch.arange(8, device=device) % 4
        seen = []
        for x in data(device, 14):
            loss = loss_of(f(x), target)
            loss.backward()
            update()
            opt.zero_grad()
            seen.append(loss.detach().clone())
        seen.append([p.detach().clone() for p in model.parameters()])
        return [f, loss_of], seen

    compare(run, device, 8, 7)


# --- what autograd can ask ---------------------------------------------------------------------


def test_gradients_of_arguments(device):
    def run(wrap):
        f = wrap(lambda x, y, k: (x * y + x.sin() * k).sum(0))
        seen = []
        for k, x in enumerate(data(device, 10)):
            a = x.clone().requires_grad_()
            b = (a.detach() * 2).requires_grad_()
            c = b * 3  # with a history of its own
            y = f(a, c, 2.0)
            y.backward(torch.full_like(y, k))
            seen += [y.detach().clone(), a.grad, b.grad]
        return f, seen

    compare(run, device, 6, 5)


def test_autograd_grad_and_unused_results(device):
    def run(wrap):
        w = torch.ones(6, device=device, requires_grad=True)
        v = torch.full((6,), 2.0, device=device, requires_grad=True)

        def three(x):
            return x * w, {"v": (x * v).exp()}, x.sum(), [x * 2]

        f = wrap(three)
        seen = []
        for k, x in enumerate(data(device, 16)):
            a, d, s, (t,) = f(x)
            assert a.requires_grad and d["v"].requires_grad
            assert not s.requires_grad and not t.requires_grad
            if k % 2:
                seen += torch.autograd.grad(a.sum(), [w, v], allow_unused=True)
            else:
                seen += torch.autograd.grad((a * d["v"]).sum(), [v, w])
            seen += [a.detach().clone(), s.clone()]
        return f, seen

    s = compare(run, device, 12, 8)
    assert s.eager == 0


def test_backward_twice(device):
    def run(wrap):
        model = net().to(device)
        f = wrap(model)
        seen = []
        for x in data(device, 12):
            loss = f(x).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
            seen.append(grads_of(model))
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                loss.backward()
            model.zero_grad()
        return f, seen

    compare(run, device, 8, 8)


@pytest.mark.parametrize("order", ["first in first out", "last in first out"])
def test_several_forwards_before_their_backwards(device, order):
    def run(wrap):
        model = net().to(device)
        f = wrap(model)
        seen, batches = [], data(device, 24)
        for k in range(0, 24, 3):
            losses = [f(x).square().sum() for x in batches[k : k + 3]]
            seen += [loss.detach().clone() for loss in losses]
            for loss in losses if order.startswith("first") else reversed(losses):
                loss.backward()
                seen.append(grads_of(model))
            model.zero_grad()
        return f, seen

    s = compare(run, device, 15, 12)
    assert s.eager == 0 and s.backward.eager == 0, cgt.explain()


def test_results_that_are_never_differentiated(device):
    def run(wrap):
        model = net(drop=0.0).to(device)
        f = wrap(model)
        kept, seen = [], []
        for x in data(device, 40):
            kept.append(f(x))
        seen = [y.detach().clone() for y in kept]
        kept[17].sum().backward()
        kept[39].sum().backward()
        return f, [seen, grads_of(model)]

    (_, want), (f, got) = both(run, device)
    assert same(want, got)
    assert cgt.stats(f).replays >= 20, cgt.explain(f)


def test_torch_func_inside_a_differentiable_function(device):
    """It works with no hooks for saved tensors, and a recording has some."""
    w = torch.randn(4, device=device, requires_grad=True)

    def penalty(x):
        return torch.func.grad(lambda x: (x * w).sin().sum())(x).square().sum()

    def step(x):
        w.grad = None
        penalty(x).backward()
        return w.grad

    f, whole, x = cgt.jit(penalty), cgt.jit(step), torch.randn(4, device=device)
    for _ in range(6):
        w.grad = None
        penalty(x).backward()
        want, w.grad = w.grad, None
        f(x).backward()
        assert torch.equal(w.grad, want)
        assert torch.equal(whole(x), want)
    assert any("torch.func" in reason and __file__ in reason for reason in cgt.stats(f).reasons)
    assert cgt.stats(whole).replays >= 3


def test_other_memory_between_forward_and_backward_raises(device):
    """Eager would go on with the old memory, which a replay has not kept."""
    layer = nn.Linear(3, 3).to(device)
    f, x = cgt.jit(layer), torch.ones(1, 3, device=device, requires_grad=True)
    for _ in range(4):
        f(x).sum().backward()
    y = f(x)
    layer.weight.data = layer.weight.data * 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    f(x).sum().backward()


def test_double_backward_inside(device):
    def run(wrap):
        model = net(drop=0.0).to(device)

        def penalised(x):
            x = x.detach().requires_grad_()
            (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            return g.square().sum()

        f = wrap(penalised)
        seen = []
        for x in data(device, 10):
            loss = f(x)
            loss.backward()
            seen += [loss.detach().clone(), grads_of(model)]
            model.zero_grad()
        return f, seen

    (_, want), (f, got) = both(run, device)
    assert same(want, got)


def test_gradients_of_two_results_that_are_one_moving_tensor_are_copied_once(device):
    """`a + b` hands one tensor to both."""

    def run(wrap):
        w = nn.Parameter(torch.randn(6, 6, device=device))
        f = wrap(lambda x: (x * w, x + w))
        kept, seen = [], []
        for x in data(device, 24, rows=6):
            a, b = f(x)
            kept.append(torch.randn_like(a))
            ((a + b) * kept[-1]).sum().backward()
            kept.append(torch.empty_like(a))  # so that the next gradient lies elsewhere
            seen += [a.detach().clone(), w.grad.clone()]
            w.grad = None
        return f, seen

    stats = compare(run, device, replays=20, backwards=18)
    assert stats.backward.records <= 4 and stats.backward.eager == 0, stats


@pytest.mark.parametrize("where", ["tensor", "accumulated", "result", "argument"])
def test_hooks_fire_as_in_eager(device, where):
    def run(wrap):
        model = net().to(device)
        f = wrap(model)
        seen, calls = [], []
        for name, p in model.named_parameters():
            if where == "tensor":
                p.register_hook(lambda g, n=name: (calls.append(n), g * 2)[1])
            if where == "accumulated":
                p.register_post_accumulate_grad_hook(lambda p, n=name: calls.append((n, p.grad.sum().item())))
        for x in data(device, 10):
            x = x.clone().requires_grad_()
            h = x * 1.0
            if where == "argument":
                h.register_hook(lambda g: (calls.append("h"), g + 1)[1])
            y = f(h)
            if where == "result":
                y.register_hook(lambda g: (calls.append("y"), g * 3)[1])
            y.square().sum().backward()
            seen += [grads_of(model), x.grad.clone()]
            model.zero_grad()
        # Gradients of one recording arrive together: their hooks run in another order.
        return f, [seen, sorted(calls, key=str)]

    compare(run, device, 6, 5)


def test_in_place_change_of_what_was_saved_raises(device):
    w = torch.ones(6, device=device, requires_grad=True)
    f = cgt.jit(lambda x: (x * w).sigmoid())
    for x in data(device, 5):
        f(x).sum().backward()
    for target in ("argument", "result"):
        x = data(device, 1)[0]
        y = f(x)
        with torch.no_grad():
            (x if target == "argument" else y).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        del y
    w.grad = None
    x = data(device, 1)[0]
    f(x).sum().backward()
    want = w.grad
    w.grad = None
    f.__wrapped__(x).sum().backward()
    assert same(want, w.grad)


def test_in_place_change_of_what_no_gradient_needs(device):
    """It was saved for a result that the loss does not use."""

    def run(wrap):
        w = torch.ones(6, device=device, requires_grad=True)
        f = wrap(lambda x, y: (x * w, (y * w).exp()))
        seen = []
        for k, (x, y) in enumerate(zip(data(device, 12), data(device, 12), strict=True)):
            first, _ = f(x, y)
            if k % 3 == 2:
                y.mul_(2)
            first.sum().backward()
            seen.append(w.grad.clone())
        return f, seen

    s = compare(run, device, 9, 3)
    assert s.backward.reasons == {errors.saved_changed(): 4}


def test_a_history_that_was_used_up(device):
    """Through it a backward raises, as in eager, at a first call, a recorded and a replayed one; past it none does."""
    w = torch.ones(6, device=device, requires_grad=True)
    f, through = cgt.jit(lambda h: (h * w).sin()), cgt.jit(lambda h, x: (h * 2, x * w))
    for x in data(device):
        h = (x * w).exp()
        h.sum().backward()
        with pytest.raises(RuntimeError, match="second time"):
            f(h).sum().backward()
        with pytest.raises(RuntimeError, match="second time"):
            through(h, x)[0].sum().backward()
        y = f(x)
        y.sum().backward()
        through(y, x)[1].sum().backward()
    assert min(cgt.stats(f).replays, cgt.stats(through).replays) >= 6, cgt.explain(through)


def test_in_place_change_of_a_result_is_differentiated(device):
    def run(wrap):
        w = torch.ones(6, device=device, requires_grad=True)
        f = wrap(lambda x: x * w)
        seen = []
        for x in data(device, 8):
            y = f(x)
            y.mul_(3).add_(x)
            y.square().sum().backward()
            seen += [y.detach().clone(), w.grad.clone()]
            w.grad = None
        return f, seen

    compare(run, device, 5, 4)


# --- switches ----------------------------------------------------------------------------------


def test_gradients_on_and_off(device):
    def run(wrap):
        model = net().to(device)
        f = wrap(model)
        seen = []
        for k, x in enumerate(data(device, 24)):
            if k % 3 == 2:
                with torch.no_grad():
                    y = f(x)
                assert not y.requires_grad
                seen.append(y.clone())
                continue
            y = f(x)
            y.sum().backward()
            seen += [y.detach().clone(), grads_of(model)]
            model.zero_grad()
        return f, seen

    s = compare(run, device, 16, 10)
    assert s.eager == 0


def test_frozen_and_thawed_between_calls(device):
    def run(wrap):
        model = net().to(device)
        f = wrap(model)
        seen = []
        for k, x in enumerate(data(device, 18)):
            model[0].weight.requires_grad_(k % 6 < 3)
            f(x).square().sum().backward()
            seen.append(grads_of(model))
            model.zero_grad()
        return f, seen

    compare(run, device, 8, 8)


def test_train_and_eval(device):
    def run(wrap):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)).to(device)
        f = wrap(model)
        seen = []
        for k, x in enumerate(data(device, 20)):
            model.train(k % 4 != 3)
            f(x).square().sum().backward()
            seen += [grads_of(model), [b.clone() for b in model.buffers()]]
            model.zero_grad()
        return f, seen

    compare(run, device, 12, 10)


def test_parameter_replaced_between_calls(device):
    def run(wrap):
        model = net().to(device)
        f = wrap(model)
        seen = []
        for k, x in enumerate(data(device, 16)):
            if k in (6, 11):
                model[0].weight = nn.Parameter(torch.full((16, 6), 0.1 * k, device=device))
            f(x).square().sum().backward()
            seen.append(grads_of(model))
            model.zero_grad()
        return f, seen

    compare(run, device, 8, 6)  # where gradients lie, which a recording of a backward pins, is the allocator's affair


# --- unusual functions -------------------------------------------------------------------------


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, factor):
        ctx.save_for_backward(x, w)
        ctx.factor = factor
        return x * w * factor

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w * ctx.factor, (g * x * ctx.factor).sum(0), None


class Smuggles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.x = x  # not by save_for_backward
        return x * w

    @staticmethod
    def backward(ctx, g):
        return None, (g * ctx.x).sum(0)


def test_custom_function(device):
    def run(wrap):
        w = torch.ones(6, device=device, requires_grad=True)
        f = wrap(lambda x: Scale.apply(x.sin(), w, 2.5).sum())
        seen = []
        for x in data(device, 8):
            f(x).backward()
            seen.append(w.grad.clone())
            w.grad = None
        return f, seen

    compare(run, device, 5, 4)


def test_custom_function_that_keeps_an_argument_itself_runs_eagerly(device):
    def run(wrap):
        w = torch.ones(6, device=device, requires_grad=True)
        f = wrap(lambda x: Smuggles.apply(x, w).sum())
        seen = []
        for x in data(device, 8):
            f(x).backward()
            seen.append(w.grad.clone())
            w.grad = None
        return f, seen

    (_, want), (f, got) = both(run, device)
    assert same(want, got)
    assert any("save_for_backward" in reason for reason in cgt.stats(f).reasons), cgt.explain(f)


def test_hook_inside_that_closes_over_an_argument_runs_eagerly(device):
    def run(wrap):
        w = torch.ones(6, device=device, requires_grad=True)

        def scaled(x, mask):
            h = x * w
            h.register_hook(lambda g: g * mask)
            return h.sum()

        f = wrap(scaled)
        seen = []
        for k, x in enumerate(data(device, 8)):
            f(x, torch.full((6,), float(k), device=device)).backward()
            seen.append(w.grad.clone())
            w.grad = None
        return f, seen

    (_, want), (f, got) = both(run, device)
    assert same(want, got)


def test_results_that_share_memory_run_eagerly(device):
    w = torch.ones(6, device=device, requires_grad=True)
    f = cgt.jit(lambda x: (x * w).unsafe_chunk(2))  # which autograd does not know to be views
    for x in data(device, 5):
        a, b = f(x)
        (a.sum() + 2 * b.sum()).backward()
        want = torch.cat([x[:4], 2 * x[4:]]).sum(0)
        assert torch.allclose(w.grad, want)
        w.grad = None
    assert any("shares memory" in reason for reason in cgt.stats(f).reasons)


def test_a_graph_from_outside_is_no_part_of_the_recording(device):
    w = torch.ones(6, device=device, requires_grad=True)
    f = cgt.jit(lambda loss: loss.backward())
    for k, x in enumerate(data(device, 6)):
        w.grad = None
        f((x * w).sum() * k)
        assert torch.allclose(w.grad, x.sum(0) * k)


@pytest.mark.parametrize("reached", [False, True])
def test_backward_through_a_graph_from_outside_that_adds_to_a_gradient(device, reached):
    w = torch.ones(6, device=device, requires_grad=True)
    w.grad = torch.zeros(6, device=device)
    want = torch.zeros(6, device=device)
    f = cgt.jit(lambda loss: (loss.backward(), w.shape if reached else None)[1])
    for x in data(device):
        f((x.exp() * w).sum())
        want += x.exp().sum(0)
        assert torch.equal(w.grad, want)


class Identity(torch.autograd.Function):
    """To be given a backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()


def test_gradient_that_nobody_needs(device):
    class Stops(Identity):
        @staticmethod
        def backward(ctx, g):
            return None

    w = torch.ones(6, device=device, requires_grad=True)
    f = cgt.jit(lambda x: x * w)
    for x in data(device):
        (Stops.apply(f(x)).sum() + f(x).sum() * 0 + w.sum()).backward()
        Stops.apply(f(x)).sum().backward()
    assert torch.equal(w.grad, torch.full((6,), float(N), device=device))


def test_backward_that_reads_on_the_host_is_right_for_a_replayed_call(device):
    class Reads(Identity):
        @staticmethod
        def backward(ctx, g):
            return g * (2.0 if g.sum().item() > 0 else 3.0)

    w = torch.ones(6, device=device, requires_grad=True)
    f = cgt.jit(lambda x: Reads.apply(x * w).sum())
    batches = data(device)
    losses = [f(x) for x in batches]  # replayed before any backward
    for loss, x in zip(losses, batches, strict=True):
        (grad,) = torch.autograd.grad(loss, w)
        assert torch.equal(grad, (2 * x).sum(0))


def test_exception_in_a_backward_is_the_users_own(device):
    class Fails(Identity):
        @staticmethod
        def backward(ctx, g):
            if failing:
                raise KeyError("mine")
            return g

    failing = False
    w = torch.ones(6, device=device, requires_grad=True)
    f = cgt.jit(lambda x: Fails.apply(x * w).sum())
    x = data(device, 1)[0]
    f(x).backward()
    failing = True
    with pytest.raises(KeyError, match="mine"):
        f(x).backward()
    failing = False
    for _ in range(4):
        w.grad = None
        f(x).backward()
        assert torch.equal(w.grad, x.sum(0))


# --- what is told --------------------------------------------------------------------------------


def test_the_first_result_that_requires_grad_says_that_the_next_is_recorded(device):
    w = torch.ones(3, device=device, requires_grad=True)
    f, x = cgt.jit(lambda x: x * w), torch.ones(3, device=device)
    with torch.no_grad():
        f(x), f(x)
    for _ in range(5):
        f(x).sum().backward()
    s = cgt.stats(f)
    assert s.eager == 1 and s.reasons == {errors.first_gradient(): 1} and s.replays == 3


def test_argument_with_a_history_that_is_written(device):
    w = torch.ones(3, device=device, requires_grad=True)

    def writes(h):
        return h.mul_(2).sum()

    f = cgt.jit(writes)
    for _ in range(4):
        (grad,) = torch.autograd.grad(f(w * 3), w)
        assert torch.equal(grad, torch.full((3,), 6.0, device=device))
    assert any("written in place" in reason for reason in cgt.stats(f).reasons)


def test_graph_from_outside_that_is_reached_in_passing(device):
    w = torch.ones(3, device=device, requires_grad=True)
    hidden = {("a", object()): w * 2}  # by a key that no code names

    def reaches(x):
        (outer,) = hidden.values()
        return (x * outer).sum()

    f, x = cgt.jit(reaches), torch.ones(3, device=device)
    for k in range(4):
        hidden[next(iter(hidden))] = w * (k + 2)
        (grad,) = torch.autograd.grad(f(x), w, retain_graph=True)
        assert torch.equal(grad, torch.full((3,), k + 2.0, device=device))


def test_recorded_result_that_was_not_kept_checks_what_it_saved(device):
    w = torch.ones(3, device=device, requires_grad=True)
    kept = []

    def keeps(x):
        y = (x * w).sigmoid()
        kept.append(y.detach())
        return y

    f, x = cgt.jit(keeps), torch.ones(3, device=device)
    f(x).sum().backward()
    y = f(x)  # recorded, but the tensor outlives the call
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_hook_that_keeps_an_argument(device):
    w = torch.ones(3, device=device, requires_grad=True)

    def hooked(x):
        h = x * w
        h.register_hook(lambda g: g * x)
        return h.sum()

    f = cgt.jit(hooked)
    for k in range(6):
        (grad,) = torch.autograd.grad(f(torch.full((3,), float(k), device=device)), w)
        assert torch.equal(grad, torch.full((3,), float(k * k), device=device))
    assert any("args[0]" in reason and "keeps" in reason for reason in cgt.stats(f).reasons)


def test_backward_of_a_replay_that_read_another_call(device):
    w = torch.ones(3, device=device, requires_grad=True)
    held = {torch.ones(3, device=device)}  # sets are not looked into

    def hooked(x):
        (scale,) = held
        h = x * w
        h.register_hook(lambda g: g * scale)
        return h.sum()

    f = cgt.jit(hooked)
    x, y, z = (torch.full((3,), float(k), device=device) for k in (1, 2, 3))
    f(x), f(y)
    loss = f(z)  # a replay before any backward showed what the hook reads
    with pytest.raises(cgt.CgtError, match="belongs to a replayed call"):
        loss.backward()
    for k in range(3):
        (grad,) = torch.autograd.grad(f(x * k), w)
        assert torch.equal(grad, x * k)


# --- lifetimes ---------------------------------------------------------------------------------


def test_forwards_whose_recording_was_freed_meanwhile(device):
    def run(wrap):
        model = net().to(device)
        f = wrap(model)
        seen = []
        for k, x in enumerate(data(device, 10)):
            loss = f(x).square().sum()
            if k in (4, 7) and wrap is not identity:
                cgt.reset(f)
            loss.backward()
            seen.append(grads_of(model))
            model.zero_grad()
        return f, seen

    (_, want), (f, got) = both(run, device)
    assert same(want, got)


def test_function_dropped_before_its_backward(device):
    model, batches = net(drop=0.0).to(device), data(device, 4)
    f = cgt.jit(model)
    losses = [f(x).square().sum() for x in batches]
    twin, parameters = copy.deepcopy(model), list(model.parameters())
    gone = weakref.ref(model)
    del f, model
    gc.collect()
    cgt.step()
    for loss in losses:
        loss.backward()
    del losses, loss
    gc.collect()
    assert gone() is None
    for x in batches:
        twin(x).square().sum().backward()
    assert same([p.grad for p in parameters], grads_of(twin))


def test_nothing_is_left_of_a_dropped_model(device):
    model = net().to(device)
    f, gone = cgt.jit(model), weakref.ref(model[0].weight)
    for x in data(device, 5):
        loss = f(x).sum()
        loss.backward()
    del model, f, x, loss
    cgt.reset()
    gc.collect()
    cgt.reset()
    assert gone() is None


def test_activations_are_free_after_the_backward(device):
    model = net(drop=0.0).to(device)
    f = cgt.jit(model)
    for x in data(device, 12):
        loss = f(x).square().sum()
        loss.backward()
        model.zero_grad()
    s = cgt.stats(f)
    assert s.replays >= 9
    assert s.rescues <= 4, "only results of the last iteration may still be held, not activations"


def test_backwards_from_many_threads(device):
    model = net(drop=0.0).to(device)
    f, batches = cgt.jit(model), data(device, 4)
    want = [[g.clone() for g in torch.autograd.grad(plain(model)(x).sum(), list(model.parameters()))] for x in batches]
    wrong = []

    def work(k):
        for _ in range(20):
            got = torch.autograd.grad(f(batches[k]).sum(), list(model.parameters()))
            if not same(list(got), want[k]):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@pytest.mark.parametrize("part", [lambda b: b, lambda b: b[1:], lambda b: b.view(10, -1).t()], ids=["whole", "slice", "transposed"])
def test_arguments_with_a_place_in_the_graph_that_are_written_and_returned(device, part):
    """The base of a view gets another place there, too; so it does where a later call comes with the same memory."""
    f = cgt.jit(lambda v: v.mul_(2))
    for seed in range(12):
        got, want = (torch.full((100_000,), 1.0 + seed, device=device, requires_grad=True) for _ in range(2))
        for x, function in ((got, f), (want, f.__wrapped__)):
            base = x * 1
            result = function(part(base))
            (result.sum() + (base * 3).sum()).backward()
            del base, result
        assert torch.equal(got.grad, want.grad), seed
    assert any("args[0] requires grad and is written in place" in told for told in cgt.stats(f).reasons)


def test_arguments_with_a_place_in_the_graph_that_are_written_past_autograd_replay(device):
    @torch.no_grad()
    def function(v):
        v.mul_(2)

    f, base = cgt.jit(function), torch.ones(8, device=device, requires_grad=True) * 1
    with torch.no_grad():
        want = base.clone()
    for _ in range(6):
        f(base)
        want *= 2
    assert torch.equal(base, want) and cgt.stats(f).replays >= 3, cgt.explain(f)


def put(z, w, h):
    z[0] = w


def put_argument(z, w, h):
    z[1:] = h[1:] * 2
    z[0] = h[0]


def add_column(z, w, h):
    z[:, 1] += w


WRITTEN = {
    "a product": lambda z, w, h: z[1:].mul_(w), "a row": put, "an argument": lambda z, w, h: z.t().mul_(h),
    "rows of an argument": put_argument, "a column": add_column, "three": lambda z, w, h: z[1:].addcmul_(w, h[1:]),
}  # fmt: skip


@pytest.mark.parametrize("history", [False, True])
@pytest.mark.parametrize("write", WRITTEN.values(), ids=WRITTEN.keys())
def test_part_of_a_result_that_is_written_with_what_comes_from_outside(device, write, history):
    """Autograd has a node for the whole, and the op's own inside of it: both lead out of the call."""

    def run(wrap):
        torch.manual_seed(3)
        w = torch.randn(3, device=device, requires_grad=True)

        def writes(x, h):
            z = x.sin()
            write(z, w, h)
            return z * 2

        f, seen = wrap(writes), []
        for k in range(16):
            x, h = (values(device, 3, 3, seed=k + at).requires_grad_() for at in (0, 50))
            f(x, h * 1 if history else h).square().sum().backward(retain_graph=k % 3 == 1)
            seen += [x.grad, h.grad, w.grad]
            w.grad = None
        return [t for t in seen if t is not None], f

    (want, _), (got, f) = run(lambda f: f), run(cgt.jit)
    assert all(map(torch.equal, got, want)) and len(got) == len(want)
    s = cgt.stats(f)
    assert s.replays >= 12 and s.backward.replays >= 2
