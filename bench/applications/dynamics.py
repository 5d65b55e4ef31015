"""Molecular dynamics with a learnt potential: an equivariant message-passing network (as PaiNN, Schuett et al., 2021),
forces by autograd, Langevin dynamics by the BAOAB splitting (Leimkuhler and Matthews, 2013)."""

import math

import torch
from torch import nn

WHAT = "dynamics, 21 atoms, equivariant network"
STEPS = {"cpu": 200, "cuda": 1000}
ATOMS, FEATURES, WAVES, BLOCKS, CUTOFF = 21, 64, 20, 3, 5.0
TIME_STEP, FRICTION, TEMPERATURE = 0.002, 1.0, 0.3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.scalar = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.SiLU(), nn.Linear(FEATURES, 3 * FEATURES))
        self.radial = nn.Linear(WAVES, 3 * FEATURES)
        self.mix = nn.Linear(FEATURES, 2 * FEATURES, bias=False)
        self.update = nn.Sequential(nn.Linear(2 * FEATURES, FEATURES), nn.SiLU(), nn.Linear(FEATURES, 3 * FEATURES))

    def forward(self, s, v, waves, unit, sender, receiver):
        weights = self.radial(waves) * self.scalar(s)[sender]
        ds, gate, along = weights.split(FEATURES, dim=-1)
        dv = gate.unsqueeze(-1) * v[sender] + along.unsqueeze(-1) * unit.unsqueeze(1)
        s = s + torch.zeros_like(s).index_add(0, receiver, ds)
        v = v + torch.zeros_like(v).index_add(0, receiver, dv)
        u, w = self.mix(v.transpose(1, 2)).split(FEATURES, dim=-1)
        length = (w.square().sum(1) + 1e-8).sqrt()
        a, b, c = self.update(torch.cat([s, length], -1)).split(FEATURES, dim=-1)
        return s + a + b * (u * w).sum(1), v + c.unsqueeze(-1) * u.transpose(1, 2)


class Potential(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, FEATURES)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.energy = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.SiLU(), nn.Linear(FEATURES, 1))

    def forward(self, numbers, positions, sender, receiver):
        apart = positions[receiver] - positions[sender]
        distance = apart.norm(dim=-1, keepdim=True)
        n = torch.arange(1, WAVES + 1, device=positions.device)
        smooth = 0.5 * (torch.cos(math.pi * distance / CUTOFF) + 1) * (distance < CUTOFF)
        waves = torch.sin(n * math.pi * distance / CUTOFF) / distance * smooth
        s = self.embedding(numbers)
        v = torch.zeros(len(s), FEATURES, 3, device=positions.device)
        for block in self.blocks:
            s, v = block(s, v, waves, apart / distance, sender, receiver)
        return self.energy(s).sum() + 0.05 * positions.square().sum()


def run(jit, device, steps, tick):
    model = Potential().to(device).requires_grad_(False)
    numbers = torch.randint(1, 9, (ATOMS,), device=device)
    corners = torch.cartesian_prod(*[torch.arange(3.0)] * 3)[:ATOMS] * 1.4
    positions = (corners - corners.mean(0)).to(device)
    velocities = torch.randn(ATOMS, 3, device=device) * TEMPERATURE**0.5
    sender, receiver = (~torch.eye(ATOMS, dtype=torch.bool)).nonzero().T.to(device)
    keeps = math.exp(-FRICTION * TIME_STEP)
    heat = math.sqrt((1 - keeps**2) * TEMPERATURE)

    def forces_at(positions):
        positions = positions.detach().requires_grad_()
        energy = model(numbers, positions, sender, receiver)
        (gradient,) = torch.autograd.grad(energy, positions)
        return energy.detach(), -gradient

    @jit
    def advance(positions, velocities, forces):
        velocities = velocities + 0.5 * TIME_STEP * forces
        positions = positions + 0.5 * TIME_STEP * velocities
        velocities = keeps * velocities + heat * torch.randn_like(velocities)
        positions = positions + 0.5 * TIME_STEP * velocities
        energy, forces = forces_at(positions)
        velocities = velocities + 0.5 * TIME_STEP * forces
        return positions, velocities, forces, energy

    energy, forces = forces_at(positions)
    for _ in range(steps):
        positions, velocities, forces, energy = advance(positions, velocities, forces)
        tick()
    return {"positions": positions, "velocities": velocities, "energy": energy}
