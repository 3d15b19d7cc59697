// communicator_test.cc: groups of GPUs, simulated in host memory: results, members, failures, and launches.
#include "cuda/groups/communicator.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cuda/launch/plan.h"
#include "tests/support/host_groups.h"

namespace jax_ring::gpu {
namespace {

using cpu::testing::Bytes;
using cpu::testing::PeerCall;

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
        launch.call.self, launch.call.message, launch.call.plan, 0, cpu::testing::JitteryTeam(random));
  }
  const std::optional<Failure> failure = communicator.failure();
  ASSERT_TRUE(failure.has_value());
  EXPECT_EQ(failure->call, site.fingerprint());
  const std::string text = communicator.describe(*failure, site.call, 0.05);
  EXPECT_EQ(text.rfind("ring_psum of float32[100] over axis 'x': rank 0 (GPU 0 of process 0) waited 0.05 s for rank 1 "
                       "(GPU 1 of process 0), in step: scatter to the owners of the parts, epoch 1, team 0.",
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
      // No rank may mistake a partial result for a sum: all bits are ones.
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
  // Maxima and minima share kernels, and so do signed and unsigned ones.
  const CallSite maximum{"", {}, Op::max, {}}, minimum{"", {}, Op::min, {}};
  EXPECT_NE(fingerprint(maximum, DType::f32, 32), fingerprint(minimum, DType::f32, 32));
  EXPECT_NE(fingerprint(maximum, DType::s32, 32), fingerprint(maximum, DType::u32, 32));
  EXPECT_NE(fingerprint(site, DType::f32, 32), fingerprint({"psum2", {}, Op::sum, Algorithm::ring}, DType::f32, 32));
}

// Two ranks with three shards each, that is two terms.
TEST(Plan, AlongATree) {
  HostMemory memory;
  const Connected communicator(one_process(2), 0, default_capacity(2), "group", memory, nullptr);
  const auto program = [](int num_shards) { return TreeCompiler::compile(Tree(num_shards, 2, {0, 1}), 1).value(); };
  float data[64] = {};
  const auto launch = [&](int num_shards, Collective collective, uint64_t bytes) {
    const CallSite site{"psum", {collective, Order::tree}, Op::sum, {}};
    const TreeProgram tree = program(num_shards);
    return launches_of(communicator, 0, site, default_thresholds(2), DType::s32, {{data, data, bytes}}, 1, &tree).at(0);
  };
  const Launch sum = launch(6, Collective::all_reduce, 64);
  EXPECT_TRUE(sum.kernel.along_tree);
  EXPECT_EQ(sum.kernel.dtype, DType::u32);
  EXPECT_EQ(sum.call.message.operands[0].bytes, 32u) << "of one slot";
  EXPECT_EQ(launch(6, Collective::reduce_scatter, 64).call.message.operands[0].bytes, 16u) << "of one block";
  EXPECT_EQ(launch(2, Collective::all_reduce, 64).call.message.operands[0].bytes, 64u);
  // By the bytes that each rank sends for all slots.
  const uint64_t largest = default_thresholds(2).one_shot;
  EXPECT_EQ(launch(2, Collective::all_reduce, largest).kernel.algorithm, Algorithm::one_shot);
  EXPECT_EQ(launch(6, Collective::all_reduce, largest).kernel.algorithm, Algorithm::one_shot);
  EXPECT_EQ(launch(6, Collective::all_reduce, largest + 32).kernel.algorithm, Algorithm::two_shot);
  // Ranks that add along different trees make different calls.
  const auto fingerprint = [&](int num_shards) {
    return launch(num_shards, Collective::reduce_scatter, 64).call.message.fingerprint;
  };
  EXPECT_EQ(fingerprint(6), fingerprint(6));
  EXPECT_NE(fingerprint(6), fingerprint(10)) << "both have two slots";
  EXPECT_NE(fingerprint(6), fingerprint(2));
}

// A mailbox with fewer lines than slots.
TEST(Plan, SlotsBeyondTheRoomOfOneShotGoInTwoSteps) {
  HostMemory memory;
  const Connected communicator(one_process(2), 0, cpu::testing::small_capacity(2), "group", memory, nullptr);
  const CallSite site{"psum", {Collective::all_reduce, Order::tree}, Op::sum, Algorithm::one_shot};
  const auto launch = [&](int num_shards) {
    const TreeProgram tree = TreeCompiler::compile(Tree(num_shards, 2, {0, 1}), 1).value();
    return launches_of(communicator, 0, site, default_thresholds(2), DType::f32, {{nullptr, nullptr, 960}}, 1, &tree);
  };
  EXPECT_EQ(launch(2 * 7).at(0).kernel.algorithm, Algorithm::one_shot) << "three slots, and room for three packs";
  EXPECT_EQ(launch(2 * 15).at(0).kernel.algorithm, Algorithm::two_shot);
  EXPECT_CONTAINS(error_of([&] { launch(2 * 63); }), "6 slots of an operand do not fit into a mailbox of 5 packs");
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
  EXPECT_EQ(chosen({"", all_reduce, Op::sum, {}}, thresholds.one_shot).algorithm, Algorithm::one_shot);
  EXPECT_EQ(chosen({"", all_reduce, Op::sum, {}}, thresholds.one_shot + 4).algorithm, Algorithm::two_shot);
  EXPECT_EQ(chosen({"", ring_order, Op::sum, {}}, 4).algorithm, Algorithm::ring);
  EXPECT_EQ(chosen({"", gather, Op::sum, Algorithm::one_shot}, 4).algorithm, Algorithm::two_shot);
  EXPECT_EQ(chosen({"", all_reduce, Op::max, Algorithm::ring}, 4).algorithm, Algorithm::two_shot);
  EXPECT_EQ(chosen({"", all_reduce, Op::sum, {}}, 4, DType::s32).dtype, DType::u32);
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
