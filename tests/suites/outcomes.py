"""What became of each test: `pytest -p tests.suites.outcomes`. SUITES_OUTCOMES names a file, which gets lines of JSON.

A test that begins is a line, too, so that a crash is told with its test.
"""

import json
import os
import random
import sys

import numpy
import pytest
import torch

OURS = ("tests", "tests.suites")  # packages that a suite may have, too


class Writer:
    def __init__(self, path):
        self.path, self.verdict, self.note = path, "", ""

    def write(self, *row):
        with open(self.path, "a") as out:
            out.write(json.dumps(row) + "\n")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        self.verdict, self.note = "passed", ""
        self.write("begins", item.nodeid)
        seed()
        result = yield
        self.write("ends", item.nodeid, self.verdict, self.note)
        return result

    def pytest_runtest_logreport(self, report):
        if report.failed and self.verdict != "failed":
            self.verdict, self.note = "failed", last_line(report)
        elif report.skipped and self.verdict == "passed":
            self.verdict = "skipped"

    def pytest_collectreport(self, report):
        if report.failed:
            self.write("ends", report.nodeid, "failed", "not collected: " + last_line(report))


def seed():
    """Each test draws the same numbers in both runs: many that draw fail now and then, with and without cgt."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def last_line(report):
    """The exception of a failed report, in a line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else report.longreprtext
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    return (lines[0] if crash is not None else lines[-1]).strip()[:300]


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests():
    """A suite's own package `tests` is found from now on, and its project, which is not installed."""
    sys.path.insert(0, os.getcwd())
    for name in OURS:
        sys.modules.pop(name, None)


def pytest_configure(config):
    config.pluginmanager.register(Writer(os.path.abspath(os.environ["SUITES_OUTCOMES"])))
