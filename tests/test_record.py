"""The record of the last run on a GPU, and the table that README shows of it."""

import json
import re
import warnings

import pytest

from bench.gpu import RECORD, ROOT, source_hash
from bench.table import MARKED, table, with_unit

FIGURE = {
    "what": "hit", "device": "cuda", "value": 0.24, "unit": "+ µs", "at_most": 0.6, "met": True,
    "detail": False,
}  # fmt: skip
MADE_UP = {
    "device": "GPU", "driver": "1", "torch": "2", "python": "3",
    "suite": {"passed": 3, "failed": 0, "skipped": 1},
    "expandable_segments": {"passed": 2, "failed": 0, "skipped": 0},
    "bench": {"benches": [{"figures": [
        {**FIGURE, "what": "free", "at_most": None, "met": None},
        {**FIGURE, "what": "on the host", "device": "cpu"},
        {**FIGURE, "what": "too much to show", "detail": True},
        FIGURE,
        {**FIGURE, "what": "slow", "value": 0.7, "met": False},
    ]}]},
}  # fmt: skip


@pytest.fixture
def record():
    """What the last `make gpu` wrote."""
    if not RECORD.exists():
        pytest.skip("no record yet: `make gpu` writes it")
    return json.loads(RECORD.read_text())


def test_the_record_speaks_for_these_sources(record):
    """A warning and no failure: whoever changes a line need not have a GPU."""
    if record["source_hash"] != source_hash():
        warnings.warn(f"{RECORD.name} is older than the sources: run `make gpu`", stacklevel=1)


def test_the_record_names_no_machine(record):
    """A kind of device is a fact; paths and host names are not for others."""
    assert not re.search(r'"/|[^\w]/(home|root|tmp|usr|work)/', json.dumps(record))


def test_readme_shows_the_record(record):
    page = ROOT / "README.md"
    shown = MARKED.search(page.read_text()) if page.exists() else None
    if shown is None:
        pytest.skip("README has no <!-- measured --> part")
    assert shown.group() == table(record), "run: python bench/table.py --write README.md"


def test_table_has_bounded_figures_of_the_gpu_first():
    assert table(MADE_UP).splitlines()[4:] == [
        "| hit | + 0.24 µs | + 0.6 µs | met |",
        "| slow | + 0.7 µs | + 0.6 µs | missed |",
        "| free | + 0.24 µs |  |  |",
    ]
    numbers = [(1234.2, "B"), (0.0, ""), (12.34, "×")]
    assert [with_unit(*n) for n in numbers] == ["1234 B", "0", "12.3 ×"]


def test_source_hash_moves_with_names_and_contents(tmp_path):
    (tmp_path / "cgt" / "core").mkdir(parents=True)
    one, two = tmp_path / "cgt" / "core" / "a.pxi", tmp_path / "cgt" / "b.py"
    one.write_text("x")
    before = source_hash(tmp_path)
    two.write_text("")
    after = source_hash(tmp_path)
    one.write_text("y")
    assert len({before, after, source_hash(tmp_path)}) == 3
