"""Record what a PyTorch function does on the GPU and replay it as a CUDA graph, safely."""

import torch  # first: the core's libraries are PyTorch's, and torch loads them in order

# isort: split
from .words import errors
from .words.errors import CgtError, CgtWarning

__version__ = "0.5.0"

try:
    import cgt_core
except ImportError as error:  # a symbol that this torch does not have; or it was not built
    raise ImportError(errors.other_torch(__version__, torch.__version__, str(error))) from error
if cgt_core.built_against() != tuple(map(int, torch.__version__.split(".")[:2])):
    raise ImportError(
        errors.other_torch(
            __version__, torch.__version__, "built against torch {}.{}".format(*cgt_core.built_against())
        )
    )

from .api import explain, jit, memory, require_replay, reset, show, stats, step, unjit  # noqa: E402
from .decide.padding import Pad  # noqa: E402
from .doctor import doctor  # noqa: E402
from .make.islands import eager  # noqa: E402
from .make.probes import tap, tapped  # noqa: E402

__all__ = [
    "CgtError", "CgtWarning", "Pad", "doctor", "eager", "explain", "jit", "memory", "require_replay", "reset", "show",
    "stats", "step", "tap", "tapped", "unjit",
]  # fmt: skip


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
