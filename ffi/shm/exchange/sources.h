// sources.h: the contributions of a group's processes to a fold: values of their ranks, or sums of these.
#pragma once

#include <vector>

#include "collective/collective.h"
#include "collective/fold.h"
#include "cpu/engine.h"
#include "shm/group/group.h"

namespace jax_ring::shm {

// One process's contribution at one place of a fold: with Order::tree the sum of consecutive terms of the tree, all of
// them its own; else the values of one rank.
struct Source {
  int process;
  int first;   // the rank, or the first term
  int count;   // of terms, else 1
  int merges;  // for Order::tree: after the push, how often to add the two topmost sums
};

// The sources of a call, in the order of ranks or terms.
class Sources {
 public:
  explicit Sources(const Group& group);

  // Starts over with another call. Its tree must stay valid.
  void begin(const cpu::Message& message);

  int size() const { return static_cast<int>(all_.size()); }
  // Counts around the ring.
  const Source& operator[](int i) const { return all_[i < size() ? i : i - size()]; }

  // A part with this class's sources instead of terms.
  Part convert(Part part) const;
  // How many sources of a converted part belong to a process.
  int num_in(int process, const Part& part) const;

  // The steps with which this process folds a converted part. The inputs are all terms of its own sources, and one sum
  // for each other source. Null: in sequence.
  const Subtree* steps_of(const Part& part) const;
  // The steps with which it adds up the terms of one of its own sources.
  const Subtree* steps_of(const Source& source) const;

 private:
  void begin_tree(bool adds);
  void find_steps();
  void count_by_process();

  const Group& group_;
  const Tree* tree_ = nullptr;  // null if the sources are ranks
  std::vector<Source> all_;
  std::vector<int> stack_;           // the first source in all_ of each sum on the fold's stack
  std::vector<int> source_of_term_;  // by term
  std::vector<int> before_;          // by process, then source: number of earlier sources in the process
  // As in Tree::subtrees(): by input of the parts' folds, and by term, for the sums that this process stages.
  std::vector<Subtree> steps_, own_steps_;
  std::vector<int> first_input_;  // by source: its place in steps_
  std::vector<TreeTerm> inputs_, own_terms_;
};

}  // namespace jax_ring::shm
