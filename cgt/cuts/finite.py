"""Which op of a replay made the first NaN or infinity (`CGT_NAN=1`).

While a function is recorded, the largest magnitude of each tensor of floating point that an op makes or writes, and of
each from outside that it reads, is recorded beside it (a norm, which a NaN passes through), into memory that all
recordings of a device share; the last thing a replay does is to bring these numbers to the host. There the first op is
sought that made a NaN of none, or an infinity of none: a mask that was filled with infinities on purpose, by a number
of the program's, is not told."""

import functools
import math

import cgt_core as core
import torch
from cgt_core import DICT_ITEM

from ..data import Seen
from ..look.places import MISSING, Place
from ..run import tape
from ..run.observe import exchange, fix, is_capture, is_host_recording, unseen, user_line, warn
from ..words import errors, options
from ..words.private import OpOverload
from ..words.pytree import Readout
from . import readout

MOST = 4096  # tensors of one recording that are looked at
NORM = torch.ops.aten.linalg_vector_norm.out
MAGNITUDES = {}  # device -> where their magnitudes come; made while nothing is captured
FOUND = {}  # name of a function -> what was found in its last replay


def ready(device: int) -> None:
    """Before a recording on this device begins."""
    if options.NAN and device not in MAGNITUDES:
        empty = functools.partial(
            torch.zeros, MOST, dtype=torch.float64, device="cpu" if device < 0 else f"cuda:{device}"
        )
        MAGNITUDES[device] = core.in_inference(False, empty)


def note(
    seen: Seen, op: OpOverload, args: tuple, kwargs: dict[str, object], inputs: list[torch.Tensor],
    fresh: list[torch.Tensor], written: list[torch.Tensor],
) -> None:  # fmt: skip
    """An op ran, which made and wrote these."""
    if (
        not options.NAN
        or not (is_capture(seen) or is_host_recording(seen))
        or seen.run.graph is not None
        or seen.cuts.bodies
    ):
        return
    made, inputs = [*fresh, *exchange(seen, written)], exchange(seen, inputs)
    given = [
        k for t in inputs if core.storage_id(t) not in set(map(core.storage_id, made)) for k in magnitudes_of(seen, t)
    ]
    fills = op.overloadpacket.__name__ not in tape.EMPTY
    came = [measure(seen, t) for t in made if fills and can_be_measured(seen, t)]
    numbers = [x for x in (*args, *kwargs.values()) if type(x) is float]
    if came:
        seen.finite.ops.append(
            (str(op), user_line(seen), given, came, any(map(math.isinf, numbers)), any(map(math.isnan, numbers)))
        )


def can_be_measured(seen, t):
    return (
        t.is_floating_point() and t.numel() and core.is_plain(t) and t.get_device() == seen.run.device
        and len(seen.finite.measured) < MOST
    )  # fmt: skip


def magnitudes_of(seen, t):
    """Where the magnitudes of what lies in t's memory are, of all its parts."""
    sid = core.storage_id(t)
    if not any(sid == memory for memory in seen.finite.measured) and can_be_measured(seen, t):
        measure(seen, t)
    return [k for k, memory in enumerate(seen.finite.measured) if memory == sid]


def measure(seen, t):
    """Record that t's magnitude is taken; where it comes."""
    k = len(seen.finite.measured)
    slots = MAGNITUDES[seen.run.device]
    seen.finite.measured.append(core.storage_id(t))
    with unseen(seen):
        t, into = fix(seen, t.detach()), {"dtype": torch.float64, "out": slots[k]}
        NORM(t, math.inf, **into)
        if is_host_recording(seen):
            tape.append(NORM, (t, math.inf), into, [into["out"]])
    return k


def close(seen: Seen, name: str) -> None:
    """The function has run: the magnitudes come to the host, where a replay makes of them what it found."""
    if not seen.finite.ops or seen.reason is not None:
        return
    slots = MAGNITUDES[seen.run.device][: len(seen.finite.measured)]
    left = readout.leave(seen, slots, tuple(slots.shape))
    if left is None:
        return
    words, value = left
    one = Readout(words, functools.partial(look, name, tuple(seen.finite.ops)), "")
    seen.readouts.rows.append((one, value))
    seen.own.append(Place(DICT_ITEM, FOUND, name, MISSING, f"NaNs found in {name}"))
    FOUND[name] = one


def look(name, ops, words):
    """What the first op is that made one, which is warned of; or None."""
    magnitudes = words.tolist()
    for op, line, given, came, infinite, nan in ops:
        before, after = ([magnitudes[k] for k in at] for at in (given, came))
        makes_nan = any(map(math.isnan, after)) and not (nan or any(map(math.isnan, before)))
        if makes_nan or (any(map(math.isinf, after)) and not (infinite or any(not math.isfinite(x) for x in before))):
            told = errors.not_finite(name, "NaN" if makes_nan else "infinity", op, line)
            warn(told)
            return told
    return None
