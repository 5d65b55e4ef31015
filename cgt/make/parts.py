"""Which results autograd makes again: views of arguments, of other results, of what several of them are views of."""

import collections

import cgt_core as core
import torch

from ..data import Seen
from ..run import views
from ..words import errors
from . import trace

NONE_MADE = views.find([], [])


def is_pending(seen: Seen, t: torch.Tensor) -> bool:
    """Does t require grad by a graph whose backward has not run inside the call?"""
    return t.requires_grad and t.grad_fn is not None and not trace.is_spent(t, seen.run.since)


def find(seen: Seen, results: list[tuple[str, torch.Tensor]], near: dict, slots: list) -> views.Parts | str:
    """What makes them; or why a replay could not. `results`: (path, tensor) of those that are no arguments. `near`,
    `slots`: as of Draft."""
    roots = {id(t): t for _, t in results if type(t) is torch.Tensor and is_pending(seen, t)}
    if not roots:
        return NONE_MADE
    given = {core.storage_id(t): near.get(core.storage_id(t), ()) for _, t in results}
    shared = {k: t for k, t in roots.items() if given[core.storage_id(t)]}
    slots = [slots[k] for rows in given.values() for k, *_ in rows] if shared else []
    bases = [s.example for s in slots if may_be_base(seen, s)]
    made = [t._base for k, t in roots.items() if t._base is not None and k not in shared]
    times = collections.Counter(map(id, made))
    several = {id(t): t for t in made if (times[id(t)] > 1 or id(t) in roots) and core.storage_id(t) in seen.made}
    bases += [t for t in several.values() if is_pending(seen, t)]
    found = views.find([t for k, t in roots.items() if k not in several], list({id(t): t for t in bases}.values()))
    rest = {id(t): t for t in (*roots.values(), *several.values()) if id(t) not in found.numbers}
    if not found.steps or (
        views.are_right(found, list(roots.values()))
        and not views.is_met(found, list(rest.values()), seen.run.since, roots)
    ):
        return found
    return errors.odd_root(next(path for path, t in results if id(t) in found.numbers))


def may_be_base(seen, slot):
    """May a replay make a view of this slot's tensor: does it require grad from the start, and is it not written?"""
    t = slot.example
    return t.requires_grad and not slot.begins and slot.owner == core.NONE and core.storage_id(t) not in seen.written
