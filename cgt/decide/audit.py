"""Is a replay what eager would have done? Some calls do both, and compare.

The replay runs first. What it changed is then put back, the function runs eagerly from the same state, and both are
compared: results, tensors that were written, gradients, what lies in places, random generators. Where all is alike the
replay's results and state stand. Where not, eager's do, which ran last; the recording is dropped, and the function runs
eagerly for a while. What is not alike when the recording runs once more proves nothing: kernels that sum in an order
that nobody keeps.

By default the first two replays of each recording are compared, then its 4th, 8th, 16th ... What the function does
besides happens once in such a call, as in eager: it prints, it takes a batch from a queue. Its parts marked `cgt.eager`
run once, too."""

import contextlib
import functools
import itertools
import math
import operator
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import cgt_core as core
import torch
from cgt_core import APPENDS, REBOUND

from ..data import LIVE_NUMBER, Audits, Call, Draft, Seen, State
from ..lanes import forms
from ..look import containers, impure, places
from ..make import autograd, islands, probes, trace
from ..make.describe import WANT, rows_of
from ..make.plan import flattened, leaves_of, reach_generators, runs_compiled
from ..run.devices import one_thread
from ..run.observe import buffer_for, fill, observe, warn
from ..run.taps import threads_beside
from ..words import errors, options, pytree, wrappers

LENGTHS = (places.DICT_LEN, places.LIST_LEN)  # those of containers that grow in none of a recording's replays
# Of a recording that is not as eager, before it is said to do the same each time: sums of few terms often agree.
RUNS = 8


def parse(text: str) -> Audits | None:
    """Audits of "first:2,every:1000,doubling:1,rtol:1e-5,atol:1e-8", of which parts may be left out; None of "0".
    ValueError."""
    if text.strip() in ("", "0"):
        return None
    given: dict = {name: float(value) for name, value in (part.split(":") for part in text.replace(" ", "").split(","))}
    known = all(math.isfinite(value) and value >= 0 for value in given.values()) and given.keys() <= set(Audits._fields)
    counts = {name: given.pop(name, 0.0) for name in ("first", "every", "doubling")}
    if not known or not any(counts.values()) or any(value != int(value) for value in counts.values()):
        raise ValueError(text)
    return Audits(**{name: int(value) for name, value in counts.items()}, **given)


# --- which calls ------------------------------------------------------------------------------


def plan_next(state: State, node: int, replays: int | None = None) -> None:
    """Which replay of a recording is compared next: the core hands over the call that would be it. `replays`: how many
    it had, where that is known."""
    if state.opts.audit is not None and node in state.keep:
        replays = core.node_replays(node) if replays is None else replays
        core.node_audit(node, number_behind(state.opts.audit, replays))


def number_behind(audits: Audits, n: int) -> int:
    """Of the replay that is compared next, behind so many; 0: none is."""
    following = [n + 1] if n < audits.first else []
    following += [n - n % audits.every + audits.every] if audits.every else []
    following += [1 << n.bit_length()] if audits.doubling else []
    return min(following, default=0)


def run(call: Call, node: int, replay: Callable[[], object], drop: Callable[[int, Call, str], None]) -> object:
    """A call that is due; its result. `replay()`: make it. `drop(node, call, reason)`: do without that recording for a
    while."""
    state = call.state
    if node not in state.keep:  # another thread dropped it
        return replay()
    try:
        call = flattened(call)
        scope = find_scope(call, node)
    except pytree.Incomparable as error:
        scope = str(error)
    if isinstance(scope, str):
        state.unaudited = scope
        return replay()
    blame = functools.partial(errors.audit, state.name, state.learnt.unguarded[:MOST_TOLD])
    return compare(call, node, scope, replay, blame, drop, state.opts.audit)[1]


def compare(
    call: Call, node: int, scope: "Scope", replay: Callable[[], object], blame: Callable[[str, str], str],
    drop: Callable[[int, Call, str], None], audits: Audits,
) -> tuple[bool, object]:  # fmt: skip
    """(are they compared, the call's result). `node`: what will take the call, or another one for other values that it
    reads. `blame(told, other)`: a sentence on what is not alike."""
    state, replayed = call.state, core.fn_counts(call.state.f)[3]
    before, copies = take(scope), [core.fixed(call.args[k]).clone() for k in scope.spent]
    islands.keep_answers(scope.tensors, compares=scope.device < 0)  # a GPU may sum in another order
    try:
        result = replay()
    finally:
        answers = islands.take_answers()
    ran = core.path_state(scope.device)[1]  # or what another thread ran since
    node = ran if ran in alternatives(state, node) else node
    if core.fn_counts(state.f)[3] == replayed or any(answer.unsafe for answer in answers):
        return False, result  # no replay, or what its parts wrote to is not known as it was before
    mine = Result.of(result)
    after: Any = take(scope)
    if threads_beside():
        scope, before, after = narrowed(scope, before, after, state.keep[node])
    if answers:  # these parts drew what they drew, and are not run again
        before = before._replace(sources=after.sources, generators=after.generators)
    give_back(scope, before)
    # torch.cond and cgt.tap ask whether somebody looks at the function's ops; Dynamo would compile once more.
    asks = any((state.keep[node].forks, runs_compiled(state), *(row[1] is probes.TAPPED for row in scope.places)))
    observed = not audits.doubling or asks
    seen, theirs, raised = run_eagerly(reading(call, scope.spent, copies), answers, observed)
    state.audited += 1
    if isinstance(raised, torch.OutOfMemoryError):
        state.unaudited = errors.UNAUDITED["memory"]
        told = None
    elif raised is not None:
        told = f"eager raises {type(raised).__name__}"
    else:
        told = differ_results(mine, theirs, audits, seen) or differ_states(scope, after, seen, audits)
        told = told or (islands.took_other() and f"{islands.took_other()} (cgt.eager) is given other values")
    if told is None:
        if forms.is_open(node) and raised is None and not threads_beside():
            back = functools.partial(back_before, call, scope, before, copies)
            forms.settle(node, back, functools.partial(is_left, mine, after))
        give_back(scope, after, ran=False)
        for t, kept in zip(mine.tensors, mine.copies, strict=True):
            put_bytes(t, kept)
        return raised is None, result
    parts = bool(answers)  # of the user's, which must not run again
    if raised is None and not parts and not repeats(call, node, scope, before, copies, mine, after, audits, seen):
        return False, theirs
    reason = blame(told, first_other(state.keep[node].ops, seen.run.ops))
    result = mine = after = None  # they may hold memory of the recording
    drop(node, call, reason)
    state.mismatches += 1
    warn(reason)
    if raised is not None:
        raise raised
    return True, theirs


def reading(call, spent, copies):
    """The call with arguments that lie in these copies of their memory: all of it, since a backward may read beyond the
    view that it is given."""
    args = list(call.args)
    for k, memory in zip(spent, copies, strict=True):
        args[k] = core.view_like(memory, args[k], core.address(args[k]) - core.storage_address(args[k]))
    return call._replace(args=tuple(args))


def back_before(call, scope, before, copies):
    """All is as it was before the call."""
    give_back(scope, before)
    for k, memory in zip(scope.spent, copies, strict=True):
        core.fixed(call.args[k]).copy_(memory)


def is_left(mine, after):
    """Did a launch leave on the GPU what the replay left there?"""
    made = zip(mine.tensors, mine.copies, strict=True)
    written = ((one.tensor, one.bytes) for one in after.tensors if one.bytes is not None)
    return not any(differ(as_tensor(t, kept), t, EXACT) for t, kept in (*made, *written) if t.is_cuda)


def run_eagerly(call, answers, observed):
    """(what was observed, the result, what it raised). By default nobody looks at its ops: that takes ten times as
    long."""
    seen = observe(call.driver, call.device, call.state.graph, ops=[])
    if observed:
        body = functools.partial(trace.run, seen, call.function, call.args, call.kwargs)
    else:  # jitted functions inside are plain ones, as under an observer; a backward runs in this thread, which pauses
        body = functools.partial(core.observed, [], unheard, call.function, call.args, call.kwargs)
        body = functools.partial(
            core.within, [one_thread(seen.run.device >= 0)], functools.partial(islands.paused, body)
        )
    try:
        return seen, core.with_paths(functools.partial(islands.answering, answers, body)) if answers else body(), None
    except Exception as error:
        return seen, None, error


def unheard(op, args, kwargs):
    """An observer of a thread that pauses."""
    raise AssertionError(op)


def repeats(call, node, scope, before, copies, mine, after, audits, seen):
    """Does the recording do the same once more, from the same state? (Not where it sums in an order that nobody keeps.)
    Its kernels alone run: what the function takes from elsewhere is taken once. Eager's state is there again behind
    it."""
    moved = any(core.version_of(one.tensor) != one.version for one in after.tensors)
    if moved and threads_beside() and not call.state.keep[node].changes:
        return False  # one of them wrote meanwhile what the call reads
    # Kernels of the host's do the same each time: a tape that does not works on what its last run left. A recording
    # whose tensors are missed cannot run from that state.
    if scope.device < 0 or any(map(functools.partial(is_missed, seen=seen), after.tensors)):
        return True
    at_end = take(scope)
    for _ in range(RUNS):
        back_before(call, scope, before, copies)
        result = core.with_paths(functools.partial(core.run_again, node, leaves_of(call.flat)))
        told = differ_results(mine, result, audits, seen)
        written = (one for one in after.tensors if one.bytes is not None)
        told = told or any(differ(as_tensor(one.tensor, one.bytes), one.tensor, audits) for one in written)
        if told:
            break
    give_back(scope, at_end, ran=False)
    return not told


# --- state ------------------------------------------------------------------------------------


class Scope(NamedTuple):
    """What a call may change."""

    device: int
    paths: list
    tensors: list
    written: list  # which of them lie in memory that the function writes
    spent: list  # which of its arguments a backward reads for the last time: a replay lays its own results there
    places: list  # (kind, home, key, ...) of each
    place_paths: list
    homes: list  # containers whose entries change, or are compared by nobody else
    sources: list  # (path, source), see impure.states
    generators: list  # torch's


def find_scope(call: Call, node: int) -> "Scope | str":
    """Or a sentence why what this recording changes, or another one that the values which it reads may come to, cannot
    be put back."""
    state, device = call.state, call.device
    nodes = alternatives(state, node)
    tensors = tensors_of(call, nodes)
    spent = [1 + k for k, _ in autograd.find_dying(state.graph, call.args)] if state.graph is not None else []
    reason = why_not(state, device, nodes, [t for _, t, written in tensors if written], [call.args[k] for k in spent])
    if reason is not None:
        return errors.UNAUDITED[reason]
    rows = [row for n in nodes for row in rows_of(state.keep[n])]
    place_paths = [path for n in nodes for path in state.keep[n].place_paths]
    homes = [home for n in nodes for home in filled_by(state.keep[n])] + [vars(t) for _, t, _ in tensors if vars(t)]
    objects = [*(row[WANT] for row in rows), *(one for _, one in call.flat.objects)]
    names = [*place_paths, *(path for path, _ in call.flat.objects)]
    kinds = {cls for cls in set(map(type, objects)) if places.is_source(cls)}
    gpus = [torch.cuda.default_generators[device]] if device >= 0 else []
    paths, ones, written = map(list, zip(*tensors, strict=True) if tensors else ((), (), ()))
    return Scope(
        device, paths, ones, written, spent, rows, place_paths,
        homes=list({id(home): home for home in homes}.values()),
        sources=[(path, one) for path, one in zip(names, objects, strict=True) if type(one) in kinds] if kinds else [],
        generators=[torch.default_generator, *gpus, *reach_generators(objects)],
    )  # fmt: skip


def why_not(state, device, nodes, written, spent):
    """A key of errors.UNAUDITED, or None. `written`, `spent`: tensors."""
    if state.learnt.exchanges:
        return "exchange"
    if core.path_state(device)[2] and (spent or any(state.keep[n].changes for n in nodes)):
        return "threads"
    if not set(map(core.storage_id, written)).isdisjoint(map(core.storage_id, spent)):
        return "donated"
    copied = COPIES * sum(map(core.span, written)) + sum(map(core.span, map(core.fixed, spent)))
    return "memory" if copied > free_bytes(device) else None


def alternatives(state, node):
    """This recording, and those to which other values that it reads may lead."""
    facts = core.node_facts(node)
    if not facts.segments:
        return [node]
    beside = [n for n in core.children(facts.path, facts.parent, state.f) if n in state.keep]
    return [n for n in beside if core.node_spec(n) == facts.spec]


def tensors_of(call, nodes):
    """[(path, tensor, does it lie in memory that is written), ...] of what these recordings read and write."""
    tensors = {}
    for n in nodes:
        core.node_misplaced(n)  # to ask is to follow what lies in places now
        slots = core.node_facts(n).slots
        paths, found = call.state.keep[n].slot_paths, core.slot_tensors(n, leaves_of(call.flat))
        for path, slot, t in zip(paths, slots, found, strict=True):
            if t is not None:
                tensors[id(t)] = path, t, slot.written or (id(t) in tensors and tensors[id(t)][2])
        tensors.update((id(t), (UNFOLLOWED, t, True)) for _, t in call.state.keep[n].loose if t is not None)
    changed = {core.storage_id(t) for _, t, written in tensors.values() if written}
    return [(path, t, core.storage_id(t) in changed) for path, t, _ in tensors.values()]


def filled_by(kept):
    """Containers whose entries a replay changes, or whose entries no place compares."""
    rows = rows_of(kept)
    appended = [core.value_at(rows[effect.place]) for effect in kept.objects[2] if effect.kind == APPENDS]
    return appended + containers.unguarded(row[WANT] for row in rows)


UNFOLLOWED = "a tensor that cgt cannot follow"
MOST_TOLD = 3  # sentences on what is not guarded, in a warning
COPIES = 3  # of what a recording writes, at most at once


def free_bytes(device):
    """What could be allocated on a device now; -1 is the host."""
    if device < 0:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


class Held(NamedTuple):
    """The same, as it is at one moment."""

    tensors: list  # Kept, of what the call can read
    grads: list  # (tensor, its .grad, Kept of that or None)
    places: list  # what each holds, or how much
    contents: list  # (container, its entries)
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
    if is_gone(t):
        return t
    if not is_bytes(t):
        return t.detach().clone()
    buffer = buffer_for(t, inference=False)
    fill(buffer, t)
    return buffer


def as_tensor(t, kept):
    """What t was, from its bytes."""
    return kept if is_gone(t) or not is_bytes(t) else kept.view(t.dtype).as_strided(t.shape, t.stride())


def is_gone(t):
    """Was its memory taken away? Whatever reads it raises, or ends the process."""
    return core.is_plain(t) and t.numel() > 0 and not core.address(t)


def is_bytes(t):
    return core.is_plain(t) and t.numel() > 0 and not (t.is_conj() or t.is_neg())


def keep(t, written):
    return Kept(t, bytes_of(t) if written else None, core.version_of(t))


def put_bytes(t, kept):
    if is_gone(t) or t._is_zerotensor():  # which nobody writes
        return
    if not is_bytes(t):
        t.data.copy_(kept)
    else:
        start = core.address(t) - core.storage_address(t)
        core.fixed(t).view(torch.uint8)[start : start + kept.numel()].copy_(kept)


def take(scope: Scope) -> Held:
    """What there is now."""
    grads = [(t, t.grad, None if t.grad is None else keep(t.grad, True)) for t in scope.tensors if t.is_leaf]
    return Held(
        [keep(t, w) for t, w in zip(scope.tensors, scope.written, strict=True)], grads,
        list(map(core.value_at, scope.places)),
        [(home, containers.entries(home)) for home in scope.homes], impure.states(scope.sources),
        [(g, g.get_state()) for g in scope.generators], core.histories(scope.tensors),
    )  # fmt: skip


def narrowed(scope, before, after, kept):
    """The same without what the replay left as it was: other threads may be at that meanwhile. Random generators are
    not compared, and given back to who draws; gradients are those of who changes more than results; arrays, which no
    replay writes but by tensors, are those threads'."""
    moved = [a is not b for a, b in zip(before.places, after.places, strict=True)]
    contents = zip(before.contents, after.contents, strict=True)
    homes = [a != b and not isinstance(home, containers.ARRAYS) for (home, a), (_, b) in contents]
    generators, grads = [kept.draws] * len(scope.generators), [kept.changes] * len(before.grads)

    def of(one, contents):
        rows = {"places": moved, "place_paths": moved, contents: homes, "generators": generators, "grads": grads}
        rows = {name: which for name, which in rows.items() if hasattr(one, name)}
        return one._replace(
            **{name: list(itertools.compress(getattr(one, name), which)) for name, which in rows.items()}
        )

    return of(scope, "homes"), of(before, "contents"), of(after, "contents")._replace(generators=[])


def give_back(scope: Scope, held: Held, ran: bool = True) -> None:
    """Let it be so again. `ran`: the recording did since, and where a .grad lay that it replaced something else may lie
    by now."""
    core.histories_restore(held.histories)
    grads = []
    for owner, grad, kept in held.grads:
        moved = owner.grad is not grad
        if moved:
            owner.grad = as_tensor(grad, kept.bytes).clone() if ran and grad is not None else grad
        grads += [kept] if grad is not None and not (moved and ran) else []
    for one in (*held.tensors, *grads):
        if one.bytes is None:  # what is only read, others may write
            continue
        put_bytes(one.tensor, one.bytes)
        if not one.tensor.is_inference() and one.tensor._version != one.version:
            core.set_version(one.tensor, one.version)
    for place, _ in other_places(scope, held):
        if place.kind not in LENGTHS:
            places.put_back(place)
    containers.restore(held.contents)
    impure.put_back(held.sources)
    for g, state in held.generators:
        g.set_state(state)


def other_places(scope, held):
    """[(places.Place with what it held, what it holds now), ...] of those in which something else lies by now."""
    now = list(map(core.value_at, scope.places))
    rows = zip(scope.places, scope.place_paths, held.places, now, strict=True)
    other = itertools.compress(rows, map(operator.is_not, held.places, now))
    return [(places.Place(*row[:3], was, path), came) for row, path, was, came in other]


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


def differ_states(scope, after, seen, audits):
    """The same of what was changed; `after`: by the replay. Eager's is there now."""
    for path, one in zip(scope.paths, after.tensors, strict=True):
        if is_missed(one, seen):
            return f"{path} is written by eager, and not by the replay"
        told = differ(as_tensor(one.tensor, one.bytes), one.tensor, audits) if one.bytes is not None else None
        if told is not None:
            return f"{path}, which is written, {told}"
    names = {id(one.tensor): path for path, one in zip(scope.paths, after.tensors, strict=True)}
    for owner, grad, kept in after.grads:
        if (owner.grad is None) != (grad is None):
            return f"{names[id(owner)]}.grad is None in one alone"
        told = grad is not None and (
            differ_kinds(grad, owner.grad) or differ(as_tensor(grad, kept.bytes), owner.grad, audits)
        )
        if told:
            return f"{names[id(owner)]}.grad {told}"
    for place, now in other_places(scope, after):
        if not is_alike(place.want, now, audits):
            return f"{place.path} " + ("is another one" if place.kind in LENGTHS else "holds something else")
    for home, was in after.contents:
        now = containers.entries(home)
        if len(now) != len(was) or not all(is_alike(a, b, audits) for a, b in zip(was, now, strict=True)):
            return f"a {type(home).__name__} holds something else"
    for path, source, state in after.sources:
        if impure.marked(state) != impure.marked(impure.state_of(source)):
            return f"{path} has another state"
    moved = next((g for g, state in after.generators if not torch.equal(g.get_state(), state)), None)
    return None if moved is None else f"torch's random generator of {moved.device} has another state"


def is_missed(kept, seen):
    """Did eager write what the recording does not write?"""
    return kept.bytes is None and (
        core.storage_id(kept.tensor) in seen.written or core.version_of(kept.tensor) != kept.version
    )


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
    """Is one tensor another kind than the other? In words, or None. (A loss whose backward the call ran requires grad
    in eager alone.)"""
    both = mine, theirs
    facts = [(t.shape, t.stride() if t.layout == torch.strided else None, t.dtype, t.device, t.layout) for t in both]
    return None if facts[0] == facts[1] else f"is {describe(mine)} in the replay, {describe(theirs)} in eager"


def differ(mine, theirs, audits):
    """How the values of two tensors differ, in words, or None."""
    a, b = mine.detach(), theirs.detach()
    if is_gone(a) or is_gone(b):
        return None if is_gone(a) and is_gone(b) else "is gone in one alone"
    if wrappers.is_one(a):
        parts = zip(wrappers.plain_inside(a), wrappers.plain_inside(b), strict=True)
        return next(
            filter(None, (differ_kinds(one, other) or differ(one, other, audits) for one, other in parts)), None
        )
    if a.layout != torch.strided or a.is_quantized:
        return None if torch.equal(a, b) else "differs"
    a, b = (torch.empty(t.numel(), dtype=t.dtype, device=t.device).copy_(t.reshape(-1)) for t in (a, b))
    if torch.equal(a.view(torch.uint8), b.view(torch.uint8)) or not a.numel():
        return None
    if (audits.rtol or audits.atol) and torch.allclose(a, b, audits.rtol, audits.atol, equal_nan=True):
        return None
    size = a.element_size()
    other = (a.view(torch.uint8).view(-1, size) != b.view(torch.uint8).view(-1, size)).any(1)
    other &= ~(a.isnan() & b.isnan())  # which NaN it is kernels leave open
    if not other.any():
        return None
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
        alike = len(one.operands) == len(other.operands) and all(
            a in (b, LIVE_NUMBER) for a, b in zip(one.operands, other.operands, strict=True)
        )
        if one.op != other.op or not alike:
            return " " + errors.other_op(
                *(f"{op}({', '.join(operands)}) at {line}" for op, line, operands in (other, one))
            )
    return ""


# --- recordings that are told where their inputs lie ------------------------------------------

# Is the first replay with an input elsewhere what eager is? The words of addresses are explained byte by byte
# (addresses.py); this is the look at values besides. It is taken where a kernel is told an address that none was told
# before in this process, and the call does no more than to return results: so there is nothing to be put back, and
# nothing that another thread could do meanwhile is lost. With CGT_VERIFY=1 it is taken for every such recording, with 0
# for none. What eager itself does not do twice proves nothing.
PROVEN = set()  # (op, kernel) that were told addresses, and right
EXACT = Audits(0, 0)
REBINDS = 5  # in fn_counts


def changes(seen: Seen, draft: Draft, loose: list) -> bool:
    """Does it do more than to return results? `loose`: of Kept."""
    hidden = any(written is not None for _, written in loose)
    acts = seen.random or seen.reads.values or seen.cuts.islands or seen.acts or seen.own
    return bool(hidden or draft.effects or acts)


def doubt(state: State, node: int) -> None:
    """A recording was made."""
    kept = state.keep[node]
    if kept.told and (options.VERIFY or (options.VERIFY is None and not kept.changes and not kept.told <= PROVEN)):
        core.node_doubt(node)


def verify(call: Call, node: int, replay: Callable[[], object], drop: Callable[..., None]) -> object:
    """A call for which that recording is told of another address; its result. `drop(node, call, reason, untold)`: do
    without it, and tell none of these paths again."""
    state, scope, kept = call.state, None, call.state.keep.get(node)
    # Another thread dropped it; or other processes would wait for a second run.
    if kept is None or state.learnt.exchanges:
        return replay()
    with contextlib.suppress(pytree.Incomparable):
        call = flattened(call)
        stays = state.graph is None and not kept.changes
        scope = Scope(call.device, *[[] for _ in range(9)]) if stays else find_scope(call, node)
    if not isinstance(scope, Scope):
        return replay()
    paths = [
        path for path, slot in zip(kept.slot_paths, core.node_facts(node).slots, strict=True) if slot.binding == REBOUND
    ]
    blame = functools.partial(errors.verified, state.name, few(paths), few(sorted({op for op, _ in kept.told})))
    rebinds, wrong = core.fn_counts(state.f)[REBINDS], state.mismatches
    compared, result = compare(call, node, scope, replay, blame, functools.partial(drop, untold=paths), EXACT)
    if compared and core.fn_counts(state.f)[REBINDS] > rebinds and state.mismatches == wrong:
        PROVEN.update(kept.told)
    return result


def few(names):
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
