"""Objects that a call makes around its tensors, as a decoder's cache is one: a replay makes them anew. What is not the
call's own stays a reason."""

import collections

import pytest
import torch
from helpers import tells, values
from torch.utils import _pytree as torch_pytree

import cgt


class Layer:
    def __init__(self, keys):
        self.keys, self.filled = keys, True

    def __eq__(self, other):
        raise AssertionError("nobody compares them")


class Cache:
    """Like the one of transformers: no dataclass, no pytree."""

    def __init__(self, *keys):
        self.layers, self.about = [Layer(k) for k in keys], {"device": keys[0].device, "type": Layer}
        self.n = len(keys)

    def __len__(self):
        return self.n


def same(got, want):
    """Equal in types, attributes and values, all the way down."""
    if isinstance(want, torch.Tensor):
        return torch.equal(got, want)
    if type(got) is not type(want):
        return False
    if isinstance(want, (Cache, Layer)):
        return same(vars(got), vars(want))
    if isinstance(want, dict):
        return list(got) == list(want) and all(same(got[k], want[k]) for k in want)
    if isinstance(want, (list, tuple)):
        return len(got) == len(want) and all(map(same, got, want))
    return got == want


def decode(x):
    y = x * 2
    return {"logits": y.sum(), "cache": Cache(torch.cat([y, x]), y + 1)}


def test_object_made_in_the_call_is_made_anew(device):
    f = cgt.jit(decode)
    results = [f(values(device, seed=k)) for k in range(5)]
    assert all(same(got, decode(values(device, seed=k))) for k, got in enumerate(results))
    assert len({id(r["cache"]) for r in results}) == len({id(r["cache"].layers[0]) for r in results}) == 5
    results[3]["cache"].layers[0].filled = False
    assert f(values(device))["cache"].layers[0].filled
    assert cgt.stats(f).replays >= 3 and cgt.stats(f).eager == 0, cgt.explain(f)


def test_gradients_flow_through_tensors_of_an_object(device):
    w = torch.ones_like(values(device), requires_grad=True)
    f = cgt.jit(lambda x: decode(x * w))
    for k in range(12):
        x, grads = values(device, seed=k), []
        for run in (f, f.__wrapped__):
            out = run(x)
            grads += torch.autograd.grad(out["logits"] + out["cache"].layers[0].keys.square().sum(), w)
        assert torch.equal(*grads)
    assert cgt.stats(f).replays >= 4 and cgt.stats(f).backward.replays >= 3, cgt.explain(f)


def test_result_can_be_such_an_object_itself(device):
    f = cgt.jit(lambda x: Cache(x * 2, x + 1))
    for k in range(5):
        assert same(f(values(device, seed=k)), f.__wrapped__(values(device, seed=k)))
    assert cgt.stats(f).replays >= 2 and cgt.stats(f).eager == 0, cgt.explain(f)


class Output(collections.OrderedDict):
    """As the outputs of transformers: entries that are attributes, too."""

    def __init__(self, **entries):
        super().__init__(entries)
        vars(self).update(entries)


def test_object_in_a_registered_container(device):
    torch_pytree.register_pytree_node(
        Output, lambda out: (list(out.values()), list(out)), lambda parts, names: Output(**dict(zip(names, parts, strict=True)))
    )
    f = cgt.jit(lambda x: Output(**decode(x)))
    try:
        for k in range(5):
            got = f(values(device, seed=k))
            assert got.cache is got["cache"] and same(dict(got), decode(values(device, seed=k)))
        assert cgt.stats(f).replays >= 2 and cgt.stats(f).eager == 0, cgt.explain(f)
    finally:
        torch_pytree._deregister_pytree_node(Output)


HIDDEN = collections.deque([Layer(None)])


@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: [one], lambda one: {"of": Layer(one)}])
def test_object_that_somebody_holds_stays_the_same(device, wrap):
    """In a container that nobody guards, too."""

    def f(x):
        HIDDEN[0].keys = x * 2
        return wrap(HIDDEN[0])

    j = cgt.jit(f)
    for k in range(5):
        got = j(values(device, seed=k))
        one = got[0] if isinstance(got, list) else got["of"].keys if isinstance(got, dict) else got
        assert one is HIDDEN[0] and torch.equal(one.keys, values(device, seed=k) * 2)
    assert cgt.stats(j).replays == 0


class Slotted:
    __slots__ = ("t",)

    def __init__(self, t):
        self.t = t


class Finalized(Layer):
    def __del__(self):
        pass


class Counted(Layer):
    def __new__(cls, *args):
        return object.__new__(cls)


def twice(x):
    layer = Layer(x * 2)
    return layer, layer


STORE = []


def listed(x):
    STORE[:] = [Layer(x * 2)]
    return STORE[0]


@tells("strange_output")
@pytest.mark.parametrize("f", [
    lambda x: Slotted(x * 2), lambda x: Finalized(x * 2), lambda x: Counted(x * 2), lambda x: Layer("no tensor"),
    lambda x: Layer(x), twice, listed,
], ids="slots finalizer constructor nothing argument twice listed".split())  # fmt: skip
def test_other_objects_run_eagerly(device, f):
    def content(result):
        one = result[0] if isinstance(result, tuple) else result
        return one.t if isinstance(one, Slotted) else one.keys

    j = cgt.jit(f)
    for k in range(4):
        x = values(device, seed=k)
        assert same(content(j(x)), content(f(x)))
    assert cgt.stats(j).replays == 0 and cgt.stats(j).reasons


def test_sum_of_results_has_one_gradient_for_both(device):
    """The gradient of a sum is the sum's own, expanded: two arguments of the backward that begin at one address."""
    w = torch.ones_like(values(device), requires_grad=True)
    f = cgt.jit(lambda x: ((x * w).sum(), torch.cat([x * w, x])))
    apart = torch.cat([w, w]).detach()
    for k in range(12):
        grads = []
        for run in (f, f.__wrapped__):
            a, b = run(values(device, seed=k))
            if k == 8:  # no longer one: each is what it is
                grads += torch.autograd.grad((a, b), w, (torch.full((), 3.0, device=device), apart * k))
            else:
                grads += torch.autograd.grad(a + b.sum(), w)
            del a, b
        assert torch.equal(*grads), k
    assert cgt.stats(f).backward.records <= 6 and cgt.stats(f).backward.replays >= 4, cgt.explain(f)
