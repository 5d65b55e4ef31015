"""What cgt tells about itself: counters as a NamedTuple, and the same with reasons as text."""

from typing import NamedTuple

import cgt_core as core
import torch

from . import options, record


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


def stats_of(states):
    """Sum of the counters of these functions."""
    totals = [0] * 10
    reasons, pool, on_gpu = {}, 0, False
    for state in states:
        counts = core.fn_counts(state["f"])
        totals = [a + b for a, b in zip(totals, counts, strict=False)]
        for text, n in state["reasons"].items():
            reasons[text] = reasons.get(text, 0) + n
        for node in core.fn_nodes(state["f"]):
            if core.node_facts(node)[4] == 0:
                pool += host_bytes(state, node)
            else:
                on_gpu = True
    return Stats(*totals, pool + (pool_bytes() if on_gpu else 0), reasons)


def host_bytes(state, node):
    """Memory that a host recording keeps: buffers and results, each storage once."""
    kept = state["keep"][node]["objects"][4]
    return sum({core.storage_id(t): core.storage_size(t) for t in kept if is_tensor(t)}.values())


def is_tensor(t):
    """Is t a tensor?"""
    return isinstance(t, torch.Tensor)


def pool_bytes():
    """Bytes of cgt's pools on all devices. One pool per device serves all functions."""
    ids = {tuple(pool) for pool, _ in record.POOLS.values()}
    return sum(
        s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) in ids
    )


def explain_state(state):
    """What happened to the calls of one function, as text."""
    s = stats_of([state])
    name = state["name"]
    lines = [
        f"{name}: {s.calls} calls = {s.warmups} warmed + {s.records} recorded + {s.replays} replayed"
        f" + {s.eager} eager"
    ]
    for node in core.fn_nodes(state["f"]):
        lines.extend(explain_node(state, node))
    if s.rescues:
        lines.append(
            f"  rescues: {s.rescues} outputs ({size(s.rescued_bytes)}) were still held when the next "
            "replay overwrote them; drop them earlier to save the copies"
        )
    for text, n in sorted(s.reasons.items(), key=lambda r: -r[1])[: options.EXPLAIN_ITEMS]:
        lines.append(f"  eager {n}x: {text}")
    for text in state["unguarded"][: options.EXPLAIN_ITEMS]:
        lines.append(f"  not guarded: {text}")
    return "\n".join(lines)


def explain_node(state, node):
    """Lines on one recording: what it holds and how its inputs are bound."""
    _, _, n_replay, graph_nodes, path, slots, copied = core.node_facts(node)
    device = "cpu" if path == 0 else f"cuda:{path - 1}"
    unit = "ops" if path == 0 else "graph nodes"
    kept = state["keep"][node]
    lines = [f"  recording on {device}: {graph_nodes} {unit}, replayed {n_replay}x"]
    names = ("unused", "pinned", "copied", "by value")
    for binding in (1, 2, 3):
        paths = [
            p + (" (written)" if s[2] else "")
            for p, s in zip(kept["slot_paths"], slots, strict=True)
            if s[1] == binding
        ]
        if paths:
            shown = ", ".join(paths[: options.EXPLAIN_ITEMS])
            more = (
                f" and {len(paths) - options.EXPLAIN_ITEMS} more"
                if len(paths) > options.EXPLAIN_ITEMS
                else ""
            )
            extra = f" ({size(copied)} per call)" if binding == 2 else ""
            lines.append(f"    {names[binding]}: {shown}{more}{extra}")
    if kept["loose"]:
        lines.append(
            f"    not guarded: {len(kept['loose'])} tensors reached in a way cgt cannot follow"
        )
    return lines


def size(n):
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}"
        n /= 1024
    return f"{n:.1f} GiB"
