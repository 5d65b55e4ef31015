# Take a call's tensor leaves along a spec, and give a result along a program. What must touch
# Python on a hit is here. A walk owns what it took: where the GIL goes (a comparison that is Python's, a launch) other
# threads may take a tensor out of its list, and free specs.

cdef enum: SCRATCH = 32           # leaves of a call, or whatever else, that fit on the C stack

cdef Objects borrowed(list tensors) except *:
    """The tensors as an array, which holds none of them."""
    cdef Objects rows
    for x in tensors: rows.push_back(<PyObject*>x)
    return rows

cdef inline int plain_same(PyObject* a, PyObject* b) except -1:
    """Equal as a guard means it: same type, same value; floats by their bits."""
    cdef double x, y
    if a == b: return 1
    if Py_TYPE_(a) != Py_TYPE_(b): return 0
    if Py_TYPE_(a) == FLOAT_TYPE:
        x = PyFloat_AS_DOUBLE(a)
        y = PyFloat_AS_DOUBLE(b)
        return memcmp(&x, &y, sizeof(double)) == 0
    if Py_TYPE_(a) == INT_TYPE or Py_TYPE_(a) == STR_TYPE or Py_TYPE_(a) == BYTES_TYPE:
        return PyObject_RichCompareBoolX(a, b, Py_EQ)
    return SAME_VALUE[0](<object>a, <object>b)      # complex, ranges, slices, tuples, enums ...

cdef inline bint number_fits(PyObject* x) noexcept:
    """Can C compute with this float or int? (live.MOST)"""
    cdef int overflow = 0
    if Py_TYPE_(x) != INT_TYPE: return True
    cdef int64_t i = PyLong_AsLongLongAndOverflow(x, &overflow)
    return overflow == 0 and -(<int64_t>1 << 62) <= i <= <int64_t>1 << 62

ABSENT = object()       # what no op accepts

cdef struct Walk:
    Table* table
    Objects room                   # for as many as a spec wants
    PyObject** leaves              # in there, owned
    int32_t n_leaves
    int32_t first_number, n_numbers     # live numbers come behind the leaves of this spec, owned, too
    id_t differs_at                # the op whose plain value was not `differs`, owned; NONE if another kind
    PyObject* differs
    int64_t births                 # of the table, when the walk began: rows of ops move where others are freed

cdef void walk_begin(Table* t, Walk* w) noexcept:
    w.table, w.leaves = t, w.room.data()
    w.n_leaves = w.n_numbers = 0
    w.differs = NULL
    w.births = NONE

cdef void walk_drop(Walk* w) noexcept:
    """Let go of what it took; that may come to code of Python's."""
    while w.n_leaves:
        w.n_leaves -= 1
        Py_DECREFX(w.leaves[w.n_leaves])
    while w.n_numbers:
        w.n_numbers -= 1
        Py_DECREFX(w.leaves[w.first_number + w.n_numbers])

cdef void walk_end(Walk* w) noexcept:
    walk_drop(w)
    Py_XDECREFX(w.differs)

cdef inline id_t leaf_take(Walk* w, id_t at, PyObject* x) noexcept:
    Py_INCREFX(x)
    w.leaves[w.n_leaves] = x
    w.n_leaves += 1
    return at + 1

cdef inline id_t walk_item(Walk* w, id_t at, PyObject* x) except -2:
    """walk, of what only a container holds; without the call where it is a tensor."""
    if w.births != w.table.births: return NONE
    cdef Op* op = op_row(w.table, at)
    if op.kind == TENSOR and Py_TYPE_(x) == op.obj: return leaf_take(w, at, x)
    item = <object>x
    return walk(w, at, x)

cdef id_t walk(Walk* w, id_t at, PyObject* x) except -2:
    """Match x against the program at op `at`; the op behind it, or NONE where they differ."""
    if w.births != w.table.births: return NONE
    cdef Op* op = op_row(w.table, at)
    cdef int32_t n = op.n, k
    cdef PyObject* keys
    cdef PyObject* key
    cdef PyObject* value
    cdef Py_ssize_t next_ = 0
    cdef PyObject* tp = Py_TYPE_(x)
    if op.kind == TENSOR:
        return leaf_take(w, at, x) if tp == op.obj else NONE
    if op.kind == PLAIN or op.kind == EQUAL:
        if plain_same(op.obj, x): return at + 1
        if tp == INT_TYPE or tp == STR_TYPE or tp == FLOAT_TYPE or tp == BOOL_TYPE:
            Py_INCREFX(x)
            Py_XDECREFX(w.differs)
            w.differs_at, w.differs = at, x
        return NONE
    if op.kind == LIVE:
        if tp != op.obj or not number_fits(x): return NONE
        Py_INCREFX(x)
        w.leaves[w.first_number + w.n_numbers] = x
        w.n_numbers += 1
        return at + 1
    if op.kind == SAME:
        # `obj` is the object, or a weak reference to it where the object allows one: a dead
        # object's address may be another one's today.
        if x == op.obj or (tp != <PyObject*>WEAKREF and Py_TYPE_(op.obj) == <PyObject*>WEAKREF
                           and PyWeakref_GetObject(op.obj) == x): return at + 1
        return NONE
    if op.kind == TUPLE or op.kind == NAMEDTUPLE:
        if tp != (TUPLE_TYPE if op.kind == TUPLE else op.obj) or PyTuple_GET_SIZEX(x) != n: return NONE
        at += 1
        for k in range(n):
            at = walk_item(w, at, PyTuple_GET_ITEMX(x, k))
            if at == NONE: return NONE
        return at
    if op.kind == LIST:
        if tp != LIST_TYPE or PyList_GET_SIZEX(x) != n: return NONE
        at += 1
        for k in range(n):
            if k >= PyList_GET_SIZEX(x): return NONE          # an __eq__ on the way changed it
            at = walk_item(w, at, PyList_GET_ITEMX(x, k))
            if at == NONE: return NONE
        return at
    if op.kind == DICT:
        if tp != DICT_TYPE or PyDict_GET_SIZE(x) != n: return NONE
        keys = op.obj
        held = <object>keys
        at += 1
        k = 0
        while PyDict_Next(x, &next_, &key, &value):
            item = <object>value
            if k >= n or not plain_same(PyTuple_GET_ITEMX(keys, k), key): return NONE
            at = walk_item(w, at, value)
            if at == NONE: return NONE
            k += 1
        return at
    return walk_object(w, at, x)

cdef id_t walk_object(Walk* w, id_t at, PyObject* x) except -2:
    """Dataclasses and types registered with torch.utils._pytree: needs Python objects made."""
    cdef Op* op = op_row(w.table, at)
    cdef int32_t n = op.n
    about = <object>op.obj
    if Py_TYPE_(x) != <PyObject*>about[0]: return NONE
    if op.kind == DATACLASS:
        if len(getattr(<object>x, "__dict__", ())) != about[2]: return NONE
        children = [getattr(<object>x, name, ABSENT) for name in about[1]]
    else:
        children, context = about[1](<object>x)
        children = list(children)
        if not plain_same(<PyObject*>context, <PyObject*>about[2]): return NONE
    if len(children) != n: return NONE
    at += 1
    for child in children:
        at = walk(w, at, <PyObject*>child)
        if at == NONE: return NONE
    return at

cdef id_t leaves_take(Table* t, id_t f, PyObject* args, PyObject* kwargs, Walk* w) except -2:
    """The spec of f that these arguments follow, with their leaves in w; or NONE. Newest first. A
    number or string that one spec does not accept is held against the others first: a function
    called with many values costs one compare for each."""
    cdef id_t s = NONE, before = NONE, at, op = NONE
    cdef uint64_t shape = 0
    w.births = NONE
    while True:
        walk_drop(w)
        if w.births != t.births:            # the first time, or rows were freed meanwhile: from the start
            w.births = t.births
            s, before, op = fn_row(t, f).first_spec, NONE, NONE
        if s == NONE: return NONE
        if op != NONE and spec_row(t, s).shape == shape and not plain_same(
                op_row(t, spec_row(t, s).op_at + op).obj, w.differs):
            if w.births == t.births: before, s = s, spec_row(t, s).next
            continue
        w.room.resize(spec_row(t, s).n_leaves + spec_row(t, s).n_numbers)
        w.leaves = w.room.data()
        w.first_number = spec_row(t, s).n_leaves
        w.differs_at = NONE
        at = walk(w, spec_row(t, s).op_at, args)
        if at != NONE: at = walk(w, at, kwargs)
        if w.births != t.births: continue
        if at != NONE:
            fn = fn_row(t, f)
            if before != NONE and spec_row(t, before).next == s:      # move to front
                spec_row(t, before).next = spec_row(t, s).next
                spec_row(t, s).next = fn.first_spec
                fn.first_spec = s
            return s
        if w.differs_at != NONE:
            op = w.differs_at - spec_row(t, s).op_at
            shape = spec_row(t, s).shape
        else:
            op = NONE
        before = s
        s = spec_row(t, s).next

cdef object leaves_build(Table* t, id_t* at, PyObject** tensors, int32_t* next_):
    """The result that the program at op `at` describes, from tensors in order. New containers."""
    cdef Op op = op_row(t, at[0])[0]
    cdef int32_t k
    at[0] += 1
    if op.kind == TENSOR:
        next_[0] += 1
        return <object>tensors[next_[0] - 1]
    if op.kind == TUPLE:
        values = PyTuple_New(op.n)
        for k in range(op.n):
            value = leaves_build(t, at, tensors, next_)
            Py_INCREF(value)
            PyTuple_SET_ITEM(values, k, value)
        return values
    if op.kind == LIST:
        return [leaves_build(t, at, tensors, next_) for k in range(op.n)]
    if op.kind == DICT:
        return {key: leaves_build(t, at, tensors, next_) for key in <object>op.obj}
    if op.kind == NAMEDTUPLE:
        return (<object>op.obj)._make([leaves_build(t, at, tensors, next_) for k in range(op.n)])
    return <object>op.obj
