"""Build the one extension, `cgt_core`: `python setup.py build_ext --inplace`, or `make ext`; a wheel: `make wheel`.

    CGT_DEBUG=1       the checked build: table_check() after every record, arrays that move, -O1 -g
    CGT_SANITIZE=...  address or thread: with that sanitizer (make sanitize)
    CGT_WITH_CUDA=0/1 build without / with PyTorch's CUDA half; by default what the installed torch has
    CGT_LABEL=1       the version says which torch it was built against: 0.5.0+torch2.13, 0.5.0+torch2.13.cpu
    CUDA_HOME         where to look for cuda.h first

The settings that need no thought are in pyproject.toml. Here is what does: which CUDA headers fit the installed
cuda-bindings, how to stop with a sentence when none do, and that what is built works with this torch alone. Both kinds of
build keep their own folder under build/, so that changing between them compiles nothing that is up to date.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    import Cython
    import torch
    from Cython.Build import cythonize
except ImportError as error:
    sys.exit(
        f"cgt cannot be built: {error.name} is not installed. Install torch, then what builds beside it:"
        " pip install -r requirements-build.txt"
    )
if int(setuptools.__version__.split(".")[0]) < 77:  # it does not understand pyproject.toml
    sys.exit(
        f"cgt cannot be built: setuptools {setuptools.__version__} is older than 77."
        " Install what builds it: pip install -r requirements-build.txt"
    )

HERE = Path(__file__).resolve().parent
DEBUG = os.environ.get("CGT_DEBUG", "0") == "1"
SANITIZE = [f"-fsanitize={kind}" for kind in os.environ.get("CGT_SANITIZE", "").split()]
WITH_CUDA = os.environ.get("CGT_WITH_CUDA", str(int(torch.version.cuda is not None))) == "1"


# --- how far it is ------------------------------------------------------------------------------------------------------

# Seconds on a machine of two cores. How long Cython took here tells how fast this one is.
SECONDS = {"Cython": 4, "release": 45, "checked": 55}
pace = 1.0


@contextlib.contextmanager
def told(what, seconds, first=1.0, later=30.0):
    """Tell on stderr what is done and how long it may still take: on a terminal a line that is written anew each second,
    elsewhere a line after `first` seconds, one every `later` seconds and one at the end. What is done sooner is not told."""
    terminal, began, over, lines = sys.stderr.isatty(), time.monotonic(), threading.Event(), []

    def say(text, end):
        lines.append(text)
        print(f"\r{text}\033[K" if terminal else text, end="" if terminal and not end else "\n", file=sys.stderr, flush=True)

    def tick():
        while not over.wait(first if terminal or not lines else later):
            gone = time.monotonic() - began
            left = f"about {clock(seconds - gone)} left" if gone < seconds else "longer than expected"
            say(f"  {what}: {clock(gone)}, {left}", end=False)

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    done = "failed"
    try:
        yield
        done = "done"
    finally:
        over.set()
        thread.join()
        if lines:
            say(f"  {what}: {done} after {clock(time.monotonic() - began)}", end=True)


def clock(seconds):
    """'1:05'"""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


# --- CUDA's headers and cuda-bindings: the pair ---------------------------------------------------------------------

# cuda-bindings names the driver's structs as its own CUDA release spells them, so an older cuda.h may lack some. Which pairs
# fit no number tells: these lines do.
PROBE = "from cuda.bindings.cydriver cimport cuInit\ndef probe(): return cuInit(0)\n"
CUDA_PROBE = 'cdef extern from "cuda_runtime_api.h":\n    pass\n'


def header_folders():
    """Folders with a cuda.h, in the order in which they are tried."""
    folders = [Path(os.environ[name], "include") for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    nvidia = importlib.util.find_spec("nvidia")  # a namespace package, spread over several wheels
    for root in nvidia.submodule_search_locations if nvidia else ():
        folders += [Path(root, wheel, "include") for wheel in ("cu13", "cuda_runtime")]
    folders.append(Path("/usr/local/cuda/include"))
    from torch.utils.cpp_extension import CUDA_HOME
    if CUDA_HOME:
        folders.append(Path(CUDA_HOME, "include"))
    return [folder for folder in dict.fromkeys(folders) if (folder / "cuda.h").is_file()]


def header_version(folder):
    """'13.0', of the cuda.h in `folder`: CUDA_VERSION is 1000 * major + 10 * minor."""
    found = re.search(r"^#define\s+CUDA_VERSION\s+(\d+)", (folder / "cuda.h").read_text(errors="replace"), re.M)
    number = int(found.group(1)) if found else 0
    return f"{number // 1000}.{number % 1000 // 10}"


def bindings_version():
    try:
        return importlib.metadata.version("cuda-bindings")
    except importlib.metadata.PackageNotFoundError:
        sys.exit("cgt cannot be built: cuda-bindings is not installed. Install it: pip install 'cuda-bindings>=13.0,<14'.")


def compiler():
    return shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++")


def complaint(folder, probe):
    """What the compiler says first of these headers, or None: they fit. `probe`: PROBE in C++."""
    includes = [f"-I{path}" for path in (folder, sysconfig.get_paths()["include"])]
    try:
        done = subprocess.run([*compiler(), "-std=c++20", "-fsyntax-only", *includes, str(probe)], capture_output=True, text=True)
    except OSError as error:
        sys.exit(f"cgt cannot be built: there is no C++ compiler ({error}). Install one (g++ 10 or later, or set CXX).")
    said = [line for line in done.stderr.splitlines() if "error" in line]
    return (said or [done.stderr.strip() or "it failed"])[0] if done.returncode else None


def choose_header():
    """The first folder that compiles with the installed cuda-bindings, or the end of the build in a sentence. What fitted
    once is not asked again."""
    bindings, folders = bindings_version(), header_folders()
    known, key = HERE / "build" / "headers.json", " ".join((bindings, Cython.__version__, str(WITH_CUDA), *compiler(), *map(str, folders)))
    chosen = json.loads(known.read_text()) if known.is_file() else {}
    if key in chosen:
        return Path(chosen[key])
    complaints = {}
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder, "probe.pyx")
        probe.write_text(PROBE + CUDA_PROBE * WITH_CUDA)
        roots = [sysconfig.get_path("platlib"), sysconfig.get_path("purelib"), *sys.path]
        subprocess.run([sys.executable, "-m", "cython", "--cplus", "-3", *(f"-I{root}" for root in roots if root), str(probe)], check=True)
        for one in folders:
            complaints[one] = complaint(one, probe.with_suffix(".cpp"))
            if complaints[one] is None:
                known.parent.mkdir(exist_ok=True)
                known.write_text(json.dumps({**chosen, key: str(one)}))
                return one
    sys.exit(no_header(bindings, complaints))


def no_header(bindings, complaints):
    """The sentence for a build that ends here."""
    major, minor = bindings.split(".")[:2]
    wheels = " ".join(f"'nvidia-cuda-{part}=={major}.{minor}.*'" for part in ("runtime", "crt", "profiler-api"))
    ways = f"pip install {wheels}, which bring the headers alone; or install the CUDA toolkit {major}.{minor} and set CUDA_HOME to its folder."
    if not complaints:
        return f"cgt cannot be built: no folder with cuda.h was found, and the compiler needs it (a GPU is not needed). Two ways to get it: {ways}"
    seen = "\n".join(f"  CUDA {header_version(folder)} in {folder}: {text}" for folder, text in complaints.items())
    version = header_version(next(iter(complaints)))
    return (
        f"cgt cannot be built: cuda-bindings {bindings} do not compile with the CUDA headers that are here.\n{seen}\n"
        f"Either get headers that fit: {ways} Or cuda-bindings that fit the headers: pip install 'cuda-bindings=={version}.*'."
    )


# --- the extension ------------------------------------------------------------------------------------------------

def torch_version():
    return tuple(int(part) for part in re.match(r"(\d+)\.(\d+)", torch.__version__).groups())


def make_extension():
    from torch.utils.cpp_extension import include_paths

    cuda_include = choose_header()
    torch_lib = str(Path(torch.__file__).parent / "lib")
    major, minor = torch_version()
    print(
        "cgt: {} build, torch {}, {} CUDA half, cuda.h {} from {}".format(
            "debug" if DEBUG else "release", torch.__version__, "with" if WITH_CUDA else "without",
            header_version(cuda_include), cuda_include,
        )
    )
    return Extension(
        "cgt_core",
        ["cgt_core.pyx"],
        language="c++",
        include_dirs=[".", "cgt/core"],
        # A chapter or a shim that was touched rebuilds; so does a change of what is written here.
        depends=["cgt_core.pxd", "setup.py", *sorted(str(p.relative_to(HERE)) for p in HERE.glob("cgt/core/*"))],
        define_macros=[
            ("CGT_DEBUG", int(DEBUG)),
            ("CGT_WITH_CUDA", int(WITH_CUDA)),
            ("CGT_TORCH_MAJOR", major),
            ("CGT_TORCH_MINOR", minor),
            ("_GLIBCXX_USE_CXX11_ABI", int(torch.compiled_with_cxx11_abi())),
        ],
        # Other people's headers come with -isystem, so that the warnings that remain are about our own lines.
        extra_compile_args=[
            "-std=c++20",
            *(["-O1", "-g"] if DEBUG or SANITIZE else ["-O2", "-g0", "-fno-plt"]),
            *SANITIZE,
            "-fvisibility=hidden",
            *(f"-isystem{path}" for path in [*include_paths(), str(cuda_include)]),
        ],
        libraries=["c10", "torch", "torch_cpu", "torch_python", *(["c10_cuda", "torch_cuda"] if WITH_CUDA else [])],
        library_dirs=[torch_lib],
        # The first path is this torch's; the second is right when cgt_core is installed beside another copy of torch.
        extra_link_args=[*SANITIZE, f"-Wl,-rpath,{torch_lib}", "-Wl,-rpath,$ORIGIN/torch/lib"],
    )


def build_folder():
    """One folder per kind of build, so that nothing stale is taken for fresh."""
    kind = ("debug" if DEBUG else "release") + "".join(SANITIZE)
    return f"build/{kind}-{sys.implementation.cache_tag}-torch{torch.__version__}{'-cuda' if WITH_CUDA else ''}"


class build_ext_in_place(build_ext):
    """setuptools keeps the newer file when it copies the result beside the source. Going back from a debug build to an
    older release build that is still fresh must copy the older one."""

    def build_extension(self, ext):
        kind = "checked" if DEBUG else "release"
        with told(f"C++ compiler, {kind} build of {ext.name}", SECONDS[kind] * pace):
            super().build_extension(ext)

    def copy_extensions_to_source(self):
        compile_all, self.force = self.force, True
        super().copy_extensions_to_source()
        self.force = compile_all


# --- the package --------------------------------------------------------------------------------------------------

def version():
    """What cgt/__init__.py says, and with CGT_LABEL for which torch it is."""
    said = re.search(r'^__version__ = "(.+)"', (HERE / "cgt/__init__.py").read_text(), re.M).group(1)
    label = "+torch{}.{}".format(*torch_version()) + ("" if WITH_CUDA else ".cpu")
    return said + (label if os.environ.get("CGT_LABEL", "0") == "1" else "")


def to_cpp(extension):
    """Cython's part."""
    global pace
    began = time.monotonic()
    with told("Cython, from cgt_core.pyx to C++", SECONDS["Cython"]):
        made = cythonize(
            [extension],
            # Keyed by what it was generated from: another Cython or other bindings generate other C++.
            build_dir=f"build/cython-{Cython.__version__}-bindings{bindings_version()}",
            include_path=[".", sysconfig.get_path("platlib"), sysconfig.get_path("purelib")],
            compiler_directives={
                "language_level": 3,
                "boundscheck": False,
                "wraparound": False,
                "cdivision": True,
                "binding": True,
                "embedsignature": False,
            },
        )
    took = time.monotonic() - began
    pace = took / SECONDS["Cython"] if took > 1 else 1.0  # or it was up to date
    return made


def main():
    os.chdir(HERE)
    setup(
        version=version(),
        # The core is compiled against one minor release of torch, whose C++ is another in the next.
        install_requires=["torch=={}.{}.*".format(*torch_version()), "cuda-bindings>=13.0,<14"],
        ext_modules=to_cpp(make_extension()),
        cmdclass={"build_ext": build_ext_in_place},
        options={"build": {"build_temp": f"{build_folder()}/obj", "build_lib": f"{build_folder()}/lib"}},
    )


if __name__ == "__main__":
    main()
