// schedule_test.cc: every chunk visits the ranks in the right order, and each link is first-in, first-out.
#include "collective/schedule.h"

#include <gtest/gtest.h>

#include <deque>
#include <string>
#include <tuple>
#include <vector>

namespace jax_ring {
namespace {

class Schedule : public ::testing::TestWithParam<std::tuple<Order, int>> {
 protected:
  Order order() const { return std::get<0>(GetParam()); }
  int num_ranks() const { return std::get<1>(GetParam()); }
  RingSchedule of(int rank, uint64_t num_chunks) const { return {order(), num_ranks(), rank, num_chunks, 3}; }
};

INSTANTIATE_TEST_SUITE_P(, Schedule,
                         ::testing::Combine(::testing::Values(Order::rank, Order::ring), ::testing::Range(2, 17)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param) == Order::ring ? "ring" : "rank") + "_order_" +
                                  std::to_string(std::get<1>(info.param)) + "_ranks";
                         });

TEST_P(Schedule, EveryChunkIsFoldedOnceByEachRankAndReachesEachRank) {
  const uint64_t p = num_ranks(), num_chunks = 3 * p;
  std::vector<std::vector<int>> folded(num_chunks, std::vector<int>(p)), kept = folded;
  for (int rank = 0; rank < num_ranks(); ++rank) {
    const RingSchedule schedule = of(rank, num_chunks);
    for (uint64_t step = 0; step < schedule.num_steps(); ++step) {
      const Hop hop = schedule.step(step);
      if (!hop.exists()) continue;
      ASSERT_LT(hop.chunk, num_chunks);
      if (hop.folds()) {
        ++folded[hop.chunk][rank];
        // The orders differ in where a chunk starts.
        const uint64_t first = order() == Order::rank ? 0 : (hop.chunk % p + 1) % p;
        EXPECT_EQ((first + hop.index) % p, static_cast<uint64_t>(rank));
      }
      if (hop.has_result()) ++kept[hop.chunk][rank];
    }
  }
  for (uint64_t chunk = 0; chunk < num_chunks; ++chunk) {
    EXPECT_EQ(folded[chunk], std::vector<int>(p, 1));
    EXPECT_EQ(kept[chunk], std::vector<int>(p, 1));
  }
}

TEST_P(Schedule, LinksAreFirstInFirstOut) {
  for (int rank = 0; rank < num_ranks(); ++rank) {
    std::deque<std::pair<uint64_t, int>> link;
    const RingSchedule sender = of(rank, 2 * num_ranks()), receiver = of((rank + 1) % num_ranks(), 2 * num_ranks());
    for (uint64_t step = 0; step < sender.num_steps(); ++step) {
      const Hop hop = sender.step(step);
      if (hop.exists() && hop.sends()) link.push_back({hop.chunk, hop.index});
    }
    for (uint64_t step = 0; step < receiver.num_steps(); ++step) {
      const Hop hop = receiver.step(step);
      if (!hop.exists() || !hop.receives()) continue;
      ASSERT_FALSE(link.empty());
      EXPECT_EQ(link.front(), std::make_pair(hop.chunk, hop.index - 1));
      link.pop_front();
    }
    EXPECT_TRUE(link.empty());
  }
}

TEST_P(Schedule, CompletesWithTheFewestSlots) {
  // The ranks take turns, each running as far as it can. A link has one slot more than the lag of the results.
  const RingSchedule any = of(0, 4 * num_ranks());
  const size_t num_slots = any.lag + 1;
  std::vector<size_t> on_link(num_ranks());  // chunks in flight between a rank and the next
  std::vector<uint64_t> at(num_ranks());
  for (bool moved = true; moved;) {
    moved = false;
    for (int rank = num_ranks() - 1; rank >= 0; --rank) {
      const RingSchedule schedule = of(rank, 4 * num_ranks());
      size_t& incoming = on_link[(rank + num_ranks() - 1) % num_ranks()];
      for (; at[rank] < schedule.num_steps(); ++at[rank], moved = true) {
        const Hop hop = schedule.step(at[rank]);
        if (!hop.exists()) continue;
        if (hop.receives() && incoming == 0) break;
        if (hop.sends() && on_link[rank] == num_slots) break;
        incoming -= hop.receives();
        on_link[rank] += hop.sends();
      }
    }
  }
  for (int rank = 0; rank < num_ranks(); ++rank) EXPECT_EQ(at[rank], any.num_steps()) << rank;
}

TEST(ClassicalRing, SendsTwoTimesAllChunksButOne) {
  // Reduce-scatter and all-gather send p-1 of the message's p chunks each.
  for (int p = 2; p < 17; ++p) {
    int sends = 0;
    const RingSchedule schedule{Order::ring, p, 0, static_cast<uint64_t>(p), 3};
    for (uint64_t step = 0; step < schedule.num_steps(); ++step) sends += schedule.step(step).sends();
    EXPECT_EQ(sends, 2 * (p - 1));
  }
}

}  // namespace
}  // namespace jax_ring
