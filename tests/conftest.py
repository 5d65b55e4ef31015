"""One `device` fixture for both drivers, books that balance after every test, and fixtures to ask for."""

import gc
import math
import os
import time

import torch  # before the core, whose libraries are torch's

# isort: split
import cgt_core as core
import pytest

from cgt.decide import freeing, sites
from cgt.words import options

pytest.register_assert_rewrite("helpers")  # as test files are: a failed assertion shows its values

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


torch.set_num_threads(1)  # the tensors are tiny; waiting threads would only disturb
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start
options.OVERHEAD = math.inf  # record at every miss; test_account.py looks at the rest
options.AUDIT = os.environ.get("CGT_AUDIT", "0")  # replays alone; test_audit.py looks at the rest


@pytest.fixture(params=DEVICES)
def device(request):
    """The host driver, and the CUDA driver where there is a GPU: the same sentences for both."""
    return torch.device(request.param)


def pytest_collection_modifyitems(items):
    """`make audit` compares each replay with eager, and so runs functions once more than these tests count, or finds what
    they show."""
    for item in items if options.AUDIT != "0" else ():
        why = "documented differences" if item.path.name == "test_footguns.py" else getattr(item.function, "not_audited", None)
        if why is not None:
            item.add_marker(pytest.mark.skip(reason=f"with CGT_AUDIT: {why}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Tell the fixture below whether the test itself passed."""
    report = yield
    if report.when == "call":
        item.passed = report.passed
    return report


@pytest.fixture(autouse=True)
def balanced_books(request):
    """Functions made by a test are gone after it, with every row and handle they had."""
    torch.manual_seed(0)
    core.alone()
    core.stepped(False)
    freeing.sweep()
    before = core.books()
    yield
    core.fault_set("", 0, 0)
    for _ in range(250):  # autograd's threads let go of a failed task a moment after its exception arrived; longer where all cores are taken
        gc.collect()
        freeing.sweep()
        core.check_table()
        after = core.books()
        if not getattr(request.node, "passed", False) or all(n <= before[k] for k, n in after.items()):
            break
        time.sleep(0.02)
    assert not after["recording"]
    if getattr(request.node, "passed", False):  # a failed test's traceback holds its functions
        more = {k: (before[k], n) for k, n in after.items() if n > before[k]}
        assert not more, ("rows outlive the functions that own them", holders_of_functions())
        gc.freeze()  # what is still here was imported: the next collections need not look at it


def holders_of_functions():
    """Who holds the jitted functions that are still there: for a message."""
    return [(site.__qualname__, [str(type(one)) for one in gc.get_referrers(site)]) for site in sites.SITES.values()]


@pytest.fixture
def short_cool_down(monkeypatch):
    """After a verdict: one call eagerly, then the next try."""
    monkeypatch.setattr(options, "COOL_DOWN", (2, 4))


@pytest.fixture
def nothing_left_behind():
    """A test leaves the thread, the collector and the core as it found them."""
    assert gc.isenabled() and torch.is_grad_enabled()
    yield
    core.fault_set("", 0, 0)
    assert gc.isenabled() and torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    assert not torch.is_inference_mode_enabled()
    assert core.blocker() == 0 and not core.paths_mine() and not core.books()["recording"]
