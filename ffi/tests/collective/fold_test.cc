// fold_test.cc: the kernels of every instruction set give the same bits as a plain scalar fold.
#include "collective/fold.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "collective/tree.h"
#include "cpu/fold/fold_kernels.h"
#include "tests/support/reference.h"
#include "tests/support/support.h"

namespace jax_ring::cpu {

// Not in a header: only fold_kernels.cc selects among them.
extern const FoldKernels fold_kernels_baseline;
#if defined(JAX_RING_HAS_avx2)
extern const FoldKernels fold_kernels_avx2;
#endif
#if defined(JAX_RING_HAS_avx512)
extern const FoldKernels fold_kernels_avx512;
#endif

namespace testing {
namespace {

// The instruction sets of this CPU, smallest first.
std::vector<const FoldKernels*> runnable_kernels() {
  std::vector<const FoldKernels*> kernels = {&fold_kernels_baseline};
#if defined(JAX_RING_HAS_avx2)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) kernels.push_back(&fold_kernels_avx2);
#endif
#if defined(JAX_RING_HAS_avx512)
  if (kernels.size() == 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    kernels.push_back(&fold_kernels_avx512);
  }
#endif
  return kernels;
}

constexpr int kRanks[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 16};
// Around the lengths of one and several registers, and of some tiles.
constexpr size_t kCounts[] = {0, 1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 255, 256, 257, 1023, 1024, 1025, 2049, 3079};
constexpr size_t kBegins[] = {0, 1, 1000};
constexpr size_t kLongest = 1000 + 3079;

enum class Aliasing { none, every_rank, odd_ranks };
// The place of the results, and whether they are written with streaming stores, which need aligned outputs.
enum class Writing { unaligned, aligned, aligned_streaming };

constexpr unsigned char kUntouched = 0xa5;

class FoldKernelTest : public ::testing::TestWithParam<DType> {
 protected:
  // Runs one kernel on fresh copies of the inputs and checks all bytes of every buffer, including those that must not
  // change.
  void check(const FoldKernels& kernels, const std::vector<Bytes>& inputs, const Bytes& want, size_t begin,
             size_t count, Aliasing aliasing, Writing writing, Op op) {
    const DType dtype = GetParam();
    const size_t size = element_size(dtype);
    const int num_ranks = static_cast<int>(inputs.size());
    std::vector<OffsetBuffer> in, out;
    std::vector<const void*> in_pointers;
    std::vector<void*> out_pointers;
    const Bytes untouched(inputs[0].size(), kUntouched);
    for (int rank = 0; rank < num_ranks; ++rank) {
      // Unaligned buffers start at a multiple of the element's size and no more. Aligned is the start of the range.
      const size_t aligned = (kAlignment - begin * size % kAlignment) % kAlignment;
      in.emplace_back(inputs[rank], writing == Writing::unaligned ? (rank % 3) * size : aligned);
      out.emplace_back(untouched, writing == Writing::unaligned ? (rank % 5) * size : aligned);
    }
    const auto aliased = [&](int rank) {
      return aliasing == Aliasing::every_rank || (aliasing == Aliasing::odd_ranks && rank % 2 == 1);
    };
    for (int rank = 0; rank < num_ranks; ++rank) {
      in_pointers.push_back(in[rank].data());
      out_pointers.push_back(aliased(rank) ? in[rank].data() : out[rank].data());
    }

    kernels.get(op, dtype)({in_pointers.data(), num_ranks, begin}, {out_pointers.data(), num_ranks, begin}, count,
                           writing == Writing::aligned_streaming);

    for (int rank = 0; rank < num_ranks; ++rank) {
      const unsigned char* got = static_cast<const unsigned char*>(out_pointers[rank]);
      const Bytes& before = aliased(rank) ? inputs[rank] : untouched;
      const auto difference = first_difference(dtype, got + begin * size, want.data() + begin * size, count);
      ASSERT_FALSE(difference) << "rank " << rank << ", element " << begin + *difference << ": got " << std::hex
                               << element_bits(dtype, got, begin + *difference) << ", want "
                               << element_bits(dtype, want.data(), begin + *difference);
      ASSERT_TRUE(std::equal(got, got + begin * size, before.begin())) << "wrote before the range, rank " << rank;
      ASSERT_TRUE(std::equal(before.begin() + (begin + count) * size, before.end(), got + (begin + count) * size))
          << "wrote after the range, rank " << rank;
      if (!aliased(rank)) {
        ASSERT_TRUE(std::equal(inputs[rank].begin(), inputs[rank].end(), in[rank].data())) << "wrote to an input";
      }
    }
  }
};

TEST_P(FoldKernelTest, AgreesWithScalarFold) {
  const DType dtype = GetParam();
  int combination = 0;
  for (int num_ranks : kRanks) {
    // The operations alternate, so that each meets each number of ranks in some dtype, and each dtype.
    const Op op = static_cast<Op>((num_ranks + static_cast<int>(dtype)) % static_cast<int>(Op::count));
    const std::vector<Bytes> inputs = random_elements(dtype, num_ranks, kLongest, static_cast<unsigned>(num_ranks));
    std::vector<const void*> pointers;
    for (const Bytes& of_rank : inputs) pointers.push_back(of_rank.data());
    const Bytes want = scalar_fold(dtype, pointers, kLongest, op);
    for (const FoldKernels* kernels : runnable_kernels()) {
      for (size_t count : kCounts) {
        for (size_t begin : kBegins) {
          for (Aliasing aliasing : {Aliasing::none, Aliasing::every_rank, Aliasing::odd_ranks}) {
            for (Writing writing : {Writing::unaligned, Writing::aligned, Writing::aligned_streaming}) {
              // A subset of the combinations, different for each number of ranks and kernel.
              if (++combination % (kSlowdown > 1 ? 31 : 2) != 0) continue;
              SCOPED_TRACE(::testing::Message()
                           << kernels->instruction_set << ", " << num_ranks << " ranks, begin " << begin << ", count "
                           << count << ", aliasing " << static_cast<int>(aliasing) << ", writing "
                           << static_cast<int>(writing));
              ASSERT_NO_FATAL_FAILURE(check(*kernels, inputs, want, begin, count, aliasing, writing, op));
            }
          }
        }
      }
    }
  }
}

// Results may be separate from operands, and in more or fewer buffers.
TEST_P(FoldKernelTest, PlacesAndNumbersOfBuffersMayDiffer) {
  const DType dtype = GetParam();
  const size_t size = element_size(dtype);
  constexpr size_t kFrom = 5, kTo = 35, kCount = 301, kLength = kTo + kCount + 7;
  for (const FoldKernels* kernels : runnable_kernels()) {
    for (Op op : {Op::sum, Op::max, Op::min}) {
      for (int num_inputs : {1, 2, 3, 7}) {
        for (int num_outputs : {1, 2, 5}) {
          SCOPED_TRACE(::testing::Message() << kernels->instruction_set << ", " << num_inputs << " to " << num_outputs);
          const std::vector<Bytes> inputs = random_elements(dtype, num_inputs, kLength, 3);
          std::vector<Bytes> outputs(num_outputs, Bytes(kLength * size, kUntouched));
          std::vector<const void*> in;
          std::vector<void*> out;
          for (const Bytes& input : inputs) in.push_back(input.data());
          for (Bytes& output : outputs) out.push_back(output.data());
          kernels->get(op, dtype)({in.data(), num_inputs, kFrom}, {out.data(), num_outputs, kTo}, kCount, false);
          const Bytes folds = scalar_fold(dtype, in, kLength, op);
          const Bytes untouched(kLength * size, kUntouched);
          for (const Bytes& output : outputs) {
            ASSERT_FALSE(first_difference(dtype, &output[kTo * size], &folds[kFrom * size], kCount));
            ASSERT_TRUE(std::equal(output.begin(), output.begin() + kTo * size, untouched.begin()));
            ASSERT_TRUE(std::equal(output.begin() + (kTo + kCount) * size, output.end(), untouched.begin()));
          }
        }
      }
    }
  }
}

// Trees of perfect subtrees of every size, and others. In the last ones a rank has several terms.
TEST_P(FoldKernelTest, AgreesWithTheRecursionOverATree) {
  const DType dtype = GetParam();
  constexpr size_t kCount = 301;
  for (const auto& [num_shards, num_ranks] : {std::pair(1, 1),
                                              {2, 2},
                                              {3, 3},
                                              {4, 4},
                                              {5, 5},
                                              {6, 6},
                                              {7, 7},
                                              {8, 8},
                                              {9, 9},
                                              {16, 16},
                                              {23, 23},
                                              {6, 2},
                                              {24, 8},
                                              {60, 5}}) {
    std::vector<int> ranks;
    for (int rank = 0; rank < num_ranks; ++rank) ranks.push_back(rank);
    const Tree tree(num_shards, num_ranks, ranks);
    const ReferenceTree reference(num_shards, num_ranks, ranks);
    const int num_terms = static_cast<int>(tree.terms().size());
    const Op op = static_cast<Op>((num_shards + static_cast<int>(dtype)) % static_cast<int>(Op::count));
    for (Op each : {Op::sum, op}) {
      const std::vector<Bytes> inputs = random_elements(dtype, num_terms, kCount, static_cast<unsigned>(num_shards));
      std::vector<const void*> in;
      for (const Bytes& input : inputs) in.push_back(input.data());
      Bytes want(kCount * element_size(dtype));
      std::vector<uint64_t> elements(num_ranks * tree.num_slots());
      for (size_t i = 0; i < kCount; ++i) {
        for (int t = 0; t < num_terms; ++t) {
          const TreeTerm& term = tree.terms()[t];
          elements[term.member * tree.num_slots() + term.slot] = element_bits(dtype, in[t], i);
        }
        set_element(dtype, want.data(), i, evaluate(dtype, reference.roots()[0], elements, each));
      }
      for (const FoldKernels* kernels : runnable_kernels()) {
        SCOPED_TRACE(::testing::Message() << kernels->instruction_set << ", " << num_shards << " shards, " << num_ranks
                                          << " ranks, op " << static_cast<int>(each));
        for (bool streaming : {false, true}) {
          std::vector<Bytes> outputs(2, Bytes(want.size(), kUntouched));
          void* const out[] = {outputs[0].data(), outputs[1].data()};
          kernels->get(each, dtype)({in.data(), num_terms, 0, tree.subtrees(0)}, {out, 2, 0}, kCount, streaming);
          for (const Bytes& output : outputs) {
            const auto difference = first_difference(dtype, output.data(), want.data(), kCount);
            ASSERT_FALSE(difference) << "element " << *difference;
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, FoldKernelTest, ::testing::ValuesIn(all_dtypes()), dtype_name);

// The fold of one element per rank, on every instruction set.
void expect_fold(DType dtype, const std::vector<uint64_t>& by_rank, uint64_t want, Op op = Op::sum) {
  for (const FoldKernels* kernels : runnable_kernels()) {
    // Enough elements for both vector code and its scalar remainder.
    constexpr size_t kCount = 300;
    std::vector<Bytes> buffers(by_rank.size(), Bytes(kCount * element_size(dtype)));
    std::vector<const void*> inputs;
    std::vector<void*> outputs;
    for (size_t rank = 0; rank < by_rank.size(); ++rank) {
      for (size_t i = 0; i < kCount; ++i) set_element(dtype, buffers[rank].data(), i, by_rank[rank]);
      inputs.push_back(buffers[rank].data());
      outputs.push_back(buffers[rank].data());
    }
    const int num_ranks = static_cast<int>(by_rank.size());
    kernels->get(op, dtype)({inputs.data(), num_ranks, 0}, {outputs.data(), num_ranks, 0}, kCount, false);
    for (const Bytes& buffer : buffers) {
      for (size_t i = 0; i < kCount; ++i) {
        ASSERT_EQ(element_bits(dtype, buffer.data(), i), want)
            << name_of(dtype) << ", " << kernels->instruction_set << ", element " << i;
      }
    }
  }
}

// The 8-bit floats: their conversions differ between instruction sets.
class EightBitFloatTest : public ::testing::TestWithParam<DType> {
 protected:
  // Element i of all ranks: terms[i].
  void expect_scalar_folds(const std::vector<std::vector<uint64_t>>& terms, Op op) {
    const DType dtype = GetParam();
    const size_t num_ranks = terms[0].size();
    std::vector<Bytes> buffers(num_ranks, Bytes(terms.size()));
    std::vector<const void*> inputs;
    for (size_t rank = 0; rank < num_ranks; ++rank) {
      for (size_t i = 0; i < terms.size(); ++i) set_element(dtype, buffers[rank].data(), i, terms[i][rank]);
      inputs.push_back(buffers[rank].data());
    }
    const Bytes want = scalar_fold(dtype, inputs, terms.size(), op);
    for (const FoldKernels* kernels : runnable_kernels()) {
      Bytes result(terms.size());
      void* const output = result.data();
      const int count = static_cast<int>(num_ranks);
      kernels->get(op, dtype)({inputs.data(), count, 0}, {&output, 1, 0}, terms.size(), false);
      const auto difference = first_difference(dtype, result.data(), want.data(), terms.size());
      ASSERT_FALSE(difference) << kernels->instruction_set << ", element " << *difference << ": got " << std::hex
                               << int{result[*difference]} << ", want " << int{want[*difference]};
    }
  }
};

TEST_P(EightBitFloatTest, EveryPair) {
  std::vector<std::vector<uint64_t>> pairs;
  for (uint64_t a = 0; a < 256; ++a) {
    for (uint64_t b = 0; b < 256; ++b) pairs.push_back({a, b});
  }
  for (Op op : {Op::sum, Op::max, Op::min}) ASSERT_NO_FATAL_FAILURE(expect_scalar_folds(pairs, op));
}

// Sums halfway between two numbers, slightly below and slightly above.
TEST_P(EightBitFloatTest, AroundEveryMidpoint) {
  const SmallFloatReference& reference = SmallFloatReference::of(GetParam());
  const double smallest = reference.decode(1);
  std::vector<std::vector<uint64_t>> sums;
  for (uint32_t code = 0; code <= reference.largest(); ++code) {
    const double value = reference.magnitude(code), half = (reference.magnitude(code + 1) - value) / 2;
    for (double little : {-smallest, 0.0, smallest}) {
      for (double sign : {1.0, -1.0}) {
        sums.push_back({reference.encode(sign * value), reference.encode(sign * half), reference.encode(little)});
      }
    }
  }
  ASSERT_NO_FATAL_FAILURE(expect_scalar_folds(sums, Op::sum));
}

INSTANTIATE_TEST_SUITE_P(DTypes, EightBitFloatTest, ::testing::ValuesIn([] {
                           std::vector<DType> dtypes;
                           for (DType dtype : all_dtypes()) {
                             if (is_small(dtype) && element_size(dtype) == 1) dtypes.push_back(dtype);
                           }
                           return dtypes;
                         }()),
                         dtype_name);

std::vector<uint64_t> elements_of(DType dtype, const std::vector<double>& values) {
  std::vector<uint64_t> bits;
  for (double value : values) bits.push_back(element_of(dtype, value));
  return bits;
}

// The tests below follow from the one above; they state its meaning in numbers.

TEST(FoldMeaning, LargestAndSmallest) {
  for (DType dtype : {DType::s8, DType::s16, DType::s32, DType::s64, DType::bf16, DType::f16, DType::f32, DType::f64}) {
    const std::vector<uint64_t> values = elements_of(dtype, {3, -5, 2});
    expect_fold(dtype, values, values[0], Op::max);
    expect_fold(dtype, values, masked(dtype, values[1]), Op::min);
  }
  // As unsigned numbers, the same bits differ in value.
  expect_fold(DType::u8, {3, 251, 2}, 251, Op::max);
  expect_fold(DType::s8, {3, 251, 2}, 3, Op::max);
}

TEST(FoldMeaning, NegativeZeroIsTheSmaller) {
  for (DType dtype : {DType::f32, DType::f64, DType::f16, DType::bf16, DType::f8e4m3fn}) {
    const uint64_t plus = element_of(dtype, 0.0), minus = element_of(dtype, -0.0);
    for (const auto& zeros : {std::vector<uint64_t>{plus, minus}, {minus, plus}, {minus, plus, minus}}) {
      expect_fold(dtype, zeros, plus, Op::max);
      expect_fold(dtype, zeros, minus, Op::min);
    }
    expect_fold(dtype, {minus, minus}, minus, Op::max);
    expect_fold(dtype, {plus, plus}, plus, Op::min);
  }
}

TEST(FoldMeaning, LeftToRight) {
  expect_fold(DType::f32, elements_of(DType::f32, {1e8, -1e8, 1}), element_of(DType::f32, 1));
  expect_fold(DType::f32, elements_of(DType::f32, {1, 1e8, -1e8}), element_of(DType::f32, 0));
  expect_fold(DType::f64, elements_of(DType::f64, {1e17, -1e17, 1}), element_of(DType::f64, 1));
  expect_fold(DType::f64, elements_of(DType::f64, {1, 1e17, -1e17}), element_of(DType::f64, 0));
}

// The fold of one element per rank along the tree of as many shards, on every instruction set.
void expect_tree_fold(DType dtype, const std::vector<double>& by_rank, double want) {
  std::vector<int> ranks;
  std::vector<Bytes> buffers;
  std::vector<const void*> inputs;
  constexpr size_t kCount = 300;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    ranks.push_back(static_cast<int>(rank));
    buffers.emplace_back(kCount * element_size(dtype));
    for (size_t i = 0; i < kCount; ++i) set_element(dtype, buffers[rank].data(), i, element_of(dtype, by_rank[rank]));
  }
  for (const Bytes& buffer : buffers) inputs.push_back(buffer.data());
  const int num_ranks = static_cast<int>(by_rank.size());
  const Tree tree(num_ranks, num_ranks, ranks);
  for (const FoldKernels* kernels : runnable_kernels()) {
    Bytes result(kCount * element_size(dtype));
    void* const output = result.data();
    kernels->get(Op::sum, dtype)({inputs.data(), num_ranks, 0, tree.subtrees(0)}, {&output, 1, 0}, kCount, false);
    for (size_t i = 0; i < kCount; ++i) {
      ASSERT_EQ(element_bits(dtype, result.data(), i), element_of(dtype, want))
          << name_of(dtype) << ", " << kernels->instruction_set << ", element " << i;
    }
  }
}

TEST(FoldMeaning, AlongATree) {
  // In sequence the first sum is 0.
  expect_tree_fold(DType::f32, {1, 1e8, -1e8, 1}, 0);
  expect_tree_fold(DType::f32, {1e8, -1e8, 1, 1e8}, 1e8);
  expect_tree_fold(DType::f32, {1e8, 1, -1e8, 1, 1, 2}, 3);
  // A partial sum is not rounded, and cannot overflow before the end.
  expect_tree_fold(DType::bf16, {256, 1, 1, 0}, 258);
  expect_tree_fold(DType::f16, {65504, 65504, -65504, 0}, 65504);
  expect_tree_fold(DType::f32, std::vector<double>(8, -0.0), -0.0);
  expect_tree_fold(DType::f32, std::vector<double>(11, -0.0), -0.0);
}

TEST(FoldMeaning, RoundedOnce) {
  // Rounding after each step would stay at 256: 257 is a tie in bfloat16, and goes to even.
  expect_fold(DType::bf16, elements_of(DType::bf16, {256, 1, 1}), element_of(DType::bf16, 258));
  expect_fold(DType::f16, elements_of(DType::f16, {2048, 1, 1}), element_of(DType::f16, 2050));
  // Beyond the largest finite number and back.
  expect_fold(DType::f16, elements_of(DType::f16, {65504, 65504, -65504}), element_of(DType::f16, 65504));
  expect_fold(DType::f8e4m3fn, elements_of(DType::f8e4m3fn, {448, 448, -448}), element_of(DType::f8e4m3fn, 448));
}

TEST(FoldMeaning, NegativeZero) {
  for (DType dtype : all_dtypes()) {
    if (is_small(dtype) && SmallFloatReference::of(dtype).format().top == Top::fnuz) continue;
    const uint64_t negative_zero = uint64_t{1} << (8 * element_size(dtype) - 1);
    if (!is_small(dtype) && dtype != DType::f32 && dtype != DType::f64) continue;
    for (size_t num_ranks : {1, 2, 5}) {
      expect_fold(dtype, std::vector<uint64_t>(num_ranks, negative_zero), negative_zero);
    }
    expect_fold(dtype, {negative_zero, 0}, 0);
  }
}

TEST(FoldMeaning, IntegersWrap) {
  expect_fold(DType::u8, {255, 2}, 1);
  expect_fold(DType::u16, {65535, 2}, 1);
  expect_fold(DType::u32, {0xffffffffu, 2}, 1);
  expect_fold(DType::u64, {~uint64_t{0}, 2}, 1);
}

TEST(FoldMeaning, OneRankGetsItsOwnBits) {
  for (DType dtype : {DType::f32, DType::f64}) {
    const uint64_t signaling = dtype == DType::f32 ? 0xff800001u : 0xfff0000000000001u;
    expect_fold(dtype, {signaling}, signaling);
  }
}

// Every code under several scales, to several results, between different offsets; nothing beyond is written.
TEST(DecodeKernel, GivesCodeTimesScale) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float scales[] = {1, 0.25f, 0x1.8p-104f, 0x1.fffep126f / 64, 3};
  constexpr size_t kFrom = 1, kTo = 2, kCount = std::size(scales);
  std::vector<int8_t> packets((kFrom + kCount) * kPacketBytes);
  std::vector<float> want;
  for (size_t block = 0; block < kCount; ++block) {
    int8_t* const packet = &packets[(kFrom + block) * kPacketBytes];
    for (int i = 0; i < static_cast<int>(kGroupElements); ++i) {
      const int code = (i + static_cast<int>(block)) % 256 - 128;
      packet[i] = static_cast<int8_t>(code);
      want.push_back(code == -128   ? std::numeric_limits<float>::quiet_NaN()
                     : code == 127  ? infinity
                     : code == -127 ? -infinity
                                    : static_cast<float>(code) * scales[block]);
    }
    std::memcpy(packet + kGroupElements, &scales[block], sizeof(float));
  }
  for (const FoldKernels* kernels : runnable_kernels()) {
    for (bool streaming : {false, true}) {
      SCOPED_TRACE(::testing::Message() << kernels->instruction_set << ", streaming " << streaming);
      const Bytes untouched((kTo + kCount + 1) * kGroupElements * sizeof(float), kUntouched);
      std::vector<OffsetBuffer> outputs;
      std::vector<void*> out;
      for (int i = 0; i < 3; ++i) outputs.emplace_back(untouched, streaming ? 0 : i * sizeof(float));
      for (OffsetBuffer& output : outputs) out.push_back(output.data());
      const void* const in = packets.data();
      kernels->decode({&in, 1, kFrom}, {out.data(), 3, kTo}, kCount, streaming);
      for (const void* of_rank : out) {
        const auto* const got = static_cast<const unsigned char*>(of_rank);
        const size_t begin = kTo * kGroupElements * sizeof(float), bytes = want.size() * sizeof(float);
        ASSERT_EQ(std::memcmp(got + begin, want.data(), bytes), 0);
        ASSERT_TRUE(std::equal(got, got + begin, untouched.begin()));
        ASSERT_TRUE(std::equal(got + begin + bytes, got + untouched.size(), untouched.begin()));
      }
    }
  }
}

// Two ranks' operands for a sum in float32: every 16-bit code, paired with another one.
template <class Bits>
std::vector<Bits> codes_of(int rank) {
  std::vector<Bits> codes;
  for (uint32_t code = 0; code < 1 << 16; ++code) codes.push_back(static_cast<Bits>(rank == 0 ? code : code * 40503));
  return codes;
}

float value_of(DType dtype, uint16_t code) {
  return dtype == DType::f16 ? Float16::widen(code) : BFloat16::widen(code);
}

// The float32 between two 16-bit floats, with the bits that such a float lacks: ties, and values out of range.
std::vector<float> between(const std::vector<uint16_t>& codes, DType dtype) {
  std::vector<float> values;
  for (size_t i = 0; i < codes.size(); ++i) {
    const uint32_t below[] = {0, 0x1000, 0x8000, 0xffff};
    values.push_back(bit_cast<float>(bit_cast<uint32_t>(value_of(dtype, codes[i])) ^ below[i / 3 % 4]));
  }
  return values;
}

// Sums of 16-bit floats, or of float32 rounded to them, are sums of their values, and not rounded.
template <class Stored, class ValueOf>
void expect_sums_in_float32(FoldKernel kernel, const std::vector<Stored>& first, const std::vector<Stored>& second,
                            ValueOf value) {
  constexpr size_t kFrom = 3, kTo = 16;
  const size_t count = first.size() - kFrom;
  for (int ranks : {1, 2}) {
    for (bool streaming : {false, true}) {
      SCOPED_TRACE(::testing::Message() << ranks << " ranks, streaming " << streaming);
      const Bytes untouched((kTo + count + 1) * sizeof(float), kUntouched);
      OffsetBuffer output(untouched, 0), other(untouched, streaming ? 0 : sizeof(float));
      void* const out[] = {output.data(), other.data()};
      const void* const in[] = {first.data(), second.data()};
      kernel({in, ranks, kFrom}, {out, 2, kTo}, count, streaming);
      for (const void* of_rank : out) {
        const auto* const got = static_cast<const unsigned char*>(of_rank);
        for (size_t i = 0; i < count; ++i) {
          float sum;
          std::memcpy(&sum, got + (kTo + i) * sizeof(float), sizeof(sum));
          float want = value(first[kFrom + i]);
          if (ranks == 2) want += value(second[kFrom + i]);
          if (want != want) {
            ASSERT_NE(sum, sum) << i;
          } else {
            ASSERT_EQ(bit_cast<uint32_t>(sum), bit_cast<uint32_t>(want)) << i;
          }
        }
        const size_t begin = kTo * sizeof(float), bytes = count * sizeof(float);
        ASSERT_TRUE(std::equal(got, got + begin, untouched.begin()));
        ASSERT_TRUE(std::equal(got + begin + bytes, got + untouched.size(), untouched.begin()));
      }
    }
  }
}

TEST(SumsInFloat32, OfFloatsOf16Bits) {
  for (const FoldKernels* kernels : runnable_kernels()) {
    for (DType dtype : {DType::f16, DType::bf16}) {
      SCOPED_TRACE(::testing::Message() << kernels->instruction_set << ", " << name_of(dtype));
      const SumsInFloat32& sums = dtype == DType::f16 ? kernels->of_f16 : kernels->of_bf16;
      const auto first = codes_of<uint16_t>(0), second = codes_of<uint16_t>(1);
      expect_sums_in_float32(sums.stored, first, second, [&](uint16_t code) { return value_of(dtype, code); });
      expect_sums_in_float32(sums.rounded, between(first, dtype), between(second, dtype), [&](float x) {
        return value_of(dtype, dtype == DType::f16 ? Float16::narrow(x) : BFloat16::narrow(x));
      });
    }
  }
}

// Run by ctest once per value of JAX_RING_ISA, and once without.
TEST(ChosenKernels, AreTheWidestThatWereAskedFor) {
  const char* asked = std::getenv("JAX_RING_ISA");
  std::string want;
  for (const FoldKernels* kernels : runnable_kernels()) {
    want = kernels->instruction_set;
    if (asked != nullptr && want == asked) break;
  }
  EXPECT_EQ(fold_kernels().instruction_set, want);
}

TEST(ElementSize, OfEveryDType) {
  const size_t sizes[] = {1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8, 1, 1, 1, 1, 1, 1, 1};
  ASSERT_EQ(std::size(sizes), static_cast<size_t>(kNumDTypes)) << "a dtype was added: give its size here";
  for (DType dtype : all_dtypes()) EXPECT_EQ(element_size(dtype), sizes[static_cast<int>(dtype)]) << name_of(dtype);
}

}  // namespace
}  // namespace testing
}  // namespace jax_ring::cpu
