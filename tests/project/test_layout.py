"""The structure rules of the source, each with its reason. Needs no compiler, no torch and no GPU, and runs before anything
is built: `pytest --noconftest tests/project/test_layout.py`.

A rule that finds its file missing fails: a room that was renamed must be renamed here too, knowingly.
"""

import ast
import builtins
import io
import os
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "cgt" / "core"
SPINE, DATA = ROOT / "cgt_core.pyx", ROOT / "cgt_core.pxd"

# Folders of cgt/ with their modules, in the order of knowledge: a module may import those before it, never one after it,
# and so may a folder. "": cgt/ itself.
HOUSE = [
    ("words", "errors options private wrappers pytree"),
    ("", "data"),
    ("run", "taps devices observe tokens constants tape blank views"),
    ("look", "bytecode code flow blinds containers places empties returns impure"),
    ("lanes", "spread forms"),
    ("ranks", "collectives"),
    ("numbers", "rows standins live counters scalars addresses"),
    ("cuts", "segments apart readout finite forks"),
    ("make", "optional packed advice facts lengths moving fed vets ops trace describe escapes record islands probes autograd plan"),
    ("decide", "account logs verdicts audit sites freeing backwards warming padding lessons dispatch"),
    ("tools", "report draw"),
    ("", "api doctor __init__"),
]
FOLDERS = [folder for folder, _ in HOUSE if folder]
ORDER = [f"{folder}.{name}".lstrip(".") for folder, names in HOUSE for name in names.split()]
FOUNDATIONS = {"words.errors", "words.options", "words.private"}  # import nothing of ours
PUBLIC = {"jit", "unjit", "step", "doctor", "eager", "require_replay", "reset", "stats", "explain", "show", "memory", "tap", "tapped", "CgtError", "CgtWarning", "Pad"}
MOST_LINES = 1100


def read(path):
    assert path.is_file(), (
        f"{path.relative_to(ROOT)} is missing; if it has moved, this test must learn where to"
    )
    return path.read_text()


def chapters():
    found = sorted(CORE.glob("*.pxi"))
    assert found, (
        "cgt/core holds no chapters (*.pxi); if they have moved, this test must learn where to"
    )
    return found


def headers():
    found = sorted(CORE.glob("*.h"))
    assert found, (
        "cgt/core holds no headers (*.h); if they have moved, this test must learn where to"
    )
    return found


def core_files():
    return [SPINE, DATA, *chapters(), *headers()]


def modules():
    found = sorted((ROOT / "cgt").rglob("*.py"))
    assert found, "cgt holds no modules"
    return found


def name_of(path):
    """A module's name below cgt: `look.places`, `api`."""
    return ".".join(path.relative_to(ROOT / "cgt").with_suffix("").parts)


def sources():
    """Every file that people write here."""
    endings = {".py", ".pyx", ".pxd", ".pxi", ".h", ".cpp", ".md", ".toml", ".txt", ".yml"}
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [
            name
            for name in folders
            if name in (".ci", ".github") or not (name.startswith(".") or name in ("build", "dist"))
        ]
        found += [
            Path(folder, name)
            for name in names
            if Path(name).suffix in endings or name in ("Makefile", "run")
        ]
    return found


def code(path):
    """The text without comments and string literals; line numbers stay."""
    keep_lines = lambda found: "\n" * found.group().count("\n")  # noqa: E731
    if path.suffix == ".h":
        pattern = r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"'
    else:
        pattern = r'""".*?"""|\'\'\'.*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|#[^\n]*'
    return re.sub(pattern, keep_lines, read(path), flags=re.S)


def offences(paths, pattern, text=code):
    """'file:line: what was found' for every match."""
    found = []
    for path in paths:
        lines = text(path).splitlines()
        found += [
            f"{path.relative_to(ROOT)}:{i}: {line.strip()}"
            for i, line in enumerate(lines, 1)
            if re.search(pattern, line)
        ]
    return found


def imports_of_ours(path):
    """Names of the modules of cgt that a file imports, in functions too."""
    home, names = path.relative_to(ROOT / "cgt").parent.parts, set()
    for node in ast.walk(ast.parse(read(path))):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == "cgt"):
            base = home[: len(home) - node.level + 1] if node.level else ()
            inside = (node.module or "").split(".")[0 if node.level else 1 :]
            at = ".".join((*base, *filter(None, inside)))
            names |= {f"{at}.{alias.name}".lstrip(".") for alias in node.names} if at in ("", *FOLDERS) else {at}
        elif isinstance(node, ast.Import):
            names |= {
                (alias.name + ".__init__").split(".", 1)[1].removesuffix(".__init__") or "__init__"
                for alias in node.names
                if alias.name.split(".")[0] == "cgt"
            }
    return names


# --- the core ---------------------------------------------------------------------------------------------------------


def test_only_the_cuda_chapter_calls_the_driver():
    # The driver is a seam: everything above it is tested on machines without a GPU, by the same tests.
    cuda = CORE / "cuda.pxi"
    assert re.search(r"\bcu[A-Z]\w*", code(cuda)), (
        "cuda.pxi calls no cu* function: is it still the CUDA driver's chapter?"
    )
    calls = cuda, CORE / "lanes.pxi"  # whose ops side by side are streams and edges of the driver's
    assert not offences([p for p in core_files() if p not in calls] + modules(), r"\bcu[A-Z]\w*")


def test_only_the_shims_include_torch_headers():
    # Torch's headers change with every release and some cost 10 s to compile. One `#if` per release, in one place.
    shims = {
        CORE / name
        for name in (
            "tensor_shim.h",
            "cuda_shim.h",
            "tape_shim.h",
            "autograd_shim.h",
            "observe_shim.h",
            "numbers_shim.h",
        )
    }
    assert read(CORE / "tensor_shim.h") and read(CORE / "cuda_shim.h")
    include = r"(#\s*include|cdef extern from)\s*[<\"'](ATen|c10|torch|caffe2)/"
    assert not offences([p for p in core_files() if p not in shims], include, read)


def test_only_the_surface_has_def():
    # What Python can call is listed in one chapter; elsewhere C calls C and nothing is looked up by name.
    surface = [p for p in chapters() if p.stem.startswith("surface")]
    assert all(re.search(r"^def ", read(p), re.M) for p in surface) and surface, (
        "a surface defines nothing: what does Python call?"
    )
    assert not offences(
        [SPINE, DATA, *(p for p in chapters() if p not in surface)], r"^\s*(async\s+)?def\s"
    )


def test_guard_functions_are_noexcept_nogil():
    # The hot path is a proof: without the GIL the compiler accepts no Python object and no allocation by accident.
    guard = CORE / "guard.pxi"
    signatures = re.findall(r"^(c(?:p)?def [^=(\n]*\([^)]*\)[^:\n]*):", code(guard), re.M)
    assert signatures, "guard.pxi has no functions: is it still the chapter that guards?"
    assert not [s for s in signatures if not re.search(r"\bnoexcept nogil$", s.strip())]


def test_the_core_knows_nobody_above_it():
    # What the core needs from Python arrives as an argument, so that no circle of imports is possible.
    assert not offences([SPINE, DATA, *chapters()], r"^\s*(from|import|cimport)\s+cgt(\.|\s|$)")


def test_every_chapter_is_included_once():
    # The spine is the table of contents; a chapter that it does not name is dead.
    included = re.findall(r'^include "cgt/core/(\w+\.pxi)"', read(SPINE), re.M)
    assert sorted(included) == [p.name for p in chapters()]


def test_the_spine_imports_what_its_chapters_use():
    # cython-lint reads file by file and cannot tell.
    imports = re.findall(r"^(?:from\s+\S+\s+)?(?:c?import)\s+(.+)$", code(SPINE), re.M)
    names = [
        name.split(" as ")[-1].strip().split(".")[0] for line in imports for name in line.split(",")
    ]
    used = "\n".join(code(p) for p in [DATA, *chapters()])
    unused = [name for name in names if not re.search(rf"\b{name}\b", used)]
    assert not unused, f"cgt_core.pyx imports what no chapter uses: {', '.join(unused)}"


def enums():
    """{name: number} of the enums that the pxd gives to Python."""
    found = {}
    for body in re.findall(r"^cpdef enum:((?:[^\n]*)\n(?:(?:    [^\n]*)?\n)*)", code(DATA), re.M):
        number = 0
        for name, value in re.findall(r"([A-Z]\w*)(?:\s*=\s*(-?\d+))?", body):
            number = int(value) if value else number
            found[name] = number
            number += 1
    return found


def test_enums_are_typed_once():
    # Two lists of numbers that must agree come apart one day: the pxd has them, Python imports them from the core.
    names = set(enums())
    assert {"NONE", "TENSOR", "PINNED", "FRESH", "MISS_SAME", "EMPTY", "CUDA"} <= names
    again = []
    for path in modules():
        for node in ast.walk(ast.parse(read(path))):
            if not isinstance(node, ast.Assign) or re.search(r"[A-Za-z_]", ast.unparse(node.value).replace("range", "")):
                continue
            for target in node.targets:
                parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
                again += [f"{path.name}: {p.id}" for p in parts if isinstance(p, ast.Name) and p.id in names]
    assert not again, "import these from cgt_core"


def functions_of(path):
    """[(line, text)] of a chapter's functions: what lies between two lines that begin at the margin."""
    found = []
    for i, line in enumerate(code(path).splitlines(), 1):
        if re.match(r"c?p?def ", line):
            found.append((i, line))
        elif found and (not line or line[0] in " )"):
            found[-1] = (found[-1][0], f"{found[-1][1]}\n{line}")
    return found


def test_every_malloc_is_looked_at():
    # No test runs out of memory in the right place.
    blind = []
    for path in chapters():
        for line, text in functions_of(path):
            for name in re.findall(r"([\w.]+) = (?:<[^>]*>)?malloc\(", text):
                if not re.search(rf"(?<![\w.]){re.escape(name)} is NULL", text):
                    blind.append(f"{path.name}:{line}: {name}")
    assert not blind


def test_no_exception_of_the_drivers_bindings_is_success():
    # cydriver raises where a driver lacks a function. Below `noexcept` that is told to nobody, and 0 is returned.
    deaf = []
    for line, text in functions_of(CORE / "cuda.pxi"):
        head = text.split(":\n")[0]
        if re.match(r"cdef (inline )?int ", head) and " noexcept" in head and re.search(r"\bcu\.cu[A-Z]\w+\(", text):
            deaf.append(f"cuda.pxi:{line}: {head}")
    assert [one for one in deaf if "cuda_joined" not in one] == []      # asked by PyTorch's allocator: it has joined nothing


def test_tensors_are_asked_without_virtual_calls():
    # A nested or sparse tensor answers sizes() by throwing: below noexcept the process ends.
    assert not offences([CORE / "tensor_shim.h"], r"->(?:sizes|strides|dim|numel|size|stride|storage_offset)\(")


def test_arrays_on_the_stack_have_a_named_size():
    # A number has no name that the bound in front of it could share: such an array overran once.
    literal = r"cdef\s+[\w.* ]*\[(?:[4-9]|\d\d+)\]\s+\w+|cdef\s+[\w.* ]+\s\w+\[(?:[4-9]|\d\d+)\]"
    assert not offences(chapters(), literal)


FOREIGN = {  # of torch, CUDA and Python, in comments that name them
    "sizes", "strides", "device", "requires_grad", "data_ptr", "step", "torch.cuda.graph_pool_handle",
}  # fmt: skip


def test_comments_name_what_exists():
    # A claim about a check that was renamed away is worse than none: `name()`, `name (file)` and `file: name`.
    files = {p.name: p for p in [*core_files(), *modules()]}
    words = {w for p in files.values() for w in re.findall(r"\w+", code(p))}
    wrong = []
    for path in core_files():
        mark = "//" if path.suffix == ".h" else "#"
        for i, line in enumerate(read(path).splitlines(), 1):
            if mark not in line:
                continue
            text = line.split(mark, 1)[1]
            wrong += [f"{path.name}:{i}: {w}()" for w in re.findall(r"\b([a-z_]\w+)\(\)", text) if w not in words | FOREIGN]
            claims = [(f, w) for w, f in re.findall(r"\b(\w+) \((\w+\.(?:pxi|py|h|pxd))\)", text)]
            claims += re.findall(r"\b(\w+\.(?:pxi|py|h|pxd)): (\w+)", text)
            for file, word in claims:
                if file in files and "_" in word and not re.search(rf"\b{word}\b", code(files[file])):
                    wrong.append(f"{path.name}:{i}: {word} in {file}")
    assert not wrong


FOREIGN_IN_PYTHON = {  # functions and words of torch, Python and the environment
    "item", "relu", "tolist", "no_grad", "flags", "pin_memory", "KW_NAMES", "CGT_MAX_GRAPHS", "CGT_PARALLEL", "CGT_AUDIT", "CGT_VERIFY", "CGT_MEMORY_BUDGET", "CGT_NAN", "dis.py",
}  # fmt: skip


def remarks(path):
    """[(line, text)] of a module's comments and docstrings; of a page, all its lines."""
    text = read(path)
    if path.suffix == ".md":
        return list(enumerate(text.splitlines(), 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = [(t.start[0], t.string) for t in tokens if t.type == tokenize.COMMENT]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            said = node.body[0]
            found += enumerate(said.value.value.splitlines(), said.lineno)
    return found


def functions_of_ours():
    """Names that can be called: of functions, classes and parameters; in the core, all that something is done with."""
    names = {w for p in core_files() for w in re.findall(r"\b(\w+)\(", code(p))} | set(dir(builtins))
    for node in (n for p in modules() for n in ast.walk(ast.parse(read(p)))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            names |= {a.arg for a in (*node.args.args, *node.args.kwonlyargs)}
    return names


def test_comments_of_python_name_what_exists():
    # The same for the front end and its guide: `name()`, words_with_underscores, `module.name` and file names.
    files = {p.name: p for p in sources()}
    texts = {p: code(p) for p in sources() if p.suffix in (".py", ".pyx", ".pxi", ".pxd", ".h")}
    words = {w for text in texts.values() for w in re.findall(r"\w+", text)} | {p.stem for p in texts}
    ours, functions = {p.stem: texts[p] for p in modules()}, functions_of_ours()
    wrong = []
    for path in [*modules(), ROOT / "docs" / "internals.md"]:
        for i, text in remarks(path):
            claims = [(f"{w}()", w, w in functions) for w in re.findall(r"(\w+)\(\)", text)]
            claims += [(w, w, w in words) for w in re.findall(r"\b[A-Za-z]\w*_\w+\b", text)]
            claims += [(f, f, f in files) for f in re.findall(r"\b\w+\.(?:pxi|pxd|pyx|py|md|h)\b", text)]
            for module, word in re.findall(r"\b(\w+)\.(?!(?:pxi|py)\b)(\w+)", text):
                known = module not in ours or re.search(rf"\b{word}\b", ours[module])
                claims.append((f"{module}.{word}", word, known))
            wrong += [f"{path.name}:{i}: {told}" for told, name, known in claims if not known and name not in FOREIGN_IN_PYTHON]
    assert not wrong


# --- the front end ----------------------------------------------------------------------------------------------------


def test_only_private_spells_torch_internals():
    # Every private torch name has a feature test and a check at start-up; those are in private.py.
    private = ROOT / "cgt" / "words" / "private.py"
    read(private)
    assert not offences([p for p in modules() if p != private], r"\btorch\._C\b")


def test_no_mode_of_torch_is_entered_in_python():
    # An interrupt while one is entered or left would leave it on: begin and end it in compiled code (core.within, in_inference).
    assert not offences(modules(), r"^\s*with torch\.(no_grad|enable_grad|inference_mode|set_grad_enabled|autocast)\b")


def test_what_is_taken_away_comes_back_by_a_bracket():
    # An interrupt between the call and its `try` would leave it away.
    assert not offences(modules(), r"\bgc\.(disable|enable)\(|\bpaths_(un)?lock\(")


@pytest.mark.parametrize("name", ORDER)
def test_imports_follow_the_order(name):
    # One way of dependency: a reader who starts at the left never needs what comes later.
    path = ROOT / "cgt" / f"{name.replace('.', '/')}.py"
    allowed = set() if name in FOUNDATIONS else set(ORDER[: ORDER.index(name)])
    assert imports_of_ours(path) <= allowed


def test_parts_that_may_be_missing_are_reached_through_one_module():
    # Whoever imported one of them elsewhere would not be there without it.
    optional = {"cuts.forks", *(name for name in ORDER if name.startswith("ranks."))}
    found = {name for name in ORDER if name not in optional and imports_of_ours(ROOT / "cgt" / f"{name.replace('.', '/')}.py") & optional}
    assert found == {"make.optional"}


def test_every_module_has_a_place_in_the_order():
    names = {name_of(p) for p in modules()} - {"__main__"} - {f"{folder}.__init__" for folder in FOLDERS}
    assert names == set(ORDER), "give the new module a place in HOUSE"


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_says_what_it_is_for(folder):
    # And does nothing else: what is imported with it would be known to all that import one of its modules.
    body = ast.parse(read(ROOT / "cgt" / folder / "__init__.py")).body
    assert len(body) == 1 and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)


def test_folders_follow_one_order():
    # A folder that is left and entered again would be two.
    assert len(set(FOLDERS)) == len(FOLDERS)
    built = re.search(r"^packages = (\[.*\])", read(ROOT / "pyproject.toml"), re.M).group(1)
    assert ast.literal_eval(built) == ["cgt", *(f"cgt.{folder}" for folder in FOLDERS)]


def test_tests_lie_where_their_subject_does():
    # Who changes a folder finds what holds it. A whole program has none of its own; neither has the repository.
    found = {path.parent.relative_to(ROOT / "tests").as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    assert found == {*FOLDERS, "core", "programs", "project"}


def test_the_table_of_modules_is_in_that_order():
    # Readers begin with the table; a room that it does not name is found by nobody.
    page = read(ROOT / "docs" / "internals.md")
    table = page[page.index("| module | what it does |") :].split("\n\n")[0]
    named, folder = [], ""
    for row in table.splitlines()[2:]:
        cell = row.split("|")[1]
        begins = re.search(r"\*\*(\w*)/\*\*", cell)
        folder = begins.group(1).replace("cgt", "") if begins else folder
        named += [f"{folder}.{name}".lstrip(".") for name in re.findall(r"`(\w+)`", cell)]
    assert named == [name for name in ORDER if name != "__init__"]


def test_the_demo_uses_only_what_users_have():
    # It is the first code that a visitor reads.
    path = ROOT / "docs" / "demo.py"
    assert set(re.findall(r"^(?:from|import) (cgt\S*)", read(path), re.M)) == {"cgt"}
    used = {
        node.attr
        for node in ast.walk(ast.parse(read(path)))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "cgt"
    }
    assert used <= PUBLIC


def test_public_names():
    # The list is short and kept short: each name is a promise.
    tree = ast.parse(read(ROOT / "cgt" / "__init__.py"))
    imported = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module not in (None, *FOLDERS)  # a module is no name of ours
        for alias in node.names
    }
    assert imported == PUBLIC
    declared = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    ]
    assert declared and set(declared[0]) == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_names_have_docstrings(name):
    # help(cgt.jit) is documentation that cannot go missing.
    found = [
        node
        for path in modules()
        for node in ast.parse(read(path)).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name
    ]
    assert found, f"{name} is defined in none of cgt/*.py"
    assert any(ast.get_docstring(node) for node in found), f"{name} has no docstring"


# --- continuous integration -------------------------------------------------------------------------------------------


def test_continuous_integration_runs_what_people_run():
    # A command that only a service runs is one that nobody can try.
    if not (ROOT / ".ci").is_dir():
        pytest.skip("a source distribution has no continuous integration")
    workflow, script, makefile = read(ROOT / ".github/workflows/ci.yml"), read(ROOT / ".ci/run"), read(ROOT / "Makefile")
    commands = re.findall(r"^ +- run: (.+)$", workflow, re.M)
    assert commands == [".ci/run", "make sanitize SECONDS=120", "make docs INSTALL=1"]
    made = re.findall(r"^make (\w+)", "\n".join([script, *commands]), re.M)
    assert made == ["test", "wheel", "sanitize", "docs"] and all(re.search(rf"^{target}:", makefile, re.M) for target in made)


def test_continuous_integration_has_the_pythons_that_are_promised():
    if not (ROOT / ".ci").is_dir():
        pytest.skip("a source distribution has no continuous integration")
    workflow, project = read(ROOT / ".github/workflows/ci.yml"), read(ROOT / "pyproject.toml")
    matrix = re.findall(r'"3\.(\d+)"', re.search(r"^ +python: \[(.*)\]$", workflow, re.M)[1])
    least = re.search(r'^requires-python = ">=3\.(\d+)"$', project, re.M)[1]
    assert matrix == re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', project)
    assert all(int(minor) >= int(least) for minor in [*matrix, *re.findall(r'python-version: "3\.(\d+)"', workflow)])


# --- everywhere -------------------------------------------------------------------------------------------------------


def test_no_file_is_too_long():
    # Past this nobody reads a file to its end, and banners stop helping. Sentences, each found by its code, nobody does.
    texts = ROOT / "cgt" / "words" / "errors.py"
    lengths = {str(p.relative_to(ROOT)): len(read(p).splitlines()) for p in sources() if p != texts}
    assert not {name: n for name, n in lengths.items() if n > MOST_LINES}


def test_nothing_is_left_for_later():
    # A mark in the source is a promise that nobody reads. Do it, or write it down where it is looked for.
    marks = "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3))
    assert not offences(sources(), rf"\b({marks})\b", read)
