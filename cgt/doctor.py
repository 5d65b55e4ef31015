"""What keeps calls of a function from being replayed: all of it at once, and of use without ever jitting."""

import contextlib
import itertools
import math
import runpy
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import cgt_core as core
import torch
from cgt_core import DICT_LEN, LIST_LEN
from torch.utils import _pytree

from .api import jit, plain_of
from .data import State
from .decide import audit, dispatch, sites
from .look import containers, places
from .make.plan import reach_generators
from .tools import report
from .words import errors, pytree

# Calls of one kind at most: more than a function may have recordings (max_records), so that it says why none fits.
TRIES = 12
ENOUGH = 2  # replays in a row, behind which the next calls are taken to replay, too
TIMED = 5  # replays, and plain calls, of which the fastest counts: some replays are compared with eager
MOST = 1_000_000  # places that are looked at: a model of transformers leads to 60,000, in a third of a second


class Finding(NamedTuple):
    """One thing, with its line and what helps."""

    times: int
    text: str
    when: str = ""  # the variation in which it was met, such as "other values"; "": with the arguments as given


class Diagnosis(NamedTuple):
    """What was found. Prints as text."""

    name: str
    calls: int
    replays: int
    findings: tuple  # of Finding: what keeps calls from being replayed, as the function met it
    slow: tuple  # texts: it replays, and this costs
    tried: tuple = ()  # variations of the call that replay
    seconds: float | None = None  # what a plain call takes, GPU included
    replay_seconds: float | None = None  # what a replay takes
    pays_after: int | None = None  # calls from which on recording has paid; None: it never does, or nothing replays
    changed: str | None = None  # why state is not as it was before; None: it is

    def __str__(self):
        head, n = f"{self.name}: {self.replays} of {self.calls} calls replayed.", len(self.findings)
        if self.replay_seconds is not None:
            times = f"A plain call takes {told_time(self.seconds)}, a replay {told_time(self.replay_seconds)}"
            pays = "not faster here" if self.pays_after is None else f"recording pays after {self.pays_after} calls"
            head += f" {times}: {pays}."
        elif self.seconds is not None:
            head += f" A plain call takes {told_time(self.seconds)}, a replay a few µs."
        if n:
            head += (
                " One thing to change:" if n == 1 else f" {n} things to change, each of which costs the whole replay:"
            )
        lines = [head]
        for k, one in enumerate(self.findings, 1):
            lines.append(f"  {k}. ({one.times}x{one.when and f', with {one.when}'}) {one.text}")
        lines += [f"  note: {text}" for text in self.slow]
        lines += [f"  replays with {', '.join(self.tried)}"] if self.tried else []
        lines += [f"  not put back: {self.changed}"] if self.changed else []
        return "\n".join(map(report.wrapped, lines))


def told_time(seconds):
    return f"{1e6 * seconds:,.0f} µs"


def doctor(fn: Callable[..., object], *args: object, more: Sequence[tuple] = (), **kwargs: object) -> Diagnosis:
    """Call `fn` a few times and tell everything that keeps it from being replayed: each line, not only the first.

    It is called with the arguments as they are. If that replays, variations follow: other values in new tensors
    (elements of the old ones, drawn anew); two batch sizes in turn (the first dimension that the tensors have in
    common, and one less); all modules that it reaches in `train()` and `eval()` in turn. A variation in which `fn`
    itself raises is left out. The calls are those of functions of their own, made by `cgt.jit(fn)`; some are plain
    ones, which are timed. Afterwards parameters, gradients, buffers, optimizers, random generators and whatever else
    `fn` can reach are as they were. What it prints or writes to files it does at each call.

    Args:
        fn: what `cgt.jit` takes, or what it made.
        args, kwargs: of a call, as the program makes it.
        more: further positional arguments of such a call, a tuple for each; called as they are, behind the variations.

    Returns:
        A `Diagnosis`, to print: `name`, `calls`, `replays`, `findings` (each with `times`, `text` and `when`), `slow`,
        `tried`, `seconds` and `replay_seconds` of a call, `pays_after` calls, and `changed`.

    Raises:
        What `fn` raises with `args` or `more`; TypeError as `cgt.jit`.

    >>> import torch, cgt
    >>> found = cgt.doctor(lambda x: x * x.sum().item(), torch.ones(2))
    >>> found.replays, len(found.findings)
    (0, 1)
    """
    plain = plain_of(fn)
    jit(plain)  # says what it does not take
    findings, tried, made, changed = [], [], [], []
    with warnings.catch_warnings(), as_it_was(plain, args, kwargs, changed) as reached:
        warnings.simplefilter("ignore", errors.CgtWarning)

        def examine_kind(when, given):
            site, met, took = examined(plain, given)
            made.append(site)
            findings.extend(Finding(n, text, when) for text, n in met.items())
            tried.extend([] if met or not when else [when])
            return site, took

        first, took = examine_kind("", lambda: (args, kwargs))
        seconds, replay, pays = fastest(plain, args, kwargs), None, None
        if not findings:
            replay = fastest(first, args, kwargs)
            if replay < seconds:
                pays = len(took) + max(0, math.ceil((sum(took) - len(took) * seconds) / (seconds - replay)))
            for when, given in variations(plain, reached, args, kwargs):
                with contextlib.suppress(Exception):  # the function is not made for such calls
                    examine_kind(when, given)
        for k, one in enumerate(more):
            examine_kind(f"more[{k}]", lambda one=one: (one, kwargs))
        states = [getattr(site, sites.ATTRIBUTE) for site in made]
        s = report.stats_of(states)
        found = Diagnosis(states[0].name, s.calls, s.replays, tuple(findings), slow_in(states), tuple(tried))
    return found._replace(seconds=seconds, replay_seconds=replay, pays_after=pays, changed=next(iter(changed), None))


def examined(plain, given):
    """(a function of its own, {text: how often in a call} of what keeps such calls from being replayed, [seconds of
    each call]). `given()`: the arguments of the next one."""
    site = jit(plain)
    state, met, took, in_a_row = getattr(site, sites.ATTRIBUTE), {}, [], 0
    for _ in range(TRIES):
        state.blockers, reasons, replays = {}, dict(state.reasons), core.fn_counts(state.f)[3]
        args, kwargs = given()
        took.append(timed(site, args, kwargs))
        in_a_row = in_a_row + 1 if core.fn_counts(state.f)[3] > replays else 0
        if in_a_row == ENOUGH:
            return site, {}, took
        met = state.blockers or {text: 1 for text, n in state.reasons.items() if n > reasons.get(text, 0)} or met
        if state.learnt.verdicts:
            break
    return site, met, took


def timed(function, args, kwargs):
    """Seconds that a call takes, until the GPU is done."""
    began = time.perf_counter()
    function(*args, **kwargs)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def fastest(function, args, kwargs):
    return min(timed(function, args, kwargs) for _ in range(TIMED))


# --- variations -----------------------------------------------------------------------------------


def variations(plain, reached, args, kwargs) -> Iterator[tuple[str, Callable[[], tuple[tuple, dict]]]]:
    """(name, its next arguments) of those of which the plain function makes something, once at least."""
    leaves, spec = _pytree.tree_flatten((args, kwargs))
    sizes = [x.shape[0] for x in leaves if is_varied(x) and x.dim()]
    modules = list({id(m): m for m in reached if isinstance(m, torch.nn.Module)}.values())

    def with_each(change):
        return lambda: _pytree.tree_unflatten([change(x) if is_varied(x) else x for x in leaves], spec)

    def in_turns():
        for m in modules:
            m.training = not m.training
        return args, kwargs

    kinds = {"other values": with_each(other_values)} if any(map(is_varied, leaves)) else {}
    if sizes and sizes[0] > 1:
        cut = itertools.cycle(
            [with_each(lambda x: x[1:] if x.dim() and x.shape[0] == sizes[0] else x), with_each(torch.clone)]
        )
        kinds["two batch sizes in turn"] = lambda: next(cut)()
    kinds |= {"train() and eval() in turn": in_turns} if modules else {}
    for when, given in kinds.items():
        varied_args, varied_kwargs = given()
        with contextlib.suppress(Exception):  # the function is not made for such calls
            plain(*varied_args, **varied_kwargs)
            yield when, given


def is_varied(x):
    return isinstance(x, torch.Tensor) and core.is_plain(x) and x.numel() > 0 and not x.requires_grad


def other_values(x):
    """Elements of a tensor in places that are drawn, some of them several times."""
    drawn = torch.randint(x.numel(), (x.numel(),), device=x.device)
    return x.reshape(-1)[drawn].view(x.shape)


# --- state ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def as_it_was(function, args, kwargs, changed):
    """Objects that the function can reach; afterwards they are as they were. `changed`: gets a sentence if not."""
    roots = containers.named(args, kwargs)
    given = [(path, t) for path, one in roots for t in pytree.tensors_in(one)]
    found = places.find_places(function, roots, None, given, MOST)
    if found is None:
        changed.append("the function reaches too much to look at all of it")
        yield []
        return
    reached = [function, *(one for _, one in roots), *(place.want for place in found.places)]
    mine = found._replace(places=[p for p in found.places if not is_librarys(p.home, function)])
    scope = scope_of(mine, [t for _, t in given], args, kwargs, reached)
    try:
        held = audit.take(scope)
    except torch.OutOfMemoryError:
        changed.append("there is no memory for a copy of the state")
        yield reached
        return
    random = [*range(torch.cuda.device_count())] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(random):
        try:
            yield reached
        finally:
            audit.give_back(scope, held, ran=False)


def is_librarys(home, function):
    """Is this another module's variables? What a library sets up when it is first used stays so."""
    if type(home) is not dict or home is getattr(function, "__globals__", None):
        return False
    module = sys.modules.get(home.get("__name__"))
    return module is not None and getattr(module, "__dict__", None) is home


def scope_of(found, given, args, kwargs, reached):
    """The audit's Scope of all that was found."""
    tensors = list({id(t): t for t in (*given, *(t for _, t in found.tensors))}.values())
    homes = [home for home, _ in containers.contents([*args, *kwargs.values()])]
    homes += [p.home for p in found.places if p.kind in (DICT_LEN, LIST_LEN)]
    homes += containers.unguarded(p.want for p in found.places)
    homes += places.dicts_of_owners(found)
    return audit.Scope(
        device=-1, paths=[], tensors=tensors, written=[True] * len(tensors), spent=[], places=found.places,
        place_paths=[place.path for place in found.places], homes=list({id(home): home for home in homes}.values()),
        sources=found.sources, generators=reach_generators(reached),
    )  # fmt: skip


# --- reports --------------------------------------------------------------------------------------


def diagnosis(state: State) -> Diagnosis:
    """What a function's runs met."""
    s = report.stats_of([state])
    found = state.blockers or ({} if s.replays else s.reasons)
    findings = tuple(Finding(n, text) for text, n in found.items())
    return Diagnosis(state.name, s.calls, s.replays, findings, slow_in([state]))


def slow_in(states):
    """Texts on what makes replays wait."""
    kept = [one for state in states for one in list(state.keep.values())]
    return tuple(dict.fromkeys(errors.waits(v.line) for one in kept for v in one.values))


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
