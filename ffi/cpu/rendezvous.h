// rendezvous.h: brings together the ranks that make the same call, without blocking any of them.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace jax_ring::cpu {

using Clock = std::chrono::steady_clock;

// Tells a rank that its call has ended; `error` is null when the result has been written.
using Completion = std::function<void(const std::string* error)>;

// One rank's part in a call: where its operands are, where the results go, whom to tell.
struct Participant {
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  Completion done;
};

// One call of one group in one execution, while its ranks arrive and then while it is worked on.
struct Meeting {
  int64_t run_id = 0;
  int group = 0;
  int num_arrived = 0;
  Clock::time_point began;
  std::vector<std::optional<Participant>> participants;  // by rank in the group
};

// The replica groups of a call: which partitions (mesh positions) reduce together, in rank order.
class ReplicaGroups {
 public:
  struct Place {
    int group;
    int rank;
  };

  // partitions: the groups' members one after the other; sizes: the length of each group.
  // Throws std::invalid_argument unless the groups are non-empty and no partition is in two of them.
  ReplicaGroups(const std::vector<int64_t>& partitions, const std::vector<int64_t>& sizes);

  // Throws std::out_of_range when no group holds the partition.
  Place place(int64_t partition) const;
  const std::vector<int64_t>& members(int group) const { return members_[group]; }
  int size(int group) const { return static_cast<int>(members_[group].size()); }

 private:
  std::vector<std::vector<int64_t>> members_;
  std::vector<Place> places_;  // by partition
};

// All the meetings of one call site. Calls are paired by (execution, order of each rank's calls): a rank joins the
// oldest open meeting of its group and run that it has not joined yet. A rank's next call comes only after its last
// one ended, that is, after everyone had arrived at it, so that in a loop there is one open meeting at a time.
class Rendezvous {
 public:
  // call: what the call is, for the error message (axis, message, call site).
  Rendezvous(ReplicaGroups groups, std::string call);
  // Fails the meetings that are still open.
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  // Ranks in the group of a partition. Throws std::out_of_range when no group holds it.
  int group_size(int64_t partition) const { return groups_.size(groups_.place(partition).group); }

  // Adds the participant to its meeting. Returns the meeting if everyone is there now, and null otherwise;
  // the caller then owns the meeting and must complete every participant.
  std::unique_ptr<Meeting> arrive(int64_t run_id, int64_t partition, Participant participant);

  // Takes out the open meetings that `expired` selects.
  std::vector<std::unique_ptr<Meeting>> take(const std::function<bool(const Meeting&)>& expired);

  // Who is missing from the meeting, in words for a Python user.
  std::string describe_absence(const Meeting& meeting, std::chrono::duration<double> deadline) const;

 private:
  const ReplicaGroups groups_;
  const std::string call_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Meeting>> open_;  // oldest first
};

}  // namespace jax_ring::cpu
