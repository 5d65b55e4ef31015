"""The record of the last run on a GPU, and the tables that README and docs/figures.md show of it."""

import json
import re
import subprocess
import sys
import warnings

import pytest

from bench import ranks
from bench.gpu import RECORD, ROOT, SECTIONS, kept, source_hash
from bench.table import HEADLINE, PAGES, between, headline_rows, measured, with_table, with_unit

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


def test_a_section_that_is_not_made_anew_says_of_which_sources_it_is(record):
    assert kept(SECTIONS) == {}
    stays = kept(["suite"])
    assert set(stays) == {what for what in SECTIONS if what in record} - {"suite"} and all(one["source_hash"] and one["commit"] for one in stays.values())
    assert stays["bench"]["benches"] == record["bench"]["benches"]


def test_the_record_names_no_machine(record):
    """A kind of device is a fact; paths and host names are not for others."""
    assert not re.search(r'"/|[^\w]/(home|root|tmp|usr|work)/', json.dumps(record))


def test_the_page_of_several_processes_shows_their_record():
    record = json.loads(ranks.RECORD.read_text())
    text = ranks.PAGE.read_text()
    assert ranks.with_figures(text, record) == text and record["tests"] == "passed"
    assert f"{record['models']['MLP of 48 layers']['us']['jit'][1]:,.0f}" in text
    assert not re.search(r'"/|[^\w]/(home|root|tmp|usr|work)/', json.dumps(record))


@pytest.mark.parametrize("page, table", PAGES.items())
def test_pages_show_the_record(record, page, table):
    text = (ROOT / page).read_text()
    assert text == with_table(text, table, record), "run: python bench/table.py --write README.md"


def test_readme_has_six_rows_one_plot_and_no_other_figure(record):
    page = (ROOT / "README.md").read_text()
    shown = between("headline").search(page).group()
    assert shown.count("× faster") == len(headline_rows(record)) == len(HEADLINE) == 6
    prose = re.sub(r"^```.*?^```$", "", page.replace(shown, ""), flags=re.M | re.S)
    assert not re.search(r"\d\s*(µs|ns|ms|×|x faster|%)", prose), "a figure that nothing holds to the record"
    assert re.findall(r"!\[[^\]]*\]\(([^)]*)\)", page) == ["docs/plots/headline.svg"]
    assert len(page.splitlines()) <= 120, "README is one page: what is longer has a page of its own in docs"


def test_writing_readme_writes_the_pages_beside_it(record, tmp_path):
    (tmp_path / "docs").mkdir()
    for page, table in PAGES.items():
        (tmp_path / page).write_text(f"above\n\n<!-- {table} -->\n\nof yesterday\n\n<!-- /{table} -->\n\nbelow\n")
    command = [sys.executable, ROOT / "bench" / "table.py", "--write", tmp_path / "README.md"]
    subprocess.run(command, check=True)
    for page, table in PAGES.items():
        text = (tmp_path / page).read_text()
        assert text == with_table(text, table, record) and text.startswith("above\n") and text.endswith("below\n")
        assert "of yesterday" not in text
    (tmp_path / "README.md").write_text("no place")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode and "has no lines <!-- headline -->" in done.stderr


def test_table_has_bounded_figures_of_the_gpu_first():
    assert measured(MADE_UP).splitlines()[4:] == [
        "| hit | + 0.24 µs | + 0.6 µs | met |",
        "| slow | + 0.7 µs | + 0.6 µs | missed |",
        "| free | + 0.24 µs |  |  |",
    ]
    assert "those of" not in measured(MADE_UP)
    assert "The figures are those of abcdefa on GPU." in measured({**MADE_UP, "bench": {**MADE_UP["bench"], "commit": "abcdefab"}})
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
