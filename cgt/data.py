"""What a miss works on, declared: read this first. A call that no recording takes goes one way,

    Call ── prepare ──► Plan ── the run, observed ──► Seen ── describe, autograd ──► Draft ── settle ──► node

and each of these is made once, whole, and read by name. The fields of a NamedTuple never change; the containers in one
may fill, and belong to the mechanism that it names. What else changes is a dataclass with slots: `State` is what stays
of a function between its misses, `Seen` what one run shows, `Attempt` what must be undone if one recording fails."""

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, dataclass_transform

from cgt_core import NONE

from .words import options
from .words.pytree import Flat


@dataclass_transform(field_specifiers=(dataclasses.field,))
def declared(record: type) -> Any:
    """A record whose fields change. By identity: no two are ever the same thing."""
    return dataclasses.dataclass(record, slots=True, eq=False, repr=False)


def fresh(kind: Callable[[], object]) -> Any:
    """A field that begins as kind()."""
    return dataclasses.field(default_factory=kind)


@functools.cache
def maker_of(record: Any) -> Callable[[], Any]:
    """Makes such a record. What has no other value to begin with is a container, or a record of such."""
    kinds = [kind for name, kind in record.__annotations__.items() if name not in record._field_defaults]
    kinds = [maker_of(kind) if hasattr(kind, "_fields") else kind for kind in kinds]
    rest, new = [*record._field_defaults.values()], tuple.__new__
    return lambda: new(record, [kind() for kind in kinds] + rest)


# --- of a function ----------------------------------------------------------------------------


class Account(NamedTuple):
    """Does recording pay? account.py writes it."""

    met: dict  # kinds of calls that came so far, oldest first: (spec, ...) -> id of whose method, or None
    eager: list  # seconds of the fastest eager call, once there was one
    spent: float = 0.0  # seconds, on warming and recording
    last: float = 0.0  # of these, on the last of them
    strange: int = 0  # calls in a row that were of a new kind
    varies: str | None = None  # the argument that was another one at each of these, if that is known
    failed: int = 0  # recordings in a row that came to nothing
    why: str | Any = None  # the reason of the last of these; None before the first
    patience: int = options.PATIENCE  # so many calls alike are heard in spite of debts


class Verdict(NamedTuple):
    """Calls of one kind run eagerly."""

    reason: str
    until: int  # calls of the function
    length: int  # of the cool-down, in calls


class Options(NamedTuple):
    """Of cgt.jit; see its docstring."""

    static: tuple[tuple, tuple]  # (positions, names)
    max_records: int | None  # None: as many as options.HOPES says
    max_graphs: int
    outputs: str
    inputs: str
    dynamic: tuple  # names of arguments that are live from the beginning
    audit: "Audits | Any"  # None: no replay is compared
    memory_budget: int | None  # bytes, of the whole process
    pad: tuple = ()  # of padding.parse
    parallel: str = "never"  # of options.PARALLELS


class Audits(NamedTuple):
    """Which replays are compared with eager, see audit.py."""

    first: int  # of each recording
    every: int  # so many replays of it; 0: none
    doubling: int = 0  # 1: and the 4th, 8th, 16th ... of it
    rtol: float = 0.0  # as of torch.allclose
    atol: float = 0.0


class NotedOp(NamedTuple):
    """An op of a run that is to be compared with another one."""

    op: str
    line: str
    operands: tuple  # of str


LIVE_NUMBER = "a number that changes"  # such an operand


class Moving(NamedTuple):
    """What a function's calls showed of tensors that change, by path: of arguments, of what they reach, of places."""

    pointers: dict  # path of an argument, or of what it reaches -> its last address
    swaps: dict  # of these, those that move, and are copied -> (how often soon after the last time, in which call last)
    written: set  # those that the function writes; None: a tensor that has no path
    fixed: set  # those of which somebody may have the address
    untold: set  # those that are copied: a recording that was told where they lie was not what eager is
    followed: set  # of places in which other tensors came
    replaced: set  # of these, to which it stores them itself
    hidden: dict  # path of a place -> may it store another object there before it looks at that? (blinds.py)
    grown: dict  # of a place to which it stored other shapes -> those there at the last look, or None
    loose: dict  # memory that a recording read while other threads ran ops, to which nothing leads: id -> its name
    fed: set  # those on the host that it brings to the GPU


class Numbers(NamedTuple):
    """What a function's calls showed of numbers."""

    live: set  # paths of those that are others at each call: arguments, and what lies in places
    exact: dict  # of these, those that more than its ops depend on -> the line
    looks: dict  # path -> recordings for one value of what comes of it
    last: dict  # path of an argument -> the last number that Python saw there
    counters: set  # paths of tensors of the host's that it counts in and asks for their numbers
    asked: set  # the same by memory, of runs that do not know paths
    acts: set  # drivers on which it did what no run of the host's undoes: custom ops, draws from a generator of its own


class Devices(NamedTuple):
    """Where a function's calls work."""

    drivers: dict  # kinds of device among the arguments -> driver, once warmed
    homes: dict  # of devices.learn_home
    gpus: set  # on which one call works, if it is several
    parallel: weakref.WeakSet  # modules in it that exchange gradients in a backward


class Learnt(NamedTuple):
    """What a function's calls showed, until a reset: a value. `remember` puts another one in its place."""

    moves: Moving
    numbers: Numbers
    devices: Devices
    account: Account
    programs: dict  # spec -> (program, path of each of its ops); filled by the core
    verdicts: dict  # (spec, ambient state, shapes), or None for all -> Verdict
    cool: dict  # (path, parent) -> (until, length), where there are enough recordings
    refused: list  # why calls with gradients run eagerly: the last reason, if there is one
    apart: set  # ops that a capture forbade: they run eagerly between two graphs
    passed: set  # code objects that were met and did not run
    unguarded: list  # sentences on what could not be guarded
    waste: tuple = (NONE, 0)  # (replays, recordings wasted) when the last new replay was noticed
    late: int = 0  # so many values it reads until the last behind a write to memory from outside
    incomparable: int = 0  # calls in a row with arguments that cannot be compared
    saves: bool = False  # a result required grad
    doubted: bool = False  # a warm-up came to nothing
    strangers: int = 0  # warm-ups that read values which had not come before
    watched: bool = False  # the run before took nothing from iterators and files
    left: int = 0  # calls that an exception left while they were looked at, since the last recording
    lessons: int = 0  # recordings since then that came to nothing and should fare better next time
    escapes: int = 0  # recordings of which something outlived the call
    computes: bool | None = None  # with numbers that it reads on the way; False: it looks at them in other ways, too
    untraced: str | None = None  # why none can be
    blamed: str | None = None  # the same, where that is only to be tried
    whole: bool = False  # its last recording is one graph, of which nothing ran while it was recorded
    joined: tuple = (-1, 0)  # replays when others joined them last, and how often they did since
    asks_which: bool = False  # it is not the same to it which tensor lies in a place
    recurrent: bool = False  # it draws dropout from cuDNN's random state
    hidden: bool = False  # kernels that are not seen read arguments where they lie: none is copied
    exchanges: bool = False  # data with other processes


@declared
class State:
    """Everything that Python knows about one jitted function; what `jit` returned holds it. It changes with each miss
    and stays the same thing: recordings, reports and other threads lead to it."""

    f: int  # its row in the core
    born: int  # tells the row from a later one of that number
    name: str
    opts: Options
    graph: "Graph | None" = None  # what it runs, if it is the backward of a recording
    range: str = ""  # what profilers show around a replay; kept for the row
    dynamic: set = fresh(set)  # paths of arguments that the user says are live
    keep: dict = fresh(dict)  # node -> Kept
    proven: bool = False  # the graph that it runs read only what belongs to its call
    learnt: Learnt = fresh(maker_of(Learnt))
    ran: set = fresh(set)  # code objects that ran so far: what these read is looked at
    reasons: dict = fresh(dict)  # why calls ran eagerly -> how many did
    past: list = dataclasses.field(default_factory=lambda: [0] * 10)  # counters of freed backwards
    blockers: dict | None = None  # doctor.py: all that its runs met
    warned: bool = False  # of calls of which none was replayed
    unaudited: str | None = None  # why the last replay that was to be compared with eager was not
    audited: int = 0  # replays that were compared with eager
    mismatches: int = 0  # and were not the same
    warm_seconds: float = 0.0
    look_seconds: float = 0.0  # spent on finding what its code can read


def remember(state: State, **learnt: Any) -> None:
    """Fields of what the function's calls showed are these from now on. With the lock around warming and recording: of
    two threads that do this at once, the one forgets what the other learnt."""
    for name, value in learnt.items():
        if getattr(state.learnt, name) is not value:
            state.learnt = state.learnt._replace(**learnt)
            return


class Kept(NamedTuple):
    """What a node keeps alive, and what messages about it say."""

    graph: "Graph | None"
    backward: Any  # the jitted function that runs it
    objects: tuple  # what its rows in the core borrow
    slot_paths: list
    place_paths: list
    followable: dict  # path of a place that could be followed, or of a tensor in a tuple there -> is it?
    grads: list  # of GradRow
    loose: list  # (alias of memory that it reads and nothing above names, all of that if it is written or None)
    advances: list  # what replays do to places, as text
    numbers: Any  # of live.Told
    seconds: tuple  # per phase of making it
    values: list  # of segments.Value
    forks: list  # where they are
    islands: list  # what runs eagerly between its segments, and where
    ops: list | None  # of NotedOp, where replays are compared with eager
    trail: list  # (op, line) of each op that made or wrote something
    told: frozenset  # (op, kernel) of what is told where inputs lie
    changes: bool  # it does more than to return results
    draws: bool  # random numbers
    changed: set  # as of Plan: why it was made


class Leaves(NamedTuple):
    """What the backward of a recorded graph reads when it runs (trace.py). While it is recorded, those of its arguments
    that die with it are let go of as soon as eager would do so."""

    tensors: list  # its arguments, while it runs
    readers: dict  # argument -> who asks for a tensor that was saved there; a gradient goes from hand to hand
    left: dict  # argument that dies -> those of its readers that are still to come
    read: set  # those without any
    gone: set  # those let go of
    late: set  # those that somebody asked for after that, in whatever run
    changed: set  # arguments that were modified since they were saved


class Graph(NamedTuple):
    """A graph of autograd's that a recorded call left behind, cut off from its surroundings."""

    sinks: Any  # of the core: its ends
    flows: list  # slots to whose tensors gradients flow
    leaves: Leaves
    driver: int
    device: int  # of the recording of its forward
    reached: list  # (path, tensor) that its forward could read without its arguments
    tokens: dict  # storage of a random state -> (argument, how far it was, the state)
    recomputes: bool  # it computes forwards again
    forward: int  # the function's row
    grads: int  # its first arguments are so many gradients
    donates: bool  # a compiled backward may write what was saved
    seeds: bool  # its attention keeps random numbers on the device
    constants: dict  # memory of the host's that is the same for all its calls -> what keeps that name its own
    places: list  # that its forward advances: it may, too
    owners: dict  # see places.Found
    lock: Any  # around a run
    loose: list  # see Kept; comes when its forward is a node


# --- of a call --------------------------------------------------------------------------------


class Call(NamedTuple):
    """A call that no recording took."""

    state: State
    function: Any  # what the user decorated
    spec: int  # NONE until it is known
    flat: Flat | Any  # its arguments, flattened; None until they are
    args: tuple
    kwargs: dict
    driver: int | None = None  # once it is flattened; None: no call with arguments on such devices was warmed yet
    device: int = -1  # index of the one on which it is recorded; -1: the host


class Reached(NamedTuple):
    """A tensor that the function can read without its arguments."""

    path: str
    tensor: Any
    owner: int  # slot of the tensor whose .grad it is; NONE for one that was met
    inside: bool = False  # it lies in such a .grad: it counts where it is used


class Around(NamedTuple):
    """What a call can read."""

    found: Any  # places.Found
    reached: list  # of Reached
    also: dict  # id of what is reached in two ways -> (of an argument: what was met or None, owner; [(owner, it)])
    tensors: list  # the slots: every argument leaf, then every reached tensor
    paths: list  # what messages call them


class Was(NamedTuple):
    """What a slot's tensor was before the run."""

    memory: tuple  # describe.memory_of
    version: int
    grads: tuple  # describe.grads_of
    alias: Any  # its memory as a tensor of its own, to give it back; or None


class OpenNumbers(NamedTuple):
    """Numbers that the recording may leave open (live.py)."""

    sources: list  # of standins.Source
    wary: bool  # the user's code is given none of them
    computes: bool | None  # numbers that it reads on the way are live, too; None: it read none so far
    summed: list  # positions of places with live numbers that are only read for sums that come there again


class Changes(NamedTuple):
    """What the run did to places, by their positions, of which nobody in the call sees more (moving.py, live.py)."""

    moving: dict = {}  # a place that the call advances -> the EffectRow, or None
    free: frozenset | Any = frozenset()  # those of Found.kept that hold anything; None: somebody else holds one
    puts: list = []  # (places.Put, position) where something came
    stored: Any = ()  # positions of places with numbers to which others came


class Plan(NamedTuple):
    """What is decided before the function runs."""

    flat: Flat
    found: Any  # this and the next four: as of Around
    reached: list
    also: dict
    tensors: list
    paths: list
    driver: int
    device: int  # on which it is recorded; -1: the host
    others: tuple  # GPUs on which it works besides
    parent: int  # node behind which it will be recorded
    graph: Graph | None  # it is a run of this graph
    saves: bool  # its result will require grad: learn what autograd saves
    places: list  # of places.Place; those that the run shows come to these
    lone: list  # positions of those that hold an empty container of their own
    sources: list  # of impure.states
    numbers: OpenNumbers
    changed: set  # paths of the places that kept other recordings from fitting
    follows: dict  # position of a place -> ([slots of the tensors that lie there], its containers.Opened)
    followable: dict  # path of a tensor whose place could be followed -> (position of that, the slot)
    moves: list  # (recording that this one replaces, slots that must move, is one rather followed for the first time?)
    copied: list  # slots that the graph copies from wherever they are
    carries: frozenset  # ids of the tensors of those of them that the function may write: the graph copies back
    beside: dict  # {slot: slots} of those that share bytes with others, which are copied, too
    spent: list  # (index, tensor) of arguments that die with this backward
    grads: dict  # slot -> identity of its .grad, of leaf tensors
    was: list  # of Was, per slot
    generators: list  # that the function can reach
    ambient: tuple
    sinks: Any  # of the core: where gradients end outside of the call
    changes: Changes = Changes()  # once it has run


class Words(NamedTuple):
    """The two words from which a capture draws a generator's numbers."""

    handle: int
    words: Any
    at: Any  # those now in use
    copy: Any = None  # of this very run, if its backward asks


class Swap(NamedTuple):
    """A copied slot: the function holds the leaf, its ops work on the buffer."""

    lo: int
    hi: int
    buffer: Any
    leaf: Any


class Copied(NamedTuple):
    """The arguments that are copied, of a recording (record.py, ops.mirror) or told where they lie (addresses.py)."""

    swaps: dict  # memory of copied leaves -> [Swap]
    buffers: dict  # memory of a buffer -> Swap
    copies: dict  # copied leaf -> its copy in the core
    stay: list  # (memory, address, bytes) of arguments that are not copied
    mirrored: set  # ids of copied leaves that were written after all
    carried: set  # of plan.carries, those that were
    shared: list  # Swap of those that share bytes with other tensors of the call, of which none was ever written
    movable: dict  # memory of a buffer -> addresses.Movable
    bound: set  # slots of those that are not copied after all
    told: set  # (op, kernel) of what is told where these lie
    backs: dict  # slot of one of these -> its copy in the core for the way back
    whole: set  # memory of tensors that must begin their storage


class ReadValues(NamedTuple):
    """What Python read on the way, each the end of a segment (segments.py)."""

    values: list  # of segments.Value
    known: set  # parts of memory (segments.part_of) that were read and not written since
    graded: list  # of each read: ids of leaves that had still their old .grad
    unfilled: list  # (address, bytes) of memory in which .grad must not be set anew: something ran there before
    spare: list  # on the GPU: memory of the pool that nothing else may take before the recording is over
    undos: list  # of segments.Undo, where writes before a read are to be undone
    undone: dict  # memory of which all writes are -> [(address, bytes)] of the parts that were copied
    rooms: list  # bytes on the host that each value and each readout of the recording takes
    behind: list  # operators under way that go by lengths that are known (lengths.py)


class Readouts(NamedTuple):
    """Numbers and tensors of the host's that the function only hands out (readout.py)."""

    rows: list  # (pytree.Readout, on the host a copy of what it stands for)
    numbers: dict  # id of a number of float() that stands for one -> (that number, the Readout)
    handed: dict  # memory on the host that only the result gets -> what keeps that name its own


class Generators(NamedTuple):
    """Random numbers (record.py, tokens.py)."""

    given: dict  # id -> generator that was given to an op
    states: dict  # generator -> its state after the last draw
    dropout: list  # where the run drew from cuDNN's random state: an alias of the buffer that holds it
    tokens: dict  # memory of a state -> tokens.Token
    words: dict  # generator of a capture -> Words


class Constants(NamedTuple):
    """What holds the same bytes at each replay (constants.py)."""

    memory: dict  # -> what keeps that name its own
    steps: list  # constants.Step: ops of a capture on constants that did not run for real yet
    real: dict  # constant of a capture -> a tensor with what it will hold
    lifted: list  # what ends the bracket in which Python's numbers are brought to the GPU, while one is open


class RanCode(NamedTuple):
    """The code objects that ran (trace.py)."""

    started: set
    beside: set  # those of other threads
    looked: set  # paths of places in which somebody looked at what a blind stands for, or found it
    hashed: set  # ids of the tensors of which it was asked which one each is, past its values, as of a key
    ran: set  # those that are the function's; None among them: not all were seen
    imported: set  # files of modules whose bodies ran
    user: dict  # file -> is it the user's?


class Autograd(NamedTuple):
    """What autograd holds of the run, and a recorded backward of its arguments (trace.py, autograd.py)."""

    leaves: list  # whose .grad the run may set
    spent: dict  # argument that dies -> (its memory, holders of that before)
    whole: dict  # memory of these -> the tensor itself
    saved: list  # weak references to what autograd saved (trace.Saved)
    kept: list  # how many references to each argument the run left behind


class Cuts(NamedTuple):
    """What runs between segments, and what is a graph's branch."""

    islands: list  # (islands.Island, what the function calls it by): what runs eagerly between segments
    answers: list  # islands.Answer: what came of those
    apart: list  # apart.Apart: ops that run so
    failed: list  # what repeats the op at which a capture failed
    forks: list  # where there are some (forks.py)
    bodies: list  # of the forks under way -> memory that each made
    imagined: list  # threads that run a body on tensors without memory, the latest last


class Ranks(NamedTuple):
    """What is exchanged with other processes (collectives.py)."""

    parallel: list  # (module that exchanges gradients in a backward, its kind, line, will it)
    pending: dict  # memory of what such an op gave, and nobody waited for yet -> a tensor of it


class Host(NamedTuple):
    """Memory of the host's (counters.py, ops.py)."""

    asked: set  # from outside, of tensors that count
    made: dict  # by an op of a function on the GPU -> what keeps that name its own
    drawn: set  # of these, what depends on random numbers
    fed: set  # from outside, brought to the GPU (fed.py)
    numbers: set  # from outside, taken for numbers there


class Watch(NamedTuple):
    """The watchers of the run's ops (ops.py)."""

    asked: list  # of each row of the watchers' tables: is it asked in this run?
    of_op: dict  # id of an op -> (what it is, its watchers, those if it is usual: in front of it, behind it)


class Alive(NamedTuple):
    objects: list  # that a replay needs
    memory: list  # that a tape needs
    names: list  # in a recording: what keeps the names of new memory their own
    results: list  # weak references to more of what ops returned
    fixed: dict  # memory from outside -> an alias of it that no rescue moves


class Run(NamedTuple):
    """What is known of a run before it begins."""

    driver: int
    device: int  # the GPU whose tensors it may use; -1, of a recording: none
    others: tuple = ()  # of a recording: and these GPUs'
    plan: "Plan | Any" = None  # what is recorded; None: it is only looked at
    recording: bool = False  # there is a plan
    graph: Graph | None = None  # it is a backward of this recorded graph
    before: Any = None  # record.Before: what a recording that comes to nothing puts back
    pool: int = 0  # of a recording on the GPU: its pool, a handle of the core's
    slots: frozenset = frozenset()  # memory of arguments and of what is reached
    allocated: set | None = None  # of a backward that is not captured, on the GPU: where memory began before it
    since: int = 0  # autograd's sequence number
    returned: Any = None  # of the core: what ops return, as far as somebody holds it
    computes: bool | None = False  # may it compute with numbers that it reads on the way? None: the next recording may
    until: int = 0  # the value that it reads behind which none is expected
    apart: set | frozenset = frozenset()  # ops that run between segments; of a recording the function's own set
    sources: list = []  # of impure.states
    blockers: dict | None = None  # all that forbids replay -> how often, where somebody asks
    ops: list | None = None  # of NotedOp, where somebody asks
    parallel: str = "never"  # as of Options

    @property
    def saves(self) -> bool:
        """As of Plan."""
        return self.recording and self.plan.saves


@declared
class Seen:
    """What one run of the function, warming or recording, showed. Memory is named by core.storage_id. It changes with
    each op: the observer, the taps and the readers of the run all write into this one."""

    run: Run
    live: Any = None  # standins.Trace: what it does with the plan's numbers
    spread: Any = None  # lanes.Spread: which ops run side by side
    trail: list = fresh(list)  # (op, line) of each that made or wrote something

    # what its mechanisms write down, each its own
    copied: Copied = fresh(maker_of(Copied))
    reads: ReadValues = fresh(maker_of(ReadValues))
    readouts: Readouts = fresh(maker_of(Readouts))
    generators: Generators = fresh(maker_of(Generators))
    constants: Constants = fresh(maker_of(Constants))
    code: RanCode = fresh(maker_of(RanCode))
    autograd: Autograd = fresh(maker_of(Autograd))
    cuts: Cuts = fresh(maker_of(Cuts))
    ranks: Ranks = fresh(maker_of(Ranks))
    host: Host = fresh(maker_of(Host))
    watch: Watch = fresh(maker_of(Watch))
    alive: Alive = fresh(maker_of(Alive))

    # what it showed
    reason: str | None = None  # the first thing that forbids replay
    made: dict = fresh(dict)  # memory -> line that made it
    blank: dict = fresh(dict)  # memory that no op wrote -> line that made it
    touched: dict = fresh(dict)  # memory from outside -> a tensor of it
    written: set = fresh(set)
    raw: set = fresh(set)  # memory whose address was asked for
    own: list = fresh(list)  # of places.Place: cgt's own that the run changed (probes.py)
    computed: bool | None = None  # with some it did; False: and more depends on one than ops and comparisons
    late: int = 0  # so many values came until the last that was read behind a write to memory from outside
    asks_which: bool = False  # it is not the same to it which tensor lies in a place
    acts: bool = False  # it did something that may not happen twice, besides writing
    draws: bool = False  # random numbers of the host's
    random: bool = False  # random numbers, of whatever generator
    devices: set = fresh(set)
    exchanges: bool = False  # data with other processes
    hooked: bool = False  # other hooks for saved tensors beside ours: a checkpoint's, say
    joins: bool = False  # backwards run in this thread, until it is over
    seeds: bool = False  # an attention keeps random numbers for its backward
    elsewhere: str = ""  # the first op that a thread ran meanwhile which nobody sees
    strays: bool = False  # ops met memory of the run's that no op had returned: kernels run that are not seen
    again: bool = False  # the next recording will fare better
    escaped: bool = False  # something of it outlived the call
    is_own: bool = False  # nobody but the call holds its result
    inside: bool = False  # ops are not the function's


# --- of a node --------------------------------------------------------------------------------


class SlotRow(NamedTuple):
    leaf: int  # which tensor leaf; NONE: reached
    tensor: Any  # the very tensor that it must be, or None
    example: Any  # today's tensor
    binding: int  # Binding in cgt_core.pxd
    copy: int  # COPIED, REBOUND: its copy in the core; TWIN: the slot that is; or NONE
    same: int  # it is the very tensor of this slot; or NONE
    apart: bool  # and it is that of no other slot
    owner: int  # it is .grad of this slot; or NONE
    back: int  # COPIED, and written: its copy in the core for the way back; REBOUND, and written: `copy`; or NONE
    beside: int  # COPIED: the earlier slot with which it shares bytes; or NONE
    begins: bool  # to require grad, in the call
    whole: bool  # it must begin its storage


class OutRow(NamedTuple):
    kind: int  # OutKind in cgt_core.pxd
    ref: int  # output or slot it refers to
    proto: Any  # alias of the memory that the graph writes, or metadata alone
    shift: int = 0  # VIEW: bytes from the start of the slot's tensor
    version: int = 0  # _version when handed out; VIEW: CreationMeta
    grad_slot: int = NONE  # it becomes .grad of this slot's tensor
    hidden: bool = False  # not part of the result
    root: bool = False  # it requires grad
    line: str = ""  # where it was made
    # PART: (outputs, Steps of views.py); READOUT: (what makes it of bytes,); WRAPPER: (what makes it, outputs, names)
    ops: tuple = ()
    inside: int = NONE  # the output of kind WRAPPER whose attribute it is


class EffectRow(NamedTuple):
    """What a replay does besides its results."""

    kind: int  # EffectKind in cgt_core.pxd
    slot: int  # whose tensor; NONE where it is about a place
    bumps: int = 0  # WRITES: by how much _version moves
    # SETS_GRAD: hidden output that becomes .grad; NONE: it becomes None. PUTS, APPENDS: what comes to the place
    out: int = NONE
    place: int = NONE  # position of the place; in the core its row
    by: Any = None  # ADVANCES, and PUTS and APPENDS without an output: the constant; or Made
    made: bool = False  # `by` is Made
    number: int = NONE  # PUTS, APPENDS, WRITES: of the node's numbers, the one that comes to it


class Made(NamedTuple):
    """What each replay makes anew, for a place."""

    make: Any  # of a list of the parts
    parts: list  # (output or NONE, number or NONE)
    values: list  # of the numbers, what they were in the recorded call


class GradRow(NamedTuple):
    """What is guarded of a tensor that can have a gradient."""

    slot: int
    was_none: bool
    was: int  # identity of what must be .grad, where a result is made from it; or 0


class SaveRow(NamedTuple):
    """An argument of the backward."""

    slot: int
    out: int


class Behind(NamedTuple):
    """What a later backward needs of a recording."""

    roots: list = []  # outputs that require grad
    saves: list = []  # of SaveRow
    saved: list = []  # (trace.Saved, its base among these, metadata, shift in bytes)
    flows: list = []  # slots to whose tensors gradients flow
    joined: int = 0  # to so many of these, the first, several edges of the graph lead
    graph: Graph | None = None


class Draft(NamedTuple):
    """A node's rows, before it is one."""

    slots: list  # of SlotRow
    paths: list  # of each slot
    near: dict  # memory -> [(slot, its tensor, binding)]
    outs: list  # of OutRow: those of the result, then hidden ones
    effects: list  # of EffectRow
    grads: list  # of GradRow
    out: Flat  # the result
    bases: dict  # hidden output -> its tensor, where results are views of it
    behind: Behind = Behind()
    keeps_grads: bool = False  # some .grad that it replaces was there when it read a value


@declared
class Attempt:
    """One recording under way. It changes with each step, since whatever ends one early must find how far it came."""

    plan: Plan | None = None
    seen: Seen | Any = None  # None until it runs, and once it is a node
    before: Any = None  # record.Before: what a capture that fails may have changed
    result: Any = None  # the function's
    draft: Draft | None = None
    node: int = NONE
    overtaken: bool = False  # another thread moved the path on while it was planned
    passing: bool = False  # why it fails is no verdict: the next one may fare better
    starved: bool = False  # the device had no memory left
    raised: Any = None  # the class of what left the capture
    settled: bool = False  # nothing is left to be put back
    verdict: str | None = None  # why calls like this one run eagerly from now on
