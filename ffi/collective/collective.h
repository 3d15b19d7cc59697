// collective.h: each collective as a list of parts: which operands are folded, and who receives the result.
#pragma once

#include <cstddef>

#include "collective/blocks.h"
#include "collective/tree.h"

namespace jax_ring {

enum class Collective : int {
  all_reduce,         // the fold of all operands, for every rank
  reduce_scatter,     // rank r gets the fold of the r-th of p equal blocks of the operands
  all_gather,         // every rank gets all operands, concatenated in rank order
  reduce,             // the fold of all operands for the root, zeros for the others
  broadcast,          // the root's operand, for every rank
  all_to_all,         // rank r gets the r-th of p equal blocks of each operand, in rank order
  permute,            // rank r gets the operand of one rank, or zeros
  ragged_all_to_all,  // slices of operands go to places in the results; other places keep their contents
};

struct Part;

// What all ranks of a call agree on, besides the size and type of the message.
struct Plan {
  Collective collective = Collective::all_reduce;
  Order order = Order::rank;
  int root = 0;  // of reduce and broadcast
  // For permute: the rank whose operand each rank gets, or kNoRank. In host memory; kernels use their rank's Route.
  const int* sources = nullptr;
  // For ragged_all_to_all, in host memory: the slices. They differ between executions.
  const Part* slices = nullptr;
  int num_slices = 0;
};

// Whether results are copies of operands, without a fold.
JAX_RING_INLINE bool only_moves(const Plan& plan) {
  switch (plan.collective) {
    case Collective::all_reduce:
    case Collective::reduce_scatter:
    case Collective::reduce:
      return false;
    case Collective::all_gather:
    case Collective::broadcast:
    case Collective::all_to_all:
    case Collective::permute:
    case Collective::ragged_all_to_all:
      break;
  }
  return true;
}

// Whether the fold order depends on the blocks of the whole operand. Only the ring algorithm implements such orders.
JAX_RING_INLINE bool requires_ring(const Plan& plan) {
  return plan.order == Order::ring &&
         (plan.collective == Collective::all_reduce || plan.collective == Collective::reduce);
}

// The plan with the order that a data-moving engine uses for `any`. A ring in rank order carries p/(p-1) times the
// bytes of one in ring order and takes longer to fill; the other algorithms gain nothing from another order.
JAX_RING_INLINE Plan with_order_for(Plan plan, Algorithm algorithm) {
  if (plan.order != Order::any) return plan;
  plan.order = Order::ring;
  if (algorithm != Algorithm::ring || !requires_ring(plan)) plan.order = Order::rank;
  return plan;
}

// `count` ranks starting at `first`, around the ring.
struct RankRange {
  int first;
  int count;
};

// One part of a collective: fold elements [from, from + count) of the sources' operands, in the order of the sources,
// into elements [to, to + count) of the receivers' results. Without sources these become zero.
struct Part {
  RankRange sources;  // Order::tree: terms of the tree, not ranks; they never wrap around
  size_t from;
  RankRange receivers;
  size_t to;
  size_t count;
  bool zeros_elsewhere = false;  // whether this part is zero in the other ranks' results
};

// The first half of a ring: fold block i of all operands for its owner, rank i.
JAX_RING_INLINE Part scatter_block(Order order, int num_ranks, int i, Range block) {
  const int first = order == Order::ring ? ring_first_rank(num_ranks, i) : 0;
  return {{first, num_ranks}, block.begin, {i, 1}, 0, block.count};
}

// The second half: block i goes from its owner to all ranks.
JAX_RING_INLINE Part gather_block(int num_ranks, int i, Range block) {
  return {{i, 1}, 0, {0, num_ranks}, block.begin, block.count};
}

// Both halves in sequence.
JAX_RING_INLINE Part compose(Part first, Part second) {
  return {first.sources, first.from, second.receivers, second.to, first.count};
}

// A rank's place in a permutation; none in another collective.
inline Route route_of(const Plan& plan, int num_ranks, int rank) {
  Route route;
  if (plan.collective != Collective::permute) return route;
  route.source = plan.sources[rank];
  for (int receiver = 0; receiver < num_ranks; ++receiver) {
    if (plan.sources[receiver] == rank) route.receiver = receiver;
  }
  return route;
}

// Number of parts of each operand. It is one if all elements fold alike; an engine may cut that part anywhere.
JAX_RING_INLINE int num_parts(const Plan& plan, int num_ranks) {
  switch (plan.collective) {
    case Collective::reduce_scatter:
    case Collective::all_gather:
    case Collective::permute:
      return num_ranks;
    case Collective::all_to_all:
      return num_ranks * num_ranks;
    case Collective::all_reduce:
    case Collective::reduce:
      return plan.order == Order::ring ? num_ranks : 1;
    case Collective::ragged_all_to_all:
      return plan.num_slices;
    case Collective::broadcast:
      break;
  }
  return 1;
}

// Part i of an operand of `count` elements of `element_bytes` each.
JAX_RING_INLINE Part part_of(const Plan& plan, int num_ranks, size_t count, size_t element_bytes, int i) {
  switch (plan.collective) {
    case Collective::reduce_scatter:
      return scatter_block(plan.order, num_ranks, i, {i * (count / num_ranks), count / num_ranks});
    case Collective::all_gather:
      return gather_block(num_ranks, i, {i * count, count});
    case Collective::all_to_all: {
      const int receiver = i / num_ranks, source = i % num_ranks;
      const size_t block = count / num_ranks;
      return {{source, 1}, receiver * block, {receiver, 1}, source * block, block};
    }
    case Collective::permute:
      if (plan.sources[i] == kNoRank) return {{0, 0}, 0, {i, 1}, 0, count};
      return {{plan.sources[i], 1}, 0, {i, 1}, 0, count};
    case Collective::ragged_all_to_all:
      return plan.slices[i];
    case Collective::all_reduce:
    case Collective::reduce: {
      const bool whole = num_parts(plan, num_ranks) == 1;
      const Range block = whole ? Range{0, count} : ring_block(count, element_bytes, num_ranks, i);
      Part part = compose(scatter_block(plan.order, num_ranks, i, block), gather_block(num_ranks, i, block));
      if (plan.collective == Collective::reduce) {
        part.receivers = {plan.root, 1};
        part.zeros_elsewhere = true;
      }
      return part;
    }
    case Collective::broadcast:
      break;
  }
  return {{plan.root, 1}, 0, {0, num_ranks}, 0, count};
}

// Whether the sources of a part are terms of a tree. Collectives that only move data have ranks as sources.
JAX_RING_INLINE bool folds_along_tree(const Plan& plan) { return plan.order == Order::tree && !only_moves(plan); }

// The number of parts, also with Order::tree. An operand has one slot of `count` elements for each of the tree's slots.
// A reduce-scatter in a group without all ranks has one result per root of the tree; `num_results` is the largest
// number of roots in any group.
inline int num_parts(const Plan& plan, int num_ranks, const Tree* /*tree*/, int num_results) {
  const bool scatters = plan.collective == Collective::reduce_scatter;
  return folds_along_tree(plan) && scatters ? num_ranks * num_results : num_parts(plan, num_ranks);
}

inline Part part_of(const Plan& plan, int num_ranks, const Tree* tree, int num_results, size_t count,
                    size_t element_bytes, int i) {
  if (!folds_along_tree(plan)) return part_of(plan, num_ranks, count, element_bytes, i);
  const int num_roots = static_cast<int>(tree->roots().size());
  const int block = i / num_results, result = i % num_results;
  Part part = part_of(plan, num_ranks, count, element_bytes, block);
  // A group with fewer roots repeats the last one, so that all results are defined.
  const Tree::Root root = tree->roots()[result < num_roots ? result : num_roots - 1];
  part.sources = {root.first, root.num_terms};
  part.to += result * part.count;
  return part;
}

// Blocks of an operand that are distributed to the ranks, and blocks of a result.
JAX_RING_INLINE int num_input_blocks(const Plan& plan, int num_ranks) {
  const bool has_blocks = plan.collective == Collective::reduce_scatter || plan.collective == Collective::all_to_all;
  return has_blocks ? num_ranks : 1;
}
JAX_RING_INLINE int num_output_blocks(const Plan& plan, int num_ranks) {
  const bool has_blocks = plan.collective == Collective::all_gather || plan.collective == Collective::all_to_all;
  return has_blocks ? num_ranks : 1;
}

// Number of blocks that an engine divides into packs, in an operand with this many slots or in its result.
JAX_RING_INLINE uint32_t num_blocks(const Plan& plan, int num_ranks, uint64_t slots) {
  const int in = num_input_blocks(plan, num_ranks), out = num_output_blocks(plan, num_ranks);
  return static_cast<uint32_t>((in > out ? in : out) * slots);
}

// Elements of each rank's result for an operand of `count` elements.
JAX_RING_INLINE size_t result_count(const Plan& plan, int num_ranks, size_t count) {
  return count / num_input_blocks(plan, num_ranks) * num_output_blocks(plan, num_ranks);
}

}  // namespace jax_ring
