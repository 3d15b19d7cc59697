// fold_limit.h: the time of a bare fold, which the benchmarks report as the limit of an all-reduce.
#pragma once

#include <cstddef>

#include "collective/fold.h"

namespace jax_ring::cpu {

// Seconds that plain threads need to sum `num_ranks` buffers of `num_bytes` each in place: every byte is read once and
// written once, by the kernel of this dtype. The threads have equal shares. The minimum over `repeats`.
//
// What an all-reduce in a compiled program takes beyond this is for arriving, waking threads and completing. It is a
// limit of the kernel as well as of the memory: no all-reduce with this kernel is faster.
double fold_limit_seconds(int num_ranks, size_t num_bytes, int num_threads, int repeats, DType dtype);

}  // namespace jax_ring::cpu
