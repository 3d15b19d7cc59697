// collective_test.cc: each collective's parts, and the engine's results, against the definitions.
#include "collective/collective.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu/engine.h"
#include "tests/support/reference.h"
#include "tests/support/support.h"
#include "tests/support/workers.h"

namespace jax_ring::cpu::testing {
namespace {

constexpr int kRanks[] = {1, 2, 3, 4, 5, 8, 9, 16};
constexpr int kFewRanks[] = {1, 3, 4, 9};  // for expensive tests

// Operand sizes around the edges. Where operands have blocks, multiples of the number of ranks.
std::vector<size_t> counts_for(const Plan& plan, int num_ranks, size_t element_bytes) {
  const size_t p = num_ranks, pack = 16 / element_bytes;
  std::vector<size_t> counts{0, 1, p - 1, p, p + 1, pack, p * pack - 1, p * pack, p * pack + 1, 211};
  for (size_t& count : counts) count *= num_input_blocks(plan, num_ranks);
  return counts;
}

TEST(Parts, EveryElementHasItsOriginOnce) {
  for (int num_ranks : kRanks) {
    for (const Plan& plan : all_plans(num_ranks)) {
      for (size_t element_bytes : {1, 4, 8}) {
        for (size_t count : counts_for(plan, num_ranks, element_bytes)) {
          SCOPED_TRACE(describe(plan, num_ranks, count));
          const size_t results = result_count(plan, num_ranks, count);
          std::vector<std::vector<int>> written(num_ranks, std::vector<int>(results, 0));
          for (int i = 0; i < num_parts(plan, num_ranks); ++i) {
            const Part part = part_of(plan, num_ranks, count, element_bytes, i);
            ASSERT_LE(part.from + part.count, count);
            ASSERT_LE(part.to + part.count, results);
            ASSERT_LE(part.receivers.first + part.receivers.count, num_ranks);
            for (int rank = 0; rank < num_ranks; ++rank) {
              const bool receives = rank >= part.receivers.first && rank < part.receivers.first + part.receivers.count;
              if (!receives && !part.zeros_elsewhere) continue;
              for (size_t k = 0; k < part.count; ++k) {
                const auto want = origin(plan, num_ranks, count, element_bytes, rank, part.to + k);
                ASSERT_EQ(receives && part.sources.count > 0, want.has_value());
                if (want) {
                  ASSERT_EQ(part.from + k, want->index);
                  ASSERT_EQ(part.sources.count, want->num_sources);
                  ASSERT_EQ(part.sources.first % num_ranks, want->first);
                }
                ++written[rank][part.to + k];
              }
            }
          }
          for (const auto& of_rank : written) {
            for (int times : of_rank) ASSERT_EQ(times, 1);
          }
        }
      }
    }
  }
}

TEST(Parts, ARingAllReduceIsAReduceScatterAndAnAllGather) {
  constexpr int kSize = 4;
  constexpr size_t kCount = 64;  // blocks of 16, whether divided by packs or by ranks
  for (int i = 0; i < kSize; ++i) {
    const Part whole = part_of({Collective::all_reduce, Order::ring}, kSize, kCount, 4, i);
    const Part scatter = part_of({Collective::reduce_scatter, Order::ring}, kSize, kCount, 4, i);
    const Part gather = part_of({Collective::all_gather}, kSize, kCount / kSize, 4, i);
    EXPECT_EQ(whole.sources.first, scatter.sources.first);
    EXPECT_EQ(whole.sources.count, scatter.sources.count);
    EXPECT_EQ(whole.from, scatter.from);
    EXPECT_EQ(whole.receivers.count, gather.receivers.count);
    EXPECT_EQ(whole.to, gather.to);
    EXPECT_EQ(scatter.receivers.first, gather.sources.first);  // the owner
    EXPECT_EQ(scatter.count, gather.count);
    EXPECT_EQ(whole.count, gather.count);
  }
}

TEST(AnyOrder, IsRankOrderExceptInARing) {
  for (const Plan& in_rank_order : all_plans(3)) {
    if (in_rank_order.order == Order::ring) continue;
    Plan any = in_rank_order;
    any.order = Order::any;
    // Unchanged, too: an engine that moves no data need not decide.
    EXPECT_EQ(num_parts(any, 3), num_parts(in_rank_order, 3));
    EXPECT_EQ(part_of(any, 3, 90, 4, 0).sources.first, part_of(in_rank_order, 3, 90, 4, 0).sources.first);
    const bool is_sum_of_all = any.collective == Collective::all_reduce || any.collective == Collective::reduce;
    EXPECT_EQ(with_order_for(any, Algorithm::one_shot).order, Order::rank);
    EXPECT_EQ(with_order_for(any, Algorithm::two_shot).order, Order::rank);
    EXPECT_EQ(with_order_for(any, Algorithm::ring).order, is_sum_of_all ? Order::ring : Order::rank);
    EXPECT_EQ(with_order_for(in_rank_order, Algorithm::ring).order, Order::rank);
  }
  EXPECT_EQ(with_order_for({Collective::all_reduce, Order::ring}, Algorithm::two_shot).order, Order::ring);
}

// Runs one collective on random operands and checks every rank's results.
void expect_collective(const Plan& plan, Op op, DType dtype, int num_ranks, const std::vector<size_t>& counts,
                       bool in_place) {
  const size_t size = element_size(dtype);
  std::vector<std::vector<Bytes>> operands;                // by operand, then rank
  std::vector<std::vector<OffsetBuffer>> inputs, outputs;  // likewise
  std::vector<Outcome> outcomes(num_ranks);
  RendezvousPtr rendezvous(new Rendezvous);
  rendezvous->num_arrived = num_ranks;
  for (size_t count : counts) {
    operands.push_back(random_elements(dtype, num_ranks, count, static_cast<unsigned>(count + num_ranks)));
    inputs.emplace_back();
    outputs.emplace_back();
    for (const Bytes& of_rank : operands.back()) {
      inputs.back().emplace_back(of_rank, 0);
      outputs.back().emplace_back(Bytes(result_count(plan, num_ranks, count) * size, 0xa5), 0);
    }
    for (int i = 0; i < 2 * num_ranks; ++i) rendezvous->inputs.push_back(inputs.back()[i % num_ranks].data());
    for (OffsetBuffer& output : (in_place ? inputs : outputs).back()) rendezvous->outputs.push_back(output.data());
  }
  for (const Outcome& of_rank : outcomes) rendezvous->done.push_back(of_rank.completion());
  {
    Threads workers;
    run_collective(std::move(rendezvous), {dtype, counts, plan, op}, workers);
    for (const Outcome& of_rank : outcomes) ASSERT_TRUE(of_rank.wait());
  }
  for (size_t operand = 0; operand < counts.size(); ++operand) {
    SCOPED_TRACE(describe(plan, num_ranks, counts[operand]));
    for (int rank = 0; rank < num_ranks; ++rank) {
      const size_t results = result_count(plan, num_ranks, counts[operand]);
      const Bytes want = expected_result(plan, op, dtype, operands[operand], counts[operand], rank);
      const auto difference =
          first_difference(dtype, (in_place ? inputs : outputs)[operand][rank].data(), want.data(), results);
      ASSERT_FALSE(difference) << "rank " << rank << ", operand " << operand << ", element " << *difference;
    }
  }
}

class CollectiveTest : public ::testing::TestWithParam<DType> {};

TEST_P(CollectiveTest, MatchesItsDefinition) {
  int turn = 0;
  for (int num_ranks : kFewRanks) {
    for (const Plan& plan : all_plans(num_ranks)) {
      const std::vector<size_t> counts = counts_for(plan, num_ranks, element_size(GetParam()));
      for (Op op : {Op::sum, Op::max, Op::min}) {
        if (++turn % (kSlowdown > 1 ? 3 : 1) != 0) continue;
        for (bool in_place : {false, true}) {
          if (in_place && !may_be_in_place(plan)) continue;
          ASSERT_NO_FATAL_FAILURE(expect_collective(plan, op, GetParam(), num_ranks, counts, in_place));
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, CollectiveTest,
                         ::testing::Values(DType::u8, DType::s16, DType::f32, DType::bf16, DType::f64),
                         [](const auto& info) { return name_of(info.param); });

// Larger than a chunk, than the limit for a single thread, and than the caches.
TEST(Collective, LargeMessages) {
  constexpr int kSize = 4;
  for (const Plan& plan : all_plans(kSize)) {
    if (plan.root == kSize / 2) continue;
    const std::vector<size_t> counts{kSize * 70'003, kSize};
    ASSERT_NO_FATAL_FAILURE(expect_collective(plan, Op::sum, DType::f32, kSize, counts, false));
  }
}

}  // namespace
}  // namespace jax_ring::cpu::testing
