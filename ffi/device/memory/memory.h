// memory.h: reads and writes of shared memory between ranks: flags, lines and packs.
//
// Every access to a mailbox goes through these functions, so that a model of memory can replace them.
#pragma once

#include <cstdint>
#include <cuda/atomic>

#include "collective/watch.h"
#include "device/memory/endpoint.h"

namespace jax_ring {

// The protocols use libcu++, which has one set of atomics for host and device.
template <class T>
using SystemAtomic = cuda::atomic_ref<T, cuda::thread_scope_system>;

// For state used only by the kernels of one rank, in its own memory: this costs less.
template <class T>
using DeviceAtomic = cuda::atomic_ref<T, cuda::thread_scope_device>;

// Takes a lane for one call at a time, and returns Progress::turn as it was: busy if another call has the lane. The
// next holder sees all that the previous one did, if both are `ordered`.
JAX_RING_TEAM uint64_t take(uint64_t* turn, bool ordered) {
  return DeviceAtomic<uint64_t>(*turn).fetch_or(Progress::kBusy,
                                                ordered ? cuda::memory_order_acquire : cuda::memory_order_relaxed);
}
// The inverse, `ordered`, with the epoch that the lane has.
JAX_RING_TEAM void give_back(uint64_t* turn) {
  DeviceAtomic<uint64_t>(*turn).fetch_and(~Progress::kBusy, cuda::memory_order_release);
}
// Gives the turn back without order, with this epoch.
JAX_RING_TEAM void give_back(uint64_t* turn, uint32_t epoch) {
  DeviceAtomic<uint64_t>(*turn).store(epoch, cuda::memory_order_relaxed);
}

// Sets a flag with release semantics. A rank that sees it also sees all earlier writes of this thread, and all writes
// of its team that this thread had seen.
JAX_RING_TEAM void post_flag(uint64_t* flag, uint64_t value) {
  SystemAtomic<uint64_t>(*flag).store(value, cuda::memory_order_release);
}
JAX_RING_TEAM uint64_t load_flag(uint64_t* flag) {
  return SystemAtomic<uint64_t>(*flag).load(cuda::memory_order_acquire);
}

JAX_RING_TEAM void store_line(Line* to, Line line) {
#if defined(__CUDACC__)
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(line.word[0]), "l"(line.word[1])
               : "memory");
#else
  for (int i = 0; i < 2; ++i) SystemAtomic<uint64_t>(to->word[i]).store(line.word[i], cuda::memory_order_relaxed);
#endif
}

// The line at from[kOffset]. An offset in the instruction saves an address register.
template <int kOffset = 0>
JAX_RING_TEAM Line load_line(Line* from) {
  Line line;
#if defined(__CUDACC__)
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2 + %3];"
               : "=l"(line.word[0]), "=l"(line.word[1])
               : "l"(from), "n"(kOffset * sizeof(Line))
               : "memory");
#else
  for (int i = 0; i < 2; ++i)
    line.word[i] = SystemAtomic<uint64_t>(from[kOffset].word[i]).load(cuda::memory_order_relaxed);
#endif
  return line;
}

// Packs in a mailbox. Plain accesses: a flag orders them.
JAX_RING_TEAM Pack read_pack(const Pack* from) {
  watch_read(from, sizeof(*from));
  return *from;
}
JAX_RING_TEAM void write_pack(Pack* to, Pack pack) {
  watch_write(to, sizeof(*to));
  *to = pack;
}

// A word of a mailbox. Like packs, it is ordered by a flag.
JAX_RING_TEAM uint64_t read_word(const uint64_t* from) {
  watch_read(from, sizeof(*from));
  return *from;
}
JAX_RING_TEAM void write_word(uint64_t* to, uint64_t word) {
  watch_write(to, sizeof(*to));
  *to = word;
}

}  // namespace jax_ring
