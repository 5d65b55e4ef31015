# What Python sees of the recording under way (record.pxi), from begin to a node, and of pools. A function of one line
# is one of the driver's, the chapters' or the shims', where it is told what it does.

def abort(): record_abort(&TABLE)
def copy_back(object source, object to, int64_t nbytes): return record_copy(&TABLE, COPY_BACK, source, to, nbytes)
def state_op(object generator, object state, bint sets): tape_state(TABLE.rec.exec, generator, state, sets)
def fork_drop(): tape_pop(TABLE.rec.exec)
def fork_enter(uintptr_t body, uintptr_t stream):
    check(TABLE.rec.driver, rec_driver(&TABLE).enter(&TABLE.rec, <void*>body, <void*>stream), CALL_FORK)
def fork_leave(uintptr_t body, uintptr_t stream):
    check(TABLE.rec.driver, rec_driver(&TABLE).leave(&TABLE.rec, <void*>body, <void*>stream), CALL_FORK)
def fork_decide(uint64_t condition, object pred, uintptr_t stream):
    check(TABLE.rec.driver, rec_driver(&TABLE).decide(&TABLE.rec, condition, <PyObject*>pred, <void*>stream), CALL_FORK)
def fetch(uintptr_t to, object x, int64_t nbytes):
    check(TABLE.rec.driver, rec_driver(&TABLE).fetch(&TABLE.rec, <PyObject*>x, <char*>to, nbytes), CALL_CUT)
def graph_length(): return cuda_length(&TABLE.rec)
def graph_mark(): return cuda_mark_here(&TABLE.rec)
def graph_shots(int first): return [cuda_shot(<cu.CUgraphNode><uintptr_t>one) for one in cuda_nodes(&TABLE.rec, first)]
def moved_generator(uintptr_t handle): return generator_moved(<void*>handle)
def follow_generator(uintptr_t handle): generator_follow(<void*>handle, cuda_capture_id(&TABLE.rec))
def point_generator(uintptr_t handle, object seed_word, object offset_word, uint64_t moved):
    generator_point(<void*>handle, seed_word, offset_word, moved)
def move_bytes(int device, uintptr_t to, uintptr_t source, int64_t nbytes):
    bytes_move(device, <void*>to, <void*>source, nbytes)
def capture_relaxed(bint on): cuda_relaxed(on)
def load_kernels(int device): check(CUDA, cuda_load_kernels(device), CALL_WORDS)
def load_decide_kernel(int device): return cuda_decide_kernel(device)
def pool_new(int device, ids): return <uintptr_t>cuda_pool_new(device, ids[0], ids[1])
def pool_free(uintptr_t pool, uintptr_t stream): return cuda_pool_free(<CudaPool*>pool, <void*>stream)
def pool_nodes(uintptr_t pool): return cuda_pool_nodes(<CudaPool*>pool)
def pool_retire(uintptr_t pool): cuda_pool_retire(<CudaPool*>pool)
def pools_drop(): cuda_pools_drop()
def allocations(int device): return cuda_allocations(device)

def begin(int driver, int device, uintptr_t stream, uintptr_t pool, list others):
    """Begin a recording behind the node that the device's path has come to, its pool put back to that node's state. The
    caller holds the paths. pool: from pool_new, or 0. others: [(device, stream, pool), ...] of the GPUs on which it
    works besides."""
    cdef Table* t = &TABLE
    cdef id_t path = path_of(t, device), m
    cdef void* state = NULL
    cdef int32_t k
    assert not t.rec.active, "one recording at a time: its caller holds the lock (sites.py)"
    memset(&t.rec, 0, sizeof(Recording))
    t.rec_patches.n = t.rec_reads.n = 0
    t.rec_vain.clear()
    t.rec.driver = driver
    t.rec.device = device
    t.rec.stream = <void*>stream
    t.rec.pool = <CudaPool*>pool
    t.rec.parent = m = path_row(t, path).current
    t.rec.step = path_row(t, path).step
    t.rec.launches = path_row(t, path).launches
    path_survey(t, m)
    # A parent from another pool that was given up leaves nothing in this one.
    while m != NONE and node_row(t, m).pool != t.rec.pool: m = node_row(t, m).parent
    if m != NONE: state = node_row(t, m).state
    t.rec.active = 1
    spread_new(&t.rec.spread, others)
    t.rec.seconds[RESTORE] = now()
    check(driver, fault(CALL_RESTORE) or DRIVERS[driver].restore(&t.rec, state, t.rec_live), CALL_RESTORE)
    for k in range(t.rec.spread.n if t.rec.spread is not NULL else 0):
        b = &t.rec.spread.others[k]
        check(driver, pool_restore(b.device, b.pool, state_beside(t, t.rec.parent, b), t.rec_live), CALL_RESTORE)
    t.rec.seconds[CAPTURE] = now()
    t.rec.seconds[RESTORE] = t.rec.seconds[CAPTURE] - t.rec.seconds[RESTORE]
    check(driver, fault(CALL_BEGIN) or DRIVERS[driver].begin(&t.rec), CALL_BEGIN)

def op(bytes name, bytes overload, tuple args, dict kwargs, tuple into, bytes out=b""):
    """Append an op of the host's to the tape under way: what it returns is copied `into` these tensors. Or a variant
    that writes such a one as its argument `out`, if it leaves the same bytes there. Was it?"""
    return tape_add(tape_now(&TABLE), name, overload, args, kwargs, into, out)

def scalar(int number, object value, int at, int part):
    """The op recorded last has this number, which is `value` now, as argument `at`, or as element `part` of it (NONE:
    it is no list). Where it is on the host's tape; a kernel's is found by `scalars_found`."""
    cdef Patch* p = patch_add(&TABLE, SCALAR)
    p.number, p.at, p.part, p.segment = number, at, part, TABLE.rec_reads.n
    p.told[0] = number_bits(value)
    p.handle = <void*><uintptr_t>tape_last(TABLE.rec.exec)

def graph_back(int first, list marks):
    """Nodes from this one on are taken out when the graph is complete; what comes next stands behind `marks` (of
    graph_mark)."""
    for node in cuda_nodes(&TABLE.rec, first): TABLE.rec_vain.push_back(<void*><uintptr_t>node)
    cuda_back(&TABLE.rec, marks)

def form_of(int form, object x):
    """The bytes that a kernel is given of a number in this form, as a replay writes them; None: a float is no whole
    number."""
    cdef char word[SCRATCH]
    cdef bint is_float = type(x) is float
    if is_float and form in (AS_I64, AS_I32): return None
    return PyBytes_FromStringAndSize(word, form_write(form, is_float, x if is_float else 0, 0 if is_float else x, word))

def scalar_words(uintptr_t node, list words):
    """A captured kernel's arguments have these words of numbers: [(offset, form, number, its value now), ...]."""
    words_add(&TABLE, SCALAR, node, [(at, number, form, 0, number_bits(value)) for at, form, number, value in words])

def address_words(uintptr_t node, list words):
    """A captured node's arguments have these addresses: [(offset, a slot's copy, bytes behind where that begins),
    ...]."""
    words_add(&TABLE, ADDRESS, node,
              [(at, copy, 0, shift, rec_patch(&TABLE, copy).told[0]) for at, copy, shift in words])

def graph_words():
    """(sorted [(word, node), ...] of the 8 bytes wherever a pointer may be among the nodes' arguments, {node, ...} of
    which that is not known), for nodes of the capture that stay and copy no slot; None if there are graphs in it."""
    if TABLE.rec.n_inner: return None
    gone = {<uintptr_t>TABLE.rec_vain[k] for k in range(TABLE.rec_vain.size())}
    for k in range(TABLE.rec_patches.n):
        if rec_patch(&TABLE, k).kind <= COPY_BACK: gone.add(<uintptr_t>rec_patch(&TABLE, k).handle)
    words, opaque = [], set()
    for handle, kind, _, params in graph_shots(0):
        if handle in gone: continue
        if not params and is_opaque(kind): opaque.add(handle)
        for _, given in params:
            words += [(int.from_bytes(given[at:at + 8], "little"), handle) for at in range(0, len(given) - 7, 8)]
    words.sort()
    return words, opaque

def bind(int copy):
    """The slot is not copied after all: the recording is told where it lies. Nothing copies back."""
    cdef Patch* p = rec_patch(&TABLE, copy)
    if p.nbytes: check(TABLE.rec.driver, rec_driver(&TABLE).bind(&TABLE.rec, p), CALL_COPY)
    p.kind = BOUND

def copy(object to, object source, int64_t nbytes):
    """Record that a copied slot is copied; one on the host is FED."""
    cdef bint fed = tensor_device(<PyObject*>to) != tensor_device(<PyObject*>source)
    return record_copy(&TABLE, FED if fed else COPY_SOURCE, to, source, nbytes)

def feed_waits(int copy):
    """Whoever calls may overwrite the slot's memory once the call is over, wherever it lies."""
    rec_patch(&TABLE, copy).told[1] = 1

def generator_now(object generator):
    """(seed, offset) of a generator on a GPU. Not in a capture."""
    cdef uint64_t seed = 0, offset = 0
    generator_take(<PyObject*>generator, 0, &seed, &offset)
    return seed, offset

def words(object generator, object seed_word, object offset_word, tuple now):
    """Record the node that writes a generator's words. `now`: what they are for a segment that runs while recording
    goes on."""
    cdef Table* t = &TABLE
    cdef Patch* p = patch_add(t, WORDS)
    p.generator = <PyObject*>generator
    p.to = tensor_ptr(<PyObject*>seed_word)
    p.device = tensor_device(<PyObject*>seed_word)
    p.told[0], p.told[1] = now
    check(t.rec.driver, fault(CALL_WORDS) or rec_driver(t).words(&t.rec, p), CALL_WORDS)

def swap_generator(object generator, object seed_word, object offset_word, list handles):
    """Give a generator our state while recording; a handle for restore_generators is appended."""
    handles.append(<uintptr_t>generator_swap(generator, seed_word, offset_word, cuda_capture_id(&TABLE.rec)))

def restore_generators(list handles):
    """Put the generators' own states back; for each, (by how much a run advances it, do kernels read its words?). The
    list is empty then."""
    cdef int drew = 0
    advances = []
    while handles:
        advance = generator_restore(<void*><uintptr_t>handles.pop(0), &drew)
        advances.append((advance, bool(drew)))
    return advances

def spend(object x):
    """The recording under way needs a result of its path no more, and nobody else does: what is recorded
    from here on may use its memory."""
    cdef Table* t = &TABLE
    cdef int32_t k
    cdef id_t n = path_output(t, t.rec.parent, <PyObject*>x, &k)
    if n == NONE: return
    proto = node_out(t, node_row(t, n), k).proto
    check(t.rec.driver, fault(CALL_SPEND) or rec_driver(t).spend(&t.rec, proto), CALL_SPEND)
    erase(t.rec_live, tensor_storage_ptr(proto))

def cut(uintptr_t at, int64_t nbytes, bytes value, bint draws, object island=None, bint pure=False):
    """A segment ends, behind which the function reads what lies at `at`: these bytes, which the caller keeps. They are
    computed now, unless `value` tells them, because recording ran the ops. `draws`: random numbers were drawn so far.
    `island`: there is nothing to read, a replay calls this, which says whether the call goes on as it was recorded; or
    leaves with it (island.leave(due, wrote)). `pure`: it is asked for nothing, and may be called twice. The caller
    holds the paths."""
    cdef Table* t = &TABLE
    cdef Driver* d = rec_driver(t)
    cdef Read* r = read_add(t, at, nbytes, draws)
    cdef Path* p = path_row(t, t.rec.device + 1)
    cdef void* stream = t.rec.stream
    cdef int code, begun, call = CALL_CUT
    cdef bint ran = value is not None
    r.island = <PyObject*>island if island is not None else NULL
    r.pure = pure
    t.rec.cuts += 1
    code = d.cut(&t.rec, r) or fault(CALL_CUT)
    if code == 0 and value is None:
        call = CALL_ORDER
        if stream != p.last_stream or p.event_only: code = fault(CALL_ORDER) or d.order(p, p.device, stream)
        if code == 0:
            call = CALL_LAUNCH
            exec_ = r.exec
            with nogil:
                code = launch_among(d, t.rec.spread, exec_, stream, p.device)
                ran = code == 0
                if ran: code = fault(CALL_WAIT) or d.wait(stream, p.device)
    # Nobody waits for this stream, which captures again: what ran on it is done. Resume, whatever happened: what the
    # function still does must not run.
    begun = d.resume(&t.rec)
    if not ran:                     # what it was to write is not undone
        read_free(t.rec.driver, r)
        t.rec_reads.n -= 1
    check(t.rec.driver, code if code else begun, call if code else CALL_BEGIN)
    if value is None: value = PyBytes_FromStringAndSize(<char*>at, nbytes)
    r.value = PyBytes_AS_STRING(value)
    return value

def aside(uintptr_t at, int64_t nbytes, bytes value, bint draws):
    """The function on the GPU reads what its ops on the host left at `at`: `value`, which the caller keeps. No graph is
    waited for."""
    record_aside(&TABLE, at, nbytes, value, draws)
    return value

def fork(int kind, object pred, uintptr_t stream):
    """Record an op with bodies, of which the bool `pred` chooses on `stream`: (condition, body, second body or 0)."""
    cdef Fork f
    memset(&f, 0, sizeof(Fork))
    f.kind = kind
    check(TABLE.rec.driver, fault(CALL_FORK)
        or rec_driver(&TABLE).fork(&TABLE.rec, &f, <PyObject*>pred, <void*>stream), CALL_FORK)
    return f.condition, <uintptr_t>f.bodies[0], <uintptr_t>f.bodies[1]

def fork_run():
    """Run the op whose bodies were recorded, on the host."""
    cdef void* tape = TABLE.rec.exec
    cdef int code, was = observe_key(0)
    with nogil: code = tape_run(tape, 1)
    observe_key(was)
    check(HOST, code, CALL_LAUNCH)

def end(list advances):
    """End what is recorded: there is a graph now."""
    cdef Table* t = &TABLE
    cdef int32_t k, j = 0
    for k in range(t.rec_patches.n):
        if rec_patch(t, k).kind != WORDS: continue
        rec_patch(t, k).advance, rec_patch(t, k).draws = advances[j]
        j += 1
    if t.rec.tape is not NULL: record_aside(t, 0, 0, b"", True)     # nobody reads it; eager draws all the same
    t.rec.seconds[CAPTURE] = now() - t.rec.seconds[CAPTURE]
    check(t.rec.driver, rec_driver(t).end(&t.rec, rec_patch(t, 0), t.rec_patches.n) or fault(CALL_END), CALL_END)

def checkpoint(list made, list outs, list early):
    """The recording is complete. Tensors it made become memory of the pool: `outs` as long as the path needs them, the
    others as long as the recording runs. `early`: of outs, on the host, those of whose memory nothing else may be used
    while it runs."""
    cdef Table* t = &TABLE
    t.rec.seconds[CHECKPOINT] = now()
    check(t.rec.driver, fault(CALL_CHECKPOINT) or rec_driver(t).checkpoint(&t.rec, made, outs, early, t.rec_live),
        CALL_CHECKPOINT)
    t.rec.seconds[CHECKPOINT] = now() - t.rec.seconds[CHECKPOINT]

def instantiate():
    """Make of the graph that just ended what is launched."""
    TABLE.rec.seconds[INSTANTIATE] = now()
    check(TABLE.rec.driver, fault(CALL_INSTANTIATE) or rec_driver(&TABLE).instantiate(&TABLE.rec), CALL_INSTANTIATE)
    TABLE.rec.seconds[INSTANTIATE] = now() - TABLE.rec.seconds[INSTANTIATE]

def undo_writes(int n):
    """What the segments of node n but the last overwrote outside is as it was."""
    writes_undo(&TABLE, n, node_row(&TABLE, n).len[READS] - 1)

def segments_ran():
    """Segments of the recording under way, which ran when they ended."""
    return TABLE.rec_reads.n

def lost():
    """Did another thread move the path on while this was recorded? Then it cannot run here."""
    cdef Path* p = path_row(&TABLE, TABLE.rec.device + 1)
    return (p.current != TABLE.rec.parent or p.step != TABLE.rec.step or p.launches != TABLE.rec.launches
            or p.stale != NONE)

def add_node(int f, int spec, dict keep, object kept, *rows):
    """Make the recording that just ended, of which node_fill tells the rows, a node of f: it takes over graph, exec and
    state. Where there is no memory for it, all is as before, and the recording is the caller's to abort. keep[node]
    becomes `kept`: what the rows borrow must stay alive."""
    cdef Table* t = &TABLE
    cdef id_t n = row_take(t, &t.nodes)
    try:
        node_fill(t, n, f, spec, rows)
    except BaseException:
        outs_drop(t, n)
        for part in range(N_PARTS): part_cut(t, node_row(t, n), part)
        ops_cut(t, node_row(t, n).ret_at, node_row(t, n).ret_n)
        row_drop(t, &t.nodes, n)
        raise
    node_take(t, n)
    if CGT_DEBUG: table_check(t)
    keep[n] = kept
    return n

def run_node(int n, list tensors, bint launch):
    """Replay a node outside the guard: the call that recorded it. `launch` is False where recording
    already ran the ops. The caller holds the paths since before the node was added: another thread
    could replay it before this call has its result."""
    cdef Objects leaves = borrowed(tensors)
    cdef Path* p = path_row(&TABLE, node_row(&TABLE, n).path)
    TABLE.rec.ran = 1
    return replay(&TABLE, n, leaves.data(), DRIVERS[p.driver].stream(p.device), launch, False, False)

def run_again(int n, list tensors):
    """Replay a node once more, all its segments, of which no user's code is a part; None where a value leads
    elsewhere. The caller holds the paths."""
    cdef Objects leaves = borrowed(tensors)
    cdef Path* p = path_row(&TABLE, node_row(&TABLE, n).path)
    cdef void* stream = DRIVERS[p.driver].stream(p.device)
    cdef bint due = False, met = node_row(&TABLE, n).len[READS] != 0
    if met and reads_meet(&TABLE, n, node_row(&TABLE, n).spec, stream, leaves.data(), &due) != n: return None
    return replay(&TABLE, n, leaves.data(), stream, True, False, met)

def run_once(list tensors):
    """Launch the recording that just ended once, and move these tensors out of the pool. The caller holds the paths."""
    cdef Table* t = &TABLE
    cdef Driver* d = rec_driver(t)
    cdef Path* p = path_row(t, path_of(t, t.rec.device))
    cdef void* stream = d.stream(p.device)
    cdef void* first = exec_among(rec_read(t, 0), t.rec_reads.n, t.rec.exec)
    stream_order(p, d, stream)
    for k in range(t.rec_patches.n):
        if rec_patch(t, k).kind == WORDS: words_bind(first, rec_patch(t, k), d)
    t.rec.ran = 1
    check(t.rec.driver, launch_among(d, t.rec.spread, t.rec.exec, stream, p.device), CALL_LAUNCH)
    for x in tensors:
        check(t.rec.driver, fault(CALL_MOVE) or d.rescue(tensor_storage(<PyObject*>x), <PyObject*>x, p.device),
            CALL_MOVE)

def recording_ran():
    """Was the last recording launched, as far as anybody knows?"""
    return bool(TABLE.rec.ran)

def is_of_recording(object t):
    """Does a tensor on the GPU lie in memory that was allocated since the capture under way began?"""
    cdef Beside* b = beside_of(TABLE.rec.spread, tensor_device(<PyObject*>t))
    return cuda_pool_made(b.pool if b is not NULL else TABLE.rec.pool, tensor_storage_ptr(<PyObject*>t))

def recorded_words():
    """[(seed, offset), ...] of the recording that was launched once, in the order of `words`."""
    return [(rec_patch(&TABLE, k).told[0], rec_patch(&TABLE, k).told[1])
            for k in range(TABLE.rec_patches.n) if rec_patch(&TABLE, k).kind == WORDS]

def record_seconds():
    """(restore, capture, instantiate, checkpoint) of the recording under way, in seconds."""
    return tuple([TABLE.rec.seconds[k] for k in range(4)])

cdef int pool_add(set found, CudaPool* pool) except -1:
    cdef unsigned long long id_[2]
    id_[0] = id_[1] = 0
    cuda_pool_id(pool, id_)
    found.add((id_[0], id_[1]))
    return 0

def pool_ids():
    """Ids of the pools in which nodes live."""
    found = set()
    for n in range(TABLE.nodes.n):
        if not node_row(&TABLE, n).alive or node_row(&TABLE, n).pool is NULL: continue
        pool_add(found, node_row(&TABLE, n).pool)
        spread = node_row(&TABLE, n).spread
        for k in range(spread.n if spread is not NULL else 0): pool_add(found, spread.others[k].pool)
    return found
