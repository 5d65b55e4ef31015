"""Calls of many sizes by recordings of a few: `jit(pad=)`."""

import collections
import contextlib
import copy
import queue
import random

import numpy
import pytest
import torch
from helpers import AUDITS_BY_DEFAULT, tells, values
from torch import nn

import cgt


def sizes(n, most=16, seed=0):
    """That many, of 1 to `most`, in an order that is the same each time."""
    choose = random.Random(seed)
    return [choose.randint(1, most) for _ in range(n)]


def close(mine, theirs):
    return mine.shape == theirs.shape and torch.allclose(mine, theirs, rtol=1e-5, atol=1e-5)


def network(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).to(device).requires_grad_(False)


@pytest.mark.parametrize("audit", [None, AUDITS_BY_DEFAULT])
def test_batches_of_any_size_have_a_recording_for_each_power_of_two(device, audit):
    net = network(device)
    f = cgt.jit(lambda x, scale=1.0: {"y": net(x) * scale, "sums": [x.sum(1)], "of all": net[0].weight * 2}, pad={"x": 0}, audit=audit)
    for k, n in enumerate(sizes(200)):
        x = values(device, n, 6, seed=k)
        mine, theirs = f(x), f.__wrapped__(x)
        assert close(mine["y"], theirs["y"]) and close(mine["sums"][0], theirs["sums"][0]) and close(mine["of all"], theirs["of all"])
    s = cgt.stats(f)
    assert s.calls == 200 and s.records <= 10 and s.replays >= 180, cgt.explain(f)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.inner = nn.Embedding(20, 8), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, ids, mask=None, *, more=None):
        x = self.embed(ids)
        x = self.inner(x, x, x, key_padding_mask=~mask)[0] * mask[..., None]
        return x, x.sum(1) / mask.sum(1, keepdim=True), None if more is None else x + more["shift"]


def test_batch_and_length_of_a_masked_model(device):
    torch.manual_seed(0)
    plain = Attends().to(device).eval().requires_grad_(False)
    net = cgt.jit(copy.deepcopy(plain), pad={"ids": cgt.Pad({0: (), 1: (8, 24)}, fill=19), "mask": {0: (), 1: (8, 24)}, "more": 0})
    choose = random.Random(1)
    for k in range(300):  # the first with as many rows as columns, which might be either
        batch, length = (5, 5) if k == 0 else (choose.randint(1, 8), choose.choice((5, 17, 30)))
        ids, mask = torch.randint(0, 19, (batch, length), device=device), torch.ones(batch, length, dtype=torch.bool, device=device)
        mask[0, length // 2 :] = False
        more = {"shift": values(device, batch, 1, 8, seed=k)} if k % 2 else None
        for mine, theirs in zip(net(ids, mask=mask, more=more), plain(ids, mask, more=more), strict=True):
            assert (mine is None and theirs is None) or close(mine, theirs), k
    s = cgt.stats(net)
    assert s.calls == 300 and s.replays >= 200, cgt.explain(net)
    assert isinstance(copy.deepcopy(net), Attends) and net.forward(ids, mask)[0].shape == ids.shape + (8,)


def test_dimensions_of_equal_length_are_told_apart_by_a_later_call(device):
    f = cgt.jit(lambda x: (x * 2, x.t() + 1, x[:, 0] - 1), pad={"x": {0: (8,), 1: (8,)}})
    for rows, columns in [(3, 3)] * 4 + [(3, 5), (5, 3), (2, 7)] * 4:
        x = values(device, rows, columns)
        assert all(map(torch.equal, f(x), f.__wrapped__(x)))
    assert cgt.stats(f).records <= 4 and cgt.stats(f).replays >= 10, cgt.explain(f)


def test_what_is_longer_than_the_sizes_or_as_long_is_not_filled(device):
    f = cgt.jit(lambda x: x * 2, pad={"x": {0: (4, 8)}})
    for n in (8, 4, 9, 0) * 4:
        x = values(device, n, 2)
        assert torch.equal(f(x), x * 2)
    assert cgt.stats(f).replays >= 8 and "236" not in cgt.explain(f)


def test_lengths_that_come_often_are_sizes(device):
    """A loop over batches of 48 is not to compute 64 rows, and its last batch may have 48."""
    g = cgt.jit(lambda x: x * 2, pad={"x": 0})
    for n in ([48] * 9 + [17]) * 4:
        x = values(device, n, 2, seed=n)
        assert torch.equal(g(x), x * 2)
    told = cgt.explain(g)
    assert "(48, 2)" in told and "(32, 2)" in told and cgt.stats(g).replays >= 30, told
    for n in (40, 33, 41, 47):
        assert torch.equal(g(values(device, n, 2)), values(device, n, 2) * 2)
    assert cgt.explain(g).count(", 2)") == 3, cgt.explain(g)  # of 64, 32 and 48 rows


def test_fill_is_what_lies_behind(device):
    """A reduction is right where the fill is its neutral element."""
    f = cgt.jit(lambda x: x.amax(0), pad={"x": cgt.Pad(0, float("-inf"))})
    for k, n in enumerate([5, 7, 6] * 4):
        x = values(device, n, 2, seed=k) - 10
        assert torch.equal(f(x), x.amax(0))
    assert cgt.stats(f).records <= 2 and cgt.stats(f).replays >= 8, cgt.explain(f)  # one more, where addresses came again


def test_gradients_are_those_of_the_rows_that_were_given(device):
    net = network(device).requires_grad_(True)
    f = cgt.jit(net.forward, pad={"input": 0})
    for k, n in enumerate(sizes(40, most=6)):
        x = values(device, n, 6, seed=k).requires_grad_(True)
        found = []
        for run in (f, net.forward):
            run(x).square().sum().backward()
            found.append([x.grad, *(p.grad for p in net.parameters())])
            x.grad = None
            net.zero_grad()
        assert all(map(close, *found))
    assert cgt.stats(f).replays >= 20, cgt.explain(f)


def mean(x):
    return x.mean()


def normed(x):
    return x.softmax(0)


def flattened(x):
    return x.reshape(-1)


def counted(x):
    return x * 2, x.shape[0]


def pairs(x):
    return x[::2] * 2


def raises(x):
    if x.shape[0] == 8:
        raise ValueError("eight")
    return x * 2


@tells("pad_differs")
@pytest.mark.parametrize("function", [mean, normed, flattened, counted, pairs, raises])
def test_what_depends_on_the_other_rows_is_found_out(device, function):
    f = cgt.jit(function, pad={"x": 0})
    f(values(device, 5, 2))
    with pytest.warns(cgt.CgtWarning, match="CGT236"):
        assert same(f(values(device, 5, 2)), function(values(device, 5, 2)))
    for k, n in enumerate([5, 7, 6] * 4):
        x = values(device, n, 2, seed=k)
        assert same(f(x), function(x))
    assert cgt.stats(f).replays >= 3, cgt.explain(f)  # one recording for each size


def same(mine, theirs):
    if isinstance(theirs, tuple):
        return all(map(same, mine, theirs))
    return torch.equal(mine, theirs) if isinstance(theirs, torch.Tensor) else mine == theirs


def test_a_mean_that_rounding_hides_at_first_is_found_by_a_later_call(device):
    """63 rows of 64 have nearly the same mean in half precision."""
    f = cgt.jit(lambda x: x.mean(0), pad={"x": {0: (64,)}}, audit=AUDITS_BY_DEFAULT)
    x = values(device, 64, 2, dtype=torch.bfloat16)
    x = x * 0 + 1
    for _ in range(3):
        f(x[:63])
    assert "236" not in cgt.explain(f)
    with pytest.warns(cgt.CgtWarning, match="CGT236"):
        for _ in range(2):
            got = f(x[:40])
    assert torch.equal(got, x[0])


def in_place(box):
    return lambda x: x.mul_(2)


def counting(box):
    def function(x):
        box["calls"] = box.get("calls", 0) + 1
        return x * 2

    return function


def statistics(box):
    norm = box.setdefault("norm", nn.BatchNorm1d(2, affine=False))
    return lambda x: norm.to(x.device)(x)


def dropping(box):
    return lambda x: nn.functional.dropout(x, 0.5)


def noisy(box):
    return lambda x: x + torch.rand((), device=x.device) * 0


def reaching(box):
    """What nothing leads to."""
    known = collections.deque([torch.zeros(2, device=box["device"])])

    def function(x):
        known[0].add_(1)
        return x * known[0]

    return function


def in_an_array(box):
    home = numpy.zeros(1)

    def function(x):
        home[0] += 1
        box["calls"] = home[0]
        return x * 2

    return function


@tells("pad_differs")
@pytest.mark.parametrize("make", [in_place, counting, statistics, dropping, noisy, reaching, in_an_array])
def test_functions_that_do_more_than_to_return_results_are_not_padded(device, make):
    """Not even once: what they do besides happens once a call."""
    boxes = {"device": device}, {"device": device}
    f, plain = cgt.jit(make(boxes[0]), pad={"x": 0}), make(boxes[1])
    for k, n in enumerate([5, 7, 6, 5, 7, 3] * 3):
        mine, theirs = values(device, n, 2, seed=k), values(device, n, 2, seed=k)
        with pytest.warns(cgt.CgtWarning, match="CGT236") if k == 1 else contextlib.nullcontext():
            assert torch.equal(*(seeded(k, call, x) for call, x in ((f, mine), (plain, theirs))))
        assert torch.equal(mine, theirs) and boxes[0].get("calls") == boxes[1].get("calls"), k
    norms = [box["norm"].running_mean for box in boxes if "norm" in box]
    assert not norms or torch.equal(*norms)
    assert cgt.stats(f).replays >= 3 or make in (counting, in_an_array), cgt.explain(f)


def seeded(k, call, x):
    """What it returns, and a number drawn behind it."""
    torch.manual_seed(k)
    return torch.cat([call(x).reshape(-1), torch.rand(2, device=x.device)])


def storing(box):
    def function(x):
        box["last"] = x.shape[0]
        return x * 2

    return function


def test_what_is_stored_and_never_read_is_found_where_it_is_recorded(device):
    box = {}
    f = cgt.jit(storing(box), pad={"x": 0})
    with pytest.warns(cgt.CgtWarning, match="CGT236"):
        for n in [5, 7, 6, 5, 7, 3] * 3:
            assert f(values(device, n, 2)).shape[0] == n
    for n in [5, 7, 6, 5, 7, 3] * 3:
        f(values(device, n, 2))
        assert box["last"] == n


def test_a_function_that_never_replays_is_not_run_twice_for_ever(device):
    calls = []
    f = cgt.jit(lambda x: (calls.append(1), x[x > 100])[1].sum() + x.new_tensor(len(calls)) * 0 + x[:, 0], pad={"x": 0})
    for k in range(60):
        f(values(device, 5, 2, seed=k))
    assert len(calls) <= 110


def popped():
    return collections.deque(range(100)).popleft


def counted_up():
    return (k for k in range(100)).__next__


def queued():
    waiting = queue.Queue()
    for k in range(100):
        waiting.put(k)
    return lambda: waiting.get()


TAKERS = {
    "an iterator": lambda: iter(range(100)).__next__, "random numbers of Python's": lambda: random.Random(0).random,
    "a generator": counted_up,
}  # fmt: skip


@pytest.mark.parametrize("name", TAKERS)
def test_what_is_taken_from_elsewhere_is_taken_once(device, name):
    takes, plain = TAKERS[name](), TAKERS[name]()
    f = cgt.jit(lambda x: x * takes(), pad={"x": 0})
    for k, n in enumerate(sizes(20, most=8)):
        x = values(device, n, 2, seed=k)
        assert torch.equal(f(x), x * plain()), k


@pytest.mark.parametrize("make", [popped, queued])
def test_what_is_taken_behind_c_is_taken_twice_by_one_call_and_told(device, make):
    takes, plain = make(), make()
    f = cgt.jit(lambda x: x * takes(), pad={"x": 0}, audit=AUDITS_BY_DEFAULT)
    assert torch.equal(f(values(device, 5, 2)), values(device, 5, 2) * plain())
    with pytest.warns(cgt.CgtWarning, match="CGT236"):
        assert torch.equal(f(values(device, 5, 2)), values(device, 5, 2) * plain())
    plain()
    for k in range(4):
        assert torch.equal(f(values(device, 6, 2)), values(device, 6, 2) * plain()), k


class Holder:
    def __init__(self, scale):
        self.scale = scale

    @cgt.jit(pad={"x": 0})
    def times(self, x, *, y=None):
        return x * self.scale if y is None else x * self.scale + y


def test_methods_and_calls_inside_of_other_jitted_functions(device):
    holder = Holder(3.0)
    outer = cgt.jit(lambda x: holder.times(x) + 1)
    for k, n in enumerate(sizes(30, most=4)):
        x = values(device, n, 3, seed=k)
        assert torch.equal(holder.times(x), x * 3) and torch.equal(holder.times(x=x), x * 3)
        assert torch.equal(outer(x), x * 3 + 1)
    assert cgt.stats(Holder.times).replays >= 40 and cgt.stats(outer).replays >= 15
    cgt.reset(Holder.times)


def test_replays_may_be_required(device):
    f = cgt.jit(lambda x: x * 2, pad={"x": {0: (8,)}})
    for n in (3, 4, 5):
        f(values(device, n, 2))
    with cgt.require_replay():
        for n in (6, 7, 2):
            assert torch.equal(f(values(device, n, 2)), values(device, n, 2) * 2)


def test_what_lay_at_one_address_so_far_may_lie_at_another(device):
    """Allocators give filled tensors the memory of those of the call before."""
    net = network(device)
    f = cgt.jit(net, pad={"input": {0: (2, 4)}})
    same = {n: values(device, n, 6) for n in (2, 4)}
    for n in (2, 4):
        for _ in range(4):
            f(same[n])
    for k, n in enumerate((1, 3, 4, 2)):
        x = values(device, n, 6, seed=k)
        with cgt.require_replay():
            mine = f(x)
        assert close(mine, net(x))


@tells("bad_option")
@pytest.mark.parametrize(
    "pad", [{"y": 0}, {"x": "0"}, {"x": ()}, {"x": True}, {"x": {0: 8}}, {"x": {0: ("8",)}}, {"x": cgt.Pad(0, "a")}, ["x"], {"x": None}],
)
def test_what_is_no_padding_is_refused(pad):
    with pytest.raises(cgt.CgtError, match="pad="):
        cgt.jit(lambda x: x, pad=pad)


def test_names_are_those_of_arguments(device):
    with pytest.raises(cgt.CgtError, match="pad="):
        cgt.jit(torch.relu, pad={"input": 0})  # compiled: nobody tells how its argument is called
    with pytest.raises(cgt.CgtError, match="pad="):
        cgt.jit(lambda *args: args[0], pad={"args": 0})


def test_tensors_that_cannot_be_filled_are_left_as_they_are(device):
    f = cgt.jit(lambda batch: [t * 2 for t in batch], pad={"batch": 0})
    for n in [3, 5, 4] * 4:
        batch = [values(device, n, 2), values(device, 1).sum(), values(device, n, 2).to_sparse()]
        got, want = f(batch), f.__wrapped__(batch)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]) and torch.equal(got[2].to_dense(), want[2].to_dense())


class Product(nn.Module):
    """Its op could draw, and does not."""

    def forward(self, input):
        return nn.functional.scaled_dot_product_attention(input, input, input)


MODELS = {
    "attention": (Product, (2, 5, 8)),
    "convolutions": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(4)), (3, 12, 12)),
    "transformer": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False), (7, 16)),
    "recurrent": (lambda: nn.GRU(6, 8, 2, batch_first=True), (5, 6)),
    "embedding": (lambda: nn.Sequential(nn.Linear(6, 6), nn.GroupNorm(2, 6), nn.Softmax(-1)), (6,)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models_in_inference(device, name):
    torch.manual_seed(0)
    make, shape = MODELS[name]
    net = make().to(device).eval()
    with torch.no_grad():
        net(values(device, 2, *shape))
        plain = copy.deepcopy(net)
        parameter = "src" if name == "transformer" else "input"
        cgt.jit(net, pad={parameter: 0})
        for k, n in enumerate(sizes(40, most=8)):
            x = values(device, n, *shape, seed=k)
            mine, theirs = net(x), plain(x)
            if name == "recurrent":  # its state has the batch in the second dimension
                assert close(mine[1], theirs[1])
                mine, theirs = mine[0], theirs[0]
            assert close(mine, theirs), k
    assert cgt.stats(net).replays >= 25 and "236" not in cgt.explain(net), cgt.explain(net)
