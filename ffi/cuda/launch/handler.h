// handler.h: the XLA FFI handlers of the CUDA engine, to be registered with JAX.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jax_ring::gpu {

// Stages of the custom calls `jax_ring_*` on CUDA.
//
// Operands: all of one dtype.
// Results:  one per operand, of the same dtype and of the collective's result size.
// Attributes: see attributes/attributes.h.
XLA_FFI_Error* collective_instantiate(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* collective_initialize(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* collective_execute(XLA_FFI_CallFrame* call_frame);
// The stage of calls that XLA must not record in a CUDA graph. A graph has no streams: calls of one lane, ordered by
// their stream, could run at the same time.
XLA_FFI_Error* collective_execute_unrecorded(XLA_FFI_CallFrame* call_frame);

// The type of the state of one call instruction, shared by all devices of a process.
XLA_FFI_TypeId* instance_type_id();
XLA_FFI_TypeInfo* instance_type_info();

}  // namespace jax_ring::gpu
