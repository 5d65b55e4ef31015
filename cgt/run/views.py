"""Views of a differentiable function's results: how autograd made them, and how it makes them again.

A result may be a view of another, both with a history: CLIP's logits and their transpose, a decoder's states and the
last of them. A replay hands out the one as its own backward's, and has autograd make the other from it by the very ops
of the recorded call, which are read off its graph. (One op for all, as_strided, would give the same view; but its
gradient is laid out in another way, and a matrix product behind it may round in another way.)
"""

from collections.abc import Callable

import torch

CLASS = torch.Tensor
ANY = 2**63  # numbers of this size and more are negative ones


def numbers(node, names):
    """What an op was given, as its node of the graph keeps it."""
    return tuple(n - 2 * ANY if n >= ANY else n for n in (getattr(node, f"_saved_{name}") for name in names.split()))


GIVEN = {  # node of the graph -> (op, what the node keeps of the arguments, in order)
    "TBackward0": (CLASS.t, ""),
    "TransposeBackward0": (CLASS.transpose, "dim0 dim1"),
    "SliceBackward0": (torch.ops.aten.slice.Tensor, "dim start end step"),
    "SelectBackward0": (CLASS.select, "dim index"),
    "UnsqueezeBackward0": (CLASS.unsqueeze, "dim"),
    "SqueezeBackward0": (CLASS.squeeze, ""),
    "SqueezeBackward1": (CLASS.squeeze, "dim"),
    "DiagonalBackward0": (CLASS.diagonal, "offset dim1 dim2"),
}
SHAPED = {"ViewBackward0": CLASS.view, "ExpandBackward0": CLASS.expand}  # these want the shape of what they make


def ops_of(t: torch.Tensor, base: torch.Tensor) -> tuple[tuple[Callable[..., torch.Tensor], tuple], ...] | None:
    """((op, arguments), ...) that make t of `base`, whose view it is; None if that cannot be told."""
    ops, node = [], t.grad_fn
    shape: tuple[int, ...] | None = tuple(t.shape)
    while node is not base.grad_fn:
        name, inputs = node.name(), node.next_functions
        if name in GIVEN:
            op, names = GIVEN[name]
            ops.append((op, numbers(node, names)))
        elif name == "PermuteBackward0":
            ops.append((CLASS.permute, (tuple(node._saved_dims),)))
        elif name in SHAPED and shape is not None:
            ops.append((SHAPED[name], (shape,)))
        else:
            return None
        shape = getattr(node, "_saved_self_sym_sizes", None)
        if len(inputs) != 1 or inputs[0][0] is None:
            return None
        node, at = inputs[0]
        if node is base.grad_fn and at != base.output_nr:
            return None
    return tuple(reversed(ops))


def make(t: torch.Tensor, ops: tuple[tuple[Callable[..., torch.Tensor], tuple], ...]) -> torch.Tensor:
    """The view of t that these ops make."""
    for op, given in ops:
        t = op(t, *given)
    return t
