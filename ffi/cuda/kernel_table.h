// kernel_table.h: the kernels of one element type, by algorithm.
#pragma once

#include "cuda/kernels.h"

namespace jax_ring::gpu {

constexpr int kThreadsPerCta = 512;

using Kernel = void (*)(Call only, const Call* calls);

struct KernelTable {
  Kernel by_algorithm[static_cast<int>(Algorithm::count)];
};

}  // namespace jax_ring::gpu
