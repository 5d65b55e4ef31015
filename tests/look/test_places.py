"""What find_places finds, and that each change of it is seen.

`broken(places)` is the plain Python twin of the core's check: the paths whose value is no longer
the wanted one. Most tests change something and ask which paths broke."""

import argparse
import collections
import copy
import dataclasses
import enum
import functools
import inspect
import random
import sys
import time
import types

import cgt_core as core
import pytest
import torch
from helpers import identical, values
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import nn

import cgt
from cgt.look import empties, places
from cgt.look.places import MISSING, find_places
from cgt.make import record
from cgt.words import options

PLAIN = (type(None), bool, int, float, complex, str, bytes, tuple)
SCALE = 2.0
OTHER = 5
step = 0


class Config:
    def __init__(self, **values):
        self.__dict__.update(values)


def value_now(place):
    kind, home, key = place[:3]
    if kind == places.CELL:
        try:
            return home.cell_contents
        except ValueError:
            return MISSING
    if kind == places.DICT_ITEM:
        return home.get(key, MISSING)
    if kind in (places.DICT_LEN, places.LIST_LEN):
        return len(home)
    if kind == places.LIST_ITEM:
        return home[key] if key < len(home) else MISSING
    if kind == places.NAMES_ABSENT:
        return next((home[name] for name in key if name in home), MISSING)
    if kind == places.TYPE_ATTR:
        return next((vars(cls)[key] for cls in home.__mro__ if key in vars(cls)), MISSING)
    descriptor = inspect.getattr_static(type(home), key, None)
    if not inspect.ismemberdescriptor(descriptor) and not inspect.isgetsetdescriptor(descriptor):
        return inspect.getattr_static(home, key, MISSING)
    try:
        return descriptor.__get__(home)
    except AttributeError:
        return MISSING


def broken(found):
    def same(now, want):
        return now is want or (type(now) is type(want) and type(now) in PLAIN and now == want)

    return [place.path for place in found if not same(value_now(place), place.want)]


def places_of(function, *roots):
    """The places, all of which hold now, each once."""
    found, *_ = find_places(function, roots)
    assert broken(found) == []
    marks = [(place.kind, id(place.home), id(place.key)) for place in found]
    assert len(marks) == len(set(marks))
    return found


def paths_of(function, *roots):
    return {place.path for place in places_of(function, *roots)}


def place_at(found, path):
    (place,) = [place for place in found if place.path == path]
    return place


# Functions


def test_closure_numbers_are_cells():
    factor = 2.0

    def function(x):
        return x * factor

    found = places_of(function)
    place = place_at(found, "factor")
    assert (place.kind, place.want, place.key) == (places.CELL, 2.0, None)
    factor = 3.0
    assert broken(found) == ["factor"]


def test_an_empty_cell_must_stay_empty():
    def function(x):
        return x if x is None else later

    found = places_of(function)
    assert place_at(found, "later").want is MISSING
    later = 3
    assert broken(found) == ["later"]


def test_a_cell_that_is_only_stored_is_a_place():
    last = None

    def function(x):
        nonlocal last
        last = x

    assert "last" in paths_of(function)
    assert last is None


def test_globals_are_dict_items(monkeypatch):
    def function(x):
        return x * SCALE + len(x)

    found = places_of(function)
    place = place_at(found, "SCALE")
    assert place.kind == places.DICT_ITEM and place.home is globals() and place.key == "SCALE"
    assert "OTHER" not in {place.path for place in found}
    monkeypatch.setitem(globals(), "SCALE", 7.0)
    assert broken(found) == ["SCALE"]


def test_an_attribute_with_the_name_of_a_global_is_not_a_read_of_the_global():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)

    def function():
        optimizer.step()

    assert "step" in globals() and "step" not in paths_of(function)


def helper(x):
    return deeper(x) + 1


def deeper(x):
    return [OTHER * entry for entry in x]


def test_globals_of_nested_helpers():
    found = {"helper", "deeper", "OTHER", "helper.__code__", "deeper.__code__"}
    assert found <= paths_of(lambda x: helper(x))


def test_lambda_and_inner_function_and_comprehension():
    first, second, third = 1, 2, 3

    def function(x):
        def inner(y):
            return [y * first * entry for entry in range(OTHER)]

        return (lambda y: inner(y) + second)(x)

    found = paths_of(function)
    assert {"first", "second", "OTHER"} <= found and "third" not in found
    assert third == 3


def test_defaults_and_code():
    def function(x, scale=2.0, *, options={"eps": 1e-5}):  # noqa: B006
        return x * scale

    found = places_of(function)
    assert place_at(found, "function.__defaults__").kind == places.ATTR
    function.__kwdefaults__["options"]["eps"] = 1.0
    assert broken(found) == ["function.__kwdefaults__['options']['eps']"]
    function.__defaults__ = (3.0,)
    function.__code__ = (lambda x, scale, *, options: x).__code__
    assert {"function.__defaults__", "function.__code__"} <= set(broken(found))


def test_partial_and_bound_method_and_callable_instance():
    class Scaler:
        def __init__(self):
            self.scale, self.steps = 2.0, 0

        def apply(self, x, factor):
            return x * self.scale * factor

        def __call__(self, x):
            return self.apply(x, OTHER)

    scaler = Scaler()
    assert "self.scale" in paths_of(scaler.apply)
    assert {"self.scale", "OTHER"} <= paths_of(scaler)
    partial = functools.partial(scaler.apply, factor=3.0)
    found = places_of(partial)
    assert "self.keywords['factor']" in {place.path for place in found}
    scaler.steps += 1
    assert broken(found) == []
    scaler.scale = 4.0
    assert broken(found) == ["self.scale"]


def test_wrapped_functions():
    scale = 2.0

    @torch.no_grad()
    def without_gradients(x):
        return x * scale

    @functools.lru_cache
    def remembered(x):
        return x * OTHER

    found = paths_of(lambda x: without_gradients(x) + remembered(1))
    assert {"scale", "OTHER"} <= found


def test_python_modules_and_local_imports(monkeypatch):
    config = types.ModuleType("user_config")
    config.RATE, config.UNREAD, config.inner = 0.5, 1, Config(rate=1.0)
    monkeypatch.setitem(sys.modules, "user_config", config)

    def function(x):
        from user_config import RATE

        return x * RATE

    assert paths_of(function) == {"function.__code__", "user_config.RATE"}
    found = paths_of(lambda x: x * config.RATE * config.inner.rate)
    assert {"config.RATE", "config.inner", "config.inner.rate"} <= found
    assert "config.UNREAD" not in found


def test_library_code_is_not_entered():
    found = paths_of(lambda x: nn.functional.relu(torch.add(x, 1)))
    assert found == {"<lambda>.__code__", "nn", "torch", "nn.functional.relu", "torch.add", "torch.relu"}


# Objects


def test_only_attributes_that_code_names_are_places():
    class Trainer:
        def __init__(self):
            self.scale, self.steps, self.last = 2.0, 0, None

        def run(self, x):
            self.last = x
            return x * self.scale

        def count(self):
            self.steps += 1

    trainer = Trainer()
    found = paths_of(lambda x: trainer.run(x))
    assert found.issuperset({"trainer.scale", "trainer.last"}) and "trainer.steps" not in found
    assert "trainer.steps" in paths_of(lambda x: trainer.run(x) + trainer.count())


def test_self_as_a_root():
    def step(self, x):
        return x * self.scale

    model = Config(scale=2.0, steps=0)
    found = paths_of(step, ("args[0]", model))
    assert "args[0].scale" in found and "args[0].steps" not in found


def test_getattr_with_a_constant_a_list_or_a_variable():
    names = ["third"]
    config = Config(first=1, second=2, third=3, fourth=4)

    def function(x):
        total = getattr(config, "first")  # noqa: B009
        for name in ("second", "unknown"):
            total += getattr(config, name, 0)
        return x * total + getattr(config, names[0])

    found = places_of(function)
    paths = {place.path for place in found}
    assert {"config.first", "config.second", "config.third"} <= paths
    assert "config.fourth" not in paths
    config.unknown = 1  # the absence was an answer
    assert broken(found) == ["an attribute of config"]


def test_names_that_are_asked_for_share_a_place_but_for_what_code_stores(device):
    """Thousands of modules times dozens of names: a place for each of them would cost more than the rest together."""

    class Block(nn.Module):
        def forward(self, x):
            if not hasattr(self, "count"):
                self.count = 0
            return x * getattr(self, "scale", 2.0) + getattr(self, "shift", 1.0)

    net = nn.Sequential(*(Block() for _ in range(20))).to(device)
    found = places_of(net)
    absent = [place for place in found if place.kind == places.NAMES_ABSENT]
    assert {place.key for place in absent if type(place.home) is dict and place.home is vars(net[3])} == {
        ("scale", "shift")
    }
    assert {place.path for place in found if place.home is vars(net[3]) and place.key == "count"} == {"self.3.count"}

    net, twin, x = cgt.jit(net), copy.deepcopy(net), torch.ones(3, device=device)
    for k in range(24):
        for one in (net, twin):
            if k == 8:
                one[3].scale = 3.0
            if k == 16:
                one[5].shift, one[3].scale = 4.0, 5.0
        assert torch.equal(net(x), twin(x)), k
    assert cgt.stats(net).replays >= 12


@dataclasses.dataclass
class Settings:
    scale: float = 1.0
    unread: int = 0
    layers: list = dataclasses.field(default_factory=lambda: [1, 2])


@dataclasses.dataclass(slots=True)
class SlottedSettings:
    scale: float = 1.0
    unread: int = 0


@pytest.mark.parametrize(
    "make",
    [Settings, SlottedSettings]
    + [lambda make=make: make(scale=1.0, unread=0) for make in (types.SimpleNamespace, Config)]
    + [lambda: argparse.Namespace(scale=1.0, unread=0)],
)
def test_configuration_objects(make):
    config = make()
    found = places_of(lambda x: x * config.scale)
    assert "config.unread" not in {place.path for place in found}
    config.unread = 7
    assert broken(found) == []
    config.scale = 3.0
    assert broken(found) == ["config.scale"]


def test_an_unset_slot_must_stay_unset():
    class Slotted:
        __slots__ = ("scale",)

    thing = Slotted()
    found = places_of(lambda x: x * thing.scale)
    assert place_at(found, "thing.scale").want is MISSING
    thing.scale = 1
    assert broken(found) == ["thing.scale"]


def test_property_reads_are_found_and_the_property_is_not_run():
    class Thing:
        def __init__(self):
            self._scale, self.width = 2.0, 3

        @property
        def scale(self):
            pytest.fail("a property ran")

        @property
        def _unread(self):
            return self.width

    thing = Thing()
    found = places_of(lambda x: x * thing.scale)
    assert "thing._scale" not in {place.path for place in found}
    Thing.scale = property(lambda self: self._scale)
    assert broken(found) == ["Thing.scale"]
    found = paths_of(lambda x: x * thing.scale)
    assert "thing._scale" in found and "thing.width" not in found


def test_operators_and_item_access_are_calls_without_a_name():
    class Vocabulary:
        def __init__(self):
            self.table, self.bias = {"a": 1}, 3

        def __getitem__(self, key):
            return self.table[key]

        def __radd__(self, other):
            return other + self.bias

    words = Vocabulary()
    found = places_of(lambda x: x + words["a"] + words)
    words.table["a"], words.bias = 2, 4
    assert set(broken(found)) == {"words.table['a']", "words.bias"}


def test_class_attribute_and_its_shadow():
    class Thing:
        scale = 2.0
        unread = 1

        def run(self, x):
            return x * self.scale

    thing = Thing()

    def function(x):
        return thing.run(x)

    def found_at_scale():
        return [place for place in places_of(function) if place.path == "thing.scale"]

    found = places_of(function)
    assert place_at(found, "Thing.run").kind == places.TYPE_ATTR
    shadow, value = found_at_scale()
    assert (shadow.kind, shadow.want) == (places.DICT_ITEM, MISSING)
    assert shadow.home is vars(thing)
    assert (value.kind, value.home, value.want) == (places.TYPE_ATTR, Thing, 2.0)
    Thing.scale = 3.0
    assert broken(found) == ["thing.scale"]
    Thing.scale = 2.0
    thing.scale = 4.0
    assert broken(found) == ["thing.scale"]
    assert [place.kind for place in found_at_scale()] == [places.DICT_ITEM]


def test_a_method_patched_on_the_instance_the_class_or_its_base():
    class Base:
        def run(self, x):
            return x

    class Derived(Base):
        def run(self, x):
            return super().run(x)

        def unread(self):
            return self.other

    thing = Derived()
    found = places_of(lambda x: thing.run(x))
    assert "thing.other" not in {place.path for place in found}
    Base.run = lambda self, x: x
    assert broken(found) == ["Derived.run"]
    found = places_of(lambda x: thing.run(x))
    Derived.run = lambda self, x: x
    assert broken(found) == ["Derived.run"]
    found = places_of(lambda x: thing.run(x))
    thing.run = lambda x: x
    assert broken(found) == ["thing.run"]


def test_a_class_that_the_code_instantiates():
    class Thing:
        size = 3

        def __init__(self, width):
            self.width = width * OTHER

        def unread(self):
            return SCALE

    found = paths_of(lambda x: Thing(x).width + Thing.size)
    assert {"OTHER", "Thing.size"} <= found and "SCALE" not in found


def test_autograd_function():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x * SCALE

        @staticmethod
        def backward(context, gradient):
            return gradient * OTHER

    assert {"SCALE", "OTHER"} <= paths_of(lambda x: Double.apply(x))


# Containers


def test_lists_dicts_and_tuples():
    layers = [1, {"lr": 0.1, 2: [3]}, (4, [5])]
    found = places_of(lambda x: layers)
    layers[1]["lr"] = 0.2
    layers[1][2][0] = 4
    layers[2][1].append(6)
    layers[0] = 2
    assert broken(found) == ["layers[0]", "layers[1]['lr']", "layers[1][2][0]", "len(layers[2][1])"]


def test_a_huge_container_is_guarded_by_length_and_told():
    huge = list(range(places.MOST_ENTRIES + 1))
    found, notes, *_ = find_places(lambda x: huge)
    assert len(found) < 5 and len(notes) == 1
    assert notes[0].startswith("huge has 4097 entries")
    huge.append(0)
    assert broken(found) == ["len(huge)"]


def test_sets_and_deques_are_told_unless_nothing_is_lost():
    full, empty, fixed = {1}, set(), frozenset((1,))
    recent = collections.deque([1])
    _, notes, *_ = find_places(lambda x: (full, empty, fixed, recent))
    assert [note.split()[0] for note in sorted(notes)] == ["full", "recent"]


def test_cycles_end():
    ring = Config(scale=1)
    ring.next = Config(scale=2, next=ring, entries=[])
    ring.next.entries.append(ring.next.entries)

    def function(x):
        return function(x) * ring.next.next.scale + len(ring.next.entries)

    assert {"ring.scale", "ring.next.scale"} <= paths_of(function)


nested = some.recursive(
    some.integers() | some.floats(allow_nan=False) | some.text(max_size=3) | some.none(),
    lambda inner: (
        some.lists(inner, max_size=4)
        | some.dictionaries(some.text(max_size=3) | some.integers(), inner, max_size=4)
        | some.builds(lambda entry: Config(entry=entry), inner)
        | some.tuples(inner, inner)
    ),
    max_leaves=20,
)


def changes(thing):
    """Functions that each make one change somewhere inside."""
    if isinstance(thing, (list, dict)):
        for key in range(len(thing)) if isinstance(thing, list) else list(thing):
            yield functools.partial(thing.__setitem__, key, object())
            yield from changes(thing[key])
        yield (
            thing.clear
            if thing
            else functools.partial(
                thing.append if isinstance(thing, list) else functools.partial(thing.setdefault, 1), 0
            )
        )
    elif isinstance(thing, tuple):
        for entry in thing:
            yield from changes(entry)
    elif isinstance(thing, Config):
        yield functools.partial(setattr, thing, "entry", object())
        yield from changes(thing.entry)


@settings(max_examples=60, deadline=None)
@given(nested, some.data())
def test_any_one_change_of_nested_data_is_seen(data, choose):
    found = places_of(lambda x: [getattr(entry, "entry", entry) for entry in data])
    options = list(changes(data))
    if options:
        choose.draw(some.sampled_from(options))()
        assert broken(found)


# torch's bearers of state


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
        self.register_buffer("offset", torch.ones(2))
        self.scale, self.steps = 2.0, 0

    def forward(self, x):
        return self.layers(x) * self.scale + self.offset

    def validation_step(self, x):
        return x * self.steps * SCALE


def test_parameters_buffers_and_submodules_by_identity():
    model = Model()
    found = places_of(lambda x: model(x))
    place = place_at(found, "model.layers.0.weight")
    assert place.want is model.layers[0].weight and place.kind == places.DICT_ITEM
    assert place_at(found, "model.offset").want is model.offset
    model.layers[0].weight = nn.Parameter(torch.zeros(2, 2))
    model.offset = torch.zeros(2)
    model.layers[1] = nn.Identity()
    assert set(broken(found)) == {"model.layers.0.weight", "model.offset", "model.layers.1"}


def test_what_torchs_own_forwards_read():
    model = Model()
    found = places_of(model)
    model.layers[1].momentum = None
    model.layers[2].p = 0.1
    assert broken(found) == ["self.layers.1.momentum", "self.layers.2.p"]
    found = places_of(model)
    model.layers.eval()
    assert set(broken(found)) == {f"self.layers{name}.training" for name in ("", ".0", ".1", ".2")}


def test_attributes_of_methods_that_are_not_reached():
    model = Model()
    found = places_of(lambda x: model(x))
    assert not {"model.steps", "SCALE"} & {place.path for place in found}
    model.steps += 1
    model.loss = 1.0
    assert broken(found) == []
    model.scale = 1.0
    assert broken(found) == ["model.scale"]
    assert {"model.steps", "SCALE"} <= paths_of(lambda x: model.validation_step(x))


def test_a_new_parameter_or_submodule_is_seen():
    model = Model()
    found = places_of(lambda x: model(x))
    model.extra = nn.Linear(1, 1)
    model.layers[0].register_parameter("extra", None)
    assert set(broken(found)) == {"len(model._modules)", "len(model.layers.0._parameters)"}


def test_monkey_patched_forward():
    model = Model()
    found = places_of(lambda x: model(x))
    model.layers[0].forward = lambda x: x * OTHER
    assert broken(found) == ["model.layers.0.forward"]
    assert "OTHER" in paths_of(lambda x: model(x))


def test_hooks():
    model = Model()
    found = places_of(lambda x: model(x))
    handle = model.layers[0].register_forward_hook(lambda module, inputs, output: output * OTHER)
    assert broken(found) == ["len(model.layers.0._forward_hooks)"]
    assert "OTHER" in paths_of(lambda x: model(x))
    handle.remove()
    assert broken(found) == []
    with nn.modules.module.register_module_forward_hook(lambda module, inputs, output: None):
        assert broken(found) == ["len(torch.nn.modules.module._global_forward_hooks)"]


def test_class_attributes_of_modules():
    class Scaled(Model):
        factor = 3.0

        def forward(self, x):
            return super().forward(x) * self.factor

    model = Scaled()
    found = places_of(lambda x: model(x))
    kinds = {place.kind: place.want for place in found if place.path == "model.factor"}
    assert kinds == {places.TYPE_ATTR: 3.0, places.DICT_ITEM: MISSING}
    assert "model.scale" in {place.path for place in found}


def test_optimizer_groups_and_state():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()

    def function():
        optimizer.step()

    found = places_of(function)
    optimizer.step()
    assert broken(found) == ["len(optimizer.state)"]
    found = places_of(function)
    wanted = {id(place.want) for place in found}
    assert {id(state["exp_avg"]) for state in optimizer.state.values()} <= wanted
    assert {id(parameter) for parameter in model.parameters()} <= wanted
    optimizer.param_groups[0]["lr"] = 0.2
    assert broken(found) == ["optimizer.param_groups[0]['lr']"]
    found = places_of(function)
    optimizer.register_step_pre_hook(lambda *_: None)
    assert broken(found) == ["len(optimizer._optimizer_step_pre_hooks)"]
    found = places_of(function)
    optimizer.load_state_dict(optimizer.state_dict())
    assert {"optimizer.state", "optimizer.param_groups"} <= set(broken(found))


def test_scheduler_and_scaler():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    scaler = torch.amp.GradScaler("cpu")

    def function(x):
        scaler.scale(x)
        scheduler.step()

    found = places_of(function)
    scheduler.last_epoch += 1
    scaler._enabled = False
    assert set(broken(found)) == {"scheduler.last_epoch", "scaler._enabled"}


# Empty containers that the function fills and replaces: any like them will do, and nothing else


def new_box():
    return types.SimpleNamespace(one={}, other=[], kept=None)


def put(container, value):
    container.append(value) if type(container) is list else container.update(key=value)


def describe_box(box):
    """A number of all that a function can tell of the box, but for identities that nobody else has."""
    kind = (list, dict, collections.defaultdict).index(type(box.one))
    factory = getattr(box.one, "default_factory", None) is list
    sizes = 10 * len(box.one) + 100 * len(box.other)
    return kind + 3 * factory + sizes + 1000 * (box.one is box.other)


def filling(box, leave="replaced"):
    """A step that keeps its intermediate results in the box, and how it leaves that."""

    def step(x):
        before = describe_box(box)
        put(box.one, x * 2)
        y = x + before + 1e4 * describe_box(box)
        if leave == "replaced":
            box.one = empties.empty_like(box.one)
        elif leave == "kept as well":
            box.kept, box.one = box.one, empties.empty_like(box.one)
            box.kept.clear()
        elif leave == "cleared":
            box.one.clear()
        elif leave == "filled":
            box.one.clear()
            put(box.one, 1)
        return y

    return step


def set_one(value):
    return lambda box: setattr(box, "one", value())


CHANGES = {
    "nothing": lambda box: None,
    "another": lambda box: setattr(box, "one", empties.empty_like(box.one)),
    "a list": set_one(list),
    "a dict": set_one(dict),
    "a defaultdict": set_one(lambda: collections.defaultdict(int)),
    "a defaultdict of lists": set_one(lambda: collections.defaultdict(list)),
    "filled": lambda box: put(box.one, 1),
    "replaced by a filled one": set_one(lambda: {"a": 1}),
    "emptied": lambda box: box.one.clear(),
    "an alias": lambda box: setattr(box, "other", box.one),
    "no alias": lambda box: setattr(box, "other", []),
    "held": lambda box: setattr(box, "kept", box.one),
    "not held": lambda box: setattr(box, "kept", None),
}


def after(changes, leave, device, **more):
    """Let an eager and a jitted step meet the same changes of their boxes; the jitted one's stats."""
    boxes = new_box(), new_box()
    eager = filling(boxes[0], leave)
    jitted = cgt.jit(filling(boxes[1], leave), **more)
    for k, name in enumerate(changes):
        for box in boxes:
            CHANGES[name](box)
        x = torch.full((2,), float(k), device=device)
        assert torch.equal(jitted(x), eager(x)), (k, name)
        assert describe_box(boxes[1]) == describe_box(boxes[0]), (k, name)
    return cgt.stats(jitted)


def test_an_empty_container_that_is_replaced_by_another_replays(device):
    for kind in ("a list", "a dict", "a defaultdict", "a defaultdict of lists"):
        stats = after([kind] + ["nothing"] * 3 + ["another"] * 3, "replaced", device)
        assert (stats.records, stats.replays, stats.eager) == (1, 5, 0), stats.reasons


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_no_such_container_any_more_is_recorded(device, change):
    stats = after(["nothing"] * 4 + [change], "replaced", device)
    # not "no alias": `other` is only read, so guarded by identity as ever
    fits = change in ("nothing", "another", "a dict", "emptied", "not held")
    assert stats.replays == 2 + fits, stats.reasons


@pytest.mark.parametrize("leave", ["filled", "kept as well"])
def test_a_container_that_the_function_leaves_otherwise_never_replays(device, leave):
    stats = after(["nothing", *["a dict"] * 6], leave, device)
    assert stats.replays == 0, stats.reasons


@pytest.mark.parametrize("leave", ["replaced", "kept as well", "cleared"])
def test_any_changes_of_an_emptied_container_are_seen(device, leave, monkeypatch):
    monkeypatch.setattr(options, "COOL_DOWN", (2, 4))
    choose = random.Random(leave)
    changes = [name for name in choose.choices([*CHANGES], k=150) for name in (name, "nothing")]
    stats = after(changes, leave, device, max_records=100)
    assert stats.replays > 50 or leave == "kept as well", stats


def test_an_empty_container_that_the_caller_replaces_is_learnt(device):
    changes = ["nothing", "nothing", "no alias", "no alias", "no alias", "an alias", "no alias"]
    stats = after(changes, "cleared", device)
    assert (stats.records, stats.replays, stats.eager) == (3, 3, 0), stats.reasons


def test_a_variable_of_a_closure_may_be_replaced_too(device):
    kept = []

    def step(x):
        nonlocal kept
        kept.append(x * 2)
        y = kept[-1] + len(kept)
        kept = []
        return y

    jitted = cgt.jit(step)
    for k in range(6):
        assert jitted(torch.full((2,), float(k), device=device))[0].item() == 2 * k + 1
    assert cgt.stats(jitted).replays >= 3  # an input at another address may record once more
    kept.append(None)
    assert jitted(torch.ones(2, device=device))[0].item() == 4


def test_a_filled_container_that_is_replaced_is_named_and_not_its_tensors(device):
    box = types.SimpleNamespace(one={"a": 1})

    def step(x):
        box.one["y"] = x * 2
        y = box.one["y"] + 1
        box.one = {"a": 1}
        return y

    jitted = cgt.jit(step)
    for k in range(6):
        assert jitted(torch.full((2,), float(k), device=device))[0].item() == 2 * k + 1
    (reason,) = cgt.stats(jitted).reasons
    assert "box.one changes from call to call" in reason and cgt.stats(jitted).replays == 0


def test_a_failed_capture_leaves_empty_containers_empty():
    box = new_box()
    found = places_of(filling(box))
    before = record.Before(found, [], [], [], core.histories([]), None, keys=record.keys_in(found))
    old = box.one
    put(box.one, torch.ones(1))
    box.one = {"b": 2}
    put(box.other, 3)
    record.restore_places(before, None, tensors_only=False)
    assert box.one is old and not box.one and not box.other


# Odd objects: nothing of theirs may run, nothing may raise


class Hostile:
    """Every way to look at it is a failure."""

    def explode(self, *_, **__):
        pytest.fail("user code ran")

    __eq__ = __getattr__ = __getattribute__ = __len__ = __iter__ = __bool__ = explode
    __repr__ = __contains__ = __getitem__ = __call__ = explode
    __class__ = property(explode)
    __hash__ = object.__hash__
    scale = property(explode)


class HostileDict(dict):
    __iter__ = items = keys = values = __len__ = __getitem__ = __bool__ = Hostile.explode


class HostileList(list):
    __iter__ = __len__ = __getitem__ = __bool__ = __eq__ = Hostile.explode


class HostileSet(set):
    __iter__ = __len__ = __bool__ = __eq__ = Hostile.explode


class HostileMeta(type):
    __getattribute__ = __instancecheck__ = __subclasscheck__ = Hostile.explode
    __eq__ = __hash__ = __mro__ = __dict__ = __module__ = Hostile.explode


class NoDict:
    __dict__ = property(Hostile.explode)


class HostileModule(nn.Module):
    def __getattr__(self, name):
        pytest.fail("user code ran")


def hostile_things():
    meta = HostileMeta("Meta", (), {"scale": 1})
    odd = type.__call__(meta)
    holder = type("Holder", (), {"scale": odd, "other": meta})()
    uninitialised = HostileModule.__new__(HostileModule)
    return [
        Hostile(),
        HostileDict(scale=1),
        HostileList([1]),
        meta,
        odd,
        holder,
        NoDict(),
        HostileModule(),
        uninitialised,
        {Hostile(): Hostile()},
        {odd: meta},
        (Hostile(), HostileSet((1,))),
        functools.cached_property,
        functools.cached_property.__new__(functools.cached_property),
        property(),
        iter([]),
        types.ModuleType.__new__(types.ModuleType),
        sys.stdout,
        lambda: None,
        enum.Enum,
        Ellipsis,
        staticmethod(functools.partial(Hostile())),
        torch.Generator(),
        torch.float32,
        [].append,
        torch.optim.SGD.__new__(torch.optim.SGD),
        types.MethodType(Hostile(), Hostile()),
        torch.jit.script(nn.Linear(1, 1)),
        memoryview(b""),
        super(Hostile, Hostile),
    ]


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
@pytest.mark.parametrize("index", range(30))
def test_odd_objects_are_walked_without_running_their_code(index):
    things = hostile_things()
    assert len(things) == 30
    thing = things[index]

    def function(x):
        return thing.scale(hasattr(thing, "other"))

    found, *_ = find_places(function, [("args[0]", [thing])])
    assert any(place.path == "thing" and place.want is thing for place in found)
    find_places(thing)


def test_odd_functions():
    namespace = {}
    exec("def function(x): return x * SCALE", namespace)
    namespace["SCALE"] = 1
    namespace["function"].__module__ = None
    assert "SCALE" in paths_of(namespace["function"])


def test_a_walk_is_quick():
    model = nn.Sequential(*(Model() for _ in range(15)))  # 76 modules; about 4 ms where written
    find_places(model)
    began = time.perf_counter()
    find_places(model)
    assert time.perf_counter() - began < 0.1


@pytest.mark.parametrize("numbers", [True, False], ids=["numbers", "tensors"])
def test_an_empty_container_beside_places_that_change(numbers, device):
    """Its guard replaces one of its length, of which places behind it know their position."""
    box, inner = types.SimpleNamespace(cache={}), types.SimpleNamespace()
    box.inner = inner
    inner.k, inner.m, inner.n = (1.0, 100.0, 9.0) if numbers else (values(device, 3, seed=k) for k in range(3))
    inner.tail = [5, 6, 7, 8]

    def function(x):
        if len(box.inner.tail) != 4 or box.cache:
            return x
        return x * box.inner.k + box.inner.m - box.inner.n

    f = cgt.jit(function, audit="0")
    for i in range(24):
        one = float(i) if numbers else values(device, 3, seed=i)
        if i < 4:
            inner.k = one
        elif i > 8:
            inner.m = one
        box.cache = {}  # another one at each call
        x = values(device, 3, seed=50 + i)
        assert identical(f(x), function(x)), i
    assert cgt.stats(f).replays >= 12, cgt.explain(f)


def beside_its_own(change):
    class Base:
        scale = 1.0

        def __init__(self):
            self.scale = 2.0

    thing = Base()
    return lambda x: x * thing.scale * type(thing).scale, lambda: setattr(Base, "scale", 15.0)


def behind_a_view(change):
    given = {"a": 1.0, "b": 2.0}
    view = {"values": given.values(), "items": given.items()}[change]
    return lambda x: x * sum(v if change == "values" else v[1] for v in view), lambda: given.update(a=4.0)


def behind_a_method(change):
    given = [1, 2]
    length = given.__len__
    return lambda x: x * length(), lambda: given.append(3)


def behind_a_factory(change):
    value = 1.0
    table = collections.defaultdict(lambda: value)

    def replace():
        nonlocal value
        value = 6.0

    return lambda x: x * table.default_factory(), replace


@pytest.mark.parametrize("make, change", [(beside_its_own, ""), (behind_a_view, "values"), (behind_a_view, "items"),
                                          (behind_a_method, ""), (behind_a_factory, "")])  # fmt: skip
def test_values_that_lie_behind_something(make, change, device):
    """A class's attribute behind the object's own, a dict behind its view, a list behind its method, a cell behind a
    defaultdict's factory."""
    function, replace = make(change)
    f, x = cgt.jit(function, audit="0"), values(device, 3)
    for _ in range(8):
        f(x)
    assert cgt.stats(f).replays >= 5, cgt.explain(f)
    replace()
    assert identical(f(x), function(x))
