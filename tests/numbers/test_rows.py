"""Rows of tensors that a number chooses which is another one at each call: read, and written."""

import pytest
import torch
from helpers import tells, values
from hypothesis import given, settings
from hypothesis import strategies as st

import cgt

CALLS = 12


def pair(make):
    """A jitted function, a plain one, and the tensors that each of them has."""
    (mine, f), (theirs, g) = make(), make()
    return cgt.jit(f), g, mine, theirs


def check(make, calls, replays=None):
    f, g, mine, theirs = pair(make)
    for k, given_ in enumerate(calls):
        outcomes = []
        for function in (f, g):
            try:
                outcomes.append(function(*given_))
            except (IndexError, RuntimeError) as error:
                outcomes.append(f"{type(error).__name__}: {error}")
        same = outcomes[0] == outcomes[1] if isinstance(outcomes[0], str) or isinstance(outcomes[1], str) else torch.equal(*outcomes)
        assert same and all(map(torch.equal, mine, theirs)), (k, given_, outcomes, cgt.explain(f))
        assert [t._version for t in mine] == [t._version for t in theirs]
    if replays is not None:
        assert cgt.stats(f).replays >= replays, cgt.explain(f)
    return f


def around(write, device):
    """Makes a function that writes and then reads."""

    def make():
        t = values(device, 6, 6, 6, seed=1).clone()

        def function(x, i):
            write(t, x, i)
            return t.sum(0) + x[0]

        return [t], function

    return make


WRITES = {
    "row": lambda t, x, i: t.__setitem__(i, x[0, 0]),
    "row by broadcast": lambda t, x, i: t.__setitem__(i, x[:1, :, :1]),
    "from behind": lambda t, x, i: t.__setitem__(-1 - i, x[0]),
    "column": lambda t, x, i: t.__setitem__((slice(None), i), x[:, 0]),
    "innermost": lambda t, x, i: t.__setitem__((slice(None), slice(None), i), x[..., 0]),
    "number": lambda t, x, i: t.__setitem__(i, 0.5),
    "integer": lambda t, x, i: t.__setitem__(i, 3),
    "the number itself": lambda t, x, i: t.__setitem__(i, i),
    "some": lambda t, x, i: t.__setitem__((slice(None), slice(i, i + 2)), x[:, :2]),
    "some rows": lambda t, x, i: t.__setitem__(slice(i, i + 1), x[1]),
    "computed": lambda t, x, i: t.__setitem__((i * 3 + 1) % 6, x[0]),
    "and read": lambda t, x, i: (t.__setitem__(i, x[0]), t.mul_(t.sum(0).tanh())),
}  # fmt: skip


@pytest.mark.parametrize("way", WRITES)
def test_one_recording_writes_any_row(device, way):
    f = check(around(WRITES[way], device), [(values(device, 6, 6, 6, seed=k), k * 7 % 4) for k in range(CALLS)], CALLS - 4)
    assert cgt.stats(f).records <= 3, cgt.explain(f)


def test_replay_buffer_that_counts(device):
    """As deep reinforcement learning keeps what it saw."""

    class Replay:
        def __init__(self):
            self.seen, self.did = torch.zeros(5, 8, device=device), torch.zeros(5, dtype=torch.int64, device=device)
            self.at = 0

        def push(self, x, action):
            self.seen[self.at] = x
            self.did[self.at] = action
            self.at = (self.at + 1) % 5
            return x * 2

    mine, theirs = Replay(), Replay()
    f = cgt.jit(mine.push)
    for k in range(24):
        x, action = values(device, 8, seed=k), torch.tensor(k, device=device)
        assert torch.equal(f(x, action), theirs.push(x, action))
        assert torch.equal(mine.seen, theirs.seen) and torch.equal(mine.did, theirs.did) and mine.at == theirs.at
    assert cgt.stats(f).replays >= 20, cgt.explain(f)


def test_cache_of_keys_that_a_decoder_fills(device):
    def make():
        cache = torch.zeros(1, 2, 16, 4, device=device)

        def function(q, t):
            cache[:, :, t : t + 1] = q
            kept = torch.arange(16, device=device) <= t
            weights = (q @ cache.transpose(-1, -2)).masked_fill(~kept, float("-inf")).softmax(-1)
            return weights @ cache

        return [cache], function

    f = check(make, [(values(device, 1, 2, 1, 4, seed=t), t) for t in range(16)], 13)
    assert cgt.stats(f).records == 1, cgt.explain(f)


EAGER = {
    "another type": lambda t, x, i: t.__setitem__(i, x[0].double()),
    "part of itself": lambda t, x, i: t.__setitem__(i, t[0]),
    "beyond": lambda t, x, i: t.__setitem__(i * 3, x[0]),
    "cut off": lambda t, x, i: t.__setitem__(slice(i + 2, i + 5), x[: min(3, 4 - i)]),
    "another length": lambda t, x, i: t.__setitem__(slice(0, i + 1), x[: i + 1]),
    "two numbers": lambda t, x, i: t.__setitem__((i, i), x[0, 0]),
    "with a mask beside": lambda t, x, i: t.__setitem__((i, x[0, :, 0] > 0), 0.0),
    "too large a value": lambda t, x, i: t.__setitem__(i, x[:2]),
    "a float into integers": lambda t, x, i: t.long().__setitem__(i, 2.7),
    "a row that was chosen before": lambda t, x, i: (t[i], t.__setitem__(i, x[0]))[0].add_(1),
    "every other": lambda t, x, i: t.__setitem__(slice(i, i + 2, 2), x[0]),
}  # fmt: skip


@tells("row_written")
@pytest.mark.parametrize("way", EAGER)
def test_what_an_op_would_not_do_alike_is_eagers(device, way):
    check(around(EAGER[way], device), [(values(device, 6, 6, 6, seed=k), k * 7 % 4) for k in range(CALLS)])


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_random_writes_agree_with_eager(data):
    shape = (4, 3, 5)
    dim = data.draw(st.integers(0, 2))
    sliced, step, offset = data.draw(st.sampled_from([0, 1, 2])), data.draw(st.integers(-2, 2)), data.draw(st.integers(-2, 2))
    kind = data.draw(st.sampled_from(["tensor", "row", "number"]))

    def make():
        t = torch.arange(60.0).reshape(shape).clone()

        def function(x, i):
            k = i * step + offset
            index = (*[slice(None)] * dim, slice(k, k + sliced) if sliced else k)
            t[index] = {"tensor": x, "row": x.reshape(-1)[:1], "number": 1.5}[kind]
            return t * 2

        return [t], function

    row = [n for k, n in enumerate(shape) if k != dim or sliced]
    if sliced:
        row[dim] = sliced
    check(make, [(torch.randn(row), i) for i in data.draw(st.lists(st.integers(0, 3), min_size=4, max_size=10))])


def test_assignment_is_torchs_own_again():
    f = cgt.jit(lambda t, i: t.clone().__setitem__(i, 1.0))
    for i in range(4):
        f(torch.zeros(4), i)
    assert "__setitem__" not in vars(torch.Tensor)


def test_rows_whose_memory_is_written_under_another_name(device):
    def make():
        table = torch.arange(12.0, device=device).view(3, 4)
        other = torch.from_dlpack(table)

        def function(x, t):
            row = table[t]
            other.add_(x)
            return row * 2

        return [table, other], function

    check(make, [(torch.full((4,), float(k), device=device), k % 3) for k in range(CALLS)], replays=CALLS // 3)
