// decode.h: checks a custom call's operands and results, and converts them for the engine.
#pragma once

#include "attributes/attributes.h"
#include "cpu/engine.h"
#include "cpu/rendezvous/rendezvous.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ring::cpu {

// Adds a rank's buffers to its contribution, and describes them in the message, which already has its plan, tree and
// number of results, but no operands. A ragged all-to-all has three operands and one result: the table gathered by the
// ranks, see RaggedTable, of shape (ranks, 4, slices) and type int32 or int64; the rows to send; and the result's
// contents where nothing is received, which are copied to the result unless they are there already.
//
// Throws std::invalid_argument if the buffers do not fit the collective in a group of `num_ranks` ranks.
void decode(const Attributes& call, int num_ranks, xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets,
            Message& message, Participant& participant);

}  // namespace jax_ring::cpu
