// tree_reference.h: the definition of a sum along the tree over shards, by recursion, one element at a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "support.h"

namespace jax_ring::cpu::testing {

// A tree over shards, and the ranks of a group among those that hold them.
struct SharedTree {
  int num_shards, num_ranks;
  std::vector<int> ranks;
};

// The sums that a group is left with for a part of the tree, from left to right. Complete: one, of all shards there.
template <class Wide>
struct TreeSums {
  std::vector<Wide> sums;
  bool is_complete;
};

// value_of(member, slot) is a partial sum of a member of the group. `next` counts those that have been used, by member.
template <class Wide, class ValueOf>
TreeSums<Wide> tree_sums(const SharedTree& tree, int first, int count, std::vector<int>& next, ValueOf value_of) {
  const int each = tree.num_shards / tree.num_ranks, rank = first / each;
  if ((first + count - 1) / each == rank) {
    const auto found = std::find(tree.ranks.begin(), tree.ranks.end(), rank);
    if (found == tree.ranks.end()) return {{}, false};
    const int member = static_cast<int>(found - tree.ranks.begin());
    return {{value_of(member, next[member]++)}, true};
  }
  int half = 1;
  while (2 * half < count) half *= 2;
  TreeSums<Wide> left = tree_sums<Wide>(tree, first, half, next, value_of);
  const TreeSums<Wide> right = tree_sums<Wide>(tree, first + half, count - half, next, value_of);
  if (left.is_complete && right.is_complete) return {{left.sums[0] + right.sums[0]}, true};
  left.sums.insert(left.sums.end(), right.sums.begin(), right.sums.end());
  return {left.sums, false};
}

template <class Wide, class ValueOf>
std::vector<Wide> tree_sums(const SharedTree& tree, ValueOf value_of) {
  std::vector<int> next(tree.ranks.size());
  return tree_sums<Wide>(tree, 0, tree.num_shards, next, value_of).sums;
}

// The sums as elements, from the bits of the partial sums. Each is rounded once.
template <class BitsOf>
std::vector<uint64_t> tree_sums_of_elements(const SharedTree& tree, DType dtype, BitsOf bits_of) {
  std::vector<uint64_t> results;
  const auto add = [&](auto wide_of, auto element_of) {
    for (auto wide : tree_sums<decltype(wide_of(0))>(
             tree, [&](int member, int slot) { return wide_of(bits_of(member, slot)); })) {
      results.push_back(element_of(wide));
    }
  };
  if (dtype == DType::f64) {
    add([](uint64_t bits) { return bit_cast<double>(bits); }, [](double wide) { return bit_cast<uint64_t>(wide); });
  } else if (dtype == DType::f32) {
    add([](uint64_t bits) { return bit_cast<float>(static_cast<uint32_t>(bits)); },
        [](float wide) { return uint64_t{bit_cast<uint32_t>(wide)}; });
  } else if (is_small(dtype)) {
    const SmallFloatReference& reference = SmallFloatReference::of(dtype);
    add([&](uint64_t bits) { return reference.decoded(static_cast<uint32_t>(bits)); },
        [&](float wide) { return uint64_t{reference.encode(wide)}; });
  } else {
    add([](uint64_t bits) { return bits; }, [&](uint64_t wide) { return masked(dtype, wide); });
  }
  return results;
}

}  // namespace jax_ring::cpu::testing
