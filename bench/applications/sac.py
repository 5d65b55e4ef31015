"""Soft actor-critic (Haarnoja et al., 2018) of a pendulum: a squashed Gaussian policy, two critics, a temperature that is
learnt and read as a number."""

import gymnasium
import numpy
import torch
from torch import nn
from torch.distributions import Normal
from torch.nn import functional as F

WHAT = "SAC, Pendulum"
STEPS = {"cpu": 700, "cuda": 3000}
BATCH, BUFFER, STARTS, DELAY = 256, 10_000, 256, 2
GAMMA, TAU, POLICY_RATE, Q_RATE, LIMIT = 0.99, 0.005, 3e-4, 1e-3, 2.0
LEAST_LOG_STD, MOST_LOG_STD = -5, 2


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
        self.fc1, self.fc2 = nn.Linear(3, 256), nn.Linear(256, 256)
        self.mean, self.log_std = nn.Linear(256, 1), nn.Linear(256, 1)

    def forward(self, x):
        x = F.relu(self.fc2(F.relu(self.fc1(x))))
        log_std = torch.tanh(self.log_std(x))
        return self.mean(x), LEAST_LOG_STD + 0.5 * (MOST_LOG_STD - LEAST_LOG_STD) * (log_std + 1)

    def get_action(self, x):
        mean, log_std = self(x)
        normal = Normal(mean, log_std.exp())
        drawn = normal.rsample()
        squashed = torch.tanh(drawn)
        log_prob = normal.log_prob(drawn) - torch.log(LIMIT * (1 - squashed.pow(2)) + 1e-6)
        return squashed * LIMIT, log_prob.sum(1, keepdim=True)


def run(jit, device, steps, tick):
    env = gymnasium.make("Pendulum-v1")
    env.action_space.seed(0)
    actor, q1, q2, q1_target, q2_target = (m.to(device) for m in (Actor(), *(QNetwork() for _ in range(4))))
    q1_target.load_state_dict(q1.state_dict())
    q2_target.load_state_dict(q2.state_dict())
    q_optimizer = torch.optim.Adam([*q1.parameters(), *q2.parameters()], lr=Q_RATE)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=POLICY_RATE)
    log_alpha = torch.zeros(1, requires_grad=True, device=device)
    alpha_optimizer, alpha = torch.optim.Adam([log_alpha], lr=Q_RATE), log_alpha.exp().item()
    columns = [numpy.zeros((BUFFER, n), numpy.float32) for n in (3, 1, 1, 3, 1)]

    @jit
    @torch.no_grad()
    def policy(observation):
        return actor.get_action(observation)[0]

    @jit
    def update_critics(observations, actions, rewards, following, dones, alpha):
        with torch.no_grad():
            then, log_prob = actor.get_action(following)
            least = torch.min(q1_target(following, then), q2_target(following, then)) - alpha * log_prob
            wanted = rewards.flatten() + (1 - dones.flatten()) * GAMMA * least.view(-1)
        loss = F.mse_loss(q1(observations, actions).view(-1), wanted)
        loss = loss + F.mse_loss(q2(observations, actions).view(-1), wanted)
        q_optimizer.zero_grad()
        loss.backward()
        q_optimizer.step()
        return loss.detach()

    @jit
    def update_actor(observations, alpha):
        action, log_prob = actor.get_action(observations)
        loss = (alpha * log_prob - torch.min(q1(observations, action), q2(observations, action))).mean()
        actor_optimizer.zero_grad()
        loss.backward()
        actor_optimizer.step()
        with torch.no_grad():
            _, log_prob = actor.get_action(observations)
        alpha_loss = (-log_alpha.exp() * (log_prob - 1.0)).mean()
        alpha_optimizer.zero_grad()
        alpha_loss.backward()
        alpha_optimizer.step()
        return log_alpha.exp().item()

    @jit
    def follow():
        for ours, theirs in ((q1_target, q1), (q2_target, q2)):
            for to, param in zip(ours.parameters(), theirs.parameters(), strict=True):
                to.data.copy_(TAU * param.data + (1 - TAU) * to.data)

    observation, _ = env.reset(seed=0)
    total = 0.0
    for step in range(steps):
        if step < STARTS:
            action = env.action_space.sample()
        else:
            action = policy(torch.as_tensor(observation, device=device)[None])[0].cpu().numpy()
        following, reward, terminated, truncated, _ = env.step(action)
        for column, value in zip(columns, (observation, action, reward, following, terminated), strict=True):
            column[step % BUFFER] = value
        total += float(reward)
        observation = env.reset()[0] if terminated or truncated else following
        if step >= STARTS:
            at = numpy.random.randint(0, min(step, BUFFER), BATCH)
            batch = [torch.as_tensor(column[at], device=device) for column in columns]
            update_critics(*batch, alpha)
            if step % DELAY == 0:
                for _ in range(DELAY):
                    alpha = update_actor(batch[0], alpha)
            follow()
        tick()
    return {"reward": total, "alpha": alpha, **actor.state_dict()}
