"""Does what a call gives go to comparisons, arithmetic, the function's result and places where it is kept, and nowhere
else?

    n = mask.sum().item()
    self.losses.append(loss.item())
    self.last = float(loss)
    self.total += loss.item() * len(x)
    return {"loss": loss.item(), "count": n}, y

All do: whatever they are, the function does the same. (A comparison is told apart by its outcome; that nobody reads
what is kept, moving.py tells; what arithmetic makes of it is followed in its turn, where the left operand is it, or a
number.) From the bytecode, along all ways from the call on: what is followed lies on the stack, in local variables, and
in tuples, lists and dicts that are made around it. Each instruction that takes it and has no rule here uses it, so an
opcode of another release of Python's hides a result, and never makes one. Nothing runs here; it is worked out once for
each call in a code object.

Where the frame is a helper's, its result must in turn only come to the result of its caller. Who called it, the
instruction at which that one stands or a function of C in between (map, a cache), Python does not tell: the function
that the instruction calls is looked up, and must be the very one."""

import bisect
import dis
import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from cgt_core import ATTR

from ..words.pytree import Readout
from .code import JUMPS, KEPT
from .flow import (
    ARITHMETIC,
    ATTRIBUTE,
    GLOBAL,
    NULL_BEHIND,
    OPENERS,
    VARIABLE,
    end_of_call,
    is_called,
    moves_of,
    operator_of,
    peek,
    pop,
    swap,
)
from .places import MISSING, Place, class_value, dict_of, is_builtin_descriptor, value_at

RETURNED, COMPARED, COMPUTED = "returned", "compared", "computed"  # what may become of it, and Keeping
MOST_STEPS = 4000  # a function with so many ways is taken for one that uses it
LAZY = 0x20 | 0x80 | 0x200  # flags of generators, coroutines and both


class Used(Exception):
    """An instruction takes what is followed."""


class Keeping(NamedTuple):
    """It is stored, or appended to a list."""

    where: str  # as of flow.Advance
    names: tuple  # (variable, attribute, ...): what is stored to, or the list
    appends: bool  # where says nothing then


class Operand(NamedTuple):
    """It is the right operand of arithmetic, and the left one is made of what is found here: it must be a number."""

    names: tuple


class Kept(NamedTuple):
    """Keeping, of objects."""

    home: Any  # whose attribute it becomes, the scope or cell, or the list
    name: str | None  # the attribute or global; None of a cell and a list


def uses_behind(
    frame: types.FrameType,
    answers: tuple[str, ...],
    runner: types.CodeType,
    function: Callable[..., object],
    args: tuple,
) -> list[str | Kept] | None:
    """If this frame is at the call of a method without arguments, or of float(), and what that gives only comes to
    comparisons, arithmetic, what is found here by name and to the result of `function`, which code `runner` runs with
    `args`: [RETURNED, COMPARED, COMPUTED, Kept, ...] or less; else None. `answers`: names of methods that may be called
    of it, and give more of the like."""
    if not (is_method_call(frame.f_code, frame.f_lasti) or is_float(frame)):
        return None
    frames = [frame]
    while frames[-1].f_back is not None and frames[-1].f_back.f_code is not runner:
        frames.append(frames[-1].f_back)
    found: list = []
    callers: Any = None  # a list of Entered
    for k, one in enumerate(frames):
        uses = uses_of(one.f_code, one.f_lasti, answers)
        if uses is None:
            return None
        if callers is None and uses - {COMPARED}:
            callers = called_by_each_other(frames, function, args)
            if callers is None:
                return None
        if COMPUTED in found and COMPARED in uses:
            return None
        if not all(is_number(callers[k], use.names) for use in uses if type(use) is Operand):
            return None
        ends = RETURNED not in uses or one is frames[-1]  # else its caller has it
        found += [
            kept(callers[k], use) if type(use) is Keeping else use
            for use in uses
            if type(use) is not Operand and (ends or use != RETURNED)
        ]
        if ends:
            break
    return None if None in found else found


def is_float(frame):
    """Is it at a call of Python's float() of one argument?"""
    code, at = frame.f_code, frame.f_lasti
    is_it = frame.f_globals.get("float") is None and frame.f_builtins.get("float") is float
    return is_it and steps_from(code)[step_at(code, at)].arg == 1 and callee_of(code, at) == ("float",)


def is_number(who, names):
    """Is this, in this function, a number of Python's, or what stands for one?"""
    value = attribute_of(value_of(who, names[0]), names[1:])
    return type(value) is Readout or value.__class__ is float or value.__class__ is int


def kept(who, use):
    """The Kept of a Keeping in this function; None: that cannot be told."""
    function, (name, *more) = who.function, use.names
    if use.appends:
        found = attribute_of(value_of(who, name), more)
        return Kept(found, None) if type(found) is list else None
    if use.where == ATTRIBUTE:
        owner = attribute_of(value_of(who, name), more[:-1])
        return Kept(owner, more[-1]) if owner is not None else None
    if use.where == GLOBAL:
        return Kept(function.__globals__, name)
    free = function.__code__.co_freevars
    return Kept(function.__closure__[free.index(name)], None) if name in free else None


def attribute_of(found, names):
    """What lies under this attribute of this attribute ..., or None."""
    for name in names:
        found = look(found, name)
    return found


def look(thing, name):
    """What an attribute is, as far as that runs nothing; or None. A method is the function, or what makes one of it."""
    if isinstance(thing, type):
        raw = class_value(thing, name)
        return None if raw is MISSING else raw
    raw, own = class_value(type(thing), name), dict_of(thing) or {}
    if is_builtin_descriptor(raw):
        now = value_at(Place(ATTR, thing, name, None, ""))
        return None if now is MISSING else now
    if name in own and not hasattr(type(raw), "__set__"):
        return own[name]
    below = own.get("_modules") if isinstance(thing, torch.nn.Module) else None
    return below[name] if below and name in below else None if raw is MISSING else raw


TARGET = (
    {"is_jump_target": True} if "is_jump_target" in dis.Instruction._fields else {"label": 0}
)  # Python 3.13: 0 is one


@functools.lru_cache(KEPT)
def steps_from(code):
    """Its instructions. What jumps to the EXTENDED_ARG before one comes to that one."""
    found, is_target = [], False
    for one in dis.get_instructions(code):
        is_target |= one.is_jump_target
        if one.opname not in ("CACHE", "EXTENDED_ARG"):
            found.append(one._replace(**TARGET) if is_target else one)
            is_target = False
    return found


def step_at(code, offset):
    """Number of the instruction that a frame is at."""
    return bisect.bisect([one.offset for one in steps_from(code)], offset) - 1


@functools.lru_cache(KEPT)
def is_method_call(code, offset):
    """Is the instruction at this offset the call of a method without arguments?"""
    steps, at = steps_from(code), step_at(code, offset)
    return at in (called(steps, at - 1), called(steps, at - 2))


@functools.lru_cache(KEPT)
def uses_of(code, offset, answers):
    """What becomes of what the call at this offset gives, if it only comes to comparisons, the result of the code
    object and places: {RETURNED, COMPARED, Keeping, ...} or less; else None."""
    steps, at = steps_from(code), step_at(code, offset)
    if code.co_flags & LAZY or not OPENERS.isdisjoint(code.co_names) or not steps[at].opname.startswith("CALL"):
        return None
    try:
        return frozenset(follow(code, steps, at + 1, answers))
    except Used:
        return None


# --- who called a helper ------------------------------------------------------------------------


class Entered(NamedTuple):
    """A Python function that is called."""

    function: Any
    first: tuple = ()  # its first arguments, of which more is not known: the object whose method it is


def called_by_each_other(frames, function, args):
    """The Entered of these frames, the innermost first, if they are those of `function`, called with `args`, and of
    Python functions that each calls itself; else None. Nothing is asked of the frames' variables: that would change
    what somebody holds of them."""
    who, callers = entered(function), []
    if who is not None and type(function) is not functools.partial:
        who = who._replace(first=(*who.first, *args))
    for frame in reversed(frames):
        if who is None or who.function.__code__ is not frame.f_code:
            return None
        callers.insert(0, who)
        if frame is not frames[0]:
            who = called_by(who, frame.f_lasti)
    return callers


def entered(one):
    """What runs when this is called, or None: that cannot be told."""
    while type(one) is functools.partial:  # which hands on what it gets
        one = one.func
    if type(one) is types.MethodType:
        return Entered(one.__func__, (one.__self__,)) if type(one.__func__) is types.FunctionType else None
    return Entered(one) if type(one) is types.FunctionType else None


def called_by(who, offset):
    """What a function calls at this offset, or None."""
    names = callee_of(who.function.__code__, offset)
    if names is None:
        return None
    found = value_of(who, names[0])
    if who.function.__code__ is DECORATED and names == ("func",):  # func(*args, **kwargs)
        inner = entered(found)
        return inner and inner._replace(first=(*inner.first, *who.first))
    for name in names[1:]:
        owner, found = found, look(found, name)  # a property is no function
    if type(found) in (staticmethod, classmethod):
        return entered(found.__func__)
    is_method = len(names) > 1 and type(found) is types.FunctionType and class_value(type(owner), name) is found
    return Entered(found, (owner,)) if is_method else entered(found)


def value_of(who, name):
    """What a variable of a function is, if it never changes: a global, one of an outer function, the method's
    object."""
    code = who.function.__code__
    if name in code.co_freevars:
        cell = who.function.__closure__[code.co_freevars.index(name)]
        return cell.cell_contents if cell != EMPTY else None
    if name not in code.co_varnames and name not in code.co_cellvars:
        return who.function.__globals__.get(name)
    stays = not any(name in names_in(one) and one.opname.startswith(("STORE_", "DELETE_")) for one in steps_from(code))
    known = dict(zip(code.co_varnames[: code.co_argcount], who.first, strict=False))
    return known.get(name) if stays else None


def names_in(one):
    """The variables that an instruction names: from Python 3.13 on some name two."""
    return one.argval if type(one.argval) is tuple else (one.argval,)


EMPTY = types.CellType()
DECORATED = torch.no_grad()(lambda: None).__code__  # of all functions under torch's modes as decorators


@functools.lru_cache(KEPT)
def callee_of(code, offset):
    """(variable, attribute, ...): what the call at this offset calls, if all between its look-up and the call is in a
    straight line; or None."""
    steps, end = steps_from(code), step_at(code, offset)
    for at in range(end - 1, -1, -1):
        if steps[at].opcode in JUMPS or steps[at + 1].is_jump_target:
            return None
        names = looked_up(steps, at)
        if names is not None and end_of_call(steps, at) == end:
            return names
    return None


def looked_up(steps, at):
    """(variable, attribute, ...) that is called later, where this instruction is the last of its look-up; or None."""
    one, names = steps[at], []
    if one.opname in NAMED:
        beside = at + (1 if NULL_BEHIND else -1)
        is_callee = bool(one.arg & 1) if one.opname == "LOAD_GLOBAL" else at > 0 and steps[beside].opname == "PUSH_NULL"
        return (one.argval,) if is_callee else None
    if not is_called(one):
        return None
    while steps[at].opname in ("LOAD_ATTR", "LOAD_METHOD") and not steps[at].is_jump_target:
        names.insert(0, steps[at].argval)
        at -= 1
    return (steps[at].argval, *names) if steps[at].opname in NAMED else None


def names_below(steps, at):
    """(variable, attribute, ...) of what this instruction and those before it put on the stack, or None."""
    names = []
    while steps[at].opname == "LOAD_ATTR" and not is_called(steps[at]):
        names.insert(0, steps[at].argval)
        at -= 1
    is_variable = steps[at].opname in NAMED or steps[at].opname.startswith("LOAD_FAST_")
    return (names_in(steps[at])[-1], *names) if is_variable else None


NAMED = ("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW", "LOAD_DEREF", "LOAD_GLOBAL")


# --- what becomes of it -------------------------------------------------------------------------


def called(steps, at):
    """Where this instruction's method is called, if that is the next thing, and without arguments; or None."""
    if at < 0 or not is_called(steps[at]):
        return None
    end = at + (2 if steps[at + 1].opname == "PRECALL" else 1)  # Python 3.11
    fits = steps[end].opname == "CALL" and not steps[end].arg
    return None if not fits or any(one.is_jump_target for one in steps[at + 1 : end + 1]) else end


def follow(code, steps, start, answers):
    """Go all ways from instruction `start`, with what is followed on top of the stack: {RETURNED, COMPARED} or less, or
    Used."""
    index, uses = functools.partial(bisect.bisect_left, [one.offset for one in steps]), set()
    todo, done = [(start, (True,), frozenset(), False)], set()
    while todo:
        state = todo.pop()
        if state in done:
            continue
        done.add(state)
        if len(done) > MOST_STEPS:
            raise Used
        at, stack, held, changed = state  # by arithmetic
        if steps[at].opname in USES and True in stack[-2:]:
            if changed and USES[steps[at].opname] is COMPARED:
                raise Used
            uses.add(USES[steps[at].opname])
        computed = operation_at(code, steps[at], stack)
        if computed is not None:
            uses |= computed
            todo.append((at + 1, bare((*stack[: -1 if steps[at].opname == NEGATIVE else -2], True)), held, True))
        keeping = keeping_at(code, steps, at, stack)
        if keeping is not None:
            uses.add(keeping)
            stack = (*stack[:-2], *[None] * len(stack[-2:]))
        if held:  # a handler finds the variables, too, and nothing of them on its stack
            todo += [(index(handler), (), held, changed) for handler in handlers_of(code).get(steps[at].offset, ())]
        if (stack or held) and computed is None:
            todo += [
                (to, bare(left), keeps, changed) for to, left, keeps in ways(steps, index, at, [*stack], held, answers)
            ]
    return uses


def operation_at(code, one, stack):
    """What else is used, if this instruction computes with what is followed: {COMPUTED, Operand, ...}; else None."""
    if one.opname == NEGATIVE:
        return {COMPUTED} if stack[-1:] == (True,) else None
    if operator_of(one) not in ARITHMETIC or True not in stack[-2:]:
        return None
    left = () if len(stack) > 1 and stack[-2] else moves_of(code).operands.get(one.offset)
    return None if left is None else {COMPUTED, *(Operand(read.names) for read in left)}


def keeping_at(code, steps, at, stack):
    """The Keeping, if this instruction does nothing else to what is followed."""
    one = steps[at]
    if one.opname == "STORE_ATTR" and stack[-2:] == (True, None):
        names = names_below(steps, at - 1)
        if names is not None and not any(one.is_jump_target for one in steps[at - len(names) + 1 : at + 1]):
            return Keeping(ATTRIBUTE, (*names, one.argval), False)
        back = moves_of(code).sums.get(one.offset)
        return Keeping(*back, False) if back else None
    if one.opname in ("STORE_GLOBAL", "STORE_DEREF") and stack[-1:] == (True,):
        return Keeping(GLOBAL if one.opname == "STORE_GLOBAL" else VARIABLE, (one.argval,), False)
    if one.opname in ("PRECALL", "CALL") and one.arg == 1 and stack[-1:] == (True,):
        names = callee_of(code, steps[at + (one.opname == "PRECALL")].offset)  # Python 3.11 has both
        return Keeping("", names[:-1], True) if names and len(names) > 1 and names[-1] == "append" else None
    return None


def bare(stack):
    """Without what lies below the lowest that is followed."""
    return tuple(stack[stack.index(True) :]) if True in stack else ()


@functools.lru_cache(KEPT)
def handlers_of(code):
    """{offset: offsets of the handlers to which an exception there leads}."""
    found = {}
    for entry in dis.Bytecode(code).exception_entries:
        for offset in range(entry.start, entry.end, 2):
            found.setdefault(offset, set()).add(entry.target)
    return found


def ways(steps, index, at, stack, held, answers):
    """[(next instruction, stack, variables)] behind this one. `stack`: of True where it is what is followed,
    else None. Changed."""
    one = steps[at]
    name, arg = one.opname, one.arg if one.opcode >= dis.HAVE_ARGUMENT else None
    if name in ENDS:
        if name != "RETURN_VALUE":
            take(stack, 1)
        return []
    if name in LOCALS:
        return [(at + 1, *LOCALS[name](stack, held, one.argval))]
    if name in MOVES:
        MOVES[name](stack, arg)
        return [(at + 1, stack, held)]
    if is_called(one) and True in stack[-1:] and one.argval in answers and called(steps, at) is not None:
        return [(called(steps, at) + 1, stack, held)]
    if one.opcode in dis.haslocal and not held.isdisjoint(
        one.argval if isinstance(one.argval, tuple) else (one.argval,)
    ):
        raise Used
    if one.opcode in JUMPS:
        if name not in FOLLOWED and True in stack:
            raise Used
        found = [(index(one.argval), shift(list(stack), one.opcode, arg, True), held)]
        if name not in ALWAYS:
            found.append((at + 1, shift(stack, one.opcode, arg, False), held))
        return found
    if name not in PUSHES and not name.startswith(LOADS) and True in stack:
        raise Used
    pushes = PUSHES.get(name, 0)
    if is_called(one) or name == "LOAD_ATTR":
        pushes = 1 + is_called(one)
    change = dis.stack_effect(one.opcode, arg)
    take(stack, pushes - change)
    return [(at + 1, stack + [None] * (max(pushes, change) if name.startswith(LOADS) else pushes), held)]


def take(stack, n):
    """Pop n values, none of which is followed."""
    if True in stack[max(len(stack) - n, 0) :]:
        raise Used
    del stack[max(len(stack) - n, 0) :]


def shift(stack, opcode, arg, jump):
    """The stack behind a jump, or behind one that did not happen; it looks at the value on top, if at any."""
    change = dis.stack_effect(opcode, arg, jump=jump)
    if dis.opname[opcode] not in ALWAYS and True in stack[-1:]:
        raise Used
    if change < 0:
        take(stack, -change)
    return stack + [None] * change


def load_locals(stack, held, names):
    names = names if isinstance(names, tuple) else (names,)
    return stack + [name in held or None for name in names], held


def store_local(stack, held, name) -> tuple[list, frozenset]:
    return (stack, held | {name}) if pop(stack) else (stack, held - {name})


def delete_local(stack, held, name):
    return stack, held - {name}


def copy(stack, n):
    stack.append(peek(stack, n))


def compare(stack, _):
    peek(stack, 2)
    stack[-2:] = [None]


def gather(stack, n):
    """A tuple or list of the n values on top."""
    peek(stack, n)
    inside = stack[len(stack) - n :]
    stack[len(stack) - n :] = [True in inside or None]


def gather_pairs(stack, n):
    """A dict: keys are looked at."""
    peek(stack, 2 * n)
    inside = stack[len(stack) - 2 * n :]
    if True in inside[::2]:
        raise Used
    stack[len(stack) - 2 * n :] = [True in inside or None]


def gather_values(stack, n):
    """A dict, whose keys are a constant on top."""
    take(stack, 1)
    gather(stack, n)


def put_in(stack, n):
    """What is on top goes to the end of the list that lies n below."""
    value = pop(stack)
    peek(stack, n)
    stack[-n] = stack[-n] or value


LOCALS = {
    **dict.fromkeys("LOAD_FAST LOAD_FAST_CHECK LOAD_FAST_BORROW".split(), load_locals),
    **dict.fromkeys("LOAD_FAST_LOAD_FAST LOAD_FAST_BORROW_LOAD_FAST_BORROW".split(), load_locals),
    "STORE_FAST": store_local,
    "STORE_FAST_STORE_FAST": lambda stack, held, names: store_local(*store_local(stack, held, names[0]), names[1]),
    "STORE_FAST_LOAD_FAST": lambda stack, held, names: load_locals(*store_local(stack, held, names[0]), names[1]),
    "DELETE_FAST": delete_local,
}
USES = {"COMPARE_OP": COMPARED, "RETURN_VALUE": RETURNED}
MOVES = {
    "POP_TOP": lambda stack, _: pop(stack) and None,
    "COMPARE_OP": compare,
    "COPY": copy,
    "SWAP": swap,
    "BUILD_TUPLE": gather,
    "BUILD_LIST": gather,
    "BUILD_MAP": gather_pairs,
    "BUILD_CONST_KEY_MAP": gather_values,
    "LIST_APPEND": put_in,
}
ENDS = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE")
ALWAYS = tuple(name for name in dis.opmap if name.startswith("JUMP_") and "IF" not in name)
NEGATIVE = "UNARY_NEGATIVE"
FOLLOWED = (*ALWAYS, "FOR_ITER", *(name for name in dis.opmap if name.startswith(("POP_JUMP", "JUMP_IF"))))
LOADS = ("LOAD_", "PUSH_NULL", "NOP", "RESUME", "KW_NAMES")  # they take nothing, but for attributes
# Instructions that use what they take, and how much they push.
PUSHES = {
    **dict.fromkeys(
        [name for name in dis.opmap if name.startswith(("UNARY_", "BINARY_", "CALL", "FORMAT_"))]
        + "IS_OP CONTAINS_OP GET_ITER CONVERT_VALUE BUILD_STRING BUILD_SLICE BUILD_SET".split()
        + "LIST_TO_TUPLE MAKE_FUNCTION SET_FUNCTION_ATTRIBUTE TO_BOOL IMPORT_NAME".split(),
        1,
    ),
    "BEFORE_WITH": 2,
    **dict.fromkeys(
        "PRECALL POP_EXCEPT STORE_ATTR STORE_SUBSCR STORE_SLICE STORE_GLOBAL STORE_DEREF STORE_NAME DELETE_ATTR"
        " DELETE_SUBSCR LIST_EXTEND SET_UPDATE SET_ADD DICT_UPDATE DICT_MERGE MAP_ADD".split(),
        0,
    ),
}
