// processes_test.cc: collectives between processes, simulated by threads that share one block of memory, against the
// definitions; calls in different orders, and missing peers.
#include "tests/support/processes.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "base/cores.h"
#include "cpu/rendezvous/completion_threads.h"
#include "cpu/rendezvous/watchdog.h"
#include "shm/peers/departures.h"
#include "tests/support/reference.h"
#include "tests/support/support.h"

namespace jax_ring::shm {
namespace {

// A call of a group, with random operands.
class TestCall : public GroupCall {
 public:
  TestCall(const Plan& plan, Op op, DType dtype, int num_ranks, std::vector<size_t> counts, bool in_place,
           bool one_shot, uint64_t id)
      : GroupCall({dtype, std::move(counts), plan, op}, num_ranks, in_place, one_shot, id,
                  [=](const std::vector<Bytes>& operands, size_t count, int rank) {
                    return expected_result(plan, op, dtype, operands, count, rank);
                  }) {}
};

const std::vector<std::vector<int64_t>> kLayouts = {
    {0, 1}, {0, 0, 1}, {0, 1, 0, 1}, {0, 1, 2}, {0, 0, 0, 1, 2, 2}, {0, 1, 2, 3, 4},
};

class ProcessesTest : public ::testing::TestWithParam<DType> {};

TEST_P(ProcessesTest, MatchesTheDefinitions) {
  uint64_t id = 0;
  int turn = 0;
  for (const auto& layout : kLayouts) {
    // The round counter wraps around on the way.
    Processes processes(layout, kSmall, 0xfffffff0u);
    const int p = processes.num_ranks();
    for (const Plan& plan : all_plans(p)) {
      const size_t blocks = num_input_blocks(plan, p);
      const std::vector<size_t> counts{0, blocks, 3 * blocks, 17 * blocks, 1601 * blocks};
      for (bool one_shot : {false, true}) {
        const Op op = static_cast<Op>(++turn % static_cast<int>(Op::count));
        TestCall call(plan, op, GetParam(), p, counts, may_be_in_place(plan) && turn % 2 == 0, one_shot, ++id);
        on_all(processes.count(), [&](int process) { call.submit(processes[process]); });
        ASSERT_NO_FATAL_FAILURE(call.expect_results());
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, ProcessesTest, ::testing::Values(DType::u8, DType::f32, DType::bf16, DType::f64),
                         [](const auto& info) { return name_of(info.param); });

// Large enough for streaming stores, and with the real size of the shared memory.
TEST(Processes, LargeMessages) {
  for (bool in_place : {false, true}) {
    for (Order order : {Order::rank, Order::ring}) {
      Processes processes({0, 0, 1}, {{256 << 10, 128 << 10}});
      TestCall call({Collective::all_reduce, order}, Op::sum, DType::f32, 3, {700'001, 5}, in_place, false, 1);
      on_all(2, [&](int process) { call.submit(processes[process]); });
      ASSERT_NO_FATAL_FAILURE(call.expect_results());
    }
  }
}

// Independent calls become ready in a different order in each process, at random times.
TEST(Processes, CallsInDifferentOrders) {
  constexpr int kCalls = 12;
  std::mt19937 random(7);
  for (int repeat = 0; repeat < 100 / kSlowdown + 5; ++repeat) {
    Processes processes(kLayouts[repeat % kLayouts.size()], repeat % 2 == 0 ? kSmall : kGrowing);
    const std::vector<Plan> plans = all_plans(processes.num_ranks());
    std::vector<std::unique_ptr<TestCall>> calls;
    for (int i = 0; i < kCalls; ++i) {
      const std::vector<size_t> counts{processes.num_ranks() * (random() % (i % 4 == 3 ? 3000 : 300))};
      calls.push_back(std::make_unique<TestCall>(plans[random() % plans.size()], Op::sum, DType::f32,
                                                 processes.num_ranks(), counts, false, random() % 2, i + 1));
    }
    const unsigned seed = random();
    on_all(processes.count(), [&](int process) {
      std::mt19937 own(seed + process);
      std::vector<int> order(kCalls);
      for (int i = 0; i < kCalls; ++i) order[i] = i;
      std::shuffle(order.begin(), order.end(), own);
      for (int i : order) {
        if (own() % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 300));
        calls[i]->submit(processes[process]);
      }
    });
    for (const auto& call : calls) ASSERT_NO_FATAL_FAILURE(call->expect_results());
  }
}

// A call reuses the rounds of the previous one only if both agree in everything that rounds depend on.
TEST(Processes, CallsThatDifferInOneThing) {
  struct Kind {
    Plan plan;
    DType dtype;
    std::vector<size_t> counts;
  };
  const Kind base{{Collective::broadcast, Order::rank, 0}, DType::f32, {48}};
  std::vector<Kind> others(7, base);
  others[0].plan.root = 2;
  others[1].plan.collective = Collective::reduce;
  others[2].plan = {Collective::all_reduce, Order::rank};
  others[3].plan = {Collective::all_reduce, Order::ring};
  others[4].dtype = DType::f64;
  others[5].counts = {96};
  others[6].counts = {48, 48};
  Processes processes({0, 0, 1});
  uint64_t id = 0;
  for (const Kind& other : others) {
    for (bool one_shot : {true, false}) {
      for (const Kind& kind : {base, base, other, other, base}) {
        TestCall call(kind.plan, Op::sum, kind.dtype, 3, kind.counts, false, one_shot, ++id);
        on_all(processes.count(), [&](int process) { call.submit(processes[process]); });
        ASSERT_NO_FATAL_FAILURE(call.expect_results());
      }
    }
  }
}

// As in a compiled loop: each process makes its next call as soon as its last one completes, whether or not the others
// are done.
TEST(Processes, LoopsOfCalls) {
  const int repeats = 2000 / kSlowdown;
  for (const auto& layout : {kLayouts[0], kLayouts[3]}) {
    Processes processes(layout);
    const int p = processes.num_ranks();
    std::vector<std::unique_ptr<TestCall>> calls;
    for (int i = 0; i < repeats; ++i) {
      const Plan plan = all_plans(p)[i % all_plans(p).size()];
      calls.push_back(std::make_unique<TestCall>(plan, Op::sum, DType::f32, p, std::vector<size_t>{size_t(p) * (i % 5)},
                                                 false, i % 3 == 0, i + 1));
    }
    on_all(processes.count(), [&](int process) {
      for (auto& call : calls) {
        call->submit(processes[process]);
        for (int rank : processes.group(process).ranks_of(process)) ASSERT_TRUE(call->outcome(rank).wait());
      }
    });
    for (const auto& call : calls) ASSERT_NO_FATAL_FAILURE(call->expect_results());
  }
}

TestCall small_call(int num_ranks, uint64_t id, const Plan& plan = {}) {
  return TestCall(plan, Op::sum, DType::f32, num_ranks, {12}, false, false, id);
}

void expect_in(const std::string& expected, const std::string& error) {
  EXPECT_NE(error.find(expected), std::string::npos) << error;
}

TEST(Processes, MissingProcessIsNamed) {
  const ScopedDeadline deadline(0.3);
  // Even a process without any exchange: its ranks' calls come in the same order.
  const Plan without{Collective::permute, Order::rank, 0, kept({3, kNoRank, kNoRank, 0})};
  for (const auto& [plan, made_a_call] :
       {std::pair{Plan{}, false}, {Plan{}, true}, {Plan{Collective::all_to_all}, true}, {without, true}}) {
    Processes processes({0, 1, 1, 2});
    if (made_a_call) {
      TestCall first = small_call(4, 7, plan);
      for (int process : {0, 1, 2}) first.submit(processes[process]);
      first.expect_results();
    }
    TestCall call = small_call(4, 1, plan);
    for (int process : {0, 2}) call.submit(processes[process]);
    for (int rank : {0, 3}) {
      ASSERT_TRUE(call.outcome(rank).wait());
      expect_in(made_a_call ? "Process 1 (ranks 1, 2) is stopped, or busy with something else"
                            : "Process 1 (ranks 1, 2) has not made a call in this group yet",
                call.outcome(rank).error());
    }
  }
}

// Data staged before an abort is still there. It must not become the result of one process alone.
TEST(Processes, LateProcessFailsAsWell) {
  for (bool one_shot : {false, true}) {
    ScopedDeadline deadline(0.2);
    Processes processes({0, 1});
    TestCall call({Collective::all_reduce}, Op::sum, DType::f32, 2, {10}, false, one_shot, 1), next = small_call(2, 2);
    call.submit(processes[0]);
    ASSERT_TRUE(call.outcome(0).wait());
    const ScopedDeadline longer(60);
    call.submit(processes[1]);
    next.submit(processes[0]);
    ASSERT_TRUE(call.outcome(1).wait());
    expect_in("can no longer be used. Process 0 (rank 0) has aborted the group. Last status: call 1",
              call.outcome(1).error());
    ASSERT_TRUE(next.outcome(0).wait());
    expect_in("Process 1 (rank 1)", next.outcome(0).error());
  }
}

TEST(Processes, MismatchNamesBothCalls) {
  const ScopedDeadline deadline(0.4);
  for (bool swapped : {false, true}) {
    Processes processes({0, 1});
    TestCall call = small_call(2, 1);
    call.submit(processes[0], swapped ? 8 : 9);
    call.submit(processes[1], swapped ? 9 : 8);
    for (int rank : {0, 1}) {
      ASSERT_TRUE(call.outcome(rank).wait());
      const std::string error = call.outcome(rank).error();
      EXPECT_NE(error.find("call 8"), std::string::npos) << error;
      EXPECT_NE(error.find("call 9"), std::string::npos) << error;
    }
  }
}

// The count of results must advance in rounds without results, or it would compare as ahead after 2^31 rounds.
TEST(Processes, ManyRoundsWithoutResults) {
  Processes processes({0, 1}, kSmall, 5, 0x7ffffff0u);
  for (bool one_shot : {true, false}) {
    TestCall call({Collective::all_reduce}, Op::sum, DType::f64, 2, {20'000}, false, one_shot, one_shot);
    on_all(2, [&](int process) { call.submit(processes[process]); });
    ASSERT_NO_FATAL_FAILURE(call.expect_results());
  }
}

TEST(Processes, AbortIsSeenAtOnce) {
  Processes processes({0, 1, 2});
  TestCall first = small_call(3, 1), call = small_call(3, 2);
  for (int process : {0, 1, 2}) first.submit(processes[process]);
  first.expect_results();
  for (int process : {0, 2}) call.submit(processes[process]);
  const auto began = cpu::Clock::now();
  processes.end(1);
  for (int rank : {0, 2}) {
    ASSERT_TRUE(call.outcome(rank).wait());
    expect_in("has aborted the group", call.outcome(rank).error());
  }
  EXPECT_LT(cpu::Clock::now() - began, std::chrono::seconds(30)) << "of a deadline of 60";
}

// If a thread cannot start, at a limit of the system, the group's calls fail and none hangs.
TEST(Processes, AThreadThatCannotBeStarted) {
  Processes processes({0, 1});
  for (uint64_t id : {1, 2}) {
    const FailingThreadStarts starts(1);
    TestCall call = small_call(2, id);
    call.submit(processes[0]);
    ASSERT_TRUE(call.outcome(0).wait());
    expect_in("call 1: jax_ring cannot start the thread that waits for the other processes of a group",
              call.outcome(0).error());
    expect_in("ulimit -u", call.outcome(0).error());
  }
}

// The others learn at once how a process left.
TEST(Processes, LeavingIsHeardAtOnce) {
  for (bool idle : {true, false}) {
    Processes processes({0, 1, 2});
    TestCall first = small_call(3, 7), call = small_call(3, 1), next = small_call(3, 2);
    for (int process : {0, 1, 2}) first.submit(processes[process]);
    first.expect_results();
    call.submit(processes[0]);
    if (!idle) call.submit(processes[2]);
    processes[2].leave(CallFailure::departure("raised ValueError: bad batch"));
    processes[2].leave(CallFailure::departure("has exited"));  // the first reason stays
    call.submit(processes[1]);
    for (int rank : {0, 1}) {
      ASSERT_TRUE(call.outcome(rank).wait());
      expect_in("Process 2 (rank 2) raised ValueError: bad batch.", call.outcome(rank).error());
      const CallFailure failure = call.outcome(rank).failure();
      EXPECT_EQ(failure.kind, CallFailure::Kind::left);
      EXPECT_EQ(failure.process, 2);
      EXPECT_EQ(failure.rank, 2);
      EXPECT_EQ(failure.cause, "process 2 (rank 2) raised ValueError: bad batch");
      EXPECT_EQ(CallFailures::instance().find(failure.number)->text, failure.text);
      EXPECT_EQ(call.outcome(rank).error().find("Every process"), std::string::npos) << call.outcome(rank).error();
    }
    next.submit(processes[2]);
    ASSERT_TRUE(next.outcome(2).wait());
    expect_in("this process has left its groups of processes: it raised ValueError: bad batch.",
              next.outcome(2).error());
  }
}

// A process that leaves because of another's fault names that one.
TEST(Processes, TheFaultOfAnotherIsPassedOn) {
  Processes processes({0, 1, 1});
  TestCall first = small_call(3, 7), call = small_call(3, 1);
  for (int process : {0, 1}) first.submit(processes[process]);
  first.expect_results();
  CallFailure how = CallFailure::departure("process 5 (ranks 8, 9) has ended");
  std::tie(how.kind, how.process, how.rank) = std::make_tuple(CallFailure::Kind::ended, 5, 8);
  processes[1].leave(how);
  call.submit(processes[0]);
  ASSERT_TRUE(call.outcome(0).wait());
  const CallFailure failure = call.outcome(0).failure();
  expect_in("Process 1 (ranks 1, 2) failed because process 5 (ranks 8, 9) has ended.", failure.text);
  EXPECT_EQ(failure.kind, CallFailure::Kind::ended);
  EXPECT_EQ(failure.process, 5);
  EXPECT_EQ(failure.rank, 8);
  EXPECT_EQ(failure.cause, "process 5 (ranks 8, 9) has ended");
}

// By its own account, it is not at fault, and knows of no other that is.
TEST(Processes, AProcessThatIsBlamedBlamesNobody) {
  Processes processes({0, 1});
  TestCall first = small_call(2, 7), call = small_call(2, 1);
  for (int process : {0, 1}) first.submit(processes[process]);
  first.expect_results();
  CallFailure how = CallFailure::departure("process 0 (rank 0) is stopped, or busy with something else");
  std::tie(how.kind, how.process, how.rank) = std::make_tuple(CallFailure::Kind::stopped, 0, 0);
  processes[1].leave(how);
  call.submit(processes[0]);
  ASSERT_TRUE(call.outcome(0).wait());
  const CallFailure failure = call.outcome(0).failure();
  expect_in("Process 1 (rank 1) failed because process 0 (rank 0) is stopped", failure.text);
  EXPECT_EQ(failure.process, CallFailure::kNone);
  EXPECT_EQ(failure.cause, "");
}

TEST(Processes, LeavingIsHeardOfAProcessThatNeverCame) {
  Departures::instance().clear();
  Processes processes({0, 1});
  TestCall call = small_call(2, 1);
  call.submit(processes[0]);
  EXPECT_EQ(Departures::instance().await_questions(60), std::vector<int64_t>{1});
  Departures::instance().note(1, CallFailure::departure("has exited"));
  ASSERT_TRUE(call.outcome(0).wait());
  expect_in("Process 1 (rank 1) has exited.", call.outcome(0).error());
  Departures::instance().clear();
}

// A process that has made its part of a call may leave before the others have finished theirs.
TEST(Processes, LeavingBreaksNoCallThatIsComplete) {
  for (int repeat = 0; repeat < 200 / kSlowdown; ++repeat) {
    Processes processes({0, 1, 2});
    TestCall call({Collective::all_reduce}, Op::sum, DType::f32, 3, {3000}, false, repeat % 2 == 0, 1);
    on_all(3, [&](int process) {
      call.submit(processes[process]);
      if (process != 2) return;
      ASSERT_TRUE(call.outcome(2).wait());
      processes[2].leave(CallFailure::departure("has exited"));
    });
    ASSERT_NO_FATAL_FAILURE(call.expect_results());
  }
}

// The clock of a call goes on while one peer after the other arrives.
TEST(Processes, ACallWaitsOneDeadlineForAllItsPeers) {
  const ScopedDeadline deadline(1.5);
  Processes processes({0, 1, 2, 3});
  TestCall first = small_call(4, 7), call = small_call(4, 1);
  on_all(4, [&](int process) { first.submit(processes[process]); });
  first.expect_results();
  const auto began = cpu::Clock::now();
  call.submit(processes[0]);
  std::this_thread::sleep_for(std::chrono::milliseconds(1000));
  call.submit(processes[1]);
  ASSERT_TRUE(call.outcome(0).wait());
  const std::chrono::duration<double> waited = cpu::Clock::now() - began;
  // Its text shows how long it waited.
  const std::string error = call.outcome(0).error();
  const size_t at = error.find("processes, for ");
  ASSERT_NE(at, std::string::npos) << error;
  const double reported = std::stod(error.substr(at + 15));
  EXPECT_GE(reported, 1.5) << error;
  EXPECT_LE(reported, waited.count() + 0.01) << error;
  // With a separate clock for each peer it would have restarted when the first of them came.
  EXPECT_GT(reported, waited.count() - 0.8) << error;
}

TEST(Processes, ReleasedWhileWaiting) {
  Processes processes({0, 1});
  TestCall call = small_call(2, 1);
  call.submit(processes[0]);
  processes.end(0);
  ASSERT_TRUE(call.outcome(0).wait());
  EXPECT_NE(call.outcome(0).error().find("released"), std::string::npos);
}

// In a process of its own, which exits at a known point.
TEST(Channel, SeesThatAProcessHasExited) {
  const size_t bytes = Channel::bytes(2, kSmall);
  void* const shared = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(shared, MAP_FAILED);
  Channel channel(static_cast<unsigned char*>(shared), 2, 0, kSmall);
  EXPECT_FALSE(channel.has_joined(1));
  EXPECT_FALSE(channel.has_exited(1));
  const pid_t child = fork();
  if (child == 0) {
    Channel(static_cast<unsigned char*>(shared), 2, 1, kSmall).join();
    for (;;) pause();
  }
  while (!channel.has_joined(1)) std::this_thread::yield();
  EXPECT_FALSE(channel.has_exited(1));
  kill(child, SIGSTOP);
  EXPECT_FALSE(channel.has_exited(1));
  kill(child, SIGKILL);
  siginfo_t info;
  ASSERT_EQ(waitid(P_PID, child, &info, WEXITED | WNOWAIT), 0);
  EXPECT_TRUE(channel.has_exited(1)) << "its parent has not reaped it yet";
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(channel.has_exited(1));
  munmap(shared, bytes);
}

// Its last state must not be missed between two looks: one process would blame it, and another one would not.
TEST(Channel, SeesThatAProcessHasExitedWhileItsParentReapsIt) {
  const size_t bytes = Channel::bytes(2, kSmall);
  void* const shared = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(shared, MAP_FAILED);
  int64_t looks = 0, misses = 0;
  for (int i = 0; i < 100; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      Channel(static_cast<unsigned char*>(shared), 2, 1, kSmall).join();
      for (;;) pause();
    }
    Channel channel(static_cast<unsigned char*>(shared), 2, 0, kSmall);
    while (!channel.has_joined(1)) std::this_thread::yield();
    kill(child, SIGKILL);
    siginfo_t info;
    ASSERT_EQ(waitid(P_PID, child, &info, WEXITED | WNOWAIT), 0);
    std::thread parent([child] {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      waitpid(child, nullptr, 0);
    });
    for (bool is_there = true; is_there; ++looks) {
      is_there = kill(child, 0) == 0;
      if (!channel.has_exited(1)) ++misses;
    }
    parent.join();
    std::memset(shared, 0, bytes);
  }
  EXPECT_EQ(misses, 0) << "of " << looks << " looks";
  munmap(shared, bytes);
}

TEST(Channel, CountsTheCoresOfAllProcesses) {
  const std::vector<int> usable = usable_cores();
  for (int other : {usable.front(), usable.back()}) {
    std::vector<unsigned char> memory(Channel::bytes(2, kSmall) + 128);
    auto* const aligned = memory.data() + (128 - reinterpret_cast<uintptr_t>(memory.data()) % 128);
    const auto join_on = [&](int process, int core) {
      std::thread([&] {
        bind_to_core(core);
        Channel(aligned, 2, process, kSmall).join();
      }).join();
    };
    Channel channel(aligned, 2, 0, kSmall);
    EXPECT_EQ(channel.num_cores(), static_cast<int>(usable.size())) << "nobody has joined";
    join_on(0, usable.front());
    join_on(1, other);
    EXPECT_EQ(channel.num_cores(), other == usable.front() ? 1 : 2);
  }
}

TEST(Channel, TruncatesTheStatusBetweenCharacters) {
  std::vector<unsigned char> memory(Channel::bytes(1, kSmall) + 128);
  auto* const aligned = memory.data() + (128 - reinterpret_cast<uintptr_t>(memory.data()) % 128);
  Channel channel(aligned, 1, 0, kSmall);
  const std::string two_bytes = "\xc3\xa9";
  for (const std::string& before : {std::string(), std::string("x")}) {
    std::string text = before;
    while (text.size() < 2000) text += two_bytes;
    channel.post_status(text);
    const std::string status = channel.status_of(0).text;
    EXPECT_EQ((status.size() - before.size()) % 2, 0u);
    EXPECT_GT(status.size(), 1000u);
    EXPECT_EQ(status, text.substr(0, status.size()));
  }
}

TEST(Group, NumbersProcessesByTheirFirstRanks) {
  const Group group({7, 3, 7, 5, 3}, 5);
  EXPECT_EQ(group.num_processes(), 3);
  EXPECT_EQ(group.self(), 2);
  EXPECT_EQ(group.process_id(1), 3);
  EXPECT_EQ(group.ranks_of(0), (std::vector<int>{0, 2}));
  EXPECT_EQ(group.process_of(4), 1);
  EXPECT_EQ(group.local_index(4), 1);
  EXPECT_TRUE(group.is_local(3));
  EXPECT_THROW(Group({0, 1}, 2), std::invalid_argument);
}

}  // namespace
}  // namespace jax_ring::shm
