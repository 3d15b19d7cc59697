// look.h: one look at an awaited condition. The model replaces this header by its own of the same name.
#pragma once

#include "device/memory/team.h"

namespace jax_ring {

// Returns ready(). The model waits here until it is true, because a vain look teaches a thread nothing.
template <class Ready>
JAX_RING_TEAM bool poll(Ready& ready) {
  return ready();
}

}  // namespace jax_ring
