"""Reinforcement learning: an epsilon-greedy policy, an environment in plain Python, a replay buffer, a target network.

    python examples/dqn.py

What runs on the device is jitted in two functions; the environment stays Python.
"""

import random
import time

import torch
from torch import nn

import cgt

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_num_threads(1)  # tensors as small as these: on a CPU further threads only wait for each other
CELLS, MOVES, STEPS, BATCH = 12, (-1, 1), 600, 32


class Corridor:
    """Walk to the right end; each step costs."""

    def __init__(self):
        self.at = CELLS // 2

    def step(self, move):
        self.at = min(max(self.at + MOVES[move], 0), CELLS - 1)
        done = self.at in (0, CELLS - 1)
        reward = 1.0 if self.at == CELLS - 1 else -0.05
        before, self.at = self.at, CELLS // 2 if done else self.at
        return before, reward, done


def play(transform):
    random.seed(0)
    torch.manual_seed(0)
    q, target = (nn.Sequential(nn.Embedding(CELLS, 32), nn.ReLU(), nn.Linear(32, len(MOVES))).to(DEVICE) for _ in range(2))
    target.load_state_dict(q.state_dict())
    optimizer = torch.optim.Adam(q.parameters(), lr=5e-3)

    @transform
    @torch.no_grad()
    def greedy(at):
        return q(at).argmax(-1)

    @transform
    def learn(at, move, reward, then, done):
        with torch.no_grad():
            wanted = reward + 0.95 * target(then).max(1).values * (1 - done)
        loss = nn.functional.smooth_l1_loss(q(at).gather(1, move[:, None])[:, 0], wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for ours, theirs in zip(target.parameters(), q.parameters(), strict=True):
            ours.data.lerp_(theirs.data, 0.05)
        return loss.detach()

    env, buffer, losses, began = Corridor(), [], [], time.perf_counter()
    for k in range(STEPS):
        cgt.step()
        at, epsilon = env.at, max(0.05, 1 - k / 300)
        move = random.randrange(len(MOVES)) if random.random() < epsilon else greedy(torch.tensor([at], device=DEVICE)).item()
        then, reward, done = env.step(move)
        buffer.append((at, move, reward, then, float(done)))
        if len(buffer) >= BATCH:
            columns = zip(*random.sample(buffer, BATCH), strict=True)
            losses.append(learn(*(torch.tensor(column, device=DEVICE) for column in columns)).item())
    return [greedy, learn], losses, (time.perf_counter() - began) / STEPS


if __name__ == "__main__":
    _, wanted, eager = play(lambda f: f)
    functions, losses, jitted = play(cgt.jit)
    assert losses == wanted
    for f in functions:
        print(f"{f.__name__}: {cgt.stats(f).replays} of {cgt.stats(f).calls} calls replayed")
    print(f"{eager / jitted:.1f} x faster than eager over the whole run, Python and recording included ({eager * 1e6:.0f} µs, {jitted * 1e6:.0f} µs a step)")
