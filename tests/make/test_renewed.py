"""A list or dict of tensors that each call makes anew, such as `self.cache = {"k": k, "v": v}`: it is read by what is in
it, and a replay makes another one. Nobody else sees less of it than in eager."""

import collections
import dataclasses
import gc
import types
import weakref
from typing import NamedTuple

import pytest
import torch
from helpers import Stepped, collect, identical
from test_followed import square
from torch import nn

import cgt

Pair = collections.namedtuple("Pair", "h c")


@dataclasses.dataclass
class State:
    h: torch.Tensor
    c: torch.Tensor

    def both(self):
        return self.h, self.c


@dataclasses.dataclass(frozen=True)
class Frozen:
    h: torch.Tensor
    c: torch.Tensor


class Plain:
    scale = 1

    def __init__(self, h, c):
        self.h, self.c = h, c

# What makes one of two tensors, and what reads these of it.
KINDS = {
    "list": (lambda a, b: [a, b], lambda s: s),
    "dict": (lambda a, b: {"a": a, "b": b}, lambda s: s.values()),
    "list of tuples": (lambda a, b: [(a,), (b,)], lambda s: (s[0][0], s[1][0])),
    "list of lists": (lambda a, b: [[a], [b]], lambda s: (s[0][0], s[1][0])),
    "named tuples in a list": (lambda a, b: [Pair(a, b)], lambda s: s[0]),
    "dict of lists": (lambda a, b: {"both": [a, b]}, lambda s: s["both"]),
    "tuple of tuples": (lambda a, b: ((a,), (b,)), lambda s: (s[0][0], s[1][0])),
    "list in a tuple": (lambda a, b: ([a, b],), lambda s: s[0]),
    "dataclass": (State, State.both),
    "frozen dataclass": (Frozen, lambda s: (s.h, s.c)),
    "object": (Plain, lambda s: (s.h * s.scale, s.c)),
    "objects in a list": (lambda a, b: [Plain(a, b)], lambda s: (s[0].h, s[0].c)),
}


def plain(value):
    """A copy with tensors of its own."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return type(value)((key, plain(one)) for key, one in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(plain, value))
    if isinstance(value, (State, Frozen, Plain)):
        return type(value).__name__, plain(vars(value))
    return type(value)(map(plain, value)) if isinstance(value, (list, tuple)) else value


def both(run):
    """run(wrap), with cgt and without; the results of both are alike. Of the jitted one what run returned beside."""
    (mine, found), (theirs, _) = run(cgt.jit), run(lambda f: f)
    assert repr(mine) == repr(theirs)
    return found


class Cells(nn.Module):
    """Recurrent, in layers that each keep a pair."""

    def __init__(self, device):
        super().__init__()
        torch.manual_seed(0)
        self.cells = nn.ModuleList([nn.LSTMCell(4, 4) for _ in range(2)]).to(device)
        self.begin(device)

    def begin(self, device):
        self.states = [(torch.zeros(4, 4, device=device), torch.zeros(4, 4, device=device)) for _ in self.cells]

    def forward(self, x):
        states = []
        for cell, state in zip(self.cells, self.states, strict=True):
            states.append(cell(x, state))
            x = states[-1][0]
        self.states = states
        return x


@pytest.mark.parametrize("begins", [False, True], ids=["no step", "step"])
def test_layers_that_keep_a_pair_each(device, begins):
    mine, theirs = cgt.jit(Cells(device)), Cells(device)
    with torch.no_grad():
        for k in range(24):
            if k % 10 == 9:
                mine.begin(device), theirs.begin(device)
            if begins:
                cgt.step()
            assert identical(mine(square(device, k)), theirs(square(device, k))), k
            assert identical([*mine.states], [*theirs.states]), k
    assert cgt.stats(mine).replays >= 18, cgt.explain(mine)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_call_makes_anew_is_read_by_the_next(device, kind):
    make, read = KINDS[kind]

    def run(wrap):
        m, made = types.SimpleNamespace(s=make(square(device), square(device, 2))), []

        @wrap
        def f(x):
            a, b = read(m.s)
            m.s = make(torch.tanh(a + x), b * 0.5 + a)
            return a * 2

        for k in range(24):
            made.append((f(square(device, k)).clone(), plain(m.s)))
        return made, f

    f = both(run)
    assert cgt.stats(f).replays >= 14, cgt.explain(f)
    assert "(followed)" in cgt.explain(f) and "stores" in cgt.explain(f), cgt.explain(f)


@pytest.mark.parametrize("place", ["list", "dict", "cell", "attribute of a class"])
def test_wherever_it_lies(device, place):
    def run(wrap):
        rows, box, cell, made = [[square(device)], 3], {"s": [square(device)]}, [square(device)], []

        class Holder:
            s = [square(device)]

        def of_list(x):
            rows[0] = [torch.tanh(rows[0][0] + x)]
            return rows[0][0] + 1

        def of_dict(x):
            box["s"] = [torch.tanh(box["s"][0] + x)]
            return box["s"][0] + 1

        def of_cell(x):
            nonlocal cell
            cell = [torch.tanh(cell[0] + x)]
            return cell[0] + 1

        def of_class(x):
            Holder.s = [torch.tanh(Holder.s[0] + x)]
            return Holder.s[0] + 1

        f = wrap({"list": of_list, "dict": of_dict, "cell": of_cell, "attribute of a class": of_class}[place])
        for k in range(20):
            made.append((f(square(device, k)).clone(), plain([rows[0], box["s"], cell, Holder.s])))
        return made, f

    f = both(run)
    if place != "attribute of a class":
        assert cgt.stats(f).replays >= 10, cgt.explain(f)


OTHERS = {
    "longer": lambda s, t: s.append(t), "shorter": lambda s, t: s.pop(), "another entry": lambda s, t: s.__setitem__(0, t),
    "turned": lambda s, t: s.reverse(), "a number": lambda s, t: s.__setitem__(1, 3), "nothing": lambda s, t: s.__setitem__(1, None),
    "one twice": lambda s, t: s.__setitem__(1, s[0]), "a view": lambda s, t: s.__setitem__(1, s[0][:]), "strides": lambda s, t: s.__setitem__(1, t.t()),
    "a double": lambda s, t: s.__setitem__(1, t.double()), "itself": lambda s, t: s.append(s), "empty": lambda s, t: s.clear(),
    "a tuple": lambda s, t: s.__setitem__(1, (t,)),
}  # fmt: skip


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("turns", [False, True], ids=["reads", "turns"])
def test_somebody_wrote_to_it_in_between(device, other, turns):
    def run(wrap):
        m, made = types.SimpleNamespace(s=[square(device), square(device, 2)]), []

        @wrap
        def f(x):
            tensors = [one for one in m.s if isinstance(one, torch.Tensor)]
            y = sum(tensors, x) + len(m.s)
            if turns and len(tensors) > 1:
                m.s = [torch.tanh(tensors[0] + x), tensors[1] * 0.5]
            return y * 2 if len(m.s) > 1 and m.s[0] is m.s[1] else y

        for k in range(24):
            made.append((f(square(device, k)).clone(), repr([t if t is not m.s else "itself" for t in m.s])))
            if k in (6, 7, 13, 19):
                OTHERS[other](m.s, square(device, k + 1))
            elif k in (9, 16) or (not turns and k % 3):
                m.s = [square(device, k), square(device, k + 1)]
        return made, f

    both(run)


def kept_elsewhere(m, s, new):
    m.before, m.s = s, new


def in_two_places(m, s, new):
    m.s = m.also = new


def put_back_and_forth(m, s, new):
    m.s, m.also = m.also, new


def written_as_well(m, s, new):
    s[0] = s[0] * 2
    m.s = new


def written_alone(m, s, new):
    s[:] = new


def grown_behind(m, s, new):
    m.s = new
    m.s.append(m.s.pop() + 1)


def with_what_was_there(m, s, new):
    m.s = [new[0], s[0]]


def of_the_old(m, s, new):
    m.s = s[::-1]


def now_and_then(m, s, new):
    if m.n % 5 == 4:
        s[0] = new[0]
    m.s = new


def inside_the_old(m, s, new):
    m.s = [new[0], new[1]]
    m.also = [s]


WAYS = [
    kept_elsewhere, in_two_places, put_back_and_forth, written_as_well, written_alone, grown_behind, with_what_was_there,
    of_the_old, now_and_then, inside_the_old,
]  # fmt: skip


@pytest.mark.parametrize("holds", ["nobody", "old ones", "and writes"])
@pytest.mark.parametrize("way", WAYS)
def test_what_becomes_of_it(device, way, holds):
    def run(wrap):
        m, made, kept = types.SimpleNamespace(s=[square(device), square(device, 2)], also=[square(device, 3)] * 2, before=None, n=0), [], []

        @wrap
        def f(x):
            s = m.s
            y = s[0] * x + s[1]
            way(m, s, [torch.tanh(y), s[1] * 0.5])
            return y

        for k in range(20):
            if holds != "nobody":
                kept.append((m.s, m.also, m.before))
            m.n = k
            made.append((f(square(device, k)).clone(), plain([m.s, m.also, m.before]), m.s is m.also))
            made.append([[one is other for one in (m.s, m.also, m.before)] for row in kept for other in row])
            if holds == "and writes" and k % 3 == 2:
                for one in kept[-1]:
                    if isinstance(one, list) and isinstance(one[0], torch.Tensor):
                        one[0] = square(device, k + 1)
            made.append(plain(kept[-2:]))
        return made, f

    both(run)


@pytest.mark.parametrize("kind", [*KINDS, "tuple"])
def test_two_places_come_to_hold_one_or_not(device, kind):
    """Another place may hold it already, so that it is not seen whether the call stores it there."""
    make, _ = KINDS.get(kind, (lambda a, b: (a, b), None))

    def run(wrap):
        m, made = types.SimpleNamespace(s=make(square(device), square(device, 2)), also=None), []

        @wrap
        def f(x):
            m.also = m.s
            if x.sum() > 0:
                m.s = make(x * 2, x + 1)
            return x * 2

        for k in range(24):
            f(square(device, k % 5))
            made.append((isinstance(m.s, tuple) or m.s is m.also, plain(m.s), plain(m.also)))  # which tuple it is is not told
            if k % 4 != 3:
                m.s = make(square(device, k), square(device, k + 1))
            else:
                m.also = m.s
        return made, f

    both(run)


HANDED = {
    "the new one": lambda m, s, y: m.s, "the old one": lambda m, s, y: s, "in a tuple": lambda m, s, y: (y, m.s),
    "its entries": lambda m, s, y: [*(m.s if isinstance(m.s, (list, dict)) else ())], "which it is": lambda m, s, y: (y, s is m.s, id(s) == id(m.s)),
    "is it another's": lambda m, s, y: (y, s is m.also),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["list", "dict of lists", "object", "objects in a list"])
@pytest.mark.parametrize("handed", HANDED)
def test_what_is_returned_of_it(device, handed, kind):
    make, read = KINDS[kind]

    def run(wrap):
        m, made = types.SimpleNamespace(s=make(square(device), square(device, 2)), also=None), []

        @wrap
        def f(x):
            s = m.s
            a, b = read(s)
            y = a * x
            m.s = make(torch.tanh(y), b * 0.5 + y)
            return HANDED[handed](m, s, y)

        for k in range(16):
            before, y = m.s, f(square(device, k))
            row = y[1] if isinstance(y, tuple) else y
            is_before = row is before if handed != "the old one" else None  # containers of a result are new ones
            made.append((plain(y), plain(m.s), row is m.s, is_before))
            if k % 4 == 3:
                m.also = m.s
        return made, f

    both(run)


@pytest.mark.parametrize("change", ["another order", "another name", "one more", "a subclass"])
def test_dict_with_other_names(device, change):
    def run(wrap):
        m, made = types.SimpleNamespace(s={"a": square(device), "b": square(device, 2)}), []

        @wrap
        def f(x):
            y = x
            for name, one in m.s.items():
                y = y * 2 + one * (3 if name == "a" else 1)
            m.s = {name: torch.tanh(one + x) for name, one in m.s.items()}
            return y

        for k in range(24):
            made.append((f(square(device, k)).clone(), plain(dict(m.s))))
            if k in (7, 13, 18):
                a, b = square(device, k), square(device, k + 1)
                m.s = {
                    "another order": {"b": a, "a": b}, "another name": {"a": a, "z": b}, "one more": {"a": a, "b": b, "c": a + b},
                    "a subclass": collections.OrderedDict(a=a, b=b),
                }[change]  # fmt: skip
        return made, f

    assert cgt.stats(both(run)).replays >= 8


class Turned(Plain):
    pass


CHANGES = {
    "an attribute": lambda s, t: setattr(s, "h", t), "one more": lambda s, t: setattr(s, "more", t), "one less": lambda s, t: delattr(s, "c"),
    "another order": lambda s, t: (setattr(s, "c", vars(s).pop("c", t)), setattr(s, "h", vars(s).pop("h", t))), "a number": lambda s, t: setattr(s, "c", 2.0),
    "its class": lambda s, t: setattr(s, "__class__", Turned), "of the class": lambda s, t: setattr(Plain, "scale", Plain.scale + 1),
    "hides the class's": lambda s, t: setattr(s, "scale", 3), "a method": lambda s, t: setattr(Plain, "sign", lambda self: -1),
}  # fmt: skip


class Told(NamedTuple):
    h: torch.Tensor
    c: torch.Tensor

    def both(self):
        return self.h * GAIN[0], self.c


GAIN = [1]


@pytest.mark.parametrize("change", ["method", "what it reads"])
@pytest.mark.parametrize("make", [lambda one: [one], lambda one: {"told": one}], ids=["list", "dict"])
def test_methods_of_a_named_tuple_in_it_are_guarded(device, make, change, monkeypatch):
    def run(wrap):
        monkeypatch.setattr(Told, "both", Told.both)
        GAIN[0] = 1
        m, made = types.SimpleNamespace(s=make(Told(square(device), square(device, 2)))), []

        @wrap
        def f(x):
            (one,) = m.s if isinstance(m.s, list) else m.s.values()
            h, c = one.both()
            m.s = make(one._replace(h=torch.tanh(h + x), c=c * 0.5))  # no code names the class
            return h * 2 + c

        for k in range(24):
            made.append((f(square(device, k)).clone(), plain([*(m.s.values() if isinstance(m.s, dict) else m.s)])))
            if k in (9, 16) and change == "what it reads":
                GAIN[0] += 1
            elif k == 12:
                monkeypatch.setattr(Told, "both", lambda self: (self.c, self.h))
        monkeypatch.undo()
        return made, f

    assert cgt.stats(both(run)).replays >= 12


@pytest.mark.parametrize("change", CHANGES)
def test_object_that_somebody_changed_in_between(device, change, monkeypatch):
    def run(wrap):
        monkeypatch.setattr(Plain, "scale", 1)
        monkeypatch.setattr(Plain, "sign", lambda self: 1, raising=False)
        m, made = types.SimpleNamespace(s=Plain(square(device), square(device, 2))), []

        @wrap
        def f(x):
            s = m.s
            y = x * s.scale * s.sign() + s.h + getattr(s, "c", 1) + getattr(s, "more", 0) + len(vars(s))
            m.s = type(s)(torch.tanh(s.h + x), x * 0.5)
            return y

        @wrap
        def g(x):
            s = m.s
            y = x * s.scale * s.sign() + s.h + s.c
            m.s = Plain(torch.tanh(s.h + x), x * 0.5)
            return y

        for k in range(30):
            one = f if change in ("one more", "one less", "a number", "its class") else g
            made.append((one(square(device, k)).clone(), type(m.s).__name__, plain(vars(m.s))))
            if k in (9, 10, 17, 24):
                CHANGES[change](m.s, square(device, k + 1))
        return made, one

    s = cgt.stats(both(run))
    assert change in ("one more", "one less", "a number", "its class") or s.replays >= 8


def test_training_keeps_its_graph_and_runs_eagerly(device):
    """Of what autograd may save it matters which tensor it is. Without gradients the same function replays."""

    def run(wrap):
        m, made = types.SimpleNamespace(s=[square(device), square(device, 2)], w=square(device, 3).requires_grad_()), []

        @wrap
        def f(x):
            m.s = [torch.tanh(m.s[0] * m.w + x), m.s[1] * 0.5]
            return m.s[0].sum()

        for k in range(24):
            with torch.set_grad_enabled(k % 8 < 3):
                y = f(square(device, k))
                if y.requires_grad:
                    y.backward()
                    m.s = [m.s[0].detach(), m.s[1]]
            made.append((y.detach().clone(), plain(m.s), plain(m.w.grad)))
        return made, f

    assert cgt.stats(both(run)).replays >= 3


def test_call_that_fails_leaves_it_as_it_was(device):
    def run(wrap):
        m, made = types.SimpleNamespace(s=[square(device), square(device, 2)]), []

        @wrap
        def f(x, fails):
            s = m.s
            m.s = [torch.tanh(s[0] + x), s[1] * 0.5]
            if fails:
                s.append(x)
                raise ValueError
            return m.s[0] * 2

        for k in range(24):
            try:
                made.append(f(square(device, k), k % 5 == 4).clone())
            except ValueError:
                made.append(k)
            made.append(plain(m.s))
        return made, f

    assert cgt.stats(both(run)).replays >= 8


def test_another_function_reads_and_writes_it(device):
    def run(wrap):
        m, made = types.SimpleNamespace(s=[square(device), square(device, 2)]), []

        def turn(x):
            m.s = [torch.tanh(m.s[0] + x), m.s[1] * 0.5]
            return m.s[0] * 2

        def look(x):
            return x + m.s[0] * m.s[1]

        def write(x):
            m.s[1] = m.s[1] + x
            return x * 2

        turn, look, write = wrap(turn), wrap(look), wrap(write)
        for k in range(20):
            made.append([turn(square(device, k)).clone(), look(square(device, k)).clone(), write(square(device, k)).clone(), plain(m.s)])
        return made, turn

    assert cgt.stats(both(run)).replays >= 12


def test_nothing_is_kept_that_is_not_read_any_more(device):
    m = Cells(device)
    f = cgt.jit(m.forward)
    with torch.no_grad():
        for k in range(8):
            f(square(device, k))
        m.begin(device)
        first = weakref.ref(m.states[0][0])
        for k in range(3):
            f(square(device, k))
    gc.collect()
    assert first() is None
    assert cgt.stats(f).replays >= 6, cgt.explain(f)
    gone = weakref.ref(m)
    del m, f
    collect()
    assert gone() is None


@pytest.mark.parametrize("kind", ["list", "dict", "list of lists", "list in a tuple", "object", "objects in a list"])
def test_replays_that_leave_it_see_what_somebody_writes_to_it(device, kind):
    make, read = KINDS[kind]

    def innermost(s):
        while isinstance(s, (list, dict, tuple)) and not isinstance(next(iter(s.values()) if isinstance(s, dict) else iter(s)), torch.Tensor):
            s = next(iter(s.values())) if isinstance(s, dict) else s[0]
        return s if isinstance(s, (list, dict)) else vars(s)

    def run(wrap):
        m, made = types.SimpleNamespace(s=make(square(device), square(device, 2))), []
        x = square(device, 3)

        @wrap
        def f(x):
            a, b = read(m.s)
            if x.sum() > 0:
                m.s = make(torch.tanh(a + x), b * 0.5)
            return a * 2 + b

        for k in range(40):
            turns = k < 8 or k in (20, 21)
            made.append((f(x.copy_(square(device, k).abs() * (1 if turns else -1))).clone(), plain(m.s)))
            if not turns and k % 3 == 0:
                inside = innermost(m.s)
                inside[0 if isinstance(inside, list) else next(iter(inside))] = square(device, k)
        return made, f

    f = both(run)
    assert cgt.stats(f).replays >= 20, cgt.explain(f)


# --- beside the tensors ---------------------------------------------------------------------------


class Step(NamedTuple):
    h: torch.Tensor
    t: int
    rate: float
    mask: torch.Tensor | None
    mode: str


class Bare:
    def __init__(self, h, t, rate, mask, mode):
        self.h, self.t, self.rate, self.mask, self.mode = h, t, rate, mask, mode


FORMS = {
    "dict": (lambda *row: dict(zip(Step._fields, row, strict=True)), lambda s: s.values()), "tuple": (lambda *row: row, lambda s: s),
    "list": (lambda *row: [*row], lambda s: s), "named tuple": (Step, lambda s: s), "dataclass": (Stepped, lambda s: (s.h, s.t, s.rate, s.mask, s.mode)),
    "object": (Bare, lambda s: (s.h, s.t, s.rate, s.mask, s.mode)), "in a list": (lambda *row: [Step(*row)], lambda s: s[0]),
    "parted": (lambda h, t, *row: [(h, t), {"rest": row}], lambda s: (*s[0], *s[1]["rest"])),
}  # fmt: skip


def stepped(wrap, device, form, between=lambda m, k, make: None):
    """[what each call returned, and left], and the function: a step that counts and decays."""
    make, read = FORMS[form]
    m, made = types.SimpleNamespace(s=make(square(device), 0, 1.0, None, "a")), []

    @wrap
    def f(x):
        h, t, rate, mask, mode = read(m.s)
        y = torch.tanh(h + x * rate) * (t + 1 if mode == "a" else 2)
        m.s = make(y, t + 1, rate * 0.5, mask, mode)
        return y if mask is None else y * mask

    for k in range(24):
        between(m, k, make)
        made.append((f(square(device, k)).clone(), [plain(one) for one in read(m.s)]))
    return made, f


@pytest.mark.parametrize("form", FORMS)
def test_numbers_that_change_and_constants(device, form):
    f = both(lambda wrap: stepped(wrap, device, form))
    assert cgt.stats(f).replays >= 16 and cgt.stats(f).records <= 3, cgt.explain(f)


PUT = {
    "a number": lambda d: (square(d, 3), 7, 0.25, None, "a"), "of another kind": lambda d: (square(d, 3), 1.5, 2, None, "a"),
    "a flag": lambda d: (square(d, 3), True, 1.0, None, "a"), "minus zero": lambda d: (square(d, 3), 0, -0.0, None, "a"),
    "a large one": lambda d: (square(d, 3), 1 << 70, 1.0, None, "b"), "a tensor": lambda d: (square(d, 3), 1, 1.0, square(d, 4), "a"),
    "another word": lambda d: (square(d, 3), 1, 1.0, None, "b"), "nothing": lambda d: (square(d, 3), 1, 1.0, None, None),
}  # fmt: skip


@pytest.mark.parametrize("put", PUT)
@pytest.mark.parametrize("form", FORMS)
def test_others_are_put_there_in_between(device, form, put):
    def between(m, k, make):
        if k in (8, 9, 17):
            m.s = make(*PUT[put](device))

    both(lambda wrap: stepped(wrap, device, form, between))


def test_entries_are_written_in_between(device):
    def between(m, k, make):
        if k in (7, 15):
            m.s["t"] = 0
        elif k == 11:
            m.s["mode"] = "b"
        elif k == 13:
            m.s["h"] = square(device, 5)
        elif k == 18:
            m.s["more"] = 1
            del m.s["more"]

    f = both(lambda wrap: stepped(wrap, device, "dict", between))
    assert cgt.stats(f).replays >= 12, cgt.explain(f)


WRITES = {
    "its entry": lambda m, s: s.update(t=s["t"] + 1), "the old one's": lambda m, s: (setattr(m, "s", {**s, "t": s["t"] + 2}), s.update(t=-1)),
    "now and then": lambda m, s: s.update(t=0) if s["t"] > 4 else setattr(m, "s", {**s, "t": s["t"] + 1}),
    "another kind": lambda m, s: setattr(m, "s", {**s, "t": s["t"] + 1 if s["t"] < 5 else 0.5}), "one more": lambda m, s: setattr(m, "s", {**s, "n": 1}),
    "to another place": lambda m, s: (setattr(m, "also", s), setattr(m, "s", {**s, "t": s["t"] + 1})), "same": lambda m, s: setattr(m, "s", dict(s)),
    "a number read": lambda m, s: setattr(m, "s", {**s, "t": s["h"].sum().item()}), "by range": lambda m, s: [setattr(m, "s", {**s, "t": k}) for k in range(int(s["t"]) % 3 + 1)],
}  # fmt: skip


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("returns", ["what it computed", "the old one", "the new one", "its number"])
def test_call_writes_to_what_holds_numbers(device, write, returns):
    def run(wrap):
        m, made = types.SimpleNamespace(s={"h": square(device), "t": 0}, also=None), []

        @wrap
        def f(x):
            s = m.s
            y = s["h"] * 0.5 + x * s["t"]
            WRITES[write](m, s)
            m.s = {**m.s, "h": y}
            return {"what it computed": y, "the old one": s, "the new one": m.s, "its number": m.s["t"]}[returns]

        for k in range(24):
            made.append((plain(f(square(device, k))), plain(m.s), plain(m.also)))
        return made, f

    both(run)


def test_replace_of_a_dataclass(device):
    """It opens the whole object, so that nothing counts as only stored."""

    def run(wrap):
        m, made = types.SimpleNamespace(s=Stepped(square(device))), []

        @wrap
        def f(x):
            m.s = dataclasses.replace(m.s, h=torch.tanh(m.s.h + x), t=m.s.t + 1)
            return m.s.h * m.s.t

        for k in range(24):
            made.append((f(square(device, k)).clone(), plain([*vars(m.s).values()])))
            if k == 12:
                m.s = Stepped(square(device, 3), mode="b")
        return made, f

    f = both(run)
    assert cgt.stats(f).replays >= 12, cgt.explain(f)


@pytest.mark.parametrize("step", ["says", "does not"])
def test_results_and_states_that_are_kept(device, step):
    """What a program kept of a state stays as it was."""

    def run(wrap):
        m, kept = types.SimpleNamespace(s={"h": square(device), "t": 0}), []

        @wrap
        def f(x):
            m.s = {"h": torch.tanh(m.s["h"] + x), "t": m.s["t"] + 1}
            return m.s["h"] * m.s["t"]

        for k in range(20):
            if step == "says":
                cgt.step()
            kept.append((f(square(device, k)), m.s))
        return [(plain(y), plain(s)) for y, s in kept], f

    f = both(run)
    assert cgt.stats(f).replays >= 12, cgt.explain(f)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("also", ["nobody", "a second place", "now and then", "another kind"])
def test_program_puts_another_one_there_before_each_call(device, form, also):
    make, read = FORMS[form]

    def run(wrap):
        m, made = types.SimpleNamespace(s=None, also=None), []

        @wrap
        def f():
            h, t, rate, mask, _ = read(m.s)
            y = torch.tanh(h) * t + rate
            return (y if mask is None else y * mask), m.s is m.also

        for k in range(30):
            if also != "now and then" or k % 7 or not k:
                mask = square(device, 3) if also == "another kind" and k % 5 == 4 else None
                m.s = make(square(device, k), k, 0.5, mask, "a")
            if also == "a second place":
                m.also = m.s
            elif also == "now and then":
                m.also = m.s if k % 4 == 3 else None
            y, is_one = f()
            made.append((y.clone(), is_one))
        return made, f

    f = both(run)
    if also == "nobody":
        assert cgt.stats(f).replays >= 22 and cgt.stats(f).records <= 4, cgt.explain(f)
