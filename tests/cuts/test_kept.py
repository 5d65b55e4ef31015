"""Numbers that a function reads only to keep them (`self.losses.append(loss.item())`, `self.last = float(loss)`) or to return what
float() makes of them: it replays, and each call keeps today's number. Where more becomes of them it runs eagerly."""

import copy
import functools

import pytest
import torch
from helpers import values
from torch import nn

import cgt

LAST, HISTORY = None, []


class Log:
    def __init__(self):
        self.losses, self.other, self.last, self.best, self.inner = [], [], None, 0.0, None

    def note(self, value):
        self.losses.append(value.item())

    def note_number(self, number):
        self.losses.append(number)


class Slotted:
    __slots__ = ("last", "losses", "other")

    def __init__(self):
        self.losses, self.last, self.other = [], None, []


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.losses, self.other, self.last, self.log = [], [], 0.0, nn.Identity()
        self.log.last = None


class Guarded:
    """Whoever stores `last` runs code."""

    def __init__(self):
        self.losses, self.other, self.seen = [], [], []

    @property
    def last(self):
        return self.seen[-1]

    @last.setter
    def last(self, value):
        self.seen.append(value if isinstance(value, tuple) else value + 1)


def append_item(o, x):
    o.losses.append(x.sum().item())


def append_float(o, x):
    o.losses.append(float(x.sum()))
    return x * 2


def store_item(o, x):
    o.last = x.sum().item()


def store_float(o, x):
    o.last = float((x * 2).mean())
    return x + 1


def store_and_return(o, x):
    o.last = loss = (x * x).mean().item()
    o.losses.append(loss)
    return loss, x * 2


def float_and_return(o, x):
    loss = float((x * x).mean())
    o.last = loss
    return {"loss": loss, "again": [loss], "y": x - 1}


def whole_numbers(o, x):
    o.losses.append(x.argmax().item())
    o.last = (x > 0).sum().item()
    o.other.append((x > 0).all().item())


def on_two_ways(o, x):
    y = x * 2
    if y.sum() > 0:
        o.losses.append(y.max().item())
    else:
        o.other.append(float(y.min()))
    return y


def several(o, x):
    for k in range(3):
        o.losses.append((x * k).sum().item())
    o.other.append(x.shape[0])


def in_a_tuple(o, x):
    o.losses.append((1, x.sum().item()))
    o.last = (x.mean().item(), float(x.max()))


def in_a_dict(o, x):
    o.losses.append({"loss": x.sum().item(), "more": [float(x.mean()), "text"]})


KEEPS = [
    append_item, append_float, store_item, store_float, store_and_return, float_and_return, whole_numbers, on_two_ways, several,
    in_a_tuple, in_a_dict,
]  # fmt: skip


def state(o):
    names = [name for name in ("losses", "other", "last", "best", "seen") if name in dir(o) and not (name == "last" and "seen" in dir(o))]
    return [(name, copy.copy(getattr(o, name))) for name in names]


def alike(a, b):
    """The same numbers, of the same types."""
    return repr(a) == repr(b)


def keeps_agree(function, device, make=Log, n=16, between=lambda o, k: None):
    """Its stats, after n calls that leave what eager leaves."""
    f, mine, theirs = cgt.jit(function), make(), make()
    for k in range(n):
        x = values(device, seed=k // 2)  # what is kept may be what was kept before
        between(mine, k), between(theirs, k)
        got, want = f(mine, x), function(theirs, x)
        assert alike(got, want), k
        assert alike(state(mine), state(theirs)), (k, cgt.explain(f))
    return cgt.stats(f)


@pytest.mark.parametrize("make", [Log, Module])
@pytest.mark.parametrize("function", KEEPS)
def test_what_is_only_kept_is_kept_by_replays(device, function, make):
    assert keeps_agree(function, device, make).replays >= 9


@pytest.mark.parametrize("function", KEEPS)
def test_slots_are_as_in_eager(device, function):
    keeps_agree(function, device, Slotted)


def test_list_that_is_replaced_and_cleared(device):
    def between(o, k):
        if k % 5 == 4:
            o.losses = []
        elif k % 3 == 2:
            o.losses.clear()

    assert keeps_agree(store_and_return, device, between=between, n=30).replays >= 20


def test_global_and_variable(device):
    last = None

    def function(x):
        global LAST
        nonlocal last
        LAST = x.sum().item()
        last = float(x.mean())
        HISTORY.append(x.max().item())

    f = cgt.jit(function)
    HISTORY.clear()
    for k in range(12):
        x = values(device, seed=k)
        f(x)
        assert (LAST, last, HISTORY[-1]) == (x.sum().item(), float(x.mean()), x.max().item()) and len(HISTORY) == k + 1
    assert cgt.stats(f).replays >= 9, cgt.explain(f)


def test_methods_keep_it(device):
    class Trainer(Log):
        @cgt.jit
        def step(self, x):
            loss = (x * 2).mean()
            self.note(loss)
            self.inner.last = loss.item()

    trainer = Trainer()
    trainer.inner = Log()
    for k in range(12):
        x = values(device, seed=k)
        trainer.step(x)
        want = (x * 2).mean().item()
        assert trainer.losses[-1] == trainer.inner.last == want and len(trainer.losses) == k + 1
    assert cgt.stats(trainer.step).replays >= 9, cgt.explain(trainer.step)


def test_number_that_is_handed_on_is_no_mere_number(device):
    """A helper might do anything to it."""

    def function(o, x):
        o.note_number(x.sum().item())

    keeps_agree(function, device)


def test_training_loop(device):
    def train(wrap):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []

        @wrap
        def step(x, y):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

        for k in range(20):
            step(values(device, seed=k), values(device, 4, 1, seed=k + 1))
        return step, losses

    (step, got), (_, want) = train(cgt.jit), train(lambda f: f)
    assert got == want and all(type(one) is float for one in got)
    assert cgt.stats(step).replays >= 16, cgt.explain(step)


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int64, torch.bool])
def test_float_of_any_dtype(device, dtype):
    x = torch.zeros(1, 1, dtype=dtype, device=device)
    f = cgt.jit(lambda x: (float(x), x.logical_not()))
    for k in range(8):
        x.fill_(k % 3)
        got = f(x)[0]
        assert type(got) is float and got == float(x)
    assert cgt.stats(f).replays >= 6, cgt.explain(f)


def test_float_of_the_user(device):
    """Another function of that name."""
    float = functools.partial(round, ndigits=1)
    f = cgt.jit(lambda x: float(x.sum().item()))
    for k in range(6):
        x = values(device, seed=k)
        assert f(x) == float(x.sum().item())


# --- what else becomes of it ------------------------------------------------------------------------


def asks_length(o, x):
    o.losses.append(x.sum().item())
    return x * len(o.losses)


def asks_last(o, x):
    o.last = x.sum().item()
    return x + o.last


def with_a_list(o, x):
    o.losses.append([x.shape, o.other, x.sum().item()])


def returned_in_a_dict(o, x):
    made = {"loss": x.sum().item()}
    o.losses.append(made)
    return made


def twice_in_a_list(o, x):
    made = [x.sum().item()]
    o.losses.append(made)
    o.last = made


def adds(o, x):
    o.best += x.sum().item()


def keeps_in_a_local_list(o, x):
    losses = o.losses
    losses.append(x.sum().item())


def keeps_by_a_bound_method(o, x):
    push = o.losses.append
    push(x.sum().item())


def keeps_of_an_argument(o, x, inner):
    inner.last = x.sum().item()


def keeps_in_a_new_object(o, x):
    made = Log()
    made.last = x.sum().item()
    o.losses.append(made.last)


def keeps_in_another_way(o, x):
    o.last = float(x.sum()) + 1
    o.other.append(round(float(x.sum()), 1))


def compares_and_keeps(o, x):
    loss = x.sum().item()
    if loss > o.best:
        o.losses.append(loss)


def best_so_far(o, x):
    loss = x.sum().item()
    if loss > o.best:
        o.best = loss


def loses_it(o, x):
    float(x.sum())
    x.sum().item()
    o.last = float(x.mean())


def assigns_self(o, x):
    o = o
    o.last = x.sum().item()


OTHERS = [
    asks_length, asks_last, with_a_list, returned_in_a_dict, twice_in_a_list, adds, keeps_in_a_local_list, keeps_by_a_bound_method, keeps_in_a_new_object,
    keeps_in_another_way, compares_and_keeps, best_so_far, loses_it, assigns_self,
]  # fmt: skip


@pytest.mark.parametrize("make", [Log, Module])
@pytest.mark.parametrize("function", OTHERS)
def test_whatever_else_becomes_of_it_is_as_in_eager(device, function, make):
    keeps_agree(function, device, functools.partial(with_best, make))


def test_dict_that_is_returned_is_the_one_that_is_kept(device):
    f, o = cgt.jit(returned_in_a_dict), Log()
    for k in range(6):
        assert f(o, values(device, seed=k)) is o.losses[-1]


def test_each_call_makes_its_own(device):
    f, o = cgt.jit(in_a_dict), Log()
    for k in range(6):
        f(o, values(device, seed=k))
        o.losses[-1]["more"].append(k)
    assert [len(one["more"]) for one in o.losses] == [3] * 6 and cgt.stats(f).replays >= 3


def with_best(make):
    made = make()
    made.best = 0.0
    return made


@pytest.mark.parametrize("function", KEEPS)
def test_setter_gets_the_number(device, function):
    keeps_agree(function, device, Guarded)


@pytest.mark.parametrize("refused", [lambda x: x.nonzero(), lambda x: x.tolist(), lambda x: torch.from_numpy(x.cpu().numpy()).sum()])
def test_what_cannot_be_replayed_has_kept_numbers(device, refused):
    """What stood for them while it was recorded is nowhere."""

    def function(o, x):
        o.losses.append(x.sum().item())
        o.last = float(x.mean())
        x.add_(0)
        refused(x)

    keeps_agree(function, device)


def test_exception_behind_it(device):
    """Eager kept the number before it failed."""
    boxes = []
    for wrap in (cgt.jit, lambda f: f):
        o, calls = Log(), [0]

        @wrap
        def function(x, o=o):
            o.losses.append(x.sum().item())
            o.last = float(x.mean())
            if x.shape[0] == 5:
                raise ValueError("five")
            return x * 2

        for k in range(20):
            calls[0] += 1
            try:
                function(values(device, 5 if k in (0, 7, 8, 9) else 4, seed=k))
            except ValueError as error:
                assert str(error) == "five"
        boxes.append(state(o))
    assert alike(*boxes)


def test_part_that_runs_eagerly_reads_it(device):
    @cgt.eager
    def look(o, x):
        return x * (1 if o.last is None else o.last)

    def function(o, x):
        o.last = x.sum().item()
        return look(o, x) + 1

    keeps_agree(function, device)


def test_another_function_reads_it(device):
    o = Log()
    keep, read = cgt.jit(lambda x: append_float(o, x)), cgt.jit(lambda x: x * o.losses[-1])
    for k in range(10):
        x = values(device, seed=k)
        keep(x)
        assert torch.equal(read(x), x * float(x.sum()))


def test_explain_tells_what_is_kept(device):
    o = Log()
    f = cgt.jit(store_and_return)
    for k in range(4):
        f(o, values(device, seed=k))
    told = cgt.explain(f)
    assert "stores args[0].last" in told and "appends to args[0].losses" in told, told
    assert "waits for what it hands out on the host" in told and "test_kept.py" in told, told


@pytest.mark.parametrize("line", ["o.last = [n]", "o.last = {'n': n}", "o.last = [x * n]", "o.last = [[n, 1], 2]", "o.last = [1, 2]"])
def test_a_list_that_is_kept_and_returned_is_one(device, line):
    """The function must not tell them apart afterwards, recorded or not."""
    space = {}
    exec(f"def function(o, x):\n    n = x.sum().item()\n    {line}\n    return x, [o.last]", space)
    function = space["function"]
    f, mine, theirs = cgt.jit(function), Log(), Log()
    for k in range(8):
        x = values(device, seed=k)
        (_, [got]), (_, [want]) = f(mine, x), function(theirs, x)
        assert got is mine.last and alike(got, want) and alike(state(mine), state(theirs)), (k, cgt.explain(f))
