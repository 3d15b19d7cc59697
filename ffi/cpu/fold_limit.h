// fold_limit.h: what the machine's memory allows, as the yardstick of the benchmark.
#pragma once

#include <cstddef>

namespace jax_ring::cpu {

// Seconds that plain threads need to fold `num_ranks` float32 buffers of `num_bytes` each into as many others, each
// thread taking an equal part: no rendezvous, no runtime. The least over `repeats`, of ordinary and streaming stores.
double fold_limit_seconds(int num_ranks, size_t num_bytes, int num_threads, int repeats);

}  // namespace jax_ring::cpu
