"""One application in one way, in a process of its own: a line of JSON with what came of it."""

import argparse
import hashlib
import importlib
import json
import random
import sys
import traceback
import warnings
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from time import perf_counter

import numpy
import torch

# isort: split
import cgt

HERE = Path(__file__).parent


def compiled(f):
    """As `cgt.jit` does it: a module stays that module."""
    if not isinstance(f, torch.nn.Module):
        return torch.compile(f, mode="reduce-overhead")
    f.compile(mode="reduce-overhead")
    return f


WAYS = {"eager": lambda f: f, "cgt": cgt.jit, "compile": compiled}
STEADY = 1 / 3  # of the steps, the last


def digest(found):
    """sha256 of the bits of what an application ends with, name by name."""
    digest = hashlib.sha256()
    for name, value in found.items():
        value = value.detach().cpu().contiguous() if isinstance(value, torch.Tensor) else torch.tensor(value)
        digest.update(name.encode() + bytes(value.reshape(-1).view(torch.uint8).tolist()))
    return digest.hexdigest()


def play(name, way, device):
    """What came of it. Seconds are those of the wall until the device is done."""
    application = importlib.import_module(f"bench.applications.{name}")
    steps = application.STEPS[device]
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    functions, ticks, marks = [], 0, [0.0, 0.0]

    def wait():
        if device == "cuda":
            torch.cuda.synchronize()
        return perf_counter()

    def jit(f):
        functions.append(WAYS[way](f))
        return functions[-1]

    def tick():
        nonlocal ticks
        ticks += 1
        if way == "compile":
            torch.compiler.cudagraph_mark_step_begin()
        if ticks == steps - int(steps * STEADY):
            marks[1] = wait()

    marks[0] = wait()
    found = application.run(jit, device, steps, tick)
    over = wait()
    told = {
        "what": application.WHAT,
        "steps": steps,
        "seconds": over - marks[0],
        "steady_seconds": (over - marks[1]) / int(steps * STEADY),
    }
    if way == "cgt":
        counts = [cgt.stats(f) for f in functions]
        told |= {what: sum(getattr(one, what) for one in counts) for what in ("calls", "replays", "eager", "records")}
        told["reasons"] = dict(Counter(code for one in counts for code in one.reasons).most_common(3))
        print(*map(cgt.explain, functions), sep="\n")
    return told | {"digest": digest(found), "values": {k: v for k, v in found.items() if isinstance(v, float)}}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("device")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.device == "cpu":
        torch.set_num_threads(1)
    try:
        with redirect_stdout(sys.stderr):
            told = play(options.name, options.way, options.device)
    except Exception as error:
        traceback.print_exc()
        told = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
