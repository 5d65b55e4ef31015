"""What a code object can read, from its bytecode, and whose code is looked at.

    def forward(self, x):                    names      weight, scale
        y = x @ self.weight * SCALE          globals    SCALE, F, getattr
        return F.relu(y) * getattr(self,     probed     scale (its absence is an answer, too)
            "scale", shift)                  cells      shift

From the bytecode and not from co_names, which mixes globals with attributes (a script's `for step in ...` beside
`opt.step()`). What a code object's inner ones read (lambdas, comprehensions, functions made in it) is its own: they are
made each time. A code object never changes, so all of it is worked out once."""

import dis
import functools
import os
import sys
import types
from collections.abc import Iterator
from typing import NamedTuple

import torch
import typing_extensions

from ..words import options

KEPT = 1 << 14  # code objects of which it is remembered what they read

# triton's launchers fill caches of their own while they run: guarding those would never hold
LIBRARIES = frozenset(("torch", "numpy", "triton", "cgt"))
AMBIENT = sys.stdlib_module_names | LIBRARIES


def is_ambient(module_name: object) -> bool:
    """Is this module, by its name, of a library whose state is its own affair?"""
    return isinstance(module_name, str) and module_name.partition(".")[0] in AMBIENT


def is_read(code: types.CodeType) -> bool:
    """Is this code looked at? The user's is, and of torch's what bears a user's state: modules, schedulers, gradient
    scalers. Not what makes a namedtuple, be it ours: it is compiled from a string and reads nothing."""
    return is_read_in(code.co_filename) and code.co_names != ("_tuple_new",)


@functools.lru_cache(KEPT)
def is_read_in(filename):
    if filename.startswith(BEARERS):
        return not filename.endswith(ABOUT_MODULES)
    if filename.startswith((*HOMES, "<frozen ")):
        return filename == DEMO  # a user's program
    for folder in ("site-packages", "dist-packages"):
        _, found, inside = filename.rpartition(f"{os.sep}{folder}{os.sep}")
        if found:
            return inside.partition(os.sep)[0] not in LIBRARIES
    return not filename.startswith(STANDARD)


def folder_of(module):
    return os.path.dirname(module.__file__) + os.sep


# torch's own, with what it brings to make classes by, and ours.
HOMES = (folder_of(torch), options.HOME, typing_extensions.__file__)
DEMO = options.HOME + "__main__.py"
STANDARD = folder_of(os)  # and of what was installed beside it
BEARERS = tuple(
    HOMES[0] + name.replace("/", os.sep)
    for name in "nn/ amp/ ao/ fx/ distributed/ optim/lr_scheduler.py optim/swa_utils.py".split()
)
ABOUT_MODULES = tuple(os.sep + name for name in ("functional.py", "init.py", "module.py"))


def is_compiled(code: types.CodeType) -> bool:
    """Does Dynamo run other code in place of what this one calls?"""
    return code.co_name == "compile_wrapper" and "_dynamo" in code.co_filename


def family(code: types.CodeType) -> list[types.CodeType]:
    """The code object and its inner ones."""
    inner = [constant for constant in code.co_consts if type(constant) is types.CodeType]
    return [code, *(one for child in inner for one in family(child))]


def that_reads_more(fresh: set[types.CodeType], known: set[types.CodeType]) -> list[types.CodeType]:
    """The code among `fresh` that can read what none of the `known` can: by other names, or in variables of its own."""
    names, probed = (
        {name for one in known for name in getattr(code_reads(one), field)} for field in ("names", "probed")
    )
    return [one for one in fresh - known if reads_beyond(code_reads(one), names, probed, one.co_filename)]


def reads_beyond(reads, names, probed, filename):
    if not (reads.names.keys() <= names and reads.probed.keys() <= probed):
        return True
    return not filename.startswith(BEARERS) and bool(reads.globals or reads.cells or reads.imports)


class Reads(NamedTuple):
    """dicts as ordered sets, of the code object and its inner ones."""

    globals: dict
    names: dict  # attributes, and constant strings that could become one: getattr(self, "lr")
    cells: dict
    imports: dict
    probed: dict  # names that it asks for with getattr or hasattr


@functools.lru_cache(KEPT)
def code_reads(code: types.CodeType) -> Reads:
    reads = Reads({}, {}, {}, {}, {})
    steps, texts = list(steps_of(code)), []
    for operation, argument in steps:
        reads.names.update(OPERATION_NAMES.get(operation, ()))
        field = OPERATION_FIELD.get(operation)
        if field == "cells":
            reads.cells[cell_name(code, argument)] = None
        elif field == "constants":
            texts += texts_in(code.co_consts[argument])
        elif field is not None:
            getattr(reads, field)[name_of(code, operation, argument)] = None
    reads.names.update(dict.fromkeys(texts))
    reads.probed.update(dict.fromkeys(probes(code, steps, texts)))
    if "AttributeError" in reads.globals:
        reads.probed.update(reads.names)
    for one in family(code)[1:]:
        for mine, inner in zip(reads, code_reads(one), strict=True):
            mine.update(inner)
    return reads


@functools.lru_cache(KEPT)
def tells_apart(code: types.CodeType) -> str | None:
    """The line at which this code can tell what stands for a number from a number, or None. It asks for its exact
    type, or names one of the methods that give NotImplemented; or it catches the TypeError of what wants a number."""
    named = METHODS.intersection(code.co_names)
    if not (named or code.co_exceptiontable or "type" in code.co_names):
        return None
    steps, line = [], code.co_firstlineno
    for one in dis.get_instructions(code):
        line = one.starts_line if type(one.starts_line) is int else getattr(one, "line_number", None) or line
        if one.opname not in NO_STEPS:
            steps.append((one.opname, one.argval, line))
    for at, (name, value, line) in enumerate(steps):
        if asks_type(steps, at) or (value in named and name.startswith("LOAD_")) or catches(steps, at):
            return f"{code.co_filename}:{line}"
    return None


def asks_type(steps, at):
    """Is this the look-up of type(), for more than the type's name, method or text, or of `self`? (isinstance() asks
    for no exact type.)"""
    if steps[at][:2] not in (("LOAD_GLOBAL", "type"), ("LOAD_NAME", "type")):
        return False
    call = next((k for k in range(at + 1, len(steps)) if steps[k][0].startswith("CALL")), None)
    if call is None or call + 1 >= len(steps):
        return True
    of_self = call == at + 2 and steps[at + 1][0] in VARIABLES and steps[at + 1][1] in ("self", "cls")
    as_text = at > 0 and steps[at - 1][:2] in TEXTS
    given = call == at + 1  # isinstance(x, type): it is not called
    return not (given or of_self or as_text or steps[call + 1][0].startswith(("LOAD_ATTR", "LOAD_METHOD", "FORMAT")))


def catches(steps, at):
    """Does a handler begin here that takes a TypeError, among others perhaps?"""
    name, value, _ = steps[at]
    if name == "PUSH_EXC_INFO":
        return steps[at + 1][0] == "POP_TOP"
    if name in ("LOAD_GLOBAL", "LOAD_NAME") and value in ("TypeError", "Exception", "BaseException"):
        return next(one[0] for one in steps[at:] if one[0] not in CLASSES) == "CHECK_EXC_MATCH"
    return value == "suppress" and name.startswith("LOAD_")


CLASSES = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "BUILD_TUPLE")  # what puts classes on the stack
METHODS = {
    f"__{side}{name}__"
    for side in ("", "r")
    for name in "add sub mul truediv floordiv mod pow divmod and or xor lshift rshift lt le eq ne gt ge".split()
}
VARIABLES = ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_DEREF")
TEXTS = tuple((load, name) for load in ("LOAD_GLOBAL", "LOAD_NAME") for name in ("str", "repr", "print"))
NO_STEPS = ("CACHE", "PRECALL", "PUSH_NULL", "EXTENDED_ARG", "RESUME", "NOP")


def steps_of(code: types.CodeType) -> Iterator[tuple[int, int]]:
    """(operation, argument) of each instruction."""
    raw, extended = code.co_code, 0
    for operation, low in zip(raw[::2], raw[1::2], strict=True):
        argument = extended | low
        extended = argument << 8 if operation == dis.EXTENDED_ARG else 0
        yield operation, argument


def name_of(code: types.CodeType, operation: int, argument: int) -> str:
    return code.co_names[argument >> OPERATION_SHIFT.get(operation, 0)]


def cell_name(code, argument):
    return code._varname_from_oparg(argument)  # what dis uses


def texts_in(constant: object) -> list[str]:
    if isinstance(constant, str):
        return parts_of(constant)
    if isinstance(constant, (tuple, frozenset)):  # for name in ("weight", "bias"): getattr(...)
        return [text for entry in constant for text in texts_in(entry)]
    return []


def parts_of(text: str) -> list[str]:
    """Names of attributes that the text could stand for: "lr", "config.lr" (of operator.attrgetter)."""
    parts = text.split(".")
    return parts if all(part.isidentifier() for part in parts) else []


def probes(code, steps, texts):
    """The names for which the code asks with getattr or hasattr; all its texts if it does not say them there."""
    found = []
    for at, (operation, argument) in enumerate(steps):
        is_global = OPERATION_FIELD.get(operation) == "globals"
        if is_global and name_of(code, operation, argument) in ("getattr", "hasattr"):
            name = second_argument(code, steps[at:])
            if name is None:
                return texts
            found.append(name)
    return found


def second_argument(code: types.CodeType, steps: list[tuple[int, int]]) -> str | None:
    """The text that is the second argument of the call whose callable the first of these steps loads; None: unclear.
    The depth of the stack tells which argument a step begins, and whether more is made of the text."""
    text, depth = None, 0
    base = dis.stack_effect(*steps[0])
    for operation, argument in steps:
        if operation in JUMPS:
            return None
        begins = depth == base + 1
        if begins:
            constant = code.co_consts[argument] if operation == LOAD_CONST else None
            text = constant if isinstance(constant, str) else None
        if operation != dis.opmap.get("CACHE"):
            depth += dis.stack_effect(operation, argument if operation >= dis.HAVE_ARGUMENT else None)
            if depth == base + 2 and not begins:
                text = None
        if depth <= 1 < base or depth < base:
            return text if depth == 1 else None
    return None


OPERATION_FIELD = {  # each version of CPython lacks some
    dis.opmap[operation]: field
    for field, operations in {
        "globals": "LOAD_GLOBAL LOAD_NAME LOAD_FROM_DICT_OR_GLOBALS STORE_GLOBAL DELETE_GLOBAL",
        "names": "LOAD_ATTR LOAD_METHOD LOAD_SUPER_ATTR IMPORT_FROM STORE_ATTR DELETE_ATTR",
        "cells": "LOAD_DEREF LOAD_CLASSDEREF LOAD_FROM_DICT_OR_DEREF STORE_DEREF DELETE_DEREF",
        "imports": "IMPORT_NAME",
        "constants": "LOAD_CONST RETURN_CONST",  # not KW_NAMES: f(lr=1) reads no .lr
    }.items()
    for operation in operations.split()
    if operation in dis.opmap
}
COMPARISONS = dict.fromkeys(("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__"))
OPERATION_NAMES = {  # not ever: dataclasses write these for their users, and they read all fields
    dis.opmap.get("COMPARE_OP"): COMPARISONS,
    dis.opmap.get("CONTAINS_OP"): COMPARISONS,
    dis.opmap.get("MATCH_CLASS"): {"__match_args__": None},
}
OPERATION_SHIFT = {  # low bits of the argument that are flags (see dis.py)
    dis.opmap["LOAD_GLOBAL"]: 1,
    dis.opmap["LOAD_ATTR"]: 1 if sys.version_info >= (3, 12) else 0,
    dis.opmap.get("LOAD_SUPER_ATTR"): 2,
}
LOAD_CONST = dis.opmap["LOAD_CONST"]
JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
