"""Random programs, of what a test names: the text of a function, what is done between its calls, and what each call is given.

    replays = try_kinds(device, "sums", "draws")    200 programs of these kinds agree with eager; how many calls of each were replays

A program is drawn from `KINDS`. It runs jitted and not, side by side, each in a `World` of its own. After every call the result, the
arguments with their versions, random numbers, and all of the world are the same, bit for bit; and so is, at the end, every result
that was held all the while. CGT_PROGRAMS says how many to try.
"""

import collections
import dataclasses
import math
import os
import types
import weakref
from typing import Any, NamedTuple

import cgt_core as core
import torch
from helpers import STEPS, Stepped, identical, says_step, try_programs, values
from hypothesis import strategies as st

import cgt
from cgt.decide import sites


def square(device, seed=1):
    """A tensor of its own memory."""
    return values(device, 4, 4, seed=seed)


class Parts:
    """What runs eagerly in the middle of a call; every second value is rare."""

    def __init__(self, device):
        self.log, self.calls, self.flag, self.state, self.n, self.last = [], 0, False, torch.zeros(4, 4, device=device), 0, None

    @cgt.eager
    def look(self, z):
        self.calls += 1
        self.log.append(z.clone())  # eager hands out the tensor itself, which may be written
        self.log.append(torch.tensor(self.n) if self.last is None else self.last.clone())

    @cgt.eager
    def solve(self, z, c):
        self.calls += 1
        return {"z": z.flip(0) * c, "rest": (z[:2] + 1, self.calls % 9 == 0)}

    def solved(self, z, c):
        found = self.solve(z, c)
        return (found["z"] + found["rest"][0].sum()) * (0.5 if found["rest"][1] else 1)

    @cgt.eager
    def shapes(self, z):
        self.calls += 1
        return z[: 2 + (self.calls % 7 == 0)] * 2

    @cgt.eager
    def write(self, z):
        self.calls += 1
        if self.calls % 5:
            z[1:] += 1

    @cgt.eager
    def number(self, z):
        self.calls += 1
        return int(z[0, 0].item() > 2)

    @cgt.eager
    def turn(self, z):
        self.calls += 1
        self.flag = self.calls % 6 == 0

    @cgt.eager
    def bias(self, z):
        self.calls += 1
        if self.calls % 6 == 0:
            self.state.add_(1)

    @cgt.eager
    def join(self, a, b, c=1):
        return a.sin() + b * c

    @cgt.eager
    def within(self, given):
        return given["a"] * 2 + given["b"][0] * given["b"][1]

    @cgt.eager
    def spoil(self, z, c):
        z.mul_(0.5).add_(c)

    @cgt.eager
    def both(self, a, b):
        a.add_(1)
        return b.mul_(2).sum()

    @cgt.eager
    def fail(self, z):
        self.calls += 1
        if self.calls % 8 == 0:
            raise KeyError(self.calls)


class Named(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor

    def mean(self):
        return self.a * 0.5 + self.b * 0.5


class Other(Named):
    __slots__ = ()

    def mean(self):
        return self.a - self.b


class Bearer:
    def __init__(self, a, b):
        self.a, self.b = a, b

    def turned(self, x):
        return Bearer(torch.tanh(self.b + x), self.a * 0.5)


class Thing:
    """An object with a number and another object."""

    scale = 2

    def __init__(self, a, n=0, inner=None):
        self.a, self.n, self.inner = a, n, inner

    def __call__(self, x):
        return torch.tanh(x * self.scale + self.a)

    def told(self):
        return [type(self).__name__, self.a, self.n, self.inner and (self.inner is self or self.inner.a)]


class World:
    """What a function finds outside of its arguments: each kind of program has some of it."""

    def __init__(self, device, grad=True):
        self.device, self.drawn, self.grad = device, 0, grad
        self.a, self.b, self.c, self.h = (square(device, k) for k in (1, 2, 3, 7))
        self.rows, self.inside, self.pair = [square(device, 3)], {"c": square(device, 4)}, (self.a, self.b)
        self.s, self.t, self.two = (square(device, 5), square(device, 6)), (square(device, 8),), [(square(device, 9), square(device, 10))]
        self.named, self.Named, self.Other = Named(square(device, 16), square(device, 17)), Named, Other
        self.l, self.l2, self.d = [square(device, 18), square(device, 19)], [square(device, 20)], {"k": square(device, 21), "v": square(device, 22)}
        self.obj, self.obj2, self.Obj = Bearer(square(device, 27), square(device, 28)), Bearer(square(device, 29), square(device, 30)), Bearer
        self.p, self.q, self.box, self.shelf, self.Thing = *(Thing(square(device, k)) for k in (31, 32)), [Thing(square(device, 33))], {}, Thing
        self.dist = torch.distributions.Normal(square(device, 34), 1.0)
        self.st, self.tp, self.nest = {"h": square(device, 35), "t": 0, "done": False}, (square(device, 36), 3, None), [(square(device, 37), 1), (square(device, 38), 0.5)]
        self.sd, self.st2, self.State, self.changed = Stepped(square(device, 39)), {"h": square(device, 40), "t": 1, "done": True}, Stepped, dataclasses.replace
        self.deep = [(square(device, 23), square(device, 24)), (square(device, 25), square(device, 26))]
        self.grid, self.count = values(device, 2, 4, 4, seed=4), torch.zeros(3, dtype=torch.int64, device=device)
        self.part, self.memory = self.grid[1, 1:], torch.zeros(4, device=device)
        self.w = square(device, 11).requires_grad_()
        self.sgd = torch.optim.SGD([self.w], lr=0.1, momentum=0.9)
        self.m = torch.nn.Module()
        self.m.register_buffer("b", square(device))
        self.m.n, self.m.last = 0, None
        self.total, self.ema, self.best, self.scale, self.hits, self.seen, self.n, self.last = 0.0, 1.0, 0.0, 2.0, 0, 0, 0, None
        self.log, self.losses, self.other, self.inner = [], [], [], types.SimpleNamespace(total=0.0, last=None, losses=[])
        self.book, self.alias = {"a": [], "b": [], "n": 0, "x": {"a": []}}, {"a": []}
        self.parts, self.table = Parts(device), [0.5, 1.0, -0.25, 3.0]
        self.owned = square(device, 14)  # to which programs come by a weak reference
        self.line, self.known, self.weak = collections.deque([square(device, 12), square(device, 13)]), {square(device, 15)}, weakref.ref(self.owned)
        self.counters = {name: torch.tensor(2, dtype=getattr(torch, name)) for name in ("float32", "float64", "int64")}

    def fresh(self):
        self.drawn += 1
        return square(self.device, self.drawn)

    def note(self, value):
        self.losses.append(value.item())

    def note_number(self, number):
        self.losses.append(number)

    def now(self):
        """All that a call can change."""
        module, momentum = self.m, [s["momentum_buffer"] for s in self.sgd.state.values()]
        kept = {name: value for name, value in vars(self).items() if name not in ("device", "sgd", "m", "inner", "parts", "weak", "obj", "obj2", "p", "q", "box", "shelf", "dist", "sd")}
        kept.update(line=list(self.line), known=list(self.known), one=(self.l is self.l2, self.d is self.last, self.obj is self.obj2))
        things = [self.p, self.q, *self.box, *self.shelf.values()]
        kept.update(things=[one.told() for one in things], which=[one is other for one in things for other in things], dist=vars(self.dist), sd=vars(self.sd))
        return [kept, vars(self.inner), vars(self.obj), vars(self.obj2), vars(self.parts), [module.b, module.n, module.last], momentum, self.w.grad]


# --- what programs contain ------------------------------------------------------------------------

VALUES = ("x.sum()", "x.mean()", "x.max()", "x[0, 0]", "x.sum().double()", "(x > 0).any()")
COUNTS = ("x.argmax()", "(x > 0).sum()", "(x.sum() > 0)")
FLOATS = ("x.sum()", "x.mean()", "x[0, 0]", "o.memory.norm()", "x.double().mean()", "x.max().half()")
TESTS = (
    "o.a.sum() > {t}", "(z > {t}).any()", "o.count[0] % 3 == 1", "(x > {t}).all()", "o.w.sum() > o.grid.sum()", "o.part.max() > {t}",
)  # fmt: skip
IF = "if {test}:"
HALVES = st.just([("fresh", k // 2, 0) for k in range(8)])


def refilled(n):
    """24 calls, whose argument is one tensor with so many contents."""
    return st.just([("refilled", k % n, 0) for k in range(24)])


class Kind(NamedTuple):
    """Something that programs may do. {value} and its like stand for one of the words of that name."""

    lines: str  # of the function, with | between them: of a world o, tensors x, y and z, numbers n, m and k, and a list out
    head: str = "z, v, n, m = y + 1, y[:2], 0, 1.0"  # what comes first
    value: tuple = VALUES
    between: str = "pass"  # what may be done with o and the last result r between two calls
    calls: Any = HALVES  # of lists of (how the argument comes, seed, k)
    results: str = "x, out"
    depth: int = 0  # of blocks in blocks,
    opens: tuple = (IF,)  # which begin so
    grads: tuple = (True, False)  # is grad mode on?
    beside: str = ""  # another function of x, called behind each call


KINDS = {
    # Arithmetic with numbers that it only keeps or hands out.
    "sums": Kind(
        """
        o.total += {value}.item() | o.total -= {value}.item() * 2 | o.ema = 0.9 * o.ema + 0.1 * {value}.item()
        o.hits += {count}.item() | n = {value}.item() | n = n * 2 - 1 | n = -n | m = n | o.total = o.total + n | o.total += n / 3
        o.last = n | o.log.append(n + 1) | out.append(n - m) | out.append(o.total) | o.total = 0.0 | o.total *= 0.5 | o.seen += 1
        o.total += o.seen | o.total += n * o.seen | x = x * 2 | x = x * n | x.mul_(0.5) | if n > 0: o.total += n
        if {value} > 0: x = x + 1 | o.last = o.ema | o.inner.total += n | o.inner.last = n * n | o.log.append(f'{{n}}') | n = o.ema * n
        n += 1 | o.hits += {count}.item() + {count}.item()
        """,
        head="n = m = x.sum().item()",
    ),
    # Numbers that it reads only to keep them.
    "kept": Kind(
        """
        o.losses.append({value}.item()) | o.other.append(float({value})) | o.last = {value}.item() | o.last = float({value})
        o.inner.last = {value}.item() | n = {value}.item() | n = float({value}) | o.losses.append(n) | o.last = n | out.append(n)
        o.other.append((n, 1)) | o.other.append([{value}.item(), n]) | o.last = {{'n': n}} | o.best += n | if n > 0: o.losses.append(n)
        x = x * 2 | o.note({value}) | o.note_number(n) | if {value} > 0: x = x + 1 | out.append(o.last) | o.other = []
        o.inner.losses.append(n) | x.mul_(0.5)
        """,
        head="n = x.sum().item()",
        value=(*VALUES[:-1], *COUNTS[:2]),
    ),
    # Lists in a dict, to which it appends; and other ways to come to them.
    "logged": Kind(
        """
        o.book['a'].append({value}.item()) | o.book['b'].append(n) | o.book['a'].append(x * 1) | o.book['a'].append((n, x.sum()))
        o.book['b'].append(len(o.losses)) | o.book['n'] += 1 | o.losses.append(n) | x = x * 2 | x = torch.tanh(x) | n = {value}.item()
        o.book['x']['a'].append(n) | o.book['x']['a'].append(x * 3) | o.other.append(x * 2) | x = x + len(o.other) % 3
        if {value} > 0: x = x + 1 | if n > 0: o.book['b'].append(1) | o.book['a'].append(o.book['n']) | o.book['b'].append(2.5)
        """,
        head="n = x.sum().item()",
        between="""
        pass | pass | pass | o.book['a'].clear() | o.book['b'] = [] | o.book = {{'a': [], 'b': [3], 'n': 2, 'x': {{'a': []}}}} | o.book['x'] = {{'a': [1]}} | o.book['n'] = 7
        o.book['a'].append(r) | o.losses = [] | o.book['b'].pop() if o.book['b'] else 0 | o.losses = o.other | o.other = o.losses | o.other = []
        o.book['b'] = o.losses | o.book['a'] = o.other | o.book['a'] = []
        """,
        calls=refilled(4),
        results="x * 1",
    ),
    "read back": Kind(
        """
        o.book['a'].append({value}.item()) | o.book['b'].append(n) | x = x * 2 | n = {value}.item() | n = len(o.book['a'])
        k = len(o.alias['a']) | o.alias = o.book | o.book['b'] = o.book['a'] | x = x + len(o.book) | d = o.book; d['a'].append(1)
        x = x + len(list(o.book.values())[0]) % 3 | for v in o.book.values(): n = n + (len(v) if hasattr(v, '__len__') else v)
        o.book['x']['a'].append(n) | x = x + len(o.book['x']['a']) | d = o.book['x']; d['a'].append(2) | o.alias = o.book['x']
        x = x + (1 if o.book['b'] else 2) | x = x + sum(o.book['b'][-1:]) | o.book.setdefault('c', []).append(1) | o.book['n'] = n
        """,
        head="n = x.sum().item()",
        between="pass | pass | o.alias = o.book | o.book['x'] = {{'a': o.book['b']}} | o.alias = o.book['x'] | o.alias = {{'a': o.book['a']}} | o.book['b'] = o.book['a'] | o.book['a'] = []",
        calls=refilled(4),
        results="x * 1, n",
    ),
    # Numbers with which it computes on the way.
    "computed": Kind(
        """
        n = {value}.item() | n = n * 0.5 + 1 | n = m - n | m = n | m = max(n, 0.25) | n = abs(n) + 0.5 | n = 1 / (m * m + 1)
        n = math.exp(-abs(n)) | x = x * n | x = x + m | x = x / (n * n + 1) | x = x * 0.5 | o.memory.add_(n) | o.memory.mul_(0.5)
        o.memory.copy_(x[0]) | o.scale = n | n = o.scale | o.log.append(n) | out.append(n) | out.append(x.sum().item())
        if n > {t}: x = x - 1 | if n < m: m = {value}.item() | if {value}.item() > {t}: n = n + 1 | x = x + torch.rand_like(x)
        if (x > {t}).all(): x = x * n | o.total += {value}.item() | o.last = n > m
        """,
        head="n, m = x.mean().item(), 1.0",
        value=FLOATS,
        calls=st.just([("fresh", k % 7, 0) for k in range(12)]),
    ),
    # Values that are read behind writes to memory from outside, gradients and an optimizer.
    "undone": Kind(
        """
        o.a.add_(x) | o.a[{i}] = x[{i}] | o.a[1:3].mul_(0.5) | o.grid[0].copy_(o.a) | o.part.add_(1) | o.grid.mul_(0.9)
        o.count[{i} % 3] += 1 | z = z * 0.5 + o.a | z = z + torch.rand_like(z) | z = z - o.w.detach() | o.a.add_(torch.rand_like(x))
        z = z * int((o.a > 0).sum()) | o.w.grad = None | o.sgd.zero_grad() | ((o.w * z.detach()).sum() * 0.1).backward() | o.sgd.step()
        o.last = z.detach() * 2 | z = z + o.count.sum() | z = z.clone().index_fill_(0, (o.a > z).nonzero()[:, 0], 0.25) | z.add_(1)
        x = x * 0.9 | o.part.copy_(z.detach()[1:])
        """,
        head="z = x * 1",
        calls=st.lists(st.integers(0, 4).map(lambda k: ("shifted", k, 0)), min_size=14, max_size=14),
        results="z.detach()",
        depth=2,
        grads=(True,),
    ),
    # Arguments that are written and lie elsewhere at each call, or share bytes.
    "carried": Kind(
        """
        x.add_(y) | y.mul_(0.5) | x.copy_(z) | z = x * 2 | z = z + y | v = x[:2] | v.add_(1) | x[0] = 3.0 | y.sub_(x) | z = z.sin_()
        y[1:].copy_(x[:3]) | o.h.add_(x) | z = o.h + z | o.h = z.clone() | x.zero_() | if x.sum() > 0: y.add_(1)
        z = z / (1 + abs(x.sum().item())) | z = torch.cat([x, y])[:4] | out.append(x) | out.append(v) | out.append(z.clone())
        """,
        calls=st.lists(
            st.sampled_from(["fresh", "fresh", "fresh", "kept", "same", "overlap", "rows"]), min_size=8, max_size=8
        ).map(lambda hows: [(how, k, 0) for k, how in enumerate(hows)]),
        results="out, z",
    ),
    # Tensors in places that are replaced, by the function and between its calls.
    "followed": Kind(
        """
        x = torch.tanh(x + o.a) | x = torch.tanh(x * o.b) | x = torch.tanh(x - o.rows[0]) | x = torch.tanh(x.sin() + o.inside["c"])
        x = torch.tanh(x + o.pair[0]) | x = torch.tanh(x + o.a.add_(0.5)) | x = torch.tanh(x + o.inside["c"].mul_(0.5))
        o.a = torch.tanh(o.a + x); x = torch.tanh(x + 1) | o.inside.update(c=o.inside["c"] * x); x = torch.tanh(x)
        o.rows[0] = x * 0.5; x = torch.tanh(x) | o.b = x; x = torch.tanh(x) | o.a, o.b = o.b, o.a
        o.a = o.a * 0.5; o.a = o.a * 0.5; x = x + [o.a].count(o.a) | x = x * o.a.shape[0] | x = x + 1 if o.a is o.b else x - 1
        x = torch.tanh(x + o.b.t()) | o.a, o.b, o.rows[0] = o.b, o.rows[0], x * 0.5; x = torch.tanh(x) | o.b = o.a; o.a = x; x = torch.tanh(x)
        o.inside["c"], o.a = o.a, o.inside["c"] * 0.9 | o.pair = o.pair[1], o.a | o.b.copy_(o.a * 0.5 + x); o.a, o.b = o.b, o.a
        """,
        between="""
        o.a = o.fresh() | o.b = r | o.rows[0] = o.fresh() | o.inside["c"] = r.clone() | o.a, o.b = o.b, o.a | o.a = o.b | o.a = o.b[:]
        o.pair = o.b, o.a | o.a = o.pair[0] | o.b = o.fresh()[:1].clone() | pass | o.a = r | o.b = o.b.t()
        """,
        calls=refilled(5),
        results="x * 2",
    ),
    # Tuples of tensors in places.
    "tuples": Kind(
        """
        x = torch.tanh(x + o.s[0] * o.s[-1]) | x = torch.tanh(x * o.t[0]) | x = torch.tanh(x - o.a) | x = torch.tanh(x + o.two[0][1])
        o.s = torch.tanh(o.s[-1] + x), o.s[0] * 0.5 | o.t = (o.t[0] * x,) | o.two[0] = x * 0.5, o.two[0][0] | o.a = o.a * 0.5 + x
        o.t = (x,); x = torch.tanh(x) | o.t = o.s[-1:] | o.n = o.n + 1 | x = torch.tanh(x + o.s[0].mul_(0.5))
        o.named = o.named._replace(b=x * 0.5); x = torch.tanh(x) | o.named = o.Named(o.named.b, o.a + x) | x = torch.tanh(x + o.named.mean())
        o.s, o.named = o.named[::-1], o.named._make(o.s) | x = torch.tanh(x * o.named.a)
        x = x + 1 if o.s[0] is o.a else x - 1 | x = torch.tanh(x * len(o.s)) | x = torch.tanh(x * (2 if o.s is o.two[0] else 1))
        """,
        between="""
        o.s = o.fresh(), o.fresh() | o.t = (r,) | o.two[0] = r.clone(), o.fresh() | o.s = o.s[::-1] | o.s = o.two[0]
        o.s = o.s[0], o.s[0] | o.a = o.s[0] | o.s = o.a, r | o.s = o.s[:1] | pass | o.t = (o.fresh()[:1].clone(),) | o.t = (o.t[0][:],)
        o.s = r, r.clone() | o.named = o.Other(*o.named) | o.named = o.Named(o.fresh(), r) | o.named = o.Named(r, r) | o.s = o.named
        """,
        calls=refilled(5),
        results="x * 2",
    ),
    # Lists and dicts of tensors in places, made anew, written, and handed on.
    "renewed": Kind(
        """
        x = torch.tanh(x + o.l[0] * o.l[-1]) | x = torch.tanh(x * o.d["k"] + o.d["v"]) | x = torch.tanh(x - o.deep[0][1]) | x = torch.tanh(x + o.a)
        o.l = [torch.tanh(o.l[-1] + x), o.l[0] * 0.5] | o.d = {{"k": o.d["v"] * 0.5, "v": torch.tanh(x + o.d["k"])}}
        o.deep = [(a * 0.5, torch.tanh(b + x)) for a, b in o.deep] | o.deep = [*o.deep[1:], (x * 0.5, o.l[0] * x)] | o.l = [x * 0.5, o.d["k"] * x]
        o.l[0] = o.l[0] * 0.5 + x | o.d["k"] = torch.tanh(x + o.d["v"]) | o.l = o.l[::-1] | o.l = [o.l[0].mul_(0.5), x * 2] | o.a = o.l[0]
        o.l, o.l2 = o.l2, o.l | o.l2 = o.l | o.l = [*o.l2] | o.last = o.d | o.d = dict(o.d) | o.d = {{**o.d, "v": x * 0.25}}
        x = x + 1 if o.l is o.l2 else x - 1 | x = torch.tanh(x * len(o.l)) | x = torch.tanh(x + sum(o.d.values())) | o.l = [x]
        x = torch.tanh(x + o.l2[0]) | o.l2 = [x * 0.5] | o.obj = o.obj.turned(x) | o.obj = o.Obj(x * 0.5, o.obj.a + x) | x = torch.tanh(x + o.obj.b)
        o.obj2 = o.obj | o.obj, o.obj2 = o.obj2, o.obj | o.obj2 = o.Obj(x * 0.25, x) | o.obj = o.obj2 | if x.sum() > 0: o.obj = o.Obj(x * 2, x + 1)
        o.obj.a = o.obj.a * 0.5 + x | o.deep = [(o.obj.a + x, x * 2)] | out.append([*o.l]) | out.append(o.d["k"]) | if x.sum() > 0: o.l = [x * 2, x + 1]
        """,
        between="""
        o.l = [o.fresh(), o.fresh()] | o.l.append(r) | o.l[0] = o.fresh() | o.l.reverse() | o.l = o.l2 | o.l2 = o.l | o.l = [r, r]
        o.d["k"] = r | o.d = {{"v": r, "k": o.fresh()}} | o.d["more"] = o.fresh() | o.d.pop("more", None) | o.deep[0] = (r, o.fresh())
        o.deep.append((o.fresh(), r.clone())) | o.deep.pop(0) if len(o.deep) > 1 else 0 | pass | o.l = [o.d["k"], o.fresh()] | o.a = o.l[0]
        o.obj = o.Obj(r, o.fresh()) | o.obj.a = r | o.obj.more = o.fresh() | vars(o.obj).pop("more", None) | o.obj.b = o.obj.a | o.obj2 = o.obj
        """,
        calls=refilled(5),
        results="x * 2 | x, out",
    ),
    # The same with numbers, flags and None beside the tensors.
    "states": Kind(
        """
        o.st = {{"h": torch.tanh(o.st["h"] + x), "t": o.st["t"] + 1, "done": False}} | o.st = {{**o.st, "h": x * 0.5}} | o.st["t"] += 1 | o.st["h"] = x
        x = torch.tanh(x + o.st["h"] * o.st["t"]) | x = torch.tanh(x * o.sd.rate + o.sd.h) | x = x - o.tp[0] * o.tp[1] | if not o.st["done"]: x = x * 0.5
        o.sd = o.State(torch.tanh(o.sd.h + x), o.sd.t + 1, o.sd.rate * 0.5) | o.sd = o.changed(o.sd, h=x * 2, t=o.sd.t + 2) | o.sd.t += 1 | o.sd.rate = 0.25
        o.tp = torch.tanh(o.tp[0] + x), o.tp[1] + 1, None | o.tp = x * 0.5, o.sd.t, o.tp[2] | o.nest = [(h * 0.5 + x, n + 1) for h, n in o.nest] | o.sd.mask = x
        o.nest = [*o.nest[1:], (x * 0.25, o.st["t"])] | x = torch.tanh(x + o.nest[0][0] * o.nest[0][1]) | if o.st["t"] > 3: o.st = {{"h": x, "t": 0, "done": True}}
        if {test}: o.sd = o.State(x * 2, 0, 1.0) | if o.sd.t % 3 == 2: x = x + 1 | if o.sd.mask is None: x = x * 0.5 | out.append(o.st["t"]) | out.append(o.sd.rate)
        o.st, o.st2 = o.st2, o.st | o.st2 = o.st | o.st = dict(o.st) | o.st2 = {{"h": x, "t": o.st["t"] * 2, "done": o.st["done"]}} | x = torch.tanh(x + o.st2["h"] / (o.st2["t"] + 3))
        o.st = {{"h": x, "t": {value}.item(), "done": False}} | o.tp = o.tp[0] * 0.5, {value}.item(), None | n = o.st["t"] | x = x * n | out.append(o.tp) | out.append(o.sd.h)
        """,
        value=("x.sum()", "(x > 0).sum()"),
        between="""
        o.st = {{"h": r, "t": 2, "done": False}} | o.st["t"] = 5 | o.st["done"] = not o.st["done"] | o.st["h"] = o.fresh() | o.st["t"] = 0.5 | o.st.update(done=None) | o.st = {{"done": False, **o.st}}
        o.sd = o.State(r, 1) | o.sd.t = 0 | o.sd.rate = 2 | o.sd.mode = "b" | o.sd.mask = o.fresh() | o.sd.mask = None | o.tp = o.fresh(), 2, None | o.tp = o.fresh(), 2.5, o.fresh()
        o.nest[0] = (r.clone(), 2) | o.nest.append((o.fresh(), 1.5)) if len(o.nest) < 3 else o.nest.pop() | o.st2 = o.st | o.st = o.st2 | pass | o.tp = o.tp[0], True, None
        """,
        calls=refilled(5),
        results="x * 2 | x, out",
    ),
    # Objects in places, of which some are replaced before anybody looks, handed on, changed, and called.
    "objects": Kind(
        """
        o.p = o.Thing(x * 2) | o.q = o.Thing(torch.tanh(x), 3) | o.p = o.Thing(o.p.a * 0.5 + x) | o.q = o.Thing(x, o.q.n + 1) | o.q = o.p | o.p = o.q
        o.p, o.q = o.q, o.p | o.box[0] = o.p | o.box = [o.q] | o.shelf["p"] = o.p | o.p = o.shelf.get("p", o.q) | o.p = o.box[0] | o.q = o.Thing(x, 1, o.p)
        o.p, o.q = o.q, o.p; o.p.n += 1; o.q.n += 10 | o.box.reverse(); o.box[0].n += 1; o.box[-1].n += 10 | x = x * (o.p.n + o.box[0].n)
        o.p.a = o.p.a * 0.5 + x | o.p.n += 1 | o.q.n = 2 | o.p.inner = o.q.inner | o.q.inner = None | x = o.p(x) | x = torch.tanh(x + o.q.a) | x = x * 0.5
        if {test}: o.p = o.Thing(x * 2, 1) | if {test}: o.q = o.p | x = x + o.p.n | x = x + (1 if o.p is o.q else 0) | x = x + len(o.shelf)
        o.dist = torch.distributions.Normal(torch.tanh(x), 1.0, validate_args=False) | x = torch.tanh(o.dist.log_prob(x)) | x = x + o.dist.mean * 0.5
        out.append(o.p.a) | out.append(o.q.a * 2) | y = o.p.a if o.p.inner is None else o.p.inner.a | x = torch.tanh(x + y) | o.p.a.mul_(0.5)
        """,
        value=("x.sum()", "x.mean()"),
        between="""
        o.p = o.Thing(o.fresh()) | o.q = o.Thing(r, 1) | o.q = o.p | o.p.a = o.fresh() | o.p.n += 1 | o.q.inner = o.Thing(r) | o.shelf.clear() | o.p, o.q = o.q, o.p
        o.box.append(o.Thing(r)) if len(o.box) < 3 else o.box.pop() | o.p.a = o.q.a | pass | o.box[0] = o.q
        """,
        calls=refilled(5),
        results="x * 2 | x, out",
    ),
    # Values read on the way, ops between graphs, random numbers, counters, stores, writes, and a second function.
    "mixed": Kind(
        """
        o.a = torch.tanh(o.a + x); x = torch.tanh(x) | x = x * 2 if o.c.sum() > 0 else x - 1
        x = torch.tanh(x + torch.rand(4, 4, device=x.device))
        x = torch.tanh(x + torch.linalg.svdvals(o.a.detach() + x.detach()) * 0.1) | o.m.n = o.m.n + 1 | o.m.last = x * 2
        x = torch.tanh(x + o.a) | x = torch.tanh(x * o.m.b) | o.m.b = torch.sin(o.m.b * x); x = torch.tanh(x)
        o.c = x; x = torch.tanh(x) | x = torch.tanh(x + o.c.mul_(0.5).sum()) | o.rows[0] = x * 0.5; x = torch.tanh(x + o.rows[0])
        """,
        between="""
        pass | o.a = r.detach() * 0 + 0.3 | o.c = r.detach() | o.m.b = o.m.b.clone() | o.a, o.c = o.c, o.a | o.c = o.a
        o.grad = not o.grad
        """,
        calls=refilled(4),
        results="x + 0",
        grads=(False,),
        beside="x + o.a.sum() + o.m.b",
    ),
    # Numbers that it hands out, in all kinds of results.
    "handed out": Kind(
        """
        n = {value}.item() | n = z.mean().item() > 0.1 | n = (z > 0).any().item() | m = z.sum().item() | m = {value}.tolist()
        z = z + (n if isinstance(n, int) else 0) % 2 | z = z if n else z + 1 | z = z * 2 if z.sum().item() > 1 else z - 1 | z = z * 2
        z = z + x | z = torch.tanh(z) | z = z.clone().mul_(0.5) | z = z - z.mean() | for _ in range(k): z = z * 0.5
        if k > 1: n = {value}.item() | if k > 1: z = z - 1
        """,
        head="z = x | n, m = x.sum().item(), z",
        value=(*VALUES[:4], *COUNTS[:2], "z.argmax()"),
        calls=st.lists(st.integers(0, 3), min_size=4, max_size=8).map(
            lambda drawn: [("nudged", n, n % 3) for n in (*drawn, 1, 1, 1, 1)]
        ),
        results="n, z + 0 | (n, m), z + 0 | [m], z + 0 | {{'a': n, 'b': m}}, z + 0 | [(n, 1), m], z + 0",
        depth=1,
        opens=(IF, "for _ in range(k):", "with torch.no_grad():"),
    ),
    # Tensors of one number on the host, in which it counts.
    "counted": Kind(
        """
        o.counters['{dtype}'] += {number} | o.counters['{dtype}'] -= {number} | o.counters['{dtype}'] *= {number}
        o.counters['{dtype}'] /= {number} | o.counters['{dtype}'] += k | o.counters['{dtype}'] += o.counters['{dtype}'].item()
        z = z * o.counters['{dtype}'].item() + {number} | z = z + 1 if o.counters['{dtype}'].item() > {number} else z - 1
        z = z * o.counters['{dtype}'] | torch._foreach_add_([o.counters['{dtype}'], o.counters['float64']], 1)
        o.counters['{dtype}'].zero_() | z = z + (1 - 0.9 ** o.counters['{dtype}'].item()) ** 0.5
        """,
        head="z = x.double()",
        between="pass | pass | o.counters['{dtype}'].fill_({i})",
        calls=st.sampled_from([0.5, 2]).map(lambda a: [("refilled", 0, a + k) for k in range(9)]),
        results="z * 1",
    ),
    # Rows of tensors and entries of lists that a tensor chooses, which may be written, kept and handed out.
    "chosen": Kind(
        """
        z = z + x[{at}] | z = z * o.a[{at}] | z = z + (o.b * 2)[{at}] | z = z + o.rows[0][None, {at}] | z = z + o.a[:, {at}][:, None] | z = z + o.a.t()[{at}]
        z = z + o.a[{at}, 1:3].sum() | z = z + o.table[{at}] | z = z * o.table[{at}.item()] | z = z + o.a[{at}.item()] | z = z + o.a[n] | z = z * o.table[n]
        n = {at}.item() | n = (n + 1) % 4 | n = -n | n = {at}.item() - 1 | at = {at} | at = (at + 1) % 4 | z = z + n | out.append(n) | out.append(z[{at}].clone())
        o.a.mul_(0.5) | o.b = torch.tanh(o.b + z) | o.a[{at}] = x[{i}] | o.a[n] = x[{i}] * 1 | v = o.a[{at}]; v.add_(1) | o.table[n] = 0.5 | o.last = o.a[{at}]
        for s, k in ((o.table, at), (z, {i}), (z, at), (o.table, {i})): z = z + s[k] | z = z + o.a[[{at}, {at}]].sum() | z = z + o.a[{at} : {at} + 1]
        if n > {i}: z = z + 1 | out.append(o.a[{at}]) | z = z + o.a[{at} + 2] | z = z + o.w[{at}].detach() | z = z + len(o.table[: {at}])
        """,
        head="z, at = torch.tanh(x), x[0].argmax() | n = at.item()",
        between="pass | pass | pass | o.a = o.fresh() | o.table = [0.25, 0.5, -1.0, 2.0] | o.table.reverse()",
        calls=st.just([("fresh", k % 7, 0) for k in range(14)]),
        results="z + 0 | z + 0, n | z + 0, out",
    ),
    # Memory that comes to depend on x, or never does, and reads of either.
    "constants": Kind(
        """
        parts[{i}] = parts[{j}] * 2 + {i} | parts[{i}].add_(parts[{j}]) | parts[{i}][{j}:] *= 0.5 | parts[{i}].copy_(parts[{j}])
        parts[{i}] = parts[{j}][(torch.arange(4, device=x.device) % ({i} + 2)).nonzero()[:, 0]].mean() + parts[{i}]
        m += parts[{i}].sum().item() | parts[{i}] = parts[{i}] + x[0] | parts[{i}][{j}] = x[0, {i}]
        """,
        head="parts = [torch.arange(4.0, device=x.device) + k for k in range(4)] | m = 0.0",
        results="[p * 1 for p in parts], x + m",
    ),
    # Parts that run eagerly, and fail, write, change what others read, or give something else now and then.
    "parts": Kind(
        """
        z = (z + {i}).sin() | z[0] = z[1] * {i} | z = z + torch.linalg.svdvals(z.detach()) * 0.1 | o.parts.look(z[{i}:])
        z = o.parts.solved(z, {i}) | z = z + o.parts.shapes(z).sum() | o.parts.write(z) | z = z * (1 + o.parts.number(z)) | o.parts.turn(z)
        z = z - 1 if o.parts.flag else z + 1 | z = z * 2 if o.parts.flag else z | z = z + o.parts.state | o.parts.bias(z) | o.parts.fail(z)
        z = z + {i} if z.sum() > 0 else z - {i} | o.parts.n += 1 | o.parts.last = z.detach() * {i} | o.parts.state.add_(z.detach())
        """,
        head="z = x * 2",
        calls=st.just([("refilled", k % 5, 0) for k in range(16)]),
        results="z",
    ),
    # Parts of several arguments, from outside and made in the call, also inside of containers, which they may write.
    "handed in": Kind(
        """
        z = z + o.parts.join(x, z) | z = o.parts.join(z, z, {i}) | z = z + o.parts.join(x, b=y) | z = o.parts.join(z + 1, x * {i}) | z = z * x
        z = z + o.parts.within(dict(a=x, b=[z, {i}])) | z[{i}] = z[1] * {i} | z = z + o.parts.within(dict(b=(z, x), a=y)) | o.parts.spoil(z, {i})
        z = z + o.parts.join(v, v * 2).sum() | z = z.sin() | z = z + {i} if z.sum() > 0 else z - {i} | z = z + o.parts.join(y, z, c={i})
        """,
        head="z = x * 2 | v = y[1:3]",
        results="z, x * 1",
    ),
    "written by parts": Kind(
        """
        o.parts.spoil(x, {i}) | o.parts.spoil(v, {i}) | o.parts.spoil(z, {i}) | o.parts.spoil(x[:2], {i}) | z = z + o.parts.join(x, z) | o.parts.spoil(o.a, {i})
        z = z * x | z = z + o.a | y.copy_(z) | x.add_(z.mean()) | z = o.parts.join(z, z, {i}) | z = z.sin() | o.a.mul_(0.5)
        z = z + o.parts.both(z, z) | z = z + o.parts.both(z, z[1:]) | z = z + o.parts.both(y, v) | z = z + o.parts.both(z, x * 1)
        """,
        head="z = x * 2 | v = y[1:3]",
        results="z, x * 1",
    ),
    # Tensors to which neither argument nor place leads.
    "hidden": Kind(
        """
        o.line[0].add_(x) | o.line[1].mul_(0.5) | o.line[1][1:].add_(z[1:]) | next(iter(o.known)).copy_(z) | o.weak().add_(z)
        z = z + o.line[0] | z = z * o.weak() | z = z + next(iter(o.known)) | x.add_(o.line[1]) | z = z.sin() | o.a.mul_(0.5)
        if {value} > 0: o.line[0].mul_(0.9) | z = z + o.line[0].sum().item() | o.line[0].t().add_(o.weak()) | out.append(o.line[1] * 2)
        """,
        head="z = x * 2",
        between="pass | pass | o.line[0].mul_(0.5) | o.weak().add_(1) | next(iter(o.known)).zero_()",
        results="z, x * 1",
    ),
}  # fmt: skip
WORDS = {
    "test": TESTS, "count": COUNTS, "t": ("0", "0.5", "0.7", "-1", "-1.5"), "i": "0123", "j": "0123", "dtype": ("float32", "float64", "float32", "float64", "int64"),
    "at": ("at", "at", "at", "x[1].argmax()", "(x[0, 0] > 0).long()", "(at - 1)"), "number": ("-3", "-1.25", "0", "0.5", "1", "2", "3"),
}  # fmt: skip


# --- programs -------------------------------------------------------------------------------------


class Program(NamedTuple):
    text: str  # of function(o, x, y, k)
    between: list
    calls: list
    steps: str
    grad: bool
    holds: int  # so many results
    beside: str


def lines_of(text):
    return [line.strip() for row in text.strip().splitlines() for line in row.split(" | ")]


@st.composite
def programs(draw, *names, most=7):
    """Programs of these kinds: lines of each, and the arguments, heads and results of the first."""
    kinds = [KINDS[name] for name in names]
    first, between = kinds[0], [line for kind in kinds for line in lines_of(kind.between)]
    pairs = [(line, kind) for kind in kinds for line in lines_of(kind.lines)]

    def filled(line, kind):
        """With a word for each name in it, which are drawn one by one."""
        for name, words in {"value": kind.value, **WORDS}.items():
            while "{" + name + "}" in line:
                line = line.replace("{" + name + "}", draw(st.sampled_from(words)), 1)
        return line.replace("{{", "{").replace("}}", "}")

    def block(depth, most):
        found = []
        for _ in range(draw(st.integers(1, most))):
            if not depth or draw(st.integers(0, 2)):
                found.append(filled(*draw(st.sampled_from(pairs))))
                continue
            opening = draw(st.sampled_from(first.opens))
            found += [filled(opening, first), *("    " + line for line in block(depth - 1, 4))]
            if opening == IF and draw(st.booleans()):
                found += ["else:", *("    " + line for line in block(depth - 1, 4))]
        return found

    heads = dict.fromkeys(line for kind in reversed(kinds) for line in (KINDS["carried"].head, *lines_of(kind.head)))
    body = [*heads, "out = []", *block(first.depth, most), "return " + filled(draw(st.sampled_from(lines_of(first.results))), first)]
    between = [filled(line, first) for line in draw(st.lists(st.sampled_from(between), min_size=1, max_size=5))]
    text = "\n    ".join(["def function(o, x, y, k):", *body])
    steps, grad, holds = (draw(st.sampled_from(some)) for some in (STEPS, first.grads, (0, 3, 99)))
    return Program(text, between, draw(first.calls), steps, grad, holds, first.beside)


# --- their judge ----------------------------------------------------------------------------------


def arguments(device, how, seed, k, kept):
    """(x, y) of call k. `kept`: those of calls that are given the same ones."""
    x, y = square(device, seed).clone(), square(device, seed + 40).clone()
    if how in ("kept", "refilled", "nudged"):
        kept = kept if how == "kept" else (kept[0].copy_(x), kept[1])
        if how == "nudged":
            kept[0][0, 0] = k * 0.25
        return kept
    if how in ("overlap", "rows"):
        base = values(device, 512, seed=seed)
        at = 8 if how == "overlap" else 256
        return base[:16].view(4, 4), base[at : at + 16].view(4, 4)
    return {"fresh": (x, y), "shifted": (x + (seed - 2), y), "same": (x, x)}[how]


LOST = "an eager part wrote outside, and the call went another way: told, and never wrong"


def outcome(call, *args):
    """What comes of a call: what it raises, too."""
    try:
        return call(*args)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return LOST if "The part cannot run again" in str(error) else (type(error).__name__, str(error)[:40])


def first_tensor(result, x):
    """Of a result, without a history."""
    found = [t for t in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(t, torch.Tensor)]
    return x if not found else found[0].detach() if found[0].requires_grad else found[0]


class Side:
    """One of the two that run a program."""

    def __init__(self, program, device, wrap):
        space = {"torch": torch, "math": math, "o": World(device, program.grad)}
        exec(program.text, space)
        self.f, self.o, self.program = wrap(space["function"]), space["o"], program
        self.beside = wrap(eval(f"lambda x: {program.beside or 'x'}", space))
        self.kept, self.held = (square(device, 5), square(device, 6)), []
        if device.type == "cpu" and "svdvals" in program.text and hasattr(self.f, sites.ATTRIBUTE):  # what a CUDA capture finds out
            getattr(self.f, sites.ATTRIBUTE).learnt.apart.add(torch.ops.aten._linalg_svd.default)

    def call(self, k, how, seed, number):
        """All that can be seen behind call k."""
        x, y = arguments(self.o.device, how, seed, k, self.kept)
        torch.manual_seed(k)
        with torch.set_grad_enabled(self.o.grad):
            result = outcome(self.f, self.o, x, y, number)
            other = self.beside(x) if self.program.beside else None
        drawn = torch.rand(1, device=self.o.device)
        self.held = [*self.held, (x, y, result)][-self.program.holds :] if self.program.holds else []
        return [result, other, x, y, x._version, y._version, drawn, self.o.now()], first_tensor(result, x)


def agrees(device, program):
    """How many calls of the program were replays; they, and all others, were as in eager."""
    mine, theirs = Side(program, device, cgt.jit), Side(program, device, lambda f: f)
    try:
        for k, given in enumerate(program.calls):
            if says_step(program.steps, k):
                cgt.step()
            (got, r), (want, q) = mine.call(k, *given), theirs.call(k, *given)
            if got[0] is LOST:
                assert "parts.bias" in program.text
                return cgt.stats(mine.f).replays
            assert identical(got, want), (k, program, cgt.explain(mine.f), got, want)
            line = program.between[k % len(program.between)]
            for side, last in ((mine, r), (theirs, q)):
                exec(line, {"torch": torch, "o": side.o, "r": last})
        assert identical(mine.held, theirs.held), (program, cgt.explain(mine.f))
        core.check_table()
        return cgt.stats(mine.f).replays
    finally:
        cgt.reset()


def try_kinds(device, *kinds, many=None, **options):
    """[replays] of so many programs of these kinds, which agree with eager."""
    replays, many = [], many or (80 if device.type == "cpu" else 60)
    check = lambda program: replays.append(agrees(device, program))  # noqa: E731
    try_programs(programs(*kinds, **options), check, int(os.environ.get("CGT_PROGRAMS", many)))
    return replays
