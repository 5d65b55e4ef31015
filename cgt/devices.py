"""Which GPU a call is recorded on, whatever GPU is current around it.

That of its arguments, if they lie on one, or of what it reaches, if it has none; else the current one. While it is recorded or replayed on another GPU than the caller's, that one is
the current one, but never while the user's code runs for real: what it makes without saying where would come to another place than in eager.
A first run under observation has shown that it makes nothing there, and does not ask which one it is.
"""

import cgt_core as core
import torch


def home_of(tensors, homes):
    """Index of the GPU on which a call with these arguments is recorded. `homes`: where nothing else was met, by the caller's GPU."""
    found = {t.device.index for t in tensors if t.is_cuda}
    if found:
        return found.pop() if len(found) == 1 else torch.cuda.current_device()
    return homes.get(core.gpu(), torch.cuda.current_device())


def learn_home(homes, devices):
    """A call without arguments on a GPU has worked on these devices."""
    found = {device.index for device in devices if device.type == "cuda"}
    if len(found) == 1:
        homes[core.gpu()] = found.pop()


def at_home(device):
    """A bracket: inside, this GPU is the current one. -1, the host, changes nothing."""

    def begin():
        if device >= 0:
            core.turn(device)

    return begin, core.turn_back


def as_called(body):
    """body(), in the middle of at_home or not, with the caller's own GPU current; then at_home is over."""
    core.turn_back()
    return body()
