"""What a function stores and never reads is seen, too. A replay stores what is plainly one tensor or value in an attribute, a
global or a variable (test_puts.py has more of it); other calls run eagerly with a reason that names the place; where
the same comes to be stored each time, they replay."""

import pytest
import torch
from helpers import same

import cgt

LAST = None


class Holder:
    pass


class Slotted:
    __slots__ = ("last",)


def attribute(s, x):
    s.last = x


def view(s, x):
    s.last = x[1:]


def entry(s, x):
    s.many["last"] = x


def of_the_class(s, x):
    type(s).last = x


def of_a_function(s, x):
    s.function.last = x


def by_a_setter(s, x):
    setattr(s, "la" + "st", x)


def in_a_tuple(s, x):
    s.last = (1, [x])


STORES = {
    attribute: "s.last", view: "args[0]", entry: "s.many", of_the_class: ".last",
    of_a_function: "s.function.last", by_a_setter: "s.last", in_a_tuple: "s.last",
}  # fmt: skip


def holder_of(kind=Holder):
    """An object of a class of its own."""
    s = type(kind.__name__, (kind,), {"__slots__": ()} if kind is Slotted else {})()
    if kind is Holder:
        s.many, s.function = {}, lambda: None
    return s


def stored(s):
    """What was stored wherever a function above does, and then taken away."""
    found = [getattr(s, "last", None)]
    if isinstance(s, Holder):
        found += [s.many.get("last"), vars(s.function).get("last")]
    return found


def forget(s):
    for own in (vars(s), s.many, vars(s.function)):
        own.pop("last", None)
    if "last" in vars(type(s)):
        del type(s).last


@pytest.mark.parametrize("store", STORES, ids=lambda store: store.__name__)
@pytest.mark.parametrize("kept", [True, False], ids=["stays", "is new at each call"])
def test_store_of_another_tensor_at_each_call_is_as_in_eager(device, store, kept):
    def outcomes(wrap):
        s, found = holder_of(), []
        f = wrap(lambda x: (store(s, x), x * 2)[1])
        for k in range(8):
            x = torch.full((3,), float(k), device=device)
            found += [f(x), stored(s)]
            if not kept:
                forget(s)
        return f, found

    _, want = outcomes(lambda f: f)
    f, got = outcomes(cgt.jit)
    assert same(got, want)
    if store in (attribute, in_a_tuple) and kept:
        assert cgt.stats(f).replays == 6, cgt.explain(f)
        return
    if store in (entry, of_a_function, by_a_setter) and kept:  # what lies there is followed
        assert cgt.stats(f).replays == 5, cgt.explain(f)
        return
    assert cgt.stats(f).replays == 0
    told = f"something keeps {STORES[store]}" if store is view else f"{STORES[store]}"
    grown = "len(Holder.__dict__)" if store is of_the_class else told  # whichever place is looked at first
    assert any(told in reason or grown in reason for reason in cgt.stats(f).reasons), cgt.explain(f)
    assert store is view or all("is changed by the function" in reason for reason in cgt.stats(f).reasons)


def test_store_in_a_slot_a_global_and_a_variable(device, monkeypatch):
    monkeypatch.setattr(f"{__name__}.LAST", None)
    s, last = holder_of(Slotted), None

    def slot(x):
        s.last = x
        return x * 2

    def variable(x):
        nonlocal last
        last = x
        return x * 2

    def of_the_module(x):
        global LAST
        LAST = x
        return x * 2

    for function, find in ((slot, lambda: s.last), (variable, lambda: last), (of_the_module, lambda: LAST)):
        f = cgt.jit(function)
        for k in range(6):
            x = torch.full((3,), float(k), device=device)
            assert torch.equal(f(x), x * 2) and find() is x
        assert cgt.stats(f).replays == (0 if function is slot else 4), cgt.explain(f)


def test_global_that_was_not_there(device):
    namespace = {}
    exec("def function(x):\n  global last\n  last = x\n  return x * 2", namespace)
    f = cgt.jit(namespace["function"])
    for k in range(6):
        namespace.pop("last", None)
        x = torch.full((3,), float(k), device=device)
        assert torch.equal(f(x), x * 2) and namespace["last"] is x
    assert cgt.stats(f).replays == 4


def test_attribute_that_the_function_deletes(device):
    s = Holder()

    def f(x):
        del s.once
        return x * 2

    jitted = cgt.jit(f)
    for k in range(6):
        s.once = k
        jitted(torch.ones(3, device=device))
        assert not hasattr(s, "once")
    assert cgt.stats(jitted).replays == 0
    assert any("s.once is changed by the function" in reason for reason in cgt.stats(jitted).reasons)


@pytest.mark.parametrize("value", ["argument", "number", "text", "shape", "kind"])
def test_store_of_the_same_at_each_call_replays(device, value):
    s, x = Holder(), torch.ones(3, device=device)

    def f(x):
        s.last = {"argument": x, "number": len(x) * 1000, "text": f"{len(x)}", "shape": x.shape, "kind": x.dtype}[value]
        return x * 2

    jitted = cgt.jit(f)
    for _ in range(6):
        assert torch.equal(jitted(x), x * 2)
    assert cgt.stats(jitted).replays == 4, cgt.explain(jitted)
    s.last = None  # eager would store it again
    jitted(x)
    assert s.last is not None


def test_store_that_settles_replays_once_it_has(device):
    class Model:
        def __call__(self, x):
            self.shape, self.calls = x.shape, min(getattr(self, "calls", 0) + 1, 4)
            self.table = getattr(self, "table", None) or {"k": 1}
            return x * 2

    model = Model()
    f = cgt.jit(model)
    for k in range(100):
        x = torch.full((3,), float(k), device=device)
        assert torch.equal(f(x), x * 2) and model.calls == min(k + 1, 4)
    assert cgt.stats(f).replays >= 20, cgt.explain(f)


def test_advice_to_copy_into_a_tensor_replays(device):
    s = Holder()
    s.last = torch.zeros(3, device=device)

    def f(x):
        s.last.copy_(x)
        return x * 2

    jitted = cgt.jit(f)
    for k in range(6):
        x = torch.full((3,), float(k), device=device)
        assert torch.equal(jitted(x), x * 2) and torch.equal(s.last, x)
    assert cgt.stats(jitted).replays == 4
