"""Deep Q-learning (Mnih et al., 2015) of CartPole: an epsilon-greedy policy, a replay buffer, a target network."""

import random

import gymnasium
import numpy
import torch
from torch import nn
from torch.nn import functional as F

WHAT = "DQN, CartPole"
STEPS = {"cpu": 1500, "cuda": 6000}
BATCH, BUFFER, STARTS, EVERY, TARGET_EVERY, GAMMA = 128, 10_000, 256, 1, 250, 0.99


class QNetwork(nn.Module):
    def __init__(self, observations, actions):
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(observations, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, actions)
        )

    def forward(self, x):
        return self.network(x)


def run(jit, device, steps, tick):
    env = gymnasium.make("CartPole-v1")
    env.action_space.seed(0)
    q, target = (QNetwork(4, 2).to(device) for _ in range(2))
    target.load_state_dict(q.state_dict())
    optimizer = torch.optim.Adam(q.parameters(), lr=2.5e-4)
    seen = numpy.zeros((BUFFER, 4), numpy.float32), numpy.zeros((BUFFER, 4), numpy.float32)
    moves, rewards, ends = (
        numpy.zeros(BUFFER, int),
        numpy.zeros(BUFFER, numpy.float32),
        numpy.zeros(BUFFER, numpy.float32),
    )

    @jit
    @torch.no_grad()
    def policy(observation):
        return q(observation).argmax(dim=1)

    @jit
    def update(observations, actions, rewards, following, dones):
        with torch.no_grad():
            best = target(following).max(dim=1).values
            wanted = rewards + GAMMA * best * (1 - dones)
        old = q(observations).gather(1, actions.unsqueeze(1)).squeeze()
        loss = F.mse_loss(wanted, old)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    observation, _ = env.reset(seed=0)
    total = 0.0
    for step in range(steps):
        epsilon = max(0.05, 1 - step / (0.5 * steps))
        if random.random() < epsilon:
            action = env.action_space.sample()
        else:
            action = policy(torch.as_tensor(observation, device=device)[None]).item()
        following, reward, terminated, truncated, _ = env.step(action)
        k = step % BUFFER
        seen[0][k], seen[1][k], moves[k], rewards[k], ends[k] = observation, following, action, reward, terminated
        total += reward
        observation = env.reset()[0] if terminated or truncated else following
        if step >= STARTS and step % EVERY == 0:
            at = numpy.random.randint(0, min(step, BUFFER), BATCH)
            columns = seen[0][at], moves[at], rewards[at], seen[1][at], ends[at]
            update(*(torch.as_tensor(column, device=device) for column in columns))
        if step % TARGET_EVERY == 0:
            target.load_state_dict(q.state_dict())
        tick()
    return {"reward": total, **q.state_dict()}
