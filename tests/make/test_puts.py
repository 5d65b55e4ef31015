"""What a call stores (`self.last = loss`) or appends (`self.losses.append(loss)`) and does not read otherwise: the function
replays, and each replay does so as eager would. Where the call could see it, it runs eagerly."""

import collections
import copy
import dataclasses
import threading
import types
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import in_threads, same, tells, values
from torch import nn

import cgt
from cgt.words import options


class Opaque:
    """Made in the call."""


class Log:
    def __init__(self):
        self.losses, self.sizes, self.last, self.given, self.size, self.mode = [], [], None, None, None, False


HISTORY, LAST = [], None
OTHERS = [None]


def store_result(o, x):
    o.last = y = x * 2
    return y


def store_made(o, x):
    o.last = x.sum()
    o.given = x
    o.size = x.shape
    return x * 2


def append_result(o, x):
    y = x * 2
    o.losses.append(y)
    return y + 1, y


def append_made(o, x):
    y = x * 2
    o.losses.append(y.sum())
    o.losses.append(y.mean().clamp(max=3))
    o.sizes.append(len(x))
    return y


def append_twice(o, x):
    y = x.cos()
    for _ in range(2):
        o.losses.append(y)
    o.last = y
    return x + 1


def store_parts(o, x):
    y = x * 2
    o.last, o.given = y[:2], y[1:]
    return x + y


def append_and_count(o, x):
    o.size = 5
    y = x - 1
    if y.sum() > 0:
        o.losses.append(y)
    else:
        o.sizes.append("less")
    return y


@dataclasses.dataclass
class Found:
    loss: torch.Tensor
    more: dict


Pair = collections.namedtuple("Pair", "first second")


def store_list(o, x):
    o.last = [x * 2, [], {"x": x}]
    return x + 1


def store_dataclass(o, x):
    o.last = Found(x.sum(), {"n": len(x), "mean": x.mean()})
    return x * 2


def store_namespace(o, x):
    y = x * 2
    o.last = types.SimpleNamespace(y=y, both=(y, x), pair=Pair(y.sum(), 3))
    return y


def store_distribution(o, x):
    o.last = torch.distributions.Normal(x * 2, x.abs() + 1, validate_args=False)
    return x + 1


def append_transition(o, x):
    y = x.tanh()
    o.losses.append((x, y, y.sum().item(), False))
    return y


def append_dicts(o, x):
    for k in range(2):
        o.losses.append({"k": k, "x": x + k, "mean": x.mean()})
    o.losses.append({"sum": x.sum().item(), "more": [x * 3]})
    return x * 3


PUTS = [
    store_list, store_dataclass, store_namespace, store_distribution, append_transition, append_dicts,
    store_result, store_made, append_result, append_made, append_twice, store_parts, append_and_count,
]  # fmt: skip


def puts_agree(function, device, n=14, between=lambda o, k: None, sizes=(3,), wrap=cgt.jit):
    """As `agree`, of all that is held, which stays as it was: the jitted one and its object."""
    ours, theirs = Log(), Log()
    f = wrap(lambda x: function(ours, x))
    for k in range(n):
        between(ours, k), between(theirs, k)
        x = torch.full((sizes[k % len(sizes)],), k - 4.5, device=device)
        assert same(f(x), function(theirs, x)), k
        assert same(vars(ours), vars(theirs)), k
    return f, ours


@pytest.mark.parametrize("put", PUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("sizes", [(3,), (3, 3, 3, 5, 5)], ids=["one size", "two sizes"])
def test_what_is_only_stored_or_appended_is_by_replays_too(device, put, sizes):
    f, o = puts_agree(put, device, sizes=sizes)
    assert cgt.stats(f).replays >= (14 - 2 if sizes == (3,) else 6) - 2 * (put is append_and_count), cgt.explain(f)
    if put is store_result:
        result = f(torch.ones(3, device=device))
        assert o.last is result


def test_what_was_stored_is_its_holders(device):
    def between(o, k):
        if o.losses:
            o.losses[-1].add_(k)
        if k == 6:
            o.losses.clear()
        if k == 8:
            o.losses = [o.losses.pop()]
        if k == 10:
            o.losses.insert(0, "text")

    f, _ = puts_agree(append_made, device, between=between)
    assert cgt.stats(f).replays >= 10, cgt.explain(f)


def test_explain_tells_what_a_replay_stores(device):
    f, _ = puts_agree(append_twice, device)
    assert "stores ours.last" in cgt.explain(f) and "appends to ours.losses" in cgt.explain(f)


def test_what_is_called_is_read(device):
    o = Log()

    def function(x):
        y = o.last(x) if o.mode else x * 2
        o.last = 3
        return y

    f, x = cgt.jit(function), torch.ones(3, device=device)
    for k in range(12):
        o.mode, o.last = k % 4 == 3, (torch.sin if k % 8 == 3 else torch.cos)
        want = (o.last(x) if o.mode else x * 2).clone()
        assert torch.equal(f(x), want) and o.last == 3, k


def test_global_and_variable_that_are_only_stored(device):
    found, last = [], None
    HISTORY.clear()

    def function(x):
        global LAST
        nonlocal last
        last = x.sin()
        LAST = x.cos()
        HISTORY.append(LAST_OF(x))
        found.append(x * 3)
        return x * 2

    f = cgt.jit(function)
    for k in range(10):
        x = torch.full((3,), float(k), device=device)
        assert torch.equal(f(x), x * 2)
        assert torch.equal(last, x.sin()) and torch.equal(LAST, x.cos())
        assert len(found) == len(HISTORY) == k + 1
    assert all(torch.equal(t, torch.full((3,), 3.0 * k, device=device)) for k, t in enumerate(found))
    assert cgt.stats(f).replays == 8, cgt.explain(f)


# Lists in a dict: what is appended, and from where else code may come to them. "%" is the value.
BOOKS = {
    "global": ("book['a'].append(%)", "book = {'a': []}"),
    "several": ("book['a'].append(%); book['b'].append(2 * %); book['n'] += 1", "book = {'a': [], 'b': [], 'n': 0}"),
    "attribute": ("o.book['a'].append(%)", "o.book = {'a': []}"),
    "factory": ("book['a'].append(%)", "book = collections.defaultdict(list)"),
    "nested": ("book['x']['a'].append(%); book['n'] += 1", "book = {'x': {'a': []}, 'n': 0}"),
    "number as a key": ("book[0].append(%)", "book = {0: []}"),
}
BOOKS_READ = {
    "length": ("book['a'].append(%); y = y + len(book['a'])", "book = {'a': []}"),
    "values": ("book['a'].append(%); y = y + sum(map(len, book.values()))", "book = {'a': []}"),
    "local name": ("d = book; d['a'].append(%); y = y + len(d['a'])", "book = {'a': []}"),
    "another global": ("book['a'].append(%); y = y + len(more['a'])", "book = more = {'a': []}"),
    "the list": ("book['a'].append(%); y = y + len(rows)", "rows = []; book = {'a': rows}"),
    "default": ("book['a'].append(%); y = y + f()", "book = {'a': []}\ndef f(d=book): return len(d['a'])"),
    "default of a factory": ("book['a'].append(%); y = y + f()", "book = collections.defaultdict(list)\ndef f(d=book): return len(d['a'])"),
    "nested": ("book['x']['a'].append(%); y = y + len(book['x']['a'])", "book = {'x': {'a': []}}"),
    "nested, the inner one": ("book['x']['a'].append(%); y = y + f(book['x'])", "book = {'x': {'a': []}}\ndef f(d): return len(d['a'])"),
    "nested, the outer one": ("book['x']['a'].append(%); y = y + sum(len(d['a']) for d in book.values())", "book = {'x': {'a': []}}"),
    "nested, another name": ("book['x']['a'].append(%); y = y + len(inner['a'])", "inner = {'a': []}; book = {'x': inner}"),
    "nested, a default": ("book['x']['a'].append(%); y = y + f()", "book = {'x': {'a': []}}\ndef f(d=book): return len(d['x']['a'])"),
    "tuple": ("book['a'].append(%); y = y + len(pair[0]['a'])", "book = {'a': []}; pair = (book, 1)"),
    "closure": ("book['a'].append(%); y = y + f()", "book = {'a': []}\ndef make(d):\n    return lambda: len(d['a'])\nf = make(book)"),
    "given to a helper": ("book['a'].append(%); y = y + f(book)", "book = {'a': []}\ndef f(d): return len(d['a'])"),
    "two keys": ("book['a'].append(%); y = y + len(book['b'])", "book = {'a': []}; book['b'] = book['a']"),
    "attribute": ("o.book['a'].append(%); y = y + len(vars(o)['book']['a'])", "o.book = {'a': []}"),
}


def keep_book(jit, device, text, setup):
    """(the function, results and what all places hold after each of 16 calls)"""
    scope = {"o": Log(), "collections": collections, "__name__": __name__}
    exec(setup, scope)
    exec(f"def function(x):\n    y = x * 2\n    {text.replace('%', 'y.sum().item()')}\n    return y", scope)
    f, found = jit(scope["function"]), []
    for k in range(16):
        y = f(values(device, seed=k))
        found.append((y.clone(), copy.deepcopy({name: scope.get(name) for name in ("book", "rows")}), list(vars(scope["o"]).items())[-1]))
        if k == 10:
            (scope.get("book", {}).get("x") or scope.get("book", {})).update(a=[])  # another list
        if k == 12:
            (scope.get("book", {}).get("x") or scope.get("book", {"a": []})).setdefault("a", []).append(7.0)
    return f, found


@pytest.mark.parametrize(("text", "setup"), BOOKS.values(), ids=BOOKS)
def test_lists_in_a_dict_are_appended_to_by_replays(device, text, setup):
    f, ours = keep_book(cgt.jit, device, text, setup)
    assert same(ours, keep_book(lambda f: f, device, text, setup)[1]) and cgt.stats(f).replays >= 10, cgt.explain(f)


@pytest.mark.parametrize(("text", "setup"), BOOKS_READ.values(), ids=BOOKS_READ)
def test_lists_in_a_dict_that_code_may_read_are_not(device, text, setup, monkeypatch):
    monkeypatch.setattr(options, "AUDIT", "0")
    f, ours = keep_book(cgt.jit, device, text, setup)
    assert same(ours, keep_book(lambda f: f, device, text, setup)[1]), cgt.explain(f)


def LAST_OF(x):  # noqa: N802
    return x.tan()


def asks_length(o, x):
    o.losses.append(x * 2)
    return x * len(o.losses)


def asks_last(o, x):
    o.losses.append(x * 2)
    return x + o.losses[-1]


def asks_first(o, x):
    o.losses.append(x * 2)
    return x + o.losses[0]


def asks_stored(o, x):
    y = x if o.last is None else x + o.last
    o.last = y * 2
    return y


def asks_in_another(o, x):
    o.last = x * 2
    return x + asked(o)


def asked(o):
    return o.last.sum()


def returns_the_list(o, x):
    o.losses.append(x * 2)
    del o.losses[:-2]
    return x, list(o.losses)


def adds_in_place(o, x):
    o.losses += [x * 2]
    return x


def stores_and_returns_one(o, x):
    o.last = [x * 2]
    return x, o.last


def stores_one_inside_of_another(o, x):
    inner = {"x": x * 2}
    o.last = (inner, [inner])
    return x


def stores_what_was_there(o, x):
    o.last = None if o.last is OTHERS else OTHERS
    return x


def stores_what_another_keeps(o, x):
    made = Opaque()
    made.x = x * 2
    OTHERS[:] = [made]
    o.last = made
    return x


def stores_a_set(o, x):
    o.last = {1, len(x)}
    return x


def stores_an_object(o, x):
    o.last = Opaque()
    return x


def appends_and_turns(o, x):
    o.losses.append(x * 2)
    o.last = x.sin()
    o.mode = not o.mode
    return x * 3


def asks_all(o, x):
    o.losses.append(x * 2)
    return x + len(vars(o)["losses"])


ASKS = [
    asks_length, asks_last, asks_first, adds_in_place, stores_an_object, asks_all,
    stores_and_returns_one, stores_one_inside_of_another, stores_what_was_there, stores_what_another_keeps,
    stores_a_set,
]  # fmt: skip


@pytest.mark.parametrize("ask", ASKS, ids=lambda f: f.__name__)
def test_what_is_stored_and_read_keeps_the_function_from_replaying(device, ask):
    f, _ = puts_agree(ask, device)
    assert cgt.stats(f).replays == 0, cgt.explain(f)


@pytest.mark.parametrize("ask", [asks_stored, asks_in_another, appends_and_turns, returns_the_list], ids=lambda f: f.__name__)
def test_a_tensor_or_a_flag_that_is_stored_and_read_is_followed(device, ask):
    f, _ = puts_agree(ask, device)
    assert cgt.stats(f).replays >= 10, cgt.explain(f)


@pytest.mark.parametrize("store", [append_made, asks_stored], ids=lambda f: f.__name__)
@pytest.mark.parametrize("outputs", ["error", "borrow"])
def test_what_is_stored_lasts_whatever_becomes_of_results(device, outputs, store):
    f, _ = puts_agree(store, device, wrap=lambda f: cgt.jit(f, outputs=outputs))
    assert cgt.stats(f).replays == 0


def test_list_in_two_places_is_read_where_it_is_read(device):
    o = Log()
    both = (o.losses,)

    def function(x):
        o.losses.append(x * 2)
        return x * len(both[0])

    f = cgt.jit(function)
    for k in range(1, 8):
        assert torch.equal(f(torch.ones(3, device=device)), torch.full((3,), float(k), device=device))
    assert cgt.stats(f).replays == 0


def test_training_loop_that_keeps_its_losses(device):
    def outcomes(wrap):
        torch.manual_seed(0)
        o, model = Log(), nn.Linear(3, 1).to(device)
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            o.losses.append(loss.detach())
            o.last = loss.detach()
            o.size = len(x)

        f = wrap(step)
        for k in range(12):
            f(torch.full((2, 3), 0.1 * k, device=device))
            found.append(o.last.clone())
            if k % 4 == 3:
                cgt.step()
        return f, [found, o.losses, o.size]

    _, want = outcomes(lambda f: f)
    f, got = outcomes(cgt.jit)
    assert same(got, want) and cgt.stats(f).replays >= 6, cgt.explain(f)


def test_differentiable_call_that_stores_runs_eagerly(device):
    def outcomes(wrap):
        o, w, found = Log(), torch.ones(3, device=device).requires_grad_(), []

        def function(x):
            y = (w * x).sin()
            o.losses.append(y.detach().sum())
            o.last = y
            return y.sum()

        f = wrap(function)
        for k in range(8):
            w.grad = None
            f(torch.full((3,), 0.1 * k, device=device)).backward()
            found += [w.grad.clone(), list(o.losses), o.last.requires_grad, o.last.detach().clone()]
        return f, found

    _, want = outcomes(lambda f: f)
    f, got = outcomes(cgt.jit)
    assert same(got, want) and cgt.stats(f).replays == 0


def test_object_that_is_stored_to_and_returned(device):
    o = Log()

    def function(x):
        o.last = x * 2
        return o

    f = cgt.jit(function)
    for k in range(6):
        x = torch.full((3,), float(k), device=device)
        assert f(x) is o and torch.equal(o.last, x * 2)
    assert cgt.stats(f).replays == 4, cgt.explain(f)


def test_what_was_stored_is_let_go_of(device):
    o = Log()
    f = cgt.jit(lambda x: append_twice(o, x))
    for _ in range(4):
        f(torch.ones(3, device=device))
    last = weakref.ref(o.last.untyped_storage())
    o.losses.clear()
    f(torch.ones(3, device=device))
    f(torch.ones(3, device=device))
    assert last() is None or last() is not o.last.untyped_storage()
    o.last = big = torch.ones(4, device=device)
    f(torch.ones(3, device=device))
    f = cgt.jit(lambda x: store_result(o, x))
    o.last, gone = big, weakref.ref(big)
    del big
    for _ in range(4):
        f(torch.ones(3, device=device))
    assert gone() is None


TWICE = {  # what comes to several places; does it replay
    "two": ("o.last = o.given = [o.size, x * 2]", True),
    "three": ("o.last = o.given = o.mode = {'n': o.size, 'y': x * o.size}", True),
    "lists": ("e = {'n': o.size, 'y': x * 2}; o.losses.append(e); o.sizes.append(e)", True),
    "again": ("e = [o.size]; o.losses.append(e); o.losses.append(e)", True),
    "pairs": ("e = [o.size, x * 2]; d = [o.size, x * 3]; o.last = e; o.losses.append(d); o.given = d; o.mode = e", True),
    "nested": ("e = [o.size]; o.last = e; o.given = [e, x * 2]", False),
    "returned": ("o.last = o.given = made = [o.size]", False),
}


@pytest.mark.parametrize("text, replays", TWICE.values(), ids=TWICE)
def test_what_comes_to_several_places_is_one_there(device, text, replays):
    def build():
        o = Log()
        o.size = 0
        scope = {"o": o}
        exec(f"def step(x):\n    o.size += 1\n    {text}\n    return x + 1" + ", made" * ("made" in text), scope)
        return o, scope["step"]

    def who(o):
        """Which of what lies there is one and the same."""
        known = {}
        ones = [one for one in (o.last, o.given, o.mode, *o.losses, *o.sizes) if isinstance(one, (list, dict))]
        return [known.setdefault(id(one), len(known)) for one in ones]

    (ours, jitted), (theirs, plain) = build(), build()
    f = cgt.jit(jitted)
    for k in range(20):
        x = values(device, seed=k)
        assert same(f(x), plain(x)) and same(list(vars(ours).values()), list(vars(theirs).values()))
        assert who(ours) == who(theirs)
        if k == 10:
            ours.last = theirs.last = None
    assert cgt.stats(f).replays >= 16 * replays, cgt.explain(f)


def test_list_under_two_names_grows_once(device):
    o = Log()
    o.sizes = o.losses

    def function(x):
        o.losses.append(x * 2)
        o.sizes.append(x * 3)
        return x + 1

    f = cgt.jit(function)
    for k in range(1, 8):
        x = torch.full((3,), float(k), device=device)
        f(x)
        assert len(o.losses) == 2 * k and torch.equal(o.losses[-2], x * 2) and torch.equal(o.losses[-1], x * 3)


def test_another_function_reads_what_is_stored(device):
    ours, theirs = Log(), Log()
    f, g = cgt.jit(lambda x: store_made(ours, x)), cgt.jit(lambda x: x * ours.last)
    for k in range(10):
        x = torch.full((3,), float(k), device=device)
        assert torch.equal(f(x), store_made(theirs, x)) and torch.equal(g(x), x * theirs.last)


@tells("used_elsewhere")
def test_what_another_thread_stores_meanwhile_is_not_taken_for_the_calls(device):
    o, stop = Log(), threading.Event()

    def others():
        while not stop.is_set():
            o.losses.append(None)
            stop.wait(0.001)

    thread = threading.Thread(target=others, name="the other", daemon=True)
    thread.start()
    try:
        f = cgt.jit(lambda x: append_result(o, x))
        for _ in range(5):
            f(torch.ones(3, device=device))
    finally:
        stop.set()
        thread.join()
    assert cgt.stats(f).replays == 0 and sum(t is not None for t in o.losses) == 5
    assert any("another thread (the other)" in reason for reason in cgt.stats(f).reasons), cgt.explain(f)


def thread_of(names, stop, behind="pass"):
    """One whose stack is of modules of these names, the outermost first. `behind`: what each does when it is stopped."""
    call, ready = stop.wait, threading.Event()
    for name in reversed(names):
        space = {"__name__": name, "call": call, "ready": ready}
        exec(f"def run():\n    ready.set()\n    call()\n    {behind}", space)
        call = space["run"]
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    assert ready.wait(10)
    return thread


@pytest.mark.parametrize(
    ("names", "disturbs"),
    [
        pytest.param(["tqdm._monitor"], False, id="progress bar"),
        pytest.param(["ipykernel.thread", "tornado.platform.asyncio"], False, id="notebook"),
        pytest.param(["ipykernel.thread", "tornado.platform.asyncio", "__main__"], True, id="cell of a notebook"),
        pytest.param(["tqdmish"], True, id="name that begins alike"),
        pytest.param([], True, id="waiting in the standard library"),
    ],
)
def test_threads_that_only_watch_do_not_disturb(names, disturbs, device):
    stop = threading.Event()
    thread = thread_of(names, stop) if names else threading.Timer(60, int)
    if not names:
        thread.start()
    try:
        o = Log()
        f = cgt.jit(lambda x: append_result(o, x))
        for k in range(8):
            f(torch.full((3,), float(k), device=device))
        assert len(o.losses) == 8 and (cgt.stats(f).replays == 0) == disturbs, cgt.explain(f)
    finally:
        stop.set()
        getattr(thread, "cancel", int)()
        thread.join()


@pytest.mark.parametrize(("name", "disturbs"), [("torch._inductor.pool", False), ("pools", True)])
def test_code_that_only_watches_may_use_the_same_names(name, disturbs, device):
    """As the thread of PyTorch's compiler does, which lives as long as the process: it reads a global variable `log`."""
    stop, scope = threading.Event(), {"log": []}
    exec("def function(x):\n    log.append(x * 2)", scope)
    f, thread = cgt.jit(scope["function"]), thread_of([name], stop, "call() or log.clear()")
    try:
        for k in range(8):
            f(torch.full((3,), float(k), device=device))
    finally:
        stop.set()
        thread.join()
    assert [t[0].item() for t in scope["log"]] == [2.0 * k for k in range(8)]
    assert (cgt.stats(f).replays == 0) == disturbs, cgt.explain(f)


@pytest.mark.parametrize("pin", [False, True])
def test_a_loader_with_workers_does_not_disturb(pin, device):
    """It feeds each of them by a thread of its own, and pins by another one."""
    if pin and device.type == "cpu":
        pytest.skip("pins for a GPU")
    data = torch.utils.data.TensorDataset(values("cpu", 64, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True, pin_memory=pin)
    nets = [nn.Linear(4, 4, device=device) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    adams = [torch.optim.Adam(net.parameters()) for net in nets]

    def step(net, adam, x):
        adam.zero_grad()
        net(x).square().mean().backward()
        adam.step()

    f = cgt.jit(lambda x: step(nets[0], adams[0], x))
    for _ in range(2):
        for (x,) in loader:
            f(x.to(device))
            step(nets[1], adams[1], x.to(device))
    assert all(torch.equal(a, b) for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True))
    assert cgt.stats(f).replays >= 20, cgt.explain(f)


@tells("beside_threads")
def test_the_thread_is_named_that_keeps_numbers_from_being_live(device):
    stop = threading.Event()
    thread = threading.Thread(target=lambda: stop.wait(), name="my sleeper", daemon=True)
    thread.start()
    try:
        o = Log()
        o.scale = 0.0

        def function(x):
            o.scale += 1
            return x * o.scale

        f = cgt.jit(function)
        for k in range(8):
            assert torch.equal(f(torch.ones(3, device=device)), torch.full((3,), k + 1.0, device=device))
        assert any("Another thread runs Python meanwhile (my sleeper), and could see a number" in reason for reason in cgt.stats(f).reasons), cgt.stats(f).reasons
    finally:
        stop.set()
        thread.join()
        thread.join()


def test_pool_without_work_does_not_disturb_and_one_with_work_does(device):
    """torch.compile leaves one behind."""
    with ThreadPoolExecutor(2) as pool:
        pool.submit(int).result()
        outcomes = []
        for busy in (False, True):
            done, o = threading.Event(), Log()
            pending = pool.submit(done.wait) if busy else None
            f = cgt.jit(lambda x, o=o: append_result(o, x))
            for k in range(8):
                f(torch.full((3,), float(k), device=device))
            done.set()
            assert len(o.losses) == 8 and (pending is None or pending.result())
            outcomes.append(cgt.stats(f).replays > 0)
    assert outcomes == [True, False]


def test_threads_append_every_call(device):
    o = Log()
    def function(x):
        o.losses.append(x.sum())
        o.sizes.append(len(x))
        return x * 2

    f = cgt.jit(function)
    for _ in range(3):
        f(torch.ones(3, device=device))

    def work(k):
        for n in range(100):
            f(torch.full((3,), float(n), device=device))

    in_threads(3, work)
    sums = sorted(float(t) for t in o.losses[3:])
    assert sums == sorted([3.0 * n for n in range(100)] * 3) and len(o.sizes) == 303


def episodes(run):
    """What run(wrap) tells is as in eager; the jitted function."""
    (mine, f), (theirs, _) = run(cgt.jit), run(lambda f: f)
    assert repr(mine) == repr(theirs)
    return f


@pytest.mark.parametrize("where", ["attribute", "variable", "global"])
@pytest.mark.parametrize("what", ["tensor", "number"])
def test_a_new_list_for_each_episode(device, where, what):
    """Any list will do, if the call appends to it and no more."""
    last = "y" if what == "tensor" else "y.sum().item()"

    def run(wrap):
        space = {"torch": torch, "o": types.SimpleNamespace(), "rows": []}
        name = {"attribute": "o.rows", "variable": "rows", "global": "rows"}[where]
        text = f"def f(x):\n    y = torch.tanh(x)\n    {name}.append({last})\n    return y * 2"
        if where == "variable":
            text = "def make():\n    rows = []\n" + "\n".join("    " + line for line in text.splitlines())
            text += "\n    def anew():\n        nonlocal rows\n        rows = []\n        return rows\n    return f, anew"
        elif where == "attribute":
            space["o"] = Holder()
        exec(text, space)
        f, anew = space["make"]() if where == "variable" else (space["f"], None)
        f, made = wrap(f), []
        for k in range(8):
            rows = anew() if anew else []
            if where == "attribute":
                space["o"].rows = rows
            space["rows"] = rows if where == "global" else space["rows"]
            for j in range(5):
                made.append(f(values(device, 4, seed=5 * k + j)).clone())
            made.append(list(rows))
        return made, f

    f = episodes(run)
    assert cgt.stats(f).records <= 3 and cgt.stats(f).replays >= 34, cgt.explain(f)


class Holder:
    rows: list
    others: list


READS = {
    "its length": lambda o, y: y + len(o.others), "its last": lambda o, y: y + (o.others[-1] if o.others else 0), "before": lambda o, y: y * 2,
    "which it is": lambda o, y: y + (o.others is o.more), "appends, too": lambda o, y: (o.others.append(y * 3), y)[1],
    "replaces it": lambda o, y: (setattr(o, "others", [y * 2, y]), y)[1], "follows it": lambda o, y: (setattr(o, "others", [o.others[0] + y, y]), y)[1],
}  # fmt: skip


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("given", [False, True], ids=["place", "argument"])
def test_the_list_is_another_one_that_the_call_reads(device, reads, given):
    def run(wrap):
        o, made = Holder(), []
        o.rows, o.others, o.more = [], [values(device, 4), values(device, 4, seed=2)], []

        @wrap
        def f(x, others=None):
            y = torch.tanh(x) + (others[0] if others else 0)
            o.rows.append(y)
            return READS[reads](o, y) + (others[-1] if others else 0)

        for k in range(40):
            x = values(device, 4, seed=k)
            made.append((f(x, o.others[:2] if k % 2 else o.others) if given else f(x)).clone())
            made.append([[t.clone() for t in rows] for rows in (o.rows, o.others, o.more)])
            if k % 5 == 4:
                o.rows = [[], o.others, o.more, [], o.others][k // 5 % 5]
                o.others = o.others[-2:] if k % 3 else [values(device, 4, seed=k), values(device, 4, seed=k + 1)]
            if k in (17, 28):
                o.rows = o.others
        return made, f

    episodes(run)


def test_the_list_is_an_empty_one_that_the_call_reads(device):
    """Where empty ones come and go, which one it is is not guarded, but that nobody else holds it."""

    def run(wrap):
        o, p, made = Holder(), Holder(), []
        o.rows, p.others = [], []

        @wrap
        def f(x):
            y = torch.tanh(x)
            o.rows.append(y)
            return y + len(p.others)

        for k in range(40):
            made.append(f(values(device, 4, seed=k)).clone())
            made.append(([t.clone() for t in o.rows], [t.clone() for t in p.others]))
            if p.others or k in (3, 5, 8, 11, 20, 28):
                o.rows, p.others = [], []
            if k in (13, 24, 25, 32):
                o.rows = p.others
        return made, f

    assert cgt.stats(episodes(run)).replays >= 20


@pytest.mark.parametrize("other", [lambda: (1,), lambda: None, lambda: Lines(), lambda: collections.deque()], ids=["tuple", "none", "subclass", "deque"])
def test_what_is_no_list_is_not_appended_to_by_replays(device, other):
    def run(wrap):
        o, made = Holder(), []
        o.rows = []

        @wrap
        def f(x):
            y = torch.tanh(x)
            o.rows.append(y)
            return y

        for k in range(24):
            try:
                made.append(f(values(device, 4, seed=k)).clone())
            except AttributeError:
                made.append("no list")
            made.append(repr(o.rows))
            if k % 6 == 5:
                o.rows = other() if k % 12 == 5 else []
        return made, f

    episodes(run)


class Lines(list):
    def append(self, one):
        super().append(one * 2)
