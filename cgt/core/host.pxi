# The host driver: a launch runs the tape of ATen calls (tape_shim.h) on CPU tensors. Same shape as cuda.pxi; there are
# no streams, and randomness needs no words, since the ops draw from the generators themselves.

cdef int host_restore(Recording* r, void* state, const vector[void*]& live) noexcept:
    return 0                                # tape_plan puts the pool to use when the tape is complete

cdef int host_begin(Recording* r) noexcept:
    r.exec = tape_new()
    return 0

cdef int host_copy(Recording* r, Patch* p, PyObject* to) noexcept:
    p.handle = <void*><uintptr_t>tape_copy(r.exec, to, <char*><uintptr_t>p.told[0], p.nbytes, p.kind == COPY_BACK)
    return 0

cdef int host_words(Recording* r, Patch* p) noexcept: return 0

cdef int host_spend(Recording* r, PyObject* proto) noexcept:
    tape_spend(r.exec, proto)
    return 0

cdef int host_fetch(Recording* r, PyObject* x, char* to, int64_t nbytes) noexcept: return 0     # an op of the tape

cdef int host_cut(Recording* r, Read* read) noexcept:
    read.n_graph_nodes = tape_length(r.exec)
    read.exec = r.exec
    r.exec = tape_after(r.exec)
    return 0

cdef int host_nothing(Recording* r) noexcept: return 0          # of resume and instantiate

cdef int host_wait(void* stream, int device) noexcept nogil: return 0

cdef int host_fork(Recording* r, Fork* f, PyObject* pred, void* stream) except? RAISES:
    tape_fork(r.exec, pred, 2 if f.kind == BRANCH else 1, f.bodies)
    return 0

cdef int host_enter(Recording* r, void* body, void* stream) noexcept:
    r.exec = body
    return 0

cdef int host_leave(Recording* r, void* body, void* stream) noexcept:
    r.exec = tape_outer(body)
    return 0

# the tape looks itself
cdef int host_decide(Recording* r, uint64_t condition, PyObject* pred, void* stream) noexcept: return 0

cdef int host_end(Recording* r, Patch* patches, int32_t n) noexcept:
    r.n_graph_nodes = tape_length(r.exec)
    return 0

cdef int host_checkpoint(Recording* r, list made, list outs, list early, const vector[void*]& live) except? RAISES:
    tape_plan(r.exec, made, outs, early, live)
    return 0

cdef void host_abort(Recording* r) noexcept:
    while r.exec is not NULL and tape_outer(r.exec) is not NULL: r.exec = tape_outer(r.exec)
    host_destroy(NULL, r.exec, NULL, NULL)
    r.exec = NULL

cdef int host_launch(void* exec_, void* stream, int device) noexcept nogil:
    return ERROR_TAPE if tape_run(exec_, 0) != 0 else 0

cdef int host_patch(void* exec_, Patch* p) noexcept nogil:
    tape_patch_copy(exec_, <int><uintptr_t>p.handle, <char*><uintptr_t>p.told[0])
    return 0

cdef int host_scalar(void* exec_, Patch* p, Number* r) noexcept:
    tape_scalar(exec_, <int><uintptr_t>p.handle, p.at, p.part, r.is_float, r.now.f, r.now.i)
    return 0

cdef int host_word_done(void* exec_, Patch* p) noexcept: return 0

cdef void host_word_free(Patch* p) noexcept: pass

cdef int host_bind(Recording* r, Patch* p) noexcept:
    tape_bind(r.exec, <int><uintptr_t>p.handle)
    return 0

cdef int host_order(Path* p, int device, void* stream) noexcept nogil: return 0

cdef void* host_stream(int device) noexcept nogil: return NULL

cdef int host_move(void* to, const void* source, int64_t nbytes, int device) noexcept nogil:
    memcpy(to, source, nbytes)
    return 0

cdef int host_rescue(void* held, PyObject* proto, int device) except? RAISES:
    host_give_away(held, proto)
    return 0

cdef void host_destroy(void* graph, void* exec_, CudaPool* pool, void* state) noexcept:
    if exec_ is not NULL: tape_free(exec_)

DRIVERS[HOST] = Driver(
    host_restore, host_begin, host_copy, NULL, host_words, host_spend, host_fetch, host_cut, host_nothing, host_wait,
    host_fork, host_enter, host_leave, host_decide,
    host_end, host_nothing, host_checkpoint, host_abort, host_launch, host_patch, host_scalar,
    host_word_done, host_word_free, host_bind,
    host_order, host_stream, host_move, host_rescue,
    host_destroy)
