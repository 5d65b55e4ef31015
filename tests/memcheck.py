r"""One program for each thing that a recording's kernels touch: inputs, copies, results, random words, values, states.

    PYTHONPATH=. compute-sanitizer --tool memcheck --report-api-errors no --show-backtrace no --error-exitcode 9 \
        python tests/memcheck.py

finds bad accesses (for a backtrace the tool would keep Python's frames, and so tensors alive); without the sanitizer (`python
tests/memcheck.py --device cpu`) it only compares with eager. pytest and its thousands of tests take too long under it: kernels run some
fifty times slower, and importing torch takes a minute.
"""

import argparse
import sys
import time
import traceback
import types

import torch

# isort: split
import cgt_core as core
from helpers import identical, values
from torch import nn

import cgt

CALLS = 8


def square(device, seed=1):
    return values(device, 8, 8, seed=seed)


def pinned_and_copied(device, wrap):
    w = square(device, 2)
    f, x = wrap(lambda x, y: (x @ w + y, x[1:] * 2)), square(device)
    return [f(x.copy_(square(device, k)), square(device, k + 5)) for k in range(CALLS)]


def written_wherever_it_lies(device, wrap):
    """Sizes and offsets that are no multiples of 16 bytes, and what the driver copies itself."""
    f, seen = wrap(lambda x, y: (x.mul_(2).add_(y), y.sub_(1))[0].sum()), []
    for n in (1, 7, 1000, 300_001):
        for k in range(CALLS):
            base = values(device, n + 9, seed=k).clone()
            x, y = base[3 : 3 + n], values(device, n, seed=k + 1).clone()
            seen += [f(x, y), x.sum(), y.sum(), base.sum()]
    return seen


def results_that_are_held(device, wrap):
    f, held = wrap(lambda x: (x.sin(), x.cos().t())), []
    for k in range(CALLS):
        held.append(f(square(device, k)))
        cgt.step()
    return held


def dropout(device, wrap):
    f = wrap(lambda x: nn.functional.dropout(x, 0.5) + torch.rand_like(x))
    torch.manual_seed(3)
    return [f(square(device, k)) for k in range(CALLS)]


def number_that_changes(device, wrap):
    table = [0.5 + k / 16 for k in range(CALLS)]
    f, x = wrap(lambda x, lr, t: x.mul(lr).add_(x, alpha=-lr) * table[t] + torch._foreach_add([x, x], [lr, 2 * lr])[1]), square(device)
    return [f(x, 0.125 * (k + 1), k) for k in range(CALLS)]


def branches(device, wrap):
    f = wrap(lambda x: x * 2 if x.sum() > 0 else x[x > 0] - 1)
    return [f(square(device, 3).abs() * (1 if k % 2 else -1)) for k in range(CALLS)]


def number_handed_out(device, wrap):
    f = wrap(lambda x: (x * 2, x.sum().item()))
    return [f(square(device, k)) for k in range(CALLS)]


def op_between_graphs(device, wrap):
    f = wrap(lambda x: torch.linalg.svdvals(x + 1) * 2 + torch.linalg.solve(x @ x.mT + torch.eye(8, device=device), x[:, 0]))
    return [f(square(device, k)) for k in range(CALLS)]


def state_that_is_replaced(device, wrap):
    m = types.SimpleNamespace(h=square(device))

    def function(x):
        m.h = torch.tanh(x + m.h)
        return m.h.sum(0)

    f = wrap(function)
    return [(f(square(device, k)), m.h) for k in range(CALLS)]


def control_flow(device, wrap):
    f = wrap(lambda x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x.sin(), (x,)))
    return [f(square(device, k)) for k in range(CALLS)]


def trained_from_outside(device, wrap):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8)).to(device)
    optimizer, f, losses = torch.optim.Adam(model.parameters(), 0.01, capturable=device.type == "cuda"), wrap(lambda x: model(x)), []
    for k in range(CALLS):
        loss = f(square(device, k)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, [p.detach() for p in model.parameters()]


def whole_step(device, wrap):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    f = wrap(step)
    return [f(values(device, 2, 8, 8, seed=k)) for k in range(CALLS)], [p.detach() for p in model.parameters()]


PROGRAMS = (
    pinned_and_copied, written_wherever_it_lies, results_that_are_held, dropout, number_that_changes, branches, number_handed_out, op_between_graphs, state_that_is_replaced,
    control_flow, trained_from_outside, whole_step,
)  # fmt: skip


def run(program, device):
    """Raises where a value is not eager's, or nothing was replayed."""
    jitted = []
    want = program(device, lambda function: function)
    got = program(device, lambda function: jitted.append(cgt.jit(function)) or jitted[-1])
    assert identical(got, want)
    assert all(cgt.stats(f).replays for f in jitted), [cgt.explain(f) for f in jitted]
    core.check_table()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device, failed = torch.device(parser.parse_args().device), 0
    for program in PROGRAMS:
        began = time.perf_counter()
        try:
            run(program, device)
            print(f"{program.__name__}: equal, {time.perf_counter() - began:.1f} s", flush=True)
        except Exception:
            failed += 1
            traceback.print_exc()
    sys.exit(failed)


if __name__ == "__main__":
    main()
