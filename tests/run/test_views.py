"""Results that are views of other results, both with a history: each call's are parts of one graph, as in eager."""

import contextlib

import pytest
import torch
from helpers import values

import cgt


@pytest.mark.parametrize("order", [(0, 1, 2, 1), (2, 1, 1, 0)])
@pytest.mark.parametrize("change", [False, True])
def test_results_that_are_views_of_a_result(device, order, change):
    """As CLIP returns its logits, and a decoder its last state beside all."""
    w = torch.ones(6, device=device, requires_grad=True)

    def run(wrap):
        def function(x):
            h = (x * w).sin()
            parts = h, h.t(), h[:, 1:3], h.permute(1, 0)[None, ..., -1], h.view(-1), h.flatten()[::2].unsqueeze(1).T
            return [*(parts[k] for k in order), *parts[3:]]

        f, seen = wrap(function), []
        for x in (values(device, 2, 6, seed=k) for k in range(7)):
            given = f(x)
            if change:
                given[0].mul_(2)
            loss = sum((k + 2) * (t.square().sum()) for k, t in enumerate(given))
            loss.backward()
            seen += [w.grad.clone(), *(t.detach().clone() for t in given)]
            seen += [torch.tensor([t._version, t.storage_offset(), *t.stride()]) for t in given]
            assert given[1] is given[3] if order[1] == order[3] else given[1] is given[2]
            w.grad = None
        return f, seen

    (f, got), (_, want) = run(cgt.jit), run(lambda f: f)
    assert all(map(torch.equal, got, want))
    assert cgt.stats(f).replays >= 4 and cgt.stats(f).backward.replays >= 3, cgt.stats(f).reasons


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_gradients_come_as_eager_lays_them_out(device, order):
    """Where a product of matrices meets a transposed gradient it may take another way, which rounds otherwise."""
    w = torch.ones(6, device=device, requires_grad=True)

    def run(wrap):
        def function(x):
            h = (x * w).sin()
            return [(h, h.t())[k] for k in order]

        f, strides = wrap(function), []
        for k in range(6):
            given = f(values(device, 4, 6, seed=k))
            given[order.index(0)].register_hook(lambda g: strides.append((g.shape, g.stride())))
            given[order.index(1)].contiguous().square().sum().backward()
        return f, strides

    (f, got), (_, want) = run(cgt.jit), run(lambda f: f)
    assert got == want and len(got) == 6 and got[0][1][0] == 1  # columns first
    assert cgt.stats(f).replays >= 3, cgt.stats(f).reasons


# What a function makes of its argument x of (4, 6), and of a weight w.
VIEWS = {
    "t": lambda x, w: x.t(),
    "several ops": lambda x, w: x.t()[1:3].unsqueeze(0).expand(2, 2, 4),
    "several results of one op": lambda x, w: x.chunk(2),
    "some of them": lambda x, w: x.split([1, 2, 1])[1].view(-1),
    "unsafe": lambda x, w: x.unsafe_chunk(2),
    "an op in common": lambda x, w: (lambda m: [m[0], m[1:3].unsqueeze(0), m])(x.t()),
    "the argument, too": lambda x, w: [x[0], x, x.view_as(x)],
    "twice": lambda x, w: (lambda v: [v, {"again": v}])(x[1]),
    "of a weight": lambda x, w: [w.t(), w.diagonal()],
    "behind other uses": lambda x, w: (lambda y: [y, x.t(), w[0]])((x @ w).sin()),
    "under enable_grad": lambda x, w: torch.no_grad()(lambda: torch.enable_grad()(lambda: x.unfold(1, 2, 2))())(),
    "parts of what is no result": lambda x, w: (x @ w).sin().unbind(0),
    "an op on parts of it": lambda x, w: (lambda y: [y[:2].t(), y[3], y.view(-1)])((x @ w).sin()),
    "written parts of it": lambda x, w: (lambda y: [y[0].mul_(w[0, 0]), y[1]])((x @ w).sin()),
    "empty": lambda x, w: x[:0],
}


def as_leaf(x):
    return x.requires_grad_()


def as_computed(x):
    return x.requires_grad_() * 1.5


def as_part(x):
    return (torch.cat([x, x]).requires_grad_() * 1.5)[2:6]


def nothing(given, arguments, told):
    """What the caller does with a result."""


def hook(given, arguments, told):
    for k, t in enumerate(given):
        t.register_hook(lambda g, k=k: told.append((k, g.stride(), g.tolist())))


def write(given, arguments, told):
    for t in (*given, *arguments):
        with contextlib.suppress(RuntimeError):
            t.mul_(2)


def write_without_gradients(given, arguments, told):
    torch.no_grad()(write)(given, arguments, told)


def use_arguments(given, arguments, told):
    given += [t * 3 for t in arguments]


def facts(t):
    """What autograd says of a view."""
    kept = torch._C._autograd._get_creation_meta(t) if t._is_view() else None
    return [t.shape, t.stride(), t.storage_offset(), t.is_conj(), t.is_neg(), t._is_view(), t._version, str(kept)]


def played(function, w, x, act):
    """All that can be told of a call, its result and its backward."""
    arguments = [x, w]
    given = [t for t in torch.utils._pytree.tree_leaves(function(x, w)) if isinstance(t, torch.Tensor)]
    told = [[t._base is x, t._base is x._base, t._base is w, t.detach().clone(), *facts(t)] for t in given if t._is_view()]
    told.append([[t._base is s._base for s in given] for t in given])
    told.append([t.grad_fn.name() for t in given if t._is_view() and "Cgt" not in t.grad_fn.name()])
    act(given, arguments, told)
    for t in given:
        try:
            told += [t.grad_fn is None, *facts(t), t.detach().clone()]
        except RuntimeError as error:  # one of several views that was written
            told.append(said(error))
    try:
        sum(((k + 2) * t.abs().square()).sum() for k, t in enumerate(given)).backward()
    except RuntimeError as error:
        told.append(said(error))
    return told


def said(error):
    """What was raised; of a saved tensor that was modified cgt has a sentence of its own."""
    return "modified" if "needed for gradient computation" in str(error) else str(error)


def assert_same(got, want):
    for mine, theirs in zip(got, want, strict=True):
        if isinstance(theirs, torch.Tensor):
            assert mine.dtype == theirs.dtype and torch.equal(mine, theirs) and mine.stride() == theirs.stride()
        elif isinstance(theirs, (list, tuple)):
            assert_same(mine, theirs)
        else:
            assert mine == theirs


@pytest.mark.parametrize("act", [nothing, hook, write, write_without_gradients, use_arguments])
@pytest.mark.parametrize("made", [as_leaf, as_computed, as_part])
@pytest.mark.parametrize("name", VIEWS)
def test_views_of_arguments_and_of_what_is_no_result(device, name, made, act):
    """Each is eager's own: values, gradients, what hooks hear, in which writes it refuses and which ones it takes."""
    function = VIEWS[name]
    f = cgt.jit(lambda x, w: function(x, w))
    for k in range(7):
        answers = []
        for run in (f, function):
            x, w = values(device, 4, 6, seed=k), values(device, 6, 6, seed=9).requires_grad_()
            told = played(run, w, made(x), act)
            answers.append([*told, w.grad, x.grad])
        assert_same(*answers)
        del answers, told
    assert cgt.stats(f).replays >= 3, cgt.stats(f).reasons


@pytest.mark.parametrize(
    "function", [lambda z: z.real, lambda z: (z.imag, z.conj()), lambda z: z.conj().imag, torch.view_as_real, lambda z: z.mH],
    ids=["real", "imag and conj", "imag of conj", "view_as_real", "mH"],
)  # fmt: skip
def test_views_of_complex_arguments(device, function):
    f = cgt.jit(function)
    for k in range(7):
        answers = []
        for run in (f, function):
            z = torch.complex(values(device, 4, 6, seed=k), values(device, 4, 6, seed=k + 20)).requires_grad_()
            answers.append([*played(lambda z, _: run(z), z, z, nothing), z.grad])
        assert_same(*answers)
        del answers
    assert cgt.stats(f).replays >= 3, cgt.stats(f).reasons


def hooked(x):
    v = x.t()
    v.register_hook(lambda g: g * 2)
    return v[0], v[1]


def used(x):
    v = x.t()
    return v, (v * 3).tanh()


def used_behind(x):
    v = x.t()
    return v, (x * 3).tanh()


def written(x):
    with torch.no_grad():
        x.mul_(2)
    return x.t()


@pytest.mark.parametrize("function", [hooked, used, used_behind, written])
def test_views_that_are_no_affair_of_the_arguments_alone(device, function):
    """A hook of the function's on the way; another use of the view, or of what it is of, behind which gradients are
    summed; an argument that is written."""
    f = cgt.jit(function)
    for k in range(6):
        answers = []
        for run in (f, function):
            x = values(device, 4, 6, seed=k).requires_grad_()
            answers.append([*played(lambda x, _: run(x), x, x, hook), x.grad])
        assert_same(*answers)
        del answers
    assert any("CGT401" in reason for reason in cgt.stats(f).reasons)


def test_parameters_and_what_is_computed_of_them(device):
    """`return self.head(x), self.head.weight.t()`."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(6, 6, device=device)

        def forward(self, x):
            return self.head(x), self.head.weight.t(), self.head.bias.chunk(2)

    mine, theirs = Model(), Model()
    theirs.load_state_dict(mine.state_dict())
    f = cgt.jit(mine)
    for k in range(12):  # gradients may lie elsewhere each time at first
        grads = []
        for run, model in ((f, mine), (theirs, theirs)):
            y, w, (a, b) = run(values(device, 4, 6, seed=k))
            assert w._base is model.head.weight and w.grad_fn.name() == "TBackward0" and a._base is model.head.bias
            (y.square().sum() + w.cos().sum() + a.exp().sum() + b.sum()).backward()
            grads.append([p.grad for p in model.parameters()])
            model.zero_grad()
            with torch.no_grad():
                model.head.weight.mul_(0.9)
        assert_same(*grads)
        del y, w, a, b, grads
    assert cgt.stats(f).replays >= 3 and cgt.stats(f).backward.replays >= 3, cgt.stats(f).reasons


def test_another_argument_at_each_call_is_the_one_of_which_the_result_is_a_view(device):
    """Of moving ones the graph works on copies: no result is a view of these."""
    f = cgt.jit(lambda x: (x.sin().sum(), x.t()), inputs="copied")
    kept = []
    for k in range(8):
        x = values(device, 4, 6, seed=k).requires_grad_()
        y, v = f(x)
        kept.append((x, v))
        (v.square().sum() + y).backward()
        assert torch.equal(x.grad, 2 * x + x.cos())
    for x, v in kept:
        assert v._base is x and v.data_ptr() == x.data_ptr() and torch.equal(v, x.t())
    assert cgt.stats(f).replays >= 5, cgt.stats(f).reasons


def hooked_result(x, w):
    h = (x @ w).sin()
    v = h.t()
    v.register_hook(lambda g: g * 3)
    return v, h


def used_result(x, w):
    h = (x @ w).sin()
    v = h.t()
    return h, v, (v * 3).tanh()


@pytest.mark.parametrize("function", [hooked_result, used_result])
def test_view_of_a_result_whose_gradients_others_hear_of(device, function):
    f = cgt.jit(function)
    for k in range(6):
        answers = []
        for run in (f, function):
            x, w = values(device, 4, 6, seed=k), values(device, 6, 6, seed=9).requires_grad_()
            told = played(run, w, x, hook)
            answers.append([told[3:], w.grad])  # which results are views of each other is not asked of a call that runs eagerly
        assert_same(*answers)
        del answers, told
    assert any("CGT401" in reason for reason in cgt.stats(f).reasons)


def test_a_recording_that_comes_to_nothing_gives_each_result_its_history(device, monkeypatch):
    """It is thrown away when results are its memory already: the mode that the function changes is asked for last."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    w = torch.ones(6, device=device, requires_grad=True)

    def function(x):
        h = (x * w).sin()
        y = (x + w).cos()
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
        return h.t(), y[0], w[1:], h, y[1]

    f = cgt.jit(function)
    for k in range(5):
        x, grads = values(device, 4, 6, seed=k), []
        for run in (f, function):
            given = run(x)
            sum(((j + 2) * t.square()).sum() for j, t in enumerate(given)).backward()
            grads.append((w.grad, *(t.detach() for t in given)))
            w.grad = None
        assert_same(*grads)
        del grads, given
    assert any("a mode or setting" in reason for reason in cgt.stats(f).reasons)


class Passing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


@torch.no_grad()
def without_gradients(x):
    return x[:1]


@pytest.mark.parametrize(
    ("function", "word"),
    [(Passing.apply, "custom Function"), (lambda x: x.split(1)[0], "no_grad mode|multiple views"), (without_gradients, "no_grad mode"), (lambda x: x[:1], None)],
    ids=["custom function", "one of several", "without gradients", "slice"],
)
def test_view_of_an_argument_refuses_the_writes_that_eagers_refuses(device, function, word):
    f = cgt.jit(function)
    for k in range(6):
        a, b = torch.rand(2, 2, device=device), torch.rand(1, requires_grad=True, device=device)
        told = []
        for run in (function, f):
            view = run(a.clone())
            with contextlib.nullcontext() if word is None else pytest.raises(RuntimeError, match=word) as error:
                view += b
            told.append(word and str(error.value))
        assert told[0] == told[1], k
    assert cgt.stats(f).replays >= 3
