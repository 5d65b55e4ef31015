"""Recurrent layers. On the GPU cuDNN takes their weights by `set_` over a storage, flattened or not."""

import copy

import pytest
import torch
from helpers import tells, values
from torch import nn

import cgt


@pytest.fixture(params=[nn.LSTM, nn.GRU, nn.RNN], ids=lambda kind: kind.__name__)
def layer(request, device):
    torch.manual_seed(3)
    return request.param(4, 8, num_layers=2, bidirectional=True, batch_first=True).to(device)


@pytest.fixture(params=["flat", "copied"])
def model(request, layer):
    return layer if request.param == "flat" else copy.deepcopy(layer)


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
            assert all(torch.equal(a, b) for a, b in zip(flat(f(x)), flat(model(x)), strict=True))
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="cuDNN's")
@tells("cudnn_dropout")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_dropout_of_cudnn_runs_eagerly(kind):
    """Its random state does not lie in torch's generator."""
    layer, x = kind(4, 8, num_layers=2, dropout=0.5, device="cuda"), values("cuda", 5, 2, 4)
    f = cgt.jit(layer)
    for k in range(6):
        torch.manual_seed(k)
        got = flat(f(x))
        torch.manual_seed(k)
        assert all(torch.equal(a, b) for a, b in zip(got, flat(layer(x)), strict=True))
    for _ in range(100):
        f(x)
    assert cgt.stats(f).replays == 0 and "cuDNN" in " ".join(cgt.stats(f).reasons)
    layer.dropout = 0.0
    cgt.reset(f)
    for _ in range(5):
        f(x)
    assert cgt.stats(f).replays >= 3, cgt.explain(f)
