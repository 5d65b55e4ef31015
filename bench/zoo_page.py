"""The zoo's results as a page: a line that sums up, a row per cell, and every reason with the cells that it stopped."""

from collections import Counter

from cgt.tools.report import MEASURED

HARM = 1.05  # times eager: past it a cell is slower

HOST = (
    "This is the host's: a recording is a tape of ATen calls, and a replay saves the Python around them. On a machine "
    "with a GPU `make zoo` writes the page anew."
)
COLUMNS = """
| column | what it says |
|---|---|
| way | infer: a function without gradients; jit: the model jitted, loss, backward and optimizer outside; step: a whole training step |
| equal | values of every call and final weights, bit for bit those of eager. A number: the largest difference, relative to the largest value of its tensor; behind the stroke, where eager differs from itself, eager's own |
| replayed, eager | calls; of a jitted model its backwards count, too. The rest warmed or recorded |
| {calls} calls | seconds of the first {calls} calls, warming and recording included, over eager's (bound: {harm} ×; the two take turns of ten calls) |
| CPU, wall | a call in the steady state over eager's: until the host is done with it, until the device is. Where the device is the host, both are time of its processor |
| hand | CPU and wall over a hand-made graph: `torch.cuda.graph`, for jit `make_graphed_callables` |
| compiled | CPU and wall over `torch.compile(mode="reduce-overhead")`; for step, of the model |
| why | what ran eagerly, by the number of its reason below |
"""


def replays(cell):
    """At least half of its calls were replayed."""
    return cell["outcome"] == "ran" and 2 * cell["replays"] >= cell["calls"]


def slower(cell):
    """Over all its calls, warming and recording included."""
    return "seconds" in cell and cell["seconds"] > HARM * cell["eager_seconds"]


def summary(record):
    """One line."""
    cells = record["cells"]
    ended = Counter(c["outcome"] for c in cells)
    ran = [c for c in cells if c["outcome"] == "ran"]
    close = [c for c in ran if not c["equal"] and not c["eager_equals_itself"]]
    parts = [
        f"{len(cells)} cells",
        f"{sum(map(replays, cells))} replaying",
        f"{sum(not replays(c) for c in ran)} eager",
        f"{ended['crashed'] + ended['timed out'] + ended['raised']} crashed",
        f"{ended['absent']} absent",
        f"{sum(c['equal'] for c in ran)} equal",
        f"{len(ran) - sum(c['equal'] for c in ran)} different ({len(close)} where eager differs from itself)",
        f"{sum(map(slower, cells))} slower than {HARM} × eager over {record['calls']} calls",
    ]
    if ended["broken"]:
        parts.append(f"{ended['broken']} that eager cannot run")
    return ", ".join(parts) + "."


def page(record):
    """Markdown."""
    libraries = ", ".join(f"{name} {at or 'absent'}" for name, at in record["libraries"].items())
    numbers = numbered(record["cells"])
    families = [c for c in record["cells"] if c["way"] != "program"]
    programs = [c for c in record["cells"] if c["way"] == "program"]
    compared = [key for key in ("hand", "compile") if any(f"{key}_us" in c or key in c for c in families)]
    columns = [
        line for line in COLUMNS.strip().splitlines()
        if not line.startswith(("| hand", "| compiled")) or line[2:6] in {key[:4] for key in compared}
    ]  # fmt: skip
    lines = [
        "# Zoo",
        "",
        "Models that people run, made small, with random weights; written by `make zoo`, from `bench/results/zoo.json`.",
        "",
        f"{record['device']}, torch {record['torch']}, Python {record['python']}; {libraries}. "
        f"{record['calls']} calls, inputs in {record['tensors']} tensors.",
        "",
        *([HOST, ""] if record["device"] == "CPU" else []),
        f"**{summary(record)}**",
        "",
        *alone_lines(record["cells"]),
        "\n".join(columns).format(calls=record["calls"], harm=HARM),
        "",
        *table(families, compared, record["calls"], numbers),
    ]
    if programs:
        lines += ["", "## Programs", ""]
        lines += ["The first run, warming and recording included, over eager's; then another, per second.", ""]
        lines += table_of_programs(programs, numbers)
    if numbers:
        lines += ["", "## Reasons", ""]
        lines += [reason_line(text, n, record["cells"]) for text, n in numbers.items()]
    return "\n".join(lines) + "\n"


def alone_lines(cells):
    """Which cells are told by a second run, for which nothing ran beside them; and which were made anew since."""
    names = [f"{c['family']}/{c['way']}" for c in cells if c.get("alone")]
    lines = [f"Measured again alone, since they were slower while other cells took their times (the middle one of three runs, where one was slower again): {', '.join(names)}.", ""] if names else []
    anew = [f"{c['family']}/{c['way']}" for c in cells if "commit" in c]
    return lines + ([f"Of later sources than the rest: {', '.join(anew)}.", ""] if anew else [])


def numbered(cells):
    """Reason -> number, that of most cells first."""
    found = Counter(text for cell in cells for text in kinds(cell))
    return {text: k for k, (text, _) in enumerate(found.most_common(), 1)}


def table(cells, compared, calls, numbers):
    """A row per cell."""
    titles = ["model", "way", "equal", "replayed", "eager", f"{calls} calls", "CPU", "wall"]
    titles += [{"hand": "hand", "compile": "compiled"}[key] for key in compared]
    rows = [f"| {' | '.join(titles)} | why |", "|---|---|---" + "|--:" * (len(titles) - 3) + "|---|"]
    for cell in cells:
        row = [cell["family"], cell["way"]]
        if cell["outcome"] != "ran":
            blank = [""] * (len(titles) - 3)
            rows.append(f"| {' | '.join([*row, cell['outcome'], *blank])} | {plain(cell['why'])} |")
            continue
        row += [equality(cell), str(cell["replays"]), str(cell["eager"]), over_eager(cell)]
        row += [ratio(cell, "eager_us", what) for what in ("host", "wall")]
        row += [against(cell, key) for key in compared]
        rows.append(f"| {' | '.join(row)} | {reasons(cell, numbers)} |")
    return rows


def table_of_programs(cells, numbers):
    """A row per program."""
    rows = ["| program | equal | replayed | eager | first run | eager's | cgt's | why |"]
    rows += ["|---|---|--:|--:|--:|--:|--:|---|"]
    for cell in cells:
        if cell["outcome"] != "ran":
            rows.append(f"| {cell['family']} | {cell['outcome']} |  |  |  |  |  | {plain(cell['why'])} |")
            continue
        row = [cell["family"], equality(cell), str(cell["replays"]), str(cell["eager"]), over_eager(cell)]
        speeds = [cell.get(key) for key in ("eager_per_second", "per_second")]
        row += [f"{speed:.0f} {cell['unit']}/s" if speed else "" for speed in speeds]
        rows.append(f"| {' | '.join(row)} | {reasons(cell, numbers)} |")
    return rows


def reason_line(text, n, cells):
    """A reason, in how many calls, of which cells."""
    stopped = [(c, kinds(c)[text]) for c in cells if text in kinds(c)]
    where = ", ".join(f"{c['family']}/{c['way']}" for c, _ in stopped)
    return f"{n}. {plain(text)} *{sum(calls for _, calls in stopped)} calls: {where}*"


def kinds(cell):
    """Reason -> calls, without the numbers that differ from call to call."""
    found = Counter()
    for text, calls in cell.get("reasons", {}).items():
        found[MEASURED.sub("… ", text)] += calls
    return found


def equality(cell):
    """equal, or how far off; eager's own distance behind it."""
    if cell["equal"]:
        return "equal"
    own = "" if cell["eager_equals_itself"] else f" / {cell['eager_distance']:.1e}"
    return f"{cell['distance']:.1e}{own}"


def over_eager(cell):
    """Of all calls, in bold where it is too much."""
    if "seconds" not in cell:
        return ""
    text = f"{cell['seconds'] / cell['eager_seconds']:.2f}"
    return f"**{text}**" if slower(cell) else text


def ratio(cell, floor, what):
    """'0.12', of cgt's steady state over another one."""
    if "cgt_us" not in cell or floor not in cell:
        return ""
    return f"{cell['cgt_us'][what] / cell[floor][what]:.2f}"


def against(cell, key):
    """'CPU · wall', or that it could not be done: the results say why."""
    if f"{key}_us" in cell:
        return " · ".join(ratio(cell, f"{key}_us", what) for what in ("host", "wall"))
    return "fails" if key in cell else ""


def reasons(cell, numbers):
    """Numbers of its reasons, the most frequent first."""
    return ", ".join(str(numbers[text]) for text, _ in kinds(cell).most_common())


def plain(text):
    """Text that a table and Markdown leave alone."""
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")
