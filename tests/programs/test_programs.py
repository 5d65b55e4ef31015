"""Random programs over several jitted functions agree with eager, bit for bit, after every action.

A program is a loop body of calls, holds, drops, in-place writes, parameter swaps, steps and resets,
run several times, as programs are; now and then an iteration does one thing more than the others. It
runs once with the plain functions and once with the jitted ones, from the same seed; every tensor
that the program can reach is looked at after every action. Functions pass results on, keep memory of
different sizes busy, write their arguments, return views and draw random numbers, so that whatever
the pool hands out twice would show.
"""

import cgt_core as core
import pytest
import torch
from helpers import STEPS, says_step, try_programs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cgt

SIZE, VARIABLES, REPEATS = 24, 3, 5
SEEN = {}  # device type -> counters over all programs: most calls must have been replays


def scale(p, x, y):
    return x * p["scale"] + 1


def both(p, x, y):
    return x.sin(), (y.cos() * 2,)


def write(p, x, y):
    x.add_(1)
    return y - x


def views(p, x, y):
    z = x * 2 - y
    return {"input": x[1:], "some": z[:5], "all": z}


def wide(p, x, y):
    return torch.stack([x, y, (x * y).flip(0), p["shift"]]).flip(0).cumsum(0)[-1]


def drop(p, x, y):
    return torch.nn.functional.dropout(x, 0.5) + y


def passed_on(p, x, y):
    return x


def branch(p, x, y):
    return x * 0.5 if (x.sum() > y.sum()) else both(p, x, y)


def counted(p, x, y):
    z = x - y
    n = int((z > 0).sum() % 3)  # decides how many ops come
    for _ in range(n):
        z = z.sin() + p["shift"]
    return z + n


def chosen(p, x, y):
    z = y.clone()
    z[(x > 0.5).nonzero(as_tuple=True)] = 0.25
    z[y < 0] += x[y < 0]
    return z + p["scale"]


def drawn(p, x, y):
    z = torch.nn.functional.dropout(x, 0.5)
    if (z.sum() > 1) & (y.sum() < 3):
        return torch.nn.functional.dropout(y, 0.5) - z
    return z + torch.rand_like(y) if z.any() else y * 2


def written(p, x, y):
    if (x > 0).all():
        y.mul_(0.5)
    return x + y


def told(p, x, y):
    """Numbers that it only hands out, one of them on one way alone."""
    z = x * p["scale"]
    n = (z > y).sum().item()
    return (n, z, y[0].item()) if y.sum() > x.sum() else [n, z - y]


FUNCTIONS = (scale, both, write, views, wide, drop, passed_on, branch, counted, chosen, drawn, written, told)

index = st.integers(0, VARIABLES - 1)
action = st.one_of(
    st.tuples(st.just("call"), st.integers(0, 3), index, index, index),
    st.tuples(st.just("call"), st.integers(0, 3), index, index, index),
    st.tuples(st.just("hold"), index, st.sampled_from(["name", "view", "alias"])),
    st.tuples(st.just("drop"), st.integers(0, 7)),
    st.tuples(st.just("new"), index, st.integers(0, 9)),
    st.tuples(st.just("write"), index),
    st.tuples(st.just("write held"), st.integers(0, 7)),
    st.tuples(st.just("swap"), st.sampled_from(["scale", "shift"])),
    st.tuples(st.just("refill"), st.sampled_from(["scale", "shift"])),
    st.tuples(st.just("reset"), st.integers(0, 3)),
)
calls = st.tuples(st.just("call"), st.integers(0, 3), index, index, index)
programs = st.fixed_dictionaries(
    {
        "functions": st.lists(st.sampled_from(FUNCTIONS), min_size=3, max_size=5),
        "outputs": st.sampled_from(["rescue", "rescue", "rescue", "error"]),
        "steps": st.sampled_from(STEPS),
        "keep": st.integers(0, 3),
        "body": st.lists(st.one_of(calls, calls, action), min_size=2, max_size=5),
        "extra": st.dictionaries(st.integers(1, REPEATS - 1), action, max_size=2),
    }
)


def leaves(result):
    """Tensors of a result, in order; numbers as such."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, (int, float)):
        return [torch.tensor([float(result)])]
    values = result.values() if isinstance(result, dict) else result
    return [t for value in values for t in leaves(value)]


def numbers(device, seed):
    return torch.arange(SIZE, device=device, dtype=torch.float32).sub(seed).mul(0.125 + seed / 8)


def run(program, device, functions):
    """What every tensor was after every action."""
    torch.manual_seed(7)
    parameters = {"scale": numbers(device, 3), "shift": numbers(device, 5)}
    variables = [numbers(device, k) for k in range(VARIABLES)]
    held, seen = [], []

    def act(what, *rest):
        if what == "call":
            which, a, b, to = rest
            made = leaves(functions[which % len(functions)](parameters, variables[a], variables[b]))
            whole = [t for t in made if t.shape == (SIZE,)]
            held.extend(made[: program["keep"]])
            variables[to] = whole[-1]
        elif what == "hold":
            t = variables[rest[0]]
            held.append({"name": t, "view": t[2:9], "alias": t.detach()}[rest[1]])
        elif what == "drop" and held:
            held.pop(rest[0] % len(held))
        elif what == "new":
            variables[rest[0]] = numbers(device, rest[1])
        elif what == "write":
            variables[rest[0]].sub_(0.5)
        elif what == "write held" and held:
            held[rest[0] % len(held)].mul_(0.5)
        elif what == "swap":
            parameters[rest[0]] = parameters[rest[0]] + 1
        elif what == "refill":
            parameters[rest[0]].mul_(0.75)
        elif what == "reset" and functions[0] is not program["functions"][0]:
            cgt.reset(functions[rest[0] % len(functions)])
        del held[:-6]
        # As bits: numbers may grow to infinity and beyond.
        seen.append([t.clone().view(torch.int32) for t in (*variables, *held)])

    for k in range(REPEATS):
        if says_step(program["steps"], k):
            if program["outputs"] == "error":  # what is held must not be touched after a step
                held.clear()
                variables[:] = [t.clone() for t in variables]
            cgt.step()
        for one in program["body"]:
            act(*one)
        if k in program["extra"]:
            act(*program["extra"][k])
    return seen


def check(program, device, **options):
    if program["steps"] == "never":
        program = program | {"outputs": "rescue"}  # any call may end an iteration
    want = run(program, device, program["functions"])
    jitted = [cgt.jit(f, outputs=program["outputs"], **options) for f in program["functions"]]
    try:
        got = run(program, device, jitted)
        core.check_table()
        for k, (a, b) in enumerate(zip(got, want, strict=True)):
            assert all(map(torch.equal, a, b)), f"after action {k}"
        total = SEEN.setdefault(device.type, [0, 0, 0, 0])
        for f in jitted:
            s = cgt.stats(f)
            for k, n in enumerate((1 / len(jitted), s.calls, s.replays, s.eager)):
                total[k] += n
    finally:
        cgt.reset()


def how_many(device):
    """Programs to try: 1,200 on the host's release build, fewer where each takes longer."""
    if device.type == "cuda":
        return 500
    return 250 if core.debug_build() else 1200


def test_random_programs_agree_with_eager_after_every_action(device):
    SEEN.pop(device.type, None)
    try_programs(programs, lambda program: check(program, device), how_many(device), fewer=False)
    ran, calls, replays, eager = SEEN[device.type]
    assert round(ran) >= how_many(device)
    assert replays > 0.2 * calls and eager < 0.2 * calls


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(program=programs, records=st.integers(1, 3), graphs=st.integers(1, 5))
def test_random_programs_agree_where_recordings_make_room_for_each_other(
    device, program, records, graphs
):
    check(program, device, max_records=records, max_graphs=graphs)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(program=programs, inputs=st.sampled_from(["fixed", "copied"]))
def test_random_programs_agree_however_inputs_are_bound(device, program, inputs):
    check(program, device, inputs=inputs)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("keep", [0, 2])
def test_chain_with_everything_in_it_agrees_with_eager(device, steps, keep):
    check(
        {
            "functions": [views, both, wide, write, drop],
            "outputs": "rescue",
            "steps": steps,
            "keep": keep,
            "body": [("call", k, k % 3, (k + 1) % 3, (k + 2) % 3) for k in range(4)],
            "extra": {2: ("hold", 1, "view"), 4: ("swap", "scale")},
        },
        device,
    )
