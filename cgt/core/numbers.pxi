# Numbers that may be others at each call: an argument, a place's. What the function computes of them on their way into
# its ops is a row of steps (live.py wrote them down); a hit takes today's numbers, does these steps as Python does, and
# tells the graph. A comparison is a step whose outcome the recording is for.
#
# Only what C does bit for bit as Python is done here: IEEE 754 arithmetic in 64 bits, and libm's pow, which Python
# calls. What Python would raise for, or answer with a longer integer, is a miss: then Python does it.

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

cdef bint number_raise(Number* r, Number* a, Number* b) noexcept nogil:
    """a ** b, where Python's answer is pow's."""
    cdef int64_t base, result = 1, k
    if not (a.is_float or b.is_float) and b.now.i >= 0:
        base, k = a.now.i, b.now.i
        while k:
            if k & 1 and not product_fits(result, base, &result): return False
            k >>= 1
            if k and not product_fits(base, base, &base): return False
        r.now.i = result
        return not r.is_float
    if not (whole_fits(a) and whole_fits(b)) or not r.is_float: return False
    x, y = as_float(a), as_float(b)
    if not (isfinite(x) and isfinite(y)) or (x == 0 and y < 0) or (x < 0 and y != floor(y)): return False
    r.now.f = pow(x, y)
    return isfinite(r.now.f)

cdef bint number_part(Number* r, Number* a, Number* b) noexcept nogil:
    """a // b or a % b: Python's rest has the sign of b."""
    cdef double x, y, rest, whole
    cdef int64_t q, m
    if not r.is_float:
        if b.now.i == 0 or (b.now.i == -1 and a.now.i == -<int64_t>0x7fffffffffffffff - 1): return False
        q = c_div(a.now.i, b.now.i)
        m = a.now.i - q * b.now.i
        if m != 0 and (m < 0) != (b.now.i < 0):
            q -= 1
            m += b.now.i
        r.now.i = q if r.op == FLOORED else m
        return True
    if not (whole_fits(a) and whole_fits(b)): return False
    x, y = as_float(a), as_float(b)
    if y == 0 or not (isfinite(x) and isfinite(y)): return False
    rest = fmod(x, y)
    whole = (x - rest) / y
    if rest != 0:
        if (y < 0) != (rest < 0):
            rest += y
            whole -= 1.0
    else:
        rest = copysign(0.0, y)
    if r.op == REMAINDER:
        r.now.f = rest
        return True
    if whole != 0:
        r.now.f = floor(whole)
        if whole - r.now.f > 0.5: r.now.f += 1.0
    else:
        r.now.f = copysign(0.0, x / y)
    return isfinite(r.now.f)

cdef inline int64_t c_div(int64_t a, int64_t b) noexcept nogil:
    """Towards zero; b is not 0, and the quotient fits."""
    return a // b

cdef bint number_compare(Number* r, Number* a, Number* b) noexcept nogil:
    cdef int order          # of a to b: -1, 0, 1; 2: none
    if a.is_float or b.is_float:
        if not (whole_fits(a) and whole_fits(b)): return False
        x, y = as_float(a), as_float(b)
        order = -1 if x < y else 1 if x > y else 0 if x == y else 2
    else:
        order = -1 if a.now.i < b.now.i else 1 if a.now.i > b.now.i else 0
    if r.op == LESS: r.now.i = order == -1
    elif r.op == AT_MOST: r.now.i = order == -1 or order == 0
    elif r.op == SAME_AS: r.now.i = order == 0
    elif r.op == OTHER_THAN: r.now.i = order != 0
    elif r.op == MORE: r.now.i = order == 1
    else: r.now.i = order == 1 or order == 0
    return True

cdef bint number_look_up(Number* r, Number* a) noexcept nogil:
    """The table's entry, counted from the end if the index is negative."""
    cdef int64_t k = a.now.i + r.length if a.now.i < 0 else a.now.i
    if k < 0 or k >= r.length: return False
    memcpy(&r.now, r.table + 8 * k, 8)
    return True

cdef bint number_function(Number* r, Number* a) noexcept nogil:
    """What libm says, whom Python's math asks, too."""
    if not whole_fits(a): return False
    x = as_float(a)
    if not isfinite(x) or (r.op == ROOT and x < 0) or (r.op == LOGARITHM and x <= 0): return False
    if r.op == ROOT: r.now.f = sqrt(x)
    elif r.op == EXPONENTIAL: r.now.f = exp(x)
    elif r.op == LOGARITHM: r.now.f = log(x)
    elif r.op == SINE: r.now.f = sin(x)
    elif r.op == COSINE: r.now.f = cos(x)
    elif r.op == TANGENT: r.now.f = tan(x)
    else: r.now.f = tanh(x)
    return isfinite(r.now.f)

cdef bint number_step(Number* r, Number* a, Number* b) noexcept nogil:
    """One step from its operands; False: C cannot tell."""
    if r.op >= LESS: return number_compare(r, a, b)
    if r.op == RAISED: return number_raise(r, a, b)
    if r.op == FLOORED or r.op == REMAINDER: return number_part(r, a, b)
    if r.op == LOOKED_UP: return number_look_up(r, a)
    if r.op == AS_FLOAT:
        if not whole_fits(a): return False
        r.now.f = as_float(a)
        return True
    if r.op == AS_INT:
        if a.is_float and not -EXACT <= a.now.f <= EXACT: return False
        r.now.i = <int64_t>trunc(a.now.f) if a.is_float else a.now.i
        return True
    if r.op == ROUNDED:
        r.now.f = <double><float>as_float(a)
        return whole_fits(a) and isfinite(r.now.f)
    if ROOT <= r.op <= HYPERBOLIC: return number_function(r, a)
    if r.op == NEGATED or r.op == ABSOLUTE:
        if r.is_float: r.now.f = -a.now.f if r.op == NEGATED else fabs(a.now.f)
        elif r.op == NEGATED or a.now.i < 0: return difference_fits(0, a.now.i, &r.now.i)
        else: r.now.i = a.now.i
        return True
    if not r.is_float:
        if r.op == ADDED: return sum_fits(a.now.i, b.now.i, &r.now.i)
        if r.op == SUBTRACTED: return difference_fits(a.now.i, b.now.i, &r.now.i)
        return product_fits(a.now.i, b.now.i, &r.now.i)
    if not (whole_fits(a) and whole_fits(b)): return False
    x, y = as_float(a), as_float(b)
    if r.op == ADDED: r.now.f = x + y
    elif r.op == SUBTRACTED: r.now.f = x - y
    elif r.op == MULTIPLIED: r.now.f = x * y
    elif y == 0: return False
    else: r.now.f = x / y
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
    cdef Node* node = node_row(t, n)
    cdef Number* first = node_number(t, node, 0)
    cdef int32_t k
    for k in range(node.len[NUMBERS]):
        r = first + k
        if r.after != after: continue
        if r.op > EQUALS and r.op != AT_READ and not number_step(r, first + r.a, first + r.b): return k
        if r.must and r.now.word != r.want: return k
    for k in range(node.len[PATCHES] if path_row(t, node.path).driver == CUDA else 0):
        p = node_patch(t, node, k)
        if p.kind == SCALAR and first[p.number].after == after and not form_fits(p.part, first + p.number):
            return p.number
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
