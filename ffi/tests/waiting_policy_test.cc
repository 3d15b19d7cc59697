// waiting_policy_test.cc: where ranks wait, by what is known of their calls and threads.
#include "cpu/waiting_policy.h"

#include <gtest/gtest.h>

#include <chrono>

#include "support.h"

namespace jax_ring::cpu::testing {
namespace {

using Place = Waiting::Place;
using std::chrono::milliseconds;

// A call of a program, and the time.
struct Call {
  WaitingPolicy policy;
  SteadyClock::time_point now{};

  Call(int num_ranks, bool have_own_cores) : policy(num_ranks, have_own_cores) {}

  // Makes the call again and again, in turns that are faster on the pool. Returns where ranks wait in the end.
  Place repeat(int times, bool in_loop, bool may_use_pool) {
    Place place = Place::nowhere;
    int64_t run_id = next_run_id();
    for (int i = 0; i < times; ++i) {
      if (!in_loop) run_id = next_run_id();
      place = policy.next(run_id, now, true, may_use_pool).place;
      now += milliseconds(place == Place::pool ? 1 : 2);
    }
    return place;
  }
};

constexpr int kUntilChosen = PoolTrial::kRounds * PoolTrial::kTurns + 2;

TEST(WaitingPolicy, ALoopUsesThePool) {
  EXPECT_EQ(Call(4, false).repeat(kUntilChosen, true, true), Place::pool);
  EXPECT_EQ(Call(4, true).repeat(kUntilChosen, true, true), Place::pool);
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
  // Others need the thread, but the rank waits on another one.
  EXPECT_TRUE(policy.terms(on_pool, {false, false, true}));
  const auto there = policy.terms(on_pool, {true, true, true});
  ASSERT_TRUE(there);
  EXPECT_FALSE(there->moves);
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
