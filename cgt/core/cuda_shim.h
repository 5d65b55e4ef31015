// PyTorch's CUDA side: current stream, pool routing, our own generator state.
//
// With a CPU torch (CGT_WITH_CUDA 0) every function is here and says so by its result, so that the
// same chapters compile. All `#if` on the torch release are in this file.
#pragma once
#include "tape_shim.h"

#ifndef CGT_WITH_CUDA
#define CGT_WITH_CUDA 0
#endif
#ifndef CGT_TORCH_MINOR
#define CGT_TORCH_MINOR 11
#endif

#if CGT_WITH_CUDA
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace cgt {

#if CGT_WITH_CUDA

static inline int cuda_built() { return 1; }

static inline int cuda_current_device() noexcept { return c10::cuda::current_device(); }

static inline void* cuda_current_stream(int device) noexcept {
  return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device)).stream();
}

// A thread that never touched CUDA has no current context; the driver needs one. Once per thread.
static inline void cuda_thread_ready(int device) noexcept {
  thread_local int ready = -1;
  if (ready != device) {
    c10::cuda::set_device(static_cast<c10::DeviceIndex>(c10::cuda::current_device()), true);
    ready = device;
  }
}

// Route allocations made on `stream`, by any thread (autograd's worker too), to the pool; and those
// on streams that the function forked from it, which are then `capturing` as well.
typedef int (*stream_test)(void* stream);
static int cuda_pool_begin(int device, unsigned long long hi, unsigned long long lo, void* stream,
                           stream_test capturing) noexcept {
  try {
    cudaStream_t s = static_cast<cudaStream_t>(stream);
    c10::cuda::CUDACachingAllocator::beginAllocateToPool(
        static_cast<c10::DeviceIndex>(device), {hi, lo},
        [s, capturing](cudaStream_t other) { return other == s || capturing(other); });
    return 0;
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
    return -1;
  }
}

static void cuda_pool_end(int device, unsigned long long hi, unsigned long long lo) noexcept {
  c10::cuda::CUDACachingAllocator::endAllocateToPool(static_cast<c10::DeviceIndex>(device),
                                                     {hi, lo});
}

static void cuda_pool_release(int device, unsigned long long hi, unsigned long long lo) noexcept {
  try {
    c10::cuda::CUDACachingAllocator::releasePool(static_cast<c10::DeviceIndex>(device), {hi, lo});
  } catch (const std::exception&) {
    // Only at exit, when the allocator is gone before us: there is nothing left to give back.
  }
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

// --- randomness --------------------------------------------------------------------------------
// During a capture a generator's state is swapped for one of ours, whose seed and offset live in
// two device words. RNG kernels then read the words; a replay writes them by a patched node.

struct GeneratorSwap {
  at::Generator generator;
  c10::intrusive_ptr<c10::GeneratorImpl> before;
  c10::intrusive_ptr<at::CUDAGeneratorState> ours;
  unsigned long long capture_id;
};

static at::CUDAGeneratorImpl* cuda_generator(const at::Generator& g) {
  return static_cast<at::CUDAGeneratorImpl*>(g.unsafeGetGeneratorImpl());
}

static void* generator_swap(PyObject* generator, PyObject* seed_word, PyObject* offset_word,
                            unsigned long long capture_id) noexcept {
  try {
    at::Generator g = reinterpret_cast<PyGenerator*>(generator)->cdata;
    auto ours = c10::make_intrusive<at::CUDAGeneratorState>();
    const at::TensorBase& seed = reinterpret_cast<PyTensor*>(seed_word)->cdata;
    const at::TensorBase& offset = reinterpret_cast<PyTensor*>(offset_word)->cdata;
#if CGT_TORCH_MINOR >= 13
    auto capture = c10::make_intrusive<at::CUDAGeneratorCaptureState>();
    capture->rng_state_seed_extragraph_ = seed;
    capture->rng_state_offset_extragraph_ = offset;
    ours->capture_states_[capture_id] = std::move(capture);
#else
    ours->capturing_ = true;
    ours->seed_extragraph_ = seed;
    ours->offset_extragraph_ = offset;
#endif
    auto* swap = new GeneratorSwap{g, cuda_generator(g)->graphsafe_get_state(), ours, capture_id};
    cuda_generator(g)->graphsafe_set_state(
        c10::make_intrusive<at::CUDAGeneratorImpl>(g.device().index(), ours));
    return swap;
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
    return nullptr;
  }
}

// Put the user's state back; returns how far one run advances the generator.
static uint64_t generator_restore(void* handle) noexcept {
  auto* swap = static_cast<GeneratorSwap*>(handle);
  uint64_t advance = 0;
#if CGT_TORCH_MINOR >= 13
  auto at = swap->ours->capture_states_.find(swap->capture_id);
  if (at != swap->ours->capture_states_.end()) advance = at->second->offset_intragraph_;
#else
  advance = swap->ours->offset_intragraph_;
  swap->ours->capturing_ = false;
#endif
  cuda_generator(swap->generator)->graphsafe_set_state(swap->before);
  delete swap;
  return advance;
}

// Seed and offset as of now, and advance the generator as eager would.
static inline int generator_take(PyObject* generator, uint64_t advance, uint64_t* seed,
                                 uint64_t* offset) noexcept {
  try {
    at::Generator& g = reinterpret_cast<PyGenerator*>(generator)->cdata;
    std::lock_guard<std::mutex> lock(g.mutex());
    auto now = cuda_generator(g)->philox_engine_inputs(advance);
    *seed = now.first;
    *offset = now.second;
    return 0;
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
    return -1;
  }
}

#else  // CPU torch: no CUDA tensor can reach these.

static inline int cuda_built() { return 0; }
static inline int cuda_current_device() noexcept { return -1; }
static inline void* cuda_current_stream(int) noexcept { return nullptr; }
static inline void cuda_thread_ready(int) noexcept {}
static int cuda_absent() {
  PyErr_SetString(PyExc_RuntimeError, "cgt was built against a CPU torch");
  return -1;
}
typedef int (*stream_test)(void* stream);
static int cuda_pool_begin(int, unsigned long long, unsigned long long, void*,
                           stream_test) noexcept {
  return cuda_absent();
}
static void cuda_pool_end(int, unsigned long long, unsigned long long) noexcept {}
static void cuda_pool_release(int, unsigned long long, unsigned long long) noexcept {}
static void cuda_mark(int, int) noexcept {}
static void* generator_swap(PyObject*, PyObject*, PyObject*, unsigned long long) noexcept {
  cuda_absent();
  return nullptr;
}
static uint64_t generator_restore(void*) noexcept { return 0; }
static inline int generator_take(PyObject*, uint64_t, uint64_t*, uint64_t*) noexcept {
  return cuda_absent();
}

#endif

}  // namespace cgt
