// launch_ids_test.cc: executions of a call have the same numbers in all processes.
#include "shm/group/launch_ids.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>

namespace jax_ring::shm {
namespace {

TEST(LaunchIds, CountInOrderOfFirstUse) {
  const auto runs = std::make_shared<RunCounter>();
  LaunchIds one(runs), other(runs);
  using Number = ExecutionNumber;
  EXPECT_EQ(one.get(2147483646), (Number{0, 0}));
  EXPECT_EQ(other.get(5), (Number{1, 0}));
  EXPECT_EQ(one.get(2147483647), (Number{2, 0}));
  EXPECT_EQ(one.get(2147483647), (Number{2, 0}));
  EXPECT_EQ(one.get(-2147483648), (Number{3, 0}));  // run ids wrap around
  // One launch did not reach the call; the next one must not be mistaken for it.
  EXPECT_EQ(other.get(7), (Number{4, 1}));
}

// As in other processes, which go on with the executable that they have.
TEST(LaunchIds, GoOnAfterAnotherCompilation) {
  const auto runs = std::make_shared<RunCounter>();
  using Number = ExecutionNumber;
  LaunchIds first(runs);
  EXPECT_EQ(first.get(100), (Number{0, 0}));
  LaunchIds same_hash(runs);
  EXPECT_EQ(same_hash.get(101), (Number{1, 0}));
  EXPECT_EQ(first.get(102), (Number{2, 0}));
  EXPECT_EQ(same_hash.get(104), (Number{3, 1}));
  LaunchIds other_hash(runs);
  EXPECT_EQ(other_hash.get(-7), (Number{4, 1}));
  EXPECT_EQ(other_hash.get(-5), (Number{5, 2}));
  EXPECT_EQ(first.get(105), (Number{6, 2}));
}

// Such as those of a branch that is seldom taken.
TEST(LaunchIds, CountManySkippedLaunches) {
  LaunchIds ids(std::make_shared<RunCounter>());
  EXPECT_EQ(ids.get(10), (ExecutionNumber{0, 0}));
  EXPECT_EQ(ids.get(1000010), (ExecutionNumber{1, 999999}));
}

}  // namespace
}  // namespace jax_ring::shm
