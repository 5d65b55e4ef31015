"""Why an op keeps its call from being recorded."""

import sys
from collections.abc import Callable
from typing import Any

import cgt_core as core
import torch
from cgt_core import CUDA, HOST

from ..data import Seen
from ..run import constants
from ..run.devices import name_of
from ..run.observe import asks_on, is_capture, is_host_recording, refuse, unseen, user_line
from ..words import errors
from ..words.private import OpOverload, has_threads
from . import advice, fed
from .facts import CASTS_INSIDE, COLLECTIVES, WAITS, OpFacts, is_elsewhere, is_hosts, is_to_host, is_zeros, odd_kind
from .optional import collectives


def vet_generator(seen: Seen, op: OpOverload, generator: torch.Generator, drawn: list[torch.Tensor]) -> None:
    """Refuse a draw on another GPU than that of this generator's words, which kernels of the recording read."""
    rng = seen.generators.words.get(core.generator_id(generator))
    strange = next((t for t in drawn if t.device != rng.words.device), None) if rng is not None else None
    if strange is not None:
        refuse(seen, errors.spread_draws(str(op), user_line(seen), strange.device, name_of(seen.run.device)))


def vet_op(seen: Seen, call: Any) -> None:
    """Refuse what a replay could not repeat. `call`: ops.OpCall."""
    op, facts, inputs, constant, line = call.op, call.facts, call.inputs, call.constant, None
    fed.note(seen, call)
    if call.reads and not constant:
        line = host_reason(seen, errors.host_read, op)
    elif call.dynamic and not constant:
        line = errors.dynamic_shape(str(op), user_line(seen))
    elif facts.packet in CASTS_INSIDE and seen.run.driver == HOST and core.casts_inside():
        line = errors.casts_inside(str(op), user_line(seen))
    elif facts.replaces:
        line = errors.replaces_memory(str(op), user_line(seen))
    elif call.written and writes_array(seen, call.written):
        line = errors.array_written(str(op), user_line(seen))
    elif facts.reshapes and core.storage_id(inputs[0]) not in seen.made:
        line = errors.changes_shape(str(op), user_line(seen))
    elif facts.namespace in COLLECTIVES and (seen.run.driver not in collectives.DRIVERS or facts.packet in WAITS):
        line = errors.collective(str(op), user_line(seen), facts.packet in WAITS)
    elif not all(map(core.is_plain, inputs)) and (odd := odd_kind(t for t in inputs if not is_zeros(t))) is not None:
        line = errors.layout(str(op), user_line(seen), odd)
    elif (strange := vet_gpus(seen, op, inputs, inputs)) is not None:
        line = strange
    elif facts.packet == "_cudnn_init_dropout_state" and is_capture(seen):
        line = errors.cudnn_dropout()
    elif seen.run.driver == CUDA and not call.aside:
        line = vet_mixed(seen, call)
    if line is not None:
        refuse(seen, line)


def writes_array(seen, written):
    """Is one of these a constant over an array of NumPy's? PyTorch's own memory could be given another size."""
    known = [t for t in written if core.storage_id(t) in seen.constants.memory and not t.is_cuda]
    with unseen(seen):
        return not all(t.untyped_storage().resizable() for t in known)


def vet_effect(seen: Seen, op: OpOverload, facts: OpFacts, written: list[torch.Tensor]) -> None:
    """Refuse an op of somebody's that made nothing new and may have done anything: where PyTorch's own do so it is a
    view, or they assert something. (NCCL's kernels are captured.)"""
    if not (written or facts.views or facts.namespace in constants.KNOWN or facts.namespace in COLLECTIVES):
        refuse(seen, errors.unknown_effect(str(op), user_line(seen)))


def host_reason(seen: Seen, sentence: Callable[[str, str], str], op: OpOverload) -> str:
    """The sentence on an op that needs the host, or the one that tells an optimizer's user what helps."""
    line = user_line(seen)
    if not asks_on(seen):  # it is not told
        return sentence(str(op), line)
    return advice.step_reason(sys._getframe(1), line) or sentence(str(op), line)


def vet_gpus(seen: Seen, op: OpOverload, inputs: list[torch.Tensor], met: list[torch.Tensor]) -> str | None:
    """A sentence if the run may not use one of `met`, because of its device; or None: a recording forks to the other
    GPUs that were met before. A backward would run in a thread for each GPU, where ops of several are seen at a time:
    those of this run run in this thread."""
    for odd in met:
        if not odd.is_cpu and is_elsewhere(seen, odd):
            break
    else:
        return None
    told = str(op), user_line(seen), odd.device, name_of(seen.run.device)
    if not odd.is_cuda or is_host_recording(seen) or (seen.run.recording and odd.device.index not in seen.run.others):
        return errors.other_device(*told)
    if has_threads() and not core.is_in_node():
        seen.joins = True  # until `run` is over
        torch.autograd.set_multithreading_enabled(False)
    saves = seen.run.saves and torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    outside = seen.run.graph is not None or saves
    return errors.spread_graph(*told) if outside or has_threads() else None


def vet_mixed(seen, call):
    """CPU tensors in a function on the GPU: guarded numbers, constants, and what it brings there as it is."""
    op, facts, inputs, constant = call.op, call.facts, call.inputs, call.constant
    on_cpu = [t for t in inputs if not t.is_cuda and t.numel()]
    if facts.draws and is_hosts(call):
        return host_reason(seen, errors.cpu_state, op)
    if not on_cpu:
        return host_reason(seen, errors.host_read, op) if is_to_host(call) and not constant else None
    if facts.copies and len(on_cpu) < len(inputs) and on_cpu[0] is inputs[0]:
        return host_reason(seen, errors.host_read, op)
    strange = next((t for t in on_cpu if not fed.may_use(seen, call, t)), None)
    if strange is not None:
        seen.again = seen.again or fed.helps(seen, strange)
        return errors.cpu_tensor(str(op), user_line(seen), tuple(strange.shape))
    external = any(not t.is_cuda and core.storage_id(t) not in seen.made for t in call.written)
    if external:
        return host_reason(seen, errors.cpu_state, op)
    return None
