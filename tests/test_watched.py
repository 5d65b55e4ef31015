"""Functions of PyTorch that are watched while a jitted function runs under observation: threads begin and end
in any order, and afterwards everything is as it was."""

import threading

import torch  # before the core, whose libraries are torch's

# isort: split
import pytest

import cgt
from cgt import private


def names_of(patched):
    return [(owner, name, vars(owner).get(name)) for owner, name in patched.targets]


class Owner:
    @staticmethod
    def plain(x):
        return ["plain", x]


def watcher(name, is_mine=lambda: True):
    def handle(plain, owner, what, args, kwargs):
        assert owner is Owner and what == "plain"
        return [name, *plain(*args, **kwargs)]

    return is_mine, handle


def test_the_latest_watcher_of_the_thread_is_asked():
    watched, mine = private.Watched((Owner, "plain")), threading.get_ident()
    before = vars(Owner)["plain"]
    with watched.by(*watcher("outer")), watched.by(*watcher("other", lambda: False)):
        assert Owner.plain(1) == ["outer", "plain", 1]
        with watched.by(*watcher("inner", lambda: threading.get_ident() == mine)):
            assert Owner.plain(x=2) == ["inner", "plain", 2]
            found = []
            thread = threading.Thread(target=lambda: found.append(Owner.plain(3)))
            thread.start()
            thread.join()
            assert found == [["outer", "plain", 3]]
    assert vars(Owner)["plain"] is before and Owner.plain(4) == ["plain", 4]


def test_watchers_end_in_any_order():
    watched = private.Watched((Owner, "plain"))
    before = vars(Owner)["plain"]
    first, second = watched.by(*watcher("first")), watched.by(*watcher("second"))
    first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    assert Owner.plain(1) == ["second", "plain", 1]
    with pytest.raises(KeyError), watched.by(*watcher("third")):
        second.__exit__(None, None, None)
        assert Owner.plain(1) == ["third", "plain", 1]
        raise KeyError
    assert vars(Owner)["plain"] is before


def test_nothing_stays_replaced(device):
    everything = [private.READERS, private.STATES, *private.REGIONS.values()]
    before = list(map(names_of, everything))
    during = []

    def function(x):
        during.append(list(map(names_of, everything)))
        return x * 2

    f, x = cgt.jit(function), torch.ones(3, device=device)
    for _ in range(3):
        f(x)
    assert during and before not in during
    assert list(map(names_of, everything)) == before
    assert all(not patched.watchers for patched in everything)


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


def test_a_reader_bound_by_name_is_not_missed(device):
    """`from torch import tensor_split` was there before anything could be watched."""
    from torch import tensor_split

    where = torch.tensor([1])
    early = cgt.jit(lambda x: tensor_split(x, where)[0] * 2)
    late = cgt.jit(lambda x: torch.tensor_split(x, where)[0] * 2)
    x = torch.arange(4.0, device=device)
    for k in (1, 1, 1, 2, 3):
        where.fill_(k)
        assert torch.equal(early(x), x[:k] * 2) and torch.equal(late(x), x[:k] * 2)
    assert any("looked up before" in reason for reason in cgt.stats(early).reasons)
    assert any("tensor_split" in reason for reason in cgt.stats(late).reasons)


def test_readers_are_those_of_this_torch():
    for name in private.READS:
        assert callable(getattr(torch.Tensor, name))
    assert private.is_reader(torch.tensor_split) and private.is_reader(torch.ones(1).tolist)
    assert not private.is_reader(torch.ones(1).sin) and not private.is_reader(torch.ones(1))
