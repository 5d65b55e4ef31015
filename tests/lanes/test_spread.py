"""Ops of a recording side by side: the same bits, in either form of the graph, whatever the function does besides."""

import copy
import functools
import random

import torch  # before the core, whose libraries are torch's

# isort: split
import cgt_core as core
import pytest
from helpers import AUDITS_BY_DEFAULT, not_audited, values
from torch import nn

import cgt
from cgt.api import state_of
from cgt.lanes import forms, spread

CALLS = 10


def forms_of(f):
    """Of its recordings on the GPU: (edges of the form that is not launched, of NodeFacts.forms)."""
    return [(core.wide_edges(node), core.node_facts(node).forms) for node in state_of(f).keep]


def ensemble(device):
    """Four critics and their optimizer, of which only the loss has to do with all."""
    torch.manual_seed(3)
    nets = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1)) for _ in range(4)).to(device)
    opt = torch.optim.AdamW(nets.parameters(), lr=0.01)

    def step(x):
        opt.zero_grad()
        loss = torch.cat([net(x) for net in nets], 1).square().mean()
        loss.backward()
        opt.step()
        return loss.detach()

    return step, lambda: list(nets.parameters())


def branches(device):
    """An inception block, with what it works in place on."""
    torch.manual_seed(3)
    parts = [nn.Sequential(nn.Conv2d(3, 4, k, padding=k // 2), nn.BatchNorm2d(4), nn.ReLU(inplace=True)) for k in (1, 3, 5)]
    net = nn.ModuleList(parts).to(device).requires_grad_(False)
    return lambda x: torch.cat([part(x) for part in net], 1), lambda: list(net.buffers())


def shared(device):
    """Writes and reads of one tensor in turn, beside others; its views."""
    base, other = torch.zeros(8, 8, device=device), torch.ones(8, 8, device=device)

    def function(x):
        a, b = x * 2, x + 1
        base[0].copy_(a[0])
        c = base.sum() + b
        base[1].add_(b[1]).mul_(0.5)
        other.mul_(0.9).add_(base)
        return torch.stack([a @ b, c, base @ other, other.cumsum(0)])

    return function, lambda: [base, other]


def short_lived(device):
    """Much that dies at once, while others read it."""

    def function(x):
        rows = []
        for k in range(12):
            y = (x + k).sin()
            z = y @ x
            rows.append((z * y).sum(0) + (y.cos() @ z).sum(0))
            del y, z
        return torch.stack(rows)

    return function, list


def under_two_names(device):
    """Memory that two storages share."""
    base = torch.zeros(8, 8, device=device)
    part = torch.from_dlpack(base[2:])

    def function(x):
        a, b, c = x * 2, x + 1, x.sin()
        part.copy_(a[2:])
        d = base.sum(0) + b
        base.add_(c)
        e = part * 2
        part[0].copy_(d[0])
        return torch.cat([d, e, base.cos()])

    return function, lambda: [base]


def drawn(device):
    """Random numbers, in their order."""

    def function(x):
        return torch.stack([nn.functional.dropout(x, 0.5), torch.rand_like(x) + x, x.exp(), torch.randn_like(x)])

    return function, list


def through_a_stream(device):
    """A part on a stream of the function's own."""
    beside = torch.cuda.Stream(device) if device.type == "cuda" else None

    def function(x):
        a, b = x * 2, x.sin()
        if beside is None:
            c = a + b
        else:
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                c = a + b
            torch.cuda.current_stream().wait_stream(beside)
        return torch.stack([a, b, c, (c @ b).cos()])

    return function, list


def second_order(device):
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)

    def function(x):
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        weights = [p for p in net.parameters() if p.dim() > 1]
        return torch.cat([g.reshape(-1) for g in torch.autograd.grad(grad.square().sum(), weights)])

    return function, list


def reads_on_the_way(device):
    return lambda x: torch.stack([x.sin(), x.cos(), x @ x]) if x.sum() > 0 else torch.stack([x.exp(), x * 2, x + 1]), list


PROGRAMS = [ensemble, branches, shared, under_two_names, short_lived, drawn, through_a_stream, second_order, reads_on_the_way]


def inputs(device, make, n=CALLS):
    shape = (2, 3, 8, 8) if make is branches else (8, 8)
    return [values(device, *shape, seed=k) for k in range(n)]


def agrees(device, make, n=CALLS, parallel="auto", **how):
    """The jitted function, after n calls that were eager's."""
    mine, theirs = make(device), make(device)
    f = cgt.jit(mine[0], parallel=parallel, **how)
    for k, x in enumerate(inputs(device, make, n)):
        cgt.step()
        torch.manual_seed(k)
        got = f(x)
        torch.manual_seed(k)
        assert torch.equal(got, theirs[0](x)), k
        assert all(map(torch.equal, mine[1](), theirs[1]())), k
    assert cgt.stats(f).replays >= n - 4, cgt.explain(f)
    return f


@pytest.mark.parametrize("make", PROGRAMS)
def test_a_chain_until_both_forms_were_measured(device, make):
    f = agrees(device, make)
    none = device.type == "cpu" or make is reads_on_the_way
    assert any(n or form for n, form in forms_of(f)) == (not none), cgt.explain(f)


@pytest.mark.parametrize("make", PROGRAMS)
def test_side_by_side_unmeasured(device, make):
    assert set(forms_of(agrees(device, make, 2 * CALLS, parallel="always"))) == {(0, None)}


@pytest.mark.parametrize("make", PROGRAMS)
@pytest.mark.parametrize("better", [0.0, 1e9])
def test_either_form_that_is_chosen(device, make, better, monkeypatch):
    """Whatever is faster: what the program sees is the same, before and after."""
    monkeypatch.setattr(forms, "BETTER", better)
    f = agrees(device, make, 2 * CALLS, audit=AUDITS_BY_DEFAULT)
    chosen = [form for _, form in forms_of(f) if form is not None]
    assert all(n == 0 for n, _ in forms_of(f))
    if device.type == "cuda" and make is not reads_on_the_way:
        assert chosen and all(alone > 0 and beside > 0 and side == bool(better) for alone, beside, side in chosen), cgt.explain(f)
        assert f"ops run {'side by side' if better else 'one behind the other'}" in cgt.explain(f)


@pytest.mark.parametrize("audit", [None, AUDITS_BY_DEFAULT])
def test_a_backward_outside_uses_memory_again_that_it_has_read(device, audit):
    """What autograd has read for the last time, other lanes may still read."""

    def train(wrap):
        torch.manual_seed(3)
        net = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.Softmax(-1)) for _ in range(4)).to(device)
        f, told = wrap(lambda x: torch.stack([part(x) * x for part in net])), []
        for k in range(2 * CALLS):
            cgt.step()
            net.zero_grad()
            y = f(values(device, 16, 8, seed=k))
            (y.square() * y.detach().sin()).sum().backward()
            told += [p.grad.clone() for p in net.parameters()] + [y.detach().clone()]
        return f, told

    f, got = train(functools.partial(cgt.jit, audit=audit, parallel="auto" if audit else "always"))
    assert all(map(torch.equal, got, train(lambda f: f)[1]))
    assert cgt.stats(f).replays >= CALLS and cgt.stats(f).backward.replays >= CALLS, cgt.explain(f)


@not_audited("a call that fails on purpose")
def test_no_memory_for_both_forms_leaves_the_chain(device):
    mine, theirs = ensemble(device), ensemble(device)
    f = cgt.jit(mine[0], audit="every:3", parallel="auto")
    for k, x in enumerate(inputs(device, ensemble)):
        if k == 4 and device.type == "cuda":
            core.fault_set("instantiate", 0, 2)
        torch.manual_seed(k)
        got = f(x)
        core.fault_set("", 0, 0)
        torch.manual_seed(k)
        assert torch.equal(got, theirs[0](x)) and all(map(torch.equal, mine[1](), theirs[1]())), k
    assert cgt.stats(f).replays >= 7 and forms_of(f) == [(0, None)], cgt.explain(f)


def test_addresses_and_numbers_that_change_are_told_to_the_form_that_is_chosen(device, monkeypatch):
    monkeypatch.setattr(forms, "BETTER", 1e9)
    torch.manual_seed(3)
    net = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)).to(device).requires_grad_(False)
    held = []

    def function(x, scale):
        return torch.stack([layer(x) * scale for layer in net]).sum(0)

    f = cgt.jit(function, audit=AUDITS_BY_DEFAULT, dynamic="scale", parallel="auto")
    for k in range(24):
        x = values(device, 4, 8, seed=k)
        held.append(x)  # so that each lies elsewhere
        assert torch.equal(f(x, 0.5 + k), function(x, 0.5 + k)), k
    assert cgt.stats(f).replays >= 18, cgt.explain(f)
    if device.type == "cuda":
        assert any(form is not None and form[2] for _, form in forms_of(f)), cgt.explain(f)


def test_memory_that_many_lanes_read_is_held_once(device, monkeypatch):
    """Else lanes would meet for it, since they may hold so much alone."""
    monkeypatch.setattr(spread, "HELD", 1 << 40)
    monkeypatch.setattr(spread, "LEAST_HELD", 4 * 4096)
    met = []
    monkeypatch.setattr(spread, "let_go", met.append)

    def function(x):
        y = x * 2  # 4096 bytes
        return torch.stack([(y[k] + k).sum() for k in range(16)])

    f = cgt.jit(function, parallel="always")
    for k in range(CALLS):
        x = values(device, 16, 64, seed=k)
        assert torch.equal(f(x), function(x))
    assert cgt.stats(f).replays >= CALLS - 3 and not met, cgt.explain(f)


def test_one_behind_the_other(device):
    assert forms_of(agrees(device, ensemble, parallel="never", audit=AUDITS_BY_DEFAULT)) == [(0, None)]


def test_what_is_no_choice_is_an_error():
    with pytest.raises(cgt.CgtError, match="parallel.*'auto', 'always', 'never'"):
        cgt.jit(lambda x: x, parallel=True)


@pytest.mark.parametrize("seed", range(12))
def test_random_programs(device, seed):
    """Of ops that read, write in place, make views, and let go."""
    draw = random.Random(seed)
    program = [[draw.randrange(1 << 20) for _ in range(4)] for _ in range(40)]
    kinds = (torch.matmul, torch.add, torch.maximum, lambda a, b: (a - b).sin())

    def function(state, x):
        live = [x, *state]
        for what, j, k, row in program:
            a, b = live[j % len(live)], live[k % len(live)]
            if what % 8 == 0:
                state[j % 2].mul_(0.5).add_(b.mean())
            elif what % 8 == 1:
                state[j % 2][row % 8].copy_(b[j % 8])
            elif what % 8 == 2:
                live.append(a.t())
            elif what % 8 == 3 and len(live) > 6:
                live.pop(3 + row % (len(live) - 3))
            else:
                live.append(kinds[what % 4](a, b).tanh())
        return torch.stack(live[3:]).sum(0)

    states = [[torch.zeros(8, 8, device=device), torch.ones(8, 8, device=device)] for _ in range(2)]
    f = cgt.jit(functools.partial(function, states[0]), parallel="always")
    for k in range(CALLS):
        x = values(device, 8, 8, seed=k)
        assert torch.equal(f(x), function(states[1], copy.deepcopy(x))), k
        assert all(map(torch.equal, *states)), k
    assert cgt.stats(f).replays >= CALLS - 3, cgt.explain(f)


def test_picture_shows_both_forms(device, tmp_path):
    """What is launched side by side is drawn as it was recorded, and below that by what waits for what."""
    function, _ = short_lived(device)
    for parallel in ("never", "always"):
        f, x = cgt.jit(function, parallel=parallel), values(device, 8, 8)
        for _ in range(CALLS):
            assert torch.equal(f(x), function(x))
        (node,) = state_of(f).keep
        count, wide = core.node_facts(node).graph_nodes, parallel == "always" and device.type == "cuda"
        cgt.show(f, tmp_path / "graphs.svg")
        text = (tmp_path / "graphs.svg").read_text()
        assert text.count("<circle") == (2 if wide else 1) * count and ("side by side" in text) == wide
