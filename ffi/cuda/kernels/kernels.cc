// kernels.cc: finds the kernel for a type and an algorithm.
#include "cuda/kernels/kernels.h"

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

}  // namespace

bool has_kernel(const KernelKey& key) { return kernel_of(key) != nullptr; }

cudaError_t launch(const KernelKey& key, const Call& call, cudaStream_t stream) {
  const Kernel kernel = kernel_of(key);
  if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
  void* arguments[] = {const_cast<Call*>(&call)};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(num_teams(call)), dim3(kThreadsPerCta), arguments,
                          0, stream);
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
  for (const void* kernel : built_kernels()) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace jax_ring::gpu
