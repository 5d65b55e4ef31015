"""What a function reads only to hand it out: `return loss.item()`, `return tokens.tolist()`, a copy of a result on the host;
or only to compare it: `while err.item() > 1e-3:`.

What is handed out nobody in the call looks at (returns.py tells), so it chooses no way, ends no segment, and may be another
one at each call. The graph leaves the bytes on the host with the rest of its work; a replay waits for it, and makes of
them what the recorded call would have returned. What is compared is compared where it lies, and the outcome is read as
any value (segments.py).

While a function is recorded, a `Readout` (pytree.py) stands for what will be made, and comes to the result in its place.
"""

import functools
import operator

import cgt_core as core
import torch
from cgt_core import CUDA

from . import errors, returns, segments, tape
from .observe import (
    asker,
    exchange,
    fix,
    is_capture,
    is_host_recording,
    refuse,
    touch,
    unseen,
    user_line,
)
from .pytree import Readout

EXACT = 1 << 53  # whole numbers up to here are themselves as floats of 64 bits
MAKERS = {"item": torch.Tensor.tolist, "tolist": torch.Tensor.tolist, "cpu": torch.Tensor.clone}  # of the bytes on the host
ANSWERS = ("item", "tolist", "numpy")  # what a Readout can be asked for in its turn
OPS = ("item", "cpu")  # methods that an op will tell of


def note(seen, name, t, given, runner, function):
    """The function, which code `runner` runs, or a helper calls a method of t, with or without arguments given. What it gets if only
    comparisons and the result get it; None: the method's own answer."""
    if core.storage_id(t) in seen.handed and name in ANSWERS:  # of a warm-up
        with unseen(seen):
            return getattr(t, name)()
    if name not in MAKERS or given or not may_wait(seen, t, name):
        return None
    uses = returns.uses_behind(asker(), ANSWERS, runner, function)
    if uses is None or (returns.COMPARED in uses and name != "item"):
        return None
    touch(seen, t)
    seen.devices.add(t.device)
    if is_capture(seen) or is_host_recording(seen):
        return stand_in(seen, name, t, uses)
    with unseen(seen):
        answer = getattr(t, name)()
    if name == "cpu":
        seen.handed[core.storage_id(answer)] = core.alias(answer)
    return answer


def may_wait(seen, t, name):
    """May these bytes come when the recording is over?"""
    if seen.reason is not None or seen.graph is not None or seen.bodies or core.is_in_node():
        return False
    here = t.is_cuda == (seen.driver == CUDA) or not seen.recording
    fits = t.numel() == 1 if name == "item" else 0 < t.numel() * t.element_size() <= segments.VALUE_BYTES
    simple = t.dtype != torch.uint64 and type(t) in (torch.Tensor, torch.nn.Parameter) and core.is_plain(t) and not t.is_complex() and not t.is_neg()
    return simple and here and fits and not segments.is_known(seen, t) and (name != "cpu" or (t.is_cuda and not t.requires_grad))


def stand_in(seen, name, t, uses):
    """What the function gets in place of what it asks for."""
    compare = words = value = None
    if returns.COMPARED in uses:  # with what it is now: t may be written before
        wide = torch.float64 if t.is_floating_point() else torch.int64
        compare = functools.partial(compared, t.detach().to(wide, copy=True).reshape(()), t.dtype)
    if returns.RETURNED in uses:
        found = leave(seen, name, t)
        if found is None:
            return None
        words, value = found
    one = Readout(words, MAKERS[name], user_line(seen), compare)
    seen.readouts.append((one, value))
    return one


def compared(number, dtype, op, other):
    """A comparison of a number, made where it lies and as Python makes it, in 64 bits: its outcome is read, of which there
    are two. What cannot be compared so exactly is read itself."""
    if type(other) is Readout:
        theirs, other_dtype = other.compare.args
        if theirs.dtype == number.dtype:
            return bool(op(number, theirs))
        other = theirs.to(other_dtype).item()
    elif (type(other) in (int, bool) and abs(other) <= EXACT) or (type(other) is float and number.is_floating_point()):
        return bool(op(number, other))
    return op(number.to(dtype).item(), other)


def leave(seen, name, t):
    """Record that t's bytes come to the host: (where, on the host a copy of them), or None: there is no room."""
    shape = () if name == "item" else tuple(t.shape)
    with unseen(seen):
        room, value = segments.room_for(seen, t), None
        if room is None:
            refuse(seen, errors.reads_too_much(user_line(seen)))
            return None
        words, t = room.view(t.dtype).view(shape), exchange(seen, t.detach())
        if is_capture(seen):
            core.fetch(core.address(words), t.contiguous(), room.numel())
        else:
            value = t.clone().view(shape)
            tape.copy_into(words.view(t.shape), fix(seen, t))
    return words, value


def close(seen):
    """The run is over: nothing is compared any more, and no recording holds what was."""
    for one, _ in seen.readouts:
        one.compare = None


def bring(seen):
    """What the recording's own run computed comes to where a replay would leave it. The caller holds the paths."""
    for one, value in seen.readouts:
        if value is not None:
            one.words.copy_(value)


def fill(seen, result):
    """The result, with what was computed in place of what stands for it: for a call that is no recording after all."""
    if not seen.readouts:
        return result
    bring(seen)
    if seen.driver == CUDA:
        torch.cuda.current_stream().synchronize()
    return filled(result, set())


def filled(value, done):
    """Tuples, lists and dicts alone can hold one; some of them may be the user's, and hold themselves."""
    if type(value) is Readout:
        return value.make(value.words)
    if type(value) not in (list, dict, tuple) or id(value) in done:
        return value
    done.add(id(value))
    if type(value) is tuple:
        parts = tuple(filled(one, done) for one in value)
        return value if all(map(operator.is_, parts, value)) else parts
    for key, one in list(enumerate(value) if type(value) is list else value.items()):
        value[key] = filled(one, done)
    return value
