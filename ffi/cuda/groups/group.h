// group.h: the members of a group of GPUs, and how its processes reach each other.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "device/memory/mailbox.h"

namespace jax_ring::gpu {

// A GPU of any process.
struct Member {
  int64_t process;
  int64_t device;  // its JAX id, unique among the GPUs of all processes
};

inline bool operator==(const Member& a, const Member& b) { return a.process == b.process && a.device == b.device; }
inline bool operator<(const Member& a, const Member& b) {
  return a.process != b.process ? a.process < b.process : a.device < b.device;
}

inline std::string name_of(const Member& member) {
  return "GPU " + std::to_string(member.device) + " of process " + std::to_string(member.process);
}

// A table of byte strings that all processes can read and write. They exchange memory handles in it.
struct KeyValueStore {
  std::function<void(const std::string& key, const std::string& value)> publish;
  std::function<std::string(const std::string& key)> fetch;  // blocks until the key exists, and throws after a deadline
};

// A group, as seen by one of its processes.
struct Group {
  std::vector<Member> members;  // by rank
  int64_t process;
  Capacity capacity;
  std::string name;                 // unique to the group, the same in all its processes
  std::map<int64_t, int> ordinals;  // CUDA ordinals of this process's GPUs, by id; empty if they equal the ids
  bool multicasts = false;          // whether its mailboxes have a multicast address; the same in all processes

  int num_ranks() const { return static_cast<int>(members.size()); }
  bool is_local(int rank) const { return members[rank].process == process; }
  // Throws std::out_of_range if the rank is not one of this process.
  int ordinal(int rank) const {
    const int64_t id = members[rank].device;
    return ordinals.empty() ? static_cast<int>(id) : ordinals.at(id);
  }
};

}  // namespace jax_ring::gpu
