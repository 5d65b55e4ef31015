"""What several test files share: tensors to call with, counters to look at, and comparisons.

`same` looks at values, dtype and device; `identical` at bits, and at all that a tensor tells of itself.
`assert_same` is for trees of floats, and raises where they differ.
"""

import contextlib
import dataclasses
import enum
import gc
import inspect
import sys
import threading

import torch  # before the core, whose libraries are torch's

# isort: split
import cgt_core as core
from hypothesis import HealthCheck, given, settings

import cgt
from cgt.decide import freeing

AUDITS_BY_DEFAULT = "first:2,doubling:1"  # what programs have; conftest.py switches audits off
TOLD = {}  # sentence of errors.py -> the tests that reach it, which claim it with `tells`


def values(device, *shape, seed=1, dtype=torch.float32):
    """Random numbers, each seed's the same on every device; without a shape, four rows of three."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (4, 3)), generator=generator).to(device=device, dtype=dtype)


def square_values(device, *shape, **options):
    """`values` for products: without a shape, four rows of four."""
    return values(device, *(shape or (4, 4)), **options)


def plain(f):
    """What a jitted function or module does, hooks included, when nothing is jitted."""
    return f._call_impl if isinstance(f, torch.nn.Module) else f.__wrapped__


def refill(x, value):
    """Other numbers in the same memory, so that the pointer stays."""
    x.copy_(torch.arange(x.numel(), dtype=x.dtype, device=x.device).view_as(x) * 0.5 + value)


def numbers(device, *shape, start=0.0):
    """Different numbers in every element."""
    x = torch.empty(shape or (8,), device=device)
    refill(x, start)
    return x


def double(x):
    """Two ops, and a result that is new."""
    return x * 2 + 1


@dataclasses.dataclass
class Stepped:
    """A state of which a program makes another one at each step."""

    h: torch.Tensor
    t: int = 0
    rate: float = 1.0
    mask: torch.Tensor | None = None
    mode: str = "a"


@dataclasses.dataclass
class Config:
    """Holds what a function reads without arguments."""

    weight: object
    scale: float = 2.0


class Opaque:
    """A type that no pytree knows, nor a replay how to make."""

    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


def collect():
    """Garbage goes, and what that dooms: functions that nobody has any more, with their recordings."""
    for _ in range(3):
        gc.collect()
        freeing.sweep()


def counts(f):
    """(warmups, records, replays, eager), and that they add up."""
    s = cgt.stats(f)
    assert s.calls == s.warmups + s.records + s.replays + s.eager
    return s.warmups, s.records, s.replays, s.eager


def counters(f):
    """The same four numbers, which need not add up: a call that was refused is none of them."""
    s = cgt.stats(f)
    return s.warmups, s.records, s.replays, s.eager


def calls(f, n, *args, **kwargs):
    """Call n times; the last result."""
    for _ in range(n - 1):
        f(*args, **kwargs)
    return f(*args, **kwargs)


def jit_warm(function, *args, **options):
    """A jitted function that has warmed up and recorded with these arguments: it replays next."""
    f = cgt.jit(function, **options)
    for _ in range(2):
        f(*args)
    s = cgt.stats(f)
    assert (s.warmups, s.records, s.eager) == (1, 1, 0), s.reasons
    return f


def same(got, want):
    """Bit-equal tensors in containers of the same types."""
    if type(got) is not type(want):
        return False
    if isinstance(want, torch.Tensor):
        return got.dtype == want.dtype and got.device == want.device and torch.equal(got, want)
    if isinstance(want, dict):
        return list(got) == list(want) and all(same(got[k], want[k]) for k in want)
    if isinstance(want, (tuple, list)):
        return len(got) == len(want) and all(map(same, got, want))
    if hasattr(want, "__dict__") and not isinstance(want, (enum.Enum, type)):
        return same(vars(got), vars(want))
    return repr(got) == repr(want)  # nan is nan, -0.0 is not 0.0


def bits(t):
    """A tensor that is equal to another one's only where all bits are."""
    t = t.detach().resolve_conj().resolve_neg().contiguous()
    if t.is_complex():
        t = torch.view_as_real(t)
    return t.view(
        {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(t.element_size(), torch.uint8)
    )


def identical(got, want):
    """Bit-equal, nan included, with the same metadata, in the same containers."""
    if type(got) is not type(want):
        return False
    if isinstance(want, torch.Tensor):
        facts = "dtype device shape requires_grad layout".split()
        return (
            all(getattr(got, fact) == getattr(want, fact) for fact in facts)
            and got.stride() == want.stride()
            and (got.is_conj(), got.is_neg(), got.is_inference())
            == (want.is_conj(), want.is_neg(), want.is_inference())
            and torch.equal(bits(got), bits(want))
        )
    if isinstance(want, (tuple, list)):
        return len(got) == len(want) and all(map(identical, got, want))
    if isinstance(want, dict):
        return list(got) == list(want) and all(map(identical, got.values(), want.values()))
    return repr(got) == repr(want)


def assert_same(got, want):
    """Bitwise equality of trees of floats."""
    if isinstance(want, torch.Tensor):
        assert got.dtype == want.dtype and got.device == want.device
        assert torch.equal(got, want)
    elif isinstance(want, (tuple, list)):
        assert type(got) is type(want) and len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            assert_same(g, w)
    elif isinstance(want, dict):
        assert got.keys() == want.keys()
        for key in want:
            assert_same(got[key], want[key])
    elif dataclasses.is_dataclass(want):
        assert_same(vars(got), vars(want))
    else:
        assert got == want or isinstance(want, Opaque)


def settle(f, function, *args):
    """Warm, record, replay."""
    for _ in range(3):
        assert identical(f(*args), function(*args))
    assert counts(f) == (1, 1, 1, 0)


def recorded_then_replayed(f, function, *args, new_code=False):
    """Something changed: the next call records, and the one after replays. `new_code`: code came that never ran, which is
    learnt by one more call."""
    if new_code:
        warmups, records, replays, eager = counts(f)
        assert identical(f(*args), function(*args))
        assert counts(f) == (warmups, records, replays, eager + 1)
        assert any("ran for the first time" in reason for reason in cgt.stats(f).reasons)
    warmups, records, replays, eager = counts(f)
    assert identical(f(*args), function(*args))
    assert counts(f) == (warmups, records + 1, replays, eager)
    replayed(f, function, *args)


def replayed(f, function, *args):
    """The next call is right, and replayed."""
    warmups, records, replays, eager = counts(f)
    assert identical(f(*args), function(*args))
    assert counts(f) == (warmups, records, replays + 1, eager)


def replays_after(f, *args, calls=8):
    """Does f, whatever happened to it, come to replay what it returns?"""
    before = cgt.stats(f)
    want = f.__wrapped__(*args)
    for _ in range(calls):
        assert_same(f(*args), want)
    after = cgt.stats(f)
    assert after.replays > before.replays, after.reasons


def line_of(function, text):
    """file:line of the one line of `function` that contains `text`."""
    lines, first = inspect.getsourcelines(function)
    (k,) = [k for k, line in enumerate(lines) if text in line and "line_of" not in line]
    return f"{inspect.getsourcefile(function)}:{first + k}"


def tells(*sentences):
    """Mark a test as the one that reaches these sentences of errors.py."""

    def mark(test):
        for sentence in sentences:
            TOLD.setdefault(sentence, []).append(test.__name__)
        return test

    return mark


def not_audited(why):
    """Mark a test that cannot pass where each replay is compared with eager."""

    def mark(test):
        test.not_audited = why
        return test

    return mark


def in_threads(n, work):
    """Run work(k) in n threads that begin together; re-raise what one of them raised."""
    barrier, errors = threading.Barrier(n), []

    def body(k):
        try:
            barrier.wait(30)
            work(k)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(k,), daemon=True) for k in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    if errors:
        raise errors[0]


STEPS = ("never", "each", "late", "early")  # how a random program's loop says step()


def says_step(how, k):
    """At the beginning of its iteration k?"""
    return {"never": False, "each": True, "late": k > 1, "early": k < 3}[how]


def try_programs(programs, check, most, fewer=True):
    """check(program) for so many programs of a strategy, however long each takes; for half as many on the checked build, which is slower."""
    most = -(-most // 2) if core.debug_build() and fewer else most

    def one(program):
        check(program)  # given() minds what a test returns

    options = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}
    settings(max_examples=most, **options)(given(programs)(one))()


@contextlib.contextmanager
def profiled():
    """Somebody else's profilers: all there is room for."""
    before, _ = sys.getprofile(), sys.setprofile(lambda *event: None)
    tools = [t for t in range(6) if hasattr(sys, "monitoring") and sys.monitoring.get_tool(t) is None]
    for t in tools:
        sys.monitoring.use_tool_id(t, "test")
    try:
        yield
    finally:
        sys.setprofile(before)
        for t in tools:
            sys.monitoring.free_tool_id(t)
