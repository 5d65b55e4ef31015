"""The page docs/parity.md: a table of databases, ways and dtypes, what was not right, why calls ran eagerly, what was left out."""

import re
from collections import Counter

from .judge import CRASH, DIFFERS, EAGER, EAGER_DIFFERS, EAGER_RAISES, LATE, NOT_COUNTED, RAISES, REPLAYED, WRONG
from .skips import SKIPS

TOLD = 200  # entries that are named
COMMON = 12  # operators named for a reason
CODE = re.compile(r"CGT\d+")

HEAD = """# Parity

The databases with which PyTorch tests itself (`torch.testing._internal`), each sample through `cgt.jit` beside eager; written by `make parity`.
Inputs are new tensors at each of {calls} calls, two sets of values take turns, and results, written arguments, gradients,
buffers and states are compared bit for bit. Replays are not audited here (`CGT_AUDIT=0`): the table says what they give by themselves.

{facts}

**{summary}**

{unseeded}

| column | what it says |
|---|---|
| database | ops: `op_db`; random: those of it that seed and draw, without the seeding; refs: `python_ref_db`; foreach; hop; functions: `autograd_function_db`; custom; modules; criteria; optim |
| way | of operators: forward; mixed: several samples by one function in each iteration; autocast: under it, in bfloat16; inside: of clones that the function makes; noncontiguous: inputs with gaps; kept: the first tensor is the same at each call; inplace; out: into tensors that are there; backward: backward() outside; grad: autograd.grad inside. Of modules: infer; model: jitted in training; autocast: the same, under it; step: with loss, backward and optimizer. Of optimizers: step; fresh: gradients in new tensors; schedule: another rate at each call; bound: that of `cgt.jit(opt.step)`; train: with forward and backward |
| entries | samples that eager can run, and answers twice alike |
| replayed | of the last two calls at least one was, and the backward of one, where it is a recording's: that of a view of an argument is autograd's own |
| eager | by [code](messages.md) |
| differ, raise, crash, late | that should not be: other bits; an exception of cgt's; the process ended; no answer in time |
| not counted | eager raises, or differs from itself |
"""


def code_of(note):
    """CGT705 of a note, marked where it is the backward's."""
    found = CODE.search(note)
    return (found.group() if found else note) + " (backward)" * note.startswith("backward: ")


def counted(rows):
    """How many of each verdict."""
    return Counter(row.verdict for row in rows)


def share(rows):
    """Of the entries that count, how many replay: as text."""
    found = counted(rows)
    entries = len(rows) - sum(found[v] for v in NOT_COUNTED)
    return entries, f"{100 * found[REPLAYED] / entries:.1f} %" if entries else ""


def summary(rows):
    """One line."""
    found = counted(rows)
    entries, replayed = share(rows)
    wrong = ", ".join(f"{found[v]} {v}" for v in WRONG)
    return f"{entries} entries, {found[REPLAYED]} replayed ({replayed}), {found[EAGER]} eager, {wrong}; not counted: {found[EAGER_RAISES]} that eager refuses, {found[EAGER_DIFFERS]} in which it differs from itself."


def unseeded(rows):
    """The shares without what no replay could give: samples that set the seed inside. The row `random` has them without that."""
    some = [row for row in rows if "CGT304" not in row.note]
    forward, gradients = (share([row for row in some if row.way in ways])[1] for ways in (("forward",), ("backward", "grad")))
    return f"Without samples that set a seed inside, which are there once more as `random`, {forward} of the forward calls replay, and {gradients} with gradients."


def by(rows, key):
    """{key(row): rows}, in the order in which they came."""
    found = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def table(rows):
    lines = ["| database | way | dtype | entries | replayed | eager | differ | raise | crash | late | not counted |", "|---|---|---|--:|--:|---|--:|--:|--:|--:|--:|"]
    for (kind, way, dtype), some in by(rows, lambda row: (row.kind, row.way, row.dtype)).items():
        found, codes = counted(some), Counter(code_of(row.note) for row in some if row.verdict == EAGER)
        eager = ", ".join(f"{n} {code}" for code, n in codes.most_common())
        entries, replayed = share(some)
        numbers = " | ".join(str(found[v] or "") for v in (DIFFERS, RAISES, CRASH, LATE))
        lines.append(f"| {kind} | {way} | {dtype} | {entries} | {found[REPLAYED]} ({replayed}) | {eager} | {numbers} | {sum(found[v] for v in NOT_COUNTED) or ''} |")
    return lines


def wrong(rows):
    """What should not be, an entry a line; alike notes of one operator are one."""
    found = by([row for row in rows if row.verdict in WRONG], lambda row: (row.kind, row.name, row.way, row.dtype, row.verdict))
    lines = ["| entry | samples | verdict | what |", "|---|---|---|---|"]
    for (kind, name, way, dtype, verdict), some in list(found.items())[:TOLD]:
        samples = ", ".join(str(row.sample) for row in some[:6]) + ", ..." * (len(some) > 6)
        lines.append(f"| {kind} {name} {way} {dtype} | {samples} | {verdict} | {cell(some[0].note)} |")
    return lines if found else ["Nothing."]


def reasons(rows):
    """Why entries ran eagerly, the commonest first, with those it stopped most."""
    lines = ["| reason | entries | says | of |", "|---|--:|---|---|"]
    found = by([row for row in rows if row.verdict == EAGER], lambda row: code_of(row.note))
    for code, some in sorted(found.items(), key=lambda one: -len(one[1])):
        names = Counter(row.name for row in some)
        most = ", ".join(f"{name} {n}" for name, n in names.most_common(COMMON)) + ", ..." * (len(names) > COMMON)
        lines.append(f"| {code} | {len(some)} | {cell(some[0].note)} | {most} |")
    return lines


def in_short(rows, whole):
    """The same as facts: for a record. `whole`: time was enough for all."""
    eager = by([row for row in rows if row.verdict == EAGER], lambda row: code_of(row.note))
    found = by([row for row in rows if row.verdict in WRONG], lambda row: (row.kind, row.name, row.way, row.verdict))
    return {
        "whole": whole,
        "verdicts": counted(rows),
        "eager": {code: len(some) for code, some in sorted(eager.items(), key=lambda one: -len(one[1]))},
        "wrong": [f"{' '.join(kin)}: {len(some)} entries, such as {some[0].dtype} {some[0].sample}: {some[0].note}" for kin, some in found.items()],
    }


def cell(text):
    """A note as a cell of a table: no paths of this machine, and no bars."""
    text = re.sub(r"[^\s'\"(]*/(?=[\w.]+\.py)", "", text)
    return re.sub(r"([|_*[])", r"\\\1", text[:240])


def skips():
    return ["| database | name | way | device | reason |", "|---|---|---|---|---|", *(f"| {s.kind} | `{s.name}` | {s.way} | {s.device} | {s.why} |" for s in SKIPS)]


def page(rows, facts, calls):
    """Markdown."""
    told = f"{facts['device']}, torch {facts['torch']}, Python {facts['python']}."
    if facts.get("most"):
        told += f" Of each operator, module and optimizer at most {facts['most']} samples in each way and dtype, spread over all."
    if facts.get("limit"):
        told += f" What {facts['limit']:g} s were enough for."
    sections = [("", table(rows)), ("## Not right", wrong(rows)), ("## Why calls ran eagerly", reasons(rows)), ("## Left out", skips())]
    text = HEAD.format(calls=calls, facts=told, summary=summary(rows), unseeded=unseeded(rows))
    return text + "".join("\n" + "\n".join(filter(None, [title, "\n".join(["", *lines] if title else lines)])) + "\n" for title, lines in sections)
