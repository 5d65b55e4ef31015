"""What a recording is guarded by: whatever changes the answer makes another child, and what changes
back replays the old one. Never stale, never recorded again for nothing."""

import collections
import contextlib
import copy
import dataclasses
import functools
import itertools
import types

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from torch import nn

import cgt

WEIGHT = None  # tests set these three
SCALE = 2.0
HELPER = torch.sin


@dataclasses.dataclass
class Config:
    weight: object
    scale: float = 2.0


class Slotted:
    __slots__ = ("weight", "scale")

    def __init__(self, weight, scale):
        self.weight, self.scale = weight, scale


def values(device, *shape, seed=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (4, 4)), generator=generator).to(device=device, dtype=dtype)


def counts(f):
    """(warmups, records, replays, eager), and that they add up."""
    s = cgt.stats(f)
    assert s.calls == s.warmups + s.records + s.replays + s.eager
    return s.warmups, s.records, s.replays, s.eager


def bits(t):
    """A tensor that is equal to another one's only where all bits are."""
    t = t.detach().resolve_conj().resolve_neg().contiguous()
    if t.is_complex():
        t = torch.view_as_real(t)
    return t.view(
        {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(t.element_size(), torch.uint8)
    )


def same(got, want):
    """Bit-equal, nan included, with the same metadata, in the same containers."""
    if type(got) is not type(want):
        return False
    if isinstance(want, torch.Tensor):
        facts = "dtype device shape requires_grad layout".split()
        return (
            all(getattr(got, fact) == getattr(want, fact) for fact in facts)
            and got.stride() == want.stride()
            and (got.is_conj(), got.is_neg(), got.is_inference())
            == (want.is_conj(), want.is_neg(), want.is_inference())
            and torch.equal(bits(got), bits(want))
        )
    if isinstance(want, (tuple, list)):
        return len(got) == len(want) and all(map(same, got, want))
    return repr(got) == repr(want)


def settle(f, function, *args):
    """Warm, record, replay."""
    for _ in range(3):
        assert same(f(*args), function(*args))
    assert counts(f) == (1, 1, 1, 0)


def recorded_then_replayed(f, function, *args):
    """Something changed: the next call records, and the one after replays."""
    warmups, records, replays, eager = counts(f)
    assert same(f(*args), function(*args))
    assert counts(f) == (warmups, records + 1, replays, eager)
    replayed(f, function, *args)


def replayed(f, function, *args):
    """The next call is right, and replayed."""
    warmups, records, replays, eager = counts(f)
    assert same(f(*args), function(*args))
    assert counts(f) == (warmups, records, replays + 1, eager)


# --- ambient state ----------------------------------------------------------------------------


@contextlib.contextmanager
def switched(get, put, value):
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def attribute(holder, name, value):
    return switched(lambda: getattr(holder, name), lambda v: setattr(holder, name, v), value)


def flag(kind):
    backend = torch.backends.cuda
    now = getattr(backend, f"{kind}_sdp_enabled")
    return switched(now, getattr(backend, f"enable_{kind}_sdp"), not now())


def autocast_state(kind):
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def product(x, w):
    return x @ w


def plain(x, w):
    return x * w + 1, torch.ones(2, device=x.device)


def attention(x, w):
    return nn.functional.scaled_dot_product_attention(x[None, None], w[None, None], x[None, None])


AMBIENT = {  # name: (device -> context manager, function, what the function sees of it)
    "no_grad": (lambda d: torch.no_grad(), product, torch.is_grad_enabled),
    "inference_mode": (lambda d: torch.inference_mode(), product, torch.is_inference_mode_enabled),
    "autocast bf16": (
        lambda d: torch.autocast(d.type, dtype=torch.bfloat16), product, autocast_state,
    ),
    "autocast fp16": (
        lambda d: torch.autocast(d.type, dtype=torch.float16), product, autocast_state,
    ),
    "autocast cache": (
        lambda d: switched(
            torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled,
            not torch.is_autocast_cache_enabled(),
        ), product, torch.is_autocast_cache_enabled,
    ),
    "default dtype": (
        lambda d: switched(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
        plain, torch.get_default_dtype,
    ),
    "deterministic": (
        lambda d: switched(
            torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
        ), plain, torch.are_deterministic_algorithms_enabled,
    ),
    "matmul precision": (
        lambda d: switched(
            torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
        ), product, torch.get_float32_matmul_precision,
    ),
    "tf32": (
        lambda d: attribute(
            torch.backends.cuda.matmul, "allow_tf32", not torch.backends.cuda.matmul.allow_tf32
        ), product, lambda: torch.backends.cuda.matmul.allow_tf32,
    ),
    "flash sdp": (lambda d: flag("flash"), attention, torch.backends.cuda.flash_sdp_enabled),
    "efficient sdp": (
        lambda d: flag("mem_efficient"), attention, torch.backends.cuda.mem_efficient_sdp_enabled,
    ),
    "math sdp": (lambda d: flag("math"), attention, torch.backends.cuda.math_sdp_enabled),
    "cudnn sdp": (lambda d: flag("cudnn"), attention, torch.backends.cuda.cudnn_sdp_enabled),
    "cudnn": (
        lambda d: attribute(torch.backends.cudnn, "enabled", not torch.backends.cudnn.enabled),
        plain, lambda: torch.backends.cudnn.enabled,
    ),
    "cudnn benchmark": (
        lambda d: attribute(torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark),
        plain, lambda: torch.backends.cudnn.benchmark,
    ),
    "mkldnn": (
        lambda d: torch.backends.mkldnn.flags(enabled=not torch.backends.mkldnn.enabled),
        product, lambda: torch._C._get_mkldnn_enabled(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AMBIENT)
def test_another_ambient_state_is_another_child_and_going_back_replays(device, name):
    make, op, sees = AMBIENT[name]
    ask = (lambda: sees(device.type)) if sees is autocast_state else sees
    function = lambda x, w: (op(x, w), ask())  # noqa: E731
    f = cgt.jit(function)
    x, w = values(device), values(device, seed=2)
    with make(device):  # some switches know "unset", which a visit turns into the default
        pass
    settle(f, function, x, w)
    before = ask()
    with make(device):
        assert ask() != before
        recorded_then_replayed(f, function, x, w)
    assert ask() == before
    replayed(f, function, x, w)
    with make(device):
        replayed(f, function, x, w)
    assert counts(f) == (1, 2, 4, 0)


def test_grad_mode_inside_no_grad_is_the_mode_outside(device):
    f = cgt.jit(product)
    x, w = values(device), values(device, seed=2)
    settle(f, product, x, w)
    with torch.no_grad():
        recorded_then_replayed(f, product, x, w)
        with torch.enable_grad():
            replayed(f, product, x, w)
    with torch.inference_mode():
        recorded_then_replayed(f, product, x, w)
        with torch.inference_mode(False):
            replayed(f, product, x, w)


def test_another_autocast_dtype_is_another_child(device):
    f = cgt.jit(product)
    x, w = values(device), values(device, seed=2)
    settle(f, product, x, w)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(device.type, dtype=dtype):
            assert f(x, w).dtype is dtype
            replayed(f, product, x, w)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=False):
        assert f(x, w).dtype is torch.float32
    assert cgt.stats(f).records >= 3 and cgt.stats(f).eager == 0


def test_autocast_inside_the_function_needs_no_guard(device):
    def function(x, w):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return x @ w, w @ x

    f = cgt.jit(function)
    x, w = values(device), values(device, seed=2)
    settle(f, function, x, w)
    assert function(x, w)[0].dtype is torch.bfloat16
    w.mul_(2)  # autocast's cache of casts must not outlive the recording
    replayed(f, function, x, w)


def test_weights_cast_by_autocast_are_never_stale(device):
    weight = nn.Parameter(values(device))
    function = lambda x: x @ weight  # noqa: E731
    f = cgt.jit(function)
    x = values(device, seed=2)
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16):
        settle(f, function, x)
        weight.mul_(2)
        torch.clear_autocast_cache()
        replayed(f, function, x)


# --- tensors that are reached without arguments -----------------------------------------------

# Each maker takes a device and returns (function of x, changes); every change replaces something.


def make_closure(device):
    weight = values(device)

    def change():
        nonlocal weight
        weight = torch.randn_like(weight)

    return lambda x: x @ weight, [change, change]


def make_global(device):
    def change():
        global WEIGHT
        WEIGHT = torch.randn(4, 4, device=device)

    change()
    return lambda x: x @ WEIGHT, [change, change]


def make_python_module(device):
    settings_module = types.ModuleType("settings_of_a_test")
    settings_module.weight = values(device)

    def change():
        settings_module.weight = torch.randn(4, 4, device=device)

    return lambda x: x @ settings_module.weight, [change, change]


def make_list(device):
    weights = [values(device), values(device, seed=2)]

    def function(x):
        for weight in weights:
            x = x @ weight
        return x

    return function, [
        lambda: weights.__setitem__(1, values(device, seed=3)),
        lambda: weights.append(values(device, seed=4)),
        lambda: weights.reverse(),
        lambda: weights.pop(),
        lambda: weights.__setitem__(slice(None), [values(device, seed=5)]),
    ]


def make_dict(device):
    weights = {"a": values(device), "b": values(device, seed=2)}

    def function(x):
        for weight in weights.values():
            x = x @ weight
        return x

    return function, [
        lambda: weights.update(a=values(device, seed=3)),
        lambda: weights.update(c=values(device, seed=4)),
        lambda: weights.pop("a"),
        lambda: weights.clear(),
    ]


def make_nested(device):
    layers = {"x": [{"w": values(device)}]}
    return lambda x: x @ layers["x"][0]["w"], [
        lambda: layers["x"][0].update(w=values(device, seed=3)),
        lambda: layers["x"].__setitem__(0, {"w": values(device, seed=4)}),
        lambda: layers.update(x=[{"w": values(device, seed=5)}]),
    ]


def make_tuple(device):
    pair = (values(device), values(device, seed=2))

    def change():
        nonlocal pair
        pair = (pair[0], values(device, seed=3))

    return lambda x: x @ pair[0] @ pair[1], [change]


def make_dataclass(device):
    config = Config(values(device))
    return lambda x: x @ config.weight, [
        lambda: setattr(config, "weight", values(device, seed=3)),
        lambda: vars(config).update(weight=values(device, seed=4)),
    ]


def make_slots(device):
    config = Slotted(values(device), 2.0)
    return lambda x: x @ config.weight, [lambda: setattr(config, "weight", values(device, seed=3))]


def make_class(device):
    class Constants:
        weight = values(device)

    return lambda x: x @ Constants.weight, [
        lambda: setattr(Constants, "weight", values(device, seed=3))
    ]


def make_default(device):
    def function(x, weight=values(device)):  # noqa: B008
        return x @ weight

    return function, [lambda: setattr(function, "__defaults__", (values(device, seed=3),))]


def make_data(device):
    weight, held = values(device), []
    changes = [
        lambda: setattr(weight, "data", values(device, seed=3)),
        lambda: weight.set_(values(device, seed=4)),
        lambda: setattr(weight, "data", values(device, 4, 2, seed=5)),
        lambda: setattr(weight, "data", values(device, 2, 4, seed=6).t()),
        lambda: torch.utils.swap_tensors(weight, values(device, seed=7)),
    ]

    def hold_and(change):  # memory that came back at the same address would be an old child's
        held.append(weight.detach())
        change()

    return lambda x: x @ weight, [functools.partial(hold_and, change) for change in changes]


def make_global_function(device):
    def change():
        global HELPER
        HELPER = torch.cos if HELPER is torch.sin else torch.sin

    return lambda x: HELPER(x), [change]


REACHED = {
    name.removeprefix("make_"): make
    for name, make in list(globals().items())
    if name.startswith("make_")
}


@pytest.mark.parametrize("name", REACHED)
def test_a_replaced_tensor_is_never_stale(device, name):
    function, changes = REACHED[name](device)
    f = cgt.jit(function, max_records=16)
    x = values(device, seed=9)
    settle(f, function, x)
    for change in changes:
        before = function(x)
        change()
        assert not same(before, function(x))  # the change is one
        recorded_then_replayed(f, function, x)
    assert counts(f) == (1, 1 + len(changes), 1 + len(changes), 0)


def test_a_tensor_changed_in_place_replays(device):
    weight = values(device)
    function = lambda x: x @ weight  # noqa: E731
    f = cgt.jit(function)
    x = values(device, seed=9)
    settle(f, function, x)
    for change in (
        lambda: weight.mul_(2), lambda: weight.zero_(),
        lambda: weight.copy_(values(device, seed=5)),
        lambda: weight.data.add_(1), lambda: weight[0].fill_(3.0), lambda: weight.normal_(),
    ):  # fmt: skip
        change()
        replayed(f, function, x)
    assert counts(f) == (1, 1, 7, 0)


def test_a_tensor_put_back_replays_the_old_child(device):
    one, two = values(device), values(device, seed=2)
    holder = Config(one)
    function = lambda x: x @ holder.weight  # noqa: E731
    f = cgt.jit(function)
    x = values(device, seed=9)
    settle(f, function, x)
    holder.weight = two
    recorded_then_replayed(f, function, x)
    for weight in (one, two, one):
        holder.weight = weight
        replayed(f, function, x)


def test_a_tensor_reached_in_a_way_that_cannot_be_guarded_is_reported(device):
    weights = collections.deque([values(device)])
    function = lambda x: x @ weights[0]  # noqa: E731
    f = cgt.jit(function)
    settle(f, function, values(device, seed=9))
    assert "not guarded: weights is a deque" in cgt.explain(f)
    assert "not guarded: 1 tensors" in cgt.explain(f)


def test_weights_given_through_functional_call_are_arguments(device):
    model = network(device)
    function = lambda p, x: torch.func.functional_call(model, p, (x,))  # noqa: E731
    f = cgt.jit(function)
    x = values(device, seed=9)
    names = [name for name, _ in model.named_parameters()]
    with torch.no_grad():
        trees = [
            {name: values(device, *model.get_parameter(name).shape, seed=k) for name in names}
            for k in range(3)
        ]
        settle(f, function, trees[0], x)
        for tree in trees * 3:
            assert same(f(tree, x), function(tree, x))
        replays = counts(f)[2]
        for tree in trees:
            assert same(f(tree, x), function(tree, x))
        assert counts(f)[2:] == (replays + 3, 0)


def test_what_the_function_does_not_read_may_change(device):
    config = Config(values(device))
    config.other = values(device)
    unused = values(device)

    def function(x):
        return x @ config.weight

    f = cgt.jit(function)
    x = values(device, seed=9)
    settle(f, function, x)
    config.other = unused = None
    config.new = 1
    assert unused is None
    replayed(f, function, x)


# --- modules ----------------------------------------------------------------------------------


def network(device, seed=0):
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4)))
    layers.register_buffer("shift", torch.randn(4))
    return layers.to(device)


def replace_parameter(model):
    model[0].weight = nn.Parameter(torch.randn_like(model[0].weight))


def assign_state(model):
    state = {name: torch.randn_like(t) for name, t in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def replace_data(model):
    model[2][0].bias.data = torch.randn_like(model[2][0].bias)


def replace_all_data(model):
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter)


def parametrize(model):
    class Double(nn.Module):
        def forward(self, weight):
            return weight * 2

    nn.utils.parametrize.register_parametrization(model[0], "weight", Double())


def patch_forward(model):
    linear = model[0]
    linear.forward = lambda x: nn.functional.linear(x, linear.weight) - 5


MODULE_CHANGES = {
    "parameter": replace_parameter,
    "load_state_dict(assign=True)": assign_state,
    ".data": replace_data,
    "all .data": replace_all_data,
    "buffer": lambda m: setattr(m, "shift", torch.randn_like(m.shift)),
    "registered buffer": lambda m: m.register_buffer("shift", torch.randn_like(m.shift)),
    "no bias": lambda m: m[0].register_parameter("bias", None),
    "submodule": lambda m: setattr(m[2], "0", nn.Linear(4, 4).to(m.shift.device)),
    "new submodule": lambda m: m.append(nn.Linear(4, 4).to(m.shift.device)),
    "one submodule less": lambda m: m.__delitem__(1),
    "nested new submodule": lambda m: m[2].append(nn.Sigmoid()),
    "dtype": lambda m: m.to(torch.float64).to(torch.float32).apply(lambda s: s),
    "forward hook": lambda m: m[0].register_forward_hook(lambda s, i, o: o + 1),
    "forward pre-hook": lambda m: m.register_forward_pre_hook(lambda s, i: (i[0] * 2,)),
    "deep hook": lambda m: m[2][0].register_forward_hook(lambda s, i, o: o * 3),
    "parametrization": parametrize,
    "patched forward": patch_forward,
}


@pytest.mark.parametrize("whole", [True, False], ids=["jit(module)", "closed over"])
@pytest.mark.parametrize("name", MODULE_CHANGES)
def test_a_changed_module_is_never_stale(device, name, whole):
    model = network(device)
    function = model if whole else lambda x: model(x) + model.shift
    f = cgt.jit(function)
    x = values(device, seed=9)
    with torch.no_grad():
        settle(f, function, x)
        before = function(x)
        MODULE_CHANGES[name](model)
        if whole and "buffer" in name:  # nobody reads it there
            assert same(f(x), function(x))
        elif name == "dtype":  # same values at other addresses
            recorded_then_replayed(f, function, x)
        else:
            assert not same(before, function(x))
            recorded_then_replayed(f, function, x)
        replayed(f, function, x)


def test_a_module_argument_is_guarded_like_one_that_is_closed_over(device):
    model = network(device)
    function = lambda m, x: m(x) + m.shift  # noqa: E731
    f = cgt.jit(function, max_records=16)
    x = values(device, seed=9)
    with torch.no_grad():
        settle(f, function, model, x)
        for change in (replace_parameter, assign_state, replace_data, MODULE_CHANGES["buffer"]):
            change(model)
            recorded_then_replayed(f, function, model, x)
        other = network(device, seed=5)
        recorded_then_replayed(f, function, other, x)
        replayed(f, function, model, x)


def test_loading_a_state_dict_into_the_old_memory_replays(device):
    model, x = network(device), values(device, seed=9)
    f = cgt.jit(model)
    with torch.no_grad():
        settle(f, model, x)
        model.load_state_dict(network(device, seed=5).state_dict())
        replayed(f, model, x)
        for parameter in model.parameters():
            parameter.add_(0.5)
        replayed(f, model, x)


def test_a_removed_hook_is_gone(device):
    model, x = network(device), values(device, seed=9)
    f = cgt.jit(model)
    with torch.no_grad():
        settle(f, model, x)
        handle = model[0].register_forward_hook(lambda m, i, o: o * 2)
        recorded_then_replayed(f, model, x)
        handle.remove()
        for _ in range(2):
            assert same(f(x), model(x))
        replayed(f, model, x)


def test_a_hook_for_all_modules_is_never_missed(device):
    model, x = network(device), values(device, seed=9)
    f = cgt.jit(model)
    with torch.no_grad():
        settle(f, model, x)
        handle = nn.modules.module.register_module_forward_hook(lambda m, i, o: o + 1)
        try:
            recorded_then_replayed(f, model, x)
        finally:
            handle.remove()
        for _ in range(2):
            assert same(f(x), model(x))
        replayed(f, model, x)


def test_the_other_weights_of_a_swapped_adapter_are_used_and_kept(device):
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(4, 4)
            self.adapter = nn.Linear(4, 4)

        def forward(self, x):
            return self.base(x) + self.adapter(x)

    torch.manual_seed(0)
    model = Adapted().to(device)
    adapters = [model.adapter, nn.Linear(4, 4).to(device), nn.Linear(4, 4).to(device)]
    x = values(device, seed=9)
    f = cgt.jit(model)
    with torch.no_grad():
        settle(f, model, x)
        for adapter in adapters[1:]:
            model.adapter = adapter
            recorded_then_replayed(f, model, x)
        for adapter in adapters * 2:
            model.adapter = adapter
            replayed(f, model, x)


def test_train_eval_and_dropout_p_choose_the_child(device):
    def build():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)).to(device)

    model, twin = build(), build()
    f = cgt.jit(model)
    x = values(device, 16, 4, seed=9)
    seeds = itertools.count()

    def check(n, *expected):
        for _ in range(n):
            seed = next(seeds)
            torch.manual_seed(seed)
            got = f(x)
            torch.manual_seed(seed)
            assert same(got, twin(x))
            drawn = torch.rand(2, device=device)  # the generator stands where eager left it
            torch.manual_seed(seed)
            twin_of_twin(x)
            assert same(torch.rand(2, device=device), drawn)
            for (name, mine), theirs in zip(
                model.state_dict().items(), twin.state_dict().values(), strict=True
            ):
                assert same(mine, theirs), name
        assert counts(f) == expected

    twin_of_twin = copy.deepcopy(twin)

    def both(change):
        for one in (model, twin, twin_of_twin):
            change(one)

    with torch.no_grad():
        check(3, 1, 1, 1, 0)
        both(lambda m: m.eval())
        check(2, 1, 2, 2, 0)
        both(lambda m: m.train())
        check(2, 1, 2, 4, 0)
        both(lambda m: m.eval())
        check(1, 1, 2, 5, 0)
        both(lambda m: m[1].train())  # batch norm alone
        check(2, 1, 3, 6, 0)
        both(lambda m: m.train())
        both(lambda m: setattr(m[2], "p", 0.25))
        check(2, 1, 4, 7, 0)
        both(lambda m: setattr(m[2], "p", 0.5))
        check(2, 1, 4, 9, 0)
        both(lambda m: setattr(m[1], "momentum", 0.5))
        check(2, 1, 5, 10, 0)


# --- numbers ----------------------------------------------------------------------------------


def number_in_closure(device):
    scale = 2.0

    def put(value):
        nonlocal scale
        scale = value

    return lambda x: x * scale, put


def number_in_global(device):
    def put(value):
        global SCALE
        SCALE = value

    put(2.0)
    return lambda x: x * SCALE, put


def number_in_instance(device):
    config = Config(None)
    return lambda x: x * config.scale, lambda value: setattr(config, "scale", value)


def number_in_slots(device):
    config = Slotted(None, 2.0)
    return lambda x: x * config.scale, lambda value: setattr(config, "scale", value)


def number_in_class(device):
    class Constants:
        scale = 2.0

    return lambda x: x * Constants().scale, lambda value: setattr(Constants, "scale", value)


def number_in_dict(device):
    config = {"scale": 2.0, "other": [1]}
    return lambda x: x * config["scale"], lambda value: config.update(scale=value)


def number_in_list(device):
    config = [1, [2.0]]
    return lambda x: x * config[1][0], lambda value: config[1].__setitem__(0, value)


def number_in_python_module(device):
    module = types.ModuleType("settings_of_a_test")
    module.scale = 2.0
    return lambda x: x * module.scale, lambda value: setattr(module, "scale", value)


def number_in_module(device):
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = 2.0

        def forward(self, x):
            return x * self.scale

    model = nn.Sequential(Scale(), nn.ReLU())
    return model, lambda value: setattr(model[0], "scale", value)


def number_in_a_function_called(device):
    config = Config(None)

    def inner(x):
        return x * config.scale

    return lambda x: inner(x) + 1, lambda value: setattr(config, "scale", value)


def number_in_property(device):
    class Settings:
        @property
        def scale(self):
            return self._scale

    config = Settings()
    config._scale = 2.0
    return lambda x: x * config.scale, lambda value: setattr(config, "_scale", value)


def number_by_getattr(device):
    config = Config(None)
    name = "scale"
    return lambda x: x * getattr(config, name), lambda value: setattr(config, "scale", value)


NUMBERS = {
    name.removeprefix("number_"): make
    for name, make in list(globals().items())
    if name.startswith("number_")
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_changed_number_is_never_stale_and_an_equal_one_replays(device, name):
    function, put = NUMBERS[name](device)
    f = cgt.jit(function, max_records=16)
    x = torch.tensor([1, -2, 3], device=device)
    settle(f, function, x)
    for value in (3.0, 2, 1, True, -0.0, 0.0, 1e30):
        put(value)
        recorded_then_replayed(f, function, x)
    for value in (3.0, 2, True, 0.0, 1.0 + 1.0):
        put(value)
        replayed(f, function, x)


def test_a_number_that_decides_a_branch_is_guarded(device):
    config = Config(None, scale=3)

    def function(x):
        for _ in range(config.scale):
            x = x * 2
        return x if config.scale != 2 else -x

    f = cgt.jit(function)
    x = values(device)
    settle(f, function, x)
    for scale in (2, 0, 1):
        config.scale = scale
        recorded_then_replayed(f, function, x)
    config.scale = 0
    assert f(x) is x
    config.scale = 3
    replayed(f, function, x)


def test_numbers_in_a_tuple_are_never_stale(device):
    sizes = (1, 2.0)
    function = lambda x: x.repeat(1 + sizes[0], 1) * sizes[1]  # noqa: E731
    f = cgt.jit(function)
    x = values(device)
    settle(f, function, x)
    for changed in [(1, 3.0), (2, 3.0), (True, 3)]:
        sizes = changed
        recorded_then_replayed(f, function, x)


def test_an_attribute_that_appears_is_noticed(device):
    class Settings:
        scale = 2.0

    config = Settings()
    function = lambda x: x * config.scale + (1 if hasattr(config, "shift") else 0)  # noqa: E731
    f = cgt.jit(function)
    x = values(device)
    settle(f, function, x)
    config.scale = 3.0  # hides the class's
    recorded_then_replayed(f, function, x)
    del config.scale
    replayed(f, function, x)
    config.shift = None
    recorded_then_replayed(f, function, x)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
    ],
    ids=["plain", "momentum", "no foreach"],
)
def test_a_changed_learning_rate_is_never_stale(device, make):
    def build():
        model = network(device, seed=3)
        return model, make(model.parameters())

    (model, optimizer), (twin, twin_optimizer) = build(), build()
    x = values(device, seed=9)

    def train(model, optimizer):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    f = cgt.jit(lambda: train(model, optimizer))

    def check(n):
        for _ in range(n):
            assert same(f(), train(twin, twin_optimizer))
            for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                assert same(mine.detach(), theirs.detach()) and same(mine.grad, theirs.grad)

    check(5)
    stats = cgt.stats(f)
    assert stats.replays >= 2 and stats.eager == 0
    for key, value in [("lr", 0.5), ("lr", 0.05), ("weight_decay", 0.5)]:
        replays = cgt.stats(f).replays
        for one in (optimizer, twin_optimizer):
            one.param_groups[0][key] = value
        check(3)
        assert cgt.stats(f).replays >= replays + 2
    for one in (optimizer, twin_optimizer):
        one.param_groups[0].update(lr=0.5, weight_decay=one.defaults["weight_decay"])
    replays = cgt.stats(f).replays
    check(2)
    assert cgt.stats(f).replays == replays + 2


# --- requires_grad ----------------------------------------------------------------------------


def test_requires_grad_toggled_on_an_argument_is_another_child(device):
    f = cgt.jit(product)
    x, w = values(device), values(device, seed=2)
    with torch.no_grad():
        settle(f, product, x, w)
        x.requires_grad_()
        recorded_then_replayed(f, product, x, w)
        x.requires_grad_(False)
        replayed(f, product, x, w)
        x.requires_grad_()
        replayed(f, product, x, w)


def test_a_result_that_needs_gradients_has_them(device):
    f = cgt.jit(product)
    x, w = values(device), values(device, seed=2)
    settle(f, product, x, w)
    x.requires_grad_()
    for _ in range(3):
        y = f(x, w)
        assert y.requires_grad and y.grad_fn is not None
        y.sum().backward()
        assert same(x.grad, torch.ones_like(y) @ w.t())
        x.grad = None
        del y
    x.requires_grad_(False)
    records, replays = counts(f)[1:3]
    assert not f(x, w).requires_grad
    assert counts(f)[1:3] == (records, replays + 1)


def test_requires_grad_toggled_on_a_parameter_is_another_child(device):
    weight = nn.Parameter(values(device))
    function = lambda x: (x @ weight, weight.requires_grad)  # noqa: E731
    f = cgt.jit(function)
    x = values(device, seed=2)
    with torch.no_grad():
        settle(f, function, x)
        weight.requires_grad_(False)
        recorded_then_replayed(f, function, x)
        weight.requires_grad_()
        replayed(f, function, x)


# --- 0-dim CPU tensors ------------------------------------------------------------------------

SCALARS = {
    "mul": lambda x, s: x * s,
    "add": lambda x, s: x + s,
    "where": lambda x, s: torch.where(x > s, x, -x),
    "pow": lambda x, s: x.abs() ** s,
    "reversed": lambda x, s: s - x,
    "in a tree": lambda x, s: [x * s, x / s],
}


@pytest.mark.parametrize("name", SCALARS)
def test_a_cpu_scalar_argument_is_never_stale(device, name):
    function = SCALARS[name]
    f = cgt.jit(function, max_records=64)
    x = values(device, seed=9)
    scalar = torch.tensor(2.0)
    settle(f, function, x, scalar)
    for k in range(3, 6):  # in place
        scalar.fill_(k)
        for _ in range(2):
            assert same(f(x, scalar), function(x, scalar))
        replayed(f, function, x, scalar)
    others = [torch.tensor(float(k)) for k in range(1, 6)]
    for other in others:  # replaced
        for _ in range(2):
            assert same(f(x, other), function(x, other))
        replayed(f, function, x, other)
    assert counts(f)[3] == 0


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bool, torch.bfloat16])
def test_a_cpu_scalar_of_any_dtype_is_never_stale(device, dtype):
    function = lambda x, s: (x * s, x + s)  # noqa: E731
    f = cgt.jit(function)
    x = values(device, seed=9)
    scalar = torch.tensor(1, dtype=dtype)
    settle(f, function, x, scalar)
    for value in (0, 1, 0):
        scalar.fill_(value)
        for _ in range(2):
            assert same(f(x, scalar), function(x, scalar))
        replayed(f, function, x, scalar)


def test_a_cpu_scalar_in_a_closure_is_never_stale(device):
    scalar = torch.tensor(2.0)
    function = lambda x: x * scalar  # noqa: E731
    f = cgt.jit(function)
    x = values(device, seed=9)
    settle(f, function, x)
    for change in (lambda: scalar.fill_(3.0), lambda: scalar.add_(1), lambda: scalar.zero_()):
        change()
        assert same(f(x), function(x))
        replayed(f, function, x)
    scalar = torch.tensor(5.0)
    recorded_then_replayed(f, function, x)


def test_a_tensor_made_of_numbers_inside_the_function_is_new_and_right_each_time(device):
    config = Config(None)

    def function(x):
        scale = torch.tensor(config.scale)
        return x * scale.add_(1)

    f = cgt.jit(function)
    x = values(device, seed=9)
    for scale in (2.0, 2.0, 2.0, 2.0, 3.0, 3.0, 2.0):
        config.scale = scale
        assert same(f(x), function(x))
    assert counts(f) == (1, 2, 4, 0)


# --- metadata and addresses -------------------------------------------------------------------


def many_ways(x):
    return torch.stack([x, x]), x.clone(), x.flatten(), x == x, x.unsqueeze(0)


def layout(make, dtype=torch.float32):
    return lambda device, seed: make(values(device, 4, 6, seed=seed).to(dtype))


LAYOUTS = {
    "contiguous": layout(lambda t: t),
    "transposed": layout(lambda t: t.t()),
    "strided": layout(lambda t: t[:, ::2]),
    "column": layout(lambda t: t[:, 1]),
    "odd offset": layout(lambda t: t.flatten()[3:]),
    "expanded": layout(lambda t: t[:, :1].expand(4, 5)),
    "expanded scalar": layout(lambda t: t[0, 0].expand(3)),
    "overlapping": layout(lambda t: t.as_strided((4, 3), (2, 1))),
    "channels last": layout(lambda t: t.view(2, 2, 3, 2).to(memory_format=torch.channels_last)),
    "zero-size": layout(lambda t: t[:0]),
    "zero-size inside": layout(lambda t: t[:, 2:2]),
    "0-dim": layout(lambda t: t[1, 2]),
    "0-dim of its own": layout(lambda t: t[1, 2].clone()),
    "size one": layout(lambda t: t[:1, :1]),
    "6 dims": layout(lambda t: t.view(2, 1, 2, 3, 1, 2).permute(5, 0, 4, 2, 1, 3)),
    "9 dims": layout(lambda t: t.view(2, 2, 1, 3, 2, 1, 1, 1, 1)),
    "float64": layout(lambda t: t, torch.float64),
    "float16": layout(lambda t: t, torch.float16),
    "bfloat16": layout(lambda t: t[:, 1:], torch.bfloat16),
    "bool": layout(lambda t: t > 0),
    "int8": layout(lambda t: (t * 10)[1:].to(torch.int8)),
    "uint8": layout(lambda t: (t.abs() * 10).to(torch.uint8).t()),
    "int64": layout(lambda t: (t * 10).long()),
    "complex64": layout(lambda t: t, torch.complex64),
    "complex128": layout(lambda t: torch.complex(t, -t), torch.float64),
    "conj": layout(lambda t: torch.complex(t, t + 1).conj()),
    "conj slice": layout(lambda t: torch.complex(t, t + 1).conj()[1:, ::2]),
    "neg": layout(lambda t: torch.complex(t, t + 1).conj().imag),
    "real": layout(lambda t: torch.complex(t, t + 1).real),
}


@pytest.mark.parametrize("inputs", ["auto", "copied", "pinned"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_and_dtype_is_bit_equal(device, name, inputs):
    f = cgt.jit(many_ways, inputs=inputs)
    one, two, three = (LAYOUTS[name](device, seed) for seed in range(3))
    settle(f, many_ways, one)
    for x in (two, two, three, three):
        assert same(f(x), many_ways(x))
    for x in (three, two, three, one):
        assert same(f(x), many_ways(x))
    stats = cgt.stats(f)
    assert (stats.warmups, stats.eager) == (1, 0)
    assert stats.records <= 3 and stats.replays >= 7
    bound_by_copy = name not in ("conj", "conj slice", "neg")
    if inputs == "copied" and bound_by_copy:
        assert stats.records == 1
    assert (stats.copied_bytes > 0) == (inputs != "pinned" and bound_by_copy and one.numel() > 0)


@pytest.mark.parametrize("inputs", ["auto", "copied", "pinned"])
@pytest.mark.parametrize(
    "make",
    [
        lambda t: {"x": nn.Parameter(t)},
        lambda t: {"x": nn.Parameter(t, requires_grad=False)},
        lambda t: {"x": torch.complex(t, t).conj()},
        lambda t: {"x": t, "y": t},
        lambda t: {"x": t, "y": t[1:]},
    ],
    ids=["parameter", "frozen parameter", "conj", "same", "view"],
)
def test_inputs_that_cannot_be_copied_have_a_child_per_address(device, make, inputs):
    function = lambda tree: sum(2 * t.sum() for t in tree.values())  # noqa: E731
    f = cgt.jit(function, inputs=inputs)
    one, two, three = (make(values(device, seed=k)) for k in range(3))
    with torch.no_grad():
        settle(f, function, one)
        recorded_then_replayed(f, function, two)
        recorded_then_replayed(f, function, three)
        for tree in (one, two, three, two):
            replayed(f, function, tree)


@pytest.mark.parametrize("inputs", ["auto", "pinned"])
def test_inputs_that_cannot_be_copied_and_always_move_reach_the_limit(device, inputs):
    f = cgt.jit(lambda p: p * 2, inputs=inputs, max_records=3)
    parameters = [nn.Parameter(values(device, seed=k)) for k in range(8)]
    with torch.no_grad():
        for p in parameters:
            assert same(f(p), p * 2)
    assert counts(f) == (1, 3, 0, 4)
    reason = list(cgt.stats(f).reasons)[-1]
    assert "args[0]" in reason and hex(parameters[-1].data_ptr()) in reason


def test_views_at_other_alignments_are_other_children(device):
    function = lambda x: (x.sum(), x @ x, x * 2)  # noqa: E731
    f = cgt.jit(function, inputs="copied")
    base = values(device, 1024)
    offsets = [0, 1, 2, 3]  # elements of four bytes; 128 of them are a whole alignment class
    for k, offset in enumerate(offsets):
        x = base[offset : offset + 100]
        if k == 0:
            settle(f, function, x)
        else:
            recorded_then_replayed(f, function, x)
    for offset in offsets:
        replayed(f, function, base[offset + 128 : offset + 228])
        replayed(f, function, base[offset : offset + 100])


def test_views_of_one_storage_as_several_arguments_are_bit_equal(device):
    function = lambda x, y: (x * 2, y.add_(1), x + y)  # noqa: E731
    f, buffers = cgt.jit(function, max_records=32), [values(device, 64), values(device, 64)]
    for starts in [(0, 32)] * 3 + [(0, 4)] * 3 + [(4, 0)] * 3 + [(8, 8)] * 3 + [(0, 32)]:
        mine, theirs = ([t[start : start + 16] for start in starts] for t in buffers)
        assert same(f(*mine), function(*theirs))
        assert same(*buffers)
    stats = cgt.stats(f)
    assert (stats.warmups, stats.eager) == (1, 0) and stats.replays >= 6


def test_a_returned_view_of_an_argument_is_a_view_of_todays_argument(device):
    function = lambda x: (x[1:].t(), x.view(-1)[::2], x.expand(2, 4, 4))  # noqa: E731
    f = cgt.jit(function)
    inputs = [values(device, seed=k) for k in range(4)]
    for x in inputs[:1] * 3 + inputs[1:]:
        got, want = f(x), function(x)
        assert same(got, want)
        for mine, theirs in zip(got, want, strict=True):
            assert mine.data_ptr() == theirs.data_ptr() and mine._is_view() == theirs._is_view()
        got[0].zero_()
        assert not x[1:].any()
    warmups, records, replays, eager = counts(f)
    assert (warmups, eager) == (1, 0) and records <= 2 and replays >= 3


# --- random sequences -------------------------------------------------------------------------

SHAPES = [(8,), (2, 4), (3, 5), (1,), (), (0, 3), (2, 3, 4)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int8, torch.complex64]
STATICS = [0, 1, True, 1.0, -0.0, "a", None]
keys = some.tuples(
    some.sampled_from(SHAPES),
    some.sampled_from(DTYPES),
    some.booleans(),
    some.sampled_from([0, 1, 3, 64, 512]),
    some.sampled_from(STATICS),
)
relaxed = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def buffers_on(device):
    return {dtype: (values(device, 2048, seed=5) * 10).to(dtype) for dtype in DTYPES}


def tensor_of(buffers, key):
    """The same key is the same address, shape and strides."""
    shape, dtype, contiguous, offset, _ = key
    n = torch.Size(shape).numel()
    flat = buffers[dtype][offset : offset + n * (2 - contiguous)]
    return flat[:: 2 - contiguous].view(shape) if contiguous or n < 2 else (
        flat.view(*shape, 2)[..., 0]
    )  # fmt: skip


def read(x, static):
    number = sum(repr(static).encode()) % 7
    return x * number, x.flatten().cumsum(0), torch.cat([x.flatten(), x.flatten()]), static


def write(x, static):
    number = sum(repr(static).encode()) % 7
    x.add_(number)
    return x.sum(), x


def facts(x, static, address):
    """What tells two calls apart for a guard."""
    return x.shape, x.stride(), x.dtype, repr(static), address


@pytest.mark.parametrize("inputs", ["copied", "pinned"])
@relaxed
@given(sequence=some.lists(keys, min_size=4, max_size=20))
def test_in_any_sequence_new_keys_record_and_known_keys_replay(device, inputs, sequence):
    f = cgt.jit(read, inputs=inputs, max_records=64)
    buffers = buffers_on(device)
    recorded, expected = set(), [1, 0, 0, 0]
    for k, key in enumerate(sequence + sequence[::-1]):
        x, static = tensor_of(buffers, key), key[-1]
        assert same(f(x, static), read(x, static))
        at = x.storage_offset() * x.element_size()
        mark = facts(x, static, at % (512 if x.is_cuda else 64) if inputs == "copied" else at)
        if k:
            expected[2 if mark in recorded else 1] += 1
            recorded.add(mark)
        assert counts(f) == tuple(expected), (k, key)


@relaxed
@given(sequence=some.lists(keys, min_size=2, max_size=10))
def test_a_sequence_that_repeats_settles_into_replays(device, sequence):
    f = cgt.jit(read, max_records=64)
    buffers = buffers_on(device)
    for _ in range(5):
        before = counts(f)
        for key in sequence:
            x, static = tensor_of(buffers, key), key[-1]
            assert same(f(x, static), read(x, static))
        turned = [b - a for a, b in zip(before, counts(f), strict=True)]
        assert turned[3] == 0
    assert turned == [0, 0, len(sequence), 0]


@relaxed
@given(sequence=some.lists(keys, min_size=2, max_size=12))
def test_writes_land_in_the_callers_memory_and_known_addresses_replay(device, sequence):
    f = cgt.jit(write, max_records=64)
    mine, theirs = buffers_on(device), buffers_on(device)
    recorded, expected = set(), [1, 0, 0, 0]
    for k, key in enumerate(sequence * 2):
        static = key[-1]
        x, y = tensor_of(mine, key), tensor_of(theirs, key)
        versions = x._version, y._version
        (total, got), (want, _) = f(x, static), write(y, static)
        assert got is x and same(total, want)
        assert x._version - versions[0] == y._version - versions[1]
        assert same(mine[key[1]], theirs[key[1]])
        mark = facts(x, static, (x.dtype, x.storage_offset()))
        if k:
            expected[2 if mark in recorded else 1] += 1
            recorded.add(mark)
        assert counts(f) == tuple(expected), (k, key)
        del total, got
