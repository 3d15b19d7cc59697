// waiting_policy_test.cc: where ranks wait, given the history of their calls and threads.
#include "cpu/waiting/waiting_policy.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <chrono>

#include "tests/support/support.h"

namespace jax_ring::cpu::testing {
namespace {

using Place = Waiting::Place;
using std::chrono::milliseconds;

// A call of a program, and the time.
struct Call {
  WaitingPolicy policy;
  SteadyClock::time_point now{};

  Call(int num_ranks, bool have_own_cores) : policy(num_ranks, have_own_cores) {}

  // Repeats the call, in iterations that take `on_pool` if ranks wait on the pool, else 2 ms. Returns where ranks wait
  // in the end.
  Place repeat(int times, bool in_loop, bool may_use_pool, milliseconds on_pool = milliseconds(1)) {
    Place place = Place::nowhere;
    int64_t run_id = next_run_id();
    for (int i = 0; i < times; ++i) {
      if (!in_loop) run_id = next_run_id();
      place = policy.next(run_id, now, true, may_use_pool).place;
      now += place == Place::pool ? on_pool : milliseconds(2);
    }
    return place;
  }
};

constexpr int kUntilChosen = WaitModeTuner::kRounds * WaitModeTuner::kIterations + 2;

TEST(WaitingPolicy, ALoopUsesThePool) {
  EXPECT_EQ(Call(4, false).repeat(kUntilChosen, true, true), Place::pool);
  EXPECT_EQ(Call(4, true).repeat(kUntilChosen, true, true), Place::pool);
}

TEST(WaitingPolicy, ALoopThatIsNotFasterOnThePoolDoesNotWait) {
  EXPECT_EQ(Call(4, false).repeat(kUntilChosen, true, true, milliseconds(2)), Place::nowhere);
  EXPECT_EQ(Call(4, true).repeat(kUntilChosen, true, true, milliseconds(2)), Place::nowhere);
}

TEST(WaitingPolicy, APoolWithTooFewThreadsIsNotUsed) {
  EXPECT_EQ(Call(4, false).repeat(kUntilChosen, true, false), Place::nowhere);
  EXPECT_EQ(Call(4, true).repeat(kUntilChosen, true, false), Place::own_thread);
}

TEST(WaitingPolicy, TheOnlyCallOfAnExecutionDoesNotUseThePool) {
  EXPECT_EQ(Call(4, false).repeat(kUntilChosen, false, true), Place::own_thread);
}

TEST(WaitingPolicy, OneOfSeveralCallsUsesThePool) {
  Call first(4, false), second(4, false);
  for (int i = 0; i < kUntilChosen; ++i) {
    const int64_t run_id = next_run_id();
    for (Call* call : {&first, &second}) {
      const Waiting waiting = call->policy.next(run_id, call->now, true, true);
      if (i == kUntilChosen - 1) {
        EXPECT_EQ(waiting.place, Place::pool);
      } else if (i == 0) {
        EXPECT_EQ(waiting.place, Place::own_thread);
      }
      call->now += milliseconds(waiting.place == Place::pool ? 1 : 2);
    }
  }
}

TEST(WaitingPolicy, OtherGroupsOfACallAreNoOtherCalls) {
  Call call(4, false);
  WaitingPolicy other_group(4, false);
  for (int i = 0; i < kUntilChosen; ++i) {
    const int64_t run_id = next_run_id();
    EXPECT_EQ(call.policy.next(run_id, call.now, true, true).place, Place::own_thread);
    EXPECT_EQ(other_group.next(run_id, call.now, false, true).place, Place::own_thread);
    call.now += milliseconds(1);
  }
}

TEST(WaitingPolicy, RanksMoveToThePoolAndStayThere) {
  WaitingPolicy policy(4, false);
  const Waiting on_pool{Place::pool, milliseconds(1)};
  const auto elsewhere = policy.terms(on_pool, {true, false, true});
  ASSERT_TRUE(elsewhere);
  EXPECT_TRUE(elsewhere->moves);
  EXPECT_EQ(elsewhere->limit, milliseconds(1));
  // Other ranks need the thread, but the rank waits on another one.
  EXPECT_TRUE(policy.terms(on_pool, {false, false, true}));
  const auto there = policy.terms(on_pool, {true, true, true});
  ASSERT_TRUE(there);
  EXPECT_FALSE(there->moves);
}

// Keeps this thread on a core.
class OnCore {
 public:
  explicit OnCore(int core) {
    sched_getaffinity(0, sizeof(before_), &before_);
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(core, &only);
    sched_setaffinity(0, sizeof(only), &only);
  }
  ~OnCore() { sched_setaffinity(0, sizeof(before_), &before_); }

 private:
  cpu_set_t before_;
};

// How many ranks of a call are to move to another core if all arrive on one core.
int num_moved(WaitingPolicy& policy, const Waiting& waiting, int num_ranks, bool is_of_pool) {
  int moved = 0;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const auto terms = policy.terms(waiting, {true, is_of_pool, true});
    moved += terms && terms->core;
  }
  return moved;
}

// As many ranks as cores, all arriving on one core.
class SpreadingPolicy : public ::testing::Test {
 protected:
  void SetUp() override {
    if (num_cores < 2) GTEST_SKIP() << "one core";
  }

  Waiting next(milliseconds later, bool may_use_pool = false) {
    return policy.next(run_id, now += later, true, may_use_pool);
  }

  // In how many calls ranks move, with one call per millisecond.
  int moves_in(int duration) {
    int moves = 0;
    for (int i = 0; i < duration; ++i) moves += num_moved(policy, next(milliseconds(1)), num_cores, false) > 0;
    return moves;
  }

  const std::vector<int> cores = usable_cores();
  const int num_cores = static_cast<int>(cores.size());
  WaitingPolicy policy{num_cores, true};
  const OnCore here{current_core()};
  const int64_t run_id = next_run_id();
  SteadyClock::time_point now = SteadyClock::now();
};

TEST_F(SpreadingPolicy, SpreadsRanksOfALoop) {
  // It may be the only call of its execution.
  EXPECT_EQ(num_moved(policy, next(milliseconds(0)), num_cores, false), 0);
  const Waiting in_loop = next(milliseconds(3));
  EXPECT_EQ(in_loop.place, Place::own_thread);
  EXPECT_EQ(num_moved(policy, in_loop, num_cores, false), num_cores - 1);
}

// The system reunites ranks whenever they are moved apart, as if another process needed a core.
TEST_F(SpreadingPolicy, MovesRanksMoreRarelyIfTheyDoNotStay) {
  EXPECT_GE(moves_in(50), 3);
  moves_in(10'000);
  EXPECT_LE(moves_in(10'000), 6);
  for (int i = 0; i < 30'000; ++i) {
    const Waiting waiting = next(milliseconds(1));
    for (int core : cores) {
      const OnCore apart(core);
      EXPECT_FALSE(policy.terms(waiting, {true, false, true})->core);
    }
  }
  EXPECT_GE(moves_in(50), 3);
}

TEST_F(SpreadingPolicy, SpreadsRanksThatMoveToThePoolThere) {
  next(milliseconds(0), true);
  const Waiting spreading{Place::pool, milliseconds(1), true};
  EXPECT_EQ(num_moved(policy, spreading, num_cores, false), 0);
  next(milliseconds(3));  // restarts the count
  EXPECT_EQ(num_moved(policy, spreading, num_cores, true), num_cores - 1);
}

TEST(WaitingPolicy, RanksDoNotWaitOnThreadsThatOthersNeed) {
  WaitingPolicy policy(4, false);
  const Waiting in_place{Place::own_thread, milliseconds(1)};
  EXPECT_TRUE(policy.terms(in_place, {true, false, true}));
  EXPECT_FALSE(policy.terms(in_place, {false, false, true}));
  EXPECT_FALSE(policy.terms({}, {true, false, true}));
}

}  // namespace
}  // namespace jax_ring::cpu::testing
