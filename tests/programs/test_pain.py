"""The messages about CUDA graphs that people paste most often, of PyTorch's tools and others': for each the program that brings it
about there, and what cgt does and says instead. The names are the messages' first words."""

import threading
import warnings

import pytest
import torch
from helpers import identical, plain, replays_after, tells, values
from torch import nn
from torch.utils.checkpoint import checkpoint

import cgt

CALLS = 8
HERE = "test_pain.py"


def told(f):
    return " ".join(cgt.stats(f).reasons)


def agrees(f, function, *args, calls=CALLS, replays=CALLS - 3):
    """The same values at each call, and replays."""
    for _ in range(calls):
        assert identical(f(*args), function(*args)), cgt.explain(f)
    assert cgt.stats(f).replays >= replays, cgt.explain(f)


def test_accessing_tensor_output_of_cudagraphs_that_has_been_overwritten(device):
    """By default it is not: who holds a result keeps it. Where an error is asked for, it names the function and both lines."""
    f, x = cgt.jit(lambda x: x * 2), values(device)
    held = [f(x + k) for k in range(CALLS)]
    assert all(identical(y, (x + k) * 2) for k, y in enumerate(held)) and cgt.stats(f).replays >= CALLS - 3
    g = cgt.jit(lambda x: x * 2, outputs="error")
    for _ in range(4):
        cgt.step()
        y = g(x)
    cgt.step()
    with pytest.raises(RuntimeError) as error:
        y + 1
    assert str(error.value).count(HERE) == 2 and "Clone it" in str(error.value), error.value


def test_unable_to_hit_fast_path_because_of_pending_uninvoked_backwards(device):
    """Two forwards pend, and both replay."""
    net = nn.Linear(3, 3).to(device)
    f = cgt.jit(net)
    for k in range(CALLS):
        first, second = f(values(device, seed=k)), f(values(device, seed=k + 1))
        (first.sum() + second.square().sum()).backward()
        want = torch.autograd.grad(plain(net)(values(device, seed=k)).sum() + plain(net)(values(device, seed=k + 1)).square().sum(), net.weight)[0]
        assert torch.allclose(net.weight.grad, want)
        net.zero_grad()
    assert cgt.stats(f).replays >= 2 * CALLS - 6, cgt.explain(f)


def test_skipping_cudagraphs_due_to_mutated_inputs(device):
    """What is written in place is the caller's tensor."""

    def function(cache, x):
        cache.mul_(0.5).add_(x)
        return cache.sum()

    f, x = cgt.jit(function), values(device)
    ours, theirs = torch.zeros_like(x), torch.zeros_like(x)
    for _ in range(CALLS):
        assert identical(f(ours, x), function(theirs, x)) and identical(ours, theirs)
    assert cgt.stats(f).replays >= CALLS - 3


@tells("number_on_host")
def test_skipping_cudagraphs_due_to_cpu_device(device):
    """A number in a tensor of the host's is an operand: on the GPU's side its value is part of the recording."""
    f, x = cgt.jit(lambda x, t: x * t), values(device)
    for k in range(3 * CALLS):
        t = torch.tensor(k / 3)
        assert identical(f(x, t), x * t)
    if device.type == "cpu":
        assert cgt.stats(f).replays >= 3 * CALLS - 4, cgt.explain(f)
        return
    assert "args[1] is a CPU tensor whose numbers differ" in told(f), told(f)
    f = cgt.jit(lambda x, t: x * t)  # as it says
    for k in range(CALLS):
        assert identical(f(x, k / 3), x * (k / 3))
    assert cgt.stats(f).replays >= CALLS - 3, cgt.explain(f)


def test_skipping_cudagraphs_due_to_multiple_devices(device):
    """The op and its line are named."""
    f, x = cgt.jit(lambda x: x + torch.empty(3, device="meta").numel()), values(device)
    for _ in range(CALLS):
        assert identical(f(x), x + 3)
    assert cgt.stats(f).replays or HERE in told(f), cgt.explain(f)


def test_static_input_data_pointer_changed(device):
    """A parameter that is replaced (LoRA, EMA, load_state_dict) is followed, and explain names it."""
    net, x = nn.Linear(3, 3).to(device).requires_grad_(False), values(device)
    f = cgt.jit(lambda x: net(x))
    for k in range(48):
        if k % 3 == 2:
            net.weight = nn.Parameter(values(device, 3, 3, seed=k), requires_grad=False)
        assert identical(f(x), net(x)), cgt.explain(f)
    s = cgt.stats(f)
    assert s.records <= 6 and s.replays >= 40 and "net.weight (followed)" in cgt.explain(f), cgt.explain(f)


def test_skipping_cudagraph_due_to_function_exceeding_max_re_recording_limit(device, short_cool_down):
    """It names the argument and what it was, and ends."""
    f = cgt.jit(lambda x: x * 2, max_records=2)
    for n in range(1, 6):
        x = torch.ones(n, device=device)
        assert identical(f(x), x * 2)
    assert "recorded 2 times" in told(f) and "args[0] (recorded with (" in told(f), told(f)
    replays_after(f, torch.ones(9, device=device))


def test_cudagraph_supports_dynamic_shapes_by_recording_a_new_graph_for_each_distinct_input_size(device):
    """Those that come again have a recording each, told apart by their size."""
    f = cgt.jit(lambda x: x * 2)
    for k in range(24):
        x = torch.ones(2 + k % 3, device=device)
        assert identical(f(x), x * 2)
    assert cgt.stats(f).records == 3 and all(f"args[0] = ({n},)" in cgt.explain(f) for n in (2, 3, 4)), cgt.explain(f)


def test_operation_not_permitted_when_stream_is_capturing(device):
    """A value that Python reads is no failure; where it must be one, op and line are named."""

    def function(x):
        return x * (2 if x.sum() > 0 else 3)

    agrees(cgt.jit(function), function, values(device))

    def reads(x):
        return x * float(x.numpy(force=True).sum())

    f, x = cgt.jit(reads), values(device)
    for _ in range(4):
        assert identical(f(x), reads(x))
    assert cgt.stats(f).replays == 0 and f"{HERE}:{reads.__code__.co_firstlineno + 1}" in told(f), told(f)


def test_operation_failed_due_to_a_previous_error_during_capture(device):
    """The first thing is told, and each with its line by the doctor."""

    def function(x, log):
        log.append(x.numpy(force=True).sum())
        return x * float(x.mean().numpy(force=True))

    found = cgt.doctor(function, values(device), [])
    lines = {function.__code__.co_firstlineno + 1, function.__code__.co_firstlineno + 2}
    assert all(any(f"{HERE}:{line}" in one.text for one in found.findings) for line in lines), found


@pytest.fixture
def side(device):
    if device.type == "cpu":
        pytest.skip("the host has no streams")
    return torch.cuda.Stream()


def test_capturing_stream_has_unjoined_work(device, side):
    x = values(device)

    def function(x):
        y = x * 2
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            z = x * 3
        function.z = z
        return y

    f = cgt.jit(function)
    for _ in range(4):
        assert identical(f(x), x * 2)
    torch.cuda.synchronize()
    agrees(cgt.jit(lambda x: x + 1), lambda x: x + 1, x)  # nothing is left behind


@pytest.mark.parametrize("lasts", [True, False], ids=["kept", "in vain"])
def test_events_should_have_synchronized_when_checkpointing_block(device, side, lasts):
    """Memory that another stream uses, and says so, is free only when that is through."""
    x = values(device)

    def function(x):
        y = x * 2
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            z = y + 1
        y.record_stream(side)
        del y
        t = torch.ones_like(x)
        z.record_stream(torch.cuda.current_stream())
        torch.cuda.current_stream().wait_stream(side)
        if not lasts:
            function.z = x + 1
        return z * t

    f = cgt.jit(function)
    for k in range(8):
        assert identical(f(x.fill_(k)), x * 2 + 1)
    assert (cgt.stats(f).replays >= 6) is lasts, cgt.explain(f)
    agrees(cgt.jit(lambda x: x + 1), lambda x: x + 1, x)


def test_operation_would_make_the_legacy_stream_depend_on_a_capturing_blocking_stream(device):
    """Another thread goes on meanwhile."""
    stop, x, failed = threading.Event(), values(device), []

    def work():
        try:
            y = values(device, seed=2)
            while not stop.is_set():
                y = (y * 1.0001).clamp(-1, 1)
                y.sum().item()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for k in range(6):
            agrees(cgt.jit(lambda x: x * k + 1), lambda x: x * k + 1, x, replays=1)
    finally:
        stop.set()
        thread.join()
    assert not failed


def test_cannot_call_current_seed_during_cuda_graph_capture(device):
    """Activation checkpoints, dropout inside."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout()).to(device)

    def function(x):
        return checkpoint(net, x, use_reentrant=False).sum()

    f, x = cgt.jit(function), values(device)
    for k in range(CALLS):
        torch.manual_seed(k)
        got = f(x)
        got.backward()
        ours, net[0].weight.grad = net[0].weight.grad, None
        torch.manual_seed(k)
        want = function(x)
        want.backward()
        assert identical(got.detach(), want.detach()) and identical(ours, net[0].weight.grad)
        net.zero_grad()
    assert cgt.stats(f).replays >= CALLS - 3, cgt.explain(f)


def test_philox_state_for_an_unexpected_generator(device):
    ours, theirs = (torch.Generator(device).manual_seed(5) for _ in range(2))

    def function(x, g):
        return x + torch.rand(x.shape, generator=g, device=x.device)

    f, x = cgt.jit(function), values(device)
    for _ in range(CALLS):
        assert identical(f(x, ours), function(x, theirs))
    assert cgt.stats(f).replays >= CALLS - 3, cgt.explain(f)


def test_offset_increment_outside_graph_capture_encountered_unexpectedly(device):
    """A recording that fails leaves random numbers as they are in eager."""

    def function(x):
        y = x + torch.rand_like(x)
        return y * float(y.numpy(force=True).sum())

    f, x = cgt.jit(function), values(device)
    for k in range(6):
        torch.manual_seed(k)
        got, more = f(x), torch.rand(3, device=device)
        torch.manual_seed(k)
        assert identical(got, function(x)) and identical(more, torch.rand(3, device=device))


def test_cannot_copy_between_cpu_and_cuda_tensors_during_cuda_graph_capture_unless_pinned(device):
    def function(x):
        return x * torch.tensor([1.0, 2.0, 3.0]).to(x.device) + torch.arange(3).to(x.device)

    agrees(cgt.jit(function), function, values(device))


def test_the_cuda_graph_is_empty(device):
    """A function of views alone: nothing to launch, nothing to warn of."""
    with warnings.catch_warnings(action="error"):
        f, x = cgt.jit(lambda x: (x.view(-1), x[1:])), values(device)
        for _ in range(CALLS):
            a, b = f(x)
            assert identical(a, x.view(-1)) and identical(b, x[1:]) and a.data_ptr() == x.data_ptr()
    assert cgt.stats(f).replays >= CALLS - 3


def test_the_accumulate_grad_nodes_stream_does_not_match(device):
    """That warning is an error in this suite."""
    net = nn.Linear(3, 3).to(device)
    net(values(device)).sum().backward()  # its accumulators are made before
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step(x):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    f = cgt.jit(step)
    with warnings.catch_warnings(action="error"):
        losses = [f(values(device)).item() for _ in range(CALLS)]
    assert losses[-1] < losses[0] and cgt.stats(f).replays >= CALLS - 3


def test_assertion_error_is_key_in_tls(device):
    """The first call is in one thread, the others in others."""
    f, x, got = cgt.jit(lambda x: x * 2), values(device), []
    for _ in range(CALLS):
        thread = threading.Thread(target=lambda: got.append(f(x).clone()))
        thread.start()
        thread.join()
    assert len(got) == CALLS and all(identical(y, x * 2) for y in got) and cgt.stats(f).replays >= CALLS - 3


def test_assertion_error_data_ptr_equals_new_inputs(device):
    f = cgt.jit(lambda x, y: x + y)
    kept = [(values(device, seed=k), values(device, seed=k + 50)) for k in range(12)]
    for x, y in kept:
        assert identical(f(x, y), x + y)
    assert cgt.stats(f).records <= 2 and cgt.stats(f).replays >= 8, cgt.explain(f)


def test_these_live_storage_data_ptrs_are_not_accounted_for_as_an_output(device):
    """A tensor that outlives the call where no replay could put it: line and holder are named."""
    kept = {}

    class Keeper:
        def __setitem__(self, key, value):
            kept.setdefault(key, []).append(value)

    keeper = Keeper()

    def function(x):
        y = x * 2
        keeper[len(kept.get("y", ()))] = y
        return y + 1

    f, x = cgt.jit(function), values(device)
    for _ in range(6):
        assert identical(f(x), x * 2 + 1)
    assert sum(map(len, kept.values())) == 6 and all(identical(y, x * 2) for some in kept.values() for y in some)
    assert cgt.stats(f).replays == 0 and HERE in told(f), cgt.explain(f)


def test_grad_requires_non_empty_inputs(device):
    """A module without parameters."""
    f, x = cgt.jit(nn.Sequential(nn.ReLU(), nn.Softmax(-1))), values(device)
    agrees(f, lambda x: torch.softmax(torch.relu(x), -1), x)


def test_cublas_status_not_initialized_when_calling_cublas_create(device):
    """The first product of a thread is in a recording."""
    f, x, got = cgt.jit(lambda x: x @ x.T), values(device), []

    def work():
        got.extend(f(x).clone() for _ in range(CALLS))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(got) == CALLS and all(identical(y, x @ x.T) for y in got) and cgt.stats(f).replays >= CALLS - 3


def test_did_not_jit_anything(device):
    """Said once, as a warning, with what to change."""
    f, x = cgt.jit(lambda x: x * float(x.numpy(force=True).sum())), values(device)
    with pytest.warns(cgt.CgtWarning, match="none of 20 calls .* was replayed. Mostly: .*test_pain.py"):
        for _ in range(24):
            f(x)
    assert cgt.explain(f).splitlines()[0].split(": ", 1)[1].startswith("0 of 24 calls replayed, 2")
