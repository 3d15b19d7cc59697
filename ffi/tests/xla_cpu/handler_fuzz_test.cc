// handler_fuzz_test.cc: calls as programs from elsewhere may contain, right ones and damaged ones: under
// AddressSanitizer, none reads or writes beyond its buffers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <iterator>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "attributes/attributes.h"
#include "attributes/xla_types.h"
#include "collective/tree.h"
#include "tests/support/xla_calls.h"

namespace jax_ring::cpu::testing {
namespace {

using Numbers = std::vector<int64_t>;

// Calls of each test. JAX_RING_FUZZ_CASES sets another number.
constexpr uint64_t kCases = 5000;

constexpr int64_t kMost = std::numeric_limits<int64_t>::max(), kLeast = std::numeric_limits<int64_t>::min();
constexpr int64_t kNumbers[] = {-1, 0, 1, 2, 3, 5, 255, 1 << 24, int64_t{1} << 31, int64_t{1} << 32, kMost, kLeast};
constexpr int64_t kSizes[] = {-1, 0, 1, 2, 3, 257, int64_t{1} << 31, int64_t{1} << 62, kMost, kLeast};

struct Array {
  int type;
  Numbers sizes;
  Numbers values = {};  // of an operand that is a table, of int64; else random
};

struct Call {
  bool may_lack_ranks = false;  // for which the others wait
  Attributes attributes;
  std::vector<uint32_t> partitions;
  std::vector<Array> operands, results;
};

// The elements of an array, if memory holds so many.
std::optional<uint64_t> count_of(const Numbers& sizes) {
  uint64_t count = 1;
  for (int64_t size : sizes) {
    if (size < 0 || __builtin_mul_overflow(count, static_cast<uint64_t>(size), &count)) return std::nullopt;
  }
  if (count > uint64_t{1} << 58) return std::nullopt;
  return count;
}

class Generator {
 public:
  explicit Generator(uint64_t seed) : random_(seed) {}

  int below(uint64_t limit) { return static_cast<int>(random_() % limit); }
  template <class Array>
  auto& one_of(Array& all) {
    return all[below(std::size(all))];
  }

  // A call that is right.
  Call call() {
    const int num_groups = 1 + below(2), size = 1 + below(4), kind = below(std::size(kCollectives));
    const Plan plan{static_cast<Collective>(kind), static_cast<Order>(below(std::size(kOrders)))};
    Call call{
        false, jax_ring::testing::call_attributes(num_groups * size, std::string(kCollectives[kind])), {}, {}, {}};
    for (int i = 0; i < num_groups * size; ++i) call.partitions.push_back(i);
    Attributes& all = call.attributes;
    all["group_sizes"] = Numbers(num_groups, size);
    all["op"] = std::string(one_of(kOps));
    all["order"] = std::string(kOrders[static_cast<int>(plan.order)]);
    all["root"] = int64_t{below(size)};
    if (plan.collective == Collective::permute) all["sources"] = permutation(size);
    if (plan.collective == Collective::ragged_all_to_all) {
      add_ragged(call, size);
    } else if (plan.collective == Collective::all_to_all && below(2) == 0) {
      all["blocks_apart"] = int64_t{1};
      const Array block{any_type(plan), {below(3), below(400)}};
      call.operands = call.results = std::vector<Array>(size, block);
    } else if (num_input_blocks(plan, size) != num_output_blocks(plan, size) && below(2) == 0) {
      all["order"] = "rank";
      add_part(call, plan.collective == Collective::reduce_scatter, size);
    } else {
      const auto [slots, sums] = folds_along_tree(plan) ? add_tree(all, plan, num_groups, size) : std::pair(1, 1);
      const int type = any_type(plan);
      for (int i = 1 + below(3); i > 0; --i) {
        const int64_t block = below(5) == 0 ? below(20000) : below(9);
        call.operands.push_back({type, {slots * num_input_blocks(plan, size), block}});
        call.results.push_back({type, {sums * num_output_blocks(plan, size), block}});
      }
    }
    return call;
  }

  // Changes one thing.
  void damage(Call& call) {
    std::vector<Array>& arrays = below(2) == 0 ? call.operands : call.results;
    switch (below(9)) {
      case 0:
        if (!arrays.empty()) one_of(arrays).type = below(5) == 0 ? 34 + below(30) : below(34);
        return;
      case 1:
        if (!arrays.empty()) damage_numbers(one_of(arrays).sizes, kSizes);
        return;
      case 2:
        if (!arrays.empty()) arrays.erase(arrays.begin() + below(arrays.size()));
        return;
      case 3:
        if (!arrays.empty()) arrays.insert(arrays.begin() + below(arrays.size() + 1), Array(one_of(arrays)));
        return;
      case 4:
        if (!call.operands.empty() && !call.operands[0].values.empty()) {
          one_of(call.operands[0].values) = one_of(kNumbers);
        }
        return;
      case 5:
        if (below(8) != 0) return;  // it takes time
        one_of(call.partitions) = static_cast<uint32_t>(one_of(kNumbers));
        call.may_lack_ranks = true;
        return;
      default:
        const auto attribute = std::next(call.attributes.begin(), below(call.attributes.size()));
        if (attribute->first == "members") {
          if (below(8) != 0) return;  // likewise
          call.may_lack_ranks = true;
        }
        damage_attribute(call.attributes, attribute);
    }
  }

  std::vector<unsigned char> bytes(size_t count) {
    std::vector<unsigned char> all(count);
    unsigned char factor = static_cast<unsigned char>(random_());
    for (size_t i = 0; i < count; ++i) all[i] = static_cast<unsigned char>(i * factor);
    return all;
  }

 private:
  int any_type(const Plan& plan) {
    for (;;) {
      const int type = below(34);
      const XlaType of_xla = xla_type_of(static_cast<xla::ffi::DataType>(type));
      if (of_xla.bytes() > 0 && (only_moves(plan) || of_xla.dtype != DType::count)) return type;
    }
  }

  Numbers permutation(int size) {
    Numbers sources;
    for (int i = 0; i < size; ++i) sources.insert(sources.begin() + below(sources.size() + 1), i);
    for (int64_t& source : sources) source = below(4) == 0 ? -1 : source;
    return sources;
  }

  // Returns the slots of an operand and the sums of a result.
  std::pair<int, int> add_tree(Attributes& all, const Plan& plan, int num_groups, int size) {
    // A reduce-scatter may be in a group without all ranks of the tree.
    const int left_out = plan.collective == Collective::reduce_scatter ? below(3) : 0;
    const int num_ranks = size + left_out, shards = num_ranks * (1 + below(7));
    std::vector<int> ranks;
    for (int rank = 0; rank < num_ranks; ++rank) ranks.push_back(rank);
    for (int i = 0; i < left_out; ++i) ranks.erase(ranks.begin() + below(ranks.size()));
    all["tree_shards"] = Numbers(num_groups, shards);
    all["tree_sizes"] = Numbers(num_groups, num_ranks);
    Numbers places;
    for (int i = 0; i < num_groups; ++i) places.insert(places.end(), ranks.begin(), ranks.end());
    all["tree_ranks"] = places;
    const Tree tree(shards, num_ranks, ranks);
    const bool scatters = plan.collective == Collective::reduce_scatter;
    return {tree.num_slots(), scatters ? static_cast<int>(tree.roots().size()) : 1};
  }

  void add_part(Call& call, bool scatters, int size) {
    Attributes& all = call.attributes;
    all["op"] = "sum";
    int from = any_type({}), to = from;
    int64_t of_operand = 1, of_result = 1;
    const int form = below(4);
    if (form == 1) {
      from = one_of((const int[]){XLA_FFI_DataType_F16, XLA_FFI_DataType_BF16}), to = XLA_FFI_DataType_F32;
    } else if (form == 2 && !scatters) {
      from = XLA_FFI_DataType_S8, to = XLA_FFI_DataType_F32, of_operand = kPacketBytes, of_result = kGroupElements;
    } else if (form == 3 && scatters) {
      from = to = XLA_FFI_DataType_F32;
      all["rounds_to"] = below(2) == 0 ? "float16" : "bfloat16";
    }
    const int64_t blocks = below(50), begin = of_result * below(40), length = blocks * of_result * size,
                  whole = begin + length + below(20);
    all["part"] = Numbers{begin, length};
    call.operands.push_back({from, {scatters ? whole : blocks * of_operand}});
    call.results.push_back({to, {scatters ? blocks : whole}});
    if (!scatters && (begin > 0 || below(4) == 0)) call.operands.push_back(call.results[0]);
    if (below(4) == 0) call.operands.push_back({XLA_FFI_DataType_TOKEN, {}});
  }

  void add_ragged(Call& call, int size) {
    const int each = 1 + below(3), slices = each * size;
    const int64_t columns = below(4), rows = slices * 3;
    Numbers table(4 * size * slices);
    for (int rank = 0; rank < size; ++rank) {
      for (int slice = 0; slice < slices; ++slice) {
        const int other = slice / each, there = rank * each + slice % each;
        const int64_t count = below(3);
        table[(4 * rank + 0) * slices + slice] = 3 * slice;
        table[(4 * rank + 1) * slices + slice] = count;
        table[(4 * rank + 2) * slices + slice] = 3 * there;
        table[(4 * other + 3) * slices + there] = count;
      }
    }
    const Array data{any_type({Collective::ragged_all_to_all}), {rows, columns}};
    call.operands = {{XLA_FFI_DataType_S64, {size, 4, slices}, table}, data, data};
    call.results = {data};
  }

  template <class Others>
  void damage_numbers(Numbers& numbers, const Others& others) {
    const int where = below(numbers.size() + 1);
    switch (below(4)) {
      case 0:
        numbers.insert(numbers.begin() + where, one_of(others));
        return;
      case 1:
        if (!numbers.empty()) numbers.pop_back();
        return;
      case 2:
        if (int64_t* each = numbers.empty() ? nullptr : &one_of(numbers)) {
          *each = std::min(std::max(*each, kLeast + 1), kMost - 1) + (below(2) == 0 ? 1 : -1);
        }
        return;
      default:
        if (!numbers.empty()) one_of(numbers) = one_of(others);
    }
  }

  void damage_attribute(Attributes& all, Attributes::iterator attribute) {
    jax_ring::testing::Attribute& value = attribute->second;
    if (below(12) == 0) return void(all.erase(attribute));
    if (below(12) == 0) {
      value = one_of((const jax_ring::testing::Attribute[]){int64_t{1}, "x", Numbers{1}, std::vector<int32_t>{1}});
      return;
    }
    if (auto* number = std::get_if<int64_t>(&value)) {
      *number = one_of(kNumbers);
    } else if (auto* numbers = std::get_if<Numbers>(&value)) {
      damage_numbers(*numbers, kNumbers);
    } else if (auto* text = std::get_if<std::string>(&value)) {
      *text = one_of((const char* const[]){"", "\xff\n", "all_gather", "reduce_scatter", "permute", "all_to_all",
                                           "tree", "ring", "max", "one_shot", "float16", "bfloat16", "p#1"});
    }
  }

  std::mt19937_64 random_;
};

// The memory of one rank, of exactly the arrays' sizes, so that AddressSanitizer sees what is beyond.
class Memory {
 public:
  std::vector<FrameBuffer> add(const std::vector<Array>& arrays, Generator& random) {
    std::vector<FrameBuffer> buffers;
    for (const Array& array : arrays) {
      const size_t bits = xla_type_of(static_cast<xla::ffi::DataType>(array.type)).bits;
      const size_t bytes = (count_of(array.sizes).value_or(0) * bits + 7) / 8;
      std::vector<unsigned char> content = random.bytes(bytes);
      const auto* const values = reinterpret_cast<const unsigned char*>(array.values.data());
      for (size_t i = 0; i < std::min(bytes, array.values.size() * sizeof(int64_t)); ++i) content[i] = values[i];
      memory_.push_back(std::make_unique<unsigned char[]>(bytes));
      std::copy(content.begin(), content.end(), memory_.back().get());
      buffers.push_back(
          {static_cast<XLA_FFI_DataType>(array.type), bytes == 0 ? nullptr : memory_.back().get(), array.sizes});
    }
    return buffers;
  }

 private:
  std::vector<std::unique_ptr<unsigned char[]>> memory_;
};

bool fits_memory(const std::vector<Array>& arrays) {
  for (const Array& array : arrays) {
    if (count_of(array.sizes).value_or(0) > 1 << 22) return false;
  }
  return true;
}

// The ranks' errors, joined.
std::string run(const Call& call, Generator& random) {
  try {
    const Instruction instruction(call.attributes);
    const ScopedDeadline deadline(call.may_lack_ranks ? 0.02 : 20);
    const int64_t run_id = next_run_id();
    std::vector<Memory> memory(call.partitions.size());
    std::vector<std::unique_ptr<Execution>> ranks;
    for (size_t i = 0; i < call.partitions.size(); ++i) {
      auto operands = memory[i].add(call.operands, random), results = memory[i].add(call.results, random);
      ranks.push_back(instruction.start(call.partitions[i], run_id, std::move(operands), std::move(results)));
    }
    std::string errors;
    for (const auto& rank : ranks) errors += rank->wait();
    return errors;
  } catch (const std::runtime_error& error) {
    return error.what();
  }
}

class HandlerFuzz : public ::testing::TestWithParam<int> {};

// JAX_RING_FUZZ_SEED=n is case n alone.
TEST_P(HandlerFuzz, ReadsAndWritesItsBuffersAlone) {
  const char *const cases = std::getenv("JAX_RING_FUZZ_CASES"), *const again = std::getenv("JAX_RING_FUZZ_SEED");
  const uint64_t num_cases = again != nullptr ? 1 : cases != nullptr ? std::stoull(cases) : kCases;
  const uint64_t first = again != nullptr ? std::stoull(again) : uint64_t{1000000000} * GetParam();
  uint64_t served = 0;
  std::cout << "JAX_RING_FUZZ_SEED:";
  for (uint64_t seed = first; seed < first + num_cases; ++seed) {
    std::cout << " " << seed << std::flush;  // the last one is the case that a sanitizer ends
    Generator random(seed);
    Call call = random.call();
    const int damages = random.below(4);
    for (int each = 0; each < damages; ++each) random.damage(call);
    if (!fits_memory(call.operands) || !fits_memory(call.results)) continue;
    const std::string error = run(call, random);
    if (again != nullptr) std::cout << ": " << error << std::endl;
    served += error.empty();
    if (damages == 0) {
      ASSERT_EQ(error, "");
    }
    ASSERT_TRUE(call.may_lack_ranks || error.find("ranks arrived within") == std::string::npos) << error;
    ASSERT_EQ(error.find("was not completed"), std::string::npos) << error;
  }
  std::cout << std::endl << served << " of " << num_cases << " calls are right" << std::endl;
  if (again == nullptr) {
    EXPECT_GT(served, num_cases / 5);
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, HandlerFuzz, ::testing::Range(0, 4));

}  // namespace
}  // namespace jax_ring::cpu::testing
