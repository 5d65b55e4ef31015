# Ops of a capture side by side (cgt/lanes/). A lane is a stream of ours that joins the capture, so that it has memory
# and workspaces of its own in the recording's pool. What an op waits for is told to the lane's stream before it runs:
# the nodes behind which its own will stand. The graph that comes of it is launched in one of two forms: its nodes in
# the order in which they were made, as a capture of one stream, or with these edges. It is a chain until both were
# measured (cgt/lanes/forms.py).
#
# Source: CUDA driver API, "Stream Management" (cuStreamUpdateCaptureDependencies), "Graph Management".

cdef vector[void*] LANES                # those that have joined the capture under way

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

cdef int lane_make(int device, void** stream) except? RAISES:
    cdef OnDevice here = on_device(device)
    cdef cu.CUstream made = NULL
    cdef int code = cu.cuStreamCreate(&made, cu.CUstream_flags_enum.CU_STREAM_NON_BLOCKING)
    stream[0] = <void*>made
    return code

cdef int lane_behind(void* stream, list nodes) except? RAISES:
    """What this stream captures next stands behind these nodes, whatever it captured before."""
    cdef Nodes last
    for node in nodes: last.push_back(<cu.CUgraphNode><uintptr_t>node)
    return cu.cuStreamUpdateCaptureDependencies(
        cu_stream(stream), last.data(), NULL, last.size(),
        cu.CUstreamUpdateCaptureDependencies_flags_enum.CU_STREAM_SET_CAPTURE_DEPENDENCIES)

cdef int lane_follow(int device, void* stream, void* behind) except? RAISES:
    """What comes on `behind` waits for what `stream` has now."""
    cdef void* event = NULL
    cdef int code = cuda_follow(&event, device, stream, device, behind)
    if event is not NULL: cu.cuEventDestroy(<cu.CUevent>event)
    return code

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
