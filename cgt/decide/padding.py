"""Calls of many sizes by recordings of a few (`jit(pad=)`): the dimensions that the caller names are filled up to the
next of their sizes, and what comes of them in the result is cut.

What is to be cut is found out. Some calls run without padding, too, which is what their callers get, and both results
are compared. A dimension that is as long as a filled one with padding, and as long as what was given without, comes of
that one. Where the results differ otherwise, entries of a named dimension depend on each other (a mean, batch norm in
training). Then the function is padded no longer, nor where it does more than to return results. Compared are the calls
of each kind until one is replayed, and from then on those that an audit would choose: the 4th, 8th, 16th ..."""

import collections
import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import cgt_core as core
import torch
from torch.utils import _pytree

from ..data import Call, State, maker_of
from ..look import containers, impure, places
from ..make.plan import flattened
from ..run.observe import warn
from ..words import errors, pytree
from .audit import number_behind
from .sites import SITES, is_mine
from .warming import timed_survey

CLOSE = 1e-3  # of the largest entry: as many bits as TF32 keeps
ACTS = "the function does more than to return results"
OFTEN = 8  # times that a length came, in more than half of the calls, from which on it is a size
TRIES = 32  # calls of one kind of which none is replayed: each of them ran twice


class Pad(NamedTuple):
    """How an argument is filled up: a tensor, or each tensor in it.

    Args:
        dims: a dimension, several, or a dict of dimension -> the sizes up to which it is filled. The next one that is
            large enough counts. What is longer than all of them stays as it is. Without sizes these are the powers of
            two, and a length that more than half of the calls have.
        fill: what lies behind the tensor's own entries.
    """

    dims: Any
    fill: float = 0


class Kind(NamedTuple):
    """What is known of calls whose named dimensions are filled up to the same sizes."""

    calls: int = 0
    replayed: bool = False
    spec: Any = None  # of torch's pytrees: of the result
    cuts: list = []  # for each leaf of it: {dimension: positions in `lengths` of what it may come of}


def parse(given: Mapping[str, Any]) -> tuple:
    """((name, ((dimension, sizes), ...), what it is filled with), ...). ValueError, TypeError, AttributeError."""
    return tuple((name, *read(pad if isinstance(pad, Pad) else Pad(pad))) for name, pad in given.items())


def read(pad):
    dims = (pad.dims,) if isinstance(pad.dims, int) else pad.dims
    sizes = dims.items() if isinstance(dims, Mapping) else [(dim, ()) for dim in dims]
    rows = tuple((dim, tuple(sorted(several))) for dim, several in sizes)
    whole = all(type(n) is int for dim, several in rows for n in (dim, *several))
    if not (rows and whole and isinstance(pad.fill, (int, float))):
        raise ValueError(pad)
    return rows, pad.fill


def through(state: State, miss: Callable[[Call], object]) -> Callable[[Call], object]:
    """What takes a call that no recording took. `miss` takes one with nothing to fill up."""
    kinds: dict = {}
    refused: list = []
    met: dict = collections.defaultdict(lambda: (collections.Counter(), set()))  # lengths; those that came often
    names = functools.cache(lambda: list(inspect.signature(SITES[state.f]).parameters))

    def again(args, kwargs):
        core.fn_count(state.f, "calls", -1)  # it is one call
        return SITES[state.f](*args, **kwargs)

    def run(call):
        # Calls run without padding until one has shown nothing that keeps the function from being recorded: what it
        # takes from elsewhere (an iterator, a clock) is not to be taken twice.
        if refused or not state.learnt.devices.drivers or core.blocker() or core.paths_mine() or is_mine():
            return miss(call)
        args, kwargs, lengths = filled(state.opts.pad, names(), met, call)
        if all(n == size for n, size, *_ in lengths):
            return miss(call)
        key = tuple((size, size > n, *of) for n, size, *of in lengths)
        kind = kinds.get(key, Kind())
        kinds[key] = kind = kind._replace(calls=kind.calls + 1)
        if kind.replayed and not (is_open(kind, lengths) or is_due(state.opts.audit, kind.calls)):
            leaves, spec = _pytree.tree_flatten(again(args, kwargs))
            if spec == kind.spec:
                return _pytree.tree_unflatten(map(functools.partial(cut, lengths), leaves, kind.cuts), spec)
        is_first = len(kinds) == kind.calls == 1
        result, told = plain(call, looks=is_first)
        replays = core.fn_counts(state.f)[3]
        if told is not None:
            core.fn_count(state.f, "eager")
        else:
            try:
                with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
                    kind = compare(kind, again(args, kwargs), result, lengths)
                kind = kinds[key] = kind._replace(replayed=kind.replayed or core.fn_counts(state.f)[3] > replays)
                told = why_not(state, kind)
            except errors.CgtError:  # a replay was required
                raise
            except Exception as error:
                told = str(error) if isinstance(error, Differs) else f"{type(error).__name__}: {error}"
        if told is not None:
            refused.append(errors.pad_differs(state.name, told))
            state.reasons[refused[0]] = 1
            warn(refused[0])
        return result

    return run


def why_not(state, kind):
    if any(kept.objects[2] for kept in state.keep.values()):  # its effects
        return f"{ACTS}, and did so twice in each call that was compared"
    return "none of its calls is replayed" if kind.calls >= TRIES and not kind.replayed else None


def plain(call, looks):
    """(the call's result without padding, why the function is not to be padded or None). `looks`: are changes of what
    the function reads looked for, too, or is it only asked whether it draws?"""
    around: Any = None
    with contextlib.suppress(pytree.Incomparable):
        around = timed_survey(flattened(call)) if looks else None
    if isinstance(around, str):
        return call.function(*call.args, **call.kwargs), around
    found, tensors = (around.found, around.tensors) if around else (maker_of(places.Found)(), ())
    seen = [*found.places, *(put.place for put in found.kept)]
    takes = impure.lasting(found.sources)

    def drawn():
        generators = (torch.default_generator, *torch.cuda.default_generators)
        states = [impure.marked(state) for *_, state in impure.states(found.sources)]
        return [bytes(g.get_state().tolist()) for g in generators] + states

    held = [(home, containers.entries(home)) for home in containers.unguarded(p.want for p in seen)]
    before, versions = drawn(), list(map(core.version_of, tensors))
    result = call.function(*call.args, **call.kwargs)
    same = before == drawn() and versions == list(map(core.version_of, tensors)) and all(map(places.is_as_found, seen))
    same = same and all(containers.holds(*row) for row in held)
    return result, None if same and not (takes or None in call.state.learnt.moves.written) else ACTS


class Differs(ValueError):
    """Filled arguments do not come to the same."""


def filled(pads, names, met, call):
    """(arguments, keyword arguments, [(length, up to which it is filled, argument, dimension), ...])."""
    args, kwargs, lengths = list(call.args), dict(call.kwargs), []
    for name, dims, fill in pads:
        home, at = (kwargs, name) if name in kwargs else (args, names.index(name) if name in names else len(args))
        if home is kwargs or at < len(args):
            grow = functools.partial(grown, name, dims, fill, met, lengths)
            home[at] = _pytree.tree_map_only(torch.Tensor, grow, home[at])
    return args, kwargs, lengths


def grown(name, dims, fill, met, lengths, t):
    ends = [0, 0] * t.dim()  # as torch's pad wants them: of the last dimension first
    for dim, sizes in dims if core.is_plain(t) else ():
        if -t.dim() <= dim < t.dim():
            n = t.shape[dim]
            size = size_for(n, sizes, *met[name, dim])
            lengths.append((n, size, name, dim))
            ends[-1 - 2 * (dim % t.dim())] = size - n
    return torch.nn.functional.pad(t, ends, value=fill) if any(ends) else t


def size_for(n, sizes, met, often):
    if sizes or n == 0:
        return next((size for size in sizes if size >= n > 0), n)
    met[n] += 1
    if met[n] % OFTEN == 0 and met[n] * 2 > met.total():
        often.add(n)
    return min(size for size in (1 << (n - 1).bit_length(), *often) if size >= n)


def is_due(audits, n):
    return audits is not None and number_behind(audits, n - 1) == n


def is_open(kind, lengths):
    """Is it not known of which dimension one of the result comes, where these are of several lengths?"""
    return any(len({lengths[k][0] for k in sources}) > 1 for dims in kind.cuts for sources in dims.values())


def cut(lengths, leaf, dims):
    for dim, sources in dims.items():
        leaf = leaf.narrow(dim, 0, lengths[min(sources)][0])
    return leaf


def compare(kind, mine, theirs, lengths):
    """The kind, with what is to be cut of the result. Differs. `mine`: of filled arguments."""
    (leaves, spec), (named, wanted) = _pytree.tree_flatten(mine), _pytree.tree_flatten_with_path(theirs)
    if spec != wanted:
        raise Differs("the result has another structure")
    cuts, known = [], kind.cuts if spec == kind.spec else [{}] * len(leaves)
    for leaf, (path, other), before in zip(leaves, named, known, strict=True):
        name = f"the result{_pytree.keystr(path)}"
        if not isinstance(other, torch.Tensor):
            if not (leaf is other or (type(other) in pytree.PLAIN_TYPES and pytree.same_value(leaf, other))):
                raise Differs(f"{name} is {leaf!r} instead of {other!r}"[:200])
            cuts.append({})
            continue
        found = {dim: ks & before.get(dim, ks) for dim, ks in sources_of(leaf, other, lengths).items()}
        if leaf.dim() != other.dim() or not all(found.values()):
            raise Differs(f"{name} is of shape {tuple(leaf.shape)} instead of {tuple(other.shape)}")
        if not is_close(cut(lengths, leaf, found).detach(), other.detach()):
            raise Differs(f"{name} holds other values")
        cuts.append(found)
    return kind._replace(spec=spec, cuts=cuts)


def sources_of(leaf, other, lengths):
    """{dimension in which the shapes differ: positions of the lengths that it may come of}."""
    pairs = [(dim, pair) for dim, pair in enumerate(zip(other.shape, leaf.shape)) if pair[0] != pair[1]]  # noqa: B905
    return {dim: {k for k, (*length, _, _) in enumerate(lengths) if tuple(length) == pair} for dim, pair in pairs}


def is_close(mine, theirs):
    """Up to rounding: kernels for another size sum in another order."""
    if not (theirs.is_floating_point() or theirs.is_complex()) or not theirs.numel():
        return torch.equal(mine, theirs)
    most = torch.where(theirs.isfinite(), theirs.abs(), 0).max().item()
    return torch.allclose(
        mine, theirs, rtol=0, atol=max(CLOSE, 4 * torch.finfo(theirs.dtype).eps) * most, equal_nan=True
    )
