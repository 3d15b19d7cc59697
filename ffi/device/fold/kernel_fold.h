// kernel_fold.h: the kernel for a fold. Types and operations share a kernel if their bits convert into each other.
#pragma once

#include <type_traits>

#include "collective/fold.h"

namespace jax_ring {

// The maximum of values with some bits flipped, flipped back. Flipping all bits of an integer, or the sign of a float,
// turns it into a minimum. Flipping the sign of signed integers turns their maximum into an unsigned one.
struct MaxOfFlipped {
  uint64_t flipped;

  template <class A>
  JAX_RING_INLINE A flip(A value) const {
    using Bits = std::conditional_t<
        sizeof(A) == 8, uint64_t,
        std::conditional_t<sizeof(A) == 4, uint32_t, std::conditional_t<sizeof(A) == 2, uint16_t, uint8_t>>>;
    return bit_cast<A>(static_cast<Bits>(bit_cast<Bits>(value) ^ static_cast<Bits>(flipped)));
  }
  template <class A>
  JAX_RING_INLINE A operator()(A a, A b) const {
    return flip(Max{}(flip(a), flip(b)));
  }
};

// The operation of a kernel, for a call with these bits flipped.
template <class Op>
JAX_RING_INLINE auto kernel_operation(uint64_t flipped) {
  if constexpr (std::is_same_v<Op, Max>) {
    return MaxOfFlipped{flipped};
  } else {
    return Op{};
  }
}

// Whether an operation has kernels for an element type. Signed integers use the unsigned kernels.
template <class Element, class Op>
constexpr bool kHasKernels = std::is_same_v<typename FoldedAs<Element, Sum>::type, Element> && !std::is_same_v<Op, Min>;

struct KernelFold {
  DType dtype;
  Op op;
  uint64_t flipped;  // bits of each accumulator, for MaxOfFlipped
};

// The element type whose kernels fold this type.
inline DType kernel_type(DType dtype) {
  switch (dtype) {
    case DType::s8:
      return DType::u8;
    case DType::s16:
      return DType::u16;
    case DType::s32:
      return DType::u32;
    case DType::s64:
      return DType::u64;
    default:
      return dtype;
  }
}

template <class Element>
uint64_t flipped_bits(Op op) {
  using A = typename Element::Accumulator;
  const uint64_t sign = uint64_t{1} << (8 * sizeof(A) - 1);
  if (op == Op::sum) return 0;
  if (std::is_floating_point_v<A>) return op == Op::min ? sign : 0;
  const uint64_t of_min = op == Op::min ? sign | (sign - 1) : 0;
  return std::is_signed_v<A> ? of_min ^ sign : of_min;
}

inline KernelFold kernel_fold(DType dtype, Op op) {
  KernelFold fold{kernel_type(dtype), op == Op::sum ? Op::sum : Op::max, 0};
  switch (dtype) {
#define JAX_RING_CASE(name, element)          \
  case DType::name:                           \
    fold.flipped = flipped_bits<element>(op); \
    break;
    JAX_RING_FOR_EACH_DTYPE(JAX_RING_CASE)
#undef JAX_RING_CASE
    case DType::count:
      break;
  }
  return fold;
}

}  // namespace jax_ring
