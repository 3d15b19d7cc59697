// fold_limit.h: the time of a bare fold, which the benchmarks report as the limit set by memory bandwidth.
#pragma once

#include <cstddef>

namespace jax_ring::cpu {

// Seconds that plain threads need to fold `num_ranks` float32 buffers of `num_bytes` each into as many others, with
// equal shares, no rendezvous and no runtime. The minimum over `repeats`, for both ordinary and streaming stores.
double fold_limit_seconds(int num_ranks, size_t num_bytes, int num_threads, int repeats);

}  // namespace jax_ring::cpu
