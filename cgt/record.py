"""Make a recording: a tape on the host, a capture on CUDA; and undo one that fails.

A recording is a transaction. Whatever fails ends the capture and puts back generators, pool routing,
streams, the garbage collector, and whatever the function replaced by tensors that were never computed.
"""

import functools
import gc
import signal
import traceback
from typing import NamedTuple

import cgt_core as core
import torch

from . import describe, errors, impure, options, places, trace
from .private import NOTHING, capture_hidden, clear_workspaces
from .trace import CUDA, HOST

POOLS = {}  # device index -> the pool (a handle of the core's) in which to record
STREAMS = {}  # device index -> the side stream that records; one, since blocks belong to it
FOREIGN_MEMORY = -4  # ERROR_FOREIGN_MEMORY in driver.pxi


class Before(NamedTuple):
    """What a capture that fails may have changed."""

    places: list
    grads: list  # [(tensor, its .grad)]
    sources: list  # see impure.py
    histories: object  # of core.histories


def on_side_stream(device):
    """A bracket: the stream that records, ordered after and before the caller's."""
    stream, current = stream_of(device), torch.cuda.current_stream(device)

    def begin():
        stream.wait_stream(current)
        torch.cuda.set_stream(stream)

    def end():
        torch.cuda.set_stream(current)
        current.wait_stream(stream)

    return begin, end


def stream_of(device):
    """The device's side stream, made once."""
    if device not in STREAMS:
        STREAMS[device] = torch.cuda.Stream(device)
        core.load_words_kernel(device)
    return STREAMS[device]


def pool_of(device):
    """The device's private pool: one for all recordings, until it is empty or spoilt."""
    if device not in POOLS:
        POOLS[device] = core.pool_new(device, torch.cuda.graph_pool_handle())
    return POOLS[device]


def retire_pool(device):
    """Record in another pool from now on. The old one's memory goes with its last recording."""
    core.pool_retire(POOLS.pop(device))


def release_pools():
    """Give the memory of pools back in which nothing lives any more."""
    for device in [d for d, pool in POOLS.items() if core.pool_nodes(pool) == 0]:
        retire_pool(device)


def begin(rec, device, stream):
    """Begin a recording behind the node that the path has come to. A pool whose memory somebody else
    keeps cannot be put back to a checkpoint: then another one is used. Another thread may have moved the path since
    the call was prepared: what was worked out for the one parent does not hold behind the other."""
    driver = rec["driver"]

    def attempt():
        try:
            core.begin(driver, device, stream, pool_of(device) if driver == CUDA else 0)
        except core.DriverError as error:
            if error.args[0] != FOREIGN_MEMORY:
                raise
            core.abort()
            retire_pool(device)
            core.begin(driver, device, stream, pool_of(device))
        rec["overtaken"] = core.path_state(device)[1] != rec["parent"]

    core.with_paths(attempt)


def close(rec):
    """However a recording was left, nothing of it is under way any more. Where an exception leaves a capture that was
    not launched, nothing that it put into places or gradients was ever computed."""
    core.paths_leave()
    core.abort()
    if not rec["settled"] and rec["before"] is not None and not core.recording_ran():
        restore_places(rec["before"], rec["seen"], tensors_only=True)
        describe.put_back(rec)
    rec["settled"] = True


def buffer_for(t):
    """Memory for a copied slot, in the input's own alignment class: kernels choose their vector
    width, and reductions their order, by the address."""
    n, align = trace.span(t), options.ALIGN[t.device.type]
    shift = core.address(t) % align
    empty = functools.partial(torch.empty, shift + n, dtype=torch.uint8, device=t.device)
    room = core.in_inference(t.is_inference(), empty)  # views of it are to be what views of t are
    assert core.address(room) % align == 0, f"PyTorch's allocator aligns to {align} bytes"
    return room[shift:]


def fill(buffer, t):
    """Copy the bytes of t's span, gaps and overlaps included, as the copy node will."""
    whole = core.fixed(t).view(torch.uint8)
    start = core.address(t) - core.storage_address(t)
    buffer.copy_(whole[start : start + buffer.numel()])


def on_host(function, args, kwargs, rec):
    """Run the function for real while the tape is written. What it raises is the user's own."""
    flat = rec["flat"]
    seen = None
    try:
        begin(rec, -1, 0)
        swaps, rec["copies"] = [], {}
        for k in rec["copied"]:
            t = flat.tensors[k]
            buffer = buffer_for(t)
            fill(buffer, t)
            rec["copies"][k] = core.copy(buffer, t, trace.span(t))
            swaps.append((t, buffer))
        seen = rec["seen"] = trace.observe(
            HOST, swaps, rec["generators"], True, rec["parent"], rec["saves"], rec["graph"], rec["ran"],
            flat.tensors, rec["spent"], [t for _, t, _ in rec["reached"]],
        )  # fmt: skip
        seen["memory"].extend(buffer for _, buffer in swaps)
        seen["sinks"] = rec["sinks"]
        torch.clear_autocast_cache()
        result = trace.run(seen, function, args, kwargs)
        torch.clear_autocast_cache()
        open_sinks(rec, seen, result)
        if seen["reason"] is None:
            core.end([])
        return result, seen
    except core.DriverError as error:
        core.abort()
        if seen is not None:  # the function ran: its result stands, only the recording is lost
            seen["reason"] = errors.recording_failed(error.args[1], "")
            return result, seen
        rec["reason"] = errors.recording_failed(error.args[1], "")
        return None


def on_cuda(function, args, kwargs, rec):
    """Capture the function; nothing executes. On any failure everything is put back and None is
    returned: the caller then runs the function eagerly, which raises the user's own exceptions."""
    flat = rec["flat"]
    device = torch.cuda.current_device()
    stream = stream_of(device)
    default = torch.cuda.default_generators[device]
    reachable = [g for g in (default, *rec["generators"]) if g.device.type == "cuda"]
    generators = list({core.generator_id(g): g for g in reachable}.values())
    # Ordinary memory, made before the capture: kernels of the recording read these words.
    word_pairs = [torch.zeros(2, dtype=torch.int64, device="cuda") for _ in generators]
    rec["before"] = snapshot_places(rec)
    handles, captured = [], []

    def capture():
        torch.cuda.current_blas_handle()  # one per thread, and none can be made in a capture
        begin(rec, device, stream.cuda_stream)
        for g, w in zip(generators, word_pairs, strict=True):
            core.words(g, w[0:1], w[1:2])
            core.swap_generator(g, w[0:1], w[1:2], handles)
        swaps, rec["copies"] = [], {}
        for k in rec["copied"]:
            t = flat.tensors[k]
            buffer = buffer_for(t)
            rec["copies"][k] = core.copy(buffer, t, trace.span(t))
            swaps.append((t, buffer))
        seen = rec["seen"] = trace.observe(
            CUDA, swaps, rec["generators"], True, saves=rec["saves"], graph=rec["graph"],
            ran=rec["ran"], arguments=flat.tensors, spent=rec["spent"],
            reached=[t for _, t, _ in rec["reached"]],
        )  # fmt: skip
        seen["keep"].extend(word_pairs)
        for g, w, handle in zip(generators, word_pairs, handles, strict=True):
            seen["rng"][core.generator_id(g)] = {"handle": handle, "words": w, "at": w, "copy": None}
            seen["made"][core.storage_id(w)] = ""
        seen["sinks"] = rec["sinks"]
        result = trace.run(seen, function, args, kwargs)
        open_sinks(rec, seen, result)
        core.end(core.restore_generators(handles))
        captured.append(True)
        return result, seen

    def leave():
        core.restore_generators(handles)
        if not captured:
            core.abort()  # before the streams are joined again: nobody may wait for a capture

    brackets = [
        collector_off(), (clear_caches, clear_caches), on_side_stream(device), capture_hidden(stream),
        own_accumulators(rec), (lambda: None, leave),
    ]  # fmt: skip
    try:
        outcome = core.within(brackets, capture)
        rec["captured"] = generators
        return outcome
    except BaseException as error:
        if is_stop(error):  # no second run will follow
            raise
        seen = rec["seen"]
        restore_places(rec["before"], seen, tensors_only=False)
        rec["settled"] = True
        rec["reason"] = seen["reason"] if seen and seen["reason"] else failure(error)
        return None


def collector_off():
    """A bracket: no garbage is collected, since a finalizer in a capture may call the driver."""
    return gc.disable, gc.enable if gc.isenabled() else lambda: None


def clear_caches():
    """What PyTorch caches per thread and stream must not be of a capture, nor in it of outside."""
    torch.clear_autocast_cache()
    clear_workspaces()


def is_stop(error):
    """Does this exception come from outside, so that running the function again would lose it: Ctrl-C, the end, what
    the handler of a signal raised?"""
    if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
        return True
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


def find_leaves(rec):
    """Where gradients end outside of the call. Autograd's accumulators are made here, on the caller's
    stream, if there are none yet."""
    return core.sinks(describe.all_tensors(rec["flat"], rec["reached"]))


def vet_leaves(rec):
    """A sentence if a backward inside of the call would be recorded past hooks on accumulators, which a capture
    does not even meet; or None."""
    if rec["saves"] or rec["graph"] is not None or not torch.is_grad_enabled():
        return None
    k = core.sinks_hooked(rec["sinks"])
    paths = [*rec["flat"].paths, *(path for path, *_ in rec["reached"])]
    return errors.hooked_leaf(paths[k]) if k >= 0 else None


def own_accumulators(rec):
    """A bracket. A backward inside of a capture must not meet accumulators that run on the caller's stream. A
    differentiable function has its backward outside, and those are the right ones for it; and a recorded
    graph meets none unless it computes forwards again. Other threads must not miss theirs meanwhile."""
    if rec["saves"] or (rec["graph"] is not None and not rec["graph"]["recomputes"]):
        return NOTHING
    away = functools.partial(core.sinks_away, rec["sinks"])
    return functools.partial(away, True), functools.partial(away, False)


def open_sinks(rec, seen, result):
    """The graph that the run left behind begins at what requires grad in its result."""
    if not rec["saves"]:
        return
    tensors = describe.all_tensors(rec["flat"], rec["reached"])
    core.sinks_begin(seen["sinks"], tensors, describe.pending_in(seen, result, {id(t) for t in tensors}))


def failure(error):
    """A sentence on an exception that left a capture, with the user's line."""
    line, tb, frame = "", error.__traceback__, None
    while tb is not None:
        frame = tb.tb_frame
        name = frame.f_code.co_filename
        if not name.startswith(trace.NOT_USER_CODE):
            line = f"{name}:{tb.tb_lineno}"
        tb = tb.tb_next
    if isinstance(error, core.DriverError):
        return errors.recording_failed(error.args[1], line)
    if "capturable" in str(error):  # an optimizer that looks whether it is being captured
        reason = trace.step_reason(frame, line)
        if reason is not None:
            return reason
    return errors.recording_failed(
        f"{type(error).__name__}: {str(error).split(chr(10))[0].rstrip('.')}", line
    )


def snapshot_places(rec):
    """What a failed capture may have replaced by tensors that were never computed."""
    grads = [
        (t, t.grad)
        for t in describe.all_tensors(rec["flat"], rec["reached"])
        if t.requires_grad and t.is_leaf
    ]
    histories = core.histories(describe.all_tensors(rec["flat"], rec["reached"]))
    return Before(rec["places"], grads, rec["sources"], histories)


def restore_places(before, seen, tensors_only):
    """Put back what a failed capture replaced in places, gradients and random states; or only where it left tensors of
    its own, whose values were never computed."""

    def spoilt(value):
        return not tensors_only or (
            isinstance(value, torch.Tensor)
            and seen is not None
            and core.storage_id(value) in seen["made"]
        )

    found, grads, sources, histories = before
    core.histories_restore(histories)
    for p in found:
        if p.kind == places.DICT_LEN:
            for key in [key for key, value in dict.items(p.holder) if p.want == 0 and spoilt(value)]:
                dict.__delitem__(p.holder, key)
        elif p.kind == places.LIST_LEN:
            more = p.holder[p.want :]
            if any(spoilt(v) for v in more):
                p.holder[p.want :] = [v for v in more if not spoilt(v)]
        elif p.kind != places.EMPTY:
            now = places.value_at(p)
            if now is not p.want and spoilt(now):
                places.put_back(p)
    for tensor, grad in grads:
        if tensor.grad is not grad:
            tensor.grad = grad
    if not tensors_only:
        impure.put_back(sources)
