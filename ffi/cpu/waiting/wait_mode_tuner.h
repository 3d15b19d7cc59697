// wait_mode_tuner.h: whether ranks wait on threads of the runtime's pool, by which way was faster.
#pragma once

#include <chrono>

#include "base/threads.h"

namespace jax_ring::cpu {

// Ranks that wait on the pool's threads are faster in most programs (see WaitingRank), and slower in some. So a call
// that is made again and again tries both ways in turn, keeps the faster, and tries again later.
class WaitModeTuner {
 public:
  using Duration = SteadyClock::duration;

  // From a call to the next is an iteration. Each way is tried twice, for at least so many iterations and so long. The
  // first half does not count: it takes milliseconds until threads stay where they are. Of either way the better round
  // counts. The first round of all is slow, whichever way it tries: pages are new, and caches and predictors know
  // nothing.
  static constexpr int kRoundsEach = 2;
  static constexpr int kRounds = 2 * kRoundsEach;
  static constexpr int kIterations = 16;
  static constexpr Duration kTime = std::chrono::milliseconds(4);
  // The time until the next trial, as times the time that the last one took.
  static constexpr int kPause = 30;
  // Of the time of an iteration. Ranks that wait take time from other processes.
  static constexpr double kLeastGain = 0.1;

  // Whether the ranks wait on the pool in the call that begins now. ends_iteration: whether an iteration has passed
  // since the last.
  bool next(SteadyClock::time_point now, bool ends_iteration);

  // For how long they wait there at most. If what they wait for needs the threads of the pool, a trial loses no more
  // than a multiple of an iteration.
  Duration limit() const { return limit_; }

 private:
  void end_iteration(Duration iteration);
  void end_round();

  bool on_pool_ = false;
  Duration limit_{};
  SteadyClock::time_point last_call_;
  int round_ = 0;              // kRounds in the pause
  int num_iterations_ = 0;     // of this round
  Duration time_{};            // of this round, or in the pause
  Duration time_of_rounds_{};  // of this trial that have ended
  // The iterations of this round that count.
  int num_counted_ = 0;
  Duration time_counted_{};
  // The durations of an iteration that are compared.
  Duration on_pool_iteration_ = Duration::max();
  Duration elsewhere_iteration_ = Duration::max();
};

}  // namespace jax_ring::cpu
