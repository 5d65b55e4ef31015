"""The CUDA half against the headers of the torch that is installed: a machine without a GPU compiles
it too, so that a release that moves an allocator's or a generator's parts is noticed at once."""

import importlib.util
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch  # before the core, whose libraries are torch's

# isort: split
import cgt_core as core
import pytest
from torch.utils.cpp_extension import include_paths

ROOT = Path(__file__).resolve().parents[2]


def toolkit():
    """Folders with CUDA's headers: a toolkit's, or those of the nvidia wheels in requirements.txt."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(p) for p in spec.submodule_search_locations] if spec else []
    folders = [p for root in roots for p in sorted(root.glob("*/include"))]
    folders += [Path("/usr/local/cuda/include")]
    return [p for p in folders if (p / "cuda_runtime.h").exists() and (p / "crt").is_dir()]


@pytest.mark.skipif(torch.version.cuda is not None, reason="built whole here")
@pytest.mark.skipif(core.debug_build(), reason="does not depend on the build: the release suite does it")
def test_cuda_half_compiles_against_this_torch(tmp_path):
    compiler, folders = shutil.which("g++") or shutil.which("c++"), toolkit()
    if not compiler or not folders:
        pytest.skip("no compiler, or no CUDA headers beside it")
    # The CPU wheel has all headers but this one, which the build of a CUDA torch writes.
    made = tmp_path / "c10" / "cuda" / "impl" / "cuda_cmake_macros.h"
    made.parent.mkdir(parents=True)
    made.write_text("#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n")
    (tmp_path / "half.cpp").write_text('#include <Python.h>\n#include "cuda_shim.h"\n')
    minor = torch.__version__.split(".")[1]
    includes = [
        tmp_path,
        *include_paths(),
        *folders,
        sysconfig.get_paths()["include"],
        ROOT / "cgt/core",
    ]
    done = subprocess.run(
        [compiler, "-std=c++20", "-fsyntax-only", "-DCGT_WITH_CUDA=1", f"-DCGT_TORCH_MINOR={minor}",
         *(f"-I{p}" for p in includes), str(tmp_path / "half.cpp")],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
