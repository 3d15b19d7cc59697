// attributes_test.cc: the decoded attributes of a custom call, and refused ones.
#include "attributes/attributes.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/support/frame.h"

// Opaque to handlers.
struct XLA_FFI_ExecutionContext {};

namespace jax_ring::testing {
namespace {

using Numbers = std::vector<int64_t>;

jax_ring::Attributes decoded(const Attributes& attributes) {
  const XLA_FFI_Api api = api_for_errors();
  XLA_FFI_ExecutionContext context;
  Frame frame(api, context, XLA_FFI_ExecutionStage_INSTANTIATE, attributes);
  return attributes_of(xla::ffi::Dictionary(&frame.get()->attrs));
}

std::string refusal(const Attributes& attributes) {
  try {
    decoded(attributes);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

// Attributes of a call of three ranks, with other values than a sum's.
Attributes with(const Attributes& changes, const std::string& collective = "all_reduce") {
  Attributes all = changes;
  all.merge(call_attributes(3, collective));
  return all;
}

TEST(AttributesOf, DecodesThem) {
  const jax_ring::Attributes call = decoded(with({{"site", "train.py:7"},
                                                  {"sources", Numbers{1, -1, 0}},
                                                  {"group_sizes", Numbers{3, 3}},
                                                  {"members", Numbers{0, 2, 4, 1, 3, 5}},
                                                  {"processes", Numbers{0, 0, 1, 0, 0, 1}},
                                                  {"one_shot_bytes", Numbers{64, 32}},
                                                  {"two_shot_bytes", Numbers{128, 96}},
                                                  {"lane", int64_t{2}}},
                                                 "permute"));
  EXPECT_EQ(call.text, "the call, called at train.py:7");
  EXPECT_EQ(call.plan.collective, Collective::permute);
  EXPECT_EQ(call.plan.sources, call.sources.data());
  EXPECT_EQ(call.sources, (std::vector<int>{1, kNoRank, 0}));
  EXPECT_EQ(call.algorithm, std::nullopt);
  EXPECT_EQ(call.thresholds_of(1).one_shot, 32u);
  EXPECT_EQ(call.thresholds_of(1).two_shot, 96u);
  EXPECT_FALSE(call.part.has_value());
  EXPECT_EQ(call.lane, 2);
  EXPECT_THROW(decoded(with({})).thresholds_of(0), std::invalid_argument);
  const jax_ring::Attributes part =
      decoded(with({{"part", Numbers{6, 12}}, {"rounds_to", "bfloat16"}}, "reduce_scatter"));
  EXPECT_EQ(part.part->begin, 6u);
  EXPECT_EQ(part.part->count, 12u);
  EXPECT_EQ(part.rounds_to, xla::ffi::BF16);
}

TEST(AttributesOf, EscapesTextOfAProgram) {
  const jax_ring::Attributes call = decoded(with({{"call", "a\x1b[2J"}, {"site", "train.py:7\n\xff"}}));
  EXPECT_EQ(call.call, "a\\x1b[2J");
  EXPECT_EQ(call.text, "a\\x1b[2J, called at train.py:7\\x0a\\xff");
  EXPECT_NE(refusal(with({{"order", "\x1b[2J"}})).find("\\x1b[2J"), std::string::npos);
}

// The hash differs for calls that compute something else, but not for calls on other lines.
TEST(AttributesOf, TellsCallsApart) {
  const auto hash = [](const Attributes& changes, const std::string& collective = "all_reduce") {
    return decoded(with(changes, collective)).hash.value();
  };
  EXPECT_EQ(hash({}), hash({{"site", "train.py:7"}, {"program", "jit_f/0#1"}}));
  for (const Attributes& other : {Attributes{{"call", "another"}},
                                  {{"op", "max"}},
                                  {{"root", int64_t{1}}},
                                  {{"order", "ring"}},
                                  {{"algorithm", "ring"}}}) {
    EXPECT_NE(hash({}), hash(other));
  }
  EXPECT_NE(hash({{"part", Numbers{0, 3}}}, "all_gather"), hash({{"part", Numbers{3, 3}}}, "all_gather"));
  EXPECT_NE(hash({{"sources", Numbers{1, 2, 0}}}, "permute"), hash({{"sources", Numbers{2, 0, 1}}}, "permute"));
}

TEST(AttributesOf, RefusesThoseOfAnotherVersion) {
  const std::string rest =
      ", so the program was exported or compiled with another version of jax_ring. Export or compile it again with "
      "the version that runs it.";
  for (const auto& [name, value] : call_attributes(3)) {
    Attributes fewer = call_attributes(3);
    fewer.erase(name);
    const std::string call = name == "call" ? "jax_ring" : "the call";
    EXPECT_NE(refusal(fewer).find("the attribute '" + name + "' is missing or has another type" + rest),
              std::string::npos)
        << refusal(fewer);
  }
  EXPECT_EQ(refusal(with({{"members", "0, 1, 2"}})),
            "the call: the attribute 'members' is missing or has another type" + rest);
  EXPECT_EQ(refusal(with({{"partitions", Numbers{}}})), "the call: there are 22 attributes, not 21" + rest);
}

TEST(AttributesOf, RefusesWhatDoesNotFit) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  struct Case {
    Attributes changes;
    std::string expected, collective = "all_reduce";
  };
  const std::string not_for_a_part = "only a reduce-scatter and an all-gather can be for a part",
                    no_rank = " of a permutation of 3 ranks is no rank of it, or has two receivers";
  for (const Case& each : std::vector<Case>{
           {{{"op", "product"}}, "unknown attribute value product"},
           {{{"root", int64_t{3}}}, "the root, rank 3, is not in a group of 3"},
           {{{"root", int64_t{1} << 32}}, "the root, rank 4294967296, is not in a group of 3"},
           {{{"root", int64_t{-1}}}, "the root, rank -1, is not in a group of 3"},
           {{{"processes", Numbers{0, 0}}}, "there are 3 members and 2 processes of them"},
           {{{"group_sizes", Numbers{2}}}, "groups of the sizes [2] do not hold 3 members"},
           {{{"group_sizes", Numbers{2, 2}}}, "groups of the sizes [2, 2] do not hold 3 members"},
           {{{"group_sizes", Numbers{kMost, kMost, 5}}}, "do not hold 3 members"},
           {{{"group_sizes", Numbers{3, 0}}}, "is not in a group of 0"},
           {{{"group_sizes", Numbers{}}}, "groups of the sizes [] do not hold 3 members"},
           {{{"group_sizes", Numbers{}}, {"members", Numbers{}}, {"processes", Numbers{}}}, "do not hold 0 members"},
           {{{"members", Numbers{0, 1, 0}}}, "a member is in the groups twice: [0, 1, 0]"},
           {{{"one_shot_bytes", Numbers{1}}}, "there are 1 groups, with 1 and 0 thresholds"},
           {{{"one_shot_bytes", Numbers{1}}, {"two_shot_bytes", Numbers{-1}}}, "are 1 and -1 bytes"},
           {{{"part", Numbers{0, 3}}}, not_for_a_part},
           {{{"part", Numbers{0}}}, not_for_a_part, "all_gather"},
           {{{"part", Numbers{-1, 3}}}, not_for_a_part, "all_gather"},
           {{{"blocks_apart", int64_t{1}}}, "only an all-to-all can have an operand for each rank"},
           {{{"rounds_to", "float32"}}, "unknown attribute value float32"},
           {{{"order", "tree"}}, "order 'tree' needs a tree for each of the 1 groups"},
           {{{"sources", Numbers{1, 2, 0}}}, "there are 3 sources for a group of 3 ranks"},
           {{{"sources", Numbers{1, 0}}}, "there are 2 sources for a group of 3 ranks", "permute"},
           {{}, "there are 0 sources for a group of 3 ranks", "permute"},
           {{{"sources", Numbers{3, 0, 1}}}, "the source 3" + no_rank, "permute"},
           {{{"sources", Numbers{-2, 0, 1}}}, "the source -2" + no_rank, "permute"},
           {{{"sources", Numbers{1, 1, 0}}}, "the source 1" + no_rank, "permute"},
       }) {
    const std::string error = refusal(with(each.changes, each.collective));
    EXPECT_EQ(error.rfind("the call: ", 0), 0u) << error;
    EXPECT_NE(error.find(each.expected), std::string::npos) << error << ", not: " << each.expected;
  }
}

}  // namespace
}  // namespace jax_ring::testing
