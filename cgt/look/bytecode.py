"""What the instructions of a code object do with each other's values: the one reader of byte code. Nothing runs here.

    def f(x):            0  read local x
        n = x.item()     1  read attribute item, called      takes what 0 made
        return n + 1     2  call                             takes what 1 made: the method and its object
                         3  store local n                    takes what 2 made
                         4  read local n
                         5  constant 1
                         6  compute +                        takes what 4 and 5 made
                         7  return                           takes what 6 made

An instruction is a step, or two. Copies and swaps on the stack are looked through, and all ways are followed: an
operand has several makers where ways meet. An instruction without a row in the tables below, of another release of
Python's perhaps, *escapes*: it takes all that lies on the stack, and makes all that lies there behind it. So it hides
what somebody asks for, and never makes it up.

Whoever asks (code.py, flow.py, returns.py) does so in these words, and names no instruction."""

import bisect
import dis
import functools
import re
import sys
import types
from typing import Any, NamedTuple

# What a step does. An escape may do anything with what lies on the stack.
READ, STORE, DELETE, CONSTANT, IMPORT, CALL = "read", "store", "delete", "constant", "import", "call"
COMPUTE, COMPARE, CONTAIN, IDENTIFY, MATCH = "compute", "compare", "contain", "identify", "match"
FORMAT, GATHER = "format", "gather"
RETURN, RAISE, JUMP, HANDLE, CATCH, DROP = "return", "raise", "jump", "handle", "catch", "drop"
COPY, SWAP, NULL, NOTHING, OTHER, ESCAPE = "copy", "swap", "null", "nothing", "other", "escape"

# Where a name is looked up. A scope is that of a module or class while its body runs; super() looks behind a class.
LOCAL, GLOBAL, SCOPE, VARIABLE = "local", "global", "scope", "variable"
ATTRIBUTE, SUPER, ENTRY = "attribute", "super", "entry"

Makers = frozenset[int]  # numbers of steps; none of them: there is nothing
UNKNOWN = frozenset((-1,))
RECENT = 1 << 3  # code objects whose Reading is kept: who asks keeps the answers


class Step(NamedTuple):
    offset: int
    operation: int
    argument: int
    does: str
    where: str
    name: Any  # what is read, stored or deleted; a constant; an operator; what is gathered; where a jump leads
    is_called: bool  # what is read is called later: a method comes with its object


class Reading(NamedTuple):
    """Columns, by the number of a step."""

    steps: list[Step]
    takes: list[tuple[Makers, ...]]  # who made each operand, the lowest first; () of what no way leads to
    users: list[list[tuple[int, int]]]  # (step that takes what it makes, number of the operand)
    leads: list[tuple[int, ...]]  # what may come next
    handlers: dict[int, int]  # what comes next if it raises
    runs: list[int]  # steps with the same number follow each other, whatever happens
    lines: list[int]

    def at(self, offset: int) -> int:
        """Number of the step that a frame is at."""
        return bisect.bisect([step.offset for step in self.steps], offset) - 1

    def maker(self, at: int, operand: int) -> int | None:
        """Who made this operand, if that is always the same step."""
        return only(self.takes[at][operand]) if self.takes[at] else None

    def callee(self, call: int) -> int | None:
        """The step that made what is called: beside it lies nothing, or its object."""
        first, second = self.takes[call][:2] or (UNKNOWN, UNKNOWN)
        return only(first or second) if first == second or not (first and second) else None

    def call_of(self, at: int) -> int | None:
        """The call of what this step reads, if that is all that is done with it."""
        call = only(frozenset(user for user, _ in self.users[at]))
        return call if call is not None and self.steps[call].does == CALL and self.callee(call) == at else None

    def stores_seen(self, name: str) -> dict[int, set[int]]:
        """{step that reads this local: those that may have stored what it finds}. -1: the caller, or nobody."""
        found: dict[int, set[int]] = {}
        changes = [at for at, step in enumerate(self.steps) if changes_local(step, name)]
        for change in (-1, *changes):
            store = change if change >= 0 and self.steps[change].does == STORE else -1
            todo, done = [*self.leads[change]] if change >= 0 else [0], set()
            while todo:
                at = todo.pop()
                if at in done:
                    continue
                done.add(at)
                if at in self.handlers:
                    todo.append(self.handlers[at])
                step = self.steps[at]
                if not changes_local(step, name):
                    todo += self.leads[at]
                    if step.where == LOCAL and step.name == name:
                        found.setdefault(at, set()).add(store)
        return found


def changes_local(step: Step, name: str) -> bool:
    return step.where == LOCAL and step.name == name and step.does in (STORE, DELETE)


def only(makers: Makers) -> int | None:
    return next(iter(makers)) if len(makers) == 1 and makers != UNKNOWN else None


def has(code: types.CodeType, those: frozenset[int]) -> bool:
    """Has it one of these operations?"""
    return not those.isdisjoint(code.co_code[::2])


def sequence(first: frozenset[int], between: frozenset[int], last: frozenset[int]) -> re.Pattern[bytes]:
    """A pattern for the operations of a code object, where one of the first comes shortly before one of the last."""
    groups = [b"[" + b"".join(re.escape(bytes([k])) for k in sorted(one)) + b"]" for one in (first, between, last)]
    quiet = b"\0", re.escape(bytes([dis.EXTENDED_ARG])), groups[1]
    return re.compile(groups[0] + b"(?:" + b"|".join(quiet) + b"){0,40}" + groups[2], re.DOTALL)


# --- the reader ---------------------------------------------------------------------------------


def steps_of(code: types.CodeType) -> list[Step]:
    """The steps of a code object, of which it is not yet known how they hang together."""
    raw, extended, steps = code.co_code, 0, []
    for offset, operation, argument in zip(range(0, len(raw), 2), raw[::2], raw[1::2], strict=True):
        if operation == CACHE:
            continue
        if extended:
            argument, extended = extended | argument, 0
        if operation == dis.EXTENDED_ARG:
            extended = argument << 8
        elif operation in PARTS:
            steps += [step_of(code, offset, *part) for part in PARTS[operation](argument)]
        elif operation in JUMPS:
            behind = next((at for at in range(offset + 2, len(raw), 2) if raw[at] != CACHE), len(raw))
            target = behind + (-2 if operation in BACKWARD else 2) * argument
            steps.append(Step(offset, operation, argument, *ROWS[operation][:2], target, False))
        else:
            steps.append(step_of(code, offset, operation, argument))
    return steps


def step_of(code, offset, operation, argument):
    what, where, _, naming = ROWS[operation]
    name = naming(code, argument) if naming is not None else None
    if name == "[]" and what == COMPUTE:  # from Python 3.14 on
        what, where = READ, ENTRY
    is_called = operation in CALLED and (operation == METHOD or argument & 1 == 1)
    return new_step((offset, operation, argument, what, where, name, is_called))


new_step = functools.partial(tuple.__new__, Step)  # in a third of the time of Step()


@functools.lru_cache(RECENT)
def read(code: types.CodeType) -> Reading:
    """How the steps of a code object hang together."""
    steps = steps_of(code)
    offsets = [step.offset for step in steps]
    leads = [*((at,) for at in range(1, len(steps))), ()]
    for at, step in enumerate(steps):
        if step.does in (RETURN, RAISE):
            leads[at] = ()
        elif step.operation in JUMPS:  # to the EXTENDED_ARG before a step, perhaps
            target = bisect.bisect_left(offsets, step.name)
            leads[at] = (target,) if step.operation in ALWAYS else (target, at + 1)
    guards = guards_of(code, offsets)
    targets = {to for at, ways in enumerate(leads) if steps[at].operation in JUMPS for to in ways}
    targets.update(to for to, _, _ in guards.values())
    takes, users, runs, run = walk(steps, leads, guards, targets), [[] for _ in steps], [], 0
    for at, operands in enumerate(takes):
        for k, makers in enumerate(operands):
            for maker in makers:
                if maker >= 0:
                    users[maker].append((at, k))
        run += at in targets or steps[at - 1].does == ESCAPE
        runs.append(run)
    handlers = {at: to for at, (to, _, _) in guards.items()}
    return Reading(steps, takes, users, leads, handlers, runs, lines_of(code, offsets))


def guards_of(code, offsets):
    """{step: (where control goes if it raises, how much lies on the stack then, and how much comes on top)}"""
    guards = {}
    for entry in dis.Bytecode(code).exception_entries if code.co_exceptiontable else ():
        guard = bisect.bisect_left(offsets, entry.target), entry.depth, 2 if entry.lasti else 1
        first, end = (bisect.bisect_left(offsets, offset) for offset in (entry.start, entry.end))
        guards.update(dict.fromkeys(range(first, end), guard))
    return guards


def lines_of(code, offsets):
    """The line of each step; what has none belongs to the one before."""
    lines, known = [code.co_firstlineno], [line for line, *_ in code.co_positions()]
    for offset in offsets:
        lines.append(known[offset // 2] or lines[-1])
    return lines[1:]


def walk(steps, leads, guards, targets):
    """Along all ways, until nothing new is found: who made each operand of each step."""
    takes, stacks, todo = [()] * len(steps), {0: []}, [0]  # stacks: where ways meet

    def lead(to, stack):
        known = stacks.get(to)
        joined = [*stack] if known is None else join(known, stack)
        if joined != known:
            stacks[to] = joined
            todo.append(to)

    while todo:
        at = todo.pop()
        stack, guard = [*stacks[at]], None
        while at < len(steps):
            step, me = steps[at], frozenset((at,))
            if at in guards and guards[at] is not guard:
                to, depth, raised = guard = guards[at]
                lead(to, stack[:depth] + [UNKNOWN] * raised)
            if step.operation in JUMPS:
                takes[at] = tuple(stack) if step.does == ESCAPE else tuple(stack[-1:]) if len(leads[at]) > 1 else ()
                left = [me] * len(stack) if step.does == ESCAPE else stack
                for to, jumps in zip(leads[at], (True, False), strict=False):
                    change = effect(step.operation, step.argument, jumps)
                    lead(to, left + [me] * change if change > 0 else left[: len(left) + change])
                break
            takes[at] = act(step, me, stack)
            if not leads[at]:
                break
            at += 1
            if at in targets:
                lead(at, stack)
                break
    return takes


def join(one, other):
    """What may lie on the stack behind either way. The tops are the same place, should the depths differ."""
    depth = min(len(one), len(other))
    return [a | b for a, b in zip(one[len(one) - depth :], other[len(other) - depth :], strict=True)]


def act(step, me, stack):
    """The operands of a step that is no jump. It changes the stack."""
    move = MOVES.get(step.does)
    if move is not None:
        move(stack, step.argument)
        return ()
    change = effect(step.operation, step.argument)
    if step.does == ESCAPE:
        operands = tuple(stack)
        stack[:] = [me] * max(len(stack) + change, 0)
        return operands
    makes = [me] * max(ROWS[step.operation][2] + step.is_called, change)
    if step.is_called and step.where == GLOBAL:
        makes = [me, frozenset()] if NULL_BEHIND else [frozenset(), me]
    n = len(makes) - change
    if n > len(stack):
        deepen(stack, n)
    operands = tuple(stack[len(stack) - n :])
    stack[len(stack) - n :] = makes
    if step.operation == APPEND:  # to the list that lies there
        deepen(stack, step.argument)
        stack[-step.argument] |= me
    return operands


@functools.lru_cache(1 << 12)
def effect(operation, argument, jumps=None):
    """How many values more lie on the stack behind it."""
    if operation == PLAIN:  # in Python 3.11 PRECALL is told to take the arguments
        return -1 - argument
    if operation == GIVES_BACK:  # from Python 3.14 on said to leave what the caller gets
        return -1
    return dis.stack_effect(operation, argument if operation >= dis.HAVE_ARGUMENT else None, jump=jumps)


def deepen(stack, n):
    stack[:0] = [UNKNOWN] * (n - len(stack))


def copy(stack, n):
    deepen(stack, n)
    stack.append(stack[-n])


def swap(stack, n):
    deepen(stack, n)
    stack[-1], stack[-n] = stack[-n], stack[-1]


MOVES = {COPY: copy, SWAP: swap, NULL: lambda stack, _: stack.append(frozenset()), NOTHING: lambda stack, _: None}


# --- the instructions; each release of Python lacks some ----------------------------------------

LOOKS_UP = [  # where, and what reads, stores and deletes there
    (LOCAL, "LOAD_FAST LOAD_FAST_CHECK LOAD_FAST_BORROW", "STORE_FAST", "DELETE_FAST"),
    (GLOBAL, "LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL"),
    (SCOPE, "LOAD_NAME LOAD_FROM_DICT_OR_GLOBALS", "STORE_NAME", "DELETE_NAME"),
    (VARIABLE, "LOAD_DEREF LOAD_CLASSDEREF LOAD_FROM_DICT_OR_DEREF", "STORE_DEREF", "DELETE_DEREF"),
    (ATTRIBUTE, "LOAD_ATTR LOAD_METHOD IMPORT_FROM", "STORE_ATTR", "DELETE_ATTR"),
    (ENTRY, "BINARY_SUBSCR", "STORE_SUBSCR", "DELETE_SUBSCR"),
]
TABLE = [  # what else they do, where, and how many values they leave
    (READ, SUPER, 1, "LOAD_SUPER_ATTR"),
    (CONSTANT, "", 1, "LOAD_CONST LOAD_SMALL_INT"),
    (IMPORT, "", 1, "IMPORT_NAME"),
    (CALL, "", 1, "CALL CALL_KW CALL_FUNCTION_EX"),
    (COMPUTE, "", 1, "BINARY_OP UNARY_NEGATIVE"),
    (COMPARE, "", 1, "COMPARE_OP"),
    (CONTAIN, "", 1, "CONTAINS_OP"),
    (IDENTIFY, "", 1, "IS_OP"),
    (MATCH, "", 1, "MATCH_CLASS"),
    (FORMAT, "", 1, "FORMAT_VALUE FORMAT_SIMPLE FORMAT_WITH_SPEC CONVERT_VALUE"),
    (GATHER, "", 1, "BUILD_TUPLE BUILD_LIST BUILD_MAP BUILD_CONST_KEY_MAP"),
    (GATHER, "", 0, "LIST_APPEND"),
    (RETURN, "", 0, "RETURN_VALUE"),
    (RAISE, "", 0, "RAISE_VARARGS RERAISE"),
    (HANDLE, "", 2, "PUSH_EXC_INFO"),
    (CATCH, "", 1, "CHECK_EXC_MATCH"),
    (DROP, "", 0, "POP_TOP END_FOR POP_ITER"),
    (COPY, "", 0, "COPY"),
    (SWAP, "", 0, "SWAP"),
    (NULL, "", 0, "PUSH_NULL"),
    (NOTHING, "", 0, "NOP RESUME PRECALL KW_NAMES NOT_TAKEN MAKE_CELL COPY_FREE_VARS"),
    (OTHER, LOCAL, 1, "LOAD_FAST_AND_CLEAR"),
    (OTHER, "", 0, "POP_EXCEPT STORE_SLICE LIST_EXTEND SET_UPDATE SET_ADD DICT_UPDATE DICT_MERGE MAP_ADD"),
    (OTHER, "", 1, "UNARY_NOT UNARY_INVERT UNARY_POSITIVE BINARY_SLICE TO_BOOL GET_ITER WITH_EXCEPT_START"),
    (OTHER, "", 1, "BUILD_STRING BUILD_SLICE BUILD_SET LIST_TO_TUPLE MAKE_FUNCTION SET_FUNCTION_ATTRIBUTE"),
    (OTHER, "", 1, "LOAD_CLOSURE LOAD_BUILD_CLASS LOAD_ASSERTION_ERROR LOAD_COMMON_CONSTANT LOAD_LOCALS"),
    (OTHER, "", 1, "CALL_INTRINSIC_1 CALL_INTRINSIC_2"),
    (OTHER, "", 2, "BEFORE_WITH LOAD_SPECIAL"),
    (JUMP, "", 0, " ".join(name for name in dis.opmap if name.startswith(("JUMP_", "POP_JUMP_", "FOR_ITER")))),
]
for row in LOOKS_UP:
    TABLE += [(what, row[0], int(what == READ), row[k]) for k, what in enumerate((READ, STORE, DELETE), 1)]
SIGNS = "+ & // << @ * % | ** >> - / ^ + & // << @ * % | ** >> - / ^ []".split()  # once more: in place
NAMES = {  # how a step is named that has no name: by its operator, its arguments, what of its operands is gathered
    "BINARY_OP": lambda code, n: SIGNS[n] if n < len(SIGNS) else "",
    "UNARY_NEGATIVE": lambda code, n: "-",
    "LOAD_SMALL_INT": lambda code, n: n,
    "CALL": lambda code, n: n,
    "BUILD_MAP": lambda code, n: slice(1, None, 2),
    "BUILD_CONST_KEY_MAP": lambda code, n: slice(None, -1),
    **dict.fromkeys("BUILD_TUPLE BUILD_LIST LIST_APPEND".split(), lambda code, n: slice(None)),
}
FLAGS = {"LOAD_GLOBAL": 1, "LOAD_ATTR": int(sys.version_info >= (3, 12)), "LOAD_SUPER_ATTR": 2}  # low bits (see dis.py)
NULL_BEHIND = sys.version_info >= (3, 13)  # what lies beside a function that is no method's

OPERATIONS = {name: k for name, k in dis.opmap.items() if k < 256}  # above: of the compiler alone
KNOWN_BY_NAME = "CACHE LOAD_METHOD CALL LIST_APPEND RETURN_VALUE".split()
CACHE, METHOD, PLAIN, APPEND, GIVES_BACK = map(OPERATIONS.get, KNOWN_BY_NAME)
CALLED = {OPERATIONS.get(name) for name, n in FLAGS.items() if n} | {METHOD}  # the lowest flag: it is called
JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
BACKWARD = {k for name, k in OPERATIONS.items() if "BACKWARD" in name}
ALWAYS = {k for name, k in OPERATIONS.items() if name.startswith("JUMP_") and "IF" not in name}


def naming_of(name, operation):
    """The function that tells a step's name by its code and argument; or None."""
    shift = FLAGS.get(name, 0)
    if operation in dis.hasname:
        return lambda code, n: code.co_names[n >> shift]
    if operation in dis.haslocal or operation in dis.hasfree:
        return lambda code, n: code._varname_from_oparg(n)  # what dis uses
    return NAMES.get(name, (lambda code, n: code.co_consts[n]) if operation in dis.hasconst else None)


ROWS = [(ESCAPE, LOCAL if k in dis.haslocal else "", 0, naming_of("", k)) for k in range(256)]
for what, where, leaves, names in TABLE:
    for name in OPERATIONS.keys() & set(names.split()):
        ROWS[OPERATIONS[name]] = what, where, leaves, naming_of(name, OPERATIONS[name])


def operations(what: str, *places: str) -> frozenset[int]:
    """Those that do this, in one of these places; or anywhere."""
    return frozenset(k for k, row in enumerate(ROWS) if row[0] == what and (not places or row[1] in places))


def pair(first, second):
    first, second = OPERATIONS[first], OPERATIONS[second]
    return lambda both: ((first, both >> 4), (second, both & 15))


TWO = {  # instructions that are two steps
    "LOAD_FAST_LOAD_FAST": pair("LOAD_FAST", "LOAD_FAST"),
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW": pair("LOAD_FAST", "LOAD_FAST"),
    "STORE_FAST_LOAD_FAST": pair("STORE_FAST", "LOAD_FAST"),
    "STORE_FAST_STORE_FAST": pair("STORE_FAST", "STORE_FAST"),
    "RETURN_CONST": lambda n: ((OPERATIONS["LOAD_CONST"], n), (OPERATIONS["RETURN_VALUE"], 0)),
}
PARTS = {OPERATIONS[name]: parts for name, parts in TWO.items() if name in OPERATIONS}
