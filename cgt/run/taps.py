"""What is replaced in torch while somebody observes: *taps*. A tap is a function of torch's, or an event of Python's,
that hands its calls over while it is installed.

Each is a bracket, (begin, end), for core.within. All over the process a function is replaced once, and asks each
handler whether the call is one of its own: `is_mine()`. What the calls mean is said where they are handed to (trace.py,
tokens.py, impure.py); how torch's functions are called in this release, in private.py."""

import _thread
import concurrent.futures
import contextlib
import functools
import math
import os
import sys
import threading
import types
from collections.abc import Callable, Collection
from typing import Any

import cgt_core as core
import torch

from ..words import options, private

Bracket = tuple[Callable[[], object], Callable[[], object]]  # (begin, end)
Mine = Callable[[], bool]  # is a call the run's own?
Codes = set[types.CodeType | None]
NOTHING = (lambda: None, lambda: None)  # one


class Tap:
    """Functions that hand their calls to the latest handler whose `is_mine()` says so, while there is one.
    Threads begin and end in any order, so what was there before is put back by the last. It changes with each, since
    what is replaced in torch is replaced for the whole process."""

    def __init__(self, *targets):
        self.targets, self.plain, self.handlers, self.lock = targets, [], (), threading.Lock()
        self.made = {}  # target -> what hands its calls over to what is there else

    def to(self, is_mine, handle):
        """A bracket: inside, handle(plain, owner, name, args, kwargs) is called instead of the functions."""
        handler = [is_mine, handle]
        begin, end = functools.partial(self.begin, handler), functools.partial(self.end, handler)
        return functools.partial(core.locked, self.lock, begin), functools.partial(core.locked, self.lock, end)

    def begin(self, handler):
        if not self.handlers:
            self.restore()  # an install that was interrupted
            self.install()
        self.handlers = (handler, *self.handlers)

    def end(self, handler):
        self.handlers = tuple(h for h in self.handlers if h is not handler)
        if not self.handlers:
            self.restore()

    def install(self):
        self.plain = []
        for owner, name in self.targets:
            plain, tapped = getattr(owner, name), self.made.get((owner, name))
            if tapped is None or tapped.__wrapped__ is not plain:
                tapped = self.made[owner, name] = self.tapped(owner, name, plain)
            self.plain.append((owner, name, vars(owner).get(name)))
            setattr(owner, name, tapped)

    def tapped(self, owner, name, plain):
        @private.outside_dynamo  # which would trace what the handler does
        @functools.wraps(plain)
        def call(*args, **kwargs):
            for is_mine, handle in self.handlers:
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


LATE = {}  # targets that torch imports late or not at all -> Tap


def late(*targets: tuple[Any, str]) -> Tap:
    """The tap of these, made once."""
    if targets not in LATE:
        LATE[targets] = Tap(*targets)
    return LATE[targets]


# --- what torch.compile made ----------------------------------------------------------------------


def tap_regions(is_mine: Mine, region: Callable, compiles: Callable) -> tuple[list[Bracket], Callable[[], bool]]:
    """([bracket, ...], a function: was every region seen?). Inside, where `is_mine()`, region(plain, region, inputs)
    is called for each region that inductor compiled, and compiles() when a compilation begins, which is not observed.
    Not every region is seen if inductor was imported meanwhile."""
    brackets, target = tap_compilations(is_mine, compiles), private.region_call()
    if target is None:
        return brackets, lambda: private.region_call() is None
    handle = lambda plain, owner, name, args, kwargs: region(plain, *args)  # noqa: E731
    return [*brackets, late(target).to(is_mine, handle)], lambda: True


def tap_compilations(is_mine, compiles):
    """[bracket, ...]: inside, where `is_mine()`, what a compilation runs is not observed."""
    handler, pausing = private.compilations(), []

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

    return [] if handler is None else [(begin, end)]


class InCompiled(private.DispatchMode):
    """Shows the observer the ops of what Dynamo compiled; higher_order(op) comes before those of higher order."""

    def __init__(self, higher_order):
        super().__init__()
        self.higher_order = higher_order

    @private.outside_dynamo
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if not isinstance(op, private.OpOverload):
            self.higher_order(op)
            return op(*args, **(kwargs or {}))
        return core.observed_op(op, args, kwargs or {})


def tap_compiled(is_mine: Mine, higher_order: Callable[..., object]) -> Bracket:
    """A bracket: inside, where `is_mine()`, functions that Dynamo compiled are run under a dispatch mode instead of
    the observer's dispatch key: their guards compare the thread's keys, and would have them compiled once more for
    inside, but not those of modes. Two switches that Dynamo sets tell when such a function begins and ends."""
    switches = private.compiled_switches()
    if not switches:
        return NOTHING
    mode, entered = InCompiled(higher_order), []  # [frame, was the key on, how often the second switch was set]

    def leave():
        if private.mode_is_active(mode):
            mode.__exit__(None, None, None)
        core.observe(entered.pop()[1])

    def handle(plain, owner, name, args, kwargs):
        frame = sys._getframe(2)
        mine = frame.f_code.co_name == private.COMPILED_FRAME
        if mine and name == switches[0][1] and not (entered and entered[-1][0] is frame):
            entered.append([frame, core.observe(False), 0])
            mode.__enter__()
        result = plain(*args, **kwargs)
        if entered and entered[-1][0] is frame and name == switches[1][1]:
            entered[-1][2] += 1
            if entered[-1][2] == 2:  # the first one is its own, the second one puts back what was before
                leave()
        return result

    def end():
        close()
        while entered:
            leave()

    begin, close = late(*switches).to(is_mine, handle)
    return begin, end


HIGHER_ORDER = Tap(private.HIGHER_ORDER_CALL)


def tap_higher_order(is_mine: Mine, handle: Callable[..., object]) -> Bracket:
    """A bracket: inside, where `is_mine()`, handle(op) comes before each higher-order op, which finds its kernels by
    the thread's keys and knows none for the observer's."""

    def call(plain, owner, name, args, kwargs):
        was = core.observe(False)
        try:
            if was:
                handle(args[0])
            return plain(*args, **kwargs)
        finally:
            core.observe(was)

    return HIGHER_ORDER.to(is_mine, call)


FORKS = Tap(private.HOP_COMPILES)


def tap_forks(is_mine: Mine, fork: Callable[..., object]) -> Bracket:
    """A bracket: inside, where `is_mine()`, fork(name, args, plain) is called instead of what torch.cond and while_loop
    have Dynamo compile, and that is plain()."""

    def handle(plain, owner, name, args, kwargs):
        compiled = functools.partial(plain, *args, **kwargs)
        whose = private.HOP_WRAPPERS.get(getattr(args[0], "__name__", None)) if args else None
        if whose is None:
            return compiled()
        if owner is torch:
            return lambda *given: fork(whose, given, lambda: compiled()(*given))
        return fork(whose, args[1], compiled)

    return FORKS.to(is_mine, handle)


# --- who reads values behind the dispatcher -----------------------------------------------------

# What hands a tensor's memory to somebody outside PyTorch. (A function mode would see it, too; but Dynamo
# compiles once more for each stack of function modes, and random states belong to a compilation.)
READS = "numpy tolist data_ptr __array__ __repr__ untyped_storage __dlpack__".split()
# "item", "cpu" and "__float__" are ops as well.
READERS = Tap(*((torch.Tensor, name) for name in (*READS, "item", "cpu", "__float__", "__index__")), *private.TO_DLPACK)
PLAIN_READERS = {
    id(plain): plain for plain in (getattr(*t) for t in READERS.targets if t[1] in READS or t in private.TO_DLPACK)
}


# What another stream or another process is about to read belongs to PyTorch's allocator, which knows of that.
READ_ELSEWHERE = ((torch.Tensor, "record_stream"), (torch.UntypedStorage, "_share_cuda_"))
EXPORTS = Tap((torch.Tensor, "__dlpack__"), *private.TO_DLPACK, *READ_ELSEWHERE)
INTERFACE = "__cuda_array_interface__"


def tap_exports(leaves: Callable[..., object]) -> None:
    """From now on, once for all, leaves(tensor, stream) comes before a tensor's address goes to a library that may keep
    it, or to a stream that reads it; else the stream is None. (An address that left in C, by the table of functions
    that DLPack has, or as a plain number, nobody sees.)"""
    if EXPORTS.handlers:
        return

    def handle(plain, owner, name, args: tuple, kwargs: dict):
        t, stream, *_ = *args, *kwargs.values(), None, None
        leaves(t, stream if name == "record_stream" else None)
        return plain(*args, **kwargs)

    plain = vars(torch.Tensor)[INTERFACE]

    def interface(self):
        leaves(self, None)
        return plain.__get__(self)

    EXPORTS.begin([lambda: True, handle])
    for target in EXPORTS.targets[: -len(READ_ELSEWHERE)]:
        PLAIN_READERS[id(getattr(*target))] = getattr(*target)
    setattr(torch.Tensor, INTERFACE, property(interface, doc=plain.__doc__))


def is_reader(value: object) -> bool:
    """Is this one of them itself, or a tensor's, looked up before it could be tapped?"""
    if type(value) in (types.BuiltinMethodType, types.MethodType) and isinstance(value.__self__, torch.Tensor):
        return value.__name__ in READS
    return id(value) in PLAIN_READERS


def tap_readers(is_mine: Mine, read: Callable[..., object]) -> Bracket:
    """A bracket: where `is_mine()`, read(name, tensor, the rest) comes before each such call: its answer, or None."""

    def handle(plain, owner, name, args, kwargs):
        given, answer = [*args, *kwargs.values()], None
        if given and not torch.compiler.is_compiling():  # its ops will be seen when they run
            answer = read(name, given[0], given[1:])
        return plain(*args, **kwargs) if answer is None else answer

    return READERS.to(is_mine, handle)


# Their handlers are as of `Tap.to`. (Never tap __getitem__: put back, it leaves a slot in the type by which every
# tensor is a sequence to C.)
MAKERS = Tap((torch, "tensor"), (torch, "as_tensor"))  # of tensors of Python's numbers
FUNCTIONS = Tap(*((math, name) for name in "sqrt exp log sin cos tan tanh pow isfinite isnan isinf".split()))
SETTERS = Tap((torch.Tensor, "__setitem__"))
SCALED = Tap(  # what optimizers give a tensor for a number
    *((torch.Tensor, name) for name in ("add_", "addcdiv_", "addcmul_")),
    *((torch, name) for name in ("_foreach_add_", "_foreach_addcdiv_", "_foreach_addcmul_")),
)
SWAPS = Tap((torch.utils, "swap_tensors"))
SCRIPTED = Tap(*private.SCRIPTED)
HASHES = Tap((torch.Tensor, "__hash__"))
RECURRENT, PACKS, UNPACKS = ("lstm", "gru", "rnn_tanh", "rnn_relu"), "_pack_padded_sequence", "_pad_packed_sequence"
PACKED = Tap(*((torch._VF, name) for name in (*RECURRENT, PACKS, UNPACKS)))
JITERATED = Tap(*private.JITERATORS)  # kernels of torch.cuda.jiterator's


SCHEDULER, RATES = torch.optim.lr_scheduler.LRScheduler, "_last_lr"
READS_RATES = {SCHEDULER.get_last_lr.__code__}


def tap_rates(read: Callable[[dict], object]) -> Bracket:
    """A bracket: inside, read(attributes) comes before the rates among a scheduler's attributes are read by name."""

    def get(self):
        if RATES not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {RATES!r}")
        read(vars(self))
        return vars(self)[RATES]

    rates = property(get, lambda self, x: vars(self).update({RATES: x}), lambda self: vars(self).pop(RATES))
    return functools.partial(setattr, SCHEDULER, RATES, rates), functools.partial(delattr, SCHEDULER, RATES)


def tap_kernels() -> Bracket:
    """A bracket: operators that read behind the observer's back (private.READ_BEHIND) tell api.py of it."""
    handles = []
    return functools.partial(core.reads_begin, handles), functools.partial(core.reads_end, handles)


# By which a function gives work to other threads, or waits for them.
HANDOVERS = frozenset(
    call.__code__
    for call in (
        threading.Thread.start, threading.Condition.wait, threading.Condition.notify, concurrent.futures.Future.result,
        concurrent.futures.ThreadPoolExecutor.submit,
    )
)  # fmt: skip


def tap_threads(heard: Callable[[str], object]) -> Bracket:
    """A bracket: heard(name) of the first op that a thread ran inside which nobody sees, if there was one."""
    handles = []

    def end():
        op = core.listen_end(handles)
        if op:
            heard(op)

    return functools.partial(core.listen_begin, handles), end


# --- autograd -------------------------------------------------------------------------------------

DISABLES = Tap(private.SAVED_HOOKS_DISABLE)
KEEPS = Tap(private.KEEPS_GRAPH)  # a node of autograd's asks whether its graph is kept


def tap_saves(pack: Callable, unpack: Callable, is_mine: Mine, disabled: Callable) -> list[Bracket]:
    """[bracket, ...]: inside, autograd saves through these hooks; torch.func's transforms, which work with none, are
    told of by disabled() and take them away."""
    depth = core.save_hooks()

    def pop():
        while core.save_hooks() > depth:
            private.pop_saved_hooks()

    def handle(plain, owner, name, args, kwargs):
        if core.save_hooks() == depth + 1:
            pop()
            disabled()
        return plain(*args, **kwargs)

    return [(functools.partial(private.push_saved_hooks, pack, unpack), pop), DISABLES.to(is_mine, handle)]


# --- modules, random states, captures ------------------------------------------------------------


def tap_parallel(is_mine: Mine, told: Callable[..., object]) -> list[Bracket]:
    """[bracket, ...]: inside, where `is_mine()`, told(name, module) comes before the forward of a module that spreads
    the work over processes: what such a one does for a backward is not in the ops of its forward."""

    def handle(plain, owner, name, args, kwargs):
        told(owner.__name__, args[0])
        return plain(*args, **kwargs)

    owners = [torch.nn.parallel.DistributedDataParallel, private.sharded_module()]
    return [late((owner, "forward")).to(is_mine, handle) for owner in owners if owner is not None]


def tap_sharding(is_mine: Mine) -> Bracket:
    """A bracket: inside, where `is_mine()`, what DTensor works out about an op is not observed."""
    targets = private.sharding_calls()

    def handle(plain, owner, name, args, kwargs):
        core.pause(1)
        try:
            return plain(*args, **kwargs)
        finally:
            core.pause(-1)

    return late(*targets).to(is_mine, handle) if targets else NOTHING


STATES = Tap(*((m, name) for m in (torch, torch.cuda) for name in ("get_rng_state", "set_rng_state")))


def tap_states(is_mine: Mine, get: Callable[..., object], set_: Callable[..., object]) -> Bracket:
    """A bracket: inside, where `is_mine()`, the functions that read or set a default generator's state (those that
    fork_rng and torch.utils.checkpoint call) become get(generator, plain) and set_(generator, state, plain)."""

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

    return STATES.to(is_mine, handle)


def capture_hidden(streams: Callable[[], Collection[torch.cuda.Stream]]) -> Bracket:
    """A bracket: while a function is recorded on one of these streams() it is not told so: libraries that ask take
    another way in a capture (transformers: another attention kernel), and a replay would not be eager's."""
    plain = torch.cuda.is_current_stream_capturing

    def is_current_stream_capturing():
        return plain() and torch.cuda.current_stream() not in streams()

    hide = functools.partial(setattr, torch.cuda, "is_current_stream_capturing")
    return functools.partial(hide, is_current_stream_capturing), functools.partial(hide, plain)


# --- Python's own events ---------------------------------------------------------------------------

QUIET_FILES = (
    options.HOME,
    *(os.path.dirname(torch.__file__) + os.sep + name for name in ("nn", "optim", "autograd", "_")),
)


def tap_calls(started: Codes, methods: dict[int, str], called: Callable, beside: Codes) -> Bracket:
    """A bracket: add the code objects that start or go on inside to the set `started`; add None if some could not be
    seen: somebody else's profiler is in the way. Before a builtin function of `methods` (by core.method_id) runs there
    is called(function, frame), the frame that calls it. Code of the program's other threads is added only where this
    one may wait for them, and to `beside` always. Those are at some code when it begins, as autograd's threads are not;
    one that comes later is another's unless autograd works there for this run, or this thread started one."""
    aside, others = set(), set()
    listen = monitored if hasattr(sys, "monitoring") else profiled
    start, stop = listen(started, methods, called, others, aside)

    def begin():
        stacks = core.stacks_elsewhere()
        others.update(stacks)
        beside.update(*codes(stacks))
        start()

    def end():
        stop()
        beside.update(aside, *codes(core.stacks_elsewhere()))
        if any(code is not None and code.co_filename.startswith(MEETINGS) for code in list(started)):
            started.update(aside)

    return begin, end


def codes(stacks):
    """[code objects] that each of these threads is at, but for bystanders."""
    return [[frame.f_code for frame in stack] for stack in stacks.values() if not is_bystander(stack)]


# Whose threads watch, bring data, write logs, talk to a notebook or spread tests over processes; and, between two
# pieces of work, PyTorch's compiler.
BYSTANDERS = (
    "tqdm", "torch.utils.data._utils", "torch.multiprocessing", "torch._inductor", "ipykernel", "IPython", "tornado",
    "zmq", "execnet", "tensorboard", "tensorboardX", "wandb",
)  # fmt: skip
# Modules of Python's own whose threads bring to other processes what they are given, as those of a DataLoader with
# workers do.
CARRIERS = ("multiprocessing.queues", "concurrent.futures.process")


def threads_beside() -> list[str]:
    """Names of the other threads that run Python which could be the program's."""
    others = core.stacks_elsewhere().items()
    beside = [thread for thread, stack in others if not (is_idle(stack[0]) or is_bystander(stack))]
    names = {thread.ident: thread.name for thread in threading.enumerate()} if beside else {}
    return [names.get(thread, str(thread)) for thread in beside]


def is_idle(frame):
    """Does it wait for work in a pool that has none?"""
    is_pools = frame.f_globals.get("__name__") == "concurrent.futures.thread"
    variables = frame.f_locals if is_pools and frame.f_code.co_filename.startswith(STANDARD) else {}
    return "work_queue" in variables and "work_item" not in variables and variables["work_queue"].empty()


def is_bystander(stack):
    """Is it a bystander's, and runs nobody else's code?"""
    names = [str(frame.f_globals.get("__name__")) for frame in stack]
    owners = [name for name in names if name.split(".")[0] not in sys.stdlib_module_names]
    known = bool(owners) or any(
        name in CARRIERS and frame.f_code.co_filename.startswith(STANDARD)
        for name, frame in zip(names, stack, strict=True)
    )
    return known and all(f"{name}.".startswith(tuple(f"{who}." for who in BYSTANDERS)) for name in owners)


STANDARD = os.path.dirname(threading.__file__) + os.sep
MEETINGS = tuple(  # where threads wait for each other
    STANDARD + name.replace("/", os.sep)
    for name in ("threading.py", "queue.py", "concurrent/", "asyncio/", "multiprocessing/")
)


STARTS = private.there((_thread, "start_new_thread"), (_thread, "start_joinable_thread"))
THREAD_STARTS = {core.method_id(getattr(*target)) for target in STARTS}


def monitored(started, methods, called, others, aside):
    """tap_calls from Python 3.12 on. Calls are listened to in code that started, for each place that makes one is to be
    prepared for it; but not in ours, nor in that of torch's which makes many."""
    events, tools, me, spawned = sys.monitoring.events, [], threading.get_ident(), []
    name, heard = f"cgt {id(tools)}", set()  # another thread may observe, too
    home, stop = options.HOME, sys.monitoring.DISABLE  # for all threads

    def start(code, _):
        if code.co_filename.startswith(home):
            return stop
        thread = threading.get_ident()
        mine = thread not in others and (thread == me or core.observer() is not None)
        other = thread in others or not (mine or spawned)
        if not str(sys._getframe(1).f_globals.get("__name__")).startswith("cgt."):
            (aside if other else started).add(code)
        if mine and code not in heard and not code.co_filename.startswith(QUIET_FILES):
            heard.add(code)
            with contextlib.suppress(ValueError):  # of another thread's run: the tool is gone
                sys.monitoring.set_local_events(tools[0], code, events.CALL)
        return stop if mine else None

    def call(code, _, function, __):
        number = core.method_id(function)
        if number in THREAD_STARTS and threading.get_ident() == me:
            spawned.append(number)
        if number in methods:
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
        sys.monitoring.set_events(tool, events.PY_START | events.PY_RESUME)
        sys.monitoring.restart_events()

    def end():
        for tool in tools:
            if sys.monitoring.get_tool(tool) == name:
                sys.monitoring.set_events(tool, 0)
                for code in list(heard):
                    sys.monitoring.set_local_events(tool, code, 0)
                for event in callbacks:
                    sys.monitoring.register_callback(tool, event, None)
                sys.monitoring.free_tool_id(tool)

    return begin, end


def look_again() -> None:
    """Code that started is added again if it starts again: somebody took it out."""
    if hasattr(sys, "monitoring"):
        sys.monitoring.restart_events()


def profiled(started, methods, called, others, aside):
    """tap_calls up to Python 3.11."""
    handles = []
    begin = functools.partial(core.calls_begin, handles, methods, started, called, others, aside)
    return begin, functools.partial(core.calls_end, handles)
