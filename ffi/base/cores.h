// cores.h: the cores that this process may use. The model checker replaces this header by its own of the same name.
#pragma once

#include <sched.h>

#include <thread>
#include <vector>

namespace jax_ring {

// The cores that this thread may run on, and those that it starts. A container or a scheduler may have bound it to few.
inline std::vector<int> usable_cores() {
  std::vector<int> cores;
  cpu_set_t usable;
  // Fails if the machine has too many cores for the mask. Then ranks are not spread.
  if (sched_getaffinity(0, sizeof(usable), &usable) != 0) return cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &usable)) cores.push_back(core);
  }
  return cores;
}

// Their number.
inline int num_cores() {
  const size_t usable = usable_cores().size();
  return usable > 0 ? static_cast<int>(usable) : static_cast<int>(std::thread::hardware_concurrency());
}

}  // namespace jax_ring
