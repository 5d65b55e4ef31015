"""Views in a differentiable function's result: how autograd made them, and how it makes them again.

A result may be a view of another one or of an argument, both with a history: CLIP's logits and their transpose, a
weight's transpose, the two halves of what was computed. A replay has autograd make the view by the very ops of the
recorded call, which are read off its graph, of today's argument or of what it hands out as its own backward's. (One op
for all, as_strided, would give the same view; but its gradient is laid out in another way, and a matrix product behind
it may round in another way.)
"""

import itertools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import cgt_core as core
import torch

from ..words.private import creation_meta

ANY = 2**63  # numbers of this size and more are negative ones
LEAF = "torch::autograd::AccumulateGrad"  # the node where the graph comes to a leaf
ATEN = torch.ops.aten
OPS = {
    op._schema.name.partition("::")[2].lstrip("_").title().replace("_", "") + f"Backward{k}": op
    for k, ops in enumerate([
        (
            ATEN.alias.default, ATEN.as_strided.default, ATEN._conj.default, ATEN.diagonal.default, ATEN.expand.default,
            ATEN._neg_view.default, ATEN.permute.default, ATEN.select.int, ATEN.slice.Tensor, ATEN.split.Tensor,
            ATEN.split_with_sizes.default, ATEN.squeeze.default, ATEN.t.default, ATEN.transpose.int, ATEN.unbind.int,
            ATEN.unfold.default, ATEN.unsafe_split.Tensor, ATEN.unsafe_split_with_sizes.default, ATEN.unsqueeze.default,
            ATEN.view.default, ATEN.view_as_complex.default, ATEN.view_as_real.default,
        ),
        (ATEN.squeeze.dim,),
        (ATEN.squeeze.dims,),
    ])
    for op in ops
} | {"ReshapeAliasBackward0": ATEN.reshape.default}  # fmt: skip


class Step(NamedTuple):
    """An op that is applied to value number `of`; its results are the next values."""

    of: int
    op: Callable[..., Any]
    given: list


class Parts(NamedTuple):
    """Views, and what makes them."""

    numbers: dict[int, int]  # id of a view -> which of the values it is
    bases: list[torch.Tensor]  # the first values
    steps: list[Step]
    nodes: list[Any]  # of the graph: one for each step


def find(views: list[torch.Tensor], bases: list[torch.Tensor]) -> Parts:
    """Those of the views that autograd made of these bases by ops that can be told; in the order in which the graph
    grew, since gradients that meet are summed in it."""
    held = [t.grad_fn for t in bases]  # ids are of what is there
    ends = {place_of(t): t for t in bases}
    chains = {id(t): chain for t in views if (chain := chain_of(t, ends))}
    used = list({id(ends[chain[-1]]): ends[chain[-1]] for chain in chains.values()}.values())
    nodes = {id(node): node for *chain, _ in chains.values() for node, _ in chain}
    order, count = sorted(nodes.values(), key=lambda node: node._sequence_nr()), itertools.count()
    value = {place_of(t): next(count) for t in used}
    value |= {(id(node), k): next(count) for node in order for k in range(len(node._input_metadata))}
    steps = [Step(value[edge_of(*node.next_functions[0])], *op_of(node)) for node in order]
    del held
    return Parts({t: value[edge_of(*chain[0])] for t, chain in chains.items()}, used, steps, order)


def place_of(t):
    """Where in the graph gradients of t come to."""
    return (LEAF, id(t)) if t.grad_fn is None else (id(t.grad_fn), t.output_nr)


def edge_of(node, nr):
    """The same, as an edge that leads there tells it."""
    return (LEAF, id(node.variable)) if node.name() == LEAF else (id(node), nr)


def chain_of(t, ends):
    """[(node, number), ..., the place where they end], from t on; None: others are on the way, or somebody hears."""
    chain, node, nr = [], t.grad_fn, t.output_nr
    while node is not None and edge_of(node, nr) not in ends:
        if op_of(node) is None:
            return None
        chain.append((node, nr))
        node, nr = node.next_functions[0]
    if node is None or not chain or core.graph_heard(t, len(chain)):
        return None
    return [*chain, edge_of(node, nr)]


def op_of(node):
    """(op, what it was given besides the tensor, as its node keeps it); None: it cannot be told."""
    op = OPS.get(node.name())
    if op is None:
        return None
    made = {name: list(node._input_metadata[0].shape) for name in ("size", "shape")}
    names = [argument.name for argument in op._schema.arguments[1:] if argument.name != "implicit"]
    return op, [signed(getattr(node, f"_saved_{name}", made.get(name))) for name in names]


def signed(value):
    """What an op was given, from how its node shows it."""
    if isinstance(value, (tuple, list)):
        return list(map(signed, value))
    return value - 2 * ANY if value is not None and value >= ANY else value


def are_right(parts: Parts, views: list[torch.Tensor]) -> bool:
    """Do the steps make these views again?"""
    values = list(parts.bases)
    make(values, parts.steps)
    made = [(t, values[parts.numbers[id(t)]]) for t in views if id(t) in parts.numbers]
    return all(t._base is other._base and facts_of(t) == facts_of(other) for t, other in made)


def facts_of(t):
    """What is told of a view."""
    of_memory = core.address(t), t.dtype, t.shape, t.stride(), t.is_conj(), t.is_neg(), creation_meta(t)
    return *of_memory, t.output_nr, t.grad_fn and t.grad_fn.name()


def is_met(parts: Parts, results: list[torch.Tensor], since: int, free: Collection[int]) -> bool:
    """Does the graph of these results go through one of the views, or use the base of a view after that view was made?
    A replay makes the views last, so hooks of a view would miss gradients, or gradients would be summed in another
    order. `since`: the part of the graph that counts begins at this sequence number. `free`: ids of bases that may be
    used later: they are results, and the order of the sum differs only where such a base, its view and what was made
    of the base later all get gradients."""
    held = [t.grad_fn for t in parts.bases]
    ends = {place_of(t) for t in parts.bases if id(t) not in free}
    first = {edge_of(*node.next_functions[0]): node._sequence_nr() for node in reversed(parts.nodes)}
    todo, seen = [t.grad_fn for t in results], {}
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen[id(node)] = node
        for other, nr in node.next_functions:
            place = other and edge_of(other, nr)
            if place in ends and first[place] < node._sequence_nr():
                return True
            if other is not None and since <= other._sequence_nr() < ANY:
                todo.append(other)
    del held
    return not seen.keys().isdisjoint(map(id, parts.nodes))


def make(values: list[torch.Tensor], steps: list[Step]) -> None:
    """Bring to the values what the steps make of them."""
    if not torch.is_grad_enabled():  # outside of the function
        core.with_grad(lambda: make(values, steps))
        return
    for of, op, given in steps:
        made = op(values[of], *given)
        values.extend((made,) if isinstance(made, torch.Tensor) else made)
