# Ops of a capture side by side (cgt/lanes/). A lane is a stream of ours that joins the capture, so that it has memory
# and workspaces of its own in the recording's pool. What an op waits for is told to the lane's stream before it runs:
# the nodes behind which its own will stand. The graph that comes of it is launched in one of two forms: its nodes in
# the order in which they were made, as a capture of one stream, or with these edges. It is a chain until both were
# measured (cgt/lanes/forms.py).
#
# Source: CUDA driver API, "Stream Management" (cuStreamUpdateCaptureDependencies), "Graph Management".

cdef enum: MAX_LANES = 8
ctypedef vector[uintptr_t] Handles      # of nodes

cdef struct Row:
    int32_t at[MAX_LANES]               # of each lane: so many of its ops

cdef struct Use:                        # of memory, which is known by where it begins
    int32_t home                        # the lane that made it, from 1; or 0
    int32_t wrote_on, wrote             # the op that wrote it last: its lane, its number there, from 1; or 0
    Row read                            # of each lane: the last op that read it since

cdef vector[void*] LANES                # streams that have joined the capture under way
cdef void* LANE_STREAMS[MAX_DEVICES][MAX_LANES]

# What is known of its ops. A lane is a row of ops, one behind the other. A vector clock says of each lane how far of
# every lane it is behind (Fidge, Mattern 1988): what an op waits for by another one is not waited for again.
cdef Row LANE_LENGTH, LANE_COMMON       # how many ops each lane has, and had when all waited for all
cdef Row LANE_CLOCK[MAX_LANES]
cdef vector[Row] LANE_OPS[MAX_LANES]    # the clock of each op, itself included
cdef vector[Handles] LANE_NODES[MAX_LANES]      # and its last nodes
cdef Handles LANE_ENDS[MAX_LANES]       # behind which the lane's next op stands
cdef Handles LANES_MET                  # behind which all do
cdef Handles LANES_OWN                  # and the recording's own stream
cdef unordered_map[uint64_t, Use] LANE_USES

cdef void lanes_reset(const Handles& nodes) noexcept:
    """A capture begins behind these nodes."""
    memset(&LANE_LENGTH, 0, sizeof(Row))
    LANE_USES.clear()
    for k in range(MAX_LANES):
        LANE_OPS[k].clear()
        LANE_NODES[k].clear()
    lanes_meet(nodes)

cdef void lanes_meet(const Handles& nodes) noexcept:
    """Everything that comes stands behind these nodes, which stand behind all that was."""
    global LANE_COMMON, LANES_MET
    cdef int k
    LANE_COMMON, LANES_MET = LANE_LENGTH, nodes
    for k in range(MAX_LANES): LANE_CLOCK[k], LANE_ENDS[k] = LANE_LENGTH, nodes

cdef Handles lanes_ends() noexcept:
    """Behind which stands what must be behind everything."""
    cdef Handles found
    cdef int k
    for k in range(MAX_LANES):
        if LANE_LENGTH.at[k] > LANE_COMMON.at[k]: handles_add(found, LANE_ENDS[k])
    return LANES_MET if found.empty() else found

cdef void handles_add(Handles& into, const Handles& more) noexcept:
    """Those that are not there."""
    cdef size_t j, k
    for k in range(more.size()):
        j = 0
        while j < into.size() and into[j] != more[k]: j += 1
        if j == into.size(): into.push_back(more[k])

cdef inline int32_t row_sum(Row* r) noexcept:
    cdef int32_t total = 0
    for k in range(MAX_LANES): total += r.at[k]
    return total

cdef inline void row_reach(Row* r, const Row* other) noexcept:
    """As far as both."""
    for k in range(MAX_LANES):
        if other.at[k] > r.at[k]: r.at[k] = other.at[k]

cdef Row lanes_need(list reads, list writes):
    """Which ops must have run before one that reads and writes this memory: of each lane the last."""
    cdef Row need
    cdef Use* use
    memset(&need, 0, sizeof(Row))
    for memories, writing in ((reads, False), (writes, True)):
        for memory in memories:
            if LANE_USES.count(memory) == 0: continue
            use = &LANE_USES[memory]
            if use.wrote > need.at[use.wrote_on]: need.at[use.wrote_on] = use.wrote
            if writing: row_reach(&need, &use.read)
    return need

cdef int lanes_choose(Row* need) noexcept:
    """The lane for an op with these needs: one that it would stand behind anyway; else one with nothing under way that
    the op need not wait for, one that was used before if there is one; else the one that has waited for least."""
    cdef Row behind = LANE_COMMON
    cdef int k, next_to = NONE, idle = NONE, least = 0
    for k in range(MAX_LANES):
        if need.at[k]: row_reach(&behind, &LANE_OPS[k][need.at[k] - 1])
    for k in range(MAX_LANES):
        if LANE_LENGTH.at[k] and need.at[k] == LANE_LENGTH.at[k]:
            if next_to == NONE or row_sum(&LANE_CLOCK[k]) > row_sum(&LANE_CLOCK[next_to]): next_to = k
        if LANE_LENGTH.at[k] <= behind.at[k] and (idle == NONE or LANE_LENGTH.at[k] > 0 and LANE_LENGTH.at[idle] == 0):
            idle = k
        if row_sum(&LANE_CLOCK[k]) < row_sum(&LANE_CLOCK[least]): least = k
    return next_to if next_to != NONE else idle if idle != NONE else least

cdef Handles lane_take(int lane, Row* need) noexcept:
    """An op with these needs goes to this lane: the nodes that it must stand behind."""
    cdef Handles nodes = LANE_ENDS[lane]
    cdef Row before = LANE_CLOCK[lane]
    cdef int j, k
    cdef bint implied
    for k in range(MAX_LANES):
        if k == lane or need.at[k] <= before.at[k]: continue
        implied = False
        for j in range(MAX_LANES):
            if j == k or j == lane or need.at[j] <= before.at[j]: continue
            implied |= LANE_OPS[j][need.at[j] - 1].at[k] >= need.at[k]
        if not implied: handles_add(nodes, LANE_NODES[k][need.at[k] - 1])
        row_reach(&LANE_CLOCK[lane], &LANE_OPS[k][need.at[k] - 1])
    return nodes

cdef list lane_put(int lane, const Handles& nodes, list reads, list writes, list made):
    """It ran, and these are its last nodes: [(memory that it uses, the lane that made that, which is another one)]."""
    cdef int32_t number
    cdef Use* use
    cdef Use new
    memset(&new, 0, sizeof(Use))
    LANE_LENGTH.at[lane] += 1
    number = LANE_CLOCK[lane].at[lane] = LANE_LENGTH.at[lane]
    LANE_OPS[lane].push_back(LANE_CLOCK[lane])
    LANE_NODES[lane].push_back(nodes)
    LANE_ENDS[lane] = nodes
    abroad = []
    for memory in made:
        LANE_USES[memory] = new
        LANE_USES[memory].home = lane + 1
    for memories, writing in ((reads, False), (writes, True), (made, True)):
        for memory in memories:
            use = &LANE_USES[memory]
            if use.home and use.home != lane + 1: abroad.append((memory, use.home - 1))
            if writing:
                use.wrote_on, use.wrote = lane, number
                memset(&use.read, 0, sizeof(Row))
            else: use.read.at[lane] = number
    return abroad

cdef struct Wide:                       # the other form of a graph that is launched as a chain
    void* exec                          # while both are measured; or NULL
    float us[2]                         # what a launch takes: the chain, and this one
    bint now                            # does the graph have these edges?
    size_t n                            # edges by data
    cu.CUgraphNode* tails               # of each, and
    cu.CUgraphNode* heads
    cu.CUgraphEdgeData* data

cdef void wide_free(Wide* w) noexcept:
    if w is NULL: return
    if w.exec is not NULL: cu.cuGraphExecDestroy(<cu.CUgraphExec>w.exec)
    free(w)

cdef Wide* wide_new(size_t n) except NULL:
    w = <Wide*>malloc(sizeof(Wide) + n * (2 * sizeof(cu.CUgraphNode) + sizeof(cu.CUgraphEdgeData)))
    if w is NULL: raise MemoryError()
    w.exec, w.n, w.us[0], w.us[1], w.now = NULL, n, 0, 0, True
    w.tails = <cu.CUgraphNode*>(w + 1)
    w.heads = w.tails + n
    w.data = <cu.CUgraphEdgeData*>(w.heads + n)
    return w

cdef void* lane_stream(int device, int lane) except? NULL:
    """A stream that nobody else has, made once: those of torch's pools anybody may be given."""
    cdef OnDevice here = on_device(device)
    cdef cu.CUstream made = NULL
    if LANE_STREAMS[device][lane] is NULL:
        check(CUDA, cu.cuStreamCreate(&made, cu.CUstream_flags_enum.CU_STREAM_NON_BLOCKING), CALL_BEGIN)
        LANE_STREAMS[device][lane] = <void*>made
    return LANE_STREAMS[device][lane]

cdef int lane_follow(int device, void* stream, void* behind) except? RAISES:
    """What comes on `behind` waits for what `stream` has now."""
    cdef void* event = NULL
    cdef int code = cuda_follow(&event, device, stream, device, behind)
    if event is not NULL: cu.cuEventDestroy(<cu.CUevent>event)
    return code

cdef int lane_enter(Recording* r, int64_t home, list reads, list writes, bint stays) except -1:
    """The next op runs on the lane that is returned, which is the thread's stream from now on. What the recording's own
    stream did meanwhile stands behind all lanes, and before what they do next. `home`: torch's id of that stream."""
    cdef Handles now = last_nodes(r.stream), nodes
    cdef Row need
    cdef int lane
    if LANES.empty():
        lanes_reset(now)
        r.lanes_home, r.wide_stays = home, stays
    elif now != LANES_OWN: lanes_meet(now)
    need = lanes_need(reads, writes)
    lane = lanes_choose(&need)
    nodes = lane_take(lane, &need)
    stream = lane_stream(r.device, lane)
    if not cuda_joined(stream):
        check(CUDA, lane_follow(r.device, r.stream, stream), CALL_BEGIN)
        LANES.push_back(stream)
    check(CUDA, stream_behind(stream, nodes), CALL_BEGIN)
    cuda_set_stream(<int64_t><uintptr_t>stream, r.device)
    return lane

cdef list lane_leave(Recording* r, int lane, list reads, list writes, list made):
    """It ran. The recording's own stream is the thread's again, and stands behind it, too. As of lane_put."""
    global LANES_OWN
    cuda_set_stream(r.lanes_home, r.device)
    abroad = lane_put(lane, last_nodes(lane_stream(r.device, lane)), reads, writes, made)
    check(CUDA, stream_behind(r.stream, lanes_ends()), CALL_BEGIN)
    LANES_OWN = last_nodes(r.stream)
    return abroad

cdef int lanes_join(Recording* r) except? RAISES:
    """A capture ends: what all lanes did is part of it."""
    cdef int code = 0
    for k in range(LANES.size()):
        if code == 0: code = lane_follow(r.device, LANES[k], r.stream)
    return code

cdef int lanes_chain(Recording* r, cu.CUgraph graph, bint whole) except? RAISES:
    """The graph of a capture with lanes becomes a chain, unless nobody measures. Its edges are kept where the other
    form can be launched: it is `whole`, no segment, and has no bodies, whose conditions belong to one exec."""
    cdef Nodes nodes
    cdef unordered_map[uintptr_t, size_t] at
    cdef size_t n = 0, k
    cdef Wide* w = NULL
    cdef bint chained
    cdef int code = 0
    if LANES.empty(): return 0
    LANES.clear()
    if r.wide_stays: return 0
    code = cu.cuGraphGetEdges(graph, NULL, NULL, NULL, &n)
    if code == 0: code = nodes_of(graph, &nodes)
    if code or n == 0: return code
    w = wide_new(n)
    code = cu.cuGraphGetEdges(graph, w.tails, w.heads, w.data, &n)
    for k in range(nodes.size()): at[<uintptr_t>nodes[k]] = k
    chained = n + 1 == nodes.size()
    for k in range(n): chained = chained and at[<uintptr_t>w.heads[k]] == at[<uintptr_t>w.tails[k]] + 1
    if code == 0 and not chained: code = graph_edges(graph, w, &nodes, True)
    if code == 0 and whole and not chained and not r.n_inner: r.wide = <void*>w
    else: wide_free(w)
    return code

cdef int graph_edges(cu.CUgraph graph, Wide* w, Nodes* nodes, bint chain) except? RAISES:
    """Put the edges of the one form in the place of those of the other."""
    cdef int code = 0
    cdef size_t n = nodes.size()
    if n < 2 or chain != w.now: return 0
    w.now = not chain
    if chain:
        if w.n: code = cu.cuGraphRemoveDependencies(graph, w.tails, w.heads, w.data, w.n)
        if code == 0: code = cu.cuGraphAddDependencies(graph, nodes.data(), nodes.data() + 1, NULL, n - 1)
        return code
    code = cu.cuGraphRemoveDependencies(graph, nodes.data(), nodes.data() + 1, NULL, n - 1)
    if code == 0 and w.n: code = cu.cuGraphAddDependencies(graph, w.tails, w.heads, w.data, w.n)
    return code

cdef int wide_make(Table* t, Node* node) except? RAISES:
    """What launches the other form, told what the node's own was told last."""
    cdef Wide* w = <Wide*>node.wide
    cdef OnDevice here = on_device(path_row(t, node.path).device)
    cdef cu.CUgraphExec exec_ = NULL
    cdef Nodes nodes
    cdef Patch* p
    cdef int code = nodes_of(<cu.CUgraph>node.graph, &nodes)
    if code == 0: code = graph_edges(<cu.CUgraph>node.graph, w, &nodes, False)
    if code == 0: code = cu.cuGraphInstantiate(&exec_, <cu.CUgraph>node.graph, 0)
    w.exec = <void*>exec_
    for k in range(node.len[PATCHES] if code == 0 else 0):
        p = node_patch(t, node, k)
        if code: break
        if p.kind == SCALAR or p.kind == ADDRESS: code = cuda_word_done(w.exec, p)
        elif p.kind == WORDS: code = cuda_patch(w.exec, p) if p.draws else 0
        elif p.kind <= COPY_BACK and p.nbytes and p.slot != NONE and p.told[0] != NOWHERE: code = cuda_patch(w.exec, p)
    return code

cdef int wide_settle(Table* t, Node* node, bint chain) except? RAISES:
    """Go on with one of the forms."""
    cdef Wide* w = <Wide*>node.wide
    cdef Nodes nodes
    cdef int code = 0
    if chain:
        code = nodes_of(<cu.CUgraph>node.graph, &nodes)
        if code == 0: code = graph_edges(<cu.CUgraph>node.graph, w, &nodes, True)
    elif w.exec is not NULL:
        node.exec, w.exec = w.exec, node.exec
    if w.exec is not NULL: cu.cuGraphExecDestroy(<cu.CUgraphExec>w.exec)
    w.exec = NULL
    w.n = 0                                     # there is nothing to choose any more
    return code

cdef int timed_launch(void* exec_, void* stream, int device, float* us) except? RAISES:
    """Launch it alone, and wait: what it took."""
    cdef OnDevice here = on_device(device)
    cdef cu.CUevent began = NULL
    cdef cu.CUevent ended = NULL
    cdef int code = cu.cuEventCreate(&began, 0)
    if code == 0: code = cu.cuEventCreate(&ended, 0)
    if code == 0: code = cu.cuEventRecord(began, cu_stream(stream))
    if code == 0: code = cu.cuGraphLaunch(<cu.CUgraphExec>exec_, cu_stream(stream))
    if code == 0: code = cu.cuEventRecord(ended, cu_stream(stream))
    if code == 0: code = cu.cuEventSynchronize(ended)
    if code == 0: code = cu.cuEventElapsedTime(us, began, ended)
    us[0] *= 1000
    if began is not NULL: cu.cuEventDestroy(began)
    if ended is not NULL: cu.cuEventDestroy(ended)
    return code

cdef object wide_facts(Wide* w):
    """(microseconds of a launch of the chain, of the other form, was that chosen?); None: nobody measured."""
    return None if w is NULL or not w.us[0] else (w.us[0], w.us[1], bool(w.now))

cdef object shape_of(cu.CUgraph graph):
    """(how many nodes, [(one, another that waits for it), ...])"""
    cdef Nodes nodes, tails, heads
    cdef vector[cu.CUgraphEdgeData] data
    cdef size_t n = 0
    check(CUDA, nodes_of(graph, &nodes), CALL_CUT)
    check(CUDA, cu.cuGraphGetEdges(graph, NULL, NULL, NULL, &n), CALL_CUT)
    tails.resize(n)
    heads.resize(n)
    data.resize(n)
    if n: check(CUDA, cu.cuGraphGetEdges(graph, tails.data(), heads.data(), data.data(), &n), CALL_CUT)
    at = {<uintptr_t>nodes[k]: k for k in range(nodes.size())}
    return nodes.size(), [(at[<uintptr_t>tails[k]], at[<uintptr_t>heads[k]]) for k in range(n)]
