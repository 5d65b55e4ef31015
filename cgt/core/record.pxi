# Begin and end a recording, and fill a node's rows from what Python found out about the run. A
# recording is a transaction: record_abort undoes whatever was begun.

cdef int record_begin(Table* t, int driver, int device, uintptr_t stream, uintptr_t pool) except -1:
    """Behind the node that the path has come to. The caller holds the path's lock."""
    cdef id_t path = path_of(t, device), m
    cdef void* state = NULL
    assert not t.rec.active, "one recording at a time: dispatch.py holds the lock"
    memset(&t.rec, 0, sizeof(Recording))
    t.rec_copies.n = t.rec_gens.n = 0
    t.rec.driver = driver
    t.rec.device = device
    t.rec.stream = <void*>stream
    t.rec.pool = <void*>pool
    t.rec.parent = m = path_row(t, path).current
    t.rec.step = path_row(t, path).step
    t.rec.launches = path_row(t, path).launches
    path_survey(t, m)
    # A parent from another pool that was given up leaves nothing in this one.
    while m != NONE and node_row(t, m).pool != t.rec.pool: m = node_row(t, m).parent
    if m != NONE: state = node_row(t, m).state
    t.rec.active = 1
    t.rec.seconds[RESTORE] = now()
    check(driver, DRIVERS[driver].restore(&t.rec, state, <void**>t.rec_live.rows, t.rec_live.n),
          CALL_RESTORE)
    t.rec.seconds[CAPTURE] = now()
    t.rec.seconds[RESTORE] = t.rec.seconds[CAPTURE] - t.rec.seconds[RESTORE]
    check(driver, DRIVERS[driver].begin(&t.rec), CALL_BEGIN)
    return 0

cdef bint record_lost(Table* t) noexcept:
    """Did another thread move the path on while this was recorded, even if it came back to the parent? Then
    it cannot run here."""
    cdef Path* p = path_row(t, t.rec.device + 1)
    return (p.current != t.rec.parent or p.step != t.rec.step or p.launches != t.rec.launches
            or p.stale != NONE)

cdef int record_checkpoint(Table* t, list made, list outs) except -1:
    cdef int code
    t.rec.seconds[CHECKPOINT] = now()
    code = DRIVERS[t.rec.driver].checkpoint(&t.rec, <PyObject*>made, <PyObject*>outs,
                                            <void**>t.rec_live.rows, t.rec_live.n)
    t.rec.seconds[CHECKPOINT] = now() - t.rec.seconds[CHECKPOINT]
    return check(t.rec.driver, code, CALL_CHECKPOINT)

cdef int record_words(Table* t, object generator, object seed_word, object offset_word) except -1:
    """The node that writes a generator's two words; before anything else in the recording."""
    cdef Gen* g
    cdef int32_t k = column_add(t, &t.rec_gens, 1)
    g = <Gen*>t.rec_gens.rows + k
    g.generator = <PyObject*>generator
    g.words = tensor_ptr(<PyObject*>seed_word)
    g.device = t.rec.device
    check(t.rec.driver, DRIVERS[t.rec.driver].words(&t.rec, g), CALL_WORDS)
    return 0

cdef int32_t record_copy(Table* t, object to, object source, int64_t nbytes) except -1:
    """The copy node of a copied slot; its index among the node's copies."""
    cdef Copy* c
    cdef int32_t k = column_add(t, &t.rec_copies, 1)
    c = <Copy*>t.rec_copies.rows + k
    c.slot = NONE
    c.to = tensor_ptr(<PyObject*>to)
    c.source = tensor_ptr(<PyObject*>source)
    c.nbytes = nbytes
    if nbytes: check(t.rec.driver, DRIVERS[t.rec.driver].copy(&t.rec, c, <PyObject*>to), CALL_COPY)
    return k

cdef int record_spend(Table* t, PyObject* x) except -1:
    """The recording does not need x, a result of its path, from here on; and nobody else will."""
    cdef int32_t k, j
    cdef PyObject* proto
    cdef void** live = <void**>t.rec_live.rows
    cdef id_t n = path_output(t, t.rec.parent, x, &k)
    if n == NONE: return 0
    proto = out_row(t, node_row(t, n).out_at + k).proto
    check(t.rec.driver, DRIVERS[t.rec.driver].spend(&t.rec, proto), CALL_SPEND)
    for j in range(t.rec_live.n):
        if live[j] != tensor_storage_ptr(proto): continue
        t.rec_live.n -= 1
        live[j] = live[t.rec_live.n]
        break
    return 0

cdef int record_end(Table* t, list advances) except -1:
    cdef int32_t k
    for k in range(t.rec_gens.n): (<Gen*>t.rec_gens.rows + k).advance = advances[k]
    t.rec.seconds[CAPTURE] = now() - t.rec.seconds[CAPTURE]
    check(t.rec.driver,
          DRIVERS[t.rec.driver].end(&t.rec, <Gen*>t.rec_gens.rows, t.rec_gens.n), CALL_END)
    return 0

cdef int record_instantiate(Table* t) except -1:
    """From the graph what is launched. Only now: a graph that cannot become a node costs no exec."""
    t.rec.seconds[INSTANTIATE] = now()
    check(t.rec.driver, DRIVERS[t.rec.driver].instantiate(&t.rec), CALL_INSTANTIATE)
    t.rec.seconds[INSTANTIATE] = now() - t.rec.seconds[INSTANTIATE]
    return 0

cdef void record_abort(Table* t) noexcept:
    if t.rec.active:
        DRIVERS[t.rec.driver].abort(&t.rec)
        t.rec.active = 0

cdef id_t dims_of(Table* t, id_t n, PyObject* x) except -1:
    """Append x's sizes and strides to the node's dims; their index there."""
    cdef int ndim = tensor_ndim(x)
    cdef Node* node
    cdef id_t at
    if ndim == 0: return 0
    at = column_add(t, &t.dims, 2 * ndim)
    tensor_dims(x, dim_row(t, at))
    node = node_row(t, n)
    if node.dim_n == 0: node.dim_at = at
    node.dim_n += 2 * ndim
    return at - node.dim_at

cdef int slot_fill(Table* t, id_t n, id_t at, object row) except -1:
    """row: (leaf, tensor, example, binding, written, bumps, copy, same, apart, grad_of)"""
    cdef PyObject* x
    cdef Slot* s
    cdef Guard* g
    cdef id_t dim_at
    leaf, tensor, example, binding, written, bumps, copy, same, apart, grad_of = row
    x = <PyObject*>example
    dim_at = dims_of(t, n, x)
    s, g = slot_row(t, at), guard_row(t, at)
    g.leaf = leaf
    g.tensor = <PyObject*>tensor if tensor is not None else NULL
    g.grad_of = grad_of
    g.grad = ANY_GRAD
    g.binding = binding
    g.keys = tensor_keys(x)
    g.data_kind = impl_kind(tensor_impl(x))
    g.autograd = ANY_STATE if fn_row(t, node_row(t, n).fn).backward else tensor_autograd(x)
    g.ndim = tensor_ndim(x)
    g.dim_at = dim_at
    g.itemsize = tensor_itemsize(x)
    g.ptr = tensor_ptr(x)
    s.same = same
    s.apart = apart
    s.identity = g.leaf != NONE and (g.tensor is not NULL or g.grad_of != NONE or s.same != NONE or s.apart)
    s.written = written
    s.bumps = bumps
    s.copy = copy
    s.align = <int32_t>(<uintptr_t>g.ptr % align_of(node_row(t, n)))
    s.from_node = NONE
    if g.binding == PINNED:
        s.from_node = path_output(t, node_row(t, n).parent, x, &s.from_out)
        if s.from_node != NONE: s.shift = g.ptr - tensor_storage_ptr(x)
    if g.binding == VALUE:
        memcpy(s.value, g.ptr, g.itemsize)
    g.odd = s.identity or s.from_node != NONE or not (g.binding == UNUSED or g.binding == PINNED)
    if written: node_row(t, n).writes = 1
    if bumps: node_row(t, n).effects = 1
    return 0

cdef int out_fill(Table* t, id_t n, id_t at, object row) except -1:
    """row: (kind, ref, proto, shift, version, grad_slot, hidden, root, line)"""
    cdef PyObject* x
    cdef Out* o
    cdef id_t dim_at
    kind, ref, proto, shift, version, grad_slot, hidden, root, line = row
    x = <PyObject*>proto
    dim_at = dims_of(t, n, x)
    o = out_row(t, at)
    o.kind = kind
    o.ref = ref
    o.shift = shift
    o.version = version
    o.grad_slot = grad_slot
    o.hidden = hidden
    o.root = root
    if not hidden: node_row(t, n).n_given += 1
    if kind == SHARED: out_row(t, node_row(t, n).out_at + <id_t>ref).sharers += 1
    o.keys = tensor_keys(x)
    o.data_kind = impl_kind(tensor_impl(x))
    o.ndim = tensor_ndim(x)
    o.dim_at = dim_at
    o.offset = tensor_offset(x)
    Py_INCREF(proto)
    o.proto = x
    Py_INCREF(line)
    o.line = <PyObject*>line
    return 0

cdef id_t program_add(Table* t, object program) except -1:
    """A pytree's program as rows of ops; objects are borrowed from the program's owner."""
    cdef id_t at = column_add(t, &t.ops, <int32_t>len(program))
    cdef Op* op
    cdef id_t k = at
    for kind, n, obj in program:
        op = op_row(t, k)
        op.kind = kind
        op.n = n
        op.obj = <PyObject*>obj
        k += 1
    return at

cdef uint64_t program_shape(Table* t, id_t at, id_t n) noexcept:
    """One number of a program without its plain values."""
    cdef uint64_t h = <uint64_t>n
    cdef Op* op
    cdef id_t k
    for k in range(at, at + n):
        op = op_row(t, k)
        h = (h ^ <uint64_t>op.kind ^ <uint64_t>op.n << 8) * <uint64_t>0x9E3779B97F4A7C15
        if op.kind != PLAIN and op.kind != EQUAL: h = (h ^ <uintptr_t>op.obj) * <uint64_t>0x9E3779B97F4A7C15
        h ^= h >> 32
    return h

cdef int backward_fill(Table* t, id_t n, tuple row) except -1:
    """row: (the jitted backward or None, [(slot or NONE, out or NONE), ...], [slot, ...],
    to how many of these, the first, several edges lead)"""
    cdef id_t k, at, to
    site, saves, flows, joined = row
    at = column_add(t, &t.saves, <int32_t>len(saves))
    to = column_add(t, &t.flows, <int32_t>len(flows))
    node_row(t, n).site = <PyObject*>site if site is not None else NULL
    node_row(t, n).save_at, node_row(t, n).save_n = at, <int32_t>len(saves)
    node_row(t, n).flow_at, node_row(t, n).flow_n = to, <int32_t>len(flows)
    node_row(t, n).joined_n = joined
    for k in range(len(saves)): save_row(t, at + k).slot, save_row(t, at + k).out = saves[k]
    for k in range(len(flows)): flow_row(t, to + k)[0] = flows[k]
    return 0

cdef id_t node_add(Table* t, id_t f, id_t spec, tuple ambient, list slots, list outs,
                   object ret_program, bint ret_python, list grads, list groups,
                   list leaves, tuple backward) except -1:
    """A row for the recording that just ended; it takes over graph, exec and state."""
    cdef id_t n = row_take(t, &t.nodes)
    cdef Node* node = node_row(t, n)
    cdef id_t k, at
    cdef Grad* g
    cdef PyObject** tensors
    cdef Guard* s
    node.fn = f
    node.spec = spec
    node.path = path_of(t, t.rec.device)
    node.parent = t.rec.parent
    node.depth = node_row(t, node.parent).depth + 1 if node.parent != NONE else 0
    node.ambient[0], node.ambient[1], node.ambient[2] = ambient
    tensors = <PyObject**>malloc((len(leaves) + 1) * sizeof(PyObject*))
    if tensors is NULL: raise MemoryError()
    for k in range(len(leaves)): tensors[k] = <PyObject*>leaves[k]
    node.key = call_key(spec, node.ambient, tensors, <int32_t>len(leaves))
    free(tensors)
    edge_link(t, n)
    fn_row(t, f).path = node.path
    fn_row(t, f).paths |= <uint64_t>1 << node.path
    node_row(t, n).dead_n = t.rec_deads.n
    at = column_add(t, &t.deads, t.rec_deads.n)
    node_row(t, n).dead_at = at
    if t.rec_deads.n: memcpy(dead_row(t, at), t.rec_deads.rows, t.rec_deads.n * sizeof(Dead))
    at = column_add(t, &t.slots, <int32_t>len(slots))
    column_add(t, &t.guards, <int32_t>len(slots))
    node_row(t, n).slot_at = at
    node_row(t, n).slot_n = <int32_t>len(slots)
    node_row(t, n).pin_leaf = NONE
    for k in range(len(slots)):
        slot_fill(t, n, at + k, slots[k])
        s = guard_row(t, at + k)
        if s.leaf != NONE and s.binding == PINNED and slot_row(t, at + k).from_node == NONE and \
                node_row(t, n).pin_leaf == NONE:
            node_row(t, n).pin_leaf, node_row(t, n).pin = s.leaf, s.ptr
    at = column_add(t, &t.outs, <int32_t>len(outs))
    node_row(t, n).out_at = at
    node_row(t, n).out_n = <int32_t>len(outs)
    for k in range(len(outs)): out_fill(t, n, at + k, outs[k])
    at = program_add(t, ret_program)
    node = node_row(t, n)
    node.ret_at = at
    node.ret_n = <int32_t>len(ret_program)
    node.ret_python = ret_python
    node.ret_program = <PyObject*>ret_program
    node.copy_n = t.rec_copies.n
    node.copy_at = column_add(t, &t.copies, node.copy_n)
    if t.rec_copies.n:
        memcpy(copy_row(t, node_row(t, n).copy_at), t.rec_copies.rows, t.rec_copies.n * sizeof(Copy))
    node = node_row(t, n)
    for k in range(node.slot_n):
        if guard_row(t, node.slot_at + k).binding == COPIED:
            copy_row(t, node.copy_at + slot_row(t, node.slot_at + k).copy).slot = k
    node_row(t, n).gen_at = column_add(t, &t.gens, t.rec_gens.n)
    node = node_row(t, n)
    node.gen_n = t.rec_gens.n
    if t.rec_gens.n:
        memcpy(gen_row(t, node.gen_at), t.rec_gens.rows, t.rec_gens.n * sizeof(Gen))
    at = column_add(t, &t.grads, <int32_t>len(grads))
    node_row(t, n).grad_at = at
    node_row(t, n).grad_n = <int32_t>len(grads)
    for k in range(len(grads)):
        slot, was_none, stays, out, was = grads[k]
        g = grad_row(t, at + k)
        g.slot, g.was_none, g.stays, g.out = slot, was_none, stays, out
        g.was = <void*><uintptr_t>was
        guard_row(t, node_row(t, n).slot_at + g.slot).grad = NO_GRAD if was_none else SOME_GRAD
        node_row(t, n).same_grads |= g.was is not NULL
        if not stays: node_row(t, n).effects = 1
    places_fill(t, n, groups)
    backward_fill(t, n, backward)
    node = node_row(t, n)
    node.graph = t.rec.graph
    node.exec = t.rec.exec
    node.state = t.rec.state
    node.pool = t.rec.pool
    if node.pool is not NULL: cuda_pool_count(node.pool, 1)
    node.n_graph_nodes = t.rec.n_graph_nodes
    t.rec.active = 0
    if CGT_DEBUG: table_check(t)
    return n

cdef int record_run_once(Table* t, list tensors) except -1:
    """Launch a recording that will not be kept, then move its tensors to ordinary memory. The
    caller holds the path's lock."""
    cdef Driver* d = &DRIVERS[t.rec.driver]
    cdef Path* p = path_row(t, path_of(t, t.rec.device))
    cdef void* stream = d.stream(p.device)
    cdef string error
    stream_order(p, d, stream)
    rng_bind(t.rec.exec, <Gen*>t.rec_gens.rows, t.rec_gens.n, d)
    t.rec.ran = 1
    check(t.rec.driver, d.launch(t.rec.exec, stream, &error), CALL_LAUNCH)
    for x in tensors:
        if d.rescue(tensor_storage(<PyObject*>x), <PyObject*>x, p.device) != 0: raise_pending()
    return 0
