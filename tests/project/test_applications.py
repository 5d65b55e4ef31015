"""The applications' runner: what it compares, counts and writes. The applications themselves take libraries and minutes."""

import pytest

from bench.applications import dynamics, worker
from bench.applications.__main__ import equality, gain, names, page, told

EAGER = {"what": "a | b", "steps": 10, "seconds": 4.0, "steady_seconds": 0.4, "digest": "x"}
OURS = {"seconds": 2.0, "steady_seconds": 0.02, "digest": "x", "calls": 10, "replays": 8, "eager": 0}
ROW = {"eager": EAGER, "cgt": OURS, "compile": {"error": "Unsupported: a graph break"}}


def test_an_application_ends_alike_and_replays(monkeypatch):
    monkeypatch.setitem(dynamics.STEPS, "cpu", 12)
    eager, ours = (worker.play("dynamics", way, "cpu") for way in ("eager", "cgt"))
    assert ours["digest"] == eager["digest"] and ours["replays"] >= 8 and eager["steps"] == 12


@pytest.mark.parametrize("name", names())
def test_an_application_says_what_it_is(name):
    text = (worker.HERE / f"{name}.py").read_text()
    assert text.startswith('"""') and "WHAT = " in text and 'STEPS = {"cpu":' in text
    assert "def run(jit, device, steps, tick):" in text and text.count("tick()") >= 1


def test_digest_is_of_names_and_bits():
    from torch import tensor

    found = {"a": tensor([0.0]), "b": 1.5}
    assert worker.digest(found) == worker.digest({"a": tensor([0.0]), "b": 1.5})
    assert worker.digest(found) != worker.digest({"a": tensor([-0.0]), "b": 1.5})
    assert worker.digest(found) != worker.digest({"c": tensor([0.0]), "b": 1.5})


def test_rows_tell_gains_equality_and_errors():
    assert gain(ROW, "cgt", "steady_seconds") == 20 and gain(ROW, "cgt", "seconds") == 2
    assert gain(ROW, "compile", "seconds") is None and equality(ROW) == "yes" and equality(ROW, "compile") == "?"
    other = {**ROW, "cgt": {**OURS, "digest": "y"}}
    assert equality(other) == equality({**other, "again": EAGER}) == "**no**"
    assert equality({**other, "again": {**EAGER, "digest": "z"}}) == "nor is eager to itself"
    assert "equal" in told(ROW) and "cgt 20.00 x, 2.00 x in all" in told(ROW) and "compile: Unsupported" in told(ROW)
    record = {"device": "GPU", "torch": "2", "python": "3", "libraries": {"one": "1.0", "other": None}}
    text = page({**record, "applications": {"a": ROW}})
    assert "GPU, torch 2, Python 3; one 1.0." in text
    assert text.splitlines()[-1] == "| a \\| b | 10 | 400.00 ms | 20 × | Unsupported: a graph break | 2.0 × |  | yes | 8 of 10 |"
