"""What does the tree cost: going on along a path, beginning an iteration, moving what is still held,
finding the child among its siblings, memory, and recording behind a prefix that was replayed?"""

import statistics
import timeit
from time import perf_counter

import pytest
import torch
from cgt_core import stepped, time_guards, time_launches
from conftest import peak_of, wait

import cgt
from cgt.api import state_of

N = 256  # elements: kernels that are over when the next call comes
LENGTH = 8  # functions of an iteration
SIBLINGS = (1, 8, 64)  # that do not match
BIG = {"cpu": 1 << 20, "cuda": 8 << 20}  # elements: 4 and 32 MiB
WIDTHS = (3, 2, 1)  # of three branches


@pytest.fixture(autouse=True)
def own_iterations():
    """From the first step() on the program says when an iteration begins, until everything is reset:
    no bench finds the iterations, or the pool, of another one."""
    cgt.reset()
    yield
    cgt.reset()


def settle(program):
    """Run a program until it only replays."""
    for _ in range(8):
        before = cgt.stats()
        program()
        now = cgt.stats()
        if now.replays - before.replays == now.calls - before.calls > 0:
            return wait()
    pytest.fail(f"never came to replay all its calls\n{cgt.explain()}")


def unsaid(statement, names):
    """A subject of compare: the statement in a program that never calls step()."""
    time = timeit.Timer(statement, globals=names).timeit

    def run(calls):
        stepped(False)
        try:
            return time(calls)
        finally:
            stepped(True)

    return run


def scaled(device):
    """A small function: one kernel."""
    scale = torch.rand(N, device=device)
    return lambda x: x * scale


@pytest.mark.parametrize("kernels", [True, False], ids=["a kernel each", "nothing to launch"])
def test_iteration_of_eight(device, request, compare, figure, kernels):
    """step(), then eight functions, each on the result of the one before; and step(), then one.
    The difference, over seven, is a hit that goes on along the path (and its node's share in the next
    step, which looks whether the result is held). That is set against the same hit in a program of one
    function without step(). What it leaves of the iteration of one is what beginning costs.

    The driver takes longer for another graph than it launched last; with functions that launch nothing, what is left
    is ours."""
    make = scaled if kernels else lambda device: lambda x: x.view(-1)
    what = "hit in a path of 8" if kernels else "hit without a launch in a path of 8"
    plain, x = [make(device) for _ in range(LENGTH)], torch.rand(N, device=device)
    names = {f"f{k}": cgt.jit(f) for k, f in enumerate(plain)} | {"x": x, "step": cgt.step}
    chain = "x"
    for k in range(LENGTH):
        chain = f"f{k}({chain})"

    def iteration():
        cgt.step()
        y = x
        for k in range(LENGTH):
            y = names[f"f{k}"](y)

    settle(iteration)
    floor = {}
    if device.type == "cuda" and kernels:
        graphs = [request.getfixturevalue("captured")(f, x) for f in plain]  # held until the end
        execs = [graph.raw_cuda_graph_exec() for graph, _, _ in graphs]
        stream = torch.cuda.current_stream().cuda_stream
        floor["raw"] = graphs[0][2]
        floor["turns"] = lambda n: n * time_launches(execs, stream, n)
    us = compare(
        names,
        calls=25,
        path=f"step(); {chain}",
        one="step(); f0(x)",
        alone=unsaid("f0(x)", names),
        nothing="step()",  # no iteration under way: what Python takes to call it
        **floor,
    )
    assert cgt.stats().records == LENGTH and cgt.stats().rescues == 0
    hit = (us["path"] - us["one"]) / (LENGTH - 1)
    figure(f"{what} over a hit alone", hit - us["alone"], "+ µs", at_most=0.15)
    if not kernels:
        figure("beginning an iteration, nothing to rescue", us["one"] - hit, "µs", at_most=0.2)
        figure("step() without an iteration under way", us["nothing"], "µs", detail=True)
    if floor:
        turns = us["turns"] - us["raw"]
        figure(f"raw cuGraphLaunch of {LENGTH} graphs in turn over one graph", turns, "+ µs")
        figure(f"{what} over raw launches in turn", hit - us["turns"], "+ µs")


def test_going_back(device, compare, figure):
    """An evaluation loop in a program that says step() elsewhere: each hit goes back over the one before it, whose
    result is dead, to one whose result is held. Against the same hit in a program of one function without step()."""
    train, f = cgt.jit(scaled(device)), cgt.jit(scaled(device))
    names = {"f": f, "x": torch.rand(N, device=device)}
    time = timeit.Timer("f(x)", globals=names).timeit

    def behind(calls):
        cgt.step()
        held = train(names["x"])
        seconds = time(calls)
        del held
        return seconds

    settle(lambda: behind(3))
    unsaid("f(x)", names)(3)
    us = compare(names, calls=50, back=behind, alone=unsaid("f(x)", names))
    s = cgt.stats(f)
    assert s.records == 2 and s.rescues == s.eager == 0
    figure("hit that goes back over a dead result, over a hit alone", us["back"] - us["alone"], "+ µs", at_most=0.05)


def test_one_rescue(device, compare, figure):
    """A result of the last iteration is held when the next one begins; or it is not. By hand the
    program would clone it."""
    f, x = cgt.jit(scaled(device)), torch.rand(N, device=device)
    names = {"f": f, "x": x, "step": cgt.step}
    settle(lambda: (cgt.step(), f(x)))
    us = compare(
        names,
        calls=50,
        held="step(); out = f(x)",
        dropped="step(); f(x)",
        clone="x.clone()",
    )
    assert cgt.stats(f).rescues > 0 and cgt.stats(f).records == 1
    figure("one rescue of a small result", us["held"] - us["dropped"], "+ µs", at_most=15)
    over = (us["held"] - us["dropped"]) / us["clone"]
    figure("one rescue of a small result over clone()", over, "×", detail=True)


def looks(x, k=0):
    """It makes a view, which costs no kernel: the recording is empty, x is pinned."""
    x.view(-1)


CALLS = {  # from a tensor to calls that are a recording each, and how these differ
    "text": lambda x, n: [(x, str(k)) for k in range(n)],  # a number would be live
    "shape": lambda x, n: [(x[: k + 1],) for k in range(n)],
    "address": lambda x, n: [(x.clone(),) for _ in range(n)],
}


@pytest.mark.parametrize("apart", CALLS)
def test_siblings_that_do_not_match(device, compare, settled, figure, apart):
    """Children that differ by one string, by their input's shape or by its address alone. `newest`:
    the guard finds the child that matched last. `turns`: calls that alternate between two children, so
    it is always the second. `last`: the guard goes round all of them, so it is always the last, and
    passes all others by."""
    ways = {}

    def add(n):
        calls = CALLS[apart](torch.rand(N, device=device), n + 1)
        f = settled(cgt.jit(looks, inputs="fixed", max_records=n + 1), *calls)
        assert cgt.stats(f).records == n + 1 and cgt.stats(f).graph_nodes == 0
        row = state_of(f).f
        turns, names = "f(*a); f(*b)", {"f": f, "a": calls[0], "b": calls[1]}
        ways[f"turns_{n}"] = timeit.Timer(turns, turns, globals=names).timeit

        def newest(times):
            time_guards(row, calls[0], {}, 1)
            return times * time_guards(row, calls[0], {}, times)

        def last(times):
            rounds = (time_guards(row, args, {}, 1) for _ in range(times) for args in calls)
            return sum(rounds) / len(calls)

        ways.update({f"newest_{n}": newest, f"last_{n}": last})

    for n in SIBLINGS:
        add(n)
    us = compare({}, calls=20, rounds=80, **ways)
    few, many = SIBLINGS[0], SIBLINGS[-1]
    more = {k: 1e3 * (us[f"{k}_{many}"] - us[f"{k}_{few}"]) for k in ("newest", "turns", "last")}
    among = f"{many} siblings over {few}, apart by {apart}"
    figure(f"{among}: newest matches", more["newest"], "+ ns", detail=True)
    figure(f"{among}: two in turns", more["turns"] / 2, "+ ns")
    figure(f"each sibling passed by, apart by {apart}", more["last"] / (many - few), "ns")


def stage(width):
    """A function that needs `width` tensors beside its argument and its result."""

    def f(x):
        parts = [x + k for k in range(width)]
        out = x * 2
        for part in parts:
            out.add_(part)
        return out

    return f


def run_branch(first, middle, last, x):
    """Three functions; what the first two return is held until the last one is done."""
    y = first(x)
    z = middle(y)
    return last(z)


@pytest.mark.parametrize("branches", ["in turns", "one by one"])
def test_pool_of_three_branches(device, benchmark, figure, branches):
    """1→2→5, 1→3→5 and 1→4→5, the largest first, over what that one takes when it runs eagerly: on
    the GPU as measured, on the host as counted. The program takes them in turns from the start, or
    comes to the next one when the last one has long been replayed."""
    x = torch.rand(BIG[device.type], device=device)
    first, last, middles = stage(1), stage(1), [stage(width) for width in WIDTHS]
    peak = (2 + max(WIDTHS)) * x.nbytes  # within the middle: y, its parts, its result
    if device.type == "cuda":
        peak = max(peak_of(lambda m=m: run_branch(first, m, last, x)) for m in middles)
    ours = [cgt.jit(f) for f in (first, last, *middles)]
    cgt.reset()  # with functions to reset, it also gives back the pool of earlier benches

    def branch(middle):
        cgt.step()
        return run_branch(ours[0], middle, ours[1], x)

    def iterations(some):
        for middle in some:
            branch(middle)

    def grow():
        for some in [ours[2:]] if branches == "in turns" else [[middle] for middle in ours[2:]]:
            settle(lambda: iterations(some))

    benchmark.pedantic(grow, rounds=1)
    for middle, plain in zip(ours[2:], middles, strict=True):
        assert torch.equal(branch(middle), run_branch(first, plain, last, x))
    pool = cgt.stats().pool_bytes
    benchmark.extra_info["bytes"] = {"pool": pool, "eager peak": peak}
    what = f"pool of 3 branches, {branches}, over its eager peak"
    figure(what, pool / peak, "×", at_most=1.1)


def test_recording_behind_a_replayed_prefix(device, benchmark, figure):
    """Two functions were replayed and their results are held: what it takes to put the pool back to
    where they left it, and to note its state behind the recording. Over the whole call."""
    before, x = [cgt.jit(scaled(device)) for _ in range(2)], torch.rand(N, device=device)
    settle(lambda: (cgt.step(), before[1](before[0](x))))
    spent = {"restore": [], "checkpoint": [], "call": []}

    def record():
        f = cgt.jit(scaled(device))
        f(x)
        cgt.step()
        y = before[0](x)
        z = before[1](y)
        wait()
        began = perf_counter()
        f(z)
        spent["call"].append(perf_counter() - began)
        assert cgt.stats(f).records == 1
        for phase in ("restore", "checkpoint"):
            spent[phase].append(cgt.stats(f).seconds[phase])

    benchmark.pedantic(record, rounds=40)
    us = {phase: 1e6 * statistics.median(times) for phase, times in spent.items()}
    benchmark.extra_info["us"] = {phase: round(value, 4) for phase, value in us.items()}
    figure("restoring the pool behind a replayed prefix", us["restore"], "µs")
    figure("checkpoint of a recording behind it", us["checkpoint"], "µs")
    over = (us["restore"] + us["checkpoint"]) / us["call"]
    figure("restore and checkpoint over the recording call", over, "×", detail=True)
