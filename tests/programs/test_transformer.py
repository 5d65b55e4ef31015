"""What people train: a small transformer with dropout, autocast, checkpointing, accumulation, clipping
and a schedule. A hundred steps are bit for bit those of an eager twin."""

import cgt_core as core
import pytest
import torch
import torch.nn.functional as F
from test_autograd import both, same
from torch import nn
from torch.utils.checkpoint import checkpoint

import cgt

pytestmark = pytest.mark.skipif(core.debug_build(), reason="long, and the same in both builds: the release suite does it")

STEPS, MICRO, WORDS, LENGTH, WIDTH = 100, 2, 50, 12, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.mlp = nn.Linear(WIDTH, WIDTH), nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH), nn.Dropout(0.1)
        )  # fmt: skip

    def forward(self, h):
        n, t, _ = h.shape
        q, k, v = self.qkv(self.norm(h)).view(n, t, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4).unbind()
        p = 0.1 if self.training else 0.0
        a = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        h = h + F.dropout(self.out(a.transpose(1, 2).reshape(n, t, WIDTH)), p, self.training)
        return h + self.mlp(h)


class Transformer(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.reentrant = nn.ModuleList(Block() for _ in range(2)), reentrant
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)

    def forward(self, ids, targets):
        h = self.drop(self.words(ids) + self.places.weight)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=self.reentrant)
        logits = self.norm(h) @ self.words.weight.t()  # tied
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def tokens(device):
    generator = torch.Generator().manual_seed(2)
    draw = lambda: torch.randint(WORDS, (4, LENGTH), generator=generator).to(device)  # noqa: E731
    return [[(draw(), draw()) for _ in range(MICRO)] for _ in range(STEPS)]


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("style", ["differentiable", "whole step"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_hundred_steps(device, style, reentrant, precision):
    def train(wrap):
        torch.manual_seed(0)
        model = Transformer(reentrant).to(device)
        rate = torch.tensor(3e-3, device=device) if style == "whole step" else 3e-3
        opt = torch.optim.AdamW(
            model.parameters(), lr=rate, fused=True, capturable=device.type == "cuda"
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 3e-3, STEPS, cycle_momentum=False)

        def loss_of(ids, targets):
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                return model(ids, targets) / MICRO

        def step(batches):
            opt.zero_grad()
            losses = []
            for ids, targets in batches:
                loss = loss_of(ids, targets)
                loss.backward()
                losses.append(loss.detach())
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            return losses, norm

        if style == "whole step":
            step = f = wrap(step)
        else:
            loss_of = f = wrap(loss_of)
        seen = []
        for batches in tokens(device):
            cgt.step()
            losses, norm = step(batches)
            seen.append([*(loss.clone() for loss in losses), norm.clone()])
            schedule.step()
        return f, [seen, [p.detach().clone() for p in model.parameters()]]

    (_, want), (f, got) = both(train, device)
    for k, (a, b) in enumerate(zip(want[0], got[0], strict=True)):
        assert same(a, b), f"step {k}"
    assert same(want[1], got[1])
    assert got[0][-1][0] < got[0][0][0]
    s, calls = cgt.stats(f), STEPS * (1 if style == "whole step" else MICRO)
    assert s.replays >= calls - 6, cgt.explain(f)
    if style == "differentiable":
        assert s.backward.replays >= calls - 12, cgt.explain(f)
