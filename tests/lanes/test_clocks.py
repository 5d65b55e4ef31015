"""Which ops may run beside each other: random programs on lanes, with an allocator that gives a lane's memory to its next
op. No two ops of which one needs the other's memory are side by side."""

import random

import torch  # noqa: F401 before the core, whose libraries are torch's

# isort: split
import cgt_core as core
from hypothesis import given
from hypothesis import strategies as st

N_OPS, LIVE, LANES = 120, 12, 8


class Memory:
    """A lane's memory is free when nobody holds it, and the lane's next op takes it."""

    def __init__(self):
        self.free, self.at, self.home, self.uses, self.size = [[] for _ in range(LANES)], {}, {}, {}, 0

    def take(self, lane):
        if self.free[lane]:
            return self.free[lane].pop()
        self.size += 1
        return self.size

    def make(self, name, lane):
        self.at[name], self.home[name], self.uses[name] = self.take(lane), lane, 1

    def drop(self, name):
        self.uses[name] -= 1
        if not self.uses[name]:
            self.free[self.home[name]].append(self.at[name])


class Run:
    """Ops on lanes. A node's number is that of its op; whatever else is launched has one behind N_OPS."""

    def __init__(self):
        core.lanes_begin([])
        self.memory, self.behind, self.holds = Memory(), {}, [[] for _ in range(LANES)]

    def op(self, node, reads, writes, forgets=False):
        """Its lane. What it stands behind is in `behind`."""
        lane, nodes = core.lane_choose(reads, writes)
        self.behind[node] = set() if forgets else set(nodes).union(*(self.behind[one] for one in nodes))
        for other, number, name in self.holds[lane]:
            if core.lane_passed(lane, other, number):
                self.memory.drop(name)
        self.holds[lane] = [row for row in self.holds[lane] if not core.lane_passed(lane, *row[:2])]
        return lane

    def ran(self, node, lane, reads, writes, made):
        for name, home in core.lane_ran(lane, [node], reads, writes, made):
            self.memory.uses[name] += 1
            self.holds[home].append((lane, core.lane_length(lane), name))

    def other(self, node):
        """Something that nobody told of stands behind all, and all that comes behind it."""
        last = core.lanes_last()
        self.behind[node] = set(last).union(*(self.behind[one] for one in last))
        core.lanes_meet_at([node])
        for rows in self.holds:
            for *_, name in rows:
                self.memory.drop(name)
            rows.clear()


def hazards(seed, forgets=None):
    """A random program: [(op, earlier op that it had to be behind and is not)]. `forgets`: an op that stands behind
    nothing."""
    draw, run, used, live, found, lanes = random.Random(seed), Run(), {}, [], [], set()
    for k in range(1, N_OPS + 1):
        reads = draw.sample(live, min(len(live), draw.randint(0, 3)))
        writes = draw.sample(live, 1) if live and draw.random() < 0.2 else []
        reads = [name for name in reads if name not in writes]
        if draw.random() < 0.03:
            run.other(N_OPS + k)
        lane = run.op(k, reads, writes, forgets=k == forgets)
        lanes.add(lane)
        at, temporary = run.memory.at, run.memory.take(lane)
        run.memory.make(k, lane)
        wrote = {at[name] for name in writes} | {at[k], temporary}
        for place, writing in [(at[name], False) for name in reads] + [(place, True) for place in wrote]:
            found += [(k, op) for op, wrote_it in used.get(place, ()) if (writing or wrote_it) and op not in run.behind[k]]
        for place, writing in [(at[name], False) for name in reads] + [(place, True) for place in wrote]:
            used.setdefault(place, []).append((k, writing))
        run.ran(k, lane, reads, writes, [k])
        run.memory.free[lane].append(temporary)
        live.append(k)
        while len(live) > LIVE:
            run.memory.drop(live.pop(draw.randrange(len(live))))
    return found, lanes


@given(st.integers(0, 10**6))
def test_whatever_shares_memory_is_in_order(seed):
    found, lanes = hazards(seed)
    assert not found and len(lanes) > 2


def test_an_op_that_waits_for_nothing_is_found_out():
    told = [hazards(seed, forgets=60)[0] for seed in range(20)]
    assert all(op >= 60 for found in told for op, _ in found) and sum(map(bool, told)) > 10


def test_ops_that_need_nothing_of_each_other_are_beside_each_other():
    run = Run()
    for k in range(1, 5):
        lane = run.op(k, [], [])
        assert lane == k - 1 and not run.behind[k]
        run.memory.make(k, lane)
        run.ran(k, lane, [], [], [k])
    assert core.lanes_last() == [1, 2, 3, 4]
    assert run.op(5, [1, 4], []) in (0, 3) and run.behind[5] == {1, 4}


def test_all_begin_behind_the_same_nodes_and_meet_behind_others():
    core.lanes_begin([7])
    assert core.lanes_last() == [7] and core.lane_choose([], []) == (0, [7])
    core.lane_ran(0, [8], [], [], [1])
    assert core.lanes_last() == [8]
    core.lanes_meet_at([9])
    assert core.lanes_last() == [9]
    assert core.lane_choose([], []) == (0, [9])  # which was used before, and has nothing under way
    core.lane_ran(0, [10], [], [], [2])
    assert core.lanes_last() == [10] and core.lane_choose([], []) == (1, [9])


def test_a_row_of_ops_stays_on_one_lane():
    run = Run()
    for k in range(1, 10):
        reads = [k - 1] if k > 1 else []
        lane = run.op(k, reads, [])
        assert lane == 0 and run.behind[k] == set(range(1, k))
        run.memory.make(k, lane)
        run.ran(k, lane, reads, [], [k])


def test_what_is_waited_for_by_another_op_is_not_waited_for_again():
    core.lanes_begin([])
    core.lane_ran(0, [1], [], [], [1])
    core.lane_choose([1], [])  # the lane that it would stand behind anyway
    core.lane_ran(0, [2], [1], [], [2])
    core.lane_ran(1, [3], [], [], [3])
    lane, nodes = core.lane_choose([1, 2, 3], [])
    assert sorted(nodes) == [2, 3] and lane in (0, 1)


def test_memory_that_another_lane_reads_is_told_until_its_own_is_behind_that():
    core.lanes_begin([])
    for lane in range(2):
        assert core.lane_choose([], []) == (lane, [])
        assert core.lane_ran(lane, [lane + 1], [], [], [10 + lane]) == []
    assert core.lane_choose([10, 11], []) == (0, [1, 2])
    assert core.lane_ran(0, [3], [10, 11], [], [12]) == [(11, 1)]
    number = core.lane_length(0)
    assert not core.lane_passed(1, 0, number)
    assert core.lane_choose([], [11]) == (0, [3])  # behind who reads it
    core.lanes_meet_at([4])
    assert core.lane_passed(1, 0, number) and core.lanes_last() == [4]
