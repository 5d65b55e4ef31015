"""A training step, jitted whole: forward, backward, clipping and AdamW as it comes are one recording, replayed at each step.

    python examples/train.py

The same run is made without cgt first. Losses and weights must agree to the last bit.
"""

import time

import torch
from torch import nn

import cgt

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_num_threads(1)  # tensors as small as these: on a CPU further threads only wait for each other
STEPS, BATCH = 300, 32


def train(transform):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=STEPS)

    @transform
    def step(x, y):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    losses, seconds = [], []
    for _ in range(STEPS):
        x = torch.randn(BATCH, 20, device=DEVICE)
        began = time.perf_counter()
        cgt.step()
        losses.append(step(x, x[:, :1] * x[:, 1:2]).item())
        seconds.append(time.perf_counter() - began)
        schedule.step()  # another rate, other betas: the recording is told
    return step, losses, [p.detach() for p in model.parameters()], sorted(seconds)[STEPS // 2]


if __name__ == "__main__":
    _, wanted, weights, eager = train(lambda f: f)
    step, losses, ours, jitted = train(cgt.jit)
    assert losses == wanted and all(map(torch.equal, ours, weights))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; {cgt.stats(step).replays} of {STEPS} steps replayed")
    print(f"{eager / jitted:.1f} x faster than eager ({eager * 1e6:.0f} µs, {jitted * 1e6:.0f} µs), bit-equal")
