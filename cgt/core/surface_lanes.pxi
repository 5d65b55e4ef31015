# What Python sees of ops side by side (lanes.pxi).

def is_on_own_stream():
    """Does this thread launch on the recording's own stream?"""
    return cuda_current_stream(TABLE.rec.device) == TABLE.rec.stream

def lane_run(int64_t home, list reads, list writes, bint stays):
    """The op that comes, which reads and writes memory at these places, is launched on a lane: its number. `home`: the
    id of the recording's own stream. `stays`: what comes of the capture is launched side by side, and not measured."""
    return lane_enter(&TABLE.rec, home, reads, writes, stays)

def lane_back(int lane, list reads, list writes, list made):
    """It was. `made`: memory that is new. [(memory that it uses, the other lane that made that)]"""
    return lane_leave(&TABLE.rec, lane, reads, writes, made)

def lane_length(int lane): return LANE_LENGTH.at[lane]
def lane_passed(int lane, int other, int number):
    """Is it behind this op of another lane?"""
    return LANE_CLOCK[lane].at[other] >= number

def lanes_wait():
    """All that comes on lanes waits for all that was. Are there any?"""
    global LANES_OWN
    if LANES.empty(): return False
    LANES_OWN = last_nodes(TABLE.rec.stream)    # which stands behind all
    lanes_meet(LANES_OWN)
    return True

# The same without a capture, for tests: nodes are numbers.
def lanes_begin(list nodes): lanes_reset(nodes)
def lanes_meet_at(list nodes): lanes_meet(nodes)
def lanes_last(): return lanes_ends()
def lane_choose(list reads, list writes):
    """(lane, nodes behind which the op must stand)"""
    cdef Row need = lanes_need(reads, writes)
    lane = lanes_choose(&need)
    return lane, lane_take(lane, &need)
def lane_ran(int lane, list nodes, list reads, list writes, list made):
    return lane_put(lane, nodes, reads, writes, made)

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

def wide_end(int n, bint chain):
    """Go on with one of the forms. The caller holds the paths."""
    check(CUDA, wide_settle(&TABLE, node_now(n), chain), CALL_INSTANTIATE)

def graph_shape(int n):
    """(how many nodes the graph of this node has, [(one, another that waits for it), ...]), as it is launched, by the
    order in which they were made. None: it is the host's, or has none. Of segments it is the last one's."""
    mine = path_row(&TABLE, node_now(n).path).driver == CUDA and node_now(n).graph is not NULL
    return shape_of(<cu.CUgraph>node_now(n).graph) if mine else None
