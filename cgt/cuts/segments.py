"""Values that the function reads on the way: `if` on a tensor, item and tolist, nonzero, a copy on the host.

What was recorded until then becomes a segment: it runs, leaves the value on the host, and recording goes on behind it,
for that value alone. A replay runs segment by segment (core/segments.pxi), and another way for another value.

Where it finds a way that nobody recorded, the function is run from the top. So what comes before a read may happen
twice, and is undone before: random numbers are given back, and memory from outside that is written is copied first,
where the function is known to read behind that. A .grad that is still there when a value is read must not lie where
something ran until then. A number of floating point is another one at each call: its bytes are no guard (live.py)."""

import functools
import math
import struct
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import cgt_core as core
import torch
from cgt_core import CUDA, HOST, NONE, SETS_GRAD

from ..data import Draft, Seen
from ..run import constants, tape
from ..run.observe import exchange, fix, is_capture, is_host_recording, note_memory, refuse, touch, unseen, user_line
from ..words import errors, wrappers
from ..words.pytree import MOST, Readout

aten = torch.ops.aten

VALUE_BYTES = 4096  # of one value: what takes longer to compare is no choice between ways
ROOM_BYTES = 1 << 16  # for all values of one call
MANY = 1 << 30
WORD = 8  # values begin at multiples of it
INDEXES = (torch.int64, torch.int32, torch.int16)  # with these PyTorch asks for the number; a byte is a mask
SMALL = 1 << 20  # bytes: what is larger does not come from a small segment (kSmallSize in CUDACachingAllocator.cpp)
ROOMS = {}  # device, -1 the host -> where segments leave their values; pinned, since the GPU writes there


# Ops that look at any numbers but tell one truth, or go on if it holds, and what computes it where they lie, as PyTorch
# does.
OUTCOMES = {
    "equal": (aten.eq.Tensor, aten.all.default),
    "allclose": (aten.isclose.default, aten.all.default),
    "_linalg_check_errors": (None, aten.any.default),  # did any decomposition fail?
    "normal": (lambda mean, std: aten.ge.Scalar(std, 0), aten.all.default),  # can all be standard deviations?
}


class Undo(NamedTuple):
    """Memory from outside that a segment overwrites."""

    to: Any  # a tensor of its bytes
    saved: Any  # one of those to which the segment copies it first
    nbytes: int
    segment: int


class Value(NamedTuple):
    """One that the function read."""

    line: str
    shape: tuple
    dtype: Any
    bytes: bytes  # as the core compares them


def room_of(device: int) -> torch.Tensor:
    """Memory of the host for the values of one call on this device. The path's lock guards it."""
    if device not in ROOMS:
        empty = functools.partial(torch.zeros, ROOM_BYTES, dtype=torch.uint8, pin_memory=device >= 0)
        ROOMS[device] = core.in_inference(False, empty)  # written in any mode
    return ROOMS[device]


def values_of(seen: Seen, inputs: Iterable[torch.Tensor]) -> list[torch.Tensor] | None:
    """Those of an op's inputs whose bytes decide what comes and are not known yet; None: some may not be read."""
    found = [t for t in inputs if t.numel() and not is_known(seen, t)]
    if not found:
        return found
    return found if all(is_small(seen, t) for t in found) and may_read(seen) else None


def is_between(seen):
    """Is this a point of the function's own at which a segment can end?"""
    if seen.run.graph is not None or seen.acts or seen.cuts.bodies:
        return False
    if seen.run.others and torch.is_grad_enabled() and any(t.requires_grad for t in seen.autograd.leaves):
        return False  # what runs in vain would have to leave gradients on all of them alone: see note_grads
    # In autograd's thread, which cannot end a capture of this one's.
    return not (seen.run.driver == CUDA and core.is_in_node())


def may_end(seen: Seen) -> bool:
    """May a segment end here, behind which something runs that must not run twice?"""
    return is_between(seen) and all(sid in seen.made for sid in seen.written)


def may_read(seen):
    """May a segment end here, behind which the call can turn out to go another way?"""
    if not is_between(seen):
        return False
    # What is written in a copy comes to where it is from when all is over.
    carried = {sid for sid, rows in seen.copied.swaps.items() if id(rows[0].leaf) in seen.copied.carried}
    outside = seen.written - seen.made.keys() - carried
    if not outside:
        return True
    if seen.cuts.islands:
        return False
    turn = len(seen.reads.values) + 1
    if not seen.run.recording:
        seen.late = turn
        return True
    if turn > seen.run.until:
        seen.late, seen.again = MANY, True  # the next recording undoes them all
        return False
    # These are put back, or not touched before the call is over.
    counted = seen.live.counters if seen.live is not None else ()
    return all((sid in seen.reads.undone and sid not in seen.raw) or sid in counted for sid in outside)


def save(seen: Seen, written: Iterable[torch.Tensor]) -> None:
    """An op is about to write these: what lies there is copied first, if it is from outside and was not copied yet. On
    the host for real, too, where the run may have to be undone."""
    lasts = len(seen.reads.values) < seen.run.until
    undoes = seen.run.before is not None and not is_capture(seen)
    for t in written if lasts or undoes else ():
        keeps = lasts and core.storage_id(t) not in seen.copied.swaps
        if (keeps or undoes) and is_to_save(seen, t):
            save_bytes(seen, t, keeps, undoes)


def is_to_save(seen, t):
    """Is it memory from outside, of which these bytes were not copied yet? From now on they are."""
    sid, nbytes = core.storage_id(t), core.span(t)
    if not nbytes or sid in seen.made or sid in seen.copied.buffers:
        return False
    if not core.is_plain(t) or t.is_cuda != (seen.run.driver == CUDA):
        return False
    if sid not in seen.reads.undone and sid in seen.written:  # somebody wrote past us
        return False
    at, spans = core.address(t), seen.reads.undone.setdefault(sid, [])
    if any(lo <= at and at + nbytes <= lo + n for lo, n in spans):
        return False
    spans.append((at, nbytes))
    return True


def save_bytes(seen, t, keeps, undoes):
    """Copy what lies there. `keeps`: in each replay; `undoes`: in this run."""
    nbytes = core.span(t)
    with unseen(seen):
        copy = core.in_inference(False, functools.partial(torch.empty, nbytes, dtype=torch.uint8, device=t.device))
        to = core.view_like(fix(seen, t), copy, 0)
        if is_capture(seen) or undoes:
            aten.copy_.default(copy, to)
        if keeps and is_host_recording(seen):
            tape.copy_into(copy, to)
    note_memory(seen, copy)
    saved = core.fixed(copy) if seen.run.driver == CUDA else copy
    if keeps:
        (seen.reads.spare if seen.run.driver == CUDA else seen.alive.memory).append(core.alias(copy))
        seen.alive.objects.extend((to, saved))
    seen.reads.undos.append(Undo(to, saved, nbytes, core.segments_ran() if keeps else MANY))


def undo(seen: Seen, ran: int) -> None:
    """A recording came to nothing of which so many segments ran, on the host all: what they wrote is as it was."""
    for one in reversed(seen.reads.undos):
        if one.segment < ran or seen.run.driver == HOST:
            core.move_bytes(one.to.get_device(), core.address(one.to), core.address(one.saved), one.nbytes)


def undo_rows(seen: Seen) -> list[tuple]:
    """The core's rows: of what a value is read behind."""
    return [tuple(one) for one in seen.reads.undos if one.segment != MANY]


def tells(seen: Seen, packet: str, inputs: list[torch.Tensor]) -> bool:
    """May the outcome of this op be read here?"""
    here = all(core.is_plain(t) and t.is_cuda == (seen.run.driver == CUDA) for t in inputs)
    if packet == "normal" and inputs[-1].is_complex():
        return False  # it raises
    return packet in OUTCOMES and here and may_read(seen)


def outcome(seen: Seen, packet: str, args: tuple, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """What is to be read in place of an op's arguments: one truth value; nothing, where shapes decide. (A tensor is not
    equal to itself where it holds a NaN.)"""
    first, last = OUTCOMES[packet]
    if packet == "equal" and inputs[0].shape != inputs[1].shape:
        return []
    return [compute(seen, last, args[0] if first is None else compute(seen, first, *args))]


def compute(seen, op, *args):
    """An op of ours, where the function's own would be recorded; the tensor that it makes."""
    args = exchange(seen, list(args))
    with unseen(seen):
        made = op(*args)
    note_memory(seen, made)
    if is_host_recording(seen):
        seen.alive.memory.append(core.alias(made))
        tape.append(op, fix(seen, args), {}, [made])
    return made


def is_known(seen: Seen, t: torch.Tensor) -> bool:
    """Are t's bytes the same at each replay?"""
    return core.storage_id(t) in seen.constants.memory or part_of(t) in seen.reads.known


def part_of(t):
    return core.address(t), core.span(t), core.storage_id(t), t.dtype, tuple(t.shape), t.stride()


def is_small(seen, t):
    """May the function read this tensor and be recorded?"""
    here = t.is_cuda == (seen.run.driver == CUDA) or core.storage_id(t) in seen.host.drawn
    return (
        here and core.is_plain(t) and not (t.is_floating_point() or t.is_complex())
        and t.numel() * t.element_size() <= VALUE_BYTES
    )  # fmt: skip


def read(seen: Seen, values: Iterable[torch.Tensor]) -> None:
    """The function is about to read these: from here on they are the same at each replay, until they are written."""
    line = user_line(seen)
    for t in values:
        touch(seen, t)
        seen.devices.add(t.device)
        value = leave(seen, t, t.dtype)[0] if is_capture(seen) or is_host_recording(seen) else bytes_of(seen, t)
        seen.reads.values.append(Value(line, tuple(t.shape), t.dtype, value))
        sid = core.storage_id(t)
        seen.reads.known.add(part_of(t))
        if sid in seen.made and t.is_contiguous() and t.numel() * t.element_size() == core.storage_bytes(t):
            constants.add(seen, t)
            if is_capture(seen):
                seen.constants.real[sid] = constants.for_real(seen, t.clone)
    note_grads(seen)


def read_number(seen: Seen, t: torch.Tensor, is_index: bool = False) -> Any:
    """What item() of a tensor is to return, where the function computes with it, or is a whole number and an index: the
    number in a warm-up, and a live one in a recording, which is for any; None: it is read as other values are."""
    if not may_compute(seen, t, is_index):
        return None
    touch(seen, t)
    seen.devices.add(t.device)
    line = user_line(seen)
    left = leave_number(seen, t) if seen.run.recording else None
    if seen.run.recording and left is None:
        return None
    with unseen(seen):
        number = t.item() if left is None else left[0]
    seen.computed = True
    seen.reads.values.append(Value(line, (), None, b""))
    note_grads(seen)
    if left is None:
        return number
    out = functools.cache(functools.partial(hand, seen, *left, line))
    return seen.live.came(core.segments_ran() - 1, number, line, out)


def hand(seen, number, room, line):
    """What a result holds of a number that was read: at each replay that of its call."""
    dtype = wide(type(number) is float)
    with unseen(seen):
        one = Readout(room.view(dtype).view(()), torch.Tensor.tolist, line)
        seen.readouts.rows.append((one, torch.tensor(number, dtype=dtype) if seen.run.driver == HOST else None))
    return one


def wide(is_float):
    """The type of tensors in which numbers come to the host."""
    return torch.float64 if is_float else torch.int64


def may_compute(seen, t, is_index):
    """Can the number in this tensor be any at each replay?"""
    if seen.run.computes is False or seen.reason is not None:
        return False
    fits = t.is_floating_point() or (is_index and t.dtype in INDEXES)
    simple = type(t) in (torch.Tensor, torch.nn.Parameter) and core.is_plain(t) and fits
    here = not seen.run.recording or t.is_cuda == (seen.run.driver == CUDA)
    if not (simple and here) or t.numel() != 1 or is_known(seen, t):
        return False
    if seen.run.computes is None:
        seen.computed = seen.again = True
        return False
    return not (seen.run.recording and seen.live.over) and may_read(seen)


def leave_number(seen, t) -> tuple[float, torch.Tensor] | None:
    """End a segment that leaves t's number on the host, in 64 bits: (the number, where). None: it is none with which C
    computes."""
    is_float = t.is_floating_point()
    value, room = leave(seen, t, wide(is_float))
    if room is None:
        return None
    seen.alive.objects.append(value)
    (number,) = struct.unpack("d" if is_float else "q", value)
    if not (math.isfinite(number) if is_float else abs(number) <= MOST):
        refuse(seen, errors.host_read("Tensor.item", user_line(seen)))
        return None
    return number, room


def note_grads(seen):
    """Where the call goes another way here, gradients of an earlier backward must be what they were: what comes may
    only lie where nothing ran so far."""
    graded = {
        id(t)
        for t in seen.autograd.leaves
        if t.grad is not None and any(core.storage_id(one) not in seen.made for one in wrappers.plain_inside(t.grad))
    }
    if graded and is_capture(seen):
        with unseen(seen):
            seen.reads.spare.extend(fill_pool(seen, torch.cuda.current_stream(seen.run.device).cuda_stream))
    seen.reads.graded.append(graded)


def fill_pool(seen, stream):
    """Allocate what is free of the pool on this stream, which is the thread's: tensors. What cannot be had is noted:
    another stream's."""
    filled = []
    for again in (True, True, False):  # of two blocks alike the allocator takes which it likes
        free = core.pool_free(seen.run.pool, stream)
        mine = [(nbytes, SMALL if small else nbytes) for _, nbytes, small, here in free if here and again]
        if not mine:
            break
        sizes = [min(most, nbytes - at) for nbytes, most in mine for at in range(0, nbytes, most)]
        home = torch.device("cuda", seen.run.device)
        filled.extend(torch.empty(size, dtype=torch.uint8, device=home) for size in sorted(sizes))
    seen.reads.unfilled.extend((at, nbytes) for at, nbytes, *_ in free)
    return filled


def unmask(seen: Seen, args: tuple) -> tuple:
    """The arguments of an op that indexes, with numbers of elements instead of masks, as PyTorch itself does it: then
    only the masks are read, and not what they choose from. `args` if there are none, or they may not be read."""
    masks = [t for t in args[1] if is_mask(t)]
    values = values_of(seen, masks) if masks and fit(args[0], args[1]) else None
    if values is None:
        return args
    if values:
        read(seen, values)
    indices = [one for t in args[1] for one in (columns_of(seen, t, t.shape) if is_mask(t) else [t])]
    core.replace_list(1, indices)
    return (args[0], indices, *args[2:])


def fills(t: Any, indices: list, value: torch.Tensor, accumulate: bool = False, unsafe: bool = False) -> bool:
    """Does PyTorch fill where a mask says, for which nobody asks where that is? As canDispatchToMaskedFill in
    TensorAdvancedIndexing.cpp."""
    chosen = [index for index in indices if index is not None]
    return not accumulate and value.numel() == 1 and not value.is_cuda and len(chosen) == 1 and is_mask(chosen[0])


def is_mask(index):
    """Is this index a tensor that says of each element whether it is chosen?"""
    return index is not None and index.dtype == torch.bool and index.dim() > 0


def fit(t, indices):
    """Has each mask the shape of what it chooses from? Else the op raises, and says so better."""
    at = 0
    for index in indices:
        dims = index.dim() if is_mask(index) else 1
        if is_mask(index) and index.shape != t.shape[at : at + dims]:
            return False
        at += dims
    return True


def columns_of(seen, mask, shape):
    """Where a mask that was read is true, expanded to this shape: one tensor for each of its dimensions."""
    if is_capture(seen):
        columns = constants.for_real(seen, lambda: constants.stand_in(seen, mask).expand(shape).nonzero().unbind(1))
    else:
        with unseen(seen):
            columns = mask.expand(shape).nonzero().unbind(1)
    for column in columns:
        constants.own(seen, column)
    return columns


def select(seen: Seen, t: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """In a capture: return from masked_select, whose mask was read, what an index takes; the tensor."""
    with unseen(seen):
        shape = aten.broadcast_tensors.default([t, mask])[0].shape or (1,)  # the form in Python imports sympy
    columns = columns_of(seen, mask, shape)
    # For its shape alone: t is not computed yet.
    constants.for_real(seen, lambda: core.proceed([exchange(seen, t), constants.stand_in(seen, mask)]))
    results = [compute(seen, aten.index.Tensor, exchange(seen, t).expand(shape), list(columns))]
    core.answer(results)
    return results


def sample(seen: Seen, mean: Any, std: torch.Tensor, generator: torch.Generator | None) -> list[torch.Tensor]:
    """In a capture: return from normal, of which the outcome of its check was read, what the ops give of which PyTorch
    makes it; the tensor."""
    if seen.reads.values[-1].bytes == b"\0":  # it raises
        constants.for_real(seen, functools.partial(torch.normal, mean, std, generator=generator))
    with unseen(seen):
        mean, std = exchange(seen, [mean, std])
        like = std if type(mean) is float else aten.broadcast_tensors.default([mean, std])[0]
        made = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        made.normal_(generator=generator).mul_(std).add_(mean)
    core.done([made])
    return [made]


def counted(x: torch.Tensor, most: int) -> torch.Tensor | None:
    """What bincount makes of numbers that all have a place among so many; None: some have not."""
    if not ((x >= 0) & (x < most)).all():
        return None
    at = x.long()
    return torch.zeros(most, dtype=torch.int64, device=x.device).scatter_add_(0, at, torch.ones_like(at))


def room_for(seen: Seen, t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Memory of the host for t's bytes, as of this type; or None: there is too much already. Recordings that begin
    alike find what they share at the same place."""
    at, nbytes = sum(seen.reads.rooms), t.numel() * dtype.itemsize
    if at + nbytes > ROOM_BYTES:
        return None
    seen.reads.rooms.append(-(-nbytes // WORD) * WORD)
    return room_of(seen.run.device)[at : at + nbytes]


def leave(seen, t, dtype):
    """End a segment that leaves t's bytes, as of this type, where the host finds them: (these, where). Of a recording
    that is refused: (nothing, None)."""
    with unseen(seen):
        room = room_for(seen, t, dtype)
    if room is None:
        refuse(seen, errors.reads_too_much(user_line(seen)))
        return b"", None
    at, nbytes = core.address(room), room.numel()
    try:
        with unseen(seen):
            source = exchange(seen, t)
            if t.is_cuda:
                whole = source.detach().to(dtype).contiguous()
            else:  # the op that made t ran for real: only a replay needs the tape
                tape.copy_into(room.view(dtype).view(t.shape), fix(seen, source))
                value = bytes_of(seen, t.detach().to(dtype))
        if t.is_cuda:
            core.fetch(at, whole, nbytes)
            return end_capture(seen, at, nbytes), room
        end = core.cut if seen.run.driver == HOST else core.aside
        return end(at, nbytes, value, seen.draws), room
    except core.DriverError as error:
        refuse(seen, errors.recording_failed(error.args[1], user_line(seen)))
        return b"", None


def bytes_of(seen, t):
    """What lies there now; not in a capture."""
    with unseen(seen):
        return bytes(t.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).tolist())


def end_capture(seen: Seen, at: int = 0, nbytes: int = 0, part: Callable | None = None, pure: bool = False) -> bytes:
    """End a segment of a capture, which runs now; the bytes it leaves. `part`: called behind it; is it `pure`?"""

    def cut():
        if core.lost():  # what runs now would overwrite what another thread got meanwhile
            seen.again = True
            refuse(seen, errors.lost())
        return core.cut(at, nbytes, None, seen.draws, part, pure)

    value = core.with_paths(cut)
    for rng in seen.generators.words.values():
        core.follow_generator(rng.handle)
    return value


def lines_of(values: list[Value]) -> str:
    return ", ".join(sorted({value.line for value in values}))


def vet(seen: Seen, draft: Draft) -> tuple[str | None, bool]:
    """(A sentence if a replay that goes another way could miss a .grad that was overwritten, or None; must some be
    looked after?)"""
    if not seen.reads.values:
        return None, False
    read = {s.owner for s in draft.slots if core.storage_id(s.example) in seen.touched}
    sets = [e for e in draft.effects if e.kind == SETS_GRAD]
    graded = any(id(draft.slots[e.slot].example) in leaves for e in sets for leaves in seen.reads.graded)
    lie = [core.address(draft.outs[e.out].proto) for e in sets if e.out != NONE]
    over = any(lo <= at < lo + n for lo, n in seen.reads.unfilled for at in lie)
    # One that is taken away, and not replaced, behind the last value: nothing ran that it could miss.
    taken = {e.slot for e in sets if e.out == NONE and id(draft.slots[e.slot].example) in seen.reads.graded[-1]}
    if any(e.slot in read and e.slot not in taken for e in sets) or (graded and over):
        return errors.read_with_grads(seen.reads.values[-1].line), False
    return None, graded
