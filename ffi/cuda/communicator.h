// communicator.h: a group of GPUs that reduce together: their mailboxes, who reaches whom, and what went wrong.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cuda/peer_memory.h"
#include "ring/endpoint.h"

namespace jax_ring::gpu {

// A GPU among those of all processes.
struct Member {
  int64_t process;
  int64_t device;  // among those of its process
};

inline bool operator==(const Member& a, const Member& b) { return a.process == b.process && a.device == b.device; }
inline bool operator<(const Member& a, const Member& b) {
  return a.process != b.process ? a.process < b.process : a.device < b.device;
}

// How processes find each other: a table of byte strings that all of them can write and read.
struct KeyValueStore {
  std::function<void(const std::string& key, const std::string& value)> publish;
  std::function<std::string(const std::string& key)> fetch;  // waits until it is there
};

// Calls that may be under way at a time without knowing of each other, because they come in different lanes.
constexpr int kLanes = 4;

// The sizes of a mailbox for a group of this many ranks.
Capacity default_capacity(int num_ranks);

// The shares of this process in a group. Its GPUs keep their mailboxes as long as it lives.
class Communicator {
 public:
  // members: by rank. name: unique to the group, and the same in all of its processes.
  // Throws std::runtime_error if the members cannot reach each other's memory, or do not answer.
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

  // What the kernel of a rank of this process is told. call: comes back in the record of a failure.
  Endpoint endpoint(int rank, int lane, uint32_t call, double deadline_seconds) const;

  // The first failure of a rank of this process, if there was one. A group in which a rank has failed has lost count of
  // its messages, and cannot be used again.
  std::optional<Failure> failure() const;

  // The failure in words. call: what `failure.call` stands for.
  std::string describe(const Failure& failure, const std::string& call, double deadline_seconds) const;

 private:
  // What a rank of this process owns.
  struct LocalRank {
    std::vector<unsigned char*> mailboxes;  // everybody's, as this rank sees them
    unsigned char* counters = nullptr;      // Progress for each lane and team, then one word: whether it has failed
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
