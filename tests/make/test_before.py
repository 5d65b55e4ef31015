"""What a capture that comes to nothing puts back (record.py)."""

import types

import cgt_core as core
import torch

from cgt.make import record


def test_attributes_that_code_set_which_ran_for_the_first_time():
    """They are no places: nobody had looked at that code."""

    class Thing:
        pass

    thing, other, weight = Thing(), torch.nn.Linear(2, 2), torch.nn.Parameter(torch.ones(2))
    thing.kept, thing.count = torch.ones(2), 1
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    optimizer.state["rounds"] = 1  # which some keep there, too
    plan = types.SimpleNamespace(found=types.SimpleNamespace(owners={1: thing, 2: None, 3: optimizer, 4: other, 5: types}), places=[])
    was = [dict(vars(one)) for one in (thing, other)]
    before = record.Before([], [], [], [], core.histories([]), torch.default_generator.get_state(), beside=record.attributes_beside(plan))
    thing.count, thing.average, other.calls, weight.grad = 2, torch.zeros(2), 1, torch.ones(2)
    del thing.kept
    optimizer.step()
    assert "momentum_buffer" in optimizer.state[weight]
    record.restore_places(before, None, tensors_only=False)
    assert [dict(vars(one)) for one in (thing, other)] == was and optimizer.state == {"rounds": 1}
    record.accept(before)  # from here on what is there was meant
    thing.average, thing.count = torch.zeros(2), 3
    record.accept(before)
    thing.count = 4
    record.restore_places(before, None, tensors_only=False)
    assert thing.count == 3 and "average" in vars(thing)
    thing.count, thing.kept = 4, torch.zeros(2)
    del thing.average
    record.restore_places(before, None, tensors_only=True)  # values that no capture made stay
    assert thing.count == 4 and not hasattr(thing, "average")
