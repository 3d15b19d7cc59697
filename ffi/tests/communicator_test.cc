// communicator_test.cc: groups of GPUs, simulated in host memory, with two processes in one.
#include "cuda/communicator.h"

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cuda/communicators.h"
#include "cuda/first_run.h"
#include "cuda/plan.h"
#include "cuda/watcher.h"
#include "peers.h"

namespace jax_ring::gpu {
namespace {

using cpu::testing::Bytes;
using cpu::testing::JitteryTeam;
using cpu::testing::PeerCall;

// Host memory in place of a GPU's. May be used by several threads, and asserts that only those who connect do.
class HostMemory final : public Gpus {
 public:
  void* allocate(int device, size_t bytes) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (num_allocations_left == 0) throw std::runtime_error("out of memory");
    if (num_allocations_left > 0) --num_allocations_left;
    events.push_back("allocate " + std::to_string(device));
    return keep(::operator new(bytes, std::align_val_t(128)), bytes);
  }
  void release(int device, void* memory) noexcept override { free_memory("release " + std::to_string(device), memory); }
  void* allocate_on_host(int, size_t bytes) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return keep(::operator new(bytes, std::align_val_t(128)), bytes);
  }
  void release_on_host(int, void* memory) noexcept override { free_memory("release on host", memory); }
  bool can_access(int device, int peer) override { return severed.count({device, peer}) == 0; }
  void enable_access(int device, int peer) override { access_enabled.insert({device, peer}); }
  std::string export_handle(int, void* memory) override {
    if (!export_error.empty()) throw std::runtime_error(export_error);
    return std::string(reinterpret_cast<const char*>(&memory), sizeof(memory));
  }
  void* import_handle(int device, const std::string& handle) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!import_error.empty()) throw std::runtime_error(import_error);
    void* memory;
    std::memcpy(&memory, handle.data(), sizeof(memory));
    events.push_back("import " + std::to_string(device));
    ++imported;
    return memory;
  }
  void close_handle(int device, void*) noexcept override {
    const std::lock_guard<std::mutex> lock(mutex_);
    events.push_back("close " + std::to_string(device));
    --imported;
  }
  void warm_up(int device) override { warm.insert(device); }
  std::vector<Identity> identities() override { return {}; }
  bool has_kernel(const KernelKey&) const override { return false; }
  void launch(const KernelKey&, const Call&, Stream) override { ADD_FAILURE() << "nothing launches here"; }
  bool is_capturing(Stream) override { return false; }

  std::set<std::pair<int, int>> severed, access_enabled;
  std::set<int> warm;
  int imported = 0;
  int num_allocations_left = -1;  // without limit
  std::string export_error, import_error;
  std::vector<std::string> events;
  size_t allocated() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return allocated_.size();
  }

 private:
  void* keep(void* memory, size_t bytes) {
    allocated_.insert(memory);
    return std::memset(memory, 0, bytes);
  }
  void free_memory(const std::string& event, void* memory) {
    const std::lock_guard<std::mutex> lock(mutex_);
    events.push_back(event);
    EXPECT_EQ(allocated_.erase(memory), 1u);
    ::operator delete(memory, std::align_val_t(128));
  }
  mutable std::mutex mutex_;
  std::set<void*> allocated_;
};

// A key-value store as the processes of a program share one.
class Table {
 public:
  KeyValueStore store() {
    return {[this](const std::string& key, const std::string& value) {
              std::lock_guard<std::mutex> lock(mutex_);
              if (!publish_error.empty()) throw std::runtime_error(publish_error);
              EXPECT_TRUE(values_.emplace(key, value).second) << key << " is published twice";
              changed_.notify_all();
            },
            [this](const std::string& key) {
              std::unique_lock<std::mutex> lock(mutex_);
              if (!changed_.wait_for(lock, timeout, [&] { return values_.count(key) > 0; })) {
                throw std::runtime_error("no process published " + key);
              }
              return values_[key];
            }};
  }
  std::shared_ptr<const KeyValueStore> shared() { return std::make_shared<const KeyValueStore>(store()); }
  size_t size() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return values_.size();
  }
  std::chrono::duration<double> timeout = cpu::testing::kTestTimeout;
  std::string publish_error;

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

constexpr double kSeconds = 20;

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

#define EXPECT_CONTAINS(text, part) EXPECT_NE(std::string(text).find(part), std::string::npos) << (text)

// A group of one process, connected in lane 0.
struct Connected : Communicator {
  template <class... Arguments>
  explicit Connected(Arguments&&... arguments) : Communicator(std::forward<Arguments>(arguments)...) {
    connect(0, kSeconds);
  }
};

std::vector<Member> one_process(int num_ranks) {
  std::vector<Member> members;
  for (int rank = 0; rank < num_ranks; ++rank) members.push_back({0, rank});
  return members;
}

// Runs what the kernels of these ranks would run, one thread per team. thresholds_of: by rank.
void run(const Communicator& communicator, const CallSite& site, PeerCall& call,
         const std::vector<Thresholds>& thresholds_of = {}, double deadline_seconds = 20) {
  std::vector<std::thread> threads;
  for (int rank : communicator.local_ranks()) {
    threads.emplace_back([&, rank] {
      const Thresholds thresholds =
          thresholds_of.empty() ? default_thresholds(communicator.num_ranks()) : thresholds_of[rank];
      std::vector<Buffer> buffers;
      for (size_t i = 0; i < call.counts.size(); ++i) {
        buffers.push_back({call.inputs[rank][i].data(), call.outputs[rank][i].data(), call.inputs[rank][i].size()});
      }
      for (const Launch& launch :
           launches_of(communicator, rank, site, thresholds, call.dtype, buffers, deadline_seconds)) {
        std::vector<std::thread> teams;
        for (int cta = 0; cta < communicator.capacity().num_ctas; ++cta) {
          teams.emplace_back([&, cta] {
            std::minstd_rand random(static_cast<unsigned>(cta + 1));
            cpu::testing::team_function(launch.kernel.dtype, launch.kernel.op, launch.kernel.algorithm)(
                launch.call.self, launch.call.message, launch.call.plan, cta, JitteryTeam(random));
          });
        }
        for (std::thread& team : teams) team.join();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(Communicator, ReducesInOneProcess) {
  HostMemory memory;
  {
    const Connected communicator(one_process(3), 0, cpu::testing::small_capacity(3), "group", memory, nullptr);
    EXPECT_EQ(memory.warm, (std::set<int>{0, 1, 2}));
    EXPECT_EQ(memory.access_enabled.size(), 6u);
    for (const std::optional<Algorithm> algorithm : {std::optional<Algorithm>(), {Algorithm::ring}}) {
      for (Order order : {Order::rank, Order::ring}) {
        std::vector<size_t> counts;  // more operands than fit into one message
        for (size_t i = 0; i < kMaxOperands + 3; ++i) counts.push_back(i % 7 * 13);
        PeerCall call = PeerCall::random(DType::f32, Algorithm::ring, {Collective::all_reduce, order}, 3, counts, 1);
        run(communicator, {"psum", call.plan, Op::sum, algorithm}, call);
        expect_results(call, call.expected());
      }
    }
    EXPECT_FALSE(communicator.failure().has_value());
  }
  EXPECT_EQ(memory.allocated(), 0u);
}

TEST(Communicator, ReducesBetweenTwoProcesses) {
  // The ranks of the two processes alternate, and one process has more GPUs.
  const std::vector<Member> members = {{0, 0}, {1, 2}, {0, 1}};
  HostMemory memories[2];
  Table table;
  PeerCall call = PeerCall::random(DType::bf16, Algorithm::two_shot, {}, 3, {1000, 3}, 1);
  std::vector<std::unique_ptr<Communicator>> communicators(2);
  std::vector<std::thread> processes;
  for (int process = 0; process < 2; ++process) {
    processes.emplace_back([&, process] {
      communicators[process] = std::make_unique<Communicator>(members, process, cpu::testing::small_capacity(3),
                                                              "group", memories[process], table.shared());
      communicators[process]->connect(0, kSeconds);
      run(*communicators[process], {"psum", {}, Op::sum, Algorithm::two_shot}, call);
    });
  }
  for (std::thread& process : processes) process.join();
  expect_results(call, call.expected());
  EXPECT_EQ(communicators[0]->local_ranks(), (std::vector<int>{0, 2}));
  EXPECT_EQ(communicators[0]->rank_of(1), 2);
  EXPECT_EQ(communicators[1]->rank_of(2), 1);
  EXPECT_EQ(communicators[1]->rank_of(0), std::nullopt);
  EXPECT_EQ(memories[0].imported, 2);
  communicators.clear();
  for (const HostMemory& memory : memories) {
    EXPECT_EQ(memory.imported, 0);
    EXPECT_EQ(memory.allocated(), 0u);
  }
}

// ---- Connecting -----------------------------------------------------------------------------------------------------

TEST(Communicator, TakesNothingBeforeItConnects) {
  HostMemory memory;
  Table table;
  {
    Communicator communicator({{0, 0}, {1, 1}}, 0, cpu::testing::small_capacity(2), "group", memory, table.shared());
    EXPECT_EQ(memory.allocated(), 0u);
    EXPECT_EQ(table.size(), 0u);
    EXPECT_FALSE(communicator.is_connected(0));
  }
  Communicator communicator(one_process(2), 0, cpu::testing::small_capacity(2), "group", memory, nullptr);
  communicator.connect(2, kSeconds);
  const size_t of_one_lane = memory.allocated();
  EXPECT_FALSE(communicator.is_connected(0));
  EXPECT_TRUE(communicator.is_connected(2));
  communicator.connect(2, kSeconds);
  EXPECT_EQ(memory.allocated(), of_one_lane);
  communicator.connect(0, kSeconds);
  EXPECT_EQ(memory.allocated(), 2 * of_one_lane);
}

TEST(Communicator, NamesThePairWithoutPeerAccess) {
  HostMemory memory;
  memory.severed.insert({1, 2});
  Communicator communicator(one_process(3), 0, cpu::testing::small_capacity(3), "group", memory, nullptr);
  const std::string error = error_of([&] { communicator.connect(0, kSeconds); });
  EXPECT_CONTAINS(error, "GPU 1 of process 0 cannot access the memory of GPU 2 of process 0");
  EXPECT_CONTAINS(error, "nvidia-smi topo -p2p r");
}

TEST(Communicator, ADifferentIdThanTheOrdinal) {
  HostMemory memory;
  Communicator communicator({{0, 100}, {0, 200}}, 0, cpu::testing::small_capacity(2), "group", memory, nullptr,
                            {{100, 1}, {200, 0}, {300, 2}});
  communicator.connect(0, kSeconds);
  EXPECT_EQ(communicator.rank_of(1), 0);
  EXPECT_EQ(communicator.rank_of(0), 1);
  EXPECT_EQ(communicator.rank_of(2), std::nullopt);
  EXPECT_EQ(memory.access_enabled, (std::set<std::pair<int, int>>{{0, 1}, {1, 0}}));
  EXPECT_CONTAINS(error_of([&] {
                    Communicator({{0, 100}, {0, 400}}, 0, cpu::testing::small_capacity(2), "group", memory, nullptr,
                                 {{100, 1}, {200, 0}});
                  }),
                  "compiled for GPU 400 of process 0, and this process, 0, has the GPUs 100, 200");
}

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

  // The errors of both, when they connect at the same time.
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
  // The other process does not come; the memory that this one has told of stays alive.
  for (int i = 0; i < 2; ++i) {
    const std::string error = error_of([&] { pair.communicators[0]->connect(0, kSeconds); });
    EXPECT_CONTAINS(error, "process 1 did not say where the memory of its GPUs is");
    EXPECT_CONTAINS(error, "JAX_RING_TIMEOUT_S");
    EXPECT_EQ(pair.memories[0].events, (std::vector<std::string>{"allocate 0", "allocate 0"}));
  }
  pair.table.timeout = cpu::testing::kTestTimeout;
  EXPECT_EQ(pair.connect(), (std::vector<std::string>{"", ""}));
  PeerCall call = PeerCall::random(DType::f32, Algorithm::two_shot, {}, 2, {100}, 1);
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

TEST(Connection, NobodyLaunchesBeforeAllHaveMapped) {
  Pair pair;
  pair.table.timeout = std::chrono::milliseconds(50);
  // Process 1 tells its handles and then fails to tell that it has mapped; process 0 must not be connected.
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
  // Retiring does not wait for it either; it gives up when it is done.
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
  // Releasing memory waits for the device. Its mailboxes stay, since the other process still writes them.
  EXPECT_EQ(memories[0].events, (std::vector<std::string>{"release 0", "release 1", "close 0", "release on host",
                                                          "close 1", "release on host"}));
  EXPECT_EQ(memories[0].allocated(), 2u);
  communicators[1]->retire();
  communicators[0]->free_all();
  EXPECT_EQ(memories[0].allocated(), 0u);
}

// ---- All groups of a process ----------------------------------------------------------------------------------------

// A process, of which a test has several.
struct Process {
  HostMemory memory;
  Communicators all;

  explicit Process(Table& table, int64_t id) {
    all.set_gpus(&memory);
    all.set_deadline(kSeconds);
    all.set_process(id, table.store());
  }
  std::shared_ptr<Communicator> connect(const std::vector<Member>& members) {
    const std::shared_ptr<Communicator> communicator = all.get_or_create(members);
    all.connect(*communicator, 0);
    return communicator;
  }
};

// Runs an action for both processes at the same time.
void in_both(Process& a, Process& b, const std::function<void(Process&)>& action) {
  std::thread other([&] { action(b); });
  action(a);
  other.join();
}

const std::vector<Member> kPair = {{0, 0}, {1, 1}};

TEST(Communicators, AWaitBlocksNothingElse) {
  HostMemory memory;
  Communicators all;
  all.set_gpus(&memory);
  std::promise<void> fetching, go_on;
  std::string error;
  all.set_process(0, {[](const std::string&, const std::string&) {},
                      [&](const std::string& key) -> std::string {
                        fetching.set_value();
                        go_on.get_future().wait();
                        throw std::runtime_error("no " + key);
                      }});
  std::thread connecting([&] { error = error_of([&] { all.connect(*all.get_or_create(kPair), 0); }); });
  fetching.get_future().wait();
  // While it waits for the other process, all that executions, compilations and Python do goes on, in other threads.
  auto rest = std::async(std::launch::async, [&] {
    all.set_deadline(7);
    const double deadline = all.deadline();
    const std::shared_ptr<Communicator> other = all.get_or_create({{0, 2}, {0, 3}});
    all.connect(*other, 0);
    all.device_ids().id_of(0);
    all.process();
    return deadline == 7 && other->is_connected(0) && all.failures().empty() && all.unreported_failures().empty();
  });
  ASSERT_EQ(rest.wait_for(std::chrono::seconds(10)), std::future_status::ready) << "a lock is held while waiting";
  EXPECT_TRUE(rest.get());
  auto forgetting = std::async(std::launch::async, [&] { all.reset(); });
  ASSERT_EQ(forgetting.wait_for(std::chrono::seconds(10)), std::future_status::ready) << "a lock is held while waiting";
  go_on.set_value();
  connecting.join();
  EXPECT_CONTAINS(error, "the group was forgotten");
}

TEST(Communicators, ForgettingClosesAndTheNextGroupFrees) {
  Table table;
  Process a(table, 0), b(table, 1);
  in_both(a, b, [](Process& each) { each.connect(kPair); });
  const std::shared_ptr<Communicator> old = a.all.get_or_create(kPair);
  const size_t of_one_group = a.memory.allocated();
  a.all.reset();
  EXPECT_TRUE(old->is_retired());
  EXPECT_EQ(a.memory.imported, 0);
  // The other process may not have forgotten yet, and its kernels may write to this one's mailbox.
  EXPECT_EQ(a.memory.allocated(), 1u);
  b.all.reset();
  in_both(a, b, [](Process& each) { each.connect(kPair); });
  EXPECT_NE(a.all.get_or_create(kPair), old);
  // Now it has. But freeing waits for a GPU, so that it must wait until no program is running.
  EXPECT_EQ(a.memory.allocated(), of_one_group + 1);
  a.all.reset();
  EXPECT_EQ(a.memory.allocated(), 1u);
}

TEST(Communicators, ANewRuntimeForgetsTheGroupsOfTheOldOne) {
  Table before, after;
  Process a(before, 0);
  auto b = std::make_unique<Process>(before, 1);
  in_both(a, *b, [](Process& each) { each.connect(kPair); });
  const std::shared_ptr<Communicator> old = a.all.get_or_create(kPair);
  a.all.set_process(0, after.store());
  EXPECT_TRUE(old->is_retired());
  EXPECT_EQ(a.memory.imported, 0);
  EXPECT_NE(a.all.get_or_create(kPair), old);
  Process c(after, 1);
  in_both(a, c, [](Process& each) { each.connect(kPair); });
  b->all.reset();
}

TEST(Communicators, AnUnknownMemberLeavesNothingBehind) {
  HostMemory memory;
  Communicators all;
  all.set_gpus(&memory);
  std::map<int, int64_t> ids = {{0, 10}};
  all.device_ids().set([&] { return ids; });
  EXPECT_EQ(all.device_ids().id_of(0), 10);
  for (int i = 0; i < 2; ++i) {
    EXPECT_CONTAINS(error_of([&] { all.get_or_create({{0, 10}, {0, 11}}); }), "compiled for GPU 11 of process 0");
  }
  ids = {{0, 10}, {1, 11}};
  EXPECT_EQ(all.device_ids().id_of(1), 11);
  EXPECT_EQ(all.get_or_create({{0, 10}, {0, 11}})->rank_of(1), 1);
}

TEST(Communicators, WithoutKernels) {
  Communicators all;
  EXPECT_CONTAINS(error_of([&] { all.get_or_create(one_process(2)); }), "no GPU kernels");
}

TEST(Communicators, ReportsAFailureOnce) {
  HostMemory memory;
  Communicators all;
  all.set_gpus(&memory);
  all.set_deadline(3);
  const std::shared_ptr<Communicator> communicator = all.get_or_create(one_process(2));
  all.connect(*communicator, 1);
  communicator->name_call(77, "psum of x, called at train.py:1");
  EXPECT_TRUE(all.unreported_failures().empty());
  *communicator->endpoint(1, 1, 77, 3).failure = {static_cast<uint32_t>(FailureKind::timeout), 0, 1, 0, 5, 77, 0};
  EXPECT_EQ(all.failures().size(), 1u);
  const std::vector<std::string> texts = all.unreported_failures();
  ASSERT_EQ(texts.size(), 1u);
  EXPECT_CONTAINS(texts[0], "psum of x, called at train.py:1: rank 1 (GPU 1 of process 0) waited 3 s for rank 0");
  EXPECT_TRUE(all.unreported_failures().empty());
  EXPECT_EQ(all.failures().size(), 1u);
  all.reset();
  EXPECT_TRUE(all.failures().empty());
}

TEST(DeviceIds, AsksWithoutALockAndRemembers) {
  DeviceIds ids;
  EXPECT_EQ(ids.id_of(5), 5);
  EXPECT_TRUE(ids.ordinals().empty());
  int asked = 0;
  ids.set([&] {
    ++asked;
    // What another thread may do meanwhile.
    auto other = std::async(std::launch::async, [&] { return ids.ordinals().size(); });
    EXPECT_EQ(other.wait_for(std::chrono::seconds(10)), std::future_status::ready) << "a lock is held";
    return std::map<int, int64_t>{{0, 8}, {1, 9}};
  });
  EXPECT_EQ(ids.id_of(1), 9);
  EXPECT_EQ(ids.id_of(0), 8);
  EXPECT_EQ(asked, 1);
  EXPECT_EQ(ids.ordinals(), (std::map<int64_t, int>{{8, 0}, {9, 1}}));
  EXPECT_CONTAINS(error_of([&] { ids.id_of(2); }),
                  "CUDA ordinal 2, and JAX lists in this process those with the "
                  "ordinals 0, 1");
  ids.forget();
  asked = 0;
  EXPECT_EQ(ids.id_of(0), 8);
  EXPECT_EQ(asked, 1);
}

// ---- The first run --------------------------------------------------------------------------------------------------

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
  // A rank that comes late in this run does not launch what nobody will answer. The next run is not affected.
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
    start_reporting_failures();
    Failure* const record = communicator->endpoint(1, 0, 77, 60).failure;
    record->rank = 1;
    record->call = 77;
    __atomic_store_n(&record->kind, static_cast<uint32_t>(FailureKind::timeout), __ATOMIC_RELEASE);
    std::exit(0);
  };
  EXPECT_EXIT(program(), ::testing::ExitedWithCode(0),
              "jax_ring: psum in the last step: rank 1 .* waited 60 s for rank 0");
}

// ---- Failures -------------------------------------------------------------------------------------------------------

TEST(Communicator, TooManyRanks) {
  HostMemory memory;
  EXPECT_THROW(
      Communicator(one_process(kMaxRanks + 1), 0, cpu::testing::small_capacity(kMaxRanks + 1), "", memory, nullptr),
      std::runtime_error);
}

TEST(Communicator, DescribesFailures) {
  HostMemory memory;
  const Connected communicator(one_process(2), 0, cpu::testing::small_capacity(2), "group", memory, nullptr);
  PeerCall call = PeerCall::random(DType::f32, Algorithm::two_shot, {}, 2, {100}, 1);
  const std::vector<Buffer> buffers = {{call.inputs[0][0].data(), call.outputs[0][0].data(), call.inputs[0][0].size()}};
  const CallSite site{"ring_psum of float32[100] over axis 'x'", {}, Op::sum, Algorithm::two_shot};
  for (const Launch& launch : launches_of(communicator, 0, site, default_thresholds(2), call.dtype, buffers, 0.05)) {
    std::minstd_rand random(1);
    cpu::testing::team_function(launch.kernel.dtype, launch.kernel.op, launch.kernel.algorithm)(
        launch.call.self, launch.call.message, launch.call.plan, 0, JitteryTeam(random));
  }
  const std::optional<Failure> failure = communicator.failure();
  ASSERT_TRUE(failure.has_value());
  EXPECT_EQ(failure->call, site.fingerprint());
  const std::string text = communicator.describe(*failure, site.call, 0.05);
  EXPECT_EQ(text.rfind("ring_psum of float32[100] over axis 'x': rank 0 (GPU 0 of process 0) waited 0.05 s for rank 1 "
                       "(GPU 1 of process 0), in step: reduce-scatter, epoch 1, team 0.",
                       0),
            0u)
      << text;
}

TEST(Communicator, DifferentThresholdsFail) {
  const std::vector<std::vector<Thresholds>> cases = {
      {{0, 0}, {0, 1000}}, {{0, 1000}, {1000, 1000}}, {{1000, 1000}, {0, 0}}};
  for (const std::vector<Thresholds>& thresholds : cases) {
    HostMemory memory;
    const Connected communicator(one_process(2), 0, cpu::testing::small_capacity(2), "group", memory, nullptr);
    PeerCall call = PeerCall::random(DType::f32, Algorithm::two_shot, {}, 2, {100}, 1);
    run(communicator, {"psum", {}, Op::sum, {}}, call, thresholds, 0.1);
    EXPECT_TRUE(communicator.failure().has_value());
    for (int rank = 0; rank < 2; ++rank) {
      // No rank may take a partial result for a sum: all bits are ones.
      const std::vector<unsigned char> poison(16, 0xff);
      EXPECT_EQ(std::memcmp(call.outputs[rank][0].data(), poison.data(), poison.size()), 0) << rank;
    }
  }
}

TEST(Plan, FingerprintsDiffer) {
  HostMemory memory;
  const Connected communicator(one_process(2), 0, default_capacity(2), "group", memory, nullptr);
  float data[8] = {};
  const auto fingerprint = [&](const CallSite& site, DType dtype, uint64_t bytes) {
    return launches_of(communicator, 0, site, default_thresholds(2), dtype, {{data, data, bytes}}, 1)
        .at(0)
        .call.message.fingerprint;
  };
  const CallSite site{"psum", {}, Op::sum, Algorithm::ring};
  const CallSite in_ring_order{"psum", {Collective::all_reduce, Order::ring}, Op::sum, Algorithm::ring};
  EXPECT_EQ(fingerprint(site, DType::f32, 32), fingerprint(site, DType::f32, 32));
  EXPECT_NE(fingerprint(site, DType::f32, 32), fingerprint(site, DType::f32, 28));
  EXPECT_NE(fingerprint(site, DType::f32, 32), fingerprint(site, DType::u32, 32));
  EXPECT_NE(fingerprint(site, DType::f32, 32), fingerprint(in_ring_order, DType::f32, 32));
  EXPECT_NE(fingerprint(site, DType::f32, 32), fingerprint({"psum2", {}, Op::sum, Algorithm::ring}, DType::f32, 32));
}

TEST(Plan, SelectsASupportedAlgorithm) {
  HostMemory memory;
  const Connected communicator(one_process(3), 0, default_capacity(3), "group", memory, nullptr);
  Thresholds thresholds = default_thresholds(3);
  const auto chosen = [&](const CallSite& site, uint64_t bytes, DType dtype = DType::f32) {
    return launches_of(communicator, 0, site, thresholds, dtype, {{nullptr, nullptr, bytes}}, 1).at(0).kernel;
  };
  const Plan all_reduce, ring_order{Collective::all_reduce, Order::ring}, gather{Collective::all_gather};
  // By the bytes that each rank would send to its peers.
  EXPECT_EQ(chosen({"", all_reduce, Op::sum, {}}, 128 << 10).algorithm, Algorithm::one_shot);
  EXPECT_EQ(chosen({"", all_reduce, Op::sum, {}}, (128 << 10) + 4).algorithm, Algorithm::two_shot);
  EXPECT_EQ(chosen({"", ring_order, Op::sum, {}}, 4).algorithm, Algorithm::ring);
  EXPECT_EQ(chosen({"", gather, Op::sum, Algorithm::one_shot}, 4).algorithm, Algorithm::two_shot);
  EXPECT_EQ(chosen({"", all_reduce, Op::max, Algorithm::ring}, 4).algorithm, Algorithm::two_shot);
  // Sums of signed integers use the unsigned type; their extrema do not.
  EXPECT_EQ(chosen({"", all_reduce, Op::sum, {}}, 4, DType::s32).dtype, DType::u32);
  EXPECT_EQ(chosen({"", all_reduce, Op::max, {}}, 4, DType::s32).dtype, DType::s32);
  thresholds = {8, 16};
  EXPECT_EQ(chosen({"", all_reduce, Op::sum, {}}, 8).algorithm, Algorithm::one_shot);
  EXPECT_EQ(chosen({"", all_reduce, Op::sum, {}}, 12).algorithm, Algorithm::two_shot);
  EXPECT_EQ(chosen({"", all_reduce, Op::sum, {}}, 16).algorithm, Algorithm::two_shot);
  EXPECT_EQ(chosen({"", all_reduce, Op::sum, {}}, 20).algorithm, Algorithm::ring);
  EXPECT_EQ(chosen({"", all_reduce, Op::sum, Algorithm::one_shot}, 20).algorithm, Algorithm::one_shot);
}

TEST(Plan, NothingToDoNeedsNoKernel) {
  HostMemory memory;
  const Connected communicator(one_process(3), 0, default_capacity(3), "group", memory, nullptr);
  EXPECT_TRUE(launches_of(communicator, 0, {"psum", {}, Op::sum, {}}, default_thresholds(3), DType::f32,
                          {{nullptr, nullptr, 0}}, 1)
                  .empty());
}

}  // namespace
}  // namespace jax_ring::gpu
