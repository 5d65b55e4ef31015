"""Node classification with a graph convolution (Kipf and Welling, 2017) in torch_geometric, as its examples write it: one
function that trains, one that tests, and the mode set in each."""

import torch
import torch.nn.functional as F
from torch_geometric.nn import GCNConv

WHAT = "GCN, torch_geometric"
STEPS = {"cpu": 150, "cuda": 400}
NODES, EDGES, FEATURES, CLASSES = 2708, 10556, 128, 7


class GCN(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = GCNConv(FEATURES, 16, cached=True)
        self.conv2 = GCNConv(16, CLASSES, cached=True)

    def forward(self, x, edge_index):
        x = F.dropout(x, p=0.5, training=self.training)
        x = self.conv1(x, edge_index).relu()
        x = F.dropout(x, p=0.5, training=self.training)
        return self.conv2(x, edge_index)


def run(jit, device, steps, tick):
    x, y = torch.rand(NODES, FEATURES, device=device), torch.randint(0, CLASSES, (NODES,), device=device)
    edge_index = torch.randint(0, NODES, (2, EDGES), device=device)
    train_mask = torch.rand(NODES, device=device) < 0.2
    model = GCN().to(device)
    optimizer = torch.optim.Adam(
        [
            {"params": model.conv1.parameters(), "weight_decay": 5e-4},
            {"params": model.conv2.parameters(), "weight_decay": 0},
        ],
        lr=0.01,
    )

    @jit
    def train():
        model.train()
        optimizer.zero_grad()
        out = model(x, edge_index)
        loss = F.cross_entropy(out[train_mask], y[train_mask])
        loss.backward()
        optimizer.step()
        return loss.item()

    @jit
    @torch.no_grad()
    def test():
        model.eval()
        pred = model(x, edge_index).argmax(dim=-1)
        return (pred == y)[train_mask].float().mean().item()

    for _ in range(steps):
        loss, accuracy = train(), test()
        tick()
    return {"loss": loss, "accuracy": accuracy, **model.state_dict()}
