"""The parts without which cgt works: `torch.cond` in a recording (cuts/forks.py), and what exchanges data (ranks/).

Other modules take them from here alone. Where a file is missing, what stands for it says that there is none of its
kind, and what needs it runs eagerly, with a reason."""

from importlib.util import find_spec
from types import SimpleNamespace

from ..run.taps import NOTHING

if find_spec("..cuts.forks", __package__):
    from ..cuts import forks
else:  # PyTorch's own torch.cond runs an op of higher order, which is refused
    streams: dict = {}
    forks = SimpleNamespace(  # type: ignore[assignment]
        STREAMS=streams, prepare=lambda device, stream: streams.update({device: stream}),
        is_imagined=lambda seen: False, see_fork=lambda seen, name, args, plain: plain(),
    )  # fmt: skip
if find_spec("..ranks", __package__):
    from ..ranks import collectives
else:
    collectives = SimpleNamespace(  # type: ignore[assignment]
        DRIVERS=(), why_not=lambda *_: "", learn=lambda *_: (None, False), undisturbed=lambda modules: NOTHING,
        forget=lambda modules: False, sizes=lambda parameters: [], let_go=lambda gathered: None,
    )  # fmt: skip
