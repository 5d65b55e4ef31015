"""What can be seen inside of a replay: tensors by name (`cgt.tap`). In place of one: the op that made the first NaN or infinity (`CGT_NAN`)."""

import inspect
import warnings

import pytest
import torch
from helpers import identical, in_threads, numbers, tells, values
from torch import nn

import cgt
from cgt.make import probes
from cgt.words import errors, options


@pytest.fixture(autouse=True)
def nothing_left():
    probes.TAPPED.clear()
    yield
    probes.TAPPED.clear()


# --- taps -------------------------------------------------------------------------------------------


def test_tensor_in_the_middle_is_that_of_the_last_call(device):
    def function(x):
        hidden = cgt.tap("hidden", x * 2)
        cgt.tap("given", x)
        for k in range(2):
            x = cgt.tap(f"round {k}", x + hidden)
        return x.sum()

    f = cgt.jit(function)
    for k in range(12):
        x = values(device, seed=k)
        got, mine = f(x), cgt.tapped()
        probes.TAPPED.clear()
        want = function(x)
        assert identical(got, want) and mine.keys() == cgt.tapped().keys() == {"hidden", "given", "round 0", "round 1"}
        assert all(identical(mine[name], t) for name, t in cgt.tapped().items()), k
    assert cgt.stats(f).replays >= 9, cgt.explain(f)


def test_what_was_tapped_stays_its_holders(device):
    f, held = cgt.jit(lambda x: cgt.tap("y", x * 2).sum()), []
    for k in range(8):
        f(values(device, seed=k))
        held.append(cgt.tapped()["y"])
    assert all(identical(t, values(device, seed=k) * 2) for k, t in enumerate(held))
    assert cgt.stats(f).replays >= 5


def test_result_and_input_and_view(device):
    def function(x, y):
        z = x @ y
        cgt.tap("result", z)
        cgt.tap("row", z[1])
        cgt.tap("view of an input", x[0])
        return z

    f = cgt.jit(function)
    for k in range(10):
        x, y = values(device, 4, 4, seed=k), values(device, 4, 4, seed=k + 1)
        z = f(x, y)
        told = cgt.tapped()
        assert identical(told["result"], z) and identical(told["row"], z[1]) and identical(told["view of an input"], x[0])
        x.zero_()
        assert identical(cgt.tapped()["view of an input"], values(device, 4, 4, seed=k)[0])
    assert cgt.stats(f).replays >= 6, cgt.explain(f)


def test_tensor_that_is_written_later_shows_it(device):
    """As it would in eager: the name is another one for the same memory."""

    def function(x):
        y = cgt.tap("y", x * 2)
        y.add_(1)
        return y * 3

    f = cgt.jit(function)
    for k in range(6):
        x = values(device, seed=k)
        f(x)
        assert identical(cgt.tapped()["y"], x * 2 + 1)


def test_training_step_and_parameters(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @cgt.jit
    def step(x):
        optimizer.zero_grad()
        h = cgt.tap("h", model[1](model[0](x)))
        loss = model[2](h).square().mean()
        loss.backward()
        cgt.tap("gradient", model[0].weight.grad)
        cgt.tap("weight", model[0].weight)
        optimizer.step()

    for k in range(10):
        x = values(device, seed=k)
        before = model[0].weight.detach().clone()
        want = torch.tanh(nn.functional.linear(x, before, model[0].bias.detach().clone()))
        step(x)
        told = cgt.tapped()
        assert identical(told["h"], want) and identical(told["weight"], before) and identical(told["gradient"], model[0].weight.grad)
        assert not any(t.requires_grad for t in told.values())
    assert cgt.stats(step).replays >= 7, cgt.explain(step)


def test_model_that_is_jitted_and_trained(device):
    """A forward whose backward comes later has its taps, too."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 5).to(device)

    def forward(x):
        return cgt.tap("h", layer(x)).tanh()

    f = cgt.jit(forward)
    for k in range(8):
        x = values(device, seed=k)
        layer.zero_grad()
        f(x).sum().backward()
        got, h = layer.weight.grad.clone(), cgt.tapped()["h"]
        layer.zero_grad()
        forward(x).sum().backward()
        assert identical(got, layer.weight.grad) and identical(h, cgt.tapped()["h"])
    assert cgt.stats(f).replays >= 5, cgt.explain(f)


def test_ways_that_tap_different_things(device):
    def function(x):
        if x.sum() > 0:
            return cgt.tap("more", x * 2)
        return cgt.tap("less", x - 1) * 2

    f = cgt.jit(function)
    for k in range(16):
        probes.TAPPED.clear()
        x = numbers(device, start=-5.0 * (k % 2))
        f(x)
        ((name, t),) = cgt.tapped().items()
        assert identical(t, x * 2) if name == "more" else identical(t, x - 1)
    assert cgt.stats(f).replays >= 10, cgt.explain(f)


def test_function_that_runs_eagerly(device):
    f = cgt.jit(lambda x: cgt.tap("y", x * 2).data_ptr() and x.storage_offset() + hash(str(x.tolist())))
    for k in range(4):
        x = values(device, seed=k)
        f(x)
        assert identical(cgt.tapped()["y"], x * 2)


def test_outside_of_functions_and_in_threads(device):
    x = values(device)
    assert cgt.tap("x", x) is x and identical(cgt.tapped()["x"], x)

    def one(k):
        f = cgt.jit(lambda x: cgt.tap(f"t{k}", x + k))
        for _ in range(5):
            f(values(device, seed=k))

    in_threads(4, one)
    assert all(identical(cgt.tapped()[f"t{k}"], values(device, seed=k) + k) for k in range(4))


@tells("no_tap")
def test_what_is_no_tap(device):
    with pytest.raises(TypeError, match="takes a name and a tensor, not a int and a Tensor"):
        cgt.tap(3, values(device))
    with pytest.raises(TypeError, match="a str and a int"):
        cgt.tap("x", 3)


@tells("tapped_inside")
def test_tapped_is_for_outside(device):
    f = cgt.jit(lambda x: x + cgt.tapped()["x"])
    cgt.tap("x", values(device))
    with pytest.raises(cgt.CgtError, match="outside of jitted functions"):
        f(values(device))


def test_explain_names_it(device):
    f = cgt.jit(lambda x: cgt.tap("y", x * 2) + 1)
    for k in range(4):
        f(values(device, seed=k))
    assert "stores cgt.tapped()['y']" in cgt.explain(f), cgt.explain(f)


# --- NaN and infinity -------------------------------------------------------------------------------


@pytest.fixture
def finder(monkeypatch):
    monkeypatch.setattr(options, "NAN", True)


def found(f, *args):
    """What a call of f warns of."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = f(*args)
    return result, [str(one.message) for one in told if issubclass(one.category, cgt.CgtWarning)]


def logs(x):
    y = x * 2
    z = y.log()  # here
    return (z + 1).sum(), y


def divides(x):
    y = x - x
    return (1 / y) * 0  # here


def in_place(x):
    y = x + 1
    y.sqrt_()  # here
    return y * 2


def many(x):
    y, z = torch._foreach_mul([x, x + 1], 3.0)
    return torch.stack(torch._foreach_sqrt([y, z]))  # here


@tells("not_finite", "looked_at")
@pytest.mark.parametrize(("function", "what"), [(logs, "NaN"), (divides, "infinity"), (in_place, "NaN"), (many, "NaN")])
def test_first_op_is_named(device, finder, function, what):
    f = cgt.jit(function)
    good = numbers(device, start=1.0)
    for k in range(4):
        _, told = found(f, good + k)
        assert not told or function is divides, told
    bad = good - 20
    for k in range(3):
        _, told = found(f, bad - k)
    lines, first = inspect.getsourcelines(function)
    line = next(n for n, text in enumerate(lines, first) if "# here" in text)
    assert len(told) == 1 and f"made the first {what} in aten." in told[0] and f"test_probes.py:{line}" in told[0], told
    _, told = found(f, good)
    assert not told or function is divides
    assert cgt.stats(f).eager == 8 and list(cgt.stats(f).reasons) == [errors.looked_at()], cgt.explain(f)


def test_results_are_those_of_eager(device, finder):
    f = cgt.jit(logs)
    for k in range(8):
        x = values(device, seed=k).abs() + 1
        assert all(identical(a, b) for a, b in zip(f(x), logs(x), strict=True))


def test_masks_and_what_comes_from_outside_are_not_told(device, finder):
    outside = torch.tensor([1.0, float("nan"), 2.0, float("inf")], device=device)

    def function(x):
        scores = x.masked_fill(x > 2, float("-inf"))
        weights = (scores + torch.full_like(x, float("inf")).neg().clamp(min=0)).softmax(0)
        return weights, outside[:3] * 2, (outside + 1).sum()

    f = cgt.jit(function)
    for k in range(6):
        _, told = found(f, numbers(device, start=0.1 * k))
        assert not told


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_and_large_numbers(device, finder, dtype):
    f = cgt.jit(lambda x: (x * 3).exp())
    x = numbers(device).to(dtype)
    for _ in range(4):
        assert not found(f, x)[1]
    x.fill_(1e3)
    (told,) = found(f, x)[1]
    assert "made the first infinity in aten.exp.default" in told


def test_parameters_that_an_optimizer_spoils(device, finder):
    torch.manual_seed(0)
    layer = nn.Linear(3, 1).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    @cgt.jit
    def step(x):
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        optimizer.step()

    x = values(device)
    for _ in range(5):
        assert not found(step, x)[1]
    x.mul_(1e30)
    told = [one for _ in range(3) for one in found(step, x)[1]]
    assert "made the first infinity" in told[0] and "test_probes.py" in told[0], told


def test_branches_have_their_own(device, finder):
    def function(x):
        if x.sum() > 0:
            return x.sqrt()
        return x.log()

    f = cgt.jit(function)
    for k in range(8):
        found(f, numbers(device, start=-5.0 * (k % 2)))
    (told,) = found(f, numbers(device, start=-5.0))[1]
    assert "aten.log.default" in told
    assert not found(f, numbers(device, start=1.0))[1]


def test_argument_of_another_address_at_each_call(device, finder):
    f, held = cgt.jit(lambda x: x.log()), []  # held: no memory comes again
    for k in range(12):
        held.append(numbers(device, start=1.0 - 7 * (k % 2)))
        told = found(f, held[-1])[1]
        assert ["aten.log" in one for one in told] == [True] * (k % 2), (k, told)
        held[-1].fill_(float("nan"))  # nobody reads it again


def test_argument_that_is_written(device, finder):
    f = cgt.jit(lambda x: x.add_(1).log())
    buffers = [numbers(device) for _ in range(2)]
    for k in range(12):
        x = buffers[k % 2].copy_(numbers(device, start=1.0 - 7 * (k // 2 % 2)))
        told = found(f, x)[1]
        assert k == 0 or ["aten.log" in one for one in told] == [True] * (k // 2 % 2), (k, told)


def test_without_the_switch_nothing_is_told(device):
    f = cgt.jit(logs)
    assert not any(found(f, numbers(device, start=-9.0))[1] for _ in range(4)) and cgt.stats(f).replays == 2
