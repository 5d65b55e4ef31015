"""Numbers that lie in 0-dim tensors of the host's and are asked for: `step` in the state of PyTorch's optimizers.

    step += 1
    param.addcdiv_(average, root, value=-lr / (1 - 0.9 ** step.item()))

What is read there is another number at each call, so a recording for its value would serve one call. It is a live
number (live.py) that lies in a tensor's memory: item() gives a stand-in, an op that adds a number is a step, and a
replay writes what came of it back. Such an op runs for real while it is recorded, in a capture too. Where anything else
is done to the tensor, it is an ordinary one from the next recording on."""

import array
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cgt_core as core
import torch
from cgt_core import AS_FLOAT, CUDA, DIVIDED, IN_TENSOR, NONE, ROUNDED

from ..data import Around, Plan, Seen, State, remember
from ..run.observe import NOT_USER_CODE, asker, refuse, unseen, user_line
from ..words import errors
from ..words.pytree import Flat
from .standins import OPERATORS, STAND_INS, Source, Step, plain_of

WIDE = {torch.float64, torch.int64}  # dtypes whose arithmetic is Python's
DTYPES = WIDE | {torch.float32}
HOW = {"add": "add", "sub": "sub", "mul": "mul", "div": "truediv"}  # what an op does -> Python's name for it
STEPS = {f"{head}{name}_": OPERATORS[how] for head in ("", "_foreach_") for name, how in HOW.items()}
JOIN_TRIES = 2  # recordings thrown away in a row: one that makes them, one that finds them in their places


class Counter(NamedTuple):
    path: str
    tensor: Any
    source: int  # row of what it held when the call began
    row: int  # of what it holds now
    moved: bool = False


def fits(t: torch.Tensor) -> bool:
    """Can it be one? Its memory must be its own."""
    mine = type(t) is torch.Tensor and t.device.type == "cpu" and not (t.dim() or t.requires_grad)
    plain = t.dtype in DTYPES and core.is_plain(t) and not t.is_inference()
    return mine and plain and core.storage_bytes(t) == t.element_size()


# --- which they are ---------------------------------------------------------------------------


def sources_of(state: State, flat: Flat, around: Around) -> list[Source]:
    """[standins.Source] of the counters among a plan's tensors, none of which is a gradient."""
    tensors = [*flat.tensors, *(r.tensor if r.owner == NONE else None for r in around.reached)]
    mine = [(k, path, t) for k, (path, t) in enumerate(zip(around.paths, tensors, strict=True)) if t is not None]
    asked = [(k, path, t) for k, path, t in mine if is_asked(state.learnt.numbers, path, t) and fits(t)]
    shared = memory_in_common([t for _, _, t in mine]) if asked else ()
    alone = [(k, path, t.item()) for k, path, t in asked if core.storage_id(t) not in shared]
    return [Source(path, IN_TENSOR, k, value, None) for k, path, value in alone if math.isfinite(value)]


def is_asked(known, path, t):
    return (path in known.counters or core.storage_id(t) in known.asked) and path not in known.exact


def memory_in_common(tensors):
    """Memory that several of these have, or that shares bytes with that of others: of one array of NumPy's, say."""
    shared, end, last = set(), 0, None
    rows = [(core.storage_address(t), core.storage_bytes(t), core.storage_id(t)) for t in tensors]
    for at, nbytes, sid in sorted(rows):
        if at < end:
            shared.update((sid, last))
        if at + nbytes > end:
            end, last = at + nbytes, sid
    return shared


def learn(state: State, plan: Plan | None, seen: Seen, why_untraced: Callable[[], str | None]) -> str | None:
    """After a run: what was asked is a counter from the next one on. A sentence if that helps, or None."""
    joined = seen.live is not None and seen.live.joined and may_join(state)
    if joined:
        seen.live.exact.clear()  # what it found is not learnt
    elif seen.live is not None:
        state.learnt.numbers.exact.update(seen.live.uncounted)
    state.learnt.numbers.asked.update(seen.host.asked)
    if plan is None or not (joined or seen.host.asked) or why_untraced() is not None:
        return None
    paths, known = plan.paths, state.learnt.numbers.counters | state.learnt.numbers.exact.keys()
    asked = [path for path, t in zip(paths, plan.tensors, strict=True) if core.storage_id(t) in seen.host.asked]
    fresh = [path for path in asked if path not in known]
    if not (fresh or joined):
        return None
    state.learnt.numbers.counters.update(fresh)
    return errors.reads_counter(fresh[0]) if fresh else errors.counters_join(seen.live.joined)


def may_join(state):
    """Others joined those that are known: another try? A function that makes some at each call will not replay."""
    replays, (before, tries) = core.fn_counts(state.f)[3], state.learnt.joined
    tries = tries + 1 if replays == before else 1
    remember(state, joined=(replays, tries))
    return tries <= JOIN_TRIES


# --- a run ------------------------------------------------------------------------------------


def begin(seen: Seen) -> None:
    """Those that hold the same number are one for as long as they do: an optimizer's steps are all at the same."""
    trace, first = seen.live, {}
    for row, source in enumerate(trace.sources if trace is not None else ()):
        if source.op != IN_TENSOR:
            continue
        t = seen.run.plan.tensors[source.at]
        alike = first.setdefault((t.dtype, repr(source.value)), row)
        if alike != row:
            trace.steps[row] = trace.steps[row]._replace(b=alike)
        trace.counters[core.storage_id(t)] = Counter(source.path, t, row, alike)


def ask(seen: Seen, name: str, t: torch.Tensor) -> int | float | None:
    """What a tensor is told of that is asked for its number: a stand-in; None: that is its own affair."""
    if name != "item":
        return None
    one = seen.live.counters.get(core.storage_id(t)) if seen.live is not None else None
    if one is not None:
        to_user = seen.run.plan.numbers.wary and not asker().f_code.co_filename.startswith(NOT_USER_CODE)
        return None if seen.live.over or to_user else seen.live.stand_in(one.row)
    # The latter is one that this call begins.
    if may_count(seen, t) or (not seen.run.recording and core.storage_id(t) in seen.constants.memory and fits(t)):
        seen.host.asked.add(core.storage_id(t))
    return None


def may_count(seen, t):
    """Could the next run have this one, from outside?"""
    return core.storage_id(t) not in seen.made and not seen.cuts.bodies and seen.run.graph is None and fits(t)


def passes(seen: Seen, facts: Any, args: Sequence, inputs: list[torch.Tensor], written: list[torch.Tensor]) -> bool:
    """Does an op of a warm-up do what a recording will do with counters?"""
    if not written:
        names = set(map(core.storage_id, inputs))
        return facts.reads and not seen.run.recording and bool(names) and names <= seen.host.asked - seen.made.keys()
    may = seen.run.driver == CUDA and all(may_count(seen, t) for t in written)
    if not may or changes(seen, facts, args, {}) is None:
        return False
    seen.host.asked.update(map(core.storage_id, written))
    return not seen.run.recording


def see(seen: Seen, call: Any) -> bool:
    """An op is about to run (ops.OpCall), on counters perhaps. True: that was all of it. Else it is as others are."""
    if seen.live is None or not seen.live.counters:
        return False
    known = seen.live.counters
    found = {sid: known[sid] for sid in map(core.storage_id, call.inputs) if sid in known}
    if not found:
        return False
    by = changes(seen, call.facts, call.args, call.kwargs)
    counted = [core.storage_id(t) for t in listed(call.args[0])] if by is not None else []
    if counted != list(found):
        mine = found.keys() | seen.constants.memory.keys()
        if counted and all(core.storage_id(t) in mine or may_count(seen, t) for t in listed(call.args[0])):
            seen.live.joined = user_line(seen)
        for one in found.values():
            give_up(seen, one, str(call.op))
        return False
    core.proceed(None)
    for one, number in zip(found.values(), by, strict=True):
        count(seen, one, STEPS[call.facts.packet], number, str(call.op))
    return True


def listed(given):
    return given if type(given) in (list, tuple) else [given]


def changes(seen, facts, args, kwargs):
    """What each of an op's tensors is changed by, if that is all it does and these are numbers; or None."""
    if facts.packet not in STEPS or kwargs.get("alpha", 1) != 1 or len(args) != 2:
        return None
    by = args[1]
    if type(by) is torch.Tensor and by.dim() == 0 and not by.is_cuda and core.storage_id(by) in seen.constants.memory:
        with unseen(seen):
            by = by.item()
    numbers = list(by) if type(by) in (list, tuple) else [by] * len(listed(args[0]))
    if not all(type(x) in (int, float) and math.isfinite(x) for x in numbers) or len(numbers) != len(listed(args[0])):
        return None
    for k, part, node in core.numbers_of_op():
        if k == 1 and seen.live is not None and node.trace is seen.live:
            one = STAND_INS[type(node.value) is int](node)
            numbers = [one if part in (NONE, j) else x for j, x in enumerate(numbers)]
    return numbers


def count(seen, one, how, by, op):
    """A counter was changed by a number, a stand-in or a constant."""
    trace, t = seen.live, one.tensor
    seen.written.add(core.storage_id(t))
    one = one._replace(moved=True)
    with unseen(seen):
        now = t.item()
    wide = t.dtype in WIDE
    number, row = plain_of(by), trace.row_of(by)
    if type(number) is int and type(now) is float:
        number, row = float(number), trace.add(Step(AS_FLOAT, row, row, float(number)))
    if not wide:  # each operand and the result are of 32 bits, and 64 are enough for what is between
        number = array.array("f", [number])[0]
        row = trace.add(Step(ROUNDED, row, row, number))
    then = trace.steps[one.row].value
    if type(number) is not type(now) or not math.isfinite(now) or (how[0] == DIVIDED and number == 0):
        give_up(seen, one, op)
        return
    step, function = how
    result = function(then, number)
    if now != (result if wide else array.array("f", [result])[0]):
        give_up(seen, one, op)
        return
    row = trace.add(Step(step, one.row, row, result))
    if not wide:
        row = trace.add(Step(ROUNDED, row, row, now))
    trace.counters[core.storage_id(t)] = one._replace(row=row)


def give_up(seen, one, what):
    """It is an ordinary tensor, and the recording for today's bytes; there is none if it was counted in before."""
    trace = seen.live
    trace.pin(one.source)
    trace.uncounted[one.path] = user_line(seen)
    trace.counters.pop(core.storage_id(one.tensor), None)
    if one.moved:
        seen.again = True
        refuse(seen, errors.counter_used(what, user_line(seen), one.path))


def end(seen: Seen) -> None:
    """From here on what is not seen may look at their memory."""
    for one in list(seen.live.counters.values()) if seen.live is not None else ():
        give_up(seen, one, "what runs eagerly")


# --- a recording ------------------------------------------------------------------------------


def rows_of(seen: Seen) -> dict[int, int]:
    """{memory: the row of the number that a replay leaves there}"""
    found = seen.live.counters.items() if seen.live is not None else ()
    return {sid: one.row for sid, one in found if one.moved}


def snapshot(plan: Plan) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """What a capture that comes to nothing puts back: [(tensor, its bytes, its version)]."""
    return as_now([(plan.tensors[s.at],) for s in plan.numbers.sources if s.op == IN_TENSOR])


def as_now(before: list[tuple]) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    return [(t, t.clone(), t._version) for t, *_ in before]


def put_back(before: list[tuple[torch.Tensor, torch.Tensor, int]]) -> None:
    for t, was, version in before:  # an op that was left in the middle has not raised the version yet
        t.data.copy_(was)
        core.set_version(t, version)
