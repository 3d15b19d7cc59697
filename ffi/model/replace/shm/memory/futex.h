// futex.h: replaces shm/memory/futex.h in the model. A wait has no timeout: whoever needs one is in a deadlock.
#pragma once

#include <chrono>
#include <cstdint>

#include "base/threads.h"
#include "model/checker/futex.h"

namespace jax_ring::shm {

inline void futex_wait(Atomic<uint32_t>& word, uint32_t seen, std::chrono::nanoseconds) {
  model::futex_wait(&word, seen);
}
inline void futex_wake(Atomic<uint32_t>& word) { model::futex_wake(&word); }

}  // namespace jax_ring::shm
