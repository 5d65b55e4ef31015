"""The ops of a host recording: which form of an op writes into the recorded memory.

An op is appended with the tensors that it really got, after it ran. Three forms, in this order:
  in place   the op writes its own arguments: call it again
  out=       its out variant writes the recorded results
  copy       call it and copy the results over the recorded ones
Views are not appended: a view of recorded memory is the same view at every launch.
"""

from collections.abc import Sequence

import cgt_core as core
import torch

from ..words.private import OpOverload

EMPTY = frozenset("empty empty_like empty_strided new_empty new_empty_strided empty_permuted".split())
FORMS: dict = {}  # id of an op -> form_of


def form_of(op):
    """(the op, its name, its overload, have results any bytes, its out variant or None): how it comes on a tape."""
    schema, writing = op._schema, writes(op)
    is_empty = op.overloadpacket.__name__ in EMPTY and not writing
    out = None if writing or is_empty else out_variant(op)
    return op, schema.name.encode(), schema.overload_name.encode(), is_empty, out


def out_variant(op):
    """(overload, its out argument), or None: the variant that takes op's arguments and writes a given result."""
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
            return candidate._schema.overload_name.encode(), outs[0].name.encode()
    return None


FACTORY = frozenset(("dtype", "layout", "device", "pin_memory"))


def writes(op: OpOverload) -> tuple[tuple[int, str], ...]:
    """Positions and names of the arguments that op writes."""
    return tuple(
        (k, a.name) for k, a in enumerate(op._schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    )


def append(op: OpOverload, args: Sequence[object], kwargs: dict[str, object], results: Sequence[torch.Tensor]) -> None:
    """Append op to the tape under way. `results`: the tensors it made, in order."""
    _, name, overload, is_empty, out = FORMS.get(id(op)) or FORMS.setdefault(id(op), form_of(op))
    if is_empty and results and not is_filled():
        return  # its bytes mean nothing; the memory stays
    args, into = tuple(args), tuple(results)
    if out is None or not results or not core.op(name, out[0], args, kwargs, into, out[1]):
        core.op(name, overload, args, kwargs, into)


def is_filled() -> bool:
    """Is memory filled that was asked for and not written yet, so that who reads it gets the same each time?"""
    return torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Append a copy of `source`, which nobody writes, over `target`."""
    core.op(b"aten::copy_", b"", (target, source), {}, ())
