"""Where numbers lie among a kernel's arguments is told from bytes alone: a pure function, tried on made-up kernels."""

import struct

import cgt_core as core
import pytest
import torch
from cgt_core import AS_BF16, AS_F16, AS_F32, AS_F64, AS_I32, AS_I64, INVERSE_F32, INVERSE_F64, INVERSE_OF_F32
from hypothesis import given, settings
from hypothesis import strategies as st

from cgt.numbers import scalars

SIZES = {AS_F64: 8, AS_I64: 8, AS_F32: 4, AS_I32: 4, AS_F16: 2, AS_BF16: 2, INVERSE_F64: 8, INVERSE_F32: 4, INVERSE_OF_F32: 4}


def captures(told, fill, rounds=2):
    """(main, shots, values) of an op with one kernel: `fill` gives an argument of it from (numbers, which capture)."""
    values = [told, *([scalars.others(x, k)[which] for k, x in enumerate(told)] for which in (0, 1))]

    def node(numbers, at):
        return [scalars.Shot(7 + at, scalars.KERNEL, (1, 2, 3), ((0, fill(numbers, at)), (64, struct.pack("<q", at == 0))))]

    return node(told, 0), [(which, node(values[which], at)) for at, which in enumerate((which for one in scalars.ROUNDS[:rounds] for which in one), 1)], values


def place(words, size, numbers, base):
    """`size` bytes with these words: [(offset, form, number)]."""
    data = bytearray(base)
    for at, form, number in words:
        data[at : at + SIZES[form]] = core.form_of(form, numbers[number])
    assert len(data) == size
    return bytes(data)


FLOAT_FORMS = [AS_F64, AS_F32, AS_F16, AS_BF16, INVERSE_F64, INVERSE_F32, INVERSE_OF_F32]


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_words_are_found_where_they_were_put(data):
    told = data.draw(st.lists(st.one_of(st.floats(0.015625, 60), st.integers(2, 20)), min_size=1, max_size=4, unique_by=float))
    slots = data.draw(st.permutations(range(8)))
    words = []
    for number, slot in zip(range(len(told)), slots, strict=False):
        form = data.draw(st.sampled_from(FLOAT_FORMS if type(told[number]) is float else [AS_I64, AS_I32, AS_F32, AS_F64]))
        inner = data.draw(st.sampled_from(range(0, 8, SIZES[form])))
        words.append((8 * slot + inner, form, number))
    base = data.draw(st.binary(min_size=64, max_size=64))
    padding = data.draw(st.sampled_from([s for s in range(8) if s not in [w[0] // 8 for w in words]] or [None]))
    noise = data.draw(st.lists(st.binary(min_size=8, max_size=8), min_size=13, max_size=13, unique=True))

    def fill(numbers, at):
        one = bytearray(place(words, 64, numbers, base))
        if padding is not None:
            one[8 * padding : 8 * padding + 8] = noise[at]
        return bytes(one)

    found = scalars.explain(*captures(told, fill))
    assert found is not None
    for at, form, number in words:
        mine = [w for w in found if w.offset == at]
        assert mine and all(core.form_of(w.how, x) == core.form_of(form, x) for w in mine for x in (told[number], *scalars.others(told[number], number)))


def test_one_capture_of_each_number_tells_what_comes_of_it_and_no_more():
    plain, padded = (lambda numbers, at: struct.pack("<d", numbers[0]) + bytes(8)), (lambda numbers, at: struct.pack("<d", numbers[0]) + bytes([max(at, 1)]) * 8)
    assert [w[1:] for w in scalars.explain(*captures([0.3], plain, 1))] == [(0, AS_F64, 0)]
    assert scalars.explain(*captures([0.3], padded, 1)) is None
    assert [w[1:] for w in scalars.explain(*captures([0.3], padded))] == [(0, AS_F64, 0)]


@settings(deadline=None)
@given(x=st.one_of(st.floats(-60000, 60000), st.sampled_from([0.0, -0.0, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-11 + 2**-40, 1 + 2**-8, 1 + 3 * 2**-8, 2.0**-24, 2.0**-25])))
def test_forms_are_those_of_torch(x):
    wide = torch.tensor(x, dtype=torch.float64)
    kinds = {AS_F64: torch.float64, AS_F32: torch.float32, AS_F16: torch.float16, AS_BF16: torch.bfloat16}
    for form, kind in kinds.items():
        t = wide.to(torch.float32).to(kind) if kind != torch.float64 else wide
        assert core.form_of(form, x) == bytes(t.reshape(1).view(torch.uint8).tolist()), (form, x)


@pytest.mark.parametrize(
    "odd",
    [
        lambda x: struct.pack("<f", x * x), lambda x: struct.pack("<f", x + 1), lambda x: struct.pack("<B", int(x * 100) % 256) + b"\0\0\0",
        lambda x: struct.pack("<f", x)[::-1], lambda x: b"\0" + struct.pack("<f", x)[:3],
    ],
)  # fmt: skip
def test_what_no_form_makes_keeps_the_number_exact(odd):
    fill = lambda numbers, at: struct.pack("<d", numbers[0]) + odd(numbers[0]) + bytes(4)  # noqa: E731
    assert scalars.explain(*captures([0.3], fill)) is None


def test_another_kernel_keeps_the_number_exact():
    main, shots, values = captures([0.3], lambda numbers, at: struct.pack("<d", numbers[0]))
    assert len(scalars.explain(main, shots, values)) == 1
    odd = [(which, [nodes[0]._replace(shape=(9, 2, 3))] if which == 1 else nodes) for which, nodes in shots]
    assert scalars.explain(main, odd, values) is None
    assert scalars.explain(main, [(which, nodes * 2) for which, nodes in shots], values) is None
    hidden = main[0]._replace(params=())
    assert scalars.explain([hidden], [(which, [hidden]) for which, _ in shots], values) is None


def test_number_that_no_kernel_is_given_keeps_itself_exact():
    assert scalars.explain(*captures([0.3], lambda numbers, at: bytes(16))) is None


def test_addresses_of_results_are_no_padding_and_no_words():
    def fill(numbers, at):
        return struct.pack("<qfi", 0x7F0000000000 + 512 * (at > 0), numbers[0], 3)

    assert [w[1:] for w in scalars.explain(*captures([0.3], fill))] == [(8, AS_F32, 0)]


def test_padding_that_keeps_what_a_number_left_is_told_only_if_it_is_a_word():
    def stale(numbers, at):  # the number itself, in 64 bits, where nobody reads it: set as well, which does no harm
        return struct.pack("<fid", numbers[0], 1, numbers[0])

    assert {w[1:3] for w in scalars.explain(*captures([0.3], stale))} == {(0, AS_F32), (8, AS_F64)}
