// options.h: the options of an all-reduce, and their unit.
#pragma once

#include <cstdint>
#include <limits>

#include "collective/element.h"

namespace jax_ring {

enum class Algorithm : int {
  one_shot,
  two_shot,
  ring,
  multicast,  // chosen by the engine for Order::any, where an NVSwitch can add; see multicast.h
  count,
};

// The order of ranks in the fold of a value.
enum class Order : int {
  rank,  // 0, 1, ..., p-1
  ring,  // as in a ring reduce-scatter: differs between the blocks of an operand; see `ring_first_rank`
  any,   // the engine's choice, with the same bits on all ranks; rank order unless it has another
  tree,  // along a binary tree over shards, for any number of ranks; see tree.h
};

// Stands for no rank.
constexpr int kNoRank = -1;

// A rank's place in a permutation: the source of its result, and the receiver of its operand.
struct Route {
  int32_t source = kNoRank;
  int32_t receiver = kNoRank;
};

// Ranks exchange whole packs: the unit that a GPU thread loads at once.
constexpr uint64_t kPackBytes = 16;

// The largest messages of a rank, in bytes, for one-shot and for two-shot. Larger ones use the ring.
struct Thresholds {
  uint64_t one_shot;
  uint64_t two_shot;
};

// The thresholds before any measurement. One-shot sends p-1 times the message and two-shot at most twice, but one-shot
// saves a step and a fence. They break even where each of 2, 4 and 8 ranks that share an H100 sends about 1,000, 1,300
// and 800 KiB. Between GPUs that has not been measured.
inline Thresholds default_thresholds(int num_ranks) {
  constexpr uint64_t kOneShotBytes = 768 << 10;  // sent by each rank
  const uint64_t peers = num_ranks > 1 ? num_ranks - 1 : 1;
  return {kOneShotBytes / peers, std::numeric_limits<int64_t>::max()};
}

// The algorithm of an all-reduce, if the caller does not specify one.
inline Algorithm choose(uint64_t bytes, const Thresholds& thresholds) {
  if (bytes <= thresholds.one_shot) return Algorithm::one_shot;
  return bytes <= thresholds.two_shot ? Algorithm::two_shot : Algorithm::ring;
}

}  // namespace jax_ring
