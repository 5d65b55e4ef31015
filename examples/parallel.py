"""Several processes, each with its part of the batch: DistributedDataParallel exchanges the gradients.

    torchrun --nproc-per-node=2 examples/parallel.py

On GPUs the whole step is one recording, with the exchange inside; on the CPU what the module wraps is recorded, forward
and backward, and the exchange runs as it does without cgt. The same run is made without cgt first, and must agree to the
last bit. Started without torchrun there is one process.
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cgt

ON_GPU = torch.cuda.is_available()
STEPS, BATCH = 300, 32


def train(transform):
    torch.manual_seed(0)
    layers = [layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
    model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 64), *layers, nn.Linear(64, 1)).to(DEVICE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    forward = model if ON_GPU else transform(model)

    def step(x, y):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(forward(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = transform(step) if ON_GPU else step
    losses, seconds = [], []
    torch.manual_seed(1 + dist.get_rank())  # each process has other data
    for _ in range(STEPS):
        x = torch.randn(BATCH, 20, device=DEVICE)
        began = time.perf_counter()
        losses.append(step(x, x[:, :1] * x[:, 1:2]).item())
        seconds.append(time.perf_counter() - began)
    return step if ON_GPU else forward, losses, [p.detach() for p in model.parameters()], sorted(seconds)[STEPS // 2]


if __name__ == "__main__":
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update({name: os.environ.get(name, value) for name, value in alone.items()})  # torchrun says them
    DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if ON_GPU else torch.device("cpu")
    if ON_GPU:
        torch.cuda.set_device(DEVICE)
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if ON_GPU else "gloo")

    _, wanted, weights, eager = train(lambda f: f)
    jitted, losses, ours, replayed = train(cgt.jit)
    assert losses == wanted and all(map(torch.equal, ours, weights))
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; {cgt.stats(jitted).replays} of {STEPS} steps replayed")
        print(f"{eager / replayed:.1f} x faster than eager ({eager * 1e6:.0f} µs, {replayed * 1e6:.0f} µs), bit-equal")
    dist.destroy_process_group()
