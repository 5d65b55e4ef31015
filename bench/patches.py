"""`python -m bench.patches --write docs/patches.md`: what becomes of an op whose input lies elsewhere at each call, and of one whose
number is another one.

Each function is called CALLS times with fresh tensors, or with a number that it was never called with before, and compared with eager
bit by bit. What a recording does about it, and how many of the calls it takes, is written down.
"""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import torch  # before the core, whose libraries are torch's

# isort: split
import cgt_core as core
import torch.nn.functional as F
from cgt_core import COPIED, PINNED, REBOUND, UNUSED

import cgt
from cgt.api import state_of
from cgt.words import options

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "bench" / "results" / "patches.json"
CALLS = 24
BINDINGS = {PINNED: "pinned", REBOUND: "rebound", COPIED: "copied", UNUSED: "not read"}


class Row(NamedTuple):
    """What became of one function."""

    name: str
    varies: str  # "input" or "number"
    replays: int
    records: int
    nodes: int
    how: str
    equal: bool
    why: str


# --- what is tried ------------------------------------------------------------------------------


def of_inputs(make, index):
    """{name: (function, inputs at each call)}."""
    w, b = make(64, 64), make(64)
    kernel, table, q = make(8, 8, 3, 3), make(32, 64), make(2, 4, 16, 32)
    x = lambda: (make(32, 64),)  # noqa: E731
    picture, heads = (lambda: (make(2, 8, 16, 16),)), (lambda: (make(2, 4, 16, 32),))
    return {
        "add": (lambda x: x + b, x), "mul": (lambda x: x * b, x), "relu": (F.relu, x), "gelu": (F.gelu, x), "exp": (torch.exp, x),
        "where": (lambda x: torch.where(x > 0, x, b), x), "sum": (lambda x: x.sum(1), x), "mean": (torch.mean, x), "max": (lambda x: x.max(1)[0], x),
        "argmax": (lambda x: x.argmax(1), x), "softmax": (lambda x: x.softmax(-1), x), "log_softmax": (lambda x: x.log_softmax(-1), x),
        "cumsum": (lambda x: x.cumsum(1), x), "sort": (lambda x: x.sort(1)[0], x), "topk": (lambda x: x.topk(5, 1)[0], x),
        "matmul": (lambda x: x @ w, x), "addmm": (lambda x: torch.addmm(b, x, w), x), "linear": (lambda x: F.linear(x, w, b), x),
        "matmul, bf16": (lambda x: x @ w.bfloat16(), lambda: (make(32, 64).bfloat16(),)),
        "bmm": (lambda x: torch.bmm(x[0], x[0].transpose(1, 2)), heads), "einsum": (lambda x: torch.einsum("bhtd,bhsd->bhts", x, q), heads),
        "attention": (lambda x: F.scaled_dot_product_attention(x, q, q), heads),
        "attention, causal, bf16": (lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), lambda: (make(2, 4, 16, 32).bfloat16(),)),
        "layer_norm": (lambda x: F.layer_norm(x, (64,), b, b), x), "rms_norm": (lambda x: F.rms_norm(x, (64,), b), x),
        "group_norm": (lambda x: F.group_norm(x, 2), picture), "batch_norm": (lambda x: F.batch_norm(x, b[:8], b[8:16].abs()), picture),
        "conv2d": (lambda x: F.conv2d(x, kernel, padding=1), picture), "conv_transpose2d": (lambda x: F.conv_transpose2d(x, kernel), picture),
        "max_pool2d": (lambda x: F.max_pool2d(x, 2), picture), "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), picture),
        "interpolate": (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), picture), "pad": (lambda x: F.pad(x, (1, 1)), x),
        "cat": (lambda x: torch.cat([x, x, w]), x), "stack": (lambda x: torch.stack([x, x]), x), "flip": (lambda x: x.flip(0), x),
        "roll": (lambda x: x.roll(3, 1), x), "contiguous of a transpose": (lambda x: x.t().contiguous(), x),
        "embedding": (lambda at: F.embedding(at, table), lambda: (index(16),)), "index_select": (lambda at: table.index_select(0, at), lambda: (index(16),)),
        "gather": (lambda at: table.gather(0, at.view(1, 16).expand(1, 16)), lambda: (index(16),)),
        "index_add": (lambda x: torch.zeros_like(w).index_add(0, torch.arange(32, device=x.device), x), x),
        "scatter_add": (lambda at: torch.zeros_like(b).scatter_add(0, at, b[:16]), lambda: (index(16),)),
        "one_hot": (lambda at: F.one_hot(at, 32), lambda: (index(16),)), "cross_entropy": (lambda x: F.cross_entropy(x, torch.arange(32, device=x.device)), x),
        "dropout": (lambda x: F.dropout(x, 0.5), x), "in place": (lambda x: x.mul_(2).add_(1), x), "bernoulli": (lambda x: x.sigmoid().bernoulli(), x),
        "fft": (lambda x: torch.fft.rfft(x).abs(), x), "cholesky": (lambda x: torch.linalg.cholesky(x.t() @ x + 64 * torch.eye(64, device=x.device)), x),
    }  # fmt: skip


def of_numbers(make):
    """{name: function of a tensor and a number}; the number is a float, or an int where the name says so."""
    w = make(32, 64)

    def adam(x, s):
        p, m, v = w.clone(), x.clone(), x.square()
        torch._foreach_lerp_([m], [p], 0.1)
        torch._foreach_addcdiv_([p], [m], [v.add(1e-3)], value=-s)
        return p

    return {
        "x + s": lambda x, s: x + s, "x * s": lambda x, s: x * s, "x / s": lambda x, s: x / s, "s / x": lambda x, s: s / x, "x - s": lambda x, s: x - s,
        "x ** s": lambda x, s: x.abs() ** s, "s ** x": lambda x, s: s**x, "x % s": lambda x, s: x % s, "x > s": lambda x, s: x > s,
        "add(alpha=s)": lambda x, s: x.add(w, alpha=s), "lerp(w, s)": lambda x, s: x.lerp(w, s), "addcmul(value=s)": lambda x, s: x.addcmul(w, w, value=s),
        "addmm(alpha=s)": lambda x, s: torch.addmm(x, x, x.t() @ w, alpha=s), "clamp(min=s)": lambda x, s: x.clamp(min=s),
        "clamp(-s, s)": lambda x, s: x.clamp(-s, s), "leaky_relu(s)": lambda x, s: F.leaky_relu(x, s), "elu(s)": lambda x, s: F.elu(x, s),
        "threshold(s)": lambda x, s: F.threshold(x, s, 0.0), "masked_fill(s)": lambda x, s: x.masked_fill(w > 0, s), "full(s)": lambda x, s: torch.full((4,), s, device=x.device),
        "full_like(s)": lambda x, s: torch.full_like(x, s), "fill_(s)": lambda x, s: x.clone().fill_(s), "where(s)": lambda x, s: torch.where(w > 0, x, s),
        "isclose(atol=s)": lambda x, s: torch.isclose(x, w, atol=s), "dropout(s)": lambda x, s: F.dropout(x, s / 32), "normal_(s)": lambda x, s: torch.empty_like(x).normal_(0.0, s),
        "layer_norm(eps=s)": lambda x, s: F.layer_norm(x, (64,), eps=s), "huber(delta=s)": lambda x, s: F.huber_loss(x, w, delta=s),
        "attention(scale=s)": lambda x, s: F.scaled_dot_product_attention(x[None], w[None], w[None], scale=s), "gelu(x * s)": lambda x, s: F.gelu(x * s),
        "softmax(x / s)": lambda x, s: (x / s).softmax(-1), "an Adam step, lr=s": adam, "sgd, lr=s": lambda x, s: torch._foreach_add([x], [w], alpha=-s)[0],
        "x * math.sqrt(s)": lambda x, s: x * s**0.5, "schedule: 1 - 0.9 ** s": lambda x, s: x * (1 - 0.9**s), "quantile(s / 32)": lambda x, s: x.flatten().quantile(s / 32),
        "int: x * n": lambda x, n: x * n, "int: full(n)": lambda x, n: torch.full((4,), n, device=x.device), "int: x[n]": lambda x, n: x[n % 32] * 2,
        "int: w.roll(n)": lambda x, n: x.roll(n, 0), "int: tril(n)": lambda x, n: x.tril(n), "int: narrow(n)": lambda x, n: x.narrow(0, n % 8, 4) * 2,
        "int: arange(n)": lambda x, n: torch.arange(n + 1, device=x.device).sum(),
    }  # fmt: skip


# --- trying ---------------------------------------------------------------------------------------


def tried(name, varies, function, given, device):
    """A Row. `given(k)`: the arguments of call k."""
    f, equal = cgt.jit(function), True
    with torch.no_grad():
        for k in range(CALLS):
            args = given(k)
            mine, theirs = ([a.clone() if isinstance(a, torch.Tensor) else a for a in args] for _ in range(2))
            torch.manual_seed(k)
            got = f(*mine)
            torch.manual_seed(k)
            want = function(*theirs)
            equal &= torch.equal(*(one.contiguous().view(-1).view(torch.uint8) for one in (got, want)))
    s, state = cgt.stats(f), state_of(f)
    kept = {node: core.node_facts(node) for node in core.fn_nodes(state.f) if node in state.keep}
    used = max(kept.values(), key=lambda facts: facts.n_replay, default=None)
    how = ""
    if used is not None and varies == "input":
        (slot,) = (slot for slot in used.slots if slot.leaf == 0)
        how = BINDINGS[slot.binding]
        if slot.binding == REBOUND:
            how += f", {slot.told} told"
        elif slot.written:
            how += ", and back"
    elif used is not None:
        how = f"{used.words} told" if used.words else "no op is given it"
    why = max(s.reasons, key=s.reasons.get, default="") if s.replays < CALLS // 2 else ""
    why = why.replace(f"{ROOT}/", "")
    return Row(name, varies, s.replays, s.records, s.graph_nodes // max(1, s.records), how, bool(equal), why)


def run(device):
    """[Row, ...]"""
    options.OVERHEAD = float("inf")  # record at every miss: what does not pay here may there
    draw = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=draw).to(device)  # noqa: E731
    index = lambda n: torch.randint(32, (n,), generator=draw).to(device)  # noqa: E731
    rows = [tried(name, "input", function, lambda k, inputs=inputs: inputs(), device) for name, (function, inputs) in of_inputs(make, index).items()]
    x = make(32, 64)
    for name, function in of_numbers(make).items():
        number = (lambda k: k + 1) if name.startswith("int") else (lambda k: 0.5 + k * 1.125)
        rows.append(tried(name, "number", function, lambda k, number=number: (x, number(k)), device))
    return rows


# --- the page -----------------------------------------------------------------------------------


HEAD = """# Inputs that move, numbers that change

What a recording does where an argument lies elsewhere at each call, or a number is another one; written by `python -m bench.patches`, from
`bench/results/patches.json`. {calls} calls of each function, all with fresh tensors or with a number of their own; the first warms, the second may
wait for one that is like it.

{device}, torch {torch}. **{equal} of {all} bit for bit as eager, {replaying} replay.**

*rebound*: so many nodes of the graph are told where the tensor lies today. *copied*: the graph begins with a copy from there; *and back*: what is
written there is copied back. *told*: of a number, so many words of the graph's kernels are set, where it changed.
"""


def page(record):
    """Markdown."""
    rows = [Row(**row) for row in record["rows"]]
    replaying = sum(row.replays >= CALLS // 2 for row in rows)
    lines = [HEAD.format(calls=CALLS, device=record["device"], torch=record["torch"], equal=sum(r.equal for r in rows), all=len(rows), replaying=replaying)]
    for varies, title in (("input", "An input that moves"), ("number", "A number that changes")):
        lines += [f"## {title}", "", "| op | replayed | recorded | nodes | how | equal | else |", "|---|--:|--:|--:|---|---|---|"]
        for row in rows:
            if row.varies == varies:
                why = row.why.replace("|", "\\|")
                lines.append(f"| `{row.name}` | {row.replays} | {row.records} | {row.nodes} | {row.how} | {'yes' if row.equal else '**no**'} | {why} |")
        lines.append("")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--write", type=Path, help="the page")
    parser.add_argument("--again", action="store_true", help="run nothing: the page of the last results")
    given = parser.parse_args()
    if not given.again:
        torch.set_num_threads(1)
        device = torch.device(given.device)
        name = torch.cuda.get_device_name() if device.type == "cuda" else "the host driver"
        rows = [row._asdict() for row in run(device)]
        given.out.write_text(json.dumps({"device": name, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    text = page(json.loads(given.out.read_text()))
    if given.write:
        given.write.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
