"""How easy is the source to live in? Counts what makes code hard to inherit, on the text alone.

    python tests/house.py           the table; exit code 1 if a count is above its bound
    python tests/house.py LINES     names what is counted in each row that begins with these words

A bound is what the source has reached, and only goes down; the goal is where it is to go. `make lint` runs this.
"""

import ast
import dis
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BRANCHES = (
    ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.With, ast.Assert, ast.comprehension, ast.match_case,
)  # fmt: skip
# Bases of classes that are values, or that Python or torch wants to be classes.
VALUES = ("NamedTuple", "Exception", "Error", "Warning", "float", "int", "str", "Function", "Mode", "Enum", "ContextDecorator")
INSTRUCTIONS = {name for name in dis.opname if "_" in name and not name.startswith("<")}


class Measure(NamedTuple):
    what: str
    bound: int
    goal: int
    count: object  # of a House: [(where, how much)]; what is over
    whole: object = len  # of these: the number in the table


class Module(NamedTuple):
    name: str  # below cgt: "look.places"
    path: Path
    tree: ast.Module


def modules():
    paths = sorted((ROOT / "cgt").rglob("*.py"))
    name = lambda path: ".".join(path.relative_to(ROOT / "cgt").with_suffix("").parts)  # noqa: E731
    return [Module(name(p), p, ast.parse(p.read_text())) for p in paths]


def sources():
    return [*sorted((ROOT / "cgt").rglob("*.py")), *sorted((ROOT / "cgt" / "core").glob("*.*")), *ROOT.glob("cgt_core.p*")]


def at(module, node):
    return f"{module.path.relative_to(ROOT)}:{node.lineno} {node.name}"


def nodes(kind, house):
    return [(module, node) for module in house for node in ast.walk(module.tree) if isinstance(node, kind)]


def branches(function):
    found = [node for node in ast.walk(function) if isinstance(node, BRANCHES)]
    return 1 + len(found) + sum(len(n.values) - 1 for n in ast.walk(function) if isinstance(n, ast.BoolOp))


def lines(house):
    return [(str(path.relative_to(ROOT)), len(path.read_text().splitlines())) for path in sources()]


def wide_lines(house):
    numbered = [(path, k, line) for path in sources() for k, line in enumerate(path.read_text().splitlines(), 1)]
    return [(f"{path.relative_to(ROOT)}:{k}", len(line)) for path, k, line in numbered if len(line) > 120]


def branchy(house):
    return [(at(m, f), branches(f)) for m, f in nodes(ast.FunctionDef, house)]


def long_functions(house):
    return [(at(m, f), f.end_lineno - f.lineno + 1) for m, f in nodes(ast.FunctionDef, house) if f.end_lineno - f.lineno >= 70]


def records(house):
    return [(at(m, c), sum(isinstance(one, ast.AnnAssign) for one in c.body)) for m, c in nodes(ast.ClassDef, house)]


def changing_classes(house):
    found = [(m, c) for m, c in nodes(ast.ClassDef, house)]
    return [(at(m, c), 1) for m, c in found if not any(base in ast.unparse(b) for b in c.bases for base in VALUES)]


def long_files(house):
    return [(where, n) for where, n in lines(house) if n > 700]


def loose_modules(house):
    return [(m.name, 1) for m in house if "." not in m.name]


def instruction_files(house):
    """Three names at least: a word of one may be anything."""
    words = {m: {w for n in ast.walk(m.tree) if isinstance(n, ast.Constant) and isinstance(n.value, str) for w in n.value.split()} for m in house}
    return [(m.name, len(named)) for m, said in words.items() if len(named := said & INSTRUCTIONS) > 2]


def doors(house):
    """Functions that another module takes, of which a parameter or the result has no annotation."""
    taken = defaultdict(set)
    for module in house:
        known = {}
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = module.name.split(".")[: -node.level] + (node.module or "").split(".") * bool(node.module)
                for alias in node.names:
                    taken[".".join(base)].add(alias.name)
                    known[alias.asname or alias.name] = ".".join([*base, alias.name])
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in known:
                taken[known[node.value.id]].add(node.attr)
    found = [(m, f) for m in house for f in m.tree.body if isinstance(f, ast.FunctionDef) and f.name in taken[m.name]]
    return [(at(m, f), 1) for m, f in found if not is_annotated(f)]


def is_annotated(function):
    arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    return function.returns is not None and all(a.annotation is not None for a in arguments)


def total(found):
    return sum(n for _, n in found)


def most(found):
    return max(n for _, n in found)


def five_largest(found):
    return sum(sorted((n for _, n in found), reverse=True)[:5])


MEASURES = [
    Measure("product lines", 29_446, 26_000, lines, total),
    Measure("lines above 120 columns", 0, 0, wide_lines),
    Measure("most branches in one function", 25, 25, branchy, most),
    Measure("functions above 70 lines", 1, 10, long_functions),
    Measure("most fields in one record", 40, 40, records, most),
    Measure("fields of the five largest records", 140, 140, records, five_largest),
    Measure("classes whose fields change", 8, 8, changing_classes),
    Measure("files above 700 lines", 3, 4, long_files),
    Measure("modules in cgt/ itself", 5, 8, loose_modules),
    Measure("files that name instructions of byte code", 1, 1, instruction_files),
    Measure("functions for other modules without annotations", 0, 0, doors),
]


def main():
    house, asked, over = modules(), " ".join(sys.argv[1:]), 0
    print(f"{'':50s} {'is':>6s} {'bound':>6s} {'goal':>6s}")
    for measure in MEASURES:
        found = measure.count(house)
        number = measure.whole(found)
        over += number > measure.bound
        print(f"{measure.what:50s} {number:6d} {measure.bound:6d} {measure.goal:6d}{'  OVER' if number > measure.bound else ''}")
        if asked and measure.what.startswith(asked):
            print(*(f"    {n:6d}  {where}" for where, n in sorted(found, key=lambda row: -row[1])[:60]), sep="\n")
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main())
