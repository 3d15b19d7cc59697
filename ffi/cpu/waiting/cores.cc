// cores.cc: asks the system where threads run, and moves them.
#include "cpu/waiting/cores.h"

#include <sched.h>

#include <algorithm>

namespace jax_ring::cpu {

int current_core() { return sched_getcpu(); }

void move_to_core(int core) {
  cpu_set_t usable, only;
  if (sched_getaffinity(0, sizeof(usable), &usable) != 0 || !CPU_ISSET(core, &usable)) return;
  CPU_ZERO(&only);
  CPU_SET(core, &only);
  if (sched_setaffinity(0, sizeof(only), &only) == 0) sched_setaffinity(0, sizeof(usable), &usable);
}

void Spread::begin(int num_ranks) {
  std::fill(num_ranks_.begin(), num_ranks_.end(), 0);
  const int num_cores = static_cast<int>(cores_.size());
  share_ = (num_ranks + num_cores - 1) / num_cores;
  num_added_ = 0;
  num_moved_ = 0;
}

std::optional<int> Spread::add(int core) {
  ++num_added_;
  const auto found = std::find(cores_.begin(), cores_.end(), core);
  if (found == cores_.end()) return std::nullopt;
  int& here = num_ranks_[found - cores_.begin()];
  if (here < share_) {
    ++here;
    return std::nullopt;
  }
  ++num_moved_;
  const auto least = std::min_element(num_ranks_.begin(), num_ranks_.end());
  ++*least;
  return cores_[least - num_ranks_.begin()];
}

}  // namespace jax_ring::cpu
