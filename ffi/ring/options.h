// options.h: what a caller may choose about an all-reduce, and the unit that all of it is defined in.
#pragma once

#include <cstdint>
#include <limits>

#include "ring/element.h"

namespace jax_ring {

enum class Algorithm : int { one_shot, two_shot, ring, count };

// The order of ranks in which values are folded.
enum class Order : int {
  rank,  // 0, 1, ..., p-1
  ring,  // that of a ring reduce-scatter, which differs between the blocks of an operand; see `ring_first_rank`
};

// Ranks exchange whole packs: what a thread of a GPU loads at once.
constexpr uint64_t kPackBytes = 16;

// The largest messages of a rank, in bytes, that go by one-shot, and of the larger ones those that go by two-shot.
struct Thresholds {
  uint64_t one_shot;
  uint64_t two_shot;
};

// Those for ranks that nobody has measured. One-shot sends p-1 times the message and two-shot, at most, twice, but
// one-shot takes one step less and no fence. Where that pays has not been measured between GPUs yet.
inline Thresholds default_thresholds(int num_ranks) {
  constexpr uint64_t kOneShotBytes = 256 << 10;  // sent by each rank
  const uint64_t peers = num_ranks > 1 ? num_ranks - 1 : 1;
  return {kOneShotBytes / peers, std::numeric_limits<int64_t>::max()};
}

// The algorithm for an all-reduce that leaves the choice to us.
inline Algorithm choose(uint64_t bytes, const Thresholds& thresholds) {
  if (bytes <= thresholds.one_shot) return Algorithm::one_shot;
  return bytes <= thresholds.two_shot ? Algorithm::two_shot : Algorithm::ring;
}

}  // namespace jax_ring
