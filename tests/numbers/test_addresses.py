"""Inputs that move without a copy. Where a slot's address lies among a node's arguments is told from bytes alone: a pure function,
tried on made-up nodes. Then what becomes of it in programs."""

import pytest
import torch
from cgt_core import COPIED, REBOUND
from helpers import counts, not_audited, values
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

# isort: split
import cgt_core as core

import cgt
from cgt.api import state_of
from cgt.data import Run, Seen, Swap
from cgt.numbers import addresses
from cgt.numbers.scalars import KERNEL, Shot, told_by

SPANS = [addresses.Span(0x7F1200000000, 4096, 0x7F4800003200), addresses.Span(0x7F1200001000, 512, 0x7F4800009000)]  # the second begins where the first ends


def word(which, slot, shift):
    span = SPANS[slot]
    return ((span.user if which else span.copy) + shift).to_bytes(8, "little")


def captures(fill, kind=KERNEL, rounds=2):
    """(main, shots) of an op with one node: `fill` gives its only argument from (which, how many captures came before)."""

    def node(which, at):
        return [Shot(7 + at, kind, (1, 2, 3), ((16, fill(which, at)),))]

    order = [which for one in addresses.ROUNDS[:rounds] for which in one]
    return node(0, 0), [(which, node(which, at)) for at, which in enumerate(order, 1)]


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_addresses_are_found_where_they_were_put(data):
    """Among other words, results that lie elsewhere in vain captures, and padding."""
    places = data.draw(st.permutations(range(8)))
    wanted = [(at, data.draw(st.sampled_from((0, 1)))) for at in places[: data.draw(st.integers(1, 4))]]
    words = [(8 * at, slot, data.draw(st.integers(0, SPANS[slot].nbytes))) for at, slot in wanted]
    base, noise = data.draw(st.binary(min_size=64, max_size=64)), data.draw(st.lists(st.binary(min_size=4, max_size=4), min_size=9, max_size=9, unique=True))

    def fill(which, at):
        one = bytearray(base)
        for offset, slot, shift in words:
            one[offset : offset + 8] = word(which, slot, shift)
        one[8 * places[5] : 8 * places[5] + 4] = noise[at]
        one[8 * places[6] : 8 * places[6] + 8] = (0x7F6000000000 + 512 * (at > 0)).to_bytes(8, "little")
        return bytes(one)

    found = addresses.explain(*captures(fill), SPANS)
    assert found is not None and {(w.offset - 16, w.of, w.how) for w in found} == set(words)


@pytest.mark.parametrize(
    "odd",
    [
        lambda which: word(which, 0, 0)[:4] + bytes(4),  # half of it
        lambda which: (int.from_bytes(word(which, 0, 0), "little") >> 4).to_bytes(8, "little"),
        lambda which: word(which, 0, -512),  # before it begins
        lambda which: bytes(4) + word(which, 0, 64) + bytes(4),  # where no address lies
        lambda which: bytes([which]) * 8,
        lambda which: (int.from_bytes(word(which, 0, 0), "little") - int.from_bytes(word(which, 1, 0), "little")).to_bytes(8, "little", signed=True),
    ],
)  # fmt: skip
def test_what_is_no_address_keeps_the_copy(odd):
    fill = lambda which, at: word(which, 0, 8) + odd(which)  # noqa: E731
    assert addresses.explain(*captures(fill), SPANS) is None


def test_what_depends_on_a_result_too_keeps_the_copy():
    """Its distance from the input, which is another one in the op's own capture."""
    fill = lambda which, at: (0x7F6000000000 + 512 * (at > 0) - int.from_bytes(word(which, 0, 0), "little")).to_bytes(8, "little")  # noqa: E731
    assert addresses.explain(*captures(fill), SPANS) is None


def test_another_node_keeps_the_copy():
    main, shots = captures(lambda which, at: word(which, 1, 0))
    assert [w[1:] for w in addresses.explain(main, shots, SPANS)] == [(16, 0, 1)]
    other = [(which, [nodes[0]._replace(shape=(9, 2, 3))] if which else nodes) for which, nodes in shots]
    assert addresses.explain(main, other, SPANS) is None
    assert addresses.explain(main, [(which, nodes * 2) for which, nodes in shots], SPANS) is None
    assert addresses.explain([main[0]._replace(params=())], [(which, [nodes[0]._replace(params=())]) for which, nodes in shots], SPANS) is None


def test_memory_that_is_filled_may_be_a_workspace_and_no_slot():
    assert addresses.explain(*captures(lambda which, at: word(0, 1, 0), addresses.FILL), SPANS) == []
    assert addresses.explain(*captures(lambda which, at: word(which, 1, 0), addresses.FILL), SPANS) is None


def test_padding_that_stays_for_a_round_is_told_in_the_next():
    fill = lambda which, at: word(which, 0, 0) + bytes([which if at < 9 else at]) * 8  # noqa: E731
    assert addresses.explain(*captures(fill), SPANS) is None
    assert len(addresses.explain(*captures(fill, rounds=3), SPANS)) == 1


def test_one_capture_of_each_kind_tells_what_is_an_address_and_no_more():
    plain, padded = (lambda which, at: word(which, 1, 40) + bytes(8)), (lambda which, at: word(which, 1, 40) + bytes([at]) * 8)
    assert [w[1:] for w in addresses.explain(*captures(plain, rounds=1), SPANS)] == [(16, 40, 1)]
    assert addresses.explain(*captures(padded, rounds=1), SPANS) is None
    assert [w[1:] for w in addresses.explain(*captures(padded), SPANS)] == [(16, 40, 1)]


# --- captures in vain, of a capture that is made up -------------------------------------------------------------------


class MadeUp:
    """Stands in for the core's part: each op appends a node that has its operands' addresses among its arguments."""

    def __init__(self, fails=None):
        self.nodes, self.vain, self.ran, self.fails = [], [], 0, fails

    def op(self, x, y):
        self.ran += 1
        if self.ran == self.fails:
            raise RuntimeError("no")
        data = x.data_ptr().to_bytes(8, "little") + y.data_ptr().to_bytes(8, "little")
        self.nodes.append((100 + len(self.nodes), KERNEL, (1,), ((0, data),)))

    def replace(self, monkeypatch):
        monkeypatch.setattr(core, "graph_length", lambda: len(self.nodes))
        monkeypatch.setattr(core, "graph_mark", list)
        monkeypatch.setattr(core, "graph_shots", lambda first: self.nodes[first:])
        monkeypatch.setattr(core, "graph_back", lambda first, mark: self.vain.extend(node[0] for node in self.nodes[first:]))


@pytest.mark.parametrize("fails", [None, 2, 3])
def test_nodes_of_captures_in_vain_are_taken_out_once_and_what_is_theirs_is_told(monkeypatch, fails):
    """One that cannot be captured on the user's memory keeps the copy."""
    made, (x, y) = MadeUp(fails), (torch.zeros(256), torch.zeros(256))
    buffer = torch.zeros(256)
    made.replace(monkeypatch)
    swap = Swap(x.data_ptr(), x.data_ptr() + x.nbytes, buffer, x)
    one = addresses.Movable(swap, 0, 8, [], set(), set())
    seen = Seen(Run(core.CUDA, 0))
    seen.copied.movable[core.storage_id(buffer)] = one
    made.op(buffer[16:], y)
    version = y._version
    addresses.record(seen, made.op, (buffer[16:], y), {}, 0, 1, [core.storage_id(buffer)])
    assert y._version == version and not seen.inside and len(made.vain) == len(set(made.vain)) == len(made.nodes) - 1
    if fails:
        assert not seen.copied.movable and not one.words
    else:
        assert one.words == [(100, 0, 64)] and one.looked_at == {100} and made.ran == 3


@pytest.mark.parametrize("fails", [None, 3])
def test_the_same_of_numbers(monkeypatch, fails):
    made, shown = MadeUp(fails), []
    made.replace(monkeypatch)
    t = torch.zeros(8)
    found = told_by(Seen(Run(core.CUDA, 0)), made.op, lambda which: ((t, t), {}), ((0, 1, 2),) * 3, lambda shots: shown.append(len(shots)) or (shots if len(shots) > 5 else None))
    assert (found is None) == bool(fails) and shown == ([] if fails else [3, 6]) and len(made.vain) == len(set(made.vain)) == (2 if fails else 6)


# --- in programs ------------------------------------------------------------------------------


def binding_of(f, leaf=0):
    state = state_of(f)
    return {slot.binding for node in core.fn_nodes(state.f) for slot in core.node_facts(node).slots if slot.leaf == leaf}


def run(f, plain, make, n=8):
    """Fresh arguments at each call, which stay alive: the same results, and the same in the arguments."""
    kept = []
    for k in range(n):
        mine, theirs = make(k), make(k)
        kept.append(mine)
        got, want = f(*mine), plain(*theirs)
        assert torch.equal(got, want) and all(map(torch.equal, mine, theirs)), cgt.explain(f)
        for t in mine:
            t.zero_()  # the launch is over: nothing is read later
    assert cgt.stats(f).replays == n - 2, cgt.explain(f)


def pair(device):
    return lambda k: (values(device, 6, 8, seed=k), values(device, 6, 8, seed=k + 50))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x + y, lambda x, y: x @ y.t(), lambda x, y: torch.cat([x, y, x[1:3]]), lambda x, y: x[1:, ::2].sum() + y[:, 3].max(),
        lambda x, y: x.clone().mul_(2) - y.contiguous(), lambda x, y: x.mul_(2).add_(y), lambda x, y: torch.softmax(x.t(), 0) @ y,
        lambda x, y: torch._foreach_add([x, y], 1.0)[1] + x, lambda x, y: x[2].copy_(y[3]) + x, lambda x, y: y.view(-1)[3:].cumsum(0) - x[0, 0],
        lambda x, y: torch.layer_norm(x, (8,)) + y, lambda x, y: torch.nn.functional.linear(x, y[:, :8]),
    ],
)  # fmt: skip
def test_results_and_arguments_are_eagers_wherever_these_lie(device, function):
    f = cgt.jit(function)
    run(f, function, pair(device))
    assert binding_of(f) == binding_of(f, 1) == {REBOUND} and cgt.stats(f).copied_bytes == 0, cgt.explain(f)


def test_inputs_that_lie_end_to_end_while_they_are_recorded(device):
    """As their copies may: each address is in one slot alone all the same."""
    f = cgt.jit(lambda *xs: sum(k * x.cumsum(0)[-1] for k, x in enumerate(xs)))
    for k in range(12):
        parts = values(device, 4096, seed=k).split(512 if k < 4 else 1024)[:4]  # 512 floats are a multiple of any alignment
        if k >= 4:
            parts = [part[:512] for part in parts[::-1]]
        assert torch.equal(f(*parts), sum(j * x.cumsum(0)[-1] for j, x in enumerate(parts))), k
    assert counts(f)[1] == 1 and binding_of(f) == {REBOUND}, cgt.explain(f)


def test_a_thousand_addresses_of_one_recording(device):
    room, f = values(device, 1 << 16), cgt.jit(lambda x: x * 2 + 1)
    for k in range(1000):
        x = room[128 * (k * 37 % 500) :][:16]
        assert torch.equal(f(x), x * 2 + 1)
    s = cgt.stats(f)
    assert (s.records, s.replays, s.copied_bytes) == (1, 998, 0) and s.rebinds == 998


def test_large_inputs_may_be_read_by_many_ops_and_small_ones_by_few(device):
    """Where a node must be told each time, a copy of a small one is cheaper. (On the host nothing is told.)"""
    many = lambda x: sum(x * k for k in range(12))  # noqa: E731
    small, large = cgt.jit(many), cgt.jit(many)
    run(small, many, lambda k: (values(device, 8, seed=k),))
    run(large, many, lambda k: (values(device, 1 << 19, seed=k),))
    assert binding_of(small) == {COPIED if device.type == "cuda" else REBOUND} and binding_of(large) == {REBOUND}


def test_column_that_is_written_and_read_by_many_ops_is_told_to_all(device):
    """No copy could stand for it: its gaps are others'."""
    function = lambda x: sum(x.add_(1) * k for k in range(24))  # noqa: E731
    f = cgt.jit(function)
    run(f, function, lambda k: (values(device, 8, 6, seed=k)[:, ::2],))
    assert binding_of(f) == {REBOUND}


@not_audited("a replay overwrites the argument, before eager could be compared from it")
@pytest.mark.parametrize("outputs", ["borrow", "error"])
def test_results_that_are_lent_may_be_arguments(device, outputs):
    """They lie where the recording writes."""
    f, x, want = cgt.jit(lambda x: x.flip(0) + 1, outputs=outputs), values(device, 8), values(device, 8)
    for _ in range(8):
        want = want.flip(0) + 1
        try:
            x = f(x)
        except cgt.CgtError:
            assert outputs == "error"
            return
        assert torch.equal(x, want), cgt.explain(f)
    assert REBOUND not in binding_of(f)


def test_values_that_are_read_keep_the_copy(device):
    def function(x, y):
        return x + 1 if x.sum() > -1e9 else y * 2

    f = cgt.jit(function)
    run(f, function, pair(device))
    assert binding_of(f) == {COPIED}


def test_branches_on_the_device(device):
    function = lambda x, y: torch.cond(x.sum() > y.sum(), lambda a: a * 2, lambda a: a - 1, (x,))  # noqa: E731
    f = cgt.jit(function)
    with torch.no_grad():
        run(f, function, pair(device))
    assert binding_of(f) == {COPIED if device.type == "cuda" else REBOUND}


def test_random_numbers_from_an_input_that_moves(device):
    """The op is not captured again: that would draw, too."""
    f, kept = cgt.jit(lambda x: torch.nn.functional.dropout(x, 0.5) + torch.bernoulli(x.sigmoid())), []
    for k in range(8):
        x = values(device, 64, seed=k)
        kept.append(x)
        torch.manual_seed(k)
        got = f(x)
        torch.manual_seed(k)
        assert torch.equal(got, torch.nn.functional.dropout(x, 0.5) + torch.bernoulli(x.sigmoid()))
    assert counts(f) == (1, 1, 6, 0)


@not_audited("a driver call that fails on purpose")
@pytest.mark.parametrize("after", [0, 1])
def test_after_a_failed_patch_all_is_told_anew(device, after):
    f, kept = cgt.jit(lambda x, y: (x * 2 + y, y.sum())), []
    failed = 0
    for k in range(12):
        x, y = pair(device)(k)
        kept.append((x, y))
        core.fault_set("patch" if k in (4, 7) else "", after, 2)
        try:
            got = f(x, y)
        except cgt.CgtError:
            failed += 1
            core.fault_set("", 0, 0)
            got = f(x, y)
        core.fault_set("", 0, 0)
        assert torch.equal(got[0], x * 2 + y) and torch.equal(got[1], y.sum()), k
    assert failed == 2 and binding_of(f) == {REBOUND} and cgt.stats(f).records == 1


def test_memory_of_an_input_that_moved_is_not_kept(device):
    f = cgt.jit(lambda x: x * 2)
    for k in range(6):
        x = values(device, 8, seed=k)
        f(x)
    before = core.storage_holders(x)
    f(values(device, 8))
    assert core.storage_holders(x) == before
    del x
    cgt.reset(f)


def test_inputs_copied_copies(device):
    f = cgt.jit(lambda x: x * 2, inputs="copied")
    run(f, lambda x: x * 2, lambda k: (values(device, 8, seed=k),))
    assert binding_of(f) == {COPIED} and cgt.stats(f).copied_bytes >= 6 * 32


# --- parameters that are swapped, on a small transformer ---------------------------------------------------------------


class Block(nn.Module):
    """Attention with a cache that is handed in, LoRA on the queries."""

    def __init__(self, width=32, heads=4, rank=4):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.a, self.b = nn.Parameter(torch.randn(rank, width) / 8), nn.Parameter(torch.randn(width, rank) / 8)

    def forward(self, x, cache=None):
        batch, length, width = x.shape
        y = self.first(x)
        q, k, v = self.qkv(y).chunk(3, -1)
        q, k, v = (t.view(batch, -1, self.heads, width // self.heads).transpose(1, 2) for t in (q + y @ self.a.t() @ self.b.t(), k, v))
        if cache is not None:
            cache[0][:, :, :length], cache[1][:, :, :length] = k, v
            k, v = cache
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x, caches=(None, None)):
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, cache)
        return x


def adapters(model, device, seed):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: nn.Parameter(torch.randn(*shape, generator=generator).to(device) / 8, requires_grad=False)  # noqa: E731
    for block in model.blocks:
        block.a, block.b = draw(4, 32), draw(32, 4)


def assign(model, device, seed):
    state = {name: torch.randn(t.shape, generator=torch.Generator().manual_seed(seed)).to(device) / 8 for name, t in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def exchange_data(model, device, seed):
    for k, p in enumerate(model.parameters()):
        p.data = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed + k)).to(device) / 8


def average(model, device, seed):
    for k, p in enumerate(model.parameters()):
        p.lerp_(torch.randn(p.shape, generator=torch.Generator().manual_seed(seed + k)).to(device) / 8, 0.1)


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("swap", [adapters, assign, exchange_data, average, None], ids=lambda swap: swap.__name__ if swap else "caches")
def test_swaps_settle_at_two_recordings(device, swap, every):
    """LoRA adapters, a state dict that is assigned, `.data`, an average that is updated in place, caches that are handed in anew."""
    outcomes, functions, kept = [], [], []
    for wrap in (cgt.jit, lambda model: model):
        torch.manual_seed(0)
        model, seen = Stack().to(device).eval().requires_grad_(False), []
        call = wrap(model)
        functions.append(call)
        for k in range(24):
            if swap and k % every == 0:
                swap(model, device, 100 + k // every % 5)
            caches = (None, None) if swap else [[torch.zeros(2, 4, 8, 8, device=device) for _ in range(2)] for _ in range(2)]
            x = values(device, 2, 5, 32, seed=k)
            kept.append((x, caches))  # so that the next ones lie elsewhere
            seen += [call(x, caches).clone(), *(t.clone() for pair in caches if pair for t in pair)]
        outcomes.append(seen)
    assert all(map(torch.equal, *outcomes)) and len(outcomes[0]) == len(outcomes[1])
    s = cgt.stats(functions[0])
    assert s.records <= 2 and s.replays >= 20 and s.copied_bytes == 0, cgt.explain(functions[0])
