// gpus.h: the GPU services that the engine needs: memory that peers can reach, and launches.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cuda/kernels/call.h"
#include "cuda/runtime/peer_memory.h"

namespace jax_ring::gpu {

// A cudaStream_t. The engine itself is built without CUDA's headers.
using Stream = void*;

// Identifies a GPU on its host, to all processes.
struct Identity {
  std::string bus_id;  // of PCI: the same for all MIG instances of a GPU
  std::string uuid;    // 32 hexadecimal digits
};

// An interface: the kernels and the CUDA runtime are in a separate module, which not every build has.
class Gpus : public PeerMemory {
 public:
  // The name of the capsule that brings them to the other module. One of another name is refused.
  static constexpr const char* kCapsule = "jax_ring.Gpus";

  // The GPUs that this process sees, by CUDA ordinal. Creates no context.
  virtual std::vector<Identity> identities() = 0;

  // Whether this build has the kernel. A development build may omit some types (JAX_RING_CUDA_DTYPES).
  virtual bool has_kernel(const KernelKey& key) const = 0;

  // Runs the call on the stream's device. Throws std::runtime_error if it cannot be launched.
  virtual void launch(const KernelKey& key, const Call& call, Stream stream) = 0;

  // Profilers show the thread's work between these calls under `name`.
  virtual void begin_range(const char* /*name*/) noexcept {}
  virtual void end_range() noexcept {}

  // Whether the stream is being captured, so that a launch is recorded and does not run now.
  virtual bool is_capturing(Stream stream) = 0;
};

// The profiler range of a block.
class NamedRange {
 public:
  NamedRange(Gpus& gpus, const char* name) noexcept : gpus_(gpus) { gpus_.begin_range(name); }
  ~NamedRange() { gpus_.end_range(); }
  NamedRange(const NamedRange&) = delete;
  NamedRange& operator=(const NamedRange&) = delete;

 private:
  Gpus& gpus_;
};

// The GPUs of this machine, through the CUDA runtime. In the module of the kernels.
std::unique_ptr<Gpus> cuda_gpus();

}  // namespace jax_ring::gpu
