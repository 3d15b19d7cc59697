// group.h: which process each rank of a group is in.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace jax_ring::shm {

// The processes of a group are numbered from 0, in the order of their first ranks.
class Group {
 public:
  // processes: the runtime's id of each rank's process. self: the id of this process, which must have at least one
  // rank.
  Group(const std::vector<int64_t>& processes, int64_t self) {
    for (int rank = 0; rank < static_cast<int>(processes.size()); ++rank) {
      const auto found = std::find(process_ids_.begin(), process_ids_.end(), processes[rank]);
      const int process = static_cast<int>(found - process_ids_.begin());
      if (found == process_ids_.end()) {
        process_ids_.push_back(processes[rank]);
        ranks_.emplace_back();
      }
      process_.push_back(process);
      local_index_.push_back(static_cast<int>(ranks_[process].size()));
      ranks_[process].push_back(rank);
    }
    const auto own = std::find(process_ids_.begin(), process_ids_.end(), self);
    if (own == process_ids_.end()) throw std::invalid_argument("no rank of the group is in this process");
    self_ = static_cast<int>(own - process_ids_.begin());
  }

  int num_ranks() const { return static_cast<int>(process_.size()); }
  int num_processes() const { return static_cast<int>(process_ids_.size()); }
  int self() const { return self_; }

  int process_of(int rank) const { return process_[rank]; }
  int local_index(int rank) const { return local_index_[rank]; }  // among the ranks of its process
  const std::vector<int>& ranks_of(int process) const { return ranks_[process]; }
  bool is_local(int rank) const { return process_[rank] == self_; }
  int64_t process_id(int process) const { return process_ids_[process]; }  // the runtime's id

 private:
  std::vector<int> process_, local_index_;  // by rank
  std::vector<std::vector<int>> ranks_;     // by process
  std::vector<int64_t> process_ids_;        // by process
  int self_ = 0;
};

}  // namespace jax_ring::shm
