// handler.h: the XLA FFI handlers of the CPU engine, to be registered with JAX.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jax_ring::cpu {

// Stages of the custom calls of all collectives.
//
// Operands: the caller's partition id (uint32 scalar), then the operands, all of one dtype.
// Results:  one per operand, of the same dtype. An all-gather's result, a reduce-scatter's operand, and both of an
//           all-to-all have a leading dimension of the group's size.
// Attributes: see attributes/attributes.h.
XLA_FFI_Error* collective_instantiate(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* collective_execute(XLA_FFI_CallFrame* call_frame);

// Stages of `jax_ring.barrier`, which ends a program if its ranks may skip a call: a rank completes it when all ranks
// of this process have, and all fail if a call of the execution fails.
//
// Operands: the caller's partition id (uint32 scalar), then any values to wait for. Results: none.
// Attributes:
//   members      int64 array: all ranks
//   processes    int64 array: the process of each
XLA_FFI_Error* barrier_instantiate(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* barrier_execute(XLA_FFI_CallFrame* call_frame);

// The type of the state of one call instruction, shared by all devices of a process.
XLA_FFI_TypeId* call_site_type_id();
XLA_FFI_TypeInfo* call_site_type_info();

}  // namespace jax_ring::cpu
