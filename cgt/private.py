"""Every private name of PyTorch that the Python half uses, and the start-up self-check.

What differs between releases is here and, for C++, in the `#if`s of core/cuda_shim.h. Tested with
torch 2.11.0+cu130 and 2.13.0 (CPU). Imports nothing of cgt's but the core.
"""

import contextlib
import functools
import operator
import os
import sys
import threading
import types
import warnings

import cgt_core as core
import torch
from torch._C._dynamo import eval_frame
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

__all__ = [
    "DispatchMode", "OpOverload", "calls_watched", "capture_hidden", "clear_workspaces", "compiled_watched",
    "higher_order_watched", "is_forward_ad", "is_reader", "may_donate", "outside_dynamo",
    "parallel_watched", "reads_watched",
    "regions_watched", "self_check", "sequence_number", "states_watched", "told_once", "was_freed",
]  # fmt: skip


class DispatchMode(TorchDispatchMode):
    """A dispatch mode under which functions that Dynamo compiled run as without it."""

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

    def by(self, is_mine, handle):
        """A bracket: inside, handle(plain, owner, name, args, kwargs) is called instead of the functions."""
        watcher = [is_mine, handle]
        return functools.partial(self.begin, watcher), functools.partial(self.end, watcher)

    def begin(self, watcher):
        with self.lock:
            if not self.watchers:
                self.restore()  # an install that was interrupted
                self.install()
            self.watchers = (watcher, *self.watchers)

    def end(self, watcher):
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
            if plain is not None:
                setattr(owner, name, plain)
            elif name in vars(owner):
                delattr(owner, name)  # inherited
        self.plain = []


REGIONS = {}  # inductor's type of regions -> Watched
COMPILED = {}  # Dynamo's module of compiled functions -> Watched
NOTHING = (lambda: None, lambda: None)  # a bracket


def regions_watched(is_mine, region, compiles):
    """([bracket, ...], a function: was every region seen?). Inside, where `is_mine()`, region(plain, region, inputs)
    is called for each region that inductor compiled, and compiles() when a compilation begins, which is not observed.
    Not every region is seen if inductor was imported meanwhile."""
    module = sys.modules.get("torch._inductor.output_code")
    region_type = getattr(module, "CompiledFxGraph", None)
    brackets = []
    if "torch._dynamo" in sys.modules:
        brackets.append(compilations_watched(is_mine, compiles))
    if region_type is None:
        return brackets, lambda: "torch._inductor.output_code" not in sys.modules
    if region_type not in REGIONS:
        REGIONS[region_type] = Watched((region_type, "__call__"))
    handle = lambda plain, owner, name, args, kwargs: region(plain, *args)  # noqa: E731
    return [*brackets, REGIONS[region_type].by(is_mine, handle)], lambda: True


def compilations_watched(is_mine, compiles):
    """A bracket: inside, where `is_mine()`, what a compilation runs is not observed."""
    handler, pausing = torch._dynamo.callback_handler, []

    def start(_):
        if is_mine():
            pausing.append(threading.get_ident())
            core.pause(1)
            compiles()

    def stop(_):
        if threading.get_ident() in pausing:
            pausing.remove(threading.get_ident())
            core.pause(-1)

    def begin():
        handler.register_start_callback(start)
        handler.register_end_callback(stop)

    def end():
        stop(None)
        for remove, callback in ((handler.remove_start_callback, start), (handler.remove_end_callback, stop)):
            with contextlib.suppress(ValueError):  # torch.compiler.reset() forgets callbacks
                remove(callback)

    return begin, end


def compiled_watched(is_mine, mode):
    """A bracket: inside, where `is_mine()`, functions that Dynamo compiled are run under this dispatch mode instead of
    the observer's dispatch key: their guards compare the thread's keys, and would have them compiled once more for
    inside, but not those of modes. Two switches that Dynamo sets tell when such a function begins and ends."""
    module = sys.modules.get("torch._dynamo.eval_frame")
    if module is None:
        return NOTHING
    if module not in COMPILED:
        COMPILED[module] = Watched((module, "set_skip_guard_eval_unsafe"), (module, "_maybe_set_eval_frame"))
    entered = []  # [frame, was the key on, how often the second switch was set]

    def leave():
        if mode_is_active(mode):
            mode.__exit__(None, None, None)
        core.observe(entered.pop()[1])

    def handle(plain, owner, name, args, kwargs):
        frame = sys._getframe(2)
        mine = frame.f_code.co_name == "compile_wrapper"
        if mine and name == "set_skip_guard_eval_unsafe" and not (entered and entered[-1][0] is frame):
            entered.append([frame, core.observe(False), 0])
            mode.__enter__()
        result = plain(*args, **kwargs)
        if entered and entered[-1][0] is frame and name == "_maybe_set_eval_frame":
            entered[-1][2] += 1
            if entered[-1][2] == 2:  # the first one is its own, the second one puts back what was before
                leave()
        return result

    def end():
        unwatch()
        while entered:
            leave()

    watch, unwatch = COMPILED[module].by(is_mine, handle)
    return watch, end


def mode_is_active(mode):
    """Is this dispatch mode on the calling thread's stack?"""
    return any(m is mode for m in _get_current_dispatch_mode_stack())


HIGHER_ORDER = Watched((torch._ops.HigherOrderOperator, "__call__"))


def higher_order_watched(is_mine, handle):
    """A bracket: inside, where `is_mine()`, handle(op) comes before each higher-order op, which finds its kernels by the
    thread's keys and knows none for the observer's."""

    def call(plain, owner, name, args, kwargs):
        was = core.observe(False)
        try:
            if was:
                handle(args[0])
            return plain(*args, **kwargs)
        finally:
            core.observe(was)

    return HIGHER_ORDER.by(is_mine, call)


# What hands a tensor's memory to somebody outside PyTorch. (A function mode would see it, too; but Dynamo
# compiles once more for each stack of function modes, and random states belong to a compilation.)
READS = "numpy tolist data_ptr __array__ __repr__ untyped_storage __dlpack__".split()
TO_DLPACK = ((torch._C, "_to_dlpack"), (torch.utils.dlpack, "to_dlpack"), (torch, "to_dlpack"))
READERS = Watched(
    *((torch.Tensor, name) for name in READS),
    *((owner, name) for owner, name in TO_DLPACK if hasattr(owner, name)),
)
PLAIN_READERS = {id(plain): plain for plain in (getattr(*target) for target in READERS.targets)}


def is_reader(value):
    """Is this one of them itself, or a tensor's, looked up before it could be watched?"""
    if type(value) in (types.BuiltinMethodType, types.MethodType) and isinstance(value.__self__, torch.Tensor):
        return value.__name__ in READS
    return id(value) in PLAIN_READERS


def reads_watched(is_mine, read):
    """A bracket: inside, where `is_mine()`, read(name, tensor) comes before each such call."""

    def handle(plain, owner, name, args, kwargs):
        given = [*args, *kwargs.values()]
        if given and not torch.compiler.is_compiling():  # its ops will be seen when they run
            read(name, given[0])
        return plain(*args, **kwargs)

    return READERS.by(is_mine, handle)


# Operators that read values behind the observer's back: numbers of tensors that become one, lengths by pointer.
READ_BEHIND = [
    "aten::_local_scalar_dense", "aten::_pad_packed_sequence", "aten::ctc_loss.Tensor", "aten::tensor_split.tensor_indices_or_sections",
    *(f"aten::{kind}.data" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")),
]  # fmt: skip


DISABLES = Watched((torch._C._autograd, "_saved_tensors_hooks_disable"))


def saved_hooks(pack, unpack, is_mine, disabled):
    """[bracket, ...]: inside, autograd saves through these hooks; torch.func's transforms, which work with none, are
    told of by disabled() and take them away."""
    of, depth = torch._C._autograd, core.save_hooks()

    def pop():
        while core.save_hooks() > depth:
            of._pop_saved_tensors_default_hooks()

    def handle(plain, owner, name, args, kwargs):
        if core.save_hooks() == depth + 1:
            pop()
            disabled()
        return plain(*args, **kwargs)

    push = functools.partial(of._push_saved_tensors_default_hooks, pack, unpack)
    return [(push, pop), DISABLES.by(is_mine, handle)]


KEEPS = Watched((torch._C._autograd, "_get_current_graph_task_keep_graph"))


def may_donate(node):
    """Is this autograd node a compiled function, whose backward may write what was saved for it? Then it
    refuses to run in a graph that is kept ("donated buffers")."""
    metadata = getattr(getattr(type(node), "_forward_cls", None), "metadata", None)
    return getattr(metadata, "bw_donated_idxs", []) != []  # None: not known


def told_once(task):
    """A bracket: inside, nodes that autograd runs in graph task `task()` are told that the graph is not kept."""
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


QUIET_FILES = (
    os.path.dirname(__file__) + os.sep,
    *(os.path.dirname(torch.__file__) + os.sep + name for name in ("nn", "optim", "autograd", "_")),
)


def calls_watched(started, methods, called):
    """A bracket: add the code objects that start or go on inside to the set `started`; add None if some
    could not be seen: somebody else's profiler is in the way. Before a builtin function of `methods` (by
    core.method_id) runs there is called(function, frame), the frame that calls it. Code of the program's other threads
    is added only where this one may wait for them. Those are at some code when it begins, as autograd's threads are not."""
    aside, others = set(), set()
    watch = monitored if hasattr(sys, "monitoring") else profiled
    start, stop = watch(started, methods, called, others, aside)

    def begin():
        others.update(sys._current_frames().keys() - {threading.get_ident()})
        start()

    def end():
        stop()
        if any(code is not None and code.co_filename.startswith(MEETINGS) for code in list(started)):
            started.update(aside)

    return begin, end


STANDARD = os.path.dirname(threading.__file__) + os.sep
MEETINGS = tuple(  # where threads wait for each other
    STANDARD + name.replace("/", os.sep) for name in ("threading.py", "queue.py", "concurrent/", "asyncio/", "multiprocessing/")
)


def monitored(started, methods, called, others, aside):
    """calls_watched from Python 3.12 on. Of torch's own calls those that are many are not looked at."""
    events, tools = sys.monitoring.events, []
    name = f"cgt {id(tools)}"  # another thread may observe, too

    def start(code, _):
        other = threading.get_ident() in others
        if not str(sys._getframe(1).f_globals.get("__name__")).startswith("cgt."):
            (aside if other else started).add(code)
        return None if other else sys.monitoring.DISABLE  # for all threads

    def call(code, _, function, __):
        if code.co_filename.startswith(QUIET_FILES):
            return sys.monitoring.DISABLE
        if core.method_id(function) in methods:
            called(function, sys._getframe(1))
        return None

    callbacks = {events.PY_START: start, events.PY_RESUME: start, events.CALL: call}

    def begin():
        tools.extend(range(5, -1, -1))
        while tools:
            try:
                sys.monitoring.use_tool_id(tools[0], name)
                break
            except ValueError:  # somebody's
                del tools[0]
        else:
            started.add(None)
            return
        tool = tools[0]
        for event, callback in callbacks.items():
            sys.monitoring.register_callback(tool, event, callback)
        sys.monitoring.set_events(tool, functools.reduce(operator.or_, callbacks))
        sys.monitoring.restart_events()

    def end():
        for tool in tools:
            if sys.monitoring.get_tool(tool) == name:
                sys.monitoring.set_events(tool, 0)
                for event in callbacks:
                    sys.monitoring.register_callback(tool, event, None)
                sys.monitoring.free_tool_id(tool)

    return begin, end


def profiled(started, methods, called, others, aside):
    """calls_watched up to Python 3.11."""
    mine = []
    begin = functools.partial(core.calls_begin, methods, started, called, others, aside)
    return lambda: mine.append(begin()), lambda: mine and core.calls_end(mine.pop())


# What these do for a backward is not in the ops of their forward.
PARALLEL = {}  # class -> Watched


def parallel_watched(is_mine, told):
    """[bracket, ...]: inside, where `is_mine()`, told(name) comes before the forward of a DistributedDataParallel or a
    FullyShardedDataParallel."""
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)

    def handle(plain, owner, name, args, kwargs):
        told(owner.__name__)
        return plain(*args, **kwargs)

    owners = [owner for owner in (torch.nn.parallel.DistributedDataParallel, sharded) if owner is not None]
    for owner in owners:
        if owner not in PARALLEL:
            PARALLEL[owner] = Watched((owner, "forward"))
    return [PARALLEL[owner].by(is_mine, handle) for owner in owners]


STATES = Watched(
    *((m, name) for m in (torch, torch.cuda) for name in ("get_rng_state", "set_rng_state"))
)


def states_watched(is_mine, get, set_):
    """A bracket: inside, where `is_mine()`, the functions that read or set a default generator's state (those that
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


def capture_hidden(stream):
    """A bracket: while a function is recorded on this stream it is not told so: libraries that ask take another
    way in a capture (transformers: another attention kernel), and a replay would not be eager's."""
    plain = torch.cuda.is_current_stream_capturing

    def is_current_stream_capturing():
        return plain() and torch.cuda.current_stream() != stream

    hide = functools.partial(setattr, torch.cuda, "is_current_stream_capturing")
    return functools.partial(hide, is_current_stream_capturing), functools.partial(hide, plain)


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
    was, before = torch.is_autocast_enabled("cpu"), core.ambient()
    torch.set_autocast_enabled("cpu", not was)
    seen = core.ambient() != before
    torch.set_autocast_enabled("cpu", was)
    if not seen or core.ambient() != before:
        raise ImportError(f"cgt does not know how torch {torch.__version__} switches autocast")
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
