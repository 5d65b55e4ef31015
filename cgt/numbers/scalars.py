"""Where a number lies among the arguments of kernels. A CUDA graph has no name for them: what an op makes of its
number, on its way into a kernel, is known to nobody but the op.

So the op is captured again, with other numbers, behind the nodes that it made; nothing runs, and these nodes are taken
out before the graph is instantiated. What differs between the captures with one number and with another, and never
between two with the same, comes of the number; each such word must be one that a known form makes of it, at every
number tried. What differs between captures with the same number is padding that nobody wrote. An op of which any other
byte moves with its number cannot be told, and the recording is for that number."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cgt_core as core
import torch
from cgt_core import AS_F64, INVERSE_OF_F32, NONE

from ..data import Seen
from ..run.observe import tensors_in, unseen
from ..words.private import OpOverload
from .standins import Taken

# In which order the op is captured with its own numbers (0) and the others: what the stack and the heap keep of one
# capture must not come again with the same number. Measured on an H100: with an order that repeats, padding of five ops
# in sixty did. A round of one capture each comes first: more of them tell padding from what depends on a number, and
# are made where something is not explained.
ROUNDS = ((0, 1, 2), (2, 0, 1, 1, 2, 0, 2, 1, 0))
KERNEL = 0  # kind of a node, as the core tells it


class Shot(NamedTuple):
    """A node as one capture made it."""

    handle: int
    kind: int  # KERNEL, or another one
    shape: tuple  # function and dimensions, or what else must be the same
    params: tuple  # (offset, bytes) of each argument; () where they cannot be seen


class Word(NamedTuple):
    """Bytes of a kernel's arguments that come of a number, or are an address in a slot (addresses.py)."""

    node: int  # which of the op's
    offset: int
    how: int  # form of the number, of the core; bytes behind where the slot begins
    of: int  # which of the op's numbers, or slots


def others(value, k):
    """Two more numbers of the kind, to tell the k-th from its neighbours: in range for all signed types, and of many
    different bits. (One is negative: else 32 bits beside a field that is 0 would look like 64.)"""
    if type(value) is int:
        return 21 + k % 40, -107 + k % 40
    return 0.6180339887498949 + 0.0078125 * k, 1.4142135623730951 + 0.01171875 * k


def explain(main, shots, values):
    """[Word]: where the numbers lie among the arguments of the nodes `main`; or None, if that cannot be told. `shots`:
    (which, nodes) of captures of the same op, with the numbers values[which]; values[0] are those of main."""
    if any(node.kind == KERNEL and not node.params for node in main):
        return None
    words = words_in(main, shots, functools.partial(words_of, values=values))
    return words if words is not None and {word.of for word in words} == set(range(len(values[0]))) else None


def words_in(main: list[Shot], shots: list[tuple], words_of: Callable) -> list[Word] | None:
    """What words_of tells of the bytes of each argument that are others in other captures, and of those; None: it
    cannot tell of one, or these captures did not make the same nodes."""
    made = [main, *(nodes for _, nodes in shots)]
    shapes = [[(s.kind, s.shape, [(at, len(data)) for at, data in s.params]) for s in nodes] for nodes in made]
    if any(shape != shapes[0] for shape in shapes):
        return None
    words = []
    for n, node in enumerate(main):
        for k, (offset, data) in enumerate(node.params):
            seen = [(which, nodes[n].params[k][1]) for which, nodes in shots]
            found = [] if all(one == seen[0][1] for _, one in seen) else words_of(data, seen)
            if found is None:
                return None
            words += [Word(n, offset + at, *what) for at, *what in found]
    return words


def words_of(data, seen, values):
    """[(offset, form, number)] of one argument's bytes, or None. `seen`: (which, bytes) of the other captures."""
    by = {which: [one for w, one in seen if w == which] for which in range(len(values))}
    moves = [k for k in range(len(data)) if is_told(data, by, k)]
    found = []
    while moves:
        word = next((w for size in (8, 4, 2) for w in fitting(data, by, values, moves[0], size)), None)
        if word is None:
            return None
        at, size, form, number = word
        found.append((at, form, number))
        moves = [k for k in moves if not at <= k < at + size]
    return found


def is_told(data, by, k):
    """Does byte k depend on the numbers, and on nothing else? Else it is padding, or the same with all. (An address of
    a result is another one in the op's own capture, `data`, and the same in all others.)"""
    told = [{one[k] for one in ones} for ones in by.values()]
    return len(set().union(*told)) > 1 and all(len(values) == 1 for values in told) and told[0] == {data[k]}


def fitting(data, by, values, k, size):
    """Words of this size at byte k that a form makes of a number in every capture: (offset, size, form, number)."""
    at = k - k % size
    if at + size > len(data):
        return
    for form in range(AS_F64, INVERSE_OF_F32 + 1):
        for number in range(len(values[0])):
            wants = [core.form_of(form, those[number]) for those in values]
            if None in wants or len(wants[0]) != size or data[at : at + size] != wants[0]:
                continue
            if all(one[at : at + size] == want for want, ones in zip(wants, by.values(), strict=True) for one in ones):
                yield at, size, form, number


def record(seen: Seen, op: OpOverload, args: Sequence, kwargs: dict, numbers: Taken, before: int) -> bool:
    """The op under way was captured, as the nodes behind `before`: have replays tell its kernels their numbers. False
    if it cannot be told where these lie."""
    rows = sorted({row for _, _, row in numbers})
    told = [seen.live.steps[row].value for row in rows]
    values = [told, *([others(value, k)[which] for k, value in enumerate(told)] for which in (0, 1))]
    main = shots_from(before)
    if not main:  # of nothing
        return True

    def given(which):
        return substitute(op, args, kwargs, numbers, dict(zip(rows, values[which], strict=True)))

    words = told_by(seen, op, given, ROUNDS, functools.partial(explain, main, values=values))
    for n, node in enumerate(main) if words else ():
        mine = [(word.offset, word.how, rows[word.of], told[word.of]) for word in words if word.node == n]
        if mine:
            core.scalar_words(node.handle, mine)
    return words is not None


def told_by(seen: Seen, op: OpOverload, given: Callable, rounds: tuple, explain: Callable) -> list | None:
    """What `explain` tells of captures of the op in vain, with arguments given(which), in as many rounds; or None."""
    shots = []
    for order in rounds:
        if not shoot(seen, op, given, order, shots):
            break
        words = explain(shots=shots)
        if words is not None:
            return words
    return None


def shoot(seen, op, given, order, shots):
    """Capture the op once for each of `order`, behind the nodes that stay. False: some arguments do not go."""
    mark, here, apart = core.graph_mark(), core.graph_length(), []
    try:
        with unseen(seen):
            for which in order:
                apart.append(torch.empty(len(shots)))  # moves the heap on
                args, kwargs = given(which)
                given_tensors = tensors_in(kwargs.values(), tensors_in(args, []))
                written = [(t, t._version) for t in given_tensors if not t.is_inference()]
                here = core.graph_length()
                try:
                    op(*args, **kwargs)
                finally:
                    for t, version in written:
                        core.set_version(t, version)
                shots.append((which, shots_from(here)))
                core.graph_back(here, mark)
    except (RuntimeError, OverflowError):
        core.graph_back(here, mark)
        return False
    return True


def shots_from(first: int) -> list[Shot]:
    return [Shot(*one) for one in core.graph_shots(first)]


def substitute(op: OpOverload, args: Sequence, kwargs: dict, numbers: Taken, values: dict) -> tuple[list, dict]:
    """The op's arguments, with other numbers."""
    names = [a.name for a in op._schema.arguments]
    args, kwargs = list(args), dict(kwargs)
    given: Any  # one of these two
    for k, part, row in numbers:
        given, key = (args, k) if k < len(args) else (kwargs, names[k])
        if part == NONE:
            given[key] = values[row]
        else:
            given[key] = [values[row] if j == part else x for j, x in enumerate(given[key])]
    return args, kwargs
