// polling.h: waits a moment for another thread.
#pragma once

#include <sched.h>

#include <chrono>

#include "base/threads.h"

namespace jax_ring {

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Looks back to back, then one look per sched_yield().
constexpr int kSpins = 200;
constexpr int kYieldsPerClockRead = 8;

// Calls `stop` until it returns true, or for about `limit`. Returns whether it did. Threads without a core of their own
// run meanwhile; if `spins`, only after the first microseconds.
template <class Stop>
bool poll(std::chrono::nanoseconds limit, bool spins, Stop stop) {
  for (int i = 0; spins && i < kSpins; ++i) {
    if (stop()) return true;
    cpu_relax();
  }
  const auto end = SteadyClock::now() + limit;
  do {
    for (int i = 0; i < kYieldsPerClockRead; ++i) {
      if (stop()) return true;
      sched_yield();
    }
  } while (SteadyClock::now() < end);
  return false;
}

}  // namespace jax_ring
