// shared_memory.h: the memory of a group of processes, in POSIX shared memory without a name as soon as all have it.
#pragma once

#include <cstddef>
#include <string>

#include "shm/communicator.h"

namespace jax_ring::shm {

// Maps `bytes` zeroed bytes that the processes of a group share; with `first` it creates them, for the user's own
// processes alone. Returns when it is mapped here, and the one that is last to map it takes the name away, so that
// nothing is left behind however the processes end.
//
// name: as of shm_open, and secret enough that nobody else comes to use it.
// Throws std::runtime_error, with the reason, when there is no room, when the first process has not created it within
// `deadline_seconds`, or when stop() turns true.
Memory map_shared(const std::string& name, size_t bytes, bool first, int num_processes, double deadline_seconds,
                  const Communicator::Stop& stop);

}  // namespace jax_ring::shm
