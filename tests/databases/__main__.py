"""`make parity`: see the package."""

import argparse
import json
import os
import platform
import random
import sys
from fnmatch import fnmatch
from pathlib import Path

import torch
from tqdm import tqdm

from .entries import KINDS, groups_of
from .judge import CALLS, WRONG
from .page import in_short, page, summary
from .runner import Row, run
from .skips import skip_of

DTYPES = ("float32", "bfloat16", "float64", "complex64", "int64")


def arguments(given=None):
    parser = argparse.ArgumentParser(prog="python -m tests.databases", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--kinds", default=",".join(KINDS), help="databases; default: %(default)s")
    parser.add_argument("--ways", help="such as forward,grad; default: all")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="default: %(default)s")
    parser.add_argument("--names", default="*", help="a pattern, or several with commas")
    parser.add_argument("--most", type=int, metavar="N", help="entries of each group, spread over its samples; default: all")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="each N-th group, from the K-th on")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a row a line there, as they come")
    parser.add_argument("--again", type=Path, metavar="FILE", nargs="+", help="run nothing: the rows of these files")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="counts, and what was not right, as JSON")
    parser.add_argument("--limit", type=float, metavar="S", help="judge for so many seconds, groups in random order")
    parser.add_argument("--write", type=Path, metavar="FILE", help="the page, instead of a line here")
    return parser.parse_args(given)


def selected(options):
    """The groups that the options ask for."""
    part, parts = map(int, options.part.split("/"))
    ways = options.ways.split(",") if options.ways else None
    names = options.names.split(",")
    groups = groups_of(options.kinds.split(","), ways, options.dtypes.split(","), options.device)
    groups = [g for g in groups if any(fnmatch(g.name, name) for name in names) and not skip_of(g.kind, g.name, g.way, options.device)]
    if options.limit:  # what there is time for is a fair part
        random.Random(0).shuffle(groups)
    return groups[part - 1 :: parts]


def judged(options, out):
    """(rows of a run, was there time for all); written as they come, and told where they are not right, one of a kind."""
    groups, seen = selected(options), set()
    with tqdm(total=len(groups), unit="group", mininterval=5, file=sys.stderr) as bar:

        def heard(row):
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
            kin = (*row[:4], row.verdict)
            if row.verdict in WRONG and kin not in seen:
                seen.add(kin)
                bar.write(" ".join(map(str, row)), file=sys.stderr)

        rows = run(groups, options.device, options.jobs, options.most, options.limit, heard, lambda group: bar.update())
        return rows, bar.n == len(groups)


def facts_of(device):
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return {"device": name, "torch": torch.__version__, "python": platform.python_version()}


def read(path):
    """(facts, rows) of a file that a run wrote."""
    first, *lines = path.read_text().splitlines()
    return json.loads(first), [Row(*json.loads(line)) for line in lines]


def main():
    options = arguments()
    if options.again:
        found = [read(path) for path in options.again]
        facts, rows, whole = found[0][0], [row for _, some in found for row in some], True
    else:
        facts = {**facts_of(options.device), "most": options.most, "limit": options.limit}
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
        with open(options.json or os.devnull, "w") as out:
            out.write(json.dumps(facts) + "\n")
            rows, whole = judged(options, out)
    if options.summary:
        options.summary.write_text(json.dumps(in_short(rows, whole)))
    if options.write:
        options.write.write_text(page(rows, facts, CALLS))
    print(summary(rows))
    sys.exit(any(row.verdict in WRONG for row in rows))


if __name__ == "__main__":
    main()
