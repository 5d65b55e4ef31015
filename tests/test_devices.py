"""Several GPUs in one process: each has recordings, a path and a pool of its own, and a call is recorded on the current one."""

import torch  # before the core, whose libraries are torch's

# isort: split
import pytest
from helpers import same, tells

import cgt

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs")
CALLS = 12


def inputs(k, d):
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(k)).to(f"cuda:{d}")


def network(d):
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16)).to(f"cuda:{d}")


def test_one_function_on_two_devices_in_turns():
    f, held = cgt.jit(lambda x: (x.sin() @ x.T).softmax(-1)), []
    for k in range(CALLS):
        for d in (0, 1):
            with torch.cuda.device(d):
                x = inputs(k, d)
                y = f(x)
                assert same(y, (x.sin() @ x.T).softmax(-1)) and y.device.index == d
                held.append((y, y.clone()))
    assert cgt.stats(f).replays >= 2 * CALLS - 5, cgt.explain(f)
    assert all(same(a, b) for a, b in held)


def test_two_models_that_are_trained_side_by_side():
    def run(wrap):
        steps, losses = [], []
        for d in (0, 1):
            model = network(d)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

            def step(x, model=model, optimizer=optimizer):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                return loss.detach()

            steps.append((wrap(step), model))
        for k in range(CALLS):
            for d in (0, 1):
                with torch.cuda.device(d):
                    losses.append(steps[d][0](inputs(k, d)).clone())
        return [*losses, *(p.detach() for _, model in steps for p in model.parameters())], [step for step, _ in steps]

    (want, _), (got, jitted) = run(lambda f: f), run(cgt.jit)
    assert all(map(same, got, want)) and all(cgt.stats(f).replays >= CALLS - 3 for f in jitted), list(map(cgt.explain, jitted))


def test_stages_of_a_pipeline():
    """Trained through both; what comes from the one to the other is copied outside of them."""

    def run(wrap):
        first, second = network(0), network(1)
        stages, losses = (wrap(first), wrap(second)), []
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        for k in range(CALLS):
            hidden = stages[0](inputs(k, 0))
            with torch.cuda.device(1):
                loss = stages[1](hidden.to("cuda:1")).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [*losses, *(p.detach() for p in (*first.parameters(), *second.parameters()))], stages

    (want, _), (got, stages) = run(lambda f: f), run(cgt.jit)
    assert all(map(same, got, want)), list(map(cgt.explain, stages))


@tells("other_device")
@pytest.mark.parametrize("function", [lambda x: x * 2, lambda x: x.to("cuda:0") + 1], ids=["works there", "copies"])
def test_other_devices_than_the_current_one_run_eagerly(function):
    f = cgt.jit(function)
    for k in range(CALLS):
        x = inputs(k, 1)
        assert same(f(x), function(x))
    assert cgt.stats(f).replays == 0 and any("cuda:1" in reason for reason in cgt.stats(f).reasons), cgt.explain(f)
