"""A recording that is told where its inputs lie: is its first replay with one of them elsewhere what eager is?

The words of addresses are explained byte by byte (addresses.py); this is the look at values besides. It is taken where
a kernel is told an address that none was told before in this process, and the call does no more than to return results:
so there is nothing to be put back, and nothing that another thread could do meanwhile is lost. With `CGT_VERIFY=1` it
is taken for every such recording, from the same state if it changes any (audit.py); with 0 for none. What eager itself
does not do twice proves nothing."""

import contextlib
import functools
from collections.abc import Callable

import cgt_core as core
from cgt_core import REBOUND

from ..data import Audits, Call, Draft, Seen, State
from ..make.plan import flattened
from ..words import errors, options, pytree
from . import audit

PROVEN = set()  # (op, kernel) that were told addresses, and right
EXACT = Audits(0, 0)
REBINDS = 5  # in fn_counts


def changes(seen: Seen, draft: Draft) -> bool:
    """Does it do more than to return results?"""
    return bool(draft.effects or seen.random or seen.reads.values or seen.cuts.islands or seen.acts or seen.own)


def begin(state: State, node: int) -> None:
    """A recording was made."""
    kept = state.keep[node]
    if kept.told and (options.VERIFY or (options.VERIFY is None and not kept.changes and not kept.told <= PROVEN)):
        core.node_doubt(node)


def run(call: Call, node: int, replay: Callable[[], object], drop: Callable[..., None]) -> object:
    """A call for which that recording is told of another address; its result. `drop(node, call, reason, untold)`: do
    without it, and tell none of these paths again."""
    state, scope, kept = call.state, None, call.state.keep.get(node)
    # Another thread dropped it; or other processes would wait for a second run.
    if kept is None or state.learnt.exchanges:
        return replay()
    with contextlib.suppress(pytree.Incomparable):
        call = flattened(call)
        stays = state.graph is None and not kept.changes
        scope = audit.Scope(call.device, *[[] for _ in range(9)]) if stays else audit.find_scope(call, node)
    if not isinstance(scope, audit.Scope):
        return replay()
    paths = [
        path for path, slot in zip(kept.slot_paths, core.node_facts(node).slots, strict=True) if slot.binding == REBOUND
    ]
    blame = functools.partial(errors.verified, state.name, few(paths), few(sorted({op for op, _ in kept.told})))
    rebinds, wrong = core.fn_counts(state.f)[REBINDS], state.mismatches
    compared, result = audit.compare(call, node, scope, replay, blame, functools.partial(drop, untold=paths), EXACT)
    if compared and core.fn_counts(state.f)[REBINDS] > rebinds and state.mismatches == wrong:
        PROVEN.update(kept.told)
    return result


def few(names):
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
