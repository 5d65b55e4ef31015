"""Tensors that no recording can hold: other layouts than strided, quantized and nested ones, and subclasses that do not say
what is inside (those that do: test_wrappers.py). Wherever a function meets one it runs eagerly, with a reason that names the place."""

import functools

import pytest
import torch
from helpers import AUDITS_BY_DEFAULT, counts, square_values, tells, values

# isort: split
import cgt_core as core
from helpers import identical, try_programs
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

import cgt
from cgt.words import errors

pytestmark = pytest.mark.filterwarnings("ignore")  # prototypes warn


class Int8(torch.Tensor):
    """A weight that is held as integers and computes as floats."""

    @staticmethod
    def __new__(cls, whole, scale):
        return torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=scale.dtype, device=whole.device)

    def __init__(self, whole, scale):
        self.whole, self.scale = whole, scale

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        if op is torch.ops.aten.detach.default:
            return cls(args[0].whole, args[0].scale)
        args, kwargs = pytree.tree_map_only(cls, lambda t: t.whole * t.scale, (args, kwargs or {}))
        return op(*args, **kwargs)


class Named(torch.Tensor):
    """A subclass that leaves every op as it is."""


def int8(x):
    return Int8(x.round().to(torch.int8), torch.tensor(0.5, device=x.device))


def masked(x):
    return torch.masked.masked_tensor(x.clone(), x > 0)


def quantized(x):
    return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


def by_channel(x):
    return torch.quantize_per_channel(x, torch.full((4,), 0.1), torch.zeros(4), 0, torch.qint8)


def nested(x):
    return torch.nested.nested_tensor([x, x[:2]])


def jagged(x):
    return torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged)


def sparse(x):
    return x.to_sparse()


def rows(x):
    return x.to_sparse_csr()


def mkldnn(x):
    return x.to_mkldnn()


# what makes one: (how it is told of, what makes a plain tensor of it)
KINDS = {
    int8: ("a Int8, a tensor subclass", lambda t: t * 2),
    masked: ("a MaskedTensor, a tensor subclass", lambda t: (t * 2).get_data() * 1),
    jagged: ("a NestedTensor, a tensor subclass", lambda t: (t * 2).values() * 1),
    quantized: ("a quantized tensor", lambda t: t.dequantize()),
    by_channel: ("a quantized tensor", lambda t: t.dequantize()),
    nested: ("a nested tensor", lambda t: torch.nested.to_padded_tensor(t * 2, 0.0)),
    sparse: ("a tensor of layout torch.sparse_coo", lambda t: t.to_dense()),
    rows: ("a tensor of layout torch.sparse_csr", lambda t: t.to_dense()),
    mkldnn: ("a tensor of layout torch._mkldnn", lambda t: t.to_dense()),
}
ON_THE_CPU = (by_channel, mkldnn)


@pytest.fixture(params=KINDS, ids=lambda make: make.__name__)
def make(request, device):
    if request.param in ON_THE_CPU and device.type != "cpu":
        pytest.skip("the CPU's alone")
    return request.param


def runs_eagerly(function, x, kind):
    """Four calls are eager's, and a reason tells of the tensor; the reason."""
    want, f = function(x), cgt.jit(function)
    for _ in range(4):
        assert torch.equal(f(x), want)
    warmups, records, replays, eager = counts(f)
    assert (records, replays) == (0, 0) and warmups <= 1 and eager >= 3
    return next(r for r in cgt.stats(f).reasons if kind in r)


@tells("odd_tensor")
def test_odd_tensor_as_an_argument(make, device):
    kind, plain = KINDS[make]
    reason = runs_eagerly(plain, make(square_values(device)), kind)
    told = errors.subclass if "subclass" in kind else errors.odd_tensor
    name = type(make(square_values(device))).__name__ if "subclass" in kind else kind
    assert reason == told("args[0]", name)


def test_odd_tensor_that_is_closed_over(make, device):
    kind, plain = KINDS[make]
    if make is jagged:
        kind = ""  # on some releases it asks for its memory before it is met
    t = make(square_values(device))
    runs_eagerly(lambda x: plain(t) * x.sum(), square_values(device, seed=2), kind)


def test_odd_tensor_of_which_only_the_shape_is_read(make, device):
    kind, _ = KINDS[make]
    t = make(square_values(device))
    x = square_values(device, seed=2)
    reason = runs_eagerly(lambda x: x * t.dim(), x, kind)
    assert ": t is " in reason


def test_odd_tensor_that_is_made_inside(make, device):
    kind, plain = KINDS[make]
    function = lambda x: plain(make(x))  # noqa: E731
    if make not in (int8, masked, jagged):
        reason = runs_eagerly(function, square_values(device), kind)
        assert __file__ in reason
        return
    # Where a subclass's dispatch key lies above the observer's (torch 2.13), its ops are what it makes of them.
    f = cgt.jit(function)
    for k in range(10):
        assert torch.equal(f(square_values(device, seed=k)), function(square_values(device, seed=k)))
    s = cgt.stats(f)
    assert s.replays >= 3 or s.reasons, cgt.explain(f)


def test_odd_parameter_of_a_module(device):
    model = torch.nn.Linear(4, 4, bias=False).to(device)
    model.weight = torch.nn.Parameter(int8(square_values(device)), requires_grad=False)
    kind, _ = KINDS[int8]
    runs_eagerly(lambda x: model(x) * 1, square_values(device, seed=2), kind)


@pytest.mark.parametrize("make", (int8, quantized, sparse))
def test_backward_behind_an_odd_tensor(make, device):
    kind, plain = KINDS[make]

    def function(x):
        with torch.no_grad():
            t = make(x)
        return (x * (t if make is int8 else plain(t))).sum()

    x = square_values(device).requires_grad_()
    (want,) = torch.autograd.grad(function(x), x)
    f = cgt.jit(function)
    for _ in range(4):
        (grad,) = torch.autograd.grad(f(x), x)
        assert torch.equal(grad, want)
    s = cgt.stats(f)
    if make is int8:  # its ops may be seen through
        assert s.replays or s.reasons
    else:
        assert s.replays == 0 and any(kind in reason for reason in s.reasons)


def test_optimizer_with_odd_state(device):
    def run(wrap):
        w = torch.nn.Parameter(square_values(device))
        state = {}

        @torch.no_grad()
        def update():
            moved = state["m"] + w.grad if state else w.grad
            w.sub_(moved * 0.1)
            state["m"] = int8(moved * 2)

        def step(x):
            loss = (x @ w).square().mean()
            loss.backward()
            update()
            w.grad = None
            return loss.detach()

        step = wrap(step)
        return [step(square_values(device, seed=k)).clone() for k in range(6)], w, step

    want, w, _ = run(lambda f: f)
    got, v, step = run(cgt.jit)
    assert all(map(torch.equal, got, want)) and torch.equal(v, w)
    assert cgt.stats(step).replays == 0
    assert any("a Int8, a tensor subclass" in reason for reason in cgt.stats(step).reasons)


def test_subclass_that_changes_no_op_is_recorded(device):
    t = square_values(device).as_subclass(Named)
    f = cgt.jit(lambda x: (x * t).as_subclass(torch.Tensor))
    x = square_values(device, seed=2)
    for _ in range(4):
        assert torch.equal(f(x), (x * t).as_subclass(torch.Tensor))
    assert counts(f) == (1, 1, 2, 0)


@pytest.mark.parametrize("audit", [None, AUDITS_BY_DEFAULT])
def test_gradient_of_zeros_without_memory(device, audit):
    f = cgt.jit(torch.sgn, audit=audit)
    for k in range(8):
        x = values(device, seed=k).requires_grad_()
        assert torch.equal(torch.autograd.grad(f(x).sum(), x)[0], torch.zeros_like(x))
    assert cgt.stats(f).replays >= 5, cgt.explain(f)


class Strict(torch.Tensor):
    """It answers what it is made for alone, as those of torch's gradients per sample."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function not in (torch.Tensor.__mul__, torch.Tensor.mul):
            raise RuntimeError(f"cannot handle {function}")
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs or {}).as_subclass(torch.Tensor)


def test_subclass_that_refuses_to_be_asked(device):
    w = square_values(device).as_subclass(Strict)
    f, plain = cgt.jit(lambda x: w * x), square_values(device)
    for k in range(6):
        x = square_values(device, seed=k)
        assert torch.equal(f(x), plain * x)
    assert cgt.stats(f).replays == 0 and "a Strict, a tensor subclass" in cgt.explain(f)
# --- any of them, in any order, where plain ones are replayed ------------------------------------------------------------


def poisoned(x):
    """A result that ended with its iteration."""
    f = cgt.jit(lambda x: x + 1, outputs="error")
    for _ in range(4):
        cgt.step()
        y = f(x)
    cgt.step()
    core.stepped(False)
    return y


AS_ARGUMENTS = {
    "plain": lambda x: x, "moved": lambda x: x.clone(), "of another shape": lambda x: x[:2].clone(), "empty": lambda x: x[:0].clone(),
    "without bytes": lambda x: torch.empty(0, 4, device=x.device), "zero": lambda x: x.sum(), "transposed": lambda x: x.t(),
    "expanded": lambda x: x[:1].expand(4, 4), "unaligned": lambda x: torch.cat([x.flatten(), x[0]])[1:17].view(4, 4),
    "whole": lambda x: x.to(torch.int64), "complex": lambda x: x.to(torch.complex64), "conjugated": lambda x: torch.complex(x, -x).conj(),
    "negative": lambda x: torch.complex(x, -x).conj().imag, "zeros without memory": lambda x: torch._efficientzerotensor(4, 4, device=x.device),
    "with a gradient": lambda x: x.clone().requires_grad_(),
    "a result": lambda x: x.clone().requires_grad_() * 1, "of inference": lambda x: in_inference(x), "poisoned": poisoned,
    "a parameter": lambda x: torch.nn.Parameter(x.clone()), "a number": lambda x: 2, "another": lambda x: 2.5, "none": lambda x: None,
    **{make.__name__: make for make in KINDS},
}  # fmt: skip

TAKE_ANY = {
    "times": lambda x: x * 2, "sum": lambda x: x.sum(), "view": lambda x: x[:1], "itself": lambda x: (x, x * 2),
    "sine": lambda x: x.sin() + 1, "clone": lambda x: x.clone().mul_(3),
}  # fmt: skip


def in_inference(x):
    with torch.inference_mode():
        return x.clone()


def outcome(call):
    """What it returned, as plain tensors; or what it raised."""
    try:
        got = call()
    except Exception as error:
        return type(error), str(error).split("\n")[0].split("(made")[0]
    return [as_plain(t) for t in (got if isinstance(got, tuple) else (got,))]


def as_plain(t):
    if not isinstance(t, torch.Tensor) or type(t).__name__ == "MaskedTensor" or isinstance(t, Int8):
        return str(t) if not isinstance(t, Int8) else (t.whole, t.scale)
    if t.is_nested:
        return t.unbind()
    if t.is_quantized:
        return t.dequantize()
    return t if t.layout == torch.strided else (t.layout, t.to_dense())


def agrees_with_eager(device, audit, kinds):
    for name, function in TAKE_ANY.items():
        f, x = cgt.jit(function, audit=audit), square_values(device)
        for k in range(3):
            f(x.clone() if k else x)
        for kind, grad in kinds:
            if AS_ARGUMENTS[kind] in ON_THE_CPU and device.type != "cpu":
                continue
            given = AS_ARGUMENTS[kind](x)
            with torch.set_grad_enabled(grad):
                for _ in range(3):
                    want, got = outcome(lambda: function(given)), outcome(lambda: f(given))
                    assert identical(got, want), (name, kind, got, want)
        assert identical(f(x), function(x))


@pytest.mark.parametrize("audit", ["0", "every:1"])
def test_any_kind_of_argument_where_plain_ones_are_replayed(device, audit):
    kinds = st.tuples(st.sampled_from(sorted(AS_ARGUMENTS)), st.booleans())
    try_programs(st.lists(kinds, min_size=2, max_size=8), functools.partial(agrees_with_eager, device, audit), 25)
