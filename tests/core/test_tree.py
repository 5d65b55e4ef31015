"""The tree: a call goes on from the one before it, in memory that its path left, and what somebody
holds keeps its value."""

import contextlib
import ctypes
import gc
import threading
import weakref

import pytest
import torch
from helpers import counts, in_threads, line_of, numbers, refill

# isort: split
import cgt_core as core
from cgt_core import NONE, PINNED

import cgt
from cgt.decide import sites
from cgt.words import errors, options

GPU_ONLY = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def one(x):
    return x + 1


def two(x):
    return x * 2


def three(x):
    return x - 3, x * 3


def four(x):
    return x.square()


def cell(x, h):
    return x + h * 0.5


def same(a, b):
    return a.dtype == b.dtype and torch.equal(a, b)


def index_of(device):
    """What core.path_state takes."""
    return -1 if device.type == "cpu" else torch.cuda.current_device()


def path_of(device):
    """Nodes of the iteration under way, first to last."""
    _, n, _ = core.path_state(index_of(device))
    nodes = []
    while n != NONE:
        nodes.insert(0, n)
        n = core.node_facts(n).parent
    return nodes


def names_of(nodes):
    return [sites.SITES[core.node_facts(n).fn].__name__ for n in nodes]


def children_of(f, device, parent=NONE):
    """Recordings of f behind a node, newest match first."""
    path, _, _ = core.path_state(index_of(device))
    return core.children(path, parent, getattr(f, sites.ATTRIBUTE).f)


def nodes_of(*fs):
    return {n for f in fs for n in core.fn_nodes(getattr(f, sites.ATTRIBUTE).f)}


def iterations(n, *xs):
    """Number of the iteration, begun by step(), with other numbers in these tensors."""
    for k in range(n):
        for x in xs:
            refill(x, k)
        cgt.step()
        yield k


# --- paths ------------------------------------------------------------------------------------


def two_ways(first, left, right, last, x, go_left):
    y = first(x)
    return last(left(y) if go_left else right(y)[1])


def test_two_ways_through_the_program_are_five_recordings(device):
    x = numbers(device)
    first, left, right, last = ways = [cgt.jit(f) for f in (one, two, three, four)]
    for f in ways:
        f(x)
    paths = []
    for k in iterations(200, x):
        assert same(two_ways(*ways, x, k % 2), two_ways(one, two, three, four, x, k % 2))
        paths.append(path_of(device))
    a, b = paths[:2]
    assert paths == [a, b] * 100 and a[0] == b[0] and nodes_of(*ways) == {*a, *b}
    assert names_of(a) == ["one", "three", "four"] and names_of(b) == ["one", "two", "four"]
    assert counts(first) == (1, 1, 199, 0) and counts(last) == (1, 2, 198, 0)
    assert counts(left) == counts(right) == (1, 1, 99, 0)
    assert all((s.copied_bytes, s.rescues) == (0, 0) for s in map(cgt.stats, ways))
    slots = [core.node_facts(path[2]).slots for path in (a, b)]
    assert [(s[1], s[4]) for (s,) in slots] == [(PINNED, a[1]), (PINNED, b[1])]
    assert slots[0][0][3] != slots[1][0][3]  # another address: that is why 4 was recorded twice
    head, *lines = cgt.explain().splitlines()
    assert "5 recordings" in head and "2 ways" in head
    shape = [(len(line) - len(line.lstrip()), line.split(":")[0].strip()) for line in lines]
    branches = [[(4, "three"), (6, "four")], [(4, "two"), (6, "four")]]
    assert shape[0] == (2, "one") and sorted([shape[1:3], shape[3:]]) == branches
    assert "replayed 199x" in lines[0] and all("replayed 99x" in line for line in lines[1:])


@pytest.mark.parametrize("behind", [False, True], ids=["first", "behind another"])
def test_64_siblings_replay_and_move_to_the_front(device, behind):
    f, root = cgt.jit(lambda x, k: x + int(k), max_records=64), cgt.jit(two)
    x = numbers(device)
    root(x), f(x, "0")

    def call(k):
        cgt.step()
        y = root(x) if behind else x
        assert same(f(y, str(k)), (two(x) if behind else x) + k)

    for k in range(64):
        call(k)
    assert counts(f) == (1, 64, 0, 0)
    parent = path_of(device)[0] if behind else NONE
    siblings = set(children_of(f, device, parent))
    assert len(siblings) == 64
    for k in [*range(63, -1, -3), *range(64)]:
        call(k)
        assert children_of(f, device, parent)[0] == path_of(device)[-1]
    assert counts(f) == (1, 64, 22 + 64, 0)
    assert set(children_of(f, device, parent)) == siblings


# --- one pool ---------------------------------------------------------------------------------

BIG = {"cpu": 2**16, "cuda": 2**24}  # elements: 256 KiB, and 64 MiB against segments of 20 MiB


def deep(x):  # its argument, and two big ones at once
    t = x * 2
    t = t + 1
    t = t * t
    return t[:4].clone()


def wide(x):  # its argument, and three at once
    a, b = x * 2, x * 3
    c = a - b
    return c[:4].clone()


def narrow(x):  # its argument, and one
    return (x * 5)[:4].clone()


BRANCHES = {"deep": (deep, 3), "wide": (wide, 4), "narrow": (narrow, 2)}


def big_numbers(device):
    """A big tensor; and what other tests left in the pool goes back."""
    cgt.reset(cgt.jit(one))
    return numbers(device, BIG[device.type])


def eager_peak(device, run, n):
    """Bytes alive at once in an eager run: measured, or n big tensors where nobody measures."""
    if device.type == "cpu":
        return n * 4 * BIG["cpu"]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("order", [("wide", "deep", "narrow"), ("narrow", "deep", "wide")], ids=str)
def test_pool_of_three_branches_is_as_large_as_the_largest(device, order):
    x = big_numbers(device)
    root, ends = cgt.jit(one), {name: cgt.jit(BRANCHES[name][0]) for name in order}
    for f in (root, *ends.values()):
        f(x)
    sizes = []
    for name in order * 3:
        cgt.step()
        y = root(x)
        assert same(ends[name](y), BRANCHES[name][0](one(x)))
        sizes.append(cgt.stats().pool_bytes)
    assert counts(root) == (1, 1, 8, 0)
    assert [counts(f) for f in ends.values()] == [(1, 1, 2, 0)] * 3
    peak = max(eager_peak(device, lambda g=g: g(one(x)), n) for g, n in BRANCHES.values())
    assert 0.9 * peak < sizes[-1] <= 1.1 * peak
    assert sizes[-1] <= sizes[order.index("wide")] + 64  # no smaller branch makes the pool grow


def test_memory_dropped_on_the_path_is_used_by_what_is_recorded_behind(device):
    x = big_numbers(device)
    f = cgt.jit(cell)
    f(x, x)
    for _ in iterations(4):
        h = want = x
        for k in range(8):
            h, want = f(x, h), cell(x, want)
            assert same(h, want)
            if k == 3:
                bytes_of_four = cgt.stats().pool_bytes
        del h
        assert cgt.stats().pool_bytes == bytes_of_four
    assert counts(f) == (1, 8, 24, 0)
    assert bytes_of_four <= 1.1 * 3 * x.nbytes  # two states and h * 0.5


# --- liveness ---------------------------------------------------------------------------------


def as_grad(y):
    p = torch.zeros_like(y, requires_grad=True)
    p.grad = y
    return p


HOLDERS = {  # name: how to hold a result, how to read it
    "name": (lambda y: y, lambda h: h),
    "list": (lambda y: [[y]], lambda h: h[0][0]),
    "view": (lambda y: y[2:], lambda h: h),
    "detached": (lambda y: y.detach(), lambda h: h),
    "saved": (
        lambda y: y * torch.ones_like(y, requires_grad=True),
        lambda h: h.grad_fn(torch.ones_like(h))[1],
    ),
    "grad": (as_grad, lambda h: h.grad),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_result_that_was_dead_and_is_held_now_leads_to_another_child(device, name):
    hold, read = HOLDERS[name]
    f, g, h = cgt.jit(one), cgt.jit(two), cgt.jit(four)
    x = numbers(device)

    def iterate(how):
        y = f(x)
        at, held, last = y.data_ptr(), how(y), h(y)  # `last` keeps the path
        del y
        z = g(x)
        assert same(z, two(x)) and same(last, four(one(x)))
        assert held is None or same(read(held), read(hold(one(x))))
        return z.data_ptr() == at

    overwritten = [iterate(lambda y: None) for _ in iterations(3, x)]
    assert overwritten[-1] and counts(g) == (1, 1, 1, 0)
    for k in iterations(4, x):
        assert not iterate(hold)
        assert counts(g) == (1, 2, 1 + k, 0)
    assert len(children_of(g, device, path_of(device)[1])) == 2
    for _ in iterations(3, x):
        iterate(lambda y: None)  # an earlier death is fine
    assert counts(f) == counts(h) == (1, 1, 8, 0) and counts(g) == (1, 2, 7, 0)


@pytest.mark.parametrize("name", HOLDERS)
def test_result_that_dies_earlier_than_recorded_is_fine(device, name):
    hold, read = HOLDERS[name]
    f, g = cgt.jit(one), cgt.jit(two)
    x = numbers(device)
    for k in iterations(6, x):
        held = hold(f(x))
        if k > 2:
            held = None
        assert same(g(x), two(x))
        assert held is None or same(read(held), read(hold(one(x))))
        del held
    assert counts(f) == counts(g) == (1, 1, 4, 0) and cgt.stats(f).rescues == 0


def test_weakly_referenced_result_of_the_path_never_shows_another_value(device):
    f, g = cgt.jit(one), cgt.jit(two)
    x = numbers(device)
    for k in iterations(8, x):
        y = f(x)
        ref = weakref.ref(y) if k > 2 else lambda: None
        del y
        assert same(g(x), two(x))
        assert ref() is None or same(ref(), one(x))
    assert counts(f)[3] == counts(g)[3] == 0


# --- iterations -------------------------------------------------------------------------------


def test_loop_over_one_function_without_step_settles_into_replays(device):
    f = cgt.jit(cell)
    x = numbers(device)
    got = want = numbers(device, start=3)
    for k in range(100):
        refill(x, k)
        got, want = f(x, got), cell(x, want)
        assert same(got, want)
    warmups, records, replays, eager = counts(f)
    assert (warmups, eager) == (1, 0) and records <= 3 and replays == 99 - records


@pytest.mark.parametrize("calls", [1, 4, 16])
def test_loop_between_steps_is_a_path_without_copies(device, calls):
    f = cgt.jit(cell)
    x, start = numbers(device), numbers(device, start=3)
    f(x, start)
    for _ in iterations(11, x, start):
        got = want = start
        for _ in range(calls):
            got, want = f(x, got), cell(x, want)
            assert same(got, want)
        assert len(path_of(device)) == calls == len(nodes_of(f))
    assert counts(f) == (1, calls, 10 * calls, 0)
    s = cgt.stats(f)
    assert (s.copied_bytes, s.rescues) == (0, 0)


@pytest.mark.parametrize("calls", [1, 4])
def test_state_carried_over_a_step_is_copied_by_the_first_recording_only(device, calls):
    f = cgt.jit(cell)
    x = numbers(device)
    got = want = numbers(device, start=3)
    for k in iterations(16, x):
        for _ in range(calls):
            got, want = f(x, got), cell(x, want)
            assert same(got, want)
        if k == 5:
            records = cgt.stats(f).records
        assert all(core.node_facts(n).copied == 0 for n in path_of(device)[1:])
    s = cgt.stats(f)
    assert len(path_of(device)) == calls and (s.records, s.eager) == (records, 0)
    assert s.copied_bytes <= 16 * got.nbytes and s.rescues <= 16


@pytest.mark.parametrize("says", [False, True], ids=["by itself", "step()"])
def test_chain_becomes_a_path(device, says):
    fs = [cgt.jit(f) for f in (one, two, four)]
    x = numbers(device)
    for k in range(6):
        refill(x, k)
        if says:
            cgt.step()
        y = x
        for f in fs:
            y = f(y)
        assert same(y, four(two(one(x))))
        del y
        assert [counts(f) for f in fs] == [(1, min(k, 1), max(k - 1, 0), 0)] * 3
    assert names_of(path_of(device)) == ["one", "two", "four"] and len(nodes_of(*fs)) == 3
    assert all((s.copied_bytes, s.rescues) == (0, 0) for s in map(cgt.stats, fs))


def test_independent_functions_without_step_are_two_roots(device):
    f, g = cgt.jit(one), cgt.jit(two)
    x, z = numbers(device), numbers(device, start=5)
    for k in range(6):
        refill(x, k)
        assert same(f(x), one(x)) and same(g(z), two(z))
    assert counts(f) == counts(g) == (1, 1, 4, 0)
    assert len(children_of(f, device)) == len(children_of(g, device)) == 1


def test_reset_of_everything_returns_to_automatic_iterations(device):
    f = cgt.jit(one)
    x = numbers(device)
    for _ in iterations(3):
        f(x), f(x)
    assert len(path_of(device)) == 2
    cgt.reset()
    assert path_of(device) == [] and nodes_of(f) == set()
    before = cgt.stats(f)
    for k in range(5):
        refill(x, k)
        assert same(f(x), one(x)) and len(path_of(device)) == min(k, 1)
    s = cgt.stats(f)
    assert (s.records - before.records, s.replays - before.replays, s.eager) == (1, 3, 0)


@pytest.mark.parametrize("calls", [4, 5, 11])
def test_path_that_is_too_long_begins_another_iteration_by_itself(device, calls):
    f = cgt.jit(cell)
    x, start = numbers(device), numbers(device, start=3)
    core.max_path(4)
    try:
        for k in iterations(10, x, start):
            states = [start]
            for _ in range(calls):
                states.append(f(x, states[-1]))
                assert len(path_of(device)) <= 4
            assert all(same(h, cell(x, g)) for g, h in zip(states, states[1:], strict=False))
            if k == 5:
                records = cgt.stats(f).records
            del states
    finally:
        core.max_path(options.MAX_GRAPHS)
    s = cgt.stats(f)
    assert (s.eager, s.records) == (0, records)
    assert max(core.node_facts(n).depth for n in nodes_of(f)) == 3


# --- rescue and poison ------------------------------------------------------------------------


def several(x):
    return x + 1, [x[:3] * 2, {"c": x - 1}]


KEPT = {  # what is kept of a = several(x) and b = two(a[0]); rescues, elements
    "nothing": (lambda a, b: [], 0, 0),
    "result": (lambda a, b: [b], 1, 8),
    "view": (lambda a, b: [a[0][2:]], 1, 8),
    "alias": (lambda a, b: [a[1][0].detach()], 1, 3),
    "view and alias": (lambda a, b: [b[1:], b.view(2, 4).detach(), b], 1, 8),
    "several": (lambda a, b: [a[0], a[1][1]["c"], b], 3, 24),
    "nested": (lambda a, b: [a[1][0], a[1][1]["c"]], 2, 11),
    "all": (lambda a, b: [a[0], a[1][0], a[1][1]["c"], b], 4, 27),
}


@pytest.mark.parametrize("keep, rescues, elements", KEPT.values(), ids=KEPT.keys())
def test_held_results_of_the_path_are_rescued_across_a_step(device, keep, rescues, elements):
    f, g = cgt.jit(several), cgt.jit(two)
    x = numbers(device)
    for _ in iterations(4, x):
        held = []
        a = f(x)
        b = g(a[0])
        held, want = keep(a, b), [t.clone() for t in keep(several(x), two(x + 1))]
        del a, b
    cgt.step()
    assert cgt.stats(f).rescues == cgt.stats(g).rescues == 0  # nothing is overwritten yet
    for _ in iterations(4, x):
        a = f(x)
        b = g(a[0])
        assert same(b, two(x + 1)) and same(a[1][1]["c"], x - 1)
        assert all(same(h, w) for h, w in zip(held, want, strict=True))
        assert not {id(t) for t in (a[0], *a[1][:1], a[1][1]["c"], b)} & {id(h) for h in held}
        del a, b
    both = cgt.stats(f), cgt.stats(g)
    assert sum(s.rescues for s in both) == rescues
    assert sum(s.rescued_bytes for s in both) == elements * x.element_size()
    assert counts(f) == counts(g) == (1, 1, 6, 0)


GIVEN_OTHER_MEMORY = {
    "data": lambda y: setattr(y, "data", torch.zeros(3, device=y.device)),
    "set_": lambda y: y.set_(),
    "swap_tensors": lambda y: torch.utils.swap_tensors(y, torch.zeros(3, device=y.device)),
}


@pytest.mark.parametrize("across", [False, True], ids=["on the path", "across a step"])
@pytest.mark.parametrize("give", GIVEN_OTHER_MEMORY.values(), ids=GIVEN_OTHER_MEMORY.keys())
def test_alias_of_a_result_that_got_other_memory_keeps_its_value(device, give, across):
    f, g = cgt.jit(one), cgt.jit(two)
    x = numbers(device)
    for _ in iterations(3, x):
        f(x)
        g(x)
    cgt.step()
    y = f(x)
    alias, want = y.detach(), one(x)
    give(y)
    refill(x, 9)
    if across:
        cgt.step()
        assert same(f(x), one(x))
    assert same(g(x), two(x))
    assert same(alias, want)


def test_poisoned_results_of_the_path_name_both_lines(device):
    f, g = cgt.jit(one, outputs="error"), cgt.jit(two, outputs="error")
    x = numbers(device)
    for _ in iterations(3, x):
        g(f(x))
    cgt.step()
    y = f(x)
    z, part = g(y), y[1:]
    assert same(y, one(x)) and same(z, two(y)) and same(part, y[1:])
    cgt.step()  # ended here
    here = line_of(test_poisoned_results_of_the_path_name_both_lines, "# ended here")
    for t, made in ((y, one), (part, one), (z, two)):
        with pytest.raises(RuntimeError, match="was overwritten") as caught:
            t.sum()
        assert line_of(made, "return") in str(caught.value) and here in str(caught.value)
    y2 = f(x)
    z2 = g(y2)
    assert y2 is not y and z2 is not z
    assert same(y2, one(x)) and same(z2, two(y2))
    assert cgt.stats(f).rescues == cgt.stats(g).rescues == 0 and counts(f) == counts(g) == (1, 1, 3, 0)


# --- limits -----------------------------------------------------------------------------------


def test_max_records_counts_per_parent(device):
    a, b = cgt.jit(one), cgt.jit(two)
    f = cgt.jit(lambda x, k: x * int(k), max_records=2)
    x = numbers(device)
    a(x), b(x), f(x, "0")

    def call(parent, *ks):
        for k in ks:
            cgt.step()
            y = parent(x)
            assert same(f(y, str(k)), y * k)
        return counts(f)

    assert call(a, 0, 1, 2) == (1, 2, 0, 1)
    (reason,) = cgt.stats(f).reasons
    assert "recorded 2 times already (max_records)" in reason
    assert call(b, 0, 1, 0, 1) == (1, 4, 2, 1)
    assert call(b, 2) == (1, 4, 2, 2)
    assert call(a, 0, 1, 0, 1) == (1, 4, 6, 2)  # a limit forbids to record, not to replay


@pytest.mark.parametrize("name", ["args[0]", "w"])
def test_reason_for_the_limit_names_the_slot(device, name):
    w = numbers(device)
    f = cgt.jit(two if name != "w" else lambda x: w * 2, inputs="fixed", max_records=1)
    x, y = numbers(device), numbers(device)
    for t in (x, x, y):
        cgt.step()
        w.data = t
        assert same(f(x if name == "w" else t), two(t))
    assert counts(f) == (1, 1, 0, 1)
    (reason,) = cgt.stats(f).reasons
    assert f"the address of {name} changed" in reason
    assert all((hex(t.data_ptr()) in reason) == core.debug_build() for t in (x, y)), reason


def test_limit_ends_after_its_cool_down(device, short_cool_down):
    a = cgt.jit(one)
    f = cgt.jit(lambda x, k: x * int(k), max_records=2)
    x = numbers(device)
    a(x), f(x, "0")
    for k in range(8):
        for _ in range(6):
            cgt.step()
            assert same(f(a(x), str(k)), one(x) * k)
    warmups, records, replays, eager = counts(f)
    assert (warmups, records) == (1, 8) and 0 < eager <= 6 * 4 and replays >= 6 + 2 * 5
    assert len(nodes_of(f)) == 2 and len(nodes_of(a)) == 1


@pytest.mark.parametrize("bad", [0, -1, True, 2.5, "8", None])
def test_bad_max_graphs_is_refused_with_its_name(device, bad):
    with pytest.raises(cgt.CgtError, match="max_graphs"):
        cgt.jit(one, max_graphs=bad)


def test_leaf_that_ran_longest_ago_makes_room_and_what_is_held_stays(device):
    room = len(core.nodes()) + 4
    f, root = (cgt.jit(h, max_graphs=room) for h in (lambda x, k: x + int(k), one))
    x = numbers(device)
    root(x), f(x, "0")
    held = []

    def call(*ks):
        for k in ks:
            refill(x, len(held))
            cgt.step()
            held.append((f(root(x), str(k)), one(x) + k))
            assert same(*held[-1]) and len(core.nodes()) <= room
        return counts(f)

    assert call(0, 1, 2, 0) == (1, 3, 1, 0)
    assert call(3) == (1, 4, 1, 0)  # 1 goes; the root is older, but no leaf
    assert call(0, 2, 3) == (1, 4, 4, 0)
    assert call(1, 4, 5, 6) == (1, 8, 4, 0)
    assert counts(root) == (1, 1, 11, 0)
    assert all(same(y, want) for y, want in held)


def test_recording_that_would_be_replaced_may_be_evicted_first(device):
    g, h = cgt.jit(one), cgt.jit(four)
    f = cgt.jit(two, max_graphs=len(core.nodes()) + 2)
    x, moved = numbers(device), numbers(device, start=5)
    for k in (g, f, h):
        for _ in iterations(2):
            k(x)
    for _ in iterations(3):
        assert same(f(moved), two(moved))
        core.check_table()
    assert counts(f) == (1, 2, 2, 0)


@pytest.mark.parametrize("hold", [False, True], ids=["dropped", "held"])
def test_reset_in_the_middle_of_a_path_frees_what_was_recorded_behind(device, hold):
    x = big_numbers(device)
    a, b, c, d = fs = [cgt.jit(f) for f in (one, two, four, narrow)]
    for f in fs:
        f(x)
    cgt.step()
    d(a(x))
    rest = cgt.stats().pool_bytes
    for _ in iterations(3):
        y = a(x)
        z = b(y)
        w = c(z)
    whole = cgt.stats().pool_bytes
    assert names_of(path_of(device)) == ["one", "two", "four"] and whole > rest
    kept = [(y, one(x)), (z, two(one(x))), (w, four(two(one(x))))] if hold else []
    del y, z, w
    cgt.reset(b)
    assert names_of(path_of(device)) == ["one"]
    assert [len(nodes_of(f)) for f in fs] == [1, 0, 0, 1]
    if device.type == "cpu":  # CUDA: free for what is recorded later
        assert cgt.stats().pool_bytes == rest
    for k in iterations(5):
        assert all(same(got, want) for got, want in kept)
        if k == 2:
            kept.clear()
        refill(x, k + 1)
        y = a(x)
        z = b(y)
        assert same(c(z), four(two(one(x)))) and same(y, one(x)) and same(z, two(one(x)))
        del y, z
    assert [counts(f)[3] for f in fs] == [0] * 4
    assert names_of(path_of(device)) == ["one", "two", "four"]
    assert counts(d) == (1, 1, 0, 0)


# --- threads, streams, devices ----------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False], ids=["same functions", "a pair each"])
def test_eight_threads_with_one_that_steps(device, shared):
    fs = [cgt.jit(cell) for _ in range(1 if shared else 8)] * (8 if shared else 1)
    gs = [cgt.jit(four) for _ in range(1 if shared else 8)] * (8 if shared else 1)
    xs = [numbers(device, 16, start=k) for k in range(8)]

    def work(k):
        kept, want = [], cell(xs[k], xs[0])
        for j in range(20):
            if k == 0:
                cgt.step()
            y = fs[k](xs[k], xs[0])
            assert same(gs[k](y), four(want))
            if j % 5 == 0:
                kept.append(y)
            del y
        assert all(same(y, want) for y in kept)

    in_threads(8, work)
    for f in {*fs, *gs}:
        assert sum(counts(f)) == (160 if shared else 20)
        reasons = cgt.stats(f).reasons
        told = ("another thread", "a thread that", "max_records", "ran for the first time")
        assert all(any(text in r for text in told) for r in reasons), reasons
    core.alone()
    replays = cgt.stats().replays
    for _ in iterations(4):
        assert same(gs[0](fs[0](xs[0], xs[0])), four(cell(xs[0], xs[0])))
    assert cgt.stats().replays > replays


@GPU_ONLY
@pytest.mark.parametrize("links", [False, True], ids=["iterations", "links of a chain"])
def test_calls_on_different_streams_are_ordered(links):
    fs = [cgt.jit(f) for f in (one, two, four)]
    x = numbers(torch.device("cuda"), 2**20)
    streams = [torch.cuda.Stream() for _ in range(3)]
    for k in iterations(30, x):
        want = four(two(one(x)))
        torch.cuda.synchronize()
        y = x
        # Warm-ups are the program's own ops, which nobody orders: they stay on one stream.
        on = [streams[(j if links and k else k) % 3] for j in range(3)]
        for f, stream in zip(fs, on, strict=True):
            with torch.cuda.stream(stream):
                y = f(y)
        with torch.cuda.stream(on[-1]):
            assert same(y, want)
        torch.cuda.synchronize()
        del y, want
    assert [counts(f) for f in fs] == [(1, 1, 28, 0)] * 3


def on_a_stream_of_its_owner(f, x, calls):
    """f(x) so often on a stream that torch does not own, which is destroyed while it still works. The last result."""
    cuda, handle = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    assert cuda.cuStreamCreate(ctypes.byref(handle), 1) == 0  # which waits for no other
    with torch.cuda.stream(torch.cuda.ExternalStream(handle.value)):
        for _ in range(calls):
            y = f(x)
        kept = y.clone()
    assert cuda.cuStreamDestroy_v2(handle) == 0
    return kept


@GPU_ONLY
def test_a_call_after_one_on_a_stream_that_was_destroyed():
    f, x = cgt.jit(four), numbers(torch.device("cuda"), 2**22)
    want = four(x)
    torch.cuda.synchronize()
    for _ in range(3):
        f(x)
    for _ in range(5):
        kept = on_a_stream_of_its_owner(f, x, 4)
        assert same(f(x), want) and same(kept, want)
    assert cgt.stats(f).replays >= 20 and not cgt.stats(f).eager, cgt.explain(f)


@GPU_ONLY
def test_a_call_while_somebody_captures_on_the_stream_of_the_last_one():
    """It would wait for that stream, and so become part of the capture: it runs as it is."""
    f, x, other = cgt.jit(four), numbers(torch.device("cuda"), 64), torch.cuda.Stream()
    want, graph = four(x), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        for _ in range(4):
            y = f(x)
    with torch.cuda.graph(graph, stream=other, capture_error_mode="thread_local"):
        z = x + 1
        with torch.cuda.stream(torch.cuda.default_stream()):
            before = cgt.stats(f)
            again = f(x)
            assert not torch.cuda.is_current_stream_capturing()
            assert cgt.stats(f).replays == before.replays and errors.blocked(4) in cgt.stats(f).reasons
    graph.replay()
    assert same(y, want) and same(again, want) and same(z, x + 1)
    before = cgt.stats(f).replays
    assert same(f(x), want) and cgt.stats(f).replays == before + 1


@GPU_ONLY
def test_a_pool_that_is_over_while_another_thread_captures():
    """Its memory goes back when nobody captures any more, and the capture is whole."""
    x, began, over, held = numbers(torch.device("cuda"), 2**22), threading.Event(), threading.Event(), []
    cgt.reset()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    f = cgt.jit(lambda x: (x * 2).sin())
    for _ in range(3):
        f(x)
    torch.cuda.synchronize()

    def capture():
        graph, own = torch.cuda.CUDAGraph(), torch.ones(8, device="cuda")
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y = own + 1
            began.set()
            assert over.wait(60)
            z = y * 3
        graph.replay()
        held.append(z.sum().item())

    thread = threading.Thread(target=capture)
    thread.start()
    assert began.wait(60)
    cgt.reset(f)
    over.set()
    thread.join()
    assert held == [48.0], "the capture broke"
    cgt.reset()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + 2**22, "the pool's memory is gone for good"


@GPU_ONLY
def test_host_and_gpu_have_paths_of_their_own():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    pairs = [[cgt.jit(f) for f in (one, two)] for _ in range(2)]
    both = cgt.jit(four)
    xs = numbers(cpu), numbers(cuda)
    for _ in iterations(8, *xs):
        ys = [f(x) for (f, _), x in zip(pairs, xs, strict=True)]
        ys = [g(y) for (_, g), y in zip(pairs, ys, strict=True)]
        for x, y in zip(xs, ys, strict=True):
            assert same(both(y), four(two(one(x))))
        del y, ys
    assert all(counts(f) == (1, 1, 6, 0) for pair in pairs for f in pair)
    assert counts(both) == (2, 2, 12, 0)
    for device, row in ((cpu, 0), (cuda, 1 + index_of(cuda))):
        assert [core.node_facts(n).path for n in path_of(device)] == [row] * 3
        assert names_of(path_of(device)) == ["one", "two", "four"]
    assert "cpu: 3 recordings" in cgt.explain() and "cuda:0: 3 recordings" in cgt.explain()


# --- what users leave on a result of the path -------------------------------------------------

LITTER = {
    "requires_grad": lambda y: y.requires_grad_(),
    "grad": lambda y: (y.requires_grad_(), (y * 3).sum().backward()),
    "hook": lambda y: (y.requires_grad_(), y.register_hook(lambda g: g * 100)),
    "attribute": lambda y: setattr(y, "label", "mine"),
    "in place": lambda y: y.add_(5),
    "reshape": lambda y: y.unsqueeze_(0),
}


def looks(t):
    """All that a fresh tensor could differ in, but its values."""
    about = t.shape, t.stride(), t.requires_grad, t.grad, t.grad_fn, t.is_leaf, t._version
    return *about, t._backward_hooks, dict(t.__dict__)


@pytest.mark.parametrize("held", [False, True], ids=["dropped", "held"])
@pytest.mark.parametrize("leave", LITTER.values(), ids=LITTER.keys())
def test_what_is_left_on_results_does_not_show_in_the_next_iteration(device, leave, held):
    f, g = cgt.jit(one), cgt.jit(two)
    x = numbers(device)
    kept = []
    for k in iterations(6, x):
        y = f(x)
        z = g(y)
        assert looks(y) == looks(one(x)) and looks(z) == looks(two(one(x)))
        assert same(y, one(x)) and same(z, two(one(x)))
        if k > 0:
            leave(y), leave(z)
        if held:
            kept.append((y, z))
        del y, z
    assert counts(f) == counts(g) == (1, 1, 4, 0)


# --- timings ----------------------------------------------------------------------------------


def test_seconds_of_every_phase_are_kept(device):
    f, g = cgt.jit(one), cgt.jit(two)
    x = numbers(device)
    seen = []
    for _ in iterations(4):
        g(f(x))
        seen.append(cgt.stats(f).seconds)
    assert seen[0]["warm"] > 0
    assert seen[1].keys() == {"warm", "look", "restore", "capture", "instantiate", "checkpoint"}
    assert all(0 < s < 10 for s in seen[1].values())
    assert seen[1] == seen[2] == seen[3]  # a replay adds nothing
    assert all(cgt.stats().seconds[p] > s for p, s in seen[1].items())
    made = sum(seconds for phase, seconds in seen[1].items() if phase not in ("warm", "look"))
    assert f"{1e3 * made:.2f} ms" in cgt.explain(f)


def test_profiler_shows_warm_record_and_replay_by_name(device):
    f, g = cgt.jit(one), cgt.jit(two)
    x = numbers(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in iterations(4):
            g(f(x))
    seen = {e.key: e.count for e in profile.key_averages() if e.key.startswith("cgt.")}
    each = {"warm": 1, "record": 1, "replay": 2}
    assert seen == {f"cgt.{kind} {name}": each[kind] for kind in each for name in ("one", "two")}


# --- faults -----------------------------------------------------------------------------------


@pytest.mark.parametrize("behind", [False, True], ids=["first", "behind another"])
@pytest.mark.parametrize("call", ["restore", "checkpoint"])
def test_failed_recording_is_eager_leaks_nothing_and_ends(device, short_cool_down, call, behind):
    root, f = cgt.jit(one), cgt.jit(four)
    x = numbers(device)

    def run():
        cgt.step()
        y = root(x) if behind else x
        assert same(f(y), four(one(x) if behind else x))
        assert not behind or same(y, one(x))

    root(x), root(x)
    run()
    books = core.books()
    core.fault_set(call, 0, 2)
    run()
    assert counts(f) == (1, 0, 0, 1)
    (reason,) = cgt.stats(f).reasons
    assert "recording failed" in reason
    gc.collect()
    assert core.books() == books
    core.check_table()
    for k in range(8):
        refill(x, k)
        run()
    assert counts(f)[:2] == (1, 1) and cgt.stats(f).eager <= 3
    assert counts(root)[3] == 0


@pytest.mark.parametrize("recorded", [False, True], ids=["recording", "replay"])
def test_failed_rescue_is_eager_or_an_error_of_cgt(device, short_cool_down, recorded):
    f, g = cgt.jit(one), cgt.jit(two)
    x = numbers(device)
    for _ in iterations(3, x):
        f(x)
    for _ in iterations(1 + recorded, x):
        g(x)
    cgt.step()
    y, want = f(x), one(x)
    cgt.step()
    core.fault_set("move", 0, 2)
    with contextlib.suppress(cgt.CgtError):
        assert same(g(x), two(x))
    for _ in iterations(6, x):
        assert same(g(x), two(x)) and same(f(x), one(x)) and same(y, want)
    assert cgt.stats(g).replays > 0


@GPU_ONLY
def test_memory_of_the_pool_that_something_else_keeps_spoils_only_that_pool():
    x = numbers(torch.device("cuda"))
    kept = set()  # cgt puts back a list that a failed recording changed

    def keeps(x):
        kept.add(torch.cuda.caching_allocator_alloc(1024))
        return x * 7

    f, root, g = cgt.jit(keeps), cgt.jit(one), cgt.jit(two)
    try:
        for _ in iterations(6, x):
            assert same(f(root(x)), one(x) * 7)
        s = cgt.stats(f)
        assert sum(counts(f)) == 6 and sum(s.reasons.values()) == s.eager
        for _ in iterations(4, x):
            y = root(x)
            assert same(g(y), two(one(x))) and same(y, one(x))
            del y
        assert counts(root)[3] == 0 and counts(g) == (1, 1, 2, 0)
    finally:
        for memory in kept:
            torch.cuda.caching_allocator_delete(memory)
    for _ in iterations(4, x):
        assert same(g(root(x)), two(one(x)))
    assert counts(g)[3] == 0


@pytest.mark.parametrize("kinds", [((0, 2), (1, 3), (1, 2), (3, 0)), ((0, 1), (1, 0)), ((0, 0), (0, 1), (2, 1))], ids=["four", "swapped", "twins"])
def test_results_of_a_path_that_come_in_other_slots_are_no_end_of_recordings(device, kinds):
    f, g = cgt.jit(two), cgt.jit(lambda a, b: a - b * 3)
    kept = 0
    for i in range(40):
        if i == 16:
            kept = cgt.stats(g).replays
        cgt.step()
        inputs = [numbers(device, start=i + k) for k in range(4)]
        outs = [f(x) for x in inputs]
        k, m = kinds[i % len(kinds)]
        assert same(g(outs[k], outs[m]), inputs[k] * 2 - inputs[m] * 2 * 3), i
    assert cgt.stats(g).records <= 6 and cgt.stats(g).replays == kept + 24, cgt.explain(g)
