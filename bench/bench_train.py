"""What does training cost that is replayed: a whole step as one function, a differentiable function
with its backward, and fifty steps of models that people train, bit for bit those of eager?"""

from copy import deepcopy
from itertools import cycle
from time import perf_counter

import pytest
import torch
from bench_call import mlp
from conftest import peak_of, wait
from torch import nn
from torch.nn import functional as F

# isort: split
import cgt_core as core

import cgt

STEPS = 50
REPLAYS = STEPS - 5  # of those; the others warm, record, and record again for what has moved


def step_of(model, optimizer, loss_of):
    """Forward, backward and optimizer as one function of a batch."""

    def step(*batch):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def clock(step, batches=((),)):
    """For `compare`: a function from n to the seconds that n steps take until the GPU is done."""
    coming = cycle(batches)

    def seconds(n):
        wait()
        began = perf_counter()
        for _ in range(n):
            step(*next(coming))
        wait()
        return perf_counter() - began

    return seconds


# --- a whole step ------------------------------------------------------------------------------


def mse(model, x, y):
    return F.mse_loss(model(x), y)


def adam(params):
    return torch.optim.Adam(params, capturable=True)


def mlp_step(device, optimizer):
    torch.manual_seed(0)
    model = mlp(device, 4)
    return step_of(model, optimizer(model.parameters()), mse)


def test_whole_step_with_adam(cuda, compare, settled, figure, optimizer=adam):
    """Four layers, batch 32, and Adam's many small foreach kernels: one launch."""
    batch = tuple(torch.rand(32, 256, device=cuda) for _ in range(2))
    eager, ours = mlp_step(cuda, optimizer), cgt.jit(mlp_step(cuda, optimizer))
    for _ in range(5):
        assert torch.equal(ours(*batch), eager(*batch))
    settled(ours, batch)
    us = compare(
        {"ours": ours, "eager": eager, "batch": batch},
        calls=10,
        rounds=60,
        cgt="ours(*batch)",
        eager="eager(*batch)",
        cgt_wall=clock(ours, [batch]),
        eager_wall=clock(eager, [batch]),
    )
    wall = us["cgt_wall"] / us["eager_wall"]
    figure("whole step (4 layers, Adam foreach), CPU time", us["cgt"], "µs", at_most=12)
    figure("whole step, CPU time over eager", us["cgt"] / us["eager"], "×")
    figure("whole step, wall time", us["cgt_wall"], "µs")
    figure("whole step, wall time over eager", wall, "×", at_most=0.25)


# --- a differentiable function -----------------------------------------------------------------


def forward_backward(f, model, x):
    """One step over `f`, which is `model` in some way, its gradients cleared before."""
    params = list(model.parameters())

    def step():
        for p in params:
            p.grad = None
        f(x).mean().backward()

    return step


def settle(f, step):
    """Run the step until it only replays; forward and backward may count as one replay or as two."""
    others = lambda s: (s.warmups, s.records, s.eager)  # noqa: E731
    for _ in range(12):
        before = cgt.stats(f)
        step()
        after = cgt.stats(f)
        if after.replays > before.replays and others(after) == others(before):
            return
    pytest.fail(f"never came to replay forward and backward\n{cgt.explain(f)}")


# make_graphed_callables itself runs backwards on another stream than its accumulators.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
@pytest.mark.parametrize(("layers", "bound"), [(8, 0.7), (32, 0.35)])
def test_forward_and_backward_of_a_jitted_model(cuda, compare, figure, layers, bound):
    """`cgt.jit(model)` called with gradients enabled, the loss and `backward()` outside; two parameters
    a layer, batch 32."""
    model, x = mlp(cuda, layers), torch.rand(32, 256, device=cuda)
    twin, sample = deepcopy(model), deepcopy(model)
    jitted = cgt.jit(model)
    ours, eager = forward_backward(jitted, model, x), forward_backward(twin, twin, x)
    graphed = torch.cuda.make_graphed_callables(sample, (x,))
    graphed = forward_backward(graphed, sample, x)
    settle(jitted, ours)
    for step in (graphed, eager):
        step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    before = core.quiet_gradients()
    ours()
    assert core.quiet_gradients() - before == 2 * layers, "autograd's engine had tasks for them"
    us = compare(
        {"ours": ours, "graphed": graphed, "eager": eager},
        calls=50 if layers == 8 else 10,
        rounds=30,
        cgt="ours()",
        graphed="graphed()",
        eager="eager()",
        cgt_wall=clock(ours),
        graphed_wall=clock(graphed),
        eager_wall=clock(eager),
    )
    over = us["cgt"] / us["graphed"]
    walls = us["cgt_wall"] / us["graphed_wall"], us["cgt_wall"] / us["eager_wall"]
    what = f"forward + backward ({layers} layers)"
    figure(f"{what}, CPU time", us["cgt"], "µs")
    figure(f"{what} over make_graphed_callables", over, "×", at_most=bound)
    figure(f"{what} over eager", us["cgt"] / us["eager"], "×")
    figure(f"{what}, wall time", us["cgt_wall"], "µs")
    figure(f"{what} over make_graphed_callables, wall time", walls[0], "×")
    figure(f"{what} over eager, wall time", walls[1], "×")


def test_each_further_parameter(device, compare, figure):
    """Of a function that does next to nothing with its parameters, forward and backward: what one more
    of them costs, in its gradient above all."""
    few, many = 64, 192
    names = {}
    for n in (few, many):
        params = [torch.ones(4, device=device, requires_grad=True) for _ in range(n)]
        x = torch.ones(4 * n, device=device)

        def eager(x, params=params):
            return torch.cat(params) * x

        jitted = cgt.jit(eager)
        for name, f in (("ours", jitted), ("eager", eager)):

            def step(f=f, params=params, x=x):
                for p in params:
                    p.grad = None
                f(x).backward(x)

            names[f"{name}_{n}"] = step
        settle(jitted, names[f"ours_{n}"])
    subjects = {name: f"{name}()" for name in names}
    us = compare(names, calls=10, rounds=60, **subjects)
    each = {name: (us[f"{name}_{many}"] - us[f"{name}_{few}"]) / (many - few) for name in ("ours", "eager")}
    figure("forward + backward, each further parameter", 1000 * each["ours"], "ns")
    figure("each further parameter over eager's", each["ours"] / each["eager"], "×", at_most=0.4)


# --- models ------------------------------------------------------------------------------------
# Each function answers with another one that makes a step with fresh weights, and with batches. A
# batch is drawn where it is used: at an address of its own.


def bert(device, n, batch=8, length=128, **smaller):
    """Masked language model. Without an attention mask: transformers asks a mask whether it is all
    ones, which is a host read."""
    transformers = pytest.importorskip("transformers", reason="BERT is that library's")
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 1024} | smaller
    config = transformers.BertConfig(**sizes)

    def make():
        model = transformers.BertForMaskedLM(config).to(device)
        opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)
        return step_of(model, opt, lambda model, ids, labels: model(ids, labels=labels).loss)

    def draw():
        return torch.randint(1, config.vocab_size, (batch, length), device=device)

    return make, [(draw(), draw()) for _ in range(n)]


class DLRM(nn.Module):
    """Embeddings and the bottom MLP's result, multiplied pair by pair, into the top MLP."""

    def __init__(self, tables, rows, dense, width, hidden):
        super().__init__()
        bags = (nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.tables = nn.ModuleList(bags)
        self.bottom = nn.Sequential(
            nn.Linear(dense, hidden), nn.ReLU(),
            nn.Linear(hidden, hidden // 2), nn.ReLU(),
            nn.Linear(hidden // 2, width), nn.ReLU(),
        )  # fmt: skip
        self.register_buffer("pairs", torch.triu_indices(tables + 1, tables + 1, offset=1))
        self.top = nn.Sequential(
            nn.Linear(width + self.pairs.shape[1], hidden), nn.ReLU(),
            nn.Linear(hidden, hidden // 2), nn.ReLU(),
            nn.Linear(hidden // 2, 1),
        )  # fmt: skip

    def forward(self, dense, sparse):
        dense = self.bottom(dense)
        found = [table(ids) for table, ids in zip(self.tables, sparse, strict=True)]
        every = torch.stack([dense, *found], dim=1)
        products = torch.bmm(every, every.transpose(1, 2))
        products = products[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([dense, products], dim=1)).squeeze(1)


def dlrm(device, n, batch=2048, tables=26, rows=10_000, dense=13, width=64, hidden=512):
    """Recommendation: one id per table, SGD with dense gradients."""

    def make():
        model = DLRM(tables, rows, dense, width, hidden).to(device)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        return step_of(model, opt, loss_of)

    def loss_of(model, features, ids, clicked):
        return F.binary_cross_entropy_with_logits(model(features, ids), clicked)

    def draw():
        features = torch.rand(batch, dense, device=device)
        ids = torch.randint(rows, (tables, batch, 1), device=device)
        return features, ids, torch.randint(2, (batch,), device=device).float()

    return make, [draw() for _ in range(n)]


def resnet(device, n, batch=8, size=64):
    """ResNet-18 with SGD and momentum; batch norm writes its buffers."""
    models = pytest.importorskip("torchvision", reason="ResNet is that library's").models

    def make():
        model = models.resnet18(num_classes=100).to(device)
        opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        return step_of(model, opt, lambda model, x, y: F.cross_entropy(model(x), y))

    def draw():
        x = torch.rand(batch, 3, size, size, device=device)
        return x, torch.randint(100, (batch,), device=device)

    return make, [draw() for _ in range(n)]


def mask_rcnn(device, n, images=2, size=256, each=16, classes=91):
    """Mask R-CNN without what depends on values: matching and sampling gave `each` boxes for every
    level. Trained are the backbone, FPN, and the heads for proposals, boxes and masks."""
    vision = pytest.importorskip("torchvision", reason="Mask R-CNN is that library's")
    strides = (4, 8, 16, 32)
    cells = sum((size // s) ** 2 for s in strides) + (size // 64) ** 2

    def make():
        model = vision.models.detection.maskrcnn_resnet50_fpn(
            weights=None, weights_backbone=None, num_classes=classes
        )
        model = model.to(device)
        opt = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        return step_of(model, opt, loss_of)

    def pooled(levels, boxes, side):
        align = vision.ops.roi_align
        found = zip(levels, boxes, strides, strict=True)
        return torch.cat([align(x, b, side, 1 / s, sampling_ratio=2) for x, b, s in found])

    def loss_of(model, x, objects, boxes, labels, offsets, masks):
        maps = list(model.backbone(x).values())
        scores, deltas = model.rpn.head(maps)
        scores = torch.cat([s.flatten(1) for s in scores], dim=1)
        deltas = torch.cat([d.flatten(1) for d in deltas], dim=1)
        heads, rows = model.roi_heads, torch.arange(len(labels), device=labels.device)
        kinds, moves = heads.box_predictor(heads.box_head(pooled(maps[:4], boxes, 7)))
        drawn = heads.mask_predictor(heads.mask_head(pooled(maps[:4], boxes, 14)))
        return (
            F.binary_cross_entropy_with_logits(scores, objects)
            + F.smooth_l1_loss(deltas, torch.zeros_like(deltas))
            + F.cross_entropy(kinds, labels)
            + F.smooth_l1_loss(moves.reshape(len(labels), -1, 4)[rows, labels], offsets)
            + F.binary_cross_entropy_with_logits(drawn[rows, labels], masks)
        )

    def draw_boxes():
        at = torch.rand(each, 2, device=device) * size / 2
        of = torch.randint(images, (each, 1), device=device)
        return torch.cat([of, at, at + 16 + torch.rand_like(at) * (size / 2 - 16)], dim=1)

    def draw():
        k = each * len(strides)
        return (
            torch.rand(images, 3, size, size, device=device),
            torch.randint(2, (images, 3 * cells), device=device).float(),
            [draw_boxes() for _ in strides],
            torch.randint(1, classes, (k,), device=device),
            torch.rand(k, 4, device=device),
            torch.randint(2, (k, 28, 28), device=device).float(),
        )

    return make, [draw() for _ in range(n)]


# --- fifty steps -------------------------------------------------------------------------------

MODELS = {  # and what CUDA graphs were published to bring (PyTorch's blog, MLPerf)
    "BERT": (bert, 1.1),
    "DLRM": (dlrm, 2.2),
    "ResNet-18": (resnet, None),
    "Mask R-CNN": (mask_rcnn, 1.6),
}


def train(make, batches, wrap=lambda step: step):
    """A step of a fresh model, and the losses of one step for each batch; same seeds every time."""
    torch.manual_seed(0)
    step = wrap(make())
    torch.manual_seed(3)
    return step, torch.stack([step(*batch) for batch in batches])


@pytest.mark.parametrize("name", MODELS)
def test_fifty_steps(cuda, monkeypatch, compare, figure, name):
    """Every loss as in eager, then the time of a step, from one batch to the next."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    build, published = MODELS[name]
    make, batches = build(cuda, STEPS)
    eager, want = train(make, batches)
    again = train(make, batches)[1]
    ours, got = train(make, batches, cgt.jit)
    stats = cgt.stats(ours)
    assert stats.replays >= REPLAYS, cgt.explain(ours)
    assert want.isfinite().all() and len(want.unique()) > STEPS // 2
    off = lambda losses: ((losses - want).abs() / want.abs()).max().item()  # noqa: E731
    if torch.equal(want, again):
        differ = (got != want).sum().item()
        figure(f"{name}: losses of {STEPS} that are not eager's", differ, "", at_most=0)
        assert differ == 0, cgt.explain(ours)
    else:
        # Mask R-CNN: the gradient of roi_align is added up with atomics. (Under deterministic
        # algorithms torchvision would compile another roi_align.)
        figure(f"{name}: losses off eager's, relative", off(got), "")
        figure(f"{name}: eager's losses off themselves, relative", off(again), "")
        assert off(got) <= max(0.01, 5 * off(again)), cgt.explain(ours)
    us = compare({}, calls=10, rounds=9, cgt=clock(ours, batches), eager=clock(eager, batches))
    ratio, bound = us["cgt"] / us["eager"], None if published is None else round(1 / published, 3)
    graphs = "" if published is None else f" (published graphs: {published}x)"
    figure(f"{name}: step, wall time", us["cgt"], "µs", detail=True)
    figure(f"{name}: step, wall time over eager", ratio, "×", at_most=bound)
    figure(f"{name}: speed-up over eager{graphs}", 1 / ratio, "×")


def test_memory_of_two_differentiable_functions(cuda, benchmark, figure):
    """Forward and backward through two of six layers each, where gradients of weights are as large as
    activations (16 MiB): the pool of all recordings over what eager has allocated at its peak."""
    halves, x = [mlp(cuda, 6, 2048) for _ in range(2)], torch.rand(2048, 2048, device=cuda)

    def step(first, second):
        second(first(x)).mean().backward()
        for half in halves:
            half.zero_grad()

    step(*halves)  # cuBLAS has its workspaces
    cgt.reset()  # with what earlier benches left in the pool
    peak, before = peak_of(lambda: step(*halves)), cgt.stats().pool_bytes
    jitted = [cgt.jit(half) for half in halves]
    benchmark.pedantic(lambda: [step(*jitted) for _ in range(8)], rounds=1)
    assert all(cgt.stats(f).backward.replays >= 3 for f in jitted)
    pool = cgt.stats().pool_bytes - before
    figure("memory of forward + backward through two functions over eager", pool / peak, "×", at_most=1.1)
