# Differentiable functions. A hit whose result requires grad makes one autograd node (autograd_shim.h),
# which holds what the forward saved until its backward ran; that is what makes these outputs held.

cdef void backward_released(int path, int64_t step) noexcept:
    """A forward of that iteration has nothing saved any more. Called with the GIL."""
    cdef Path* p = path_row(&TABLE, path)
    if p.step == step and p.pending > 0: p.pending -= 1

cdef bint group_spent(Table* t, Node* node, int32_t k, PyObject* x) noexcept:
    """Is x, which an autograd node saved, the last that holds memory of fresh output k?"""
    cdef void* storage = node_out(t, node, k).storage
    return storage is not NULL and tensor_storage(x) == storage and not group_held(t, node, k, NULL, False, x)

cdef bint grad_spent(Table* t, id_t at, PyObject* x) noexcept:
    """Is x, a gradient, the last that holds its memory? That of the node which ran last, or nobody's."""
    if <object>x is None or tensor_storage(x) is NULL or out_is_held(x, 1, 0): return False
    if storage_uses(x) == 1: return True
    cdef int32_t k = node_output(t, at, x)
    return k != NONE and group_spent(t, node_row(t, at), k, x)

cdef PyObject* backward_spent(int n, int path, int64_t step, PyObject** grads, int n_grads,
                              PyObject* saved) except NULL:
    """For each gradient that comes to node n and for each tensor that it saved, a byte: does its memory
    die with this backward? Memory of the path does, where a recording may use it again, and a gradient
    that nobody holds. A new reference; None if nothing dies."""
    cdef Table* t = &TABLE
    cdef Node* node = node_row(t, n)
    cdef id_t k, m, o
    cdef id_t at = path_row(t, path).current
    while at != NONE and at != n: at = node_row(t, at).parent
    if at == NONE or path_row(t, path).step != step or node.len[SAVES] != PyTuple_GET_SIZE(<object>saved):
        Py_INCREF(None)
        return <PyObject*>None
    mask = PyBytes_FromStringAndSize(NULL, n_grads + node.len[SAVES])
    cdef char* bytes_ = PyBytes_AS_STRING(mask)
    cdef bint any_ = False
    at = path_row(t, path).current
    for k in range(n_grads):
        bytes_[k] = grad_spent(t, at, grads[k])
        any_ |= bytes_[k]
    for k in range(node.len[SAVES]):
        s = node_save(t, node, k)
        m, o = n, s.out
        if s.out == NONE:
            slot = node_slot(t, node, s.slot)
            m, o = slot.from_node, slot.from_out
        bytes_[n_grads + k] = m != NONE and \
            group_spent(t, node_row(t, m), o, PyTuple_GET_ITEMX(saved, k))
        any_ |= bytes_[n_grads + k]
    if not any_: mask = None
    Py_INCREF(mask)
    return <PyObject*>mask

cdef int backward_note(Table* t, Node* node, PyObject* result) except -1:
    """Tell the autograd node that called which tensors of this replay's result are the table's own."""
    cdef int32_t k, first
    backward_replayed(result)
    for k in range(node.n_given):
        o = node_out(t, node, k)
        first = o.ref if o.kind == AGAIN else k
        o = node_out(t, node, first)
        backward_cached(first if o.kind == FRESH or o.kind == SHARED else NONE)
    return 0

cdef object slot_object(Table* t, id_t n, id_t k, PyObject** leaves):
    """The call's tensor of slot k as Python has it. Of a gradient that another thread took away meanwhile: None."""
    cdef PyObject* x = slot_tensor(t, node_row(t, n), k, leaves)
    cdef Guard* g = node_guard(t, node_row(t, n), k)
    if x is NULL: return None
    return <object>x if g.leaf != NONE or g.grad_of == NONE else tensor_wrap(x)

cdef uint64_t reached_versions(Table* t, Node* node) noexcept:
    """The versions of what the node reads without a call's arguments, added up: none is ever smaller than before."""
    cdef uint64_t total = 0
    cdef int32_t k
    for k in range(node.len[SLOTS]):
        g = node_guard(t, node, k)
        if g.leaf == NONE and g.grad_of == NONE and g.tensor is not NULL: total += tensor_version(g.tensor)
    return total

cdef void* backward_make(Table* t, id_t n, PyObject** leaves) except NULL:
    """The autograd node of a call of n: what is saved, where gradients flow."""
    cdef Node* node = node_row(t, n)
    cdef Objects flows
    cdef id_t k
    cdef bint again = node.len[EFFECTS] == 0       # else it is not run once more, whatever a backward wants
    saved = PyTuple_New(node.len[SAVES])
    for k in range(node.len[SAVES]):
        s = node_save(t, node, k)
        x = <object>node_out(t, node, s.out).tensor if s.out != NONE else slot_object(t, n, s.slot, leaves)
        Py_INCREF(x)
        PyTuple_SET_ITEM(saved, k, x)
    for k in range(node.len[FLOWS]): flows.push_back(slot_tensor(t, node, node_flow(t, node, k)[0], leaves))
    made = backward_new(node.site, <PyObject*>saved, flows.data(), node.len[FLOWS], node.joined_n, n, node.path,
                        path_row(t, node.path).step, backward_released, backward_spent, leaves,
                        spec_row(t, node.spec).n_leaves if again else 0, reached_versions(t, node) if again else 0)
    path_row(t, node_row(t, n).path).pending += 1      # the table may have grown meanwhile
    return made
