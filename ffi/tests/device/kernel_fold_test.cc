// kernel_fold_test.cc: kernels that serve several types and operations give the bits of each.
#include "device/fold/kernel_fold.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "tests/support/support.h"

namespace jax_ring::cpu::testing {
namespace {

// All 8-bit codes; of others zeros, ones, the smallest and largest of every kind, NaNs with payloads, and more.
template <class Storage>
std::vector<Storage> codes() {
  using Bits =
      std::conditional_t<sizeof(Storage) == 8, uint64_t, std::conditional_t<sizeof(Storage) == 4, uint32_t, uint16_t>>;
  std::vector<Storage> all;
  if constexpr (sizeof(Storage) == 1) {
    for (int code = 0; code < 256; ++code) all.push_back(static_cast<Storage>(code));
  } else {
    constexpr int kBits = 8 * sizeof(Storage);
    for (int ones = 0; ones <= kBits; ++ones) {
      const Bits low = ones == 0 ? 0 : static_cast<Bits>(~Bits{0}) >> (kBits - ones);
      for (const Bits code : {low, static_cast<Bits>(~low), static_cast<Bits>(low + 1), static_cast<Bits>(~low + 1)}) {
        all.push_back(bit_cast<Storage>(code));
      }
    }
    std::mt19937_64 random(kBits);
    for (int i = 0; i < 200; ++i) all.push_back(bit_cast<Storage>(static_cast<Bits>(random())));
  }
  return all;
}

template <class To, class Element, class Op>
To result(To a, To b, Op op) {
  using Storage = typename Element::Storage;
  return bit_cast<To>(Element::narrow(op(Element::widen(bit_cast<Storage>(a)), Element::widen(bit_cast<Storage>(b)))));
}

template <class Element, class Op>
void expect_the_bits_of(DType dtype, Op definition) {
  using Storage = typename Element::Storage;
  using KernelElement = typename FoldedAs<Element, Sum>::type;
  const jax_ring::Op op = std::is_same_v<Op, Max> ? jax_ring::Op::max : jax_ring::Op::min;
  const MaxOfFlipped kernel{kernel_fold(dtype, op).flipped};
  for (const Storage a : codes<Storage>()) {
    for (const Storage b : codes<Storage>()) {
      const Storage want = result<Storage, Element>(a, b, definition),
                    got = result<Storage, KernelElement>(a, b, kernel);
      ASSERT_EQ(std::memcmp(&got, &want, sizeof(want)), 0) << name_of(dtype) << " " << +a << " " << +b;
    }
  }
}

TEST(KernelFold, MaximaAndMinimaHaveTheBitsOfTheDefinition) {
#define JAX_RING_EXPECT(name, element)             \
  expect_the_bits_of<element>(DType::name, Max{}); \
  expect_the_bits_of<element>(DType::name, Min{});
  JAX_RING_FOR_EACH_DTYPE(JAX_RING_EXPECT)
#undef JAX_RING_EXPECT
}

TEST(KernelFold, EveryTypeHasAKernel) {
  for (DType dtype : all_dtypes()) {
    for (jax_ring::Op op : {jax_ring::Op::sum, jax_ring::Op::max, jax_ring::Op::min}) {
      const KernelFold fold = kernel_fold(dtype, op);
      EXPECT_EQ(element_size(fold.dtype), element_size(dtype)) << name_of(dtype);
      EXPECT_FALSE(is_signed_integer(fold.dtype)) << name_of(dtype);
      EXPECT_NE(fold.op, jax_ring::Op::min) << name_of(dtype);
      EXPECT_TRUE(fold.dtype == dtype || is_signed_integer(dtype)) << name_of(dtype);
    }
  }
}

}  // namespace
}  // namespace jax_ring::cpu::testing
