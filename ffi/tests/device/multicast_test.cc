// multicast_test.cc: sums in a switch made of a loop, with the GPU kernels' code; and when a plan chooses them.
#include "device/multicast.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/support/host_groups.h"

namespace jax_ring::cpu::testing {
namespace {

// Three and more ranks by teams of one thread and of several.
struct Shape {
  int ranks;
  int threads;
};
constexpr Shape kShapes[] = {{2, 1}, {2, 3}, {3, 2}, {5, 1}, {8, 1}};

void PrintTo(const Shape& shape, std::ostream* out) { *out << shape.ranks << "x" << shape.threads; }

class Multicast : public ::testing::TestWithParam<Shape> {
 protected:
  PeerCall call(DType dtype, std::vector<size_t> counts, unsigned seed, size_t offset = 0,
                Algorithm algorithm = Algorithm::multicast) const {
    return PeerCall::random(dtype, algorithm, {}, GetParam().ranks, std::move(counts), seed, offset);
  }
  void check(std::vector<PeerCall> calls, uint32_t first = 0) const {
    std::vector<std::vector<std::vector<Bytes>>> expected;
    for (PeerCall& each : calls) expected.push_back(each.expected());
    Peers peers(small_capacity(GetParam().ranks), first, GetParam().threads);
    peers.run(calls);
    for (size_t i = 0; i < calls.size(); ++i) expect_results(calls[i], expected[i]);
  }
};

INSTANTIATE_TEST_SUITE_P(, Multicast, ::testing::ValuesIn(kShapes), [](const auto& info) {
  return std::to_string(info.param.ranks) + "_ranks_teams_of_" + std::to_string(info.param.threads);
});

TEST_P(Multicast, SizesAroundTheRounds) {
  const Capacity capacity = small_capacity(GetParam().ranks);
  const size_t p = GetParam().ranks, per_pack = kPackBytes / sizeof(float);
  const size_t round = capacity.part_packs * p * per_pack * capacity.num_ctas;
  std::vector<PeerCall> calls;
  for (size_t count : {size_t{0}, size_t{1}, p, per_pack * p + 1, round - 1, round, round + 1, 5 * round + 3}) {
    calls.push_back(call(DType::f32, {count}, static_cast<unsigned>(calls.size())));
  }
  check(std::move(calls));
}

TEST_P(Multicast, EveryTypeThatASwitchAdds) {
  std::vector<PeerCall> calls;
  for (DType dtype : all_dtypes()) {
    if (switch_adds(dtype)) calls.push_back(call(dtype, {333, 7}, static_cast<unsigned>(calls.size())));
  }
  EXPECT_EQ(calls.size(), 6u);
  check(std::move(calls));
}

TEST_P(Multicast, AnyAlignmentInPlaceAndBetweenOtherAlgorithms) {
  std::vector<PeerCall> calls;
  for (size_t offset : {0, 4, 12}) {
    for (Algorithm algorithm : {Algorithm::multicast, Algorithm::two_shot, Algorithm::one_shot}) {
      calls.push_back(call(DType::f32, {501}, static_cast<unsigned>(calls.size()), offset, algorithm));
      calls.back().in_place = offset > 0;
    }
  }
  check(std::move(calls));
}

TEST_P(Multicast, CountersWrapAround) {
  std::vector<PeerCall> calls;
  for (unsigned i = 0; i < 6; ++i) calls.push_back(call(DType::u32, {60 + 50 * i}, i));
  check(std::move(calls), 0xffffffffu - 9);
}

TEST(MulticastFailures, AMissingRankIsNamedAndLeavesNoResult) {
  std::vector<PeerCall> calls = {PeerCall::random(DType::f32, Algorithm::multicast, {}, 3, {100}, 1)};
  Peers peers(small_capacity(3));
  peers.run(calls, {0, 1}, 0.2);
  for (int rank : {0, 1}) {
    EXPECT_EQ(peers.failure(rank).kind, static_cast<uint32_t>(FailureKind::timeout));
    EXPECT_EQ(peers.failure(rank).peer, 2);
    for (size_t i = 0; i < 100 * sizeof(float); ++i) ASSERT_EQ(calls[0].outputs[rank][0].data()[i], 0xff);
  }
}

// ---- The plan

using gpu::HostMemory;
using gpu::Member;

// Host memory with a switch address that leads nowhere.
struct SwitchMemory : HostMemory {
  std::string why_no_multicast(const std::vector<int>&) override { return ""; }
  gpu::MulticastMemory allocate_multicast(const std::vector<int>& devices, size_t bytes) override {
    gpu::MulticastMemory memory;
    for (int device : devices) memory.parts.push_back(allocate(device, bytes));
    memory.all = &nothing;
    return memory;
  }
  void release_multicast(const std::vector<int>& devices, const gpu::MulticastMemory& memory) noexcept override {
    for (size_t i = 0; i < devices.size(); ++i) release(devices[i], memory.parts[i]);
  }
  char nothing = 0;
};

// The algorithm of a sum of many float32.
struct Choice {
  Order order = Order::any;
  std::optional<Algorithm> requested = {};
  Collective collective = Collective::all_reduce;
  DType dtype = DType::f32;
  Op op = Op::sum;
  uint64_t bytes = 1 << 20;

  Algorithm with(gpu::PeerMemory& memory, bool multicasts) const {
    gpu::Communicator communicator(gpu::one_process(2), 0, small_capacity(2), "group", memory, nullptr, {}, multicasts);
    communicator.connect(0, gpu::kSeconds);
    char data = 0;
    const auto launches = launches_of(communicator, 0, {"psum", {collective, order}, op, requested},
                                      default_thresholds(2), dtype, {{&data, &data, bytes}}, 1);
    return launches.at(0).kernel.algorithm;
  }
};

TEST(MulticastPlan, IsChosenForLargeSumsInAnyOrderAlone) {
  SwitchMemory memory;
  EXPECT_EQ(Choice{}.with(memory, true), Algorithm::multicast);
  EXPECT_EQ(Choice{}.with(memory, false), Algorithm::two_shot);
  Choice integers;
  integers.dtype = DType::s32;
  EXPECT_EQ(integers.with(memory, true), Algorithm::multicast);

  std::vector<Choice> others(6);
  others[0].order = Order::rank;
  others[1].requested = Algorithm::two_shot;
  others[2].collective = Collective::reduce_scatter;
  others[3].dtype = DType::f8e5m2;
  others[4].op = Op::max;
  others[5].bytes = 1 << 10;
  for (const Choice& other : others) EXPECT_NE(other.with(memory, true), Algorithm::multicast);
  EXPECT_EQ(memory.allocated(), 0u);
}

TEST(MulticastPlan, SeveralProcessesAreAnErrorInAll) {
  SwitchMemory memories[2];
  gpu::Table table;
  std::vector<std::string> errors(2);
  std::vector<std::thread> processes;
  for (int process = 0; process < 2; ++process) {
    processes.emplace_back([&, process] {
      gpu::Communicator communicator({{0, 0}, {1, 1}}, process, small_capacity(2), "group", memories[process],
                                     table.shared(), {}, process == 1);
      errors[process] = gpu::error_of([&] { communicator.connect(0, gpu::kSeconds); });
    });
  }
  for (std::thread& process : processes) process.join();
  for (const std::string& error : errors) EXPECT_CONTAINS(error, "it is there only for GPUs of one process");
}

}  // namespace
}  // namespace jax_ring::cpu::testing
