// polling.h: replaces base/polling.h in the model. The time may be over after any look.
#pragma once

#include <chrono>

namespace jax_ring {

template <class Stop>
bool poll(std::chrono::nanoseconds, bool, Stop stop) {
  return stop() || stop();
}

}  // namespace jax_ring
