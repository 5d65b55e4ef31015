"""The recordings of a function as a page or a picture: `cgt.show(f, "tree.html")`; `.dot` for Graphviz; `.svg`, the
graphs alone.

All are of the same blocks: the function with the verdict on its calls, below it a block for what recordings that read
values have in common, and one for each recording, with what `explain` says of it. An edge tells what leads there: a
value that was read, what ran before. The page unfolds each recording to its graph and its ops, and refers to nothing
outside."""

import collections
import graphlib
import html
import itertools

import cgt_core as core
from cgt_core import NONE

from ..data import State
from ..decide.dispatch import ATTRIBUTE
from . import report

MOST = 64  # letters of a line in a picture


# --- what is shown --------------------------------------------------------------------------------


def block_of(state: State, owners: dict[int, State]) -> report.Block:
    """The Block of a function. `owners`: recording -> State, of all."""
    counts = report.stats_of([state])
    head, *reasons = report.verdict(state.name, counts)
    facts = [head.removeprefix(f"{state.name}: "), report.describe_counts(counts), *map(str.strip, reasons)]
    facts += [report.describe_rescues(counts)] if counts.rescues else []
    nodes = {node: core.node_facts(node) for node in core.fn_nodes(state.f) if node in state.keep}
    apart = report.told_apart(state, list(nodes))

    def led_by(node):
        parent = nodes[node].parent
        return state, f"behind {owners[parent].name}" if parent in owners and parent not in nodes else ""

    def block(node, depth, edge):
        below = report.blocks_behind(nodes, node, led_by, block)
        return recording(state, node, depth, edge, apart[node], below)

    return report.Block(state.name, "", report.blocks_behind(nodes, NONE, led_by, block), facts)


def recording(state, node, depth, edge, apart, below):
    """The Block of a recording, behind `depth` segments that it shares; its backward is one more below it."""
    kept, facts = state.keep[node], core.node_facts(node)
    lines = [f"for {report.some(apart)}"] if apart else []
    lines += report.explain_node(kept, facts)
    guarded = f": {report.some(kept.place_paths)}" if kept.place_paths else ""
    lines.append(f"guards {len(kept.place_paths)} places{guarded}")
    if kept.backward is not None:
        back = block_of(getattr(kept.backward, ATTRIBUTE), {})
        below = [*below, back._replace(edge="its backward")]
    title = report.describe_node(facts, depth)
    lines.insert(0, f"on {report.device_name(facts.path)}")
    ops = [(str(op), line) for op, line in kept.trail]
    count = facts.graph_nodes - sum(facts.segments[:depth])
    shape = core.graph_shape(node) or (count, list(itertools.pairwise(range(count))))  # the host's ops are a chain
    return report.Block(title, edge, below, lines, ops, shape)


# --- .dot -------------------------------------------------------------------------------------------


def as_dot(block):
    """The language of Graphviz."""
    font = 'fontname="monospace", fontsize'
    lines = ["digraph cgt {", f"  node [shape=box, {font}=10];", f"  edge [{font}=9];"]

    def add(one, above):
        me = len(lines)
        facts = [text if len(text) <= MOST else f"{text[: MOST - 1]}…" for text in one.facts]
        text = "".join(f"{quoted(line)}\\l" for line in (one.title, *facts))
        lines.append(f'  n{me} [label="{text}"];')
        if above is not None:
            lines.append(f'  n{above} -> n{me} [label="{quoted(one.edge)}"];')
        for other in one.below:
            add(other, me)

    add(block, None)
    return "\n".join([*lines, "}", ""])


def quoted(text):
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")


# --- .html ------------------------------------------------------------------------------------------


def as_html(block):
    """A page by itself: each block to unfold, down to the ops."""
    title = html.escape(f"{block.title} - cgt")
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{PAGE_STYLE}{PICTURE_STYLE}</style></head><body>\n"
        f"{unfolding(block)}<p>{html.escape(LEGEND)}</p>\n</body></html>\n"
    )


def unfolding(block):
    edge = f'<span class="edge">{html.escape(block.edge)}</span> ' if block.edge else ""
    ops = "".join(f"<li><code>{html.escape(op)}</code> {html.escape(line)}</li>" for op, line in block.ops)
    facts = "".join(f"<li>{html.escape(fact)}</li>" for fact in block.facts)
    return (
        f"<details open><summary>{edge}{html.escape(block.title)}</summary>\n<ul>{facts}</ul>\n"
        + (f'<details class="ops"><summary>graph</summary>{picture([block])}</details>\n' if block.shape[0] else "")
        + (f'<details class="ops"><summary>{len(block.ops)} ops</summary><ol>{ops}</ol></details>\n' if ops else "")
        + "".join(unfolding(one) for one in block.below)
        + "</details>\n"
    )


# --- .svg -------------------------------------------------------------------------------------------


def as_svg(block):
    """A picture by itself."""
    head, _, rest = picture(graphs_in(block)).partition("\n")
    return f"{head.replace('<svg', XMLNS)}<style>{PICTURE_STYLE}</style>\n{rest}"


def picture(blocks):
    """Of each the nodes of its graph as dots, from the left to the right: one behind the other, as they were recorded,
    and below that as far to the left as what they wait for allows, at the same scale."""
    parts, width, y = [], 0, 0
    for one in blocks:
        count, waits = one.shape
        places = places_of(count, waits)
        deep, rows = (1 + max(column) for column in zip(*places, strict=True))
        beside = f"; side by side {deep} behind each other, at most {rows} at a time" if rows > 1 else ""
        title, size = f"{one.title}: {count} nodes behind each other{beside}", max(12, count * SPAN // 60)
        width = max(width, count * SPAN, len(title) * size * 3 // 5)
        parts.append(f'<text y="{y + size}" font-size="{size}">{html.escape(title)}</text>')
        y += size + SPAN
        parts += nodes_at([(k, 0) for k in range(count)], itertools.pairwise(range(count)), y)
        y += 2 * SPAN
        if rows > 1:
            parts += nodes_at(places, waits, y + SPAN)
            y += (rows + 2) * SPAN
    body = "\n".join(parts)
    return f'<svg viewBox="0 0 {width + SPAN} {y}" width="{width + SPAN}">\n{body}\n</svg>\n'


def graphs_in(block):
    return [*([block] if block.shape[0] else []), *(one for below in block.below for one in graphs_in(below))]


def places_of(count, waits):
    """[(how many nodes stand before this one at least, how many of those with as many are drawn above it)]"""
    before = {k: [] for k in range(count)}
    for one, other in waits:
        before[other].append(one)
    depth = {}
    for k in graphlib.TopologicalSorter(before).static_order():
        depth[k] = 1 + max((depth[one] for one in before[k]), default=-1)
    rows = collections.Counter()
    places = []
    for k in range(count):
        places.append((depth[k], rows[depth[k]]))
        rows[depth[k]] += 1
    return places


def nodes_at(places, waits, top):
    at = [(SPAN * (x + 1), top + SPAN * y) for x, y in places]
    lines = [f"M{at[one][0]} {at[one][1]}L{at[other][0]} {at[other][1]}" for one, other in waits]
    return [f'<path d="{"".join(lines)}"/>', *(f'<circle cx="{x}" cy="{y}" r="{SPAN // 3}"/>' for x, y in at)]


SPAN = 9
XMLNS = '<svg xmlns="http://www.w3.org/2000/svg"'
PICTURE_STYLE = (
    "svg{max-width:100%;height:auto}text{font-family:system-ui,sans-serif;fill:#59636e}"
    "circle{fill:#0969da}path{stroke:#8c959f;fill:none}"
)

LEGEND = (
    "fixed: the recording reads the tensor where it lies, and fits while it lies there. "
    "moving: the tensor may lie elsewhere at each call. copied: each replay copies it first, from wherever it is. "
    "by value: a number on the CPU, part of the recording. followed: whatever tensor lies in that place. "
    "written: the recording writes it."
)
PAGE_STYLE = (
    "body{font:14px system-ui,sans-serif;margin:1.5em;color:#1f2328;background:#fff}"
    "code{font-family:ui-monospace,monospace}"
    "details{margin:.3em 0 .3em 1.2em}summary{cursor:pointer;font-weight:600}"
    ".edge{color:#0969da}.ops summary{font-weight:400}p{color:#59636e;max-width:60em}"
    "@media(prefers-color-scheme:dark){body{color:#e6edf3;background:#0d1117}.edge{color:#58a6ff}p{color:#9198a1}}"
)

FORMATS = {".html": as_html, ".dot": as_dot, ".svg": as_svg}
