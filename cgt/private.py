"""Every private name of PyTorch that the Python half uses, and the start-up self-check.

What differs between releases is here and, for C++, in the `#if`s of core/cuda_shim.h. Tested with
torch 2.11.0+cu130 and 2.13.0 (CPU). Imports nothing of cgt's but the core.
"""

import contextlib
import functools
import sys
import threading
import types
import warnings

import cgt_core as core
import torch
from torch._C._dynamo import eval_frame
from torch._ops import OpOverload
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

__all__ = [
    "DispatchMode", "OpOverload", "capture_hidden", "clear_workspaces", "codes_watched",
    "is_forward_ad", "is_reader", "may_donate", "mode_is_active", "outside_dynamo",
    "parallel_watched", "reads_watched",
    "regions_watched", "self_check", "sequence_number", "states_watched", "told_once", "was_freed",
]  # fmt: skip


class DispatchMode(TorchDispatchMode):
    """A dispatch mode under which torch.compile compiles, and runs what it compiled, as without it."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls):  # outside_dynamo does it, and imports nothing
        return False

    @classmethod
    def ignore_compile_internals(cls):
        return True


def outside_dynamo(function):
    """Have Dynamo compile neither the function's frames nor any below it, when compiled code comes to
    it through a graph break. (torch.compiler.disable without a frame, and without importing Dynamo.)"""
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


class Watched:
    """Functions that hand their calls to the latest watcher whose `is_mine()` says so, while there is one.
    Threads begin and end in any order, so what was there before is put back by the last."""

    def __init__(self, *targets):
        self.targets, self.plain, self.watchers, self.lock = targets, [], (), threading.Lock()

    @contextlib.contextmanager
    def by(self, is_mine, handle):
        """Inside, handle(plain, owner, name, args, kwargs) is called instead of the functions."""
        watcher = [is_mine, handle]
        with self.lock:
            if not self.watchers:
                self.install()
            self.watchers = (watcher, *self.watchers)
        try:
            yield
        finally:
            with self.lock:
                self.watchers = tuple(w for w in self.watchers if w is not watcher)
                if not self.watchers:
                    self.restore()

    def install(self):
        self.plain = [(owner, name, vars(owner).get(name)) for owner, name in self.targets]
        for owner, name in self.targets:
            setattr(owner, name, self.watched(owner, name, getattr(owner, name)))

    def watched(self, owner, name, plain):
        @outside_dynamo  # which would trace what the watcher does
        @functools.wraps(plain)
        def call(*args, **kwargs):
            for is_mine, handle in self.watchers:
                if is_mine():
                    return handle(plain, owner, name, args, kwargs)
            return plain(*args, **kwargs)

        return call

    def restore(self):
        for owner, name, plain in self.plain:
            if plain is None:
                delattr(owner, name)  # inherited
            else:
                setattr(owner, name, plain)


REGIONS = {}  # inductor's type of regions -> Watched


@contextlib.contextmanager
def regions_watched(mode_type):
    """Inside, the mode on the calling thread's stack gets what no dispatch mode sees: `watch_region`
    each call of a region that inductor compiled, `watch_compile` the beginning of a compilation.
    Yields a function: was every region seen? None may be if inductor was imported meanwhile."""
    module = sys.modules.get("torch._inductor.output_code")
    region_type = getattr(module, "CompiledFxGraph", None)
    if region_type is None:
        yield lambda: "torch._inductor.output_code" not in sys.modules
        return
    if region_type not in REGIONS:
        REGIONS[region_type] = Watched((region_type, "__call__"))

    def mode():
        return next((m for m in _get_current_dispatch_mode_stack() if type(m) is mode_type), None)

    def handle(plain, owner, name, args, kwargs):
        return mode().watch_region(plain, *args)

    def start(_):  # Dynamo has put the modes away in its thread; autograd's threads have them
        now = mine if threading.get_ident() == thread else mode()
        if now is not None:
            now.watch_compile()

    thread, mine = threading.get_ident(), mode()
    handler = torch._dynamo.callback_handler
    handler.register_start_callback(start)
    try:
        with REGIONS[region_type].by(lambda: mode() is not None, handle):
            yield lambda: True
    finally:
        with contextlib.suppress(ValueError):  # torch.compiler.reset() forgets callbacks
            handler.remove_start_callback(start)


# What hands a tensor's memory to somebody outside PyTorch. (A function mode would see it, too; but Dynamo
# compiles once more for each stack of function modes, and random states belong to a compilation.)
READS = "numpy tolist data_ptr __array__ __repr__ untyped_storage __dlpack__".split()
TO_DLPACK = ((torch._C, "_to_dlpack"), (torch.utils.dlpack, "to_dlpack"), (torch, "to_dlpack"))
READERS = Watched(
    *((torch.Tensor, name) for name in READS),
    *((owner, name) for owner, name in TO_DLPACK if hasattr(owner, name)),
    (torch, "ctc_loss"),
)
PLAIN_READERS = [getattr(owner, name) for owner, name in READERS.targets]


def is_reader(value):
    """Is this one of them itself, or a tensor's, looked up before it could be watched?"""
    bound = isinstance(value, (types.BuiltinMethodType, types.MethodType))
    if bound and isinstance(value.__self__, torch.Tensor):
        return value.__name__ in READS
    return any(value is plain for plain in PLAIN_READERS)


def without_modes(function):
    """The function, called with no dispatch mode."""

    def call(*args, **kwargs):
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


def reads_watched(is_mine, read):
    """Inside, where `is_mine()`, read(name, tensor) comes before each such call."""

    def handle(plain, owner, name, args, kwargs):
        given = [*args, *kwargs.values()]
        if name == "ctc_loss":  # which goes another way where a mode is, and there wants lengths on the GPU
            given = [t for t in given[2:4] if isinstance(t, torch.Tensor)]
            plain = without_modes(plain) if given else plain
        if given and not torch.compiler.is_compiling():  # its ops will be seen when they run
            read(name, given[0])
        return plain(*args, **kwargs)

    return READERS.by(is_mine, handle)


# Operators that read values behind the dispatcher's back, beside `_local_scalar_dense` where no mode is (in
# torch.tensor of tensors, say): lengths by pointer.
SCALAR = "aten::_local_scalar_dense"
READ_BEHIND = [
    "aten::_pad_packed_sequence", "aten::ctc_loss.Tensor", "aten::tensor_split.tensor_indices_or_sections",
    *(f"aten::{kind}.data" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")),
]  # fmt: skip
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


@functools.cache
def composite_of(op):
    """What runs an op that is only made of others, or None. Modes do not see such an op but in inference mode,
    where autograd's keys do not take it apart."""
    if not isinstance(op, torch._ops.OpOverload):
        return None
    has = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, op.name())
    if not has("CompositeImplicitAutograd") or has("CPU") or has("CUDA"):
        return None
    return functools.partial(op._op_dk, COMPOSITE)


DISABLES = Watched((torch._C._autograd, "_saved_tensors_hooks_disable"))


@contextlib.contextmanager
def saved_hooks(pack, unpack, is_mine, disabled):
    """Autograd saves through these hooks inside; torch.func's transforms, which work with none, are told of by
    disabled() and take them away."""
    of = torch._C._autograd
    push, pop = of._push_saved_tensors_default_hooks, of._pop_saved_tensors_default_hooks
    ours = [True]

    def handle(plain, owner, name, args, kwargs):
        if ours and core.save_hooks() == 1:
            ours.clear()
            pop()
            disabled()
        return plain(*args, **kwargs)

    push(pack, unpack)
    try:
        with DISABLES.by(is_mine, handle):
            yield
    finally:
        if ours:
            pop()


KEEPS = Watched((torch._C._autograd, "_get_current_graph_task_keep_graph"))


def may_donate(node):
    """Is this autograd node a compiled function, whose backward may write what was saved for it? Then it
    refuses to run in a graph that is kept ("donated buffers")."""
    metadata = getattr(getattr(type(node), "_forward_cls", None), "metadata", None)
    return getattr(metadata, "bw_donated_idxs", []) != []  # None: not known


def told_once(task):
    """Inside, nodes that autograd runs in graph task `task()` are told that the graph is not kept."""
    return KEEPS.by(lambda: torch._C._current_graph_task_id() == task(), lambda *_: False)


def is_forward_ad():
    """Is a level of forward-mode differentiation open (jvp, jacfwd, hessian, dual_level)?"""
    return torch.autograd.forward_ad._current_level >= 0


def sequence_number():
    """Autograd nodes that this thread makes from now on have this number or a higher one."""
    return torch._C._autograd._get_sequence_nr()


def was_freed(raw):
    """Did a backward free this SavedTensor? It does not say so, but it refuses hooks with that reason;
    one that has a value does not get that far."""
    if raw.data is not None:
        return False
    try:
        raw.register_hooks(lambda t: t, lambda t: t)
    except RuntimeError as error:
        return "freed" in str(error)
    return False


@contextlib.contextmanager
def codes_watched(ran):
    """Add the code objects that start inside to the set `ran`; add None if somebody else's profiler is in
    the way, or if Dynamo ran code in their place. (sys.monitoring sees all threads, sys.setprofile this
    one, which is enough where autograd runs in it.)"""
    started = set()
    if hasattr(sys, "monitoring"):
        watch = monitored(started)
    else:
        watch = profiled(started)
    with watch as seen:
        yield
    ran |= started
    if not seen or any(c.co_name == "compile_wrapper" and "_dynamo" in c.co_filename for c in started):
        ran.add(None)


@contextlib.contextmanager
def monitored(started):
    """codes_watched from Python 3.12 on."""
    tool = next((t for t in range(5, -1, -1) if sys.monitoring.get_tool(t) is None), None)
    if tool is None:
        yield False
        return

    def start(code, _):
        started.add(code)
        return sys.monitoring.DISABLE

    events = sys.monitoring.events.PY_START
    sys.monitoring.use_tool_id(tool, "cgt")
    try:
        sys.monitoring.register_callback(tool, events, start)
        sys.monitoring.set_events(tool, events)
        sys.monitoring.restart_events()
        yield True
    finally:
        sys.monitoring.set_events(tool, 0)
        sys.monitoring.register_callback(tool, events, None)
        sys.monitoring.free_tool_id(tool)


@contextlib.contextmanager
def profiled(started):
    """codes_watched up to Python 3.11."""
    if sys.getprofile() is not None or torch.cuda.is_initialized():  # whose backwards have a thread
        yield False
        return

    def start(frame, event, _):
        if event == "call":
            started.add(frame.f_code)

    sys.setprofile(start)
    try:
        yield True
    finally:
        sys.setprofile(None)


def modes_are_skipped():
    """Do ops of the calling thread pass dispatch modes by, as where torch.tensor reads a sequence?"""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python)


def mode_is_active(mode):
    """Is this dispatch mode, or one of this type, on the calling thread's stack? (Autograd's threads
    inherit it.)"""
    return any(m is mode or type(m) is mode for m in _get_current_dispatch_mode_stack())


# What these do for a backward is not in the ops of their forward.
PARALLEL = {}  # class -> Watched


@contextlib.contextmanager
def parallel_watched(is_mine, told):
    """Inside, where `is_mine()`, told(name) comes before the forward of a DistributedDataParallel or a
    FullyShardedDataParallel."""
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)

    def handle(plain, owner, name, args, kwargs):
        told(owner.__name__)
        return plain(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        for owner in filter(None, (torch.nn.parallel.DistributedDataParallel, sharded)):
            if owner not in PARALLEL:
                PARALLEL[owner] = Watched((owner, "forward"))
            stack.enter_context(PARALLEL[owner].by(is_mine, handle))
        yield


STATES = Watched(
    *((m, name) for m in (torch, torch.cuda) for name in ("get_rng_state", "set_rng_state"))
)


def states_watched(is_mine, get, set_):
    """Inside, where `is_mine()`, the functions that read or set a default generator's state (those that
    fork_rng and torch.utils.checkpoint call) become get(generator, plain) and set_(generator, state,
    plain)."""

    def generator_of(module, device="cuda"):
        if module is torch:
            return torch.default_generator
        index = torch.device(device).index if not isinstance(device, int) else device
        return torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]

    def handle(plain, module, name, args, kwargs):
        if module is torch.cuda and not torch.cuda.is_initialized():
            return plain(*args, **kwargs)
        if name == "get_rng_state":
            return get(generator_of(module, *args, **kwargs), lambda: plain(*args, **kwargs))
        given = dict(zip(("new_state", "device"), args, strict=False)) | kwargs
        state = given.pop("new_state")
        return set_(generator_of(module, **given), state, lambda state: plain(state, **given))

    return STATES.by(is_mine, handle)


@contextlib.contextmanager
def capture_hidden(stream):
    """While a function is recorded on this stream it is not told so: libraries that ask take another
    way in a capture (transformers: another attention kernel), and a replay would not be eager's."""
    plain = torch.cuda.is_current_stream_capturing

    def is_current_stream_capturing():
        return plain() and torch.cuda.current_stream() != stream

    torch.cuda.is_current_stream_capturing = is_current_stream_capturing
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = plain


def clear_workspaces():
    """Free cuBLAS workspaces, so that a capture allocates its own in cgt's pool and later ones may
    reuse the bytes; a workspace from outside could be freed while graphs still write it."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


def self_check():
    """Hold what the core believes about tensors against what PyTorch says, once at import.

    Returns True if outputs may be handed out as the same tensors again. A mirror that does not fit
    is an ImportError: nothing would be safe. Reference counts that do not behave as calibrated only
    switch the reuse of output tensors off, with a warning.
    """
    if not hasattr(TorchDispatchMode, "ignore_compile_internals"):
        warnings.warn(
            f"torch {torch.__version__} compiles nothing that is first called in a jitted function, and "
            "what was compiled before is recorded uncompiled.",
            stacklevel=2,
        )
    t = torch.arange(6.0).view(2, 3)[:, 1:]
    if core.address(t) != t.data_ptr():
        raise ImportError(f"cgt does not know the tensor layout of torch {torch.__version__}")
    alone = core.holders(t)
    leaf = torch.ones(2, 2, requires_grad=True)
    leaf.grad = torch.ones(2, 2)
    with_cpp = core.holders(leaf.grad)  # a C++ holder and a passing Python reference
    saved = torch.ones(2)
    product = torch.ones(2, requires_grad=True) * saved  # a SavedVariable holds `saved`
    with_saved = core.holders(saved)
    bump = with_saved[0] - alone[0]
    core.set_cpp_bump(bump)
    view = saved[:1]
    fits = (
        alone[1] == 1
        and with_cpp[1] == 2
        and with_saved[1] == 2
        and bump in (0, 1)
        and core.holders(saved)[2] >= 2
        and product.requires_grad
        and view.numel() == 1
    )
    if not fits:
        warnings.warn(
            f"torch {torch.__version__} counts references in a way cgt does not know "
            f"({alone}, {with_cpp}, {with_saved}); outputs are copied out instead of reused.",
            stacklevel=2,
        )
    return fits
