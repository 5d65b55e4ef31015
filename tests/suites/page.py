"""The page docs/suites.md: a table of suites, mismatches, tests that fail with cgt alone, why calls ran eagerly."""

import re
from collections import Counter

HEAD = """# Suites

Other projects' own tests with cgt injected; written by `make suites`. The outermost calls of modules and the outermost
steps of optimizers go through `cgt.jit` (`tests/suites/plugin.py`). Each replay is compared with eager, bit for bit.
Tests call a module a few times: the first call warms, the second records, so the share of replays is small here.
Each test draws the same random numbers in both runs.

torch {torch}, Python {python}, CPU, {threads} threads.

| column | what it says |
|---|---|
| tests | that pass without cgt |
| calls | outermost calls of modules and steps of optimizers |
| replayed | of these calls |
| mismatches | replays that were not what eager is; eager's values stood |
| only with cgt | tests that fail with cgt and pass without it, each twice |
"""
CODE = re.compile(r"CGT\d+")
COMMON = 6  # codes that are named for a suite


def summary(row):
    """One line."""
    if row.absent:
        return f"{row.project}: absent, it needs {', '.join(row.absent)}"
    ended = "".join(f"; {text}" for text in row.ended)
    numbers = f"{row.tests} tests, {row.found.get('calls', 0)} calls, {share(row)} replayed"
    return f"{row.project}: {numbers}, {len(mismatches(row))} mismatches, {len(row.only)} fail with cgt only{ended}"


def mismatches(row):
    return row.found.get("mismatches", [])


def share(row):
    calls = row.found.get("calls", 0)
    return f"{100 * row.found['replays'] / calls:.0f} %" if calls else "none"


def table(rows):
    lines = ["| project | version | tests | calls | replayed | mismatches | only with cgt | remarks |"]
    lines += ["|---|---|--:|--:|--:|--:|--:|---|"]
    for row in rows:
        if row.absent:
            lines.append(f"| {row.project} | {row.version} | | | | | | absent: it needs {', '.join(row.absent)} |")
            continue
        remarks = [*map(cell, row.ended)]
        remarks += [f"{row.failing} fail without cgt, too"] if row.failing else []
        remarks += [f"{len(row.unsteady)} failed with cgt once, and not again"] if row.unsteady else []
        counted = f"{row.tests} | {row.found.get('calls', '')} | {share(row)}"
        numbers = f"{counted} | {len(mismatches(row))} | {len(row.only)}"
        lines.append(f"| {row.project} | {row.version} | {numbers} | {'; '.join(remarks)} |")
    return lines


def not_alike(rows):
    """Mismatches, of each test the first."""
    lines = ["| project | test | how many | what |", "|---|---|--:|---|"]
    for row in rows:
        counts = Counter(one["test"] for one in mismatches(row))
        first = {one["test"]: one["text"] for one in reversed(mismatches(row))}
        lines += [f"| {row.project} | {cell(test)} | {n} | {cell(first[test])} |" for test, n in counts.items()]
    return lines if len(lines) > 2 else ["None."]


def failures(rows):
    lines = ["| project | test | exception |", "|---|---|---|"]
    lines += [f"| {row.project} | {cell(test)} | {cell(note)} |" for row in rows for test, note in row.only.items()]
    return lines if len(lines) > 2 else ["None."]


def reasons(rows):
    """Codes of the messages, see messages.md, and how often each was a reason."""
    lines = ["| project | calls by code |", "|---|---|"]
    for row in rows:
        counts = Counter()
        for text, n in row.found.get("eager", {}).items():
            counts[(CODE.search(text) or ["other"])[0]] += n
        told = ", ".join(f"{n} {code}" for code, n in counts.most_common(COMMON) if n)
        lines += [f"| {row.project} | {told} |"] if told else []
    return lines


def cell(text):
    """As a cell of a table: no paths of this machine, and no bars."""
    text = re.sub(r"/[^\s'\"(]*/(?=[\w.]+\.py)", "", text)
    return " ".join(text.replace("|", "\\|").replace("_", "\\_").replace("*", "\\*").replace("<", "&lt;").split())[:400]


def page(rows, facts):
    """Markdown."""
    sections = [("Mismatches", not_alike(rows)), ("Tests that fail with cgt only", failures(rows))]
    sections += [("Why calls ran eagerly, by [code](messages.md)", reasons(rows))]
    text = HEAD.format(**facts) + "\n" + "\n".join(table(rows)) + "\n"
    return text + "".join(f"\n## {title}\n\n" + "\n".join(lines) + "\n" for title, lines in sections)
