# The seam. What differs between a CUDA graph and a host tape is this struct of functions and nothing else; every one
# returns 0 or an error code, and any GPU may be current when it is called. Whoever calls one asks `fault` first: either
# side can be told to fail at call k with code c (fault_set), which is how error paths are tested without a GPU.

cdef enum:                        # DriverCall, in the order of CALL_NAMES
    CALL_RESTORE, CALL_BEGIN, CALL_COPY, CALL_WORDS, CALL_END, CALL_INSTANTIATE, CALL_CHECKPOINT,
    CALL_LAUNCH, CALL_PATCH, CALL_ORDER, CALL_MOVE, CALL_SPEND, CALL_CUT, CALL_WAIT, CALL_FORK

CALL_NAMES = ("restore", "begin", "copy", "words", "end", "instantiate", "checkpoint", "launch", "patch",
              "order", "move", "spend", "cut", "wait", "fork")

cdef enum:                        # our own codes; the driver's are positive
    ERROR_HOST_MEMORY = -2        # the graph reads host memory that nobody owns
    ERROR_MEMORY_NODES = -3       # the graph allocates
    ERROR_FOREIGN_MEMORY = -4     # somebody else keeps memory of the pool
    RAISES = -5                   # none: an exception is set: PyTorch's, or cydriver's where a driver lacks a function
    ERROR_OLD_DRIVER = -6
    ERROR_HOST_FUNCTION = -7      # the graph calls a function of the host, whose data nobody owns
    ERROR_TAPE = -10              # an op of the tape threw: what eager raises is set

cdef struct Driver:
    int (*restore)(Recording* r, void* state, const vector[void*]& live) except? RAISES    # the pool behind the parent
    int (*begin)(Recording* r) except? RAISES
    int (*copy)(Recording* r, Patch* p, PyObject* to) except? RAISES   # record the copy node of a copied slot
    # copy what a slot of the host's holds, on this stream; the host's driver has no such slots
    int (*feed)(Patch* p, const void* source, void* stream) except? RAISES nogil
    int (*words)(Recording* r, Patch* p) except? RAISES        # record the node that writes seed, offset
    int (*spend)(Recording* r, PyObject* proto) except? RAISES  # a result of the path is not needed from here on
    # record that x, contiguous, is copied to the host
    int (*fetch)(Recording* r, PyObject* x, char* to, int64_t nbytes) except? RAISES
    int (*cut)(Recording* r, Read* read) except? RAISES        # a segment ends: its graph and exec
    int (*resume)(Recording* r) except? RAISES                 # the next one begins
    int (*wait)(void* stream, int device) except? RAISES nogil # for what was launched
    int (*fork)(Recording* r, Fork* f, PyObject* pred, void* stream) except? RAISES    # record an op with bodies: these
    # what is recorded on this stream is in the body
    int (*enter)(Recording* r, void* body, void* stream) except? RAISES
    int (*leave)(Recording* r, void* body, void* stream) except? RAISES    # no more
    # a body's last op: does it run again?
    int (*decide)(Recording* r, uint64_t condition, PyObject* pred, void* stream) except? RAISES
    int (*end)(Recording* r, Patch* patches, int32_t n) except? RAISES    # graph, n_graph_nodes
    int (*instantiate)(Recording* r) except? RAISES            # exec
    # The recording's memory becomes the pool's: made, outs are lists of tensors; live as in restore.
    # `early`: of outs, those whose bytes must last until the recording itself writes them.
    int (*checkpoint)(Recording* r, list made, list outs, list early, const vector[void*]& live) except? RAISES
    void (*abort)(Recording* r) noexcept                 # undo begin, whatever happened since
    int (*launch)(void* exec_, void* stream, int device) except? RAISES nogil
    int (*patch)(void* exec_, Patch* p) except? RAISES nogil   # tell the exec p.told
    int (*scalar)(void* exec_, Patch* p, Number* r) except? RAISES     # tell it a number
    int (*word_done)(void* exec_, Patch* p) except? RAISES     # that was the last for this op
    void (*word_free)(Patch* p) noexcept
    int (*bind)(Recording* r, Patch* p) except? RAISES         # a copied slot becomes a rebound one; its copies go
    # this device's stream waits for the path's last launch
    int (*order)(Path* p, int device, void* stream) except? RAISES nogil
    void* (*stream)(int device) noexcept nogil           # the caller's current stream
    # on the caller's current stream
    int (*move)(void* to, const void* source, int64_t nbytes, int device) except? RAISES nogil
    int (*rescue)(void* held, PyObject* proto, int device) except? RAISES  # part a holder's storage and proto's
    void (*destroy)(void* graph, void* exec_, CudaPool* pool, void* state) noexcept

cdef Driver DRIVERS[2]

cdef inline double now() noexcept nogil:
    """Seconds, from an arbitrary start."""
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC, &t)
    return t.tv_sec + 1e-9 * t.tv_nsec

cdef struct Fault:
    int32_t call, after, code

cdef Fault FAULT
FAULT.call = NONE

cdef inline int fault(int call) noexcept nogil:
    """The code that call number `after` was told to fail with, or 0."""
    if FAULT.call != call: return 0
    if FAULT.after > 0:
        FAULT.after -= 1
        return 0
    FAULT.call = NONE
    return FAULT.code

ERRORS = {
    ERROR_HOST_MEMORY: "the graph would read host memory that may be gone at the next replay",
    ERROR_FOREIGN_MEMORY: "something that is not a tensor of the function keeps memory that was allocated in it",
    ERROR_MEMORY_NODES: "the graph would allocate memory by itself",
    ERROR_HOST_FUNCTION: "the graph would call a function of the host, whose data may be gone at the next replay",
    ERROR_OLD_DRIVER: f"the driver is older than CUDA {OLDEST // 1000}.{OLDEST % 1000 // 10}",
}

class DriverError(RuntimeError):
    """Facts of a failed driver call: (code, name, call). dispatch.py makes the sentence."""

cdef int fail(int driver, int code, int call) except -1:
    """Raise what this code tells, or the exception that is set."""
    if PyErr_Occurred() is not NULL: return -1
    name = ERRORS.get(code) or (cuda_error_name(code) if driver == CUDA else f"host driver error {code}")
    raise DriverError(code, name, CALL_NAMES[call])

cdef inline int check(int driver, int code, int call) except -1:
    return fail(driver, code, call) if code != 0 else 0

cdef int bytes_move(int device, void* to, const void* source, int64_t nbytes) except -1:
    """Copy them, in the order of the caller's current stream; -1: the host."""
    cdef int driver = CUDA if device >= 0 else HOST
    return check(driver, fault(CALL_MOVE) or DRIVERS[driver].move(to, source, nbytes, device), CALL_MOVE)
