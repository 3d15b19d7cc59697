// communicator.h: a group of GPUs that reduce together: their mailboxes, peer access, and failures.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cuda/peer_memory.h"
#include "ring/capacity.h"
#include "ring/endpoint.h"

namespace jax_ring::gpu {

// A GPU of any process.
struct Member {
  int64_t process;
  int64_t device;  // index among the GPUs of its process
};

inline bool operator==(const Member& a, const Member& b) { return a.process == b.process && a.device == b.device; }
inline bool operator<(const Member& a, const Member& b) {
  return a.process != b.process ? a.process < b.process : a.device < b.device;
}

// A table of byte strings that all processes can read and write, by which they exchange memory handles.
struct KeyValueStore {
  std::function<void(const std::string& key, const std::string& value)> publish;
  std::function<std::string(const std::string& key)> fetch;  // blocks until the key exists
};

// Calls in different lanes have separate mailboxes, so that independent calls may run concurrently.
constexpr int kLanes = 4;

using jax_ring::default_capacity;

// This process's side of a group. It owns the mailboxes of this process's GPUs.
class Communicator {
 public:
  // members: by rank. name: unique to the group, and the same in all of its processes.
  // Throws std::runtime_error if members cannot access each other's memory, or a process does not publish its handles.
  Communicator(std::vector<Member> members, int64_t process, const Capacity& capacity, const std::string& name,
               PeerMemory& memory, const KeyValueStore& store);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int num_ranks() const { return static_cast<int>(members_.size()); }
  const Capacity& capacity() const { return capacity_; }
  const std::vector<int>& local_ranks() const { return local_ranks_; }

  // The rank of a GPU of this process, if it is a member.
  std::optional<int> rank_of(int64_t device) const;

  // The kernel's view of the group, for a rank of this process. call: stored in the record of a failure.
  Endpoint endpoint(int rank, int lane, uint32_t call, double deadline_seconds) const;

  // The first failure of a rank of this process, if any. After a failure the ranks' counters disagree, and the group
  // cannot be used again.
  std::optional<Failure> failure() const;

  // The failure as text. call: description of `failure.call`.
  std::string describe(const Failure& failure, const std::string& call, double deadline_seconds) const;

 private:
  // What a rank of this process owns.
  struct LocalRank {
    std::vector<unsigned char*> mailboxes;  // of all ranks, at the addresses where this rank maps them
    unsigned char* counters = nullptr;  // Progress for each lane and team, then one word: whether the rank has failed
    Failure* failure = nullptr;
  };

  void connect(const std::string& name, const KeyValueStore& store);
  void release() noexcept;

  const std::vector<Member> members_;
  const int64_t process_;
  const Capacity capacity_;
  PeerMemory& memory_;
  std::vector<int> local_ranks_;
  std::map<int, LocalRank> local_;  // by rank
};

}  // namespace jax_ring::gpu
