// exchange_test.cc: all-to-alls and permutations with the GPU kernels' code: addresses, operands, missing ranks, and
// the messages that a call makes of its operands.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tests/support/host_groups.h"
#include "tests/support/peers.h"

namespace jax_ring::cpu::testing {
namespace {

// A group of ranks whose teams have this many threads.
struct Shape {
  int ranks;
  int threads;
};

const Shape kShapes[] = {{1, 1}, {2, 1}, {2, 2}, {3, 3}, {4, 1}, {8, 2}};

// None, all to themselves, and those of other tests.
std::vector<Plan> plans(int num_ranks) {
  std::vector<int> same(num_ranks);
  for (int rank = 0; rank < num_ranks; ++rank) same[rank] = rank;
  std::vector<Plan> all = exchange_plans(num_ranks);
  all.push_back({Collective::permute, Order::rank, 0, kept(std::vector<int>(num_ranks, kNoRank))});
  all.push_back({Collective::permute, Order::rank, 0, kept(same)});
  return all;
}

PeerCall exchange(const Plan& plan, int num_ranks, std::vector<size_t> counts, unsigned seed, size_t offset = 0) {
  return PeerCall::random(DType::u8, Algorithm::two_shot, plan, num_ranks, std::move(counts), seed, offset);
}

void check(Peers& peers, std::vector<PeerCall> calls) {
  std::vector<std::vector<std::vector<Bytes>>> expected;
  for (PeerCall& call : calls) expected.push_back(call.expected());
  peers.run(calls);
  for (size_t i = 0; i < calls.size(); ++i) expect_results(calls[i], expected[i]);
}

TEST(Exchange, AnyAddressAndAnySize) {
  for (const Shape& shape : kShapes) {
    Peers peers(small_capacity(shape.ranks), 0, shape.threads);
    std::vector<PeerCall> calls;
    for (const Plan& plan : plans(shape.ranks)) {
      const size_t blocks = num_input_blocks(plan, shape.ranks);
      for (size_t offset : {0, 1, 2, 8, 15}) {
        for (size_t bytes : {1, 15, 16, 17, 100}) {
          calls.push_back(exchange(plan, shape.ranks, {blocks * bytes}, static_cast<unsigned>(calls.size()), offset));
        }
      }
    }
    ASSERT_NO_FATAL_FAILURE(check(peers, std::move(calls)));
  }
}

// Including empty ones, at both ends and between others.
TEST(Exchange, ManyOperandsOfDifferentSizes) {
  for (const Shape& shape : kShapes) {
    Peers peers(small_capacity(shape.ranks), 0, shape.threads);
    std::vector<PeerCall> calls;
    for (const Plan& plan : plans(shape.ranks)) {
      const size_t blocks = num_input_blocks(plan, shape.ranks);
      std::vector<size_t> counts;
      for (size_t i = 0; i < kMaxOperands; ++i) counts.push_back(blocks * (i * i % 97));
      calls.push_back(exchange(plan, shape.ranks, counts, 1));
      calls.push_back(exchange(plan, shape.ranks, {0, 0, 5 * blocks, 0, 3000 * blocks, 0}, 2));
      calls.push_back(exchange(plan, shape.ranks, {0}, 3));
    }
    ASSERT_NO_FATAL_FAILURE(check(peers, std::move(calls)));
  }
}

TEST(Exchange, CountersWrapAround) {
  for (const Shape& shape : kShapes) {
    Peers peers(small_capacity(shape.ranks), 0xffffffffu - 9, shape.threads);
    std::vector<PeerCall> calls;
    for (unsigned i = 0; i < 12; ++i) {
      for (const Plan& plan : plans(shape.ranks)) {
        calls.push_back(exchange(plan, shape.ranks, {num_input_blocks(plan, shape.ranks) * (900 + i)}, i));
      }
    }
    ASSERT_NO_FATAL_FAILURE(check(peers, std::move(calls)));
    EXPECT_LT(peers.progress(0, 0).round, 1u << 20) << "the counter has not wrapped around";
  }
}

// Includes one that sends and receives nothing.
TEST(Exchange, NamesTheMissingRank) {
  for (const Plan& plan : {Plan{Collective::all_to_all}, Plan{Collective::permute, Order::rank, 0, kept({1, 3, 0, 2})},
                           Plan{Collective::permute, Order::rank, 0, kept({1, 0, kNoRank, kNoRank})}}) {
    Peers peers(small_capacity(4), 0, 2);
    std::vector<PeerCall> calls;
    calls.push_back(exchange(plan, 4, {400}, 1));
    peers.run(calls);
    calls[0] = exchange(plan, 4, {400}, 2);
    peers.run(calls, {0, 1, 3}, 0.2);
    for (int rank : {0, 1, 3}) {
      const Failure& failure = peers.failure(rank);
      EXPECT_EQ(failure.kind, static_cast<uint32_t>(FailureKind::timeout)) << rank;
      EXPECT_EQ(failure.peer, 2) << rank;
      OffsetBuffer& output = calls[0].outputs[rank][0];
      EXPECT_TRUE(std::all_of(output.data(), output.data() + output.size(), [](unsigned char b) { return b == 0xff; }))
          << rank;
    }
  }
}

}  // namespace
}  // namespace jax_ring::cpu::testing

namespace jax_ring::gpu {
namespace {

using cpu::testing::kept;

// The launches of rank 0 in a call with these buffers.
std::vector<Launch> launches(const Plan& plan, DType dtype, const std::vector<uint64_t>& bytes) {
  HostMemory memory;
  const Connected group(one_process(2), 0, cpu::testing::small_capacity(2), "group", memory, nullptr);
  static unsigned char input[64], output[64];
  std::vector<Buffer> buffers;
  for (uint64_t of_buffer : bytes) buffers.push_back({input, output, of_buffer});
  return launches_of(group, 0, {"call", plan, Op::sum, std::nullopt}, default_thresholds(2), dtype, buffers, kSeconds);
}

TEST(ExchangeLaunches, MoveBytesInTwoStepsWhateverTheTypeIs) {
  for (const Plan& plan : {Plan{Collective::all_to_all}, Plan{Collective::permute, Order::rank, 0, kept({1, 0})},
                           Plan{Collective::all_gather}, Plan{Collective::broadcast}}) {
    for (DType dtype : {DType::f64, DType::s32, DType::u8}) {
      const std::vector<Launch> found = launches(plan, dtype, {32});
      ASSERT_EQ(found.size(), 1u);
      EXPECT_EQ(found[0].kernel.dtype, DType::u8);
      EXPECT_EQ(found[0].kernel.algorithm, Algorithm::two_shot);
    }
  }
}

TEST(ExchangeLaunches, EmptyOperandsLaunchNothing) {
  EXPECT_TRUE(launches({Collective::all_to_all}, DType::u8, {0, 0}).empty());
  const std::vector<Launch> found = launches({Collective::all_to_all}, DType::u8, {0, 8, 0});
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].call.message.num_operands, 1u);
  EXPECT_EQ(found[0].call.message.operands[0].bytes, 4u);
}

// Ranks whose permutations differ must not exchange anything.
TEST(ExchangeLaunches, PermutationsHaveFingerprints) {
  std::set<uint32_t> fingerprints;
  for (const std::vector<int>& sources : {std::vector<int>{1, 0}, {0, 1}, {kNoRank, 0}, {0, kNoRank}, {1, kNoRank}}) {
    fingerprints.insert(
        launches({Collective::permute, Order::rank, 0, kept(sources)}, DType::u8, {32})[0].call.message.fingerprint);
  }
  fingerprints.insert(launches({Collective::all_to_all}, DType::u8, {32})[0].call.message.fingerprint);
  EXPECT_EQ(fingerprints.size(), 6u);
}

// A call's text has the shapes of its first four operands only.
TEST(ExchangeLaunches, EveryOperandsSizeHasAShareInTheFingerprint) {
  std::set<uint32_t> fingerprints;
  for (const std::vector<uint64_t>& last : {std::vector<uint64_t>{32, 64}, {64, 32}, {16, 80}, {0, 96}}) {
    const std::vector<Launch> found = launches({}, DType::f32, {32, 32, 32, 32, last[0], last[1]});
    ASSERT_EQ(found.size(), 1u);
    fingerprints.insert(found[0].call.message.fingerprint);
  }
  EXPECT_EQ(fingerprints.size(), 4u);
}

}  // namespace
}  // namespace jax_ring::gpu
