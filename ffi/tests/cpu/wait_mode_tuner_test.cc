// wait_mode_tuner_test.cc: a call tries whether its ranks should wait on the pool, and keeps the faster way.
#include "cpu/waiting/wait_mode_tuner.h"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>

namespace jax_ring::cpu::testing {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// A loop with a different iteration time if ranks wait on the pool.
class Loop {
 public:
  Loop(microseconds elsewhere, microseconds on_pool) : durations_{elsewhere, on_pool} {}

  // Makes calls. Returns in how many of them the ranks waited on the pool. delay: added to the duration of an
  // iteration.
  int run(int iterations, const std::function<microseconds(int iteration, bool on_pool)>& delay = {}) {
    int num_on_pool = 0;
    for (int iteration = 0; iteration < iterations; ++iteration) {
      const bool on_pool = tuner_.next(now_, ends_iteration_);
      num_on_pool += on_pool;
      now_ += durations_[on_pool];
      if (delay) now_ += delay(iteration, on_pool);
      ends_iteration_ = true;
    }
    return num_on_pool;
  }

  // Makes calls until one way has been chosen.
  void try_both(const std::function<microseconds(int iteration, bool on_pool)>& delay = {}) {
    for (int round = 0; round < WaitModeTuner::kRounds; ++round) {
      const auto end = now_ + WaitModeTuner::kTime;
      int iteration = 0;
      while (iteration < WaitModeTuner::kIterations || now_ < end)
        run(1, [&](int, bool on_pool) { return delay ? delay(iteration, on_pool) : microseconds(0); }), ++iteration;
    }
  }

  // Ends the execution. The next one begins later.
  void leave(microseconds pause) {
    now_ += pause;
    ends_iteration_ = false;
  }

  WaitModeTuner::Duration limit() const { return tuner_.limit(); }

 private:
  microseconds durations_[2];
  WaitModeTuner tuner_;
  SteadyClock::time_point now_{};
  bool ends_iteration_ = false;
};

// The number of iterations in a round.
int iterations_of(microseconds duration) {
  return std::max<int>(WaitModeTuner::kIterations, WaitModeTuner::kTime / duration);
}

TEST(WaitModeTuner, TriesBothWaysTwice) {
  constexpr microseconds kIteration(1000);
  const int iterations = iterations_of(kIteration);
  Loop loop(kIteration, kIteration);
  loop.run(1);
  for (int round = 0; round < WaitModeTuner::kRounds; ++round)
    EXPECT_EQ(loop.run(iterations), round % 2 == 0 ? 1 : iterations - 1);
}

TEST(WaitModeTuner, KeepsTheFasterWay) {
  Loop gains(microseconds(100), microseconds(50)), loses(microseconds(50), microseconds(100));
  gains.try_both();
  loses.try_both();
  EXPECT_EQ(gains.run(1000), 1000);
  EXPECT_EQ(loses.run(1000), 0);
}

TEST(WaitModeTuner, AsksForMoreThanALittle) {
  Loop loop(microseconds(100), microseconds(95));
  loop.try_both();
  EXPECT_EQ(loop.run(1000), 0);
}

TEST(WaitModeTuner, TriesAgain) {
  constexpr microseconds kIteration(1000);
  Loop loop(kIteration, 2 * kIteration);
  loop.try_both();
  const auto trials = 2 * iterations_of(kIteration) * kIteration + 2 * iterations_of(2 * kIteration) * 2 * kIteration;
  const int pause = WaitModeTuner::kPause * trials / kIteration;
  EXPECT_EQ(loop.run(pause - 10), 0);
  EXPECT_GT(loop.run(iterations_of(kIteration) + 30), 0);
}

TEST(WaitModeTuner, PassesOverARoundOnThePoolThatIsDisturbed) {
  Loop loop(microseconds(1000), microseconds(500));
  int num_disturbed = 0;
  loop.try_both([&](int iteration, bool on_pool) {
    return microseconds(on_pool && iteration == 12 && num_disturbed++ == 0 ? 100'000 : 0);
  });
  EXPECT_GE(num_disturbed, 1);
  EXPECT_EQ(loop.run(100), 100);
}

// The first round of a program is slow.
TEST(WaitModeTuner, PassesOverARoundElsewhereThatIsDisturbed) {
  Loop loop(microseconds(500), microseconds(500));
  int num_slow = 0;
  loop.try_both([&](int iteration, bool on_pool) {
    return microseconds(!on_pool && iteration >= 8 && num_slow++ < 8 ? 1'000 : 0);
  });
  EXPECT_EQ(num_slow, 8 + 8);
  EXPECT_EQ(loop.run(100), 0);
}

TEST(WaitModeTuner, CountsWhatDisturbsEveryRound) {
  Loop loop(microseconds(1000), microseconds(500));
  loop.try_both([](int iteration, bool on_pool) { return microseconds(on_pool && iteration == 12 ? 100'000 : 0); });
  EXPECT_EQ(loop.run(100), 0);
}

TEST(WaitModeTuner, DoesNotCountTheFirstHalf) {
  Loop loop(microseconds(1000), microseconds(500));
  loop.try_both([](int iteration, bool on_pool) { return microseconds(on_pool && iteration < 7 ? 10'000 : 0); });
  EXPECT_EQ(loop.run(100), 100);
}

TEST(WaitModeTuner, DoesNotCountTheTimeBetweenExecutions) {
  Loop loop(microseconds(1000), microseconds(500));
  bool on_pool = false;
  for (int i = 0; i < WaitModeTuner::kRounds * WaitModeTuner::kIterations; ++i) {
    on_pool = loop.run(3) > 0;
    loop.leave(microseconds(on_pool ? 100'000 : 0));
  }
  EXPECT_EQ(loop.run(100), 100);
}

TEST(WaitModeTuner, LimitsWhatRanksWaitByAnIterationWithoutIt) {
  const auto limit_of = [](microseconds iteration) {
    Loop loop(iteration, iteration);
    loop.try_both();
    return loop.limit();
  };
  EXPECT_EQ(limit_of(microseconds(300)), microseconds(600));
  EXPECT_EQ(limit_of(microseconds(5)), microseconds(100));
  EXPECT_EQ(limit_of(milliseconds(50)), milliseconds(2));
}

}  // namespace
}  // namespace jax_ring::cpu::testing
