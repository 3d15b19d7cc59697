// ragged.cc: checks the slices of a ragged all-to-all, and lists them.
#include "cpu/ragged.h"

#include <stdexcept>

namespace jax_ring::cpu {
namespace {

enum Row { input_offset, send_size, output_offset, receive_size };

bool is_within(int64_t offset, int64_t size, size_t rows) {
  return offset >= 0 && size >= 0 && static_cast<uint64_t>(offset) + static_cast<uint64_t>(size) <= rows;
}

std::string range(int64_t offset, int64_t size) {
  return std::to_string(size) + " rows from row " + std::to_string(offset) + " on";
}

}  // namespace

std::vector<Part> slices_of(const RaggedTable& table, size_t row_bytes, size_t operand_rows, size_t result_rows) {
  const size_t each = table.num_slices / table.num_ranks;
  std::vector<Part> slices;
  // By receiver, so that where slices overlap, against the rules, those of the last rank are written last.
  for (int receiver = 0; receiver < table.num_ranks; ++receiver) {
    for (int source = 0; source < table.num_ranks; ++source) {
      for (size_t i = 0; i < each; ++i) {
        const size_t sent = receiver * each + i, expected = source * each + i;
        const int64_t size = table.at(source, send_size, sent);
        const int64_t from = table.at(source, input_offset, sent), to = table.at(source, output_offset, sent);
        const std::string who = "slice " + std::to_string(sent) + " of rank " + std::to_string(source);
        if (!is_within(from, size, operand_rows)) {
          throw std::invalid_argument(who + ", " + range(from, size) + ", is not within its operand of " +
                                      std::to_string(operand_rows) + " rows");
        }
        if (!is_within(to, size, result_rows)) {
          throw std::invalid_argument(who + ", " + range(to, size) + " of rank " + std::to_string(receiver) +
                                      "'s result, is not within it: it has " + std::to_string(result_rows) + " rows");
        }
        if (const int64_t wanted = table.at(receiver, receive_size, expected); wanted != size) {
          throw std::invalid_argument(who + " has " + std::to_string(size) + " rows, but rank " +
                                      std::to_string(receiver) + " expects " + std::to_string(wanted) +
                                      " in slice " + std::to_string(expected));
        }
        if (size == 0) continue;
        slices.push_back({{source, 1}, from * row_bytes, {receiver, 1}, to * row_bytes, size * row_bytes});
      }
    }
  }
  return slices;
}

}  // namespace jax_ring::cpu
