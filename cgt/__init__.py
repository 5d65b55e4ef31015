"""Record what a PyTorch function does on the GPU and replay it as a CUDA graph, safely."""

import torch  # noqa: F401  first: the core's libraries are PyTorch's, and torch loads them in order

# isort: split
from .api import explain, jit, require_replay, reset, stats, step
from .errors import CgtError, CgtWarning
from .islands import eager

__all__ = ["CgtError", "CgtWarning", "eager", "explain", "jit", "require_replay", "reset", "stats", "step"]
