"""What does a call cost that is replayed, over the launch alone and over the ways PyTorch has?"""

import os
import sys
from copy import deepcopy
from itertools import repeat
from pathlib import Path

import cgt_core as core
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cgt
from cgt.api import state_of

LAYERS = 32
N = 256  # elements: kernels that are over when the next call comes
MILLION = 10**6


def chain(device, n_params=16):
    """A function of one input and the `n_params` tensors that it closes over; a small kernel for
    every two of them."""
    make = lambda: torch.rand(N, device=device)  # noqa: E731
    pairs = [(make(), make()) for _ in range(n_params // 2)]

    def f(x):
        for scale, shift in pairs:
            x = torch.addcmul(shift, x, scale)
        return x

    return f


def test_hit_over_the_launch_alone(cuda, compare, captured, settled, figure):
    """One input, 16 closed-over parameters, 8 nodes: how far above cuGraphLaunch, and how far
    below CUDAGraph.replay()?"""
    plain, x = chain(cuda), torch.rand(N, device=cuda)
    f = settled(cgt.jit(plain), (x,))
    graph, _, raw = captured(plain, x)
    us = compare(
        {"f": f, "x": x, "graph": graph, "plain": plain},
        cgt="f(x)",
        raw=raw,
        replay="graph.replay()",
        eager="plain(x)",
    )
    figure("hit, 1 input + 16 parameters", us["cgt"], "µs")
    figure("raw cuGraphLaunch of the same graph", us["raw"], "µs")
    figure("hit over raw cuGraphLaunch", us["cgt"] - us["raw"], "+ µs", at_most=0.6)
    figure("hit over CUDAGraph.replay()", us["cgt"] / us["replay"], "×", at_most=0.8)
    figure("hit over eager", us["cgt"] / us["eager"], "×")


@pytest.mark.parametrize("binding", ["unused", "fixed"])
def test_each_further_leaf(device, compare, settled, figure, binding):
    """A list of 65 tensors over a list of one; the recording is empty, so nothing is launched."""

    def f(xs):
        for x in xs[:1] if binding == "unused" else xs:
            x.view(-1)  # a view costs no kernel, and makes the tensor one whose address is guarded

    one, many = ([torch.rand(4, device=device) for _ in range(n)] for n in (1, 65))
    few, all_ = settled(cgt.jit(f), (one,)), settled(cgt.jit(f), (many,))
    names = {"few": few, "all_": all_, "one": one, "many": many}
    us = compare(names, many="all_(many)", one="few(one)")
    each = 1e3 * (us["many"] - us["one"]) / 64
    figure(f"each further tensor leaf, {binding}", each, "ns", at_most=10)


def test_hit_with_dropout_inside(cuda, compare, captured, settled, figure):
    """Fresh random numbers at every call. torch's replay fills two words with two kernels of their
    own; cgt patches a node."""
    scale, x = torch.rand(N, device=cuda), torch.rand(N, device=cuda)

    def plain(x):
        return F.dropout(x * scale, 0.5)

    f = settled(cgt.jit(plain), (x,))
    graph, _, raw = captured(plain, x)
    names = {"f": f, "x": x, "graph": graph}
    us = compare(names, cgt="f(x)", replay="graph.replay()", raw=raw)
    over = us["cgt"] - us["raw"], us["cgt"] / us["replay"]
    figure("hit with dropout inside", us["cgt"], "µs")
    figure("hit with dropout inside over raw cuGraphLaunch", over[0], "+ µs", detail=True)
    figure("hit with dropout inside over CUDAGraph.replay()", over[1], "×", at_most=0.3)


def test_hit_with_an_input_that_moves(cuda, compare, captured, settled, figure):
    """Another address at every call: the copy node's source is patched. By hand: copy_(), then
    replay()."""
    plain, static = chain(cuda), torch.rand(N, device=cuda)
    a, b = torch.rand(N, device=cuda), torch.rand(N, device=cuda)
    f = settled(cgt.jit(plain), (a,), (b,))
    graph, _, raw = captured(plain, static)
    before = cgt.stats(f)
    us = compare(
        {"f": f, "a": a, "b": b, "graph": graph, "static": static},
        calls=25,
        cgt="f(a); f(b)",
        by_hand="static.copy_(a); graph.replay(); static.copy_(b); graph.replay()",
        raw=lambda n: raw(2 * n),
    )
    after = cgt.stats(f)
    assert after.rebinds - before.rebinds == after.replays - before.replays > 0
    over = (us["cgt"] - us["raw"]) / 2, us["cgt"] / us["by_hand"]
    figure("hit with one moving input", us["cgt"] / 2, "µs")
    figure("hit with one moving input over raw cuGraphLaunch", over[0], "+ µs", at_most=1.0)
    figure("hit with one moving input over copy_() + replay()", over[1], "×")


def test_hit_that_writes_an_input_that_moves(cuda, compare, captured, settled, figure):
    """Another address at every call, of a tensor that is written: copied, and copied back, by two nodes that are patched. By hand: copy_(),
    replay(), copy_()."""
    scale = torch.full((N,), 0.5, device=cuda)

    def plain(x):
        return x.mul_(scale).add_(scale)

    a, b, static = (torch.rand(N, device=cuda) for _ in range(3))
    f = settled(cgt.jit(plain), (a,), (b,))
    graph, _, raw = captured(plain, static)
    us = compare(
        {"f": f, "a": a, "b": b, "graph": graph, "static": static},
        calls=25,
        cgt="f(a); f(b)",
        by_hand="static.copy_(a); graph.replay(); a.copy_(static); static.copy_(b); graph.replay(); b.copy_(static)",
        raw=lambda n: raw(2 * n),
    )
    assert cgt.stats(f).records <= 2, cgt.explain(f)
    figure("hit that writes a moving input over raw cuGraphLaunch", (us["cgt"] - us["raw"]) / 2, "+ µs", at_most=2.0)
    figure("hit that writes a moving input over copies by hand", us["cgt"] / us["by_hand"], "×")


def test_one_recording_for_many_sets_of_weights(cuda, compare, figure):
    """Equal layers, one after the other: one function that is given the weights, and is told at each call where they lie; and a function
    for each layer."""
    shapes = [(128, 64), (128,), (64, 128), (64,)]
    sets = [[torch.rand(shape, device=cuda) / 64 for shape in shapes] for _ in range(LAYERS)]
    x = torch.rand(4, 64, device=cuda)

    def layer(x, w, b, v, c):
        return x + F.linear(F.gelu(F.linear(x, w, b)), v, c)

    def through(functions):
        y = x
        for f, weights in zip(functions, sets, strict=True):
            y = f(y, *weights)
        return y

    def settle(functions):
        """The same, when all are recorded."""
        for _ in range(6):
            y = through(functions)
        assert torch.equal(y, through([layer] * LAYERS))
        return functions

    one = cgt.jit(layer)
    shared = settle([one] * LAYERS)
    private = settle([cgt.jit(lambda *given: layer(*given)) for _ in range(LAYERS)])
    assert sum(len(core.fn_nodes(state_of(f).f)) for f in private) == LAYERS and len(core.fn_nodes(state_of(one).f)) <= 2, cgt.explain(one)
    us = compare({"through": through, "shared": shared, "private": private}, calls=4, one="through(shared)", each="through(private)")
    figure(f"{LAYERS} sets of weights in turn, told to one recording", us["one"] / LAYERS, "µs")
    figure("told to one recording over a recording for each set", us["one"] / us["each"], "×")


def test_hit_with_a_changed_number(device, compare, figure):
    """One number that is another one at each call, in one op and in ten, over the same function with one that stays."""
    x, rates = torch.rand(N, device=device), [0.5 + 1e-3 * k for k in range(1000)]

    def one(x, rate):
        return x * rate

    def ten(x, rate):
        for _ in range(10):
            x = x * rate
        return x

    with torch.no_grad():
        jitted = {name: cgt.jit(function, dynamic=("rate",)) for name, function in {"one": one, "ten": ten}.items()}
        for f in jitted.values():
            for rate in rates[:20]:
                f(x, rate)
        us = compare(
            {"x": x, "rates": iter(rates * 10_000), **jitted},
            same="one(x, 0.5)", changed="one(x, next(rates))", same_in_ten="ten(x, 0.5)", changed_in_ten="ten(x, next(rates))",
        )  # fmt: skip
    for f in jitted.values():
        assert cgt.stats(f).records == 1, cgt.explain(f)
    figure("hit with a changed number over the same one", us["changed"] - us["same"], "+ µs", at_most=0.5)
    more = (us["changed_in_ten"] - us["same_in_ten"] - us["changed"] + us["same"]) / 9
    figure("each further op with that number", more, "+ µs", at_most=0.25)


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_learning_rate_on_a_schedule(device, compare, figure, kind):
    """A whole training step with another learning rate at each call, over eager. AdamW without options counts its steps on the
    host."""
    torch.manual_seed(0)
    model = mlp(device, 4)
    optimizer = getattr(torch.optim, kind)(model.parameters(), 0.1, **({"momentum": 0.9} if kind == "SGD" else {}))
    x, schedule = torch.rand(32, 256, device=device), iter([1e-3 / (1 + k % 977) for k in range(1_000_000)])

    def body():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def stepping(run):
        def step(rate):
            optimizer.param_groups[0]["lr"] = rate
            return run()

        return step

    jitted = cgt.jit(body)
    names = {"eager": stepping(body), "f": stepping(jitted), "schedule": schedule}
    for _ in range(20):
        names["f"](next(schedule))
    before = cgt.stats(jitted)
    us = compare(names, calls=20, cgt="f(next(schedule))", eager="eager(next(schedule))")
    s = cgt.stats(jitted)
    assert s.records <= 3 and s.replays - before.replays == s.calls - before.calls, cgt.explain(jitted)
    figure(f"training step with a schedule over eager, {kind}", us["cgt"] / us["eager"], "×", at_most=0.6)


def test_hit_while_the_last_result_is_held(cuda, compare, captured, settled, figure):
    """`out = f(x)` in a loop: the last result is still held when its memory is overwritten, so it
    is rescued. By hand: replay(), then clone()."""
    plain, x = chain(cuda), torch.rand(N, device=cuda)
    f = settled(cgt.jit(plain), (x,))
    graph, static, _ = captured(plain, x)
    before = cgt.stats(f).rescues
    us = compare(
        {"f": f, "x": x, "graph": graph, "static": static},
        held="out = f(x)",
        dropped="f(x)",
        by_hand="graph.replay(); out = static.clone()",
    )
    assert cgt.stats(f).rescues > before
    over = us["held"] - us["dropped"], us["held"] / us["by_hand"]
    figure("hit with a held result", us["held"], "µs")
    figure("hit with a held result over a dropped one", over[0], "+ µs", detail=True)
    figure("hit with a held result over replay() + clone()", over[1], "×")


def mlp(device, layers, width=256):
    """`layers` linear layers with a ReLU after each."""
    pairs = [(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(*(layer for pair in pairs for layer in pair)).to(device)


def test_mlp_inference(cuda, request, compare, settled, figure):
    """Eight layers, batch 32, against eager and what PyTorch has. Every way gets the input at the
    address that it saw first, so nobody copies it."""
    model, x = mlp(cuda, 8).requires_grad_(False), torch.rand(32, 256, device=cuda)
    names = {
        "x": x,
        "eager": model,
        "ours": settled(cgt.jit(deepcopy(model)), (x,)),
        "graphed": torch.cuda.make_graphed_callables(deepcopy(model), (x,)),
    }
    ways = {"cgt": "ours(x)", "eager": "eager(x)", "graphed": "graphed(x)"}
    if request.config.getoption("--compile"):
        names["compiled"] = torch.compile(deepcopy(model), mode="reduce-overhead")
        names["mark"] = torch.compiler.cudagraph_mark_step_begin
        ways["compiled"] = "mark(); compiled(x)"
        for _ in range(5):
            names["compiled"](x)
    us = compare(names, calls=20, **ways)
    graphed = us["cgt"] / us["graphed"]
    figure("MLP of 8 layers, batch 32, inference", us["cgt"], "µs")
    figure("MLP inference over eager", us["cgt"] / us["eager"], "×")
    figure("MLP inference over make_graphed_callables", graphed, "×", at_most=0.12)
    if "compiled" in us:
        compiled = us["cgt"] / us["compiled"]
        figure("MLP inference over compile reduce-overhead", compiled, "×", at_most=0.06)


def train_step(device, layers=4):
    """Forward, backward and optimizer of an MLP, as one function."""
    model = mlp(device, layers)
    opt = torch.optim.AdamW(model.parameters(), fused=True, capturable=True)

    def step(x, y):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def test_whole_training_step(cuda, compare, settled, figure):
    """Forward, backward and fused AdamW in one launch."""
    x, y = torch.rand(32, 256, device=cuda), torch.rand(32, 256, device=cuda)
    eager, ours = train_step(cuda), settled(cgt.jit(train_step(cuda)), (x, y))
    eager(x, y)
    names = {"eager": eager, "ours": ours, "x": x, "y": y}
    us = compare(names, calls=10, rounds=60, cgt="ours(x, y)", eager="eager(x, y)")
    figure("training step jitted whole (4 layers, AdamW)", us["cgt"], "µs", at_most=12)
    figure("training step over eager", us["cgt"] / us["eager"], "×")


def test_step_of_a_deep_model(cuda, compare, captured, settled, figure):
    """48 layers: the guard of some 500 tensors, over the launch of a graph of the same step made by hand."""
    x, y = torch.rand(32, 256, device=cuda), torch.rand(32, 256, device=cuda)
    ours = settled(cgt.jit(train_step(cuda, 48)), (x, y))
    by_hand = captured(train_step(cuda, 48), x, y)  # to be kept: the launch needs it
    us = compare({"ours": ours, "x": x, "y": y}, calls=10, rounds=60, cgt="ours(x, y)", raw=by_hand[2])
    figure("training step of 48 layers over raw cuGraphLaunch", us["cgt"] - us["raw"], "+ µs", at_most=4)


def test_a_million_hits_grow_nothing(device, benchmark, settled, figure):
    """What a million replays leave behind in Python's allocator, the process and the GPU."""
    scale, x = torch.rand(N, device=device), torch.rand(N, device=device)
    f = settled(cgt.jit(lambda x: x * scale), (x,))

    def hits(n):
        before = memory()
        for _ in repeat(None, n):
            f(x)
        return [now - then for now, then in zip(memory(), before, strict=True)]

    hits(MILLION // 10)
    once = benchmark.pedantic(hits, args=(MILLION,), rounds=1)
    # A leak grows each time, by a million of something; what a driver's thread takes now and then does
    # not. The numbers that memory() made are some blocks themselves.
    blocks, resident, on_gpu = map(min, once, hits(MILLION))
    figure("Python blocks that 10⁶ hits and the harness leave", blocks, "", at_most=1000)
    figure("resident memory that 10⁶ hits leave", resident, "B", at_most=0)
    if device.type == "cuda":
        figure("GPU memory that 10⁶ hits leave", on_gpu, "B", at_most=0)
    assert cgt.stats(f).replays > MILLION


def memory():
    """Blocks of Python's allocator, bytes that the process occupies, bytes in use on the GPU."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    on_gpu = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
    return sys.getallocatedblocks(), resident, on_gpu
