"""The ops of a host recording: which form of an op writes into the recorded memory.

An op is appended with the tensors that it really got, after it ran. Three forms, in this order:
  in place   the op writes its own arguments: call it again
  out=       its out variant writes the recorded results
  copy       call it and copy the results over the recorded ones
Views are not appended: a view of recorded memory is the same view at every launch.
"""

import functools
import math
from collections.abc import Sequence

import cgt_core as core
import torch

from ..words.private import OpOverload

EMPTY = frozenset("empty empty_like empty_strided new_empty new_empty_strided empty_permuted".split())


@functools.cache
def out_variant(op):
    """(overload, name of its out argument, names of its arguments), or None: the variant that takes op's arguments and
    writes a given result."""
    packet = op.overloadpacket
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments]
    if torch.Tag.nondeterministic_seeded in op.tags:
        return None  # cannot be tried without drawing numbers
    if [str(r.type) for r in op._schema.returns] != ["Tensor"]:
        return None  # several results: some out variants resize what a mode leaves empty
    for name in packet.overloads():
        candidate = getattr(packet, name)
        outs = [a for a in candidate._schema.arguments if a.is_out]
        rest = [(a.name, str(a.type)) for a in candidate._schema.arguments if not a.is_out]
        if len(outs) != 1:
            continue
        # dtype, layout, device and pin_memory of a factory are those of the recorded result.
        if rest == wanted or rest == [w for w in wanted if w[0] not in FACTORY]:
            return candidate, outs[0].name, frozenset(a.name for a in candidate._schema.arguments)
    return None


FACTORY = frozenset(("dtype", "layout", "device", "pin_memory"))


@functools.cache
def writes(op: OpOverload) -> tuple[tuple[int, str], ...]:
    """Positions and names of the arguments that op writes."""
    return tuple(
        (k, a.name) for k, a in enumerate(op._schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    )


def append(op: OpOverload, args: Sequence[object], kwargs: dict[str, object], results: Sequence[torch.Tensor]) -> None:
    """Append op to the tape under way. `results`: the tensors it made, in order."""
    name, overload, into = op._schema.name, op._schema.overload_name, tuple(results)
    makes = bool(results) and not writes(op)
    if makes and op.overloadpacket.__name__ in EMPTY:
        if is_filled():
            core.op(b"aten::fill_", b"Scalar", (results[0], unwritten(results[0].dtype)), {}, ())
        return  # or its bytes mean nothing; the memory stays
    found, extra = out_variant(op) if makes else None, {}
    if found is not None:
        target, out, known = found
        trimmed = {k: v for k, v in kwargs.items() if k not in FACTORY or k in known} if kwargs else kwargs
        if writes_same(target, out, args, trimmed, results[0]):
            overload, into, kwargs, extra = target._schema.overload_name, (), trimmed, {out: results[0]}
    core.op(name.encode(), overload.encode(), tuple(args), kwargs | extra, into)


def is_filled() -> bool:
    """Is memory filled that was asked for and not written yet, so that who reads it gets the same each time?"""
    return torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory


def unwritten(dtype):
    """With what."""
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def writes_same(target, name, args, kwargs, result):
    """Does the out variant write the very bytes of `result` where it is told to? Tried once with
    these arguments: some variants resize, or use the memory they are given as scratch."""
    if result.is_conj() or result.is_neg():  # as dot's is, of conjugated vectors; what is given is not
        return False
    out = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype)
    at = core.address(out)
    try:
        core.quiet(functools.partial(target, *args, **kwargs, **{name: out}))
    except RuntimeError:
        return False
    return core.address(out) == at and out.stride() == result.stride() and same_bits(out, result)


def same_bits(a, b):
    """Bitwise equality of two dense tensors."""
    size = a.element_size()
    number = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(size)
    if number is None:  # complex128
        return torch.equal(torch.view_as_real(a).view(torch.int64), torch.view_as_real(b).view(torch.int64))
    return torch.equal(a.view(number), b.view(number))


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Append a copy of `source`, which nobody writes, over `target`."""
    core.op(b"aten::copy_", b"", (target, source), {}, ())
