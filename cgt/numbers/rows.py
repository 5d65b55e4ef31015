"""Rows of tensors that a number chooses which changes: `table[t]`, `buffer[i] = x`, `cache[:, :, t] = k`.

Eager makes a view there, whose address the number decides. A recording has an op instead that is given the number: it
copies the row out, or in."""

import operator
import weakref
from collections.abc import Callable

import cgt_core as core
import torch
from cgt_core import CUDA

from ..data import Seen
from ..run.observe import unseen

WHOLE = slice(None)


def can_choose(seen: Seen, t: torch.Tensor) -> bool:
    """May an op choose from this tensor?"""
    if seen.inside or type(t) not in (torch.Tensor, torch.nn.Parameter):
        return False
    here = t.is_cuda == (seen.run.driver == CUDA)
    plain = core.is_plain(t) and t.dim() > 0 and not t.requires_grad
    return here and plain and seen.reason is None and not seen.cuts.bodies


def at(t, dim, index):
    """The index as ops take it. Raises as eager does; that it is in range, and its sign, is the recording's."""
    length = t.shape[dim]
    if not -length <= index < length:
        raise IndexError(f"index {operator.index(index)} is out of bounds for dimension {dim} with size {length}")
    return torch.full((1,), index if index >= 0 else index + length, dtype=torch.int64, device=t.device)


def choose(seen: Seen, t: torch.Tensor, index: int, dim: int = 0) -> torch.Tensor | None:
    """t[index], copied, or of this dimension; None: it cannot be, or has gaps. Nobody may write either of the two
    (live.see_written): eager's is a view."""
    if not (can_choose(seen, t) and t.shape[dim] and t.select(dim, 0).is_contiguous()):
        return None
    trace = seen.live
    row = torch.ops.aten._unsafe_view(t.index_select(dim, at(t, dim, index)), t.shape[:dim] + t.shape[dim + 1 :])
    trace.rows_of += [(core.storage_address(one), core.storage_bytes(one), core.storage_name(one)) for one in (row, t)]
    trace.chosen.add(core.storage_id(row))
    trace.views.append((weakref.ref(row), weakref.ref(t), dim, index.node.value))  # who holds any of them is counted
    return row


def as_views(seen: Seen) -> None:
    """Rows that were copied become the views that eager's are: of a run that goes on, and is not recorded. Nobody has
    written either of the two so far."""
    trace = seen.live
    with unseen(seen), torch.no_grad():
        for *both, dim, index in trace.views:
            row, t = (reference() for reference in both)
            if row is not None and t is not None:
                row.set_(t.select(dim, index))
    for part in (trace.views, trace.rows_of, trace.chosen):
        part.clear()


def put(seen: Seen, stand_in: type, plain: Callable, t: torch.Tensor, index: object, value: object) -> None:
    """t[index] = value: by an op, if one part of the index is ours, or lies between two, and the others are `:`."""
    parts = index if type(index) is tuple else (index,)
    kinds = [(type(one.start), type(one.stop)) if type(one) is slice else (type(one),) for one in parts]
    dims = [dim for dim, kind in enumerate(kinds) if stand_in in kind]
    found = row = None
    may = len(dims) == 1 and can_choose(seen, t) and len(parts) <= t.dim()
    if may and all(type(one) is slice and one == WHOLE for k, one in enumerate(parts) if k != dims[0]):
        (dim,) = dims
        found, shape = rows_at(t, dim, parts[dim], stand_in)
        row = None if found is None else row_of(t, shape, value)
    if found is None or row is None:
        plain(t, index, value)
    else:
        t.index_copy_(dim, found, row if type(parts[dim]) is slice else row.unsqueeze(dim))


def rows_at(t, dim, part, stand_in):
    """(which rows, as ops take them; the shape there). Not of a slice that is cut off, or varies: (None, None)."""
    before, behind = t.shape[:dim], t.shape[dim + 1 :]
    if type(part) is stand_in:
        return at(t, dim, part), (*before, *behind)
    if part.start is None or part.stop is None or part.step is not None:
        return None, None
    n = part.stop - part.start
    length = n.node.value if type(n) is stand_in else n
    if not (n == length and length > 0 and part.start >= 0 and part.stop <= t.shape[dim]):
        return None, None
    first = torch.full((1,), part.start, dtype=torch.int64, device=t.device)
    return torch.arange(length, device=t.device) + first, (*before, length, *behind)


def row_of(t, shape, value):
    """What is to be copied into a row of this shape; or None, where eager's assignment does more than that."""
    if isinstance(value, (int, float)):
        fits = t.is_floating_point() or (isinstance(value, int) and not t.is_complex() and t.dtype != torch.bool)
        return torch.full(shape, value, dtype=t.dtype, device=t.device) if fits else None
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or not core.is_plain(value) or value.requires_grad:
        return None
    while value.dim() > len(shape) and value.shape[0] == 1:
        value = value.squeeze(0)
    alike = value.dtype == t.dtype and value.device == t.device and core.storage_id(value) != core.storage_id(t)
    pairs = zip(reversed(value.shape), reversed(shape), strict=False)
    fits = value.dim() <= len(shape) and all(n in (1, m) for n, m in pairs)
    return value.expand(shape) if alike and fits else None
