// first_run_test.cc: the ranks of a process wait for each other; failures that no call raises are reported.
#include "cuda/launch/first_run.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cuda/groups/communicators.h"
#include "cuda/groups/watcher.h"
#include "tests/support/host_groups.h"

namespace jax_ring::gpu {
namespace {

TEST(FirstRun, NobodyPassesBeforeTheLast) {
  FirstRun point("ready", {"GPU 0", "GPU 1", "GPU 2"});
  std::atomic<int> arrived{0};
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&, rank] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20 * rank));
      ++arrived;
      point.arrive_and_wait(1, rank, kSeconds);
      EXPECT_EQ(arrived, 3);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  point.arrive_and_wait(1, 0, 0);  // repeated, as in a loop
  EXPECT_FALSE(point.is_done());
}

TEST(FirstRun, LaterRunsDoNotWait) {
  FirstRun point("ready", {"GPU 0", "GPU 1"});
  for (int run = 1; run <= 2; ++run) {
    EXPECT_FALSE(point.is_done());
    std::thread other([&] { point.arrive_and_wait(run, 1, kSeconds); });
    point.arrive_and_wait(run, 0, kSeconds);
    other.join();
  }
  EXPECT_TRUE(point.is_done());
  point.arrive_and_wait(3, 0, 0);
}

TEST(FirstRun, ARankThatRecordsDoesNotWaitAndIsNotWaitedFor) {
  FirstRun point("ready", {"GPU 0", "GPU 1"});
  point.arrive(1, 0);
  point.arrive(1, 1);
  point.arrive(2, 0);
  point.arrive_and_wait(3, 0, 0);  // two runs have begun, so this one is not among the first
  point.arrive_and_wait(2, 1, kSeconds);
  EXPECT_TRUE(point.is_done());
}

TEST(FirstRun, ASingleRankDoesNotWait) {
  FirstRun point("ready", {"GPU 0"});
  point.arrive_and_wait(1, 0, 0);
  FirstRun nobody("ready", {});
  EXPECT_TRUE(nobody.is_done());
}

TEST(FirstRun, NamesTheMissing) {
  FirstRun point("ready to launch psum", {"GPU 0", "GPU 1", "GPU 2"});
  const std::string error = error_of([&] { point.arrive_and_wait(1, 1, 0.02); });
  EXPECT_CONTAINS(error, "waited 0.02 s in the first run for GPU 0, GPU 2 to be ready to launch psum");
  EXPECT_CONTAINS(error, "JAX_RING_TIMEOUT_S");
  // A rank that comes late in this run does not launch a call that nobody will answer. The next run is not affected.
  EXPECT_EQ(error_of([&] { point.arrive_and_wait(1, 0, kSeconds); }), error);
  std::thread others[] = {std::thread([&] { point.arrive_and_wait(2, 0, kSeconds); }),
                          std::thread([&] { point.arrive_and_wait(2, 2, kSeconds); })};
  point.arrive_and_wait(2, 1, kSeconds);
  for (std::thread& other : others) other.join();
}

TEST(FirstRun, AFailureEndsTheWait) {
  FirstRun point("ready", {"GPU 0", "GPU 1"});
  std::string error;
  std::thread waiting([&] { error = error_of([&] { point.arrive_and_wait(1, 0, kSeconds); }); });
  point.fail(1, 1, "out of memory");
  waiting.join();
  EXPECT_EQ(error, "GPU 1 failed: out of memory");
}

TEST(FirstRun, RunsAtTheSameTime) {
  FirstRun point("ready", {"GPU 0", "GPU 1"});
  std::thread first([&] { point.arrive_and_wait(1, 0, kSeconds); });
  std::thread second([&] { point.arrive_and_wait(2, 0, kSeconds); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  point.arrive_and_wait(2, 1, kSeconds);
  second.join();
  EXPECT_FALSE(point.is_done());
  point.arrive_and_wait(1, 1, kSeconds);
  first.join();
  EXPECT_TRUE(point.is_done());
}

TEST(FirstRun, RemembersFewFailedRuns) {
  FirstRun point("ready", {"GPU 0", "GPU 1"});
  for (int run = 0; run < 100; ++run) point.fail(run, 0, "no");
  EXPECT_EQ(error_of([&] { point.arrive_and_wait(99, 1, kSeconds); }), "GPU 0 failed: no");
}

TEST(Watcher, LooksUntilTheEnd) {
  std::atomic<int> looks{0};
  {
    Watcher watcher([&] { ++looks; });
    while (looks == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_GE(looks, 2);
  const int before = looks;
  std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_EQ(looks, before);
}

TEST(Watcher, ReportsAFailureThatNoCallRaises) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto program = [] {
    static HostMemory memory;
    Communicators& all = Communicators::instance();
    all.set_gpus(&memory);
    const std::shared_ptr<Communicator> communicator = all.get_or_create(one_process(2));
    all.connect(*communicator, 0);
    communicator->name_call(77, "psum in the last step");
    // Handlers run last first. A child leaves before LeakSanitizer's, which may wait for a lock of a thread it lacks.
    static const pid_t parent = getpid();
    std::atexit([] {
      if (getpid() != parent) _exit(0);
    });
    start_reporting_failures();
    Failure* const record = communicator->endpoint(1, 0, 77, 60).failure;
    record->rank = 1;
    record->call = 77;
    __atomic_store_n(&record->kind, static_cast<uint32_t>(FailureKind::timeout), __ATOMIC_RELEASE);
    // A forked child, which does not have the thread, ends as well.
    const pid_t child = fork();
    if (child == 0) {
      alarm(10);
      std::exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    std::exit(status);
  };
  EXPECT_EXIT(program(), ::testing::ExitedWithCode(0),
              "jax_ring: psum in the last step: rank 1 .* waited 60 s for rank 0");
}

}  // namespace
}  // namespace jax_ring::gpu
