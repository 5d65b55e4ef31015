# Values that a function reads without its arguments: globals, closure cells, attributes. Most lie in dicts, and are
# compared only where one was written since (dict_shim.h), so this chapter may call Python.

cdef PyObject* place_now(Place p) except? NULL:
    """What lies in a dict, a cell or a list, borrowed; NULL: nothing."""
    if p.kind == DICT_ITEM: return PyDict_GetItemWithError(p.home, p.key)
    if p.kind == CELL: return PyCell_GET(p.home)
    return PyList_GET_ITEMX(p.home, p.number) if p.number < PyList_GET_SIZEX(p.home) else NULL

cdef bint absent(Place p) except *:
    """Is nothing in the dict under any of these names?"""
    cdef Py_ssize_t k
    for k in range(PyTuple_GET_SIZEX(p.key)):
        if PyDict_GetItemWithError(p.home, PyTuple_GET_ITEMX(p.key, k)) is not NULL: return False
    return True

cdef int place_holds(Place p) except -1:
    """Is the value still what it was when the node was recorded?"""
    cdef PyObject* now = NULL
    if p.kind in (DICT_ITEM, CELL, LIST_ITEM):
        now = place_now(p)
    elif p.kind == DICT_LEN:
        return PyDict_GET_SIZE(p.home) == p.number
    elif p.kind == LIST_LEN:
        return PyList_GET_SIZEX(p.home) == p.number
    elif p.kind == EMPTY:
        now = PyCell_GET(p.home) if PyCell_Check(p.home) else PyDict_GetItemWithError(p.home, p.key)
        return now is not NULL and empty_same(p.want, now)
    elif p.kind == NAMES_ABSENT:
        return absent(p)
    elif p.kind == TYPE_ATTR:
        now = type_lookup(p.home, p.key)
    elif p.number:
        now = function_get(p.home, p.number)
    else:
        now = PyObject_GetAttrX(p.home, p.key)
        if now is NULL:
            PyErr_Clear()
            return p.want is NULL
        same = value_fits(p, now)
        Py_DECREFX(now)
        return same
    return value_fits(p, now)

cdef int value_fits(Place p, PyObject* now) except -1:
    if now == p.want or p.guard == NOT_AT_ALL: return 1
    if now is NULL or p.want is NULL or p.guard == BY_IDENTITY: return 0
    return plain_same(p.want, now) if p.guard == BY_VALUE else Py_TYPE_(now) == Py_TYPE_(p.want)

cdef int empty_same(PyObject* want, PyObject* now) except -1:
    """Is this an empty container like the wanted one, that nobody but its place holds? Then nothing can
    tell the two apart."""
    if Py_REFCNT(now) != 1 or Py_TYPE_(now) != Py_TYPE_(want): return 0
    if PyList_CheckExact(now): return PyList_GET_SIZEX(now) == 0
    if PyDict_GET_SIZE(now) != 0: return 0
    return PyDict_CheckExact(now) or (<object>now).default_factory is (<object>want).default_factory

cdef int parts_follow(Table* t, id_t n, id_t* slot, object shape, object now) except -1:
    """The tensors of a value, of which slot[0] is the first. shape: as of containers.Opened. What is let go of may come
    to code of Python's, so the parts are held."""
    if shape is None:
        slot[0] += 1
        return slot_follow(t, n, slot[0] - 1, <PyObject*>now)
    cdef tuple parts
    cdef Py_ssize_t k
    kind, names, shapes = <tuple>shape
    if kind is None:
        if names is not None: return take_number(t, n, names, <PyObject*>now)
        return plain_same(<PyObject*>shapes, <PyObject*>now)
    if type(now) is not kind: return 0
    if names is None:
        parts = tuple(now) if kind is list else (<tuple>now)[:]
    else:
        named = now if kind is dict else now.__dict__
        if type(named) is not dict or tuple(named) != names: return 0
        parts = tuple((<dict>named).values())
    if len(parts) != len(<tuple>shapes): return 0
    for k in range(len(parts)):
        if not parts_follow(t, n, slot, (<tuple>shapes)[k], parts[k]): return 0
    return 1

cdef bint slot_follow(Table* t, id_t n, id_t k, PyObject* now):
    """The row owns the tensor: what is compared and bound later must not have gone meanwhile."""
    cdef Guard* g = node_guard(t, node_row(t, n), k)
    if now == g.tensor: return True
    if Py_TYPE_(now) != Py_TYPE_(g.tensor) or tensor_has_attributes(now): return False
    before = <object>g.tensor           # let go of when the rows are right: that may come to code of Python's
    Py_DECREFX(g.tensor)
    Py_INCREF(<object>now)
    g.tensor = now
    node_row(t, n).follows = 2
    return True

cdef int take_number(Table* t, id_t n, id_t row, PyObject* now) except -1:
    """The number is today's of this row, if C can hold it."""
    cdef int took = number_take(node_number(t, node_row(t, n), row), now)
    if took == 2: node_row(t, n).stale = 1
    return took

cdef int list_fits(Table* t, id_t n, id_t j) except -1:
    """Is what lies in the node's place j the list of the recorded call, or one that no other place has or lies in?
    Other such places are asked what they have now. (An EMPTY one takes no list that somebody else holds.)"""
    cdef PyObject* now = place_now(node_place(t, node_row(t, n), j)[0])
    if now == node_place(t, node_row(t, n), j).want: return 1
    if now is NULL or Py_TYPE_(now) != LIST_TYPE: return 0
    for k in range(node_row(t, n).len[PLACES]):
        q = node_place(t, node_row(t, n), k)
        if k == j: continue
        if q.home == now or now == (place_now(q[0]) if q.guard == ANY_LIST else q.want): return 0
    return 1

cdef int place_take(Table* t, id_t n, id_t j) except -1:
    """What lies in the node's place j is today's: a number of its row, tensors of its slots if they are of that type,
    what is in a container of these and of constants, if it has the shape that is wanted."""
    cdef Place p = node_place(t, node_row(t, n), j)[0]
    cdef PyObject* now = NULL
    cdef bint lies = p.kind in (DICT_ITEM, CELL, LIST_ITEM)
    now = place_now(p) if lies else PyObject_GetAttrX(p.home, p.key)
    if now is NULL:
        PyErr_Clear()
        return 0
    try:
        if p.guard == IS_NUMBER: return take_number(t, n, p.slot, now)
        return parts_follow(t, n, &p.slot, <object>p.want, <object>now)
    finally:
        if not lies: Py_DECREFX(now)

cdef int32_t follows_same(Table* t, id_t n) noexcept nogil:
    """A slot that follows a place and now has the tensor of another one, that is reached too, or NONE: they were
    two."""
    cdef Node* node = node_row(t, n)
    for k in range(node.len[SLOTS]):
        if not node_slot(t, node, k).follows: continue
        for j in range(node.len[SLOTS]):
            other = node_guard(t, node, j)
            if j != k and other.leaf == NONE and other.tensor == node_guard(t, node, k).tensor: return k
    node.follows = 1
    return NONE

cdef int32_t tag_holds(Table* t, id_t n, int32_t k) except -2:
    """NONE if the places of the node's tag k hold, else the index of the first that does not. Rows are looked up for
    each: a comparison may come to code of Python's, and another thread may record meanwhile."""
    cdef int32_t j = node_tag(t, node_row(t, n), k).place_at
    cdef int32_t end = j + node_tag(t, node_row(t, n), k).place_n
    for j in range(j, end):
        if node_place(t, node_row(t, n), j).guard in (FOLLOWS, IS_NUMBER):
            if not place_take(t, n, j): return j
        elif node_place(t, node_row(t, n), j).guard == ANY_LIST:
            if not list_fits(t, n, j): return j
        elif not place_holds(node_place(t, node_row(t, n), j)[0]): return j
    if CGT_DEBUG and k == 0: table_move(t)
    return NONE

cdef int32_t places_hold(Table* t, id_t n) except -2:
    """NONE if all places of the node hold, else the index of the first that does not. Where nothing was written since,
    that is one comparison (dict_epoch; before Python 3.12 one for each dict), and what no dict tells of."""
    cdef int32_t k, bad
    cdef int32_t loose = node_row(t, n).len[TAGS] - node_row(t, n).loose_n
    cdef uint64_t tag, epoch = dict_epoch
    if epoch == 0 or node_row(t, n).epoch != epoch:
        for k in range(loose):
            w = node_tag(t, node_row(t, n), k)
            tag = dict_tag(w.home)
            if tag == w.tag: continue
            bad = tag_holds(t, n, k)
            if bad != NONE: return bad
            node_tag(t, node_row(t, n), k).tag = tag
        node_row(t, n).epoch = epoch
    for k in range(loose, node_row(t, n).len[TAGS]):
        bad = tag_holds(t, n, k)
        if bad != NONE: return bad
    return NONE

cdef int places_fill(Table* t, id_t n, object groups) except -1:
    """groups: [(dict or None, [(kind, holder, key, guard, want, present, number, slot, items), ...]), ...]. Those
    without a dict come last. The slots are filled."""
    cdef id_t at, k = 0
    part_add(t, n, TAGS, len(groups))
    for home, rows in groups:
        at = part_add(t, n, PLACES, len(rows))
        node = node_row(t, n)
        if home is not None and dict_watch(<PyObject*>home):
            w = node_tag(t, node, k)
            w.home = <PyObject*>home
            k += 1
        else:
            node.loose_n += 1
            w = node_tag(t, node, node.len[TAGS] - node.loose_n)
        w.tag = 0                           # unknown: compare once at the first call
        w.place_at = at
        w.place_n = <int32_t>len(rows)
        for row in rows:
            p = node_place(t, node, at)
            p.kind, where, key, p.guard, want, present, p.number, p.slot, p.items = row
            p.home, p.key, p.want = <PyObject*>where, <PyObject*>key, <PyObject*>want if present else NULL
            for followed in range(p.slot, p.slot + p.items if p.guard == FOLLOWS else p.slot):
                Py_INCREF(<object>node_guard(t, node, followed).tensor)
                node_slot(t, node, followed).follows = node.follows = node_guard(t, node, followed).odd = True
            if p.kind == ATTR: p.number = function_part(p.home, p.key)
            for name in (key if p.kind == NAMES_ABSENT else (key,)) if w.home is not NULL else ():
                dict_guard(w.home, <PyObject*>name if p.kind in (DICT_ITEM, NAMES_ABSENT) else NULL)
            at += 1
    return 0

cdef object place_value(Place p):
    """What a place holds that a call changes; None if it is gone: another thread took it away."""
    if p.kind not in (DICT_ITEM, CELL, LIST_ITEM): return getattr(<object>p.home, <object>p.key, None)
    now = place_now(p)
    return <object>now if now is not NULL else None

cdef int place_put(Place p, object value) except -1:
    if p.kind == DICT_ITEM:
        (<dict>p.home)[<object>p.key] = value
    elif p.kind == CELL:
        PyCell_Set(p.home, <PyObject*>value)
    elif p.kind == LIST_ITEM:
        (<list>p.home)[p.number] = value
    else:
        setattr(<object>p.home, <object>p.key, value)
    return 0

cdef int place_advance(Table* t, id_t n, Effect e) except -1:
    """What the call's own `+=` does."""
    value = place_value(node_place(t, node_row(t, n), e.place)[0])
    return 0 if value is None else place_change(t, n, e, value + <object>e.by)

cdef int place_change(Table* t, id_t n, Effect e, object value) except -1:
    """The place holds this now. A guard that does not look at the value takes it, too: where nothing else was written
    since it compared, it need not compare again."""
    cdef uint64_t epoch = dict_epoch, tag = 0
    cdef PyObject* home = node_tag(t, node_row(t, n), e.tag).home
    # the next call has to look
    if node_place(t, node_row(t, n), e.place).guard not in (BY_TYPE, NOT_AT_ALL): home = NULL
    if home is not NULL: tag = dict_tag(home)
    place_put(node_place(t, node_row(t, n), e.place)[0], value)
    if home is NULL: return 0
    if node_tag(t, node_row(t, n), e.tag).tag == tag: node_tag(t, node_row(t, n), e.tag).tag = dict_tag(home)
    if node_row(t, n).epoch == epoch: node_row(t, n).epoch = dict_epoch
    return 0

cdef int place_append(Table* t, id_t n, Effect e, object value) except -1:
    """What the call's own append() does."""
    entries = place_value(node_place(t, node_row(t, n), e.place)[0])
    if type(entries) is list: (<list>entries).append(value)
    return 0
