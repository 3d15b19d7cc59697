// handler.h: the XLA FFI handlers of the CPU engine, to be registered with JAX.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jax_ring::cpu {

// Stages of the custom calls of all collectives.
//
// Operands: the caller's partition id (uint32 scalar), then the operands, all of one dtype.
// Results:  one per operand, of the same dtype. An all-gather's result, a reduce-scatter's operand, and both of an
//           all-to-all have a leading dimension of the group's size.
// Attributes:
//   collective   string: all_reduce, reduce_scatter, all_gather, reduce, broadcast, all_to_all or permute
//   op           string: sum, max or min; ignored by those that only move data
//   root         int64: the root of a reduce or broadcast, else 0
//   sources      int64 array: of permute, for each rank of a group the one whose operand it gets, or -1; else empty
//   partitions   int64 array: the members of the replica groups, one group after the other, in rank order
//   processes    int64 array: the process of each member
//   group_sizes  int64 array: the size of each group
//   call         string: description of the call, for error messages
//   site         string: the lines of the user's program that it serves, for error messages alone: no part of what
//                identifies a call. May be empty.
//   program      string: empty in a program of one process. Else the name of the program and a digest of its text,
//                the same in all processes, '#', and how often this process has lowered a program of that name.
//   algorithm    string: auto, one_shot, two_shot or ring. No effect within a process, where there is one algorithm.
//   one_shot_bytes, two_shot_bytes
//                int64 arrays: for each group, the largest message for which auto selects one_shot, or two_shot. Empty
//                if no group spans processes.
//   order        string: rank, ring, any or tree, the order in which values are folded
//   tree_shards, tree_sizes, tree_ranks
//                int64 arrays: for order tree, see trees_of() in attributes/trees.h; else empty
//   part         int64 array: empty, or the first element and the number of elements of a part of an array, which is
//                the operand of a reduce-scatter, or the result of an all-gather. The call has one result. If the part
//                does not begin at 0, the second operand of an all-gather is the array with the parts before. Operands
//                after these are not read: they make the call wait, and XLA does not reuse their buffers before it.
//                If the ranks are in one process, the result may be float32 where the operand is not: an all-gather
//                decodes int8 as packets (fold_kernels.h) and widens floats of 16 bits, whose sum a reduce-scatter does
//                not round.
//   rounds_to    string: empty, or float16 or bfloat16, to which a reduce-scatter of a part rounds float32 before it
//                adds them
XLA_FFI_Error* collective_instantiate(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* collective_execute(XLA_FFI_CallFrame* call_frame);

// Stages of `jax_ring.barrier`, which ends a program whose ranks may leave out a call: a rank completes it when all
// ranks of this process have, and all fail if a call of the execution fails.
//
// Operands: the caller's partition id (uint32 scalar), then any values to wait for. Results: none.
// Attributes:
//   partitions   int64 array: all ranks
//   processes    int64 array: the process of each
XLA_FFI_Error* barrier_instantiate(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* barrier_execute(XLA_FFI_CallFrame* call_frame);

// The type of the state of one call instruction, shared by all devices of a process.
XLA_FFI_TypeId* call_site_type_id();
XLA_FFI_TypeInfo* call_site_type_info();

}  // namespace jax_ring::cpu
