"""Calls that once ended the process, or read memory that was gone: each program has one of its own. What another thread does
while a tape runs is done here by an op of the tape, so that it comes at that moment.

    PYTHONPATH=.:tests:tests/core python -X faulthandler -c "import test_crashes as t; t.a_gradient_that_is_saved('cpu')"
"""

import faulthandler
import gc
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from helpers import identical, in_threads
from torch.utils import _pytree as pytree

import cgt
from cgt.run import taps
from cgt.words import options


def replays(f, function, *args, calls=6, prepare=lambda: None):
    """As eager does, and replayed in the end."""
    for _ in range(calls):
        prepare()
        want = function(*args)
        prepare()
        assert identical(f(*args), want)
    assert cgt.stats(f).replays >= 2, cgt.explain(f)


MEANWHILE = []  # what the next run of the op below does


@torch.library.custom_op("cgt_tests::meanwhile", mutates_args=())
def meanwhile(x: torch.Tensor) -> torch.Tensor:
    if MEANWHILE:
        MEANWHILE.pop()()
    return x.clone()


@meanwhile.register_fake
def _(x):
    return torch.empty_like(x)


def overwritten(kept, t):
    """Let others have memory like t's, and write it."""
    kept.extend(torch.full_like(t, 7.0) for _ in range(50))


# --- gradients that are read ------------------------------------------------------------------------------------------


def a_gradient_that_is_saved(device):
    p = torch.nn.Parameter(torch.ones(5, device=device))
    p.grad = torch.arange(5.0, device=device)
    f = cgt.jit(lambda x: (x * p.grad).sum())
    for k in range(6):
        x = torch.full((5,), float(k), device=device, requires_grad=True)
        y = f(x)
        y.backward()
        assert torch.equal(y.detach(), 10.0 * torch.tensor(k, device=device)) and torch.equal(x.grad, p.grad)
    assert cgt.stats(f).replays >= 2, cgt.explain(f)


def a_gradient_that_is_returned(device):
    p = torch.nn.Parameter(torch.ones(5, device=device))
    p.grad = torch.arange(5.0, device=device)
    f = cgt.jit(lambda x: (p.grad, p.grad[1:], x + p.grad))
    with torch.no_grad():
        for k in range(6):
            x = torch.full((5,), float(k), device=device)
            whole, part, total = f(x)
            assert whole is p.grad and torch.equal(part, p.grad[1:]) and torch.equal(total, x + p.grad)
    assert cgt.stats(f).replays >= 2, cgt.explain(f)


def a_gradient_that_another_thread_takes_away(device):
    p, kept = torch.nn.Parameter(torch.ones(256, 256)), []
    p.grad = torch.full((256, 256), 3.0)
    f = cgt.jit(lambda x: meanwhile(x) + p.grad)
    x = torch.ones(256, 256)

    def take():
        p.grad = None
        overwritten(kept, x)

    with torch.no_grad():
        replays(f, lambda x: x + p.grad, x)
        MEANWHILE.append(take)
        assert torch.equal(f(x), torch.full((256, 256), 4.0)) and not MEANWHILE


# --- nodes that are called by hand ----------------------------------------------------------------------------------------


def a_node_that_is_called_by_hand(device):
    w, v = (torch.nn.Parameter(torch.full((3,), k, device=device)) for k in (2.0, 3.0))
    f = cgt.jit(lambda x: (x * w).sum() + (w * v).sum())
    x, one = torch.ones(3, device=device), torch.ones((), device=device)
    for _ in range(5):
        w.grad = v.grad = None
        f(x).backward()
    y = f(x)
    w.grad = v.grad = None
    with torch.no_grad():
        grads = y.grad_fn(one)
    assert w.grad is None and v.grad is None, "who calls a node by hand is given its gradients"
    assert torch.equal(grads[0], x + v) and torch.equal(grads[1], w)
    y.backward()
    assert torch.equal(w.grad, x + v) and torch.equal(v.grad, w) and cgt.stats(f).replays >= 3


def a_node_that_a_hook_calls_by_hand(device):
    """In the middle of another run of autograd's, which also comes to that parameter."""
    w, got = torch.nn.Parameter(torch.full((3,), 2.0, device=device)), []
    f = cgt.jit(lambda x: (x * w).sum())
    x, one = torch.ones(3, device=device), torch.ones((), device=device)
    for _ in range(5):
        w.grad = None
        f(x).backward()
    y, w.grad = f(x), None
    z = (w * 5).sum()
    z.register_hook(lambda g: got.append(y.grad_fn(one)))
    z.backward()
    assert torch.equal(got[0] if torch.is_tensor(got[0]) else got[0][0], x) and torch.equal(w.grad, torch.full_like(w, 5.0))
    y.backward()  # what it saved is still there
    assert torch.equal(w.grad, torch.full_like(w, 6.0)) and cgt.stats(f).replays >= 3


# --- tensors that have no memory, or no sizes -------------------------------------------------------------------------------


def a_nested_tensor_where_plain_ones_were_replayed(device):
    f = cgt.jit(lambda x: x * 2)
    nested = torch.nested.nested_tensor([torch.ones(2, device=device), torch.ones(3, device=device)])
    sparse = torch.eye(3, device=device).to_sparse_csr()
    with torch.no_grad():
        for _ in range(4):
            for n in (3, 4):
                assert torch.equal(f(torch.ones(n, device=device)), torch.full((n,), 2.0, device=device))
            assert torch.equal(f(nested).unbind()[1], torch.full((3,), 2.0, device=device))
            assert torch.equal(f(sparse).to_dense(), 2 * torch.eye(3, device=device))
    assert cgt.stats(f).replays >= 2, cgt.explain(f)


def fails_alike(f, *args):
    """With the error that eager has."""
    for _ in range(3):
        with pytest.raises(RuntimeError) as mine:
            f(*args)
        with pytest.raises(RuntimeError) as eager:
            f.__wrapped__(*args)
        assert str(mine.value).split("\n")[0] == str(eager.value).split("\n")[0]


def memory_that_was_taken_away(device):
    """As a result ends with its iteration. (Of a storage that was given back eager itself may read address 0.)"""
    fresh = cgt.jit(lambda x: x + 1, outputs="error")
    number = cgt.jit(lambda x: x.sum(), outputs="error")
    moves = cgt.jit(lambda x: x * 2)
    pinned = cgt.jit(lambda x: x * 2, inputs="fixed")
    copied = cgt.jit(lambda x: x * 2, inputs="copied") if "copied" in options.INPUTS else moves
    by_value = cgt.jit(lambda x, s: x * s)
    x = torch.randn(64, device=device)
    with torch.no_grad():
        for _ in range(9):  # two places in the tree, each with addresses that came again or did not
            y = torch.randn(64, device=device)
            for f in (moves, pinned, copied):
                assert torch.equal(f(y), y * 2)
            assert torch.equal(by_value(x, torch.tensor(2.0)), x * 2)
            cgt.step()
            gone, total = fresh(x), number(x.cpu())
        cgt.step()
        for f in (moves, pinned, copied):
            fails_alike(f, gone)
        fails_alike(by_value, x, total)
        for f in (moves, copied):
            assert torch.equal(f(x), x * 2)
    assert cgt.stats(moves).replays >= 2 and cgt.stats(by_value).replays >= 2, cgt.explain(by_value)


# --- what others do meanwhile ---------------------------------------------------------------------------------------------


def a_tensor_that_is_taken_out_of_its_list(device):
    w, kept = torch.randn(256, 256), []
    f = cgt.jit(lambda box: meanwhile(w) + box[0])
    box = []

    def take():
        box[0] = None
        overwritten(kept, w)

    with torch.no_grad():
        for k in range(6):
            assert torch.equal(f([torch.full((256, 256), float(k))]), w + k)
        box.append(torch.full((256, 256), 5.0))
        MEANWHILE.append(take)
        before = cgt.stats(f).replays
        assert torch.equal(f(box), w + 5) and box == [None] and cgt.stats(f).replays == before + 1


class Acts:
    """An argument that does something each time it is taken apart."""

    def __init__(self, act):
        self.act = act


pytree.register_pytree_node(Acts, lambda a: (a.act() or [], None), lambda leaves, _: Acts(lambda: None))


def a_tensor_that_is_gone_when_the_walk_is_over(device):
    kept, box = [], []
    f = cgt.jit(lambda box, acts: box[0] * 2)

    def take():
        box[0] = None
        kept.append(torch.full((64,), 7.0, device=device))

    with torch.no_grad():
        for k in range(6):
            assert torch.equal(f([torch.full((64,), float(k), device=device)], Acts(lambda: None)), torch.full((64,), 2.0 * k, device=device))
        before = cgt.stats(f).replays
        box.append(torch.full((64,), 5.0, device=device))
        assert torch.equal(f(box, Acts(take)), torch.full((64,), 10.0, device=device))
        assert cgt.stats(f).replays == before + 1


def a_function_that_is_reset_in_the_middle_of_a_walk(device):
    f = cgt.jit(lambda acts, x, *more: x * 2 + len(more))
    x, act = torch.ones(4, device=device), [lambda: None]
    with torch.no_grad():
        for _ in range(3):
            for n in range(4):
                assert torch.equal(f(Acts(act[0]), x, *range(n)), x * 2 + n)
        for n in range(4):
            assert torch.equal(f(Acts(lambda: cgt.reset(f)), x, *range(n)), x * 2 + n)
            for _ in range(4):
                assert torch.equal(f(Acts(act[0]), x, *range(n)), x * 2 + n)
    assert cgt.stats(f).replays >= 2, cgt.explain(f)


def numbers_that_become_live_while_another_thread_waits(device):
    """The scratch of a call that waits was as large as the structures that were known when it began."""
    w = torch.randn(600, 600, device=device)

    def plain(ts, *numbers):
        y = w @ w @ w
        for t, n in zip(ts, numbers, strict=False):
            y = y + t * n
        return y.sum()

    f = cgt.jit(plain)
    ts, numbers = [torch.ones(1, device=device) for _ in range(40)], [1.5 + k for k in range(40)]
    with torch.no_grad():
        want = plain(ts, *numbers)
        for _ in range(4):
            assert identical(f(ts, *numbers), want)

        def same():
            with torch.no_grad():
                for _ in range(10):
                    assert identical(f(ts, *numbers), want)

        threads = [threading.Thread(target=same) for _ in range(4)]
        for thread in threads:
            thread.start()
        for k in range(1, 9):
            other = [n + k for n in numbers]
            assert identical(f(ts, *other), plain(ts, *other))
        for thread in threads:
            thread.join()
    assert cgt.stats(f).replays >= 2, cgt.explain(f)


class Model:
    """Whose weight is another one at each call."""


SERVED = Model()


def a_miss_beside_a_replay_of_what_follows(device):
    """To ask why a recording does not take a call is to look at what lies in its places now."""
    m, kept, started = SERVED, [], threading.Event()

    def plain(x, *rest):
        y = meanwhile(x) + SERVED.w
        for one in rest:
            y = y + one
        return y

    f, x, one = cgt.jit(plain), torch.ones(256, 256), torch.ones(1)
    meanwhile(x)  # the first call of an op runs more code than the others

    def wait():
        started.set()
        time.sleep(0.5)
        overwritten(kept, x)

    def serve():
        with torch.no_grad():
            got.append(f(x))

    with torch.no_grad():
        for k in range(8):
            m.w = torch.full((256, 256), float(k))
            assert torch.equal(f(x), x + k)
        assert cgt.stats(f).replays >= 2, cgt.explain(f)
        for n in range(1, 4):
            m.w, got = torch.full((256, 256), 100.0), []
            MEANWHILE.append(wait)
            thread = threading.Thread(target=serve)
            thread.start()
            assert started.wait(20)
            m.w = torch.full((256, 256), 50.0)
            assert torch.equal(f(x, *[one] * n), x + 50 + n)
            thread.join()
            assert torch.equal(got[0], torch.full((256, 256), 101.0))
            started.clear()


def a_fork_while_another_thread_records(device):
    f, started, go = cgt.jit(lambda x: meanwhile(x) * 2), threading.Event(), threading.Event()

    def wait():
        started.set()
        assert go.wait(60)

    def record():
        with torch.no_grad():
            for _ in range(4):
                assert torch.equal(f(x), x * 2)

    x = torch.ones(4)
    with torch.no_grad():
        f(x)
    MEANWHILE.append(wait)
    thread = threading.Thread(target=record)
    thread.start()
    assert started.wait(60)
    child = os.fork()
    if child == 0:
        try:
            with torch.no_grad():
                for one in (cgt.jit(lambda x: x + 1), f):
                    replays(one, one.__wrapped__, x)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    go.set()
    thread.join()
    assert status == 0, "the child never records"
    assert cgt.stats(f).replays >= 2, cgt.explain(f)


def threads_that_are_listed_while_garbage_is_collected(device):
    """Where others go on in the middle of it, as they do while a finalizer waits."""
    faulthandler.dump_traceback_later(60, exit=True)
    gc.callbacks.append(lambda *_: time.sleep(1e-4))
    gc.set_threshold(5)
    in_threads(4, lambda _: [taps.threads_beside() for _ in range(200)])


EVERYWHERE = (
    a_gradient_that_is_saved, a_gradient_that_is_returned, a_node_that_is_called_by_hand, a_node_that_a_hook_calls_by_hand,
    a_nested_tensor_where_plain_ones_were_replayed, memory_that_was_taken_away, a_tensor_that_is_gone_when_the_walk_is_over,
    a_function_that_is_reset_in_the_middle_of_a_walk, numbers_that_become_live_while_another_thread_waits,
)  # fmt: skip
ON_THE_HOST = (  # where a launch is over when the call is, and runs code of Python's
    a_gradient_that_another_thread_takes_away, a_tensor_that_is_taken_out_of_its_list, a_miss_beside_a_replay_of_what_follows,
    a_fork_while_another_thread_records, threads_that_are_listed_while_garbage_is_collected,
)  # fmt: skip


def ends_well(program, device):
    call = f"import test_crashes as t; t.torch.set_num_threads(1); t.options.OVERHEAD = t.torch.inf; t.{program.__name__}({str(device)!r})"
    environment = os.environ | {"PYTHONPATH": ":".join(p or "." for p in sys.path), "CGT_AUDIT": "0"}
    done = subprocess.run([sys.executable, "-X", "faulthandler", "-c", call], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("program", EVERYWHERE, ids=lambda p: p.__name__)
def test_a_call_ends_as_eager_does(device, program):
    ends_well(program, device)


@pytest.mark.parametrize("program", ON_THE_HOST, ids=lambda p: p.__name__)
def test_what_others_do_while_a_tape_runs_does_not_reach_it(program):
    ends_well(program, "cpu")
