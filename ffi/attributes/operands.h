// operands.h: checks the operands and results of a custom call against each other and its attributes, for both engines.
#pragma once

#include <cstddef>

#include "attributes/attributes.h"
#include "attributes/xla_types.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ring {

// Returns the operands' type if all buffers fit the call in the group with this index, so that an engine reads and
// writes nothing beyond them: in their number, element types and sizes. Nor does a result share memory with an operand
// that is still read: only that of an all-reduce, a reduce or a broadcast may have its operand's buffer, and the result
// of a further part, or of a ragged all-to-all, that of the array that it changes. A program may come from a file, and
// XLA knows nothing of what a custom call asks for. A thread's repeated call allocates no memory.
//
// A ragged all-to-all has three operands and one result: the table gathered by the ranks, see RaggedTable, of shape
// (ranks, 4, slices) and type int32 or int64; the rows to send; and the result's contents where nothing is received.
// slices_of() checks the numbers in the table.
//
// Throws std::invalid_argument, whose text names the buffers' types and shapes.
EngineType check_operands(const Attributes& call, size_t group, xla::ffi::RemainingArgs args,
                          xla::ffi::RemainingRets rets);

// Copies each operand to its result, where they are not one buffer. Throws std::invalid_argument unless there is a
// result for each operand, of its type and size, and apart from the other operands.
void copy_operands(xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets);

}  // namespace jax_ring
