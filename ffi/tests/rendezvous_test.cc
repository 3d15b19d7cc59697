// rendezvous_test.cc: ranks that make the same call meet, all of them are told once, and late ones are named.
#include "cpu/rendezvous.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <limits>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "common/call_sites.h"
#include "cpu/watchdog.h"
#include "support.h"

namespace jax_ring::cpu::testing {
namespace {

using Partitions = std::vector<int64_t>;

// ---- Replica groups -----------------------------------------------------------------------------------------------

TEST(ReplicaGroups, GiveEveryPartitionItsPlace) {
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

TEST(ReplicaGroups, RefuseWhatIsNoPartitionIntoGroups) {
  struct Case {
    const char* what;
    Partitions partitions, sizes;
  };
  const Case cases[] = {
      {"no groups", {}, {}},
      {"no sizes", {0, 1}, {}},
      {"no partitions", {}, {2}},
      {"an empty group", {0, 1}, {2, 0}},
      {"an empty group first", {0, 1}, {0, 2}},
      {"a negative size", {0, 1}, {3, -1}},
      {"sizes too small", {0, 1, 2}, {2}},
      {"sizes too large", {0, 1, 2}, {2, 2}},
      {"a size near overflow", {0, 1}, {1, std::numeric_limits<int64_t>::max()}},
      {"twice in one group", {0, 1, 1}, {3}},
      {"in two groups", {0, 1, 1, 2}, {2, 2}},
      {"a negative partition", {0, -1}, {2}},
  };
  for (const Case& c : cases) EXPECT_THROW(ReplicaGroups(c.partitions, c.sizes), std::invalid_argument) << c.what;
}

// ---- Meeting ------------------------------------------------------------------------------------------------------

// A participant that carries a number in place of a buffer's address, so that a meeting shows who is in it.
Participant participant(uintptr_t number, const Told& told) {
  Participant result;
  result.inputs = {reinterpret_cast<const void*>(number)};
  result.outputs = {nullptr};
  result.done = told.completion();
  return result;
}

uintptr_t number_of(const Meeting& meeting, int rank) { return reinterpret_cast<uintptr_t>(meeting.inputs[rank]); }

void succeed(Meeting& meeting) {
  for (Completion& done : meeting.done) done(nullptr);
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

// One thread for each (run, partition), each making `calls` calls at one rendezvous. Whoever completes a meeting checks
// that it holds exactly its group's ranks, in rank order, each in the same of its calls.
struct Traffic {
  Partitions partitions, sizes;
  int runs = 1;
  int calls = 100;
  bool delays = false;
  bool wait_for_each_call = true;  // as the runtime does; otherwise a fast rank is many calls ahead

  void run() {
    const ReplicaGroups groups(partitions, sizes);
    Rendezvous rendezvous(groups, "test");
    std::atomic<int> meetings{0}, mistakes{0}, hangs{0};
    std::vector<std::vector<Told>> told;
    for (size_t i = 0; i < runs * partitions.size(); ++i) told.emplace_back(calls);
    std::vector<int64_t> run_ids(runs);
    for (int64_t& run_id : run_ids) run_id = next_run_id();

    const auto number = [](int64_t partition, int call) { return static_cast<uintptr_t>(partition * 1000000 + call); };
    const auto rank_thread = [&](int run, size_t index) {
      const int64_t partition = partitions[index];
      std::mt19937 random(static_cast<unsigned>(run * 1000 + index));
      for (int call = 0; call < calls; ++call) {
        const Told& mine = told[run * partitions.size() + index][call];
        if (delays) random_delay(random);
        if (auto meeting = rendezvous.arrive(run_ids[run], partition, participant(number(partition, call), mine))) {
          ++meetings;
          const int group = groups.place(partition).group;
          bool right = meeting->run_id == run_ids[run] && meeting->group == group &&
                       meeting->num_arrived == groups.size(group) &&
                       meeting->done.size() == groups.members(group).size();
          for (int rank = 0; right && rank < groups.size(group); ++rank) {
            right = meeting->done[rank] && number_of(*meeting, rank) == number(groups.members(group)[rank], call);
          }
          if (!right) ++mistakes;
          if (delays) random_delay(random);
          succeed(*meeting);
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
    EXPECT_EQ(meetings, static_cast<int>(runs * sizes.size()) * calls);
    int not_told_once = 0, errors = 0;
    for (const auto& of_rank : told) {
      for (const Told& call : of_rank) {
        not_told_once += call.times() != 1;
        errors += !call.error().empty();
      }
    }
    EXPECT_EQ(not_told_once, 0);
    EXPECT_EQ(errors, 0);
    EXPECT_TRUE(rendezvous.take([](const Meeting&) { return true; }).empty()) << "a meeting was left open";
  }
};

TEST(Rendezvous, OneRankMeetsItself) {
  Rendezvous rendezvous(ReplicaGroups({4}, {1}), "test");
  const Told told;
  auto meeting = rendezvous.arrive(next_run_id(), 4, participant(1, told));
  ASSERT_NE(meeting, nullptr);
  succeed(*meeting);
  EXPECT_EQ(told.times(), 1);
}

TEST(Rendezvous, LastToArriveGetsTheMeeting) {
  Rendezvous rendezvous(ReplicaGroups({2, 0, 1}, {3}), "test");
  const int64_t run = next_run_id();
  Told told[3];
  EXPECT_EQ(rendezvous.arrive(run, 0, participant(10, told[0])), nullptr);
  EXPECT_EQ(rendezvous.arrive(run, 1, participant(11, told[1])), nullptr);
  auto meeting = rendezvous.arrive(run, 2, participant(12, told[2]));
  ASSERT_NE(meeting, nullptr);
  // In the group's order, not in that of arrival.
  ASSERT_EQ(meeting->num_ranks(), 3);
  EXPECT_EQ(number_of(*meeting, 0), 12u);
  EXPECT_EQ(number_of(*meeting, 1), 10u);
  EXPECT_EQ(number_of(*meeting, 2), 11u);
  for (const Told& one : told) EXPECT_EQ(one.times(), 0);
}

TEST(Rendezvous, RefusesAnUnknownPartition) {
  Rendezvous rendezvous(ReplicaGroups({0, 1}, {2}), "test");
  const Told told;
  EXPECT_THROW(rendezvous.arrive(next_run_id(), 2, participant(0, told)), std::out_of_range);
  EXPECT_TRUE(rendezvous.take([](const Meeting&) { return true; }).empty());
}

TEST(Rendezvous, ARankThatCallsAgainOpensASecondMeeting) {
  Rendezvous rendezvous(ReplicaGroups({0, 1}, {2}), "test");
  const int64_t run = next_run_id();
  const Told told;
  EXPECT_EQ(rendezvous.arrive(run, 0, participant(1, told)), nullptr);
  EXPECT_EQ(rendezvous.arrive(run, 0, participant(2, told)), nullptr);
  EXPECT_EQ(rendezvous.arrive(run, 0, participant(3, told)), nullptr);
  for (uintptr_t call : {1, 2, 3}) {  // the other rank finds them oldest first
    auto meeting = rendezvous.arrive(run, 1, participant(call + 10, told));
    ASSERT_NE(meeting, nullptr);
    EXPECT_EQ(number_of(*meeting, 0), call);
    EXPECT_EQ(number_of(*meeting, 1), call + 10);
  }
}

TEST(Rendezvous, RunsAndGroupsDoNotMix) {
  Rendezvous rendezvous(ReplicaGroups({0, 1, 2, 3}, {2, 2}), "test");
  const int64_t first = next_run_id(), second = next_run_id();
  const Told told;
  EXPECT_EQ(rendezvous.arrive(first, 0, participant(1, told)), nullptr);
  EXPECT_EQ(rendezvous.arrive(second, 1, participant(2, told)), nullptr);
  EXPECT_EQ(rendezvous.arrive(first, 3, participant(3, told)), nullptr);
  EXPECT_EQ(rendezvous.arrive(second, 2, participant(4, told)), nullptr);
  auto meeting = rendezvous.arrive(first, 1, participant(5, told));
  ASSERT_NE(meeting, nullptr);
  EXPECT_EQ(meeting->run_id, first);
  EXPECT_EQ(meeting->group, 0);
  EXPECT_EQ(number_of(*meeting, 0), 1u);
  EXPECT_EQ(number_of(*meeting, 1), 5u);
  EXPECT_EQ(rendezvous.take([](const Meeting&) { return true; }).size(), 3u);
}

TEST(Rendezvous, TakeLeavesTheOthersInOrder) {
  Rendezvous rendezvous(ReplicaGroups({0, 1}, {2}), "test");
  const int64_t keep = next_run_id(), remove = next_run_id();
  const Told told;
  for (uintptr_t call : {1, 2, 3}) {
    EXPECT_EQ(rendezvous.arrive(keep, 0, participant(call, told)), nullptr);
    EXPECT_EQ(rendezvous.arrive(remove, 1, participant(call, told)), nullptr);
  }
  const auto taken = rendezvous.take([&](const Meeting& meeting) { return meeting.run_id == remove; });
  ASSERT_EQ(taken.size(), 3u);
  for (const MeetingPtr& meeting : taken) EXPECT_EQ(meeting->run_id, remove);
  for (uintptr_t call : {1, 2, 3}) {
    auto meeting = rendezvous.arrive(keep, 1, participant(0, told));
    ASSERT_NE(meeting, nullptr);
    EXPECT_EQ(number_of(*meeting, 0), call);
  }
}

TEST(Rendezvous, ThreadsMeetInALoop) { Traffic{{0, 1, 2, 3}, {4}, 1, 2000 / kSlowdown}.run(); }

TEST(Rendezvous, UnevenGroupsInAnyOrder) { Traffic{{6, 2, 0, 9, 5, 1, 3}, {1, 4, 2}, 1, 500 / kSlowdown}.run(); }

TEST(Rendezvous, SeveralRunsAtOnce) { Traffic{{0, 1, 2}, {3}, 4, 500 / kSlowdown}.run(); }

TEST(Rendezvous, RandomDelays) { Traffic{{3, 1, 0, 2, 4}, {3, 2}, 3, 200 / kSlowdown, true}.run(); }

TEST(Rendezvous, RanksRunAhead) { Traffic{{0, 1, 2, 3, 4}, {3, 2}, 2, 500 / kSlowdown, true, false}.run(); }

// ---- Deadlines ----------------------------------------------------------------------------------------------------

// As long as a deadline can be for a test, and as short as a loaded machine allows.
constexpr double kDeadline = 0.3;

TEST(Deadline, FailsThoseWhoWaitAndNamesThoseWhoAreMissing) {
  const ScopedDeadline deadline(kDeadline);
  Rendezvous rendezvous(ReplicaGroups({7, 3, 5, 0}, {3, 1}), "all_reduce over 'dp'");
  const int64_t run = next_run_id();
  Told first, third;
  const auto began = Clock::now();
  EXPECT_EQ(rendezvous.arrive(run, 7, participant(0, first)), nullptr);
  EXPECT_EQ(rendezvous.arrive(run, 5, participant(0, third)), nullptr);
  ASSERT_TRUE(first.wait());
  ASSERT_TRUE(third.wait());
  EXPECT_GE(std::chrono::duration<double>(Clock::now() - began).count(), kDeadline);
  const std::string error = first.error();
  EXPECT_EQ(third.error(), error);
  for (const char* words :
       {"all_reduce over 'dp': 2 of 3 ranks arrived within 0.3 s.",
        "Missing: rank 1 (mesh position 3) of the group of mesh positions [7, 3, 5].", "JAX_RING_TIMEOUT_S"}) {
    EXPECT_NE(error.find(words), std::string::npos) << error;
  }
  EXPECT_EQ(first.times(), 1);
  EXPECT_EQ(third.times(), 1);
}

TEST(Deadline, NamesSeveralMissingRanks) {
  const ScopedDeadline deadline(kDeadline);
  Rendezvous rendezvous(ReplicaGroups({0, 1, 2, 3}, {4}), "test");
  const Told told;
  EXPECT_EQ(rendezvous.arrive(next_run_id(), 2, participant(0, told)), nullptr);
  ASSERT_TRUE(told.wait());
  const std::string words = "Missing: ranks 0 (mesh position 0), 1 (mesh position 1), 3 (mesh position 3) of the";
  EXPECT_NE(told.error().find(words), std::string::npos) << told.error();
}

TEST(Deadline, SaysWhereTheCallWasWritten) {
  const ScopedDeadline deadline(kDeadline);
  const std::string call = "a call written in several places";
  for (const char* site : {"a.py:1", "b.py:2", "a.py:1"}) note_call_site(call, site);
  note_call_site("another call", "c.py:3");
  Rendezvous rendezvous(ReplicaGroups({0, 1}, {2}), call);
  const Told told;
  EXPECT_EQ(rendezvous.arrive(next_run_id(), 0, participant(0, told)), nullptr);
  ASSERT_TRUE(told.wait());
  EXPECT_EQ(told.error().find(call + ", called at a.py:1 or b.py:2: 1 of 2 ranks"), 0u) << told.error();
}

TEST(Deadline, OtherRunsGoOn) {
  const ScopedDeadline deadline(kDeadline);
  Rendezvous rendezvous(ReplicaGroups({0, 1}, {2}), "test");
  const int64_t late = next_run_id(), punctual = next_run_id();
  const Told waiting;
  EXPECT_EQ(rendezvous.arrive(late, 0, participant(0, waiting)), nullptr);
  int calls = 0;
  const auto end = Clock::now() + kPatience;
  // Before, while and after the late run fails.
  for (int after = 0; after < 100 && Clock::now() < end; ++calls) {
    if (waiting.times() > 0) ++after;
    Told told[2];
    ASSERT_EQ(rendezvous.arrive(punctual, 0, participant(0, told[0])), nullptr);
    auto meeting = rendezvous.arrive(punctual, 1, participant(1, told[1]));
    ASSERT_NE(meeting, nullptr) << "call " << calls;
    succeed(*meeting);
    for (const Told& one : told) ASSERT_EQ(one.error(), "") << "call " << calls;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  EXPECT_EQ(waiting.times(), 1);
  EXPECT_NE(waiting.error(), "");
}

TEST(Deadline, AFailedRunFailsAllItsCalls) {
  const ScopedDeadline deadline(2 * kDeadline);
  Rendezvous first(ReplicaGroups({0, 1}, {2}), "first call");
  Rendezvous second(ReplicaGroups({0, 1}, {2}), "second call");
  const int64_t run = next_run_id();
  const Told late, open_elsewhere, too_late, its_peer;
  EXPECT_EQ(first.arrive(run, 0, participant(0, late)), nullptr);
  std::this_thread::sleep_for(std::chrono::duration<double>(kDeadline));
  // Half the deadline behind: it fails with the first, not for its own lateness.
  EXPECT_EQ(second.arrive(run, 1, participant(0, open_elsewhere)), nullptr);
  ASSERT_TRUE(late.wait());
  EXPECT_NE(late.error().find("first call"), std::string::npos) << late.error();
  ASSERT_TRUE(open_elsewhere.wait(std::chrono::duration<double>(kDeadline / 2)));
  EXPECT_EQ(open_elsewhere.error(), late.error());

  // The missing rank arrives after all, at either call: told at once, and nobody's partner.
  for (Rendezvous* rendezvous : {&first, &second}) {
    for (int64_t partition : {1, 0}) {
      const Told told;
      EXPECT_EQ(rendezvous->arrive(run, partition, participant(0, told)), nullptr);
      EXPECT_EQ(told.times(), 1);
      EXPECT_EQ(told.error(), late.error());
    }
    EXPECT_TRUE(rendezvous->take([](const Meeting&) { return true; }).empty());
  }
  // The next execution of the same calls is not affected.
  const int64_t next = next_run_id();
  EXPECT_EQ(first.arrive(next, 0, participant(0, too_late)), nullptr);
  EXPECT_NE(first.arrive(next, 1, participant(0, its_peer)), nullptr);
}

TEST(Deadline, ANewDeadlineHoldsAtOnce) {
  Told told;
  Rendezvous rendezvous(ReplicaGroups({0, 1}, {2}), "test");
  const ScopedDeadline deadline(300);
  EXPECT_EQ(rendezvous.arrive(next_run_id(), 0, participant(0, told)), nullptr);
  EXPECT_FALSE(told.wait(std::chrono::duration<double>(kDeadline)));
  Watchdog::instance().set_deadline(kDeadline);  // a shorter one holds at once, also for those who wait already
  EXPECT_TRUE(told.wait(std::chrono::seconds(2)));
}

TEST(Deadline, CallingBackIntoTheRendezvousIsAllowed) {
  const ScopedDeadline deadline(kDeadline / 3);
  Rendezvous rendezvous(ReplicaGroups({0, 1}, {2}), "test");
  const int64_t run = next_run_id();
  const Told outer, inner;
  Participant calls_again = participant(0, outer);
  calls_again.done = [&](const std::string* error) {
    rendezvous.arrive(run, 0, participant(0, inner));
    // What runs next on a rank may also be another program's first call.
    const Rendezvous another(ReplicaGroups({0}, {1}), "test");
    outer.completion()(error);
  };
  EXPECT_EQ(rendezvous.arrive(run, 0, std::move(calls_again)), nullptr);
  ASSERT_TRUE(outer.wait());
  EXPECT_EQ(inner.times(), 1);
  EXPECT_EQ(inner.error(), outer.error());
}

// Ranks arrive around the moment of their deadline: whatever wins, each is told once, and a meeting is either
// complete or failed for all.
TEST(Deadline, RacesWithArrivals) {
  const ScopedDeadline deadline(0.002);
  Rendezvous rendezvous(ReplicaGroups({0, 1, 2}, {3}), "test");
  const int rounds = 600 / kSlowdown;
  std::vector<std::vector<Told>> told;
  for (int rank = 0; rank < 3; ++rank) told.emplace_back(rounds);
  std::vector<int64_t> runs(rounds);
  for (int64_t& run : runs) run = next_run_id();
  std::atomic<int> completed{0};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      std::mt19937 random(static_cast<unsigned>(rank));
      for (int round = 0; round < rounds; ++round) {
        if (auto meeting = rendezvous.arrive(runs[round], rank, participant(0, told[rank][round]))) {
          ++completed;
          succeed(*meeting);
        }
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  int successes = 0;
  for (int round = 0; round < rounds; ++round) {
    for (int rank = 0; rank < 3; ++rank) {
      ASSERT_TRUE(told[rank][round].wait()) << "rank " << rank << ", round " << round;
      ASSERT_EQ(told[rank][round].times(), 1);
      ASSERT_EQ(told[rank][round].error(), told[0][round].error()) << "rank " << rank << ", round " << round;
    }
    successes += told[0][round].error().empty();
  }
  EXPECT_EQ(successes, completed);
}

// The runtime destroys call sites, with their rendezvous, while the watchdog looks at others.
TEST(Deadline, RendezvousComeAndGoWhileTheWatchdogLooks) {
  const ScopedDeadline deadline(0.0005);
  std::vector<std::thread> threads;
  std::atomic<int> told_twice{0};
  for (int index = 0; index < 3; ++index) {
    threads.emplace_back([&, index] {
      std::mt19937 random(static_cast<unsigned>(index));
      for (int round = 0; round < 1000 / kSlowdown; ++round) {
        const Told told;
        {
          Rendezvous rendezvous(ReplicaGroups({0, 1}, {2}),
                                "a call with a text that does not fit in the string itself");
          EXPECT_EQ(rendezvous.arrive(next_run_id(), 0, participant(0, told)), nullptr);
          random_delay(random);
        }
        told_twice += told.times() > 1;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(told_twice, 0);
}

}  // namespace
}  // namespace jax_ring::cpu::testing
