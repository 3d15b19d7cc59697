// ragged.cc: checks the slices of a ragged all-to-all, and lists them.
#include "attributes/ragged.h"

#include <stdexcept>
#include <string>

namespace jax_ring {
namespace {

enum Row { input_offset, send_size, output_offset, receive_size };

// One slice, in rows.
struct Slice {
  int source, receiver;
  size_t sent, expected;  // the slice's index in the sender's and the receiver's row
  int64_t from, to, size;
};

// Sizes are not negative here. Their sums with non-negative offsets fit unsigned numbers.
bool is_within(int64_t offset, int64_t size, size_t rows) {
  return offset >= 0 && static_cast<uint64_t>(offset) + static_cast<uint64_t>(size) <= rows;
}

// Out of line: tables without a fault pay nothing for the text.
[[noreturn]] void fail(const Slice& slice, const std::string& what) {
  throw std::invalid_argument("slice " + std::to_string(slice.sent) + " of rank " + std::to_string(slice.source) +
                              what);
}

std::string range(int64_t offset, int64_t size) {
  return ", " + std::to_string(size) + " rows from row " + std::to_string(offset) + " on";
}

void check(const Slice& slice, int64_t expected_size, size_t operand_rows, size_t result_rows) {
  if (slice.size < 0) fail(slice, " has the size " + std::to_string(slice.size) + ", and sizes are not negative");
  if (slice.size != expected_size) {
    fail(slice, " has " + std::to_string(slice.size) + " rows, but rank " + std::to_string(slice.receiver) +
                    " expects " + std::to_string(expected_size) + " in its slice " + std::to_string(slice.expected));
  }
  if (slice.size == 0) return;  // moves nothing, so its place does not matter
  if (!is_within(slice.from, slice.size, operand_rows)) {
    fail(slice,
         range(slice.from, slice.size) + ", is not within its operand of " + std::to_string(operand_rows) + " rows");
  }
  if (!is_within(slice.to, slice.size, result_rows)) {
    fail(slice, range(slice.to, slice.size) + " in the result of rank " + std::to_string(slice.receiver) +
                    ", is not within that: it has " + std::to_string(result_rows) + " rows");
  }
}

}  // namespace

std::vector<Part> slices_of(const RaggedTable& table, size_t row_bytes, size_t operand_rows, size_t result_rows) {
  const size_t each = table.num_slices / table.num_ranks;
  std::vector<Part> slices;
  for (int receiver = 0; receiver < table.num_ranks; ++receiver) {
    for (int source = 0; source < table.num_ranks; ++source) {
      for (size_t i = 0; i < each; ++i) {
        const size_t sent = receiver * each + i, expected = source * each + i;
        const Slice slice{source,
                          receiver,
                          sent,
                          expected,
                          table.at(source, input_offset, sent),
                          table.at(source, output_offset, sent),
                          table.at(source, send_size, sent)};
        check(slice, table.at(receiver, receive_size, expected), operand_rows, result_rows);
        const size_t bytes = slice.size * row_bytes;
        if (bytes == 0) continue;
        slices.push_back({{source, 1}, slice.from * row_bytes, {receiver, 1}, slice.to * row_bytes, bytes});
      }
    }
  }
  return slices;
}

}  // namespace jax_ring
