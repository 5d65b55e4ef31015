"""Where replays are required, a call that is none raises before it runs, and says why."""

import threading

import pytest
import torch
from helpers import calls, counts, identical, jit_warm, tells, values

import cgt


def double(x):
    return x * 2 + 1


def required(f, *args, match):
    before = counts(f)
    with cgt.require_replay(), pytest.raises(cgt.CgtError, match=match):
        f(*args)
    assert counts(f) == before


@tells("not_replayed", "unrecorded")
def test_call_that_is_none_raises_before_it_runs(device):
    ran = []

    def function(x):
        ran.append(1)
        return double(x)

    f, x = cgt.jit(double), values(device)
    for _ in range(2):  # warming, recording
        required(f, x, match="double is not replayed.*no such call is recorded yet")
        f(x)
    with cgt.require_replay():
        assert identical(f(x), double(x))
    required(f, values(device, 7), match=r"args\[0\]")
    required(f, x.double(), match=r"args\[0\]")
    assert counts(f) == (1, 1, 1, 0) and identical(f(x), double(x))
    required(cgt.jit(function), x, match="no such call is recorded yet")
    assert not ran


def test_reasons_are_those_of_explain(device):
    eager, x = cgt.jit(lambda x: x * float(x.sum())), values(device)
    calls(eager, 4, x)
    required(eager, x, match="turns a tensor into a Python value")
    f = jit_warm(lambda x, n: x * n, x, 2.0, max_records=1)
    required(f, x, 3.0, match="recorded 1 times already|a number")
    with torch.utils._python_dispatch.TorchDispatchMode():
        required(f, x, 2.0, match="mode")


def test_value_that_is_read_on_the_way(device):
    f, x = jit_warm(lambda x: x * 2 if x.sum() > 0 else x, values(device).abs(), inputs="copied"), values(device).abs()
    with cgt.require_replay():
        assert identical(f(x), x * 2)
    required(f, -x, match="read a value at")
    assert identical(f(-x), -x)


def test_backward_is_a_call_too(device):
    w, x = values(device).requires_grad_(), values(device)
    f = cgt.jit(lambda x: (x * w).tanh())
    for _ in range(6):
        w.grad = None
        f(x).sum().backward()
    assert cgt.stats(f).backward.replays > 0
    with cgt.require_replay():
        w.grad = None
        f(x).sum().backward()
    y = f(x)
    cgt.reset(f)  # the backward of a recording that is gone
    with cgt.require_replay(), pytest.raises(cgt.CgtError, match="backward is not replayed.*no such call is recorded yet"):
        y.sum().backward(retain_graph=True)
    w.grad = None
    y.sum().backward()
    assert torch.equal(w.grad, torch.autograd.grad((x * w).tanh().sum(), w)[0])


def test_blocks_nest_end_and_decorate(device):
    f, x = cgt.jit(double), values(device)

    @cgt.require_replay()
    def serve():
        return f(x)

    with cgt.require_replay():
        with cgt.require_replay():
            pass
        with pytest.raises(cgt.CgtError):
            f(x)
    with pytest.raises(cgt.CgtError):
        serve()
    calls(f, 2, x)
    assert identical(serve(), double(x))
    f(values(device, 9))  # outside anything goes


def test_other_threads_are_meant(device):
    f, x, told = cgt.jit(double), values(device), []

    def work():
        try:
            f(x)
        except cgt.CgtError as error:
            told.append(str(error))

    with cgt.require_replay():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(30)
    assert len(told) == 1 and "no such call is recorded yet" in told[0]
