"""`python -m tests.suites`: other projects' tests, without cgt and with it, into docs/suites.md.

A suite is a source distribution of the package index, unpacked under build/suites. Nothing of it is kept here.
Each run is a process of its own; a test that fails with cgt alone must do so twice, and pass without it twice.
"""

import argparse
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

from .entries import SUITES
from .page import page, summary

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = ROOT / "build" / "suites"
SLOWER = 10  # with cgt, which records and compares each replay
LEFT_OUT = ("cacheprovider", "randomly", "xdist", "benchmark")
PLUGINS = ("-p", "tests.suites.outcomes", *(word for name in LEFT_OUT for word in ("-p", f"no:{name}")))
MODULES = {"scikit-learn": "sklearn", "umnn": "UMNN"}  # packages whose modules have another name


class Ran(NamedTuple):
    """What became of one run."""

    verdicts: dict  # test -> passed, skipped, failed
    notes: dict  # test -> its exception
    ended: str  # "": as it should; or how not
    found: dict  # what the plugin counted
    seconds: float


class Row(NamedTuple):
    """What became of a suite."""

    project: str
    version: str
    absent: tuple  # what it needs and is not there; nothing was run then
    tests: int  # that pass without cgt
    failing: int  # that fail without cgt
    ended: tuple  # of a run that did not end as it should: how
    only: dict  # test that fails with cgt alone -> its exception
    unsteady: list  # tests that did so once, and not twice
    found: dict
    seconds: tuple  # without, with


def arguments():
    parser = argparse.ArgumentParser(prog="python -m tests.suites", description=__doc__)
    parser.add_argument("--only", default="", metavar="PROJECTS", help="these, with commas between")
    parser.add_argument("--json", type=Path, metavar="FILE", help="rows; those of suites that are not run now stay")
    parser.add_argument("--write", type=Path, metavar="FILE", help="the page")
    parser.add_argument("--needs", action="store_true", help="print what the suites need, and do nothing else")
    return parser.parse_args()


def fetch(suite):
    """Where it is unpacked. What builds its metadata may come as a wheel, the project itself comes as its sources."""
    archives = BUILD / "sdists"
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", suite.project, "-d", archives]
    place = BUILD / f"{suite.project}-{suite.version}"
    if not place.is_dir():
        subprocess.run([*pip, f"{suite.project}=={suite.version}"], check=True)
        archive = next(p for p in archives.glob("*.tar.gz") if p.name == f"{place.name}.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(BUILD, filter="data")
    return place


def absent(suite):
    return tuple(name for name in suite.needs if importlib.util.find_spec(MODULES.get(name, name)) is None)


def run(suite, place, tests, more, injected, again=""):
    """One process. The suite's own configuration is left aside: it may ask for plugins that are not there."""
    outcomes, counters = BUILD / "outcomes", BUILD / "found"
    for file in (outcomes, counters):
        file.unlink(missing_ok=True)
    plugins = [*PLUGINS, *(("-p", "tests.suites.plugin") if injected else ())]
    alone = ["-c", os.devnull, f"--rootdir={place}"]
    limit = suite.limit * (SLOWER if injected else 1)
    ours = {"PYTHONPATH": str(ROOT), "SUITES_OUTCOMES": str(outcomes), "SUITES_FOUND": str(counters)}
    env = {**os.environ, **dict(suite.environment), **ours}
    pytest = [sys.executable, "-P", "-m", "pytest", "-q", "--continue-on-collection-errors"]
    command = [*pytest, *plugins, *alone, *more, *tests]
    begun, ended = time.monotonic(), ""
    with open(BUILD / f"{place.name}{'-cgt' * injected}{again}.log", "w") as log:
        try:
            status = subprocess.run(command, cwd=place, env=env, stdout=log, stderr=log, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            status, ended = None, f"over {limit} s"
    if status is not None and (status < 0 or status > 1):
        ended = f"exit status {status}"
    verdicts, notes, at = read(outcomes)
    found = json.loads(counters.read_text()) if counters.exists() else {}
    return Ran(verdicts, notes, ended + f" in {at}" * bool(ended and at), found, time.monotonic() - begun)


def read(outcomes):
    """({test: verdict}, {test: exception}, the test that has begun and not ended)."""
    verdicts, notes, at = {}, {}, ""
    for line in outcomes.read_text().splitlines() if outcomes.exists() else ():
        what, test, *said = json.loads(line)
        at = test if what == "begins" else ""
        if said:
            verdicts[test], notes[test] = said
    return verdicts, notes, at


def failing(ran):
    return {test for test, verdict in ran.verdicts.items() if verdict == "failed"}


def passing(ran):
    return {test for test, verdict in ran.verdicts.items() if verdict == "passed"}


def judge(suite):
    missing = absent(suite)
    if missing:
        return Row(suite.project, suite.version, missing, 0, 0, (), {}, [], {}, ())
    place, more = fetch(suite), ("-k", suite.select) if suite.select else ()
    without = run(suite, place, suite.tests, more, False)
    injected = run(suite, place, suite.tests, more, True)
    suspects = sorted(failing(injected) & passing(without))
    sure = suspects
    if suspects:
        again = [run(suite, place, suspects, (), with_cgt, "-again") for with_cgt in (False, True)]
        sure = [test for test in suspects if test in passing(again[0]) & failing(again[1])]
    both = (("without cgt", without), ("with cgt", injected))
    ended = tuple(f"{name}: {ran.ended}" for name, ran in both if ran.ended)
    only = {test: injected.notes[test] for test in sure}
    unsteady = [test for test in suspects if test not in only]
    numbers = len(passing(without)), len(failing(without))
    seconds = without.seconds, injected.seconds
    return Row(suite.project, suite.version, (), *numbers, ended, only, unsteady, injected.found, seconds)


def facts():
    return {"torch": torch.__version__, "python": platform.python_version(), "threads": torch.get_num_threads()}


def kept(path):
    """{project: Row} of an earlier run."""
    rows = json.loads(re.sub(r"\bNaN\b", "null", path.read_text())) if path and path.exists() else []
    return {row[0]: Row(*row) for row in rows}


def main():
    options = arguments()
    if options.needs:
        print("\n".join(sorted({need for suite in SUITES for need in suite.needs})))
        return
    chosen = [suite for suite in SUITES if not options.only or suite.project in options.only.split(",")]
    BUILD.mkdir(parents=True, exist_ok=True)
    rows = kept(options.json)
    for suite in chosen:
        rows[suite.project] = judge(suite)
        print(summary(rows[suite.project]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(list(rows.values())))
    ordered = [rows[suite.project] for suite in SUITES if suite.project in rows]
    if options.write:
        options.write.write_text(page(ordered, facts()))
    sys.exit(any(row.only or row.ended or row.found.get("mismatches") for row in ordered))


if __name__ == "__main__":
    main()
