// tree.h: the canonical binary tree over shards, along which Order::tree adds.
//
// A tree over V shards is split at the largest power of two smaller than V, and so is each of its parts. It depends on
// V alone. Rank r of p holds V/p consecutive shards, starting at r V/p. It contributes one term for each largest node
// within these: one term if V/p is a power of two, else at most 2 log2(V/p).
#pragma once

#include <algorithm>
#include <vector>

#include "collective/fold.h"

namespace jax_ring {

// Shards [first, first + count).
struct TreeNode {
  int first;
  int count;
};

// The shards of the left child of a node of `count` shards, at least 2.
inline int tree_split(int count) {
  int left = 1;
  while (2 * left < count) left *= 2;
  return left;
}

// One step of a fold, for a machine with a stack of partial sums.
struct TreeTerm {
  int member;  // the group member with the term
  int slot;    // the term's index on that member
  int merges;  // after the push: how often to add the two topmost sums
};

// Whether a fold adds its terms one after the other.
inline bool is_sequence(const TreeTerm* terms, int num_terms) {
  for (int i = 1; i < num_terms; ++i) {
    if (terms[i].merges != 1) return false;
  }
  return true;
}

// Whether terms are the leaves of a perfect binary tree, up to the merges after it.
inline bool is_perfect(const TreeTerm* terms, int num_terms) {
  for (int i = 0; i < num_terms; ++i) {
    int levels = 0;
    while ((i >> levels) % 2 == 1) ++levels;
    if (i + 1 < num_terms ? terms[i].merges != levels : terms[i].merges < levels) return false;
  }
  return true;
}

// Writes the steps for fold_tree(), by term, of a fold whose merges leave one sum. Writes none if the fold adds its
// terms one after the other. subtrees: {} for each term.
inline void find_subtrees(const TreeTerm* terms, int num_terms, Subtree* subtrees) {
  if (is_sequence(terms, num_terms)) return;
  for (int term = 0; term < num_terms;) {
    int size = kLargestSubtree;
    while (size > num_terms - term || !is_perfect(terms + term, size)) size /= 2;
    int levels = 0;
    while (1 << levels < size) ++levels;
    subtrees[term] = {size, terms[term + size - 1].merges - levels};
    term += size;
  }
}

// The fold over a group of ranks, among the ranks that share a tree's shards.
class Tree {
 public:
  // The fold of terms [first, first + num_terms). Its merges leave one sum on the stack.
  struct Root {
    int first;
    int num_terms;
  };

  // ranks: the group's members among the `num_ranks` ranks, in ascending order. num_shards: a multiple of num_ranks.
  Tree(int num_shards, int num_ranks, const std::vector<int>& ranks) {
    const int each = num_shards / num_ranks;
    for (int rank = 0; rank < num_ranks; ++rank) {
      num_slots_ = std::max(num_slots_, count_terms({0, num_shards}, {rank * each, each}));
    }
    visit({0, num_shards}, each, ranks);
    find_all_subtrees();
  }

  // In shard order.
  const std::vector<TreeTerm>& terms() const { return terms_; }
  // The sums that the fold leaves, in shard order: one if the group has all ranks.
  const std::vector<Root>& roots() const { return roots_; }
  // The steps for fold_tree(), by term, of the root that begins with term `first`. Null if it folds its terms in
  // sequence.
  const Subtree* subtrees(int first) const { return subtrees_[first].num_terms == 0 ? nullptr : &subtrees_[first]; }
  // The largest number of terms on any rank, in the group or not: each operand has room for that many.
  int num_slots() const { return num_slots_; }

 private:
  static bool contains(TreeNode outer, TreeNode inner) {
    return outer.first <= inner.first && inner.first + inner.count <= outer.first + outer.count;
  }
  static bool overlap(TreeNode a, TreeNode b) { return a.first < b.first + b.count && b.first < a.first + a.count; }

  static int count_terms(TreeNode node, TreeNode held) {
    if (!overlap(node, held)) return 0;
    if (contains(held, node)) return 1;
    const int left = tree_split(node.count);
    return count_terms({node.first, left}, held) + count_terms({node.first + left, node.count - left}, held);
  }

  // Returns whether the group has all shards of the node.
  bool visit(TreeNode node, int each, const std::vector<int>& ranks) {
    const int rank = node.first / each;
    if (contains({rank * each, each}, node)) {
      const auto member = std::lower_bound(ranks.begin(), ranks.end(), rank);
      if (member == ranks.end() || *member != rank) return false;
      const int index = static_cast<int>(member - ranks.begin());
      const bool is_same = !terms_.empty() && terms_.back().member == index;
      roots_.push_back({static_cast<int>(terms_.size()), 1});
      terms_.push_back({index, is_same ? terms_.back().slot + 1 : 0, 0});
      return true;
    }
    const int left = tree_split(node.count);
    const bool has_left = visit({node.first, left}, each, ranks);
    const bool has_right = visit({node.first + left, node.count - left}, each, ranks);
    if (!has_left || !has_right) return false;
    const Root right = roots_.back();
    roots_.pop_back();
    roots_.back().num_terms += right.num_terms;
    ++terms_.back().merges;
    return true;
  }

  void find_all_subtrees() {
    subtrees_.resize(terms_.size());
    for (const Root& root : roots_) find_subtrees(&terms_[root.first], root.num_terms, &subtrees_[root.first]);
  }

  std::vector<TreeTerm> terms_;
  std::vector<Root> roots_;
  std::vector<Subtree> subtrees_;  // by term; {} if no step begins there, or if its root is a sequence
  int num_slots_ = 0;
};

}  // namespace jax_ring
