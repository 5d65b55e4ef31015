"""Observation does not change what is observed: ops, formulas of backwards and views go eager's ways in the warm-up, in
the recording and in replays; and nobody gets to see memory of ours."""

import contextlib
import ctypes
import sys
import time
from pathlib import Path

import torch  # before the core, whose libraries are torch's

# isort: split
import cgt_core as core
import pytest
from helpers import counts, not_audited, values
from torch.utils._python_dispatch import TorchDispatchMode
from wild import KeptArgument

import cgt
from cgt.make import lengths, ops, trace
from cgt.run.observe import observe
from cgt.words import options
from cgt.words.private import outside_dynamo

SQUARE = torch.tensor([[4.0, 1.0, 0.5], [1.0, 3.0, 0.2], [0.5, 0.2, 2.0]])

# Composite ops and formulas that ask whether they are watched by a dispatch mode, and take another way then.
FORMULAS = {
    "eigvalsh": (torch.linalg.eigvalsh, SQUARE),
    "svdvals": (torch.linalg.svdvals, SQUARE),
    "cond": (torch.linalg.cond, SQUARE),
    "norm 2": (lambda x: torch.linalg.matrix_norm(x, 2), SQUARE),
    "norm nuc": (lambda x: torch.linalg.matrix_norm(x, "nuc"), SQUARE),
    "prod": (lambda x: x.prod(), torch.tensor([2.0, 0.0, 3.0])),
    "prod of a row": (lambda x: x.prod(0), SQUARE),
    "max": (lambda x: x.max(), torch.tensor([1.0, 7.0, 7.0])),
    "amax": (lambda x: x.amax(0), SQUARE),
    "median": (lambda x: x.median(), torch.tensor([1.0, -3.0, 2.0])),
    "max times inf": (lambda x: x.max() * float("inf"), torch.tensor([1.0, 7.0, 3.0])),
    "cumprod": (lambda x: x.cumprod(0), torch.tensor([2.0, 0.0, 3.0, 0.0])),
    "where": (lambda x: torch.where(x > 1, x, x * 2).std(), SQUARE),
}

def bits(t):
    return t.contiguous().view(torch.int32) if t.dtype == torch.float32 else t


@pytest.mark.parametrize("name", list(FORMULAS))
def test_values_and_gradients_have_eagers_bits(device, name):
    function, start = FORMULAS[name]

    def both(x):
        y = function(x)
        (g,) = torch.autograd.grad(y.sum(), x)
        return y.detach(), g

    f = cgt.jit(function)  # its backward is a recording of its own
    whole = cgt.jit(both)
    for k in range(8):  # recorded again where an address moves
        x = (start + 0.25 * k).to(device).requires_grad_()
        want_y, want_g = both(x)
        got = f(x)
        (got_g,) = torch.autograd.grad(got.sum(), x)
        y, g = whole(x)
        for have, want in ((got.detach(), want_y), (got_g, want_g), (y, want_y), (g, want_g)):
            assert torch.equal(bits(have), bits(want)), (name, k, have, want)
    s = cgt.stats(whole)
    assert s.replays >= 3 or (s.reasons and device.type == "cuda"), cgt.explain(whole)


def test_foreach_ops_move_versions_as_in_eager(device):
    def function(xs):
        torch._foreach_add_(xs, 1.0)
        return xs[0] * 2

    eager = [torch.ones(3, device=device), torch.ones(2, device=device)]
    ours = [t.clone() for t in eager]
    f = cgt.jit(function)
    for _ in range(5):
        assert torch.equal(f(ours), function(eager))
        assert [t._version for t in ours] == [t._version for t in eager]
        assert all(map(torch.equal, ours, eager))
    assert cgt.stats(f).replays == 3


def test_view_that_a_backward_keeps_of_a_moving_argument(device):
    w = torch.tensor([1.0, 2.0], device=device, requires_grad=True)
    f = cgt.jit(lambda x: KeptArgument.apply(w, x))
    for k in range(6):
        w.grad = None
        x = torch.full((2,), 3.0 * k, device=device)
        f(x).sum().backward()
        assert torch.equal(w.grad, x), k
    s = cgt.stats(f)
    assert s.replays == 0 and any("args[0]" in reason and "view" in reason for reason in s.reasons), s.reasons


def test_view_of_an_argument_in_a_hook(device):
    w = torch.tensor([1.0, 2.0], device=device, requires_grad=True)

    def function(x):
        y, kept = x * w, x[:]
        y.register_hook(lambda g: g + kept)
        return y * 2

    f = cgt.jit(function)
    for k in range(6):
        w.grad = None
        x = torch.full((2,), 1.0 + k, device=device)
        f(x).sum().backward()
        assert torch.equal(w.grad, (2 + x) * x), k
    assert any("args[0]" in reason for reason in cgt.stats(f).reasons)


def test_results_of_an_abandoned_recording_are_views_of_the_users_tensor(device):
    kept = []

    def function(x):
        kept.append(x * 2)
        return x[len(kept) - len(kept) + 1 :]

    f = cgt.jit(function)
    for k in range(6):
        x = torch.arange(4.0, device=device) + k
        before = x.clone()
        f(x).add_(1)
        assert torch.equal(x[1:], before[1:] + 1) and x[0] == before[0], k
        assert torch.equal(kept[-1], before * 2)
    assert cgt.stats(f).replays == 0 and cgt.stats(f).reasons


@pytest.mark.parametrize("result", ["view", "itself", "row", "transposed", "as bytes"])
def test_nobody_sees_the_buffer_of_a_copied_argument(device, result):
    seen = []

    def function(x):
        y = {
            "view": lambda: x.view(2, 2), "itself": lambda: x.contiguous(), "row": lambda: x[2:],
            "transposed": lambda: x.view(2, 2).t(), "as bytes": lambda: x.view(torch.int32),
        }[result]()  # fmt: skip
        seen.append((y.untyped_storage()._cdata, x.untyped_storage()._cdata))
        return y.float() * 2

    f = cgt.jit(function)
    for k in range(4):
        x = torch.arange(4.0, device=device) + k
        assert torch.equal(f(x), function(x).clone())
    assert all(a == b for a, b in seen)


class Doubles(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        return result * 2 if "mul" in op.name() else result


def test_dispatch_mode_inside(device):
    def function(x):
        with Doubles():
            y = x * 3
        return y + 1

    f = cgt.jit(function)
    for k in range(8):
        x = torch.arange(3.0, device=device) + k
        assert torch.equal(f(x), function(x))
    s = cgt.stats(f)
    assert s.replays >= 3 or any("dispatch mode" in reason for reason in s.reasons), cgt.explain(f)


def test_parameters_and_subclasses_can_be_made_inside(device):
    class Named(torch.Tensor):
        pass

    def function(x):
        layer = torch.nn.Linear(3, 3, device=device)
        with torch.no_grad():
            layer.weight.fill_(0.5)
            layer.bias.zero_()
        named = (x + 1).as_subclass(Named)
        return layer(x).detach() + named.as_subclass(torch.Tensor)

    f = cgt.jit(function)
    for k in range(5):
        x = torch.ones(2, 3, device=device) * k
        assert torch.equal(f(x), function(x))


def test_observation_leaves_the_thread_as_it_was(device, nothing_left_behind):
    def fails(x):
        y = x * 2
        raise KeyError(str(tuple(y.shape)))

    f = cgt.jit(fails)
    for _ in range(3):
        with pytest.raises(KeyError, match=r"\(3,\)"):
            f(torch.ones(3, device=device))
        assert core.observer() is None and core.observe(False) is False


def test_what_an_op_raises_is_eagers(device):
    """The very type, through the observer's frames."""
    f = cgt.jit(lambda x, k: x[k] * 2)
    x = torch.arange(3.0, device=device)
    for _ in range(3):
        with pytest.raises(IndexError, match="out of bounds"):
            f(x, 5)
    g = cgt.jit(torch.linalg.cholesky)
    if device.type == "cpu":
        for _ in range(3):
            with pytest.raises(torch.linalg.LinAlgError):
                g(-torch.eye(3))


def test_refused_warm_up_looks_no_further_but_a_backward_is_proven_whole(device):
    """What a backward reads after a value was read on the host counts: it is proven by that run."""

    def run(**kind):
        def f(x):
            y = x * 2 if x.sum().item() * 1 > 0 else x
            return y + other

        x, other = torch.ones(2, device=device), torch.ones(2, device=device)
        seen = observe(core.CUDA if device.type == "cuda" else core.HOST, 0, **kind)
        assert torch.equal(trace.run(seen, f, (x,), {}), x * 2 + other)
        return core.storage_id(x) in seen.touched, core.storage_id(other) in seen.touched

    assert run() == (True, False)
    assert run(graph=object(), given=()) == (True, True)


def test_interrupt_where_no_exception_can_pass_is_raised_behind_it():
    """The middle of PyTorch tells us of some operators; Ctrl-C may come while it does."""
    stops = []

    def stop(_):
        stops.append(1)
        raise KeyboardInterrupt

    f = cgt.jit(lambda x: torch.tensor([x[0], x[1]]) * 2)  # which reads two numbers
    try:
        core.reads_by([], stop, stop)
        with pytest.raises(KeyboardInterrupt):
            f(torch.ones(3))
    finally:
        core.reads_by([], outside_dynamo(lengths.see_kernel), outside_dynamo(trace.see_lift))
    assert stops and all(torch.equal(f(torch.ones(3)), torch.full((2,), 2.0)) for _ in range(4))


def test_the_page_has_the_watchers_of_an_op_in_their_order():
    page = (Path(__file__).parents[2] / "docs" / "internals.md").read_text().split("### One op of a run")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("| `")]
    told = [(row.look.__name__, " ".join(row.look.__doc__.split()), row.why_here) for row in (*ops.BEFORE, *ops.BEHIND)]
    rows = [(name.strip("`"), what, why) for name, what, why in rows if name != "`proceed`"]
    assert [(name, why) for name, _, why in rows] == [(name, why) for name, _, why in told]
    assert [what for (_, what, _), (_, docstring, _) in zip(rows, told, strict=True) if not docstring.startswith(what)] == []


LIBRARY = torch.library.Library("cgt_observer", "DEF")
FACTOR = {"n": 2.0}
for name, kernel in (("clocked", lambda x: x * (time.time() > 0)), ("scaled", lambda x: x * FACTOR["n"])):
    LIBRARY.define(f"{name}(Tensor x) -> Tensor")
    LIBRARY.impl(name, kernel, "CPU")


def test_python_that_an_op_runs_is_looked_at_though_what_sees_the_op_is_not():
    f = cgt.jit(lambda x: torch.ops.cgt_observer.clocked(x) + 1)
    assert all(torch.equal(f(torch.ones(3)), torch.full((3,), 2.0)) for _ in range(3))
    (reason,) = cgt.stats(f).reasons
    assert "time.time" in reason and __file__ in reason
    f = cgt.jit(lambda x: torch.ops.cgt_observer.scaled(x) + 1)
    for n in (2.0, 2.0, 2.0, 5.0, 5.0, 5.0):
        FACTOR["n"] = n
        assert torch.equal(f(torch.ones(3)), torch.full((3,), n + 1))
    assert cgt.stats(f).replays >= 2


def test_profiler_of_the_users_is_as_it_was_behind_an_op_that_raises():
    told, f = [], cgt.jit(lambda x: x @ torch.ones(7, 7))
    sys.setprofile(lambda frame, event, _: told.append(event))
    try:
        for _ in range(3):
            with contextlib.suppress(RuntimeError):
                f(torch.ones(3, 3))
        told.clear()
        len(told)
        assert "c_call" in told
    finally:
        sys.setprofile(None)


@contextlib.contextmanager
def heard():
    """Up to Python 3.11 no profiler and no debugger hears of code of ours that sees an op (calls_shim.h): here it does."""
    api, old = ctypes.pythonapi, not hasattr(sys, "monitoring")
    api.PyThreadState_Get.restype = ctypes.c_void_p
    thread = ctypes.c_void_p(api.PyThreadState_Get())
    if old:
        api.PyThreadState_LeaveTracing(thread)
    yield
    if old:
        api.PyThreadState_EnterTracing(thread)


@not_audited("ops are noted, too")
def test_an_op_that_needs_no_mechanism_enters_few_functions(device, monkeypatch):
    """In a first run and in a recording: who follows an op through the source stops at each of these."""
    see_op, entered, x = ops.see_op, [], values(device)

    def enter(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(options.HOME):
            entered[-1].append(frame.f_code.co_name)

    def counted(*given):
        before = sys.gettrace()
        entered.append([])
        with heard():
            sys.settrace(enter)
            try:
                see_op(*given)
            finally:
                sys.settrace(before)

    monkeypatch.setattr(trace, "see_op", counted)
    f = cgt.jit(lambda x, y: torch.add(torch.add(x, y), x))
    for _ in range(3):
        assert torch.equal(f(x, x), x + x + x)
    assert counts(f) == (1, 1, 1, 0)
    assert len(entered) == 4 and all(0 < len(each) <= 50 for each in entered[1::2]), entered  # the first one chooses the watchers
