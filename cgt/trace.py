"""Run the user's function once and describe what came out, as plain data.

While it is warmed or recorded, an observer below autograd sees every ATen op (autograd's worker thread included)
and takes part in none (observe_shim.h); the few functions that read memory or random
states behind the dispatcher's back are watched one by one (private.py). What is found is collected in one
dict, `seen`:

  made       storage -> where it was made         touched   storage -> a tensor of it, from outside
  written    storages that an op wrote            returned  what ops returned, as far as somebody holds it
  reason     the first thing that forbids replay  generators, devices, random

Copied slots. The function keeps the user's own tensors; `swaps` exchanges them for cgt's buffers at
each op, and what the op returns of a buffer is exchanged for the same part of the user's tensor. So views, identities
and Python attributes are those of eager, and nobody gets to see a buffer. Should an op write a
copied slot after all, the buffer is copied back at once and the slot is pinned.
"""

import contextlib
import functools
import gc
import os
import struct
import sys
import weakref
from typing import NamedTuple

import cgt_core as core
import torch
from cgt_core import CUDA, HOST

from . import errors, impure, tape
from .private import (
    DispatchMode,
    OpOverload,
    compiled_watched,
    higher_order_watched,
    is_forward_ad,
    outside_dynamo,
    parallel_watched,
    reads_watched,
    regions_watched,
    saved_hooks,
    sequence_number,
    states_watched,
    was_freed,
)

aten = torch.ops.aten

# Ops that write running mean and variance (arguments 3 and 4) in training (argument 5) without
# saying so in their schema.
SILENT_WRITES = frozenset(
    "native_batch_norm cudnn_batch_norm miopen_batch_norm _batch_norm_impl_index".split()
)
# Ops that count from the start of the storage, which a copied slot's buffer does not have.
ABSOLUTE = frozenset(("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter"))
READS_INSIDE = frozenset(("_linalg_eigh",))  # on the GPU: cuSOLVER's handle is broken after a capture (torch 2.11)
DYNAMIC = frozenset(("_pack_padded_sequence",))  # by lengths on the host, though it has no tag for that
# Ops that keep seed and offset of their random numbers for a backward: on the device where a capture is under way, on the
# host elsewhere; and their backwards, which look for them there.
KEEPS_SEED = frozenset(
    f"{name}_attention{end}"
    for name in ("_scaled_dot_product_flash", "_scaled_dot_product_efficient", "_flash", "_efficient")
    for end in ("", "_forward", "_backward")
)
SEED = ("philox_seed", "philox_offset")
# Their schemas tell of no write: allreduce_ and its kin are known by this.
COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")
KNOWN = ("aten", "prims", "prim")  # what returns nothing new there is a view, or asserts something
REPLACES_MEMORY = frozenset("set_ resize_ resize_as_ _resize_output_ resize_storage_bytes_".split())
NOT_USER_CODE = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(__file__) + os.sep,
    os.path.dirname(os.__file__) + os.sep + "contextlib",
    os.path.join(os.path.dirname(os.path.dirname(torch.__file__)), "typing_extensions"),  # @deprecated
    "<eval_with_key>",  # code that torch.compile made
)


STEPS = ("step", "_maybe_opt_step")  # functions of torch.optim's optimizers, of torch.amp's scalers


class OpFacts(NamedTuple):
    """What is known of an op before it runs."""

    packet: str  # name without overload
    writes: tuple  # positions and names of the arguments that it writes
    draws: bool  # takes random numbers
    reads: bool  # its result depends on values that Python sees
    dynamic: bool  # the shape of its result depends on values
    reshapes: bool  # changes a tensor's shape in place
    replaces: bool  # gives a tensor other memory
    absolute: bool  # counts from the start of the storage


@functools.cache
def facts_of(op):
    """The facts of an op, once for each."""
    packet, tags = op.overloadpacket.__name__, op.tags
    return OpFacts(
        packet, tape.writes(op), torch.Tag.nondeterministic_seeded in tags,
        torch.Tag.data_dependent_output in tags, packet in DYNAMIC or torch.Tag.dynamic_output_shape in tags,
        torch.Tag.inplace_view in tags, packet in REPLACES_MEMORY, packet in ABSOLUTE,
    )  # fmt: skip


class Unrecordable(BaseException):
    """Leaves the user's function in the middle of a capture; not an Exception, so that the user's
    own `except Exception` does not catch it. Never reaches the user."""


class Saved:
    """What autograd holds instead of a tensor that it saved, while a differentiable call is recorded:
    the tensor, until the recording is complete; then which argument of the backward it lies in."""

    __slots__ = ("tensor", "version", "leaves", "at", "like", "shift", "__weakref__")


class Leaves:
    """What the backward of a recorded graph reads when it runs: `tensors`, its arguments. While it is
    recorded, those that die with it are let go of as soon as eager would do so: `left` has the readers that
    are still to come of each, `read` those of them without any, `gone` those let go of; `late` if one was
    asked for after that. `readers`: by index, who asks for a saved tensor; a gradient goes from hand to hand.
    `changed`: those that were modified since they were saved."""

    __slots__ = ("tensors", "readers", "left", "read", "gone", "late", "changed")

    def __init__(self):
        self.readers, self.late = {}, False
        self.end()

    def begin(self, tensors, changed, spent):
        """A run begins, with the graph's lock: another thread may be at one until then. `spent`: which die with it."""
        self.tensors, self.changed = list(tensors), changed
        for at in spent:
            self.left[at] = set(self.readers.get(at, ()))
            self.was_read(at)

    def end(self):
        """It is over."""
        self.tensors, self.left, self.read, self.gone, self.changed = [], {}, set(), set(), ()

    def was_read(self, at, reader=None):
        """A reader of that one came, if it has any left."""
        self.left[at].discard(reader)
        if not self.left[at]:
            self.read.add(at)


def observe(
    driver, swaps=(), generators=(), recording=False, parent=-1, saves=False, graph=None, ran=None,
    arguments=(), spent=(), reached=(),
):  # fmt: skip
    """A fresh `seen`. `swaps`: [(leaf tensor, buffer), ...] for copied slots. `generators`: those that
    the function can reach, beside the default one. `parent`: the node behind which it is recorded.
    `saves`: the result will require grad, so learn what autograd saves. `graph`: the run is a backward
    of this recorded graph (autograd.py). `ran`: a set for the code objects that run, or None.
    `arguments`: the tensors among the arguments. `spent`: [(index, tensor), ...] of those arguments that
    die with this backward. `reached`: tensors that it can read without its arguments."""
    seen = {
        "driver": driver, "recording": recording, "made": {}, "touched": {}, "written": set(),
        "results": [], "returned": core.results(), "generators": {}, "devices": set(), "reason": None, "random": False,
        "constants": set(), "keep": [], "memory": [], "parent": parent, "swaps": {}, "buffers": {},
        "mirrored": set(), "user": {}, "raw": set(), "fixed": {}, "states": {},
        "reachable": generators, "saves": saves, "saved": [], "since": sequence_number(),
        "inside": False, "graph": graph, "tokens": {}, "rng": {}, "ran": ran, "started": set(),
        "arguments": arguments, "passing": set(), "hooked": False, "seeds": False,
        "spent": {}, "whole": {core.storage_id(t): t for _, t in spent},
    }  # fmt: skip
    for leaf, buffer in swaps:
        lo = core.address(leaf)
        row = (lo, lo + span(leaf), buffer, leaf)
        seen["swaps"].setdefault(core.storage_id(leaf), []).append(row)
        seen["buffers"][core.storage_id(buffer)] = row
    copies = {id(leaf): buffer for leaf, buffer in swaps}
    stay = [t for t in (*arguments, *reached) if id(t) not in copies] if swaps else ()
    seen["stay"] = [(core.storage_id(t), core.address(t), span(t)) for t in stay]
    for at, t in spent:
        memory = [t, copies[id(t)]] if id(t) in copies else [t]
        seen["spent"][at] = (memory, holders(memory))
    return seen


def holders(tensors):
    """How many hold memory of these tensors."""
    return sum(map(core.storage_holders, tensors))


def run(seen, function, args, kwargs):
    """Run the function under observation; its result."""
    for generator in (torch.default_generator, *seen["reachable"]):
        if generator.device.type == "cpu":
            watch_draw(seen, generator, after=True)
    watch = functools.partial(watch_op, seen)
    is_mine = lambda: core.observer() is watch  # noqa: E731
    regions, saw_regions = regions_watched(
        is_mine, functools.partial(watch_region, seen), functools.partial(watch_compile, seen)
    )
    brackets = [
        reads_watched(is_mine, functools.partial(watch_read, seen)),
        states_watched(
            is_mine, functools.partial(watch_get_state, seen), functools.partial(watch_set_state, seen)
        ),
        higher_order_watched(is_mine, functools.partial(watch_higher_order, seen)),
        *parallel_watched(is_mine, functools.partial(watch_parallel, seen)),
        compiled_watched(is_mine, InCompiled(seen)),
        reads_behind_watched(), *regions, *watch_saves(seen, is_mine), impure.watched(seen, is_mine),
    ]  # fmt: skip
    before = references(seen)
    called = functools.partial(core.observed, seen["returned"], watch, function, args, kwargs)
    result = core.within(brackets, called)
    if seen["ran"] is not None:
        seen["ran"] |= impure.without_ours(seen["started"])
    if seen["saves"]:
        if before != references(seen):
            gc.collect()  # cycles are not holders
        seen["kept"] = [now - then for then, now in zip(before, references(seen), strict=True)]
    if seen["recording"] and not saw_regions():
        refuse(seen, errors.compiles("the function"))
    if seen["reason"] is None:
        watch_draw(seen, torch.default_generator, after=False)
        if any(rng["at"] is not rng["words"] for rng in seen["rng"].values()):
            refuse(seen, errors.reseeded(user_line(seen)))
    return result


def held(seen):
    """The tensors that the run's ops returned, and aliases of ours, that somebody still holds."""
    ours = (r() for r in seen["results"])
    return core.alive(seen["returned"]) + [t for t in ours if t is not None]


def references(seen):
    """How many references there are to each argument, but for ours."""
    ours = [id(t) for t in seen["touched"].values()]
    return [core.references(t) - ours.count(id(t)) for t in seen["arguments"]]


def watch_saves(seen, is_mine):
    """[bracket, ...]: inside, autograd saves through `pack` where a later backward will need it."""
    if not seen["saves"]:
        return []
    packed = functools.partial(pack, seen["saved"], seen["results"])
    return saved_hooks(packed, unpack, is_mine, lambda: refuse(seen, errors.transforms(user_line(seen))))


def reads_behind_watched():
    """A bracket: inside, operators that no observer sees are told to note_read."""
    handles = []
    return lambda: handles.append(core.reads_begin()), lambda: handles and core.reads_end(handles.pop())


def seen_here():
    """What the calling thread's run has seen, or None: it is nobody's."""
    watch = core.observer()
    return watch.args[0] if watch is not None else None


def note_read(name):
    """An operator is about to run that reads values for which a replay has no op. It comes from the middle of
    PyTorch: no exception may leave, even in a capture."""
    seen = seen_here()
    if seen is not None and not seen["inside"] and seen["reason"] is None:
        seen["reason"] = errors.read_behind(name.replace("::", "."), user_line(seen))


def pack(packed, results, t):
    """What autograd keeps of a tensor that it saves. Not the tensor: a result would hold its own graph. The
    graph holds this hook: it must not lead to `seen`, and with it to the call's arguments."""
    saved = Saved()
    saved.tensor = core.view_like(t, t, 0) if core.is_plain(t) else t.detach()
    saved.version = 0 if t.is_inference() else t._version
    packed.append(weakref.ref(saved))
    results.append(weakref.ref(saved.tensor))
    return saved


def unpack(saved):
    """The tensor, when a backward asks for it."""
    if saved.tensor is None:
        leaves = saved.leaves
        if saved.at in leaves.changed:
            raise RuntimeError(errors.modified(tuple(saved.like.shape)))
        if saved.at in leaves.gone:
            leaves.late = True
            if leaves.tensors[saved.at].is_cuda:  # nothing has run yet
                raise Unrecordable(errors.late_read())
        elif saved.at in leaves.left:
            leaves.was_read(saved.at, id(saved))
        return core.view_like(leaves.tensors[saved.at], saved.like, saved.shift)
    if not saved.tensor.is_inference() and saved.tensor._version != saved.version:
        raise RuntimeError(errors.modified(tuple(saved.tensor.shape)))
    return saved.tensor


def spend(seen):
    """Let go of what autograd has read for the last time: a result of the path, or the copy of an argument.
    A run under way may still hold some of it."""
    leaves = seen["graph"]["leaves"]
    for at in sorted(leaves.read):
        memory, uses = seen["spent"][at]
        if holders(memory) > uses:
            continue
        del leaves.left[at]
        leaves.read.remove(at)
        leaves.gone.add(at)
        try:
            if len(memory) == 1:
                core.spend(memory[0])
            else:
                core.storage_empty(memory[1])
        except core.DriverError as error:
            refuse(seen, errors.recording_failed(error.args[1], ""))


def watch_draw(seen, generator, after):
    """Between two draws nobody may set a generator's state: a replay would not set it again. (A CUDA
    capture refuses by itself.) Called before and after each draw, and around the run."""
    now, key = generator.get_state(), core.generator_id(generator)
    if not after and key in seen["states"] and not torch.equal(seen["states"][key], now):
        refuse(seen, errors.reseeded(user_line(seen)))
    seen["states"][key] = now


# A state that is read inside the function and set again (torch.utils.checkpoint does so) is a *token*:
# on the host the state itself, which the tape reads anew; in a capture a stand-in for the two words from
# which the numbers are drawn and how far the recording has come since. One that lives on until the
# backward is saved for it like a tensor: `graph` knows at which place.


def watch_get_state(seen, generator, plain):
    """The function reads a default generator's state."""
    if generator.device.type == "cpu" or not seen["recording"]:
        with unseen(seen):
            state = plain()
            note_token(seen, state, 0, generator, None)
            if is_host_recording(seen):
                seen["made"][core.storage_id(state)] = user_line(seen)
                seen["memory"].append(seen["keep"].pop())
                core.state_op(generator, state, False)
        return state
    rng = seen["rng"][core.generator_id(generator)]
    words, moved = rng["at"], core.moved_generator(rng["handle"])
    if rng["copy"] is None and words is rng["words"]:
        rng["copy"] = words.clone()  # the words of this very run, if its backward asks
    state = torch.frombuffer(bytearray(16), dtype=torch.uint8)
    kept = rng["copy"] if words is rng["words"] else words
    note_token(seen, state, moved, generator, kept)
    return state


@contextlib.contextmanager
def unseen(seen):
    """Ops in here are not the function's (a tensor that C++ detaches is one, under a mode)."""
    before, seen["inside"] = seen["inside"], True
    try:
        yield
    finally:
        seen["inside"] = before


def note_token(seen, state, moved, generator, words):
    """Weakly: whoever still holds it at the end will ask for it later. Its address is not used again."""
    seen["tokens"][core.storage_id(state)] = (weakref.ref(state), moved, generator, words)
    with unseen(seen):
        seen["keep"].append(core.twin(state))


def watch_set_state(seen, generator, state, plain):
    """The function sets a default generator's state: to a token, or it cannot be replayed."""
    sid = core.storage_id(state)
    state, moved, words = token_of(seen, sid, state)
    if words is None:  # set to what the function did not read: the next draw, or the end, refuses
        with unseen(seen):
            return plain(state)
    if generator.device.type != "cpu" and seen["recording"]:
        rng = seen["rng"][core.generator_id(generator)]
        rng["at"] = rng["words"] if words is rng["copy"] else words
        core.point_generator(rng["handle"], words[0:1], words[1:2], moved)
        return None
    with unseen(seen):
        plain(real_state(state, moved, words))
        if generator.device.type == "cpu":
            seen["states"][core.generator_id(generator)] = generator.get_state()
        if is_host_recording(seen):
            if sid not in seen["made"]:
                seen["touched"].setdefault(core.storage_id(state), state)
            core.state_op(generator, fix(seen, exchange(seen, state)), True)
    return None


def token_of(seen, sid, state):
    """(state, how far a recording had come, the words it counts from), of this run or of the forward
    whose backward it is; words are None for a state that is no token."""
    if sid in seen["tokens"]:
        _, moved, _, words = seen["tokens"][sid]
        return state, moved, state if words is None else words
    found = seen["graph"]["tokens"].get(sid) if seen["graph"] is not None else None
    if found is None:
        return state, 0, None
    at, moved, _ = found
    words = seen["graph"]["leaves"].tensors[at]
    return words, moved, words


def real_state(state, moved, words):
    """A token as a generator takes it."""
    if words.dtype == torch.uint8:
        return state
    seed, offset = words.tolist()
    return pack_state(seed, offset + moved)


def drop_words(seen):
    """Whoever needs a copy of the recording's words has it now; else its memory can go."""
    for rng in seen["rng"].values():
        rng["copy"] = None
    seen["tokens"] = {
        sid: (ref, moved, generator, words is not None)
        for sid, (ref, moved, generator, words) in seen["tokens"].items()
    }


def fill_tokens(seen, generators, words):
    """The capture was launched once and is thrown away: its tokens are now the states they stand for."""
    began = dict(zip(map(core.generator_id, generators), words, strict=True))
    for ref, moved, generator, where in seen["tokens"].values():
        state = ref()
        if state is not None and where:
            seed, offset = began[core.generator_id(generator)]
            state.copy_(pack_state(seed, offset + moved))


def pack_state(seed, offset):
    """The state of a CUDA generator as get_state() gives it."""
    return torch.frombuffer(bytearray(struct.pack("=Qq", seed % 2**64, offset)), dtype=torch.uint8)


def span(t):
    """Bytes from a tensor's first element to the end of its last."""
    if t.numel() == 0:
        return 0
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return (last + 1) * t.element_size()


class InCompiled(DispatchMode):
    """Shows the observer the ops of what Dynamo compiled (private.compiled_watched)."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    @outside_dynamo
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if not isinstance(op, OpOverload):
            watch_higher_order(self.seen, op)
            return op(*args, **(kwargs or {}))
        return core.observed_op(op, args, kwargs or {})


def watch_higher_order(seen, op):
    """What it runs is no op of a tape's."""
    if not seen["inside"]:
        refuse(seen, errors.higher_order_op(op.name(), user_line(seen)))


def user_line(seen):
    """file:line of the innermost frame that is neither PyTorch's nor ours."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        mine = seen["user"].get(name)
        if mine is None:
            mine = seen["user"][name] = not name.startswith(NOT_USER_CODE)
        if mine:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "the backward pass"


def refuse(seen, sentence):
    """Note why this run cannot be replayed. In a CUDA capture nothing has run yet: leave."""
    if seen["reason"] is None:
        seen["reason"] = sentence
    if seen["recording"] and seen["driver"] == CUDA:
        raise Unrecordable(sentence)


def tensors_in(values, into):
    """Collect the tensors among an op's arguments or results, lists of them too."""
    for value in values:
        if isinstance(value, torch.Tensor):
            into.append(value)
        elif isinstance(value, (list, tuple)):
            tensors_in(value, into)
    return into


def exchange(seen, value):
    """The argument with copied slots replaced by their buffers."""
    if isinstance(value, torch.Tensor):
        sid = core.storage_id(value)
        if sid not in seen["swaps"] or not value.numel():
            return value
        at, end = core.address(value), core.address(value) + span(value)
        for lo, hi, buffer, _ in seen["swaps"][sid]:
            if lo <= at and end <= hi:
                return core.view_like(buffer, value, at - lo)
        if not any(s == sid and lo <= at and end <= lo + n for s, lo, n in seen["stay"]):
            refuse(seen, errors.beside(user_line(seen)))
        return value
    if isinstance(value, (list, tuple)):
        return type(value)([exchange(seen, v) for v in value])
    return value


def watch_read(seen, name, t):
    """A method that reads memory: fatal on the host, where nobody could replay the reader."""
    if seen["inside"]:
        return
    sid = core.storage_id(t)
    if seen["driver"] == CUDA and t.is_cuda and name in ("data_ptr", "untyped_storage"):
        # A kernel outside the dispatcher may read or write there: the address must stay.
        seen["raw"].add(sid)
        if sid not in seen["made"]:
            seen["touched"].setdefault(sid, t)
            seen["written"].add(sid)
            if sid in seen["swaps"]:
                refuse(seen, errors.memory_read(name, user_line(seen)))
        return
    told = errors.read_behind if name == "ctc_loss" else errors.memory_read
    refuse(seen, told(name, user_line(seen)))


def watch_parallel(seen, name):
    """The forward of a module that spreads the work over processes: it does more than its ops."""
    refuse(seen, errors.parallel_module(name, user_line(seen)))


def watch_op(seen, op, args, kwargs):
    """One op: exchange copied slots, run it, note what it read, made and wrote. None: one that a dispatch mode will see
    instead of us."""
    if op is None:
        refuse(seen, errors.mode_inside(user_line(seen)))
        return
    if op.namespace == "profiler" or seen["inside"]:
        core.proceed(None)
        return
    if seen["spent"]:
        spend(seen)
    if seen["saves"] and core.save_hooks() > 1:
        seen["hooked"] = True  # a checkpoint's, say, beside ours
    facts = facts_of(op)
    packet = facts.packet
    if packet in KEEPS_SEED:
        seen["seeds"] = True
    inputs = tensors_in(kwargs.values(), tensors_in(args, []))
    if packet in ("lift_fresh", "lift_fresh_copy"):
        watch_constant(seen, inputs[0])
        return
    written = [args[k] if k < len(args) else kwargs.get(name) for k, name in facts.writes]
    if packet in SILENT_WRITES and args[5]:  # training
        written += args[3:5]
    if op.namespace == "c10d":
        written += inputs
    written = tensors_in(written, [])
    vet_op(seen, op, facts, args, kwargs, inputs, written)
    known = set()
    for t in inputs:
        sid = core.storage_id(t)
        known.add(sid)
        seen["devices"].add(t.device)
        if not any(sid in seen[column] for column in ("made", "buffers", "touched")):
            if core.is_in_node():
                seen["passing"].add(sid)
            # Not the tensor: whoever holds the argument itself when the run is over is counted.
            alias = core.twin(t) if core.is_plain(t) else t
            seen["touched"][sid] = seen["whole"].get(sid, alias)
    generator = kwargs.get("generator")
    if generator is not None:
        seen["generators"][core.generator_id(generator)] = generator
    if facts.draws:
        seen["random"] = True
    for t in written:
        seen["written"].add(core.storage_id(t))
    instead = seeds_on_host(op, args, kwargs) if packet in KEEPS_SEED and not seen["recording"] else None
    if facts.absolute and core.storage_id(inputs[0]) not in seen["made"]:
        seen["raw"].add(core.storage_id(inputs[0]))
        if core.storage_id(inputs[0]) in seen["swaps"]:
            refuse(seen, errors.absolute(str(op), user_line(seen)))
    elif seen["swaps"]:
        args = exchange(seen, args)
        kwargs = {k: exchange(seen, v) for k, v in kwargs.items()}
        instead = tensors_in(kwargs.values(), tensors_in(args, []))
    drawn = generator if generator is not None else torch.default_generator
    draws = facts.draws and drawn.device.type == "cpu"
    if draws:
        watch_draw(seen, drawn, after=False)
    results = core.proceed(instead)
    if draws:
        watch_draw(seen, drawn, after=True)
    vet_kinds(seen, op, results)
    fresh = [t for t in results if core.storage_id(t) not in known]
    vet_effect(seen, op, fresh, written)
    if fresh:
        line = user_line(seen)
        for t in fresh:
            seen["made"][core.storage_id(t)] = line
            seen["devices"].add(t.device)
            if t.is_cuda and t.device.index != torch.cuda.current_device():
                refuse(seen, errors.other_device(str(op), line, t.device))
            if t.device.type == "cpu" and seen["driver"] == CUDA:
                seen["constants"].add(core.storage_id(t))
    if is_host_recording(seen):
        append(seen, op, args, kwargs, results, fresh, bool(written))
    if written and seen["swaps"]:
        mirror(seen, written)


def hand_over_seed(op, args, kwargs):
    """`watch` for the backward of a captured forward where nobody records it."""
    core.proceed(seeds_on_host(op, args, kwargs) if facts_of(op).packet in KEEPS_SEED else None)


def seeds_on_host(op, args, kwargs):
    """What `proceed` wants if a backward of attention runs outside of a capture with seed and offset of a forward that
    was captured: it would read them where they are not. None if they are where it expects them."""
    given = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
    wrong = [id(t) for t in map(given.get, SEED) if t is not None and t.is_cuda and t.dim() == 0]
    if not wrong or torch.cuda.is_current_stream_capturing():
        return None
    return [t.cpu() if id(t) in wrong else t for t in tensors_in(kwargs.values(), tensors_in(args, []))]


def watch_region(seen, plain, region, inputs):
    """A region that inductor compiled: its kernels are in a CUDA capture but on no tape, and none of its
    ops is looked at. One op as a whole, which reads its inputs, writes some and makes the rest."""
    given = [t for t in inputs if isinstance(t, torch.Tensor)]
    written = [inputs[k] for k in region.mutated_input_idxs]
    vet_region(seen, region, inputs, given)
    for t in given:
        seen["devices"].add(t.device)
        if core.storage_id(t) not in seen["made"] and core.storage_id(t) not in seen["buffers"]:
            seen["touched"].setdefault(core.storage_id(t), t)
    seen["written"].update(map(core.storage_id, written))
    known = set(map(core.storage_id, given))
    if seen["swaps"]:
        inputs[:] = exchange(seen, inputs)
        known.update(core.storage_id(t) for t in inputs if isinstance(t, torch.Tensor))
    del given
    seen["keep"].append(region)  # it owns constants and kernels
    seen["inside"] = True
    try:
        results = plain(region, inputs)  # which empties the list
    finally:
        seen["inside"] = False
    line = user_line(seen)
    made = tensors_in((results,), [])
    for t in made:
        if core.storage_id(t) not in known:
            seen["made"][core.storage_id(t)] = line
            seen["devices"].add(t.device)
    if seen["driver"] == CUDA and not all(t.is_cuda for t in made):
        refuse(seen, errors.compiled_on_host(line))
    seen["results"].extend(map(weakref.ref, made))
    if written and seen["swaps"]:
        mirror(seen, written)
    return results


def vet_region(seen, region, inputs, given):
    """Refuse a compiled region that a replay could not repeat."""
    devices = {t.device for t in given} | {torch.device(name) for name in region.device_types}
    if seen["driver"] != CUDA or "cpu" in {d.type for d in devices}:
        refuse(seen, errors.compiled_on_host(user_line(seen)))
    elif any(is_elsewhere(seen, t) for t in given):
        refuse(seen, errors.other_device("a compiled region", user_line(seen), given[0].device))
    elif region.fx_kwargs.get("cudagraphs") or any(isinstance(t, torch.Generator) for t in inputs):
        refuse(seen, errors.compiled_with_state(user_line(seen)))


def watch_compile(seen):
    """torch.compile compiles: what it runs to that end must not end up in a recording."""
    if seen["recording"]:
        seen["again"] = True
        refuse(seen, errors.compiles(user_line(seen)))


def append(seen, op, args, kwargs, results, fresh, writes):
    """Put the op on the host's tape, unless it is a view."""
    # A freed storage's address could come back.
    seen["memory"].extend(map(core.twin, filter(core.is_plain, fresh)))
    if seen["reason"] is not None or facts_of(op).reshapes or not (fresh or writes or not results):
        return
    if fresh and len(fresh) != len(results):
        refuse(seen, errors.odd_op(str(op), user_line(seen)))
        return
    try:
        kwargs = {k: fix(seen, v) for k, v in kwargs.items()}
        tape.append(op, fix(seen, args), kwargs, fresh)
    except Exception as error:  # an argument without a boxed form: the op ran, so go on eagerly
        refuse(seen, errors.untaped_op(str(op), user_line(seen), str(error)))


def fix(seen, value):
    """The argument with tensors from outside replaced by views of fixed addresses: a storage can be
    given other memory later (a rescue does that), and the tape must not follow. But it must read a
    result of the path where that is written; even now, in another thread, a rescue may part the two, so how far
    it lies from the start is asked of its own storage."""
    if isinstance(value, torch.Tensor):
        sid = core.storage_id(value)
        if sid in seen["made"] or sid in seen["buffers"] or not sid:
            return value
        if sid not in seen["fixed"]:
            proto = core.path_proto(seen["parent"], value)
            seen["fixed"][sid] = core.fixed(value) if proto is None else proto
        base = seen["fixed"][sid]
        start = base.storage_offset() * base.element_size()
        return core.view_like(base, value, core.address(value) - core.storage_address(value) - start)
    if isinstance(value, (list, tuple)):
        return type(value)([fix(seen, v) for v in value])
    return value


def mirror(seen, written):
    """A copied slot was written through its buffer: bring the user's memory up to date."""
    rows = {}
    for t in written:
        sid = core.storage_id(t)
        if sid in seen["buffers"]:
            rows[sid] = seen["buffers"][sid]
        for row in seen["swaps"].get(sid, ()):
            rows[core.storage_id(row[2])] = row
    for _, _, buffer, leaf in rows.values():
        seen["mirrored"].add(id(leaf))
        seen["written"].add(core.storage_id(leaf))
        to, source = core.twin(leaf), core.view_like(buffer, leaf, 0)
        aten.copy_.default(to, source)
        if is_host_recording(seen):
            tape.copy_into(fix(seen, to), source)


def watch_constant(seen, t):
    """torch.tensor(...) of Python values: the values are guarded, the memory is new every time."""
    if t.is_cuda:
        refuse(seen, errors.host_constant(user_line(seen)))
    sid = core.storage_id(t)
    seen["made"][sid] = user_line(seen)
    seen["constants"].add(sid)
    seen["devices"].add(t.device)
    if is_host_recording(seen):
        value = t.clone()
        seen["memory"].append(core.twin(t))
        seen["keep"].append(value)
        tape.copy_into(t, value)
    core.proceed(None)


def vet_op(seen, op, facts, args, kwargs, inputs, written):
    """Refuse what a replay could not repeat."""
    line = None
    if is_forward_ad():
        line = errors.forward_mode(user_line(seen))
    elif facts.reads:
        line = host_reason(seen, errors.host_read, op)
    elif facts.dynamic and (
        facts.packet != "index" or any(t.dtype in (torch.bool, torch.uint8) for t in inputs[1:])
    ):
        line = errors.dynamic_shape(str(op), user_line(seen))
    elif facts.replaces:
        line = errors.replaces_memory(str(op), user_line(seen))
    elif facts.reshapes and core.storage_id(inputs[0]) not in seen["made"]:
        line = errors.changes_shape(str(op), user_line(seen))
    elif op.namespace in COLLECTIVES and seen["driver"] == HOST:
        line = errors.collective(str(op), user_line(seen))
    elif not all(map(core.is_plain, inputs)):
        line = errors.layout(str(op), user_line(seen), odd_kind(inputs))
    elif any(is_elsewhere(seen, t) for t in inputs):
        line = errors.other_device(str(op), user_line(seen), inputs[0].device)
    elif facts.packet in READS_INSIDE and any(t.is_cuda for t in inputs):
        line = host_reason(seen, errors.host_read, op)
    elif seen["driver"] == CUDA:
        line = vet_mixed(seen, op, facts, kwargs, inputs, written)
    if line is not None:
        refuse(seen, line)


def vet_kinds(seen, op, results):
    """Refuse what no recording can hold."""
    if not all(map(core.is_plain, results)):
        refuse(seen, errors.layout(str(op), user_line(seen), odd_kind(results)))


def vet_effect(seen, op, fresh, written):
    """Refuse an op of somebody's that may have done anything. (NCCL's kernels are captured.)"""
    if not (fresh or written or op.namespace in KNOWN or op.namespace in COLLECTIVES) and not is_view(op):
        refuse(seen, errors.unknown_effect(str(op), user_line(seen)))


@functools.cache
def is_view(op):
    """Does the op say that what it returns is its argument's memory?"""
    return any(r.alias_info is not None for r in op._schema.returns)


def odd_kind(tensors):
    """What the first of these tensors is that no recording can hold; None if there is none."""
    t = next((t for t in tensors if not core.is_plain(t)), None)
    if t is None:
        return None
    if type(t).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"a {type(t).__name__}, a tensor subclass"
    if t.is_nested or t.is_quantized:
        return "a nested tensor" if t.is_nested else "a quantized tensor"
    return f"a tensor of layout {t.layout}"


def host_reason(seen, sentence, op):
    """The sentence on an op that needs the host, or the one that tells an optimizer's user what helps."""
    line = user_line(seen)
    if seen["reason"] is not None:  # only the first is told
        return sentence(str(op), line)
    return step_reason(sys._getframe(1), line) or sentence(str(op), line)


def step_reason(frame, line):
    """A sentence if PyTorch's code in and around this frame is a step of torch.optim's or the one of a
    gradient scaler; else None."""
    while frame is not None and frame.f_code.co_filename.startswith(NOT_USER_CODE):
        if frame.f_code.co_name in STEPS:
            owner, optimizer = (frame.f_locals.get(name) for name in ("self", "optimizer"))
            if isinstance(owner, torch.optim.Optimizer):
                option = helpful_option(owner)
                sentence = errors.optimizer_option if option else errors.optimizer_outside
                return sentence(type(owner).__name__, line, *option)
            if isinstance(owner, torch.amp.GradScaler):
                option = scaling_option(optimizer)
                sentence = errors.scaler_option if option else errors.scaler_outside
                return sentence(type(optimizer).__name__, line, *option)
        frame = frame.f_back
    return None


def helpful_option(optimizer):
    """(what keeps an optimizer's numbers on its device,); () if nothing does."""
    if is_on_cuda(optimizer) and "capturable" in optimizer.defaults:
        return () if has_option(optimizer, "capturable") else ("capturable=True",)
    return fused_option(optimizer)


def scaling_option(optimizer):
    """(what lets an optimizer skip a step on its device,); () if nothing does."""
    option = fused_option(optimizer)
    if option and is_on_cuda(optimizer) and "capturable" in optimizer.defaults:
        return (f"{option[0]}, capturable=True",)
    return option


def fused_option(optimizer):
    """(fused=True,) if that is what an optimizer lacks and can have."""
    known = "fused" in optimizer.defaults and not has_option(optimizer, "fused")
    if not known or not all(p.is_floating_point() for p in parameters_of(optimizer)):
        return ()
    if type(optimizer) is torch.optim.Adagrad and is_on_cuda(optimizer):
        return ()  # whose fused kernel is the CPU's alone
    instead = any(group.get("foreach") for group in optimizer.param_groups)
    return ("fused=True instead of foreach=True" if instead else "fused=True",)


def has_option(optimizer, name):
    """Is this option set for all parameters?"""
    return all(group.get(name) for group in optimizer.param_groups)


def is_on_cuda(optimizer):
    """Are there parameters on a GPU?"""
    return any(p.is_cuda for p in parameters_of(optimizer))


def parameters_of(optimizer):
    """All parameters of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def is_elsewhere(seen, t):
    """Is t on a device that this run does not record?"""
    if t.is_cuda:
        return t.device.index != torch.cuda.current_device() or is_host_recording(seen)
    return t.device.type != "cpu"


def is_host_recording(seen):
    """Is a tape being written that will be kept?"""
    return seen["recording"] and seen["driver"] == HOST and seen["reason"] is None


def vet_mixed(seen, op, facts, kwargs, inputs, written):
    """CPU tensors in a function on the GPU: only numbers that are guarded or constant."""
    on_cpu = [t for t in inputs if not t.is_cuda and t.numel()]
    if not on_cpu:
        to_cpu = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
        return host_reason(seen, errors.host_read, op) if to_cpu and inputs else None
    for t in on_cpu:
        known = core.storage_id(t) in seen["constants"] or (
            t.dim() == 0 and core.storage_id(t) not in seen["made"]
        )
        copies = facts.packet in ("_to_copy", "copy_", "_copy_from") and (
            len(on_cpu) < len(inputs) or str(kwargs.get("device", "cpu")) != "cpu"
        )
        if copies and len(on_cpu) < len(inputs) and on_cpu[0] is inputs[0]:
            return host_reason(seen, errors.host_read, op)
        if not known or copies:
            return errors.cpu_tensor(str(op), user_line(seen), tuple(t.shape))
    external = any(not t.is_cuda and core.storage_id(t) not in seen["made"] for t in written)
    if external or (len(on_cpu) == len(inputs) and facts.draws):
        return host_reason(seen, errors.cpu_state, op)
    return None


def is_spent(t, since):
    """Was t's autograd graph, as far as the call made it, used up by a backward inside the call? Its saved
    tensors are gone. Asks no hook for them: that of a checkpoint would compute them again."""
    try:
        return any(map(was_freed, core.saved_behind([t], since)))
    except RuntimeError:  # of a Python function
        return True
