// rendezvous_test.cc: ranks that make the same call share a rendezvous, complete once, and missing ranks are named.
#include "cpu/rendezvous/rendezvous.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/rendezvous/watchdog.h"
#include "tests/support/support.h"

namespace jax_ring::cpu::testing {
namespace {

using Partitions = std::vector<int64_t>;

// ---- Replica groups -----------------------------------------------------------------------------------------------

TEST(ReplicaGroups, LocateEveryPartition) {
  const ReplicaGroups groups({5, 0, 3, 7, 1, 2}, {3, 1, 2});
  EXPECT_EQ(groups.size(0), 3);
  EXPECT_EQ(groups.size(1), 1);
  EXPECT_EQ(groups.size(2), 2);
  EXPECT_EQ(groups.members(0), (Partitions{5, 0, 3}));
  EXPECT_EQ(groups.members(1), (Partitions{7}));
  EXPECT_EQ(groups.members(2), (Partitions{1, 2}));
  for (int group = 0; group < 3; ++group) {
    for (int rank = 0; rank < groups.size(group); ++rank) {
      const ReplicaGroups::Place place = groups.place(groups.members(group)[rank]);
      EXPECT_EQ(place.group, group);
      EXPECT_EQ(place.rank, rank);
    }
  }
}

TEST(ReplicaGroups, PartitionsOutsideEveryGroup) {
  const ReplicaGroups groups({5, 0}, {2});
  for (int64_t partition : {int64_t{-1}, int64_t{1}, int64_t{4}, int64_t{6}, int64_t{1} << 40}) {
    EXPECT_THROW(groups.place(partition), std::out_of_range) << partition;
  }
}

TEST(ReplicaGroups, RejectPartitionsThatCannotBe) {
  for (int64_t partition : {int64_t{-1}, int64_t{1} << 40}) {
    EXPECT_THROW(ReplicaGroups({0, partition}, {2}), std::invalid_argument) << partition;
  }
}

// ---- RendezvousMap ------------------------------------------------------------------------------------------------

// A participant with a number instead of a buffer address, so that a rendezvous shows its members.
Participant participant(uintptr_t number, const Outcome& outcome) {
  Participant result;
  result.inputs = {reinterpret_cast<const void*>(number)};
  result.outputs = {nullptr};
  result.done = outcome.completion();
  return result;
}

uintptr_t number_of(const Rendezvous& rendezvous, int rank) {
  return reinterpret_cast<uintptr_t>(rendezvous.inputs[rank]);
}

void succeed(Rendezvous& rendezvous) {
  for (Completion& done : rendezvous.done) done(nullptr);
}

void random_delay(std::mt19937& random) {
  switch (random() % 4) {
    case 0:
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
      break;
    case 1:
      std::this_thread::yield();
      break;
    default:
      break;
  }
}

// One thread for each (run, partition), each making `calls` calls through one map. The thread that completes a
// rendezvous checks that it contains exactly its group's ranks, in rank order, each in the same call.
struct Traffic {
  Partitions partitions, sizes;
  int runs = 1;
  int calls = 100;
  bool delays = false;
  bool wait_for_each_call = true;  // as in the runtime; otherwise a fast rank gets many calls ahead

  void run() {
    const ReplicaGroups groups(partitions, sizes);
    RendezvousMap rendezvous_map(groups, "test");
    std::atomic<int> num_complete{0}, mistakes{0}, hangs{0};
    std::vector<std::vector<Outcome>> outcomes;
    for (size_t i = 0; i < runs * partitions.size(); ++i) outcomes.emplace_back(calls);
    std::vector<int64_t> run_ids(runs);
    for (int64_t& run_id : run_ids) run_id = next_run_id();

    const auto number = [](int64_t partition, int call) { return static_cast<uintptr_t>(partition * 1000000 + call); };
    const auto rank_thread = [&](int run, size_t index) {
      const int64_t partition = partitions[index];
      std::mt19937 random(static_cast<unsigned>(run * 1000 + index));
      for (int call = 0; call < calls; ++call) {
        const Outcome& mine = outcomes[run * partitions.size() + index][call];
        if (delays) random_delay(random);
        if (auto rendezvous =
                rendezvous_map.arrive(run_ids[run], partition, participant(number(partition, call), mine))) {
          ++num_complete;
          const int group = groups.place(partition).group;
          bool right = rendezvous->run_id == run_ids[run] && rendezvous->group == group &&
                       rendezvous->num_arrived == groups.size(group) &&
                       rendezvous->done.size() == groups.members(group).size();
          for (int rank = 0; right && rank < groups.size(group); ++rank) {
            right = rendezvous->done[rank] && number_of(*rendezvous, rank) == number(groups.members(group)[rank], call);
          }
          if (!right) ++mistakes;
          if (delays) random_delay(random);
          succeed(*rendezvous);
        }
        if (wait_for_each_call && !mine.wait()) {
          ++hangs;
          return;
        }
      }
    };
    std::vector<std::thread> threads;
    for (int run = 0; run < runs; ++run) {
      for (size_t index = 0; index < partitions.size(); ++index) threads.emplace_back(rank_thread, run, index);
    }
    for (std::thread& thread : threads) thread.join();

    EXPECT_EQ(hangs, 0);
    EXPECT_EQ(mistakes, 0);
    EXPECT_EQ(num_complete, static_cast<int>(runs * sizes.size()) * calls);
    int not_completed_once = 0, errors = 0;
    for (const auto& of_rank : outcomes) {
      for (const Outcome& call : of_rank) {
        not_completed_once += call.times() != 1;
        errors += !call.error().empty();
      }
    }
    EXPECT_EQ(not_completed_once, 0);
    EXPECT_EQ(errors, 0);
    EXPECT_TRUE(rendezvous_map.remove_if([](const Rendezvous&) { return true; }).empty())
        << "a rendezvous was left open";
  }
};

TEST(RendezvousMap, OneRankCompletesAlone) {
  RendezvousMap rendezvous_map(ReplicaGroups({4}, {1}), "test");
  const Outcome outcome;
  auto rendezvous = rendezvous_map.arrive(next_run_id(), 4, participant(1, outcome));
  ASSERT_NE(rendezvous, nullptr);
  succeed(*rendezvous);
  EXPECT_EQ(outcome.times(), 1);
}

TEST(RendezvousMap, LastToArriveGetsTheRendezvous) {
  RendezvousMap rendezvous_map(ReplicaGroups({2, 0, 1}, {3}), "test");
  const int64_t run = next_run_id();
  Outcome outcomes[3];
  EXPECT_EQ(rendezvous_map.arrive(run, 0, participant(10, outcomes[0])), nullptr);
  EXPECT_EQ(rendezvous_map.arrive(run, 1, participant(11, outcomes[1])), nullptr);
  auto rendezvous = rendezvous_map.arrive(run, 2, participant(12, outcomes[2]));
  ASSERT_NE(rendezvous, nullptr);
  // In the group's order, not in order of arrival.
  ASSERT_EQ(rendezvous->num_ranks(), 3);
  EXPECT_EQ(number_of(*rendezvous, 0), 12u);
  EXPECT_EQ(number_of(*rendezvous, 1), 10u);
  EXPECT_EQ(number_of(*rendezvous, 2), 11u);
  for (const Outcome& one : outcomes) EXPECT_EQ(one.times(), 0);
}

TEST(RendezvousMap, RejectsAnUnknownPartition) {
  RendezvousMap rendezvous_map(ReplicaGroups({0, 1}, {2}), "test");
  const Outcome outcome;
  EXPECT_THROW(rendezvous_map.arrive(next_run_id(), 2, participant(0, outcome)), std::out_of_range);
  EXPECT_TRUE(rendezvous_map.remove_if([](const Rendezvous&) { return true; }).empty());
}

TEST(RendezvousMap, ARankThatCallsAgainOpensASecondRendezvous) {
  RendezvousMap rendezvous_map(ReplicaGroups({0, 1}, {2}), "test");
  const int64_t run = next_run_id();
  const Outcome outcome;
  EXPECT_EQ(rendezvous_map.arrive(run, 0, participant(1, outcome)), nullptr);
  EXPECT_EQ(rendezvous_map.arrive(run, 0, participant(2, outcome)), nullptr);
  EXPECT_EQ(rendezvous_map.arrive(run, 0, participant(3, outcome)), nullptr);
  for (uintptr_t call : {1, 2, 3}) {  // the other rank joins them oldest first
    auto rendezvous = rendezvous_map.arrive(run, 1, participant(call + 10, outcome));
    ASSERT_NE(rendezvous, nullptr);
    EXPECT_EQ(number_of(*rendezvous, 0), call);
    EXPECT_EQ(number_of(*rendezvous, 1), call + 10);
  }
}

TEST(RendezvousMap, RunsAndGroupsDoNotMix) {
  RendezvousMap rendezvous_map(ReplicaGroups({0, 1, 2, 3}, {2, 2}), "test");
  const int64_t first = next_run_id(), second = next_run_id();
  const Outcome outcome;
  EXPECT_EQ(rendezvous_map.arrive(first, 0, participant(1, outcome)), nullptr);
  EXPECT_EQ(rendezvous_map.arrive(second, 1, participant(2, outcome)), nullptr);
  EXPECT_EQ(rendezvous_map.arrive(first, 3, participant(3, outcome)), nullptr);
  EXPECT_EQ(rendezvous_map.arrive(second, 2, participant(4, outcome)), nullptr);
  auto rendezvous = rendezvous_map.arrive(first, 1, participant(5, outcome));
  ASSERT_NE(rendezvous, nullptr);
  EXPECT_EQ(rendezvous->run_id, first);
  EXPECT_EQ(rendezvous->group, 0);
  EXPECT_EQ(number_of(*rendezvous, 0), 1u);
  EXPECT_EQ(number_of(*rendezvous, 1), 5u);
  EXPECT_EQ(rendezvous_map.remove_if([](const Rendezvous&) { return true; }).size(), 3u);
}

TEST(RendezvousMap, RemoveLeavesTheOthersInOrder) {
  RendezvousMap rendezvous_map(ReplicaGroups({0, 1}, {2}), "test");
  const int64_t keep = next_run_id(), remove = next_run_id();
  const Outcome outcome;
  for (uintptr_t call : {1, 2, 3}) {
    EXPECT_EQ(rendezvous_map.arrive(keep, 0, participant(call, outcome)), nullptr);
    EXPECT_EQ(rendezvous_map.arrive(remove, 1, participant(call, outcome)), nullptr);
  }
  const auto removed =
      rendezvous_map.remove_if([&](const Rendezvous& rendezvous) { return rendezvous.run_id == remove; });
  ASSERT_EQ(removed.size(), 3u);
  for (const RendezvousPtr& rendezvous : removed) EXPECT_EQ(rendezvous->run_id, remove);
  for (uintptr_t call : {1, 2, 3}) {
    auto rendezvous = rendezvous_map.arrive(keep, 1, participant(0, outcome));
    ASSERT_NE(rendezvous, nullptr);
    EXPECT_EQ(number_of(*rendezvous, 0), call);
  }
}

TEST(RendezvousMap, ThreadsInALoop) { Traffic{{0, 1, 2, 3}, {4}, 1, 2000 / kSlowdown}.run(); }

TEST(RendezvousMap, UnevenGroupsInAnyOrder) { Traffic{{6, 2, 0, 9, 5, 1, 3}, {1, 4, 2}, 1, 500 / kSlowdown}.run(); }

TEST(RendezvousMap, SeveralRunsAtOnce) { Traffic{{0, 1, 2}, {3}, 4, 500 / kSlowdown}.run(); }

TEST(RendezvousMap, RandomDelays) { Traffic{{3, 1, 0, 2, 4}, {3, 2}, 3, 200 / kSlowdown, true}.run(); }

TEST(RendezvousMap, RanksRunAhead) { Traffic{{0, 1, 2, 3, 4}, {3, 2}, 2, 500 / kSlowdown, true, false}.run(); }

// ---- Deadlines ----------------------------------------------------------------------------------------------------

// As long as a test can afford, and as short as a loaded machine permits.
constexpr double kDeadline = 0.3;

TEST(Deadline, FailsWaitingRanksAndNamesMissingOnes) {
  const ScopedDeadline deadline(kDeadline);
  RendezvousMap rendezvous_map(ReplicaGroups({7, 3, 5, 0}, {3, 1}), "all_reduce over 'dp'");
  const int64_t run = next_run_id();
  Outcome first, third;
  const auto began = Clock::now();
  EXPECT_EQ(rendezvous_map.arrive(run, 7, participant(0, first)), nullptr);
  EXPECT_EQ(rendezvous_map.arrive(run, 5, participant(0, third)), nullptr);
  ASSERT_TRUE(first.wait());
  ASSERT_TRUE(third.wait());
  EXPECT_GE(std::chrono::duration<double>(Clock::now() - began).count(), kDeadline);
  const std::string error = first.error();
  EXPECT_EQ(third.error(), error);
  for (const char* expected :
       {"all_reduce over 'dp': 2 of 3 ranks arrived within 0.3 s.",
        "Missing: rank 1 (mesh position 3) of the group of mesh positions [7, 3, 5].", "JAX_RING_TIMEOUT_S"}) {
    EXPECT_NE(error.find(expected), std::string::npos) << error;
  }
  EXPECT_EQ(first.times(), 1);
  EXPECT_EQ(third.times(), 1);
}

TEST(Deadline, NamesSeveralMissingRanks) {
  const ScopedDeadline deadline(kDeadline);
  RendezvousMap rendezvous_map(ReplicaGroups({0, 1, 2, 3}, {4}), "test");
  const Outcome outcome;
  EXPECT_EQ(rendezvous_map.arrive(next_run_id(), 2, participant(0, outcome)), nullptr);
  ASSERT_TRUE(outcome.wait());
  const std::string expected = "Missing: ranks 0 (mesh position 0), 1 (mesh position 1), 3 (mesh position 3) of the";
  EXPECT_NE(outcome.error().find(expected), std::string::npos) << outcome.error();
}

TEST(Failures, AreKeptByNumbersThatDiffer) {
  const CallFailurePtr first = failure_with("first");
  EXPECT_EQ(first->message(), "first [failure " + std::to_string(first->number) + "]");
  const CallFailures& all = CallFailures::instance();
  EXPECT_EQ(all.find(first->number), first);
  EXPECT_EQ(all.find(first->number + 1), nullptr);
  for (int later = 1; later < 256; ++later) EXPECT_EQ(failure_with("later")->number, first->number + later);
  EXPECT_EQ(all.find(first->number), first);
  const CallFailurePtr last = failure_with("last");
  EXPECT_EQ(all.find(first->number), nullptr);
  EXPECT_EQ(all.find(last->number), last);
  for (int64_t number : {int64_t{-1}, int64_t{0}, INT64_MAX, INT64_MIN}) EXPECT_EQ(all.find(number), nullptr);
}

// Both calls expire in the same check, or one while the other is open.
TEST(Deadline, NamesTheCallInWhichAMissingRankWaits) {
  for (const double between : {0.0, kDeadline / 2}) {
    const ScopedDeadline deadline(kDeadline);
    RendezvousMap first(ReplicaGroups({0, 1, 2}, {3}), "first"), second(ReplicaGroups({3, 2, 1, 0}, {4}), "second");
    const int64_t run = next_run_id();
    Outcome outcomes[2], other_run;
    EXPECT_EQ(first.arrive(run, 0, participant(0, outcomes[0])), nullptr);
    std::this_thread::sleep_for(std::chrono::duration<double>(between));
    EXPECT_EQ(second.arrive(run, 1, participant(1, outcomes[1])), nullptr);
    EXPECT_EQ(second.arrive(next_run_id(), 2, participant(2, other_run)), nullptr);
    ASSERT_TRUE(outcomes[0].wait() && outcomes[1].wait() && other_run.wait());
    EXPECT_NE(outcomes[0].error().find("0, 1, 2]. Rank 1 waits in another call: second. Every"), std::string::npos)
        << outcomes[0].error();
    EXPECT_EQ(other_run.error().find("another call"), std::string::npos) << other_run.error();
  }
}

TEST(Barrier, FailsWithItsRun) {
  const ScopedDeadline deadline(kDeadline);
  RendezvousMap call(ReplicaGroups({0, 1, 2}, {3}), "call"), barrier(ReplicaGroups({0, 1, 2}, {3}), "");
  const int64_t run = next_run_id(), other_run = next_run_id();
  Outcome outcomes[3];
  EXPECT_EQ(barrier.arrive(run, 1, participant(1, outcomes[1])), nullptr);
  EXPECT_EQ(call.arrive(run, 0, participant(0, outcomes[0])), nullptr);
  ASSERT_TRUE(outcomes[0].wait() && outcomes[1].wait());
  for (const Outcome* outcome : {&outcomes[0], &outcomes[1]}) {
    EXPECT_NE(outcome->error().find("Rank 1 waits at the end of the program, without having made this call."),
              std::string::npos)
        << outcome->error();
  }
  // A communicator fails a run without a deadline.
  EXPECT_EQ(barrier.arrive(other_run, 2, participant(2, outcomes[2])), nullptr);
  Watchdog::instance().record_failure(other_run, failure_with("failed elsewhere"));
  ASSERT_TRUE(outcomes[2].wait());
  EXPECT_EQ(outcomes[2].error(), "failed elsewhere");
}

// A rank that failed for reasons of its own never arrives.
TEST(Barrier, LetsRanksGoOnThatNoCallWaitsFor) {
  const ScopedDeadline deadline(kDeadline);
  RendezvousMap barrier(ReplicaGroups({0, 1}, {2}), "");
  const Outcome outcome;
  EXPECT_EQ(barrier.arrive(next_run_id(), 1, participant(1, outcome)), nullptr);
  ASSERT_TRUE(outcome.wait());
  EXPECT_EQ(outcome.error(), "");
}

TEST(Deadline, OtherRunsGoOn) {
  const ScopedDeadline deadline(kDeadline);
  RendezvousMap rendezvous_map(ReplicaGroups({0, 1}, {2}), "test");
  const int64_t late = next_run_id(), punctual = next_run_id();
  const Outcome waiting;
  EXPECT_EQ(rendezvous_map.arrive(late, 0, participant(0, waiting)), nullptr);
  int calls = 0;
  const auto end = Clock::now() + kTestTimeout;
  // Before, during and after the failure of the late run.
  for (int after = 0; after < 100 && Clock::now() < end; ++calls) {
    if (waiting.times() > 0) ++after;
    Outcome outcomes[2];
    ASSERT_EQ(rendezvous_map.arrive(punctual, 0, participant(0, outcomes[0])), nullptr);
    auto rendezvous = rendezvous_map.arrive(punctual, 1, participant(1, outcomes[1]));
    ASSERT_NE(rendezvous, nullptr) << "call " << calls;
    succeed(*rendezvous);
    for (const Outcome& one : outcomes) ASSERT_EQ(one.error(), "") << "call " << calls;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  EXPECT_EQ(waiting.times(), 1);
  EXPECT_NE(waiting.error(), "");
}

TEST(Deadline, AFailedRunFailsAllItsCalls) {
  const ScopedDeadline deadline(2 * kDeadline);
  RendezvousMap first(ReplicaGroups({0, 1}, {2}), "first call");
  RendezvousMap second(ReplicaGroups({0, 1}, {2}), "second call");
  const int64_t run = next_run_id();
  const Outcome late, open_elsewhere, too_late, its_peer;
  EXPECT_EQ(first.arrive(run, 0, participant(0, late)), nullptr);
  std::this_thread::sleep_for(std::chrono::duration<double>(kDeadline));
  // Opened after half the deadline: it fails with the first one, not at its own deadline.
  EXPECT_EQ(second.arrive(run, 1, participant(0, open_elsewhere)), nullptr);
  ASSERT_TRUE(late.wait());
  EXPECT_NE(late.error().find("first call"), std::string::npos) << late.error();
  ASSERT_TRUE(open_elsewhere.wait(std::chrono::duration<double>(kDeadline / 2)));
  EXPECT_EQ(open_elsewhere.error(), late.error());

  // The missing rank arrives at either call after all: it fails at once and joins no rendezvous.
  for (RendezvousMap* rendezvous_map : {&first, &second}) {
    for (int64_t partition : {1, 0}) {
      const Outcome outcome;
      EXPECT_EQ(rendezvous_map->arrive(run, partition, participant(0, outcome)), nullptr);
      EXPECT_EQ(outcome.times(), 1);
      EXPECT_EQ(outcome.error(), late.error());
    }
    EXPECT_TRUE(rendezvous_map->remove_if([](const Rendezvous&) { return true; }).empty());
  }
  // The next execution of the same calls is not affected.
  const int64_t next = next_run_id();
  EXPECT_EQ(first.arrive(next, 0, participant(0, too_late)), nullptr);
  EXPECT_NE(first.arrive(next, 1, participant(0, its_peer)), nullptr);
}

TEST(Deadline, ANewDeadlineTakesEffectAtOnce) {
  Outcome outcome;
  RendezvousMap rendezvous_map(ReplicaGroups({0, 1}, {2}), "test");
  const ScopedDeadline deadline(300);
  EXPECT_EQ(rendezvous_map.arrive(next_run_id(), 0, participant(0, outcome)), nullptr);
  EXPECT_FALSE(outcome.wait(std::chrono::duration<double>(kDeadline)));
  Watchdog::instance().set_deadline(kDeadline);  // a shorter one takes effect at once, also for ranks that already wait
  EXPECT_TRUE(outcome.wait(std::chrono::seconds(2)));
}

// Replaces the interpreter's lock: acts while nothing can be launched.
class ActingLock final : public LaunchLock {
 public:
  explicit ActingLock(std::function<void()> on_release) : on_release_(std::move(on_release)) {}
  bool acquire() override { return true; }
  void release() override { on_release_(); }

 private:
  std::function<void()> on_release_;
};

TEST(Deadline, WhatWasInFlightFailsAndWhatIsLaunchedLaterDoesNot) {
  RendezvousMap first(ReplicaGroups({0, 1}, {2}), "first"), second(ReplicaGroups({0, 1}, {2}), "second");
  RendezvousMap of_another_program(ReplicaGroups({0, 1}, {2}), "another");
  const int64_t failed = next_run_id(), in_flight = next_run_id(), other = next_run_id(), later = next_run_id();
  const Outcome complete, its_peer, missing, early, its_call, elsewhere, retry;
  Outcome released;
  const auto before = Watchdog::instance().deadline();
  Watchdog::instance().set_launch_lock(std::make_unique<ActingLock>([&] { released.completion()(nullptr); }));
  EXPECT_EQ(first.arrive(failed, 0, participant(0, complete)), nullptr);
  EXPECT_NE(first.arrive(failed, 1, participant(0, its_peer)), nullptr);
  Participant waits = participant(0, missing);
  const std::function<void()> meanwhile = [&] {
    // The first call of the failed execution, not the call that made it fail.
    first.arrive(in_flight, 1, participant(0, early));
    first.arrive(in_flight, 0, participant(0, its_call));
    of_another_program.arrive(other, 0, participant(0, elsewhere));
  };
  waits.done = [&](const CallFailure* error) {
    meanwhile();
    missing.completion()(error);
  };
  EXPECT_EQ(second.arrive(failed, 0, std::move(waits)), nullptr);
  Watchdog::instance().set_deadline(kDeadline);
  ASSERT_TRUE(released.wait());
  Watchdog::instance().set_deadline(300);
  EXPECT_EQ(missing.error().find("second: 1 of 2 ranks"), 0u) << missing.error();
  for (const Outcome* outcome : {&early, &its_call}) {
    EXPECT_EQ(outcome->times(), 1);
    EXPECT_EQ(outcome->error(), "In flight when an earlier execution of this program failed: " + missing.error());
  }
  EXPECT_EQ(elsewhere.times(), 0);
  EXPECT_EQ(first.arrive(later, 0, participant(0, retry)), nullptr);
  EXPECT_EQ(retry.times(), 0);
  Watchdog::instance().set_launch_lock(nullptr);
  Watchdog::instance().set_deadline(before);
}

TEST(Deadline, CallingBackIntoTheRendezvousIsAllowed) {
  const ScopedDeadline deadline(kDeadline / 3);
  RendezvousMap rendezvous_map(ReplicaGroups({0, 1}, {2}), "test");
  const int64_t run = next_run_id();
  const Outcome outer, inner;
  Participant calls_again = participant(0, outer);
  calls_again.done = [&](const CallFailure* error) {
    rendezvous_map.arrive(run, 0, participant(0, inner));
    // A completion may also run another program's first call.
    const RendezvousMap another(ReplicaGroups({0}, {1}), "test");
    outer.completion()(error);
  };
  EXPECT_EQ(rendezvous_map.arrive(run, 0, std::move(calls_again)), nullptr);
  ASSERT_TRUE(outer.wait());
  EXPECT_EQ(inner.times(), 1);
  EXPECT_EQ(inner.error(), outer.error());
}

// Ranks arrive around their deadline. Either way each rank completes once, and a rendezvous either succeeds or fails
// for all of its ranks.
TEST(Deadline, RacesWithArrivals) {
  const ScopedDeadline deadline(0.002);
  RendezvousMap rendezvous_map(ReplicaGroups({0, 1, 2}, {3}), "test");
  const int rounds = 600 / kSlowdown;
  std::vector<std::vector<Outcome>> outcomes;
  for (int rank = 0; rank < 3; ++rank) outcomes.emplace_back(rounds);
  std::vector<int64_t> runs(rounds);
  for (int64_t& run : runs) run = next_run_id();
  std::atomic<int> completed{0};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      std::mt19937 random(static_cast<unsigned>(rank));
      for (int round = 0; round < rounds; ++round) {
        if (auto rendezvous = rendezvous_map.arrive(runs[round], rank, participant(0, outcomes[rank][round]))) {
          ++completed;
          succeed(*rendezvous);
        }
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  int successes = 0;
  for (int round = 0; round < rounds; ++round) {
    for (int rank = 0; rank < 3; ++rank) {
      ASSERT_TRUE(outcomes[rank][round].wait()) << "rank " << rank << ", round " << round;
      ASSERT_EQ(outcomes[rank][round].times(), 1);
      ASSERT_EQ(outcomes[rank][round].error(), outcomes[0][round].error()) << "rank " << rank << ", round " << round;
    }
    successes += outcomes[0][round].error().empty();
  }
  EXPECT_EQ(successes, completed);
}

// The runtime destroys call sites, with their maps, while the watchdog checks others.
TEST(Deadline, MapsAreCreatedAndDestroyedDuringChecks) {
  const ScopedDeadline deadline(0.0005);
  std::vector<std::thread> threads;
  std::atomic<int> completed_twice{0};
  for (int index = 0; index < 3; ++index) {
    threads.emplace_back([&, index] {
      std::mt19937 random(static_cast<unsigned>(index));
      for (int round = 0; round < 1000 / kSlowdown; ++round) {
        const Outcome outcome;
        {
          RendezvousMap rendezvous_map(ReplicaGroups({0, 1}, {2}),
                                       "a call with a text that does not fit in the string itself");
          EXPECT_EQ(rendezvous_map.arrive(next_run_id(), 0, participant(0, outcome)), nullptr);
          random_delay(random);
        }
        completed_twice += outcome.times() > 1;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(completed_twice, 0);
}

}  // namespace
}  // namespace jax_ring::cpu::testing
