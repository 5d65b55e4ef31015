"""Functions of PyTorch that are tapped while a jitted function runs under observation: threads begin and end
in any order, and afterwards everything is as it was."""

import contextlib
import functools
import threading

import torch  # before the core, whose libraries are torch's

# isort: split
import pytest
from helpers import calls

import cgt
from cgt.run import taps


def names_of(patched):
    return [(owner, name, vars(owner).get(name)) for owner, name in patched.targets]


class Owner:
    @staticmethod
    def plain(x):
        return ["plain", x]


def handler(name, is_mine=lambda: True):
    def handle(plain, owner, what, args, kwargs):
        assert owner is Owner and what == "plain"
        return [name, *plain(*args, **kwargs)]

    return is_mine, handle


def test_the_latest_handler_of_the_thread_is_asked():
    tap, mine = taps.Tap((Owner, "plain")), threading.get_ident()
    before = vars(Owner)["plain"]

    def to(*what):
        begin, end = tap.to(*handler(*what))
        begin()
        stack = contextlib.ExitStack()
        stack.callback(end)
        return stack

    with to("outer"), to("other", lambda: False):
        assert Owner.plain(1) == ["outer", "plain", 1]
        with to("inner", lambda: threading.get_ident() == mine):
            assert Owner.plain(x=2) == ["inner", "plain", 2]
            found = []
            thread = threading.Thread(target=lambda: found.append(Owner.plain(3)))
            thread.start()
            thread.join()
            assert found == [["outer", "plain", 3]]
    assert vars(Owner)["plain"] is before and Owner.plain(4) == ["plain", 4]


def test_handlers_end_in_any_order():
    tap = taps.Tap((Owner, "plain"))
    before = vars(Owner)["plain"]
    begin, end = zip(*(tap.to(*handler(name)) for name in ("first", "second", "third")), strict=True)
    begin[0](), begin[1](), end[0]()
    assert Owner.plain(1) == ["second", "plain", 1]
    begin[2](), end[1]()
    assert Owner.plain(1) == ["third", "plain", 1]
    end[2](), end[2]()
    assert vars(Owner)["plain"] is before


def test_a_handler_that_was_interrupted_ends_all_the_same():
    tap = taps.Tap((Owner, "plain"), (Owner, "missing"))  # whose install fails half-way
    before = vars(Owner)["plain"]
    begin, end = tap.to(*handler("only"))
    with pytest.raises(AttributeError):
        begin()
    assert vars(Owner)["plain"] is not before
    end()
    assert vars(Owner)["plain"] is before


def test_nothing_stays_replaced(device):
    calls(cgt.jit(torch.relu), 3, torch.ones(3, device=device))  # a first recording on a GPU replaces something for good
    everything = [taps.READERS, taps.STATES, *taps.LATE.values()]
    before, held = list(map(names_of, everything)), [patched.handlers for patched in everything]  # a group of processes has one
    during = []

    def function(x):
        during.append(list(map(names_of, everything)))
        return x * 2

    f, x = cgt.jit(function), torch.ones(3, device=device)
    for _ in range(3):
        f(x)
    assert during and before not in during
    assert list(map(names_of, everything)) == before
    assert [patched.handlers for patched in everything] == held


def test_a_random_state_can_be_named_in_every_way(device):
    """As PyTorch's own functions take it: by position, by keyword, device included."""
    module = getattr(torch, device.type) if device.type == "cuda" else torch

    def function(x):
        state = module.get_rng_state(**({"device": device} if device.type == "cuda" else {}))
        a = torch.rand_like(x)
        module.set_rng_state(new_state=state)
        return a, torch.rand_like(x)

    f, x = cgt.jit(function), torch.ones(3, device=device)
    for _ in range(5):
        a, b = f(x)
        assert torch.equal(a, b)
    assert cgt.stats(f).replays >= 3, cgt.explain(f)


@pytest.mark.parametrize("how", ["method", "bound method", "argument", "inside an op"])
def test_a_reader_looked_up_before_is_not_missed(device, how):
    """What it read would be baked into the recording."""
    box = torch.ones((), device="cpu")
    tolist, bound = torch.Tensor.tolist, box.tolist

    @torch.library.custom_op("cgt_test::scaled", mutates_args=())
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * box.tolist()

    function = {
        "method": lambda x, read: x * tolist(box),
        "bound method": lambda x, read: x * bound(),
        "argument": lambda x, read: x * read(box),
        "inside an op": lambda x, read: scaled(x),
    }[how]
    f, x = cgt.jit(function), torch.arange(4.0, device=device)
    read = tolist if how == "argument" else None
    for k in (1, 1, 1, 2, 3):
        box.fill_(k)
        assert torch.equal(f(x, read), x * k)
    assert cgt.stats(f).replays == 0 and cgt.stats(f).reasons, cgt.explain(f)


def read_behind(device):
    """{name: (function, how its argument is made from k)}: PyTorch's own code reads values where no dispatch mode is."""
    from torch import tensor_split  # looked up before anything could be tapped

    def start(k):
        return torch.arange(6.0, device=device) + k

    packed = torch.nn.utils.rnn
    lengths = [[4, 2, 2], [4, 3, 1], [4, 4, 1]]

    def pack(k):
        rows = torch.arange(24.0, device=device).view(4, 3, 2) + k
        return packed.pack_padded_sequence(rows, torch.tensor(lengths[k % 3]))

    lstm = torch.nn.LSTM(2, 3).to(device)
    scores = torch.arange(60.0, device=device).view(5, 2, 6).sin().log_softmax(-1)

    def ctc_of(inputs, targets):
        labels = torch.tensor([[1, 2], [3, 4]], device=inputs.device)
        return torch.nn.functional.ctc_loss(scores, labels, inputs, targets)

    return {
        "tensor": (lambda x: torch.tensor([x.sum(), x.max()]), start),
        "as_tensor": (lambda x: torch.as_tensor([x[0], 2.0]), start),
        "asarray": (lambda x: torch.asarray([x[0], 2.0]), start),
        "new_tensor": (lambda x: x.new_tensor([x[0], x[1]]), start),
        "norms": (lambda x: torch.tensor([t.norm() for t in x.split(2)]).sum() + x, start),
        "index": (lambda x: x[[x[0].long() % 3, 1],], start),
        "dlpack": (lambda x: torch.from_dlpack(torch.utils.dlpack.to_dlpack(x)) * 2, start),
        "tensor_split": (lambda x: tensor_split(x, (x[:1].long() % 4).cpu())[0] * 2, start),
        "pad_packed": (lambda p: packed.pad_packed_sequence(p, total_length=4)[0], pack),
        "lstm of packed": (lambda p: lstm(p)[0].data, pack),
        "ctc": (
            lambda n: ctc_of(*n),
            lambda k: (torch.tensor([5, 5 - k % 2]), torch.tensor([2, 1 + k % 2])),
        ),
    }


@pytest.mark.parametrize("name", list(read_behind("cpu")))
def test_what_reads_values_behind_the_dispatcher_is_never_baked(device, name):
    function, make = read_behind(device)[name]
    f = cgt.jit(function)
    with torch.no_grad():
        for k in range(8):
            want = function(make(k))
            assert torch.equal(f(make(k)), want), k
    s = cgt.stats(f)
    # The lengths are read before, as values. (A layer asks them for a number, which a function on the GPU may not.)
    if name == "pad_packed" or (name == "lstm of packed" and device.type == "cpu"):
        assert s.replays and s.records >= 3 and not s.eager, cgt.explain(f)  # more where memory lies otherwise
    else:
        assert s.replays == 0 and s.eager > 4 and s.reasons, cgt.explain(f)


def test_ctc_loss_of_numbers_is_not_taken_for_one_of_tensors(device):
    scores = torch.arange(60.0, device=device).view(5, 2, 6).sin().log_softmax(-1)
    labels = torch.tensor([[1, 2], [3, 4]], device=device)
    f = cgt.jit(lambda x: torch.nn.functional.ctc_loss(x, labels, (5, 4), (2, 1)))
    for k in range(5):
        x = (scores + k).log_softmax(-1)
        want = torch.nn.functional.ctc_loss(x, labels, (5, 4), (2, 1))
        assert torch.allclose(f(x), want)  # CUDA's own kernel adds in no fixed order
    s = cgt.stats(f)
    assert s.replays + s.eager >= 3
    assert s.reasons and not any("reads values" in reason for reason in s.reasons), s.reasons
    if device.type == "cpu":
        assert all("_ctc_loss" in reason for reason in s.reasons), "PyTorch says that its shape depends on data"


def test_readers_are_those_of_this_torch():
    for name in taps.READS:
        assert callable(getattr(torch.Tensor, name))
    assert taps.is_reader(torch.utils.dlpack.to_dlpack) and taps.is_reader(
        torch.ones(1).tolist
    )
    assert not taps.is_reader(torch.ones(1).sin) and not taps.is_reader(torch.ones(1))


def test_reader_that_a_wrapper_only_names(device):
    """As torch's own functorch.dim does of Tensor.tolist, at which tensordict's code looks."""
    plain = torch.Tensor.tolist

    class Other:
        @functools.wraps(plain)
        def tolist(self):
            return []

    f = cgt.jit(lambda x: x.tolist() if isinstance(x, Other) else x * 2)
    for k in range(8):
        x = torch.full((3,), float(k), device=device)
        assert torch.equal(f(x), x * 2)
    assert cgt.stats(f).replays >= 5, cgt.explain(f)
