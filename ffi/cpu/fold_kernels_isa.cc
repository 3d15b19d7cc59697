// fold_kernels_isa.cc: the fold kernels, compiled once for each instruction set (JAX_RING_ISA names it).
// Only this file gets special compiler flags, and it includes nothing that could emit shared inline code.
#include "cpu/fold_kernels.h"

namespace jax_ring::cpu {
namespace {

// Elements of one tile: the accumulators stay in the L1 cache while p inputs pass by.
constexpr int kTileElements = 1024;

template <class Element, class Op>
void fold(const void* const* inputs, void* const* outputs, int num_ranks, size_t begin, size_t count) {
  using Storage = typename Element::Storage;
  alignas(64) typename Element::Accumulator accumulator[kTileElements];
  alignas(64) Storage result[kTileElements];
  const size_t end = begin + count;
  for (size_t tile_begin = begin; tile_begin < end; tile_begin += kTileElements) {
    const int n = end - tile_begin < kTileElements ? static_cast<int>(end - tile_begin) : kTileElements;
    fold_tile<Element>(
        accumulator, [&](int rank) { return static_cast<const Storage*>(inputs[rank]) + tile_begin; }, num_ranks, n,
        Op{});
    for (int i = 0; i < n; ++i) result[i] = Element::narrow(accumulator[i]);
    for (int rank = 0; rank < num_ranks; ++rank) {
      __builtin_memcpy(static_cast<Storage*>(outputs[rank]) + tile_begin, result, n * sizeof(Storage));
    }
  }
}

}  // namespace

#define JAX_RING_CONCAT_(a, b) a##b
#define JAX_RING_CONCAT(a, b) JAX_RING_CONCAT_(a, b)
#define JAX_RING_STRING_(a) #a
#define JAX_RING_STRING(a) JAX_RING_STRING_(a)

extern const FoldKernels JAX_RING_CONCAT(fold_kernels_, JAX_RING_ISA);
const FoldKernels JAX_RING_CONCAT(fold_kernels_, JAX_RING_ISA) = {
    JAX_RING_STRING(JAX_RING_ISA),
    {
#define JAX_RING_KERNEL(name, element) &fold<element, Sum>,
        JAX_RING_FOR_EACH_DTYPE(JAX_RING_KERNEL)
#undef JAX_RING_KERNEL
    },
};

}  // namespace jax_ring::cpu
