// device.h: CUDA C++'s words for the host's compiler, so that it compiles the kernels' file unchanged.
#pragma once

#include <cuda_runtime_api.h>

#include "device/memory/team.h"

#undef __global__
#define __global__
#undef __grid_constant__
#define __grid_constant__
#undef __launch_bounds__
#define __launch_bounds__(...)

namespace jax_ring {

namespace standin {
extern thread_local uint3 block_of_thread;
extern thread_local HostTeam team_of_thread;
void jitter();
}  // namespace standin

// A CTA, with fewer threads, and a random delay at each barrier.
struct Cta {
  int thread() const { return standin::team_of_thread.thread(); }
  int size() const { return standin::team_of_thread.size(); }
  void sync() const { all(true); }
  bool all(bool mine) const {
    standin::jitter();
    return standin::team_of_thread.all(mine);
  }
  uint64_t of_first(uint64_t value) const {
    standin::jitter();
    return standin::team_of_thread.of_first(value);
  }
};

}  // namespace jax_ring

#define blockIdx (::jax_ring::standin::block_of_thread)
