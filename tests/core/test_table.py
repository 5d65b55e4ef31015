"""The core's table through what Python sees of it: rows come, go and never tear."""

import itertools

import cgt_core as core
import pytest
import torch
from cgt_core import COPIED, FITS, NONE, PINNED, UNUSED
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cgt
from cgt.data import Call
from cgt.decide import dispatch, freeing
from cgt.words import pytree

SPEC, AMBIENT, META, POINTER, ALIGN = core.MISS_SPEC, core.MISS_AMBIENT, core.MISS_META, core.MISS_POINTER, core.MISS_ALIGN
VALUE, OVERLAP, GRAD, PLACE, ALIVE = core.MISS_VALUE, core.MISS_OVERLAP, core.MISS_GRAD, core.MISS_PLACE, core.MISS_ALIVE
RANGE_NAME = "cgt.replay a row"  # rows borrow it: whoever adds them keeps it


def fn_add(outputs):
    """(id, born) of a new row."""
    return core.fn_add(outputs, False, RANGE_NAME, lambda f, born: (f, born))


@pytest.fixture
def rows():
    """rows(): a new function row; all of them are freed after the test."""
    made = []

    def add(outputs=0):
        made.append(fn_add(outputs))
        return made[-1]

    yield add
    for f, born in made:
        core.fn_free(f, born)


def program_of(*args, **kwargs):
    flat = pytree.flatten_call(args, kwargs)
    return tuple(flat.program), len(flat.tensors)


def state_of(f):
    return f._cgt_state


def recorded(function, *args, **options):
    """A jitted function that has recorded a call with these arguments."""
    f = cgt.jit(function, **options)
    f(*args)
    f(*args)
    assert cgt.stats(f).records == 1
    return f


def misses(f, *args):
    """[(Miss, index)] of the recordings at the place in the tree where this call belongs."""
    state = state_of(f)
    call = dispatch.plans.flattened(Call(state, f.__wrapped__, NONE, None, args, {}))
    flat = call.flat
    specs = [s for s, (program, _) in state.learnt.programs.items() if program == tuple(flat.program)]
    path, parent = dispatch.plans.place_in_tree(call, flat.tensors)
    spec = specs[0] if specs else NONE
    found = core.node_misses(path, parent, state.f, spec, list(flat.tensors))
    return [(why, index) for _, why, index in found]


def index_of(device):
    """The device's number in the core."""
    return NONE if device.type == "cpu" else device.index or 0


def come_to(device):
    """The node that the path has come to, or NONE."""
    path, node, _ = core.path_state(index_of(device))
    assert path == index_of(device) + 1
    return node


def nodes_of(f):
    return core.fn_nodes(state_of(f).f)


# --- functions and specs -----------------------------------------------------------------------


def test_new_function_has_a_row_of_zeros(rows):
    f, born = rows()
    assert core.fn_counts(f) == (0,) * 10 and core.fn_nodes(f) == []
    g, later = rows()
    assert g != f and later > born


def test_counters_add_up_and_unknown_columns_are_refused(rows):
    f, _ = rows()
    core.fn_count(f, "warmups")
    core.fn_count(f, "records", 3)
    core.fn_count(f, "eager", 2)
    core.fn_count(f, "calls", -1)
    assert core.fn_counts(f)[:5] == (-1, 1, 3, 0, 2)
    with pytest.raises(KeyError):
        core.fn_count(f, "replays")


def test_stale_id_frees_nothing(rows):
    f, born = rows()
    core.fn_free(f, born)
    before = core.books()
    core.fn_free(f, born)
    core.fn_free(10**6, born)
    assert core.books() == before
    g, later = rows()
    assert g == f, "the row is used again"
    core.fn_count(g, "eager")
    core.fn_free(f, born)
    core.spec_free_if(f, born, 0)
    assert core.fn_counts(g)[4] == 1 and core.books()["fns"] == before["fns"] + 1
    core.fn_free(g, later)


def test_specs_are_freed_with_their_function_or_alone(rows):
    f, born = rows()
    before = core.books()
    programs = [program_of(1), program_of(torch.ones(1), [2, "x"]), program_of(a=torch.ones(1))]
    specs = [core.spec_add(f, *program, 0, {}, ()) for program in programs]
    after = core.books()
    assert after["specs"] == before["specs"] + 3
    assert after["ops"] == before["ops"] + sum(len(program) for program, _ in programs)
    core.spec_free_if(f, born, specs[1])
    core.spec_free_if(f, born, specs[1])
    core.spec_free_if(f, born + 1, specs[0])
    assert core.books()["specs"] == before["specs"] + 2
    core.check_table()
    core.fn_reset(f)
    assert core.books() == before
    core.fn_free(f, born)


def test_row_of_a_function_that_could_not_be_built_goes():
    before = core.books()
    with pytest.raises(KeyError):
        core.fn_add(0, False, RANGE_NAME, lambda f, born: {}[f])
    assert core.books() == before


def test_reset_keeps_counters(rows):
    f, _ = rows()
    core.fn_count(f, "eager", 5)
    core.spec_add(f, *program_of(1), 0, {}, ())
    core.fn_reset(f)
    assert core.fn_counts(f)[4] == 5 and core.books()["specs"] == 0


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("fn"), st.integers(0, 2)),
        st.tuples(st.just("spec"), st.integers(0, 50), st.integers(0, 6)),
        st.tuples(st.just("drop spec"), st.integers(0, 50), st.integers(0, 50)),
        st.tuples(st.just("stale spec"), st.integers(0, 50), st.integers(0, 50)),
        st.tuples(st.just("free"), st.integers(0, 50)),
        st.tuples(st.just("stale free"), st.integers(0, 50)),
        st.tuples(st.just("reset"), st.integers(0, 50)),
    ),
    max_size=60,
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(actions=ACTIONS)
def test_functions_and_specs_made_and_freed_in_any_order_balance(actions):
    programs = [program_of(*[k] * k, x=[torch.ones(1)] * (k % 3)) for k in range(7)]
    empty = core.books()
    alive, dead = {}, []  # (f, born) -> {spec: length}
    for what, *numbers in actions:
        key = list(alive)[numbers[0] % len(alive)] if alive else None
        if what == "fn":
            alive[fn_add(numbers[0])] = {}
        elif what.startswith("stale"):
            if dead:
                f, born = dead[numbers[0] % len(dead)]
                if what == "stale free":
                    core.fn_free(f, born)
                else:
                    core.spec_free_if(f, born, numbers[1] % 8)
        elif key is None:
            continue
        elif what == "spec":
            program, leaves = programs[numbers[1]]
            alive[key][core.spec_add(key[0], program, leaves, 0, {}, ())] = len(program)
        elif what == "drop spec" and alive[key]:
            spec = list(alive[key])[numbers[1] % len(alive[key])]
            core.spec_free_if(*key, spec)
            del alive[key][spec]
        elif what == "free":
            core.fn_free(*key)
            del alive[key]
            dead.append(key)
        elif what == "reset":
            core.fn_reset(key[0])
            alive[key] = {}
        core.check_table()
        books = core.books()
        assert books["fns"] == empty["fns"] + len(alive)
        assert books["specs"] == empty["specs"] + sum(map(len, alive.values()))
        assert books["ops"] == empty["ops"] + sum(sum(s.values()) for s in alive.values())
        assert books["rows"] - empty["rows"] == books["fns"] + books["specs"] - (
            empty["fns"] + empty["specs"]
        )
    for key in alive:
        core.fn_free(*key)
    assert core.books() == empty


@settings(
    max_examples=15, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(
    plan=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 2)), max_size=25)
)
def test_recordings_made_and_freed_in_any_order_stay_right(device, plan):
    """Slices move when a recording before them goes; what is left still replays right."""
    empty = core.books()
    functions, counter = {}, itertools.count()

    def make(k):
        scale = float(k)
        return cgt.jit(lambda x, *more, s=(): (x * scale, [x.sum(), x.view(-1)], sum(more, x)))

    for who, shape, what in plan:
        f = functions.get(who)
        if f is None or what == 2 and next(counter) % 3 == 0:
            functions[who] = f = make(who)  # the old one is collected
        x = torch.arange(float(2 + shape), device=device)
        more = [x] * shape
        if what == 1 and next(counter) % 4 == 0:
            cgt.reset(f)
        for _ in range(3):
            a, (b, c), d = f(x, *more)
            assert torch.equal(a, x * who) and torch.equal(b, x.sum())
            assert torch.equal(c, x) and torch.equal(d, sum(more, x))
            core.check_table()
            del a, b, c, d
    books = core.books()
    assert books["fns"] == empty["fns"] + len(functions)
    assert books["nodes"] == sum(len(core.fn_nodes(state_of(f).f)) for f in functions.values())
    f = None
    functions.clear()
    freeing.sweep()
    assert core.books() == empty


def test_function_with_many_leaves_finds_them_all(device):
    """More than fit on the C stack."""
    tensors = [torch.full((2,), float(k), device=device) for k in range(100)]
    f = recorded(lambda ts: [t + 1 for t in ts], tensors)
    for _ in range(3):
        got = f(tensors)
        assert all(torch.equal(g, t + 1) for g, t in zip(got, tensors, strict=True))
        del got
    assert cgt.stats(f).replays == 3
    core.check_table()


# --- recordings ----------------------------------------------------------------------------------


def test_facts_of_a_recording_are_what_was_recorded(device):
    x, y = torch.ones(4, device=device), torch.ones(4, device=device)
    unused = torch.ones(2, device=device)
    w = torch.ones(4, device=device)
    f = recorded(lambda x, y, z: (w.add_(x), y * 1)[1], x, y, unused)
    (node,) = core.fn_nodes(state_of(f).f)
    facts = core.node_facts(node)
    slots = facts.slots
    assert facts.fn == state_of(f).f and facts.spec in state_of(f).learnt.programs
    assert facts.used > 0 and facts.n_replay == 0 and facts.copied == 0
    assert facts.graph_nodes >= 2 and facts.path == index_of(device) + 1
    assert (facts.parent, facts.depth, facts.children, facts.deads) == (NONE, 0, 0, 0)
    assert [s[0] for s in slots] == [0, 1, 2, NONE]
    assert [s[1] for s in slots] == [PINNED, PINNED, UNUSED, PINNED]
    assert [bool(s[2]) for s in slots] == [False, False, False, True]
    assert [s[3] for s in slots] == [t.data_ptr() for t in (x, y, unused, w)]
    assert [s[4] for s in slots] == [NONE] * 4, "nothing comes from another recording"
    assert facts.out_bytes == 16
    f(x, y, unused)
    later = core.node_facts(node)
    assert later.n_replay == 1 and later.used > facts.used


def test_facts_are_right_where_others_are_recorded_while_they_are_told(device, monkeypatch):
    """By a finalizer, or by another thread: the table moves with its rows."""
    x, w = torch.ones(4, device=device), torch.ones(4, device=device)
    f = recorded(lambda x: (x * w, x[1:]), x)
    (node,) = core.fn_nodes(state_of(f).f)
    want, others, kind = core.node_facts(node), [], core.SlotFacts

    def told(*facts):
        monkeypatch.undo()
        for k in range(16):
            others.append(recorded(lambda x, k=k: (x + k, x * w), x))
        return kind(*facts)

    monkeypatch.setattr(core, "SlotFacts", told)
    got = core.node_facts(node)
    assert others and got == want


def test_copied_slots_are_counted_in_bytes(device):
    x = torch.ones(4, device=device)
    f = recorded(lambda x: x * 2, x, inputs="copied")
    (node,) = core.fn_nodes(state_of(f).f)
    facts = core.node_facts(node)
    assert facts.slots[0][1] == COPIED and facts.copied == 16
    assert core.books()["patches"] == (2 if device.type == "cuda" else 1)  # there also the generator's words


def test_newest_match_comes_first(device):
    f = cgt.jit(lambda x, k: x * int(k))
    x = torch.ones(4, device=device)
    f(x, "0")
    for k in range(3):
        f(x, str(k))
    number, path = state_of(f).f, index_of(device) + 1
    newest = core.children(path, NONE, number)
    used = [core.node_facts(n).used for n in newest]
    assert len(used) == 3 and used == sorted(used, reverse=True)
    assert core.fn_nodes(number) == newest
    f(x, "0")
    assert core.children(path, NONE, number) == [newest[2], newest[0], newest[1]]
    assert core.fn_nodes(number) == [newest[2], newest[0], newest[1]]
    f(x, "2")
    assert core.children(path, NONE, number) == [newest[0], newest[2], newest[1]]


def test_dropping_a_recording_leaves_the_others(device):
    f = cgt.jit(lambda x, k: (x * int(k), [x, x.sum()]))
    x = torch.ones(4, device=device)
    f(x, "0")
    for k in range(4):
        f(x, str(k))
    nodes = core.fn_nodes(state_of(f).f)
    for node in (nodes[1], nodes[3]):
        freeing.drop_node(node)
        core.check_table()
    assert core.fn_nodes(state_of(f).f) == [nodes[0], nodes[2]]
    replays = cgt.stats(f).replays
    for k in (3, 1):
        y, (z, total) = f(x, str(k))
        assert torch.equal(y, x * k) and z is x and total.item() == 4.0
    assert cgt.stats(f).replays == replays + 2


# --- the tree -------------------------------------------------------------------------------------


def grown(device):
    """Functions f, g, h and their recordings: f ─► g ─► h, f ─► h, and g and h alone."""
    x = torch.ones(4, device=device)
    f, g, h = (recorded(lambda x, k=k: x * k, x) for k in (2.0, 3.0, 5.0))
    (a,), (b,), (c,) = nodes_of(f), nodes_of(g), nodes_of(h)
    nodes = {"f": a, "g": b, "h": c}
    for way in ("fgh", "fh"):
        cgt.step()
        held = []  # a path goes back behind what is dead
        for k, name in enumerate(way):
            held.append({"f": f, "g": g, "h": h}[name](x))
            nodes.setdefault(way[: k + 1], come_to(device))
    assert len(set(nodes.values())) == len(core.nodes()) == 6
    return (f, g, h), nodes, x


def test_facts_tell_where_in_the_tree_a_recording_is(device):
    x = torch.ones(4, device=device)
    f, g = cgt.jit(lambda x: x * 2), cgt.jit(lambda x: x[1:] + 1)
    for _ in range(3):
        g(f(x))
    (parent,), (child,) = nodes_of(f), nodes_of(g)
    above, below = core.node_facts(parent), core.node_facts(child)
    assert (above.parent, above.depth, above.children) == (NONE, 0, 1)
    assert (below.parent, below.depth, below.children) == (parent, 1, 0)
    assert below.path == above.path == index_of(device) + 1
    assert below.slots[0][1] == PINNED and below.slots[0][4] == parent
    assert (above.n_replay, below.n_replay) == (1, 1) and come_to(device) == child


def test_step_begins_a_path_at_the_root(device):
    x = torch.ones(4, device=device)
    f, g = recorded(lambda x: x * 2, x), recorded(lambda x: x + 1, x)
    (root,), (alone,) = nodes_of(f), nodes_of(g)
    assert cgt.step() is None and core.step() is None and come_to(device) == NONE
    y = f(x)
    assert come_to(device) == root
    z = g(x)
    assert core.node_facts(come_to(device)).parent == root
    here, other = index_of(device), state_of(cgt.jit(lambda x: x)).f
    assert core.parent_of(here, other, []) == core.parent_of(here, other, [y]) == come_to(device)
    assert core.parent_of(here, state_of(f).f, [y]) == come_to(device), "goes on from its result"
    assert core.parent_of(here, state_of(f).f, []) == NONE, "f ran already"
    del z
    assert core.parent_of(here, other, []) == root
    del y
    assert core.parent_of(here, other, []) == NONE
    for function, node in ((g, alone), (f, root)):
        cgt.step()
        assert come_to(device) == core.parent_of(index_of(device), state_of(f).f, [x]) == NONE
        function(x)
        assert come_to(device) == node and core.node_facts(node).parent == NONE
    assert cgt.stats(f).replays == 2 and cgt.stats(g).replays == 1


def test_call_without_a_result_of_the_path_begins_another_by_itself(device):
    x = torch.ones(4, device=device)
    f, g = cgt.jit(lambda x: x * 2), recorded(lambda x: x + 1, x)
    f(x)
    y = f(x)
    (root,), (alone,) = nodes_of(f), nodes_of(g)
    here, name = index_of(device), state_of(g).f
    assert core.parent_of(here, name, [x]) == NONE == core.parent_of(here, name, [y.clone()])
    assert core.parent_of(here, name, [x, y]) == root == core.parent_of(here, name, [y[1:]])
    assert core.parent_of(here, state_of(f).f, [y]) == NONE, "f ran already"
    g(x)
    assert come_to(device) == alone and torch.equal(y, x * 2)


def test_many_functions_behind_many_parents_are_all_found(device):
    """The table of edges is made anew as it fills, and again when most of its rows are marks."""
    n, x = 160, torch.ones(4, device=device)
    functions = [cgt.jit(lambda x, k=k: x + k) for k in range(n)]

    def run(first, stride):
        y = x
        for k in range(n):
            y = functions[(first + k * stride) % n](y)
        assert torch.equal(y, x + n * (n - 1) / 2)

    def roots(first):
        return core.children(index_of(device) + 1, NONE, state_of(functions[first]).f)

    run(0, 1)  # warms
    for ways in ([(0, 1), (159, 159), (3, 7)], [(0, 1), (5, 9), (6, 11)], [(0, 1), (159, 159)]):
        for first, stride in ways:
            run(first, stride)
        assert len(core.nodes()) == n * len(ways)
        core.check_table()
        before = cgt.stats()
        for _ in range(2):
            for first, stride in ways:
                run(first, stride)
        after = cgt.stats()
        assert after.replays == before.replays + 2 * n * len(ways)
        assert after.records == before.records and after.eager == before.eager == 0
        for first, _ in ways[1:]:
            (root,) = roots(first)
            freeing.drop_node(root)
            core.check_table()
        assert len(core.nodes()) == n and len(roots(0)) == 1


def test_dropping_a_recording_frees_all_behind_it(device):
    functions, nodes, x = grown(device)
    names = {state_of(f).f: state_of(f) for f in functions}
    f, g, h = functions
    cgt.step()
    *_, held = f(x), g(x), h(x)
    assert come_to(device) == nodes["fgh"] and core.freed() == []
    gone = [(state_of(h).f, nodes["fgh"]), (state_of(g).f, nodes["fg"])]
    for dropped, told, left in (
        ("fg", gone, ("f", "g", "h", "fh")),
        ("f", [(state_of(h).f, nodes["fh"]), (state_of(f).f, nodes["f"])], ("g", "h")),
    ):
        core.paths_lock()
        core.node_drop(nodes[dropped])
        freed = core.freed()
        core.paths_unlock()
        assert freed == told and core.freed() == [], "each once, what is behind first"
        for name, node in freed:
            del names[name].keep[node]
        core.check_table()
        assert sorted(core.nodes()) == sorted(nodes[name] for name in left)
        assert come_to(device) == (nodes["f"] if dropped == "fg" else NONE)
        assert torch.equal(held, x * 5)
    assert [nodes_of(f), nodes_of(g), nodes_of(h)] == [[], [nodes["g"]], [nodes["h"]]]
    assert core.books()["deads"] == 0
    assert all(set(s.keep) == set(core.fn_nodes(name)) for name, s in names.items())
    cgt.step()
    assert torch.equal(g(x), x * 3) and come_to(device) == nodes["g"]


def test_reset_frees_what_other_functions_recorded_behind(device):
    (f, g, h), nodes, x = grown(device)
    cgt.reset(g)
    core.check_table()
    assert [nodes_of(f), nodes_of(g)] == [[nodes["f"]], []] and core.freed() == []
    assert sorted(nodes_of(h)) == sorted([nodes["h"], nodes["fh"]])
    assert all(set(state_of(k).keep) == set(nodes_of(k)) for k in (f, g, h))
    for k, scale in ((f, 2), (h, 5)):
        assert torch.equal(k(x), x * scale)


def test_children_are_those_of_one_place_newest_match_first(device):
    path, x = index_of(device) + 1, torch.ones(4, device=device)
    f, g = recorded(lambda x: x * 2, x), cgt.jit(lambda x, k: x * int(k))
    (root,) = nodes_of(f)
    name = state_of(g).f
    g(x, "0")

    def behind(k):
        cgt.step()
        y = f(x)
        assert torch.equal(y, x * 2) and torch.equal(g(x, str(k)), x * k)
        return come_to(device)

    first, second, third = (behind(k) for k in range(3))
    cgt.step()
    g(x, "0")
    alone = come_to(device)
    assert core.children(path, root, name) == [third, second, first]
    assert core.children(path, NONE, name) == [alone] and core.children(path, alone, name) == []
    assert core.children(path, NONE, state_of(f).f) == [root]
    assert core.node_facts(root).children == 3
    assert behind(1) == second and core.children(path, root, name) == [second, third, first]
    assert behind(1) == second and core.children(path, root, name) == [second, third, first]
    assert behind(0) == first and core.children(path, root, name) == [first, second, third]
    freeing.drop_node(second)
    assert core.children(path, root, name) == [first, third]
    assert core.node_facts(root).children == 2
    core.check_table()


def test_oldest_leaf_goes_first_and_never_the_node_that_the_path_has_come_to(device):
    x, f = torch.ones(4, device=device), cgt.jit(lambda x, k: x * int(k))
    f(x, "0")
    for k in "012310":
        f(x, k)
    uses = nodes_of(f)[::-1]  # of k = 2, 3, 1, 0
    assert uses[-1] == come_to(device)
    for node in uses[:-1]:
        assert core.node_oldest() == node
        freeing.drop_node(node)
    assert core.node_oldest() is None and core.nodes() == uses[-1:]
    assert torch.equal(f(x, "0"), torch.zeros_like(x))
    cgt.step()
    assert core.node_oldest() == uses[-1], "the path has come to no node"


def test_recording_with_others_behind_it_is_no_leaf(device):
    functions, nodes, _ = grown(device)
    assert come_to(device) == nodes["fh"]
    for name in ("g", "h", "fgh", "fg"):
        assert core.node_oldest() == nodes[name]
        freeing.drop_node(nodes[name])
    assert core.node_oldest() is None
    cgt.step()
    for name in ("fh", "f"):
        assert core.node_oldest() == nodes[name]
        freeing.drop_node(nodes[name])
    assert core.node_oldest() is None and [nodes_of(f) for f in functions] == [[], [], []]


# --- why a recording does not take a call --------------------------------------------------------


def test_call_that_fits_misses_nothing(device):
    x = torch.ones(4, device=device)
    f = recorded(lambda x: x * 2, x)
    assert misses(f, x) == [(FITS, 0)]


def test_other_structure_is_another_spec(device):
    x = torch.ones(4, device=device)
    f = recorded(lambda x, k=1: x * k, x, 1)
    assert misses(f, x, 2) == [(SPEC, 0)]
    assert misses(f, x) == [(SPEC, 0)]
    assert misses(f, [x], 1) == [(SPEC, 0)]


@pytest.mark.parametrize(
    "enter",
    [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)],
)
def test_other_ambient_state_is_told(device, enter):
    x = torch.ones(4, device=device)
    f = recorded(lambda x: x * 2, x)
    with enter():
        assert misses(f, x) == [(AMBIENT, 0)]
    assert misses(f, x) == [(FITS, 0)]


@pytest.mark.parametrize(
    "other",
    [
        lambda t: t.double(), lambda t: torch.cat([t, t]), lambda t: t.view(2, 2),
        lambda t: torch.stack([t, t], 1)[:, 0], lambda t: t.clone().requires_grad_(),
        lambda t: t.int(), lambda t: torch.complex(t, t).conj().real,
    ],
)  # fmt: skip
def test_other_metadata_names_the_slot(device, other):
    a, b = torch.ones(4, device=device), torch.ones(4, device=device)
    f = recorded(lambda a, b: a + b, a, b)
    assert misses(f, a, other(b)) == [(META, 1)]
    assert misses(f, other(a), b) == [(META, 0)]


def test_pinned_slot_wants_its_pointer_and_an_unused_one_does_not(device):
    a, b = torch.ones(4, device=device), torch.ones(4, device=device)
    f = recorded(lambda a, b: a * 2, a, b)
    assert misses(f, a.clone(), b) == [(POINTER, 0)]
    assert misses(f, a, b.clone()) == [(FITS, 0)]


def test_copied_slot_wants_its_alignment_class_only(device):
    room = torch.ones(1024, device=device)
    f = recorded(lambda x: x * 2, room[:4], inputs="copied")
    assert misses(f, room[512:516]) == [(FITS, 0)]
    assert misses(f, room[1:5]) == [(ALIGN, 0)]


def test_copied_slot_must_not_share_memory_with_a_written_one(device):
    total, x = torch.zeros(8, device=device), torch.ones(4, device=device)
    f = cgt.jit(lambda x: total.add_(1)[0] + x, inputs="copied")
    f(x), f(x)
    assert misses(f, x.clone()) == [(FITS, 0)]
    # The alignment class must be the same, or that is what is told.
    apart = torch.zeros(8, device=device)
    if (total.data_ptr() - x.data_ptr()) % 512 % 64 == 0 and device.type == "cpu":
        assert misses(f, total[:4]) == [(OVERLAP, 0)]
    assert misses(f, apart[:4])[0][0] in (FITS, ALIGN)


def test_number_on_the_cpu_is_guarded_by_value_in_a_gpu_function():
    if not torch.cuda.is_available():
        pytest.skip("a CPU tensor of a function on the CPU is an ordinary slot")
    x, number = torch.ones(4, device="cuda"), torch.tensor(2.0)
    f = recorded(lambda x, n: x * n, x, number)
    assert misses(f, x, number.clone()) == [(FITS, 0)]
    number.fill_(3)
    assert misses(f, x, number) == [(VALUE, 1)]


def test_gradient_that_comes_or_goes_is_told(device):
    w, x = torch.ones(4, device=device, requires_grad=True), torch.ones(4, device=device)

    def step(x):
        (w * x).sum().backward()

    f = cgt.jit(step)
    f(x)
    w.grad = None
    f(x)
    assert misses(f, x) == [(GRAD, 0)]
    w.grad = None
    assert misses(f, x) == [(FITS, 0)]


def test_changed_closure_value_is_told_with_its_place(device):
    scale, x = 2.0, torch.ones(4, device=device)
    f = recorded(lambda x: x * scale, x)
    state = state_of(f)
    (kept,) = state.keep.values()
    assert misses(f, x) == [(FITS, 0)]
    scale = 3.0
    ((why, index),) = misses(f, x)
    assert why == PLACE and "scale" in kept.place_paths[index]
    scale = 2.0
    assert misses(f, x) == [(FITS, 0)]


def test_result_that_was_dead_when_recorded_must_be_dead(device):
    x = torch.ones(4, device=device)
    f, g = recorded(lambda x: (x * 2, x * 3, x * 4), x), recorded(lambda x: x + 1, x)
    cgt.step()
    last = f(x)[2]  # keeps the path
    g(x)  # behind f, of whose results two are dead
    (parent,) = nodes_of(f)
    (child,) = core.children(index_of(device) + 1, parent, state_of(g).f)
    assert core.node_facts(child).deads == 2
    cgt.step()
    _, held, last = f(x)
    del _
    assert misses(g, x) == [(ALIVE, 1)], "the second of the two"
    del held
    assert misses(g, x) == [(FITS, 0)]
    cgt.step()
    view, _, last = f(x)
    view = view[1:]
    del _
    assert misses(g, x) == [(ALIVE, 0)], "a view holds it as well"
    for _ in range(2):
        assert torch.equal(g(x), x + 1) and torch.equal(view, x[1:] * 2) and torch.equal(last, x * 4)
        assert cgt.stats(g).records == 3 and core.node_facts(child).n_replay == 0
        cgt.step()
        view, _, last = f(x)
        view = view[1:]
        del _
    newest, oldest = misses(g, x)
    assert newest == (FITS, 0) and oldest == (ALIVE, 0), "the one that leaves it in peace"


def test_every_recording_of_a_function_tells_its_own_reason(device):
    x = torch.ones(4, device=device)
    f = cgt.jit(lambda x: x * 2)
    f(x)
    f(x)
    f(torch.ones(5, device=device))
    with torch.no_grad():
        f(x)
    found = [why for why, _ in misses(f, torch.ones(6, device=device))]
    assert found == [AMBIENT, META, META]


# --- the books ------------------------------------------------------------------------------------


def test_books_rise_with_a_recording_and_fall_with_its_function(device):
    before = core.books()
    x, w = torch.ones(4, device=device), torch.ones(4, device=device)
    f = recorded(lambda x: {"y": x * w, "s": x.sum()}, x)
    during = core.books()
    assert during["nodes"] == before["nodes"] + 1 and during["outs"] == before["outs"] + 2
    assert during["slots"] == before["slots"] + 2 and during["recording"] == 0
    assert during["deads"] == before["deads"]
    assert during["blocks"] == before["blocks"] + (20 if device.type == "cpu" else 0)
    cgt.reset(f)
    after = core.books()
    for what in ("nodes", "slots", "outs", "deads", "blocks"):
        assert after[what] == before[what], what
    assert after["fns"] == before["fns"] + 1
    del f
    freeing.sweep()
    assert core.books() == before


def test_results_outlive_function_and_table_rows(device):
    x = torch.arange(4.0, device=device)
    f = recorded(lambda x: (x * 2, x[1:]), x)
    y, view = f(x)
    del f
    freeing.sweep()
    assert torch.equal(y, x * 2) and torch.equal(view, x[1:])
    y.add_(1)
    assert torch.equal(y, x * 2 + 1)


def test_unknown_driver_call_cannot_be_told_to_fail():
    with pytest.raises(ValueError):
        core.fault_set("nonsense", 0, 1)
