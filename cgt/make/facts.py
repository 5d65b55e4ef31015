"""What an op is, before it runs: facts of its schema, once for each op, and questions about it with these arguments.
Nothing here changes anything. `call`: an ops.OpCall."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import cgt_core as core
import torch
from cgt_core import CUDA, NONE

from ..cuts import apart
from ..data import LIVE_NUMBER, NotedOp, Seen
from ..run import constants, tape
from ..run.devices import is_captured
from ..run.observe import is_host_recording, tensors_in, user_line
from ..words.private import OpOverload

# Which arguments of cuDNN's recurrent ops are the share that is dropped, whether it trains, and the buffer from which
# that is drawn.
DROPOUT = {"_cudnn_rnn": (11, 12, 15), "_cudnn_rnn_backward": (15, 16, 19)}
# Ops that write running mean and variance (arguments 3 and 4) in training (argument 5) without
# saying so in their schema.
SILENT_WRITES = frozenset("native_batch_norm cudnn_batch_norm miopen_batch_norm _batch_norm_impl_index".split())
GATHERS = "fsdp::all_gather_copy_in"  # and this one argument 1
# Ops that autocast changes below the dispatcher, where no tape sees it; the database of operators has no others.
CASTS_INSIDE = frozenset(("_trilinear", "linalg_pinv"))
# Ops that count from the start of the storage, which a copied slot's buffer does not have.
ABSOLUTE = frozenset(("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter"))
CHECKS = frozenset(("_linalg_check_errors.default", "normal.Tensor_Tensor", "normal.float_Tensor"))
DYNAMIC = frozenset(("_pack_padded_sequence",))  # by lengths on the host, though it has no tag for that
# Ops that keep seed and offset of their random numbers for a backward: on the device where a capture is under way, on
# the host elsewhere; and their backwards, which look for them there.
KEEPS_SEED = frozenset(
    f"{name}_attention{end}"
    for name in ("_scaled_dot_product_flash", "_scaled_dot_product_efficient", "_flash", "_efficient")
    for end in ("", "_forward", "_backward")
)
SEED = ("philox_seed", "philox_offset")
# Their schemas tell of no write: allreduce_ and its kin are known by this.
WAITS = ("barrier", "monitored_barrier_")  # in which the host waits
COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")
COPIES = frozenset(("_to_copy", "copy_", "_copy_from"))
INDEX_PUT = frozenset("index_put index_put_ _index_put_impl_ _unsafe_index_put".split())
INDEXES = INDEX_PUT | {"index", "_unsafe_index"}
SPECIAL = INDEXES | CASTS_INSIDE | apart.KNOWN | {"_cudnn_init_dropout_state"}  # which watchers know by name
REPLACES_MEMORY = frozenset("set_ resize_ resize_as_ _resize_output_ resize_storage_bytes_".split())


class OpFacts(NamedTuple):
    """What is known of an op before it runs."""

    op: Any  # which lives as long as this does, and so has its id to itself
    packet: str  # name without overload
    namespace: str
    writes: tuple  # positions and names of the arguments that it writes
    draws: bool  # takes random numbers
    reads: bool  # its result depends on values that Python sees
    checks: bool  # whether it raises does
    dynamic: bool  # the shape of its result depends on values
    reshapes: bool  # changes a tensor's shape in place
    replaces: bool  # gives a tensor other memory
    absolute: bool  # counts from the start of the storage
    copies: bool  # from one device to another, too
    moves: bool  # brings numbers of the host's to the GPU by a copy, which a capture forbids
    views: bool  # says that what it returns is its argument's memory
    pure: bool  # its results depend on its arguments alone
    usual: bool  # it computes with values that the host needs not see, writes none, and there is nothing special to it


FACTS = {}  # id of an op -> its facts. Its hash is a function in Python, and some ten times as slow.


def facts_of(op: OpOverload) -> OpFacts:
    """The facts of an op, found once for each."""
    return FACTS.get(id(op)) or FACTS.setdefault(id(op), find_facts(op))


def find_facts(op):
    packet, tags = op.overloadpacket.__name__, op.tags
    draws = torch.Tag.nondeterministic_seeded in tags
    pure = not (draws or op.namespace not in constants.KNOWN or packet in constants.READS_FILES)
    facts = OpFacts(
        op, packet, op.namespace, tape.writes(op), draws, torch.Tag.data_dependent_output in tags,
        f"{packet}.{op._overloadname}" in CHECKS,
        packet in DYNAMIC or torch.Tag.dynamic_output_shape in tags, torch.Tag.inplace_view in tags,
        packet in REPLACES_MEMORY, packet in ABSOLUTE, packet in COPIES, packet in COPIES | INDEX_PUT,
        any(r.alias_info is not None for r in op._schema.returns), pure, False,
    )  # fmt: skip
    odd = may_write(op, facts) or may_ask(op, facts) or facts.replaces or facts.reshapes or packet in SPECIAL
    return facts._replace(usual=not odd)


def may_write(op: OpOverload, facts: OpFacts) -> bool:
    """Could it write some of its arguments?"""
    return bool(facts.writes) or facts.namespace != "aten" or facts.packet in SILENT_WRITES


def may_ask(op: OpOverload, facts: OpFacts) -> bool:
    """Could it, with some arguments, depend on values that the host sees?"""
    names = {argument.name for argument in op._schema.arguments}
    return facts.reads or facts.checks or facts.dynamic or "device" in names


def usual_inputs(seen: Seen, inputs: list[torch.Tensor]) -> set[int] | None:
    """The storages of what a usual op works on, if these are tensors that every recording takes, of the run's device
    and not all constants, as most are: nothing is to be judged then. Else None."""
    if seen.run.apart or seen.cuts.bodies or seen.ranks.parallel:
        return None
    return core.usual(inputs, seen.run.device if seen.run.driver == CUDA else -1, seen.constants.memory)


def seeds_on_host(op: OpOverload, args: tuple, kwargs: dict) -> list[torch.Tensor] | None:
    """What `proceed` wants if a backward of attention runs outside of a capture with seed and offset of a forward that
    was captured: it would read them where they are not. None if they are where it expects them."""
    given = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
    wrong = [id(t) for t in map(given.get, SEED) if t is not None and t.is_cuda and t.dim() == 0 and not is_captured(t)]
    if not wrong:
        return None
    return [t.cpu() if id(t) in wrong else t for t in tensors_in(kwargs.values(), tensors_in(args, []))]


def written_by(call: Any) -> list[torch.Tensor]:
    """The tensors that the op writes, by its schema or, where that is silent, by what we know of it."""
    args, facts = call.args, call.facts
    written = [args[k] if k < len(args) else call.kwargs.get(name) for k, name in facts.writes]
    if facts.packet in SILENT_WRITES and args[5]:  # training
        written += args[3:5]
    elif facts.namespace == "fsdp" and call.op.name() == GATHERS:
        written.append(args[1])
    elif facts.namespace == "c10d":
        written += call.inputs
    return tensors_in(written, [])


def is_dynamic(call: Any) -> bool:
    """Does the shape of an op's result depend on values?"""
    packet, inputs = call.facts.packet, call.inputs
    if packet in apart.KNOWN and any(t.is_cuda for t in inputs):
        return False
    return call.facts.dynamic and (packet != "index" or any(t.dtype in (torch.bool, torch.uint8) for t in inputs[1:]))


def brings_to_gpu(call: Any) -> bool:
    """Does an op in a capture need memory of the host's on the GPU? A number is an argument of a kernel, mostly; where
    a mask says what it replaces, too (PyTorch fills then, and else counts the mask's elements); lengths of packed
    sequences are read there; and what has to do with the host alone runs there and then."""
    fills_in = call.facts.packet in INDEX_PUT and any(t.dtype == torch.bool for t in call.inputs[1:-1])
    moves = call.facts.moves and not fills_in
    from_host = call.facts.packet not in DYNAMIC and not is_hosts(call)
    return from_host and any(t.dim() or moves for t in call.inputs if not t.is_cuda)


def is_hosts(call: Any) -> bool:
    """Has an op to do with the host alone?"""
    return not any(t.is_cuda for t in call.inputs) and torch.device(call.kwargs.get("device") or "cpu").type == "cpu"


def is_to_host(call: Any) -> bool:
    """Does an op with these arguments copy from the GPU to the host?"""
    to = call.kwargs.get("device")
    return to is not None and torch.device(to).type == "cpu" and any(t.is_cuda for t in call.inputs)


def odd_kind(tensors: Iterable[torch.Tensor]) -> str | None:
    """What the first of these tensors is that no recording can hold; None if there is none."""
    t = next((t for t in tensors if not core.is_plain(t)), None)
    if t is None:
        return None
    if type(t).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"a {type(t).__name__}, a tensor subclass"
    if t.is_nested or t.is_quantized:
        return "a nested tensor" if t.is_nested else "a quantized tensor"
    return "zeros of autograd's, without memory" if t._is_zerotensor() else f"a tensor of layout {t.layout}"


def is_zeros(t: torch.Tensor) -> bool:
    """Is it zeros that autograd makes without memory, for a tangent or gradient? On the host ops take them, nobody
    writes them, and they may be handed out. A CUDA graph is not recorded with them."""
    return t._is_zerotensor() and t.is_cpu


def is_of_shapes(call: Any) -> bool:
    """Does an op work out a shape alone, on tensors without memory, as autograd does with its zeros?"""
    return any(t.is_meta for t in call.inputs) or str(call.kwargs.get("device")) == "meta"


def is_elsewhere(seen: Seen, t: torch.Tensor) -> bool:
    """Is t on a device that this run does not record?"""
    if t.is_cuda:
        return t.device.index != seen.run.device or is_host_recording(seen)
    return t.device.type != "cpu"


def is_guarded(seen: Seen, t: torch.Tensor) -> bool:
    """Are this CPU tensor's bytes constant, or compared at each call? What an op reads while it is recorded must be; a
    warm-up does not know yet."""
    sid = core.storage_id(t)
    compared = not t.is_cuda and (not seen.run.recording or (sid in seen.run.slots and sid not in seen.copied.swaps))
    return sid in seen.constants.memory or not t.numel() or compared


def is_alias_made(seen: Seen, call: Any) -> bool:
    """Is this how C++ makes a tensor over a storage: set_ of an empty one that the call made? cuDNN's recurrent layers
    take their weights so. (A tape has no place for a storage.)"""
    if seen.run.driver != CUDA or len(call.args) < 2 or len(call.inputs) != 1:
        return False
    (t,) = call.inputs
    return t.is_cuda and not t.numel() and core.storage_id(t) in seen.made


def is_aside(seen: Seen, call: Any) -> bool:
    """Is this an op of the host's in a function on the GPU that draws random numbers, or works on such? It runs for
    real while the function is recorded, and a replay runs it beside the graph."""
    if seen.run.graph is not None or seen.cuts.bodies or call.written or call.facts.namespace not in constants.KNOWN:
        return False
    if not is_hosts(call):
        return False
    draws = call.facts.draws and call.generator is None
    mine = [t for t in call.inputs if core.storage_id(t) not in seen.host.drawn]
    fit = all(core.storage_id(t) in seen.constants.memory or (not t.dim() and is_guarded(seen, t)) for t in mine)
    return fit and (draws or len(mine) < len(call.inputs))


def noted(seen: Seen, call: Any) -> NotedOp:
    """The op, to be compared with that of another run."""
    live_at = {(k, part) for k, part, _ in core.numbers_of_op()}
    operands = [told_operand(x, (k, NONE) in live_at or (k, 0) in live_at) for k, x in enumerate(call.args)]
    operands += [f"{name}={told_operand(x, False)}" for name, x in call.kwargs.items()]
    return NotedOp(str(call.op), user_line(seen), tuple(operands))


def told_operand(x, is_live):
    if is_live:
        return LIVE_NUMBER
    if isinstance(x, torch.Tensor):
        return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
    if type(x) in (list, tuple):
        return f"[{', '.join(told_operand(one, False) for one in x)}]"
    return str(x) if type(x) is not torch.Generator else "generator"


def counts_inside(call: Any) -> bool:
    """Of an op that counts from the start of the storage: does its tensor begin there, and hold all that it comes to?
    So does a copy of it then."""
    given = dict(zip((a.name for a in call.op._schema.arguments), call.args, strict=False)) | call.kwargs
    t, size = given.get("self", given.get("a")), given.get("size", ())  # prims say a
    if t is None or call.numbers or "stride" not in given:
        return False
    steps = zip(size, given["stride"], strict=True)
    end = (given.get("storage_offset") or 0) + sum((n - 1) * step for n, step in steps)
    return t.storage_offset() == 0 and (0 in size or (end + 1) * t.itemsize <= core.span(t))
