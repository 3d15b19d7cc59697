// backend.h: where the ranks of a check run: on GPUs, or, to rehearse it, on threads of the host.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "cuda/peer_memory.h"
#include "cuda/plan.h"

namespace jax_ring::check {

// How the kernels of several ranks get to run at the same time.
enum class LaunchMode {
  together,  // one launch for all ranks
  streams,   // a launch on a stream of its own for each rank
  graphs,    // as streams, but recorded and replayed
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

  // Runs the ranks' work `repeats` times and waits until it has ended. Returns the seconds that all of that took.
  virtual double run(const std::vector<Work>& ranks, LaunchMode how, int repeats) = 0;

  // Seconds that copying so many bytes within the memory of a device takes.
  virtual double copy_seconds(int device, size_t bytes, int repeats) = 0;
};

std::unique_ptr<Backend> cuda_backend();

// Threads in the place of teams, and shared memory of the host in the place of that of GPUs.
std::unique_ptr<Backend> host_backend();

}  // namespace jax_ring::check
