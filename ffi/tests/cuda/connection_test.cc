// connection_test.cc: how a group's processes exchange their memory: attempts, errors, deadlines, the end.
#include "cuda/groups/connection.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/host_groups.h"

namespace jax_ring::gpu {
namespace {

// Two processes of one GPU each.
struct Pair {
  HostMemory memories[2];
  Table table;
  std::vector<std::unique_ptr<Communicator>> communicators;

  Pair() {
    for (int process = 0; process < 2; ++process) {
      communicators.push_back(std::make_unique<Communicator>(std::vector<Member>{{0, 0}, {1, 1}}, process,
                                                             cpu::testing::small_capacity(2), "group",
                                                             memories[process], table.shared()));
    }
  }

  // Both processes' errors when they connect at the same time.
  std::vector<std::string> connect() {
    std::vector<std::string> errors(2);
    std::vector<std::thread> processes;
    for (int process = 0; process < 2; ++process) {
      processes.emplace_back(
          [&, process] { errors[process] = error_of([&] { communicators[process]->connect(0, kSeconds); }); });
    }
    for (std::thread& process : processes) process.join();
    return errors;
  }
};

TEST(Connection, GoesOnAfterATimeout) {
  Pair pair;
  pair.table.timeout = std::chrono::milliseconds(20);
  // The other process does not come; this one's published memory stays alive.
  for (int i = 0; i < 2; ++i) {
    const std::string error = error_of([&] { pair.communicators[0]->connect(0, kSeconds); });
    EXPECT_CONTAINS(error, "process 1 did not say where the memory of its GPUs is");
    EXPECT_CONTAINS(error, "JAX_RING_TIMEOUT_S");
    EXPECT_EQ(pair.memories[0].events, (std::vector<std::string>{"allocate 0", "allocate 0"}));
  }
  pair.table.timeout = cpu::testing::kTestTimeout;
  EXPECT_EQ(pair.connect(), (std::vector<std::string>{"", ""}));
  cpu::testing::PeerCall call = cpu::testing::PeerCall::random(DType::f32, Algorithm::two_shot, {}, 2, {100}, 1);
  std::thread other([&] { run(*pair.communicators[1], {"psum", {}, Op::sum, {}}, call); });
  run(*pair.communicators[0], {"psum", {}, Op::sum, {}}, call);
  other.join();
  expect_results(call, call.expected());
}

TEST(Connection, AnErrorReachesTheOtherProcessAndTheNextAttemptSucceeds) {
  for (int step = 0; step < 4; ++step) {
    Pair pair;
    HostMemory& memory = pair.memories[1];
    if (step == 0) memory.num_allocations_left = 0;
    if (step == 1) memory.num_allocations_left = 1;
    if (step == 2) memory.export_error = "invalid argument";
    if (step == 3) memory.import_error = "invalid argument";
    for (int attempt = 0; attempt < 2; ++attempt) {
      const std::vector<std::string> errors = pair.connect();
      EXPECT_CONTAINS(errors[1], step < 3 ? "GPU 1 of process 1 could not set up its mailbox"
                                          : "GPU 1 of process 1 cannot map the memory of GPU 0 of process 0");
      EXPECT_CONTAINS(errors[1], step < 2 ? "out of memory" : "invalid argument");
      EXPECT_EQ(errors[0], "process 1 failed: " + errors[1]);
    }
    memory.num_allocations_left = -1;
    memory.export_error.clear();
    memory.import_error.clear();
    EXPECT_EQ(pair.connect(), (std::vector<std::string>{"", ""}));
    EXPECT_EQ(pair.memories[0].imported, 1);
    EXPECT_EQ(memory.imported, 1);
  }
}

TEST(Connection, ALateProcessLearnsWhyTheOtherFailed) {
  Pair pair;
  pair.memories[0].num_allocations_left = 0;
  const std::string error = error_of([&] { pair.communicators[0]->connect(0, kSeconds); });
  pair.memories[0].num_allocations_left = -1;
  EXPECT_EQ(error_of([&] { pair.communicators[1]->connect(0, kSeconds); }), "process 0 failed: " + error);
  EXPECT_EQ(pair.connect(), (std::vector<std::string>{"", ""}));
}

TEST(Connection, WhatAnotherProcessSaysIsEscaped) {
  Pair pair;
  pair.memories[0].export_error = "\x1b[2J out of\nmemory";
  EXPECT_NE(error_of([&] { pair.communicators[0]->connect(0, kSeconds); }), "");
  const std::string error = error_of([&] { pair.communicators[1]->connect(0, kSeconds); });
  EXPECT_CONTAINS(error, "\\x1b[2J out of\\x0amemory");
}

TEST(Connection, TheSizeThatAnotherProcessSaysIsEscaped) {
  Pair pair;
  const std::string item = "\x1b[2J", size_of_item("\x04\0\0\0", 4);
  pair.table.store().publish("group/lane 0/attempt 0/handles/1", "I" + size_of_item + item);
  const std::string error = error_of([&] { pair.communicators[0]->connect(0, kSeconds); });
  EXPECT_CONTAINS(error, "run different versions of jax_ring");
  EXPECT_CONTAINS(error, " and \\x1b[2J bytes");
}

TEST(Connection, NobodyLaunchesBeforeAllHaveMapped) {
  Pair pair;
  pair.table.timeout = std::chrono::milliseconds(50);
  // Process 1 publishes its handles, then fails to report its mappings; process 0 must not be connected.
  std::thread other([&] { error_of([&] { pair.communicators[1]->connect(0, kSeconds); }); });
  other.join();
  EXPECT_CONTAINS(error_of([&] { pair.communicators[0]->connect(0, kSeconds); }),
                  "process 1 did not say that it has mapped the memory of the other GPUs");
  EXPECT_FALSE(pair.communicators[0]->is_connected(0));
  pair.table.timeout = cpu::testing::kTestTimeout;
  EXPECT_EQ(pair.connect(), (std::vector<std::string>{"", ""}));
}

TEST(Connection, AStoreThatReportsAnErrorAndHasTheValue) {
  HostMemory memories[2];
  Table table;
  bool broken = true;
  KeyValueStore uncertain = table.store();
  uncertain.publish = [&, publish = uncertain.publish, fetch = uncertain.fetch](const std::string& key,
                                                                                const std::string& value) {
    if (!broken) throw std::runtime_error("already exists");
    broken = false;
    publish(key, value);
    throw std::runtime_error("unavailable");
  };
  table.timeout = std::chrono::milliseconds(50);
  Communicator communicator({{0, 0}, {1, 1}}, 0, cpu::testing::small_capacity(2), "group", memories[0],
                            std::make_shared<const KeyValueStore>(uncertain));
  EXPECT_EQ(error_of([&] { communicator.connect(0, kSeconds); }), "unavailable");
  EXPECT_CONTAINS(error_of([&] { communicator.connect(0, kSeconds); }), "process 1 did not say");
}

TEST(Connection, AStoreThatReportsAnErrorAndHasTheReasonOfAFailure) {
  HostMemory memories[2];
  Table table;
  std::set<std::string> keys;
  bool broken = true;
  KeyValueStore uncertain = table.store();
  uncertain.publish = [&, publish = uncertain.publish](const std::string& key, const std::string& value) {
    if (!keys.insert(key).second) throw std::runtime_error("already exists");
    publish(key, value);
    if (std::exchange(broken, false)) throw std::runtime_error("unavailable");
  };
  const std::vector<Member> members = {{0, 0}, {1, 1}};
  Communicator failing(members, 0, cpu::testing::small_capacity(2), "group", memories[0],
                       std::make_shared<const KeyValueStore>(uncertain));
  Communicator other(members, 1, cpu::testing::small_capacity(2), "group", memories[1], table.shared());
  memories[0].num_allocations_left = 0;
  const std::string error = error_of([&] { failing.connect(0, kSeconds); });
  EXPECT_CONTAINS(error, "out of memory");
  memories[0].num_allocations_left = -1;
  EXPECT_EQ(error_of([&] { other.connect(0, kSeconds); }), "process 0 failed: " + error);
  // The other one is in the next attempt by now.
  EXPECT_EQ(error_of([&] { failing.connect(0, kSeconds); }), "process 0 failed: " + error);
  std::thread again([&] { EXPECT_EQ(error_of([&] { other.connect(0, kSeconds); }), ""); });
  EXPECT_EQ(error_of([&] { failing.connect(0, kSeconds); }), "");
  again.join();
}

TEST(Connection, OneThreadConnectsAndTheOthersWait) {
  HostMemory memory;
  Table table;
  table.timeout = std::chrono::milliseconds(200);
  Communicator communicator({{0, 0}, {0, 1}, {1, 2}}, 0, cpu::testing::small_capacity(3), "group", memory,
                            table.shared());
  std::vector<std::string> errors(8);
  std::vector<std::thread> threads;
  for (std::string& error : errors) {
    threads.emplace_back([&] { error = error_of([&] { communicator.connect(0, kSeconds); }); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& error : errors) EXPECT_CONTAINS(error, "process 1 did not say");
  EXPECT_EQ(memory.events, (std::vector<std::string>{"allocate 0", "allocate 0", "allocate 1", "allocate 1"}));
}

TEST(Connection, AWaitingThreadHasADeadline) {
  HostMemory memory;
  std::promise<void> fetching, go_on;
  KeyValueStore store{[](const std::string&, const std::string&) {},
                      [&](const std::string& key) -> std::string {
                        fetching.set_value();
                        go_on.get_future().wait();
                        throw std::runtime_error("no " + key);
                      }};
  Communicator communicator({{0, 0}, {0, 1}, {1, 2}}, 0, cpu::testing::small_capacity(3), "group", memory,
                            std::make_shared<const KeyValueStore>(store));
  std::thread connecting([&] { error_of([&] { communicator.connect(0, kSeconds); }); });
  fetching.get_future().wait();
  EXPECT_CONTAINS(error_of([&] { communicator.connect(0, 0.02); }), "another GPU of this process has been connecting");
  // Retiring does not wait for it either: it gives up when it is done.
  communicator.retire();
  go_on.set_value();
  connecting.join();
  EXPECT_CONTAINS(error_of([&] { communicator.connect(0, kSeconds); }), "the group was forgotten");
  EXPECT_EQ(memory.imported, 0);
}

TEST(Connection, WaitsForItsGpusBeforeItGivesUpMemoryThatTheyWrite) {
  HostMemory memories[2];
  Table table;
  const std::vector<Member> members = {{0, 0}, {0, 1}, {1, 2}};
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (int process = 0; process < 2; ++process) {
    communicators.push_back(std::make_unique<Communicator>(members, process, cpu::testing::small_capacity(3), "group",
                                                           memories[process], table.shared()));
  }
  std::thread other([&] { communicators[1]->connect(0, kSeconds); });
  communicators[0]->connect(0, kSeconds);
  other.join();
  memories[0].events.clear();
  communicators[0]->retire();
  // Releasing memory waits for the device. Its mailboxes stay, since the other process still writes to them.
  EXPECT_EQ(memories[0].events, (std::vector<std::string>{"release 0", "release 1", "close 0", "release on host",
                                                          "close 1", "release on host"}));
  EXPECT_EQ(memories[0].allocated(), 2u);
  communicators[1]->retire();
  communicators[0]->free_all();
  EXPECT_EQ(memories[0].allocated(), 0u);
}

}  // namespace
}  // namespace jax_ring::gpu
