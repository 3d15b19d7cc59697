// handler_test.cc: the CPU engine's handlers, called as XLA calls them: gathers that decode, in parts, and their
// errors.
#include "xla_cpu/handler.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <ostream>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/fold/fold_kernels.h"
#include "cpu/waiting/wait_mode_tuner.h"
#include "tests/support/xla_calls.h"
#include "xla_cpu/calls_of_xla.h"

namespace jax_ring::cpu::testing {
namespace {

// The attributes of a call whose ranks are one group in this process.
Attributes attributes_of(const std::string& collective, int num_ranks, std::vector<int64_t> part = {},
                         bool blocks_apart = false) {
  Attributes all = jax_ring::testing::call_attributes(num_ranks, collective);
  all["part"] = std::move(part);
  all["blocks_apart"] = int64_t{blocks_apart};
  return all;
}

TEST(Handler, SumsTheRanksOperands) {
  constexpr int kRanks = 3;
  const Instruction sum(attributes_of("all_reduce", kRanks));
  as_ranks(kRanks, [&, run_id = next_run_id()](int rank) {
    std::vector<float> operand(100, static_cast<float>(1 << rank)), result(100);
    EXPECT_EQ(sum.call(rank, run_id, {{XLA_FFI_DataType_F32, operand.data(), {100}}},
                       {{XLA_FFI_DataType_F32, result.data(), {100}}}),
              "");
    EXPECT_EQ(result, std::vector<float>(100, 7));
  });
}

// In a message that one thread copies, and in one that several share.
TEST(Handler, ExchangesBlocksThatAreApart) {
  for (int64_t count : {int64_t{5}, int64_t{1} << 17}) {
    constexpr int kRanks = 3;
    const Instruction exchange(attributes_of("all_to_all", kRanks, {}, true));
    as_ranks(kRanks, [&, run_id = next_run_id()](int rank) {
      std::vector<std::vector<float>> blocks, results(kRanks, std::vector<float>(count));
      std::vector<FrameBuffer> in, out;
      for (int to = 0; to < kRanks; ++to) blocks.emplace_back(count, static_cast<float>(10 * rank + to));
      for (auto& block : blocks) in.push_back({XLA_FFI_DataType_F32, block.data(), {count}});
      for (auto& result : results) out.push_back({XLA_FFI_DataType_F32, result.data(), {count}});
      EXPECT_EQ(exchange.call(rank, run_id, in, out), "");
      for (int from = 0; from < kRanks; ++from) {
        EXPECT_EQ(results[from], std::vector<float>(count, static_cast<float>(10 * from + rank)));
      }
    });
  }
}

TEST(Handler, RefusesBlocksApartThatDoNotFit) {
  const Instruction exchange(attributes_of("all_to_all", 2, {}, true));
  float a[3] = {}, b[3] = {}, c[3] = {}, d[3] = {};
  const FrameBuffer three{XLA_FFI_DataType_F32, a, {3}}, two{XLA_FFI_DataType_F32, b, {2}},
      result{XLA_FFI_DataType_F32, c, {3}}, other{XLA_FFI_DataType_F32, d, {2}};
  EXPECT_NE(exchange.call(0, next_run_id(), {three}, {result}).find("one for each of the 2 ranks; it has 1 operands"),
            std::string::npos);
  EXPECT_NE(exchange.call(0, next_run_id(), {three, two}, {result, other}).find("the blocks differ in their size"),
            std::string::npos);
}

// A write beyond a result, or a gap in it, is refused before the ranks meet. Other rules are in operands_test.cc.
TEST(Handler, RefusesResultsOfAnotherSize) {
  for (const char* collective : {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}) {
    const Instruction call(attributes_of(collective, 1));
    for (int64_t size : {99, 101}) {
      std::vector<float> operand(100), result(101);
      const std::string error = call.call(0, next_run_id(), {{XLA_FFI_DataType_F32, operand.data(), {100}}},
                                          {{XLA_FFI_DataType_F32, result.data(), {size}}});
      EXPECT_NE(error.find("the result of such an operand has 100 elements"), std::string::npos)
          << collective << ", " << size << ": " << error;
    }
  }
}

// A call whose other ranks are all elsewhere would be complete at once, without their operands.
TEST(Handler, RefusesARankOfAnotherProcess) {
  Attributes all = attributes_of("all_reduce", 2);
  all["processes"] = std::vector<int64_t>{5, 5};
  const Instruction sum(all);
  float operand = 1, result = 0;
  EXPECT_NE(sum.call(1, next_run_id(), {{XLA_FFI_DataType_F32, &operand, {1}}}, {{XLA_FFI_DataType_F32, &result, {1}}})
                .find("partition 1 is in another process"),
            std::string::npos);
}

// ---- The notes around XLA's collectives -----------------------------------------------------------------------------

std::string between_hosts(const Attributes& changes, std::vector<FrameBuffer> operands,
                          std::vector<FrameBuffer> results) {
  using Numbers = std::vector<int64_t>;
  Attributes all = changes;
  all.merge(Attributes{{"begins", int64_t{1}},
                       {"call", "the call"},
                       {"site", ""},
                       {"members", Numbers{0, 1}},
                       {"processes", Numbers{0, 5}},
                       {"group_sizes", Numbers{2}}});
  uint32_t rank = 0;
  operands.insert(operands.begin(), {XLA_FFI_DataType_U32, &rank, {}});
  XLA_FFI_ExecutionContext context{next_run_id(), nullptr, nullptr};
  Frame frame(api(), context, XLA_FFI_ExecutionStage_EXECUTE, all, std::move(operands), std::move(results));
  const std::string error = take_message(between_hosts_execute(frame.get()));
  for (const CallOfXla& call : CallsOfXla::instance().take()) {
    EXPECT_EQ(call.processes, (Numbers{0, 5}));
  }
  return error;
}

TEST(BetweenHosts, CopiesOperandsThatFit) {
  float from[] = {1, 2, 3}, to[] = {0, 0, 0};
  const std::vector<FrameBuffer> operand{{XLA_FFI_DataType_F32, from, {3}}};
  EXPECT_EQ(between_hosts({}, operand, {{XLA_FFI_DataType_F32, to, {3}}}), "");
  EXPECT_EQ(to[2], 3);
  const std::string error = between_hosts({}, operand, {{XLA_FFI_DataType_S8, to, {3}}});
  EXPECT_NE(error.find("operand 0 is float32[3], result 0 is int8[3]"), std::string::npos) << error;
  EXPECT_NE(between_hosts({}, operand, {{XLA_FFI_DataType_F32, to, {2}}}).find("they must have one size"),
            std::string::npos);
  EXPECT_NE(between_hosts({}, operand, {}).find("it has 1 operands and 0 results"), std::string::npos);
  // XLA packs two of these into a byte.
  unsigned char packed[] = {0x21, 0x43}, copy[] = {0, 0};
  EXPECT_EQ(between_hosts({}, {{XLA_FFI_DataType_S4, packed, {3}}}, {{XLA_FFI_DataType_S4, copy, {3}}}), "");
  EXPECT_EQ(copy[1], 0x43);
}

TEST(BetweenHosts, RefusesGroupsThatAreNotThere) {
  for (const std::vector<int64_t>& sizes : std::vector<std::vector<int64_t>>{{-1, 3}, {3}, {int64_t{1} << 62}}) {
    const std::string error = between_hosts({{"group_sizes", sizes}}, {}, {});
    EXPECT_NE(error.find("of the 2 members that are left"), std::string::npos) << error;
  }
}

// ---- Loops
// -----------------------------------------------------------------------------------------------------------

// Long enough for the ranks to wait on the pool for some of the time.
void sum_in_a_loop(bool pool_is_full) {
  constexpr int kRanks = 3;
  constexpr WaitModeTuner::Duration kTime = 2 * WaitModeTuner::kRounds * WaitModeTuner::kTime;
  const Instruction sum(attributes_of("all_reduce", kRanks));
  std::atomic<int> num_iterations{0};
  as_ranks(kRanks, [&, run_id = next_run_id()](int rank) {
    const auto begin = std::chrono::steady_clock::now();
    std::vector<float> operand(100), result(100);
    // The ranks agree to go on: the last element counts those that would.
    for (int iteration = 0; iteration == 0 || result.back() == kRanks; ++iteration) {
      operand.assign(100, static_cast<float>(iteration << rank));
      operand.back() = std::chrono::steady_clock::now() - begin < kTime || iteration < 200;
      ASSERT_EQ(sum.call(rank, run_id, {{XLA_FFI_DataType_F32, operand.data(), {100}}},
                         {{XLA_FFI_DataType_F32, result.data(), {100}}}, pool_is_full),
                "");
      ASSERT_EQ(result.front(), 7 * iteration);
      num_iterations = iteration;
    }
  });
  EXPECT_GE(num_iterations, 200);
}

TEST(Handler, SumsTheRanksOperandsInALoop) { sum_in_a_loop(false); }
TEST(Handler, SumsTheRanksOperandsWhereThePoolIsFull) { sum_in_a_loop(true); }

TEST(Handler, FailsARankWhosePeersDoNotArrive) {
  const ScopedDeadline deadline(0.05);
  const Instruction sum(attributes_of("all_reduce", 2));
  float operand = 1, result = 0;
  const std::string error =
      sum.call(1, next_run_id(), {{XLA_FFI_DataType_F32, &operand, {1}}}, {{XLA_FFI_DataType_F32, &result, {1}}});
  EXPECT_NE(error.find("the call"), std::string::npos) << error;
}

// ---- Gathers that decode ------------------------------------------------------------------------------------------

// A format that crosses hosts and that an all-gather decodes.
struct Format {
  const char* name;
  XLA_FFI_DataType packets, values;
  size_t packet_bytes, block_elements, value_bytes;
  // Writes a packet of random codes, and their values.
  void (*make)(std::mt19937_64& random, unsigned char* packet, unsigned char* values);
};

void make_int8(std::mt19937_64& random, unsigned char* packet, unsigned char* values) {
  const float scale = std::ldexp(1.5f, static_cast<int>(random() % 40) - 20);
  std::memcpy(packet + kGroupElements, &scale, sizeof(scale));
  for (size_t i = 0; i < kGroupElements; ++i) {
    const int code = static_cast<int>(random() % 256) - 128;
    const float value = code == -128   ? std::numeric_limits<float>::quiet_NaN()
                        : code == 127  ? std::numeric_limits<float>::infinity()
                        : code == -127 ? -std::numeric_limits<float>::infinity()
                                       : static_cast<float>(code) * scale;
    packet[i] = static_cast<unsigned char>(code);
    std::memcpy(values + i * sizeof(value), &value, sizeof(value));
  }
}

void PrintTo(const Format& format, std::ostream* out) { *out << format.name; }

const Format kFormats[] = {
    {"int8", XLA_FFI_DataType_S8, XLA_FFI_DataType_F32, kPacketBytes, kGroupElements, sizeof(float), make_int8}};

class DecodingGather : public ::testing::TestWithParam<Format> {
 protected:
  // The ranks' packets for each part of an array, and its values.
  struct Problem {
    // packets: of each rank, for each part.
    Problem(const Format& format, int num_ranks, const std::vector<size_t>& packets)
        : format(format), num_ranks(num_ranks) {
      std::mt19937_64 random(num_ranks);
      for (size_t each : packets) {
        const size_t block_bytes = format.block_elements * format.value_bytes;
        const int64_t begin = size();
        operands.emplace_back(num_ranks, Bytes(each * format.packet_bytes));
        for (Bytes& of_rank : operands.back()) {
          for (size_t i = 0; i < each; ++i) {
            values.resize(values.size() + block_bytes);
            format.make(random, &of_rank[i * format.packet_bytes], &values[values.size() - block_bytes]);
          }
        }
        calls.push_back(std::make_unique<Instruction>(attributes_of("all_gather", num_ranks, {begin, size() - begin})));
      }
    }

    int64_t size() const { return static_cast<int64_t>(values.size() / format.value_bytes); }

    // All parts, one after the other, as one rank, into one array or each into another one.
    void gather(int rank, int64_t run_id, bool in_place) const {
      std::vector<OffsetBuffer> results;
      for (size_t i = 0; i < calls.size(); ++i) {
        if (i == 0 || !in_place) results.emplace_back(Bytes(values.size(), 0xa5), 0);
        OffsetBuffer operand(operands[i][rank], 0);
        std::vector<FrameBuffer> taken{{format.packets, operand.data(), {static_cast<int64_t>(operand.size())}}};
        if (i > 0) taken.push_back(array(in_place ? results.back() : results[i - 1]));
        ASSERT_EQ(calls[i]->call(rank, run_id, taken, {array(results.back())}), "") << "rank " << rank;
      }
      EXPECT_EQ(std::memcmp(results.back().data(), values.data(), values.size()), 0) << "rank " << rank;
    }

    FrameBuffer array(OffsetBuffer& buffer) const { return {format.values, buffer.data(), {size()}}; }

    const Format& format;
    int num_ranks;
    std::vector<std::vector<Bytes>> operands;  // by part, then rank
    std::vector<unsigned char> values;
    std::vector<std::unique_ptr<Instruction>> calls;  // one for each part
  };

  // The error of a rank alone: none of these calls may wait for the others.
  std::string refusal(std::vector<int64_t> part, size_t operand_bytes, size_t size, bool with_array_before = false) {
    const Instruction gather(attributes_of("all_gather", 2, std::move(part)));
    Bytes operand(operand_bytes), result(size * GetParam().value_bytes);
    const FrameBuffer array{GetParam().values, result.data(), {static_cast<int64_t>(size)}};
    std::vector<FrameBuffer> taken{{GetParam().packets, operand.data(), {static_cast<int64_t>(operand_bytes)}}};
    if (with_array_before) taken.push_back(array);
    return gather.call(0, next_run_id(), taken, {array});
  }
};

TEST_P(DecodingGather, OfSmallAndLargeParts) {
  // Another thread does the work of all parts but the last one. Threads share 300 packets; those of 4 ranks are more
  // than the caches hold.
  for (int num_ranks : {1, 2, 4}) {
    for (const std::vector<size_t>& packets : {std::vector<size_t>{1}, {300}, {3, 1, 300}, {300, 2}}) {
      SCOPED_TRACE(::testing::Message() << num_ranks << " ranks, packets " << ::testing::PrintToString(packets));
      const Problem problem(GetParam(), num_ranks, packets);
      for (bool in_place : {false, true}) {
        as_ranks(num_ranks, [&, run_id = next_run_id()](int rank) { problem.gather(rank, run_id, in_place); });
      }
    }
  }
}

TEST_P(DecodingGather, InSeveralExecutionsAtOnce) {
  constexpr int kRanks = 3, kRuns = 3;
  const Problem problem(GetParam(), kRanks, {2, 1, 120, 5});
  for (int i = 0; i < 20 / kSlowdown + 1; ++i) {
    int64_t run_ids[kRuns];
    for (int64_t& run_id : run_ids) run_id = next_run_id();
    as_ranks(kRanks * kRuns, [&](int i) { problem.gather(i % kRanks, run_ids[i / kRanks], i / kRanks == 0); });
  }
}

TEST_P(DecodingGather, RefusesPartsThatAreNotWholeBlocks) {
  const int64_t block = static_cast<int64_t>(GetParam().block_elements), half = block / 2;
  const size_t packet = GetParam().packet_bytes, size = 4 * block;
  const std::string no_part = "are no part of " + std::to_string(size);
  for (const std::string& error :
       {refusal({half, 2 * block}, packet, size, true), refusal({0, 2 * block}, packet + 1, size),
        refusal({0, 2 * block}, 2 * packet, size), refusal({3 * block, 2 * block}, packet, size, true)}) {
    EXPECT_NE(error.find(no_part), std::string::npos) << error;
  }
  EXPECT_NE(refusal({2 * block, 2 * block}, packet, size).find("takes the array with those before"), std::string::npos);
}

INSTANTIATE_TEST_SUITE_P(Formats, DecodingGather, ::testing::ValuesIn(kFormats),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace jax_ring::cpu::testing
