"""Work that is spread over processes: collectives, and modules that exchange gradients in a backward.

However a call runs, warmed, recorded, replayed or eagerly, it takes part in each of its collectives once: ranks need not do the same in a
call, and nothing that runs a call twice is done to a function that exchanges data (audit.py, verify.py).
"""

import functools

import cgt_core as core
import torch
from torch.nn.parallel import DistributedDataParallel

from . import constants, errors, taps
from .observe import NO_LINE, user_line
from .private import (
    forget_reduction,
    is_reduced,
    knows_parallel,
    odd_parallel,
    parallel_iteration,
    set_parallel_statistics,
    used_map_size,
)
from .taps import NOTHING

SETTLED = 10  # iterations of which DistributedDataParallel takes times; in the next it asks for those of this one
NEVER, SAMPLED = 2**31 - 1, 100  # iterations from one such to the next; the latter is PyTorch's (kDDPRuntimeLoggingSampleRate)


def why_not(module, on_host, saves):
    """Why a recording cannot have the forward of this module: "" if it is its kind, None if it can. A whole step can, on the GPU: the
    hooks on accumulators run in the capture, and with them the collectives, on streams that join again."""
    if on_host or saves or not (isinstance(module, DistributedDataParallel) and knows_parallel()):
        return ""
    return odd_parallel(module)


def see_tensors(seen, inputs):
    """With static_graph=True the host looks up, behind each backward, which parameters had a gradient in the first."""
    for t in inputs:
        if t.dtype == torch.int32 and t.dim() == 1 and not t.is_cuda and is_of_reducer(seen, t):
            constants.add(seen, t)


def is_of_reducer(seen, t):
    """Is this that table? As long as parameters are many, met by no code of the user's, and known from nowhere else."""
    sid, sizes = core.storage_id(t), [used_map_size(module) for module, *_ in seen.parallel]
    strange = sid in seen.constants or not (sid in seen.slots or sid in seen.touched or sid in seen.made)
    return strange and t.numel() in sizes and user_line(seen) == NO_LINE


def learn(state, seen, pending):
    """Note what a warm-up has to do with other processes; (a sentence on why it is not recorded or None, is that over soon). `pending`: a
    backward of its results may come."""
    state.exchanges |= seen.exchanges
    state.parallel.update(module for module, *_ in seen.parallel)
    for module, name, line, works in seen.parallel:
        if pending:
            return errors.parallel_module(name, line), False
        if works and parallel_iteration(module) < SETTLED:
            return errors.parallel_settles(name), True
    return None, False


def undisturbed(modules):
    """A bracket: inside, none of these takes times, not even in its 100th iteration."""
    if not modules:
        return NOTHING

    def every(n):
        for module in list(modules):
            set_parallel_statistics(module, n)

    return functools.partial(every, NEVER), functools.partial(every, SAMPLED)


def forget(modules):
    """A capture came to nothing: was it in the middle of a reduction? That is under way no longer. (Buckets are built anew then, with an
    exchange, so the ranks must have come to this together: a program's own doing does, want of memory does not.)"""
    cut = [module for module in list(modules) if not is_reduced(module)]
    for module in cut:
        forget_reduction(module)
    return bool(cut)


def watch_groups(let_go):
    """From now on, once for all, let_go() comes before a group of processes is shut down. NCCL waits for the graphs that
    hold work of its communicators."""
    taps.tap_groups(lambda plain, owner, name, args, kwargs: (let_go(), plain(*args, **kwargs))[1])
