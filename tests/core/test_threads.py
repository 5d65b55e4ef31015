"""Threads that record, replay, reset and step over the same parameters, in a process of its own: a thread that
hangs with the GIL would take the whole suite along."""

import faulthandler
import os
import random
import subprocess
import sys
import threading
import time

import torch

# isort: split
import cgt_core as core

import cgt
from cgt.run import devices

SECONDS = 3  # a minute finds more
PATIENCE = 20  # seconds over that, after which a process that is not done hangs


def in_a_process(function, device):
    """Call a function of this file there, with a device; what it printed. Fails if it hangs."""
    call = [sys.executable, "-c", f"import test_threads; test_threads.{function.__name__}({str(device)!r})"]
    environment = os.environ | {"PYTHONPATH": ":".join(p or "." for p in sys.path)}
    done = subprocess.run(call, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def race(works):
    """Run all of these until the time is over; how often each was run."""
    sys.setswitchinterval(1e-6)
    faulthandler.dump_traceback_later(SECONDS + PATIENCE, exit=True)
    end, counts, failed = time.monotonic() + SECONDS, [0] * len(works), []

    def body(k):
        try:
            while time.monotonic() < end and not failed:
                works[k]()
                counts[k] += 1
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=body, args=(k,)) for k in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    faulthandler.cancel_dump_traceback_later()
    if failed:
        raise failed[0]
    return counts


def eager_beside_recordings(device):
    """Who makes a graph over a parameter without the GIL holds a mutex of the parameter's and may want the
    GIL for the Python object of its accumulator."""
    torch.set_num_threads(1)
    x, w = torch.randn(4, 4, device=device), torch.randn(4, 4, device=device)
    b = torch.zeros(4, device=device, requires_grad=True)
    held = torch.autograd.graph.get_gradient_edge(b)
    f = cgt.jit(lambda x: torch.addmm(b, x, w))

    def jitted():
        cgt.reset(f)
        for _ in range(4):
            f(x)

    race([lambda: torch.addmm(b, x, w)] * 2 + [jitted])
    assert cgt.stats(f).replays > 0
    del held


def training_over_shared_parameters(device):
    """Each thread has a jitted function of its own over one model, and differentiates it."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(device)
    parameters = list(model.parameters())
    edges = [torch.autograd.graph.get_gradient_edge(p) for p in parameters]

    def trainer(k):
        draws = random.Random(k)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(k)).to(device)
        f = cgt.jit(lambda x: model(x).sum())
        want = f.__wrapped__(x)
        wants = torch.autograd.grad(want, parameters)

        def work():
            draw = draws.random()
            if draw < 0.1:
                cgt.reset(f)
            elif draw < 0.4:
                cgt.step()
            loss = f(x)
            grads = torch.autograd.grad(loss, parameters)
            assert torch.equal(loss, want)
            assert all(map(torch.equal, grads, wants))

        return f, work

    trainers = [trainer(k) for k in range(4)]
    race([work for _, work in trainers])
    print(sum(cgt.stats(f).replays for f, _ in trainers))
    del edges


def wait_for_autograd_beside_a_replayed_backward(device):
    """One thread's backward is at a hook, behind which it replays; another one waits for autograd as a recording does."""
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    w, x = torch.ones(4, device=device, requires_grad=True), torch.arange(4.0, device=device)
    f = cgt.jit(lambda x: (x * w).sum())
    for _ in range(6):
        torch.autograd.grad(f(x), w)
    assert cgt.stats(f).backward.replays
    began, waits, found = threading.Event(), threading.Event(), []

    def hook(grad):
        began.set()
        waits.wait()

    def differentiate():
        y = f(x) * 1
        y.register_hook(hook)
        found.extend(torch.autograd.grad(y, w))

    thread = threading.Thread(target=differentiate)
    thread.start()
    began.wait()
    core.with_paths(lambda: (waits.set(), devices.settle(0 if w.is_cuda else -1)))
    thread.join()
    assert torch.equal(found[0], x)


def test_recording_that_waits_for_autograd_keeps_no_backward_waiting(device):
    in_a_process(wait_for_autograd_beside_a_replayed_backward, device)


def test_recording_never_waits_for_a_thread_that_wants_the_gil(device):
    in_a_process(eager_beside_recordings, device)


def test_threads_train_over_shared_parameters_with_resets_and_steps(device):
    assert int(in_a_process(training_over_shared_parameters, device)) > 0
