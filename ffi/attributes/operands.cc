// operands.cc: the rules by which operands, results and attributes fit each other.
#include "attributes/operands.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace jax_ring {
namespace {

namespace ffi = xla::ffi;

// Fewer than 2^63 bytes, as an element has at most 16.
constexpr size_t kMostElements = size_t{1} << 58;

// An operand or a result.
struct Array {
  const char* kind;
  size_t index;
  ffi::AnyBuffer buffer;
  size_t count = 1;  // of elements

  ffi::DataType type() const { return buffer.element_type(); }
};

// "operand 1 is float32[2,3]"
std::string text_of(const Array& array) {
  std::string sizes;
  for (int64_t size : array.buffer.dimensions()) sizes += (sizes.empty() ? "" : ",") + std::to_string(size);
  return array.kind + (" " + std::to_string(array.index)) + " is " + name_of(array.type()) + "[" + sizes + "]";
}

[[noreturn]] void refuse(const Array& array, const std::string& why) {
  throw std::invalid_argument(text_of(array) + ": " + why);
}
[[noreturn]] void refuse(const Array& a, const Array& b, const std::string& why) {
  throw std::invalid_argument(text_of(a) + ", " + text_of(b) + ": " + why);
}

Array counted(Array array) {
  for (int64_t size : array.buffer.dimensions()) {
    if (size < 0 || __builtin_mul_overflow(array.count, static_cast<size_t>(size), &array.count) ||
        array.count > kMostElements) {
      refuse(array, "no memory holds so many elements");
    }
  }
  return array;
}
Array any_operand(ffi::RemainingArgs args, size_t i) { return counted({"operand", i, *args.get<ffi::AnyBuffer>(i)}); }
Array any_result(ffi::RemainingRets rets, size_t i) { return counted({"result", i, **rets.get<ffi::AnyBuffer>(i)}); }

Array with_whole_bytes(Array array) {
  if (xla_type_of(array.type()).bytes() > 0) return array;
  refuse(array, "jax_ring has no elements of this type. Convert it to one whose elements are whole bytes.");
}
Array operand(ffi::RemainingArgs args, size_t i) { return with_whole_bytes(any_operand(args, i)); }
Array result(ffi::RemainingRets rets, size_t i) { return with_whole_bytes(any_result(rets, i)); }

void check_types(const Array& a, const Array& b) {
  if (a.type() != b.type()) refuse(a, b, "they must have one element type");
}

// The largest number if the product is larger. No buffer has so many elements.
size_t times(size_t a, size_t b) {
  size_t product;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<size_t>::max() : product;
}

size_t bytes_of(const Array& array) {
  const size_t bits = xla_type_of(array.type()).bits;
  return bits % 8 == 0 ? array.count * (bits / 8) : (array.count * bits + 7) / 8;
}

// Whether an element of the result depends on those at the same place in the operands alone, so that it may take the
// place of one.
bool keeps_places(const Plan& plan) {
  return plan.collective == Collective::all_reduce || plan.collective == Collective::reduce ||
         plan.collective == Collective::broadcast;
}

// Where the operands and results of a call are in memory. A thread's next call reuses its own memory.
class Extents {
 public:
  Extents() {
    operands_.clear();
    results_.clear();
  }

  void add_operand(const Array& array) { add(array, operands_); }
  void add_result(const Array& array) { add(array, results_); }

  // Refuses results that share memory with each other or with an operand. first_own: the operand whose buffer may be
  // that of result 0, and the next one's that of result 1; nullopt if none may be.
  void check_apart(ffi::RemainingArgs args, ffi::RemainingRets rets, std::optional<size_t> first_own) {
    const auto refuse_both = [](const Array& a, const Array& b) {
      refuse(a, b,
             "they share memory, so the call would read what it has written. Remove this alias from the program "
             "(output_operand_aliases).");
    };
    std::sort(results_.begin(), results_.end(), [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
    for (size_t i = 1; i < results_.size(); ++i) {
      if (results_[i - 1].end <= results_[i].begin) continue;
      refuse_both(any_result(rets, results_[i - 1].index), any_result(rets, results_[i].index));
    }
    for (const Extent& operand : operands_) {
      auto result = std::upper_bound(results_.begin(), results_.end(), operand.begin,
                                     [](uintptr_t begin, const Extent& other) { return begin < other.end; });
      for (; result != results_.end() && result->begin < operand.end; ++result) {
        const bool is_own = first_own && result->index + *first_own == operand.index &&
                            result->begin == operand.begin && result->end == operand.end;
        if (!is_own) refuse_both(any_operand(args, operand.index), any_result(rets, result->index));
      }
    }
  }

 private:
  struct Extent {
    uintptr_t begin, end;
    size_t index;  // among the operands, or the results
  };
  struct Kept {
    std::vector<Extent> operands, results;
  };

  static Kept& kept() {
    thread_local Kept of_thread;
    return of_thread;
  }
  static void add(const Array& array, std::vector<Extent>& to) {
    const auto begin = reinterpret_cast<uintptr_t>(array.buffer.untyped_data());
    if (const size_t bytes = bytes_of(array); bytes > 0) to.push_back({begin, begin + bytes, array.index});
  }

  std::vector<Extent>& operands_ = kept().operands;
  std::vector<Extent>& results_ = kept().results;
};

std::string numbers_of(ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return "; it has " + std::to_string(args.size()) + " operands and " + std::to_string(rets.size()) + " results";
}

EngineType check_whole(const Attributes& call, size_t group, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  if (args.size() == 0 || args.size() != rets.size()) {
    throw std::invalid_argument("a call needs one result per operand, and at least one operand" +
                                numbers_of(args, rets));
  }
  const int num_ranks = static_cast<int>(call.group_sizes[group]);
  if (call.blocks_apart && args.size() != static_cast<size_t>(num_ranks)) {
    throw std::invalid_argument("an all-to-all of blocks that are apart has one for each of the " +
                                std::to_string(num_ranks) + " ranks" + numbers_of(args, rets));
  }
  const bool along_tree = folds_along_tree(call.plan), scatters = call.plan.collective == Collective::reduce_scatter;
  const size_t slots = along_tree ? call.trees.of_group[group].num_slots() : 1,
               sums = along_tree && scatters ? call.trees.num_results : 1,
               blocks = call.blocks_apart ? 1 : slots * num_input_blocks(call.plan, num_ranks),
               blocks_of_result = call.blocks_apart ? 1 : sums * num_output_blocks(call.plan, num_ranks);
  const Array first = operand(args, 0);
  Extents extents;
  for (size_t i = 0; i < args.size(); ++i) {
    const Array input = operand(args, i), output = result(rets, i);
    check_types(input, output);
    check_types(first, input);
    if (input.count % blocks != 0) {
      refuse(input, output,
             "in a group of " + std::to_string(num_ranks) + " ranks, an operand has " + std::to_string(blocks) +
                 " blocks of equal size");
    }
    const size_t expected = times(input.count / blocks, blocks_of_result);
    if (output.count != expected) {
      refuse(input, output,
             "in a group of " + std::to_string(num_ranks) + " ranks, the result of such an operand has " +
                 std::to_string(expected) + " elements");
    }
    if (call.blocks_apart && input.count != first.count) refuse(first, input, "the blocks differ in their size");
    extents.add_operand(input);
    extents.add_result(output);
  }
  extents.check_apart(args, rets, keeps_places(call.plan) ? std::optional<size_t>(0) : std::nullopt);
  return engine_type_of(call.plan, first.type());
}

// How many elements of a part's operand and of its result are one of the engine's.
struct Units {
  size_t of_operand = 1, of_result = 1;
  bool converts = false;
};

Units units_of(const Attributes& call, const Array& input, const Array& output) {
  const ffi::DataType from = input.type(), to = output.type();
  const bool rounds = call.rounds_to != ffi::DataType::INVALID,
             scatters = call.plan.collective == Collective::reduce_scatter;
  if (from == to && !rounds) return {};
  if (from == ffi::S8 && to == ffi::F32 && !rounds && !scatters) return {kPacketBytes, kGroupElements, true};
  const ffi::DataType narrow = rounds ? call.rounds_to : from;
  const bool is_sum = to == ffi::F32 && call.op == Op::sum && (!rounds || (scatters && from == ffi::F32));
  if (is_sum && (narrow == ffi::F16 || narrow == ffi::BF16)) return {1, 1, true};
  refuse(input, output,
         "they must have one element type, or, for a part of an array, one that is converted to the other");
}

EngineType check_part(const Attributes& call, size_t group, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  if (args.size() == 0 || rets.size() != 1) {
    throw std::invalid_argument("a call for a part of an array needs an operand and has one result" +
                                numbers_of(args, rets));
  }
  const auto [begin, size] = *call.part;
  const auto num_ranks = static_cast<size_t>(call.group_sizes[group]);
  const bool scatters = call.plan.collective == Collective::reduce_scatter;
  const Array input = operand(args, 0), output = result(rets, 0), &whole = scatters ? input : output;
  const Units units = units_of(call, input, output);
  const size_t count = input.count / units.of_operand, block = scatters ? output.count : times(count, units.of_result);
  const bool is_whole = input.count % units.of_operand == 0 && begin % units.of_result == 0;
  if (!is_whole || size != times(block, num_ranks) || begin > whole.count || size > whole.count - begin) {
    refuse(input, output,
           std::to_string(size) + " elements from " + std::to_string(begin) + " are no part of " +
               std::to_string(whole.count) + " in blocks of " + std::to_string(block) + " for each of " +
               std::to_string(num_ranks) + " ranks");
  }
  Extents extents;
  extents.add_operand(input);
  extents.add_result(output);
  if (!scatters && begin > 0) {
    if (args.size() < 2) refuse(output, "an all-gather for a further part takes the array with those before");
    const Array before = operand(args, 1);
    check_types(before, output);
    if (before.count != output.count) {
      refuse(before, output, "an all-gather for a further part takes the array with those before");
    }
    extents.add_operand(before);
  }
  extents.check_apart(args, rets, 1);
  const EngineType type = engine_type_of(call.plan, input.type());
  return {type.dtype, units.converts ? 1 : type.per_xla_element};
}

// Whether two arrays have rows of one size, after the leading dimension.
bool have_equal_rows(const Array& a, const Array& b) {
  const ffi::AnyBuffer::Dimensions of_a = a.buffer.dimensions(), of_b = b.buffer.dimensions();
  return of_a.size() == of_b.size() && of_a.size() > 0 && std::equal(of_a.begin() + 1, of_a.end(), of_b.begin() + 1);
}

EngineType check_ragged(const Attributes& call, size_t group, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  if (args.size() != 3 || rets.size() != 1) {
    throw std::invalid_argument("a ragged all-to-all has 3 operands and 1 result" + numbers_of(args, rets));
  }
  const int64_t num_ranks = call.group_sizes[group];
  const Array table = operand(args, 0), input = operand(args, 1), before = operand(args, 2), output = result(rets, 0);
  const ffi::AnyBuffer::Dimensions sizes = table.buffer.dimensions();
  if ((table.type() != ffi::S64 && table.type() != ffi::S32) || sizes.size() != 3 || sizes[0] != num_ranks ||
      sizes[1] != 4 || sizes[2] % num_ranks != 0) {
    refuse(table, "the table of a ragged all-to-all of " + std::to_string(num_ranks) + " ranks has the shape (" +
                      std::to_string(num_ranks) + ", 4, a multiple of that), of int32 or int64");
  }
  check_types(input, output);
  check_types(before, output);
  if (!have_equal_rows(input, output)) refuse(input, output, "a ragged all-to-all needs rows of one shape");
  if (!have_equal_rows(before, output) || before.count != output.count) {
    refuse(before, output, "a ragged all-to-all needs a result for the array that it changes");
  }
  Extents extents;
  for (const Array* each : {&table, &input, &before}) extents.add_operand(*each);
  extents.add_result(output);
  extents.check_apart(args, rets, 2);
  return {DType::u8, 1};
}

}  // namespace

EngineType check_operands(const Attributes& call, size_t group, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  if (call.part) return check_part(call, group, args, rets);
  if (call.plan.collective == Collective::ragged_all_to_all) return check_ragged(call, group, args, rets);
  return check_whole(call, group, args, rets);
}

void copy_operands(ffi::RemainingArgs args, ffi::RemainingRets rets) {
  if (args.size() != rets.size())
    throw std::invalid_argument("a copy needs one result per operand" + numbers_of(args, rets));
  Extents extents;
  for (size_t i = 0; i < args.size(); ++i) {
    const Array from = any_operand(args, i), to = any_result(rets, i);
    check_types(from, to);
    if (from.count != to.count) refuse(from, to, "they must have one size");
    extents.add_operand(from);
    extents.add_result(to);
  }
  extents.check_apart(args, rets, 0);
  for (size_t i = 0; i < args.size(); ++i) {
    const Array from = any_operand(args, i), to = any_result(rets, i);
    void* const data = from.buffer.untyped_data();
    if (data == to.buffer.untyped_data() || from.count == 0) continue;
    if (xla_type_of(from.type()).bits == 0) refuse(from, "it is no array");
    std::memcpy(to.buffer.untyped_data(), data, bytes_of(from));
  }
}

}  // namespace jax_ring
