// operands_test.cc: which operands and results fit a call, and how others are refused.
#include "attributes/operands.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/frame.h"

// Opaque to handlers.
struct XLA_FFI_ExecutionContext {};

namespace jax_ring::testing {
namespace {

using Numbers = std::vector<int64_t>;

// No memory: the check reads none. address: of its own if 0.
struct Array {
  int type;
  Numbers sizes;
  uintptr_t address = 0;
};

std::vector<FrameBuffer> buffers_of(const std::vector<Array>& arrays) {
  static uintptr_t next = uintptr_t{1} << 32;
  std::vector<FrameBuffer> buffers;
  for (const Array& each : arrays) {
    const uintptr_t address = each.address != 0 ? each.address : next += 1 << 16;
    buffers.push_back({static_cast<XLA_FFI_DataType>(each.type), reinterpret_cast<void*>(address), each.sizes});
  }
  return buffers;
}

struct Call {
  std::string collective;
  int num_ranks;
  std::vector<Array> operands, results;
  Attributes changes = {};
};

// The error, or an empty string.
std::string refusal(const Call& call) {
  const XLA_FFI_Api api = api_for_errors();
  XLA_FFI_ExecutionContext context;
  Attributes all = call.changes;
  all.merge(call_attributes(call.num_ranks, call.collective));
  Frame frame(api, context, XLA_FFI_ExecutionStage_EXECUTE, all, buffers_of(call.operands), buffers_of(call.results));
  const jax_ring::Attributes attributes = attributes_of(xla::ffi::Dictionary(&frame.get()->attrs));
  try {
    check_operands(attributes, 0, xla::ffi::RemainingArgs(&frame.get()->args, 0),
                   xla::ffi::RemainingRets(&frame.get()->rets, 0));
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

constexpr int kF32 = XLA_FFI_DataType_F32, kS8 = XLA_FFI_DataType_S8, kS32 = XLA_FFI_DataType_S32,
              kS64 = XLA_FFI_DataType_S64, kBF16 = XLA_FFI_DataType_BF16;

const Attributes tree_of(int64_t shards, int64_t size, Numbers ranks) {
  return {{"order", "tree"}, {"tree_shards", Numbers{shards}}, {"tree_sizes", Numbers{size}}, {"tree_ranks", ranks}};
}
const Attributes part_of(int64_t begin, int64_t size, const std::string& rounds_to = "") {
  return {{"part", Numbers{begin, size}}, {"rounds_to", rounds_to}};
}
const Attributes kApart = {{"blocks_apart", int64_t{1}}};

TEST(CheckOperands, TakesThoseThatFit) {
  const Array float8{XLA_FFI_DataType_F8E8M0FNU, {4}}, token{XLA_FFI_DataType_TOKEN, {}};
  for (const Call& call : std::vector<Call>{
           {"all_reduce", 2, {{kF32, {3}}, {kF32, {0}}, {kF32, {}}}, {{kF32, {3, 1}}, {kF32, {7, 0}}, {kF32, {}}}},
           {"broadcast", 2, {float8}, {float8}},
           {"all_gather", 3, {{kS8, {2}}}, {{kS8, {3, 2}}}},
           {"reduce_scatter", 3, {{kS8, {3, 2}}}, {{kS8, {2}}}},
           {"all_to_all", 3, {{kS8, {3, 2}}}, {{kS8, {6}}}},
           {"all_to_all", 2, {{kS8, {3}}, {kS8, {3}}}, {{kS8, {3}}, {kS8, {3}}}, kApart},
           {"all_reduce", 2, {{kF32, {2, 5}}}, {{kF32, {5}}}, tree_of(6, 2, {0, 1})},
           {"reduce_scatter", 2, {{kF32, {2, 10}}}, {{kF32, {4, 5}}}, tree_of(18, 6, {0, 3})},
           {"reduce_scatter", 2, {{kF32, {20}}, token}, {{kF32, {5}}}, part_of(4, 10)},
           {"reduce_scatter", 2, {{kBF16, {20}}}, {{kF32, {5}}}, part_of(4, 10)},
           {"reduce_scatter", 2, {{kF32, {20}}}, {{kF32, {5}}}, part_of(4, 10, "float16")},
           {"all_gather", 2, {{kF32, {5}}, {kF32, {20}}, token}, {{kF32, {20}}}, part_of(4, 10)},
           {"all_gather", 2, {{kS8, {520}}}, {{kF32, {1030}}}, part_of(0, 1024)},
           {"ragged_all_to_all", 2, {{kS32, {2, 4, 6}}, {kS8, {5, 2}}, {kS8, {7, 2}}}, {{kS8, {7, 2}}}}}) {
    EXPECT_EQ(refusal(call), "") << call.collective;
  }
}

TEST(CheckOperands, RefusesOtherTypes) {
  struct Case {
    Call call;
    std::string expected;
  };
  const std::string one_type = ": they must have one element type";
  for (const Case& each : std::vector<Case>{
           {{"all_reduce", 1, {{kF32, {9}}}, {{kS8, {9}}}}, "operand 0 is float32[9], result 0 is int8[9]" + one_type},
           {{"all_reduce", 1, {{kS8, {9}}}, {{kF32, {9}}}}, "operand 0 is int8[9], result 0 is float32[9]" + one_type},
           // Of one size, and of the same bits.
           {{"broadcast", 1, {{kF32, {9}}}, {{kS32, {9}}}}, "operand 0 is float32[9], result 0 is int32[9]" + one_type},
           {{"all_reduce", 1, {{kF32, {2, 3}}, {kS8, {6}}}, {{kF32, {6}}, {kS8, {6}}}},
            "operand 0 is float32[2,3], operand 1 is int8[6]" + one_type},
           {{"all_reduce", 1, {{kF32, {0}}}, {{kS8, {0}}}}, one_type},
           {{"all_to_all", 2, {{kF32, {1}}, {kS8, {1}}}, {{kF32, {1}}, {kS8, {1}}}, kApart}, one_type},
           {{"reduce_scatter", 1, {{kS8, {9}}}, {{kF32, {9}}}, part_of(0, 9)}, "or, for a part of an array, one that"},
           {{"all_gather", 1, {{kF32, {9}}}, {{kS8, {9}}}, part_of(0, 9)}, "or, for a part of an array, one that"},
           {{"all_gather", 1, {{kF32, {2}}, {kS8, {9}}}, {{kF32, {9}}}, part_of(7, 2)},
            "operand 1 is int8[9], result 0 is float32[9]" + one_type},
           {{"ragged_all_to_all", 1, {{kS32, {1, 4, 1}}, {kF32, {9}}, {kS8, {9}}}, {{kS8, {9}}}}, one_type},
           {{"ragged_all_to_all", 1, {{kS64, {1, 4, 1}}, {kS8, {9}}, {kF32, {9}}}, {{kS8, {9}}}}, one_type},
           {{"ragged_all_to_all", 1, {{kF32, {1, 4, 1}}, {kS8, {9}}, {kS8, {9}}}, {{kS8, {9}}}}, "of int32 or int64"},
           {{"all_reduce", 1, {{XLA_FFI_DataType_F8E8M0FNU, {9}}}, {{XLA_FFI_DataType_F8E8M0FNU, {9}}}},
            "no engine adds or compares elements of float8_e8m0fnu"}}) {
    const std::string error = refusal(each.call);
    EXPECT_NE(error.find(each.expected), std::string::npos) << error << ", not: " << each.expected;
  }
}

// XLA packs several elements into a byte, or has no array at all, or is newer than this.
TEST(CheckOperands, RefusesWhatHasNoWholeBytes) {
  const std::pair<int, std::string> types[] = {
      {XLA_FFI_DataType_S4, "int4"},     {XLA_FFI_DataType_U4, "uint4"},
      {XLA_FFI_DataType_S2, "int2"},     {XLA_FFI_DataType_U2, "uint2"},
      {XLA_FFI_DataType_S1, "int1"},     {XLA_FFI_DataType_F4E2M1FN, "float4_e2m1fn"},
      {XLA_FFI_DataType_U1, "uint1"},    {XLA_FFI_DataType_INVALID, "XLA's element type 0"},
      {XLA_FFI_DataType_TOKEN, "token"}, {60, "XLA's element type 60"}};
  for (const auto& [type, name] : types) {
    for (const std::string collective : {"all_reduce", "broadcast", "all_to_all"}) {
      EXPECT_EQ(refusal({collective, 1, {{type, {4}}}, {{type, {4}}}}),
                "operand 0 is " + name +
                    "[4]: jax_ring has no elements of this type. Convert it to one whose elements are whole bytes.");
    }
    EXPECT_NE(refusal({"all_gather", 1, {{type, {4}}}, {{type, {4}}}, part_of(0, 4)}).find("no elements of this type"),
              std::string::npos);
    const Call ragged{"ragged_all_to_all", 1, {{kS32, {1, 4, 1}}, {type, {4}}, {type, {4}}}, {{type, {4}}}};
    EXPECT_NE(refusal(ragged).find("no elements of this type"), std::string::npos);
  }
}

TEST(CheckOperands, RefusesOtherSizes) {
  struct Case {
    Call call;
    std::string expected;
  };
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max(), kHalf = int64_t{1} << 32;
  const std::string needs = "a call needs one result per operand, and at least one operand; it has ",
                    too_many = "no memory holds so many elements", further = "takes the array with those before",
                    shape = "the table of a ragged all-to-all of 2 ranks has the shape (2, 4, a multiple of that)";
  for (const Case& each : std::vector<Case>{
           {{"all_reduce", 1, {}, {}}, needs + "0 operands and 0 results"},
           {{"all_reduce", 1, {{kF32, {9}}}, {}}, needs + "1 operands and 0 results"},
           {{"all_reduce", 1, {}, {{kF32, {9}}}}, needs + "0 operands and 1 results"},
           {{"all_reduce", 2, {{kF32, {9}}}, {{kF32, {8}}}},
            "operand 0 is float32[9], result 0 is float32[8]: in a group of 2 ranks, the result of such an operand has "
            "9 elements"},
           {{"all_gather", 2, {{kF32, {9}}}, {{kF32, {9}}}}, "has 18 elements"},
           {{"all_gather", 2, {{kF32, {0}}}, {{kF32, {2}}}}, "has 0 elements"},
           {{"reduce_scatter", 2, {{kF32, {9}}}, {{kF32, {4}}}}, "an operand has 2 blocks of equal size"},
           {{"all_to_all", 2, {{kF32, {9}}}, {{kF32, {8}}}}, "an operand has 2 blocks of equal size"},
           {{"all_reduce", 2, {{kF32, {9}}}, {{kF32, {9}}}, tree_of(6, 2, {0, 1})},
            "an operand has 2 blocks of equal size"},
           {{"all_reduce", 2, {{kF32, {8}}}, {{kF32, {8}}}, tree_of(6, 2, {0, 1})}, "has 4 elements"},
           {{"reduce_scatter", 2, {{kF32, {2, 2}}}, {{kF32, {1}}}, tree_of(18, 6, {0, 3})}, "has 4 elements"},
           {{"all_to_all", 2, {{kS8, {3}}}, {{kS8, {3}}}, kApart}, "one for each of the 2 ranks"},
           {{"all_to_all", 2, {{kS8, {3}}, {kS8, {4}}}, {{kS8, {3}}, {kS8, {4}}}, kApart}, "differ in their size"},
           {{"all_reduce", 1, {{kF32, {-1}}}, {{kF32, {-1}}}}, "operand 0 is float32[-1]: " + too_many},
           {{"all_reduce", 1, {{kF32, {kMost}}}, {{kF32, {kMost}}}}, too_many},
           {{"all_reduce", 1, {{kF32, {kHalf, kHalf}}}, {{kF32, {0}}}}, too_many},
           {{"all_reduce", 1, {{kF32, {0}}}, {{kF32, {kHalf, kHalf, 2}}}}, too_many},
           {{"all_reduce", 1, {{kF32, {-2, -2}}}, {{kF32, {4}}}}, too_many},
           {{"reduce_scatter", 2, {}, {{kF32, {5}}}, part_of(0, 10)}, "needs an operand and has one result"},
           {{"reduce_scatter", 2, {{kF32, {20}}}, {{kF32, {5}}, {kF32, {5}}}, part_of(0, 10)}, "has one result"},
           {{"reduce_scatter", 2, {{kF32, {20}}}, {{kF32, {5}}}, part_of(11, 10)},
            "10 elements from 11 are no part of 20 in blocks of 5 for each of 2 ranks"},
           {{"reduce_scatter", 2, {{kF32, {20}}}, {{kF32, {5}}}, part_of(0, 11)}, "are no part of 20"},
           {{"reduce_scatter", 2, {{kF32, {20}}}, {{kF32, {5}}}, part_of(kMost, 10)}, "are no part of 20"},
           {{"reduce_scatter", 2, {{kF32, {20}}}, {{kF32, {5}}}, part_of(kMost, kMost)}, "are no part of 20"},
           {{"all_gather", 2, {{kF32, {5}}}, {{kF32, {20}}}, part_of(4, 10)}, further},
           {{"all_gather", 2, {{kF32, {5}}, {kF32, {19}}}, {{kF32, {20}}}, part_of(4, 10)}, further},
           {{"all_gather", 2, {{kS8, {521}}}, {{kF32, {1030}}}, part_of(0, 1024)}, "are no part of 1030"},
           {{"all_gather", 2, {{kS8, {260}}, {kF32, {1030}}}, {{kF32, {1030}}}, part_of(4, 512)},
            "are no part of 1030"},
           {{"ragged_all_to_all", 2, {{kS32, {2, 4, 2}}, {kS8, {5}}}, {{kS8, {5}}}}, "has 3 operands and 1 result"},
           {{"ragged_all_to_all", 2, {{kS32, {2, 4, 3}}, {kS8, {5}}, {kS8, {5}}}, {{kS8, {5}}}}, shape},
           {{"ragged_all_to_all", 2, {{kS32, {1, 4, 2}}, {kS8, {5}}, {kS8, {5}}}, {{kS8, {5}}}}, shape},
           {{"ragged_all_to_all", 2, {{kS32, {2, 3, 2}}, {kS8, {5}}, {kS8, {5}}}, {{kS8, {5}}}}, shape},
           {{"ragged_all_to_all", 2, {{kS32, {16}}, {kS8, {5}}, {kS8, {5}}}, {{kS8, {5}}}}, shape},
           {{"ragged_all_to_all", 2, {{kS32, {2, 4, 2}}, {kS8, {5, 2}}, {kS8, {5, 1}}}, {{kS8, {5, 1}}}},
            "needs rows of one shape"},
           {{"ragged_all_to_all", 2, {{kS32, {2, 4, 2}}, {kS8, {}}, {kS8, {}}}, {{kS8, {}}}},
            "needs rows of one shape"},
           {{"ragged_all_to_all", 2, {{kS32, {2, 4, 2}}, {kS8, {5}}, {kS8, {4}}}, {{kS8, {5}}}},
            "needs a result for the array that it changes"}}) {
    const std::string error = refusal(each.call);
    EXPECT_NE(error.find(each.expected), std::string::npos) << error << ", not: " << each.expected;
  }
}

const Attributes kSwap = {{"sources", Numbers{1, 0}}};

TEST(CheckOperands, TakesAResultInItsOperandsBuffer) {
  for (const Call& call : std::vector<Call>{
           {"all_reduce", 2, {{kF32, {3}, 4096}, {kF32, {5}, 8192}}, {{kF32, {3}, 4096}, {kF32, {5}, 8192}}},
           {"all_reduce", 2, {{kF32, {3}, 8192}, {kF32, {5}, 4096}}, {{kF32, {3}, 8192}, {kF32, {5}, 4096}}},
           {"all_reduce", 2, {{kF32, {2, 4}, 4096}}, {{kF32, {8}, 4096}}},
           {"all_reduce", 2, {{kF32, {8}, 4096}}, {{kF32, {8}, 4096}}, tree_of(8, 2, {0, 1})},
           {"reduce", 2, {{kF32, {3}, 4096}}, {{kF32, {3}, 4096}}},
           {"broadcast", 2, {{kF32, {3}, 4096}}, {{kF32, {3}, 4096}}},
           {"all_gather", 2, {{kF32, {5}}, {kF32, {20}, 4096}}, {{kF32, {20}, 4096}}, part_of(4, 10)},
           {"ragged_all_to_all", 2, {{kS32, {2, 4, 6}}, {kS8, {5}}, {kS8, {7}, 4096}}, {{kS8, {7}, 4096}}},
           // Beside each other, and empty ones.
           {"all_to_all", 2, {{kF32, {4}, 4096}}, {{kF32, {4}, 4096 + 16}}},
           {"all_to_all", 2, {{kF32, {4}, 4096 + 16}}, {{kF32, {4}, 4096}}},
           {"all_to_all", 2, {{kF32, {0}, 4096}, {kF32, {4}}}, {{kF32, {0}, 4096}, {kF32, {4}, 4096}}}}) {
    EXPECT_EQ(refusal(call), "") << call.collective;
  }
}

// The engine would read what it has written. XLA lets a program say that a result takes an operand's buffer.
TEST(CheckOperands, RefusesAResultInAnotherBuffer) {
  struct Case {
    Call call;
    std::string arrays;
  };
  const std::string both = "operand 0 is float32[4], result 0 is float32[4]";
  for (const Case& each : std::vector<Case>{
           {{"all_to_all", 2, {{kF32, {4}, 4096}}, {{kF32, {4}, 4096}}}, both},
           {{"permute", 2, {{kF32, {4}, 4096}}, {{kF32, {4}, 4096}}, kSwap}, both},
           {{"all_gather", 2, {{kF32, {2}, 4096 + 8}}, {{kF32, {4}, 4096}}}, "operand 0 is float32[2], result 0"},
           {{"reduce_scatter", 2, {{kF32, {4}, 4096}}, {{kF32, {2}, 4096 + 8}}}, "operand 0 is float32[4], result 0"},
           {{"reduce_scatter", 1, {{kF32, {4}, 4096}}, {{kF32, {4}, 4096}}}, both},
           {{"all_reduce", 2, {{kF32, {4}, 4096}}, {{kF32, {4}, 4096 + 12}}}, both},
           {{"broadcast", 2, {{kF32, {4}, 4096 + 12}}, {{kF32, {4}, 4096}}}, both},
           {{"all_reduce", 2, {{kF32, {10}, 4096}}, {{kF32, {5}, 4096}}, tree_of(6, 2, {0, 1})},
            "operand 0 is float32[10], result 0 is float32[5]"},
           {{"all_reduce", 2, {{kF32, {4}}, {kF32, {4}, 4096}}, {{kF32, {4}, 4096}, {kF32, {4}}}},
            "operand 1 is float32[4], result 0 is float32[4]"},
           {{"all_reduce", 2, {{kF32, {4}}, {kF32, {4}}}, {{kF32, {4}, 4096}, {kF32, {4}, 4096 + 12}}},
            "result 0 is float32[4], result 1 is float32[4]"},
           // An operand that reaches over several results.
           {{"all_reduce", 2, {{kF32, {4}, 4096}, {kF32, {9}, 4096}}, {{kF32, {4}, 4096}, {kF32, {9}}}},
            "operand 1 is float32[9], result 0 is float32[4]"},
           {{"all_to_all", 2, {{kS8, {3}}, {kS8, {3}, 4096}}, {{kS8, {3}}, {kS8, {3}, 4096}}, kApart},
            "operand 1 is int8[3], result 1 is int8[3]"},
           {{"reduce_scatter", 2, {{kF32, {20}, 4096}}, {{kF32, {5}, 4096}}, part_of(4, 10)}, "operand 0"},
           {{"all_gather", 2, {{kF32, {5}, 4096 + 16}}, {{kF32, {20}, 4096}}, part_of(0, 10)}, "operand 0"},
           {{"all_gather", 2, {{kF32, {5}, 4096 + 16}, {kF32, {20}, 4096}}, {{kF32, {20}, 4096}}, part_of(4, 10)},
            "operand 0"},
           {{"ragged_all_to_all", 2, {{kS32, {2, 4, 6}}, {kS8, {7}, 4096}, {kS8, {7}}}, {{kS8, {7}, 4096}}},
            "operand 1 is int8[7], result 0 is int8[7]"},
           {{"ragged_all_to_all", 2, {{kS32, {2, 4, 6}, 4096}, {kS8, {7}}, {kS8, {7}}}, {{kS8, {7}, 4096}}},
            "operand 0 is int32[2,4,6], result 0 is int8[7]"}}) {
    const std::string error = refusal(each.call);
    EXPECT_NE(error.find(each.arrays), std::string::npos) << each.call.collective << ": " << error;
    EXPECT_NE(error.find("they share memory"), std::string::npos) << each.call.collective << ": " << error;
  }
}

}  // namespace
}  // namespace jax_ring::testing
