"""PyTorch's databases as programs for `judge`.

A group is what is made together: one operator, module or optimizer, in one way and dtype. Its entries are the database's
samples. Each has two sets of values, which take turns from call to call, in tensors that are new at each: the sample made
with two seeds, or where these differ in more than values, the sample and itself with its values in other places.
"""

import copy
import types
from functools import partial
from typing import NamedTuple

import torch
from torch.testing._internal.autograd_function_db import autograd_function_db
from torch.testing._internal.common_methods_invocations import (
    foreach_binary_op_db,
    foreach_other_op_db,
    foreach_pointwise_op_db,
    foreach_reduce_op_db,
    foreach_unary_op_db,
    op_db,
    python_ref_db,
)
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_nn import CriterionTest, criterion_tests
from torch.testing._internal.common_optimizers import _get_optim_inputs_including_global_cliquey_kwargs, optim_db
from torch.testing._internal.custom_op_db import custom_op_db
from torch.testing._internal.hop_db import hop_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from .judge import seed

SETS = 2  # of values
MIXED = 6  # samples that one function gets in turn


class Group(NamedTuple):
    kind: str  # of KINDS
    index: int  # in the database
    name: str
    way: str
    dtype: str


class Kind(NamedTuple):
    database: list
    ways: tuple
    name: object  # function of an item of the database
    supports: object  # function of (item, way, dtype, device)
    programs: object  # function of (item, way, dtype, device): [programs of an entry, ...], those with the hardest values first


def groups_of(kinds, ways, dtypes, device):
    """All groups of some kinds, ways (None: all) and dtypes (names), in the order of the databases."""
    return [
        Group(kind, k, KINDS[kind].name(item), way, dtype)
        for kind in kinds
        for way in KINDS[kind].ways
        if ways is None or way in ways
        for dtype in dtypes
        for k, item in enumerate(KINDS[kind].database)
        if KINDS[kind].supports(item, way, getattr(torch, dtype), device)
    ]


def programs_of(group, device):
    """For each entry of a group its programs, of which the first is judged that eager can run."""
    kind = KINDS[group.kind]
    return kind.programs(kind.database[group.index], group.way, getattr(torch, group.dtype), device)


# --- values ------------------------------------------------------------------------------------


def pairs_of(make):
    """[[sets], ...] for each sample of make(), which draws: (args, kwargs) twice."""
    found = []
    for n in range(SETS):
        seed(n)
        found.append([tree_map_only(torch.Tensor, leaf, sample) for sample in make()])
    first, second = found
    second += [None] * (len(first) - len(second))
    return [[a, b if alike(a, b) else tree_map_only(torch.Tensor, moved, a)] for a, b in zip(first, second, strict=False)]


def copied(tree):
    """Its tensors in memory of their own, laid out as they are, shared where they share it; the rest copied, too."""
    return tree_map(partial(copied_leaf, {}), tree)


def copied_leaf(memo, x):
    """The same of a leaf. deepcopy knows no compressed layouts. A module among the arguments is the same at each call."""
    if isinstance(x, torch.nn.Module):
        return x
    if isinstance(x, torch.Tensor) and x.layout is not torch.strided:
        return x.detach().clone().requires_grad_(x.requires_grad)
    return copy.deepcopy(x, memo)


def leaf(t):
    """Without a history, so that it can be copied."""
    return t if t.is_leaf else t.detach().requires_grad_()


def alike(a, b):
    """Do these samples differ in the values of their tensors, and in nothing else?"""
    (xs, spec), (ys, other) = tree_flatten(a), tree_flatten(b)
    if spec != other or not all(map(alike_leaves, xs, ys)):
        return False
    return not all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True) if is_dense(x) and x.numel())


def alike_leaves(x, y):
    """The same of two leaves."""
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        return all(getattr(x, fact) == getattr(y, fact) for fact in ("shape", "dtype", "layout")) and (not is_dense(x) or x.stride() == y.stride())
    return type(x) is type(y) and repr(x) == repr(y)


def is_dense(t):
    """Is it a plain tensor with memory?"""
    return type(t) is torch.Tensor and t.layout is torch.strided and not t.is_nested


def moved(t):
    """The same values in other places: what is in the domain of an op mostly stays in it. Indices and masks stay as they are."""
    fits = is_dense(t) and (t.is_floating_point() or t.is_complex()) and not torch._debug_has_internal_overlap(t)
    other = copied(t)
    if fits:
        with torch.no_grad():
            other.copy_(t.flatten().flip(0).view(t.shape))
    return other


def simpler(program, sets):
    """[program(sets), program with the first set alone]: the second set's values may be such as eager refuses."""
    return [program(sets), program([sets[0]] * SETS)]


def tensors(tree):
    """Those in a tree, in order."""
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def detached(tree):
    """Results whose backward has run: a replay returns them so (docs/footguns.md)."""
    return tree_map_only(torch.Tensor, torch.Tensor.detach, tree)


def aliases(result, args):
    """Which results are arguments, or lie in the memory of one, or of a result before."""
    found, before = [], [(f"argument {k}", t) for k, t in enumerate(tensors(args))]
    for k, t in enumerate(tensors(result)):
        for name, other in before:
            if t is other:
                found.append(f"result {k} is {name}")
            elif is_dense(t) and is_dense(other) and t.numel() and t.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() != 0:
                found.append(f"result {k} in {name} at {t.storage_offset() - other.storage_offset()}")
        before.append((f"result {k}", t))
    return found


# --- operators ---------------------------------------------------------------------------------


def op_supports(op, way, dtype, device):
    if way in ("backward", "grad"):
        return dtype in op.supported_backward_dtypes(device)
    if dtype not in op.supported_dtypes(device):
        return False
    return {"inplace": op.get_inplace() is not None, "out": op.supports_out, "autocast": dtype is torch.float32}.get(way, True)


def op_samples(op, way, dtype, device):
    """A function that draws the samples."""
    wants = way in ("backward", "grad")

    def make():
        conjugated = dtype.is_complex and op.test_conjugated_samples
        samples = op.sample_inputs(device, dtype, requires_grad=wants, set_seed=False, include_conjugated_inputs=conjugated)
        samples = [s.noncontiguous() for s in samples] if way == "noncontiguous" else list(samples)
        for s in samples:
            yield (s.input, *s.args), {name: x for name, x in s.kwargs.items() if name != "disable_fastpath"}, s.output_process_fn_grad

    return make


def op_programs(op, way, dtype, device, changed=lambda function: function):
    make = op_samples(op, way, dtype, device)
    function = changed(op.get_inplace() if way == "inplace" else op.get_op())
    program = partial(OP_PROGRAMS.get(way, forward_program), function)
    pairs = pairs_of(make)
    if way == "mixed":
        stride = -(-len(pairs) // MIXED)
        return [[mixed_program(function, pairs[k::stride])] for k in range(stride)]
    return [simpler(program, sets) for sets in pairs]


def forward_program(op, sets):
    def begin(jit):
        f = jit(op)

        def step(k):
            args, kwargs, _ = copied(sets[k % SETS])
            result = f(*args, **kwargs)
            return {"result": result, "args": (args, kwargs), "aliases": aliases(result, (args, kwargs))}

        return step

    return begin


def mixed_program(op, pairs):
    """Several samples by one jitted function, in one iteration: other shapes, other structures, empty ones behind full ones."""

    def begin(jit):
        f = jit(op)
        steps = [forward_program(f, sets)(lambda function: function) for sets in pairs]
        return lambda k: [step(k) for step in steps]

    return begin


def autocast_program(op, sets):
    """Under autocast, which begins outside."""
    begin_step = forward_program(op, sets)

    def begin(jit):
        return torch.autocast(device_of(sets).type, torch.bfloat16)(begin_step(jit))

    return begin


def device_of(tree):
    """That of its first tensor."""
    return next((t.device for t in tensors(tree)), torch.device("cpu"))


def inside_program(op, sets):
    """Arguments are made in the function, and what is returned is made of the results: all memory that the op works on is the recording's."""

    def inside(*args, **kwargs):
        args, kwargs = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
        return tree_map_only(torch.Tensor, torch.clone, op(*args, **kwargs))

    return forward_program(inside, sets)


def kept_program(op, sets):
    """The first tensor is the same one at each call, with new values; the others are new."""

    def begin(jit):
        f, (args, _, _) = jit(op), copied(sets[0])
        kept = tensors(args)[0]

        def step(k):
            args, kwargs, _ = copied(sets[k % SETS])
            leaves, spec = tree_flatten(args)
            place = next(k for k, x in enumerate(leaves) if isinstance(x, torch.Tensor))
            kept.copy_(leaves[place])
            leaves[place] = kept
            args = tree_unflatten(leaves, spec)
            result = f(*args, **kwargs)
            return {"result": copied(result), "args": copied((args, kwargs)), "aliases": aliases(result, (args, kwargs))}

        return step

    return begin


def out_program(op, sets):
    """The result is written into tensors that are there, with other values in them."""

    def begin(jit):
        f = jit(op)
        args, kwargs, _ = copied(sets[0])
        template = tree_map_only(torch.Tensor, lambda t: torch.full_like(t, 3), op(*args, **kwargs))

        def step(k):
            args, kwargs, _ = copied(sets[k % SETS])
            out = copied(template)
            result = f(*args, **kwargs, out=tuple(out) if isinstance(out, tuple) else out)
            return {"result": result, "args": (args, kwargs), "out": out, "aliases": aliases(result, (args, out))}

        return step

    return begin


def backward_program(op, sets):
    """The op jitted; backward() outside."""

    def begin(jit):
        f = jit(op)

        def step(k):
            args, kwargs, after = copied(sets[k % SETS])
            result = f(*args, **kwargs)
            outs = [t for t in tensors(after(result)) if t.requires_grad]
            torch.autograd.backward(outs, [torch.randn_like(t) for t in outs])
            return {"result": result, "args": (args, kwargs), "grads": [t.grad for t in tensors((args, kwargs))]}

        return step

    return begin


def grad_program(op, sets):
    """The op and autograd.grad jitted as one function."""

    def whole(args, kwargs, after):
        result = op(*args, **kwargs)
        outs = [t for t in tensors(after(result)) if t.requires_grad]
        loss = sum((t.abs() if t.is_complex() else t).sum() for t in outs)
        return detached(result), torch.autograd.grad(loss, [t for t in tensors((args, kwargs)) if t.requires_grad], allow_unused=True)

    def begin(jit):
        f = jit(whole)

        def step(k):
            args, kwargs, after = copied(sets[k % SETS])
            result, grads = f(args, kwargs, after)
            return {"result": result, "grads": grads, "args": (args, kwargs)}

        return step

    return begin


def is_seeded(op):
    """Does it seed, draw and put the generator back? A recording that does so is refused."""
    return "wrapper_set_seed" in getattr(getattr(op.get_op(), "__code__", None), "co_names", ())


def unseeded(function):
    """The same without that: it draws from the generator as it is."""
    world = {**function.__globals__, "wrapper_set_seed": lambda op, *args, **kwargs: op(*args, **kwargs)}
    return types.FunctionType(function.__code__, world, function.__name__, function.__defaults__, function.__closure__)


OP_PROGRAMS = {"autocast": autocast_program, "inside": inside_program, "kept": kept_program, "out": out_program, "backward": backward_program, "grad": grad_program}


def operators(database, *ways, programs=op_programs):
    """The kind of a database of operators."""
    return Kind(database, ways, lambda op: op.full_name, op_supports, programs)


# --- modules -----------------------------------------------------------------------------------


def module_supports(info, way, dtype, device):
    return dtype in info.supported_dtypes(device) and (way != "autocast" or dtype is torch.float32)


def module_programs(info, way, dtype, device):
    trains = way != "infer"
    builds = []

    def make():
        samples = info.module_inputs_func(info, device=device, dtype=dtype, requires_grad=trains, training=trains)
        samples = list(samples)
        builds.append([partial(built, info.module_cls, s.constructor_input.args, s.constructor_input.kwargs, device, dtype) for s in samples])
        return [(s.forward_input.args, s.forward_input.kwargs) for s in samples]

    pairs = pairs_of(make)
    return [simpler(partial(module_program, way, build), sets) for build, sets in zip(builds[0], pairs, strict=True)]


def built(make, args, kwargs, device, dtype, like=None):
    """A module, each time with the same weights. One that learns its shapes from the first input sees one."""
    seed(0)
    args, kwargs = copied((args, kwargs))
    return make(*args, **kwargs).to(device=device, dtype=dtype)


def criterion_supports(case, way, dtype, device):
    return dtype in (torch.float32, torch.float64) and (way != "autocast" or dtype is torch.float32)


def criterion_programs(case, way, dtype, device):
    found = {}

    def make():
        test = found["test"] = CriterionTest(**{"constructor": getattr(torch.nn, case.get("module_name", ""), None), **case})
        inputs = test._get_input()
        given = (*(inputs if isinstance(inputs, tuple) else (inputs,)), test._get_target(), *test.extra_args)
        return [(tuple(tree_map_only(torch.Tensor, convert, x) for x in given), {})]

    def convert(t):
        return t.detach().to(device=device, dtype=dtype if t.is_floating_point() else t.dtype).requires_grad_(t.is_floating_point() and way != "infer")

    pairs = pairs_of(make)
    test = found["test"]
    build = partial(built, test.constructor, test.constructor_args, {}, device, dtype)
    return [simpler(partial(module_program, way, build), sets) for sets in pairs]


def criterion_name(case):
    return case.get("fullname") or case["module_name"] + "_" * bool(case.get("desc")) + case.get("desc", "")


def module_program(way, build, sets):
    """infer: jitted, without gradients. model: jitted; loss, backward and optimizer outside. autocast: the same, under it. step: all of it jitted."""

    def begin(jit):
        module = build()
        if any(isinstance(p, torch.nn.parameter.UninitializedParameter) for p in module.parameters()):
            args, kwargs = copied(sets[0])
            module(*args, **kwargs)
        module.train(way != "infer")
        params = [p for p in module.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(params or [torch.zeros(1)], lr=0.01, momentum=0.9)
        f = module if way == "step" else jit(module)

        def train(*args, **kwargs):
            optimizer.zero_grad()
            with torch.autocast(device_of(sets).type, torch.bfloat16, enabled=way == "autocast"):
                result = f(*args, **kwargs)
            loss_of(result).backward()
            optimizer.step()
            return detached(result)

        run = {"infer": torch.no_grad()(f), "step": jit(train) if way == "step" else None}.get(way, train)

        def step(k):
            args, kwargs = copied(sets[k % SETS])
            result = run(*args, **kwargs)
            return {"result": result, "grads": [t.grad for t in tensors((args, kwargs))], "state": state_of(module, optimizer)}

        return step

    return begin


def loss_of(result):
    """The mean square of all that has a gradient."""
    outs = [t for t in tensors(result) if t.requires_grad]
    return sum((t.abs() if t.is_complex() else t).square().mean() for t in outs)


def state_of(module, optimizer):
    """What a step may have written, as it is now."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    grads = {name: p.grad for name, p in module.named_parameters()}
    return copied(({name: t.detach() for name, t in named.items()}, grads, optimizer_state(optimizer)))


# --- optimizers --------------------------------------------------------------------------------


def optimizer_supports(info, way, dtype, device):
    return dtype in (torch.float32, torch.float64, torch.bfloat16) or (dtype.is_complex and info.supports_complex)


def optimizer_programs(info, way, dtype, device):
    found = _get_optim_inputs_including_global_cliquey_kwargs(device, dtype, info, skip=("differentiable",))  # needs parameters that are no leaves
    return [[optimizer_program(info, way, x.kwargs, dtype, device)] for x in found]


def optimizer_program(info, way, kwargs, dtype, device):
    """step: opt.step() in a jitted function, gradients come in the same tensors. fresh: in new ones. schedule: a scheduler changes the rate
    at each call. bound: the same of cgt.jit(opt.step). train: forward, loss and backward are in it."""

    def begin(jit):
        seed(0)
        shapes = [(4, 3), (3, 2)] if info.name == "Muon" else [(4, 3), (4,), ()]
        params = [torch.nn.Parameter(torch.randn(shape, dtype=dtype, device=device)) for shape in shapes]
        optimizer = info.optim_cls(params, **copy.deepcopy(kwargs))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if way in ("schedule", "bound") else None

        def closure(x):
            optimizer.zero_grad()
            loss = sum(((p - t).abs() if p.is_complex() else p - t).square().sum() for p, t in zip(params, x, strict=True))
            loss.backward()
            return loss.detach()

        def train(x):
            loss = closure(x)
            optimizer.step()
            return loss

        def update():
            return optimizer.step()

        def with_closure(x):
            return optimizer.step(partial(closure, x))

        if info.step_requires_closure:
            f = jit(with_closure)
        else:
            f = jit({"train": train, "bound": optimizer.step}.get(way, update))

        def step(k):
            x = [torch.randn_like(p) for p in params]
            if info.step_requires_closure or way == "train":
                result = f(x)
            else:
                hand_over(params, [t.to_sparse() for t in x] if info.only_supports_sparse_grads else x, way == "fresh")
                result = f()
            if scheduler is not None:
                scheduler.step()
            return {"result": result, "params": copy.deepcopy([p.detach() for p in params]), "state": copy.deepcopy(optimizer_state(optimizer))}

        return step

    return begin


def hand_over(params, grads, fresh):
    """Gradients come, in the tensors that are there unless there are none."""
    for p, grad in zip(params, grads, strict=True):
        if p.grad is None or fresh or grad.is_sparse:
            p.grad = grad
        else:
            p.grad.copy_(grad)


def optimizer_state(optimizer):
    """State and options of each parameter, in order."""
    state = [optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"]]
    return state, [{name: x for name, x in group.items() if name != "params"} for group in optimizer.param_groups]


KINDS = {
    "ops": operators(op_db, "forward", "mixed", "autocast", "inside", "noncontiguous", "kept", "inplace", "out", "backward", "grad"),
    "random": operators(list(filter(is_seeded, op_db)), "forward", "kept", "backward", "grad", programs=partial(op_programs, changed=unseeded)),
    "refs": operators(python_ref_db, "forward"),
    "foreach": operators(
        [*foreach_unary_op_db, *foreach_binary_op_db, *foreach_pointwise_op_db, *foreach_reduce_op_db, *foreach_other_op_db],
        "forward", "inplace", "backward",
    ),
    "hop": operators(hop_db, "forward", "backward"),
    "functions": operators(autograd_function_db, "forward", "backward", "grad"),
    "custom": operators(custom_op_db, "forward", "backward", "grad"),
    "modules": Kind(module_db, ("infer", "model", "autocast", "step"), lambda info: info.name, module_supports, module_programs),
    "criteria": Kind(criterion_tests, ("infer", "model", "autocast", "step"), criterion_name, criterion_supports, criterion_programs),
    "optim": Kind(optim_db, ("step", "fresh", "schedule", "bound", "train"), lambda info: info.name, optimizer_supports, optimizer_programs),
}  # fmt: skip
