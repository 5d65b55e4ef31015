"""torch.cond and while_loop in a jitted function: *forks*, ops with bodies, of which a replay runs what the predicate
says.

Both are plain functions to cgt: a tap hands their calls over before Dynamo compiles the bodies. A recording runs each
body once, for what it consists of; on the host the op then runs from the tape, as at any replay. In a capture a body is
a graph inside of a conditional node, captured on a stream of its own. So a body must be what PyTorch wants it to be: a
function of its operands and of what else it reads, which makes its results, writes nothing else and leaves nothing
behind. One that is not is left before it did harm, and the call is PyTorch's own."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import cgt_core as core
import torch
from cgt_core import BRANCH, CUDA, HOST, LOOP
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ..data import Seen
from ..run import constants
from ..run.devices import name_of, on_stream
from ..run.observe import Unrecordable, collect, is_capture, refuse, tensors_in, unseen, user_line
from ..run.tokens import see_draw
from ..words import errors, options
from ..words.private import FakeTensorMode

NO_TENSORS = "has a body that returns something else than tensors"
NOT_ITS_OWN = "has a body that returns a tensor it did not make, or the same memory twice"
STREAMS = {}  # (device, how deep) -> the stream on which bodies there are captured; of depth -1 what is around them


def prepare(device: int, stream: torch.cuda.Stream) -> None:
    """What a capture on this stream cannot do."""
    STREAMS[device, -1] = stream
    core.load_decide_kernel(device)


def see_fork(seen: Seen, name: str, args: tuple, plain: Callable[[], object]) -> object:
    """A call of torch.cond or while_loop, as PyTorch has checked it; plain() compiles and runs it."""
    if seen.cuts.imagined:  # in a body without memory: all are told of
        return [args[k](*args[3]) for k in (1, 2)][0] if name == "cond" else args[1](*args[2], *args[3])
    if seen.reason is not None or seen.inside:
        return plain()
    states = states_of(seen)
    try:
        vet_call(seen, name, tensors_in(args, []))
        return (branch if name == "cond" else loop)(seen, *args)
    except Unrecordable:
        if is_capture(seen) or seen.cuts.bodies:
            raise
        put_back(seen, states)
        return plain()


def vet_call(seen, name, operands):
    if seen.run.graph is not None or core.is_in_node():
        leave(seen, errors.fork_in_backward(name, user_line(seen)))
    # Two could run at once, in one memory.
    if is_capture(seen) and torch.cuda.current_stream(seen.run.device) not in STREAMS.values():
        leave_call(seen, name, "runs on a stream of the function's own")
    if seen.run.others:
        leave(seen, errors.other_device(name, user_line(seen), name_of(seen.run.others[0]), name_of(seen.run.device)))
    if torch.is_grad_enabled() and any(t.requires_grad for t in operands):
        leave(seen, errors.fork_with_grad(name, user_line(seen)))


def leave(seen, sentence):
    """Refuse, and leave whatever is under way."""
    refuse(seen, sentence)
    raise Unrecordable(sentence)


def leave_call(seen, name, what):
    """The same of a call that is not what a fork must be."""
    leave(seen, errors.fork_result(name, user_line(seen), what))


# --- the two forks --------------------------------------------------------------------------------


def branch(seen, pred, true_fn, false_fn, operands):
    """torch.cond: one of two bodies runs."""
    line = user_line(seen)
    vet_device(seen, "cond", [pred, *tree_flatten(operands)[0]])
    if pred.dtype != torch.bool or pred.dim():
        pred = (pred != 0).reshape(())
    elif core.storage_id(pred) not in seen.made:
        pred = pred.clone()  # it may move
    sides = [functools.partial(run_body, seen, "cond", fn, operands) for fn in (true_fn, false_fn)]
    if not seen.run.recording:
        chosen = truth(seen, pred)
        if seen.run.driver == HOST:
            other = given_back(seen, sides[chosen])
        else:
            other = imagined(seen, false_fn if chosen else true_fn, operands)
        mine = sides[not chosen]()
        vet_alike(seen, "cond", mine, other)
        return tree_unflatten(*mine)
    outs, first = [], []

    def body(side, condition):
        leaves, program = side()
        if not first:
            first.append((leaves, program))
            outs.extend(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in leaves)
        vet_alike(seen, "cond", first[0], (leaves, program))
        fill(seen, outs, leaves)

    record(seen, BRANCH, pred, [functools.partial(body, side) for side in sides], ())
    constants.forget(seen, outs)
    seen.cuts.forks.append(f"torch.cond at {line}")
    return tree_unflatten(outs, first[0][1])


def loop(seen, cond_fn, body_fn, carried, more):
    """while_loop: a body runs as long as the predicate holds, with what it returned last."""
    line = user_line(seen)
    carried = (*carried, *more)
    for t in carried:
        if not isinstance(t, torch.Tensor):
            leave_call(seen, "while_loop", f"carries {t!r}, which is no tensor")
    vet_aligned(seen, "while_loop", carried)
    vet_device(seen, "while_loop", carried)
    holds = functools.partial(predicate, seen, cond_fn)
    step = functools.partial(run_body, seen, "while_loop", body_fn)
    if not seen.run.recording:
        return warm_loop(seen, holds, step, carried)
    carries = [t.clone() for t in carried]
    constants.forget(seen, carries)
    pred, programs = holds(carries), []
    constants.forget(seen, [pred])

    def body(condition):
        leaves, program = step(carries)
        programs.append(program)
        vet_alike(seen, "while_loop", (carried, program), (leaves, program))
        fill(seen, carries, leaves)
        fill(seen, [pred], [holds(carries)])
        core.fork_decide(condition, pred, stream(seen))

    record(seen, LOOP, pred, [body], [*carries, pred])
    seen.cuts.forks.append(f"while_loop at {line}")
    return tree_unflatten(carries, programs[0])


def warm_loop(seen, holds, step, carried):
    """The loop in Python. A body that would not run is run all the same, where that does no harm."""
    now, program = list(carried), None
    while truth(seen, holds(now)):
        leaves, program = step(now)
        vet_alike(seen, "while_loop", (carried, program), (leaves, program))
        now = leaves
    if program is not None:
        return tree_unflatten(now, program)
    now = [t.clone() for t in carried]
    if seen.run.driver == HOST:
        leaves, program = given_back(seen, functools.partial(step, now))
    else:
        leaves, program = imagined(seen, step.args[2], now)
    vet_alike(seen, "while_loop", (carried, program), (leaves, program))
    return tree_unflatten(now, program)


def record(seen, kind, pred, bodies, changed):
    """Record an op of these bodies, body(condition) each. On the host they run here, and the op behind them: what their
    runs changed is put back first."""
    host = seen.run.driver == HOST
    with unseen(seen):
        before = [t.clone() for t in changed] if host else []
    try:
        condition, *rows = core.fork(kind, pred, stream(seen))
    except core.DriverError as error:
        leave(seen, errors.recording_failed(error.args[1], user_line(seen)))
    try:
        for body, row in zip(bodies, rows, strict=False):
            given_back(seen, functools.partial(inside, seen, row, functools.partial(body, condition)))
        with unseen(seen):
            for t, was in zip(changed, before, strict=False):
                t.copy_(was)
        if host:
            attempt(seen, core.fork_run)
            put_back(seen, states_of(seen))  # what it drew is the function's
    except BaseException:
        if host:
            core.fork_drop()
        raise


# --- one body -------------------------------------------------------------------------------------


def stream(seen):
    return torch.cuda.current_stream(seen.run.device).cuda_stream if seen.run.driver == CUDA else 0


def inside(seen, row, body):
    """body(), recorded as this one of the fork."""
    brackets = [] if seen.run.driver == HOST else on_own_stream(seen.run.device, len(seen.cuts.bodies))
    brackets.append((lambda: core.fork_enter(row, stream(seen)), lambda: core.fork_leave(row, stream(seen))))
    with one_body(seen):
        try:
            return core.within(brackets, body)
        except core.DriverError as error:
            leave(seen, errors.recording_failed(error.args[1], user_line(seen)))


def on_own_stream(device, depth):
    """[bracket, ...]: a capture cannot be within another one's stream. And what a body needs of libraries may never
    have been loaded, since no warm-up came by."""
    if (device, depth) not in STREAMS:
        STREAMS[device, depth] = torch.cuda.Stream(device)
    switch = on_stream(STREAMS[device, depth], torch.cuda.current_stream(device))
    relaxed = functools.partial(core.capture_relaxed, True), functools.partial(core.capture_relaxed, depth > 0)
    return [relaxed, switch]


@contextlib.contextmanager
def one_body(seen):
    """A body is under way: the memory that it makes, which the one around it made, too."""
    made = set()
    seen.cuts.bodies.append(made)
    try:
        yield made
    finally:
        seen.cuts.bodies.pop()
        if seen.cuts.bodies:
            seen.cuts.bodies[-1] |= made


def run_body(seen, name, function, operands):
    """(tensors, program) of what function(*operands) returns, if that and what it did is what a replay can do again."""
    with one_body(seen) as made:
        leaves, program = attempt(seen, lambda: tree_flatten(function(*operands)))
        torch.clear_autocast_cache()  # what is in there would be computed nowhere but here
        vet_result(seen, name, leaves, made)
        return leaves, program


def predicate(seen, cond_fn, carries):
    (pred, *rest), _ = run_body(seen, "while_loop", cond_fn, carries)
    if rest or pred.dtype != torch.bool or pred.dim():
        leave_call(seen, "while_loop", "has a predicate that is no single bool")
    return pred


def attempt(seen, body):
    """body(); what it raises is a reason: PyTorch runs it once more, and raises its own."""
    try:
        result = body()
    except Exception as error:
        leave(seen, errors.fork_raised(user_line(seen), f"{type(error).__name__}: {error}".rstrip(".")))
    if seen.reason is not None:  # that was told where no exception could leave
        leave(seen, seen.reason)
    return result


def imagined(seen, function, operands):
    """What run_body would give, of tensors without memory: a kernel not meant for these may end the process."""
    name = "cond or while_loop"
    seen.cuts.imagined.append(threading.get_ident())
    core.pause(1)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = tree_map(mode.from_tensor, operands)
            leaves, program = attempt(seen, lambda: tree_flatten(function(*fakes)))
            inputs = tree_flatten(fakes)[0]
            if not all(isinstance(t, torch.Tensor) for t in leaves):
                leave_call(seen, name, NO_TENSORS)
            own = {core.storage_id(t) for t in leaves}.difference(map(core.storage_id, inputs))
            if len(own) < len(leaves) or any(not t.is_inference() and t._version for t in inputs):
                leave_call(seen, name, NOT_ITS_OWN)
            return leaves, program
    finally:
        core.pause(-1)
        seen.cuts.imagined.pop()


def is_imagined(seen: Seen) -> bool:
    """Does this thread run such a body?"""
    return seen.cuts.imagined[-1:] == [threading.get_ident()]


def given_back(seen, body):
    """body(), for what it consists of: the random numbers that it draws are drawn again."""
    states = states_of(seen)
    try:
        return body()
    finally:
        put_back(seen, states)


def states_of(seen):
    """[(generator, its state)] of those from which a body that runs now may draw."""
    if is_capture(seen):
        return []
    found = [torch.default_generator]
    if seen.run.driver == CUDA:
        found.append(torch.cuda.default_generators[seen.run.device])
    return [(g, g.get_state()) for g in found]


def put_back(seen, states):
    for generator, state in states:
        generator.set_state(state)
        if generator.device.type == "cpu":
            see_draw(seen, generator, after=True)


def truth(seen, pred):
    """What a predicate is now; nobody's read."""
    with unseen(seen):
        return bool(pred)


def fill(seen, targets, sources):
    """Copy these over those, which the fork made."""
    seen.cuts.bodies[-1].update(map(core.storage_id, targets))
    for to, t in zip(targets, sources, strict=True):
        to.copy_(t)


# --- what a body may do ---------------------------------------------------------------------------


def vet_op(seen: Seen, call: Any) -> None:
    """Before an op of a body runs: refuse what cannot be taken back, or would not be done again. `call`: ops.OpCall."""
    op, line = str(call.op), user_line(seen)
    if not seen.cuts.bodies[-1].issuperset(map(core.storage_id, call.written)):
        refuse(seen, errors.body_writes(op, line))
    if call.facts.namespace not in constants.KNOWN:
        refuse(seen, errors.body_acts(op, line))
    if call.facts.draws and (seen.run.driver == CUDA or call.generator is not None):
        refuse(seen, errors.body_draws(op, line))


def note_made(seen: Seen, fresh: Iterable[torch.Tensor]) -> None:
    seen.cuts.bodies[-1].update(map(core.storage_id, fresh))


def vet_result(seen, name, leaves, made):
    """Refuse what is no result of a body's own, and a body that left something behind."""
    ids = [core.storage_id(t) for t in leaves if isinstance(t, torch.Tensor)]
    if len(ids) < len(leaves) or not all(map(core.is_plain, leaves)):
        leave_call(seen, name, NO_TENSORS)
    if len(set(ids)) < len(ids) or not made.issuperset(ids):
        leave_call(seen, name, NOT_ITS_OWN)
    if any(t.requires_grad for t in leaves):
        leave(seen, errors.fork_with_grad(name, user_line(seen)))
    vet_device(seen, name, leaves)
    vet_aligned(seen, name, leaves)
    mine = made.difference(ids)
    held = lambda: any(core.storage_id(t) in mine for t in core.alive(seen.run.returned))  # noqa: E731
    if held() and not is_capture(seen):  # where a finalizer may call the driver
        collect()
    if held():
        leave_call(seen, name, "has a body that keeps a tensor beyond its end")


def vet_device(seen, name, tensors):
    """Refuse tensors that are not where the recording is."""
    if any(t.is_cuda != (seen.run.driver == CUDA) for t in tensors):
        leave_call(seen, name, "works on tensors of the host in a function on the GPU")


def vet_aligned(seen, name, tensors):
    """Where a tensor begins decides how kernels go about it: a carried one, and a result, begin as new memory does."""
    if any(t.numel() and core.address(t) % options.ALIGN[t.device.type] for t in tensors):
        leave_call(seen, name, "works on part of a tensor, which lies askew in memory")


def vet_alike(seen, name, one, other):
    """Refuse (tensors, program) of results that cannot take each other's place."""
    told = [(program, [(t.shape, t.dtype, t.device, t.stride()) for t in tensors]) for tensors, program in (one, other)]
    if told[0] != told[1]:
        leave_call(seen, name, "has results that differ in shape, dtype, strides or structure")
