"""A module is jitted in place, as `module.compile()` compiles it: it stays the module that it is, to programs and to
PyTorch's tools."""

import copy
import functools
import gc
import inspect
import io
import pickle
import typing
import weakref

import cgt_core as core
import pytest
import torch
from helpers import tells, values
from torch import nn, optim
from torch.nn.utils import parametrizations as P
from torch.nn.utils import prune
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint

import cgt
from cgt.api import state_of


def identity(f):
    return f


def nothing(*_):
    return None


@cgt.jit
def jitted_nothing(x):
    return x


def small(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def rows(device, k):
    return values(device, 5, 3, seed=k)


def test_jitted_module_is_that_very_module(device):
    """A program that says `model = cgt.jit(model)` goes on as before."""
    net, twin = small().to(device), small().to(device)
    before = {**vars(net)}
    model = cgt.jit(net, max_records=3)
    assert model is net and isinstance(model, nn.Sequential) and type(model) is nn.Sequential
    assert vars(model).keys() - before.keys() == {"_compiled_call_impl"} and dir(model)
    assert cgt.jit(model, max_records=3) is net and repr(model) == repr(twin)
    opt, other = (optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, twin))
    for k in range(8):
        for one, o in ((model, opt), (twin, other)):
            o.zero_grad()
            one(rows(device, k)).square().sum().backward()
            o.step()
        assert all(map(torch.equal, model.state_dict().values(), twin.state_dict().values())), k
    s = cgt.stats(model)
    assert s.replays >= 4 and s.backward.replays >= 2 and cgt.stats(model.eval()) == cgt.stats(net), cgt.explain(model)
    assert cgt.explain(model).startswith("Sequential"), cgt.explain(model)
    for use in (len, lambda m: repr(m[0]), lambda m: [*map(repr, m)], lambda m: m[0] in m, lambda m: len(m + nn.Sequential(nn.Tanh())), bool):
        assert use(model) == use(twin)
    model += nn.Sequential(nn.Tanh())
    twin += nn.Sequential(nn.Tanh())
    model[1] = nn.Identity()
    del twin[1]
    with torch.no_grad():
        assert all(torch.equal(model(rows(device, k)), twin(rows(device, k))) for k in range(6))
    assert cgt.stats(model).replays > s.replays


def test_weights_mode_and_type_of_a_jitted_module_change_as_ever(device):
    model, twin = (nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.LayerNorm(4)).to(device) for _ in range(2))
    twin.load_state_dict(cgt.jit(model, max_records=32).state_dict())
    inputs = {dtype: torch.empty(5, 3, device=device, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16)}
    other = {name: value * 2 + 1 for name, value in twin.state_dict().items()}
    changes = [
        lambda m: m.eval(), lambda m: m.train(), lambda m: m.requires_grad_(False), lambda m: m.load_state_dict(other), lambda m: m.double(),
        lambda m: m.float().eval(), lambda m: m.to(torch.bfloat16), lambda m: m.to(device, torch.float32), lambda m: setattr(m[1], "p", 0.25) or m.train(),
    ]  # fmt: skip
    for change in (lambda m: None, *changes):
        replays = cgt.stats(model).replays
        result = change(model)
        change(twin)
        assert result is None or result is model or not isinstance(result, nn.Module)
        for k in range(5):
            x = inputs[model[0].weight.dtype].copy_(rows(device, k))
            torch.manual_seed(k)
            got = model(x).detach().clone()
            torch.manual_seed(k)
            assert torch.equal(got, twin(x))
        assert all(map(torch.equal, model.state_dict().values(), twin.state_dict().values()))
        assert cgt.stats(model).replays > replays, cgt.explain(model)


def test_jitted_module_inside_another_one(device):
    """Its parameters are found; outside of a jitted function it replays for itself, inside it is part of that."""

    class Outer(nn.Module):
        def __init__(self, wrap):
            super().__init__()
            torch.manual_seed(0)
            self.enc = wrap(nn.Linear(3, 4))
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.enc(x).relu())

    model, twin = Outer(cgt.jit).to(device), Outer(identity).to(device)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in twin.named_parameters()]
    assert model.state_dict().keys() == twin.state_dict().keys() and [*model.children()] == [model.enc, model.head]
    with torch.no_grad():
        for k in range(6):
            assert torch.equal(model(rows(device, k)), twin(rows(device, k)))
        alone = cgt.stats(model.enc).replays
        cgt.jit(model)
        for k in range(6):
            assert torch.equal(model(rows(device, k)), twin(rows(device, k)))
    assert alone >= 3 and cgt.stats(model.enc).replays <= alone + 1 and cgt.stats(model).replays >= 3, cgt.explain(model)


def test_hooks_of_a_jitted_module(device):
    """They run as in eager: those that are there before and those that come later, its own and those of all modules."""

    def outcomes(wrap):
        model, grads, found = small().to(device), [], []
        handles = [
            model.register_forward_pre_hook(lambda m, given: (given[0] * 2,)),
            model.register_forward_hook(lambda m, given, kwargs, out: out + 1, with_kwargs=True),
        ]
        assert wrap(model) is model
        model.register_state_dict_post_hook(lambda m, state, *_: state.update(extra=1))
        for k in range(24):
            if k == 6:
                handles.append(model[0].register_forward_hook(lambda m, given, out: out * 3))
            elif k == 12:
                handles.append(model.register_full_backward_hook(lambda m, into, out: grads.append(out[0].clone())))
            elif k == 18:
                handles.append(nn.modules.module.register_module_forward_hook(lambda m, given, out: out - 0.5))
            model.zero_grad()
            y = model(rows(device, k))
            y.square().sum().backward()
            found += [y.detach().clone(), *(p.grad.clone() for p in model.parameters())]
        for handle in handles:
            handle.remove()
        assert model.state_dict()["extra"] == 1 and len(grads) == 12
        return [*found, *grads, model(rows(device, 0))], model

    (want, _), (got, model) = outcomes(identity), outcomes(cgt.jit)
    assert all(map(torch.equal, got, want)) and cgt.stats(model).replays >= 6, cgt.explain(model)
    cgt.unjit(model)  # its recordings hold a hook that holds the module: a row of test_footguns.py


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        """By a scale."""
        return self.layer(x) * scale


class Stated(Scaled):
    """Whose state is all that it has."""

    def __getstate__(self):
        return dict(vars(self))


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m)), "torch.save": saved,
    "a list's": lambda m: copy.deepcopy([m])[0], "average": lambda m: swa_utils.AveragedModel(m).module,
}  # fmt: skip


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("cls", [Scaled, Stated])
def test_copy_of_a_jitted_module_is_plain_and_has_weights_of_its_own(device, cls, how):
    model, x = cls().to(device).requires_grad_(False), rows(device, 1)
    cgt.jit(model, max_records=3)
    for _ in range(3):
        want = model(x).clone()
    calls = cgt.stats(model).calls
    other = COPIES[how](model)
    assert type(other) is cls and other._compiled_call_impl is None
    for p in model.parameters():
        p.mul_(2)
    assert torch.equal(other(x), want) and not torch.equal(model(x), want) and cgt.stats(model).calls == calls + 1
    with pytest.raises(cgt.CgtError, match="not made by cgt.jit"):
        cgt.stats(other)
    assert cgt.jit(other) is other and all(torch.equal(other(x), want) for _ in range(4)) and cgt.stats(other).replays == 2
    assert all(torch.equal(model(x), model.forward(x)) for _ in range(3)) and cgt.stats(model).replays >= 4


def test_average_of_a_jitted_module_follows_it(device):
    def outcomes(wrap):
        model = wrap(small().to(device))
        average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
        opt, made = optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
        for k in range(8):
            opt.zero_grad()
            model(rows(device, k)).square().sum().backward()
            opt.step()
            average.update_parameters(model)
            made += [average(rows(device, k)).detach().clone()]
        return made, model

    (want, _), (got, model) = outcomes(identity), outcomes(cgt.jit)
    assert all(map(torch.equal, got, want)) and cgt.stats(model).replays >= 4


def test_forward_is_eager_and_unjit_is_the_way_back(device):
    model, x = small().to(device).requires_grad_(False), rows(device, 1)
    seen = []
    model[1].register_forward_hook(lambda *_: seen.append(1))
    want = cgt.jit(model).forward(x)
    assert len(seen) == 1 and cgt.stats(model).calls == 0
    for _ in range(4):
        assert torch.equal(model(x), want)
    state, call = state_of(model), vars(model)["_compiled_call_impl"]
    assert core.fn_nodes(state.f) and cgt.unjit(model) is model
    assert "_compiled_call_impl" not in vars(model) and not core.fn_nodes(state.f)
    assert torch.equal(model(x), want) and core.fn_counts(state.f)[0] == 4
    for ask in (cgt.unjit, cgt.stats, cgt.explain, cgt.reset):
        with pytest.raises(cgt.CgtError, match="'Sequential' was not made by cgt.jit"):
            ask(model)
    del call
    assert cgt.unjit(jitted_nothing) is jitted_nothing.__wrapped__
    assert cgt.jit(model) is model and all(torch.equal(model(x), want) for _ in range(4)) and cgt.stats(model).replays == 2


def test_options_of_a_module_are_those_of_the_last_jit(device):
    model, x = Scaled().to(device).requires_grad_(False), rows(device, 1)
    cgt.jit(model, dynamic="scale")
    for k in range(6):
        assert torch.equal(model(x, 1.0 + k), model.forward(x, 1.0 + k)) and torch.equal(model(x, scale=k + 0.5), model.forward(x, scale=k + 0.5))
    s = cgt.stats(model)
    assert s.records == 2 and s.replays >= 8, cgt.explain(model)
    call = vars(model)["_compiled_call_impl"]
    assert cgt.jit(model, dynamic="scale") is model and vars(model)["_compiled_call_impl"] is call
    assert call.__name__ == "Scaled" and call.__doc__ == "By a scale." and inspect.signature(call) == inspect.signature(model.forward)
    cgt.jit(model, static_argnames="scale", inputs="copied")
    for _ in range(4):
        assert torch.equal(model(x, scale=3.0), model.forward(x, scale=3.0))
    assert cgt.stats(model).calls == 4 and cgt.stats(model).copied_bytes > 0 and call is not vars(model)["_compiled_call_impl"]
    with pytest.raises(cgt.CgtError, match="expected one of \\('x', 'scale'\\)"):
        cgt.jit(model, dynamic="absent")
    assert cgt.stats(model).calls == 4


def test_dropped_module_is_collected_with_its_recordings(device):
    """It is a ring: the module has what calls its method."""
    books, x = core.books(), rows(device, 1)
    for graph in (True, False):
        model = cgt.jit(small().to(device))
        for _ in range(4):
            with torch.set_grad_enabled(graph):
                model(x).sum()
        gone = weakref.ref(model), weakref.ref(model[0].weight), weakref.ref(vars(model)["_compiled_call_impl"])
        assert cgt.stats(model).replays and core.books() != books
        del model
        gc.collect()
        cgt.step()
        gc.collect()
        assert [ref() for ref in gone] == [None] * 3 and core.books()["fns"] == books["fns"] and core.books()["nodes"] == books["nodes"]


def test_doctor_and_drawing_of_a_module(device, tmp_path):
    """Whether it is jitted or not; and it stays what it was."""

    class Reads(Scaled):
        def forward(self, x):
            return self.layer(x) * float(f"{x.sum().item():.2f}")

    for cls, n in ((Scaled, 0), (Reads, 1)):
        model = cls().to(device).requires_grad_(False)
        for call in (None, cgt.jit(copy.deepcopy(model))._compiled_call_impl):
            if call is not None:
                cgt.jit(model)
                call = vars(model)["_compiled_call_impl"]
            found = cgt.doctor(model, rows(device, 1))
            assert found.name == cls.__name__ and len(found.findings) == n, str(found)
            assert vars(model).get("_compiled_call_impl") is call and (call is None or cgt.stats(model).calls == 0)
    for _ in range(4):
        model(rows(device, 1))
    cgt.show(model, tmp_path / "it.html")
    assert "Reads" in (tmp_path / "it.html").read_text()
    cgt.reset(model)


def functional(m, x):
    return torch.func.functional_call(m, {name: value * 2 for name, value in m.named_parameters()}, (x,))


TOOLS = {
    "torch.export": lambda m, x: torch.export.export(m, (x,)).module()(x),
    "torch.jit.trace": lambda m, x: torch.jit.trace(m, x)(x),
    "symbolic_trace": lambda m, x: torch.fx.symbolic_trace(m)(x),
    "symbolic_trace around": lambda m, x: torch.fx.symbolic_trace(Around(m))(x),
    "torch.compile": lambda m, x: torch.compile(m, backend="eager")(x),
    "torch.compile around": lambda m, x: torch.compile(lambda x: m(x) + 1, backend="eager")(x),
    "functional_call": functional,
    "vmap": lambda m, x: torch.vmap(m)(x),
    "grad": lambda m, x: torch.func.grad(lambda x: m(x).sum())(x),
    "ensemble": lambda m, x: torch.func.stack_module_state([m, copy.deepcopy(m)])[0]["layer.weight"],
    "checkpoint": lambda m, x: checkpoint(m, x, use_reentrant=False),
    "source": lambda m, x: (inspect.getsource(m.forward), inspect.getfullargspec(m.forward), typing.get_type_hints(m.forward)),
    "share_memory": lambda m, x: m.cpu().share_memory() is m,
    "parametrization": lambda m, x: P.weight_norm(m.layer) is m.layer and m(x),
    "pruning": lambda m, x: prune.l1_unstructured(m.layer, "weight", amount=0.5) is m.layer and m(x),
}


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) + 1


@pytest.mark.parametrize("name", TOOLS)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_tools_of_torch_take_a_jitted_module_as_the_plain_one(device, name):
    """As they do one that was compiled in place; and it replays as before afterwards."""
    torch._dynamo.reset()
    x, found = rows(device, 1), []
    for wrap in (identity, cgt.jit):
        torch.manual_seed(0)
        model = wrap(Scaled().to(device))
        with torch.no_grad():
            for _ in range(4):
                model(x)
        got = TOOLS[name](model, x)
        found.append(got.detach() if isinstance(got, torch.Tensor) else got)
        with torch.no_grad():
            given = x.to(model.layer.weight.device)
            found += [[model(given).clone() for _ in range(4)]]
    want, after, got, after_it = found
    assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want
    assert all(map(torch.equal, after_it, after)) and cgt.stats(model).replays >= 4, cgt.explain(model)


def test_module_that_was_compiled_in_place(device):
    """The compiled call is what is recorded, and what is there again afterwards."""
    torch.manual_seed(0)
    model, x, compiled = Scaled().to(device).requires_grad_(False), rows(device, 1), []
    want = model(x)
    torch._dynamo.reset()
    model.compile(backend=lambda graph, _: compiled.append(graph) or graph.forward)
    call = vars(model)["_compiled_call_impl"]
    assert cgt.jit(model) is model and cgt.jit(model, max_records=2) is model
    for _ in range(6):
        assert torch.equal(model(x), want)
    assert len(compiled) == 1 and cgt.stats(model).replays >= 3, cgt.explain(model)
    assert torch.equal(copy.deepcopy(model)(x), want) and len(compiled) == 1
    assert cgt.unjit(model) is model and vars(model)["_compiled_call_impl"] is call


class Direct(Scaled):
    """Whose calls do not come to nn.Module's."""

    def __call__(self, x):
        return self.forward(x)


class Through(Scaled):
    def __call__(self, x):
        return super().__call__(x) + 1


CALLED = {
    "GraphModule": lambda device: torch.fx.symbolic_trace(Scaled().to(device)),
    "torch.compile": lambda device: torch.compile(Scaled().to(device), backend="eager"),
    "through nn.Module's": lambda device: Through().to(device),
}


@pytest.mark.parametrize("name", CALLED)
def test_modules_with_a_call_of_their_own_replay(device, name):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = CALLED[name](device).requires_grad_(False)
    want = [model(rows(device, k)).clone() for k in range(6)]
    assert cgt.jit(model) is model
    for k in range(6):
        assert torch.equal(model(rows(device, k)), want[k])
    assert cgt.stats(model).replays >= 3, cgt.explain(model)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(rows(device, 1)), want[1]) and twin._compiled_call_impl is None
    cgt.unjit(model)
    assert torch.equal(model(rows(device, 1)), want[1])


@tells("called_otherwise")
def test_module_whose_calls_do_not_come_to_nn_modules_is_refused(device):
    model, x = Direct().to(device).requires_grad_(False), rows(device, 1)
    with pytest.raises(cgt.CgtError, match="Direct has a __call__ .* module.forward = cgt.jit"):
        cgt.jit(model)
    assert "_compiled_call_impl" not in vars(model)
    want = model(x)
    model.forward = cgt.jit(model.forward)  # the advice
    assert all(torch.equal(model(x), want) for _ in range(4)) and cgt.stats(model.forward).replays == 2


def test_jitted_method_is_pickled_and_copied_and_jitted_where_it_comes_to(device):
    net, x = Scaled().to(device).requires_grad_(False), torch.ones(2, 3, device=device)
    net.forward = cgt.jit(net.forward, max_records=3)
    for _ in range(3):
        want = net(x)
    for other in (pickle.loads(pickle.dumps(net)), saved(net), copy.deepcopy(net)):
        assert all(torch.equal(other(x), want) for _ in range(4))
        assert cgt.stats(other.forward).replays == 2 and other.forward.__self__ is other
        assert all(p is not q and torch.equal(p, q) for p, q in zip(other.parameters(), net.parameters(), strict=True))
    assert pickle.loads(pickle.dumps(jitted_nothing)) is jitted_nothing  # as functions are: by name
    assert copy.deepcopy(jitted_nothing) is jitted_nothing and copy.copy(net.forward) is net.forward


class Decorated(Scaled):
    """Whose forward is jitted in the class."""

    forward = cgt.jit(Scaled.forward)


def around(method):
    return functools.wraps(method)(lambda self, x: method(self, x) * 3)


# Out here because TorchScript's caches keep classes alive.
AROUND = [type("Around", (Scaled,), {"forward": around(of(Scaled.forward))}) for of in (identity, cgt.jit)]


def replaced(model):
    model.forward = cgt.jit(model.forward)
    return model


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("way", ["replaced", "decorated", "inside"])
def test_jitted_forward_is_scripted_as_the_plain_one(device, way):
    torch.manual_seed(0)
    plain, x = Scaled().to(device).requires_grad_(False), torch.ones(2, 3, device=device)
    model = Decorated().to(device).requires_grad_(False) if way == "decorated" else replaced(copy.deepcopy(plain))
    model.load_state_dict(plain.state_dict())
    model = nn.Sequential(model, nn.Identity()) if way == "inside" else model
    want = plain(x)
    assert all(torch.equal(model(x), want) for _ in range(4))
    scripted = torch.jit.script(model)
    assert torch.equal(scripted(x), want) and all(torch.equal(model(x), want) for _ in range(2))
    held = io.BytesIO()
    torch.jit.save(scripted, held)
    assert torch.equal(torch.jit.load(io.BytesIO(held.getvalue()))(x), want)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_jitted_function_is_scripted_as_the_plain_one(device):
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    f, x = cgt.jit(twice), torch.ones(3, device=device)
    assert all(torch.equal(f(x), x * 2) for _ in range(4)) and torch.equal(torch.jit.script(f)(x), x * 2)
    assert torch.jit.script(f).code == torch.jit.script(twice).code


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_wraps_a_jitted_forward_is_scripted_as_what_wraps_the_plain_one():
    plain, jitted = [torch.jit.script(kind()).code for kind in AROUND]
    assert plain == jitted


def test_tools_that_look_at_a_function_find_what_was_jitted():
    net = Scaled()
    method, function = cgt.jit(net.forward), cgt.jit(nothing)
    assert method.__code__ is Scaled.forward.__code__ and method.__self__ is net and method.__defaults__ == (2.0,)
    assert function.__code__ is nothing.__code__ and function.__globals__ is globals() and not hasattr(function, "__self__")
    assert inspect.getfullargspec(method).args == ["self", "x", "scale"] and inspect.getfullargspec(jitted_nothing).args == ["x"]
    net.forward, x = method, torch.ones(2, 3)
    assert torch.equal(torch.export.export(net, (x,)).module()(x), net(x))
    with pytest.raises(AttributeError, match="no attribute 'parameters'"):
        _ = method.parameters
    for f in (function, method):
        assert bool(f) and not any(hasattr(f, name) for name in ("__len__", "__iter__", "__getitem__"))


class Doubles(nn.Module):
    def forward(self, x):
        return x * 2


def test_jitted_module_is_scripted_behind_unjit(device):
    model, x = cgt.jit(Doubles()), rows(device, 1)
    with pytest.raises((AssertionError, RuntimeError, TypeError)):
        torch.jit.script(model)
    assert torch.equal(torch.jit.script(cgt.unjit(model))(x), x * 2)
