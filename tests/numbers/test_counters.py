"""Numbers in 0-dim tensors of the host's that a function counts in and asks for: one recording serves all of them, values,
bytes and versions are eager's."""

import copy

import pytest
import torch
from helpers import identical, tells, values
from torch import nn

import cgt

CALLS = 24
F32, F64, I64 = torch.float32, torch.float64, torch.int64


def state_of(tensors):
    """Bits and versions."""
    return [(t.dtype, repr(t.item()), t._version) for t in tensors]


def agree(device, function, start, calls=CALLS, most=2, eager=2, poke=None):
    """`function(x, *counters)`, jitted and not, from the same start: results, counters, their versions."""
    ours, theirs = ([torch.tensor(value, dtype=dtype) for value, dtype in start] for _ in range(2))
    f, x = cgt.jit(lambda x: function(x, *ours)), values(device, 8)
    for k in range(calls):
        for counters in (ours, theirs) if poke else ():
            poke(k, *counters)
        want, got = function(x, *theirs), f(x)
        assert identical(got, want), (k, cgt.explain(f))
        assert state_of(ours) == state_of(theirs), (k, cgt.explain(f))
    s = cgt.stats(f)
    assert s.records <= most and s.eager <= eager, cgt.explain(f)
    assert eager >= calls or s.replays >= calls - most - eager - 2, cgt.explain(f)
    return f


def steps(x, c, d):
    c += 1
    d *= 1.5
    y = x * c.item() + d.item()
    c -= 0.25
    d /= 3
    return y / (c.item() + d.item())


@pytest.mark.parametrize("kind", [F32, F64], ids=str)
def test_counting(device, kind):
    agree(device, steps, [(0.5, kind), (2.0, kind)])


def test_whole_numbers(device):
    def function(x, c):
        y = x * c.item()
        c += 2
        c *= 3
        c -= 5
        return y + c.item()

    agree(device, function, [(4, I64)], most=4, calls=12)


def test_rounding_to_32_bits(device):
    def function(x, c):
        c += 0.1
        c *= 1.0001
        return x * c.item()

    agree(device, function, [(1e7, F32)], calls=100)


def test_operand_that_is_a_number_of_the_function_s(device):
    box = [1.0, 1.0]

    def function(x, c, which=[0]):  # noqa: B006 (whose turn it is)
        c *= box[0] * 0.99
        c += box[0]
        return x * c.item()

    ours, theirs = torch.tensor(1.0), torch.tensor(1.0)
    f, x = cgt.jit(lambda x: function(x, ours)), values(device, 8)
    for k in range(CALLS):
        box[0] = 1.0 + k / 7
        assert identical(f(x), function(x, theirs)) and state_of([ours]) == state_of([theirs]), cgt.explain(f)
    assert cgt.stats(f).replays >= CALLS - 6, cgt.explain(f)


def test_bytes_that_others_change(device):
    def poke(k, c, d):
        if k % 3 == 0:
            c.fill_(k % 5)
        if k % 4 == 0:
            d.copy_(torch.tensor(0.5))

    agree(device, steps, [(0.5, F32), (2.0, F32)], poke=poke)


def test_those_that_are_at_the_same_number_are_one_until_they_part(device):
    def function(x, *counters):
        torch._foreach_add_(counters, 1)
        first, second, third = (0.9 ** c.item() for c in counters)
        return x * (first + second + third)  # sum() adds otherwise from Python 3.12 on

    def poke(k, first, *_):
        if k in (9, 17):
            first.add_(1)

    f = agree(device, function, [(1.0, F32)] * 3, most=3, poke=poke)
    assert cgt.stats(f).records >= 2, cgt.explain(f)


@tells("counters_part")
def test_those_that_part_are_told(device):
    def function(x, c, d):
        return x * c.item() * d.item()

    def poke(k, c, d):
        c.fill_(k)
        d.fill_(k + (k % 2 if k > 8 else 0))

    (c, d), x = (torch.tensor(0.0), torch.tensor(0.0)), values(device, 8)
    f = cgt.jit(lambda x: function(x, c, d), max_records=1)
    for k in range(CALLS):
        poke(k, c, d)
        assert identical(f(x), function(x, c, d))
    assert "c and d held the same number" in " ".join(cgt.stats(f).reasons).replace("d and c", "c and d"), cgt.explain(f)


def test_zeros_of_either_sign(device):
    """They are equal, and not the same."""
    def function(x, c, d):
        return torch.full_like(x, c.item()).add(0, alpha=1).copysign(torch.full_like(x, d.item()))

    def poke(k, c, d):
        c.fill_(0.5 if k < 6 else 0.0)
        d.fill_(0.5 if k < 6 else -0.0 if k % 2 else 0.0)

    agree(device, function, [(0.5, F32)] * 2, most=4, eager=CALLS, poke=poke)


def test_comparisons_are_what_a_recording_is_for(device):
    def function(x, c):
        c += 1
        return x * 2 if c.item() > 12 else x + c.item()

    agree(device, function, [(0.0, F32)], most=2)


def test_argument(device):
    """Another tensor at each call."""
    f, x = cgt.jit(lambda x, t: x * t.item() / 3), values(device, 8)
    for k in range(CALLS):
        assert identical(f(x, torch.tensor(k / 7)), x * torch.tensor(k / 7).item() / 3)
    assert cgt.stats(f).replays >= CALLS - 4, cgt.explain(f)


def test_one_tensor_twice(device):
    def function(x, c, d):
        c += 1
        d += 1
        return x * c.item() * d.item()

    f, x = cgt.jit(function), values(device, 8)
    ours, theirs = ([torch.tensor(1.0) for _ in range(2)] for _ in range(2))
    for k in range(CALLS):
        which = (0, 0) if k % 5 == 4 else (0, 1)
        got, want = (g(x, *(counters[j] for j in which)) for g, counters in ((f, ours), (function, theirs)))
        assert identical(got, want) and state_of(ours) == state_of(theirs), (k, cgt.explain(f))
    assert cgt.stats(f).replays > 0, cgt.explain(f)


ORDINARY = {  # what else is done to a counter: none replays, and all are right
    "used behind": lambda x, c: (c.add_(1), x * c.item() * c)[1],
    "used before": lambda x, c: (x * c, c.add_(1), x * c * c.item())[2],
    "from the function's own numbers": lambda x, c: (c.add_(1), c.add_(x.double().sum().cpu()), x * c.item())[2],
    "through a view": lambda x, c: (c.view(1).add_(1), x * c.item())[1],
    "set": lambda x, c: (c.add_(1), c.item(), c.zero_(), x * c.item())[3],
    "as an int": lambda x, c: (c.add_(1), x[: int(c.item()) % 3 + 1])[1],
}


@tells("counter_used")
@pytest.mark.parametrize("use", list(ORDINARY))
def test_what_else_is_done_to_a_counter(device, use):
    f = agree(device, ORDINARY[use], [(1.0, F64)], most=CALLS, eager=CALLS)
    why = {"used behind": "in which the call counted before", "set": "in which the call counted before" if device.type == "cpu" else "changes a CPU tensor, or draws"}
    assert why.get(use, "") in " ".join(cgt.stats(f).reasons)


def test_sums_that_do_not_fit(device):
    """What wraps around, and what becomes infinite."""

    def function(x, c, d):
        c += 2**61
        d *= 1e12
        return x * (c.item() % 7) * (d.item() == 1.0)

    agree(device, function, [(1, I64), (1.0, F32)], most=CALLS, eager=CALLS)


def test_what_raises_leaves_it_as_eager_does(device):
    def function(x, c):
        c += 1
        y = x * c.item()
        if c.item() > 6 and c.item() % 3 == 0:
            raise ValueError("mine")
        return y

    ours, theirs, outcomes = torch.tensor(0.0), torch.tensor(0.0), []
    f, x = cgt.jit(lambda x: function(x, ours)), values(device, 8)
    for _ in range(CALLS):
        for call in (lambda: f(x), lambda: function(x, theirs)):
            try:
                outcomes.append(call())
            except ValueError as error:
                outcomes.append(str(error))
        got, want = outcomes[-2:]
        assert got == want if isinstance(want, str) else identical(got, want)
        assert state_of([ours]) == state_of([theirs])
    assert "mine" in outcomes and cgt.stats(f).replays > 0, cgt.explain(f)


def test_capture_that_comes_to_nothing(device):
    """What is refused behind the count runs again, and counts once."""

    def function(x, c):
        c += 1
        y = x * c.item()
        return y[y > 0.3].sum() + (y.to(device="cpu", dtype=torch.complex64).real.sum().item() if y.numel() else 0)

    agree(device, function, [(0.0, F32)], most=CALLS, eager=CALLS)


def test_explain_shows_what_is_live(device):
    box = {"step": torch.tensor(0.0)}

    def function(x):
        box["step"] += 1
        return x * box["step"].item()

    f = cgt.jit(function)
    for _ in range(6):
        f(values(device, 8))
    assert "numbers that may change: box['step']" in cgt.explain(f)


# --- optimizers -----------------------------------------------------------------------------------


def twin(device, cls, **options):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)
    optimizer = cls(model.parameters(), **options)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, optimizer, step


def assert_twins(ours, theirs):
    for p, q in zip(ours[0].parameters(), theirs[0].parameters(), strict=True):
        assert identical(p.detach(), q.detach())
        mine, other = ours[1].state[p], theirs[1].state[q]
        assert {k: (v.tolist(), v._version) for k, v in mine.items()} == {k: (v.tolist(), v._version) for k, v in other.items()}


def test_function_that_asks_for_a_type(device):
    """Its numbers are not live; those of PyTorch's own code are none of its business."""
    ours, theirs = (twin(device, torch.optim.Adam) for _ in range(2))

    def function(one):
        return lambda x: one[2](x if type(x) is torch.Tensor else x[0])

    f = cgt.jit(function(ours))
    for k in range(CALLS):
        x = values(device, 5, 8, seed=k)
        assert identical(f(x), function(theirs)(x)), cgt.explain(f)
        assert_twins(ours, theirs)
    assert cgt.stats(f).replays >= CALLS - 8, cgt.explain(f)


@tells("reads_counter")
@pytest.mark.parametrize("each", [False, True])
def test_state_that_is_loaded_in_the_middle(device, each):
    """load_state_dict puts other tensors there, and steps go back."""
    ours, theirs = (twin(device, torch.optim.AdamW, foreach=each) for _ in range(2))
    f, kept = cgt.jit(ours[2]), []
    for k in range(CALLS):
        x = values(device, 5, 8, seed=k)
        assert identical(f(x), theirs[2](x)), cgt.explain(f)
        assert_twins(ours, theirs)
        if k in (8, 16):
            kept = kept or [copy.deepcopy(one[1].state_dict()) for one in (ours, theirs)]
            for one, state in zip((ours, theirs), kept, strict=True):
                one[1].load_state_dict(copy.deepcopy(state))
    s = cgt.stats(f)
    assert s.replays >= CALLS - 10 and any("or reads its number" in reason for reason in s.reasons), cgt.explain(f)


@tells("counters_join")
@pytest.mark.parametrize("each", [False, True])
def test_parameters_that_join_later(device, each):
    """Their steps lag behind: each way to count has its recording."""
    ours, theirs = (twin(device, torch.optim.Adam, foreach=each) for _ in range(2))
    f = cgt.jit(ours[2])
    for k in range(CALLS):
        for model, *_ in (ours, theirs):
            model[2].requires_grad_(k >= 8)
        x = values(device, 5, 8, seed=k)
        assert identical(f(x), theirs[2](x)), cgt.explain(f)
        assert_twins(ours, theirs)
    assert cgt.stats(f).replays >= CALLS - 10, cgt.explain(f)


def test_rate_on_a_schedule_with_steps_on_the_host(device):
    ours, theirs = (twin(device, torch.optim.Adam, lr=0.1) for _ in range(2))
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(one[1], CALLS) for one in (ours, theirs)]
    f = cgt.jit(ours[2])
    for k in range(CALLS):
        x = values(device, 5, 8, seed=k)
        assert identical(f(x), theirs[2](x)), cgt.explain(f)
        for schedule in schedules:
            schedule.step()
        assert_twins(ours, theirs)
    s = cgt.stats(f)
    assert s.records <= 3 and s.replays >= CALLS - 6, cgt.explain(f)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kind", [F32, F64, I64], ids=str)
def test_memory_that_counts_under_two_names(device, kind, whole):
    """Of one array of NumPy's: no op on the one tells of the other."""

    def made():
        array = torch.zeros(3, dtype=kind).numpy()
        return [torch.from_numpy(array[1:2]).reshape(()), torch.from_numpy(array if whole else array[1:2])]

    (ours, alias), (theirs, other) = made(), made()

    def function(x, c, d):
        first = c.item()
        d.add_(1)
        d.add_(1)
        return x * c.item() + first

    f, x = cgt.jit(lambda x: function(x, ours, alias)), values(device, 8)
    for k in range(CALLS):
        want = function(x, theirs, other)
        assert identical(f(x), want) and ours.item() == theirs.item(), (k, cgt.explain(f))
