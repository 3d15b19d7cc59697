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

// The fold so far at kVectors neighbouring places, each a value or a vector of values.
template <class Element, class Lanes, int kVectors>
struct Partial {
  typename Lanes::template Of<typename Element::Accumulator> value[kVectors];

  // The accumulator starts as the first rank's value, not as zero, so that the sum of negative zeros stays negative.
  // load(v) gives the v-th value as stored.
  template <class Load>
  JAX_RING_INLINE void start(Load load) {
    for (int v = 0; v < kVectors; ++v) value[v] = Element::template widen<Lanes>(load(v));
  }

  template <class Op, class Load>
  JAX_RING_INLINE void add(Load load, Op op) {
    for (int v = 0; v < kVectors; ++v) value[v] = op(value[v], Element::template widen<Lanes>(load(v)));
  }

  // store(v, value) takes the result, rounded here and nowhere else.
  template <class Store>
  JAX_RING_INLINE void finish(Store store) const {
    for (int v = 0; v < kVectors; ++v) store(v, Element::template narrow<Lanes>(value[v]));
  }
};

// Folds the values of all ranks, in their order. load(rank, v) and store(v, value) are as in Partial.
template <class Element, class Op, class Lanes, int kVectors, class Load, class Store>
JAX_RING_INLINE void fold_ranks(int num_ranks, Load load, Store store, Op op) {
  Partial<Element, Lanes, kVectors> partial;
  partial.start([&](int v) JAX_RING_LAMBDA { return load(0, v); });
  for (int rank = 1; rank < num_ranks; ++rank) {
    partial.add([&](int v) JAX_RING_LAMBDA { return load(rank, v); }, op);
  }
  partial.finish(store);
}

}  // namespace jax_ring
