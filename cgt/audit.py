"""Is a replay what eager would have done? Some calls do both, and compare.

The replay runs first. What it changed is then put back, the function runs eagerly from the same state, and both are compared:
results, tensors that were written, gradients, what lies in places, random generators. Where all is alike the replay's results and
state stand. Where not, eager's do, which ran last; the recording is dropped, and the function runs eagerly for a while.

What the function does besides, prints, files, happens twice in such a call; its parts marked `cgt.eager` run once.
"""

import contextlib
import functools
import math
import warnings
from typing import Any, NamedTuple

import cgt_core as core
import torch
from cgt_core import FITS, NONE

from . import (
    containers,
    empties,
    errors,
    impure,
    islands,
    places,
    pytree,
    trace,
    wrappers,
)
from .data import LIVE_NUMBER, Audits
from .observe import buffer_for, fill, observe, version_of
from .plan import device_of, driver_of, misses, place_in_tree, reach_generators, survey

LENGTHS = (places.DICT_LEN, places.LIST_LEN)
FAR = 12  # calls that are no replays after which 2**FAR go by before the next one is looked at


def parse(text):
    """Audits of "first:2,every:1000,rtol:1e-5,atol:1e-8", of which parts may be left out; None of "". ValueError."""
    if not text.strip():
        return None
    given = {name: float(value) for name, value in (part.split(":") for part in text.replace(" ", "").split(","))}
    known = all(math.isfinite(value) and value >= 0 for value in given.values()) and given.keys() <= set(Audits._fields)
    first, every = given.pop("first", 0.0), given.pop("every", 0.0)
    if not known or first != int(first) or every != int(every) or not (first or every):
        raise ValueError(text)
    return Audits(int(first), int(every), **given)


# --- which calls ------------------------------------------------------------------------------


def begin(state):
    """A recording was made: its first replays are compared."""
    if state.opts.audit is not None:
        state.audits_left, state.audits_missed = state.opts.audit.first, 0
        plan_next(state, True)


def plan_next(state, compared):
    """Which call comes next: the core hands it over, whatever it will be. Where it was no replay the next one may be, but what
    does not come to replay is not looked at for ever."""
    wait = 1 if state.audits_left else state.opts.audit.every
    if compared:
        state.audits_missed = 0
    else:
        wait = min(2**state.audits_missed, wait if wait > 1 else 2**FAR)
        state.audits_missed += 1
    core.fn_audit(state.f, core.fn_counts(state.f)[0] + wait if wait else 0)


def run(call, replay, drop):
    """A call that is due; its result. `replay()`: make it. `drop(node, call, reason)`: do without that recording for a while."""
    state, scope = call.state, None
    with contextlib.suppress(pytree.Incomparable):
        call = call._replace(flat=pytree.flatten_call(call.args, call.kwargs, *state.opts.static, state.live))
        scope = find_scope(call) if will_replay(call) else None
    blame = functools.partial(errors.audit, state.name)
    compared, result = compare(call, scope, replay, blame, drop, state.opts.audit) if scope is not None else (False, replay())
    state.audits_left = max(0, state.audits_left - compared)
    plan_next(state, compared)
    return result


def will_replay(call):
    """Most probably. (What a recording is about to count references to, nobody else must hold.)"""
    state = call.state
    spec = next((s for s, (program, _) in state.programs.items() if pytree.matches_call(program, call.args, call.kwargs) is not None), NONE)
    if spec == NONE or driver_of(state, call.flat) is None:
        return False
    path, parent = place_in_tree(state, call.flat, call.flat.tensors)
    unfit = [node for node, why, _ in misses(call._replace(spec=spec), path, parent) if why != FITS]
    return len(unfit) < len(core.children(path, parent, state.f))


def compare(call, scope, replay, blame, drop, audits, twice=False):
    """(are they compared, the call's result). `blame(told, other)`: a sentence on what is not alike. `twice`: where they are not, eager runs
    once more, and is no measure if it is not alike itself."""
    state, replayed = call.state, core.fn_counts(call.state.f)[3]
    before = take(scope)
    islands.keep_answers(scope.tensors)
    try:
        result = replay()
    finally:
        answers = islands.take_answers()
    if core.fn_counts(state.f)[3] == replayed or any(answer.unsafe for answer in answers):
        return False, result  # no replay, or what its parts wrote to is not known as it was before
    node = core.path_state(scope.device)[1]
    mine = Result.of(result)
    after = take(scope)
    if answers:  # these parts drew what they drew, and are not run again
        before = before._replace(sources=after.sources, generators=after.generators)
    give_back(before)
    seen, theirs, raised = run_eagerly(call, answers)
    state.audited += 1
    told = f"eager raises {type(raised).__name__}" if raised is not None else None
    told = told or differ_results(mine, theirs, audits, seen) or differ_states(scope.paths, after, seen, audits)
    doubtful = told is not None and twice and raised is None and differs_from_itself(call, scope, before, theirs, answers, audits)
    if told is None or doubtful:
        give_back(after)
        return not doubtful, result
    reason = blame(told, first_other(state.keep[node].ops, seen.ops))
    result = mine = after = None  # they may hold memory of the recording
    drop(node, call, reason)
    state.mismatches += 1
    warnings.warn(errors.CgtWarning(reason), stacklevel=2)
    if raised is not None:
        raise raised
    return True, theirs


def run_eagerly(call, answers):
    """(what was observed, the result, what it raised)"""
    seen = observe(driver_of(call.state, call.flat), device_of(call.state, call.flat))
    seen.ops = []
    body = functools.partial(trace.run, seen, call.function, call.args, call.kwargs)
    try:
        return seen, core.with_paths(functools.partial(islands.answering, answers, body)) if answers else body(), None
    except Exception as error:
        return seen, None, error


def differs_from_itself(call, scope, before, theirs, answers, audits):
    """Does eager, from the same state? (Sums in an order that nobody keeps.) The state is then that of another run."""
    first, at_end = Result.of(theirs), take(scope)
    give_back(before)
    seen, again, raised = run_eagerly(call, answers)
    told = raised is not None or differ_results(first, again, audits, seen) or differ_states(scope.paths, at_end, seen, audits)
    if not told:
        give_back(at_end)
    return bool(told)


# --- state ------------------------------------------------------------------------------------


class Scope(NamedTuple):
    """What a call may change."""

    device: int
    paths: list
    tensors: list
    written: list  # which of them the function writes
    singles: list  # places.Place that hold one object
    homes: list  # dicts and lists whose entries change
    sources: list  # (path, source), see impure.states
    generators: list  # torch's


def find_scope(call):
    """Or None, where it cannot be told, or put back. An empty container that the function fills and empties is left alone: guards
    count who holds it."""
    around = survey(call)
    if isinstance(around, str) or impure.lasting(impure.states(around.found.sources)):
        return None
    found, state, device = around.found, call.state, device_of(call.state, call.flat)
    lone = {id(found.places[k].want) for k in empties.lone_empties(found.places)}
    every = [p for p in (*found.places, *(put.place for put in found.kept)) if id(p.want) not in lone and id(p.home) not in lone and p.kind != places.EMPTY]
    paths = [*call.flat.paths, *(one.path for one in around.reached)]
    return Scope(
        device, paths, around.tensors, [path in state.written for path in paths],
        [p for p in every if p.kind not in LENGTHS], list({id(p.home): p.home for p in every if p.kind in LENGTHS}.values()), found.sources,
        [torch.default_generator, *([torch.cuda.default_generators[device]] if device >= 0 else []), *reach_generators(found.places, call.flat)],
    )  # fmt: skip


class Held(NamedTuple):
    """The same, as it is at one moment."""

    tensors: list  # Kept, of what the call can read
    grads: list  # (tensor, its .grad, Kept of that or None)
    singles: list  # places.Place that hold one object
    contents: list  # (dict or list, its entries)
    sources: list  # of impure.states
    generators: list  # (torch's generator, its state)
    histories: Any  # of core.histories


class Kept(NamedTuple):
    tensor: Any
    bytes: Any  # of its memory, where the function writes it; or None
    version: int


class Result(NamedTuple):
    """A call's result, as it is at one moment."""

    tree: Any
    program: tuple
    paths: list
    tensors: list
    copies: list

    @classmethod
    def of(cls, tree):
        flat = flatten(tree)
        return cls(tree, flat.program, flat.paths, flat.tensors, list(map(bytes_of, flat.tensors)))


def flatten(tree):
    return pytree.flatten_result(tree, lambda t: True, True)


def bytes_of(t):
    """Of all that its elements lie in, gaps too; of tensors that are more than that, a copy."""
    if not is_bytes(t):
        return t.detach().clone()
    buffer = buffer_for(t, inference=False)
    fill(buffer, t)
    return buffer


def as_tensor(t, kept):
    """What t was, from its bytes."""
    return kept if not is_bytes(t) else kept.view(t.dtype).as_strided(t.shape, t.stride())


def is_bytes(t):
    return core.is_plain(t) and t.numel() > 0 and not (t.is_conj() or t.is_neg())


def keep(t, written):
    return Kept(t, bytes_of(t) if written else None, version_of(t))


def put_bytes(t, kept):
    if not is_bytes(t):
        t.data.copy_(kept)
    else:
        start = core.address(t) - core.storage_address(t)
        core.fixed(t).view(torch.uint8)[start : start + kept.numel()].copy_(kept)


def take(scope):
    """What there is now."""
    grads = [(t, t.grad, None if t.grad is None else keep(t.grad, True)) for t in scope.tensors if t.is_leaf]
    return Held(
        [keep(t, w) for t, w in zip(scope.tensors, scope.written, strict=True)], grads, [places.as_now(p) for p in scope.singles],
        [(home, containers.entries(home)) for home in scope.homes], impure.states(scope.sources), [(g, g.get_state()) for g in scope.generators],
        core.histories(scope.tensors),
    )  # fmt: skip


def give_back(held):
    """Let it be so again."""
    core.histories_restore(held.histories)
    for owner, grad, _ in held.grads:
        if owner.grad is not grad:
            owner.grad = grad
    for one in (*held.tensors, *(kept for _, _, kept in held.grads if kept is not None)):
        if one.bytes is not None:
            put_bytes(one.tensor, one.bytes)
        if not one.tensor.is_inference() and one.tensor._version != one.version:
            core.set_version(one.tensor, one.version)
    for place in held.singles:
        if places.value_at(place) is not place.want:
            places.put_back(place)
    containers.restore(held.contents)
    impure.put_back(held.sources)
    for g, state in held.generators:
        g.set_state(state)


# --- comparing --------------------------------------------------------------------------------


def differ_results(mine, theirs, audits, seen):
    """What is not alike, in words, or None."""
    other = flatten(theirs)
    if len(mine.program) != len(other.program) or not all(map(is_same_op, mine.program, other.program)):
        return "the result is another one in its structure or its plain values"
    for path, one, kept, their in zip(mine.paths, mine.tensors, mine.copies, other.tensors, strict=True):
        told = differ_kinds(one, their) or differ(as_tensor(one, kept), their, audits)
        if told is not None:
            line = seen.made.get(core.storage_id(their))
            return f"{path} {told}" + (f" (made at {line})" if line else "")
    return None


def is_same_op(mine, theirs):
    """Of two programs."""
    (kind, n, obj), (their_kind, m, other) = mine, theirs
    return kind == their_kind and n == m and (type(obj) not in pytree.PLAIN_TYPES or pytree.same_value(obj, other))


def differ_states(paths, after, seen, audits):
    """The same of what was changed; `after`: by the replay. Eager's is there now."""
    for path, one in zip(paths, after.tensors, strict=True):
        if one.bytes is None and core.storage_id(one.tensor) in seen.written:
            return f"{path} is written by eager, and not by the replay"
        told = differ(as_tensor(one.tensor, one.bytes), one.tensor, audits) if one.bytes is not None else None
        if told is not None:
            return f"{path}, which is written, {told}"
    names = {id(one.tensor): path for path, one in zip(paths, after.tensors, strict=True)}
    for owner, grad, kept in after.grads:
        if (owner.grad is None) != (grad is None):
            return f"{names[id(owner)]}.grad is None in one alone"
        told = grad is not None and (differ_kinds(grad, owner.grad) or differ(as_tensor(grad, kept.bytes), owner.grad, audits))
        if told:
            return f"{names[id(owner)]}.grad {told}"
    for place in after.singles:
        if not is_alike(place.want, places.value_at(place), audits):
            return f"{place.path} holds something else"
    for home, was in after.contents:
        now = containers.entries(home)
        if len(now) != len(was) or not all(is_alike(a, b, audits) for a, b in zip(was, now, strict=True)):
            return f"a {type(home).__name__} of {len(was)} entries holds something else"
    for path, source, state in after.sources:
        if impure.marked(state) != impure.marked(impure.state_of(source)):
            return f"{path} has another state"
    moved = next((g for g, state in after.generators if not torch.equal(g.get_state(), state)), None)
    return None if moved is None else f"torch's random generator of {moved.device} has another state"


def is_alike(mine, theirs, audits):
    """Two values from one place. Of objects made by each run only the type tells something."""
    if mine is theirs:
        return True
    if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return not (differ_kinds(mine, theirs) or differ(mine, theirs, audits))
    if type(mine) is tuple and type(theirs) is tuple:
        return len(mine) == len(theirs) and all(is_alike(a, b, audits) for a, b in zip(mine, theirs, strict=True))
    return pytree.same_value(mine, theirs) if type(mine) in pytree.PLAIN_TYPES else type(mine) is type(theirs)


def differ_kinds(mine, theirs):
    """Is one tensor another kind than the other? In words, or None. (A loss whose backward the call ran requires grad in eager alone.)"""
    facts = [(t.shape, t.stride() if t.layout == torch.strided else None, t.dtype, t.device, t.layout) for t in (mine, theirs)]
    return None if facts[0] == facts[1] else f"is {describe(mine)} in the replay, {describe(theirs)} in eager"


def differ(mine, theirs, audits):
    """How the values of two tensors differ, in words, or None."""
    a, b = mine.detach(), theirs.detach()
    if wrappers.is_one(a):
        parts = zip(wrappers.plain_inside(a), wrappers.plain_inside(b), strict=True)
        return next(filter(None, (differ_kinds(one, other) or differ(one, other, audits) for one, other in parts)), None)
    if a.layout != torch.strided or a.is_quantized:
        return None if torch.equal(a, b) else "differs"
    a, b = (torch.empty(t.numel(), dtype=t.dtype, device=t.device).copy_(t.reshape(-1)) for t in (a, b))
    if torch.equal(a.view(torch.uint8), b.view(torch.uint8)) or not a.numel():
        return None
    if (audits.rtol or audits.atol) and torch.allclose(a, b, audits.rtol, audits.atol, equal_nan=True):
        return None
    size = a.element_size()
    other = (a.view(torch.uint8).view(-1, size) != b.view(torch.uint8).view(-1, size)).any(1)
    told = f"differs in {int(other.sum())} of {a.numel()} elements"
    if a.dtype.is_floating_point:
        told += f", by at most {(a[other].double() - b[other].double()).abs().max().item():.3g}"
    return told


def describe(t):
    strides = t.stride() if t.layout == torch.strided else t.layout
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)} of strides {strides}"


# --- the ops of a run -------------------------------------------------------------------------


def first_other(recorded, now):
    """A clause on the first op of a run that the recording has not, or has with other operands; or ""."""
    for one, other in zip(recorded or (), now, strict=False):
        alike = len(one.operands) == len(other.operands) and all(a in (b, LIVE_NUMBER) for a, b in zip(one.operands, other.operands, strict=True))
        if one.op != other.op or not alike:
            return errors.other_op(*(f"{op}({', '.join(operands)}) at {line}" for op, line, operands in (other, one)))
    return ""
