"""What keeps calls of a function from being replayed: all of it at once, and of use without ever jitting."""

import runpy
import sys
import time
import warnings
from collections.abc import Callable
from typing import NamedTuple

import cgt_core as core

from .api import jit, plain_of
from .data import State
from .decide import dispatch, sites
from .tools import report
from .words import errors

TRIES = 6  # calls: one warms, one records, one replays; what is learnt on the way asks for others


class Finding(NamedTuple):
    """One thing, with its line and what helps."""

    times: int
    text: str


class Diagnosis(NamedTuple):
    """What was found. Prints as text."""

    name: str
    calls: int
    replays: int
    findings: tuple  # of Finding: what keeps calls from being replayed, as the function met it
    slow: tuple  # texts: it replays, and this costs
    seconds: float | None = None  # of the CPU: of a plain call, if something was found; of a replay that only costs

    def __str__(self):
        head, n = f"{self.name}: {self.replays} of {self.calls} calls replayed.", len(self.findings)
        if self.seconds is not None:
            one, other = ("plain call", "a replay") if n else ("replay", "one that does not wait")
            head += f" A {one} keeps the CPU for {1e6 * self.seconds:,.0f} µs, {other} for a few."
        if n == 1:
            head += " One thing to change:"
        elif n:
            head += f" {n} things to change, each of which costs the whole replay:"
        told = [f"  {k + 1}. ({one.times}x) {one.text}" for k, one in enumerate(self.findings)]
        return "\n".join([head, *told, *(f"  note: {text}" for text in self.slow)])


def doctor(fn: Callable[..., object], *args: object, **kwargs: object) -> Diagnosis:
    """Call `fn` a few times and tell everything that keeps it from being replayed: each line, not only the first.

    The calls are those of a function of its own, made by `cgt.jit(fn)`. Where something is found three calls are made,
    all plain, the last of which is timed; else one warms, one records and one is a replay, which is timed where
    something in it waits. What the function does it does each time.

    Args:
        fn: what `cgt.jit` takes, or what it made.
        args, kwargs: of a call, as the program makes it.

    Returns:
        A `Diagnosis`, to print: `name`, `calls`, `replays`, `findings` (each with `times` in a call and `text`),
        `slow`, `seconds`.

    Raises:
        What `fn` raises; TypeError as `cgt.jit`.

    >>> import torch, cgt
    >>> found = cgt.doctor(lambda x: x * x.sum().item(), torch.ones(2))
    >>> found.replays, len(found.findings)
    (0, 1)
    """
    site = jit(plain_of(fn))
    state = getattr(site, sites.ATTRIBUTE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.CgtWarning)
        for _ in range(TRIES):
            state.blockers, began = {}, time.perf_counter()
            site(*args, **kwargs)
            took = time.perf_counter() - began
            if state.learnt.verdicts or core.fn_counts(state.f)[3]:
                break
    found = diagnosis(state)
    if not found.findings:
        return found._replace(seconds=took) if found.slow else found
    began = time.perf_counter()
    site.__wrapped__(*args, **kwargs)
    return found._replace(seconds=time.perf_counter() - began)


def diagnosis(state: State) -> Diagnosis:
    """What a function's runs met."""
    s = report.stats_of([state])
    found = state.blockers or ({} if s.replays else s.reasons)
    slow = dict.fromkeys(errors.waits(v.line) for kept in list(state.keep.values()) for v in kept.values)
    return Diagnosis(state.name, s.calls, s.replays, tuple(Finding(n, text) for text, n in found.items()), tuple(slow))


def examine(script: str, arguments: list[str]) -> None:
    """Run a script as a program, and print what became of each function that it jits."""
    made, sys.argv = [], [script, *arguments]
    dispatch.WATCHED.append(made)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        dispatch.WATCHED.remove(made)
        told = [str(diagnosis(getattr(site, sites.ATTRIBUTE))) for site in made]
        print("\n".join(told or [errors.nothing_jitted(script)]))
