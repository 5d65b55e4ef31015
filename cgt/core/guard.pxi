# Which node accepts these leaves? Pointer and metadata comparisons only: nothing here can touch
# Python, and the compiler proves it. Reads nodes and their parts; writes nodes.moved alone.

cdef inline int64_t miss(int why, int64_t where) noexcept nogil: return (<int64_t>why << 32) | where

cdef inline PyObject* slot_tensor(Table* t, Node* n, id_t k, PyObject** leaves) noexcept nogil:
    """The call's tensor of slot k. Of a gradient: something to compare, no Python object (slot_object); or NULL."""
    cdef Guard* g = node_guard(t, n, k)
    if g.leaf != NONE: return leaves[g.leaf]
    if g.grad_of == NONE: return g.tensor
    owner = node_guard(t, n, g.grad_of)
    return tensor_grad_tensor(owner.tensor if owner.leaf == NONE else leaves[owner.leaf])

cdef inline uintptr_t align_of(Node* n) noexcept nogil:
    """The alignment that allocators give: 512 bytes on CUDA, 64 on the host. Kernels choose vector
    widths, and with them the order of sums, by an address's remainder."""
    return 64 if n.path == 0 else 512

cdef inline char* slot_ptr(Table* t, Node* n, id_t k) noexcept nogil:
    """Where a pinned slot must be. A rescue on the host moves the recording, so an output of an
    ancestor is where that one writes it now."""
    cdef Slot* s = node_slot(t, n, k)
    if s.from_node == NONE: return node_guard(t, n, k).ptr
    return tensor_storage_ptr(node_out(t, node_row(t, s.from_node), s.from_out).proto) + s.shift

cdef inline char* slot_at(Table* t, Node* n, id_t k, PyObject** leaves) noexcept nogil:
    """Where slot k's tensor begins today."""
    return tensor_at(slot_tensor(t, n, k, leaves), node_guard(t, n, k).itemsize)

cdef inline bint rebound_may_move(Table* t, Node* n, int32_t k, char* p) noexcept nogil:
    """To this address: in the same alignment class? Then the graph is told. NULL is none: memory was taken away."""
    cdef Guard* g = node_guard(t, n, k)
    n.moved = 1
    if p is NULL: return g.ptr is NULL
    return (<uintptr_t>p ^ <uintptr_t>g.ptr) % align_of(n) == 0 or node_slot(t, n, k).align == NONE

cdef int64_t guard_odd(Table* t, Node* n, int32_t k, PyObject** leaves) noexcept nogil:
    """What a slot guards besides its row of guards, which fits: an address that is found today, bytes, which of
    several tensors it is."""
    cdef Guard* g = node_guard(t, n, k)
    cdef Slot* s = node_slot(t, n, k)
    cdef PyObject* x = slot_tensor(t, n, k, leaves)
    cdef char* p = tensor_at(x, g.itemsize)
    if s.whole and tensor_offset(x) != 0: return miss(MISS_ALIGN, k)
    if g.binding == PINNED:
        if p != slot_ptr(t, n, k): return miss(MISS_POINTER, k)
    elif g.binding == COPIED or g.binding == REBOUND:
        if g.binding == COPIED:
            if p != g.ptr and is_loose(g): n.moved = 1
            if p is NULL and g.ptr is not NULL: return miss(MISS_ALIGN, k)
            if s.align != NONE and <int32_t>(<uintptr_t>p % align_of(n)) != s.align: return miss(MISS_ALIGN, k)
        elif p != g.ptr and not rebound_may_move(t, n, k, p): return miss(MISS_ALIGN, k)
        if s.beside != NONE and p - slot_at(t, n, s.beside, leaves) != s.shift: return miss(MISS_OVERLAP, k)
        if n.writes and not is_loose(g) and guard_overlaps(t, n, k, x, leaves): return miss(MISS_OVERLAP, k)
    elif g.binding == TWIN:
        if p != tensor_at(slot_tensor(t, n, s.copy, leaves), g.itemsize): return miss(MISS_POINTER, k)
    elif g.binding == VALUE:
        if p is NULL or memcmp(p, node_dim(t, n, s.value), tensor_span(x)) != 0: return miss(MISS_VALUE, k)
    if s.identity and not guard_identity(t, n, k, x, leaves): return miss(MISS_SAME, k)
    if s.follows and is_argument(t, n, x, leaves): return miss(MISS_SAME, k)
    return FITS

cdef bint is_argument(Table* t, Node* n, PyObject* x, PyObject** leaves) noexcept nogil:
    """Is this tensor an argument of the call? (When it was recorded, what is followed was none.)"""
    for k in range(spec_row(t, n.spec).n_leaves):
        if leaves[k] == x: return True
    return False

cdef bint guard_identity(Table* t, Node* n, int32_t k, PyObject* x, PyObject** leaves) noexcept nogil:
    """Is argument x to the rest of the call what it was: the tensor in a place, a .grad, another argument, or
    none of those to which gradients flow? What was one tensor has one slot's memory and gradient."""
    cdef Slot* s = node_slot(t, n, k)
    cdef Guard* g = node_guard(t, n, k)
    if g.tensor is not NULL and x != g.tensor: return False
    if g.grad_of != NONE and tensor_impl(x) != tensor_grad(slot_tensor(t, n, g.grad_of, leaves)): return False
    if s.same != NONE and x != slot_tensor(t, n, s.same, leaves): return False
    for j in range(n.len[SLOTS] if s.apart else 0):
        same = node_slot(t, n, j).same
        if j == k or node_guard(t, n, j).autograd != g.autograd or same == k or s.same == j: continue
        if (s.same == NONE or same != s.same) and slot_tensor(t, n, j, leaves) == x: return False
    return True

cdef int guard_overlaps(Table* t, Node* n, int32_t at, PyObject* x, PyObject** leaves) noexcept nogil:
    """Does a tensor that is copied beforehand share bytes with one that the graph writes? One that is written itself,
    and copied back, with any other that the graph has to do with?"""
    for k in range(n.len[SLOTS] if node_slot(t, n, at).back != NONE else 0):
        if k == at or node_guard(t, n, k).binding == UNUSED: continue
        if node_guard(t, n, k).binding == TWIN and node_slot(t, n, k).copy == at: continue
        w = slot_tensor(t, n, k, leaves)
        if w is not NULL and tensor_overlaps(w, x): return 1
    if node_slot(t, n, at).back != NONE: return 0
    for k in range(n.len[EFFECTS]):
        if node_effect(t, n, k).kind != WRITES: continue
        w = slot_tensor(t, n, node_effect(t, n, k).slot, leaves)
        if w is not NULL and tensor_overlaps(w, x): return 1
    return 0

cdef inline bint is_loose(Guard* g) noexcept nogil:
    """Is it a gradient that may be another tensor at each call? What all others guard one by one, grads_apart does."""
    return g.leaf == NONE and g.grad_of != NONE and (g.binding == COPIED or g.binding == REBOUND)

cdef bint grads_apart(Table* t, Node* n, PyObject** leaves) noexcept nogil:
    """Do the gradients that may lie elsewhere share bytes with nothing else of the call? So each is none of the other
    tensors either, as when it was recorded."""
    cdef Extents extents
    for k in range(n.len[SLOTS]):
        x = slot_tensor(t, n, k, leaves)
        if x is not NULL: extent_add(x, is_loose(node_guard(t, n, k)), &extents)
    return extents_apart(&extents)

cdef enum: BUNCH = 32               # tensors whose memory is asked for at once

cdef int64_t guard_slots(Table* t, Node* n, PyObject** leaves) noexcept nogil:
    """guard_node, of what is about tensors. A tensor's parts lie in three or four places of memory that the calls in
    between may have pushed out of the caches: so those of a bunch are fetched together, then compared."""
    cdef void* impls[BUNCH]
    cdef Guard* g = node_guard(t, n, 0)
    cdef int64_t* dims = node_dim(t, n, 0)
    cdef int64_t why, late = FITS               # a gradient's miss is told if there is no other
    cdef int32_t at = 0, k, m
    while at < n.len[SLOTS]:
        m = n.len[SLOTS] - at if n.len[SLOTS] - at < BUNCH else BUNCH
        for k in range(m):
            x = slot_tensor(t, n, at + k, leaves)
            impls[k] = tensor_impl(x) if x is not NULL else NULL
            impl_near(impls[k])
        for k in range(m):
            if impls[k] is not NULL: impl_reach(impls[k])
        for k in range(m):
            i = impls[k]
            if i is NULL or not impl_same(i, g.keys, g.data_kind, g.autograd, g.ndim, dims + g.dim_at):
                return miss(MISS_META, at + k)
            if g.grad != ANY_GRAD and impl_has_grad(i) != g.grad and late == FITS:
                late = miss(MISS_GRAD, 0)
            if g.odd:
                why = guard_odd(t, n, at + k, leaves)
                if why != FITS: return why
            elif g.binding != UNUSED and impl_at(i, g.itemsize) != g.ptr:
                if g.binding == PINNED: return miss(MISS_POINTER, at + k)
                if not rebound_may_move(t, n, at + k, impl_at(i, g.itemsize)): return miss(MISS_ALIGN, at + k)
            g += 1
        at += m
    return late

cdef int64_t guard_node(Table* t, Node* n, id_t spec, uint64_t* ambient, PyObject** leaves) noexcept nogil:
    """FITS, or why not: a Miss in the upper half, in the lower the index of the slot; of a gradient, of its row."""
    cdef int32_t k
    if n.spec != spec: return miss(MISS_SPEC, 0)
    if (n.ambient[0] != ambient[0] or n.ambient[1] != ambient[1]
            or n.ambient[2] != ambient[2]): return miss(MISS_AMBIENT, 0)
    cdef int64_t why = guard_slots(t, n, leaves)
    if why == FITS and n.grads_move and (n.moved or n.follows or spec_row(t, spec).n_leaves):
        if not grads_apart(t, n, leaves): return miss(MISS_OVERLAP, 0)
    if why == FITS and not n.same_grads: return FITS
    if why != FITS and why >> 32 != MISS_GRAD: return why
    for k in range(n.len[GRADS]):
        g = node_grad(t, n, k)
        now = tensor_grad(slot_tensor(t, n, g.slot, leaves))
        if (now is NULL) != g.was_none or (g.was is not NULL and now != g.was): return miss(MISS_GRAD, k)
    return FITS
