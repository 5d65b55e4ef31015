"""Gradients where nobody listens: a replayed backward sets them itself, without a task of autograd's for each. What
they are, and who hears of them, is as in eager; and each who could hear of them gets the engine's way."""

import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers import not_audited, plain
from torch import nn

# isort: split
import cgt_core as core

import cgt

N = 9  # calls; the last five replay forward and backward
LAYERS, PARAMS = 3, 6


def net(device):
    torch.manual_seed(0)
    layers = [nn.Linear(5, 5) for _ in range(LAYERS)]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2]).to(device)


def inputs(device, n=N):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 5, generator=generator).to(device) for _ in range(n)]


def fact(grad):
    """All that a gradient tells of itself, at this moment."""
    if grad is None:
        return None
    value = grad.to_dense() if grad.is_sparse else grad.clone()
    seen = [value, grad.dtype, grad.device, grad.layout, grad._version, grad.is_leaf, grad.requires_grad]
    if not grad.is_sparse:
        seen += [grad.stride(), grad.storage_offset(), grad._base is None]
    return seen


def facts(tensors):
    return [fact(t.grad) for t in tensors]


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def identity(f):
    return f


def compare(run):
    """run(wrap, quiet) -> what to compare; quiet(backward) runs one and notes how many gradients it set itself: the
    notes of the jitted run."""
    found, counts = [], []

    def quiet(backward):
        before = core.quiet_gradients()
        backward()
        counts.append(core.quiet_gradients() - before)

    for wrap in (identity, cgt.jit):
        torch.manual_seed(3)
        counts.clear()
        found.append(run(wrap, quiet))
    want, got = found
    assert len(want) == len(got)
    for k, (a, b) in enumerate(zip(want, got, strict=True)):
        assert same(a, b), (k, a, b)
    return counts


def is_quiet(counts, each, last=4):
    """Of the last backwards."""
    return counts[-last:] == [each] * last


# --- gradients ---------------------------------------------------------------------------------


@pytest.mark.parametrize("clear", ["none", "zero", "never", "sometimes"])
def test_gradients_are_those_of_eager(device, clear):
    """Values, strides, versions; and the tensor that is added to stays the same one."""

    def run(wrap, quiet):
        model, seen = net(device), []
        f, params = wrap(model), list(model.parameters())
        for k, x in enumerate(inputs(device, 16)):
            if clear in ("none", "zero") or (clear == "sometimes" and k % 4 == 0):
                model.zero_grad(set_to_none=clear != "zero")
            before = [p.grad for p in params]
            quiet(f(x).square().sum().backward)
            stayed = [b is None or b is p.grad for b, p in zip(before, params, strict=True)]
            seen.append([facts(params), stayed])
        return seen

    assert is_quiet(compare(run), PARAMS)


@not_audited("the last replay is looked at op by op")
def test_gradients_are_not_copied_and_of_their_own(device):
    """As a stolen gradient: no two share memory."""

    def run(wrap, quiet):
        model, seen = net(device), []
        f, params = wrap(model), list(model.parameters())
        for x in inputs(device):
            model.zero_grad()
            loss = f(x).sum()
            with torch.profiler.profile() as profile:
                quiet(loss.backward)
            places = [p.grad.untyped_storage().data_ptr() for p in params]
            seen.append([facts(params), len(set(places))])
        if wrap is not identity:
            end = max(e.time_range.end for e in profile.events() if e.name.startswith("cgt.replay"))
            late = [e.name for e in profile.events() if e.time_range.start > end and e.name.startswith("aten::")]
            assert not late, "ops behind the replay"
        return seen

    assert is_quiet(compare(run), PARAMS)


def test_a_gradient_of_several_parameters_is_copied_for_all_but_one(device):
    def run(wrap, quiet):
        params = [torch.zeros(5, device=device, requires_grad=True) for _ in range(3)]
        f, seen = wrap(lambda x: x * (params[0] + params[1] + params[2])), []
        for x in inputs(device):
            quiet(f(x).sum().backward)
            places = {p.grad.untyped_storage().data_ptr() for p in params}
            assert len(places) == 3
            for k, p in enumerate(params):
                p.grad.add_(k)
            seen.append([p.grad.clone() for p in params])
            seen.append(sorted(p.grad._version for p in params))  # whose is not copied is the order's choice
            for p in params:
                p.grad = None
        return seen

    assert is_quiet(compare(run), 3)


@pytest.mark.parametrize("kept", [1, 2])
def test_a_graph_that_is_retained(device, kept):
    def run(wrap, quiet):
        model, seen = net(device), []
        f, params = wrap(model), list(model.parameters())
        for x in inputs(device, 12):
            y = f(x)
            loss, before = y.sum(), y.grad_fn
            edges = [e[0] is not None and e[0].name() for e in loss.grad_fn.next_functions]
            for _ in range(kept):
                quiet(lambda: loss.backward(retain_graph=True))
                seen.append(facts(params))
            assert y.grad_fn is before
            assert edges == [e[0] is not None and e[0].name() for e in loss.grad_fn.next_functions]
            quiet(loss.backward)
            seen.append(facts(params))
            with pytest.raises(RuntimeError, match="second time"):
                loss.backward()
            model.zero_grad()
        return seen

    assert is_quiet(compare(run), PARAMS)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_forwards_pending(device, order):
    def run(wrap, quiet):
        model, seen = net(device), []
        f, params = wrap(model), list(model.parameters())
        xs = inputs(device, 24)
        for k in range(0, 24, 2):
            losses = [f(x).square().sum() for x in xs[k : k + 2]]
            for which in order:
                quiet(losses[which].backward)
                seen.append(facts(params))
            model.zero_grad()
        return seen

    assert is_quiet(compare(run), PARAMS)


def test_a_chain_of_functions(device):
    """Gradients of what one function gave to the next are the engine's, those of parameters are not."""

    def run(wrap, quiet):
        models, seen = [net(device), net(device)], []
        fs, params = [wrap(m) for m in models], [p for m in models for p in m.parameters()]
        for x in inputs(device, 14):
            quiet(fs[1](torch.relu(fs[0](x))).square().sum().backward)
            seen.append(facts(params))
            for m in models:
                m.zero_grad()
        return seen

    assert is_quiet(compare(run), 2 * PARAMS)


def test_results_and_parameters_that_no_gradient_reaches(device):
    def run(wrap, quiet):
        u, v, w = (torch.ones(5, device=device, requires_grad=True) for _ in range(3))
        f, seen = wrap(lambda x: (x * u, (x * v).sin(), x + w.detach())), []
        for x in inputs(device, 14):
            a, b, _ = f(x)
            quiet((a.sum() if len(seen) % 2 else b.sum()).backward)
            seen.append(facts([u, v, w]))
            u.grad = v.grad = None
        return seen

    assert is_quiet(compare(run), 1)


# --- gradients that meet others ----------------------------------------------------------------


def test_a_parameter_of_two_calls_gets_their_sum_from_the_engine(device):
    def run(wrap, quiet):
        model, seen = net(device), []
        f, params = wrap(model), list(model.parameters())
        for x in inputs(device, 14):
            quiet((f(x) + f(x * 2).sin()).square().sum().backward)
            seen.append(facts(params))
            model.zero_grad()
        return seen

    assert is_quiet(compare(run), 0)


@pytest.mark.parametrize("use", ["before", "after", "aside"])
def test_a_parameter_that_eager_code_uses_too(device, use):
    """Its gradients add up in the engine, the others do not go there."""

    def run(wrap, quiet):
        model, seen = net(device), []
        f, params = wrap(model), list(model.parameters())
        w = params[0]
        for x in inputs(device, 14):
            y = f(x @ w if use == "before" else x)
            y = y @ w if use == "after" else y + w.sum() if use == "aside" else y
            quiet(y.square().sum().backward)
            seen.append(facts(params))
            model.zero_grad()
        return seen

    counts = compare(run)
    assert counts[-1] in range(PARAMS), "one at least is the engine's"


def test_gradients_that_somebody_asked_for_alone(device):
    """autograd.grad, backward(inputs=...): nobody else gets one."""

    def run(wrap, quiet):
        model, seen = net(device), []
        f, params = wrap(model), list(model.parameters())
        for x in inputs(device):
            y = f(x).sum()
            quiet(lambda: seen.append(torch.autograd.grad(y, params[1:3], retain_graph=True)))
            seen.append(facts(params))
            quiet(lambda: y.backward(inputs=params[2:4], retain_graph=True))
            seen.append(facts(params))
            quiet(lambda: seen.append(torch.autograd.grad(y, params)))
            model.zero_grad()
        return seen

    assert set(compare(run)) == {0}


# --- who listens -------------------------------------------------------------------------------


def accumulator(p):
    return p.expand_as(p).grad_fn.next_functions[0][0]


def is_listening(how, p, told, kept):
    """Have somebody hear of p's gradient."""
    if how == "tensor":
        kept.append(p.register_hook(lambda grad: (told.append(grad.sum().item()), grad * 2)[1]))
    if how == "accumulated":
        hook = lambda p: told.append(p.grad.sum().item())  # noqa: E731
        kept.append(p.register_post_accumulate_grad_hook(hook))
    if how == "several":
        hook = lambda grads: told.append([None if g is None else g.sum().item() for g in grads])  # noqa: E731
        kept.append(torch.autograd.graph.register_multi_grad_hook([p], hook))
    if how == "before the accumulator":
        node = accumulator(p)  # which lives as long as somebody holds it
        kept.extend([node, node.register_prehook(lambda grads: (told.append("pre"), (grads[0] * 3,))[1])])
    if how == "after the accumulator":  # as DistributedDataParallel
        node = accumulator(p)
        kept.extend([node, node.register_hook(lambda *_: told.append(p.grad.sum().item()))])


LISTENERS = ["tensor", "accumulated", "several", "before the accumulator", "after the accumulator"]


@pytest.mark.parametrize("when", ["first", "before", "between", "retained"])
@pytest.mark.parametrize("how", LISTENERS)
def test_who_listens_is_told(device, how, when):
    """Of a parameter in the middle: since before the function was recorded, before a forward, between a forward
    and its backward, and between two backwards of one graph. The others' gradients are right, too."""

    def run(wrap, quiet):
        model, told, kept, seen = net(device), [], [], []
        f, params = wrap(model), list(model.parameters())
        for k, x in enumerate(inputs(device, 16)):
            if k == {"first": 0, "before": 7}.get(when):
                is_listening(how, params[2], told, kept)
            loss = f(x).square().sum()
            if k == 7 and when == "retained":
                loss.backward(retain_graph=True)
            if k == 7 and when in ("between", "retained"):
                is_listening(how, params[2], told, kept)
            quiet(loss.backward)
            seen.append([facts(params), list(told)])
            model.zero_grad()
        assert told
        return seen

    counts = compare(run)
    assert all(n < PARAMS for n in counts[7:])
    if when == "first" and how != "several":
        assert counts[-1] == PARAMS - 1, "who is heard comes before who is not"


@pytest.mark.parametrize("how", ["tensor", "accumulated"])
def test_a_hook_that_removes_itself(device, how):
    def run(wrap, quiet):
        model, told, seen = net(device), [], []
        f, params = wrap(model), list(model.parameters())
        for k, x in enumerate(inputs(device, 14)):
            loss = f(x).square().sum()
            if k == 6:
                hook = lambda *_: (told.append(k), handle.remove())[2:]  # noqa: B023, E731
                once = lambda *a: hook(*a) or None  # noqa: B023, E731
                p = params[3]
                handle = p.register_hook(once) if how == "tensor" else p.register_post_accumulate_grad_hook(once)
            quiet(loss.backward)
            seen.append([facts(params), list(told)])
            model.zero_grad()
        assert told == [6]
        return seen

    compare(run)


@pytest.mark.parametrize("how", ["post", "pre", "result", "retain_grad"])
def test_who_listens_to_the_calls_own_node(device, how):
    def run(wrap, quiet):
        model, told, seen = net(device), [], []
        f, params = wrap(model), list(model.parameters())
        for x in inputs(device):
            y = f(x)
            if how == "post" and y.grad_fn.name() == "CgtBackward":
                edges = len(y.grad_fn.next_functions)
                y.grad_fn.register_hook(lambda grads, _, n=edges: told.append(len(grads) == n and None not in grads))
            if how == "pre":
                y.grad_fn.register_prehook(lambda grads: (grads[0] * 2,))
            if how == "result":
                y.register_hook(lambda grad: grad * 2)
            if how == "retain_grad":
                y.retain_grad()
            quiet(y.square().sum().backward)
            seen.append([facts(params), fact(y.grad) if how == "retain_grad" else None])
            model.zero_grad()
        assert all(told) and (len(told) > 3) == (how == "post" and wrap is not identity)
        return seen

    assert is_quiet(compare(run), 0 if how == "post" else PARAMS)


def test_anomaly_mode_sees_all_nodes(device):
    if device.type == "cuda":
        pytest.skip("in anomaly mode a backward outlives its function there: the books of this test would not balance")
    def run(wrap, quiet):
        w = torch.ones(5, device=device, requires_grad=True)
        f, seen = wrap(lambda x: (x * w).sqrt()), []
        for x in inputs(device):
            loss = f(x.abs() + 1).sum()
            with torch.autograd.detect_anomaly(check_nan=True):
                quiet(loss.backward)
            seen.append(facts([w]))
        loss = f(-inputs(device)[0].abs()).sum()
        with pytest.raises(RuntimeError, match="returned nan values"), torch.autograd.detect_anomaly():
            loss.backward()
        seen.append(facts([w]))
        return seen

    with pytest.warns(UserWarning, match="Anomaly Detection has been enabled|Error detected in"):
        assert is_quiet(compare(run), 0)


def test_a_backward_with_a_graph_of_its_own_is_not_quiet(device):
    model = net(device)
    f = cgt.jit(model)
    for x in inputs(device):
        f(x).sum().backward()
    before, wants = core.quiet_gradients(), [p.grad.clone() for p in model.parameters()]
    with warnings.catch_warnings(action="ignore"):  # of a ring, once in a process
        f(inputs(device)[0]).sum().backward(create_graph=True)
    assert core.quiet_gradients() == before
    grads = torch.autograd.grad(plain(f)(inputs(device)[0]).sum(), list(model.parameters()))
    assert same([p.grad.detach() for p in model.parameters()], [w + g for w, g in zip(wants, grads, strict=True)])
    for p in model.parameters():
        p.grad = None  # a ring: it knows the parameter


def test_the_engine_has_no_task_for_a_quiet_gradient(device):
    """The profiler shows a node for each task."""
    model = net(device)
    f, params = cgt.jit(model), list(model.parameters())

    def tasks(x):
        loss = f(x).square().sum()
        with torch.profiler.profile() as profile:
            loss.backward()
        model.zero_grad()
        return sum(e.name.endswith("AccumulateGrad") and "evaluate" not in e.name for e in profile.events())

    assert [tasks(x) for x in inputs(device)][-2:] == [0, 0], "nobody listens"
    handle = params[-1].register_hook(lambda grad: None)
    assert tasks(inputs(device)[0]) > 0, "one listens"
    handle.remove()


# --- gradients and parameters that are not plain -----------------------------------------------

ODD = {  # what the user put into .grad
    "transposed": lambda p: torch.ones_like(p).t().contiguous().t(),
    "expanded": lambda p: torch.ones(1, 1, device=p.device).expand_as(p).clone(memory_format=torch.preserve_format),
    "sparse": lambda p: torch.eye(*p.shape, device=p.device).to_sparse(),
    "part of something": lambda p: torch.ones(2, *p.shape, device=p.device)[1],
    "view that another reads": lambda p: torch.ones(p.numel(), device=p.device).view_as(p),
}


@pytest.mark.parametrize("odd", ODD)
def test_gradients_that_the_user_put_there(device, odd):
    def run(wrap, quiet):
        w = torch.eye(5, device=device, requires_grad=True)
        f, seen = wrap(lambda x: (x @ w).tanh()), []
        for k, x in enumerate(inputs(device, 12)):
            loss = f(x).sum()
            w.grad = ODD[odd](w) if k % 2 else None
            mine = w.grad
            quiet(loss.backward)
            seen.append([facts([w]), mine is None or mine is w.grad])
            w.grad = None
        return seen

    # A backward that finds a sparse one runs eagerly, and autograd has a warning for one with other strides.
    assert compare(run)[-4:] == {"sparse": [0, 0, 0, 0], "transposed": [1, 0, 1, 0]}.get(odd, [1, 1, 1, 1])


@pytest.mark.parametrize("wrong", ["shape", "dtype"])
def test_a_gradient_that_cannot_be_added_to(device, wrong):
    """The error is PyTorch's, and the next backward is right. (A dtype can be: it decides the sum's.)"""

    def run(wrap, quiet):
        w = torch.eye(5, device=device, requires_grad=True)
        f, seen = wrap(lambda x: (x @ w).tanh()), []
        for k, x in enumerate(inputs(device, 12)):
            loss = f(x).sum()
            if k % 4 == 3:
                w.grad = torch.zeros_like(w)
                w.grad.data = torch.zeros(3, 3, device=device) if wrong == "shape" else w.grad.double()
                try:
                    quiet(loss.backward)
                except RuntimeError as error:
                    seen.append(str(error))
                    with pytest.raises(RuntimeError, match="second time"):
                        loss.backward()
            else:
                quiet(loss.backward)
            seen.append(facts([w]))
            w.grad = None
        assert (wrong == "shape") == any(isinstance(s, str) for s in seen)
        return seen

    assert is_quiet(compare(run), 1, last=1)


PARAMETERS = {
    "transposed": lambda t: t.t(),
    "every other": lambda t: torch.cat([t, t], 1)[:, ::2],
    "expanded": lambda t: t[:1].expand_as(t),
    "double": lambda t: t.double(),
    "one element": lambda t: t[:1, :1],
    "no element": lambda t: t[:0],
}


@pytest.mark.parametrize("which", PARAMETERS)
def test_strides_of_gradients_follow_the_parameter(device, which):
    """PyTorch's contract on layouts: a gradient that does not keep it is copied."""

    def run(wrap, quiet):
        torch.manual_seed(5)
        w = PARAMETERS[which](torch.randn(5, 5, device=device)).detach().requires_grad_()
        f, seen = wrap(lambda x: (x.to(w.dtype).sum() * w.sin() * 2).t().contiguous()), []
        for x in inputs(device):
            quiet(f(x).sum().backward)
            seen.append(facts([w]))
            if len(seen) % 2:
                w.grad = None
        return seen

    assert is_quiet(compare(run), 1)


def test_channels_last(device):
    def run(wrap, quiet):
        torch.manual_seed(5)
        conv, seen = nn.Conv2d(3, 4, 3).to(device, memory_format=torch.channels_last), []
        f = wrap(conv)
        for _ in range(N):
            x = torch.randn(2, 3, 8, 8, device=device).to(memory_format=torch.channels_last)
            quiet(f(x).sum().backward)
            seen.append([g[-3:] for g in facts(conv.parameters())])
            conv.zero_grad()
        return seen

    assert is_quiet(compare(run), 2)


def test_sparse_gradients_are_the_engines(device):
    def run(wrap, quiet):
        table = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
        f, seen = wrap(lambda i, x: (F.embedding(i, table, sparse=True) * x).sum()), []
        for x in inputs(device):
            quiet(f(torch.tensor([1, 3, 3, 6], device=device), x).backward)
            seen.append(fact(table.grad))
            table.grad = None
        return seen

    assert set(compare(run)) == {0}


@pytest.mark.parametrize("what", ["frozen", "moved", "detached", "in the graph"])
def test_parameters_that_changed_between_forward_and_backward(device, what):
    """Which needs nothing that was saved of them."""

    def run(wrap, quiet):
        w, v = (torch.ones(5, device=device, requires_grad=True) for _ in range(2))
        f, seen = wrap(lambda x: x + w + v), []
        for k, x in enumerate(inputs(device, 12)):
            loss = f(x).sum()
            if k == 8:
                if what == "frozen":
                    w.requires_grad_(False)
                if what == "moved":
                    w.data = torch.zeros(5, device=device)
                if what == "detached":
                    w.detach_()
                if what == "in the graph":
                    with torch.no_grad():
                        w.mul_(2)
            quiet(loss.backward)
            w.requires_grad_()
            seen.append(facts([w, v]))
        return seen

    compare(run)


# --- threads -----------------------------------------------------------------------------------


@not_audited("other threads change what is compared")
@pytest.mark.parametrize("mixed", [False, True], ids=["jitted", "jitted and eager"])
def test_threads_that_add_to_the_same_gradients(device, mixed):
    """Whole numbers, so that the order of additions plays no part."""
    w = torch.zeros(5, device=device, requires_grad=True)
    f = cgt.jit(lambda x: x * w)
    xs = [torch.full((5,), float(k + 1), device=device) for k in range(4)]
    for x in xs * 3:
        f(x).sum().backward()
    w.grad = torch.zeros_like(w)

    def work(k):
        g = f.__wrapped__ if mixed and k % 2 else f
        for _ in range(50):
            g(xs[k]).sum().backward()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert w.grad.tolist() == [50.0 * (1 + 2 + 3 + 4)] * 5


def test_threads_at_one_graph_that_is_retained(device):
    w = torch.zeros(5, device=device, requires_grad=True)
    f = cgt.jit(lambda x: x * w)
    x = torch.ones(5, device=device)
    for _ in range(6):
        f(x).sum().backward()
        w.grad = None
    loss = f(x).sum()
    w.grad = torch.zeros_like(w)
    go = threading.Barrier(4)

    def work():
        go.wait()
        for _ in range(50):
            loss.backward(retain_graph=True)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert w.grad.tolist() == [200.0] * 5
