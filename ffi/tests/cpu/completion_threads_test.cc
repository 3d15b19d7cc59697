// completion_threads_test.cc: a rank's work in its completion never delays another rank's completion.
#include "cpu/rendezvous/completion_threads.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>

#include "cpu/rendezvous/rendezvous.h"
#include "tests/support/support.h"

namespace jax_ring::cpu {
namespace {

using testing::FailingThreadStarts;
using testing::kTestTimeout;

// Whether the condition becomes true within kTestTimeout.
template <class Condition>
bool eventually(Condition condition) {
  const Clock::time_point limit = Clock::now() + kTestTimeout;
  while (!condition()) {
    if (Clock::now() > limit) return false;
    std::this_thread::yield();
  }
  return true;
}

// A rendezvous of ranks whose completions run `follow(rank, error)`.
template <class Follow>
RendezvousPtr rendezvous_of(int num_ranks, Follow follow) {
  RendezvousPtr rendezvous(new Rendezvous);
  rendezvous->num_arrived = num_ranks;
  for (int rank = 0; rank < num_ranks; ++rank) {
    rendezvous->done.emplace_back([rank, follow](const CallFailure* error) { follow(rank, error); });
  }
  return rendezvous;
}

TEST(CompletionThreads, CompletesEveryRankOnce) {
  std::atomic<int> completed[5] = {};
  std::atomic<int> errors{0};
  CompletionThreads::instance().complete(rendezvous_of(5, [&](int rank, const CallFailure* error) {
    if (error != nullptr) ++errors;
    ++completed[rank];
  }));
  ASSERT_TRUE(eventually([&] {
    for (auto& times : completed) {
      if (times == 0) return false;
    }
    return true;
  }));
  for (auto& times : completed) EXPECT_EQ(times, 1);
  EXPECT_EQ(errors, 0);
}

TEST(CompletionThreads, PassesTheErrorAndSkipsMissingRanks) {
  std::atomic<int> completed{0};
  auto rendezvous = rendezvous_of(4, [&](int rank, const CallFailure* error) {
    EXPECT_NE(rank, 2);
    ASSERT_NE(error, nullptr);
    EXPECT_EQ(error->text, "rank 2 is missing");
    ++completed;
  });
  rendezvous->done[2] = Completion();
  CompletionThreads::instance().complete(std::move(rendezvous), testing::failure_with("rank 2 is missing"));
  EXPECT_TRUE(eventually([&] { return completed == 3; }));
}

// The others are in other processes: no completion can be delayed, so nothing looks for slow ones.
TEST(CompletionThreads, ALoneRankIsNotWatched) {
  const auto num_switches = [] {
    rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_nvcsw;
  };
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // nothing of the earlier tests is watched any more
  const long before = num_switches();
  for (int call = 1; call <= 50; ++call) {
    std::atomic<bool> completed{false};
    auto rendezvous = rendezvous_of(3, [&](int rank, const CallFailure*) {
      EXPECT_EQ(rank, 1);
      std::this_thread::sleep_for(std::chrono::milliseconds(4));
      completed = true;
    });
    rendezvous->done[0] = Completion();
    rendezvous->done[2] = Completion();
    CompletionThreads::instance().complete(std::move(rendezvous));
    ASSERT_TRUE(eventually([&] { return completed.load(); }));
  }
  EXPECT_LT(num_switches() - before, 500);  // 3 per call, and 10 per millisecond if something looked
}

// As in XLA's own collectives: every rank blocks until all have arrived.
TEST(CompletionThreads, RanksMayBlockUntilAllHaveCompleted) {
  for (int num_ranks : {2, 8, 33}) {
    for (int round = 0; round < 5; ++round) {
      std::atomic<int> arrived{0}, left{0};
      CompletionThreads::instance().complete(rendezvous_of(num_ranks, [&](int, const CallFailure*) {
        ++arrived;
        EXPECT_TRUE(eventually([&] { return arrived == num_ranks; }));
        ++left;
      }));
      ASSERT_TRUE(eventually([&] { return left == num_ranks; }));
    }
  }
}

// A blocked rank delays neither another rendezvous nor one that was completed from the same thread.
TEST(CompletionThreads, ABlockedRankDelaysNoOtherRendezvous) {
  std::atomic<bool> release{false};
  std::atomic<int> blocked{0}, others{0};
  CompletionThreads::instance().complete(rendezvous_of(1, [&](int, const CallFailure*) {
    CompletionThreads::instance().complete(rendezvous_of(3, [&](int, const CallFailure*) { ++others; }));
    EXPECT_TRUE(eventually([&] { return release.load(); }));
    ++blocked;
  }));
  CompletionThreads::instance().complete(rendezvous_of(3, [&](int, const CallFailure*) { ++others; }));
  EXPECT_TRUE(eventually([&] { return others == 6; }));
  EXPECT_EQ(blocked, 0);
  release = true;
  EXPECT_TRUE(eventually([&] { return blocked == 1; }));
}

// Its name tells it from XLA's threads, whoever starts it.
TEST(CompletionThreads, AreNamed) {
  constexpr int kRanks = 8;
  std::atomic<int> arrived{0}, left{0};
  std::mutex mutex;
  std::set<std::string> names;
  // Each waits for all, so each needs a thread.
  const auto completion = [&] {
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof(name));
    {
      std::lock_guard<std::mutex> lock(mutex);
      names.insert(name);
    }
    ++arrived;
    EXPECT_TRUE(eventually([&] { return arrived == kRanks; }));
    ++left;
  };
  std::thread([&] {
    pthread_setname_np(pthread_self(), "tf_XLA");
    for (int rank = 0; rank < kRanks; ++rank) {
      CompletionThreads::instance().complete(rendezvous_of(1, [&](int, const CallFailure*) { completion(); }));
    }
  }).join();
  EXPECT_TRUE(eventually([&] { return left == kRanks; }));
  EXPECT_EQ(names, std::set<std::string>{"jax_ring"});
}

// At a limit of threads, the existing ones complete the calls, and more start once that is possible.
TEST(CompletionThreads, AThreadThatCannotBeStarted) {
  constexpr int kRanks = 40, kStarts = 1 << 20;
  CompletionThreads::instance().start();
  int num_ranks = 0;
  std::atomic<int> all{-1}, arrived{0}, left{0}, others{0};
  {
    const FailingThreadStarts starts(kStarts);
    // Ranks that wait for each other, until they outnumber the threads: other tests may have left some.
    do {
      const int before = failing_thread_starts;
      num_ranks += kRanks;
      CompletionThreads::instance().complete(rendezvous_of(kRanks, [&](int, const CallFailure*) {
        ++arrived;
        EXPECT_TRUE(eventually([&] { return arrived == all; }));
        ++left;
      }));
      ASSERT_TRUE(eventually([&] { return arrived == num_ranks || failing_thread_starts < before - 10; }));
    } while (arrived == num_ranks);
    EXPECT_GE(arrived, 1);
    all = num_ranks;
    CompletionThreads::instance().complete(rendezvous_of(1, [&](int, const CallFailure*) { ++others; }));
  }
  EXPECT_TRUE(eventually([&] { return left == num_ranks && others == 1; }));
}

// If no thread of a process can start, an error comes before there is a call.
TEST(CompletionThreadsDeathTest, NoThreadAtAll) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto fail_then_work = [] {
    {
      const FailingThreadStarts starts(2);
      for (const char* purpose : {"completes calls", "completes calls"}) {
        try {
          RendezvousMap map(ReplicaGroups({0, 1}, {2}), "call");
          _exit(1);
        } catch (const std::runtime_error& error) {
          if (std::string(error.what()).find(purpose) == std::string::npos) _exit(2);
        }
      }
    }
    std::atomic<int> completed{0};
    RendezvousMap map(ReplicaGroups({0, 1}, {2}), "call");
    CompletionThreads::instance().complete(rendezvous_of(2, [&](int, const CallFailure*) { ++completed; }));
    if (!eventually([&] { return completed == 2; })) _exit(3);
    const FailingThreadStarts starts(1);
    // Its watchdog is running already, and so are the threads above.
    RendezvousMap another(ReplicaGroups({0, 1}, {2}), "call");
    _exit(0);
  };
  EXPECT_EXIT(fail_then_work(), ::testing::ExitedWithCode(0), "");
}

// A loop of collectives with no work in between stays on few threads, without context switches.
TEST(CompletionThreads, QuickRanksShareAThread) {
  constexpr int kNumRendezvous = 200;
  std::mutex mutex;
  std::set<std::thread::id> threads;
  std::atomic<int> completed{0};
  for (int i = 0; i < kNumRendezvous; ++i) {
    CompletionThreads::instance().complete(rendezvous_of(4, [&](int, const CallFailure*) {
      {
        std::lock_guard<std::mutex> lock(mutex);
        threads.insert(std::this_thread::get_id());
      }
      ++completed;  // last: the test may return after it
    }));
    ASSERT_TRUE(eventually([&] { return completed == 4 * (i + 1); }));
  }
  EXPECT_FALSE(threads.count(std::this_thread::get_id()));
  EXPECT_LT(static_cast<int>(threads.size()), kNumRendezvous);
}

}  // namespace
}  // namespace jax_ring::cpu
