"""`python -m bench.ranks`: whole steps that exchange data between processes, each with its GPU, with and without cgt; an all_reduce
beside the launch of the graph that holds it; and, in one process, a model whose layers lie on all GPUs. Writes bench/results/gpu2.json; `make gpu2` runs the tests of several processes before it.

A step is SGD on a DistributedDataParallel, or AdamW on what fully_shard has spread, each layer by itself. Host time is until the call returns, wall time until the GPU is done; both are medians over
blocks of calls, jitted and plain in turns, so that what disturbs one disturbs the other. With a busy neighbour (a thread of rank 0 that
computes in Python now and then) single steps are timed, and the 99th percentile is held against the median.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import cgt

from .gpu import ROOT, machine, run_pytest

RECORD = ROOT / "bench" / "results" / "gpu2.json"
PAGE, MARKS = ROOT / "docs" / "scale.md", ("<!-- ranks -->", "<!-- /ranks -->")
RANKS = 2
SETTLING, BLOCKS, BLOCK, STEPS = 100, 9, 10, 200  # calls before anything is timed; blocks of so many; steps beside a neighbour
TESTS_S = 300


# --- what is timed -----------------------------------------------------------------------------------


def mlp(depth=48, width=64):
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers), lambda: torch.randn(32, width)


def encoder(layers=4, width=128, tokens=64):
    """A small BERT without its embeddings, dropout included."""
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), lambda: torch.randn(8, tokens, width)


MODELS = {"MLP of 48 layers": mlp, "encoder of 4 layers": encoder}


def step_of(make, wrap, parallel=True):
    """(a step, its input)."""
    torch.manual_seed(0)
    model, draw = make()
    model = model.cuda()
    model = DistributedDataParallel(model) if parallel else model
    return wrap(training_step(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))), draw().cuda()


def training_step(model, optimizer):
    def step(x):
        optimizer.zero_grad(set_to_none=True)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def sharded_step_of(make, wrap):
    """The same of a model that is spread over the ranks."""
    torch.manual_seed(0)
    model, draw = make()
    model = model.cuda()
    for part in model.layers if isinstance(model, nn.TransformerEncoder) else [one for one in model if isinstance(one, nn.Linear)][::8]:
        fully_shard(part)
    fully_shard(model)
    return wrap(training_step(model, torch.optim.AdamW(model.parameters(), lr=0.01))), draw().cuda()


def first_losses(f, x):
    """Each subject draws the same random numbers."""
    torch.manual_seed(1)
    return [f(x).item() for _ in range(SETTLING)]


def everywhere(flag):
    """Is it so on all ranks?"""
    t = torch.tensor(int(flag), device="cuda")
    dist.all_reduce(t, dist.ReduceOp.MIN)
    return bool(t.item())


def block_times(f, x):
    """(host, wall) µs per call, whose result nobody holds: it would be copied."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(BLOCK):
        f(x)
    host = time.perf_counter() - began
    torch.cuda.synchronize()
    return 1e6 * host / BLOCK, 1e6 * (time.perf_counter() - began) / BLOCK


def in_turns(subjects):
    """{name: (host, wall)} of (f, x) by name, medians."""
    times = {name: [] for name in subjects}
    for _ in range(BLOCKS):
        for name, (f, x) in subjects.items():
            times[name].append(block_times(f, x))
    return {name: [round(statistics.median(column), 2) for column in zip(*rows, strict=True)] for name, rows in times.items()}


def jitter(f, x, rank):
    """The 99th percentile over the median of a step's time, beside a thread that is busy."""
    stop = threading.Event()

    def work():  # a third of a millisecond at a time: a thread that never sleeps would be waited for at each op
        while not stop.is_set():
            sum(range(20_000))
            time.sleep(0.002)

    neighbour = threading.Thread(target=work)
    if rank == 0:
        neighbour.start()
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        f(x)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    stop.set()
    if rank == 0:
        neighbour.join()
    cuts = statistics.quantiles(times, n=100)
    return round(cuts[98] / cuts[49], 2)


def of_model(make, rank):
    """Figures of one model."""
    eager, jitted = step_of(make, lambda f: f), step_of(make, cgt.jit)
    alone, alone_jitted = step_of(make, lambda f: f, parallel=False), step_of(make, cgt.jit, parallel=False)
    subjects = {"eager": eager, "jit": jitted, "one GPU, eager": alone, "one GPU, jit": alone_jitted}
    losses = {name: first_losses(f, x) for name, (f, x) in subjects.items()}
    times = in_turns(subjects)
    return {
        "equal": everywhere(losses["eager"] == losses["jit"]), "replays": cgt.stats(jitted[0]).replays, "us": times,
        "jitter": {"eager": jitter(*eager, rank), "jit": jitter(*jitted, rank)},
    }  # fmt: skip


def of_sharded(make):
    """Figures of one model that is spread over the ranks."""
    subjects = {"eager": sharded_step_of(make, lambda f: f), "jit": sharded_step_of(make, cgt.jit)}
    losses = {name: first_losses(f, x) for name, (f, x) in subjects.items()}
    return {"equal": everywhere(losses["eager"] == losses["jit"]), "replays": cgt.stats(subjects["jit"][0]).replays, "us": in_turns(subjects)}


def of_reduce():
    """An all_reduce of 4 KiB: cgt's hit, the launch of a graph made by hand, and eager."""
    x = torch.randn(1024, device="cuda")

    def reduce(x):
        y = x * 2
        dist.all_reduce(y)
        return y

    for _ in range(SETTLING):
        reduce(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog goes on
        reduce(x)
    jitted = cgt.jit(reduce)
    for _ in range(SETTLING):
        jitted(x)
    times = in_turns({"eager": (reduce, x), "graph": (lambda x: graph.replay(), x), "jit": (jitted, x)})
    graph.reset()
    return times


def halves(layers=8):
    """(an encoder of which each GPU has so many layers in a row, what brings its input there)."""
    torch.manual_seed(0)
    model, draw = encoder(layers)
    for k, layer in enumerate(model.layers):
        gpu = torch.device("cuda", k * RANKS // layers)
        layer.to(gpu).register_forward_pre_hook(lambda _, args, gpu=gpu: tuple(x.to(gpu) for x in args))
    return model.eval(), draw


def of_halves():
    """Figures of its inference in one process."""
    (model, draw), jitted = halves(), cgt.jit(halves()[0])
    inputs = [draw()[:1].to("cuda:0") for _ in range(SETTLING)]
    with torch.no_grad(), torch.cuda.device(RANKS - 1):  # where the result comes: what is waited for
        equal = all(torch.equal(jitted(x), model(x)) for x in inputs)
        times = in_turns({"eager": (model, inputs[0]), "jit": (jitted, inputs[0])})
    return {"equal": equal, "replays": cgt.stats(jitted).replays, "us": times}


def of_halves_trained():
    """And of a whole step, dropout and AdamW included."""
    subjects = {}
    for name, wrap in {"eager": lambda f: f, "jit": cgt.jit}.items():
        model, draw = halves()
        step = training_step(model.train(), torch.optim.AdamW(model.parameters(), lr=0.001))
        subjects[name] = wrap(step), draw()[:1].to("cuda:0")
    losses = {name: first_losses(f, x) for name, (f, x) in subjects.items()}
    return {"equal": losses["eager"] == losses["jit"], "replays": cgt.stats(subjects["jit"][0]).replays, "us": in_turns(subjects)}


# --- the processes -----------------------------------------------------------------------------------


def one_rank(rank, folder):
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, device_id=torch.device("cuda", rank)
    )
    found = {
        "models": {name: of_model(make, rank) for name, make in MODELS.items()},
        "sharded": {name: of_sharded(make) for name, make in MODELS.items()}, "all_reduce": of_reduce(),
    }  # fmt: skip
    if rank == 0:
        Path(folder, "found").write_text(json.dumps(found))
    dist.destroy_process_group()


def with_figures(page, record):
    """The page with the record's figures between its marks."""
    rows = [f"Two {record['device']}, torch {record['torch']}: medians in µs for each call, wall until the GPU is done.", ""]
    rows += ["| | eager | cgt | |", "|---|--:|--:|--:|"]

    def row(what, eager, ours, digits=0):
        rows.append(f"| {what} | {eager:,.{digits}f} | {ours:,.{digits}f} | {ours / eager:.2g} × |")

    for name, one in record["models"].items():
        us = one["us"]
        row(f"{name}, a step: host", us["eager"][0], us["jit"][0])
        row("wall", us["eager"][1], us["jit"][1])
        row("wall on one GPU, without exchange", us["one GPU, eager"][1], us["one GPU, jit"][1])
        row("99th percentile over median beside a busy thread", one["jitter"]["eager"], one["jitter"]["jit"], 2)
    for name, one in record["sharded"].items():
        row(f"{name}, `fully_shard`, a step: host", one["us"]["eager"][0], one["us"]["jit"][0])
        row("wall", one["us"]["eager"][1], one["us"]["jit"][1])
    for part, what in (("halves", "inference"), ("halves_trained", "a step")):
        us = record[part]["us"]
        row(f"encoder of 8 layers, half of them on each GPU, one process, {what}: host", us["eager"][0], us["jit"][0])
        row("wall", us["eager"][1], us["jit"][1])
    us = record["all_reduce"]
    row(f"`all_reduce` of 4 KiB: host (a graph made by hand: {us['graph'][0]:.1f})", us["eager"][0], us["jit"][0], 1)
    row(f"wall (a graph made by hand: {us['graph'][1]:.1f})", us["eager"][1], us["jit"][1], 1)
    equal = all(one["equal"] for one in (*record["models"].values(), *record["sharded"].values()))
    rows += ["", f"The first {SETTLING} losses are {'equal to the last bit' if equal else 'NOT equal'} on both ranks."]
    head, rest = page.split(MARKS[0])
    return head + "\n".join([MARKS[0], "", *rows, "", MARKS[1]]) + rest.split(MARKS[1])[1]


def write_page(record):
    PAGE.write_text(with_figures(PAGE.read_text(), record))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RECORD, help="default: bench/results/gpu2.json")
    parser.add_argument("--tests", action="store_true", help="run the tests of several processes, too")
    parser.add_argument("--again", action="store_true", help="measure nothing: write the page from the record")
    options = parser.parse_args()
    if options.again:
        return write_page(json.loads(options.out.read_text()))
    if torch.cuda.device_count() < RANKS:
        sys.exit(f"This is about {RANKS} GPUs; here is {torch.cuda.device_count()}.")
    status = run_pytest(TESTS_S, "-q", "tests/ranks/test_ranks.py", "tests/ranks/test_sharded.py", "tests/run/test_devices.py") if options.tests else None
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(one_rank, (folder,), nprocs=RANKS)
        found = json.loads(Path(folder, "found").read_text())
    found["halves"], found["halves_trained"] = of_halves(), of_halves_trained()
    tested = {} if status is None else {"tests": "passed" if status == 0 else "failed"}
    options.out.write_text(json.dumps({**machine(), "ranks": RANKS, **tested, **found}, indent=1) + "\n")
    write_page(json.loads(options.out.read_text()))
    for name, one in found["sharded"].items():
        host, wall = (one["us"]["jit"][k] / one["us"]["eager"][k] for k in (0, 1))
        print(f"{name}, sharded: host {host:.3f} x eager, wall {wall:.3f} x, replays {one['replays']}, equal {one['equal']}")
    for name, one in found["models"].items():
        host, wall = (one["us"]["jit"][k] / one["us"]["eager"][k] for k in (0, 1))
        print(f"{name}: host {host:.3f} x eager, wall {wall:.3f} x, p99/p50 {one['jitter']}, equal {one['equal']}")
    print(f"half on each GPU: {found['halves']}, a step: {found['halves_trained']}")
    print(f"all_reduce, host µs and wall µs: {found['all_reduce']}")
    sys.exit(bool(status))


if __name__ == "__main__":
    main()
