// segments.h: the source of a group's memory, as its channel and communicator see it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "base/call_failure.h"

namespace jax_ring::shm {

using Memory = std::shared_ptr<unsigned char>;  // unmapped with its last owner

// One process's access to the shared memory of its group: a first segment, and larger ones later. All are zeroed.
class Segments {
 public:
  using Stop = std::function<bool()>;

  virtual ~Segments() = default;

  // Maps the first segment, after the group's first process, the leader, has created it. Throws CallError if that
  // fails, and when stop() becomes true. By then the other processes have been told.
  virtual Memory connect(size_t bytes, const Stop& stop) = 0;

  // For the leader: creates a larger segment. Null if there is no room.
  virtual Memory create(uint32_t number, size_t bytes) = 0;
  // For the others: maps a segment of the leader. Null if this process cannot.
  virtual Memory open(uint32_t number, size_t bytes) = 0;
  // Ends new mappings of the segment. Called by the leader, or by any process when the group is aborted.
  virtual void unlink(uint32_t number) = 0;

  // Why another process could not map the first segment; nullopt if it reported nothing.
  virtual std::optional<CallFailure> failure_of(int process) = 0;
  // After connect() has thrown: leaves nothing behind. Waits until the others have been told, up to the deadline.
  virtual void clean_up(const Stop& stop) = 0;
};

}  // namespace jax_ring::shm
