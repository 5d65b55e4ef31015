# The hot path: find the node, bind its slots, take its outputs, launch. The two loops that hold
# Python objects are in leaves.pxi; nothing else here allocates on a hit.

cdef int REUSE_OUTPUTS = 1        # 0 where private.py does not trust this torch's reference counts

cdef bint dropout_holds(Table* t, id_t n) noexcept:
    """Would eager draw from this buffer? (In inference mode nobody counts them, but then PyTorch has let go of the
    old.)"""
    return (cuda_dropout_now(path_row(t, node_row(t, n).path).device) == node_row(t, n).dropout
            and storage_uses(node_row(t, n).dropout_buffer) > 1)

cdef int64_t node_why(Table* t, id_t n, id_t s, uint64_t* ambient, PyObject** leaves) except -1:
    """FITS, or why the node does not take a call: a Miss and what it is about (guard_node). A hit and a report both ask
    here. Places come last, since to compare one may call Python, but where they tell what a slot's tensor is."""
    cdef int32_t k
    if node_row(t, n).follows:
        k = places_hold(t, n)
        if k != NONE: return miss(MISS_PLACE, k)
        k = follows_same(t, n) if node_row(t, n).follows > 1 else NONE
        if k != NONE: return miss(MISS_SAME, k)
    cdef int64_t why = guard_node(t, node_row(t, n), s, ambient, leaves)
    if why != FITS: return why
    if node_row(t, n).dropout and not dropout_holds(t, n): return miss(MISS_DROPOUT, 0)
    k = deads_alive(t, node_row(t, n))
    if k != NONE: return miss(MISS_ALIVE, k)
    k = NONE if node_row(t, n).follows else places_hold(t, n)
    if k != NONE: return miss(MISS_PLACE, k)
    k = numbers_meet(t, n, s, leaves) if node_row(t, n).len[NUMBERS] else NONE
    return FITS if k == NONE else miss(MISS_NUMBER, k)

cdef id_t guard_match(Table* t, id_t path, id_t parent, id_t f, id_t s, PyObject** leaves) except -2:
    """The child of `parent` for f that accepts these leaves, moved to the front; or NONE. The newest
    match is tried at once; the others cost one or two compares until they fit."""
    cdef uint64_t ambient[3]
    cdef id_t before, n = first_child(t, path, parent, f)
    if n == NONE: return NONE
    ambient_now(ambient)
    if node_why(t, n, s, ambient, leaves) == FITS: return n
    if node_row(t, n).next == NONE: return NONE
    cdef uint64_t key = call_key(s, ambient, leaves, spec_row(t, s).n_leaves)
    while node_row(t, n).next != NONE:
        before = n
        n = node_row(t, n).next
        if node_row(t, n).key != key or node_why(t, n, s, ambient, leaves) != FITS: continue
        node_row(t, before).next = node_row(t, n).next
        node_row(t, n).next = first_child(t, path, parent, f)
        edge_find(t, path, parent, f).first = n
        return n
    return NONE

cdef id_t path_find(Table* t, id_t path, id_t f, id_t s, PyObject** leaves, id_t* parent) except -2:
    """The node that a call becomes, or NONE: a child of the node that ran last, or of the nearest ancestor behind which
    nothing is alive. `parent`: where it would be recorded. May end the iteration under way; writes nothing else."""
    cdef id_t n, at = path_row(t, path).current
    while at != NONE:
        if not path_ends(t, path, at, f):
            n = guard_match(t, path, at, f, s, leaves)
            if n != NONE: return n
        if not node_over(t, path_row(t, path), at): break
        at = node_row(t, at).parent
    parent[0] = at
    if path_continues(t, path, at, f, leaves, spec_row(t, s).n_leaves): return NONE
    parent[0] = NONE
    n = guard_match(t, path, NONE, f, s, leaves)
    if n != NONE: path_leave(path_row(t, path), at)
    return n

cdef id_t leaf_path(Table* t, id_t f, PyObject** leaves, int32_t n) noexcept nogil:
    """Where to look for f's nodes: on the only path that has any, or by the leaves' device, or by what is current
    (devices.py)."""
    cdef Fn* fn = fn_row(t, f)
    cdef int32_t k, gpu
    cdef id_t path = 0
    cdef bint here = False
    if fn.paths & (fn.paths - 1) == 0: return fn.path
    for k in range(n):
        gpu = tensor_device(leaves[k])
        if gpu < 0: continue
        here = here or gpu == current_gpu()
        if path == 0 or gpu + 1 < path: path = gpu + 1
    if here or not fn.paths >> path & 1: path = current_gpu() + 1
    return path if fn.paths >> path & 1 else fn.path

cdef int out_intact(Table* t, Node* n, Out* first, Out* o) noexcept:
    """Is the tensor that was handed out last still what the recording writes?"""
    return (REUSE_OUTPUTS and o.tensor is not NULL and Py_TYPE_(o.tensor) == Py_TYPE_(o.proto)
            and tensor_storage(o.tensor) == first.storage
            and tensor_ptr(o.tensor) == tensor_ptr(o.proto)
            and impl_same(tensor_impl(o.tensor), o.keys, o.data_kind, 0, o.ndim, node_dim(t, n, o.dim_at)))

cdef int out_renew(Table* t, id_t n, int32_t k) except -1:
    """New tensors for the group of fresh output k: its storage moved away, or a user changed it."""
    cdef int32_t j
    for j in range(k, node_row(t, n).len[OUTS]):
        o = node_out(t, node_row(t, n), j)
        if j != k and not (o.kind == SHARED and o.ref == k): continue
        dims = node_dim(t, node_row(t, n), o.dim_at)
        if j == k: made = out_make(o.proto, o.keys, o.offset, o.ndim, dims)
        else:
            first = node_out(t, node_row(t, n), k)
            made = out_share(first.tensor, o.proto, o.keys, o.offset, o.ndim, dims)
        o = node_out(t, node_row(t, n), j)              # making an object may collect garbage
        old, o.tensor = o.tensor, made
        wrapper_forget(t, n, o.inside)
        o = node_out(t, node_row(t, n), j)
        if j == k:
            before, o.storage = o.storage, tensor_storage(made)
            storage_keep(o.storage)
            storage_drop(before)
        Py_XDECREFX(old)
    return 0

cdef bint wrapper_intact(Table* t, id_t n, int32_t k) except -1:
    """Has the tensor subclass that was handed out last the tensors inside that the recording writes?"""
    cdef Out* o = node_out(t, node_row(t, n), k)
    if o.tensor is NULL: return False
    held = <object>o.tensor
    _, inside, names = <object>o.ops
    for j, name in zip(inside, names):
        one = getattr(held, name, None)
        if <PyObject*>one != node_out(t, node_row(t, n), <id_t>j).tensor: return False
    return True

cdef int wrapper_ready(Table* t, id_t n, int32_t k) except -1:
    """Output k, around outputs that are ready: the same object as last time, as if new; or another one."""
    if not wrapper_intact(t, n, k):
        make, inside, _ = <object>node_out(t, node_row(t, n), k).ops
        made = make([<object>node_out(t, node_row(t, n), <id_t>j).tensor for j in inside])
        Py_INCREF(made)
        o = node_out(t, node_row(t, n), k)
        old = o.tensor
        o.tensor = <PyObject*>made
        Py_XDECREFX(old)
    o = node_out(t, node_row(t, n), k)
    out_unlearn(o.tensor)
    out_set_version(o.tensor, o.version)
    return 0

cdef int outs_ready(Table* t, id_t n) except -1:
    """Fresh outputs: the same tensors as last time, as if new; or new ones."""
    cdef Node* node = node_row(t, n)
    cdef int32_t k, j, renew
    for k in range(node.len[OUTS]):
        o = node_out(t, node, k)
        if o.kind == WRAPPER:
            wrapper_ready(t, n, k)
            node = node_row(t, n)
        if o.kind != FRESH: continue
        first = o
        renew = 0
        for j in range(k, group_end(node, k, first)):
            o = node_out(t, node, j)
            if j == k or (o.kind == SHARED and o.ref == k): renew |= not out_intact(t, node, first, o)
        if renew:
            out_renew(t, n, k)
            node = node_row(t, n)
        first = node_out(t, node, k)
        out_reset(first.tensor)
        out_set_version(first.tensor, first.version)
        for j in range(k + 1, group_end(node, k, first)):
            o = node_out(t, node, j)
            if o.kind == SHARED and o.ref == k:
                out_reset(o.tensor)
                out_share_version(o.tensor, first.tensor)
    return 0

cdef object root_give(Table* t, id_t n, int32_t k, void* backward):
    """Output k with the call's history. The cached tensor must not lead to its own backward: it would never be free."""
    cdef Out* o = node_out(t, node_row(t, n), k)
    cdef int64_t* dims = node_dim(t, node_row(t, n), o.dim_at)
    cdef PyObject* shared = out_share(o.tensor, o.proto, o.keys, o.offset, o.ndim, dims)
    made = <object>shared
    Py_DECREFX(shared)
    backward_give(backward, shared)
    return made

cdef int parts_give(Table* t, id_t n, PyObject** leaves, void* backward, PyObject** tensors, list views) except -1:
    """Views that require grad, as do what they are views of: made by autograd. `views` owns them."""
    cdef int32_t k, n_given = node_row(t, n).n_given
    values = None
    for k in range(n_given):
        o = node_out(t, node_row(t, n), k)
        if o.kind != PART: continue
        if values is None:
            bases, steps = <tuple>o.ops         # the same for all of them
            values = [part_base(t, n, base, leaves, backward, tensors) for base in bases]
            MAKE_VIEWS[0](values, steps)
            views.append(values)
            o = node_out(t, node_row(t, n), k)
        made = values[o.ref]
        tensors[k] = <PyObject*>made
    for k in range(n_given):
        o = node_out(t, node_row(t, n), k)
        if o.kind == AGAIN: tensors[k] = tensors[o.ref]
    return 0

cdef object part_base(Table* t, id_t n, id_t k, PyObject** leaves, void* backward, PyObject** tensors):
    """Output k, which may be none of the result's."""
    cdef Out* o = node_out(t, node_row(t, n), k)
    if not o.hidden: return <object>tensors[k]
    return slot_object(t, n, o.ref, leaves) if o.kind == INPUT else root_give(t, n, k, backward)

cdef inline list owned(list views, object x):
    """With this one. None is a list of nothing: most hits make nothing."""
    if views is None: return [x]
    views.append(x)
    return views

cdef object outs_give(Table* t, id_t n, PyObject** leaves, void* backward):
    """The call's result. `backward`: the autograd node of what requires grad in it, or NULL."""
    cdef Node* node = node_row(t, n)
    cdef Objects tensors
    cdef id_t at = node.ret_at
    cdef int32_t k, next_ = 0
    cdef bint parts = False
    cdef list views = None          # owns what is made here until the result does
    if node.n_given == 1 and node.ret_n == 1 and node_out(t, node, 0).kind == FRESH \
            and backward is NULL:
        return <object>node_out(t, node, 0).tensor             # one tensor: the common result
    for k in range(node_row(t, n).n_given):
        o = node_out(t, node_row(t, n), k)
        if o.kind == FRESH or o.kind == SHARED:
            if o.root:
                x = root_give(t, n, k, backward)
                views = owned(views, x)
                tensors.push_back(<PyObject*>x)
            else: tensors.push_back(o.tensor)
        elif o.kind == AGAIN:
            tensors.push_back(tensors.data()[o.ref])
        elif o.kind == PART:
            parts = True
            tensors.push_back(NULL)
        elif o.kind == READOUT:
            what = number_value(node_number(t, node_row(t, n), o.ref)) if o.ref != NONE \
                else (<object>o.ops)[0](<object>o.proto)
            views = owned(views, what)
            tensors.push_back(<PyObject*>what)
        else:                           # INPUT or VIEW
            x = slot_object(t, n, o.ref, leaves)
            o = node_out(t, node_row(t, n), k)
            if o.kind == VIEW and x is not None:
                x = out_view(x, o.proto, o.keys, o.shift, o.ndim, node_dim(t, node_row(t, n), o.dim_at), o.version)
            views = owned(views, x)
            tensors.push_back(<PyObject*>x)
    if parts:
        if views is None: views = []
        parts_give(t, n, leaves, backward, tensors.data(), views)
    node = node_row(t, n)
    if node.ret_make is not NULL:
        return (<object>node.ret_make)([<object>tensors.data()[k] for k in range(node.n_given)])
    return leaves_build(t, &at, tensors.data(), &next_)

cdef object effect_part(Table* t, id_t n, id_t out, id_t number, PyObject** leaves):
    """An output, or a number, for a place."""
    if number != NONE: return number_value(node_number(t, node_row(t, n), number))
    o = node_out(t, node_row(t, n), out)
    if o.kind == READOUT: return (<object>o.ops)[0](<object>o.proto)
    return slot_object(t, n, o.ref, leaves) if o.kind == INPUT else <object>o.tensor

cdef object effect_value(Table* t, id_t n, Effect e, PyObject** leaves):
    """What a place gets."""
    if e.out != NONE or e.number != NONE: return effect_part(t, n, e.out, e.number, leaves)
    by = <object>e.by
    return by[0]([effect_part(t, n, out, number, leaves) for out, number in by[1]]) if e.made else by

cdef inline void number_put(Table* t, Node* node, Effect* e, PyObject* x) noexcept nogil:
    """Into a tensor's memory on the host."""
    cdef int size = node_guard(t, node, e.slot).itemsize
    number_write(node_number(t, node, e.number), tensor_at(x, size), size)

cdef int effects_happen(Table* t, id_t n, PyObject** leaves, bint bump) except -1:
    """What the recording does besides writing bytes: to _version and .grad of tensors, and to numbers in places.
    Without `bump`: some of it was done while it was recorded."""
    cdef Node* node = node_row(t, n)
    cdef Effect put
    cdef int32_t k
    for k in range(node.len[EFFECTS]):
        node = node_row(t, n)               # setting a .grad may free what was there
        e = node_effect(t, node, k)
        if e.kind == ADVANCES:
            if bump: place_advance(t, n, e[0])
            continue
        if e.kind == PUTS or e.kind == APPENDS:
            put = e[0]
            value = effect_value(t, n, put, leaves)
            if put.kind == PUTS: place_change(t, n, put, value)
            else: place_append(t, n, put, value)
            continue
        x = slot_tensor(t, node, e.slot, leaves)
        if x is NULL: continue              # a gradient that another thread took away
        if e.kind == WRITES:
            if e.number != NONE: number_put(t, node, e, x)
            if bump and e.bumps: tensor_bump(x, e.bumps)
            continue
        if e.kind == REQUIRES_GRAD:
            tensor_require_grad(x)
            continue
        made = node_out(t, node, e.out).tensor if e.out != NONE else NULL
        if tensor_grad(x) != (tensor_impl(made) if made is not NULL else NULL):
            tensor_set_grad(x, made)
    return 0

cdef object replay(Table* t, id_t n, PyObject** leaves, void* stream, bint launch, bint bump, bint met):
    """Bind, take outputs, launch on the caller's current stream; n is the path's last node from now on. The caller
    holds the path's lock. Outputs are taken before the GIL is let go, unless some are made of what the graph left on
    the host. `met`: all segments but the last ran for this call."""
    cdef Node* node = node_row(t, n)
    cdef id_t path = node.path
    cdef Driver* d = &DRIVERS[path_row(t, path).driver]
    cdef int driver = path_row(t, path).driver, device = path_row(t, path).device, code
    cdef int32_t waits = node.waits
    cdef void* exec_ = node.exec
    cdef Spread* spread = node.spread
    cdef void* backward = NULL
    cdef Tensors held
    grads_hold(t, n, leaves, &held)
    stream_order(path_row(t, path), d, stream)
    outs_ready(t, n)
    if node_row(t, n).stale: scalars_bind(t, n, d)
    if launch and node_row(t, n).len[PATCHES] and not met:
        patches_bind(t, n, first_exec(t, node_row(t, n)), d, leaves, stream)
    if node_row(t, n).site is not NULL: backward = backward_make(t, n, leaves)
    try:
        if not waits: result = outs_give(t, n, leaves, backward)
        path_row(t, path).current = n
        path_row(t, path).launches += 1
        t.launches += 1
        node_row(t, n).used = t.launches
        if launch:
            if node_row(t, n).watchdog is not NULL: (<Watchdog*>node_row(t, n).watchdog).note(stream)
            with nogil:
                code = launch_among(d, spread, exec_, stream, device)
                if code == 0 and waits: code = fault(CALL_WAIT) or d.wait(stream, device)
            check(driver, code, CALL_LAUNCH)
        if waits: result = outs_give(t, n, leaves, backward)
        effects_happen(t, n, leaves, bump)
        if is_shared(path_row(t, path)) and driver == CUDA and \
                fn_row(t, node_row(t, n).fn).outputs == RESCUE: outs_part(t, n)
        if backward is not NULL: backward_arm(backward)
        if fn_row(t, node_row(t, n).fn).backward: backward_note(t, node_row(t, n), <PyObject*>result)
    finally:
        if backward is not NULL: backward_drop(backward)
    return result

cdef object call(Table* t, id_t f, PyObject* args, PyObject* kwargs, object on_miss, object function, dict reasons):
    """One call of a jitted function: a replay; else eager, if a verdict says so; else Python decides."""
    cdef Walk w
    cdef id_t s = NONE, n, path, parent, proves = NONE
    cdef PyObject* reason = NULL
    cdef bint met, due = False, audited = False
    cdef void* stream = NULL
    fn_row(t, f).calls += 1
    fn_row(t, f).unknown = 0
    if ambient_blocker() != 0: return on_miss(NONE, <object>args, <object>kwargs)
    why = None
    walk_begin(t, &w)
    try:
        while True:
            s = leaves_take(t, f, args, kwargs, &w)
            if s == NONE or fn_row(t, f).path == NONE:
                reason = verdict_find(t, f, s, NONE, NONE, w.leaves, 0)
                break
            path = leaf_path(t, f, w.leaves, spec_row(t, s).n_leaves)
            p = path_row(t, path)
            if p.driver == CUDA:
                cuda_thread_ready(p.device)
                stream = cuda_current_stream(p.device)
                if path_captured(p, stream): break
            if path_is_mine(p): break
            if not path_lock(p):
                path_wait(p)
                continue
            try:
                while True:
                    n = path_find(t, path, f, s, w.leaves, &parent)
                    if n == NONE or path_row(t, path).stale == NONE: break
                    # A rescued output may be an argument: its address changed, so look again.
                    if path_release(t, path, n, w.leaves, spec_row(t, s).n_leaves) == 0: break
                if n == NONE:
                    reason = verdict_find(t, f, s, path, parent, w.leaves, 0)
                    break
                audited = node_row(t, n).audit_at and node_row(t, n).n_replay + 1 >= node_row(t, n).audit_at
                if audited or (node_row(t, n).moved and node_row(t, n).unproven):
                    node_row(t, n).unproven = node_row(t, n).audit_at = 0
                    proves = n
                    break
                range_ = range_begin(fn_row(t, f).range_name)
                try:
                    met = node_row(t, n).len[READS] != 0
                    if met:
                        parent = node_row(t, n).parent
                        # The values are not known: this call is like no other.
                        if fn_row(t, f).vain == VAIN and fn_row(t, f).calls % TRY_AGAIN:
                            reason = verdict_find(t, f, s, path, parent, w.leaves, fn_row(t, f).calls)
                        n = reads_meet(t, n, s, stream, w.leaves, &due) if reason is NULL else NONE
                    if n != NONE: result = replay(t, n, w.leaves, stream, True, True, met)
                finally:
                    if range_ is not NULL: range_end(range_)
                if n == NONE:
                    if reason is NULL and not due:
                        reason = verdict_find(t, f, s, path, parent, w.leaves, fn_row(t, f).unknown)
                    break
            except DriverError as error:
                raise FAILED[0](f, error) from error
            finally:
                path_unlock(path_row(t, path))
            fn_row(t, f).replays += 1
            fn_row(t, f).path = path
            node_row(t, n).n_replay += 1
            if node_row(t, n).n_replay == 1: verdicts_end(t, node_row(t, n))
            if met and has_islands(t, n): SWEEP[0]()
            return result
    finally:
        if reason is not NULL: why = <object>reason     # before a finalizer can drop the verdict
        walk_end(&w)
    if why is not None: return verdict_run(t, f, why, function, <object>args, <object>kwargs, reasons)
    if proves == NONE: return on_miss(s, <object>args, <object>kwargs, due)
    fn_row(t, f).calls -= 1         # it comes again
    return on_miss(s, <object>args, <object>kwargs, False, proves, audited)
