// fold.h: what a reduction computes: the fold over ranks in a wide accumulator, rounded once.
#pragma once

#include <type_traits>

#include "ring/element.h"

namespace jax_ring {

// The element types that the engine reads. Adding a type is a line here.
#define JAX_RING_FOR_EACH_DTYPE(X)    \
  X(s8, Native<int8_t>)               \
  X(s16, Native<int16_t>)             \
  X(s32, Native<int32_t>)             \
  X(s64, Native<int64_t>)             \
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

// The operations, which take two values or two vectors of values.
#define JAX_RING_FOR_EACH_OP(X) \
  X(sum, Sum)                   \
  X(max, Max)                   \
  X(min, Min)

enum class Op : int {
#define JAX_RING_ENUMERATE(name, op) name,
  JAX_RING_FOR_EACH_OP(JAX_RING_ENUMERATE)
#undef JAX_RING_ENUMERATE
      count
};

// Whether A is a floating-point number or a vector of them.
template <class A, class = void>
struct IsFloating : std::is_floating_point<A> {};
template <class A>
struct IsFloating<A, std::void_t<decltype(A{}[0])>> : std::is_floating_point<std::decay_t<decltype(A{}[0])>> {};

struct Sum {
  template <class A>
  JAX_RING_INLINE A operator()(A a, A b) const {
    return static_cast<A>(a + b);
  }
};

// The larger and the smaller of two. For floats these are maximum and minimum of IEEE 754-2019, as XLA's are where it
// computes one element from two: NaN if either is NaN, and -0 is smaller than +0.
struct Max {
  template <class A>
  JAX_RING_INLINE A operator()(A a, A b) const {
    const A larger = a > b ? a : b;  // b if that is NaN
    if constexpr (IsFloating<A>::value) {
      const A equal = a == A{} ? a + b : a;  // -0 only if both are
      return a != a ? a : (a == b ? equal : larger);
    } else {
      return larger;
    }
  }
};

struct Min {
  template <class A>
  JAX_RING_INLINE A operator()(A a, A b) const {
    const A smaller = a < b ? a : b;
    if constexpr (IsFloating<A>::value) {
      const A equal = a == A{} ? -(-a - b) : a;  // +0 only if both are
      return a != a ? a : (a == b ? equal : smaller);
    } else {
      return smaller;
    }
  }
};

// The element type that an operation works on: sums of signed integers are those of unsigned ones, which have the same
// bits, since wrapping is then defined.
template <class Element, class Op>
struct FoldedAs {
  using type = Element;
};
template <class T>
struct FoldedAs<Native<T>, Sum> {
  using type =
      Native<typename std::conditional_t<std::is_integral_v<T>, std::make_unsigned<T>, std::common_type<T>>::type>;
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
