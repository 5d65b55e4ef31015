# The path of a device: who may still hold outputs, who waits for whom. `live` is a stack of nodes
# in order of recording. Launching n may overwrite what was recorded at n's time or later, and
# nothing older (cgt_core.pxd says why), so only that end of the stack is looked at: the cost of a
# call does not grow with the number of nodes.

cdef int path_lock(Path* p) noexcept:
    """1: taken at once. 0: waited without the GIL, so the table may have changed: not taken."""
    if PyThread_acquire_lock(<PyThread_type_lock>p.lock, 0):
        p.owner = PyThread_get_thread_ident()
        if p.thread == 0: p.thread = p.owner
        if p.thread != p.owner: p.shared = 1
        return 1
    return 0

cdef void path_wait(PyThread_type_lock lock) noexcept:
    # The GIL is the outermost lock: never wait for this one while holding it.
    with nogil:
        PyThread_acquire_lock(lock, 1)
        PyThread_release_lock(lock)

cdef void path_unlock(Path* p) noexcept:
    p.owner = 0
    PyThread_release_lock(<PyThread_type_lock>p.lock)

cdef void path_forget(Table* t, id_t path, id_t n) noexcept:
    """A node goes: take it off the stack."""
    cdef Path* p = path_row(t, path)
    cdef id_t k, j = 0
    for k in range(p.live_n):
        if p.live[k] != n:
            p.live[j] = p.live[k]
            j += 1
    p.live_n = j

cdef int out_grads(Table* t, Node* n, Out* o, PyObject** leaves) noexcept:
    """1 while the output is .grad of the parameter that it belongs to. Reached tensors only: a
    leaf's tensor is known just during its own call."""
    cdef Slot* s
    cdef PyObject* x
    if o.grad_slot == NONE or o.tensor is NULL: return 0
    s = slot_row(t, n.slot_at + o.grad_slot)
    x = s.tensor
    if x is NULL:
        if leaves is NULL: return 0
        x = leaves[s.leaf]
    return tensor_grad(x) == tensor_impl(o.tensor)

cdef inline int32_t group_end(Node* n, int32_t k, Out* first) noexcept:
    """Where to stop looking for outputs that share memory with fresh output k."""
    return n.out_n if first.sharers else k + 1

cdef int outs_release(Table* t, id_t n, PyObject** leaves, bint mine) except -1:
    """Memory of n's outputs is about to be overwritten: move what is held (or poison it). A held
    output's rows forget their tensors, so the next hit hands out new ones. `mine`: n itself is
    launched, so a .grad that the launch will set again does not count as a holder."""
    cdef Node* node = node_row(t, n)
    cdef Fn* fn = fn_row(t, node.fn)
    cdef Path* p = path_row(t, node.path)
    cdef Out* o
    cdef Out* sharer
    cdef int32_t k, j, held, uses
    if fn.outputs == BORROW: return 0
    for k in range(node.out_n):
        o = out_row(t, node.out_at + k)
        if o.kind != FRESH: continue
        held = uses = 0
        for j in range(k, group_end(node, k, o)):
            sharer = out_row(t, node.out_at + j)
            if (j == k or (sharer.kind == SHARED and sharer.ref == k)) and sharer.tensor is not NULL:
                uses += tensor_storage(sharer.tensor) == o.storage
                held |= out_is_held(sharer.tensor, mine and out_grads(t, node, sharer, leaves))
        if uses == 0: continue
        if not held:
            for j in range(k, group_end(node, k, o)):
                sharer = out_row(t, node.out_at + j)
                if (j == k or (sharer.kind == SHARED and sharer.ref == k)) and \
                        sharer.tensor is not NULL and tensor_storage(sharer.tensor) == o.storage:
                    held = storage_uses(sharer.tensor) != uses
                    break
        if not held: continue
        if fn.outputs == POISON:
            poison_group(t, node, k)
        else:
            rescue_group(t, node, k)
            fn.rescues += 1
            fn.rescued_bytes += storage_nbytes(o.proto)
        for j in range(k, node.out_n):
            sharer = out_row(t, node.out_at + j)
            if j == k or (sharer.kind == SHARED and sharer.ref == k):
                tensor = sharer.tensor
                sharer.tensor = NULL
                Py_XDECREFX(tensor)
    return 0

cdef Out* group_holder(Table* t, Node* node, int32_t k) noexcept:
    """An output of the group whose tensor still has the storage that was handed out."""
    cdef int32_t j
    cdef Out* o
    cdef Out* first = out_row(t, node.out_at + k)
    for j in range(k, node.out_n):
        o = out_row(t, node.out_at + j)
        if (j == k or (o.kind == SHARED and o.ref == k)) and o.tensor is not NULL and \
                tensor_storage(o.tensor) == first.storage: return o
    return NULL

cdef int rescue_group(Table* t, Node* node, int32_t k) except -1:
    cdef Path* p = path_row(t, node.path)
    cdef Out* first = out_row(t, node.out_at + k)
    cdef Out* o
    cdef int32_t j
    if DRIVERS[p.driver].rescue(group_holder(t, node, k).tensor, first.proto, p.device) != 0:
        PyErr_Clear()
        raise DriverError(-1, "no memory for a held output, or it could not be copied", "move")
    for j in range(k, group_end(node, k, first)):
        o = out_row(t, node.out_at + j)
        if j == k or (o.kind == SHARED and o.ref == k): o.ptr = tensor_ptr(o.proto)
    return 0

cdef int poison_group(Table* t, Node* node, int32_t k) except -1:
    cdef Out* o = group_holder(t, node, k)
    text = POISONED[0](<object>o.line if o.line is not NULL else "").encode()
    if out_poison(o.tensor, text) != 0: raise_pending()
    return 0

cdef int raise_pending() except -1:
    if PyErr_Occurred() is NULL: raise MemoryError()
    return -1

cdef int path_enter(Table* t, id_t path, id_t n, PyObject** leaves) except -1:
    """n is about to be launched: release what it may overwrite, and put it on the stack."""
    cdef Path* p = path_row(t, path)
    cdef int64_t born = node_row(t, n).born
    cdef id_t m
    while p.live_n and node_row(t, p.live[p.live_n - 1]).born >= born:
        m = p.live[p.live_n - 1]
        outs_release(t, m, leaves if m == n else NULL, m == n)
        p = path_row(t, path)
        p.live_n -= 1
    if p.live_n == p.live_cap:
        p.live_cap = 2 * p.live_cap + 16
        p.live = <id_t*>realloc(p.live, p.live_cap * sizeof(id_t))
        if p.live is NULL: raise MemoryError()
    p.live[p.live_n] = n
    p.live_n += 1
    return 0

cdef int outs_part(Table* t, id_t n) except -1:
    """On a device that several threads use: move the results out at once, while the lock is held.
    Later would be too late: a holder in another thread may have read the old address and not yet
    queued the kernel that uses it."""
    cdef Node* node = node_row(t, n)
    cdef Out* o
    cdef int32_t k, j
    for k in range(node.out_n):
        o = out_row(t, node.out_at + k)
        if o.kind != FRESH or o.hidden or group_holder(t, node, k) is NULL: continue
        rescue_group(t, node, k)
        fn_row(t, node.fn).rescues += 1
        fn_row(t, node.fn).rescued_bytes += storage_nbytes(o.proto)
        for j in range(k, group_end(node, k, o)):
            o = out_row(t, node.out_at + j)
            if j == k or (o.kind == SHARED and o.ref == k):
                tensor = o.tensor
                o.tensor = NULL
                Py_XDECREFX(tensor)
    return 0

cdef int path_step(Table* t, id_t path) except -1:
    """A new iteration. Rescues wait until something is really overwritten; what a function with
    outputs="error" handed out ends here, so that the message can name the caller's line."""
    cdef Path* p = path_row(t, path)
    cdef id_t k, m
    p.step += 1
    k = 0
    while k < path_row(t, path).live_n:
        m = path_row(t, path).live[k]
        if fn_row(t, node_row(t, m).fn).outputs == POISON: outs_release(t, m, NULL, False)
        k += 1
    return 0
