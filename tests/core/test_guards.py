"""What a recording is guarded by, in its arguments and around the call: whatever changes the answer makes
another child, and what changes back replays the old one. Never stale, never recorded again for nothing."""

import contextlib

import cgt_core as core
import pytest
import torch
from helpers import Config, counts, recorded_then_replayed, replayed, settle
from helpers import identical as same
from helpers import square_values as values
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from torch import nn

import cgt

# --- ambient state ----------------------------------------------------------------------------


@contextlib.contextmanager
def switched(get, put, value):
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def attribute(holder, name, value):
    return switched(lambda: getattr(holder, name), lambda v: setattr(holder, name, v), value)


def flag(kind):
    backend = torch.backends.cuda
    now = getattr(backend, f"{kind}_sdp_enabled")
    return switched(now, getattr(backend, f"enable_{kind}_sdp"), not now())


def autocast_state(kind):
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def product(x, w):
    return x @ w


def plain(x, w):
    return x * w + 1, torch.ones(2, device=x.device)


def attention(x, w):
    return nn.functional.scaled_dot_product_attention(x[None, None], w[None, None], x[None, None])


AMBIENT = {  # name: (device -> context manager, function, what the function sees of it)
    "no_grad": (lambda d: torch.no_grad(), product, torch.is_grad_enabled),
    "inference_mode": (lambda d: torch.inference_mode(), product, torch.is_inference_mode_enabled),
    "autocast bf16": (
        lambda d: torch.autocast(d.type, dtype=torch.bfloat16), product, autocast_state,
    ),
    "autocast fp16": (
        lambda d: torch.autocast(d.type, dtype=torch.float16), product, autocast_state,
    ),
    "autocast cache": (
        lambda d: switched(
            torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled,
            not torch.is_autocast_cache_enabled(),
        ), product, torch.is_autocast_cache_enabled,
    ),
    "default dtype": (
        lambda d: switched(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
        plain, torch.get_default_dtype,
    ),
    "deterministic": (
        lambda d: switched(
            torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
        ), plain, torch.are_deterministic_algorithms_enabled,
    ),
    "matmul precision": (
        lambda d: switched(
            torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
        ), product, torch.get_float32_matmul_precision,
    ),
    "tf32": (
        lambda d: attribute(
            torch.backends.cuda.matmul, "allow_tf32", not torch.backends.cuda.matmul.allow_tf32
        ), product, lambda: torch.backends.cuda.matmul.allow_tf32,
    ),
    "flash sdp": (lambda d: flag("flash"), attention, torch.backends.cuda.flash_sdp_enabled),
    "efficient sdp": (
        lambda d: flag("mem_efficient"), attention, torch.backends.cuda.mem_efficient_sdp_enabled,
    ),
    "math sdp": (lambda d: flag("math"), attention, torch.backends.cuda.math_sdp_enabled),
    "cudnn sdp": (lambda d: flag("cudnn"), attention, torch.backends.cuda.cudnn_sdp_enabled),
    "cudnn": (
        lambda d: attribute(torch.backends.cudnn, "enabled", not torch.backends.cudnn.enabled),
        plain, lambda: torch.backends.cudnn.enabled,
    ),
    "cudnn benchmark": (
        lambda d: attribute(torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark),
        plain, lambda: torch.backends.cudnn.benchmark,
    ),
    "mkldnn": (
        lambda d: torch.backends.mkldnn.flags(enabled=not torch.backends.mkldnn.enabled),
        product, lambda: torch._C._get_mkldnn_enabled(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AMBIENT)
def test_another_ambient_state_is_another_child_and_going_back_replays(device, name):
    make, op, sees = AMBIENT[name]
    ask = (lambda: sees(device.type)) if sees is autocast_state else sees
    function = lambda x, w: (op(x, w), ask())  # noqa: E731
    f = cgt.jit(function)
    x, w = values(device), values(device, seed=2)
    with make(device):  # some switches know "unset", which a visit turns into the default
        pass
    settle(f, function, x, w)
    before = ask()
    with make(device):
        assert ask() != before
        recorded_then_replayed(f, function, x, w)
    assert ask() == before
    replayed(f, function, x, w)
    with make(device):
        replayed(f, function, x, w)
    assert counts(f) == (1, 2, 4, 0)


def test_grad_mode_inside_no_grad_is_the_mode_outside(device):
    f = cgt.jit(product)
    x, w = values(device), values(device, seed=2)
    settle(f, product, x, w)
    with torch.no_grad():
        recorded_then_replayed(f, product, x, w)
        with torch.enable_grad():
            replayed(f, product, x, w)
    with torch.inference_mode():
        recorded_then_replayed(f, product, x, w)
        with torch.inference_mode(False):
            replayed(f, product, x, w)


def test_another_autocast_dtype_is_another_child(device):
    f = cgt.jit(product)
    x, w = values(device), values(device, seed=2)
    settle(f, product, x, w)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(device.type, dtype=dtype):
            assert f(x, w).dtype is dtype
            replayed(f, product, x, w)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=False):
        assert f(x, w).dtype is torch.float32
    assert cgt.stats(f).records >= 3 and cgt.stats(f).eager == 0


def test_autocast_inside_the_function_needs_no_guard(device):
    def function(x, w):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return x @ w, w @ x

    f = cgt.jit(function)
    x, w = values(device), values(device, seed=2)
    settle(f, function, x, w)
    assert function(x, w)[0].dtype is torch.bfloat16
    w.mul_(2)  # autocast's cache of casts must not outlive the recording
    replayed(f, function, x, w)


def test_weights_cast_by_autocast_are_never_stale(device):
    weight = nn.Parameter(values(device))
    function = lambda x: x @ weight  # noqa: E731
    f = cgt.jit(function)
    x = values(device, seed=2)
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16):
        settle(f, function, x)
        weight.mul_(2)
        torch.clear_autocast_cache()
        replayed(f, function, x)


# --- requires_grad ----------------------------------------------------------------------------


def test_requires_grad_toggled_on_an_argument_is_another_child(device):
    f = cgt.jit(product)
    x, w = values(device), values(device, seed=2)
    with torch.no_grad():
        settle(f, product, x, w)
        x.requires_grad_()
        recorded_then_replayed(f, product, x, w)
        x.requires_grad_(False)
        replayed(f, product, x, w)
        x.requires_grad_()
        replayed(f, product, x, w)


def test_a_result_that_needs_gradients_has_them(device):
    f = cgt.jit(product)
    x, w = values(device), values(device, seed=2)
    settle(f, product, x, w)
    x.requires_grad_()
    for _ in range(3):
        y = f(x, w)
        assert y.requires_grad and y.grad_fn is not None
        y.sum().backward()
        assert same(x.grad, torch.ones_like(y) @ w.t())
        x.grad = None
        del y
    x.requires_grad_(False)
    records, replays = counts(f)[1:3]
    assert not f(x, w).requires_grad
    assert counts(f)[1:3] == (records, replays + 1)


def test_requires_grad_toggled_on_a_parameter_is_another_child(device):
    weight = nn.Parameter(values(device))
    function = lambda x: (x @ weight, weight.requires_grad)  # noqa: E731
    f = cgt.jit(function)
    x = values(device, seed=2)
    with torch.no_grad():
        settle(f, function, x)
        weight.requires_grad_(False)
        recorded_then_replayed(f, function, x)
        weight.requires_grad_()
        replayed(f, function, x)


# --- 0-dim CPU tensors ------------------------------------------------------------------------

SCALARS = {
    "mul": lambda x, s: x * s,
    "add": lambda x, s: x + s,
    "where": lambda x, s: torch.where(x > s, x, -x),
    "pow": lambda x, s: x.abs() ** s,
    "reversed": lambda x, s: s - x,
    "in a tree": lambda x, s: [x * s, x / s],
}


@pytest.mark.parametrize("name", SCALARS)
def test_a_cpu_scalar_argument_is_never_stale(device, name):
    function = SCALARS[name]
    f = cgt.jit(function, max_records=64)
    x = values(device, seed=9)
    scalar = torch.tensor(2.0)
    settle(f, function, x, scalar)
    for k in range(3, 6):  # in place
        scalar.fill_(k)
        for _ in range(2):
            assert same(f(x, scalar), function(x, scalar))
        replayed(f, function, x, scalar)
    others = [torch.tensor(float(k)) for k in range(1, 6)]
    for other in others:  # replaced
        for _ in range(2):
            assert same(f(x, other), function(x, other))
        replayed(f, function, x, other)
    assert counts(f)[3] == 0


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bool, torch.bfloat16])
def test_a_cpu_scalar_of_any_dtype_is_never_stale(device, dtype):
    function = lambda x, s: (x * s, x + s)  # noqa: E731
    f = cgt.jit(function)
    x = values(device, seed=9)
    scalar = torch.tensor(1, dtype=dtype)
    settle(f, function, x, scalar)
    for value in (0, 1, 0):
        scalar.fill_(value)
        for _ in range(2):
            assert same(f(x, scalar), function(x, scalar))
        replayed(f, function, x, scalar)


def test_a_cpu_scalar_in_a_closure_is_never_stale(device):
    scalar = torch.tensor(2.0)
    function = lambda x: x * scalar  # noqa: E731
    f = cgt.jit(function)
    x = values(device, seed=9)
    settle(f, function, x)
    for change in (lambda: scalar.fill_(3.0), lambda: scalar.add_(1), lambda: scalar.zero_()):
        change()
        assert same(f(x), function(x))
        replayed(f, function, x)
    scalar = torch.tensor(5.0)
    recorded_then_replayed(f, function, x)


def test_a_tensor_made_of_numbers_inside_the_function_is_new_and_right_each_time(device):
    config = Config(None)

    def function(x):
        scale = torch.tensor(config.scale)
        return x * scale.add_(1)

    f = cgt.jit(function)
    x = values(device, seed=9)
    for scale in (2.0, 2.0, 2.0, 2.0, 3.0, 3.0, 2.0):
        config.scale = scale
        assert same(f(x), function(x))
    assert counts(f) == (1, 2, 4, 0), cgt.explain(f)


# --- metadata and addresses -------------------------------------------------------------------


def many_ways(x):
    return torch.stack([x, x]), x.clone(), x.flatten(), x == x, x.unsqueeze(0)


def layout(make, dtype=torch.float32):
    return lambda device, seed: make(values(device, 4, 6, seed=seed).to(dtype))


LAYOUTS = {
    "contiguous": layout(lambda t: t),
    "transposed": layout(lambda t: t.t()),
    "strided": layout(lambda t: t[:, ::2]),
    "column": layout(lambda t: t[:, 1]),
    "odd offset": layout(lambda t: t.flatten()[3:]),
    "expanded": layout(lambda t: t[:, :1].expand(4, 5)),
    "expanded scalar": layout(lambda t: t[0, 0].expand(3)),
    "overlapping": layout(lambda t: t.as_strided((4, 3), (2, 1))),
    "channels last": layout(lambda t: t.view(2, 2, 3, 2).to(memory_format=torch.channels_last)),
    "zero-size": layout(lambda t: t[:0]),
    "zero-size inside": layout(lambda t: t[:, 2:2]),
    "0-dim": layout(lambda t: t[1, 2]),
    "0-dim of its own": layout(lambda t: t[1, 2].clone()),
    "size one": layout(lambda t: t[:1, :1]),
    "6 dims": layout(lambda t: t.view(2, 1, 2, 3, 1, 2).permute(5, 0, 4, 2, 1, 3)),
    "9 dims": layout(lambda t: t.view(2, 2, 1, 3, 2, 1, 1, 1, 1)),
    "float64": layout(lambda t: t, torch.float64),
    "float16": layout(lambda t: t, torch.float16),
    "bfloat16": layout(lambda t: t[:, 1:], torch.bfloat16),
    "bool": layout(lambda t: t > 0),
    "int8": layout(lambda t: (t * 10)[1:].to(torch.int8)),
    "uint8": layout(lambda t: (t.abs() * 10).to(torch.uint8).t()),
    "int64": layout(lambda t: (t * 10).long()),
    "complex64": layout(lambda t: t, torch.complex64),
    "complex128": layout(lambda t: torch.complex(t, -t), torch.float64),
    "conj": layout(lambda t: torch.complex(t, t + 1).conj()),
    "conj slice": layout(lambda t: torch.complex(t, t + 1).conj()[1:, ::2]),
    "neg": layout(lambda t: torch.complex(t, t + 1).conj().imag),
    "real": layout(lambda t: torch.complex(t, t + 1).real),
}


@pytest.mark.parametrize("inputs", ["auto", "copied", "fixed"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_and_dtype_is_bit_equal(device, name, inputs):
    f = cgt.jit(many_ways, inputs=inputs)
    one, two, three = (LAYOUTS[name](device, seed) for seed in range(3))
    settle(f, many_ways, one)
    for x in (two, two, three, three):
        assert same(f(x), many_ways(x))
    for x in (three, two, three, one):
        assert same(f(x), many_ways(x))
    stats = cgt.stats(f)
    assert (stats.warmups, stats.eager) == (1, 0)
    assert stats.records <= 3 and stats.replays >= 7
    if inputs == "copied":
        assert stats.records == 1
    assert (stats.copied_bytes > 0) == (inputs == "copied" and one.numel() > 0)
    if one.numel():
        assert (stats.rebinds > 0) == (inputs != "fixed")


@pytest.mark.parametrize("inputs", ["auto", "copied", "fixed"])
@pytest.mark.parametrize(
    "make",
    [
        lambda t: {"x": nn.Parameter(t)},
        lambda t: {"x": nn.Parameter(t, requires_grad=False)},
    ],
    ids=["parameter", "frozen parameter"],
)
def test_inputs_that_cannot_be_copied_have_a_child_per_address(device, make, inputs):
    function = lambda tree: sum(2 * t.sum() for t in tree.values())  # noqa: E731
    f = cgt.jit(function, inputs=inputs)
    one, two, three = (make(values(device, seed=k)) for k in range(3))
    with torch.no_grad():
        settle(f, function, one)
        recorded_then_replayed(f, function, two)
        told = inputs == "auto" and isinstance(one["x"], nn.Parameter)  # to which no gradient flows
        (replayed if told else recorded_then_replayed)(f, function, three)
        for tree in (one, two, three, two):
            replayed(f, function, tree)


@pytest.mark.parametrize("inputs", ["auto", "fixed"])
def test_inputs_that_cannot_be_copied_and_always_move_reach_the_limit(device, inputs):
    f = cgt.jit(lambda p: p * 2, inputs=inputs, max_records=3)
    parameters = [values(device, seed=k) for k in range(8)]
    if inputs == "auto":
        parameters = [nn.Parameter(t) for t in parameters]
    for p in parameters:
        assert same(f(p), p * 2)
    assert counts(f) == (1, 3, 0, 4)
    ((reason, times),) = cgt.stats(f).reasons.items()
    assert times == 4 and "the address of args[0] changed" in reason
    assert (hex(parameters[4].data_ptr()) in reason) == core.debug_build()


def test_views_at_other_alignments_are_other_children(device):
    function = lambda x: (x.sum(), x @ x, x * 2)  # noqa: E731
    f = cgt.jit(function, inputs="copied")
    base = values(device, 1024)
    offsets = [0, 1, 2, 3]  # elements of four bytes; 128 of them are a whole alignment class
    for k, offset in enumerate(offsets):
        x = base[offset : offset + 100]
        if k == 0:
            settle(f, function, x)
        else:
            recorded_then_replayed(f, function, x)
    for offset in offsets:
        replayed(f, function, base[offset + 128 : offset + 228])
        replayed(f, function, base[offset : offset + 100])


@pytest.mark.parametrize("inputs", ["auto", "copied"])
def test_one_element_may_lie_at_any_address(device, inputs):
    function = lambda x, t: (x * t, t + 1, x.sum() - t)  # noqa: E731
    f, x, steps = cgt.jit(function, inputs=inputs), values(device), torch.arange(20.0, device=device)
    for k in range(20):
        assert same(f(x, steps[k]), function(x, steps[k])), k
    assert cgt.stats(f).replays >= 16 and cgt.stats(f).records <= 2, cgt.explain(f)


def test_each_of_many_arguments_has_an_alignment_class_of_its_own(device):
    """Those behind the first 32, which the core looks at together, too: single elements stand in front of them."""
    function = lambda ones, wide: sum(wide) + sum(ones)  # noqa: E731
    f, records = cgt.jit(function), []
    for k in range(12):
        ones = [values(device, 1, seed=k) for _ in range(33)]
        wide = [values(device, 40, seed=k)[k // 6 :][:32] for _ in range(40)]
        assert same(f(ones, wide), function(ones, wide)), k
        records.append(cgt.stats(f).records)
    assert records[-1] > records[5] and cgt.stats(f).replays >= 6, (records, cgt.explain(f))


def test_views_of_one_storage_as_several_arguments_are_bit_equal(device):
    function = lambda x, y: (x * 2, y.add_(1), x + y)  # noqa: E731
    f, buffers = cgt.jit(function, max_records=32), [values(device, 64), values(device, 64)]
    for starts in [(0, 32)] * 3 + [(0, 4)] * 3 + [(4, 0)] * 3 + [(8, 8)] * 3 + [(0, 32)]:
        mine, theirs = ([t[start : start + 16] for start in starts] for t in buffers)
        assert same(f(*mine), function(*theirs))
        assert same(*buffers)
    stats = cgt.stats(f)
    assert (stats.warmups, stats.eager) == (1, 0) and stats.replays >= 6


def test_a_returned_view_of_an_argument_is_a_view_of_todays_argument(device):
    function = lambda x: (x[1:].t(), x.view(-1)[::2], x.expand(2, 4, 4))  # noqa: E731
    f = cgt.jit(function)
    inputs = [values(device, seed=k) for k in range(4)]
    for x in inputs[:1] * 3 + inputs[1:]:
        got, want = f(x), function(x)
        assert same(got, want)
        for mine, theirs in zip(got, want, strict=True):
            assert mine.data_ptr() == theirs.data_ptr() and mine._is_view() == theirs._is_view()
        got[0].zero_()
        assert not x[1:].any()
    warmups, records, replays, eager = counts(f)
    assert (warmups, eager) == (1, 0) and records <= 2 and replays >= 3


# --- random sequences -------------------------------------------------------------------------

SHAPES = [(8,), (2, 4), (3, 5), (1,), (), (0, 3), (2, 3, 4)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int8, torch.complex64]
STATICS = [0, "1", True, False, 1.0, "a", None]  # a number that changes would be live
keys = some.tuples(
    some.sampled_from(SHAPES),
    some.sampled_from(DTYPES),
    some.booleans(),
    some.sampled_from([0, 1, 3, 64, 512]),
    some.sampled_from(STATICS),
)
relaxed = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def buffers_on(device):
    return {dtype: (values(device, 2048, seed=5) * 10).to(dtype) for dtype in DTYPES}


def tensor_of(buffers, key):
    """The same key is the same address, shape and strides."""
    shape, dtype, contiguous, offset, _ = key
    n = torch.Size(shape).numel()
    flat = buffers[dtype][offset : offset + n * (2 - contiguous)]
    return flat[:: 2 - contiguous].view(shape) if contiguous or n < 2 else (
        flat.view(*shape, 2)[..., 0]
    )  # fmt: skip


def read(x, static):
    number = sum(repr(static).encode()) % 7
    return x * number, x.flatten().cumsum(0), torch.cat([x.flatten(), x.flatten()]), static


def write(x, static):
    number = sum(repr(static).encode()) % 7
    x.add_(number)
    return x.sum(), x


def facts(x, static, address):
    """What tells two calls apart for a guard."""
    return x.shape, x.stride(), x.dtype, repr(static), address


@pytest.mark.parametrize("inputs", ["copied", "fixed"])
@relaxed
@given(sequence=some.lists(keys, min_size=4, max_size=20))
def test_in_any_sequence_new_keys_record_and_known_keys_replay(device, inputs, sequence):
    f = cgt.jit(read, inputs=inputs, max_records=64)
    buffers = buffers_on(device)
    recorded, expected = set(), [1, 0, 0, 0]
    for k, key in enumerate(sequence + sequence[::-1]):
        x, static = tensor_of(buffers, key), key[-1]
        assert same(f(x, static), read(x, static))
        at = x.storage_offset() * x.element_size()
        aligned = 0 if x.numel() == 1 else at % (512 if x.is_cuda else 64)
        mark = facts(x, static, aligned if inputs == "copied" else at)
        if k:
            expected[2 if mark in recorded else 1] += 1
            recorded.add(mark)
        assert counts(f) == tuple(expected), (k, key)


@relaxed
@given(sequence=some.lists(keys, min_size=2, max_size=10))
def test_a_sequence_that_repeats_settles_into_replays(device, sequence):
    f = cgt.jit(read, max_records=64)
    buffers = buffers_on(device)
    for _ in range(5):
        before = counts(f)
        for key in sequence:
            x, static = tensor_of(buffers, key), key[-1]
            assert same(f(x, static), read(x, static))
        turned = [b - a for a, b in zip(before, counts(f), strict=True)]
        assert turned[3] == 0
    assert turned == [0, 0, len(sequence), 0]


@relaxed
@given(sequence=some.lists(keys, min_size=2, max_size=12))
def test_writes_land_in_the_callers_memory_and_known_addresses_replay(device, sequence):
    f = cgt.jit(write, max_records=64, inputs="fixed")
    mine, theirs = buffers_on(device), buffers_on(device)
    recorded, expected = set(), [1, 0, 0, 0]
    for k, key in enumerate(sequence * 2):
        static = key[-1]
        x, y = tensor_of(mine, key), tensor_of(theirs, key)
        versions = x._version, y._version
        (total, got), (want, _) = f(x, static), write(y, static)
        assert got is x and same(total, want)
        assert x._version - versions[0] == y._version - versions[1]
        assert same(mine[key[1]], theirs[key[1]])
        mark = facts(x, static, (x.dtype, x.storage_offset()))
        if k:
            expected[2 if mark in recorded else 1] += 1
            recorded.add(mark)
        assert counts(f) == tuple(expected), (k, key)
        del total, got
