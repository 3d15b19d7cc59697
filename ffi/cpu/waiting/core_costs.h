// core_costs.h: what it costs cores to wait for each other, in which the benchmarks give the times of small calls.
#pragma once

#include <limits>

namespace jax_ring::cpu {

struct CoreCosts {
  // Seconds in which a cache line goes to another core and back; not a number where there is one core.
  double round_trip = std::numeric_limits<double>::quiet_NaN();
  // Seconds in which a core passes from one thread that polls and yields, as ranks do, to another.
  double context_switch = 0;
};

// Measures on the first and the last core that this thread may run on. Takes some tens of milliseconds.
CoreCosts core_costs();

}  // namespace jax_ring::cpu
