// rendezvous.h: brings together the ranks that make the same call, without blocking any of them.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cpu/completion.h"

namespace jax_ring::cpu {

using Clock = std::chrono::steady_clock;

// One rank's part in a call: where its operands are, where the results go, whom to tell.
struct Participant {
  std::vector<const void*> inputs;
  std::vector<void*> outputs;  // as many
  Completion done;             // not empty
};

// One call of one group in one execution, while its ranks arrive and then while it is worked on.
struct Rendezvous {
  int64_t run_id = 0;
  int group = 0;
  int num_arrived = 0;
  Clock::time_point start_time;
  std::vector<const void*> inputs;  // by operand, then rank, the ranks twice: a fold may begin with any of them
  std::vector<void*> outputs;       // by operand, then rank
  std::vector<Completion> done;     // by rank; empty for those who are not here, or never will be

  int num_ranks() const { return static_cast<int>(done.size()); }
};

// The meetings of a call site that have ended, kept for their memory: a call that is made again allocates none. Shared
// with the meetings that are still going on, which may outlive the call site.
class RendezvousPool {
 public:
  std::unique_ptr<Rendezvous> acquire();
  void release(std::unique_ptr<Rendezvous> rendezvous);

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Rendezvous>> free_;
};

// Owns a meeting. When it ends the meeting goes back to the spares, or is freed if it belongs to none.
struct ReturnToPool {
  std::shared_ptr<RendezvousPool> pool;
  void operator()(Rendezvous* rendezvous) const;
};
using RendezvousPtr = std::unique_ptr<Rendezvous, ReturnToPool>;

// The replica groups of a call: which partitions (mesh positions) reduce together, in rank order.
class ReplicaGroups {
 public:
  struct Place {
    int group;
    int rank;
  };

  // partitions: the groups' members one after the other; sizes: the length of each group. is_local: of each member,
  // whether it is in this process, as all are if it is empty.
  // Throws std::invalid_argument unless the groups are non-empty and no partition is in two of them.
  ReplicaGroups(const std::vector<int64_t>& partitions, const std::vector<int64_t>& sizes,
                const std::vector<bool>& is_local = {});

  // Throws std::out_of_range when no group holds the partition.
  Place place(int64_t partition) const;
  const std::vector<int64_t>& members(int group) const { return members_[group]; }
  int size(int group) const { return static_cast<int>(members_[group].size()); }
  bool is_local(int group, int rank) const { return is_local_[group][rank]; }
  int num_local(int group) const { return num_local_[group]; }

 private:
  std::vector<std::vector<int64_t>> members_;
  std::vector<std::vector<bool>> is_local_;  // by group, then rank
  std::vector<int> num_local_;               // by group
  std::vector<Place> places_;                // by partition
};

// All the meetings of one call site, of the ranks in this process. Calls are paired by (execution, order of each rank's
// calls): a rank joins the oldest open meeting of its group and run that it has not joined yet. A rank's next call
// comes only after its last one ended, that is, after everyone had arrived at it, so that in a loop there is one open
// meeting at a time.
class RendezvousMap {
 public:
  // call: what the call is, for the error message (axis, message, call site).
  RendezvousMap(ReplicaGroups groups, std::string call);
  // Fails the meetings that are still open.
  ~RendezvousMap();
  RendezvousMap(const RendezvousMap&) = delete;
  RendezvousMap& operator=(const RendezvousMap&) = delete;

  const ReplicaGroups& groups() const { return groups_; }

  // Adds the participant to its meeting. Returns the meeting if every rank of this process is there now, or else null;
  // the caller then owns the meeting and must complete every participant. Only `done` is moved from: the participant's
  // vectors stay with the caller, who may fill them again for its next call.
  // Throws std::invalid_argument when the participant has another number of operands than those already there.
  RendezvousPtr arrive(int64_t run_id, int64_t partition, Participant&& participant);

  // Takes out the open meetings that `expired` selects.
  std::vector<RendezvousPtr> remove_if(const std::function<bool(const Rendezvous&)>& predicate);

  // Who is missing from the meeting, in words for a Python user.
  std::string describe_missing_ranks(const Rendezvous& rendezvous, std::chrono::duration<double> deadline) const;

 private:
  const ReplicaGroups groups_;
  const std::string call_;
  const std::shared_ptr<RendezvousPool> pool_ = std::make_shared<RendezvousPool>();
  std::mutex mutex_;
  std::vector<RendezvousPtr> open_;  // oldest first
};

}  // namespace jax_ring::cpu
