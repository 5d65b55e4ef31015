"""What cgt tells about itself: counters as a NamedTuple, and the same with reasons as text. Other threads free
no rows meanwhile (core.held), but they count reasons, and a finalizer may ask about a row that is being freed."""

import os
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import NamedTuple

import cgt_core as core
import torch
from cgt_core import COPIED, EQUAL, NONE, PINNED, PLAIN, REBOUND, VALUE

from ..cuts.segments import Value
from ..data import Kept, State
from ..decide import sites
from ..decide.sites import ATTRIBUTE
from ..words import options, pytree


class Stats(NamedTuple):
    """Counters of one jitted function, or the sum over all of them. Bytes are bytes."""

    calls: int
    warmups: int
    records: int
    replays: int
    eager: int
    rebinds: int  # sources of copied inputs that were patched because the address moved
    copied_bytes: int  # inputs copied inside graphs
    rescues: int  # outputs moved out of the way because somebody still held them
    rescued_bytes: int
    graph_nodes: int  # nodes of all living recordings (host: ops on tapes)
    pool_bytes: int  # memory that recordings own
    reasons: dict  # text -> count
    seconds: dict  # phase of making recordings -> seconds: warm, look, restore, capture, instantiate, checkpoint
    backward: "Stats | None"  # of the backwards of these functions; None where there were none
    audited: int  # replays that were compared with eager


class Explanation(str):
    """Text, a statement a line. Where it is printed or shown, long lines are wrapped."""

    def __str__(self):
        return "\n".join(map(wrapped, self.splitlines()))

    __repr__ = __str__


COLUMNS = 100  # of a printed line
COUNTERS = Stats._fields[:10]  # what core.fn_counts tells
MEASURED = re.compile(r"\d[\d.]* (?=(ms|µs|s|calls|times already)\b)")  # numbers that make no other reason
PHASES = ("restore", "capture", "instantiate", "checkpoint")  # Phase in cgt_core.pxd


def stats_of(states: list[State]) -> Stats:
    totals, past = [0] * len(COUNTERS), [0] * len(COUNTERS)
    reasons, nodes, seconds, backwards = {}, [], dict.fromkeys(("warm", "look", *PHASES), 0.0), []
    for state in states:
        totals = add(totals, core.fn_counts(state.f))
        past = add(past, state.past)
        backwards += [getattr(b, ATTRIBUTE) for b in backwards_of(state)]
        for text, n in list(state.reasons.items()):
            reasons[text] = reasons.get(text, 0) + n
        seconds["warm"] += state.warm_seconds
        seconds["look"] += state.look_seconds
        for node in core.fn_nodes(state.f):
            nodes.append(node)
            made = state.keep[node].seconds if node in state.keep else ()
            for phase, spent in zip(PHASES, made, strict=False):
                seconds[phase] += spent
    bytes_ = pool_bytes({core.node_facts(n).path for n in nodes})
    backward = stats_of(backwards) if backwards or any(past) else None
    if backward is not None:
        backward = backward._replace(**dict(zip(COUNTERS, add(past, backward), strict=False)))
    audited = sum(state.audited for state in states)
    return Stats._make([*totals, bytes_, reasons, seconds, backward, audited])


class Recording(NamedTuple):
    """What one recording holds, in bytes."""

    name: str
    device: str
    replays: int
    results: int
    copies: int  # of inputs
    executable: int
    lines: dict[str, int]  # where results were made


class Memory(NamedTuple):
    """What recordings hold. Prints as text."""

    pools: dict[str, int]
    recordings: tuple[Recording, ...]

    def __str__(self):
        lines = []
        for device, total in self.pools.items():
            here = sorted((one for one in self.recordings if one.device == device), key=lambda one: -sum(one[3:6]))
            held = sum(sum(one[3:6]) for one in here)
            lines.append(f"{device}: pool {size(total)}, {len(here)} recordings hold {size(held)}")
            for one in here:
                made = sorted(one.lines.items(), key=lambda entry: -entry[1])
                lines.append(
                    f"  {one.name}: results {size(one.results)}, copies of inputs {size(one.copies)}, executable"
                    f" {size(one.executable)}; replayed {one.replays}x"
                )
                told = made[: options.EXPLAIN_ITEMS]
                lines += [f"    {size(n)} made at {line or 'a line that is not known'}" for line, n in told]
        return "\n".join(lines) if lines else "nothing is recorded"


def memory_of(states: list[State]) -> Memory:
    """Of the recordings of these functions, and of the pools that they are in."""
    found, paths = [], set()
    for state in states:
        for node in core.fn_nodes(state.f):
            facts, lines = core.node_facts(node), {}
            for line, n in facts.outs:
                lines[line] = lines.get(line, 0) + n
            paths.add(facts.path)
            sizes = facts.out_bytes, facts.copied, facts.exec_bytes
            found.append(Recording(state.name, device_name(facts.path), facts.n_replay, *sizes, lines))
    return Memory({device_name(path): pool_bytes({path}) for path in sorted(paths)}, tuple(found))


def add(a, b):
    return [x + y for x, y in zip(a, b, strict=False)]


def backwards_of(state):
    return [kept.backward for kept in list(state.keep.values()) if kept.backward is not None]


def pool_bytes(paths):
    """Bytes of cgt's pools on these paths. One pool per device serves all functions."""
    total = core.host_bytes() if 0 in paths else 0
    if paths - {0}:
        ids = core.pool_ids()
        mine = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) in ids]
        total += sum(s["total_size"] for s in mine if s["device"] + 1 in paths)
    return total


def explain_state(state: State) -> str:
    """What happened to the calls of one function, as text: the verdict, what to change, what was recorded."""
    s = stats_of([state])
    lines = [*verdict(state.name, s), f"  {describe_counts(s)}"]
    nodes = [node for node in reversed(core.fn_nodes(state.f)) if node in state.keep]  # the oldest first
    if nodes:
        lines += [*table_of(state, nodes), *details_of(state, nodes)]
    if s.records:
        most = max((len(kept.place_paths) for kept in list(state.keep.values())), default=0)
        found = f"found in {1e3 * state.look_seconds:.2f} ms"
        lines.append(f"  each call checks up to {most} variables and attributes, {found}")
    if state.audited:
        alike = f"{state.mismatches} were not the same" if state.mismatches else "all alike"
        lines.append(f"  compared with eager: {state.audited} replays, {alike}")
    if state.unaudited is not None:
        lines.append(f"  not compared with eager: {state.unaudited}")
    if s.rescues:
        lines.append(f"  {describe_rescues(s)}")
    for one in (getattr(site, ATTRIBUTE) for site in backwards_of(state)):
        lines.extend("  " + line for line in (explain_state(one).splitlines() if core.fn_counts(one.f)[0] else ()))
    for text in state.learnt.unguarded[: options.EXPLAIN_ITEMS]:
        lines.append(f"  not guarded: {text}")
    return "\n".join(lines)


def wrapped(line: str) -> str:
    """In as many lines as it takes."""
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.fill(line, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def describe_counts(s: Stats) -> str:
    return f"{s.calls} calls = {s.warmups} warmed + {s.records} recorded + {s.replays} replayed + {s.eager} eager"


def describe_rescues(s: Stats) -> str:
    held = f"{s.rescues} outputs ({size(s.rescued_bytes)}) were still held when the next iteration overwrote them"
    return f"rescues: {held}; drop them earlier to save the copies"


def verdict(name: str, s: Stats) -> list[str]:
    """Lines: how many calls replayed, and why the others did not, the commonest reason first."""
    head = f"{name}: {s.replays} of {s.calls} calls replayed"
    if not s.reasons:
        return [head + ("." if s.replays or s.calls > 2 else ": the first warms, the second records.")]
    alike = {}
    for text, n in sorted(s.reasons.items(), key=lambda r: -r[1]):  # which differ in what was measured
        alike.setdefault(MEASURED.sub("", text), [text, 0])[1] += n
    reasons = sorted(alike.values(), key=lambda r: -r[1])
    told = [f"  {k + 1}. ({n}x) {text}" for k, (text, n) in enumerate(reasons[: options.EXPLAIN_ITEMS])]
    more = len(reasons) - len(told)
    lasting = "One reason" if len(reasons) == 1 else f"{len(reasons)} reasons"
    rest = [f"  and {more} more"] if more > 0 else []
    return [f"{head}, {s.eager} ran eagerly. {lasting}, with what helps:", *told, *rest]


def table_of(state: State, nodes: Sequence[int]) -> list[str]:
    """Lines: a row a recording, with what tells it from the others."""
    rows = [("recording", "on", "made of", "results", "copies", "replayed", "made in", "for")]
    apart, led = told_apart(state, nodes), led_to(state, nodes)
    for n, node in enumerate(nodes, 1):
        facts, spent = core.node_facts(node), sum(state.keep[node].seconds)
        rows.append((
            str(n), device_name(facts.path), describe_length(facts, facts.graph_nodes), size(facts.out_bytes),
            size(facts.copied), f"{facts.n_replay}x", f"{1e3 * spent:.2f} ms", some([*apart[node], *led[node]]),
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def told_apart(state: State, nodes: Sequence[int]) -> dict[int, list[str]]:
    """{recording: the arguments in which they are not all alike, with shape or value}."""
    told = {}
    for node in nodes:
        facts, kept = core.node_facts(node), state.keep[node]
        leaves = pytree.leaves_of(*state.learnt.programs[facts.spec])
        told[node] = {path: pytree.told_leaf(op) for path, op in leaves.items() if op[0] in (PLAIN, EQUAL)}
        slots = enumerate(zip(kept.slot_paths, facts.slots, strict=True))
        told[node] |= {path: str(core.slot_shape(node, k)) for k, (path, slot) in slots if slot.leaf != NONE}
    paths = {path for one in told.values() for path in one}
    other = {path for path in paths if len({one.get(path) for one in told.values()}) > 1}
    return {node: [f"{path} = {text}" for path, text in one.items() if path in other] for node, one in told.items()}


def led_to(state: State, nodes: Sequence[int]) -> dict[int, list[str]]:
    """{recording: the values that it read, what ran before it if they differ in that, and which places held something
    else than when earlier ones were made}."""
    owner = {node: one.name for one in sites.states() for node in core.fn_nodes(one.f)}
    parents = {node: core.node_facts(node).parent for node in nodes}
    told = {}
    for node, parent in parents.items():
        kept = state.keep[node]
        told[node] = [f"{os.path.basename(v.line)} = {describe_value(v)}" for v in kept.values]
        if len(set(parents.values())) > 1:
            told[node].append(f"behind {owner[parent]}" if parent in owner else "first of its iteration")
        told[node] += [f"another {path}" for path in sorted(kept.changed)]
    return told


def details_of(state: State, nodes: Sequence[int]) -> list[str]:
    """Lines: what recordings have in common, and what some of them have."""
    found = {}
    for n, node in enumerate(nodes, 1):
        for line in explain_node(state.keep[node], core.node_facts(node)):
            found.setdefault(line, []).append(str(n))
    common = [f"    {line}" for line, having in found.items() if len(having) == len(nodes)]
    return common + [f"    in {some(having)}: {line}" for line, having in found.items() if len(having) < len(nodes)]


def explain_node(kept: Kept, facts: core.NodeFacts) -> list[str]:
    """Lines on one recording: how its inputs are bound, and what it does on the way."""
    lines = []
    for name, binding in (("fixed", PINNED), ("moving", REBOUND), ("copied", COPIED), ("by value", VALUE)):
        slots = [row for row in zip(kept.slot_paths, facts.slots, strict=True) if row[1].binding == binding]
        if slots:
            extra = f" ({size(facts.back)} back per call)" if name == "copied" and facts.back else ""
            lines.append(f"{name}: {some([explain_slot(kept, *row) for row in slots])}{extra}")
    if facts.forms is not None:
        alone, beside, chosen = facts.forms
        how = "side by side" if chosen else "one behind the other"
        lines.append(f"ops run {how}: {beside:.0f} µs a launch beside each other, {alone:.0f} in their order")
    lines += explain_numbers(kept, facts)
    told = [(kept.islands, "runs eagerly between its graphs"), (kept.forks, "with bodies that a replay chooses from")]
    lines += [f"{what}: {some(names)}" for names, what in told if names]
    lines += kept.advances
    if kept.loose:
        lines.append(f"not guarded: {len(kept.loose)} tensors reached in a way cgt cannot follow")
    return lines


def explain_slot(kept, path, slot):
    followed = " (followed)" if kept.followable.get(path) else ""
    written = " (written)" if slot.written else ""
    told = f" ({slot.told} {'node' if slot.told == 1 else 'nodes'})" if slot.told else ""
    return f"{path}{followed}{written}{told}"


def explain_numbers(kept, facts):
    """Lines on the values that the function reads or hands out, and on numbers that change from call to call."""
    changing = [path for path, line in kept.numbers.sources if line is None]
    fixed = [f"{path} ({line})" for path, line in kept.numbers.sources if line is not None]
    lines = []
    if facts.saved:
        lines.append(f"keeps what it overwrites until these are read: {size(facts.saved)} per call")
    if facts.readouts:
        lines.append(f"waits for what it hands out on the host: {some(facts.readouts)}")
    if changing:
        words = f"{facts.words} {'word' if facts.words == 1 else 'words'}"
        lines.append(f"numbers that may change: {some(changing)} ({words} of its ops)")
    if fixed:
        lines.append(f"for this number alone: {some(fixed)}")
    return lines


def some(texts: Sequence[str]) -> str:
    """The first of these, and how many more there are."""
    more = len(texts) - options.EXPLAIN_ITEMS
    return ", ".join(texts[: options.EXPLAIN_ITEMS]) + (f" and {more} more" if more > 0 else "")


def describe_value(value: Value) -> str:
    if value.dtype is None:
        return "any number"
    if value.shape:
        return f"{tuple(value.shape)} of {value.dtype}"
    return str(torch.frombuffer(bytearray(value.bytes), dtype=value.dtype).item())


def device_name(path: int) -> str:
    return "cpu" if path == 0 else f"cuda:{path - 1}"


def describe_node(facts: core.NodeFacts, before: int = 0) -> str:
    """What one recording is, behind so many segments that it shares with others."""
    n = facts.graph_nodes - sum(facts.segments[:before])
    return f"{describe_length(facts, n)}, replayed {facts.n_replay}x, results {size(facts.out_bytes)}"


def describe_length(facts: core.NodeFacts, n: int) -> str:
    return f"{n} {'ops' if facts.path == 0 else 'graph nodes'}"


def explain_tree(states: list[State]) -> str:
    """All recordings as a tree: what ran behind what, how often, and what could not be recorded."""
    owner = {node: state for state in states for node in core.fn_nodes(state.f)}
    facts = {node: core.node_facts(node) for node in sorted(owner)}
    lines, led_by = [], lambda node: (owner[node], owner[node].name)

    def block(node, depth, edge):
        return Block(describe_node(facts[node], depth), edge, blocks_behind(facts, node, led_by, block))

    for path in sorted({fact.path for fact in facts.values()}):
        here = {node: fact for node, fact in facts.items() if fact.path == path}
        leaves = sum(fact.children == 0 for fact in here.values())
        told = f"{len(here)} recordings, {leaves} ways through the program, pool {size(pool_bytes({path}))}"
        lines.append(f"{device_name(path)}: {told}")
        lines += [line for one in blocks_behind(here, NONE, led_by, block) for line in lines_of(one, "  ")]
    for state in states:
        for text, n in sorted(state.reasons.items(), key=lambda r: -r[1]):
            lines.append(f"{state.name} eager {n}x: {text}")
    return "\n".join(lines) if lines else "nothing was recorded"


class Block(NamedTuple):
    """A recording, or what several have in common: a line of the tree, a box of its picture."""

    title: str
    edge: str  # what leads to it from the one above
    below: list
    facts: list[str] = []
    ops: list = []  # (op, line of the user's), of a recording
    shape: tuple[int, list] = (0, [])  # how many nodes its graph has, [(one, another that waits for it)]


ShownAs = Callable[[int, int, str], Block]  # of (a recording, how many values it shares, what leads to it)


def blocks_behind(here: dict, above: int, led_by: Callable[[int], tuple[State, str]], block: ShownAs) -> list[Block]:
    """Blocks of those of these recordings, with their facts, that ran behind `above`, another one of them, with none of
    them between. `led_by(recording)`: the function's State, and what leads to it."""
    groups = {}
    for node in here:
        parent = between = here[node].parent
        while between != NONE and between not in here:
            between = core.node_facts(between).parent
        if between == above:
            groups.setdefault((parent, *led_by(node)), []).append(node)
    return [one for (_, state, edge), nodes in groups.items() for one in ways(state, nodes, 0, edge, block)]


def ways(state: State, nodes: Sequence[int], depth: int, edge: str, block: ShownAs) -> list[Block]:
    """Blocks of a function's recordings with the same first `depth` values. `block`: of one without more."""
    found, groups = [], {}
    for node in nodes:
        values = state.keep[node].values if node in state.keep else []
        if len(values) == depth:
            found.append(block(node, depth, edge))
        else:
            group = groups.setdefault((values[depth].line, core.node_facts(node).segments[depth]), {})
            group.setdefault(values[depth], []).append(node)
    for (line, length), group in groups.items():
        below = [
            one for value, some_nodes in group.items()
            for one in ways(state, some_nodes, depth + 1, describe_value(value), block)
        ]  # fmt: skip
        length = describe_length(core.node_facts(nodes[0]), length)
        found.append(Block(f"{length}, then a value is read at {line}", edge, below))
    return found


def lines_of(block, indent):
    """A block and what is below it, as text."""
    yield f"{indent}{block.edge}: {block.title}"
    for one in block.below:
        yield from lines_of(one, indent + "  ")


def size(n):
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}"
        n /= 1024
    return f"{n:.1f} GiB"
