"""Which GPU a call is recorded on, whatever GPU is current around it.

That of its arguments, if they lie on one; else the current one. While it is recorded or replayed on another GPU than the caller's, that one is
the current one, but never while the user's code runs for real: what it makes without saying where would come to another place than in eager.
A first run under observation has shown that it makes nothing there.
"""

import cgt_core as core
import torch


def home_of(tensors):
    """Index of the GPU on which a call with these tensors is recorded."""
    found = {t.device.index for t in tensors if t.is_cuda}
    return found.pop() if len(found) == 1 else torch.cuda.current_device()


def caller_device():
    """Index of the caller's current GPU, also inside of at_home."""
    return core.gpu() if core.is_turned() else torch.cuda.current_device()


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
