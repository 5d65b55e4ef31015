"""What type checkers know: the stub tells of the functions as they are, a program that is right has no error, and each line of one
that is wrong has."""

import ast
import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path

import cgt_core as core
import pytest

import cgt
from cgt.doctor import Diagnosis, Finding
from cgt.tools.report import Memory, Recording, Stats

ROOT = Path(__file__).resolve().parents[2]
TYPED = ROOT / "tests" / "typed"
STUB = ast.parse((ROOT / "cgt" / "__init__.pyi").read_text())
CHECKERS = {
    "mypy": ["-m", "mypy", "--strict", "--no-incremental", "--config-file", "mypy.ini"],
    "basedpyright": ["-m", "basedpyright", "-p", "."],  # pyright, with its Node in the wheel
}
CONFIGURATION = {
    "mypy.ini": f"[mypy]\nmypy_path = {ROOT}\n[mypy-torch.*]\nfollow_imports = skip\n",
    "pyrightconfig.json": f'{{"extraPaths": ["{ROOT}"], "typeCheckingMode": "strict", "include": ["program.py", "wrong.py"]}}',
}


def bodies(kind):
    return {one.name: one for one in STUB.body if isinstance(one, kind)}


def test_the_stub_tells_of_all_that_is_public():
    told = {name for name in (*bodies(ast.FunctionDef), *bodies(ast.ClassDef)) if name[0] != "_"}
    assert told == {*cgt.__all__, "Stats", "Recording", "Memory", "Finding", "Diagnosis"}
    names = next(ast.literal_eval(one.value) for one in STUB.body if isinstance(one, ast.Assign) and one.targets[0].id == "__all__")
    assert names == cgt.__all__
    assert set(dir(cgt)) == {*cgt.__all__, "__version__"}  # what a shell completes


@pytest.mark.parametrize("name", [name for name in cgt.__all__ if inspect.isfunction(getattr(cgt, name))])
def test_the_stub_has_the_functions_parameters(name):
    for one in (one for one in STUB.body if isinstance(one, ast.FunctionDef) and one.name == name):
        given = [*one.args.posonlyargs, *one.args.args, one.args.vararg, *one.args.kwonlyargs, one.args.kwarg]
        assert [arg.arg for arg in given if arg is not None] == list(inspect.signature(getattr(cgt, name)).parameters)


@pytest.mark.parametrize("cls", [Stats, Recording, Memory, Finding, Diagnosis])
def test_the_stub_has_the_fields(cls):
    fields = [one.target.id for one in bodies(ast.ClassDef)[cls.__name__].body if isinstance(one, ast.AnnAssign)]
    assert fields == list(cls._fields)


def test_the_stub_has_the_bases_of_the_errors():
    for cls in (cgt.CgtError, cgt.CgtWarning):
        assert [base.id for base in bodies(ast.ClassDef)[cls.__name__].bases] == [base.__name__ for base in cls.__bases__]


@pytest.mark.skipif(core.debug_build(), reason="does not depend on the build: the release suite does it")
@pytest.mark.parametrize("checker", CHECKERS)
def test_checker(checker, tmp_path):
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed")
    for name, text in CONFIGURATION.items():
        (tmp_path / name).write_text(text)
    for path in TYPED.glob("*.py"):
        (tmp_path / path.name).write_text(path.read_text())
    done = subprocess.run([sys.executable, *CHECKERS[checker], "program.py", "wrong.py"][: None if checker == "mypy" else -2], cwd=tmp_path, capture_output=True, text=True)
    said = [line.strip() for line in done.stdout.splitlines() if "error:" in line or " - error" in line]
    assert not [line for line in said if "program.py" in line], done.stdout + done.stderr
    lines = (TYPED / "wrong.py").read_text().splitlines()
    wrong = {k for k, line in enumerate(lines, 1) if "  # " in line}
    assert {int(line.split("wrong.py:")[1].split(":")[0]) for line in said} == wrong, done.stdout + done.stderr


def test_the_right_program_runs():
    subprocess.run([sys.executable, str(TYPED / "program.py")], check=True, env={"PYTHONPATH": str(ROOT), "PATH": ""})
