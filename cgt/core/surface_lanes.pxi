# What Python sees of ops side by side (lanes.pxi).

def lane_new(int device):
    """A stream of the device's that nobody else has, for good: those of torch's pools anybody may be given."""
    cdef void* stream = NULL
    check(CUDA, lane_make(device, &stream), CALL_BEGIN)
    return <uintptr_t>stream

def is_on_own_stream():
    """Does this thread launch on the recording's own stream?"""
    return cuda_current_stream(TABLE.rec.device) == TABLE.rec.stream

def lane_ends(uintptr_t stream):
    """The nodes behind which stands what this captured stream captures next; 0: of the recording's own."""
    return last_nodes(<void*>stream if stream else TABLE.rec.stream)

def lane_set(uintptr_t stream, list nodes, bint stays=False):
    """Let it be these. A stream that is not captured joins. `stays`: what comes of it is launched so."""
    cdef Recording* r = &TABLE.rec
    cdef void* lane = <void*>stream if stream else r.stream
    if not cuda_joined(lane):
        check(CUDA, lane_follow(r.device, r.stream, lane), CALL_BEGIN)
        LANES.push_back(lane)
        r.wide_stays = stays
    check(CUDA, lane_behind(lane, nodes), CALL_BEGIN)

def wide_edges(int n):
    """How many edges the other form of this node's graph has; 0: there is none, or it was chosen between them."""
    return (<Wide*>node_now(n).wide).n if node_now(n).wide is not NULL else 0

def wide_begin(int n):
    """Make what launches the other form. The caller holds the paths."""
    check(CUDA, fault(CALL_INSTANTIATE) or wide_make(&TABLE, node_now(n)), CALL_INSTANTIATE)

def wide_run(int n, bint chain):
    """Launch one of the forms alone, and wait. The caller holds the paths."""
    cdef Wide* w = <Wide*>node_now(n).wide
    cdef Path* p = path_row(&TABLE, node_now(n).path)
    cdef void* stream = DRIVERS[CUDA].stream(p.device)
    cdef float us = 0
    stream_order(p, &DRIVERS[CUDA], stream)
    check(CUDA, timed_launch(node_now(n).exec if chain else w.exec, stream, p.device, &us), CALL_LAUNCH)
    if w.us[not chain] == 0 or us < w.us[not chain]: w.us[not chain] = us
    return us

def wide_end(int n, bint chain):
    """Go on with one of the forms. The caller holds the paths."""
    check(CUDA, wide_settle(&TABLE, node_now(n), chain), CALL_INSTANTIATE)
