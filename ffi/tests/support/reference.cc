// reference.cc: the results of the collectives, one element at a time. Like elements.cc: compiled once, and optimized.
#include "tests/support/reference.h"

namespace jax_ring::cpu::testing {

std::optional<Origin> origin(const Plan& plan, int num_ranks, size_t count, size_t element_bytes, int rank, size_t i) {
  const size_t pack = 16 / element_bytes;
  const size_t packs = (count + pack - 1) / pack, packs_per_block = (packs + num_ranks - 1) / num_ranks;
  const auto first = [&](size_t owner) {
    return plan.order == Order::rank ? 0 : static_cast<int>(owner + 1) % num_ranks;
  };
  switch (plan.collective) {
    case Collective::all_reduce:
      return Origin{first(i / pack / packs_per_block), num_ranks, i};
    case Collective::reduce_scatter:
      return Origin{first(rank), num_ranks, rank * (count / num_ranks) + i};
    case Collective::all_gather:
      return Origin{static_cast<int>(i / count), 1, i % count};
    case Collective::reduce:
      if (rank != plan.root) return std::nullopt;
      return Origin{first(i / pack / packs_per_block), num_ranks, i};
    case Collective::broadcast:
      return Origin{plan.root, 1, i};
    case Collective::all_to_all: {
      const size_t block = count / num_ranks;
      return Origin{static_cast<int>(i / block), 1, rank * block + i % block};
    }
    case Collective::permute:
      if (plan.sources[rank] == kNoRank) return std::nullopt;
      return Origin{plan.sources[rank], 1, i};
    case Collective::ragged_all_to_all:
      break;  // its results depend on their earlier contents: see ragged_test.cc
  }
  return std::nullopt;
}

Bytes expected_result(const Plan& plan, Op op, DType dtype, const std::vector<Bytes>& operands, size_t count,
                      int rank) {
  const int num_ranks = static_cast<int>(operands.size());
  const size_t size = element_size(dtype), results = result_count(plan, num_ranks, count);
  Bytes want(results * size);
  std::vector<uint64_t> values;
  for (size_t i = 0; i < results; ++i) {
    const auto from = origin(plan, num_ranks, count, size, rank, i);
    if (!from) continue;
    values.clear();
    for (int source = from->first; source < from->first + from->num_sources; ++source) {
      values.push_back(element_bits(dtype, operands[source % num_ranks].data(), from->index));
    }
    set_element(dtype, want.data(), i, scalar_fold(dtype, values, op));
  }
  return want;
}

uint64_t evaluate(DType dtype, const Expression& expression, const std::vector<uint64_t>& elements, Op op) {
  const auto in = [&](auto value_of) {
    const auto visit = [&](const auto& self, const Expression& node) -> decltype(value_of(uint64_t{})) {
      if (node.halves.empty()) return value_of(elements[node.value]);
      return scalar_step(op, self(self, node.halves[0]), self(self, node.halves[1]));
    };
    return visit(visit, expression);
  };
  if (dtype == DType::f64) return bit_cast<uint64_t>(in([](uint64_t bits) { return bit_cast<double>(bits); }));
  if (dtype == DType::f32) {
    return bit_cast<uint32_t>(in([](uint64_t bits) { return bit_cast<float>(static_cast<uint32_t>(bits)); }));
  }
  if (is_small(dtype)) {
    const SmallFloatReference& reference = SmallFloatReference::of(dtype);
    return reference.encode(in([&](uint64_t bits) { return reference.decoded(static_cast<uint32_t>(bits)); }));
  }
  if (expression.halves.empty()) return elements[expression.value];
  return scalar_fold(
      dtype, {evaluate(dtype, expression.halves[0], elements, op), evaluate(dtype, expression.halves[1], elements, op)},
      op);
}

Bytes expected_tree_result(const Plan& plan, Op op, DType dtype, const ReferenceTree& tree,
                           const std::vector<Bytes>& operands, size_t count, int num_results, int member) {
  const int num_ranks = static_cast<int>(operands.size());
  const size_t size = element_size(dtype);
  const bool scatters = plan.collective == Collective::reduce_scatter;
  const size_t block = scatters ? count / num_ranks : count;
  Bytes want((scatters ? num_results : 1) * block * size);
  if (plan.collective == Collective::reduce && member != plan.root) return want;
  std::vector<uint64_t> elements(num_ranks * tree.num_slots());
  for (size_t i = 0; i < want.size() / size; ++i) {
    const size_t from = (scatters ? member * block : 0) + i % block;
    for (size_t value = 0; value < elements.size(); ++value) {
      const size_t slot = value % tree.num_slots();
      elements[value] = element_bits(dtype, operands[value / tree.num_slots()].data(), slot * count + from);
    }
    const size_t root = std::min(i / block, tree.roots().size() - 1);
    set_element(dtype, want.data(), i, evaluate(dtype, tree.roots()[root], elements, op));
  }
  return want;
}

}  // namespace jax_ring::cpu::testing
