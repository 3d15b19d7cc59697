// futex.h: atomics shared between processes, and waits for a change. The model checker replaces this header by its own
// of the same name.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

#include "base/threads.h"

namespace jax_ring::shm {

static_assert(Atomic<uint32_t>::is_always_lock_free && sizeof(Atomic<uint32_t>) == 4);

// Sleeps while the word equals `seen`, until a wake or the timeout. May return spuriously.
inline void futex_wait(Atomic<uint32_t>& word, uint32_t seen, std::chrono::nanoseconds timeout) {
  timespec time;
  time.tv_sec = timeout.count() / 1'000'000'000;
  time.tv_nsec = timeout.count() % 1'000'000'000;
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &time, nullptr, 0);
}

// Wakes all threads that wait on the word.
inline void futex_wake(Atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace jax_ring::shm
