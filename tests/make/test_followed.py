"""What lies in a place when a function is called: another tensor there is that slot's, as if it had been handed in.

`m.h = f(x)`, `box["y"] = a(x)`, load_state_dict(assign=True): every test compares with eager bit for bit, and says how many
calls were replays."""

import collections
import gc
import threading
import types
import weakref
from typing import NamedTuple

import cgt_core as core
import pytest
import torch
from helpers import counts, identical, tells, values
from torch import nn

import cgt

L = torch.linalg


@pytest.fixture(params=[False, True], ids=["no step", "step"])
def begin(request):
    return cgt.step if request.param else lambda: None


def square(device, seed=1):
    return values(device, 4, 4, seed=seed)


# --- a result of the path ----------------------------------------------------------------------


def test_a_result_in_a_dict(device, begin):
    """box["y"] = a(x), and b reads it: the same node's output at each iteration."""
    box, w, x = {}, square(device), square(device)
    a, b = cgt.jit(lambda x: x @ w), cgt.jit(lambda: box["y"] * 2)
    for k in range(20):
        begin()
        box["y"] = a(x.copy_(square(device, k)))
        assert identical(b(), (x @ w) * 2)
    assert counts(b) == (1, 2, 17, 0) and "fixed: box['y'] (followed)" in cgt.explain(b)
    assert cgt.stats(b).copied_bytes == 0


def test_state_that_is_replaced_by_a_result(device):
    """m.h = f(x): it lies elsewhere each time, and the recording is told where."""
    m = types.SimpleNamespace(h=square(device), w=square(device, 2))
    f, x, h = cgt.jit(lambda x: torch.tanh(x + m.h @ m.w)), square(device), m.h.clone()
    for k in range(20):
        cgt.step()
        m.h = f(x.copy_(square(device, k)))
        h = torch.tanh(x + h @ m.w)
        assert identical(m.h, h)
    assert counts(f) == (1, 2, 17, 0) and "moving: m.h (followed)" in cgt.explain(f)


def test_two_states_that_change_places(device, begin):
    m = types.SimpleNamespace(a=square(device), b=square(device, 2))
    f, x = cgt.jit(lambda x: (torch.tanh(x + m.a), m.b * 0.5)), square(device)
    a, b = m.a, m.b
    for k in range(40):
        begin()
        x.copy_(square(device, k))
        m.b, m.a = f(x)
        a, b = b * 0.5, torch.tanh(x + a)
        assert identical((m.a, m.b), (a, b))
    assert cgt.stats(f).replays > 15 and cgt.stats(f).eager == 0, cgt.stats(f).reasons


@pytest.mark.parametrize("place", ["list", "cell", "global", "buffer"])
def test_wherever_it_lies(device, place):
    rows, scope, model = [square(device)], {}, nn.Module()
    model.register_buffer("state", square(device))
    cell = square(device)

    def from_cell(x):
        return x + cell

    exec("def from_global(x):\n    return x + STATE", scope)
    functions = {"list": lambda x: x + rows[0], "cell": from_cell, "global": scope["from_global"], "buffer": lambda x: x + model.state}
    f, x, keep = cgt.jit(functions[place]), square(device), []
    for k in range(12):
        t = square(device, k)
        rows[0] = cell = scope["STATE"] = model.state = t
        keep.append(t)
        assert identical(f(x), x + t)
    assert counts(f) == (1, 2, 9, 0), cgt.explain(f)


# --- state that the function itself replaces ------------------------------------------------------


class Recurrent(nn.Module):
    """h = tanh(x w + h u), kept by itself."""

    def __init__(self, device):
        super().__init__()
        self.w, self.u = nn.Parameter(square(device)), nn.Parameter(square(device, 2))
        self.register_buffer("h", torch.zeros(4, 4, device=device))
        self.calls, self.last = 0, None

    def forward(self, x):
        h = torch.tanh(x @ self.w + self.h @ self.u)
        self.h = h.detach()
        self.calls += 1
        return h.sum(1)


@tells("follows")
def test_a_module_that_keeps_its_state(device, begin):
    model, other, x = Recurrent(device), Recurrent(device), square(device)
    other.load_state_dict(model.state_dict())
    f = cgt.jit(model)
    with torch.no_grad():
        for k in range(24):
            begin()
            x.copy_(square(device, k))
            assert identical(f(x), other(x)) and identical(model.h, other.h) and model.calls == other.calls
            if k == 15:
                model.h = other.h = torch.ones_like(x)
    s = cgt.stats(f)
    assert s.replays >= 19 and s.eager == 1, s.reasons
    assert any("From the next call on, replays read what is there" in reason for reason in s.reasons)


def test_state_of_a_model_that_is_trained_keeps_its_graph(device):
    """Where gradients go through a result, nothing is followed: values are eager's."""
    model, other, x = Recurrent(device), Recurrent(device), square(device)
    other.load_state_dict(model.state_dict())
    f = cgt.jit(model)
    for k in range(8):
        x.copy_(square(device, k))
        for one, call in ((model, f), (other, other)):
            one.zero_grad()
            call(x).sum().backward()
        assert identical(model.h, other.h)
        assert all(identical(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_an_accumulator_that_is_returned_too(device, begin):
    """y = s.total = s.total + x: one tensor, twice."""
    s, x = types.SimpleNamespace(total=torch.zeros(4, 4, device=device)), square(device)

    def function(x):
        s.total = s.total * 0.5 + x
        return s.total

    f, want = cgt.jit(function), s.total
    for k in range(20):
        begin()
        want = want * 0.5 + x.copy_(square(device, k))
        got = f(x)
        assert got is s.total and identical(got, want)
    assert cgt.stats(f).replays >= 16, cgt.stats(f).reasons


def attributes(s, x):
    s.a, s.b = s.b, 2 * s.b - s.a + x * 0.1
    return s.b.sum()


def three_in_place(s, x):
    s.c.copy_(2 * s.b - s.a + x * 0.1)
    s.a, s.b, s.c = s.b, s.c, s.a
    return s.b.sum()


def change_places(s, x):
    s.a.copy_(s.b * 0.5 + x)
    s.a, s.b = s.b, s.a
    return s.a + s.b


def entries(s, x):
    s.rows[0], s.rows[1] = s.rows[1], 2 * s.rows[1] - s.rows[0] + x * 0.1
    return s.rows[1].sum()


def queue(s, x):
    new = s.rows[0] * 0.5 + s.rows[-1] + x
    s.rows.append(new)
    s.rows.pop(0)
    return new


def pair(s, x):
    before, now = s.pair
    s.pair = now, 2 * now - before + x * 0.1
    return s.pair[1].sum()


class Levels(NamedTuple):
    before: torch.Tensor
    now: torch.Tensor

    def speed(self):
        return self.now - self.before


class Backwards(Levels):
    __slots__ = ()

    def speed(self):
        return self.before - self.now


def named(s, x):
    s.named = s.named._replace(before=s.named.now, now=s.named.now + s.named.speed() + x * 0.1)
    return s.named.now.sum()


def to_elsewhere(s, x):
    s.box["a"], s.rows[1] = s.rows[1], s.box["a"] * 0.5 + x
    return s.box["a"].sum()


def levels(device):
    return types.SimpleNamespace(
        a=square(device), b=square(device, 2), c=square(device, 3), rows=[square(device, 4), square(device, 5)],
        pair=(square(device, 6), square(device, 7)), box={"a": square(device, 8)},
        named=Levels(square(device, 9), square(device, 10)),
    )  # fmt: skip


def between(s, k, device):
    """Somebody else has to do with the state, too."""
    if k == 10:
        s.a, s.rows[0], s.pair, s.box["a"] = square(device, 31), square(device, 32), s.pair[::-1], square(device, 33)
        s.named = Backwards(*s.named)
    if k == 14:  # one tensor in two places
        s.a, s.rows[0], s.pair, s.box["a"] = s.b, s.rows[1], s.pair[:1] * 2, s.rows[1]
    if k == 18:
        s.a, s.b, s.rows[:] = square(device, 34), square(device, 35), [square(device, 36), square(device, 37)]
        s.pair = square(device, 38), square(device, 39)
        s.named = Levels(square(device, 40), square(device, 41))


@pytest.mark.parametrize("function", [attributes, three_in_place, change_places, entries, queue, pair, named, to_elsewhere])
def test_levels_that_are_handed_on(device, begin, function):
    """A tensor that lay in one place comes to another, as in a leapfrog: the very tensor, whatever is read or written there."""
    mine, theirs, kept = levels(device), levels(device), []
    f, x = cgt.jit(lambda x: function(mine, x)), square(device)
    for k in range(40):
        begin()
        before = [mine.b, mine.rows[-1], mine.pair[1]]
        assert identical(f(x.copy_(square(device, k))), function(theirs, x)), k
        assert identical(vars(mine), vars(theirs)), k
        if k % 9 == 4:
            kept.append((mine.a, mine.a.clone()))
        if function in (attributes, entries, pair):
            assert any(one is was for one, was in zip((mine.a, mine.rows[0], mine.pair[0]), before, strict=True))
        for one in (mine, theirs):
            between(one, k, device)
    assert cgt.stats(f).replays >= 20, cgt.explain(f)
    assert all(identical(one, was) for one, was in kept) or function in (three_in_place, change_places)


def stores_attribute(s, x, up):
    s.last = s.a
    return s.c + s.a + x


def stores_entry(s, x, up):
    s.box["last"] = s.a
    return s.c + s.a + x


def stores_now_and_then(s, x, up):
    if up:
        s.last = s.a
    return s.c + s.a + x


def stores_and_changes(s, x, up):
    if up:
        s.last = s.a
    s.a, s.b = s.b, s.a
    return s.c + s.a + x


@pytest.mark.parametrize("function", [stores_attribute, stores_entry, stores_now_and_then, stores_and_changes])
def test_a_tensor_is_stored_that_was_there_already_when_it_was_recorded(device, function):
    """Another one may come to where it is from: then that is stored."""
    mine, theirs = levels(device), levels(device)
    for s in (mine, theirs):
        s.last = s.box["last"] = None
    f, x = cgt.jit(lambda x, up: function(mine, x, up)), square(device)
    for k in range(40):
        if k == 8:  # another recording, in a state in which nothing is stored anew
            mine.c, theirs.c = square(device, 50), square(device, 50)
        if k in (4, 16, 19, 20, 21, 30):
            mine.a, theirs.a = square(device, 60 + k), square(device, 60 + k)
        assert identical(f(x, k % 7 != 5), function(theirs, x, k % 7 != 5)), k
        assert identical(vars(mine), vars(theirs)), k
        assert (mine.last is mine.a) == (theirs.last is theirs.a) and (mine.box["last"] is mine.a) == (theirs.box["last"] is theirs.a), k
    assert cgt.stats(f).replays >= 16 or function is stores_and_changes, cgt.explain(f)


def test_while_another_thread_runs_it_is_not_recorded(device, short_cool_down):
    """A capture would show it tensors that were never computed."""
    s, x, stop = types.SimpleNamespace(h=torch.zeros(4, 4, device=device)), square(device), threading.Event()
    thread = threading.Thread(target=stop.wait, daemon=True)

    def function(x):
        s.h = s.h * 0.5 + x
        return s.h.sum()

    f, want = cgt.jit(function), s.h
    thread.start()
    try:
        for k in range(8):
            want = want * 0.5 + x.copy_(square(device, k))
            assert identical(f(x), want.sum()) and identical(s.h, want)
        assert any("another thread" in reason for reason in cgt.stats(f).reasons) and cgt.stats(f).replays == 0
    finally:
        stop.set()
        thread.join()
    for k in range(60):
        want = want * 0.5 + x.copy_(square(device, k))
        assert identical(f(x), want.sum()) and identical(s.h, want)
    assert cgt.stats(f).replays > 10, cgt.stats(f).reasons


def test_a_call_that_fails_leaves_the_state_as_it_was(device):
    s, x = types.SimpleNamespace(h=torch.zeros(4, 4, device=device)), square(device)

    def function(x, w):
        h = s.h + x
        s.h = h
        return h @ w

    f = cgt.jit(function)
    for _ in range(4):
        f(x, x)
    for one in (f, function):  # eager stores before it fails
        before = s.h
        with pytest.raises(RuntimeError):
            one(x, x[:3])
        assert identical(s.h, before + x)
    before = s.h
    f(x, x)
    assert identical(s.h, before + x)


# --- parameters ----------------------------------------------------------------------------------


def test_sets_of_weights_that_take_turns(device):
    """load_state_dict(assign=True) of three sets: one recording for each."""
    layer, x = nn.Sequential(nn.Linear(4, 4, device=device), nn.Tanh(), nn.Linear(4, 4, device=device)), square(device)
    sets = [{name: values(device, *t.shape, seed=k) for name, t in layer.state_dict().items()} for k in range(3)]
    f = cgt.jit(lambda x: layer(x))
    with torch.no_grad():
        for k in range(40):
            layer.load_state_dict(sets[k * 7 % 3], assign=True)
            assert identical(f(x.copy_(square(device, k))), layer(x))
    s = cgt.stats(f)
    assert s.records <= 5 and s.replays >= 34 and s.eager == 0, s.reasons


def test_weights_that_are_others_every_few_calls_are_copied(device):
    """load_state_dict(assign=True) of fresh tensors: a recording for each would never end, so replays copy, all of them at once."""
    net = nn.Sequential(*(nn.Linear(8, 8, device=device) for _ in range(6))).requires_grad_(False)
    f, x = cgt.jit(lambda x: net(x)), values(device, 4, 8)
    with torch.no_grad():
        for k in range(60):
            if k % 2:
                net.load_state_dict({name: t * 1.01 for name, t in net.state_dict().items()}, assign=True)
            assert identical(f(x), net(x)), k
    s = cgt.stats(f)
    assert s.records <= 6 and s.replays >= 52 and s.eager == 0, cgt.explain(f)


def test_weights_that_are_replaced_now_and_then_are_not_copied(device):
    """A copy at each replay would cost more than the recordings."""
    net = nn.Linear(8, 8, device=device).requires_grad_(False)
    f, x = cgt.jit(lambda x: net(x)), values(device, 4, 8)
    for k in range(400):
        if k % 80 == 79:
            net.weight = nn.Parameter(net.weight * 1.01, requires_grad=False)
        assert identical(f(x), net(x)), k
    assert cgt.stats(f).copied_bytes == 0 and cgt.stats(f).records <= 6, cgt.explain(f)


def test_data_that_is_replaced_follows_its_own_rules(device):
    """`.data =` gives a tensor other memory; another one in its place is another matter."""
    layer, x = nn.Linear(4, 4, device=device), square(device)
    f, keep = cgt.jit(lambda x: layer(x)), []
    with torch.no_grad():
        for k in range(10):
            keep.append(square(device, k))
            if k % 2:
                layer.weight.data = keep[-1]
            else:
                layer.weight = nn.Parameter(keep[-1])
            assert identical(f(x), layer(x))


def test_parameters_with_gradients_are_not_followed(device):
    """Gradients belong to one tensor."""
    layer, x = nn.Linear(4, 4, device=device), square(device)
    f = cgt.jit(lambda x: layer(x).sum())
    for k in range(8):
        layer.weight = nn.Parameter(square(device, k))
        f(x).backward()
        want = layer.weight.grad.clone()
        layer.weight.grad = layer.bias.grad = None
        layer(x).sum().backward()
        assert identical(layer.weight.grad, want)
        layer.weight.grad = layer.bias.grad = None
    assert "(followed)" not in cgt.explain(f)


# --- what must not be taken for the same ------------------------------------------------------------


def settled(function, *args, places, device, n=6):
    """Jitted, and following m.h since other tensors came there."""
    f = cgt.jit(function)
    for k in range(n):
        places.h = square(device, k)
        assert identical(f(*args), function(*args))
    assert "(followed)" in cgt.explain(f), cgt.explain(f)
    return f


@pytest.mark.parametrize("other", ["shape", "dtype", "strides", "parameter", "none", "number", "absent", "requires grad"])
def test_something_else_came_there(device, other):
    m, x = types.SimpleNamespace(h=None), square(device)

    def function(x):
        h = getattr(m, "h", None)
        return x + 1 if h is None else x * h

    f = settled(function, x, places=m, device=device)
    came = {
        "shape": lambda: values(device, 1, 4), "dtype": lambda: square(device).double(), "strides": lambda: square(device).t(),
        "parameter": lambda: nn.Parameter(square(device)), "none": lambda: None, "number": lambda: 2.5,
        "requires grad": lambda: square(device).requires_grad_(),
    }  # fmt: skip
    for k in range(6):
        if other == "absent":
            del m.h
        else:
            m.h = came[other]()
        got, want = f(x), function(x)
        assert identical(got.detach(), want.detach()) and got.requires_grad == want.requires_grad
        m.h = square(device, k)
        assert identical(f(x), function(x))
    if other not in ("parameter", "requires grad"):  # a graph of autograd's belongs to one tensor
        assert cgt.stats(f).replays > 5, cgt.stats(f).reasons


@pytest.mark.parametrize("scale", [None, 2.0])
def test_a_tensor_that_is_asked_for_attributes_is_not_followed(device, scale):
    m, x = types.SimpleNamespace(h=None), square(device)

    def function(x):
        return x * m.h * getattr(m.h, "scale", 1.0)

    f = cgt.jit(function)
    for k in range(12):
        m.h = square(device, k)
        if scale is not None:
            m.h.scale = scale + k % 2
        elif k > 6:
            m.h.scale = 3.0
        assert identical(f(x), function(x)), k


def test_a_tensor_that_something_else_leads_to_is_not_followed(device):
    """A tuple holds it, too: another one in the place is not another one there."""
    m, x = types.SimpleNamespace(h=square(device)), square(device)
    pair = (m.h, 1)

    def function(x):
        return x * m.h + pair[0]

    f = cgt.jit(function)
    for k in range(8):
        m.h = square(device, k) if k % 2 else pair[0]
        assert identical(f(x), function(x)), k


HIDES = {  # what is not looked into, and what takes the tensor out of it again
    "set": (lambda t: {t}, lambda box: next(iter(box))), "frozenset": (lambda t: frozenset([t]), lambda box: next(iter(box))),
    "deque": (lambda t: collections.deque([t]), lambda box: box[0]), "large list": (lambda t: [t] + [0] * 5000, lambda box: box[0]),
    "view in a set": (lambda t: {t[:]}, lambda box: next(iter(box))),
    "distribution": (lambda t: torch.distributions.Normal(t, 1.0, validate_args=False), lambda box: box.loc),
}  # fmt: skip


@pytest.mark.parametrize("how", HIDES)
@pytest.mark.parametrize("when", [(0, 1), (1,), (2, 6), (3,), (5,)], ids=str)
def test_a_tensor_that_lies_hidden_somewhere_else_too(device, how, when):
    """At some calls it is the one in the place, and at others not."""
    make, take = HIDES[how]
    hidden, m, x = square(device), types.SimpleNamespace(h=None), square(device, 2)
    box = make(hidden)
    f = cgt.jit(lambda x: x * m.h + take(box))
    for k in range(10):
        m.h = hidden if k in when else square(device, k + 3)
        assert identical(f(x), x * m.h + hidden), k


def test_the_place_comes_to_hold_an_argument_or_what_another_holds(device):
    m, x = types.SimpleNamespace(h=square(device), g=square(device, 2)), square(device)

    def function(x):
        m.g.add_(1)
        return x * m.h + m.g

    f = cgt.jit(function)
    for k in range(24):
        m.h = (square(device, k), x, m.g, m.g[:], m.g.view(4, 4))[k % 5]
        want_g = m.g + 1
        h = m.h if k % 5 < 2 else want_g
        want = x * h + want_g
        assert identical(f(x), want), k
        assert identical(m.g, want_g)
    assert cgt.stats(f).replays > 0


@pytest.mark.parametrize("how", ["hash", "id", "is an argument", "is another"])
def test_where_it_is_asked_which_tensor_it_is(device, how):
    homes = [square(device, k) for k in range(3)]
    m, x, scale = types.SimpleNamespace(h=homes[0], g=homes[1]), square(device), {t: float(k) for k, t in enumerate(homes)}
    by_id = {id(t): k for t, k in scale.items()}
    functions = {
        "hash": lambda x: x * scale[m.h], "id": lambda x: x * by_id[id(m.h)],
        "is an argument": lambda x: x + m.h if m.h is x else x - m.h, "is another": lambda x: x * m.h if m.h is m.g else x - m.h,
    }  # fmt: skip
    function = functions[how]
    f = cgt.jit(function)
    for k in range(30):
        m.h = homes[k * 7 % 3]
        args = (homes[k % 3] if how == "is an argument" else x,)
        assert identical(f(*args), function(*args)), k
    assert cgt.stats(f).replays > 10, cgt.stats(f).reasons


def test_it_is_returned(device):
    """The tensor itself, today's; a view is one of today's."""
    m, x = types.SimpleNamespace(h=None), square(device)
    f = settled(lambda x: (m.h, m.h[1:], x + m.h), x, places=m, device=device)
    for k in range(4):
        m.h = square(device, k)
        one, part, _ = f(x)
        assert one is m.h and part._base is m.h and identical(part, m.h[1:])
    assert cgt.stats(f).replays >= 4


def test_it_is_written(device):
    """In the memory where it lies: each address has a recording."""
    m, x = types.SimpleNamespace(h=None), square(device)
    homes = [square(device, k) for k in range(3)]

    def function(x):
        m.h.mul_(0.5).add_(x)
        return m.h * 2

    f = cgt.jit(function)
    for k in range(30):
        m.h = homes[k % 3]
        version, want = m.h._version, m.h * 0.5 + x
        assert identical(f(x), want * 2)
        assert identical(m.h, want) and m.h._version == version + 2
    s = cgt.stats(f)
    assert s.records <= 5 and s.replays > 20, s.reasons


def test_nothing_is_kept_that_is_not_read_any_more(device):
    """The last one that was found, and no other; that goes with the recording."""
    m, x = types.SimpleNamespace(h=None), square(device)
    f = settled(lambda x: x * m.h, x, places=m, device=device)
    gone = []
    for k in range(5):
        m.h = square(device, k)
        gone.append(weakref.ref(m.h))
        f(x)
    m.h = None
    gc.collect()
    assert [ref() is None for ref in gone] == [True] * 4 + [False]
    cgt.reset(f)
    gc.collect()
    assert gone[-1]() is None


def test_a_finalizer_that_comes_to_the_function_again(device):
    """What a place held is let go of in the middle of a guard."""
    m, x = types.SimpleNamespace(h=None), square(device)
    f = settled(lambda x: x * m.h, x, places=m, device=device)
    for k in range(6):
        m.h = square(device, k)
        weakref.finalize(m.h, lambda: (m.h is not None and f(x), cgt.reset(f) if k == 3 else None))
        want = x * m.h
        assert identical(f(x), want)
    core.check_table()
    m.h = None  # or its finalizer would keep f, and f it
    cgt.reset(f)


@tells("asks_which")
def test_not_beside_functions_that_run_eagerly(device):
    """They could put another tensor there in the middle of a call."""
    m, x = types.SimpleNamespace(h=square(device), parted=False), square(device)

    @cgt.eager
    def part(y):
        m.h = square(device, 9)

    def function(x):
        y = x * m.h
        if m.parted:
            part(y)
        return y + m.h

    f = cgt.jit(function)
    for k in range(16):
        m.parted = k > 6
        m.h = square(device, k)
        first = m.h
        got = f(x)
        assert identical(got, x * first + m.h), k



def test_what_lies_under_a_tensor_as_a_key_is_followed(device):
    """Which tensor the key is was asked, not which one lies there: `state[p] = e` of optimizers."""
    params = [nn.Parameter(square(device, k)) for k in range(3)]

    def begin():
        state = {}

        def step(x):
            for p in params:
                state[p] = p.detach() * x
            return sum(state[p].sum() for p in params)

        return state, step

    (wants, plain), (gots, other) = begin(), begin()
    f = cgt.jit(other)
    for k in range(12):
        assert identical(f(square(device, k)), plain(square(device, k))), k
        assert all(identical(gots[p], wants[p]) for p in params), k
    assert cgt.stats(f).replays >= 8, cgt.explain(f)


def test_a_tensor_that_is_asked_for_by_its_hash_is_not_followed(device):
    m, known = types.SimpleNamespace(h=square(device)), {}

    def function(x):
        if m.h not in known:
            known[m.h] = len(known)
        m.h = m.h + x
        return m.h * known.get(m.h, 2)

    f = cgt.jit(function)
    for k in range(8):
        x, h, n = square(device, k), m.h, len(known)
        assert identical(f(x), (h + x) * 2), k
        assert len(known) == n + 1
    assert cgt.stats(f).replays == 0


def test_an_argument_as_a_key_is_that_very_tensor(device):
    a, b = square(device), square(device, 2)
    scales = {a: 2.0, b: 3.0}
    f = cgt.jit(lambda x, which: x * scales[which])
    for k in range(20):
        which = a if k < 10 or k % 2 else b
        assert identical(f(square(device, k), which), square(device, k) * scales[which]), k
    assert any("asks which tensor is in args[1]" in reason for reason in cgt.stats(f).reasons), cgt.explain(f)
