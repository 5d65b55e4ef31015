"""How the benches measure, and the floors they measure against.

What is measured is CPU time per call. The GPU is asked for little (tiny kernels, few nodes) and
waited for between batches, outside the clock, so that a batch never fills the launch queue (about
1000 launches deep). A subject and its floors take turns, batch by batch, and each answers with the
median of its batches: what disturbs one disturbs the others, and their ratio stays.

A bench states what it found with `figure(...)`: a number, its unit, and the number that it must
not exceed. The figures are shown above the pytest-benchmark table (whose rows are whole batches of
the subject) and stand in that plugin's JSON, where gpu.py finds them.
"""

import gc
import math
import statistics
import timeit

import torch  # before the core, whose libraries are torch's

# isort: split
import cgt_core as core
import pytest

import cgt
from cgt.words import options

options.OVERHEAD = math.inf  # what is measured here is settled first; bench_account.py looks at the rest
ROUNDS = 100
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
FIGURES = pytest.StashKey()


# --- pytest and pytest-benchmark ---------------------------------------------------------------


def pytest_addoption(parser):
    about = "measure torch.compile too (needs triton, takes minutes)"
    parser.addoption("--compile", action="store_true", help=about)


def pytest_configure(config):
    config.stash[FIGURES] = []


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config, machine_info):
    """Facts about the kind of machine; the name of the very machine is nobody's business."""
    machine_info.pop("node", None)
    machine_info.update(torch=torch.__version__, cuda=torch.version.cuda)
    if torch.cuda.is_available():
        machine_info["device"] = torch.cuda.get_device_name()


def pytest_terminal_summary(terminalreporter, config):
    """One line per figure."""
    if config.stash[FIGURES]:
        terminalreporter.section("figures")
    for f in config.stash[FIGURES]:
        bound = ""
        if f["at_most"] is not None:
            bound = f"at most {f['at_most']:g}: {'met' if f['met'] else 'MISSED'}"
        value = f"{f['value']:10.3f} {f['unit']:<4}"
        terminalreporter.line(f"{f['device']:5}{f['what']:<60}{value} {bound}")


# --- devices -----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def release_build():
    """The checked build moves its arrays and checks its table: its times mean nothing."""
    if core.debug_build():
        pytest.skip("this is the checked build (CGT_DEBUG=1): build with `make ext` to measure")
    gc.collect()  # a module that was jitted in place and its function know each other


@pytest.fixture(params=DEVICES)
def device(request):
    """The host driver, and the CUDA driver where there is a GPU."""
    return torch.device(request.param)


@pytest.fixture
def cuda():
    """For questions whose floor is a CUDA graph."""
    if not torch.cuda.is_available():
        pytest.skip("the floor is a CUDA graph: needs a GPU")
    return torch.device("cuda")


def wait():
    """Until the GPU has nothing to do."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def peak_of(program):
    """Bytes of GPU memory that a program takes at once."""
    wait()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    program()
    return torch.cuda.max_memory_allocated() - before


# --- measuring ---------------------------------------------------------------------------------


@pytest.fixture
def compare(benchmark):
    """compare(names, calls, subject=..., floor=...): µs per call of each, taken in turns.

    A subject is a statement over `names`, in which "out = f(x)" holds the result until the next
    call has made its own, as a loop does; or a function from a number of calls to the seconds that
    they took. The first one is what pytest-benchmark shows.
    """

    def run(names, calls=50, rounds=ROUNDS, **subjects):
        timers = {
            name: timeit.Timer(how, globals=names).timeit if isinstance(how, str) else how
            for name, how in subjects.items()
        }
        batches = {name: [] for name in timers}
        (first, *floors) = timers

        def take(name):
            batches[name].append(timers[name](calls) / calls)

        def before():
            for name in floors:
                wait()
                take(name)
            wait()

        benchmark.pedantic(take, args=(first,), setup=before, rounds=rounds, warmup_rounds=0)
        wait()
        us = {name: 1e6 * statistics.median(seconds) for name, seconds in batches.items()}
        benchmark.extra_info["us"] = {name: round(value, 4) for name, value in us.items()}
        return us

    return run


@pytest.fixture
def figure(benchmark, request):
    """figure(what, value, unit, at_most=None): state a number, and whether it is as small as it
    must be. A detail is not for docs/figures.md."""

    def state(what, value, unit, at_most=None, detail=False):
        on = request.node.funcargs
        row = {
            "what": what,
            "device": (on.get("device") or on["cuda"]).type,
            "value": float(f"{value:.4g}"),
            "unit": unit,
            "at_most": at_most,
            "met": None if at_most is None else bool(value <= at_most),
            "detail": detail,
        }
        benchmark.extra_info.setdefault("figures", []).append(row)
        request.config.stash[FIGURES].append(row)

    return state


@pytest.fixture
def settled():
    """settled(f, *calls): f, after these calls (tuples of arguments) went round until each was a
    replay."""

    def settle(f, *calls):
        for _ in range(8):
            before = cgt.stats(f).replays
            for args in calls:
                f(*args)
            if cgt.stats(f).replays == before + len(calls):
                wait()
                return f
        pytest.fail(f"never came to replay all its calls\n{cgt.explain(f)}")

    return settle


# --- floors ------------------------------------------------------------------------------------


@pytest.fixture
def captured(cuda):
    """captured(f, *args): the same work as torch records it: (CUDAGraph, its outputs, raw), where
    raw(n) is the seconds that n bare cuGraphLaunch take in a C loop: no dispatcher can go below."""

    def capture(f, *args):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                f(*args)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            out = f(*args)
        graph.instantiate()
        graph.replay()
        stream = torch.cuda.current_stream().cuda_stream
        executable = graph.raw_cuda_graph_exec()
        return graph, out, lambda n: n * core.time_launches([executable], stream, n)

    return capture
