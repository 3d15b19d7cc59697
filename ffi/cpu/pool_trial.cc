// pool_trial.cc: compares the durations of turns.
#include "cpu/pool_trial.h"

#include <algorithm>
#include <utility>

namespace jax_ring::cpu {
namespace {

constexpr PoolTrial::Duration kLeastLimit = std::chrono::microseconds(100);
constexpr PoolTrial::Duration kLargestLimit = std::chrono::milliseconds(2);

}  // namespace

bool PoolTrial::next(SteadyClock::time_point now, bool ends_turn) {
  if (ends_turn) end_turn(now - last_call_);
  last_call_ = now;
  return on_pool_;
}

void PoolTrial::end_turn(Duration turn) {
  time_ += turn;
  if (round_ == kRounds) {
    if (time_ >= kPause * time_of_rounds_) {
      *this = PoolTrial();
    }
    return;
  }
  ++num_turns_;
  if (2 * num_turns_ > kTurns && 2 * time_ > kTime) {
    ++num_counted_;
    time_counted_ += turn;
  }
  if (num_turns_ >= kTurns && time_ >= kTime) end_round();
}

void PoolTrial::end_round() {
  const auto mean = std::exchange(time_counted_, Duration()) / std::exchange(num_counted_, 0);
  if (on_pool_) {
    on_pool_turn_ = std::min(on_pool_turn_, mean);
  } else {
    elsewhere_turn_ += mean / kRoundsEach;
    limit_ = std::clamp(2 * mean, kLeastLimit, kLargestLimit);
  }
  time_of_rounds_ += std::exchange(time_, Duration());
  num_turns_ = 0;
  on_pool_ = !on_pool_;
  if (++round_ < kRounds) return;
  on_pool_ = on_pool_turn_.count() < (1 - kLeastGain) * elsewhere_turn_.count();
}

}  // namespace jax_ring::cpu
