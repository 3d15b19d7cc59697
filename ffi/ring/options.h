// options.h: what a caller may choose about an all-reduce, and the unit that all of it is defined in.
#pragma once

#include <cstdint>

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

// The algorithm for an all-reduce that leaves the choice to us. One-shot sends p-1 times the message and two-shot, at
// most, twice, but one-shot takes one step less and no fence. Where that pays has not been measured between GPUs yet.
JAX_RING_INLINE Algorithm choose(uint64_t bytes, int num_ranks) {
  constexpr uint64_t kOneShotBytes = 256 << 10;  // sent by each rank
  return bytes * (num_ranks - 1) <= kOneShotBytes ? Algorithm::one_shot : Algorithm::two_shot;
}

}  // namespace jax_ring
