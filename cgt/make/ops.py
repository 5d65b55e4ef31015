"""An op of a run: what is asked and done in front of it, how it runs, and what is noted behind it.

The observer calls `see_op` in the op's place. Its watchers are asked one after another; the order is part of what they
mean, and each row says why it stands where it does. One that answers True has dealt with the op, which ends there."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cgt_core as core
import torch
from cgt_core import CUDA

from ..cuts import apart, segments
from ..data import Seen
from ..lanes import spread
from ..look import returns
from ..look.code import note_kernels
from ..numbers import addresses, counters, live, scalars
from ..run import blank, constants, observe, tape
from ..run.devices import name_of
from ..run.tokens import how_far, see_draw
from ..words import errors, wrappers
from ..words.private import OpOverload
from . import facts as op_facts
from . import fed, packed
from .facts import COLLECTIVES, DROPOUT, INDEXES, KEEPS_SEED, OpFacts, facts_of
from .optional import collectives, forks
from .vets import host_reason, vet_effect, vet_generator, vet_gpus, vet_op

LIFTS = ("lift_fresh", "lift_fresh_copy")
MAKES = (*LIFTS, "set_")  # tensors of what comes from outside


class OpCall:
    """An op on its way through the watchers. It changes with each: they leave here what those behind them ask for."""

    reads, dynamic = False, False  # does what it does, does the shape of its result depend on values?
    values = None  # that Python reads here, and how it comes by them
    constant = False  # is its result the same in each replay?
    counts = False  # does it only count, on the host, what counters follow?
    tells = False  # does it only tell the outcome of a comparison, or go on if that is true?
    made_of: Callable | None = None  # what makes its results of other ops, in a capture: what it reads is known
    apart, between = False, False  # can no graph hold it, and does it run between two segments therefore?
    for_real = False  # does it run on real memory in a capture?
    draws, aside = False, False  # does it draw on the host, and beside the graph?
    numbers = ()  # live numbers among its arguments: see live.note
    movable = ()  # addresses in it that replays will be told
    before, end = None, 0  # the length of the graph around it
    repeats = False  # may it be captured again?
    usual = False  # see facts.usual_inputs
    instead = None  # tensors with which the op runs; None: its own
    counted = ()  # where it wrote copies: (input, its version as the kernel counts)
    written: Sequence = ()  # the inputs that it writes
    known: Any  # storages of its inputs
    outside = False  # is some of this memory from outside?
    results: list
    fresh: list  # which of the results are new memory

    def __init__(self, facts: OpFacts, args: tuple, kwargs: dict):
        self.facts, self.op = facts, facts.op
        self.args, self.kwargs = args, kwargs  # as the op runs: a watcher may exchange arguments
        self.inputs = tensors_of(self)  # none exchanged
        self.generator = kwargs.get("generator")  # what it draws from


def tensors_of(call):
    """Those with which the op runs."""
    return observe.tensors_in((*call.args, *call.kwargs.values()) if call.kwargs else call.args, [])


def with_all(change, args, kwargs):
    """The op's arguments, all changed at once: what is one tensor stays one."""
    done: dict = {}
    args = change(args, done)
    return args, dict(zip(kwargs, change([*kwargs.values()], done), strict=True)) if kwargs else kwargs


class Watcher(NamedTuple):
    """A row of the pipeline."""

    look: Callable  # (seen, call) -> True: the op is dealt with
    why_here: str
    of: Callable | None = None  # (op, facts) -> is it asked of this op? None: of all
    when: Callable | None = None  # seen -> is it asked in this run, from its begin to its end? None: in all


def see_op(seen: Seen, op: OpOverload | None, args: tuple, kwargs: dict) -> None:
    """One op. `op` is None where a dispatch mode will see it instead of us."""
    if op is None:
        return observe.refuse(seen, errors.mode_inside(observe.user_line(seen)))
    if seen.live is not None:
        live.watch(seen)
    watchers = seen.watch.of_op.get(id(op)) or choose_watchers(seen, op)
    if watchers[0].namespace in constants.KNOWN:
        watch_op(seen, watchers, args, kwargs)
    else:
        note_kernels(seen.code.started, functools.partial(watch_op, seen, watchers, args, kwargs))


def watch_op(seen, watchers, args, kwargs):
    facts, of_others, of_usual = watchers
    if seen.inside or facts.namespace == "profiler":
        core.proceed(None)
        return
    call = OpCall(facts, args, kwargs)
    call.known = op_facts.usual_inputs(seen, call.inputs) if facts.usual else None
    call.usual = call.known is not None
    if not call.usual and op_facts.is_of_shapes(call):
        core.proceed(None)
        return
    before, behind = of_usual if call.usual else of_others
    for look in before:
        if look(seen, call):
            return
    try:
        call.results = proceed(seen, call)
        for look in behind:
            look(seen, call)
    except BaseException:
        spread.give_up(seen)
        raise


# --- in front of the op --------------------------------------------------------------------------


def note_op(seen, call):
    """For the comparison with another run."""
    seen.run.ops.append(op_facts.noted(seen, call))


def note_autograd(seen, call):
    """What autograd has read for the last time; whether others save beside us."""
    if seen.autograd.spent:
        spend(seen)
    if seen.run.saves and core.save_hooks() > 1:
        seen.hooked = True  # a checkpoint's, say, beside ours


def meet_inputs(seen, call):
    """Parameters that other processes have a part of; numbers of which C++ made tensors."""
    if seen.ranks.parallel:
        collectives.see_tensors(seen, call.inputs)
    # In autograd's nodes, what a graph from outside saved may be another number each time.
    if not core.is_in_node():
        for t in filter(core.is_lone, call.inputs):
            see_number(seen, t)


def pass_by(seen, call):
    """A warm-up that asks nothing else of its ops."""
    if observe.asks_on(seen):
        return False
    seen.devices.update(t.device for t in (*call.inputs, *core.proceed(None)))
    return True


def unmask(seen, call):
    """An index by a mask that was read becomes one by numbers."""
    if not (call.facts.packet in op_facts.INDEX_PUT and segments.fills(*call.args)):
        call.args = segments.unmask(seen, call.args)
        call.inputs = tensors_of(call)


def count_values(seen, call):
    """bincount makes more places than it is told where a number is larger; that none is, is read."""
    x, weights, most = (*call.args, None, 0)[:3]
    for *_, node in core.numbers_of_op():
        node.plain()  # how many places there are is for this number alone
    if weights is not None or not most or x.dim() != 1 or x.dtype not in segments.INDEXES or seen.reason is not None:
        return False
    made = core.before(functools.partial(segments.counted, x, most))
    if made is not None:
        core.done([made])
    return made is not None


def make_from_outside(seen, call):
    """A tensor of Python's values, or one over a storage."""
    if call.facts.packet in LIFTS:
        see_constant(seen, call.inputs[0])
        return True
    if not seen.cuts.bodies and op_facts.is_alias_made(seen, call):
        (t,) = core.proceed(None)  # what set_ returns is another tensor over memory that may be from outside
        if core.storage_id(t) in seen.copied.swaps:
            observe.refuse(seen, errors.replaces_memory(str(call.op), observe.user_line(seen)))
        else:
            observe.touch(seen, t)
        return True
    return False


def find_written(seen, call):
    """The inputs that it writes."""
    seen.exchanges = seen.exchanges or call.facts.namespace in COLLECTIVES
    call.written = op_facts.written_by(call)


def find_numbers(seen, call):
    """Live numbers among the arguments."""
    if call.written:
        live.see_written(seen, call.written)
    on_host = seen.run.driver == CUDA and op_facts.is_hosts(call)
    call.numbers = live.note(seen, call.op, call.facts, call.args, call.kwargs, on_host)


def judge(seen, call):
    """Is it constant? Does it only count? Does it draw beside the graph? Can no graph hold it?"""
    facts, inputs = call.facts, call.inputs
    call.constant = not call.numbers and constants.is_constant(seen, facts, inputs)
    call.counts = (facts.reads or call.written) and counters.passes(seen, facts, call.args, inputs, call.written)
    call.aside = seen.run.driver == CUDA and op_facts.is_aside(seen, call)
    call.apart = bool(seen.run.apart or facts.packet in apart.KNOWN) and apart.is_one(seen, call)


def read_index(seen, call):
    """C++ asks a tensor for its number. Is it to index with it (`table[t]`), and may the number be any? Then this op
    reads nothing, and the next one chooses by the number (choose_row)."""
    (t,) = call.inputs
    if not (call.constant or call.counts or t.dim()) and (frame := observe.asker()) and returns.is_at_entry(frame):
        number = segments.read_number(seen, t, is_index=True)
        call.constant = number is not None
        if call.constant and seen.run.recording:
            seen.live.index = number


def find_values(seen, call):
    """Does it read values, and which?"""
    facts, inputs = call.facts, call.inputs
    # Whether a check raises is the tape's own affair.
    call.reads = facts.reads or (facts.checks and seen.run.driver == CUDA)
    call.dynamic = op_facts.is_dynamic(call) and not seen.reads.behind
    asks = call.reads or call.dynamic or op_facts.is_to_host(call)
    asks = asks and not (call.constant or call.counts)
    into = facts.dynamic and call.written  # a replay would not write there
    if asks and facts.pure and not into:
        call.values = segments.values_of(seen, inputs)
    call.tells = asks and call.values is None and segments.tells(seen, facts.packet, inputs)
    call.constant = call.constant or call.values is not None or (call.tells and not facts.draws)
    if call.tells and facts.draws:
        call.made_of = functools.partial(segments.sample, seen, *call.args, call.generator)
    elif asks and not call.constant and facts.packet == "masked_select" and not into:
        call.values = segments.values_of(seen, inputs[1:])
        call.made_of = functools.partial(segments.select, seen, *inputs) if call.values is not None else None
    if call.made_of is not None:
        call.reads = call.dynamic = False  # of what is known


def vet(seen, call):
    """Refuse what a replay could not repeat."""
    if not call.counts:
        vet_op(seen, call)
    if call.apart and not call.constant and (call.written or not segments.may_end(seen)):
        observe.refuse(seen, host_reason(seen, errors.op_apart, call.op))
    if seen.cuts.bodies:
        forks.vet_op(seen, call)


def touch_inputs(seen, call):
    """Memory, devices and generators that it works on."""
    if call.usual:
        seen.devices.add(call.inputs[0].device)
    else:
        call.known = set(map(core.storage_id, call.inputs))
        seen.devices.update(t.device for t in call.inputs)
    call.outside = not call.known <= seen.made.keys()
    for t in call.inputs if call.outside else ():
        observe.touch(seen, t)
    if call.generator is not None:
        seen.generators.given[core.generator_id(call.generator)] = call.generator


def save_written(seen, call):
    """What it writes, which a replay that goes another way puts back."""
    if call.written and (seen.run.until or seen.run.before is not None):
        segments.save(seen, call.written)
    seen.written.update(map(core.storage_id, call.written))


def exchange_inputs(seen, call):
    """It works on copies of arguments, and finds a seed where it looks for it."""
    if call.facts.packet in KEEPS_SEED:
        seen.seeds = True
        call.instead = None if seen.run.recording else op_facts.seeds_on_host(call.op, call.args, call.kwargs)
    if call.facts.absolute and op_facts.counts_inside(call):
        seen.copied.whole.add(core.storage_id(call.inputs[0]))
    elif call.facts.absolute and core.storage_id(call.inputs[0]) not in seen.made:
        seen.raw.add(core.storage_id(call.inputs[0]))
        if core.storage_id(call.inputs[0]) in seen.copied.swaps:
            observe.refuse(seen, errors.absolute(str(call.op), observe.user_line(seen)))
            return  # on the user's own memory: it ran for real
    if seen.copied.swaps and not fed.is_view(seen, call):
        fed.wait_for(seen, call)
        call.args, call.kwargs = with_all(functools.partial(observe.exchange, seen), call.args, call.kwargs)
        call.instead = tensors_of(call)


def find_movable(seen, call):
    """Addresses in it that replays will be told."""
    movable = addresses.touched(seen, call.instead) if call.instead else ()
    if movable and not observe.is_capture(seen):
        addresses.note(seen, call.op, movable)
    else:
        call.movable = movable


def choose_memory(seen, call):
    """In a capture: does it run for real? And are numbers of the host's brought to the GPU before it?"""
    at_once = call.reads or call.facts.dynamic or call.apart
    call.for_real = call.constant and (at_once or op_facts.is_to_host(call))
    if not call.for_real and op_facts.brings_to_gpu(call):
        call.args, call.kwargs = (constants.on_device(seen, given) for given in (call.args, call.kwargs))
        call.instead = tensors_of(call)


def begin_draw(seen, call):
    """A draw on the host."""
    drawn = call.generator if call.generator is not None else torch.default_generator
    call.draws = drawn.device.type == "cpu"
    if call.draws:
        see_draw(seen, drawn, after=False)


def read_values(seen, call):
    """A segment ends where Python reads."""
    if call.tells:
        call.values = segments.outcome(seen, call.facts.packet, call.args, call.inputs)
    if call.values:
        segments.read(seen, call.values)


def has_numbers(seen):
    return seen.live is not None


JUDGES = (meet_inputs, judge, vet, choose_memory)  # who need not be asked of an op that is usual
BEFORE = (
    Watcher(note_op, "it may be none that the others deal with", when=lambda seen: seen.run.ops is not None),
    Watcher(note_autograd, "spent memory is free for results", when=lambda seen: seen.autograd.spent or seen.run.saves),
    Watcher(meet_inputs, "numbers that it makes known are constants", when=lambda seen: seen.run.driver == CUDA),
    Watcher(
        pass_by,
        "a warm-up that asks nothing needs none of what follows",
        when=lambda seen: not seen.run.recording and seen.run.graph is None,
    ),
    Watcher(live.choose_row, "what a number chooses is made by another op", when=has_numbers),
    Watcher(count_values, "it is made of others", lambda op, facts: facts.packet == "bincount"),
    Watcher(unmask, "it gives the op other arguments", lambda op, facts: facts.packet in INDEXES),
    Watcher(make_from_outside, "what it makes has no inputs to be looked at", lambda op, facts: facts.packet in MAKES),
    Watcher(find_written, "all that follows asks what is written", op_facts.may_write),
    Watcher(counters.see, "no other watcher may take a count for a read", when=has_numbers),
    Watcher(find_numbers, "an op with live numbers is not constant", when=has_numbers),
    Watcher(judge, "it asks for writes and numbers"),
    Watcher(read_index, "what is constant or counted is none", lambda op, facts: facts.packet == "_local_scalar_dense"),
    Watcher(find_values, "what is constant, or only counted, is not asked for", op_facts.may_ask),
    Watcher(vet, "a constant is refused nothing; memory of an op that is refused is none that is touched"),
    Watcher(touch_inputs, "it knows the user's tensors, not their copies"),
    Watcher(save_written, "the user's tensors, still; what was touched is known", op_facts.may_write),
    Watcher(exchange_inputs, "from here on arguments are those with which the op runs"),
    Watcher(find_movable, "addresses are those of the copies", when=lambda seen: seen.copied.movable),
    Watcher(choose_memory, "what is brought to the GPU takes the place of what was exchanged", when=observe.is_capture),
    Watcher(begin_draw, "the generator right in front of the op, behind others' own", lambda op, facts: facts.draws),
    Watcher(read_values, "the segment ends right in front of the op", op_facts.may_ask),
    Watcher(spread.enter, "nothing but the op is launched on its lane", spread.may_go, spread.is_wanted),
)


# --- the op --------------------------------------------------------------------------------------


def proceed(seen, call):
    """Run the op, in one of the ways that there are; its results."""
    if call.made_of is not None and observe.is_capture(seen):
        return call.made_of()
    if call.for_real:
        return constants.read(seen, call.inputs)
    if call.apart and seen.run.recording and not call.constant and seen.reason is None:
        call.between = True
        return apart.record(seen, call.op, call.args, call.kwargs)
    if not call.usual and observe.is_capture(seen) and packed.is_one(call.op, call.args, call.kwargs):
        return packed.record(call.op, call.args, call.kwargs)
    return run_told(seen, call) if call.numbers or call.instead else run_op(seen, call)


def run_op(seen, call):
    """The op itself; which one failed is remembered."""
    try:
        return core.proceed(call.instead)
    except Exception as error:
        apart.learn(seen, call, error)
        raise


def run_told(seen, call):
    """The same of an op in which are live numbers or copies of arguments: with what is asked of it later."""
    call.before = core.graph_length() if (call.numbers or call.movable) and observe.is_capture(seen) else 0
    moved = how_far(seen) if call.movable and call.facts.draws else None
    pairs = zip(call.inputs, call.instead, strict=True) if call.written and call.instead else ()
    copies = [(t, one, core.version_of(t) - core.version_of(one)) for t, one in pairs if t is not one]
    results = run_op(seen, call)
    call.end = core.graph_length() if call.movable else 0
    call.counted = [(t, core.version_of(one) + ahead) for t, one, ahead in copies]
    # Not what counts somewhere, a collective or a draw, whose op did: it would do so again.
    call.repeats = call.facts.namespace in constants.KNOWN and (moved is None or how_far(seen) == moved)
    return results


# --- behind the op -------------------------------------------------------------------------------


def unwrap(seen, call):
    """A collective may hand out what waits when it is used."""
    call.results = [part for t in call.results for part in wrappers.plain_inside(t)]


def tell_numbers(seen, call):
    """Where in the graph the live numbers are, and the addresses."""
    op, args, kwargs, numbers = call.op, call.args, call.kwargs, call.numbers
    if (
        numbers
        and observe.is_capture(seen)
        and (call.before is None or not scalars.record(seen, op, args, kwargs, numbers, call.before))
    ):
        for _, _, row in numbers:  # the recording is for these numbers alone after all
            seen.live.pin(row)
    if call.movable and call.repeats:
        told = {row: seen.live.steps[row].value for *_, row in numbers}
        given = scalars.substitute(op, args, kwargs, numbers, told) if numbers else (args, kwargs)
        addresses.record(seen, op, *given, call.before, call.end, call.movable)
    elif call.movable:
        addresses.stay(seen, call.movable)


def may_draw(op, facts):
    """From a generator, or from what only the op knows."""
    takes = any(argument.name == "generator" for argument in op._schema.arguments)
    return facts.draws or takes or facts.packet in DROPOUT or facts.namespace not in constants.KNOWN


def end_draw(seen, call):
    """What it drew, and from where."""
    op, packet = call.op, call.facts.packet
    seen.draws, seen.random = seen.draws or call.draws, seen.random or call.facts.draws
    acts = call.facts.namespace not in constants.KNOWN or (call.facts.draws and call.generator is not None)
    seen.acts = seen.acts or acts
    if call.draws:
        see_draw(seen, call.generator if call.generator is not None else torch.default_generator, after=True)
    if packet in DROPOUT:
        see_dropout(seen, packet, *(call.args[k] for k in DROPOUT[packet]))
    if call.generator is not None:
        vet_generator(seen, op, call.generator, [*call.results, *call.written])


def note_fresh(seen, call):
    """The results that are new memory, and where the user called what made or wrote it."""
    if not all(map(core.is_plain, call.results)):
        note_odd(seen, call)
    if call.facts.views and not call.inputs:  # of a number, of which C++ made a tensor: its memory is not ours
        seen.alive.objects.extend(map(core.alias, call.results))
        call.fresh = []
    else:
        call.fresh = [t for t in call.results if core.storage_id(t) not in call.known]
    if not call.fresh:
        vet_effect(seen, call.op, call.facts, call.written)
    if seen.cuts.bodies:
        forks.note_made(seen, call.fresh)
    if call.facts.namespace == "_c10d_functional" and collectives.DRIVERS:
        collectives.note_pending(seen, call.op, call.inputs, call.fresh)
    line = observe.user_line(seen) if call.fresh or (call.written and seen.run.recording) else ""
    if line and seen.run.recording:
        seen.trail.append((call.op, line))
    for t in call.fresh:
        moved = t.is_cuda and not call.usual  # perhaps to another GPU
        if moved and (strange := vet_gpus(seen, call.op, call.inputs, [t])) is not None:
            observe.refuse(seen, strange)
        observe.note_memory(seen, t, line)
        seen.devices.add(t.device)
        if seen.run.driver == CUDA and t.is_cpu:
            seen.host.made[core.storage_id(t)] = core.storage_name(t)
            held = not call.facts.draws and all(op_facts.is_guarded(seen, one) for one in call.inputs)
            # Seed and offset lie on the device in a capture.
            call.constant = call.constant or call.facts.packet in KEEPS_SEED or (held and not call.aside)


def note_odd(seen, call):
    """Results that are no plain tensors: zeros, which are no memory, and what no recording can hold."""
    zeros = [t for t in call.results if op_facts.is_zeros(t)]
    for t in zeros:
        observe.note_memory(seen, t)
    call.known = {*call.known, *map(core.storage_id, zeros)}
    odd = op_facts.odd_kind(t for t in call.results if not op_facts.is_zeros(t))
    if odd is not None:
        observe.refuse(seen, errors.layout(str(call.op), observe.user_line(seen), odd))


def note_constant(seen, call):
    """Memory that nobody wrote, memory that is the same in each replay, and what is drawn beside the graph."""
    if (seen.blank or call.facts.packet in blank.EMPTY) and observe.is_host_recording(seen):
        strange = blank.see(seen, call.facts, call.inputs, call.written, call.fresh)
        if strange is not None:
            observe.refuse(seen, strange)
    if call.constant or seen.constants.memory or seen.reads.known:
        constants.note(seen, call.op, call.args, call.kwargs, call.constant, call.fresh, call.written, call.for_real)
    if call.aside:
        seen.host.drawn.update(map(core.storage_id, call.fresh))


def put_on_tape(seen, call):
    """The host's tape has each op that is no view; a capture's, what is drawn beside the graph."""
    op, args, kwargs, results, fresh = call.op, call.args, call.kwargs, call.results, call.fresh
    if not ((call.aside and fresh) if seen.run.driver == CUDA else (seen.reason is None and not call.between)):
        return
    seen.alive.memory.extend(fresh)  # a freed storage's address could come back
    if call.facts.reshapes or not (fresh or call.written or not results):
        return
    if fresh and len(fresh) != len(results):
        observe.refuse(seen, errors.odd_op(str(op), observe.user_line(seen)))
        return
    if (now := core.ambient()) != (then := seen.run.plan.ambient):
        # By these kernels choose their way, and a replay has those of its caller.
        flags, numbers, precisions = (a ^ b for a, b in zip(now, then, strict=True))
        if flags & 0xFF00 or numbers >> 16 or precisions:
            observe.refuse(seen, errors.changed_state("a mode or setting of torch"))
    try:
        if call.outside:
            args, kwargs = with_all(functools.partial(observe.fix, seen), args, kwargs)
        tape.append(op, args, kwargs, fresh)
        for k, part, row in call.numbers:
            core.scalar(row, seen.live.steps[row].value, k, part)
    except Exception as error:  # an argument without a boxed form: the op ran, so go on eagerly
        observe.refuse(seen, errors.untaped_op(str(op), observe.user_line(seen), str(error)))


def mirror_written(seen, call):
    """What was written in a copy is written in the user's memory. Where a kernel counts that itself, so do we."""
    mirror(seen, call.written)
    for t, version in call.counted:
        torch.autograd.graph.increment_version([t] * max(0, version - core.version_of(t)))


BEHIND = (
    Watcher(unwrap, "the others take plain tensors", lambda op, facts: facts.namespace in COLLECTIVES),
    Watcher(
        tell_numbers,
        "the graph ends with the op's own nodes",
        when=lambda seen: seen.copied.movable or has_numbers(seen),
    ),
    Watcher(end_draw, "the generators are as the op left them", may_draw),
    Watcher(note_fresh, "what is no input is new"),
    Watcher(spread.leave, "what is new is its lane's", spread.may_go, spread.is_wanted),
    Watcher(note_constant, "new memory has its name"),
    Watcher(put_on_tape, "what is refused by now is on no tape", when=lambda seen: seen.run.recording),
    Watcher(mirror_written, "the tape has the op whose writes are copied", when=lambda seen: seen.copied.swaps),
)


def choose_watchers(seen, op):
    """(the op's facts, who is asked of it in this run, and who if it is usual): watchers in front of it and behind."""
    if not seen.watch.asked:
        seen.watch.asked.extend(row.when is None or bool(row.when(seen)) for row in (*BEFORE, *BEHIND))
    seen.watch.of_op[id(op)] = found = (facts_of(op), *watchers_of(op, tuple(seen.watch.asked)))
    return found


@functools.cache  # which keeps the op, and so its id
def watchers_of(op, asked):
    """The watchers that are asked of this op in such a run, and those if it is usual: (in front, behind)."""

    def chosen(rows, asked):
        pairs = zip(rows, asked, strict=True)
        return tuple(row.look for row, yes in pairs if yes and (row.of is None or row.of(op, facts_of(op))))

    before, behind = chosen(BEFORE, asked[: len(BEFORE)]), chosen(BEHIND, asked[len(BEFORE) :])
    return (before, behind), (tuple(look for look in before if look not in JUDGES), behind)


# --- single mechanisms ---------------------------------------------------------------------------


def see_dropout(seen, packet, dropout, train, buffer):
    """cuDNN's recurrent layers are handed its buffer of random state, if there is one, and read it if they drop."""
    if dropout and train and op_facts.is_elsewhere(seen, buffer):
        observe.refuse(
            seen, errors.spread_draws(packet, observe.user_line(seen), buffer.device, name_of(seen.run.device))
        )
    elif not (dropout and train):
        if buffer is not None and not seen.generators.dropout:
            seen.touched.pop(core.storage_id(buffer), None)
    elif packet == "_cudnn_rnn":
        seen.acts, seen.generators.dropout[:] = True, [core.alias(buffer)]
        seen.alive.objects.extend(seen.generators.dropout)


def mirror(seen: Seen, written: list[torch.Tensor]) -> None:
    """A copied slot was written through its buffer: bring the user's memory up to date. Where that is done behind all
    else, only on the host, where code may look meanwhile."""
    for t, row in [(one, row) for one in written for row in copies_of(seen, one)]:
        sid, carries = core.storage_id(row.leaf), id(row.leaf) in seen.run.plan.carries
        # What is written is known by its storage.
        known = seen.copied.carried if carries else seen.copied.mirrored
        known.update(id(one.leaf) for one in seen.copied.swaps[sid])
        seen.written.add(sid)
        if carries and observe.is_capture(seen):
            continue
        # An argument may lie in another one's copy, and have bytes there that are gaps of that one's.
        at = core.address(t) - (core.address(row.buffer) if core.storage_id(t) in seen.copied.buffers else row.lo)
        whole = at >= 0 and at + core.span(t) <= row.hi - row.lo
        like, shift = (t, at) if whole else (row.leaf, 0)
        to, source = (core.view_like(base, like, shift) for base in (row.leaf, row.buffer))
        torch.ops.aten.copy_.default(to, source)
        if observe.is_host_recording(seen) and not carries:
            tape.copy_into(observe.fix(seen, to), source)
    if seen.copied.shared:
        renew_shared(seen, written)


def copies_of(seen, t):
    """[Swap] of the copied slot in whose copy t lies, or of all that it may have to do with."""
    sid = core.storage_id(t)
    if sid in seen.copied.buffers:
        return [seen.copied.buffers[sid]]
    row = observe.swap_of(seen, t)
    return [row] if row is not None else seen.copied.swaps.get(sid, [])


def renew_shared(seen, written):
    """Copies of what shares bytes with a tensor that was written, though no run before had done so. From the next
    recording on they are where they are."""
    for t in written:
        mine = copies_of(seen, t)
        lo, hi = (mine[0].lo, mine[0].hi) if mine else (core.address(t), core.address(t) + core.span(t))
        for row in seen.copied.shared:
            if all(row is not one for one in mine) and row.lo < hi and lo < row.hi:
                observe.fill(row.buffer, row.leaf)
                seen.again = True
                observe.refuse(seen, errors.shared_and_written(observe.user_line(seen)))


def see_constant(seen, t):
    """torch.tensor(...) of Python values: the values are guarded, the memory is new every time."""
    core.proceed(None)
    if observe.is_capture(seen) and t.is_cuda and t.numel():
        (t,) = constants.renew(seen, [t])
    observe.note_memory(seen, t, observe.user_line(seen))
    if seen.cuts.bodies:
        forks.note_made(seen, [t])
    constants.add(seen, t)
    seen.devices.add(t.device)
    if observe.is_host_recording(seen):
        value = t.clone()
        seen.alive.memory.append(core.alias(t))
        seen.alive.objects.append(value)
        tape.copy_into(t, value)


def see_number(seen, t):
    """One that C++ made of Python's numbers: TorchScript does so, and shows it to nobody. (A module of TorchScript,
    which could keep one, is none that is recorded.)"""
    sid = core.storage_id(t)
    if sid in seen.run.slots or sid in seen.host.made:
        return
    observe.note_memory(seen, t, observe.user_line(seen))
    seen.alive.objects.append(core.alias(t))
    seen.host.made[sid] = core.storage_name(t)
    constants.add(seen, t)


def spend(seen):
    """Let go of what autograd has read for the last time: a result of the path, or the copy of an argument.
    A run under way may still hold some of it."""
    leaves = seen.run.graph.leaves
    for at in sorted(leaves.read):
        memory, uses = seen.autograd.spent[at]
        if observe.holders(memory) > uses:
            continue
        del leaves.left[at]
        leaves.read.remove(at)
        leaves.gone.add(at)
        try:
            if len(memory) == 1:
                core.spend(memory[0])
            else:
                core.storage_empty(memory[1])
        except core.DriverError as error:
            observe.refuse(seen, errors.recording_failed(error.args[1], ""))
        spread.let_go(seen)
