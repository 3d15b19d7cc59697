// reference.h: the definitions of the collectives and of the tree, one element of a result at a time, and a list of
// plans to test.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "collective/collective.h"
#include "tests/support/support.h"

namespace jax_ring::cpu::testing {

// The sources of one element of a result: the operands of consecutive ranks, modulo the number of ranks, at this index.
struct Origin {
  int first;
  int num_sources;
  size_t index;
};

// The definitions of the collectives. nullopt: the element is zero.
std::optional<Origin> origin(const Plan& plan, int num_ranks, size_t count, size_t element_bytes, int rank, size_t i);

// A rank's result, from all ranks' operands.
Bytes expected_result(const Plan& plan, Op op, DType dtype, const std::vector<Bytes>& operands, size_t count, int rank);

// ---- Order::tree --------------------------------------------------------------------------------------------------

// A value, or the fold of two others.
struct Expression {
  int value = -1;
  std::vector<Expression> halves;  // none or two

  std::string text() const {
    return halves.empty() ? std::to_string(value) : "(" + halves[0].text() + "+" + halves[1].text() + ")";
  }
};

// The tree over shards by its definition, and a group's fold along it.
class ReferenceTree {
 public:
  // ranks: of the group's members.
  ReferenceTree(int num_shards, int num_ranks, const std::vector<int>& ranks) : each_(num_shards / num_ranks) {
    std::vector<int> terms(num_ranks, 0);
    count_terms({0, num_shards}, terms);
    num_slots_ = *std::max_element(terms.begin(), terms.end());
    members_.assign(num_ranks, -1);
    next_slot_.assign(num_ranks, 0);
    for (size_t member = 0; member < ranks.size(); ++member) members_[ranks[member]] = static_cast<int>(member);
    if (auto whole = visit({0, num_shards})) roots_.push_back(std::move(*whole));
  }

  int num_slots() const { return num_slots_; }
  // Value s of member m has the index m * num_slots() + s.
  const std::vector<Expression>& roots() const { return roots_; }

 private:
  struct Node {
    int begin, end;
    bool within(int first, int last) const { return first <= begin && end <= last; }
    Node left() const { return {begin, begin + (1 << static_cast<int>(std::log2(end - begin - 0.5)))}; }
    Node right() const { return {left().end, end}; }
  };

  // The rank that has all of a node's shards; -1 if there is none.
  int holder(Node node) const {
    const int rank = node.begin / each_;
    return node.within(rank * each_, (rank + 1) * each_) ? rank : -1;
  }

  void count_terms(Node node, std::vector<int>& terms) const {
    if (const int rank = holder(node); rank >= 0) {
      ++terms[rank];
    } else {
      count_terms(node.left(), terms);
      count_terms(node.right(), terms);
    }
  }

  // The fold of a node, if the group has all of it. Otherwise the folds of its halves, as far as they exist, become
  // roots.
  std::optional<Expression> visit(Node node) {
    if (const int rank = holder(node); rank >= 0) {
      if (members_[rank] < 0) return std::nullopt;
      return Expression{members_[rank] * num_slots_ + next_slot_[rank]++, {}};
    }
    std::optional<Expression> left = visit(node.left());
    // Before the roots within the right half.
    const size_t place = roots_.size();
    std::optional<Expression> right = visit(node.right());
    if (left && right) return Expression{-1, {std::move(*left), std::move(*right)}};
    if (left) roots_.insert(roots_.begin() + place, std::move(*left));
    if (right) roots_.push_back(std::move(*right));
    return std::nullopt;
  }

  int each_;
  int num_slots_ = 0;
  std::vector<int> members_;  // by rank, -1 if it is not in the group
  std::vector<int> next_slot_;
  std::vector<Expression> roots_;
};

// The value of an expression over elements: each fold in the accumulator type, the result rounded once.
uint64_t evaluate(DType dtype, const Expression& expression, const std::vector<uint64_t>& elements, Op op);

// The result of member `member` of a group, from all members' operands, each with `count` elements per slot. A
// reduce-scatter has num_results results; a group with fewer roots repeats the last one.
Bytes expected_tree_result(const Plan& plan, Op op, DType dtype, const ReferenceTree& tree,
                           const std::vector<Bytes>& operands, size_t count, int num_results, int member);

// -------------------------------------------------------------------------------------------------------------------

// A permutation's sources, which live as long as the program.
inline const int* kept(std::vector<int> sources) {
  static std::mutex mutex;
  static std::set<std::vector<int>> all;
  const std::lock_guard<std::mutex> lock(mutex);
  return all.insert(std::move(sources)).first->data();
}

// The next rank is everybody's source.
inline const int* next_rank(int num_ranks) {
  std::vector<int> sources;
  for (int rank = 0; rank < num_ranks; ++rank) sources.push_back((rank + 1) % num_ranks);
  return kept(std::move(sources));
}

// Every second rank's source is its mirror image. The others have none.
inline const int* some_mirrored(int num_ranks) {
  std::vector<int> sources;
  for (int rank = 0; rank < num_ranks; ++rank) sources.push_back(rank % 2 == 0 ? num_ranks - 1 - rank : kNoRank);
  return kept(std::move(sources));
}

inline std::vector<Plan> exchange_plans(int num_ranks) {
  return {{Collective::all_to_all},
          {Collective::permute, Order::rank, 0, next_rank(num_ranks)},
          {Collective::permute, Order::rank, 0, some_mirrored(num_ranks)}};
}

// Whether a result may take the operand's place. It would overwrite data that a rank sends to only some ranks.
inline bool may_be_in_place(const Plan& plan) {
  switch (plan.collective) {
    case Collective::all_reduce:
    case Collective::reduce:
    case Collective::broadcast:
      return true;
    default:
      return false;
  }
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
  for (const Plan& plan : exchange_plans(num_ranks)) plans.push_back(plan);
  return plans;
}

inline std::string describe(const Plan& plan, int num_ranks, size_t count) {
  return "collective " + std::to_string(static_cast<int>(plan.collective)) + ", order " +
         std::to_string(static_cast<int>(plan.order)) + ", root " + std::to_string(plan.root) + ", " +
         std::to_string(num_ranks) + " ranks, " + std::to_string(count) + " elements";
}

}  // namespace jax_ring::cpu::testing
