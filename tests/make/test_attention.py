"""Attention with dropout keeps its random numbers for the backward, on the device in a capture and on the host elsewhere:
a graph that was captured runs rightly wherever its backward comes to run, and never reads a device's words on the host."""

import threading

import torch  # before the core, whose libraries are torch's

# isort: split
import pytest
import torch.nn.functional as F
from helpers import AUDITS_BY_DEFAULT, plain, same
from torch.nn.attention import SDPBackend, sdpa_kernel

import cgt
from cgt.decide import sites
from cgt.words import options

KERNELS = {
    "flash": (SDPBackend.FLASH_ATTENTION, torch.bfloat16),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, torch.float32),
    "cudnn": (SDPBackend.CUDNN_ATTENTION, torch.bfloat16),
    "math": (SDPBackend.MATH, torch.float32),
}


class Block(torch.nn.Module):
    """A block of an encoder."""

    def __init__(self, kernel, device, width=64, heads=2):
        super().__init__()
        self.kernel, self.heads = kernel if device.type == "cuda" else "math", heads
        dtype = KERNELS[self.kernel][1]
        self.qkv = torch.nn.Linear(width, 3 * width, device=device, dtype=dtype)
        self.out = torch.nn.Linear(width, width, device=device, dtype=dtype)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        with sdpa_kernel(KERNELS[self.kernel][0]):
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
        return self.out(y.transpose(1, 2).flatten(-2)) + x


def make(kernel, device):
    torch.manual_seed(3)
    block = Block(kernel, device)
    return block, lambda k: torch.full((2, 16, 64), 0.1 * k, device=device, dtype=block.out.weight.dtype)


def gradients(block, call, batch, k, retain=False):
    """The result and all gradients of one call, random numbers seeded by k."""
    block.zero_grad(set_to_none=True)
    torch.manual_seed(100 + k)
    y = call(batch)
    y.float().pow(2).sum().backward(retain_graph=retain)
    return [y.detach().clone(), *(p.grad.clone() for p in block.parameters())]


def assert_same(have, want, kernel):
    for a, b in zip(have, want, strict=True):
        if kernel in ("flash", "efficient", "cudnn"):  # their backwards add with atomics
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
        else:
            assert torch.equal(a, b)


@pytest.fixture(params=list(KERNELS))
def kernel(request, device):
    if device.type == "cpu" and request.param != "math":
        pytest.skip("a kernel of the GPU's")
    return request.param


@pytest.mark.parametrize("audited", [False, True])
def test_training_replays(device, kernel, audited, monkeypatch):
    monkeypatch.setattr(options, "AUDIT", AUDITS_BY_DEFAULT if audited else "0")
    block, batch = make(kernel, device)
    f = cgt.jit(block)
    for k in range(12):
        want = gradients(block, plain(block), batch(k), k)
        assert_same(gradients(block, f, batch(k), k), want, kernel)
    s = cgt.stats(f)
    assert s.replays >= 3 and s.backward.replays >= 2 and not s.reasons, cgt.explain(f)


def test_recording_that_is_thrown_away(device, kernel):
    """Code that runs for the first time abandons the recording."""
    block, batch = make(kernel, device)
    f = cgt.jit(block)
    for k in range(6):
        if k == 3:
            block.register_forward_hook(lambda module, given, out: out * 2)
        want = gradients(block, plain(block), batch(k), k)
        assert_same(gradients(block, f, batch(k), k), want, kernel)


def test_backward_while_another_thread_records(device, kernel):
    block, batch = make(kernel, device)
    f = cgt.jit(block)
    want = [gradients(block, plain(block), batch(k), k) for k in range(4)]
    for k in range(3):
        gradients(block, f, batch(k), k)
    block.zero_grad(set_to_none=True)
    torch.manual_seed(103)
    y = f(batch(3))  # replays
    held, done = threading.Event(), threading.Event()

    def hold():
        with sites.RECORDING:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    try:
        y.float().pow(2).sum().backward()
    finally:
        done.set()
        thread.join()
    assert_same([y.detach(), *(p.grad for p in block.parameters())], want[3], kernel)


def test_backward_past_the_limit_of_recordings(device, kernel):
    block, batch = make(kernel, device)
    f = cgt.jit(block, max_records=1)
    for k in range(8):
        x = batch(k)[:, : 8 + 4 * (k % 2)]
        want = gradients(block, plain(block), x, k)
        assert_same(gradients(block, f, x, k, retain=k % 3 == 0), want, kernel)
    assert cgt.stats(f).eager + cgt.stats(f).backward.eager > 0


def test_backward_inside_another_functions_warm_up(device, kernel):
    block, batch = make(kernel, device)
    f, back = cgt.jit(block), cgt.jit(lambda y: y.float().pow(2).sum().backward())
    for k in range(6):
        want = gradients(block, plain(block), batch(k), k)
        block.zero_grad(set_to_none=True)
        torch.manual_seed(100 + k)
        y = f(batch(k))
        (back if k >= 3 else back.__wrapped__)(y)
        assert_same([y.detach(), *(p.grad for p in block.parameters())], want, kernel)


def test_two_pending_and_out_of_order(device, kernel):
    block, batch = make(kernel, device)
    f = cgt.jit(block)
    for k in range(6):
        grads = []
        for call in (plain(block), f):
            block.zero_grad(set_to_none=True)
            torch.manual_seed(k)
            first, second = call(batch(k)), call(batch(k + 1))
            first.float().sum().backward()
            second.float().pow(2).sum().backward()
            grads.append([p.grad.clone() for p in block.parameters()])
        assert_same(grads[1], grads[0], kernel)
    assert cgt.stats(f).replays > 0


@torch.library.custom_op("cgt_tests::told_apart", mutates_args=())
def told_apart(query: torch.Tensor, key: torch.Tensor, values: list[torch.Tensor]) -> torch.Tensor:
    """As PyTorch's own does, which takes other kernels then."""
    return query * 2 + (1 if query is key and values[0] is key else 0)


@pytest.mark.parametrize("inputs", ["auto", "fixed"])
def test_what_is_one_argument_of_an_op_stays_one(device, inputs):
    """Query, key and value are one tensor: where the function's input moves, and where it does not."""
    attend = torch.nn.MultiheadAttention(64, 4, batch_first=True, device=device).eval()

    def function(x):
        return attend(x, x, x, need_weights=False)[0], told_apart(x, x, [x])

    f = cgt.jit(function, inputs=inputs)
    kept = [torch.randn(1, 64, 64, generator=torch.Generator().manual_seed(k)).to(device) for k in range(20 if inputs == "auto" else 1)]
    with torch.no_grad():
        for x in kept * (20 // len(kept)):
            assert all(map(same, f(x), function(x)))
    assert cgt.stats(f).replays >= 15, cgt.explain(f)
