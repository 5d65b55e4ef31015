"""Record what a PyTorch function does on the GPU and replay it as a CUDA graph, safely."""

from .api import explain, jit, reset, stats, step
from .errors import CgtError, CgtWarning

__all__ = ["CgtError", "CgtWarning", "explain", "jit", "reset", "stats", "step"]
