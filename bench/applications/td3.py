"""Twin delayed deep deterministic policy gradients (Fujimoto et al., 2018) of a pendulum: two critics, smoothed target
actions, an actor that is updated every other time."""

import gymnasium
import numpy
import torch
from torch import nn
from torch.nn import functional as F

WHAT = "TD3, Pendulum"
STEPS = {"cpu": 800, "cuda": 3000}
BATCH, BUFFER, STARTS, DELAY = 256, 10_000, 256, 2
GAMMA, TAU, RATE, NOISE, MOST_NOISE, EXPLORATION, LIMIT = 0.99, 0.005, 3e-4, 0.2, 0.5, 0.1, 2.0


class QNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(4, 256), nn.Linear(256, 256), nn.Linear(256, 1)

    def forward(self, x, a):
        x = F.relu(self.fc1(torch.cat([x, a], 1)))
        return self.fc3(F.relu(self.fc2(x)))


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.mu = nn.Linear(3, 256), nn.Linear(256, 256), nn.Linear(256, 1)
        self.register_buffer("scale", torch.tensor(LIMIT))

    def forward(self, x):
        return torch.tanh(self.mu(F.relu(self.fc2(F.relu(self.fc1(x)))))) * self.scale


def run(jit, device, steps, tick):
    env = gymnasium.make("Pendulum-v1")
    env.action_space.seed(0)
    actor, q1, q2 = Actor().to(device), QNetwork().to(device), QNetwork().to(device)
    actor_target, q1_target, q2_target = Actor().to(device), QNetwork().to(device), QNetwork().to(device)
    for ours, theirs in ((actor_target, actor), (q1_target, q1), (q2_target, q2)):
        ours.load_state_dict(theirs.state_dict())
    q_optimizer = torch.optim.Adam([*q1.parameters(), *q2.parameters()], lr=RATE)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=RATE)
    columns = [numpy.zeros((BUFFER, n), numpy.float32) for n in (3, 1, 1, 3, 1)]

    @jit
    @torch.no_grad()
    def policy(observation):
        action = actor(observation)
        return action + torch.normal(0.0, actor.scale * EXPLORATION)

    @jit
    def update_critics(observations, actions, rewards, following, dones):
        with torch.no_grad():
            noise = (torch.randn_like(actions) * NOISE).clamp(-MOST_NOISE, MOST_NOISE) * actor_target.scale
            then = (actor_target(following) + noise).clamp(-LIMIT, LIMIT)
            least = torch.min(q1_target(following, then), q2_target(following, then))
            wanted = rewards.flatten() + (1 - dones.flatten()) * GAMMA * least.view(-1)
        loss = F.mse_loss(q1(observations, actions).view(-1), wanted)
        loss = loss + F.mse_loss(q2(observations, actions).view(-1), wanted)
        q_optimizer.zero_grad()
        loss.backward()
        q_optimizer.step()
        return loss.detach()

    @jit
    def update_actor(observations):
        loss = -q1(observations, actor(observations)).mean()
        actor_optimizer.zero_grad()
        loss.backward()
        actor_optimizer.step()
        for ours, theirs in ((actor_target, actor), (q1_target, q1), (q2_target, q2)):
            for to, param in zip(ours.parameters(), theirs.parameters(), strict=True):
                to.data.copy_(TAU * param.data + (1 - TAU) * to.data)
        return loss.detach()

    observation, _ = env.reset(seed=0)
    total = 0.0
    for step in range(steps):
        if step < STARTS:
            action = env.action_space.sample()
        else:
            given = torch.as_tensor(observation, device=device)[None]
            action = policy(given)[0].cpu().numpy().clip(-LIMIT, LIMIT)
        following, reward, terminated, truncated, _ = env.step(action)
        for column, value in zip(columns, (observation, action, reward, following, terminated), strict=True):
            column[step % BUFFER] = value
        total += float(reward)
        observation = env.reset()[0] if terminated or truncated else following
        if step >= STARTS:
            at = numpy.random.randint(0, min(step, BUFFER), BATCH)
            batch = [torch.as_tensor(column[at], device=device) for column in columns]
            update_critics(*batch)
            if step % DELAY == 0:
                for _ in range(DELAY):
                    update_actor(batch[0])
        tick()
    return {"reward": total, **actor.state_dict(), **{f"q1.{k}": v for k, v in q1.state_dict().items()}}
