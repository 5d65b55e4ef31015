"""Tensors on the host that a function brings to the GPU itself: each replay copies what they hold by then. (With the
host as the device the functions are what they are anyway.)"""

import pytest
import torch
from helpers import identical, tells
from torch import nn

import cgt

N = 8
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="says something about GPUs")


def host(k, *shape, dtype=torch.float32):
    """Values of call k."""
    n = torch.Size(shape).numel()
    return ((torch.arange(n) * 7 + 3 * k) % 23 - 11).to(dtype).view(shape)


def agree(function, given, n=N, least=4):
    """n calls with given(k) are as eager's, results and arguments, and so many are replays."""
    f = cgt.jit(function)
    for k in range(n):
        mine, theirs = given(k), given(k)
        got, want = f(*mine), function(*theirs)
        for t in (*mine, *theirs):
            if isinstance(t, torch.Tensor) and t.is_cpu and not t.is_inference():
                t.fill_(1)  # as a loader does with its memory once the call is over
        assert identical(got, want), k
    assert cgt.stats(f).replays >= least, cgt.stats(f).reasons
    return f


MOVES = {
    "as it is": lambda x, d: x.to(d) + 1,
    "twice": lambda x, d: x.to(d) + x.to(d) * 2,
    "without waiting": lambda x, d: x.to(d, non_blocking=True) + 1,
    "as half": lambda x, d: x.to(d, torch.float16) * 3,
    "transposed": lambda x, d: x.t().to(d) @ torch.ones(6, 2, device=d),
    "part": lambda x, d: x[1:4, ::2].to(d) + 1,
    "one more dimension": lambda x, d: x[None].to(d).sum(0),
    "one element": lambda x, d: x[2, 3][None].to(d) * torch.ones(4, device=d),
    "into memory of the call": lambda x, d: torch.zeros(6, 5, device=d).copy_(x) + 1,
    "into part of it": lambda x, d: torch.zeros(6, 10, device=d).index_fill_(0, torch.zeros(1, dtype=torch.int64, device=d), 3)[:, ::2].copy_(x) + 1,
    "and changed there": lambda x, d: x.to(d, copy=True).mul_(2).add_(1),
    "and returned": lambda x, d: x.to(d, copy=True),
    "with a value that is read": lambda x, d: x.to(d) * (2 if (x.to(d).sum() > 0).item() else 3),
}  # fmt: skip


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_tensor_of_the_host_is_moved_inside(device, move):
    agree(lambda x: move(x, device), lambda k: (host(k, 6, 5),), n=12)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool, torch.bfloat16, torch.float64, torch.complex64])
def test_moved_dtypes(device, dtype):
    agree(lambda x: x.to(device) * 2, lambda k: (host(k, 5, dtype=dtype),))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool])
def test_moved_and_made_a_float(device, dtype):
    agree(lambda x: x.to(device, torch.float32) / 3, lambda k: (host(k, 5, dtype=dtype),))


@pytest.mark.parametrize("n", [0, 1, 3, 1 << 20])
def test_moved_sizes(device, n):
    agree(lambda x: x.to(device) + 1, lambda k: (host(k, n),))


@GPU
def test_rows_of_an_array_lie_at_any_address():
    """No alignment class of the host's makes a recording of its own."""
    data = host(0, 64, 3)
    f = agree(lambda x: x.to("cuda").sum() * 2, lambda k: (data.clone()[k : k + 2],), n=24, least=20)
    assert cgt.stats(f).records == 1


@GPU
@pytest.mark.parametrize("non_blocking", [False, True])
def test_page_locked_memory(non_blocking):
    function = lambda x: x.to("cuda", non_blocking=non_blocking) + 1  # noqa: E731
    f = cgt.jit(function)
    buffer = torch.zeros(1 << 22).pin_memory()
    for k in range(N):
        buffer.fill_(k)
        y = f(buffer)
        if non_blocking:
            torch.cuda.synchronize()
        buffer.fill_(-1)
        assert (y == k + 1).all(), k
    assert cgt.stats(f).replays >= 5, cgt.stats(f).reasons


def test_index_of_the_host_chooses_rows(device):
    rows = host(1, 10, 4).to(device)
    agree(lambda i: rows[i] * 2, lambda k: (torch.tensor([k % 3, 5, (7 * k) % 10]),))


def test_one_tensor_as_two_arguments(device):
    def given(k):
        x = host(k, 4)
        return x, x

    agree(lambda x, y: x.to(device) + y.to(device) * 2, given)


def test_several_of_several_shapes(device):
    agree(
        lambda batch: batch["x"].to(device) @ batch["w"].to(device) + batch["b"][0].to(device),
        lambda k: ({"x": host(k, 3, 4), "w": host(k + 1, 4, 2), "b": [host(k + 2, 2)]},),
    )


def test_training_moves_its_batches(device):
    """As every tutorial writes it, the batches new tensors of the host's."""

    def train(wrap):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).to(device)
        opt = torch.optim.AdamW(model.parameters(), 1e-2)

        @wrap
        def step(x, y):
            x, y = x.to(device, non_blocking=True), y.to(device)
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            return loss

        losses = [step(host(k, 8, 6), host(k, 8, dtype=torch.int64) % 3).detach().clone() for k in range(12)]
        return losses, [p.detach().clone() for p in model.parameters()], step

    (want, theirs, _), (got, mine, step) = train(lambda f: f), train(cgt.jit)
    assert identical(got, want) and identical(mine, theirs)
    assert cgt.stats(step).replays >= 7, cgt.stats(step).reasons


def test_model_moves_its_input_and_gradients_flow(device):
    """Through the model's parameters, whose backward comes later."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3).to(device)
    f = cgt.jit(lambda x: model(x.to(device)).square().sum())
    for k in range(10):
        grads = []
        for call in (f, f.__wrapped__):
            model.zero_grad()
            call(host(k, 8, 6)).backward()
            grads.append([p.grad.clone() for p in model.parameters()])
        assert identical(*grads), k
    assert cgt.stats(f).replays >= 5, cgt.stats(f).reasons


def test_table_of_the_hosts_in_a_module(device):
    """Reached, not given: what is written there, or put there, is seen by the next call."""

    class Scheduler:
        table = host(0, 10)

    s = Scheduler()
    s.table = host(3, 10)
    f = cgt.jit(lambda x: x + s.table.to(device, copy=True))
    x = torch.ones(10, device=device)
    for k in range(14):
        if k % 4 == 1:
            s.table.add_(1)
        if k in (6, 9):
            s.table = host(k, 10)
        assert identical(f(x), x + s.table.to(device)), k
    assert cgt.stats(f).replays >= 3, cgt.stats(f).reasons


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_under_modes(device, mode):
    def given(k):
        with mode():
            return (host(k, 5),)

    with mode():
        agree(lambda x: x.to(device) * 2, given)


def test_other_shapes_are_other_recordings(device):
    f = agree(lambda x: x.to(device) + 1, lambda k: (host(k, 3 + k % 2),), n=16, least=8)
    assert cgt.stats(f).records <= 4


def test_two_functions_of_an_iteration(device):
    embed, head = cgt.jit(lambda x: x.to(device) * 2), cgt.jit(lambda h, y: (h - y.to(device)).square().sum())
    for k in range(10):
        cgt.step()
        x, y = host(k, 6), host(k + 5, 6)
        assert torch.equal(head(embed(x), y).cpu(), (x * 2 - y).square().sum()), k
    assert cgt.stats(head).replays >= 5, cgt.stats(head).reasons


@GPU
def test_what_the_host_computes_before_is_eager():
    f = cgt.jit(lambda x: (x * 2).to("cuda") + 1)
    for k in range(6):
        assert torch.equal(f(host(k, 4)).cpu(), host(k, 4) * 2 + 1)
    assert cgt.stats(f).replays == 0 and any("CGT219" in reason for reason in cgt.stats(f).reasons)


@GPU
def test_floats_that_become_integers_are_eager():
    """What no integer holds comes out otherwise on the GPU."""
    f = cgt.jit(lambda x: x.to("cuda", torch.int32))
    for _ in range(5):
        assert identical(f(torch.tensor([1e20, float("nan"), 2.0])), torch.tensor([1e20, float("nan"), 2.0]).to("cuda", torch.int32))
    assert cgt.stats(f).replays == 0


def test_parameters_that_are_brought_there_at_each_call(device):
    """As a model that is too large keeps its weights on the host."""
    layers = [nn.Linear(6, 6), nn.Linear(6, 6)]

    def function(x):
        for layer in layers:
            x = nn.functional.linear(x, layer.weight.to(device), layer.bias.to(device)).relu()
        return x

    f, x = cgt.jit(function), host(0, 3, 6).to(device)
    with torch.no_grad():
        for k in range(12):
            if k > 6:
                layers[k % 2].weight.mul_(0.5)
            assert identical(f(x), function(x)), k
    assert cgt.stats(f).replays >= 4, cgt.stats(f).reasons


def test_eager_part_that_writes_before_it_is_moved(device):
    """The copy in front of the graph would come too early."""

    def fill(x, k):
        x.fill_(k)

    part = cgt.eager(fill)

    def function(x, y):
        z = y * 2
        (part if type(x) is torch.Tensor else fill)(x, 3)
        return x.to(device) + z

    f, y = cgt.jit(function), torch.ones(4, device=device)
    for k in range(10):
        x = host(k, 4)
        assert torch.equal(f(x, y + k).cpu(), torch.full((4,), 3.0) + 2 * (1 + k)), k
        assert torch.equal(x, torch.full((4,), 3.0))


@GPU
def test_tensor_that_the_function_also_writes_is_right():
    def function(x):
        y = x.to("cuda")
        x.add_(1)
        return y * 2

    f, mine, theirs = cgt.jit(function), torch.zeros(3), torch.zeros(3)
    for _ in range(8):
        assert identical(f(mine), function(theirs)) and torch.equal(mine, theirs)


@GPU
@pytest.mark.parametrize("read", [lambda t: t.item(), lambda t: int(t[0]) if t.dim() else int(t), lambda t: 2 if t.sum() > 3 else 3])
def test_tensor_that_python_also_reads_is_right(read):
    def function(t):
        return t[None].to("cuda") * read(t)

    f = cgt.jit(function)
    for k in range(10):
        assert identical(f(torch.tensor(float(k))), function(torch.tensor(float(k)))), k


@GPU
@pytest.mark.parametrize(
    "function, replays",
    [
        (lambda x, t: x * t + t.to("cuda"), True),  # compared
        (lambda x, t: t.to("cuda") + x * t, True),
        (lambda x, t: x + t.to("cuda"), True),  # brought there
        (lambda x, t: x * t + t[None].to("cuda"), False),
        (lambda x, t: t[None].to("cuda") + x * t, False),
    ],
)
def test_number_that_is_also_moved(function, replays):
    """As a number of the host's it is compared, as a tensor it is brought there."""
    x, f = torch.ones(3, device="cuda"), cgt.jit(function)
    for k in range(15):
        t = torch.tensor(k // 5 / 2)
        assert identical(f(x, t), function(x, t)), k
    assert not replays or cgt.stats(f).replays >= 4, cgt.stats(f).reasons


@GPU
def test_number_that_is_moved_may_be_any():
    f = cgt.jit(lambda t: t.to("cuda") * 2)
    for k in range(12):
        assert f(torch.tensor(float(k))).item() == 2 * k
    assert cgt.stats(f).replays >= 8, cgt.stats(f).reasons


@GPU
def test_tensor_that_requires_grad_is_right():
    f = cgt.jit(lambda w: w.to("cuda").square().sum())
    for k in range(6):
        grads = []
        for call in (f, f.__wrapped__):
            w = host(k, 4).requires_grad_()
            call(w).backward()
            grads.append(w.grad)
        assert identical(*grads), k


@GPU
@tells("cpu_tensor")
def test_sentence_of_what_stays_on_the_host():
    f = cgt.jit(lambda x, t: x * t.exp().to("cuda"))
    for k in range(5):
        f(torch.ones(2, device="cuda"), host(k, 2))
    (reason,) = cgt.stats(f).reasons
    assert "aten.exp" in reason and "test_fed.py" in reason, reason
