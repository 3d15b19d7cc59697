// communicator_test.cc: groups of GPUs, simulated in host memory, with two processes in one.
#include "cuda/communicator.h"

#include <gtest/gtest.h>

#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cuda/plan.h"
#include "peers.h"

namespace jax_ring::gpu {
namespace {

using cpu::testing::Bytes;
using cpu::testing::JitteryTeam;
using cpu::testing::PeerCall;

class HostMemory final : public PeerMemory {
 public:
  void* allocate(int, size_t bytes) override { return keep(::operator new(bytes, std::align_val_t(128)), bytes); }
  void release(int, void* memory) override { free_memory(memory); }
  void* allocate_on_host(size_t bytes) override { return allocate(0, bytes); }
  void release_on_host(void* memory) override { free_memory(memory); }
  bool can_access(int device, int peer) override { return severed.count({device, peer}) == 0; }
  void enable_access(int device, int peer) override { access_enabled.insert({device, peer}); }
  std::string export_handle(int, void* memory) override {
    return std::string(reinterpret_cast<const char*>(&memory), sizeof(memory));
  }
  void* import_handle(int, const std::string& handle) override {
    void* memory;
    std::memcpy(&memory, handle.data(), sizeof(memory));
    ++imported;
    return memory;
  }
  void close_handle(int, void*) override { --imported; }
  void warm_up(int device) override { warm.insert(device); }

  std::set<std::pair<int, int>> severed, access_enabled;
  std::set<int> warm;
  int imported = 0;
  size_t allocated() const { return allocated_.size(); }

 private:
  void* keep(void* memory, size_t bytes) {
    allocated_.insert(memory);
    return std::memset(memory, 0, bytes);
  }
  void free_memory(void* memory) {
    EXPECT_EQ(allocated_.erase(memory), 1u);
    ::operator delete(memory, std::align_val_t(128));
  }
  std::set<void*> allocated_;
};

// A key-value store as the processes of a program share one.
class Table {
 public:
  KeyValueStore store() {
    return {[this](const std::string& key, const std::string& value) {
              std::lock_guard<std::mutex> lock(mutex_);
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
  std::chrono::duration<double> timeout = cpu::testing::kTestTimeout;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
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
    const Communicator communicator(one_process(3), 0, cpu::testing::small_capacity(3), "group", memory, {});
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
  const std::vector<Member> members = {{0, 0}, {1, 0}, {0, 1}};
  HostMemory memories[2];
  Table table;
  PeerCall call = PeerCall::random(DType::bf16, Algorithm::two_shot, {}, 3, {1000, 3}, 1);
  std::vector<std::unique_ptr<Communicator>> communicators(2);
  std::vector<std::thread> processes;
  for (int process = 0; process < 2; ++process) {
    processes.emplace_back([&, process] {
      communicators[process] = std::make_unique<Communicator>(members, process, cpu::testing::small_capacity(3),
                                                              "group", memories[process], table.store());
      run(*communicators[process], {"psum", {}, Op::sum, Algorithm::two_shot}, call);
    });
  }
  for (std::thread& process : processes) process.join();
  expect_results(call, call.expected());
  EXPECT_EQ(communicators[0]->local_ranks(), (std::vector<int>{0, 2}));
  EXPECT_EQ(communicators[0]->rank_of(1), 2);
  EXPECT_EQ(communicators[1]->rank_of(0), 1);
  EXPECT_EQ(communicators[1]->rank_of(1), std::nullopt);
  EXPECT_EQ(memories[0].imported, 2);
  communicators.clear();
  for (const HostMemory& memory : memories) {
    EXPECT_EQ(memory.imported, 0);
    EXPECT_EQ(memory.allocated(), 0u);
  }
}

TEST(Communicator, NamesThePairWithoutPeerAccess) {
  HostMemory memory;
  memory.severed.insert({1, 2});
  try {
    const Communicator communicator(one_process(3), 0, cpu::testing::small_capacity(3), "group", memory, {});
    FAIL() << "no error";
  } catch (const std::runtime_error& error) {
    EXPECT_EQ(std::string(error.what()), "GPU 1 of process 0 has no peer access to GPU 2 of process 0");
  }
  EXPECT_EQ(memory.allocated(), 0u);
}

TEST(Communicator, ReleasesEverythingIfAProcessDoesNotAnswer) {
  HostMemory memory;
  Table table;
  table.timeout = std::chrono::milliseconds(50);
  EXPECT_THROW(Communicator({{0, 0}, {1, 0}}, 0, cpu::testing::small_capacity(2), "group", memory, table.store()),
               std::runtime_error);
  EXPECT_EQ(memory.allocated(), 0u);
}

TEST(Communicator, TooManyRanks) {
  HostMemory memory;
  EXPECT_THROW(Communicator(one_process(kMaxRanks + 1), 0, cpu::testing::small_capacity(kMaxRanks + 1), "", memory, {}),
               std::runtime_error);
}

TEST(Communicator, DescribesFailures) {
  HostMemory memory;
  const Communicator communicator(one_process(2), 0, cpu::testing::small_capacity(2), "group", memory, {});
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
    const Communicator communicator(one_process(2), 0, cpu::testing::small_capacity(2), "group", memory, {});
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
  const Communicator communicator(one_process(2), 0, default_capacity(2), "group", memory, {});
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
  const Communicator communicator(one_process(3), 0, default_capacity(3), "group", memory, {});
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
  const Communicator communicator(one_process(3), 0, default_capacity(3), "group", memory, {});
  EXPECT_TRUE(launches_of(communicator, 0, {"psum", {}, Op::sum, {}}, default_thresholds(3), DType::f32,
                          {{nullptr, nullptr, 0}}, 1)
                  .empty());
}

}  // namespace
}  // namespace jax_ring::gpu
