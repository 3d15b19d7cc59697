// sources.cc: adds up each process's terms as far as the tree allows.
#include "shm/exchange/sources.h"

#include <type_traits>

namespace jax_ring::shm {
namespace {

// Whether a partial sum has no more bits than a value, so that it can be staged in place of the values.
bool is_own_accumulator(DType dtype) {
  switch (dtype) {
#define JAX_RING_COMPARE(name, element) \
  case DType::name:                     \
    return std::is_same_v<element::Storage, element::Accumulator>;
    JAX_RING_FOR_EACH_DTYPE(JAX_RING_COMPARE)
#undef JAX_RING_COMPARE
    case DType::count:
      break;
  }
  return false;
}

}  // namespace

Sources::Sources(const Group& group) : group_(group) { begin({}); }

void Sources::begin(const cpu::Message& message) {
  const bool has_ranks = tree_ == nullptr && !all_.empty();
  tree_ = folds_along_tree(message.plan) ? message.tree : nullptr;
  if (tree_ == nullptr && has_ranks) return;
  all_.clear();
  if (tree_ != nullptr) {
    begin_tree(is_own_accumulator(message.dtype));
  } else {
    for (int rank = 0; rank < group_.num_ranks(); ++rank) all_.push_back({group_.process_of(rank), rank, 1, 0});
  }
  count_by_process();
}

// adds: whether a process adds up neighboring terms of its own.
void Sources::begin_tree(bool adds) {
  const std::vector<TreeTerm>& terms = tree_->terms();
  stack_.clear();
  for (int t = 0; t < static_cast<int>(terms.size()); ++t) {
    stack_.push_back(size());
    all_.push_back({group_.process_of(terms[t].member), t, 1, 0});
    for (int merge = 0; merge < terms[t].merges; ++merge) {
      const int right = stack_.back();
      stack_.pop_back();
      const int left = stack_.back();
      const bool are_sources = right == left + 1 && right + 1 == size();
      if (adds && are_sources && all_[left].process == all_[right].process) {
        all_[left].count += all_[right].count;
        all_.pop_back();
      } else {
        ++all_.back().merges;
      }
    }
  }
  source_of_term_.resize(terms.size());
  for (int i = 0; i < size(); ++i) {
    for (int t = 0; t < all_[i].count; ++t) source_of_term_[all_[i].first + t] = i;
  }
  find_steps();
}

void Sources::find_steps() {
  steps_.clear();
  first_input_.clear();
  own_steps_.assign(tree_->terms().size(), {});
  for (const Tree::Root& root : tree_->roots()) {
    const size_t first = steps_.size();
    inputs_.clear();
    const int last = source_of_term_[root.first + root.num_terms - 1];
    for (int i = source_of_term_[root.first]; i <= last; ++i) {
      const Source& source = all_[i];
      first_input_.push_back(static_cast<int>(first + inputs_.size()));
      if (source.process != group_.self()) {
        inputs_.push_back({source.process, 0, source.merges});
        continue;
      }
      const auto begin = tree_->terms().begin() + source.first;
      inputs_.insert(inputs_.end(), begin, begin + source.count);
      own_terms_.assign(begin, begin + source.count);
      own_terms_.back().merges -= source.merges;
      find_subtrees(own_terms_.data(), source.count, &own_steps_[source.first]);
    }
    steps_.resize(first + inputs_.size());
    find_subtrees(inputs_.data(), static_cast<int>(inputs_.size()), &steps_[first]);
  }
}

void Sources::count_by_process() {
  before_.clear();
  for (int process = 0; process < group_.num_processes(); ++process) {
    int count = 0;
    before_.push_back(0);
    for (const Source& source : all_) before_.push_back(count += source.process == process);
  }
}

Part Sources::convert(Part part) const {
  if (tree_ == nullptr) return part;
  const int first = source_of_term_[part.sources.first];
  const int last = source_of_term_[part.sources.first + part.sources.count - 1];
  part.sources = {first, last - first + 1};
  return part;
}

int Sources::num_in(int process, const Part& part) const {
  const int* before = &before_[process * (size() + 1)];
  const auto [first, count] = part.sources;
  return count == size() ? before[count] : before[first + count] - before[first];
}

const Subtree* Sources::steps_of(const Part& part) const {
  if (tree_ == nullptr) return nullptr;
  const Subtree* steps = &steps_[first_input_[part.sources.first]];
  return steps->num_terms == 0 ? nullptr : steps;
}

const Subtree* Sources::steps_of(const Source& source) const {
  if (tree_ == nullptr) return nullptr;
  const Subtree* steps = &own_steps_[source.first];
  return steps->num_terms == 0 ? nullptr : steps;
}

}  // namespace jax_ring::shm
