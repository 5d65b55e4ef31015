"""The programs that run under compute-sanitizer agree with eager without it."""

import memcheck
import pytest


@pytest.mark.parametrize("program", memcheck.PROGRAMS, ids=lambda program: program.__name__)
def test_program_of_the_memory_check(device, program):
    memcheck.run(program, device)
