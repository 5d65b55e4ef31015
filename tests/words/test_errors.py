"""What cgt says: every sentence is reached, and every advice is tried.

A call that cannot be replayed runs eagerly and leaves a reason, which tells what and where; the same
function as the advice has it replays. What cannot go on at all is raised, with the same care.
"""

import ast
import collections
import dataclasses
import functools
import inspect
import operator
import re
import threading
import types
import warnings
from pathlib import Path

import cgt_core as core
import numpy as np
import pytest
import test_failures  # noqa: F401  its tests reach sentences too
import torch
from cgt_core import HOST
from helpers import TOLD, Opaque, counters, replays_after, tells
from helpers import assert_same as same
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import cgt
from cgt.make import advice, ops, record
from cgt.run.observe import observe
from cgt.words import errors, options

pytestmark = pytest.mark.usefixtures("short_cool_down", "nothing_left_behind")

HERE = re.escape(__file__) + ":[0-9]+"
TABLE = torch.ones(2)
ARRAY = np.ones(2)
OF_ARRAY = torch.from_numpy(ARRAY)
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="says something about GPUs")
SENTENCES = {
    name
    for name, what in vars(errors).items()
    if inspect.isfunction(what) and what.__module__ == errors.__name__ and what not in (errors.code, errors.says, errors.phrase)
} - {"__annotate__"}  # of a module, from Python 3.14 on
SENTENCES -= {"odd_root", "backward_reads"}  # test_autograd.py
SENTENCES -= {"not_run_again", "refused_backward"}  # test_double_backward.py
SENTENCES -= {"first_gradient", "written_root", "outer_graph", "kept_argument", "stale_backward"}
SENTENCES -= {"modified", "saved_changed", "transforms"}
SENTENCES -= {"late_read"}  # test_memory.py
SENTENCES -= {"other_torch"}  # test_install.py
SENTENCES -= {"early_bound", "read_behind"}  # test_taps.py
SENTENCES -= {"changed_state", "replaced", "misaligned"}  # test_side_effects.py
SENTENCES -= {"forward_mode"}  # test_forward_mode.py
SENTENCES -= {"other_tensor", "beside"}  # test_identity.py
SENTENCES -= {"impure", "outside_draw", "advanced", "drawn_in_vain"}  # test_impure.py
SENTENCES -= {"scripted", "hidden_kernels"}  # test_traced.py
SENTENCES -= {"too_many_places", "new_code", "hidden_code"}  # test_code.py
SENTENCES -= {"higher_order_op", "compiled_on_host", "compiled_with_state", "compiles"}  # test_compile.py


# --- reasons: a function, words of its reason, and the same function as the advice has it -------


@dataclasses.dataclass
class Known:
    """A type that every pytree knows."""

    x: torch.Tensor


class Odd(torch.Tensor):
    """A tensor subclass."""


LIBRARY = torch.library.Library("cgt_tests", "DEF")
LIBRARY.define("odd(Tensor(a) x) -> (Tensor(a), Tensor)")
LIBRARY.impl("odd", lambda x: (x.view(-1), x * 2), "CompositeExplicitAutograd")
LIBRARY.define("scaled(Tensor x, Dict(str, int) by) -> Tensor")
LIBRARY.impl("scaled", lambda x, by: x * by["n"], "CPU")


def branch(x):
    return x * 2 if float(x.sum()) * 1 > 0 else -x


def branch_compared(x):
    return x * 2 if x.sum() > 0 else -x


def branch_inside(x):
    return torch.where(x.sum() > 0, x * 2, -x)


def branch_outside(x):
    return x * 2, -x, x.sum()


def resized(x):
    return x.clone().resize_(2) + 1


def resized_new(x):
    return x[:2].clone() + 1


def resized_old(x):
    return torch.empty(2, device=x.device).copy_(x[:2]) + 1


def reshaped(x):
    y = x.unsqueeze_(0) * 2
    x.squeeze_(0)
    return y


def kept_in(holder):
    def f(x):
        holder.append(x * 2)
        return x + 1 + 0 * len(holder)

    return f


def copied_into(holder):
    def f(x):
        holder.copy_(x * 2)
        return x + 1

    return f


def grown(x, d):
    d["y"] = x * 2
    return x + 1


def reason_table(device="cpu"):
    """(sentence, words, bad, [good...], extra arguments). `x` is the first argument of all."""

    return [
        ("host_read", "aten._local_scalar_dense", branch, [branch_inside, branch_outside, branch_compared]),
        ("dynamic_shape", "aten._unique2", lambda x: x.unique().sum(),
         [lambda x: torch.where(x > 0, x, 0).sum(), lambda x: x.topk(2).values.sum(), lambda x: x[x > 0].sum()]),
        ("memory_read", "Tensor.tolist", lambda x: sum(x.tolist()), [lambda x: x.sum()]),
        ("array_written", "aten.fill_", lambda x: (torch.from_numpy(ARRAY).fill_(3.0), x * 2)[1],
         [lambda x: (torch.tensor(ARRAY).fill_(3.0), x * 2)[1], lambda x: (OF_ARRAY, x * 2)[1]]),
        ("replaces_memory", "aten.resize_", resized, [resized_new, resized_old]),
        ("changes_shape", "aten.unsqueeze_", reshaped, [lambda x: x.unsqueeze(0) * 2]),
        ("layout", "sparse", lambda x: x.to_sparse().to_dense() * 2, [lambda x: x * 2]),
        ("made_leaf", "result", lambda x: torch.zeros(3, device=x.device, requires_grad=True), [lambda x: x * 2]),
        ("strange_output", r"result\[0\] is a Opaque", lambda x: (Opaque(x * 2),),
         [lambda x: (x * 2,), lambda x: [x * 2], lambda x: {"x": x * 2}, lambda x: Known(x * 2)]),
    ]  # fmt: skip


REASONS = [
    (row[0], k) for k, row in enumerate(reason_table())
]  # the rows are made anew in the test: they hold tensors
for SENTENCE, _ in REASONS:
    TOLD.setdefault(SENTENCE, []).append("table")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("sentence, k", REASONS)
def test_reason_tells_what_and_where_and_its_advice_replays(device, sentence, k):
    _, words, bad, goods = reason_table(device)[k]
    x = torch.tensor([1.0, -2.0, 3.0, 4.0], device=device)
    f = cgt.jit(bad)
    for _ in range(6):
        same(f(x), bad(x))
    assert (cgt.stats(f).records, cgt.stats(f).replays) == (0, 0)
    reason = " ".join(cgt.stats(f).reasons)
    assert re.search(words, reason), reason
    if "line" in inspect.signature(getattr(errors, sentence)).parameters:
        line = re.search(HERE, reason)
        assert line is not None, reason
        assert 0 <= int(line[0].rsplit(":", 1)[1]) - bad.__code__.co_firstlineno <= 3, reason
    assert reason in cgt.explain(f)
    for good in goods:
        replays_after(cgt.jit(good), x)


@pytest.mark.parametrize(
    "words, cls, good",
    [("Adam.step at .* with (fused|capturable)=True[.]", torch.optim.Adam, True), ("LBFGS.step at .* outside", torch.optim.LBFGS, False)],
)
@tells("optimizer_option", "optimizer_outside")
def test_optimizer_that_reads_numbers_is_told_with_what_helps(device, words, cls, good):
    x, adam = torch.ones(3, device=device), cls is torch.optim.Adam
    bad = {"lr": torch.tensor(0.1), "betas": (torch.tensor(0.9), torch.tensor(0.999))} if adam else {}

    def run(**options):
        w = torch.zeros(3, device=device, requires_grad=True)
        opt = cls([w], **options)

        def step(x, whole=True):
            def closure():
                opt.zero_grad()
                loss = (w * x).sum()
                loss.backward()
                return loss

            opt.step(closure) if whole else closure()
            return w.detach().clone()

        return opt, lambda: (w * x).sum(), cgt.jit(step)

    if adam and device.type == "cuda":
        pytest.skip("kernels of the GPU take such numbers: nothing is told, each value is another recording")
    *_, f = run(**bad)
    for _ in range(4):
        f(x)
    reason = next(iter(cgt.stats(f).reasons))
    assert re.search(words, reason) and re.search(HERE, reason) and cgt.stats(f).replays == 0
    opt, loss, f = run(**{"fused" if device.type == "cpu" else "capturable": True} if good else {})
    for _ in range(12):
        f(x, whole=good)
        if not good:
            opt.step(loss)
    assert cgt.stats(f).replays > 5, cgt.stats(f).reasons


@pytest.mark.parametrize("fused", [True, False])
@tells("scaler_option", "scaler_outside")
def test_scaler_whose_step_asks_the_host_is_told_with_what_helps(device, fused):
    x = torch.ones(3, device=device)

    def run(whole, **options):
        w = torch.zeros(3, device=device, requires_grad=True)
        opt = (torch.optim.SGD if fused else torch.optim.RMSprop)([w], **options)
        scaler = torch.amp.GradScaler(device.type)

        def update():
            scaler.step(opt)
            scaler.update()

        def step(x):
            opt.zero_grad()
            scaler.scale((w * x).sum()).backward()
            if whole:
                update()
                return type(x) is Odd  # so that no number stands in for another

        return cgt.jit(step), (lambda: None) if whole else update

    f, _ = run(True)
    for _ in range(4):
        f(x)
    (reason,) = cgt.stats(f).reasons
    advice = "SGD[.] Make the optimizer with fused=True" if fused else "RMSprop[.] Call .* outside"
    assert re.search(f"GradScaler.step at {HERE} .* {advice}", reason), reason
    f, update = run(fused, **({"fused": True} if fused else {}))
    for _ in range(5):
        f(x)
        update()
    assert cgt.stats(f).replays >= 2, cgt.stats(f).reasons


@GPU
@pytest.mark.parametrize(
    "sentence, words, bad, good",
    [
        ("cpu_tensor", r"shape \(2,\)", lambda x: x + (TABLE * 2).to("cuda"),
         lambda x: x + TABLE.to("cuda") * 2),
        ("cpu_state", "aten.normal_", lambda x: (torch.zeros(2).normal_(), x * 2)[1],
         lambda x: (torch.zeros(2, device="cuda").normal_(), x * 2)[1]),
        ("host_output", r"result\[1\]", lambda x: (x * 2, torch.zeros(2)),
         lambda x: (x * 2, torch.zeros(2, device="cuda"))),
    ],
)  # fmt: skip
@tells("cpu_tensor", "cpu_state", "host_output")
def test_reason_on_cpu_tensors_in_a_gpu_function_and_its_advice(sentence, words, bad, good):
    x = torch.tensor([1.0, 2.0], device="cuda")
    f = cgt.jit(bad)
    for _ in range(6):
        same(f(x), bad(x))
    assert (cgt.stats(f).records, cgt.stats(f).replays) == (0, 0)
    reason = " ".join(cgt.stats(f).reasons)
    assert re.search(words, reason), reason
    assert sentence == "host_output" or re.search(HERE, reason)
    replays_after(cgt.jit(good), x)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@tells("other_device")
def test_function_that_works_on_another_gpu_says_what_to_do():
    x = torch.ones(2, device="cuda:1")
    doubled = functools.partial(torch.cond, x.sum() > 0, lambda x: x * 2, lambda x: x - 1)
    f = cgt.jit(lambda x: doubled((x,)).to("cuda:0") + 1)
    for _ in range(4):
        same(f(x), torch.full((2,), 3.0, device="cuda:0"))
    reason = " ".join(cgt.stats(f).reasons)
    assert re.search(HERE, reason) and "works on cuda:0" in reason and "recorded on cuda:1" in reason
    replays_after(cgt.jit(lambda x: doubled((x,))), x)


@tells("untaped_op")
def test_op_without_a_tape_form_says_so():
    """On the CPU only: a CUDA graph has no tape."""
    f, x = cgt.jit(lambda x: torch.ops.cgt_tests.scaled(x, {"n": 3})), torch.ones(2)
    for _ in range(4):
        same(f(x), x * 3)
    (reason,) = cgt.stats(f).reasons
    assert "CGT222" in reason and "cgt_tests.scaled" in reason and re.search(HERE, reason)
    assert counters(f) == (1, 0, 0, 3) or counters(f)[2] == 0


@tells("unknown_output")
def test_tensor_that_no_op_made_is_named_and_one_of_an_op_replays(device):
    x, hidden = torch.ones(3, device=device), torch.zeros(3, device=device)
    reach = operator.itemgetter(0)
    box = collections.deque([hidden])
    f = cgt.jit(lambda x: (x * 2, reach(box)))
    for _ in range(5):
        assert f(x)[1] is hidden
    assert cgt.stats(f).replays == 0
    assert any("result[1] is a tensor that cgt did not see" in r for r in cgt.stats(f).reasons)
    replays_after(cgt.jit(lambda x: (x * 2, torch.zeros_like(x))), x)


@pytest.mark.parametrize("how", ["default", "own"])
@tells("reseeded")
def test_generator_that_is_seeded_inside_is_told_with_its_line_and_outside_it_replays(device, how):
    x = torch.zeros(3, device=device)
    generator = torch.Generator(device)

    def seeded(x):
        if how == "default":
            torch.manual_seed(3)
            return x + torch.rand_like(x)
        generator.manual_seed(3)
        return x + torch.rand(3, generator=generator, device=device)

    def drawn(x):
        if how == "default":
            return x + torch.rand_like(x)
        return x + torch.rand(3, generator=generator, device=device)

    f, g = cgt.jit(seeded), cgt.jit(drawn)
    want = seeded(x)
    for _ in range(5):
        same(f(x), want)
    assert cgt.stats(f).replays == 0
    reasons = " ".join(cgt.stats(f).reasons)
    assert re.search(HERE, reasons), reasons
    if device.type == "cpu":  # PyTorch itself refuses in a capture, in its own words
        assert "generator was set inside the function" in reasons
    for _ in range(5):
        torch.manual_seed(3)
        generator.manual_seed(3)
        same(g(x), want)
    assert counters(g) == (1, 1, 3, 0)


@tells("new_generator")
def test_generator_made_inside_is_told_and_one_from_outside_replays(device):
    x = torch.zeros(3, device=device)

    def made(x):
        generator = torch.Generator(device)
        generator.manual_seed(3)
        return x + torch.rand(3, generator=generator, device=device)

    f = cgt.jit(made)
    want = made(x)
    for _ in range(5):
        same(f(x), want)
    assert cgt.stats(f).replays == 0
    generator = torch.Generator(device)
    g = cgt.jit(lambda x: x + torch.rand(3, generator=generator, device=device))
    h = cgt.jit(
        lambda x, generator: x + torch.rand(3, generator=generator, device=device),
    )
    for _ in range(5):
        generator.manual_seed(3)
        same(g(x), want)
        generator.manual_seed(3)
        same(h(x, generator), want)
    assert counters(g) == counters(h) == (1, 1, 3, 0)


@tells("absolute")
def test_op_that_counts_from_the_start_of_memory_is_told_and_a_slice_replays(device):
    kept = []

    def call(f, ways):
        for k, way in enumerate(ways):
            kept.append((torch.arange(600.0, device=device) * k)[128:])
            same(f(kept[-1], way), f.__wrapped__(kept[-1], way))

    def late(x, way):  # warming sees the slice only, so the argument is copied
        return (x.as_strided((2,), (1,), 1) if way else x[1:3]) * 2

    f = cgt.jit(late, inputs="copied")
    call(f, [False, False, True, True, True, True])
    assert cgt.stats(f).replays == 0
    (reason,) = cgt.stats(f).reasons
    assert "aten.as_strided" in reason and re.search(HERE, reason) and "Use slices" in reason
    g = cgt.jit(lambda x, way: x[1:3] * 2, inputs="copied")
    call(g, [False] * 6)
    assert counters(g) == (1, 1, 4, 0)


@tells("odd_op")
def test_op_that_returns_a_view_and_a_new_tensor_is_told_and_two_ops_replay():
    """On the CPU only: a CUDA graph holds whatever kernels an op launches."""
    x = torch.ones(3)
    f = cgt.jit(lambda x: torch.ops.cgt_tests.odd(x)[1] + 1)
    for _ in range(4):
        same(f(x), x * 2 + 1)
    assert cgt.stats(f).replays == 0
    (reason,) = cgt.stats(f).reasons
    assert "cgt_tests.odd" in reason and re.search(HERE, reason)
    replays_after(cgt.jit(lambda x: (x.view(-1), x * 2)[1] + 1), x)


@tells("subclass")
def test_tensor_subclass_is_named_by_its_path_and_a_plain_tensor_replays(device):
    x = torch.ones(3, device=device)
    f = cgt.jit(lambda a, d: a + d["x"])
    for _ in range(3):
        same(f(x, {"x": x.as_subclass(Odd)}).as_subclass(torch.Tensor), x + x)
    (reason,) = cgt.stats(f).reasons
    assert "args[1]['x']" in reason and "Odd" in reason
    assert counters(f) == (0, 0, 0, 3)
    replays_after(f, x, {"x": x})


@tells("changed_arguments")
def test_function_that_grows_its_argument_says_so_and_returning_replays(device):
    x = torch.ones(3, device=device)
    f = cgt.jit(grown)
    for _ in range(4):
        d = {}
        same(f(x, d), x + 1)
        same(d, {"y": x * 2})
    assert cgt.stats(f).replays == 0
    assert any("structure of an argument" in reason for reason in cgt.stats(f).reasons)
    replays_after(cgt.jit(lambda x, d: (x + 1, {**d, "y": x * 2})), x, {})


@tells("kept_tensor")
def test_tensor_that_outlives_the_call_says_where_it_was_made_and_the_advice_replays(device):
    x, kept = torch.ones(3, device=device), []
    f = cgt.jit(kept_in(kept))
    for k in range(5):
        same(f(x * k), x * k + 1)
    assert len(kept) == 5 and cgt.stats(f).replays == 0
    for k in range(5):
        same(kept[k], x * k * 2)
    reason = next(iter(cgt.stats(f).reasons))
    assert "outlives the call" in reason and re.search(HERE, reason)
    replays_after(cgt.jit(lambda x: (x + 1, x * 2)), x)
    holder = torch.zeros(3, device=device)
    replays_after(cgt.jit(copied_into(holder)), x)
    same(holder, x * 2)


@tells("foreign_grad")
def test_grad_set_to_a_tensor_from_outside_is_named_and_outside_it_replays(device):
    w = torch.ones(3, device=device, requires_grad=True)
    given = [torch.full((3,), float(k), device=device) for k in range(5)]
    x = torch.ones(3, device=device)

    def assign(x, g):
        w.grad = g
        return x * 2

    f = cgt.jit(assign)
    for g in given:
        same(f(x, g), x * 2)
        assert w.grad is g
        w.grad = None
    assert cgt.stats(f).replays == 0
    assert any("w.grad" in reason for reason in cgt.stats(f).reasons), cgt.stats(f).reasons
    g = cgt.jit(lambda x: x * 2)
    for k in range(5):
        w.grad = given[k]
        same(g(x), x * 2)
    assert cgt.stats(g).replays == 3


@tells("busy")
def test_call_while_another_thread_records_runs_eagerly_and_replays_later(device):
    x = torch.ones(3, device=device)
    inside, go_on = threading.Event(), threading.Event()

    def slow(x):
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert go_on.wait(60)
        return x + 1

    recorder, f = cgt.jit(slow), cgt.jit(lambda x: x * 2)
    thread = threading.Thread(target=recorder, args=(x,))
    thread.start()
    assert inside.wait(60)
    same(f(x), x * 2)
    go_on.set()
    thread.join()
    assert list(cgt.stats(f).reasons) == [errors.busy()]
    assert counters(f) == (0, 0, 0, 1)
    replays_after(f, x)


class Ops(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        return op(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode, word", [(Ops, "dispatch mode"), (Calls, "function mode")])
@tells("blocked")
def test_call_under_a_mode_runs_plainly_and_replays_without(device, mode, word):
    x = torch.ones(3, device=device)
    f = cgt.jit(lambda x: x * 2)
    for _ in range(3):
        with mode():
            same(f(x), x * 2)
    (reason,) = cgt.stats(f).reasons
    assert word in reason and counters(f) == (0, 0, 0, 3)
    for _ in range(3):
        same(f(x), x * 2)
    assert counters(f) == (1, 1, 1, 3)
    with mode():
        same(f(x), x * 2)
    assert counters(f) == (1, 1, 1, 4), "a recording does not hide the mode"


@pytest.mark.parametrize("whole", [True, False])
def test_anomaly_mode_around_calls_finds_what_it_finds_in_eager(device, whole):
    """It names the node of the graph that made the first NaN: a replay has none."""
    told = []
    for wrap in (lambda function: function, cgt.jit):
        w, out = torch.nn.Parameter(torch.ones(4, device=device)), []
        forward = (lambda function: function) if whole else wrap
        model = forward(lambda x, w=w: (x * w).sqrt().sum())

        def step(x, w=w, model=model):
            model(x).backward()
            grad, w.grad = w.grad.clone(), None
            return grad

        f, x = wrap(step) if whole else step, torch.empty(4, device=device)
        for k in range(10):
            with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(k > 4):
                warnings.simplefilter("ignore")
                try:
                    out.append(f(x.fill_(-1.0 if k == 7 else 1.0)).isnan().any().item())
                except RuntimeError as error:
                    out.append(str(error))
                    w.grad = None
        told.append(out)
    assert told[0] == told[1] and "SqrtBackward0" in told[1][7] and told[1][6] is False
    s = cgt.stats(f if whole else model)
    assert s.replays >= 3 and errors.blocked(7) in s.reasons


def test_call_in_a_functorch_transform_runs_plainly(device):
    x = torch.arange(6.0, device=device).view(2, 3)
    f = cgt.jit(lambda x: (x * 2).sum())
    for _ in range(3):
        same(torch.func.vmap(f)(x), (x * 2).sum(1))
        same(torch.func.grad(f)(x), torch.full_like(x, 2))
    assert list(cgt.stats(f).reasons) == [errors.blocked(3)]
    assert cgt.stats(f).records == 0
    replays_after(f, x)


@GPU
def test_call_in_a_capture_of_somebody_else_becomes_part_of_it():
    x = torch.ones(3, device="cuda")
    f = cgt.jit(lambda x: x * 2)
    for _ in range(3):
        f(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = f(x)
    graph.replay()
    same(y, x * 2)
    assert errors.blocked(4) in cgt.stats(f).reasons
    replays_after(f, x)


# --- too many recordings -----------------------------------------------------------------------


@tells("limit", "arguments_changed")
def test_shapes_that_change_at_each_call_reach_the_limit_which_names_the_argument(device):
    f = cgt.jit(lambda d: d["x"] * 2, max_records=2)
    for n in range(1, 6):
        x = torch.ones(n, device=device)
        same(f({"x": x}), x * 2)
    assert counters(f) == (1, 2, 0, 2)
    reasons = " ".join(cgt.stats(f).reasons)
    assert "recorded 2 times" in reasons and "args[0]['x'] (recorded with (" in reasons
    replays_after(f, {"x": torch.ones(4, device=device)})


def test_a_plain_argument_that_differs_is_named_with_both_values(device):
    """A string, a key, a tensor instead of a number: each as the user wrote it. And recordings are told apart by it."""
    x = torch.ones(3, device=device)
    for mode, more, part in (
        ("b", {"k": (1, None)}, "args[1] (recorded with 'a', called with 'b')"),
        ("a", {"k": (1, True)}, "args[2]['k'][1] (recorded with None, called with True)"),
        ("a", {"j": 2}, "args[2]['k'][0] (recorded with 1, called with nothing)"),
        (x, {"k": (1, None)}, "args[1] (recorded with 'a', called with a tensor)"),
    ):
        f = cgt.jit(lambda x, mode, more: x * 2, max_records=1)
        for _ in range(3):
            f(x, "a", {"k": (1, None)})
        same(f(x, mode, more), x * 2)
        assert part in " ".join(cgt.stats(f).reasons)
    f = cgt.jit(lambda x, mode: x * 2)
    for size in (3, 3, 4):
        for mode in ("a", "b", "a"):
            f(torch.ones(size, device=device), mode)
    assert "args[1] = 'a', args[0] = (3,)" in cgt.explain(f) and "args[1] = 'b', args[0] = (4,)" in cgt.explain(f)


@tells("another_mode")
def test_a_mode_of_torch_that_differs_is_told(device):
    f, x = cgt.jit(lambda x: x * 2, max_records=1), torch.ones(3, device=device)
    for _ in range(3):
        f(x)
    with torch.inference_mode():
        same(f(x), x * 2)
    assert "a mode of torch (gradients," in " ".join(cgt.stats(f).reasons)


@tells("another_way")
def test_another_way_through_the_program_is_told(device, monkeypatch):
    """What ran before it is another recording: nothing of its arguments is to blame."""
    monkeypatch.setattr(options, "OVERHEAD", 0.05)
    monkeypatch.setattr(options, "ALLOWANCE", 0.0)
    last, x = cgt.jit(lambda y: y + 1), torch.ones(3, device=device)
    for k in range(24):
        first = cgt.jit(lambda x: x * k)
        for _ in range(3):
            first(x)
        cgt.step()
        same(last(first(x)), x * k + 1)
    assert "Each order of calls has recordings of its own" in " ".join(cgt.stats(last).reasons), cgt.explain(last)


@tells("lost")
def test_function_that_ends_its_own_iteration_runs_eagerly(device):
    inside = [True]

    def function(x):
        if inside[0]:
            cgt.step()
        return x * 2

    f, before = cgt.jit(function), cgt.jit(lambda x: x + 1)
    x = torch.ones(3, device=device)
    for _ in range(2):
        before(x)
    for _ in range(4):
        cgt.step()
        held = before(x)
        same(f(x), x * 2)
    assert counters(f) == (1, 0, 0, 3) and torch.equal(held, x + 1)
    assert list(cgt.stats(f).reasons) == [errors.lost()]
    inside[0] = False  # the advice
    for _ in range(4):
        cgt.step()
        held = before(x)
        same(f(x), x * 2)
    assert counters(f) == (1, 1, 3, 3) and torch.equal(held, x + 1)


@tells("still_held")
def test_result_that_is_held_longer_than_when_it_was_recorded_is_named_with_its_line(device):
    first, middle = cgt.jit(lambda x: x * 2), cgt.jit(lambda x: x * 3)
    second = cgt.jit(lambda x: x + 1, max_records=1)
    x, held = torch.ones(3, device=device), []
    for k in range(5):
        cgt.step()
        y = first(x)
        z = middle(y)
        if k == 3:
            held.append(y)
        del y
        same(second(x), x + 1)
        same(z, x * 6)
    assert counters(second) == (1, 1, 2, 1)
    (reason,) = cgt.stats(second).reasons
    assert re.search(f"the result made at {HERE} is still held, but had been dropped", reason)
    same(held[0], x * 2)


@tells("moved")
@pytest.mark.parametrize("how", ["written", "fixed"])
def test_moving_argument_that_cannot_be_copied_is_named(device, how):
    def write(a, x, y=None):
        return x.add_(1) if how == "written" else x * 1

    f = cgt.jit(write, max_records=2, inputs="fixed" if how == "fixed" else "auto")
    a, kept = torch.ones(1, device=device), []
    for k in range(7):
        x, y = torch.full((2, 3), float(k), device=device)  # parts of one tensor
        kept.append(x)
        same(f(a, x, y), torch.full((3,), k + (how == "written"), device=device) * 1.0)
    assert cgt.stats(f).records >= 2 and cgt.stats(f).replays == 0
    reasons = [reason for reason in cgt.stats(f).reasons if "the address of args[1] changed" in reason]
    addresses = {int(n, 16) for reason in reasons for n in re.findall("0x[0-9a-f]+", reason)}
    assert reasons and (len(addresses) >= 2) == core.debug_build() and addresses <= {x.data_ptr() for x in kept}
    for _ in range(8):  # the advice: reuse the tensor
        kept[0].copy_(kept[1])
        want = write(a, kept[1].clone())
        same(f(a, kept[0]), want)
    assert cgt.stats(f).replays > 0


@tells("place_changed")
def test_value_in_a_closure_that_changes_at_each_call_is_named_and_as_a_tensor_replays(device):
    scale = "0"
    x = torch.ones(3, device=device)
    f = cgt.jit(lambda x: x * float(scale), max_records=2)
    for k in range(5):
        scale = str(k)
        same(f(x), x * k)
    assert counters(f) == (1, 2, 0, 2)
    assert any("scale changes from call to call" in reason for reason in cgt.stats(f).reasons)
    same(f(x), x * 4.0)
    replays_after(f, x)  # kept constant
    g = cgt.jit(lambda x, scale: x * scale)
    scales = torch.arange(5.0, device=device)
    value = torch.zeros((), device=device)
    for k in range(5):  # as a tensor
        value.copy_(scales[k])
        same(g(x, value), x * k)
    assert counters(g) == (1, 1, 3, 0)


def test_limit_ends_after_the_cool_down(device):
    f = cgt.jit(lambda x: x * 2, max_records=1)
    xs = [torch.ones(n, device=device) for n in (1, 2)]
    f(xs[0]), f(xs[0]), f(xs[0])
    assert counters(f) == (1, 1, 1, 0)
    for _ in range(6):
        same(f(xs[1]), xs[1] * 2)
    stats = cgt.stats(f)
    assert stats.records == 2 and stats.eager == 2 and stats.replays == 4


# --- errors that are raised ----------------------------------------------------------------------


@tells("not_a_function")
@pytest.mark.parametrize("what", [3, "f", int, torch.nn.Linear, [len]])
def test_only_functions_and_modules_can_be_jitted(what):
    with pytest.raises(TypeError, match="takes a function or an nn.Module"):
        cgt.jit(what)


def generator():
    yield 1


async def coroutine():
    return 1


async def generator_of_coroutines():
    yield 1


@tells("no_generator_function")
@pytest.mark.parametrize(
    "function, kind",
    [(generator, "a generator"), (coroutine, "a coroutine"), (generator_of_coroutines, "a gener")],
)
def test_function_whose_body_runs_later_is_refused_by_name(function, kind):
    with pytest.raises(TypeError, match=f"{function.__name__} is {kind}.*Jit the function that"):
        cgt.jit(function)


@tells("bad_option")
@pytest.mark.parametrize(
    "option, value, good",
    [
        ("outputs", "keep", "rescue"), ("outputs", None, "error"), ("inputs", "rebound", "copied"),
        ("max_records", 0, 1), ("max_records", True, 2), ("max_records", "8", 8),
        ("static_argnums", ["x"], [1]), ("static_argnames", [1], ["mode"]),
    ],
)  # fmt: skip
def test_unknown_option_is_named_with_its_value_and_what_is_allowed(device, option, value, good):
    with pytest.raises(cgt.CgtError, match=re.escape(f"{option}={value!r}): expected")):
        cgt.jit(lambda x: x, **{option: value})
    with pytest.raises(cgt.CgtError, match=re.escape(f"{option}={value!r}): expected")):
        cgt.jit(**{option: value})
    replays_after(cgt.jit(lambda x, mode=0: x * 2, **{option: good}), torch.ones(3, device=device))


@tells("not_jitted")
@pytest.mark.parametrize("what", [len, 3, lambda x: x])
def test_reports_on_a_function_that_is_not_jitted_say_so(what):
    for report in (cgt.stats, cgt.explain, cgt.reset):
        with pytest.raises(cgt.CgtError, match="was not made by cgt.jit"):
            report(what)


@tells("poisoned")
def test_overwritten_result_names_both_lines_and_a_clone_or_rescue_stays(device):
    x = torch.ones(3, device=device)

    def double(x):
        return x * 2

    f = cgt.jit(double, outputs="error")
    for _ in range(3):
        f(x)
    kept = f(x)
    clone = kept.clone()
    here = inspect.currentframe().f_lineno
    cgt.step()
    with pytest.raises(RuntimeError, match="was overwritten") as caught:
        kept + 1
    lines = re.findall(HERE, str(caught.value))
    assert [int(line.rsplit(":", 1)[1]) for line in lines] == [
        double.__code__.co_firstlineno + 1,
        here + 1,
    ]
    same(clone, x * 2)
    g = cgt.jit(double, outputs="rescue")
    held = []
    for k in range(5):
        held.append(g(x * k))
    cgt.step()
    for k in range(5):
        same(held[k], x * k * 2)


def test_argument_that_cannot_be_compared_is_named_by_its_path(device):
    class Strange:
        def __eq__(self, other):
            raise ValueError("no")

        __hash__ = None

    f = cgt.jit(lambda x, thing: x * 2, static_argnums=1)
    x = torch.ones(3, device=device)
    with pytest.raises(cgt.CgtError, match=r"args\[1\]"):
        f(x, Strange())
    assert counters(f) == (0, 0, 0, 0)
    replays_after(f, x, "a value that can be")


@tells("mode_inside")
def test_ops_that_a_mode_inside_will_see_instead_of_us_are_told():
    """On releases whose modes have a lower dispatch key than ours; elsewhere we see what the mode makes of them."""
    seen = observe(HOST, -1)
    ops.see_op(seen, None, None, None)
    assert "dispatch mode" in seen.reason and "test_errors.py" in seen.reason


def parameter():
    p = torch.ones(2, 2, requires_grad=True)
    p.grad = torch.ones(2, 2)
    return p


@pytest.fixture
def capturing(monkeypatch):
    """What an optimizer asks tells it that it is being captured on a GPU."""
    stream = types.SimpleNamespace(is_capturing=lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda *_: stream)
    for owner, name in (
        (torch.backends.cuda, "is_built"), (torch.cuda, "is_available"), (torch.cuda, "is_current_stream_capturing"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, lambda: True)
    monkeypatch.setattr(advice, "is_on_cuda", lambda _: True)
    yield
    monkeypatch.undo()


REFUSING = {  # optimizer: the option that the reason names; None: it has none, and its check stumbles over that
    torch.optim.Adam: "capturable=True", torch.optim.AdamW: "capturable=True", torch.optim.RMSprop: "capturable=True",
    torch.optim.Adafactor: None,
}  # fmt: skip


@pytest.mark.parametrize("cls", REFUSING)
def test_an_optimizer_that_refuses_to_be_captured_is_told_by_where_it_does(capturing, cls):
    with pytest.raises((RuntimeError, KeyError)) as raised:
        cls([parameter()]).step()
    reason, helps = record.failure(raised.value), REFUSING[cls]
    assert f"{cls.__name__}.step at {__file__}" in reason
    assert f"Make the optimizer with {helps}." in reason if helps else "Call it outside" in reason


def other_errors():
    """{name: (optimizer, hook of its step)}: errors in a step that are no refusal, whatever they say."""

    def stumble(*_):
        raise RuntimeError("a hook of mine, which is not capturable")

    def out_of_memory(*_):
        torch.empty(2**60)

    plain = torch.optim.Adam([parameter()])
    return {
        "state on the host": (torch.optim.Adam([parameter()], capturable=True, foreach=False), None),
        "hook": (plain, stumble),
        "no memory": (plain, out_of_memory),
    }


@pytest.mark.parametrize("name", list(other_errors()))
def test_another_error_in_a_step_is_told_as_it_is(name):
    optimizer, hook = other_errors()[name]
    if hook is not None:
        optimizer.register_step_pre_hook(hook)
    with pytest.raises((RuntimeError, AssertionError)) as raised:
        optimizer.step()
    reason = record.failure(raised.value)
    assert f"{type(raised.value).__name__}: {str(raised.value)[:20]}" in reason and __file__ in reason


def test_every_sentence_has_a_code():
    named = {sentence: name for name, sentence in vars(errors).items() if inspect.isfunction(sentence)}
    coded = {named[sentence]: number for number, sentence in errors.CODES.items()}
    parts = {name for name in SENTENCES if name.startswith("told_")} | {"other_op", "beside_threads"}  # of other sentences
    assert SENTENCES - parts <= set(coded) and not parts & set(coded)
    assert all(100 <= number < 1000 for number in coded.values())
    assert errors.lost().startswith(f"CGT{coded['lost']}: ")


def test_every_sentence_is_given_what_it_needs():
    for path in sorted(Path(cgt.__file__).parent.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "errors":
                sentence = getattr(errors, call.func.attr)
                if sentence in errors.CODES.values() and not any(isinstance(a, ast.Starred) for a in call.args):
                    inspect.signature(sentence).bind(*call.args, **dict.fromkeys(k.arg for k in call.keywords))


def test_every_sentence_of_errors_is_reached(request):
    claim = re.compile(r"^@tells\(", re.M)
    needed = {path for path in Path(__file__).parents[1].rglob("test_*.py") if claim.search(path.read_text())}
    if not needed <= {item.path for item in request.session.items}:
        pytest.skip("says something of the whole suite")
    assert set(TOLD) <= SENTENCES
    assert sorted(SENTENCES - set(TOLD)) == []
