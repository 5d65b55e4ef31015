"""Functions that do what real ones do besides computing, for test_wild_programs.py. All take a dict of
parameters and two tensors; what they reach besides lies in W."""

import itertools
import random
import time
import types

import numpy
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

W = types.SimpleNamespace()  # begun anew by each run
dropout = torch.nn.functional.dropout


class Log:
    """State that functions change and mostly do not read."""

    def __init__(self):
        self.calls, self.rate, self.losses, self.last = 0, 1.0, [], None


def begin_world():
    """Another world like the first."""
    vars(W).clear()
    W.s, W.table = types.SimpleNamespace(last=None, n=2, shape=0), {"last": None}
    W.found, W.counter, W.log = [], itertools.count(), Log()
    W.random, W.numpy = random.Random(3), numpy.random.default_rng(3)
    random.seed(3), numpy.random.seed(3), torch.manual_seed(7)
    W.collectives = collectives()


def end_world():
    vars(W).clear()


def collectives():
    """How many there were in this process; those of NCCL replay, and its group does not count kernels."""
    if not dist.is_initialized() or "nccl" in dist.get_backend():
        return 0
    return dist.distributed_c10d._get_default_group()._get_sequence_number_for_group()


def world_now():
    """Tensors that the world holds, and what tells whether somebody drew from it."""
    drawn = (
        hash(random.getstate()), hash(W.random.getstate()), W.numpy.bit_generator.state["state"]["state"],
        numpy.random.get_state()[2], repr(W.counter), W.s.n, W.s.shape, len(W.found),
        collectives() - W.collectives, W.log.calls, W.log.rate, len(W.log.losses),
    )  # fmt: skip
    return [W.s.last, W.table["last"], W.log.last, *W.found[-3:], *W.log.losses[-3:]], drawn


# --- functions ------------------------------------------------------------------------------------


def scale(p, x, y):
    return x * p["w"] + y


def views(p, x, y):
    z = x * 2 - y
    return {"input": x[1:], "some": z[:5], "all": z}


def added(p, x, y):
    x.add_(1)
    return y - x


def dropped(p, x, y):
    return dropout(x.tanh(), 0.5) + y


class Kept(torch.autograd.Function):
    """Keeps a view of its argument, past autograd."""

    @staticmethod
    def forward(ctx, x):
        ctx.x = x.detach()
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.x.cos()


class KeptArgument(torch.autograd.Function):
    """Keeps a view of what the jitted function was called with."""

    @staticmethod
    def forward(ctx, w, x):
        ctx.x = x.detach()
        return w * x

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.x, None


class KeptPart(torch.autograd.Function):
    """Keeps a part of its argument, and a tensor of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.part, ctx.made = x.detach()[1:], x * 0.5
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.made + ctx.part.sum()


def custom(p, x, y):
    return Kept.apply(x * p["w"]) + Kept.apply(y * p["w"])


def custom_argument(p, x, y):
    return KeptArgument.apply(p["w"], x) + y


def custom_part(p, x, y):
    return p["w"] * KeptPart.apply(x) + KeptPart.apply(p["w"] * y.detach())


def hooked(p, x, y):
    z, kept = x * p["w"], y.detach()
    if z.requires_grad:
        z.register_hook(lambda grad: grad if grad is None else grad * kept)  # as autograd gives it
    return z + 1


def closed_over(p, x, y):
    kept = x.detach()[:]
    return checkpoint(lambda a: (a * kept).tanh(), p["w"] * 2, use_reentrant=False) + y


def appended(p, x, y):
    W.found.append(x * 2)
    return x[1:], y.cos()


def stored(p, x, y):
    W.s.last = x
    return x * 2 + y


def stored_part(p, x, y):
    W.s.last = x[1:]
    return x * 2 - y


def stored_made(p, x, y):
    W.s.last = z = x.detach() * 2
    W.s.shape = z.shape[0]
    return z + y


def stored_number(p, x, y):
    W.s.n = 3
    return x + y


def stored_item(p, x, y):
    W.table["last"] = y
    return x - y


def reads_store(p, x, y):
    return x * W.s.n + y


def counted(p, x, y):
    W.log.calls += 1
    W.log.rate *= 0.9
    return x * p["w"] - y


def logged(p, x, y):
    W.log.losses.append((x.detach() * 2).sum())
    W.log.last = y.detach().sin()
    return x.detach() + W.log.last.cos()


def logged_alone(p, x, y):
    z = x.detach() * y.detach()
    W.log.last = z
    W.log.losses.append(z)
    W.log.calls += 2
    return z


def reads_count(p, x, y):
    return x * W.log.calls + y


def draws_random(p, x, y):
    return x * random.random() + y


def draws_greedy(p, x, y):
    return x.sin() if random.random() < 0.3 else y.cos() + x


def draws_own(p, x, y):
    return x * W.random.random() + W.random.randint(0, 3)


def draws_numpy(p, x, y):
    return x * float(numpy.random.rand()) + y


def draws_numpy_own(p, x, y):
    return x + float(W.numpy.standard_normal()) * y


def draws_counter(p, x, y):
    return x + next(W.counter)


def draws_clock(p, x, y):
    return x * 2 + y, time.monotonic_ns()


def reduced(p, x, y):
    z = x.detach() * 2
    dist.all_reduce(z)
    return z + y


def broadcast(p, x, y):
    dist.broadcast(z := x.detach().clone(), 0)
    return z * 2


def gathered(p, x, y):
    parts = [torch.zeros_like(x)]
    dist.all_gather(parts, x.detach())
    return parts[0] * 2 + y


def exchanged(p, x, y):
    into = torch.zeros_like(x)
    dist.all_to_all_single(into, x.detach().contiguous(), async_op=True).wait()
    return into - y


def told(p, x, y):
    z = x * p["w"] - y
    return {"largest": z.max().item(), "z": z, "sum": x.sum().item()}


PLAIN = (scale, views, added, dropped, told)
KEEPERS = (custom, custom_argument, custom_part, hooked, closed_over)
ALONE = (scale, views, added, told, *KEEPERS)  # depend on nothing but arguments: may run at any time
STORES = (
    appended, stored, stored_part, stored_made, stored_number, stored_item, reads_store, counted, logged, logged_alone, reads_count,
)  # fmt: skip
DRAWS = (
    draws_random, draws_greedy, draws_own, draws_numpy, draws_numpy_own, draws_counter,
    draws_clock,
)  # fmt: skip
COLLECTIVES = (reduced, broadcast, gathered, exchanged)
