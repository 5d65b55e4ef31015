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
host_read = says("""101: {op} at {line} needs a value on the host in the middle of the call. Read only the outcome of a
    comparison there (if x.sum() > 0), or a number that item() gives and that goes into ops alone; or use torch.where,
    or return the number or the tensor and look at it outside.""")
dynamic_shape = says("""102: {op} at {line} makes a tensor whose shape depends on data. Use a mask with torch.where, a
    fixed size, or an index (x[x > 0]): a mask can be read.""")
reads_too_much = says("103: the function reads too many values on the way, up to {line}. Read fewer, or outside.")
another_value = says("104: the function read a value at {lines} for which there is no recording yet.")
varying_values = says("""105: the values that the function reads at {lines} have not come before, and a recording is for
    one of them alone. Read what has few (mask.all()), or return the tensor and read it outside.""")
read_with_grads = says("""106: a value is read at {line} while gradients of an earlier backward are there, which the
    function then replaces. Call zero_grad() before.""")
read_behind = says("""107: {op} at {line} reads values where no replay could repeat it. Keep tensors (torch.stack
    instead of torch.tensor of tensors), give lengths as numbers, or compute it outside.""")
memory_read = says("""108: Tensor.{name} at {line} hands out a tensor's memory behind PyTorch's back. Call it outside
    the jitted function, on the result.""")
number_on_host = says("""109: {path} is a tensor on the CPU, of one number, which is another one at each call. Pass the
    number as Python has it (one recording serves all its values), or in a tensor on the GPU.""")
number_decides = says("""110: {path} is looked at by more than ops ({line}): each number there is recorded by itself.
    Pass it as a tensor, or compute with it only.""")
number_raised = says("111: with a stand-in for a number the function raised {text}: each number is recorded by itself.")
number_kept = says("""112: something that is computed from {path}, a number that changes from call to call, outlives the
    call. Pass it as a tensor.""")
number_saved = says("113: a backward outside of the function, compiled code or another thread may look at it")
number_type = says("""114: the function asks for an exact type with type(x), calls a method such as __le__ by its name,
    catches TypeError, or adds floats with sum(), at {line}: there a number that changes is recorded by itself.
    isinstance(), operators, and a test in place of `try` would not keep it from that.""")
stores_number = says("115: the function changes the number in {path}, which it reads: computed from the next call on.")
reads_counter = says("""116: the function counts in {path}, a tensor on the CPU, or asks for its number: from the next
    call on it is computed at each.""")
counter_used = says("""117: {what} at {line} uses {path}, a tensor on the CPU in which the call counted before: from the
    next call on an ordinary one.""")
counters_join = says("""118: the function counts in further tensors on the CPU at {line}, along with those that were
    known: from the next call on all are.""")
counters_part = says("""119: {path} and {other} held the same number when this was recorded, and do not any more:
    recorded anew.""")
waits = says("120: each call waits for a value that is read at {line}; each that comes again has a recording.")

# 2: tensors and their memory
moved = says("""202: {path} lies elsewhere than when it was recorded[[ ({then:#x} then, {now:#x} now)]], and a
    recording cannot be told where: it is written and shares memory, needs gradients or is very large; no argument; a
    view of another one; or inputs='pinned'. Reuse the tensor (copy_ into it).""")
misaligned = says("""203: {path} begins at another remainder of 512 bytes (64 on the CPU) at each call, a slice of a
    larger tensor say, and kernels may differ by that. Pass a clone() of it.""")
other_tensor = says("""204: {path} is now and then the very tensor that is also another argument, in a variable or a
    .grad that the function reads. Pass such a tensor once, or always.""")
still_held = says("""205: the result made at {line} had been dropped when this call was recorded and is still held now.
    Drop it as early as then, or hold it at each iteration.""")
changed_arguments = says("206: the function changes {path}. Return the new value instead.")
kept_argument = says("""207: something keeps {path}, or a view of it, beyond the call (an attribute, a hook, a custom
    autograd.Function or a checkpoint's function closes over it). Return it, use ctx.save_for_backward, or pass it
    through the checkpoint's arguments.""")
strange_output = says("""208: {path} is a {kind}, which cgt cannot rebuild at a replay. Return tensors in tuples, lists,
    dicts or dataclasses, or register the type with torch.utils._pytree.""")
unknown_output = says("209: {path} is a tensor that cgt did not see being made. Make it with PyTorch ops.")
host_output = says("210: {path} is a CPU tensor made in a function on the GPU. Return a GPU tensor.")
kept_tensor = says("211: a tensor made at {line} outlives the call{held_by}. Return it, or copy_ into an older tensor.")
replaces_memory = says("212: {op} at {line} replaces the memory of a tensor. Make a new tensor, or copy_ into the old.")
absolute = says("213: {op} at {line} counts from the start of an argument's memory, which moves. Use slices and views.")
changes_shape = says("214: {op} at {line} changes an outer tensor's shape in place. Use the form without underscore.")
layout = says("215: {op} at {line} works on {kind}. Use a plain, dense tensor.")
odd_tensor = says("""216: {path} is {kind}. Use a plain, dense tensor, or leave this part outside of the jitted
    function.""")
subclass = says("217: {path} is a {kind}, a tensor subclass. Pass plain tensors.")
replaced = says("""218: {path} gets other memory in the function (.data = ..., swap_tensors). Write its values in place:
    copy_() under torch.no_grad().""")
cpu_tensor = says("""219: {op} at {line} computes with a CPU tensor of shape {shape} in a function on the GPU. Move it
    to the GPU first; x.to(device) may stand in the function.""")
cpu_state = says("""220: {op} at {line} changes or draws a CPU tensor in a function on the GPU. Keep that state on the
    GPU (optimizers: capturable=True).""")
odd_op = says("221: {op} at {line} returns new tensors and views at once. Mark the place eager.")
untaped_op = says("222: {op} at {line} cannot be put on the host driver's tape ({why}).")
unknown_effect = says("""223: {op} at {line} returns nothing new and does not say what it writes. Declare it
    (mutates_args of torch.library.custom_op), or call it outside the jitted function.""")
poisoned = says("""224: this output of a jitted function (made at {made}) was overwritten when {ended} began a new
    iteration, because outputs="error". Clone it, or use outputs="rescue".""")
verified = says("""226: {name} was told where {paths} lies now ({ops}), and its replay is not what eager is: {told}.
    Eager's values stand; from now on it is copied.{other} Report this: it is a defect of cgt, or code that it cannot
    see keeps the address.""")
not_finite = says("227: {name} made the first {what} in {op} at {line}: what this op was given had none.")
not_compared = says("228: {path} {what}, and cgt cannot compare it from call to call. {instead}")
shared_and_written = says("""229: {line} writes an argument that shares memory with another one, for the first time.
    From the next recording on both are where they are: pass tensors that stay in place, or the whole tensor, and take
    the parts inside.""")
no_way_back = says("""230: {path} is written, is large or has gaps, and lies elsewhere at each call: a recording of this
    call cannot be told where (it reads values, has parts that run eagerly, or an op hides it), and no copy can stand
    for it. From now on it must stay: reuse it (copy_ into it).""")
copied_and_written = says("""231: {path} is a result of the path, of which this recording has a copy, and written for
    the first time. The next one has none.""")
wrapped_graph = says("""232: the backward goes through {path}, a {kind}, and would come behind the call. Jit the whole
    step, backward and all.""")
gathered = says("""233: {path} was gathered by an earlier forward and is not sharded yet, so this backward runs as it
    is. Call reshard() on the module behind a forward that has none.""")
unknown_sharding = says("""234: {path} was spread by fully_shard, and cgt does not know what that keeps beside it, in
    this release of torch or without its folder ranks.""")
array_written = says("""235: {op} at {line} writes to an array of which the function made a tensor (torch.from_numpy): a
    replay would not. Make the tensor outside, or copy the array (torch.tensor).""")

# 3: what Python keeps
impure = says("""301: {name}() at {line} gives another value at each call, and a replay would repeat the recorded one.
    Call it outside the jitted function and pass what it gives as a tensor.""")
outside_draw = says("""302: the function draws from {path}, and a replay would repeat the recorded numbers. Draw with
    torch (torch.rand, torch.randint), or draw outside and pass the numbers as a tensor.""")
advanced = says("""303: {path} is an iterator or a file from which the function takes what comes next, or which cannot
    be asked whether it does; a replay would not. Call next() or read outside, and pass what comes as a tensor.""")
reseeded = says("""304: the state of a random generator was set inside the function (seen at {line}); a replay would not
    set it again. Seed, fork and checkpoint outside the jitted function.""")
changed_state = says("""305: {path} is changed by the function[[ (at {line})]], which a replay would not do. Change it
    outside, keep it in a tensor and write that in place, or only count in it (self.calls += 1): that replays if nothing
    else in the call reads it.""")
used_elsewhere = says("""306: {path} is stored by the function while another thread[[ ({threads})]], or code that ran
    for the first time, has to do with that name. Let one thread at a time do so, or return the value and store it
    outside.""")
place_changed = says("307: {path} changes from call to call. Pass it as a tensor, or keep it constant.")
follows = says("""308: the function puts another tensor or object into {path}, which it reads: followed from the next
    call on.""")
asks_which = says("""309: the function asks which tensor lies in {path}, by its hash or id; or it calls an eager part
    (cgt.eager), which could replace it; or comes to tensors through what is not looked into (a set, a deque). From the
    next call on each one is recorded.""")
drawn_in_vain = says("""310: {name} was being recorded, which came to nothing ({why}) The recording took something from
    an iterator or a file that cannot be put back, so the call cannot run again. Call next() or read outside, and pass
    what comes as a tensor.""")
new_generator = says("""311: the function draws from a torch.Generator that it makes itself. Make it outside, and reach
    it by argument or closure.""")
imports = says("312: the call imported {file}, and so ran code that others do not: recorded when one imports nothing.")
new_code = says("313: code ran for the first time ({name} at {line}); what it reads is guarded from the next call on.")
hidden_code = says("""314: a profiler, or a thread that the function started, hides which code ran, and so what it read.
    Record without the profiler, and start threads outside.""")
too_many_places = says("""315: the function's code can read too much to guard it all, and torch.compile hides which part
    of it ran. Jit a smaller function.""")
scripted = says("""316: {path} is a module of TorchScript (torch.jit.script, trace, load), whose mode, parameters and
    attributes no guard can see. Use the module that it was made from.""")
row_written = says("""317: what a number chose from is written past it, at {line}, or the row that it chose: each such
    number is recorded by itself.""")
row_kept = says("""318: a row that a number chose from a tensor outlives the call, to which it is a view of that tensor:
    each such number is recorded by itself.""")
parallel_module = says("""319: {name}'s forward at {line} prepares the exchange of gradients that its backward will
    do[[ ({why})]]. Jit what it wraps: cgt.jit(module).""")
early_bound = says("""320: {path} reads a tensor's memory and was looked up before cgt could watch it. Look it up where
    it is called: x.tolist(), torch.utils.dlpack.to_dlpack(x).""")
parallel_settles = says("322: {name} takes times in its first iterations, which no replay could: recorded after them.")
op_elsewhere = says("""323: {op} ran in another thread, to which the function may have given work (a pool, a queue,
    nn.DataParallel): no recording has it. Work on tensors in the function's own thread, or jit what that runs.""")
unseen_kernel = says("""324: no op wrote the memory that was made empty at {line}, and it is used: a kernel that PyTorch
    shows to nobody may fill it.""")
swapped = says("""325: torch.utils.swap_tensors was called at {line}: what a recording reads would be another tensor
    from then on. Swap them outside, or copy_().""")
casts_inside = says("""326: {op} at {line} runs other ops, which autocast changes: a recording on the CPU has it alone.
    Call it outside of autocast.""")

# 4: gradients and optimizers
odd_root = says("401: {path} requires grad and shares memory with an argument or another such result. Return a clone.")
made_leaf = says("402: {path} is a leaf that the function makes and that requires grad. Make it outside, or detach it.")
outer_graph = says("""403: gradients would flow ({line}) to something that cgt cannot follow: a graph made before the
    call, or a leaf made in it (x.detach().requires_grad_()). Pass such tensors as arguments, or detach results.""")
written_root = says("404: {path} requires grad and is written in place. Return the new value instead.")
first_gradient = says("405: the result requires grad for the first time: from the next call on it is recorded so.")
backward_reads = says("""406: the backward of this function, at {line}, reads a tensor that autograd did not save (a
    hook, a custom autograd.Function or a checkpoint holds it). Use ctx.save_for_backward, or pass it through the
    checkpoint's arguments.""")
stale_backward = says("407: this backward belongs to a replayed call, and {why}")
not_run_again = says("""408: a backward through a replayed call of {name} asked for create_graph=True or for batched
    gradients (vmap, is_grads_batched). cgt runs the call once more for that, as a checkpoint does, but {why}. Call
    {name}.__wrapped__ (a module's forward()) there; further calls of {name} with gradients run eagerly.""")
refused_backward = says("409: a backward through it asked for create_graph=True or for batched gradients, and {why}")
transforms = says("""411: {line} differentiates with torch.func, which does not work where a later backward's needs are
    watched. Return a result that does not require grad, or jit the whole step with its backward().""")
late_read = says("""412: the backward pass read a saved tensor again after it had let go of it; it is recorded anew with
    everything kept""")
modified = says("""413: one of the variables needed for gradient computation has been modified by an inplace operation:
    a tensor of shape {shape} that was saved for the backward[[, is at version {now}; expected version {then}
    instead]].""")
saved_changed = says("""414: a tensor that the forward saved was modified in place before the backward. Modify it after
    backward(), or a clone.""")
foreign_grad = says("415: {path}.grad is set to a tensor from outside. Assign it outside the jitted function.")
hooked_leaf = says("""416: the function can run a backward to {path}, on whose accumulator of gradients somebody put a
    hook (DistributedDataParallel does). Call backward() outside the jitted function.""")
forward_mode = says("""417: the call differentiates in forward mode ({line}), whose tangents no recording knows. Use
    reverse mode (vjp, jacrev, vmap of grad), or leave this part outside.""")
optimizer_option = says("""418: {name}.step at {line} keeps numbers on the host that change at each step. Make the
    optimizer with {option}.""")
optimizer_outside = says("""419: {name}.step at {line} needs numbers on the host, and no option of {name} changes that.
    Call it outside the jitted function.""")
scaler_option = says("""420: GradScaler.step at {line} needs to know on the host whether to skip the step of {name}.
    Make the optimizer with {option}: then it decides on the device.""")
scaler_outside = says("""421: GradScaler.step at {line} needs to know on the host whether to skip the step of {name}.
    Call the scaler's step and update outside the jitted function.""")

# 5: whether a call is recorded
unrecorded = says("501: such a call was not recorded yet. Call it outside first, until cgt.stats tells of replays.")
limit = says("502: recorded {n} times already (max_records); {why}")
new_kind = says("""504: the first call with such arguments: [[{path} is another one at each call: keep it to a few
    values, or pass it by itself as a float, an int or a tensor; ]]recorded when one comes that is like it.""")
timed = says("505: timed as it is: a recording was not replayed yet, and another one must pay.")
does_not_pay = says("""503: recordings do not pay so far: with the next one they take {spent:.1f} ms, an eager call
    {eager:.0f} µs, and few would be replayed; {why} Tried again after {calls} calls, or when calls stay alike.""")
another_mode = says("""506: a mode of torch (gradients, autocast, inference, deterministic algorithms, the default
    dtype) is another one than when it was recorded. Enter it inside the jitted function, or keep to a few.""")
another_way = says("""507: what ran before it in this iteration is another recording, or none, than when it was
    recorded: each way through the program has its own, which goes with that.""")
busy = says("508: another thread was recording.")
lost = says("""509: the iteration went on while this was recorded: another thread ran, or the function itself calls
    cgt.step(). Call it outside.""")
mode_inside = says("""511: a dispatch mode is active at {line}: it sees the ops that run, and a replay runs none. Put
    the mode around the call.""")
disabled = says("512: CGT_DISABLE=1: jitted functions are plain ones.")
never_replayed = says("""513: none of {calls} calls of {name} was replayed. Mostly: {reason} (cgt.explain({short}) tells
    the rest; this is said once for each function.)""")
not_replayed = says("514: {name} is not replayed, as cgt.require_replay() demands: {reason}")
strict = says("515: {name} is not replayed, as CGT_STRICT=1 demands: {reason}")
nothing_jitted = says("""516: {script} jits nothing: mark a function with @cgt.jit, or ask cgt.doctor(f, *args) about
    one.""")
left = says("""517: the call is left by {kind} (raised at {line}). Return early instead, or raise outside, by what is
    returned.""")
grows = says("""518: {path} gets a tensor of another shape at each call. Keep one of full size, and write into it
    (cache[:, t] = k).""")
looked_at = says("519: CGT_NAN=1: what each op leaves is looked at, in calls that run eagerly.")

# 6: parts that run otherwise
op_apart = says("""601: {op} at {line} cannot be captured. It runs between two graphs from now on; but not if it draws,
    writes to an argument or is not PyTorch's own, nor in a backward or behind writes to anything from outside. There
    call it first, or outside.""")
island_differs = says("""603: what the eager parts of {name} returned, or changed, was not what it was when the call was
    recorded: the rest ran eagerly. Let them return tensors of the same shapes, and nothing that Python goes by.""")
island_unsafe = says("""604: an eager part (cgt.eager) of {name} wrote to a tensor from outside, or changed a list, dict
    or gradient that {name} can read, and the rest of the call could not be replayed ({why}) It cannot run again. Let
    the part return what it finds.""")
higher_order_op = says("""605: {op} at {line} is a higher-order op, whose inner ops cgt does not see. Call it outside
    the jitted function, or (on the GPU) inside torch.compile.""")
fork_in_backward = says("""606: torch's {name} at {line} runs in a backward. Call it in the forward, or outside the
    jitted function.""")
fork_with_grad = says("""607: torch's {name} at {line} works on tensors that require grad, and its backward is PyTorch's
    own. Put it under torch.no_grad(), or choose with `if` on a tensor, or with torch.where.""")
fork_raised = says("""608: a body of torch's cond or while_loop raised while it was recorded ({line}; {what}). Each body
    is run once for that, with the operands of the call: it must not raise for any.""")
fork_result = says("""609: torch's {name} at {line} {what}. Return new tensors from each body, of the same kind; pass
    and return clones.""")
body_writes = says("""610: {op} at {line}, in a body of torch's cond or while_loop, writes a tensor that the body did
    not make. Return the new value instead.""")
body_acts = says("""611: {op} at {line}, in a body of torch's cond or while_loop, may do more than compute. Call it
    outside of the body.""")
body_draws = says("""612: {op} at {line}, in a body of torch's cond or while_loop, draws random numbers where a replay
    cannot know how many. Draw them before, and pass them to the body; on the host, from the default generator.""")
compiles = says("""613: torch.compile compiled while {line} was being recorded. The compiled code is recorded later; to
    avoid it, call the function once with such arguments outside.""")
compiled_on_host = says("""614: code of torch.compile uses the CPU at {line}, in kernels that PyTorch's dispatcher does
    not see and no replay could repeat. Compile or jit, not both; with GPU tensors alone both work together.""")
compiled_with_state = says("""615: code of torch.compile at {line} brings CUDA graphs or random states of its own. Leave
    out mode="reduce-overhead", and recompute no dropout in its backward.""")
hidden_kernels = says("""616: kernels that no op shows (TorchScript fuses some) ran while arguments were copied, and may
    have read the originals. From now on none is copied: pass tensors that stay in place.""")

# 7: devices and the driver
beside = says("""701: {line} reads memory around an argument that moves (its _base, or past its end). Pass the whole
    tensor as an argument.""")
other_device = says("""702: {op} at {line} works on {device}, and the call is recorded on {home}, where its arguments
    lie (the current GPU, if on none or several). Say device= where a tensor is made; jit what each GPU runs.""")
cudnn_dropout = says("""704: a recurrent layer draws its dropout from a random state of cuDNN's, which begins anew at
    this call, since the generator's seed was set. Seed less often, or give the layer dropout=0 and put torch.nn.Dropout
    between layers.""")
recording_failed = says("705: recording failed[[ after {line}]]: {name}.")
capture_broken = says("""706: another thread called what the driver forbids while a capture is under way
    (torch.cuda.synchronize() waits for the whole device), which ended this recording. Wait for a stream or an event
    there, or call each function twice before.""")
replay_failed = says("""707: replaying {name} failed at the driver's {call} call: {why}. Nothing was launched;
    cgt.reset({name}) drops its recordings.""")
overdue = says("""708: replays on cuda:{device} that exchange data with other processes have not ended within
    {seconds:.0f} s, the timeout of their group, and what they usually take: a rank is gone, or is at another call. This
    process ends, as it does by NCCL's watchdog where a collective ran eagerly; python -X faulthandler tells where its
    threads were. TORCH_NCCL_ASYNC_ERROR_HANDLING=0 turns off both.""")
spread_graph = says("""709: {op} at {line} works on {device}, in a call that is recorded on {home}, and a backward
    outside of the call is to go through it. Jit the whole step, backward inside, or what each GPU runs.""")
spread_draws = says("""710: {op} at {line} draws on {device} from a generator of the program's own or a random state of
    cuDNN's, and the call is recorded on {home}. Draw there from the default generator, or jit what each GPU runs.""")
no_checkpoints = says("""711: memory comes from the allocator {backend}, which cannot be put back to where a recording
    began. Use PyTorch's own: no backend:cudaMallocAsync in PYTORCH_CUDA_ALLOC_CONF, no change_current_allocator (RMM's,
    or another one); for some tensors alone, torch.cuda.MemPool.""")

# 8: arguments of cgt's functions
not_a_function = says("801: cgt.jit takes a function or an nn.Module, not {what}.")
no_generator_function = says("""802: {name} is {kind}: its body runs after the call, so there is nothing to record. Jit
    the function that does the tensor work.""")
bad_option = says("803: cgt.jit({name}={value!r}): expected {allowed}.")
bad_switch = says("804: {name}={value}: expected {expected}.")
not_jitted = says("805: {what!r} was not made by cgt.jit.")
no_drawing = says("806: cgt.show draws into a file whose name ends in .html or .dot, not {path}.")
no_tap = says("807: cgt.tap() takes a name and a tensor, not a {name} and a {t}.")
tapped_inside = says("""808: cgt.tapped() is for outside of jitted functions: a replay would not look again. Pass the
    tensor to the function.""")
called_otherwise = says("""809: {name} has a __call__ that does not come to nn.Module's, in which a jitted module
    replays. Jit what that calls: module.forward = cgt.jit(module.forward).""")

# 9: installing
other_torch = says("""901: cgt {version} cannot be loaded with torch {now} ({why}). Its core belongs to the torch that
    it was built against: build it again with this one, pip install --no-build-isolation --force-reinstall --no-deps cgt
    (or make ext, where its sources are).""")


# --- parts of other sentences, and what who watches is told: these have no code -----------------------

other_op = phrase("The first op that is another one: {now}, recorded as {recorded}.")
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
        else "exchanges data with other processes, as no tape of the host's does, nor cgt without its folder ranks"
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
