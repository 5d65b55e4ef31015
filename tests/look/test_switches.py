"""State of torch that lies in Python: what changes there is noticed, and calls between which nothing changes replay."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

# isort: split
import cgt_core as core

import cgt


def replays_around(f, x, want, change, n=5):
    """f(x) is want() before and after a change, and both replay."""
    for _ in range(n):
        assert torch.equal(f(x), want())
    before = cgt.stats(f).replays
    change()
    for _ in range(n):
        assert torch.equal(f(x), want())
    assert before >= n - 3 and cgt.stats(f).replays >= before + n - 3, cgt.explain(f)


PATCHED = {
    "in a global": (F, "relu", lambda x: F.relu(x)),
    "by its full name": (torch.nn.functional, "gelu", lambda x: torch.nn.functional.gelu(x)),
    "of torch": (torch, "tanh", lambda x: torch.tanh(x)),
    "below torch": (torch.linalg, "vector_norm", lambda x: torch.linalg.vector_norm(x)),
    "of a module": (F, "silu", nn.SiLU()),
}


@pytest.mark.parametrize("owner, name, function", PATCHED.values(), ids=PATCHED.keys())
def test_function_of_torch_that_is_replaced(device, monkeypatch, owner, name, function):
    f, x, scale = cgt.jit(copy.deepcopy(function)), torch.arange(4.0, device=device) - 2, 3.0
    replays_around(f, x, lambda: function(x), lambda: monkeypatch.setattr(owner, name, lambda x, *_, **__: x * scale))
    scale = 5.0  # what it reads is guarded, too
    assert torch.equal(f(x), x * 5)
    monkeypatch.undo()
    assert torch.equal(f(x), function(x))


@pytest.mark.filterwarnings("ignore:Setting the SM carveout")
def test_which_kernels_come_first_and_how_much_of_the_gpu_they_may_take_is_ambient():
    """The order in which backends of attention are asked, and the SMs that matrix products leave alone."""
    first, second = torch.nn.attention.SDPBackend.FLASH_ATTENTION, torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION
    words = [core.ambient()]
    for order in ([first, second], [second, first]):
        with torch.nn.attention.sdpa_kernel(order, set_priority=True):
            words.append(core.ambient())
    assert core.ambient() == words[0]
    for carveout in (0, 20, 66):
        torch._C._set_sm_carveout_experimental(carveout)
        words.append(core.ambient())
    torch._C._set_sm_carveout_experimental(None)
    assert core.ambient() == words[0] and len(set(words)) == len(words)
