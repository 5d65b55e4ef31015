"""What bench.patches tells of moving inputs and changing numbers: tried with a few functions, and the page is that of its record."""

import json
import re

import pytest
import torch
from helpers import values

from bench.patches import RECORD, ROOT, page, tried


def test_rows_tell_what_became_of_a_function(device):
    x = values(device, 8)
    moved = tried("relu", "input", torch.relu, lambda k: (values(device, 8, seed=k),), device)
    told = tried("x * s", "number", lambda x, s: x * s, lambda k: (x, k + 0.5), device)
    exact = tried("roll", "number", lambda x, n: x.roll(n, 0), lambda k: (x, k), device)
    how = "rebound, 1 told" if device.type == "cuda" else "rebound, 0 told"
    assert (moved.how, moved.records, moved.equal, moved.why) == (how, 1, True, "") and moved.replays >= 20
    assert (told.how, told.records, told.equal, told.why) == ("1 told", 1, True, "") and told.replays >= 20
    assert (exact.how, exact.equal) == ("no op is given it", True) and "args[1] is used for more than arithmetic and operations" in exact.why


def test_what_is_not_equal_is_told(device):
    odd = iter(range(10**6))
    assert not tried("odd", "input", lambda x: x * 0 + next(odd), lambda k: (values(device, 8, seed=k),), device).equal


def test_the_page_shows_the_record():
    if not RECORD.exists():
        pytest.skip("no record yet: `make gpu` writes it")
    text = RECORD.read_text()
    assert not re.search(r'"/|[^\w]/(home|root|tmp|usr|work)/', text)
    assert (ROOT / "docs" / "patches.md").read_text() == page(json.loads(text)), "run: python -m bench.patches --again --write docs/patches.md"
