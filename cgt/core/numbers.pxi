# Numbers that may be others at each call: an argument, a place's. What the function computes of them on their way into
# its ops is a row of steps (live.py wrote them down); a hit takes today's numbers, does these steps as Python does, and
# tells the graph. A comparison is a step whose outcome the recording is for.
#
# What most programs compute C does bit for bit as Python: IEEE 754 arithmetic in 64 bits, and libm's pow, which Python
# calls, too. All else Python is asked. What it raises for, or answers with a longer integer, is a miss.

cdef inline int number_set(Number* r, Bits now) noexcept nogil:
    """Today's number: 1 if it is the same as before, else 2."""
    if now.word == r.now.word: return 1
    r.now = now
    return 2

cdef int number_take(Number* r, PyObject* x) except -1:
    """Set what Python has; 0: it is none that C can hold, or of the other kind."""
    cdef int overflow = 0
    cdef Bits now
    if Py_TYPE_(x) != (FLOAT_TYPE if r.is_float else INT_TYPE): return 0
    if r.is_float: now.f = PyFloat_AS_DOUBLE(x)
    else: now.i = PyLong_AsLongLongAndOverflow(x, &overflow)
    return 0 if overflow else number_set(r, now)

cdef int number_read(Number* r, const char* at, int itemsize) noexcept nogil:
    """Set what lies in memory, of r's kind."""
    cdef float narrow
    cdef int32_t short
    cdef Bits now
    if itemsize == 8: memcpy(&now, at, 8)
    elif r.is_float:
        memcpy(&narrow, at, 4)
        now.f = narrow
    else:
        memcpy(&short, at, 4)
        now.i = short
    return number_set(r, now)

cdef void number_write(Number* r, char* at, int itemsize) noexcept nogil:
    cdef float narrow = <float>r.now.f
    cdef int32_t short = <int32_t>r.now.i
    if itemsize == 8: memcpy(at, &r.now, 8)
    elif r.is_float: memcpy(at, &narrow, 4)
    else: memcpy(at, &short, 4)

cdef inline bint whole_fits(Number* r) noexcept nogil: return r.is_float or -EXACT <= r.now.i <= EXACT

cdef inline double as_float(Number* r) noexcept nogil: return r.now.f if r.is_float else <double>r.now.i

cdef inline bint compared(int op, double x, double y) noexcept nogil:
    return (x < y if op == LESS else x <= y if op == AT_MOST else x == y if op == SAME_AS
            else x != y if op == OTHER_THAN else x > y if op == MORE else x >= y)

cdef dict IN_PYTHON = {
    ADDED: operator.add, SUBTRACTED: operator.sub, MULTIPLIED: operator.mul, DIVIDED: operator.truediv,
    FLOORED: operator.floordiv, REMAINDER: operator.mod, RAISED: operator.pow, NEGATED: operator.neg,
    ABSOLUTE: operator.abs, AS_FLOAT: float, AS_INT: int, ROOT: math.sqrt, EXPONENTIAL: math.exp, LOGARITHM: math.log,
    SINE: math.sin, COSINE: math.cos, TANGENT: math.tan, HYPERBOLIC: math.tanh, LESS: operator.lt,
    AT_MOST: operator.le, SAME_AS: operator.eq, OTHER_THAN: operator.ne, MORE: operator.gt, AT_LEAST: operator.ge}

cdef bint number_ask(Table* t, id_t n, id_t k) noexcept:
    """Step k of node n, as Python does it. That makes objects, so a finalizer may come to run, and rows may move."""
    cdef Number* r = node_number(t, node_row(t, n), k)
    cdef int op = r.op
    cdef id_t a = r.a, b = r.b
    x, y = number_value(node_number(t, node_row(t, n), a)), number_value(node_number(t, node_row(t, n), b))
    try:
        value = IN_PYTHON[op](x) if NEGATED <= op <= HYPERBOLIC else IN_PYTHON[op](x, y)
        if op >= LESS: value = int(value)
        return number_take(node_number(t, node_row(t, n), k), <PyObject*>value) != 0
    except (ArithmeticError, ValueError):
        return False

cdef bint number_look_up(Number* r, Number* a) noexcept nogil:
    """The table's entry, counted from the end if the index is negative."""
    cdef int64_t k = a.now.i + r.length if a.now.i < 0 else a.now.i
    if k < 0 or k >= r.length: return False
    memcpy(&r.now, r.table + 8 * k, 8)
    return True

cdef bint number_step(Table* t, id_t n, id_t k) noexcept:
    """Step k of node n from its operands; False: Python raises, or C cannot hold what it answers."""
    cdef Number* r = node_number(t, node_row(t, n), k)
    cdef Number* a = node_number(t, node_row(t, n), r.a)
    cdef Number* b = node_number(t, node_row(t, n), r.b)
    cdef double x = as_float(a), y = as_float(b), z
    if r.op == LOOKED_UP: return number_look_up(r, a)
    if r.op == ROUNDED:
        r.now.f = <double><float>x
        return whole_fits(a) and isfinite(r.now.f)
    if not (whole_fits(a) and whole_fits(b)): return number_ask(t, n, k)
    if r.op == ADDED: z = x + y
    elif r.op == SUBTRACTED: z = x - y
    elif r.op == MULTIPLIED: z = x * y
    elif r.op == DIVIDED and y != 0: z = x / y
    elif r.op == RAISED and (a.is_float or b.is_float) and x > 0: z = pow(x, y)
    elif r.op == NEGATED: z = -x
    elif r.op == ABSOLUTE: z = fabs(x)
    elif r.op == AS_FLOAT: z = x
    elif r.op == AS_INT: z = trunc(x)
    elif r.op == ROOT and x >= 0: z = sqrt(x)
    elif r.op >= LESS: z = compared(r.op, x, y)
    else: return number_ask(t, n, k)
    if r.is_float and isfinite(z): r.now.f = z
    elif not r.is_float and -EXACT < z < EXACT: r.now.i = <int64_t>z        # what is EXACT may have been rounded
    else: return number_ask(t, n, k)
    return True

cdef int32_t numbers_meet(Table* t, id_t n, id_t s, PyObject** leaves) except -2:
    """Take the call's numbers and do all steps, if one is another than last time: NONE, or the first with which the
    recording cannot be. Those in places were taken where these were compared."""
    cdef Node* node = node_row(t, n)
    cdef Number* first = node_number(t, node, 0)
    cdef char* at
    cdef int32_t k
    cdef int took, size
    for k in range(node.len[NUMBERS]):
        r = first + k
        if r.op >= EQUALS: break                # where they come from stands first
        if r.op == AT_PLACE: continue
        if r.op == IN_CALL: took = number_take(r, leaves[spec_row(t, s).n_leaves + r.a])
        else:
            size = node_guard(t, node, r.a).itemsize
            at = tensor_at(slot_tensor(t, node, r.a, leaves), size)
            took = number_read(r, at, size) if at is not NULL else 0
            if r.b != NONE and r.now.word != first[r.b].now.word: return k
        if took == 0: return k
        if took == 2: node.stale = 1
    if not node.stale: return NONE
    return numbers_do(t, n, NONE)

cdef int32_t numbers_do(Table* t, id_t n, id_t after) noexcept:
    """All steps that are known behind this read, or before the first: NONE, or the first with which the recording
    cannot be."""
    cdef int32_t k
    for k in range(node_row(t, n).len[NUMBERS]):
        r = node_number(t, node_row(t, n), k)
        if r.after != after: continue
        if r.op > EQUALS and r.op != AT_READ and not number_step(t, n, k): return k
        r = node_number(t, node_row(t, n), k)
        if r.must and r.now.word != r.want: return k
    node = node_row(t, n)
    for k in range(node.len[PATCHES] if path_row(t, node.path).driver == CUDA else 0):
        p = node_patch(t, node, k)
        if p.kind != SCALAR: continue
        r = node_number(t, node, p.number)
        if r.after == after and not form_fits(p.part, r): return p.number
    return NONE

cdef bint number_comes(Table* t, id_t n, id_t read, Driver* d) except -1:
    """A number was read, whatever it is: the graphs that run behind it are told what comes of it. Can the recording be
    with it?"""
    cdef Node* node = node_row(t, n)
    cdef Read* r = node_read(t, node, read)
    number_read(node_number(t, node, r.number), r.at, 8)
    if numbers_do(t, n, read) != NONE: return False
    scalars_bind(t, n, d, read)
    return True

cdef uint64_t number_bits(object value) except? 0:
    """Of a Python float or int, as a Number has them."""
    cdef Bits now
    if type(value) is float: now.f = value
    else: now.i = value
    return now.word

cdef bint form_fits(int form, Number* r) noexcept nogil:
    """Would PyTorch convert this number without a word, and ask no kernel of another kind to compute with it?"""
    if r.is_float and not isfinite(r.now.f): return False
    if form == AS_F64 or form == AS_I64: return True
    if form == AS_I32: return -<int64_t>0x80000000 <= r.now.i <= <int64_t>0x7fffffff
    if form >= INVERSE_F64: return as_float(r) != 0
    return fabs(as_float(r)) <= (65504.0 if form == AS_F16 else 3.3895313892515355e38 if form == AS_BF16
                                 else 3.4028234663852886e38)

cdef object number_value(Number* r): return r.now.f if r.is_float else r.now.i

cdef int numbers_fill(Table* t, id_t n, list rows) except -1:
    """rows: [(op, a, b, value, must, (address, length) of a table or None), ...]"""
    cdef id_t k
    part_add(t, n, NUMBERS, len(rows))
    for k in range(len(rows)):
        r = node_number(t, node_row(t, n), k)
        r.op, r.a, r.b, value, r.must, table = rows[k]
        r.after = NONE
        if r.op == AT_READ:
            r.after = r.a
            node_read(t, node_row(t, n), r.a).number = k
        elif r.op > EQUALS:
            r.after = max(node_number(t, node_row(t, n), r.a).after, node_number(t, node_row(t, n), r.b).after)
        if table is not None: r.table, r.length = <const char*><uintptr_t>table[0], table[1]
        r.is_float = type(value) is float
        r.now.word = r.want = number_bits(value)
    return 0

cdef int words_tell(Table* t, Node* node, int kind, id_t after, Driver* d) except? RAISES:
    """Tell the graphs the words of this kind that moved, a node's arguments once, whatever changed in them: numbers
    that are known behind this read, or before the first; or addresses of rebound slots."""
    cdef Number* r = NULL
    cdef Patch* last = NULL
    cdef uint64_t now
    cdef int32_t k
    cdef int code = 0
    for k in range(node.len[PATCHES]):
        p = node_patch(t, node, k)
        if p.kind != kind: continue
        if kind == SCALAR: r = node_number(t, node, p.number)
        if r is not NULL and r.after != after: continue
        now = r.now.word if r is not NULL else node_patch(t, node, p.number).told[0]
        if now == p.told[0] and not p.told[1]: continue
        if last is not NULL and last.to != p.to: code = fault(CALL_PATCH) or d.word_done(exec_of(t, node, last), last)
        if code: break
        if r is NULL: address_write(p, now + p.nbytes)
        else: code = fault(CALL_PATCH) or d.scalar(exec_of(t, node, p), p, r)
        if code: break
        p.told[0], p.told[1] = now, 0
        last = p
    if code == 0 and last is not NULL: code = fault(CALL_PATCH) or d.word_done(exec_of(t, node, last), last)
    for k in range(node.len[PATCHES] if code else 0):       # what the exec was told is not known: it is told anew
        p = node_patch(t, node, k)
        if p.kind == kind: p.told[1] = 1
    return code

cdef int scalars_bind(Table* t, id_t n, Driver* d, id_t after=NONE) except -1:
    cdef Node* node = node_row(t, n)
    cdef int code = words_tell(t, node, SCALAR, after, d)
    if code == 0 and after == NONE: node.stale = 0
    return check(path_row(t, node.path).driver, code, CALL_PATCH)

cdef inline void* exec_of(Table* t, Node* node, Patch* p) noexcept nogil:
    """Of the segment that the patch belongs to."""
    return node.exec if p.segment == NONE else node_read(t, node, p.segment).exec
