"""The ops of a host recording: which form of an op writes into the recorded memory.

An op is appended with the tensors that it really got, after it ran. Three forms, in this order:
  in place   the op writes its own arguments: call it again
  out=       its out variant writes the recorded results
  copy       call it and copy the results over the recorded ones
Views are not appended: a view of recorded memory is the same view at every launch.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import cgt_core as core
import torch

from ..words.private import OpOverload

EMPTY = frozenset("empty empty_like empty_strided new_empty new_empty_strided empty_permuted".split())


class Form(NamedTuple):
    """How an op comes on a tape."""

    op: Any  # as of make.facts.OpFacts
    name: bytes
    overload: bytes
    is_empty: bool  # what it makes has any bytes
    out: tuple | None  # of out_variant, if it writes none of its arguments


FORMS: dict = {}  # id of an op -> its form


def form_of(op):
    out, schema = None if writes(op) else out_variant(op), op._schema
    is_empty = op.overloadpacket.__name__ in EMPTY and not writes(op)
    return Form(op, schema.name.encode(), schema.overload_name.encode(), is_empty, out)


def out_variant(op):
    """(overload, its out argument, names of its arguments), or None: the variant that takes op's arguments and writes a
    given result."""
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
            names = frozenset(a.name for a in candidate._schema.arguments)
            return candidate._schema.overload_name.encode(), outs[0].name.encode(), names
    return None


FACTORY = frozenset(("dtype", "layout", "device", "pin_memory"))


def writes(op: OpOverload) -> tuple[tuple[int, str], ...]:
    """Positions and names of the arguments that op writes."""
    return tuple(
        (k, a.name) for k, a in enumerate(op._schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    )


def append(op: OpOverload, args: Sequence[object], kwargs: dict[str, object], results: Sequence[torch.Tensor]) -> None:
    """Append op to the tape under way. `results`: the tensors it made, in order."""
    form = FORMS.get(id(op)) or FORMS.setdefault(id(op), form_of(op))
    if form.is_empty and results:
        if is_filled():
            core.op(b"aten::fill_", b"Scalar", (results[0], unwritten(results[0].dtype)), {}, ())
        return  # or its bytes mean nothing; the memory stays
    args, into = tuple(args), tuple(results)
    if form.out is not None and results:
        overload, out, known = form.out
        trimmed = {k: v for k, v in kwargs.items() if k not in FACTORY or k in known} if kwargs else kwargs
        if core.op(form.name, overload, args, trimmed, into, out):
            return
    core.op(form.name, form.overload, args, kwargs, into)


def is_filled() -> bool:
    """Is memory filled that was asked for and not written yet, so that who reads it gets the same each time?"""
    return torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory


def unwritten(dtype):
    """With what."""
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Append a copy of `source`, which nobody writes, over `target`."""
    core.op(b"aten::copy_", b"", (target, source), {}, ())
