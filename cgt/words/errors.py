"""What cgt raises and warns with, and every sentence that it says.

A reason tells what happened, where (file:line and op), and what to change; cgt's part ("ran eagerly") is said by
`explain`. The core knows no words: `DriverError` carries facts, and `recording_failed` makes the sentence.
"""

import functools
import inspect
import itertools
import re
import string
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


def says(text: str) -> Callable[..., str]:
    """The sentence `NNN: what it tells of {these}`, NNN its code."""
    number, _, words = text.partition(": ")
    return code(int(number))(phrase(words))


def phrase(text: str) -> Callable[..., str]:
    """A function that says this; what it tells of {these} are its arguments, in the order of the text. What stands [[in
    brackets, of {this}]] is said if that is given, and is not "": such arguments come behind the others."""
    parts = re.split(r"\[\[|\]\]", " ".join(text.split()))  # each second one stood in brackets
    names = [[name for _, name, _, _ in string.Formatter().parse(part) if name] for part in parts]
    always, more = (dict.fromkeys(itertools.chain(*names[k::2])) for k in (0, 1))

    def sentence(*given):
        missing = [None] * (len(always) + len(more) - max(len(given), len(always)))
        told = dict(zip((*always, *more), (*given, *missing), strict=True))
        said = [part for k, part in enumerate(parts) if k % 2 == 0 or told[names[k][0]] not in (None, "")]
        return "".join(said).format(**told)

    new = functools.partial(inspect.Parameter, kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
    vars(sentence)["__signature__"] = inspect.Signature(
        [*map(new, always), *(new(name, default=None) for name in more)]
    )
    return sentence


# --- sentences: why a call was not replayed, and what is raised -----------------------------------

# 1: values that Python reads
host_read = says("""101: {op} at {line} turns a tensor into a Python value in the middle of the call. Allowed there: the
    outcome of a comparison (if x.sum() > 0), and a number from item() that only goes into arithmetic, operations and
    indexes. For anything else use torch.where, or return the tensor and look at it outside.""")
dynamic_shape = says("""102: {op} at {line} makes a tensor whose shape depends on data. Use a mask with torch.where, a
    fixed size, or an index by a mask (x[x > 0]).""")
reads_too_much = says("""103: the function reads too many values in the middle of the call, up to {line}. Read fewer of
    them, or read them outside.""")
another_value = says("104: the function read a value at {lines} for which there is no recording yet.")
varying_values = says("""105: at {lines} Python reads values that have not come before, and one recording covers one
    value. Read something that has few values (mask.all()), use torch.where, or return the tensor and read it
    outside.""")
read_with_grads = says("""106: a value is read at {line} while gradients of an earlier backward are still there, and the
    function then replaces them. Call zero_grad() first.""")
read_behind = says("""107: {op} at {line} reads values where no replay could repeat it. Keep tensors (torch.stack
    instead of torch.tensor of tensors), give lengths as Python numbers, or compute it outside.""")
memory_read = says("""108: Tensor.{name} at {line} hands out a tensor's memory behind PyTorch's back. Call it outside
    the jitted function, on the result.""")
number_on_host = says("""109: {path} is a CPU tensor whose numbers differ at each call. Pass a number as Python has it
    (one recording covers all its values), or the tensor on the GPU.""")
number_decides = says("""110: {path} is used for more than arithmetic and operations ({line}), so each of its values
    needs a recording. Pass it as a tensor, or only compute with it.""")
number_raised = says("""111: the function raised {text} when a stand-in was passed for a number, so each value needs a
    recording.""")
number_kept = says("""112: a number computed from {path} outlives the call in a place that cgt does not follow, such as
    a deque, a set or a closure. Keep it in a list or an attribute, or return it.""")
number_saved = says("""113: a backward outside of the function, compiled code or another thread may look at a number of
    the function's, so each value of one needs a recording.""")
number_type = says("""114: the function asks for an exact type with type(x), calls a method such as __le__ by its name,
    catches TypeError, or adds floats with sum(), at {line}, so each value of {number} needs a recording.
    Use isinstance(), operators, and a test instead of `try`.""")
stores_number = says("""115: the function changes the number in {path}, which it also reads. From the next call on,
    replays compute it. Nothing to do.""")
reads_counter = says("""116: the function counts in {path}, a CPU tensor (an optimizer's step, say), or reads its
    number. From the next call on, replays update it. Nothing to do.""")
counter_used = says("""117: {what} at {line} uses {path}, a CPU tensor in which the call counted before. From the next
    call on it is an ordinary tensor.""")
counters_join = says("""118: the function counts in more CPU tensors at {line} than it did before. From the next call
    on, replays update all of them. Nothing to do.""")
counters_part = says("""119: {path} and {other} held the same number when this was recorded, and now they differ. The
    call is recorded again.""")
waits = says("120: each call waits for a value that is read at {line}. Each value that comes again has a recording.")

# 2: tensors and their memory
moved = says("""202: the address of {path} changed[[ (from {then:#x} to {now:#x})]], and this recording only works with
    the old one: the tensor is written and shares memory, needs gradients, is very large, is no argument, is a view of
    another one, or inputs='fixed' is set. Keep one tensor and refill it: buffer.copy_(x).""")
misaligned = says("""203: the address of {path} has another remainder of 512 bytes (64 on the CPU) at each call, as a
    slice of a larger tensor may have, and kernels may differ by that. Pass a clone() of it.""")
other_tensor = says("""204: {path} is at some calls the very tensor that is also another argument, in a variable or in a
    .grad that the function reads. Let it be that at all calls, or at none.""")
still_held = says("""205: the result made at {line} is still held, but had been dropped when this call was recorded.
    Drop it as early as then, or hold it in each iteration.""")
changed_arguments = says("206: the function changes {path}. Return the new value instead.")
kept_argument = says("""207: something keeps {path}, or a view of it, beyond the call: an attribute, a hook, or the
    closure of a custom autograd.Function or of a checkpoint's function. Return it, use ctx.save_for_backward, or pass
    it through the checkpoint's arguments.""")
strange_output = says("""208: {path} is a {kind}, which a replay cannot build. Return tensors in tuples, lists, dicts or
    dataclasses, or register the type with torch.utils._pytree.""")
unknown_output = says("209: {path} is a tensor that cgt did not see being made. Make it with PyTorch's operations.")
host_output = says("210: {path} is a CPU tensor made in a function on the GPU. Return a GPU tensor.")
kept_tensor = says("""211: a tensor made at {line} outlives the call{held_by}. Return it, let go of it before the call
    ends, keep it without its graph (detach()), or copy_ it into an older tensor.""")
replaces_memory = says("""212: {op} at {line} replaces the memory of a tensor. Make a new tensor, or copy_ into the old
    one.""")
absolute = says("213: {op} at {line} counts from the start of an argument's memory, which moves. Use slices and views.")
changes_shape = says("""214: {op} at {line} changes the shape of a tensor from outside in place. Use the form without
    the underscore.""")
layout = says("215: {op} at {line} works on {kind}. Use a plain, dense tensor.")
odd_tensor = says("""216: {path} is {kind}. Use a plain, dense tensor, or leave this part outside of the jitted
    function.""")
subclass = says("217: {path} is a {kind}, a tensor subclass. Pass plain tensors.")
replaced = says("""218: the function gives {path} other memory (.data = ..., swap_tensors). Write its values in place:
    copy_() under torch.no_grad().""")
cpu_tensor = says("""219: {op} at {line} computes with a CPU tensor of shape {shape} in a function on the GPU. Move it
    to the GPU first, with x.to(device), which may be inside of the function.""")
cpu_state = says("""220: {op} at {line} changes a CPU tensor, or draws random numbers into one, in a function on the
    GPU. Keep that state on the GPU (optimizers: capturable=True).""")
odd_op = says("221: {op} at {line} returns new tensors and views at once. Put it into a function marked @cgt.eager.")
untaped_op = says("222: {op} at {line} cannot be part of a recording on the CPU ({why}).")
unknown_effect = says("""223: {op} at {line} returns nothing new and does not say what it writes. Declare it
    (mutates_args of torch.library.custom_op), or call it outside the jitted function.""")
poisoned = says("""224: this output of a jitted function (made at {made}) was overwritten when {ended} began a new
    iteration, because outputs="error". Clone it, or use outputs="rescue".""")
verified = says("""226: {name} was told the new address of {paths} ({ops}), and its replay is not what eager is: {told}.
    Eager's values stand, and from now on the argument is copied.{other} Report this: it is a defect of cgt, or code
    that it cannot see keeps the address.""")
not_finite = says("227: {name} made the first {what} in {op} at {line}. What this operation was given had none.")
not_compared = says("228: {path} {what}, and cgt cannot compare it from call to call. {instead}")
shared_and_written = says("""229: {line} writes an argument that shares memory with another one, for the first time.
    From the next recording on, both must stay where they are. Pass tensors that stay in place, or pass the whole tensor
    and take the parts inside.""")
no_way_back = says("""230: {path} is written, is large or has gaps, and has another address at each call. A recording of
    this call cannot be told the address (it reads values, has eager parts, or an operation hides it), and a copy cannot
    stand for it. Keep one tensor and refill it (copy_).""")
copied_and_written = says("""231: {path} is a result of an earlier call, of which this recording has a copy, and is
    written for the first time. The next recording has no copy. Nothing to do.""")
wrapped_graph = says("""232: the backward goes through {path}, {kind}, and would run after the call. Jit the whole
    step, backward included.""")
gathered = says("""233: {path} was gathered by an earlier forward and is not sharded yet, so this backward runs eagerly.
    Call reshard() on the module after a forward that has no backward.""")
unknown_sharding = says("""234: {path} was sharded by fully_shard, and cgt does not know what this release of torch
    keeps beside it, or its own folder ranks is missing.""")
array_written = says("""235: {op} at {line} writes to an array of which the function made a tensor (torch.from_numpy),
    and a replay would not. Make the tensor outside, or copy the array (torch.tensor).""")

# 3: what Python keeps
impure = says("""301: {name}() at {line} gives another value at each call, and a replay would repeat the recorded one.
    Call it outside the jitted function and pass its value as a tensor.""")
outside_draw = says("""302: the function draws from {path}, and a replay would repeat the recorded numbers. Draw with
    torch (torch.rand, torch.randint), or draw outside and pass the numbers as a tensor.""")
advanced = says("""303: {path} is an iterator or a file. The function takes the next item from it, or may do so, and a
    replay would not. Call next() or read outside, and pass the item as a tensor.""")
reseeded = says("""304: the state of a random generator was set inside the function (seen at {line}), and a replay would
    not set it again. Seed, fork and checkpoint outside the jitted function.""")
changed_state = says("""305: {path} is changed by the function[[ (at {line})]], and a replay would not change it. Change
    it outside, or keep it in a tensor and write that in place. Counting alone (self.calls += 1) replays, if nothing
    else in the call reads the counter.""")
used_elsewhere = says("""306: {path} is stored by the function while another thread[[ ({threads})]], or code that ran
    for the first time, uses that name. Let one thread at a time do so, or return the value and store it outside.""")
place_changed = says("307: {path} changes from call to call. Pass it as a tensor, or keep it constant.")
follows = says("""308: the function puts another tensor or object into {path}, which it also reads. From the next call
    on, replays read what is there. Nothing to do.""")
asks_which = says("""309: the function asks which tensor is in {path}, by its hash or id; or calls an eager part
    (cgt.eager), which could replace it; or reaches tensors through a container that cgt does not look into (a set, a
    deque). From the next call on, each such tensor has a recording.""")
drawn_in_vain = says("""310: the recording of {name} failed ({why}) It took something from an iterator or a file that
    cannot be put back, so the call cannot run again. Call next() or read outside, and pass the item as a tensor.""")
new_generator = says("""311: the function draws from a torch.Generator that it makes itself. Make it outside, and pass
    it, or use it by its name.""")
imports = says("""312: the call imported {file}, as later calls do not. The next call that imports nothing is recorded.
    Nothing to do.""")
new_code = says("""313: code ran for the first time ({name} at {line}). What it reads is guarded from the next call on.
    Nothing to do.""")
hidden_code = says("""314: a profiler, or a thread that the function started, hides which code ran, and so what it read.
    Record without the profiler, and start threads outside.""")
too_many_places = says("""315: the function's code can read more variables than can be guarded, and torch.compile hides
    which part of it ran. Jit a smaller function.""")
scripted = says("""316: {path} is a module of TorchScript (torch.jit.script, trace, load), whose mode, parameters and
    attributes cgt cannot see. Use the module that it was made from.""")
row_written = says("""317: at {line} the function writes to a list or tensor from which a number picks an entry, or to
    that entry, so each value of the number needs a recording.""")
row_kept = says("""318: an entry that a number picks from a tensor outlives the call, as a view of that tensor, so each
    value of the number needs a recording.""")
parallel_module = says("""319: {name}'s forward at {line} prepares the exchange of gradients in its backward[[
    ({why})]]. Jit what it wraps: cgt.jit(module).""")
early_bound = says("""320: {path} reads a tensor's memory and was looked up before cgt could watch it. Look it up where
    it is called: x.tolist(), torch.utils.dlpack.to_dlpack(x).""")
parallel_settles = says("""322: {name} takes times in its first iterations, which a replay could not. It is recorded
    after them. Nothing to do.""")
op_elsewhere = says("""323: {op} ran in another thread, to which the function may have given work (a pool, a queue,
    nn.DataParallel). A recording holds what the function's own thread does. Work on tensors there, or jit what the
    other thread runs.""")
unseen_kernel = says("""324: no operation wrote the memory that was made empty at {line}, and yet it is used. A kernel
    that PyTorch shows to nobody may fill it.""")
swapped = says("""325: torch.utils.swap_tensors was called at {line}, so that a recording would read another tensor.
    Swap tensors outside, or use copy_().""")
casts_inside = says("""326: {op} at {line} runs other operations, which autocast changes, and a recording on the CPU
    cannot hold that. Call it outside of autocast.""")

# 4: gradients and optimizers
odd_root = says("401: {path} requires grad and shares memory with an argument or another such result. Return a clone.")
made_leaf = says("402: {path} is a leaf that the function makes and that requires grad. Make it outside, or detach it.")
outer_graph = says("""403: gradients would flow ({line}) to something that cgt cannot follow: a graph made before the
    call, or a leaf made in it (x.detach().requires_grad_()). Pass such tensors as arguments, or detach results.""")
written_root = says("404: {path} requires grad and is written in place. Return the new value instead.")
first_gradient = says("""405: the result requires grad for the first time. From the next call on it is recorded so.
    Nothing to do.""")
backward_reads = says("""406: the backward of this function, at {line}, reads a tensor that autograd did not save (a
    hook, a custom autograd.Function or a checkpoint holds it). Use ctx.save_for_backward, or pass it through the
    checkpoint's arguments.""")
stale_backward = says("407: this backward belongs to a replayed call, and {why}")
not_run_again = says("""408: a backward through a replayed call of {name} asked for create_graph=True or for batched
    gradients (vmap, is_grads_batched). cgt runs the call once more for that, as a checkpoint does, but {why}. Call
    {name}.__wrapped__ (a module's forward()) there. Further calls of {name} with gradients run eagerly.""")
refused_backward = says("409: a backward through it asked for create_graph=True or for batched gradients, and {why}")
transforms = says("""411: {line} differentiates with torch.func, which does not work in a call whose own backward comes
    later. Return a result that does not require grad, or jit the whole step with its backward().""")
late_read = says("""412: the backward pass read a saved tensor again after it had let go of it. It is recorded again,
    with everything kept. Nothing to do.""")
modified = says("""413: one of the variables needed for gradient computation has been modified by an inplace operation:
    a tensor of shape {shape} that was saved for the backward[[, is at version {now}; expected version {then}
    instead]].""")
saved_changed = says("""414: a tensor that the forward saved was modified in place before the backward. Modify it after
    backward(), or modify a clone.""")
foreign_grad = says("415: {path}.grad is set to a tensor from outside. Assign it outside the jitted function.")
hooked_leaf = says("""416: the function can run a backward to {path}, on whose gradient accumulator somebody put a hook
    (DistributedDataParallel does). Call backward() outside the jitted function.""")
forward_mode = says("""417: the call is made in forward mode (in a dual level), and recordings have no tangents. Jit the
    function that opens the level.""")
optimizer_option = says("""418: {name}.step at {line} keeps numbers on the CPU that change at each step. Make the
    optimizer with {option}.""")
optimizer_outside = says("""419: {name}.step at {line} needs numbers on the CPU, and no option of {name} changes that.
    Call it outside the jitted function.""")
scaler_option = says("""420: GradScaler.step at {line} needs to know on the CPU whether to skip the step of {name}. Make
    the optimizer with {option}: then it decides on the GPU.""")
scaler_outside = says("""421: GradScaler.step at {line} needs to know on the CPU whether to skip the step of {name}.
    Call the scaler's step and update outside the jitted function.""")

# 5: whether a call is recorded
unrecorded = says("501: no such call is recorded yet. Call it outside first, until cgt.stats tells of replays.")
limit = says("502: recorded {n} times already (max_records); {why}")
new_kind = says("""504: first call with such arguments. [[{path} differs at each call: keep it to a few values, or to
    one object, or pass it by itself as a float, an int or a tensor. ]]It is recorded when such a call comes again.""")
timed = says("505: this call was timed: a recording was not replayed yet, and another one is made only if it pays.")
does_not_pay = says("""503: recording is paused: with the next one, {spent:.1f} ms would be spent on recordings that are
    hardly replayed, and an eager call takes {eager:.0f} µs. Cause: {why} Next try after {calls} calls, or when calls
    stay alike.""")
another_mode = says("""506: a mode of torch (gradients, autocast, inference, deterministic algorithms, the default
    dtype) has changed since it was recorded. Enter it inside the jitted function, or keep to a few.""")
another_way = says("""507: in this iteration another recording, or none, ran before it than when it was recorded. Each
    order of calls has recordings of its own.""")
busy = says("508: another thread was recording.")
lost = says("""509: a new iteration began while this was recorded: another thread ran, or the function itself calls
    cgt.step(). Call it outside.""")
mode_inside = says("""511: a dispatch mode is active at {line}. It watches operations, and a replay runs none. Put the
    mode around the call.""")
disabled = says("512: CGT_DISABLE=1 is set: jitted functions run as plain ones.")
never_replayed = says("""513: none of {calls} calls of {name} was replayed. Mostly: {reason} (cgt.explain({short}) tells
    the rest; this is said once for each function.)""")
not_replayed = says("514: {name} is not replayed, as cgt.require_replay() demands: {reason}")
strict = says("515: {name} is not replayed, as CGT_STRICT=1 demands: {reason}")
nothing_jitted = says("""516: {script} jits nothing: mark a function with @cgt.jit, or ask cgt.doctor(f, *args) about
    one.""")
left = says("""517: the call ends with {kind} (raised at {line}). Return early instead, or raise outside, depending on
    what is returned.""")
grows = says("""518: {path} gets a tensor of another shape at each call. Keep one of full size, and write into it
    (cache[:, t] = k).""")
looked_at = says("519: CGT_NAN=1 is set: calls run eagerly, and what each operation leaves is looked at.")

# 6: parts that run otherwise
op_apart = says("""601: {op} at {line} cannot be captured. From now on it runs between two graphs, unless it draws
    random numbers, writes to an argument, is not PyTorch's own, runs in a backward, or comes behind a write to
    something from outside. Then call it first, or outside.""")
island_differs = says("""603: what the eager parts of {name} returned or changed was something else when the call was
    recorded, so the rest ran eagerly. Let them return tensors of the same shapes, and nothing on which Python
    decides.""")
island_unsafe = says("""604: an eager part (cgt.eager) of {name} wrote to a tensor from outside, or changed a list, dict
    or gradient that {name} can read, and the rest of the call could not be replayed ({why}) The part cannot run again.
    Let it return what it finds.""")
higher_order_op = says("""605: {op} at {line} is a higher-order operation, whose inner operations cgt does not see. Call
    it outside the jitted function, or (on the GPU) inside torch.compile.""")
fork_in_backward = says("""606: torch's {name} at {line} runs in a backward. Call it in the forward, or outside the
    jitted function.""")
fork_with_grad = says("""607: torch's {name} at {line} works on tensors that require grad, and PyTorch computes its
    backward in its own way. Put it under torch.no_grad(), or choose with `if` on a tensor, or with torch.where.""")
fork_raised = says("""608: a body of torch's cond or while_loop raised while it was recorded ({line}; {what}). Each body
    is run once for that, with the operands of the call, so none of them may raise.""")
fork_result = says("""609: torch's {name} at {line} {what}. Return new tensors from each body, of the same kind; pass
    and return clones.""")
body_writes = says("""610: {op} at {line}, in a body of torch's cond or while_loop, writes a tensor that the body did
    not make. Return the new value instead.""")
body_acts = says("""611: {op} at {line}, in a body of torch's cond or while_loop, may do more than compute. Call it
    outside of the body.""")
body_draws = says("""612: {op} at {line}, in a body of torch's cond or while_loop, draws random numbers where a replay
    cannot know how many. Draw them before, and pass them to the body; on the host, from the default generator.""")
compiles = says("""613: torch.compile compiled while {line} was being recorded. The compiled code is recorded later. To
    avoid this, call the function once with such arguments outside.""")
compiled_on_host = says("""614: code of torch.compile uses the CPU at {line}, in kernels that PyTorch's dispatcher does
    not see, and no replay could repeat them. Use torch.compile or cgt.jit, not both; with GPU tensors alone both work
    together.""")
compiled_with_state = says("""615: code of torch.compile at {line} brings CUDA graphs or random states of its own. Leave
    out mode="reduce-overhead", and recompute no dropout in its backward.""")
hidden_kernels = says("""616: kernels that PyTorch does not show as operations (TorchScript fuses some) ran while
    arguments were copied, and may have read the originals. From now on nothing is copied. Pass tensors that stay in
    place.""")

# 7: devices and the driver
beside = says("""701: {line} reads memory outside of an argument that moves (its _base, or past its end). Pass the whole
    tensor as an argument.""")
other_device = says("""702: {op} at {line} works on {device}, but the call is recorded on {home}, where its arguments
    are (or the current GPU, if they are on none or on several). Say device= where a tensor is made, or jit what each
    GPU runs.""")
cudnn_dropout = says("""704: a recurrent layer draws its dropout from cuDNN's random state, which starts again at
    this call because the generator was seeded. Seed less often, or give the layer dropout=0 and put torch.nn.Dropout
    between layers.""")
recording_failed = says("705: recording failed[[ after {line}]]: {name}.")
capture_broken = says("""706: another thread called what CUDA forbids during a capture (torch.cuda.synchronize() waits
    for the whole device), which ended this recording. Wait for a stream or an event there, or call each function twice
    before.""")
replay_failed = says("""707: replaying {name} failed at the driver's {call} call: {why}. Nothing was launched.
    cgt.reset({name}) drops its recordings.""")
overdue = says("""708: replays on cuda:{device} that exchange data with other processes have not ended within
    {seconds:.0f} s, the timeout of their group. A rank is gone, or is at another call. This process ends, as it does by
    NCCL's watchdog where a collective ran eagerly; python -X faulthandler tells where its threads were.
    TORCH_NCCL_ASYNC_ERROR_HANDLING=0 turns off both.""")
spread_graph = says("""709: {op} at {line} works on {device}, in a call that is recorded on {home}, and a backward
    outside of the call is to go through it. Jit the whole step, backward included, or what each GPU runs.""")
spread_draws = says("""710: {op} at {line} draws on {device} from a generator of the program's own or cuDNN's random
    state, but the call is recorded on {home}. Draw there from the default generator, or jit what each GPU runs.""")
no_checkpoints = says("""711: memory comes from the allocator {backend}, which cannot be put back to where a recording
    began. Use PyTorch's own: no backend:cudaMallocAsync in PYTORCH_CUDA_ALLOC_CONF, and no change_current_allocator
    (RMM's, or another one). For some tensors alone, use torch.cuda.MemPool.""")

# 8: arguments of cgt's functions
not_a_function = says("801: cgt.jit takes a function or an nn.Module, not {what}.")
no_generator_function = says("""802: {name} is {kind}: its body runs after the call, so there is nothing to record. Jit
    the function that works on tensors.""")
bad_option = says("803: cgt.jit({name}={value!r}): expected {allowed}.")
bad_switch = says("804: {name}={value}: expected {expected}.")
not_jitted = says("805: {what!r} was not made by cgt.jit.")
no_drawing = says("806: cgt.show draws into a file whose name ends in .html, .dot or .svg, not {path}.")
no_tap = says("807: cgt.tap() takes a name and a tensor, not a {name} and a {t}.")
tapped_inside = says("""808: cgt.tapped() is for outside of jitted functions, since a replay would not look again. Pass
    the tensor to the function.""")
called_otherwise = says("""809: {name} has a __call__ that does not come to nn.Module's, in which a jitted module
    replays. Jit what that calls: module.forward = cgt.jit(module.forward).""")

# 9: installing
other_torch = says("""901: cgt {version} cannot be loaded with torch {now} ({why}). Its core belongs to the torch that
    it was built against. Build it again, in its sources: pip install --no-build-isolation --force-reinstall --no-deps .
    (or make ext).""")


# --- parts of other sentences, and what who watches is told: these have no code -----------------------

other_op = phrase("The first operation that differs: {now}, recorded as {recorded}.")
told_miss = phrase("{name} runs eagerly: {reason}")
told_rescue = phrase("""a result of {name} ({size} B, made at {line}) is still held where a replay is about to overwrite
    it: moved""")
told_evict = phrase("the recording that ran longest ago goes, to make room for one of {name}: there are {count}")


# --- sentences that are put together ---------------------------------------------------------------


# Why a call is not run once more for its gradients.
IS_GONE = "one of its arguments is gone, or a tensor that it read was modified since"
IS_FREED = "its recording was freed meanwhile"
IS_BUSY = "a recording is being made meanwhile"
HAS_HOOKS = "a hook on a tensor to which its gradients flow would be called twice"
DOES_MORE = "it does more than to return results, draws random numbers, reads a value, or follows a number"
READS_OTHERS = "it would not do the same now: what it reads is not what it was"
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
    "shared": "takes tensors that share memory, of which it would have a copy each. Pass one of them, or clone()",
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


@code(225)
def audit(name: str, unguarded: list[str], told: str, other: str) -> str:
    reads = f" It can read what is not guarded: {' '.join(unguarded)} If it changes, pass it as an argument."
    advice = reads if unguarded else " Report this: it is a defect of cgt, or code that it cannot see changes memory."
    return (
        f"audit of {name}: a replay was not what eager is: {told}. Eager's values stand, and the recording is"
        f" dropped.{other}{advice}"
    )


pad_differs = says("""236: {name} is no longer padded (jit(pad=)): with arguments that are filled up, {what}. Pad
dimensions whose entries do not depend on each other, or that a mask argument masks, of functions that only return
results.""")

UNAUDITED = {  # why a replay is not compared with eager, for explain()
    "exchange": "it exchanges data with other processes, which would wait for a second run.",
    "threads": (
        "it changes more than its results, or lets go of memory, and several threads call jitted functions: what one of"
        " them does meanwhile would be undone."
    ),
    "donated": "it writes into what its forward saved, as compiled code does with memory that it was given.",
    "memory": "there is no room for a second copy of what it writes, or for eager's run beside the recording.",
}


@code(703)
def collective(op: str, line: str, waits: bool = False) -> str:
    what = (
        "has the host wait for other processes"
        if waits
        else "exchanges data with other processes, which no recording on the CPU does, nor cgt without its folder ranks"
    )
    return f"{op} at {line} {what}. Call it outside the jitted function."


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


def told_record(name: str, kind: str, seconds: float, why: str) -> str:
    done = f"{name}: {kind}ed in {seconds * 1e3:.1f} ms"
    return done if why == unrecorded() else f"{done}: {why}"


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


@code(201)
def arguments_changed(path: str, then: object = None, now: object = None) -> str:
    told = f" (recorded with {then}, called with {now})" if then != now else ""
    return (
        f"{path}{told} has another shape, dtype or value at each call. Keep to a few shapes and values (a number that "
        "changes: pass it as a tensor)."
    )
