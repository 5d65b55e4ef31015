"""Ordinary training code in one jitted step: modules with state of their own, the optimizers of
torch.optim, schedules, autocast and gradient scaling. Bit for bit those of an eager twin."""

import contextlib
import types
import weakref

import cgt_core as core
import pytest
import torch
import torch.nn.functional as F
from helpers import tells, values
from torch import nn, optim
from torch.nn.utils import parametrizations as P
from torch.optim import lr_scheduler as S
from torch.optim import swa_utils

import cgt
from cgt.cuts import segments
from cgt.numbers import counters

pytestmark = pytest.mark.skipif(core.debug_build(), reason="long, and the same in both builds: the release suite does it")

N, BATCH, WIDTH, WORDS, LENGTH = 10, 8, 6, 11, 5


def identity(f):
    return f


def nothing(*_):
    return None


def counts(s):
    return s.warmups, s.records, s.replays, s.eager


# --- the twins ---------------------------------------------------------------------------------

INPUTS = {"vectors": (WIDTH,), "images": (2, 4, 4), "sequences": (LENGTH, WIDTH)}


def data_of(device, kind, n):
    """Inputs and targets at different addresses."""
    g = torch.Generator().manual_seed(1)
    data = []
    for _ in range(n):
        if kind == "words":
            text = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=g)
            pair = text[:, :-1].clone(), text[:, 1:].clone()
        else:
            x = torch.randn(BATCH, *INPUTS[kind], generator=g)
            pair = x, torch.randint(3, (BATCH,), generator=g)
        data.append(tuple(t.to(device) for t in pair))
    return data


def sgd(parameters):
    return optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters):
    return optim.Adam(parameters, lr=0.01, fused=True, capturable=True)


def mlp():
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 3))


def loss_of(model, x, y):
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def new_twin(device, wrap, make, optimizer=sgd, clip=nothing, also=lambda _: nothing, whole=True):
    """A model, its optimizer and a step, whole or without the optimizer's; `also(twin)` makes what the
    step does at its end."""
    torch.manual_seed(0)
    twin = types.SimpleNamespace(model=make().to(device), more={})
    model = twin.model
    opt = twin.opt = optimizer(list(model.parameters()))
    at_end = also(twin)

    def step(x, y):
        opt.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        clip(model)
        if whole:
            opt.step()
        at_end()
        return loss.detach()

    twin.step = wrap(step)
    return twin


def train(twin, data, between):
    torch.manual_seed(3)
    losses = []
    for k, (x, y) in enumerate(data):
        between(twin, k)
        losses.append(twin.step(x, y))
        twin.last = losses[-1]
    return losses


def final(twin):
    """All that training changed, by name: tensors with their versions, and numbers."""
    found = dict(twin.more)
    for name, t in (*twin.model.named_parameters(), *twin.model.named_buffers()):
        found |= {name: t, name + ".grad": t.grad, name + " version": t._version}
        found |= {f"{name} {key}": value for key, value in twin.opt.state.get(t, {}).items()}
    return found


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(got[name].to_dense(), value.to_dense()), name
        else:
            assert got[name] == value, name


def compare(device, *args, new=new_twin, kind="vectors", n=N, between=nothing, spoil=(), **options):
    """Train twice; the jitted step's stats after every loss and final value was compared. Batches in
    `spoil` have infinite inputs."""
    data = data_of(device, kind, n)
    for k in spoil:
        data[k][0].fill_(float("inf"))
    eager, jitted = (new(device, wrap, *args, **options) for wrap in (identity, cgt.jit))
    want, got = train(eager, data, between), train(jitted, data, between)
    for k, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(a, b) or (k in spoil and a.isnan() and b.isnan()), f"loss {k}"
    assert len({x.item() for x in want}) > n // 2
    assert_same(final(jitted), final(eager))
    return cgt.stats(jitted.step)


def assert_replays(s, n=N, warmups=1):
    assert counts(s) == (warmups, 1, n - 1 - warmups, 0), s.reasons


def assert_eager(s, *words, n=N):
    assert counts(s) == (1, 0, 0, n - 1), s.reasons
    for reason in s.reasons:
        assert __file__ in reason and all(word in reason for word in words), reason


# --- modules -----------------------------------------------------------------------------------


class Buffers(nn.Module):
    """Buffers that the forward updates in place or replaces."""

    def __init__(self, how):
        super().__init__()
        self.how, self.enter, self.leave = how, nn.Linear(WIDTH, 8), nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("hidden", torch.ones(8), persistent=False)

    def forward(self, x):
        h = self.enter(x).tanh()
        now = h.detach().mean(0)
        if self.how == "add_":
            self.mean.mul_(0.9).add_(now, alpha=0.1)
            self.calls.add_(1)
        elif self.how == "copy_":
            self.mean.copy_(0.9 * self.mean + 0.1 * now)
            self.calls.copy_(self.calls + 1)
        elif self.how == "+=":
            self.mean += 0.1 * (now - self.mean)
            self.calls += 1
            self.hidden[1:] *= 0.99
        elif self.how == ".data":
            self.mean.lerp_(now, 0.1)
            self.hidden.data.mul_(0.99)
            self.calls.data += 1
        elif self.how == "replaced":
            self.mean = self.mean * 0.9 + now * 0.1
            self.calls = self.calls + 1
        return self.leave((h - self.mean) * self.hidden / (1 + self.calls))


class Piped(nn.Module):
    """A core, what `pick` gets from it, and a last layer."""

    def __init__(self, core, pick, leave, tied=False):
        super().__init__()
        self.core, self.pick, self.leave = core, pick, leave
        if tied:
            leave.weight = core.weight

    def forward(self, x):
        return self.leave(self.pick(self.core, x))


def words(**options):
    tied = options.pop("tied", False)
    core = nn.Embedding(WORDS, 8, **options)
    # The GPU's kernel for max_norm scales a row by each of its words that does not stand behind the same one, in a race.
    look_up = (lambda core, x: core(x.flatten().sort()[0].view_as(x))) if core.max_norm else (lambda core, x: core(x))
    return Piped(core, look_up, nn.Linear(8, WORDS), tied)


def recurrent(cls, width=8, **options):
    core = cls(WIDTH, 8, batch_first=True, **options)
    return Piped(core, lambda core, x: core(x)[0][:, -1], nn.Linear(width, 3))


def attention(**options):
    def pick(core, x):
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=x.device)
        return core(x, x, x, attn_mask=mask, **options)[0].mean(1)

    core = nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True)
    return Piped(core, pick, nn.Linear(WIDTH, 3))


def encoder():
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
    core = nn.TransformerEncoder(layer, 2)
    return Piped(core, lambda core, x: core(x).mean(1), nn.Linear(WIDTH, 3))


def normed(norm):
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.Unflatten(1, (4, 2, 2)), norm, nn.Flatten(), nn.Linear(16, 3)
    )


def images(width, *layers):
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width, 3))


def frozen(module):
    module.weight.requires_grad_(False)
    return module


def parametrized(how, **options):
    return lambda: nn.Sequential(how(nn.Linear(WIDTH, 8), **options), nn.Tanh(), nn.Linear(8, 3))


MODULES = {
    "vectors": {
        **{f"buffer {how}": lambda how=how: Buffers(how) for how in ("add_", "copy_", "+=", ".data")},
        "batch norm": lambda: normed(nn.BatchNorm2d(4)),
        "batch norm, no stats": lambda: normed(nn.BatchNorm2d(4, track_running_stats=False)),
        "batch norm, no affine": lambda: normed(nn.BatchNorm2d(4, affine=False)),
        "instance norm": lambda: normed(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
        "group norm": lambda: normed(nn.GroupNorm(2, 4)),
        "channel dropout": lambda: normed(nn.Dropout2d(0.3)),
        "rrelu": lambda: normed(nn.RReLU()),
        "weight norm": parametrized(P.weight_norm),
        "spectral norm": parametrized(P.spectral_norm, n_power_iterations=2),
        **{f"orthogonal {how}": parametrized(P.orthogonal, orthogonal_map=how)
           for how in ("matrix_exp", "cayley", "householder")},
    },
    "images": {
        "first convolution": lambda: images(16, nn.Conv2d(2, 4, 3), nn.ReLU()),
        "first convolution, frozen weight": lambda: images(16, frozen(nn.Conv2d(2, 4, 3))),
        "first convolution, transposed": lambda: images(50, nn.ConvTranspose2d(2, 2, 2)),
        "second convolution": lambda: images(16, nn.Linear(4, 4), nn.Conv2d(2, 4, 3)),
        "second convolution, no bias": lambda: images(16, nn.Linear(4, 4), nn.Conv2d(2, 4, 3, bias=False)),
        "first norms": lambda: images(32, nn.GroupNorm(1, 2), nn.BatchNorm2d(2)),
        "pools": lambda: images(8, nn.Linear(4, 4), nn.MaxPool2d(2, 1), nn.AvgPool2d(2, 1)),
    },
    "words": {
        "embedding, tied": lambda: words(tied=True),
        "embedding, tied, padding": lambda: words(tied=True, padding_idx=0),
        "embedding, by frequency": lambda: words(scale_grad_by_freq=True),
        "embedding, max norm": lambda: words(max_norm=1.0),
    },
    "sequences": {
        "lstm": lambda: recurrent(nn.LSTM, 16, num_layers=2, dropout=0.3, bidirectional=True),
        "gru": lambda: recurrent(nn.GRU),
        "rnn": lambda: recurrent(nn.RNN),
        "attention": attention,
        "attention, no weights": lambda: attention(need_weights=False),
        "attention, causal": lambda: attention(need_weights=False, is_causal=True),
        "encoder": encoder,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind, name", [(kind, name) for kind in MODULES for name in MODULES[kind]])
def test_module(device, kind, name):
    s = compare(device, MODULES[kind][name], kind=kind)
    if device.type == "cuda" and name in EAGER_ON_CUDA:
        assert counts(s) == (1, 0, 0, N - 1) and all(EAGER_ON_CUDA[name] in reason for reason in s.reasons), s.reasons
        return
    # The first call fills the buffer from which cuDNN draws its dropout.
    assert_replays(s, warmups=2 if device.type == "cuda" and name == "lstm" else 1)


EAGER_ON_CUDA = {  # with words of the reason
    "orthogonal matrix_exp": "cannot be captured",  # in the backward, too
}  # fmt: skip


def test_module_whose_buffer_is_another_tensor_at_each_call(device):
    assert counts(compare(device, lambda: Buffers("replaced"), kind="vectors", optimizer=sgd)) == (1, 1, 7, 1)  # then it is followed


EAGER_MODULES = {  # with words of the reason
    "sparse": ("words", lambda: nn.Embedding(WORDS, WORDS, sparse=True), "sparse"),
}


def test_weight_that_each_forward_replaces(device):
    """Nobody looks at the last one, which has a graph of its own."""
    s = compare(device, parametrized(nn.utils.spectral_norm))
    assert counts(s) == (1, 1, N - 3, 1), s.reasons


@pytest.mark.parametrize("name", EAGER_MODULES)
def test_module_that_runs_eagerly(device, name):
    if name == "sparse" and device.type == "cuda":
        pytest.skip("sparse gradients are added in any order there: eager differs from itself")
    kind, make, word = EAGER_MODULES[name]
    for optimizer in (optim.SGD, optim.SparseAdam) if name == "sparse" else (sgd,):
        assert_eager(compare(device, make, kind=kind, optimizer=optimizer), word)


def test_module_that_computes_with_a_count(device):
    """The count is another number at each call: each recording is for its own."""
    s = compare(device, lambda: normed(nn.BatchNorm2d(4, momentum=None)))
    assert s.replays == 0 and any("no recording yet" in reason for reason in s.reasons), s.reasons


MODES = {
    "dropout": mlp,
    "batch norm": lambda: normed(nn.BatchNorm2d(4)),
    "spectral norm": MODULES["vectors"]["spectral norm"],
    "lstm": lambda: recurrent(nn.LSTM, num_layers=2, dropout=0.3),
}


@pytest.mark.parametrize("name", MODES)
def test_mode_switched_between_steps(device, name):
    def between(twin, k):
        twin.model.train(k % 4 < 2)

    if name == "lstm" and device.type == "cuda":
        pytest.skip("cuDNN has no backward in eval mode")
    kind = "sequences" if name == "lstm" else "vectors"
    s = compare(device, MODES[name], between=between, kind=kind)
    assert counts(s) == (1, 2, N - 3, 0), s.reasons


CLIPS = {
    "norm": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1),
    "foreach": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1, foreach=True),
    "infinity": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.01, norm_type=float("inf")),
    "value": lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.01),
    "raises": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1, error_if_nonfinite=True),
}


@pytest.mark.parametrize("how", CLIPS)
def test_clipping(device, how):
    s = compare(device, mlp, clip=CLIPS[how])
    assert_replays(s)


def test_clipping_that_raises_on_a_bad_batch(device):
    twin = new_twin(device, cgt.jit, mlp, clip=CLIPS["raises"])
    before = None
    for k, (x, y) in enumerate(data_of(device, "vectors", 6)):
        if k != 3:
            twin.step(x, y)
            before = twin.model[0].weight.clone()
            continue
        with pytest.raises(RuntimeError, match="non-finite"):
            twin.step(x * float("inf"), y)
        assert torch.equal(twin.model[0].weight, before)


AVERAGES = {
    "mean": {},
    "ema with buffers": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9), "use_buffers": True},
    "ema, one by one": {"avg_fn": swa_utils.get_ema_avg_fn(0.9)},
}


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("name", AVERAGES)
def test_averaged_copy_of_the_model(device, name, inside):
    def also(twin):
        average = swa_utils.AveragedModel(twin.model, **AVERAGES[name])
        twin.more = average.state_dict()
        twin.update = lambda: average.update_parameters(twin.model)
        return twin.update if inside else nothing

    def between(twin, k):
        if k and not inside:
            twin.update()

    s = compare(device, lambda: normed(nn.BatchNorm2d(4)), also=also, between=between)
    if inside and device.type == "cuda":  # its count, which it compares with zero, lies on the host
        assert s.replays or any("CPU tensor" in reason or "on the CPU" in reason or "turns a tensor into" in reason for reason in s.reasons), s.reasons
    else:
        assert s.replays >= 7, s.reasons


def test_average_written_by_hand(device):
    def also(twin):
        ours = list(twin.model.parameters())
        average = [p.detach().clone() for p in ours]
        twin.more = {f"average {k}": t for k, t in enumerate(average)}
        return torch.no_grad()(lambda: torch._foreach_lerp_(average, ours, 0.1))

    assert_replays(compare(device, mlp, also=also))


# --- optimizers --------------------------------------------------------------------------------

ALWAYS, CUDA, SOME = ("cpu", "cuda"), ("cuda",), ("some",)  # SOME: a few of its calls, for numbers that Python looks at
EACH, FUSED, CAPTURABLE = {"foreach": True}, {"fused": True}, {"capturable": True}
COUNTING = [  # in tensors on the CPU, whose numbers most of them ask for
    (optim.Adam, {}), (optim.Adam, EACH), (optim.Adam, {"amsgrad": True, "weight_decay": 0.1}), (optim.AdamW, {}), (optim.AdamW, EACH),
    (optim.Adamax, {}), (optim.Adamax, EACH), (optim.NAdam, {}), (optim.NAdam, EACH), (optim.RAdam, {}), (optim.RAdam, EACH),
    (optim.Adagrad, {}), (optim.Adagrad, EACH), (optim.Adagrad, {"lr_decay": 0.1}), (optim.Adadelta, {}), (optim.Adadelta, EACH),
    (optim.RMSprop, {}), (optim.RMSprop, {"centered": True, "momentum": 0.9}), (optim.Rprop, {}), (optim.Rprop, EACH),
]  # fmt: skip
OPTIMIZERS = [  # with the devices on which it replays
    (optim.SGD, {}, ALWAYS), (optim.SGD, EACH, ALWAYS), (optim.SGD, FUSED, ALWAYS),
    (optim.SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1, "maximize": True}, ALWAYS),
    *((cls, options, ALWAYS) for cls, options in COUNTING),
    (optim.Adam, FUSED, ALWAYS), (optim.Adam, CAPTURABLE, CUDA), (optim.Adam, FUSED | CAPTURABLE | {"amsgrad": True}, ALWAYS),
    (optim.AdamW, FUSED, ALWAYS), (optim.AdamW, EACH | CAPTURABLE, CUDA), (optim.Adamax, CAPTURABLE, CUDA),
    (optim.NAdam, CAPTURABLE, CUDA), (optim.RAdam, CAPTURABLE, CUDA), (optim.ASGD, {}, SOME), (optim.ASGD, CAPTURABLE, CUDA),
    (optim.Adagrad, FUSED, ("cpu",)), (optim.Adadelta, CAPTURABLE, CUDA), (optim.RMSprop, CAPTURABLE, CUDA), (optim.Rprop, CAPTURABLE, CUDA),
    (optim.Adafactor, {}, SOME), (getattr(optim, "Muon", None), {}, ALWAYS),
]  # fmt: skip


def name_of(value):
    return getattr(value, "__name__", None) or " ".join(value)


@pytest.mark.parametrize("cls, options, replays", OPTIMIZERS, ids=name_of)
def test_optimizer(device, cls, options, replays):
    on_cuda = device.type == "cuda"
    absent = (cls is optim.Adagrad and options == FUSED) if on_cuda else (options in (CAPTURABLE, EACH | CAPTURABLE))
    if cls is None or absent:
        pytest.skip("not in this torch, or not on this device")

    def optimizer(parameters):
        return cls([p for p in parameters if p.dim() == 2 or cls.__name__ != "Muon"], **options)

    n = 2 * N if cls is optim.RAdam else N  # which computes in another way after five steps
    s = compare(device, mlp, optimizer=optimizer, n=n)
    if replays == SOME:
        assert s.replays or any(cls.__name__ + ".step" in reason for reason in s.reasons), s.reasons
        return
    if device.type not in replays:
        assert s.replays == 0 and any(cls.__name__ + ".step" in reason for reason in s.reasons), s.reasons
        return
    assert s.records <= 1 + (cls is optim.RAdam) and s.replays >= n - 4, s.reasons


def step_outside(twin, k):
    if k:
        twin.opt.step()


UNTRACED = [(optim.ASGD, {}), (optim.Adafactor, {}), *COUNTING]


@pytest.mark.parametrize("cls, options", UNTRACED, ids=name_of)
def test_reason_names_the_option_of_the_optimizer(device, monkeypatch, cls, options):
    """Where its steps cannot be counted, nor computed with."""
    monkeypatch.setattr(counters, "fits", lambda _: False)
    monkeypatch.setattr(segments, "may_compute", lambda *_: False)
    on_cuda = device.type == "cuda"
    if not on_cuda and cls in (optim.Adadelta, optim.RMSprop, optim.Rprop):
        pytest.skip("it only counts, which a tape does, too")
    known = cls([torch.zeros(1)]).defaults
    choice = ("capturable", "fused") if on_cuda and cls is not optim.Adagrad else ("fused",) * (not on_cuda)
    helps = [name for name in choice if name in known][:1]
    words = [f"{name}=True" for name in helps] or ["Call it outside"]
    better = options | dict.fromkeys(helps, True)
    if helps == ["fused"] and better.pop("foreach", None):
        words.append("instead of foreach=True")
    s = compare(device, mlp, optimizer=lambda p: cls(p, **options))
    assert_eager(s, cls.__name__ + ".step", *words)
    outside = {} if helps else {"whole": False, "between": step_outside}
    s = compare(device, mlp, optimizer=lambda p: cls(p, **better), **outside)
    assert_replays(s)


class Branches(nn.Module):
    """The second branch gets gradients only when it is switched on."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.both = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3), False

    def forward(self, x):
        return self.one(x) + self.two(x) if self.both else self.one(x)


@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_state_made_at_a_later_step(device, optimizer):
    def between(twin, k):
        twin.model.both = k >= 4

    s = compare(device, Branches, optimizer=optimizer, between=between)
    assert counts(s) == (1, 2, N - 4, 1), s.reasons


def by_tensor(cls, **options):
    return lambda p: cls(p, lr=torch.tensor(0.02, device=p[0].device), fused=True, **options)


def falling(opt):
    return S.LambdaLR(opt, lambda k: 0.9**k)


SCHEDULES = {  # with the values that the settings take in N steps
    "lambda": (sgd, falling, N),
    "cycle of rate and momentum": (sgd, lambda o: S.OneCycleLR(o, 0.1, N + 1), N),
    "cycle of rate and betas": (adam, lambda o: S.OneCycleLR(o, 0.1, N + 1), N),
    "cycle of both, steps on the host": (optim.AdamW, lambda o: S.OneCycleLR(o, 0.1, N + 1), N),
    "plateau": (sgd, lambda o: S.ReduceLROnPlateau(o, patience=2), 3),
    "milestones": (sgd, lambda o: S.MultiStepLR(o, [4, 7]), 3),
    "lambda, tensor": (by_tensor(optim.Adam, capturable=True), falling, 1),
    "lambda, tensor, sgd": (by_tensor(optim.SGD), falling, 1),
    "cycle, tensor": (by_tensor(optim.Adam, capturable=True), lambda o: S.OneCycleLR(o, 0.1, N + 1, cycle_momentum=False), 1),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_that_steps_outside(device, name):
    optimizer, schedule, values = SCHEDULES[name]

    def between(twin, k):
        if k == 0:
            twin.schedule = schedule(twin.opt)
        else:
            twin.schedule.step(*([twin.last.item()] if name == "plateau" else []))

    s = compare(device, mlp, optimizer=optimizer, between=between)
    most = min(values, 3)
    assert s.eager == 0 and s.records <= most and s.replays >= N - 1 - most, s.reasons
    assert all("['lr']" in reason or "['betas']" in reason for reason in s.reasons), s.reasons


def test_schedule_that_steps_inside(device):
    s = compare(device, mlp, also=lambda twin: S.StepLR(twin.opt, 3).step)
    assert all("lr" in r or "last_epoch" in r or "_step_count" in r for r in s.reasons), s.reasons


# --- autocast and gradient scaling --------------------------------------------------------------


def twice():
    """One weight used twice in a region: its cast is cached, and gets the gradients of both."""
    core = nn.Linear(WIDTH, WIDTH)
    return Piped(core, lambda core, x: core(core(x).tanh()), nn.Linear(WIDTH, 3))


DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
FORWARD, BOTH, CALL, OFF, LOOP = (
    "forward", "forward and backward", "around each call", "around, off inside", "around all calls"
)  # fmt: skip


REGIONS = [(w, c) for w in (FORWARD, BOTH, CALL, OFF, LOOP) for c in ("cache", "no cache")]
REGIONS.remove((LOOP, "cache"))  # whose casts grow stale in eager: a row of test_footguns.py


@DTYPES
@pytest.mark.parametrize("where, cache", REGIONS)
def test_autocast(device, dtype, where, cache):
    def region(*places, on=True):
        if where not in places:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype, enabled=on, cache_enabled=cache == "cache")

    def new(device, wrap):
        twin = new_twin(device, identity, twice)

        def step(x, y):
            twin.opt.zero_grad()
            with region(BOTH):
                with region(FORWARD):
                    loss = loss_of(twin.model, x, y)
                with region(OFF, on=False):
                    loss = loss + loss_of(twin.model, x, y)
                loss.backward()
            twin.opt.step()
            return loss.detach()

        twin.step = jitted = wrap(step)
        if where in (CALL, OFF):
            twin.step = region(CALL, OFF)(lambda x, y: jitted(x, y))
        twin.jitted = jitted
        return twin

    data = data_of(device, "vectors", N)
    eager, jitted = new(device, identity), new(device, cgt.jit)
    with region(LOOP):
        want = train(eager, data, nothing)
    with region(LOOP):
        got = train(jitted, data, nothing)
    assert [k for k in range(N) if not torch.equal(got[k], want[k])] == []
    assert_same(final(jitted), final(eager))
    assert_replays(cgt.stats(jitted.jitted))


def scaled_twin(device, wrap, optimizer, dtype, clip, inside):
    twin = new_twin(device, identity, mlp, optimizer)
    model, opt = twin.model, twin.opt
    scaler = twin.scaler = torch.amp.GradScaler(device.type, init_scale=256.0, growth_interval=3)

    def backward(x, y):
        opt.zero_grad()
        with torch.autocast(device.type, dtype):
            loss = loss_of(model, x, y)
        scaler.scale(loss).backward()
        return loss.detach()

    def update():
        if clip:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(opt)
        scaler.update()

    def whole(x, y):
        loss = backward(x, y)
        update()
        return loss

    twin.step, twin.update, twin.more = wrap(whole if inside else backward), update, {"scales": []}
    return twin


SCALED = {  # what its reason advises for the inside: another row, or the outside
    "sgd": sgd,
    "sgd fused": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adam": lambda p: optim.Adam(p, lr=0.01),
    "adam fused": adam,
    "rmsprop": optim.RMSprop,
}


@DTYPES
@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("name", SCALED)
def test_gradient_scaling_with_steps_that_are_skipped(device, name, inside, clip, dtype):
    def between(twin, k):
        if k and not inside:
            twin.update()
        if k:
            now = twin.scaler.get_scale(), twin.scaler._growth_tracker.item()
            twin.more["scales"].append(now)

    options = {"new": scaled_twin, "between": between, "spoil": (2, 6), "n": 12}
    s = compare(device, SCALED[name], dtype, clip, inside, **options)
    if inside and "fused" not in name:  # whether a step is skipped is read on the way
        assert s.replays >= 6, s.reasons
    else:
        assert_replays(s, n=12)


class Drawing(nn.Module):
    """Whose text costs random numbers, or never ends."""

    def __init__(self, parent=None):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        if parent is not None:
            self.parent = parent

    def extra_repr(self):
        raise RuntimeError("nobody asked for this")

    def forward(self, x):
        return self.linear(x)


def test_nobody_asks_a_module_for_its_text(device):
    for parent in (None, nn.Sequential(nn.Linear(3, 3))):
        net = Drawing(parent).to(device)
        if parent is not None:
            parent.append(net)  # a ring
        f = cgt.jit(net)
        for k in range(6):
            x = values(device, seed=k)
            assert torch.equal(f(x), net.forward(x))
        assert cgt.stats(f).replays >= 3, cgt.explain(f)


SWAPS = {
    "parameters": lambda m, o: [torch.utils.swap_tensors(p, nn.Parameter(p.detach().clone())) for p in m.parameters()],
    "states": lambda m, o: [torch.utils.swap_tensors(s["exp_avg"], s["exp_avg"].clone()) for s in o.state.values()],
    "to": lambda m, o: m.to(torch.float64).to(torch.float32),
    "load_state_dict": lambda m, o: m.load_state_dict({name: value.clone() for name, value in m.state_dict().items()}),
}


@pytest.mark.parametrize("how", SWAPS)
def test_tensors_that_recordings_hold_are_swapped(device, how):
    """torch.utils.swap_tensors raises where somebody else holds a tensor, even weakly: the recordings go."""
    told = []
    for wrap in (lambda function: function, cgt.jit):
        torch.manual_seed(0)
        model = nn.Linear(4, 4).to(device)
        optimizer = optim.Adam(model.parameters())

        def step(x, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

        f, x = wrap(step), torch.ones(3, 4, device=device)
        for k in range(12):
            cgt.step()
            f(x)
            if k == 5:
                torch.__future__.set_swap_module_params_on_conversion(how in ("to", "load_state_dict"))
                try:
                    SWAPS[how](model, optimizer)
                finally:
                    torch.__future__.set_swap_module_params_on_conversion(False)
        told.append([p.tolist() for p in model.parameters()])
    assert told[0] == told[1] and cgt.stats(f).replays >= 6, cgt.explain(f)


def test_error_of_a_swap_that_nobody_can_do_is_the_same():
    t = torch.ones(2)
    held = weakref.ref(t)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(t, torch.zeros(2))
    assert held() is t and t.tolist() == [1, 1]


@tells("swapped")
def test_function_that_swaps_tensors_runs_eagerly(device):
    def make():
        kept = torch.arange(4.0, device=device)

        def function(x):
            torch.utils.swap_tensors(kept, x * 2)
            return kept + 1

        return function

    plain, f = make(), cgt.jit(make())
    for k in range(6):
        x = torch.full((4,), float(k), device=device)
        assert torch.equal(f(x), plain(x))
    assert any("swap_tensors" in reason and __file__ in reason for reason in cgt.stats(f).reasons), cgt.explain(f)
