// names.h: the names of a group's shared memory, and of the notes beside it.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/siphash.h"

namespace jax_ring::shm {

// All users of a machine see the names in /dev/shm, and can take a free one, so that its owner cannot. So every name
// ends in a hash under the job's key: from those that they see, they cannot work out another.
class Names {
 public:
  // label: the beginning of all names of the job, for whoever cleans up. group: what tells the group from others of the
  // job.
  Names(std::string label, std::string_view key, std::vector<int64_t> group)
      : label_(std::move(label)), hash_(key), group_(std::move(group)) {}

  // Of a segment, for shm_open; 0 is the first one.
  std::string segment(uint32_t number) const { return name(0, number, 0); }
  // Of one process's note to another.
  std::string note(int from, int to) const { return name(1, from, to); }

 private:
  std::string name(int64_t kind, int64_t number, int64_t to) const {
    std::vector<int64_t> what{kind, number, to};
    what.insert(what.end(), group_.begin(), group_.end());
    const uint64_t hash = hash_({reinterpret_cast<const char*>(what.data()), what.size() * sizeof(int64_t)});
    char digits[17];
    std::snprintf(digits, sizeof(digits), "%016llx", static_cast<unsigned long long>(hash));
    return "/jax_ring-" + label_ + "-" + digits;
  }

  std::string label_;
  SipHash hash_;
  std::vector<int64_t> group_;
};

}  // namespace jax_ring::shm
