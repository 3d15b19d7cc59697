// options.h: what a caller may choose about an all-reduce.
#pragma once

#include <cstdint>

#include "ring/element.h"

namespace jax_ring {

enum class Algorithm : int { one_shot, two_shot, ring, count };

// The order of the fold: over ranks 0, 1, ..., p-1, or, in block i of the p blocks of a message, over i+1, i+2, ..., i.
enum class Order : int { rank, ring };

// The algorithm for a call that leaves the choice to us. Not measured on links between GPUs yet: one-shot sends p-1
// times the message and two-shot, at most, twice, but one-shot takes one step less and no fence.
JAX_RING_INLINE Algorithm choose(uint64_t bytes, int num_ranks, Order order, bool all_reach_all) {
  constexpr uint64_t kOneShotBytes = 256 << 10;  // sent by each rank
  if (order == Order::ring || !all_reach_all) return Algorithm::ring;
  return bytes * (num_ranks - 1) <= kOneShotBytes ? Algorithm::one_shot : Algorithm::two_shot;
}

}  // namespace jax_ring
