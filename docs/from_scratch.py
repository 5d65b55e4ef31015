"""cgt from scratch: the whole idea in one page of Python. Run it: `python docs/from_scratch.py`.

The real thing replays a CUDA graph; this one replays a list of PyTorch calls on the CPU. All the rest is the same
problem with the same answers: which calls may be replayed (guards), where a recording lives (memory of its own), how
today's arguments get into it (slots), how its results get out without ever changing under the user's hands (rescue),
and what no key can hold: a value that Python reads on the way, and an argument that is written and lies elsewhere at
each call. (A number that is another one at each call is a value of the key here. The real cgt hands the function a
stand-in for it, which takes PyTorch's C++.) The random tests of cgt run the same calls here and there, and both must
agree.

The first call of a function is a *warm-up*: plain execution. The second *records*. Later ones *replay*, if a recording
accepts them; if none does, another one is recorded beside it.

    jit(f)         a function that behaves as f does
    stats(jitted)  {"calls", "warmups", "records", "replays"}
"""

import functools
import inspect
import itertools
import weakref

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

MAX_RECORDS = 8   # recordings of one function; a call that fits none of so many runs eagerly
ALIGN = 64        # bytes; math libraries may sum in another order at another alignment, and bits are the contract

# ---- Step 1: the table -----------------------------------------------------------------------------------------------
#
# Everything that changes is in one table. A function is a row and its name is the row's number; there is no object with
# methods, and what the user gets is a plain function (step 6).

TABLE = {}                 # number -> row
NUMBERS = itertools.count()


def make_row():
    counts = dict.fromkeys(("calls", "warmups", "records", "replays", "rescues"), 0)
    return {**counts, "reason": None, "nodes": [], "places": {}, "moving": set()}    # the last two: step 4


# ---- Step 2: the key -------------------------------------------------------------------------------------------------
#
# A recording is right for a call if everything that the function could have looked at is as it was. Most of that is
# known before the call and makes a *key*, compared with ==. Arguments are flattened to leaves: tensors become slots, of
# which only the metadata counts, and everything else is a value.

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def describe(leaf):
    if isinstance(leaf, torch.Tensor):
        return (leaf.dtype, leaf.device, leaf.size(), leaf.stride(), leaf.requires_grad, leaf.data_ptr() % ALIGN)
    if isinstance(leaf, PLAIN):
        return (type(leaf), repr(leaf))     # by repr: 1 == 1.0 == True and 0.0 == -0.0, but nan != nan
    return (type(leaf), id(leaf))           # any other object is only equal to itself; the recording keeps it alive


def where(t):
    """Where t's memory begins: two tensors may share memory when this is equal."""
    return t.untyped_storage().data_ptr()


def surroundings(f):
    """What f can read besides its arguments: globals and closure by name, and the state of modules found there. The
    name of a tensor can be bound to another tensor, and that must be noticed."""
    module = isinstance(f, torch.nn.Module)
    names = inspect.getclosurevars(inspect.unwrap(f.forward if module else f))
    found = pytree.tree_leaves([f if module else getattr(f, "__self__", None), names.globals, names.nonlocals])
    for m in [m for m in found if isinstance(m, torch.nn.Module)]:
        found += [part.training for part in m.modules()] + list(m.parameters()) + list(m.buffers())
    return found


def ambient():
    """Switches of PyTorch that change what a call does."""
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
            torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"),
            torch.are_deterministic_algorithms_enabled())


def make_key(leaves, spec, around):
    places = [where(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
    shared = tuple(places.index(place) for place in places)      # which arguments share memory with which
    reached = tuple((describe(x), x.data_ptr() if isinstance(x, torch.Tensor) else 0) for x in around)
    return spec, tuple(map(describe, leaves)), shared, reached, ambient()


# ---- Step 3: record --------------------------------------------------------------------------------------------------
#
# Run the function once more and observe every ATen call below autograd: so a backward and an optimizer are recorded like
# everything else. That run is an ordinary one and its result is the user's. The *tape* is what we keep.

class Observer(TorchDispatchMode):  # PyTorch wants a class here
    def __init__(self, see):
        super().__init__()
        self.see = see

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        return self.see(op, args, kwargs or {})


REFUSED = {
    torch.Tag.dynamic_output_shape: "makes a tensor whose size depends on values",
    torch.Tag.inplace_view: "changes the shape of a tensor in place",
}


def tensors(tree):
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def written_by(op, args, kwargs):
    named = dict(zip([a.name for a in op._schema.arguments], args, strict=False)) | kwargs
    writes = [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return {where(t) for t in tensors([named.get(name) for name in writes])}


def record(f, args, kwargs, leaves, around, moving):
    """(result, node, reason): node is None if the function cannot be replayed, and reason says why. `moving`: arguments
    that do not stay where they are."""
    slots = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    of_slot = {where(t): i for i, t in reversed(slots.items())}
    fresh, written, reached, raw, reasons = {}, set(), {}, [], []

    def see(op, args, kwargs):
        before = tensors((args, kwargs))
        for t in before:
            if where(t) not in fresh and where(t) not in of_slot and id(t) not in reached:
                reached[id(t)] = (t, t.data_ptr(), gradient(t))
        wrote = written_by(op, args, kwargs)
        old = {where(t) for t in before}
        reasons.extend(f"{op} {REFUSED[tag]}" for tag in op.tags if tag in REFUSED)
        result = op(*args, **kwargs)
        written.update(wrote)
        # An output in new memory must be computed again. A view needs nothing: it *is* the memory that it looks at. A
        # number (`x.sum() > 0` asks for one) is what Python saw: the recording is for that one, and each replay looks.
        new = [None if isinstance(t, torch.Tensor) and where(t) in old else t for t in pytree.tree_leaves(result)]
        fresh.update({where(t): t.untyped_storage() for t in tensors(new)})
        if not written <= set(fresh) and any(is_value(x) for x in new):
            reasons.append(f"{op} reads a value behind a write that a replay could not take back")
        if wrote or any(x is not None for x in new):
            raw.append(pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (op, args, kwargs, new)))
        return result

    with Observer(see):
        result = f(*args, **kwargs)

    # What the tape touched is of three kinds. *Pinned*: memory that is somebody else's, used where it is: parameters,
    # buffers, optimizer state, and an argument that is written or reachable without the argument. *Copied*: any other
    # argument; its bytes are copied in before each replay, and back behind it if the tape writes them: so one that moves
    # is copied although it is written, if its bytes are its own. *Fresh*: memory that was born on the way.
    others = {where(t) for t in tensors(around)}
    alone = {i for i in moving if [where(t) for t in slots.values()].count(where(slots[i])) == 1 and is_dense(slots[i])}
    fixed = [i for i, t in slots.items() if where(t) in others or (where(t) in written and i not in alone)]
    pinned = {i: slots[i].data_ptr() for i in fixed}
    copied = {i: t for i, t in slots.items() if i not in pinned}

    # The recording gets memory of its own for the last two, so that nobody else holds any of it, and the tape is
    # rewritten to work there. `homes` lists, per piece of memory, the tensors of the tape that live in it.
    memory = {where(t): t.untyped_storage().clone() for t in copied.values()}
    memory |= {place: storage.clone() for place, storage in fresh.items()}
    homes = {place: [] for place in memory}

    def settle(t):
        if where(t) not in memory:
            return t.detach()
        if t.is_conj() or t.is_neg():
            reasons.append("makes a lazily conjugated or negated view")
        homes[where(t)].append(tensor_in(memory[where(t)], t))
        return homes[where(t)][-1]

    # What to hand out, decided once per output (step 5 reads this).
    def output(x):
        if not isinstance(x, torch.Tensor):
            return ("value", x)
        same = [i for i, t in slots.items() if t is x]
        if same:
            return ("argument", same[0])
        if x.requires_grad and where(x) not in others:
            reasons.append("returns a tensor that requires grad")
        if where(x) in fresh:
            return ("fresh", settle(x))
        if where(x) in of_slot:
            i = of_slot[where(x)]
            if x.dtype != slots[i].dtype:
                reasons.append("returns an argument's memory as another dtype")
            return ("view", i, x.size(), x.stride(), x.storage_offset() - slots[i].storage_offset())
        return ("value", x)         # a tensor that the function can always reach: a parameter, say

    results, out_spec = pytree.tree_flatten(result)
    if any(gradient(t) != grad for t, _, grad in reached.values()) or any(t.grad is not None for t in slots.values()):
        reasons.append("leaves a gradient in .grad")      # the real cgt replays that; here it would only be more code
    node = {
        "pinned": pinned,
        "reached": list(reached.values()),
        "copied": {i: settle(t) for i, t in copied.items()},
        "back": [i for i, t in copied.items() if where(t) in written],
        "tape": pytree.tree_map_only(torch.Tensor, settle, raw),
        "outputs": [output(x) for x in results],
        "out_spec": out_spec,
        "theirs": {where(t) for t, _, _ in reached.values()} | {where(slots[i]) for i in pinned},
        "keep": [x for x in [*leaves, *around] if not isinstance(x, torch.Tensor)],     # while they live, ids are true
        "memory": memory,
        "homes": homes,
    }
    lent = {where(x) for x in tensors(results)} & set(fresh)
    node["held_by_us"] = {place: holders(memory[place]) for place in lent}
    return (result, None, reasons[0]) if reasons else (result, node, None)


def tensor_in(storage, t):
    """A tensor that lies in `storage` as t lies in its own memory."""
    return torch.empty(0, dtype=t.dtype).set_(storage, t.storage_offset(), t.size(), t.stride())


def gradient(t):
    return t.grad.data_ptr() if t.is_leaf and t.grad is not None else None


def is_value(x):
    return isinstance(x, (bool, int, float, complex))


def is_dense(t):
    """Are the bytes between its first and its last its own?"""
    return t.untyped_storage().nbytes() == t.numel() * t.element_size() and not t.requires_grad


# ---- Step 4: guard ---------------------------------------------------------------------------------------------------
#
# The rest of the question "does this recording accept the call?": pointers. Pinned memory must be where it was. And a
# copied argument must not lie in memory that the tape uses in place: written there, it would change under the copy.
#
# An argument that lay elsewhere at the last call moves, and is never pinned again if that can be helped.

def accepts(node, key, leaves):
    return (
        node["key"] == key
        and all(leaves[i].data_ptr() == ptr for i, ptr in node["pinned"].items())
        and all(t.data_ptr() == ptr and gradient(t) == grad for t, ptr, grad in node["reached"])
        and not any(where(leaves[i]) in node["theirs"] for i in node["copied"])
    )


def note_places(row, leaves):
    """Which arguments lay elsewhere at the call before."""
    places = {i: leaf.data_ptr() for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    row["moving"] |= {i for i, place in places.items() if row["places"].get(i, place) != place}
    row["places"] = places


# ---- Step 5: replay --------------------------------------------------------------------------------------------------
#
# Outputs handed out are ordinary tensors in the recording's memory. If somebody still holds one, or a view of one, the
# next replay must not overwrite it. PyTorch counts who holds a piece of memory: more than the tape itself, and it is
# held. Then user and recording part: here the *recording* moves to new memory, since a tape is easily moved. In a CUDA
# graph the addresses are baked in, so cgt copies the user's bytes elsewhere and redirects the user's tensors instead.
# Either way whoever holds the tensor sees nothing of it, and an output that nobody holds costs nothing.

def holders(storage):
    return torch._C._storage_Use_Count(storage._cdata)


def rescue(node):
    count = 0
    for place, held_by_us in node["held_by_us"].items():
        if holders(node["memory"][place]) != held_by_us:
            node["memory"][place] = storage = node["memory"][place].clone()
            for t in node["homes"][place]:
                t.set_(storage, t.storage_offset(), t.size(), t.stride())
            node["held_by_us"][place] = holders(storage)
            count += 1
    return count


def replay(node, leaves):
    """Is this call the one that was recorded, up to the end? If Python would have read another value, it goes another
    way from there. Nothing outside was written until then; the numbers drawn are given back."""
    # Below autograd and after autocast is where the tape was recorded; random ops draw from the generator as ever.
    drawn = torch.get_rng_state()
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for i, slot in node["copied"].items():
            slot.copy_(leaves[i])
        for op, args, kwargs, recorded in node["tape"]:
            results = pytree.tree_leaves(op(*args, **kwargs))
            for old, new in zip(recorded, results, strict=True):
                if is_value(old) and repr(old) != repr(new):
                    torch.set_rng_state(drawn)
                    return False
                if isinstance(old, torch.Tensor):
                    old.copy_(new)
        for i in node["back"]:
            leaves[i].copy_(node["copied"][i])
    return True


def hand_out(node, leaves):
    def make(kind, x, *view):
        if kind == "fresh":
            return tensor_in(x.untyped_storage(), x)
        if kind == "argument":
            return leaves[x]
        if kind == "view":          # of today's argument, not of the one that was recorded
            size, stride, shift = view
            return leaves[x].as_strided(size, stride, leaves[x].storage_offset() + shift)
        return x

    return pytree.tree_unflatten([make(*output) for output in node["outputs"]], node["out_spec"])


# ---- Step 6: the call ------------------------------------------------------------------------------------------------
#
# All decisions in one place. Whatever cannot be replayed runs eagerly: never wrong, only not faster.

def jit(f):
    number = next(NUMBERS)
    TABLE[number] = make_row()

    @functools.wraps(f)
    def jitted(*args, **kwargs):
        return call(TABLE[number], f, args, kwargs)

    jitted.row_number = number
    weakref.finalize(jitted, TABLE.pop, number)     # nobody holds the function: its row goes
    return jitted


def call(row, f, args, kwargs):
    row["calls"] += 1
    if row["reason"] or _get_current_dispatch_mode() is not None:   # inside another recording we are part of that one
        return f(*args, **kwargs)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    around = surroundings(f)
    key = make_key(leaves, spec, around)
    note_places(row, leaves)
    for node in [n for n in reversed(row["nodes"]) if accepts(n, key, leaves)]:
        row["rescues"] += rescue(node)
        if replay(node, leaves):                        # hit
            row["replays"] += 1
            return hand_out(node, leaves)
    if row["warmups"] == 0:                             # first: optimizers make their state, libraries choose kernels
        result = f(*args, **kwargs)
        row["warmups"] += 1
        return result
    if len(row["nodes"]) == MAX_RECORDS:                # every call is different: stop recording
        return f(*args, **kwargs)
    result, node, row["reason"] = record(f, args, kwargs, leaves, around, row["moving"])
    if node is not None:
        row["nodes"].append({"key": key, **node})
        row["records"] += 1
    return result


def stats(jitted):
    row = TABLE[jitted.row_number]
    return {name: row[name] for name in ("calls", "warmups", "records", "replays")}


# ---- Step 7: does it work? -------------------------------------------------------------------------------------------

def same_bits(a, b):
    bits = [[t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors(tree)] for tree in (a, b)]
    return all(torch.equal(x, y) for x, y in zip(*bits, strict=True))


def show(what, jitted):
    row = TABLE[jitted.row_number]
    counts = "  ".join(f"{name} {n}" for name, n in stats(jitted).items())
    print(f"{what:34} {counts}  rescues {row['rescues']}" + (f"  eager: {row['reason']}" if row["reason"] else ""))


def counts(jitted):
    return tuple(stats(jitted).values())


def demo_arithmetic_and_randomness():
    def noisy(x, scale):
        return {"y": torch.dropout(x * scale, 0.5, True), "sum": x.sum()}

    fast = jit(noisy)
    inputs = [torch.randn(16) for _ in range(6)]
    torch.manual_seed(0)
    want = [noisy(x, 2.0) for x in inputs]
    torch.manual_seed(0)
    got = [fast(x, 2.0) for x in inputs]            # all held: every replay has to leave the last results alone
    assert same_bits(got, want) and counts(fast) == (6, 1, 1, 4)
    fast(inputs[0], 3.0)                            # another value is another recording
    fast(torch.randn(4, 4), 3.0)                    # and so is another shape
    assert counts(fast) == (8, 1, 3, 4)
    show("dropout, outputs held", fast)


def demo_views_of_held_outputs():
    fast = jit(lambda x: x + 1)
    row = [fast(torch.full((4,), float(i)))[1:] for i in range(5)]      # only a view of each output is held
    assert [v.tolist() for v in row] == [[i + 1.0] * 3 for i in range(5)]
    show("views of outputs held", fast)
    y = torch.zeros(4)
    for _ in range(5):
        y = fast(y)                                 # the output of one call is the input of the next
    assert y.tolist() == [5.0] * 4
    show("fed with its own output", fast)


def demo_arguments_that_are_written():
    def push(x, total):
        total.add_(x)
        return total, x.view(2, 2)

    fast, total = jit(push), torch.zeros(4)
    for _ in range(5):
        x = torch.ones(4)
        out, view = fast(x, total)
        assert out is total and view.data_ptr() == x.data_ptr()
    assert total.tolist() == [5.0] * 4 and counts(fast) == (5, 1, 1, 3)
    show("an argument that is written", fast)


def demo_training():
    def train(transform):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.GELU(), torch.nn.Linear(16, 1))
        opt = torch.optim.AdamW(model.parameters(), fused=True, capturable=True)

        def step(x, y):
            loss = (model(x) - y).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad(set_to_none=True)
            return loss.detach()

        step = transform(step)
        return [step(torch.randn(4, 8), torch.randn(4, 1)).item() for _ in range(20)], step

    (want, _), (got, fast) = train(lambda f: f), train(jit)
    assert got == want and counts(fast) == (20, 1, 1, 18)
    show("forward, backward and AdamW", fast)


def demo_surroundings():
    scale, weight = 1.0, torch.ones(3)
    fast = jit(lambda x: x * weight * scale)
    x = torch.arange(3.0)
    for _ in range(4):
        assert fast(x).tolist() == [0, 1, 2]
    scale = 10.0                                    # a plain value from the closure
    assert fast(x).tolist() == [0, 10, 20]
    weight.mul_(2)                                  # new content: the tape reads it where it is
    assert fast(x).tolist() == [0, 20, 40]
    weight.data = torch.ones(3)                     # new memory: another recording
    assert fast(x).tolist() == [0, 10, 20]
    weight = torch.zeros(3)                         # another tensor under the same name
    assert fast(x).tolist() == [0, 0, 0]
    show("closure changes", fast)


def demo_values_read_on_the_way():
    def branch(x):
        y = torch.dropout(x, 0.5, True)
        return y * 2 if x.sum() > 0 else -y

    fast = jit(branch)
    inputs = [torch.full((8,), v) for v in (1.0, 1.0, -3.0, 1.0, -2.0, 5.0)]
    torch.manual_seed(0)
    want = [branch(x) for x in inputs]
    torch.manual_seed(0)
    assert same_bits([fast(x) for x in inputs], want)
    assert counts(fast) == (6, 1, 2, 3)             # a recording for each way; the newest is asked first
    show("branches by a value", fast)
    fast = jit(lambda total: total.add_(1).sum().item())
    assert [fast(torch.zeros(2)) for _ in range(3)] == [2.0] * 3 and counts(fast)[3] == 0
    show("reads what it wrote", fast)


def demo_arguments_that_move():
    def update(cache, x):
        return cache.mul_(2).add_(x).sum()

    fast, held = jit(update), []
    for k in range(6):
        cache, twin, x = torch.ones(4), torch.ones(4), torch.full((4,), float(k))
        assert torch.equal(fast(cache, x), update(twin, x)) and torch.equal(cache, twin)
        held.append(cache)                          # so that the next one lies elsewhere
    assert counts(fast) == (6, 1, 1, 4)
    show("written, and elsewhere each time", fast)


if __name__ == "__main__":
    demo_arithmetic_and_randomness()
    demo_views_of_held_outputs()
    demo_arguments_that_are_written()
    demo_training()
    demo_surroundings()
    demo_values_read_on_the_way()
    demo_arguments_that_move()
    print("all results are bit-equal to eager")
