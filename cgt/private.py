"""Every private name of PyTorch that the Python half uses, and the start-up self-check.

What differs between releases is here and, for C++, in the `#if`s of core/cuda_shim.h. Tested with
torch 2.11.0+cu130 and 2.13.0 (CPU). Imports nothing of cgt's but the core.
"""

import warnings

import cgt_core as core
import torch
from torch.overrides import TorchFunctionMode as FunctionMode  # public, re-exported for one place
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode

__all__ = [
    "DispatchMode", "FunctionMode", "clear_workspaces", "self_check", "sequence_number", "was_freed",
]  # fmt: skip


def sequence_number():
    """Autograd nodes that this thread makes from now on have this number or a higher one."""
    return torch._C._autograd._get_sequence_nr()


def was_freed(raw):
    """Did a backward free this SavedTensor? It does not say so, but it refuses hooks with that reason;
    one that has a value does not get that far."""
    if raw.data is not None:
        return False
    try:
        raw.register_hooks(lambda t: t, lambda t: t)
    except RuntimeError as error:
        return "freed" in str(error)
    return False


def clear_workspaces():
    """Free cuBLAS workspaces, so that a capture allocates its own in cgt's pool and later ones may
    reuse the bytes; a workspace from outside could be freed while graphs still write it."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


def self_check():
    """Hold what the core believes about tensors against what PyTorch says, once at import.

    Returns True if outputs may be handed out as the same tensors again. A mirror that does not fit
    is an ImportError: nothing would be safe. Reference counts that do not behave as calibrated only
    switch the reuse of output tensors off, with a warning.
    """
    t = torch.arange(6.0).view(2, 3)[:, 1:]
    if core.address(t) != t.data_ptr():
        raise ImportError(f"cgt does not know the tensor layout of torch {torch.__version__}")
    alone = core.holders(t)
    leaf = torch.ones(2, 2, requires_grad=True)
    leaf.grad = torch.ones(2, 2)
    with_cpp = core.holders(leaf.grad)  # a C++ holder and a passing Python reference
    saved = torch.ones(2)
    product = torch.ones(2, requires_grad=True) * saved  # a SavedVariable holds `saved`
    with_saved = core.holders(saved)
    bump = with_saved[0] - alone[0]
    core.set_cpp_bump(bump)
    view = saved[:1]
    fits = (
        alone[1] == 1
        and with_cpp[1] == 2
        and with_saved[1] == 2
        and bump in (0, 1)
        and core.holders(saved)[2] >= 2
        and product.requires_grad
        and view.numel() == 1
    )
    if not fits:
        warnings.warn(
            f"torch {torch.__version__} counts references in a way cgt does not know "
            f"({alone}, {with_cpp}, {with_saved}); outputs are copied out instead of reused.",
            stacklevel=2,
        )
    return fits
