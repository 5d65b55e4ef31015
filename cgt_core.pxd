# A recording is a row of `nodes`: one function, recorded once, for one set of guards. A call walks
# its arguments along a *spec* (the program of a pytree), which yields the tensor leaves; it then
# looks for a node of its function whose guards accept them, and replays it: sources of copied
# slots are patched, outputs are taken from their rows, the graph is launched. No Python runs.
#
#   fns    [ f ... ]          f.first_spec ─► specs, newest match first
#   specs  [ s ... ] ──────► ops    [ TUPLE TENSOR PLAIN | TUPLE DICT TENSOR TENSOR | ... ]
#   paths  [ host cuda:0 ... ]   per device: the node that ran last; its ancestors ran before it
#   edges  [ path parent fn ] ─► nodes: children of one node for one function, newest match first
#   nodes  [ n ... ] ──┬───► slots  [ leaf leaf reached | leaf ... ]   what the graph reads; what a hit
#                      │              compares of each lies apart, in `guards`, row by row
#                      ├───► outs   [ FRESH SHARED VIEW | ...      ]   what the call hands out
#                      ├───► ops    [ ...                          ]   the pytree of the result
#                      ├───► patches            what of the graph is set before a launch
#                      ├───► numbers            what a call's numbers come to, on their way into the graph
#                      ├───► reads              values that Python reads on the way, each behind a graph of its own
#                      ├───► undos              what these graphs overwrite, and where it is kept until all is known
#                      ├───► effects            what a replay does to the call's tensors besides their bytes
#                      ├───► grads, tags ──► places
#                      ├───► saves, flows       what its backward needs, and where gradients go
#                      ├───► deads  which outputs of its ancestors must be dead before it runs
#                      └───► exec   the driver's graph
#
# A thing is a row and its name is its row number; NONE ends a list. A node's parts of varying length
# are slices (at, len) of one long array per kind; freeing a node closes the gap, so a slice moves but never
# tears. Ids may cross calls, pointers to rows never outlive a call that can add rows.
#
# Ownership. Rows borrow every Python object they name: the owner is the function's `keep` dict, which lives with what
# `jit` returned. So the garbage collector sees through a jitted function, and a function nobody holds takes its rows
# along. Of tensors only `outs.tensor` and those of followed slots are owned here.
#
# The nodes are trees, one per device and pool. A call becomes a child of the node that ran last in this iteration, so a
# node's ancestors are what ran before it, and it was recorded with the pool in the state that they left: outputs of
# theirs that were held are allocated, everything else is free for it. So a launch overwrites nothing that its path
# still holds, provided that what was dead when it was recorded (deads) is dead now. What an *ended* iteration left held
# overlaps anything: it is rescued before the next iteration's first launch.
#
# A call whose result requires grad makes one autograd node, which holds what the forward saved. The
# backward is a function of the table like any other, called by that node with gradients and saved
# tensors: its recording is a child of whatever ran in between.
#
# The GIL guards the table. `paths.lock` orders calls on one device; it is only waited for without
# the GIL. A launch runs without the GIL and touches no row.

from libc.stdint cimport int8_t, int32_t, int64_t, uint32_t, uint64_t
from libcpp.unordered_map cimport unordered_map
from libcpp.utility cimport pair
from libcpp.vector cimport vector
from cpython.object cimport PyObject

cdef extern from "cuda_shim.h" namespace "cgt":
    cppclass CudaPool:
        pass

ctypedef int32_t id_t

# Enums live here and nowhere else: `cpdef` makes module constants of them, which Python imports from the core.
cpdef enum: NONE = -1

cpdef enum:                 # Kind: ops.kind, and what ops.obj is
    TENSOR                  # its exact type
    PLAIN                   # the value, compared with SAME_VALUE
    SAME                    # the object, compared by identity
    EQUAL                   # the object, compared with SAME_VALUE
    TUPLE
    LIST
    DICT                    # the keys in insertion order, each compared with SAME_VALUE
    NAMEDTUPLE              # type
    DATACLASS               # (type, names of the attributes, how many the instance's dict has)
    CUSTOM                  # (type, flatten_fn, context, unflatten_fn), as registered with torch
    LIVE                    # the exact type of a number that may be another one at each call

cpdef enum:                 # Binding: slots.binding, decided by make/describe.py when the node is recorded
    UNUSED                  # the function never touched it: only an argument's metadata is guarded
    PINNED                  # the graph reads this address: the pointer must be the same
    # the graph copies from today's address first, and back if it writes it: same alignment class
    COPIED
    VALUE                   # a CPU number baked into kernels: the bytes must be the same
    TWIN                    # the same tensor as a copied or rebound slot: both must be at one address
    REBOUND                 # the graph is told today's address: same alignment class

cdef enum:                  # GradWant: guards.grad
    ANY_GRAD = -1               # nothing of the recording depends on it
    NO_GRAD, SOME_GRAD

cpdef enum:                 # OutKind: outs.kind
    FRESH                   # memory of the recording
    SHARED                  # a view of the fresh output `ref`
    VIEW                    # a view of slot `ref`, `shift` bytes from its start
    INPUT                   # the very tensor in slot `ref`
    AGAIN                   # the very tensor of output `ref`
    PART                    # a view that autograd makes, since it requires grad: value `ref` of those of ops
    READOUT                 # no tensor: number `ref`, or what ops[0] makes of memory of the host that the graph writes
    # a tensor subclass: what ops[0] makes around outputs ops[1], which are its attributes ops[2]
    WRAPPER

cdef enum:                  # Policy: fns.outputs: what happens to a held output that is about to be overwritten
    RESCUE, POISON, BORROW

cpdef enum:                 # Part: kinds of rows of which a node has a slice; see PARTS in table.pxi
    SLOTS, GUARDS, OUTS, PATCHES, EFFECTS, GRADS, TAGS, PLACES, DIMS, DEADS
    SAVES, FLOWS, READS, NUMBERS, UNDOS, N_PARTS

cpdef enum:                 # PatchKind
    COPY_SOURCE             # a copied slot's copy node reads from today's address
    COPY_BACK               # and behind all else another one writes there, if the slot is written
    WORDS                   # the node that writes a generator's two words writes today's
    SCALAR                  # an argument of an op, or a word of a kernel's arguments, that comes of a number
    BOUND                   # was a COPY_SOURCE: the recording works on the slot's memory itself
    ADDRESS                 # CUDA: a word of a node's arguments is an address in there
    FED                     # CUDA: in front of the graph the bytes of a slot on the host are copied to where it works

cpdef enum:                 # EffectKind
    WRITES                  # the graph writes the slot's tensor, and _version moves
    SETS_GRAD               # .grad of the slot's tensor is replaced
    REQUIRES_GRAD           # the slot's tensor does from now on
    ADVANCES                # a constant is added to a place's whole number
    PUTS                    # an output, a number, a constant, or what is made of such comes to a place
    APPENDS                 # the same, to the end of a place's list

cpdef enum:                 # NumberOp: numbers.op
    AT_PLACE                # what place a holds, or element b of that
    IN_CALL                 # the call's number a
    IN_TENSOR               # what the tensor of slot a holds, on the host; the same as number b, if that is one
    EQUALS                  # a constant
    ADDED, SUBTRACTED, MULTIPLIED, DIVIDED, FLOORED, REMAINDER, RAISED, NEGATED, ABSOLUTE, AS_FLOAT, AS_INT
    ROUNDED                 # to 32 bits
    # what Python's math does: sqrt, exp, log, sin, cos, tan, tanh
    ROOT, EXPONENTIAL, LOGARITHM, SINE, COSINE, TANGENT, HYPERBOLIC
    LOOKED_UP               # what a table has at number a
    AT_READ                 # what read a leaves on the host, in 64 bits
    LESS, AT_MOST, SAME_AS, OTHER_THAN, MORE, AT_LEAST      # 0 or 1

cpdef enum:                 # Form: what a kernel is given of a number
    AS_F64, AS_I64, AS_F32, AS_I32, AS_F16, AS_BF16
    INVERSE_F64, INVERSE_F32    # 1 / number in 64 bits, rounded to so many
    INVERSE_OF_F32              # 1 / number, both in 32 bits

cpdef enum:                 # PlaceKind
    DICT_ITEM, DICT_LEN, CELL, LIST_ITEM, LIST_LEN, TYPE_ATTR, ATTR, EMPTY
    NAMES_ABSENT            # a dict, and a tuple of names of which none is there

cpdef enum:                 # PlaceGuard: places.guard: what must be as it was
    BY_IDENTITY             # the object
    BY_VALUE                # its type and value
    BY_TYPE                 # its type: a number that the call advances, and nobody in it sees
    NOT_AT_ALL              # the call stores something, and nobody in it sees what is there
    FOLLOWS                 # its type: the tensor that is there now is a slot's
    IS_NUMBER               # its type: the number that is there now is one of the node's numbers
    ANY_LIST                # the call appends to a list, and nobody in it sees to which: that no other place has

cpdef enum:                 # Miss: why a node did not accept a call; node_why says, dispatch.py explains
    FITS, MISS_SPEC, MISS_AMBIENT, MISS_META, MISS_POINTER, MISS_ALIGN, MISS_VALUE, MISS_OVERLAP,
    MISS_GRAD, MISS_PLACE, MISS_ALIVE, MISS_SAME, MISS_DROPOUT, MISS_NUMBER

cdef enum: N_KINDS = 256, KIND_COUNT = 0xFFFF   # rows of Fn.kinds; the bits of a row that count
cpdef enum: HOST, CUDA      # DriverKind

cpdef enum: BRANCH, LOOP    # ForkKind: one of two bodies runs; one body runs as long as the predicate says so

cdef struct Verdict:            # calls run eagerly that no recording takes
    PyObject* reason            # owned, a str; NULL: none
    int64_t until               # the function was called so often
    uint64_t key                # of a spec's: what its calls must be like (call_key)

cdef struct Fn:
    int32_t alive
    int32_t outputs             # Policy
    id_t first_spec             # newest match first
    id_t path                   # of the node that matched last; NONE without nodes
    uint64_t paths              # bit k: it has nodes on path k
    int32_t backward            # called by autograd, which is given aliases: they may become a .grad
    PyObject* range_name        # borrowed: what profilers show around a replay
    Verdict verdict             # on all its calls
    uint64_t[N_KINDS] kinds     # high bits of a call_key, and how many such calls came that no recording took
    int32_t alike               # of the last call's kind
    int32_t patience            # of so many Python is told, or if a recording is replayed at last; 0: never
    int32_t wasted              # recordings freed that were never replayed
    uint64_t unknown            # of the values that the last call read, where no recording had them; or 0
    int32_t vain                # by how many more calls than not segments ran for values nobody has; at most VAIN
    int64_t born                # a stale id is told by this
    int64_t calls, warmups, records, replays, eager, rebinds, copied_bytes, rescues, rescued_bytes

cdef struct Spec:
    int32_t alive
    id_t fn, next
    id_t op_at, op_n
    int32_t n_leaves
    int32_t n_numbers           # live ones, which stand behind the leaves
    uint64_t shape              # of the program without its plain values: equal shapes, equal op numbers
    Verdict verdict             # on calls like the last that had one

cdef struct Op:                 # one step of a pytree's program, in pre-order
    int32_t kind                # Kind
    int32_t n                   # children
    PyObject* obj               # type, value, weak reference, keys: see Kind and pytree.py

cdef struct Node:
    int32_t alive
    id_t fn, spec, path
    id_t parent                 # the node that ran before it; NONE for the first of an iteration
    id_t next                   # sibling of the same function
    int32_t children            # of all functions
    int32_t depth               # of the parent, plus one
    uint64_t key                # of spec, ambient state and shapes: tells siblings apart at once
    int64_t used                # when it ran last; least recently used leaves are evicted
    uint64_t ambient[3]         # tensor_shim.h: ambient_now
    id_t at[N_PARTS]            # its slices: from row `at`
    id_t len[N_PARTS]           # so many
    id_t ret_at, ret_n          # its result's program, in ops
    id_t loose_n                # places of so many of its tags, the last, are compared at each call
    uint64_t epoch              # dict_epoch when the others held last
    int32_t joined_n            # to so many of its flows, the first, several edges of its graph lead
    PyObject* site              # borrowed: the jitted backward; NULL: no result requires grad
    int32_t n_given             # outputs of the result; hidden ones come behind
    int32_t waits               # some output is a READOUT: made when the graph is done
    int32_t keeps_grads         # a .grad that it replaces is still there when it reads a value
    int32_t writes              # some slot is written: copied slots must not overlap it
    int32_t grads_move          # some gradient may be another tensor at each call
    int32_t same_grads          # of some slots it is guarded which tensor .grad is
    # the tensors of some slots are what places hold; 2: others came since they were told apart
    int32_t follows
    int32_t stale               # some number is another one than the graph was told
    int32_t moved               # some rebound slot may lie elsewhere than the graph was told
    int32_t unproven            # the first replay at other addresses is compared with eager
    void* watchdog              # its replays wait for other processes: who sees to it that they end; or NULL
    int64_t dropout             # number of the buffer with cuDNN's random state that it draws from; 0: it does not
    PyObject* dropout_buffer    # borrowed: an alias of that
    PyObject* ret_make          # borrowed: what makes a result that has objects of Python's, or NULL
    void* graph                 # CUDA: CUgraph; host: NULL
    void* exec                  # CUDA: CUgraphExec, NULL for a graph without nodes; host: the tape. Of the last segment
    CudaPool* pool              # CUDA: it lives in; host: NULL
    void* state                 # CUDA: the allocator's state after it; host: NULL
    Spread* spread              # CUDA: on which other GPUs it works, too; or NULL
    void* wide                  # CUDA: Wide, the other form of a graph that is launched as a chain; or NULL
    int32_t n_graph_nodes
    # CUDA: of the device, that the driver took for it; it takes pieces of some MiB, and not for each
    int64_t exec_bytes
    int64_t n_replay
    int64_t audit_at            # the replay with this number is compared with eager; 0: none
    int64_t tried               # in which call of its function its segments ran last

cdef struct Edge:               # from (path, parent, function), see edge_key, to the nodes there: one at least
    id_t first                  # newest match first
    Verdict verdict             # on all calls there

cdef struct Dead:               # a fresh output whose memory a descendant may use
    id_t node
    id_t out                    # relative to the node's outs

cdef struct Guard:              # what each hit compares of a slot's tensor; the row of its Slot, 48 bytes
    # the reached tensor, borrowed, but where it follows; of a leaf: what it must be, being reached, too
    PyObject* tensor
    uint64_t keys               # dispatch key set
    # PINNED: where it must be; REBOUND: where it was told to be; else where it was when it was recorded
    char* ptr
    int32_t leaf                # which tensor leaf; NONE for one reached by closure, module or .grad
    id_t grad_of                # it is .grad of this slot of the node's, whatever that is now; or NONE
    id_t dim_at                 # sizes then strides, index into the node's dims
    uint32_t data_kind          # dtype and device (tensor_shim.h: impl_kind)
    int8_t ndim
    int8_t autograd             # AutogradState (tensor_shim.h)
    int8_t itemsize             # bytes of an element
    int8_t binding              # Binding
    int8_t grad                 # GradWant
    int8_t odd                  # more than this row tells is guarded: guard_odd

cdef struct Slot:               # the rest
    id_t from_node              # PINNED: it is output `from_out` of this ancestor, wherever that is; or NONE
    id_t from_out
    int64_t shift               # bytes from the start of that output; COPIED: from `beside`
    int32_t identity            # of a leaf: it matters which tensor it is, by `tensor`, grad_of, same or apart
    id_t same                   # it is the very tensor of this slot of the node's; or NONE
    int32_t apart               # and it is that of no other slot (gradients flow to it)
    int32_t align               # data pointer modulo align_of (guard.pxi); NONE: any
    id_t copy                   # COPIED, REBOUND: index into the node's patches; TWIN: the slot that is; or NONE
    id_t back                   # COPIED, and written: the patch that copies back; REBOUND, and written: `copy`; or NONE
    # COPIED: it shares bytes with this earlier one, and lies `shift` bytes behind it; or NONE
    id_t beside
    int32_t whole               # it begins its storage, as when it was recorded
    int32_t follows             # its tensor, which is owned, is what a place holds
    id_t value                  # VALUE only: where its bytes are among the node's dims

cdef struct Out:
    int32_t kind                # OutKind
    id_t ref                    # output or slot it refers to
    id_t grad_slot              # it becomes .grad of this slot's tensor, or NONE
    int32_t reads_old           # and the node reads what was there
    int32_t hidden              # not part of the result
    int32_t root                # it requires grad: handed out as a new tensor whose backward is the node's
    int32_t sharers             # FRESH: how many SHARED outputs refer to it
    id_t inside                 # the WRAPPER whose attribute it is, or NONE
    int32_t version             # _version when handed out; VIEW: CreationMeta
    uint64_t keys
    uint32_t data_kind          # as of a Guard
    int32_t ndim
    id_t dim_at
    int64_t offset              # storage offset, elements
    int64_t shift               # VIEW: bytes from the start of the slot's tensor
    PyObject* proto             # owned: alias over the memory that the graph writes
    PyObject* line              # owned: where it was made, a str
    # owned: PART, READOUT, WRAPPER: what makes it (views.py, readout.py, wrappers.py); else an empty tuple
    PyObject* ops
    PyObject* tensor            # owned: what was handed out last; NULL: make a new one
    void* storage               # FRESH, owned: StorageImpl handed out last over the group's memory; its
                                # holders count, whatever became of the tensors; NULL: none

cdef struct Save:               # a tensor that the backward gets, behind the gradients of the roots
    id_t slot                   # the call's tensor of this slot; or NONE
    id_t out                    # this output's cached tensor; or NONE

# a node of the graph whose parameters a replay sets, where they changed since the last time
cdef struct Patch:
    int32_t kind                # PatchKind
    id_t slot                   # a copy's: whose tensor it is about; NONE: the recording does without it
    void* handle                # CUDA: CUgraphNode; host: number of the tape's op
    # where it writes: nbytes, or two words of 64 bits; COPY_BACK: where it reads; SCALAR, ADDRESS: see cuda.pxi
    char* to
    int64_t nbytes              # ADDRESS: so far behind where the slot begins
    # what the exec was told last: an address; seed and offset; FED: 0, is it waited for?; SCALAR: bits. Of SCALAR and
    # ADDRESS: is it unknown?
    uint64_t told[2]
    id_t number                 # SCALAR: which; ADDRESS: in the memory of which BOUND; or NONE
    int32_t at, part            # SCALAR, host: argument of the op, element of that or NONE. CUDA: offset in bytes, Form
    id_t segment                # SCALAR: of which read it is the segment; NONE: of the last
    PyObject* generator         # WORDS, borrowed
    uint64_t advance            # how far one run moves it: 0 where it sets it back, too
    bint draws                  # does a run draw from it?
    int32_t device

cdef union Bits:                # of a Python float or int that C can hold
    double f
    int64_t i
    uint64_t word

cdef struct Number:             # a step of what is computed from numbers that a call finds, as Python computed it
    int32_t op                  # NumberOp
    id_t a, b                   # rows of this part, or where it comes from
    int8_t is_float             # which of its bits count
    int8_t must                 # the recording is for this value alone: want
    Bits now
    uint64_t want
    id_t after                  # it is known when this read has run; NONE: before the first
    const char* table           # LOOKED_UP: so many numbers of its kind, kept alive by the node's owner
    int64_t length

cdef struct Read:               # Python reads a value, on which depends what comes behind: the end of a segment, mostly
    void* graph                 # of the segment; as in a Node. NULL: the value comes of the tape alone
    void* exec
    void* tape                  # CUDA: ops of the host, which run beside the graphs; or NULL
    int32_t n_graph_nodes
    int32_t draws               # it, or one before it, draws random numbers of the host's
    char* at                    # where the segment leaves the value, on the host
    int64_t nbytes              # 0: nothing is read, the tape runs for what it draws
    const char* value           # borrowed: what it must be
    id_t number                 # it may be any: this number of the node's; or NONE
    PyObject* island            # borrowed: Python to call when the segment was launched, instead of a value; or NULL
    int32_t pure                # that is an op alone: it may run twice, and changes nothing that guards compare

cdef struct Undo:               # memory from outside that a segment overwrites, with a value read behind it
    PyObject* to                # borrowed: a tensor of its bytes
    PyObject* saved             # borrowed: and of those where the recording copies it first. On the host memory moves
    int64_t nbytes
    id_t segment                # which one does both

cdef struct Effect:             # what a replay does besides its results
    int32_t kind                # EffectKind
    id_t slot                   # whose tensor; NONE where it is about a place
    int32_t bumps               # WRITES: by how much _version moves
    # SETS_GRAD: hidden output that becomes .grad, or NONE: it becomes None; PUTS, APPENDS: or NONE
    id_t out
    id_t place                  # which, relative to the node's places; or NONE
    id_t tag                    # of that place, relative to the node's tags
    id_t number                 # PUTS, APPENDS, WRITES: the number that comes to it; or NONE
    int32_t made                # `by` is (what makes it, of what)
    PyObject* by                # the constant, or that, borrowed

cdef struct Grad:               # what is guarded of a tensor that can have a .grad
    id_t slot
    int32_t was_none
    void* was                   # the TensorImpl that must be .grad, where a result is made from it; or NULL

cdef struct Tag:                # places of one dict, skipped while the dict's tag stands still
    PyObject* home              # borrowed; NULL: compared at each call
    uint64_t tag
    id_t place_at, place_n      # relative to the node's places

cdef struct Place:              # a value that the function can read without its arguments
    int32_t kind                # PlaceKind
    int32_t guard               # PlaceGuard
    PyObject* home              # borrowed
    PyObject* key
    PyObject* want              # NULL: must stay absent
    int64_t number              # *_LEN and LIST_ITEM; ATTR: function_part
    # FOLLOWS: whose tensor it is, or the first of a tuple's; IS_NUMBER: which number, or the first of a tuple's
    id_t slot
    int32_t items               # FOLLOWS: so many slots, of the tensors there in their order

cdef struct Path:               # one per device: row 0 the host, row 1+i cuda:i
    int32_t driver              # DriverKind
    int32_t device              # -1 for the host
    void* lock                  # std::mutex
    unsigned long owner         # thread that holds it, or 0
    # it runs code of the user's, which may wait for autograd's threads: these need not wait for it
    int32_t lent
    unsigned long thread        # the first thread that called on this device
    int32_t shared              # another one did, too
    int32_t settles             # the next path_wait gives the first one time
    void* last_stream           # of the last launch; another one waits for it
    void* event
    int32_t fleeting            # last_stream is not PyTorch's: its owner may destroy it once the call is over
    int32_t event_only          # so that others wait for the event, which stands behind the last launch
    int64_t step                # iteration
    int32_t said                # it began by step(), not by itself
    id_t current                # the node that ran last in this iteration, or NONE
    int32_t pending             # forwards of this iteration whose backward may still come
    int64_t launches            # so far; no recording survives one by another thread
    int64_t since               # of these when step() was said last, or NONE
    int64_t usual               # how many there were between the last two
    id_t stale                  # the last of an ended iteration whose outputs are not released yet

cdef struct Column:             # a growable array
    void* rows
    int32_t n, cap, size

cdef struct Fork:               # an op with bodies, while it is recorded
    int32_t kind                # ForkKind
    uint64_t condition          # CUDA: the handle that a kernel sets from the predicate
    void* bodies[2]             # CUDA: CUgraph; host: tapes

cdef struct Beside:             # another GPU on which a recording works
    int32_t device
    void* stream                # its stream in the capture
    CudaPool* pool              # of the path: on this GPU no other path's recordings use it
    void* state                 # of that pool behind the recording
    void* event                 # its caller's stream has come so far

cdef struct Spread:             # a recording's other GPUs: owned by the recording under way, then by its node
    int32_t n
    void* event                 # the launch is done
    Beside others[1]            # n of them

cdef struct Recording:          # the one recording under way; the lock in sites.py guards it
    int32_t active
    int32_t driver, device
    void* stream
    CudaPool* pool
    Spread* spread              # CUDA: on which other GPUs; or NULL
    void* wide                  # CUDA: as of a Node
    int32_t wide_stays          # it is launched so, and nobody measures
    int64_t lanes_home          # torch's id of `stream`, where ops run on lanes
    id_t parent                 # what it will be a child of
    int64_t step                # the iteration it belongs to
    int64_t launches            # of its path until then
    int32_t pool_open, capturing
    int32_t spread_open         # so many of its other GPUs are in the capture
    int32_t cuts                # segments that ended
    int32_t ran                 # what it recorded was launched, or ran while it was recorded
    void* graph
    void* exec
    void* tape                  # CUDA: ops of the host since the last value that was read; or NULL
    void* state
    int32_t n_graph_nodes
    int32_t n_inner             # CUDA: nodes of the bodies in the segment under way
    int64_t exec_bytes          # of the device, that the driver took for what is launched
    double seconds[4]           # Phase

cdef enum: RESTORE, CAPTURE, INSTANTIATE, CHECKPOINT    # Phase

cdef struct Table:
    Column fns, specs, ops, nodes, paths
    unordered_map[uint64_t, Edge] edges
    Column parts[N_PARTS]       # of all nodes
    Recording rec
    Column rec_patches, rec_deads, rec_reads
    vector[void*] rec_vain      # nodes of the capture under way that are to be taken out
    vector[void*] rec_live      # addresses of the path's memory that must stay as it is
    vector[pair[id_t, id_t]] freed      # (fn, node) that Python has not been told of yet
    int32_t max_path            # nodes of one iteration, before another one begins by itself
    int64_t births              # counter behind every `born`; of programs that were freed, too
    int64_t launches            # counter behind every `used`
    int64_t allocations         # driver handles and rows alive: the books that tests balance
