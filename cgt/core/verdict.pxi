# Calls that run eagerly, decided once: by Python, with a reason, until the function was called so often. A call that
# no recording takes is looked up here before Python is asked again. Hits come first and pay nothing.

cdef uint64_t call_key(id_t s, uint64_t* ambient, PyObject** leaves, int32_t n) noexcept nogil:
    """One number of what tells most siblings apart: structure, ambient state, shapes."""
    cdef uint64_t h = <uint64_t>s ^ ambient[0] ^ ambient[1] << 8 ^ ambient[2] << 16
    for k in range(n): h = tensor_key(leaves[k], h)
    return h

cdef inline PyObject* verdict_stands(Fn* fn, Verdict* v, uint64_t key) noexcept nogil:
    """Its reason, if it is about this call; or NULL."""
    return v.reason if v.reason is not NULL and fn.calls < v.until and v.key == key else NULL

cdef inline int32_t kind_count(Fn* fn, uint64_t key) noexcept nogil:
    """How many calls like this one came that no recording took. Of two kinds in one row the last one counts."""
    cdef uint64_t* row = &fn.kinds[key % N_KINDS]
    if (row[0] ^ key) > KIND_COUNT: row[0] = key & ~<uint64_t>KIND_COUNT
    if (row[0] & KIND_COUNT) < KIND_COUNT: row[0] += 1
    return <int32_t>(row[0] & KIND_COUNT)

cdef PyObject* verdict_find(Table* t, id_t f, id_t s, id_t path, id_t parent, PyObject** leaves,
                            uint64_t values) noexcept nogil:
    """Why a call that no recording took runs eagerly, borrowed; or NULL, and Python decides. `s`, `path`: NONE
    where they are not known. `values`: a number of those that it read on the way; calls with others are not alike."""
    cdef uint64_t ambient[3]
    cdef uint64_t key = 0
    cdef Fn* fn = fn_row(t, f)
    cdef PyObject* reason = verdict_stands(fn, &fn.verdict, 0)
    fn.alike = 0
    if s != NONE:
        ambient_now(ambient)
        key = call_key(s, ambient, leaves, spec_row(t, s).n_leaves)
        fn.alike = kind_count(fn, key ^ values)
    if reason is not NULL and fn.patience and fn.alike >= fn.patience: return NULL
    if reason is NULL and s != NONE: reason = verdict_stands(fn, &spec_row(t, s).verdict, key)
    if reason is NULL and path != NONE:
        e = edge_find(t, path, parent, f)
        if e is not NULL: reason = verdict_stands(fn, &e.verdict, 0)
    return reason

cdef void verdicts_end(Table* t, Node* node) noexcept nogil:
    """A recording is replayed for the first time: recordings may pay, and there may be room for more beside it."""
    if fn_row(t, node.fn).patience: fn_row(t, node.fn).verdict.until = 0
    edge_find(t, node.path, node.parent, node.fn).verdict.until = 0

cdef int REPLAY_REQUIRED = 0        # so many blocks of require_replay are under way

cdef object verdict_run(Table* t, id_t f, object reason, object function, object args, object kwargs, dict reasons):
    """The call, eagerly and counted; or an error where a replay is required."""
    if REPLAY_REQUIRED:
        fn_row(t, f).calls -= 1
        raise UNREPLAYED[0](f, reason)
    fn_row(t, f).eager += 1
    reasons[reason] = reasons.get(reason, 0) + 1
    return function(*args, **kwargs)

cdef void verdict_set(Verdict* v, object reason, int64_t until, uint64_t key) noexcept:
    verdict_drop(v)
    Py_INCREF(reason)
    v.reason = <PyObject*>reason
    v.until = until
    v.key = key
