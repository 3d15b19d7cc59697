// signal.h: the flags that signal progress between ranks, and the one function that waits for them.
#pragma once

#include <cstdint>

#include "device/memory/endpoint.h"
#include "device/memory/look.h"
#include "device/memory/memory.h"

#if !defined(__CUDACC__)
#include <sched.h>

#include <chrono>
#endif

namespace jax_ring {

// Whether a comes before b, for counters that wrap around.
JAX_RING_INLINE bool is_before(uint32_t a, uint32_t b) { return static_cast<int32_t>(a - b) < 0; }

// A flag identifies the call, and how far its writer is.
JAX_RING_INLINE uint64_t flag_value(uint32_t fingerprint, uint32_t epoch) {
  return static_cast<uint64_t>(fingerprint) << 32 | epoch;
}
JAX_RING_INLINE uint32_t epoch_of(uint64_t flag) { return static_cast<uint32_t>(flag); }

JAX_RING_TEAM uint64_t now_ns() {
#if defined(__CUDACC__)
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
#else
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
#endif
}

// Records a failure unless this rank has already failed: the first failure causes the later ones.
JAX_RING_TEAM_CALL void fail(const Endpoint& self, FailureKind kind, Step step, int peer, uint32_t epoch, int cta) {
  if (SystemAtomic<uint32_t>(*self.failed).exchange(1, cuda::memory_order_relaxed) != 0) return;
  Failure* record = self.failure;
  record->step = static_cast<uint32_t>(step);
  record->rank = self.rank;
  record->peer = peer;
  record->epoch = epoch;
  record->call = self.call;
  record->cta = static_cast<uint32_t>(cta);
  SystemAtomic<uint32_t>(record->kind).store(static_cast<uint32_t>(kind), cuda::memory_order_release);
}

// Reading the clock, or checking whether another team has failed, costs more than reading the flag.
#if defined(__CUDACC__)
constexpr uint32_t kSpinsPerCheck = 1024;
#else
constexpr uint32_t kSpinsPerCheck = 16;
#endif

// Waits until ready(). Returns false if the deadline passes, which is the fault of peer(), or if this rank fails
// meanwhile. Every wait for a peer is made here.
template <class Ready, class Peer>
JAX_RING_TEAM bool await(const Endpoint& self, Ready ready, Step step, Peer peer, uint32_t epoch, int cta) {
  uint64_t since = 0;
  for (uint32_t spins = 1; !poll(ready); ++spins) {
    if (spins % kSpinsPerCheck != 0) continue;
    if (SystemAtomic<uint32_t>(*self.failed).load(cuda::memory_order_relaxed) != 0) return false;
    const uint64_t now = now_ns();
    if (since == 0) since = now;
    if (now - since > self.deadline_ns) {
      fail(self, FailureKind::timeout, step, peer(), epoch, cta);
      return false;
    }
#if !defined(__CUDACC__)
    sched_yield();  // ranks may outnumber cores
#endif
  }
  return true;
}

// Waits until the peer's flag reaches this epoch, and checks that it belongs to the same call.
JAX_RING_TEAM bool await_epoch(const Endpoint& self, FlagKind kind, uint64_t expected, Step step, int peer, int cta) {
  uint64_t* flag = self.flag(self.rank, kind, cta, peer);
  uint64_t seen = 0;
  if (!await(
          self,
          [&] {
            seen = load_flag(flag);
            return epoch_of(seen) == epoch_of(expected);
          },
          step, [&] { return peer; }, epoch_of(expected), cta)) {
    return false;
  }
  if (seen == expected) return true;
  fail(self, FailureKind::mismatch, step, peer, epoch_of(expected), cta);
  return false;
}

}  // namespace jax_ring
