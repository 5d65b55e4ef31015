"""Private names of PyTorch that the Python half uses, those of torch._C among them all, and the start-up self-check.

What differs between releases is here and, for C++, in the `#if`s of core/cuda_shim.h and core/autograd_shim.h. Tested
on GPUs with torch 2.11, on the CPU with 2.11 to 2.15. Imports nothing of cgt's but the core.
"""

import inspect
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import cgt_core as core
import torch
import torch.utils._device  # torch.get_default_device would import it, in the middle of a run
from torch._C._dynamo import eval_frame
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)

F = TypeVar("F", bound=Callable)

without_torch_function = torch._C.DisableTorchFunctionSubclass
named_range = torch._C._profiler._RecordFunctionFast  # a tenth of what profiler.record_function costs
# Optimizers have such ranges: what torch.ops makes at the first one is made in front of all calls.
with torch.profiler.record_function("cgt"):
    pass
is_traceable = is_traceable_wrapper_subclass  # has it __tensor_flatten__ and __tensor_unflatten__?


class DispatchMode(TorchDispatchMode):
    """A dispatch mode under which functions that Dynamo compiled run as without it."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls):  # outside_dynamo does it, and imports nothing
        return False

    @classmethod
    def ignore_compile_internals(cls):
        return True


def outside_dynamo(function: F) -> F:
    """Have Dynamo compile neither the function's frames nor any below it, when compiled code comes to
    it through a graph break. (torch.compiler.disable without a frame, and without importing Dynamo.)"""
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


# Operators that read values behind the observer's back: numbers of tensors that become one, lengths by pointer.
READ_BEHIND = [
    "aten::_local_scalar_dense", "aten::_pad_packed_sequence", "aten::ctc_loss.Tensor",
    "aten::tensor_split.tensor_indices_or_sections",
    *(f"aten::{kind}.data" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")),
]  # fmt: skip


# The code in which optimizers look whether they are being captured, and refuse it.
CAPTURE_CHECKS = frozenset(
    inspect.unwrap(getattr(torch.optim.Optimizer, f"_{of}_graph_capture_health_check")).__code__
    for of in ("cuda", "accelerator")
    if hasattr(torch.optim.Optimizer, f"_{of}_graph_capture_health_check")
)


# Code that reads an optimizer's state: what is around each step, and what asks for all of it.
ASK_ALL = ("state_dict", "load_state_dict", "__getstate__")
READS_STATE = {inspect.unwrap(getattr(torch.optim.Optimizer, name)).__code__ for name in ASK_ALL}
READS_STATE.add(torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__)  # type: ignore[attr-defined]


# What taps.py replaces, as (owner, name), and what it needs for that.


def there(*targets: tuple[Any, str]) -> list[tuple[Any, str]]:
    """Those of these, (owner, name), that there are in this release."""
    return [target for target in targets if hasattr(*target)]


HIGHER_ORDER_CALL = (torch._ops.HigherOrderOperator, "__call__")
# What torch.cond and while_loop call, looked up then, when their arguments are checked (torch 2.13, 2.11), with a
# function of theirs: that name -> whose.
HOP_COMPILES = there((torch._higher_order_ops.utils, "_hop_compile_and_call"), (torch, "compile"))[0]
HOP_WRAPPERS = {"_cond_op_wrapper": "cond", "_while_loop_op_wrapper": "while_loop"}
JITERATORS = there((torch._C, "_cuda_jiterator_compile_and_launch_kernel"))  # launches such a kernel
SCRIPTED = there((torch.jit._recursive, "make_stub"))  # what torch.jit.script makes of a method, by its source
SAVED_HOOKS_DISABLE = (torch._C._autograd, "_saved_tensors_hooks_disable")  # by torch.func's transforms
KEEPS_GRAPH = (torch._C._autograd, "_get_current_graph_task_keep_graph")
TO_DLPACK = there((torch._C, "_to_dlpack"), (torch.utils.dlpack, "to_dlpack"), (torch, "to_dlpack"))
push_saved_hooks = torch._C._autograd._push_saved_tensors_default_hooks
pop_saved_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
graph_task = torch._C._current_graph_task_id
sequence_number = torch._C._autograd._get_sequence_nr  # nodes that this thread makes from now on have it, or a higher
# Does a backward run in a thread for each GPU, or in the calling one?
has_threads = torch._C._is_multithreading_enabled
# cuBLAS workspaces: freed, so that a capture allocates its own in cgt's pool and later ones may reuse the bytes; one
# from outside could be freed while graphs still write it.
clear_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
COMPILED_FRAME = "compile_wrapper"  # what a function is called that Dynamo compiled, and that sets these switches:


def compiled_switches() -> tuple[tuple[types.ModuleType, str], ...]:
    """Two switches that what Dynamo compiled sets before and behind it, the second at both; () before it is there."""
    module = sys.modules.get("torch._dynamo.eval_frame")
    return () if module is None else ((module, "set_skip_guard_eval_unsafe"), (module, "_maybe_set_eval_frame"))


def compilations() -> "torch._dynamo.callback.CompilationCallbackHandler | None":
    """What tells of the beginning and the end of compilations; None before Dynamo is imported."""
    return torch._dynamo.callback_handler if "torch._dynamo" in sys.modules else None


def region_call() -> tuple[type, str] | None:
    """What runs a region that inductor compiled; None before it is imported."""
    kind = getattr(sys.modules.get("torch._inductor.output_code"), "CompiledFxGraph", None)
    return None if kind is None else (kind, "__call__")


def sharded_module() -> type[torch.nn.Module] | None:
    """FullyShardedDataParallel; None before it is imported."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)


# What fully_shard keeps beside modules, as (module, class); of the last, one for each parameter, these attributes
# count.
_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_"
SHARDED_PARAMETER = (_FSDP + "param", "FSDPParam")
SHARDED_KINDS = frozenset((
    (_FSDP + "state", "FSDPState"), (_FSDP + "state", "FSDPStateContext"), (_FSDP + "param_group", "FSDPParamGroup"),
    (_FSDP + "param_group", "FSDPCommContext"), SHARDED_PARAMETER,
))  # fmt: skip
SHARDED_FIELDS = ("sharded_state", "sharded_param", "unsharded_accumulated_grad")
UNSHARDED = "_unsharded_param"  # all of it, once it was gathered: what a forward uses


def is_sharded_module(cls: type) -> bool:
    """Is this the class of a module that fully_shard took over?"""
    return issubclass(cls, getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ()))


def knows_sharding(parameter: "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam") -> bool:
    """Does this release keep of a parameter of fully_shard's what is asked here?"""
    return hasattr(parameter, "sharded_state") and hasattr(parameter, "all_gather_outputs")


def is_gathered(parameter: "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam") -> bool:
    """Does memory of its own hold all of this parameter of fully_shard's?"""
    return parameter.sharded_state.name == "UNSHARDED"


def gathered_in(parameter: "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam") -> list[torch.Tensor]:
    """Where all of it comes to: tensors whose memory has no bytes when it is not needed."""
    return parameter.all_gather_outputs


def is_pending(cls: type) -> bool:
    """Is this the class of what functional collectives give, which waits when it is used?"""
    return cls is getattr(sys.modules.get("torch.distributed._functional_collectives"), "AsyncCollectiveTensor", None)


def sharding_calls() -> tuple[tuple[type, str], ...]:
    """What works out, on tensors of its own, how an op's results are spread; () before it is imported."""
    module = sys.modules.get("torch.distributed.tensor._sharding_prop")
    calls = (("LocalLRUCache", "__call__"), ("ShardingPropagator", "propagate_op_sharding_non_cached"))
    return tuple(there(*((getattr(module, owner, None), name) for owner, name in calls)))


def knows_parallel() -> bool:
    """Has this release what a recording of DistributedDataParallel asks and tells its reducer?"""
    names = ("_check_reducer_finalized", "_reset_state", "_set_ddp_runtime_logging_sample_rate")
    return all(hasattr(getattr(torch.distributed, "Reducer", None), name) for name in names)


def odd_parallel(module: DistributedDataParallel) -> str | None:
    """By what a DistributedDataParallel does more in an iteration than a capture can hold; or None."""
    odd = {
        "find_unused_parameters": module.find_unused_parameters and not module.static_graph,
        "mixed_precision": module.mixed_precision is not None,
        "join()": module._join_config.enable,
        "the Python reducer": module._use_python_reducer,
    }
    return next((what for what, there in odd.items() if there), None)


def used_map_size(module: DistributedDataParallel) -> int:
    """How many numbers its table of the parameters with a gradient has; 0 where that table changes."""
    return module.static_graph and sum(p.requires_grad for p in module._module_parameters)


def parallel_iteration(module: DistributedDataParallel) -> int:
    """The last iteration of which a DistributedDataParallel asked for the times that it took."""
    return module.logger._get_ddp_logging_data().ints_map.get("iteration", 0)


def forget_reduction(module: DistributedDataParallel) -> bool:
    """Were gradients of it missing, of which others had come? Its next forward would raise: none are awaited now."""
    try:
        module.reducer._check_reducer_finalized()
    except RuntimeError:
        module.reducer._reset_state()
        return True
    return False


def set_parallel_statistics(module: DistributedDataParallel, n: int) -> None:
    """It takes times in its first ten iterations, and in each n-th."""
    module.reducer._set_ddp_runtime_logging_sample_rate(n)


def groups() -> dict:
    """Those in which this process exchanges data. No code runs, which an observed run would take for its own."""
    return getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_pg_map", {})


def nccl_timeout() -> float | None:
    """Seconds that a collective of NCCL's may take, in the group that allows the longest; None without one."""
    mine = [group for group, (backends, _) in list(groups().items()) if "nccl" in backends]
    options = [group._get_backend(torch.device("cuda")).options for group in mine]
    return max((one._timeout.total_seconds() for one in options), default=None)


def mode_is_active(mode: TorchDispatchMode) -> bool:
    """Is this dispatch mode on the calling thread's stack?"""
    return any(m is mode for m in _get_current_dispatch_mode_stack())


# Asked of autograd.


def may_donate(node: torch.autograd.graph.Node) -> bool:
    """Is this autograd node a compiled function, whose backward may write what was saved for it? Then it
    refuses to run in a graph that is kept ("donated buffers")."""
    metadata = getattr(getattr(type(node), "_forward_cls", None), "metadata", None)
    return getattr(metadata, "bw_donated_idxs", []) != []  # None: not known


def is_forward_ad() -> bool:
    """Is a level of forward-mode differentiation open (jvp, jacfwd, hessian, dual_level)?"""
    return torch.autograd.forward_ad._current_level >= 0


def creation_meta(t: torch.Tensor) -> int:
    """How a view was made, by which it refuses writes; 0: it refuses none."""
    return int(torch._C._autograd._get_creation_meta(t)) if t._is_view() else 0  # type: ignore[call-overload]  # C++'s


def is_mirrored(t: torch.Tensor) -> bool:
    """Is the tensor what the core takes it for?"""
    hooks = (t._backward_hooks is not None) + 2 * (t._post_accumulate_grad_hooks is not None)
    return core.mirrored(t) == (
        t.shape, t.stride(), t.storage_offset(), t.numel(), t.get_device(), t.requires_grad, hooks,
    )  # fmt: skip


def self_check() -> bool:
    """Hold what the core believes about tensors against what PyTorch says, once at import.

    Returns True if outputs may be handed out as the same tensors again. A mirror that does not fit
    is an ImportError: nothing would be safe. Reference counts that do not behave as calibrated only
    switch the reuse of output tensors off, with a warning.
    """
    t = torch.arange(6.0).view(2, 3)[:, 1:]
    generator, heard, awaited = torch.Generator(), torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    heard.register_hook(lambda _: None)
    awaited.register_post_accumulate_grad_hook(lambda _: None)
    known = core.generator_id(generator) == generator._cdata and all(map(is_mirrored, (t, heard, awaited, heard * 2)))
    if core.address(t) != t.data_ptr() or not known:
        raise ImportError(f"cgt does not know the tensor layout of torch {torch.__version__}")
    was, before = torch.is_autocast_enabled("cpu"), core.ambient()
    torch.set_autocast_enabled("cpu", not was)
    seen = core.ambient() != before
    torch.set_autocast_enabled("cpu", was)
    if not seen or core.ambient() != before:
        raise ImportError(f"cgt does not know how torch {torch.__version__} switches autocast")
    alone = core.reference_counts(t)
    leaf = torch.ones(2, 2, requires_grad=True)
    leaf.grad = torch.ones(2, 2)
    with_cpp = core.reference_counts(leaf.grad)  # a C++ holder and a passing Python reference
    saved = torch.ones(2)
    product = torch.ones(2, requires_grad=True) * saved  # a SavedVariable holds `saved`
    with_saved = core.reference_counts(saved)
    bump = with_saved[0] - alone[0]
    core.set_cpp_bump(bump)
    view = saved[:1]
    fits = (
        alone[1] == 1 and with_cpp[1] == 2 and with_saved[1] == 2 and bump in (0, 1)
        and core.reference_counts(saved)[2] >= 2 and product.requires_grad and view.numel() == 1
    )  # fmt: skip
    if not fits:
        warnings.warn(
            f"torch {torch.__version__} counts references in a way cgt does not know "
            f"({alone}, {with_cpp}, {with_saved}); outputs are copied out instead of reused.",
            stacklevel=2,
        )
    return fits
