// watch.h: where a model of memory watches the protocols. Here, it does nothing.
//
// The model has a header of this name that takes the place of this one; see model/checker.h.
#pragma once

#include <cstdint>

#include "ring/element.h"
#include "ring/team.h"

namespace jax_ring {

// A plain access to memory that other threads may access as well.
JAX_RING_INLINE void watch_read(const void*, uint64_t) {}
JAX_RING_INLINE void watch_write(const void*, uint64_t) {}

// One look at what a thread waits for. The model waits here until ready(): a thread that looks in vain has learned
// nothing.
template <class Ready>
JAX_RING_TEAM bool poll(Ready& ready) {
  return ready();
}

}  // namespace jax_ring
