"""Views in a differentiable function's result: how autograd made them, and how it makes them again.

A result may be a view of another one or of an argument, both with a history: CLIP's logits and their transpose, a
weight's transpose, the two halves of what was computed. A replay has autograd make the view by the very ops of the
recorded call, which are read off its graph. What it is a view of is today's argument, or what the replay hands out as
its own backward's. (One op for all, as_strided, would give the same view; but its gradient is laid out in another way,
and a matrix product behind it may round in another way.)
"""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import cgt_core as core
import torch

from ..words.private import creation_meta

CLASS, ATEN = torch.Tensor, torch.ops.aten
ANY = 2**63  # numbers of this size and more are negative ones
LEAF = "torch::autograd::AccumulateGrad"  # the node where the graph comes to a leaf

GIVEN = {  # node of the graph -> (op, what the node keeps of the arguments, in order)
    "AliasBackward0": (ATEN.alias.default, ""),
    "AsStridedBackward0": (CLASS.as_strided, "size stride storage_offset"),
    "ConjBackward0": (ATEN._conj.default, ""),
    "DiagonalBackward0": (CLASS.diagonal, "offset dim1 dim2"),
    "NegViewBackward0": (ATEN._neg_view.default, ""),
    "PermuteBackward0": (CLASS.permute, "dims"),
    "SelectBackward0": (CLASS.select, "dim index"),
    "SliceBackward0": (ATEN.slice.Tensor, "dim start end step"),
    "SplitBackward0": (ATEN.split.Tensor, "split_size dim"),
    "SplitWithSizesBackward0": (ATEN.split_with_sizes.default, "split_sizes dim"),
    "SqueezeBackward0": (CLASS.squeeze, ""),
    "SqueezeBackward1": (CLASS.squeeze, "dim"),
    "SqueezeBackward2": (CLASS.squeeze, "dim"),
    "TBackward0": (CLASS.t, ""),
    "TransposeBackward0": (CLASS.transpose, "dim0 dim1"),
    "UnbindBackward0": (CLASS.unbind, "dim"),
    "UnfoldBackward0": (CLASS.unfold, "dimension size step"),
    "UnsafeSplitBackward0": (ATEN.unsafe_split.Tensor, "split_size dim"),
    "UnsafeSplitWithSizesBackward0": (ATEN.unsafe_split_with_sizes.default, "split_sizes dim"),
    "UnsqueezeBackward0": (CLASS.unsqueeze, "dim"),
    "ViewAsComplexBackward0": (ATEN.view_as_complex.default, ""),
    "ViewAsRealBackward0": (ATEN.view_as_real.default, ""),
}
SHAPED = {  # these want the shape of what they make
    "ExpandBackward0": CLASS.expand, "ReshapeAliasBackward0": CLASS.reshape, "ViewBackward0": CLASS.view,
}  # fmt: skip


class Step(NamedTuple):
    """An op on one of the values so far, to which come those that it makes."""

    of: int
    op: Callable[..., Any]
    given: tuple


class Parts(NamedTuple):
    """Views, and what makes them."""

    numbers: dict[int, int]  # id of a view -> which of the values it is
    bases: list[torch.Tensor]  # the first values
    steps: tuple[Step, ...]
    nodes: list[Any]  # of the graph: one for each step


def find(views: list[torch.Tensor], bases: list[torch.Tensor]) -> Parts:
    """Those of the views that autograd made of these bases by ops that can be told; in the order in which the graph
    grew, since gradients that meet are summed in it."""
    held = [t.grad_fn for t in bases]  # ids are of what is there
    ends = {place_of(t): t for t in bases}
    chains = {id(t): chain for t in views if (chain := chain_of(t, ends)) is not None}
    used = list({id(base): base for _, base in chains.values()}.values())
    nodes = {id(node): node for chain, _ in chains.values() for node, _ in chain}
    value, steps, count = {place_of(t): k for k, t in enumerate(used)}, [], len(used)
    order = sorted(nodes.values(), key=lambda node: node._sequence_nr())
    for node in order:
        steps.append(Step(value[edge_of(*node.next_functions[0])], *step_of(node)))
        made = len(node._input_metadata)
        value |= {(id(node), k): count + k for k in range(made)}
        count += made
    del held
    return Parts({t: value[edge_of(*chain[0])] for t, (chain, _) in chains.items()}, used, tuple(steps), order)


def place_of(t):
    """Where in the graph gradients of t come to."""
    return (LEAF, id(t)) if t.grad_fn is None else (id(t.grad_fn), t.output_nr)


def edge_of(node, nr):
    """The same, as an edge that leads there tells it."""
    return (LEAF, id(node.variable)) if node.name() == LEAF else (id(node), nr)


def chain_of(t, ends):
    """([(node, number), ...], the tensor at whose place they end), from t on; None: there are others on the way, or
    somebody hears of the gradients."""
    chain, node, nr = [], t.grad_fn, t.output_nr
    while node is not None and edge_of(node, nr) not in ends:
        if step_of(node) is None:
            return None
        chain.append((node, nr))
        node, nr = node.next_functions[0]
    if node is None or not chain or core.graph_heard(t, len(chain)):
        return None
    return chain, ends[edge_of(node, nr)]


def step_of(node):
    """(op, what it was given besides the tensor); None: it cannot be told."""
    name = node.name()
    if name in SHAPED:
        return SHAPED[name], (tuple(node._input_metadata[0].shape),)
    if name not in GIVEN:
        return None
    op, names = GIVEN[name]
    return op, tuple(signed(getattr(node, f"_saved_{name}")) for name in names.split())


def signed(value):
    """What an op was given, from how its node shows it."""
    if isinstance(value, tuple):
        return tuple(map(signed, value))
    return value - 2 * ANY if value is not None and value >= ANY else value


def are_right(parts: Parts, views: list[torch.Tensor]) -> bool:
    """Do the steps make these views again?"""
    values = list(parts.bases)
    make(values, parts.steps)
    return all(alike(t, values[parts.numbers[id(t)]]) for t in views if id(t) in parts.numbers)


def alike(t, made):
    """Is what was made all that t is?"""
    same = t._base is made._base and core.address(t) == core.address(made) and made.grad_fn is not None
    facts = [
        (x.dtype, x.shape, x.stride(), x.storage_offset(), x.is_conj(), x.is_neg(), creation_meta(x), x.output_nr)
        for x in (t, made)
    ]
    return same and facts[0] == facts[1] and t.grad_fn.name() == made.grad_fn.name()


def is_met(parts: Parts, results: list[torch.Tensor], since: int, first: Collection[int]) -> bool:
    """Has the graph of these results, made since that number of autograd's, to do with the views, or later than the
    first view with what it is of? Gradients would come to a view that its hooks do not see, or be summed in another
    order, since a replay makes views behind all the rest. `first`: ids of what may be met later. That is a result
    itself, and the sum another one only if it, its view and a result that was made of it all get gradients."""
    held = [t.grad_fn for t in parts.bases]
    begun: dict[tuple, int] = {}
    ends = [place_of(t) for t in parts.bases if id(t) not in first]
    for node in parts.nodes:
        begun.setdefault(edge_of(*node.next_functions[0]), node._sequence_nr())
    seen = {id(t.grad_fn): t.grad_fn for t in results}
    todo = list(seen.values())
    while todo:
        node = todo.pop()
        for other, nr in node.next_functions:
            if other is None:
                continue
            place = edge_of(other, nr)
            if place in ends and begun[place] < node._sequence_nr():
                return True
            if id(other) not in seen and since <= other._sequence_nr() < ANY:
                seen[id(other)] = other
                todo.append(other)
    del held
    return not seen.keys().isdisjoint(map(id, parts.nodes))


def make(values: list[torch.Tensor], steps: tuple[Step, ...]) -> None:
    """Bring to the values what the steps make of them."""
    if not torch.is_grad_enabled():  # which is the caller's affair
        with torch.enable_grad():
            make(values, steps)
        return
    for of, op, given in steps:
        made = op(values[of], *given)
        if isinstance(made, torch.Tensor):
            values.append(made)
        else:
            values.extend(made)
