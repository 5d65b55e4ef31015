# Make, grow and free rows; check that the table holds together. Reads and writes every column;
# calls the driver only to destroy graphs.

cdef Table TABLE

cdef int32_t column_add(Table* t, Column* c, int32_t count) except -1:
    """Append `count` zeroed rows; the row number of the first."""
    cdef int32_t at = c.n
    if c.n + count > c.cap or CGT_DEBUG:
        # In a debug build every growth moves the array, so that a stale pointer is found early.
        cap = c.cap * 2 if c.n + count > c.cap else c.cap
        if cap < c.n + count: cap = c.n + count + 8
        moved = malloc(<size_t>cap * c.size)
        if moved is NULL: raise MemoryError()
        if c.n: memcpy(moved, c.rows, <size_t>c.n * c.size)
        if CGT_DEBUG and c.rows is not NULL: memset(c.rows, 0xDD, <size_t>c.cap * c.size)
        free(c.rows)
        c.rows = moved
        c.cap = cap
    memset(<char*>c.rows + <size_t>at * c.size, 0, <size_t>count * c.size)
    c.n += count
    return at

cdef void column_cut(Column* c, int32_t at, int32_t count) noexcept:
    """Take rows out and close the gap; the caller moves the slices behind it."""
    cdef size_t size = c.size
    if count == 0: return
    memmove(<char*>c.rows + at * size, <char*>c.rows + (at + count) * size, (c.n - at - count) * size)
    c.n -= count
    if CGT_DEBUG: memset(<char*>c.rows + c.n * size, 0xDD, count * size)

cdef int table_move(Table* t) except -1:
    """Checked builds, where Python was called, which may have added rows: move what such a call moves at times, so that
    a row held across it is found by the first test that comes by."""
    column_add(t, &t.nodes, 0)
    column_add(t, &t.specs, 0)
    column_add(t, &t.ops, 0)
    column_add(t, &t.paths, 0)
    for part in range(N_PARTS): column_add(t, &t.parts[part], 0)
    return 0

cdef void column_start(Column* c, int32_t size) noexcept:
    c.rows = NULL
    c.n = c.cap = 0
    c.size = size

cdef inline Fn* fn_row(Table* t, id_t f) noexcept nogil: return <Fn*>t.fns.rows + f
cdef inline Spec* spec_row(Table* t, id_t s) noexcept nogil: return <Spec*>t.specs.rows + s
cdef inline Op* op_row(Table* t, id_t o) noexcept nogil: return <Op*>t.ops.rows + o
cdef inline Node* node_row(Table* t, id_t n) noexcept nogil: return <Node*>t.nodes.rows + n
cdef inline Path* path_row(Table* t, id_t p) noexcept nogil: return <Path*>t.paths.rows + p

# A node's parts. A new one is a name in the pxd's Part, a row here, and who reads it.
cdef object PARTS = (
    ("slots", sizeof(Slot)), ("guards", sizeof(Guard)), ("outs", sizeof(Out)), ("patches", sizeof(Patch)),
    ("effects", sizeof(Effect)), ("grads", sizeof(Grad)), ("tags", sizeof(Tag)), ("places", sizeof(Place)),
    ("dims", sizeof(int64_t)), ("deads", sizeof(Dead)), ("saves", sizeof(Save)), ("flows", sizeof(id_t)),
    ("reads", sizeof(Read)), ("numbers", sizeof(Number)), ("undos", sizeof(Undo)))

cdef inline Slot* node_slot(Table* t, Node* n, id_t k) noexcept nogil:
    return <Slot*>t.parts[SLOTS].rows + n.at[SLOTS] + k
cdef inline Guard* node_guard(Table* t, Node* n, id_t k) noexcept nogil:
    return <Guard*>t.parts[GUARDS].rows + n.at[GUARDS] + k
cdef inline Out* node_out(Table* t, Node* n, id_t k) noexcept nogil: return <Out*>t.parts[OUTS].rows + n.at[OUTS] + k
cdef inline Patch* node_patch(Table* t, Node* n, id_t k) noexcept nogil:
    return <Patch*>t.parts[PATCHES].rows + n.at[PATCHES] + k
cdef inline Effect* node_effect(Table* t, Node* n, id_t k) noexcept nogil:
    return <Effect*>t.parts[EFFECTS].rows + n.at[EFFECTS] + k
cdef inline Grad* node_grad(Table* t, Node* n, id_t k) noexcept nogil:
    return <Grad*>t.parts[GRADS].rows + n.at[GRADS] + k
cdef inline Tag* node_tag(Table* t, Node* n, id_t k) noexcept nogil: return <Tag*>t.parts[TAGS].rows + n.at[TAGS] + k
cdef inline Place* node_place(Table* t, Node* n, id_t k) noexcept nogil:
    return <Place*>t.parts[PLACES].rows + n.at[PLACES] + k
cdef inline int64_t* node_dim(Table* t, Node* n, id_t k) noexcept nogil:
    return <int64_t*>t.parts[DIMS].rows + n.at[DIMS] + k
cdef inline Dead* node_dead(Table* t, Node* n, id_t k) noexcept nogil:
    return <Dead*>t.parts[DEADS].rows + n.at[DEADS] + k
cdef inline Save* node_save(Table* t, Node* n, id_t k) noexcept nogil:
    return <Save*>t.parts[SAVES].rows + n.at[SAVES] + k
cdef inline id_t* node_flow(Table* t, Node* n, id_t k) noexcept nogil:
    return <id_t*>t.parts[FLOWS].rows + n.at[FLOWS] + k
cdef inline Read* node_read(Table* t, Node* n, id_t k) noexcept nogil:
    return <Read*>t.parts[READS].rows + n.at[READS] + k

cdef inline Undo* node_undo(Table* t, Node* n, id_t k) noexcept nogil:
    return <Undo*>t.parts[UNDOS].rows + n.at[UNDOS] + k
cdef inline Number* node_number(Table* t, Node* n, id_t k) noexcept nogil:
    return <Number*>t.parts[NUMBERS].rows + n.at[NUMBERS] + k

cdef id_t part_add(Table* t, id_t n, int part, Py_ssize_t count) except -1:
    """Append rows to node n's slice, behind which no other node's lies; the index of the first in the slice."""
    cdef id_t at = column_add(t, &t.parts[part], <int32_t>count)
    cdef Node* node = node_row(t, n)
    if node.len[part] == 0: node.at[part] = at
    node.len[part] += <id_t>count
    return at - node.at[part]

cdef void part_cut(Table* t, Node* n, int part) noexcept:
    """Take node n's slice out; those behind it move up."""
    cdef id_t k, at = n.at[part], count = n.len[part]
    column_cut(&t.parts[part], at, count)
    for k in range(t.nodes.n):
        if node_row(t, k).alive and node_row(t, k).at[part] > at: node_row(t, k).at[part] -= count

cdef int table_start(Table* t) except -1:
    column_start(&t.fns, sizeof(Fn))
    column_start(&t.specs, sizeof(Spec))
    column_start(&t.ops, sizeof(Op))
    column_start(&t.nodes, sizeof(Node))
    column_start(&t.paths, sizeof(Path))
    for part in range(N_PARTS): column_start(&t.parts[part], PARTS[part][1])
    column_start(&t.rec_patches, sizeof(Patch))
    column_start(&t.rec_deads, sizeof(Dead))
    column_start(&t.rec_reads, sizeof(Read))
    path_of(t, -1)
    return 0

cdef id_t path_of(Table* t, int device) except -1:
    """The device's row of paths: 0 for the host, 1+i for cuda:i. Rows are made when first asked."""
    while t.paths.n <= device + 1:
        column_add(t, &t.paths, 1)
        p = path_row(t, t.paths.n - 1)
        p.device = t.paths.n - 2
        p.driver = HOST if p.device < 0 else CUDA
        p.current = p.stale = p.since = NONE
        p.lock = <void*>new mutex()
    return device + 1

cdef id_t row_take(Table* t, Column* c) except -1:
    """A free row of fns, specs or nodes (whose first field is `alive`), else a new one."""
    for k in range(c.n):
        alive = <int32_t*>(<char*>c.rows + <size_t>k * c.size)
        if alive[0] == 0:
            memset(alive, 0, c.size)
            break
    else:
        k = column_add(t, c, 1)
        alive = <int32_t*>(<char*>c.rows + <size_t>k * c.size)
    alive[0] = 1
    t.allocations += 1
    return k

cdef void row_drop(Table* t, Column* c, id_t k) noexcept:
    cdef char* row = <char*>c.rows + <size_t>k * c.size
    memset(row, 0xDD if CGT_DEBUG else 0, c.size)
    (<int32_t*>row)[0] = 0
    t.allocations -= 1

cdef void ops_cut(Table* t, id_t at, int32_t count) noexcept:
    """Take a program out; specs and nodes behind it move up, and a walk under way begins anew."""
    t.births += 1
    column_cut(&t.ops, at, count)
    for k in range(t.specs.n):
        if spec_row(t, k).alive and spec_row(t, k).op_at > at: spec_row(t, k).op_at -= count
    for k in range(t.nodes.n):
        if node_row(t, k).alive and node_row(t, k).ret_at > at: node_row(t, k).ret_at -= count

cdef void verdict_drop(Verdict* v) noexcept:
    cdef PyObject* reason = v.reason
    v.reason = NULL
    Py_XDECREFX(reason)

# --- edges: (path, parent, function) -> children ---

cdef inline uint64_t edge_key(id_t path, id_t parent, id_t f) noexcept nogil:
    """A parent has one path; of nodes without one, the path is in its place."""
    return <uint64_t><uint32_t>(parent if parent != NONE else NONE - path) << 32 | <uint32_t>f

cdef inline Edge* edge_find(Table* t, id_t path, id_t parent, id_t f) noexcept nogil:
    """NULL: no node is there."""
    found = t.edges.find(edge_key(path, parent, f))
    return &dereference(found).second if found != t.edges.end() else NULL

cdef inline id_t first_child(Table* t, id_t path, id_t parent, id_t f) noexcept nogil:
    if parent != NONE and node_row(t, parent).children == 0: return NONE    # as of the last of a path, at most hits
    e = edge_find(t, path, parent, f)
    return e.first if e is not NULL else NONE

cdef int edge_link(Table* t, id_t n) except -1:
    """Put node n before its siblings."""
    cdef Node* node = node_row(t, n)
    cdef pair[uint64_t, Edge] row
    row.first, row.second.first = edge_key(node.path, node.parent, node.fn), NONE
    e = &dereference(t.edges.insert(row).first).second      # that, or the one that is there
    node.next = e.first
    e.first = n
    if node.parent != NONE: node_row(t, node.parent).children += 1
    return 0

cdef void edge_unlink(Table* t, id_t n) noexcept:
    cdef Node* node = node_row(t, n)
    cdef Edge* e = edge_find(t, node.path, node.parent, node.fn)
    cdef id_t k = e.first
    verdict_drop(&e.verdict)             # there is room again
    if k != n:
        while node_row(t, k).next != n: k = node_row(t, k).next
        node_row(t, k).next = node.next
    elif node.next != NONE: e.first = node.next
    else: t.edges.erase(edge_key(node.path, node.parent, node.fn))
    if node.parent != NONE: node_row(t, node.parent).children -= 1

# --- freeing ---

cdef enum: OWNED = 4            # objects of an output's row

cdef void read_free(int driver, Read* r) noexcept:
    DRIVERS[driver].destroy(r.graph, r.exec, NULL, NULL)
    if r.tape is not NULL: tape_free(r.tape)

cdef void outs_drop(Table* t, id_t n) noexcept:
    """What the rows of a node's outputs own. That may run a finalizer: the node is unlinked already."""
    cdef PyObject* owned[OWNED]
    for k in range(node_row(t, n).len[OUTS]):
        o = node_out(t, node_row(t, n), k)
        owned[0], owned[1], owned[2], owned[3] = o.tensor, o.proto, o.line, o.ops
        if o.kind == FRESH: storage_drop(o.storage)
        memset(o, 0, sizeof(Out))
        for j in range(OWNED): Py_XDECREFX(owned[j])

cdef void node_free(Table* t, id_t n, bint replaced=False) noexcept:
    """Free a node and all that were recorded behind it. What somebody holds of its outputs is moved
    to ordinary memory first; the path goes on from the parent. `replaced`: they were not recorded in vain."""
    cdef Node* node = node_row(t, n)
    cdef list followed = []
    for k in range(t.nodes.n):
        if node_row(t, n).children == 0: break
        if node_row(t, k).alive and node_row(t, k).parent == n: node_free(t, k, replaced)
    outs_rescue_all(t, n)
    node = node_row(t, n)
    edge_unlink(t, n)
    p = path_row(t, node.path)
    if p.current == n: p.current = node.parent
    if p.stale == n: p.stale = node.parent
    for k in range(node.len[READS]): read_free(p.driver, node_read(t, node, k))
    for k in range(node.len[PATCHES]):
        if node_patch(t, node, k).kind == SCALAR or node_patch(t, node, k).kind == ADDRESS:
            DRIVERS[p.driver].word_free(node_patch(t, node, k))
    DRIVERS[p.driver].destroy(node.graph, node.exec, node.pool, node.state)
    spread_free(node.spread)
    wide_free(<Wide*>node.wide)
    outs_drop(t, n)
    node = node_row(t, n)
    for k in range(node.len[SLOTS] if node.follows else 0):
        if not node_slot(t, node, k).follows: continue
        followed.append(<object>node_guard(t, node, k).tensor)      # let go of when the row is free
        Py_DECREFX(node_guard(t, node, k).tensor)
    if node.n_replay == 0 and not replaced: fn_row(t, node.fn).wasted += 1
    node.alive = 0
    ops_cut(t, node.ret_at, node.ret_n)
    for part in range(N_PARTS): part_cut(t, node, part)
    fn_paths(t, node.fn)
    try:
        t.freed.push_back(pair[id_t, id_t](node.fn, n))
    except MemoryError:
        pass                        # Python keeps an owner too long
    row_drop(t, &t.nodes, n)

cdef void fn_paths(Table* t, id_t f) noexcept:
    """On which paths does a function have nodes?"""
    cdef Fn* fn = fn_row(t, f)
    cdef id_t k
    fn.paths = 0
    for k in range(t.nodes.n):
        if node_row(t, k).alive and node_row(t, k).fn == f: fn.paths |= <uint64_t>1 << node_row(t, k).path
    if not fn.paths >> fn.path & 1: fn.path = NONE
    for k in range(t.paths.n):
        if fn.path == NONE and fn.paths >> k & 1: fn.path = k

cdef void spec_free(Table* t, id_t s) noexcept:
    """Free a spec and every node that was recorded for it."""
    cdef Spec* spec = spec_row(t, s)
    cdef Fn* fn = fn_row(t, spec.fn)
    for k in range(t.nodes.n):
        if node_row(t, k).alive and node_row(t, k).spec == s: node_free(t, k)
    k = fn.first_spec
    if k == s:
        fn.first_spec = spec.next
    else:
        while spec_row(t, k).next != s: k = spec_row(t, k).next
        spec_row(t, k).next = spec.next
    spec.alive = 0
    verdict_drop(&spec.verdict)
    ops_cut(t, spec.op_at, spec.op_n)
    row_drop(t, &t.specs, s)

cdef void fn_clear(Table* t, id_t f) noexcept:
    """Free all specs and nodes of a function; its counters and options stay."""
    verdict_drop(&fn_row(t, f).verdict)
    while fn_row(t, f).first_spec != NONE: spec_free(t, fn_row(t, f).first_spec)

cdef int is_ancestor(Table* t, id_t m, id_t n) noexcept:
    n = node_row(t, n).parent
    while n != NONE and n != m: n = node_row(t, n).parent
    return n != NONE

cdef int table_check(Table* t) except -1:
    """Every slice inside its column, every link to a living row, every reference inside its node."""
    cdef id_t j
    for k in range(t.nodes.n):
        n = node_row(t, k)
        if not n.alive: continue
        assert fn_row(t, n.fn).alive and spec_row(t, n.spec).alive, "a node without function or spec"
        assert spec_row(t, n.spec).fn == n.fn, "a node with another function's spec"
        assert n.next == NONE or node_row(t, n.next).alive, "a link to a freed node"
        assert n.parent == NONE or (node_row(t, n.parent).alive and node_row(t, n.parent).path == n.path
                                    and node_row(t, n.parent).depth == n.depth - 1), "parent"
        j = first_child(t, n.path, n.parent, n.fn)
        while j != k and j != NONE: j = node_row(t, j).next
        assert j == k, "a node that its edge does not lead to"
        for part in range(N_PARTS):
            assert n.at[part] >= 0 and n.at[part] + n.len[part] <= t.parts[part].n, PARTS[part][0]
        assert n.at[GUARDS] == n.at[SLOTS] and n.len[GUARDS] == n.len[SLOTS], "a guard for each slot"
        assert n.ret_at + n.ret_n <= t.ops.n and n.path < t.paths.n, "ops, path"
        for j in range(n.len[DEADS]):
            assert is_ancestor(t, node_dead(t, n, j).node, k), "a death on another path"
            assert node_dead(t, n, j).out < node_row(t, node_dead(t, n, j).node).len[OUTS]
        assert (n.site is not NULL) or (n.len[SAVES] == 0 and n.len[FLOWS] == 0), "saved for no backward"
        for j in range(n.len[SAVES]):
            assert node_save(t, n, j).slot < n.len[SLOTS] and node_save(t, n, j).out < n.len[OUTS]
        assert 0 <= n.joined_n <= n.len[FLOWS], "flows from several edges"
        for j in range(n.len[FLOWS]): assert node_flow(t, n, j)[0] < n.len[SLOTS], "flows to no slot"
        for j in range(n.len[EFFECTS]):
            e = node_effect(t, n, j)
            assert e.slot < n.len[SLOTS] and e.out < n.len[OUTS] and e.place < n.len[PLACES], "an effect on nothing"
            assert (e.kind >= ADVANCES) == (e.place != NONE) == (e.slot == NONE) == (e.tag != NONE), \
                "an advance of no place"
            if e.kind == WRITES and node_slot(t, n, e.slot).copy != NONE:
                m = node_slot(t, n, e.slot).copy if node_guard(t, n, e.slot).binding == TWIN else e.slot
                assert node_slot(t, n, m).back != NONE, "a written slot is copied and stays there"
        for j in range(n.len[SLOTS]):
            s = node_slot(t, n, j)
            g = node_guard(t, n, j)
            assert g.leaf != NONE or (g.tensor is not NULL) + (g.grad_of != NONE) == 1, \
                "a slot is a leaf, reached, or a gradient"
            assert g.grad_of < n.len[SLOTS], "a gradient of no slot"
            assert not s.follows or (n.follows and g.leaf == NONE and g.grad_of == NONE), "a slot that follows no place"
            assert s.same < j and (g.leaf != NONE or not s.identity), "the same as an earlier leaf"
            assert g.leaf < spec_row(t, n.spec).n_leaves, "a slot beyond the leaves"
            moves = g.binding in (COPIED, REBOUND)
            assert (moves or g.binding == TWIN) == (s.copy != NONE), "a copied slot has a copy"
            assert not moves or node_patch(t, n, s.copy).slot == j, "a copy of another slot"
            assert not moves or (node_patch(t, n, s.copy).kind == BOUND) == (g.binding == REBOUND), \
                "a rebound slot that is copied"
            assert s.beside == NONE or (moves and s.beside < j
                                        and node_guard(t, n, s.beside).binding in (COPIED, REBOUND)), "beside none"
            assert s.back == NONE or (moves and node_patch(t, n, s.back).slot == j), "the way back of another slot"
            assert g.binding != TWIN or node_guard(t, n, s.copy).binding in (COPIED, REBOUND), "twin of a copied"
            assert g.odd or ((g.binding in (UNUSED, PINNED) or (g.binding == REBOUND and not n.writes))
                             and s.from_node == NONE and not (s.identity or s.follows or s.whole)), "odd"
            assert s.from_node == NONE or is_ancestor(t, s.from_node, k), "an input off the path"
        for j in range(n.len[PLACES]):
            q = node_place(t, n, j)
            assert q.guard != IS_NUMBER or node_number(t, n, q.slot).op == AT_PLACE, "a place of no number"
        for j in range(n.len[NUMBERS]):
            w = node_number(t, n, j)
            assert w.op != AT_PLACE or node_place(t, n, w.a).guard in (IS_NUMBER, FOLLOWS), "a number of no place"
            assert w.op != IN_CALL or w.a < spec_row(t, n.spec).n_numbers, "a number that no call has"
            assert w.op != IN_TENSOR or w.a < n.len[SLOTS], "a number in no tensor"
            assert w.op <= EQUALS or w.op == AT_READ or (w.a < j and w.b < j), "a number that comes of a later one"
            assert w.after < n.len[READS], "a number that never comes"
        for j in range(n.len[READS]):
            r = node_read(t, n, j)
            assert r.number == NONE or (r.number < n.len[NUMBERS] and node_number(t, n, r.number).op == AT_READ
                                        and r.nbytes == 8), "a number that is read"
            assert r.value is not NULL and (r.nbytes > 0 or r.tape is not NULL or r.island is not NULL), \
                "a segment that leaves no value"
        for j in range(n.len[UNDOS]):
            u = node_undo(t, n, j)
            assert u.nbytes > 0 and 0 <= u.segment <= n.len[READS], "what no segment overwrites"
            assert j == 0 or node_undo(t, n, j - 1).segment <= u.segment, "undone in another order"
        for j in range(n.len[OUTS]):
            o = node_out(t, n, j)
            assert o.kind in (FRESH, READOUT) or o.ref >= 0, "an output that refers to nothing"
            # A part comes of outputs that are told beside it.
            assert o.kind == PART or o.ref < (n.len[SLOTS] if o.kind in (VIEW, INPUT)
                                              else n.len[NUMBERS] if o.kind == READOUT else j), "a later output's"
            assert o.kind != SHARED or node_out(t, n, o.ref).kind == FRESH, "shared of fresh"
    for k in range(t.paths.n):
        j = path_row(t, k).current
        assert j == NONE or (node_row(t, j).alive and node_row(t, j).path == k), "current node"
        j = path_row(t, k).stale
        assert j == NONE or (node_row(t, j).alive and node_row(t, j).path == k), "stale node"
        assert path_row(t, k).current == NONE or path_row(t, k).stale == NONE, "two iterations"
    for k in range(t.specs.n):
        if spec_row(t, k).alive:
            assert fn_row(t, spec_row(t, k).fn).alive, "a spec without a function"
            assert spec_row(t, k).op_at + spec_row(t, k).op_n <= t.ops.n, "a spec beyond the ops"
    return 0
