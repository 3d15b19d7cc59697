// sources.h: what the processes of a group contribute to a fold: the values of their ranks, or sums of them.
#pragma once

#include <vector>

#include "collective/collective.h"
#include "collective/fold.h"
#include "cpu/engine.h"
#include "shm/group/group.h"

namespace jax_ring::shm {

// What one process contributes at one place of a fold. With Order::tree it is the sum of consecutive terms of the tree,
// all of them the process's own, else the values of one rank.
struct Source {
  int process;
  int first;   // the rank, or the first term
  int count;   // of terms, else 1
  int merges;  // Order::tree: how often the two sums on top of the stack are added after this one has been pushed
};

// The sources of a call, in the order of the ranks, or of the terms.
class Sources {
 public:
  explicit Sources(const Group& group);

  // Starts over with another call, whose tree must stay valid.
  void begin(const cpu::Message& message);

  int size() const { return static_cast<int>(all_.size()); }
  // Counted around the ring.
  const Source& operator[](int i) const { return all_[i < size() ? i : i - size()]; }

  // The same part with sources of this class instead of terms.
  Part convert(Part part) const;
  // How many sources of a converted part are in a process.
  int num_in(int process, const Part& part) const;

  // The steps with which this process folds a converted part, whose inputs are all terms of its own sources, and one
  // sum for each of the others. Null: in sequence.
  const Subtree* steps_of(const Part& part) const;
  // The steps with which it adds up the terms of a source of its own.
  const Subtree* steps_of(const Source& source) const;

 private:
  void begin_tree(bool adds);
  void find_steps();
  void count_by_process();

  const Group& group_;
  const Tree* tree_ = nullptr;  // null if the sources are ranks
  std::vector<Source> all_;
  std::vector<int> stack_;           // where each sum on the stack of the fold starts in all_
  std::vector<int> source_of_term_;  // by term
  std::vector<int> before_;          // by process, then source: how many of those before it are in the process
  // As in Tree::subtrees(): by input of the folds of the parts, and by term, for the sums that this process stages.
  std::vector<Subtree> steps_, own_steps_;
  std::vector<int> first_input_;  // by source: its place in steps_
  std::vector<TreeTerm> inputs_, own_terms_;
};

}  // namespace jax_ring::shm
