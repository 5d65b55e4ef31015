"""Random programs of each kind, and of several at once, agree with eager after every call (generator.py)."""

import pytest
from generator import KINDS, try_kinds

# Kinds -> (share of programs of which calls are replays, replays of a program): at least, and on the average. Programs are drawn
# anew each time, and alike ones come together: half of what is usual is rare.
LEAST = {
    "sums": (0.3, 1.5), "kept": (0.25, 1), "logged": (0.3, 2), "read back": (0, 0), "computed": (0.5, 4), "undone": (0.5, 6), "carried": (0.5, 2.5), "followed": (0.4, 6),
    "tuples": (0.35, 6), "mixed": (0.5, 8), "handed out": (0.5, 3), "counted": (0.1, 0.5), "chosen": (0.3, 2), "constants": (0.5, 3), "parts": (0.34, 3),
    "handed in": (0.5, 3), "written by parts": (0, 0), "hidden": (0.5, 4), "renewed": (0.3, 3),
    "states": (0.2, 1),
    "objects": (0.1, 0.5),
}  # fmt: skip
TOGETHER = [
    ("sums", "kept", "computed", "mixed"), ("followed", "tuples", "mixed", "carried"), ("undone", "computed", "followed", "counted"),
    ("parts", "followed", "constants"), ("renewed", "tuples", "followed", "kept"), tuple(KINDS),
]  # fmt: skip


def check(replays, share, mean):
    assert sum(n > 0 for n in replays) > share * len(replays) and sum(replays) > mean * len(replays), replays


@pytest.mark.parametrize("kind", KINDS)
def test_random_programs_of_one_kind_agree_with_eager(device, kind):
    check(try_kinds(device, kind), *LEAST[kind])


@pytest.mark.parametrize("kinds", TOGETHER, ids="+".join)
def test_random_programs_of_several_kinds_agree_with_eager(device, kinds):
    share, mean = (0.25, 1) if device.type == "cpu" or len(kinds) < len(KINDS) else (0.1, 0.4)  # most kinds, few programs
    check(try_kinds(device, *kinds, many=60 if device.type == "cpu" else 25), share, mean)
