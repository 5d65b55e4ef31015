"""Functions that make, read, return, add to, replace and clear a gradient, called in any order, agree
with eager; and so do the results that somebody holds.

A gradient is an argument that no signature shows: a function may ask whether there is one, read it,
hand it out, and leave another one behind.
"""

import functools
import threading

import pytest
import torch
from helpers import counts, identical, values
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import cgt

ROUNDS = 12


class Weights:
    """Two parameters, and functions of theirs."""

    def __init__(self, device, wrap):
        self.w = torch.ones(3, device=device, requires_grad=True)
        self.v = torch.full((3,), 0.5, device=device, requires_grad=True)
        self.call = {name: wrap(getattr(self, name)) for name in NAMES}

    def backward(self, x):
        (self.w * self.v * x).sum().backward()

    def returned(self, x):
        self.backward(x)
        return self.w.grad

    def viewed(self, x):
        self.backward(x)
        return self.w.grad[1:]

    def asked(self, x):
        return x * 2 if self.w.grad is None else self.w.grad * 2

    def added(self, x):
        if self.w.grad is None:
            return x + 1
        self.w.grad.add_(x)
        return self.w.grad * 1

    def replaced(self, x):
        if self.w.grad is not None:
            self.w.grad = self.w.grad + x

    def cleared(self, x):
        self.w.grad = None

    def plain(self, x):
        return x * 3


NAMES = ("backward", "returned", "viewed", "asked", "added", "replaced", "cleared", "plain")


def run(weights, names, steps, device):
    """Every result and gradient, and what is held of the last results, after every call."""
    x, held, seen = torch.arange(3.0, device=device), [], []
    w, v = weights.w, weights.v
    for k in range(ROUNDS):
        if steps:
            cgt.step()
        for name in names:
            given = w.grad if name == "plain" and w.grad is not None else x
            result = weights.call[name](given)
            if result is not None and k % 4 == 1:
                held.append(result)
            now = [result, w.grad, v.grad, *held[-3:]]
            seen.append([None if t is None else t.detach().clone() for t in now])
        x = x + 1 if k % 3 == 0 else x.add_(1)
        if k % 5 == 0:
            v.grad = None
        if k % 6 == 5:
            w.grad = None
        if k % 7 == 3:
            w.data = torch.full((3,), float(k), device=device)
    return seen


def same(a, b):
    return a is b is None or (a is not None and b is not None and torch.equal(a, b))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(names=st.lists(st.sampled_from(NAMES), min_size=2, max_size=5), steps=st.booleans())
def test_any_order_agrees_with_eager(device, names, steps):
    eager, jitted = Weights(device, lambda f: f), Weights(device, cgt.jit)
    try:
        want, got = (run(each, names, steps, device) for each in (eager, jitted))
        for k, (a, b) in enumerate(zip(got, want, strict=True)):
            assert len(a) == len(b) and all(map(same, a, b)), f"after call {k}"
    finally:
        cgt.reset()


@pytest.mark.parametrize("steps", [False, True], ids=["without step", "with step"])
def test_a_function_that_asks_for_a_gradient_notices_that_one_came(device, steps):
    weights, x = Weights(device, cgt.jit), torch.arange(3.0, device=device)
    for _ in range(5):
        if steps:
            cgt.step()
        assert torch.equal(weights.call["asked"](x), x * 2)
    weights.w.grad = torch.full((3,), 7.0, device=device)
    for _ in range(5):
        if steps:
            cgt.step()
        assert torch.equal(weights.call["asked"](x), torch.full((3,), 14.0, device=device))
    weights.w.grad = None
    assert torch.equal(weights.call["asked"](x), x * 2)
    s = cgt.stats(weights.call["asked"])
    assert s.eager == 0 and s.records <= 3 and s.replays >= 7


# --- arguments that begin to require one ---------------------------------------------------------------


def attacked(net, x):
    x.requires_grad_()
    net(x).square().mean().backward()
    return (x + 0.1 * x.grad.sign()).detach()


def differentiated(net, x):
    x.requires_grad = True
    u = net(x)
    (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    loss = (du.sum(1) - u[:, 0]).square().mean()
    loss.backward()
    return loss.detach()


def only_asked(net, x):
    was = x.requires_grad
    x.requires_grad_()
    return x.detach() * 2 + was


def twice(net, x, y):
    x.requires_grad_(), y.requires_grad_()
    (net(x) * net(y)).sum().backward()
    return x.grad + y.grad


def cleared(net, x):
    x.requires_grad_()
    net(x).sum().backward()
    grad, x.grad = x.grad, None
    return grad * 1


def ends_the_capture(net, x):
    """On the GPU: what the backward left was never computed."""
    x.requires_grad_()
    net(x).sum().backward()
    if x.is_cuda:
        torch.cuda.synchronize()
    return x.grad * 1


BEGIN = [attacked, differentiated, only_asked, twice, cleared, ends_the_capture]
GIVEN = {
    "new each time": lambda k, device, last: torch.randn(4, 3, generator=torch.Generator().manual_seed(k)).to(device),
    "rows": lambda k, device, last: torch.randn(8, 3, generator=torch.Generator().manual_seed(k)).to(device)[
        k % 4 : k % 4 + 4
    ],
    "the same twice": lambda k, device, last: last if k % 2 else GIVEN["new each time"](k, device, last),
    "the same without": lambda k, device, last: (
        last.requires_grad_(False) if k % 3 and last is not None else GIVEN["new each time"](k, device, last)
    ),
}


@pytest.mark.parametrize("inputs", ["auto", "copied", "fixed"])
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("function", BEGIN, ids=lambda f: f.__name__)
def test_argument_that_begins_to_require_one(device, function, given, inputs):
    """What it leaves on the argument, too, and what is held of the last one's."""
    torch.manual_seed(2)
    net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).to(device)

    def run(wrap):
        f, last, found, held = wrap(functools.partial(function, net)), None, [], []
        net.zero_grad()
        for k in range(14):
            x = last = GIVEN[given](k, device, last)
            more = [x if k % 5 == 4 else GIVEN["new each time"](k + 50, device, None)] if function is twice else []
            result = f(x, *more)
            held.append((x, x.grad))
            found += [result.clone(), torch.tensor([x.requires_grad, x.is_leaf])]
            found += [t.grad.clone() for t in (x, *more, *net.parameters()) if t.grad is not None]
            found += [grad.clone() for _, grad in held[-3:] if grad is not None]
        return found, f

    (want, _), (got, f) = run(lambda f: f), run(cgt.jit(inputs=inputs))
    assert len(got) == len(want) and all(map(same, got, want)), cgt.explain(f)
    if given == "new each time" and inputs == "auto" and not (function is ends_the_capture and device.type == "cuda"):
        assert cgt.stats(f).replays >= 8, cgt.explain(f)


def test_part_that_runs_in_between_sees_that_it_does(device):
    seen = []
    look = cgt.eager(lambda x: seen.append((x.requires_grad, x.grad is None)))

    def function(net, x):
        x.requires_grad_()
        net(x).sum().backward()
        look(x)
        return x.grad * 2

    net = torch.nn.Linear(3, 2).to(device)
    f = cgt.jit(function)
    for k in range(8):
        x, y = (GIVEN["new each time"](k, device, None) for _ in range(2))
        assert torch.equal(f(net, x), function(net, y)) and torch.equal(x.grad, y.grad)
    assert set(seen) == {(True, False)} and len(seen) == 16


def test_part_that_runs_in_between_and_finds_it_elsewhere(device):
    """A replay would have it require one behind the part."""
    seen, box = [], [None]
    look = cgt.eager(lambda: seen.append(box[0].requires_grad))

    def function(net, x):
        x.requires_grad_()
        look()
        return torch.autograd.grad(net(x).sum(), x)[0] * 2

    net = torch.nn.Linear(3, 2).to(device).requires_grad_(False)
    f = cgt.jit(function)
    for k in range(8):
        x, y = (GIVEN["new each time"](k, device, None) for _ in range(2))
        box[0] = x
        got = f(net, x)
        box[0] = y
        assert torch.equal(got, function(net, y))
    assert seen == [True] * 16
    assert any("requires_grad" in reason for reason in cgt.stats(f).reasons), cgt.explain(f)


def test_argument_that_begins_to_require_one_for_a_later_backward_runs_eagerly(device):
    net = torch.nn.Linear(3, 2).to(device)
    f = cgt.jit(lambda x: net(x.requires_grad_()))
    for k in range(5):
        x, y = GIVEN["new each time"](k, device, None), GIVEN["new each time"](k, device, None).requires_grad_()
        f(x).sum().backward(), net(y).sum().backward()
        assert torch.equal(x.grad, y.grad)
    assert cgt.stats(f).replays == 0, cgt.explain(f)


# --- gradients that are other tensors at each call ------------------------------------------------------

SHAPES = [(4, 3), (4,), (2, 3, 2)]
OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, nesterov=True),
    "Adam": lambda params: torch.optim.Adam(params, 0.1, capturable=params[0].is_cuda),
    "AdamW, foreach": lambda params: torch.optim.AdamW(params, 0.1, foreach=True, capturable=params[0].is_cuda),
    "RMSprop": lambda params: torch.optim.RMSprop(params, 0.1, capturable=params[0].is_cuda),
    "maximize": lambda params: torch.optim.SGD(params, 0.1, maximize=True, weight_decay=0.1),
}


def parameters(device, shapes=SHAPES):
    return [nn.Parameter(values(device, *shape, seed=k)) for k, shape in enumerate(shapes)]


def given_gradients(device, params, k, without=()):
    """The same new gradients for each of these lists of parameters."""
    for mine in params:
        for at, p in enumerate(mine):
            p.grad = None if at in without else values(device, *p.shape, seed=100 * k + at)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bound", [False, True], ids=["within", "bound"])
@pytest.mark.parametrize("held", [False, True], ids=["", "held"])
def test_an_optimizer_alone_where_gradients_are_new_at_each_call(device, name, bound, held):
    """What zero_grad() leaves behind: None, and the next backward makes other tensors."""
    mine, theirs = parameters(device), parameters(device)
    a, b = OPTIMIZERS[name](mine), OPTIMIZERS[name](theirs)
    f, keep = cgt.jit(a.step if bound else lambda: a.step()), []
    for k in range(24):
        given_gradients(device, (mine, theirs), k)
        keep.append([p.grad for p in mine])
        f(), b.step()  # which may compute in the gradients, as Nesterov's momentum does on a GPU
        assert identical(mine, theirs) and identical(keep[-1], [p.grad for p in theirs])
        if held:
            del keep[: -3 if k % 4 else -1]
        else:
            a.zero_grad()
            keep.clear()
    # One recording is enough where the first gradients happen to lie where the next ones do.
    assert counts(f) in ((1, 2, 21, 0), (1, 1, 22, 0)), cgt.explain(f)


def test_an_eager_backward_makes_them(device):
    x = values(device, 5, 6)
    models = [
        nn.Sequential(nn.Linear(6, 4, device=device), nn.Tanh(), nn.Linear(4, 2, device=device)) for _ in range(2)
    ]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in models]
    f = cgt.jit(optimizers[0].step)
    for k in range(20):
        for step, (model, optimizer) in zip((f, optimizers[1].step), zip(models, optimizers, strict=True), strict=True):
            optimizer.zero_grad()
            model(x + k).square().sum().backward()
            step()
        assert identical(*(list(m.parameters()) for m in models))
    assert counts(f)[2] >= 17 and counts(f)[3] == 0, cgt.explain(f)


def test_some_have_none_at_some_calls(device):
    mine, theirs = parameters(device), parameters(device)
    a, b = (torch.optim.SGD(params, 0.1) for params in (mine, theirs))
    f = cgt.jit(a.step)
    for k in range(30):
        given_gradients(device, (mine, theirs), k, without=[(), (1,), (0, 2)][k % 3])
        f(), b.step()
        assert identical(mine, theirs)
    assert counts(f)[2] >= 22 and counts(f)[3] == 0, cgt.explain(f)


def test_they_are_written(device):
    """Clipped where they lie; the user's own tensors, not copies."""
    mine, theirs = parameters(device), parameters(device)
    a, b = (torch.optim.SGD(params, 0.1) for params in (mine, theirs))

    def clipped():
        norm = nn.utils.clip_grad_norm_(mine, 0.5)
        a.step()
        return norm

    f, keep = cgt.jit(clipped), []
    for k in range(24):
        given_gradients(device, (mine, theirs), k)
        keep.append([p.grad for p in mine])
        norm = nn.utils.clip_grad_norm_(theirs, 0.5)
        b.step()
        assert identical(f(), norm) and identical(mine, theirs)
        assert identical(keep[-1], [p.grad for p in theirs]) and [p.grad._version for p in mine] == [
            p.grad._version for p in theirs
        ]
    assert counts(f)[2] >= 20 and counts(f)[3] == 0, cgt.explain(f)


def test_a_backward_inside_adds_to_them(device):
    mine, theirs, x = parameters(device), parameters(device), values(device, 3)

    def added(params, x):
        sum((p * p).sum() for p in params).mul(x.sum()).backward()

    f = cgt.jit(lambda x: added(mine, x))
    for k in range(20):
        given_gradients(device, (mine, theirs), k)
        keep = [p.grad for p in mine]
        f(x + k), added(theirs, x + k)
        assert identical([p.grad for p in mine], [p.grad for p in theirs])
        assert all(p.grad is t for p, t in zip(mine, keep, strict=True))
    assert counts(f)[2] >= 14, cgt.explain(f)


def test_of_several_kinds_of_calls(device):
    """Autograd's, in a step whose gradients are read, then made anew."""
    p, q = parameters(device, [(3,)])[0], parameters(device, [(3,)])[0]

    def step(p, x):
        with torch.no_grad():
            p.sub_(p.grad)
        p.grad = None
        (p * x).sum().backward()
        return p.grad * 2

    f = cgt.jit(lambda x: step(p, x))
    for k in range(24):
        x = values(device, 3, seed=k)
        if k % 5 == 0:
            p.grad, q.grad = x.clone(), x.clone()
        assert identical(f(x), step(q, x)) and identical((p, p.grad), (q, q.grad))
    assert counts(f)[2] >= 12, cgt.explain(f)


OTHERS = {
    "an argument": lambda p, q, box, x: p.grad + x if p.grad is x else p.grad - x,
    "another's": lambda p, q, box, x: p.grad + q.grad if p.grad is q.grad else p.grad - q.grad,
    "in a place": lambda p, q, box, x: p.grad + box["g"] if p.grad is box["g"] else p.grad - box["g"],
    "of a dict": lambda p, q, box, x: p.grad * 3 if p.grad in box["seen"] else p.grad * 2,
    "by id": lambda p, q, box, x: p.grad * 3 if id(p.grad) in box["ids"] else p.grad * 2,
    "of a set": lambda p, q, box, x: p.grad - next(iter(box["set"])),
    "written": lambda p, q, box, x: p.grad + q.grad.add_(p.grad),
    "read": lambda p, q, box, x: p.grad + 2 * q.grad,
}


@pytest.mark.parametrize("name", OTHERS)
def test_one_that_is_another_tensor_of_the_call_too(device, name):
    """At first it is none, but moves; then it is the argument, the other gradient, or what lies in a place."""
    function, runs = OTHERS[name], []
    for wrap in (lambda function: function, cgt.jit):
        p, q, *_ = parameters(device, [(3,), (3,)])
        known = values(device, 3, seed=7)
        box = {
            "g": values(device, 3, seed=9),
            "seen": {known: 1},
            "ids": {id(known)},
            "set": {values(device, 3, seed=3)},
        }
        f, told, keep = wrap(lambda x: function(p, q, box, x)), [], []  # noqa: B023
        for k in range(40):
            x = values(device, 3, seed=k)
            p.grad, q.grad = (x + n for n in (1, 2))
            if k >= 16 and k % 4 == 0:
                p.grad = {"an argument": x, "another's": q.grad, "in a place": box["g"]}.get(name, known)
            if k >= 16 and k % 6 == 0 and name in ("read", "written"):
                q.grad = p.grad if k % 4 else p.grad[:]
            keep.append((p.grad, q.grad))
            with torch.no_grad():
                told.append((f(x), p.grad.clone(), q.grad.clone()))
        runs.append(told)
    assert identical(*runs)
    assert cgt.stats(f).replays >= (0 if name in ("of a dict", "by id", "of a set") else 20), cgt.explain(f)


@pytest.mark.parametrize("other", ["place", "parameter"])
def test_one_tensor_that_is_reached_in_two_ways_and_then_is_two(device, other):
    """p.grad lies in a place, too, or is q.grad, too: whose gradient is replaced is told by the next call."""
    p, q = parameters(device, [(3,), (3,)])
    box = {}

    def function():
        return p.grad + 2 * (box["g"] if other == "place" else q.grad)

    f = cgt.jit(function)
    with torch.no_grad():
        for k in range(30):
            if k % 6 == 0:
                p.grad = q.grad = box["g"] = values(device, 3, seed=k)
            if k % 6 == 3:
                p.grad = values(device, 3, seed=100 + k)
            assert identical(f(), function()), k
    assert counts(f)[2] >= 8, cgt.explain(f)


@pytest.mark.parametrize("outside", [False, True], ids=["drops them itself", "finds none"])
def test_step_that_drops_its_own_gradients_does_not_go_on_from_them(device, outside):
    """Where the program says step() in one loop and then trains another model without it."""

    def trained(said):
        torch.manual_seed(0)
        model = nn.Linear(4, 3).to(device)
        opt = torch.optim.Adam(model.parameters())

        @cgt.jit
        def step(x):
            if not outside:
                opt.zero_grad()
            model(x).square().mean().backward()
            opt.step()

        x = torch.empty(2, 4, device=device)
        for k in range(24):
            if said:
                cgt.step()
            if outside:
                opt.zero_grad()
            step(x.fill_(float(k)))
        return cgt.stats(step)

    assert trained(True).records == 1
    s = trained(False)
    assert s.records <= 2 and s.replays >= 21, s


ADDED = {
    "the old one behind": lambda g, old: g + old,
    "the old one in front": lambda g, old: old + g,
    "of a clone": lambda g, old: g.clone() + old,
    "of both": lambda g, old: g * 1 + old * 1,
    "decayed": lambda g, old: torch.lerp(old, g, 0.5),
}


@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("add", ADDED.values(), ids=ADDED)
def test_gradient_that_is_read_and_replaced(device, add, steps):
    """It lies where the recording writes its own, and must last until it is read."""

    def training(wrap):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(device)

        @wrap
        def step(x):
            olds = [p.grad for p in model.parameters()]
            for p in model.parameters():
                p.grad = None
            model(x).square().sum().backward()
            for p, old in zip(model.parameters(), olds, strict=True):
                p.grad = p.grad if old is None else add(p.grad, old)
            return model[0].weight.grad.sum()

        return step, [*model.parameters()]

    (step, mine), (plain, theirs) = training(cgt.jit), training(lambda f: f)
    for k in range(10):
        if steps:
            cgt.step()
        x = torch.arange(8.0, device=device).view(2, 4) * (k - 4)
        assert torch.equal(step(x), plain(x)), k
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(mine, theirs, strict=True)), k
    assert cgt.stats(step).replays >= 5, cgt.stats(step).reasons


HISTORIES = {
    "scaled": lambda w, v, k: w * float(k + 1), "added": lambda w, v, k: w + (v if k % 3 else 1.0),
    "multiplied": lambda w, v, k: w * (v if k % 3 else w), "of several ops": lambda w, v, k: w.sin() if k % 3 else w.cos() * v,
}  # fmt: skip


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES.keys())
@pytest.mark.parametrize("all_the_way", [True, False])
def test_backward_inside_that_goes_on_through_the_history_of_an_argument(device, history, all_the_way):
    """Another history at each call, whose ops are none of the call's, some of them none at all."""

    def training(wrap):
        w, v = (torch.full((3,), k, device=device, requires_grad=True) for k in (0.5, 2.0))

        @wrap
        def step(x):
            loss = (x * w * v).sum()
            return torch.autograd.grad(loss, [x, w] if all_the_way else [x], retain_graph=True)

        return step, w, v

    (step, *mine), (plain, *theirs) = training(cgt.jit), training(lambda f: f)
    for k in range(8):
        for a, b in zip(step(history(*mine, k)), plain(history(*theirs, k)), strict=True):
            assert torch.equal(a, b), k
    if device.type == "cpu":  # on a GPU autograd waits for the stream of the history, which no capture allows
        assert cgt.stats(step).replays in ((0,) if all_the_way else (5, 6)), cgt.stats(step).reasons
        assert not all_the_way or "403" in next(iter(cgt.stats(step).reasons))


def test_backward_of_another_thread_through_the_history_of_an_argument():
    """It is no affair of the call's. (On the host: what a thread launches on a GPU meanwhile may end a capture.)"""
    wanted, done, over = threading.Lock(), threading.Lock(), []  # of C: they hand no work over that cgt would hear of
    w = torch.full((3,), 0.5, requires_grad=True)
    history = w * 2.0

    def others():
        while wanted.acquire() and not over:
            torch.autograd.grad(history.sum(), w, retain_graph=True)
            done.release()

    wanted.acquire()
    done.acquire()
    ask, answer = wanted.release, done.acquire

    @cgt.jit
    def step(x):
        ask()
        answer()
        return x.detach() * 3.0

    thread = threading.Thread(target=others)
    thread.start()
    try:
        assert all(torch.equal(step(history), history.detach() * 3.0) for _ in range(8))
    finally:
        over.append(True)
        wanted.release()
        thread.join()
    assert cgt.stats(step).replays >= 5, cgt.stats(step).reasons
