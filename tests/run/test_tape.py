"""The tape of the host driver: any ATen op, replayed on changed values, gives eager's bits.

These tests run on the CPU only: the tape is what the host driver replays; a CUDA graph has none.
"""

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers import identical

import cgt
from cgt.run import tape

aten = torch.ops.aten


# --- inputs: a row of the table names makers, each call makes new values ------------------------


def fl(*shape, dtype=torch.float32):
    """Normal floats."""
    return lambda: torch.randn(shape).to(dtype)


def pos(*shape):
    """Floats above zero."""
    return lambda: torch.rand(shape) + 0.1


def it(*shape, below=3, dtype=torch.int64):
    """Integers from zero."""
    return lambda: torch.randint(below, shape, dtype=dtype)


def bl(*shape):
    """Booleans."""
    return lambda: torch.rand(shape) < 0.5


def cx(*shape, dtype=torch.complex64):
    """Complex numbers."""
    return lambda: torch.randn(shape, dtype=dtype)


def perm(n):
    """A permutation."""
    return lambda: torch.randperm(n)


def bits(t):
    """Comparable bytes: nan equals itself, -0.0 is not 0.0."""
    t = t.detach().resolve_conj().resolve_neg().contiguous()
    return t.reshape(-1).view(torch.uint8) if t.numel() else t.reshape(-1)


def same(got, want):
    """The same structure, metadata and bits."""
    assert type(got) is type(want)
    if isinstance(want, torch.Tensor):
        assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
        assert torch.equal(bits(got), bits(want)), (got, want)
    elif isinstance(want, (tuple, list)):
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            same(g, w)
    else:
        assert got == want


def agrees(function, makers, moving=False, calls=5, seed=7):
    """Call a jitted function `calls` times beside eager, on tensors with new values each time:
    the same tensors, or (`moving`) others at other addresses."""
    jitted = cgt.jit(function)
    inputs, kept = [make() for make in makers], []
    for k in range(calls):
        if moving:
            kept.append(inputs)  # an address in use is not given out again
            inputs = [make() for make in makers]
        for t, make in zip(inputs, makers, strict=True):
            t.copy_(make())
        twins = [t.clone() for t in inputs]
        torch.manual_seed(seed + k)
        want = function(*twins)
        after = torch.get_rng_state()
        torch.manual_seed(seed + k)
        got = jitted(*inputs)
        same(got, want)
        same(inputs, twins)
        assert torch.equal(torch.get_rng_state(), after), "the generator is where eager leaves it"
        del got
    return jitted


def foreach_update(a, b):
    torch._foreach_mul_([a, b], 0.5)
    torch._foreach_add_([a, b], [b.clone(), a.clone()], alpha=2)
    return torch._foreach_norm([a, b])


def inplace_mix(a, b):
    a.add_(b, alpha=2).clamp_(-1, 1).mul_(b).masked_fill_(a > 0.5, 3.0)
    a[0].zero_()
    a[:, 1] = b[:, 0]
    return a.sum()


def adamw(p, grad, avg, square, step):
    torch._fused_adamw_(
        [p], [grad], [avg], [square], [], [step], lr=1e-2, beta1=0.9, beta2=0.99,
        weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False, grad_scale=None,
        found_inf=None,
    )  # fmt: skip
    return p * 1


X, Y, V, M = fl(3, 4), fl(3, 4), fl(4), fl(4, 5)
IMG = fl(2, 3, 8, 8)

POINTWISE = {
    "add": (lambda a, b: a + b, X, V),
    "add with alpha": (lambda a, b: torch.add(a, b, alpha=3), X, Y),
    "number on the left": (lambda a: 2.5 - a, X),
    "integer number": (lambda a: a * 3, X),
    "bool number": (lambda a: a * True, X),
    "complex number": (lambda a: a * (1 + 2j), X),
    "big integer number": (lambda a: a + 2**40, it(3)),
    "division with rounding mode": (lambda a, b: torch.div(a, b, rounding_mode="floor"), X, Y),
    "floor divide and remainder": (lambda a, b: (a // b, a % b), X, Y),
    "pow": (lambda a: (a**2, a.abs() ** 0.5, 2**a), X),
    "unary chain": (lambda a: a.exp().log1p().sqrt().sin().tanh().sigmoid(), X),
    "nan and infinities": (lambda a: (a.log(), a / 0, (-a.abs()).sqrt()), X),
    "signed zeros": (lambda a: (a * 0, -(a * 0)), X),
    "rounding": (lambda a: (a.round(decimals=1), a.floor(), a.trunc(), a.frac()), X),
    "clamp with None": (lambda a: (a.clamp(min=0.1), a.clamp(max=0.1), a.clamp(-1, 1)), X),
    "clamp by tensors": (lambda a, b: a.clamp(b, None), X, V),
    "comparisons": (lambda a, b: (a < b, a == b, a.ge(0), a.isnan(), a.isclose(b)), X, Y),
    "where": (lambda c, a, b: (torch.where(c, a, b), torch.where(c, a, 0.0)), bl(3, 4), X, Y),
    "lerp and addcmul": (lambda a, b: (a.lerp(b, 0.3), a.addcmul(a, b, value=2)), X, Y),
    "atan2 and hypot": (lambda a, b: (a.atan2(b), a.hypot(b), a.copysign(b)), X, Y),
    "nan_to_num": (lambda a: a.log().nan_to_num(0.0, 1.0, None), X),
    "frexp and ldexp": (lambda a: (*torch.frexp(a), a.ldexp(torch.tensor(2))), X),
    "type promotion": (lambda a, b: a + b, it(3, 4, dtype=torch.int32), X),
    "to dtype": (lambda a: (a.half(), a.bfloat16(), a.double(), a.int(), a.bool()), X),
    "to dtype and format": (lambda a: a.to(torch.float64, memory_format=torch.channels_last), IMG),
    "bitwise": (lambda a, b: (a & b, a | b, a ^ b, ~a, a << 2, a >> 1), it(5), it(5)),
    "logical": (lambda a, b: (a & b, a.logical_xor(b), ~a, a.all(), a.any(0)), bl(3, 4), bl(3, 4)),
    "integer division": (lambda a: (a // 2, a % 2, torch.gcd(a, a + 2)), it(5, below=9)),
    "uint8 wraps": (lambda a: (a + 250, a - 3), it(5, dtype=torch.uint8)),
    "int8 and int16": (
        lambda a, b: (a * 100, b * 2000),
        it(5, dtype=torch.int8),
        it(5, dtype=torch.int16),
    ),
    "float64": (lambda a: a.exp() / 3, fl(3, 4, dtype=torch.float64)),
    "bfloat16": (lambda a: (a * 1.1).softmax(-1), fl(3, 4, dtype=torch.bfloat16)),
    "half": (lambda a: a * 1.1 + 2, fl(3, 4, dtype=torch.float16)),
    "complex": (lambda a, b: (a * b, a.abs(), a.angle(), a.real + a.imag), cx(3), cx(3)),
    "conjugate used inside": (lambda a, b: (a.conj() * b, a.conj() @ b), cx(3), cx(3)),
    "complex128": (lambda a: a.exp(), cx(3, dtype=torch.complex128)),
    "view as real": (lambda a: torch.view_as_real(a) * 2, cx(3)),
    "view as complex": (lambda a: torch.view_as_complex(a) * 2, fl(3, 2)),
    "polar": (lambda a, b: torch.polar(a, b), pos(3), fl(3)),
    "activations": (
        lambda a: (a.relu(), F.gelu(a), F.gelu(a, approximate="tanh"), F.silu(a), F.elu(a)),
        X,
    ),
    "more activations": (
        lambda a: (F.hardswish(a), F.leaky_relu(a, 0.2), F.softplus(a), F.mish(a), F.relu6(a)),
        X,
    ),
    "glu": (lambda a: F.glu(a, dim=-1), X),
    "special": (lambda a: (a.erf(), a.lgamma(), a.digamma(), torch.special.i0(a)), pos(4)),
}

REDUCTIONS = {
    "sum": (lambda a: (a.sum(), a.sum(0), a.sum((0, 1)), a.sum(-1, keepdim=True)), X),
    "sum to dtype": (lambda a: a.sum(dtype=torch.float64), X),
    "mean, var, std": (lambda a: (a.mean(0), a.var(1), a.std(unbiased=False)), X),
    "var_mean": (lambda a: torch.var_mean(a, dim=1, correction=0), X),
    "max and min": (lambda a: (a.max(), a.min(), a.amax(1), a.aminmax(dim=0)[0]), X),
    "max with indices": (lambda a: tuple(a.max(1)), X),
    "argmax": (lambda a: (a.argmax(), a.argmin(0)), X),
    "prod, all, any": (lambda a: (a.prod(), a.prod(1), (a > 0).all(1)), X),
    "cumsum": (lambda a: (a.cumsum(0), a.cumprod(1), tuple(a.cummax(0))), X),
    "logsumexp": (lambda a: (a.logsumexp(0), a.logcumsumexp(1)), X),
    "softmax": (lambda a: (a.softmax(-1), a.log_softmax(0), a.softmax(0, torch.float64)), X),
    "norms of vectors": (lambda a: (a.norm(), a.norm(1, 0), torch.linalg.vector_norm(a, 3)), X),
    "sort": (lambda a: tuple(a.sort(dim=0, descending=True)), X),
    "stable sort": (lambda a: tuple(a.sort(stable=True)), it(9)),
    "argsort": (lambda a: a.argsort(), V),
    "topk": (lambda a: tuple(a.topk(2, dim=-1, largest=False)), X),
    "kthvalue, median, mode": (lambda a: (*a.kthvalue(2), *a.median(0), *a.mode(0)), X),
    "nanmedian": (lambda a: tuple(a.log().nanmedian(0)), X),
    "histc": (lambda a: a.histc(4, -1, 1), X),
    "searchsorted": (lambda a, b: torch.searchsorted(a.sort().values, b), V, V),
    "bucketize": (lambda a: torch.bucketize(a, torch.tensor([-1.0, 0.0, 1.0])), X),
    "diff and trace": (lambda a: (a.diff(dim=0), a[:, :3].trace()), X),
    "count_nonzero": (lambda a: a.count_nonzero(0), bl(3, 4)),
    "cross and cdist": (lambda a: (torch.cross(a, a.flip(0), dim=1), torch.cdist(a, a)), fl(4, 3)),
}

PRODUCTS = {
    "mm": (lambda a, b: a @ b, X, M),
    "matrix by vector": (lambda a, b: (a @ b, b @ b, a.mv(b)), X, V),
    "batched": (lambda a, b: (a @ b, torch.bmm(a, b)), fl(2, 3, 4), fl(2, 4, 5)),
    "broadcast product": (lambda a, b: a @ b, fl(2, 3, 4), fl(4, 5)),
    "addmm": (lambda a, b, c: torch.addmm(a, b, c, beta=0.5, alpha=2), fl(3, 5), X, M),
    "baddbmm": (lambda a, b, c: torch.baddbmm(a, b, c), fl(2, 3, 5), fl(2, 3, 4), fl(2, 4, 5)),
    "outer and ger": (lambda a, b: (torch.outer(a, b), torch.kron(a, b)), V, V),
    "einsum": (lambda a, b: torch.einsum("ij,jk->ki", a, b), X, M),
    "tensordot": (lambda a, b: torch.tensordot(a, b, dims=1), X, M),
    "linear": (lambda x, w, b: F.linear(x, w, b), X, fl(5, 4), fl(5)),
    "linear, 3 dims": (lambda x, w: F.linear(x, w), fl(2, 3, 4), fl(5, 4)),
    "bilinear": (lambda x, y, w: F.bilinear(x, y, w), fl(2, 3), fl(2, 4), fl(5, 3, 4)),
    "integer product": (lambda a, b: a @ b, it(3, 4), it(4, 2)),
    "cholesky": (lambda a: torch.linalg.cholesky(a @ a.mT + torch.eye(3)), fl(3, 3)),
    "solve": (lambda a, b: torch.linalg.solve(a + 4 * torch.eye(3), b), fl(3, 3), fl(3, 2)),
    "inverse and det": (lambda a: (torch.linalg.inv(a), torch.linalg.det(a)), fl(3, 3)),
    "qr": (lambda a: tuple(torch.linalg.qr(a)), fl(4, 3)),
    "triangular": (lambda a: (a.tril(), a.triu(1), a.diagonal(), torch.diag(a[0])), fl(4, 4)),
    "matrix_power": (lambda a: torch.linalg.matrix_power(a, 3), fl(3, 3)),
    "fft": (lambda a: (torch.fft.rfft(a), torch.fft.fft2(a), torch.fft.ifft(a)), X),
    "inverse real fft": (lambda a: torch.fft.irfft(torch.fft.rfft(a), n=4), X),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        fl(1, 2, 4, 8),
        fl(1, 2, 4, 8),
        fl(1, 2, 4, 8),
    ),
    "attention with a mask": (
        lambda q, m: F.scaled_dot_product_attention(q, q, q, attn_mask=m),
        fl(1, 2, 4, 8),
        bl(4, 4),
    ),
}

LAYERS = {
    "conv1d": (lambda x, w: F.conv1d(x, w, padding=1), fl(2, 3, 8), fl(4, 3, 3)),
    "conv2d": (
        lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1),
        IMG,
        fl(4, 3, 3, 3),
        fl(4),
    ),
    "conv2d, padding by name": (lambda x, w: F.conv2d(x, w, padding="same"), IMG, fl(4, 3, 3, 3)),
    "grouped, dilated conv2d": (
        lambda x, w: F.conv2d(x, w, groups=3, dilation=2),
        IMG,
        fl(3, 1, 3, 3),
    ),
    "conv3d": (lambda x, w: F.conv3d(x, w), fl(1, 2, 4, 4, 4), fl(3, 2, 2, 2, 2)),
    "transposed conv": (lambda x, w: F.conv_transpose2d(x, w, stride=2), IMG, fl(3, 2, 2, 2)),
    "channels_last conv": (
        lambda x, w: F.conv2d(x.contiguous(memory_format=torch.channels_last), w),
        IMG,
        fl(4, 3, 3, 3),
    ),
    "pools": (lambda x: (F.avg_pool2d(x, 2), F.adaptive_avg_pool2d(x, 3)), IMG),
    "max pool": (lambda x: F.max_pool2d(x, 2, return_indices=True), IMG),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), X, V, V),
    "group_norm": (lambda x: F.group_norm(x, 3), IMG),
    "rms_norm": (lambda x, w: F.rms_norm(x, (4,), w), X, V),
    "batch_norm in training": (
        lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b, training=True),
        IMG,
        fl(3),
        pos(3),
        fl(3),
        fl(3),
    ),
    "batch_norm in evaluation": (lambda x, m, v: F.batch_norm(x, m, v), IMG, fl(3), pos(3)),
    "instance_norm": (lambda x: F.instance_norm(x), IMG),
    "normalize": (lambda x: F.normalize(x, dim=1), X),
    "embedding": (lambda i, w: F.embedding(i, w, padding_idx=0), it(2, 3), fl(3, 4)),
    "embedding_bag": (lambda i, w: F.embedding_bag(i, w, mode="sum"), it(2, 3), fl(3, 4)),
    "interpolate nearest": (lambda x: F.interpolate(x, scale_factor=2.0), IMG),
    "interpolate to size": (
        lambda x: F.interpolate(x, size=(5, 7), mode="bilinear", align_corners=False),
        IMG,
    ),
    "interpolate bicubic": (
        lambda x: F.interpolate(x, size=4, mode="bicubic", antialias=True),
        IMG,
    ),
    "grid_sample": (
        lambda x, g: F.grid_sample(x, g, align_corners=False),
        IMG,
        fl(2, 4, 4, 2),
    ),
    "pad": (
        lambda x: (F.pad(x, (1, 2), value=3.0), F.pad(x, (1, 1, 1, 1), mode="reflect")),
        IMG,
    ),
    "unfold and fold": (lambda x: F.fold(F.unfold(x, 2), (8, 8), 2), IMG),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), fl(1, 4, 3, 3)),
    "one_hot with classes": (lambda i: torch.zeros(4, 3).scatter(1, i[:, None], 1.0), it(4)),
    "cross_entropy": (lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), X, it(3)),
    "mse and huber": (lambda a, b: (F.mse_loss(a, b), F.huber_loss(a, b, delta=0.5)), X, Y),
    "binary cross entropy": (
        lambda a, b: F.binary_cross_entropy_with_logits(a, b.sigmoid()),
        X,
        Y,
    ),
    "nll without reduction": (
        lambda x, t: F.nll_loss(x.log_softmax(1), t, reduction="none"),
        X,
        it(3),
    ),
    "kl_div": (lambda a, b: F.kl_div(a, b.softmax(1), reduction="batchmean"), X, Y),
    "cosine_similarity": (lambda a, b: F.cosine_similarity(a, b), X, Y),
    "lstm cell": (
        lambda x, h, w, u: torch.lstm_cell(x, (h, h * 2), w, u),
        fl(2, 3),
        fl(2, 4),
        fl(16, 3),
        fl(16, 4),
    ),
    "gru": (
        lambda x, h, w, u: torch.gru(x, h, [w, u], False, 1, 0.0, False, False, True),
        fl(2, 5, 3),
        fl(1, 2, 4),
        fl(12, 3),
        fl(12, 4),
    ),
}

SHAPES = {
    "views copied": (lambda a: (a.t().contiguous(), a.view(2, 6) + 1, a.flatten() * 2), X),
    "clone keeps strides": (lambda a: a.t().clone(), X),
    "clone to a format": (lambda a: a.clone(memory_format=torch.contiguous_format), X),
    "cat": (lambda a, b: (torch.cat([a, b]), torch.cat((a, b), dim=1)), X, Y),
    "cat of nothing": (lambda a: torch.cat([a[:0], a]), X),
    "stack": (lambda a, b: (torch.stack([a, b]), torch.stack([a, b], -1)), X, Y),
    "hstack, dstack": (lambda a, b: (torch.hstack([a, b]), torch.dstack([a, b])), X, Y),
    "chunk and split": (lambda a: tuple(t * 1 for t in (*a.chunk(2), *a.split([1, 3], 1))), X),
    "unbind": (lambda a: [t + 1 for t in a.unbind(1)], X),
    "expand": (lambda a: a.expand(2, 3, 4) + 1, X),
    "repeat": (lambda a: (a.repeat(2, 1), a.tile(2), a.repeat_interleave(2, dim=0)), X),
    "flip and roll": (lambda a: (a.flip(0), a.roll(1, 1), a.rot90()), X),
    "slices": (lambda a: (a[1:, ::2] * 2, a[..., -1] * 2, a[None] * 2), X),
    "permute, movedim": (lambda a: (a.permute(2, 0, 3, 1) * 2, a.movedim(0, -1) + 1), IMG),
    "as_strided": (lambda a: a.as_strided((2, 2), (1, 2), 1) * 2, X),
    "unfold": (lambda a: a.unfold(1, 2, 1) * 2, X),
    "meshgrid": (lambda a, b: [t * 1 for t in torch.meshgrid(a, b, indexing="ij")], V, V),
    "block_diag": (lambda a, b: torch.block_diag(a, b), X, Y),
    "empty tensors": (lambda a: (a[:0] * 2, a[:0].sum(), torch.zeros(0)), X),
    "0-dim": (lambda a: (a * 2, a.sum(), a.expand(3) * 1), fl()),
    "view of another dtype": (lambda a: a.view(torch.int32) + 1, X),
    "diagonal written": (lambda a: torch.zeros(4, 4).diagonal().copy_(a).clone(), V),
}

INDEXING = {
    "index": (lambda a, i: (a[i], a[i, i], a[:, i]), X, it(3)),
    "index with None": (lambda a, i: a[:, None, i], X, it(2)),
    "index_select": (lambda a, i: a.index_select(1, i), X, it(3)),
    "gather": (lambda a, i: a.gather(1, i), X, it(3, 2)),
    "take": (lambda a, i: (a.take(i), a.take_along_dim(i[:, None], 1)), X, it(3)),
    "scatter": (lambda a, i, b: a.scatter(1, i, b), X, it(3, 4), Y),
    "scatter a number": (lambda a, i: a.scatter(1, i, 9.0), X, it(3, 1)),
    "scatter_add": (lambda a, i, b: a.scatter_add(0, i, b), X, it(3, 4), Y),
    "scatter_reduce": (
        lambda a, i, b: a.scatter_reduce(0, i, b, reduce="amax", include_self=False),
        X,
        it(3, 4),
        Y,
    ),
    "index_add": (lambda a, i, b: a.index_add(0, i, b, alpha=2), X, it(3), Y),
    "index_copy": (lambda a, i, b: a.index_copy(0, i, b), X, perm(3), Y),
    "index_fill": (lambda a, i: a.index_fill(0, i, 4.0), X, it(2)),
    "index_put": (lambda a, i, b: a.index_put((i,), b, accumulate=True), X, it(3), Y),
    "setitem by index": (lambda a, i: torch.zeros(3, 4).index_put_((i,), a), X, perm(3)),
    "masked_fill": (lambda a, m: a.masked_fill(m, -1.0), X, bl(3, 4)),
    "masked_scatter": (lambda a, m, b: a.masked_scatter(m, b), X, bl(3, 4), Y),
    "bincount through scatter": (lambda i: torch.zeros(3).scatter_add_(0, i, i * 1.0), it(9)),
    "tril_indices": (lambda a: a[tuple(torch.tril_indices(3, 3))], X),
}

FACTORIES = {
    "zeros, ones, full": (lambda a: (a + torch.zeros(4), torch.ones(2, 2), torch.full((2,), 7)), X),
    "arange, linspace": (lambda a: (a + torch.arange(4), torch.linspace(0, 1, 5)), X),
    "arange of a dtype": (lambda a: torch.arange(1, 9, 2, dtype=torch.float64) + a.sum(), X),
    "eye and full_like": (lambda a: (torch.eye(3) @ a, torch.full_like(a, 2.0)), X),
    "like, another dtype": (lambda a: torch.zeros_like(a, dtype=torch.int8, device="cpu"), X),
    "new_": (lambda a: (a.new_zeros(2), a.new_ones((2, 2)), a.new_full((2,), 3.0)), X),
    "like, a format": (lambda a: torch.ones_like(a, memory_format=torch.channels_last), IMG),
    "empty, then filled": (lambda a: torch.empty_like(a).copy_(a), X),
    "empty_strided, then filled": (lambda a: torch.empty_strided((3, 4), (1, 3)).copy_(a), X),
    "constants": (lambda a: a + torch.tensor([1.0, 2.0, 3.0, 4.0]), X),
    "constant written": (lambda a: torch.tensor([1.0, 2.0, 3.0, 4.0]).add_(a), V),
    "scalar_tensor": (lambda a: a * torch.scalar_tensor(3.0), X),
    "a number of 64 bits": (lambda a: (a + 1, torch.full((2,), 2**63 + 1, dtype=torch.uint64)), X),
    "rand": (lambda a: a + torch.rand(3, 4), X),
    "randn_like, randint, randperm": (
        lambda a: (torch.randn_like(a), torch.randint(9, (5,)), torch.randperm(6)),
        X,
    ),
    "dropout": (lambda a: F.dropout(a, 0.5, training=True), X),
    "in-place noise": (lambda a: (a.clone().normal_(), a.clone().uniform_(1, 2)), X),
    "bernoulli, multinomial": (lambda a: (a.sigmoid().bernoulli(), a.multinomial(2, True)), pos(4)),
    "exponential, cauchy": (lambda a: (a.clone().exponential_(2.0), a.clone().cauchy_()), X),
    "rrelu": (lambda a: F.rrelu(a, training=True), X),
}

WRITES = {
    "several in place": (inplace_mix, X, Y),
    "foreach": (foreach_update, X, Y),
    "foreach with results": (lambda a, b: torch._foreach_add([a, b], 1.5), X, V),
    "foreach of numbers": (lambda a, b: torch._foreach_mul([a, b], [2.0, 3.0]), X, V),
    "fused adamw": (adamw, V, V, V, pos(4), lambda: torch.ones(())),
    "out=": (lambda a, b: torch.add(a, b, out=torch.empty(3, 4)), X, Y),
    "out= an argument": (lambda a, b: torch.mul(a, 2, out=b), X, Y),
    "copy_ converts": (lambda a, b: b.copy_(a), X, it(3, 4)),
    "fill_ and zero_": (lambda a, b: (a.fill_(2.0).sum(), b.zero_().sum()), X, Y),
    "swap through a clone": (lambda a, b: (b.copy_(a.clone()), a.add_(b)), X, Y),
    "scatter_ and index_add_": (lambda a, i, b: a.index_add_(0, i, b).sum(), X, it(3), Y),
    "transposed in place": (lambda a, b: a.t().mul_(b.t()).sum(), X, Y),
    "overlapping reads": (lambda a: a[1:].add_(a[:-1].clone()).sum(), V),
    "sort into an argument": (lambda a, b: b.copy_(a.sort(0).values), X, Y),
}

TABLES = {
    **POINTWISE, **REDUCTIONS, **PRODUCTS, **LAYERS, **SHAPES, **INDEXING, **FACTORIES, **WRITES,
}  # fmt: skip
# An input that is written, or whose memory is counted from its start, must stay where it is.
STAYING = {*WRITES, "batch_norm in training", "as_strided"}


def test_the_tables_do_not_hide_rows_behind_one_name():
    tables = (POINTWISE, REDUCTIONS, PRODUCTS, LAYERS, SHAPES, INDEXING, FACTORIES, WRITES)
    assert len(TABLES) == sum(map(len, tables)) >= 150


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", TABLES)
def test_op_replays_bit_equal_to_eager_on_changed_values_and_on_moving_inputs(name):
    function, *makers = TABLES[name]
    stats = cgt.stats(agrees(function, makers))
    assert (stats.warmups, stats.records, stats.replays, stats.eager) == (1, 1, 3, 0), stats.reasons
    assert stats.copied_bytes == 0
    if name in STAYING:
        return
    stats = cgt.stats(agrees(function, makers, moving=True))
    assert (stats.warmups, stats.records, stats.replays, stats.eager) == (1, 1, 3, 0), stats.reasons
    assert stats.copied_bytes == 0 and stats.rebinds > 0


# --- ops that no tape can replay: eager, with a reason that names op and line -------------------

REFUSED = {
    "item": (lambda a: a * float(a.sum()), "aten._local_scalar_dense", "torch.where"),
    "number from a tensor": (lambda a: torch.full((2,), a[0, 0]), "aten._local_scalar", "value"),
    "text of a tensor": (lambda a: (a * 1, str(a))[1], "", ""),
    "sizes from a tensor": (
        lambda a: [t * 1 for t in a.flatten().tensor_split((a[0, :2] > 0).long() + 1)],
        "",
        "",
    ),
    "nonzero": (lambda a: a.nonzero(), "aten.nonzero", "shape depends on data"),
    "unique": (lambda a: a.unique(), "aten._unique2", "shape depends on data"),
    "resize_": (lambda a: a.clone().resize_(2).zero_(), "aten.resize_", "replaces the memory"),
    "set_": (lambda a: torch.empty(0).set_(a.clone()), "aten.set_", "replaces the memory"),
    "unsqueeze_ an argument": (
        lambda a: a.unsqueeze_(0).squeeze_(0) * 2,
        "aten.unsqueeze_",
        "form without the underscore",
    ),
    "sparse": (lambda a: a.to_sparse().to_dense(), "aten._to_sparse", "Use a plain, dense tensor"),
    "numpy": (lambda a: float(a.numpy().sum()), "Tensor.numpy", "on the result"),
    "tolist": (lambda a: sum(a.flatten().tolist()), "Tensor.tolist", "on the result"),
    "data_ptr": (lambda a: a.data_ptr() != 0, "Tensor.data_ptr", "on the result"),
    "quantized": (
        lambda a: torch.quantize_per_tensor(a, 0.1, 0, torch.qint8).dequantize(),
        "aten.quantize_per_tensor",
        "tape",
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_op_that_cannot_be_taped_runs_eagerly_and_the_reason_names_op_and_line(name):
    function, op, advice = REFUSED[name]
    stats = cgt.stats(agrees(function, [X]))
    assert (stats.records, stats.replays) == (0, 0) and stats.eager >= 3
    (reason,) = stats.reasons
    line = re.search(f"{re.escape(__file__)}:([0-9]+)", reason)
    assert op in reason and advice in reason and line is not None, reason
    assert int(line[1]) - function.__code__.co_firstlineno in range(3)


# --- which form of an op goes on the tape ------------------------------------------------------


def test_op_with_an_out_variant_for_the_same_arguments_has_one():
    assert tape.out_variant(aten.add.Tensor) == (b"out", b"out")
    assert tape.out_variant(aten.sum.dim_IntList) == (b"IntList_out", b"out")
    overload, *_ = tape.out_variant(aten.full.default)
    assert overload == b"out", "dtype and device are those of the result that is written"


def test_random_ops_and_ops_of_several_results_have_no_out_variant():
    assert tape.out_variant(aten.rand.default) is None
    assert tape.out_variant(aten.bernoulli.default) is None
    assert tape.out_variant(aten.topk.default) is None


def test_written_arguments_are_read_from_the_schema():
    assert tape.writes(aten.add.Tensor) == ()
    assert tape.writes(aten.add_.Tensor) == ((0, "self"),)
    assert tape.writes(aten.add.out) == ((3, "out"),)
    assert [name for _, name in tape.writes(aten._fused_adamw_.default)][:3] == [
        "self", "grads", "exp_avgs",
    ]  # fmt: skip


def test_a_number_that_only_64_bits_without_a_sign_hold_is_taped():
    stats = cgt.stats(agrees(lambda a: torch.full((2,), 2**63 + 1, dtype=torch.uint64), [X]))
    assert stats.replays >= 1 and not stats.reasons


DTYPES = [torch.float32, torch.float64, torch.complex128, torch.bfloat16, torch.bool]
VARIANTS = torch.library.Library("cgt_variants", "DEF")
VARIANTS.define("copy(Tensor x) -> Tensor")
VARIANTS.define("copy.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
WRITES_OUT = []  # what the out variant does, and then each time that it does so
VARIANTS.impl("copy", lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x), "CPU")
VARIANTS.impl("copy.out", lambda x, *, out: (WRITES_OUT.append(1), WRITES_OUT[0](x, out), out)[-1], "CPU")


def copies(x):
    return torch.ops.cgt_variants.copy(x)


def raises(error):
    def raised(x, out):
        raise error("no")

    return raised


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stride", [(3, 1), (1, 2), (8, 2)])
def test_out_variant_that_leaves_the_same_bits_is_replayed(dtype, stride):
    """NaNs are the same, too."""
    x = torch.empty_strided((2, 3), stride, dtype=dtype)
    x.copy_(torch.tensor([[float("nan"), -0.0, 0.0], [1, 2, 3]]))
    f = cgt.jit(copies)
    WRITES_OUT[:] = [lambda x, out: out.copy_(x)]
    for k in range(4):
        assert identical(f(x), copies(x)), k
    assert len(WRITES_OUT) == 1 + 1 + 2, "tried once; then two replays"


WRONG = {
    "other bits": lambda x, out: out.copy_(x).neg_(),
    "other memory": lambda x, out: out.set_(x.clone()),
    "another size": lambda x, out: out.resize_(9)[:6].copy_(x.flatten()),
    "an error": raises(RuntimeError), "an error of Python's": raises(KeyError),
}


@pytest.mark.parametrize("what", WRONG)
def test_out_variant_that_does_something_else_is_not_trusted(what):
    f, x = cgt.jit(copies), torch.zeros(2, 3)
    WRITES_OUT[:] = [WRONG[what]]
    for k in range(4):
        assert identical(f(x), copies(x)), k
    replays = cgt.stats(f).replays  # the first recording may find that the variant's code is new
    assert replays >= 1 and len(WRITES_OUT) == 1 + 3 - replays, "tried where it is recorded; replays run the op and copy"


def test_interrupt_in_an_out_variant_is_raised():
    f, x = cgt.jit(copies), torch.zeros(2, 3)
    WRITES_OUT[:] = [raises(KeyboardInterrupt)]
    f(x)
    with pytest.raises(KeyboardInterrupt):
        f(x)


def heard(function, args):
    """What four calls warn of, each text once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            function(*args)
    return {str(w.message) for w in caught}


@pytest.mark.parametrize("name", TABLES)
def test_recording_warns_of_nothing_that_eager_does_not_warn_of(name, capfd):
    """An out variant that is tried may resize, of which ATen warns when the op around it returns."""
    function, *makers = TABLES[name]
    args = [make() for make in makers]
    assert heard(cgt.jit(function), args) <= heard(function, args)
    assert "Warning" not in "".join(capfd.readouterr())


def test_memory_of_empty_tensors_is_no_op_of_the_tape():
    f = cgt.jit(lambda a: torch.empty_like(a).copy_(a))
    a = torch.randn(4)
    for _ in range(3):
        f(a)
    assert cgt.stats(f).graph_nodes == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int32, torch.uint8, torch.bool])
def test_memory_that_pytorch_fills_is_filled_at_each_replay(device, dtype):
    """With deterministic algorithms `empty` gives what is not written yet a value that is found again."""

    def function(x):
        y = torch.empty(5, dtype=dtype, device=x.device)
        y[:2].copy_(x[:2])
        return y, torch.empty_like(x), x.new_empty(3), torch.empty_strided((4,), (1,), dtype=dtype, device=x.device) if dtype == torch.bool else y + 1

    f = cgt.jit(function)
    torch.use_deterministic_algorithms(True)
    try:
        for k in range(8):
            x, before = torch.full((5,), k, device=device).to(dtype), [torch.full((5,), 3, device=device).to(dtype) for _ in range(9)]
            del before
            assert identical(f(x), function(x))
    finally:
        torch.use_deterministic_algorithms(False)
    assert cgt.stats(f).replays >= 4, cgt.explain(f)


def test_views_are_no_ops_of_the_tape():
    f = cgt.jit(lambda a: a.t()[1:].unsqueeze(0).expand(2, 3, 3) + 1)
    a = torch.randn(3, 4)
    for _ in range(3):
        f(a)
    assert cgt.stats(f).graph_nodes == 1
    assert cgt.stats(f).replays == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * 2).squeeze_(1) + 1,
        lambda x: (x * 2).unsqueeze_(0) + 1,
        lambda x: (x * 2).transpose_(0, 2).add_(1),
        lambda x: (x * 2).t_() if x.dim() == 2 else (x * 2).squeeze_().exp_(),
    ],
    ids=["squeeze_", "unsqueeze_", "transpose_", "squeeze_ and exp_"],
)
def test_shapes_changed_in_place_stay_those_of_the_recording(device, function):
    """The tape holds tensors of its own: an op that changes one's shape must not run again on it."""
    f = cgt.jit(function)
    for k in range(8):
        x = torch.arange(5.0, device=device).view(5, 1, 1) + k
        assert torch.equal(f(x), function(x)) and f(x).shape == function(x).shape
    assert cgt.stats(f).replays >= 8


def test_a_mask_that_says_what_a_number_replaces(device):
    """Behind a write, where no mask can be read: PyTorch fills, and so does a replay."""
    state = torch.zeros(5, 3, device=device)

    def function(x):
        state.copy_(x)
        y = x.sign()
        y[y.gt(0)] = 1.25
        y[y.lt(0)] = torch.tensor(0.5)
        state[state.abs() > 1, ...] = 0.0
        return y

    f, kept = cgt.jit(function), []
    for k in range(6):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(k)).to(device)
        kept.append((f(x).clone(), state.clone()))
        assert torch.equal(kept[-1][0], function(x)) and torch.equal(kept[-1][1], state)
    assert cgt.stats(f).replays >= 4, cgt.stats(f).reasons


def test_gradients_of_each_sample(device):
    """vmap of grad of a layer changes shapes in place."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 1).to(device)

    def gradients(p, x):
        def loss(p, x):
            return torch.func.functional_call(layer, p, (x,)).sum()

        return torch.func.vmap(torch.func.grad(loss), (None, 0))(p, x)["weight"]

    f, p = cgt.jit(gradients), {name: t.detach() for name, t in layer.named_parameters()}
    for k in range(6):
        x = torch.arange(15.0, device=device).view(5, 3) + k
        assert torch.equal(f(p, x), gradients(p, x))
    assert cgt.stats(f).replays >= 4, cgt.stats(f).reasons


def test_linalg_error_of_a_replay_is_pytorchs_own(device):
    if device.type == "cuda":
        pytest.skip("reading the info on the host is a reason there")
    f = cgt.jit(lambda x: torch.linalg.inv(x) * 2)
    for _ in range(3):
        assert torch.equal(f(torch.eye(3)), torch.eye(3) * 2)
    with pytest.raises(torch.linalg.LinAlgError):
        f(torch.zeros(3, 3))
    assert torch.equal(f(torch.eye(3)), torch.eye(3) * 2)


STOPS = []  # what the op below raises


@torch.library.custom_op("cgt_tests::stops", mutates_args=())
def stops(x: torch.Tensor) -> torch.Tensor:
    if STOPS:
        raise STOPS[0]
    return x.clone()


@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt, StopIteration, SystemExit])
def test_what_an_op_of_pythons_raises_in_a_replay_is_that_very_exception(kind):
    """Captured graphs run none."""
    f, x, error = cgt.jit(lambda x: stops(x) * 2), torch.ones(4), kind("negative")
    with torch.no_grad():
        for k in range(5):
            assert torch.equal(f(x.fill_(k)), x * 2)
        before = cgt.stats(f).replays
        assert before >= 3, cgt.explain(f)
        STOPS.append(error)
        try:
            with pytest.raises(kind) as raised:
                f(x)
        finally:
            STOPS.clear()
        assert raised.value is error
        assert torch.equal(f(x), x * 2) and cgt.stats(f).replays > before
