"""Objects with numbers that change places: whose turn it is, a player and an opponent, a pair of buffers that count."""

import types

import pytest
import torch

import cgt


def turn_attributes(m):
    m.p, m.q = m.q, m.p
    return m.p, m.q


def turn_list(m):
    m.rows[0], m.rows[1] = m.rows[1], m.rows[0]
    return m.rows


def turn_tuple(m):
    m.pair = m.pair[::-1]
    return m.pair


def turn_dict(m):
    m.named["p"], m.named["q"] = m.named["q"], m.named["p"]
    return m.named.values()


@pytest.mark.parametrize("turn", [turn_attributes, turn_list, turn_tuple, turn_dict])
@pytest.mark.parametrize("audit", ["0", "every:1"])
def test_objects_change_places_while_their_numbers_change(device, turn, audit):
    """Each number is found by the place of its object, and by where that came to."""

    def run(wrap):
        a, b = types.SimpleNamespace(k=1, both=(0, 1)), types.SimpleNamespace(k=1000, both=(5, 6))
        held = {turn_attributes: {"p": a, "q": b}, turn_list: {"rows": [a, b]}, turn_tuple: {"pair": (a, b)}}
        m, made = types.SimpleNamespace(**held.get(turn, {"named": {"p": a, "q": b}})), []

        @wrap
        def f(x):
            p, q = turn(m)
            p.k += 1
            q.k += 10
            p.both = p.both[0] + 2, p.both[1]
            return x * p.k + q.k * 1000 + p.both[0]

        for _ in range(16):
            made.append((f(torch.ones(1, device=device)).tolist(), vars(a).copy(), vars(b).copy()))
        return made, f

    (mine, f), (theirs, _) = run(cgt.jit(audit=audit)), run(lambda f: f)
    assert mine == theirs, cgt.explain(f)
    if turn is not turn_tuple:
        assert cgt.stats(f).replays >= 6, cgt.explain(f)
