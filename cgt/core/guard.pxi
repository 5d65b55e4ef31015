# Which node accepts these leaves? Pointer and metadata comparisons only: nothing here can touch
# Python, and the compiler proves it. Reads nodes, slots, outs, grads, watches; writes nothing.

cdef inline int64_t miss(int why, int64_t where) noexcept nogil: return (<int64_t>why << 32) | where

cdef inline PyObject* slot_tensor(Table* t, Node* n, Slot* s, PyObject** leaves) noexcept nogil:
    """The call's tensor of a slot. Of a gradient: something to compare, no Python object; or NULL."""
    cdef Slot* owner
    if s.leaf != NONE: return leaves[s.leaf]
    if s.grad_of == NONE: return s.tensor
    owner = slot_row(t, n.slot_at + s.grad_of)
    return tensor_grad_tensor(owner.tensor if owner.leaf == NONE else leaves[owner.leaf])

cdef inline uintptr_t align_of(Node* n) noexcept nogil:
    """The alignment that allocators give: 512 bytes on CUDA, 64 on the host. Kernels choose vector
    widths, and with them the order of sums, by an address's remainder."""
    return 64 if n.path == 0 else 512

cdef inline char* slot_ptr(Table* t, Slot* s) noexcept nogil:
    """Where a pinned slot must be. A rescue on the host moves the recording, so an output of an
    ancestor is where that one writes it now."""
    if s.from_node == NONE: return s.ptr
    return tensor_storage_ptr(
        out_row(t, node_row(t, s.from_node).out_at + s.from_out).proto) + s.shift

cdef inline int64_t guard_slot(Table* t, Node* n, int32_t k, PyObject** leaves) noexcept nogil:
    cdef Slot* s = slot_row(t, n.slot_at + k)
    cdef PyObject* x
    cdef char* p
    x = slot_tensor(t, n, s, leaves)
    if x is NULL: return miss(MISS_META, k)
    if not tensor_same(x, s.keys, s.dtype, s.device, s.autograd, s.ndim,
                       dim_row(t, n.dim_at + s.dim_at)): return miss(MISS_META, k)
    if s.binding == UNUSED: return FITS
    p = tensor_at(x, s.itemsize)
    if s.binding == PINNED:
        if p != slot_ptr(t, s): return miss(MISS_POINTER, k)
    elif s.binding == COPIED:
        if <int32_t>(<uintptr_t>p % align_of(n)) != s.align: return miss(MISS_ALIGN, k)
        if n.writes and guard_overlaps(t, n, x, leaves): return miss(MISS_OVERLAP, k)
    elif s.binding == TWIN:
        if p != tensor_at(slot_tensor(t, n, slot_row(t, n.slot_at + s.copy), leaves), s.itemsize):
            return miss(MISS_POINTER, k)
    elif memcmp(p, s.value, s.itemsize) != 0: return miss(MISS_VALUE, k)
    if s.identity and not guard_identity(t, n, k, x, leaves): return miss(MISS_SAME, k)
    return FITS

cdef bint guard_identity(Table* t, Node* n, int32_t k, PyObject* x, PyObject** leaves) noexcept nogil:
    """Is argument x to the rest of the call what it was: the tensor in a place, a .grad, another argument, or
    none of those to which gradients flow? What was one tensor has one slot's memory and gradient."""
    cdef Slot* s = slot_row(t, n.slot_at + k)
    cdef Slot* other
    cdef int32_t j
    if s.tensor is not NULL and x != s.tensor: return False
    if s.grad_of != NONE and tensor_impl(x) != tensor_grad(
            slot_tensor(t, n, slot_row(t, n.slot_at + s.grad_of), leaves)): return False
    if s.same != NONE and x != slot_tensor(t, n, slot_row(t, n.slot_at + s.same), leaves): return False
    for j in range(n.slot_n if s.apart else 0):
        other = slot_row(t, n.slot_at + j)
        if j == k or other.autograd != s.autograd or other.same == k or s.same == j: continue
        if (s.same == NONE or other.same != s.same) and slot_tensor(t, n, other, leaves) == x: return False
    return True

cdef int guard_overlaps(Table* t, Node* n, PyObject* x, PyObject** leaves) noexcept nogil:
    """Does a tensor that is copied beforehand share bytes with one that the graph writes?"""
    cdef int32_t k
    cdef Slot* s
    cdef PyObject* w
    for k in range(n.slot_n):
        s = slot_row(t, n.slot_at + k)
        if not s.written: continue
        w = slot_tensor(t, n, s, leaves)
        if w is not NULL and tensor_overlaps(w, x): return 1
    return 0

cdef int64_t guard_node(Table* t, Node* n, id_t spec, uint64_t* ambient, PyObject** leaves) noexcept nogil:
    """FITS, or why not: a Miss in the upper half, the index of the slot in the lower."""
    cdef int32_t k
    cdef int64_t why
    cdef Grad* g
    cdef void* now
    if n.spec != spec: return miss(MISS_SPEC, 0)
    if (n.ambient[0] != ambient[0] or n.ambient[1] != ambient[1]
            or n.ambient[2] != ambient[2]): return miss(MISS_AMBIENT, 0)
    for k in range(n.slot_n):
        why = guard_slot(t, n, k, leaves)
        if why != FITS: return why
    for k in range(n.grad_n):
        g = grad_row(t, n.grad_at + k)
        now = tensor_grad(slot_tensor(t, n, slot_row(t, n.slot_at + g.slot), leaves))
        if (now is NULL) != g.was_none or (g.was is not NULL and now != g.was):
            return miss(MISS_GRAD, k)
    return FITS

cdef int guard_watches(Table* t, Node* n) noexcept nogil:
    """Do all watched dicts stand as they did, with nothing to compare at each call?"""
    cdef int32_t k
    cdef Watch* w
    for k in range(n.watch_n):
        w = watch_row(t, n.watch_at + k)
        if w.holder is NULL or dict_tag(w.holder) != w.tag: return 0
    return 1
