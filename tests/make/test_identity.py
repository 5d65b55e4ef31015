"""Which tensor an argument is: besides its bytes and metadata, it may be what another argument is, what a
variable or attribute holds, or somebody's .grad. A recording made when it was is no recording for when it is not,
and the other way round where gradients or writes tell the difference. All against an eager twin, bit for bit."""

import types

import pytest
import torch
from helpers import try_programs, values
from hypothesis import strategies as st

import cgt

MOVING = 10  # calls of a test; most must be replays


def both(run, device):
    """What run(wrap) gives eagerly and jitted, and the jitted function."""
    torch.manual_seed(0)
    _, want = run(lambda f: f)
    torch.manual_seed(0)
    f, got = run(cgt.jit)
    for k, (a, b) in enumerate(zip(want, got, strict=True)):
        assert (a is None) == (b is None), k
        assert a is None or torch.equal(a, b), k
    return f


def fresh(device, kept, **options):
    """Numbers at an address that no other has."""
    kept.append(torch.randn(4, 4).to(device).requires_grad_(**options) if options else torch.randn(4, 4).to(device))
    return kept[-1]


@pytest.mark.parametrize("when", [{0, 1, 2}, {1}, {1, 2, 5}, {3, 4}], ids=str)
@pytest.mark.parametrize("where", ["closure", "attribute", "list", "assigned"])
def test_argument_that_is_also_in_a_variable(device, where, when):
    def run(wrap):
        kept, out = [], []
        w = fresh(device, kept)
        holder = types.SimpleNamespace(w=w, many=[w])
        f = wrap(
            {
                "closure": lambda x: x * 2 + w,
                "attribute": lambda x: x * 2 + holder.w,
                "list": lambda x: x * 2 + holder.many[0],
                "assigned": lambda x: x * 2 + holder.w,
            }[where]
        )
        for k in range(MOVING):
            x = fresh(device, kept)
            if where == "assigned" and k in when:
                holder.w = x
            elif k in when:
                x = w
            out.append(f(x))
        return f, out

    s = cgt.stats(both(run, device))
    most = 2 * len(when) if where == "assigned" else 2
    assert s.records <= most and s.replays == MOVING - 1 - s.records and s.eager == 0


@pytest.mark.parametrize("when", [{1, 2, 3, 6}, {0, 1, 2, 3, 4, 8}, {5}], ids=str)
@pytest.mark.parametrize("through", ["argument", "closure"])
@pytest.mark.parametrize("renewed", [False, True], ids=["kept gradient", "new gradients"])
def test_argument_that_is_also_a_gradient(device, through, renewed, when):
    def run(wrap):
        kept, out = [], []
        p = fresh(device, kept, requires_grad=True)
        p.grad = fresh(device, kept)

        def scaled(g, *of):
            with torch.no_grad():
                return g * 2 + (*of, p)[0].grad

        f = wrap(scaled)
        for k in range(MOVING):
            if renewed:
                p.grad = fresh(device, kept)
            g = p.grad if k in when else fresh(device, kept)
            out.append(f(g, p) if through == "argument" else f(g))
        return f, out

    s = cgt.stats(both(run, device))
    if not renewed:  # a gradient that is read where it lies is a new recording wherever it moves
        assert s.replays >= 5 and s.eager == 0
    assert s.records >= 1


def twice(u, v, w):
    """Ops on x and y take turns, so that the order of their gradients shows."""
    return lambda x, y: x * u + y * v + x * w


@pytest.mark.parametrize("moving", [False, True])
@pytest.mark.parametrize("first", ["one tensor", "two tensors"])
@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
def test_one_tensor_as_two_arguments_and_two_over_one_memory(device, moving, first, inside):
    """Where the gradients go is not told by addresses."""

    def run(wrap):
        kept, out = [], []
        product = twice(*(fresh(device, kept) for _ in range(3)))

        def step(x, y):
            loss = product(x, y).square().sum()
            if inside:
                loss.backward()
            return loss.detach() if inside else loss

        f, z = wrap(step), fresh(device, kept, requires_grad=True)
        for k in range(2 * MOVING):
            if moving:
                z = fresh(device, kept, requires_grad=True)
            one = (k < MOVING) == (first == "one tensor")
            other = z if one else z.detach().requires_grad_()
            kept.append(other)
            z.grad = None
            loss = f(z, other)
            if not inside:
                loss.backward()
            out += [loss.detach(), z.grad, other.grad]
        return f, out

    s = cgt.stats(both(run, device))
    if moving:  # what lies over one memory cannot be copied apart
        assert s.records >= 2 and s.replays >= (4 if first == "one tensor" else 0), s.reasons
    else:
        assert s.replays >= 14, s.reasons


@pytest.mark.parametrize("history", [False, True], ids=["leaves", "results"])
def test_two_moving_arguments_that_become_one(device, history):
    def run(wrap):
        kept, out = [], []
        f = wrap(twice(*(fresh(device, kept) for _ in range(3))))
        for k in range(2 * MOVING):
            x, y = (fresh(device, kept, requires_grad=True) for _ in range(2))
            a, b = (x * 1.1, y * 1.1) if history else (x, y)
            if k >= MOVING:
                y, b = x, a
            kept += [a, b]
            f(a, b).square().sum().backward()
            out += [x.grad, y.grad]
        return f, out

    s = cgt.stats(both(run, device))
    assert (s.records, s.replays, s.eager) == (2, 2 * MOVING - 3, 0)
    assert s.backward.replays >= MOVING


@pytest.mark.parametrize("when", [{1, 2, 3}, {6, 7, 8}], ids=str)
def test_parameter_as_the_argument(device, when):
    def run(wrap):
        kept, out = [], []
        u, v = fresh(device, kept), fresh(device, kept)
        w = fresh(device, kept, requires_grad=True)
        f = wrap(lambda x: x * u + w * v + x * v)
        for k in range(MOVING):
            x = w if k in when else fresh(device, kept, requires_grad=True)
            if k == 9:  # its memory, but another tensor
                x = w.detach().requires_grad_()
                kept.append(x)
            w.grad = None
            f(x).square().sum().backward()
            out += [x.grad, None if w.grad is None else w.grad.clone()]
        return f, out

    s = cgt.stats(both(run, device))
    assert s.records <= 3 and s.replays >= 5 and s.eager == 0


@pytest.mark.parametrize("apart", ["first", "later", "now and then"])
@pytest.mark.parametrize("trained", [False, True], ids=["views returned", "trained"])
def test_parts_of_one_storage(device, trained, apart):
    """Where one part lies says nothing of where the other one does, at the next call."""

    def run(wrap):
        kept, out = [], []
        w = fresh(device, kept, requires_grad=True)
        scored = wrap(lambda x, y: (x @ w).tanh() + (y @ w.t()).sigmoid() * y)
        viewed = wrap(lambda x, y: (x * 2, y[1:]))
        whole = torch.randn(6, 4, 4).to(device)
        for k in range(2 * MOVING):
            other = torch.randn(6, 4, 4).to(device)
            kept.append(other)
            parted = {"first": k < 6, "later": k > 6, "now and then": k % 2 == 0}[apart]
            x, y = (whole[k % 5], whole[5]) if parted else (other[4], other[1])
            if k % 7 == 3:
                x, y = y, fresh(device, kept)
            if trained:
                w.grad = None
                scored(x, y).square().sum().backward()
                out.append(w.grad)
            else:
                out += [t.clone() for t in viewed(x, y)]
        return scored if trained else viewed, out

    s = cgt.stats(both(run, device))
    assert s.replays >= MOVING and s.eager == 0


class Kept:
    """What functions store in."""


def store(o, x, y):
    o.last = y
    return (o.a * 2,)


def store_variable(o, x, y):
    o.last = o.a
    return (o.a * 2,)


UNTOUCHED = {
    "returned": lambda o, x, y: (y, o.a * 2), "returned in turn": lambda o, x, y: (y, x), "of a variable": lambda o, x, y: (o.a, x),
    "stored": store, "stored from a variable": store_variable,
}  # fmt: skip


@pytest.mark.parametrize("use", UNTOUCHED.values(), ids=UNTOUCHED.keys())
@pytest.mark.parametrize("first", [(0, 0), (0, 1), (1, 1)], ids=str)
def test_arguments_that_are_handed_on_and_no_op_reads(device, use, first):
    def run(wrap):
        o = Kept()
        o.a, o.b, o.last = torch.zeros(3, device=device), torch.ones(3, device=device), None
        f, out = wrap(lambda x, y: use(o, x, y)), []
        for which in [*[first] * 3, *[(0, 0), (0, 1), (1, 0), (1, 1)] * 3]:
            given = f(*[(o.a, o.b)[k] for k in which])
            out += [t.clone() for t in given]
            assert o.last is None or o.last is o.a or o.last is o.b
            out.append(o.last if o.last is None else o.last.clone())
        return f, out

    assert cgt.stats(both(run, device)).replays >= 6


def test_memory_around_an_argument_that_moves_is_refused(device):
    def run(wrap):
        kept, out = [], []
        f = wrap(lambda x: x * 2 + x._base.sum())
        for _ in range(6):
            kept.append(torch.randn(6, 16).to(device))
            out.append(f(kept[-1][2]))
        return f, out

    s = cgt.stats(both(run, device))
    (reason,) = s.reasons
    assert s.replays == 0 and "reads memory outside of an argument that moves" in reason and __file__ in reason


def test_the_reason_tells_which_argument(device):
    w = values(device)
    jitted = cgt.jit(lambda x: x * 2 + w, max_records=1)
    for _ in range(4):
        assert torch.equal(jitted(w), w * 2 + w)
    alias = w.view_as(w)
    assert torch.equal(jitted(alias), w * 2 + w)
    assert cgt.stats(jitted).eager == 1
    (reason,) = cgt.stats(jitted).reasons
    assert "args[0] is at some calls the very tensor" in reason


# --- random programs: what is passed, and what else it is, changes from call to call ------------------

WHICH = st.sampled_from(
    ["moving", "a", "b", "w", "alias of a", "alias of w", "gradient of w", "moving part", "part 0", "part 1", "part 2"]
)
CALLS = st.lists(st.tuples(WHICH, WHICH, st.integers(0, 2)), min_size=1, max_size=5)
SEEN = {}


def picked(name, pool, kept, grad):
    device = pool["a"].device
    if name == "moving":
        t = torch.randn(4, 4).to(device)
        t.requires_grad_(grad)
    elif "part" in name:
        whole = torch.randn(3, 4, 4).to(device) if name == "moving part" else pool["whole"]
        kept.append(whole)
        t = whole[int(name[-1]) if name[-1].isdigit() else 1]
        t.requires_grad_(grad)
    elif name.startswith("alias"):
        t = pool[name[-1]].detach()
        t.requires_grad_(grad)
    elif name == "gradient of w":
        t = pool["w"].grad
        t = torch.zeros_like(pool["a"]).detach() if t is None else t
    else:
        t = pool[name]
    kept.append(t)
    return t


def play(wrap, device, sequence):
    """Values of the results and all gradients, call by call; each sequence comes round three times."""
    torch.manual_seed(0)
    pool = {name: torch.randn(4, 4).to(device).requires_grad_() for name in "abw"}
    pool["whole"] = torch.randn(3, 4, 4).to(device)
    u, v, w = torch.randn(4, 4).to(device), torch.randn(4, 4).to(device), pool["w"]

    def scores(x, y):
        return x * u + y * v + x * w.sin() + y * w

    def gradients(x, y):
        with torch.no_grad():
            return x * 2 + (w.grad if w.grad is not None else 0) + y[1:2], y[2:]

    def written(x, y):
        with torch.no_grad():
            x.add_(0.25)
            return x * y + w

    fs, kept, out = [wrap(f) for f in (scores, gradients, written)], [], []
    for x, y, which in 3 * sequence:
        x, y = picked(x, pool, kept, which == 0), picked(y, pool, kept, which == 0)
        result = fs[which](x, y)
        result, view = result if which == 1 else (result, y)
        if result.requires_grad:
            result.tanh().mean().backward()
        out += [t if t is None else t.detach().clone() for t in (result, view, x, y, x.grad, y.grad, w, w.grad)]
        if which == 2:
            w.grad = None
    return fs, out


def test_random_identities_agree_with_eager(device):
    def check(sequence):
        _, want = play(lambda f: f, device, sequence)
        fs, got = play(cgt.jit, device, sequence)
        for k, (a, b) in enumerate(zip(want, got, strict=True)):
            assert (a is None) == (b is None), (k // 8, k % 8)
            assert a is None or torch.equal(a, b), (k // 8, k % 8)
        for f in fs:
            s = cgt.stats(f)
            seen = SEEN.setdefault(device.type, {"calls": 0, "replays": 0})
            seen["calls"] += s.calls
            seen["replays"] += s.replays
        cgt.reset()

    try_programs(CALLS, check, 150 if device.type == "cpu" else 60)
    seen = SEEN[device.type]
    assert seen["replays"] > seen["calls"] / 4, seen
