// Which code starts in a thread, and which builtin functions it calls, while a function is observed: a profile function
// in C, since one in Python makes the function several times slower. (Up to Python 3.11; then private.py uses
// sys.monitoring, which sees all threads.)
#pragma once
#include <Python.h>

#include <unordered_set>

namespace cgt {

// The C function behind a builtin function or a method of a builtin class, bound or not; null: it is something else.
static inline void* method_of(PyObject* f) {
  if (PyCFunction_Check(f)) return reinterpret_cast<PyCFunctionObject*>(f)->m_ml;
  if (Py_IS_TYPE(f, &PyMethodDescr_Type) || Py_IS_TYPE(f, &PyClassMethodDescr_Type))
    return reinterpret_cast<PyMethodDescrObject*>(f)->d_method;
  return nullptr;
}

struct CallWatch {
  std::unordered_set<void*> methods;  // those to tell of
  std::unordered_set<void*> known;    // what is in `started`: to ask a set of Python's costs a hash of the bytecode
  PyObject* started;                  // owned: a set of code objects
  PyObject* called;                   // owned: called(function, frame) before one of them runs
};

static const char* const CALL_WATCH = "cgt.CallWatch";

static void call_watch_free(PyObject* capsule) {
  auto* watch = static_cast<CallWatch*>(PyCapsule_GetPointer(capsule, CALL_WATCH));
  Py_DECREF(watch->started);
  Py_DECREF(watch->called);
  delete watch;
}

static int call_profile(PyObject* capsule, PyFrameObject* frame, int what, PyObject* function) {
  if (what != PyTrace_CALL && what != PyTrace_C_CALL) return 0;
  auto* watch = static_cast<CallWatch*>(PyCapsule_GetPointer(capsule, CALL_WATCH));
  if (what == PyTrace_CALL) {
    PyObject* code = reinterpret_cast<PyObject*>(PyFrame_GetCode(frame));
    int failed = watch->known.insert(code).second ? PySet_Add(watch->started, code) : 0;
    Py_DECREF(code);
    return failed;
  }
  void* method = method_of(function);
  if (!method || !watch->methods.count(method)) return 0;
  PyObject* done = PyObject_CallFunctionObjArgs(watch->called, function, frame, nullptr);
  if (!done) PyErr_WriteUnraisable(watch->called);  // an exception would be the user's
  Py_XDECREF(done);
  return 0;
}

// In this thread; `methods`: numbers of method_of.
static int call_watch_begin(PyObject* methods, PyObject* started, PyObject* called) {
  auto* watch = new CallWatch{{}, {}, Py_NewRef(started), Py_NewRef(called)};
  PyObject* capsule = PyCapsule_New(watch, CALL_WATCH, call_watch_free);
  PyObject* numbers = PyObject_GetIter(methods);
  while (PyObject* number = PyIter_Next(numbers)) {
    watch->methods.insert(PyLong_AsVoidPtr(number));
    Py_DECREF(number);
  }
  Py_DECREF(numbers);
  PyEval_SetProfile(call_profile, capsule);
  Py_DECREF(capsule);
  return PyErr_Occurred() ? -1 : 0;
}

static void call_watch_end() { PyEval_SetProfile(nullptr, nullptr); }

}  // namespace cgt
