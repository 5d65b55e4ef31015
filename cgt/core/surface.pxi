# What Python sees: ids in, plain tuples out. Only the surface, this chapter and those behind it, names the
# process's table and has `def`. Here: functions, specs, nodes, verdicts, paths.

import weakref
from collections import namedtuple

cdef object WEAKREF = weakref.ref
cdef object METHOD = types.MethodType
FAILED = [None]            # (f, DriverError) -> the exception that a failed replay raises
SWEEP = [None]             # () behind a call in which code of the user's ran; set once by the front end
RESCUED = [None]           # (f, bytes, line) of a result that was moved, where somebody listens
UNREPLAYED = [None]        # (f, reason) -> the exception of a call that is not a replay where one is required
POISONED = [None]          # (line that made it) -> message; set once by the front end
SAME_VALUE = [None]        # (recorded, value) -> bool for rare types; set once by the front end
REDUCE = [None]            # (what jit returned) -> what makes it again where it is pickled or copied; set likewise
MAKE_VIEWS = [None]        # (values, steps): adds to the values what these make of them; set once by the front end

table_start(&TABLE)
dict_watch_start()
observe_start()
cuda_dropout_watch()

cdef frozenset OF_FUNCTIONS = frozenset(
    "__code__ __globals__ __closure__ __defaults__ __kwdefaults__ __self__ __annotations__".split())

cdef class Site:
    """What `jit` returns: knows one row, and keeps alive what that needs. Name, docstring and all else that a function
    shows lie in its dict."""
    cdef id_t f
    cdef object on_miss
    cdef object function        # what runs where a verdict stands
    cdef dict reasons           # [text] counts such calls
    cdef dict __dict__
    cdef object __weakref__

    def __cinit__(self, int f, object on_miss, object function, dict reasons):
        self.f, self.on_miss, self.function, self.reasons = f, on_miss, function, reasons

    def __call__(self, *args, **kwargs):
        return call(&TABLE, self.f, <PyObject*>args, <PyObject*>kwargs, self.on_miss, self.function, self.reasons)

    def __get__(self, instance, owner):
        return self if instance is None else METHOD(self, instance)

    def __repr__(self):
        cdef Fn* fn = fn_row(&TABLE, self.f)
        return f"<cgt.jit of {self.__qualname__}, {fn.replays} of {fn.calls} calls replayed>"

    def __getattr__(self, str name):
        """What tools ask functions and methods for."""
        if name in OF_FUNCTIONS: return getattr(vars(self).get("__wrapped__"), name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __copy__(self): return self

    def __prepare_scriptable__(self): return vars(self)["__wrapped__"]      # torch.jit.script asks for it

    def __reduce__(self): return REDUCE[0](self)

# `x.f(y)` calls it with x in front and makes no bound method, as of functions.
(<PyTypeObject*>Site).tp_flags |= Py_TPFLAGS_METHOD_DESCRIPTOR

def fn_add(int outputs, bint backward, str range_name, object build):
    """build(id, born) with a row for a new function, which goes again if that fails; what it returns. The caller keeps
    the name, which profilers show. backward: autograd calls it."""
    cdef id_t f = row_take(&TABLE, &TABLE.fns)
    cdef Fn* fn = fn_row(&TABLE, f)
    fn.outputs = outputs
    fn.backward = backward
    fn.range_name = <PyObject*>range_name
    fn.first_spec = fn.path = NONE
    TABLE.births += 1
    fn.born = born = TABLE.births
    try:
        return build(f, born)
    except BaseException:
        fn_free(f, born)
        raise

def fn_free(int f, int64_t born):
    """Free a function's rows; a stale id is ignored."""
    if fn_is(f, born):
        fn_clear(&TABLE, f)
        row_drop(&TABLE, &TABLE.fns, f)

def fn_is(int f, int64_t born):
    """Does the row still belong to the function that was born then?"""
    return bool(f < TABLE.fns.n and fn_row(&TABLE, f).alive and fn_row(&TABLE, f).born == born)

def fn_reset(int f):
    """Free a function's specs and nodes; counters of calls stay."""
    fn_clear(&TABLE, f)
    fn_row(&TABLE, f).wasted = 0
    memset(fn_row(&TABLE, f).kinds, 0, N_KINDS * sizeof(uint64_t))

def fn_count(int f, str column, int64_t by=1):
    """Add to one of the counters that Python keeps; take back a call with column 'calls'."""
    cdef Fn* fn = fn_row(&TABLE, f)
    if column == "warmups": fn.warmups += by
    elif column == "records": fn.records += by
    elif column == "eager": fn.eager += by
    elif column == "calls": fn.calls += by
    else: raise KeyError(column)

def fn_counts(int f):
    """(calls, warmups, records, replays, eager, rebinds, copied_bytes, rescues, rescued_bytes, graph_nodes)"""
    cdef Fn* fn = fn_row(&TABLE, f)
    cdef int64_t graph_nodes = 0
    for k in range(TABLE.nodes.n):
        node = node_row(&TABLE, k)
        if node.alive and node.fn == f: graph_nodes += node_length(&TABLE, node)
    return (fn.calls, fn.warmups, fn.records, fn.replays, fn.eager, fn.rebinds, fn.copied_bytes,
            fn.rescues, fn.rescued_bytes, graph_nodes)

def fn_hopes(int f):
    """(how many calls like the last one came that no recording took; how many recordings were freed that were never
    replayed)."""
    return fn_row(&TABLE, f).alike, fn_row(&TABLE, f).wasted

def require_begin(block):
    """A block begins in which a call that is not a replay raises. Blocks nest, in all threads together."""
    global REPLAY_REQUIRED
    REPLAY_REQUIRED += 1
    return block

def require_end(block, *error):
    """It ends."""
    global REPLAY_REQUIRED
    REPLAY_REQUIRED -= 1

def is_required():
    """Is such a block under way?"""
    return REPLAY_REQUIRED > 0

def fn_unknown(int f):
    """A number of the values that the last call read, if no recording had them; or 0."""
    return fn_row(&TABLE, f).unknown

def fn_nodes(int f):
    """Node ids of a function, used last first."""
    ids = []
    for k in range(TABLE.nodes.n):
        node = node_row(&TABLE, k)
        if node.alive and node.fn == f: ids.append((-node.used, k))
    return [k for _, k in sorted(ids)]

def spec_add(int f, object program, int n_leaves, int n_numbers, dict programs, object paths):
    """A spec for a function, with so many tensors and live numbers. programs[spec] becomes (program, paths): its
    objects must stay alive."""
    cdef id_t s = row_take(&TABLE, &TABLE.specs), at
    try:
        programs[s] = (program, paths)
        at = program_add(&TABLE, program)
    except BaseException:
        programs.pop(s, None)
        row_drop(&TABLE, &TABLE.specs, s)
        raise
    spec, fn = spec_row(&TABLE, s), fn_row(&TABLE, f)
    spec.fn = f
    spec.op_at = at
    spec.op_n = <int32_t>len(program)
    spec.n_leaves, spec.n_numbers = n_leaves, n_numbers
    spec.shape = program_shape(&TABLE, at, spec.op_n)
    spec.next = fn.first_spec
    fn.first_spec = s
    return s

def spec_free_if(int f, int64_t born, int s):
    """Free a spec and its nodes, if the function is still the one that was born then."""
    if not fn_is(f, born): return
    k = fn_row(&TABLE, f).first_spec
    while k != NONE and k != s: k = spec_row(&TABLE, k).next
    if k == s: spec_free(&TABLE, s)

def verdict_fn(int f, str reason, int64_t until, int patience=0):
    """Calls of a function run eagerly from now on, where no recording takes them, until it was called so often, but for
    those of which `patience` came that were alike."""
    verdict_set(&fn_row(&TABLE, f).verdict, reason, until, 0)
    fn_row(&TABLE, f).patience = patience

def verdict_spec(int spec, list tensors, str reason, int64_t until):
    """The same of calls with this structure, ambient state and tensors of these shapes."""
    cdef uint64_t ambient[3]
    cdef Objects leaves = borrowed(tensors)
    ambient_now(ambient)
    verdict_set(&spec_row(&TABLE, spec).verdict, reason, until,
                call_key(spec, ambient, leaves.data(), <int32_t>len(tensors)))

def verdict_place(int path, int parent, int f, str reason, int64_t until):
    """The same of calls behind this node, where there are recordings already."""
    cdef Edge* e = edge_find(&TABLE, path, parent, f)
    if e is not NULL: verdict_set(&e.verdict, reason, until, 0)

def children(int path, int parent, int f):
    """Nodes of f behind a parent (-1: that begin an iteration), newest match first."""
    cdef id_t n = first_child(&TABLE, path, parent, f)
    ids = []
    while n != NONE:
        ids.append(n)
        n = node_row(&TABLE, n).next
    return ids

def nodes():
    """Ids of all nodes."""
    return [k for k in range(TABLE.nodes.n) if node_row(&TABLE, k).alive]

SlotFacts = namedtuple("SlotFacts", "leaf binding written address from_node told")
NodeFacts = namedtuple(
    "NodeFacts", "fn spec path parent depth children used n_replay graph_nodes slots copied out_bytes exec_bytes outs "
    "deads segments readouts saved back words forms")

cdef inline Node* node_now(int n) noexcept:
    """Node n's row, looked up each time where objects are made in between: garbage that is collected for one, or
    another thread that runs meanwhile, may add rows, and the table moves."""
    return node_row(&TABLE, n)

cdef object slot_facts(int n, int k, set written, set told):
    cdef Guard* g = node_guard(&TABLE, node_now(n), k)
    cdef Slot* s = node_slot(&TABLE, node_now(n), k)
    cdef int leaf = g.leaf
    if g.binding == TWIN: g = node_guard(&TABLE, node_now(n), s.copy)        # it is bound as that one
    return SlotFacts(leaf, g.binding, k in written, <uintptr_t>slot_ptr(&TABLE, node_now(n), k), s.from_node,
                     sum([slot == k for slot, _ in told]))

def node_spec(int n): return node_now(n).spec

def node_replays(int n): return node_now(n).n_replay

def node_facts(int n):
    """What a report says about a node."""
    cdef int32_t k, so_far = 0, words = 0
    cdef int64_t copied = 0, back = 0, saved = 0
    written, told, segments, outs, readouts = set(), set(), [], [], []
    for k in range(node_now(n).len[EFFECTS]):
        if node_effect(&TABLE, node_now(n), k).kind == WRITES: written.add(node_effect(&TABLE, node_now(n), k).slot)
    for k in range(node_now(n).len[PATCHES]):
        p = node_patch(&TABLE, node_now(n), k)
        if p.kind == ADDRESS: told.add((p.slot, <uintptr_t>p.handle))
        elif p.kind == COPY_SOURCE or p.kind == FED: copied += p.nbytes
        elif p.kind == COPY_BACK: back += p.nbytes
        elif p.kind == SCALAR: words += 1
    for k in range(node_now(n).len[UNDOS]): saved += node_undo(&TABLE, node_now(n), k).nbytes
    for k in range(node_now(n).len[READS]):      # up to each value
        r = node_read(&TABLE, node_now(n), k)
        so_far += r.n_graph_nodes
        if r.island is NULL:
            segments.append(so_far)
            so_far = 0
    for k in range(node_now(n).len[OUTS]):
        o = node_out(&TABLE, node_now(n), k)
        line = <object>o.line if o.line is not NULL else ""
        # not being freed
        if o.kind == FRESH and o.proto is not NULL: outs.append((line, storage_nbytes(o.proto)))
        elif o.kind == READOUT and o.ref == NONE and o.line is not NULL: readouts.append(<object>o.line)
    slots = [slot_facts(n, k, written, told) for k in range(node_now(n).len[SLOTS])]
    return NodeFacts(
        node_now(n).fn, node_now(n).spec, node_now(n).path, node_now(n).parent, node_now(n).depth, node_now(n).children,
        node_now(n).used, node_now(n).n_replay, node_length(&TABLE, node_now(n)), tuple(slots),
        copied=copied, back=back, out_bytes=sum([nbytes for _, nbytes in outs]), exec_bytes=node_now(n).exec_bytes,
        outs=outs, deads=node_now(n).len[DEADS], segments=segments, readouts=readouts, saved=saved, words=words,
        forms=wide_facts(<Wide*>node_now(n).wide))

cdef bint path_enter(id_t path) except -1:
    """Hold a path, for what a call would do; False: this thread holds it already (an eager part's, a finalizer's)."""
    if path == NONE or path_is_mine(path_row(&TABLE, path)): return False
    while not path_hold(path_row(&TABLE, path)): path_wait(path_row(&TABLE, path))
    return True

def node_misplaced(int n):
    """Which place of the node's holds something else now than its guard wants, or NONE. To ask is to follow what lies
    there, as a call does: not while another thread replays the node."""
    cdef id_t path = node_row(&TABLE, n).path
    cdef bint mine = path_enter(path)
    try:
        return places_hold(&TABLE, n)
    finally:
        if mine: path_unlock(path_row(&TABLE, path))

MISSING = object()          # what lies in a place where nothing is
BUILTIN_DESCRIPTORS = (     # which run no code of the user's; nobody can derive from these
    types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType, types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
)

def value_at(place):
    """What lies in a place, (kind, home, key, ...), now: one object, or MISSING; of a length, so many; of NAMES_ABSENT,
    MISSING or what each name has."""
    cdef Place p
    cdef PyObject* now = NULL
    p.kind, home, key = place[0], place[1], place[2]
    p.home, p.key = <PyObject*>home, <PyObject*>key
    if p.kind in (DICT_LEN, LIST_LEN): return len(home)
    if p.kind == NAMES_ABSENT: return MISSING if absent(p) else tuple([(<dict>home).get(name, MISSING) for name in key])
    p.number = key if p.kind == LIST_ITEM else 0
    if p.kind in (DICT_ITEM, CELL, LIST_ITEM):
        now = place_now(p)
    elif p.kind == TYPE_ATTR:
        now = type_lookup(p.home, p.key)
    elif p.kind == ATTR:
        now = type_lookup(<PyObject*>Py_TYPE_(p.home), p.key)
        if now is NULL or not issubclass(<object>Py_TYPE_(now), BUILTIN_DESCRIPTORS): return MISSING
        try:
            return (<object>now).__get__(home)
        except (ValueError, AttributeError):            # no value yet
            return MISSING
    return <object>now if now is not NULL else MISSING

def node_misses(int path, int parent, int f, int spec, list tensors):
    """Why each of these children does not take this call: [(node, Miss, index), ...]. For messages
    and for the choice between pinned and copied. The path is held as by a call."""
    cdef uint64_t ambient[3]
    cdef Objects leaves = borrowed(tensors)
    cdef bint mine = path_enter(path)
    cdef id_t n = first_child(&TABLE, path, parent, f)
    cdef int64_t why
    rows = []
    try:
        ambient_now(ambient)
        while n != NONE:
            why = node_why(&TABLE, n, spec, ambient, leaves.data())
            rows.append((n, <int>(why >> 32), <int>(why & 0xffffffff)))
            n = node_row(&TABLE, n).next
    finally:
        if mine: path_unlock(path_row(&TABLE, path))
    return rows

def slot_holds(int n, int k, object x):
    """Is this what the function found where slot k of node n was reached?"""
    return node_guard(&TABLE, node_row(&TABLE, n), k).tensor == <PyObject*>x

def slot_shape(int n, int k):
    """The sizes that slot k of node n wants."""
    cdef Guard* g = node_guard(&TABLE, node_row(&TABLE, n), k)
    cdef int64_t* dims = node_dim(&TABLE, node_row(&TABLE, n), 0) + g.dim_at
    return tuple([dims[j] for j in range(g.ndim)])

def slot_addresses(int n, int k, list tensors):
    """(address that slot k of node n wants, address it has in a call with these leaves)."""
    cdef Node* node = node_row(&TABLE, n)
    cdef Objects leaves = borrowed(tensors)
    cdef PyObject* x = slot_tensor(&TABLE, node, k, leaves.data())
    return <uintptr_t>slot_ptr(&TABLE, node, k), <uintptr_t>(tensor_ptr(x) if x is not NULL else NULL)

def slot_tensors(int n, list tensors):
    """The tensor of each of the node's slots in a call that it takes, with these leaves; None for a gradient."""
    cdef Node* node = node_row(&TABLE, n)
    found = []
    for k in range(node.len[SLOTS]):
        g = node_guard(&TABLE, node, k)
        found.append(tensors[g.leaf] if g.leaf != NONE else <object>g.tensor if g.grad_of == NONE else None)
    return found

def dead_line(int n, int k):
    """Where the output was made that must be dead before node n runs: number k of them."""
    cdef Dead* d = node_dead(&TABLE, node_row(&TABLE, n), k)
    return <object>node_out(&TABLE, node_row(&TABLE, d.node), d.out).line

def node_doubt(int n):
    """The node's first call with a rebound slot elsewhere comes to on_miss, as `proves`."""
    node_row(&TABLE, n).unproven = 1

def node_audit(int n, int64_t at):
    """So does the call that would be its replay of that number, as `audited`; 0: none."""
    node_row(&TABLE, n).audit_at = at

def node_draws(int n, int device, object buffer):
    """The node draws dropout from cuDNN's random state, of which this, kept alive by the caller, is the buffer."""
    node_row(&TABLE, n).dropout, node_row(&TABLE, n).dropout_buffer = cuda_dropout_now(device) or -1, <PyObject*>buffer

def node_watch(int n, uintptr_t stream, double seconds, bytes text):
    """The node waits for other processes at each replay. On this stream, which lasts as long as the process, its
    replays are to end within so many seconds and what they usually take: else `text` is told and the process ends."""
    cdef Watchdog* watchdog = watchdog_of(path_row(&TABLE, node_row(&TABLE, n).path).device)
    watchdog.begin(<void*>stream, seconds, text)
    node_row(&TABLE, n).watchdog = watchdog

def watch_end():
    """The process ends by itself."""
    for k in range(MAX_DEVICES):
        if WATCHDOGS[k] is not NULL: WATCHDOGS[k].end()

def node_is_spent(int n):
    """Does the node draw from a buffer that no layer of eager's uses any more?"""
    return node_row(&TABLE, n).dropout != 0 and not dropout_holds(&TABLE, n)

def dropout_begins_anew(int device):
    """Will the next recurrent layer of cuDNN's fill another buffer with random state?"""
    return cuda_dropout_now(device) == 0

def dropout_undo(int device): cuda_dropout_undo(device)
def node_reached(int n): return reached_versions(&TABLE, node_now(n))

def node_drop(int n, bint replaced=False):
    """Free one node and all behind it. `replaced`: another recording was made for it, and those behind it will be made
    anew: they were not wasted."""
    node_free(&TABLE, n, replaced)
    if CGT_DEBUG: table_check(&TABLE)

def node_oldest():
    """The leaf of the trees that ran longest ago, or None. Not the node that a path has come to."""
    cdef id_t best = NONE
    for k in range(TABLE.nodes.n):
        node = node_row(&TABLE, k)
        if not node.alive or node.children or path_row(&TABLE, node.path).current == k: continue
        if best == NONE or node.used < node_row(&TABLE, best).used: best = k
    return best if best != NONE else None

def freed():
    """[(fn, node), ...] of nodes freed since the last time: their owners can go."""
    pairs = <list>TABLE.freed
    TABLE.freed.clear()
    return pairs

def path_state(int device):
    """(path, node that it has come to or -1, did several threads call there?) of a device; -1 is the host."""
    cdef id_t path = path_of(&TABLE, device)
    return path, path_row(&TABLE, path).current, bool(is_shared(path_row(&TABLE, path)))

def parent_of(int device, int f, list tensors, list said=None):
    """The node behind which a call with these tensors belongs, or -1: it begins an iteration. `said`: those of them
    from which it goes on in an iteration that the program said."""
    cdef id_t path = path_of(&TABLE, device)
    cdef id_t at = path_back(&TABLE, path, path_row(&TABLE, path).current)
    cdef Objects rows = borrowed(said if said is not None and path_row(&TABLE, path).said else tensors)
    return at if path_continues(&TABLE, path, at, f, rows.data(), <int32_t>rows.size()) else NONE

def go_on(int device, int parent, list tensors):
    """The path goes on from `parent`, as parent_of told for a call with these tensors; from -1, the iteration under
    way ends and what it left is released. The caller holds the paths."""
    cdef id_t path = path_of(&TABLE, device)
    cdef id_t at = path_back(&TABLE, path, path_row(&TABLE, path).current)
    cdef Objects leaves = borrowed(tensors)
    if parent != NONE:
        # Another thread may have moved it, or hold what was dead; then the recording finds itself overtaken.
        if at == parent: path_row(&TABLE, path).current = parent
        return
    path_leave(path_row(&TABLE, path), at)
    while path_release(&TABLE, path, NONE, leaves.data(), <int32_t>len(tensors)) != 0: pass

def path_proto(int at, object t):
    """The recorded memory behind t, if t is a result of the path that ends at node `at`; or None."""
    cdef int32_t k
    cdef id_t n = path_output(&TABLE, at, <PyObject*>t, &k)
    if n == NONE: return None
    return <object>node_out(&TABLE, node_row(&TABLE, n), k).proto

def step():
    """Begin an iteration on every device, not in the middle of another thread's call."""
    cdef bint mine = paths_mine()           # a finalizer, in the middle of ours
    for k in range(TABLE.paths.n):
        if not mine:
            while not path_hold(path_row(&TABLE, k)): path_wait(path_row(&TABLE, k))
        try:
            path_step(&TABLE, k)
        finally:
            if not mine: path_unlock(path_row(&TABLE, k))

def stepped(bint on):
    """Take the iterations under way for ones that step() began, or for ones of a program that never says it."""
    for k in range(TABLE.paths.n):
        path_row(&TABLE, k).said = on
        if not on: path_row(&TABLE, k).since = NONE

def max_path(int n):
    """Nodes of one iteration, before another one begins by itself."""
    TABLE.max_path = n

def beside():
    """A thread calls for a GPU while another one records: results leave their recording's memory from now on."""
    global BESIDE
    BESIDE = True

def alone():
    """Forget that several threads called (path.pxi); for tests, whose threads are gone."""
    global BESIDE
    BESIDE = False
    for k in range(TABLE.paths.n): path_row(&TABLE, k).thread = path_row(&TABLE, k).shared = 0

def paths_mine():
    """Does this thread hold a path: is it inside a call (a finalizer, say)?"""
    for k in range(TABLE.paths.n):
        if path_is_mine(path_row(&TABLE, k)): return True
    return False

def paths_lock():
    """Hold every device's path, so that no replay is under way; for freeing rows. Waits."""
    for k in range(TABLE.paths.n):
        while not path_lock(path_row(&TABLE, k)):
            path_wait(path_row(&TABLE, k))

def paths_unlock():
    """Let go what paths_lock took."""
    for k in range(TABLE.paths.n): path_unlock(path_row(&TABLE, k))

def paths_leave():
    """The same if this thread holds them; else nothing."""
    if paths_mine(): paths_unlock()

def with_paths(object body):
    """body(), while every path is held."""
    paths_lock()
    try:
        return body()
    finally:
        paths_unlock()

def lend(object body):
    """body(), which may wait for autograd's threads: these need not wait for the paths that this thread holds."""
    me = PyThread_get_thread_ident()
    held = [k for k in range(TABLE.paths.n) if path_row(&TABLE, k).owner == me]
    for k in held: path_row(&TABLE, k).lent += 1
    try:
        return body()
    finally:
        for k in held: path_row(&TABLE, k).lent -= 1

def part(object t):
    """Move a result's memory out of its recording's, if t lies in a CUDA recording's results: its address is about to
    leave PyTorch, and no rescue could follow it. The caller holds the paths."""
    cdef void* storage = tensor_storage(<PyObject*>t)
    for n in range(TABLE.nodes.n):
        if not node_row(&TABLE, n).alive or path_row(&TABLE, node_row(&TABLE, n).path).driver != CUDA: continue
        for k in range(node_row(&TABLE, n).len[OUTS]):
            if node_out(&TABLE, node_row(&TABLE, n), k).kind == FRESH \
                    and node_out(&TABLE, node_row(&TABLE, n), k).storage == storage:
                group_rescue(&TABLE, n, k)
                return

def held(object body):
    """body(), while no row is freed. A finalizer in the middle of a call is let in."""
    return body() if paths_mine() else with_paths(body)

def locked(object lock, object body, object busy=None):
    """body(), while the lock is held; busy(), if there is that, where somebody else holds it. A with statement would
    keep it if an interrupt came as it ends, where somebody watches calls (Python 3.12 and later)."""
    if not lock.acquire(busy is None): return busy()
    try:
        return body()
    finally:
        lock.release()
