"""For the API page, two things that griffe does not see in the sources: examples, which begin with `>>>` and have no title, and the
docstring of a function that has its module's name (cgt.doctor), where the stub's signature stands in for both."""

import ast
import textwrap
from pathlib import Path

import griffe


def as_examples(text):
    """The docstring with what it shows after `>>>` in a section of its own."""
    told, shown, example = text.partition("\n>>> ")
    return f"{told}\n\nExamples:\n" + textwrap.indent(f">>> {example}", "    ") if shown else text


class Doctests(griffe.Extension):
    def on_package(self, *, pkg, **_):
        for name, member in pkg.members.items():
            path = Path(__file__).parent.parent / pkg.name / f"{name}.py"
            if member.kind is griffe.Kind.FUNCTION and path.exists():
                (node,) = (n for n in ast.parse(path.read_text()).body if getattr(n, "name", None) == name)
                member.docstring = griffe.Docstring(as_examples(ast.get_docstring(node)), parent=member, parser="google")

    def on_object(self, *, obj, **_):
        if obj.docstring is not None:
            obj.docstring.value = as_examples(obj.docstring.value)
