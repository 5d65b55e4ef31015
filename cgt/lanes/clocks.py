"""Which ops of a capture may run beside each other, on so many lanes.

An op waits for those that wrote what it reads, and for those that read or wrote what it writes, by memory. Each lane is
a row of ops, one behind the other. A vector clock says of each lane how far of every lane it is behind (Fidge, Mattern
1988): what an op waits for already, by another op, is not waited for again.

Memory of a lane that is let go of is used again by the lane's next op. Where another lane read it, somebody must hold
it until its own lane is behind that: `holds`."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple


class Op(NamedTuple):
    """One that ran."""

    clock: tuple  # how far of each lane it is behind, itself included
    nodes: list  # of the graph: its last ones


class Lanes(NamedTuple):
    length: list  # of each lane: how many ops it has
    clocks: list  # of each lane: how far of each it is behind
    ends: list  # of each lane: the nodes behind which its next op stands
    ops: dict  # (lane, its number there, from 1) -> Op
    wrote: dict  # memory -> the op that wrote it last
    read: dict  # memory -> {lane: the number of its last op there that read it since}
    home: dict  # memory -> the lane that made it
    holds: list  # of each lane: (lane, number) of an op elsewhere that uses its memory, and what holds that
    common: list  # [the nodes that all are behind, how long the lanes were then]


def new(n: int, nodes: list) -> Lanes:
    """So many lanes, all of which begin behind these nodes."""
    clocks: list = [[0] * n for _ in range(n)]
    return Lanes([0] * n, clocks, [nodes] * n, {}, {}, {}, {}, [[] for _ in range(n)], [nodes, [0] * n])


def needs(lanes: Lanes, reads: Iterable[int], writes: Iterable[int]) -> dict[int, int]:
    """{lane: the number of its op that must have run} before one that reads and writes this memory."""
    found: dict = {}

    def add(lane, number):
        found[lane] = max(number, found.get(lane, 0))

    for memory in (*reads, *writes):
        if memory in lanes.wrote:
            add(*lanes.wrote[memory])
    for memory in writes:
        for at in lanes.read.get(memory, {}).items():
            add(*at)
    return found


def choose(lanes: Lanes, need: dict[int, int], among: Sequence[int]) -> int:
    """The lane for an op with these needs: one that it would stand behind anyway; else one with nothing under way that
    the op need not wait for, a new one first; else the one that has waited for least."""
    behind = lanes.common[1]
    for at in need.items():
        behind = list(map(max, behind, lanes.ops[at].clock))
    next_to = [lane for lane in among if lanes.length[lane] and need.get(lane) == lanes.length[lane]]
    if next_to:
        return max(next_to, key=lambda lane: sum(lanes.clocks[lane]))
    done = [lane for lane in among if lanes.length[lane] <= behind[lane]]
    if done:
        return max(done, key=lambda lane: lanes.length[lane] > 0)
    return min(among, key=lambda lane: sum(lanes.clocks[lane]))


def enter(lanes: Lanes, lane: int, need: dict[int, int]) -> list:
    """An op goes to this lane: the nodes that it must stand behind. What the lane is behind by now is held no more."""
    clock = lanes.clocks[lane]
    waits = [(other, number) for other, number in need.items() if other != lane and number > clock[other]]
    nodes = list(lanes.ends[lane])
    for at in waits:
        if not any(at != other and lanes.ops[other].clock[at[0]] >= at[1] for other in waits):
            nodes += lanes.ops[at].nodes
        clock[:] = map(max, clock, lanes.ops[at].clock)
    lanes.holds[lane][:] = [row for row in lanes.holds[lane] if clock[row[0]] < row[1]]
    return list(dict.fromkeys(nodes))


def leave(
    lanes: Lanes, lane: int, nodes: list, reads: Iterable[int], writes: Iterable[int], made: Iterable[int],
    hold: Callable[[int], Any],
) -> None:  # fmt: skip
    """It ran, and these are its last nodes. `hold(memory)`: something that keeps it."""
    lanes.length[lane] += 1
    number = lanes.clocks[lane][lane] = lanes.length[lane]
    lanes.ops[lane, number] = Op(tuple(lanes.clocks[lane]), nodes)
    lanes.ends[lane] = nodes
    for memory in made:
        lanes.home[memory] = lane
    for memory in (*reads, *writes):
        home = lanes.home.get(memory, lane)
        if home != lane:
            lanes.holds[home].append((lane, number, hold(memory)))
    for memory in reads:
        lanes.read.setdefault(memory, {})[lane] = number
    for memory in (*writes, *made):
        lanes.wrote[memory] = lane, number
        lanes.read[memory] = {}


def ends_of(lanes: Lanes) -> list:
    """The nodes behind which stands what must be behind everything."""
    ended = [nodes for nodes in lanes.ends if nodes is not lanes.common[0]] or lanes.common[:1]
    return list(dict.fromkeys(node for nodes in ended for node in nodes))


def meet(lanes: Lanes, nodes: list) -> None:
    """Everything that comes stands behind these nodes, which stand behind all that was."""
    for clock in lanes.clocks:
        clock[:] = lanes.length
    lanes.ends[:] = [nodes] * len(lanes.ends)
    lanes.common[:] = nodes, list(lanes.length)
    for held in lanes.holds:
        held.clear()
