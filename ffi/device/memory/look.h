// look.h: one look at what a thread waits for. The model has a header of this name that takes the place of this one.
#pragma once

#include "device/memory/team.h"

namespace jax_ring {

// Returns ready(). The model waits here until it is true: a thread that looks in vain has learned nothing.
template <class Ready>
JAX_RING_TEAM bool poll(Ready& ready) {
  return ready();
}

}  // namespace jax_ring
