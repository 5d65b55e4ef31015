// The host driver's tape: ATen calls with their arguments, walked without Python.
//
// A recording on the CPU keeps, per op, the operator and its boxed arguments. Tensor arguments are
// twins (tensor_shim.h) of the recorded ones, so that the tape owns the memory but none of the
// user's tensors. A launch calls the ops in order: `out=` variants and in-place ops write the
// recorded memory themselves; for the rest the result is copied into it.
#pragma once
#include <ATen/ScalarOps.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>

#include <vector>

#include "tensor_shim.h"

namespace cgt {

struct TapeOp {
  c10::OperatorHandle op;
  std::vector<c10::IValue> args;
  std::vector<at::Tensor> into;  // where results are copied; empty if the op writes in place
};

struct TapeCopy {  // a copied slot: `nbytes` from today's input into the tape's own buffer
  void* to;
  const void* from;
  int64_t nbytes;
};

struct Tape {
  std::vector<TapeCopy> copies;
  std::vector<TapeOp> ops;
};

struct PyGenerator {  // mirror of THPGenerator
  PyObject_HEAD
  at::Generator cdata;
};

static void* generator_impl(PyObject* g) {
  return reinterpret_cast<PyGenerator*>(g)->cdata.unsafeGetGeneratorImpl();
}

static at::Tensor twin_of(PyObject* o) {
  return at::Tensor(impl_of(o)->shallow_copy_and_detach(c10::VariableVersion(0), false));
}

static c10::Scalar scalar_of(PyObject* o) {
  if (PyBool_Check(o)) return c10::Scalar(o == Py_True);
  if (PyLong_Check(o)) return c10::Scalar(static_cast<int64_t>(PyLong_AsLongLong(o)));
  if (PyFloat_Check(o)) return c10::Scalar(PyFloat_AS_DOUBLE(o));
  if (PyComplex_Check(o))
    return c10::Scalar(c10::complex<double>(PyComplex_RealAsDouble(o), PyComplex_ImagAsDouble(o)));
  throw std::runtime_error(std::string("not a number: ") + Py_TYPE(o)->tp_name);
}

static c10::IValue value_of(PyObject* o, const c10::Type& type) {
  using K = c10::TypeKind;
  if (type.kind() == K::OptionalType) {
    if (o == Py_None) return c10::IValue();
    return value_of(o, *type.castRaw<c10::OptionalType>()->getElementType());
  }
  switch (type.kind()) {
    case K::TensorType: {
      if (o == Py_None) return c10::IValue(at::Tensor());
      if (!PyFloat_Check(o) && !PyLong_Check(o) && !PyComplex_Check(o))
        return c10::IValue(twin_of(o));
      // `x * 2.0`: the mode is shown the number; the op wants the wrapped tensor it came from.
      at::Tensor number = c10::scalar_to_tensor(scalar_of(o));
      number.unsafeGetTensorImpl()->set_wrapped_number(true);
      return c10::IValue(number);
    }
    case K::IntType:
    case K::SymIntType:
      return c10::IValue(static_cast<int64_t>(PyLong_AsLongLong(o)));
    case K::FloatType:
    case K::SymFloatType:
      return c10::IValue(PyFloat_AsDouble(o));
    case K::BoolType:
    case K::SymBoolType:
      return c10::IValue(PyObject_IsTrue(o) == 1);
    case K::NumberType:
      return c10::IValue(scalar_of(o));
    case K::StringType:
      return c10::IValue(std::string(PyUnicode_AsUTF8(o)));
    case K::DeviceObjType:
      return c10::IValue(c10::Device(std::string(PyUnicode_AsUTF8(o))));
    case K::GeneratorType:
      return c10::IValue(reinterpret_cast<PyGenerator*>(o)->cdata);
    case K::ListType: {
      const c10::TypePtr& of = type.castRaw<c10::ListType>()->getElementType();
      c10::impl::GenericList list(of->kind() == K::SymIntType ? c10::IntType::get() : of);
      if (PyList_Check(o) || PyTuple_Check(o)) {
        Py_ssize_t n = PySequence_Fast_GET_SIZE(o);
        for (Py_ssize_t k = 0; k < n; ++k)
          list.push_back(value_of(PySequence_Fast_GET_ITEM(o, k), *of));
      } else {
        list.push_back(value_of(o, *of));
      }
      return c10::IValue(std::move(list));
    }
    default:
      throw std::runtime_error("no tape form for an argument of type " + type.str());
  }
}

static void* tape_new() { return new Tape(); }
static void tape_free(void* t) { delete static_cast<Tape*>(t); }
static int tape_length(void* t) { return static_cast<int>(static_cast<Tape*>(t)->ops.size()); }

static int tape_copy(void* t, void* to, const void* from, int64_t nbytes) {
  auto& c = static_cast<Tape*>(t)->copies;
  c.push_back({to, from, nbytes});
  return static_cast<int>(c.size()) - 1;
}

static inline void tape_patch_copy(void* t, int k, const void* from) noexcept {
  static_cast<Tape*>(t)->copies[k].from = from;
}

// Append one op. `args` is a tuple in schema order, `kwargs` a dict, `into` a tuple of tensors.
// Returns -1 with an exception set if an argument has no boxed form.
static int tape_add(void* t, const char* name, const char* overload, PyObject* args,
                    PyObject* kwargs, PyObject* into) noexcept {
  try {
    auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
    const auto& wanted = op.schema().arguments();
    TapeOp row{op, {}, {}};
    row.args.reserve(wanted.size());
    Py_ssize_t given = PyTuple_GET_SIZE(args);
    for (size_t k = 0; k < wanted.size(); ++k) {
      PyObject* o = nullptr;
      if (static_cast<Py_ssize_t>(k) < given && !wanted[k].kwarg_only())
        o = PyTuple_GET_ITEM(args, k);
      else
        o = PyDict_GetItemString(kwargs, wanted[k].name().c_str());
      if (o)
        row.args.push_back(value_of(o, *wanted[k].type()));
      else if (wanted[k].default_value())
        row.args.push_back(*wanted[k].default_value());
      else
        row.args.push_back(c10::IValue());
    }
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(into); ++k)
      row.into.push_back(twin_of(PyTuple_GET_ITEM(into, k)));
    if (PyErr_Occurred()) return -1;
    static_cast<Tape*>(t)->ops.push_back(std::move(row));
    return 0;
  } catch (const std::exception& e) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, e.what());
    return -1;
  }
}

enum TapeError { TAPE_RAN, TAPE_RUNTIME, TAPE_INDEX, TAPE_VALUE, TAPE_TYPE, TAPE_ABSENT };

// Run the tape. Called without the GIL. What an op throws is returned as text in `error`, and its
// kind, so that the caller raises what eager would have raised.
static int tape_run(void* t, std::string* error) noexcept {
  try {
    // The tape was recorded below autograd and autocast; it runs there too.
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
    Tape* tape = static_cast<Tape*>(t);
    for (const auto& c : tape->copies)
      if (c.nbytes) memcpy(c.to, c.from, static_cast<size_t>(c.nbytes));
    std::vector<c10::IValue> stack;  // one for the run; an op may run another tape
    for (const auto& row : tape->ops) {
      stack.assign(row.args.begin(), row.args.end());
      row.op.callBoxed(&stack);
      size_t k = 0;
      for (const auto& value : stack) {
        if (k == row.into.size()) break;
        if (value.isTensor()) {
          row.into[k++].copy_(value.toTensor());
        } else if (value.isTensorList()) {
          for (const at::Tensor& one : value.toTensorVector()) row.into[k++].copy_(one);
        }
      }
    }
    return TAPE_RAN;
  } catch (const c10::IndexError& e) {
    *error = e.what_without_backtrace();
    return TAPE_INDEX;
  } catch (const c10::ValueError& e) {
    *error = e.what_without_backtrace();
    return TAPE_VALUE;
  } catch (const c10::TypeError& e) {
    *error = e.what_without_backtrace();
    return TAPE_TYPE;
  } catch (const c10::NotImplementedError& e) {
    *error = e.what_without_backtrace();
    return TAPE_ABSENT;
  } catch (const c10::Error& e) {
    *error = e.what_without_backtrace();
    return TAPE_RUNTIME;
  } catch (const std::exception& e) {
    *error = e.what();
    return TAPE_RUNTIME;
  }
}

}  // namespace cgt
