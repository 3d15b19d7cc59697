// wait_mode_tuner.cc: compares the durations of iterations.
#include "cpu/waiting/wait_mode_tuner.h"

#include <algorithm>
#include <utility>

namespace jax_ring::cpu {
namespace {

constexpr WaitModeTuner::Duration kLeastLimit = std::chrono::microseconds(100);
constexpr WaitModeTuner::Duration kLargestLimit = std::chrono::milliseconds(2);

}  // namespace

bool WaitModeTuner::next(SteadyClock::time_point now, bool ends_iteration) {
  if (ends_iteration) end_iteration(now - last_call_);
  last_call_ = now;
  return on_pool_;
}

void WaitModeTuner::end_iteration(Duration iteration) {
  time_ += iteration;
  if (round_ == kRounds) {
    if (time_ >= kPause * time_of_rounds_) {
      *this = WaitModeTuner();
    }
    return;
  }
  ++num_iterations_;
  if (2 * num_iterations_ > kIterations && 2 * time_ > kTime) {
    ++num_counted_;
    time_counted_ += iteration;
  }
  if (num_iterations_ >= kIterations && time_ >= kTime) end_round();
}

void WaitModeTuner::end_round() {
  const auto mean = std::exchange(time_counted_, Duration()) / std::exchange(num_counted_, 0);
  if (on_pool_) {
    on_pool_iteration_ = std::min(on_pool_iteration_, mean);
  } else {
    elsewhere_iteration_ = std::min(elsewhere_iteration_, mean);
    limit_ = std::clamp(2 * mean, kLeastLimit, kLargestLimit);
  }
  time_of_rounds_ += std::exchange(time_, Duration());
  num_iterations_ = 0;
  on_pool_ = !on_pool_;
  if (++round_ < kRounds) return;
  on_pool_ = on_pool_iteration_.count() < (1 - kLeastGain) * elsewhere_iteration_.count();
}

}  // namespace jax_ring::cpu
