# The path of a device: what ran in this iteration, who may still hold its outputs, who waits for
# whom. `current` is the node that ran last; its ancestors are the path. When an iteration ends the
# path becomes `stale`: what somebody holds of it overlaps whatever runs next, so it is released
# before the next launch, and not earlier, since what is dropped until then costs nothing.

cdef enum: SETTLING = 100_000   # microseconds, once for each device
cdef bint BESIDE = False        # a thread called for a GPU while another one recorded, and has perhaps held no path yet

cdef int path_hold(Path* p) noexcept:
    """path_lock for who makes no call."""
    if not (<mutex*>p.lock).try_lock(): return 0
    p.owner = PyThread_get_thread_ident()
    return 1

cdef bint path_is_mine(Path* p) noexcept:
    """Is this thread inside of the call that holds it: in a finalizer, an eager part, a backward for which that may
    wait?"""
    return p.owner == PyThread_get_thread_ident() or (p.lent and in_node())

cdef void path_unlock(Path* p) noexcept:
    if p.fleeting: cuda_leave_stream(p)
    p.owner = 0
    (<mutex*>p.lock).unlock()

cdef int path_lock(Path* p) noexcept:
    """1: taken at once. 0: not taken, and path_wait comes next, behind which the table may have changed."""
    if path_hold(p):
        if p.thread == p.owner or p.shared or in_backward(): return 1
        if p.thread == 0: p.thread = p.owner
        if p.thread == p.owner: return 1
        p.shared = 1
        if p.driver != CUDA: return 1
        p.settles = 1
        path_unlock(p)
    return 0

cdef void path_wait(Path* p) noexcept:
    """The GIL is the outermost lock: never wait for this one while holding it. A path that another thread's first call
    finds in use: the first thread may hold a result, have read its address and not yet queued the kernel that reads it.
    Nobody sees that, so it gets the time (outs_part looks after all later results)."""
    cdef void* lock = p.lock
    cdef bint settles = p.settles
    p.settles = 0
    with nogil:
        if settles: usleep(SETTLING)
        else:
            (<mutex*>lock).lock()
            (<mutex*>lock).unlock()

cdef int stream_order(Path* p, Driver* d, void* stream) except -1:
    """Calls on a device are ordered, whatever stream they come on: they share one pool."""
    if stream != p.last_stream or p.event_only:
        check(p.driver, fault(CALL_ORDER) or d.order(p, p.device, stream), CALL_ORDER)
        p.last_stream, p.event_only = stream, 0
        p.fleeting = p.driver == CUDA and not cuda_stream_lasts(p.device)
    return 0

# --- is it held? ---

cdef int out_grads(Table* t, Node* n, Out* o, PyObject** leaves) noexcept nogil:
    """1 while the output is .grad of the parameter that it belongs to. Reached tensors only: a
    leaf's tensor is known just during its own call."""
    if o.grad_slot == NONE or o.reads_old or o.tensor is NULL: return 0
    if node_guard(t, n, o.grad_slot).leaf != NONE and leaves is NULL: return 0
    x = slot_tensor(t, n, o.grad_slot, leaves)
    return x is not NULL and tensor_grad(x) == tensor_impl(o.tensor)

cdef inline int32_t group_end(Node* n, int32_t k, Out* first) noexcept nogil:
    """Where to stop looking for outputs that share memory with fresh output k: its group."""
    return n.len[OUTS] if first.sharers else k + 1

cdef inline bint in_group(Out* o, int32_t j, int32_t k) noexcept nogil:
    return (j == k or (o.kind == SHARED and o.ref == k)) and o.tensor is not NULL

cdef int group_held(Table* t, Node* node, int32_t k, PyObject** leaves, bint mine,
                    PyObject* saved) noexcept nogil:
    """Does anybody but the table hold memory of fresh output k: its tensor, one that shares its
    memory, a view of these, an alias? `mine`: the node itself is about to be launched, so a .grad
    that the launch will set again does not count. Nor does one reference to `saved`, a tensor over that memory."""
    cdef Out* first = node_out(t, node, k)
    cdef int32_t j, own, uses = 1           # the row's own
    cdef bint alias = saved is not NULL
    if first.storage is NULL: return 0
    for j in range(k, group_end(node, k, first)):
        o = node_out(t, node, j)
        if not in_group(o, j, k) or tensor_storage(o.tensor) != first.storage: continue
        w = node_out(t, node, o.inside) if o.inside != NONE else NULL
        own = 1
        if o.tensor == saved: own, alias = 2, False
        if w is not NULL and w.tensor is not NULL:
            if out_is_held(w.tensor, 1, mine and out_grads(t, node, w, leaves)): return 1
            if out_is_held(o.tensor, own + 1, 0): return 1
        elif out_is_held(o.tensor, own, mine and out_grads(t, node, o, leaves)): return 1
        uses += 1
    if alias and out_is_held(saved, 1, 0): return 1
    return storage_count(first.storage) != uses + alias

cdef id_t deads_alive(Table* t, Node* node) noexcept nogil:
    """The first output of an ancestor that is alive although the node may overwrite it, as an index
    into the node's deads; or NONE. Earlier deaths are fine."""
    for k in range(node.len[DEADS]):
        d = node_dead(t, node, k)
        if group_held(t, node_row(t, d.node), d.out, NULL, False, NULL): return k
    return NONE

# --- rescue, poison ---

cdef void wrapper_forget(Table* t, id_t n, id_t k) noexcept:
    """What output k was handed out last as has another tensor inside than it will have next; NONE: there is none."""
    if k == NONE: return
    tensor = node_out(t, node_row(t, n), k).tensor
    node_out(t, node_row(t, n), k).tensor = NULL
    Py_XDECREFX(tensor)

cdef void group_forget(Table* t, id_t n, int32_t k) noexcept:
    """The group's rows forget what they handed out, so the next hit hands out anew."""
    cdef Out* o = node_out(t, node_row(t, n), k)
    cdef void* storage = o.storage
    cdef int32_t j
    o.storage = NULL
    storage_drop(storage)
    for j in range(k, node_row(t, n).len[OUTS]):
        o = node_out(t, node_row(t, n), j)
        if not in_group(o, j, k): continue
        tensor = o.tensor
        o.tensor = NULL
        wrapper_forget(t, n, o.inside)
        Py_XDECREFX(tensor)

cdef int group_rescue(Table* t, id_t n, int32_t k) except -1:
    """Part the holder's memory from the recording's."""
    cdef Node* node = node_row(t, n)
    cdef Fn* fn = fn_row(t, node.fn)
    cdef Path* p = path_row(t, node.path)
    cdef PyObject* proto = node_out(t, node, k).proto
    cdef int device = tensor_device(proto)
    cdef Driver* d = &DRIVERS[p.driver]
    stream_order(p, d, d.stream(p.device))
    if device != p.device and device >= 0:
        check(p.driver, fault(CALL_ORDER) or d.order(p, device, d.stream(device)), CALL_ORDER)
    try:
        check(p.driver, fault(CALL_MOVE) or d.rescue(node_out(t, node, k).storage, proto, p.device), CALL_MOVE)
    except Exception:
        raise DriverError(-1, "no memory for a held output, or it could not be copied", "move") from None
    fn.rescues += 1
    fn.rescued_bytes += storage_nbytes(proto)
    group_forget(t, n, k)
    if RESCUED[0] is not None:
        line = node_out(t, node_row(t, n), k).line
        RESCUED[0](node_row(t, n).fn, storage_nbytes(proto), <object>line if line is not NULL else "")
    return 0

cdef bint is_leaf(void* storage, PyObject** leaves, int32_t n_leaves) noexcept nogil:
    for k in range(n_leaves):
        if tensor_storage(leaves[k]) == storage: return True
    return False

cdef int outs_release(Table* t, id_t n, PyObject** leaves, int32_t n_leaves, bint mine) except -1:
    """Memory of n's outputs is about to be overwritten: rescue or poison what is held. How many. An
    argument of the call that overwrites it is never poisoned: the call is going to read it. What is
    hidden (saved for a backward, a .grad) is rescued whatever the function's policy."""
    cdef int32_t k, policy, moved = 0
    for k in range(node_row(t, n).len[OUTS]):
        o = node_out(t, node_row(t, n), k)
        policy = RESCUE if o.hidden else fn_row(t, node_row(t, n).fn).outputs
        if o.kind != FRESH or policy == BORROW: continue
        if not group_held(t, node_row(t, n), k, leaves, mine, NULL): continue
        if policy == POISON and not is_leaf(o.storage, leaves, n_leaves):
            line = <object>o.line if o.line is not NULL else ""
            message = (<str>POISONED[0](line)).encode()
            out_poison(node_out(t, node_row(t, n), k).storage, message)
            group_forget(t, n, k)
        else:
            group_rescue(t, n, k)
        moved += 1
    return moved

cdef void outs_rescue_all(Table* t, id_t n) noexcept:
    """The node goes, what is held stays, whatever the function's policy. What cannot be moved raises
    when it is touched: better than memory that somebody else writes."""
    cdef int32_t k
    for k in range(node_row(t, n).len[OUTS]):
        o = node_out(t, node_row(t, n), k)
        if o.kind != FRESH or not group_held(t, node_row(t, n), k, NULL, False, NULL): continue
        try:
            group_rescue(t, n, k)
        except Exception:
            out_poison(node_out(t, node_row(t, n), k).storage,
                       b"cgt: the recording of this result was freed, and no memory was left for it")
            group_forget(t, n, k)

cdef bint is_shared(Path* p) noexcept: return p.shared or BESIDE

cdef int outs_part(Table* t, id_t n) except -1:
    """On a device that several threads use: move the results out at once, while the lock is held. Later would be too
    late: a holder in another thread may have read the old address and not yet queued the kernel that uses it."""
    cdef int32_t k
    for k in range(node_row(t, n).len[OUTS]):
        o = node_out(t, node_row(t, n), k)
        if o.kind == FRESH and o.grad_slot == NONE and o.inside == NONE and o.storage is not NULL: group_rescue(t, n, k)
    return 0

# --- paths and iterations ---

cdef enum:
    # How often one function may stand on a path whose backwards are pending, unless the program said
    # step(): micro-batches of a pipeline do; results kept without ever a backward would lengthen it forever.
    MAX_PENDING = 8
    MAX_CHAIN = 16          # nodes of an iteration in which a function goes on from its own results

cdef bint path_ends(Table* t, id_t path, id_t at, id_t f) noexcept nogil:
    """Must a call of f begin another iteration, if the path has come to `at`? Where the program said
    when this one began, only a path that is too long ends; else one on which f ran before."""
    cdef int32_t left = MAX_PENDING if path_row(t, path).pending else 1
    if at == NONE or node_row(t, at).depth + 1 >= t.max_path: return True
    if path_row(t, path).said: return False
    while at != NONE and left:
        left -= node_row(t, at).fn == f
        at = node_row(t, at).parent
    return left == 0

cdef int32_t node_output(Table* t, id_t n, PyObject* x) noexcept nogil:
    """Which fresh output of the node is x's memory; or NONE."""
    cdef Node* node = node_row(t, n)
    cdef void* storage = tensor_storage(x)
    for k in range(node.len[OUTS]):
        o = node_out(t, node, k)
        if o.kind == FRESH and o.storage is not NULL and o.storage == storage: return k
    return NONE

cdef id_t path_output(Table* t, id_t at, PyObject* x, int32_t* k) noexcept nogil:
    """The node on the path that ends at `at` whose fresh output k is x's memory; or NONE."""
    while at != NONE:
        k[0] = node_output(t, at, x)
        if k[0] != NONE: return at
        at = node_row(t, at).parent
    return NONE

cdef bint node_over(Table* t, Path* p, id_t n) noexcept nogil:
    """Is nothing of what node n of the path left alive, nor its backward to come? Then it may as well
    never have run."""
    cdef Node* node = node_row(t, n)
    if p.pending and node.site is not NULL: return False
    for k in range(node.len[OUTS]):
        if node_out(t, node, k).kind == FRESH and group_held(t, node, k, NULL, False, NULL): return False
    return True

cdef id_t path_back(Table* t, id_t path, id_t at) noexcept nogil:
    """The nearest ancestor of `at`, or itself, behind which nothing of the path is alive."""
    while at != NONE and node_over(t, path_row(t, path), at): at = node_row(t, at).parent
    return at

cdef bint uses_output(Table* t, id_t n, PyObject** tensors, int32_t count) noexcept nogil:
    for j in range(count):
        if node_output(t, n, tensors[j]) != NONE: return True
    return False

cdef bint path_lengthens(Table* t, id_t path, id_t at, id_t f, PyObject** tensors, int32_t n) noexcept nogil:
    """May a call of f be recorded behind `at`, in an iteration that the program said? If it says no more,
    its loops must not lengthen the path forever. So a function that ran in this one goes on only from its
    own results, or if all that it returned is held and the last iteration was as long. But results that are
    not moved when an iteration ends are to last until the program says so."""
    cdef Path* p = path_row(t, path)
    cdef int32_t depth = node_row(t, at).depth + 1
    cdef bint ran = False
    cdef id_t m = at
    while m != NONE:
        if fn_row(t, node_row(t, m).fn).outputs != RESCUE: return True
        m = node_row(t, m).parent
    while at != NONE:
        if not ran and uses_output(t, at, tensors, n): return depth < MAX_CHAIN or depth < p.usual
        if node_row(t, at).fn == f:
            if depth >= p.usual or node_over(t, p, at): return False
            ran = True
        at = node_row(t, at).parent
    return True

cdef bint path_continues(Table* t, id_t path, id_t at, id_t f, PyObject** tensors, int32_t n) noexcept nogil:
    """Does a call with these tensors belong behind node `at` of the iteration under way? Where the program does not say
    when one begins, a function that ran in it begins another, and so does a call that uses no result of it."""
    if path_ends(t, path, at, f): return False
    if path_row(t, path).said: return path_lengthens(t, path, at, f, tensors, n)
    if path_row(t, path).pending: return True
    while at != NONE:
        if uses_output(t, at, tensors, n): return True
        at = node_row(t, at).parent
    return False

cdef void path_end(Path* p) noexcept nogil:
    """The iteration is over; its outputs are released before the next launch."""
    if p.current == NONE: return
    p.stale = p.current
    p.current = NONE
    p.pending = 0
    p.step += 1

cdef void path_leave(Path* p, id_t at) noexcept nogil:
    """The same, by itself. `at`: path_back of where it has come to. If nothing is alive nobody can tell, and the
    next iteration is what this one was: said or not."""
    cdef int32_t said = p.said
    path_end(p)
    p.said = said and at == NONE

cdef int path_release(Table* t, id_t path, id_t n, PyObject** leaves, int32_t n_leaves) except -1:
    """n (or NONE) is about to begin an iteration with these leaves: release what the last one left.
    How many outputs moved: then addresses changed, and n may not be the right node any more."""
    cdef id_t m = path_row(t, path).stale
    cdef int moved = 0
    while m != NONE:
        moved += outs_release(t, m, leaves, n_leaves, m == n)
        m = node_row(t, m).parent
    if moved == 0: path_row(t, path).stale = NONE
    return moved

cdef int path_step(Table* t, id_t path) except -1:
    """A new iteration, said by the program. Rescues wait until something is really overwritten; what
    a function with outputs="error" handed out ends here, so that the message can name the line."""
    cdef Path* p = path_row(t, path)
    p.usual = 0 if p.since == NONE else p.launches - p.since    # before the first step() was no iteration
    p.since = p.launches
    path_end(p)
    p.said = 1
    m = p.stale
    while m != NONE:
        if fn_row(t, node_row(t, m).fn).outputs == POISON: outs_release(t, m, NULL, 0, False)
        m = node_row(t, m).parent
    return 0

cdef int path_survey(Table* t, id_t at) except -1:
    """For a recording behind node `at`: addresses of its path that must stay (rec_live), and
    outputs that are dead now and were not already for an ancestor (rec_deads)."""
    cdef id_t m = at
    cdef int32_t k
    t.rec_live.clear()
    t.rec_deads.n = 0
    while m != NONE:
        for k in range(node_row(t, m).len[OUTS]):
            o = node_out(t, node_row(t, m), k)
            if o.kind != FRESH: continue
            if group_held(t, node_row(t, m), k, NULL, False, NULL):
                t.rec_live.push_back(tensor_storage_ptr(o.proto))
            elif not dead_before(t, at, m, k):
                column_add(t, &t.rec_deads, 1)
                d = <Dead*>t.rec_deads.rows + t.rec_deads.n - 1
                d.node, d.out = m, k
        m = node_row(t, m).parent
    return 0

cdef bint dead_before(Table* t, id_t at, id_t m, int32_t k) noexcept:
    """Is the death of m's output k already a condition of `at` or an ancestor of it?"""
    cdef id_t j
    while at != NONE and at != m:
        for j in range(node_row(t, at).len[DEADS]):
            d = node_dead(t, node_row(t, at), j)
            if d.node == m and d.out == k: return True
        at = node_row(t, at).parent
    return False
