"""The pages of the site: their programs run and print what the pages show, their links lead somewhere, their figures are those measured.

`python tests/project/test_docs.py docs/tutorial.md` runs one page by hand and prints what its blocks print.

A page's blocks of Python run in order in one namespace, in a process of its own, with cgt as users have it. A block of text behind
one is what it prints, with `...` for what varies. A comment `<!-- skip: why -->` stands before a block that cannot run here. In
troubleshooting.md each section has a namespace of its own per program: a quoted message, a program that provokes it, one that replays;
`<!-- until Python 3.12 -->` in one tells where its message ends.
"""

import contextlib
import doctest
import importlib.util
import io
import math
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"(?:^<!-- skip: ([^>]+) -->\n)?^```(python|text)\n(.*?)^```$", re.M | re.S)


# --- in the page's own process --------------------------------------------------------------------


def blocks_of(text):
    """[(line, language, code, why it cannot run or None)] of a page or a section."""
    return [(text.count("\n", 0, m.start(3)) + 1, m[2], m[3], m[1]) for m in BLOCK.finditer(text)]


def run_block(name, line, code, namespace):
    """What it prints. Its functions lie in the page's lines, where messages find them."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile("\n" * (line - 1) + code, name, "exec"), namespace)
    return out.getvalue()


def agrees(shown, printed):
    """`...` in the page stands for anything, and a line may be broken anywhere."""
    return doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)


def run_page(path):
    """Run its blocks in one namespace; the pieces of text behind them must be what they print. Recipes record
    all that they can: whether a recording pays depends on what else this machine does."""
    from cgt.words import options

    if path.name == "recipes.md":
        options.OVERHEAD = math.inf
    namespace, printed, wrong = {"__name__": "__main__"}, "", []
    for line, language, code, skipped in blocks_of(path.read_text()):
        if language == "text":
            if not agrees(code, printed):
                wrong.append(f"{path.name}:{line} shows\n{code}and its program prints\n{printed}")
        elif not skipped:
            printed = run_block(path.name, line, code, namespace)
            print(f"{path.name}:{line}\n{printed}", end="")
    return wrong


def sections_of(text):
    """[(title, lines before it, text)] of what stands under each `###`."""
    found = [(m[1], text.count("\n", 0, m.start()), text[m.start() :]) for m in re.finditer(r"^### (.*)$", text, re.M)]
    return [(title, line, rest[: end.start() if (end := re.search(r"\n##+ ", rest)) else None]) for title, line, rest in found]


def quoted(text):
    """The message that a section is about: its lines that begin with `>`, as one."""
    return " ".join(line[1:].strip() for line in text.splitlines() if line.startswith(">"))


def run_sections(path):
    """Of each section the first program must provoke the message, the second must replay."""
    import torch

    import cgt
    from cgt.words import options

    share = options.OVERHEAD

    def run(line, code, pays):
        """(its namespace, what it prints, raises and is told by explain)"""
        namespace, told = {"__name__": "__main__", "torch": torch, "cgt": cgt}, ""
        torch.manual_seed(0)
        options.OVERHEAD = math.inf if pays else share
        try:
            told = run_block(path.name, line, code, namespace)
        except cgt.CgtError as error:
            told = str(error)
        return namespace, " ".join(f"{told} {cgt.explain(namespace['f'])}".split())

    wrong = []
    for title, before, text in sections_of(path.read_text()):
        message = re.escape(quoted(text)).replace(re.escape("..."), ".*?")
        programs = [(before + line, code) for line, language, code, _ in blocks_of(text) if language == "python"]
        if not message or len(programs) != 2:
            wrong.append(f"{title}: a quoted message and two programs were expected")
            continue
        ends = re.search(r"^<!-- until Python 3\.(\d+) -->$", text, re.M)
        _, told = run(*programs[0], False)
        if ends and sys.version_info >= (3, int(ends[1])):
            message = "(?!)"
        elif not re.search(message, told):
            wrong.append(f"{title}: the first program does not provoke\n{quoted(text)}\nbut\n{told}")
        namespace, told = run(*programs[1], True)  # whatever else this machine does
        if not cgt.stats(namespace["f"]).replays or re.search(message, told):
            wrong.append(f"{title}: the second program does not replay, or not without the message\n{told}")
        print(f"{title}: {told[:80]}")
    return wrong


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE = Path(sys.argv[1]).resolve()
    WRONG = (run_sections if PAGE.name == "troubleshooting.md" else run_page)(PAGE)
    print(*WRONG, sep="\n", end="", file=sys.stderr)
    sys.exit(bool(WRONG))


# --- the tests ------------------------------------------------------------------------------------

import cgt_core as core  # noqa: E402
import pytest  # noqa: E402

import cgt  # noqa: E402
from cgt.words import errors  # noqa: E402

RUN = ["tutorial", "troubleshooting", "migration", "recipes", "performance"]
pages = sorted(DOCS.rglob("*.md"))


@pytest.mark.skipif(core.debug_build(), reason="does not depend on the build: the release suite does it")
@pytest.mark.parametrize("name", RUN)
def test_programs_of_a_page_run_and_print_what_it_shows(name):
    path = DOCS / f"{name}.md"
    assert sum(language == "python" and not skipped for _, language, _, skipped in blocks_of(path.read_text()))
    environ = {k: v for k, v in os.environ.items() if not k.startswith("CGT_")} | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, __file__, str(path)], capture_output=True, text=True, env=environ, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_pages_that_are_not_run_have_no_programs_that_could_be():
    # index.md has the ten lines, whose model and loader are the reader's.
    others = [p.name for p in pages if p.stem not in RUN and any(language == "python" for _, language, _, _ in blocks_of(p.read_text()))]
    assert others == ["index.md"]


def test_troubleshooting_has_a_program_for_each_message():
    sections = sections_of((DOCS / "troubleshooting.md").read_text())
    assert len(sections) >= 25 and len({title for title, _, _ in sections}) == len(sections)
    assert all(quoted(text) for _, _, text in sections)


def test_every_page_is_in_the_nav():
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1].split("\nmarkdown_extensions:")[0]
    assert sorted(re.findall(r"([\w/-]+\.md)", nav)) == sorted(p.relative_to(DOCS).as_posix() for p in pages)


def anchors(path):
    """Of its titles, as mkdocs makes them."""
    told = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in told}


@pytest.mark.parametrize("path", [*pages, ROOT / "CONTRIBUTING.md", ROOT / "README.md"], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path):
    text = re.sub(r"^```.*?^```$|`[^`\n]+`", "", path.read_text(), flags=re.M | re.S)
    assert not re.search(r"^(<<<<<<< |=======$|>>>>>>> )", text, re.M), "marks of a merge"
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"\w+:", link):
            file, _, anchor = link.partition("#")
            target = path.parent / file if file else path
            if not target.is_file() or (anchor and anchor not in anchors(target)):
                dead.append(link)
    assert not dead


def script(name):
    """docs/{name}.py, which is no part of a package."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_figures_of_the_page_on_performance_are_those_measured():  # README and figures.md: test_record.py
    made, page = script("plots"), (DOCS / "performance.md").read_text()
    record = made.read()
    assert page == made.with_tables(page, record), "run: python docs/plots.py"
    for name in made.tables(record):
        page = made.between(name).sub("", page)
    prose = re.sub(r"^```.*?^```$", "", page, flags=re.M | re.S)
    assert not re.search(r"\d\s*(µs|ns|ms|×|x faster|%)", prose), "a figure that nothing holds to the record"


FOR_USERS = "index tutorial recipes scale troubleshooting migration messages glossary environment footguns how-we-know".split()


@pytest.mark.parametrize("name", [*FOR_USERS, "README"])
def test_no_page_for_users_has_a_word_to_avoid(name):
    table = (DOCS / "writing.md").read_text().split("## Words to avoid")[1]
    words = [word for line in table.splitlines() if line.startswith("| ") for word in line.split("|")[1].strip().split(", ")][1:]
    assert "anew" in words and "lies elsewhere" in words
    page = (ROOT / "README.md" if name == "README" else DOCS / f"{name}.md").read_text()
    prose = " ".join(re.sub(r"^```.*?^```$", "", page, flags=re.M | re.S).split())
    assert not [word for word in words if re.search(rf"\b{word}\b", prose, re.I)]


def test_every_message_is_listed_by_its_code():
    codes, page = script("codes"), (DOCS / "messages.md").read_text()
    assert page == codes.with_table(page), "run: python docs/codes.py"
    assert set(codes.explained()) <= set(errors.CODES)


def test_plots_show_the_figures_measured():
    made = script("plots")
    for name, numbers in made.labels(made.read()).items():
        shown = re.findall(r">([^<>]+)</text>", (DOCS / "plots" / f"{name}.svg").read_text())
        assert not set(numbers) - set(shown), "run: python docs/plots.py"


def test_changelog_has_versions_dates_and_short_lines():
    lines = (DOCS / "changelog.md").read_text().splitlines()
    titles = [re.fullmatch(r"## (\d+)\.(\d+)\.(\d+) \((not yet released|\d{4}-\d\d-\d\d)\)", line) for line in lines if line.startswith("## ")]
    assert all(titles) and [title[4] for title in titles[1:]] == sorted((title[4] for title in titles[1:]), reverse=True)
    assert not any(title[4] == "not yet released" for title in titles[1:])
    versions = [tuple(map(int, title.groups()[:3])) for title in titles]
    assert versions == sorted(versions, reverse=True) and ".".join(map(str, versions[0])) == cgt.__version__
    assert {line for line in lines if line.startswith("### ")} <= {f"### {name}" for name in "Added Changed Deprecated Removed Fixed Security".split()}
    assert not [line for line in lines if len(line) > 120]
    entries = re.findall(r"^- (.*(?:\n  .*)*)", "\n".join(lines), re.M)
    assert all(entry.endswith(".") for entry in entries)


def test_every_public_name_is_on_the_page_of_the_api():
    told = set(re.findall(r"^::: cgt\.(\w+)$", (DOCS / "api.md").read_text(), re.M))
    assert told == set(cgt.__all__)
