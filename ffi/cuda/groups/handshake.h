// handshake.h: the messages of a group's processes while they connect.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "cuda/groups/group.h"

namespace jax_ring::gpu {

// The processes connect in two phases. In each phase, each process reports its outcome to the others once.
enum class Phase {
  handles,    // its memory is allocated; the message holds the handles
  connected,  // it has mapped the memory of all others
};

// The messages of one process. All processes make the same attempts, numbered from 0. An attempt ends when a process
// reports an error in it. Every process that has not timed out receives that error in the same attempt, since a phase
// begins only when all have succeeded in the previous one; a process that has timed out receives it at its next try. A
// timeout ends no attempt: messages stay valid, and the process goes on from there when it tries again.
class Handshake {
 public:
  Handshake(std::string name, int64_t process, std::shared_ptr<const KeyValueStore> store);

  // Reports success to the others, unless already reported in this attempt.
  void tell(Phase phase, const std::vector<std::string>& items);

  // Reports to the others why this process failed in the phase, and ends the attempt. Does not throw.
  void tell_error(Phase phase, const std::string& error) noexcept;

  // Waits for a process. Throws std::runtime_error if it reports an error, which ends the attempt, or nothing in time.
  std::vector<std::string> ask(Phase phase, int64_t process);

 private:
  std::string key(Phase phase, int64_t process) const;
  void publish(const std::string& key, const std::string& value);
  [[noreturn]] void end_attempt(int64_t process, const std::string& message);

  const std::string name_;
  const int64_t process_;
  const std::shared_ptr<const KeyValueStore> store_;
  int64_t attempt_ = 0;
  std::set<Phase> told_;   // in this attempt
  std::string uncertain_;  // a key that the store may have although it reported an error
};

}  // namespace jax_ring::gpu
