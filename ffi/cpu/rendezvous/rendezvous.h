// rendezvous.h: gathers the ranks that make the same call, without blocking any of them.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/threads.h"
#include "cpu/rendezvous/completion.h"
#include "cpu/waiting/waiting_policy.h"
#include "cpu/waiting/waiting_rank.h"
#include "recorder/flight_recorder.h"

namespace jax_ring::cpu {

using Clock = SteadyClock;

// Since the clock's epoch, as in the flight recorder.
inline int64_t nanoseconds(Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

// One rank's contribution to a call: operands, results, and the completion.
struct Participant {
  std::vector<const void*> inputs;
  std::vector<void*> outputs;               // one per input
  Completion done;                          // not empty
  const WaitingRankPtr* waiting = nullptr;  // null: it does not wait
  CallingThread thread;
};

// All ranks of one group in one call of one execution, from first arrival to last completion.
struct Rendezvous {
  int64_t run_id = 0;
  int group = 0;
  int num_arrived = 0;
  Clock::time_point start_time;
  std::vector<const void*> inputs;  // by operand, then rank; ranks twice, since a fold may start at any of them
  std::vector<void*> outputs;       // by operand, then rank
  std::vector<const void*> terms;   // by operand, then term of the tree; filled in by the engine if a rank has several
  std::vector<Completion> done;     // by rank; empty if the rank has not arrived or is in another process
  std::vector<WaitingRankPtr> waiting;  // by rank; null if it does not wait
  Waiting how_to_wait;                  // for ranks that arrive soon
  flight::Entry entry;                  // of the flight recorder

  int num_ranks() const { return static_cast<int>(done.size()); }
  // Forgets the call, and keeps the memory for the next one.
  void clear();
};

// A call site's finished rendezvous, for reuse: a repeated call allocates no memory. Shared with the rendezvous in use,
// which may outlive the call site.
class RendezvousPool {
 public:
  std::unique_ptr<Rendezvous> acquire();
  void release(std::unique_ptr<Rendezvous> rendezvous);

 private:
  Mutex mutex_;
  std::vector<std::unique_ptr<Rendezvous>> free_;
};

// Deleter: returns a rendezvous to its pool, or frees it if it has none.
struct ReturnToPool {
  std::shared_ptr<RendezvousPool> pool;
  void operator()(Rendezvous* rendezvous) const;
};
using RendezvousPtr = std::unique_ptr<Rendezvous, ReturnToPool>;

// The replica groups of a call: the partitions (mesh positions) that reduce together, in rank order.
class ReplicaGroups {
 public:
  struct Place {
    int group;
    int rank;
  };

  // partitions: the members of all groups, one group after the other, all different. sizes: the size of each group.
  // is_local: whether each member is in this process; empty means all are.
  // Throws std::invalid_argument if a partition number is impossible.
  ReplicaGroups(const std::vector<int64_t>& partitions, const std::vector<int64_t>& sizes,
                const std::vector<bool>& is_local = {});

  // Throws std::out_of_range if no group contains the partition.
  Place place(int64_t partition) const;
  // Also throws std::invalid_argument if it is in another process. A group would be complete without the rank that
  // it waits for.
  Place local_place(int64_t partition) const;
  bool contains(int64_t partition) const { return find(partition) != nullptr; }
  const std::vector<int64_t>& members(int group) const { return members_[group]; }
  int size(int group) const { return static_cast<int>(members_[group].size()); }
  bool is_local(int group, int rank) const { return is_local_[group][rank]; }
  int num_local(int group) const { return num_local_[group]; }
  int num_local() const { return std::accumulate(num_local_.begin(), num_local_.end(), 0); }
  int num_groups() const { return static_cast<int>(members_.size()); }

 private:
  const Place* find(int64_t partition) const;  // null if no group contains it

  std::vector<std::vector<int64_t>> members_;
  std::vector<std::vector<bool>> is_local_;        // by group, then rank
  std::vector<int> num_local_;                     // by group
  std::vector<std::pair<int64_t, Place>> places_;  // of each partition, in ascending order
};

// The open rendezvous of one call site, for this process's ranks. A rank joins the oldest open rendezvous of its group
// and run that it has not joined yet. Its next call comes only after its last one completed, that is, after every rank
// had arrived there, so a loop has one open rendezvous at a time.
class RendezvousMap {
 public:
  // call: describes the call in error messages (axis, message, lines). Empty for a barrier at the end of a program.
  // Such a barrier fails with its execution, and has no deadline: a rank may arrive at any time.
  // Throws std::runtime_error if the completion threads cannot start.
  RendezvousMap(ReplicaGroups groups, std::string call);
  // Fails the open rendezvous.
  ~RendezvousMap();
  RendezvousMap(const RendezvousMap&) = delete;
  RendezvousMap& operator=(const RendezvousMap&) = delete;

  const ReplicaGroups& groups() const { return groups_; }

  // From now on records the calls in this memory, unless the call is null. Call it before the first arrival.
  void record(flight::RecordedCall* call, flight::Memory* memory) {
    recorded_ = call;
    memory_ = memory;
  }

  // Adds the participant to its rendezvous. Returns the rendezvous if this was the last rank of this process to arrive,
  // else null. The caller then owns the rendezvous and must complete every participant. Moves only `done`: the
  // participant's vectors stay with the caller for its next call. Throws std::invalid_argument if the participant has a
  // different number of operands from earlier ones, or is in another process.
  RendezvousPtr arrive(int64_t run_id, int64_t partition, Participant&& participant);

  // `arrive` for a group's only rank in this process: the rendezvous is complete at once. used: a cleared rendezvous,
  // for its memory; null if there is none.
  RendezvousPtr arrive_alone(int64_t run_id, int64_t partition, Participant&& participant, RendezvousPtr used);

  // Removes and returns the open rendezvous that satisfy the predicate.
  std::vector<RendezvousPtr> remove_if(const std::function<bool(const Rendezvous&)>& predicate);

  // Whether the partition has arrived in this rendezvous, which is or was in this map.
  bool has_arrived(const Rendezvous& rendezvous, int64_t partition) const;
  // Whether the partition waits in one of the run's open rendezvous.
  bool is_waiting(int64_t run_id, int64_t partition);
  // Adds the runs that have open rendezvous.
  void add_open_runs(std::set<int64_t>& runs);

  bool has_deadline() const { return !call_.empty(); }
  // Whether an open rendezvous satisfies the predicate.
  bool has_open(const std::function<bool(const Rendezvous&)>& predicate);
  // The execution of the latest arrival.
  int64_t latest_run();
  // Where its ranks wait, for other calls' error messages.
  std::string place() const;

  // The failure, with the ranks missing from the rendezvous in its text.
  // other_place: where else a partition waits; nullopt if unknown.
  using OtherPlace = std::function<std::optional<std::string>(int64_t partition)>;
  CallFailure failure_of_missing_ranks(const Rendezvous& rendezvous, std::chrono::duration<double> deadline,
                                       const OtherPlace& other_place) const;

 private:
  RendezvousPtr open(int64_t run_id, ReplicaGroups::Place place, size_t num_operands, RendezvousPtr used = nullptr);
  void add(Rendezvous& rendezvous, ReplicaGroups::Place place, Participant&& participant);
  static void record_arrival(Rendezvous& rendezvous, int rank, int num_local);

  const ReplicaGroups groups_;
  const std::string call_;
  flight::RecordedCall* recorded_ = nullptr;
  flight::Memory* memory_ = nullptr;
  const std::shared_ptr<RendezvousPool> pool_ = std::make_shared<RendezvousPool>();
  Mutex mutex_;
  std::vector<RendezvousPtr> open_;      // oldest first
  std::vector<WaitingPolicy> policies_;  // by group
  int64_t latest_run_ = -1;
};

}  // namespace jax_ring::cpu
