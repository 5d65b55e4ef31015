"""The miss: what to do with a call that no recording accepts. One visible branch, `miss`:

    inside a mode, a capture, another recording  ─► plain      run the function, nothing else
    a verdict stands, or too many recordings     ─► eager      with a reason that explain() tells
    first call of the function                   ─► warm       run it once under observation
    else                                         ─► record     capture (CUDA) or tape (host), launch

All state of a function is one dict, made by `new_state` and held by the closure that `jit` returned:
what its rows in the core borrow (`keep`), and what decides the next miss.
"""

import contextlib
import gc
import threading
import weakref

import cgt_core as core
import torch

from . import errors, options, places, pytree, trace
from .private import clear_workspaces
from .trace import CUDA, HOST

NONE = -1
UNUSED, PINNED, COPIED, VALUE = range(4)
FRESH, SHARED, VIEW, INPUT, AGAIN = range(5)
MISS_META, MISS_POINTER, MISS_ALIGN, MISS_VALUE, MISS_OVERLAP, MISS_GRAD, MISS_PLACE = range(3, 10)
CONSTANT_TYPES = (type(None), bool, int, float, complex, str, bytes, range, slice, type)

RECORDING = threading.RLock()  # around warming and recording, in the whole process
POOLS = {}  # device index -> (pool id, side stream); an import-time table that devices fill once
DOOMED = []  # (function row, born) of collected functions; freed at the next miss or step


def new_state(f, born, name, opts):
    """Everything that Python knows about one jitted function."""
    return {
        "f": f, "born": born, "name": name, "opts": opts, "keep": {}, "programs": {},
        "warm": False, "driver": None, "pointers": {}, "moved": set(), "written": set(),
        "reasons": {}, "verdicts": {}, "cool": [0, options.COOL_DOWN[0]], "escapes": 0,
        "generators": {}, "unguarded": [],
    }  # fmt: skip


def miss(state, function, spec, args, kwargs):
    """A call that was not replayed: decide, run, return the result."""
    kind = core.blocker()
    if kind == 0 and state["driver"] == CUDA and core.stream_is_capturing(torch.cuda.current_device()):
        kind = 4
    if kind:
        return eager(state, function, args, kwargs, errors.blocked(kind), kind == 1 and is_mine())
    if core.paths_mine():  # a finalizer called us in the middle of a call
        return function(*args, **kwargs)
    if not RECORDING.acquire(blocking=False):
        return eager(state, function, args, kwargs, errors.busy())
    try:
        sweep()
        flat = pytree.flatten_call(args, kwargs, *state["opts"]["static"])
        spec = find_spec(state, flat, args, kwargs) if spec == NONE else spec
        reason = verdict(state, spec, flat)
        if reason is not None:
            return eager(state, function, args, kwargs, reason)
        if not state["warm"]:
            return warm(state, function, spec, flat, args, kwargs)
        return record(state, function, spec, flat, args, kwargs)
    finally:
        RECORDING.release()


def is_mine():
    """Is the mode around us that of a recording under way in this thread: are we being inlined?"""
    return RECORDING._is_owned()


def eager(state, function, args, kwargs, reason, inlined=False):
    """Run the plain function; `inlined` calls belong to the recording around them."""
    if inlined:
        core.fn_count(state["f"], "calls", -1)
    else:
        core.fn_count(state["f"], "eager")
        state["reasons"][reason] = state["reasons"].get(reason, 0) + 1
    return function(*args, **kwargs)


# --- specs, verdicts, limits ------------------------------------------------------------------


def find_spec(state, flat, args, kwargs):
    """Add a spec for these arguments. Objects compared by identity are held weakly if they can be:
    a dead one takes its spec and recordings along."""
    f = state["f"]
    program, spec_of = [], []
    for kind, n, obj in flat.program:
        if kind == pytree.SAME and not isinstance(obj, type):
            with contextlib.suppress(TypeError):
                obj = weakref.ref(obj, lambda _, s=spec_of, b=state["born"]: drop_spec(f, b, s))
        program.append((kind, n, obj))
    program = tuple(program)
    spec_of.append(core.spec_add(f, program, len(flat.tensors)))
    state["programs"][spec_of[0]] = (program, flat.paths)
    return spec_of[0]


def drop_spec(f, born, spec_of):
    """An argument object died: its spec can never match again."""
    DOOMED.append((f, born, spec_of[0]))


def sweep():
    """Free the rows of what was collected since. Never in the middle of a call."""
    if not DOOMED or core.paths_mine():
        return
    core.paths_lock()
    try:
        while DOOMED:
            f, born, spec = DOOMED.pop()
            if spec is None:
                core.fn_free(f, born)
            else:
                core.spec_free_if(f, born, spec)
    finally:
        core.paths_unlock()


def verdict(state, spec, flat):
    """A reason to run eagerly, or None. Verdicts and limits end after a cool-down of calls."""
    for path, tensor in zip(flat.paths, flat.tensors, strict=True):
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            return errors.subclass(path, type(tensor).__name__)
    calls = core.fn_counts(state["f"])[0]
    standing = state["verdicts"].get(key_of(spec, flat))
    if standing is not None and calls < standing[1]:
        return standing[0]
    nodes = core.fn_nodes(state["f"])
    if state["warm"] and len(nodes) >= state["opts"]["max_records"]:
        wait, length = state["cool"]
        if wait == 0:
            state["cool"] = [calls + length, min(2 * length, options.COOL_DOWN[1])]
            wait = calls + length
        if calls < wait:
            return errors.limit(len(nodes), why_missed(state, spec, flat))
        state["cool"][0] = 0
        drop_node(state, nodes[-1])  # matched longest ago
    return None


def key_of(spec, flat):
    """What a verdict is about: structure, ambient state and shapes."""
    return spec, core.ambient(), tuple((t.shape, t.dtype, t.device) for t in flat.tensors)


def condemn(state, spec, flat, reason):
    """Run eagerly from now on, until a cool-down that doubles with each verdict."""
    verdicts = state["verdicts"]
    key = key_of(spec, flat)
    length = min(2 * verdicts[key][2], options.COOL_DOWN[1]) if key in verdicts else options.COOL_DOWN[0]
    if len(verdicts) > 256:
        verdicts.clear()
    verdicts[key] = (reason, core.fn_counts(state["f"])[0] + length, length)


def count_eager(state, reason):
    """A call that had to run eagerly after all, and why."""
    core.fn_count(state["f"], "eager")
    state["reasons"][reason] = state["reasons"].get(reason, 0) + 1


def why_missed(state, spec, flat):
    """A sentence on what the newest recording of this structure did not accept."""
    for node, why, index in core.node_misses(state["f"], spec, list(flat.tensors)):
        kept = state["keep"].get(node)
        if kept is None or why in (0, 1, 2):
            continue
        if why == MISS_PLACE:
            return errors.place_changed(kept["place_paths"][index])
        if why == MISS_GRAD:
            return errors.place_changed(kept["slot_paths"][kept["grads"][index][0]] + ".grad")
        path = kept["slot_paths"][index]
        if why == MISS_POINTER:
            leaf, _, _, ptr = core.node_facts(node)[5][index]
            now = flat.tensors[leaf].data_ptr() if leaf != NONE else 0
            return errors.moved(path, ptr, now)
        return errors.arguments_changed(path)
    return errors.arguments_changed("an argument's structure or ambient state")


def drop_node(state, node):
    """Free one recording and what it kept alive."""
    core.paths_lock()
    try:
        core.node_drop(node)
    finally:
        core.paths_unlock()
    state["keep"].pop(node, None)


# --- warm --------------------------------------------------------------------------------------


def warm(state, function, spec, flat, args, kwargs):
    """Run once eagerly, on the stream that will record, and learn what the function touches."""
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    guess = CUDA if any(t.is_cuda for t in flat.tensors) or state["driver"] == CUDA else HOST
    seen = trace.observe(guess)
    with side_stream(device):
        result = trace.run(seen, function, args, kwargs)
    core.fn_count(state["f"], "warmups")
    state["warm"] = True
    state["driver"] = CUDA if any(d.type == "cuda" for d in seen["devices"]) else HOST
    state["generators"].update(seen["generators"])
    note_leaves(state, seen, flat)
    if seen["reason"] is not None and guess == state["driver"]:
        condemn(state, spec, flat, seen["reason"])
        state["warm"] = False
    return result


def note_leaves(state, seen, flat):
    """Remember where each argument was and which ones the function writes."""
    for path, tensor in zip(flat.paths, flat.tensors, strict=True):
        state["pointers"][path] = core.address(tensor)
        if core.storage_id(tensor) in seen["written"]:
            state["written"].add(path)


@contextlib.contextmanager
def side_stream(device):
    """The stream that warms and records, ordered after and before the caller's."""
    if device is None:
        yield None
        return
    stream = pool_of(device)[1]
    current = torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield stream
    current.wait_stream(stream)


def pool_of(device):
    """The device's private pool and side stream, made once."""
    if device not in POOLS:
        POOLS[device] = (torch.cuda.graph_pool_handle(), torch.cuda.Stream(device))
        # Held as long as the process lives: recordings come and go, the pool stays one.
        core.begin_pool(device, POOLS[device][0], POOLS[device][1].cuda_stream)
        core.end_pool(device, POOLS[device][0])
        core.load_words_kernel(device)
    return POOLS[device]


# --- record ------------------------------------------------------------------------------------


def record(state, function, spec, flat, args, kwargs):
    """Record the call as a node and return its result."""
    f = state["f"]
    superseded = note_moves(state, spec, flat)
    found, unguarded = places.find_places(function, flat.objects)
    reached = reach_tensors(found, flat)
    copied = choose_copied(state, flat, reached)
    grads = grads_before(flat, reached)
    versions = [t._version if not t.is_inference() else 0 for t in all_tensors(flat, reached)]
    driver = state["driver"]
    rec = {"flat": flat, "reached": reached, "places": found, "copied": copied, "grads": grads,
           "versions": versions, "driver": driver, "ambient": core.ambient()}  # fmt: skip
    if driver == CUDA:
        outcome = record_cuda(state, function, args, kwargs, rec)
    else:
        outcome = record_host(state, function, args, kwargs, rec)
    if outcome is None:  # nothing ran: the capture failed or was left
        reason = rec["reason"]
        condemn(state, spec, flat, reason)
        return eager(state, function, args, kwargs, reason)
    result, seen = outcome
    note_leaves(state, seen, flat)
    row = describe(state, rec, seen, spec, result, args, kwargs)
    if isinstance(row, str):  # ran, but cannot be replayed
        return abandon(state, spec, flat, rec, seen, result, row)
    for node in superseded:
        drop_node(state, node)
    return add_node(state, spec, flat, rec, seen, row, unguarded, f)


def note_moves(state, spec, flat):
    """Arguments whose address moved since a pinned recording are copied from now on. Returns the
    recordings that a new one will replace."""
    superseded = []
    for node, why, index in core.node_misses(state["f"], spec, list(flat.tensors)):
        if why != MISS_POINTER:
            continue
        leaf, binding, written, _ = core.node_facts(node)[5][index]
        if leaf != NONE and not written and state["opts"]["inputs"] == "auto":
            state["moved"].add(flat.paths[leaf])
            superseded.append(node)
    return superseded


def reach_tensors(found, flat):
    """[(path, tensor)] of the tensors in places that are not arguments, each once."""
    leaves = {id(t) for t in flat.tensors}
    reached = {}
    for place in found:
        if isinstance(place.want, torch.Tensor) and id(place.want) not in leaves:
            reached.setdefault(id(place.want), (place.path, place.want))
    for path, tensor in [*zip(flat.paths, flat.tensors, strict=True), *list(reached.values())]:
        if tensor.is_leaf and tensor.requires_grad and tensor.grad is not None:
            grad = tensor.grad
            if id(grad) not in leaves:
                reached.setdefault(id(grad), (path + ".grad", grad))
    return list(reached.values())


def all_tensors(flat, reached):
    """Slots in order: every argument leaf, then every reached tensor."""
    return [*flat.tensors, *(t for _, t in reached)]


def choose_copied(state, flat, reached):
    """Leaves (by index) that the graph copies from wherever they are. The rest is pinned."""
    how = state["opts"]["inputs"]
    if how == "pinned":
        return []
    ranges = [
        (core.storage_id(t), core.address(t), core.address(t) + trace.span(t))
        for t in all_tensors(flat, reached)
    ]
    chosen = []
    for k, (path, t) in enumerate(zip(flat.paths, flat.tensors, strict=True)):
        if path in state["written"] or type(t) is not torch.Tensor or t.layout != torch.strided:
            continue
        if t.is_cuda != (state["driver"] == CUDA) or (t.requires_grad and torch.is_grad_enabled()):
            continue
        if t.is_conj() or t.is_neg() or t.is_quantized:
            continue
        if how == "auto" and path not in state["moved"]:
            before = state["pointers"].get(path)
            if before is None or before == core.address(t):
                continue
        sid, lo, hi = ranges[k]
        if any(j != k and r[0] == sid and r[1] < hi and lo < r[2] for j, r in enumerate(ranges)):
            continue  # shares bytes with another tensor: a copy would part them
        chosen.append(k)
    return chosen


def grads_before(flat, reached):
    """{slot: identity of .grad} of leaf tensors that can have one."""
    return {
        k: core.grad_id(t)
        for k, t in enumerate(all_tensors(flat, reached))
        if t.requires_grad and t.is_leaf
    }


def buffer_for(t):
    """Memory for a copied slot, in the input's own alignment class: kernels choose their vector
    width, and reductions their order, by the address."""
    n = trace.span(t)
    room = torch.empty(n + 2 * options.ALIGN, dtype=torch.uint8, device=t.device)
    shift = (core.address(t) - core.address(room)) % options.ALIGN
    return room[shift : shift + n]


def record_host(state, function, args, kwargs, rec):
    """Run the function for real while the tape is written. What it raises is the user's own."""
    flat = rec["flat"]
    core.begin(HOST, -1, 0, (0, 0))
    try:
        swaps, rec["copies"] = [], {}
        for k in rec["copied"]:
            t = flat.tensors[k]
            buffer = buffer_for(t)
            core.view_like(buffer, core.twin(t), 0).copy_(t.detach())
            rec["copies"][k] = core.copy(buffer, t, trace.span(t))
            swaps.append((t, buffer))
        seen = trace.observe(HOST, swaps, recording=True)
        seen["keep"].extend(buffer for _, buffer in swaps)
        torch.clear_autocast_cache()
        result = trace.run(seen, function, args, kwargs)
        torch.clear_autocast_cache()
        if seen["reason"] is None:
            core.end([])
        return result, seen
    except core.DriverError as error:
        core.abort()
        if "seen" in locals():  # the function ran: its result stands, only the recording is lost
            seen["reason"] = errors.recording_failed(error.args[1], "")
            return result, seen
        rec["reason"] = errors.recording_failed(error.args[1], "")
        return None
    except BaseException:
        core.abort()
        raise


def record_cuda(state, function, args, kwargs, rec):
    """Capture the function; nothing executes. On any failure everything is put back and None is
    returned: the caller then runs the function eagerly, which raises the user's own exceptions."""
    flat = rec["flat"]
    device = torch.cuda.current_device()
    pool, stream = pool_of(device)
    generators = [torch.cuda.default_generators[device]]
    generators += [g for g in state["generators"].values() if g.device.type == "cuda" and g is not generators[0]]
    # Ordinary memory, made before the capture: kernels of the recording read these words.
    word_pairs = [torch.zeros(2, dtype=torch.int64, device="cuda") for _ in generators]
    before = snapshot_places(rec)
    handles, seen, result = [], None, None
    collecting = gc.isenabled()
    gc.disable()  # a finalizer in a capture may call the driver
    torch.clear_autocast_cache()
    clear_workspaces()
    try:
        with side_stream(device):
            try:
                core.begin(CUDA, device, stream.cuda_stream, pool)
                for g, w in zip(generators, word_pairs, strict=True):
                    core.words(g, w[0:1], w[1:2])
                    handles.append(core.swap_generator(g, w[0:1], w[1:2]))
                swaps, rec["copies"] = [], {}
                for k in rec["copied"]:
                    t = flat.tensors[k]
                    buffer = buffer_for(t)
                    rec["copies"][k] = core.copy(buffer, t, trace.span(t))
                    swaps.append((t, buffer))
                seen = trace.observe(CUDA, swaps, recording=True)
                seen["keep"].extend([buffer for _, buffer in swaps] + word_pairs)
                result = trace.run(seen, function, args, kwargs)
                core.end(restore_generators(handles))
            except BaseException:
                restore_generators(handles)
                core.abort()  # before the streams are joined again: nobody may wait for a capture
                raise
        rec["generators"] = generators
        return result, seen
    except BaseException as error:
        del result
        restore_places(before)
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        rec["reason"] = seen["reason"] if seen and seen["reason"] else failure(error)
        return None
    finally:
        clear_workspaces()
        torch.clear_autocast_cache()
        if collecting:
            gc.enable()


def restore_generators(handles):
    """Give every generator its own state back; by how much a run advances each."""
    return [core.restore_generator(handles.pop(0)) for _ in range(len(handles))]


def failure(error):
    """A sentence on an exception that left a capture, with the user's line."""
    line, tb = "", error.__traceback__
    while tb is not None:
        name = tb.tb_frame.f_code.co_filename
        if not name.startswith(trace.NOT_USER_CODE):
            line = f"{name}:{tb.tb_lineno}"
        tb = tb.tb_next
    if isinstance(error, core.DriverError):
        return errors.recording_failed(error.args[1], line)
    return errors.recording_failed(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", line)


def snapshot_places(rec):
    """What a failed capture may have replaced by tensors that were never computed."""
    grads = [
        (t, t.grad) for t in all_tensors(rec["flat"], rec["reached"]) if t.requires_grad and t.is_leaf
    ]
    return rec["places"], grads


def restore_places(before):
    """Put back dict entries, list items, cells and gradients that a failed capture replaced."""
    found, grads = before
    for p in found:
        if p.kind == places.DICT_ITEM and p.holder.get(p.key, places.MISSING) is not p.want:
            if p.want is places.MISSING:
                p.holder.pop(p.key, None)
            else:
                p.holder[p.key] = p.want
        elif p.kind == places.LIST_ITEM and p.key < len(p.holder) and p.holder[p.key] is not p.want:
            p.holder[p.key] = p.want
        elif p.kind == places.LIST_LEN:
            del p.holder[p.want :]
        elif p.kind == places.CELL and p.holder.cell_contents is not p.want:
            p.holder.cell_contents = p.want
    for tensor, grad in grads:
        if tensor.grad is not grad:
            tensor.grad = grad


# --- describe: from what was seen to rows -----------------------------------------------------


def describe(state, rec, seen, spec, result, args, kwargs):
    """Rows for slots, outputs, gradients; or the sentence that says why there can be none."""
    if seen["reason"] is not None:
        return seen["reason"]
    flat, reached = rec["flat"], rec["reached"]
    again = pytree.flatten_call(args, kwargs, *state["opts"]["static"])
    if len(again.tensors) != len(flat.tensors) or any(
        a is not b for a, b in zip(again.tensors, flat.tensors, strict=True)
    ) or again.program != flat.program:
        return errors.changed_arguments("an argument")
    try:
        out = pytree.flatten(result, "result")
    except errors.CgtError as error:
        return str(error)
    slots, paths = describe_slots(rec, seen)
    reason = vet_constants(out, flat)
    if reason is not None:
        return reason
    outs = describe_outs(rec, seen, out, slots)
    if isinstance(outs, str):
        return outs
    grads = describe_grads(rec, seen, slots, outs, paths)
    if isinstance(grads, str):
        return grads
    kept = describe_escapes(rec, seen, out, outs)
    if kept is not None:
        state["escapes"] += 1
        return kept
    return {"slots": slots, "paths": paths, "outs": outs, "grads": grads, "out": out}


def describe_slots(rec, seen):
    """One row per argument leaf, then one per reached tensor that the run touched."""
    flat, reached = rec["flat"], rec["reached"]
    slots, paths, bumped = [], [], set()
    for k, t in enumerate(all_tensors(flat, reached)):
        is_leaf = k < len(flat.tensors)
        sid = core.storage_id(t)
        touched = sid in seen["touched"] or sid in seen["written"]
        written = sid in seen["written"]
        bumps = 0 if t.is_inference() else t._version - rec["versions"][k]
        if bumps and (sid, t._version) in bumped:
            bumps = 0  # a view: it shares the counter that is already moved
        bumped.add((sid, t._version))
        if not touched:
            binding = UNUSED
        elif rec["driver"] == CUDA and not t.is_cuda:
            binding = VALUE
        elif k in rec["copies"] and id(t) not in seen["mirrored"]:
            binding = COPIED
        else:
            binding = PINNED
        copy = rec["copies"][k] if binding == COPIED else NONE
        path = flat.paths[k] if is_leaf else reached[k - len(flat.tensors)][0]
        leaf = k if is_leaf else NONE
        slots.append((leaf, None if is_leaf else t, t, binding, written, bumps, copy))
        paths.append(path)
    return slots, paths


def vet_constants(out, flat):
    """Static parts of the result must be what every replay may return again."""
    given = {id(obj) for _, obj in flat.objects}
    for path, obj in out.objects:
        if id(obj) not in given and not isinstance(obj, CONSTANT_TYPES) and not callable(obj):
            return errors.strange_output(path, type(obj).__name__)
    return None


def describe_outs(rec, seen, out, slots):
    """One row per tensor of the result."""
    by_id = {id(s[2]): k for k, s in reversed(list(enumerate(slots)))}
    outs, first_of, seen_ids = [], {}, {}
    for path, t in zip(out.paths, out.tensors, strict=True):
        if id(t) in seen_ids:
            outs.append((AGAIN, seen_ids[id(t)], core.twin(t), 0, 0, NONE, False, ""))
            continue
        seen_ids[id(t)] = len(outs)
        if id(t) in by_id:
            outs.append((INPUT, by_id[id(t)], core.twin(t), 0, 0, NONE, False, ""))
            continue
        row = describe_tensor(rec, seen, path, t, slots, first_of, len(outs))
        if isinstance(row, str):
            return row
        outs.append(row)
    return outs


def describe_tensor(rec, seen, path, t, slots, first_of, index, grad_slot=NONE):
    """The row of one new tensor, or why it cannot be handed out."""
    if type(t) not in (torch.Tensor, torch.nn.Parameter) or t.layout != torch.strided:
        return errors.strange_output(path, type(t).__name__)
    if t.requires_grad and not (t.grad_fn is not None and trace.is_spent(t.grad_fn)):
        return errors.needs_grad(path)
    if rec["driver"] == CUDA and not t.is_cuda:
        return errors.host_output(path)
    sid = core.storage_id(t)
    version = 0 if t.is_inference() else t._version
    proto = core.twin(t.detach())
    for k, slot in enumerate(slots):
        base = slot[2]
        if core.storage_id(base) == sid:
            return (VIEW, k, proto, core.address(t) - core.address(base), 0, NONE, False, "")
    if sid in seen["buffers"]:
        lo, _, buffer, leaf = seen["buffers"][sid]
        k = next(k for k, s in enumerate(slots) if s[2] is leaf)
        return (VIEW, k, proto, core.address(t) - core.address(buffer), 0, NONE, False, "")
    if sid not in seen["made"]:
        return errors.unknown_output(path)
    line = seen["made"][sid]
    if sid in first_of:
        return (SHARED, first_of[sid], proto, 0, version, grad_slot, grad_slot != NONE, line)
    first_of[sid] = index
    return (FRESH, NONE, proto, 0, version, grad_slot, grad_slot != NONE, line)


def describe_grads(rec, seen, slots, outs, paths):
    """Gradients that the run replaced become hidden outputs; ones it read or added to are guarded."""
    first_of = {core.storage_id(o[2]): k for k, o in enumerate(outs) if o[0] == FRESH}
    grads = []
    for k, before in rec["grads"].items():
        t = slots[k][2]
        now = core.grad_id(t)
        if now == before:
            if now and core.storage_id(t.grad) in seen["touched"]:
                grads.append((k, False, now, NONE))
            continue
        if now == 0:
            grads.append((k, False, 0, NONE))
            continue
        if core.storage_id(t.grad) not in seen["made"]:
            return errors.foreign_grad(paths[k])
        row = describe_tensor(rec, seen, paths[k] + ".grad", t.grad, slots, first_of, len(outs), k)
        if isinstance(row, str):
            return row
        outs.append(row)
        grads.append((k, before == 0, 0, len(outs) - 1))
    return grads


def describe_escapes(rec, seen, out, outs):
    """A tensor of the recording that outlives the call without being an output: nobody would guard
    it, and a replay would change it under its holder's hands."""
    known = {core.storage_id(o[2]) for o in outs}
    known.update(core.storage_id(t) for t in out.tensors)
    for attempt in range(2):
        alive = [r() for r in seen["results"]]
        alive = [
            t for t in alive
            if t is not None and core.storage_id(t) not in known and core.storage_id(t) in seen["made"]
        ]  # fmt: skip
        if not alive:
            return None
        if attempt == 0:
            del alive
            gc.collect()  # cycles are not holders
    names = [
        p.path for p in rec["places"]
        if p.kind == places.DICT_ITEM and any(p.holder.get(p.key) is t for t in alive)
    ]  # fmt: skip
    seen["escaped"] = alive
    holder = f", held by {names[0]}" if names else ""
    return errors.kept_tensor(seen["made"][core.storage_id(alive[0])], holder)


# --- what becomes of it -----------------------------------------------------------------------


def abandon(state, spec, flat, rec, seen, result, reason):
    """The function ran (host) or was captured whole (CUDA), but cannot be replayed. The host's
    results stand; a capture is launched once and its memory moved out of the pool."""
    if rec["driver"] == CUDA:
        tensors = [r() for r in seen["results"]]
        alive = {
            core.storage_id(t): t
            for t in tensors
            if t is not None and t.is_cuda and core.storage_id(t) in seen["made"]
        }
        core.run_once(list(alive.values()))
    core.abort()
    if "escaped" not in seen or state["escapes"] > options.ESCAPE_TRIES:
        condemn(state, spec, flat, reason)
    count_eager(state, reason)
    return result


def add_node(state, spec, flat, rec, seen, row, unguarded, f):
    """Hand the rows to the core, keep alive what they borrow, and give the call its result."""
    out = row["out"]
    used = [k for k, s in enumerate(row["slots"]) if s[0] != NONE or needs_row(k, s, row)]
    index = {k: j for j, k in enumerate(used)}
    slots = [row["slots"][k] for k in used]
    outs = [
        (kind, index[ref] if kind in (VIEW, INPUT) else ref, proto, shift, version,
         index[g] if g != NONE else NONE, hidden, line)
        for kind, ref, proto, shift, version, g, hidden, line in row["outs"]
    ]  # fmt: skip
    grads = [(index[k], was_none, was, o) for k, was_none, was, o in row["grads"]]
    ret_python = any(op[0] in (pytree.DATACLASS, pytree.CUSTOM) for op in out.program)
    groups, place_paths = group_places(rec["places"])
    node = core.add_node(
        f, spec, rec["ambient"], slots, outs, out.program, ret_python, grads, groups
    )
    known = {core.storage_id(s[2]) for s in slots} | set(seen["buffers"]) | set(seen["made"])
    loose = [t for sid, t in seen["touched"].items() if sid not in known]
    state["keep"][node] = {
        "objects": (out.program, groups, [s[1] for s in slots], rec.get("generators"), seen["keep"]),
        "slot_paths": [row["paths"][k] for k in used], "place_paths": place_paths,
        "grads": grads, "loose": [core.twin(t) for t in loose],
    }  # fmt: skip
    state["unguarded"] = unguarded
    core.fn_count(f, "records")
    tensors = list(flat.tensors)
    del row, out, seen
    return core.run_node(node, tensors, rec["driver"] == CUDA)


def needs_row(k, slot, row):
    """Does a reached tensor need a slot: was it touched, returned, or given a gradient?"""
    return (
        slot[3] != UNUSED
        or any(o[0] in (VIEW, INPUT) and o[1] == k for o in row["outs"])
        or any(g[0] == k for g in row["grads"])
    )


def group_places(found):
    """Places by the dict that holds them (the core skips a dict that did not change), the rest in
    one group that is compared at each call."""
    groups, loose = {}, []
    for p in found:
        number = p.want if p.kind in (places.DICT_LEN, places.LIST_LEN) else 0
        number = p.key if p.kind == places.LIST_ITEM else number
        present = p.want is not places.MISSING
        row = (p.kind, is_plain(p.want), p.holder, p.key, p.want, present, number)
        if p.kind in (places.DICT_ITEM, places.DICT_LEN):
            groups.setdefault(id(p.holder), (p.holder, []))[1].append((row, p.path))
        else:
            loose.append((row, p.path))
    ordered = list(groups.values()) + ([(None, loose)] if loose else [])
    rows = [(holder, [r for r, _ in members]) for holder, members in ordered]
    return rows, [path for _, members in ordered for _, path in members]


def is_plain(value):
    """Compared by value in a place; anything else by identity."""
    return isinstance(value, (bool, int, float, complex, str, bytes)) or type(value) in pytree.PLAIN_TYPES


def reset_state(state):
    """Free a function's recordings; what it learnt about its arguments goes too."""
    core.paths_lock()
    try:
        core.fn_reset(state["f"])
    finally:
        core.paths_unlock()
    fresh = new_state(state["f"], state["born"], state["name"], state["opts"])
    fresh["reasons"] = state["reasons"]
    state.clear()
    state.update(fresh)
