"""Flags that a function changes: its recording is for the flag that it found, and a replay stores the one that it left."""

import threading

import pytest
import torch
import torch.nn.functional as F
from helpers import not_audited, same, values
from torch import nn

import cgt

READY = False


def agree(begin, device, calls=12):
    """What begin(wrap)'s calls return and leave behind, plain and jitted; the jitted functions."""
    answers, jitted = [], []

    def wrap(function):
        jitted.append(cgt.jit(function))
        return jitted[-1]

    for how in (lambda f: f, wrap):
        torch.manual_seed(0)
        call = begin(how)
        answers.append([])
        for k in range(calls):
            torch.manual_seed(k)
            answers[-1].append(call(values(device, seed=k)))
            cgt.step()
    assert same(*answers)
    return jitted


def test_a_training_and_an_evaluating_function_set_their_modes(device):
    def begin(wrap):
        model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 2)).to(device)
        opt, x, y = torch.optim.Adam(model.parameters()), values(device, 6, 3), torch.tensor([0, 1, 1, 0, 1, 0], device=device)

        def train():
            model.train()
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            return loss.detach()

        @torch.no_grad()
        def test():
            model.eval()
            return model(x)

        train, test = wrap(train), wrap(test)
        return lambda _: [train(), model.training, model[1].training, test(), model.training, model[2].training]

    for f in agree(begin, device, 20):
        assert cgt.stats(f).replays >= 16, cgt.explain(f)


class Alternating:
    even, note = True, None

    def step(self, x):
        self.even = not self.even
        return x * 2 if self.even else x + 1

    def once(self, x):
        if self.note is None:
            self.note = False
            return x * 3
        return x - 1


@pytest.mark.parametrize("name, often", [("step", 1), ("once", 5)])
def test_a_flag_is_turned_over(device, name, often):
    def begin(wrap):
        one = Alternating()
        one.even, one.note = True, None
        f, count = wrap(getattr(one, name)), iter(range(100))

        def call(x):
            if next(count) % often == 0 and name == "once":
                one.note = None
            return [f(x), one.even, one.note]

        return call

    (f,) = agree(begin, device, 20)
    assert cgt.stats(f).replays >= 15 and cgt.stats(f).records <= 4, cgt.explain(f)


def test_a_flag_in_a_cell_and_one_among_the_globals(device):
    def begin(wrap):
        global READY
        ready, READY = False, False

        def function(x):
            global READY
            nonlocal ready
            ready, READY = not ready, ready
            return x * 2 if READY else x + ready

        f = wrap(function)
        return lambda x: [f(x), ready, READY]

    (f,) = agree(begin, device, 20)
    assert cgt.stats(f).replays >= 14, cgt.explain(f)


class Told:
    """Whoever sets an attribute is heard."""

    def __init__(self):
        vars(self).update(on=False, heard=0)

    def __setattr__(self, name, value):
        vars(self)["heard"] = self.heard + 1
        vars(self)[name] = value


def test_a_setter_of_the_users_is_not_passed_by(device):
    def begin(wrap):
        told = Told()

        def function(x):
            told.on = not told.on
            return x * 2 if told.on else x

        f = wrap(function)
        return lambda x: [f(x), told.on, told.heard]

    (f,) = agree(begin, device)
    assert cgt.stats(f).replays == 0 and any("CGT305" in reason for reason in cgt.stats(f).reasons)


@not_audited("an audit sets the flag, too")
def test_a_class_that_begins_to_listen_is_heard(device):
    class Quiet(Alternating):
        pass

    heard, one, x = [], Quiet(), values(device)
    one.even = True
    f = cgt.jit(one.step)
    for _ in range(6):
        f(x)
    assert cgt.stats(f).replays == 3
    Quiet.__setattr__ = lambda self, name, value: (heard.append(name), object.__setattr__(self, name, value))[1]
    f(x)
    assert heard == ["even"] and cgt.stats(f).replays == 3


def test_a_flag_is_as_it_was_where_a_recording_comes_to_nothing(device):
    one = Alternating()
    one.even, wants = True, True

    def function(x):
        one.even = not one.even
        return x.nonzero() if x.is_cuda else x[x > 0].tolist()  # no recording is made of it

    f = cgt.jit(function)
    for k in range(8):
        wants = not wants
        f(values(device, seed=k))
        assert one.even == wants
    assert cgt.stats(f).replays == 0


def test_a_flag_that_another_thread_may_set_is_no_effect(device):
    one, done, up = Alternating(), threading.Event(), threading.Event()
    one.even = True

    def spin():
        up.set()
        while not done.is_set():
            sum(range(100))

    thread = threading.Thread(target=spin)
    thread.start()
    up.wait()
    try:
        f = cgt.jit(one.step)
        for k in range(6):
            f(values(device, seed=k))
        assert one.even and cgt.stats(f).replays == 0
    finally:
        done.set()
        thread.join()
