"""The example programs run, agree with eager, which they check themselves, and replay."""

import os
import re
import subprocess
import sys
from pathlib import Path

import cgt_core as core
import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_there_are_five():
    assert [path.stem for path in EXAMPLES] == ["decode", "diffusion", "dqn", "parallel", "train"]
    assert all(len(path.read_text().splitlines()) < 110 for path in EXAMPLES)  # a page or two


@pytest.mark.skipif(core.debug_build(), reason="does not depend on the build: the release suite does it")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path):
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, env=environ)
    assert done.returncode == 0 and " x faster than eager" in done.stdout, done.stderr
    replays = sum(int(n) for n in re.findall(r"(\d+) (?:of \d+ (?:steps|calls) )?(?:replayed|replays)", done.stdout))
    assert replays >= 25, done.stdout
