"""Other projects' tests with cgt injected (tests/suites, `make suites`): plugin and runner, proved by a made-up suite.

The runs are processes of their own: the plugin changes what calling a module is.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import cgt_core as core
import pytest

pytestmark = pytest.mark.skipif(core.debug_build(), reason="long, and the same in both builds: the release suite does it")
ROOT = Path(__file__).resolve().parents[2]
# Its name is that of our own package, as many suites have it.
MADE_UP = """
import gc, weakref
import numpy, torch
from tests import helpers

def test_replays():
    net, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.ones(2, 4)
    with torch.no_grad():
        want = x.mm(net[0].weight.T).add(net[0].bias).relu()
        assert all(torch.allclose(net(x), want) for _ in range(5))
    helpers.here()
    known = weakref.ref(net)
    del net
    gc.collect()
    assert known() is None

def test_steps():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([p], lr=0.5)
    for _ in range(5):
        p.grad = torch.ones(3)
        optimizer.step()
    assert p.tolist() == [-1.5] * 3

def test_silently_wrong():
    switch = numpy.zeros(1)
    class Net(torch.nn.Module):
        def forward(self, x):
            return x.sin() if switch[0] else x.cos()
    net, x = Net(), torch.ones(3)
    for k in range(8):
        switch[0] = k >= 5
        assert torch.equal(net(x), x.sin() if k >= 5 else x.cos())

def test_watches_a_result_die():
    net, x, died = torch.nn.ReLU(), torch.ones(3), []
    for _ in range(5):
        y = net(x)
        weakref.finalize(y, died.append, 1)
        del y
    assert len(died) == 5

def test_fails_anyway():
    assert torch.nn.ReLU()(torch.ones(1)) < 0
"""
WHERE = """
import json, sys
from pathlib import Path
from tests.suites import __main__ as suites
from tests.suites.entries import Suite
from tests.suites.page import page
place = Path(sys.argv[1])
suites.BUILD, suites.fetch = place.parent, lambda suite: place
row = suites.judge(Suite("made", "1", tuple(sys.argv[2:])))
print(json.dumps([row._asdict(), page([row], suites.facts())]))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(the row, the page) of the made-up suite."""
    place = tmp_path_factory.mktemp("made") / "made-1"
    (place / "tests").mkdir(parents=True)
    (place / "tests" / "__init__.py").touch()
    (place / "tests" / "helpers.py").write_text("def here(): pass\n")
    (place / "tests" / "test_made.py").write_text(MADE_UP)
    return judged(place, "tests")


def judged(place, *tests):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CGT_AUDIT": "0"}
    command = [sys.executable, "-c", WHERE, str(place), *tests]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_calls_of_modules_and_steps_are_counted_and_replayed(made):
    found = made[0]["found"]
    assert found["sites"] == 5 and found["calls"] == 5 + 5 + 8 + 5 + 1
    assert found["replays"] == found["audited"] >= 9 and not found["refused"]


def test_a_replay_that_is_silently_wrong_is_told_with_its_test(made):
    (one,) = made[0]["found"]["mismatches"]
    assert one["test"] == "tests/test_made.py::test_silently_wrong" and "a replay was not what eager is" in one["text"]


def test_what_fails_with_cgt_only_is_told(made):
    row = made[0]
    assert list(row["only"]) == ["tests/test_made.py::test_watches_a_result_die"], row
    assert row["tests"] == 4 and row["failing"] == 1 and not row["ended"] and not row["unsteady"]


def test_the_page_has_it_all(made):
    text = made[1]
    assert "| made | 1 | 4 | 24 | " in text
    assert text.count("test\\_silently\\_wrong") == text.count("test\\_watches\\_a\\_result\\_die") == 1


def test_a_crash_is_told_with_its_test(tmp_path):
    (tmp_path / "test_crash.py").write_text("import os\ndef test_one(): pass\ndef test_two(): os._exit(7)\n")
    row, _ = judged(tmp_path, "test_crash.py")
    told = "exit status 7 in test_crash.py::test_two"
    assert row["ended"] == [f"without cgt: {told}", f"with cgt: {told}"] and row["tests"] == 1
