// kernels.h: launches the kernels of one rank on its GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "cuda/kernels/call.h"

namespace jax_ring::gpu {

// Whether this build has the kernel. A development build may omit some types (JAX_RING_CUDA_DTYPES).
bool has_kernel(const KernelKey& key);

// Runs the call on the stream's device.
cudaError_t launch(const KernelKey& key, const Call& call, cudaStream_t stream);

// This build's kernels, in the CUDA runtime's terms: for questions about their occupancy.
std::vector<const void*> built_kernels();

// Loads all kernels on the current device. Must precede the first launch: loading a kernel later may wait for a running
// kernel, and that may wait for this rank.
cudaError_t load_kernels();

}  // namespace jax_ring::gpu
