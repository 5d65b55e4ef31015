"""Memory that holds the same bytes at each replay: what depends on it alone may be read in the middle of a call."""

import collections
import ctypes

import pytest
import torch
from helpers import counts, same

import cgt


def values(device, k=0):
    return torch.arange(4.0, device=device) + k


def positions(x):
    """As transformers looks whether sequences are packed."""
    at = torch.arange(x.shape[0], device=x.device)
    if (at.diff() == 1).all():
        return x * 2
    return x


def mask(x):
    seen = torch.ones(4, 4, device=x.device).tril().bool()
    return x * float(seen.sum()) + seen.any().item()


def where(x):
    at = (torch.arange(4, device=x.device) % 2).nonzero()
    return x[at[:, 0]] + 1


def built_in_place(x):
    z = torch.zeros(4, device=x.device)
    z[1:3] = 2.0
    z.add_(1)
    n = int(z.sum())
    z += x
    return z * n


def read_between(x):
    z = torch.arange(4.0, device=x.device)
    y = z * 2
    a = z.sum().item()
    z.mul_(3)
    b = y.sum().item()
    return x * a + b + z.sum().item()


def written_after(x):
    at = torch.arange(4, device=x.device).nonzero()
    total = at.sum().item()
    at += x.long()[:3, None]
    return at, total


def literal(x):
    t = torch.tensor([1.0, 2.0, 3.0, 4.0]).to(x.device)
    return x * t + t[1].item()


def moved(x):
    return x + torch.linspace(0, 1, 4).to(x.device)


def told(x):
    return x * torch.tensor([2.0, 3.0]).to(x.device).tolist()[1]


def unique(x):
    ids, n = torch.unique(torch.tensor([3, 1, 3]).to(x.device), return_counts=True)
    return x * int(ids[-1]) + n.sum()


def made_there(x):
    """On the GPU Python's numbers come by a copy of the host's memory."""
    t = torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)
    return torch.where(x > 2, torch.tensor(0.5, device=x.device), x * t) + t[1].item()


def made_there_otherwise(x):
    return x * x.new_tensor([2, 3, 4, 5]) + torch.as_tensor([0.25], dtype=torch.float64, device=x.device)


def written_where_it_was_made(x):
    total = torch.tensor([0.0], device=x.device)
    total += x.sum()
    return total * 2


@torch.jit.script
def scripted(x, n: int):
    return x / torch.log(torch.tensor((n - 1) / 3)) + torch.tensor(n).type_as(x)


def numbers_of_torchscript(x):
    return scripted(x, 7) * x.shape[0]


FUNCTIONS = [
    positions, mask, where, built_in_place, read_between, written_after, literal, moved, told, unique,
    made_there, made_there_otherwise, written_where_it_was_made, numbers_of_torchscript,
]  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_what_depends_on_constants_alone_is_read_while_recording(device, function):
    f = cgt.jit(function)
    x = values(device)
    for k in range(6):
        x.add_(k)
        got, want = f(x), function(x)
        assert same(got, want)
    assert counts(f) == (1, 1, 4, 0), list(cgt.stats(f).reasons)


def test_a_result_that_is_constant_belongs_to_its_caller(device):
    """Whoever gets it may write it: the next call makes it anew."""
    function = lambda x: (torch.arange(4, device=x.device).nonzero(), x + 1)  # noqa: E731
    f, x = cgt.jit(function), values(device)
    for _ in range(5):
        at, y = f(x)
        assert same((at, y), function(x))
        at.zero_()
    assert counts(f)[2] == 3


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * float((x.new_zeros(4) + x).sum()),
        lambda x: x * float(torch.zeros_like(x).copy_(x).sum()),
        lambda x: x * float(torch.rand(4, device=x.device).sum()),
        lambda x: x * float(torch.zeros(4, device=x.device).bernoulli_().sum()),
        lambda x: x * float(torch.where(x > 0, 1.0, 0.0).sum()),
    ],
)  # fmt: skip
def test_what_depends_on_more_is_not(device, function):
    f, x = cgt.jit(function), values(device)
    for k in range(5):
        x.add_(k)
        torch.manual_seed(k)
        want = function(x)
        torch.manual_seed(k)
        assert same(f(x), want)
    assert cgt.stats(f).replays == 0 and any("a Python value" in reason for reason in cgt.stats(f).reasons)


def test_a_number_that_changes_makes_another_constant(device):
    f = cgt.jit(lambda x, n: x * torch.full((4,), n, device=x.device).sum().item())
    x = values(device)
    for n in (1.0, 1.0, 1.0, 2.0, 2.0, 1.0):
        assert same(f(x, n), x * (4 * n))
    assert cgt.stats(f).eager <= 1 and cgt.stats(f).records <= 3 and cgt.stats(f).replays >= 1  # it cannot be live: it is read


def test_a_constant_that_nobody_holds_costs_no_memory(device):
    """While it is warmed: a recording owns what its replays need."""
    sizes = []

    def function(x):
        for _ in range(8):
            x = x + torch.full((1 << 20,), 0.5, device=x.device).mean()
            sizes.append(allocated(device))
        return x

    cgt.jit(function)(values(device))
    assert sizes[-1] - sizes[2] < 8 << 20  # of 20 MiB


def allocated(device):
    """Bytes that are in use: torch's on the GPU, of the C library on the host."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated()
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    info = type("mallinfo2", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in names]})
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = info
    told = ask()
    return told.uordblks + told.hblkhd


def test_numbers_of_tensors_are_no_constants(device):
    function = lambda x: x * torch.tensor([x.sum(), 2.0]).to(x.device)[0]  # noqa: E731
    f, x = cgt.jit(function), values(device)
    for k in range(5):
        x.add_(k)
        assert same(f(x), function(x))
    assert cgt.stats(f).replays == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="says something about GPUs")
@pytest.mark.parametrize("draw", [lambda: torch.rand(()), lambda: torch.rand(4).to("cuda"), lambda: torch.randperm(4).sum()])
def test_random_numbers_of_the_host_are_no_constants(draw):
    function, x = lambda x: x * draw(), values("cuda")
    f = cgt.jit(function)
    for k in range(5):
        torch.manual_seed(k)
        want = function(x)
        torch.manual_seed(k)
        assert same(f(x), want)
    assert cgt.stats(f).replays == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="says something about GPUs")
def test_a_number_of_the_host_that_nothing_guards_is_not_read():
    box = collections.deque([torch.tensor(2.0)])
    function, x = lambda x: x * (box[0] + 1).item(), values("cuda")
    f = cgt.jit(function)
    for k in range(5):
        box[0].fill_(k)
        assert same(f(x), function(x))
    assert cgt.stats(f).replays == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="says something about GPUs")
def test_a_number_of_the_host_that_is_an_argument_is_guarded():
    function, x = lambda x, n: x * (n + 1).item(), values("cuda")
    f = cgt.jit(function)
    for n in (2.0, 2.0, 2.0, 3.0, 3.0, 2.0):
        n = torch.tensor(n)
        assert same(f(x, n), function(x, n))
    assert cgt.stats(f).replays == 3 and cgt.stats(f).eager == 0


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        return x * torch.log(self.scale) + torch.floor(self.scale).type_as(x)


@pytest.mark.parametrize("inference", [False, True])
def test_a_number_that_a_script_holds_is_no_temporary(device, inference):
    model = torch.jit.script(Scaled())  # its buffer stays on the host
    f, x = cgt.jit(lambda x: model(x)), values(device)
    with torch.inference_mode(inference):
        for k in range(8):
            if k % 4 == 3:
                model.scale = torch.tensor(float(k))
            model.scale.add_(1)
            assert same(f(x), model(x)), k


def test_empty_tensor_is_made_in_the_call(device):
    """As caches of decoders begin; there is nothing to be copied to the GPU."""
    f = cgt.jit(lambda x: torch.cat([torch.tensor([], device=device, dtype=x.dtype), x * 2]))
    for k in range(5):
        x = torch.arange(4.0, device=device) + k
        assert torch.equal(f(x), x * 2)
    assert cgt.stats(f).replays >= 2 and cgt.stats(f).eager == 0, cgt.explain(f)
