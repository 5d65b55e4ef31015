"""cgt in another project's tests: `pytest -p tests.suites.plugin`, with the repository in PYTHONPATH.

The outermost calls of modules, and the outermost steps of optimizers, go through `cgt.jit`. Each replay is compared
with eager (`audit="every:1"`). Where they part, eager's values stand, and the test's id is noted. SUITES_FOUND names a
file: at the end of the session it holds the counters and the mismatches as JSON.

A wrapper lies in the `__dict__` of its module or optimizer: both are collected together.
"""

import functools
import json
import math
import os
import sys
import threading
import types

import pytest
import torch

import cgt
from cgt.decide import audit
from cgt.words import options

OURS = ("tests", "tests.suites")  # packages that a suite may have, too
KEY = "_cgt_suites"
# Made absolute before a suite changes the folder.
FILE = os.path.abspath(os.environ["SUITES_FOUND"]) if "SUITES_FOUND" in os.environ else None
COUNTED = ("calls", "replays", "audited")

inside = False  # an outermost call runs: what it calls is a part of it
lock = threading.Lock()
found = {"sites": 0, "refused": {}, "eager": {}, "mismatches": [], **dict.fromkeys(COUNTED, 0)}
test = ""  # the id of the one that runs


class Holder:
    """What `cgt.jit` made for a module or an optimizer. A copy begins without it, and so does one that is pickled."""

    def __init__(self):
        self.site, self.seen = None, dict.fromkeys(COUNTED, 0)

    def __reduce__(self):
        return Holder, ()

    def __deepcopy__(self, memo):
        return Holder()


def holder_of(owner, function):
    """Made at the first call. `function`: what is jitted."""
    holder = vars(owner).get(KEY)
    if holder is None:
        holder = vars(owner)[KEY] = Holder()
    if holder.site is None:
        try:
            holder.site = cgt.jit(function, audit="every:1")
            found["sites"] += 1
        except (TypeError, cgt.CgtError) as error:
            holder.site = function
            count(found["refused"], first_line(error))
    return holder


def count(counts, text, n=1):
    counts[text] = counts.get(text, 0) + n


def first_line(error):
    return f"{type(error).__name__}: {error}".splitlines()[0]


def outermost(owner, function, args, kwargs):
    """An outermost call, through what `cgt.jit` made. Calls of other threads run as they are meanwhile."""
    global inside
    if not lock.acquire(blocking=False):
        return function(*args, **kwargs)
    try:
        inside = True
        holder = holder_of(owner, function)
        return holder.site(*args, **kwargs)
    finally:
        inside = False
        lock.release()
        add(holder)


def add(holder):
    """What came since the last look at a wrapper's counters."""
    if not hasattr(holder.site, "__wrapped__"):
        return
    now = cgt.stats(holder.site)
    for name in COUNTED:
        found[name] += getattr(now, name) - holder.seen[name]
        holder.seen[name] = getattr(now, name)
    for text, n in now.reasons.items():
        count(found["eager"], text, n - holder.seen.get(text, 0))
        holder.seen[text] = n


def is_left_out(module):
    """Compiled code is not the module's Python, and of a `DistributedDataParallel` another one is jitted."""
    kinds = (torch.jit.ScriptModule, torch.nn.parallel.DistributedDataParallel)
    return torch.compiler.is_compiling() or isinstance(module, kinds) or module._compiled_call_impl is not None


def inject_modules():
    plain = torch.nn.Module.__call__

    @functools.wraps(plain)
    def call(module, *args, **kwargs):
        if inside or is_left_out(module):
            return plain(module, *args, **kwargs)
        return outermost(module, module._call_impl, args, kwargs)

    torch.nn.Module.__call__ = call


def inject_optimizers():
    """Each class of optimizers has its `step` wrapped by PyTorch when the first one is made."""
    hooked = torch.optim.Optimizer.profile_hook_step

    def profile_hook_step(function):
        plain = hooked(function)

        @functools.wraps(plain)
        def step(optimizer, *args, **kwargs):
            if inside:
                return plain(optimizer, *args, **kwargs)
            return outermost(optimizer, types.MethodType(plain, optimizer), args, kwargs)

        return step

    torch.optim.Optimizer.profile_hook_step = staticmethod(profile_hook_step)


def heard(text):
    """In the place of a warning, which a suite may turn into an error, or drop."""
    found["mismatches"].append({"test": test, "text": text})


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests():
    """A suite's own package `tests` is found from now on."""
    for name in OURS:
        sys.modules.pop(name, None)


def pytest_configure(config):
    audit.warn = heard
    options.OVERHEAD = math.inf  # record at every miss: tests call a module a few times
    config.addinivalue_line("filterwarnings", "ignore::cgt.CgtWarning")
    inject_modules()
    inject_optimizers()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    global test
    test = item.nodeid
    return (yield)


def pytest_terminal_summary(terminalreporter):
    for one in found["mismatches"]:
        terminalreporter.write_line(f"MISMATCH {one['test']}: {one['text']}")


def pytest_unconfigure():
    if FILE:
        with open(FILE, "w") as out:
            json.dump(found, out)
