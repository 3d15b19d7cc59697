// together.cc: finds the kernels of a check, and launches them.
#include "cuda/kernels/together.h"

#include <stdexcept>
#include <string>

namespace jax_ring::gpu {

#define JAX_RING_DECLARE(name, element) extern const TogetherTable together_##name;
JAX_RING_FOR_EACH_DTYPE(JAX_RING_DECLARE)
#undef JAX_RING_DECLARE

namespace {

const TogetherTable* const kTables[] = {
#define JAX_RING_TABLE(name, element) &together_##name,
    JAX_RING_FOR_EACH_DTYPE(JAX_RING_TABLE)
#undef JAX_RING_TABLE
};

const void* kernel_of(const KernelKey& key) {
  return reinterpret_cast<const void*>(kTables[static_cast<int>(key.dtype)]->of(key));
}

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

}  // namespace

cudaError_t launch_together(const KernelKey& key, const Call* calls, int num_ranks, int num_ctas, cudaStream_t stream) {
  if (kernel_of(key) == nullptr) return cudaErrorInvalidDeviceFunction;
  void* arguments[] = {&calls, &num_ctas};
  return cudaLaunchCooperativeKernel(kernel_of(key), dim3(num_ranks * num_ctas), dim3(kThreadsPerCta), arguments, 0,
                                     stream);
}

int most_teams_at_once(const KernelKey& key, int device) {
  int per_multiprocessor = 0, multiprocessors = 0;
  check(cudaSetDevice(device), "cudaSetDevice");
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel_of(key), kThreadsPerCta, 0),
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return per_multiprocessor * multiprocessors;
}

}  // namespace jax_ring::gpu
