// watch.h: where a model of memory watches the protocols. Here, it does nothing.
//
// The model has a header of this name that takes the place of this one; see model/checker/checker.h.
#pragma once

#include <cstdint>

#include "collective/element.h"

namespace jax_ring {

// A plain access to memory that other threads may access as well.
JAX_RING_INLINE void watch_read(const void*, uint64_t) {}
JAX_RING_INLINE void watch_write(const void*, uint64_t) {}

}  // namespace jax_ring
