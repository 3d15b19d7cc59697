// decode.cc: checks the sizes and types of operands and results, and reads the table of a ragged all-to-all.
#include "xla_cpu/decode.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "attributes/ragged.h"
#include "attributes/xla_types.h"

namespace jax_ring::cpu {
namespace {

namespace ffi = xla::ffi;

// Elements of a call's operand, or of one of its slots if it has several, from the elements of the operand and its
// result.
size_t count_of(const Message& message, int num_ranks, size_t operand, size_t result) {
  if (!folds_along_tree(message.plan)) {
    if (result == result_count(message.plan, num_ranks, operand)) return operand;
    throw std::invalid_argument("jax_ring: the size of a result does not match its operand and the group size");
  }
  const size_t slots = message.tree->num_slots();
  const size_t results = message.plan.collective == Collective::reduce_scatter ? message.num_results : 1;
  const size_t count = operand / slots;
  if (operand == slots * count && result == results * result_count(message.plan, num_ranks, count)) return count;
  throw std::invalid_argument("jax_ring: an operand of " + std::to_string(operand) + " elements does not match its " +
                              "result of " + std::to_string(result) + ": with order 'tree' the operand has " +
                              std::to_string(slots) + " partial sums and the result " + std::to_string(results) +
                              ", in a group of " + std::to_string(num_ranks) + " ranks");
}

std::string shape_of(const ffi::AnyBuffer& buffer) {
  std::string text;
  for (int64_t size : buffer.dimensions()) text += (text.empty() ? "" : ",") + std::to_string(size);
  return "[" + text + "] of XLA element type " + std::to_string(static_cast<int>(buffer.element_type()));
}

// Whether two buffers have rows of one type and size, after the leading dimension.
bool have_equal_rows(const ffi::AnyBuffer& a, const ffi::AnyBuffer& b) {
  const ffi::AnyBuffer::Dimensions of_a = a.dimensions(), of_b = b.dimensions();
  return a.element_type() == b.element_type() && of_a.size() == of_b.size() && of_a.size() > 0 &&
         std::equal(of_a.begin() + 1, of_a.end(), of_b.begin() + 1);
}

void decode_ragged(int num_ranks, ffi::RemainingArgs args, ffi::RemainingRets rets, Message& message,
                   Participant& participant) {
  if (args.size() != 3 || rets.size() != 1) {
    throw std::invalid_argument("jax_ring: a ragged all-to-all has 3 operands and 1 result, got " +
                                std::to_string(args.size()) + " and " + std::to_string(rets.size()));
  }
  const ffi::AnyBuffer table = *args.get<ffi::AnyBuffer>(0), input = *args.get<ffi::AnyBuffer>(1),
                       before = *args.get<ffi::AnyBuffer>(2), output = **rets.get<ffi::AnyBuffer>(0);
  const bool is_64_bit = table.element_type() == ffi::S64;
  const ffi::AnyBuffer::Dimensions of_table = table.dimensions();
  if (!(is_64_bit || table.element_type() == ffi::S32) || of_table.size() != 3 || of_table[0] != num_ranks ||
      of_table[1] != 4 || of_table[2] % num_ranks != 0) {
    throw std::invalid_argument("jax_ring: the table of a ragged all-to-all of " + std::to_string(num_ranks) +
                                " ranks has the shape " + shape_of(table) +
                                ", and not (ranks, 4, a multiple of the ranks) of int32 or int64");
  }
  if (!have_equal_rows(input, output) || !have_equal_rows(before, output) ||
      before.dimensions()[0] != output.dimensions()[0]) {
    throw std::invalid_argument("jax_ring: a ragged all-to-all cannot send rows of " + shape_of(input) + " to " +
                                shape_of(before) + " with the result " + shape_of(output));
  }
  const size_t rows = input.dimensions()[0], result_rows = output.dimensions()[0];
  size_t row_bytes = ffi::ByteWidth(output.element_type());
  for (size_t i = 1; i < output.dimensions().size(); ++i) row_bytes *= output.dimensions()[i];
  const RaggedTable sizes{table.untyped_data(), is_64_bit, num_ranks, static_cast<size_t>(of_table[2])};
  // All ranks have the same table, so all fail if one does.
  message.slices = std::make_shared<std::vector<Part>>(slices_of(sizes, row_bytes, rows, result_rows));
  message.plan.slices = message.slices->data();
  message.plan.num_slices = static_cast<int>(message.slices->size());
  message.dtype = DType::u8;
  message.counts.push_back(rows * row_bytes);
  participant.inputs.push_back(input.untyped_data());
  participant.outputs.push_back(output.untyped_data());
  if (before.untyped_data() != output.untyped_data() && result_rows * row_bytes > 0) {
    std::memcpy(output.untyped_data(), before.untyped_data(), result_rows * row_bytes);
  }
}

// How to convert a part's elements to float32, if they have another form or must be rounded first.
Conversion conversion_of(const Message& message, ffi::DataType rounds_to, ffi::DataType from, ffi::DataType to) {
  const bool scatters = message.plan.collective == Collective::reduce_scatter,
             rounds = rounds_to != ffi::DataType::INVALID;
  if (from == to && !rounds) return {};
  const FoldKernels& kernels = fold_kernels();
  if (to == ffi::F32 && from == ffi::S8 && !rounds && !scatters) {
    return {kernels.decode, kPacketBytes, kGroupElements * sizeof(float)};
  }
  const ffi::DataType small = rounds ? rounds_to : from;
  const bool is_sum = to == ffi::F32 && message.op == Op::sum && (!rounds || (scatters && from == ffi::F32));
  if (!is_sum || (small != ffi::F16 && small != ffi::BF16)) {
    throw std::invalid_argument("jax_ring: no conversion of a part from XLA element type " +
                                std::to_string(static_cast<int>(from)) + " to " + std::to_string(static_cast<int>(to)));
  }
  const SumsInFloat32& sums = small == ffi::F16 ? kernels.of_f16 : kernels.of_bf16;
  return {rounds ? sums.rounded : sums.stored, ffi::ByteWidth(from), sizeof(float)};
}

// For a reduce-scatter with a part of an array as operand, or an all-gather with one as result.
void decode_part(const Attributes& call, int num_ranks, ffi::RemainingArgs args, ffi::RemainingRets rets,
                 Message& message, Participant& participant) {
  const auto [begin, size] = *call.part;
  const bool scatters = message.plan.collective == Collective::reduce_scatter;
  if (rets.size() != 1 || args.size() == 0) {
    throw std::invalid_argument("jax_ring: a call for a part has one operand and one result");
  }
  const ffi::AnyBuffer input = *args.get<ffi::AnyBuffer>(0);
  ffi::AnyBuffer output = **rets.get<ffi::AnyBuffer>(0);
  const ffi::AnyBuffer& whole = scatters ? input : output;
  message.conversion = conversion_of(message, call.rounds_to, input.element_type(), output.element_type());
  const EngineType type = engine_type_of(message.plan, input.element_type());
  message.dtype = type.dtype;
  // The sizes of an engine element in operand and result elements.
  size_t of_input = 1, of_output = 1;
  if (message.conversion.kernel != nullptr) {
    of_input = message.conversion.operand_bytes / ffi::ByteWidth(input.element_type());
    of_output = message.conversion.result_bytes / ffi::ByteWidth(output.element_type());
  }
  const size_t count = input.element_count() / of_input, block = scatters ? output.element_count() : count * of_output;
  const bool is_whole = count * of_input == input.element_count() && begin % of_output == 0;
  if (!is_whole || size != block * num_ranks || begin > whole.element_count() || size > whole.element_count() - begin) {
    throw std::invalid_argument("jax_ring: " + std::to_string(size) + " elements from " + std::to_string(begin) +
                                " are no part of " + std::to_string(whole.element_count()) + " in blocks of " +
                                std::to_string(block) + " for each of " + std::to_string(num_ranks) + " ranks");
  }
  const size_t offset = begin * ffi::ByteWidth(whole.element_type());
  if (!scatters && begin > 0) {
    if (args.size() < 2 || args.get<ffi::AnyBuffer>(1)->size_bytes() != output.size_bytes()) {
      throw std::invalid_argument("jax_ring: an all-gather for a further part takes the array with those before");
    }
    const void* const before = args.get<ffi::AnyBuffer>(1)->untyped_data();
    if (before != output.untyped_data()) std::memcpy(output.untyped_data(), before, offset);
  }
  const size_t per_element = message.conversion.kernel != nullptr ? 1 : type.per_xla_element;
  message.counts.push_back((scatters ? size : count) * per_element);
  participant.inputs.push_back(static_cast<const std::byte*>(input.untyped_data()) + (scatters ? offset : 0));
  participant.outputs.push_back(static_cast<std::byte*>(output.untyped_data()) + (scatters ? 0 : offset));
}

}  // namespace

void decode(const Attributes& call, int num_ranks, ffi::RemainingArgs args, ffi::RemainingRets rets, Message& message,
            Participant& participant) {
  if (call.part) return decode_part(call, num_ranks, args, rets, message, participant);
  if (message.plan.collective == Collective::ragged_all_to_all) {
    return decode_ragged(num_ranks, args, rets, message, participant);
  }
  if (args.size() == 0 || args.size() != rets.size()) {
    throw std::invalid_argument("jax_ring: a call needs one result per operand, and at least one operand");
  }
  message.blocks_apart = call.blocks_apart;
  if (call.blocks_apart && args.size() != static_cast<size_t>(num_ranks)) {
    throw std::invalid_argument("jax_ring: " + std::to_string(args.size()) + " operands for " +
                                std::to_string(num_ranks) + " ranks");
  }
  const EngineType type = engine_type_of(message.plan, args.get<ffi::AnyBuffer>(0)->element_type());
  message.dtype = type.dtype;
  for (size_t i = 0; i < args.size(); ++i) {
    const ffi::AnyBuffer input = *args.get<ffi::AnyBuffer>(i);
    ffi::AnyBuffer output = **rets.get<ffi::AnyBuffer>(i);
    const size_t operand = input.element_count(), result = output.element_count();
    const bool is_block = operand == result && operand == args.get<ffi::AnyBuffer>(0)->element_count();
    if (call.blocks_apart && !is_block) throw std::invalid_argument("jax_ring: the blocks differ in their size");
    const size_t count = call.blocks_apart ? operand : count_of(message, num_ranks, operand, result);
    message.counts.push_back(count * type.per_xla_element);
    participant.inputs.push_back(input.untyped_data());
    participant.outputs.push_back(output.untyped_data());
  }
}

}  // namespace jax_ring::cpu
