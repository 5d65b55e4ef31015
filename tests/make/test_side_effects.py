"""What a function changes besides the bytes of tensors: a replay would not, so such calls run eagerly with a
reason, and what is only asked about is guarded."""

import copy

import pytest
import torch
from helpers import same
from torch import nn

import cgt
from cgt.words import options


class Holder:
    """An object that functions keep state in."""

    def __init__(self, device):
        self.at, self.mode, self.seen, self.many = 0, "add", False, {"k": 0}
        self.a, self.b = torch.zeros(3, device=device), torch.ones(3, device=device)
        self.ring, self.order = torch.zeros(2, 3, device=device), [1, 2]


def ring(o, x):
    o.ring[o.at] = x
    o.at = (o.at + 1) % 2
    return o.ring.sum(0)


def buffers(o, x):
    o.a, o.b = o.b, o.a
    return o.a.add_(x) + 2 * o.b


def text(o, x):
    o.mode = "add" if o.mode == "mul" else "mul"
    return x + 2 if o.mode == "add" else x * 2


def table(o, x):
    o.many["k"] = 1 - o.many["k"]
    return x * o.many["k"]


def order(o, x):
    o.order[0], o.order[1] = o.order[1], o.order[0]
    return x * o.order[0]


@pytest.mark.parametrize("change", [ring, buffers, text, table, order])
def test_state_that_comes_back_to_an_earlier_value_is_as_in_eager(device, change):
    ours, theirs = Holder(device), Holder(device)
    f = cgt.jit(lambda x: change(ours, x))
    for k in range(12):
        x = torch.full((3,), float(k), device=device)
        assert torch.equal(f(x), change(theirs, x))
        assert same(ours.many, theirs.many) and (ours.at, ours.mode) == (theirs.at, theirs.mode)
        assert torch.equal(ours.ring, theirs.ring)
    if change is not text:
        assert cgt.stats(f).replays >= 8, cgt.explain(f)
        return
    assert cgt.stats(f).replays == 0
    assert any("is changed by the function" in reason for reason in cgt.stats(f).reasons)


def test_state_that_is_set_once_replays_once_it_is_set(device):
    o = Holder(device)

    def f(x):
        if not o.seen:
            o.a.copy_(x)
            o.seen = True
        return o.a + x

    jitted = cgt.jit(f)
    for k in range(12):
        x = torch.full((3,), float(k), device=device)
        if k == 6:
            o.seen = False
        want = x + (torch.full_like(x, 6.0 * (k >= 6)))
        assert torch.equal(jitted(x), want) and o.seen
    assert cgt.stats(jitted).replays >= 8, cgt.explain(jitted)


MODES = {
    "grad": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "dtype": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    "deterministic": (
        lambda: torch.use_deterministic_algorithms(True), torch.are_deterministic_algorithms_enabled
    ),
    "threads": (lambda: torch.autograd.set_multithreading_enabled(False), torch._C._is_multithreading_enabled),
}  # fmt: skip


@pytest.mark.parametrize("change, ask", MODES.values(), ids=MODES.keys())
def test_mode_that_the_function_leaves_changed(device, change, ask):
    def function(x):
        change()
        return x * 2

    f, x, before = cgt.jit(function), torch.ones(3, device=device), ask()
    try:
        for _ in range(5):
            torch.set_grad_enabled(True)
            torch.set_default_dtype(torch.float32)
            torch.use_deterministic_algorithms(False)
            torch.autograd.set_multithreading_enabled(True)
            assert torch.equal(f(x), x * 2) and ask() != before
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.autograd.set_multithreading_enabled(True)
    assert cgt.stats(f).replays == 0
    assert any("a mode or setting of torch" in reason for reason in cgt.stats(f).reasons)


DATA = {
    "parameter": lambda w, b, x: setattr(w, "data", w.data * 0.5 + x),
    "plain tensor": lambda w, b, x: setattr(b, "data", b + x),
    "exchanged": lambda w, b, x: (lambda p, q: (setattr(w, "data", q), setattr(b, "data", p)))(w.data, b.data),
    "argument": lambda w, b, x: setattr(x, "data", x * 2),
}  # fmt: skip


@pytest.mark.parametrize("replace", DATA.values(), ids=DATA.keys())
def test_memory_that_the_function_replaces(device, replace):
    def outcomes(wrap):
        w, b = nn.Parameter(torch.ones(3, device=device)), torch.full((3,), 2.0, device=device)

        def function(x):
            replace(w, b, x)
            return (w.detach() * 2 + b) * x

        f, found = wrap(function), []
        for k in range(9):
            x = torch.full((3,), k + 1.0, device=device)
            found += [f(x), torch.full((3,), 7.0, device=device), w.detach().clone(), b.clone(), x]
        return f, found

    _, want = outcomes(lambda f: f)
    f, got = outcomes(cgt.jit)
    assert same(got, want)
    assert cgt.stats(f).replays == 0
    assert any("other memory (.data" in reason for reason in cgt.stats(f).reasons)


def test_requires_grad_that_the_function_leaves_changed(device):
    w = nn.Parameter(torch.ones(3, device=device))
    f = cgt.jit(lambda x: w.requires_grad_(False) * x)
    for k in range(6):
        w.requires_grad_(True)
        out = f(torch.full((3,), float(k), device=device))
        assert not out.requires_grad and not w.requires_grad
        assert torch.equal(out, torch.full((3,), float(k), device=device))
    assert any("w.requires_grad" in reason for reason in cgt.stats(f).reasons)


LISTENS = {
    "a leaf": lambda w, x: w.register_hook(lambda g: g * 2),
    "an argument": lambda w, x: x.register_hook(lambda g: g * 2),
    "accumulated": lambda w, x: w.register_post_accumulate_grad_hook(lambda w: setattr(w, "grad", w.grad * 2)),
    "retained": lambda w, x: x.retain_grad(),
}  # fmt: skip


@pytest.mark.parametrize("listen", LISTENS.values(), ids=LISTENS.keys())
def test_hooks_that_the_function_leaves_on_tensors_from_outside(device, listen):
    def found(wrap):
        w, v, out = (torch.ones(3, device=device, requires_grad=grad) for grad in (True, True, False))

        def f(x):
            listen(w, x)
            return x.detach() * w.detach()

        f = wrap(f)
        for _ in range(6):
            h = v * 2
            out = out + f(h)
            (h * w).sum().backward()
            out = out + w.grad + v.grad + (h.grad if h.retains_grad else 0)
            w.grad = v.grad = None
        return out, f

    got, f = found(cgt.jit)
    assert torch.equal(got, found(lambda f: f)[0])
    assert cgt.stats(f).replays == 0 and any("hook" in reason for reason in cgt.stats(f).reasons)


def test_hook_that_the_function_takes_away_again_replays(device):
    w = torch.ones(3, device=device, requires_grad=True)

    def f(x):
        hook = w.register_hook(lambda g: g * 2)
        grad = torch.autograd.grad((w * x).sum(), w)[0]
        hook.remove()
        return grad

    jitted = cgt.jit(f)
    for k in range(6):
        x = torch.full((3,), float(k), device=device)
        assert torch.equal(jitted(x), f(x))
    assert cgt.stats(jitted).replays == 4


def test_default_dtype_that_is_another_one_inside(device):
    """The host's tape runs ops under the caller's; kernels of a graph are what they are."""

    def doubled(x):
        torch.set_default_dtype(torch.float64)
        y = x + torch.rand(3, device=x.device) + (x * 3).long() / 3
        torch.set_default_dtype(torch.float32)
        return y

    f = cgt.jit(doubled)
    for k in range(6):
        x = torch.full((3,), float(k), device=device)
        torch.manual_seed(k)
        got = f(x)
        torch.manual_seed(k)
        assert torch.equal(got, doubled(x)), k
    assert cgt.stats(f).replays == (4 if device.type == "cuda" else 0)


VIEWS = {
    "detach": lambda w: w.detach(), "data": lambda w: w.data, "slice": lambda w: w[1:].detach(),
}  # fmt: skip


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_detached_result_over_a_parameter_has_no_gradient(device, view):
    def outcomes(wrap):
        w = nn.Parameter(torch.arange(3.0, device=device))
        f, x, found = wrap(lambda x: ((x * w).sum(), view(w))), torch.ones(3, device=device), []
        for _ in range(6):
            w.grad = None
            loss, target = f(x)
            (loss + target.square().sum()).backward()
            found += [target.requires_grad, w.grad.clone()]
            target.add_(1)  # in w's memory
            found.append(w.detach().clone())
        return f, found

    _, want = outcomes(lambda f: f)
    f, got = outcomes(cgt.jit)
    assert same(got, want)
    assert cgt.stats(f).replays >= 4


def test_leaves_and_results_are_told_apart(device):
    f = cgt.jit(lambda x: x * 2 if x.is_leaf else x * 3)
    leaf = torch.ones(3, device=device, requires_grad=True)
    for k in range(12):
        x = leaf if k // 2 % 2 else leaf * 1
        assert torch.equal(f(x), x * (2 if x.is_leaf else 3))
    assert cgt.stats(f).replays >= 6, cgt.explain(f)


def test_arguments_made_in_inference_mode_replay(device):
    f = cgt.jit(lambda x: (x * 2).relu_())
    with torch.inference_mode():
        for k in range(6):
            x = torch.full((3,), k - 2.0, device=device)
            assert torch.equal(f(x), (x * 2).relu())
    assert cgt.stats(f).replays >= 3 and not cgt.stats(f).reasons


def test_function_with_a_verdict_on_all_its_calls_outlives_its_arguments(device):
    """The program of a call that was given an object goes with the object."""
    f = cgt.jit(lambda x, o: x * float(x.sum()))
    x = torch.ones(3, device=device)
    for n in range(1, 9):
        f(torch.ones(n, device=device), Holder(device))
    for _ in range(3):
        assert torch.equal(f(x, Holder(device)), x * 3)


@pytest.mark.parametrize("retained", [False, True])
def test_compiled_function_whose_backward_may_write_what_it_saved(device, retained):
    """The graph that cgt keeps is no retained graph: PyTorch refuses those ("donated buffers")."""
    torch.manual_seed(0)
    plain = nn.Linear(6, 6).to(device)
    found = []
    for wrap in (lambda f: f, cgt.jit):
        torch.compiler.reset()
        layer = copy.deepcopy(plain)
        g = torch.compile(lambda x, m=layer: nn.functional.gelu(m(x)) * 2, backend="aot_eager")
        f, seen = wrap(lambda x, g=g: g(x).sum(0)), []
        for k in range(14):  # on a GPU arguments come to lie elsewhere meanwhile, by what ran before
            layer.zero_grad()
            loss = f(torch.full((4, 6), 0.1 * k, device=device)).sum()
            if retained and k > 2:
                with pytest.raises(RuntimeError, match="donated"):
                    loss.backward(retain_graph=True)
            else:
                loss.backward()
                seen += [loss.detach().clone(), layer.weight.grad.clone()]
        found.append(seen)
    assert same(*found)
    if not retained:  # else each call's graph stays pending, and paths grow
        assert cgt.stats(f).replays >= 4 and cgt.stats(f).backward.replays >= 3, cgt.explain(f)


def test_slices_at_changing_alignments_are_told_what_helps(device):
    data = torch.arange(600.0, device=device).view(200, 3)
    f = cgt.jit(lambda x: x * 2, max_records=3)
    for k in range(20):
        x = data[5 * k : 5 * k + 5]
        assert torch.equal(f(x), x * 2)
    assert any("remainder of 512 bytes" in reason for reason in cgt.stats(f).reasons)
    f = cgt.jit(lambda x: x * 2, max_records=3)
    for k in range(20):  # the advice
        x = data[5 * k : 5 * k + 5].clone()
        assert torch.equal(f(x), x * 2)
    assert cgt.stats(f).eager == 0 and cgt.stats(f).replays >= 17


def test_reasons_do_not_grow_without_end(device, monkeypatch):
    monkeypatch.setattr(options, "COOL_DOWN", (1, 1))
    here = {}
    f, x = cgt.jit(lambda x: here["part"](x)), torch.ones(3, device=device)
    for k in range(150):  # the reason names another line each time
        exec("\n" * k + "def part(x): return x * float(x.sum())", here)
        assert all(torch.equal(f(x), x * 3) for _ in range(3))
    assert 1 < len(cgt.stats(f).reasons) <= 64


def test_memory_of_another_functions_result_that_is_replaced(device):
    """Told by the warm-up: a capture could not give it back."""
    first = cgt.jit(lambda x: x + 1)

    def replace(y):
        y.data = y * 2
        return y + 1

    f = cgt.jit(replace)
    for k in range(8):
        y = first(torch.full((3,), float(k), device=device))
        assert torch.equal(f(y), torch.full((3,), 2.0 * (k + 1) + 1, device=device))
        assert torch.equal(y, torch.full((3,), 2.0 * (k + 1), device=device))
    assert cgt.stats(f).records == cgt.stats(f).replays == 0 and cgt.stats(first).replays > 0
    assert any("gives args[0] other memory" in reason for reason in cgt.stats(f).reasons)
