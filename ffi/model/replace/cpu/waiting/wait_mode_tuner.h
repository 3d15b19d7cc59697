// wait_mode_tuner.h: replaces cpu/waiting/wait_mode_tuner.h in the model. Any call may try either way, or find either
// faster.
#pragma once

#include "base/threads.h"
#include "model/checker/checker.h"

namespace jax_ring::cpu {

class WaitModeTuner {
 public:
  bool next(SteadyClock::time_point, bool) { return model::choose(2) == 0; }
  SteadyClock::duration limit() const { return {}; }
};

}  // namespace jax_ring::cpu
