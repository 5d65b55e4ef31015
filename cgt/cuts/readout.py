"""What a function reads only to hand it out: `return loss.item()`, `return tokens.tolist()`, a copy of a result on the
host; only to keep it: `self.last = float(loss)`, `self.losses.append(loss.item())`; only to compare it: `while
err.item() > 1e-3:`; or only to compute with it what becomes one of these: `self.total += loss.item() * n`.

What is handed out or kept nobody in the call looks at (returns.py tells), so it chooses no way and ends no segment. The
graph leaves the bytes on the host with the rest of its work; a replay waits for it, and makes of them what the recorded
call would have returned. What is compared is compared where it lies; the outcome is read as any value (segments.py).
Arithmetic is Python's own, done when the number has come; of a sum (moving.py) with what lies in its place then.

While a function is recorded, a `Readout` (pytree.py) stands for what will be made, and comes to the result in its
place. float() is not content with one: there a number of its own stands for it, which nobody else has."""

import functools
import operator
import types
from collections.abc import Callable
from typing import Any

import cgt_core as core
import torch
from cgt_core import CELL, CUDA, LIST_LEN

from ..data import Seen
from ..look import containers, places, returns
from ..numbers import live, standins
from ..run import observe, tape
from ..words import errors
from ..words.pytree import Readout
from . import segments

EXACT = 1 << 53  # whole numbers up to here are themselves as floats of 64 bits
FLOAT = "__float__"
MAKERS = {  # of the bytes on the host
    "item": torch.Tensor.tolist, "tolist": torch.Tensor.tolist, "cpu": torch.Tensor.clone,
    FLOAT: torch.Tensor.__float__,
}  # fmt: skip
ANSWERS = ("item", "tolist", "numpy")  # what a Readout can be asked for in its turn
OPS = ("item", "cpu", FLOAT)  # methods that an op will tell of
NOWHERE = (None, None)  # of summed_in


def note(
    seen: Seen, name: str, t: torch.Tensor, given: list, runner: types.CodeType, function: Callable[..., object],
    args: tuple,
) -> object:  # fmt: skip
    """The function, which code `runner` runs with args, or a helper calls a method of t, with or without arguments
    given. What it gets if only comparisons, places and the result get it; None: the method's own answer."""
    if core.storage_id(t) in seen.readouts.handed and name in ANSWERS:  # of a warm-up
        with observe.unseen(seen):
            return getattr(t, name)()
    if name not in MAKERS or given or not may_wait(seen, t, name):
        return None
    uses = returns.uses_behind(observe.asker(), ANSWERS, runner, function, args)
    if uses is None or not may_be(seen, name, uses):
        return None
    observe.touch(seen, t)
    seen.devices.add(t.device)
    if observe.is_capture(seen) or observe.is_host_recording(seen):
        return stand_in(seen, name, t, uses)
    with observe.unseen(seen):
        answer = getattr(t, name)()
    if name == "cpu":
        seen.readouts.handed[core.storage_id(answer)] = core.alias(answer)
    return answer


def may_be(seen, name, uses):
    """May what this method gives have these uses? While a function is recorded the places must be known, where only
    what is computed later comes to: nobody reads them."""
    kept = [use for use in uses if type(use) is returns.Kept]
    used = any(use in (returns.COMPARED, returns.COMPUTED) for use in uses)
    if (used and name != "item") or (kept and name not in ("item", FLOAT)):
        return False
    plan = seen.run.plan
    stored = plan is None or all(any(is_at(use, put.place, put.owner) for put in plan.found.kept) for use in kept)
    return stored or summed_in(plan, uses) != NOWHERE


def summed_in(plan, uses):
    """(the place to which this only comes, as a part of a sum, its position), or NOWHERE."""
    others = [use for use in uses if use != returns.COMPUTED]
    if len(others) != 1 or type(others[0]) is not returns.Kept or returns.COMPUTED not in uses:
        return NOWHERE
    summed = ((plan.places[k], k) for k in plan.numbers.summed)
    return next(((p, k) for p, k in summed if is_at(others[0], p, plan.found.owners.get(id(p.home)))), NOWHERE)


def is_at(use, place, owner):
    """Is this place, whose home is the owner's if there is one, where it is kept?"""
    if use.name is None:
        return place.home is use.home and place.kind in (CELL, LIST_LEN)
    return place.key == use.name and (place.home is use.home or owner is use.home)


def may_wait(seen, t, name):
    """May these bytes come when the recording is over?"""
    if seen.reason is not None or seen.run.graph is not None or seen.cuts.bodies or core.is_in_node():
        return False
    here = t.is_cuda == (seen.run.driver == CUDA) or not seen.run.recording
    fits = t.numel() == 1 if name in ("item", FLOAT) else 0 < t.numel() * t.element_size() <= segments.VALUE_BYTES
    simple = (
        t.dtype != torch.uint64 and type(t) in (torch.Tensor, torch.nn.Parameter) and core.is_plain(t)
        and not t.is_complex() and not t.is_neg()
    )  # fmt: skip
    return (
        simple and here and fits and not segments.is_known(seen, t)
        and (name != "cpu" or (t.is_cuda and not t.requires_grad))
    )  # fmt: skip


def stand_in(seen, name, t, uses):
    """What the function gets in place of what it asks for."""
    compare = words = value = None
    if returns.COMPARED in uses:  # with what it is now: t may be written before
        wide = torch.float64 if t.is_floating_point() else torch.int64
        compare = functools.partial(compared, t.detach().to(wide, copy=True).reshape(()), t.dtype)
    if uses.count(returns.COMPARED) != len(uses):
        found = leave(seen, t, () if name == "item" else tuple(t.shape))
        if found is None:
            observe.refuse(seen, errors.reads_too_much(observe.user_line(seen)))
            return None
        words, value = found
    one = Readout(words, MAKERS[name], observe.user_line(seen), compare)
    if returns.COMPUTED in uses:
        one.compute = functools.partial(computed, *summed_in(seen.run.plan, uses))
        one.read = functools.partial(read, seen, [t, None if t.is_inference() else t._version, value])
    seen.readouts.rows.append((one, value))
    if name != FLOAT:
        return one
    with observe.unseen(seen):
        number = float("nan") if value is None else MAKERS[FLOAT](value)  # nobody else has this very one
    seen.readouts.numbers[id(number)] = (number, one)
    return number


def computed(place, at, op, operands):
    """Arithmetic with a Readout, and with what lies in the place of a sum: another one. With what is no number, or
    where the numbers of another call could raise, it is read."""
    parts = [part_of(place, at, x) for x in operands]
    if None in parts or (op is operator.truediv and (callable(parts[1]) or not parts[1])):
        return op(*(x.read() if type(x) is Readout else x for x in operands))
    one = next(x for x in operands if type(x) is Readout)
    formula, again = (functools.partial(live.calculate, op, *made) for made in (parts, map(reader_of, operands)))
    return Readout(one.words, lambda _: formula(), one.line, None, one.compute, again)


def part_of(place, at, x):
    """A number, or what makes it when the call's numbers have come; None: it is none."""
    if type(x) is Readout:
        return functools.partial(x.make, x.words)
    if type(x) in standins.STAND_INS:
        return live.formula(x, at, place)
    return x if type(x) in (int, float, bool) else None


def reader_of(x):
    """What reads it now, or itself. A stand-in must not be kept."""
    return x.read if type(x) is Readout else x.node.plain if type(x) in standins.STAND_INS else x


def read(seen, known):
    """The number after all, as if it had not been known what becomes of it."""
    t, version, value = known
    if version is not None and t._version == version:
        return t.item()
    observe.refuse(seen, errors.host_read("Tensor.item", observe.user_line(seen)))
    if value is None:
        raise observe.Unrecordable(seen.reason)
    return MAKERS["item"](value)


def compared(number, dtype, op, other):
    """A comparison of a number, made where it lies and as Python makes it, in 64 bits: its outcome is read, of which
    there are two. What cannot be compared so exactly is read itself."""
    if type(other) is Readout:
        theirs, other_dtype = other.compare.args
        if theirs.dtype == number.dtype:
            return bool(op(number, theirs))
        other = theirs.to(other_dtype).item()
    elif (type(other) in (int, bool) and abs(other) <= EXACT) or (type(other) is float and number.is_floating_point()):
        return bool(op(number, other))
    return op(number.to(dtype).item(), other)


def leave(seen: Seen, t: torch.Tensor, shape: tuple) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Record that t's bytes come to the host: (where, on the host a copy of them), or None: there is no room."""
    with observe.unseen(seen):
        room, value = segments.room_for(seen, t, t.dtype), None
        if room is None:
            return None
        words, t = room.view(t.dtype).view(shape), observe.exchange(seen, t.detach())
        if observe.is_capture(seen):
            core.fetch(core.address(words), t.contiguous(), room.numel())
        else:
            value = t.clone().view(shape)
            tape.copy_into(words.view(t.shape), observe.fix(seen, t))
    return words, value


def close(seen: Seen) -> None:
    """The run is over: nothing is compared or computed any more, and no recording holds what was."""
    for one, _ in seen.readouts.rows:
        if one.read is not None:
            one.read.args[-1].clear()  # others may compute with it
        one.compare = one.compute = one.read = None


def bring(seen: Seen) -> None:
    """What the recording's own run computed comes to where a replay would leave it. The caller holds the paths."""
    for one, value in seen.readouts.rows:
        if value is not None:
            core.in_inference(one.words.is_inference(), functools.partial(one.words.copy_, value))


def fill(seen: Seen, result: object) -> object:
    """The result, with what was computed in place of what stands for it, there and where the function kept it: for a
    call that is no recording after all."""
    if not seen.readouts.rows:
        return result
    bring(seen)
    if seen.run.driver == CUDA:
        torch.cuda.current_stream(seen.run.device).synchronize()

    def made(leaf):
        one = marked(seen, leaf)
        return one.make(one.words) if type(one) is Readout else one

    def filled(value):
        return containers.replaced(value, made, set())

    plan = seen.run.plan
    sums = [place for k in plan.numbers.summed if type(places.value_at(place := plan.places[k])) is Readout]
    for place in (*(put.place for put in plan.found.kept), *seen.own, *sums):
        if place.kind == LIST_LEN:
            place.home[place.want :] = map(filled, place.home[place.want :])
        elif (now := places.value_at(place)) is not place.want:
            places.put_back(place._replace(want=filled(now)))
    return filled(result)


def marked(seen: Seen, value: object) -> Any:
    """The value, with the Readout in place of each number that stands for one."""
    if not seen.readouts.numbers:
        return value
    numbers = seen.readouts.numbers
    stood_for = lambda leaf: numbers.get(id(leaf), (None, leaf))[1] if type(leaf) is float else leaf  # noqa: E731
    return containers.replaced(value, stood_for, set())
