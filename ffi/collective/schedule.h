// schedule.h: which chunk a rank handles at each step of a ring, and what it does with it.
//
// A chunk travels around the ring twice, starting at its first rank. On the first pass it is a partial fold
// (reduce-scatter: p-1 steps), and each rank adds its own values. On the second it is the result (all-gather: p-1
// steps), and each rank keeps a copy. That makes 2p-1 hops, numbered from 0; the p-th ends the first pass and begins
// the second. The orders differ in where a chunk starts:
//
//   Order::ring   block i of the message starts at rank i+1 and is complete at rank i: the classical ring, in which all
//                 links are busy all the time.
//   Order::rank   every chunk starts at rank 0 and is complete at rank p-1: a chain, so that the fold is in rank order.
//                 Chunks follow each other closely, and the results follow `lag` chunks behind.
//
// Order::tree has no ring; tree.h defines its fold.
#pragma once

#include <cstdint>

#include "collective/options.h"

namespace jax_ring {

// What a rank does with one chunk at one step.
struct Hop {
  uint64_t chunk;
  int index;  // of the hop, counted from the chunk's first rank
  int num_ranks;

  // Idle hops keep the schedule regular.
  JAX_RING_INLINE bool exists() const { return index >= 0; }
  JAX_RING_INLINE bool receives() const { return index > 0; }
  JAX_RING_INLINE bool folds() const { return index < num_ranks; }             // adds this rank's values
  JAX_RING_INLINE bool receives_result() const { return index >= num_ranks; }  // else a partial fold
  JAX_RING_INLINE bool has_result() const { return index >= num_ranks - 1; }   // after this hop
  JAX_RING_INLINE bool sends() const { return index < 2 * num_ranks - 2; }
};

// All hops of one rank, in order. Along a link, chunks are received in the order in which they are sent.
struct RingSchedule {
  Order order;
  int num_ranks;
  int rank;
  uint64_t num_chunks;  // Order::ring: a multiple of num_ranks; chunk c is a piece of block c % num_ranks
  // Order::rank: less than the slots of a link. The last rank waits for no other rank, so its link is never full; by
  // induction no link is.
  uint64_t lag;

  JAX_RING_INLINE uint64_t num_steps() const {
    return order == Order::ring ? num_chunks / num_ranks * (2 * num_ranks - 1)
                                : (num_chunks == 0 ? 0 : 2 * (num_chunks + lag));
  }

  JAX_RING_INLINE Hop step(uint64_t step) const {
    if (order == Order::ring) {
      const uint64_t loop = step / (2 * num_ranks - 1);
      const int index = static_cast<int>(step % (2 * num_ranks - 1));
      const int block = (rank - index - 1 + 2 * num_ranks) % num_ranks;
      return {loop * num_ranks + block, index, num_ranks};
    }
    // Each turn handles one chunk on its first pass, then one on its second.
    const uint64_t turn = step / 2;
    if (step % 2 == 0) return {turn, turn < num_chunks ? rank : -1, num_ranks};
    return {turn - lag, turn >= lag && rank < num_ranks - 1 ? rank + num_ranks : -1, num_ranks};
  }
};

}  // namespace jax_ring
