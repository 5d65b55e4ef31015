"""Ops on many tensors whose kernels find these in a table, which the host fills and sends along: a capture would have
it sent from memory that others use by then, and PyTorch asks events about that memory, which no capture allows. In one,
the same bytes come by copies (fully_shard splits what it gathered by the first, and puts gradients side by side by the
second)."""

import cgt_core as core
import torch

from ..words.private import OpOverload

aten = torch.ops.aten


def split(source, sizes, dim=0, *, out):
    for part, to in zip(aten.split_with_sizes.default(source, sizes, dim), out, strict=True):
        aten.copy_.default(to, part)


def chunk_cat(tensors, dim, num_chunks, *, out):
    """Each in so many chunks along its first dimension, zeros behind the last; all the first ones, then all the second
    ones."""
    rows, at = aten.view.default(out, [num_chunks, out.numel() // num_chunks]), 0
    for t in tensors:
        each = -(-t.shape[0] // num_chunks) * (t.numel() // t.shape[0])
        whole, rest = divmod(t.numel(), each)
        flat = aten.reshape.default(t, [-1])
        if whole:
            to = aten.slice.Tensor(aten.slice.Tensor(rows, 1, at, at + each), 0, 0, whole)
            aten.copy_.default(to, aten.view.default(aten.slice.Tensor(flat, 0, 0, whole * each), [whole, each]))
        if rest:
            row = aten.select.int(rows, 0, whole)
            last = aten.slice.Tensor(flat, 0, whole * each, t.numel())
            aten.copy_.default(aten.slice.Tensor(row, 0, at, at + rest), last)
            aten.zero_.default(aten.slice.Tensor(row, 0, at + rest, at + each))
        if whole + (rest > 0) < num_chunks:
            columns = aten.slice.Tensor(rows, 1, at, at + each)
            aten.zero_.default(aten.slice.Tensor(columns, 0, whole + (rest > 0), num_chunks))
        at += each


INSTEAD: dict = {
    "fsdp::split_with_sizes_copy": split, "aten::split_with_sizes_copy.out": split, "fsdp::chunk_cat": chunk_cat,
    "aten::_chunk_cat.out": chunk_cat,
}  # fmt: skip


def is_one(op: OpOverload, args: tuple, kwargs: dict) -> bool:
    """Can we do it by copies?"""
    instead = INSTEAD.get(op.name())
    if instead is split:
        return True
    if instead is None or args[1] or not all(t.dim() and t.numel() for t in args[0]):
        return False
    padded = sum(-(-t.shape[0] // args[2]) * args[2] * (t.numel() // t.shape[0]) for t in args[0])
    out = kwargs["out"]
    return out.is_contiguous() and out.numel() == padded


def record(op: OpOverload, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Have the op under way done so; the tensors that it returns."""
    INSTEAD[op.name()](*args, **kwargs)
    results = [kwargs["out"]] if op._schema.returns else []
    core.done(results)
    return results
