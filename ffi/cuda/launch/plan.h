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
  std::string call;  // for error messages
  Plan plan;
  Op op = Op::sum;
  std::optional<Algorithm> algorithm;  // none: the thresholds select one
  int lane = 0;                        // of the mailboxes; calls that may run concurrently need different lanes

  // Equal on all ranks, and very likely different for a different call.
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

// The kernels to launch, in order. The buffers belong to `rank` and have one dtype. The thresholds must be the same on
// all ranks: ranks that select different algorithms time out. tree: of the group, for a fold along it; the operands
// then have its slots, one after the other.
std::vector<Launch> launches_of(const Communicator& communicator, int rank, const CallSite& site,
                                const Thresholds& thresholds, DType dtype, const std::vector<Buffer>& buffers,
                                double deadline_seconds, const TreeProgram* tree = nullptr);

}  // namespace jax_ring::gpu
