// pool_trial_test.cc: a call tries whether its ranks should wait on the pool, and keeps what was faster.
#include "cpu/pool_trial.h"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>

namespace jax_ring::cpu::testing {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// A loop whose turns take another time where ranks wait on the pool.
class Loop {
 public:
  Loop(microseconds elsewhere, microseconds on_pool) : durations_{elsewhere, on_pool} {}

  // Makes calls. Returns in how many of them the ranks waited on the pool. delay: added to the duration of a turn.
  int run(int turns, const std::function<microseconds(int turn, bool on_pool)>& delay = {}) {
    int num_on_pool = 0;
    for (int turn = 0; turn < turns; ++turn) {
      const bool on_pool = trial_.next(now_, ends_turn_);
      num_on_pool += on_pool;
      now_ += durations_[on_pool];
      if (delay) now_ += delay(turn, on_pool);
      ends_turn_ = true;
    }
    return num_on_pool;
  }

  // Makes calls until a way has been chosen.
  void try_both(const std::function<microseconds(int turn, bool on_pool)>& delay = {}) {
    for (int round = 0; round < PoolTrial::kRounds; ++round) {
      const auto end = now_ + PoolTrial::kTime;
      int turn = 0;
      while (turn < PoolTrial::kTurns || now_ < end)
        run(1, [&](int, bool on_pool) { return delay ? delay(turn, on_pool) : microseconds(0); }), ++turn;
    }
  }

  // Ends the execution. The next one begins later.
  void leave(microseconds pause) {
    now_ += pause;
    ends_turn_ = false;
  }

  PoolTrial::Duration limit() const { return trial_.limit(); }

 private:
  microseconds durations_[2];
  PoolTrial trial_;
  SteadyClock::time_point now_{};
  bool ends_turn_ = false;
};

// The number of turns of a round.
int turns_of(microseconds duration) { return std::max<int>(PoolTrial::kTurns, PoolTrial::kTime / duration); }

TEST(PoolTrial, TriesBothWaysTwice) {
  constexpr microseconds kTurn(1000);
  const int turns = turns_of(kTurn);
  Loop loop(kTurn, kTurn);
  loop.run(1);
  for (int round = 0; round < PoolTrial::kRounds; ++round) EXPECT_EQ(loop.run(turns), round % 2 == 0 ? 1 : turns - 1);
}

TEST(PoolTrial, KeepsTheFasterWay) {
  Loop gains(microseconds(100), microseconds(50)), loses(microseconds(50), microseconds(100));
  gains.try_both();
  loses.try_both();
  EXPECT_EQ(gains.run(1000), 1000);
  EXPECT_EQ(loses.run(1000), 0);
}

TEST(PoolTrial, AsksForMoreThanALittle) {
  Loop loop(microseconds(100), microseconds(95));
  loop.try_both();
  EXPECT_EQ(loop.run(1000), 0);
}

TEST(PoolTrial, TriesAgain) {
  constexpr microseconds kTurn(1000);
  Loop loop(kTurn, 2 * kTurn);
  loop.try_both();
  const auto trials = 2 * turns_of(kTurn) * kTurn + 2 * turns_of(2 * kTurn) * 2 * kTurn;
  const int pause = PoolTrial::kPause * trials / kTurn;
  EXPECT_EQ(loop.run(pause - 10), 0);
  EXPECT_GT(loop.run(turns_of(kTurn) + 30), 0);
}

TEST(PoolTrial, PassesOverARoundOnThePoolThatIsDisturbed) {
  Loop loop(microseconds(1000), microseconds(500));
  int num_disturbed = 0;
  loop.try_both([&](int turn, bool on_pool) {
    return microseconds(on_pool && turn == 12 && num_disturbed++ == 0 ? 100'000 : 0);
  });
  EXPECT_GE(num_disturbed, 1);
  EXPECT_EQ(loop.run(100), 100);
}

TEST(PoolTrial, CountsEachRoundElsewhere) {
  Loop loop(microseconds(500), microseconds(500));
  int num_slow = 0;
  loop.try_both(
      [&](int turn, bool on_pool) { return microseconds(!on_pool && turn >= 8 && num_slow++ < 8 ? 1'000 : 0); });
  EXPECT_EQ(loop.run(100), 100);
}

TEST(PoolTrial, CountsWhatDisturbsEveryRound) {
  Loop loop(microseconds(1000), microseconds(500));
  loop.try_both([](int turn, bool on_pool) { return microseconds(on_pool && turn == 12 ? 100'000 : 0); });
  EXPECT_EQ(loop.run(100), 0);
}

TEST(PoolTrial, DoesNotCountTheFirstHalf) {
  Loop loop(microseconds(1000), microseconds(500));
  loop.try_both([](int turn, bool on_pool) { return microseconds(on_pool && turn < 7 ? 10'000 : 0); });
  EXPECT_EQ(loop.run(100), 100);
}

TEST(PoolTrial, DoesNotCountTheTimeBetweenExecutions) {
  Loop loop(microseconds(1000), microseconds(500));
  bool on_pool = false;
  for (int i = 0; i < PoolTrial::kRounds * PoolTrial::kTurns; ++i) {
    on_pool = loop.run(3) > 0;
    loop.leave(microseconds(on_pool ? 100'000 : 0));
  }
  EXPECT_EQ(loop.run(100), 100);
}

TEST(PoolTrial, LimitsWhatRanksWaitByATurnWithoutIt) {
  const auto limit_of = [](microseconds turn) {
    Loop loop(turn, turn);
    loop.try_both();
    return loop.limit();
  };
  EXPECT_EQ(limit_of(microseconds(300)), microseconds(600));
  EXPECT_EQ(limit_of(microseconds(5)), microseconds(100));
  EXPECT_EQ(limit_of(milliseconds(50)), milliseconds(2));
}

}  // namespace
}  // namespace jax_ring::cpu::testing
