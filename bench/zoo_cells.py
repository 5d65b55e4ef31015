"""One cell of the zoo: a family in one way, or a program; with cgt, as a hand-made graph, or compiled.

`python -m bench.zoo_cells JSON` is a worker: it imports a library, says that it is ready, waits for its
turn (a line), and answers its units, each with a line of JSON. What the libraries print goes to stderr.
"""

import contextlib
import gc
import importlib
import json
import os
import random
import re
import statistics
import sys
import traceback
import warnings
from functools import partial
from time import perf_counter, process_time

import numpy
import torch

# isort: split
import cgt

from .zoo_families import FAMILIES, PROGRAMS

BATCHES = 8  # different ones, in turn
SETTLING = 3  # eager calls before anything is timed: libraries load their kernels
TURN = 10  # calls
ROUNDS, ROUND = 7, 5  # of the steady state; a round must not fill the launch queue
PLACE = re.compile(r"[^\s'\"(]*/(?:site-packages|dist-packages|lib/python[\d.]+)/")
HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


# --- the ways ----------------------------------------------------------------------------------


def tensor_of(result):
    """The first tensor of what a model answers with."""
    if isinstance(result, torch.Tensor):
        return result
    return next(iter(result.values())) if isinstance(result, dict) else result[0]


def use(way, model, jit):
    """A function of a batch that uses the model in one of the ways, and the jitted part of it. The loss
    is the mean square of the result."""
    model.train(way != "infer")
    if way == "infer":

        @jit
        def infer(**batch):
            with torch.no_grad():
                return tensor_of(model(**batch))

        return infer, infer

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.01, momentum=0.9)
    forward = jit(model) if way == "jit" else model

    def step(**batch):
        optimizer.zero_grad(set_to_none=True)
        loss = tensor_of(forward(**batch)).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    if way == "jit":
        return step, forward
    step = jit(step)
    return step, step


def eagerly(function):
    """Instead of a jit."""
    return function


# --- running -----------------------------------------------------------------------------------


def wait(device):
    """Until the device has nothing to do."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def clock(device):
    """Seconds that count: with a GPU those of the wall; on the host those of the processor, since a cell has one
    thread there and the machine may have other things to do."""
    return perf_counter() if device.type == "cuda" else process_time()


def seed(n):
    """Every generator that a model may draw from."""
    random.seed(n)
    numpy.random.seed(n)
    torch.manual_seed(n)


def random_state():
    """Of all these generators."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return random.getstate(), numpy.random.get_state(), torch.get_rng_state(), cuda


def set_random_state(state):
    """Back to where they were."""
    python, array, host, cuda = state
    random.setstate(python)
    numpy.random.set_state(array)
    torch.set_rng_state(host)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)


def make(family, device):
    """A model with the same random weights each time."""
    seed(0)
    return family.build().to(device)


def draw(family, device):
    """The batches, on the device."""
    drawn = (family.draw(torch.Generator().manual_seed(k)) for k in range(BATCHES))
    return [{name: x.to(device) for name, x in batch.items()} for batch in drawn]


def play(players, batches, calls, turn, fresh, device):
    """[(values, seconds)] for each player, a function and what begins its iterations. They take turns, of so many calls, so
    that what disturbs one disturbs the others, and each sees random numbers as if it were alone. A batch is copied
    into the same tensors each time, or comes in fresh ones."""
    seed(1)
    states = [random_state()] * len(players)
    buffers = [{name: x.clone() for name, x in batches[0].items()} for _ in players]
    values, seconds = [[] for _ in players], [0.0] * len(players)
    gc.collect()
    for first in range(0, calls, turn):
        for i, (f, begin_iteration) in enumerate(players):
            set_random_state(states[i])
            wait(device)
            began = clock(device)
            for k in range(first, min(first + turn, calls)):
                batch = batches[k % BATCHES]
                begin_iteration()
                if fresh:
                    buffers[i] = {name: x.clone() for name, x in batch.items()}
                else:
                    for name, x in batch.items():
                        buffers[i][name].copy_(x)
                values[i].append(f(**buffers[i]).clone())
            wait(device)
            seconds[i] += clock(device) - began
            states[i] = random_state()
    return list(zip(values, seconds, strict=True))


def steady(subjects, device):
    """{name_us: per call, until the host is done with it and until the device is}: medians, the subjects
    in turns."""
    host, wall = ({name: [] for name in subjects} for _ in range(2))
    for _ in range(ROUNDS):
        for name, f in subjects.items():
            wait(device)
            began = clock(device)
            for _ in range(ROUND):
                f()
            host[name].append(clock(device) - began)
            wait(device)
            wall[name].append(clock(device) - began)
    us = lambda seconds: round(1e6 * statistics.median(seconds) / ROUND, 2)  # noqa: E731
    return {f"{name}_us": {"host": us(host[name]), "wall": us(wall[name])} for name in subjects}


# --- comparing ---------------------------------------------------------------------------------


def same(a, b):
    """Bit for bit, NaN included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    bits = [x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return torch.equal(*bits)


def distance(wanted, got):
    """The largest difference, relative to the largest value of its tensor; inf where they cannot be subtracted."""
    most = 0.0
    for a, b in zip(wanted, got, strict=False):
        if a.shape != b.shape:
            return float("inf")
        if a.numel() and not same(a, b):
            a, b = a.double(), b.double()
            off = ((a - b).abs().max() / a.abs().max().clamp(min=1e-30)).item()
            most = max(most, off if off == off else float("inf"))
    return most


def compared(wanted, got, again):
    """What the table says of values and final weights; `again` runs eager once more, if it is needed."""
    unequal = [k for k, (a, b) in enumerate(zip(wanted, got, strict=False)) if not same(a, b)]
    equal = not unequal and len(wanted) == len(got)
    facts = {"equal": equal, "eager_equals_itself": None}
    if not equal:
        facts |= {"first_unequal": unequal[0] if unequal else min(len(wanted), len(got))}
        facts |= {"distance": distance(wanted, got)}
        once_more = again()
        facts["eager_distance"] = distance(wanted, once_more)
        facts["eager_equals_itself"] = all(map(same, wanted, once_more))
    return facts


# --- parts of a cell ---------------------------------------------------------------------------


def counted(jitted):
    """What became of the calls, their backwards' included, and where the time of recording went."""
    facts = dict.fromkeys(("calls", "warmups", "records", "replays", "eager", "rescues"), 0)
    facts |= {"reasons": {}, "preparing_ms": 0.0}
    for f in jitted:
        stats = cgt.stats(f)
        for s in (stats, stats.backward):
            if s is None:
                continue
            for name in ("calls", "warmups", "records", "replays", "eager", "rescues"):
                facts[name] += getattr(s, name)
            for text, n in s.reasons.items():
                text = told(text)
                facts["reasons"][text] = facts["reasons"].get(text, 0) + n
            facts["preparing_ms"] = round(facts["preparing_ms"] + 1e3 * sum(s.seconds.values()), 1)
    return facts


def told(text):
    """A sentence without the folders of this machine."""
    return PLACE.sub("", text).replace(HERE, "")


def with_cgt(family, way, device, calls, fresh, timed):
    """Values and times of `calls` calls as they are and jitted, then both in their steady state."""
    batches = draw(family, device)

    def run(*jits, n=calls):
        """For each jit, with a model of its own: the function, its jitted part, values and weights, seconds."""
        models = [make(family, device) for _ in jits]
        used = [use(way, model, jit) for model, jit in zip(models, jits, strict=True)]
        begins = [cgt.step if jit is cgt.jit and way != "jit" else nothing for jit in jits]
        players = [(f, begin) for (f, _), begin in zip(used, begins, strict=True)]
        played = play(players, batches, n, n if family.parted else TURN, fresh, device)
        weights = [[x.detach().clone() for x in model.state_dict().values()] for model in models]
        rows = zip(used, played, weights, strict=True)
        return [(f, jitted, values + at_end, s) for (f, jitted), (values, s), at_end in rows]

    try:
        run(eagerly, n=SETTLING)
    except Exception as error:
        return {"outcome": "broken", "why": f"eager raised {said(error)}"}
    (plain, _, wanted, eager_s), (f, jitted, got, ours_s) = run(eagerly, cgt.jit)
    facts = {"outcome": "ran", **counted([jitted])}
    facts |= compared(wanted, got, lambda: run(eagerly)[0][2])
    if timed:
        facts |= {"seconds": round(ours_s, 4), "eager_seconds": round(eager_s, 4)}
        subjects = {"cgt": partial(f, **batches[0]), "eager": partial(plain, **batches[0])}
        for subject in subjects.values():
            for _ in range(SETTLING):
                subject()
        facts |= steady(subjects, device)
    return facts


def nothing():
    """Instead of cgt.step()."""


def by_hand(family, way, device, **_):
    """The steady state of torch's own graphs: the whole function captured, or, where the model alone is
    jitted, make_graphed_callables."""
    model, batch = make(family, device), draw(family, device)[0]
    if way == "jit":
        step, _ = use(way, model, partial(graphed, batch=batch))
        for _ in range(SETTLING):
            step(**batch)
        return steady({"hand": partial(step, **batch)}, device)
    f, _ = use(way, model, eagerly)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(SETTLING):
            f(**batch)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        f(**batch)
    return steady({"hand": graph.replay}, device)


class InOrder(torch.nn.Module):
    """A model that takes tensors in order and answers with one: make_graphed_callables asks for that."""

    def __init__(self, model, names):
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *tensors):
        return tensor_of(self.model(**dict(zip(self.names, tensors, strict=True))))


def graphed(model, batch):
    """Forward and backward as torch's graphs, called with the batch by name."""
    graph = torch.cuda.make_graphed_callables(
        InOrder(model, list(batch)), tuple(batch.values()), allow_unused_input=True
    )
    return lambda **batch: graph(*batch.values())


def compiled(family, way, device, **_):
    """The steady state of torch.compile with its graphs, of what is jitted in this way; where that is a whole
    step, of the model."""
    model, batch = make(family, device), draw(family, device)[0]
    f, _ = use("infer" if way == "infer" else "jit", model, partial(torch.compile, mode="reduce-overhead"))

    def call():
        torch.compiler.cudagraph_mark_step_begin()
        f(**batch)

    for _ in range(2 * SETTLING):
        call()
    return steady({"compile": call}, device)


def program(family, way, device, calls, timed, **_):
    """A program run twice as it is and jitted: first from the beginning, then once more, when it is recorded."""

    def run(jit):
        seed(0)
        play_once, jitted = family.build(device, jit, calls)
        values, seconds = [], []
        for k in range(2):
            gc.collect()
            seed(1 + k)
            wait(device)
            began = clock(device)
            values += [x.clone() for x in play_once()]
            wait(device)
            seconds.append(round(clock(device) - began, 4))
        return values, seconds, jitted

    try:
        run(eagerly)
        wanted, (eager_s, eager_again), _ = run(eagerly)
    except Exception as error:
        return {"outcome": "broken", "why": f"eager raised {said(error)}"}
    got, (ours_s, ours_again), jitted = run(cgt.jit)
    facts = {"outcome": "ran", **counted(jitted), **compared(wanted, got, lambda: run(eagerly)[0])}
    if timed:
        facts |= {"seconds": ours_s, "eager_seconds": eager_s, "unit": family.unit}
        facts |= {"per_second": round(calls / ours_again, 1), "eager_per_second": round(calls / eager_again, 1)}
    return facts


PARTS = {"cgt": with_cgt, "program": program, "hand": by_hand, "compile": compiled}


# --- a worker ----------------------------------------------------------------------------------


def said(error):
    """An exception in one line, and where it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({told(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())[:300]
    return told(f"{type(error).__name__}: {text}{at}")


def answer(part, family, way, **how):
    """The facts of one unit, or why there are none."""
    try:
        return PARTS[part](family, way, **how)
    except Exception as error:
        return {"outcome": "raised", "why": said(error)}
    finally:
        cgt.reset()
        gc.collect()


def main():
    job = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    if job["deterministic"]:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.deterministic = True
    device, name = torch.device(job["device"]), job["name"]
    family = FAMILIES[name] if name in FAMILIES else PROGRAMS[name]
    try:
        importlib.import_module(family.library)
        with contextlib.suppress(Exception):  # told where the cell runs
            make(family, device) if name in FAMILIES else None
        absent = None
    except Exception as error:
        absent = {"outcome": "absent", "why": told(f"{type(error).__name__}: {error}")}
    print("ready", file=answers)
    sys.stdin.readline()
    for way, part in job["units"]:
        how = {key: job[key] for key in ("calls", "fresh", "timed")}
        facts = absent or answer(part, family, way, device=device, **how)
        print(json.dumps(facts), file=answers)
        if part == "hand" and "why" in facts:
            return  # torch's generators believe that they are still captured: the rest is for another worker


if __name__ == "__main__":
    main()
