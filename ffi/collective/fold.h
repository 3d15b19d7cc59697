// fold.h: the arithmetic of a reduction: a fold over ranks, or along a tree, in a wide accumulator, rounded once.
#pragma once

#include <type_traits>

#include "collective/element.h"

namespace jax_ring {

// The element types of the engine. Adding a type is one line here.
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

// The operations, on two values or two vectors.
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

// Maximum and minimum. For floats these are the maximum and minimum of IEEE 754-2019, as in XLA's elementwise
// operations: NaN if either is NaN, and -0 is smaller than +0.
struct Max {
  template <class A>
  JAX_RING_INLINE A operator()(A a, A b) const {
    const A larger = a > b ? a : b;  // b if b is NaN
    if constexpr (IsFloating<A>::value) {
      const A equal = a == A{} ? a + b : a;  // -0 only if both are -0
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
      const A equal = a == A{} ? -(-a - b) : a;  // +0 only if both are +0
      return a != a ? a : (a == b ? equal : smaller);
    } else {
      return smaller;
    }
  }
};

// The element type for the arithmetic. Sums of signed integers use the unsigned type: the bits are the same, and
// overflow is defined.
template <class Element, class Op>
struct FoldedAs {
  using type = Element;
};
template <class T>
struct FoldedAs<Native<T>, Sum> {
  using type =
      Native<typename std::conditional_t<std::is_integral_v<T>, std::make_unsigned<T>, std::common_type<T>>::type>;
};

// A partial fold at kVectors neighboring places, each a value or a vector of values.
template <class Element, class Lanes, int kVectors>
struct Partial {
  typename Lanes::template Of<typename Element::Accumulator> value[kVectors];

  // The accumulator starts with the first rank's value, not with zero, so that a sum of negative zeros stays negative.
  // load(v) returns the v-th value as stored.
  template <class Load>
  JAX_RING_INLINE void start(Load load) {
    for (int v = 0; v < kVectors; ++v) value[v] = Element::template widen<Lanes>(load(v));
  }

  template <class Op, class Load>
  JAX_RING_INLINE void add(Load load, Op op) {
    for (int v = 0; v < kVectors; ++v) value[v] = op(value[v], Element::template widen<Lanes>(load(v)));
  }

  // Adds a partial fold of the terms that follow.
  template <class Op>
  JAX_RING_INLINE void merge(const Partial& next, Op op) {
    for (int v = 0; v < kVectors; ++v) value[v] = op(value[v], next.value[v]);
  }

  // store(v, value) receives the result, rounded here and nowhere else.
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

// One step of a fold along a tree, for a machine with a stack of partial folds. It folds the next terms, the leaves of
// a perfect binary tree, pushes the result, and then merges the two topmost partial folds `merges` times.
struct Subtree {
  int num_terms;  // 1, 2, 4 or 8
  int merges;
};

// A fold of 8 terms has 3 partial folds at a time, which fit the registers of every instruction set.
constexpr int kLargestSubtree = 8;

// The largest tree has 2^24 shards, and one partial fold per level on the stack.
constexpr int kMaxTreeDepth = 25;

// Folds kTerms terms, starting at `first`, along a perfect binary tree.
template <class Element, class Lanes, int kVectors, int kTerms, class Load, class Op>
JAX_RING_INLINE Partial<Element, Lanes, kVectors> fold_subtree(int first, Load load, Op op) {
  Partial<Element, Lanes, kVectors> left;
  if constexpr (kTerms == 1) {
    left.start([&](int v) JAX_RING_LAMBDA { return load(first, v); });
  } else {
    left = fold_subtree<Element, Lanes, kVectors, kTerms / 2>(first, load, op);
    left.merge(fold_subtree<Element, Lanes, kVectors, kTerms / 2>(first + kTerms / 2, load, op), op);
  }
  return left;
}

// Folds the values of all terms along a tree. subtrees[i]: the step that begins with term i. load(term, v) and
// store(v, value) are as in Partial. kUnrolled: whether the code has a copy for each size of a subtree.
template <class Element, class Op, class Lanes, int kVectors, bool kUnrolled, class Load, class Store>
JAX_RING_INLINE void fold_tree(int num_terms, const Subtree* subtrees, Load load, Store store, Op op) {
  Partial<Element, Lanes, kVectors> top, below[kMaxTreeDepth - 1];
  int depth = 0;
  const auto merge = [&]() JAX_RING_LAMBDA {
    Partial<Element, Lanes, kVectors> left = below[--depth];
    left.merge(top, op);
    top = left;
  };
  for (int first = 0; first < num_terms;) {
    const Subtree next = subtrees[first];
    if (first > 0) below[depth++] = top;
    if constexpr (kUnrolled) {
      switch (next.num_terms) {
        case 8:
          top = fold_subtree<Element, Lanes, kVectors, 8>(first, load, op);
          break;
        case 4:
          top = fold_subtree<Element, Lanes, kVectors, 4>(first, load, op);
          break;
        case 2:
          top = fold_subtree<Element, Lanes, kVectors, 2>(first, load, op);
          break;
        default:
          top = fold_subtree<Element, Lanes, kVectors, 1>(first, load, op);
      }
    } else {
      for (int i = 0; i < next.num_terms; ++i) {
        if (i > 0) below[depth++] = top;
        top = fold_subtree<Element, Lanes, kVectors, 1>(first + i, load, op);
        // The number of subtrees that end at leaf i is the number of trailing ones in i.
        for (int ones = i; ones % 2 == 1; ones /= 2) merge();
      }
    }
    for (int i = 0; i < next.merges; ++i) merge();
    first += next.num_terms;
  }
  top.finish(store);
}

}  // namespace jax_ring
