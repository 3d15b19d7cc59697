// executions.cc: counts calls by execution.
#include "cpu/waiting/executions.h"

#include <algorithm>
#include <mutex>

namespace jax_ring::cpu {

Executions& Executions::instance() {
  return immortal([] { return new Executions; });
}

void Executions::count(int64_t run_id) {
  std::lock_guard<Mutex> lock(mutex_);
  for (Execution& execution : latest_) {
    if (execution.run_id == run_id) return void(++execution.num_calls);
  }
  latest_[oldest_] = {run_id, 1};
  oldest_ = (oldest_ + 1) % latest_.size();
}

int Executions::num_calls(int64_t run_id) {
  std::lock_guard<Mutex> lock(mutex_);
  const auto found = std::find_if(latest_.begin(), latest_.end(),
                                  [&](const Execution& execution) { return execution.run_id == run_id; });
  return found == latest_.end() ? 0 : found->num_calls;
}

}  // namespace jax_ring::cpu
