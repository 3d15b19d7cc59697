// element.h: widens each element type to its accumulator and rounds it back, on host and device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define JAX_RING_INLINE __host__ __device__ __forceinline__
#define JAX_RING_LAMBDA
#else
// Always inlined: otherwise the linker could pick an out-of-line copy, compiled for a larger instruction set, for code
// that runs on a smaller one.
#define JAX_RING_INLINE inline __attribute__((always_inline))
#define JAX_RING_LAMBDA __attribute__((always_inline))
#endif

namespace jax_ring {

template <class To, class From>
JAX_RING_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs types of one size");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// The formulas below use `Lanes`, for one value as well as for a vector.

// One value at a time.
struct Scalar {
  template <class T>
  using Of = T;
  template <class To, class From>
  static JAX_RING_INLINE To convert(From x) {
    return static_cast<To>(x);
  }
};

#if !defined(__CUDACC__)
// N values at a time, in the vector types of GCC and Clang: their operators and `?:` work lane by lane.
template <int N>
struct Vector {
  template <class T>
  struct Type {
    typedef T type __attribute__((vector_size(N * sizeof(T))));
  };
  template <class T>
  using Of = typename Type<T>::type;
  template <class To, class From>
  static JAX_RING_INLINE Of<To> convert(From x) {
    return __builtin_convertvector(x, Of<To>);
  }
};
#endif

// Types that accumulate in themselves. A complex number is stored as two reals.
template <class T>
struct Native {
  using Storage = T;
  using Accumulator = T;
  template <class Lanes = Scalar>
  static JAX_RING_INLINE typename Lanes::template Of<T> widen(typename Lanes::template Of<T> x) {
    return x;
  }
  template <class Lanes = Scalar>
  static JAX_RING_INLINE typename Lanes::template Of<T> narrow(typename Lanes::template Of<T> x) {
    return x;
  }
};

// bfloat16: the upper half of a float32.
struct BFloat16 {
  using Storage = uint16_t;
  using Accumulator = float;

  // The code is the stored bits, in the low bits of 32.
  template <class Lanes>
  static JAX_RING_INLINE typename Lanes::template Of<float> value_of(typename Lanes::template Of<uint32_t> code) {
    return bit_cast<typename Lanes::template Of<float>>(code << 16);
  }
  template <class Lanes>
  static JAX_RING_INLINE typename Lanes::template Of<uint32_t> code_of(typename Lanes::template Of<float> x) {
    using U32 = typename Lanes::template Of<uint32_t>;
    const U32 bits = bit_cast<U32>(x);
    // Round to nearest, ties to even. A carry out of the mantissa increments the exponent, and past the largest finite
    // number this gives infinity, as it should.
    const U32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    // One canonical NaN: the sign of the sum of two NaNs would depend on the operand order of the instruction.
    return (bits & 0x7fffffffu) > 0x7f800000u ? bits * 0u + 0x7fc0u : rounded;
  }

  template <class Lanes = Scalar>
  static JAX_RING_INLINE typename Lanes::template Of<float> widen(typename Lanes::template Of<Storage> x) {
    return value_of<Lanes>(Lanes::template convert<uint32_t>(x));
  }
  template <class Lanes = Scalar>
  static JAX_RING_INLINE typename Lanes::template Of<Storage> narrow(typename Lanes::template Of<float> x) {
    return Lanes::template convert<Storage>(code_of<Lanes>(x));
  }
};

// What a small float's largest exponent means.
enum class Specials {
  ieee,        // an all-ones exponent is infinity or NaN
  finite,      // "fn": no infinity; all ones is NaN
  finite_nuz,  // "fnuz": no infinity, no negative zero; the pattern of negative zero is NaN
};

// A binary float of at most 16 bits, by its exponent and mantissa widths, bias and special values.
template <class StorageT, int kExponentBits, int kMantissaBits, int kBias, Specials kSpecials>
struct SmallFloat {
  using Storage = StorageT;
  using Accumulator = float;

  static constexpr int kShift = 23 - kMantissaBits;
  static constexpr int kSignShift = 31 - kExponentBits - kMantissaBits;
  static constexpr uint32_t kSign = 1u << (kExponentBits + kMantissaBits);
  static constexpr uint32_t kMantissa = (1u << kMantissaBits) - 1;
  static constexpr uint32_t kAllOnes = kSign - 1;
  static constexpr uint32_t kInfinity = kAllOnes & ~kMantissa;  // only where Specials::ieee
  static constexpr uint32_t kNaN = kSpecials == Specials::ieee     ? kInfinity | (1u << (kMantissaBits - 1))
                                   : kSpecials == Specials::finite ? kAllOnes
                                                                   : kSign;
  static constexpr uint32_t kLargest = kSpecials == Specials::ieee     ? kInfinity - 1
                                       : kSpecials == Specials::finite ? kAllOnes - 1
                                                                       : kAllOnes;
  static constexpr uint32_t kRebias = static_cast<uint32_t>(127 - kBias) << 23;
  static constexpr uint32_t kSmallestNormal = static_cast<uint32_t>(128 - kBias) << 23;  // as float32 bits

  static JAX_RING_INLINE float power_of_two(int exponent) {
    return bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23);
  }

  template <class Lanes>
  static JAX_RING_INLINE typename Lanes::template Of<float> value_of(typename Lanes::template Of<uint32_t> code) {
    using U32 = typename Lanes::template Of<uint32_t>;
    using F32 = typename Lanes::template Of<float>;
    const U32 magnitude = code & kAllOnes;
    const U32 normal = (magnitude << kShift) + kRebias;
    // A subnormal is an integer times the smallest one.
    const F32 subnormal = Lanes::template convert<float>(bit_cast<typename Lanes::template Of<int32_t>>(magnitude)) *
                          power_of_two(1 - kBias - kMantissaBits);
    U32 bits = magnitude <= kMantissa ? bit_cast<U32>(subnormal) : normal;
    if constexpr (kSpecials == Specials::ieee) {
      bits = magnitude >= kInfinity ? (magnitude << kShift) | 0x7f800000u : bits;
    } else if constexpr (kSpecials == Specials::finite) {
      bits = magnitude == kAllOnes ? bits | 0x7fc00000u : bits;
    } else {
      bits = code == kNaN ? bits | 0x7fc00000u : bits;
    }
    return bit_cast<F32>(bits | (code & kSign) << kSignShift);
  }

  // Round to nearest, ties to even. Overflow gives infinity, or NaN in a type without infinity.
  template <class Lanes>
  static JAX_RING_INLINE typename Lanes::template Of<uint32_t> code_of(typename Lanes::template Of<float> x) {
    using U32 = typename Lanes::template Of<uint32_t>;
    using F32 = typename Lanes::template Of<float>;
    const U32 bits = bit_cast<U32>(x);
    const U32 magnitude = bits & 0x7fffffffu;
    const U32 sign = (bits >> kSignShift) & kSign;

    const U32 rebiased = magnitude - kRebias;
    const U32 normal = (rebiased + ((1u << (kShift - 1)) - 1) + ((rebiased >> kShift) & 1u)) >> kShift;
    // Adding a number whose last place is worth the smallest subnormal makes the hardware round.
    const float magic = power_of_two(24 - kBias - kMantissaBits);
    const U32 subnormal = bit_cast<U32>(bit_cast<F32>(magnitude) + magic) - bit_cast<uint32_t>(magic);

    return with_specials<U32>(magnitude < kSmallestNormal ? subnormal : normal, sign, magnitude > 0x7f800000u);
  }

  // The code of a rounded magnitude, which may be too large. U: unsigned numbers of at least 16 bits.
  template <class U, class Mask>
  static JAX_RING_INLINE U with_specials(U code, U sign, Mask is_nan) {
    const U zero = code - code;
    constexpr uint16_t kOverflow = kSpecials == Specials::ieee ? kInfinity : kNaN;
    code = code > uint16_t{kLargest} ? zero + kOverflow : code;
    // A type without negative zero has a single zero and a single NaN, without a sign.
    const U with_sign = kSpecials == Specials::finite_nuz
                            ? (code == zero || code == uint16_t{kNaN} ? code : code | sign)
                            : U(code | sign);
    // One canonical NaN: the sign of the sum of two NaNs would depend on the operand order of the instruction.
    return is_nan ? zero + uint16_t{kNaN} : with_sign;
  }

  template <class Lanes = Scalar>
  static JAX_RING_INLINE typename Lanes::template Of<float> widen(typename Lanes::template Of<Storage> x) {
    return value_of<Lanes>(Lanes::template convert<uint32_t>(x));
  }
  template <class Lanes = Scalar>
  static JAX_RING_INLINE typename Lanes::template Of<Storage> narrow(typename Lanes::template Of<float> x) {
    return Lanes::template convert<Storage>(code_of<Lanes>(x));
  }
};

using Float16 = SmallFloat<uint16_t, 5, 10, 15, Specials::ieee>;
using Float8E5M2 = SmallFloat<uint8_t, 5, 2, 15, Specials::ieee>;
using Float8E4M3 = SmallFloat<uint8_t, 4, 3, 7, Specials::ieee>;
using Float8E3M4 = SmallFloat<uint8_t, 3, 4, 3, Specials::ieee>;
using Float8E4M3FN = SmallFloat<uint8_t, 4, 3, 7, Specials::finite>;
using Float8E4M3B11FNUZ = SmallFloat<uint8_t, 4, 3, 11, Specials::finite_nuz>;
using Float8E4M3FNUZ = SmallFloat<uint8_t, 4, 3, 8, Specials::finite_nuz>;
using Float8E5M2FNUZ = SmallFloat<uint8_t, 5, 2, 16, Specials::finite_nuz>;

// Floats in scale groups of 8-bit codes, as defined in jax_ring/collectives/scale_groups.py. A packet holds a group's
// codes, then its scale, a float32.
constexpr size_t kGroupElements = 256;
constexpr size_t kPacketBytes = kGroupElements + sizeof(float);

}  // namespace jax_ring
