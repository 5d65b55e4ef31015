"""What a code object can read, from its bytecode, and whose code is looked at.

    def forward(self, x):                    names      weight, scale
        y = x @ self.weight * SCALE          globals    SCALE, F, getattr
        return F.relu(y) * getattr(self,     probed     scale (its absence is an answer, too)
            "scale", shift)                  cells      shift

From the bytecode and not from co_names, which mixes globals with attributes (a script's `for step in ...` beside
`opt.step()`). What a code object's inner ones read (lambdas, comprehensions, functions made in it) is its own: they are
made each time. A code object never changes, so all of it is worked out once."""

import functools
import os
import sys
import types
from collections.abc import Container
from typing import NamedTuple

import torch
import typing_extensions

from ..words import options
from . import bytecode as b

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
        return False
    for folder in ("site-packages", "dist-packages"):
        _, found, inside = filename.rpartition(f"{os.sep}{folder}{os.sep}")
        if found:
            return inside.partition(os.sep)[0] not in LIBRARIES
    return not filename.startswith(STANDARD)


def folder_of(module):
    return os.path.dirname(module.__file__) + os.sep


# torch's own, with what it brings to make classes by, and ours.
HOMES = (folder_of(torch), options.HOME, typing_extensions.__file__)
SCHEDULERS = os.path.join(HOMES[0], "optim", "lr_scheduler.py")
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
    stored: dict  # attributes that it stores or deletes


@functools.lru_cache(KEPT)
def code_reads(code: types.CodeType) -> Reads:
    reads, texts = Reads({}, {}, {}, {}, {}, {}), []
    for step in b.steps_of(code):
        field = FIELDS.get((step.does, step.where))
        if field is not None:
            getattr(reads, field)[step.name] = None
        if step.where == b.ATTRIBUTE and step.does in (b.STORE, b.DELETE):
            reads.stored[step.name] = None
        elif step.does == b.CONSTANT:
            texts += texts_in(step.name)
        elif step.does in IMPLIED:
            reads.names.update(IMPLIED[step.does])
    reads.names.update(dict.fromkeys(texts))
    if not STORERS.isdisjoint(reads.globals):
        reads.stored.update(dict.fromkeys(texts))
    if not PROBES.isdisjoint(reads.globals):
        probed = asked_for(code, PROBES)
        reads.probed.update(dict.fromkeys(texts if None in probed else probed))
    if "AttributeError" in reads.globals:
        reads.probed.update(reads.names)
    for one in family(code)[1:]:
        for mine, inner in zip(reads, code_reads(one), strict=True):
            mine.update(inner)
    return reads


FIELDS = {
    (does, where): field
    for field, where in (("globals", b.GLOBAL), ("cells", b.VARIABLE), ("names", b.ATTRIBUTE))
    for does in (b.READ, b.STORE, b.DELETE)
} | {(b.READ, b.SCOPE): "globals", (b.READ, b.SUPER): "names", (b.IMPORT, ""): "imports"}
COMPARISONS = dict.fromkeys(("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__"))
# not ever: dataclasses write comparisons for their users, and they read all fields
IMPLIED = {b.COMPARE: COMPARISONS, b.CONTAIN: COMPARISONS, b.MATCH: {"__match_args__": None}}
PROBES = frozenset(("getattr", "hasattr"))
STORERS = frozenset(("setattr", "delattr"))


def asked_for(code: types.CodeType, functions: Container[str]) -> list[str | None]:
    """The names that the code gives to these functions, as their second argument; None for one that is not in it."""
    reading = b.read(code)
    globals_ = [at for at, step in enumerate(reading.steps) if FIELDS.get((step.does, step.where)) == "globals"]
    return [second_argument(reading, at) for at in globals_ if reading.steps[at].name in functions]


def second_argument(reading, at):
    """The text that is the second argument where what this step reads is called; None: unclear."""
    call = reading.call_of(at)
    made_by = reading.maker(call, 3) if call is not None and len(reading.takes[call]) > 3 else None
    text = reading.steps[made_by].name if made_by is not None and reading.steps[made_by].does == b.CONSTANT else None
    return text if isinstance(text, str) else None


# --- who can tell what stands for a number ------------------------------------------------------


@functools.lru_cache(KEPT)
def tells_apart(code: types.CodeType) -> str | None:
    """The line at which this code can tell what stands for a number from a number, or None. It asks for its exact
    type, or names one of the methods that give NotImplemented; or it catches the TypeError of what wants a number."""
    named = METHODS.intersection(code.co_names)
    if not (named or code.co_exceptiontable or "type" in code.co_names):
        return None
    reading = b.read(code)
    caught, steps = classes_caught(reading), reading.steps
    for at, step in enumerate(steps):
        named_here = step.does in (b.READ, b.CONSTANT) and (step.name == "suppress" or (named and step.name in named))
        if named_here or at in caught or (step.name == "type" and asks_type(reading, at)):
            return f"{code.co_filename}:{reading.lines[at]}"
    return None


def asks_type(reading: b.Reading, at: int) -> bool:
    """Is type() looked up here, for more than the type's name, method or text, or of a constant or `self`?
    (isinstance() asks for no exact type.)"""
    if not is_global(reading.steps[at], ("type",)):
        return False
    call = reading.call_of(at)
    if call is None:
        uses = [(reading.steps[user].does, operand, len(reading.takes[user])) for user, operand in reading.users[at]]
        return not all(does == b.CALL and operand == n - 1 for does, operand, n in uses)
    given = reading.maker(call, 2) if len(reading.takes[call]) == 3 else None
    step = reading.steps[given] if given is not None else None
    is_self = step is not None and step.where in (b.LOCAL, b.VARIABLE) and step.name in ("self", "cls")
    if is_self or (step is not None and step.does == b.CONSTANT):
        return False
    users = reading.users[call]
    return not users or not all(is_text(reading, user) for user, _ in users)


def is_text(reading, user):
    """Does it only have a name, a method or the text of the type that it takes?"""
    step = reading.steps[user]
    if step.does == b.CALL:
        callee = reading.callee(user)
        return callee is not None and is_global(reading.steps[callee], ("str", "repr", "print"))
    return step.does == b.FORMAT or (step.does == b.READ and step.where == b.ATTRIBUTE)


def is_global(step: b.Step, names: tuple[str, ...]) -> bool:
    return step.does == b.READ and step.where in (b.GLOBAL, b.SCOPE) and step.name in names


def classes_caught(reading):
    """The steps that name a class among which TypeError is, where a handler asks for it; those that begin a handler
    of anything."""
    steps, found, todo = reading.steps, set(), []
    for at, step in enumerate(steps):
        if step.does == b.CATCH:
            todo += reading.takes[at]
        if step.does == b.HANDLE and steps[at + 1].does == b.DROP:
            found.add(at)
    for makers in todo:  # which grows
        for at in makers - b.UNKNOWN:
            found.update({at} if is_global(steps[at], WIDE) else ())
            todo += reading.takes[at] if steps[at].does == b.GATHER else ()
    return found


WIDE = ("TypeError", "Exception", "BaseException")
METHODS = {
    f"__{side}{name}__"
    for side in ("", "r")
    for name in "add sub mul truediv floordiv mod pow divmod and or xor lshift rshift lt le eq ne gt ge".split()
}


# --- texts --------------------------------------------------------------------------------------


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
