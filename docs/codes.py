"""The table of docs/messages.md: each sentence of cgt's by its code, with `...` for what is the program's.

    python docs/codes.py       writes it; needs cgt built

tests/project/test_docs.py holds the page to cgt/words/errors.py.
"""

import inspect
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cgt.words import errors  # noqa: E402

PAGE = ROOT / "docs" / "messages.md"
TROUBLES = ROOT / "docs" / "troubleshooting.md"
GROUPS = {
    1: "Values that Python reads",
    2: "Tensors and their memory",
    3: "What Python keeps",
    4: "Gradients and optimizers",
    5: "Whether a call is recorded",
    6: "Parts that run otherwise",
    7: "Devices and the driver",
    8: "Arguments of cgt's functions",
    9: "Installing",
}


class Dots(str):
    """Stands for any argument of a sentence."""

    def __new__(cls):
        return super().__new__(cls, "...")

    def __format__(self, _):
        return "..."

    def __rmul__(self, _):
        return self

    def __getattr__(self, name):
        return self


CHOICES = {"blocked": {"kind": range(1, 7)}, "island": {"why": errors.ISLANDS}}  # sentence -> argument -> its values


def told(sentence):
    """[what it says], of each value of an argument that chooses among texts one."""
    given = [p for p in inspect.signature(sentence).parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    ((name, values),) = CHOICES.get(sentence.__name__, {"": [None]}).items()
    return [sentence(*(value if p.name == name else Dots() for p in given)).partition(": ")[2] for value in values]


def anchor(title):
    """As mkdocs makes it."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())


def explained():
    """Code -> the titles of docs/troubleshooting.md about it."""
    found = {}
    for title in re.findall(r"^### (CGT\d+: .*)$", TROUBLES.read_text(), re.M):
        found.setdefault(int(re.match(r"CGT(\d+)", title)[1]), []).append(title)
    return found


def table():
    """The lines between the marks of the page."""
    troubles, lines = explained(), []
    for digit, title in GROUPS.items():
        lines += ["", f"## {digit}xx: {title}", "", "| code | says |", "| --- | --- |"]
        for number in sorted(n for n in errors.CODES if n // 100 == digit):
            links = [f"[{name.partition(': ')[2]}](troubleshooting.md#{anchor(name)})" for name in troubles.get(number, ())]
            more = f"<br>See: {'; '.join(links)}." if links else ""
            texts = [re.sub(r"([|_*`])", r"\\\1", text.replace("<", "&lt;")) for text in told(errors.CODES[number])]
            lines.append(f"| CGT{number} | {'<br>'.join(texts)}{more} |")
    return "\n".join([*lines, "", ""])


def with_table(page):
    """The page with today's table."""
    text, n = re.subn(r"(?<=<!-- messages -->\n).*?(?=<!-- /messages -->)", lambda _: table(), page, flags=re.S)
    if n != 1:
        raise SystemExit("docs/messages.md has no place for the table")
    return text


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
