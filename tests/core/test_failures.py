"""Failure: every driver call fails once, and the user's function raises wherever it may.

What the user's function raises is the user's; and afterwards everything works as if nothing had
happened.
"""

import collections
import ctypes
import functools
import gc
import traceback
import types
import warnings

import pytest
import torch
from helpers import assert_same as same
from helpers import counters, not_audited, replays_after, tells, values

# isort: split
import cgt_core as core

import cgt
from cgt import data
from cgt.decide import sites
from cgt.make import record
from cgt.words import errors

pytestmark = pytest.mark.usefixtures("short_cool_down", "nothing_left_behind")


# --- the driver fails -------------------------------------------------------------------------

RECORDING_CALLS = ["begin", "copy", "end", "instantiate"]
CUDA_CALLS = ["words", "launch", "order"]  # of the call that records; the host has none of them


@not_audited("it counts runs of the function")
@pytest.mark.parametrize("call", RECORDING_CALLS + CUDA_CALLS)
@tells("recording_failed")
def test_failed_recording_costs_one_eager_call_and_a_reason(device, call):
    if call in CUDA_CALLS and device.type == "cpu":
        pytest.skip("the host driver makes no such call when it records")
    runs = collections.deque()

    def noisy(x, total):
        runs.append(1)
        total.add_(1)
        return torch.nn.functional.dropout(x * 2, 0.5, True) + total

    f = cgt.jit(noisy, inputs="copied")
    total, twin = torch.zeros(3, device=device), torch.zeros(3, device=device)
    gc_was = gc.isenabled()
    for k in range(9):
        x = torch.full((3,), k + 1.0, device=device)
        if k == 1:
            if call == "order":
                torch.cuda.set_stream(torch.cuda.Stream())
            core.fault_set(call, 0, 2)
            books = core.books()
        torch.manual_seed(k)
        want = noisy(x, twin)
        torch.manual_seed(k)
        same(f(x, total), want)
        same(total, twin)
        assert torch.is_grad_enabled() and core.blocker() == 0 and gc.isenabled() == gc_was
        if k == 1:
            assert counters(f) == (1, 0, 0, 1)
            (reason,) = cgt.stats(f).reasons
            assert "recording failed" in reason
            after = core.books()
            assert (after["nodes"], after["recording"]) == (books["nodes"], 0)
    if call == "order":
        torch.cuda.set_stream(torch.cuda.default_stream())
    stats = cgt.stats(f)
    assert (stats.warmups, stats.records, stats.replays) == (1, 1, 5), stats
    assert len(runs) - 9 <= 9 - stats.replays + 1


@pytest.mark.parametrize("call", ["patch", "launch", "move", "order"])
@tells("replay_failed")
def test_failed_replay_raises_a_sentence_and_the_next_call_replays(device, call):
    if call == "order" and device.type == "cpu":
        pytest.skip("there are no streams on the host")

    def double(x):
        return x * 2

    f = cgt.jit(double, inputs="copied")
    xs = [torch.full((3,), float(k), device=device) for k in range(4)]
    for k in range(3):
        f(xs[k])
    held = f(xs[2])
    if call == "order":
        torch.cuda.set_stream(torch.cuda.Stream())
    core.fault_set(call, 0, 2)
    with pytest.raises(cgt.CgtError, match=f"double.*driver's {call} call") as caught:
        f(xs[3])
    if call == "order":
        torch.cuda.set_stream(torch.cuda.default_stream())
    assert isinstance(caught.value.__cause__, core.DriverError)
    assert caught.value.__cause__.args[2] == call
    caught = None
    same(held, xs[2] * 2)
    before = cgt.stats(f)
    same(f(xs[3]), xs[3] * 2)  # the very call that failed
    same(f(xs[1]), xs[1] * 2)
    same(held, xs[2] * 2)
    after = cgt.stats(f)
    assert after.replays == before.replays + 2 and after.eager == 0
    cgt.reset(f)  # the advice
    replays_after(f, xs[0])


def test_replay_that_was_not_launched_leaves_version_and_grad_alone(device):
    w = torch.ones(3, device=device, requires_grad=True)
    total = torch.zeros(3, device=device)

    def step(x):
        total.add_(x)
        (w * x).sum().backward()
        return total * 1

    f = cgt.jit(step)
    x = torch.arange(3.0, device=device)
    for _ in range(4):
        w.grad = None
        f(x)
    w.grad = None
    assert cgt.stats(f).replays == 2
    version = total._version
    core.fault_set("launch", 0, 2)
    with pytest.raises(cgt.CgtError, match="Nothing was launched"):
        f(x)
    same(total, x * 4)
    assert total._version == version
    assert w.grad is None
    same(f(x), x * 5)
    same(w.grad, x)


def test_failures_of_many_recordings_leak_nothing(device):
    x = torch.ones(3, device=device)
    f = cgt.jit(lambda x: x * 2, inputs="copied")
    f(x)
    books = None
    for k in range(40):
        core.fault_set(RECORDING_CALLS[1 + k % 2], 0, 2)
        same(f(x), x * 2)
        if k == 3:
            books = core.books()
    assert core.books() == books
    core.fault_set("", 0, 0)
    replays_after(f, x)


def test_driver_error_in_the_users_function_is_the_users(device, short_cool_down):
    """The exception that cgt uses inside is not mistaken for cgt's own."""
    x = torch.ones(3, device=device)
    angry = True

    def f(x):
        if angry:
            raise core.DriverError(1, "mine", "launch")
        return x * 2

    jitted = cgt.jit(f)
    for _ in range(3):
        with pytest.raises(core.DriverError, match="mine"):
            jitted(x)
    angry = False
    replays_after(jitted, x, calls=20)


# --- the user's exceptions ----------------------------------------------------------------------


class Stop(BaseException):
    """Not an Exception."""


RAISED = [ValueError, KeyboardInterrupt, SystemExit, StopIteration, Stop]


@pytest.mark.parametrize("kind", RAISED)
@pytest.mark.parametrize("at", range(5))
def test_user_exception_passes_through_and_later_calls_replay(device, kind, at):
    """at: the call that raises: 0 warms, 1 records, later ones another structure than recorded."""
    x = torch.arange(3.0, device=device)
    made = []

    def f(x, bad):
        y = x * 2
        y.add_(1)
        if bad:
            made.append(kind("mine"))
            raise made[-1]
        return y

    jitted = cgt.jit(f)
    state = torch.get_rng_state()
    for k in range(6):
        if k != at:
            same(jitted(x, False), x * 2 + 1)
            continue
        with pytest.raises(kind) as caught:
            jitted(x, True)
        assert caught.value is made[-1]
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert frames[-1].name == "f" and "raise made[-1]" in frames[-1].line
        assert core.blocker() == 0 and gc.isenabled() and not core.books()["recording"]
        assert torch.equal(torch.get_rng_state(), state)
        caught = None
        made.clear()
    replays_after(jitted, x, False)


@pytest.mark.parametrize("moving", [False, True])
def test_exception_in_the_middle_leaves_what_eager_would_leave(device, moving):
    """In-place writes before the exception have happened, once; those behind it have not."""
    total = torch.zeros(3, device=device)
    seen = {"count": 0}

    def f(x, bad):
        total.add_(x)
        x.mul_(2)
        if bad:
            raise ValueError("middle")
        x.add_(100)
        seen["count"] += 1
        return x * 1

    jitted = cgt.jit(f)
    kept = []
    x = torch.ones(3, device=device)
    want_x, want_total = x.clone(), torch.zeros(3, device=device)
    for k in range(8):
        if moving:
            kept.append(x)
            x = x.clone()
        bad = k in (0, 2, 5)
        want_total += want_x
        want_x = want_x * 2 + (0 if bad else 100)
        if bad:
            with pytest.raises(ValueError, match="middle"):
                jitted(x, True)
        else:
            same(jitted(x, False), want_x)
        same(x, want_x)
        same(total, want_total)


def test_exception_after_a_write_to_a_copied_argument_leaves_the_write(device, short_cool_down):
    """An argument that warming did not see written is copied; a later write still reaches it."""
    angry, kept = False, []

    def f(x):
        if angry:
            x.add_(1)
            raise ValueError("after the write")
        return x * 2

    jitted = cgt.jit(f, inputs="copied")
    for k in range(20):
        x = torch.full((3,), float(k), device=device)
        kept.append(x)
        angry = k in (1, 14)
        if angry:
            with pytest.raises(ValueError, match="after the write"):
                jitted(x)
            same(x, torch.full((3,), k + 1.0, device=device))
        else:
            same(jitted(x), x * 2)
    assert cgt.stats(jitted).replays >= 1


def test_modes_that_the_function_left_by_an_exception_are_left(device, short_cool_down):
    x = torch.ones(3, 3, device=device)
    angry = True

    def f(x):
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
            y = x @ x
            if angry:
                raise ValueError("inside")
        return y

    jitted = cgt.jit(f)
    for _ in range(3):
        with pytest.raises(ValueError, match="inside"):
            jitted(x)
        assert torch.is_grad_enabled() and not torch.is_autocast_enabled(device.type)
    angry = False
    replays_after(jitted, x, calls=20)


def test_random_numbers_go_on_as_in_eager_after_an_exception(device, short_cool_down):
    angry = False

    def f(x):
        y = x + torch.rand_like(x)
        if angry:
            raise ValueError("after a draw")
        return y

    jitted, results = cgt.jit(f), []
    x = torch.zeros(3, device=device)
    for function in (f, jitted):
        torch.manual_seed(5)
        values = []
        for k in range(20):
            angry = k in (1, 14)
            try:
                values.append(function(x).clone())
            except ValueError:
                values.append(torch.rand(2, device=device))
        results.append(values)
    same(results[1], results[0])
    assert cgt.stats(jitted).replays >= 2


def test_exception_does_not_keep_the_functions_tensors_alive(device):
    x = torch.ones(3, device=device)

    class Probe:
        pass

    def f(x, bad):
        probe = Probe()
        if bad:
            raise ValueError("gone")
        del probe
        return x * 2

    jitted = cgt.jit(f)
    f = None
    with pytest.raises(ValueError, match="gone"):
        jitted(x, True)
    gc.collect()
    assert not [o for o in gc.get_objects() if type(o) is Probe]
    replays_after(jitted, x, False)


def test_exception_of_a_jitted_function_inside_a_recording_reaches_its_caller(device):
    x = torch.ones(3, device=device)

    @cgt.jit
    def inner(x, bad):
        if bad:
            raise ValueError("inner")
        return x + 1

    @cgt.jit
    def outer(x, bad):
        try:
            return inner(x, bad) * 2
        except ValueError:
            return x * 3

    for _ in range(4):
        same(outer(x, True), x * 3)
        same(outer(x, False), (x + 1) * 2)
    assert cgt.stats(outer).replays >= 4, cgt.explain(outer)


def test_who_asks_whether_garbage_is_collected_hears_what_was_before(device):
    f = cgt.jit(lambda x: x * 2 if gc.isenabled() else x * 3)
    plain, x = gc.isenabled, torch.ones(3, device=device)
    for _ in range(4):
        assert torch.equal(f(x), x * 2)
    assert cgt.stats(f).replays == 2 and gc.isenabled is plain
    gc.disable()
    try:
        assert torch.equal(cgt.jit(f.__wrapped__)(x), x * 3)
    finally:
        gc.enable()


def test_garbage_collector_that_was_off_stays_off(device):
    x = torch.ones(3, device=device)
    f = cgt.jit(lambda x: x * 2)
    gc.disable()
    try:
        f(x)
        core.fault_set("end", 0, 2)
        f(x)
        assert not gc.isenabled()
    finally:
        gc.enable()
    replays_after(f, x)


@not_audited("it counts runs of the function")
def test_warnings_of_the_function_come_when_it_runs(device):
    x = torch.ones(3, device=device)

    def f(x):
        warnings.warn("careful", UserWarning, stacklevel=1)
        return x * 2

    jitted = cgt.jit(f)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(5):
            same(jitted(x), x * 2)
    assert len(told) == 2 and counters(jitted) == (1, 1, 3, 0)


def test_warning_turned_into_an_error_is_an_exception_of_the_user(device, short_cool_down):
    x = torch.ones(3, device=device)
    jitted = cgt.jit(lambda x: (warnings.warn("careful", stacklevel=1), x * 2)[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            with pytest.raises(UserWarning, match="careful"):
                jitted(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        replays_after(jitted, x, calls=20)


@pytest.mark.parametrize("wrap", [functools.partial, cgt.jit])
def test_wrong_arguments_raise_what_python_raises(device, wrap):
    def f(x, y=1):
        return x * y

    jitted = cgt.jit(functools.partial(f) if wrap is functools.partial else f)
    x = torch.ones(3, device=device)
    for bad in ((), (x, 1, 2)):
        with pytest.raises(TypeError, match="f()"):
            jitted(*bad)
    with pytest.raises(TypeError, match="unexpected keyword"):
        jitted(x, z=3)
    replays_after(jitted, x)


def cat_in_chunks(x):
    return torch._chunk_cat([x, x[:2] * 2], 0, 2)


def eigenvalues(x):
    return torch.linalg.eigvals(x)


def inverse(x):
    return torch.linalg.pinv(x + x.mT, hermitian=True)


@pytest.mark.parametrize("function", [cat_in_chunks, eigenvalues, inverse])
def test_what_a_capture_refuses_is_eagers_answer(device, function):
    """And so is all that comes after it: a library that failed in a capture does not fail again."""
    f = cgt.jit(function)
    for k in range(8):
        x = values(device, 3, 3, seed=k)
        assert torch.equal(f(x), function(x))
        assert torch.equal(torch.linalg.inv(x), torch.linalg.inv(x)) and torch.ones(2, device=device).sum() == 2
    if device.type == "cpu" or function is not cat_in_chunks:
        assert cgt.stats(f).replays, cgt.explain(f)


def seeded(x):
    torch.manual_seed(3)
    return x + torch.rand_like(x)


def forked(x):
    with torch.random.fork_rng():
        return seeded(x)


@pytest.mark.parametrize("function", [seeded, forked])
def test_seeding_inside_has_a_reason(device, function):
    f, x = cgt.jit(function), values(device)
    for _ in range(6):
        assert torch.equal(f(x), function(x))
    assert cgt.stats(f).replays == 0 and "CGT304" in cgt.explain(f) and "CGT705" not in cgt.explain(f)


# --- nothing that a driver says is lost -----------------------------------------------------------


@pytest.mark.parametrize("after", range(6))
def test_numbers_that_an_update_did_not_bring_are_told_by_the_next_call(device, after):
    """Each number of the recording is told, and each op's words at the end: any of these may fail."""
    f = cgt.jit(lambda x, a, b: ((x * a).add(x, alpha=b) * b).sin())
    x = torch.arange(4.0, device=device)
    want = f.__wrapped__
    for k in range(6):
        same(f(x, 1.5 + k, 2.5 + k), want(x, 1.5 + k, 2.5 + k))
    replays = cgt.stats(f).replays
    assert replays > 0, cgt.explain(f)
    core.fault_set("patch", after, 2)
    failed = 0
    for k in (-1.0, 7.0, 7.0, -1.0):
        try:
            same(f(x, k, k + 1), want(x, k, k + 1))
        except cgt.CgtError:
            failed += 1
            same(f(x, k, k + 1), want(x, k, k + 1))
    core.fault_set("", 0, 0)
    assert cgt.stats(f).replays >= replays + 3, cgt.explain(f)
    assert failed == 1


HOST_FUNCTION = -7  # ERROR_HOST_FUNCTION in driver.pxi
NOTHING = "whose data may be gone at the next replay"


@torch.library.custom_op("cgt_tests::calls_host", mutates_args=())
def calls_host(x: torch.Tensor) -> torch.Tensor:
    """Have the stream call free(NULL), which does nothing, and needs no GIL."""
    stream, free = torch.cuda.current_stream().cuda_stream, ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)
    assert ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc(ctypes.c_void_p(stream), free, None) == 0
    return x * 2


@calls_host.register_fake
def _(x):
    return torch.empty_like(x)


def test_a_recording_that_calls_the_host_is_refused(device):
    """On the host, where no op does, the code alone is told."""
    f = cgt.jit(calls_host if device.type == "cuda" else lambda x: x * 2)
    x = torch.ones(3, device=device)
    f(x)
    core.fault_set(*(("end", 0, HOST_FUNCTION) if device.type == "cpu" else ("", 0, 0)))
    same(f(x), x * 2)
    assert any(NOTHING in reason for reason in cgt.stats(f).reasons), cgt.explain(f)
    assert cgt.stats(f).records == 0


@tells("no_checkpoints")
@pytest.mark.parametrize("backend", ["cudaMallocAsync", "pluggable"])
def test_an_allocator_without_checkpoints_is_told_of_before_anything_is_captured(backend, monkeypatch):
    """Also where there is no GPU: nothing of a plan but its device is looked at before."""
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    attempt = data.Attempt(plan=types.SimpleNamespace(driver=core.CUDA, device=0))
    assert record.capture(None, attempt) == errors.no_checkpoints(backend)
    assert attempt.seen is None and attempt.before is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_allocator_without_checkpoints_costs_a_reason_and_no_result(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "pluggable")
    f, x = cgt.jit(lambda x: x * 2), torch.ones(3, device="cuda")
    for _ in range(4):
        same(f(x), x * 2)
    assert errors.no_checkpoints("pluggable") in cgt.stats(f).reasons and cgt.stats(f).records == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_a_driver_that_is_not_there_is_an_error():
    """As is a function that it lacks: cydriver raises, and returns a code that is like any other. (PyTorch with CUDA, asked for
    its current device where there is no driver, ends the process: only benches ask.)"""
    asks = [lambda: core.load_kernels(0), lambda: core.load_decide_kernel(0), lambda: core.time_launches([1], 0, 3)]
    for ask in asks if torch.version.cuda is None else asks[:2]:
        with pytest.raises(RuntimeError, match="libcuda"):
            ask()


def test_a_structure_that_finds_no_memory_leaves_no_row(device):
    f, x = cgt.jit(lambda x: x * 2), torch.ones(3, device=device)
    state = getattr(f, sites.ATTRIBUTE)
    before = core.books()
    with pytest.raises(ValueError, match="unpack"):
        core.spec_add(state.f, ((0, 0),), 1, 0, state.learnt.programs, ())
    assert not state.learnt.programs
    core.check_table()
    assert core.books() == before
    replays_after(f, x)


@pytest.mark.parametrize("part", ["slots", "outs", "effects", "numbers", "undos"])
def test_a_recording_that_finds_no_memory_leaves_no_row(device, part, monkeypatch, short_cool_down):
    """What a call would take for a recording has no graph yet."""
    total = torch.zeros(3, device=device)
    f, x = cgt.jit(lambda x: (total.add_(x) * 2, x + 1)), torch.ones(3, device=device)
    f(x)
    add, at = core.add_node, {"slots": 5, "outs": 6, "effects": 9, "numbers": 14, "undos": 15}[part]

    def starved(*args):
        return add(*(arg if k != at else [*arg, None] for k, arg in enumerate(args)))

    before = core.books()
    monkeypatch.setattr(core, "add_node", starved)
    with pytest.raises(TypeError):
        f(x)
    monkeypatch.setattr(core, "add_node", add)
    core.check_table()
    after = core.books()
    assert all(after[name] == before[name] for name in ("nodes", "slots", "outs", "effects", "patches", "dims", "blocks"))
    total.zero_()
    for k in range(1, 24):  # the exception has a cool-down
        same(f(x)[0], torch.full_like(x, 2.0 * k))
    assert cgt.stats(f).replays >= 3, cgt.explain(f)


def test_a_recording_that_fails_names_no_line_of_ours(device):
    f, x = cgt.jit(torch.mm), values(device, 3, 3)
    with pytest.raises(RuntimeError, match="cannot be multiplied") as raised:
        f(x, x[1:])
    told = record.failure(raised.value.with_traceback(raised.value.__traceback__.tb_next))  # without this test's own line
    assert told.startswith("CGT705: recording failed: RuntimeError: "), told
