"""What becomes of a value in a code object, from its bytecode: nothing runs here.

    self.calls += 1        an *advance*: what the attribute holds goes through + 1 back to where it was, and nowhere
                           else, so nobody can tell what it is
    y = self.calls         it goes anywhere: one of the `others`, as is each store that is no advance

    self.last = y          it is stored, and while nobody reads it, it may hold anything; so may a list to which all
    self.losses.append(y)  only append

    self.total += y        a *sum*: what it holds goes into arithmetic of which the result goes back

Advances are sought where instructions follow each other, on a stack of what is known of each value. A jump, and each
instruction that has no rule here, forgets the stack: so an opcode of another release of Python's hides an advance, and
never makes one. All of it is worked out once for each code object.
"""

import dis
import functools
import re
import sys
import types
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

from .code import HOMES, JUMPS, KEPT, OPERATION_FIELD, name_of, second_argument, steps_of, texts_in

T = TypeVar("T")
ATTRIBUTE, GLOBAL, VARIABLE, ENTRY = "attribute", "global", "variable", "entry"  # where a name is looked up


class Advance(NamedTuple):
    """`name = name op by`. The name of an entry is (where and name of its container, key)."""

    where: str
    name: Any
    op: str
    by: int | float
    line: str


class Moves(NamedTuple):
    """What a code object, without its inner ones, does to what it names."""

    advances: tuple  # of Advance
    others: dict  # (where, name) -> the first line that reads or stores it another way
    stores: set  # all (where, name) that it stores or deletes
    appends: set  # those of which it calls append()
    reads: set  # those that it reads or deletes, but for advances and these
    beside: set  # the same but for what goes into sums of theirs
    operands: dict  # offset of an operation -> the Names of what its left operand is made of by arithmetic
    sums: dict  # offset of a store -> the Names of where what was read goes back to, if that is a sum
    opens: (
        str | None
    )  # a line of the user's that may come to what it does not name: vars(self), getattr(self, key); or None


class Names(NamedTuple):
    """What leads to a value: a variable, and attributes of attributes."""

    where: str  # where the last one is looked up
    names: tuple


class Value(NamedTuple):
    """What is known of a value on the stack."""

    kind: str  # local, constant, read, advanced or computed
    name: Any  # of a local: the name and how often it was stored; of a constant: the value; else (where, name)
    at: int = -1  # the instruction that made it; of an advanced one: that read it
    base: Any = None  # the Value whose attribute or entry it is
    op: str = ""
    by: Any = None
    reads: tuple = ()  # of a computed one: the Values that were read for it
    whole: bool = False  # and it is made of these and constants alone


class Walk(NamedTuple):
    """What walk_along fills."""

    stack: list  # of Value or None: nothing is known
    stored: dict  # local -> how often it was stored
    lines: dict  # (instruction, (where, name)) -> line
    advances: list  # (instruction that reads, instruction that stores, Advance)
    operands: dict  # instruction of an operation -> the Values that were read for its left operand, if it is whole
    sums: list  # (instruction that stores, the Values that were read there)
    copies: dict  # instruction that read -> how often what it gave was copied
    opened: dict  # the same -> of how many of these an entry was asked for, by a constant
    keys: set  # instructions that load such a constant
    stores: set  # (where, name)


@functools.lru_cache(KEPT)
def moves_of(code: types.CodeType) -> Moves:
    """The Moves of a code object."""
    instructions = list(dis.get_instructions(code))
    walk, opens = walk_along(code, instructions)
    advances = [row for row in walk.advances if row[0] not in walk.copies]
    advanced = {at for row in advances for at in row[:2]} | walk.keys
    sums = [(at, read) for at, read in walk.sums if not any(one.at in walk.copies for one in read)]
    summed = {one.at for _, read in sums for one in read}
    back = {instructions[at].offset: names_to(read[0]) for at, read in sums}
    mentioned = [(at, key) for at, key in walk.lines if at not in advanced]
    asked = [(at, key) for at, key in mentioned if not instructions[at].opname.startswith("STORE")]
    appended = {at for at, _ in asked if is_append(instructions, at + 1)}
    reads = [(at, key) for at, key in asked if at not in appended]
    called = {(ATTRIBUTE, one.argval) for one in instructions if is_called(one)}
    return Moves(
        advances=tuple(advance for _, _, advance in advances),
        others=other_uses(walk, advanced),
        stores=walk.stores,
        appends={key for at, key in asked if at in appended},
        reads={key for _, key in reads} | called,
        beside={key for at, key in reads if at not in summed} | called,
        operands=operands_in(walk, instructions),
        sums={at: names for at, names in back.items() if names},
        opens=None if code.co_filename.startswith(HOMES) else opens or computes_names(code),
    )


def walk_along(code, instructions):
    """(the Walk along a code object's instructions, the first line that may come to what it does not name; or None)."""
    walk, opens, line = Walk([], {}, {}, [], {}, [], {}, {}, set(), set()), None, ""
    for at, one in enumerate(instructions):
        line = line_of(one) or line
        told = f"{code.co_filename}:{line}"
        if one.is_jump_target:
            walk.stack.clear()
        for key in mentions(one):
            walk.lines[at, key] = told
            if not one.opname.startswith(("LOAD", "IMPORT")):
                walk.stores.add(key)
            opens = opens or (told if key[1] in OPENERS else None)
        if one.opname == "MATCH_CLASS":  # positions are names that the class tells
            opens = opens or told
        rule = RULES.get(one.opname, forget)
        rule(walk, at, one, told)
    return walk, opens


def other_uses(walk, advanced):
    """{(where, name): the first line that reads or stores it}, but for advances, and for reads of a container of which
    only entries by constant keys are taken: these entries have names of their own."""
    clean = advanced | {at for at, n in walk.opened.items() if n == 1 + walk.copies.get(at, 0)}
    return {key: told for (at, key), told in reversed(walk.lines.items()) if at not in clean}


def operands_in(walk, instructions):
    """{offset of an operation: the Names of what its left operand is made of}, of those of which all have Names."""
    operands = {instructions[at].offset: tuple(map(names_to, read)) for at, read in walk.operands.items()}
    return {at: names for at, names in operands.items() if None not in names}


def names_to(value):
    """The Names of a Value that was read; None: they do not tell."""
    names, where = [], value.name[0]
    while value.kind == "read" and value.name[0] == ATTRIBUTE and value.base is not None:
        names.insert(0, value.name[1])
        value = value.base
    if value.kind == "local":
        names.insert(0, value.name[0])
    elif value.kind == "read" and value.name[0] in (GLOBAL, VARIABLE):
        names.insert(0, value.name[1])
    else:
        return None
    return Names(where, tuple(names))


def line_of(instruction):
    """The line of an instruction, if it tells."""
    positions = getattr(instruction, "positions", None)  # Python 3.11
    return positions.lineno if positions else instruction.starts_line


def mentions(one):
    """(where, name) of all that an instruction reads, stores or deletes by name. A method that is called does not
    count: numbers are none."""
    name = one.opname
    if is_called(one):
        return []
    where = MENTIONED.get(name)
    if where is not None:
        return [(where, one.argval)]
    if name not in ("LOAD_CONST", "RETURN_CONST"):
        return []
    words = texts_in(one.argval)
    if isinstance(one.argval, str) and "{" in one.argval:  # "{0.calls}".format(self)
        words = re.findall(r"\w+", one.argval)
    return [(ATTRIBUTE, word) for word in words]


def is_append(instructions, at):
    """Does the one at this number begin a call of append(), in a straight line?"""
    first = instructions[at] if at < len(instructions) else None
    if first is None or not is_called(first) or first.argval != "append" or first.is_jump_target:
        return False
    return end_of_call(instructions, at) is not None


def end_of_call(instructions: list[dis.Instruction], at: int) -> int | None:
    """Number of the instruction that calls what this one looked up last, if all between is in a straight line; or
    None."""
    depth = (
        1 if NULL_BEHIND and instructions[at + 1].opname == "PUSH_NULL" else 2
    )  # the function, and its object or nothing
    for k in range(at + 1, len(instructions)):
        one = instructions[k]
        if one.opcode in JUMPS:
            return None
        depth += dis.stack_effect(one.opcode, one.arg if one.opcode >= dis.HAVE_ARGUMENT else None)
        if depth <= 1:
            return k if depth == 1 and one.opname.startswith("CALL") else None
    return None


def is_called(one: dis.Instruction) -> bool:
    """Does this instruction look up a method that is called then?"""
    return one.opname == "LOAD_METHOD" or (one.opname == "LOAD_ATTR" and LOAD_ATTR_CALLS and bool((one.arg or 0) & 1))


def computes_names(code):
    """Where the code asks for attributes whose names are not in it, or None."""
    steps = list(steps_of(code))
    for at, (operation, argument) in enumerate(steps):
        asks = OPERATION_FIELD.get(operation) == "globals" and name_of(code, operation, argument) in BY_NAME
        if asks and second_argument(code, steps[at:]) is None:
            return f"{code.co_filename}:{code.co_firstlineno}"
    return None


def that_disturb(fresh: set[types.CodeType], known: set[types.CodeType]) -> list[types.CodeType]:
    """The code among `fresh` that reads what `known` code only advances, stores or appends to, or may come to it."""
    if not fresh:
        return []
    names = {advance[:2] for code in known for advance in advances_of(code)}
    kept = {name for code in keepers(known) for name in moves_of(code).stores | moves_of(code).appends}
    moves = [(one, moves_of(one)) for one in disturbers(fresh, names | kept)]
    return [
        one for one, found in moves
        if found.opens or not (names.isdisjoint(found.others) and kept.isdisjoint(found.reads))
    ]  # fmt: skip


def keepers(codes: Iterable[types.CodeType]) -> list[types.CodeType]:
    """The code among this that could store under a name, or append to what has one."""
    return [code for code in codes if "append" in code.co_names or STORES.search(code.co_code[::2])]


@functools.lru_cache(KEPT)
def advances_of(code: types.CodeType) -> tuple[Advance, ...]:
    """moves_of(code).advances, at once where there can be none."""
    operations = code.co_code[::2].replace(b"\0", b"")  # without caches
    return moves_of(code).advances if MAY_ADVANCE.search(operations) else ()


def disturbers(codes: Iterable[types.CodeType], names: Iterable[tuple[str, object]]) -> list[types.CodeType]:
    """The code among this that could mention one of the (where, name), or open what it does not name."""
    words = {word for _, name in names for word in words_in(name)}
    return [code for code in codes if words and may_mention(code, words)]


def words_in(name):
    return [word for part in name for word in words_in(part)] if isinstance(name, tuple) else [name]


def may_mention(code, words):
    named = {*code.co_names, *code.co_freevars, *code.co_cellvars}
    if not (named.isdisjoint(words) and named.isdisjoint(OPENERS) and named.isdisjoint(BY_NAME)):
        return True
    matches = MATCH_CLASS is not None and MATCH_CLASS in code.co_code[::2]
    return matches or may_say(code.co_consts, {word for word in words if isinstance(word, str)})


def may_say(constants, words):
    """Is one of the words in a text among these?"""
    for one in constants:
        if isinstance(one, (tuple, frozenset)) and may_say(one, words):
            return True
        if isinstance(one, str) and any(word in one for word in words):
            return True
    return False


# One rule for each kind of instruction: rule(walk, number of the instruction, it, its line).


def forget(walk, at, one, line):
    walk.stack.clear()


def nothing(walk, at, one, line):
    pass


def pop(stack: list[T]) -> T | None:
    return stack.pop() if stack else None


def peek(stack: list[T | None], n: int) -> T | None:
    """The nth value from the top, of a stack that is that deep."""
    stack[:0] = [None] * (n - len(stack))
    return stack[-n] if n else None


def copy(walk, n):
    """Push the nth value from the top once more."""
    value = peek(walk.stack, n)
    if value is not None and value.at >= 0:
        walk.copies[value.at] = walk.copies.get(value.at, 0) + 1
    walk.stack.append(value)


def swap(stack: list, n: int) -> None:
    peek(stack, n)
    stack[-1], stack[-n] = stack[-n], stack[-1]


def push_local(walk, name):
    walk.stack.append(Value("local", (name, walk.stored.get(name, 0))))


def pop_local(walk, name):
    pop(walk.stack)
    walk.stored[name] = walk.stored.get(name, 0) + 1


def load_local(walk, at, one, line):
    for name in one.argval if isinstance(one.argval, tuple) else (one.argval,):
        push_local(walk, name)


def store_local(walk, at, one, line):
    pop_local(walk, one.argval)


def store_two_locals(walk, at, one, line):
    for name in one.argval:
        pop_local(walk, name)


def store_and_load_local(walk, at, one, line):
    pop_local(walk, one.argval[0])
    push_local(walk, one.argval[1])


def load_constant(walk, at, one, line):
    value = one.arg if one.opname == "LOAD_SMALL_INT" else one.argval
    walk.stack.append(Value("constant", value, at))


def load_name(walk, at, one, line):
    if one.opname == "LOAD_GLOBAL" and one.arg & 1:  # what is loaded is called
        walk.stack.extend((None, None))
    else:
        walk.stack.append(Value("read", (MENTIONED[one.opname], one.argval), at))


def load_attribute(walk, at, one, line):
    base = pop(walk.stack)
    if is_called(one):
        walk.stack.extend((None, None))
    else:
        walk.stack.append(Value("read", (ATTRIBUTE, one.argval), at, base))


def load_method(walk, at, one, line):
    pop(walk.stack)
    walk.stack.extend((None, None))


def entry_of(walk, at, line):
    """(the container, (ENTRY, name)) of the key and container on the stack, which are popped; or (None, None)."""
    key, container = pop(walk.stack), pop(walk.stack)
    simple = key is not None and key.kind == "constant" and type(key.name) in (str, int)
    if not simple or container is None or container.kind != "read":
        return None, None
    walk.keys.add(key.at)
    walk.opened[container.at] = walk.opened.get(container.at, 0) + 1
    name = ENTRY, (container.name, key.name)
    walk.lines[at, name] = line
    return container, name


def load_entry(walk, at, one, line):
    container, name = entry_of(walk, at, line)
    walk.stack.append(container and Value("read", name, at, container))


def operator_of(one: dis.Instruction) -> str | None:
    """The sign of the operator, in place or not, or None."""
    return one.argrepr.removesuffix("=") if one.opname == "BINARY_OP" else None


def operate(walk, at, one, line):
    op = operator_of(one)
    if op == "[]":
        return load_entry(walk, at, one, line)
    by, value = pop(walk.stack), pop(walk.stack)
    made = computed(value, by) if op in ARITHMETIC else None
    if made is not None and is_whole(value):
        walk.operands[at] = reads_of(value)
    if value is not None and value.kind == "constant" and op in ("+", "*"):
        by, value = value, by
    fits = value is not None and value.kind == "read" and by is not None and by.kind == "constant"
    known = fits and op in ARITHMETIC and type(by.name) in (int, float) and not (op == "/" and by.name == 0)
    walk.stack.append(Value("advanced", value.name, value.at, value.base, op, by.name) if known else made)
    return None


def reads_of(value):
    """The Values that were read for this one."""
    if value is None or value.kind == "read":
        return () if value is None else (value,)
    return (Value("read", value.name, value.at, value.base),) if value.kind == "advanced" else value.reads


def is_whole(value):
    """Is it made of constants and of what was read, by arithmetic?"""
    return value is not None and (value.whole or value.kind in ("constant", "read", "advanced"))


def computed(*operands):
    """What arithmetic makes of these Values."""
    return Value("computed", None, reads=sum(map(reads_of, operands), ()), whole=all(map(is_whole, operands)))


def drop(walk, at, one, line):
    """It takes values and gives none."""
    for _ in range(-dis.stack_effect(one.opcode, one.arg)):
        pop(walk.stack)


def make(walk, at, one, line):
    """It takes values and gives one of which nothing is known."""
    for _ in range(1 - dis.stack_effect(one.opcode, one.arg)):
        pop(walk.stack)
    walk.stack.append(None)


def push_null(walk, at, one, line):
    walk.stack.append(None)


def store(walk, at, name, base, value, line):
    """`value` goes where `name` says."""
    if value is not None and value.kind == "advanced" and value.name == name and value.base == base:
        walk.advances.append((value.at, at, Advance(*name, value.op, value.by, line)))
    read = tuple(one for one in reads_of(value) if one.name == name and one.base == base)
    if read:
        walk.sums.append((at, read))


def store_name(walk, at, one, line):
    store(walk, at, (MENTIONED[one.opname], one.argval), None, pop(walk.stack), line)


def store_attribute(walk, at, one, line):
    base, value = pop(walk.stack), pop(walk.stack)
    if base is not None:
        store(walk, at, (ATTRIBUTE, one.argval), base, value, line)


def store_entry(walk, at, one, line):
    container, name = entry_of(walk, at, line)
    value = pop(walk.stack)
    if container is not None:
        walk.stores.add(name)
        store(walk, at, name, container, value, line)


RULES = {
    **dict.fromkeys("NOP RESUME CACHE EXTENDED_ARG NOT_TAKEN KW_NAMES".split(), nothing),
    **dict.fromkeys(
        "CALL CALL_KW COMPARE_OP IS_OP CONTAINS_OP UNARY_NEGATIVE UNARY_NOT UNARY_INVERT "
        "BUILD_TUPLE BUILD_LIST BUILD_MAP BUILD_CONST_KEY_MAP BUILD_SLICE BINARY_SLICE".split(),
        make,
    ),
    "PRECALL": drop,
    "PUSH_NULL": push_null,
    "LOAD_METHOD": load_method,
    **dict.fromkeys("LOAD_FAST LOAD_FAST_CHECK LOAD_FAST_BORROW".split(), load_local),
    **dict.fromkeys("LOAD_FAST_LOAD_FAST LOAD_FAST_BORROW_LOAD_FAST_BORROW".split(), load_local),
    "STORE_FAST": store_local,
    "STORE_FAST_STORE_FAST": store_two_locals,  # from Python 3.13 on
    "STORE_FAST_LOAD_FAST": store_and_load_local,
    "SET_FUNCTION_ATTRIBUTE": make,
    "POP_TOP": lambda walk, at, one, line: pop(walk.stack),
    **dict.fromkeys(("LOAD_CONST", "LOAD_SMALL_INT"), load_constant),
    **dict.fromkeys(("LOAD_GLOBAL", "LOAD_DEREF"), load_name),
    "LOAD_ATTR": load_attribute,
    "BINARY_SUBSCR": load_entry,
    "BINARY_OP": operate,
    **dict.fromkeys(("STORE_GLOBAL", "STORE_DEREF"), store_name),
    "STORE_ATTR": store_attribute,
    "STORE_SUBSCR": store_entry,
    "COPY": lambda walk, at, one, line: copy(walk, one.arg),
    "SWAP": lambda walk, at, one, line: swap(walk.stack, one.arg),
}
ARITHMETIC = ("+", "-", "*", "/")
MENTIONED = {
    operation: where
    for where, operations in {
        ATTRIBUTE: "LOAD_ATTR STORE_ATTR DELETE_ATTR LOAD_SUPER_ATTR IMPORT_FROM",
        GLOBAL: "LOAD_GLOBAL LOAD_NAME LOAD_FROM_DICT_OR_GLOBALS STORE_GLOBAL STORE_NAME DELETE_GLOBAL DELETE_NAME",
        VARIABLE: "LOAD_DEREF LOAD_CLASSDEREF LOAD_FROM_DICT_OR_DEREF STORE_DEREF DELETE_DEREF",
    }.items()
    for operation in operations.split()
}
LOAD_ATTR_CALLS = sys.version_info >= (3, 12)  # its lowest bit: what is loaded is called
NULL_BEHIND = sys.version_info >= (3, 13)  # what is pushed with a function that is no method's: before it, before that
OPENERS = frozenset(  # of whole objects, namespaces and frames
    "vars globals locals eval exec __dict__ __getattribute__ __getstate__ __reduce__ __reduce_ex__ __globals__"
    " __closure__ cell_contents f_locals f_globals _getframe currentframe getmembers getclosurevars attrgetter deepcopy"
    " asdict astuple dump dumps get_referents get_objects".split()
)


def one_of(*names):
    """A pattern for one of these instructions, as far as this release has them."""
    return b"[" + b"".join(re.escape(bytes([dis.opmap[name]])) for name in names if name in dis.opmap) + b"]"


STORES = re.compile(one_of("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF"), re.DOTALL)
MAY_ADVANCE = re.compile(  # an operation, and soon a store
    one_of("BINARY_OP")
    + one_of(*"NOP EXTENDED_ARG SWAP LOAD_FAST LOAD_FAST_BORROW LOAD_FAST_CHECK".split())
    + b"{0,6}"
    + one_of("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "STORE_SUBSCR"),
    re.DOTALL,
)
MATCH_CLASS = dis.opmap.get("MATCH_CLASS")
BY_NAME = ("getattr", "setattr", "delattr")
