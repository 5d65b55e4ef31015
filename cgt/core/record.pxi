# What a recording notes on its way, and how a node's rows are filled from what Python found out about the run. The
# surface (surface_record.pxi) begins it and ends it; it is a transaction: record_abort undoes whatever was begun.

cdef void* state_beside(Table* t, id_t m, Beside* b) noexcept:
    """The state of the pool on another GPU behind the last of these recordings that worked there. NULL: none did, or in
    another pool."""
    while m != NONE:
        last = beside_of(node_row(t, m).spread, b.device)
        if last is not NULL and last.pool == b.pool: return last.state
        m = node_row(t, m).parent
    return NULL

cdef inline Driver* rec_driver(Table* t) noexcept: return &DRIVERS[t.rec.driver]
cdef inline Patch* rec_patch(Table* t, int32_t k) noexcept nogil: return <Patch*>t.rec_patches.rows + k

cdef Patch* patch_add(Table* t, int kind) except NULL:
    cdef Patch* p = rec_patch(t, column_add(t, &t.rec_patches, 1))
    p.kind, p.slot = kind, NONE
    return p

cdef int32_t record_copy(Table* t, int kind, object buffer, object x, int64_t nbytes) except -1:
    """A copied slot, whose tensor is x today, is copied into the buffer or out of it: by a node, unless it is FED. The
    copy's index among the recording's patches."""
    cdef Patch* p = patch_add(t, kind)
    p.to = tensor_ptr(<PyObject*>buffer)
    p.told[0] = <uintptr_t>tensor_ptr(<PyObject*>x)
    p.nbytes = nbytes
    if kind == FED: p.device, p.told[0] = tensor_device(<PyObject*>buffer), 0
    elif nbytes:
        check(t.rec.driver, fault(CALL_COPY) or rec_driver(t).copy(&t.rec, p, <PyObject*>buffer), CALL_COPY)
    return t.rec_patches.n - 1

cdef Args* args_of(Table* t, uintptr_t node) except NULL:
    """What the node is launched with: one for all its words."""
    for k in range(t.rec_patches.n):
        if rec_patch(t, k).handle == <void*>node and rec_patch(t, k).kind > WORDS: return <Args*>rec_patch(t, k).to
    return args_take(<cu.CUgraphNode>node)

cdef int words_add(Table* t, int kind, uintptr_t node, list words) except -1:
    """A captured node's arguments have these words: [(offset, `number`, `part` and `nbytes` of a Patch, its value now),
    ...]."""
    cdef Args* args = args_of(t, node)
    cdef int32_t at, number, part
    cdef int64_t nbytes
    cdef uint64_t now
    try:
        for at, number, part, nbytes, now in words:
            p = patch_add(t, kind)
            p.handle, p.device, p.segment, p.to = <void*>node, t.rec.device, t.rec_reads.n, <char*>args
            p.at, p.number, p.part, p.nbytes, p.told[0] = at, number, part, nbytes, now
            args.users += 1
    finally:
        if args.users == 0: free(args)
    return 0

cdef inline Read* rec_read(Table* t, int32_t k) noexcept nogil: return <Read*>t.rec_reads.rows + k

cdef Read* read_add(Table* t, uintptr_t at, int64_t nbytes, bint draws) except NULL:
    cdef Read* r = rec_read(t, column_add(t, &t.rec_reads, 1))
    r.at, r.nbytes, r.draws, r.number = <char*>at, nbytes, draws, NONE
    return r

cdef void* tape_now(Table* t) except NULL:
    """Where ops of the host are recorded."""
    if t.rec.driver == HOST: return t.rec.exec
    if t.rec.tape is NULL: t.rec.tape = tape_new()
    return t.rec.tape

cdef int record_aside(Table* t, uintptr_t at, int64_t nbytes, bytes value, bint draws) except -1:
    """What the host's ops, which ran while they were recorded, left at `at` is read next; the graph under way takes no
    notice. The caller keeps `value`."""
    cdef Read* r = read_add(t, at, nbytes, draws)
    r.value = PyBytes_AS_STRING(value)
    r.tape, t.rec.tape = t.rec.tape, NULL
    return 0

cdef void record_abort(Table* t) noexcept:
    if t.rec.active:
        rec_driver(t).abort(&t.rec)
        for k in range(t.rec_reads.n): read_free(t.rec.driver, rec_read(t, k))
        t.rec_reads.n = 0
        for k in range(t.rec_patches.n):
            if rec_patch(t, k).kind == SCALAR or rec_patch(t, k).kind == ADDRESS:
                rec_driver(t).word_free(rec_patch(t, k))
        t.rec_patches.n = 0
        t.rec_vain.clear()
        if t.rec.tape is not NULL: tape_free(t.rec.tape)
        t.rec.tape = NULL
        t.rec.active = 0

cdef id_t dims_of(Table* t, id_t n, PyObject* x) except -1:
    """Append x's sizes and strides to the node's dims; their index there."""
    cdef int ndim = tensor_ndim(x)
    if ndim == 0: return 0
    at = part_add(t, n, DIMS, 2 * ndim)
    tensor_dims(x, node_dim(t, node_row(t, n), at))
    return at

cdef id_t bytes_of(Table* t, id_t n, PyObject* x) except -1:
    """The same of x's bytes, in as many words as they take."""
    at = part_add(t, n, DIMS, (tensor_span(x) + 7) // 8)
    memcpy(node_dim(t, node_row(t, n), at), tensor_ptr(x), tensor_span(x))
    return at

cdef int slot_fill(Table* t, id_t n, id_t k, object row) except -1:
    """row: (leaf, tensor, example, binding, copy, same, apart, grad_of, back, beside, begins, whole)"""
    cdef Node* node = node_row(t, n)
    cdef Slot* s = node_slot(t, node, k)
    cdef Guard* g = node_guard(t, node, k)
    g.leaf, tensor, example, g.binding, s.copy, s.same, s.apart, g.grad_of, s.back, s.beside, begins, s.whole = row
    x = <PyObject*>example
    g.tensor = <PyObject*>tensor if tensor is not None else NULL
    g.grad = ANY_GRAD
    g.keys = tensor_keys(x)
    g.data_kind = impl_kind(tensor_impl(x))
    g.autograd = ANY_STATE if fn_row(t, node.fn).backward else PLAIN_TENSOR if begins else tensor_autograd(x)
    g.ndim = tensor_ndim(x)
    g.dim_at = dims_of(t, n, x)
    g.itemsize = tensor_itemsize(x)
    g.ptr = tensor_ptr(x)
    s.identity = g.leaf != NONE and (g.tensor is not NULL or g.grad_of != NONE or s.same != NONE or s.apart)
    # No vector and no sum depends on where one element lies. (A copy of 16 bytes does: cuda.pxi.)
    s.align = <int32_t>(<uintptr_t>g.ptr % align_of(node))
    if tensor_numel(x) == 1 and g.itemsize < 16: s.align = NONE
    s.from_node = path_output(t, node.parent, x, &s.from_out) if g.binding == PINNED else NONE
    if s.from_node != NONE: s.shift = g.ptr - tensor_storage_ptr(x)
    if g.binding == VALUE: s.value = bytes_of(t, n, x)
    g.odd = s.identity or s.whole or s.from_node != NONE or s.beside != NONE \
        or not (g.binding == UNUSED or g.binding == PINNED or g.binding == REBOUND)
    if is_loose(g): node.grads_move = True
    if g.binding == COPIED or g.binding == REBOUND:
        p = node_patch(t, node, s.copy)
        p.slot = k
        if p.kind == FED: s.align = NONE
    for j in range(node.len[PATCHES] if g.binding == REBOUND else 0):
        p = node_patch(t, node, j)
        if p.kind == ADDRESS and p.number == s.copy: p.slot = k
    if s.beside != NONE: s.shift = g.ptr - node_guard(t, node, s.beside).ptr
    if s.back != NONE: node_patch(t, node, s.back).slot = k
    return 0

cdef int out_fill(Table* t, id_t n, id_t k, object row) except -1:
    """row: (kind, ref, proto, shift, version, grad_slot, hidden, root, line, ops, inside)"""
    cdef Node* node = node_row(t, n)
    cdef Out* o = node_out(t, node, k)
    o.kind, o.ref, proto, o.shift, o.version, o.grad_slot, o.hidden, o.root, line, ops, o.inside = row
    x = <PyObject*>proto
    for j in range(node.len[SLOTS] if o.grad_slot != NONE else 0):
        g = node_guard(t, node, j)
        if g.grad_of == o.grad_slot and g.binding != UNUSED: o.reads_old = True
    if not o.hidden: node.n_given += 1
    if o.kind == SHARED: node_out(t, node, o.ref).sharers += 1
    if o.kind == READOUT and o.ref == NONE: node.waits = 1
    o.keys = tensor_keys(x)
    o.data_kind = impl_kind(tensor_impl(x))
    o.ndim = tensor_ndim(x)
    o.dim_at = dims_of(t, n, x)
    o.offset = tensor_offset(x)
    for one in (proto, line, ops): Py_INCREF(one)
    o.proto, o.line, o.ops = x, <PyObject*>line, <PyObject*>ops
    return 0

cdef id_t program_add(Table* t, object program) except -1:
    """A pytree's program as rows of ops; objects are borrowed from the program's owner."""
    cdef id_t at = column_add(t, &t.ops, <int32_t>len(program))
    cdef id_t k = at
    try:
        for kind, n, obj in program:
            op = op_row(t, k)
            op.kind, op.n, op.obj = kind, n, <PyObject*>obj
            k += 1
    except BaseException:
        t.ops.n = at
        raise
    return at

cdef uint64_t program_shape(Table* t, id_t at, id_t n) noexcept:
    """One number of a program without its plain values."""
    cdef uint64_t h = <uint64_t>n
    for k in range(at, at + n):
        op = op_row(t, k)
        h = (h ^ <uint64_t>op.kind ^ <uint64_t>op.n << 8) * <uint64_t>0x9E3779B97F4A7C15
        if op.kind != PLAIN and op.kind != EQUAL: h = (h ^ <uintptr_t>op.obj) * <uint64_t>0x9E3779B97F4A7C15
        h ^= h >> 32
    return h

cdef int backward_fill(Table* t, id_t n, tuple row) except -1:
    """row: (the jitted backward or None, [(slot or NONE, out or NONE), ...], [slot, ...],
    to how many of these, the first, several edges lead)"""
    site, saves, flows, joined = row
    part_add(t, n, SAVES, len(saves))
    part_add(t, n, FLOWS, len(flows))
    node_row(t, n).site = <PyObject*>site if site is not None else NULL
    node_row(t, n).joined_n = joined
    for k in range(len(saves)):
        s = node_save(t, node_row(t, n), k)
        s.slot, s.out = saves[k]
    for k in range(len(flows)): node_flow(t, node_row(t, n), k)[0] = flows[k]
    return 0

cdef int effect_fill(Table* t, id_t n, id_t k, object row) except -1:
    """row: (kind, slot, bumps, out, place, by, made, number). Places are there."""
    cdef Effect* e = node_effect(t, node_row(t, n), k)
    e.kind, e.slot, e.bumps, e.out, e.place, by, e.made, e.number = row
    e.by = <PyObject*>by
    e.tag = NONE
    if e.kind == WRITES: node_row(t, n).writes = 1
    for j in range(node_row(t, n).len[SLOTS] if e.kind == WRITES else 0):
        # which may overlap what is written
        if node_guard(t, node_row(t, n), j).binding == REBOUND: node_guard(t, node_row(t, n), j).odd = True
    for j in range(node_row(t, n).len[TAGS] if e.place != NONE else 0):
        w = node_tag(t, node_row(t, n), j)
        if w.place_at <= e.place < w.place_at + w.place_n: e.tag = j
    return 0

cdef int grad_fill(Table* t, id_t n, id_t k, object row) except -1:
    """row: (slot, was_none, was)"""
    cdef Grad* g = node_grad(t, node_row(t, n), k)
    g.slot, g.was_none, was = row
    g.was = <void*><uintptr_t>was
    node_guard(t, node_row(t, n), g.slot).grad = NO_GRAD if g.was_none else SOME_GRAD
    node_row(t, n).same_grads |= g.was is not NULL
    return 0

cdef int undos_fill(Table* t, id_t n, list undos) except -1:
    """rows: (to, saved, nbytes, segment)"""
    part_add(t, n, UNDOS, len(undos))
    for k in range(len(undos)):
        u = node_undo(t, node_row(t, n), k)
        to, saved, u.nbytes, u.segment = undos[k]
        u.to, u.saved = <PyObject*>to, <PyObject*>saved
    return 0

cdef int part_copy(Table* t, id_t n, int part, Column* rows) except -1:
    """Give node n these rows."""
    part_add(t, n, part, rows.n)
    if rows.n:
        memcpy(<char*>t.parts[part].rows + <size_t>node_row(t, n).at[part] * rows.size, rows.rows,
            <size_t>rows.n * rows.size)
    return 0

cdef int node_fill(Table* t, id_t n, id_t f, id_t spec, tuple rows) except -1:
    """Its rows, and the place in the tree when they are complete. leaves: the call's tensors."""
    cdef Node* node = node_row(t, n)
    (ambient, slots, outs, ret_program, ret_make, effects, grads, groups, leaves, backward, numbers, undos,
     keeps_grads) = rows
    node.fn = f
    node.spec = spec
    node.path = path_of(t, t.rec.device)
    node.parent = t.rec.parent
    node.depth = node_row(t, node.parent).depth + 1 if node.parent != NONE else 0
    node.ambient[0], node.ambient[1], node.ambient[2] = ambient
    cdef Objects tensors = borrowed(leaves)
    node.key = call_key(spec, node.ambient, tensors.data(), <int32_t>tensors.size())
    part_copy(t, n, DEADS, &t.rec_deads)
    part_copy(t, n, PATCHES, &t.rec_patches)
    part_copy(t, n, READS, &t.rec_reads)
    for k in range(node_row(t, n).len[PATCHES]):
        if node_patch(t, node_row(t, n), k).segment == t.rec_reads.n: node_patch(t, node_row(t, n), k).segment = NONE
    numbers_fill(t, n, numbers)
    undos_fill(t, n, undos)
    node_row(t, n).keeps_grads = keeps_grads
    part_add(t, n, SLOTS, len(slots))
    part_add(t, n, GUARDS, len(slots))
    for k in range(len(slots)): slot_fill(t, n, k, slots[k])
    part_add(t, n, OUTS, len(outs))
    for k in range(len(outs)): out_fill(t, n, k, outs[k])
    part_add(t, n, GRADS, len(grads))
    for k in range(len(grads)): grad_fill(t, n, k, grads[k])
    places_fill(t, n, groups)
    part_add(t, n, EFFECTS, len(effects))
    for k in range(len(effects)): effect_fill(t, n, k, effects[k])
    backward_fill(t, n, backward)
    k = program_add(t, ret_program)
    node = node_row(t, n)
    node.ret_at = k
    node.ret_n = <int32_t>len(ret_program)
    node.ret_make = <PyObject*>ret_make if ret_make is not None else NULL
    edge_link(t, n)
    return 0

cdef void node_take(Table* t, id_t n) noexcept:
    """What was recorded is the node's."""
    cdef Node* node = node_row(t, n)
    fn_row(t, node.fn).path = node.path
    fn_row(t, node.fn).paths |= <uint64_t>1 << node.path
    t.rec_reads.n = 0
    node.graph = t.rec.graph
    node.exec = t.rec.exec
    node.state = t.rec.state
    node.pool = t.rec.pool
    node.spread = t.rec.spread
    t.rec.spread = NULL
    node.wide = t.rec.wide
    if node.pool is not NULL: cuda_pool_count(node.pool, 1)
    node.n_graph_nodes = t.rec.n_graph_nodes
    node.exec_bytes = t.rec.exec_bytes
    t.rec.active = 0

