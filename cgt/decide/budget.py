"""What recordings hold, and how much they may."""

import re

import cgt_core as core

UNITS = (
    {"": 1, "B": 1}
    | {f"{letter}iB": 1024**k for k, letter in enumerate("KMGT", 1)}
    | {f"{letter}B": 1000**k for k, letter in enumerate("KMGT", 1)}
)


def parse(budget: int | str | None) -> int | None:
    """Bytes of 2**30, "2GiB" or "500 MB"; None of None. ValueError."""
    if budget is None or (type(budget) is int and budget > 0):
        return budget
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B|)\s*", budget) if isinstance(budget, str) else None
    if found is None or not float(found[1]):
        raise ValueError(budget)
    return int(float(found[1]) * UNITS[found[2]])


def held() -> int:
    """Bytes that go with all recordings: their results, their copies of inputs, and what the driver took for them. What
    one needs while it runs lies in the pool, for all."""
    every = map(core.node_facts, core.nodes())
    return sum(facts.out_bytes + facts.copied + facts.exec_bytes for facts in every)
