// "Has this dict changed since?" in a load and a compare.
//
// Up to Python 3.11 every dict carries a version tag that no two states of any dict share. From 3.12 on a dict watcher
// tells: a change of any watched dict moves one counter, and the places are then compared again. Globals of modules
// change all the time (every loop variable of a script), so of those it counts only what some place names.
#pragma once
#include <Python.h>
#include <cstdint>
#include <cstring>
#include <unordered_map>
#include <unordered_set>

namespace cgt {

static inline PyObject* type_lookup(PyObject* type, PyObject* name) {  // borrowed; no descriptors run
  return _PyType_Lookup(reinterpret_cast<PyTypeObject*>(type), name);
}

// Which part of a function this attribute is, or 0: to be read without asking it.
static inline int function_part(PyObject* home, PyObject* key) {
  if (!PyFunction_Check(home)) return 0;
  static const char* const parts[] = {"__code__", "__defaults__", "__kwdefaults__"};
  for (int k = 0; k < 3; ++k)
    if (PyUnicode_CompareWithASCIIString(key, parts[k]) == 0) return k + 1;
  return 0;
}
static inline PyObject* function_get(PyObject* function, int part) noexcept {  // borrowed
  auto* f = reinterpret_cast<PyFunctionObject*>(function);
  return part == 1 ? f->func_code : part == 2 ? f->func_defaults : f->func_kwdefaults;
}

#if PY_VERSION_HEX >= 0x030C0000
static uint64_t dict_epoch = 1;
static int dict_watcher = -1;
struct DictNames {
  bool all;  // any name counts
  std::unordered_set<Py_hash_t> hashes;
};
// Globals of modules -> the names that count. They stay: names are few, and modules live long.
static std::unordered_map<PyObject*, DictNames> dict_names;
static int dict_changed(PyDict_WatchEvent event, PyObject* d, PyObject* key, PyObject*) {
  bool one = event == PyDict_EVENT_ADDED || event == PyDict_EVENT_MODIFIED || event == PyDict_EVENT_DELETED;
  if (event == PyDict_EVENT_DEALLOCATED) {
    dict_names.erase(d);
  } else if (one && key && PyUnicode_CheckExact(key)) {
    auto names = dict_names.find(d);
    if (names != dict_names.end() && !names->second.all && !names->second.hashes.count(PyObject_Hash(key))) return 0;
  }
  ++dict_epoch;
  return 0;
}
static inline int dict_watch_start() {
  // Python 3.13.0 does not tell of attributes (github.com/python/cpython/issues/125608).
  const bool tells = Py_Version >> 8 != 0x030D00;
  if (dict_watcher < 0 && tells) dict_watcher = PyDict_AddWatcher(dict_changed);
  if (dict_watcher < 0) PyErr_Clear();  // or all eight are taken: every place is compared at each call
  return dict_watcher >= 0;
}
static inline int dict_watch(PyObject* d) {
  if (dict_watcher < 0 || PyDict_Watch(dict_watcher, d) < 0) {
    PyErr_Clear();
    return 0;
  }
  if (PyDict_GetItemString(d, "__builtins__")) dict_names[d];
  return 1;
}
// A place of a watched dict; no key: any change of it counts.
static inline void dict_guard(PyObject* d, PyObject* key) {
  auto names = dict_names.find(d);
  if (names == dict_names.end()) return;
  if (key && PyUnicode_CheckExact(key)) {
    names->second.hashes.insert(PyObject_Hash(key));
  } else {
    names->second.all = true;
  }
}
static inline uint64_t dict_tag(PyObject*) noexcept { return dict_epoch; }
#else
static const uint64_t dict_epoch = 0;  // there is none
static inline int dict_watch_start() { return 1; }
static inline int dict_watch(PyObject*) { return 1; }
static inline void dict_guard(PyObject*, PyObject*) {}
static inline uint64_t dict_tag(PyObject* d) noexcept {
  return reinterpret_cast<PyDictObject*>(d)->ma_version_tag;
}
#endif

}  // namespace cgt
