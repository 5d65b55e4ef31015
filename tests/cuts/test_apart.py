"""Ops that no graph can hold run between two graphs of a recording; others tell one truth of many numbers, which is read.

On CUDA a capture that fails tells which ops these are; on the host, where every op has a place on the tape, a test does."""

import pytest
import torch
from helpers import calls, counts, identical, same, square_values, tells, values
from torch import nn

import cgt
from cgt.cuts import apart
from cgt.decide import sites

aten, L = torch.ops.aten, torch.linalg


def spd(device, n=4, batch=3):
    """Symmetric matrices with a margin."""
    a = values(device, batch, n, n)
    return a @ a.mT + n * torch.eye(n, device=device)


def singular_values(x):
    u, s, v = L.svd(x * 2, full_matrices=False)
    return (u * s.unsqueeze(-2)) @ v, s.sum() + x.sum()


OPS = {  # name: (function, the op that a capture forbids, or None: it is checked afterwards)
    "svd": (singular_values, aten._linalg_svd.default),
    "singular values alone": (lambda x: L.svdvals(x) * 2, aten._linalg_svd.default),
    "pinv": (lambda x: L.pinv(x) @ x, aten.linalg_pinv.atol_rtol_tensor),
    "eigh": (lambda x: L.eigh(x + x.mT), aten._linalg_eigh.default),
    "eig": (lambda x: L.eig(x)[0].abs(), aten.linalg_eig.default),
    "matrix_exp": (lambda x: L.matrix_exp(x * 0.01) @ x, aten.linalg_matrix_exp.default),
    "lstsq": (lambda x: L.lstsq(x, x[..., :1] * 2)[0] + 1, aten.linalg_lstsq.default),
    "histc": (lambda x: torch.histc(x.sin(), 5) + 1, aten.histc.default),
    "inv": (lambda x: L.inv(x) @ x, None),
    "inv of one": (lambda x: L.inv(x[0]) @ x, None),
    "solve": (lambda x: L.solve(x, x[..., :2] + 1), None),
    "cholesky": (lambda x: torch.cholesky_inverse(L.cholesky(x)[0]), None),
    "lu_factor": (lambda x: L.lu_solve(*L.lu_factor(x), x[..., :1]), None),
}


def jit_with(function, device, *ops):
    """Jitted, and told of these ops what a CUDA capture finds out."""
    f = cgt.jit(function)
    if device.type == "cpu":
        getattr(f, sites.ATTRIBUTE).learnt.apart.update(op for op in ops if op is not None)
    return f


@pytest.mark.parametrize("name", OPS)
def test_linear_algebra_replays(device, name):
    function, op = OPS[name]
    if name == "lstsq" and device.type == "cpu":
        pytest.skip("the host's results have shapes that depend on values")
    f, x = jit_with(function, device, op), spd(device)
    learnt = device.type == "cuda" and op is not None and op.overloadpacket.__name__ not in apart.KNOWN
    for k in range(8):
        x.copy_(spd(device) + k * torch.eye(4, device=device))
        assert identical(f(x), function(x)), k
    if name == "cholesky" and any("allocate memory by itself" in reason for reason in cgt.stats(f).reasons):
        return  # cuSOLVER does, where nothing else in the process has called it before
    assert counts(f) == (1, 1, 6 - learnt, learnt), cgt.stats(f).reasons
    if op is not None:
        assert f"runs eagerly between its graphs: {op} at {__file__}" in cgt.explain(f)


def test_two_of_them_and_a_branch_behind(device):
    """Such an op runs again where a value goes another way."""

    def function(x):
        s = L.svdvals(x + 1)
        y = L.matrix_exp(x * 0.01) * s.sum()
        if s[..., 0].sum() > 150:
            return y * 2
        return y - torch.rand(1, device=x.device)

    f = jit_with(function, device, aten._linalg_svd.default, aten.linalg_matrix_exp.default)
    x = spd(device)
    for k in range(40):
        x.copy_(spd(device) * (1 if k % 3 else 9))
        torch.manual_seed(k)
        want = function(x)
        state = torch.rand(1, device=device)
        torch.manual_seed(k)
        assert identical(f(x), want)
        assert torch.equal(torch.rand(1, device=device), state)
    s = cgt.stats(f)
    assert s.records == 2 and s.replays > 30, s.reasons
    assert "\n    runs eagerly between its graphs" in cgt.explain(f)  # common to both


def test_whose_argument_moves(device):
    """The op is given a copy of it, wherever it lies."""
    f = jit_with(singular_values, device, aten._linalg_svd.default)
    for k in range(12):
        x = spd(device) + k
        assert identical(f(x), singular_values(x))
    assert cgt.stats(f).replays > 6, cgt.stats(f).reasons


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "autocast"])
def test_in_modes(device, mode):
    modes = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "autocast": lambda: torch.autocast(device.type, torch.bfloat16)}
    x = square_values(device)

    def function(x):
        return L.matrix_exp(x @ x * 0.01), L.svdvals(x.float())

    f = jit_with(lambda x: function(x), device, aten._linalg_svd.default)  # autocast makes matrix_exp's argument another one
    with modes[mode]():
        for _ in range(8):
            assert identical(f(x), function(x))
    assert cgt.stats(f).replays >= 4, cgt.stats(f).reasons


@pytest.mark.parametrize("name", ["svd", "solve", "lu_factor"])
def test_in_a_training_step(device, name):
    def run(wrap):
        torch.manual_seed(0)
        layer = nn.Linear(4, 4, device=device)
        optimizer = torch.optim.SGD(layer.parameters(), 0.001, momentum=0.9)
        x = torch.empty(3, 4, 4, device=device)

        def step(x):
            optimizer.zero_grad()
            loss = OPS[name][0](layer(x) + 9 * torch.eye(4, device=device))[0].mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        f, losses = wrap(step), []
        for k in range(10):
            losses.append(f(x.copy_(spd(device) + k)).clone())
        return losses, [p.detach().clone() for p in layer.parameters()], f

    want = run(lambda step: step)[:2]
    *got, f = run(lambda step: jit_with(step, device, OPS[name][1]))
    assert same(got, list(want))
    assert cgt.stats(f).replays >= 6, cgt.stats(f).reasons


def test_in_a_model_that_is_trained_from_outside(device):
    layer, x = nn.Linear(4, 4, device=device), spd(device)
    f = jit_with(lambda x: L.inv(layer(x) + 9 * torch.eye(4, device=device)) + L.svdvals(layer(x)).sum(), device, aten._linalg_svd.default)
    for k in range(8):
        x.copy_(spd(device) + k)
        grads = []
        for one in (f, f.__wrapped__):
            layer.zero_grad()
            one(x).sum().backward()
            grads.append([p.grad for p in layer.parameters()])
        assert same(*grads)
    assert cgt.stats(f).replays >= 4, cgt.stats(f).reasons


@tells("op_apart")
@pytest.mark.parametrize("where", ["behind writes", "in a backward"])
def test_where_no_graph_may_end(device, where):
    state = torch.zeros(3, 4, 4, device=device)

    def writes(x):
        state.add_(x)
        return L.svdvals(state)

    def backward(x):
        w = x.detach().requires_grad_()
        return torch.autograd.grad((L.matrix_exp(w * 0.01) @ x).sum(), w)[0]

    function = writes if where == "behind writes" else backward
    f, x, total = jit_with(function, device, aten._linalg_svd.default, aten.linalg_matrix_exp.default), spd(device), 0
    if where == "in a backward" and device.type == "cpu":
        pytest.skip("the tape records it in the same thread")
    for _ in range(5):
        total = total + x
        want = L.svdvals(total) if where == "behind writes" else function(x)
        assert identical(f(x), want)
    s = cgt.stats(f)
    assert s.replays == 0 and any("cannot be captured" in reason for reason in s.reasons), s.reasons
    assert where == "in a backward" or all(__file__ in reason for reason in s.reasons)  # there it is autograd's line


def test_an_op_that_writes_its_results_into_arguments_runs_eagerly(device):
    """Between two graphs they would come into a copy."""
    f = jit_with(lambda x, w, v: L.eigh(x + x.mT, out=(w, v)), device, aten._linalg_eigh.eigenvalues)
    w, v = torch.zeros(3, 4, device=device), torch.zeros(3, 4, 4, device=device)
    for k in range(6):
        x = spd(device) + k
        f(x, w, v)
        assert same((w, v), tuple(L.eigh(x + x.mT)))
    s = cgt.stats(f)
    assert s.replays == 0 and s.reasons and all("cannot be captured" in reason for reason in s.reasons), s.reasons


def test_what_fails_raises_eagers_error(device):
    """A check that fails goes another way: there eager raises. What comes next replays again."""
    function = lambda x: L.solve(x, x[..., :1]) + L.inv(x)[..., :1]  # noqa: E731
    f, x = cgt.jit(function), spd(device)
    calls(f, 3, x)
    x[1].zero_()
    with pytest.raises(L.LinAlgError, match="(?i)singular"):
        f(x)
    x.copy_(spd(device))
    before = cgt.stats(f).replays
    assert identical(f(x), function(x))
    assert cgt.stats(f).replays == before + 1


def test_an_op_that_fails_between_graphs(device):
    """Its own error, as in eager."""
    f, x = jit_with(lambda x: L.eigh(x * 1)[0] + 1, device, aten._linalg_eigh.default), spd(device)
    calls(f, 3, x)
    x[0, 0, 0] = float("nan")
    failed = []
    for one in (f.__wrapped__, f):
        try:
            failed.append(one(x))
        except L.LinAlgError as error:
            failed.append(type(error))
    assert identical(*failed)
    x.copy_(spd(device))
    before = cgt.stats(f).replays
    assert identical(f(x), f.__wrapped__(x))
    assert cgt.stats(f).replays == before + 1


# --- one truth of many numbers -------------------------------------------------------------------


def compared(x, y):
    if torch.equal(x, y):
        return x + 1
    if torch.allclose(x, y, atol=0.1):
        return x * 2
    return x - y


def test_equal_and_allclose(device):
    f, x = cgt.jit(compared), values(device)
    y = x.clone()
    for k in range(40):
        x.copy_(values(device, seed=k))
        y.copy_(x + (0, 0.01, 1)[k % 3])
        assert identical(f(x, y), compared(x, y)), k
    s = cgt.stats(f)
    assert s.records == 3 and s.replays > 20, s.reasons


@pytest.mark.parametrize("pair", ["itself", "another shape", "nothing", "nan"])
def test_equal_where_no_number_is_asked(device, pair):
    x = values(device)
    x[0, 0] = float("nan")
    other = {"itself": x, "another shape": x[:2], "nothing": x[:0], "nan": x.clone()}[pair]
    function = lambda x, y: x + 1 if torch.equal(x if pair != "nothing" else x[:0], y) else x - 1  # noqa: E731
    f = cgt.jit(function)
    for _ in range(6):
        assert identical(f(x, other), function(x, other))
    assert cgt.stats(f).replays >= 3, cgt.stats(f).reasons


def test_a_tensor_is_not_equal_to_itself_where_it_holds_a_nan(device):
    """Which another call may not."""
    f, x = cgt.jit(lambda x: x + 1 if torch.equal(x, x) else x.nan_to_num() - 1), values(device)
    for k in range(20):
        x.copy_(values(device, seed=k))
        if k % 3 == 0:
            x[0, 0] = float("nan")
        assert identical(f(x), f.__wrapped__(x)), k
    assert cgt.stats(f).replays > 10, cgt.stats(f).reasons


SPREADS = {  # of (mean, standard deviation); the means' shape is wider, narrower, none
    "alike": lambda m, s: torch.normal(m, s),
    "wide means": lambda m, s: torch.normal(m, s[:1]),
    "wide deviations": lambda m, s: torch.normal(m[:, :1], s),
    "a number as mean": lambda m, s: torch.normal(0.5, s),
    "half": lambda m, s: torch.normal(m.half(), s.half()).float(),
    "a distribution": lambda m, s: torch.distributions.Normal(m, s).sample(),
    "made here": lambda m, s: torch.normal(m * 2, s.square()) + torch.randn_like(m),
    "none": lambda m, s: torch.normal(m[:0], s[:0]),
}


@pytest.mark.parametrize("name", SPREADS)
def test_a_sampler_that_looks_at_its_deviations(device, name):
    """On CUDA its check waits for the GPU inside of the op."""
    f, m, s = cgt.jit(SPREADS[name]), values(device), values(device).abs()
    drawn = []
    for one in (f, f.__wrapped__):
        torch.manual_seed(3)
        drawn.append([one(m + k, s + k) for k in range(8)] + [torch.rand(2, device=device)])
    assert all(map(identical, *drawn)) and cgt.stats(f).replays >= 5, cgt.stats(f).reasons


def test_a_sampler_whose_deviation_is_negative_raises(device):
    f, m, s = cgt.jit(torch.normal), values(device), values(device).abs()
    for k in range(12):
        wrong = k in (6, 9)
        s.copy_(values(device, seed=k).abs() * (-1 if wrong else 1))
        torch.manual_seed(k)
        if wrong:
            with pytest.raises(RuntimeError, match="std >= 0.0"):
                f(m, s)
        else:
            got = f(m, s)
            torch.manual_seed(k)
            assert identical(got, torch.normal(m, s))
    assert cgt.stats(f).replays >= 4, cgt.stats(f).reasons


@pytest.mark.parametrize("kind", ["constant", "argument", "broadcast"])
def test_masked_select(device, kind):
    def function(x, mask):
        if kind == "constant":
            mask = torch.ones(4, 3, dtype=torch.bool, device=device).triu()
        return (x * 2).masked_select(mask) + 1

    x = values(device)
    mask = (x[:1] if kind == "broadcast" else x) > 0
    f = cgt.jit(function)
    for k in range(8):
        x.copy_(values(device, seed=k))
        assert identical(f(x, mask), function(x, mask))
    assert cgt.stats(f).replays >= 5, cgt.stats(f).reasons


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_what_is_chosen_goes_into_a_tensor(device, dtype):
    """Python may read whole numbers; what is written behind such a reading is written by replays, too."""
    f = cgt.jit(lambda x, mask, out, where: (torch.masked_select(x, mask, out=out), torch.nonzero(mask, out=where)))
    mask = values(device) > 0
    for k in range(8):
        x, out = (10 * values(device, seed=k)).to(dtype), torch.full((int(mask.sum()),), 3, dtype=dtype, device=device)
        where = torch.zeros(len(out), mask.dim(), dtype=torch.int64, device=device)
        assert identical(f(x, mask, out, where), (x[mask], mask.nonzero().contiguous())), k
        assert identical((out, where), (x[mask], mask.nonzero().contiguous())), k


def test_masked_select_of_a_number_by_a_number(device):
    """What both are expanded to has no dimension, and an index needs one."""

    def function(x, mask):
        return (x * 2).masked_select(mask) + 1

    f, masks = cgt.jit(function), [torch.tensor(yes, device=device) for yes in (True, False)]
    for k in range(16):
        x = values(device, seed=k)[0, 0].clone()
        assert identical(f(x, masks[k // 4 % 2]), function(x, masks[k // 4 % 2]))
    assert cgt.stats(f).replays >= 10, cgt.stats(f).reasons


def test_masked_select_with_gradients(device):
    mask, layer = torch.tensor([True, False, True], device=device), nn.Linear(3, 3, device=device)
    f, x = cgt.jit(lambda x: layer(x).masked_select(mask) * 2), values(device)
    for k in range(8):
        x.copy_(values(device, seed=k))
        grads = []
        for one in (f, f.__wrapped__):
            layer.zero_grad()
            one(x).square().sum().backward()
            grads.append([p.grad for p in layer.parameters()])
        assert same(*grads)
    assert cgt.stats(f).replays >= 4, cgt.stats(f).reasons
