// gpus.h: what the engine needs from GPUs: memory that peers can reach, and launches.
#pragma once

#include <memory>

#include "cuda/call.h"
#include "cuda/peer_memory.h"

namespace jax_ring::gpu {

// A cudaStream_t. The engine itself is built without CUDA's headers.
using Stream = void*;

// An interface: the kernels and the CUDA runtime are in a module of their own, which not every build has.
class Gpus : public PeerMemory {
 public:
  // Whether this build has the kernel. A build for development may leave out some types (JAX_RING_CUDA_DTYPES).
  virtual bool has_kernel(const KernelKey& key) const = 0;

  // Runs the call on the stream's device. Throws std::runtime_error if it cannot be launched.
  virtual void launch(const KernelKey& key, const Call& call, Stream stream) = 0;
};

// The GPUs of this machine, through the CUDA runtime. In the module of the kernels.
std::unique_ptr<Gpus> cuda_gpus();

}  // namespace jax_ring::gpu
