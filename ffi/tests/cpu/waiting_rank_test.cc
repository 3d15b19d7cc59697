// waiting_rank_test.cc: ranks whose threads wait in their calls, alone and in calls of the engine.
#include "cpu/waiting/waiting_rank.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/threads.h"
#include "cpu/engine.h"
#include "cpu/rendezvous/completion_threads.h"
#include "cpu/rendezvous/rendezvous.h"
#include "cpu/waiting/executions.h"
#include "tests/support/support.h"

namespace jax_ring::cpu::testing {
namespace {

using Released = WaitingRank::Released;

constexpr std::chrono::microseconds kShort(50);

// Terms of a rank that waits on a pool thread.
constexpr WaitingRank::Terms kMoves{std::chrono::seconds(10), false, true, std::nullopt};

TEST(WaitingRank, ThatWasNotStartedDoesNotWait) {
  WaitingRank rank;
  EXPECT_TRUE(rank.is_free());
  EXPECT_FALSE(rank.wait());
}

TEST(WaitingRank, GoesOnOnceReleased) {
  WaitingRank rank;
  rank.start({kShort});
  EXPECT_FALSE(rank.is_free());
  EXPECT_EQ(rank.release(), Released::goes_on);
  EXPECT_TRUE(rank.wait());
  EXPECT_TRUE(rank.is_free());
  rank.skip();
  EXPECT_FALSE(rank.wait()) << "of the call after that";
}

TEST(WaitingRank, LeavesWhenTheTimeIsOver) {
  for (bool has_own_core : {false, true}) {
    WaitingRank rank;
    rank.start({kShort, has_own_core});
    EXPECT_FALSE(rank.wait());
    EXPECT_FALSE(rank.is_free()) << "whoever executes the collective knows of it still";
    EXPECT_FALSE(rank.offer([] { FAIL() << "it has left"; }));
    EXPECT_EQ(rank.release(), Released::has_left);
    EXPECT_TRUE(rank.is_free());
  }
}

TEST(WaitingRank, DoesItsShareOnce) {
  WaitingRank rank;
  int times = 0;
  rank.start({kShort});
  EXPECT_TRUE(rank.offer([&] {
    ++times;
    EXPECT_EQ(rank.release(), Released::goes_on);
  }));
  EXPECT_FALSE(rank.offer([] { FAIL() << "it has a share"; }));
  EXPECT_TRUE(rank.wait());
  EXPECT_EQ(times, 1);
}

TEST(WaitingRank, DropsAShareThatOthersDid) {
  WaitingRank rank;
  rank.start({kShort});
  const auto work = std::make_shared<int>(0);
  EXPECT_TRUE(rank.offer([work] { FAIL() << "the rank was released"; }));
  EXPECT_EQ(rank.release(), Released::goes_on);
  EXPECT_TRUE(rank.wait());
  EXPECT_EQ(work.use_count(), 1);
}

TEST(WaitingRank, MovesAndWaits) {
  WaitingRank rank;
  rank.start(kMoves);
  EXPECT_TRUE(rank.moves());
  EXPECT_FALSE(rank.is_waiting());
  EXPECT_FALSE(rank.offer([] { FAIL() << "nobody waits yet"; }));
  std::atomic<bool> goes_on{false};
  std::thread of_pool([&] { goes_on = rank.wait(); });
  while (!rank.is_waiting()) std::this_thread::yield();
  EXPECT_EQ(rank.release(), Released::goes_on);
  of_pool.join();
  EXPECT_TRUE(goes_on);
}

TEST(WaitingRank, ThatMovesIsTakenOverOnce) {
  WaitingRank pool_first, completion_first;
  for (WaitingRank* rank : {&pool_first, &completion_first}) {
    rank->start(kMoves);
    EXPECT_EQ(rank->release(), Released::moves);
    EXPECT_FALSE(rank->is_free()) << "two threads know of it still";
  }
  EXPECT_TRUE(pool_first.wait());
  EXPECT_FALSE(pool_first.take_over());
  EXPECT_TRUE(completion_first.take_over());
  EXPECT_FALSE(completion_first.wait());
}

TEST(WaitingRank, ThatMovesGetsAnErrorByItsCompletion) {
  WaitingRank rank;
  rank.start(kMoves);
  EXPECT_TRUE(rank.take_over());
  EXPECT_FALSE(rank.wait());
}

TEST(WaitingRank, ThatHasMovedGetsAnErrorByItsCompletion) {
  WaitingRank rank;
  rank.start({kShort, false, true, std::nullopt});
  std::thread of_pool([&] { EXPECT_FALSE(rank.wait()); });
  of_pool.join();
  EXPECT_TRUE(rank.take_over()) << "it has left by now";
}

// ---- In a rendezvous ------------------------------------------------------------------------------------------------

ReplicaGroups one_group(int num_ranks) {
  std::vector<int64_t> partitions(num_ranks);
  std::iota(partitions.begin(), partitions.end(), 0);
  return ReplicaGroups(partitions, {num_ranks});
}

// Makes a call for all ranks. Returns whether they wait.
bool call_waits(RendezvousMap& map, int64_t run_id, int num_ranks) {
  RendezvousPtr complete;
  for (int rank = 0; rank < num_ranks; ++rank) {
    Participant participant;
    participant.done = [](const CallFailure*) {};
    const auto waiting = std::make_shared<WaitingRank>();
    participant.waiting = &waiting;
    complete = map.arrive(run_id, rank, std::move(participant));
  }
  int num_waiting = 0;
  for (const WaitingRankPtr& rank : complete->waiting) num_waiting += rank != nullptr;
  EXPECT_TRUE(num_waiting == 0 || num_waiting == num_ranks);
  return num_waiting > 0;
}

TEST(WaitingRanks, WithCoresOfTheirOwnAlwaysWait) {
  RendezvousMap map(one_group(1), "test");
  const int64_t run = next_run_id();
  for (int call = 0; call < 3; ++call) EXPECT_TRUE(call_waits(map, run, 1));
}

TEST(WaitingRanks, ThatOutnumberTheCoresWaitUnlessTheCallIsMadeAgain) {
  const int num_ranks = num_cores() + 1;
  RendezvousMap map(one_group(num_ranks), "test");
  for (int run = 0; run < 3; ++run) EXPECT_TRUE(call_waits(map, next_run_id(), num_ranks));
  const int64_t loop = next_run_id();
  EXPECT_TRUE(call_waits(map, loop, num_ranks)) << "nobody knows yet that it is a loop";
  EXPECT_FALSE(call_waits(map, loop, num_ranks));
  EXPECT_FALSE(call_waits(map, next_run_id(), num_ranks)) << "expected to be a loop";
  EXPECT_TRUE(call_waits(map, next_run_id(), num_ranks)) << "the one before made the call once";
}

TEST(WaitingRanks, DoNotWaitWithoutTheirConsent) {
  RendezvousMap map(one_group(1), "test");
  Participant participant;
  participant.done = [](const CallFailure*) {};
  const int64_t run_id = next_run_id();
  const RendezvousPtr complete = map.arrive(run_id, 0, std::move(participant));
  EXPECT_EQ(complete->waiting[0], nullptr);
  EXPECT_EQ(Executions::instance().num_calls(run_id), 0) << "so that a barrier is no further call";
}

// ---- Completions ----------------------------------------------------------------------------------------------------

// A rendezvous of waiting ranks.
RendezvousPtr waiting_ranks(const std::vector<Outcome>& outcomes, const std::vector<WaitingRankPtr>& ranks) {
  RendezvousPtr rendezvous(new Rendezvous);
  for (const Outcome& outcome : outcomes) rendezvous->done.push_back(outcome.completion());
  for (const WaitingRankPtr& rank : ranks) {
    rank->start({kShort});
    rendezvous->waiting.push_back(rank);
  }
  return rendezvous;
}

TEST(WaitingRanks, AreNotCompleted) {
  const std::vector<Outcome> outcomes(2);
  const std::vector<WaitingRankPtr> ranks = {std::make_shared<WaitingRank>(), std::make_shared<WaitingRank>()};
  CompletionThreads::instance().complete(waiting_ranks(outcomes, ranks));
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_TRUE(ranks[rank]->wait());
    EXPECT_EQ(outcomes[rank].times(), 0);
  }
}

TEST(WaitingRanks, AreCompletedOnceTheyHaveLeft) {
  const std::vector<Outcome> outcomes(2);
  const std::vector<WaitingRankPtr> ranks = {std::make_shared<WaitingRank>(), std::make_shared<WaitingRank>()};
  RendezvousPtr rendezvous = waiting_ranks(outcomes, ranks);
  EXPECT_FALSE(ranks[1]->wait());
  CompletionThreads::instance().complete(std::move(rendezvous));
  EXPECT_TRUE(outcomes[1].wait());
  EXPECT_TRUE(ranks[0]->wait());
  EXPECT_EQ(outcomes[0].times(), 0);
  EXPECT_EQ(outcomes[1].times(), 1);
}

TEST(WaitingRanks, GetTheErrorByTheirCompletions) {
  const std::vector<Outcome> outcomes(2);
  const std::vector<WaitingRankPtr> ranks = {std::make_shared<WaitingRank>(), std::make_shared<WaitingRank>()};
  CompletionThreads::instance().complete(waiting_ranks(outcomes, ranks), testing::failure_with("an error"));
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_FALSE(ranks[rank]->wait());
    ASSERT_TRUE(outcomes[rank].wait());
    EXPECT_EQ(outcomes[rank].error(), "an error");
  }
}

TEST(WaitingRanks, NotWhereACompletionWaitsForTheThread) {
  EXPECT_TRUE(CompletionThreads::may_wait());
  std::vector<Outcome> ended(2);
  RendezvousPtr rendezvous(new Rendezvous);
  std::atomic<int> first{-1}, last{-1};
  rendezvous->done.push_back([&, done = &ended[0]](const CallFailure*) {
    first = CompletionThreads::may_wait();
    done->completion()(nullptr);
  });
  rendezvous->done.push_back([&, done = &ended[1]](const CallFailure*) {
    last = CompletionThreads::may_wait();
    done->completion()(nullptr);
  });
  CompletionThreads::instance().complete(std::move(rendezvous));
  for (const Outcome& outcome : ended) ASSERT_TRUE(outcome.wait());
  EXPECT_EQ(first, 0);
  EXPECT_EQ(last, 1);
}

TEST(WaitingRanks, ThatMoveAreCompletedOnce) {
  const std::vector<Outcome> outcomes(2);
  const std::vector<WaitingRankPtr> ranks = {std::make_shared<WaitingRank>(), std::make_shared<WaitingRank>()};
  RendezvousPtr rendezvous = waiting_ranks(outcomes, ranks);
  for (const WaitingRankPtr& rank : ranks) rank->start(kMoves);
  CompletionThreads::instance().complete(std::move(rendezvous));
  // Like a task of the pool.
  if (ranks[0]->wait()) outcomes[0].completion()(nullptr);
  for (const Outcome& outcome : outcomes) {
    ASSERT_TRUE(outcome.wait());
    EXPECT_EQ(outcome.times(), 1);
  }
  EXPECT_FALSE(ranks[1]->wait()) << "it comes too late";
}

TEST(WaitingRanks, ThatMoveGetTheError) {
  const std::vector<Outcome> outcomes(2);
  const std::vector<WaitingRankPtr> ranks = {std::make_shared<WaitingRank>(), std::make_shared<WaitingRank>()};
  RendezvousPtr rendezvous = waiting_ranks(outcomes, ranks);
  for (const WaitingRankPtr& rank : ranks) rank->start(kMoves);
  CompletionThreads::instance().complete(std::move(rendezvous), testing::failure_with("an error"));
  for (int rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(outcomes[rank].wait());
    EXPECT_EQ(outcomes[rank].error(), "an error");
    EXPECT_FALSE(ranks[rank]->wait());
  }
}

// ---- Calls of the engine --------------------------------------------------------------------------------------------

class NoWorkers final : public Workers {
 public:
  int num_threads() const override { return 1; }
  void schedule(std::function<void()>) override { FAIL() << "it has one thread"; }
};

// A rank that makes calls on its own thread, like a handler.
struct Rank {
  std::vector<float> input, output;
  WaitingRankPtr waiting = std::make_shared<WaitingRank>();

  // Returns false if the call does not complete in time.
  bool call(RendezvousMap& map, int64_t run_id, int index, const Message& message) {
    if (!waiting->is_free()) waiting = std::make_shared<WaitingRank>();
    waiting->skip();
    const Outcome outcome;
    Participant participant;
    participant.inputs = {input.data()};
    participant.outputs = {output.data()};
    participant.done = outcome.completion();
    participant.waiting = &waiting;
    NoWorkers workers;
    RendezvousPtr rendezvous = map.arrive(run_id, index, std::move(participant));
    if (rendezvous != nullptr) run_collective(std::move(rendezvous), message, workers);
    return waiting->wait() || outcome.wait();
  }
};

// Each call is an execution of its own, so ranks wait however many there are.
void run_calls(int num_ranks, size_t count, int num_calls) {
  SCOPED_TRACE(std::to_string(num_ranks) + " ranks, " + std::to_string(count) + " elements");
  RendezvousMap map(one_group(num_ranks), "test");
  const Message message{DType::f32, {count}, {}, Op::sum};
  std::vector<int64_t> runs;
  for (int i = 0; i < num_calls; ++i) runs.push_back(next_run_id());
  std::vector<Rank> ranks(num_ranks);
  std::atomic<int> num_wrong{0};
  std::vector<std::thread> threads;
  for (int index = 0; index < num_ranks; ++index) {
    threads.emplace_back([&, index] {
      Rank& rank = ranks[index];
      rank.output.resize(count);
      for (int call = 0; call < num_calls; ++call) {
        rank.input.assign(count, static_cast<float>((index + 1) * (call + 1)));
        if (!rank.call(map, runs[call], index, message)) return void(++num_wrong);
        const float expected = static_cast<float>(num_ranks * (num_ranks + 1) / 2 * (call + 1));
        num_wrong += static_cast<int>(
            std::count_if(rank.output.begin(), rank.output.end(), [&](float value) { return value != expected; }));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_wrong, 0);
}

TEST(WaitingRanks, GetTheirResults) {
  for (int num_ranks : {1, 2, 3, 8}) run_calls(num_ranks, 100, 200);
}

TEST(WaitingRanks, GetTheResultsOfSharedWork) {
  // Thresholds: 512 KiB read and written, and 2 MiB.
  for (size_t count : {40'000, 300'000}) {
    for (int num_ranks : {2, 4}) run_calls(num_ranks, count, 20);
  }
}

TEST(WaitingRanks, DoTheWorkInPlaceOfThePool) {
  class TwoWorkers final : public Workers {
   public:
    int num_threads() const override { return 2; }
    void schedule(std::function<void()>) override { FAIL() << "a rank was waiting"; }
  } workers;
  constexpr size_t kCount = 1 << 20;
  std::vector<float> inputs[2] = {std::vector<float>(kCount, 1), std::vector<float>(kCount, 2)};
  std::vector<float> outputs[2] = {std::vector<float>(kCount), std::vector<float>(kCount)};
  const std::vector<Outcome> outcomes(2);
  const std::vector<WaitingRankPtr> ranks = {std::make_shared<WaitingRank>(), std::make_shared<WaitingRank>()};
  RendezvousPtr rendezvous = waiting_ranks(outcomes, ranks);
  rendezvous->inputs = {inputs[0].data(), inputs[1].data(), inputs[0].data(), inputs[1].data()};
  rendezvous->outputs = {outputs[0].data(), outputs[1].data()};
  run_collective(std::move(rendezvous), {DType::f32, {kCount}, {}, Op::sum}, workers);
  for (const WaitingRankPtr& rank : ranks) EXPECT_TRUE(rank->wait());
  EXPECT_EQ(outputs[0], std::vector<float>(kCount, 3));
  EXPECT_EQ(outputs[1], outputs[0]);
}

}  // namespace
}  // namespace jax_ring::cpu::testing
