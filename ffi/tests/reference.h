// reference.h: the definitions of the collectives, one element of a result at a time, and a list of plans to test.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "ring/collective.h"
#include "support.h"

namespace jax_ring::cpu::testing {

// Where one element of a result comes from: the operands of these ranks, in this order, at this index.
struct Origin {
  std::vector<int> sources;
  size_t index;
};

inline std::vector<int> from_rank_on(int first, int num_ranks) {
  std::vector<int> ranks;
  for (int i = 0; i < num_ranks; ++i) ranks.push_back((first + i) % num_ranks);
  return ranks;
}

// The definitions of the collectives. nullopt: the element is zero.
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

// A rank's result, from the operands of all ranks.
inline Bytes expected_result(const Plan& plan, Op op, DType dtype, const std::vector<Bytes>& operands, size_t count,
                             int rank) {
  const int num_ranks = static_cast<int>(operands.size());
  const size_t size = element_size(dtype), results = result_count(plan, num_ranks, count);
  Bytes want(results * size);
  std::vector<uint64_t> values;
  for (size_t i = 0; i < results; ++i) {
    const auto from = origin(plan, num_ranks, count, size, rank, i);
    if (!from) continue;
    values.clear();
    for (int source : from->sources) values.push_back(element_bits(dtype, operands[source].data(), from->index));
    set_element(dtype, want.data(), i, scalar_fold(dtype, values, op));
  }
  return want;
}

inline std::vector<Plan> all_plans(int num_ranks) {
  std::vector<Plan> plans;
  for (Order order : {Order::rank, Order::ring}) {
    plans.push_back({Collective::all_reduce, order});
    plans.push_back({Collective::reduce_scatter, order});
    for (int root : {0, num_ranks / 2, num_ranks - 1}) plans.push_back({Collective::reduce, order, root});
  }
  plans.push_back({Collective::all_gather});
  for (int root : {0, num_ranks / 2, num_ranks - 1}) plans.push_back({Collective::broadcast, Order::rank, root});
  return plans;
}

inline std::string describe(const Plan& plan, int num_ranks, size_t count) {
  return "collective " + std::to_string(static_cast<int>(plan.collective)) + ", order " +
         std::to_string(static_cast<int>(plan.order)) + ", root " + std::to_string(plan.root) + ", " +
         std::to_string(num_ranks) + " ranks, " + std::to_string(count) + " elements";
}

}  // namespace jax_ring::cpu::testing
