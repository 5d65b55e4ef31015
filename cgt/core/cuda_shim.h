// PyTorch's CUDA side: current stream, pool routing, our own generator state.
//
// With a CPU torch (CGT_WITH_CUDA 0) every function is here and says so by its result, so that the same chapters
// compile. `#if`s on the torch release are here and, where nodes of autograd are made, in autograd_shim.h.
#pragma once
#include "tape_shim.h"

#if CGT_WITH_CUDA
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace cgt {

#if CGT_WITH_CUDA

static inline int cuda_current_device() noexcept { return c10::cuda::current_device(); }

static inline void* cuda_current_stream(int device) noexcept {
  return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device)).stream();
}

// Is the current stream one of PyTorch's, which last as long as the process? Others' have their handle for an id.
static inline bool cuda_stream_lasts(int device) noexcept {
  const auto now = c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device));
  return now.id() == 0 || now.id() != reinterpret_cast<c10::StreamId>(now.stream());
}

// CUDA is there. How many GPUs are?
static inline int cuda_see_gpus() noexcept {
  if (!gpu_now && c10::cuda::device_count() > 1) gpu_now = cuda_current_device;
  return gpu_now != nullptr;
}

// The driver works in the context of the current GPU where it is not told which (its default stream, memory, a graph's
// copies). Any may be current when a call comes, and stays so for all that the user's code does: this makes another one
// so for a few calls into the driver.
class OnDevice {
  int before = -1;

 public:
  OnDevice() = default;
  OnDevice(OnDevice&& other) noexcept : before(std::exchange(other.before, -1)) {}
  OnDevice& operator=(OnDevice&& other) noexcept {
    std::swap(before, other.before);
    return *this;
  }
  ~OnDevice() {
    if (before >= 0) c10::cuda::set_device(static_cast<c10::DeviceIndex>(before));
  }
  void go(int device) noexcept {
    const int now = gpu_now ? gpu_now() : device;
    if (now == device) return;
    c10::cuda::set_device(static_cast<c10::DeviceIndex>(device));
    before = now;
  }
};
static inline OnDevice on_device(int device) noexcept {
  OnDevice there;
  there.go(device);
  return there;
}

// The device's current stream from now on; the current device stays. (Python's torch.cuda.set_stream changes both.)
static inline void cuda_set_stream(int64_t id, int device) {
  c10::cuda::setCurrentCUDAStream(
      c10::cuda::CUDAStream::unpack3(id, static_cast<c10::DeviceIndex>(device), c10::DeviceType::CUDA));
}

// A thread that never touched CUDA has no current context; the driver needs one. Once per thread.
static inline void cuda_thread_ready(int device) noexcept {
  thread_local int ready = -1;
  if (ready != device) {
    c10::cuda::set_device(static_cast<c10::DeviceIndex>(c10::cuda::current_device()), true);
    ready = device;
  }
}

// A private pool of the caching allocator, and which of its memory lives in nodes of the tree. Between
// recordings that memory is allocated but owned by no DataPtr: `ours`.
struct CudaPool {
  c10::DeviceIndex device;
  c10::MempoolId_t id;
  std::shared_ptr<c10::cuda::CUDACachingAllocator::AllocatorState> empty;
  std::unordered_set<void*> ours;
  int nodes;     // that were recorded in it
  bool retired;  // no more recordings: somebody else owns memory in it
  bool settled;  // nothing that a recording freed waits for another stream
};

static CudaPool* cuda_pool_new(int device, unsigned long long hi, unsigned long long lo) {
  namespace alloc = c10::cuda::CUDACachingAllocator;
  auto d = static_cast<c10::DeviceIndex>(device);
  alloc::createOrIncrefPool(d, {hi, lo});
  try {
    return new CudaPool{d, {hi, lo}, alloc::getCheckpointState(d, {hi, lo}), {}, 0, false, true};
  } catch (...) {
    alloc::releasePool(d, {hi, lo});
    throw;
  }
}

// Does the allocator know of a capture under way, of anybody's, on any GPU? To empty a pool is to wait, which it
// refuses then: it is told to empty one in which nothing ever was. (A name that was refused stays there until PyTorch's
// cache is emptied.)
static bool cuda_captures() noexcept {
  namespace alloc = c10::cuda::CUDACachingAllocator;
  static unsigned long long asked = 0;
  c10::MempoolId_t id{~0ull, ++asked};
  try {
    for (c10::DeviceIndex d = 0; d < c10::cuda::device_count(); d++) {
      alloc::createOrIncrefPool(d, id);
      alloc::releasePool(d, id);
    }
    alloc::emptyCache(id);
    return false;
  } catch (const std::exception&) {
    return true;
  }
}

// Pools that no node needs, nor will a recording. To wait for a device, or to free its memory, breaks a capture of
// another thread's: their memory goes back when nobody captures.
static std::vector<CudaPool*> cuda_pools_over;

static void cuda_pools_drop() noexcept {
  if (cuda_pools_over.empty() || cuda_captures()) return;
  for (CudaPool* p : cuda_pools_over) {
    try {
      // Expandable segments are unmapped when their own stream is done; a rescue may still read them on another one.
      c10::cuda::CUDAGuard guard(p->device);
      c10::cuda::device_synchronize();
      for (void* at : p->ours) c10::cuda::CUDACachingAllocator::raw_delete(at);
      c10::cuda::CUDACachingAllocator::releasePool(p->device, p->id);
      c10::cuda::CUDACachingAllocator::emptyCache(p->id);
    } catch (const std::exception&) {
      // Only at exit, when the allocator is gone before us: there is nothing left to give back.
    }
    delete p;
  }
  cuda_pools_over.clear();
}

static void cuda_pool_drop(CudaPool* p) noexcept {
  if (p->nodes || !p->retired) return;
  cuda_pools_over.push_back(p);
  cuda_pools_drop();
}

static void cuda_pool_retire(CudaPool* p) noexcept {
  p->retired = true;
  cuda_pool_drop(p);
}

static void cuda_pool_count(CudaPool* p, int by) noexcept {
  p->nodes += by;
  if (by < 0) cuda_pool_drop(p);
}

static int cuda_pool_nodes(CudaPool* p) noexcept { return p->nodes; }

// What a recording freed while another stream used it (Tensor.record_stream, NCCL's coalesced work) is free when that
// stream is through, which no capture can ask. Nothing of the pool runs now: let the allocator ask.
static void cuda_pool_settle(CudaPool* p) {
  namespace alloc = c10::cuda::CUDACachingAllocator;
  c10::cuda::CUDAGuard guard(p->device);
  void* at = alloc::raw_alloc(1);  // records the events that were put off
  c10::cuda::device_synchronize();
  alloc::raw_delete(at);
  alloc::raw_delete(alloc::raw_alloc(1));  // and looks at them
  p->settled = true;
}

// Put the pool into a node's state (NULL: empty), `live` addresses allocated, what died since free.
// False: somebody else owns memory of the pool, nothing was changed.
static bool cuda_pool_restore(CudaPool* p, void* state, const std::vector<void*>& live) {
  namespace alloc = c10::cuda::CUDACachingAllocator;
  if (!p->settled) cuda_pool_settle(p);
  if (!alloc::checkPoolLiveAllocations(p->device, p->id, p->ours)) return false;
  std::unordered_set<void*> keep(live.begin(), live.end());
  auto to = state ? *static_cast<std::shared_ptr<alloc::AllocatorState>*>(state) : p->empty;
  auto delta = alloc::setCheckpointPoolState(p->device, to);
  p->ours.clear();
  for (auto& data : delta.dataptrs_allocd)
    if (keep.count(data.get())) {
      p->ours.insert(data.get());
      data.release_context();
    }
  return true;  // the rest of delta.dataptrs_allocd is freed here
}

// Free memory of the pool that no node will need behind the recording under way.
static void cuda_pool_spend(CudaPool* p, void* at) {
  if (p->ours.erase(at) == 0) return;  // of a pool that was given up
  c10::cuda::CUDACachingAllocator::raw_delete(at);
}

// The pool's state after a recording that added `made` to what restore left. False, and there is none, if anything else
// was allocated since.
static bool cuda_pool_checkpoint(CudaPool* p, const std::vector<void*>& made, void** state) {
  namespace alloc = c10::cuda::CUDACachingAllocator;
  std::unordered_set<void*> all(p->ours);
  all.insert(made.begin(), made.end());
  if (!alloc::checkPoolLiveAllocations(p->device, p->id, all)) return false;
  std::shared_ptr<alloc::AllocatorState> now;
  try {
    now = alloc::getCheckpointState(p->device, p->id);
  } catch (const c10::Error&) {  // a block waits for events
    cuda_pool_settle(p);
    now = alloc::getCheckpointState(p->device, p->id);
  }
  p->settled = true;
  *state = new std::shared_ptr<alloc::AllocatorState>(std::move(now));
  p->ours = std::move(all);
  return true;
}

// Was the storage that begins at this address allocated in the recording under way? Walks the pool.
static bool cuda_pool_made(CudaPool* p, void* at) {
  if (p->ours.count(at)) return false;
  auto address = reinterpret_cast<size_t>(at);
  for (const auto& segment : c10::cuda::CUDACachingAllocator::snapshot(p->id).segments)
    if (segment.owner_private_pool_id == p->id && address - segment.address < segment.total_size) return true;
  return false;
}

// What is free of the pool, a list: (address, bytes, is its segment a small one?, is it of this stream?). (PyTorch's
// own torch.cuda.memory_snapshot makes dicts of all that was ever traced, too.)
static PyObject* cuda_pool_free(CudaPool* p, void* stream) {
  py::list found;
  for (const auto& segment : c10::cuda::CUDACachingAllocator::snapshot(p->id, false).segments) {
    if (segment.owner_private_pool_id != p->id || segment.device != p->device) continue;
    size_t at = segment.address;
    for (const auto& block : segment.blocks) {
      if (!block.active) found.append(py::make_tuple(at, block.size, !segment.is_large, segment.stream == stream));
      at += block.size;
    }
  }
  return found.release().ptr();
}

// Where each allocation of a device begins: a set.
static PyObject* cuda_allocations(int device) {
  py::set found;
  for (const auto& segment : c10::cuda::CUDACachingAllocator::snapshot().segments) {
    size_t at = segment.address;
    for (const auto& block : segment.blocks) {
      if (block.allocated && segment.device == device) found.add(at);
      at += block.size;
    }
  }
  return found.release().ptr();
}

static void cuda_state_free(void* state) noexcept {
  delete static_cast<std::shared_ptr<c10::cuda::CUDACachingAllocator::AllocatorState>*>(state);
}

static void cuda_pool_id(CudaPool* p, unsigned long long* id) noexcept {
  id[0] = p->id.first;
  id[1] = p->id.second;
}

// Route allocations made on `stream`, by any thread (autograd's worker too), to the pool; and those
// on streams that the function forked from it, which are then `joined` as well.
typedef int (*stream_test)(void* stream);
static void cuda_pool_begin(CudaPool* p, void* stream, stream_test joined) {
  cudaStream_t s = static_cast<cudaStream_t>(stream);
  c10::cuda::CUDACachingAllocator::beginAllocateToPool(
      p->device, p->id, [s, joined](cudaStream_t other) { return other == s || joined(other); });
  p->settled = false;
}

// Stop routing. The routing held the pool once more; it is let go, since cuda_pool_new holds it.
static void cuda_pool_end(CudaPool* p) noexcept {
  c10::cuda::CUDACachingAllocator::endAllocateToPool(p->device, p->id);
  c10::cuda::CUDACachingAllocator::releasePool(p->device, p->id);
}

// From 2.13 on the allocator wants to know that a real capture runs, not only a routed pool.
static void cuda_mark(int device, int begin) noexcept {
#if CGT_TORCH_MINOR >= 13
  if (begin)
    c10::cuda::CUDACachingAllocator::markCaptureBegin(static_cast<c10::DeviceIndex>(device));
  else
    c10::cuda::CUDACachingAllocator::markCaptureEnd(static_cast<c10::DeviceIndex>(device));
#else
  (void)device;
  (void)begin;
#endif
}

// --- cuDNN's dropout -----------------------------------------------------------------------------
// The dropout between recurrent layers draws from a state in a buffer of PyTorch's, one per GPU, that every such layer
// moves on. After the generator's seed was set the next one fills another buffer; a flag of the generator's says so,
// and a recording is for one buffer. PyTorch shows neither: the flag is read past its access, and who makes a buffer is
// counted on its way to the backend.

static at::CUDAGeneratorImpl* cuda_generator(const at::Generator& g) {
  return static_cast<at::CUDAGeneratorImpl*>(g.unsafeGetGeneratorImpl());
}

static std::atomic<int64_t> dropout_buffers{1};

REACH(KeepsDropout, &at::CUDAGeneratorImpl::no_reset_rnn_state_);

static std::atomic_flag& keeps_dropout(int device) {
  const c10::Device gpu(c10::kCUDA, static_cast<c10::DeviceIndex>(device));
  return cuda_generator(at::globalContext().defaultGenerator(gpu))->*reach(KeepsDropout());
}

// A number for the buffer that the next layer will use, or 0: it makes another one.
static int64_t cuda_dropout_now(int device) noexcept {
  auto& flag = keeps_dropout(device);
  if (flag.test_and_set()) return dropout_buffers;
  flag.clear();
  return 0;
}

// The layer under way made no buffer after all: the next one will.
static void cuda_dropout_undo(int device) noexcept { keeps_dropout(device).clear(); }

static void dropout_buffer_made(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  dropout_buffers++;
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
}

// Once, at import. (Inference mode passes it by: see node_why.)
static void cuda_dropout_watch() {
  static auto registered = c10::Dispatcher::singleton().registerImpl(
      {"aten::_cudnn_init_dropout_state", ""}, c10::DispatchKey::ADInplaceOrView,
      c10::KernelFunction::makeFromBoxedFunction<&dropout_buffer_made>(), std::nullopt, nullptr, "cgt");
}

// --- randomness --------------------------------------------------------------------------------
// During a capture a generator's state is swapped for one of ours, whose seed and offset live in
// two device words. RNG kernels then read the words; a replay writes them by a patched node.

struct GeneratorSwap {
  at::Generator generator;
  c10::intrusive_ptr<c10::GeneratorImpl> before;
  c10::intrusive_ptr<at::CUDAGeneratorState> ours;
  unsigned long long capture_id;
  const void* words;   // the recording's own: a state that is set may have others read
  uint64_t since = 0;  // where the words that are read now were set
  bool drew = false;   // did kernels read its own? A state that is set takes back how far they moved it
};

// What a capture's kernels are given. From 2.12 on each capture has one, and NULL says that it has none.
#if CGT_TORCH_MINOR >= 12
using Capture = at::CUDAGeneratorCaptureState;
static Capture* capture_of(GeneratorSwap* swap) {
  auto at = swap->ours->capture_states_.find(swap->capture_id);
  return at == swap->ours->capture_states_.end() ? nullptr : at->second.get();
}
static at::TensorBase& seed_of(Capture* capture) { return capture->rng_state_seed_extragraph_; }
static at::TensorBase& offset_of(Capture* capture) { return capture->rng_state_offset_extragraph_; }
#else
using Capture = at::CUDAGeneratorState;
static Capture* capture_of(GeneratorSwap* swap) { return swap->ours.get(); }
static at::TensorBase& seed_of(Capture* capture) { return capture->seed_extragraph_; }
static at::TensorBase& offset_of(Capture* capture) { return capture->offset_extragraph_; }
#endif

static bool generator_draws(GeneratorSwap* swap) {
  Capture* now = capture_of(swap);
  if (!now || swap->drew) return swap->drew;
  return seed_of(now).const_data_ptr() == swap->words && now->offset_intragraph_ > swap->since;
}

static void* generator_swap(PyObject* generator, PyObject* seed_word, PyObject* offset_word,
                            unsigned long long capture_id) {
  at::Generator g = reinterpret_cast<PyGenerator*>(generator)->cdata;
  auto ours = c10::make_intrusive<at::CUDAGeneratorState>();
  const at::TensorBase& seed = reinterpret_cast<PyTensor*>(seed_word)->cdata;
#if CGT_TORCH_MINOR >= 12
  ours->capture_states_[capture_id] = c10::make_intrusive<Capture>();
#else
  ours->capturing_ = true;
#endif
  auto* swap =
      new GeneratorSwap{g, cuda_generator(g)->graphsafe_get_state(), ours, capture_id, seed.const_data_ptr()};
  seed_of(capture_of(swap)) = seed;
  offset_of(capture_of(swap)) = reinterpret_cast<PyTensor*>(offset_word)->cdata;
  cuda_generator(g)->graphsafe_set_state(c10::make_intrusive<at::CUDAGeneratorImpl>(g.device().index(), ours));
  return swap;
}

// Put the user's state back; returns how far one run advances the generator. `drew`: do its kernels read the words?
static uint64_t generator_restore(void* handle, int* drew) noexcept {
  auto* swap = static_cast<GeneratorSwap*>(handle);
  Capture* now = capture_of(swap);
  uint64_t advance = now ? now->offset_intragraph_ : 0;
  *drew = generator_draws(swap);
#if CGT_TORCH_MINOR < 12
  swap->ours->capturing_ = false;
#endif
  cuda_generator(swap->generator)->graphsafe_set_state(swap->before);
  delete swap;
  return advance;
}

// Another capture goes on with the same recording.
static void generator_follow(void* handle, unsigned long long capture_id) noexcept {
  auto* swap = static_cast<GeneratorSwap*>(handle);
#if CGT_TORCH_MINOR >= 12
  auto& states = swap->ours->capture_states_;
  auto at = states.find(swap->capture_id);
  auto state = at->second;
  states.erase(at);
  states[capture_id] = std::move(state);
#endif
  swap->capture_id = capture_id;
}

// How far the recording has moved the generator, counted from the words that its kernels read now.
static uint64_t generator_moved(void* handle) noexcept {
  return capture_of(static_cast<GeneratorSwap*>(handle))->offset_intragraph_;
}

// Kernels recorded from here on read these words, and count from `moved`: a state is set.
static void generator_point(void* handle, PyObject* seed_word, PyObject* offset_word, uint64_t moved) noexcept {
  auto* swap = static_cast<GeneratorSwap*>(handle);
  swap->drew = generator_draws(swap);
  swap->since = moved;
  Capture* now = capture_of(swap);
  seed_of(now) = reinterpret_cast<PyTensor*>(seed_word)->cdata;
  offset_of(now) = reinterpret_cast<PyTensor*>(offset_word)->cdata;
  now->offset_intragraph_ = moved;
}

// Seed and offset as of now, and advance the generator as eager would.
static inline void generator_take(PyObject* generator, uint64_t advance, uint64_t* seed, uint64_t* offset) {
  at::Generator& g = reinterpret_cast<PyGenerator*>(generator)->cdata;
  std::lock_guard<std::mutex> lock(g.mutex());
  auto now = cuda_generator(g)->philox_engine_inputs(advance);
  *seed = now.first;
  *offset = now.second;
}

// What was taken was not needed: unless somebody drew since, the generator is where it was.
static inline void generator_give_back(PyObject* generator, uint64_t advance, uint64_t seed, uint64_t offset) noexcept {
  try {
    at::Generator& g = reinterpret_cast<PyGenerator*>(generator)->cdata;
    std::lock_guard<std::mutex> lock(g.mutex());
    auto now = cuda_generator(g)->philox_engine_inputs(0);
    if (now.first == seed && now.second == offset + (advance + 3) / 4 * 4)
      cuda_generator(g)->set_philox_offset_per_thread(offset);
  } catch (...) {  // a capture of somebody's own, where it is not ours to move: its numbers are skipped
    raised();
    PyErr_WriteUnraisable(generator);
  }
}

#else  // CPU torch: no CUDA tensor can reach these.

static inline int cuda_current_device() noexcept { return -1; }
static inline void* cuda_current_stream(int) noexcept { return nullptr; }
static inline bool cuda_stream_lasts(int) noexcept { return true; }
static inline int cuda_see_gpus() noexcept { return 0; }
struct OnDevice {
  void go(int) noexcept {}
};
static inline OnDevice on_device(int) noexcept { return {}; }
static inline void cuda_thread_ready(int) noexcept {}
[[noreturn]] static void cuda_absent() { throw std::runtime_error("cgt was built against a CPU torch"); }
static inline void cuda_set_stream(int64_t, int) { cuda_absent(); }
typedef int (*stream_test)(void* stream);
struct CudaPool;
static void cuda_pool_begin(CudaPool*, void*, stream_test) { cuda_absent(); }
static void cuda_pool_end(CudaPool*) noexcept {}
static CudaPool* cuda_pool_new(int, unsigned long long, unsigned long long) { cuda_absent(); }
static void cuda_pools_drop() noexcept {}
static void cuda_pool_retire(CudaPool*) noexcept {}
static void cuda_pool_count(CudaPool*, int) noexcept {}
static int cuda_pool_nodes(CudaPool*) noexcept { return 0; }
static bool cuda_pool_restore(CudaPool*, void*, const std::vector<void*>&) { cuda_absent(); }
static void cuda_pool_spend(CudaPool*, void*) { cuda_absent(); }
static bool cuda_pool_checkpoint(CudaPool*, const std::vector<void*>&, void**) { cuda_absent(); }
static bool cuda_pool_made(CudaPool*, void*) { return false; }
static PyObject* cuda_pool_free(CudaPool*, void*) { return py::list().release().ptr(); }
static PyObject* cuda_allocations(int) { return py::set().release().ptr(); }
static int64_t cuda_dropout_now(int) noexcept { return 1; }
static void cuda_dropout_undo(int) noexcept {}
static void cuda_dropout_watch() {}
static void cuda_state_free(void*) noexcept {}
static void cuda_pool_id(CudaPool*, unsigned long long*) noexcept {}
static void cuda_mark(int, int) noexcept {}
static void* generator_swap(PyObject*, PyObject*, PyObject*, unsigned long long) { cuda_absent(); }
static uint64_t generator_restore(void*, int*) noexcept { return 0; }
static uint64_t generator_moved(void*) noexcept { return 0; }
static void generator_point(void*, PyObject*, PyObject*, uint64_t) noexcept {}
static inline void generator_give_back(PyObject*, uint64_t, uint64_t, uint64_t) noexcept {}
static void generator_follow(void*, unsigned long long) noexcept {}
static inline void generator_take(PyObject*, uint64_t, uint64_t*, uint64_t*) { cuda_absent(); }

#endif

}  // namespace cgt
