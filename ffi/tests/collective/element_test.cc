// element_test.cc: every small float is widened exactly and rounded back to nearest, ties to even.
#include "collective/element.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "collective/fold.h"
#include "tests/support/support.h"

namespace jax_ring::cpu::testing {
namespace {

// Calls Element::widen and Element::narrow for a dtype known only at run time.
float widen(DType dtype, uint32_t code) {
  switch (dtype) {
#define JAX_RING_WIDEN(name, element) \
  case DType::name:                   \
    return static_cast<float>(element::widen(static_cast<element::Storage>(code)));
    JAX_RING_FOR_EACH_DTYPE(JAX_RING_WIDEN)
#undef JAX_RING_WIDEN
    default:
      return 0;
  }
}

template <class Element>
uint32_t narrow_to(float value) {
  if constexpr (std::is_same_v<typename Element::Accumulator, float>) {
    return static_cast<uint32_t>(Element::narrow(value));
  } else {
    return 0;
  }
}

uint32_t narrow(DType dtype, float value) {
  switch (dtype) {
#define JAX_RING_NARROW(name, element) \
  case DType::name:                    \
    return narrow_to<element>(value);
    JAX_RING_FOR_EACH_DTYPE(JAX_RING_NARROW)
#undef JAX_RING_NARROW
    default:
      return 0;
  }
}

class SmallFloatTest : public ::testing::TestWithParam<DType> {
 protected:
  DType dtype() const { return GetParam(); }
  const SmallFloatReference& reference() const { return SmallFloatReference::of(dtype()); }

  // Checks one rounding and returns the result, so that a loop can stop at the first error.
  ::testing::AssertionResult rounds_right(float value) const {
    const uint32_t got = narrow(dtype(), value), want = reference().encode(value);
    if (got == want || (reference().is_nan(got) && reference().is_nan(want))) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << "narrow(" << std::hexfloat << value << ") is code 0x" << std::hex << got
                                         << ", should be 0x" << want;
  }
};

TEST_P(SmallFloatTest, WidensEveryCode) {
  for (uint32_t code = 0; code < reference().num_codes(); ++code) {
    const float got = widen(dtype(), code);
    const double want = reference().decode(code);
    if (std::isnan(want)) {
      ASSERT_TRUE(std::isnan(got)) << "code " << code << " became " << got;
    } else {
      // As bits, so that the sign of zero counts.
      ASSERT_EQ(bit_cast<uint64_t>(static_cast<double>(got)), bit_cast<uint64_t>(want)) << "code " << code;
    }
  }
}

TEST_P(SmallFloatTest, NarrowUndoesWiden) {
  for (uint32_t code = 0; code < reference().num_codes(); ++code) {
    const uint32_t back = narrow(dtype(), widen(dtype(), code));
    if (reference().is_nan(code)) {
      ASSERT_TRUE(reference().is_nan(back)) << "NaN code " << code << " became " << back;
    } else {
      ASSERT_EQ(back, code);
    }
  }
}

TEST_P(SmallFloatTest, RoundsToNearestEvenAroundEveryMidpoint) {
  const float infinity = std::numeric_limits<float>::infinity();
  // The last midpoint is the threshold of overflow.
  for (uint32_t code = 0; code <= reference().largest(); ++code) {
    const double below = reference().magnitude(code), above = reference().magnitude(code + 1);
    const float midpoint = static_cast<float>((below + above) / 2);
    if (static_cast<double>(midpoint) == (below + above) / 2) {
      // Checked once more without the reference's search: down, to even, up.
      const uint32_t even = code % 2 == 0 ? code : code + 1;
      if (code < reference().largest()) {
        ASSERT_EQ(narrow(dtype(), std::nextafter(midpoint, 0.0f)), code);
        ASSERT_EQ(narrow(dtype(), midpoint), even);
        ASSERT_EQ(narrow(dtype(), std::nextafter(midpoint, infinity)), code + 1);
      }
    }
    for (float value : {static_cast<float>(below), midpoint}) {
      for (float near : {std::nextafter(value, 0.0f), value, std::nextafter(value, infinity)}) {
        ASSERT_TRUE(rounds_right(near));
        ASSERT_TRUE(rounds_right(-near));
      }
    }
  }
}

TEST_P(SmallFloatTest, SpecialValues) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const bool ieee = reference().format().top == Top::ieee;
  const uint32_t sign = reference().sign();
  const uint32_t largest = reference().largest();
  for (float huge : {infinity, std::numeric_limits<float>::max()}) {
    for (float value : {huge, -huge}) {
      const uint32_t code = narrow(dtype(), value);
      if (ieee) {
        // The code after the largest finite one; bfloat16 also rounds float32's largest number up to it.
        EXPECT_EQ(code, (largest + 1) | (value < 0 ? sign : 0)) << value;
      } else {
        EXPECT_TRUE(reference().is_nan(code)) << value << " became " << code;
      }
    }
  }
  // Quiet and signaling, with the smallest and the largest payload, of either sign.
  for (uint32_t bits : {0x7fc00000u, 0x7f800001u, 0x7f8000ffu, 0x7fbfffffu, 0x7fffffffu, 0x7f810000u}) {
    EXPECT_TRUE(reference().is_nan(narrow(dtype(), bit_cast<float>(bits)))) << std::hex << bits;
    EXPECT_TRUE(reference().is_nan(narrow(dtype(), bit_cast<float>(bits | 0x80000000u)))) << std::hex << bits;
  }
  EXPECT_TRUE(reference().is_nan(narrow(dtype(), nan)));
  EXPECT_EQ(narrow(dtype(), 0.0f), 0u);
  const uint32_t negative_zero = reference().format().top == Top::fnuz ? 0 : sign;
  EXPECT_EQ(narrow(dtype(), -0.0f), negative_zero);
  // Numbers below half the smallest subnormal keep their sign if there is a negative zero.
  EXPECT_EQ(narrow(dtype(), -std::numeric_limits<float>::denorm_min()), negative_zero);
}

TEST_P(SmallFloatTest, RandomNumbers) {
  std::mt19937 random(static_cast<unsigned>(dtype()));
  const Format& format = reference().format();
  // Half of them anywhere, half at exponents where rounding matters.
  const int low = std::max(1, 127 - format.bias - format.mantissa_bits - 2);
  const int high = std::min(254, 127 - format.bias + (1 << format.exponent_bits) + 1);
  const int trials = 2000000 / kSlowdown;
  for (int trial = 0; trial < trials; ++trial) {
    uint32_t bits = random();
    if (trial % 2 == 0) {
      bits = (bits & 0x807fffffu) | static_cast<uint32_t>(low + static_cast<int>(random() % (high - low + 1))) << 23;
    }
    ASSERT_TRUE(rounds_right(bit_cast<float>(bits)));
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, SmallFloatTest, ::testing::ValuesIn([] {
                           std::vector<DType> dtypes;
                           for (const Format& format : small_formats()) dtypes.push_back(format.dtype);
                           return dtypes;
                         }()),
                         dtype_name);

// Known values from the formats' specifications, as a check of the reference itself.
TEST(SmallFloatReference, Landmarks) {
  const auto largest = [](DType dtype) {
    const SmallFloatReference& reference = SmallFloatReference::of(dtype);
    return reference.decode(reference.largest());
  };
  EXPECT_EQ(largest(DType::f16), 65504);
  EXPECT_EQ(largest(DType::bf16), static_cast<double>(bit_cast<float>(0x7f7f0000u)));
  EXPECT_EQ(largest(DType::f8e5m2), 57344);
  EXPECT_EQ(largest(DType::f8e4m3), 240);
  EXPECT_EQ(largest(DType::f8e3m4), 15.5);
  EXPECT_EQ(largest(DType::f8e4m3fn), 448);
  EXPECT_EQ(largest(DType::f8e4m3b11fnuz), 30);
  EXPECT_EQ(largest(DType::f8e4m3fnuz), 240);
  EXPECT_EQ(largest(DType::f8e5m2fnuz), 57344);

  const auto smallest = [](DType dtype) { return SmallFloatReference::of(dtype).decode(1); };
  EXPECT_EQ(smallest(DType::f16), std::ldexp(1.0, -24));
  EXPECT_EQ(smallest(DType::bf16), std::ldexp(1.0, -133));
  EXPECT_EQ(smallest(DType::f8e5m2), std::ldexp(1.0, -16));
  EXPECT_EQ(smallest(DType::f8e4m3), std::ldexp(1.0, -9));
  EXPECT_EQ(smallest(DType::f8e3m4), std::ldexp(1.0, -6));
  EXPECT_EQ(smallest(DType::f8e4m3fn), std::ldexp(1.0, -9));
  EXPECT_EQ(smallest(DType::f8e4m3b11fnuz), std::ldexp(1.0, -13));
  EXPECT_EQ(smallest(DType::f8e4m3fnuz), std::ldexp(1.0, -10));
  EXPECT_EQ(smallest(DType::f8e5m2fnuz), std::ldexp(1.0, -17));
}

// A type that is its own accumulator passes through unchanged.
TEST(NativeElement, PassesThrough) {
  EXPECT_EQ(Native<uint8_t>::narrow(Native<uint8_t>::widen(0xff)), 0xff);
  EXPECT_EQ(Native<uint64_t>::narrow(Native<uint64_t>::widen(~uint64_t{0})), ~uint64_t{0});
  EXPECT_EQ(bit_cast<uint32_t>(Native<float>::narrow(Native<float>::widen(-0.0f))), 0x80000000u);
  EXPECT_EQ(bit_cast<uint32_t>(Native<float>::narrow(Native<float>::widen(bit_cast<float>(1u)))), 1u);
}

}  // namespace
}  // namespace jax_ring::cpu::testing
