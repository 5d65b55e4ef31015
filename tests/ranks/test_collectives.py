"""Two processes that exchange data (gloo, so the host driver's alone): a replay would not, so a call that does so
runs eagerly with a reason; and ops of others whose effect nobody knows."""

import datetime
import gc
import os
import signal

import torch  # before the core, whose libraries are torch's: what is spawned begins here

# isort: split
import cgt_core as core
import pytest
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from helpers import counts, jit_warm, tells, values
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import cgt
from cgt.ranks import collectives
from cgt.words import errors

CALLS = 5
RANKS = 2


# --- what each of two processes does -----------------------------------------------------------------


def all_reduced(x):
    y = x * 2
    dist.all_reduce(y)
    return y


def broadcast(x):
    y = x + 1
    dist.broadcast(y, 0)
    return y


def gathered(x):
    y = torch.empty(RANKS * x.numel())
    dist.all_gather_into_tensor(y, x * 2)
    return y


def handed_on(x):
    y = torch.zeros_like(x)
    if dist.get_rank() == 0:
        dist.send(x * 2, 1)
    else:
        dist.recv(y, 0)
    return y


def waited_for(x):
    dist.barrier()
    return x * 2


def by_a_function(x):
    return functional.all_reduce(x * 2, "sum", list(range(RANKS))) + 0


COLLECTIVES = [all_reduced, broadcast, gathered, handed_on, waited_for, by_a_function]


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))


def whole_module(wrap):
    """The gradients of some iterations, and what was jitted."""
    model = DistributedDataParallel(network())
    return gradients(model, wrap(model))


def module_inside(wrap):
    model = DistributedDataParallel(network())
    return gradients(model, wrap(lambda x: model(x) * 1))


def what_it_wraps(wrap):
    inner = network()
    f = inner.forward = wrap(inner.forward)
    model = DistributedDataParallel(inner)
    return gradients(model, model)[0], f


def gradients(model, f):
    grads = []
    for _ in range(CALLS):
        f(torch.full((2, 4), dist.get_rank() + 1.0)).sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    return grads, f


def whole_step(wrap):
    return step_of(DistributedDataParallel(network()), wrap)


def fully_sharded(wrap):
    from torch.distributed.fsdp import fully_shard

    return step_of(fully_shard(network(), mesh=init_device_mesh("cpu", (RANKS,))), wrap)


def spread(wrap):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1))
    return step_of(parallelize_module(model, init_device_mesh("cpu", (RANKS,)), plan), wrap)


def step_of(model, wrap):
    """The parameters behind some steps, and what was jitted."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    f = wrap(step)
    for _ in range(CALLS):
        f(torch.full((2, 4), dist.get_rank() + 1.0))
    return [(p.to_local() if isinstance(p, DTensor) else p).detach().clone() for p in model.parameters()], f


def cut_short():
    """Of a module whose backward did not come to all parameters, as after a capture that ended in the middle of one; what is told of
    it, twice, and whether it goes on afterwards."""
    model = DistributedDataParallel(network())
    model.module[0](torch.ones(2, 4)).sum().backward()  # past its forward, after one that has no backward
    model(torch.ones(2, 4))
    model.module[0](torch.ones(2, 4)).sum().backward()
    told = [collectives.forget([model]), collectives.forget([model])]
    return told, len(gradients(model, model)[0])


TRAININGS = [whole_module, module_inside, what_it_wraps, whole_step, fully_sharded, spread]


def one_process(rank, folder):
    """Do all of it, first without cgt; leave what came out, with counters and reasons, in a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    found = {}
    for function in COLLECTIVES:
        x = values("cpu", 3, seed=rank)
        want, f = function(x), cgt.jit(function)
        right = all(torch.equal(f(x), want) for _ in range(CALLS))
        found[function.__name__] = (right, counts(f), list(cgt.stats(f).reasons))
    for run in TRAININGS:
        want, _ = run(lambda f: f)
        got, f = run(cgt.jit)
        right = torch.equal(torch.cat(flat(got)), torch.cat(flat(want)))
        found[run.__name__] = (right, counts(f), list(cgt.stats(f).reasons))
    found["cut short"], found["odd"] = cut_short(), odd_kinds()
    torch.save(found, f"{folder}/{rank}")
    del want, got, f, x
    gc.collect()  # reducers hold the group, whose threads must be gone before Python is
    dist.destroy_process_group()


def one_that_is_killed(rank, folder):
    """In the middle of a training. The other one hears of it from the exchange, and cgt is as it was."""
    torch.set_num_threads(1)
    options = dict(rank=rank, world_size=RANKS, timeout=datetime.timedelta(seconds=20))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", **options)
    model, beside = cgt.jit(DistributedDataParallel(network())), cgt.jit(torch.tanh)
    x = torch.full((2, 4), rank + 1.0)
    for _ in range(CALLS):
        model(x).sum().backward()
        assert torch.equal(beside(x), torch.tanh(x))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        for _ in range(CALLS):
            model(x).sum().backward()
    replays = cgt.stats(beside).replays
    assert torch.equal(beside(x.add_(1)), torch.tanh(x)) and cgt.stats(beside).replays == replays + 1
    assert cgt.stats(model).replays >= CALLS - 2
    os._exit(0)  # the group cannot be left in order: its store is of the other one, too


def odd_kinds():
    """Why a whole step of these cannot be recorded, on the GPU."""
    models = [
        DistributedDataParallel(network(), find_unused_parameters=True),
        DistributedDataParallel(network(), find_unused_parameters=True, static_graph=True), DistributedDataParallel(network()),
    ]  # fmt: skip
    told = [collectives.why_not(model, on_host=False, saves=False) for model in models]
    with models[-1].join():
        return [*told, collectives.why_not(models[-1], False, False), collectives.why_not(models[-1], False, True), collectives.why_not(models[-1], True, False)]


def flat(tree):
    return [tree.flatten()] if isinstance(tree, torch.Tensor) else [t for part in tree for t in flat(part)]


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """What two processes found, by name."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(one_process, (str(folder),), nprocs=RANKS)
    return [torch.load(folder / str(rank)) for rank in range(RANKS)]


# --- and what is said of it --------------------------------------------------------------------------


@tells("collective")
@pytest.mark.parametrize("function", COLLECTIVES, ids=lambda f: f.__name__)
def test_collective_runs_eagerly(processes, function):
    for found in processes:
        right, (_, records, replays, eager), reasons = found[function.__name__]
        assert right and (records, replays) == (0, 0) and eager >= CALLS - 1
        (reason,) = reasons
        told = "has the host wait for" if function is waited_for else "exchanges data with"
        assert "c10d" in reason and f"{told} other processes" in reason and __file__ in reason


@tells("parallel_module")
@pytest.mark.parametrize("run", [module_inside, whole_step], ids=lambda f: f.__name__)
def test_module_that_exchanges_gradients_runs_eagerly(processes, run):
    for found in processes:
        right, (_, records, replays, eager), reasons = found[run.__name__]
        assert right and (records, replays) == (0, 0) and eager >= CALLS - 1
        assert all("DistributedDataParallel's forward at " in reason for reason in reasons)


@pytest.mark.parametrize("run", [fully_sharded, spread], ids=lambda f: f.__name__)
def test_parameters_that_are_spread_run_eagerly(processes, run):
    """What they exchange is no more on the host's tape than what anybody else does."""
    for found in processes:
        right, (_, records, replays, eager), reasons = found[run.__name__]
        assert right and (records, replays) == (0, 0) and eager >= CALLS - 1
        assert all("exchanges data with other processes" in reason or "untyped_storage" in reason for reason in reasons), reasons


@pytest.mark.parametrize("run", [what_it_wraps, whole_module], ids=lambda f: f.__name__)
def test_what_such_a_module_wraps_can_be_jitted(processes, run):
    """Or the module, of which that is what is jitted."""
    for found in processes:
        right, (_, _, replays, eager), reasons = found[run.__name__]
        assert right and replays >= CALLS - 3 and eager == 0, reasons


def test_kinds_of_the_module_that_are_not_recorded(processes):
    assert [found["odd"] for found in processes] == [["find_unused_parameters", None, None, "join()", "", ""]] * RANKS


def test_reduction_that_was_cut_short_is_forgotten(processes):
    assert [found["cut short"] for found in processes] == [([True, False], CALLS)] * RANKS


@pytest.mark.skipif(core.debug_build(), reason="does not depend on the build: the release suite does it")
def test_rank_that_is_killed_does_not_keep_the_other(tmp_path):
    processes = torch.multiprocessing.get_context("spawn")
    children = [processes.Process(target=one_that_is_killed, args=(rank, str(tmp_path)), daemon=True) for rank in range(RANKS)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0, -signal.SIGKILL]


# --- hooks on accumulators, ops of others ------------------------------------------------------------


@tells("hooked_leaf")
def test_hook_on_an_accumulator_is_not_recorded_past(device):
    w = values(device).requires_grad_()
    called = {len: 0}
    accumulator = torch.autograd.graph.get_gradient_edge(w).node
    accumulator.register_hook(lambda *_: called.update({len: called[len] + 1}))

    def step(x):
        (w * x).sum().backward()
        grad, w.grad = w.grad, None
        return grad

    f, x = cgt.jit(step), values(device, seed=2)
    for _ in range(5):
        assert torch.equal(f(x), x)
    assert called[len] == 5 and counts(f) == (1, 0, 0, 4)
    assert list(cgt.stats(f).reasons) == [errors.hooked_leaf("w")]


@tells("unknown_effect")
def test_op_that_does_not_say_what_it_does(device):
    with torch.library._scoped_library("cgt_silent", "DEF") as library:
        library.define("note(Tensor x) -> ()")
        library.define("same(Tensor x) -> Tensor")
        library.impl("note", lambda x: None, "CompositeExplicitAutograd")
        library.impl("same", lambda x: x, "CompositeExplicitAutograd")

        def noted(x):
            torch.ops.cgt_silent.note(x)
            return x * 2

        for function in (noted, lambda x: torch.ops.cgt_silent.same(x) * 2):
            f, x = cgt.jit(function), values(device)
            for _ in range(4):
                assert torch.equal(f(x), x * 2)
            assert counts(f) == (1, 0, 0, 3)
            (reason,) = cgt.stats(f).reasons
            assert "cgt_silent." in reason and "does not say what it writes" in reason


def double_(x):
    x.mul_(2)


def test_op_that_says_what_it_writes_is_replayed(device):
    with torch.library._scoped_library("cgt_open", "DEF") as library:
        library.define("double_(Tensor(a!) x) -> ()")
        library.define("triple(Tensor x) -> Tensor")
        library.impl("double_", double_, "CompositeExplicitAutograd")
        library.impl("triple", lambda x: x * 3, "CompositeExplicitAutograd")

        def function(x):
            y = x + 1
            torch.ops.cgt_open.double_(y)
            return torch.ops.cgt_open.triple(y)

        x = values(device)
        f = jit_warm(function, x)
        for _ in range(3):
            assert torch.equal(f(x), function(x))
        assert counts(f) == (1, 1, 3, 0)
