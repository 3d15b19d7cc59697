// executions.h: counts the calls of the latest executions.
#pragma once

#include <array>
#include <cstdint>

#include "base/threads.h"

namespace jax_ring::cpu {

// One per process, for the calls of all instructions.
class Executions {
 public:
  static Executions& instance();

  void count(int64_t run_id);

  // The number of calls that an execution has made; 0 if it is not among the latest.
  int num_calls(int64_t run_id);

 private:
  struct Execution {
    int64_t run_id = -1;
    int num_calls = 0;
  };

  Mutex mutex_;
  std::array<Execution, 8> latest_;
  size_t oldest_ = 0;
};

}  // namespace jax_ring::cpu
