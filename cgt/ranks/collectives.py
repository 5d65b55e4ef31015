"""Work that is spread over processes: collectives, and modules that exchange gradients in a backward.

However a call runs, warmed, recorded, replayed or eagerly, it takes part in each of its collectives once: ranks need
not do the same in a call, and nothing that runs a call twice is done to a function that exchanges data (audit.py)."""

import atexit
import functools
import os
from collections.abc import Callable, Collection, Iterable
from typing import Any

import cgt_core as core
import torch
from torch.nn.parallel import DistributedDataParallel

from ..data import Seen, State, remember
from ..run import constants, taps
from ..run.observe import NO_LINE, user_line
from ..run.taps import NOTHING
from ..words import errors, private

DRIVERS = (core.CUDA,)  # whose recordings may exchange data
SETTLED = 10  # iterations of which DistributedDataParallel takes times; in the next it asks for those of this one
# Iterations from one such to the next; the latter is PyTorch's (kDDPRuntimeLoggingSampleRate).
NEVER, SAMPLED = 2**31 - 1, 100


def why_not(module: torch.nn.Module, on_host: bool, saves: bool) -> str | None:
    """Why a recording cannot have this module's forward: "" if it is its kind; None if it can. A whole step can, on the
    GPU: hooks on accumulators run in the capture, and the collectives with them, on streams that join again."""
    if on_host or saves or not (isinstance(module, DistributedDataParallel) and private.knows_parallel()):
        return ""
    return private.odd_parallel(module)


def see_tensors(seen: Seen, inputs: list[torch.Tensor]) -> None:
    """With static_graph=True the host looks up, behind each backward, which parameters had a gradient in the first."""
    for t in inputs:
        if t.dtype == torch.int32 and t.dim() == 1 and not t.is_cuda and is_of_reducer(seen, t):
            constants.add(seen, t)


def is_of_reducer(seen, t):
    """Is this that table? As long as parameters are many, met by no code of the user's, and known from nowhere else."""
    sid, sizes = core.storage_id(t), [private.used_map_size(module) for module, *_ in seen.ranks.parallel]
    strange = sid in seen.constants.memory or not (sid in seen.run.slots or sid in seen.touched or sid in seen.made)
    return strange and t.numel() in sizes and user_line(seen) == NO_LINE


def learn(state: State, seen: Seen, pending: bool) -> tuple[str | None, bool]:
    """Note what a warm-up has to do with other processes; (a sentence on why it is not recorded or None, is that over
    soon). `pending`: a backward of its results may come."""
    remember(state, exchanges=state.learnt.exchanges or seen.exchanges)
    state.learnt.devices.parallel.update(module for module, *_ in seen.ranks.parallel)
    for module, name, line, works in seen.ranks.parallel:
        if pending:
            return errors.parallel_module(name, line), False
        if works and private.parallel_iteration(module) < SETTLED:
            return errors.parallel_settles(name), True
    return None, False


def undisturbed(modules: Collection[DistributedDataParallel]) -> tuple[Callable[[], object], Callable[[], object]]:
    """A bracket: inside, none of these takes times, not even in its 100th iteration."""
    if not modules:
        return NOTHING

    def every(n):
        for module in list(modules):
            private.set_parallel_statistics(module, n)

    return functools.partial(every, NEVER), functools.partial(every, SAMPLED)


def forget(modules: Iterable[DistributedDataParallel]) -> bool:
    """A capture came to nothing: was it in the middle of a reduction? That is under way no longer. (Buckets are built
    anew then, with an exchange, so the ranks must have come to this together: a program's own doing does, want of
    memory does not.)"""
    return any([private.forget_reduction(module) for module in list(modules)])


def sizes(sharded: Iterable[tuple[str, Any]]) -> list[tuple[torch.UntypedStorage, int]]:
    """[(memory to which all of a parameter of fully_shard's comes, its bytes now)], of places.Found.sharded."""
    storages = [t.untyped_storage() for _, one in sharded for t in private.gathered_in(one)]
    return [(storage, storage.size()) for storage in storages]


def let_go(gathered: list[tuple[torch.UntypedStorage, int]]) -> None:
    """A capture came to nothing: what it gathered is nowhere."""
    for storage, nbytes in gathered:
        if storage.size() > nbytes:
            storage.resize_(nbytes)


def note_pending(seen: Seen, op: private.OpOverload, inputs: list[torch.Tensor], fresh: list[torch.Tensor]) -> None:
    """A functional collective gives what must be waited for before it is used."""
    for t in inputs:
        if op.overloadpacket.__name__ == "wait_tensor":
            seen.ranks.pending.pop(core.storage_id(t), None)
    seen.ranks.pending.update((core.storage_id(t), core.alias(t)) for t in fresh)


def wait_pending(seen: Seen) -> None:
    """What was not waited for in a capture cannot be behind it."""
    for t in seen.ranks.pending.values():
        torch.ops._c10d_functional.wait_tensor(t)
    seen.ranks.pending.clear()


def watch_groups(let_go: Callable[[], object]) -> None:
    """Once for all, let_go() comes before a group is shut down: NCCL waits for graphs with work of its own."""
    groups = taps.late(*((torch.distributed.ProcessGroup, name) for name in ("shutdown", "abort")))
    if not groups.handlers:
        groups.begin([lambda: True, lambda plain, owner, name, args, kwargs: (let_go(), plain(*args, **kwargs))[1]])


def watch_replays(node: int, device: int) -> None:
    """From now on it is seen to that replays of this recording end: NCCL's watchdog does not look at them."""
    timeout = private.nccl_timeout() if device >= 0 and not is_unguarded() else None
    stream = torch.cuda.current_stream(device) if timeout is not None else None
    if stream is not None and is_lasting(stream):
        core.node_watch(node, stream.cuda_stream, timeout, (errors.overdue(device, timeout) + "\n").encode())


def is_lasting(stream):
    """As long as the process: the default stream and those of torch's pools. Others have an address for an id."""
    return stream.stream_id == 0 or stream.stream_id % 2 == 1


def is_unguarded():
    """Did somebody turn NCCL's watchdog off?"""
    names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
    return next((os.environ[name] for name in names if name in os.environ), "") == "0"


atexit.register(core.watch_end)
