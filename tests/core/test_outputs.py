"""What a call hands out: the same tensor again while nobody holds it, and right values for whoever
does."""

import functools
import gc
import weakref

import pytest
import torch
from helpers import double, jit_warm, line_of, numbers, refill
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cgt


def replays_of(f, call):
    """How many replays of f this call makes; its result is dropped."""
    before = cgt.stats(f).replays
    call()
    return cgt.stats(f).replays - before


def occupy(like):
    """Objects and memory that would take the place of a tensor that was just freed."""
    return [torch.empty_like(like) for _ in range(16)]


# --- the same tensor again, or a new one ------------------------------------------------------


def test_same_tensor_comes_back_when_nobody_holds_it(device):
    x = numbers(device)
    f = jit_warm(double, x)
    y = f(x)
    want, like = (id(y), y.data_ptr()), torch.empty_like(y)
    del y
    for k in range(5):
        decoys = occupy(like)
        refill(x, k)
        y = f(x)
        assert (id(y), y.data_ptr()) == want
        assert torch.equal(y, double(x))
        del y, decoys
    s = cgt.stats(f)
    assert (s.replays, s.rescues) == (6, 0)


def test_held_result_is_not_handed_out_again(device):
    x = numbers(device)
    f = jit_warm(double, x)
    first = f(x)
    second = f(x)
    assert second is not first
    assert second.data_ptr() != first.data_ptr()
    first.zero_()
    assert torch.equal(second, double(x))


def hold_name(y):
    return lambda: y


def hold_list(y):
    box = [[y]]
    return lambda: box[0][0]


def hold_view(y):
    part = y[2:]
    return lambda: torch.cat([(part[:2] - 2), part])  # numbers() times two: steps of one


def hold_whole_view(y):
    flat = y.view(-1)
    return lambda: flat


def hold_detached(y):
    alias = y.detach()
    return lambda: alias


def hold_data(y):
    alias = y.data
    return lambda: alias


def hold_saved(y):
    w = torch.ones_like(y, requires_grad=True)
    product = w * y
    return lambda: torch.autograd.grad(product.sum(), w, retain_graph=True)[0]


def hold_saved_view(y):
    w = torch.ones_like(y, requires_grad=True)
    product = w * y.view(2, -1).view(-1)
    return lambda: torch.autograd.grad(product.sum(), w, retain_graph=True)[0]


def hold_grad_fn(y):
    leaf = y.requires_grad_()
    total = (leaf * leaf).sum()
    return lambda: torch.autograd.grad(total, total.grad_fn.next_functions[0][0].next_functions[0][0]
                                       .variable, retain_graph=True)[0] / 2  # fmt: skip


def hold_grad(y):
    p = torch.zeros_like(y, requires_grad=True)
    p.grad = y
    return lambda: p.grad


def hold_storage(y):
    storage, dtype = y.untyped_storage(), y.dtype
    return lambda: torch.empty(0, dtype=dtype, device=storage.device).set_(storage)


def hold_typed_alias(y):
    alias = y.view(torch.int32)
    return lambda: alias.view(torch.float32)


def hold_attribute(y):
    other = torch.zeros(1)
    other.friend = y
    return lambda: other.friend


def hold_closure_cycle(y):
    cycle = {"y": y}
    cycle["self"] = cycle
    return lambda: cycle["self"]["y"]


HOLDERS = [
    hold_name, hold_list, hold_view, hold_whole_view, hold_detached, hold_data, hold_saved,
    hold_saved_view, hold_grad_fn, hold_grad, hold_storage, hold_typed_alias, hold_attribute,
    hold_closure_cycle,
]  # fmt: skip


@pytest.mark.parametrize("hold", HOLDERS, ids=lambda h: h.__name__)
def test_held_value_stays_right(device, hold):
    x = numbers(device)
    f = jit_warm(double, x)
    read = hold(f(x))
    want = double(x)
    assert torch.equal(read(), want)
    for k in range(1, 4):
        refill(x, 10 * k)
        y = f(x)
        assert torch.equal(read(), want)
        assert torch.equal(y, double(x))
        del y
    s = cgt.stats(f)
    assert (s.replays, s.rescues, s.rescued_bytes) == (4, 1, want.nbytes)
    cgt.step()
    assert torch.equal(read(), want)
    cgt.reset(f)
    for _ in range(3):
        cgt.step()
        f(x)
    assert torch.equal(read(), want)
    assert cgt.stats(f).replays == 5
    del f
    gc.collect()
    cgt.step()
    trash = occupy(want)
    for t in trash:
        t.fill_(-1)
    assert torch.equal(read(), want)


@pytest.mark.parametrize("end", ["reset", "delete"])
def test_result_held_while_its_recording_goes_stays_right(device, end):
    x = numbers(device)
    f = jit_warm(double, x)
    y = f(x)
    want = double(x)
    if end == "reset":
        cgt.reset(f)
    else:
        del f
    gc.collect()
    cgt.step()
    trash = [t.fill_(-1) for t in occupy(want)]
    other = jit_warm(double, trash[0])
    other(trash[0])
    assert torch.equal(y, want)


def test_weakly_referenced_result_never_shows_another_call(device):
    x = numbers(device)
    f = jit_warm(double, x)
    ref = weakref.ref(f(x))
    want = double(x)
    refill(x, 5)
    y = f(x)
    assert ref() is not y
    assert ref() is None or torch.equal(ref(), want)
    assert torch.equal(y, double(x))
    assert cgt.stats(f).replays == 2


def test_weak_reference_keeps_its_callback(device):
    x = numbers(device)
    f = jit_warm(double, x)
    died = []
    ref = weakref.ref(f(x), lambda _: died.append(1))
    f(x)
    assert died == [1] and ref() is None


def test_numpy_array_of_a_result_stays_right():  # the CPU's only: nobody else has numpy views
    x = numbers(torch.device("cpu"))
    f = jit_warm(double, x)
    array = f(x).numpy()
    want = double(x)
    refill(x, 5)
    y = f(x)
    assert torch.equal(torch.from_numpy(array), want)
    assert torch.equal(y, double(x))


def test_dlpack_alias_of_a_result_stays_right():  # the CPU's only: see decision 18 (docs/decisions)
    x = numbers(torch.device("cpu"))
    f = jit_warm(double, x)
    alias = torch.from_dlpack(f(x))
    want = double(x)
    refill(x, 5)
    y = f(x)
    assert torch.equal(alias, want)
    assert torch.equal(y, double(x))


def test_storage_object_that_is_gone_holds_nothing(device):
    x = numbers(device)
    f = jit_warm(double, x)
    for _ in range(3):
        assert f(x).untyped_storage().nbytes() == x.nbytes
    s = cgt.stats(
        f
    )  # PyTorch keeps the object, which counts as a holder: a rescue, never a wrong value
    assert s.replays == 3 and s.rescues <= 3


def test_dead_outputs_cost_no_rescue(device):
    x = numbers(device)
    f = jit_warm(lambda x: (x + 1, [x * 2, {"a": x - 1}]), x)
    for k in range(20):
        refill(x, k)
        f(x)
        if k > 9:
            cgt.step()
    s = cgt.stats(f)
    assert (s.replays, s.rescues, s.rescued_bytes) == (20, 0, 0)


def test_only_the_held_output_is_rescued(device):
    x = numbers(device, 16)
    f = jit_warm(lambda x: (x + 1, x[:3] * 2, x - 1), x)
    _, small, _ = f(x)
    del _
    want = x[:3] * 2
    refill(x, 7)
    f(x)
    assert torch.equal(small, want)
    s = cgt.stats(f)
    assert (s.rescues, s.rescued_bytes) == (1, small.nbytes)


def test_every_held_result_is_rescued_once(device):
    x, others = numbers(device), cgt.stats().rescues
    f = jit_warm(double, x)
    held, wants = [], []
    for k in range(6):
        refill(x, k)
        held.append(f(x))
        wants.append(double(x))
    for y, want in zip(held, wants, strict=True):
        assert torch.equal(y, want)
    s = cgt.stats(f)
    assert (s.replays, s.rescues, s.rescued_bytes) == (6, 5, 5 * x.nbytes)
    assert cgt.stats().rescues == others + 5
    assert "rescue" in cgt.explain(f)


def test_result_of_the_recording_call_is_rescued_too(device):
    x = numbers(device)
    f = cgt.jit(double)
    warm = f(x)
    recorded = f(x)
    want = double(x)
    refill(x, 9)
    replayed = f(x)
    assert torch.equal(warm, want) and torch.equal(recorded, want)
    assert torch.equal(replayed, double(x))
    assert cgt.stats(f).rescues == 1


def test_empty_and_scalar_results_are_kept_right(device):
    x = numbers(device)
    f = jit_warm(lambda x: (x.sum(), x[:0] * 2), x)
    total, nothing = f(x)
    want = x.sum()
    refill(x, 3)
    again, still_nothing = f(x)
    assert torch.equal(total, want) and torch.equal(again, x.sum())
    assert nothing.shape == still_nothing.shape == (0,)
    assert cgt.stats(f).replays == 2


# --- outputs="error" and "borrow" -------------------------------------------------------------

ACCESSES = {
    "op": lambda y: y + 1,
    "reduce": lambda y: y.sum(),
    "list": lambda y: y.tolist(),
    "copy out": lambda y: y.clone(),
    "write": lambda y: y.zero_(),
    "address": lambda y: y.data_ptr(),
    "print": lambda y: repr(y),
}


@pytest.mark.parametrize("access", ACCESSES.values(), ids=ACCESSES.keys())
def test_error_policy_raises_at_access_after_step(device, access):
    def function(x):
        return x * 2  # made here

    x = numbers(device)
    f = jit_warm(function, x, outputs="error")
    y = f(x)
    assert torch.equal(y, x * 2)
    cgt.step()  # ended here
    with pytest.raises(RuntimeError) as caught:
        access(y)
    here = test_error_policy_raises_at_access_after_step
    assert line_of(function, "# made here") in str(caught.value)
    assert line_of(here, "# ended here") in str(caught.value)
    assert 'outputs="error"' in str(caught.value)
    assert y.shape == (8,)
    del y
    assert replays_of(f, lambda: f(x)) == 1


def test_error_policy_raises_at_access_after_an_overwriting_call(device):
    def function(x):
        return x * 2  # made here

    x = numbers(device)
    f = jit_warm(function, x, outputs="error")
    y = f(x)
    z = f(x)  # ended here
    with pytest.raises(RuntimeError) as caught:
        y.clone()
    here = test_error_policy_raises_at_access_after_an_overwriting_call
    assert line_of(function, "# made here") in str(caught.value)
    assert line_of(here, "# ended here") in str(caught.value)
    assert torch.equal(z, x * 2)
    assert z.data_ptr() != 0
    s = cgt.stats(f)
    assert (s.replays, s.rescues) == (2, 0)


ALIASES = {
    "view": lambda y: y[1:],
    "detached": lambda y: y.detach(),
    "storage": lambda y: torch.empty(0, device=y.device).set_(y.untyped_storage()),
}


@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES.keys())
def test_error_policy_reaches_aliases(device, alias):
    x = numbers(device)
    f = jit_warm(double, x, outputs="error")
    part = alias(f(x))
    cgt.step()
    with pytest.raises(RuntimeError, match="was overwritten"):
        part + 1


def test_error_policy_takes_its_own_last_result_as_input(device):
    f = cgt.jit(double, outputs="error")
    got, want = numbers(device), numbers(device)
    for _ in range(8):
        got, want = f(got), double(want)
        assert torch.equal(got, want)
    s = cgt.stats(f)
    assert s.eager == 0 and s.replays >= 3


def test_error_policy_feeds_results_to_an_older_function(device):
    xs = [numbers(device, start=k) for k in range(4)]
    old = jit_warm(double, xs[0])
    for x in xs:
        old(x)
    new = jit_warm(lambda x: x - 1, xs[0], outputs="error")
    for _ in range(3):
        y = new(xs[0])
        assert torch.equal(old(y), double(xs[0] - 1))
        del y
    s = cgt.stats(old)
    assert s.eager == 0 and s.replays >= 3
    assert cgt.stats(new).replays == 3


def test_error_policy_leaves_clones_and_dead_results_alone(device):
    x = numbers(device)
    f = jit_warm(double, x, outputs="error")
    mine = f(x).clone()
    want = double(x)
    refill(x, 4)
    for _ in range(3):
        cgt.step()
        assert torch.equal(f(x), double(x))
    assert torch.equal(mine, want)
    s = cgt.stats(f)
    assert (s.replays, s.rescues, s.eager) == (4, 0, 0)


def test_step_leaves_results_of_other_policies_alone(device):
    x = numbers(device)
    strict = jit_warm(double, x, outputs="error")
    kind = jit_warm(double, x)
    loose = jit_warm(double, x, outputs="borrow")
    for _ in range(3):
        cgt.step()
        a, b, c = strict(x), kind(x), loose(x)
    cgt.step()
    assert torch.equal(b, double(x)) and torch.equal(c, double(x))
    rescued = cgt.stats(kind).rescues
    with pytest.raises(RuntimeError, match="was overwritten"):
        a + 1
    assert cgt.stats(kind).rescues == rescued  # nothing was overwritten yet


def test_error_policy_does_not_outlive_a_reset(device):
    x = numbers(device)
    f = jit_warm(double, x, outputs="error")
    y = f(x)
    want = double(x)
    cgt.reset(f)
    cgt.step()
    assert torch.equal(y, want)


def test_error_policy_spares_inputs_that_are_returned(device):
    x = numbers(device)
    f = jit_warm(lambda x: (x, x[1:], x * 2), x, outputs="error")
    same, part, made = f(x)
    cgt.step()
    assert torch.equal(same, x) and torch.equal(part, x[1:])
    with pytest.raises(RuntimeError, match="was overwritten"):
        made.clone()


def test_borrow_hands_out_the_same_memory_overwritten(device):
    x = numbers(device)
    f = jit_warm(double, x, outputs="borrow")
    y = f(x)
    first = y.clone()
    refill(x, 9)
    z = f(x)
    assert z is y
    assert torch.equal(y, double(x)) and not torch.equal(y, first)
    s = cgt.stats(f)
    assert (s.replays, s.rescues) == (2, 0)


# --- several functions ------------------------------------------------------------------------


def test_two_functions_pass_results_on_and_every_held_one_stays_right(device):
    def first(x):
        return x * 0.5 + 1

    def second(x, y):
        return x - y, (x + y)[1:]

    a, b = cgt.jit(first), cgt.jit(second)
    x = numbers(device)
    twin = x.clone()
    held, wants = [], []
    for k in range(40):
        y, want_y = a(x), first(twin)
        z, want_z = b(y, x), second(want_y, twin)
        w, want_w = a(z[0]), first(want_z[0])
        held.append((y, z[0], z[1], w))
        wants.append((want_y, *want_z, want_w))
        x, twin = w, want_w
        if k % 7 == 0:
            cgt.step()
        if k % 3 == 0:
            held.pop(0), wants.pop(0)
    for got, want in zip(held, wants, strict=True):
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    for f in (a, b):
        s = cgt.stats(f)
        assert s.eager == 0 and s.replays > 20 and s.rescues > 0


def test_chain_that_holds_nothing_rescues_nothing(device):
    a, b = cgt.jit(lambda x: x * 2), cgt.jit(lambda x: x + 1)
    x = numbers(device)
    for k in range(8):
        refill(x, k)
        assert torch.equal(b(a(x)), x * 2 + 1)
    for f in (a, b):
        s = cgt.stats(f)
        assert (s.rescues, s.eager) == (0, 0) and s.replays >= 5


def test_result_fed_back_to_its_own_function(device):
    f = cgt.jit(double)
    x = numbers(device)
    got, want = x.clone(), x.clone()
    for _ in range(10):
        got, want = f(got), double(want)
        assert torch.equal(got, want)
    s = cgt.stats(f)
    assert s.eager == 0 and s.replays >= 5


def test_older_recording_overwrites_nothing_that_is_held(device):
    x = numbers(device, 64)
    a = jit_warm(lambda x: (x * 2).sin() + 1, x)
    b = jit_warm(lambda x: (x * 3).cos() - 1, x)
    for k in range(4):
        refill(x, k)
        y, z = a(x), b(x)
        for _ in range(3):
            b(x), a(x)
        assert torch.equal(y, (x * 2).sin() + 1) and torch.equal(z, (x * 3).cos() - 1)
    assert cgt.stats(a).replays == cgt.stats(b).replays == 16


STEPS = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", "drop", "write", "view", "step", "reset", "stash"]),
              st.integers(0, 20)),
    min_size=10, max_size=60,
)  # fmt: skip


def is_overwritten(t):
    """Does touching t say that outputs="error" let it go?"""
    try:
        t.sum()
    except RuntimeError as error:
        assert "was overwritten" in str(error)
        return True
    return False


@pytest.mark.parametrize("policy", ["rescue", "error"])
@settings(max_examples=25, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(program=STEPS)
def test_any_mixture_of_calls_holds_and_writes_agrees_with_eager(device, policy, program):
    functions = {
        "a": lambda x: [x * 0.5 + 1],
        "b": lambda x: [x - 1, x],
        "c": lambda x: (lambda y: [y, y.flip(0), y.view(2, -1)[0].sum() + x])(x.tanh()),
    }
    jitted = {k: cgt.jit(v, outputs=policy if k == "a" else "rescue") for k, v in functions.items()}
    held = [(numbers(device, start=1), numbers(device, start=1))]
    for what, which in program:
        got, want = held[which % len(held)]
        if what in functions:
            held += zip(jitted[what](got), functions[what](want), strict=True)
        elif what == "drop" and len(held) > 1:
            del held[which % len(held)]
        elif what == "write":
            got.mul_(0.5).add_(which)
            want.mul_(0.5).add_(which)
        elif what == "view":
            held.append((got.view(2, -1).view(-1), want.view(2, -1).view(-1)))
        elif what == "step":
            cgt.step()
        elif what == "reset":
            cgt.reset(list(jitted.values())[which % 3])
        elif what == "stash":
            held.append((got.clone(), want.clone()))
        del got, want
        if policy == "error":
            held = [h for h in held if not is_overwritten(h[0])]
        assert all(torch.equal(g, w) for g, w in held)
        held = held or [(numbers(device, start=1), numbers(device, start=1))]
    for f in jitted.values():
        s = cgt.stats(f)
        assert s.calls == s.warmups + s.records + s.replays + s.eager
        assert s.eager == 0 or s.records >= 8, s.reasons


@pytest.mark.parametrize("kind", ["closure", "partial", "object", "module"])
def test_a_returned_callable_that_the_call_made_runs_eagerly(device, kind):
    class Times:
        def __init__(self, x):
            self.x = x

        def __call__(self, v):
            return self.x + v

    make = {
        "closure": lambda x: lambda v: x + v,
        "partial": lambda x: functools.partial(torch.add, x),
        "object": Times,
        "module": lambda x: torch.nn.Identity(),
    }[kind]
    f = cgt.jit(lambda x: (x * 2, make(x)))
    for k in range(5):
        x = torch.full((3,), float(k), device=device)
        y, call = f(x)
        assert torch.equal(y, x * 2)
        assert kind == "module" or torch.equal(call(1.0), x + 1)
    assert cgt.stats(f).replays == 0 and "which a replay cannot build" in " ".join(cgt.stats(f).reasons)


def test_a_returned_callable_that_was_there_before_replays(device):
    helper, layer = torch.sin, torch.nn.Linear(2, 2)
    f, x = cgt.jit(lambda x: (x * 2, helper, layer, double)), torch.ones(3, device=device)
    for _ in range(4):
        assert f(x)[1:] == (helper, layer, double)
    assert cgt.stats(f).replays == 2
