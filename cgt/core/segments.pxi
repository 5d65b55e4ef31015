# Segments. A recording whose function reads a value on the way is a row of graphs, each but the last with the value
# that it leaves on the host. A call runs one after the other and looks whether the values are those of the recording;
# where one is not, the sibling with that value goes on, and if there is none the call is Python's.
#
# What ran in vain until then is undone: random numbers that it drew are given back, what it wrote outside was saved
# before, and besides it wrote only memory that no other way needs (segments.py lets a recording read on no other
# terms).

# A call for whose values there is no recording costs what ran until then and its own, eager, run. Where that is the
# rule, a verdict that stands comes before the segments, for most calls.

cdef enum: VAIN = 8, TRY_AGAIN = 32     # calls after which they run all the same
cdef uint64_t NOWHERE = <uint64_t>-1    # no tensor lies there

cdef int patches_bind(Table* t, id_t n, void* exec_, Driver* d, PyObject** leaves, void* stream) except -1:
    """Have the graph copy from today's inputs, and to them, and draw from where the generators are; what did not move
    costs one compare. `exec_`: the first of the node's. The GIL may go, at the end, where inputs are on the host."""
    cdef Node* node = node_row(t, n)
    cdef Fn* fn = fn_row(t, node.fn)
    cdef int32_t k
    cdef bint feeds = False
    for k in range(node.len[PATCHES] if node.moved else 0):
        p = node_patch(t, node, k)
        if p.kind != BOUND or p.slot == NONE: continue
        source = <uintptr_t>tensor_ptr(slot_tensor(t, node, p.slot, leaves))
        if source == p.told[0]: continue
        p.told[0] = source
        node_guard(t, node, p.slot).ptr = <char*>source
        fn.rebinds += 1
        code = fault(CALL_PATCH) or d.patch(node.exec, p) if p.nbytes else 0
        if code != 0: p.told[0] = NOWHERE
        check(path_row(t, node.path).driver, code, CALL_PATCH)
    if node.moved:
        code = words_tell(t, node, ADDRESS, NONE, d)
        node.moved = code != 0
        check(path_row(t, node.path).driver, code, CALL_PATCH)
    # generators, which are recorded first, when nothing else can fail
    for k in range(node.len[PATCHES] - 1, -1, -1):
        p = node_patch(t, node, k)
        if p.kind == WORDS:
            words_bind(exec_, p, d)
            continue
        if p.slot == NONE or p.kind == BOUND or p.kind == ADDRESS: continue
        fn.copied_bytes += p.nbytes
        if p.kind == FED:
            feeds = True
            continue
        source = <uintptr_t>tensor_ptr(slot_tensor(t, node, p.slot, leaves))
        if source == p.told[0]: continue
        if p.nbytes:
            before = p.told[0]
            p.told[0] = source
            code = fault(CALL_PATCH) or d.patch(exec_ if p.kind == COPY_SOURCE else node.exec, p)
            if code != 0: p.told[0] = before       # the shadow tells what the exec was really told
            check(path_row(t, node.path).driver, code, CALL_PATCH)
        if is_loose(node_guard(t, node, p.slot)): node_guard(t, node, p.slot).ptr = <char*>source
        fn.rebinds += p.kind == COPY_SOURCE
    return slots_feed(t, n, d, leaves, stream) if feeds else 0

cdef int slots_feed(Table* t, id_t n, Driver* d, PyObject** leaves, void* stream) except -1:
    """Copy what slots on the host hold to where the recording works. The caller holds the path, so the node stays; its
    rows may move while the GIL is gone."""
    cdef Patch p
    cdef int32_t k
    for k in range(node_row(t, n).len[PATCHES]):
        p = node_patch(t, node_row(t, n), k)[0]
        if p.kind != FED or not p.nbytes: continue
        source = tensor_ptr(slot_tensor(t, node_row(t, n), p.slot, leaves))
        with nogil: code = fault(CALL_COPY) or d.feed(&p, source, stream)
        check(path_row(t, node_row(t, n).path).driver, code, CALL_COPY)
    return 0

cdef inline void* first_exec(Table* t, Node* node) noexcept nogil:
    """What runs first: it copies the inputs and writes the words."""
    return exec_among(node_read(t, node, 0), node.len[READS], node.exec)

cdef inline void* exec_among(Read* reads, int32_t n, void* last) noexcept nogil:
    """The first graph of a row of segments, of which some have none."""
    for k in range(n):
        if reads[k].exec is not NULL: return reads[k].exec
    return last

cdef int32_t node_length(Table* t, Node* node) noexcept:
    """Ops, or nodes of graphs, of all its segments."""
    cdef int32_t k, n = node.n_graph_nodes
    for k in range(node.len[READS]): n += node_read(t, node, k).n_graph_nodes
    return n

cdef void words_give_back(Table* t, id_t n) noexcept:
    """The call goes another way: the generators are where they were."""
    cdef Node* node = node_row(t, n)
    cdef int32_t k
    for k in range(node.len[PATCHES]):
        p = node_patch(t, node, k)
        if p.kind == WORDS and p.advance: generator_give_back(p.generator, p.advance, p.told[0], p.told[1])

cdef bint read_holds(Read* r) noexcept nogil:
    """Is what the segment left the value of the recording, if it must be?"""
    return r.nbytes == 0 or r.number != NONE or memcmp(r.at, r.value, r.nbytes) == 0

cdef bint reads_agree(Table* t, id_t n, int32_t known) noexcept nogil:
    """Are the first `known` values, which lie on the host, those of node n, and nothing else is among them?"""
    cdef Node* node = node_row(t, n)
    if node.len[READS] < known: return False
    for k in range(known):
        if node_read(t, node, k).island is not NULL and not node_read(t, node, k).pure: return False
        if not read_holds(node_read(t, node, k)): return False
    return True

cdef bint has_islands(Table* t, id_t n) noexcept:
    """Does the user's code run between the node's segments?"""
    cdef int32_t k
    for k in range(node_row(t, n).len[READS]):
        r = node_read(t, node_row(t, n), k)
        if r.island is not NULL and not r.pure: return True
    return False

cdef uint64_t slots_versions(Table* t, id_t n, PyObject** leaves) noexcept:
    """One number of how often each tensor that the node reads from outside was written."""
    cdef Node* node = node_row(t, n)
    cdef uint64_t h = 1
    cdef int32_t k
    for k in range(node.len[SLOTS]):
        if node_guard(t, node, k).leaf == NONE and node_guard(t, node, k).grad_of != NONE: continue
        x = slot_tensor(t, node, k, leaves)
        h = (h ^ <uint64_t>tensor_version(x)) * <uint64_t>0x100000001B3
    return h

cdef bint island_holds(Table* t, id_t n, id_t s, PyObject* island, PyObject** leaves) except -1:
    """Run what the user runs between two segments: does the call go on as it was recorded? That code may have changed
    whatever guards compared before."""
    cdef uint64_t ambient[3]
    cdef id_t path = node_row(t, n).path
    path_row(t, path).lent += 1
    try:
        if not (<object>island)(): return False
    finally:
        path_row(t, path).lent -= 1
    ambient_now(ambient)
    return node_why(t, n, s, ambient, leaves) == FITS

cdef void grads_hold(Table* t, id_t n, PyObject** leaves, Tensors* held) noexcept:
    """The gradients that the node reads: only their tensors hold them, and another thread may take them away while the
    GIL is. What is reached or followed stays as long as the path is held, and a walk owns its leaves."""
    cdef Node* node = node_row(t, n)
    cdef int32_t k
    for k in range(node.len[SLOTS] if node.len[GRADS] else 0):
        if node_guard(t, node, k).grad_of != NONE: tensor_hold(slot_tensor(t, node, k, leaves), held)

cdef int32_t reads_run(Table* t, id_t n, id_t s, Driver* d, void* stream, PyObject** leaves, int32_t known,
                       PyObject** island) except -2:
    """Run node n's segments but the last, of which the first `known` values are known: the first that is another, or
    NONE. `island`: the last that may not run again."""
    cdef int driver = path_row(t, node_row(t, n).path).driver, device = path_row(t, node_row(t, n).path).device, code
    cdef bint waits
    cdef Spread* spread = node_row(t, n).spread
    cdef Tensors held
    cdef int32_t k = 0
    grads_hold(t, n, leaves, &held)
    while k < node_row(t, n).len[READS]:
        exec_ = node_read(t, node_row(t, n), k).exec
        tape = node_read(t, node_row(t, n), k).tape
        part = node_read(t, node_row(t, n), k).island
        waits = k >= known or node_read(t, node_row(t, n), k).number != NONE
        with nogil:
            code = launch_among(d, spread, exec_, stream, device)
            if code == 0 and tape is not NULL: code = fault(CALL_LAUNCH) or DRIVERS[HOST].launch(tape, NULL, -1)
            elif code == 0 and part is NULL and waits: code = fault(CALL_WAIT) or d.wait(stream, device)
        check(driver, code, CALL_LAUNCH)
        if part is not NULL and node_read(t, node_row(t, n), k).pure: (<object>part)()
        elif part is not NULL:
            island[0] = part
            if not island_holds(t, n, s, part, leaves): return k
        if k >= known and not read_holds(node_read(t, node_row(t, n), k)): return k
        if node_read(t, node_row(t, n), k).number != NONE and not number_comes(t, n, k, d): return k
        k += 1
    return NONE

cdef int writes_undo(Table* t, id_t n, int32_t last) except -1:
    """The call goes another way behind segment `last`: what the segments until then overwrote is as it was, the first
    write last."""
    cdef Node* node = node_row(t, n)
    cdef int32_t k
    for k in range(node.len[UNDOS] - 1, -1, -1):
        u = node_undo(t, node, k)
        if u.segment > last: continue
        bytes_move(tensor_device(u.to), tensor_ptr(u.to), tensor_ptr(u.saved), u.nbytes)
    return 0

cdef uint64_t reads_key(Table* t, id_t n, int32_t known) noexcept:
    """One number of the values that lie on the host; never 0."""
    cdef uint64_t h = <uint64_t>known
    cdef int32_t k
    cdef int64_t j
    for k in range(known):
        r = node_read(t, node_row(t, n), k)
        if r.number != NONE: continue
        for j in range(r.nbytes): h = (h ^ <uint64_t><unsigned char>r.at[j]) * <uint64_t>0x100000001B3
    return h | 1

cdef id_t node_beside(Table* t, id_t n, id_t s, PyObject** leaves, int32_t known) except -2:
    """A sibling of node n that accepts the call and these first values, moved to the front; or NONE. One that was tried
    found a number with which it cannot be."""
    cdef uint64_t ambient[3]
    cdef Node* node = node_row(t, n)
    cdef Edge* e = edge_find(t, node.path, node.parent, node.fn)
    cdef id_t m = e.first, before = NONE
    ambient_now(ambient)
    while m != NONE:
        if node_row(t, m).tried != fn_row(t, node_row(t, n).fn).calls and reads_agree(t, m, known) \
                and node_why(t, m, s, ambient, leaves) == FITS:
            if before != NONE:
                node = node_row(t, m)
                node_row(t, before).next = node.next
                e = edge_find(t, node.path, node.parent, node.fn)
                node.next = e.first
                e.first = m
            return m
        before = m
        m = node_row(t, m).next
    return NONE

cdef id_t reads_meet(Table* t, id_t n, id_t s, void* stream, PyObject** leaves, bint* due) except -2:
    """Run what comes before the last value that a call reads: the node whose values they were, n or a sibling; or NONE,
    and fns.unknown tells them apart. `due`: Python code ran on the way, which must not run again. The caller holds the
    path's lock."""
    cdef id_t f, path = node_row(t, n).path
    cdef Driver* d = &DRIVERS[path_row(t, path).driver]
    cdef int32_t known = 0, differs
    cdef uint64_t versions = 0
    cdef PyObject* island = NULL
    while True:
        node_row(t, n).tried = fn_row(t, node_row(t, n).fn).calls
        stream_order(path_row(t, path), d, stream)
        if node_row(t, n).stale: scalars_bind(t, n, d)
        patches_bind(t, n, first_exec(t, node_row(t, n)), d, leaves, stream)
        state = NULL
        differs = NONE
        if has_islands(t, n): versions = slots_versions(t, n, leaves)
        if node_read(t, node_row(t, n), node_row(t, n).len[READS] - 1).draws: state = rng_keep()
        try:
            differs = reads_run(t, n, s, d, stream, leaves, known, &island)
        except BaseException:
            differs = 0
            if island is not NULL: (<object>island).leave(False, False)
            raise
        finally:
            if state is not NULL: rng_release(state, differs != NONE)
            if differs != NONE: words_give_back(t, n)
        if differs == NONE:
            if island is not NULL: (<object>island).leave(False, False)
            if fn_row(t, node_row(t, n).fn).vain > 0: fn_row(t, node_row(t, n).fn).vain -= 1
            return n
        if node_row(t, n).len[UNDOS]: writes_undo(t, n, differs)
        if node_row(t, n).keeps_grads: outs_release(t, n, leaves, spec_row(t, s).n_leaves, False)
        known = differs + 1
        path = node_row(t, n).path
        fn_row(t, node_row(t, n).fn).unknown = reads_key(t, n, known)
        f = node_row(t, n).fn
        if island is not NULL:      # what ran cannot run again: the call is Python's, which has what came of it
            (<object>island).leave(True, slots_versions(t, n, leaves) != versions)
            due[0] = True
            if fn_row(t, f).vain < VAIN: fn_row(t, f).vain += 1
            return NONE
        n = node_beside(t, n, s, leaves, known)
        if n == NONE:
            if fn_row(t, f).vain < VAIN: fn_row(t, f).vain += 1
            return NONE
