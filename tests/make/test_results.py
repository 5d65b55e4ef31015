"""What a result may be: views, inputs, constants and containers come back as in eager, nothing of an
earlier result shows on the next one, and what cannot be handed out runs eagerly."""

import types
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from helpers import double, identical, jit_warm, line_of, numbers, refill, values

import cgt

# --- what a result may be ---------------------------------------------------------------------


def test_returned_input_is_the_input(device):
    x = numbers(device)
    f = jit_warm(lambda x: x, x)
    for t in (x, numbers(device, start=3), x):
        assert f(t) is t
    s = cgt.stats(f)
    assert (s.replays, s.records) == (3, 1)


def test_returned_written_input_is_the_input(device):
    x, twin = numbers(device), numbers(device)
    f = cgt.jit(lambda x: x.mul_(2))
    for _ in range(4):
        assert f(x) is x
        twin.mul_(2)
        assert torch.equal(x, twin) and x._version == twin._version
    assert cgt.stats(f).replays == 2


def test_returned_closure_tensor_is_that_tensor(device):
    w, x = numbers(device), numbers(device)
    f = cgt.jit(lambda x: (x + w, w))
    for k in range(5):
        y, same = f(x)
        assert same is w
        w.fill_(k)
        del y
    assert cgt.stats(f).replays == 3


VIEWS = {
    "slice": lambda x: x[1:],
    "row": lambda x: x[1],
    "transposed": lambda x: x.t(),
    "flat": lambda x: x.view(-1),
    "step": lambda x: x[:, ::2],
    "expanded": lambda x: x[None].expand(3, -1, -1),
    "detached": lambda x: x.detach(),
    "other dtype": lambda x: x.view(torch.int32),
    "whole": lambda x: x.view_as(x),
    "empty": lambda x: x[:0],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_view_of_an_input_is_rebuilt_on_todays_input(device, view):
    def function(x):
        return view(x), x * 2

    x = numbers(device, 4, 6)
    f = jit_warm(function, x)
    moved = [numbers(device, 4, 6, start=k) for k in range(4)]
    for t in [x, *moved, x]:
        got, made = f(t)
        want = view(t)
        assert got is not t and got.data_ptr() == want.data_ptr()
        assert (got.shape, got.stride(), got.storage_offset()) == (
            want.shape, want.stride(), want.storage_offset())  # fmt: skip
        assert torch.equal(got, want) and torch.equal(made, t * 2)
        t.add_(1)
        assert torch.equal(got, view(t))
        assert got._version == want._version == t._version
        del made
    s = cgt.stats(f)
    assert s.records == 2 and s.replays == 5 and s.eager == 0  # pinned, then rebound for good
    assert s.rebinds > 0 and s.rescues == 0


def test_view_of_an_input_at_an_offset_is_rebuilt(device):
    base = numbers(device, 1024)
    f = cgt.jit(lambda x: x[2:5])
    for start in (0, 128, 256, 512, 0):  # multiples of 512 bytes: one alignment class
        x = base[start : start + 8]
        y = f(x)
        assert y.data_ptr() == x[2:5].data_ptr() and torch.equal(y, x[2:5])
        assert y.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    s = cgt.stats(f)
    assert (s.records, s.replays, s.eager) == (1, 3, 0)


def test_view_of_an_input_takes_part_in_autograd_as_in_eager(device):
    def gradient(function):
        x, w = numbers(device), torch.full((), 3.0, device=device, requires_grad=True)
        for _ in range(3):
            y = function(x)
        y.mul_(w)  # the base sees it too
        x.sum().backward()
        return w.grad, x.detach()

    f = cgt.jit(lambda x: x[1:])
    got, want = gradient(f), gradient(lambda x: x[1:])
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert cgt.stats(f).replays == 1


def test_view_of_another_output_shares_its_memory(device):
    def function(x):
        y = x * 2
        return y, y[1:], y.view(2, -1).t()

    x = numbers(device)
    f = jit_warm(function, x)
    for k in range(3):
        refill(x, k)
        y, part, turned = f(x)
        part.add_(100)
        want, want_part, want_turned = function(x)
        want_part.add_(100)
        assert torch.equal(y, want) and torch.equal(turned, want_turned)
        assert turned.stride() == want_turned.stride()
        assert y._version == part._version == turned._version == want._version
        del y, part, turned
    assert cgt.stats(f).replays == 3


def test_view_of_a_dropped_intermediate_is_right(device):
    x = numbers(device)
    f = jit_warm(lambda x: (x * 2)[3:], x)
    kept = f(x)
    want = (x * 2)[3:]
    refill(x, 5)
    again = f(x)
    assert torch.equal(kept, want) and torch.equal(again, (x * 2)[3:])
    assert kept.storage_offset() == want.storage_offset()
    assert kept.untyped_storage().nbytes() == want.untyped_storage().nbytes()
    assert cgt.stats(f).rescues == 1


def test_aliasing_between_outputs_survives_a_rescue(device):
    def function(x):
        y = x * 2
        return y, y[1:]

    x = numbers(device)
    f = jit_warm(function, x)
    y, part = f(x)
    want = x * 2
    refill(x, 50)
    f(x)
    assert torch.equal(y, want) and torch.equal(part, want[1:])
    part.zero_()
    assert torch.equal(y[1:], torch.zeros_like(part)) and y[0] == want[0]
    assert cgt.stats(f).rescues == 1
    assert torch.equal(f(x)[1], (x * 2)[1:])


def test_holding_one_of_two_aliased_outputs_keeps_it_right(device):
    def function(x):
        y = x * 2
        return y, y[1:]

    x = numbers(device)
    f = jit_warm(function, x)
    for which in (0, 1):
        kept = f(x)[which]
        want = function(x)[which]
        refill(x, 20 + which)
        for _ in range(2):
            got = f(x)
            assert torch.equal(kept, want)
            assert torch.equal(got[0], x * 2) and torch.equal(got[1], (x * 2)[1:])
            assert got[0].data_ptr() + got[0].element_size() == got[1].data_ptr()
            del got
    assert cgt.stats(f).rescues == 2


DETACHED = {
    "whole": lambda x: x.detach(), "a part": lambda x: x[1:].detach(), "a part of it": lambda x: x.detach()[1:],
    "data": lambda x: x.data, "a part of the data": lambda x: x.data[1:], "a view": lambda x: x[1:],
}  # fmt: skip


@pytest.mark.parametrize("view", DETACHED.values(), ids=DETACHED.keys())
@pytest.mark.parametrize("trained", [False, True])
def test_detached_argument_gets_no_history_later_and_counts_as_in_eager(device, view, trained):
    def found(f, k):
        x = numbers(device, start=k).requires_grad_(trained)
        loss = (x * x).sum() if trained else None
        with torch.no_grad():
            y = f(x)
        x.requires_grad_()
        seen = [y.requires_grad, y._base is x]
        try:
            y.mul_(2)
            seen += [x._version, y._version, x.detach()]
            loss.backward() if trained else None
            return [*seen, x.grad]
        except RuntimeError as error:
            return [*seen, str(error)[:60]]

    f = cgt.jit(view)
    for k in range(6):
        assert identical(found(f, k), found(view, k)), k
    assert cgt.stats(f).replays in ((0,) if trained and view is DETACHED["a view"] else (3, 4))


def test_same_tensor_twice_is_the_same_tensor_twice(device):
    def function(x):
        y = x + 1
        return {"a": y, "b": [y, x, x], "c": y}

    x = numbers(device)
    f = jit_warm(function, x)
    for t in (x, numbers(device, start=4), numbers(device, start=5), numbers(device, start=6)):
        got = f(t)
        assert got["a"] is got["b"][0] is got["c"]
        assert got["b"][1] is t and got["b"][2] is t
        assert torch.equal(got["a"], t + 1)
        del got
    s = cgt.stats(f)
    assert (s.replays, s.records) == (3, 2)


class Pair(NamedTuple):
    left: torch.Tensor
    right: object


@dataclass
class Report:
    loss: torch.Tensor
    step: int
    extra: dict


def test_nested_containers_and_plain_values_come_back(device):
    def function(x, n=3):
        y = x * n
        return [Pair(y, (n, None, "text", 2.5, True)), {"r": Report(y.sum(), n, {"x": [x, ()]})}, n]

    x = numbers(device)
    f = jit_warm(function, x)
    held = []
    for k in range(4):
        refill(x, k)
        got, want = f(x), function(x)
        pair, box, n = got
        assert type(got) is list and type(pair) is Pair and type(box["r"]) is Report
        assert torch.equal(pair.left, want[0].left) and pair.right == want[0].right and n == 3
        assert torch.equal(box["r"].loss, want[1]["r"].loss) and box["r"].step == 3
        assert box["r"].extra["x"][0] is x and box["r"].extra["x"][1] == ()
        got.append("mine")  # the containers are the caller's own
        box["mine"] = box["r"].extra["mine"] = 1
        held.append((pair.left, want[0].left))
    assert all(torch.equal(a, b) for a, b in held)
    assert cgt.stats(f).replays == 4


@pytest.mark.parametrize("value", [None, 7, "text", (), [], {}, (1, [2, {"a": None}])], ids=repr)
def test_result_without_tensors_comes_back(device, value):
    w, x = numbers(device), numbers(device)

    def function(x):
        w.add_(x)
        return value

    f = cgt.jit(function)
    twin = w.clone()
    for _ in range(4):
        assert f(x) == value
        twin.add_(x)
        assert torch.equal(w, twin)
    assert cgt.stats(f).replays == 2


def test_users_write_on_a_result_does_not_reach_the_next_call(device):
    def function(x):
        mask = x > 2
        return x * mask, torch.zeros_like(x)

    x = numbers(device)
    f = jit_warm(function, x)
    for _ in range(4):
        y, zeros = f(x)
        assert torch.equal(y, x * (x > 2)) and torch.equal(zeros, torch.zeros_like(x))
        y.fill_(-1)
        zeros.fill_(-1)
        del y, zeros
    s = cgt.stats(f)
    assert (s.replays, s.rescues) == (4, 0)


CONSTANTS = {
    "zeros": lambda x: torch.zeros(4, device=x.device),
    "full": lambda x: torch.full((4,), 2.5, device=x.device),
    "arange": lambda x: torch.arange(4, device=x.device),
    "ones_like": torch.ones_like,
    "eye": lambda x: torch.eye(3, device=x.device),
    "linspace": lambda x: torch.linspace(0, 1, 5, device=x.device),
}


@pytest.mark.parametrize("make", CONSTANTS.values(), ids=CONSTANTS.keys())
def test_result_that_depends_on_nothing_is_made_anew(device, make):
    x = numbers(device)
    f = jit_warm(make, x)
    for _ in range(3):
        y = f(x)
        assert torch.equal(y, make(x))
        y.zero_().sub_(1)
        del y
    assert cgt.stats(f).replays == 3


# --- what users leave on a result does not show on the next one -------------------------------


class Sub(torch.Tensor):
    pass


def backward_into(y):
    y.requires_grad_()
    (y * 3).sum().backward()


def scaled_by_parameter(y):
    w = torch.ones((), device=y.device, requires_grad=True)
    y.mul_(w)


def with_hook(y):
    y.requires_grad_()
    y.register_hook(lambda g: g * 100)


def with_post_hook(y):
    y.requires_grad_()
    y.register_post_accumulate_grad_hook(lambda t: t.zero_())


LITTER = {
    "nothing": lambda y: None,
    "requires_grad": lambda y: y.requires_grad_(),
    "grad": backward_into,
    "given grad": lambda y: setattr(y, "grad", torch.ones_like(y)),
    "grad_fn": scaled_by_parameter,
    "hook": with_hook,
    "post hook": with_post_hook,
    "retain_grad": lambda y: (scaled_by_parameter(y), y.retain_grad()),
    "attribute": lambda y: setattr(y, "label", "mine"),
    "add_": lambda y: y.add_(5),
    "index": lambda y: y.__setitem__(0, 7.0),
    "view add_": lambda y: y[0].add_(5),
    "data add_": lambda y: y.data.add_(5),
    "resize_ smaller": lambda y: y.resize_(2),
    "resize_ larger": lambda y: y.resize_(4096).zero_(),
    "set_ other": lambda y: y.set_(torch.zeros_like(y)),
    "set_ empty": lambda y: y.set_(),
    "set_ offset": lambda y: y.set_(y.untyped_storage(), 1, (2,), (1,)),
    "t_": lambda y: y.t_(),
    "unsqueeze_": lambda y: y.unsqueeze_(0),
    "transpose_": lambda y: y.transpose_(0, 1),
    "as_strided_": lambda y: y.as_strided_((2,), (1,)),
    "data =": lambda y: setattr(y, "data", torch.zeros(3, device=y.device)),
    "storage resize_": lambda y: y.untyped_storage().resize_(0),
    "storage fill_": lambda y: y.untyped_storage().fill_(0),
    "share_memory_": lambda y: y.share_memory_(),
    "swap_tensors": lambda y: torch.utils.swap_tensors(y, torch.zeros(3, device=y.device)),
    "__class__": lambda y: setattr(y, "__class__", Sub),
}  # fmt: skip


def state_of(t):
    """All that a fresh tensor could differ in, but its values."""
    return {
        "type": type(t), "shape": t.shape, "stride": t.stride(), "offset": t.storage_offset(),
        "dtype": t.dtype, "requires_grad": t.requires_grad, "grad": t.grad, "grad_fn": t.grad_fn,
        "leaf": t.is_leaf, "hooks": t._backward_hooks, "dict": dict(t.__dict__),
        "post": t._post_accumulate_grad_hooks, "version": t._version,
        "bytes": t.untyped_storage().nbytes(), "inference": t.is_inference(),
        "retains": t.retains_grad, "resizable": t.untyped_storage().resizable(),
    }  # fmt: skip


@pytest.mark.parametrize("held", [False, True], ids=["dropped", "held"])
@pytest.mark.parametrize("leave", LITTER.values(), ids=LITTER.keys())
def test_what_is_left_on_a_result_does_not_show_on_the_next(device, leave, held):
    x = numbers(device, 3, 4)
    f = jit_warm(double, x)
    want = state_of(double(x))
    y = f(x)
    leave(y)
    keep = y if held else None
    del y
    for k in range(2):
        refill(x, k)
        y = f(x)
        assert state_of(y) == want
        assert torch.equal(y, double(x))
        del y
    s = cgt.stats(f)
    assert (s.replays, s.eager, s.records) == (3, 0, 1)
    del keep


def test_gradient_through_a_reused_result_runs_no_hook_of_an_earlier_one(device):
    x = numbers(device)
    f = jit_warm(double, x)
    with_hook(f(x))
    y = f(x).requires_grad_()
    (y * 3).sum().backward()
    assert torch.equal(y.grad, torch.full_like(y, 3))
    assert cgt.stats(f).replays == 2


def in_place_once(x):
    y = x * 2
    y.add_(1)
    return y


def in_place_shared(x):
    y = x * 2
    part = y[1:]
    part.add_(1)
    y.mul_(3)
    return y, part, y.detach()


def in_place_input(x):
    x.add_(1)
    return x[1:], x * 2


@pytest.mark.parametrize("function", [double, in_place_once, in_place_shared, in_place_input])
def test_version_of_results_is_as_in_eager(device, function):
    x, twin = numbers(device), numbers(device)
    f = cgt.jit(function)
    for _ in range(5):
        got, want = f(x), function(twin)
        got, want = (got, want) if isinstance(got, tuple) else ((got,), (want,))
        assert [g._version for g in got] == [w._version for w in want]
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
        assert x._version == twin._version
        del got, want
    assert cgt.stats(f).replays == 3


def test_results_under_inference_mode_are_inference_tensors(device):
    x = numbers(device)
    f = cgt.jit(double)
    with torch.inference_mode():
        held = [f(x) for _ in range(5)]
    assert all(y.is_inference() and torch.equal(y, double(x)) for y in held)
    s = cgt.stats(f)
    assert (s.replays, s.rescues) == (3, 3)


# --- what cannot be handed out ----------------------------------------------------------------


def test_result_with_pending_backward_is_differentiable(device):
    w = torch.full((8,), 2.0, device=device, requires_grad=True)
    x = numbers(device)
    f = cgt.jit(lambda x: (x * w).tanh())
    for _ in range(4):
        y = f(x)
        want = (x * w).tanh()
        assert y.requires_grad and torch.equal(y, want)
        (grad,) = torch.autograd.grad(y.sum(), w)
        assert torch.equal(grad, torch.autograd.grad(want.sum(), w)[0])
    s = cgt.stats(f)
    assert (s.warmups, s.records, s.replays, s.eager) == (1, 1, 2, 0)


def test_spent_loss_can_be_returned(device):
    w = torch.full((8,), 2.0, device=device, requires_grad=True)
    x = numbers(device)

    def step(x):
        w.grad = None
        loss = (x * w).square().mean()
        loss.backward()
        return loss

    f = cgt.jit(step)
    losses = []
    for k in range(5):
        refill(x, k)
        losses.append((f(x), (x * w).square().mean().detach()))
        assert torch.equal(w.grad, 2 * x * x * w.detach() / 8)
    assert all(torch.equal(got.detach(), want) for got, want in losses)
    s = cgt.stats(f)
    assert (s.replays, s.eager) == (3, 0)


class Keeper(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        self.weight = torch.nn.Parameter(numbers(device))
        self.last = None
        self.log = []

    def forward(self, x):
        hidden = x * self.weight
        self.last = hidden
        if len(self.log) < 100:
            self.log.append(hidden.sum())
        return hidden + 1


def test_tensor_stored_on_self_is_never_wrong(device):
    jitted, eager = Keeper(device), Keeper(device)
    f = cgt.jit(jitted)
    with torch.no_grad():
        for k in range(8):
            x = numbers(device, start=k)
            assert torch.equal(f(x), eager(x))
            assert torch.equal(jitted.last, eager.last)
            assert len(jitted.log) == k + 1
            assert all(torch.equal(a, b) for a, b in zip(jitted.log, eager.log, strict=True))
    s = cgt.stats(f)
    assert s.replays == 0 and s.eager == 7
    assert any("outlives the call" in reason and __file__ in reason for reason in s.reasons)


class LastOnly(torch.nn.Module):
    def forward(self, x):
        self.last = (x * 2, object())
        return self.last[0] + 1


def test_reason_for_an_escape_names_the_line_that_made_it(device):
    m = LastOnly()
    f = cgt.jit(m)
    for k in range(4):
        x = numbers(device, start=k)
        assert torch.equal(f(x), x * 2 + 1) and torch.equal(m.last[0], x * 2)
    s = cgt.stats(f)
    assert (s.replays, s.eager) == (0, 3)
    (reason,) = s.reasons
    assert line_of(LastOnly, "self.last = (x * 2") in reason


def test_result_that_escapes_is_the_very_tensor(device):
    """Of a recording that comes to nothing: whoever kept a tensor and whoever is given it have one."""

    def run(wrap):
        m, made = types.SimpleNamespace(pair=(numbers(device), object()), kept=None), []

        @wrap
        def f(x):
            h = torch.tanh(m.pair[0].detach() + x)
            m.pair, m.kept = (h, m.pair[1]), [x, object()]
            return h

        for k in range(8):
            x = numbers(device, start=k) * 0.1
            h = f(x)
            made.append((h is m.pair[0], m.kept[0] is x))
            h.requires_grad_()
            m.pair[0].square().sum().backward()
            made.append(h.grad.tolist())
            h.detach().mul_(2)
            made.append((h._version, m.pair[0]._version))
        return made

    assert run(cgt.jit) == run(lambda f: f)


@pytest.mark.parametrize("kept", ["attribute", "tuple", "dict", "both"])
def test_tensor_in_two_places_is_one(device, kept):
    """Be it that the call is recorded, refused or replayed."""
    m, made = types.SimpleNamespace(pair=(numbers(device), 1), o=None, d=None), []

    @cgt.jit
    def f(x):
        h = x * 0.5
        if kept in ("tuple", "both"):
            m.pair = (h, m.pair[1] + 1)
        if kept in ("dict", "both"):
            m.d = {"h": h, "last": m.d}
            m.d["last"] = None
        m.o = None if m.o is not None else h
        return (x + 1, h) if kept == "attribute" else x + 1

    for k in range(10):
        made.append(f(numbers(device, start=k)))
        there = [m.pair[0], m.d and m.d["h"], made[-1][1] if kept == "attribute" else None]
        mine = [one for one, way in zip(there, ("tuple", "dict", "attribute"), strict=True) if kept in (way, "both") and one is not None]
        assert all(one is mine[0] for one in mine) and (m.o is None) == (k % 2 == 1)
        assert m.o is None or m.o is mine[0], k


def test_stored_view_of_a_returned_tensor_is_never_wrong(device):
    class Half(torch.nn.Module):
        def forward(self, x):
            y = x * 2
            self.half = y[:4]
            return y

    m = Half()
    f = cgt.jit(m)
    x = numbers(device)
    for k in range(6):
        refill(x, k)
        y = f(x)
        assert torch.equal(y, x * 2) and torch.equal(m.half, (x * 2)[:4])
        del y


def test_stored_result_is_never_wrong(device):
    class Last(torch.nn.Module):
        def forward(self, x):
            self.last = x * 2
            return self.last

    m = Last()
    f = cgt.jit(m)
    x = numbers(device)
    for k in range(6):
        refill(x, k)
        y = f(x)
        assert torch.equal(y, x * 2) and torch.equal(m.last, x * 2)
        del y


def test_tensor_kept_by_a_list_outside_is_never_wrong(device):
    kept = []

    def function(x):
        h = x * 3
        kept.append(h)
        return h.sum()

    f = cgt.jit(function)
    for k in range(6):
        x = numbers(device, start=k)
        assert torch.equal(f(x), (x * 3).sum())
    assert len(kept) == 6
    assert all(torch.equal(h, numbers(device, start=k) * 3) for k, h in enumerate(kept))


def test_opaque_result_runs_eagerly_and_is_named(device):
    class Box:
        __slots__ = ("value",)

        def __init__(self, value):
            self.value = value

    x = numbers(device)
    f = cgt.jit(lambda x: {"out": Box(x * 2)})
    boxes = [f(x) for _ in range(4)]
    assert len({id(b["out"]) for b in boxes}) == 4
    assert all(torch.equal(b["out"].value, x * 2) for b in boxes)
    s = cgt.stats(f)
    assert (s.replays, s.eager) == (0, 3)
    (reason,) = s.reasons
    assert "Box" in reason and "result['out']" in reason
    assert reason in cgt.explain(f)


@pytest.mark.parametrize("keep", ["itself", "view", "alias", "in a list of lists", "its gradient"])
def test_result_that_the_function_keeps_as_well_is_never_overwritten(device, keep):
    w = torch.ones(8, device=device, requires_grad=True)

    def program(wrap):
        kept = []

        def function(x):
            y = x * 2
            if keep == "its gradient":
                w.grad = None
                (w * x).sum().backward()
                kept.append(w.grad)
            else:
                kept.append(
                    {"view": y[1:], "alias": y.detach(), "in a list of lists": [[y]]}.get(keep, y)
                )
            return y

        f, seen = wrap(function), []
        for k in range(8):
            y = f(numbers(device, start=k))
            new = kept[-1][0][0] if keep == "in a list of lists" else kept[-1]
            first = kept[0][0][0] if keep == "in a list of lists" else kept[0]
            seen += [t.detach().clone() for t in (y, new, first)]
            every = [k[0][0] if keep == "in a list of lists" else k for k in kept]
            seen += [t.detach().clone() for t in every]
        return f, seen

    (_, want), (f, got) = program(lambda f: f), program(cgt.jit)
    assert len(got) == len(want) and all(map(torch.equal, got, want))
    if keep in ("itself", "view", "alias", "in a list of lists"):  # today's is appended (test_puts.py)
        assert cgt.stats(f).replays == 6, cgt.explain(f)
    else:
        assert cgt.stats(f).replays == 0 and any("changed by the function" in r for r in cgt.stats(f).reasons)


INNER = {  # PyTorch keeps a view in the view of it that comes of an op of these
    "z.mH": lambda z: z.mH, "z.H": lambda z: z.H, "adjoint": lambda z: z[1:].adjoint(), "real": lambda z: z.conj().real, "imag": lambda z: z.conj().imag,
    "twice": lambda z: z.conj().conj(), "as real": lambda z: torch.view_as_complex(torch.view_as_real(z.t())).t().real, "two": lambda z: [z.mH, z.mT.imag],
}  # fmt: skip


@pytest.mark.parametrize("name", INNER)
def test_conjugated_and_real_views_of_views_of_an_argument_replay(device, name):
    function = INNER[name]
    f = cgt.jit(function)
    for k in range(8):
        z = values(device, 6, 6, seed=k, dtype=torch.complex64)
        got, want = f(z), function(z)
        assert identical(got, want), k
        z.mul_(2)  # in which it is seen
        assert identical(got, want), k
    assert cgt.stats(f).replays >= 5, cgt.explain(f)


@pytest.mark.parametrize("inner", [False, True])
def test_view_that_somebody_keeps_beside_a_conjugated_one_is_told(device, inner):
    held = []

    def function(z):
        one = z.t()
        held[:] = [one] if inner else [z[1:]]
        return one.conj()

    f = cgt.jit(function)
    for k in range(4):
        z = values(device, 4, 4, seed=k, dtype=torch.complex64)
        assert identical(f(z), z.t().conj()) and held[0]._base is z, k
    assert cgt.stats(f).replays == 0
