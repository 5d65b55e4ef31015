"""What changes between two calls of a function is noticed, however its code comes to it: values are those of eager,
and calls between which nothing changes replay. (test_places.py asks what find_places finds.)"""

import collections
import contextvars
import dataclasses
import enum
import functools
import threading
import types
import weakref

import cgt_core as core
import pytest
import torch
from test_places import Config, broken, paths_of, places_of
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as torch_pytree

import cgt
from cgt.look import places
from cgt.make import record

SCALE = 2.0


def agree_with_a_change(make, change, n=12, replays=6):
    """`make()` -> (function of a number, state): let an eager and a jitted one meet `change(state)` at
    their sixth call; the jitted one's stats."""
    (eager, theirs), (plain, ours) = make(), make()
    jitted = cgt.jit(plain)
    for k in range(n):
        if k == 5:
            change(theirs)
            change(ours)
        x = torch.arange(3.0) + k
        want, got = eager(x), jitted(x)
        assert torch.equal(got, want) and got.requires_grad == want.requires_grad, k
        del got
    stats = cgt.stats(jitted)
    assert stats.replays >= replays, cgt.explain(jitted)
    return stats


class Tools:
    """What containers among the arguments have, besides their entries."""

    factor = 2.0

    def by_global(self, x):
        return x * SCALE

    def by_class(self, x):
        return x * self.factor

    @property
    def both(self):
        return self.factor * SCALE


@dataclasses.dataclass
class InDataclass(Tools):
    x: torch.Tensor = dataclasses.field(default_factory=lambda: torch.ones(1))


class InNamedtuple(collections.namedtuple("InNamedtuple", "x"), Tools):
    pass


class InNode(Tools):
    pass


class InEnum(Tools, enum.Enum):
    MEMBER = 1


torch_pytree.register_pytree_node(InNode, lambda node: ([], None), lambda entries, context: InNode())


@pytest.mark.parametrize(
    "argument",
    [InDataclass, lambda: InNamedtuple(torch.ones(1)), InNode, lambda: InEnum.MEMBER, Tools],
    ids=["dataclass", "namedtuple", "pytree node", "enum", "object"],
)
@pytest.mark.parametrize("what", ["by_global", "by_class", "both"])
@pytest.mark.parametrize("change", ["global", "class", "method"])
def test_code_that_comes_with_an_argument(monkeypatch, argument, what, change):
    thing = argument()

    def read(x, thing):
        found = getattr(thing, what)
        return x * found if what == "both" else found(x)

    jitted = cgt.jit(read)
    for k in range(10):
        if k == 5 and change == "global":
            monkeypatch.setitem(globals(), "SCALE", 7.0)
        elif k == 5 and change == "class":
            monkeypatch.setattr(Tools, "factor", 7.0)
        elif k == 5:
            monkeypatch.setattr(Tools, what, property(lambda self: 3) if what == "both" else lambda self, x: x)
        x = torch.arange(3.0) + k
        assert torch.equal(jitted(x, thing), read(x, thing)), k
    assert cgt.stats(jitted).replays >= 6, cgt.explain(jitted)


def test_classes_as_arguments():
    class Simulation:
        width = 0.5

        @classmethod
        @cgt.jit
        def step(cls, x):
            return x * cls.width

    scale = cgt.jit(lambda x, cls: x * cls.width)
    for k in range(10):
        if k == 5:
            Simulation.width = 2.0
        x = torch.arange(3.0) + k
        assert torch.equal(Simulation.step(x), x * Simulation.width)
        assert torch.equal(scale(x, Simulation), x * Simulation.width)
    for jitted in (vars(Simulation)["step"].__func__, scale):
        assert cgt.stats(jitted).replays >= 6


def test_a_text_of_an_enum_names_an_attribute():
    class Which(str, enum.Enum):
        FIRST = "first"

    config = Config(first=1, second=2)
    found = paths_of(lambda x: getattr(config, which), ("which", which := Which.FIRST))
    assert "config.first" in found and "config.second" not in found


class Special:
    """Methods that no bytecode names."""

    def __init__(self):
        self.value, self.ring = 2, torch.zeros(3, 3)

    def __setitem__(self, key, x):
        self.ring[key + self.value - 2] = x

    def __delitem__(self, key):
        self.ring[key] = self.value

    def __lt__(self, other):
        return self.value < other

    def __eq__(self, other):
        return self.value == other

    __hash__ = None

    def __abs__(self):
        return self.value

    def __round__(self, digits=None):
        return self.value

    def __iadd__(self, x):
        self.ring += x * self.value
        return self

    def __str__(self):
        return "+" * self.value

    def __format__(self, how):
        return "+" * self.value

    def __getattr__(self, name):
        if name != "computed":
            raise AttributeError(name)
        return object.__getattribute__(self, "value")

    def __setattr__(self, name, value):
        if name == "scaled":
            self.ring.copy_(value * self.value)
        else:
            object.__setattr__(self, name, value)

    @property
    def first(self):
        return self.ring[0]

    @first.setter
    def first(self, x):
        self.ring[0] = x * self.value

    @first.deleter
    def first(self):
        self.ring[0] = self.value


class Scaling:
    """A descriptor that sets by its own state."""

    def __init__(self):
        self.value = 2

    def __get__(self, thing, cls):
        return self

    def __set__(self, thing, x):
        thing.kept.copy_(x * self.value)


class Missing(dict):
    def __missing__(self, key):
        return self.value


@dataclasses.dataclass
class Point:
    value: int = 2
    other: int = 1


def set_item(o, x):
    o[0] = x
    return o.ring.sum(0)


def delete_item(o, x):
    del o[0]
    return o.ring.sum(0) + x


def add_in_place(o, x):
    o.ring.zero_()
    o += x
    return o.ring.sum(0)


def set_attribute(o, x):
    o.scaled = x
    return o.ring.sum(0)


def set_property(o, x):
    o.first = x
    return o.ring.sum(0)


def delete_property(o, x):
    del o.first
    return o.ring.sum(0) + x


def set_descriptor(o, x):
    o.scaling = x
    return o.kept * 1


def match_positions(o, x):
    match o:
        case Point(value, other):
            return x * value + other


SPECIAL = {
    "setitem": (Special, set_item),
    "delitem": (Special, delete_item),
    "lt": (Special, lambda o, x: x * 2 if o < 3 else x * 5),
    "eq": (Special, lambda o, x: x * 2 if o == 2 else x * 5),
    "in": (Special, lambda o, x: x * 2 if o in [1, 2] else x * 5),
    "abs": (Special, lambda o, x: x * abs(o)),
    "round": (Special, lambda o, x: x * round(o)),
    "iadd": (Special, add_in_place),
    "str": (Special, lambda o, x: x * len(str(o))),
    "format": (Special, lambda o, x: x * len(f"{o}")),
    "getattr": (Special, lambda o, x: x * o.computed),
    "setattr": (Special, set_attribute),
    "property setter": (Special, set_property),
    "property deleter": (Special, delete_property),
    "missing": (lambda: with_value(Missing()), lambda o, x: x * o["a"]),
    "dataclass ==": (Point, lambda o, x: x * 2 if o == Point() else x * 5),
    "dataclass in": (Point, lambda o, x: x * 2 if o in (Point(1, 1), Point()) else x * 5),
    "match": (Point, match_positions),
}


def with_value(thing):
    thing.value = 2
    return thing


@pytest.mark.parametrize("new, read", SPECIAL.values(), ids=SPECIAL)
def test_special_methods(new, read):
    def make():
        thing = new()
        return lambda x: read(thing, x), thing

    def change(thing):
        object.__setattr__(thing, "value", 3)

    agree_with_a_change(make, change)


def test_a_descriptor_that_is_only_set():
    def make():
        class Thing:
            scaling = Scaling()
            kept = torch.zeros(3)

        thing = Thing()
        return lambda x: set_descriptor(thing, x), vars(Thing)["scaling"]

    agree_with_a_change(make, lambda scaling: setattr(scaling, "value", 3))


def test_fields_of_a_dataclass_count_where_something_is_compared():
    point = Point()
    assert not {"point.value", "point.other"} & paths_of(lambda x: repr(point))
    assert {"point.value", "point.other"} <= paths_of(lambda x: point == x)


# Attributes that come later, or are found in unusual ways. Each makes (function, state) to change.


def function_attribute():
    def helper(x):
        return x * helper.scale

    helper.scale = 2.0
    return lambda x: helper(x), helper


def absent_in_try():
    state = Config()

    def function(x):
        try:
            return x * state.scale
        except AttributeError:
            return x

    return function, state


def absent_in_class():
    state = type("State", (), {})
    return lambda x: x * getattr(state, "scale", 2.0), state


def absent_in_class_of_instance():
    state = type("State", (), {})
    thing = state()
    return lambda x: x * getattr(thing, "scale", 2.0), state


def absent_in_base():
    state = type("Base", (), {})
    thing = type("State", (state,), {})()
    return lambda x: x * (thing.scale if hasattr(thing, "scale") else 2.0), state


def behind_super():
    class Base:
        scale = 2.0

    class Derived(Base):
        scale = 4.0

        def run(self, x):
            return x * super().scale * self.scale

    return Derived().run, Base


def absent_behind_an_attribute():
    state = type("State", (), {})
    thing = state()
    thing.scale = 5.0
    return lambda x: x * getattr(type(thing), "scale", 2.0) * thing.scale, state


def dispatched():
    state = Config(scale=2.0)

    @functools.singledispatch
    def scaled(thing, x):
        return x

    @scaled.register
    def _(thing: Config, x):
        return x * thing.scale

    return lambda x: scaled(state, x), state


@pytest.mark.parametrize(
    "make",
    [function_attribute, absent_in_try, absent_in_class, absent_in_class_of_instance]
    + [absent_in_base, absent_behind_an_attribute, behind_super, dispatched],
)
def test_attributes(make):
    agree_with_a_change(make, lambda state: setattr(state, "scale", 3.0))


@pytest.mark.parametrize("inner", [False, True])
def test_global_that_comes_later_and_hides_a_builtin(inner):
    def make():
        scope = {"__name__": "somebody", "torch": torch}
        exec("def f(x): return x * len((1, 2))\ndef g(x): return f(x) + 1", scope)
        return scope["g" if inner else "f"], scope

    agree_with_a_change(make, lambda scope: scope.update(len=lambda entries: 7))


class Entries(collections.UserDict):
    pass


@pytest.mark.parametrize("new", [collections.UserDict, Entries, collections.ChainMap, types.MappingProxyType])
def test_mappings_around_a_dict(new):
    def make():
        entries = {"scale": 2.0}
        mapping = new(entries)
        return lambda x: x * mapping["scale"], getattr(mapping, "data", entries)

    agree_with_a_change(make, lambda entries: entries.update(scale=3.0))


def test_the_state_of_a_module_is_replaced_as_a_whole():
    def make():
        model = nn.Linear(3, 3)
        nn.init.ones_(model.weight), nn.init.ones_(model.bias)
        return lambda x: model(x).detach(), model

    other = nn.Linear(3, 3)
    agree_with_a_change(make, lambda model: model.__setstate__(vars(other)))


@pytest.mark.parametrize("make", [lambda: contextvars.ContextVar("v"), threading.local, lambda: weakref.ref(nn.Module)])
def test_what_is_looked_up_by_thread_or_context_is_told(make):
    thing = make()
    _, notes, *_ = places.find_places(lambda x: thing)
    assert [note.split()[0] for note in notes] == ["thing"]


class Slots:
    __slots__ = ("at", "ring")


class Derived(Slots):
    __slots__ = ()


def ring_in_slots(cls=Slots):
    box = cls()
    return box, box


def ring_in_class():
    base = type("Base", (), {"at": 0})
    return type("Ring", (base,), {}), base


@pytest.mark.parametrize("make", [ring_in_slots, lambda: ring_in_slots(Derived), ring_in_class])
@pytest.mark.parametrize("size", [1, 2])
def test_slots_and_class_attributes_that_the_function_moves(make, size):
    def outcomes(wrap):
        box, owner = make()
        owner.at, owner.ring = 0, torch.zeros(size, 3)

        def step(x):
            box.ring[box.at] = x
            owner.at = (box.at + 1) % size
            return box.ring.sum(0)

        f = wrap(step)
        return f, [f(torch.arange(3.0) + k).clone() for k in range(12)]

    _, want = outcomes(lambda f: f)
    jitted, got = outcomes(cgt.jit)
    assert all(map(torch.equal, got, want))
    stats = cgt.stats(jitted)
    told = size == 2 and make is ring_in_class  # whose number no recording computes
    assert any("at is changed" in r for r in stats.reasons) if told else stats.replays >= 8, stats.reasons


def test_a_failed_capture_leaves_slots_and_classes_as_they_were():
    base = type("Base", (), {"at": 0, "own": 1})
    ring, box = type("Ring", (base,), {}), Slots()
    box.at = 0

    def step(x):
        return x * ring.at * ring.own * box.at + getattr(box, "ring", 0)

    found = places_of(step)
    ring.at, base.own, box.at, box.ring = 1, 2, 3, 4
    assert set(broken(found)) == {"len(Ring.__dict__)", "ring.at", "ring.own", "box.at", "box.ring"}
    record.restore_places(record.Before(found, [], [], [], core.histories([]), None), None, tensors_only=False)
    assert broken(found) == []
    assert "at" not in vars(ring) and (base.at, base.own, box.at) == (0, 1, 0)
    assert not hasattr(box, "ring")


def hooked(field, when):
    """A step that runs its backward, and a weight whose hook reads `state.scale`."""
    weight = nn.Parameter(torch.ones(3))
    state = types.SimpleNamespace(weight=weight, scale=2.0, handle=None)

    def scale(gradient):
        return gradient * state.scale

    def scale_grad(parameter):
        parameter.grad.mul_(state.scale)

    def put():
        hook, register = {
            "hook": (scale, weight.register_hook),
            "post": (scale_grad, weight.register_post_accumulate_grad_hook),
        }[field]
        state.handle = register(hook)

    def step(x):
        weight.grad = None
        (weight * x).sum().backward()
        return weight.grad.clone()

    state.put = put
    if when != "later":
        put()
    return step, state


HOOK_CHANGES = {
    "later": lambda state: state.put(),
    "removed": lambda state: state.handle.remove(),
    "replaced": lambda state: (state.handle.remove(), state.put()),
    "its state": lambda state: setattr(state, "scale", 5.0),
}


@pytest.mark.parametrize("field", ["hook", "post"])
@pytest.mark.parametrize("change", HOOK_CHANGES)
def test_hooks_of_tensors_in_a_whole_step(field, change):
    agree_with_a_change(lambda: hooked(field, change), HOOK_CHANGES[change])


@pytest.mark.parametrize("when", ["later", "before"])
def test_hooks_of_an_argument(when):
    def make():
        leaf = torch.ones(3, requires_grad=True)

        def step(x, leaf):
            leaf.grad = None
            (leaf * x).sum().backward()
            return leaf.grad.clone()

        state = types.SimpleNamespace(scale=2.0, leaf=leaf)
        state.put = lambda: leaf.register_hook(lambda gradient: gradient * state.scale)
        if when == "before":
            state.put()
        return step, state

    (eager, theirs), (plain, ours) = make(), make()
    jitted = cgt.jit(plain)
    for k in range(12):
        for state in (theirs, ours) if k == 5 else ():
            state.scale = 5.0
            if when == "later":
                state.put()
        if k == 10:  # another tensor, that is without hooks
            theirs.leaf, ours.leaf = (torch.ones(3, requires_grad=True) for _ in range(2))
        x = torch.arange(3.0) + k
        assert torch.equal(jitted(x, ours.leaf), eager(x, theirs.leaf)), k
    assert cgt.stats(jitted).replays >= 5, cgt.explain(jitted)


def test_hooks_are_guarded_where_a_backward_runs_and_compared_where_one_was_registered():
    model = nn.Linear(2, 2)
    fields = {f"model.{name}.{field}" for name in ("weight", "bias") for field in places.TENSOR_HOOKS}
    assert not fields & paths_of(lambda x: model(x))
    found = places_of(lambda x: model(x).sum().backward())
    assert fields <= {place.path for place in found}
    assert fields <= paths_of(lambda x: torch.autograd.grad(model(x).sum(), [model.weight]))
    assert all(places.told_by(place) for place in found if place.path in fields)
    log = []
    model.weight.register_hook(lambda gradient: log.append(gradient))
    assert broken(found) == ["model.weight._backward_hooks"]
    assert "len(log)" in paths_of(lambda x: model(x).sum().backward())


def test_global_hooks_of_optimizers():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    found = places_of(lambda: optimizer.step())
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    assert broken(found) == ["len(torch.optim.optimizer._global_optimizer_pre_hooks)"]
    handle.remove()
    assert broken(found) == []


Pair = collections.namedtuple("Pair", "weight bias")


def in_tuple(weight, bias):
    weights = (weight, bias)
    return lambda x: x * weights[0] + weights[1]


def in_defaults(weight, bias):
    def function(x, weight=weight, *, bias=bias):
        return x * weight + bias

    return function


def in_namedtuple(weight, bias):
    box = types.SimpleNamespace(pair=Pair(weight, bias))
    return lambda x: x * box.pair.weight + box.pair.bias


@pytest.mark.parametrize("holding", [in_tuple, in_defaults, in_namedtuple])
@pytest.mark.parametrize(
    "change",
    [lambda weight: setattr(weight, "data", torch.full((3,), 5.0)), lambda weight: weight.requires_grad_()],
    ids=["data", "requires_grad"],
)
def test_tensors_in_what_cannot_change(holding, change):
    def make():
        weight = torch.ones(3)
        return holding(weight, torch.ones(3)), weight

    agree_with_a_change(make, change)


def test_an_argument_that_is_a_tuples_tensor():
    def outcomes(wrap):
        state = (torch.zeros(16),)

        def count(y):
            state[0].add_(1)
            return y * 2

        f, kept, found = wrap(count), [], []
        for k in range(9):
            kept.append(torch.arange(16.0) + k)
            found.append(f(state[0] if k in (6, 8) else kept[-1]).clone())
        return f, found

    _, want = outcomes(lambda f: f)
    jitted, got = outcomes(cgt.jit)
    assert all(map(torch.equal, got, want)) and cgt.stats(jitted).replays >= 3


def test_class_that_says_it_is_of_the_types_module():
    """make_dataclass() up to 3.11 and types.new_class() leave that name: it is the user's class all the same."""

    def outcomes(wrap):
        state = types.new_class("State", (), {}, lambda space: space.update(rate=1.0))()
        state.last = state.weight = torch.ones(3)

        def f(x):
            y = x * state.weight * state.rate
            state.last = x
            return y

        f, found = wrap(f), []
        for k in range(12):
            found.append(f(torch.arange(3.0) + k))
            found.append(state.last.clone())
            if k in (4, 8):
                state.weight = torch.full((3,), k + 2.0)
            if k == 6:
                state.rate = 3.0
        return f, found

    _, want = outcomes(lambda f: f)
    jitted, got = outcomes(cgt.jit)
    assert all(map(torch.equal, got, want)) and cgt.stats(jitted).replays >= 5
