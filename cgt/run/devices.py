"""Which GPU a call is recorded on, whatever GPU is current, and on which others it works besides.

That of its arguments, if they lie on one; of what it reaches, if it has none on a GPU; else the current one. Which one
is current stays as it is, in recordings and at replays, as a function is told that asks: the core makes another one
current for the driver's calls alone. Where a function makes tensors without saying where depends on it: it is part of
the ambient state that guards compare.

A first run shows the others. A capture forks to their streams, and they join it at its end.
"""

import functools
from collections.abc import Iterable

import cgt_core as core
import torch

from ..words.private import has_threads
from .taps import NOTHING, Bracket


def home_of(tensors: Iterable[torch.Tensor], homes: dict[int, int] | None = None) -> int:
    """Index of the GPU on which a call with these arguments is recorded. `homes`: see learn_home."""
    found = {t.device.index for t in tensors if t.is_cuda}
    if len(found) == 1:
        return found.pop()
    now = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    if found:
        return now if now in found else min(found)
    return homes.get(now, now) if homes else now


def learn_home(homes: dict[int, int], devices: Iterable[torch.device]) -> None:
    """A call without arguments on a GPU has worked on these devices: homes[current GPU] = the only GPU among them."""
    found = gpus_of(devices)
    if len(found) == 1:
        homes[torch.cuda.current_device()] = found.pop()


def gpus_of(devices: Iterable[torch.device]) -> set[int]:
    return {device.index for device in devices if device.type == "cuda"}


def name_of(device: int) -> str:
    """As sentences have it. -1: the host."""
    return f"cuda:{device}" if device >= 0 else "the host"


def one_thread(others: tuple[int, ...] | bool) -> Bracket:
    """A bracket: a backward that works on these GPUs, too, runs in one thread, not in one for each."""
    if not others:  # what the function switches stays so
        return NOTHING
    switch, before = torch.autograd.set_multithreading_enabled, has_threads()
    return functools.partial(switch, False), functools.partial(switch, before)


def settle(device: int) -> None:
    """Wait until autograd's thread of a GPU let go of what it ran last: it wakes the caller before that. It may be at
    another thread's backward, which waits for no path that this one holds."""

    def backward():
        x = torch.empty(0, device=device, requires_grad=True)
        torch.autograd.grad(x.view(0), x, x.detach())

    if device >= 0:
        core.in_inference(False, functools.partial(core.with_grad, functools.partial(core.lend, backward)))


def is_captured(tensor: torch.Tensor) -> bool:
    """Is a capture under way where what is done with this tensor is launched?"""
    return tensor.is_cuda and core.stream_is_capturing(tensor.device.index)


def on_stream(stream: torch.cuda.Stream, before: torch.cuda.Stream) -> Bracket:
    """A bracket: inside, `stream` is its device's current one, and then `before`. Which device is current stays."""
    return functools.partial(core.set_stream, stream.stream_id, stream.device_index), functools.partial(
        core.set_stream, before.stream_id, before.device_index
    )
