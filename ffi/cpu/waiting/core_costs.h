// core_costs.h: the cost of waiting between cores, the benchmarks' unit for the times of small calls.
#pragma once

#include <limits>

namespace jax_ring::cpu {

struct CoreCosts {
  // Seconds for a cache line to go to another core and back; NaN with a single core.
  double round_trip = std::numeric_limits<double>::quiet_NaN();
  // Seconds for a core to switch from one polling and yielding thread to another, as between ranks.
  double context_switch = 0;
};

// Measures on the first and the last core that this thread may run on. Takes some tens of milliseconds.
CoreCosts core_costs();

}  // namespace jax_ring::cpu
