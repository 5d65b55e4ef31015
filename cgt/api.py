"""The public functions."""

import atexit
import contextlib
import copy
import functools
import inspect
import os
import pathlib
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import cgt_core as core
import torch

from .data import Options
from .decide import budget, dispatch, freeing, logs, sites
from .decide.audit import parse as audit_of
from .make import trace
from .ranks import collectives
from .run import views
from .run.observe import NOT_USER_CODE, collect
from .run.taps import SWAPS
from .tools import draw, report
from .words import errors, options, pytree
from .words.errors import CgtError
from .words.private import READ_BEHIND, outside_dynamo, self_check


def jit(fn: Callable[..., Any] | None = None, *, static_argnums: int | Iterable[int] = (),
        static_argnames: str | Iterable[str] = (), max_records: int = options.MAX_RECORDS,
        max_graphs: int = options.MAX_GRAPHS, outputs: str = "rescue", inputs: str = "auto",
        dynamic: str | Iterable[str] = (), audit: str | None = None,
        memory_budget: int | str | None = None) -> Callable[..., Any]:  # fmt: skip
    """Record what `fn` does and replay it at every later call that the recording fits.

    The first call runs `fn` and observes it, the second records, the third replays: on the GPU as a
    CUDA graph, on the CPU as a tape of ATen calls. Results are bit-equal to those of `fn`; a call
    that cannot be replayed runs `fn` itself, and `cgt.explain` says why.

    Args:
        fn: a function, method, `functools.partial` or `nn.Module`. Arguments and result may be any
            pytree of tensors and plain values; plain values are compared by value. Without `fn`, a
            decorator is returned.
        static_argnums, static_argnames: arguments taken as one hashable value, tensors not sought.
        max_records: recordings kept per function and place in the tree (what ran before it in the
            iteration); past it calls run eagerly until a cool-down ends.
        max_graphs: recordings in the whole process at which a new one of this function makes room:
            those go that ran longest ago and have none behind them. Environment: CGT_MAX_GRAPHS.
        outputs: what happens to a result somebody still holds when a replay is about to overwrite
            it. "rescue" moves it to ordinary memory; "error" makes a later access raise; "borrow"
            lets it be overwritten.
        inputs: "auto" pins tensors whose address is stable and copies the rest inside the graph;
            "pinned" records again when an address changes; "copied" copies every plain argument.
        dynamic: names of arguments that are numbers and other ones at each call. One that changes is
            found out by itself, at the price of a call or two; this says it beforehand.
        audit: which replays of each recording run eagerly, too, from the same state, and are compared bit by
            bit; by default "first:2,doubling:1": the first two, and then the 4th, 8th, 16th ...; "every:1000":
            each 1000th; with rtol:1e-5 or atol:1e-8 beside, as `torch.allclose` does; "0": none. Where they part,
            eager's values stand, the recording goes, and a `CgtWarning` names what is different. So are replays
            of a backward outside of the function. Environment: CGT_AUDIT.
        memory_budget: bytes, or "2GiB", that the recordings of the whole process may hold when another one of
            this function is made: else those go that ran longest ago and have none behind them. What counts is what
            `cgt.memory` tells of each. Environment: CGT_MEMORY_BUDGET.

    Returns:
        A function with the name, docstring and signature of `fn`, which is its `__wrapped__`. That of a module has what
        the module has: its parameters, its methods, a layer by name. Of a `DistributedDataParallel` what it wraps is
        jitted in its place, and the module itself is returned.

    Raises:
        TypeError: `fn` is not callable, or is a generator or coroutine function.
        CgtError: an unknown option value; at a call: a static argument that cannot be compared.

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
    opts = check_options(
        static_argnums, static_argnames, max_records, max_graphs, outputs, inputs, dynamic, audit, memory_budget
    )
    return functools.partial(jitted, opts=opts) if fn is None else jitted(fn, opts)


def jitted(fn, opts):
    """What `jit` returns for fn, and where it is a decorator."""
    check_function(fn)
    if isinstance(fn, collectives.DistributedDataParallel):
        return jit_inside(fn, opts)
    check_dynamic(fn, opts.dynamic)
    return site_of(fn, opts)


def jit_inside(module, opts):
    """What a module that exchanges gradients wraps is jitted, in place: the exchange stays the module's."""
    inner = module.module
    if not hasattr(inner.forward, sites.ATTRIBUTE):
        check_dynamic(inner, opts.dynamic)
        inner.forward = site_of(inner.forward, opts)
    return module


def site_of(fn, opts):
    """What `jit` returns for fn."""
    name = getattr(fn, "__qualname__", None) or getattr(fn, "__name__", type(fn).__name__)
    site = dispatch.new_site(fn, name, opts, cls=class_of(fn))
    state = getattr(site, sites.ATTRIBUTE)
    functools.update_wrapper(site, fn)
    if isinstance(fn, torch.nn.Module):
        vars(site).clear()  # of what the module has in its own
        site.__name__ = site.__qualname__ = type(fn).__name__
        site.__doc__, site.__module__ = fn.forward.__doc__, type(fn).__module__
        site.__wrapped__, site.__signature__ = fn, inspect.signature(fn.forward)
    elif isinstance(fn, functools.partial):
        site.__name__ = site.__qualname__ = getattr(fn.func, "__name__", "partial")
    setattr(site, sites.ATTRIBUTE, state)  # again: fn's own attributes are the site's now
    return site


def class_of(fn):
    """The class of what `jit` returns. Functions are pickled by name, and what is none is jitted anew; a module's
    special methods (`len(f)`, `f[0]`), which Python looks up in the class, are that one's."""
    if isinstance(fn, types.FunctionType):
        return core.Site
    classes = type(fn).__mro__[: -len(torch.nn.Module.__mro__)] if isinstance(fn, torch.nn.Module) else ()
    known = {*dir(core.Site), *vars(torch.nn.Module)}
    methods = {name for cls in classes for name, value in vars(cls).items() if isinstance(value, types.FunctionType)}
    return class_with(frozenset(name for name in methods - known if name[:2] == name[-2:] == "__"))


@functools.cache
def class_with(names):
    made = {"__reduce__": reduced, "__copy__": lambda site: site, "__dir__": all_names, "__delattr__": delete}
    made |= {"__module__": core.Site.__module__, "__slots__": ()}
    return type("Site", (core.Site,), made | {name: special(name) for name in names})


def special(name):
    return lambda site, *args: same(site, getattr(vars(site)["__wrapped__"], name)(*args))


def same(site, result):
    return site if result is vars(site)["__wrapped__"] else result


def reduced(site):
    return site_of, (vars(site)["__wrapped__"], getattr(site, sites.ATTRIBUTE).opts)


def all_names(site):
    return {*object.__dir__(site), *dir(vars(site)["__wrapped__"])}


def delete(site, name):
    module = module_of(site, name)
    if module is None:
        object.__delattr__(site, name)
    else:
        delattr(module, name)


def module_of(site, name):
    """The module that was jitted, if the attribute is one of its; or None."""
    module = vars(site).get("__wrapped__")
    ours = name == sites.ATTRIBUTE or name.startswith("__")
    return module if isinstance(module, torch.nn.Module) and not ours else None


def set_of_module(site, name, value):
    """Is it the module's, and set there?"""
    module = module_of(site, name)
    if module is not None:
        setattr(module, name, value)
    return module is not None


def deep_copy(site, memo):
    """As functions are copied; but a module, or the object of a bound method, is another one then, with recordings of
    its own."""
    fn = vars(site).get("__wrapped__")
    copied = copy.deepcopy(fn, memo)
    return site if copied is fn else site_of(copied, getattr(site, sites.ATTRIBUTE).opts)


OF_FUNCTIONS = "__code__ __globals__ __closure__ __defaults__ __kwdefaults__ __self__".split()  # what tools ask for


def of_module(site, name):
    """What the module that was jitted has under a name. Where one of its methods returns the module (`train()`,
    `to()`), what was made of it is returned, so that `model = cgt.jit(net).eval()` is not the plain one."""
    module = module_of(site, name)
    if module is None and name in OF_FUNCTIONS:
        return getattr(vars(site).get("__wrapped__"), name)
    if module is None:
        raise AttributeError(f"{type(site).__name__!r} object has no attribute {name!r}")
    value = getattr(module, name)
    if not isinstance(value, types.MethodType) or value.__self__ is not module:
        return value
    return functools.wraps(value)(lambda *args, **kwargs: same(site, value(*args, **kwargs)))


def check_options(
    static_argnums, static_argnames, max_records, max_graphs, outputs, inputs, dynamic, audit, memory_budget
):
    """Options as dispatch.py reads them; CgtError names the bad one."""
    for name, value, known in (("outputs", outputs, options.OUTPUTS), ("inputs", inputs, options.INPUTS)):
        if value not in known:
            raise CgtError(errors.bad_option(name, value, f"one of {known}"))
    for name, value in (("max_records", max_records), ("max_graphs", max_graphs)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CgtError(errors.bad_option(name, value, "a positive int"))
    nums = several("static_argnums", static_argnums, int, "ints")
    names = several("static_argnames", static_argnames, str, "strings")
    dynamic = several("dynamic", dynamic, str, "strings")
    audits = read("audit", audit, options.AUDIT, audit_of, "like 'first:2,every:1000' (also rtol:1e-5, atol:1e-8)")
    most = read("memory_budget", memory_budget, options.MEMORY_BUDGET, budget.parse, "bytes, or like '2GiB'")
    return Options((nums, names), max_records, max_graphs, outputs, inputs, dynamic, audits, most)


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
    except (ValueError, AttributeError) as error:
        told = errors.bad_switch(f"CGT_{name.upper()}", switch, expected)
        raise CgtError(told if value is None else errors.bad_option(name, value, expected)) from error


def check_dynamic(fn, names):
    """CgtError where an argument is named that the function does not have."""
    known = inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn).parameters if names else {}
    for name in names:
        if name not in known and not any(p.kind == p.VAR_KEYWORD for p in known.values()):
            raise CgtError(errors.bad_option("dynamic", name, f"one of {tuple(known)}"))


def check_function(fn):
    """TypeError for what cannot be jitted."""
    if isinstance(fn, type) or not callable(fn):
        raise TypeError(errors.not_a_function(repr(fn)))
    target = fn.forward if isinstance(fn, torch.nn.Module) else inspect.unwrap(fn)
    name = getattr(fn, "__qualname__", type(fn).__qualname__)  # a repr is somebody's code
    if inspect.isasyncgenfunction(target) or inspect.isgeneratorfunction(target):
        raise TypeError(errors.no_generator_function(name, "a generator function"))
    if inspect.iscoroutinefunction(target):
        raise TypeError(errors.no_generator_function(name, "a coroutine function"))


def state_of(f):
    """The state behind a jitted function or a bound method of one."""
    f = f.module.forward if isinstance(f, collectives.DistributedDataParallel) else f
    state = getattr(getattr(f, "__func__", f), sites.ATTRIBUTE, None)
    if state is None:
        raise CgtError(errors.not_jitted(f))
    return state


def all_states():
    """States of every jitted function alive."""
    return [getattr(site, sites.ATTRIBUTE) for site in sites.alive()]


def step() -> None:
    """Begin an iteration: results of the last one may be overwritten from now on.

    Results that somebody still holds stay right: they are moved out of the way when the next
    recording runs; with `outputs="error"` touching them raises from here on. Without `step()` an
    iteration begins by itself, at a call of a function that already ran in it or that uses none of
    its results. Both are right; with `step()` a loop over one function becomes a path of
    recordings that pass results on without a copy. A program may say it in one loop and not in
    another: what is dead is forgotten either way.

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
    for state in [state_of(f)] if f is not None else all_states():
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


def stats(f: Callable[..., object] | None = None) -> report.Stats:
    """Counters of `f`, or summed over every jitted function, as a `NamedTuple`: calls, warmups,
    records, replays, eager, rebinds, copied_bytes, rescues, rescued_bytes, graph_nodes,
    pool_bytes (bytes), reasons (text -> count), seconds (phase -> seconds), and backward: the same
    of the backwards of differentiable functions, or None.

    Raises:
        CgtError: `f` was not made by `cgt.jit`.
    """
    states = [state_of(f)] if f is not None else all_states()
    return core.held(lambda: report.stats_of(states))


def explain(f: Callable[..., object] | None = None) -> str:
    """Text on what became of the calls of `f`: its recordings, how each input is bound, why calls
    ran eagerly and what to change. Without `f`: the tree of all recordings, with counts and bytes.

    Raises:
        CgtError: `f` was not made by `cgt.jit`.
    """
    if f is None:
        return core.held(lambda: report.explain_tree(all_states()))
    state = state_of(f)
    return core.held(lambda: report.explain_state(state))


def show(f: Callable[..., object], path: str | os.PathLike[str]) -> None:
    """Draw the recordings of `f` into a file: what `explain` says, as a tree, in which an edge tells the value that was
    read or what ran before.

    Args:
        f: a function made by `cgt.jit`.
        path: where to. `tree.html` is a page that unfolds each recording to its ops, with file and line; `tree.svg` a
            drawing; `tree.dot` is for Graphviz. None of them refers to anything outside of it.

    Raises:
        CgtError: `f` was not made by `cgt.jit`, or the path ends otherwise.
    """
    state, path = state_of(f), pathlib.Path(path)
    if path.suffix not in draw.FORMATS:
        raise CgtError(errors.no_drawing(str(path), list(draw.FORMATS)))

    def block():
        owners = {node: one for one in all_states() for node in core.fn_nodes(one.f)}
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
    return core.held(lambda: report.memory_of(all_states()))


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
        (core.require_begin, core.require_end) if not options.DISABLED else (lambda self: self, lambda self, *_: None)
    )


def message_for_poisoned(made):
    """What touching an overwritten result says; called where its iteration ends."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(NOT_USER_CODE):
        frame = frame.f_back
    ended = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "the program's end"
    return errors.poisoned(made, ended)


def name_of(f):
    """What messages call the function of this row."""
    return getattr(sites.SITES.get(f), "__qualname__", "a jitted function")


def error_for_failed(f, error):
    """What a call raises whose replay the driver refused: nothing was launched."""
    return CgtError(errors.replay_failed(name_of(f), error.args[2], error.args[1]))


def error_for_unreplayed(f, reason):
    """What a call raises that a verdict keeps from being replayed, where replays are required."""
    return CgtError(errors.not_replayed(name_of(f), reason))


def at_exit():
    """Graphs go before the CUDA context does."""
    for state in all_states():
        freeing.reset_state(state)


core.FAILED[0] = error_for_failed
core.UNREPLAYED[0] = error_for_unreplayed
core.POISONED[0] = message_for_poisoned
SWAPS.to(lambda: True, swap)[0]()
core.OF_MODULE[0], core.SET_OF_MODULE[0], core.DEEP_COPY[0] = outside_dynamo(of_module), set_of_module, deep_copy
core.UNFLATTEN[0] = outside_dynamo(pytree.unflatten)
core.MAKE_VIEW[0] = outside_dynamo(views.make)
core.SWEEP[0] = outside_dynamo(freeing.sweep)
core.SAME_VALUE[0] = outside_dynamo(pytree.same_value)
core.reads_by(READ_BEHIND, outside_dynamo(trace.see_kernel), outside_dynamo(trace.see_lift))
core.TAPE_ERRORS[-1] = torch.linalg.LinAlgError
core.max_path(options.MAX_GRAPHS)
logs.set_up(options.LOG, name_of)
if not self_check():
    core.reuse_outputs(False)
atexit.register(at_exit)
os.register_at_fork(after_in_child=freeing.forget_parent)
