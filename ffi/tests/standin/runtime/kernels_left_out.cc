// kernels_left_out.cc: empty tables for element types that the stand-in skips to save time.
#include "cuda/kernels/kernel_table.h"

namespace jax_ring::gpu {

// Weak, so that kernels.cc's tables replace them.
#define JAX_RING_LEFT_OUT(name, element)                         \
  extern __attribute__((weak)) const KernelTable kernels_##name; \
  const KernelTable kernels_##name = {};
JAX_RING_FOR_EACH_DTYPE(JAX_RING_LEFT_OUT)
#undef JAX_RING_LEFT_OUT

}  // namespace jax_ring::gpu
