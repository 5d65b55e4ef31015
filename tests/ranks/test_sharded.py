"""Parameters that are spread over several GPUs (NCCL): fully_shard, tensor parallelism by DTensor, functional collectives. What one
process alone does with DTensors is in test_wrappers.py."""

import torch  # before the core, whose libraries are torch's

# isort: split
import cgt_core as core
import pytest
import torch.distributed as dist
from helpers import same, tells
from test_ranks import CALLS, RANKS, begin, device, outcome, run_ranks

import cgt

pytestmark = pytest.mark.skipif(RANKS < 2, reason="one process exchanges nothing")


def network():
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(64, 127), torch.nn.GELU(), torch.nn.Linear(127, 64)) for _ in range(3)]  # 127: uneven shards
    return torch.nn.Sequential(*blocks).to(device())


def sharded(checkpointed=False, **options):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_shard

    model = network()
    for k, block in enumerate(model):
        if checkpointed:
            model[k] = block = checkpoint_wrapper(block)
        fully_shard(block, **options)
    return fully_shard(model, **{name: value for name, value in options.items() if name != "reshard_after_forward"})


def whole():
    """One group, that of the root, which stays gathered behind a forward."""
    from torch.distributed.fsdp import fully_shard

    return fully_shard(network())


def mixed():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def spread(dropout=None):
    """Tensor parallelism: the first layer of each block by columns, the second one by rows; between them, perhaps, random numbers of
    which each rank draws its part."""
    from torch.distributed.tensor import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    between = torch.nn.GELU if dropout is None else lambda: torch.nn.Dropout(dropout)
    blocks = [torch.nn.Sequential(torch.nn.Linear(64, 128), between(), torch.nn.Linear(128, 64)) for _ in range(3)]
    model = torch.nn.Sequential(*blocks).to(device())
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for block in model:
        parallelize_module(block, mesh, {"0": ColwiseParallel(use_local_output=dropout is None), "2": RowwiseParallel()})
    torch.manual_seed(7)
    return model


def state_of(model):
    return [(p.to_local() if hasattr(p, "to_local") else p).detach().clone() for p in model.parameters()]


def trained(model, wrap, make=torch.optim.AdamW, clips=False, ends=lambda: None, before=lambda k, model, f: None, inside=True):
    """A whole step is jitted, or the model."""
    optimizer = make(model.parameters(), lr=0.01)
    forward = model if inside else wrap(lambda x: model(x))

    def step(x):
        optimizer.zero_grad()
        loss = forward(x).float().square().mean()
        loss.backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        ends()
        return loss.detach()

    f = wrap(step) if inside else step
    losses = outcome(f, lambda k: before(k, optimizer if before is scheduled else model, f))
    return [losses, *state_of(model)], f if inside else forward


def scheduled(k, optimizer, f):
    for group in optimizer.param_groups:
        group["lr"] = 0.01 / (1 + k)


def inferred(model, wrap):
    f = wrap(torch.no_grad()(lambda x: model(x)))
    return [outcome(f)], f


def function(f):
    return lambda wrap: (lambda g: ([outcome(g)], g))(wrap(f))


def all_reduced(x):
    from torch.distributed._functional_collectives import all_reduce

    return all_reduce(x * 2, "sum", dist.group.WORLD) + 1


def not_waited_for(x):
    from torch.distributed._functional_collectives import all_gather_tensor

    return all_gather_tensor(x * 2, 0, dist.group.WORLD)


def scattered(x):
    from torch.distributed._functional_collectives import reduce_scatter_tensor

    return reduce_scatter_tensor(x * 2, "sum", 0, dist.group.WORLD) * 3


def between(k, model, f):
    """What comes between steps: the user leaves gradients unexchanged for a while, looks, writes."""
    if k == 12:
        model(torch.ones(8, 64, device=device())).sum().backward()
    if k == 16:
        with torch.no_grad():
            model[0][0].weight.mul_(0.5)


def one_rank_forgets(k, model, f):
    if isinstance(f, core.Site) and k == (10, 14)[dist.get_rank()]:
        cgt.reset(f)


def settings_change(k, model, f):
    model.set_requires_gradient_sync(k % 8 != 5)


def evaluates(k, model, f):
    if k % 8 == 7:
        with torch.no_grad():
            model(torch.ones(8, 64, device=device()))


STEPS = {
    "sharded": lambda wrap: trained(sharded(), wrap),
    "momentum": lambda wrap: trained(sharded(), wrap, lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)),
    "not let go of behind the forward": lambda wrap: trained(sharded(reshard_after_forward=False), wrap),
    "mixed precision": lambda wrap: trained(mixed(), wrap),
    "checkpointed": lambda wrap: trained(sharded(checkpointed=True), wrap),
    "clipped": lambda wrap: trained(sharded(), wrap, clips=True),
    "in between": lambda wrap: trained(sharded(), wrap, before=between),
    "tensor parallel": lambda wrap: trained(spread(), wrap),
    "tensor parallel, clipped": lambda wrap: trained(spread(), wrap, clips=True),
    "tensor parallel, another rate each time": lambda wrap: trained(spread(), wrap, before=scheduled),
    "tensor parallel, inference": lambda wrap: inferred(spread(), wrap),
    "all_reduce": function(all_reduced), "not waited for": function(not_waited_for), "scattered": function(scattered),
}  # fmt: skip
OTHERS = {
    "one rank forgets": lambda wrap: trained(sharded(), wrap, before=one_rank_forgets),
    "exchanges now and then": lambda wrap: trained(sharded(), wrap, before=settings_change),
    "random": lambda wrap: trained(spread(dropout=0.25), wrap),
    "evaluates": lambda wrap: trained(sharded(), wrap, before=evaluates),
    "capture fails": lambda wrap: trained(sharded(), wrap, ends=torch.cuda.synchronize),
    "whole": lambda wrap: trained(whole(), wrap, before=evaluates),
    "inference": lambda wrap: inferred(sharded(), wrap),
    "the model": lambda wrap: trained(sharded(), wrap, inside=False),
}


def all_of_it(rank, folder):
    """First without cgt, then with; what came out, with counters and reasons, goes into a file."""
    begin(rank, folder)
    found, kept = {}, []
    for name, run in {**STEPS, **OTHERS}.items():
        want, _ = run(lambda f: f)
        got, f = run(cgt.jit)
        s = cgt.stats(f)
        found[name] = all(map(same, got, want)), s.warmups, s.replays, s.eager, list(s.reasons)
        kept.append(f)
    torch.save(found, f"{folder}/{rank}")
    dist.destroy_process_group()
    assert not any(cgt.stats(f).graph_nodes for f in kept)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the processes found, by name."""
    folder = tmp_path_factory.mktemp("sharded")
    assert run_ranks(all_of_it, folder) == [0] * RANKS
    return [torch.load(folder / str(rank)) for rank in range(RANKS)]


@pytest.mark.parametrize("name", STEPS)
def test_replays(found, name):
    for of_rank in found:
        right, _, replays, eager, reasons = of_rank[name]
        assert right and replays >= CALLS - 6 and eager <= 2, (right, replays, eager, reasons)


def test_ranks_need_not_do_the_same(found):
    for of_rank in found:
        right, _, replays, eager, reasons = of_rank["one rank forgets"]
        assert right and replays >= CALLS - 7, (right, replays, eager, reasons)


def test_random_numbers_of_which_each_rank_draws_its_part(found):
    for of_rank in found:
        right, _, replays, eager, reasons = of_rank["random"]
        assert right and (replays or reasons), (right, replays, eager, reasons)


@pytest.mark.parametrize("name", ["exchanges now and then", "evaluates"])
def test_what_the_user_sets_between_steps(found, name):
    for of_rank in found:
        right, _, replays, eager, reasons = of_rank[name]
        assert right and replays, (right, replays, eager, reasons)


def test_capture_that_comes_to_nothing_leaves_nothing_behind(found):
    """Neither events nor what was gathered: eager goes on as if nothing had been."""
    for of_rank in found:
        right, _, replays, eager, reasons = of_rank["capture fails"]
        assert right and not replays and eager, (right, replays, eager, reasons)


def test_inference_runs_eagerly(found):
    """fully_shard lists each forward until a backward comes."""
    for of_rank in found:
        right, _, replays, _, reasons = of_rank["inference"]
        assert right and not replays and "post_forward_order" in reasons[0], reasons


@tells("gathered")
def test_step_behind_a_forward_without_one(found):
    for of_rank in found:
        right, _, replays, eager, reasons = of_rank["whole"]
        assert right and replays and any("reshard()" in reason for reason in reasons), (right, replays, eager, reasons)


@tells("wrapped_graph")
def test_graph_that_leaves_the_call_runs_eagerly(found):
    for of_rank in found:
        right, _, replays, _, reasons = of_rank["the model"]
        assert right and not replays and any("Jit the whole step" in reason for reason in reasons), reasons
