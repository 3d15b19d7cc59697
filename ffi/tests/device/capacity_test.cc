// capacity_test.cc: the sizes of mailboxes, and the distribution of a call's work over teams and threads.
#include "device/memory/capacity.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <utility>
#include <vector>

#include "cuda/kernels/call.h"
#include "tests/support/peers.h"

namespace jax_ring::cpu::testing {
namespace {

TEST(Capacity, AMailboxIsSmallForAnyNumberOfRanks) {
  for (int num_ranks = 1; num_ranks <= kMaxRanks; ++num_ranks) {
    const Capacity capacity = default_capacity(num_ranks);
    EXPECT_LE(capacity.bytes(), size_t{31} << 20) << num_ranks << " ranks";
    EXPECT_GE(capacity.part_packs, 1u);
    EXPECT_GT(capacity.slot_packs, 0u);
    EXPECT_EQ(capacity.num_slots & (capacity.num_slots - 1), 0u);
    EXPECT_GE(static_cast<int>(capacity.num_slots), num_ranks);
  }
}

TEST(Capacity, SmallMessagesAreExchangedOnce) {
  for (int num_ranks = 2; num_ranks <= kMaxRanks; ++num_ranks) {
    const Capacity capacity = default_capacity(num_ranks);
    const uint64_t packs = ceil_div(default_thresholds(num_ranks).one_shot, kPackBytes);
    const PackRange share = share_of({0, packs}, 0, capacity.num_ctas);
    const bool is_full = capacity.one_shot_packs == kThreadsPerCta - kMaxRanks;  // a pack per thread
    EXPECT_TRUE(is_full || share.size() <= capacity.one_shot_packs) << num_ranks << " ranks";
  }
}

TEST(Capacity, OneRoundTakesTheLargestSmallMessage) {
  constexpr int kRanks = 5;  // with fewer, some threads would have several packs
  Peers peers(default_capacity(kRanks));
  std::vector<PeerCall> calls;
  const size_t count = default_thresholds(kRanks).one_shot / sizeof(float);
  calls.push_back(PeerCall::random(DType::f32, Algorithm::one_shot, {}, kRanks, {count}, 1));
  const auto expected = calls[0].expected();
  peers.run(calls);
  expect_results(calls[0], expected);
  EXPECT_EQ(peers.progress(0, 0).one_shot_epoch(), 1u);
}

TEST(Capacity, OnlyTeamsWithWorkAreLaunched) {
  gpu::Call call{};
  call.self.capacity = default_capacity(8);
  const int teams = call.self.capacity.num_ctas;
  for (const Plan& plan : {Plan{}, Plan{Collective::all_reduce, Order::ring}}) {
    call.plan = plan;
    for (uint64_t packs : {1, 7, 31, 32, 33, 100, 255, 256, 257, 5000}) {
      call.message.num_packs = packs;
      const uint64_t shared = requires_ring(plan) ? ceil_div(packs, 8) : packs;
      int with_work = 0;
      for (int cta = 0; cta < teams; ++cta) with_work += share_of({0, shared}, cta, teams).size() > 0;
      EXPECT_EQ(gpu::num_teams(call), with_work) << packs << " packs";
      EXPECT_GT(share_of({0, shared}, with_work - 1, teams).size(), 0u) << "the first teams have the work";
    }
  }
}

// A thread of a team on a GPU.
struct Thread {
  int index, count;
  int thread() const { return index; }
  int size() const { return count; }
};

TEST(Capacity, AllPartsOfATwoShotRoundAreSentAtOnce) {
  constexpr int kThreads = 512, kRanks = 8;
  Endpoint self{};
  self.capacity = default_capacity(kRanks);
  self.rank = 3;
  Message message{};
  message.num_operands = 1;
  message.num_packs = (64 << 10) / kPackBytes;
  message.operands[0].bytes = 64 << 10;
  const PackRange share = share_of({0, message.num_packs}, 0, self.capacity.num_ctas);
  const uint64_t part = ceil_div(share.size(), kRanks);
  std::map<std::pair<int, uint32_t>, uint64_t> sent;  // by owner and place
  std::set<int> busy;
  for (int index = 0; index < kThreads; ++index) {
    const two_shot::Worker<Thread> worker{self,
                                          message,
                                          two_shot::Roles{},
                                          share,
                                          self.capacity.part_packs * kRanks,
                                          0,
                                          Thread{index, kThreads},
                                          self.capacity.part_packs};
    int visited = 0;
    for_each_pack<kCopiesInFlight>(
        message, two_shot::PartsWalk<Thread>{worker, worker.range(0)}, worker.team,
        [&](const auto&, uint64_t pack, const Spot&) { return pack; },
        [&](const auto&, uint64_t, const Spot& spot, uint64_t pack) {
          EXPECT_TRUE(sent.insert({{spot.owner, spot.place}, pack}).second) << "sent twice";
          EXPECT_EQ(pack, share.begin + spot.owner * part + spot.place);
          busy.insert(index);
          ++visited;
        });
    EXPECT_LE(visited, 1);
  }
  EXPECT_EQ(sent.size(), share.size() - part);
  EXPECT_EQ(busy.size(), share.size() - part) << "threads without work while others have several packs";
}

// Small operands must not make a team work on one after the other.
TEST(Capacity, ManySmallOperandsAreVisitedAtOnce) {
  constexpr int kThreads = 512;
  Message message{};
  message.num_operands = kMaxOperands;
  for (uint32_t i = 0; i < message.num_operands; ++i) {
    message.operands[i].bytes = 1 + 3 * kPackBytes;
    message.operands[i].first_pack = message.num_packs;
    message.num_packs += 4;
  }
  uint64_t visited = 0;
  for (int index = 0; index < kThreads; ++index) {
    int mine = 0;
    for_each_small_pack<1>(
        message, RangeWalk{{0, message.num_packs}}, Thread{index, kThreads},
        [&](const auto&, uint64_t, const Spot& spot) { return spot.pack; },
        [&](const auto&, uint64_t, const Spot& spot, uint64_t pack) {
          EXPECT_EQ(spot.pack, pack);
          ++mine;
        });
    EXPECT_LE(mine, 1);
    visited += mine;
  }
  EXPECT_EQ(visited, message.num_packs);
}

}  // namespace
}  // namespace jax_ring::cpu::testing
