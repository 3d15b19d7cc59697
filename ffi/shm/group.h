// group.h: which of a group's ranks live in which process.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace jax_ring::shm {

// A group's processes are numbered from 0, in the order of their first ranks.
class Group {
 public:
  // processes: of each rank, as the runtime numbers them. self: this process, which has one of the ranks at least.
  Group(const std::vector<int64_t>& processes, int64_t self) {
    for (int rank = 0; rank < static_cast<int>(processes.size()); ++rank) {
      const auto found = std::find(names_.begin(), names_.end(), processes[rank]);
      const int process = static_cast<int>(found - names_.begin());
      if (found == names_.end()) {
        names_.push_back(processes[rank]);
        ranks_.emplace_back();
      }
      process_.push_back(process);
      index_.push_back(static_cast<int>(ranks_[process].size()));
      ranks_[process].push_back(rank);
    }
    const auto own = std::find(names_.begin(), names_.end(), self);
    if (own == names_.end()) throw std::invalid_argument("no rank of the group is in this process");
    self_ = static_cast<int>(own - names_.begin());
  }

  int num_ranks() const { return static_cast<int>(process_.size()); }
  int num_processes() const { return static_cast<int>(names_.size()); }
  int self() const { return self_; }

  int process_of(int rank) const { return process_[rank]; }
  int index_of(int rank) const { return index_[rank]; }  // among the ranks of its process
  const std::vector<int>& ranks_of(int process) const { return ranks_[process]; }
  bool is_local(int rank) const { return process_[rank] == self_; }
  int64_t name_of(int process) const { return names_[process]; }  // the runtime's number

 private:
  std::vector<int> process_, index_;     // by rank
  std::vector<std::vector<int>> ranks_;  // by process
  std::vector<int64_t> names_;           // by process
  int self_ = 0;
};

}  // namespace jax_ring::shm
