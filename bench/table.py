"""The measured tables of README and docs/figures.md, from the record of the last `make gpu`.

`python bench/table.py` prints them; `--write README.md` puts six rows into README and all figures into
docs/figures.md beside it, each between <!-- its name --> and <!-- /its name -->.
"""

import argparse
import json
import re
import sys
from pathlib import Path

RECORD = Path(__file__).resolve().parent / "results" / "gpu.json"
PAGES = {"README.md": "headline", "docs/figures.md": "measured"}  # page -> its table
HEADLINE = {  # bench -> what its row is called; all are wall time of a training step
    "test_whole_step_with_adam": "4 linear layers, batch 32, Adam",
    "test_forward_and_backward_of_a_jitted_model[32-0.35]": "32 linear layers, batch 32, no optimizer",
    "test_fifty_steps[ResNet-18]": "ResNet-18, batch 8",
    "test_fifty_steps[Mask R-CNN]": "Mask R-CNN, 2 images",
    "test_fifty_steps[DLRM]": "DLRM, batch 2048",
    "test_fifty_steps[BERT]": "BERT of 4 layers, batch 8",
}


def number(value):
    """Three digits that count, without powers of ten."""
    whole = abs(value) >= 100 or value == int(value)
    return f"{value:.0f}" if whole else f"{value:.3g}"


def headline_rows(record):
    """[(row, µs on the clock eager, with cgt)], what gains most first."""
    us = {row["bench"]: row["us"] for row in record["bench"]["benches"]}
    wall = [(told, *(us[bench].get(f"{kind}_wall", us[bench][kind]) for kind in ("eager", "cgt"))) for bench, told in HEADLINE.items()]
    return sorted(wall, key=lambda row: row[2] / row[1])


def headline(record):
    """Markdown: the six rows of README."""
    lines = ["| wall time of a step | eager | cgt | |", "|---|--:|--:|--:|"]
    for told, eager, ours in headline_rows(record):
        lines.append(f"| {told} | {number(eager / 1e3)} ms | {number(ours / 1e3)} ms | {number(eager / ours)} × faster |")
    return "\n".join([*lines, "", f"{record['device']}, torch {record['torch']}, Python {record['python']}."]) + "\n"


def measured(record):
    """Markdown: what was measured on, the suite, and a row per figure of the CUDA driver; those
    with a bound come first."""
    suite, other = record["suite"], record["expandable_segments"]
    benches = record["bench"]["benches"]
    figures = [f for row in benches for f in row["figures"] if f["device"] == "cuda"]
    figures.sort(key=lambda f: f["at_most"] is None)  # stable: within, the order of the benches
    earlier = " The figures are those of {commit:.7} on {device}.".format_map(record | record["bench"]) if "commit" in record["bench"] else ""  # not made anew
    of = lambda row: f" ({row['commit']:.7})" if "commit" in row else ""  # noqa: E731
    beside = sorted({f" Operations side by side were measured before{of(row)}." for row in benches if "commit" in row})
    lines = [
        f"{record['device']}, driver {record['driver']}, torch {record['torch']}, "
        f"Python {record['python']}. Suite: {suite['passed']} passed, {suite['failed']} failed, "
        f"{suite['skipped']} skipped; the GPU's again with expandable segments: {other['passed']} "
        f"passed, {other['failed']} failed{of(other)}.{earlier}{''.join(beside)} CPU time per call; ratios and differences within one run.",
        "",
        "| what | measured | at most | |",
        "|---|--:|--:|---|",
    ]
    for f in figures:
        value, bound = with_unit(f["value"], f["unit"]), with_unit(f["at_most"], f["unit"])
        met = {True: "met", False: "missed", None: ""}[f["met"]]
        if not f["detail"]:
            lines.append(f"| {f['what']} | {value} | {bound} | {met} |")
    return "\n".join(lines) + "\n"


def with_unit(value, unit):
    """'+ 0.25 µs', '0.6 ×', '3 ns', or '' for None."""
    if value is None:
        return ""
    sign, unit = ("+ ", unit[2:]) if unit.startswith("+ ") else ("", unit)
    return f"{sign}{number(value)} {unit}".strip()


TABLES = {"headline": headline, "measured": measured}


def between(name):
    """Where a table stands in a page."""
    return re.compile(rf"(?<=<!-- {name} -->\n\n).*?(?=\n<!-- /{name} -->)", re.S)


def with_table(page, name, record):
    """The page with today's table, or None: it has no place for one."""
    text, n = between(name).subn(lambda _: TABLES[name](record), page)
    return text if n == 1 else None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, default=RECORD, help="default: the last one")
    parser.add_argument("--write", type=Path, metavar="README.md", help="put them into it, and into the pages beside it")
    options = parser.parse_args()
    if not options.record.exists():
        sys.exit(f"There is no record yet: {options.record.name} is written by `make gpu`.")
    record = json.loads(options.record.read_text())
    if options.write is None:
        print(*(make(record) for make in TABLES.values()), sep="\n", end="")
        return
    made = {}
    for name, table in PAGES.items():
        path = options.write if name == "README.md" else options.write.parent / name
        made[path] = with_table(path.read_text(), table, record)
        if made[path] is None:
            sys.exit(f"{path} has no lines <!-- {table} --> and <!-- /{table} -->, or several.")
    for path, text in made.items():
        path.write_text(text)


if __name__ == "__main__":
    main()
