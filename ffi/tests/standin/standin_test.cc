// standin_test.cc: the values of all collectives through the whole CUDA engine, from XLA's FFI frames to the kernels,
// under many schedules.
#include <gtest/gtest.h>

#include <deque>
#include <tuple>
#include <vector>

#include "tests/standin/program/fixture.h"

namespace jax_ring::standin {
namespace {

using Values = StandinTest;

// A call for each collective, type, algorithm and order with kernels.
std::deque<Call> family(const std::vector<gpu::Member>& members, int num_groups = 1) {
  const int size = static_cast<int>(members.size()) / num_groups;
  std::deque<Call> calls;
  const auto add = [&](Plan plan, std::vector<size_t> counts, DType dtype = DType::f32, Op op = Op::sum,
                       const char* algorithm = "auto") {
    CallSpec what;
    what.members = members;
    what.num_groups = num_groups;
    what.plan = plan;
    what.counts = std::move(counts);
    what.dtype = dtype;
    what.op = op;
    what.algorithm = algorithm;
    what.lane = static_cast<int>(calls.size() % 4);
    what.call = "call " + std::to_string(calls.size());
    calls.emplace_back(what, static_cast<unsigned>(calls.size()));
  };
  const size_t even = 120 * size;
  for (const char* algorithm : {"one_shot", "two_shot", "ring"}) {
    add({}, {1000, 3}, DType::f32, Op::sum, algorithm);
    add({}, {777}, DType::bf16, Op::sum, algorithm);
  }
  add({Collective::all_reduce, Order::ring}, {even, 5}, DType::bf16);
  add({}, {501}, DType::s32);
  add({}, {501}, DType::s32, Op::max);
  add({}, {501}, DType::f32, Op::min);
  for (Order order : {Order::rank, Order::ring}) {
    add({Collective::reduce_scatter, order}, {even}, DType::f32);
    add({Collective::reduce, order, size - 1}, {321}, DType::u32);
  }
  add({Collective::all_reduce, Order::tree}, {1000, 3}, DType::f32);
  add({Collective::reduce, Order::tree, size - 1}, {321}, DType::bf16);
  add({Collective::all_gather}, {99}, DType::bf16);
  add({Collective::broadcast, Order::rank, size / 2}, {99}, DType::f64);
  for (const Plan& plan : cpu::testing::exchange_plans(size))
    add(plan, {even, 5 * static_cast<size_t>(size)}, DType::bf16);
  return calls;
}

std::vector<Call*> pointers(std::deque<Call>& calls) {
  std::vector<Call*> all;
  for (Call& call : calls) all.push_back(&call);
  return all;
}

class Family : public StandinTest, public ::testing::WithParamInterface<std::tuple<int, Mode>> {};
INSTANTIATE_TEST_SUITE_P(, Family,
                         ::testing::Combine(::testing::Values(1, 2, 3),
                                            ::testing::Values(Mode::stream, Mode::recorded)),
                         [](const auto& info) {
                           return std::to_string(std::get<0>(info.param)) + "_gpus_" +
                                  (std::get<1>(info.param) == Mode::stream ? "stream" : "recorded");
                         });

TEST_P(Family, HasTheValuesOfItsDefinition) {
  start({std::get<0>(GetParam())});
  std::deque<Call> calls = family(members());
  Program program(0, *gpus_, pointers(calls), std::get<1>(GetParam()));
  for (int run = 0; run < 4; ++run) {
    program.run_and_check();
    if (HasFatalFailure()) return;
  }
}

TEST_F(Values, TwoGroupsInOneProcess) {
  start({4});
  std::deque<Call> calls = family(members(), 2);
  Program program(0, *gpus_, pointers(calls));
  for (int run = 0; run < 2; ++run) program.run_and_check();
}

TEST_F(Values, TeamsOfOneAndOfThreeThreads) {
  for (int threads : {1, 3}) {
    Hardware hardware{2};
    hardware.threads_per_cta = threads;
    start(hardware);
    std::deque<Call> calls = family(members());
    {
      Program program(0, *gpus_, pointers(calls));
      program.run_and_check();
    }
    calls.clear();
    TearDown();
  }
}

// Calls along a tree with slots in the operands, and one host's part, with several results.
std::deque<Call> tree_calls(const std::vector<gpu::Member>& members) {
  const int size = static_cast<int>(members.size());
  std::deque<Call> calls;
  const auto add = [&](Plan plan, std::vector<size_t> counts, DType dtype, const char* algorithm = "auto",
                       int ranks_of_tree = 0, std::vector<int> tree_ranks = {}) {
    CallSpec what;
    what.members = members;
    what.plan = plan;
    what.counts = std::move(counts);
    what.dtype = dtype;
    what.algorithm = algorithm;
    what.call = "call " + std::to_string(calls.size());
    what.shards_per_rank = 3;
    what.ranks_of_tree = ranks_of_tree;
    what.tree_ranks = std::move(tree_ranks);
    calls.emplace_back(what, static_cast<unsigned>(calls.size()));
  };
  std::vector<int> odd;
  for (int rank = 0; rank < size; ++rank) odd.push_back(2 * rank + 1);
  const size_t even = 120 * size;
  const Plan all_reduce{Collective::all_reduce, Order::tree}, scatter{Collective::reduce_scatter, Order::tree};
  for (const char* algorithm : {"one_shot", "two_shot"}) {
    add(all_reduce, {1000, 3}, DType::f32, algorithm);
    add(all_reduce, {777}, DType::bf16, algorithm);
    add(all_reduce, {777}, DType::s32, algorithm);
  }
  add(scatter, {even, 5 * static_cast<size_t>(size)}, DType::f32);
  add(scatter, {even}, DType::bf16, "auto", 2 * size, odd);
  return calls;
}

TEST_P(Family, AlongATreeWithSlotsAndSeveralResults) {
  start({std::get<0>(GetParam())});
  std::deque<Call> calls = tree_calls(members());
  Program program(0, *gpus_, pointers(calls), std::get<1>(GetParam()));
  for (int run = 0; run < 3; ++run) {
    program.run_and_check();
    if (HasFatalFailure()) return;
  }
}

TEST_F(Values, WhatHasNoTreeIsRefused) {
  start({2});
  const auto error_of = [&](Op op, const char* algorithm, int ranks_of_tree, std::vector<int> tree_ranks,
                            int shards_per_rank = 1) -> std::string {
    CallSpec what{members(), 1, {Collective::reduce_scatter, Order::tree}, {200}, DType::f32, op, algorithm};
    what.ranks_of_tree = ranks_of_tree;
    what.tree_ranks = std::move(tree_ranks);
    what.shards_per_rank = shards_per_rank;
    Call call(what, 1);
    try {
      call.instantiate();
    } catch (const std::exception& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(error_of(Op::sum, "auto", 0, {}), "");
  EXPECT_TRUE(says(error_of(Op::max, "auto", 0, {}), "only sums have the order 'tree'"));
  EXPECT_TRUE(says(error_of(Op::sum, "ring", 0, {}), "the ring does not have the order 'tree'"));
  EXPECT_TRUE(says(error_of(Op::sum, "auto", 2, {1, 0}), "not ranks of its tree in ascending order"));
  EXPECT_TRUE(says(error_of(Op::sum, "auto", 0, {}, (1 << 20) - 1), "up to 20 terms each"));
}

// No algorithm of theirs depends on it.
TEST_F(Values, MaximaOfAnyOrderAndAlgorithm) {
  start({4});
  for (const Order order : {Order::ring, Order::any}) {
    Call call({members(), 1, {Collective::all_reduce, order}, {256, 2000}, DType::f32, Op::max, "ring"}, 1);
    Program(0, *gpus_, {&call}).run_and_check();
  }
}

// Programs of the same group, one after the other, as when a user traces a function again.
TEST_F(Values, ManyProgramsOfOneGroup) {
  start({2});
  for (unsigned i = 0; i < 10; ++i) {
    Call call({members(), 1, {}, {i * 100}}, i);
    Program program(0, *gpus_, {&call});
    program.run_and_check();
  }
}

// New groups under random delays, so that GPUs meet in every order.
class Schedules : public StandinTest, public ::testing::WithParamInterface<int> {};
INSTANTIATE_TEST_SUITE_P(, Schedules, ::testing::Values(2, 3));

TEST_P(Schedules, AreAllFine) {
  for (unsigned seed = 1; seed <= 25; ++seed) {
    Hardware hardware{GetParam()};
    hardware.seed = seed;
    hardware.threads_per_cta = seed % 3 == 0 ? 2 : 1;
    const Mode mode = seed % 5 == 0 ? Mode::recorded : Mode::stream;
    hardware.driver_waits_for_kernels = mode == Mode::stream;
    start(hardware);
    {
      std::deque<Call> calls;
      for (const char* algorithm : {"one_shot", "two_shot", "ring"}) {
        CallSpec what{members(), 1, {}, {200 * seed}};
        what.algorithm = algorithm;
        what.lane = static_cast<int>((seed + calls.size()) % 3);
        calls.emplace_back(what, seed);
      }
      Program program(0, *gpus_, pointers(calls), mode);
      for (int run = 0; run < (mode == Mode::recorded ? 3 : 1); ++run) program.run_and_check();
    }
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
    TearDown();
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
  }
}

TEST_F(Values, AnotherTypeThanTheBuildHasIsAnError) {
  start({1});
  Call call({members(), 1, {}, {10}, DType::f64}, 1);
  Program program(0, *gpus_, {&call});
  EXPECT_TRUE(says(program.run()[0], "JAX_RING_CUDA_DTYPES"));
}

}  // namespace
}  // namespace jax_ring::standin
