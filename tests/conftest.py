"""One `device` fixture for both drivers, and books that balance after every test."""

import gc

import cgt_core as core
import pytest
import torch

import cgt
from cgt import dispatch

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.fixture(params=DEVICES)
def device(request):
    """The host driver, and the CUDA driver where there is a GPU: the same sentences for both."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def balanced_books():
    """Functions made by a test are gone after it, with every row and handle they had."""
    torch.manual_seed(0)
    dispatch.sweep()
    before = core.books()
    yield
    core.fault_set("", 0, 0)
    gc.collect()
    dispatch.sweep()
    core.check_table()
    after = core.books()
    assert not after["recording"]
    assert after == before, "rows outlive the functions that own them"


@pytest.fixture
def replays():
    """replays(f): how many calls of f were replayed so far."""
    return lambda f: cgt.stats(f).replays
