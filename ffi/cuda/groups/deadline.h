// deadline.h: seconds as durations.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace jax_ring::gpu {

// A user may ask for more seconds than a clock can count, to mean no deadline.
inline std::chrono::nanoseconds duration_of(double seconds) {
  constexpr double kCentury = 3e9;
  return std::chrono::nanoseconds(static_cast<int64_t>(std::min(seconds, kCentury) * 1e9));
}

}  // namespace jax_ring::gpu
