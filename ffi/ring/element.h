// element.h: how each element type is widened into its accumulator and rounded back, on host and device.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define JAX_RING_INLINE __host__ __device__ __forceinline__
#else
// Always inlined, so that no out-of-line copy compiled for one instruction set can be picked by the
// linker for code that must run on a smaller one.
#define JAX_RING_INLINE inline __attribute__((always_inline))
#endif

namespace jax_ring {

template <class To, class From>
JAX_RING_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs types of one size");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// Types that are their own accumulator. Signed integers travel as unsigned ones: the sum has the same
// bits, and wrapping is then defined. Complex numbers travel as twice as many reals.
template <class T>
struct Native {
  using Storage = T;
  using Accumulator = T;
  static JAX_RING_INLINE T widen(T x) { return x; }
  static JAX_RING_INLINE T narrow(T x) { return x; }
};

// bfloat16: the upper half of a float32.
struct BFloat16 {
  using Storage = uint16_t;
  using Accumulator = float;
  static JAX_RING_INLINE float widen(uint16_t x) { return bit_cast<float>(uint32_t{x} << 16); }
  static JAX_RING_INLINE uint16_t narrow(float x) {
    const uint32_t bits = bit_cast<uint32_t>(x);
    // Round to nearest, ties to even. The carry out of the mantissa is the next exponent, and past
    // the largest finite number it is infinity, as it should be.
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t nan = ((bits >> 16) & 0x8000u) | 0x7fc0u;
    return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
  }
};

// What the top of a small float's range means.
enum class Specials {
  ieee,        // an all-ones exponent is infinity or NaN
  finite,      // "fn": no infinity; all ones is NaN
  finite_nuz,  // "fnuz": no infinity, no negative zero; the pattern of negative zero is NaN
};

// A binary float of at most 16 bits, by its exponent and mantissa widths, bias and special values.
// Written without branches, so that a loop over it becomes vector code.
template <class StorageT, int kExponentBits, int kMantissaBits, int kBias, Specials kSpecials>
struct SmallFloat {
  using Storage = StorageT;
  using Accumulator = float;

  static constexpr int kShift = 23 - kMantissaBits;
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

  static JAX_RING_INLINE float power_of_two(int exponent) {
    return bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23);
  }

  static JAX_RING_INLINE float widen(Storage x) {
    const uint32_t magnitude = x & kAllOnes;
    const uint32_t sign = static_cast<uint32_t>(x & kSign) << (31 - kExponentBits - kMantissaBits);
    const uint32_t normal = (magnitude << kShift) + (static_cast<uint32_t>(127 - kBias) << 23);
    const float subnormal =
        static_cast<float>(static_cast<int32_t>(magnitude)) * power_of_two(1 - kBias - kMantissaBits);
    uint32_t bits = magnitude <= kMantissa ? bit_cast<uint32_t>(subnormal) : normal;
    if (kSpecials == Specials::ieee) {
      bits = magnitude >= kInfinity ? (magnitude << kShift) | 0x7f800000u : bits;
    } else if (kSpecials == Specials::finite) {
      bits = magnitude == kAllOnes ? 0x7fc00000u : bits;
    } else {
      bits = x == kNaN ? 0x7fc00000u : bits;
    }
    return bit_cast<float>(bits | sign);
  }

  // Round to nearest, ties to even; past the largest finite number, infinity or else NaN.
  static JAX_RING_INLINE Storage narrow(float value) {
    const uint32_t bits = bit_cast<uint32_t>(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t sign = (bits >> 31) << (kExponentBits + kMantissaBits);

    const uint32_t rebiased = magnitude - (static_cast<uint32_t>(127 - kBias) << 23);
    const uint32_t normal = (rebiased + ((1u << (kShift - 1)) - 1) + ((rebiased >> kShift) & 1u)) >> kShift;
    // Adding a number whose unit in the last place is the smallest subnormal makes the hardware round.
    const float magic = power_of_two(24 - kBias - kMantissaBits);
    const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(magnitude) + magic) - bit_cast<uint32_t>(magic);

    const uint32_t smallest_normal = static_cast<uint32_t>(128 - kBias) << 23;
    uint32_t code = magnitude < smallest_normal ? subnormal : normal;
    const uint32_t overflow = kSpecials == Specials::ieee ? kInfinity : kNaN;
    code = code > kLargest ? overflow : code;
    code = magnitude > 0x7f800000u ? kNaN : code;
    if (kSpecials == Specials::finite_nuz) {
      return static_cast<Storage>(code == 0 || code == kNaN ? code : code | sign);
    }
    return static_cast<Storage>(code | sign);
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

}  // namespace jax_ring
