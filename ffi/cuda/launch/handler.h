// handler.h: the XLA FFI handlers of the CUDA engine, to be registered with JAX.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jax_ring::gpu {

// Stages of the custom calls `jax_ring_*` on CUDA.
//
// Operands: all of one dtype.
// Results:  one per operand, of the same dtype, and of the size that the collective gives.
// Attributes:
//   collective   string: all_reduce, reduce_scatter, all_gather, reduce, broadcast, all_to_all or permute
//   op           string: sum, max or min
//   root         int64: the root of a reduce or broadcast
//   sources      int64 array: of permute, for each rank of a group the one whose operand it gets, or -1; else empty
//   algorithm    string: auto, one_shot, two_shot or ring
//   order        string: rank, ring, any or tree, the order in which values are folded
//   tree_shards, tree_sizes, tree_ranks
//                int64 arrays: for order tree, see trees_of() in attributes/trees.h; else empty
//   processes    int64 array: the process of each member of the replica groups, group after group, in rank order
//   devices      int64 array: the id of each member, which is unique among the GPUs of all processes
//   group_sizes  int64 array: the size of each group
//   one_shot_bytes, two_shot_bytes
//                int64 arrays: for each group, the largest message for which auto selects one_shot, or two_shot
//   call         string: description of the call, for error messages; the same on all ranks
//   lane         int64: calls that may run at the same time have different ones, below kLanes
//   site         string: the lines of the user's program that it serves, for error messages alone. May be empty.
XLA_FFI_Error* collective_instantiate(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* collective_initialize(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* collective_execute(XLA_FFI_CallFrame* call_frame);
// The same for calls that XLA must not record in a CUDA graph, which has no streams: calls of one lane that are on one
// stream could run at the same time.
XLA_FFI_Error* collective_execute_unrecorded(XLA_FFI_CallFrame* call_frame);

// The type of the state of one call instruction, shared by all devices of a process.
XLA_FFI_TypeId* instance_type_id();
XLA_FFI_TypeInfo* instance_type_info();

}  // namespace jax_ring::gpu
