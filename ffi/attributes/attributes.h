// attributes.h: the attributes of a custom call, decoded and checked: the same for both engines.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "attributes/trees.h"
#include "base/hash.h"
#include "collective/collective.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ring {

// The values of attributes, in the order of the enumerations.
inline constexpr std::string_view kCollectives[] = {"all_reduce", "reduce_scatter", "all_gather", "reduce",
                                                    "broadcast",  "all_to_all",     "permute",    "ragged_all_to_all"};
inline constexpr std::string_view kOps[] = {"sum", "max", "min"};
inline constexpr std::string_view kOrders[] = {"rank", "ring", "any", "tree"};

// The attributes that jax_ring/lowering/custom_call/engine.py writes, decoded here:
//   call, site   strings for error messages: the call, the same on all ranks, and the lines of the user's program.
//                The lines may be empty, and do not identify a call.
//   collective   string: one of kCollectives
//   op           string: sum, max or min; ignored if a collective only moves data
//   order        string: rank, ring, any or tree, the order of the fold
//   root         int64: the root of a reduce or broadcast, else 0
//   sources      int64 array: for permute, the source of each rank of a group, or -1; else empty
//   algorithm    string: auto, one_shot, two_shot or ring. No effect between CPU devices of one process.
//   group_sizes  int64 array: the size of each replica group
//   members      int64 array: the members of the groups, one group after the other, in rank order: CPU devices by mesh
//                position, GPUs by an id that is unique among all processes
//   processes    int64 array: the process of each member
//   one_shot_bytes, two_shot_bytes
//                int64 arrays: for each group, the largest message for which auto selects one_shot, or two_shot. Empty
//                for CPU devices if no group spans processes.
//   tree_shards, tree_sizes, tree_ranks
//                int64 arrays: for order tree, see trees_of() in trees.h; else empty
// For CPU devices only:
//   program      string: empty in a program of one process. Else the program's name and a digest of its text, the
//                same in all processes, '#', and how often this process has lowered a program of that name.
//   part         int64 array: empty, or (offset, length) of the part of an array that a reduce-scatter reads or an
//                all-gather writes. The call has one result. If the offset is not 0, an all-gather's second operand
//                is the array with the earlier parts. Further operands are not read: they make the call wait, and
//                keep XLA from reusing their buffers before it. If the ranks are in one process, the result may be
//                float32 with another operand type: an all-gather decodes int8 as packets (element.h) and widens
//                16-bit floats, and a reduce-scatter leaves the sum of 16-bit floats unrounded.
//   rounds_to    string: empty, or the type, float16 or bfloat16, to which a reduce-scatter of a part rounds float32
//                before the addition
//   blocks_apart int64: 1 if an all-to-all has an operand and a result for each rank, else 0. Within one process only.
// For GPUs only:
//   lane         int64: calls that may run at the same time have different lanes
struct Attributes {
  Attributes() = default;
  // Not copyable: the plan points to the sources.
  Attributes(Attributes&&) = default;

  std::string call;
  std::string text;  // call and site
  Plan plan;
  std::vector<int> sources;  // of the plan
  Op op = Op::sum;
  std::optional<Algorithm> algorithm;  // none: the engine chooses
  std::vector<int64_t> group_sizes, members, processes;
  std::vector<Thresholds> thresholds;  // by group; empty if none are given
  Trees trees;
  std::string program;
  std::optional<Range> part;
  xla::ffi::DataType rounds_to = xla::ffi::DataType::INVALID;
  bool blocks_apart = false;
  int64_t lane = 0;
  Hash hash;  // of what the call computes, in any groups

  // Throws std::invalid_argument if the call has no thresholds.
  const Thresholds& thresholds_of(size_t group) const;
};

// Throws std::invalid_argument, whose text names the call, if an attribute is missing, unknown or wrong: a program that
// another version of jax_ring has lowered may have others.
Attributes attributes_of(xla::ffi::Dictionary all);

// Throws std::invalid_argument if a member appears twice, or a group lacks the root.
void check_groups(const Attributes& call, int64_t root);

// The values, for error messages.
std::string list(const std::vector<int64_t>& values);

}  // namespace jax_ring
