"""`python -m bench.applications`: whole algorithms, eager, jitted and compiled.

    python -m bench.applications                     all of them, on the GPU if there is one; a line for each
    python -m bench.applications ppo 'd*'            these alone
    python -m bench.applications --write             the record and docs/applications.md, too

An application is told from the others by the module that holds it. Each way of each has a process of its own, one after
the other, since they are timed."""

import argparse
import fnmatch
import json
import pkgutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ..gpu import ROOT, machine

RECORD = ROOT / "bench" / "results" / "applications.json"
PAGE = ROOT / "docs" / "applications.md"
LIMIT_S = 240  # of one process
WAYS = ("eager", "cgt", "compile")
LIBRARIES = ("gymnasium", "transformers", "diffusers", "torch_geometric")
NO_APPLICATION = {"__main__", "worker"}

HEAD = """# Applications

Whole algorithms as people write them, with one line for each part that is jitted (`bench/applications/`), written by
`python -m bench.applications --write` from `bench/results/applications.json`. Everything counts: environments, replay
buffers, data loaders and the host's part of each step.

{machine}

| column | what it says |
|---|---|
| eager | ms of a step, over the last third of the steps |
| cgt, compile | gain over eager, in the same places: `cgt.jit`, and `torch.compile(mode="reduce-overhead")`; empty: not run |
| from the first step | gain of the whole run, with all that recording or compiling takes |
| equal | does the run end with the very bits of eager: weights, states, rewards? Where it does not, eager runs once more |
| replayed | calls of the jitted functions |

| application | steps | eager | cgt | compile | from the first step: cgt | compile | equal | replayed |
|---|--:|--:|--:|--:|--:|--:|---|--:|
"""


def names(patterns=()):
    """The applications that match; no pattern: all."""
    found = [one.name for one in pkgutil.iter_modules([str(Path(__file__).parent)]) if one.name not in NO_APPLICATION]
    return [name for name in found if not patterns or any(fnmatch.fnmatch(name, p) for p in patterns)]


def run(name, way, device, limit_s):
    """What the worker told, or why it told nothing."""
    command = [sys.executable, "-m", "bench.applications.worker", name, way, device]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"error": f"not done within {limit_s} s"}
    lines = done.stdout.splitlines()
    told = json.loads(lines[-1]) if lines else {"error": f"exit status {done.returncode}"}
    if "error" in told:
        print(done.stderr[-2000:], file=sys.stderr)
    return told


def gain(row, way, what):
    """Eager's time over this way's; None if one of them has none."""
    if what not in row["eager"] or what not in row.get(way, {}):
        return None
    return row["eager"][what] / row[way][what]


def equality(row, way="cgt"):
    """Does this way end with eager's bits? In words."""
    if "digest" not in row["eager"] or "digest" not in row.get(way, {}):
        return "?"
    if row["eager"]["digest"] == row[way]["digest"]:
        return "yes"
    again = row.get("again", {}).get("digest", row["eager"]["digest"])
    return "**no**" if again == row["eager"]["digest"] else "nor is eager to itself"


def told(row):
    """One line of what came of an application."""
    ours = row.get("cgt", {})
    cells = [f"{row['eager'].get('what', '?'):42}", f"equal: {equality(row)}"]
    cells += [f"{ours['replays']} of {ours['calls']} replayed, {ours['eager']} eager"] if "calls" in ours else []
    for way in (way for way in WAYS[1:] if way in row):
        steady, whole = gain(row, way, "steady_seconds"), gain(row, way, "seconds")
        cells.append(f"{way} {steady:.2f} x, {whole:.2f} x in all" if steady else f"{way}: {row[way]['error']}")
    return "  ".join(cells)


def times(value):
    return "" if value is None else f"{value:.1f} ×" if value < 10 else f"{value:.0f} ×"


def cells(row):
    """A row of the page."""
    eager, ours = row["eager"], row.get("cgt", {})
    last = ours.get("error") or f"{ours['replays']} of {ours['calls']}"
    shown = [
        eager.get("what", "?"), eager.get("steps", ""), f"{eager['steady_seconds'] * 1e3:.2f} ms" if "steps" in eager else "",
        *(times(gain(row, way, "steady_seconds")) or row.get(way, {}).get("error", "")[:60] for way in WAYS[1:]),
        *(times(gain(row, way, "seconds")) for way in WAYS[1:]),
        equality(row), last,
    ]  # fmt: skip
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in shown) + " |"


def page(record):
    libraries = ", ".join(f"{name} {number}" for name, number in record["libraries"].items() if number)
    facts = f"{record['device']}, torch {record['torch']}, Python {record['python']}; {libraries}."
    facts += f"\n\n{record['note']}" if "note" in record else ""  # of a run that was not alone
    return HEAD.format(machine=facts) + "\n".join(map(cells, record["applications"].values())) + "\n"


def version_of(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("patterns", nargs="*", metavar="application", help=f"of {', '.join(names())}; all if none")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="eager always runs")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit", type=int, default=LIMIT_S, help="seconds of one way of one; default: %(default)s")
    parser.add_argument("--out", type=Path, default=RECORD, help="default: bench/results/applications.json")
    parser.add_argument("--write", action="store_true", help="the record and the page")
    options = parser.parse_args()
    record = {**machine(), "libraries": {name: version_of(name) for name in LIBRARIES}, "applications": {}}
    for name in names(options.patterns):
        ways = sorted({"eager", *options.ways}, key=WAYS.index)
        row = {way: run(name, way, options.device, options.limit) for way in ways}
        if equality(row) == "**no**":
            row["again"] = run(name, "eager", options.device, options.limit)  # kernels that add in any order, perhaps
        record["applications"][name] = row
        print(told(row), flush=True)
        if options.write:
            options.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    if options.write and options.out == RECORD:
        PAGE.write_text(page(record))
    sys.exit(any(equality(row) in ("?", "**no**") for row in record["applications"].values()))


if __name__ == "__main__":
    main()
