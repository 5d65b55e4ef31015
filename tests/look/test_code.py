"""What code can read, by its bytecode; and that only code counts that ran, all of it, wherever it ran."""

import argparse
import collections
import concurrent.futures
import dataclasses
import dis
import importlib
import inspect
import re
import sys
import threading
import types

import pytest
import torch
from helpers import counts, profiled, tells
from torch import nn

import cgt
from cgt.look import bytecode, flow, returns
from cgt.look.code import IMPLIED, code_reads, is_read, texts_in
from cgt.words import errors, options


def test_bytecode_reader_agrees_with_dis():
    """The flags in the low bits of arguments differ between versions of Python."""

    def names_by_dis(code):
        naming = {*dis.hasname, *dis.hasfree, dis.opmap["LOAD_DEREF"]}  # Python 3.14 counts the last as a local's
        named = [(one.opname, one.argval) for one in dis.get_instructions(code) if one.opcode in naming]
        fields = [
            {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL"},
            {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM", "STORE_ATTR", "DELETE_ATTR"},
            {"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF", "STORE_DEREF", "DELETE_DEREF"},
            {"IMPORT_NAME"},
        ]
        read = [{name for operation, name in named if operation in field} for field in fields]
        known = set.union(*fields)
        rest = {operation for operation, _ in named} - known
        assert all(name in ("STORE_NAME", "DELETE_NAME", "MAKE_CELL", "LOAD_CLOSURE") for name in rest)
        inner = [names_by_dis(entry) for entry in code.co_consts if inspect.iscode(entry)]
        return [set().union(*sets) for sets in zip(read, *inner, strict=True)]

    implied = set().union(*IMPLIED.values())  # tested by what they are for

    def texts(code):
        found = set(texts_in(tuple(e for e in code.co_consts if not inspect.iscode(e))))
        return found.union(*(texts(entry) for entry in code.co_consts if inspect.iscode(entry)))

    for module in (argparse, dataclasses, inspect, collections, nn.functional, nn.modules.module):
        for function in vars(module).values():
            if isinstance(function, types.FunctionType):
                code = function.__code__
                globals_, names, cells, imports = names_by_dis(code)
                reads = code_reads(code)
                assert set(reads.globals) == globals_
                assert set(reads.cells) == cells
                assert set(reads.imports) == imports
                assert names <= set(reads.names) <= names | texts(code) | implied


def test_keyword_names_and_docstrings_are_not_reads():
    def function(x):
        """steps"""
        return dict(counter=x)

    names = code_reads(function.__code__).names
    assert "steps" not in names
    if sys.version_info < (3, 13):  # later they are ordinary constants
        assert "counter" not in names


def test_names_that_are_probed_are_those_of_the_call():
    def plain(self, a, b):
        y = getattr(self.b.c(1, "no"), "one", a + 1) + getattr(self, "two")  # noqa: B009
        return b("no", y) if hasattr(self, "three") else b("no", "none")

    def unclear(self, names, a):
        return [getattr(self, "one" if a else "two") for a in names], a("three")

    def passed_on(things, a):
        return map(getattr, things, ("one", "two")), a("three")

    def renamed(self, a):
        ask = hasattr
        return ask(self, "one"), a("two")

    def caught(self):
        try:
            return self.one
        except AttributeError:
            return 2

    want = {"one", "two", "three"}
    assert set(code_reads(plain.__code__).probed) == want
    assert {"one", "two"} <= set(code_reads(unclear.__code__).probed)
    assert {"one", "two", "three"} == set(code_reads(passed_on.__code__).probed)
    assert {"one", "two"} == set(code_reads(renamed.__code__).probed)
    assert "one" in code_reads(caught.__code__).probed


def test_whose_code_is_looked_at():
    Pair = collections.namedtuple("Pair", "one other")  # noqa: PYI024
    mine = [test_whose_code_is_looked_at, pytest.importorskip, lambda: 0]
    bearers = [nn.Linear.forward, torch.optim.lr_scheduler.StepLR.get_lr, torch.amp.GradScaler.scale]
    others = [nn.Module.train, nn.functional.relu, torch.optim.Adam.__init__, cgt.jit, dis.dis, Pair.__new__]
    assert all(is_read(inspect.unwrap(f).__code__) for f in mine + bearers)
    assert not any(is_read(inspect.unwrap(f).__code__) for f in others)


def test_what_code_reads_that_runs_later_is_guarded_then(device):
    scales = {"a": 2.0, "b": 3.0, "c": 4.0, "d": 5.0}

    def other(x):
        return x * scales["d"]

    def reads(x, which):
        return x * scales["a"] * scales["b"] * scales["c"] if which else other(x)

    f, x = cgt.jit(reads), torch.ones(3, device=device)
    for k in range(12):
        scales["d" if k > 8 else "a"] += k == 4 or k == 10
        assert torch.equal(f(x, k < 6), reads(x, k < 6)), k
    s = cgt.stats(f)
    assert s.replays >= 4 and s.eager == 1 and any("other" in reason for reason in s.reasons), cgt.explain(f)


def test_code_that_a_profiler_hides_is_not_recorded(device, short_cool_down):
    scale, x = {"a": 2.0}, torch.ones(3, device=device)
    f = cgt.jit(lambda x: x * scale["a"])
    with profiled():
        for _ in range(3):
            assert torch.equal(f(x), x * 2)
    assert (cgt.stats(f).records, cgt.stats(f).replays) == (0, 0)
    assert errors.hidden_code() in cgt.stats(f).reasons
    for k in range(12):  # what was hidden in the warm-up is seen when it is recorded
        scale["a"] = 2.0 if k < 8 else 3.0
        assert torch.equal(f(x), x * scale["a"]), k
    assert cgt.stats(f).replays >= 3, cgt.explain(f)


def test_compiled_code_that_can_read_too_much(device, monkeypatch):
    monkeypatch.setattr(options, "MAX_PLACES", 3)
    scales, x = [2.0, 3.0, 4.0, 5.0], torch.ones(3, device=device)
    compiled = torch.compile(lambda x: x * scales[1], backend="eager")
    f = cgt.jit(lambda x: compiled(x) + scales[2])
    for k in range(4):
        scales[1] += k == 2
        assert torch.equal(f(x), x * scales[1] + 4)
    assert errors.too_many_places() in cgt.stats(f).reasons
    torch.compiler.reset()


@pytest.mark.parametrize("when", ["before", "inside"])
def test_code_that_runs_in_another_thread_counts(device, when, short_cool_down):
    scale = {"a": 2.0}
    pool = concurrent.futures.ThreadPoolExecutor(1)
    if when == "before":
        pool.submit(lambda: None).result()

    def read():
        return scale["a"]

    def function(x):
        if when == "before":
            return x * pool.submit(read).result()
        found = []
        thread = threading.Thread(target=lambda: found.append(read()))
        thread.start()
        thread.join()
        return x * found[0]

    f, x = cgt.jit(function), torch.ones(3, device=device)
    for k in range(12):
        scale["a"] = 2.0 if k < 8 else 3.0
        assert torch.equal(f(x), x * scale["a"]), k
    pool.shutdown()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="before 3.12 one that comes late is unseen, and told as that")
def test_thread_that_another_one_starts_meanwhile_is_none_of_the_functions(device):
    over = []

    def spawn():
        k = 0
        while not over:
            k, namespace = k + 1, {"limit": k}
            exec(compile(f"def work{k}():\n    return limit", f"user{k}.py", "exec"), namespace)
            thread = threading.Thread(target=namespace[f"work{k}"])
            thread.start()
            thread.join()

    def function(x):
        for _ in range(2000):
            x = x + 1
        return x

    f, x, spawner = cgt.jit(function), torch.ones(3, device=device), threading.Thread(target=spawn)
    spawner.start()
    try:
        for _ in range(4):
            assert torch.equal(f(x), x + 2000)
    finally:
        over.append(True)
        spawner.join()
    assert counts(f) == (1, 1, 2, 0), cgt.stats(f).reasons


@pytest.mark.parametrize("late", [False, True])
def test_what_a_backward_reads_is_guarded_by_its_forward(device, late):
    scale = {"a": 2.0}

    def deeper(grad):
        return grad * scale["a"]

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return deeper(grad) if late else grad * scale["a"]

    w, f = torch.ones(3, device=device, requires_grad=True), cgt.jit(lambda x: Scaled.apply(x * 1))
    for k in range(16):
        scale["a"] = 2.0 if k < 10 else 5.0
        w.grad = None
        f(w).sum().backward()
        assert w.grad.tolist() == [scale["a"]] * 3, k
        cgt.step()
    assert cgt.stats(f).replays >= 6 and cgt.stats(f).backward.replays >= 6, cgt.explain(f)


def test_only_what_the_code_that_ran_names_is_guarded(device):
    big, x = types.SimpleNamespace(scale=2.0, other=1.0), torch.ones(3, device=device)

    def unused():
        return big.other

    f = cgt.jit(lambda x, which=False: unused() if which else x * big.scale)
    for k in range(8):
        big.other = k
        assert torch.equal(f(x), x * 2)
    assert (cgt.stats(f).records, cgt.stats(f).replays) == (1, 6), cgt.explain(f)


# --- modules that a call imports ------------------------------------------------------------------

LATE = """
TABLE = {k: [k] for k in range(3000)}

def look(table):
    return sum(entry[0] for entry in table.values())

SIZE = look(TABLE)

def double(x):
    return x * 2
"""


@tells("imports")
@pytest.mark.parametrize("first", [True, False])
def test_what_runs_in_an_import_is_not_the_functions(device, tmp_path, monkeypatch, first):
    """sympy's 900,000 places kept torch.broadcast_shapes for half a minute."""
    name = f"imported_late_{first}_{device.type}"
    (tmp_path / f"{name}.py").write_text(LATE)
    monkeypatch.syspath_prepend(tmp_path)
    state = {"late": first}

    def f(x):
        if state["late"]:
            return importlib.import_module(name).double(x) + 1
        return x - 1

    g, x = cgt.jit(f), torch.ones(3, device=device)
    for k in range(10):
        state["late"] = first or k > 2
        assert torch.equal(g(x), f(x) if name in sys.modules else x - 1 if not state["late"] else x * 2 + 1)
    s = cgt.stats(g)
    assert s.replays >= 4, s.reasons
    places = re.search(r"up to ([\d,]+) variables", cgt.explain(g))
    assert int(places[1]) < 100
    if not first:
        assert any(str(tmp_path) in reason for reason in s.reasons), s.reasons
    sys.modules.pop(name)


def test_a_function_that_imports_anew_at_each_call_runs_eagerly(device, tmp_path, monkeypatch):
    (tmp_path / "imported_always.py").write_text(LATE)
    monkeypatch.syspath_prepend(tmp_path)

    def f(x):
        sys.modules.pop("imported_always", None)
        return importlib.import_module("imported_always").double(x)

    g, x = cgt.jit(f), torch.ones(3, device=device)
    for _ in range(6):
        assert torch.equal(g(x), x * 2)
    s = cgt.stats(g)
    assert s.replays == 0 and any("imported" in reason for reason in s.reasons), s.reasons


# --- the reader of byte code ----------------------------------------------------------------------


def functions_of(*modules):
    return [f for module in modules for f in vars(module).values() if isinstance(f, types.FunctionType)]


def test_steps_agree_with_dis():
    """Signs of operators, jumps and lines: bytecode.py decodes them itself."""
    for function in functions_of(argparse, collections, dataclasses, inspect, nn.functional, nn.modules.module):
        reading = bytecode.read(function.__code__)
        at = {step.offset: k for k, step in reversed([*enumerate(reading.steps)])}
        for one in dis.get_instructions(function.__code__):
            step = reading.steps[at[one.offset]] if one.offset in at else None
            if step is not None and one.opname == "BINARY_OP":
                assert one.argrepr.removesuffix("=") == step.name
            if step is not None and one.opcode in (*dis.hasjrel, *dis.hasjabs):
                to = reading.steps[reading.leads[at[one.offset]][0]].offset
                assert one.argval <= to <= one.argval + 6  # an EXTENDED_ARG comes before its step
            if step is not None and one.positions.lineno:
                assert reading.lines[at[one.offset]] == one.positions.lineno


def test_an_operand_has_the_makers_of_all_ways():
    def function(x, y):
        z = x.append(y.one if y else 2)
        return x, y, z, x.two(y, x)  # so long that the compiler does not write it twice

    reading = bytecode.read(function.__code__)
    call = next(at for at, step in enumerate(reading.steps) if step.does == bytecode.CALL)
    method, _, given = reading.takes[call]
    assert [reading.steps[at].name for at in sorted(given)] == ["one", 2]
    assert reading.callee(call) == bytecode.only(method) and reading.call_of(reading.callee(call)) == call
    assert reading.maker(call, 2) is None  # it is not always the same
    loads = {at: stores for at, stores in reading.stores_seen("z").items()}
    assert [reading.steps[at].does for stores in loads.values() for at in stores] == [bytecode.STORE]


def test_what_a_call_calls():
    space = {}
    exec("import types\ndef f(x, y): return types.one(x if y else 2) + x.two.three(1, 2) + y(*x) + x[0](y)", space)
    code = space["f"].__code__
    calls = [step for step in bytecode.steps_of(code) if step.does == bytecode.CALL]
    names, given, _ = zip(*(returns.callee_of(code, step.offset) for step in calls), strict=True)
    assert names == (("types", "one"), ("x", "two", "three"), ("y",), None)
    assert given == (1, 2, None, 1)


def test_an_instruction_without_a_row_escapes(monkeypatch):
    def function(self, y):
        self.calls += 1
        return [self.calls, y.item()]

    def read():
        for one in (bytecode.read, flow.moves_of, returns.uses_of):
            one.cache_clear()
        reading = bytecode.read(function.__code__)
        call = next(step.offset for step in reading.steps if step.does == bytecode.CALL)
        return flow.moves_of(function.__code__).advances, returns.uses_of(function.__code__, call, ())

    advances, uses = read()
    assert len(advances) == 1 and uses == {returns.RETURNED}
    rows = bytecode.ROWS
    for name, (found, used) in {"BINARY_OP": (0, True), "BUILD_LIST": (1, False)}.items():
        monkeypatch.setattr(
            bytecode,
            "ROWS",
            [(bytecode.ESCAPE, "", 0, None) if k == dis.opmap[name] else row for k, row in enumerate(rows)],
        )
        advances, uses = read()
        assert (len(advances), uses is not None) == (found, used)
    monkeypatch.undo()
    read()
