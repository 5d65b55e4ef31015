# What a type checker knows of cgt. tests/project/test_types.py holds it to the functions themselves.

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ContextDecorator
from os import PathLike
from types import TracebackType
from typing import Any, Literal, NamedTuple, ParamSpec, Protocol, TypeVar, overload

from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

class _Module(Protocol):  # torch.nn.Module
    def named_parameters(self) -> Any: ...
    def state_dict(self) -> Any: ...

M = TypeVar("M", bound=_Module)

__version__: str
__all__ = [
    "CgtError",
    "CgtWarning",
    "Pad",
    "doctor",
    "eager",
    "explain",
    "jit",
    "memory",
    "require_replay",
    "reset",
    "show",
    "stats",
    "step",
    "tap",
    "tapped",
    "unjit",
]

class CgtError(RuntimeError): ...
class CgtWarning(UserWarning): ...

class Stats(NamedTuple):
    calls: int
    warmups: int
    records: int
    replays: int
    eager: int
    rebinds: int
    copied_bytes: int
    rescues: int
    rescued_bytes: int
    graph_nodes: int
    pool_bytes: int
    reasons: dict[str, int]
    seconds: dict[str, float]
    backward: Stats | None
    audited: int

class Recording(NamedTuple):
    name: str
    device: str
    replays: int
    results: int
    copies: int
    executable: int
    lines: dict[str, int]

class Memory(NamedTuple):
    pools: dict[str, int]
    recordings: tuple[Recording, ...]

class Pad(NamedTuple):
    dims: int | Iterable[int] | Mapping[int, Iterable[int]]
    fill: float = 0

class Finding(NamedTuple):
    times: int
    text: str
    when: str

class Diagnosis(NamedTuple):
    name: str
    calls: int
    replays: int
    findings: tuple[Finding, ...]
    slow: tuple[str, ...]
    tried: tuple[str, ...]
    seconds: float | None
    replay_seconds: float | None
    pays_after: int | None
    changed: str | None

@overload
def jit(
    fn: M,
    *,
    static_argnums: int | Iterable[int] = ...,
    static_argnames: str | Iterable[str] = ...,
    max_records: int | None = ...,
    max_graphs: int = ...,
    outputs: Literal["rescue", "error", "borrow"] = ...,
    inputs: Literal["auto", "fixed", "copied"] = ...,
    dynamic: str | Iterable[str] = ...,
    audit: str | None = ...,
    memory_budget: int | str | None = ...,
    pad: Mapping[str, int | Iterable[int] | Mapping[int, Iterable[int]] | Pad] | None = ...,
    parallel: Literal["auto", "always", "never"] = ...,
) -> M: ...  # that very module
@overload
def jit(
    fn: Callable[P, R],
    *,
    static_argnums: int | Iterable[int] = ...,
    static_argnames: str | Iterable[str] = ...,
    max_records: int | None = ...,
    max_graphs: int = ...,
    outputs: Literal["rescue", "error", "borrow"] = ...,
    inputs: Literal["auto", "fixed", "copied"] = ...,
    dynamic: str | Iterable[str] = ...,
    audit: str | None = ...,
    memory_budget: int | str | None = ...,
    pad: Mapping[str, int | Iterable[int] | Mapping[int, Iterable[int]] | Pad] | None = ...,
    parallel: Literal["auto", "always", "never"] = ...,
) -> Callable[P, R]: ...
@overload
def jit(
    fn: None = None,
    *,
    static_argnums: int | Iterable[int] = ...,
    static_argnames: str | Iterable[str] = ...,
    max_records: int | None = ...,
    max_graphs: int = ...,
    outputs: Literal["rescue", "error", "borrow"] = ...,
    inputs: Literal["auto", "fixed", "copied"] = ...,
    dynamic: str | Iterable[str] = ...,
    audit: str | None = ...,
    memory_budget: int | str | None = ...,
    pad: Mapping[str, int | Iterable[int] | Mapping[int, Iterable[int]] | Pad] | None = ...,
    parallel: Literal["auto", "always", "never"] = ...,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
@overload
def unjit(fn: M) -> M: ...
@overload
def unjit(fn: Callable[P, R]) -> Callable[P, R]: ...
def step() -> None: ...
def reset(f: Callable[..., Any] | None = None) -> None: ...
def stats(f: Callable[..., Any] | None = None) -> Stats: ...
def memory() -> Memory: ...
def show(f: Callable[..., Any], path: str | PathLike[str]) -> None: ...
def explain(f: Callable[..., Any] | None = None) -> str: ...
def doctor(fn: Callable[..., Any], *args: Any, more: Sequence[tuple[Any, ...]] = ..., **kwargs: Any) -> Diagnosis: ...
def eager(function: F) -> F: ...
def tap(name: str, t: Tensor) -> Tensor: ...
def tapped() -> dict[str, Tensor]: ...

class require_replay(ContextDecorator):
    def __enter__(self) -> require_replay: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...
