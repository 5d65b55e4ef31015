"""What is installed: which headers a build takes, what a source distribution holds, and another torch than the core's. (`make wheel`
builds one and uses it from an empty folder.)"""

import importlib.util
import io
import re
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import cgt_core as core
import pytest
import setuptools
import tomllib
import torch
from packaging.requirements import Requirement

import cgt
from cgt.words import private

ROOT = Path(__file__).resolve().parents[2]
release_only = pytest.mark.skipif(core.debug_build(), reason="does not depend on the build: the release suite does it")


@pytest.fixture
def build(monkeypatch, tmp_path):
    """setup.py as a module, which finds its folders in an empty one."""
    spec = importlib.util.spec_from_file_location("cgt_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "HERE", tmp_path)
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX"):
        monkeypatch.delenv(name, raising=False)
    return module


@release_only
@pytest.mark.parametrize("lacks", ["Cython", "setuptools"])
def test_what_is_missing_is_told_with_what_helps(lacks, monkeypatch):
    """In the environment of somebody who has torch, an older Python's setuptools, and nothing else."""
    if lacks == "Cython":
        monkeypatch.setitem(sys.modules, "Cython", None)
    else:
        monkeypatch.setattr(setuptools, "__version__", "65.5.0")
    spec = importlib.util.spec_from_file_location("cgt_setup", ROOT / "setup.py")
    with pytest.raises(SystemExit) as stopped:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    why = "Cython is not installed" if lacks == "Cython" else "setuptools 65.5.0 is older than 77"
    assert why in str(stopped.value) and "pip install -r requirements-build.txt" in str(stopped.value)


def test_both_ways_to_install_need_the_same():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    lines = (ROOT / "requirements-build.txt").read_text().splitlines()
    beside = {Requirement(line.partition("#")[0].strip()) for line in lines if not line.startswith("#")}
    assert {str(one.name) for one in beside} | {"torch"} == {Requirement(one).name for one in project}
    for one in map(Requirement, project):
        mine = next((other for other in beside if other.name == one.name), one)
        assert set(one.specifier) <= set(mine.specifier), (one, mine)


def folder_of(tmp_path, name, version=13000, text=""):
    folder = tmp_path / name
    folder.mkdir()
    (folder / "cuda.h").write_text(f"#define CUDA_VERSION {version}\n{text}")
    return folder


@release_only
def test_headers_that_compile_are_taken(build, monkeypatch, tmp_path):
    """An incomplete folder, one of another release: what does not compile is passed by, and what fits is remembered."""
    good = build.choose_header()
    bad = [folder_of(tmp_path, "incomplete"), folder_of(tmp_path, "strange", 12080, "#error of another release\n")]
    monkeypatch.setattr(build, "header_folders", lambda: [*bad, good])
    assert build.choose_header() == good
    monkeypatch.setattr(build, "complaint", lambda *_: pytest.fail("asked again"))
    assert build.choose_header() == good


@release_only
def test_headers_that_do_not_compile_are_told_with_what_helps(build, monkeypatch, tmp_path):
    monkeypatch.setattr(build, "header_folders", lambda: [folder_of(tmp_path, "strange", 13020, "#error of another release\n")])
    with pytest.raises(SystemExit) as stopped:
        build.choose_header()
    major, minor = build.bindings_version().split(".")[:2]
    for words in ("CUDA 13.2 in", "#error of another release", f"'nvidia-cuda-crt=={major}.{minor}.*'", "cuda-bindings==13.2.*", "CUDA_HOME"):
        assert words in stopped.value.code


class Terminal(io.StringIO):
    isatty = staticmethod(lambda: True)


@pytest.mark.parametrize("made", [io.StringIO, Terminal])
def test_a_build_tells_how_far_it_is(build, monkeypatch, made):
    """On a terminal in a line that is written anew, elsewhere in few lines; nothing of what is up to date."""
    out = made()
    monkeypatch.setattr(sys, "stderr", out)
    with build.told("at once", 60):
        pass
    assert out.getvalue() == ""
    with build.told("compiling", 60, first=0.01):
        while "left" not in out.getvalue():
            time.sleep(0.01)
    with pytest.raises(ValueError), build.told("linking", 0, first=0.01):
        while "expected" not in out.getvalue():
            time.sleep(0.01)
        raise ValueError
    lines = [line.removesuffix("\033[K") for line in out.getvalue().replace("\r", "\n").splitlines() if line]
    assert list(dict.fromkeys(lines)) == [
        "  compiling: 0:00, about 0:59 left",
        "  compiling: done after 0:00",
        "  linking: 0:00, longer than expected",
        "  linking: failed after 0:00",
    ]
    assert out.getvalue().count("\n") == (2 if out.isatty() else 4)


def test_no_headers_no_bindings_no_compiler(build, monkeypatch, tmp_path):
    assert "no folder with cuda.h was found" in build.no_header("13.0.3", {})
    monkeypatch.setattr(build.importlib.metadata, "version", lambda name: exec("raise error", {"error": build.importlib.metadata.PackageNotFoundError(name)}))
    with pytest.raises(SystemExit, match="cuda-bindings is not installed"):
        build.bindings_version()
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler -O2"))
    with pytest.raises(SystemExit, match="there is no C.. compiler"):
        build.complaint(tmp_path, tmp_path / "probe.cpp")


def test_headers_are_sought_where_people_have_them(build, monkeypatch, tmp_path):
    mine = folder_of(tmp_path, "include")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert build.header_folders()[0] == mine and build.header_version(mine) == "13.0"


def test_version(build, monkeypatch):
    monkeypatch.setattr(build, "HERE", ROOT)
    assert build.version() == cgt.__version__
    monkeypatch.setenv("CGT_LABEL", "1")
    for with_cuda in (True, False):
        monkeypatch.setattr(build, "WITH_CUDA", with_cuda)
        assert build.version() == "{}+torch{}.{}{}".format(cgt.__version__, *core.built_against(), "" if with_cuda else ".cpu")


@release_only
def test_source_distribution_has_what_the_repository_has(tmp_path):
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True) if shutil.which("git") else None
    if listed is None or listed.returncode:
        pytest.skip("these sources are no repository, or there is no git")
    subprocess.run([sys.executable, "setup.py", "-q", "egg_info", "--egg-base", tmp_path, "sdist", "--dist-dir", tmp_path], cwd=ROOT, check=True)
    (made,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(made) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {name for name in listed.stdout.split() if (ROOT / name).is_file() and not name.startswith(".")}
    assert wanted <= held, wanted - held
    assert not any(name.endswith((".so", ".pyc")) for name in held)


OTHER = """
import torch
torch.__version__ = "{}"
import cgt
"""


def test_another_torch_is_told_at_import():
    done = subprocess.run([sys.executable, "-c", OTHER.format("2.99.1")], cwd=ROOT, capture_output=True, text=True)
    assert "ImportError" in done.stderr and "cannot be loaded with torch 2.99.1" in done.stderr
    assert "built against torch {}.{}".format(*core.built_against()) in done.stderr and "--no-build-isolation" in done.stderr
    done = subprocess.run([sys.executable, "-c", OTHER.format(torch.__version__)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_core_that_cannot_be_loaded_is_told_at_import(tmp_path):
    """As one that lacks a symbol."""
    (tmp_path / "cgt_core.py").write_text("raise ImportError('undefined symbol: _ZN3c10')\n")
    program = f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; import cgt"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert "cannot be loaded with torch" in done.stderr and "undefined symbol: _ZN3c10" in done.stderr


def test_a_tensor_that_is_laid_out_otherwise_is_an_import_error(monkeypatch):
    """Each member that the core reads is held against what PyTorch says of it."""
    told = core.mirrored
    for k in range(7):
        monkeypatch.setattr(core, "mirrored", lambda t, k=k: tuple(None if j == k else one for j, one in enumerate(told(t))))
        with pytest.raises(ImportError, match="tensor layout"):
            private.self_check()
    monkeypatch.setattr(core, "mirrored", told)
    assert private.self_check()
    monkeypatch.setattr(core, "generator_id", id)
    with pytest.raises(ImportError, match="tensor layout"):
        private.self_check()


def test_a_release_has_wheels_for_what_is_supported():
    """One list of releases of torch, the first that `pip install .` takes or later; each Python that the package claims; and a tag
    that says the version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    release = (ROOT / ".github/workflows/release.yml").read_text()
    (torches,) = re.findall(r"\.ci/wheels (.*)", release)
    (pythons,) = re.findall(r"python: \[(.*)\]", release)
    minors = [tuple(map(int, one.split("."))) for one in torches.split()]
    assert len(minors) == 3 and minors == sorted(minors) and minors[0] >= (2, 11)
    claimed = {one.rpartition(" ")[2].replace(".", "") for one in project["project"]["classifiers"]}
    assert claimed <= {one.strip().removeprefix("cp") for one in pythons.split(",")}
    assert project["project"]["name"] == "cgt-torch" and '__version__ = \\"${GITHUB_REF_NAME#v}' in release
