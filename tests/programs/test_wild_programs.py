"""Random programs that do what real ones do besides computing agree with eager, bit for bit, after every action.

As in test_programs.py, with threads that call at the same time, interrupts, functions that keep part of their
arguments for a backward, write what they do not read, draw from outside of PyTorch, or talk to other
processes. Each family has programs of its own, and one has all of it. CGT_PROGRAMS says how many to try:

    CGT_PROGRAMS=20000 python -m pytest tests/programs/test_wild_programs.py -k everything
"""

import gc
import os
import random
import threading
import time

import cgt_core as core
import interrupts
import numpy
import pytest
import torch
import torch.distributed as dist
import wild
from helpers import STEPS, bits, in_threads, says_step, try_programs
from hypothesis import strategies as st
from wild import (
    ALONE,
    COLLECTIVES,
    DRAWS,
    KEEPERS,
    PLAIN,
    STORES,
    W,
    added,
    begin_world,
    end_world,
    scale,
    world_now,
)  # fmt: skip

import cgt

SIZE, VARIABLES, REPEATS = 24, 3, 7
interrupts.USERS.add(wild.__file__)


# --- programs -------------------------------------------------------------------------------------

index, which = st.integers(0, VARIABLES - 1), st.integers(0, 4)
calls = st.tuples(st.just("call"), which, index, index, index)
backwards = st.tuples(st.just("backward"), index)
common = st.one_of(
    backwards,
    st.tuples(st.just("hold"), index),
    st.tuples(st.just("write held"), st.integers(0, 7)),
    st.tuples(st.just("drop"), st.integers(0, 7)),
    st.tuples(st.just("new"), index, st.integers(0, 9)),
    st.tuples(st.just("reset"), which),
)
threads = st.tuples(st.just("threads"), st.sampled_from(ALONE), st.integers(2, 3), st.booleans())
interrupt = st.one_of(
    st.tuples(st.just("interrupt"), which, st.just("moment"), st.integers(0, 4000)),
    st.tuples(st.just("interrupt"), which, st.just("timer"), st.integers(1, 2000)),
)
world = st.one_of(
    st.tuples(st.just("seed"), st.integers(0, 3)),
    st.tuples(st.just("count")),
    st.tuples(st.just("store"), st.integers(1, 3)),
    st.tuples(st.just("forget")),
)
FAMILIES = {
    "threads": ((*PLAIN, *KEEPERS), threads),
    "interrupts": ((*PLAIN, *KEEPERS), interrupt),
    "keepers": ((scale, *KEEPERS), backwards),
    "stores": ((*PLAIN, *STORES), world),
    "draws": ((*PLAIN, *DRAWS), world),
    "collectives": ((*PLAIN, *COLLECTIVES), common),
    "everything": (
        (*PLAIN, *KEEPERS, *STORES, *DRAWS, *COLLECTIVES),
        st.one_of(threads, interrupt, world),
    ),
}


def programs(family):
    """Programs with this family's functions and actions; half of all actions are calls."""
    functions, special = FAMILIES[family]
    action = st.sampled_from("ccccass").flatmap({"c": calls, "a": common, "s": special}.get)
    return st.fixed_dictionaries(
        {
            "functions": st.lists(st.sampled_from(functions), min_size=2, max_size=5),
            "steps": st.sampled_from(STEPS),
            "inputs": st.sampled_from(["auto", "auto", "copied"]),
            "keep": st.integers(0, 2),
            "body": st.lists(action, min_size=2, max_size=5),
            "extra": st.dictionaries(st.integers(1, REPEATS - 1), action, max_size=2),
            "begins": st.sampled_from(["anew", "moved", "moved", "carried on"]),
        }
    )


def numbers(device, seed):
    return torch.arange(SIZE, device=device, dtype=torch.float32).sub(seed).mul(0.125 + seed / 8)


def leaves(result):
    """Tensors of a result in order, and its plain values."""
    if isinstance(result, torch.Tensor):
        return [result], []
    values = list(result.values() if isinstance(result, dict) else result)
    return [v for v in values if isinstance(v, torch.Tensor)], [
        v for v in values if not isinstance(v, torch.Tensor)
    ]


def alone(function, plain, p, device, seed):
    """A call that depends on nothing else, with the gradient of its input if it has one: bits."""
    writes = plain is added
    x, y = numbers(device, seed).requires_grad_(not writes), numbers(device, seed + 1)
    made, _ = leaves(function(p, x if writes else x * 1, y))
    grads = () if writes else torch.autograd.grad(made[-1].sum(), [x], allow_unused=True)
    return [None if t is None else bits(t) for t in (*made, *grads)]


def run(program, device, functions, is_jitted):
    """What every tensor was after every action."""
    begin_world()
    p = {"w": numbers(device, 3).requires_grad_()}
    inputs = [numbers(device, k) for k in range(VARIABLES)]
    variables, held, seen = list(inputs), [], []
    jitted_of = dict(zip(program["functions"], functions, strict=True))

    def call(f, a, b, to):
        function = program["functions"][f % len(functions)]
        if function is added and variables[a].requires_grad:
            variables[a] = variables[a].detach().clone()
        before = time.monotonic_ns()
        made, plain = leaves(functions[f % len(functions)](p, variables[a], variables[b]))
        after = time.monotonic_ns()
        held.extend(made[: program["keep"]])
        variables[to] = [t for t in made if t.shape == (SIZE,)][-1]
        return [repr(value) if isinstance(value, float) else before <= value <= after for value in plain]

    def backward(t):
        if not t.requires_grad:
            return None
        try:
            t.square().sum().backward(retain_graph=False)
        except RuntimeError as error:
            p["w"].grad = None  # some gradients may have arrived, in another order than in eager
            if "second time" in str(error):
                return "used up"
            told = any(part in str(error) for part in ("inplace", "modified"))
            return "told" if told else "raised"
        return None

    def several(function, n, shared):
        f, wants = jitted_of.get(function, function), [None] * n

        def work(k):
            wants[k] = [alone(f, function, p, device, 0 if shared else k) for _ in range(2)]

        if is_jitted:
            in_threads(n, work)
        else:
            for k in range(n):
                work(k)
        return wants

    def interrupted(f, by, n):
        """Interrupts a call of which nothing is seen; eager does nothing at all."""
        function = program["functions"][f % len(functions)]
        if is_jitted and function in ALONE:
            state = torch.get_rng_state()
            how = {"moment": interrupts.at_moment, "timer": interrupts.after_microseconds}[by]
            how(n, lambda: alone(functions[f % len(functions)], function, p, device, 1))
            torch.set_rng_state(state)

    def act(what, *rest):
        told = None
        if what == "call":
            told = call(*rest)
        elif what == "backward":
            told = backward(variables[rest[0]])
        elif what == "threads":
            told = several(*rest)
        elif what == "interrupt":
            interrupted(*rest)
        elif what == "hold":
            held.append(variables[rest[0]])
        elif what == "write held" and held and not held[rest[0] % len(held)].requires_grad:
            held[rest[0] % len(held)].mul_(0.5)
        elif what == "drop" and held:
            held.pop(rest[0] % len(held))
        elif what == "new":
            variables[rest[0]] = numbers(device, rest[1])
        elif what == "reset" and is_jitted:
            cgt.reset(functions[rest[0] % len(functions)])
        elif what == "seed":
            random.seed(rest[0]), numpy.random.seed(rest[0]), W.random.seed(rest[0])
        elif what == "count":
            next(W.counter)
        elif what == "store":
            W.s.n = rest[0]
        elif what == "forget":
            W.found.clear()
            W.s.last = None
        del held[:-6]
        stored, drawn = world_now()
        everything = (*variables, *held, *stored, p["w"].grad)
        seen.append((told, drawn, [None if t is None else bits(t).clone() for t in everything]))

    for k in range(REPEATS):
        if says_step(program["steps"], k):
            cgt.step()
        if program["begins"] != "carried on":
            moved = program["begins"] == "moved"
            variables[:] = [t + 0.5 * k for t in inputs] if moved else inputs
        for one in program["body"]:
            act(*one)
        if k in program["extra"]:
            act(*program["extra"][k])
        variables[:] = [t.detach() for t in variables]
    return seen


def same(a, b):
    """Equal bits, in equal lists."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def check(program, device):
    """The jitted functions, which agreed with eager: how often each replayed, and what became of it."""
    want = run(program, device, program["functions"], False)
    jitted = [cgt.jit(f, inputs=program["inputs"]) for f in program["functions"]]
    try:
        got = run(program, device, jitted, True)
        core.check_table()
        for k, ((told, *a), (wanted, *b)) in enumerate(zip(got, want, strict=True)):
            if (told in ("told", "used up") and wanted is None) or (told is None and wanted == "used up"):
                break  # docs/footguns.md: a call is one node, so a backward sees all of its history, or none
            assert same(told, wanted), f"action {k}: {str(told)[:80]} but {str(wanted)[:80]}"
            assert a[0] == b[0], f"world after action {k}"
            assert same(a[1], b[1]), f"after action {k}"
        return [cgt.stats(f).replays for f in jitted], [cgt.explain(f) for f in jitted]
    finally:
        cgt.reset()
        core.alone()
        end_world()


def how_many(device):
    """Programs of each family."""
    few = 10 if core.debug_build() or device.type == "cuda" else 25
    return int(os.environ.get("CGT_PROGRAMS", few))


@pytest.fixture
def process_group(device):
    """A group of this process alone."""
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    gc.freeze()  # recordings of what keeps something collect: let that be quick
    yield
    cgt.reset()
    dist.destroy_process_group()


@pytest.mark.parametrize("family", FAMILIES)
def test_wild_programs_agree_with_eager_after_every_action(device, process_group, family):
    try_programs(programs(family), lambda program: check(program, device), how_many(device), fewer=False)
    assert threading.active_count() < 20


@pytest.mark.parametrize("begins", ["anew", "moved"])
@pytest.mark.parametrize(
    "function", sorted({f for fs, _ in FAMILIES.values() for f in fs}, key=lambda f: f.__name__)
)
def test_loop_with_a_wild_function_agrees_and_the_other_replays(
    device, process_group, function, begins
):
    """One by one, beside a function that replays whatever that one does."""
    program = {
        "functions": [scale, function],
        "steps": "never",
        "inputs": "auto",
        "keep": 1,
        "body": [
            *(("call", 1, 1, 2, 2), ("write held", 0), ("backward", 2)),
            *(("call", 0, 0, 1, 0), ("backward", 0), ("drop", 0)),
        ],
        "extra": {},
        "begins": begins,
    }
    replays, told = check(program, device)
    # One call warms, and one records. One more may: what lay at one address twice, by luck, is taken to stay there.
    assert replays[0] >= REPEATS - 3 and "0 eager" in told[0], told[0]
