// wait_mode_tuner.h: chooses by trial whether ranks wait on threads of the runtime's pool.
#pragma once

#include <chrono>

#include "base/threads.h"

namespace jax_ring::cpu {

// Most programs are faster if ranks wait on the pool's threads (see WaitingRank), some are slower. So a repeated call
// tries both ways in turn, keeps the faster one, and tries again later.
class WaitModeTuner {
 public:
  using Duration = SteadyClock::duration;

  // An iteration lasts from one call to the next. Each way gets two rounds of at least this many iterations and this
  // much time. The first half of a round does not count: threads take milliseconds to settle. The better round of each
  // way counts. The very first round is slow either way: pages are new, caches and predictors are empty.
  static constexpr int kRoundsEach = 2;
  static constexpr int kRounds = 2 * kRoundsEach;
  static constexpr int kIterations = 16;
  static constexpr Duration kTime = std::chrono::milliseconds(4);
  // The time until the next trial, as a multiple of the last trial's time.
  static constexpr int kPause = 30;
  // As a fraction of an iteration. Waiting ranks take time from other processes.
  static constexpr double kLeastGain = 0.1;

  // Whether the ranks wait on the pool in the call that begins now. ends_iteration: whether an iteration has passed
  // since the last.
  bool next(SteadyClock::time_point now, bool ends_iteration);

  // The limit of a wait there. If the ranks wait for something that needs the pool's threads, a trial loses no more
  // than a multiple of an iteration.
  Duration limit() const { return limit_; }

 private:
  void end_iteration(Duration iteration);
  void end_round();

  bool on_pool_ = false;
  Duration limit_{};
  SteadyClock::time_point last_call_;
  int round_ = 0;              // kRounds during the pause
  int num_iterations_ = 0;     // of this round
  Duration time_{};            // of this round, or of the pause
  Duration time_of_rounds_{};  // of this trial's finished rounds
  // This round's iterations that count.
  int num_counted_ = 0;
  Duration time_counted_{};
  // The iteration times to compare.
  Duration on_pool_iteration_ = Duration::max();
  Duration elsewhere_iteration_ = Duration::max();
};

}  // namespace jax_ring::cpu
