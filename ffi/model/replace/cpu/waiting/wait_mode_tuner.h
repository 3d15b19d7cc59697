// wait_mode_tuner.h: takes the place of cpu/waiting/wait_mode_tuner.h in the model. Either way may be the faster, or be
// tried, in any call.
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
