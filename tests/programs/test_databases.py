"""PyTorch's own databases beside eager (tests/databases, `make parity`): a sample of them, and the machinery itself.

Each run is a process of its own: importing the databases switches off PyTorch's global flags, which other tests set.
"""

import fnmatch
import json
import re
import subprocess
import sys
from pathlib import Path

import cgt_core as core
import pytest

ROOT = Path(__file__).resolve().parents[2]
WRONG = ("differs", "raises", "crash", "late")
# What was wrong once: names of entries, and the ways to run them.
ONCE_WRONG = (
    "as_strided*,nn.functional.max_pool1d,_chunk_cat,linalg.eig*,add,stack,nn.functional.bilinear,linalg.pinv,linalg.qr,sgn,cumsum,"
    "fft.fft,linalg.slogdet,nn.functional.grid_sample,normal,_foreach_add,_foreach_zero,nn.MaxPool1d,nn.BatchNorm1d,nn.LSTM,Adam,Adamax,SGD"
)
WAYS = "forward,kept,inplace,out,mixed,autocast,backward,grad,infer,model,step,schedule,bound,train"


@pytest.fixture
def judged(tmp_path, device):
    """judged(*arguments): rows of a run on the device, as dicts."""

    def run(*given):
        out = tmp_path / "rows"
        command = [sys.executable, "-m", "tests.databases", f"--device={device.type}", "--jobs=2", f"--json={out}", *given]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
        assert "entries, " in done.stdout, done.stderr[-2000:]
        fields = ("kind", "name", "way", "dtype", "sample", "verdict", "note")
        return [dict(zip(fields, json.loads(line), strict=True)) for line in out.read_text().splitlines()[1:]]

    return run


def replayed(rows):
    """The share of the entries that eager can run; that nothing is wrong."""
    assert not [row for row in rows if row["verdict"] in WRONG]
    counted = [row for row in rows if row["verdict"] in ("replayed", "eager")]
    return sum(row["verdict"] == "replayed" for row in counted) / len(counted)


def test_a_sample_of_pytorchs_databases_is_what_eager_is(judged):
    rows = judged(f"--part={11 if core.debug_build() else 112}/404", "--most=3")  # each build its half
    assert len(rows) > 80 and {row["kind"] for row in rows} >= {"ops", "refs", "foreach", "modules"}
    assert replayed(rows) > 0.85


@pytest.mark.skipif(core.debug_build(), reason="long, and the same in both builds: the release suite does it")
def test_entries_that_were_wrong_once(judged, device):
    names = ONCE_WRONG + ",linalg.lstsq" * (device.type == "cuda")  # what is left out on the host
    rows = judged("--kinds=ops,random,foreach,modules,optim", f"--ways={WAYS}", f"--names={names}", "--dtypes=float32", "--most=2")
    met = {row["name"] for row in rows}
    assert [name for name in names.split(",") if not fnmatch.filter(met, name)] == []
    assert {row["way"] for row in rows} == set(WAYS.split(",")) and replayed(rows) > 0.75


# Programs that end in each of the ways in which one can.
MADE_UP = """
import itertools, json, os, sys, time
import torch
from tests.databases import entries, page, runner
from tests.databases.entries import Group, Kind
from tests.databases.judge import CALLS

fresh = itertools.count()

def made_up(what):
    def begin(jit):
        f = jit(lambda x: x.nonzero() if what == "eager" else x + 1)
        ours = f.__class__.__name__ != "function"
        def step(k):
            if what == "eager raises" or (ours and what == "raises"):
                raise ValueError("no")
            if ours and k == 3 and what == "crash":
                os.abort()
            if ours and k == 3 and what == "late":
                time.sleep(60)
            y = f(torch.full((3,), float(k)))
            return {"result": y + (what == "differs" and ours and k == 3) + next(fresh) * (what == "eager differs from itself")}
        return step
    return [begin]

WAYS = ("replayed", "eager", "differs", "raises", "crash", "late", "eager raises", "eager differs from itself")
entries.KINDS["made up"] = Kind([WAYS, ("crash",), ("no samples",)], ("forward",), "".join, None, lambda item, *_: [made_up(what) for what in item] if item != ("no samples",) else 1 / 0)
runner.LIMIT_S = 5
groups = [Group("made up", k, f"{k}", "forward", "float32") for k in range(3)]
rows = runner.run(groups, "cpu", jobs=2)
facts = {"device": "CPU", "torch": "2", "python": "3"}
print(json.dumps([rows, page.page(rows, facts, CALLS), page.in_short(rows, True), page.summary(rows)]))
"""


@pytest.mark.skipif(core.debug_build(), reason="does not depend on the build: the release suite does it")
def test_every_end_is_a_verdict_and_the_others_of_a_group_go_on():
    done = subprocess.run([sys.executable, "-c", MADE_UP], cwd=ROOT, capture_output=True, text=True, timeout=120)
    rows, page, in_short, summary = json.loads(done.stdout)
    ways = ["replayed", "eager", "differs", "raises", "crash", "late", "eager raises", "eager differs from itself"]
    assert [(row[4], row[5]) for row in rows if row[1] == "0"] == list(enumerate(ways))
    notes = {row[5]: row[6] for row in rows if row[1] == "0"}
    assert notes["crash"] == "SIGABRT" and notes["late"] == "no answer within 5 s" and notes["raises"] == "ValueError: no"
    assert notes["eager"].startswith("CGT102") and notes["differs"].startswith("call 3: answer.result: 3 of 3 values")
    assert [row[4:6] for row in rows if row[1] == "1"] == [[0, "crash"]]
    assert [row[4:6] for row in rows if row[1] == "2"] == [[None, "eager raises"]]
    assert summary.startswith("7 entries, 1 replayed (14.3 %), 1 eager, 1 differs, 1 raises, 2 crash, 1 late; not counted: 2 that eager refuses, 1 in ")
    assert "| made up | forward | float32 | 7 | 1 (14.3 %) | 1 CGT102 | 1 | 1 | 2 | 1 | 3 |" in page
    assert "| made up 0 forward float32 | 4 | crash | SIGABRT |" in page and "| \\* |" not in page
    assert in_short["verdicts"]["crash"] == 2 and in_short["eager"] == {"CGT102": 1} and len(in_short["wrong"]) == 5


def test_the_page_says_what_is_left_out_and_names_no_machine():
    page = (ROOT / "docs" / "parity.md").read_text()
    skips = (ROOT / "tests" / "databases" / "skips.py").read_text()
    names = re.findall(r'Skip\("[^"]+", "([^"]+)"', skips)
    assert names and all(f"| `{name}` |" in page for name in names)
    assert not re.search(r'"/|[^\w]/(home|root|tmp|usr|work)/', page)
