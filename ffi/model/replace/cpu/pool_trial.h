// pool_trial.h: takes the place of cpu/pool_trial.h in the model. Either way may be the faster, or be tried, in any
// call.
#pragma once

#include "common/threads.h"
#include "model/checker.h"

namespace jax_ring::cpu {

class PoolTrial {
 public:
  bool next(SteadyClock::time_point, bool) { return model::choose(2) == 0; }
  SteadyClock::duration limit() const { return {}; }
};

}  // namespace jax_ring::cpu
