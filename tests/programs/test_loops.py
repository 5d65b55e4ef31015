"""Loops in which the program does not say step(), though it may say it elsewhere; and other threads that move the path
meanwhile: a path forgets what is dead."""

import threading

import pytest
from helpers import counts, numbers, refill
from test_tree import (
    big_numbers,
    cell,
    children_of,
    four,
    iterations,
    names_of,
    nodes_of,
    one,
    path_of,
    same,
    three,
    two,
)

# isort: split
import cgt_core as core

import cgt
from cgt.words import errors


def drops(f, g, x, kept):
    return [f(x) * 1]


def keeps_one_back(f, g, x, kept):
    kept[:1] = [f(x)]
    return kept


def appends(f, g, x, kept):
    kept.append(f(x))
    return kept[-1:]


def holds_four(f, g, x, kept):
    return [f(x) for _ in range(4)]


def window_of_four(f, g, x, kept):
    kept[:] = [*kept[-3:], f(x)]
    return kept[-1:]


def in_turn(f, g, x, kept):
    return [f(x) * 1, g(x) * 1]


def in_turn_kept_back(f, g, x, kept):
    kept[:1] = [f(x)]
    kept[1:] = [g(x)]
    return kept


def inner_loop(f, g, x, kept):
    y = f(x)
    for _ in range(6):
        z = g(y)
        kept[:] = [*kept[-5:], z * 1]
    return [y, *kept]


def inner_loop_dropped(f, g, x, kept):
    y = f(x)
    return [y, *(g(y) * 1 for _ in range(6))]


LOOPS = (
    drops, keeps_one_back, appends, holds_four, window_of_four, in_turn, in_turn_kept_back,
    inner_loop, inner_loop_dropped,
)  # fmt: skip


@pytest.mark.parametrize("train", [True, False], ids=["after steps", "alone"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loop_that_says_no_step_settles_within_four_records(device, loop, train):
    f, g, h = cgt.jit(one), cgt.jit(two), cgt.jit(four)
    x = numbers(device)
    held, kept, wanted = None, [], []
    for _ in iterations(4, x) if train else ():
        held = h(x)
    for k in range(40):
        refill(x, k)
        want = loop(one, two, x, wanted)
        assert all(same(a, b) for a, b in zip(loop(f, g, x, kept), want, strict=True))
        if k == 8:
            records = cgt.stats().records
    assert held is None or same(held, four(numbers(device, start=3)))
    for function in (f, g):
        s = cgt.stats(function)
        assert s.records <= 4 and s.eager == 0 and s.calls == s.warmups + s.records + s.replays
    assert cgt.stats().records == records
    assert all(same(a, b) for a, b in zip(kept, wanted, strict=True))


def test_loop_after_steps_goes_back_to_what_is_held_without_a_copy(device):
    train, f = cgt.jit(four), cgt.jit(one)
    x = numbers(device)
    for _ in range(6):
        for _ in iterations(3, x):
            loss = train(x)
        for k in range(5):
            refill(x, k)
            assert same(f(x), one(x)) and len(path_of(device)) <= 2
        assert same(loss, four(numbers(device, start=2)))
        (root,) = nodes_of(train)
        assert len(children_of(f, device, root)) == 1
    assert counts(train) == (1, 1, 16, 0) and counts(f) == (1, 1, 28, 0)
    assert (cgt.stats(f).rescues, cgt.stats(f).copied_bytes) == (0, 0)


def test_independent_results_held_between_steps_are_a_path_as_long_as_the_iteration(device):
    """Nothing is moved once the program has shown how long its iterations are."""
    f = cgt.jit(one)
    x = numbers(device)
    for k in iterations(12, x):
        held = [f(x) for _ in range(6)]
        if k == 4:
            before = cgt.stats(f)
        assert all(same(y, one(x)) for y in held)
        del held
    s = cgt.stats(f)
    assert (s.records, s.rescues) == (before.records, before.rescues) and s.records <= 8
    assert len(path_of(device)) == 6


@pytest.mark.parametrize("window", [1, 3])
def test_long_loop_that_holds_its_last_results_between_steps_is_no_path_of_its_length(device, window):
    """A rollout: a policy is asked 40 times in each iteration, and what it said last is held."""
    f, x, held = cgt.jit(one), numbers(device), []
    for k in iterations(8, x):
        for _ in range(40):
            held = [*held[1 - window :], f(x)] if window > 1 else [f(x)]
        if k == 4:
            records = cgt.stats(f).records
        assert all(same(y, one(x)) for y in held)
    assert cgt.stats(f).records == records <= 2 * window + 2 and cgt.stats(f).eager == 0


@pytest.mark.parametrize("outputs", ["error", "borrow"])
def test_results_that_stay_where_they_are_last_until_step(device, outputs):
    f = cgt.jit(one, outputs=outputs)
    x = numbers(device)
    f(x)
    for k in iterations(3, x):
        for _ in range(2):
            f(x)  # dropped
        held = []
        for j in range(5):
            refill(x, 10 * k + j)
            held.append(f(x))
        assert all(same(y, one(numbers(device, start=10 * k + j))) for j, y in enumerate(held))
        del held
    assert counts(f) == (1, 7, 14, 0) and cgt.stats(f).rescues == 0  # a child is looked for first


def test_chain_without_an_end_is_a_path_of_bounded_length(device):
    f = cgt.jit(cell)
    x = numbers(device)
    cgt.step()
    got = want = numbers(device, start=3)
    for k in range(120):
        refill(x, k)
        got, want = f(x, got), cell(x, want)
        assert same(got, want) and len(path_of(device)) <= 16
    s = cgt.stats(f)
    assert s.eager == 0 and s.records == 16 and s.replays == 103


def test_node_whose_backward_is_to_come_is_not_gone_back_behind(device):
    f, g = cgt.jit(lambda x, w: (x * w).sum()), cgt.jit(two)
    x, w = numbers(device), numbers(device, start=2).requires_grad_()
    for k in iterations(6, x):
        w.grad = None
        loss = f(x, w)
        for _ in range(3):
            assert same(g(x), two(x))
        assert k < 2 or names_of(path_of(device)) == ["<lambda>", "two"]
        loss.backward()
        assert same(w.grad, x)
        del loss
    assert cgt.stats(f).eager == cgt.stats(g).eager == 0


# --- other threads ----------------------------------------------------------------------------


def test_path_that_comes_back_while_a_function_is_recorded_has_lost_it(device):
    """Another thread drops what kept the parent, and replays it: its results lie where they were dead."""
    root, pair = cgt.jit(one), cgt.jit(lambda u: (u + 1, u * 2))
    during = {len}  # a set: is not looked into

    def plain(x):
        (act,) = during
        act()
        return x.sin(), x.cos(), x.tan()

    f, x, u = cgt.jit(plain), numbers(device), numbers(device, start=3)
    during = {lambda: None}
    f(x)
    held = []
    for _ in iterations(3):
        first, kept = root(x), [pair(u)[0]]

    def comes_back():
        if not kept:  # CUDA: what was lost runs again
            return
        kept.clear()
        u.add_(1)
        thread = threading.Thread(target=lambda: held.extend(pair(u)))
        thread.start()
        thread.join()

    during = {comes_back}
    before = cgt.stats(pair).replays
    assert all(same(a, b) for a, b in zip(f(x), (x.sin(), x.cos(), x.tan()), strict=True))
    assert same(held[0], u + 1) and same(held[1], u * 2) and same(first, one(x))
    assert cgt.stats(pair).replays == before + 1
    assert cgt.stats(f).records == 0 and list(cgt.stats(f).reasons) == [errors.lost()]


def test_result_that_is_rescued_while_it_goes_onto_the_tape(device, monkeypatch):
    """Twice, by another thread's replays: then it does not lie where the recording writes it, and that moves."""
    f, g, x = cgt.jit(three), cgt.jit(lambda y: (y[2:].tanh(), y.sum())), big_numbers(device)
    for _ in iterations(3):
        f(x)
    g(x)
    path_proto, address, view_like = core.path_proto, core.address, core.view_like
    protos, held, outside = [], [], []

    def rescue():
        cgt.step()
        held[:] = f(x)

    def move():
        thread = threading.Thread(target=rescue)
        thread.start()
        thread.join()

    def watched_proto(at, t):
        proto = path_proto(at, t)
        if proto is not None and core.books()["recording"] and not protos:
            protos.append(proto)
            move()
        return proto

    def watched_address(t):
        found = address(t)
        if any(t is proto for proto in protos):
            move()
        return found

    def watched_view(base, like, shift):
        made = view_like(base, like, shift)
        if not 0 <= address(made) - core.storage_address(base) < base.untyped_storage().nbytes():
            outside.append(shift)
        return made

    cgt.step()
    y = f(x)[1]
    with monkeypatch.context() as patch:
        for name, watched in (("path_proto", watched_proto), ("address", watched_address), ("view_like", watched_view)):
            patch.setattr(core, name, watched)
        got = g(y)
    want = g.__wrapped__(x * 3)
    assert all(same(a, b) for a, b in zip(got, want, strict=True)) and same(y, x * 3)
    assert outside == []
    if device.type == "cpu":  # on CUDA nobody asks
        assert cgt.stats(f).rescues >= 1 and list(cgt.stats(g).reasons) == [errors.lost()]
