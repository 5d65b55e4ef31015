# What Python sees of a run under observation: modes and switches, brackets, ops, calls. A function of one line is one
# of the shims', where it is told what it does.

def set_stream(int64_t stream_id, int device): cuda_set_stream(stream_id, device)
def blocker(): return ambient_blocker()
def save_hooks(): return saved_hooks()
def results(): return results_new()
def forget_results(object results): results_forget(results)
def alive(object results): return results_alive(results)
def observe(bint on): return bool(observe_key(on))
def pause(int by): observe_pause(by)
def proceed(list instead): return observe_proceed(instead)
def replace_list(int k, list tensors): observe_list(k, tensors)
def answer(list results): observe_answer(results)
def done(list results): observe_done(results)
def before(object body): return observe_before(body)
def is_lone(object t): return observe_lone(t) != 0
def numbers_are(node): numbers_are_(node)
def numbers_watch(object run, bint on): numbers_watch_(<const void*><PyObject*>run, on)
def numbers_of_op(): return observe_numbers()
def casts_inside(): return observe_casts() != 0
def in_inference(bint on, object body): return c_in_inference(on, body)
def with_grad(object body): return c_with_grad(body)
def is_in_node(): return in_node() != 0

def ambient():
    """The three words of ambient state."""
    cdef uint64_t words[3]
    ambient_now(words)
    return words[0], words[1], words[2]

def see_gpus():
    """CUDA is there: from now on which GPU is current is part of the ambient state, if there are several. Are there?"""
    return bool(cuda_see_gpus())

def within(list brackets, object body):
    """body(), with what each bracket begins: a pair of functions, of which the second puts back whatever the first one
    did, as far as it got, and may be called again. Nothing leaves one of those out: an exception that comes while it
    runs (a signal's, say) is raised when all have been through; of several the last, but none in place of a Ctrl-C."""
    cdef int n = 0, attempt
    result = error = None
    try:
        for begin, _ in brackets:
            n += 1                          # no signal is looked at between here and the call
            begin()
        result = body()
    except BaseException as raised:
        error = raised
    while n > 0:
        n -= 1
        for attempt in range(3):
            try:
                brackets[n][1]()
                break
            except BaseException as raised:
                if not isinstance(error, (KeyboardInterrupt, SystemExit)): error = raised
    if error is not None: raise error
    return result

def observed(object results, object see, object function, tuple args, dict kwargs):
    """Call the function; for each op that it runs, here and in autograd's threads, see(op, args, kwargs) is called
    in its place, and calls `proceed`."""
    cdef PyObject* before = observer_of_thread()
    pair = (results, see)
    Py_XINCREFX(before)
    observer_set(<PyObject*>pair)
    was, shown = observe_key(1), observe_shown(1)
    try:
        return function(*args, **kwargs)
    finally:
        observe_key(was)
        observe_shown(shown)
        observer_set(before)
        Py_XDECREFX(before)
        observe_told()

def observed_op(object op, tuple args, dict kwargs):
    """Call an op that a dispatch mode caught, as a thread does that is observed."""
    cdef int was = observe_key(1), shown = observe_shown(1)
    try:
        return op(*args, **kwargs)
    finally:
        observe_key(was)
        observe_shown(shown)

def observer():
    """The observer, `see` of observed, for which this thread works, or None."""
    cdef PyObject* pair = observer_of_thread()
    return (<tuple><object>pair)[1] if pair is not NULL and not observe_paused() else None

def heard(object body):
    """body(), of whose ops an observer hears although this thread pauses."""
    cdef int depth = observe_paused()
    observe_pause(-depth)
    try:
        return body()
    finally:
        observe_pause(depth)

def usual(list inputs, int device, dict constants):
    """The storages of these inputs of the op that is observed now, if a recording can hold all of them, they are on
    this GPU or on the host (-1), known to Python, and one of them is no constant; or None."""
    cdef bint varies = False
    known = set()
    for one in inputs:
        t = <PyObject*>one
        if not tensor_is_plain(t) or not tensor_is_on(t, device) or observe_lone(one): return None
        sid = <uintptr_t>tensor_storage(t)
        known.add(sid)
        varies = varies or (tensor_numel(t) and sid not in constants)
    return known if varies else None

def reads_by(list names, object read, object lift):
    """Have read(name) called before each of these operators, where `observed` would not see it; lift(1) before PyTorch
    brings Python's numbers to their device, and lift(0) behind. Set once."""
    for name in names: reads_of((<str>name).encode())
    reads_tell(read, lift)

def reads_begin(list handles):
    """From now on, in this thread; for reads_end. (No signal is looked at between a beginning and its note: who
    returned a handle to Python would lose it to an interrupt.)"""
    handles.append(reads_enter())

def reads_end(list handles):
    """No more."""
    while handles: reads_leave(handles.pop())

def method_id(function):
    """A number for the C function behind a builtin function or a method of a builtin class; 0 for all else."""
    return <uintptr_t>method_of(function)

def calls_begin(list handles, methods, set started, called, others, set aside):
    """From now on code that starts or goes on comes into the set, and called(function, frame) comes before one of the
    builtin functions whose method_id is among these. Code of the threads `others` comes into `aside`. For calls_end."""
    handles.append(call_tap_begin(methods, started, called, others, aside))

def calls_end(list handles):
    """No more. None is in the set if not all was seen: of a thread that came since, or has another profiler."""
    while handles: call_tap_end(handles.pop())

def stacks_elsewhere():
    """{thread: [frames], innermost first} of the other threads. No garbage is collected meanwhile: a finalizer may let
    these go on, out of the frame that is being listed; or, before Python 3.11.9, into a deadlock (cpython 106883)."""
    cdef int collects = PyGC_Disable()
    try:
        stacks = sys._current_frames()
        del stacks[PyThread_get_thread_ident()]     # a frame that holds itself would hold its callers' tensors
        for thread, frame in stacks.items():
            stacks[thread] = stack = []
            while frame is not None:
                stack.append(frame)
                frame = frame.f_back
        return stacks
    finally:
        if collects: PyGC_Enable()

def listen_begin(list handles):
    """From now on ops are noted that threads run which nobody sees: not this one, nor autograd's when they work for one
    that is seen."""
    handles.append(<uintptr_t>listen_begin_())

def listen_end(list handles):
    """No more. The name of the first one, or "" if there was none."""
    cdef string op
    while handles: op = listen_end_(<void*><uintptr_t>handles.pop())
    return op.decode()

def listeners():
    """How many of these three are there now, the first in this thread?"""
    return reads_count() + call_tap_count() + listen_count()

def stream_is_capturing(int device):
    """Is somebody's capture under way on the current stream of this device?"""
    cuda_thread_ready(device)
    return bool(cuda_capturing(cuda_current_stream(device)))

def path_is_captured(int device):
    """Is it under way there, or on the stream of the last launch, for which one would wait?"""
    cuda_thread_ready(device)
    return bool(path_captured(path_row(&TABLE, path_of(&TABLE, device)), cuda_current_stream(device)))
