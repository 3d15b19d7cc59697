// kernels.cc: finds the kernel for a type and an algorithm.
#include "cuda/kernels/kernels.h"

#include <atomic>

#include "cuda/kernels/kernel_table.h"

namespace jax_ring::gpu {

#define JAX_RING_DECLARE(name, element) extern const KernelTable kernels_##name;
JAX_RING_FOR_EACH_DTYPE(JAX_RING_DECLARE)
#undef JAX_RING_DECLARE

namespace {

const KernelTable* const kTables[] = {
#define JAX_RING_TABLE(name, element) &kernels_##name,
    JAX_RING_FOR_EACH_DTYPE(JAX_RING_TABLE)
#undef JAX_RING_TABLE
};

Kernel kernel_of(const KernelKey& key) { return kTables[static_cast<int>(key.dtype)]->of(key); }

// By device: whether its kernels wait for their stream's earlier ones themselves. Code for GPUs before Hopper does not,
// even if the driver compiles it for a later one.
constexpr int kMaxDevices = 64;
std::atomic<bool> kernels_await_stream[kMaxDevices];

}  // namespace

bool has_kernel(const KernelKey& key) { return kernel_of(key) != nullptr; }

cudaError_t launch(const KernelKey& key, const Call& call, cudaStream_t stream) {
  const Kernel kernel = kernel_of(key);
  if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device)) return error;
  // Programmatic dependent launch: the GPU prepares the kernel while the stream's earlier ones end. Ours trigger no
  // early launch themselves: CTAs that wait in place of those of another rank on this GPU would be a deadlock.
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(num_teams(call));
  config.blockDim = dim3(kThreadsPerCta);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = device < kMaxDevices && kernels_await_stream[device].load(std::memory_order_relaxed) ? 1 : 0;
  void* arguments[] = {const_cast<Call*>(&call)};
  return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments);
}

std::vector<const void*> built_kernels() {
  std::vector<const void*> kernels;
  for (const KernelTable* table : kTables) {
    for (const auto* by_op : {&table->kernel, &table->along_tree}) {
      for (const auto& by_algorithm : *by_op) {
        for (const Kernel kernel : by_algorithm) {
          if (kernel != nullptr) kernels.push_back(reinterpret_cast<const void*>(kernel));
        }
      }
    }
  }
  return kernels;
}

cudaError_t load_kernels() {
  bool all_await_stream = true;
  for (const void* kernel : built_kernels()) {
    cudaFuncAttributes attributes;
    if (const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel)) return error;
    all_await_stream = all_await_stream && attributes.ptxVersion >= 90;
  }
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device)) return error;
  if (device < kMaxDevices) kernels_await_stream[device].store(all_await_stream, std::memory_order_relaxed);
  return cudaSuccess;
}

}  // namespace jax_ring::gpu
