"""`make zoo`: models that people run, each as eager and jitted; what was replayed, is it equal, does it pay?

    python -m bench.zoo                         every cell: results as JSON, then the table
    python -m bench.zoo 'llama*' resnet18       these alone; 'bert/step' is one cell
    python -m bench.zoo --no-times --jobs 8     values alone, many at once

A cell is a family in one of three ways, or a program (`bench/zoo_families.py`):

    infer   a function of a batch, without gradients, jitted
    jit     the model jitted; loss, backward and optimizer outside
    step    a whole training step jitted: forward, loss, backward, optimizer

The cells of a family share a process (`bench/zoo_cells.py`), one after the other, and several families are
imported at once; but while times are taken, one process has its turn. A cell that takes its process with it, or
its time, is a line of the table, and the family's others go on in another process.
"""

import argparse
import fnmatch
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from .gpu import ROOT, machine
from .zoo_families import FAMILIES, PROGRAMS
from .zoo_page import page, slower, summary

RECORD = ROOT / "bench" / "results" / "zoo.json"
WAYS = ("infer", "jit", "step")
LIBRARIES = ("transformers", "torchvision", "timm", "torch_geometric", "peft")
LIMIT_S = 120  # of one cell; compiling takes longer


def chosen(patterns):
    """{family or program: [way, ...]} of the cells that match; no pattern: all."""
    cells = [(name, way) for name in FAMILIES for way in WAYS]
    cells += [(name, "program") for name in PROGRAMS]
    found = {}
    for name, way in cells:
        if not patterns or any(fnmatch.fnmatch(text, p) for p in patterns for text in (name, f"{name}/{way}")):
            found.setdefault(name, []).append(way)
    return found


def units_of(ways, options):
    """(way, part) in the order in which a worker does them: what may take a process with it comes last."""
    if ways == ["program"]:
        return [("program", "program")]
    parts = ["cgt"]
    if options.timed and options.device == "cuda":
        parts += ["hand"] * options.hand + ["compile"] * options.compile
    return [(way, part) for part in parts for way in ways]


# --- processes ---------------------------------------------------------------------------------


def run_family(name, ways, options, turn):
    """The cells of one family: what its workers answered, a new one after each that ended early."""
    cells = {way: {"family": name, "way": way} for way in ways}
    library = (FAMILIES | PROGRAMS)[name].library
    units = units_of(ways, options)
    while units:
        answers = run_worker(name, units, options, turn)
        for (way, part), facts in zip(units, answers, strict=False):
            if part in ("hand", "compile") and "why" in facts:
                facts = {part: facts["why"]}
            cells[way] |= {"library": library, "device": options.device, "asked": options.calls, **facts}
        units = units[len(answers) :]
    return list(cells.values())


def run_worker(name, units, options, turn):
    """Answers of one worker, in the order of the units. The last one tells of its end, if that came early and
    not because it left the rest to another."""
    job = {"name": name, "units": units, "device": options.device, "calls": options.calls}
    job |= {"fresh": options.fresh, "timed": options.timed, "deterministic": options.deterministic}
    command = [sys.executable, "-X", "faulthandler", "-m", "bench.zoo_cells", json.dumps(job)]
    answers = []
    with tempfile.TemporaryFile("w+") as heard:
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment(options), text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=heard,
        )  # fmt: skip
        try:
            line = answer(child, options.limit)
            if line:
                with turn:
                    tell(child)
                    while len(answers) < len(units):
                        line = answer(child, options.limit)
                        if not line:
                            break
                        answers.append(json.loads(line))
            left = answers and line == "" and child.wait() == 0
            if len(answers) < len(units) and not left:
                answers.append(ended(child, line, heard, options.limit))
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return answers


def environment(options):
    """The workers'. On the host one thread each: the same sums at every run, and steadier times."""
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    if options.deterministic:
        quiet["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # torch.use_deterministic_algorithms asks for it
    threads = {"OMP_NUM_THREADS": "1"} if options.device == "cpu" else {}
    return os.environ | quiet | threads


def tell(child):
    """It is this worker's turn."""
    try:
        child.stdin.write("go\n")
        child.stdin.flush()
    except BrokenPipeError:
        pass  # it has ended, which answer() tells


def answer(child, limit_s):
    """The next line, '' at the worker's end, None when time is up."""
    ready, _, _ = select.select([child.stdout], [], [], limit_s)
    return child.stdout.readline() if ready else None


def ended(child, line, heard, limit_s):
    """The outcome of the unit at which a worker ended."""
    if line is None:
        return {"outcome": "timed out", "why": f"no answer within {limit_s} s"}
    status = child.wait()
    why = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    heard.seek(0)
    fatal = [text.strip() for text in heard if "Error" in text or "error:" in text]
    return {"outcome": "crashed", "why": ": ".join([why, *fatal[-1:]])}


# --- the whole ---------------------------------------------------------------------------------


def facts_of(options):
    """What the results depend on."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    told = {"calls": options.calls, "tensors": "fresh" if options.fresh else "refilled"}
    facts = machine()
    if options.device == "cpu":
        facts |= {"device": "CPU", "driver": None}
    return {**facts, "libraries": versions, **told}


def write(record, out):
    """A line for each cell."""
    head = json.dumps({**record, "cells": None}, ensure_ascii=False, indent=1)
    lines = ",\n".join("  " + json.dumps(cell, ensure_ascii=False) for cell in record["cells"])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(head.replace('"cells": null', f'"cells": [\n{lines}\n ]') + "\n")


def one_line(cell):
    """Of a cell, as it comes."""
    name = f"{cell['family']}/{cell['way']}"
    if cell["outcome"] != "ran":
        return f"{name:28} {cell['outcome']}: {cell['why']}"
    equal = "equal" if cell["equal"] else f"DIFFERS by {cell['distance']:.1e}"
    if not cell["equal"] and not cell["eager_equals_itself"]:
        equal += f", eager from itself by {cell['eager_distance']:.1e}"
    counts = " ".join(f"{cell[what]} {what}" for what in ("replays", "eager"))
    times = f", {cell['seconds'] / cell['eager_seconds']:.2f} x eager" if "seconds" in cell else ""
    why = f"  [{max(cell['reasons'], key=cell['reasons'].get)[:110]}]" if cell["reasons"] else ""
    return f"{name:28} {equal}, {counts}{times}{why}"


def run_zoo(options):
    """The record, written as it grows, and its cells told as they come."""
    families = chosen(options.patterns)
    order = {(name, way): k for k, (name, way) in enumerate((n, w) for n in families for w in families[n])}
    record = {**facts_of(options), "cells": []}
    turn, writing = threading.Semaphore(options.turns) if options.timed else nullcontext(), threading.Lock()

    def run(name):
        cells = run_family(name, families[name], options, turn)
        with writing:
            record["cells"] = sorted(record["cells"] + cells, key=lambda c: order[c["family"], c["way"]])
            if options.out:
                write(record, options.out)
            print("\n".join(map(one_line, cells)), flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        try:
            list(pool.map(run, families))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # after Ctrl-C: what has not begun
    if options.turns > 1:
        measure_alone(record, options)
    return record


def measure_alone(record, options):
    """What was slower while others took times, too, is told by runs of its own: by one, or if it is slower there too by the middle
    one of three, since a machine has other things to do."""
    for cell in list(filter(slower, record["cells"])):
        runs = []
        while not runs or (len(runs) < 3 and slower(runs[0])):
            runs += run_family(cell["family"], [cell["way"]], options, nullcontext())
        runs = sorted((found for found in runs if found["outcome"] == "ran"), key=lambda found: found["seconds"] / found["eager_seconds"])
        if runs:
            found = runs[len(runs) // 2]
            put_alone(record, found)
            print("alone:", one_line(found), flush=True)
    if options.out:
        write(record, options.out)


def put_alone(record, found):
    """A cell in the place of the one that was measured beside others."""
    for k, cell in enumerate(record["cells"]):
        if (cell["family"], cell["way"]) == (found["family"], found["way"]):
            record["cells"][k] = found | {"alone": True}


def arguments(given=None):
    """The options, with what they imply."""
    cuda, cores = torch.cuda.is_available(), os.cpu_count()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("patterns", nargs="*", help="families or family/way, with * and ?; default: all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument("--jobs", type=int, default=max(1, cores // 4), help="processes at once")
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--fresh", action="store_true", help="every batch in tensors of its own")
    parser.add_argument("--deterministic", action="store_true", help="PyTorch's deterministic algorithms, so that eager equals itself")
    parser.add_argument("--no-times", dest="timed", action="store_false", help="values alone")
    parser.add_argument("--turns", type=int, default=1, metavar="N", help="processes that take times at once, in each cgt and eager by turns")
    parser.add_argument("--no-hand", dest="hand", action="store_false", help="no hand-made graphs")
    parser.add_argument("--compile", action="store_true", help="torch.compile too: takes long")
    parser.add_argument("--limit", type=int, default=LIMIT_S, metavar="S", help="seconds for a cell")
    parser.add_argument("--out", type=Path, default=RECORD, help="the results; default: %(default)s")
    parser.add_argument("--write", type=Path, metavar="FILE", help="the page, instead of its table here")
    parser.add_argument("--again", action="store_true", help="run nothing: the page of the last results")
    return parser.parse_args(given)


def main():
    options = arguments()
    record = json.loads(options.out.read_text()) if options.again else run_zoo(options)
    if options.write:
        options.write.write_text(page(record))
    else:
        print(page(record))
    print(summary(record))


if __name__ == "__main__":
    main()
