"""Which form of a graph is launched: the chain, or its ops side by side.

Kernels that fill the GPU gain nothing beside each other, and may lose. So both forms are launched from one state, when
a replay was compared with eager and the state is kept anyway, and the faster one stays. What a launch takes is told by
events around it, alone on its stream."""

import functools
from collections.abc import Callable

import cgt_core as core

RUNS = 4  # of each, of which the first brings code and data to the GPU
BETTER = 0.97  # of what the chain takes, or it stays


def is_open(node: int) -> bool:
    """Is it still to be chosen for this recording?"""
    return core.wide_edges(node) > 0


def settle(node: int, back: Callable[[], object], is_same: Callable[[], bool]) -> None:
    """Choose. `back()` puts back what a launch changes; `is_same()`: did the last one leave what the replay had?"""
    chain = True
    try:
        hold(core.wide_begin, node)
        for k in range(2 * RUNS):
            back()
            hold(core.wide_run, node, k % 2 == 0)
        alone, beside, _ = core.node_facts(node).forms
        chain = beside > BETTER * alone or not is_same()
    except core.DriverError as error:  # there is no memory for both: the chain is there
        if error.args[2] != "instantiate":
            raise
    finally:
        hold(core.wide_end, node, chain)


def hold(call, *args):
    return core.with_paths(functools.partial(call, *args))
