"""Parts of a call that run eagerly between two of its graphs: functions marked `cgt.eager`.

What was recorded until then becomes a segment (segments.py). It runs, then the function does, then recording goes on
behind it; so does each replay. The function is given copies of its tensors, since it may keep them, and what it writes
there is written back; what it returns comes into memory of the recording by a copy. Its code is not looked at: it runs
anyway. What it changes that the rest reads is guarded once more behind it.

It runs once per call. Where the call turns out to go another way than the recording, or nothing can be recorded, the
jitted function runs from the top, eagerly, and the part is answered with what it returned. So what comes before it may
happen twice, and it stands on the terms of a read."""

import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import cgt_core as core
import torch
from cgt_core import CUDA
from torch.utils import _pytree

from ..cuts import readout, segments
from ..cuts.apart import bring_in, bring_out, end_segment, slim
from ..data import Plan, Seen
from ..look import impure, places
from ..numbers import counters, live, standins
from ..run import constants, observe
from ..run.taps import look_again
from ..words import errors, options
from ..words.private import outside_dynamo
from ..words.pytree import PLAIN_TYPES
from . import describe, moving
from .record import accept

F = TypeVar("F", bound=Callable[..., object])
T = TypeVar("T")

# Of this thread: `ran`, what the replay under way ran; `left`, the same of one whose call went another way, until that
# is taken; `kept`, of the last one, where somebody asks, and `watched`, tensors that its parts should leave alone;
# `due`, answers of a call that runs once more.
LOCAL = threading.local()


class Answer(NamedTuple):
    """What one run of such a part came to."""

    function: Any
    result: Any
    error: BaseException | None
    written: list  # [(which of the arguments' leaves, what the part made of it, how often it wrote)]
    changes: list = []  # places that guards compare, with what it put there; meanwhile they hold what they did
    unsafe: bool = False  # it changed more than that
    given: list = []  # copies of its arguments, where somebody compares them


def eager(function: F) -> F:
    """Mark a function that runs eagerly wherever it is called: inside of a jitted one it is called between two of its
    graphs, by every replay, with the values of that call. For what no graph can hold: an environment's step, a
    callback, a solver of another library. Outside of jitted functions it does nothing.

    Its arguments and results are tensors on the device of the jitted function, numbers, strings, and lists, tuples and
    dicts of these; arguments may be other objects too. Its tensors are copies, which it may keep, and write to by
    torch's operators. No gradients flow through it, neither it nor the jitted function draws torch's random numbers,
    and it may come only before the jitted function writes to anything from outside: else the whole call runs eagerly,
    with a reason. It must not wait for another thread that calls jitted functions.

    Raises:
        TypeError: `function` cannot be called, or is a class.
        CgtError: by the jitted function, where the part wrote to a tensor from outside, or grew a list that the jitted
            function reads, in a call that goes another way than any recording.

    >>> import torch, cgt
    >>> @cgt.eager
    ... def log(y):
    ...     print(y.tolist())
    >>> @cgt.jit
    ... def f(x):
    ...     y = x * 2
    ...     log(y)
    ...     return y + 1
    >>> y = f(torch.ones(2))
    [2.0, 2.0]
    """
    if isinstance(function, type) or not callable(function):
        raise TypeError(errors.not_a_function(repr(function)))

    @outside_dynamo
    @functools.wraps(function)
    def call(*args, **kwargs):
        due = getattr(LOCAL, "due", None)
        if due:
            return answer(due, function, args, kwargs)
        seen = observe.seen_here()
        if seen is None or seen.inside:
            return function(*args, **kwargs)
        return meet(seen, call, function, args, kwargs)

    return cast(F, call)


# --- a run that is observed ------------------------------------------------------------------------


def meet(seen, call, function, args, kwargs):
    """The function is called, by `call`, in a run under observation."""
    seen.asks_which = True  # it may put other tensors into places in the middle of the call
    line = observe.user_line(seen)
    counters.end(seen)
    live.settle_all(seen)
    moving.take_blinds_away(seen)
    args, kwargs = _pytree.tree_map(standins.settle, (args, kwargs))
    leaves, spec = _pytree.tree_flatten((args, kwargs))
    tensors = tensors_of(leaves)
    for t in tensors:
        observe.touch(seen, t)
    why = "behind_changes" if has_changed(seen.run.plan) else vet(seen, tensors)  # a replay changes things at its end
    if why is not None:
        observe.refuse(seen, errors.island(function.__qualname__, line, why))
        readout.fill(seen, None)  # on the host it runs all the same, and may look
    if observe.is_capture(seen) or (observe.is_host_recording(seen) and seen.reason is None):
        return record(seen, call, function, leaves, spec, line)
    seen.acts = seen.acts or seen.run.recording  # which is refused, and must not come again
    result = beside(seen, lambda: function(*args, **kwargs))
    why = vet_result(seen, result, tensors)
    if why is not None:
        observe.refuse(seen, errors.island(function.__qualname__, line, why))
    for t in tensors_of(result):
        seen.made.setdefault(core.storage_id(t), line)
    return result


def vet(seen, tensors):
    """Why no recording can have such a part here, or None."""
    if seen.run.graph is not None or seen.cuts.bodies or (seen.run.driver == CUDA and core.is_in_node()):
        return "in_backward"
    if not segments.may_end(seen):
        return "behind_writes"
    ends = sorted({(core.address(t), core.address(t) + core.span(t), id(t)) for t in tensors if t.numel()})
    if any(end > at for (_, end, _), (at, _, _) in itertools.pairwise(ends)):
        return "shared"
    return vet_tensors(seen, tensors)


def vet_tensors(seen, tensors):
    home = torch.device("cuda", seen.run.device) if seen.run.driver == CUDA else torch.device("cpu")
    if any(t.device != home and (home.type == "cuda" or t.is_cuda) for t in tensors if t.numel()):
        return "elsewhere"
    if not all(core.is_plain(t) and t.layout == torch.strided for t in tensors):
        return "odd"
    return "gradients" if torch.is_grad_enabled() and any(t.requires_grad for t in tensors) else None


def vet_result(seen, result, given):
    """Why no recording can hold what the part returned, or None."""
    leaves, tensors = _pytree.tree_leaves(result), tensors_of(result)
    if not set(map(core.storage_id, tensors)).isdisjoint(map(core.storage_id, tensors_of(given))):
        return "returns_arguments"
    if not all(isinstance(x, torch.Tensor) or type(x) in PLAIN_TYPES for x in leaves):
        return "returns_objects"
    return vet_tensors(seen, tensors)


def tensors_of(tree):
    return [t for t in _pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def has_changed(plan):
    """Is what guards compare, or what the call is known to store, not what it was when the recording began?"""
    if plan is None:
        return False
    stored = not all(places.is_as_found(put.place) for put in plan.found.kept)
    graded = any(core.grad_id(plan.tensors[k]) != before for k, before in plan.grads.items())
    return stored or graded or places.find_changed(plan.places, describe.is_guarded_as, set()) is not None


def beside(seen, body):
    """body(), of which nobody looks at the ops or the code, nor at what it draws from."""
    drawn = impure.vet(seen.run.sources, seen)
    if drawn is not None:
        observe.refuse(seen, drawn)
    started = set(seen.code.started)
    generators = [torch.default_generator]
    if seen.run.driver == CUDA and not observe.is_capture(seen):  # which refuses by itself to draw
        generators.append(torch.cuda.default_generators[seen.run.device])

    def watched():
        before = [g.get_state() for g in generators]
        return body(), not all(map(torch.equal, before, [g.get_state() for g in generators]))

    try:
        result, drew = paused(watched)
    finally:
        seen.code.started.intersection_update(started)
        look_again()
        seen.run.sources[:] = [(path, source, impure.state_of(source)) for path, source, _ in seen.run.sources]
    if drew:
        observe.refuse(seen, errors.island("an eager part", observe.user_line(seen), "draws"))
    return result


def paused(body: Callable[[], T]) -> T:
    """body(), of which no observer hears."""
    return core.within([(functools.partial(core.pause, 1), functools.partial(core.pause, -1))], body)


def record(seen, call, function, leaves, spec, line):
    """End a segment that leaves the arguments in memory of the part's own, run the function behind it, and bring what
    it returned into memory of the recording."""
    known = set(seen.blank)
    once = functools.cache(lambda k: bring_out(seen, leaves[k]))  # what is one tensor stays one
    first = describe.first_of(leaves)
    given = [once(first[id(x)]) if isinstance(x, torch.Tensor) else x for x in leaves]
    is_flat = spec == _pytree.tree_structure((tuple(given), {}))
    island = Island(function, given, spec, is_flat, line, not seen.cuts.islands, [], [])
    seen.cuts.islands.append((island, call))
    seen.alive.objects.append(island)
    real = functools.partial(constants.for_real, seen) if observe.is_capture(seen) else lambda body: body()
    end_segment(seen, island)
    before = len(seen.cuts.answers)
    # It may hand them to another thread, whose stream does not wait for that of a capture.
    settled = (lambda: torch.cuda.current_stream(seen.run.device).synchronize()) if observe.is_capture(seen) else None
    try:
        done, copies = real(lambda: beside(seen, lambda: run(island, seen.cuts.answers, settled)))
    except BaseException:
        if not observe.is_capture(seen) and len(seen.cuts.answers) > before:
            bring_back(leaves, seen.cuts.answers[-1])
        raise
    finally:
        for sid in (seen.blank.keys() - known).union(map(core.storage_id, tensors_of(leaves))):
            seen.blank.pop(sid, None)  # it may have filled it
        if observe.is_capture(seen) and len(seen.cuts.answers) > before:
            note_changes(seen)
    why = vet_result(seen, done.result, copies)
    if any(core.storage_id(leaves[k]) not in seen.made for k, *_ in done.written):
        why = "writes"
    why = why or ("changes" if has_changed(seen.run.plan) else None)
    if why is not None:
        observe.refuse(seen, errors.island(function.__qualname__, line, why))
        bring_back(leaves, done)
        return done.result
    for k, *_ in done.written:
        slim(leaves[k]).copy_(slim(island.leaves[k]))
    made, structure = flatten(done.result)
    detached = lambda: [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in made]  # noqa: E731
    mine = real(lambda: paused(detached))
    island.came.append(Came(mine, structure, {k for k, *_ in done.written}))
    brought = [bring_in(seen, x) if isinstance(x, torch.Tensor) else x for x in mine]
    return brought[0] if structure is None else _pytree.tree_unflatten(brought, structure)


def note_changes(seen):
    """What the part changed for real, while the capture around it may come to nothing."""
    plan, tensors = seen.run.plan, seen.run.plan.tensors
    singles, more = places.differing(plan.places, describe.is_guarded_as)
    wrote = any(core.version_of(t) != was.version for t, was in zip(tensors, plan.was, strict=True))
    graded = any(core.grad_id(tensors[k]) != was for k, was in plan.grads.items())
    changes = list(map(places.as_now, singles))
    seen.cuts.answers[-1] = seen.cuts.answers[-1]._replace(changes=changes, unsafe=more or wrote or graded)
    accept(seen.run.before)


def settle(seen: Seen, plan: Plan) -> None:
    """The recording becomes a node: what its guards compare, that its parts must not have changed where it is left."""
    free = {*plan.changes.moving, *plan.changes.free}
    for island, _ in seen.cuts.islands:
        island.places.extend(p for k, p in enumerate(plan.places) if k not in free)


def vet_parts(function: Callable[..., object], plan: Plan, seen: Seen) -> str | None:
    """A sentence if a replay could not know a part, or give it the objects that it was given, or if random numbers
    would come in another order; or None."""
    roots = (function, getattr(function, "__self__", None))
    known = {id(obj) for _, obj in plan.flat.objects} | {id(p.want) for p in plan.places} | set(map(id, roots))
    for island, call in seen.cuts.islands:
        objects = [x for x in island.leaves if not isinstance(x, torch.Tensor) and type(x) not in PLAIN_TYPES]
        if id(call) not in known or not all(id(x) in known or describe.is_constant(x) for x in objects):
            return errors.island(island.function.__qualname__, island.line, "objects")
        if seen.random:  # what the part draws would come behind all that the recording does
            return errors.island(island.function.__qualname__, island.line, "beside_draws")
    return None


def told(seen: Seen) -> list[str]:
    """[what runs eagerly, and where]"""
    parts = [f"{island.function.__qualname__} at {island.line}" for island, _ in seen.cuts.islands]
    return parts + [f"{part.op} at {part.line}" for part in seen.cuts.apart]


class Came(NamedTuple):
    """What a part returned when it was recorded."""

    leaves: list  # of the result; tensors are where replays bring them
    structure: Any
    writes: set  # which of the arguments' leaves it wrote


class Island(NamedTuple):
    """A function that replays call between two segments, with what it is given and what it returned."""

    function: Callable[..., object]
    leaves: list  # of its arguments
    spec: Any  # their structure
    is_flat: bool  # there are no keywords and no containers among these
    line: str
    first: bool  # of its call
    came: list  # one Came, once it ran in the recording
    places: list  # of the recording, once that is a node: those that guards compare

    def __call__(self) -> bool:
        """For the core, behind the segment: does the call go on as it was recorded?"""
        if self.first:
            LOCAL.ran = []
        before = list(map(core.version_of, getattr(LOCAL, "watched", ())))
        done = run(self, LOCAL.ran)[0]
        if before and list(map(core.version_of, LOCAL.watched)) != before:
            LOCAL.ran[-1] = done._replace(unsafe=True)
        return takes(self, done)

    def leave(self, due: bool, wrote: bool) -> None:
        """For the core: no more segments run. `due`: the call goes another way, from the top, where all is as it was
        until this part, the last that ran, is called again; guards stood before it. `wrote`: to tensors from outside,
        which is not undone."""
        ran, LOCAL.left, LOCAL.ran = LOCAL.ran, None, None
        if getattr(LOCAL, "kept", None) is not None:
            LOCAL.kept = ran
        if due:
            singles, more = places.differing(self.places, describe.is_guarded_as)
            changes = list(map(places.as_now, singles))
            for place in singles:
                places.put_back(place)
            LOCAL.left = [*ran[:-1], ran[-1]._replace(changes=changes, unsafe=more or wrote)]


def run(island, answers, settled=None):
    """Call the function with copies of its arguments: (the Answer, which comes to `answers`, too; the copies).
    `settled()`: wait for these."""
    copies = {id(x): copied(x) for x in island.leaves}
    given = [copies[id(x)] for x in island.leaves]
    tensors = {id(t): (k, t) for k, t in reversed(list(enumerate(given))) if isinstance(t, torch.Tensor)}.values()
    before = {k: core.version_of(t) for k, t in tensors}
    kept = list(map(copied, given)) if getattr(LOCAL, "compares", False) else []
    if settled is not None:
        settled()
    args, kwargs = (given, {}) if island.is_flat else _pytree.tree_unflatten(given, island.spec)
    result = error = None
    try:
        result = island.function(*args, **kwargs)
    except BaseException as raised:
        error = raised
    written = [(k, t, n) for k, t in tensors if (n := core.version_of(t) - before[k])]
    answers.append(Answer(island.function, result, error, written, given=kept))
    if error is not None:
        raise error
    if not island.is_flat:
        leaves, spec = _pytree.tree_flatten((args, kwargs))
        if spec != island.spec or any(a is not b for a, b in zip(leaves, given, strict=True)):
            raise errors.CgtError(errors.island(island.function.__qualname__, island.line, "changes_containers"))
    for k, t, _ in written:
        slim(island.leaves[k]).copy_(slim(t.detach()))
    return answers[-1], given


def bring_back(leaves, done):
    """What a part made of its copies comes to the arguments themselves, which count its writes."""
    for k, t, n in done.written:
        slim(leaves[k]).copy_(slim(t.detach()))
        if not leaves[k].is_inference():
            torch.autograd.graph.increment_version([leaves[k]] * (n - 1))


def takes(island, done):
    """Bring what it returned to where the recording reads it, if it is like what was recorded."""
    (came,), (leaves, structure) = island.came, flatten(done.result)
    same = structure == came.structure and all(map(alike, leaves, came.leaves))
    if not (same and {k for k, *_ in done.written} <= came.writes):
        return False
    for mine, x in zip(came.leaves, leaves, strict=True):
        if isinstance(mine, torch.Tensor):
            mine.copy_(x)  # neither requires grad
    return True


def flatten(result):
    """(leaves, structure) of what a part returned; None is that of a leaf, as a torch.Size is one."""
    if isinstance(result, torch.Tensor) or type(result) in PLAIN_TYPES:
        return [result], None
    return _pytree.tree_flatten(result)


def copied(t):
    """A plain value; or a tensor of the part's own, laid out as this one is, also in inference mode one that tells
    whether it was written."""
    if not isinstance(t, torch.Tensor):
        return t
    if not t.is_inference() and t.is_contiguous() and core.address(t) % options.ALIGN[t.device.type] == 0:
        return t.clone()

    def make():
        room = observe.buffer_for(t, inference=False)
        observe.fill(room, t)
        return room.view(t.dtype).as_strided(t.shape, t.stride())

    return core.in_inference(False, make)


def alike(x, was):
    """Can the recording go on with this part of a result? Plain values are compared bit for bit: 0.0 is not -0.0, and a
    NaN is itself."""
    if type(x) is not type(was):
        return False
    if not isinstance(x, torch.Tensor):
        return repr(x) == repr(was)
    facts = [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in (x, was)]
    return facts[0] == facts[1] and core.is_plain(x)


def same(x, was):
    """Is this argument of a part what it was, bit for bit but for which NaN it is? A copy of a Parameter is a tensor.
    Objects are not compared."""
    if not isinstance(was, torch.Tensor):
        return type(was) not in PLAIN_TYPES or alike(x, was)
    kind = isinstance(x, torch.Tensor) and (x.shape, x.dtype) == (was.shape, was.dtype)
    return kind and torch.allclose(x.detach(), was, rtol=0, atol=0, equal_nan=True)


def keep_answers(tensors: list[torch.Tensor], compares: bool) -> None:
    """Of the replay that this thread makes next, until they are taken; those whose parts wrote to these tensors are
    unsafe. `compares`: with what the parts were given, which eager is to give them, too."""
    LOCAL.kept, LOCAL.watched, LOCAL.compares, LOCAL.differs = [], tensors, compares, None


def took_other() -> str | None:
    """The part that was given something else when the call ran eagerly, and ran again therefore."""
    return getattr(LOCAL, "differs", None)


def take_answers() -> list[Answer]:
    kept, LOCAL.kept, LOCAL.watched, LOCAL.compares = LOCAL.kept, None, (), False
    return kept


# --- a call that runs once more ----------------------------------------------------------------------


def take_left() -> list[Answer]:
    """Answers of the replay that just found that its call goes another way."""
    left, LOCAL.left = LOCAL.left, None
    return left


def answering(answers: list[Answer], body: Callable[[], T]) -> T:
    """body(), which runs a call's function once more: parts that ran already are not run again. The caller holds the
    paths, so that jitted functions inside are plain."""
    LOCAL.due = list(answers)
    try:
        return body()
    finally:
        LOCAL.due = None


def answer(due, function, args, kwargs):
    """What came of this call when it was made."""
    done = due.pop(0)
    if getattr(done.function, "__code__", done.function) is not getattr(function, "__code__", function):
        raise errors.CgtError(errors.island(function.__qualname__, "its second run", "another_order"))
    leaves = _pytree.tree_leaves((args, kwargs))
    if not paused(lambda: all(itertools.starmap(same, zip(leaves, done.given, strict=False)))):
        LOCAL.differs = function.__qualname__
        return paused(lambda: function(*args, **kwargs))
    bring_back(leaves, done)
    for place in done.changes:
        places.put_back(place)
    if done.error is not None:
        raise done.error
    return done.result
