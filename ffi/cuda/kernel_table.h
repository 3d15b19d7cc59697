// kernel_table.h: the kernels of one element type.
#pragma once

#include "cuda/kernels.h"

namespace jax_ring::gpu {

constexpr int kThreadsPerCta = 512;

using Kernel = void (*)(Call single, const Call* calls);

// By operation and algorithm; null where the combination is not used.
struct KernelTable {
  Kernel kernel[static_cast<int>(Op::count)][static_cast<int>(Algorithm::count)];
};

}  // namespace jax_ring::gpu
