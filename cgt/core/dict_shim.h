// "Has this dict changed since?" in a load and a compare.
//
// Up to Python 3.11 every dict carries a version tag that no two states of any dict share. From 3.12
// on a dict watcher tells: any change of any watched dict moves one counter, and the places are
// then compared again. Module globals change all the time (every loop variable of a script), so
// they are not watched there, but for torch's: their few guarded names are compared at each call instead.
#pragma once
#include <Python.h>
#include <cstdint>
#include <cstring>

namespace cgt {

static inline PyObject* type_lookup(PyObject* type, PyObject* name) {  // borrowed; no descriptors run
  return _PyType_Lookup(reinterpret_cast<PyTypeObject*>(type), name);
}

#if PY_VERSION_HEX >= 0x030C0000
static uint64_t dict_epoch = 1;
static int dict_changed(PyDict_WatchEvent, PyObject*, PyObject*, PyObject*) {
  ++dict_epoch;
  return 0;
}
static int dict_watcher = -1;
static inline int dict_watch_start() {
  if (dict_watcher < 0) dict_watcher = PyDict_AddWatcher(dict_changed);
  if (dict_watcher < 0) PyErr_Clear();  // all eight taken: every place is compared at each call
  return dict_watcher >= 0;
}
static inline int is_of_torch(PyObject* d) {
  PyObject* name = PyDict_GetItemString(d, "__name__");
  const char* text = name && PyUnicode_Check(name) ? PyUnicode_AsUTF8(name) : nullptr;
  return text && (!strcmp(text, "torch") || !strncmp(text, "torch.", 6));
}
static inline int dict_watch(PyObject* d) {
  if (dict_watcher < 0 || (PyDict_GetItemString(d, "__builtins__") && !is_of_torch(d))) return 0;
  if (PyDict_Watch(dict_watcher, d) < 0) {
    PyErr_Clear();
    return 0;
  }
  return 1;
}
static inline uint64_t dict_tag(PyObject*) noexcept { return dict_epoch; }
#else
static inline int dict_watch_start() { return 1; }
static inline int dict_watch(PyObject*) { return 1; }
static inline uint64_t dict_tag(PyObject* d) noexcept {
  return reinterpret_cast<PyDictObject*>(d)->ma_version_tag;
}
#endif

}  // namespace cgt
