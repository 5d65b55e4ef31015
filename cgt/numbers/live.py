"""Numbers that are others at each call: a learning rate on a schedule, a sampler's `t`, an annealed temperature,
`self.step`.

What a function does with such a number can be recorded once for all its values if all of it is known: which steps of
arithmetic lead from it into which arguments of which ops, and how each comparison turned out. So while the function is
recorded a stand-in takes the number's place, in the argument or where the code finds it. To Python it is a float or an
int; each step of arithmetic makes another stand-in and is written down, and PyTorch's own symbolic numbers carry it
into ops. A comparison is answered, and the recording is for that answer. Whatever else looks at the number (range(),
math.gamma, an index, a length, a string) gets the number itself, and the recording is for that number: it is *exact*,
with the line that made it so.

A hit takes today's numbers, does the same steps (core/numbers.pxi), and tells the graph where one comes to another
value.
"""

import collections
import functools
import gc
import operator
import types
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import cgt_core as core
import torch

from ..data import Kept, Plan, Seen, State, remember
from ..look import blinds, containers, places
from ..look.code import is_read, tells_apart
from ..look.containers import open_parts
from ..look.places import Place
from ..run import taps
from ..run.observe import NOT_USER_CODE, Unrecordable, collect, is_capture, lying_in, refuse, user_line
from ..words import errors, pytree
from ..words.private import OpOverload
from . import rows, standins
from .standins import MATH, MOST, PYTHON, STAND_INS, Int, Source, Taken, Trace, looked_at, pin, settle

READ, CHANGING = "a number that is read on the way", "a number that changes"
MOST_PARTS = 8  # numbers in a tuple (`betas`) or a container
MOST_LOOKS = 4  # recordings for one value of what was computed from a number, before each number is one of its own
# Ops whose kernels take a number as an argument and choose nothing by it but what they compute: no shape, no type, no
# other kernel. (`pow` has kernels of its own for 2 and 0.5, `addmm` one for beta = 0, `div` with a rounding_mode one
# for division by 0, `arange` a length.)
TAKES = frozenset(
    "add add_ sub sub_ rsub mul mul_ div div_ lerp lerp_ addcmul addcmul_ addcdiv addcdiv_ fill fill_ full full_like"
    " new_full scalar_tensor masked_fill masked_fill_ where clamp clamp_ clamp_min clamp_min_ clamp_max clamp_max_ eq"
    " ne lt le gt ge remainder remainder_ fmod fmod_ leaky_relu leaky_relu_ elu elu_ threshold threshold_ softplus"
    " hardshrink _foreach_add _foreach_add_ _foreach_sub _foreach_sub_ _foreach_mul _foreach_mul_ _foreach_div"
    " _foreach_div_ _foreach_addcmul _foreach_addcmul_ _foreach_addcdiv _foreach_addcdiv_ _foreach_lerp _foreach_lerp_"
    " _foreach_clamp_min _foreach_clamp_min_ _foreach_clamp_max _foreach_clamp_max_".split()
)
# Ops of an optimizer whose number is a float to their schema: PyTorch's parser asks for its value, and nothing comes
# between that and the op.
PARSES = frozenset("_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_".split())
KINDS = ("number", "Tensor")  # types of arguments, as schemas name them; of a list's elements


# --- which numbers are live -------------------------------------------------------------------


def paths_of_arguments(positions: Iterable[str], names: Collection[str]) -> set[str]:
    """Where arguments of these names can be in a call. `positions`: the names of a function's parameters."""
    return {f"kwargs[{name!r}]" for name in names} | {f"args[{k}]" for k, name in enumerate(positions) if name in names}


def learn_arguments(state: State, args: tuple, kwargs: dict) -> None:
    """Numbers among a call's arguments that were others at one before are live from now on."""
    given = containers.named(args, kwargs)
    for path, x in (one for whole, value in given for one in containers.numbers_of(whole, value)):
        was = state.learnt.numbers.last.setdefault(path, x)
        if type(was) is type(x) and not pytree.same_value(was, x):
            state.learnt.numbers.live.add(path)


def learn_places(state: State, found: list[Place], kept: list[Kept], misplaced: set[str]) -> None:
    """Numbers in places that were others when something was recorded are live from now on. `misplaced`: paths that kept
    one of these recordings, `kept`, from fitting; where one changed, all that did are learnt."""
    if not any(path in misplaced for one in kept for path in one.numbers.places):
        return
    for p in found:
        was = [one.numbers.places[p.path] for one in kept if p.path in one.numbers.places]
        if was and any(have_moved(one, numbers_in(p, True)) for one in was):
            state.learnt.numbers.live.add(p.path)


def have_moved(was: list, now: list) -> bool:
    """Are these, of numbers_in, others of the same types?"""
    kinds = [[(name, type(x)) for name, _, x in numbers] for numbers in (was, now)]
    return kinds[0] == kinds[1] and not pytree.same_value(was, now)


def learn_stored(state: State, plan: Plan, seen: Seen, why_untraced: Callable[[], str | None]) -> str | None:
    """A sentence if the run changed numbers in places that it read and that were not live yet, or None."""
    learn_exact(state, seen.live)
    known = {*plan.changes.moving, *plan.changes.free, *(s.at for s in plan.numbers.sources if s.op == core.AT_PLACE)}
    mine = [(k, p) for k, p in enumerate(plan.places) if k not in known and p.path not in state.learnt.numbers.exact]
    names = {p.path for k, p in mine if has_other_numbers(p, k in plan.follows)}
    if not names or why_untraced() is not None:
        return None
    state.learnt.numbers.live.update(names)
    return errors.stores_number(min(names))


# --- a run ------------------------------------------------------------------------------------


def has_other_numbers(place: Place, is_followed: bool = False) -> bool:
    """Did the run put others there?"""
    was = numbers_in(place, is_followed)
    return bool(was) and have_moved(was, numbers_in(place._replace(want=places.value_at(place)), is_followed))


def sources_of(
    flat: pytree.Flat, found: list[Place], state: State, untraced: str | None, follows: Collection[int]
) -> list[Source]:
    """[Source] of what is to be live: the call's numbers, and what lies in places that held other numbers. `untraced`:
    a sentence that says why no run of the function can have any, or None. `follows`: as of Plan."""
    exact, given = state.learnt.numbers.exact, enumerate(flat.numbers)
    sources = [Source(path, core.IN_CALL, k, value, untraced or exact.get(path)) for k, (path, value) in given]
    wanted = () if untraced else state.learnt.numbers.live - exact.keys()
    for k, p in enumerate(found):
        numbers = numbers_in(p, k in follows) if p.path in wanted else []
        more = [Source(p.path + name, core.AT_PLACE, k, x, exact.get(p.path + name), part) for name, part, x in numbers]
        sources += more if any(s.exact is None for s in more) else []
    return sources


def formula(x: Any, at: int | None, place: Place | None) -> object:
    """What makes the number that this stands for anew, of what lies in `place`, at this position, and of constants. Of
    what else it comes of the recording is for the value."""
    trace, row = x.node.trace, x.node.row
    return x.node.value if trace.over or row == core.NONE else formula_of(trace, row, at, place)


def formula_of(trace, row, at, place):
    step = trace.steps[row]
    if row < len(trace.sources):
        source = trace.sources[row]
        lies_there = source[1:3] == (core.AT_PLACE, at) and source.part == core.NONE
        if place is not None and lies_there and row not in trace.exact:
            return functools.partial(lying, place)
    elif step.op == core.EQUALS:
        return step.value
    elif step.op in PYTHON:
        parts = [formula_of(trace, one, at, place) for one in (step.a, step.b)]
        if any(map(callable, parts)):
            return functools.partial(calculate, PYTHON[step.op], *parts)
    trace.pin(row)
    return step.value


def calculate(function: Callable[..., object], *parts: object) -> object:
    return function(*(part() if callable(part) else part for part in parts))


def lying(place):
    """The number that is there; while the function's own result is, what it held before."""
    now = places.value_at(place)
    return now if type(now) in (int, float) else place.want


def numbers_in(place: Place, is_followed: bool = False) -> list[tuple[str, int, int | float]]:
    """[(what follows its path, which of those here or NONE, number)] of a place with a number, a tuple of numbers and
    constants, or a container that is followed."""
    want = place.want
    if place.kind not in places.HOLD_NUMBERS:
        return []
    numbers = [("", core.NONE, want)]
    if type(want) is tuple or (is_followed and type(want) not in (int, float)):
        there = containers.open_part(want)
        found = containers.numbers_of("", want, open_parts) if there and (is_followed or not there.tensors) else []
        numbers = [(name, k, x) for k, (name, x) in enumerate(found[:MOST_PARTS])]
    return numbers if all(type(x) in (int, float) and abs(x) <= MOST for _, _, x in numbers) else []


def tap(seen: Seen, is_mine: Callable[[], bool]) -> tuple[Callable[[], object], Callable[[], object]]:
    """A bracket: the numbers of the run's plan are live in it. No stand-in is left in a place."""
    plan = seen.run.plan
    if plan is None or not (plan.numbers.sources or plan.numbers.computes):
        return lambda: None, lambda: None
    trace = seen.live = Trace(plan.numbers.sources, functools.partial(user_line, seen))
    trace.choose = functools.partial(rows.choose, seen)
    trace.give_up = functools.partial(give_up, seen) if is_capture(seen) else None
    trace.leave = lambda: leave(seen, errors.number_type(user_line(seen), CHANGING))
    held = []
    tapping = (taps.MAKERS, make), (taps.FUNCTIONS, compute), (taps.SETTERS, put)
    tapped = [tap.to(is_mine, functools.partial(handle, seen)) for tap, handle in tapping]

    def begin():
        core.numbers_watch(trace, True)
        for start, _ in tapped:
            start()
        held.extend([*lay_numbers(plan, trace), *standins.tables_in(plan, trace)])
        for place, stand_in, _ in held:
            places.put_back(place._replace(want=stand_in))

    def end():
        for _, stop in reversed(tapped):
            stop()
        core.numbers_watch(trace, False)
        trace.lent.extend((id(home), row) for _, home, _, _, one in trace.exchanged for row in standins.rows_in(one))
        for place, stand_in, mine in held:
            if places.value_at(place) is stand_in:
                places.put_back(place)
            else:
                trace.overwritten.update(mine)
        held.clear()
        trace.changed = containers.put_back(trace.exchanged)
        trace.held = dict.fromkeys(trace.held)
        for proxy, home, was, _ in trace.tables:
            if containers.holds(home, was):
                containers.restore([(home, containers.entries(proxy))])
            else:
                trace.bypassed = True
        for place in (*plan.places, *(put.place for put in plan.found.kept)):
            unwrap(trace, place)
        containers.restore([(table.proxy, containers.entries(table.home)) for table in trace.tables])
        trace.stand_ins = ()

    return begin, end


def lay_numbers(plan, trace):
    """[(place, what is to lie there instead of its numbers, rows of these), ...]. In entries of a list, a dict or an
    object that is followed they lie already."""
    mine = {}
    for row, s in enumerate(trace.sources):
        if s.op == core.AT_PLACE:
            mine.setdefault(s.at, []).append(row)
    laid = []
    for k, own in mine.items():
        place, given = plan.places[k], {trace.sources[row].path: trace.stand_ins[row] for row in own}
        trace.held[k] = containers.exchange(place.want, place.path, given, trace.exchanged, open_parts)
        for one in given.values():  # which nothing stands for: the recording is for these numbers
            pin(one)
        laid.append((place, trace.held[k], [row for row in own if type(trace.stand_ins[row]) in STAND_INS]))
    return laid


def make(seen, plain, owner, name, args, kwargs):
    """torch.tensor and as_tensor, which would look at a number: of live ones an op does the same."""
    given = args[1:] if name == "as_tensor" else ()  # torch.tensor takes these by name alone
    options = dict(zip(("dtype", "device"), given, strict=False)) | kwargs
    if seen.live.over or seen.inside or not args or options.get("requires_grad") or not is_live(args[0]):
        return plain(*args, **kwargs)
    return filled_with(args[0], options)


def compute(seen, plain, owner, name, args, kwargs):
    """A function of Python's math, of a live number."""
    trace = seen.live
    mine = any(type(x) in STAND_INS and x.node.trace is trace for x in args)
    if trace.over or not mine or len(args) != 1 + (name == "pow"):
        return plain(*args)
    if name == "pow":  # of floats, whatever it is given
        floats = [trace.step(core.AS_FLOAT, float, x) if type(x) is Int else x for x in args]
        return trace.step(core.RAISED, plain, *floats)
    return trace.step(MATH[name], plain, args[0]) if name in MATH else is_kind(trace, name, args[0])


def is_kind(trace, name, x):
    """isfinite, isnan and isinf, by comparisons: no NaN is itself, and only what is finite less itself is 0."""
    finite = name != "isnan" and trace.step(
        core.SAME_AS, operator.eq, trace.step(core.SUBTRACTED, operator.sub, x, x), 0.0
    )
    if name == "isfinite":
        return finite
    nan = not finite and trace.step(core.OTHER_THAN, operator.ne, x, x)
    return nan if name == "isnan" else not (finite or nan)


def put(seen, plain, owner, name, args, kwargs):
    """t[index] = value."""
    t, index, value = args
    if seen.live.over:
        plain(t, index, value)
    else:
        rows.put(seen, Int, plain, t, index, value)


def choose_row(seen: Seen, call: Any) -> bool:
    """A row of a tensor, by a number that C++ was told just now. Where another op comes the recording is for that
    number. `call`: ops.OpCall."""
    index, seen.live.index = seen.live.index, None
    if index is None:
        return False
    row, args = None, call.args
    if call.facts.packet == "select" and args[2] == index.node.value and not core.numbers_of_op():
        row = core.before(functools.partial(rows.choose, seen, args[0], index, args[1] % args[0].dim()))
    if row is None:
        pin(index)
        return False
    core.done([row])
    return True


def see_written(seen: Seen, written: list[torch.Tensor]) -> None:
    """An op is about to write: not to a row that was chosen, nor where it was chosen from. Eager's row is a view."""
    if any(lying_in(t, seen.live.rows_of) for t in written):
        give_views(seen, errors.row_written(user_line(seen)))


def give_views(seen, sentence):
    """Rows must be views after all: in another run, or, if that may not be, in this one, which is not recorded then."""
    seen.live.untraced = sentence
    if may_come_again(seen):
        raise Unrecordable(sentence)
    rows.as_views(seen)
    refuse(seen, sentence)


def is_live(data):
    parts = data if type(data) in (list, tuple) else (data,)
    return any(type(x) in STAND_INS for x in parts) and all(type(x) in (*STAND_INS, int, float, bool) for x in parts)


SHORT = (torch.float16, torch.bfloat16, torch.complex32)


def filled_with(data, options):
    """A tensor of live numbers; of a list of one and the same, or of several. As in eager they come as 64 bits that are
    rounded, to infinity if need be: where the type has fewer bits `full` raises, and on the GPU its kernel rounds."""
    shape, numbers = ((), [data]) if type(data) in STAND_INS else ((len(data),), data)
    whole = not any(isinstance(x, float) for x in numbers)
    dtype = options.get("dtype") or (torch.int64 if whole else torch.get_default_dtype())
    device = options.get("device")
    on_gpu = torch.device(torch.get_default_device() if device is None else device).type == "cuda"
    is_short = on_gpu and dtype in SHORT  # there .to() makes another NaN of one
    wide = torch.float64 if (dtype.is_floating_point or dtype.is_complex) and not is_short else dtype
    fill = functools.partial(torch.full, dtype=wide, device=device)
    same = all(x is numbers[0] for x in numbers)
    return (fill(shape, numbers[0]) if same else torch.stack([fill((), x) for x in numbers])).to(dtype)


def unwrap(trace, place):
    """The number itself in a place where the function put a stand-in."""
    if place.kind == places.LIST_LEN:
        for k in range(place.want, len(place.home)):
            place.home[k], rows = standins.unwrapped(place.home[k], trace.stored)
            trace.stored.setdefault((id(place.home), k), rows)
    elif place.kind in places.HOLD_NUMBERS and (now := places.value_at(place)) is not place.want:
        plain, rows = standins.unwrapped(now, trace.stored)
        if rows:
            trace.stored[id(place.home), place.key] = rows
        if plain is not now:
            places.put_back(place._replace(want=plain))


def numbers_put(seen: Seen, place: Place, k: int) -> dict[str, int]:
    """{path: number} of what came to a place, as the k-th appended if it is a list; the rest is constant."""
    if seen.live is None:
        return {}
    found = seen.live.stored.get((id(place.home), place.want + k if place.kind == places.LIST_LEN else place.key), {})
    return {pytree.ROOT + path: row for path, row in found.items() if row != core.NONE}


def stands_for(trace, then, now):
    """Is this the stand-in of a number that a place held, a tuple of such, or a blind?"""
    if type(then) is tuple and type(now) is tuple and len(then) == len(now):
        return all(was is one or stands_for(trace, was, one) for was, one in zip(then, now, strict=True))
    mine = type(now) in STAND_INS and now.node.row < len(trace.sources) and trace.sources[now.node.row].value is then
    return mine or blinds.is_one(now)


def stored_in(seen: Seen, found: list[Place]) -> list[int]:
    """Positions of these places that a number came to, or that held one that was live and were stored to: what they
    held in this call may be a constant that they do not hold in the next."""
    trace = seen.live
    if trace is None:
        return []
    came = {k for k, p in enumerate(found) if p.kind in places.HOLD_NUMBERS and numbers_put(seen, p, 0)}
    mine = [(k, s.at) for k, s in enumerate(trace.sources) if s.op == core.AT_PLACE]
    changed = {at for k, at in mine if k in trace.overwritten - trace.exact.keys()}
    changed |= {at for _, at in mine if places.value_at(found[at]) is not found[at].want}
    return sorted(came | {k for k in changed if found[k].kind in places.HOLD_NUMBERS})


def arguments(seen: Seen, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The call's arguments, with stand-ins for its numbers."""
    if seen.live is None:
        return args, kwargs
    also = {id(home) for home, _ in containers.contents([*args, *kwargs.values()])} if seen.live.tables else ()
    for place in seen.run.plan.places if also else ():
        if id(place.want) in also and type(place.want) is not tuple:
            places.put_back(place)  # no table: the function has it in its hand
    given = {s.path: x for s, x in zip(seen.live.sources, seen.live.stand_ins, strict=True) if s.op == core.IN_CALL}
    values = [containers.exchange(x, path, given, seen.live.exchanged) for path, x in containers.named(args, kwargs)]
    # Where none could be put: in a container of another kind than the one of which it was learnt.
    for one in given.values():
        pin(one)
    return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))


def note_parsed(trace, op, args, kwargs, takes):
    """The same of numbers that the parser asked for: each is the one argument of that value, or exact."""
    rows, trace.parsed, taken = trace.parsed, [], []
    for row in rows:
        value = trace.steps[row].value if row != core.NONE else None
        given = [args[k] if k < len(args) else kwargs.get(a.name) for k, a in enumerate(op._schema.arguments)]
        fits = [k for k, x in enumerate(given) if takes and type(x) is float and pytree.same_value(x, value)]
        if len(fits) == 1:
            taken.append((fits[0], core.NONE, row))
        else:
            trace.chance.update([row] if fits else [])
            trace.pin(row)
    return taken


def note(seen: Seen, op: OpOverload, facts: Any, args: Sequence, kwargs: dict, beside: bool) -> Taken:
    """Our numbers that the op under way takes at each replay; of the others that it was given the recording is for the
    value. `beside`: it runs on the host, and what is recorded is a graph."""
    taken = note_parsed(seen.live, op, args, kwargs, facts.packet in PARSES and not beside and not seen.cuts.bodies)
    takes = facts.packet in TAKES and not op._overloadname.endswith("_mode")
    plain = not takes or beside or seen.cuts.bodies or facts.draws or seen.reason is not None or seen.live is None
    for k, part, node in core.numbers_of_op():
        if plain or node.trace is not seen.live or not takes_number(op, k):
            node.plain()
        else:
            taken.append((k, part, node.row))
    return taken


@functools.cache
def takes_number(op, k):
    """Is argument k of the op a number, a list of such, or a tensor, which may be one?"""
    return str(op._schema.arguments[k].type).replace("Optional[", "").replace("List[", "").rstrip("]") in KINDS


def settle_all(seen: Seen) -> None:
    """From here on the numbers are themselves: what comes now looks at them in ways of its own."""
    if seen.live is None:
        return
    for k, _ in enumerate(seen.live.sources):
        seen.live.pin(k)
    for k, one in seen.live.held.items():
        if one is not None and places.value_at(seen.run.plan.places[k]) is one:
            places.put_back(seen.run.plan.places[k])


def close(seen: Seen, box: list) -> object:
    """The run is over: the result, alone in the box, with numbers for stand-ins, of which nobody may keep one."""
    trace, result = seen.live, box.pop()
    if trace is None:
        return result
    watch(seen)
    pin(trace.index)
    trace.index = None
    homes = {id(home) for home, _ in containers.contents([result])}
    back = [row for home, row in trace.lent if home in homes]
    for row in (*trace.parsed, *back):  # an argument that is handed out has its own numbers again
        trace.pin(row)
    result = containers.replaced(result, functools.partial(filled, seen), set())
    if trace.alive():
        collect()
    escaped = trace.alive()
    rows = [one.node.row for one in escaped]
    trace.over = True
    for one in escaped:
        replace(one, one.node.value)
    for table in filter(standins.is_kept, trace.tables):
        replace(table.proxy, table.home)
    if trace.bypassed:
        leave(seen, errors.row_written(trace.line()))
    seen.alive.objects.extend(numbers for *_, numbers in trace.tables)
    if trace.chosen and any(core.storage_id(t) in trace.chosen for t in core.alive(seen.run.returned)):
        give_views(seen, errors.row_kept())
    if trace.changed is not None:
        refuse(seen, errors.changed_arguments(trace.changed))
    if escaped:
        names = [*(source.path for source in trace.sources), READ]  # NONE: the last
        refuse(seen, errors.number_kept(names[source_of(trace, rows[0])]))
    line = looked_at(trace)
    if line is not None:
        refuse_read(seen, line)
    return result


def refuse_read(seen, line):
    """More than ops and comparisons depends on a number that was read here: the next try computes with none."""
    seen.computed = False
    refuse(seen, errors.host_read("Tensor.item", line))


def give_up(seen, line):
    """The same in the middle of a capture, whose function runs again: before it does more."""
    refuse_read(seen, line)
    raise Unrecordable(seen.reason)


def filled(seen, value):
    """Part of a result: in place of a stand-in what a replay makes of its number, or holds of one that was read. Of
    what else comes of numbers that were read the recording is for the value."""
    if type(value) not in STAND_INS:
        return value
    trace, row = value.node.trace, value.node.row
    if row in trace.hands:
        return trace.hands[row]()
    if row == core.NONE or source_of(trace, row) == core.NONE:
        return settle(value)
    number = value.node.value
    words = torch.tensor(number, dtype=torch.float64 if type(number) is float else torch.int64, device="cpu")
    seen.readouts.rows.append((pytree.Readout(words, torch.Tensor.tolist, trace.line(), row=row), None))
    return seen.readouts.rows[-1][0]


def replace(one: object, number: object) -> None:
    """Put the number where somebody keeps a stand-in: containers, variables, attributes in slots. (What a C library may
    have hidden in its own remains one, which computes as the number does.)"""
    for holder in gc.get_referrers(one):
        exchange_in(holder, one, number)


def exchange_in(holder, one, number):
    kind = type(holder)
    if kind in (dict, collections.OrderedDict):
        now = [(number if key is one else key, number if value is one else value) for key, value in holder.items()]
        containers.restore([(holder, now)])
    elif kind in (list, collections.deque, set):
        containers.restore([(holder, [number if value is one else value for value in holder])])
    elif kind is types.CellType:
        holder.cell_contents = number
    elif issubclass(kind, tuple):
        core.tuple_put(holder, one, number)
    else:
        state = getattr(holder, "__dict__", None)  # which may be no object of its own so far
        if type(state) is dict:
            state.update({name: number for name, value in state.items() if value is one})
        for cls in kind.__mro__:
            for name in vars(cls).get("__slots__", ()):
                if getattr(holder, name, None) is one:
                    setattr(holder, name, number)


def asker(codes: Iterable[types.CodeType | None]) -> str | None:
    """The line at which code among this, but for PyTorch's, can tell a stand-in from a number; or None."""
    mine = (c for c in codes if c is not None and not c.co_filename.startswith(NOT_USER_CODE))
    return next(filter(None, map(tells_apart, mine)), None)


def watch(seen: Seen) -> None:
    """Code started that can tell stand-ins from numbers: leave before it does more, if the run can come again."""
    trace = seen.live
    if len(seen.code.started) == trace.started or trace.over:
        return
    trace.started = len(seen.code.started)
    fresh = [c for c in list(seen.code.started) if c is not None and c not in trace.asked]
    trace.asked.update(fresh)
    line = asker(c for c in fresh if is_read(c))
    shown = [k for k, s in enumerate(trace.sources) if s.op != core.IN_TENSOR]  # to Python, as stand-ins
    if line is not None and any(row not in trace.exact for row in (*shown, *trace.reads)):
        leave(seen, errors.number_type(line, CHANGING))


def leave(seen: Seen, sentence: str) -> NoReturn:
    """The run came to code that tells stand-ins from numbers."""
    seen.live.untraced = sentence
    raise Unrecordable(sentence) if may_come_again(seen) else errors.CgtError(sentence)


def blame(state: State, seen: Seen, reason: str | None) -> None:
    """A run with live numbers came to nothing: the next one has none, if that helps."""
    if seen.live is None:
        return
    some = not all(k in seen.live.exact for k in range(len(seen.live.sources)))
    if some and reason is not None and state.learnt.untraced is None and not seen.again:
        remember(state, untraced=reason, blamed=reason)
        seen.again = True
    remember(state, untraced=seen.live.untraced or state.learnt.untraced)


def absolve(state: State, reason: str | None) -> str | None:
    """Why a run came to nothing. If the one before it, with live numbers, did, too, they were not to blame, and it says
    more: what is computed of them was still followed."""
    blamed = state.learnt.blamed
    if blamed is None:
        return reason
    remember(state, untraced=None, blamed=None)
    return blamed


def why_repeated(seen: Seen | None, error: BaseException) -> str | None:
    """A sentence if a run on the host that raised this is to come again with the very numbers and objects."""
    if seen is None or (isinstance(error, Exception) and not may_come_again(seen)):
        return None
    if seen.code.looked and isinstance(error, Exception):
        seen.again = True
        return errors.changed_state(min(seen.code.looked))
    if seen.live is None:
        return None
    if seen.live.untraced is None and isinstance(error, Exception):
        seen.live.untraced = errors.number_raised(f"{type(error).__name__}: {error}")
    seen.again = seen.again or seen.live.untraced is not None
    return seen.live.untraced


def may_come_again(seen: Seen) -> bool:
    """Did the run nothing, or nothing that cannot be undone?"""
    return is_capture(seen) or may_undo(seen) or may_repeat(seen)


def may_undo(seen: Seen | None) -> bool:
    """Can all be undone that a run on the host did so far?"""
    return seen is not None and seen.run.before is not None and not (seen.acts or seen.cuts.islands)


def may_repeat(seen):
    """Did the run nothing so far that a second one would do again?"""
    acts = seen.random or seen.draws or seen.acts or seen.cuts.islands
    if acts or not all(sid in seen.made for sid in seen.written):
        return False
    plan = seen.run.plan
    changed = places.find_changed(plan.places, lambda then, now: then is now or stands_for(seen.live, then, now))
    return changed is None and all(places.is_as_found(put.place) for put in plan.found.kept)


def rows_of(trace: Trace | None, row_at: dict[int, int], slot_at: dict[int, int]) -> list[tuple]:
    """The core's rows: (op, a, b, value, is it for this alone?, table). Places and slots by their rows there."""
    if trace is None:
        return []
    tables = [(numbers.buffer_info()[0], len(numbers)) for *_, numbers in trace.tables] + [None]  # NONE: none
    at = {core.AT_PLACE: row_at, core.IN_TENSOR: slot_at}
    return [
        (s.op, at[s.op][s.a] if s.op in at else s.a, s.b, s.value, k in trace.exact, tables[s.table])
        for k, s in enumerate(trace.steps)
    ]  # fmt: skip


class Told(NamedTuple):
    """For messages."""

    places: dict  # path of one in which numbers lie -> numbers_in(it)
    sources: list  # (path, the line that made it exact, or None)
    decides: dict  # row that the recording is for alone -> a sentence


def told(trace: Trace | None, plan: Plan) -> Told:
    lie = {p.path: mine for k, p in enumerate(plan.places) if (mine := numbers_in(p, k in plan.follows))}
    if trace is None:
        return Told(lie, [], {})
    sources = [(s.path, trace.exact.get(k)) for k, s in enumerate(trace.sources)]
    names = [*(s.path for s in trace.sources), READ]  # NONE: the last
    decides = {row: errors.number_decides(names[source_of(trace, row)], line) for row, line in trace.exact.items()}
    pairs = [(k, trace.steps[k].b) for k, s in enumerate(trace.sources) if s.op == core.IN_TENSOR]
    parted = {k: errors.counters_part(names[k], names[alike]) for k, alike in pairs if alike != core.NONE}
    return Told(lie, sources, parted | decides)


def source_of(trace, row):
    """A source that the row comes of; or NONE: a number that was read on the way."""
    while trace.steps[row].op > core.EQUALS:
        if trace.steps[row].op == core.AT_READ:
            return core.NONE
        step = trace.steps[row]
        row = step.b if trace.steps[step.a].op == core.EQUALS else step.a
    return row


def learn_exact(state, trace):
    """No longer live: numbers that more than ops depend on, or of which each look found another one."""
    for row, line in ({} if trace is None else trace.exact).items():
        at = source_of(trace, row)
        if at == core.NONE or trace.sources[at].exact is not None or trace.steps[row].op >= core.LESS:
            continue
        path = trace.sources[at].path
        looks = state.learnt.numbers.looks[path] = state.learnt.numbers.looks.get(path, 0) + 1
        if (row < len(trace.sources) and row not in trace.chance) or looks >= MOST_LOOKS:
            alike = [s.path for k, s in enumerate(trace.sources) if s.op == core.IN_TENSOR and trace.steps[k].b == at]
            state.learnt.numbers.exact.update(dict.fromkeys((path, *alike), line))
