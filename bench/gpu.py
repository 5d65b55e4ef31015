"""`make gpu`: run the suite and the benches here, and write down what they said.

The record, bench/results/gpu.json, says what machine and what sources it speaks for;
tests/project/test_record.py tells when the sources have moved on. It is written whatever fails; the exit
status says whether anything did. A figure that misses its bound is no failure, it is a figure.
"""

import argparse
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "bench" / "results" / "gpu.json"
SOURCES = ("cgt_core.pyx", "cgt_core.pxd", "setup.py", "cgt/**/*.py", "cgt/**/*.pxi", "cgt/**/*.h")
OUTCOMES = "CGT_OUTCOMES"  # names the file that the tests' outcomes go to
PART = "CGT_PART"  # which of the tests a process runs: "2/43" is the third of 43 parts
PARTS, AT_ONCE = 43, 15  # processes, and of these on one GPU; odd, since most tests come in pairs, one for each device
TESTS_S, BENCHES_S = 420, 360  # seconds: the suite begins no more tests; the benches are over
PARITY_S = 240  # of PyTorch's databases: entries that were not judged by then do not count
PARITY_MOST = 8  # samples of each operator, module or optimizer, in each way and dtype
# The allocator's other way to lay out segments: the tests of the GPU again, with it.
SEGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
SECTIONS = ("suite", "expandable_segments", "parity", "bench", "rounds")  # of the record
BY_DEFAULT = SECTIONS[:-1]
ROUNDS, UNTIL = "CGT_ROUNDS", "CGT_UNTIL"  # how often a process runs its tests, and the time at which it begins no more
ROUNDS_S = 480  # seconds until then; a minute later the process is stopped


def source_hash(root=ROOT):
    """sha256 over the names and contents of what is built and imported."""
    digest = hashlib.sha256()
    for path in sorted({path for glob in SOURCES for path in root.glob(glob)}):
        name = path.relative_to(root).as_posix().encode()
        digest.update(name + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def ask(*command):
    """The first line that a command prints, or None if it cannot be run."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split("\n") if done.returncode == 0 else [""]
    return lines[0].strip() or None


def machine():
    """What the figures depend on."""
    import torch

    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "driver": ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": ask("git", "rev-parse", "HEAD"),
        "source_hash": source_hash(),
    }


def gpus():
    """How many there are."""
    import torch

    return max(1, torch.cuda.device_count())


def run_pytest(limit_s, *args, outcomes=None, variables=()):
    """Run pytest: as `run_module`."""
    environment = dict(variables) | ({OUTCOMES: str(outcomes)} if outcomes else {})
    return run_module(limit_s, "pytest", "-p", "no:cacheprovider", *args, variables=environment)


def run_module(limit_s, *args, variables=()):
    """Run a module of Python's, its output where ours goes: its exit status, or None when time was up."""
    command = [sys.executable, "-m", *args]
    environment = os.environ | dict(variables)
    child = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        return child.wait(limit_s)
    except subprocess.TimeoutExpired:
        print(f"\nstopped after {limit_s} s: {' '.join(command[1:])}", flush=True)
        return None
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)  # and what the tests started
            child.wait()


def at_once():
    """Processes of a suite: an odd number."""
    return AT_ONCE * gpus() - (AT_ONCE * gpus() + 1) % 2


def begin_suite(pool, notes, *args, variables=(), parts=None, seconds=TESTS_S):
    """Run the tests in so many parts, in processes of the pool's, with these arguments and environment variables, each
    for so many seconds at most: a function that waits for them, and tells how many passed, failed and were skipped,
    and which failed. One that fails and then errs while it is put away is one; one that began and never ended counts
    as failed."""
    parts = parts or max(PARTS, at_once())
    notes.write_text("")
    order = [str(k) for k in range(gpus())]

    def run_part(k):
        k_th = k % len(order)  # whose the part is: the first that its tests see
        part = {**dict(variables), PART: f"{k}/{parts}", "CUDA_VISIBLE_DEVICES": ",".join(order[k_th:] + order[:k_th])}
        return run_pytest(seconds, "tests", "-p", "bench.gpu", *args, outcomes=notes, variables=part)

    begun = [pool.submit(run_part, k) for k in range(parts)]
    return lambda: outcomes_of([part.result() for part in begun], notes)


def outcomes_of(statuses, notes):
    """What a suite's processes wrote down."""
    found = {}
    for line in notes.read_text().splitlines():
        outcome, test = line.split(" ", 1)
        found.setdefault(test, set()).add(outcome)
    failures = sorted(test for test, seen in found.items() if not seen & {"passed", "skipped"})
    failures += sorted(test for test, seen in found.items() if {"passed", "failed"} <= seen)
    return {
        "status": next((status for status in statuses if status != 0), 0),
        "passed": sum(seen == {"started", "passed"} for seen in found.values()),
        "failed": len(failures),
        "skipped": sum(seen == {"started", "skipped"} for seen in found.values()),
        "failures": failures,
    }


def run_rounds(pool, notes, rounds, seconds):
    """The tests of the GPU again and again, all processes at once: what a suite tells, and how often each of the tests
    passed that passed the fewest times."""
    variables = {ROUNDS: str(rounds), UNTIL: str(time.time() + seconds)}
    told = begin_suite(pool, notes, "-k", "cuda", variables=variables, parts=at_once(), seconds=seconds + 60)()
    times = Counter(line.removeprefix("passed ") for line in notes.read_text().splitlines() if line.startswith("passed "))
    return {**told, "rounds": min(times.values(), default=0), "runs": times.total()}


def pytest_collection_modifyitems(items):
    """With `-p bench.gpu` this module is a plugin: it takes this process's part of the tests, as often as it is asked to,
    and notes outcomes as they come, since a report that is written at the end says nothing when the last test takes
    the process with it."""
    if PART in os.environ:
        part, parts = map(int, os.environ[PART].split("/"))
        rounds = int(os.environ.get(ROUNDS, 1))
        items[:] = [item for k in range(rounds) for item in nth_part(items, (part + k) % parts, parts)]


def nth_part(items, part, parts):
    """The tests of a part. Each begins elsewhere among its own: else all would come to the costliest at once."""
    mine = items[part::parts]
    first = len(mine) * part // parts
    return mine[first:] + mine[:first]


def pytest_runtest_teardown(item):
    """Time is up between two tests, not within one."""
    if time.time() > float(os.environ.get(UNTIL, "inf")):
        item.session.shouldstop = "time is up"


def pytest_runtest_logstart(nodeid):
    """It begins."""
    note("started", nodeid)


def pytest_runtest_logreport(report):
    """The call's outcome; of setting up and putting away, only what went wrong."""
    if report.when == "call" or not report.passed:
        note(report.outcome, report.nodeid)
    if report.failed:
        print(f"\n{report.nodeid}\n{report.longreprtext}", file=sys.__stderr__, flush=True)


def note(outcome, test):
    """Append a line where outcomes_of looks."""
    with open(os.environ[OUTCOMES], "a") as notes:
        notes.write(f"{outcome} {test}\n")


def run_parity(folder, seconds):
    """PyTorch's own databases: how many entries came to which verdict, and those that should not have."""
    told = folder / "parity.json"
    limits = (f"--limit={seconds}", f"--most={PARITY_MOST}", f"--jobs={AT_ONCE * gpus()}")
    status = run_module(seconds + 120, "tests.databases", "--device=cuda", *limits, f"--summary={told}")
    return {"status": status, **(json.loads(told.read_text()) if told.exists() else {"verdicts": {}, "wrong": []})}


def run_benches(folder, options):
    """Run the benches: µs per call of each, of its floors, and what it makes of them."""
    report = folder / "bench.json"
    plugin = ("--benchmark-disable-gc", "--benchmark-columns=median,iqr,rounds")
    status = run_pytest(BENCHES_S, "bench", *plugin, f"--benchmark-json={report}", *options)
    written = report.exists() and report.stat().st_size > 0  # only at the end of the run
    rows = json.loads(report.read_text())["benchmarks"] if written else []
    empty = {"us": {}, "figures": []}
    return {
        "status": status,
        "benches": [{"bench": row["name"], **empty, **row["extra_info"]} for row in rows],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RECORD, help="default: bench/results/gpu.json")
    parser.add_argument("--compile", action="store_true", help="measure torch.compile too")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=BY_DEFAULT, help="the rest of the record stays, and says of which sources it is")
    parser.add_argument("--parity-seconds", type=int, default=PARITY_S, help="default: %(default)s")
    parser.add_argument("--suite-seconds", type=int, default=TESTS_S, help="when the suite begins no more tests; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=20, help="how often the section of that name runs the tests of the GPU; default: %(default)s")
    parser.add_argument("--rounds-seconds", type=int, default=ROUNDS_S, help="when it begins no more of them; default: %(default)s")
    options = parser.parse_args()
    facts = machine()
    if facts["device"] == "CPU" and options.out.resolve() == RECORD:
        sys.exit("No CUDA device here, and the record is of one. Try: --out bench/results/cpu.json")

    with tempfile.TemporaryDirectory() as name:
        folder, record = Path(name), {**facts, **kept(options.only)}
        with ThreadPoolExecutor(AT_ONCE * gpus()) as pool:
            waits = {}
            if "suite" in options.only:
                until = {UNTIL: str(time.time() + options.suite_seconds)}
                waits["suite"] = begin_suite(pool, folder / "suite", variables=until, seconds=options.suite_seconds + 60)
            if "expandable_segments" in options.only:
                waits["expandable_segments"] = begin_suite(pool, folder / "other", "-k", "cuda", variables=SEGMENTS)
            for what, wait in waits.items():
                record[what] = wait()
                write(record, options.out)  # already now: what comes next may take the machine with it, or the time
            if "rounds" in options.only:
                record["rounds"] = run_rounds(pool, folder / "rounds", options.rounds, options.rounds_seconds)
                write(record, options.out)
        if "parity" in options.only:
            record["parity"] = run_parity(folder, options.parity_seconds)
            write(record, options.out)
        if "bench" in options.only:
            record["bench"] = run_benches(folder, ["--compile"] if options.compile else [])
    write(record, options.out)

    ran = {what: record[what] for what in options.only}
    figures = [figure for row in ran.get("bench", {"benches": []})["benches"] for figure in row["figures"]]
    print(f"\n{facts['device']}: {len(figures)} figures")
    if "parity" in ran:
        print("parity:", ", ".join(f"{n} {verdict}" for verdict, n in ran["parity"]["verdicts"].items()))
        for told in ran["parity"]["wrong"]:
            print(f"  {told}")
    for what in [what for what in ran if what not in ("bench", "parity")]:
        print(f"{what}:", ", ".join(f"{ran[what][o]} {o}" for o in ("passed", "failed", "skipped")))
        for name in ran[what]["failures"]:
            print(f"  failed: {name}")
    for f in figures:
        if f["met"] is False:
            bound = f"{f['value']:g} {f['unit']}, at most {f['at_most']:g}"
            print(f"  missed: {f['what']}, {f['device']}: {bound}")
    sys.exit(any(run["status"] != 0 for run in ran.values()))


def kept(anew):
    """The sections of the record there is that are not made anew, each with the machine and the sources that it speaks
    for."""
    old = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    said = {name: old[name] for name in old if name not in SECTIONS}
    return {what: {**said, **old[what]} for what in SECTIONS if what in old and what not in anew}


def write(record, out):
    """The record as a file that diffs well."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
