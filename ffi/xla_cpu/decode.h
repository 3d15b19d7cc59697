// decode.h: the operands and results of a custom call, checked, as the engine takes them.
#pragma once

#include "attributes/attributes.h"
#include "cpu/engine.h"
#include "cpu/rendezvous/rendezvous.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ring::cpu {

// Adds the buffers of a rank to what it contributes, and describes them in the message, which has its plan, its tree
// and its number of results, and no operands. A ragged all-to-all has three operands and one result: the table that the
// ranks have gathered, see RaggedTable, of shape (ranks, 4, slices) and type int32 or int64; the rows to send; and what
// the result has where nothing is received, which is copied to it, unless it is there already.
//
// Throws std::invalid_argument if the buffers do not fit the collective in a group of `num_ranks` ranks.
void decode(const Attributes& call, int num_ranks, xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets,
            Message& message, Participant& participant);

}  // namespace jax_ring::cpu
