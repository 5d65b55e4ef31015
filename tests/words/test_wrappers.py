"""Tensors that are made of others (wrapper subclasses), two of a kind in each, and DTensor: as parameters, gradients, arguments and results."""

import copy

import torch  # before the core, whose libraries are torch's

# isort: split
import pytest
import torch.distributed as dist
from helpers import counts, same, tells, values
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree

import cgt
from cgt.look import places
from cgt.make import plan
from cgt.words import errors, private, pytree

CALLS = 8


class Pair(torch.Tensor):
    """Each op runs on both. One of them lies in a slot, the other one in the instance's dict."""

    __slots__ = ("first",)

    @staticmethod
    def __new__(cls, first, second):
        return torch.Tensor._make_wrapper_subclass(cls, first.shape, strides=first.stride(), dtype=first.dtype, device=first.device)

    scale = 1.0  # of the second results, whatever the op

    def __init__(self, first, second):
        self.first, self.second = first, second

    def __tensor_flatten__(self):
        return ["first", "second"], None

    @staticmethod
    def __tensor_unflatten__(parts, context, shape, stride):
        return Pair(parts["first"], parts["second"])

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        def run(part):
            return op(*_pytree.tree_map_only(cls, part, args), **_pytree.tree_map_only(cls, part, kwargs or {}))

        firsts, seconds = run(lambda t: t.first), run(lambda t: t.second)
        if op._schema.is_mutable and isinstance(args[0], cls):
            return args[0]
        scale = getattr(args[0], "scale", 1.0)
        if scale != 1.0:
            seconds = seconds * scale
        return _pytree.tree_map(lambda a, b: cls(a, b) if isinstance(a, torch.Tensor) else a, firsts, seconds)


def pair(device, *shape, seed=1):
    return Pair(values(device, *shape, seed=seed), values(device, *shape, seed=seed + 100))


def both(t):
    return [t.first.clone(), t.second.clone()]


class Layer:
    """A parameter that is a pair, and its optimizer."""

    def __init__(self, device, set_to_none=True):
        self.w = pair(device, 4, 4).requires_grad_()
        self.opt = torch.optim.SGD([self.w], lr=0.1, momentum=0.9)
        self.set_to_none = set_to_none

    def step(self, x):
        self.opt.zero_grad(set_to_none=self.set_to_none)
        loss = (x @ self.w).square().mean()
        loss.backward()
        self.opt.step()
        return loss.detach()


def steps(layer, step, n=CALLS, between=lambda k, layer: None):
    """Losses, parameters, gradients and momenta behind each of n steps."""
    found = []
    for k in range(n):
        x = pair(layer.w.device, 2, 4, seed=k)
        found += [*both(step(x)), *both(layer.w)]
        found += both(layer.w.grad) if layer.w.grad is not None else []
        between(k, layer)
    return found


def assert_steps(device, between=lambda k, layer: None, set_to_none=True, replays=CALLS - 2, make=Layer):
    want, got = make(device, set_to_none), make(device, set_to_none)
    jitted = cgt.jit(got.step)
    expected = steps(want, want.step, between=between)
    assert all(map(same, steps(got, jitted, between=between), expected)), cgt.explain(jitted)
    assert counts(jitted)[2] >= replays, cgt.explain(jitted)
    return jitted


# --- parameters and gradients ------------------------------------------------------------------------


@pytest.mark.parametrize("set_to_none", [True, False])
def test_whole_step_replays(device, set_to_none):
    assert_steps(device, set_to_none=set_to_none)


def test_gradient_that_is_kept_stays_as_it_was(device):
    kept = []

    def keep(k, layer):
        kept.append((layer.w.grad, both(layer.w.grad)))

    assert_steps(device, keep)
    assert all(same(a, b) for grad, was in kept for a, b in zip((grad.first, grad.second), was, strict=True))
    assert len({id(grad) for grad, _ in kept}) == len(kept)


def test_what_is_inside_a_gradient_is_kept(device):
    kept = []
    assert_steps(device, lambda k, layer: kept.append((layer.w.grad.second, layer.w.grad.second.clone())))
    assert all(same(a, b) for a, b in kept)


def test_gradients_that_add_up(device):
    class Adding(Layer):
        def step(self, x):
            loss = (x @ self.w).square().mean()
            loss.backward()
            return loss.detach()

    def every_third(k, layer):
        if k % 3 == 2:
            layer.w.grad = None

    assert_steps(device, every_third, replays=0, make=Adding)


def test_another_gradient_in_between(device):
    def put(k, layer):
        layer.w.grad = None if k % 2 else pair(layer.w.device, 4, 4, seed=50 + k)

    assert_steps(device, put, replays=CALLS - 3)


def test_gradient_of_which_the_inside_was_exchanged(device):
    def exchange(k, layer):
        layer.w.grad.first = torch.zeros_like(layer.w.grad.first)

    assert_steps(device, exchange)


def test_parameter_that_is_written_in_between(device):
    @torch.no_grad()
    def write(k, layer):
        layer.w.mul_(0.5)
        layer.w.first.add_(1)

    assert_steps(device, write)


def test_what_lies_in_a_parameter_is_exchanged(device):
    def exchange(k, layer):
        if k == 3:
            layer.w.first = values(layer.w.device, 4, 4, seed=9)
        if k == 5:
            layer.w.second = values(layer.w.device, 4, 4, seed=10)

    assert_steps(device, exchange, replays=1)


def test_parameter_that_is_frozen(device):
    w = pair(device, 4, 4).requires_grad_()

    def grows(x):
        y = x @ w
        return (y.first + y.second, torch.tensor(float(y.requires_grad), device=device))

    with torch.no_grad():
        f, x = cgt.jit(grows), pair(device, 2, 4)
        assert all(same(a, b) for _ in range(4) for a, b in zip(f(x), grows(x), strict=True))
    assert counts(f)[2] == 2
    f, step = cgt.jit(lambda x: float(w.requires_grad) * x), values(device)
    for _ in range(4):
        assert torch.equal(f(step), step)
    w.requires_grad_(False)
    assert torch.equal(f(step), step * 0)


@tells("wrapped_graph")
def test_graph_that_leaves_the_call_runs_eagerly(device):
    w = pair(device, 4, 4).requires_grad_()
    twin = copy.deepcopy(w)
    f = cgt.jit(lambda x: (x @ w).square().mean())
    for k in range(CALLS):
        x = pair(device, 2, 4, seed=k)
        mine, theirs = f(x), (x @ twin).square().mean()
        mine.backward(), theirs.backward()
        assert all(map(same, both(mine.detach()) + both(w.grad), both(theirs.detach()) + both(twin.grad)))
    assert counts(f)[2] == 0
    assert any("Jit the whole step" in reason for reason in cgt.stats(f).reasons), cgt.explain(f)


ACTS = {
    "keep": lambda layer, kept: kept.append(layer.w.grad) if layer.w.grad is not None else None,
    "let go": lambda layer, kept: kept.clear(),
    "none": lambda layer, kept: setattr(layer.w, "grad", None),
    "another": lambda layer, kept: setattr(layer.w, "grad", pair(layer.w.device, 4, 4, seed=7)),
    "inside": lambda layer, kept: setattr(layer.w, "first", layer.w.first.clone()),
    "write": lambda layer, kept: layer.w.detach().mul_(0.9),
    "eager": lambda layer, kept: layer.step(pair(layer.w.device, 2, 4, seed=8)),
    "nothing": lambda layer, kept: None,
}


@settings(max_examples=25, deadline=None)
@given(acts=st.lists(st.sampled_from(sorted(ACTS)), min_size=3, max_size=9), set_to_none=st.booleans())
def test_whatever_happens_in_between(acts, set_to_none):
    for device in ["cpu"] + (["cuda"] if torch.cuda.is_available() else []):
        kept = ([], [])
        layers = Layer(device, set_to_none), Layer(device, set_to_none)
        runs = layers[0].step, cgt.jit(layers[1].step)
        for k, act in enumerate(["nothing", "nothing", *acts]):
            x = pair(device, 2, 4, seed=k)
            results = [both(run(x)) + both(layer.w) for run, layer in zip(runs, layers, strict=True)]
            assert all(map(same, *results)), (act, k)
            for layer, mine in zip(layers, kept, strict=True):
                ACTS[act](layer, mine)
        assert all(same(a, b) for grads in zip(*kept, strict=True) for a, b in zip(*map(both, grads), strict=True))


# --- arguments and results ---------------------------------------------------------------------------


def test_argument_and_result(device):
    f, held = cgt.jit(lambda x, y: (x * y + 1, x.first.sum())), []
    for k in range(CALLS):
        x, y = pair(device, seed=k), pair(device, seed=k + 20)
        got, total = f(x, y)
        want = x * y + 1
        assert type(got) is Pair and all(map(same, both(got), both(want))) and same(total, x.first.sum())
        held.append((got, both(want)))
    assert all(same(a, b) for got, want in held for a, b in zip(both(got), want, strict=True))
    assert counts(f)[2] >= CALLS - 3, cgt.explain(f)


def test_argument_of_another_kind_is_another_call(device):
    f = cgt.jit(lambda x: x * 2)
    for x in (pair(device), pair(device, 2, 2), values(device), pair(device)):
        for _ in range(3):
            got, want = f(x), x * 2
            assert type(got) is type(want)
            assert all(map(same, both(got), both(want))) if type(x) is Pair else same(got, want)
    assert counts(f)[2] == 7, cgt.explain(f)


@tells("subclass")
def test_argument_with_a_graph_runs_eagerly(device):
    f, x = cgt.jit(lambda x: x * 2), pair(device).requires_grad_()
    for _ in range(3):
        y = f(x)
        assert y.requires_grad and all(map(same, both(y.detach()), both((x * 2).detach())))
    assert list(cgt.stats(f).reasons) == [errors.subclass("args[0]", "Pair")]


def test_result_that_was_there_before_is_itself(device):
    w = pair(device)
    f = cgt.jit(lambda x: (w, x + 1))
    for _ in range(4):
        assert f(values(device))[0] is w


def test_number_that_changes_beside_one(device):
    f, x = cgt.jit(lambda x, k: x * k + k), pair(device)
    for k in range(CALLS):
        got, want = f(x, 0.5 * k), x * (0.5 * k) + 0.5 * k
        assert all(map(same, both(got), both(want)))
    assert counts(f)[2] >= CALLS - 4, cgt.explain(f)


def test_number_that_the_class_computes_with(device):
    """What comes to the op inside is another number than the one outside, or the same by chance."""

    class Clamped(Pair):
        @classmethod
        def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
            args = [x if isinstance(x, torch.Tensor) else max(x, 3) for x in args]
            return op(args[0].first, *args[1:])

    f, x = cgt.jit(lambda x, k: x * k), values(device)
    for k in (5, 6, 7, 8, 2, 9, 1, 4, 0, 6):
        assert same(f(Clamped(x, x), k), x * max(k, 3)), k
    assert counts(f)[2] or cgt.stats(f).reasons, cgt.explain(f)


@pytest.mark.parametrize("is_argument", [True, False])
def test_attribute_that_its_class_reads(device, is_argument):
    t = pair(device)
    f = cgt.jit(lambda x: (x + 1).second * 1) if is_argument else cgt.jit(lambda x: (t + 1).second + x)
    for k in range(12):
        t.scale = 1.0 + k // 4
        x = t if is_argument else values(device, seed=k)
        want = (t.second + 1) * t.scale
        assert same(f(x), want if is_argument else want + x)
    assert counts(f)[2] >= 4, cgt.explain(f)


def test_attribute_of_the_class(device):
    t, f = pair(device), cgt.jit(lambda x: (x + 1).second * 1)
    try:
        for k in range(12):
            Pair.scale = 1.0 + k // 4
            assert same(f(t), (t.second + 1) * Pair.scale)
    finally:
        Pair.scale = 1.0
    assert counts(f)[2] >= 4, cgt.explain(f)


def test_what_stays_written(device):
    """An argument, and what a closure has."""
    total = Pair(torch.zeros(4, 3, device=device), torch.zeros(4, 3, device=device))

    def add(x):
        x.mul_(2)
        total.add_(x)
        return x.second.sum()

    f, x, want = cgt.jit(add), pair(device), torch.zeros(4, 3, device=device)
    for k in range(CALLS):
        x.first.copy_(values(device, seed=k))
        f(x)
        want += values(device, seed=k) * 2
        assert same(x.first, values(device, seed=k) * 2) and same(total.first, want)
    assert counts(f)[2] >= CALLS - 3, cgt.explain(f)


def test_one_that_is_made_inside(device):
    f = cgt.jit(lambda x: (Pair(x, x + 1) * 2).second * 1)
    for k in range(CALLS):
        assert same(f(values(device, seed=k)), (values(device, seed=k) + 1) * 2)
    assert counts(f)[2] >= CALLS - 3, cgt.explain(f)


def test_torchs_own(device):
    t = TwoTensor(values(device), values(device, seed=2))
    f = cgt.jit(lambda x: (x + t).b * 1)
    for k in range(CALLS):
        x = values(device, seed=k)
        assert same(f(x), x + t.b)
    assert counts(f)[2] >= CALLS - 3, cgt.explain(f)


# --- DTensor ---------------------------------------------------------------------------------------------


@pytest.fixture
def mesh(device):
    from torch.distributed.tensor import init_device_mesh

    if device.type == "cuda":
        torch.cuda.set_device(0)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh(device.type, (1,))
    dist.destroy_process_group()


def test_argument_that_nobody_waited_for(device, mesh):
    from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce

    f = cgt.jit(lambda x: x + 1)
    for k in range(CALLS):
        x = all_reduce(values(device, seed=k), "sum", dist.group.WORLD)
        assert type(x) is AsyncCollectiveTensor and not x.completed
        assert same(f(x) * 1, values(device, seed=k) + 1) and x.completed
    assert counts(f)[2] >= CALLS - 3, cgt.explain(f)


def fully_sharded(device, mesh):
    """(model, its step)"""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = fully_shard(torch.nn.Linear(3, 2).to(device), mesh=mesh)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        return loss.detach()

    return model, step


def fully_sharded_step(device, mesh):
    return fully_sharded(device, mesh)[1]


def test_what_fully_shard_keeps_is_found(device, mesh):
    """Settings, which the user may change at any time, and what is under way."""
    step = fully_sharded_step(device, mesh)
    step(values(device))
    found = places.find_places(step)
    assert len(found.sharded) == 2 and all(not private.is_gathered(one) for _, one in found.sharded)
    keys = {p.key for p in found.places}
    assert {"reduce_grads", "reshard_after_backward", "sharded_state", "_training_state", "iter_forward_root", "post_forward_order"} <= keys


def test_fully_shard_of_one_process(device, mesh):
    """It gathers by copies, in memory that it lets go of behind PyTorch's back: a tape has no place for that."""
    want, f = fully_sharded_step(device, mesh), cgt.jit(fully_sharded_step(device, mesh))
    for k in range(CALLS):
        assert same(f(values(device, seed=k)), want(values(device, seed=k)))
    if device.type == "cuda":
        assert counts(f)[2] >= CALLS - 4, cgt.explain(f)
    else:
        assert counts(f)[2] == 0 and "untyped_storage" in list(cgt.stats(f).reasons)[0], cgt.explain(f)


def test_steps_of_fully_shard_that_exchange_now_and_then(device, mesh):
    """A step without exchange leaves its gradient where the next one adds to it."""
    (ours, step), (theirs, want) = fully_sharded(device, mesh), fully_sharded(device, mesh)
    f = cgt.jit(step)
    for k in range(3 * CALLS):
        for model in (ours, theirs):
            model.set_requires_gradient_sync(k % 8 != 5)
        assert same(f(values(device, seed=k)), want(values(device, seed=k))), k
    assert counts(f)[2] >= (CALLS if device.type == "cuda" else 0), cgt.explain(f)


def like_sharded(device):
    """What fully_shard keeps of a parameter, without the exchange and the memory that comes and goes."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState

    model, one = torch.nn.Linear(3, 2, bias=False, device=device), object.__new__(FSDPParam)
    with torch.no_grad():
        model.weight.copy_(torch.arange(6.0).reshape(2, 3) / 6)
    one.sharded_state, one.sharded_param, one.all_gather_outputs = ShardedState.SHARDED, model.weight, []
    one._unsharded_param = torch.nn.Parameter(model.weight.detach().clone())
    model.kept, model.exchanges = one, True

    def step(x):
        whole = one._unsharded_param
        with torch.no_grad():
            whole.copy_(model.weight)
        (x @ whole.t()).square().mean().backward()
        if model.exchanges:
            with torch.no_grad():
                model.weight.sub_(0.1 * whole.grad)
            whole.grad = None
        return x * 2

    return model, step


def test_gradient_of_all_of_a_sharded_parameter_is_looked_at(device):
    (ours, step), (theirs, want) = like_sharded(device), like_sharded(device)
    f = cgt.jit(step)
    for k in range(3 * CALLS):
        ours.exchanges = theirs.exchanges = k % 8 != 5
        assert same(f(values(device, seed=k)), want(values(device, seed=k)))
        assert torch.equal(ours.weight, theirs.weight), k
    assert counts(f)[2] >= CALLS, cgt.explain(f)


@tells("unknown_sharding")
def test_fully_shard_of_another_release_runs_eagerly(device, mesh, monkeypatch):
    step, nothing = fully_sharded_step(device, mesh), pytree.flatten_call((), {})
    step(values(device))
    assert plan.refuse_around(nothing, places.find_places(step)) is None
    monkeypatch.setattr(places, "knows_sharding", lambda one: False)
    assert plan.refuse_around(nothing, places.find_places(step)) == errors.unknown_sharding("model")
    monkeypatch.setattr(places, "SHARDED_KINDS", ())
    assert plan.refuse_around(nothing, places.find_places(step)) == errors.unknown_sharding("model")


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "foreach"])
def test_distributed_parameters(device, mesh, optimizer):
    """A mesh of one: the same ops, but for an exchange."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_module

    def train(wrap):
        torch.manual_seed(0)
        model = distribute_module(torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).to(device), mesh)
        make = {"SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), "AdamW": torch.optim.AdamW}
        opt = make.get(optimizer, lambda p: torch.optim.AdamW(p, foreach=True))(model.parameters())

        def step(x):
            opt.zero_grad()
            loss = model(DTensor.from_local(x, mesh, [Replicate()])).to_local().square().mean()
            loss.backward()
            opt.step()
            return loss.detach()

        step = wrap(step)
        losses = [step(values(device, seed=k)).clone() for k in range(12)]
        return [*losses, *(p.to_local().detach().clone() for p in model.parameters())], step

    (want, _), (got, step) = train(lambda f: f), train(cgt.jit)
    assert all(map(same, got, want)) and counts(step)[2] >= 8, cgt.explain(step)
