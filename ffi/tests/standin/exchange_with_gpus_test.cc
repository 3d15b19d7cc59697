// exchange_with_gpus_test.cc: all-to-alls and permutations through the handlers: types without kernels, refused sizes,
// an absent GPU.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/standin/program/fixture.h"

namespace jax_ring::standin {
namespace {

using cpu::testing::kept;

class Exchange : public StandinTest {};

// Bytes are moved, so a build needs no kernels for the type.
TEST_F(Exchange, NeedsNoKernelsOfItsType) {
  start({3});
  for (const Plan& plan : cpu::testing::exchange_plans(3)) {
    Call call({members(), 1, plan, {3, 300, 0}, DType::f64}, 1);
    Program program(0, *gpus_, {&call});
    program.warm_up();
  }
}

TEST_F(Exchange, ResultsOfAnotherSizeAreRefused) {
  start({2});
  for (const Collective collective : {Collective::all_to_all, Collective::all_gather, Collective::all_reduce}) {
    Call call({members(), 1, {collective}, {8}}, 1);
    Program program(0, *gpus_, {&call});
    program.warm_up();
    Invocation shorter = call.invocation(0, 0, gpus_->stream(0), cpu::testing::next_run_id());
    --shorter.results[0].count;
    const std::string error = call.instruction().execute(shorter);
    EXPECT_TRUE(says(error, "in a group of 2 ranks, the result of such an operand has "));
  }
  // Blocks of equal size: 8 elements do not divide among 3 GPUs.
  TearDown();
  start({3});
  Call call({members(), 1, {Collective::all_to_all}, {9}}, 1);
  Program program(0, *gpus_, {&call});
  program.warm_up();
  Invocation odd = call.invocation(0, 0, gpus_->stream(0), cpu::testing::next_run_id());
  odd.operands[0].count = odd.results[0].count = 8;
  EXPECT_TRUE(says(call.instruction().execute(odd), "in a group of 3 ranks, an operand has 3 blocks"));
}

// The kernels would write four bytes for each of the result, or read a byte of each four bits.
TEST_F(Exchange, ResultsOfAnotherTypeAreRefused) {
  start({2});
  for (const Collective collective : {Collective::all_to_all, Collective::all_gather, Collective::all_reduce}) {
    Call call({members(), 1, {collective}, {8}}, 1);
    Program program(0, *gpus_, {&call});
    program.warm_up();
    Invocation other = call.invocation(0, 0, gpus_->stream(0), cpu::testing::next_run_id());
    other.results[0].dtype = XLA_FFI_DataType_S8;
    EXPECT_TRUE(says(call.instruction().execute(other), "operand 0 is float32[8], result 0 is int8["));
    other.operands[0].dtype = other.results[0].dtype = XLA_FFI_DataType_S4;
    EXPECT_TRUE(says(call.instruction().execute(other), "operand 0 is int4[8]: jax_ring has no elements of this type"));
  }
}

TEST_F(Exchange, BlocksThatAreApartAreRefused) {
  start({2});
  Attributes all = testing::call_attributes(2, "all_to_all");
  all["one_shot_bytes"] = all["two_shot_bytes"] = std::vector<int64_t>{0};
  all["blocks_apart"] = int64_t{1};
  try {
    Instruction instruction(all);
    ADD_FAILURE() << "not refused";
  } catch (const std::runtime_error& error) {
    EXPECT_TRUE(says(error.what(), "the kernels have no blocks that are apart"));
  }
}

TEST_F(Exchange, AGpuThatDoesNotComeIsNamed) {
  for (const Plan& plan :
       {Plan{Collective::all_to_all}, Plan{Collective::permute, Order::rank, 0, kept({1, 0, kNoRank})}}) {
    start({3}, 0.5);
    {
      Call call({members(), 1, plan, {300}}, 1);
      Program program(0, *gpus_, {&call});
      program.warm_up();
      program.run({0, 1});
      EXPECT_TRUE(call.is_poisoned(0));
      EXPECT_TRUE(call.is_poisoned(1));
      const std::vector<std::string> failures = engine().failures();
      ASSERT_FALSE(failures.empty());
      EXPECT_TRUE(says(failures[0], "waited 0.5 s for rank 2 (GPU " + std::to_string(id_of_gpu(0, 2))));
      EXPECT_TRUE(says(failures[0], "scatter to the owners of the parts"));
      EXPECT_TRUE(says(failures[0], "train.py:7"));
    }
    TearDown();
  }
  start({3});
}

}  // namespace
}  // namespace jax_ring::standin
