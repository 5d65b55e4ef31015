"""A tuple of tensors in a place, such as the state of a recurrent layer: `self.state = self.lstm(x, self.state)`. Another tuple there is
as if its tensors had been handed in, and a replay leaves a new one: bit for bit as in eager, and most calls are replays."""

import collections
import gc
import types
import weakref

import pytest
import torch
from helpers import collect, counts, identical, values
from test_followed import square
from torch import nn

import cgt

Pair = collections.namedtuple("Pair", "h c")


class Policy(nn.Module):
    def __init__(self, device, cell=nn.LSTMCell):
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.state = cell(4, 4).to(device), self.start(device)

    def start(self, device):
        return torch.zeros(4, 4, device=device), torch.zeros(4, 4, device=device)

    def forward(self, x):
        self.state = self.cell(x, self.state)
        return self.state[0] * 2


class Layers(Policy):
    def __init__(self, device):
        super().__init__(device, lambda n, m: nn.LSTM(n, m, num_layers=2))

    def start(self, device):
        return torch.zeros(2, 4, 4, device=device), torch.zeros(2, 4, 4, device=device)

    def forward(self, x):
        y, self.state = self.cell(x[None], self.state)
        return y


def test_layers_where_the_process_has_a_buffer_of_random_state(device):
    """cuDNN is handed it by all recurrent layers once one has trained with dropout; these do not read it."""
    nn.LSTM(4, 4, num_layers=2, dropout=0.5).to(device)(square(device, 1)[None])
    mine, theirs = Layers(device), Layers(device)
    act = cgt.jit(mine)
    with torch.no_grad():
        for k in range(20):
            x = square(device, k)
            assert identical(act(x), theirs(x)) and identical(mine.state, theirs.state), k
    assert cgt.stats(act).replays >= 14, cgt.explain(act)


@pytest.mark.parametrize("begins", [False, True], ids=["no step", "step"])
@pytest.mark.parametrize("make", [Policy, Layers])
def test_recurrent_policy(device, make, begins):
    """Now and then an episode begins."""
    mine, theirs = make(device), make(device)
    act = cgt.jit(mine)
    with torch.inference_mode():
        for k in range(40):
            if begins:
                cgt.step()
            if k % 13 == 12:
                mine.state, theirs.state = mine.start(device), theirs.start(device)
            x = square(device, k)
            assert identical(act(x), theirs(x)), k
            assert type(mine.state) is tuple and identical(mine.state, theirs.state), k
    assert cgt.stats(act).replays >= 30, cgt.explain(act)


def test_explain_names_it(device):
    m = Policy(device)
    f = cgt.jit(m)
    with torch.no_grad():
        for k in range(6):
            f(square(device, k))
    told = cgt.explain(f)
    assert "state[0] (followed)" in told and "stores" in told, told


@pytest.mark.parametrize("place", ["attribute", "list", "dict", "cell", "global"])
def test_wherever_it_lies(device, place):
    start = square(device), square(device, 2)
    outcomes = []
    for wrap in (cgt.jit, lambda f: f):
        o, rows, box, cell, scope = types.SimpleNamespace(s=start), [start, (square(device, 3),)], {"s": start}, start, {"STATE": start, "torch": torch}

        def turned(x, s):
            return torch.tanh(x + s[1]), s[0] * x

        def attribute(x, o=o):
            o.s = turned(x, o.s)
            return o.s[0] + 1

        def of_list(x, rows=rows):
            rows[0] = turned(x, rows[0])
            return rows[0][0] + 1

        def of_dict(x, box=box):
            box["s"] = turned(x, box["s"])
            return box["s"][0] + 1

        def of_cell(x):
            nonlocal cell
            cell = turned(x, cell)
            return cell[0] + 1

        exec("def of_global(x):\n    global STATE\n    STATE = torch.tanh(x + STATE[1]), STATE[0] * x\n    return STATE[0] + 1", scope)
        f = wrap({"attribute": attribute, "list": of_list, "dict": of_dict, "cell": of_cell, "global": scope["of_global"]}[place])
        made = [f(square(device, k)).clone() for k in range(12)]
        outcomes.append((made, {"attribute": o.s, "list": rows[0], "dict": box["s"], "cell": cell, "global": scope["STATE"]}[place]))
        if wrap is cgt.jit:
            assert cgt.stats(f).replays >= 8, cgt.explain(f)
    assert identical(*(made for made, _ in outcomes)) and identical(*(state for _, state in outcomes))


def test_states_that_somebody_keeps(device):
    m, other, kept, want = Policy(device), Policy(device), [], []
    f = cgt.jit(m)
    with torch.no_grad():
        for k in range(20):
            f(square(device, k)), other(square(device, k))
            kept.append(m.state)
            want.append(tuple(t.clone() for t in other.state))
    assert all(map(identical, kept, want)) and cgt.stats(f).replays >= 15, cgt.explain(f)


def test_only_the_caller_replaces_it(device):
    """Weights, in a tuple, which take turns: two of them are told apart by address, then they are copied."""
    m = types.SimpleNamespace(w=(square(device), square(device, 2)))
    f, kept = cgt.jit(lambda x: x @ m.w[0] + m.w[1]), []
    for k in range(20):
        m.w = square(device, k), square(device, k + 1)
        kept.append(m.w)
        x = square(device, 30 + k)
        assert identical(f(x), x @ m.w[0] + m.w[1])
    assert cgt.stats(f).replays >= 15, cgt.explain(f)


OTHERS = {
    "none": lambda s: None, "list": list, "named": lambda s: Pair(*s), "tensor": lambda s: s[0], "one": lambda s: s[:1], "three": lambda s: (*s, s[0].clone()),
    "number": lambda s: (s[0], 2.0), "same twice": lambda s: (s[0], s[0]), "swapped": lambda s: s[::-1], "shape": lambda s: (s[0], s[1][:1].clone()),
    "dtype": lambda s: (s[0], s[1].double()), "parameter": lambda s: (nn.Parameter(s[0].clone(), requires_grad=False), s[1]),
    "requires grad": lambda s: (s[0].clone().requires_grad_(), s[1]), "strides": lambda s: (s[0], s[1].t()), "view": lambda s: (s[0], s[0][:]),
    "inner": lambda s: (s[0], (s[1],)), "the argument": lambda s: None, "attribute": lambda s: (with_note(s[0]), s[1]), "empty": lambda s: (),
}  # fmt: skip


def with_note(t):
    t = t.clone()
    t.note = 1
    return t


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("turns", [False, True], ids=["reads", "turns"])
def test_something_else_came_there(device, other, turns):
    outcomes = []
    for wrap in (cgt.jit, lambda f: f):
        m, made = types.SimpleNamespace(s=(square(device), square(device, 2))), []

        @wrap
        def f(x, m=m):
            s = m.s
            if s is None or len(s) != 2:
                return x + 1
            a, b = s
            b = b[0] if type(b) is tuple else b
            if turns:
                m.s = torch.tanh(a + x), b * 0.5
            return a * 2 + b + (1 if a is b else 0)

        for k in range(20):
            x = square(device, k)
            made.append((f(x).detach().clone(), [t.detach().clone() if isinstance(t, torch.Tensor) else repr(t) for t in (() if m.s is None else m.s)]))
            if k in (6, 7, 13):
                before = (square(device, k), square(device, k + 1))
                m.s = (x, before[1]) if other == "the argument" else OTHERS[other](before)
            elif k in (9, 15) or turns is False:
                m.s = (square(device, k), square(device, k + 1))
        outcomes.append(made)
    assert repr(outcomes[0]) == repr(outcomes[1])


def test_tuple_that_two_places_hold(device):
    outcomes = []
    for wrap in (cgt.jit, lambda f: f):
        start = square(device), square(device, 2)
        m, made = types.SimpleNamespace(a=start, b=start), []

        @wrap
        def f(x, m=m):
            m.a = m.a[0] + x, m.b[1] * 2
            return m.a[1] if m.a is m.b else m.a[0]

        for k in range(16):
            made.append(f(square(device, k)).clone())
            if k % 5 == 4:
                m.b = m.a
        outcomes.append(made)
    assert identical(*outcomes)


STORES = {
    "twice": lambda m, x: (torch.tanh(m.s[0] + x),) * 2, "the argument": lambda m, x: (x, m.s[0] * x), "the other": lambda m, x: (m.s[1], m.s[0]),
    "a view": lambda m, x: (h := m.s[0] * x, h[:]), "a part": lambda m, x: (m.s[0] * x, x.t()), "a number": lambda m, x: (m.s[0] * x, 3),
    "a named one": lambda m, x: Pair(m.s[0] * x, m.s[1] + x), "three": lambda m, x: (m.s[0] * x, *m.s) if len(m.s) < 6 else m.s[:2],
    "in place": lambda m, x: (m.s[0].mul_(0.5), m.s[1].add_(x)), "itself": lambda m, x: m.s, "with a graph": lambda m, x: (m.w * x, m.s[1] + x),
    "detached": lambda m, x: tuple(t.detach() for t in (m.w * x + m.s[0].detach(), m.s[1] * x)), "a double": lambda m, x: (m.s[0].double() * x, m.s[1]),
}  # fmt: skip


@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("what", STORES)
def test_what_is_stored(device, what, grad):
    outcomes = []
    for wrap in (cgt.jit, lambda f: f):
        m, made, kept = types.SimpleNamespace(s=(square(device), square(device, 2)), w=square(device, 3).requires_grad_(grad)), [], []

        @wrap
        def f(x, m=m):
            m.s = STORES[what](m, x)
            return m.s[0] + 1

        with torch.set_grad_enabled(grad):
            for k in range(14):
                y = f(square(device, k))
                if what == "with a graph" and grad:
                    m.s = tuple(t.detach() for t in m.s)
                made.append((y.detach().clone(), y.requires_grad, [t.detach().clone() if isinstance(t, torch.Tensor) else t for t in m.s], type(m.s)))
                kept.append((m.s, made[-1][2]))
        outcomes.append(made)
        if what != "in place":
            assert all(identical(a.detach(), b) for mine, want in kept for a, b in zip(mine, want, strict=True) if isinstance(a, torch.Tensor))
    assert repr(outcomes[0]) == repr(outcomes[1])


def test_it_is_returned_and_read_by_another_function(device):
    outcomes = []
    for wrap in (cgt.jit, lambda f: f):
        m = Policy(device)

        def both(x, m=m):
            m.state = m.cell(x, m.state)
            return m.state, m.state[1]

        f, g, made = wrap(both), wrap(lambda x, m=m: x + m.state[0] * m.state[1]), []
        with torch.no_grad():
            for k in range(16):
                (h, c), again = f(square(device, k))
                assert again is c and (m.state[0] is h) == (m.state[1] is c)
                made.append([t.clone() for t in (h, c, again, g(square(device, k + 1)), *m.state)])
        outcomes.append(made)
        if wrap is cgt.jit:
            assert cgt.stats(f).replays >= 10 and cgt.stats(g).replays >= 10, (cgt.explain(f), cgt.explain(g))
    assert identical(*outcomes)


def test_call_that_fails_leaves_the_state(device):
    m, other = Policy(device), Policy(device)
    f = cgt.jit(m)
    with torch.no_grad():
        for k in range(20):
            x = square(device, k) if k % 6 != 5 else values(device, 3, 5)
            for one in (f, other):
                try:
                    one(x)
                except RuntimeError:
                    assert k % 6 == 5
            assert identical(m.state, other.state), k
    assert cgt.stats(f).replays >= 10, cgt.explain(f)


def test_nothing_is_kept_that_is_not_read_any_more(device):
    m = Policy(device)
    f = cgt.jit(m)
    with torch.no_grad():
        for k in range(8):
            f(square(device, k))
        m.state = m.start(device)
        first = weakref.ref(m.state[0])
        for k in range(3):
            f(square(device, k))
    gc.collect()
    assert first() is None
    gone = weakref.ref(m)
    del m, f
    collect()
    assert gone() is None


def test_steps_of_training_through_time(device):
    """A whole step, whose state goes on without its graph."""
    outcomes = []
    for wrap in (cgt.jit, lambda f: f):
        m = Policy(device)
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)

        @wrap
        def step(x, m=m, optimizer=optimizer):
            optimizer.zero_grad()
            h, c = m.cell(x, m.state)
            loss = h.square().mean()
            loss.backward()
            optimizer.step()
            m.state = h.detach(), c.detach()
            return loss.detach()

        outcomes.append([step(square(device, k)).item() for k in range(20)] + [t.tolist() for t in m.state])
        if wrap is cgt.jit:
            assert cgt.stats(step).replays >= 14, cgt.explain(step)
    assert outcomes[0] == outcomes[1]


def test_of_a_replay_nothing_but_the_tuple_is_made(device):
    """No copy of what the path itself left there."""
    m = Policy(device)
    f = cgt.jit(m)
    with torch.no_grad():
        for k in range(10):
            cgt.step()
            f(square(device, k))
    before = counts(f)
    with torch.no_grad():
        f(square(device, 3))
    assert counts(f) == (*before[:2], before[2] + 1, before[3])
