# The spine: imports, and one chapter per idea in the order of knowledge. Read cgt_core.pxd first.
#
# The core knows nobody above it: what it needs from Python arrives as an argument (on_miss, the
# unflattening of rare pytrees), as JAX hands `cache_miss` to its C++ half.

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.object cimport Py_EQ, Py_TPFLAGS_METHOD_DESCRIPTOR, PyObject, PyTypeObject
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_GET_SIZE, PyTuple_New, PyTuple_SET_ITEM
from cython.operator cimport dereference
from libc.stdint cimport int8_t, int32_t, int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy, memmove, memset, strstr
from libc.math cimport fabs, isfinite, pow, sqrt, trunc
from libcpp.string cimport string
from libcpp.unordered_map cimport unordered_map
from libcpp.utility cimport pair
from libcpp.vector cimport vector
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec
from posix.unistd cimport usleep
from cuda.bindings cimport cydriver as cu

import math
import operator
import sys
import types

include "cgt/core/shims.pxi"
include "cgt/core/driver.pxi"
include "cgt/core/cuda.pxi"
include "cgt/core/lanes.pxi"
include "cgt/core/host.pxi"
include "cgt/core/table.pxi"
include "cgt/core/leaves.pxi"
include "cgt/core/guard.pxi"
include "cgt/core/numbers.pxi"
include "cgt/core/places.pxi"
include "cgt/core/rng.pxi"
include "cgt/core/path.pxi"
include "cgt/core/autograd.pxi"
include "cgt/core/verdict.pxi"
include "cgt/core/segments.pxi"
include "cgt/core/replay.pxi"
include "cgt/core/record.pxi"
include "cgt/core/surface.pxi"
include "cgt/core/surface_observe.pxi"
include "cgt/core/surface_record.pxi"
include "cgt/core/surface_lanes.pxi"
include "cgt/core/surface_autograd.pxi"
include "cgt/core/surface_tensor.pxi"
include "cgt/core/surface_tools.pxi"
