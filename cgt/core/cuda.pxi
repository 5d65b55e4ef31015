# The CUDA driver through cuda-python's cydriver: the only chapter that names cu*. Works on raw
# driver capture; PyTorch's part of it (pool, generators) is in cuda_shim.h and rng.pxi.
#
# Sources: CUDA driver API, "Graph Management" and "Stream Management". An exec has no getters, so
# Patch.told is a shadow of what it was told. In-flight launches keep old values.

# cgt_words: one thread writes the two words that RNG kernels read. A kernel node, because one patch then sets
# both 64-bit words; memset nodes would need four.
# cgt_copy: n bytes, 16 at a time but for what comes before and behind the first and last multiple of 16: both
# addresses have the same remainder, if there are as many bytes. The driver looks up what memory a copy node is about
# each time that it is set, and what a kernel gets are numbers to it.
cdef const char* KERNELS_PTX = b""".version 7.0
.target sm_52
.address_size 64
.visible .entry cgt_words(.param .u64 at, .param .u64 seed, .param .u64 offset)
{
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [at];
    ld.param.u64 %rd2, [seed];
    ld.param.u64 %rd3, [offset];
    cvta.to.global.u64 %rd4, %rd1;
    st.global.u64 [%rd4], %rd2;
    st.global.u64 [%rd4+8], %rd3;
    ret;
}
.visible .entry cgt_copy(.param .u64 to, .param .u64 source, .param .u64 n)
{
    .reg .pred %p<4>;
    .reg .b32 %r<10>;
    .reg .b64 %rd<24>;
    ld.param.u64 %rd1, [to];
    ld.param.u64 %rd2, [source];
    ld.param.u64 %rd3, [n];
    cvta.to.global.u64 %rd1, %rd1;
    cvta.to.global.u64 %rd2, %rd2;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mov.u32 %r4, %nctaid.x;
    cvt.u64.u32 %rd5, %r3;
    mad.wide.u32 %rd4, %r1, %r2, %rd5;      // which thread
    mul.wide.u32 %rd6, %r4, %r2;            // of so many
    neg.s64 %rd7, %rd2;
    and.b64 %rd7, %rd7, 15;
    min.u64 %rd7, %rd7, %rd3;               // bytes before the first multiple of 16
    sub.u64 %rd8, %rd3, %rd7;
    shr.u64 %rd9, %rd8, 4;                  // vectors
    and.b64 %rd10, %rd8, 15;                // bytes behind them
    add.u64 %rd11, %rd1, %rd7;
    add.u64 %rd12, %rd2, %rd7;
    mov.u64 %rd13, %rd4;
NEXT:
    setp.ge.u64 %p1, %rd13, %rd9;
    @%p1 bra BEFORE;
    shl.b64 %rd14, %rd13, 4;
    add.u64 %rd15, %rd12, %rd14;
    add.u64 %rd16, %rd11, %rd14;
    ld.global.v4.u32 {%r5, %r6, %r7, %r8}, [%rd15];
    st.global.v4.u32 [%rd16], {%r5, %r6, %r7, %r8};
    add.u64 %rd13, %rd13, %rd6;
    bra NEXT;
BEFORE:
    setp.ge.u64 %p2, %rd4, %rd7;
    @%p2 bra BEHIND;
    add.u64 %rd17, %rd2, %rd4;
    add.u64 %rd18, %rd1, %rd4;
    ld.global.u8 %r9, [%rd17];
    st.global.u8 [%rd18], %r9;
BEHIND:
    setp.ge.u64 %p3, %rd4, %rd10;
    @%p3 bra END;
    shl.b64 %rd19, %rd9, 4;
    add.u64 %rd20, %rd19, %rd4;
    add.u64 %rd21, %rd12, %rd20;
    add.u64 %rd22, %rd11, %rd20;
    ld.global.u8 %r9, [%rd21];
    st.global.u8 [%rd22], %r9;
END:
    ret;
}
"""

# One thread tells a conditional node which way to go. The driver brings the function that it calls.
cdef const char* DECIDE_PTX = b""".version 7.0
.target sm_52
.address_size 64
.extern .func cudaGraphSetConditional(.param .b64 condition, .param .b32 value);
.visible .entry cgt_decide(.param .u64 at, .param .u64 condition)
{
    .reg .b64 %rd<4>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [at];
    ld.param.u64 %rd2, [condition];
    cvta.to.global.u64 %rd3, %rd1;
    ld.global.u8 %r1, [%rd3];
    {
    .param .b64 handle;
    .param .b32 value;
    st.param.b64 [handle], %rd2;
    st.param.b32 [value], %r1;
    call.uni cudaGraphSetConditional, (handle, value);
    }
    ret;
}
"""

cdef enum: MAX_DEVICES = 64
cdef cu.CUfunction WORDS_KERNEL[MAX_DEVICES]
cdef cu.CUfunction COPY_KERNEL[MAX_DEVICES]
cdef enum: COPY_THREADS = 256, COPY_BLOCKS = 264, KERNEL_COPIES = 1 << 20     # bytes up to which a kernel copies
cdef cu.CUfunction DECIDE_KERNEL[MAX_DEVICES]
cdef enum: OLDEST = 12040             # the first driver with all that is called here: cuFuncGetParamInfo came last
cdef enum: HAS_ELSE = 12080           # and from which a conditional node can have two bodies

cdef object cuda_error_name(int code):
    cdef const char* name = NULL
    cdef const char* text = NULL
    cu.cuGetErrorName(<cu.CUresult>code, &name)
    cu.cuGetErrorString(<cu.CUresult>code, &text)
    if name is NULL: return f"CUDA driver error {code}"
    return f"{name.decode()}: {text.decode() if text is not NULL else ''}"

cdef inline cu.CUstream cu_stream(void* s) noexcept nogil: return <cu.CUstream>s

ctypedef vector[cu.CUgraphNode] Nodes

cdef int nodes_of(cu.CUgraph graph, Nodes* nodes) except? RAISES:
    """In the order in which they were made."""
    cdef size_t n = 0
    cdef int code = cu.cuGraphGetNodes(graph, NULL, &n)
    nodes.resize(n)
    return cu.cuGraphGetNodes(graph, nodes.data(), &n) if code == 0 and n else code

cdef int cuda_capturing(void* stream) except? RAISES nogil:
    """Is somebody's capture under way on this stream? Then a call runs the plain function. The legacy stream, where
    torch works unless it is told otherwise, cannot be captured, and need not be asked at each call."""
    cdef cu.CUstreamCaptureStatus status
    if stream is NULL: return 0
    if cu.cuStreamIsCapturing(cu_stream(stream), &status) != 0: return 1
    return status != cu.CUstreamCaptureStatus_enum.CU_STREAM_CAPTURE_STATUS_NONE

cdef void cuda_relaxed(bint on) noexcept nogil:
    """May this thread allocate and wait although it captures a stream? (The capture itself takes no notice.)"""
    cdef cu.CUstreamCaptureMode mode = (
        cu.CUstreamCaptureMode_enum.CU_STREAM_CAPTURE_MODE_RELAXED if on
        else cu.CUstreamCaptureMode_enum.CU_STREAM_CAPTURE_MODE_GLOBAL)
    cu.cuThreadExchangeStreamCaptureMode(&mode)

cdef void cuda_wait_aside(int device, void* stream) noexcept nogil:
    """For what the stream has now, in a thread of our own. Both calls may block for as long as another process likes:
    the first where the stream is full."""
    cdef OnDevice here = on_device(device)
    cdef cu.CUevent event = NULL
    cdef unsigned int flags = (cu.CUevent_flags_enum.CU_EVENT_DISABLE_TIMING
                               | cu.CUevent_flags_enum.CU_EVENT_BLOCKING_SYNC)
    cuda_thread_ready(device)
    cuda_relaxed(True)              # others may be capturing, and need not notice
    if cuda_capturing(stream) or cu.cuEventCreate(&event, flags) != 0: return
    if cu.cuEventRecord(event, cu_stream(stream)) == 0: cu.cuEventSynchronize(event)
    cu.cuEventDestroy(event)

cdef Watchdog* WATCHDOGS[MAX_DEVICES]

cdef Watchdog* watchdog_of(int device) except NULL:
    """The device's, made once. It lasts as long as the process."""
    if WATCHDOGS[device] is NULL: WATCHDOGS[device] = new Watchdog(device, cuda_wait_aside)
    return WATCHDOGS[device]

cdef int cuda_joined(void* stream) noexcept nogil:
    """Does a stream belong to a capture? Asked by the allocator on any thread: one without a context
    gets an error, and has joined nothing."""
    cdef cu.CUstreamCaptureStatus status
    return (cu.cuStreamIsCapturing(cu_stream(stream), &status) == 0
            and status != cu.CUstreamCaptureStatus_enum.CU_STREAM_CAPTURE_STATUS_NONE)

cdef int path_captured(Path* p, void* stream) except? RAISES nogil:
    """Is somebody's capture under way on this stream, or on that of the path's last launch, for which it would wait?"""
    return cuda_capturing(stream) or (stream != p.last_stream and not p.event_only and cuda_joined(p.last_stream))

# --- several GPUs in one recording ---
# The capture begins on the stream of one and forks to the others', which join it at the end. Memory there is the
# path's, as at home, in a pool of its own beside that of the GPU's own path, which others may replay. A replay waits
# for the caller's streams there, and they wait for it.

cdef int spread_new(Spread** spread, list others) except -1:
    """others: [(device, stream, pool), ...]"""
    if not others: return 0
    s = <Spread*>malloc(sizeof(Spread) + len(others) * sizeof(Beside))
    if s is NULL: raise MemoryError()
    s.n, s.event = 0, NULL
    spread[0] = s                   # the recording frees it, as far as it got
    for device, stream, pool in others:
        b = &s.others[s.n]
        b.device, b.stream, b.pool = device, <void*><uintptr_t>stream, <CudaPool*><uintptr_t>pool
        b.state = b.event = NULL
        cuda_pool_count(b.pool, 1)
        s.n += 1
    return 0

cdef void spread_free(Spread* s) noexcept:
    if s is NULL: return
    for k in range(s.n):
        if s.others[k].state is not NULL: cuda_state_free(s.others[k].state)
        cuda_pool_count(s.others[k].pool, -1)
        if s.others[k].event is not NULL: cu.cuEventDestroy(<cu.CUevent>s.others[k].event)
    if s.event is not NULL: cu.cuEventDestroy(<cu.CUevent>s.event)
    free(s)

cdef Beside* beside_of(Spread* s, int device) noexcept nogil:
    """NULL: not another GPU of the recording's."""
    for k in range(s.n if s is not NULL else 0):
        if s.others[k].device == device: return &s.others[k]
    return NULL

cdef inline void* stream_on(Recording* r, int device) noexcept nogil:
    """The recording's stream there."""
    cdef Beside* b = beside_of(r.spread, device)
    return b.stream if b is not NULL else r.stream

cdef int cuda_record_event(void** event, int device, void* stream) except? RAISES nogil:
    """Record an event, made at the first time, behind what a stream has now. (Each GPU's default stream is the null
    stream: which is current says whose.)"""
    cdef OnDevice here = on_device(device)
    cdef cu.CUevent made = NULL
    cdef int code = 0
    if event[0] is NULL:
        code = cu.cuEventCreate(&made, cu.CUevent_flags_enum.CU_EVENT_DISABLE_TIMING)
        event[0] = <void*>made
    return code if code else cu.cuEventRecord(<cu.CUevent>event[0], cu_stream(stream))

cdef int cuda_follow(void** event, int device, void* stream, int other, void* behind) except? RAISES nogil:
    """What comes on stream `behind` of GPU `other` waits for what stream `stream` of this device has now."""
    cdef OnDevice there
    cdef int code = cuda_record_event(event, device, stream)
    if code: return code
    there.go(other)
    return cu.cuStreamWaitEvent(cu_stream(behind), <cu.CUevent>event[0], 0)

cdef void cuda_leave_stream(Path* p) noexcept nogil:
    """Whose stream it is that the last launch is on may destroy it from here on. Where no event can be recorded, the
    launch is over when this returns, and nobody needs one."""
    cdef OnDevice here = on_device(p.device)
    if cuda_record_event(&p.event, p.device, p.last_stream): cu.cuCtxSynchronize()
    p.fleeting, p.event_only = 0, 1

cdef inline void* stream_there(Beside* b, bint captured) noexcept nogil:
    """The one that is captured, or the caller's."""
    return b.stream if captured else cuda_current_stream(b.device)

cdef int spread_meet(Spread* s, int32_t n, bint captured, int device, void* stream) except? RAISES nogil:
    """What comes on this stream waits for what the first n of the other GPUs have now."""
    cdef int code = 0
    for k in range(n):
        b = &s.others[k]
        if code == 0: code = cuda_follow(&b.event, b.device, stream_there(b, captured), device, stream)
    return code

cdef int spread_part(Spread* s, int32_t n, bint captured, int device, void* stream) except? RAISES nogil:
    """And what comes on those waits for it."""
    cdef int code = 0
    for k in range(n):
        b = &s.others[k]
        if code == 0: code = cuda_follow(&s.event, device, stream, b.device, stream_there(b, captured))
    return code

cdef inline int launch_among(Driver* d, Spread* s, void* exec_, void* stream, int device) except? RAISES nogil:
    """Launch a graph of a recording that works on these GPUs, too, or on no others (NULL)."""
    cdef int code = fault(CALL_LAUNCH)
    if code == 0 and s is not NULL: code = spread_meet(s, s.n, False, device, stream)
    if code == 0: code = d.launch(exec_, stream, device)
    return code if code or s is NULL else spread_part(s, s.n, False, device, stream)

cdef void capturing_set(Recording* r, int on) noexcept:
    """A capture begins, or is over, on all of them."""
    r.capturing = on
    cuda_mark(r.device, on)
    for k in range(r.spread_open): cuda_mark(r.spread.others[k].device, on)

cdef void pools_end(Recording* r) noexcept:
    for k in range(r.spread_open): cuda_pool_end(r.spread.others[k].pool)
    r.spread_open = 0
    if r.pool_open: cuda_pool_end(r.pool)
    r.pool_open = 0

cdef int pool_restore(int device, CudaPool* pool, void* state, const vector[void*]& live) except? RAISES:
    cdef OnDevice here = on_device(device)
    return 0 if cuda_pool_restore(pool, state, live) else ERROR_FOREIGN_MEMORY

cdef int cuda_restore(Recording* r, void* state, const vector[void*]& live) except? RAISES:
    return pool_restore(r.device, r.pool, state, live)

cdef int cuda_resume(Recording* r) except? RAISES:
    cdef OnDevice here = on_device(r.device)
    if r.capturing: return 0
    # Thread-local: other threads may go on allocating and synchronizing while we record.
    code = cu.cuStreamBeginCapture(
        cu_stream(r.stream), cu.CUstreamCaptureMode_enum.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    if code: return code
    capturing_set(r, 1)
    return spread_part(r.spread, r.spread_open, True, r.device, r.stream)       # the capture forks to them

cdef int cuda_begin(Recording* r) except? RAISES:
    cdef int32_t k
    cuda_pool_begin(r.pool, r.stream, cuda_joined)
    r.pool_open = 1
    for k in range(r.spread.n if r.spread is not NULL else 0):
        cuda_pool_begin(r.spread.others[k].pool, r.spread.others[k].stream, cuda_joined)
        r.spread_open = k + 1
    return cuda_resume(r)

cdef unsigned long long cuda_capture_id(Recording* r) noexcept:
    cdef cu.CUstreamCaptureStatus status
    cdef cu.cuuint64_t capture_id = 0
    cu.cuStreamGetCaptureInfo(cu_stream(r.stream), &status, &capture_id, NULL, NULL, NULL, NULL)
    return capture_id

cdef struct CopyArgs:
    cu.CUdeviceptr to, source
    uint64_t nbytes
    void* params[3]                     # of cgt_copy: where these are

cdef void copy_args(Patch* p, CopyArgs* a) noexcept nogil:
    a.to = <cu.CUdeviceptr><uintptr_t>p.to if p.kind == COPY_SOURCE else <cu.CUdeviceptr>p.told[0]
    a.source = <cu.CUdeviceptr>p.told[0] if p.kind == COPY_SOURCE else <cu.CUdeviceptr><uintptr_t>p.to
    a.nbytes = <uint64_t>p.nbytes
    a.params[0], a.params[1], a.params[2] = &a.to, &a.source, &a.nbytes

cdef inline bint copied_by_kernel(Patch* p) noexcept nogil:
    """As when it was recorded, wherever it lies: the class of its address is guarded, but for single elements of less
    than 16 bytes, which cgt_copy copies byte by byte."""
    return p.nbytes <= KERNEL_COPIES and (p.nbytes < 16 or (<uintptr_t>p.to ^ p.told[0]) % 16 == 0)

cdef inline unsigned int copy_blocks(Patch* p) noexcept nogil:
    cdef int64_t n = p.nbytes // (16 * COPY_THREADS) + 1
    return <unsigned int>(n if n < COPY_BLOCKS else COPY_BLOCKS)

cdef int cuda_copy(Recording* r, Patch* p, PyObject* to) except? RAISES:
    cdef OnDevice here = on_device(tensor_device(to))
    cdef CopyArgs a
    cdef void* stream = stream_on(r, tensor_device(to))
    p.device = tensor_device(to)
    copy_args(p, &a)
    if copied_by_kernel(p):
        code = cu.cuLaunchKernel(COPY_KERNEL[p.device], copy_blocks(p), 1, 1, COPY_THREADS, 1, 1, 0, cu_stream(stream),
            a.params, NULL)
    else:
        code = cu.cuMemcpyDtoDAsync(a.to, a.source, a.nbytes, cu_stream(stream))
    if code == 0: p.handle = <void*><uintptr_t>last_nodes(stream)[0]
    return code

cdef int cuda_feed(Patch* p, const void* source, void* stream) except? RAISES nogil:
    # The driver has read ordinary memory when it returns. What is page-locked it reads later.
    cdef OnDevice here = on_device(p.device)
    cdef unsigned int memory = 0
    code = cu.cuMemcpyHtoDAsync(<cu.CUdeviceptr><uintptr_t>p.to, source, p.nbytes, cu_stream(stream))
    if code or not p.told[1]: return code
    if cu.cuPointerGetAttribute(&memory, cu.CUpointer_attribute_enum.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            <cu.CUdeviceptr><uintptr_t>source) != 0: return 0       # the driver does not know it
    return cu.cuStreamSynchronize(cu_stream(stream))

cdef int kernel_load(cu.CUfunction* kernels, int device, const char* ptx, const char* name) except? RAISES:
    """Once per device; before a capture, since loading is not capturable."""
    cdef OnDevice here
    cdef cu.CUmodule module = NULL
    if kernels[device] is not NULL: return 0
    here.go(device)
    code = cu.cuModuleLoadData(&module, <const void*>ptx)
    return code if code else cu.cuModuleGetFunction(&kernels[device], module, name)

cdef int cuda_load_kernels(int device) except? RAISES:
    cdef int version = 0, code = cu.cuDriverGetVersion(&version)
    if code == 0 and version < OLDEST: code = ERROR_OLD_DRIVER
    if code == 0: code = kernel_load(COPY_KERNEL, device, KERNELS_PTX, b"cgt_copy")
    return code if code else kernel_load(WORDS_KERNEL, device, KERNELS_PTX, b"cgt_words")

cdef int cuda_decide_kernel(int device) except? RAISES:
    """The same for the kernel of conditional nodes, where the driver knows those."""
    cdef int version = 0, code = cu.cuDriverGetVersion(&version)
    return code if code or version < HAS_ELSE else kernel_load(DECIDE_KERNEL, device, DECIDE_PTX, b"cgt_decide")

cdef int cuda_words(Recording* r, Patch* p) except? RAISES:
    cdef OnDevice here = on_device(p.device)
    cdef void* params[3]
    cdef void* stream = stream_on(r, p.device)
    params[0], params[1], params[2] = &p.to, &p.told[0], &p.told[1]
    code = cu.cuLaunchKernel(WORDS_KERNEL[p.device], 1, 1, 1, 1, 1, 1, 0, cu_stream(stream), params, NULL)
    if code == 0: p.handle = <void*><uintptr_t>last_nodes(stream)[0]
    return code

cdef int cuda_spend(Recording* r, PyObject* proto) except? RAISES:
    cuda_pool_spend(r.pool, tensor_storage_ptr(proto))
    return 0

cdef bint is_of_nccl(void* function) noexcept nogil:
    """NCCL, whose network wants the host, gives the data of its functions to the graph, which keeps it."""
    cdef Dl_info found
    if dladdr(function, &found) == 0 or found.dli_fname is NULL: return False
    return strstr(found.dli_fname, b"libnccl") is not NULL

cdef int cuda_vet(cu.CUgraph graph, int32_t* count) except? RAISES:
    """No node may allocate, and none may read host memory, or have a function of the host do it: nobody would keep it
    alive. `count`: how many nodes there are."""
    cdef Nodes nodes
    cdef cu.CUgraphNodeType kind
    cdef cu.CUgraph child = NULL
    cdef cu.CUDA_MEMCPY3D copy
    cdef cu.CUDA_HOST_NODE_PARAMS calls
    cdef unsigned int memory = 0
    cdef int32_t inner
    cdef int code = nodes_of(graph, &nodes)
    count[0] = <int32_t>nodes.size()
    for k in range(nodes.size()):
        if code: break
        code = cu.cuGraphNodeGetType(nodes[k], &kind)
        if code: break
        if kind == cu.CUgraphNodeType_enum.CU_GRAPH_NODE_TYPE_MEM_ALLOC:
            code = ERROR_MEMORY_NODES
        elif kind == cu.CUgraphNodeType_enum.CU_GRAPH_NODE_TYPE_HOST:
            code = cu.cuGraphHostNodeGetParams(nodes[k], &calls)
            if code == 0 and not is_of_nccl(<void*>calls.fn): code = ERROR_HOST_FUNCTION
        elif kind == cu.CUgraphNodeType_enum.CU_GRAPH_NODE_TYPE_GRAPH:
            code = cu.cuGraphChildGraphNodeGetGraph(nodes[k], &child)
            if code == 0: code = cuda_vet(child, &inner)
        elif kind == cu.CUgraphNodeType_enum.CU_GRAPH_NODE_TYPE_MEMCPY:
            code = cu.cuGraphMemcpyNodeGetParams(nodes[k], &copy)
            if code: break
            memory = <unsigned int>copy.srcMemoryType
            if memory == cu.CUmemorytype_enum.CU_MEMORYTYPE_UNIFIED:
                # An address that the driver does not know is ordinary host memory.
                if cu.cuPointerGetAttribute(
                        &memory, cu.CUpointer_attribute_enum.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                        copy.srcDevice) != 0:
                    memory = cu.CUmemorytype_enum.CU_MEMORYTYPE_HOST
            if memory == cu.CUmemorytype_enum.CU_MEMORYTYPE_HOST: code = ERROR_HOST_MEMORY
    return code

cdef int capture_end(Recording* r, cu.CUgraph* graph) except? RAISES:
    """What was captured."""
    cdef int joined = spread_meet(r.spread, r.spread_open, True, r.device, r.stream), code
    if joined == 0: joined = lanes_join(r)
    code = cu.cuStreamEndCapture(cu_stream(r.stream), graph)
    if code == cu.cudaError_enum.CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD: return code      # it goes on
    capturing_set(r, 0)
    return joined if joined else code

cdef int cuda_end(Recording* r, Patch* patches, int32_t n_patches) except? RAISES:
    cdef OnDevice here = on_device(r.device)
    cdef cu.CUgraph graph = NULL
    cdef int32_t n = 0
    cdef bint draws = False
    code = capture_end(r, &graph)
    pools_end(r)
    r.graph = <void*>graph
    if code: return code
    for k in range(n_patches): draws |= patches[k].kind == WORDS and patches[k].draws
    for k in range(n_patches if not draws and not r.cuts else 0):
        if patches[k].kind != WORDS: continue
        # The words come first in the stream, so taking unused ones out loses no order.
        code = cu.cuGraphDestroyNode(<cu.CUgraphNode>patches[k].handle)
        if code: return code
    code = cuda_thin(&TABLE.rec_vain)
    if code == 0: code = cuda_bound(graph, patches, n_patches)
    if code == 0: code = lanes_chain(r, graph, not r.cuts)
    if code == 0: code = cuda_vet(graph, &n)
    r.n_graph_nodes = n + r.n_inner
    return code

cdef int cuda_fetch(Recording* r, PyObject* x, char* to, int64_t nbytes) except? RAISES:
    cdef OnDevice here = on_device(tensor_device(x))
    return cu.cuMemcpyDtoHAsync(<void*>to, <cu.CUdeviceptr><uintptr_t>tensor_ptr(x), nbytes,
        cu_stream(stream_on(r, tensor_device(x))))

cdef int cuda_cut(Recording* r, Read* read) except? RAISES:
    """The pool stays open: what the segment holds is there for the next one."""
    cdef OnDevice here = on_device(r.device)
    cdef cu.CUgraph graph = NULL
    cdef cu.CUgraphExec exec_ = NULL
    cdef int32_t n = 0
    code = capture_end(r, &graph)
    read.graph = <void*>graph
    if code == 0: code = cuda_thin(&TABLE.rec_vain)
    if code == 0: code = lanes_chain(r, graph, False)
    if code == 0: code = cuda_vet(graph, &n)
    if code: return code
    read.n_graph_nodes = n + r.n_inner
    r.n_inner = 0
    code = cu.cuGraphInstantiate(&exec_, graph, 0)
    read.exec = <void*>exec_
    return code

cdef int cuda_wait(void* stream, int device) except? RAISES nogil:
    cdef OnDevice here = on_device(device)
    return cu.cuStreamSynchronize(cu_stream(stream))

cdef int cuda_decide(Recording* r, uint64_t condition, PyObject* pred, void* stream) except? RAISES:
    cdef OnDevice here = on_device(r.device)
    cdef void* params[2]
    cdef char* at = tensor_ptr(pred)
    params[0], params[1] = &at, &condition
    return cu.cuLaunchKernel(DECIDE_KERNEL[r.device], 1, 1, 1, 1, 1, 1, 0, cu_stream(stream), params, NULL)

cdef int cuda_fork(Recording* r, Fork* f, PyObject* pred, void* stream) except? RAISES:
    """A kernel that sets the condition, and behind it a conditional node, whose bodies are graphs without nodes."""
    cdef OnDevice here
    cdef cu.CUstreamCaptureStatus status
    cdef cu.CUcontext context = NULL
    cdef cu.CUgraph graph = NULL
    cdef cu.CUgraphNode node = NULL
    cdef const cu.CUgraphNode* last = NULL
    cdef const cu.CUgraphEdgeData* edges = NULL
    cdef cu.CUgraphNodeParams params
    cdef size_t n = 0
    cdef unsigned int k
    if DECIDE_KERNEL[r.device] is NULL: return cu.cudaError_enum.CUDA_ERROR_NOT_SUPPORTED
    here.go(r.device)
    memset(&params, 0, sizeof(params))
    params.type = cu.CUgraphNodeType_enum.CU_GRAPH_NODE_TYPE_CONDITIONAL
    params.conditional.type = (cu.CUgraphConditionalNodeType_enum.CU_GRAPH_COND_TYPE_IF if f.kind == BRANCH
                               else cu.CUgraphConditionalNodeType_enum.CU_GRAPH_COND_TYPE_WHILE)
    params.conditional.size = 2 if f.kind == BRANCH else 1
    code = cu.cuCtxGetCurrent(&context)
    if code == 0: code = cu.cuStreamGetCaptureInfo(cu_stream(stream), &status, NULL, &graph, &last, &edges, &n)
    if code == 0: code = cu.cuGraphConditionalHandleCreate(&params.conditional.handle, graph, context, 0, 0)
    if code == 0: code = cuda_decide(r, params.conditional.handle, pred, stream)
    if code == 0: code = cu.cuStreamGetCaptureInfo(cu_stream(stream), &status, NULL, &graph, &last, &edges, &n)
    params.conditional.ctx = context
    if code == 0: code = cu.cuGraphAddNode(&node, graph, last, edges, n, &params)
    if code: return code
    for k in range(params.conditional.size): f.bodies[k] = <void*>params.conditional.phGraph_out[k]
    f.condition = params.conditional.handle
    return cu.cuStreamUpdateCaptureDependencies(
        cu_stream(stream), &node, NULL, 1,
        cu.CUstreamUpdateCaptureDependencies_flags_enum.CU_STREAM_SET_CAPTURE_DEPENDENCIES)

cdef int cuda_enter(Recording* r, void* body, void* stream) except? RAISES:
    cdef OnDevice here = on_device(r.device)
    return cu.cuStreamBeginCaptureToGraph(
        cu_stream(stream), <cu.CUgraph>body, NULL, NULL, 0,
        cu.CUstreamCaptureMode_enum.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)

cdef int cuda_leave(Recording* r, void* body, void* stream) except? RAISES:
    cdef OnDevice here = on_device(r.device)
    cdef cu.CUgraph graph = NULL
    cdef int32_t n = 0
    if not cuda_joined(stream): return 0                 # it never began
    code = cu.cuStreamEndCapture(cu_stream(stream), &graph)
    if code == 0: code = cuda_vet(<cu.CUgraph>body, &n)
    r.n_inner += n
    return code

cdef int cuda_instantiate(Recording* r) except? RAISES:
    cdef OnDevice here
    cdef cu.CUgraphExec exec_ = NULL
    cdef size_t before = 0, after = 0, total = 0
    if r.n_graph_nodes == 0: return 0                    # only views: nothing to launch
    here.go(r.device)
    cu.cuMemGetInfo(&before, &total)
    code = cu.cuGraphInstantiate(&exec_, <cu.CUgraph>r.graph, 0)
    r.exec = <void*>exec_
    if code == 0: code = cu.cuGraphUpload(exec_, cu_stream(r.stream))
    if cu.cuMemGetInfo(&after, &total) == 0 and after < before: r.exec_bytes += before - after
    return code

cdef vector[void*] made_on(int device, list tensors) except *:
    """Where the memory of those on this device lies."""
    cdef vector[void*] addresses
    for x in tensors:
        if tensor_device(<PyObject*>x) == device and tensor_storage_ptr(<PyObject*>x) is not NULL:
            addresses.push_back(tensor_storage_ptr(<PyObject*>x))
    return addresses

cdef int cuda_checkpoint(Recording* r, list made, list outs, list early, const vector[void*]& live) except? RAISES:
    """`live` is still allocated since restore. The blocks of `outs` stay allocated, without owners,
    until a restore finds that nobody holds them."""
    cdef OnDevice here = on_device(r.device)
    for j in range(r.spread.n if r.spread is not NULL else 0):
        b = &r.spread.others[j]
        if not cuda_pool_checkpoint(b.pool, made_on(b.device, outs), &b.state): return ERROR_FOREIGN_MEMORY
    if not cuda_pool_checkpoint(r.pool, made_on(r.device, outs), &r.state): return ERROR_FOREIGN_MEMORY
    for x in outs: tensor_disown(<PyObject*>x)
    return 0

cdef void cuda_abort(Recording* r) noexcept:
    cdef OnDevice here = on_device(r.device)
    cdef cu.CUgraph graph = NULL
    if r.capturing:
        lanes_join(r)
        cu.cuStreamEndCapture(cu_stream(r.stream), &graph)     # also clears an invalidated capture
        if graph is not NULL: cu.cuGraphDestroy(graph)
        capturing_set(r, 0)
    pools_end(r)
    LANES.clear()
    wide_free(<Wide*>r.wide)
    cuda_destroy(r.graph, r.exec, NULL, r.state)
    r.graph = r.exec = r.state = r.wide = NULL
    spread_free(r.spread)
    r.spread = NULL

cdef int cuda_launch(void* exec_, void* stream, int device) except? RAISES nogil:
    cdef OnDevice here
    if exec_ is NULL: return 0
    here.go(device)
    return cu.cuGraphLaunch(<cu.CUgraphExec>exec_, cu_stream(stream))

cdef int cuda_patch(void* exec_, Patch* p) except? RAISES nogil:
    if p.kind == BOUND: return 0            # its words are told: words_tell
    return cuda_patch_words(exec_, p) if p.kind == WORDS else cuda_patch_copy(exec_, p)

cdef int cuda_patch_copy(void* exec_, Patch* p) except? RAISES nogil:
    cdef CopyArgs a
    cdef cu.CUDA_MEMCPY3D m
    copy_args(p, &a)
    if copied_by_kernel(p): return kernel_set(exec_, p, COPY_KERNEL[p.device], copy_blocks(p), COPY_THREADS, a.params)
    memset(&m, 0, sizeof(m))
    m.srcMemoryType = m.dstMemoryType = cu.CUmemorytype_enum.CU_MEMORYTYPE_DEVICE
    m.srcDevice, m.dstDevice = a.source, a.to
    m.WidthInBytes = a.nbytes
    m.Height = m.Depth = 1
    return copy_set(exec_, p, &m)

cdef int cuda_patch_words(void* exec_, Patch* p) except? RAISES nogil:
    cdef void* params[3]
    params[0], params[1], params[2] = &p.to, &p.told[0], &p.told[1]
    return kernel_set(exec_, p, WORDS_KERNEL[p.device], 1, 1, params)

cdef int kernel_set(void* exec_, Patch* p, cu.CUfunction kernel, unsigned int blocks, unsigned int threads,
                    void** params) except? RAISES nogil:
    cdef cu.CUDA_KERNEL_NODE_PARAMS k
    memset(&k, 0, sizeof(k))
    k.func, k.kernelParams = kernel, params
    k.gridDimX, k.gridDimY, k.gridDimZ = blocks, 1, 1
    k.blockDimX, k.blockDimY, k.blockDimZ = threads, 1, 1
    return cu.cuGraphExecKernelNodeSetParams(<cu.CUgraphExec>exec_, <cu.CUgraphNode>p.handle, &k)

cdef int copy_set(void* exec_, Patch* p, cu.CUDA_MEMCPY3D* move) except? RAISES nogil:
    cdef OnDevice here = on_device(p.device)
    cdef cu.CUcontext context = NULL
    code = cu.cuCtxGetCurrent(&context)
    return code if code else cu.cuGraphExecMemcpyNodeSetParams(
        <cu.CUgraphExec>exec_, <cu.CUgraphNode>p.handle, move, context)

# --- numbers and addresses among a node's arguments ---

cdef struct Args:                   # what a node is launched with, as the exec was told last
    cu.CUDA_KERNEL_NODE_PARAMS params
    cu.CUDA_MEMCPY3D move           # instead, if it copies: its source is at offset 0, where it writes at 8
    int32_t copies
    int32_t n, users                # arguments; patches that write here
    size_t nbytes
    void* extra[5]                  # instead of args, where the kernel came with all its arguments in one piece
    void* args[1]                   # n of them, and behind these their bytes

cdef inline char* args_bytes(Args* a) noexcept nogil: return <char*>&a.args[a.n]

cdef int kernel_param(cu.CUDA_KERNEL_NODE_PARAMS* params, size_t k, size_t* offset, size_t* size) except? RAISES:
    """Where argument k lies, in a kernel that is known as a function or as a kernel of a library."""
    if params.func is not NULL: return cu.cuFuncGetParamInfo(params.func, k, offset, size)
    return cu.cuKernelGetParamInfo(params.kern, k, offset, size)

cdef char* extra_buffer(void** extra, size_t* nbytes) noexcept:
    """A kernel's arguments in one piece (driver API, cuLaunchKernel: `extra`); or NULL."""
    cdef char* buffer = NULL
    cdef int k = 0
    nbytes[0] = 0
    while extra is not NULL and extra[k] is not NULL:           # CU_LAUNCH_PARAM_END
        if <uintptr_t>extra[k] == EXTRA_POINTER: buffer = <char*>extra[k + 1]
        elif <uintptr_t>extra[k] == EXTRA_SIZE: nbytes[0] = (<size_t*>extra[k + 1])[0]
        else: return NULL
        k += 2
    return buffer

cdef enum: EXTRA_POINTER = 1, EXTRA_SIZE = 2        # CU_LAUNCH_PARAM_BUFFER_POINTER, _SIZE

cdef Args* args_take(cu.CUgraphNode node) except NULL:
    """A kernel's or a copy's parameters, in memory of ours."""
    cdef cu.CUDA_KERNEL_NODE_PARAMS params
    cdef cu.CUgraphNodeType kind
    cdef size_t n = 0, k, offset = 0, size = 0, end = 0
    cdef char* buffer = NULL
    memset(&params, 0, sizeof(params))
    check(CUDA, cu.cuGraphNodeGetType(node, &kind), CALL_CUT)
    if kind == cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
        check(CUDA, cu.cuGraphKernelNodeGetParams(node, &params), CALL_CUT)
        while params.kernelParams is not NULL and kernel_param(&params, n, &offset, &size) == 0:
            n += 1
            end = offset + size
        if params.kernelParams is NULL: buffer = extra_buffer(params.extra, &end)
        if buffer is not NULL: n = 1
    a = <Args*>malloc(sizeof(Args) + n * sizeof(void*) + end)
    if a is NULL: raise MemoryError()
    a.params, a.n, a.users, a.nbytes = params, <int32_t>n, 0, end
    a.copies = kind == cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMCPY
    if a.copies:
        check(CUDA, cu.cuGraphMemcpyNodeGetParams(node, &a.move), CALL_CUT)
        return a
    if buffer is not NULL:
        memcpy(args_bytes(a), buffer, end)
        a.args[0] = args_bytes(a)
        a.extra[0], a.extra[1] = <void*>EXTRA_POINTER, args_bytes(a)
        a.extra[2], a.extra[3], a.extra[4] = <void*>EXTRA_SIZE, &a.nbytes, NULL
        a.params.extra = a.extra
        return a
    for k in range(n):
        kernel_param(&params, k, &offset, &size)
        a.args[k] = args_bytes(a) + offset
        memcpy(a.args[k], params.kernelParams[k], size)
    a.params.kernelParams = a.args
    return a

cdef void cuda_word_free(Patch* p) noexcept:
    cdef Args* a = <Args*>p.to
    a.users -= 1
    if a.users == 0: free(a)

cdef int cuda_scalar(void* exec_, Patch* p, Number* r) except? RAISES:
    form_write(p.part, r.is_float, r.now.f, r.now.i, args_bytes(<Args*>p.to) + p.at)
    return 0

cdef void address_write(Patch* p, uint64_t address) noexcept:
    cdef Args* a = <Args*>p.to
    if not a.copies: memcpy(args_bytes(a) + p.at, &address, sizeof(address))
    elif p.at == 0: a.move.srcDevice = <cu.CUdeviceptr>address
    else: a.move.dstDevice = <cu.CUdeviceptr>address

cdef int cuda_word_done(void* exec_, Patch* p) except? RAISES:
    cdef Args* a = <Args*>p.to
    if a.copies: return copy_set(exec_, p, &a.move)
    return cu.cuGraphExecKernelNodeSetParams(<cu.CUgraphExec>exec_, <cu.CUgraphNode>p.handle, &a.params)

cdef bint is_flat(cu.CUDA_MEMCPY3D* m) noexcept:
    """Does it copy one run of bytes of device memory? Its addresses are then those that it names."""
    return (m.Height <= 1 and m.Depth <= 1
            and not (m.srcXInBytes or m.srcY or m.srcZ or m.dstXInBytes or m.dstY or m.dstZ)
            and not (m.srcLOD or m.dstLOD) and is_device(m.srcMemoryType) and is_device(m.dstMemoryType))

cdef inline bint is_device(cu.CUmemorytype kind) noexcept:
    return kind == cu.CUmemorytype_enum.CU_MEMORYTYPE_DEVICE or kind == cu.CUmemorytype_enum.CU_MEMORYTYPE_UNIFIED

cdef tuple cuda_shot(cu.CUgraphNode node):
    """(handle, kind, what must be the same, [(offset, bytes) of each argument]) of a node; kind 0: a kernel, 1: a copy,
    2: fills memory."""
    cdef cu.CUgraphNodeType kind
    cdef cu.CUDA_MEMSET_NODE_PARAMS fill
    cdef size_t offset = 0, size = 0
    params, shape = [], ()
    check(CUDA, cu.cuGraphNodeGetType(node, &kind), CALL_CUT)
    if kind == cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET:
        check(CUDA, cu.cuGraphMemsetNodeGetParams(node, &fill), CALL_CUT)
        shape = (fill.elementSize, fill.width, fill.height, fill.value)
        return <uintptr_t>node, <int>kind, shape, ((0, PyBytes_FromStringAndSize(<char*>&fill.dst, 8)),)
    if kind != cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL and kind != cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMCPY:
        return <uintptr_t>node, <int>kind, (), ()
    a = args_take(node)
    if a.copies:
        shape = (a.move.WidthInBytes, <int>a.move.srcMemoryType, <int>a.move.dstMemoryType)
        if is_flat(&a.move):
            params = [(0, PyBytes_FromStringAndSize(<char*>&a.move.srcDevice, 8)),
                      (8, PyBytes_FromStringAndSize(<char*>&a.move.dstDevice, 8))]
    else:
        p = &a.params
        shape = (<uintptr_t>p.func, <uintptr_t>p.kern, p.gridDimX, p.gridDimY, p.gridDimZ, p.blockDimX, p.blockDimY,
                 p.blockDimZ, p.sharedMemBytes)
        for k in range(a.n):
            if p.kernelParams is NULL: offset, size = 0, a.nbytes
            else: kernel_param(p, k, &offset, &size)
            params.append((offset, PyBytes_FromStringAndSize(<char*>a.args[k], size)))
    free(a)
    return <uintptr_t>node, <int>kind, shape, tuple(params)

cdef bint is_opaque(int kind) noexcept:
    """May a node of this kind without arguments that can be told have some all the same: a graph, a copy that is not
    flat, arguments of an unknown form?"""
    return kind in (<int>cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_GRAPH, <int>cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL,
                    <int>cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMCPY)

# cuda_end does it: nothing may change in a capture under way
cdef int cuda_bind(Recording* r, Patch* p) noexcept: return 0

cdef int cuda_bound(cu.CUgraph graph, Patch* patches, int32_t n) except? RAISES:
    """Take out the copies of rebound slots, and have the graph work on the memory of the call that is recorded."""
    cdef int code = 0
    for k in range(n):
        if code: break
        if patches[k].kind == BOUND and patches[k].nbytes: code = cuda_unlink(graph, <cu.CUgraphNode>patches[k].handle)
        if patches[k].kind != ADDRESS: continue
        a = <Args*>patches[k].to
        address_write(&patches[k], patches[k].told[0] + patches[k].nbytes)
        code = (cu.cuGraphMemcpyNodeSetParams(<cu.CUgraphNode>patches[k].handle, &a.move) if a.copies
                else cu.cuGraphKernelNodeSetParams(<cu.CUgraphNode>patches[k].handle, &a.params))
    return code

cdef int cuda_unlink(cu.CUgraph graph, cu.CUgraphNode node) except? RAISES:
    """Take a node out; what stood behind it stands behind those before it."""
    cdef size_t n_before = 0, n_behind = 0, j, k
    cdef Nodes before, behind
    cdef int code = cu.cuGraphNodeGetDependencies(node, NULL, NULL, &n_before)
    if code == 0: code = cu.cuGraphNodeGetDependentNodes(node, NULL, NULL, &n_behind)
    if code: return code
    before.resize(n_before)
    behind.resize(n_behind)
    if n_before: code = cu.cuGraphNodeGetDependencies(node, before.data(), NULL, &n_before)
    if code == 0 and n_behind: code = cu.cuGraphNodeGetDependentNodes(node, behind.data(), NULL, &n_behind)
    for j in range(n_before):
        for k in range(n_behind):
            if code == 0: code = cu.cuGraphAddDependencies(graph, &before[j], &behind[k], NULL, 1)
    return code if code else cu.cuGraphDestroyNode(node)

cdef cu.CUgraph cuda_graph(Recording* r) except? NULL:
    """Of the capture under way; NULL: something ended that."""
    cdef cu.CUstreamCaptureStatus status
    cdef cu.CUgraph graph = NULL
    check(CUDA, cu.cuStreamGetCaptureInfo(cu_stream(r.stream), &status, NULL, &graph, NULL, NULL, NULL), CALL_CUT)
    return graph

cdef Py_ssize_t cuda_length(Recording* r) except -1:
    """How many nodes the capture under way has."""
    cdef size_t n = 0
    check(CUDA, cu.cuGraphGetNodes(cuda_graph(r), NULL, &n), CALL_CUT)
    return n

cdef list cuda_nodes(Recording* r, size_t first=0):
    """The nodes of the capture under way from this one on, in the order in which they were made."""
    cdef Nodes nodes
    check(CUDA, nodes_of(cuda_graph(r), &nodes), CALL_CUT)
    return [<uintptr_t>nodes[k] for k in range(first, nodes.size())]

cdef list cuda_streams(Recording* r):
    """Those that are captured: where ops run now, its own or a lane, then those of other GPUs."""
    cdef void* here = cuda_current_stream(r.device)
    if not cuda_joined(here): here = r.stream
    return [<uintptr_t>here] + [<uintptr_t>r.spread.others[k].stream for k in range(r.spread_open)]

cdef list cuda_mark_here(Recording* r):
    """For each of these streams: the nodes behind which its next one will stand."""
    return [last_nodes(<void*><uintptr_t>stream) for stream in cuda_streams(r)]

cdef list last_nodes(void* stream):
    """Behind which the capturing stream's next one will stand."""
    cdef cu.CUstreamCaptureStatus status
    cdef const cu.CUgraphNode* last = NULL
    cdef size_t n = 0, k
    check(CUDA, cu.cuStreamGetCaptureInfo(cu_stream(stream), &status, NULL, NULL, &last, NULL, &n), CALL_CUT)
    return [<uintptr_t>last[k] for k in range(n)]

cdef int cuda_back(Recording* r, list marks) except -1:
    """What these streams capture next comes behind these nodes, whatever they captured since."""
    for stream, mark in zip(cuda_streams(r), marks):
        check(CUDA, stream_behind(<void*><uintptr_t>stream, mark), CALL_CUT)
    return 0

cdef int stream_behind(void* stream, const vector[uintptr_t]& nodes) except? RAISES:
    return cu.cuStreamUpdateCaptureDependencies(
        cu_stream(stream), <cu.CUgraphNode*>nodes.data(), NULL, nodes.size(),
        cu.CUstreamUpdateCaptureDependencies_flags_enum.CU_STREAM_SET_CAPTURE_DEPENDENCIES)

cdef int cuda_thin(vector[void*]* vain) except? RAISES:
    """Take out nodes that were captured to look at, the last one first. Nothing stands behind them."""
    cdef int code = 0
    while not vain.empty():
        if code == 0: code = cu.cuGraphDestroyNode(<cu.CUgraphNode>vain.back())
        vain.pop_back()
    return code

cdef int cuda_order(Path* p, int device, void* stream) except? RAISES nogil:
    cdef OnDevice there
    if p.event_only:
        if p.event is NULL: return 0
        there.go(device)
        return cu.cuStreamWaitEvent(cu_stream(stream), <cu.CUevent>p.event, 0)
    # An event of a capture would draw this stream into it. Calls do not come here (path_captured), and who begins a
    # capture as PyTorch does has waited for the device.
    if cuda_joined(p.last_stream): return 0
    return cuda_follow(&p.event, p.device, p.last_stream, device, stream)

cdef int cuda_move(void* to, const void* source, int64_t nbytes, int device) except? RAISES nogil:
    cdef OnDevice here = on_device(device)
    return cu.cuMemcpyDtoDAsync(
        <cu.CUdeviceptr><uintptr_t>to, <cu.CUdeviceptr><uintptr_t>source, nbytes,
        cu_stream(cuda_current_stream(device)))

cdef int cuda_rescue(void* held, PyObject* proto, int device) except? RAISES:
    # The graph's addresses are fixed, so the holder's bytes move. Any thread may free a recording, and any GPU be
    # current.
    cdef OnDevice here
    if tensor_device(proto) >= 0: device = tensor_device(proto)         # another GPU of the recording's
    cuda_thread_ready(device)
    here.go(device)
    out_rescue(held, device, move_or_fail)
    return 0

cdef int move_or_fail(void* to, const void* source, int64_t nbytes, int device) noexcept nogil:
    with gil:
        try:
            return cuda_move(to, source, nbytes, device)
        except Exception:
            return -1

cdef void cuda_destroy(void* graph, void* exec_, CudaPool* pool, void* state) noexcept:
    # Safe for launches in flight (the driver defers); the memory they touch is the pool's and stays.
    if exec_ is not NULL: cu.cuGraphExecDestroy(<cu.CUgraphExec>exec_)
    if graph is not NULL: cu.cuGraphDestroy(<cu.CUgraph>graph)
    if state is not NULL: cuda_state_free(state)
    if pool is not NULL: cuda_pool_count(pool, -1)

DRIVERS[CUDA] = Driver(
    cuda_restore, cuda_begin, cuda_copy, cuda_feed, cuda_words, cuda_spend, cuda_fetch, cuda_cut, cuda_resume,
    cuda_wait,
    cuda_fork, cuda_enter, cuda_leave, cuda_decide,
    cuda_end, cuda_instantiate, cuda_checkpoint, cuda_abort, cuda_launch, cuda_patch, cuda_scalar,
    cuda_word_done, cuda_word_free, cuda_bind,
    cuda_order, cuda_current_stream, cuda_move, cuda_rescue,
    cuda_destroy)
