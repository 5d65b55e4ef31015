"""Ops that other threads run on behalf of a function: a pool, a queue, a thread that it starts. No recording has them, so such a function runs
eagerly; threads of the program's own, which have nothing to do with it, are in nobody's way."""

import collections
import concurrent.futures
import functools
import logging
import queue
import threading
import time

import torch

# isort: split
import cgt_core as core
import pytest
from helpers import tells

import cgt


def by_thread(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


class Worker:
    """A thread that waits for work in some way of its own."""

    def __init__(self, wait):
        self.given, self.done, self.over = collections.deque(), collections.deque(), False
        self.more, self.ready, self.wait = threading.Event(), threading.Event(), wait
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        while not self.over:
            if self.given:
                self.done.append(self.given.popleft()())
                self.ready.set()
            else:
                self.wait(self)

    def __call__(self, work):
        self.ready.clear()
        self.given.append(work)
        self.more.set()
        while not self.done:
            pass
        return self.done.popleft()

    def close(self):
        self.over = True
        self.more.set()
        self.thread.join()


def woken(worker):
    worker.more.wait()
    worker.more.clear()


@pytest.fixture(params=["thread", "pool", "map", "pool made there", "queue", "event", "looks"])
def elsewhere(request):
    """Have another thread do some work; its result."""
    pool, given, done = concurrent.futures.ThreadPoolExecutor(1), queue.Queue(), queue.Queue()
    pool.submit(lambda: None).result()

    def serve():
        while (work := given.get()) is not None:
            done.put(work())

    def by_queue(work):
        given.put(work)
        return done.get()

    def by_new_pool(work):
        with concurrent.futures.ThreadPoolExecutor(2) as new:
            return new.submit(work).result()

    server = threading.Thread(target=serve)
    server.start()
    worker = Worker(woken if request.param == "event" else lambda _: time.sleep(0.0001))
    yield {
        "thread": by_thread, "pool": lambda work: pool.submit(work).result(), "map": lambda work: next(pool.map(lambda w: w(), [work])),
        "pool made there": by_new_pool, "queue": by_queue, "event": worker, "looks": worker,
    }[request.param]  # fmt: skip
    given.put(None)
    server.join()
    worker.close()
    pool.shutdown()


@tells("op_elsewhere")
def test_what_another_thread_computes_is_computed_at_each_call(device, elsewhere):
    def function(x, k):
        y = elsewhere(lambda: x * 2)
        return y + 1, elsewhere(lambda: (x * k).sum())

    f = cgt.jit(function)
    for k in range(8):
        x = torch.full((3,), float(k), device=device)
        y, total = f(x, 1.0 + k)
        assert torch.equal(y, x * 2 + 1) and torch.equal(total, (x * (1.0 + k)).sum()), k
    assert cgt.stats(f).replays == 0 and cgt.stats(f).reasons, cgt.explain(f)


def test_advice_to_jit_what_the_other_thread_runs(device, elsewhere):
    inner = cgt.jit(lambda x: x * 2 + 1)
    f = cgt.jit(lambda x: elsewhere(lambda: inner(x)) - 1)
    for k in range(8):
        x = torch.full((3,), float(k), device=device)
        assert torch.equal(f(x), x * 2)
    assert cgt.stats(inner).replays >= 3 and cgt.stats(f).replays == 0, cgt.explain(inner)


@pytest.mark.parametrize("first", [2, 3, 5])
def test_function_that_begins_to_use_threads(device, first):
    """At a call that is recorded, or to be: there a number that changes was a stand-in. (A pool that starts a thread asks for the time, too.)"""
    pool, calls = concurrent.futures.ThreadPoolExecutor(1), []

    def function(x, k, uses):
        return pool.submit(lambda: x * k).result() + 1 if uses else x * k - 1

    f = cgt.jit(function)
    for k in range(8):
        x, uses = torch.full((3,), float(k), device=device), k >= first
        assert torch.equal(f(x, 1.0 + k, uses), x * (1.0 + k) + 1 if uses else x * (1.0 + k) - 1), k
        calls.append(cgt.stats(f).replays)
    assert calls[-1] == calls[first - 1] and cgt.stats(f).reasons, cgt.explain(f)
    pool.shutdown()


def test_threads_of_the_programs_own_are_in_nobodys_way(device):
    over = threading.Event()

    def busy():
        y = torch.ones(5)
        while not over.is_set():
            y = (y * 1.5).tanh()

    threads = [threading.Thread(target=busy) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        f = cgt.jit(lambda x: (x * 2).sin() + 1)
        for k in range(8):
            x = torch.full((3,), float(k), device=device)
            assert torch.equal(f(x), (x * 2).sin() + 1)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert cgt.stats(f).replays >= 6, cgt.explain(f)


@pytest.fixture
def server():
    """Threads that give each other work, with ops in it, all the time."""
    over, work = threading.Event(), queue.Queue()

    def serve():
        while (one := work.get()) is not None:
            one()

    def feed():
        while not over.is_set():
            work.put(lambda: torch.ones(5).tanh().sum())
            time.sleep(0.0002)

    threads = [threading.Thread(target=serve), threading.Thread(target=serve), threading.Thread(target=feed)]
    for thread in threads:
        thread.start()
    yield
    over.set()
    threads[2].join()
    for _ in range(2):
        work.put(None)
    for thread in threads:
        thread.join()


@functools.lru_cache(None)
def table(n, device):
    return torch.arange(float(n), device=device)


IN_A_SERVER = {
    "names its thread": lambda x: (threading.current_thread().name, x * 2)[1],
    "logs": lambda x: (logging.getLogger("cgt_test").warning("a step"), x * 2)[1],
    "reads a cache": lambda x: x * table(300, x.device),
}


@pytest.mark.parametrize("function", IN_A_SERVER.values(), ids=IN_A_SERVER.keys())
def test_function_of_a_server_replays(device, server, function, caplog):
    """What its other threads give each other is none of the function's; a cache's memory stays."""
    f = cgt.jit(function)
    for k in range(30):
        x = torch.full((300,), float(k), device=device)
        want = x * (table(300, x.device) if function is IN_A_SERVER["reads a cache"] else 2)
        assert torch.equal(f(x), want)
    assert cgt.stats(f).replays >= 20, cgt.explain(f)


def test_other_thread_that_runs_no_ops_may_be_asked(device):
    pool = concurrent.futures.ThreadPoolExecutor(1)
    pool.submit(lambda: None).result()
    f = cgt.jit(lambda x: x * pool.submit(lambda: 3.0).result())
    for k in range(8):
        x = torch.full((3,), float(k), device=device)
        assert torch.equal(f(x), x * 3)
    assert cgt.stats(f).replays >= 5, cgt.explain(f)
    pool.shutdown()


def test_eager_part_may_give_work_to_threads(device):
    pool, got = concurrent.futures.ThreadPoolExecutor(1), []
    part = cgt.eager(lambda y: got.append(pool.submit(lambda: (y * 2).sum().item()).result()))

    def function(x):
        y = x * 2
        part(y)
        return y + 1

    f = cgt.jit(function)
    for k in range(8):
        x = torch.full((3,), float(k), device=device)
        assert torch.equal(f(x), x * 2 + 1)
    assert got == [12.0 * k for k in range(8)] and cgt.stats(f).replays >= 5, cgt.explain(f)
    pool.shutdown()


def test_nobody_listens_behind_a_run(device):
    def function(x, fails):
        if fails:
            raise ValueError("of mine")
        return x + 1

    f, before = cgt.jit(function), core.listeners()
    for fails in (False, True, False, True):
        try:
            f(torch.ones(3, device=device), fails)
        except ValueError as error:
            assert fails and "of mine" in str(error)
        assert core.listeners() == before
