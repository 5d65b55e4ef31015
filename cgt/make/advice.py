"""What an optimizer's user can set so that its step is replayed."""

import types

import torch

from ..run.observe import NOT_USER_CODE
from ..words import errors

STEPS = ("step", "_maybe_opt_step")  # functions of torch.optim's optimizers, of torch.amp's scalers


def step_reason(frame: types.FrameType | None, line: str) -> str | None:
    """A sentence if PyTorch's code in and around this frame is a step of torch.optim's or the one of a
    gradient scaler; else None."""
    while frame is not None and frame.f_code.co_filename.startswith(NOT_USER_CODE):
        if frame.f_code.co_name in STEPS:
            owner, optimizer = (frame.f_locals.get(name) for name in ("self", "optimizer"))
            if isinstance(owner, torch.optim.Optimizer):
                option = helpful_option(owner)
                sentence = errors.optimizer_option if option else errors.optimizer_outside
                return sentence(type(owner).__name__, line, *option)
            if isinstance(owner, torch.amp.GradScaler):
                option = scaling_option(optimizer)
                sentence = errors.scaler_option if option else errors.scaler_outside
                return sentence(line, type(optimizer).__name__, *option)
        frame = frame.f_back
    return None


def helpful_option(optimizer):
    """(what keeps an optimizer's numbers on its device,); () if nothing does."""
    if is_on_cuda(optimizer) and "capturable" in optimizer.defaults:
        return () if has_option(optimizer, "capturable") else ("capturable=True",)
    return fused_option(optimizer)


def scaling_option(optimizer):
    """(what lets an optimizer skip a step on its device,); () if nothing does."""
    option = fused_option(optimizer)
    if option and is_on_cuda(optimizer) and "capturable" in optimizer.defaults:
        return (f"{option[0]}, capturable=True",)
    return option


def fused_option(optimizer):
    """(fused=True,) if that is what an optimizer lacks and can have."""
    known = "fused" in optimizer.defaults and not has_option(optimizer, "fused")
    if not known or not all(p.is_floating_point() for p in parameters_of(optimizer)):
        return ()
    if type(optimizer) is torch.optim.Adagrad and is_on_cuda(optimizer):
        return ()  # whose fused kernel is the CPU's alone
    instead = any(group.get("foreach") for group in optimizer.param_groups)
    return ("fused=True instead of foreach=True" if instead else "fused=True",)


def has_option(optimizer, name):
    """Is this option set for all parameters?"""
    return all(group.get(name) for group in optimizer.param_groups)


def is_on_cuda(optimizer):
    """Are there parameters on a GPU?"""
    return any(p.is_cuda for p in parameters_of(optimizer))


def parameters_of(optimizer):
    """All parameters of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]
