"""Which ops may run beside each other: random programs on lanes, with an allocator that gives a lane's memory to its next
op. No two ops of which one needs the other's memory are side by side."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgt.lanes import clocks

N_OPS, LIVE = 120, 12


class Memory:
    """A lane's memory is free when nobody holds it, and the lane's next op takes it."""

    def __init__(self, n):
        self.free, self.at, self.home, self.uses, self.size = [[] for _ in range(n)], {}, {}, {}, 0

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


class Hold:
    """What keeps memory."""

    def __init__(self, memory, name):
        self.memory, self.name = memory, name
        memory.uses[name] += 1

    def __del__(self):
        self.memory.drop(self.name)


def hazards(seed, n, forgets=None):
    """Run a random program on n lanes: [(op, earlier op that it had to be behind and is not)]. A node's number is that of
    its op. `forgets`: an op that stands behind nothing."""
    draw, lanes, memory = random.Random(seed), clocks.new(n, []), Memory(n)
    used, behind, live, found = {}, {}, [], []
    for k in range(N_OPS):
        reads = set(draw.sample(live, min(len(live), draw.randint(0, 3))))
        writes = set(draw.sample(live, 1)) if live and draw.random() < 0.2 else set()
        reads -= writes
        if draw.random() < 0.03:  # something else was launched
            behind[-k] = set().union(*(behind[one] | {one} for one in clocks.ends_of(lanes)), set())
            clocks.meet(lanes, [-k] if k else [])
            behind.setdefault(-k, set())
        need = clocks.needs(lanes, reads, writes)
        lane = clocks.choose(lanes, need, range(n))
        nodes = clocks.enter(lanes, lane, need) if k != forgets else clocks.enter(lanes, lane, need) and []
        behind[k + 1] = set().union(*(behind[one] | {one} for one in nodes), set())
        new, temporary = f"t{k}", memory.take(lane)
        memory.make(new, lane)
        wrote = {memory.at[name] for name in writes} | {memory.at[new], temporary}
        for place, writing in [(memory.at[name], False) for name in reads] + [(place, True) for place in wrote]:
            found += [(k, op) for op, wrote_it in used.get(place, ()) if (writing or wrote_it) and op + 1 not in behind[k + 1] and op != k]
        for name in reads:
            used.setdefault(memory.at[name], []).append((k, False))
        for place in wrote:
            used.setdefault(place, []).append((k, True))
        clocks.leave(lanes, lane, [k + 1], reads, writes, [new], lambda name: Hold(memory, name))
        memory.free[lane].append(temporary)
        live.append(new)
        while len(live) > LIVE:
            memory.drop(live.pop(draw.randrange(len(live))))
    return found, lanes, memory


@given(st.integers(0, 10**6), st.sampled_from([1, 2, 3, 8]))
def test_whatever_shares_memory_is_in_order(seed, n):
    found, lanes, _ = hazards(seed, n)
    assert not found
    assert sum(lanes.length) == N_OPS


def test_an_op_that_waits_for_nothing_is_found_out():
    told = [hazards(seed, 4, forgets=60)[0] for seed in range(20)]
    assert all(op >= 60 for found in told for op, _ in found) and sum(map(bool, told)) > 10


def test_ops_that_need_nothing_of_each_other_are_beside_each_other():
    lanes = clocks.new(4, [])
    for k in range(4):
        lane = clocks.choose(lanes, need := clocks.needs(lanes, [], []), range(4))
        assert clocks.enter(lanes, lane, need) == [] and lane == k
        clocks.leave(lanes, lane, [k], [], [], [f"m{k}"], str)
    assert clocks.ends_of(lanes) == [0, 1, 2, 3]
    need = clocks.needs(lanes, ["m0", "m3"], [])
    lane = clocks.choose(lanes, need, range(4))
    assert lane in (0, 3) and sorted(clocks.enter(lanes, lane, need)) == [0, 3]


@pytest.mark.parametrize("n", [2, 8])
def test_a_row_of_ops_stays_on_one_lane(n):
    lanes = clocks.new(n, [])
    for k in range(10):
        need = clocks.needs(lanes, [f"m{k - 1}"] if k else [], [])
        lane = clocks.choose(lanes, need, range(n))
        assert clocks.enter(lanes, lane, need) == ([k - 1] if k else [])
        clocks.leave(lanes, lane, [k], [f"m{k - 1}"] if k else [], [], [f"m{k}"], str)
    assert [n for n in lanes.length if n] == [10]


def test_what_is_waited_for_by_another_op_is_not_waited_for_again():
    lanes = clocks.new(3, [])
    for lane, (k, reads) in enumerate([(0, []), (1, ["m0"])]):
        clocks.enter(lanes, lane, clocks.needs(lanes, reads, []))
        clocks.leave(lanes, lane, [k], reads, [], [f"m{k}"], str)
    assert clocks.enter(lanes, 2, clocks.needs(lanes, ["m0", "m1"], [])) == [1]


def test_memory_that_another_lane_reads_is_held_until_its_own_is_behind_that():
    lanes = clocks.new(2, [])
    clocks.leave(lanes, 0, clocks.enter(lanes, 0, {}) + [0], [], [], ["m"], str)
    clocks.enter(lanes, 1, clocks.needs(lanes, ["m"], []))
    clocks.leave(lanes, 1, [1], ["m"], [], ["other"], str)
    assert [held for *_, held in lanes.holds[0]] == ["m"]
    clocks.enter(lanes, 0, {})
    assert lanes.holds[0]
    clocks.enter(lanes, 0, clocks.needs(lanes, ["other"], []))
    assert not lanes.holds[0]
