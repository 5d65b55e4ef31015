"""Proximal policy optimization (Schulman et al., 2017) of four pendulums: continuous actions, generalized advantages,
clipped updates over minibatches, a rate that falls."""

import gymnasium
import numpy
import torch
from torch import nn
from torch.distributions import Normal

WHAT = "PPO, Pendulum"
STEPS = {"cpu": 10, "cuda": 40}  # rollouts
ENVS, ROLLOUT, EPOCHS, MINIBATCHES = 4, 128, 10, 8
GAMMA, LAMBDA, CLIP, VALUE_COEFFICIENT, MOST_NORM, RATE = 0.99, 0.95, 0.2, 0.5, 0.5, 3e-4


def layer(inputs, outputs, gain=2**0.5):
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, gain)
    nn.init.constant_(linear.bias, 0.0)
    return linear


class Agent(nn.Module):
    def __init__(self, observations, actions):
        super().__init__()
        self.critic = nn.Sequential(
            layer(observations, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, 1, gain=1.0)
        )
        self.mean = nn.Sequential(
            layer(observations, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, actions, gain=0.01)
        )
        self.log_std = nn.Parameter(torch.zeros(1, actions))

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        mean = self.mean(x)
        policy = Normal(mean, self.log_std.expand_as(mean).exp())
        if action is None:
            action = policy.sample()
        return action, policy.log_prob(action).sum(1), policy.entropy().sum(1), self.critic(x)


def run(jit, device, steps, tick):
    envs = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("Pendulum-v1") for _ in range(ENVS)])
    agent = Agent(3, 1).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=RATE, eps=1e-5)
    observations = torch.zeros(ROLLOUT, ENVS, 3, device=device)
    actions = torch.zeros(ROLLOUT, ENVS, 1, device=device)
    log_probs, rewards, dones, values = (torch.zeros(ROLLOUT, ENVS, device=device) for _ in range(4))

    @jit
    @torch.no_grad()
    def policy(observation):
        action, log_prob, _, value = agent.get_action_and_value(observation)
        return action, log_prob, value.flatten()

    @jit
    @torch.no_grad()
    def advantages_of(next_observation, next_done, rewards, dones, values):
        next_value, advantages, last = agent.get_value(next_observation).flatten(), torch.zeros_like(rewards), 0
        for t in reversed(range(ROLLOUT)):
            alive = 1.0 - (next_done if t == ROLLOUT - 1 else dones[t + 1])
            after = next_value if t == ROLLOUT - 1 else values[t + 1]
            delta = rewards[t] + GAMMA * after * alive - values[t]
            advantages[t] = last = delta + GAMMA * LAMBDA * alive * last
        return advantages, advantages + values

    @jit
    def update(observations, actions, log_probs, advantages, returns):
        _, log_prob, _, value = agent.get_action_and_value(observations, actions)
        ratio = (log_prob - log_probs).exp()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        worse = torch.max(-advantages * ratio, -advantages * torch.clamp(ratio, 1 - CLIP, 1 + CLIP)).mean()
        loss = worse + VALUE_COEFFICIENT * 0.5 * ((value.flatten() - returns) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), MOST_NORM)
        optimizer.step()
        return loss.detach()

    now, _ = envs.reset(seed=0)
    now, done = torch.as_tensor(now, device=device), torch.zeros(ENVS, device=device)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = (1.0 - step / steps) * RATE
        for t in range(ROLLOUT):
            observations[t], dones[t] = now, done
            action, log_prob, value = policy(now)
            actions[t], log_probs[t], values[t] = action, log_prob, value
            following, reward, terminated, truncated, _ = envs.step(action.cpu().numpy())
            rewards[t] = torch.as_tensor(reward, dtype=torch.float32, device=device)
            now = torch.as_tensor(following, dtype=torch.float32, device=device)
            done = torch.as_tensor(numpy.logical_or(terminated, truncated), dtype=torch.float32, device=device)
        advantages, returns = advantages_of(now, done, rewards, dones, values)
        flat = observations.reshape(-1, 3), actions.reshape(-1, 1), *(
            column.reshape(-1) for column in (log_probs, advantages, returns)
        )  # fmt: skip
        for _ in range(EPOCHS):
            order = torch.randperm(ROLLOUT * ENVS, device=device)
            for at in order.chunk(MINIBATCHES):
                update(*(column[at] for column in flat))
        tick()
    return {"reward": rewards.sum().item(), **agent.state_dict()}
