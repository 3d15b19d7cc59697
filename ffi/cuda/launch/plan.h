// plan.h: the kernel launches of one rank in one collective.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "collective/fold.h"
#include "cuda/groups/communicator.h"
#include "cuda/kernels/call.h"

namespace jax_ring::gpu {

// What all ranks of a call agree on.
struct CallSite {
  std::string call;  // description, for error messages
  Plan plan;
  Op op = Op::sum;
  std::optional<Algorithm> algorithm;  // selected by the thresholds if missing
  int lane = 0;                        // of the mailboxes; calls that may run concurrently have different ones

  // The same number on all ranks, and very likely a different one for a different call.
  uint32_t fingerprint() const;
};

// An operand of one rank.
struct Buffer {
  const void* input;
  void* output;
  uint64_t input_bytes;
};

struct Launch {
  KernelKey kernel;
  Call call;
};

// The kernels to launch, in order. The buffers are those of `rank`, all of one dtype. The thresholds must be the same
// on all ranks: ranks that select different algorithms time out. tree: of the group, for a fold along it; the operands
// have its slots, one after the other.
std::vector<Launch> launches_of(const Communicator& communicator, int rank, const CallSite& site,
                                const Thresholds& thresholds, DType dtype, const std::vector<Buffer>& buffers,
                                double deadline_seconds, const TreeProgram* tree = nullptr);

}  // namespace jax_ring::gpu
