"""State of torch that lies in Python, and ways to an attribute that bytecode does not show: what changes there is
noticed, and calls between which nothing changes replay."""

import copy
import operator
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from helpers import plain
from test_place_changes import agree_with_a_change
from torch import nn

# isort: split
import cgt_core as core

import cgt
from cgt.look import places


def replays_around(f, x, want, change, n=5):
    """f(x) is want() before and after a change, and both replay."""
    for _ in range(n):
        assert torch.equal(f(x), want())
    before = cgt.stats(f).replays
    change()
    for _ in range(n):
        assert torch.equal(f(x), want())
    assert before >= n - 3 and cgt.stats(f).replays >= before + n - 3, cgt.explain(f)


PATCHED = {
    "in a global": (F, "relu", lambda x: F.relu(x)),
    "by its full name": (torch.nn.functional, "gelu", lambda x: torch.nn.functional.gelu(x)),
    "of torch": (torch, "tanh", lambda x: torch.tanh(x)),
    "below torch": (torch.linalg, "vector_norm", lambda x: torch.linalg.vector_norm(x)),
    "of a module": (F, "silu", nn.SiLU()),
}


@pytest.mark.parametrize("owner, name, function", PATCHED.values(), ids=PATCHED.keys())
def test_function_of_torch_that_is_replaced(device, monkeypatch, owner, name, function):
    f, x, scale = cgt.jit(copy.deepcopy(function)), torch.arange(4.0, device=device) - 2, 3.0
    replays_around(f, x, lambda: function(x), lambda: monkeypatch.setattr(owner, name, lambda x, *_, **__: x * scale))
    scale = 5.0  # what it reads is guarded, too
    assert torch.equal(f(x), x * 5)
    monkeypatch.undo()
    assert torch.equal(f(x), function(x))


def test_fast_path_of_attention(device):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).to(device).eval()
    f, x = cgt.jit(layer), torch.randn(2, 3, 8, device=device)
    before = torch.backends.mha.get_fastpath_enabled()
    try:
        with torch.inference_mode():
            plain(layer)(x)
            for on in (True, False, True):
                torch.backends.mha.set_fastpath_enabled(on)
                want = plain(layer)(x)
                for _ in range(4):
                    assert torch.equal(f(x), want)
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    # On a GPU the process's first use of BLAS settles a switch that is guarded: one recording more.
    assert cgt.stats(f).records >= 2 and cgt.stats(f).replays >= 7, cgt.explain(f)


@pytest.mark.parametrize("how", ["attribute", "variable"])
@pytest.mark.parametrize("key", ["enabled", "strategy"])
def test_switches_of_einsum_are_places(monkeypatch, how, key):
    """opt_einsum need not be there."""
    found, *_ = places.find_places(lambda x: torch.einsum("ij,jk,kl->il", x, x, x))
    mine = [p for p in found if p.path == f"torch.backends.opt_einsum.{key}"]
    holds = [p for p in mine if places.value_at(p) is not p.want]
    assert mine and not holds
    owner = vars(torch.backends.opt_einsum) if how == "attribute" else vars(torch.backends.opt_einsum)["m"].__dict__
    monkeypatch.setitem(owner, key, "another")
    assert [p for p in mine if places.value_at(p) is not p.want]
    assert not any("einsum" in p.path for p in places.find_places(lambda x: x * 2).places)


class Meta(type):
    scale = 2.0
    offset = 1.0

    def both(cls, x):
        return x * cls.scale


@pytest.mark.parametrize("change", ["metaclass", "shadowed"])
@pytest.mark.parametrize("by", ["attribute", "method"])
def test_attributes_of_a_metaclass(change, by):
    def make():
        meta = type("Mine", (Meta,), {"scale": 2.0})
        settings = meta("Settings", (), {})
        if by == "attribute":
            return lambda x: x * settings.scale, settings
        return lambda x: settings.both(x), settings

    def changes(settings):
        if change == "metaclass":
            type(settings).scale = 7.0
        else:
            settings.scale = 7.0

    agree_with_a_change(make, changes)


def test_module_with_getattr():
    def make():
        settings = types.ModuleType("cgt_test_settings")
        settings.table = {"scale": 2.0}
        exec("def __getattr__(name): return table[name]", vars(settings))
        return lambda x: x * settings.scale, settings

    agree_with_a_change(make, lambda settings: settings.table.update(scale=7.0))
    agree_with_a_change(make, lambda settings: setattr(settings, "scale", 7.0))
    agree_with_a_change(make, lambda settings: exec("def __getattr__(name): return 7.0", vars(settings)))
    assert "cgt_test_settings" not in sys.modules


class Part:
    def __init__(self):
        self.scale, self.inner = 2.0, None

    def times(self, x):
        return x * self.scale


GETTERS = {
    "stored attrgetter": lambda p, get=operator.attrgetter("scale"): lambda x: x * get(p),
    "stored dotted": lambda p, get=operator.attrgetter("inner.scale"): lambda x: x * get(p),
    "stored methodcaller": lambda p, call=operator.methodcaller("times", 3.0): lambda x: x * call(p),
    "keywords": lambda p, call=operator.methodcaller("times", x=3.0): lambda x: x * call(p),
    "made inside": lambda p: lambda x: x * operator.attrgetter("inner.scale")(p),
}


@pytest.mark.parametrize("wrap", GETTERS.values(), ids=GETTERS.keys())
def test_attributes_by_attrgetter_and_methodcaller(wrap):
    def make():
        part = Part()
        part.inner = Part()
        return wrap(part), part

    def change(part):
        part.scale = part.inner.scale = 7.0

    agree_with_a_change(make, change)


@pytest.mark.parametrize("make_holder", [lambda: nn.ParameterDict({"a": 2.0}), lambda: nn.ParameterList([2.0])])
@pytest.mark.parametrize("change", ["set", "more", "less"])
def test_plain_values_in_containers_of_parameters(make_holder, change):
    def make():
        holder = make_holder()

        def f(x):
            for value in holder.values() if isinstance(holder, nn.ParameterDict) else holder:
                x = x * value
            return x

        return f, holder

    def changes(holder):
        if change == "set":
            holder["a" if isinstance(holder, nn.ParameterDict) else 0] = 7.0
        elif change == "more":
            holder.update({"b": 7.0}) if isinstance(holder, nn.ParameterDict) else holder.append(7.0)
        elif isinstance(holder, nn.ParameterDict):
            del holder["a"]
        else:
            holder._size = 0

    agree_with_a_change(make, changes)


@pytest.mark.filterwarnings("ignore:Setting the SM carveout")
def test_which_kernels_come_first_and_how_much_of_the_gpu_they_may_take_is_ambient():
    """The order in which backends of attention are asked, and the SMs that matrix products leave alone."""
    first, second = torch.nn.attention.SDPBackend.FLASH_ATTENTION, torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION
    words = [core.ambient()]
    for order in ([first, second], [second, first]):
        with torch.nn.attention.sdpa_kernel(order, set_priority=True):
            words.append(core.ambient())
    assert core.ambient() == words[0]
    for carveout in (0, 20, 66):
        torch._C._set_sm_carveout_experimental(carveout)
        words.append(core.ambient())
    torch._C._set_sm_carveout_experimental(None)
    assert core.ambient() == words[0] and len(set(words)) == len(words)
