"""The zoo of models, two small cells of it: each in a worker, compared with eager, and told."""

import json
import re

import cgt_core as core
import pytest

from bench import zoo_page
from bench.zoo import RECORD, ROOT, arguments, chosen, run_zoo
from bench.zoo_families import FAMILIES, PROGRAMS
from bench.zoo_page import page, summary


@pytest.fixture
def zoo(tmp_path):
    """zoo(*arguments): what was recorded, and the file that it was written to."""

    def run(*given):
        out = tmp_path / "zoo.json"
        record = run_zoo(arguments([*given, "--device=cpu", f"--out={out}"]))
        return record, out

    return run


def test_cells_are_equal_and_told(zoo):
    record, out = zoo("mlp_batchnorm/step", "dqn", "--calls=8", "--jobs=2")
    assert json.loads(out.read_text()) == record
    step, program = record["cells"]
    assert [step["family"], step["way"], program["way"]] == ["mlp_batchnorm", "step", "program"]
    assert step["outcome"] == "ran" and step["equal"], step
    assert (step["calls"], step["warmups"], step["records"], step["replays"]) == (8, 1, 1, 6)
    assert step["seconds"] > 0 and step["eager_seconds"] > 0 and step["cgt_us"]["wall"] > 0
    assert program["outcome"] == "ran" and program["equal"] and program["per_second"] > 0, program
    assert summary(record).startswith("2 cells, 2 replaying, 0 eager, 0 crashed, 0 absent, 2 equal, ")
    text = page(record)
    assert "| mlp_batchnorm | step | equal | 6 | 0 |" in text and "| dqn | equal |" in text


@pytest.mark.skipif(core.debug_build(), reason="long, and the same in both builds: the release suite does it")
def test_what_is_slower_beside_others_is_measured_again_alone(zoo, monkeypatch):
    monkeypatch.setattr(zoo_page, "HARM", 0.0)  # all are
    record, out = zoo("mlp_batchnorm/infer", "dqn", "--calls=4", "--jobs=2", "--turns=2")
    assert [c["alone"] for c in record["cells"]] == [True, True] and json.loads(out.read_text()) == record
    assert "Measured again alone, since they were slower while other cells took their times (the middle one of three runs, where one was slower again): mlp_batchnorm/infer, dqn/program." in page(record)


def test_a_cell_that_outlasts_its_time_is_a_line(zoo):
    record, _ = zoo("mlp_batchnorm/infer", "--calls=4", "--limit=0")
    assert [(c["outcome"], c["why"]) for c in record["cells"]] == [("timed out", "no answer within 0 s")]
    assert "| mlp_batchnorm | infer | timed out |" in page(record)


def test_patterns_choose_families_and_cells():
    assert len(FAMILIES) >= 45 and len(chosen([])) == len(FAMILIES) + len(PROGRAMS)
    assert chosen(["bert/step", "d?n"]) == {"bert": ["step"], "dqn": ["program"]}
    assert set(chosen(["llama_?o*"])) == {"llama_lora", "llama_loop"}


def test_the_page_shows_the_record_and_names_no_machine():
    if not RECORD.exists():
        pytest.skip("no record yet: `make zoo` writes it")
    text = RECORD.read_text()
    assert not re.search(r'"/|[^\w]/(home|root|tmp|usr|work)/', text)
    assert (ROOT / "docs" / "zoo.md").read_text() == page(json.loads(text)), (
        "run: python -m bench.zoo --again --write docs/zoo.md"
    )
