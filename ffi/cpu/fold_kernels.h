// fold_kernels.h: the fold of p host buffers into p host buffers, for the widest instruction set of this CPU.
#pragma once

#include <cstddef>

#include "ring/fold.h"

namespace jax_ring::cpu {

// Folds elements [begin, begin + count) of inputs[0..num_ranks) and writes the result to the same elements of
// every outputs[r]. An output may be the same buffer as an input of the same rank. With `past_cache` the results are
// written around the caches, if the CPU can; every outputs[r] + begin must then be aligned to 64 bytes.
using FoldKernel = void (*)(const void* const* inputs, void* const* outputs, int num_ranks, size_t begin, size_t count,
                            bool past_cache);

// One kernel for each DType, in its order.
struct FoldKernels {
  const char* instruction_set;
  FoldKernel sum[static_cast<int>(DType::count)];
};

// The kernels for this machine, chosen once. JAX_RING_ISA (baseline, avx2, avx512) asks for a smaller set.
const FoldKernels& fold_kernels();

// Bytes of one element.
size_t element_size(DType dtype);

}  // namespace jax_ring::cpu
