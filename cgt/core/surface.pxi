# What Python sees: ids in, plain tuples out. The only chapter that names the process's table, and
# the only one with `def`.

import weakref

cdef object WEAKREF = weakref.ref
FAILED = [None]            # (f, DriverError) -> the exception that a failed replay raises
POISONED = [None]          # (line that made it) -> message; set once by the front end
SAME_VALUE = [None]        # (recorded, value) -> bool for rare types; set once by the front end
UNFLATTEN = [None]         # (program, tensors) -> result; set once by the front end

table_start(&TABLE)
dict_watch_start()
if observe_start() != 0: raise_pending()


def make_site(int f, object on_miss, object function, dict reasons):
    """The function that `jit` returns: a closure over the function's row. `function`: what runs where a verdict
    stands; reasons[text] counts such calls."""
    def site(*args, **kwargs):
        return call(&TABLE, f, <PyObject*>args, <PyObject*>kwargs, on_miss, function, reasons)
    return site


def fn_add(int outputs, bint backward, str range_name, object build):
    """build(id, born) with a row for a new function, which goes again if that fails; what it returns. The caller keeps
    the name, which profilers show. backward: autograd calls it."""
    cdef id_t f = row_take(&TABLE, &TABLE.fns)
    cdef Fn* fn = fn_row(&TABLE, f)
    cdef int64_t born
    fn.outputs = outputs
    fn.backward = backward
    fn.range_name = <PyObject*>range_name
    fn.first_spec = fn.path = NONE
    TABLE.births += 1
    fn.born = born = TABLE.births
    try:
        return build(f, born)
    except BaseException:
        fn_free(f, born)
        raise


def fn_free(int f, int64_t born):
    """Free a function's rows; a stale id is ignored."""
    if fn_is(f, born):
        fn_clear(&TABLE, f)
        row_drop(&TABLE, &TABLE.fns, f)


def fn_is(int f, int64_t born):
    """Does the row still belong to the function that was born then?"""
    return bool(f < TABLE.fns.n and fn_row(&TABLE, f).alive and fn_row(&TABLE, f).born == born)


def fn_reset(int f):
    """Free a function's specs and nodes; counters stay."""
    fn_clear(&TABLE, f)
    fn_row(&TABLE, f).wasted = 0


def fn_count(int f, str column, int64_t by=1):
    """Add to one of the counters that Python keeps; take back a call with column 'calls'."""
    cdef Fn* fn = fn_row(&TABLE, f)
    if column == "warmups": fn.warmups += by
    elif column == "records": fn.records += by
    elif column == "eager": fn.eager += by
    elif column == "calls": fn.calls += by
    else: raise KeyError(column)


def fn_counts(int f):
    """(calls, warmups, records, replays, eager, rebinds, copied_bytes, rescues, rescued_bytes,
    graph_nodes)"""
    cdef Fn* fn = fn_row(&TABLE, f)
    cdef Node* node
    cdef int64_t graph_nodes = 0
    for k in range(TABLE.nodes.n):
        node = node_row(&TABLE, k)
        if node.alive and node.fn == f: graph_nodes += node.n_graph_nodes
    return (fn.calls, fn.warmups, fn.records, fn.replays, fn.eager, fn.rebinds, fn.copied_bytes,
            fn.rescues, fn.rescued_bytes, graph_nodes)


def fn_nodes(int f):
    """Node ids of a function, used last first."""
    cdef Node* node
    ids = []
    for k in range(TABLE.nodes.n):
        node = node_row(&TABLE, k)
        if node.alive and node.fn == f: ids.append((-node.used, k))
    return [k for _, k in sorted(ids)]


def children(int path, int parent, int f):
    """Nodes of f behind a parent (-1: that begin an iteration), newest match first."""
    cdef id_t n = first_child(&TABLE, path, parent, f)
    ids = []
    while n != NONE:
        ids.append(n)
        n = node_row(&TABLE, n).next
    return ids


def node_facts(int n):
    """{name: value} of what a report says about a node."""
    cdef Node* node = node_row(&TABLE, n)
    cdef Slot* s
    cdef Guard* g
    written = {node_effect(&TABLE, node, k).slot for k in range(node.len[EFFECTS])
               if node_effect(&TABLE, node, k).kind == WRITES}
    slots = []
    for k in range(node.len[SLOTS]):
        s, g = node_slot(&TABLE, node, k), node_guard(&TABLE, node, k)
        slots.append((g.leaf, g.binding, k in written, <uintptr_t>slot_ptr(&TABLE, node, k), s.from_node))
    return {
        "fn": node.fn, "spec": node.spec, "path": node.path, "parent": node.parent,
        "depth": node.depth, "children": node.children, "used": node.used,
        "n_replay": node.n_replay, "graph_nodes": node.n_graph_nodes, "slots": tuple(slots),
        "copied": sum([node_patch(&TABLE, node, k).nbytes for k in range(node.len[PATCHES])]),
        "out_bytes": sum([storage_nbytes(node_out(&TABLE, node, k).proto)
                          for k in range(node.len[OUTS])
                          if node_out(&TABLE, node, k).kind == FRESH
                          and node_out(&TABLE, node, k).proto is not NULL]),  # being freed
        "deads": node.len[DEADS],
    }


def slot_addresses(int n, int k, list tensors):
    """(address that slot k of node n wants, address it has in a call with these leaves)."""
    cdef Node* node = node_row(&TABLE, n)
    cdef PyObject** leaves = borrowed(tensors)
    cdef PyObject* x
    x = slot_tensor(&TABLE, node, k, leaves)
    free(leaves)
    return <uintptr_t>slot_ptr(&TABLE, node, k), <uintptr_t>(tensor_ptr(x) if x is not NULL else NULL)


def dead_line(int n, int k):
    """Where the output was made that must be dead before node n runs: number k of them."""
    cdef Dead* d = node_dead(&TABLE, node_row(&TABLE, n), k)
    return <object>node_out(&TABLE, node_row(&TABLE, d.node), d.out).line


def node_drop(int n):
    """Free one node and all behind it."""
    node_free(&TABLE, n)
    if CGT_DEBUG: table_check(&TABLE)


def node_oldest():
    """The leaf of the trees that ran longest ago, or None. Not the node that a path has come to."""
    cdef Node* node
    cdef id_t best = NONE
    for k in range(TABLE.nodes.n):
        node = node_row(&TABLE, k)
        if not node.alive or node.children or path_row(&TABLE, node.path).current == k: continue
        if best == NONE or node.used < node_row(&TABLE, best).used: best = k
    return best if best != NONE else None


def nodes():
    """Ids of all nodes."""
    return [k for k in range(TABLE.nodes.n) if node_row(&TABLE, k).alive]


def freed():
    """[(fn, node), ...] of nodes freed since the last time: their owners can go."""
    cdef id_t* row = <id_t*>TABLE.freed.rows
    pairs = [(row[2 * k], row[2 * k + 1]) for k in range(TABLE.freed.n)]
    TABLE.freed.n = 0
    return pairs


def spec_add(int f, object program, int n_leaves, dict programs, object paths):
    """A spec for a function. programs[spec] becomes (program, paths): its objects must stay alive."""
    cdef id_t s = row_take(&TABLE, &TABLE.specs)
    cdef id_t at = program_add(&TABLE, program)
    cdef Spec* spec = spec_row(&TABLE, s)
    cdef Fn* fn = fn_row(&TABLE, f)
    spec.fn = f
    spec.op_at = at
    spec.op_n = <int32_t>len(program)
    spec.n_leaves = n_leaves
    spec.shape = program_shape(&TABLE, at, spec.op_n)
    spec.next = fn.first_spec
    fn.first_spec = s
    # A mismatch can be found as late as the last leaf of the longest program.
    if n_leaves > fn.max_leaves: fn.max_leaves = n_leaves
    programs[s] = (program, paths)
    return s


def spec_free_if(int f, int64_t born, int s):
    """Free a spec and its nodes, if the function is still the one that was born then."""
    cdef id_t k
    if not fn_is(f, born): return
    k = fn_row(&TABLE, f).first_spec
    while k != NONE and k != s: k = spec_row(&TABLE, k).next
    if k == s: spec_free(&TABLE, s)


def verdict_fn(int f, str reason, int64_t until, int patience=0):
    """Calls of a function run eagerly from now on, where no recording takes them, until it was called so often, or
    until so many in a row were alike."""
    verdict_set(&fn_row(&TABLE, f).verdict, reason, until, 0)
    fn_row(&TABLE, f).patience = patience


def fn_hopes(int f):
    """(how many calls in a row were alike, of those that a verdict kept from Python; how many recordings were freed
    that were never replayed)."""
    return fn_row(&TABLE, f).alike, fn_row(&TABLE, f).wasted


def node_replace(int n):
    """Drop a recording for which another one was made: it was not wasted."""
    cdef id_t f = node_row(&TABLE, n).fn
    wasted = node_row(&TABLE, n).n_replay == 0
    node_free(&TABLE, n)
    fn_row(&TABLE, f).wasted -= wasted
    if CGT_DEBUG: table_check(&TABLE)


def verdict_spec(int spec, list tensors, str reason, int64_t until):
    """The same of calls with this structure, ambient state and tensors of these shapes."""
    cdef uint64_t ambient[3]
    cdef PyObject** leaves = borrowed(tensors)
    ambient_now(ambient)
    verdict_set(&spec_row(&TABLE, spec).verdict, reason, until,
                call_key(spec, ambient, leaves, <int32_t>len(tensors)))
    free(leaves)


def verdict_place(int path, int parent, int f, str reason, int64_t until):
    """The same of calls behind this node, where there are recordings already."""
    cdef Edge* e = edge_find(&TABLE, path, parent, f)
    if e.fn != NONE and e.first != NONE: verdict_set(&e.verdict, reason, until, 0)


def node_misses(int path, int parent, int f, int spec, list tensors):
    """Why each of these children does not take this call: [(node, Miss, index), ...]. For messages
    and for the choice between pinned and copied."""
    cdef uint64_t ambient[3]
    cdef PyObject** leaves = borrowed(tensors)
    cdef id_t n = first_child(&TABLE, path, parent, f)
    cdef int64_t why
    rows = []
    try:
        ambient_now(ambient)
        while n != NONE:
            why = node_why(&TABLE, n, spec, ambient, leaves)
            rows.append((n, <int>(why >> 32), <int>(why & 0xffffffff)))
            n = node_row(&TABLE, n).next
    finally:
        free(leaves)
    return rows


def ambient():
    """The three words of ambient state."""
    cdef uint64_t words[3]
    ambient_now(words)
    return words[0], words[1], words[2]


def blocker():
    """0, or what hides ops from a recording: 1 a dispatch mode, 2 a function mode, 3 a transform."""
    return ambient_blocker()


def save_hooks():
    """How many hooks for saved tensors are active in this thread?"""
    return saved_hooks()


def reads_by(list names, object function):
    """Have function(name) called before each of these operators, where `observed` would not see it; set once."""
    for name in names: reads_of((<str>name).encode())
    reads_tell(<PyObject*>function)


def reads_begin():
    """From now on, in this thread. A handle for reads_end."""
    return reads_watch()


def reads_end(uint64_t handle):
    """No more."""
    reads_leave(handle)


def within(list brackets, object body):
    """body(), with what each bracket begins: a pair of functions, of which the second puts back whatever the first one
    did, as far as it got. Nothing leaves one of those out: an exception that comes while it runs (a signal's, say) is
    raised when all have been through."""
    cdef int n = 0, attempt
    result = error = None
    try:
        for begin, _ in brackets:
            n += 1                          # no signal is looked at between here and the call
            begin()
        result = body()
    except BaseException as raised:
        error = raised
    while n > 0:
        n -= 1
        for attempt in range(3):
            try:
                brackets[n][1]()
                break
            except BaseException as raised:
                error = raised
    if error is not None: raise error
    return result


def results():
    """Where a run under observation keeps what its ops returned, without holding it."""
    return taken(results_new())


def alive(object results):
    """The tensors among them that somebody still holds, in order."""
    return taken(results_alive(<PyObject*>results))


def observed(object results, object watch, object function, tuple args, dict kwargs):
    """Call the function; for each op that it runs, here and in autograd's threads, watch(op, args, kwargs) is called
    in its place, and calls `proceed`."""
    cdef PyObject* before = observer_of_thread()
    cdef int was, shown
    pair = (results, watch)
    Py_XINCREFX(before)
    observer_set(<PyObject*>pair)
    was, shown = observe_key(1), observe_shown(1)
    try:
        return function(*args, **kwargs)
    finally:
        observe_key(was)
        observe_shown(shown)
        observer_set(before)
        Py_XDECREFX(before)


def observed_op(object op, tuple args, dict kwargs):
    """Call an op that a dispatch mode caught, as a thread does that is observed."""
    cdef int was = observe_key(1), shown = observe_shown(1)
    try:
        return op(*args, **kwargs)
    finally:
        observe_key(was)
        observe_shown(shown)


def observer():
    """The `watch` for which this thread works, or None."""
    cdef PyObject* pair = observer_of_thread()
    return (<tuple><object>pair)[1] if pair is not NULL and not observe_paused() else None


def observe(bint on):
    """Is this thread seen, where somebody observes it? Returns what it was."""
    return bool(observe_key(on))


def pause(int by):
    """1: what this thread does from now on is not the function's; -1: it is again."""
    observe_pause(by)


def proceed(list instead):
    """Run the op that `watch` was called for, with these tensors in place of those that it was given, or None. What it
    returned: the tensors, each as another one over the same memory."""
    return taken(observe_proceed(<PyObject*>instead))


def answer(list results):
    """Return these tensors from the op that is observed now, in place of what it returned."""
    observe_answer(<PyObject*>results)


def capture_relaxed(bint on):
    """May this thread allocate and wait while it captures a stream, in others?"""
    cuda_relaxed(on)


def method_id(function):
    """A number for the C function behind a builtin function or a method of a builtin class; 0 for all else."""
    return <uintptr_t>method_of(<PyObject*>function)


def calls_begin(methods, set started, called, others, set aside):
    """From now on code that starts or goes on comes into the set, and called(function, frame) comes before one of the
    builtin functions whose method_id is among these. Code of the threads `others` comes into `aside`. A handle for calls_end."""
    return call_watch_begin(
        <PyObject*>methods, <PyObject*>started, <PyObject*>called, <PyObject*>others, <PyObject*>aside)


def calls_end(uint64_t handle):
    """No more. None is in the set if not all was seen: of a thread that came since, or has another profiler."""
    call_watch_end(handle)


def stream_is_capturing(int device):
    """Is somebody's capture under way on the current stream of this device?"""
    cuda_thread_ready(device)
    return bool(cuda_capturing(cuda_current_stream(device)))


def path_state(int device):
    """(path, node that it has come to or -1) of a device; -1 is the host."""
    cdef id_t path = path_of(&TABLE, device)
    return path, path_row(&TABLE, path).current


def parent_of(int device, int f, list tensors):
    """The node behind which a call with these tensors belongs, or -1: it begins an iteration."""
    cdef id_t path = path_of(&TABLE, device)
    cdef id_t at = path_back(&TABLE, path, path_row(&TABLE, path).current)
    cdef PyObject** rows = borrowed(tensors)
    on = path_continues(&TABLE, path, at, f, rows, <int32_t>len(tensors))
    free(rows)
    return at if on else NONE


def go_on(int device, int parent, list tensors):
    """The path goes on from `parent`, as parent_of told for a call with these tensors; from -1, the iteration under
    way ends and what it left is released. The caller holds the paths."""
    cdef id_t path = path_of(&TABLE, device)
    cdef id_t at = path_back(&TABLE, path, path_row(&TABLE, path).current)
    cdef PyObject** leaves
    if parent != NONE:
        # Another thread may have moved it, or hold what was dead; then the recording finds itself overtaken.
        if at == parent: path_row(&TABLE, path).current = parent
        return
    leaves = borrowed(tensors)
    try:
        path_leave(path_row(&TABLE, path), at)
        while path_release(&TABLE, path, NONE, leaves, <int32_t>len(tensors)) != 0: pass
    finally:
        free(leaves)


def begin(int driver, int device, uintptr_t stream, uintptr_t pool):
    """Begin a recording behind the node that the device's path has come to, its pool put back to
    that node's state. The caller holds the paths. pool: from pool_new, or 0."""
    record_begin(&TABLE, driver, device, stream, pool)


def checkpoint(list made, list outs):
    """The recording is complete. Tensors it made become memory of the pool: `outs` as long as the
    path needs them, the others as long as the recording runs."""
    record_checkpoint(&TABLE, made, outs)


def lost():
    """Did another thread move the path on while this was recorded? Then it cannot run here."""
    return record_lost(&TABLE)


def record_seconds():
    """(restore, capture, instantiate, checkpoint) of the recording under way, in seconds."""
    return tuple([TABLE.rec.seconds[k] for k in range(4)])


def path_proto(int at, object t):
    """The recorded memory behind t, if t is a result of the path that ends at node `at`; or None."""
    cdef int32_t k
    cdef id_t n = path_output(&TABLE, at, <PyObject*>t, &k)
    if n == NONE: return None
    return <object>node_out(&TABLE, node_row(&TABLE, n), k).proto


def swap_generator(object generator, object seed_word, object offset_word, list handles):
    """Give a generator our state while recording; a handle for restore_generators is appended."""
    cdef void* handle = generator_swap(
        <PyObject*>generator, <PyObject*>seed_word, <PyObject*>offset_word,
        cuda_capture_id(&TABLE.rec))
    if handle is NULL: raise_pending()
    handles.append(<uintptr_t>handle)


def restore_generators(list handles):
    """Put the generators' own states back; by how much a run advances each. The list is empty then."""
    advances = []
    while handles: advances.append(generator_restore(<void*><uintptr_t>handles.pop(0)))
    return advances


def moved_generator(uintptr_t handle):
    """How far the recording has moved a generator since the words that its kernels read now."""
    return generator_moved(<void*>handle)


def point_generator(uintptr_t handle, object seed_word, object offset_word, uint64_t moved):
    """Kernels recorded from here on read these words, and count from `moved`."""
    generator_point(<void*>handle, <PyObject*>seed_word, <PyObject*>offset_word, moved)


def recorded_words():
    """[(seed, offset), ...] of the recording that was launched once, in the order of `words`."""
    return [(rec_patch(&TABLE, k).told[0], rec_patch(&TABLE, k).told[1])
            for k in range(TABLE.rec_patches.n) if rec_patch(&TABLE, k).kind == WORDS]


def words(object generator, object seed_word, object offset_word):
    """Record the node that writes a generator's words."""
    record_words(&TABLE, generator, seed_word, offset_word)


def copy(object to, object source, int64_t nbytes):
    """Record the copy node of a copied slot."""
    return record_copy(&TABLE, to, source, nbytes)


def op(bytes name, bytes overload, tuple args, dict kwargs, tuple into):
    """Append an op to the host driver's tape."""
    if tape_add(TABLE.rec.exec, name, overload, <PyObject*>args, <PyObject*>kwargs,
                <PyObject*>into) != 0: raise_pending()


def state_op(object generator, object state, bint sets):
    """Append to the host driver's tape: a generator's state is read into a tensor, or set from it."""
    tape_state(TABLE.rec.exec, <PyObject*>generator, <PyObject*>state, sets)


def quiet(object f):
    """Call f; what ATen warns of meanwhile is dropped."""
    cdef void* before = warnings_off()
    try:
        f()
    finally:
        warnings_on(before)


def in_inference(bint on, object body):
    """body() with inference mode on or off. torch's own context manager would leave it so if an interrupt came while it
    is entered or left."""
    cdef void* guard = inference_begin(on)
    try:
        return body()
    finally:
        inference_end(guard)


def end(list advances):
    """End what is recorded: there is a graph now."""
    record_end(&TABLE, advances)


def instantiate():
    """Make of the graph that just ended what is launched."""
    record_instantiate(&TABLE)


def abort():
    """Undo the recording, whatever state it is in."""
    record_abort(&TABLE)


def recording_ran():
    """Was the last recording launched, as far as anybody knows?"""
    return bool(TABLE.rec.ran)


def add_node(int f, int spec, tuple ambient, list slots, list outs, object ret_program,
             bint ret_python, list effects, list grads, list groups, list leaves, tuple backward, dict keep,
             object kept):
    """Make the recording a node of f. leaves: the call's tensors. backward: see backward_fill. keep[node] becomes
    `kept`: what the rows borrow must stay alive."""
    cdef id_t n = node_add(&TABLE, f, spec, ambient, slots, outs, ret_program, ret_python, effects, grads,
                           groups, leaves, backward)
    keep[n] = kept
    return n


def run_node(int n, list tensors, bint launch):
    """Replay a node outside the guard: the call that recorded it. `launch` is False where recording
    already ran the ops. The caller holds the paths since before the node was added: another thread
    could replay it before this call has its result."""
    cdef PyObject** leaves = borrowed(tensors)
    cdef Path* p = path_row(&TABLE, node_row(&TABLE, n).path)
    TABLE.rec.ran = 1
    try:
        return replay(&TABLE, n, leaves, DRIVERS[p.driver].stream(p.device), launch, False)
    finally:
        free(leaves)


def run_once(list tensors):
    """Launch the recording that just ended once, and move these tensors out of the pool. The caller
    holds the paths."""
    record_run_once(&TABLE, tensors)


def spend(object t):
    """The recording under way needs a result of its path no more, and nobody else does: what is recorded
    from here on may use its memory."""
    record_spend(&TABLE, <PyObject*>t)


def saved_behind(list tensors, uint64_t since):
    """What the graphs of these results saved in nodes made since the thread's sequence number was `since`:
    SavedTensors, good for as long as the graphs."""
    return taken(graphs_saved(<PyObject*>tensors, since))


def functions_behind(list tensors, uint64_t since):
    """Which of those nodes are Python functions."""
    return taken(graphs_functions(<PyObject*>tensors, since))


def is_in_node():
    """Does autograd evaluate a node in this thread?"""
    return in_node() != 0


def sinks(list tensors):
    """Before a graph is made: where gradients of these tensors will end. A handle that owns the ends."""
    return taken(sinks_new(<PyObject*>tensors))


def sinks_hooked(object handle):
    """Index of a tensor whose gradient's accumulator has a hook; NONE if there is none."""
    return sinks_hook(<PyObject*>handle)


def sinks_begin(object handle, list tensors, list results):
    """A graph was made: it begins at these results and ends, among others, at these tensors."""
    if sinks_open(<PyObject*>handle, <PyObject*>tensors, <PyObject*>results) != 0: raise_pending()


def sinks_flows(object handle, uint64_t since):
    """To which of the tensors (by index) gradients flow in that graph, made since the thread's sequence
    number was `since`: those to which several edges lead, then the rest; or None if it leads elsewhere, too."""
    return taken(sinks_find(<PyObject*>handle, since))


def sinks_grads(object handle, list results, list joined):
    """A run of the graph will be given gradients of these results, in this order; then, for each of these
    tensors (by index), what its own contributions are added to."""
    if sinks_heads(<PyObject*>handle, <PyObject*>results, <PyObject*>joined) != 0: raise_pending()


def sinks_backward(object handle, tuple grads):
    """Run the graph with what sinks_grads says (None: not there). It is given aliases, so that whoever
    holds the memory of a gradient can be counted."""
    aliases = [g if g is None else view_like(g, g, 0) for g in grads]
    if sinks_run(<PyObject*>handle, <PyObject*>grads, <PyObject*>aliases) != 0: raise_pending()


def sinks_task(object handle):
    """Autograd's number of the graph task that runs the graph now."""
    return sinks_now(<PyObject*>handle)


def sinks_result(object handle, int k, object t):
    """Make t, over the memory of the graph's result k, that result."""
    if sinks_join(<PyObject*>handle, k, <PyObject*>t) != 0: raise_pending()


def sinks_lead(object handle):
    """Cut the graph off from what was before the call: its edges lead to the sinks."""
    if sinks_cut(<PyObject*>handle) != 0: raise_pending()


def sinks_here(object handle):
    """Have the graph run on the current stream."""
    if sinks_stamp(<PyObject*>handle) != 0: raise_pending()


def graphs_here(list tensors, int64_t stream):
    """Have what was left on a stream (by its id) of the graphs behind these tensors run on the current one."""
    if graphs_stamp(<PyObject*>tensors, stream) != 0: raise_pending()


def sinks_away(object handle, bint away):
    """Hide the accumulators of the graph's leaves from what is recomputed in it, or show them again."""
    sinks_part(<PyObject*>handle, away)


def sinks_take(object handle, list which):
    """What a run of the graph left in these sinks: tensors or None."""
    return tuple([taken(sink_take(<PyObject*>handle, k)) for k in which])


def quiet_gradients():
    """How many gradients replays have left where nobody listens, without a task of autograd's."""
    return quiet_given()


def histories(list tensors):
    """What these tensors are to autograd now: a handle for histories_restore."""
    return taken(histories_new(<PyObject*>tensors))


def histories_restore(object handle):
    """They are it again, whatever was recorded since."""
    histories_back(<PyObject*>handle)


def paths_lock():
    """Hold every device's path, so that no replay is under way; for freeing rows. Waits."""
    cdef id_t k
    for k in range(TABLE.paths.n):
        while not path_lock(path_row(&TABLE, k)):
            path_wait(path_row(&TABLE, k).lock)


def alone():
    """Forget that several threads called (path.pxi); for tests, whose threads are gone."""
    cdef id_t k
    for k in range(TABLE.paths.n): path_row(&TABLE, k).thread = path_row(&TABLE, k).shared = 0


def stepped(bint on):
    """Take the iterations under way for ones that step() began, or for ones of a program that never says it."""
    cdef id_t k
    for k in range(TABLE.paths.n):
        path_row(&TABLE, k).said = on
        if not on: path_row(&TABLE, k).since = NONE


def max_path(int n):
    """Nodes of one iteration, before another one begins by itself."""
    TABLE.max_path = n


def paths_mine():
    """Does this thread hold a path: is it inside a call (a finalizer, say)?"""
    cdef id_t k
    for k in range(TABLE.paths.n):
        if path_row(&TABLE, k).owner == PyThread_get_thread_ident(): return True
    return False


def paths_unlock():
    """Let go what paths_lock took."""
    cdef id_t k
    for k in range(TABLE.paths.n): path_unlock(path_row(&TABLE, k))


def paths_leave():
    """The same if this thread holds them; else nothing."""
    if paths_mine(): paths_unlock()


def with_paths(object body):
    """body(), while every path is held."""
    paths_lock()
    try:
        return body()
    finally:
        paths_unlock()


def held(object body):
    """body(), while no row is freed. A finalizer in the middle of a call is let in."""
    return body() if paths_mine() else with_paths(body)


def locked(object lock, object body, object busy):
    """body(), while the lock is held; busy(), where somebody else holds it."""
    if not lock.acquire(blocking=False): return busy()
    try:
        return body()
    finally:
        lock.release()


def step():
    """Begin an iteration on every device, not in the middle of another thread's call."""
    cdef bint mine = paths_mine()           # a finalizer, in the middle of ours
    cdef id_t k
    for k in range(TABLE.paths.n):
        if not mine:
            while not path_hold(path_row(&TABLE, k)): path_wait(path_row(&TABLE, k).lock)
        try:
            path_step(&TABLE, k)
        finally:
            if not mine: path_unlock(path_row(&TABLE, k))


def forget():
    """After fork: the parent's CUDA context is not ours. Drop rows without touching the driver."""
    cdef id_t n
    cdef id_t k
    for n in range(TABLE.nodes.n):
        if node_row(&TABLE, n).alive and path_row(&TABLE, node_row(&TABLE, n).path).driver == CUDA:
            node_row(&TABLE, n).graph = node_row(&TABLE, n).exec = NULL
            node_row(&TABLE, n).pool = node_row(&TABLE, n).state = NULL
    for k in range(TABLE.paths.n):
        path_row(&TABLE, k).lock = <void*>new mutex()
        path_row(&TABLE, k).owner = 0
        path_row(&TABLE, k).event = NULL


def fault_set(str call, int after, int code):
    """Make driver call number `after` (from 0) of this name fail with `code`. For tests."""
    FAULT.call = CALL_NAMES.index(call) if call else NONE
    FAULT.after = after
    FAULT.code = code


def books():
    """Counts of living rows and handles; equal before and after whatever should leave no trace."""
    return {
        "rows": TABLE.allocations, "fns": sum([fn_row(&TABLE, k).alive for k in range(TABLE.fns.n)]),
        "specs": sum([spec_row(&TABLE, k).alive for k in range(TABLE.specs.n)]),
        "nodes": sum([node_row(&TABLE, k).alive for k in range(TABLE.nodes.n)]),
        "ops": TABLE.ops.n, "recording": TABLE.rec.active, "blocks": blocks_nbytes(),
    } | {name: TABLE.parts[k].n for k, (name, _) in enumerate(PARTS)}


def check_table():
    """Raise AssertionError if the table does not hold together."""
    table_check(&TABLE)


def debug_build():
    """Was this built with CGT_DEBUG=1?"""
    return bool(CGT_DEBUG)


def host_bytes():
    """Bytes of the host's pool."""
    return blocks_nbytes()


def pool_new(int device, ids):
    """A private pool on a device; ids: torch.cuda.graph_pool_handle()."""
    cdef void* pool = cuda_pool_new(device, ids[0], ids[1])
    if pool is NULL: raise_pending()
    return <uintptr_t>pool


def pool_retire(uintptr_t pool):
    """No more recordings in this pool. Its memory goes with its last node."""
    cuda_pool_retire(<void*>pool)


def pool_nodes(uintptr_t pool):
    """Nodes that live in a pool."""
    return cuda_pool_nodes(<void*>pool)


def pool_ids():
    """Ids of the pools in which nodes live."""
    cdef unsigned long long id_[2]
    found = set()
    for n in range(TABLE.nodes.n):
        if node_row(&TABLE, n).alive and node_row(&TABLE, n).pool is not NULL:
            cuda_pool_id(node_row(&TABLE, n).pool, id_)
            found.add((id_[0], id_[1]))
    return found


def load_words_kernel(int device):
    """Load the kernel that writes seed and offset; a capture cannot."""
    cdef cu.CUfunction kernel = NULL
    check(CUDA, cuda_words_kernel(device, &kernel), CALL_WORDS)


cdef object taken(PyObject* made):
    """A new reference as an object, or the pending exception."""
    if made is NULL: raise_pending()
    result = <object>made
    Py_DECREFX(made)
    return result


def twin(object t):
    """A detached tensor over the same storage with the same metadata."""
    return taken(tensor_twin(<PyObject*>t))


def fixed(object t):
    """A flat tensor over t's storage at today's address that owns nothing."""
    return taken(tensor_fixed(<PyObject*>t))


def view_like(object base, object like, int64_t shift):
    """A tensor with the metadata of `like` over base's memory, `shift` bytes from base's start."""
    cdef int64_t small[SCRATCH]
    cdef int ndim = tensor_ndim(<PyObject*>like)
    cdef int64_t* dims = small
    cdef PyObject* made
    if 2 * ndim > SCRATCH: dims = <int64_t*>malloc(2 * ndim * sizeof(int64_t))
    if dims is NULL: raise MemoryError()
    tensor_dims(<PyObject*>like, dims)
    made = tensor_over(<PyObject*>base, <PyObject*>like, tensor_keys(<PyObject*>like), shift, ndim, dims)
    if dims is not small: free(dims)
    return taken(made)


def generator_id(object g):
    """Identity of a torch.Generator, which can have several Python objects."""
    return <uintptr_t>generator_impl(<PyObject*>g)


def storage_holders(object t):
    """How many hold the memory of t: tensors, and whoever counts storages."""
    return storage_uses(<PyObject*>t)


def storage_name(object t):
    """Something without which t's storage_id may become another's; it holds none of the memory."""
    return taken(<PyObject*>storage_hold_name(<PyObject*>t))


def storage_empty(object t):
    """Give the memory of t back to its allocator, whoever still has a tensor over it."""
    storage_clear(<PyObject*>t)


def storage_id(object t):
    """Identity of a tensor's storage (0 without one). Makes no Python storage object."""
    return <uintptr_t>tensor_storage(<PyObject*>t)


def is_plain(object t):
    """Can a recording hold such a tensor: strided, not quantized, not nested, not a wrapper of others?"""
    return tensor_is_plain(<PyObject*>t) != 0


def storage_address(object t):
    """Where a tensor's storage begins."""
    return <uintptr_t>tensor_storage_ptr(<PyObject*>t)


def storage_size(object t):
    """Bytes of a tensor's storage."""
    return storage_nbytes(<PyObject*>t)


def address(object t):
    """t.data_ptr(), without the checks."""
    return <uintptr_t>tensor_ptr(<PyObject*>t)


def dtype_number(object t):
    """A tensor's dtype as PyTorch's ScalarType number."""
    return tensor_dtype(<PyObject*>t)


def grad_id(object t):
    """Identity of t.grad's TensorImpl, or 0."""
    return <uintptr_t>tensor_grad(<PyObject*>t)


def holders(object t):
    """(Python references beside the caller's own, TensorImpl uses, storage uses); for calibration."""
    return sys.getrefcount(t), impl_uses(<PyObject*>t), storage_uses(<PyObject*>t)


def references(object t):
    """Python references to a tensor, without what C++ adds by holding it; to compare with later."""
    return sys.getrefcount(t) - (cpp_bump if impl_uses(<PyObject*>t) > 1 else 0)


def set_cpp_bump(int bump):
    """By how much a Python reference count rises while C++ holds the tensor too; see private.py."""
    global cpp_bump
    cpp_bump = bump


def time_launches(list execs, uintptr_t stream, int n):
    """Seconds per cuGraphLaunch of raw CUgraphExecs in turn, from C without the GIL: the floor of
    benches."""
    cdef double began
    cdef int k, code = 0, n_execs = <int>len(execs)
    cdef uintptr_t[SCRATCH] handle
    if not 0 < n_execs <= SCRATCH: raise ValueError(f"1 to {SCRATCH} execs in turn")
    for k in range(n_execs): handle[k] = execs[k]
    with nogil:
        began = now()
        for k in range(n):
            code = cuda_launch(<void*>handle[k % n_execs], <void*>stream, NULL)
            if code: break
        began = now() - began
    check(CUDA, code, CALL_LAUNCH)
    return began / n


def time_guards(int f, tuple args, dict kwargs, int n):
    """Seconds per guard of a call: leaves taken and the node found, nothing bound or launched."""
    cdef double began
    cdef Walk w
    cdef int k
    cdef id_t s = NONE, found = NONE, parent
    w.table = &TABLE
    w.hold = NULL
    w.leaves = <PyObject**>malloc((fn_row(&TABLE, f).max_leaves + 1) * sizeof(PyObject*))
    if w.leaves is NULL: raise MemoryError()
    began = now()
    for k in range(n):
        s = leaves_take(&TABLE, f, <PyObject*>args, <PyObject*>kwargs, &w)
        found = path_find(&TABLE, fn_row(&TABLE, f).path, f, s, w.leaves, &parent) if s != NONE else NONE
    began = now() - began
    free(w.leaves)
    Py_XDECREFX(w.hold)
    if found == NONE: raise ValueError("these arguments are not a hit")
    return began / n


def reuse_outputs(bint on):
    """May the same tensors be handed out again? Off where reference counts are not understood."""
    global REUSE_OUTPUTS
    REUSE_OUTPUTS = on
