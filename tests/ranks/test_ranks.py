"""Several processes, each with a GPU (NCCL): collectives and DistributedDataParallel inside of recordings, and how they end. With one GPU
there is one process, which does all but what needs another."""

import datetime
import os
import signal
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from helpers import same, tells
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import cgt

RANKS = min(2, torch.cuda.device_count())
CALLS, SETTLING = 24, 11  # calls; the iterations in which DistributedDataParallel takes times
ENDS_S = 200  # until which all processes must have ended
PATIENCE_S = 12  # a timeout of a group, where one passes: longer than it takes to make one on a busy machine
pytestmark = pytest.mark.skipif(not RANKS, reason="NCCL needs a GPU")


def device():
    return torch.device("cuda", torch.cuda.current_device())


def inputs(n=CALLS, rows=8, width=64):
    """Another one for each call, and for each rank."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    return [torch.randn(rows, width, generator=generator).to(device()) for _ in range(n)]


def outcome(function, before=lambda k: None):
    """What it returns at each call, in whose argument the input lies. `before(k)` comes before the k-th."""
    x = torch.empty_like(inputs(1)[0])
    found = []
    for k, given in enumerate(inputs()):
        before(k)
        x.copy_(given)
        found.append(function(x).clone())
    return torch.stack(found)


# --- collectives -------------------------------------------------------------------------------------


def reduced(x):
    y = x * 2
    dist.all_reduce(y)
    return y


def reduced_in_place(x):
    dist.all_reduce(x)
    return x * 0.5


def waited_for(x):
    y = x * 2
    work = dist.all_reduce(y, async_op=True)
    z = x + 1
    work.wait()
    return y + z


def gathered(x):
    y = torch.empty(dist.get_world_size(), *x.shape, device=x.device)
    dist.all_gather_into_tensor(y, x + 1)
    return y.sum(0)


def gathered_in_a_list(x):
    ys = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(ys, x + 1)
    return ys[0] - ys[-1]


def scattered(x):
    y = torch.empty(x.numel() // dist.get_world_size(), device=x.device)
    dist.reduce_scatter_tensor(y, x.flatten() * 3)
    return y


def broadcast(x):
    y = x * 1
    dist.broadcast(y, 0)
    return y


def exchanged(x):
    y = torch.empty_like(x)
    dist.all_to_all_single(y, x * 2)
    return y


def handed_round(x):
    y, here, n = torch.empty_like(x), dist.get_rank(), dist.get_world_size()
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x * 2, (here + 1) % n), dist.P2POp(dist.irecv, y, (here - 1) % n)])
    for work in works:
        work.wait()
    return y


def coalesced(x):
    a, b = x * 2, x + 1
    with dist._coalescing_manager(async_ops=True) as works:
        dist.all_reduce(a)
        dist.all_reduce(b)
    works.wait()
    return a + b


def on_a_side_stream(x):
    y, side = x * 2, GROUPS["side"]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        dist.all_reduce(y)
    torch.cuda.current_stream().wait_stream(side)
    return y + 1


def in_a_group(x):
    y = x * 2
    dist.all_reduce(y, group=GROUPS["all"])
    return y


GROUPS = {}
COLLECTIVES = [
    reduced, reduced_in_place, waited_for, gathered, gathered_in_a_list, scattered, broadcast, exchanged, handed_round, coalesced,
    on_a_side_stream, in_a_group,
]  # fmt: skip


def with_barrier(x):
    dist.barrier()
    return x * 2


# --- DistributedDataParallel -------------------------------------------------------------------------


def network(depth=4, norm=False):
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (torch.nn.Linear(64, 64), torch.nn.Tanh())]
    return torch.nn.Sequential(*layers, *([torch.nn.BatchNorm1d(64)] if norm else [])).to(device())


def trained(model, wrap, inside=True, ends=lambda: None, forgets=False):
    """(the losses and what became of the parameters, what was jitted): a whole step, or the model. `forgets`: first one rank, then the
    other one does what it does anew while the rest goes on."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    forward = model if inside else wrap(model)

    def step(x):
        optimizer.zero_grad(set_to_none=True)
        loss = forward(x).square().mean()
        loss.backward()
        optimizer.step()
        ends()
        return loss.detach()

    jitted = wrap(step) if inside else step
    losses = outcome(jitted, lambda k: cgt.reset(jitted) if forgets and wrap is cgt.jit and k == (15, 18)[dist.get_rank()] else None)
    return [losses, *(p.detach().clone() for p in model.parameters())], jitted if inside else forward


def parallel(norm=False, hook=None, **options):
    model = DistributedDataParallel(network(norm=norm), **options)
    if hook is not None:
        model.register_comm_hook(None, hook)
    return model


def accumulated(wrap):
    model = parallel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad(set_to_none=True)
        with model.no_sync():
            model(x * 0.5).square().mean().backward()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    f = wrap(step)
    return [outcome(f)], f


STEPS = {
    "plain": lambda wrap: trained(parallel(), wrap),
    "views of buckets": lambda wrap: trained(parallel(gradient_as_bucket_view=True), wrap),
    "static graph": lambda wrap: trained(parallel(static_graph=True), wrap),
    "buffers": lambda wrap: trained(parallel(norm=True), wrap),
    "accumulated": accumulated,
    "hook": lambda wrap: trained(parallel(hook=default_hooks.fp16_compress_hook), wrap),
    "hook and views": lambda wrap: trained(parallel(hook=default_hooks.fp16_compress_hook, gradient_as_bucket_view=True), wrap),
}
EAGER = {"unused": lambda wrap: trained(parallel(find_unused_parameters=True), wrap)}
OTHERS = {
    "one rank forgets": lambda wrap: trained(parallel(), wrap, forgets=True),
    "the model": lambda wrap: trained(parallel(), wrap, inside=False),
    "capture fails": lambda wrap: trained(parallel(), wrap, ends=torch.cuda.synchronize),
}


# --- what each process does --------------------------------------------------------------------------


def begin(rank, folder, timeout=None):
    torch.set_warn_always(True)
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, device_id=torch.device("cuda", rank), timeout=timeout
    )
    GROUPS.update(side=torch.cuda.Stream(), all=dist.new_group(list(range(RANKS)), timeout=timeout))


def all_of_it(rank, folder):
    """First without cgt, then with; what came out, with counters and reasons, goes into a file. Nothing is let go of before the groups."""
    begin(rank, folder)
    found, kept = {}, []
    runs = {function.__name__: lambda wrap, function=function: (lambda f: ([outcome(f)], f))(wrap(function)) for function in [*COLLECTIVES, with_barrier]}
    for name, run in {**runs, **STEPS, **EAGER, **OTHERS}.items():
        with warnings.catch_warnings(record=True) as warned:
            warnings.filterwarnings("always", "The AccumulateGrad node's stream")
            (want, _), (got, f) = run(lambda f: f), run(cgt.jit)
        s = cgt.stats(f)
        right = all(map(same, got, want)) and not any("AccumulateGrad" in str(w.message) for w in warned)
        found[name] = right, s.warmups, s.replays, s.eager, list(s.reasons)
        kept += [f] if name != "the model" else []
    torch.save(found, f"{folder}/{rank}")
    dist.destroy_process_group()
    assert not any(cgt.stats(f).graph_nodes for f in kept)


class Checkpointed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.rest = torch.nn.Linear(64, 64), network()

    def forward(self, x):
        return checkpoint(self.rest, self.first(x), use_reentrant=False)


def all_at_once(rank, folder):
    """A compiled model with activation checkpointing in a DistributedDataParallel, whose whole step is jitted."""
    begin(rank, folder)

    def run(wrap):
        torch.manual_seed(0)
        return trained(DistributedDataParallel(torch.compile(Checkpointed().to(device()))), wrap)

    (want, _), (got, f) = run(lambda f: f), run(cgt.jit)
    assert all(map(same, got, want))
    print("all at once:", cgt.explain(f), flush=True)
    dist.destroy_process_group()


def leaves(rank, folder):
    """Without a word to the group, while recordings hold its work."""
    begin(rank, folder)
    GROUPS["f"] = cgt.jit(reduced)
    outcome(GROUPS["f"])
    assert cgt.stats(GROUPS["f"]).replays


def fails(rank, folder):
    """One rank raises, the others end as they should."""
    begin(rank, folder)
    GROUPS["f"] = cgt.jit(reduced)
    outcome(GROUPS["f"])
    torch.cuda.synchronize()
    if rank == 1:
        raise ValueError("of the user's")
    dist.destroy_process_group()


def interrupted(rank, folder):
    """Ctrl-C comes to all ranks, between two replays. (Where they are not at the same call, shutting down hangs without cgt, too.)"""
    begin(rank, folder)
    GROUPS["f"] = cgt.jit(reduced)
    outcome(GROUPS["f"])
    try:
        outcome(GROUPS["f"], lambda k: signal.raise_signal(signal.SIGINT) if k == 5 else None)
    except KeyboardInterrupt:
        if rank:
            dist.destroy_process_group()
        raise


def slowly_reduced(x):
    torch.cuda._sleep(400_000_000)  # about 0.2 s
    return reduced(x)


def killed(rank, folder):
    """While they replay. The other one waits in vain, and not for ever; one that waits for long replays is left alone."""
    begin(rank, folder, datetime.timedelta(seconds=PATIENCE_S))
    GROUPS["f"], x = cgt.jit(slowly_reduced), torch.ones(4, device=device())
    for _ in range(2 * CALLS):
        GROUPS["f"](x)
    torch.cuda.synchronize()
    for _ in range(8 * PATIENCE_S):
        y = GROUPS["f"](x)
    assert y.tolist() == reduced(x).tolist() and cgt.stats(GROUPS["f"]).replays >= 8 * PATIENCE_S
    print("still there", file=sys.stderr, flush=True)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    GROUPS["f"](x).tolist()


def run_ranks(target, folder):
    """Exit codes, None of a process that does not end."""
    processes = torch.multiprocessing.get_context("spawn")
    children = [processes.Process(target=target, args=(rank, str(folder)), daemon=True) for rank in range(RANKS)]
    for child in children:
        child.start()
    for child in children:
        child.join(ENDS_S)
    codes = [child.exitcode for child in children]
    for child in children:
        child.kill()
    return codes


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the processes found, by name."""
    folder = tmp_path_factory.mktemp("ranks")
    assert run_ranks(all_of_it, folder) == [0] * RANKS
    return [torch.load(folder / str(rank)) for rank in range(RANKS)]


# --- and what is said of it --------------------------------------------------------------------------


@pytest.mark.parametrize("function", COLLECTIVES, ids=lambda f: f.__name__)
def test_collectives_replay(found, function):
    for of_rank in found:
        right, _, replays, eager, reasons = of_rank[function.__name__]
        assert right and replays >= CALLS - 3 and eager == 0, reasons


@tells("collective")
def test_barrier_runs_eagerly(found):
    for of_rank in found:
        right, _, replays, _, (reason,) = of_rank[with_barrier.__name__]
        assert right and not replays and "c10d.barrier.default" in reason and "has the host wait for other processes" in reason


@tells("parallel_settles")
@pytest.mark.parametrize("name", STEPS)
def test_whole_steps_replay_once_times_are_taken(found, name):
    for of_rank in found:
        right, warmups, replays, eager, reasons = of_rank[name]
        assert right and warmups <= SETTLING and replays >= CALLS - SETTLING - 3 and eager == 0, (warmups, replays, reasons)


@tells("parallel_module")
def test_looking_for_unused_parameters_runs_eagerly(found):
    for of_rank in found:
        right, _, replays, _, (reason,) = of_rank["unused"]
        assert right and not replays and "(find_unused_parameters)" in reason


def test_jitted_module_exchanges_gradients(found):
    """What it wraps is what is jitted."""
    for of_rank in found:
        right, _, replays, eager, reasons = of_rank["the model"]
        assert right and replays >= CALLS - 4 and eager == 0, reasons


def test_capture_that_comes_to_nothing_leaves_no_reduction_under_way(found):
    for of_rank in found:
        right, _, replays, eager, reasons = of_rank["capture fails"]
        assert right and not replays and eager, reasons


def test_ranks_need_not_do_the_same(found):
    """While one warms and records again the other one replays."""
    for of_rank in found:
        right, warmups, replays, eager, reasons = of_rank["one rank forgets"]
        assert right and warmups > SETTLING and replays, (warmups, replays, eager, reasons)


def test_compiled_and_checkpointed_and_parallel(tmp_path):
    assert run_ranks(all_at_once, tmp_path) == [0] * RANKS


def test_processes_may_leave_without_a_word(tmp_path):
    assert run_ranks(leaves, tmp_path) == [0] * RANKS


def test_interrupt_ends_all_ranks(tmp_path):
    """The first of them leaves without a word to the group."""
    assert run_ranks(interrupted, tmp_path) == [1] * RANKS


def test_rank_that_is_killed_ends_the_others(tmp_path, capfd):
    if RANKS < 2:
        pytest.skip("there is one GPU")
    codes, said = run_ranks(killed, tmp_path), capfd.readouterr().err
    assert codes == [-signal.SIGABRT, -signal.SIGKILL], said
    assert said.count("still there") == RANKS and "CGT708: replays on cuda:0" in said, said


def test_exception_on_one_rank_ends_that_one(tmp_path):
    if RANKS < 2:
        pytest.skip("there is one GPU")
    assert run_ranks(fails, tmp_path) == [0, 1]
