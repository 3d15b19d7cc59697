// flight_recorder_test.cc: recorded calls, even while they are read, and their tables.
#include "recorder/flight_recorder.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "cpu/rendezvous/completion_threads.h"
#include "cpu/rendezvous/rendezvous.h"
#include "recorder/flight_table.h"

namespace jax_ring::flight {
namespace {

constexpr int64_t kMillisecond = 1'000'000;

Members members(std::vector<int64_t> positions, std::vector<int64_t> processes) {
  return {std::move(positions), std::move(processes)};
}

// A call whose ranks arrive one after the other, a millisecond apart, except the last one, which takes `late` more.
void run(RecordedCall* call, int group, int64_t start, int64_t late, State state = State::done) {
  const int size = static_cast<int>(call->groups[group].positions.size());
  Entry entry;
  entry.enter(call, Recorder::instance().memory(), group, start);
  int64_t now = start;
  for (int rank = 0; rank + 1 < size; ++rank, now += kMillisecond) {
    entry.arrive(rank);
    if (rank == size - 2) entry.note_before_last(now);
  }
  now += late - kMillisecond;
  entry.arrive(size - 1);
  entry.become_ready(size - 1, now);
  entry.end(state, now + 3 * kMillisecond);
}

TEST(FlightRecorder, KeepsTheLastCalls) {
  Recorder& recorder = Recorder::instance();
  RecordedCall* const call = recorder.add("sum, called at a.py:1", "all_reduce", {members({4, 5}, {0, 0})});
  for (int i = 1; i <= 300; ++i) run(call, 0, i * 10 * kMillisecond, kMillisecond);
  const std::vector<Seen> records = recorder.read_own().records;
  ASSERT_EQ(records.size(), kNumRecords);
  EXPECT_EQ(records.back().sequence - records.front().sequence, kNumRecords - 1);
  const Seen& last = records.back();
  EXPECT_EQ(last.text, "sum, called at a.py:1");
  EXPECT_EQ(last.state, State::done);
  EXPECT_EQ(last.entered, 3000 * kMillisecond);
  EXPECT_EQ(last.ready, 3001 * kMillisecond);
  EXPECT_EQ(last.ended, 3004 * kMillisecond);
  EXPECT_EQ(last.arrived, 3u);
  EXPECT_EQ(last.last, 5u);  // by mesh position
}

TEST(FlightRecorder, EqualCallsShareTheirStatistics) {
  Recorder& recorder = Recorder::instance();
  const auto groups = [] { return std::vector<Members>{members({0, 1, 2}, {0, 0, 0}), members({3, 4, 5}, {0, 0, 0})}; };
  RecordedCall* const call = recorder.add("maximum", "all_reduce", groups());
  EXPECT_EQ(recorder.add("maximum", "all_reduce", groups()), call);
  EXPECT_NE(recorder.add("maximum", "all_reduce", {members({0, 1, 2}, {0, 0, 0})}), call);
  EXPECT_NE(recorder.add("maximum", "reduce", groups()), call);
  run(call, 0, 0, 5 * kMillisecond);
  run(call, 1, 0, 7 * kMillisecond);
  run(call, 1, 0, 9 * kMillisecond);
  run(call, 1, 0, 0, State::failed);
  const auto totals = call->statistics->read(/*reset=*/true);
  EXPECT_EQ(totals.count, 3u);
  EXPECT_EQ(totals.failures, 1u);
  EXPECT_EQ(totals.waited, (3 * 1 + 5 + 7 + 9) * uint64_t{kMillisecond});
  EXPECT_EQ(totals.busy, 9 * uint64_t{kMillisecond});
  ASSERT_EQ(totals.late.size(), 6u);
  EXPECT_EQ(totals.late[2].count, 1u);
  EXPECT_EQ(totals.late[2].nanoseconds, 5 * uint64_t{kMillisecond});
  EXPECT_EQ(totals.late[5].count, 2u);
  EXPECT_EQ(totals.late[5].nanoseconds, 16 * uint64_t{kMillisecond});
  EXPECT_EQ(call->statistics->read(false).count, 0u);
}

TEST(FlightRecorder, TheEndOfACallIsCountedOnce) {
  RecordedCall* const call = Recorder::instance().add("once", "reduce", {members({0}, {0})});
  Entry entry;
  entry.enter(call, Recorder::instance().memory(), 0, 0);
  entry.become_ready(0, 1);
  entry.end(State::done, 2);
  entry.end(State::failed, 3);
  const auto totals = call->statistics->read(false);
  EXPECT_EQ(totals.count, 1u);
  EXPECT_EQ(totals.failures, 0u);
  EXPECT_EQ(Recorder::instance().read_own().records.back().state, State::done);
}

// A call that is still open after a later call has taken its record must not change that record.
TEST(FlightRecorder, AnOvertakenCallLeavesTheRecordAlone) {
  RecordedCall* const call = Recorder::instance().add("overtaken", "reduce", {members({0, 1}, {0, 0})});
  Entry slow;
  slow.enter(call, Recorder::instance().memory(), 0, 1);
  for (size_t i = 0; i < kNumRecords; ++i) run(call, 0, 1000, 0);
  slow.arrive(0);
  slow.become_ready(1, 77);
  slow.end(State::failed, 78);
  for (const Seen& seen : Recorder::instance().read_own().records) {
    EXPECT_EQ(seen.entered, 1000);
    EXPECT_EQ(seen.state, State::done);
  }
}

// Several threads write records while others read them. The fields of a record, as read, belong together.
TEST(FlightRecorder, NoRecordIsReadInParts) {
  constexpr int64_t kCallsPerWriter = 20000;
  Recorder& recorder = Recorder::instance();
  std::vector<RecordedCall*> calls;
  for (int i = 0; i < 4; ++i) {
    calls.push_back(recorder.add("call " + std::to_string(i), "all_reduce", {members({i}, {0})}));
  }
  std::atomic<int> num_writing{0};  // writers that have not made their last call
  std::vector<std::thread> writers;
  for (int i = 0; i < 4; ++i) {
    ++num_writing;
    writers.emplace_back([&, i] {
      for (int64_t n = 1; n <= kCallsPerWriter; ++n) {
        Entry entry;
        entry.enter(calls[i], recorder.memory(), 0, n * 4 + i);
        entry.end(State::done, n * 4 + i);
      }
      --num_writing;
    });
  }
  size_t num_seen = 0;
  // The last round reads the final state, so it sees records even if no other round was lucky.
  for (bool last = false; !last;) {
    last = num_writing == 0;
    for (const Seen& seen : recorder.read_own().records) {
      if (seen.text.rfind("call ", 0) != 0) continue;
      ++num_seen;
      EXPECT_EQ(seen.text, "call " + std::to_string(seen.entered % 4));
      EXPECT_TRUE(seen.ended == 0 || seen.ended == seen.entered);
    }
  }
  for (std::thread& writer : writers) writer.join();
  EXPECT_GT(num_seen, 0u);
}

TEST(FlightRecorder, LongTextsAreCutBetweenCharacters) {
  const std::string text = std::string(kTextBytes - 2, 'x') + "\xc3\xa9";
  run(Recorder::instance().add(text, "all_reduce", {members({0}, {0})}), 0, 5 * kMillisecond, 0);
  EXPECT_EQ(Recorder::instance().read_own().records.back().text, std::string(kTextBytes - 2, 'x'));
}

// A call that one process skips after all others have entered it, and that process's next call.
TEST(FlightTable, ShowsWhichProcessHasNotMadeACall) {
  const auto seen = [](uint64_t id, const char* text, int64_t entered, State state) {
    Seen record;
    record.sequence = id;
    record.id = id;
    record.members = 7;
    record.text = text;
    record.entered = entered;
    record.ended = entered;
    record.state = state;
    return record;
  };
  const int64_t second = 1000 * kMillisecond;
  std::vector<Snapshot> processes(4);
  for (int64_t i = 0; i < 4; ++i) {
    processes[i].process = i;
    processes[i].records = {seen(1, "step", 0, State::done), seen(2, "step", second, State::done)};
    if (i != 2) processes[i].records.push_back(seen(3, "sum", 2 * second, State::ready));
  }
  processes[2].records.push_back(seen(4, "max", 3 * second, State::ready));
  const std::string table = table_of_processes(processes, 5 * second);
  EXPECT_EQ(table,
            "jax_ring: the last calls (> = not completed by everyone):\n"
            "  2 times step\n"
            "      processes 0-3: done 4.000 s ago\n"
            "> sum\n"
            "      processes 0, 1, 3: waits, 3.000 s; process 2: NOT MADE\n"
            "> max\n"
            "      processes 0, 1, 3: NOT MADE; process 2: waits, 2.000 s\n");
  EXPECT_EQ(last_calls_of_processes(processes, 5 * second),
            " Last calls: processes 0, 1, 3: waiting in sum, for 3.000 s; process 2: waiting in max, for 2.000 s.");
  processes[2].records.pop_back();
  EXPECT_EQ(last_calls_of_processes(processes, 5 * second),
            " Last calls: processes 0, 1, 3: waiting in sum, for 3.000 s; process 2: no call since step was done, "
            "4.000 s ago.");
}

// A call that not all ranks of a process have made has no id yet, and none if it fails so.
TEST(FlightTable, ACallThatIsMadeInPartSharesTheRowOfTheOthers) {
  const auto seen = [](uint64_t id, int64_t entered, State state, uint64_t arrived) {
    Seen record;
    record.sequence = record.id = id;
    record.members = 7;
    record.text = "sum";
    record.entered = entered;
    record.ended = entered;
    record.arrived = arrived;
    record.state = state;
    return record;
  };
  const int64_t second = 1000 * kMillisecond;
  std::vector<Snapshot> processes(3);
  for (int64_t i = 0; i < 3; ++i) {
    processes[i].process = i;
    processes[i].records = {seen(1, 0, State::done, 3)};
  }
  processes[0].records.push_back(seen(0, 2 * second, State::arriving, 1));
  processes[1].records.push_back(seen(2, 3 * second, State::ready, 12));
  processes[2].records.push_back(seen(0, second, State::failed, 48));
  EXPECT_EQ(table_of_processes(processes, 5 * second),
            "jax_ring: the last calls (> = not completed by everyone):\n"
            "  sum\n"
            "      processes 0-2: done 5.000 s ago\n"
            "> sum\n"
            "      process 0: 1 rank waits, 3.000 s; process 1: waits, 2.000 s;\n"
            "      process 2: failed 4.000 s ago\n");
  // The first call of a process is, too.
  processes[2].records.erase(processes[2].records.begin());
  EXPECT_EQ(table_of_processes(processes, 5 * second).find("NOT MADE"), std::string::npos);
  EXPECT_NE(last_calls_of_processes(processes, 5 * second).find("process 0: 1 rank waits in sum, for 3.000 s"),
            std::string::npos);
}

TEST(FlightTable, FitsATerminal) {
  std::vector<Snapshot> processes(40);
  for (int64_t i = 0; i < 40; ++i) {
    processes[i].process = i;
    for (uint64_t id = 1; id <= 30; ++id) {
      Seen record;
      record.sequence = record.id = id;
      record.members = 7;
      record.text = "sum " + std::to_string(id / 2 * 2) + std::string(90, 'x');
      record.entered = static_cast<int64_t>(id);
      record.state = id < 20 || i % 3 == 0 ? State::done : i % 3 == 1 ? State::ready : State::failed;
      processes[i].records.push_back(record);
    }
  }
  std::istringstream table(table_of_processes(processes, 0));
  int rows = 0;
  for (std::string line; std::getline(table, line);) {
    EXPECT_LE(line.size(), 80u) << line;
    rows += line[0] == '>' || line.substr(0, 6).find_first_not_of(' ') != std::string::npos;
  }
  EXPECT_EQ(rows, 1 + 10);
}

// Printing must not wait for the reader of standard error.
TEST(FlightRecorder, AFullPipeDoesNotBlockTheTable) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const int saved = dup(STDERR_FILENO);
  dup2(ends[1], STDERR_FILENO);
  Recorder::instance().join(0, "a job");
  const std::string text(1 << 20, 'x');  // more than the pipe holds
  Recorder::instance().print_once(text);
  dup2(saved, STDERR_FILENO);
  close(saved);
  close(ends[1]);
  size_t got = 0;
  std::vector<char> buffer(1 << 16);
  for (ssize_t n; (n = read(ends[0], buffer.data(), buffer.size())) > 0;) got += n;
  close(ends[0]);
  EXPECT_GT(got, 0u);
  EXPECT_LT(got, text.size());
}

// Ranks arrive on threads of their own, in a recording rendezvous, while another thread reads.
TEST(FlightRecorder, RecordsRendezvousOfManyThreads) {
  constexpr int kRanks = 4, kCalls = 2000;
  Recorder& recorder = Recorder::instance();
  cpu::RendezvousMap map(cpu::ReplicaGroups({0, 1, 2, 3}, {kRanks}), "rendezvous");
  RecordedCall* const call = recorder.add("rendezvous", "all_reduce", {members({0, 1, 2, 3}, {0, 0, 0, 0})});
  map.record(call, recorder.memory());
  std::vector<std::thread> ranks;
  std::atomic<int> completed{0};
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      for (int n = 0; n < kCalls; ++n) {
        cpu::Participant participant;
        participant.inputs = {nullptr};
        participant.outputs = {nullptr};
        participant.done = [&completed](const CallFailure*) { ++completed; };
        if (auto rendezvous = map.arrive(n, rank, std::move(participant))) {
          cpu::CompletionThreads::instance().complete(std::move(rendezvous));
        }
      }
    });
  }
  // A reader of a state also reads everything written before it.
  int without_ranks = 0, without_times = 0;
  while (completed < kRanks * kCalls) {
    for (const Seen& seen : recorder.read_own().records) {
      if (seen.text != "rendezvous" || seen.state == State::arriving) continue;
      if (seen.arrived != 15) ++without_ranks;
      if (seen.ready < seen.entered || (seen.state == State::done && seen.ended < seen.ready)) ++without_times;
    }
  }
  EXPECT_EQ(without_ranks, 0);
  EXPECT_EQ(without_times, 0);
  for (std::thread& rank : ranks) rank.join();
  EXPECT_EQ(call->statistics->read(false).count, uint64_t{kCalls});
}

// The memory of a process can be read after it has been killed, and leaves no file behind.
TEST(FlightRecorder, APeerIsReadAfterItsDeath) {
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  // A fresh process with memory of its own: a forked one would share this test's.
  const pid_t child = fork();
  if (child == 0) {
    dup2(ready[1], STDOUT_FILENO);
    execl("/proc/self/exe", "flight_recorder_test", "--gtest_filter=Child.*", "--gtest_also_run_disabled_tests",
          static_cast<char*>(nullptr));
    _exit(1);
  }
  close(ready[1]);
  std::string output;
  for (char c; output.find("recorded") == std::string::npos && read(ready[0], &c, 1) == 1;) output += c;
  Recorder& recorder = Recorder::instance();
  recorder.join(0, "token");
  recorder.open_peer(3, child);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  close(ready[0]);
  const std::vector<Snapshot> all = recorder.read();
  ASSERT_EQ(all.size(), 2u) << output;
  EXPECT_EQ(all[1].process, 3);
  ASSERT_FALSE(all[1].records.empty());
  EXPECT_EQ(all[1].records.back().text, "the child's call");
  recorder.join(0, "another token");
  EXPECT_EQ(recorder.read().size(), 1u);
}

TEST(FlightRecorder, AForkedChildHasRecordsOfItsOwn) {
  Recorder& recorder = Recorder::instance();
  run(recorder.add("the parent's call", "all_reduce", {members({0, 1}, {0, 0})}), 0, 5, 0);
  const pid_t child = fork();
  if (child == 0) {
    recorder.leave_parent();
    const bool is_empty = recorder.read_own().records.empty() && Recorder::read_host(false)[getpid()].records.empty();
    run(recorder.add("the child's call", "all_reduce", {members({0, 1}, {0, 0})}), 0, 5, 0);
    _exit(is_empty && recorder.read_own().records.size() == 1 ? 0 : 1);
  }
  int status = 1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(recorder.read_own().records.back().text, "the parent's call");
}

TEST(Child, DISABLED_RecordsACallAndWaits) {
  run(Recorder::instance().add("the child's call", "all_reduce", {members({0, 1}, {0, 1})}), 0, 5, 0);
  std::printf("recorded\n");
  std::fflush(stdout);
  for (;;) pause();
}

}  // namespace
}  // namespace jax_ring::flight
