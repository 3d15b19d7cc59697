// shared_memory.h: maps POSIX shared memory for a group of processes, and unlinks its name once all have mapped it.
#pragma once

#include <cstddef>
#include <string>

#include "shm/communicator.h"

namespace jax_ring::shm {

// Maps `bytes` zeroed bytes that the processes of a group share. With `first` it creates them, accessible to this user
// only. The last process to map the memory unlinks the name, so that nothing is left behind however the processes exit.
//
// name: for shm_open; secret enough that no other program uses it.
// Throws std::runtime_error, with the reason, if there is no space, if the first process has not created the memory
// within `deadline_seconds`, or when stop() becomes true.
Memory map_shared(const std::string& name, size_t bytes, bool first, int num_processes, double deadline_seconds,
                  const Communicator::Stop& stop);

}  // namespace jax_ring::shm
