"""What is told of misses, and the switches of the environment."""

import logging
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from helpers import AUDITS_BY_DEFAULT, calls, counts, identical, tells, values

import cgt
from cgt.words import options

from helpers import jit_warm  # isort: skip

PROGRAM = """
import torch, cgt
@cgt.jit
def f(x): return x * 2
g = cgt.jit(lambda x: x * float(x.sum()))
held = [f(torch.ones(3)) for _ in range(4)]
with cgt.require_replay():
    held.append(f(torch.ones(3)))
for k in range(30):
    g(torch.ones(3) * k)
print(cgt.stats(f).replays, cgt.stats(f).eager, cgt.stats(g).replays, *cgt.stats(f).reasons)
"""


def run(**switches):
    environ = {k: v for k, v in os.environ.items() if not k.startswith("CGT_")} | switches | {"PYTHONPATH": os.getcwd()}
    return subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environ)


def eager(x):
    return x * float(x.sum())


@tells("told_miss", "told_record")
def test_misses_are_told_to_who_listens(device, caplog):
    x = values(device)
    with caplog.at_level(logging.INFO, "cgt"):
        f = jit_warm(lambda x: x * 2, x)
        f(values(device, 7))
        calls(cgt.jit(eager), 3, x)
    told = [(record.name, record.getMessage()) for record in caplog.records]
    assert [name for name, _ in told[:3]] == ["cgt.record"] * 3, told
    assert "warmed in" in told[0][1] and "recorded in" in told[1][1] and "args[0]" in told[2][1], told
    name, last = told[-1]
    assert name == "cgt.miss" and "eager runs eagerly" in last and __file__ in last
    caplog.clear()
    f(x), calls(f, 3, x)
    assert not caplog.records


@tells("told_evict")
def test_who_makes_room_is_told(device, caplog, monkeypatch):
    with caplog.at_level(logging.INFO, "cgt.evict"):
        f = cgt.jit(lambda x: x + 1, max_graphs=1)
        for n in (3, 3, 4, 4, 5, 5):
            f(values(device, n))
    assert "goes, to make room for one of" in caplog.text


@tells("told_rescue")
def test_environment_turns_logs_on():
    done = run(CGT_LOG="all")
    assert done.returncode == 0, done.stderr
    for words in ("cgt.record: f: warmed in", "cgt.rescue: a result of f (12 B, made at", "cgt.miss: "):
        assert words in done.stderr, done.stderr
    only = run(CGT_LOG="rescue")
    assert "cgt.rescue" in only.stderr and "cgt.record" not in only.stderr
    assert "cgt." not in run(PYTHONWARNINGS="ignore").stderr


@tells("bad_switch")
def test_unknown_kind_of_log_is_told():
    assert "CgtError: CGT804: CGT_LOG=miss,bogus: expected some of record, miss, rescue, evict, or all." in run(CGT_LOG="miss,bogus").stderr


@tells("disabled")
def test_switched_off():
    done = run(CGT_DISABLE="1")
    assert done.stdout.split() == "0 5 0 CGT512: CGT_DISABLE=1 is set: jitted functions run as plain ones.".split() and done.stderr == "", done


def test_switched_off_stays_off(monkeypatch):
    monkeypatch.setattr(options, "DISABLED", True)
    ran = []
    f = cgt.jit(lambda x: (ran.append(1), x * 2)[1])
    for _ in range(100):
        f(torch.ones(2))
    cgt.reset(f)
    calls(f, 3, torch.ones(2))
    assert len(ran) == 103 and counts(f)[-1] == 103


@tells("strict")
def test_strict_raises_where_a_call_runs_eagerly(device, monkeypatch):
    monkeypatch.setattr(options, "STRICT", True)
    x = values(device)
    f = cgt.jit(lambda x: x * 2)
    assert identical(calls(f, 4, x), x * 2) and counts(f) == (1, 1, 2, 0)
    g = cgt.jit(eager)
    for _ in range(3):
        with pytest.raises(cgt.CgtError, match="eager is not replayed, as CGT_STRICT=1 demands.*turns a tensor into a Python value"):
            calls(g, 3, x)
    with pytest.raises(cgt.CgtError, match="CGT_STRICT"), torch.utils._python_dispatch.TorchDispatchMode():
        f(x)
    assert identical(f(x), x * 2)


def test_strict_is_read_from_the_environment():
    done = run(CGT_STRICT="1")
    assert "as CGT_STRICT=1 demands" in done.stderr and done.returncode


@tells("never_replayed")
def test_function_that_never_replays_says_so_once(device):
    x, f = values(device), cgt.jit(eager)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        calls(f, 200, x)
    (warning,) = caught
    assert warning.category is cgt.CgtWarning and warning.filename == calls.__code__.co_filename
    text = str(warning.message)
    assert f"none of {options.WARN_AFTER} calls of eager was replayed" in text and "turns a tensor into a Python value" in text
    fine = cgt.jit(lambda x: x * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calls(fine, 50, x)
        calls(f, 50, x)


def test_the_page_tells_every_switch():
    root = Path(__file__).resolve().parents[2]
    page = (root / "docs" / "environment.md").read_text()
    told = dict(re.findall(r"^\| `(\w+)` \| ([^|]*?) ?\|", page, re.M))
    sources = [path.read_text() for path in [*(root / "cgt").rglob("*.py"), root / "setup.py"]]
    read = {name for text in sources for name in re.findall(r"\"(CGT_[A-Z_]+|CUDA_[A-Z]+|CXX)\"", text)}
    assert set(told) == read - {"CGT_TORCH_MAJOR", "CGT_TORCH_MINOR"}  # those are the compiler's


def test_the_page_tells_the_defaults():
    root = Path(__file__).resolve().parents[2]
    told = dict(re.findall(r"^\| `(\w+)` \| ([^|]*?) ?\|", (root / "docs" / "environment.md").read_text(), re.M))
    sources = "\n".join((root / name).read_text() for name in ("cgt/words/options.py", "setup.py"))
    defaults = dict(re.findall(r"environ\.get\(\"(\w+)\", \"([^\"]*)\"\)", sources)) | dict.fromkeys(re.findall(r"is_on\(\"(\w+)\"\)", sources), "0")
    assert {"CGT_OVERHEAD", "CGT_MAX_PLACES", "CGT_STRICT", "CGT_DEBUG", "CGT_AUDIT"} <= set(defaults)
    assert {name: told[name] for name in defaults} == defaults and defaults["CGT_AUDIT"] == AUDITS_BY_DEFAULT


def test_a_warning_that_is_an_error_loses_no_result(device):
    """The step is done when it is told; the text stands in explain()."""
    w = torch.zeros(3, device=device)

    def step(x):
        w.add_(x)
        return f"{w.sum().item():.1f}"

    f, x = cgt.jit(step), torch.ones(3, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = [f(x) for _ in range(30)]
    assert got == [f"{3.0 * (k + 1):.1f}" for k in range(30)] and cgt.stats(f).replays == 0
    assert "CGT" in cgt.explain(f)
