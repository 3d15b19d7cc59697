// executions.h: replaces cpu/waiting/executions.h in the model. Each execution makes many calls, so that the first one
// may already be of interest.
#pragma once

#include <cstdint>

namespace jax_ring::cpu {

class Executions {
 public:
  static Executions& instance() {
    static Executions executions;
    return executions;
  }
  void count(int64_t) {}
  int num_calls(int64_t) const { return 2; }
};

}  // namespace jax_ring::cpu
