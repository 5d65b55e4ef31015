"""Which op made the first NaN or infinity (`CGT_NAN=1`).

No function is recorded then: its replays would be what eager is, bit for bit, so each call runs eagerly, and what an op
leaves is looked at behind it. An infinity that the program names itself (a mask that is filled with it) is not told."""

import math
from collections.abc import Callable

import cgt_core as core
import torch

from ..run import tape
from ..run.observe import line_in, tensors_in, warn
from ..words import errors
from ..words.private import outside_dynamo

NORM = torch.ops.aten.linalg_vector_norm.default  # through which a NaN passes
NAN, INFINITY = "NaN", "infinity"


def looked_at(name: str, function: Callable[..., object]) -> Callable[..., object]:
    """The function, which warns in each call of the first op that made one of none."""

    @outside_dynamo
    def run(*args, **kwargs):
        told, known, files = [], {}, {}

        def see(*op):  # no partial: the first argument of one is a Seen (observe.seen_here)
            look(name, told, known, files, *op)

        return core.observed(core.results(), see, function, args, kwargs)

    return run


def look(name, told, known, files, op, args, kwargs):
    """Run an op; None: one that runs by itself. `known`: memory -> what is in it."""
    if op is None:
        return
    if told or op.overloadpacket.__name__ in tape.EMPTY:
        core.proceed(None)
        return
    kept, written = tensors_of(op, args, kwargs)
    before = found_in(known, kept) | {way_of(x) for x in (*args, *kwargs.values()) if type(x) is float}
    made = [*core.proceed(None), *written]
    for t in made:
        known.pop(core.storage_id(t), None)
    after = found_in(known, made)
    what = NAN if NAN in after - before else INFINITY if INFINITY in after and not before & {NAN, INFINITY} else None
    if what is not None:
        told.append(what)
        warn(errors.not_finite(name, what, str(op), line_in(files)))


def tensors_of(op, args, kwargs):
    """(those that an op is given, but for such in which it only leaves a result; those that it writes)"""
    kept, written = [], []
    for k, argument in enumerate(op._schema.arguments):
        writes = argument.alias_info is not None and argument.alias_info.is_write
        found = tensors_in([args[k] if k < len(args) else kwargs.get(argument.name)], [])
        written += found if writes else []
        kept += found if not (writes and argument.kwarg_only) else []
    return kept, written


def found_in(known, tensors):
    """What is in these: NAN, INFINITY."""
    for t in tensors:
        can_be_measured = t.is_floating_point() and t.element_size() > 1 and t.numel() and core.is_plain(t)
        if can_be_measured and core.storage_id(t) not in known:
            known[core.storage_id(t)] = way_of(NORM(t.detach(), math.inf, dtype=torch.float64).item())
    return {known.get(core.storage_id(t)) for t in tensors}


def way_of(x):
    return NAN if math.isnan(x) else INFINITY if math.isinf(x) else None
