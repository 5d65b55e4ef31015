"""What a type checker is to know of a program that uses cgt; run by tests/project/test_types.py, and as it stands."""

import sys

import cgt

if sys.version_info >= (3, 11):
    from typing import assert_type
else:  # as it stands
    def assert_type(value, kind):
        return value


@cgt.jit
def scaled(x: float, by: int = 2) -> float:
    return x * by


@cgt.jit(max_records=4, dynamic="by", audit="first:1")
def shifted(x: float, *, by: float) -> float:
    return x + by


class Model:
    @cgt.jit
    def forward(self, x: float) -> str:
        return str(x)


class Net:
    """As a module has them."""

    width = 3

    def named_parameters(self) -> list[str]:
        return []

    def state_dict(self) -> dict[str, float]:
        return {}

    def __call__(self, x: float) -> float:
        return x


@cgt.eager
def told(x: float) -> int:
    return int(x)


assert_type(cgt.jit(Net()), Net)  # of a module: which has what the module has
assert_type(scaled(1.0, 3), float)
assert_type(shifted(1.0, by=2.0), float)
assert_type(Model().forward(1.0), str)
assert_type(told(1.5), int)
assert_type(cgt.stats(scaled).replays, int)
assert_type(cgt.stats().reasons, dict[str, int])
assert_type(cgt.explain(scaled), str)
found = cgt.doctor(scaled, 1.0)
assert_type(found.findings[0].text if found.findings else "", str)
assert_type(str(found), str)
with cgt.require_replay():
    pass
cgt.step()
cgt.reset(scaled)
cgt.reset()
