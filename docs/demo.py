"""The demo: `make demo`.

A small transformer learns to write like Python's own help pages.

The same training runs twice from the same seed, once as ordinary PyTorch and once with the whole step jitted: forward,
backward and optimizer are then one recording, replayed at every step. All losses must agree to the last bit, dropout
included. Then the model writes, one jitted forward per character.
"""

import argparse
import statistics
import sys
import time
from pydoc_data.topics import topics  # some 450 kB of English that every Python brings along

import torch
from torch import nn
from torch.nn import functional as F

import cgt

CONTEXT, BATCH, WIDTH, HEADS, LAYERS = 32, 8, 64, 4, 2
SEED = 1234
RED, GREEN = 31, 32
WARM = 5  # steps left out of the timing: warm-up, recording, first replays
PROMPT = "The value of the expression is "


# --- text -------------------------------------------------------------------------------------------------------------

TEXT = "\n".join(topics[name] for name in sorted(topics))
ALPHABET = sorted(set(TEXT))
NUMBER = {character: i for i, character in enumerate(ALPHABET)}


def encode(text):
    return torch.tensor([NUMBER[character] for character in text])


def decode(numbers):
    return "".join(ALPHABET[i] for i in numbers)


# --- the model: written as anybody would, it knows nothing of cgt -----------------------------------------------------


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("future", torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1))

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / (WIDTH // HEADS) ** 0.5
        weights = self.drop(scores.masked_fill(self.future, float("-inf")).softmax(-1))
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, WIDTH))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend = Attention()
        self.think = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.think(self.norm2(x))


class Writer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(len(ALPHABET), WIDTH)
        self.position = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(ALPHABET)))

    def forward(self, characters):
        return self.head(self.blocks(self.embed(characters) + self.position))


# --- training and writing: here is cgt --------------------------------------------------------------------------------


def train(steps, device, transform, label):
    """Train from the same seed whatever `transform` is; it gets the step as a function and returns what is called."""
    torch.manual_seed(SEED)
    model = Writer().to(device)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)

    @transform
    def train_step(batch):
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        return loss.detach()

    losses, seconds = [], []
    for batch in progress(batches(steps, device), steps, label):
        start = time.perf_counter()
        cgt.step()  # a new iteration: the memory of the last one may be used again
        losses.append(train_step(batch).item())  # .item() waits for the device, so that the clock sees all the work
        seconds.append(time.perf_counter() - start)
    return model, train_step, losses, statistics.median(seconds[WARM:] or seconds)


def write(model, device, length, temperature=0.7):
    """Let the model go on from PROMPT: one jitted forward per character."""
    model.eval()

    @cgt.jit
    @torch.no_grad()
    def next_logits(window):
        return model(window)[0, -1]

    window = encode(PROMPT.rjust(CONTEXT)[-CONTEXT:]).to(device)[None]
    written = []
    for _ in range(length):
        cgt.step()
        character = torch.multinomial((next_logits(window) / temperature).softmax(-1), 1)
        window = torch.cat([window[:, 1:], character[None]], 1)
        written.append(character.item())
    return PROMPT + decode(written)


def batches(steps, device):
    """`steps` batches of random passages, always the same ones."""
    text, order = encode(TEXT), torch.Generator().manual_seed(SEED)
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1), generator=order)
        yield text[starts + torch.arange(CONTEXT + 1)].to(device)


# --- the report -------------------------------------------------------------------------------------------------------


def progress(items, total, label):
    try:
        from tqdm import tqdm
    except ImportError:
        return plain_progress(items, total, label)
    if not sys.stderr.isatty():  # it would write a line anew where every line stays
        return plain_progress(items, total, label)
    return tqdm(items, label, total, mininterval=0.2, leave=False)


def plain_progress(items, total, label):
    began = last = time.monotonic()
    for done, item in enumerate(items):
        now = time.monotonic()
        if done and now - last > 3:
            last = now
            left = (now - began) / done * (total - done)
            print(f"{label}: step {done} of {total}, about {left:.0f} s left", flush=True)
        yield item


def first_difference(ours, theirs):
    """Index of the first pair of floats that differ in any bit, or None. float.hex() is exact and tells -0.0 from
    0.0."""
    pairs = enumerate(zip(ours, theirs, strict=True))
    return next((i for i, (a, b) in pairs if a.hex() != b.hex()), None)


def coloured(text, colour):
    return f"\033[1;{colour}m{text}\033[0m" if sys.stdout.isatty() else text


def summary(steps, device, eager, ours, replays):
    """What happened, what it means, and where to go on."""
    gain = eager / ours
    made = f"{1e3 * ours:.2f} ms instead of {1e3 * eager:.2f} ms"
    if device.type == "cuda":
        means = "A replay is one launch: the GPU waits for Python no more."
    else:
        means = "On a CPU only Python's own share of a step goes away. A GPU also waits less between kernels: see README.md."
    return [
        f"The step (forward, backward, AdamW) was recorded once and replayed in {replays} of {steps} calls.",
        f"A step takes {made} on this machine: {gain:.1f} × as fast. All {steps} losses are equal to eager's, bit by bit.",
        means,
        "For your own function: print(cgt.doctor(f, *args)). It tells what replays, what does not, and when it pays.",
        "Go on with docs/tutorial.md.",
    ]


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=500, help="training steps, run twice (default: 500)")
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu, cuda, cuda:1 ... (default: cuda where there is one)",
    )
    parser.add_argument("--length", type=int, default=400, help="characters to write afterwards (default: 400)")
    options = parser.parse_args()
    if options.steps < 1 or options.length < 0:
        parser.error("--steps must be at least 1 and --length at least 0")
    return options


def main() -> int:
    options = arguments()
    device = torch.device(options.device)
    torch.set_num_threads(1)  # on a CPU the threads of tensors as small as these wait for each other most of the time
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU (host driver)"
    print(f"{LAYERS} layers of width {WIDTH}, batch {BATCH}, {options.steps} steps, on {where}")

    _, _, eager_losses, eager = train(options.steps, device, lambda f: f, "eager")
    model, train_step, losses, ours = train(options.steps, device, cgt.jit, "cgt")
    text = write(model, device, options.length)
    print(f"\nloss {losses[0]:.3f} -> {losses[-1]:.3f}; what the model writes now:\n\n{text}\n")
    print(cgt.explain(train_step), end="\n\n")

    i = first_difference(losses, eager_losses)
    if i is not None:
        print(coloured(f"the losses are not eager's: step {i}, cgt {losses[i]!r}, eager {eager_losses[i]!r}", RED))
        return 1
    for line in summary(options.steps, device, eager, ours, cgt.stats(train_step).replays):
        print(coloured(line, GREEN))
    return 0


if __name__ == "__main__":
    sys.exit(main())
