// Which code starts, and which builtin functions it calls, while a function is observed: a profile function in C for
// each thread that there is, since one in Python makes the function several times slower. (Up to Python 3.11; then
// taps.py uses sys.monitoring.)
#pragma once
#include "tensor_shim.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <unordered_set>
#include <vector>

namespace cgt {

// The C function behind a builtin function or a method of a builtin class, bound or not; null: it is something else.
static inline void* method_of(PyObject* f) {
  if (PyCFunction_Check(f)) return reinterpret_cast<PyCFunctionObject*>(f)->m_ml;
  if (Py_IS_TYPE(f, &PyMethodDescr_Type) || Py_IS_TYPE(f, &PyClassMethodDescr_Type))
    return reinterpret_cast<PyMethodDescrObject*>(f)->d_method;
  return nullptr;
}

// Is this the namespace of a module of cgt's?
static inline bool is_ours(PyObject* globals) {
  PyObject* name = PyDict_GetItemString(globals, "__name__");
  const char* text = name && PyUnicode_Check(name) ? PyUnicode_AsUTF8(name) : nullptr;
  return text && !strncmp(text, "cgt", 3) && (text[3] == '.' || !text[3]);
}

// Does this thread's profiler hear of what runs here? Not of code of ours: the interpreter is much slower under one.
struct Heard {
  const bool on;
  explicit Heard(bool hears) : on(hears) { set(on); }
  ~Heard() { set(!on); }
  static void set([[maybe_unused]] bool on) {
#if PY_VERSION_HEX < 0x030C0000
    (on ? PyThreadState_LeaveTracing : PyThreadState_EnterTracing)(PyThreadState_Get());
#endif
  }
};

#if PY_VERSION_HEX < 0x030C0000
struct CallTap {
  std::unordered_set<void*> methods;  // those to tell of
  std::unordered_set<unsigned long> others;  // threads whose code is told apart
  std::unordered_set<void*> known[2];  // what is in the sets: to ask one of Python's costs a hash of the bytecode
  py::object started[2];  // sets of code objects, of the others in the second; None: not all were seen
  py::object called;      // called(function, frame) before one of them runs
};

static std::vector<CallTap*> call_taps;  // those under way, of several threads perhaps; under the GIL
static void* thread_start = nullptr;          // what starts a thread that no tap hears of

static int call_tell(CallTap* tap, PyFrameObject* frame, int what, PyObject* function) {
  int other = tap->others.count(PyThread_get_thread_ident()) ? 1 : 0;
  if (what == PyTrace_CALL) {
    PyObject* code = reinterpret_cast<PyObject*>(PyFrame_GetCode(frame));
    int failed = 0;
    if (tap->known[other].insert(code).second) {
      PyObject* globals = PyObject_GetAttrString(reinterpret_cast<PyObject*>(frame), "f_globals");
      failed = !globals || (!is_ours(globals) && PySet_Add(tap->started[other].ptr(), code) < 0) ? -1 : 0;
      Py_XDECREF(globals);
    }
    Py_DECREF(code);
    return failed;
  }
  void* method = method_of(function);
  if (!method) return 0;
  if (method == thread_start) return PySet_Add(tap->started[other].ptr(), Py_None);
  if (!tap->methods.count(method)) return 0;
  PyObject* done = PyObject_CallFunctionObjArgs(tap->called.ptr(), function, frame, nullptr);
  if (!done) PyErr_WriteUnraisable(tap->called.ptr());  // an exception would be the user's
  Py_XDECREF(done);
  return 0;
}

static int call_profile(PyObject*, PyFrameObject* frame, int what, PyObject* function) {
  if (what != PyTrace_CALL && what != PyTrace_C_CALL) return 0;
  for (size_t k = 0; k < call_taps.size(); ++k)  // by number: what is told may begin another
    if (call_tell(call_taps[k], frame, what, function) < 0) return -1;
  return 0;
}

// Have each thread profiled, or none any more; 0: somebody else's profiler is, or was, in the way of one of them.
static int call_profile_all(bool begins) {
  int all = 1;
  PyThreadState* thread = PyInterpreterState_ThreadHead(PyInterpreterState_Get());
  for (; thread; thread = PyThreadState_Next(thread)) {
    bool mine = thread->c_profilefunc == call_profile;
    if (begins ? thread->c_profilefunc && !mine : !mine) {
      all = 0;
    } else if (begins ? !mine : call_taps.empty()) {
      if (_PyEval_SetProfile(thread, begins ? call_profile : nullptr, nullptr) < 0) PyErr_Clear(), all = 0;
    }
  }
  return all;
}

// `methods`: numbers of method_of. `others`: threads whose code comes into `aside`. Returns a handle for call_tap_end.
static uint64_t call_tap_begin(PyObject* methods, PyObject* started, PyObject* called, PyObject* others,
                               PyObject* aside) {
  const auto borrow = [](PyObject* o) { return py::reinterpret_borrow<py::object>(o); };
  auto* tap = new CallTap{{}, {}, {}, {borrow(started), borrow(aside)}, borrow(called)};
  for (py::handle number : py::handle(methods)) tap->methods.insert(PyLong_AsVoidPtr(number.ptr()));
  for (py::handle number : py::handle(others)) tap->others.insert(PyLong_AsUnsignedLong(number.ptr()));
  if (!thread_start) thread_start = method_of(py::module_::import("_thread").attr("start_new_thread").ptr());
  call_taps.push_back(tap);
  if (!call_profile_all(true)) PySet_Add(started, Py_None);
  return reinterpret_cast<uint64_t>(tap);
}

static void call_tap_end(uint64_t handle) {
  auto* tap = reinterpret_cast<CallTap*>(handle);
  std::erase(call_taps, tap);
  if (!call_profile_all(false)) PySet_Add(tap->started[0].ptr(), Py_None);  // a thread that came since, too
  delete tap;
}

static int call_tap_count() { return static_cast<int>(call_taps.size()); }
#else
static uint64_t call_tap_begin(PyObject*, PyObject*, PyObject*, PyObject*, PyObject*) { return 0; }
static void call_tap_end(uint64_t) {}
static int call_tap_count() { return 0; }
#endif

}  // namespace cgt
