// ragged.h: the slices that a ragged all-to-all moves, from the sizes and offsets that the ranks exchanged.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collective/collective.h"

namespace jax_ring {

// The numbers that the ranks of a group exchanged, in rank order. Each rank has four rows of `num_slices` numbers:
// offsets into its operand, sizes to send, offsets into the receivers' results, and sizes to receive. The slices of a
// row are divided evenly over the other side's ranks.
struct RaggedTable {
  const void* data;
  bool is_64_bit;
  int num_ranks;
  size_t num_slices;

  int64_t at(int rank, int row, size_t slice) const {
    const size_t i = (size_t{4} * rank + row) * num_slices + slice;
    return is_64_bit ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// The slices as parts, in bytes, of the operands and results of all ranks. A row has `row_bytes` bytes, an operand
// `operand_rows` rows and a result `result_rows`. Empty slices are dropped, wherever they are. Where slices overlap in
// a result, it gets the rows of one of them. Throws std::invalid_argument if a slice exceeds its operand or its result,
// or if sender and receiver disagree on its size.
std::vector<Part> slices_of(const RaggedTable& table, size_t row_bytes, size_t operand_rows, size_t result_rows);

}  // namespace jax_ring
