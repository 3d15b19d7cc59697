// trees.h: the trees of a call's replica groups, from the attributes of the custom call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "collective/collective.h"

namespace jax_ring {

// The trees of all groups, for Order::tree.
struct Trees {
  std::vector<Tree> of_group;  // empty with other orders
  int num_results = 1;         // the largest number of roots in a group
};

// The tree of a group whose members are these of the `size` ranks that hold equally many of the shards. Throws
// std::invalid_argument if there is none.
inline Tree tree_of(int64_t shards, int64_t size, const std::vector<int64_t>& members) {
  if (size < 1 || shards < size || shards % size != 0 || shards > (1 << 24)) {
    throw std::invalid_argument(std::to_string(size) + " ranks cannot hold equally many of " + std::to_string(shards) +
                                " shards");
  }
  std::vector<int> ranks;
  for (int64_t rank : members) {
    if (rank < 0 || rank >= size || (!ranks.empty() && rank <= ranks.back())) {
      throw std::invalid_argument("the members of a group are not ranks of its tree in ascending order");
    }
    ranks.push_back(static_cast<int>(rank));
  }
  return Tree(static_cast<int>(shards), static_cast<int>(size), ranks);
}

// group_sizes, tree_shards, tree_sizes: by group, the numbers of its members, of the shards in its tree, and of the
// ranks that hold these. There are more such ranks than members if some are on other hosts. tree_ranks: the members'
// places among them, group after group. All but the first are empty with other orders.
inline Trees trees_of(const Plan& plan, const std::vector<int64_t>& group_sizes,
                      const std::vector<int64_t>& tree_shards, const std::vector<int64_t>& tree_sizes,
                      const std::vector<int64_t>& tree_ranks) {
  Trees trees;
  if (!folds_along_tree(plan)) return trees;
  size_t num_members = 0;
  for (int64_t size : group_sizes) num_members += size;
  if (tree_shards.size() != group_sizes.size() || tree_sizes.size() != group_sizes.size() ||
      tree_ranks.size() != num_members) {
    throw std::invalid_argument("order 'tree' needs a tree for each of the " + std::to_string(group_sizes.size()) +
                                " groups and a place in it for each member");
  }
  size_t next = 0;
  for (size_t group = 0; group < group_sizes.size(); ++group) {
    const auto first = tree_ranks.begin() + next;
    next += group_sizes[group];
    trees.of_group.push_back(tree_of(tree_shards[group], tree_sizes[group], {first, tree_ranks.begin() + next}));
    const int roots = static_cast<int>(trees.of_group.back().roots().size());
    if (roots > trees.num_results) trees.num_results = roots;
  }
  if (trees.num_results > 1 && plan.collective != Collective::reduce_scatter) {
    throw std::invalid_argument(
        "a group without all ranks of its tree has several partial sums, which only "
        "a reduce-scatter returns");
  }
  return trees;
}

}  // namespace jax_ring
