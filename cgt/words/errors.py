"""What cgt raises and warns with, and every sentence that it says.

A reason tells what happened, where (file:line and op), and what to change; cgt's part ("ran
eagerly") is said by `explain`. The core knows no words: `DriverError` carries facts, and
`recording_failed` makes the sentence.
"""

import functools
import types
from collections.abc import Callable

CODES: dict[int, Callable] = {}  # number -> the sentence's function


class CgtError(RuntimeError):
    """cgt cannot do what was asked; the message says where, why and what to try."""


class CgtWarning(UserWarning):
    """cgt did what was asked, but probably not the way the user hoped."""


CgtError.__module__ = CgtWarning.__module__ = "cgt"  # as users import them, and tracebacks name them


def code(number: int) -> Callable:
    """A sentence begins with its code, by which docs/troubleshooting.md tells of it. A code whose sentence goes is
    never used again. The first digit is what it is about: 1 values that Python reads, 2 tensors and their memory, 3
    what Python keeps, 4 autograd, 5 whether a call is recorded at all, 6 parts that run otherwise, 7 devices and the
    driver, 8 arguments of cgt's functions, 9 installing."""

    def mark(sentence):
        @functools.wraps(sentence)
        def coded(*args, **kwargs):
            return f"CGT{number}: {sentence(*args, **kwargs)}"

        if number in CODES:
            raise ValueError(f"CGT{number} is another sentence's code")
        CODES[number] = coded
        return coded

    return mark


# --- reasons: why a call was not replayed -----------------------------------------------------


@code(901)
def other_torch(version: str, now: str, why: str) -> str:
    return (
        f"cgt {version} cannot be loaded with torch {now} ({why}). Its core belongs to the torch that it was built"
        " against: build it again with this one, pip install --no-build-isolation --force-reinstall --no-deps cgt (or"
        " make ext, where its sources are)."
    )


@code(227)
def not_finite(name: str, what: str, op: str, line: str) -> str:
    return f"a replay of {name} made the first {what} in {op} at {line}: what this op was given had none."


@code(807)
def no_tap(name: str, t: str) -> str:
    return f"cgt.tap() takes a name and a tensor, not a {name} and a {t}."


@code(808)
def tapped_inside() -> str:
    return (
        "cgt.tapped() is for outside of jitted functions: a replay would not look again. Pass the tensor to the"
        " function."
    )


@code(101)
def host_read(op: str, line: str) -> str:
    return (
        f"{op} at {line} needs a value on the host in the middle of the call. Read only the outcome of a comparison"
        " there (if x.sum() > 0), or a number that item() gives and that goes into ops alone; or use torch.where, or"
        " return the number or the tensor and look at it outside."
    )


@code(601)
def op_apart(op: str, line: str) -> str:
    return (
        f"{op} at {line} cannot be captured. It runs between two graphs from now on; but not if it draws, writes to an "
        "argument or is not PyTorch's own, nor in a backward or behind writes to anything from outside. There call it "
        "first, or outside."
    )


@code(706)
def capture_broken() -> str:
    return (
        "another thread called what the driver forbids while a capture is under way (torch.cuda.synchronize() waits for"
        " the whole device), which ended this recording. Wait for a stream or an event there, or call each function"
        " twice before."
    )


@code(708)
def overdue(device: int, seconds: float) -> str:
    return (
        f"replays on cuda:{device} that exchange data with other processes have not ended within {seconds:.0f} s, the"
        " timeout of their group, and what they usually take: a rank is gone, or is at another call. This process"
        " ends, as it does by NCCL's watchdog where a collective ran eagerly; python -X faulthandler tells where its"
        " threads were. TORCH_NCCL_ASYNC_ERROR_HANDLING=0 turns off both."
    )


@code(102)
def dynamic_shape(op: str, line: str) -> str:
    return (
        f"{op} at {line} makes a tensor whose shape depends on data. Use a mask with torch.where, a fixed size, or an"
        " index (x[x > 0]): a mask can be read."
    )


@code(108)
def memory_read(name: str, line: str) -> str:
    return (
        f"Tensor.{name} at {line} hands out a tensor's memory behind PyTorch's back. Call it outside the jitted"
        " function, on the result."
    )


@code(212)
def replaces_memory(op: str, line: str) -> str:
    return f"{op} at {line} replaces the memory of a tensor. Make a new tensor, or copy_ into the old."


@code(235)
def array_written(op: str, line: str) -> str:
    return (
        f"{op} at {line} writes to an array of which the function made a tensor (torch.from_numpy): a replay would not."
        " Make the tensor outside, or copy the array (torch.tensor)."
    )


@code(213)
def absolute(op: str, line: str) -> str:
    return (
        f"{op} at {line} counts from the start of an argument's memory, and the argument moves. Use slices and views"
        " instead."
    )


@code(701)
def beside(line: str) -> str:
    return (
        f"{line} reads memory around an argument that moves (its _base, or past its end). Pass the whole tensor as an"
        " argument."
    )


@code(229)
def shared_and_written(line: str) -> str:
    return (
        f"{line} writes an argument that shares memory with another one, for the first time. From the next recording on"
        " both are where they are: pass tensors that stay in place, or the whole tensor, and take the parts inside."
    )


@code(231)
def copied_and_written(path: str) -> str:
    return (
        f"{path} is a result of the path, of which this recording has a copy, and written for the first time. The next"
        " one has none."
    )


@code(230)
def no_way_back(path: str) -> str:
    why = (
        "a recording of this call cannot be told where (it reads values, has parts that run eagerly, or an op hides"
        " it), and no copy can stand for it"
    )
    return (
        f"{path} is written, is large or has gaps, and lies elsewhere at each call: {why}. From now on it must stay:"
        " reuse it (copy_ into it)."
    )


@code(304)
def reseeded(line: str) -> str:
    return (
        f"the state of a random generator was set inside the function (seen at {line}); a replay "
        "would not set it again. Seed, fork and checkpoint outside the jitted function."
    )


@code(301)
def impure(name: str, line: str) -> str:
    return (
        f"{name}() at {line} gives another value at each call, and a replay would repeat the recorded one. Call it "
        "outside the jitted function and pass what it gives as a tensor."
    )


@code(302)
def outside_draw(path: str) -> str:
    return (
        f"the function draws from {path}, and a replay would repeat the recorded numbers. Draw with torch "
        "(torch.rand, torch.randint), or draw outside and pass the numbers as a tensor."
    )


@code(303)
def advanced(path: str) -> str:
    return (
        f"{path} is an iterator or a file from which the function takes what comes next, or which cannot be asked"
        " whether it does; a replay would not. Call next() or read outside, and pass what comes as a tensor."
    )


ISLANDS = {  # why a function marked cgt.eager has no place in a recording
    "in_backward": "is called in a backward or in a body of torch.cond or while_loop. Call it outside",
    "behind_writes": (
        "is called behind writes to tensors from outside, which could not be undone if the call went another way. "
        "Call it before them, or outside"
    ),
    "behind_changes": (
        "is called behind changes to Python state, or to a .grad, which a replay makes at its end. Call it before "
        "them, or outside"
    ),
    "changes": "changed state that the jitted function can read while it was recorded. Return what it finds",
    "elsewhere": (
        "takes or returns a tensor that is not on the device of the jitted function. Move it inside the eager part"
    ),
    "odd": "takes or returns a tensor that no recording can hold. Use plain, dense tensors",
    "gradients": "takes or returns a tensor that requires grad. Call it under torch.no_grad(), or detach the tensor",
    "returns_arguments": "returns memory of its arguments. Return a copy",
    "returns_objects": "returns an object that a recording cannot compare. Return tensors, numbers and strings",
    "objects": (
        "is, or takes, an object that the jitted function made, or found where cgt does not look. Make it outside"
    ),
    "writes": "writes to an argument from outside. Return what it computes, and write that",
    "draws": "draws torch's random numbers. Draw outside of it, and pass them",
    "beside_draws": "is called by a function that draws torch's random numbers. Draw outside, and pass them",
    "changes_containers": "changes a list or dict among its arguments, of which it has a copy. Return what it finds",
    "another_order": (
        "was called in another order when its call ran once more. Let the jitted function do the same each time"
    ),
}


@code(602)
def island(name: str, line: str, why: str) -> str:
    return f"{name}, which is to run eagerly (cgt.eager), at {line}, {ISLANDS[why]}."


@code(603)
def island_differs(name: str) -> str:
    return (
        f"what the eager parts of {name} returned, or changed, was not what it was when the call was recorded: the rest"
        " ran eagerly. Let them return tensors of the same shapes, and nothing that Python code goes by."
    )


@code(308)
def follows(path: str) -> str:
    return f"the function puts another tensor into {path}, which it reads: followed from the next call on."


@code(115)
def stores_number(path: str) -> str:
    return f"the function changes the number in {path}, which it reads: from the next call on it is computed at each."


@code(116)
def reads_counter(path: str) -> str:
    return (
        f"the function counts in {path}, a tensor on the CPU, or asks for its number: from the next call on it is"
        " computed at each."
    )


@code(117)
def counter_used(path: str, what: str, line: str) -> str:
    return (
        f"{what} at {line} uses {path}, a tensor on the CPU in which the call counted before: from the next call on an"
        " ordinary one."
    )


@code(225)
def audit(name: str, unguarded: list[str], told: str, other: str) -> str:
    reads = (
        f" It can read what is not guarded: {' '.join(unguarded)} If it changes, pass it as an argument."
        if unguarded
        else ""
    )
    advice = reads or " Report this: it is a defect of cgt, or code that it cannot see changes memory."
    return (
        f"audit of {name}: a replay was not what eager is: {told}. Eager's values stand, and the recording is"
        f" dropped.{other}{advice}"
    )


UNAUDITED = {  # why a replay is not compared with eager, for explain()
    "exchange": "it exchanges data with other processes, which would wait for a second run.",
    "threads": (
        "it changes more than its results, or lets go of memory, and several threads call jitted functions: what one of"
        " them does meanwhile would be undone."
    ),
    "donated": "it writes into what its forward saved, as compiled code does with memory that it was given.",
    "memory": "there is no room for a second copy of what it writes, or for eager's run beside the recording.",
}


@code(226)
def verified(name: str, paths: str, ops: str, told: str, other: str) -> str:
    return (
        f"{name} was told where {paths} lies now ({ops}), and its replay is not what eager is: {told}. Eager's values"
        f" stand; from now on it is copied.{other} Report this: it is a defect of cgt, or code that it cannot see keeps"
        " the address."
    )


def other_op(now: str, recorded: str) -> str:
    return f" The first op that is another one: {now}, recorded as {recorded}."


@code(118)
def counters_join(line: str) -> str:
    return (
        f"the function counts in further tensors on the CPU at {line}, along with those that were known: from the next"
        " call on all are."
    )


@code(119)
def counters_part(path: str, other: str) -> str:
    return f"{path} and {other} held the same number when this was recorded, and do not any more: recorded anew."


@code(112)
def number_kept(path: str) -> str:
    return (
        f"something that is computed from {path}, a number that changes from call to call, outlives the call. Pass it"
        " as a tensor."
    )


@code(113)
def number_saved() -> str:
    return "a backward outside of the function, compiled code or another thread may look at it"


@code(114)
def number_type(line: str) -> str:
    return (
        "the function asks for an exact type with type(x), calls a method such as __le__ by its name, catches "
        f"TypeError, or adds floats with sum(), at {line}: there a number that changes is recorded by itself. "
        "isinstance(), operators, and a test in place of `try` would not keep it from that."
    )


@code(317)
def row_written(line: str) -> str:
    return (
        f"what a number chose from is written past it, at {line}, or the row that it chose: each such number is"
        " recorded by itself."
    )


@code(318)
def row_kept() -> str:
    return (
        "a row that a number chose from a tensor outlives the call, to which it is a view of that tensor: each such"
        " number is recorded by itself."
    )


@code(111)
def number_raised(text: str) -> str:
    return f"with a stand-in for a number the function raised {text}: each number is recorded by itself."


@code(110)
def number_decides(path: str, line: str) -> str:
    return (
        f"{path} is looked at by more than ops ({line}): each number there is recorded by itself. Pass it as a tensor,"
        " or compute with it only."
    )


@code(309)
def asks_which(path: str) -> str:
    return (
        f"the function asks which tensor lies in {path}, by its hash or id; or it calls an eager part (cgt.eager),"
        " which could replace it; or comes to tensors through what is not looked into (a set, a deque). From the next"
        " call on each one is recorded."
    )


@code(604)
def island_unsafe(name: str, why: str) -> str:
    return (
        f"an eager part (cgt.eager) of {name} wrote to a tensor from outside, or changed a list, dict or gradient that"
        f" {name} can read, and the rest of the call could not be replayed ({why}) It cannot run again. Let the part"
        " return what it finds."
    )


@code(310)
def drawn_in_vain(name: str, why: str) -> str:
    return (
        f"{name} was being recorded, which came to nothing ({why}) The recording took something from an iterator or a"
        " file that cannot be put back, so the call cannot run again. Call next() or read outside, and pass what comes"
        " as a tensor."
    )


@code(311)
def new_generator() -> str:
    return (
        "the function draws from a torch.Generator that it makes itself. Make it outside, and reach it by argument or"
        " closure."
    )


@code(214)
def changes_shape(op: str, line: str) -> str:
    return f"{op} at {line} changes the shape of a tensor from outside in place. Use the form without underscore."


@code(702)
def other_device(op: str, line: str, device: object, home: str) -> str:
    return (
        f"{op} at {line} works on {device}, and the call is recorded on {home}, where its arguments lie (the current"
        " GPU, if they lie on none or several). Say device= where a tensor is made, and jit what runs on each GPU by"
        " itself."
    )


@code(709)
def spread_graph(op: str, line: str, device: object, home: str) -> str:
    return (
        f"{op} at {line} works on {device}, in a call that is recorded on {home}, and a backward outside of the call is"
        " to go through it. Jit the whole step, the backward inside, or what runs on each GPU by itself."
    )


@code(710)
def spread_draws(op: str, line: str, device: object, home: str) -> str:
    return (
        f"{op} at {line} draws on {device} from a generator of the program's own or a random state of cuDNN's, and the"
        f" call is recorded on {home}. Draw there from the default generator, or jit what runs on each GPU by itself."
    )


@code(215)
def layout(op: str, line: str, kind: str) -> str:
    return f"{op} at {line} works on {kind}. Use a plain, dense tensor."


@code(703)
def collective(op: str, line: str, waits: bool = False) -> str:
    what = (
        "has the host wait for other processes"
        if waits
        else "exchanges data with other processes, which the host driver's tape cannot repeat"
    )
    return f"{op} at {line} {what}. Call it outside the jitted function."


@code(223)
def unknown_effect(op: str, line: str) -> str:
    return (
        f"{op} at {line} returns nothing new and does not say what it writes. Declare it (mutates_args of "
        "torch.library.custom_op), or call it outside the jitted function."
    )


@code(319)
def parallel_module(name: str, line: str, why: str = "") -> str:
    return (
        f"{name}'s forward at {line} prepares the exchange of gradients that its backward will do"
        f"{f' ({why})' if why else ''}. Jit what it wraps: cgt.jit(module)."
    )


@code(322)
def parallel_settles(name: str) -> str:
    return f"{name} takes times in its first iterations, which a replay could not: it is recorded after them."


@code(416)
def hooked_leaf(path: str) -> str:
    return (
        f"the function can run a backward to {path}, on whose accumulator of gradients somebody put a hook "
        "(DistributedDataParallel does). Call backward() outside the jitted function."
    )


@code(216)
def odd_tensor(path: str, kind: str) -> str:
    return f"{path} is {kind}. Use a plain, dense tensor, or leave this part outside of the jitted function."


@code(704)
def cudnn_dropout() -> str:
    return (
        "a recurrent layer draws its dropout from a random state of cuDNN's, which begins anew at this call, since the"
        " generator's seed was set. Seed less often, or give the layer dropout=0 and put torch.nn.Dropout between"
        " layers."
    )


@code(103)
def reads_too_much(line: str) -> str:
    return f"the values that the function reads on the way, up to {line}, are too many. Read fewer, or outside."


@code(104)
def another_value(lines: str) -> str:
    return f"the function read a value at {lines} for which there is no recording yet."


@code(105)
def varying_values(lines: str) -> str:
    return (
        f"the values that the function reads at {lines} have not come before, and a recording is for one of them alone."
        " Read what has few (mask.all()), or return the tensor and read it outside."
    )


@code(106)
def read_with_grads(line: str) -> str:
    return (
        f"a value is read at {line} while gradients of an earlier backward are there, which the function then replaces."
        " Call zero_grad() before."
    )


@code(219)
def cpu_tensor(op: str, line: str, shape: tuple[int, ...]) -> str:
    return f"{op} at {line} uses a CPU tensor of shape {shape} in a function on the GPU. Move it to the GPU outside."


@code(220)
def cpu_state(op: str, line: str) -> str:
    return (
        f"{op} at {line} changes or draws a CPU tensor in a function on the GPU. Keep that state on the GPU"
        " (optimizers: capturable=True)."
    )


@code(418)
def optimizer_option(name: str, line: str, option: str) -> str:
    return (
        f"{name}.step at {line} keeps numbers on the host that change at each step. Make the optimizer with {option}."
    )


@code(419)
def optimizer_outside(name: str, line: str) -> str:
    return (
        f"{name}.step at {line} needs numbers on the host, and no option of {name} changes that. Call it outside the"
        " jitted function."
    )


@code(420)
def scaler_option(name: str, line: str, option: str) -> str:
    return (
        f"GradScaler.step at {line} needs to know on the host whether to skip the step of {name}. "
        f"Make the optimizer with {option}: then it decides on the device."
    )


@code(421)
def scaler_outside(name: str, line: str) -> str:
    return (
        f"GradScaler.step at {line} needs to know on the host whether to skip the step of {name}. "
        "Call the scaler's step and update outside the jitted function."
    )


@code(221)
def odd_op(op: str, line: str) -> str:
    return f"{op} at {line} returns new tensors and views at once. Mark the place eager."


@code(605)
def higher_order_op(op: str, line: str) -> str:
    return (
        f"{op} at {line} is a higher-order op, whose inner ops cgt does not see. Call it outside the "
        "jitted function, or (on the GPU) inside torch.compile."
    )


@code(606)
def fork_in_backward(name: str, line: str) -> str:
    return f"torch's {name} at {line} runs in a backward. Call it in the forward, or outside the jitted function."


@code(607)
def fork_with_grad(name: str, line: str) -> str:
    return (
        f"torch's {name} at {line} works on tensors that require grad, and its backward is PyTorch's own. Put it under "
        "torch.no_grad(), or choose with `if` on a tensor, or with torch.where."
    )


@code(608)
def fork_raised(line: str, what: str) -> str:
    return (
        f"a body of torch's cond or while_loop raised while it was recorded ({line}; {what.rstrip('.')}). Each body is"
        " run once for that, with the operands of the call: it must not raise for any."
    )


@code(609)
def fork_result(name: str, line: str, what: str) -> str:
    return (
        f"torch's {name} at {line} {what}. Return new tensors from each body, of the same kind; pass and return clones."
    )


@code(610)
def body_writes(op: str, line: str) -> str:
    return (
        f"{op} at {line}, in a body of torch's cond or while_loop, writes a tensor that the body did not make. Return"
        " the new value instead."
    )


@code(611)
def body_acts(op: str, line: str) -> str:
    return (
        f"{op} at {line}, in a body of torch's cond or while_loop, may do more than compute. Call it outside of the"
        " body."
    )


@code(612)
def body_draws(op: str, line: str) -> str:
    return (
        f"{op} at {line}, in a body of torch's cond or while_loop, draws random numbers where a replay cannot know how"
        " many. Draw them before, and pass them to the body; on the host, from the default generator."
    )


@code(614)
def compiled_on_host(line: str) -> str:
    return (
        f"code of torch.compile uses the CPU at {line}, in kernels that PyTorch's dispatcher does not see "
        "and no replay could repeat. Compile or jit, not both; with GPU tensors alone both work together."
    )


@code(615)
def compiled_with_state(line: str) -> str:
    return (
        f"code of torch.compile at {line} brings CUDA graphs or random states of its own. "
        'Leave out mode="reduce-overhead", and recompute no dropout in its backward.'
    )


@code(613)
def compiles(line: str) -> str:
    return (
        f"torch.compile compiled while {line} was being recorded. The compiled code is recorded later; "
        "to avoid it, call the function once with such arguments outside."
    )


@code(222)
def untaped_op(op: str, line: str, why: str) -> str:
    return f"{op} at {line} cannot be put on the host driver's tape ({why})."


@code(401)
def odd_root(path: str) -> str:
    return f"{path} requires grad and shares memory with an argument or with another such result. Return a clone of it."


@code(402)
def made_leaf(path: str) -> str:
    return f"{path} is a leaf that the function makes and that requires grad. Make it outside, or return it detached."


@code(403)
def outer_graph(line: str) -> str:
    return (
        f"gradients would flow ({line}) to something that cgt cannot follow: a graph made before the call, or a "
        "leaf made in it (x.detach().requires_grad_()). Pass such tensors as arguments, or return detached results."
    )


@code(404)
def written_root(path: str) -> str:
    return f"{path} requires grad and is written in place. Return the new value instead."


@code(315)
def too_many_places() -> str:
    return (
        "the function's code can read too much to guard it all, and torch.compile hides which part of it ran. Jit a"
        " smaller function."
    )


@code(314)
def hidden_code() -> str:
    return (
        "a profiler, or a thread that the function started, hides which code ran, and so what it read. "
        "Record without the profiler, and start threads outside."
    )


@code(325)
def swapped(line: str) -> str:
    return (
        f"torch.utils.swap_tensors was called at {line}: what a recording reads would be another tensor from then on. "
        "Swap them outside, or copy_()."
    )


@code(324)
def unseen_kernel(line: str) -> str:
    return (
        f"no op wrote the memory that was made empty at {line}, and it is used: a kernel that PyTorch shows to nobody"
        " may fill it."
    )


@code(326)
def casts_inside(op: str, line: str) -> str:
    return (
        f"{op} at {line} runs other ops, which autocast changes: a recording on the CPU has it alone. Call it outside"
        " of autocast."
    )


@code(323)
def op_elsewhere(op: str) -> str:
    return (
        f"{op.replace('::', '.')} ran in another thread, to which the function may have given work (a pool, a queue,"
        " nn.DataParallel): no recording has it. Work on tensors in the function's own thread, or jit what the other"
        " thread runs."
    )


@code(616)
def hidden_kernels() -> str:
    return (
        "kernels that no op shows (TorchScript fuses some) ran while arguments were copied, and may have read the"
        " originals. From now on none is copied: pass tensors that stay in place."
    )


@code(312)
def imports(file: str) -> str:
    return (
        f"the call imported {file}, and so ran code that other calls do not: recorded when one comes that imports"
        " nothing."
    )


@code(313)
def new_code(code: types.CodeType) -> str:
    place = f"{code.co_name} at {code.co_filename}:{code.co_firstlineno}"
    return f"code ran for the first time ({place}); what it reads is guarded from the next call on."


@code(405)
def first_gradient() -> str:
    return "the result requires grad for the first time: from the next call on it is recorded so."


@code(406)
def backward_reads(line: str) -> str:
    return (
        f"the backward of this function, at {line}, reads a tensor that autograd did not save (a hook, a "
        "custom autograd.Function or a checkpoint holds it). Use ctx.save_for_backward, or pass it "
        "through the checkpoint's arguments."
    )


@code(207)
def kept_argument(path: str) -> str:
    return (
        f"something keeps {path}, or a view of it, beyond the call (an attribute, a hook, a custom autograd.Function or"
        " a checkpoint's function closes over it). Return it, use ctx.save_for_backward, or pass it through the"
        " checkpoint's arguments."
    )


@code(407)
def stale_backward(why: str) -> str:
    return f"this backward belongs to a replayed call, and {why}"


@code(408)
def create_graph(name: str) -> str:
    return (
        f"create_graph=True through a replayed call of {name}: its backward is a recording, which has no graph of its "
        f"own. Call {name}.__wrapped__ (a module's forward()) for double backward; further calls of {name} with"
        " gradients run eagerly."
    )


@code(409)
def refused_backward(batched: bool) -> str:
    if batched:
        return "a backward through it was given batched gradients (vmap, is_grads_batched)."
    return "a backward through it asked for create_graph=True."


@code(410)
def batched_gradients(name: str) -> str:
    return (
        f"batched gradients (vmap, is_grads_batched) through a replayed call of {name}: its backward is a recording "
        f"for one. Call {name}.__wrapped__ (a module's forward()) for them; further calls of {name} with gradients run"
        " eagerly."
    )


@code(411)
def transforms(line: str) -> str:
    return (
        f"{line} differentiates with torch.func, which does not work where a later backward's needs are watched. Return"
        " a result that does not require grad, or jit the whole step with its backward()."
    )


@code(511)
def mode_inside(line: str) -> str:
    return (
        f"a dispatch mode is active at {line}: it sees the ops that run, and a replay runs none. Put the mode around"
        " the call."
    )


@code(107)
def read_behind(op: str, line: str) -> str:
    return (
        f"{op} at {line} reads values where no replay could repeat it. Keep tensors (torch.stack instead of"
        " torch.tensor of tensors), give lengths as numbers, or compute it outside."
    )


@code(412)
def late_read() -> str:
    """A backward asked again for what it seemed to need no more."""
    return (
        "the backward pass read a saved tensor again after it had let go of it; it is recorded anew with everything"
        " kept"
    )


@code(320)
def early_bound(path: str) -> str:
    return (
        f"{path} reads a tensor's memory and was looked up before cgt could watch it. Look it up where it "
        "is called: x.tolist(), torch.utils.dlpack.to_dlpack(x)."
    )


@code(316)
def scripted(path: str) -> str:
    return (
        f"{path} is a module of TorchScript (torch.jit.script, trace, load), whose mode, parameters and attributes no "
        "guard can see. Use the module that it was made from."
    )


@code(413)
def modified(shape: tuple[int, ...], *versions: int) -> str:
    """versions: now and then, where PyTorch's own node asks for the tensor; it would say the same."""
    which = ", is at version {}; expected version {} instead".format(*versions) if versions else ""
    return (
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: a tensor of shape {shape} that was saved for the backward{which}."
    )


@code(414)
def saved_changed() -> str:
    return (
        "a tensor that the forward saved was modified in place before the backward. Modify it after backward(), or a"
        " clone."
    )


@code(208)
def strange_output(path: str, kind: str) -> str:
    return (
        f"{path} is a {kind}, which cgt cannot rebuild at a replay. Return tensors in tuples, lists, "
        "dicts or dataclasses, or register the type with torch.utils._pytree."
    )


@code(209)
def unknown_output(path: str) -> str:
    return f"{path} is a tensor that cgt did not see being made. Make it with PyTorch ops."


@code(210)
def host_output(path: str) -> str:
    return f"{path} is a CPU tensor made in a function on the GPU. Return a GPU tensor."


@code(217)
def subclass(path: str, kind: str) -> str:
    return f"{path} is a {kind}, a tensor subclass. Pass plain tensors."


@code(232)
def wrapped_graph(path: str, kind: str) -> str:
    return (
        f"the backward goes through {path}, a {kind}, and would come behind the call. Jit the whole step, backward and"
        " all."
    )


@code(233)
def gathered(path: str) -> str:
    return (
        f"{path} was gathered by an earlier forward and is not sharded yet, so this backward runs as it is. Call"
        " reshard() on the module behind a forward that has none."
    )


@code(234)
def unknown_sharding(path: str) -> str:
    return (
        f"{path} was spread by fully_shard of a release of torch in which cgt does not know what that keeps beside it."
    )


@code(228)
def not_compared(path: str, what: str, instead: str) -> str:
    return f"{path} {what}, and cgt cannot compare it from call to call. {instead}"


@code(206)
def changed_arguments(path: str) -> str:
    return f"the function changes {path}. Return the new value instead."


@code(211)
def kept_tensor(line: str, held_by: str) -> str:
    return f"a tensor made at {line} outlives the call{held_by}. Return it, or copy_ into a tensor that exists before."


@code(415)
def foreign_grad(path: str) -> str:
    return f"{path}.grad is set to a tensor from outside. Assign it outside the jitted function."


@code(705)
def recording_failed(name: str, line: str) -> str:
    where = f" after {line}" if line else ""
    return f"recording failed{where}: {name}."


@code(711)
def no_checkpoints(backend: str) -> str:
    return (
        f"memory comes from the allocator {backend}, which cannot be put back to where a recording began. Use PyTorch's"
        " own: no backend:cudaMallocAsync in PYTORCH_CUDA_ALLOC_CONF, no change_current_allocator (RMM's, or another"
        " one); for some tensors alone, torch.cuda.MemPool."
    )


@code(508)
def busy() -> str:
    return "another thread was recording."


@code(509)
def lost() -> str:
    return (
        "the iteration went on while this was recorded: another thread ran, or the function itself calls cgt.step()."
        " Call it outside."
    )


@code(510)
def blocked(kind: int) -> str:
    return (
        "",
        "a torch dispatch mode is active around the call.",
        "a torch function mode (torch.set_default_device is one) is active around the call.",
        "a functorch transform is active around the call.",
        "the call is part of another CUDA graph capture, or one is under way on the stream of the last replay.",
        (
            "hooks for saved tensors are active around the call (torch.utils.checkpoint with "
            "use_reentrant=False, save_on_cpu). Use them inside the jitted function."
        ),
        "torch.jit.trace is tracing the call.",
        "autograd's anomaly mode is on around the call: it looks for NaN behind each node of the graph.",
    )[kind]


@code(502)
def limit(n: int, why: str) -> str:
    return f"recorded {n} times already (max_records); {why}"


@code(514)
def not_replayed(name: str, reason: str) -> str:
    return f"{name} is not replayed, as cgt.require_replay() demands: {reason}"


@code(515)
def strict(name: str, reason: str) -> str:
    return f"{name} is not replayed, as CGT_STRICT=1 demands: {reason}"


@code(804)
def bad_switch(name: str, value: str, expected: str) -> str:
    return f"{name}={value}: expected {expected}."


@code(120)
def waits(line: str) -> str:
    return f"each call waits for a value that is read at {line}, and each value that comes again has a recording."


@code(516)
def nothing_jitted(script: str) -> str:
    return f"{script} jits nothing: mark a function with @cgt.jit, or ask cgt.doctor(f, *args) about one."


@code(512)
def disabled() -> str:
    return "CGT_DISABLE=1: jitted functions are plain ones."


@code(513)
def never_replayed(name: str, calls: int, reason: str) -> str:
    return (
        f"none of {calls} calls of {name} was replayed. Mostly: {reason} (cgt.explain({name.rpartition('.')[2]}) tells"
        " the rest; this is said once for each function.)"
    )


def told_miss(name: str, reason: str) -> str:
    return f"{name} runs eagerly: {reason}"


def told_record(name: str, kind: str, seconds: float, why: str) -> str:
    done = f"{name}: {kind}ed in {seconds * 1e3:.1f} ms"
    return done if why == unrecorded() else f"{done}: {why}"


def told_rescue(name: str, size: int, line: str) -> str:
    return f"a result of {name} ({size} B, made at {line}) is still held where a replay is about to overwrite it: moved"


def told_evict(name: str, count: int) -> str:
    return f"the recording that ran longest ago goes, to make room for one of {name}: there are {count}"


@code(501)
def unrecorded() -> str:
    return "such a call was not recorded yet. Call it outside first, until cgt.stats tells of replays."


@code(504)
def new_kind(path: str | None = None) -> str:
    if path is None:
        return "the first call with such arguments: recorded when one comes that is like it."
    return (
        f"the first call with such arguments: {path} is another one at each call. Recorded when one comes that is like"
        " it. Keep it to a few values, or pass it by itself as a float, an int or a tensor."
    )


@code(505)
def timed() -> str:
    return "timed as it is: a recording was not replayed yet, and another one must pay."


@code(517)
def left(kind: str, line: str) -> str:
    return (
        f"the call is left by {kind} (raised at {line}). Return early instead, or raise outside, by what is returned."
    )


@code(518)
def grows(path: str) -> str:
    return (
        f"{path} gets a tensor of another shape at each call. Keep one of full size, and write into it (cache[:, t]"
        " = k)."
    )


@code(503)
def does_not_pay(spent: float, eager: float, calls: int, why: str) -> str:
    return (
        f"recordings do not pay so far: with the next one they take {1e3 * spent:.1f} ms, an eager call"
        f" {1e6 * eager:.0f} µs, and few would be replayed; {why} Tried again after {calls} calls, or when calls stay"
        " alike."
    )


@code(202)
def moved(path: str, *addresses: int) -> str:
    """addresses: then and now, in a debug build."""
    at = " ({:#x} then, {:#x} now)".format(*addresses) if addresses else ""
    return (
        f"{path} lies elsewhere than when it was recorded{at}, and a recording cannot be told where: it is written and"
        " shares memory, needs gradients or is very large; no argument; a view of another one; or inputs='pinned'."
        " Reuse the tensor (copy_ into it)."
    )


@code(203)
def misaligned(path: str) -> str:
    return (
        f"{path} begins at another remainder of 512 bytes (64 on the CPU) at each call, a slice of a larger "
        "tensor say, and kernels may differ by that. Pass a clone() of it."
    )


@code(417)
def forward_mode(line: str) -> str:
    return (
        f"the call differentiates in forward mode ({line}), whose tangents no recording knows. Use reverse "
        "mode (vjp, jacrev, vmap of grad), or leave this part outside."
    )


@code(305)
def changed_state(path: str, line: str | None = None) -> str:
    where = f" (at {line})" if line else ""
    return (
        f"{path} is changed by the function{where}, which a replay would not do. Change it outside, keep it in a tensor"
        " and write that in place, or only count in it (self.calls += 1): that replays if nothing else in the call"
        " reads it."
    )


@code(218)
def replaced(path: str) -> str:
    return (
        f"{path} gets other memory in the function (.data = ..., swap_tensors). Write its values in place: copy_()"
        " under torch.no_grad()."
    )


def beside_threads(reason: str, names: list[str]) -> str:
    """The same, with what is not followed where other threads run Python; they may be why."""
    numbers = (number_decides, changed_state, place_changed, optimizer_option, optimizer_outside)
    if not names or not reason.startswith(tuple(f"CGT{n}:" for n, sentence in CODES.items() if sentence in numbers)):
        return reason
    also = "Another thread runs" if len(names) == 1 else f"{len(names)} other threads run"
    return (
        f"{reason} {also} Python meanwhile ({', '.join(names[:3])}), and could see a number of the function's that"
        " changes: none is followed then."
    )


@code(306)
def used_elsewhere(path: str) -> str:
    return (
        f"{path} is stored by the function while another thread, or code that ran for the first time, has to do with"
        " that name. Let one thread at a time do so, or return the value and store it outside."
    )


@code(307)
def place_changed(path: str) -> str:
    return f"{path} changes from call to call. Pass it as a tensor, or keep it constant."


@code(204)
def other_tensor(path: str) -> str:
    return (
        f"{path} is now and then the very tensor that is also another argument, in a variable or a .grad that the "
        "function reads. Pass such a tensor once, or always."
    )


@code(205)
def still_held(line: str) -> str:
    return (
        f"the result made at {line} had been dropped when this call was recorded and is still held now. "
        "Drop it as early as then, or hold it at each iteration."
    )


@code(201)
def arguments_changed(path: str, then: object = None, now: object = None) -> str:
    told = f" (recorded with {then}, called with {now})" if then != now else ""
    return (
        f"{path}{told} has another shape, dtype or value at each call. Keep to a few shapes and values (a number that "
        "changes: pass it as a tensor)."
    )


@code(109)
def number_on_host(path: str) -> str:
    return (
        f"{path} is a tensor on the CPU, of one number, which is another one at each call. Pass the number as Python"
        " has it (one recording serves all its values), or in a tensor on the GPU."
    )


@code(506)
def another_mode() -> str:
    return (
        "a mode of torch (gradients, autocast, inference, deterministic algorithms, the default dtype) is another one"
        " than when it was recorded. Enter it inside the jitted function, or keep to a few."
    )


@code(507)
def another_way() -> str:
    return (
        "what ran before it in this iteration is another recording, or none, than when it was recorded: each way"
        " through the program has its own, which goes with that."
    )


# --- errors -----------------------------------------------------------------------------------


@code(801)
def not_a_function(what: str) -> str:
    return f"cgt.jit takes a function or an nn.Module, not {what}."


@code(802)
def no_generator_function(name: str, kind: str) -> str:
    return (
        f"{name} is {kind}: its body runs after the call, so there is nothing to record. Jit the function that does the"
        " tensor work."
    )


@code(803)
def bad_option(name: str, value: object, allowed: str) -> str:
    return f"cgt.jit({name}={value!r}): expected {allowed}."


@code(707)
def replay_failed(name: str, call: str, why: str) -> str:
    return (
        f"replaying {name} failed at the driver's {call} call: {why}. Nothing was launched; cgt.reset({name}) drops its"
        " recordings."
    )


@code(809)
def called_otherwise(name: str) -> str:
    return (
        f"{name} has a __call__ that does not come to nn.Module's, in which a jitted module replays. Jit what that"
        " calls: module.forward = cgt.jit(module.forward)."
    )


@code(806)
def no_drawing(path: str, known: list[str]) -> str:
    return f"cgt.show draws into a file whose name ends in {', '.join(known[:-1])} or {known[-1]}, not {path}."


@code(805)
def not_jitted(what: object) -> str:
    return f"{what!r} was not made by cgt.jit."


@code(224)
def poisoned(made: str, ended: str) -> str:
    return (
        f"this output of a jitted function (made at {made}) was overwritten when {ended} began a new "
        'iteration, because outputs="error". Clone it, or use outputs="rescue".'
    )
