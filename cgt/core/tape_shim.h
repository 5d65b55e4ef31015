// The host driver's tape: ATen calls with their arguments, walked without Python.
//
// A recording on the CPU keeps, per op, the operator and its boxed arguments. Tensor arguments are
// aliases (tensor_shim.h) of the recorded ones, so that the tape owns the memory but none of the
// user's tensors. A launch calls the ops in order: `out=` variants and in-place ops write the
// recorded memory themselves; for the rest the result is copied into it.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>

#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <climits>
#include <memory>
#include <queue>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "tensor_shim.h"

// libtorch_python's own; declared here because their headers are the expensive ones.
namespace torch::jit {
__attribute__((visibility("default"))) c10::IValue toIValue(pybind11::handle value, const c10::TypePtr& type,
                                                            std::optional<int32_t> n);
__attribute__((visibility("default"))) pybind11::object toPyObject(c10::IValue value);
}

namespace cgt {

struct Tape;

struct TapeOp {
  // None: one of `bodies` is run as the bool args[0] says, or the only one as long as it does; or, without any, a
  // generator's state is read into args[0], or set from it.
  std::optional<c10::OperatorHandle> op;
  std::vector<c10::IValue> args;
  std::vector<at::Tensor> into;  // where results are copied; empty if the op writes in place
  at::Generator generator;
  bool sets = false;
  bool grad = c10::GradMode::is_enabled();  // some ops choose kernels by it
  std::vector<std::shared_ptr<Tape>> bodies{};
};

// a copied slot: `nbytes` from today's input into the tape's own buffer, before all ops; or `back`, behind them
struct TapeCopy {
  at::Tensor mine;
  void* theirs;
  int64_t nbytes;
  bool back;
  bool bound = false;  // nothing is copied: `mine` is where today's input is
};

// The host's pool: memory that storages of any number of tapes share, as long as no two of them need
// it at once. A storage of a tape points to its block and owns nothing.
struct Block {
  c10::DataPtr memory;
  size_t size;
  std::vector<c10::StorageImpl*> users;
  size_t at;  // its index in BLOCKS
};

static std::vector<Block*> BLOCKS;  // the GIL guards both
static std::unordered_map<c10::StorageImpl*, Block*> BLOCK_OF;

struct Tape {  // of a segment, or a body
  Tape* before = nullptr;  // of the segment before it, in the same recording
  Tape* outer = nullptr;   // of a body: where its op is
  std::vector<TapeCopy> copies;
  std::vector<TapeOp> ops;
  std::vector<c10::Storage> planned;  // those that point to blocks
  std::vector<std::pair<Block*, int>> spent;  // memory of the path, and the last op that reads it
};

struct PyGenerator {  // mirror of THPGenerator
  PyObject_HEAD
  at::Generator cdata;
};

static void* generator_impl(PyObject* g) {
  return reinterpret_cast<PyGenerator*>(g)->cdata.unsafeGetGeneratorImpl();
}

static at::Tensor alias_of(const at::TensorBase& t) {
  return at::Tensor(t.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), false));
}
static at::Tensor alias_of(PyObject* o) { return alias_of(reinterpret_cast<PyTensor*>(o)->cdata); }

// Of one op's arguments: what is one tensor stays one, since some ops ask (attention, of query and key).
using Aliases = std::vector<std::pair<c10::TensorImpl*, at::Tensor>>;
static at::Tensor alias_once(const at::Tensor& t, Aliases& done) {
  for (const auto& one : done)
    if (one.first == t.unsafeGetTensorImpl()) return one.second;
  done.emplace_back(t.unsafeGetTensorImpl(), alias_of(t));
  return done.back().second;
}

// f(t) for each tensor in this value, lists and lists of lists too, in order; what it returns takes t's place.
template <class F>
static void each_tensor(c10::IValue& value, F&& f) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) value = f(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> list = value.toTensorList().copy();
    for (size_t k = 0; k < list.size(); ++k)
      if (at::Tensor t = list.get(k); t.defined()) list.set(k, f(t));
    value = std::move(list);
  } else if (value.isList()) {
    c10::List<c10::IValue> list = value.toList().copy();
    for (size_t k = 0; k < list.size(); ++k) {
      c10::IValue one = list.get(k);
      if (!one.isTensor() && !one.isList()) continue;
      each_tensor(one, f);
      list.set(k, one);
    }
    value = std::move(list);
  }
}

// An argument as the op takes it.
static c10::IValue value_of(PyObject* o, const c10::Argument& wanted, Aliases& done) {
  bool tensor = wanted.type()->isSubtypeOf(*c10::OptionalType::ofTensor());
  if (tensor && (PyFloat_Check(o) || PyLong_Check(o) || PyComplex_Check(o))) {
    // `x * 2.0`: the mode is shown the number; the op wants the wrapped tensor it came from.
    at::Tensor number = c10::scalar_to_tensor(torch::jit::toIValue(o, c10::NumberType::get(), {}).toScalar());
    number.unsafeGetTensorImpl()->set_wrapped_number(true);
    return c10::IValue(number);
  }
  if (PyDict_Check(o)) throw std::runtime_error("no tape form for " + wanted.type()->str());  // nobody sees its tensors
  c10::IValue value = torch::jit::toIValue(o, wanted.real_type(), wanted.N());
  each_tensor(value, [&](const at::Tensor& t) { return alias_once(t, done); });
  return value;
}

static void* tape_new() { return new Tape(); }

// The next segment's.
static void* tape_after(void* t) {
  auto* tape = new Tape();
  tape->before = static_cast<Tape*>(t);
  return tape;
}

// Ops, those of bodies too.
static int tape_length(void* t) {
  int n = 0;
  for (const TapeOp& row : static_cast<Tape*>(t)->ops) {
    ++n;
    for (const auto& body : row.bodies) n += tape_length(body.get());
  }
  return n;
}

// Append an op with one or two bodies, empty tapes, that `pred` chooses from.
static void tape_fork(void* t, PyObject* pred, int n, void** bodies) {
  auto* tape = static_cast<Tape*>(t);
  tape->ops.push_back(TapeOp{std::nullopt, {c10::IValue(alias_of(pred))}, {}, {}});
  for (int k = 0; k < n; ++k) {
    auto body = std::make_shared<Tape>();
    body->outer = tape;
    bodies[k] = body.get();
    tape->ops.back().bodies.push_back(std::move(body));
  }
}

static void* tape_outer(void* t) noexcept { return static_cast<Tape*>(t)->outer; }

// Take the last op back.
static void tape_pop(void* t) { static_cast<Tape*>(t)->ops.pop_back(); }

static void point(c10::StorageImpl* s, void* at) noexcept {
  s->set_data_ptr_noswap(c10::DataPtr(at, c10::DeviceType::CPU));
}

static void bind(const TapeCopy& c) noexcept {
  point(c.mine.storage().unsafeGetStorageImpl(), static_cast<char*>(c.theirs) - c.mine.storage_offset());
}

// Frees the blocks that nobody else uses. A storage that outlives its tape raises when it is touched.
static void tape_free(void* t) noexcept {
  Tape* tape = static_cast<Tape*>(t);
  for (const c10::Storage& s : tape->planned) {
    c10::StorageImpl* i = s.unsafeGetStorageImpl();
    Block* b = BLOCK_OF[i];
    BLOCK_OF.erase(i);
    b->users.erase(std::find(b->users.begin(), b->users.end(), i));
    i->release_data_and_set_meta_custom_data_ptr_error_msg_(std::string("cgt: memory of a recording that was freed"));
    if (!b->users.empty()) continue;
    BLOCKS.back()->at = b->at;
    BLOCKS[b->at] = BLOCKS.back();
    BLOCKS.pop_back();
    delete b;
  }
  delete tape;
}

static int tape_copy(void* t, PyObject* mine, void* theirs, int64_t nbytes, bool back) {
  auto& c = static_cast<Tape*>(t)->copies;
  c.push_back({alias_of(mine), theirs, nbytes, back});
  return static_cast<int>(c.size()) - 1;
}

// What comes now does not need the memory of this result of the path. (A backward's: it has one segment.)
static void tape_spend(void* t, PyObject* proto) noexcept {
  auto found = BLOCK_OF.find(storage_of(proto));
  auto* tape = static_cast<Tape*>(t);
  if (found != BLOCK_OF.end()) tape->spent.push_back({found->second, static_cast<int>(tape->ops.size()) - 1});
}

static int64_t blocks_nbytes() noexcept {
  int64_t n = 0;
  for (const Block* b : BLOCKS) n += static_cast<int64_t>(b->size);
  return n;
}

struct Life {  // of a storage: first and last op of the tape that touch it
  c10::StorageImpl* storage;
  int first = INT_MAX, last = -1;
};

static void live_at(std::unordered_map<c10::StorageImpl*, Life>& lives, const at::Tensor& t, int op) {
  if (!t.defined() || !t.has_storage()) return;
  auto found = lives.find(t.storage().unsafeGetStorageImpl());
  if (found == lives.end()) return;
  found->second.first = std::min(found->second.first, op);
  found->second.last = std::max(found->second.last, op);
}

static void live_at(std::unordered_map<c10::StorageImpl*, Life>& lives, const c10::IValue& v, int op) {
  if (v.isTensor()) {
    live_at(lives, v.toTensor(), op);
  } else if (v.isList()) {
    for (const c10::IValue& one : v.toListRef()) live_at(lives, one, op);
  }
}

// All that a body touches is needed as long as its op runs, and it may run any number of times.
static void live_at(std::unordered_map<c10::StorageImpl*, Life>& lives, const TapeOp& row, int op) {
  for (const c10::IValue& v : row.args) live_at(lives, v, op);
  for (const at::Tensor& v : row.into) live_at(lives, v, op);
  for (const auto& body : row.bodies)
    for (const TapeOp& inner : body->ops) live_at(lives, inner, op);
}

// Give every storage that the tape made a block of the pool: the smallest one that is large enough,
// that the path does not need (`busy`: addresses) and that no storage of this tape needs at the same
// time; else its own memory becomes a new block. Linear scan allocation (Poletto and Sarkar, 1999),
// by storages instead of registers. `made`: tensors over those storages; `outs`: those that live on.
static void tape_plan(void* t, PyObject* made, PyObject* outs, PyObject* early, const std::vector<void*>& busy) {
  Tape* tape = static_cast<Tape*>(t);
  std::unordered_map<c10::StorageImpl*, Life> lives;
  for (Py_ssize_t k = 0; k < PyList_GET_SIZE(made); ++k) {
    c10::StorageImpl* s = storage_of(PyList_GET_ITEM(made, k));
    if (s && s->nbytes()) lives[s].storage = s;
  }
  std::vector<Tape*> parts;
  for (Tape* part = tape; part; part = part->before) parts.insert(parts.begin(), part);
  int at = 0;
  for (Tape* part : parts) {
    for (const TapeCopy& c : part->copies)
      if (c.bound) {
        lives.erase(c.mine.storage().unsafeGetStorageImpl());
        bind(c);
      } else if (!c.back) live_at(lives, c.mine, -1);
    for (const TapeOp& row : part->ops) live_at(lives, row, at++);
    for (const TapeCopy& c : part->copies)
      if (c.back) live_at(lives, c.mine, at);
  }
  std::unordered_set<c10::StorageImpl*> kept;
  for (Py_ssize_t k = 0; k < PyList_GET_SIZE(outs); ++k) {
    auto found = lives.find(storage_of(PyList_GET_ITEM(outs, k)));
    if (found == lives.end()) continue;
    kept.insert(found->first);
    found->second.first = std::min(found->second.first, INT_MAX - 1);
    found->second.last = INT_MAX;
  }
  for (Py_ssize_t k = 0; k < PyList_GET_SIZE(early); ++k) {
    auto found = lives.find(storage_of(PyList_GET_ITEM(early, k)));
    if (found != lives.end()) found->second.first = -1;
  }
  std::vector<Life> order;
  for (const auto& life : lives)
    if (life.second.last >= 0 || life.second.first < INT_MAX) order.push_back(life.second);
  std::sort(order.begin(), order.end(), [](const Life& a, const Life& b) {
    return a.first != b.first ? a.first < b.first
                              : a.storage->nbytes() > b.storage->nbytes();
  });
  std::unordered_set<void*> taken(busy.begin(), busy.end());
  // Blocks that are free, the smallest first, and the others by the last op that needs them.
  using Place = std::pair<size_t, size_t>;  // size, index
  std::set<Place> free;
  std::priority_queue<std::pair<int, size_t>, std::vector<std::pair<int, size_t>>, std::greater<>> used;
  std::unordered_map<Block*, int> spent(tape->spent.begin(), tape->spent.end());
  for (size_t k = 0; k < BLOCKS.size(); ++k) {
    auto until = spent.find(BLOCKS[k]);
    if (taken.count(BLOCKS[k]->memory.get())) continue;
    if (until == spent.end()) free.emplace(BLOCKS[k]->size, k);
    else used.emplace(until->second, k);
  }
  c10::Allocator* allocator = c10::GetAllocator(c10::DeviceType::CPU);
  for (const Life& life : order) {
    c10::StorageImpl* s = life.storage;
    for (; !used.empty() && used.top().first < life.first; used.pop())
      free.emplace(BLOCKS[used.top().second]->size, used.top().second);
    auto fits = free.lower_bound(Place(s->nbytes(), 0));
    size_t k = fits == free.end() ? BLOCKS.size() : fits->second;
    if (fits == free.end()) BLOCKS.push_back(new Block{allocator->allocate(s->nbytes()), s->nbytes(), {}, k});
    else free.erase(fits);
    used.emplace(life.last, k);
    Block* best = BLOCKS[k];
    if (kept.count(s)) memcpy(best->memory.get(), storage_base(s), s->nbytes());
    tape->planned.emplace_back(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(s));
    best->users.push_back(s);
    BLOCK_OF[s] = best;
    point(s, best->memory.get());
  }
}

// The host's rescue: the holder keeps the memory, the block gets new. Nothing is copied, and pointers
// that left PyTorch (NumPy arrays over the tensor) stay right. `proto` is over the storage that the
// tape writes; whatever shares its block moves along.
static void host_give_away(void* held, PyObject* proto) {
  auto found = BLOCK_OF.find(storage_of(proto));
  if (found == BLOCK_OF.end()) return;  // no bytes
  Block* b = found->second;
  c10::DataPtr fresh = c10::GetAllocator(c10::DeviceType::CPU)->allocate(b->size);
  static_cast<c10::StorageImpl*>(held)->set_data_ptr_noswap(std::move(b->memory));
  b->memory = std::move(fresh);
  for (c10::StorageImpl* s : b->users) point(s, b->memory.get());
}

// The slot is not copied after all.
static void tape_bind(void* t, int k) noexcept { static_cast<Tape*>(t)->copies[k].bound = true; }

static inline void tape_patch_copy(void* t, int k, void* theirs) noexcept {
  TapeCopy& c = static_cast<Tape*>(t)->copies[k];
  c.theirs = theirs;
  if (c.bound) bind(c);
}

struct Deaf final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// Does this op write the very bytes of `made` where it is told to, as argument number `out`? Tried once: some variants
// resize, or use the memory that they are given as scratch.
static bool writes_same(const TapeOp& row, size_t out, const at::Tensor& made) {
  if (made.is_conj() || made.is_neg()) return false;  // as dot's is, of conjugated vectors; what is given is not
  at::Tensor room = at::empty_strided(made.sizes(), made.strides(), made.options());
  const void* at = room.const_data_ptr();
  std::vector<c10::IValue> stack(row.args);
  stack[out] = room;
  try {
    Deaf deaf;
    c10::WarningUtils::WarningHandlerGuard unheard(&deaf);  // what ATen warns of
    py::gil_scoped_release no_gil;
    row.op->callBoxed(&stack);
  } catch (...) {
    raised();
    if (!PyErr_ExceptionMatches(PyExc_Exception)) throw_python();  // an interrupt, in a kernel of Python's
  }
  if (PyErr_Occurred()) {
    PyErr_Clear();
    return false;
  }
  if (room.const_data_ptr() != at || room.sizes() != made.sizes() || room.strides() != made.strides()) return false;
  const bool dense = made.is_non_overlapping_and_dense();
  const at::Tensor mine = dense ? room : room.contiguous(), theirs = dense ? made : made.contiguous();
  return !memcmp(mine.const_data_ptr(), theirs.const_data_ptr(), mine.nbytes());
}

// Append one op. `args` is a tuple in schema order, `kwargs` a dict, `into` a tuple of tensors; or, of a variant that
// writes its one result into its argument `out`, that one. False: that variant does not do the same, and is not
// appended. Throws if an argument has no boxed form.
static bool tape_add(void* t, const char* name, const char* overload, PyObject* args, PyObject* kwargs, PyObject* into,
                     const char* out) {
  auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  const auto& wanted = op.schema().arguments();
  TapeOp row{op, {}, {}, {}};
  Aliases done;
  row.args.reserve(wanted.size());
  Py_ssize_t given = PyTuple_GET_SIZE(args);
  size_t at = wanted.size();
  for (size_t k = 0; k < wanted.size(); ++k) {
    PyObject* o = nullptr;
    if (wanted[k].name() == out)
      o = PyTuple_GET_ITEM(into, 0), at = k;
    else if (static_cast<Py_ssize_t>(k) < given && !wanted[k].kwarg_only())
      o = PyTuple_GET_ITEM(args, k);
    else
      o = PyDict_GetItemString(kwargs, wanted[k].name().c_str());
    if (o)
      row.args.push_back(value_of(o, wanted[k], done));
    else if (wanted[k].default_value())
      row.args.push_back(*wanted[k].default_value());
    else
      row.args.push_back(c10::IValue());
  }
  if (PyErr_Occurred()) throw_python();
  if (at < wanted.size()) {
    if (!writes_same(row, at, row.args[at].toTensor())) return false;
  } else {
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(into); ++k)
      row.into.push_back(alias_of(PyTuple_GET_ITEM(into, k)));
  }
  static_cast<Tape*>(t)->ops.push_back(std::move(row));
  return true;
}

// The index of the op that was appended last.
static int tape_last(void* t) noexcept { return static_cast<int>(static_cast<Tape*>(t)->ops.size()) - 1; }

// Give an op another number as argument, or as one element of a list that is one.
static void tape_scalar(void* t, int op, int arg, int part, int is_float, double f, int64_t i) noexcept {
  c10::IValue& value = static_cast<Tape*>(t)->ops[op].args[arg];
  c10::IValue number = is_float ? c10::IValue(f) : c10::IValue(i);
  if (part >= 0) {
    value.toList().set(part, number);
  } else if (value.isTensor()) {  // as value_of made it
    void* at = value.toTensor().mutable_data_ptr();
    is_float ? memcpy(at, &f, sizeof f) : memcpy(at, &i, sizeof i);
  } else {
    value = std::move(number);
  }
}

// Append the reading of a generator's state into `state`, or the setting from it.
static void tape_state(void* t, PyObject* generator, PyObject* state, int sets) noexcept {
  TapeOp row{std::nullopt, {c10::IValue(alias_of(state))}, {},
             reinterpret_cast<PyGenerator*>(generator)->cdata};
  row.sets = sets;
  static_cast<Tape*>(t)->ops.push_back(std::move(row));
}

static void run_state(const TapeOp& row) {
  const at::Tensor& state = row.args[0].toTensor();
  at::Generator generator = row.generator;
  std::lock_guard<std::mutex> lock(generator.mutex());
  if (row.sets)
    generator.set_state(state.clone());  // the state that is set is kept by some generators
  else
    state.copy_(generator.get_state());
}

// `stack`: one for the run; an op may run another tape.
static void run_ops(const TapeOp* row, const TapeOp* end, std::vector<c10::IValue>* stack) {
  for (; row != end; ++row) {
    if (!row->bodies.empty()) {
      const at::Tensor& pred = row->args[0].toTensor();
      const auto holds = [&] { return *static_cast<const bool*>(pred.const_data_ptr()); };
      const auto run = [&](const Tape& body) { run_ops(body.ops.data(), body.ops.data() + body.ops.size(), stack); };
      if (row->bodies.size() == 2) run(*row->bodies[holds() ? 0 : 1]);
      else while (holds()) run(*row->bodies[0]);
      continue;
    }
    if (!row->op) {
      run_state(*row);
      continue;
    }
    if (c10::GradMode::is_enabled() != row->grad) c10::GradMode::set_enabled(row->grad);
    stack->assign(row->args.begin(), row->args.end());
    row->op->callBoxed(stack);
    size_t k = 0;
    for (const auto& value : *stack) {
      if (k == row->into.size()) break;
      // A result that was not asked for (output_mask) is undefined, and `into` has none for it.
      if (value.isTensor()) {
        if (value.toTensor().defined()) row->into[k++].copy_(value.toTensor());
      } else if (value.isTensorList()) {
        for (const at::Tensor& one : value.toTensorVector())
          if (one.defined()) row->into[k++].copy_(one);
      }
    }
  }
}

// Behind the ops, and where one of them throws, too: what eager has written until then stays written.
struct CopyBack {
  const std::vector<TapeCopy>& copies;
  ~CopyBack() {
    for (const TapeCopy& c : copies)
      if (c.back) memcpy(c.theirs, c.mine.const_data_ptr(), static_cast<size_t>(c.nbytes));
  }
};

// Run the tape, or only its last op. Called without the GIL. -1: an op threw, and the exception that eager would have
// raised is set.
static int tape_run(void* t, int last) noexcept {
  try {
    // The tape was recorded below autograd and autocast; it runs there too.
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
    Tape* tape = static_cast<Tape*>(t);
    static const std::vector<TapeCopy> none;
    const std::vector<TapeCopy>& copies = last ? none : tape->copies;
    for (const TapeCopy& c : copies)
      if (c.nbytes && !c.back && !c.bound) memcpy(c.mine.mutable_data_ptr(), c.theirs, static_cast<size_t>(c.nbytes));
    CopyBack back{copies};
    c10::AutoGradMode restores(c10::GradMode::is_enabled());
    std::vector<c10::IValue> stack;
    const TapeOp* end = tape->ops.data() + tape->ops.size();
    run_ops(last ? end - 1 : tape->ops.data(), end, &stack);
    return 0;
  } catch (...) {
    py::gil_scoped_acquire gil;
    raised();
    return -1;
  }
}

// --- randomness: a segment that ran for a call which goes another way drew its numbers in vain ---

// The state of the default generator; to be released.
static void* rng_keep() {
  at::Generator g = at::detail::getDefaultCPUGenerator();
  std::lock_guard<std::mutex> lock(g.mutex());
  return new at::Tensor(g.get_state());
}

static void rng_release(void* state, int put_back) noexcept {
  auto* tensor = static_cast<at::Tensor*>(state);
  if (put_back) {
    at::Generator g = at::detail::getDefaultCPUGenerator();
    std::lock_guard<std::mutex> lock(g.mutex());
    g.set_state(*tensor);
  }
  delete tensor;
}

// --- ranges that profilers show ---

// Begin a range if a profiler listens, else NULL: then it costs one thread-local load.
static inline void* range_begin(PyObject* name) noexcept {
  auto listening = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (C10_LIKELY(!listening.has_value())) return nullptr;
  auto* range = new at::RecordFunction(std::move(*listening));
  range->before(std::string(PyUnicode_AsUTF8(name)));
  return range;
}

static void range_end(void* range) noexcept { delete static_cast<at::RecordFunction*>(range); }

}  // namespace cgt
