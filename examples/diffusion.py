"""A sampler: a Python loop over whole numbers `t`, tables of coefficients that `t` chooses from, a branch at the end.

    python examples/diffusion.py

One recording serves every `t`: it is handed to the kernels.
"""

import time

import torch
from torch import nn

import cgt

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_num_threads(1)  # tensors as small as these: on a CPU further threads only wait for each other
STEPS, POINTS = 200, 256
BETAS = torch.linspace(1e-4, 0.02, STEPS).tolist()
ALPHAS = [1 - beta for beta in BETAS]
PRODUCTS = torch.tensor(ALPHAS).cumprod(0).tolist()


class Denoiser(nn.Module):
    """Predicts the noise in points of the plane."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))

    def forward(self, x, t):
        return self.layers(torch.cat([x, torch.full((len(x), 1), t / STEPS, device=x.device)], 1))


def sample(denoise):
    torch.manual_seed(1)
    x, seconds = torch.randn(POINTS, 2, device=DEVICE), []
    for t in reversed(range(STEPS)):
        began = time.perf_counter()
        cgt.step()
        x = denoise(x, t)
        seconds.append(time.perf_counter() - began)
    return x, sorted(seconds)[STEPS // 2]


@torch.no_grad()
def main():
    torch.manual_seed(0)
    model = Denoiser().to(DEVICE)

    def denoise(x, t):
        noise = model(x, t)
        mean = (x - BETAS[t] / (1 - PRODUCTS[t]) ** 0.5 * noise) / ALPHAS[t] ** 0.5
        return mean + BETAS[t] ** 0.5 * torch.randn_like(x) if t > 0 else mean

    jit = cgt.jit(denoise)
    wanted, eager = sample(denoise)
    sample(jit)
    before = cgt.stats(jit).records
    ours, jitted = sample(jit)
    assert torch.equal(ours, wanted)
    s = cgt.stats(jit)
    print(f"{s.records} recordings ({s.records - before} of them in the second run) for {STEPS} values of t, {s.replays} replays")
    print(f"{eager / jitted:.1f} x faster than eager ({eager * 1e6:.0f} µs, {jitted * 1e6:.0f} µs of CPU time), bit-equal")


if __name__ == "__main__":
    main()
