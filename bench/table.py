"""The README's measured table, from the record of the last `make gpu`.

`python bench/table.py` prints it; with `--write README.md` it replaces what stands there between
<!-- measured --> and <!-- /measured -->.
"""

import argparse
import json
import re
import sys
from pathlib import Path

RECORD = Path(__file__).resolve().parent / "results" / "gpu.json"
MARKED = re.compile(r"(?<=<!-- measured -->\n).*?(?=<!-- /measured -->)", re.S)


def number(value):
    """Three digits that count, without powers of ten."""
    whole = abs(value) >= 100 or value == int(value)
    return f"{value:.0f}" if whole else f"{value:.3g}"


def table(record):
    """Markdown: what was measured on, the suite, and a row per figure of the CUDA driver; those
    with a bound come first."""
    suite, other = record["suite"], record["expandable_segments"]
    benches = record["bench"]["benches"]
    figures = [f for row in benches for f in row["figures"] if f["device"] == "cuda"]
    figures.sort(key=lambda f: f["at_most"] is None)  # stable: within, the order of the benches
    lines = [
        f"{record['device']}, driver {record['driver']}, torch {record['torch']}, "
        f"Python {record['python']}. Suite: {suite['passed']} passed, {suite['failed']} failed, "
        f"{suite['skipped']} skipped; the GPU's again with expandable segments: {other['passed']} "
        f"passed, {other['failed']} failed. CPU time per call; ratios and differences within one run.",
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, default=RECORD, help="default: the last one")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put it between the markers")
    options = parser.parse_args()
    if not options.record.exists():
        sys.exit(f"There is no record yet: {options.record.name} is written by `make gpu`.")
    text = table(json.loads(options.record.read_text()))
    if options.write is None:
        print(text, end="")
        return
    page = options.write.read_text()
    if not MARKED.search(page):
        sys.exit(f"{options.write} has no lines <!-- measured --> and <!-- /measured -->.")
    options.write.write_text(MARKED.sub(lambda _: text, page, count=1))


if __name__ == "__main__":
    main()
