// packed_floats.h: registers of 8- or 16-bit floats, each widened to several registers of float32.
//
// Only for fold_kernels_isa.cc, which is compiled for several instruction sets.
#pragma once

#include <cstdint>
#include <type_traits>

#include "collective/element.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jax_ring::cpu {
namespace {

// The float32 values of one register, in the order that is cheapest to separate.
template <class F32, int kParts>
struct Parts {
  F32 part[kParts];
};

// An operation on each part.
template <class Op>
struct PartByPart {
  template <class F32, int kParts>
  JAX_RING_INLINE Parts<F32, kParts> operator()(const Parts<F32, kParts>& a, const Parts<F32, kParts>& b) const {
    Parts<F32, kParts> result;
    for (int k = 0; k < kParts; ++k) result.part[k] = Op{}(a.part[k], b.part[k]);
    return result;
  }
};

// Registers of kBytes, of elements of kElementBytes.
template <int kBytes, int kElementBytes>
struct PackedLanes {
  static constexpr int kParts = sizeof(float) / kElementBytes;
  using Wide = Vector<kBytes / sizeof(float)>;
  template <class T>
  struct Type {
    using type = typename Vector<kBytes / sizeof(T)>::template Of<T>;
  };
  template <class T>
  using Of = std::conditional_t<std::is_same_v<T, float>, Parts<typename Wide::template Of<float>, kParts>,
                                typename Type<T>::type>;
};

// Any element: part k holds byte k, or the k-th pair of bytes, of every 4 bytes.
template <class Element>
struct ByParts {
  using Storage = typename Element::Storage;
  using Accumulator = float;
  static constexpr int kBits = 8 * sizeof(Storage);

  template <class Lanes>
  static JAX_RING_INLINE typename Lanes::template Of<float> widen(typename Lanes::template Of<Storage> x) {
    using U32 = typename Lanes::template Of<uint32_t>;
    typename Lanes::template Of<float> values;
    for (int k = 0; k < Lanes::kParts; ++k) {
      const U32 code = (bit_cast<U32>(x) >> (kBits * k)) & ((1u << kBits) - 1);
      values.part[k] = Element::template value_of<typename Lanes::Wide>(code);
    }
    return values;
  }

  template <class Lanes>
  static JAX_RING_INLINE typename Lanes::template Of<Storage> narrow(const typename Lanes::template Of<float>& values) {
    using U32 = typename Lanes::template Of<uint32_t>;
    U32 packed{};
    for (int k = 0; k < Lanes::kParts; ++k) {
      packed |= Element::template code_of<typename Lanes::Wide>(values.part[k]) << (kBits * k);
    }
    return bit_cast<typename Lanes::template Of<Storage>>(packed);
  }
};

// How an element is packed.
template <class Element>
struct Packed : ByParts<Element> {};

#if defined(__F16C__)

// Halves: a register of float16, as their bits. Part 0 holds the values of its lower half.
#if defined(__AVX512F__)
template <class Halves, class Values>
JAX_RING_INLINE void widen_halves(Halves halves, Values* to) {
  const __m512i bits = bit_cast<__m512i>(halves);
  to[0] = bit_cast<Values>(_mm512_cvtph_ps(_mm512_castsi512_si256(bits)));
  to[1] = bit_cast<Values>(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1)));
}
template <class Halves, int kRounding, class Values>
JAX_RING_INLINE Halves narrow_to_halves(const Values* from) {
  const __m256i low = _mm512_cvtps_ph(bit_cast<__m512>(from[0]), kRounding);
  const __m256i high = _mm512_cvtps_ph(bit_cast<__m512>(from[1]), kRounding);
  return bit_cast<Halves>(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
}
#else
template <class Halves, class Values>
JAX_RING_INLINE void widen_halves(Halves halves, Values* to) {
  const __m256i bits = bit_cast<__m256i>(halves);
  to[0] = bit_cast<Values>(_mm256_cvtph_ps(_mm256_castsi256_si128(bits)));
  to[1] = bit_cast<Values>(_mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1)));
}
template <class Halves, int kRounding, class Values>
JAX_RING_INLINE Halves narrow_to_halves(const Values* from) {
  const __m128i low = _mm256_cvtps_ph(bit_cast<__m256>(from[0]), kRounding);
  const __m128i high = _mm256_cvtps_ph(bit_cast<__m256>(from[1]), kRounding);
  return bit_cast<Halves>(_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1));
}
#endif

// float16, by its own instructions.
template <>
struct Packed<Float16> {
  using Storage = uint16_t;
  using Accumulator = float;

  template <class Lanes>
  static JAX_RING_INLINE typename Lanes::template Of<float> widen(typename Lanes::template Of<uint16_t> x) {
    typename Lanes::template Of<float> values;
    widen_halves(x, values.part);
    return values;
  }
  template <class Lanes>
  static JAX_RING_INLINE typename Lanes::template Of<uint16_t> narrow(
      const typename Lanes::template Of<float>& values) {
    using U16 = typename Lanes::template Of<uint16_t>;
    const U16 code = narrow_to_halves<U16, _MM_FROUND_TO_NEAREST_INT>(values.part);
    return (code & uint16_t{0x7fff}) > uint16_t{0x7c00} ? code * uint16_t{0} + uint16_t{Float16::kNaN} : code;
  }
};

// 8-bit floats are float16 with fewer bits, except for bias and special values. The values here are theirs times
// 2^(bias - 15), so that the biases agree. This changes no rounding of a sum.
template <int kExponentBits, int kMantissaBits, int kBias, Specials kSpecials>
struct ByHalves {
  using Element = SmallFloat<uint8_t, kExponentBits, kMantissaBits, kBias, kSpecials>;
  using Storage = uint8_t;
  using Accumulator = float;
  static constexpr int kFewerExponentBits = 5 - kExponentBits;
  static constexpr int kFewerMantissaBits = 10 - kMantissaBits;

  // The float16 of codes in the upper bytes.
  template <class U16, class I16>
  static JAX_RING_INLINE U16 half_of(U16 code) {
    // An arithmetic shift moves exponent and mantissa into place, and leaves the sign and copies of it.
    constexpr uint16_t kKept = 0x8000 | 0x7fff >> kFewerExponentBits;
    const U16 half = bit_cast<U16>(bit_cast<I16>(code) >> kFewerExponentBits) & kKept;
    if constexpr (kSpecials == Specials::finite_nuz) {
      return half == uint16_t{0x8000} ? half | uint16_t{0x7e00} : half;
    } else if constexpr (kFewerExponentBits == 0) {
      return half;
    } else if constexpr (kSpecials == Specials::ieee) {
      constexpr uint16_t kInfinity = Element::kInfinity << kFewerMantissaBits;
      return (half & uint16_t{0x7fff}) >= kInfinity ? half | uint16_t{0x7c00} : half;
    } else {
      constexpr uint16_t kNaN = Element::kNaN << kFewerMantissaBits;
      return (half & uint16_t{0x7fff}) == kNaN ? half | uint16_t{0x7e00} : half;
    }
  }

  // The codes, in the lower bytes, of float16 values that were rounded to odd.
  template <class U16>
  static JAX_RING_INLINE U16 code_of(U16 half) {
    const U16 magnitude = half & uint16_t{0x7fff};
    constexpr uint16_t kBelowHalf = (1 << (kFewerMantissaBits - 1)) - 1;
    const U16 rounded =
        (magnitude + kBelowHalf + ((magnitude >> kFewerMantissaBits) & uint16_t{1})) >> kFewerMantissaBits;
    return Element::with_specials(rounded, (half >> 8) & uint16_t{0x80}, magnitude > uint16_t{0x7c00});
  }

  template <class Lanes>
  static JAX_RING_INLINE typename Lanes::template Of<float> widen(typename Lanes::template Of<uint8_t> x) {
    using U16 = typename Lanes::template Of<uint16_t>;
    using I16 = typename Lanes::template Of<int16_t>;
    const U16 pairs = bit_cast<U16>(x);
    typename Lanes::template Of<float> values;
    widen_halves(half_of<U16, I16>(pairs << 8), values.part);
    widen_halves(half_of<U16, I16>(pairs & uint16_t{0xff00}), values.part + 2);
    return values;
  }

  // Rounds twice, first to odd, which leaves the second result unchanged. Below the smallest normal number the first
  // rounding is exact: a fold is a multiple of the format's smallest number, and so of float16's.
  template <class Lanes>
  static JAX_RING_INLINE typename Lanes::template Of<uint8_t> narrow(const typename Lanes::template Of<float>& values) {
    using U16 = typename Lanes::template Of<uint16_t>;
    using U32 = typename Lanes::template Of<uint32_t>;
    auto odd = values;
    for (auto& part : odd.part) {
      // Sets the last bit of float16 if any of the dropped bits is set.
      const U32 bits = bit_cast<U32>(part);
      part = bit_cast<std::decay_t<decltype(part)>>(bits | (((bits & 0x1fffu) + 0x1fffu) & 0x2000u));
    }
    const U16 even_bytes = code_of(narrow_to_halves<U16, _MM_FROUND_TO_ZERO>(odd.part));
    const U16 odd_bytes = code_of(narrow_to_halves<U16, _MM_FROUND_TO_ZERO>(odd.part + 2));
    return bit_cast<typename Lanes::template Of<uint8_t>>(even_bytes | odd_bytes << 8);
  }
};

template <int kExponentBits, int kMantissaBits, int kBias, Specials kSpecials>
struct Packed<SmallFloat<uint8_t, kExponentBits, kMantissaBits, kBias, kSpecials>>
    : ByHalves<kExponentBits, kMantissaBits, kBias, kSpecials> {};
// Has finite numbers at the exponent that float16 reserves for infinity.
template <>
struct Packed<Float8E5M2FNUZ> : ByParts<Float8E5M2FNUZ> {};

#endif  // __F16C__

}  // namespace
}  // namespace jax_ring::cpu
