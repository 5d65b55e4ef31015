"""What a function reaches without arguments: tensors, modules and numbers in closures, globals and
objects. Never stale when one of them changes, and never recorded again for nothing."""

import collections
import copy
import functools
import itertools
import types

import pytest
import torch
from helpers import Config, counts, plain, recorded_then_replayed, replayed, settle
from helpers import identical as same
from helpers import square_values as values
from torch import nn

import cgt

WEIGHT = None  # tests set these three
SCALE = 2.0
HELPER = torch.sin


class Slotted:
    __slots__ = ("weight", "scale")

    def __init__(self, weight, scale):
        self.weight, self.scale = weight, scale


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

    return lambda x: x @ Constants.weight, [lambda: setattr(Constants, "weight", values(device, seed=3))]


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


REACHED = {name.removeprefix("make_"): make for name, make in list(globals().items()) if name.startswith("make_")}


# Another tensor in one place, or other memory of that one: copied once it came. (The other changes of "data" are of shapes.)
FOLLOWED = {("closure", 1), ("global", 1), ("python_module", 1), ("dataclass", 1), ("data", 1), ("data", 4)}


@pytest.mark.parametrize("name", REACHED)
def test_a_replaced_tensor_is_never_stale(device, name):
    function, changes = REACHED[name](device)
    f = cgt.jit(function, max_records=16)
    x = values(device, seed=9)
    settle(f, function, x)
    for k, change in enumerate(changes):
        before = function(x)
        change()
        assert not same(before, function(x))  # the change is one
        (replayed if (name, k) in FOLLOWED else recorded_then_replayed)(f, function, x)
    assert cgt.stats(f).eager == 0


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
        trees = [{name: values(device, *model.get_parameter(name).shape, seed=k) for name in names} for k in range(3)]
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
BRING_CODE = ("nested new submodule", "parametrization", "patched forward")  # that reads more than its arguments


@pytest.mark.parametrize("whole", [True, False], ids=["jit(module)", "closed over"])
@pytest.mark.parametrize("name", MODULE_CHANGES)
def test_a_changed_module_is_never_stale(device, name, whole):
    model = network(device)
    function = plain(model) if whole else lambda x: model(x) + model.shift
    f = cgt.jit(model if whole else function)
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
            recorded_then_replayed(f, function, x, new_code=name in BRING_CODE)
        replayed(f, function, x)


def test_a_module_argument_is_guarded_like_one_that_is_closed_over(device):
    model = network(device)
    function = lambda m, x: m(x) + m.shift  # noqa: E731
    f = cgt.jit(function, max_records=16)
    x = values(device, seed=9)
    with torch.no_grad():
        settle(f, function, model, x)
        for change in (replace_parameter, assign_state):
            change(model)
            recorded_then_replayed(f, function, model, x)
        for change in (
            replace_data,
            replace_parameter,
            assign_state,
            MODULE_CHANGES["buffer"],
        ):  # what was replaced once is followed
            change(model)
            replayed(f, function, model, x)
        other = network(device, seed=5)
        recorded_then_replayed(f, function, other, x)
        replayed(f, function, model, x)


def test_loading_a_state_dict_into_the_old_memory_replays(device):
    model, x = network(device), values(device, seed=9)
    f = cgt.jit(model)
    with torch.no_grad():
        settle(f, plain(model), x)
        model.load_state_dict(network(device, seed=5).state_dict())
        replayed(f, plain(model), x)
        for parameter in model.parameters():
            parameter.add_(0.5)
        replayed(f, plain(model), x)


def test_a_removed_hook_is_gone(device):
    model, x = network(device), values(device, seed=9)
    f = cgt.jit(model)
    with torch.no_grad():
        settle(f, plain(model), x)
        handle = model[0].register_forward_hook(lambda m, i, o: o * 2)
        recorded_then_replayed(f, plain(model), x)
        handle.remove()
        for _ in range(2):
            assert same(f(x), plain(model)(x))
        replayed(f, plain(model), x)


def test_a_hook_for_all_modules_is_never_missed(device):
    model, x = network(device), values(device, seed=9)
    f = cgt.jit(model)
    with torch.no_grad():
        settle(f, plain(model), x)
        handle = nn.modules.module.register_module_forward_hook(lambda m, i, o: o + 1)
        try:
            recorded_then_replayed(f, plain(model), x)
        finally:
            handle.remove()
        for _ in range(2):
            assert same(f(x), plain(model)(x))
        replayed(f, plain(model), x)


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
        settle(f, plain(model), x)
        for adapter in adapters[1:]:
            model.adapter = adapter
            recorded_then_replayed(f, plain(model), x)
        for adapter in adapters * 2:
            model.adapter = adapter
            replayed(f, plain(model), x)


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
            for (name, mine), theirs in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
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


NUMBERS = {name.removeprefix("number_"): make for name, make in list(globals().items()) if name.startswith("number_")}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_changed_number_is_never_stale_and_an_equal_one_replays(device, name):
    function, put = NUMBERS[name](device)
    f = cgt.jit(function, max_records=16)
    function = plain(f)
    x = torch.tensor([1, -2, 3], device=device)
    settle(f, function, x)
    for value in (3.0, 2, 1, True, -0.0, 0.0, 1e30, 3.0, 2, True, 0.0, 1.0 + 1.0):
        put(value)
        for _ in range(3):
            assert same(f(x), function(x))
        replayed(f, function, x)
    assert cgt.stats(f).records <= 9, cgt.explain(f)


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


# --- what a tensor is besides its bytes ------------------------------------------------------------------


@pytest.mark.parametrize("what", ["thawed", "frozen gets a gradient", "frozen loses its gradient"])
@pytest.mark.parametrize("which", ["step", "clip", "norm", "zero", "asked"])
def test_a_frozen_parameter_and_its_gradient(device, which, what):
    """`.grad` and requires_grad are asked about, whether or not an op touches the parameter."""

    def run(wrap):
        w, v = (nn.Parameter(torch.ones(4, device=device)) for _ in range(2))
        optimizer, out = torch.optim.SGD([w, v], 0.1), []

        def decay():
            with torch.no_grad():
                for p in (w, v):
                    if p.requires_grad:
                        p.mul_(0.9)

        f = wrap(
            {
                "step": lambda: optimizer.step(),
                "clip": lambda: nn.utils.clip_grad_norm_([w, v], 1.0),
                "norm": lambda: sum(p.grad.norm() for p in (w, v) if p.grad is not None),
                "zero": lambda: optimizer.zero_grad(set_to_none=False),
                "asked": decay,
            }[which]
        )
        of_w, of_v = torch.zeros(4, device=device), torch.zeros(4, device=device)
        for k in range(16):
            w.requires_grad_(what == "thawed" and k >= 5)
            w.grad, v.grad = None, of_v.fill_(1.0 + k)
            late = k >= {"thawed": 8}.get(what, 5)
            if late != (what == "frozen loses its gradient"):
                w.grad = of_w.fill_(2.0 + k)
            result = f()
            out += [t.detach().clone() for t in (w, v, w.grad, v.grad, result) if t is not None]
        return f, out

    (_, want), (f, got) = run(lambda f: f), run(cgt.jit)
    assert len(want) == len(got) and all(map(torch.equal, want, got))
    assert cgt.stats(f).replays >= 8 and cgt.stats(f).eager == 0


def test_dtype_of_a_parameter_that_is_only_asked(device):
    layer = nn.Linear(3, 3).to(device)
    f, x = cgt.jit(lambda x: x.to(layer.weight.dtype) * 2), values(device)
    for k in range(8):
        if k == 4:
            layer.half()
        assert f(x).dtype == layer.weight.dtype
    assert counts(f) == (1, 2, 5, 0)


def test_what_is_only_asked_of_a_tensor(device):
    """No op touches it, and yet its shape and what it is to autograd are read."""
    shaped, kind = torch.zeros(3, device=device), {"h": torch.ones(2, device=device, requires_grad=True)}
    f = cgt.jit(lambda x: x * shaped.shape[0] * (2 if kind["h"].is_leaf else 3) * (5 if kind["h"].requires_grad else 7))
    x, changes = torch.ones(2, device=device), 0
    for k in range(24):
        if k == 5:
            shaped.data = torch.zeros(5, device=device)
        elif k == 10:
            shaped.resize_(7)
        elif k == 15:
            kind["h"].requires_grad_(False)
        elif k == 20:
            kind["h"].mul_(torch.ones(2, device=device, requires_grad=True))
        changes += k in (5, 10, 15, 20)
        assert torch.equal(f(x), f.__wrapped__(x)), k
    assert counts(f) == (1, 1 + changes, 22 - changes, 0)
