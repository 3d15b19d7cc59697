// cores_test.cc: ranks are spread over the cores, and threads move.
#include "cpu/waiting/cores.h"

#include <gtest/gtest.h>

#include <optional>
#include <thread>
#include <vector>

#include "base/cores.h"
#include "tests/support/support.h"

namespace jax_ring::cpu::testing {
namespace {

// The final cores of ranks that arrive on these cores.
std::vector<int> spread(Spread& spread, const std::vector<int>& cores) {
  spread.begin(static_cast<int>(cores.size()));
  std::vector<int> end;
  for (int core : cores) end.push_back(spread.add(core).value_or(core));
  return end;
}

TEST(Spread, LeavesRanksWhereTheyAreSpread) {
  Spread two({0, 1});
  EXPECT_EQ(spread(two, {0, 1, 1, 0}), (std::vector<int>{0, 1, 1, 0}));
  EXPECT_EQ(spread(two, {1, 0, 1}), (std::vector<int>{1, 0, 1}));
}

TEST(Spread, MovesThoseThatAreTooMany) {
  Spread two({2, 5});
  EXPECT_EQ(spread(two, {5, 5, 5, 5}), (std::vector<int>{5, 5, 2, 2}));
  EXPECT_EQ(spread(two, {2, 2}), (std::vector<int>{2, 5}));
  Spread three({0, 1, 2});
  EXPECT_EQ(spread(three, {0, 0, 0, 0, 0, 0}), (std::vector<int>{0, 0, 1, 2, 1, 2}));
}

TEST(Spread, LeavesRanksOnOtherCores) {
  Spread two({0, 1});
  EXPECT_EQ(spread(two, {7, 7, 0, 1}), (std::vector<int>{7, 7, 0, 1}));
}

TEST(Spread, AppliesWhereNoCoreIsToSpare) {
  EXPECT_TRUE(Spread({0, 1}).applies_to(2));
  EXPECT_TRUE(Spread({0, 1}).applies_to(5));
  EXPECT_FALSE(Spread({0, 1, 2}).applies_to(2));
  EXPECT_FALSE(Spread({0}).applies_to(2));
  EXPECT_FALSE(Spread({}).applies_to(2));
}

TEST(Cores, CountsThoseThatAThreadMayUse) {
  EXPECT_EQ(num_cores(), static_cast<int>(usable_cores().size()));
  std::thread([] {
    bind_to_core(usable_cores().back());
    EXPECT_EQ(num_cores(), 1);
  }).join();
}

TEST(Cores, AThreadMovesAndKeepsAllCores) {
  const std::vector<int> usable = usable_cores();
  ASSERT_FALSE(usable.empty());
  for (int core : usable) {
    // The system may move the thread again at any time.
    bool moved = false;
    for (int tries = 0; tries < 100 && !moved; ++tries) {
      move_to_core(core);
      moved = current_core() == core;
    }
    EXPECT_TRUE(moved) << core;
    EXPECT_EQ(usable_cores(), usable);
  }
}

TEST(Cores, AThreadStaysWhereItMayRun) {
  const std::vector<int> usable = usable_cores();
  move_to_core(usable.back() + 1);
  EXPECT_EQ(usable_cores(), usable);
}

}  // namespace
}  // namespace jax_ring::cpu::testing
