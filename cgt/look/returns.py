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
in tuples, lists and dicts that are made around it. Each step that takes it and has no rule here uses it. Nothing runs
here; it is worked out once for each call in a code object.

Where the frame is a helper's, its result must in turn only come to the result of its caller. Who called it, the
instruction at which that one stands or a function of C in between (map, a cache), Python does not tell: the function
that the instruction calls is looked up, and must be the very one."""

import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from cgt_core import ATTR

from ..words.pytree import Readout
from . import bytecode as b
from .code import KEPT
from .flow import ARITHMETIC, OPENERS, is_arithmetic, is_read, names_of, tree_of
from .places import MISSING, Place, class_value, dict_of, is_builtin_descriptor, value_at

WHOLE = (*ARITHMETIC, "//", "%")  # what may be computed of an index
RETURNED, COMPARED, COMPUTED = "returned", "compared", "computed"  # what may become of it, and Named
APPENDED, OPERAND = "appended", "operand"
LAZY = 0x20 | 0x80 | 0x200  # flags of generators, coroutines and both


class Named(NamedTuple):
    """What becomes of it where the code names another object."""

    what: str  # stored there, as of flow.Advance; APPENDED to it; OPERAND: arithmetic's, the left one comes of it
    names: tuple  # (variable, attribute, ...)


class Kept(NamedTuple):
    """Where it is stored, or the list to which it is appended."""

    home: Any  # whose attribute it becomes, the scope or cell, or the list
    name: str | None  # the attribute or global; None of a cell and a list


def uses_behind(
    frame: types.FrameType, answers: tuple[str, ...], runner: types.CodeType, function: Callable, args: tuple
) -> list[str | Kept] | None:
    """[RETURNED, COMPARED, COMPUTED, Kept, ...] or less, if this frame is at the call of a method without arguments, or
    of float(), and what that gives only comes to such, in frames up to that of `function`, which code `runner` runs
    with `args`; else None. `answers`: methods that may be called of it, and give more of the like."""
    if not is_asked(frame):
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
        named = [use for use in uses if type(use) is Named]
        if not all(is_number(callers[k], use.names) for use in named if use.what == OPERAND):
            return None
        ends = RETURNED not in uses or one is frames[-1]  # else its caller has it
        found += uses.difference(named, () if ends else (RETURNED,))
        found += [kept(callers[k], use) for use in named if use.what != OPERAND]
        if ends:
            break
    return None if None in found else found


def is_at_entry(frame: types.FrameType) -> bool:
    """Is it at a read of an entry (`table[t]`)?"""
    reading = b.read(frame.f_code)
    step = reading.steps[reading.at(frame.f_lasti)]
    return step.does == b.READ and step.where == b.ENTRY


def is_index(frame: types.FrameType) -> bool:
    """Is it at the call of a method without arguments whose answer is an index (`table[t.item()]`), and is else only
    compared, computed with and returned?"""
    return is_asked(frame) and indexes(frame.f_code, frame.f_lasti)


@functools.lru_cache(KEPT)
def indexes(code, offset):
    reading, call = call_at(code, offset)
    if call is None:
        return False
    takers, *_ = follow(reading, call, (), WHOLE)
    kinds = {index_use(reading, at, operand) for at, operand, _ in takers}
    return b.ENTRY in kinds and None not in kinds


def index_use(reading, at, operand):
    """ENTRY: this step takes it as a key; COMPUTED: as a number; None: in another way."""
    step = reading.steps[at]
    if step.where == b.ENTRY and step.does in (b.READ, b.STORE):
        return b.ENTRY if operand == len(reading.takes[at]) - 1 else None
    passed = step.does != b.GATHER and passes(reading, at, operand, (), WHOLE)
    return COMPUTED if passed or step.does in (b.COMPARE, b.DROP, b.RETURN) else None


def is_asked(frame):
    """Is it at the call of a method without arguments, or of Python's float() of one?"""
    names, given, is_method = callee_of(frame.f_code, frame.f_lasti)
    is_float = frame.f_globals.get("float") is None and frame.f_builtins.get("float") is float
    return is_method or (is_float and names == ("float",) and given == 1)


def is_number(who, names):
    """Is this, in this function, a number of Python's, or what stands for one?"""
    value = found_at(who, names)
    return type(value) is Readout or value.__class__ is float or value.__class__ is int


def kept(who, use):
    """The Kept of a Named in this function; None: that cannot be told."""
    function, name = who.function, use.names[-1]
    if use.what == APPENDED:
        found = found_at(who, use.names)
        return Kept(found, None) if type(found) is list else None
    if use.what == b.ATTRIBUTE:
        owner = found_at(who, use.names[:-1])
        return Kept(owner, name) if owner is not None else None
    if use.what == b.GLOBAL:
        return Kept(function.__globals__, name)
    free = function.__code__.co_freevars
    return Kept(function.__closure__[free.index(name)], None) if name in free else None


def found_at(who, names):
    """What this variable is, or this attribute of it, of that ...; or None."""
    return functools.reduce(look, names[1:], value_of(who, names[0]))


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


def call_at(code, offset):
    """(the Reading of this code, the number of the call that a frame is at; None: it is at no call)"""
    reading = b.read(code)
    at = reading.at(offset)
    return reading, at if reading.steps[at].does == b.CALL and reading.takes[at] else None


def method_of(reading, call):
    """The step that reads the method that is called here without arguments, or None."""
    callee = reading.callee(call) if reading.steps[call].name == 0 else None
    step = reading.steps[callee] if callee is not None else None
    return callee if step is not None and step.is_called and step.where == b.ATTRIBUTE else None


@functools.lru_cache(KEPT)
def callee_of(code, offset):
    """((variable, attribute, ...): what the call at this offset calls, the number of its arguments, is that a method
    without any?), or None in place of what cannot be told"""
    reading, call = call_at(code, offset)
    if call is None:
        return None, None, False
    return names_of(reading, reading.callee(call)), reading.steps[call].name, method_of(reading, call) is not None


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
    names, *_ = callee_of(who.function.__code__, offset)
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
    """What a variable is, if it never changes: a global, an outer function's, the object whose method it is."""
    code = who.function.__code__
    if name in code.co_freevars:
        cell = who.function.__closure__[code.co_freevars.index(name)]
        return cell.cell_contents if cell != EMPTY else None
    if name not in code.co_varnames and name not in code.co_cellvars:
        return who.function.__globals__.get(name)
    changes = any(
        one.name == name and one.where in (b.LOCAL, b.VARIABLE) and one.does in (b.STORE, b.DELETE)
        for one in b.steps_of(code)
    )
    known = dict(zip(code.co_varnames[: code.co_argcount], who.first, strict=False))
    return None if changes else known.get(name)


EMPTY = types.CellType()
DECORATED = torch.no_grad()(lambda: None).__code__  # of all functions under torch's modes as decorators


# --- what becomes of it -------------------------------------------------------------------------


@functools.lru_cache(KEPT)
def uses_of(code, offset, answers):
    """What becomes of what the call at this offset gives, if it only comes to comparisons, the result of the code
    object and places: {RETURNED, COMPARED, Named, ...} or less; else None."""
    reading, call = call_at(code, offset)
    if call is None or code.co_flags & LAZY or not OPENERS.isdisjoint(code.co_names):
        return None
    takers, makers, is_mixed = follow(reading, call, answers)
    uses = [use_of(reading, *taker, makers, is_mixed, answers) for taker in takers]
    return None if None in uses else frozenset().union(*uses)


def follow(reading, call, answers, signs=ARITHMETIC):
    """([(step that takes what this call gives, which of its operands that is, was it changed by arithmetic)], the steps
    that may make it, do ways meet of which only some bring it)."""
    stores_seen, makes, takers, todo = functools.cache(reading.stores_seen), set(), [], [(call, False)]
    while todo:
        state = at, changed = todo.pop()
        if state in makes:
            continue
        makes.add(state)
        step, users = reading.steps[at], reading.users[at]
        if step.does == b.STORE:
            users = [(one, 0) for one, stores in stores_seen(step.name).items() if at in stores]
        takers += [(one, k, changed) for one, k in users]
        passed = [one for one, k in users if passes(reading, one, k, answers, signs)]
        todo += [(one, changed or reading.steps[one].does == b.COMPUTE) for one in passed]
    makers, found = {at for at, _ in makes}, []
    for at in makers - {call}:
        step = reading.steps[at]
        is_local = step.does == b.READ and step.where == b.LOCAL
        found += [stores_seen(step.name)[at]] if is_local else reading.takes[at]
    return takers, makers, any(not one.isdisjoint(makers) and not one <= makers for one in found)


def passes(reading, at, operand, answers, signs=ARITHMETIC):
    """Is what this step makes followed, too, because it takes what is followed?"""
    step = reading.steps[at]
    if step.does == b.GATHER:
        return operand in range(len(reading.takes[at]))[step.name]
    if step.does == b.CALL:
        method = method_of(reading, at)
        return method is not None and reading.steps[method].name in answers
    if step.does == b.READ and step.where == b.ATTRIBUTE:
        call = reading.call_of(at) if step.name in answers else None
        return call is not None and method_of(reading, call) == at
    is_local = step.does in (b.READ, b.STORE) and step.where == b.LOCAL
    return is_local or (step.does == b.COMPUTE and step.name in signs)


def use_of(reading, at, operand, changed, makers, is_mixed, answers):
    """How a step uses what is followed: {RETURNED, COMPARED, ...}; None: in another way."""
    step = reading.steps[at]
    if step.does == b.DROP:
        return set()
    if step.does == b.RETURN:
        return {RETURNED}
    if step.does == b.COMPARE:
        return None if changed else {COMPARED}
    if step.does == b.COMPUTE and step.name in ARITHMETIC:
        left = reading.takes[at][0]
        return {COMPUTED} if operand == 0 or (left <= makers and not is_mixed) else computed(reading, at)
    if step.does == b.STORE and step.where in (b.GLOBAL, b.VARIABLE):
        return {Named(step.where, (step.name,))}
    if step.does == b.STORE and step.where == b.ATTRIBUTE:
        names = names_of(reading, reading.maker(at, 1)) if operand == 0 else None
        return {Named(b.ATTRIBUTE, (*names, step.name))} if names else None
    if step.does == b.CALL and step.name == 1 and operand == 2:
        names = names_of(reading, reading.callee(at)) or ()
        return {Named(APPENDED, names[:-1])} if len(names) > 1 and names[-1] == "append" else None
    return set() if passes(reading, at, operand, answers) else None


def computed(reading, at):
    """How arithmetic uses its right operand. The left one decides what an operator does: it must be made of numbers."""
    found = {COMPUTED}
    for one in tree_of(reading, reading.maker(at, 0)):
        if one is None:
            return None
        names = names_of(reading, one) if is_read(reading, one) else None
        if names is not None:
            found.add(Named(OPERAND, names))
        elif reading.steps[one].does != b.CONSTANT and not is_arithmetic(reading, one):
            return None
    return found
