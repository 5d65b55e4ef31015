// What no dispatch mode sees: code of PyTorch's that reads values where no mode is, or by pointer. The profiler's
// callbacks come before every operator, also there.
#pragma once
#include <ATen/record_function.h>
#include <Python.h>

#include <memory>
#include <string>
#include <string_view>
#include <unordered_set>

namespace cgt {

static PyObject* on_read = nullptr;  // owned: called with the name of such an operator
static std::unordered_set<std::string> reads;

static std::unique_ptr<at::ObserverContext> read_begins(const at::RecordFunction& op) {
  auto name = op.operator_name();
  if (!name) return nullptr;
  std::string full = name->overload_name.empty() ? name->name : name->name + "." + name->overload_name;
  if (!reads.count(full)) return nullptr;
  PyGILState_STATE gil = PyGILState_Ensure();
  PyObject* done = PyObject_CallFunction(on_read, "s", full.c_str());
  if (!done) PyErr_WriteUnraisable(on_read);  // an exception could not pass through here
  Py_XDECREF(done);
  PyGILState_Release(gil);
  return nullptr;
}

static void watch_read_of(const char* name) { reads.insert(name); }

static void watch_by(PyObject* function) {
  Py_XINCREF(function);
  std::swap(on_read, function);
  Py_XDECREF(function);
}

// In this thread, and in autograd's when they work for it.
static uint64_t watch_begin() {
  return at::addThreadLocalCallback(
      at::RecordFunctionCallback(read_begins).scopes({at::RecordScope::FUNCTION}));
}

static void watch_end(uint64_t handle) { at::removeCallback(handle); }

}  // namespace cgt
