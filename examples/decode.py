"""Decoding one token at a time: a plain loop, a cache that is written in place, a test for the end of the text.

    python examples/decode.py
"""

import time

import torch
from torch import nn

import cgt

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_num_threads(1)  # tensors as small as these: on a CPU further threads only wait for each other
VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH, END = 64, 64, 4, 2, 96, 0


class Attention(nn.Module):
    """With keys and values of all tokens so far in buffers."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("keys", torch.zeros(HEADS, LENGTH, WIDTH // HEADS))
        self.register_buffer("values", torch.zeros(HEADS, LENGTH, WIDTH // HEADS))

    def forward(self, x, at):
        q, k, v = self.qkv(x).view(3, HEADS, 1, -1)
        self.keys.index_copy_(1, at, k)
        self.values.index_copy_(1, at, v)
        future = torch.arange(LENGTH, device=x.device) > at
        weights = (q @ self.keys.transpose(1, 2) / (WIDTH // HEADS) ** 0.5).masked_fill(future, float("-inf")).softmax(-1)
        return self.out((weights @ self.values).reshape(WIDTH))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.attention = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.think = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, token, at):
        x = (self.embed(token) + self.position(at))[0]
        for attend, think in zip(self.attention, self.think, strict=True):
            x = x + attend(x, at)
            x = x + think(x)
        return self.head(x).argmax()[None]


def generate(model, next_token):
    token, at, text = torch.tensor([7], device=DEVICE), torch.zeros(1, dtype=torch.long, device=DEVICE), []
    seconds = []
    while len(text) < LENGTH:
        began = time.perf_counter()
        token = next_token(token, at)
        at += 1
        text.append(token.item())
        seconds.append(time.perf_counter() - began)
        if text[-1] == END:
            break
    return text, sorted(seconds)[len(seconds) // 2]


@torch.no_grad()
def main():
    torch.manual_seed(0)
    model = Decoder().to(DEVICE).eval()
    wanted, eager = generate(model, model)
    cgt.jit(model)
    text, jitted = generate(model, model)
    assert text == wanted
    print(f"{len(text)} tokens, {cgt.stats(model).replays} replayed, {text[:8]} ...")
    print(f"{eager / jitted:.1f} x faster than eager ({1 / eager:.0f} and {1 / jitted:.0f} tokens/s), the same tokens")


if __name__ == "__main__":
    main()
