# For tests, benches and reports; and for after a fork.

def tuple_put(object holder, object one, object other):
    """Put another object where a tuple holds this one: it stood for that while a function was recorded."""
    for k in range(PyTuple_GET_SIZEX(<PyObject*>holder)):
        if PyTuple_GET_ITEMX(<PyObject*>holder, k) != <PyObject*>one: continue
        Py_INCREF(other)
        PyTuple_SET_ITEM(holder, k, other)
        Py_DECREFX(<PyObject*>one)

def forget(bint recording):
    """After fork: the parent's CUDA context is not ours, nor are its threads. Drop rows without touching the driver.
    `recording`: this thread was, and goes on; what another one recorded is over."""
    for k in range(MAX_DEVICES): WATCHDOGS[k] = NULL
    if TABLE.rec.active and not recording:
        if TABLE.rec.driver == HOST: record_abort(&TABLE)
        TABLE.rec.active = 0
    for n in range(TABLE.nodes.n):
        if node_row(&TABLE, n).alive and path_row(&TABLE, node_row(&TABLE, n).path).driver == CUDA:
            node_row(&TABLE, n).graph = node_row(&TABLE, n).exec = NULL
            for k in range(node_row(&TABLE, n).len[READS]):
                node_read(&TABLE, node_row(&TABLE, n), k).graph = node_read(&TABLE, node_row(&TABLE, n), k).exec = NULL
            node_row(&TABLE, n).pool = node_row(&TABLE, n).state = node_row(&TABLE, n).watchdog = NULL
            node_row(&TABLE, n).spread = NULL
            node_row(&TABLE, n).wide = NULL
    for k in range(TABLE.paths.n):
        path_row(&TABLE, k).lock = <void*>new mutex()
        path_row(&TABLE, k).owner = 0
        path_row(&TABLE, k).event = NULL
        path_row(&TABLE, k).fleeting = path_row(&TABLE, k).event_only = 0

def fault_set(str call, int after, int code):
    """Make driver call number `after` (from 0) of this name fail with `code`. For tests."""
    FAULT.call = CALL_NAMES.index(call) if call else NONE
    FAULT.after = after
    FAULT.code = code

def books():
    """Counts of living rows and handles; equal before and after whatever should leave no trace."""
    return {
        "rows": TABLE.allocations, "fns": sum([fn_row(&TABLE, k).alive for k in range(TABLE.fns.n)]),
        "specs": sum([spec_row(&TABLE, k).alive for k in range(TABLE.specs.n)]),
        "nodes": sum([node_row(&TABLE, k).alive for k in range(TABLE.nodes.n)]),
        "ops": TABLE.ops.n, "recording": TABLE.rec.active, "blocks": blocks_nbytes(),
    } | {name: TABLE.parts[k].n for k, (name, _) in enumerate(PARTS)}

def check_table(): table_check(&TABLE)
def built_against(): return CGT_TORCH_MAJOR, CGT_TORCH_MINOR
def debug_build(): return bool(CGT_DEBUG)
def host_bytes(): return blocks_nbytes()

def time_launches(list execs, uintptr_t stream, int n):
    """Seconds per cuGraphLaunch of raw CUgraphExecs in turn, from C without the GIL: the floor of benches."""
    cdef int k, code = 0, n_execs = <int>len(execs), device = cuda_current_device()
    cdef uintptr_t[SCRATCH] handle
    if not 0 < n_execs <= SCRATCH: raise ValueError(f"1 to {SCRATCH} execs in turn")
    for k in range(n_execs): handle[k] = execs[k]
    with nogil:
        began = now()
        for k in range(n):
            code = cuda_launch(<void*>handle[k % n_execs], <void*>stream, device)
            if code: break
        began = now() - began
    check(CUDA, code, CALL_LAUNCH)
    return began / n

def time_guards(int f, tuple args, dict kwargs, int n):
    """Seconds per guard of a call: leaves taken and the node found, nothing bound or launched."""
    cdef Walk w
    cdef id_t s = NONE, found = NONE, parent
    walk_begin(&TABLE, &w)
    began = now()
    for k in range(n):
        s = leaves_take(&TABLE, f, <PyObject*>args, <PyObject*>kwargs, &w)
        found = path_find(&TABLE, fn_row(&TABLE, f).path, f, s, w.leaves, &parent) if s != NONE else NONE
    began = now() - began
    walk_end(&w)
    if found == NONE: raise ValueError("these arguments are not a hit")
    return began / n
