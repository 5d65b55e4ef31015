"""The figures of docs/performance.md and README's plot, from the record of the last `make gpu`.

    python docs/plots.py            tables into the page, plots into docs/plots/; needs matplotlib
    python docs/plots.py --tables   the tables alone

A table stands in the page between <!-- its name --> and <!-- /its name -->, and a plot beside it says the same.
tests/project/test_docs.py holds both to the record.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.table import RECORD, between, headline_rows, number, with_unit  # noqa: E402

PAGE = ROOT / "docs" / "performance.md"
PLOTS = ROOT / "docs" / "plots"

KINDS = {"eager": "eager", "graphed": "make_graphed_callables", "replay": "CUDAGraph.replay()", "cgt": "cgt", "raw": "cuGraphLaunch alone"}
HOST = {  # bench -> what its row is called
    "test_hit_over_the_launch_alone": "8 small ops, 16 parameters",
    "test_hit_with_dropout_inside": "a product and dropout",
    "test_mlp_inference": "MLP of 8 layers, inference",
    "test_forward_and_backward_of_a_jitted_model[8-0.7]": "8 layers, forward + backward",
    "test_forward_and_backward_of_a_jitted_model[32-0.35]": "32 layers, forward + backward",
    "test_whole_training_step": "training step, fused AdamW, 4 layers",
    "test_whole_step_with_adam": "training step, Adam foreach, 4 layers",
}
WALL = {
    "whole step, wall time over eager": "training step, Adam foreach, 4 layers",
    "forward + backward (8 layers) over eager, wall time": "8 layers, forward + backward",
    "forward + backward (32 layers) over eager, wall time": "32 layers, forward + backward",
    "ResNet-18: step, wall time over eager": "ResNet-18, training step",
    "BERT: step, wall time over eager": "BERT, training step",
    "DLRM: step, wall time over eager": "DLRM, training step",
    "Mask R-CNN: step, wall time over eager": "Mask R-CNN, training step",
}
TENSORS = (3, 17, 50, 512)
GUARDS = {"closed over": "tensors closed over", "arguments": "tensors passed"}
LISTS = {  # tables that are a column of figures
    "hit": [
        "raw cuGraphLaunch of the same graph", "hit, 1 input + 16 parameters", "hit over raw cuGraphLaunch", "hit over CUDAGraph.replay()",
        "hit over eager", "each further tensor leaf, fixed", "hit with dropout inside", "hit in a path of 8 over a hit alone",
        "beginning an iteration, nothing to rescue",
    ],
    "dearer": [
        "hit with one moving input over raw cuGraphLaunch", "hit with a held result", "one rescue of a small result", "branch on a value",
        "branch on a value over eager", "two chains with an eager part between them", "two chains with an eager part between them over eager",
        "training step of 48 layers over raw cuGraphLaunch",
    ],
    "recording": [
        "recording 64 ops over one eager run", "recording 400 ops over one eager run", "looking around 48 transformer layers",
        "call that is known to run eagerly, over eager", "200 calls, growing shapes: over eager", "200 calls, changing numbers: over eager",
        "200 calls, fresh objects: over eager", "200 calls, tiny: over eager",
    ],
}  # fmt: skip


def read():
    return json.loads(RECORD.read_text())


def times(record):
    """{bench: {kind: µs per call}} on the GPU."""
    return {row["bench"]: row["us"] for row in record["bench"]["benches"]}


def figures(record):
    """{what: figure} on the GPU."""
    return {f["what"]: f for row in record["bench"]["benches"] for f in row["figures"] if f["device"] == "cuda"}


def host_rows(record):
    """[(row, {kind: µs})] of CPU time per call."""
    return [(told, {kind: times(record)[bench].get(kind) for kind in KINDS}) for bench, told in HOST.items()]


def wall_rows(record):
    """[(row, wall time over eager's)]"""
    return [(told, figures(record)[what]["value"]) for what, told in WALL.items()]


def beside_rows(record):
    """[[step, µs of its ops in eager's order, and side by side, how many times faster]]"""
    us, head = times(record), "test_side_by_side["
    names = [bench.removeprefix(head)[:-1] for bench in us if bench.startswith(head)]
    both = [(name, us[f"{head}{name}]"]["floor"], us[f"{head}{name}]"]["cgt"]) for name in names]
    both.sort(key=lambda row: row[2] / row[1])
    return [[name, number(alone), number(beside), f"{number(alone / beside)} ×"] for name, alone, beside in both]


def guard_rows(record):
    """[(how tensors come, [µs of the guard alone for each number of them])]"""
    return [(told, [times(record)[f"test_guard_alone[cuda-{how}-{n}]"]["guard"] for n in TENSORS]) for how, told in GUARDS.items()]


# --- tables ---------------------------------------------------------------------------------------


def grid(head, rows):
    """Markdown, numbers to the right."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def tables(record):
    """{name: Markdown} of what the page shows."""
    known = figures(record)
    told = {
        "machine": "{device}, driver {driver}, torch {torch}, Python {python}.\n".format_map(record | record["bench"]),
        "host": grid(
            ["CPU time per call, µs", *KINDS.values()],
            [[row, *(number(us[kind]) if us[kind] else "" for kind in KINDS)] for row, us in host_rows(record)],
        ),
        "wall": grid(["wall time over eager", ""], [[row, with_unit(value, "×")] for row, value in wall_rows(record)]),
        "beside": grid(["a replay, µs", "in their order", "side by side", ""], beside_rows(record)),
        "guard": grid(["guard alone, µs", *map(str, TENSORS)], [[row, *map(number, values)] for row, values in guard_rows(record)]),
    }
    for name, whats in LISTS.items():
        told[name] = grid(["", "measured"], [[what, with_unit(known[what]["value"], known[what]["unit"])] for what in whats])
    return told


def with_tables(page, record):
    """The page with today's tables."""
    for name, table in tables(record).items():
        page, n = between(name).subn(lambda _, table=table: table, page)
        if n != 1:
            raise SystemExit(f"{PAGE.name} has no lines <!-- {name} --> and <!-- /{name} -->, or several.")
    return page


# --- plots ----------------------------------------------------------------------------------------


def labels(record):
    """{plot: the numbers that it shows}, as text."""
    return {
        "headline": [f"{number(eager / ours)} ×" for _, eager, ours in headline_rows(record)],
        "host": [number(value) for _, us in host_rows(record) for value in us.values() if value],
        "wall": [number(value) for _, value in wall_rows(record)],
        "guard": [number(value) for _, values in guard_rows(record) for value in values],
    }


def draw(record):
    """Write all plots."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "cgt", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    from matplotlib import pyplot as plt

    colors = dict(zip(KINDS, ("#9e9e9e", "#e0a458", "#c96f4a", "#2f6f9f", "#bcd4e6"), strict=True))

    def save(figure, name):
        PLOTS.mkdir(exist_ok=True)
        figure.savefig(PLOTS / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
        path = PLOTS / f"{name}.svg"
        path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
        plt.close(figure)

    figure, axes = plt.subplots(figsize=(8, 2.6))
    rows = headline_rows(record)
    axes.barh([row for row, *_ in rows], [eager / ours for _, eager, ours in rows], color=colors["cgt"])
    for k, (_, eager, ours) in enumerate(rows):
        axes.text(eager / ours + 0.1, k, f"{number(eager / ours)} ×", va="center")
    axes.axvline(1, color=colors["eager"])
    axes.text(1.07, 5.75, "eager", color="#616161", va="center")
    axes.set(xlabel="wall time of a step: eager's over that with cgt", xlim=(0, rows[0][1] / rows[0][2] * 1.1), ylim=(-0.6, 6))
    axes.invert_yaxis()
    save(figure, "headline")

    figure, axes = plt.subplots(figsize=(8, 6.5))
    at, ticks = 0.0, []
    for row, us in host_rows(record):
        shown = [kind for kind in KINDS if us[kind]]
        ticks.append((at + (len(shown) - 1) / 2, row))
        for kind in shown:
            axes.barh(at, us[kind], color=colors[kind], height=0.9)
            axes.text(us[kind] * 1.06, at, number(us[kind]), va="center")
            at += 1
        at += 0.8
    axes.set(xscale="log", xlabel="CPU time per call, µs (logarithmic)", xlim=(1, 20000))
    axes.set_yticks(*zip(*ticks, strict=True))
    axes.invert_yaxis()
    axes.legend([plt.Rectangle((0, 0), 1, 1, color=colors[kind]) for kind in KINDS], KINDS.values(), loc="upper right", frameon=False)
    save(figure, "host")

    figure, axes = plt.subplots(figsize=(8, 2.8))
    rows = wall_rows(record)
    axes.barh([row for row, _ in rows], [value for _, value in rows], color=colors["cgt"])
    for k, (_, value) in enumerate(rows):
        axes.text(value + 0.01, k, number(value), va="center")
    axes.axvline(1, color=colors["eager"])
    axes.text(0.99, -0.8, "eager", color=colors["eager"], ha="right")
    axes.set(xlabel="wall time over eager's", xlim=(0, 1.05))
    axes.invert_yaxis()
    save(figure, "wall")

    figure, axes = plt.subplots(figsize=(8, 2.8))
    for (row, values), color, above in zip(guard_rows(record), (colors["cgt"], colors["replay"]), (8, -14), strict=True):
        axes.plot(TENSORS, values, "o-", color=color, label=row)
        for n, value in zip(TENSORS, values, strict=True):
            axes.annotate(number(value), (n, value), (0, above), textcoords="offset points", ha="center", color=color)
    axes.set(xscale="log", yscale="log", xlabel="tensors", ylabel="guard alone, µs", ylim=(0.08, 30))
    axes.set_xticks(TENSORS, TENSORS)
    axes.minorticks_off()
    axes.legend(frameon=False)
    save(figure, "guard")


def main():
    record = read()
    PAGE.write_text(with_tables(PAGE.read_text(), record))
    if "--tables" not in sys.argv[1:]:
        draw(record)


if __name__ == "__main__":
    main()
