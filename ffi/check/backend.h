// backend.h: runs a check's ranks on GPUs, or on host threads for a dry run.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "cuda/launch/plan.h"
#include "cuda/runtime/peer_memory.h"

namespace jax_ring::check {

// How to launch the kernels of several ranks so that they run concurrently.
enum class LaunchMode {
  together,  // one launch for all ranks
  streams,   // one launch per rank, on a stream of its own
  graphs,    // as streams, but captured in graphs and replayed
};

// One rank's kernels.
struct Work {
  int device;
  std::vector<gpu::Launch> launches;
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual gpu::PeerMemory& memory() = 0;
  virtual void copy_in(void* to, const void* from_host, size_t bytes) = 0;
  virtual void copy_out(void* to_host, const void* from, size_t bytes) = 0;

  // Runs the ranks' work `repeats` times, waits for it, and returns the total seconds.
  virtual double run(const std::vector<Work>& ranks, LaunchMode how, int repeats) = 0;

  // How many CTAs of any one kernel the device runs at the same time. Ranks wait for each other, so all ranks on the
  // device together must not exceed it.
  virtual int resident_ctas(int device) = 0;

  // Whether this build has kernels of the type.
  virtual bool has_kernels(DType dtype) = 0;

  // Seconds for `repeats` copies of `bytes` bytes within a device's memory.
  virtual double copy_seconds(int device, size_t bytes, int repeats) = 0;
};

std::unique_ptr<Backend> cuda_backend();

// Threads in place of CTAs, and POSIX shared memory in place of GPU memory.
std::unique_ptr<Backend> host_backend();

}  // namespace jax_ring::check
