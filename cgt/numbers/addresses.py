"""Slots that lie elsewhere at each call, without a copy. On the host the tape's storage is pointed at today's memory. A
CUDA graph's nodes were told an address each, somewhere among their arguments, and a replay tells them another one.

Where that is, is found as numbers are (scalars.py): each op that works on a slot's copy is captured again, on the copy
and on the user's own memory, behind the nodes that it made; nothing runs, and these nodes are taken out. A word that is
an address in the copy in all captures of the one kind, and the same address in the user's memory in all of the other,
is an address in the slot. What differs between captures of one kind is padding that nobody wrote; any other byte that
differs between the kinds keeps the slot copied. So does an address in the copy that no op accounts for."""

import bisect
import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import cgt_core as core
import torch
from cgt_core import HOST

from ..data import Plan, Seen, State
from ..run.observe import as_views
from ..words import options
from ..words.private import OpOverload
from .scalars import KERNEL, shots_from, told_by, words_in

# In which order the op is captured on the copy (0) and on the user's memory (1), in rounds: another one is made where
# something is left that no address explains, since what the heap and the stack leave in padding stays for some captures
# (see scalars.ROUNDS).
ROUNDS = ((0, 1), (1, 0, 1, 0, 0, 1), (0, 1, 1, 0, 1, 0, 0, 1), (1, 0, 0, 0, 1, 1, 1, 0), (0, 1, 0, 1, 1, 1, 0, 0))
COPY = 1  # kind of a node, beside KERNEL, whose addresses are told
FILL = 2  # and of one whose address can be seen


class Span(NamedTuple):
    """Where a slot's copy lies, and the user's memory."""

    copy: int
    nbytes: int
    user: int


class Movable(NamedTuple):
    """A copied slot that may turn out not to need its copy."""

    swap: NamedTuple  # observe's
    copy: int  # in the core
    most: float  # nodes that may be told an address: more of them cost more than a copy
    words: list  # (handle of a node, offset, shift)
    looked_at: set  # handles of the nodes of ops on it: what else names it there is padding
    told: set  # (op, kernel) of these


def begin(state: State, plan: Plan, seen: Seen, copies: dict[int, int]) -> dict[int, Movable]:
    """{memory of the copy: Movable} of the slots that a recording may be told the addresses of. A backward lets go of
    what it is given while it runs, and results that are lent may lie where the recording writes."""
    if plan.graph is not None or state.opts.outputs != "rescue" or state.opts.inputs != "auto":
        return {}
    untold, ours = state.learnt.moves.untold, plan.driver != HOST
    mine = {k: copy for k, copy in copies.items() if plan.paths[k] not in untold and plan.tensors[k].is_cuda == ours}
    slots = {id(plan.tensors[k]): copy for k, copy in mine.items()}
    return {
        sid: Movable(swap, slots[id(swap.leaf)], most_nodes(swap, id(swap.leaf) in plan.carries), [], set(), set())
        for sid, swap in seen.copied.buffers.items()
        if id(swap.leaf) in slots
    }


def most_nodes(swap, written):
    """To tell a node an address takes 0.2 us. A copy takes 0.4 us, a kernel of 1.5 us, and 256 KiB there and back 0.2
    us of an H100's memory; twice that if it goes both ways. Where it cannot there is no choice."""
    n = 8 + (swap.hi - swap.lo >> 18)
    return n if not written else 2 * n if has_way_back(swap.leaf) else math.inf


def has_way_back(t: torch.Tensor) -> bool:
    """May a copy of it be copied back behind all else? Its bytes must be its own, gaps belong to others."""
    return core.span(t) == t.numel() * t.element_size() <= options.MAX_CARRIED[t.device.type == "cuda"]


def touched(seen: Seen, tensors: Iterable[torch.Tensor]) -> list[int]:
    """Those of these slots whose copies an op is given."""
    return [core.storage_id(t) for t in tensors if core.storage_id(t) in seen.copied.movable]


def note(seen: Seen, op: OpOverload, memory: Iterable[int]) -> None:
    """On the host an op works where a copy's storage points."""
    for sid in memory:
        seen.copied.movable[sid].told.add((str(op), ()))


def stay(seen: Seen, memory: Iterable[int]) -> None:
    """Something is done with these copies that no replay could be told of: they stay."""
    for sid in memory:
        seen.copied.movable.pop(sid, None)


def record(seen: Seen, op: OpOverload, args: Sequence, kwargs: dict, before: int, end: int, memory: list[int]) -> None:
    """The op under way was captured, from `before` to `end`: note where these copies' addresses lie, or let stay."""
    main = shots_from(before)[: end - before]
    if not main:  # a view
        return
    slots = [seen.copied.movable[sid] for sid in dict.fromkeys(memory)]
    spans = [Span(core.address(one.swap.buffer), one.swap.hi - one.swap.lo, one.swap.lo) for one in slots]

    def given(which):
        place, done = functools.partial(placed, seen, which), {}
        return as_views(args, place, done), {name: as_views(x, place, done) for name, x in kwargs.items()}

    words = told_by(seen, op, given, ROUNDS, functools.partial(explain, main, spans=spans))
    # A copy is told anew on the GPU that makes it.
    if words is None or (seen.run.others and any(node.kind == COPY for node in main)):
        stay(seen, memory)
        return
    for k, one in enumerate(slots):
        one.words.extend((main[word.node].handle, word.offset, word.how) for word in words if word.of == k)
        one.looked_at.update(node.handle for node in main)
        one.told.update((str(op), node.shape[:2]) for node in main)
        if len({handle for handle, *_ in one.words}) > one.most:
            stay(seen, [core.storage_id(one.swap.buffer)])


def placed(seen, which, t):
    """Where a tensor that lies in a copy is to lie: there (0) or in the user's memory (1). Either way it is another
    one: no kind of capture may leave more on the heap than the other."""
    movable = seen.copied.movable.get(core.storage_id(t))
    swap = movable and movable.swap
    return swap and (swap.leaf if which else swap.buffer, core.address(t) - core.address(swap.buffer))


def explain(main, shots, spans):
    """[Word]: where addresses in the slots, of which `spans` are, lie among the arguments of the nodes `main`; or None.
    `shots`: (which, nodes) of captures of the same op, on the copies (0) as `main`, or on the user's memory (1)."""
    if any(node.kind not in (KERNEL, COPY, FILL) or not node.params for node in main):
        return None
    words = words_in(main, shots, functools.partial(words_of, spans=spans))
    return None if words is None or any(main[word.node].kind == FILL for word in words) else words


def words_of(data, seen, spans):
    """[(offset, shift, slot)] of one argument's bytes, or None. `seen`: (which, bytes) of the other captures."""
    by = [[one for which, one in seen if which == kind] for kind in (0, 1)]
    found, end = [], 0
    for k in range(len(data)):
        copy, user = ({one[k] for one in ones} for ones in by)
        if k < end or len(copy) > 1 or len(user) > 1 or copy == user:  # part of a word, padding, or no address of these
            continue
        word = word_at(data, by, k - k % 8, spans)
        if word is None:
            return None
        found.append(word)
        end = word[0] + 8
    return found


def word_at(data, by, at, spans):
    """(offset, shift, slot) of the 8 bytes there, or None: they are no address in a slot."""
    kinds = [{one[at : at + 8] for one in ones} for ones in by]
    if at + 8 > len(data) or any(len(words) > 1 for words in kinds) or data[at : at + 8] not in kinds[0]:
        return None
    copy, user = (int.from_bytes(next(iter(words)), "little") for words in kinds)
    for slot, one in enumerate(spans):
        if 0 <= copy - one.copy <= one.nbytes and copy - one.copy == user - one.user:
            return at, copy - one.copy, slot
    return None


def is_whole(seen: Seen) -> bool:
    """Is the recording one graph, of which nothing ran so far?"""
    return not (seen.reads.values or seen.cuts.bodies or core.segments_ran())


def bind(seen: Seen, plan: Plan) -> set[int]:
    """The slots that are not copied after all, behind all that is recorded but their way back."""
    bound, movable = set(), {one.copy: one for one in seen.copied.movable.values()}
    if not movable or seen.reason is not None or not is_whole(seen):
        return bound
    says = core.graph_words() if plan.driver != HOST else ([], set())
    for k in plan.copied if says is not None else ():
        one = movable.get(seen.copied.copies[k])
        if one is None or id(one.swap.leaf) in seen.copied.mirrored or core.storage_id(one.swap.leaf) in seen.raw:
            continue
        if core.storage_id(one.swap.leaf) in seen.written and id(one.swap.leaf) not in seen.copied.carried:
            continue
        if is_named(one, *says):
            continue
        by_node = {}
        for handle, offset, shift in one.words:
            by_node.setdefault(handle, []).append((offset, one.copy, shift))
        for handle, words in by_node.items():
            core.address_words(handle, words)
        core.bind(one.copy)
        bound.add(k)
        seen.copied.told.update(one.told)
    return bound


def is_named(one: Movable, words: list[tuple[int, int]], opaque: set[int]) -> bool:
    """Does a node name an address in the copy, but for ops on it? `words`, `opaque`: of core.graph_words()."""
    lo = core.address(one.swap.buffer)
    first, last = (bisect.bisect_left(words, (at,)) for at in (lo, lo + core.span(one.swap.leaf)))
    return not one.looked_at.issuperset(opaque) or any(node not in one.looked_at for _, node in words[first:last])
