// PyTorch's tensors as the core sees them: pointers, metadata, use counts, ambient state.
//
// One of the shims that include a torch header; builds against CPU and CUDA torch alike.
// Everything here takes borrowed references and keeps none, unless a comment says otherwise.
//
// `THPVariable` is mirrored instead of including python_variable.h, which costs 11 s and 0.9 GB to
// compile. self_check (private.py) holds the mirror against the public Python attributes at start-up.
#pragma once
#include "debug.h"

#include <Python.h>

#include <ATen/Context.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/AutogradState.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <pybind11/pybind11.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <cstring>
#include <vector>

// libtorch_python's own wrapper; declared here because its header is the expensive one.
__attribute__((visibility("default"))) PyObject* THPVariable_Wrap(const at::TensorBase& var);

// ATen/autocast_mode.h would bring in all of ATen.h, 8 s of compile time, for two questions.
namespace at::autocast {
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
TORCH_API bool is_autocast_cache_enabled();
}  // namespace at::autocast

namespace cgt {

namespace py = pybind11;

struct PyTensor {  // mirror of THPVariable, torch 2.11 to 2.13
  PyObject_HEAD
  at::TensorBase cdata;
  PyObject* backward_hooks;
  PyObject* post_accumulate_grad_hooks;
};
static_assert(sizeof(at::TensorBase) == sizeof(void*), "a TensorBase is one intrusive pointer");

// What functions of the shims throw comes here from Cython (shims.pxi: `except +raised`), and becomes the exception of
// Python's that PyTorch's own bindings would have made of it.
static void raised() { torch::translate_exception_to_python(std::current_exception()); }

// Throw the exception that is set, so that it lasts where the GIL is let go. The GIL is held.
[[noreturn]] static void throw_python() {
  python_error error;
  error.persist();
  throw error;
}

// Take a new reference over, or throw the exception of Python's that is set instead.
static py::object owned(PyObject* o) {
  if (!o) throw_python();
  return py::reinterpret_steal<py::object>(o);
}

using Objects = c10::SmallVector<PyObject*, 32>;  // borrowed; no more than that many need memory

// What a handle of Python's owns, and a new one.
template <class T>
static T& inside(PyObject* handle) {
  return *static_cast<T*>(PyCapsule_GetPointer(handle, typeid(T).name()));
}
template <class T>
static PyObject* handle_new(T what) {
  auto owner = std::make_unique<T>(std::move(what));
  auto end = [](PyObject* handle) { delete &inside<T>(handle); };
  py::object made = owned(PyCapsule_New(owner.get(), typeid(T).name(), end));
  owner.release();
  return made.release().ptr();
}

// body(): a new reference to what it returns.
static PyObject* called(PyObject* body) { return owned(PyObject_CallNoArgs(body)).release().ptr(); }

// A new reference to a tensor's Python object.
static PyObject* wrapped(const at::TensorBase& t) { return owned(THPVariable_Wrap(t)).release().ptr(); }

static inline c10::TensorImpl* impl_of(PyObject* t) {
  return reinterpret_cast<PyTensor*>(t)->cdata.unsafeGetTensorImpl();
}

static inline c10::StorageImpl* storage_of(PyObject* t) {
  return impl_of(t)->unsafe_storage().unsafeGetStorageImpl();
}

// The address of the storage, without the checks that make a poisoned storage throw.
static inline char* storage_base(c10::StorageImpl* s) {
  return s ? static_cast<char*>(s->_mutable_data_ptr_no_checks().get()) : nullptr;
}

// Private members of PyTorch's classes, by the rule that an explicit instantiation may name one ([temp.spec]/6):
// `one.*reach(Name())`, where REACH said what that is.
template <class Name, auto Member>
struct Reached {
  friend constexpr auto reach(Name) { return Member; }
};
#define REACH(Name, Member)            \
  struct Name {                        \
    friend constexpr auto reach(Name); \
  };                                   \
  template struct Reached<Name, Member>

// A guard asks each tensor. libtorch's requires_grad() is three calls, and each of sizes(), strides(), dim(), numel(),
// storage_offset(), device() first asks whether a subclass answers instead (none does where the dispatch keys are those
// of a plain tensor). A nested or sparse one answers by throwing, so nothing that is asked of any argument may ask it.
REACH(ImplMeta, &c10::TensorImpl::autograd_meta_);
REACH(ImplDims, &c10::TensorImpl::sizes_and_strides_);
REACH(ImplOffset, &c10::TensorImpl::storage_offset_);
REACH(ImplNumel, &c10::TensorImpl::numel_);
REACH(ImplDtype, &c10::TensorImpl::data_type_);
REACH(ImplDevice, &c10::TensorImpl::device_opt_);
static inline torch::autograd::AutogradMeta* autograd_meta_of(c10::TensorImpl* i) {  // NULL: nothing for it to know
  return static_cast<torch::autograd::AutogradMeta*>((i->*reach(ImplMeta())).get());
}
static inline const c10::impl::SizesAndStrides& impl_dims(c10::TensorImpl* i) { return i->*reach(ImplDims()); }
static inline int64_t impl_offset(c10::TensorImpl* i) { return i->*reach(ImplOffset()); }
static inline int64_t impl_numel(c10::TensorImpl* i) { return i->*reach(ImplNumel()); }
static inline const caffe2::TypeMeta& impl_dtype(c10::TensorImpl* i) { return i->*reach(ImplDtype()); }
static inline const std::optional<c10::Device>& impl_device(c10::TensorImpl* i) { return i->*reach(ImplDevice()); }

static inline char* data_of(c10::TensorImpl* i) {
  char* base = storage_base(i->unsafe_storage().unsafeGetStorageImpl());
  return base ? base + impl_offset(i) * static_cast<int64_t>(impl_dtype(i).itemsize()) : nullptr;
}

// What a tensor is to autograd: nothing, a leaf that requires grad, a result, one with a tangent (forward mode).
enum AutogradState { ANY_STATE = -1, PLAIN_TENSOR, LEAF, RESULT, DUAL };
static C10_ALWAYS_INLINE int autograd_state(c10::TensorImpl* i) {
  const torch::autograd::AutogradMeta* m = autograd_meta_of(i);
  if (!m) return PLAIN_TENSOR;
  if (C10_UNLIKELY(m->fw_grad_ && !m->fw_grad_->empty())) return DUAL;
  return m->requires_grad_ ? LEAF : m->grad_fn_ ? RESULT : PLAIN_TENSOR;
}

// The dispatch key at which a run is observed (observe_shim.h).
static constexpr c10::DispatchKey OBSERVED = c10::DispatchKey::Fake;

// --- what a slot's guard compares ------------------------------------------------------------

static inline uint64_t tensor_keys(PyObject* t) { return impl_of(t)->key_set().raw_repr(); }
static inline int tensor_device(PyObject* t) {  // -1 for the CPU, else the device's index
  return static_cast<int>(impl_device(impl_of(t))->index());
}
static inline int tensor_ndim(PyObject* t) { return static_cast<int>(impl_dims(impl_of(t)).size()); }
static inline int64_t tensor_itemsize(PyObject* t) { return impl_of(t)->dtype().itemsize(); }
static inline int64_t tensor_numel(PyObject* t) { return impl_numel(impl_of(t)); }
static inline int tensor_autograd(PyObject* t) { return autograd_state(impl_of(t)); }
static inline void* tensor_ptr(PyObject* t) { return data_of(impl_of(t)); }
static inline void* tensor_storage(PyObject* t) { return storage_of(t); }
static inline void* tensor_impl(PyObject* t) { return impl_of(t); }
// Elements in a storage at sizes and strides (zeros of autograd's have none), and nothing that runs Python for an op?
static inline int tensor_is_plain(PyObject* t) {
  const at::TensorBase& x = reinterpret_cast<PyTensor*>(t)->cdata;
  return x.layout() == c10::kStrided && !x.is_nested() && !x.is_quantized() && !x._is_zerotensor() &&
         !impl_of(t)->is_python_dispatch();
}
// Is it one of this GPU's, or of the host's (-1)?
static inline bool tensor_is_on(PyObject* t, int device) {
  const c10::Device& where = *impl_device(impl_of(t));
  return device < 0 ? where.is_cpu() : where.is_cuda() && where.index() == device;
}
static inline int64_t storage_nbytes(PyObject* t) {
  c10::StorageImpl* s = storage_of(t);
  return s ? s->sym_nbytes().maybe_as_int().value_or(0) : 0;
}
static inline int64_t tensor_offset(PyObject* t) { return impl_offset(impl_of(t)); }
static inline void* tensor_storage_ptr(PyObject* t) { return storage_base(storage_of(t)); }

// sizes, then strides, into dims[0 .. 2*ndim).
static inline void tensor_dims(PyObject* t, int64_t* dims) {
  const c10::impl::SizesAndStrides& now = impl_dims(impl_of(t));
  memcpy(dims, now.sizes_data(), now.size() * sizeof(int64_t));
  memcpy(dims + now.size(), now.strides_data(), now.size() * sizeof(int64_t));
}

// Which memory a guard is about to read of a tensor: asked for beforehand, many at once, it comes at once. First what
// the tensor itself is, then what it refers to.
static C10_ALWAYS_INLINE void impl_near(const void* impl) noexcept {
  const char* at = static_cast<const char*>(impl);
  __builtin_prefetch(at);
  __builtin_prefetch(at + 64);
  __builtin_prefetch(at + sizeof(c10::TensorImpl) - 8);
}
static C10_ALWAYS_INLINE void impl_reach(void* impl) noexcept {
  auto* i = static_cast<c10::TensorImpl*>(impl);
  __builtin_prefetch(i->unsafe_storage().unsafeGetStorageImpl());
  if (const torch::autograd::AutogradMeta* m = autograd_meta_of(i)) {
    __builtin_prefetch(&m->grad_);
    __builtin_prefetch(&m->requires_grad_);
  }
}

// dtype and device as one number.
static C10_ALWAYS_INLINE uint32_t impl_kind(void* impl) noexcept {
  auto* i = static_cast<c10::TensorImpl*>(impl);
  uint16_t dtype, device;
  static_assert(sizeof(caffe2::TypeMeta) == sizeof dtype && sizeof(c10::Device) == sizeof device);
  memcpy(&dtype, &impl_dtype(i), sizeof dtype);
  memcpy(&device, &*impl_device(i), sizeof device);  // it has one: undefined tensors have no Python object
  return static_cast<uint32_t>(dtype) << 16 | device;
}

// Same dtype, device, dispatch keys (layout, conj, inference, wrappers), sizes, strides and
// state to autograd? The hot half of a guard: no Python, no allocation.
static C10_ALWAYS_INLINE int impl_same(void* impl, uint64_t keys, uint32_t kind, int autograd, int ndim,
                                       const int64_t* dims) noexcept {
  auto* i = static_cast<c10::TensorImpl*>(impl);
  const c10::impl::SizesAndStrides& now = impl_dims(i);
  if ((i->key_set().raw_repr() ^ keys) | (impl_kind(i) ^ kind) | (now.size() ^ static_cast<size_t>(ndim))) return 0;
  const int64_t* sizes = now.sizes_data();
  const int64_t* strides = now.strides_data();
  int64_t apart = 0;  // one branch a tensor, not two a dimension
  for (int d = 0; d < ndim; ++d) apart |= (sizes[d] ^ dims[d]) | (strides[d] ^ dims[ndim + d]);
  return !apart && (autograd == ANY_STATE || autograd_state(i) == autograd);
}

static C10_ALWAYS_INLINE int impl_has_grad(void* impl) noexcept {
  const torch::autograd::AutogradMeta* m = autograd_meta_of(static_cast<c10::TensorImpl*>(impl));
  return m && m->grad_.defined();
}

// h with dtype and sizes mixed in; of a nested tensor not its own.
static inline uint64_t tensor_key(PyObject* t, uint64_t h) noexcept {
  c10::TensorImpl* i = impl_of(t);
  h = (h ^ static_cast<uint64_t>(i->dtype().toScalarType())) * 0x9E3779B97F4A7C15ull;
  for (int64_t n : impl_dims(i).sizes_arrayref()) h = (h ^ static_cast<uint64_t>(n)) * 0x9E3779B97F4A7C15ull;
  return h ^ h >> 32;
}

// The address of a tensor whose keys and dtype are already known to fit: it has a storage, and
// elements of `itemsize` bytes.
static C10_ALWAYS_INLINE char* impl_at(void* impl, int64_t itemsize) noexcept {
  auto* i = static_cast<c10::TensorImpl*>(impl);
  char* base = storage_base(i->unsafe_storage().unsafeGetStorageImpl());
  return base ? base + impl_offset(i) * itemsize : nullptr;
}
static inline char* tensor_at(PyObject* t, int64_t itemsize) noexcept { return impl_at(impl_of(t), itemsize); }

// The bytes from its first element to the end of its last; strides are not negative.
static inline int64_t tensor_span(PyObject* t) noexcept {
  c10::TensorImpl* i = impl_of(t);
  if (impl_numel(i) == 0) return 0;
  const c10::impl::SizesAndStrides& now = impl_dims(i);
  int64_t last = 0;
  for (size_t d = 0; d < now.size(); ++d) last += (now.sizes_data()[d] - 1) * now.strides_data()[d];
  return (last + 1) * static_cast<int64_t>(i->itemsize());
}

static inline int tensor_overlaps(PyObject* a, PyObject* b) noexcept {
  const char* x = tensor_at(a, static_cast<int64_t>(impl_of(a)->itemsize()));
  const char* y = tensor_at(b, static_cast<int64_t>(impl_of(b)->itemsize()));
  return x < y + tensor_span(b) && y < x + tensor_span(a);
}

static inline int tensor_version(PyObject* t) {
  c10::TensorImpl* i = impl_of(t);
  return i->is_inference() ? 0 : static_cast<int>(i->version_counter().current_version());
}

// What counts a tensor's versions: views of one tensor share it, tensors over one storage may have their own.
static inline void* tensor_counter(PyObject* t) noexcept {
  const c10::VariableVersion& version = impl_of(t)->version_counter();
  void* counter = nullptr;
  static_assert(sizeof version == sizeof counter, "one intrusive pointer");
  memcpy(&counter, &version, sizeof counter);
  return counter;
}
static inline void tensor_bump(PyObject* t, int times) {
  c10::TensorImpl* i = impl_of(t);
  if (i->is_inference()) return;
  for (; times > 0; --times) i->bump_version();
}

// --- gradients --------------------------------------------------------------------------------

// The identity of t.grad (its TensorImpl), or NULL. Borrowed.
static inline void* tensor_grad(PyObject* t) {
  const torch::autograd::AutogradMeta* m = autograd_meta_of(impl_of(t));
  return m && m->grad_.defined() ? m->grad_.unsafeGetTensorImpl() : nullptr;
}

// t.grad as something that the functions of this file take for a Python tensor, or NULL: they read
// only `cdata`, and t's autograd metadata holds a TensorBase to read. Borrowed; without a Python head.
static inline PyObject* tensor_grad_tensor(PyObject* t) {
  torch::autograd::AutogradMeta* m = autograd_meta_of(impl_of(t));
  if (!m || !m->grad_.defined()) return nullptr;
  return reinterpret_cast<PyObject*>(reinterpret_cast<char*>(&m->grad_) - offsetof(PyTensor, cdata));
}

// What tensor_grad_tensor gives, as Python has it.
static PyObject* tensor_wrap(PyObject* t) { return wrapped(reinterpret_cast<PyTensor*>(t)->cdata); }
static inline void tensor_hold(PyObject* t, std::vector<at::TensorBase>* held) {
  if (t) held->push_back(reinterpret_cast<PyTensor*>(t)->cdata);
}

// t.grad = g; g NULL means None. t's autograd metadata exists, since it had a gradient recorded.
static inline void tensor_set_grad(PyObject* t, PyObject* g) {
  at::TensorBase& grad = reinterpret_cast<at::TensorBase&>(impl_of(t)->mutable_grad());
  grad = g ? reinterpret_cast<PyTensor*>(g)->cdata : at::TensorBase();
}

// t.requires_grad = True, of a leaf of floating-point numbers.
static inline void tensor_require_grad(PyObject* t) { impl_of(t)->set_requires_grad(true); }

// --- outputs ----------------------------------------------------------------------------------

static void drop_owner(void* ctx) {
  c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(ctx));
}

// A new storage over the same bytes as `owner`'s that keeps `owner`'s storage alive. Handing out
// memory through such a storage lets a rescue move it without moving what the graph writes.
static c10::Storage borrow_storage(PyObject* owner) {
  c10::StorageImpl* s = storage_of(owner);
  c10::raw::intrusive_ptr::incref(s);
  c10::DataPtr p(storage_base(s), s, &drop_owner, s->device());
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), s->nbytes(), std::move(p), s->allocator(),
      /*resizable=*/s->allocator() != nullptr));
}

// Is t's memory lent to it by a recording (borrow_storage)?
static inline bool tensor_is_lent(PyObject* t) noexcept {
  c10::StorageImpl* s = storage_of(t);
  return s && s->_mutable_data_ptr_no_checks().get_deleter() == &drop_owner;
}

static PyObject* wrap_view(c10::Storage storage, uint64_t keys, PyObject* like_dtype_of,
                           int64_t offset, int ndim, const int64_t* dims) {
  auto meta = impl_of(like_dtype_of)->dtype();
  c10::DispatchKeySet set(c10::DispatchKeySet::RAW, keys);
  // A new tensor is one of inference mode if that is on, whatever its keys are to be.
  bool inference = !set.has(c10::DispatchKey::ADInplaceOrView);
  std::optional<c10::InferenceMode> mode;
  if (c10::InferenceMode::is_enabled() != inference) mode.emplace(inference);
  auto t = at::detail::make_tensor_base<c10::TensorImpl>(std::move(storage), set, meta);
  auto* i = t.unsafeGetTensorImpl();
  i->set_sizes_and_strides(c10::IntArrayRef(dims, ndim), c10::IntArrayRef(dims + ndim, ndim), offset);
  return wrapped(t);
}

// A tensor over a fresh borrowed storage. `proto` gives dtype and owns the bytes.
static PyObject* out_make(PyObject* proto, uint64_t keys, int64_t offset, int ndim, const int64_t* dims) {
  return wrap_view(borrow_storage(proto), keys, proto, offset, ndim, dims);
}

// Outputs that share memory share a version counter, as views do.
static inline void out_share_version(PyObject* o, PyObject* first) {
  if (!impl_of(o)->is_inference()) impl_of(o)->set_version_counter(impl_of(first)->version_counter());
}

// A tensor over the storage of `first`: an output that shares memory with another output.
static PyObject* out_share(PyObject* first, PyObject* proto, uint64_t keys, int64_t offset,
                           int ndim, const int64_t* dims) {
  PyObject* o = wrap_view(impl_of(first)->unsafe_storage(), keys, proto, offset, ndim, dims);
  out_share_version(o, first);
  return o;
}

// The dtype that an op's argument tells by its number.
static PyObject* dtype_at(int64_t number) {
  return Py_NewRef(reinterpret_cast<PyObject*>(torch::getTHPDtype(static_cast<at::ScalarType>(number))));
}

// A tensor over the memory of `base`, `shift` bytes from its start; unknown to autograd.
static PyObject* tensor_over(PyObject* base, PyObject* proto, uint64_t keys, int64_t shift, int ndim,
                             const int64_t* dims) {
  c10::TensorImpl* b = impl_of(base);
  int64_t bytes = impl_offset(b) * (int64_t)b->dtype().itemsize() + shift;
  return out_share(base, proto, keys, bytes / (int64_t)impl_of(proto)->dtype().itemsize(), ndim, dims);
}

// The same with the metadata of `like`.
static PyObject* tensor_like(PyObject* base, PyObject* like, int64_t shift) {
  std::vector<int64_t> dims(2 * tensor_ndim(like));
  tensor_dims(like, dims.data());
  bool there = impl_of(base)->device() == impl_of(like)->device();
  return tensor_over(base, like, tensor_keys(there ? like : base), shift, tensor_ndim(like), dims.data());
}

// An output that is a view of an input: a real view of today's input, as autograd knows views. `made`: its
// CreationMeta, by which it refuses writes; -1: autograd knows none (detach()); -2: versions are its own, too (.data).
static PyObject* out_view(PyObject* base, PyObject* proto, uint64_t keys, int64_t shift, int ndim,
                          const int64_t* dims, int made) {
  c10::TensorImpl* b = impl_of(base);
  int64_t item = static_cast<int64_t>(b->dtype().itemsize());
  if (made < 0 || b->dtype() != impl_of(proto)->dtype() || b->key_set().raw_repr() != keys || shift % item ||
      autograd_state(b) != PLAIN_TENSOR) {
    PyObject* over = tensor_over(base, proto, keys, shift, ndim, dims);
    if (made == -2 && !impl_of(over)->is_inference()) impl_of(over)->set_version_counter(c10::VariableVersion(0));
    return over;
  }
  at::Tensor t(reinterpret_cast<PyTensor*>(base)->cdata);
  at::Tensor view = t.as_strided(c10::IntArrayRef(dims, ndim), c10::IntArrayRef(dims + ndim, ndim),
                                 impl_offset(b) + shift / item);
  if (auto* mine = torch::autograd::impl::get_view_autograd_meta(view))
    mine->set_creation_meta(static_cast<torch::autograd::CreationMeta>(made));
  return wrapped(view);
}

// By how much a tensor's Python reference count rises while C++ holds references too. A property of
// the torch release: measured at start-up (private.py: self_check).
static int cpp_bump = 1;

static inline int64_t impl_uses(PyObject* o) noexcept {
  return static_cast<int64_t>(reinterpret_cast<PyTensor*>(o)->cdata.use_count());
}

// Does anybody hold this output beyond so many Python references, the table's among them? `grads` is 1
// while a parameter's .grad is it. A C++ reference (a SavedVariable) and a weak reference count, too.
static inline int out_is_held(PyObject* o, int references, int grads) noexcept {
  int64_t uses = impl_uses(o);
  if (uses > 1 + grads || Py_REFCNT(o) > references + (uses > 1 ? cpp_bump : 0)) return 1;
  Py_ssize_t w = Py_TYPE(o)->tp_weaklistoffset;
  return w != 0 && *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(o) + w) != nullptr;
}

// A storage of the table's own: kept, let go of, counted.
static inline void storage_keep(void* s) noexcept {
  c10::raw::intrusive_ptr::incref(static_cast<c10::StorageImpl*>(s));
}
static inline void storage_drop(void* s) noexcept {
  if (s) c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(s));
}
static inline int64_t storage_count(void* s) noexcept {
  return static_cast<int64_t>(c10::raw::intrusive_ptr::use_count(static_cast<c10::StorageImpl*>(s)));
}

static inline int64_t storage_uses(PyObject* o) noexcept {
  return static_cast<int64_t>(impl_of(o)->unsafe_storage().use_count());
}

// A weak reference to the storage: while there is one its address is not given out again.
static PyObject* storage_hold_name(PyObject* o) {
  return handle_new(c10::weak_intrusive_ptr<c10::StorageImpl>(impl_of(o)->unsafe_storage().getWeakStorageImpl()));
}

// Does autograd call Python with its gradient, before it arrives and behind?
static inline int tensor_hooks(PyObject* o) noexcept {
  auto* p = reinterpret_cast<PyTensor*>(o);
  return (p->backward_hooks != nullptr) | (p->post_accumulate_grad_hooks != nullptr) << 1;
}

// Did somebody leave Python attributes on a tensor?
static inline bool tensor_has_attributes(PyObject* o) {
  PyObject** d = _PyObject_GetDictPtr(o);
  return d && *d && PyDict_GET_SIZE(*d);
}

// Take off what a user left on a returned tensor: autograd metadata (grad_fn, .grad,
// requires_grad, hooks), Python attributes, version. Unheld outputs only.
static inline void out_unlearn(PyObject* o) {
  c10::TensorImpl* i = impl_of(o);
  if (C10_UNLIKELY(autograd_meta_of(i) != nullptr)) i->set_autograd_meta(nullptr);
  PyTensor* p = reinterpret_cast<PyTensor*>(o);
  if (C10_UNLIKELY(p->backward_hooks != nullptr)) Py_CLEAR(p->backward_hooks);
  if (C10_UNLIKELY(p->post_accumulate_grad_hooks != nullptr)) Py_CLEAR(p->post_accumulate_grad_hooks);
}
static inline void out_reset(PyObject* o) {
  out_unlearn(o);
  if (C10_UNLIKELY(tensor_has_attributes(o))) PyDict_Clear(*_PyObject_GetDictPtr(o));
}

static inline void out_set_version(PyObject* o, int version) {
  c10::TensorImpl* i = impl_of(o);
  if (!i->is_inference() && static_cast<int>(i->version_counter().current_version()) != version)
    i->set_version_counter(c10::VariableVersion(version));
}

// Move a held output's bytes to ordinary memory; the data pointer of its storage is swapped in
// place, so every view and alias keeps its value. `copy` copies on the right stream.
typedef int (*copy_fn)(void* dst, const void* src, int64_t nbytes, int device);
static void out_rescue(void* held, int device, copy_fn copy) {
  auto* s = static_cast<c10::StorageImpl*>(held);
  int64_t n = static_cast<int64_t>(s->nbytes());
  c10::Allocator* a = c10::GetAllocator(s->device().type());
  c10::DataPtr fresh = a->allocate(n);
  if (n && copy(fresh.get(), storage_base(s), n, device) != 0) throw std::runtime_error("copying a held output failed");
  s->set_data_ptr_noswap(std::move(fresh));
  s->set_allocator(a);
}

// outputs="error": let go of the memory and make every later access raise `message`.
static void out_poison(void* held, const char* message) {
  auto* s = static_cast<c10::StorageImpl*>(held);
  s->set_data_ptr_noswap(c10::DataPtr(nullptr, s->device()));
  s->release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(message));
}

// A detached alias of t: the same storage and metadata as of now, no autograd, no version sharing.
// What a tape or a node keeps, so that later metadata changes cannot reach it.
static PyObject* tensor_alias(PyObject* t) {
  auto impl = impl_of(t)->shallow_copy_and_detach(c10::VariableVersion(0), false);
  return wrapped(at::TensorBase(std::move(impl)));
}

// t's storage goes on over the same bytes without owning them: somebody else looks after them now.
static inline void tensor_disown(PyObject* t) noexcept {
  c10::StorageImpl* s = storage_of(t);
  s->set_data_ptr(c10::DataPtr(storage_base(s), s->device())).release_context();
}

// t's storage lets go of its bytes.
static inline void storage_clear(PyObject* t) noexcept {
  storage_of(t)->set_data_ptr_noswap(c10::DataPtr(nullptr, storage_of(t)->device()));
}

// A tensor over t's whole storage at today's address, owning nothing: what a tape keeps of memory that is not its own.
// The storage of the user's tensor may be given other memory later; the guard holds addresses against addresses.
static PyObject* tensor_fixed(PyObject* t) {
  c10::StorageImpl* s = storage_of(t);
  c10::Storage fixed(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), s->nbytes(),
      c10::DataPtr(storage_base(s), s->device()), nullptr, /*resizable=*/false));
  c10::TensorImpl* i = impl_of(t);
  int64_t dims[2] = {static_cast<int64_t>(s->nbytes() / i->dtype().itemsize()), 1};
  auto keys = i->key_set() - c10::DispatchKeySet({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
  return wrap_view(std::move(fixed), keys.raw_repr(), t, 0, 1, dims);
}

// body() with inference mode on or off. torch's own context manager would leave it so if an interrupt came while it is
// entered or left.
static PyObject* in_inference(bool on, PyObject* body) {
  c10::InferenceMode mode(on);
  return called(body);
}

// --- ambient state ----------------------------------------------------------------------------

// float32 precision settings (TF32 and kin) are a private hash map behind getters that look up three
// keys each, 200 ns for the five that matter. Its entries are all made by Context's constructor and
// only assigned afterwards, so their addresses are taken once.
REACH(PrecisionMap, &at::Context::fp32_precision);

struct Precisions {
  const at::Float32Precision* at[16];
  int n = 0;
  Precisions() {
    for (auto& entry : at::globalContext().*reach(PrecisionMap()))
      if (n < 16) at[n++] = &entry.second;
  }
};

static inline uint64_t precisions_now() noexcept {
  static const Precisions p;
  uint64_t w = 0;
  for (int k = 0; k < p.n; ++k) w = w << 4 | static_cast<uint64_t>(*p.at[k]);
  return w;
}

// The switches of at::Context, as its getters tell them; `flags` and `numbers` leave room for what is the thread's own.
static void switches_ask(uint64_t* flags, uint64_t* numbers) noexcept {
  at::Context& m = at::globalContext();
  const at::Context& c = m;
  uint64_t b = 0;
  int k = 8;
  auto bit = [&](bool v) { b |= static_cast<uint64_t>(v) << k++; };
  bit(c.deterministicAlgorithms());
  bit(c.deterministicAlgorithmsWarnOnly());
  bit(c.deterministicFillUninitializedMemory());
  bit(c.userEnabledCuDNN());
  bit(c.benchmarkCuDNN());
  bit(c.deterministicCuDNN());
  bit(c.userEnabledMkldnn());
  bit(c.deterministicMkldnn());
  bit(c.userEnabledFlashSDP());
  bit(c.userEnabledMemEfficientSDP());
  bit(c.userEnabledMathSDP());
  bit(c.userEnabledCuDNNSDP());
  bit(c.userEnabledOverrideableSDP());
  bit(c.userEnabledFA3SDP());
  bit(c.allowFP16BF16ReductionMathSDP());
  bit(c.allowFP16AccumulationCuBLAS());
  bit(c.userEnabledNNPACK());
  bit(c.allowFP16ReductionCPU());
  k = 32;
  for (at::SDPBackend one : m.sDPPriorityOrder()) b |= (static_cast<uint64_t>(one) & 7) << k, k += 3;
  b |= static_cast<uint64_t>(c._SMCarveout_EXPERIMENTAL().value_or(-1) + 1) << 48;
  *flags = b;
  auto four = [](auto v) { return static_cast<uint64_t>(v) & 15; };
  *numbers = four(c.allowFP16ReductionCuBLAS()) << 24 | four(c.allowBF16ReductionCuBLAS()) << 28 |
             four(m.blasPreferredBackend()) << 32 | four(c.linalgPreferredBackend()) << 36;
}

// The same without asking, while the bytes stand as they did when the getters were asked last: these are twenty calls
// into libtorch at each hit, whose code is long out of the caches there. All that they read lies from the first switch
// to the map of precisions. The GIL guards the copy.
REACH(FirstSwitch, &at::Context::enabled_cudnn);

struct Switches {
  static constexpr size_t MOST = 512;
  const char* at;
  size_t n;
  char known[MOST];
  uint64_t flags, numbers;
  Switches() {
    at::Context& c = at::globalContext();
    at = reinterpret_cast<const char*>(&(c.*reach(FirstSwitch())));
    const char* end = reinterpret_cast<const char*>(&(c.*reach(PrecisionMap())));
    n = end > at && end <= at + MOST ? end - at : 0;  // 0: laid out otherwise, ask each time
    ask();
  }
  void ask() noexcept {
    memcpy(known, at, n);
    switches_ask(&flags, &numbers);
  }
};
static inline const Switches& switches_now() noexcept {
  static Switches s;
  if (C10_UNLIKELY(s.n == 0 || memcmp(s.known, s.at, s.n) != 0)) s.ask();
  return s;
}

// Which GPU is current decides where a function makes its tensors. Set where there are several (cuda_shim.h), else not
// asked.
static int (*gpu_now)() noexcept = nullptr;
static inline int current_gpu() noexcept { return gpu_now ? gpu_now() : 0; }

// Everything ambient that can change what ops do, packed into three words.
static inline void ambient_now(uint64_t* w) noexcept {
  const c10::AutogradState& autograd = c10::AutogradState::get_tls_state();
  // Autocast is on where its key is not excluded: private.py: self_check.
  c10::DispatchKeySet excluded = c10::impl::tls_local_dispatch_key_set().excluded_;
  const Switches& s = switches_now();
  w[0] = s.flags | static_cast<uint64_t>(autograd.get_grad_mode()) |
         static_cast<uint64_t>(autograd.get_inference_mode()) << 1 |
         static_cast<uint64_t>(autograd.get_multithreading_enabled()) << 2 |
         static_cast<uint64_t>(!excluded.has(c10::DispatchKey::AutocastCPU)) << 3 |
         static_cast<uint64_t>(!excluded.has(c10::DispatchKey::AutocastCUDA)) << 4 |
         static_cast<uint64_t>(at::autocast::is_autocast_cache_enabled()) << 5;
  w[1] = s.numbers | static_cast<uint64_t>(at::autocast::get_autocast_dtype(at::kCPU)) |
         static_cast<uint64_t>(at::autocast::get_autocast_dtype(at::kCUDA)) << 8 |
         static_cast<uint64_t>(c10::typeMetaToScalarType(c10::get_default_dtype())) << 16 |
         static_cast<uint64_t>(current_gpu()) << 48;
  w[2] = precisions_now();
}

// How many hooks for saved tensors stand on the thread's stack.
static inline int saved_hooks() noexcept {
  return static_cast<int>(at::SavedTensorDefaultHooks::get_tls_state().stack.size());
}

enum Blocker {
  BLOCK_NONE, BLOCK_DISPATCH_MODE, BLOCK_FUNCTION_MODE, BLOCK_TRANSFORM, BLOCK_CAPTURE, BLOCK_SAVES, BLOCK_TRACE,
  BLOCK_ANOMALY
};

// Keys that a thread includes while something stands between us and the ops; a dispatch mode includes Python's.
static constexpr c10::DispatchKeySet BETWEEN({OBSERVED, c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                                              c10::DispatchKey::Functionalize, c10::DispatchKey::Tracer,
                                              c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});

// Which of them? Asked where there is one.
static int between() noexcept {
  if (c10::impl::TorchDispatchModeTLS::any_modes_set() || c10::impl::tls_is_dispatch_key_included(OBSERVED))
    return BLOCK_DISPATCH_MODE;
  if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
      c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Functionalize))
    return BLOCK_TRANSFORM;
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Tracer) ? BLOCK_TRACE : BLOCK_NONE;
}

// Is something between us and the ops that a recording could not see through?
static inline int ambient_blocker() noexcept {
  if (C10_UNLIKELY((c10::impl::tls_local_dispatch_key_set().included_ & BETWEEN).raw_repr() != 0)) {
    int which = between();
    if (which != BLOCK_NONE) return which;
  }
  if (at::impl::PythonTorchFunctionTLS::stack_len() > 0) return BLOCK_FUNCTION_MODE;
  if (torch::autograd::AnomalyMode::is_enabled()) return BLOCK_ANOMALY;
  if (c10::AutogradState::get_tls_state().get_grad_mode()) {
    const auto& hooks = at::SavedTensorDefaultHooks::get_tls_state();
    if (!hooks.stack.empty() || hooks.disabled_error_message) return BLOCK_SAVES;
  }
  return BLOCK_NONE;
}

}  // namespace cgt
