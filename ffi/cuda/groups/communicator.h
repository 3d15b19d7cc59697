// communicator.h: a group of GPUs that reduce together: its members, its lanes and its failures.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/call_failure.h"
#include "cuda/groups/connection.h"
#include "cuda/groups/group.h"
#include "cuda/runtime/peer_memory.h"
#include "device/memory/capacity.h"
#include "device/memory/endpoint.h"

namespace jax_ring::gpu {

// Calls in different lanes have separate mailboxes, so that independent calls may run concurrently.
constexpr int kLanes = 4;

using jax_ring::default_capacity;

// This process's side of a group. A lane takes memory once it is connected.
class Communicator {
 public:
  // members: by rank. name: unique to the group, and the same in all its processes. store: not needed if all members
  // belong to this process. ordinals: the CUDA ordinals of this process's members, by id; empty if they equal the ids.
  // multicasts: whether the mailboxes have a multicast address; if so, the group does not connect without one.
  // Throws std::runtime_error if the members are not a group. Touches no GPU and no store.
  Communicator(std::vector<Member> members, int64_t process, const Capacity& capacity, const std::string& name,
               PeerMemory& memory, std::shared_ptr<const KeyValueStore> store, std::map<int64_t, int> ordinals = {},
               bool multicasts = false);
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int num_ranks() const { return group_.num_ranks(); }
  const Capacity& capacity() const { return group_.capacity; }
  const std::vector<Member>& members() const { return group_.members; }
  const std::vector<int>& local_ranks() const { return local_ranks_; }
  bool is_in_one_process() const { return static_cast<int>(local_ranks_.size()) == num_ranks(); }

  // The rank of this process's GPU with this CUDA ordinal, if it is a member.
  std::optional<int> rank_of(int ordinal) const;

  // As in Connection.
  void connect(int lane, double deadline_seconds) { lanes_[lane]->connect(deadline_seconds); }
  bool is_connected(int lane) const { return lanes_[lane]->is_connected(); }

  // The kernel's view of the group, for a rank of this process, in a connected lane. call: stored in the record of a
  // failure.
  Endpoint endpoint(int rank, int lane, uint32_t call, double deadline_seconds) const {
    return lanes_[lane]->endpoint(rank, call, deadline_seconds);
  }

  // Text of a call for errors, by the number in the endpoints.
  void name_call(uint32_t call, const std::string& text);

  // The first failure of any of this process's ranks in any lane. After a failure the ranks' counters disagree, and the
  // group cannot be used again. May be called at any time.
  std::optional<Failure> failure() const;

  // The failure as text. call: describes `failure.call`.
  std::string describe(const Failure& failure, const std::string& call, double deadline_seconds) const;

  // The first failure, with the text of a named call; null if there is none. The same each time.
  CallFailurePtr call_failure(double deadline_seconds);
  // True only the first time.
  bool should_report() { return !reported_.exchange(true); }

  // Closes all lanes: see Connection. Launch no call from then on.
  void retire() noexcept;
  bool is_retired() const { return retired_.load(std::memory_order_acquire); }
  void free_all() noexcept;

 private:
  const Group group_;
  std::vector<int> local_ranks_;
  std::array<std::unique_ptr<Connection>, kLanes> lanes_;
  std::atomic<bool> retired_{false}, reported_{false};
  std::mutex mutex_;
  std::map<uint32_t, std::string> calls_;
  CallFailurePtr failed_;
};

}  // namespace jax_ring::gpu
