"""A jitted function as an object: what it looks like, who may hold it and call it, and from where.

It may be a method, be called by another one, by eight threads or under a mode, be reset, or die: the
calls are right whatever happens, and a function that is gone takes all it had along."""

import collections
import copy
import functools
import gc
import inspect
import pickle
import pydoc
import types
import weakref

import pytest
import torch
from helpers import calls, counts, in_threads, jit_warm, not_audited, same, values
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# isort: split
import cgt_core as core

import cgt
from cgt.decide import freeing
from cgt.words import errors


def rows():
    freeing.sweep()
    gc.collect()
    freeing.sweep()
    return core.books()


# --- what a jitted function looks like --------------------------------------------------------


def test_name_docstring_signature_and_wrapped_function_are_kept():
    def scale(x: torch.Tensor, by: float = 2.0, *, out=None) -> torch.Tensor:
        """Scale x."""
        return x * by

    scale.note = "kept"
    f = cgt.jit(scale)
    assert (f.__name__, f.__doc__, f.__module__) == ("scale", "Scale x.", __name__)
    assert f.__qualname__ == scale.__qualname__ and f.note == "kept"
    assert inspect.signature(f) == inspect.signature(scale)
    assert f.__wrapped__ is scale and inspect.unwrap(f) is scale
    assert f.__annotations__ == scale.__annotations__
    assert callable(f) and inspect.isroutine(f)


@cgt.jit
def doubled(x):
    return x * 2


def test_repr_says_what_it_is_and_what_became_of_its_calls(device):
    f = jit_warm(lambda x: x * 2, values(device))
    assert repr(f) == f"<cgt.jit of {f.__wrapped__.__qualname__}, {cgt.stats(f).replays} of {cgt.stats(f).calls} calls replayed>"
    bound = nn.Linear(2, 2)
    assert "<cgt.jit of Linear.forward, 0 of 0" in repr(cgt.jit(bound.forward))
    assert "doubled(x)" in pydoc.render_doc(doubled, renderer=pydoc.plaintext)


def test_pickled_and_copied_by_name_as_functions_are():
    assert pickle.loads(pickle.dumps(doubled)) is doubled and copy.deepcopy(doubled) is doubled
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(cgt.jit(lambda x: x))


def test_method_is_bound(device):
    class Scaled:
        scale = 3.0

        @cgt.jit
        def by(self, x):
            return x * self.scale

    one, x = Scaled(), values(device)
    assert same(calls(one.by, 2, x), x * 3.0) and same(one.by(x), x * 3.0) and same(Scaled.by(one, x), x * 3.0)
    assert isinstance(one.by, types.MethodType) and one.by.__self__ is one and Scaled.by is Scaled.__dict__["by"]
    assert cgt.stats(Scaled.by).replays == 2


def test_jit_with_options_is_a_decorator(device):
    @cgt.jit(max_records=3, inputs="copied")
    def f(x):
        """Documented."""
        return x + 1

    x = values(device)
    assert f.__name__ == "f" and f.__doc__ == "Documented."
    assert same(calls(f, 3, x), x + 1)
    assert counts(f) == (1, 1, 1, 0) and cgt.stats(f).copied_bytes >= x.nbytes


@pytest.mark.parametrize(
    "make",
    [
        lambda: functools.partial(lambda x, y, scale=1.0: x * scale + y, scale=2.0),
        lambda: functools.partial(torch.add, alpha=2),
        lambda: lambda x, y: x * 2 + y,
        lambda: functools.partial(functools.partial(lambda s, x, y: x * s + y, 2.0)),
        lambda: torch.add,
        lambda: functools.wraps(torch.add)(lambda *a, **k: torch.add(*a, **k)),
    ],
    ids=["partial", "partial builtin", "lambda", "partial twice", "builtin", "wrapped"],
)
def test_any_callable_can_be_jitted(device, make):
    function = make()
    f = cgt.jit(function)
    x, y = values(device), values(device, seed=2)
    for _ in range(4):
        assert same(f(x, y), function(x, y))
    assert counts(f) == (1, 1, 2, 0)
    assert isinstance(f.__name__, str) and cgt.explain(f).splitlines()[1].endswith("0 eager")


def test_an_object_with_call_can_be_jitted(device):
    class Callable:
        scale = 2.0

        def __call__(self, x):
            return x * self.scale

    function = Callable()
    f = cgt.jit(function)
    x = values(device)
    assert same(calls(f, 3, x), x * 2.0)
    function.scale = 3.0
    assert same(calls(f, 2, x), x * 3.0)
    assert counts(f) == (1, 2, 2, 0)


def test_a_module_is_jitted_by_its_forward(device):
    class Layer(nn.Linear):
        def forward(self, x, scale: float = 2.0):
            """Apply the layer."""
            return super().forward(x) * scale

    layer = Layer(3, 2).to(device).requires_grad_(False)
    assert cgt.jit(layer) is layer
    x = values(device)
    assert same(calls(layer, 3, x), layer.forward(x))
    assert same(calls(layer, 2, x, scale=3.0), layer.forward(x, scale=3.0))
    assert counts(layer) == (1, 2, 2, 0)
    f = vars(layer)["_compiled_call_impl"]
    assert f.__name__ == "Layer" and f.__doc__ == "Apply the layer." and f.__self__ is layer
    assert repr(f) == "<cgt.jit of Layer, 2 of 5 calls replayed>" and repr(layer).startswith("Layer(in_features=3")
    assert inspect.signature(f) == inspect.signature(layer.forward)
    assert not f.__dict__.keys() & {"_parameters", "_modules", "training"}


# --- methods ----------------------------------------------------------------------------------


def scaled_class():
    class Scaled:
        def __init__(self, scale):
            self.scale = scale

        @cgt.jit
        def apply(self, x, shift=0.0):
            """Scale and shift."""
            return x * self.scale + shift

    return Scaled


def test_a_method_has_one_state_and_the_instance_is_an_argument(device):
    scaled = scaled_class()
    two, three = scaled(2.0), scaled(3.0)
    x = values(device)
    assert same(calls(two.apply, 3, x), x * 2.0 + 0.0)
    assert counts(two.apply) == (1, 1, 1, 0)
    assert same(calls(three.apply, 2, x), x * 3.0 + 0.0)
    assert same(two.apply(x), x * 2.0 + 0.0)
    assert same(scaled.apply(three, x), x * 3.0 + 0.0)
    assert same(calls(two.apply, 2, x, shift=1.0), x * 2.0 + 1.0)
    assert counts(scaled.apply) == counts(two.apply) == counts(three.apply) == (1, 3, 5, 0)
    assert two.apply.__doc__ == "Scale and shift." and two.apply.__self__ is two


def test_a_changed_attribute_that_the_method_reads_is_never_stale(device):
    scaled = scaled_class()
    instance = scaled(2.0)
    x = values(device)
    calls(instance.apply, 3, x)
    for scale in (3.0, 2.0, -0.0, 5):
        instance.scale = scale
        assert same(calls(instance.apply, 2, x), x * scale + 0.0)
    assert cgt.stats(instance.apply).replays >= 5
    before = cgt.stats(instance.apply)
    instance.unread = 1
    assert same(instance.apply(x), x * 5 + 0.0)
    assert cgt.stats(instance.apply).replays == before.replays + 1


def test_a_dead_instance_takes_its_rows_along(device):
    scaled = scaled_class()
    kept = scaled(2.0)
    x = values(device)
    calls(kept.apply, 3, x)
    before = rows()
    instance = scaled(3.0)
    calls(instance.apply, 3, x)
    assert rows()["nodes"] == before["nodes"] + 1
    alive = weakref.ref(instance)
    del instance
    after = rows()
    assert alive() is None
    assert (after["nodes"], after["specs"]) == (before["nodes"], before["specs"])
    assert same(kept.apply(x), x * 2.0 + 0.0)
    assert cgt.stats(kept.apply).replays == 4


def test_many_short_lived_instances_do_not_reach_the_limit(device):
    scaled = scaled_class()
    x = values(device)
    for k in range(20):
        instance = scaled(float(k))
        assert same(calls(instance.apply, 2, x), x * float(k) + 0.0)
    assert cgt.stats(scaled.apply).eager == 0


@pytest.mark.parametrize("wrap", [staticmethod, classmethod])
def test_static_and_class_methods_can_be_jitted(device, wrap):
    class Maths:
        factor = 2.0
        if wrap is staticmethod:
            apply = staticmethod(cgt.jit(lambda x: x * 2.0))
        else:
            apply = classmethod(cgt.jit(lambda cls, x: x * cls.factor))

    x = values(device)
    assert same(calls(Maths.apply, 2, x), x * 2.0)
    assert same(Maths().apply(x), x * 2.0)
    assert counts(Maths.apply) == (1, 1, 1, 0)


def test_a_method_with_slots_instead_of_a_dict_is_never_stale(device):
    class Slotted:
        __slots__ = ("scale", "__weakref__")

        @cgt.jit
        def apply(self, x):
            return x * self.scale

    instance = Slotted()
    instance.scale = 2.0
    x = values(device)
    assert same(calls(instance.apply, 3, x), x * 2.0)
    instance.scale = 3.0
    assert same(calls(instance.apply, 2, x), x * 3.0)
    assert counts(instance.apply) == (1, 2, 2, 0)


# --- jitted functions that call jitted functions ----------------------------------------------


def test_a_jitted_function_called_by_another_is_inlined(device):
    inner = cgt.jit(lambda x: x * 2)
    outer = cgt.jit(lambda x: inner(x) + inner(x + 1))
    x = values(device)
    assert same(calls(outer, 3, x), x * 2 + (x + 1) * 2)
    assert counts(outer) == (1, 1, 1, 0)
    assert counts(inner) == (0, 0, 0, 0) and cgt.stats(inner).reasons == {}
    assert same(calls(inner, 3, x), x * 2)
    assert counts(inner) == (1, 1, 1, 0)
    assert same(outer(x), x * 2 + (x + 1) * 2)
    assert counts(outer) == (1, 1, 2, 0)


def test_what_an_inlined_function_reads_is_guarded(device):
    scale = 2.0
    inner = cgt.jit(lambda x: x * scale)
    outer = cgt.jit(lambda x: inner(x) + 1)
    x = values(device)
    assert same(calls(outer, 3, x), x * 2.0 + 1)
    scale = 3.0
    assert same(calls(outer, 2, x), x * 3.0 + 1)
    assert counts(outer) == (1, 2, 2, 0)


def test_a_jitted_function_may_call_itself(device):
    @cgt.jit
    def power(x, n):
        return x if n == 0 else power(x, n - 1) * x

    x = values(device)
    for _ in range(3):
        assert same(power(x, 3), x * x * x * x)
    assert counts(power) == (1, 1, 1, 0)
    assert same(calls(power, 2, x, 1), x * x)
    assert counts(power) == (1, 2, 2, 0)


def test_results_of_one_function_are_arguments_of_the_next(device):
    first = cgt.jit(lambda x: x * 2)
    second = cgt.jit(lambda y: y + 1)
    x = values(device)
    for _ in range(5):
        assert same(second(first(x)), x * 2 + 1)
    assert counts(first) == (1, 1, 3, 0)
    assert cgt.stats(second).replays >= 2


# --- ends of lives ----------------------------------------------------------------------------


def test_a_function_nobody_holds_is_collected_with_its_rows(device):
    before = rows()
    weight = values(device)
    f = cgt.jit(lambda x: x @ weight.t())  # noqa: F821
    calls(f, 3, values(device))
    assert rows()["nodes"] == before["nodes"] + 1
    gone = [weakref.ref(f), weakref.ref(weight)]
    del f, weight
    assert rows() == before
    assert [r() for r in gone] == [None, None]


def test_a_function_held_by_what_it_reads_is_collected(device):
    class Trainer:
        def __init__(self):
            self.weight = values(device)
            self.run = cgt.jit(self.step)

        def step(self, x):
            return x * self.weight

    before = rows()
    trainer = Trainer()
    x = values(device)
    assert same(calls(trainer.run, 3, x), x * trainer.weight)
    assert counts(trainer.run) == (1, 1, 1, 0)
    gone = [weakref.ref(trainer), weakref.ref(trainer.run), weakref.ref(trainer.weight)]
    del trainer
    assert rows() == before
    assert [r() for r in gone] == [None, None, None]


def test_a_result_outlives_its_function(device):
    f = cgt.jit(lambda x: (x * 2, x + 1))
    x = values(device)
    double, more = calls(f, 3, x)
    assert counts(f) == (1, 1, 1, 0)
    del f
    rows()
    junk = [torch.full_like(x, 7.0) for _ in range(50)]
    assert same(double, x * 2) and same(more, x + 1)
    assert same(double.add_(1), x * 2 + 1) and len(junk) == 50


# --- reports and reset ------------------------------------------------------------------------


def test_stats_without_a_function_sum_over_all(device):
    f, g = cgt.jit(lambda x: x + 1), cgt.jit(lambda x: float(x.add_(0).sum()) + 1)
    x, others = values(device), cgt.stats()  # another test's functions may wait for the garbage collector
    calls(f, 4, x)
    calls(g, 3, x)
    one, two, total = cgt.stats(f), cgt.stats(g), cgt.stats()
    for name in one._fields:
        if name not in ("reasons", "pool_bytes", "seconds", "backward"):  # one pool serves all functions of a device
            assert getattr(total, name) - getattr(others, name) == getattr(one, name) + getattr(two, name), name
    warmed = one.seconds["warm"] + two.seconds["warm"]
    assert total.seconds["warm"] - others.seconds["warm"] == pytest.approx(warmed) and warmed > 0
    assert one.calls + two.calls == 7 and total.reasons.items() >= {**one.reasons, **two.reasons}.items() != {}.items()


def test_stats_are_a_named_tuple_with_every_counter(device):
    f = cgt.jit(lambda x: x + 1)
    calls(f, 3, values(device))
    stats = cgt.stats(f)
    assert isinstance(stats, tuple)
    assert set(stats._fields) >= set(
        "calls warmups records replays eager rebinds copied_bytes rescues rescued_bytes"
        " graph_nodes pool_bytes reasons seconds".split()
    )
    assert stats.graph_nodes >= 1 and stats.pool_bytes > 0 and stats.reasons == {}
    assert all(type(number) is int for number in stats[: stats._fields.index("reasons")])
    assert stats.backward is None
    assert set(stats.seconds) == {"warm", "look", "restore", "capture", "instantiate", "checkpoint"}
    assert stats.seconds["warm"] > 0 and stats.seconds["capture"] > 0


def test_explain_tells_the_counts_and_the_binding_of_each_input(device):
    weight = values(device)

    def scale(x, out):
        out.copy_(x * weight)

    f = cgt.jit(scale)
    out = torch.empty_like(weight)
    for k in range(4):
        f(values(device, seed=k).clone(), out)
    lines = cgt.explain(f).splitlines()
    stats = cgt.stats(f)
    assert lines[0].startswith(scale.__qualname__)
    assert f"{stats.calls} calls = 1 warmed + {stats.records} recorded" in lines[1]
    assert any(line.split()[:2] == ["recording", "on"] for line in lines)
    assert any("args[1] (written)" in line and "fixed" in line for line in lines)
    assert any("weight" in line and "fixed" in line for line in lines)


def test_stats_explain_and_reset_take_methods(device):
    scaled = scaled_class()
    instance = scaled(2.0)
    x = values(device)
    calls(instance.apply, 3, x)
    assert cgt.stats(instance.apply) == cgt.stats(scaled.apply)
    assert "Scaled.apply: 1 of 3 calls replayed" in cgt.explain(instance.apply)
    cgt.reset(instance.apply)
    assert same(calls(instance.apply, 3, x), x * 2.0 + 0.0)
    assert counts(scaled.apply) == (2, 2, 2, 0)


@pytest.mark.parametrize("function", [cgt.stats, cgt.explain, cgt.reset])
def test_reports_refuse_what_was_not_jitted(function):
    with pytest.raises(cgt.CgtError, match="was not made by cgt.jit"):
        function(torch.add)


@pytest.mark.parametrize("everything", [False, True])
def test_reset_frees_recordings_keeps_results_and_counters_and_starts_anew(device, everything):
    f = cgt.jit(lambda x: x * 2)
    before = rows()["nodes"]
    x = values(device)
    held = calls(f, 3, x)
    view = held[1:]
    assert rows()["nodes"] == before + 1
    cgt.reset() if everything else cgt.reset(f)
    assert rows()["nodes"] == before and counts(f) == (1, 1, 1, 0)
    assert same(held, x * 2) and same(view, (x * 2)[1:])
    old = held.clone()
    x.add_(1)
    for expected in [(2, 1, 1, 0), (2, 2, 1, 0), (2, 2, 2, 0)]:
        assert same(f(x), x * 2)
        assert counts(f) == expected
    assert same(held, old) and same(view, old[1:])


@not_audited("it counts its runs, which no guard sees")
@pytest.mark.parametrize("at", [0, 1], ids=["while warming", "while recording"])
def test_reset_inside_the_function_itself_does_no_harm(device, at):
    runs = collections.deque()

    @cgt.jit
    def f(x):
        runs.append(1)
        if len(runs) == at + 1:
            cgt.reset(f)
        return x * 2

    x = values(device)
    for _ in range(6):
        assert same(f(x), x * 2)
    core.check_table()
    assert cgt.stats(f).replays >= 2


def test_reset_of_an_unused_function_does_nothing(device):
    f = cgt.jit(lambda x: x * 2)
    cgt.reset(f)
    cgt.reset(f)
    x = values(device)
    assert same(calls(f, 3, x), x * 2)
    assert counts(f) == (1, 1, 1, 0)


# --- threads ----------------------------------------------------------------------------------


def passes(reason):
    """Does another thread explain this one? Its code counts, too, and may run for the first time."""
    return reason in (errors.busy(), errors.lost(), errors.hidden_code()) or "ran for the first time" in reason



@pytest.mark.parametrize("shared", [True, False], ids=["one input", "an input each"])
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
def test_eight_threads_call_one_function(device, shared, warm):
    weight = values(device, 16, 16)
    function = lambda x: (x @ weight).relu() + 1  # noqa: E731
    f = cgt.jit(function)
    inputs = [values(device, 8, 16, seed=0 if shared else k) for k in range(8)]
    if shared:
        inputs = inputs[:1] * 8
    wants = [function(x) for x in inputs]
    if warm:
        calls(f, 3, inputs[0])

    def work(k):
        for _ in range(50):
            assert same(f(inputs[k]), wants[k])

    in_threads(8, work)
    stats = cgt.stats(f)
    assert stats.calls == stats.warmups + stats.records + stats.replays + stats.eager
    assert stats.calls == 400 + 3 * warm and stats.replays > 0
    if warm and shared:
        assert counts(f) == (1, 1, 401, 0)
    assert all(passes(reason) for reason in stats.reasons), stats.reasons


def test_threads_that_hold_results_keep_their_values(device):
    f = cgt.jit(lambda x: x * 2 + 1)
    inputs = [values(device, 64, seed=k) for k in range(8)]
    calls(f, 3, inputs[0])
    calls(f, 3, inputs[1])
    replays = cgt.stats(f).replays

    def work(k):
        held = [f(inputs[k]) for _ in range(20)]
        want = inputs[k] * 2 + 1
        assert all(same(y, want) for y in held)

    in_threads(8, work)
    assert cgt.stats(f).replays == replays + 160


def test_thread_that_calls_only_inside_of_a_backward_is_one_more(device):
    """Autograd may run the hook in a thread of its own, which works for this one then."""
    several = lambda: core.path_state(-1 if device.type == "cpu" else 0)[2]  # noqa: E731
    f = cgt.jit(lambda x: x * 2)
    calls(f, 4, values(device, 3))
    assert not several()

    def differentiate(_):
        w = values(device, 3).requires_grad_()
        y = w * 1
        y.register_hook(f)
        y.sum().backward()
        assert same(w.grad, torch.full((3,), 2.0, device=device))

    in_threads(1, differentiate)
    assert several()


def test_thread_that_calls_while_another_one_records_is_one_more(device):
    """It runs eagerly and holds nothing; what the other one gets from then on is parted from its recording's memory."""
    several = lambda: core.path_state(-1 if device.type == "cpu" else 0)[2]  # noqa: E731
    x, g = values(device, 3), cgt.jit(lambda x: x + 1)

    def function(x):
        in_threads(1, lambda _: g(x))
        return x * 2

    assert not several()
    assert same(cgt.jit(function)(x), x * 2)
    assert list(cgt.stats(g).reasons) == [errors.busy()] and several() == x.is_cuda


def test_thread_that_works_on_the_host_leaves_a_gpu_to_one_thread(device):
    """It may call while another thread records: that costs results on the GPU no copy."""
    several = lambda: core.path_state(-1 if device.type == "cpu" else 0)[2]  # noqa: E731
    x, g = values(device, 3), cgt.jit(lambda x: x + 1)

    def function(x):
        in_threads(1, lambda _: g(torch.ones(3)))
        return x * 2

    assert same(cgt.jit(function)(x), x * 2)
    assert list(cgt.stats(g).reasons) == [errors.busy()] and not several()


def test_eight_threads_with_a_function_each(device):
    inputs = [values(device, 8, seed=k) for k in range(8)]
    functions = [cgt.jit(lambda x, k=k: x * k + 1) for k in range(8)]

    def work(k):
        for _ in range(20):
            assert same(functions[k](inputs[k]), inputs[k] * k + 1)

    in_threads(8, work)
    for k, f in enumerate(functions):
        assert same(calls(f, 3, inputs[k]), inputs[k] * k + 1)
        stats = cgt.stats(f)
        assert stats.calls == 23 and stats.replays > 0
        assert all(passes(reason) for reason in stats.reasons), stats.reasons


def test_threads_may_reset_while_others_call(device):
    f = cgt.jit(lambda x: x * 2)
    x = values(device)

    def work(k):
        for _ in range(25):
            assert same(f(x), x * 2)
            if k == 0:
                cgt.reset(f)

    in_threads(4, work)
    assert cgt.stats(f).calls == 100
    assert same(calls(f, 3, x), x * 2)


# --- modes and transforms ---------------------------------------------------------------------


class SeeOps(TorchDispatchMode):
    def __init__(self, ops):
        super().__init__()
        self.ops = ops

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.ops.append(op.overloadpacket.__name__)
        return op(*args, **(kwargs or {}))


class SeeFunctions(TorchFunctionMode):
    def __init__(self, ops):
        super().__init__()
        self.ops = ops

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.ops.append(function.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode, word", [(SeeOps, "dispatch mode"), (SeeFunctions, "function mode")])
def test_under_a_mode_the_plain_function_runs_and_the_mode_sees_it(device, mode, word):
    f = cgt.jit(lambda x: x.sin())
    x = values(device)
    ops = []
    with mode(ops):
        f(x)
    assert ops == ["sin"] and counts(f) == (0, 0, 0, 1)
    assert same(calls(f, 3, x), x.sin())
    with mode(ops):
        got = f(x)
    assert same(got, x.sin()) and ops == ["sin", "sin"]
    assert counts(f) == (1, 1, 1, 2)
    assert [word in reason for reason in cgt.stats(f).reasons] == [True]
    assert word in cgt.explain(f)
    assert same(f(x), x.sin()) and counts(f) == (1, 1, 2, 2)


def test_under_a_default_device_the_plain_function_runs(device):
    f = cgt.jit(lambda x: x + torch.ones(3, device=x.device))
    x = values(device)
    calls(f, 3, x)
    with torch.device(device):
        assert same(f(x), x + 1)
    assert counts(f) == (1, 1, 1, 1)


def test_under_functorch_transforms_the_plain_function_runs(device):
    f = cgt.jit(lambda x: x.sin().sum())
    x = values(device)
    calls(f, 3, x)
    batched = torch.func.vmap(f)(x)
    gradient = torch.func.grad(f)(x)
    assert same(batched, torch.func.vmap(f.__wrapped__)(x))
    assert same(gradient, torch.func.grad(f.__wrapped__)(x))
    assert counts(f) == (1, 1, 1, 2)
    assert ["functorch transform" in reason for reason in cgt.stats(f).reasons] == [True]
    assert same(f(x), x.sin().sum()) and counts(f) == (1, 1, 2, 2)


def test_a_transform_inside_the_function_is_recorded(device):
    weight = values(device, 3, 2)
    function = lambda x: torch.func.vmap(lambda row: row @ weight)(x)  # noqa: E731
    f = cgt.jit(function)
    x = values(device)
    for _ in range(4):
        assert same(f(x), function(x))
    assert counts(f) == (1, 1, 2, 0)


def test_a_tensor_subclass_runs_eagerly_with_a_reason(device):
    class Marked(torch.Tensor):
        pass

    f = cgt.jit(lambda t: t["x"] * 2)
    x = values(device)
    for _ in range(3):
        got = f({"x": x.as_subclass(Marked)})
        assert type(got) is Marked and torch.equal(got.as_subclass(torch.Tensor), x * 2)
    assert counts(f) == (0, 0, 0, 3)
    assert "args[0]['x'] is a Marked" in cgt.explain(f)
