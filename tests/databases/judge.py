"""Is a jitted program what eager is, bit for bit, and does it replay?

A program is a function begin(jit), which makes what it needs, among it jitted functions, and returns step(k): call k with
new tensors, and the answer as a tree, of which nothing is written by later calls. Three players begin: eager twice, which
says whether eager is itself, and cgt. They take turns, and their generators are seeded before each call.
"""

import dataclasses
import random
import re
import warnings
from functools import partial

import numpy
import torch

# isort: split
import cgt

from ..helpers import bits

CALLS, MOST_CALLS = 10, 20  # more where nothing was replayed so far, and cgt has told no reason
LAST = 2  # calls, one for each set of values, of which one must have been replayed
HELD = CALLS - 3  # the call whose answer is held to the end
AGAIN = 12  # further eager runs, before a difference is cgt's: LAPACK rounds by the alignment of memory
OFTEN = 200  # where PyTorch itself says that a kernel sums or writes in any order

REPLAYED, EAGER, DIFFERS, RAISES, CRASH, LATE = "replayed", "eager", "differs", "raises", "crash", "late"
EAGER_RAISES, EAGER_DIFFERS = "eager raises", "eager differs from itself"
NO_REASON = "no reason"
WRONG = (DIFFERS, RAISES, CRASH, LATE)
NOT_COUNTED = (EAGER_RAISES, EAGER_DIFFERS)


class Eagerly(Exception):
    """Eager itself raised."""


class Ours(Exception):
    """The jitted one did, where eager had not."""


def judge(programs):
    """(verdict, note) of the first of these programs that eager can run: the others have simpler values."""
    for program in programs:
        verdict, note = judge_one(program)
        if verdict == DIFFERS and may_vary(program(plain)):
            verdict, note = judge_one(program)  # a race of PyTorch's can hide from all runs of eager; a defect of cgt's comes again
        if verdict != EAGER_RAISES:
            break
    return verdict, note


def judge_one(program):
    """(verdict, note)."""
    sites, marks, held, found = [], [], None, None
    try:
        eager, again = eagerly(program, plain), eagerly(program, plain)
        ours = by_cgt(program, partial(jitted, sites))
        for k in range(MOST_CALLS):
            want = eagerly(play, eager, k)
            told = differ(eagerly(play, again, k), want)
            if told:
                return EAGER_DIFFERS, told
            got = by_cgt(play, ours, k)
            told = differ(got, want)
            if told:
                return wrong(program, k, f"call {k}: {told}")
            held = (got, want) if k == HELD else held
            marks.append(replays(sites))
            del got, want
            found = verdict(sites, marks) if k + 1 >= CALLS else None
            if found is not None and not found[1].startswith(NO_REASON):
                break
        told = differ(*held)
    except Eagerly as error:
        return EAGER_RAISES, first_line(error.__cause__)
    except Ours as error:
        return RAISES, first_line(error.__cause__)
    if told:
        return DIFFERS, f"held since call {HELD}: {told}"
    return found


def plain(function):
    """Instead of jit."""
    return function


def jitted(sites, function):
    """The function jitted, and remembered."""
    sites.append(cgt.jit(function))
    return sites[-1]


def play(step, k):
    """The answer of call k."""
    seed(k % 2)
    return step(k)


def eagerly(function, *args):
    """Its result; what it raises is eager's."""
    try:
        return function(*args)
    except Exception as error:
        raise Eagerly from error


def by_cgt(function, *args):
    """The same for the jitted one; then a new iteration begins."""
    try:
        result = function(*args)
        cgt.step()
        return result
    except Exception as error:
        raise Ours from error


def seed(n):
    """Every generator that a program may draw from. torch.manual_seed costs a hundred times as much, for devices that are not here."""
    random.seed(n)
    numpy.random.seed(n)
    for generator in (torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ())):
        generator.manual_seed(n)


def wrong(program, k, told):
    """The verdict on a difference: it is cgt's where eager, run some more times, is itself."""
    step = program(plain)
    wants = [play(step, call) for call in range(k + 1)]
    held = []
    for again in range(OFTEN if may_vary(program(plain)) else AGAIN):
        held.append((bytearray(16 * again + 1), torch.empty(16 * again + 1)))  # memory of the next run lies elsewhere
        step = program(plain)
        other = first(differ(play(step, call), want) for call, want in enumerate(wants))
        if other:
            return EAGER_DIFFERS, other
    return DIFFERS, told


def may_vary(step):
    """Does PyTorch say of an op of this call that its kernel is not deterministic?"""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            play(step, 0)
    finally:
        torch.use_deterministic_algorithms(False)
    return any("deterministic" in str(one.message) for one in told)


def replays(sites):
    """(replays, replays of backwards, backwards) so far."""
    found = [cgt.stats(f) for f in sites]
    backwards = [s.backward for s in found if s.backward is not None]
    return sum(s.replays for s in found), sum(b.replays for b in backwards), sum(b.calls for b in backwards)


def verdict(sites, marks):
    """Were the last calls replayed, and their backwards where there were some? Else why not: (verdict, note)."""
    forward, backward, backwards = (now - before for now, before in zip(marks[-1], marks[-1 - LAST], strict=True))
    if forward and (backward or not backwards):
        return REPLAYED, ""
    for s in map(cgt.stats, sites):
        told = s.backward.reasons if forward else s.reasons
        if told:
            return EAGER, "backward: " * bool(forward) + next(iter(told))
    return EAGER, NO_REASON + " of the backward" * bool(forward)


def first_line(error):
    """Of what was raised."""
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:300]


# --- differences -------------------------------------------------------------------------------

FACTS = ("dtype", "device", "shape", "layout", "requires_grad", "is_leaf")
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def differ(got, want, path="answer"):
    """What is different, and where; None if nothing is."""
    if type(got) is not type(want):
        return f"{path}: {type(got).__name__} instead of {type(want).__name__}"
    if isinstance(want, torch.Tensor):
        return differ_tensors(got, want, path)
    if isinstance(want, dict):
        if list(got) != list(want):
            return f"{path}: keys {list(got)} instead of {list(want)}"
        return first(differ(got[key], want[key], f"{path}.{key}") for key in want)
    if isinstance(want, (tuple, list)):
        if len(got) != len(want):
            return f"{path}: {len(got)} items instead of {len(want)}"
        return first(differ(g, w, f"{path}[{k}]") for k, (g, w) in enumerate(zip(got, want, strict=True)))
    if dataclasses.is_dataclass(want) and not isinstance(want, type):
        return first(differ(getattr(got, field.name), getattr(want, field.name), f"{path}.{field.name}") for field in dataclasses.fields(want))
    mine, theirs = (ADDRESS.sub("", repr(x)) for x in (got, want))
    return None if mine == theirs else f"{path}: {mine[:60]} instead of {theirs[:60]}"


def first(found):
    """The first that is there."""
    return next(filter(None, found), None)


def differ_tensors(got, want, path):
    """The same of two tensors: what they tell of themselves, then their bits."""
    for fact in FACTS:
        if getattr(got, fact) != getattr(want, fact):
            return f"{path}: {fact} {getattr(got, fact)} instead of {getattr(want, fact)}"
    if hasattr(want, "__tensor_flatten__"):
        names = want.__tensor_flatten__()[0]
        return first(differ(getattr(got, name), getattr(want, name), f"{path}.{name}") for name in names)
    if want.layout is not torch.strided or want.is_nested:
        return first(differ(g, w, f"{path}.{k}") for k, (g, w) in enumerate(zip(parts(got), parts(want), strict=True)))
    if got.stride() != want.stride():
        return f"{path}: stride {got.stride()} instead of {want.stride()}"
    views = [(t.is_conj(), t.is_neg(), t.is_inference()) for t in (got, want)]
    if views[0] != views[1]:
        return f"{path}: (conj, neg, inference) {views[0]} instead of {views[1]}"
    mine, theirs = bits(got), bits(want)
    if torch.equal(mine, theirs):
        return None
    n = int((mine != theirs).sum())
    return f"{path}: {n} of {theirs.numel()} values, {sample(got)} instead of {sample(want)}"


def parts(t):
    """The dense tensors that a sparse or nested one is made of."""
    if t.is_nested:
        return t.unbind()
    if t.layout is torch.sparse_coo:
        return t._indices(), t._values()
    if t.layout in (torch.sparse_csr, torch.sparse_bsr):
        return t.crow_indices(), t.col_indices(), t.values()
    if t.layout in (torch.sparse_csc, torch.sparse_bsc):
        return t.ccol_indices(), t.row_indices(), t.values()
    return (t.to_dense(),)


def sample(t):
    """Some values, as text."""
    return str(t.detach().flatten()[:3].tolist())
