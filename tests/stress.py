"""Threads that call, differentiate, hold, reset and step at the same time, as often or as long as one likes. Meanwhile they replace a
weight, and a tensor in a list that others call with, by ones of the same values.

    PYTHONPATH=. python tests/stress.py --seconds 600 [--threads 4] [--device cuda] [--seed 7]

Every result is compared with eager's, bit for bit. A thread that comes no further for HANGS seconds is a hang:
the stacks of all threads are printed, and the process ends with an error, as it does where a thread raises.
"""

import argparse
import faulthandler
import math
import os
import random
import sys
import threading
import time
import traceback

import torch

# isort: split
import cgt_core as core
from helpers import identical, values

import cgt
from cgt.words import options

options.OVERHEAD = math.inf  # record at every miss

HANGS = 60


def functions_of(device):
    """Functions, and the parameters that they share."""
    w, b = values(device, 4, 4, seed=5).requires_grad_(), values(device, 4, seed=6).requires_grad_()
    total = torch.zeros(4, 4, device=device)

    def linear(x):
        return torch.addmm(b, x, w).tanh()

    def deep(x):
        for _ in range(8):
            x = torch.addmm(b, x, w).tanh()
        return x

    def pair(x):
        return x.sin(), (x * 2)[1:]

    def reads(x):
        return x * 2 + x.sum().item()

    def writes(x):
        with torch.no_grad():
            total.copy_(x.detach())  # of some thread or other
        return x.cos()

    def scaled(x, n, *others):
        for other in others:
            x = x + other
        return x * n + n

    def boxed(x, box):
        return x * box[0] + box[1]

    def served(x):
        return x @ MODEL.w

    def graded(x):
        return x * KEPT.p.grad

    MODEL.w, KEPT.p = values(device, 4, 4, seed=7), torch.zeros(4, 4, device=device)
    KEPT.p.grad = values(device, 4, 4, seed=8)
    return (linear, deep, pair, reads, writes, scaled, boxed, served, graded), (w, b)


class Model:
    """Whose weight others replace."""


MODEL, KEPT = Model(), Model()
BOX = []  # of two tensors


def more_arguments(function, draw, x):
    """Numbers that change, structures of another length, a list that others change."""
    if function.__name__ == "scaled":
        return (draw.randrange(8) / 4, *[x.detach()] * draw.choice((0, 0, 3, 40)))
    return (BOX,) if function.__name__ == "boxed" else ()


def replace(draw):
    """By tensors that cannot be told apart by their values."""
    what = draw.randrange(4)
    if what == 0:
        MODEL.w = MODEL.w.clone()
    elif what == 1:
        KEPT.p.grad = KEPT.p.grad.clone()
    else:
        BOX[what - 2] = BOX[what - 2].clone()


def leaves(result):
    return [result] if isinstance(result, torch.Tensor) else [*result]


def work(k, seed, functions, jitted, parameters, device, goes_on, progress, replays):
    """One thread: random actions, as long as it goes on."""
    draw = random.Random(f"{seed} {k}")
    held = []
    while goes_on(progress[k]):
        at = draw.randrange(len(functions))
        x = values(device, 4, 4, seed=draw.randrange(4)).requires_grad_(draw.random() < 0.5)
        more = more_arguments(functions[at], draw, x)
        want, got = leaves(functions[at](x, *more)), leaves(jitted[at](x, *more))
        if not all(map(identical, got, want)):
            raise AssertionError(f"{functions[at].__name__}: {got} but {want}")
        if want[0].requires_grad and draw.random() < 0.7:
            wanted = [t for t in (x, *parameters) if t.requires_grad]
            grads = [
                torch.autograd.grad(r[0].square().sum(), wanted, allow_unused=True)
                for r in (got, want)
            ]
            if not identical(*grads):
                raise AssertionError(
                    f"{functions[at].__name__}: gradients {grads[0]} but {grads[1]}"
                )
        held.append((got[0], want[0].detach().clone()))
        if draw.random() < 0.2:
            replace(draw)
        what = draw.random()
        if what < (0.1 if progress[k] % 300 >= 200 else 0.01):  # a time of many recordings
            cgt.reset(jitted[at])
        elif what < 0.012:
            cgt.reset()  # and iterations begin by themselves again
        elif what < 0.02:
            cgt.explain(jitted[at]), cgt.stats(jitted[at])
        elif what < 0.022:
            replays[k] += cgt.stats(jitted[at]).replays
            jitted[at] = cgt.jit(functions[at])  # the old one dies
        elif what < 0.3 and progress[k] % 100 < 50:  # with steps, and without
            cgt.step()
        if len(held) > 3:
            result, was = held.pop(draw.randrange(4))
            if not identical(result.detach(), was):
                raise AssertionError(f"{functions[at].__name__}: a held result changed")
        progress[k] += 1


def main():
    ask = argparse.ArgumentParser()
    ask.add_argument("--seconds", type=float, default=600)
    ask.add_argument("--calls", type=int, help="of each thread, instead of a time")
    ask.add_argument("--threads", type=int, default=4)
    ask.add_argument("--device", default="cpu")
    ask.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    asked = ask.parse_args()
    torch.set_num_threads(1)
    faulthandler.enable()
    device = torch.device(asked.device)
    sys.setswitchinterval(1e-6)
    functions, parameters = functions_of(device)
    BOX[:] = values(device, 4, 4, seed=9), values(device, 4, seed=10)
    # Whoever looks such an accumulator up may need the GIL while it holds the tensor's mutex.
    edges = [torch.autograd.graph.get_gradient_edge(p) for p in parameters]
    jitted, errors = [cgt.jit(f) for f in functions], []
    progress, replays = [0] * asked.threads, [0] * asked.threads
    until = time.monotonic() + asked.seconds

    def goes_on(calls):
        return time.monotonic() < until if asked.calls is None else calls < asked.calls

    def body(k):
        try:
            work(k, asked.seed, functions, jitted, parameters, device, goes_on, progress, replays)
        except BaseException:
            errors.append(traceback.format_exc(limit=-8))

    threads = [threading.Thread(target=body, args=(k,), daemon=True) for k in range(asked.threads)]
    for thread in threads:
        thread.start()
    # The watchdog is a thread of C's: it barks even where the GIL is what hangs.
    while any(thread.is_alive() for thread in threads) and not errors:
        before = list(progress)
        faulthandler.dump_traceback_later(HANGS, exit=True)
        while not errors and any(
            thread.is_alive() and was == now
            for thread, was, now in zip(threads, before, progress, strict=True)
        ):
            time.sleep(0.1)
        time.sleep(0.1)
    faulthandler.cancel_dump_traceback_later()
    total = sum(replays) + sum(cgt.stats(f).replays for f in jitted)
    print(f"{sum(progress)} calls, {total} replays, {len(errors)} errors, seed {asked.seed}", flush=True)
    if errors:
        print(*errors, sep="\n", flush=True)
        os._exit(1)  # the other threads go on
    del edges
    core.check_table()
    cgt.reset()
    assert not core.books()["recording"] and not core.books()["nodes"]
    return 0


if __name__ == "__main__":
    sys.exit(main())
