"""Build the one extension, `cgt_core`: `python setup.py build_ext --inplace`, or `make ext`.

    CGT_DEBUG=1       the checked build: table_check() after every record, arrays that move, -O1 -g
    CGT_WITH_CUDA=0/1 build without / with PyTorch's CUDA half; by default what the installed torch has
    CUDA_HOME         where to look for cuda.h first

The settings that need no thought are in pyproject.toml. Here is what does: which cuda.h fits the installed
cuda-bindings, and how to stop with a sentence when none does. Both kinds of build keep their own folder under
build/, so that changing between them compiles nothing that is up to date.
"""

import importlib.metadata
import importlib.util
import os
import re
import sys
import sysconfig
from pathlib import Path

import Cython
import torch
from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).resolve().parent
DEBUG = os.environ.get("CGT_DEBUG", "0") == "1"
WITH_CUDA = os.environ.get("CGT_WITH_CUDA", str(int(torch.version.cuda is not None))) == "1"

# cuda-bindings names the driver's structs as its own CUDA release spells them, and an older cuda.h lacks the newest.
# Measured against CUDA 13.0's cuda.h: bindings 13.0 to 13.4 compile, 13.5.0 does not.
MINORS_AHEAD = 4


# --- cuda.h and cuda-bindings: the pair ---------------------------------------------------------------------------

def header_folders():
    """Folders that hold a cuda.h, in the order in which they are tried. cydriver also includes cudaProfiler.h (two
    functions that nobody here calls), which is a wheel of its own but the same folder."""
    folders = [Path(os.environ[name], "include") for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    nvidia = importlib.util.find_spec("nvidia")  # a namespace package, spread over several wheels
    for root in nvidia.submodule_search_locations if nvidia else ():
        folders += [Path(root, wheel, "include") for wheel in ("cu13", "cuda_runtime")]
    folders.append(Path("/usr/local/cuda/include"))
    from torch.utils.cpp_extension import CUDA_HOME
    if CUDA_HOME:
        folders.append(Path(CUDA_HOME, "include"))
    headers = ("cuda.h", "cudaProfiler.h")
    return [folder for folder in folders if all((folder / header).is_file() for header in headers)]


def header_version(folder):
    """(major, minor) of the cuda.h in `folder`: CUDA_VERSION is 1000 * major + 10 * minor."""
    found = re.search(r"^#define\s+CUDA_VERSION\s+(\d+)", (folder / "cuda.h").read_text(errors="replace"), re.M)
    number = int(found.group(1)) if found else 0
    return number // 1000, number % 1000 // 10


def bindings_version():
    try:
        version = importlib.metadata.version("cuda-bindings")
    except importlib.metadata.PackageNotFoundError:
        sys.exit("cgt cannot be built: cuda-bindings is not installed. Install it: pip install 'cuda-bindings>=13.0'.")
    return tuple(int(part) for part in version.split(".")[:2])


def fits(header, bindings):
    return header[0] == bindings[0] and bindings[1] - header[1] <= MINORS_AHEAD


def choose_header():
    """The first folder whose cuda.h fits the installed cuda-bindings, or the end of the build in a sentence."""
    bindings, folders = bindings_version(), header_folders()
    for folder in folders:
        if fits(header_version(folder), bindings):
            return folder
    wanted = "{}.{}".format(*bindings)
    wheels = f"pip install 'nvidia-cuda-runtime=={bindings[0]}.*' 'nvidia-cuda-profiler-api=={bindings[0]}.*'"
    if not folders:
        sys.exit(
            "cgt cannot be built: no folder with cuda.h and cudaProfiler.h was found, and the compiler needs them (a GPU "
            f"is not needed). Two ways to get them: {wheels}, which bring the headers alone; or install the CUDA "
            f"toolkit {bindings[0]} and set CUDA_HOME to its folder."
        )
    seen = ", ".join("CUDA {}.{} in {}".format(*header_version(folder), folder) for folder in folders)
    major, minor = header_version(folders[0])
    sys.exit(
        f"cgt cannot be built: cuda-bindings {wanted} does not compile against this cuda.h ({seen}). They must have the "
        f"same major version, and cuda-bindings may be at most {MINORS_AHEAD} minor versions ahead. Either install a "
        f"cuda.h that fits: {wheels}; or cuda-bindings that fit the header: pip install 'cuda-bindings=={major}.{minor}.*'."
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
        "cgt: {} build, torch {}, {} CUDA half, cuda.h {}.{} from {}".format(
            "debug" if DEBUG else "release", torch.__version__, "with" if WITH_CUDA else "without",
            *header_version(cuda_include), cuda_include,
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
            *(["-O1", "-g"] if DEBUG else ["-O2", "-g0", "-fno-plt"]),
            "-fvisibility=hidden",
            *(f"-isystem{path}" for path in [*include_paths(), str(cuda_include)]),
        ],
        libraries=["c10", "torch", "torch_cpu", "torch_python", *(["c10_cuda", "torch_cuda"] if WITH_CUDA else [])],
        library_dirs=[torch_lib],
        # The first path is this torch's; the second is right when cgt_core is installed beside another copy of torch.
        extra_link_args=[f"-Wl,-rpath,{torch_lib}", "-Wl,-rpath,$ORIGIN/torch/lib"],
    )


def build_folder():
    """One folder per kind of build, so that nothing stale is taken for fresh."""
    kind = "debug" if DEBUG else "release"
    return f"build/{kind}-{sys.implementation.cache_tag}-torch{torch.__version__}{'-cuda' if WITH_CUDA else ''}"


class build_ext_in_place(build_ext):
    """setuptools keeps the newer file when it copies the result beside the source. Going back from a debug build to an
    older release build that is still fresh must copy the older one."""

    def copy_extensions_to_source(self):
        compile_all, self.force = self.force, True
        super().copy_extensions_to_source()
        self.force = compile_all


os.chdir(HERE)
setup(
    ext_modules=cythonize(
        [make_extension()],
        # Keyed by what it was generated from: another Cython or other bindings generate other C++.
        build_dir="build/cython-{}-bindings{}.{}".format(Cython.__version__, *bindings_version()),
        include_path=[".", sysconfig.get_path("platlib"), sysconfig.get_path("purelib")],
        compiler_directives={
            "language_level": 3,
            "boundscheck": False,
            "wraparound": False,
            "cdivision": True,
            "binding": True,
            "embedsignature": False,
        },
    ),
    cmdclass={"build_ext": build_ext_in_place},
    options={"build": {"build_temp": f"{build_folder()}/obj", "build_lib": f"{build_folder()}/lib"}},
)
