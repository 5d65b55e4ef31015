"""The table of suites: projects whose source distribution has its tests, and is pure Python."""

from typing import NamedTuple


class Suite(NamedTuple):
    """A row."""

    project: str
    version: str
    tests: tuple  # files and folders of its own, from where it is unpacked
    needs: tuple = ()  # what it imports beside PyTorch, NumPy and pytest
    select: str = ""  # as pytest's -k
    limit: int = 300  # seconds without cgt; ten times as many with it
    environment: tuple = ()  # (name, value) of what its tests ask for


SUITES = [
    Suite("zuko", "1.6.0", ("tests/test_nn.py", "tests/test_mixtures.py", "tests/test_flows.py"), select="not CNF"),
    Suite("nflows", "0.14", ("tests",), ("matplotlib", "torchtestcase", "umnn")),
    Suite("einops", "0.8.2", ("einops/tests/test_layers.py", "einops/tests/test_ops.py"), ("parameterized",),
          environment=(("EINOPS_TEST_BACKENDS", "numpy,torch"),)),  # fmt: skip
    Suite("pytorch_optimizer", "4.1.0", ("tests/test_loss_functions.py", "tests/test_wrapper_optimizers.py")),
    Suite("e3nn", "0.6.0", ("tests/nn", "tests/math"), ("scipy", "opt_einsum_fx")),
    Suite("gpytorch", "1.15.2", ("test/means", "test/likelihoods"), ("scipy", "scikit-learn", "linear_operator")),
]
