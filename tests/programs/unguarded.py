"""State that no guard compares, with a function that reads it and one that changes it: for test_footguns.py."""

import array
import collections
import configparser
import ctypes
import dataclasses
import functools
import io
import multiprocessing
import operator
import os
import sys

import torch


def parser(values):
    made = configparser.ConfigParser()
    made["scale"] = {str(k): str(k) for k in values}
    return made


IN_PLACE = {
    "set": (set, sum, lambda numbers: numbers.remove(2)),
    "deque": (collections.deque, sum, lambda numbers: numbers.remove(2)),
    "array": (functools.partial(array.array, "i"), sum, lambda numbers: numbers.remove(2)),
    "ctypes": (lambda n: (ctypes.c_int * 2)(*n), sum, lambda numbers: numbers.__setitem__(1, 0)),
    "Value": (lambda n: multiprocessing.Value("i", sum(n)), lambda v: v.value, lambda v: setattr(v, "value", 1)),
    "configparser": (
        parser, lambda c: sum(map(int, c["scale"].values())), lambda c: c.remove_option("scale", "2")
    ),
}  # fmt: skip


@dataclasses.dataclass
class Rates:
    lr: float = 1.0


RATES, STREAM, TIMES = Rates(), io.StringIO(), functools.partial(lambda x, by: x * by, by=1.0)
RATE_OF = operator.attrgetter("lr")
FACTOR = type("Meta", (type,), {"by": 1.0})("Factor", (), {})
MADE = type("Made", (), {"__getattr__": lambda self, name: 1.0})()
PLAIN = torch.nn.ParameterDict({"by": 1.0})


def set_stream(k):
    STREAM.seek(0)
    STREAM.truncate()
    STREAM.write(str(float(k)))


AMBIENT = {
    "directory": (lambda x: x * len(os.getcwd()), lambda k: os.chdir(["/", "/dev"][k > 1])),
    "environment": (lambda x: x * float(os.environ["CGT_OF_A_TEST"]), lambda k: os.environ.update(CGT_OF_A_TEST=str(k))),
    "sys.argv": (lambda x: x * float(sys.argv[-1]), lambda k: sys.argv.__setitem__(-1, str(k))),
    "attribute of torch": (lambda x: x * torch.cgt_of_a_test, lambda k: setattr(torch, "cgt_of_a_test", k)),
    "stream": (lambda x: x * float(STREAM.getvalue()), set_stream),
    "partial": (lambda x: TIMES(x), lambda k: TIMES.__setstate__((TIMES.func, (), {"by": float(k)}, None))),
    "astuple": (lambda x: x * dataclasses.astuple(RATES)[0], lambda k: setattr(RATES, "lr", float(k))),
    "attrgetter": (lambda x: x * RATE_OF(RATES), lambda k: setattr(RATES, "lr", float(k))),
    "metaclass": (lambda x: x * FACTOR.by, lambda k: setattr(type(FACTOR), "by", float(k))),
    "__getattr__": (lambda x: x * MADE.by, lambda k: setattr(MADE, "by", 5.0) if k > 1 else vars(MADE).clear()),
    "ParameterDict": (lambda x: x * sum(PLAIN.values()), lambda k: PLAIN.update({"by": float(k)})),
}
