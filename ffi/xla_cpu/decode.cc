// decode.cc: takes checked operands to the engine, and reads the table of a ragged all-to-all.
#include "xla_cpu/decode.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "attributes/operands.h"
#include "attributes/ragged.h"
#include "attributes/xla_types.h"

namespace jax_ring::cpu {
namespace {

namespace ffi = xla::ffi;

void decode_ragged(int num_ranks, ffi::RemainingArgs args, ffi::RemainingRets rets, Message& message,
                   Participant& participant) {
  const ffi::AnyBuffer table = *args.get<ffi::AnyBuffer>(0), input = *args.get<ffi::AnyBuffer>(1),
                       before = *args.get<ffi::AnyBuffer>(2), output = **rets.get<ffi::AnyBuffer>(0);
  const size_t rows = input.dimensions()[0], result_rows = output.dimensions()[0];
  size_t row_bytes = xla_type_of(output.element_type()).bytes();
  for (size_t i = 1; i < output.dimensions().size(); ++i) row_bytes *= output.dimensions()[i];
  const RaggedTable sizes{table.untyped_data(), table.element_type() == ffi::S64, num_ranks,
                          static_cast<size_t>(table.dimensions()[2])};
  // All ranks have the same table, so all fail if one does.
  message.slices = std::make_shared<std::vector<Part>>(slices_of(sizes, row_bytes, rows, result_rows));
  message.plan.slices = message.slices->data();
  message.plan.num_slices = static_cast<int>(message.slices->size());
  message.counts.push_back(rows * row_bytes);
  participant.inputs.push_back(input.untyped_data());
  participant.outputs.push_back(output.untyped_data());
  if (before.untyped_data() != output.untyped_data() && result_rows * row_bytes > 0) {
    std::memcpy(output.untyped_data(), before.untyped_data(), result_rows * row_bytes);
  }
}

// How to convert a part's elements to float32, if they have another form or must be rounded first.
Conversion conversion_of(ffi::DataType rounds_to, ffi::DataType from, ffi::DataType to) {
  const bool rounds = rounds_to != ffi::DataType::INVALID;
  if (from == to && !rounds) return {};
  const FoldKernels& kernels = fold_kernels();
  if (from == ffi::S8) return {kernels.decode, kPacketBytes, kGroupElements * sizeof(float)};
  const SumsInFloat32& sums = (rounds ? rounds_to : from) == ffi::F16 ? kernels.of_f16 : kernels.of_bf16;
  return {rounds ? sums.rounded : sums.stored, xla_type_of(from).bytes(), sizeof(float)};
}

// For a reduce-scatter with a part of an array as operand, or an all-gather with one as result.
void decode_part(const Attributes& call, size_t per_element, ffi::RemainingArgs args, ffi::RemainingRets rets,
                 Message& message, Participant& participant) {
  const auto [begin, size] = *call.part;
  const bool scatters = message.plan.collective == Collective::reduce_scatter;
  const ffi::AnyBuffer input = *args.get<ffi::AnyBuffer>(0), output = **rets.get<ffi::AnyBuffer>(0);
  const size_t operand_bytes = xla_type_of(input.element_type()).bytes();
  message.conversion = conversion_of(call.rounds_to, input.element_type(), output.element_type());
  const size_t of_operand = message.conversion.kernel != nullptr ? message.conversion.operand_bytes / operand_bytes : 1;
  const size_t unit = scatters ? operand_bytes : xla_type_of(output.element_type()).bytes(), offset = begin * unit;
  if (!scatters && begin > 0) {
    auto* const data = static_cast<std::byte*>(output.untyped_data());
    const auto* const before = static_cast<const std::byte*>(args.get<ffi::AnyBuffer>(1)->untyped_data());
    if (before != data) {
      const size_t end = offset + size * unit;
      std::memcpy(data, before, offset);
      std::memcpy(data + end, before + end, (output.element_count() - begin - size) * unit);
    }
  }
  message.counts.push_back((scatters ? size : input.element_count() / of_operand) * per_element);
  participant.inputs.push_back(static_cast<const std::byte*>(input.untyped_data()) + (scatters ? offset : 0));
  participant.outputs.push_back(static_cast<std::byte*>(output.untyped_data()) + (scatters ? 0 : offset));
}

}  // namespace

void decode(const Attributes& call, int group, ffi::RemainingArgs args, ffi::RemainingRets rets, Message& message,
            Participant& participant) {
  const EngineType type = check_operands(call, group, args, rets);
  message.dtype = type.dtype;
  if (call.part) return decode_part(call, type.per_xla_element, args, rets, message, participant);
  if (message.plan.collective == Collective::ragged_all_to_all) {
    return decode_ragged(static_cast<int>(call.group_sizes[group]), args, rets, message, participant);
  }
  message.blocks_apart = call.blocks_apart;
  const size_t slots = folds_along_tree(message.plan) ? message.tree->num_slots() : 1;
  for (size_t i = 0; i < args.size(); ++i) {
    const ffi::AnyBuffer input = *args.get<ffi::AnyBuffer>(i);
    message.counts.push_back(input.element_count() / slots * type.per_xla_element);
    participant.inputs.push_back(input.untyped_data());
    participant.outputs.push_back((**rets.get<ffi::AnyBuffer>(i)).untyped_data());
  }
}

}  // namespace jax_ring::cpu
