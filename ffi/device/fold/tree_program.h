// tree_program.h: the fold along a tree as kernels run it: terms in blocks of eight, with the additions after each.
//
// A tree is cut into its largest subtrees with at most three additions on any path. The terms of such a block are
// loaded together, and its additions are the same in every kernel: a complete tree of eight places, in which a sum
// without a right half equals its left half. Only the few additions between blocks need a stack.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "collective/element.h"
#include "collective/tree.h"

namespace jax_ring {

constexpr int kBlockLevels = 3;
constexpr int kBlockTerms = 1 << kBlockLevels;

// The limits of the kernels. Sums on the stack take registers, the program takes space among the arguments, and each
// slot takes a share of the mailboxes. A tree with one term for each of 64 ranks has 8 blocks.
constexpr int kMaxBlocks = 16;
constexpr int kMaxStacked = 3;
constexpr int kMaxSlots = 16;

constexpr uint16_t kNoTerm = 0xffff;

struct TreeProgram {
  // By block, then place: the member with the term, plus 256 times its slot; or kNoTerm. The first place has a term.
  uint16_t term[kMaxBlocks * kBlockTerms];
  // After a block: how many sums on top of the stack to add to its own sum, and how many sums then lie below the
  // result.
  uint8_t merges[kMaxBlocks];
  uint8_t below[kMaxBlocks];
  uint8_t end[kMaxBlocks];  // by root: the block after its last one; each root starts with an empty stack
  uint8_t num_roots;
  uint8_t num_results;  // of a reduce-scatter; results beyond the last root repeat it
  uint8_t num_slots;

  JAX_RING_INLINE bool exists(int place) const { return term[place] != kNoTerm; }
  JAX_RING_INLINE int member(int place) const { return term[place] & 0xff; }
  JAX_RING_INLINE int slot(int place) const { return term[place] >> 8; }
  JAX_RING_INLINE int root_of(int result) const { return result < num_roots ? result : num_roots - 1; }
  JAX_RING_INLINE int first_block(int root) const { return root == 0 ? 0 : end[root - 1]; }
  JAX_RING_INLINE int end_block(int root) const { return end[root]; }
};

// Builds a program from the terms and merges of a tree.
class TreeCompiler {
 public:
  // nullopt: beyond the kernels' limits. num_results: at least the number of roots.
  static std::optional<TreeProgram> compile(const Tree& tree, int num_results) {
    TreeCompiler compiler(tree);
    const int num_roots = static_cast<int>(tree.roots().size());
    if (tree.num_slots() > kMaxSlots || num_results > kMaxBlocks || num_roots > num_results) return std::nullopt;
    for (const Tree::Root& root : tree.roots()) {
      if (!compiler.emit(compiler.run(root), 0)) return std::nullopt;
      compiler.program_.end[compiler.program_.num_roots++] = static_cast<uint8_t>(compiler.num_blocks_);
    }
    compiler.program_.num_results = static_cast<uint8_t>(num_results);
    compiler.program_.num_slots = static_cast<uint8_t>(tree.num_slots());
    return compiler.program_;
  }

 private:
  struct Node {
    int levels;  // additions on the longest path
    int left, right;
    int term;
  };

  explicit TreeCompiler(const Tree& tree) : tree_(tree) {
    std::fill(std::begin(program_.term), std::end(program_.term), kNoTerm);
  }

  // Runs the stack machine on nodes. Returns the root's node.
  int run(const Tree::Root& root) {
    std::vector<int> stack;
    for (int i = root.first; i < root.first + root.num_terms; ++i) {
      stack.push_back(add({0, -1, -1, i}));
      for (int merge = 0; merge < tree_.terms()[i].merges; ++merge) {
        const int right = stack.back();
        stack.pop_back();
        const int left = stack.back();
        stack.back() = add({1 + std::max(nodes_[left].levels, nodes_[right].levels), left, right, -1});
      }
    }
    return stack.back();
  }

  int add(Node node) {
    nodes_.push_back(node);
    return static_cast<int>(nodes_.size()) - 1;
  }

  // Appends the blocks of a node. Its sum goes on the stack above `below` others. Returns false if it does not fit.
  bool emit(int index, int below) {
    const Node node = nodes_[index];
    if (node.levels <= kBlockLevels) {
      if (num_blocks_ == kMaxBlocks || below > kMaxStacked) return false;
      program_.below[num_blocks_] = static_cast<uint8_t>(below);
      fill(index, num_blocks_ * kBlockTerms);
      ++num_blocks_;
      return true;
    }
    if (!emit(node.left, below) || program_.below[num_blocks_ - 1] >= kMaxStacked) return false;
    if (!emit(node.right, below + 1)) return false;
    ++program_.merges[num_blocks_ - 1];
    --program_.below[num_blocks_ - 1];
    return true;
  }

  // Puts a node's terms into the places starting at `place`.
  void fill(int index, int place) {
    const Node& node = nodes_[index];
    if (node.levels == 0) {
      const TreeTerm& term = tree_.terms()[node.term];
      program_.term[place] = static_cast<uint16_t>(term.member | term.slot << 8);
      return;
    }
    fill(node.left, place);
    fill(node.right, place + (1 << (node.levels - 1)));
  }

  const Tree& tree_;
  std::vector<Node> nodes_;
  TreeProgram program_{};
  int num_blocks_ = 0;
};

}  // namespace jax_ring
