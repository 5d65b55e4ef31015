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
                option = helpful_option(owner, scaled=False)
                sentence = errors.optimizer_option if option else errors.optimizer_outside
                return sentence(type(owner).__name__, line, *option)
            if isinstance(owner, torch.amp.GradScaler):
                option = helpful_option(optimizer, scaled=True)
                sentence = errors.scaler_option if option else errors.scaler_outside
                return sentence(line, type(optimizer).__name__, *option)
        frame = frame.f_back
    return None


def helpful_option(optimizer, scaled):
    """(what keeps an optimizer's numbers on its device, or if it is `scaled` lets it skip a step there,); () if nothing
    does."""
    groups = optimizer.param_groups
    on_cuda, floats = is_on_cuda(optimizer), all(p.is_floating_point() for group in groups for p in group["params"])
    lacking = {name for name in optimizer.defaults if not all(group.get(name) for group in groups)}
    capturable = on_cuda and "capturable" in optimizer.defaults
    if capturable and not scaled:
        return ("capturable=True",) if "capturable" in lacking else ()
    on_cpu_alone = type(optimizer) is torch.optim.Adagrad  # the fused kernel
    if "fused" not in lacking or not floats or (on_cuda and on_cpu_alone):
        return ()
    option = "fused=True instead of foreach=True" if any(group.get("foreach") for group in groups) else "fused=True"
    return (f"{option}, capturable=True" if capturable else option,)


def is_on_cuda(optimizer):
    """Are there parameters on a GPU?"""
    return any(p.is_cuda for group in optimizer.param_groups for p in group["params"])
