// decode.h: a custom call's operands and results as the engine takes them.
#pragma once

#include "attributes/attributes.h"
#include "cpu/engine.h"
#include "cpu/rendezvous/rendezvous.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ring::cpu {

// Adds a rank's buffers to its contribution, and describes them in the message, which already has its plan, tree and
// number of results, but no operands. A ragged all-to-all copies the contents of its result where nothing is received,
// unless they are there already.
//
// Throws std::invalid_argument if the buffers do not fit the call in the group with this index, see check_operands().
void decode(const Attributes& call, int group, xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets,
            Message& message, Participant& participant);

}  // namespace jax_ring::cpu
