"""The public functions."""

import atexit
import contextlib
import functools
import inspect
import os
import pathlib
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import cgt_core as core
import torch

from .data import Options
from .decide import dispatch, freeing, logs, padding, sites
from .decide.audit import parse as audit_of
from .make import lengths, trace
from .numbers import live
from .run import views
from .run.observe import NO_LINE, collect, line_in
from .run.taps import SCRIPTED, SWAPS
from .tools import draw, report
from .words import errors, options, pytree
from .words.errors import CgtError
from .words.private import READ_BEHIND, outside_dynamo, self_check

CALL = "_compiled_call_impl"  # of a module: what nn.Module.__call__ calls, if it is there
CALLS = frozenset((CALL, "__call__", "_call_impl", "_wrapped_call_impl", "_wrapped_call"))  # and how it is come to


def jit(fn: Callable[..., Any] | None = None, *, static_argnums: int | Iterable[int] = (),
        static_argnames: str | Iterable[str] = (), max_records: int | None = options.MAX_RECORDS,
        max_graphs: int = options.MAX_GRAPHS, outputs: str = "rescue", inputs: str = "auto",
        dynamic: str | Iterable[str] = (), audit: str | None = None, memory_budget: int | str | None = None,
        pad: Mapping[str, Any] | None = None, parallel: str = options.PARALLEL) -> Callable[..., Any]:  # fmt: skip
    """Record what `fn` does and replay it at every later call that the recording fits.

    The first call runs `fn` and observes it, the second records, the third replays: on the GPU as a
    CUDA graph, on the CPU as a tape of ATen calls. Results are bit-equal to those of `fn`; a call
    that cannot be replayed runs `fn` itself, and `cgt.explain` says why.

    Args:
        fn: a function, method, `functools.partial` or `nn.Module`. Arguments and result may be any
            pytree of tensors and plain values; plain values are compared by value. Without `fn`, a
            decorator is returned.
        static_argnums, static_argnames: arguments taken as one hashable value, tensors not sought.
        max_records: recordings kept per function and place in the tree (what ran before it in the iteration); past it
            calls run eagerly until a cool-down ends. By default 8, two more for each that was replayed, 64 at most.
        max_graphs: upper limit on recordings in the process. At it, a new one of this function takes the place of
            the least recently used. Environment: CGT_MAX_GRAPHS.
        outputs: what happens to a result somebody still holds when a replay is about to overwrite
            it. "rescue" moves it to ordinary memory; "error" makes a later access raise; "borrow"
            lets it be overwritten.
        inputs: "auto" pins tensors whose address is stable and copies the rest inside the graph;
            "fixed" records again when an address changes; "copied" copies every plain argument.
        dynamic: names of arguments that are numbers and other ones at each call. One that changes is
            found out by itself, at the price of a call or two; this says it in advance.
        audit: which replays of each recording run eagerly, too, from the same state, and are compared bit by
            bit; by default "first:2,doubling:1": the first two, and then the 4th, 8th, 16th ...; "every:1000":
            each 1000th; with rtol:1e-5 or atol:1e-8 beside, as `torch.allclose` does; "0": none. Where they part,
            eager's values stand, the recording goes, and a `CgtWarning` names what is different. So are replays
            of a backward outside of the function. Environment: CGT_AUDIT.
        memory_budget: bytes, or "2GiB", that the recordings of the whole process may hold when another one of
            this function is made: else those go that ran longest ago and have none behind them. What counts is what
            `cgt.memory` tells of each. Environment: CGT_MEMORY_BUDGET.
        pad: name of an argument -> a dimension, several, or a `cgt.Pad`. Its tensors are filled up along these to the
            next of a few sizes, and results are cut, so that few recordings serve calls of many sizes: {"x": 0} for
            a batch, {"ids": (0, 1), "mask": (0, 1)} with a length that the mask masks. For functions that only return
            results, in which entries of a batch do not depend on each other. Some calls run without padding, too, so
            that what the function prints, or takes from a queue, happens twice. Both results are compared; where they
            differ by more than rounding, a `CgtWarning` says so and nothing is padded any more. Bit-equal to eager
            with the filled arguments; kernels for another size round in another way.
        parallel: on the GPU, whether operations that need nothing of each other run side by side: "never"; "always";
            "auto" measures both when a replay is audited. It takes more memory. Environment: CGT_PARALLEL.

    Returns:
        A function with the name, docstring and signature of `fn`, which is its `__wrapped__`. Of a module, that very
        module, jitted in place as `module.compile()` compiles it: calls of it replay, hooks included, and all else is
        as it was. `module.forward(x)` is eager, and so are calls of what is copied or unpickled from it; `cgt.unjit`
        is the way back. Of a `DistributedDataParallel` what it wraps is jitted. Jitted again, a module has the new
        options.

    Raises:
        TypeError: `fn` is not callable, or is a generator or coroutine function.
        CgtError: an unknown option value; a module whose class is called in a way of its own; at a call: a static
            argument that cannot be compared.

    >>> import torch, cgt
    >>> @cgt.jit
    ... def f(x, scale=2.0):
    ...     return (x * scale).relu()
    >>> x = torch.tensor([-1.0, 3.0])
    >>> [f(x).tolist() for _ in range(3)]
    [[0.0, 6.0], [0.0, 6.0], [0.0, 6.0]]
    >>> cgt.stats(f).replays
    1
    """
    opts = check_options(static_argnums, static_argnames, max_records, max_graphs, outputs, inputs, dynamic, audit,
                         memory_budget, pad, parallel)  # fmt: skip
    return functools.partial(jitted, opts=opts) if fn is None else jitted(fn, opts)


def jitted(fn, opts):
    """What `jit` returns for fn, and where it is a decorator."""
    check_function(fn)
    check_names(fn, opts)
    if not isinstance(fn, torch.nn.Module):
        return site_of(fn, opts)
    state = state_behind(fn)
    if state is None or state.opts != opts:
        check_call(called(fn))
        vars(called(fn))[CALL] = site_of(plain_of(called(fn)), opts)
    return fn


def unjit(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The plain one again: a module that was jitted, which is returned; of a function, what it was made of. Its
    recordings are freed.

    Raises:
        CgtError: `fn` was not made by `cgt.jit`.
    """
    reset(fn)
    plain = plain_of(fn)
    if not isinstance(fn, torch.nn.Module):
        return plain
    own = vars(called(fn))
    del own[CALL]
    if hasattr(plain, "compiled"):  # in place, before it was jitted
        own[CALL] = plain.compiled
    return fn


def called(module):
    """The module itself; of one that exchanges gradients what it wraps: the exchange stays its own."""
    return module.module if isinstance(module, torch.nn.parallel.DistributedDataParallel) else module


def plain_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    """What is recorded: of a module what a call of it does, a method of it also where it was compiled in place."""
    now = vars(called(fn)).get(CALL) if isinstance(fn, torch.nn.Module) else fn
    if hasattr(now, sites.ATTRIBUTE):
        return now.__wrapped__
    if now is fn:
        return fn
    if now is None:
        return called(fn)._call_impl

    def _call_impl(_, *args, **kwargs):
        return now(*args, **kwargs)

    _call_impl.compiled = now
    return types.MethodType(_call_impl, called(fn))


def called_by(fn):
    """The module of which this is what a call does, or None."""
    module = getattr(fn, "__self__", None)
    return module if isinstance(module, torch.nn.Module) and getattr(fn, "__name__", "") == "_call_impl" else None


def site_of(fn, opts):
    module = called_by(fn)
    name = getattr(fn, "__qualname__", None) or getattr(fn, "__name__", type(fn).__name__)
    site = dispatch.new_site(fn, name if module is None else type(module).__name__, opts)
    state = getattr(site, sites.ATTRIBUTE)
    functools.update_wrapper(site, fn)
    if module is not None:
        site.__name__ = site.__qualname__ = state.name
        site.__doc__, site.__module__ = module.forward.__doc__, type(module).__module__
        site.__signature__ = inspect.signature(module.forward)
    elif isinstance(fn, functools.partial):
        site.__name__ = site.__qualname__ = getattr(fn.func, "__name__", "partial")
    setattr(site, sites.ATTRIBUTE, state)  # again: fn's own attributes are the site's now
    if opts.dynamic:
        state.dynamic = live.paths_of_arguments(inspect.signature(site).parameters, opts.dynamic)
        state.learnt.numbers.live.update(state.dynamic)
    return site


def made_again(site):
    """How it is pickled and copied. Functions are by name, what is none is jitted again, and a module's is left behind,
    also where its class does not see to that."""
    fn = vars(site).get("__wrapped__")
    if fn is None or isinstance(fn, types.FunctionType):
        return site.__qualname__
    return (site_of, (fn, getattr(site, sites.ATTRIBUTE).opts)) if called_by(fn) is None else (type(None), ())


def check_options(
    static_argnums, static_argnames, max_records, max_graphs, outputs, inputs, dynamic, audit, memory_budget, pad,
    parallel,
):  # fmt: skip
    """Options as dispatch.py reads them; CgtError names the bad one."""
    chosen = (outputs, options.OUTPUTS), (inputs, options.INPUTS), (parallel, options.PARALLELS)
    for name, (value, known) in zip(("outputs", "inputs", "parallel"), chosen, strict=True):
        if value not in known:
            raise CgtError(errors.bad_option(name, value, f"one of {known}"))
    for name, value in (("max_records", max_records), ("max_graphs", max_graphs)):
        if value is None and name == "max_records":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CgtError(errors.bad_option(name, value, "a positive int"))
    nums = several("static_argnums", static_argnums, int, "ints")
    names = several("static_argnames", static_argnames, str, "strings")
    dynamic = several("dynamic", dynamic, str, "strings")
    audits = read("audit", audit, options.AUDIT, audit_of, "like 'first:2,every:1000' (also rtol:1e-5, atol:1e-8)")
    most = read("memory_budget", memory_budget, options.MEMORY_BUDGET, freeing.parse_budget, "bytes, or like '2GiB'")
    pads = read("pad", pad, {}, padding.parse, "like {'x': 0}: names of arguments and dimensions")
    return Options((nums, names), max_records, max_graphs, outputs, inputs, dynamic, audits, most, pads, parallel)


def several(name, value, kind, expected):
    """One of a kind, or several, as a tuple."""
    found = (value,) if isinstance(value, kind) else tuple(value)
    if not all(isinstance(one, kind) for one in found):
        raise CgtError(errors.bad_option(name, value, expected))
    return found


def read(name, value, switch, parse, expected):
    """What an option says, or else its switch in the environment."""
    try:
        return parse(switch if value is None else value)
    except (ValueError, TypeError, AttributeError) as error:
        told = errors.bad_switch(f"CGT_{name.upper()}", switch, expected)
        raise CgtError(told if value is None else errors.bad_option(name, value, expected)) from error


def check_names(fn, opts):
    """CgtError where an argument is named, or its position told, that the function does not have."""
    (positions, names), padded = opts.static, [name for name, *_ in opts.pad]
    if not (positions or names or opts.dynamic or padded):
        return
    try:
        known = inspect.signature(described(fn)).parameters
    except ValueError as error:  # compiled, and does not tell
        if padded:
            raise CgtError(errors.bad_option("pad", padded, "of a function that tells its arguments")) from error
        return
    kinds = [p.kind for p in known.values()]
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        for option, given in (("static_argnames", names), ("dynamic", opts.dynamic), ("pad", padded)):
            for name in given:
                if name not in known or known[name].kind is inspect.Parameter.VAR_POSITIONAL:
                    raise CgtError(errors.bad_option(option, name, f"one of {tuple(known)}"))
    n = len(kinds) - kinds.count(inspect.Parameter.KEYWORD_ONLY) - kinds.count(inspect.Parameter.VAR_KEYWORD)
    for position in positions if inspect.Parameter.VAR_POSITIONAL not in kinds else ():
        if not -n <= position < n:
            raise CgtError(errors.bad_option("static_argnums", position, f"one of {n} positional arguments"))


def described(fn):
    """What tells of the arguments."""
    module = fn if isinstance(fn, torch.nn.Module) else called_by(fn)
    return fn if module is None else called(module).forward


def check_function(fn):
    if isinstance(fn, type) or not callable(fn):
        raise TypeError(errors.not_a_function(repr(fn)))
    target = inspect.unwrap(described(fn))
    name = getattr(fn, "__qualname__", type(fn).__qualname__)  # a repr is somebody's code
    if inspect.isasyncgenfunction(target) or inspect.isgeneratorfunction(target):
        raise TypeError(errors.no_generator_function(name, "a generator function"))
    if inspect.iscoroutinefunction(target):
        raise TypeError(errors.no_generator_function(name, "a coroutine function"))


def check_call(module):
    """CgtError where the class has a __call__ of its own that does not come to nn.Module's, which calls what jit put
    there."""
    cls = next(cls for cls in type(module).__mro__ if "__call__" in vars(cls))
    code = getattr(inspect.unwrap(vars(cls)["__call__"]), "__code__", None)
    if cls is not torch.nn.Module and (code is None or CALLS.isdisjoint(code.co_names)):
        raise CgtError(errors.called_otherwise(type(module).__name__))


def state_behind(f):
    """The state behind a jitted module, function or a bound method of one; None where it is not jitted."""
    site = vars(called(f)).get(CALL) if isinstance(f, torch.nn.Module) else getattr(f, "__func__", f)
    return getattr(site, sites.ATTRIBUTE, None)


def state_of(f):
    """The same, or CgtError."""
    state = state_behind(f)
    if state is None:  # a repr is somebody's code
        raise CgtError(errors.not_jitted(type(f).__name__ if isinstance(f, torch.nn.Module) else f))
    return state


def step() -> None:
    """Begin an iteration: results of the last one may be overwritten from now on.

    Results that somebody still holds stay right: they are moved out of the way when the next recording runs; with
    `outputs="error"` touching them raises from here on. Without `step()` an iteration begins by itself, at a call of a
    function that already ran in it or that uses none of its results. Both are right; with `step()` a loop over one
    function becomes a path of recordings that pass results on without a copy. A program may say it in one loop and not
    in another: what is dead is forgotten either way.

    >>> import cgt
    >>> cgt.step()
    """
    if sites.DOOMED:
        freeing.sweep()
    core.step()


def reset(f: Callable[..., object] | None = None) -> None:
    """Free the recordings of `f` and what was recorded behind them, or of every jitted function;
    counters stay. Results that somebody holds stay valid, and the next call warms up again. Memory
    of a pool in which nothing lives any more goes back to PyTorch's allocator.

    Raises:
        CgtError: `f` was not made by `cgt.jit`.
    """
    for state in [state_of(f)] if f is not None else sites.states():
        freeing.reset_state(state)
    freeing.sweep()
    freeing.trim()
    if f is None:
        core.stepped(False)


def swap(plain, owner, name, tensors, kwargs):
    """torch.utils.swap_tensors wants that nobody else holds what it is given: if recordings do, they go."""
    try:
        plain(*tensors, **kwargs)
    except RuntimeError:
        reset()
        collect()
        plain(*tensors, **kwargs)


def script(plain, owner, name, args, kwargs):
    """torch.jit.script reads the source of a module's forward: of a jitted one, that of the plain one."""
    site = getattr(args[0], "__func__", args[0])
    return plain(site.__wrapped__ if isinstance(site, core.Site) else args[0], *args[1:], **kwargs)


def stats(f: Callable[..., object] | None = None) -> report.Stats:
    """Counters of `f`, or summed over every jitted function, as a `NamedTuple`: calls, warmups, records, replays,
    eager, rebinds, copied_bytes, rescues, rescued_bytes, graph_nodes, pool_bytes (bytes), reasons (text -> count),
    seconds (phase -> seconds), and backward: the same of the backwards of differentiable functions, or None.

    Raises:
        CgtError: `f` was not made by `cgt.jit`.
    """
    states = [state_of(f)] if f is not None else sites.states()
    return core.held(lambda: report.stats_of(states))


def explain(f: Callable[..., object] | None = None) -> str:
    """Text on what became of the calls of `f`: why some ran eagerly and what to change, a table of its recordings, and
    how they treat their inputs. Without `f`: the tree of all recordings, with counts and bytes. Printed, it has lines
    of at most 100 columns; as a str, one line for each statement.

    Raises:
        CgtError: `f` was not made by `cgt.jit`.
    """
    if f is None:
        return report.Explanation(core.held(lambda: report.explain_tree(sites.states())))
    state = state_of(f)
    return report.Explanation(core.held(lambda: report.explain_state(state)))


def show(f: Callable[..., object], path: str | os.PathLike[str]) -> None:
    """Draw the recordings of `f` into a file: what `explain` says, as a tree, in which an edge tells the value that was
    read or what ran before.

    Args:
        f: a function made by `cgt.jit`.
        path: where to. `tree.html` is a page that unfolds each recording to its ops, with file and line, and refers to
            nothing outside of it; `tree.dot` is for Graphviz, which draws it; `graphs.svg` has the nodes of each
            recording's graph, as they were recorded and as they are launched (`jit(parallel=)`).

    Raises:
        CgtError: `f` was not made by `cgt.jit`, or the path ends otherwise.
    """
    state, path = state_of(f), pathlib.Path(path)
    if path.suffix not in draw.FORMATS:
        raise CgtError(errors.no_drawing(path))

    def block():
        owners = {node: one for one in sites.states() for node in core.fn_nodes(one.f)}
        return draw.block_of(state, owners)

    path.write_text(draw.FORMATS[path.suffix](core.held(block)), encoding="utf-8")


def memory() -> report.Memory:
    """What recordings hold of each device's memory, to print: a `NamedTuple` of `pools` (device -> bytes that cgt's
    pool has of PyTorch's allocator) and `recordings`, each with `name`, `device`, `replays`, and in bytes `results`,
    `copies` (of inputs), `executable` (what the driver took for its graph; it takes pieces of some MiB, so that a sum
    is right, and one may be 0) and `lines` (where in the program results were made -> bytes). What a recording needs
    only while it runs is the pool's, for all.

    >>> import torch, cgt
    >>> f, x = cgt.jit(torch.relu), torch.ones(1000)
    >>> for _ in range(3):
    ...     y = f(x)
    >>> [one.results for one in cgt.memory().recordings if one.name == "relu"]
    [4000]
    """
    return core.held(lambda: report.memory_of(sites.states()))


class require_replay(contextlib.ContextDecorator):
    """Inside, a call of a jitted function that is not a replay raises instead of running: one that would be warmed,
    recorded or run eagerly. For loops that are settled, where a slow call would be a defect. In all threads, since
    autograd has threads of its own; blocks nest. Also a decorator.

    Raises:
        CgtError: at such a call, with the reason that `cgt.explain` would tell.

    >>> import torch, cgt
    >>> f, x = cgt.jit(torch.relu), torch.ones(2)
    >>> for _ in range(3):
    ...     y = f(x)
    >>> with cgt.require_replay():
    ...     y = f(x)
    """

    __slots__ = ()
    # Compiled: no interrupt comes between the two.
    __enter__, __exit__ = (
        (lambda self: self, lambda self, *_: None)
        if options.DISABLED or options.NAN
        else (core.require_begin, core.require_end)
    )


def message_for_poisoned(made):
    """What touching an overwritten result says; called where its iteration ends."""
    ended = line_in({})
    return errors.poisoned(made, "the program's end" if ended == NO_LINE else ended)


def name_of(f):
    """What messages call the function of this row."""
    return getattr(sites.SITES.get(f), "__qualname__", "a jitted function")


# What a call raises whose replay the driver refused (nothing was launched), or that a verdict keeps from being replayed
# where replays are required.
core.FAILED[0] = lambda f, error: CgtError(errors.replay_failed(name_of(f), error.args[2], error.args[1]))
core.UNREPLAYED[0] = lambda f, reason: CgtError(errors.not_replayed(name_of(f), reason))
core.POISONED[0] = message_for_poisoned
SWAPS.to(lambda: True, swap)[0]()
SCRIPTED.to(lambda: True, script)[0]()
core.REDUCE[0] = made_again
core.MAKE_VIEWS[0] = outside_dynamo(views.make)
core.SWEEP[0] = outside_dynamo(freeing.sweep)
core.SAME_VALUE[0] = outside_dynamo(pytree.same_value)
core.reads_by(READ_BEHIND, outside_dynamo(lengths.see_kernel), outside_dynamo(trace.see_lift))
core.max_path(options.MAX_GRAPHS)
logs.set_up(options.LOG, name_of)
if not self_check():
    core.reuse_outputs(False)
atexit.register(lambda: list(map(freeing.reset_state, sites.states())))  # graphs go before the CUDA context does
os.register_at_fork(after_in_child=freeing.forget_parent)
