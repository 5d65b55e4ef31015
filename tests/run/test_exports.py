"""A result whose address goes to another library (DLPack, `__cuda_array_interface__`) and is kept there keeps its values: on a GPU its
memory leaves the recording's at that moment, on the host the recording has new memory at the next call."""

import subprocess
import sys
import textwrap

import pytest
import torch
from helpers import identical, numbers, refill

# isort: split
import cgt_core as core

import cgt


class Foreign:
    """What a library knows of an array of another's: this. It keeps nobody alive."""

    def __init__(self, t):
        self.__cuda_array_interface__ = t.__cuda_array_interface__


EXPORTS = {
    "from_dlpack": lambda y: torch.from_dlpack(y),
    "__dlpack__": lambda y: torch.utils.dlpack.from_dlpack(y.__dlpack__()),
    "to_dlpack": lambda y: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(y)),
    "of a view": lambda y: torch.from_dlpack(y[2:]),
    "array interface": lambda y: torch.as_tensor(Foreign(y), device=y.device),
}


@pytest.mark.parametrize("how", EXPORTS)
def test_what_left_stays(device, how):
    if how == "array interface" and device.type == "cpu":
        pytest.skip("only tensors on a GPU have it")
    f, x = cgt.jit(lambda x: (x * 2, x + 1)), numbers(device)
    for k in range(12):
        refill(x, k)
        y, other = f(x)
        left = EXPORTS[how](y)
        want = EXPORTS[how](y.clone()).clone()
        assert identical(left, want) and identical(y, x * 2)
        for _ in range(3):
            refill(x, 100 + k)
            again, other = f(x)
        assert identical(left, want), "another call wrote over it"
        assert identical(again, x * 2) and identical(other, x + 1)
        if how == "array interface":
            y = y.clone()  # it was alive as long as its address was in use: that is the library's affair
    assert cgt.stats(f).replays >= 40, cgt.explain(f)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="it is about streams")
def test_what_another_stream_reads_stays_until_it_has():
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    f, x = cgt.jit(lambda x: (x * 2, x + 1)), numbers("cuda", 1 << 20)
    for k in range(8):
        refill(x, k)
        y, _ = f(x)
        want = y.clone()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            left = y * 1
        y.record_stream(side)
        del y
        for _ in range(3):
            refill(x, 100 + k)
            f(x)
        torch.cuda.synchronize()
        assert identical(left, want), "a replay overtook the other stream"
    assert cgt.stats(f).replays >= 20, cgt.explain(f)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="memory of the host is not lent out")
def test_what_another_process_reads_is_not_a_recordings_memory():
    f, x = cgt.jit(lambda x: (x * 2, x + 1)), numbers("cuda")
    for _ in range(5):
        y, _ = f(x)
    assert core.is_lent(y)
    y.untyped_storage()._share_cuda_()
    assert not core.is_lent(y) and identical(y, x * 2)


def test_result_that_is_an_argument_may_leave(device):
    """The path goes on over what left."""
    f, g = cgt.jit(lambda x: x * 2), cgt.jit(lambda y: y + 1)
    x = numbers(device)
    for k in range(12):
        cgt.step()
        refill(x, k)
        y = f(x)
        left = torch.from_dlpack(y)
        assert identical(g(y), y + 1) and identical(left, x * 2)
    assert cgt.stats(f).replays >= 8, cgt.explain(f)


def test_inside_a_recorded_function_it_is_a_reader(device):
    f, x = cgt.jit(lambda x: torch.from_dlpack(x * 2) + 1), numbers(device)
    for k in range(6):
        refill(x, k)
        assert identical(f(x), x * 2 + 1)


def test_nothing_is_patched_before_a_recording_on_a_gpu():
    """In a process of its own: what leaves is told once, and wrappers are still readers."""
    code = """
    import torch, cgt
    from cgt.run import taps
    plain = torch.Tensor.__dlpack__, torch.utils.dlpack.to_dlpack, vars(torch.Tensor)[taps.INTERFACE]
    f = cgt.jit(lambda x: x * 2)
    for _ in range(4):
        f(torch.ones(4))
    assert plain == (torch.Tensor.__dlpack__, torch.utils.dlpack.to_dlpack, vars(torch.Tensor)[taps.INTERFACE])
    told = []
    taps.tap_exports(lambda t, stream: told.append(t))
    taps.tap_exports(print)
    x = torch.ones(4)
    y = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x))
    z = torch.from_dlpack(x)
    assert y.data_ptr() == z.data_ptr() == x.data_ptr() and len(told) >= 2 and all(one is x for one in told)
    assert not hasattr(x, taps.INTERFACE) and told[-1] is x
    assert taps.is_reader(torch.utils.dlpack.to_dlpack) and taps.is_reader(x.__dlpack__)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_first_training_step_of_a_process_is_code_of_the_function_alone():
    """What torch makes at the first use of the profiler's ranges, which optimizers have, is no part of it."""
    code = """
    import torch, cgt
    model, losses = torch.nn.Linear(3, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    @cgt.jit
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for k in range(12):
        step(torch.ones(4, 3))
    assert cgt.stats(step).replays >= 8, cgt.explain(step)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
