# Values that a function reads without its arguments: globals, closure cells, attributes. Compared
# only where a dict's tag moved (guard.pxi), so this chapter may call Python.

cdef int place_holds(Place p) except -1:
    """Is the value still what it was when the node was recorded?"""
    cdef PyObject* now = NULL
    cdef int same
    if p.kind == DICT_ITEM:
        now = PyDict_GetItemWithError(p.holder, p.key)
        if now is NULL and PyErr_Occurred() is not NULL: return -1
    elif p.kind == DICT_LEN:
        return PyDict_GET_SIZE(p.holder) == p.number
    elif p.kind == CELL:
        now = PyCell_GET(p.holder)
    elif p.kind == LIST_LEN:
        return PyList_GET_SIZEX(p.holder) == p.number
    elif p.kind == LIST_ITEM:
        if p.number >= PyList_GET_SIZEX(p.holder): return 0
        now = PyList_GET_ITEMX(p.holder, p.number)
    elif p.kind == EMPTY:
        now = PyCell_GET(p.holder) if PyCell_Check(p.holder) else \
            PyDict_GetItemWithError(p.holder, p.key)
        if now is NULL: return -1 if PyErr_Occurred() is not NULL else 0
        return empty_same(p.want, now)
    elif p.kind == TYPE_ATTR:
        now = type_lookup(p.holder, p.key)
    else:
        now = PyObject_GetAttrX(p.holder, p.key)
        if now is NULL:
            PyErr_Clear()
            return p.want is NULL
        same = plain_same(p.want, now) if p.plain and p.want is not NULL else now == p.want
        Py_DECREFX(now)
        return same
    if now == p.want: return 1
    if now is NULL or p.want is NULL or not p.plain: return 0
    return plain_same(p.want, now)

cdef int empty_same(PyObject* want, PyObject* now) except -1:
    """Is this an empty container like the wanted one, that nobody but its place holds? Then nothing can
    tell the two apart."""
    if Py_REFCNT(now) != 1 or Py_TYPE_(now) != Py_TYPE_(want): return 0
    if PyList_CheckExact(now): return PyList_GET_SIZEX(now) == 0
    if PyDict_GET_SIZE(now) != 0: return 0
    return PyDict_CheckExact(now) or (<object>now).default_factory is (<object>want).default_factory

cdef int32_t places_hold(Table* t, id_t n) except -2:
    """NONE if all places of the node hold, else the index of the first that does not. To compare one may call
    Python, which may add rows: none is held meanwhile."""
    cdef Watch w
    cdef int32_t k, j
    cdef uint64_t tag
    for k in range(node_row(t, n).watch_n):
        w = watch_row(t, node_row(t, n).watch_at + k)[0]
        tag = dict_tag(w.holder) if w.holder is not NULL else 0
        if w.holder is not NULL and tag == w.tag: continue
        for j in range(w.place_n):
            if not place_holds(place_row(t, node_row(t, n).place_at + w.place_at + j)[0]): return w.place_at + j
        if CGT_DEBUG and k == 0: table_move(t)
        watch_row(t, node_row(t, n).watch_at + k).tag = tag
    return NONE
