// watch.h: the hook through which a model of memory watches the protocols. This version does nothing.
//
// The model replaces this header by its own of the same name; see model/checker/checker.h.
#pragma once

#include <cstdint>

#include "collective/element.h"

namespace jax_ring {

// A plain access to memory that other threads may access as well.
JAX_RING_INLINE void watch_read(const void*, uint64_t) {}
JAX_RING_INLINE void watch_write(const void*, uint64_t) {}

}  // namespace jax_ring
