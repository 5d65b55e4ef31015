"""The site, as a browser shows it. Needs what docs/requirements.txt has, and a browser (`CHROME=` names another one)."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BROWSER = os.environ.get("CHROME") or next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
# The page writes down what it finds: cells whose text is wider than they are and cannot be scrolled to, whether the page
# itself is wider than the window, and addresses of other hosts from which it takes something.
LOOK = """<script>window.addEventListener("load", () => {
  const wide = e => e.scrollWidth > e.clientWidth + 1;
  const scrolls = e => e && (["auto", "scroll"].includes(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
  const cut = [...document.querySelectorAll("td, th, pre")].filter(e => wide(e) && !scrolls(e));
  const edge = [...document.querySelectorAll("table")].filter(e => e.getBoundingClientRect().right > innerWidth && !scrolls(e));
  const from = [...document.querySelectorAll("link[rel=stylesheet], script[src], img")].map(e => e.href || e.src);
  document.body.innerHTML = `CUT ${cut.length + edge.length} BESIDE ${wide(document.documentElement)} ` +
    `OUTSIDE ${from.filter(a => !a.startsWith("file:")).length} END`;
})</script>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if not all(map(importlib.util.find_spec, ("mkdocs", "material", "mkdocstrings"))):
        pytest.skip("the site is not built without: pip install -r docs/requirements.txt")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", folder], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def seen(site, name, width):
    """What a page of the site, in a window so wide, tells of itself."""
    page = site / f"looked_at_{name}"
    page.write_text((site / name).read_text().replace("</body>", LOOK + "</body>"))
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={width},1000", "--virtual-time-budget=3000", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    told = re.search(r"CUT (\d+) BESIDE (\w+) OUTSIDE (\d+) END", done.stdout)
    assert told, done.stdout[-500:] + done.stderr[-2000:]
    return told.groups()


@pytest.mark.skipif(BROWSER is None, reason="no browser is installed")
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", "index zoo footguns messages figures parity_gpu api".split())
def test_nothing_is_cut_off_and_nothing_comes_from_another_host(site, name, width):
    assert seen(site, f"{name}.html", width) == ("0", "false", "0")


@pytest.mark.parametrize("name", ["footguns", "messages", "performance"])
def test_a_long_page_has_its_sections_beside_it(site, name):
    beside = (site / f"{name}.html").read_text().split('data-md-component="toc"', 1)
    assert len(beside) == 2 and beside[1].count("md-nav__link") > 4
