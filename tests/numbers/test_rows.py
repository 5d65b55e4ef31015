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


# --- an index that is read on the way -------------------------------------------------------------

def added(table, row, x, t):
    k = t.item()
    return x * table[k] + k


READ = {  # of a table of 12 rows, a list of 12 numbers, x, and t, a tensor with a whole number
    "a tensor": lambda table, row, x, t: x * table[t],
    "its number": lambda table, row, x, t: x * table[t.item()],
    "computed": lambda table, row, x, t: x * table[t - 1] + table[t.item() // 2 + 1],
    "from behind": lambda table, row, x, t: x * table[-t],
    "and compared": lambda table, row, x, t: x * (table[t - 2] if t >= 2 else 1),
    "twice": lambda table, row, x, t: x * table[t] + table[t].sum() * table[t - 1],
    "beside others": lambda table, row, x, t: x * table[t, 1:3].sum() + table[None, t],
    "in a column": lambda table, row, x, t: x * table.view(1, 12, 4)[:, t],
    "made in the call": lambda table, row, x, t: x * table[(x.sum() + t).long().clamp(0, 11)],
    "into what was made": lambda table, row, x, t: (table * x)[t] + x,
    "a list": lambda table, row, x, t: x * row[t.item()],
    "both": lambda table, row, x, t: x * row[t.item()] + table[t],
    "and added": added,
    "of columns": lambda table, row, x, t: x * table[..., 0][t] + table.t()[1][t],
    "rates": lambda table, row, x, t: (x - (1 - table[t]).abs().sqrt() * x) / table[t].abs().sqrt() + table[t - 1],
}  # fmt: skip


def indexed(form, device):
    def make():
        table, row = values(device, 12, 4, seed=3).clone(), [0.5 * k for k in range(12)]
        return [table], lambda x, t: form(table, row, x, t)

    return make


@pytest.mark.parametrize("form", READ)
def test_one_recording_reads_at_any_index_that_is_read(device, form):
    steps = torch.arange(11, -1, -1, device=device)  # as a sampler goes through them
    f = check(indexed(READ[form], device), [(values(device, 4, seed=k), steps[k % 11]) for k in range(16)], 12)
    assert cgt.stats(f).records <= 3, cgt.explain(f)


NOT_ANY = {
    "beyond": lambda table, row, x, t: x * table[t * 3],
    "behind the beginning": lambda table, row, x, t: x * table[-3 * t - 1],
    "a list, beyond": lambda table, row, x, t: x * row[t.item() * 3],
    "a row that is handed out": lambda table, row, x, t: table[t],
    "a row that is written": lambda table, row, x, t: table[t].add_(x) * 2,
    "a table that is written behind it": lambda table, row, x, t: (table[t], table.mul_(0.5), x)[0] + x,
    "a list that a tensor indexes": lambda table, row, x, t: x * row[t],
    "a list, then a tensor": lambda table, row, x, t: sum((s[k] for s, k in ((row, t), (table, 3), (table, t), (row, 2))), x),
    "a place that is written": lambda table, row, x, t: table.index_put_((t[None],), x)[t] * 1,
    "an assignment": lambda table, row, x, t: (table.__setitem__(t, x), table.sum(0))[1],
    "a shape": lambda table, row, x, t: x * table[: t.item()].sum() + len(range(t.item())),
    "a row of a parameter": lambda table, row, x, t: (x * table.clone().requires_grad_()[t]).detach(),
    "numbers from everywhere": lambda table, row, x, t: x * table[[t, t]].sum() + table[t : t + 1].sum(),
    "a key": lambda table, row, x, t: x * {k: 2.0 * k for k in range(12)}[t.item()],
    "a mask of one": lambda table, row, x, t: x * table[t > 2].sum(),
}  # fmt: skip


@pytest.mark.parametrize("form", NOT_ANY)
def test_what_else_is_done_with_an_index_that_is_read_is_eagers(device, form):
    check(indexed(NOT_ANY[form], device), [(values(device, 4, seed=k), torch.tensor(k * 5 % 6, device=device)) for k in range(CALLS)])


def test_sampler_that_goes_through_its_steps(device):
    """As diffusers writes it, in one function: one recording for all steps."""
    model = torch.nn.Linear(4, 4).to(device)
    alphas = torch.linspace(0.999, 0.01, 50, device=device).cumprod(0)

    @torch.no_grad()
    def denoise(x, t):
        a, before = alphas[t], alphas[t - 5] if t >= 5 else torch.ones_like(alphas[0])
        noise = model(x)
        clean = (x - (1 - a).sqrt() * noise) / a.sqrt()
        return before.sqrt() * clean + (1 - before).sqrt() * noise

    f = cgt.jit(denoise)
    for run in range(2):
        mine = theirs = values(device, 2, 4, seed=run)
        for t in torch.arange(49, -1, -5, device=device):
            mine, theirs = f(mine, t), denoise(theirs, t)
            assert torch.equal(mine, theirs), t
    assert cgt.stats(f).replays >= 15 and cgt.stats(f).records <= 4, cgt.explain(f)


class Once:
    """What runs eagerly in the middle of a call, and must not run twice."""

    def __init__(self):
        self.calls = 0

    @cgt.eager
    def part(self, x):
        self.calls += 1
        return x.sin()


def written(table, row):
    row.add_(1)
    return row


def beside(table, row):
    table.mul_(2)
    return row * 1


def kept(table, row):
    return row


def through_a_view(table, row):
    table[1:].t().add_(1)
    return row + 1


@pytest.mark.parametrize("how", [written, beside, kept, through_a_view])
@pytest.mark.parametrize("first", [True, False], ids=["part, then row", "row, then part"])
def test_rows_are_views_where_the_run_can_neither_be_undone_nor_come_again(device, how, first):
    """A part of the user's ran: on the CPU that run goes on, as eager's, and is not recorded."""

    def make():
        table, once, held = values(device, 4, 3), Once(), []

        def function(x):
            at = x[0].argmax()
            z = once.part(x) if first else x
            row = table[at]
            z = z if first else once.part(x)
            return z + how(table, row) + x.sum().item()

        return table, once, held, function

    (mine, once, _, function), (theirs, twice, _, g) = make(), make()
    f = cgt.jit(function)
    for k in range(CALLS):
        x = values(device, 4, 3, seed=k % 5)
        assert torch.equal(f(x), g(x)) and torch.equal(mine, theirs), (k, cgt.explain(f))
        assert once.calls == twice.calls == k + 1


def test_a_row_that_is_kept_behind_a_part_is_a_view(device):
    table, once, log = values(device, 4, 3), Once(), []

    def function(x):
        at = x[0].argmax()
        log.append(table[at])
        return once.part(x) + x.sum().item()

    f = cgt.jit(function)
    for k in range(CALLS):
        x = values(device, 4, 3, seed=k % 5)
        assert torch.equal(f(x), x.sin() + x.sum().item())
        table.add_(1)
        assert all(row.untyped_storage().data_ptr() == table.untyped_storage().data_ptr() for row in log), k
    assert len(log) == once.calls == CALLS
