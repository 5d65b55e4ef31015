"""What stands for a number that is another one at each call, while a function is recorded (live.py).

To Python a stand-in is a float or an int; each step of arithmetic makes another one and is written down in a Trace, and
PyTorch's own symbolic numbers carry it into ops. Lists and tuples from which one chooses have stand-ins, too."""

import array
import collections
import dis
import math
import operator
import sys
import types
import weakref
from typing import Any, NamedTuple

import cgt_core as core
import torch

from ..data import Plan
from ..look import containers, places
from ..look.code import code_reads
from ..look.containers import open_parts
from ..look.places import Place
from ..run.observe import NOT_USER_CODE
from ..words import pytree
from ..words.private import without_torch_function

MOST = pytree.MOST
PARSER = "python_arg_parser"  # the file of PyTorch's that asks for a value
SUMS_EXACTLY = sys.version_info >= (3, 12)
ASKED = (dict, collections.Counter)
MOST_KEYS, MOST_ENTRIES = 32, 1 << 16  # of a dict, a list that is asked
MAX_STEPS = 4096  # of one recording: what computes more with a number is a loop that wants another form


Taken = list[tuple[int, int, int]]  # (argument, element or NONE, row) of each number of ours that an op takes


class Source(NamedTuple):
    """Where a number comes from."""

    path: str
    op: int  # AT_PLACE, IN_CALL, IN_TENSOR
    at: int  # position of the place, which of the call's numbers, or the slot
    value: Any
    exact: str | None  # known: the line of what looks at it otherwise
    part: int = core.NONE  # of a tuple in a place, which element


class Step(NamedTuple):
    """A row of `numbers` in the core."""

    op: int
    a: int
    b: int
    value: Any  # what it was in the recorded call
    table: int = core.NONE  # LOOKED_UP: which


class Table(NamedTuple):
    """Numbers from which one that changes chooses (`betas[t]`): in a recording the core looks them up. Or a dict of
    whole numbers that is asked for one (`epoch in milestones`): it is compared with each key. A container to which code
    can come past its places is none; where it does all the same, and changes it, the run is undone."""

    proxy: Any  # what lies in its places meanwhile; what changes it is done to the container behind the run
    home: Any  # the container itself
    was: list  # its entries when the run began
    numbers: array.array


def is_kept(table: Table) -> bool:
    """Has somebody kept what lay in its places? Who, tells but a look at all that lives."""
    return sys.getrefcount(table.proxy) > ALONE


_one = Table(object(), (), [], array.array("q"))
ALONE = sys.getrefcount(_one.proxy)  # the row's reference and the question's, as this Python counts them


class Trace:
    """What one run does with its numbers. It changes with each step: all stand-ins of the run lead to this one."""

    def __init__(self, sources, line):
        self.sources, self.line = sources, line  # line(): where the user's code is
        self.choose = None  # (tensor, index): the row, chosen at each replay; None: it cannot be
        self.index = None  # the stand-in of a number that C++ was told just now, to index with it
        self.steps = [Step(s.op, s.at, s.part, s.value) for s in sources]
        self.held = {}  # position of a place -> what lies there instead of its numbers
        self.known = {}  # Step -> its row
        # Row that the recording is for one value of -> the line that made it so.
        self.exact = {k: s.exact for k, s in enumerate(sources) if s.exact}
        self.stored = {}  # (id of a place's home, its key; of a list, the index) -> {path in what came there: row}
        self.overwritten = set()  # rows of sources whose places were stored to, be it what they held
        self.exchanged = []  # entries of the arguments' containers: (path, home, key, what was there, the stand-in)
        self.lent = []  # (id of a container of these, the row of the stand-in that was in it)
        self.changed = None  # the path of one of these that the function changed
        self.over = False
        self.untraced = None  # a sentence on why the function can have no live numbers
        self.sums = set()  # rows of what C added, not the code
        self.give_up = None  # of a capture: leave it, with the line at which a number was read
        self.leave = None  # the run: C adds in another way than a stand-in does
        self.started, self.asked = 0, set()  # code that was looked at (watch)
        self.rows_of = []  # (address, bytes, what keeps these) of memory that a number chose rows of, and of the rows
        self.chosen = set()  # memory of these rows
        self.views = []  # (weak references to one and to the tensor that it is of, dimension, index)
        self.tables = []  # of Table
        self.bypassed = False  # somebody led to a table past its place, and changed it
        self.reads = {}  # row of a number that was read on the way -> the line
        self.hands = {}  # such a row -> what makes of it what a result holds
        self.parsed = []  # rows whose values PyTorch's parser asked for since the last op
        self.chance = set()  # rows that are exact because another argument of an op has this value, too
        self.made = []  # weak references to the stand-ins; a WeakSet would ask them for their hash
        self.stand_ins = [
            s.value if s.exact or s.op == core.IN_TENSOR else self.stand_in(k) for k, s in enumerate(sources)
        ]
        self.counters = {}  # memory of the host's -> counters.Counter
        self.uncounted = {}  # path of one that is none after all -> the line
        self.joined = None  # the line where it counts in some together with tensors that this call makes

    def stand_in(self, row):
        """A number that is a float or an int to Python."""
        value = self.steps[row].value
        made = (Float if type(value) is float else Int)(Node(self, row, value))
        self.made.append(weakref.ref(made))
        return made

    def came(self, read, value, line, hand):
        """A number that read left on the host, whatever it is at another call. `hand()`: what a result holds of it."""
        row = self.add(Step(core.AT_READ, read, core.NONE, value))
        self.reads[row], self.hands[row] = line, hand
        return self.stand_in(row)

    def alive(self):
        return [one for one in (ref() for ref in self.made) if one is not None]

    def table_of(self, entries):
        """What stands for a list, tuple or dict of numbers, wherever that lies."""
        known = next((table.proxy for table in self.tables if table.home is entries), None)
        if known is not None:
            return known
        proxy = PROXIES[type(entries)](entries)
        proxy.trace, proxy.at = self, len(self.tables)
        kind = "d" if type(next(iter(entries))) is float else "q"
        self.tables.append(Table(proxy, entries, containers.entries(entries), array.array(kind, entries)))
        return proxy

    def is_changed(self, at):
        """Did the function change a table? Then it is none any more."""
        return not containers.holds(self.tables[at].proxy, self.tables[at].was)

    def look_up(self, at, index, plain):
        """Entry `index`, a stand-in, of a table."""
        table, row = self.tables[at], self.row_of(index)
        if self.over or row == core.NONE or self.is_changed(at):
            return plain(table.proxy, settle(index))
        return self.stand_in(self.add(Step(core.LOOKED_UP, row, row, table.was[index.node.value], at)))

    def row_of(self, x):
        """The row of an operand: one of ours, or a constant; NONE for what no row can be."""
        if type(x) in STAND_INS:
            return x.node.row if x.node.trace is self else core.NONE
        if type(x) is bool:
            x = int(x)
        if type(x) not in (int, float) or (type(x) is int and abs(x) > MOST):
            return core.NONE
        return self.add(Step(core.EQUALS, core.NONE, core.NONE, x))

    def add(self, step):
        key = (*step[:3], step.table, type(step.value), step.value.hex() if type(step.value) is float else step.value)
        row = self.known.get(key)
        if row is None:
            row = self.known[key] = len(self.steps)
            self.steps.append(step)
        return row

    def pin(self, row):
        """The recording is for this value of a row alone. NONE: of what comes of such values."""
        if not self.over and row != core.NONE and self.steps[row].op != core.EQUALS:
            self.exact.setdefault(row, self.line())
            line = looked_at(self) if self.reads and self.give_up is not None else None
            if line is not None:  # an array that is given the number, say, is changed for good
                self.give_up(line)

    def step(self, op, function, *operands):
        """What Python makes of the operands: a stand-in, where it is a number and C can do the same."""
        is_over = self.over or len(self.steps) > MAX_STEPS
        rows, plain = [core.NONE if is_over else self.row_of(x) for x in operands], list(map(plain_of, operands))
        if core.NONE in rows:
            return function(*map(settle, operands))
        try:
            value = function(*plain)
        except Exception:  # division by zero, say: of these numbers, not of others
            for row in rows:
                self.pin(row)
            raise
        if type(value) is bool:
            self.pin(self.add(Step(op, *rows, int(value))))
            return value
        if type(value) not in (int, float) or (type(value) is int and abs(value) > MOST) or value != value:
            for row in rows:
                self.pin(row)
            return value
        return self.stand_in(self.add(Step(op, rows[0], rows[-1], value)))


class Node(NamedTuple):
    """What PyTorch's C++ knows of a stand-in, as of torch.SymFloat: it asks for the value where no symbol goes."""

    trace: Any
    row: int
    value: Any

    def plain(self, *_):
        self.trace.pin(self.row)
        return self.value

    def guard_int(self, file, _):
        if "tensor_new" in file and not -(2**31) <= self.value < 2**31:
            # PyTorch takes 32 bits of a symbolic number there. Behind this the function runs with the number itself.
            raise OverflowError("a tensor made of a stand-in has 32 bits")
        return self.plain()

    def guard_float(self, file, _):
        if PARSER not in file or self.trace.over:
            return self.plain()
        self.trace.parsed.append(self.row)
        return self.value

    def wrap_int(self, value):
        return Node(self.trace, core.NONE if type(value) is bool else self.trace.row_of(value), value)

    def made(self, op, function, *others):
        """C++ computes with it, to see whether an index fits, say."""
        result = self.trace.step(op, function, *(STAND_IN[type(one.value)](one) for one in (self, *others)))
        return result.node if type(result) in STAND_INS else self.wrap_int(result)

    def clone(self):
        return self

    def str(self):
        return str(self.plain())


def looked_at(trace: Trace) -> str | None:
    """The line at which a number was read on which more than ops and comparisons depends, or None. Of a whole number
    there may be few values: the recording is for one."""
    lines = {row: line for row, line in trace.reads.items() if type(trace.steps[row].value) is float}
    for row, step in enumerate(trace.steps):
        if step.op > core.EQUALS and step.op != core.AT_READ and (step.a in lines or step.b in lines):
            lines[row] = lines.get(step.a) or lines[step.b]
    return next((lines[row] for row in trace.exact if row in lines and trace.steps[row].op < core.LESS), None)


def plain_of(x: Any) -> Any:
    return x.node.value if type(x) in STAND_INS else x


def pin(x: Any) -> None:
    if type(x) in STAND_INS:
        x.node.trace.pin(x.node.row)


def settle(x: Any) -> Any:
    """The number itself: the recording is for it alone."""
    pin(x)
    return plain_of(x)


def unwrapped(value: Any, stored: dict, depth: int = containers.DEEPEST) -> tuple[Any, dict[str, int]]:
    """(The value without stand-ins, a tuple anew, others in place; {path in it: row} of these). `stored`: such rows of
    entries of containers, by (id, key); there may be several ways to one."""
    if type(value) in STAND_INS:
        return value.node.value, {"": value.node.row}
    found, rows, entries = open_parts(value) if depth else [], {}, []
    is_row = isinstance(value, tuple)
    home = value if is_row or not found or isinstance(value, (dict, list)) else vars(value)
    for step, key, one in found:
        plain, inner = unwrapped(one, stored, depth - 1)
        if not is_row:
            inner = stored.setdefault((id(home), key), inner) if inner else stored.get((id(home), key), {})
        rows.update({step + path: row for path, row in inner.items()})
        entries.append((key, one, plain))
    changed = [(key, plain) for key, one, plain in entries if plain is not one]
    if is_row and changed:
        return tuple.__new__(type(value), [plain for *_, plain in entries]), rows
    for key, plain in changed:
        home[key] = plain
    return value, rows


def rows_in(x: object) -> list[int]:
    """Of a stand-in, or of those in a tuple."""
    if type(x) in STAND_INS:
        return [x.node.row]
    return [row for part in x for row in rows_in(part)] if isinstance(x, tuple) else []


def tables_in(plan: Plan, trace: Trace) -> list[tuple]:
    """[(place, what stands for the numbers there, ()), ...] of those from which a whole number can choose."""
    if not (plan.numbers.computes or any(type(one) is Int for one in trace.stand_ins)):
        return []
    homes = {id(plan.places[k].home) for k in trace.held}
    homes.update(at for at, owner in plan.found.owners.items() if owner is None)  # met elsewhere, too
    whole = [p for k, p in enumerate(plan.places) if k not in trace.held and id(p.want) not in homes]
    return [(place, trace.table_of(place.want), ()) for place in filter(is_table, whole)]


def is_table(place: Place) -> bool:
    """Does a list or tuple of numbers of one kind lie there, that a whole number can choose from, or a dict of whole
    numbers, that can be asked for one?"""
    entries, asked = place.want, type(place.want) in ASKED
    is_row = place.kind in places.HOLD_NUMBERS and (asked or type(entries) in (list, tuple))
    if not is_row or not 1 - asked < len(entries) <= (MOST_KEYS if asked else MOST_ENTRIES):
        return False
    kind = int if asked else type(entries[0])
    numbers = [*entries, *(entries.values() if asked else ())]
    return kind in (int, float) and all(type(x) is kind and (kind is float or abs(x) <= MOST) for x in numbers)


def floor(self):
    whole = self // 1
    return whole.node.trace.step(core.AS_INT, int, whole) if type(whole) in STAND_INS else math.floor(settle(self))


def binary(op, function):
    """The two methods of an operator, for the left and for the right operand."""
    vet = vet_sum if op == core.ADDED else lambda left, right, compute: compute()

    def asked(self, other, *both):
        if type(other) not in (Float, Int, float, int, bool):  # a tensor's, an array's or somebody's number's affair
            return NotImplemented
        return vet(*both, lambda: self.node.trace.step(op, function, *both))

    return (lambda self, other: asked(self, other, self, other)), lambda self, other: asked(self, other, other, self)


def vet_sum(left, right, add):
    """Of floats alone, sum() adds in the end what each step rounded off. One step is rounded as it is anyway; where C
    adds to what it may have added before, and no code does, leave."""
    trace, frame = (left if type(left) in STAND_INS else right).node.trace, sys._getframe(2).f_back
    by_code = frame is None or dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("BINARY")
    if by_code or not SUMS_EXACTLY or trace.over or float not in (type(plain_of(left)), type(plain_of(right))):
        return add()
    if left.node.row in trace.sums if type(left) in STAND_INS else type(left) is float:
        trace.leave()
    result, begins = add(), type(left) is int and left == 0  # sum() begins with it
    if type(result) in STAND_INS and not begins:
        trace.sums.add(result.node.row)
    return result


def unary(op, function):
    return lambda self: self.node.trace.step(op, function, self)


def exact(name):
    """A method of numbers for which there is no step."""
    return lambda self, *args: getattr(settle(self), name)(*map(settle, args))


def node_method(op, function):
    return lambda self, *others: self.made(op, function, *others)


def exact_node(function):
    """The same where there is no step."""
    return lambda self, *others: self.wrap_int(function(*(one.plain() for one in (self, *others))))


OPERATORS = {
    "add": (core.ADDED, operator.add), "sub": (core.SUBTRACTED, operator.sub), "mul": (core.MULTIPLIED, operator.mul),
    "truediv": (core.DIVIDED, operator.truediv), "floordiv": (core.FLOORED, operator.floordiv),
    "mod": (core.REMAINDER, operator.mod), "pow": (core.RAISED, operator.pow),
}  # fmt: skip
PYTHON = dict(OPERATORS[name] for name in ("add", "sub", "mul", "truediv"))
COMPARISONS = {
    "lt": (core.LESS, operator.lt), "le": (core.AT_MOST, operator.le), "eq": (core.SAME_AS, operator.eq),
    "ne": (core.OTHER_THAN, operator.ne), "gt": (core.MORE, operator.gt), "ge": (core.AT_LEAST, operator.ge),
}  # fmt: skip
MATH = {
    "sqrt": core.ROOT, "exp": core.EXPONENTIAL, "log": core.LOGARITHM, "sin": core.SINE, "cos": core.COSINE,
    "tan": core.TANGENT, "tanh": core.HYPERBOLIC,
}  # fmt: skip
METHODS = (types.WrapperDescriptorType, types.MethodDescriptorType)  # of instances: not __new__, not fromhex


def methods(kind):
    """What a stand-in for a float or an int does."""
    made = {
        "__class__": property(lambda self: kind), "__module__": "builtins",  # as its type's text says
        "__neg__": unary(core.NEGATED, operator.neg), "__abs__": unary(core.ABSOLUTE, operator.abs),
        "__pos__": lambda self: self, "__copy__": lambda self: self,
        "__bool__": lambda self: self.node.trace.step(core.OTHER_THAN, operator.ne, self, kind(0)),
        "__float__": lambda self: settle(self.node.trace.step(core.AS_FLOAT, float, self)),
        "__int__": lambda self: settle(self.node.trace.step(core.AS_INT, int, self)),
        "__trunc__": unary(core.AS_INT, int), "__torch_function__": classmethod(carried),
        "__deepcopy__": lambda self, memo: settle(self),
        "real": property(lambda self: self), "imag": property(lambda self: kind(0)),
        "__array__": lambda self, *dtype, **_: sys.modules["numpy"].asarray(settle(self), *dtype), "node": None,
        "__init__": lambda self, node: object.__setattr__(self, "node", node),
        "__setattr__": lambda self, name, value: setattr(plain_of(self), name, value),  # which raises
        "__delattr__": lambda self, name: delattr(plain_of(self), name),
    }  # fmt: skip
    for name, how in OPERATORS.items():
        made[f"__{name}__"], made[f"__r{name}__"] = binary(*how)
    made |= {f"__{name}__": binary(*how)[0] for name, how in COMPARISONS.items()}
    made |= {"__floor__": floor, "__ceil__": lambda self: -floor(-self)}
    if kind is int:
        made |= {"__index__": settle, "numerator": property(lambda self: self), "denominator": property(lambda self: 1)}
    made |= {name: exact(name) for name in dir(kind) if name not in made and type(getattr(kind, name)) in METHODS}
    return made | {"__getattribute__": lambda self, name: attribute(self, name, name in made, sys._getframe().f_back)}


# What numbers do not have, and functions in C ask for in the name of the code that calls them.
TOLD_BY = {"__array__", "__torch_function__", "node"}


def attribute(self, name, known, frame):
    """What the number itself has of this name, and nothing else: but PyTorch is told what there is. Autograd's threads
    for GPUs have no frame of Python's: PyTorch alone asks there."""
    if frame is None:
        return object.__getattribute__(self, name)
    code = frame.f_code
    torchs = code.co_filename.startswith(NOT_USER_CODE)
    hidden = name in TOLD_BY and (name in code_reads(code).probed or (name in code.co_names and not torchs))
    if (torchs or known) and not hidden:
        return object.__getattribute__(self, name)
    found = getattr(object.__getattribute__(self, "node").value, name)
    pin(self)
    return found


GETITEM = torch.Tensor.__getitem__


def carried(cls, function, types, args=(), kwargs=None):
    """PyTorch is given one of ours for a tensor or a number. It carries it while the run lasts, then the number."""
    kwargs = kwargs or {}
    if any(x.node.trace.over for x in (*args, *kwargs.values()) if type(x) in STAND_INS):
        args, kwargs = [plain_of(x) for x in args], {k: plain_of(x) for k, x in kwargs.items()}
    elif function is GETITEM and type(args[1]) is Int and (row := args[1].node.trace.choose(*args)) is not None:
        return row
    with without_torch_function():
        return function(*args, **kwargs)


# What stands for a number: its type is what `type(x)` says, and a float or an int what isinstance() does.
Float = type("float", (torch.SymFloat,), methods(float))
Int = type("int", (torch.SymInt,), methods(int))
STAND_INS = (Float, Int)


def entry(plain):
    """Indexing of a table."""
    return lambda self, k: self.trace.look_up(self.at, k, plain) if type(k) is Int else plain(self, k)


def asked(plain):
    """A method that is given a key: a stand-in is compared with each that there is."""

    def ask(self, k):
        if type(k) is not Int or self.trace.is_changed(self.at):
            return plain(self, k)
        return plain(self, next((key for key in type(self).__base__.__iter__(self) if k == key), k.node.value))

    return ask


def table_class(kind):
    """Of what stands for tables of this type."""
    read = entry if kind in (list, tuple) else asked
    made = {
        "__getitem__": read(kind.__getitem__), "__class__": property(lambda self: kind), "__module__": kind.__module__,
        "__reduce_ex__": lambda self, protocol: kind(self).__reduce_ex__(protocol),
    }  # fmt: skip
    if read is asked:
        made["__contains__"] = asked(kind.__contains__)
    return type(kind.__name__, (kind,), made)


PROXIES = {kind: table_class(kind) for kind in (list, tuple, *ASKED)}
STAND_IN = {float: Float, int: Int}
STEPS = OPERATORS | COMPARISONS | {"neg": (core.NEGATED, operator.neg), "sym_float": (core.AS_FLOAT, float)}
NO_STEPS = {
    "ceil": math.ceil, "floor": math.floor, "sym_max": max, "sym_min": min, "sym_and": operator.and_,
    "sym_or": operator.or_, "sym_not": operator.not_,
    "sym_ite": lambda condition, one, other: one if condition else other,
}  # fmt: skip
ANSWERS: dict[str, Any] = {"is_symbolic": True, "has_hint": True, "is_constant": False, "is_nested_int": False}
ANSWERS |= dict.fromkeys(("maybe_as_int", "maybe_as_float", "maybe_as_bool"))
OF_NODES = {name: node_method(*how) for name, how in STEPS.items()}
OF_NODES |= {name: exact_node(function) for name, function in NO_STEPS.items()}
OF_NODES |= {name: lambda self, answer=answer: answer for name, answer in ANSWERS.items()}
OF_NODES |= {f"is_{kind.__name__}": lambda self, kind=kind: type(self.value) is kind for kind in (int, float, bool)}
for _name, _method in OF_NODES.items():
    setattr(Node, _name, _method)
ALSO_CALLED = {
    "plain": "guard_bool guard_size_oblivious int_ float_ bool_ expect_true guard_or_false guard_or_true"
    " statically_known_true",
    "wrap_int": "wrap_float wrap_bool", "str": "_graph_repr", "floordiv": "int_floordiv",
    "truediv": "float_truediv int_truediv",
    "pow": "float_pow pow_by_natural",
}  # fmt: skip
for _name, _others in ALSO_CALLED.items():
    for _other in _others.split():
        setattr(Node, _other, getattr(Node, _name))
core.numbers_are(Node)
