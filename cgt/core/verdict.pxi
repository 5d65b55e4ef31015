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

cdef inline bint is_patient(Fn* fn, uint64_t key) noexcept nogil:
    """One more call like this, or the first: are there too few to tell Python?"""
    fn.alike = fn.alike + 1 if fn.like == key else 1
    fn.like = key
    return fn.alike < fn.patience

cdef PyObject* verdict_find(Table* t, id_t f, id_t s, id_t path, id_t parent, PyObject** leaves,
                            uint64_t values) noexcept nogil:
    """Why a call that no recording took runs eagerly, borrowed; or NULL, and Python decides. `s`, `path`: NONE
    where they are not known. `values`: a number of those that it read on the way; calls with others are not alike."""
    cdef uint64_t ambient[3]
    cdef uint64_t key = 0
    cdef Fn* fn = fn_row(t, f)
    cdef PyObject* reason = verdict_stands(fn, &fn.verdict, 0)
    if s != NONE and (fn.patience or spec_row(t, s).verdict.reason is not NULL):
        ambient_now(ambient)
        key = call_key(s, ambient, leaves, spec_row(t, s).n_leaves)
    if reason is not NULL and fn.patience and s != NONE and not is_patient(fn, key ^ values): return NULL
    if reason is NULL and s != NONE: reason = verdict_stands(fn, &spec_row(t, s).verdict, key)
    if reason is NULL and path != NONE:
        e = edge_find(t, path, parent, f)
        if e is not NULL: reason = verdict_stands(fn, &e.verdict, 0)
    return reason

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
