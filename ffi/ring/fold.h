// fold.h: what a reduction computes: the fold over ranks 0, 1, ..., p-1 in a wide accumulator, rounded once.
#pragma once

#include "ring/element.h"

namespace jax_ring {

// The element types that the engine reads. Adding a type is a line here.
#define JAX_RING_FOR_EACH_DTYPE(X)    \
  X(u8, Native<uint8_t>)              \
  X(u16, Native<uint16_t>)            \
  X(u32, Native<uint32_t>)            \
  X(u64, Native<uint64_t>)            \
  X(f16, Float16)                     \
  X(bf16, BFloat16)                   \
  X(f32, Native<float>)               \
  X(f64, Native<double>)              \
  X(f8e5m2, Float8E5M2)               \
  X(f8e4m3, Float8E4M3)               \
  X(f8e3m4, Float8E3M4)               \
  X(f8e4m3fn, Float8E4M3FN)           \
  X(f8e4m3b11fnuz, Float8E4M3B11FNUZ) \
  X(f8e4m3fnuz, Float8E4M3FNUZ)       \
  X(f8e5m2fnuz, Float8E5M2FNUZ)

enum class DType : int {
#define JAX_RING_ENUMERATE(name, element) name,
  JAX_RING_FOR_EACH_DTYPE(JAX_RING_ENUMERATE)
#undef JAX_RING_ENUMERATE
      count
};

struct Sum {
  template <class A>
  JAX_RING_INLINE A operator()(A a, A b) const {
    return static_cast<A>(a + b);
  }
};

// Folds the values of all ranks at one place, or at kVectors neighbouring places, each a value or a vector of values.
// load(rank, v) gives rank's v-th value as stored, and store(v, value) takes the result. The accumulator starts as
// rank 0's value, not as zero, so that the sum of negative zeros stays negative.
template <class Element, class Op, class Lanes, int kVectors, class Load, class Store>
JAX_RING_INLINE void fold_ranks(int num_ranks, Load load, Store store, Op op) {
  typename Lanes::template Of<typename Element::Accumulator> accumulator[kVectors];
  for (int v = 0; v < kVectors; ++v) accumulator[v] = Element::template widen<Lanes>(load(0, v));
  for (int rank = 1; rank < num_ranks; ++rank) {
    for (int v = 0; v < kVectors; ++v) {
      accumulator[v] = op(accumulator[v], Element::template widen<Lanes>(load(rank, v)));
    }
  }
  for (int v = 0; v < kVectors; ++v) store(v, Element::template narrow<Lanes>(accumulator[v]));
}

}  // namespace jax_ring
