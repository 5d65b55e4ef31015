# Differentiable functions. A hit whose result requires grad makes one autograd node (autograd_shim.h),
# which holds what the forward saved until its backward ran; that is what makes these outputs held.

cdef void backward_released(int path, int64_t step) noexcept:
    """A forward of that iteration has nothing saved any more. Called with the GIL."""
    cdef Path* p = path_row(&TABLE, path)
    if p.step == step and p.pending > 0: p.pending -= 1

cdef void* backward_make(Table* t, id_t n, PyObject** leaves) except NULL:
    """The autograd node of a call of n: what is saved, where gradients flow."""
    cdef Node* node = node_row(t, n)
    cdef PyObject* small[SCRATCH]
    cdef PyObject** flows = small
    cdef PyObject* x
    cdef Save* s
    cdef void* made
    cdef id_t k
    cdef id_t* slot
    saved = PyTuple_New(node.save_n)
    for k in range(node.save_n):
        s = save_row(t, node.save_at + k)
        if s.out != NONE: x = out_row(t, node.out_at + s.out).tensor
        else: x = slot_tensor(t, node, slot_row(t, node.slot_at + s.slot), leaves)
        Py_INCREFX(x)
        PyTuple_SET_ITEM(saved, k, <object>x)
    if node.flow_n > SCRATCH:
        flows = <PyObject**>malloc(node.flow_n * sizeof(PyObject*))
        if flows is NULL: raise MemoryError()
    for k in range(node.flow_n):
        slot = flow_row(t, node.flow_at + k)
        flows[k] = slot_tensor(t, node, slot_row(t, node.slot_at + slot[0]), leaves)
    Py_INCREF(saved)
    made = backward_new(node.site, <PyObject*>saved, flows, node.flow_n, node.path,
                        path_row(t, node.path).step, backward_released)
    if flows is not small: free(flows)
    if made is NULL: raise_pending()
    path_row(t, node.path).pending += 1
    return made
