// fold_limit.h: the time of a bare fold, reported by the benchmarks as the limit of an all-reduce.
#pragma once

#include <cstddef>

#include "collective/fold.h"

namespace jax_ring::cpu {

// Seconds in which plain threads sum `num_ranks` buffers of `num_bytes` each in place: the kernel of this dtype reads
// every byte once and writes it once. The threads have equal shares. The minimum over `repeats`.
//
// An all-reduce in a compiled program takes longer: ranks arrive, threads wake, calls complete. The limit is the
// kernel's as well as the memory's: no all-reduce with this kernel is faster.
double fold_limit_seconds(int num_ranks, size_t num_bytes, int num_threads, int repeats, DType dtype);

}  // namespace jax_ring::cpu
