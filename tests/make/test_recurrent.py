"""Recurrent layers. On the GPU cuDNN takes their weights by `set_` over a storage, flattened or not."""

import copy
import types

import pytest
import torch
from helpers import plain, tells, values
from torch import nn

import cgt


@pytest.fixture(params=[nn.LSTM, nn.GRU, nn.RNN], ids=lambda kind: kind.__name__)
def layer(request, device):
    torch.manual_seed(3)
    made = request.param(4, 8, num_layers=2, bidirectional=True, batch_first=True).to(device)
    yield made
    vars(made).pop("_compiled_call_impl", None)  # pytest holds it


@pytest.fixture(params=["flat", "copied"])
def model(request, layer):
    made = layer if request.param == "flat" else copy.deepcopy(layer)
    yield made
    vars(made).pop("_compiled_call_impl", None)


def inputs(device, n=8):
    return [values(device, 2, 5, 4, seed=k) for k in range(n)]


def flat(result):
    return [result] if isinstance(result, torch.Tensor) else [t for part in result for t in flat(part)]


@pytest.mark.filterwarnings("ignore:RNN module weights")
def test_inference(device, model):
    f, x = cgt.jit(model), torch.empty_like(inputs(device)[0])
    with torch.no_grad():
        for given in inputs(device):
            x.copy_(given)
            assert all(torch.equal(a, b) for a, b in zip(flat(f(x)), flat(plain(model)(x)), strict=True))
    assert cgt.stats(f).replays >= 5, cgt.explain(f)


@pytest.mark.filterwarnings("ignore:RNN module weights")
@pytest.mark.parametrize("way", ["step", "jit"])
def test_training(device, model, way):
    def train(model, wrap):
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        forward = wrap(model) if way == "jit" else model

        def step(x):
            opt.zero_grad()
            loss = forward(x)[0].square().mean()
            loss.backward()
            opt.step()
            return loss.detach()

        step, x = wrap(step) if way == "step" else step, torch.empty_like(inputs(device)[0])
        losses = [step(x.copy_(given)).item() for given in inputs(device)]
        return losses, [p.detach() for p in model.parameters()], forward if way == "jit" else step

    want = train(copy.deepcopy(model), lambda f: f)
    got = train(model, cgt.jit)
    for a, b in zip(got[1], want[1], strict=True):
        torch.testing.assert_close(a, b)  # cuDNN adds weights' gradients in any order
    assert got[0] == pytest.approx(want[0], rel=1e-5)
    assert cgt.stats(got[2]).replays >= 5, cgt.explain(got[2])


CUDNN = pytest.mark.skipif(not torch.cuda.is_available(), reason="cuDNN's")


def losses_of(layer, wrap, seeds, trains, beside=None):
    """What a layer that drops gives for these seeds of the generator (None: it is left as it is), with what it learns."""
    f, x, made = wrap(layer), torch.empty(5, 2, 4, device="cuda"), []
    for k, seed in enumerate(seeds):
        if seed is not None:
            torch.manual_seed(seed)
        layer.zero_grad()
        with torch.set_grad_enabled(trains):
            y = f(x.copy_(values("cuda", 5, 2, 4, seed=k)))[0]
        if trains:
            y.square().mean().backward()
        made.append((y.detach().clone(), [p.grad.clone() for p in layer.parameters() if p.grad is not None]))
        if beside is not None:
            made.append((beside(x)[0].detach().clone(), []))
    return f, made


LENGTHS = {
    "numbers": lambda k: [5, 3, 2],
    "argument": lambda k: torch.tensor([5, 3, 2]),
    "in any order": lambda k: torch.tensor([2, 5, 3]),
    "two kinds": lambda k: torch.tensor([[5, 3, 2], [4, 4, 1]][k % 2]),
}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_sequences(device, kind, lengths):
    """A recording is for the lengths, which are read."""
    torch.manual_seed(3)
    layer, rnn = kind(4, 8, num_layers=2, bidirectional=True, batch_first=True).to(device).requires_grad_(False), nn.utils.rnn

    def function(x, n):
        packed = rnn.pack_padded_sequence(x, n, batch_first=True, enforce_sorted=lengths != "in any order")
        y, last = layer(packed)
        padded, told = rnn.pad_packed_sequence(y, batch_first=True)
        on_host = () if x.is_cuda else (told, packed.batch_sizes)  # which a function on the GPU does not return
        return padded * 2, last, on_host

    f = cgt.jit(function)
    for k in range(16):
        x = values(device, 3, 5, 4, seed=k)
        for mine, theirs in zip(flat(f(x, LENGTHS[lengths](k))), flat(function(x, LENGTHS[lengths](k))), strict=True):
            assert torch.equal(mine, theirs) and mine.device == theirs.device, k
    assert cgt.stats(f).replays >= 10, cgt.explain(f)


@pytest.mark.parametrize("lengths", ["numbers", "in any order", "two kinds"])
def test_training_on_packed_sequences(device, lengths):
    def train(wrap):
        torch.manual_seed(3)
        layer, head = nn.LSTM(4, 8, batch_first=True).to(device), nn.Linear(8, 1).to(device)
        opt = torch.optim.SGD([*layer.parameters(), *head.parameters()], lr=0.1)

        def step(x, n):
            opt.zero_grad()
            _, (last, _) = layer(nn.utils.rnn.pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False))
            loss = head(last[-1]).square().mean()
            loss.backward()
            opt.step()
            return loss.detach()

        f = wrap(step)
        losses = [f(values(device, 3, 5, 4, seed=k), LENGTHS[lengths](k)).clone() for k in range(20)]
        return f, [*losses, *(p.detach() for p in (*layer.parameters(), *head.parameters()))]

    (_, want), (f, got) = train(lambda f: f), train(cgt.jit)
    exact = {"rtol": 0, "atol": 0} if device.type == "cpu" else {}  # cuDNN adds weights' gradients in any order
    torch.testing.assert_close(got, want, **exact)
    assert cgt.stats(f).replays >= 10, cgt.explain(f)


def check_dropout(layer, seeds, trains, beside=None):
    _, want = losses_of(layer, lambda f: f, seeds, trains, beside)
    f, got = losses_of(layer, cgt.jit, seeds, trains, beside)
    for k, ((y, grads), (other, others)) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(y, other), f"call {k}"
        torch.testing.assert_close(grads, others)  # cuDNN adds weights' gradients in any order
    return cgt.stats(f), f


@CUDNN
@pytest.mark.parametrize("trains", [False, True], ids=["forward", "trained"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_dropout_of_cudnn(kind, trains):
    """Its random state is a buffer that every such layer moves on; another one comes behind a seed."""
    layer, other = (kind(4, 8, num_layers=2, dropout=0.5, device="cuda") for _ in range(2))
    seeds = [3, *[None] * 11, 4, *[None] * 11]
    told, f = check_dropout(layer, seeds, trains)
    assert told.replays >= 16, cgt.explain(f)
    told, f = check_dropout(layer, seeds, trains, beside=other)
    assert told.replays >= 16, cgt.explain(f)


@CUDNN
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_step_of_a_layer_without_dropout_where_another_one_drops(kind):
    """cuDNN's functions are handed its random state wherever the process has one, that of the backward first of all."""
    device = torch.device("cuda")
    nn.LSTM(4, 8, num_layers=2, dropout=0.5).to(device)(values(device, 2, 5, 4))
    outcomes = []
    for wrap in (lambda f: f, cgt.jit):
        torch.manual_seed(3)
        layer = kind(4, 8, num_layers=2).to(device)
        opt = torch.optim.SGD(layer.parameters(), lr=0.1)

        def step(x, layer=layer, opt=opt):
            opt.zero_grad()
            layer(x)[0].square().mean().backward()
            opt.step()

        step, x = wrap(step), torch.empty_like(inputs(device)[0])
        for given in inputs(device):
            step(x.copy_(given))
        outcomes.append([p.detach() for p in layer.parameters()])
    torch.testing.assert_close(*outcomes)  # cuDNN adds weights' gradients in any order
    assert cgt.stats(step).replays >= 5, cgt.explain(step)


@CUDNN
@tells("cudnn_dropout")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_dropout_of_cudnn_that_is_seeded_at_each_call(kind):
    told, f = check_dropout(kind(4, 8, num_layers=2, dropout=0.5, device="cuda"), [*range(8)], False)
    assert told.replays == 0 and "cuDNN" in " ".join(told.reasons), cgt.explain(f)


@CUDNN
@pytest.mark.parametrize("inference", [False, True])
def test_random_state_of_cudnn_that_eager_made_anew(inference):
    """Behind a seed another function's layer makes it; in inference mode nobody counts that."""
    layer, other, x = *(nn.LSTM(4, 8, num_layers=2, dropout=0.5, device="cuda") for _ in range(2)), values("cuda", 5, 2, 4)

    def outcomes(f):
        made = []
        for k in range(18):
            if k % 6 == 0:
                torch.manual_seed(k)
                with torch.inference_mode(inference):
                    other(x)
            with torch.no_grad():
                made.append(f(x)[0].clone())
        return made

    want, f = outcomes(plain(layer)), cgt.jit(layer)
    got = outcomes(f)
    torch.manual_seed(0)
    other(x)  # with a random state of inference mode no layer of the process could be trained any more
    assert all(map(torch.equal, got, want)) and cgt.stats(f).replays >= 6, cgt.explain(f)


@CUDNN
def test_a_layer_that_drops_met_first_in_a_capture():
    """PyTorch would fill its buffer in the capture, and leave it unfilled for all others."""
    layer, x = nn.LSTM(4, 8, num_layers=2, dropout=0.5, device="cuda"), values("cuda", 5, 2, 4)

    def outcomes(wrap):
        s = types.SimpleNamespace(on=False)
        f, made = wrap(lambda x: layer(x)[0] if s.on else x * 2), []
        with torch.no_grad():
            for k in range(14):
                if k == 4:
                    s.on = True
                    torch.manual_seed(3)
                made.append(f(x).clone())
            made.append(layer(x)[0].clone())
        return made, f

    (want, _), (got, f) = outcomes(lambda f: f), outcomes(cgt.jit)
    assert all(map(torch.equal, got, want)) and cgt.stats(f).replays >= 8, cgt.explain(f)
