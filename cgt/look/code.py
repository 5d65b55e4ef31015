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
from collections.abc import Callable, Container
from typing import NamedTuple

import torch
import typing_extensions

from ..words import options
from ..words.private import READS_STATE
from . import bytecode as b

KEPT = 1 << 14  # code objects of which it is remembered what they read

# triton's launchers fill caches of their own while they run: guarding those would never hold
LIBRARIES = frozenset(("torch", "numpy", "triton", "cgt"))
AMBIENT = (sys.stdlib_module_names | LIBRARIES) - {"types"}  # of which what make_dataclass makes says it is


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


KERNELS: set[types.CodeType | None] = set()  # code that ops of other libraries ran: replays on the host do, too


def note_kernels(started: set[types.CodeType | None], body: Callable[[], object]) -> None:
    """body(), which is an op of another library."""
    before = set(started)
    try:
        body()
    finally:
        KERNELS.update(started - before)


def is_compiled(code: types.CodeType) -> bool:
    """Does Dynamo run other code in place of what this one calls?"""
    return code.co_name == "compile_wrapper" and "_dynamo" in code.co_filename


def family(code: types.CodeType) -> list[types.CodeType]:
    """The code object and its inner ones."""
    inner = [constant for constant in code.co_consts if type(constant) is types.CodeType]
    return [code, *(one for child in inner for one in family(child))]


def that_reads_more(fresh: set[types.CodeType], known: set[types.CodeType]) -> list[types.CodeType]:
    """The code among `fresh` that can read what none of the `known` can: by other names, or in variables of its own."""
    read = list(map(code_reads, known))
    names, probed = set().union(*(one.names for one in read)), set().union(*(one.probed for one in read))

    def is_more(code):
        reads, is_torchs = code_reads(code), code.co_filename.startswith(BEARERS)
        own = not is_torchs and (reads.globals or reads.cells or reads.imports)
        return code in READS_STATE or own or not (reads.names.keys() <= names and reads.probed.keys() <= probed)

    return list(filter(is_more, fresh - known))


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
    if code in READS_STATE:  # torch's: that it ran counts (places.walk_optimizer), its names are looked for nowhere
        return reads
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
    reading, found = b.read(code), []
    for at, step in enumerate(reading.steps):
        if FIELDS.get((step.does, step.where)) == "globals" and step.name in functions:
            call = reading.call_of(at)
            made_by = reading.maker(call, 3) if call is not None and len(reading.takes[call]) > 3 else None
            second = reading.steps[made_by] if made_by is not None else step
            found.append(second.name if second.does == b.CONSTANT and isinstance(second.name, str) else None)
    return found


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
    """Is type() looked up here, for more than a type's name, method or text, or of a constant or `self`?"""
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
    """Steps that name what catches TypeError, in code with named handlers; those that begin one of anything."""
    steps = reading.steps
    asks = any(step.does == b.CATCH for step in steps)
    named = {at for at, step in enumerate(steps) if asks and is_global(step, WIDE)}
    return named | {at for at, step in enumerate(steps[:-1]) if step.does == b.HANDLE and steps[at + 1].does == b.DROP}


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
