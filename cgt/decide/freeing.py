"""What frees recordings: a function that is gone or reset, memory that is needed, a limit."""

import functools
import re

import cgt_core as core
import torch
from cgt_core import CUDA, NONE

from ..data import Call, Learnt, State, maker_of, remember
from ..make import record
from ..words import errors
from . import logs, verdicts
from .sites import ATTRIBUTE, DOOMED, GRAPHS, RECORDING, SITES, disable, is_mine, states

UNITS = (
    {"": 1, "B": 1}
    | {f"{letter}iB": 1024**k for k, letter in enumerate("KMGT", 1)}
    | {f"{letter}B": 1000**k for k, letter in enumerate("KMGT", 1)}
)


def drop_graphs(state: State) -> None:
    """Free a function's recordings with gradients. Another thread may be recording behind one: the caller holds
    RECORDING."""
    for node in [n for n, kept in state.keep.items() if kept.graph is not None]:
        if node in state.keep:  # freeing one frees those behind it
            drop_node(node)


def forget_parent() -> None:
    """In the child of a fork: the threads of the parent are not there, one that recorded neither."""
    core.forget(is_mine())
    if not is_mine():
        RECORDING._at_fork_reinit()


def sweep() -> None:
    """Free the rows of what was collected since. Never in the middle of a call; while something is
    being recorded, its thread will do it."""
    if DOOMED and not core.paths_mine() and not is_mine():
        core.locked(RECORDING, functools.partial(core.with_paths, free_doomed), lambda: None)


def free_doomed():
    """The caller holds the paths. What is freed may let go of backwards, and doom them."""
    while DOOMED:
        doomed = what, which = DOOMED[-1]
        if which is None:
            forget(what)
        elif which is GRAPHS:
            drop_graphs(what)
        elif isinstance(what, State):
            free_spec(what, which)
        else:
            core.fn_free(what, which)
        DOOMED.pop(next(k for k, one in enumerate(DOOMED) if one is doomed))  # others may have come meanwhile
        bury()


def free_exchanging() -> None:
    """A group of processes is about to go: the recordings that exchange data go before it."""
    for state in states():
        if state.learnt.exchanges:
            reset_state(state)
    sweep()


def trim() -> None:
    """Give back the memory of pools in which nothing lives, unless something is being recorded."""
    if not is_mine():
        core.locked(RECORDING, record.release_pools, lambda: None)


def bury() -> None:
    """Nodes were freed, perhaps of several functions: let go of what they kept alive."""
    freed = core.freed()
    for f, node in freed:
        state = getattr(SITES.get(f), ATTRIBUTE, None)
        kept = state.keep.pop(node, None) if state is not None else None
        if kept is not None and kept.backward is not None:
            counts = core.fn_counts(getattr(kept.backward, ATTRIBUTE).f)
            state.past = [a + b for a, b in zip(state.past, counts, strict=True)]
    nodes = {node for _, node in freed}
    for state in states() if nodes else ():
        for key in [key for key in state.learnt.cool if key[1] in nodes]:
            del state.learnt.cool[key]


def free_spec(state, spec):
    """Free a spec with its recordings, and what they kept alive. The caller holds the paths."""
    if not core.fn_is(state.f, state.born) or state.learnt.programs.pop(spec, None) is None:
        return  # freed or reset since
    for known in (state.learnt.verdicts, state.learnt.account.met):
        for key in [key for key in known if key is not None and key[0] == spec]:
            del known[key]
    core.spec_free_if(state.f, state.born, spec)


def vet_dropout(call: Call) -> str | None:
    """A sentence if the function's recurrent layers begin with another random state of cuDNN's at this call, or None.
    Recordings with the old one fit no call any more."""
    state = call.state
    if not state.learnt.recurrent or call.driver != CUDA:
        return None
    for n in core.fn_nodes(state.f):
        if n in state.keep and core.node_is_spent(n):  # freeing one frees those behind it
            drop_node(n)
    return errors.cudnn_dropout() if core.dropout_begins_anew(call.device) else None


def make_place(call: Call, path: int, parent: int) -> None:
    """Room for one more recording of the function there: after the cool-down the one matched longest ago goes. Where
    recordings were wasted instead, they count from zero again."""
    state, there = call.state, verdicts.crowd(call, path, parent)
    if there is None:
        return
    nodes, key = there
    state.learnt.cool[key] = (0, state.learnt.cool[key][1])
    if nodes:
        logs.tell("evict", errors.told_evict, state.name, len(nodes))
        drop_node(nodes[-1])
    else:
        remember(state, waste=(NONE, 0))


def drop_node(node: int) -> None:
    """Free a recording with those behind it, and what they kept alive."""

    def drop():
        core.node_drop(node)
        bury()

    if core.paths_mine():  # the caller holds the paths already
        drop()
    else:
        core.with_paths(drop)


def parse_budget(budget: int | str | None) -> int | None:
    """Bytes of 2**30, "2GiB" or "500 MB"; None of None. ValueError."""
    if budget is None or (type(budget) is int and budget > 0):
        return budget
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B|)\s*", budget) if isinstance(budget, str) else None
    if found is None or not float(found[1]):
        raise ValueError(budget)
    return int(float(found[1]) * UNITS[found[2]])


def held() -> int:
    """Bytes that go with all recordings: their results, their copies of inputs, and what the driver took for them. What
    one needs while it runs lies in the pool, for all."""
    every = map(core.node_facts, core.nodes())
    return sum(facts.out_bytes + facts.copied + facts.exec_bytes for facts in every)


def make_room(state: State) -> None:
    """Free recordings that ran longest ago, leaves first, until there is room for another one."""
    most = state.opts.memory_budget
    while len(core.nodes()) >= state.opts.max_graphs or (most is not None and held() > most):
        if not evict(state):
            return


def evict(state):
    """Free the recording that ran longest ago and has none behind it, if there is one."""
    node = core.node_oldest()
    if node is not None:
        logs.tell("evict", errors.told_evict, state.name, len(core.nodes()))
        drop_node(node)
    return node is not None


def make_way(state: State) -> bool:
    """The device has no memory left: what could be recorded again goes, and so do pools that are empty. Was there
    something?"""
    n = len(core.nodes())
    while evict(state):
        pass
    record.release_pools()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return len(core.nodes()) < n


def reset_state(state: State) -> None:
    """Free a function's recordings; what it learnt about its arguments goes too. From inside a
    function that is being warmed or recorded, when that is done: its rows are in use."""
    if is_mine() or core.paths_mine():
        DOOMED.append((state, None))
        return
    with RECORDING:
        core.with_paths(functools.partial(forget, state))


def forget(state):
    """Free the rows of a function's recordings, and what they kept alive. The caller holds the paths."""
    if not core.fn_is(state.f, state.born):
        return  # collected since
    core.fn_reset(state.f)
    disable(state.f)
    # What it runs stays: a backward may be pending, or just be at it in another thread.
    state.learnt = maker_of(Learnt)()
    state.learnt.numbers.live.update(state.dynamic)
    bury()
