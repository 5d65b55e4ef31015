"""The recordings of a function as a picture: all that is told is in it, it stands by itself, and what users name cannot break it."""

import html.parser
import os
import re
import shutil
import subprocess
import xml.etree.ElementTree

import pytest
import torch
from helpers import numbers, tells, values
from torch import nn

# isort: split
import cgt_core as core

import cgt
from cgt.api import state_of
from cgt.tools import draw, report


class Page(html.parser.HTMLParser):
    """What a browser would make of it: nesting is looked at, text is kept by element."""

    def __init__(self, text):
        super().__init__()
        self.open, self.found, self.outside = [], [], []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.outside += [value for name, value in attrs if name in ("href", "src")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, (tag, self.open)

    def handle_data(self, data):
        if data.strip():
            self.found.append((self.open[-1] if self.open else "", data.strip()))

    def texts(self, tag):
        return [text for where, text in self.found if where == tag]


def drawn(f, tmp_path):
    """(page, Graphviz) of a function."""
    for name in ("tree.html", "tree.dot"):
        cgt.show(f, tmp_path / name)
    return Page((tmp_path / "tree.html").read_text()), (tmp_path / "tree.dot").read_text()


def blocks(dot):
    """The lines of each block."""
    labels = re.findall(r'^  n\d+ \[label="(.*)"\];$', dot, re.MULTILINE)
    parts = [re.findall(r"\\.|[^\\]", label) for label in labels]
    return ["".join("\n" if one == r"\l" else one[-1] for one in label).splitlines() for label in parts]


def edges(dot):
    return re.findall(r'^  n\d+ -> n\d+ \[label="(.*)"\];$', dot, re.MULTILINE)


def branch(x):
    y = x * 2
    if y.sum() > 0:
        return y.relu()
    z = y.cos()
    z.add_(1)
    return z


def test_each_recording_is_a_block_with_its_ops(device, tmp_path):
    f = cgt.jit(branch)
    for k in range(12):
        f(numbers(device, start=-9.0 * (k % 2)))
    assert cgt.stats(f).replays >= 8
    page, dot = drawn(f, tmp_path)
    found = blocks(dot)
    assert len(found) == 4 and found[0][0] == "branch" and "of 12 calls replayed" in found[0][1]
    assert "then a value is read at" in found[1][0] and any("test_show.py" in text for text in page.texts("summary"))
    assert sorted(edges(dot)) == ["", "False", "True"] == sorted(["", *page.texts("span")])
    ops = page.texts("code")
    assert {"aten.relu.default", "aten.cos.default", "aten.add_.Tensor", "aten.mul.Tensor"} <= set(ops), ops
    lines = [text for text in page.texts("li") if re.search(r"test_show\.py:\d+$", text)]
    first = branch.__code__.co_firstlineno
    assert {f"{__file__}:{first + k}" for k in (1, 3, 4, 5)} <= set(lines), lines
    assert not page.outside and "http" not in (tmp_path / "tree.html").read_text()


def test_shapes_tell_recordings_apart(device, tmp_path):
    f = cgt.jit(lambda x: x * 2)
    for k in range(8):
        f(torch.ones(4 + k % 2, device=device))
    _, dot = drawn(f, tmp_path)
    told = [text for block in blocks(dot) for text in block]
    assert "for args[0] = (4,)" in told and "for args[0] = (5,)" in told, told
    assert any(text.startswith(("fixed: args[0]", "moving: args[0]")) for text in told)


def test_functions_of_a_path_and_backwards(device, tmp_path):
    layer = nn.Linear(3, 3).to(device)
    first, second = cgt.jit(layer), cgt.jit(lambda y: y * 2)
    for k in range(8):
        cgt.step()
        second(first(values(device, 4, 3, seed=k)).detach())
        layer.zero_grad()
        first(values(device, 4, 3, seed=k)).sum().backward()
    for f, edge in ((first, "its backward"), (second, "behind Linear")):
        page, dot = drawn(f, tmp_path)
        assert edge in edges(dot) and edge in page.texts("span")


def test_function_that_never_replays_shows_why(device, tmp_path):
    f = cgt.jit(lambda x: x.data_ptr() if x.device.type == "cpu" else x.untyped_storage().tolist()[:1])
    for _ in range(4):
        f(values(device, 2))
    page, dot = drawn(f, tmp_path)
    assert len(blocks(dot)) == 1 and any("0 of 4 calls replayed" in text for text in page.texts("li"))
    assert any("test_show.py" in text for text in page.texts("li"))


def test_function_that_was_not_called(tmp_path):
    page, dot = drawn(cgt.jit(lambda x: x), tmp_path)
    assert len(blocks(dot)) == 1 and dot.startswith("digraph")


def test_names_are_text(device, tmp_path):
    def function(x):
        return x["<script>alert(1)</script>"] * 2 + x['"quoted" \\ & more']

    function.__qualname__ = "f<b>&\"\\"
    f = cgt.jit(function)
    for k in range(8):
        f({"<script>alert(1)</script>": values(device, 2 + k % 2), '"quoted" \\ & more': values(device, 2 + k % 2)})
    page, dot = drawn(f, tmp_path)
    assert "<script" not in (tmp_path / "tree.html").read_text() and blocks(dot)[0][0] == "f<b>&\"\\"
    assert any("<script>alert(1)</script>" in text for text in page.texts("li"))
    assert re.fullmatch(r"digraph cgt \{\n(  [^\n]+;\n)+\}\n", dot)
    assert all(len(re.findall(r'(?<!\\)(?:\\\\)*"', line)) % 2 == 0 for line in dot.splitlines())
    if shutil.which("dot"):
        subprocess.run(["dot", "-Tsvg", tmp_path / "tree.dot"], check=True, capture_output=True)


def test_graphs_are_drawn_a_dot_a_node(device, tmp_path):
    """Those of both ways of a call, with the line that says so; the page has them, too."""
    f = cgt.jit(branch)
    for k in range(8):
        f(numbers(device, start=-9.0 * (k % 2)))
    nodes = [core.node_facts(node).graph_nodes for node in state_of(f).keep]
    cgt.show(f, tmp_path / "graphs.svg")
    picture = xml.etree.ElementTree.parse(tmp_path / "graphs.svg").getroot()
    texts = ["".join(one.itertext()) for one in picture if one.tag.endswith("}text")]
    last = [int(re.search(r": (\d+) nodes behind each other$", text)[1]) for text in texts]
    assert len(nodes) == len(last) == 2 and all(0 < one <= n for one, n in zip(sorted(last), sorted(nodes), strict=True))
    assert sum(one.tag.endswith("}circle") for one in picture) == sum(last)
    assert last == [int(text.split()[0]) for text in texts]  # as the title says
    page = drawn(f, tmp_path)[0]
    assert sorted(page.texts("text")) == sorted(texts)


def test_a_node_is_drawn_behind_all_that_it_waits_for():
    """Two branches of a diamond are one above the other, and what stands alone begins at the left."""
    waits = [(0, 1), (0, 4), (1, 2), (4, 2), (2, 3)]
    assert draw.places_of(6, waits) == [(0, 0), (1, 0), (2, 0), (3, 0), (1, 1), (0, 1)]
    text = draw.picture([report.Block("six", "", [], shape=(6, waits))])
    assert text.count("<circle") == 12 and "six: 6 nodes behind each other; side by side 4 behind each other, at most 2" in text


@tells("no_drawing", "not_jitted")
def test_what_cannot_be_drawn(tmp_path):
    f = cgt.jit(lambda x: x)
    with pytest.raises(cgt.CgtError, match=r"ends in .html, .dot or .svg, not .*tree.png"):
        cgt.show(f, tmp_path / "tree.png")
    with pytest.raises(cgt.CgtError, match="was not made by cgt.jit"):
        cgt.show(print, tmp_path / "tree.dot")
    with pytest.raises(FileNotFoundError):
        cgt.show(f, tmp_path / "nowhere" / "tree.dot")


def test_page_unfolds_in_a_browser(device, tmp_path):
    """As a person sees it: a block is closed by a click, ops are shown by one."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: the page is only parsed")
    system = shutil.which("chromium")  # a distribution's; else playwright's own
    f = cgt.jit(branch)
    for k in range(8):
        f(numbers(device, start=-9.0 * (k % 2)))
    cgt.show(f, tmp_path / "tree.html")
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=system, args=["--no-sandbox"] if os.getuid() == 0 else [])
        page = browser.new_page()
        failed = []
        page.on("requestfailed", lambda request: failed.append(request.url))
        page.goto((tmp_path / "tree.html").as_uri())
        op = page.locator("code", has_text="aten.relu.default")
        assert not op.is_visible()
        op.locator("xpath=ancestor::details[1]/summary").click()
        assert op.is_visible() and not failed
        browser.close()
