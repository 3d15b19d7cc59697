// relay_test.cc: tests of the relay: what a rank does once it is told never keeps another one from being told.
#include "cpu/relay.h"

#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <set>
#include <thread>

#include "tests/support.h"

namespace jax_ring::cpu {
namespace {

using testing::kPatience;

// Whether the condition comes to hold within the time that a test waits.
template <class Condition>
bool eventually(Condition condition) {
  const Clock::time_point limit = Clock::now() + kPatience;
  while (!condition()) {
    if (Clock::now() > limit) return false;
    std::this_thread::yield();
  }
  return true;
}

// A meeting of ranks that run `follow(rank)` when they are told.
template <class Follow>
MeetingPtr meeting_of(int num_ranks, Follow follow) {
  MeetingPtr meeting(new Meeting);
  meeting->num_arrived = num_ranks;
  for (int rank = 0; rank < num_ranks; ++rank) {
    meeting->done.emplace_back([rank, follow](const std::string* error) { follow(rank, error); });
  }
  return meeting;
}

TEST(Relay, TellsEveryRankOnce) {
  std::atomic<int> told[5] = {};
  std::atomic<int> errors{0};
  Relay::instance().tell(meeting_of(5, [&](int rank, const std::string* error) {
    if (error != nullptr) ++errors;
    ++told[rank];
  }));
  ASSERT_TRUE(eventually([&] {
    for (auto& times : told) {
      if (times == 0) return false;
    }
    return true;
  }));
  for (auto& times : told) EXPECT_EQ(times, 1);
  EXPECT_EQ(errors, 0);
}

TEST(Relay, PassesTheErrorOnAndLeavesOutTheAbsent) {
  std::atomic<int> told{0};
  auto meeting = meeting_of(4, [&](int rank, const std::string* error) {
    EXPECT_NE(rank, 2);
    ASSERT_NE(error, nullptr);
    EXPECT_EQ(*error, "rank 2 is missing");
    ++told;
  });
  meeting->done[2] = Completion();
  Relay::instance().tell(std::move(meeting), "rank 2 is missing");
  EXPECT_TRUE(eventually([&] { return told == 3; }));
}

// What a collective of XLA's does: every rank blocks until all have come.
TEST(Relay, RanksMayBlockUntilAllHaveBeenTold) {
  for (int num_ranks : {2, 8, 33}) {
    for (int round = 0; round < 5; ++round) {
      std::atomic<int> arrived{0}, left{0};
      Relay::instance().tell(meeting_of(num_ranks, [&](int, const std::string*) {
        ++arrived;
        EXPECT_TRUE(eventually([&] { return arrived == num_ranks; }));
        ++left;
      }));
      ASSERT_TRUE(eventually([&] { return left == num_ranks; }));
    }
  }
}

// One blocked program does not keep another one from going on, nor a second meeting of the same thread.
TEST(Relay, ABlockedRankDelaysNoOtherMeeting) {
  std::atomic<bool> release{false};
  std::atomic<int> blocked{0}, others{0};
  Relay::instance().tell(meeting_of(1, [&](int, const std::string*) {
    Relay::instance().tell(meeting_of(3, [&](int, const std::string*) { ++others; }));
    EXPECT_TRUE(eventually([&] { return release.load(); }));
    ++blocked;
  }));
  Relay::instance().tell(meeting_of(3, [&](int, const std::string*) { ++others; }));
  EXPECT_TRUE(eventually([&] { return others == 6; }));
  EXPECT_EQ(blocked, 0);
  release = true;
  EXPECT_TRUE(eventually([&] { return blocked == 1; }));
}

// A loop of collectives with nothing between them stays on few threads: it pays for no switches.
TEST(Relay, QuickRanksShareAThread) {
  constexpr int kMeetings = 200;
  std::mutex mutex;
  std::set<std::thread::id> threads;
  std::atomic<int> told{0};
  for (int i = 0; i < kMeetings; ++i) {
    Relay::instance().tell(meeting_of(4, [&](int, const std::string*) {
      {
        std::lock_guard<std::mutex> lock(mutex);
        threads.insert(std::this_thread::get_id());
      }
      ++told;  // last: the test may then end
    }));
    ASSERT_TRUE(eventually([&] { return told == 4 * (i + 1); }));
  }
  EXPECT_FALSE(threads.count(std::this_thread::get_id()));
  EXPECT_LT(static_cast<int>(threads.size()), kMeetings);
}

}  // namespace
}  // namespace jax_ring::cpu
