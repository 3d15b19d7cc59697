// origin.h: the definitions of the collectives, one element of a result at a time.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "ring/collective.h"

namespace jax_ring::cpu::testing {

// Where one element of a result comes from: these ranks' operands, in this order, at this index.
struct Origin {
  std::vector<int> sources;
  size_t index;
};

inline std::vector<int> from_rank_on(int first, int num_ranks) {
  std::vector<int> ranks;
  for (int i = 0; i < num_ranks; ++i) ranks.push_back((first + i) % num_ranks);
  return ranks;
}

// The definitions of the collectives. None: the element is zero.
inline std::optional<Origin> origin(const Plan& plan, int num_ranks, size_t count, size_t element_bytes, int rank,
                                    size_t i) {
  const size_t pack = 16 / element_bytes;
  const size_t packs = (count + pack - 1) / pack, packs_per_block = (packs + num_ranks - 1) / num_ranks;
  const auto fold = [&](size_t owner) {
    return from_rank_on(plan.order == Order::rank ? 0 : static_cast<int>(owner) + 1, num_ranks);
  };
  switch (plan.collective) {
    case Collective::all_reduce:
      return Origin{fold(i / pack / packs_per_block), i};
    case Collective::reduce_scatter:
      return Origin{fold(rank), rank * (count / num_ranks) + i};
    case Collective::all_gather:
      return Origin{{static_cast<int>(i / count)}, i % count};
    case Collective::reduce:
      if (rank != plan.root) return std::nullopt;
      return Origin{fold(i / pack / packs_per_block), i};
    case Collective::broadcast:
      return Origin{{plan.root}, i};
  }
  return std::nullopt;
}

}  // namespace jax_ring::cpu::testing
