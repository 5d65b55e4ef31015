// How a run of the user's function is observed, without PyTorch noticing: a dispatch mode would be noticed
// (isTensorSubclassLike() is true under any, and composite ops and backwards then go other ways than in eager).
//
// The dispatch key Fake is nobody's: no op has a kernel there and no tensor has the key. A boxed fallback of ours
// stands at it, below autograd, and a thread comes by it only while the key is among those that the thread includes.
// Autograd's threads inherit that, and with it what the thread's Python objects say: whose run it is.
#pragma once
#include "autograd_shim.h"
#include "calls_shim.h"

#include <ATen/ThreadLocalPythonObjects.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <unordered_set>

// libtorch_python's own; declared here because their headers are the expensive ones.
namespace torch::detail {
__attribute__((visibility("default"))) pybind11::handle getTorchApiFunction(const c10::OperatorHandle& op);
}
__attribute__((visibility("default"))) c10::impl::PyInterpreter* getPyInterpreter();

namespace cgt {

using Stack = std::vector<c10::IValue>;
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// What ops of a run returned, in order.
using Results = std::vector<WeakTensor>;
static PyObject* results_new() { return handle_new(Results()); }

// A weak reference is one too many where tensors are swapped.
static void results_forget(PyObject* handle) { inside<Results>(handle).clear(); }

// Those that somebody still holds: a new list.
static PyObject* results_alive(PyObject* handle) {
  py::list alive;
  auto& results = inside<Results>(handle);
  std::erase_if(results, [](const WeakTensor& t) { return t.expired(); });
  for (size_t k = 0; k < results.size(); ++k) {  // by number: a finalizer may come in between, whose ops are seen
    at::Tensor t(results[k].lock());
    if (t.defined()) alive.append(owned(THPVariable_Wrap(t)));
  }
  return alive.release().ptr();
}

// --- whose run it is --------------------------------------------------------------------------------------------

static constexpr const char* OBSERVER = "cgt.observer";  // a tuple: (results, see)
static thread_local int paused = 0;  // something of PyTorch's that is no part of the function runs

static int observe_paused() noexcept { return paused; }

static PyObject* observer_of_thread() {  // borrowed, or NULL
  if (!at::impl::ThreadLocalPythonObjects::contains(OBSERVER)) return nullptr;
  const auto& pair = at::impl::ThreadLocalPythonObjects::get(OBSERVER);
  return pair ? pair->ptr(getPyInterpreter()) : nullptr;
}

static void observer_set(PyObject* pair) {  // NULL: nobody
  std::shared_ptr<c10::SafePyObject> owned;
  if (pair) owned = std::make_shared<c10::SafePyObject>(Py_NewRef(pair), getPyInterpreter());
  at::impl::ThreadLocalPythonObjects::set(OBSERVER, std::move(owned));
}

static void observe_pause(int by) noexcept { paused += by; }

// Does the calling thread come by? Returns what it was.
static int observe_key(int on) noexcept {
  bool was = c10::impl::tls_is_dispatch_key_included(OBSERVED);
  c10::impl::tls_set_dispatch_key_included(OBSERVED, on);
  return was;
}

// For an op that a dispatch mode of ours caught: keys above the mode's are excluded where it runs.
static int observe_shown(int shown) noexcept {
  bool was = !c10::impl::tls_is_dispatch_key_excluded(OBSERVED);
  c10::impl::tls_set_dispatch_key_excluded(OBSERVED, !shown);
  return was;
}

// --- one op -------------------------------------------------------------------------------------------------------

struct OpNumber {  // an argument that is one of live.py's numbers
  int arg, part;    // which, and which element of that list, or -1
  PyObject* node;   // owned
};

struct Call {
  const c10::OperatorHandle& op;
  c10::DispatchKeySet below;
  Stack* stack;
  c10::impl::LocalDispatchKeySet thread = c10::impl::tls_local_dispatch_key_set();
  std::vector<c10::TensorImpl*> lone{};                    // arguments that Python did not know
  std::vector<std::pair<at::Tensor, at::Tensor>> given{};  // what the op was given, and what it got instead
  std::exception_ptr error{};                            // what the op threw, if that is not Python's
  std::vector<OpNumber> numbers{};
  bool handed_down = false;  // to an op on what is inside its arguments
  ~Call() {
    if (numbers.empty()) return;
    Gil gil;
    for (const OpNumber& one : numbers) Py_DECREF(one.node);
  }
};
static thread_local Call* call_now = nullptr;

// Would ops of the host's that the op under way runs be changed by autocast?
static int observe_casts() noexcept {
  return call_now && !call_now->thread.excluded_.has(c10::DispatchKey::AutocastCPU);
}

// A tensor over the memory of `given` that is to it what t is to `instead`; given itself if t is that.
static at::Tensor give_back(const at::Tensor& t, const at::Tensor& given, const at::Tensor& instead) {
  if (t.is_same(instead)) return given;
  c10::TensorImpl *to = given.unsafeGetTensorImpl(), *of = t.unsafeGetTensorImpl();
  int64_t shift = data_of(of) - data_of(instead.unsafeGetTensorImpl());
  int64_t at = to->storage_offset() * static_cast<int64_t>(to->itemsize()) + shift;
  c10::intrusive_ptr<c10::TensorImpl> made = of->shallow_copy_and_detach(to->version_counter(), true);
  made->set_storage_keep_dtype(to->storage());
  made->set_storage_offset(at / static_cast<int64_t>(of->itemsize()));
  return at::Tensor(std::move(made));
}

// An op's arguments or results, which are the last of the stack.
using Values = std::span<c10::IValue>;
static Values top(Stack& stack, size_t n) { return {stack.data() + stack.size() - n, n}; }
static Values arguments(const Call& call) { return top(*call.stack, call.op.schema().arguments().size()); }
static Values returned(const Call& call) { return top(*call.stack, call.op.schema().returns().size()); }

// Run the op, with these tensors in place of those among its arguments (None: as they are). A list of what it
// returned: tensors over the same memory, since a Python object would tie the very ones down (a Parameter or a
// subclass that is made of one wants to be its first).
static PyObject* observe_proceed(PyObject* instead) {
  Call& call = *call_now;
  try {
    if (instead != Py_None) {
      Py_ssize_t k = 0;
      for (c10::IValue& value : arguments(call)) {
        each_tensor(value, [&](at::Tensor t) {
          if (t.unsafeGetTensorImpl()->is_wrapped_number()) return t;  // a number, to Python
          TORCH_INTERNAL_ASSERT(k < PyList_GET_SIZE(instead));
          const at::Tensor& other = tensor_of(PyList_GET_ITEM(instead, k++));
          if (!other.is_same(t)) call.given.emplace_back(t, other);
          return other;
        });
      }
      TORCH_INTERNAL_ASSERT(k == PyList_GET_SIZE(instead));
    }
    {
      Heard heard(true);
      py::gil_scoped_release no_gil;
      c10::impl::ForceDispatchKeyGuard as_called(call.thread);
      c10::impl::ExcludeDispatchKeyGuard unseen(OBSERVED);
      call.op.redispatchBoxed(call.below, call.stack);
    }
    auto& results = inside<Results>(PyTuple_GET_ITEM(observer_of_thread(), 0));
    py::list made;
    for (c10::IValue& value : returned(call)) {
      each_tensor(value, [&](at::Tensor t) {
        for (const auto& [given, other] : call.given) {
          if (!t.has_storage() || !other.is_alias_of(t)) continue;
          t = give_back(t, given, other);
          break;
        }
        results.emplace_back(t.getIntrusivePtr());
        bool plain = !t.key_set().has(c10::DispatchKey::Python);
        made.append(owned(THPVariable_Wrap(
            plain ? at::Tensor(t.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), false)) : t)));
        return t;
      });
    }
    return made.release().ptr();
  } catch (python_error&) {
    throw;
  } catch (py::error_already_set&) {
    throw;
  } catch (...) {
    call.error = std::current_exception();
    throw;
  }
}

// An op that is only made of others is no op to us, but where autograd's keys do not take it apart (inference mode).
static bool is_composite(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
         !op.hasKernelForDispatchKey(c10::DispatchKey::CPU) && !op.hasKernelForDispatchKey(c10::DispatchKey::CUDA);
}

// Is this op not for us? Where PyTorch lets no mode look it makes tensors of Python's numbers.
static bool passes(const c10::OperatorHandle& op) {
  return paused || !observer_of_thread() || is_composite(op) ||
         c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python);
}

// Is this argument a number of the host's that Python does not know? TorchScript makes such of Python's.
static bool is_lone(const c10::IValue& value) {
  if (!value.isTensor() || !value.toTensor().defined()) return false;
  const at::Tensor& t = value.toTensor();
  return t.is_cpu() && !t.dim() && !t.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj() && t.storage().use_count() == 1;
}
static int observe_lone(PyObject* t) noexcept {
  return call_now && std::count(call_now->lone.begin(), call_now->lone.end(), impl_of(t)) ? 1 : 0;
}

// Call the op under way with another list of tensors (None: none) as argument k.
static void observe_list(int k, PyObject* tensors) noexcept {
  c10::List<std::optional<at::Tensor>> list;
  for (Py_ssize_t j = 0; j < PyList_GET_SIZE(tensors); ++j) {
    PyObject* one = PyList_GET_ITEM(tensors, j);
    list.push_back(one == Py_None ? std::nullopt : std::optional<at::Tensor>(tensor_of(one)));
  }
  arguments(*call_now)[static_cast<size_t>(k)] = c10::IValue(std::move(list));
}

// What the op under way is to return, in place of the tensors that it returned.
static void observe_answer(PyObject* results) noexcept {
  auto& told = inside<Results>(PyTuple_GET_ITEM(observer_of_thread(), 0));
  Py_ssize_t k = 0;
  for (c10::IValue& value : returned(*call_now)) {
    each_tensor(value, [&](at::Tensor) {
      at::Tensor t = tensor_of(PyList_GET_ITEM(results, k++));
      told.emplace_back(t.getIntrusivePtr());
      return t;
    });
  }
}

// The op under way was done in another way, and returns these tensors.
static void observe_done(PyObject* results) noexcept {
  Stack& stack = *call_now->stack;
  auto& told = inside<Results>(PyTuple_GET_ITEM(observer_of_thread(), 0));
  stack.resize(stack.size() - call_now->op.schema().arguments().size());
  for (Py_ssize_t k = 0; k < PyList_GET_SIZE(results); ++k) {
    stack.emplace_back(tensor_of(PyList_GET_ITEM(results, k)));
    told.emplace_back(stack.back().toTensor().getIntrusivePtr());
  }
}

// What body() runs, in front of the op under way, is seen as that op was.
static PyObject* observe_before(PyObject* body) {
  Call* call = std::exchange(call_now, nullptr);
  PyObject* result;
  {
    c10::impl::ForceDispatchKeyGuard as_called(call->thread);
    result = PyObject_CallNoArgs(body);
  }
  call_now = call;
  if (!result) throw_python();
  return result;
}

static bool is_default(const c10::Argument& wanted, const c10::IValue& value) {
  return wanted.default_value() && !value.isTensor() && *wanted.default_value() == value;
}

static thread_local PyObject* told_error = nullptr;  // owned: what Python raised where no exception could pass (`tell`)

// Raise it, now that one can.
static void observe_told() {
  if (!told_error) return;
  PyObject* error = std::exchange(told_error, nullptr);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
  Py_DECREF(error);
  throw_python();
}

// --- numbers that are live (live.py) --------------------------------------------------------------------------------
// PyTorch carries them as symbols, and to where it wants a tensor as a tensor without a value, whose Python object
// knows the symbol. Kernels get the number.

static PyObject* number_node = nullptr;         // the class of live.py's nodes
static std::unordered_set<const void*> number_runs;     // runs that have any; the GIL guards it
static std::atomic<bool> numbers_watched{false};        // is there one?
static void numbers_are(PyObject* node) { number_node = Py_NewRef(node); }
// As often as it likes: what an interrupt cuts short is done again.
static void numbers_watch(const void* run, bool on) {
  on ? (void)number_runs.insert(run) : (void)number_runs.erase(run);
  numbers_watched = !number_runs.empty();
}

// The node behind a symbol, owned; NULL: it is not one of ours. Past the stand-in's __getattribute__, which hides from
// code of the user's what numbers do not have, and would hide it here in that code's name.
static PyObject* node_of(PyObject* symbol) {
  static PyObject* name = PyUnicode_InternFromString("node");
  PyObject* node = symbol ? PyObject_GenericGetAttr(symbol, name) : nullptr;
  if (!node && PyErr_Occurred()) {
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw_python();
    PyErr_Clear();
  }
  if (node && reinterpret_cast<PyObject*>(Py_TYPE(node)) != number_node) Py_CLEAR(node);
  return node;
}

static c10::IValue number_of(PyObject* node) {
  py::object value = owned(PyObject_GetAttrString(node, "value"));
  return PyFloat_Check(value.ptr()) ? c10::IValue(PyFloat_AS_DOUBLE(value.ptr()))
                                    : c10::IValue(static_cast<int64_t>(PyLong_AsLongLong(value.ptr())));
}

static void plain_number(c10::IValue& value, int arg, int part, std::vector<OpNumber>& found) {
  if (value.isSymInt() || value.isSymFloat()) {
    py::object symbol = torch::jit::toPyObject(value);
    PyObject* node = node_of(symbol.ptr());
    if (!node) return;
    value = number_of(node);
    found.push_back({arg, part, node});
  } else if (value.isTensor() && value.toTensor().defined() &&
             value.toTensor().unsafeGetTensorImpl()->is_wrapped_number()) {
    const at::Tensor& t = value.toTensor();
    if (!t.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj()) return;
    py::object wrapped = py::reinterpret_steal<py::object>(THPVariable_Wrap(t));
    py::object symbol = py::getattr(wrapped, "_wrapped_number", py::none());
    PyObject* node = symbol.is_none() ? nullptr : node_of(symbol.ptr());
    if (!node) return;
    // autograd may have saved t, which tells the symbol in a backward, too
    at::Tensor plain = c10::scalar_to_tensor(number_of(node).toScalar());
    memcpy(t.mutable_data_ptr(), plain.const_data_ptr(), plain.nbytes());
    plain.unsafeGetTensorImpl()->set_wrapped_number(true);
    value = std::move(plain);
    found.push_back({arg, part, node});
  } else if (part < 0 && value.isList()) {
    c10::List<c10::IValue> list = value.toList();
    for (size_t k = 0; k < list.size(); ++k) {
      c10::IValue one = list.get(k);
      if (!one.isSymInt() && !one.isSymFloat()) continue;
      plain_number(one, arg, static_cast<int>(k), found);
      list.set(k, one);
    }
  }
}

// [(argument, element or -1, node), ...] of the op under way.
static PyObject* observe_numbers() {
  py::list list;
  for (const OpNumber& one : call_now->numbers) list.append(py::make_tuple(one.arg, one.part, py::handle(one.node)));
  return list.release().ptr();
}

static void plain_numbers(Call& call) {
  Gil gil;
  int k = 0;
  for (c10::IValue& value : arguments(call)) plain_number(value, k++, -1, call.numbers);
}

// Where no run sees the op, the recording is for these numbers alone.
static void settle_numbers(Call& call) {
  Gil gil;
  for (const OpNumber& one : call.numbers) owned(PyObject_CallMethod(one.node, "plain", nullptr));
}

// Is one of these, or of a list among them, a tensor whose class runs Python for an op?
static bool has_wrapper(const c10::IValue& value) {
  if (value.isTensor())
    return value.toTensor().defined() && value.toTensor().unsafeGetTensorImpl()->is_python_dispatch();
  if (!value.isList()) return false;
  c10::ArrayRef<c10::IValue> list = value.toListRef();
  return std::any_of(list.begin(), list.end(), has_wrapper);
}

// Are all such of torch's own classes (DTensor)? Those look at what kind of number they are given, and hand it on as it
// is. A user's may compute with it, and gets what is followed where that goes.
static bool has_own_wrapper(const c10::IValue& value) {
  if (value.isList()) {
    c10::ArrayRef<c10::IValue> list = value.toListRef();
    return std::all_of(list.begin(), list.end(), has_own_wrapper);
  }
  if (!has_wrapper(value)) return true;
  py::object t = torch::jit::toPyObject(value);
  py::object module = py::getattr(py::type::handle_of(t), "__module__", py::none());
  return py::isinstance<py::str>(module) && module.cast<std::string>().starts_with("torch.");
}

static thread_local Call* around = nullptr;  // the op on such that is under way

// An op on such: its class runs ops on what is inside, and those are seen. As PyTorch's own kernel for it
// (pythonFallback in PythonFallbackKernel.cpp), but for our key, which that one would exclude.
static void observe_inside(Call& call) {
  using Set = c10::DispatchKeySet;
  constexpr Set above = Set(Set::FULL) - Set(Set::FULL_AFTER, c10::DispatchKey::Python) -
                        Set(c10::DispatchKey::Python) - Set(OBSERVED);
  struct Around {
    Call* outer;
    ~Around() { around = outer; }
  } until{std::exchange(around, &call)};
  c10::impl::ExcludeDispatchKeyGuard as_there(above);
  (*getPyInterpreter())->dispatch(call.op, call.stack);
}

// Is this that number, or a tensor that stands for it?
static bool is_number(const c10::IValue& value, const c10::IValue& number) {
  if (!value.isTensor()) return value == number;
  const at::Tensor &t = value.toTensor(), plain = c10::scalar_to_tensor(number.toScalar());
  return t.defined() && t.unsafeGetTensorImpl()->is_wrapped_number() && t.scalar_type() == plain.scalar_type() &&
         !memcmp(t.const_data_ptr(), plain.const_data_ptr(), plain.nbytes());
}

// The numbers of an op on such are those of the same op on what is inside.
static void hand_down(Call& outer, Call& call) {
  if (outer.numbers.empty() || !(outer.op.operator_name() == call.op.operator_name()) || !call.numbers.empty()) return;
  Gil gil;
  for (const OpNumber& one : outer.numbers) {
    const c10::IValue& value = arguments(call)[static_cast<size_t>(one.arg)];
    auto list = one.part < 0 ? c10::ArrayRef<c10::IValue>() : value.toListRef();
    if (one.part >= 0 && static_cast<size_t>(one.part) >= list.size()) continue;
    if (!is_number(one.part < 0 ? value : list[static_cast<size_t>(one.part)], number_of(one.node))) continue;
    call.numbers.push_back({one.arg, one.part, Py_NewRef(one.node)});
  }
  outer.handed_down = call.numbers.size() == outer.numbers.size();
}

static void observe_op(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  Call call{op, keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, OBSERVED), stack};
  Values given = arguments(call);
  bool seen = !paused && observer_of_thread() && !c10::impl::TorchDispatchModeTLS::any_modes_set() &&
              !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python);
  if (seen && std::any_of(given.begin(), given.end(), has_wrapper)) {
    if (numbers_watched) {
      Gil gil;
      if (std::all_of(given.begin(), given.end(), has_own_wrapper)) plain_numbers(call);
    }
    observe_inside(call);
    if (!call.handed_down && !call.numbers.empty()) settle_numbers(call);
    return;
  }
  if (numbers_watched && !is_composite(op)) plain_numbers(call);
  if (passes(op)) {
    if (!call.numbers.empty()) settle_numbers(call);
    return op.redispatchBoxed(call.below, stack);
  }
  if (around) hand_down(*around, call);
  constexpr c10::DispatchKeySet above = c10::DispatchKeySet(c10::DispatchKeySet::FULL) -
                                        c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, OBSERVED);
  c10::impl::ExcludeDispatchKeyGuard ours(above);  // ops that `see` runs itself
  Gil gil;
  observe_told();
  const auto& wanted = op.schema().arguments();
  // As an operator is called from Python: without what has its default value, as far as that is at the end.
  size_t n = 0, positional = 0;
  for (size_t k = 0; k < wanted.size(); ++k) {
    if (is_lone(given[k])) call.lone.push_back(given[k].toTensor().unsafeGetTensorImpl());
    if (wanted[k].kwarg_only()) continue;
    ++n;
    if (!is_default(wanted[k], given[k])) positional = n;
  }
  auto args = py::tuple(positional);
  py::dict kwargs;
  n = 0;
  for (size_t k = 0; k < wanted.size(); ++k) {
    if (wanted[k].kwarg_only()) {
      if (!is_default(wanted[k], given[k])) kwargs[wanted[k].name().c_str()] = torch::jit::toPyObject(given[k]);
    } else if (n < positional) {
      args[n++] = torch::jit::toPyObject(given[k]);
    }
  }
  PyObject* see = PyTuple_GET_ITEM(observer_of_thread(), 1);
  if (c10::impl::TorchDispatchModeTLS::any_modes_set()) {  // its key is below ours (before torch 2.13): not yet run
    owned(PyObject_CallFunctionObjArgs(see, Py_None, Py_None, Py_None, nullptr));
    py::gil_scoped_release no_gil;
    c10::impl::ForceDispatchKeyGuard as_called(call.thread);
    return op.redispatchBoxed(call.below, stack);
  }
  Heard unheard(false);
  Call* outer = std::exchange(call_now, &call);
  PyObject* done = PyObject_CallFunctionObjArgs(see, torch::detail::getTorchApiFunction(op).ptr(), args.ptr(),
                                                kwargs.ptr(), nullptr);
  call_now = outer;
  if (!done) {
    if (!call.error || !PyErr_ExceptionMatches(PyExc_Exception)) throw_python();
    PyErr_Clear();
    std::rethrow_exception(call.error);
  }
  Py_DECREF(done);
}

// Once, at import. Throws if the key is somebody's.
static void observe_start() {
  static auto registered = c10::Dispatcher::singleton().registerFallback(
      OBSERVED, c10::KernelFunction::makeFromBoxedFunction<&observe_op>(), "cgt");
}

// --- operators that are not seen ----------------------------------------------------------------------------------
// Those that read lengths by pointer are made of others; and where torch.tensor reads its numbers, and brings them to
// their device, no key of the thread's counts. The profiler's callbacks come before every operator.

static constexpr const char* SCALAR = "aten::_local_scalar_dense";
static constexpr const char* LIFT = "aten::_to_copy";

static bool is_seen() {  // or part of an op that is
  return call_now || (c10::impl::tls_is_dispatch_key_included(OBSERVED) &&
                      !c10::impl::tls_is_dispatch_key_excluded(OBSERVED) &&
                      !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python));
}

static bool is_lifting() { return !call_now && c10::impl::tls_is_dispatch_key_excluded(OBSERVED); }

static PyObject* on_read = nullptr;  // owned: called with the name of an operator that reads
static PyObject* on_lift = nullptr;  // owned: called before numbers are brought to their device, and behind
static std::unordered_set<std::string> reads;

// Call it; an exception, which could not pass through here, is raised by the next op that is seen, or where the run
// ends.
template <class... Args>
static void tell(PyObject* function, const char* format, Args... args) {
  Gil gil;
  PyObject* done = PyObject_CallFunction(function, format, args...);
  if (!done) {
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback) PyException_SetTraceback(error, traceback);
    Py_XDECREF(type), Py_XDECREF(traceback);
    Py_XDECREF(std::exchange(told_error, error));
  }
  Py_XDECREF(done);
}

struct Lifting : at::ObserverContext {};

static std::unique_ptr<at::ObserverContext> op_begins(const at::RecordFunction& op) {
  auto name = op.operator_name();
  if (!name) return nullptr;
  std::string full = name->overload_name.empty() ? name->name : name->name + "." + name->overload_name;
  if (full == LIFT && is_lifting()) {
    tell(on_lift, "i", 1);
    return std::make_unique<Lifting>();
  }
  if (reads.count(full) && !(full == SCALAR && is_seen())) tell(on_read, "s", full.c_str());
  return nullptr;
}

static void op_ends(const at::RecordFunction&, at::ObserverContext* lifting) {
  if (lifting) tell(on_lift, "i", 0);
}

static void reads_of(const char* name) { reads.insert(name); }

static void reads_tell(PyObject* read, PyObject* lift) {
  Py_INCREF(read), Py_INCREF(lift);
  std::swap(on_read, read), std::swap(on_lift, lift);
  Py_XDECREF(read), Py_XDECREF(lift);
}

// In this thread, and in autograd's when they work for it.
static thread_local int reads_now = 0;

static uint64_t reads_enter() {
  reads_now++;
  return at::addThreadLocalCallback(
      at::RecordFunctionCallback(op_begins, op_ends).scopes({at::RecordScope::FUNCTION}));
}

static void reads_leave(uint64_t handle) {
  reads_now--;
  at::removeCallback(handle);
}

static int reads_count() { return reads_now; }

// --- ops of other threads -----------------------------------------------------------------------------------------
// A thread of a pool's, or one that the function starts, is seen by nobody. While somebody listens PyTorch tells of the
// ops of all threads.

struct Listener {
  std::thread::id mine;
  std::string op;  // the first one that an unseen thread ran meanwhile
};
static std::mutex listening;  // held for a moment, never around Python
static std::vector<Listener*> listeners;
static at::CallbackHandle listens;

static std::unique_ptr<at::ObserverContext> op_heard(const at::RecordFunction& op) {
  if (observer_of_thread()) return nullptr;
  std::lock_guard<std::mutex> lock(listening);
  for (Listener* one : listeners)
    if (one->op.empty() && one->mine != std::this_thread::get_id()) one->op = op.name();
  return nullptr;
}

static void* listen_begin() {
  auto* one = new Listener{std::this_thread::get_id(), {}};
  std::lock_guard<std::mutex> lock(listening);
  if (listeners.empty())
    listens = at::addGlobalCallback(at::RecordFunctionCallback(op_heard).scopes({at::RecordScope::FUNCTION}));
  listeners.push_back(one);
  return one;
}

static std::string listen_end(void* handle) {
  auto* one = static_cast<Listener*>(handle);
  {
    std::lock_guard<std::mutex> lock(listening);
    std::erase(listeners, one);
    if (listeners.empty()) at::removeCallback(listens);
  }
  std::string op = one->op;
  delete one;
  return op;
}

static int listen_count() {
  std::lock_guard<std::mutex> lock(listening);
  return static_cast<int>(listeners.size());
}

}  // namespace cgt
