"""What does a value cost that Python reads in the middle of a replayed call, over two graphs by hand?"""

import pytest
import torch
from bench_call import N, chain
from torch._higher_order_ops import while_loop

import cgt


def branching(device):
    """Eight small kernels, a comparison, and eight more of one chain or the other."""
    head, yes, no = (chain(device) for _ in range(3))

    def f(x):
        y = head(x)
        if y.sum() > 0:
            return yes(y)
        return no(y)

    return f, (head, yes, no)


def by_hand(captured, parts, x):
    """The same by two captured graphs for this input: replay, wait for the pinned word, replay; and the graphs."""
    head, yes, no = parts
    word = torch.zeros((), dtype=torch.bool, pin_memory=True)

    def first(x):
        y = head(x)
        word.copy_(y.sum() > 0, non_blocking=True)
        return y

    one, y, _ = captured(first, x)
    torch.cuda.synchronize()
    two, *_ = captured(yes if word else no, y)
    event = torch.cuda.Event()

    def run():
        one.replay()
        event.record()
        event.synchronize()
        assert word
        two.replay()

    return run, (one, two)


def test_branch_on_a_value(cuda, compare, captured, settled, figure):
    """One way at each call, which is what most programs do: both sides wait for the GPU once."""
    plain, parts = branching(cuda)
    x = torch.rand(N, device=cuda)
    f = settled(cgt.jit(plain), (x,))
    run, graphs = by_hand(captured, parts, x)
    names = {"f": f, "x": x, "plain": plain, "run": run, "graphs": graphs}
    us = compare(names, cgt="f(x)", by_hand="run()", eager="plain(x)")
    figure("branch on a value", us["cgt"], "µs")
    figure("branch on a value over two replay() and a pinned read", us["cgt"] / us["by_hand"], "×", at_most=1.3)
    figure("branch on a value over eager", us["cgt"] / us["eager"], "×")


def test_branch_that_goes_either_way(device, compare, settled, figure):
    """Another way at each call: what comes before the read is launched twice."""
    plain, _ = branching(device)
    x = torch.rand(N, device=device)
    y = -1e6 * x
    f = settled(cgt.jit(plain, inputs="copied"), (x,), (y,))
    names = {"f": f, "x": x, "y": y, "plain": plain}
    us = compare(names, calls=25, cgt="f(x); f(y)", eager="plain(x); plain(y)")
    figure("branch on a value, either way in turns, over eager", us["cgt"] / us["eager"], "×")


def test_eager_part_between_two_chains(device, compare, settled, figure):
    """A function marked cgt.eager behind eight small kernels, and eight more behind it."""
    head, tail = chain(device), chain(device)
    part = cgt.eager(lambda y: y * 2)

    def f(x):
        return tail(part(head(x)))

    x = torch.rand(N, device=device)
    names = {"f": settled(cgt.jit(f), (x,)), "x": x, "plain": f}
    us = compare(names, cgt="f(x)", eager="plain(x)")
    figure("two chains with an eager part between them", us["cgt"], "µs")
    figure("two chains with an eager part between them over eager", us["cgt"] / us["eager"], "×", at_most=1)


@pytest.mark.parametrize("what", ["Kalman step, 64 robots", "nearest rotations by SVD, 64"])
def test_linear_algebra(cuda, compare, settled, figure, what):
    """A Kalman filter's step for 64 robots, which checks that its solve did not fail, and a projection to rotations, whose SVD no
    graph holds."""
    n, eye = 64, torch.eye(6, device=cuda)
    state, cov = torch.zeros(n, 6, 1, device=cuda), eye.repeat(n, 1, 1)
    move, look = eye + torch.randn(6, 6, device=cuda) * 0.01, torch.randn(3, 6, device=cuda)

    def kalman(seen):
        x, p = move @ state, move @ cov @ move.mT + 0.01 * eye
        s = look @ p @ look.mT + 0.1 * eye[:3, :3]
        gain = torch.linalg.solve(s, look @ p).mT
        state.copy_(x + gain @ (seen - look @ x))
        cov.copy_((eye - gain @ look) @ p)
        return state[:, :3]

    def rotations(a):
        u, _, v = torch.linalg.svd(a + 0.1 * a.mT)
        turn = torch.ones(n, 3, device=cuda)
        turn[:, 2] = torch.linalg.det(u @ v)
        return (u * turn.unsqueeze(1)) @ v

    plain, shape = (kalman, (n, 3, 1)) if what.startswith("Kalman") else (rotations, (n, 3, 3))
    given = torch.randn(*shape, device=cuda)
    names = {"f": settled(cgt.jit(plain), (given,)), "x": given, "plain": plain}
    us = compare(names, calls=25, cgt="f(x)", eager="plain(x)")
    figure(f"{what}: over eager", us["cgt"] / us["eager"], "×", at_most=1)


def test_loop_until_it_converges(device, compare, settled, figure):
    """`while err > tol` of 100 rounds with six small kernels each, and a read in every round."""
    a, b = (torch.rand(N, device=device) for _ in range(2))

    def plain(x):
        while (x - b).abs().max() > 1e-3:
            x = (x - b) * 0.933 + b
            a.sin()
        return x

    x = b + 1
    f = settled(cgt.jit(plain), (x,))
    us = compare({"f": f, "x": x, "plain": plain}, calls=3, rounds=30, cgt="f(x)", eager="plain(x)")
    figure("while err > tol, 100 rounds: over eager", us["cgt"] / us["eager"], "×", at_most=0.5)


def test_number_that_is_returned(cuda, compare, captured, settled, figure):
    """A call that returns a tensor and a number, over a graph by hand that copies the number to pinned memory."""
    part, x = chain(cuda), torch.rand(N, device=cuda)
    word = torch.zeros((), pin_memory=True)

    def plain(x):
        y = part(x)
        return y, y.sum().item()

    def whole(x):
        y = part(x)
        word.copy_(y.sum(), non_blocking=True)
        return y

    f = settled(cgt.jit(plain), (x,))
    graph, *_ = captured(whole, x)
    event = torch.cuda.Event()

    def run():
        graph.replay()
        event.record()
        event.synchronize()
        return word.item()

    us = compare({"f": f, "x": x, "plain": plain, "run": run}, cgt="f(x)", by_hand="run()", eager="plain(x)")
    figure("number that is returned over replay() and a pinned read", us["cgt"] / us["by_hand"], "×", at_most=1.05)
    figure("number that is returned over eager", us["cgt"] / us["eager"], "×")


def test_structured_loop(device, compare, settled, figure):
    """The same loop by while_loop: one op, whatever the number of rounds."""
    a, b = (torch.rand(N, device=device) for _ in range(2))

    def far(x):
        return (x - b).abs().max() > 1e-3

    def nearer(x):
        a.sin()
        return ((x - b) * 0.933 + b,)

    def structured(x):
        return while_loop(far, nearer, (x,))

    def plain(x):
        while far(x):
            (x,) = nearer(x)
        return x

    x = b + 1
    f = settled(cgt.jit(structured), (x,))
    names = {"f": f, "x": x, "plain": plain, "structured": structured}
    us = compare(names, calls=3, rounds=30, cgt="f(x)", eager="plain(x)", torch="structured(x)")
    figure("while_loop of 100 rounds over Python's while, eager", us["cgt"] / us["eager"], "×", at_most=0.1 if device.type == "cuda" else None)
    figure("while_loop of 100 rounds over eager while_loop", us["cgt"] / us["torch"], "×", at_most=0.1 if device.type == "cuda" else None)
