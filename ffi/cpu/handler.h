// handler.h: the XLA FFI handlers of the CPU engine, to be registered with JAX.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jax_ring::cpu {

// Stages of the custom calls of all collectives.
//
// Operands: the caller's partition id (uint32 scalar), then the operands, all of one dtype.
// Results:  one for each operand, of the same dtype. An all-gather's has a leading dimension of the group's size, and a
//           reduce-scatter's operand has it.
// Attributes:
//   collective   string: all_reduce, reduce_scatter, all_gather, reduce or broadcast
//   op           string: sum, max or min; of no effect where nothing is folded
//   root         int64: the rank that a reduce or broadcast is about, else 0
//   partitions   int64 array: the members of the replica groups, one group after the other, in rank order
//   processes    int64 array: the process in which each of them lives
//   group_sizes  int64 array: the size of each group
//   call         string: what the call is, for error messages
//   program      string: empty in a program of one process; else the name of the program in all of its processes,
//                '#', and a number for each time that this process has lowered it
//   algorithm    string: auto, one_shot, two_shot or ring. Within a process one algorithm serves them all.
//   one_shot_bytes, two_shot_bytes
//                int64 arrays: for each group, the largest messages for which auto is one_shot, or two_shot. Empty
//                where all groups are within processes.
//   order        string: rank or ring, the order in which values are folded
XLA_FFI_Error* collective_instantiate(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* collective_execute(XLA_FFI_CallFrame* call_frame);

// The type of the state that all devices of a process share for one call instruction.
XLA_FFI_TypeId* call_site_type_id();
XLA_FFI_TypeInfo* call_site_type_info();

}  // namespace jax_ring::cpu
