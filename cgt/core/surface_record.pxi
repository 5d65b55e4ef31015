# What Python sees of the recording under way (record.pxi), from begin to a node, and of pools.


def begin(int driver, int device, uintptr_t stream, uintptr_t pool, list others):
    """Begin a recording behind the node that the device's path has come to, its pool put back to that node's state. The
    caller holds the paths. pool: from pool_new, or 0. others: [(device, stream, pool), ...] of the GPUs on which it
    works besides."""
    record_begin(&TABLE, driver, device, stream, pool, others)


def op(bytes name, bytes overload, tuple args, dict kwargs, tuple into, bytes out=b""):
    """Append an op of the host's to the tape under way: what it returns is copied `into` these tensors. Or a variant
    that writes such a one as its argument `out`, if it leaves the same bytes there. Was it?"""
    cdef int added = tape_add(
        tape_now(&TABLE), name, overload, <PyObject*>args, <PyObject*>kwargs, <PyObject*>into, out)
    if added < 0: raise_pending()
    return added > 0


def scalar(int number, object value, int at, int part):
    """The op recorded last has this number, which is `value` now, as argument `at`, or as element `part` of it (NONE:
    it is no list). Where it is on the host's tape; a kernel's is found by `scalars_found`."""
    record_scalar(&TABLE, number, value, at, part)


def graph_length():
    """How many nodes the capture under way has."""
    return cuda_length(&TABLE.rec)


def graph_mark():
    """For each stream of the capture under way (one for each GPU): the nodes behind which its next one will stand."""
    return cuda_mark_here(&TABLE.rec)


def graph_shots(int first):
    """[(handle, kind, what must be the same, ((offset, bytes), ...)), ...] of the nodes from this one on; kind 0:
    kernels, with their arguments."""
    return [cuda_shot(<cu.CUgraphNode><uintptr_t>node) for node in cuda_nodes(&TABLE.rec, first)]


def graph_back(int first, list marks):
    """Nodes from this one on are taken out when the graph is complete; what comes next stands behind `marks` (of
    graph_mark)."""
    cdef int32_t k
    for node in cuda_nodes(&TABLE.rec, first):
        k = column_add(&TABLE, &TABLE.rec_vain, 1)
        (<void**>TABLE.rec_vain.rows)[k] = <void*><uintptr_t>node
    cuda_back(&TABLE.rec, marks)


def scalar_words(uintptr_t node, list words):
    """A captured kernel's arguments have these words of numbers: [(offset, form, number, its value now), ...]."""
    record_words_of(&TABLE, node, words)


def address_words(uintptr_t node, list words):
    """A captured node's arguments have these addresses: [(offset, a slot's copy, bytes behind where that begins),
    ...]."""
    record_addresses(&TABLE, node, words)


def is_named(int copy, set known):
    """Does a node of the capture, of those that stay, name an address in this copy's buffer, besides these and those
    that copy it?"""
    return cuda_names(&TABLE.rec, &TABLE.rec_patches, &TABLE.rec_vain, copy, known)


def bind(int copy):
    """The slot is not copied after all: the recording is told where it lies. Nothing copies back."""
    record_bind(&TABLE, copy)


def state_op(object generator, object state, bint sets):
    """Append to the host driver's tape: a generator's state is read into a tensor, or set from it."""
    tape_state(TABLE.rec.exec, <PyObject*>generator, <PyObject*>state, sets)


def copy(object to, object source, int64_t nbytes):
    """Record the copy node of a copied slot."""
    return record_copy(&TABLE, COPY_SOURCE, to, source, nbytes)


def copy_back(object source, object to, int64_t nbytes):
    """The same for the way back, behind all else that is recorded."""
    return record_copy(&TABLE, COPY_BACK, source, to, nbytes)


def generator_now(object generator):
    """(seed, offset) of a generator on a GPU. Not in a capture."""
    cdef uint64_t seed = 0, offset = 0
    if generator_take(<PyObject*>generator, 0, &seed, &offset) != 0: raise_pending()
    return seed, offset


def words(object generator, object seed_word, object offset_word, tuple now):
    """Record the node that writes a generator's words. `now`: what they are for a segment that runs while recording
    goes on."""
    record_words(&TABLE, generator, seed_word, offset_word, now)


def swap_generator(object generator, object seed_word, object offset_word, list handles):
    """Give a generator our state while recording; a handle for restore_generators is appended."""
    cdef void* handle = generator_swap(
        <PyObject*>generator, <PyObject*>seed_word, <PyObject*>offset_word,
        cuda_capture_id(&TABLE.rec))
    if handle is NULL: raise_pending()
    handles.append(<uintptr_t>handle)


def moved_generator(uintptr_t handle):
    """How far the recording has moved a generator since the words that its kernels read now."""
    return generator_moved(<void*>handle)


def point_generator(uintptr_t handle, object seed_word, object offset_word, uint64_t moved):
    """Kernels recorded from here on read these words, and count from `moved`."""
    generator_point(<void*>handle, <PyObject*>seed_word, <PyObject*>offset_word, moved)


def restore_generators(list handles):
    """Put the generators' own states back; for each, (by how much a run advances it, do kernels read its words?). The
    list is empty then."""
    cdef uint64_t advance
    cdef int drew = 0
    advances = []
    while handles:
        advance = generator_restore(<void*><uintptr_t>handles.pop(0), &drew)
        advances.append((advance, bool(drew)))
    return advances


def spend(object t):
    """The recording under way needs a result of its path no more, and nobody else does: what is recorded
    from here on may use its memory."""
    record_spend(&TABLE, <PyObject*>t)


def fetch(uintptr_t to, object x, int64_t nbytes):
    """Record that a contiguous tensor's bytes come to the host."""
    check(TABLE.rec.driver, DRIVERS[TABLE.rec.driver].fetch(&TABLE.rec, <PyObject*>x, <char*>to, nbytes), CALL_CUT)


def cut(uintptr_t at, int64_t nbytes, object value, bint draws, object island=None, bint pure=False):
    """A segment ends, behind which the function reads what lies at `at`: these bytes, which the caller keeps. They are
    computed now, unless `value` tells them, because recording ran the ops. `draws`: random numbers were drawn so far.
    `island`: there is nothing to read, a replay calls this, which says whether the call goes on as it was recorded; or
    leaves with it (island.leave(due, wrote)). `pure`: it is asked for nothing, and may be called twice. The caller
    holds the paths."""
    return record_cut(&TABLE, at, nbytes, value, draws, <PyObject*>island if island is not None else NULL, pure)


def aside(uintptr_t at, int64_t nbytes, bytes value, bint draws):
    """The function on the GPU reads what its ops on the host left at `at`: `value`, which the caller keeps. No graph is
    waited for."""
    record_aside(&TABLE, at, nbytes, value, draws)
    return value


def follow_generator(uintptr_t handle):
    """The generator's kernels belong to the capture that a new segment began."""
    generator_follow(<void*>handle, cuda_capture_id(&TABLE.rec))


def fork(int kind, object pred, uintptr_t stream):
    """Record an op with bodies, of which the bool `pred` chooses on `stream`: (condition, body, second body or 0)."""
    return record_fork(&TABLE, kind, pred, stream)


def fork_enter(uintptr_t body, uintptr_t stream):
    """What is recorded from now on, on this stream, is in the body."""
    check(TABLE.rec.driver, DRIVERS[TABLE.rec.driver].enter(&TABLE.rec, <void*>body, <void*>stream), CALL_FORK)


def fork_leave(uintptr_t body, uintptr_t stream):
    """No more."""
    check(TABLE.rec.driver, DRIVERS[TABLE.rec.driver].leave(&TABLE.rec, <void*>body, <void*>stream), CALL_FORK)


def fork_decide(uint64_t condition, object pred, uintptr_t stream):
    """The end of a loop's body: `pred` says whether it runs once more."""
    check(TABLE.rec.driver, DRIVERS[TABLE.rec.driver].decide(&TABLE.rec, condition, <PyObject*>pred, <void*>stream),
        CALL_FORK)


def fork_run():
    """Run the op whose bodies were recorded, on the host."""
    record_last(&TABLE)


def fork_drop():
    """Take it back, on the host."""
    tape_pop(TABLE.rec.exec)


def end(list advances):
    """End what is recorded: there is a graph now."""
    record_end(&TABLE, advances)


def checkpoint(list made, list outs, list early):
    """The recording is complete. Tensors it made become memory of the pool: `outs` as long as the path needs them, the
    others as long as the recording runs. `early`: of outs, on the host, those of whose memory nothing else may be used
    while it runs."""
    record_checkpoint(&TABLE, made, outs, early)


def instantiate():
    """Make of the graph that just ended what is launched."""
    record_instantiate(&TABLE)


def abort():
    """Undo the recording, whatever state it is in."""
    record_abort(&TABLE)


def move_bytes(int device, uintptr_t to, uintptr_t source, int64_t nbytes):
    """Copy them, in the order of the caller's current stream; -1: the host."""
    cdef int driver = CUDA if device >= 0 else HOST
    check(driver, DRIVERS[driver].move(<void*>to, <const void*>source, nbytes, device), CALL_MOVE)


def undo_writes(int n):
    """What the segments of node n but the last overwrote outside is as it was."""
    writes_undo(&TABLE, n, node_row(&TABLE, n).len[READS] - 1)


def segments_ran():
    """Segments of the recording under way, which ran when they ended."""
    return TABLE.rec_reads.n


def lost():
    """Did another thread move the path on while this was recorded? Then it cannot run here."""
    return record_lost(&TABLE)


def add_node(int f, int spec, tuple ambient, list slots, list outs, object ret_program, bint ret_python, list effects,
             list grads, list groups, list leaves, tuple backward, list numbers, list undos, bint keeps_grads,
             dict keep, object kept):
    """Make the recording a node of f. leaves: the call's tensors. backward: see backward_fill. keep[node] becomes
    `kept`: what the rows borrow must stay alive."""
    cdef id_t n = node_add(&TABLE, f, spec, ambient, slots, outs, ret_program, ret_python, effects, grads,
                           groups, leaves, backward, numbers, undos, keeps_grads)
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
        return replay(&TABLE, n, leaves, DRIVERS[p.driver].stream(p.device), launch, False, False)
    finally:
        free(leaves)


def run_again(int n, list tensors):
    """Replay a node once more, all its segments, of which no user's code is a part; None where a value leads
    elsewhere. The caller holds the paths."""
    cdef PyObject** leaves = borrowed(tensors)
    cdef Path* p = path_row(&TABLE, node_row(&TABLE, n).path)
    cdef void* stream = DRIVERS[p.driver].stream(p.device)
    cdef bint due = False, met = node_row(&TABLE, n).len[READS] != 0
    try:
        if met and reads_meet(&TABLE, n, node_row(&TABLE, n).spec, stream, leaves, &due) != n: return None
        return replay(&TABLE, n, leaves, stream, True, False, met)
    finally:
        free(leaves)


def run_once(list tensors):
    """Launch the recording that just ended once, and move these tensors out of the pool. The caller
    holds the paths."""
    record_run_once(&TABLE, tensors)


def recording_ran():
    """Was the last recording launched, as far as anybody knows?"""
    return bool(TABLE.rec.ran)


def pool_free(uintptr_t pool, uintptr_t stream):
    """[(address, bytes, is its segment a small one?, is it of this stream?), ...] of what is free of a pool."""
    found = []
    if cuda_pool_free(<void*>pool, <void*>stream, <PyObject*>found) != 0: raise_pending()
    return found


def is_of_recording(object t):
    """Does a tensor on the GPU lie in memory that was allocated since the capture under way began?"""
    cdef Beside* b = beside_of(TABLE.rec.spread, tensor_device(<PyObject*>t))
    cdef int made = cuda_pool_made(b.pool if b is not NULL else TABLE.rec.pool, tensor_storage_ptr(<PyObject*>t))
    if made < 0: raise_pending()
    return bool(made)


def allocations(int device):
    """Where what is allocated on a GPU begins: a set of addresses."""
    cdef set found = set()
    if cuda_allocations(device, <PyObject*>found): raise_pending()
    return found


def recorded_words():
    """[(seed, offset), ...] of the recording that was launched once, in the order of `words`."""
    return [(rec_patch(&TABLE, k).told[0], rec_patch(&TABLE, k).told[1])
            for k in range(TABLE.rec_patches.n) if rec_patch(&TABLE, k).kind == WORDS]


def record_seconds():
    """(restore, capture, instantiate, checkpoint) of the recording under way, in seconds."""
    return tuple([TABLE.rec.seconds[k] for k in range(4)])


def capture_relaxed(bint on):
    """May this thread allocate and wait while it captures a stream, in others?"""
    cuda_relaxed(on)


def load_kernels(int device):
    """Load the kernels that write seed and offset, and copy; a capture cannot."""
    check(CUDA, cuda_load_kernels(device), CALL_WORDS)


def load_decide_kernel(int device):
    """Load the kernel that conditional nodes need; 0, or the driver's error where there are none of two bodies."""
    return cuda_decide_kernel(device)


def pool_new(int device, ids):
    """A private pool on a device; ids: torch.cuda.graph_pool_handle()."""
    cdef void* pool = cuda_pool_new(device, ids[0], ids[1])
    if pool is NULL: raise_pending()
    return <uintptr_t>pool


def pools_drop():
    """Give back the memory of pools that are over, if there are any and nobody captures."""
    cuda_pools_drop()


def pool_retire(uintptr_t pool):
    """No more recordings in this pool. Its memory goes with its last node, or when nobody captures any more."""
    cuda_pool_retire(<void*>pool)


def pool_nodes(uintptr_t pool):
    """Nodes that live in a pool."""
    return cuda_pool_nodes(<void*>pool)


cdef int pool_add(set found, void* pool) except -1:
    cdef unsigned long long id_[2]
    id_[0] = id_[1] = 0
    cuda_pool_id(pool, id_)
    found.add((id_[0], id_[1]))
    return 0


def pool_ids():
    """Ids of the pools in which nodes live."""
    cdef Spread* spread
    found = set()
    for n in range(TABLE.nodes.n):
        if not node_row(&TABLE, n).alive or node_row(&TABLE, n).pool is NULL: continue
        pool_add(found, node_row(&TABLE, n).pool)
        spread = node_row(&TABLE, n).spread
        for k in range(spread.n if spread is not NULL else 0): pool_add(found, spread.others[k].pool)
    return found
