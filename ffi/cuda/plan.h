// plan.h: the kernels of one rank in one collective: which algorithm, with which arguments.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cuda/call.h"
#include "cuda/communicator.h"
#include "ring/fold.h"

namespace jax_ring::gpu {

// What all ranks of a call agree on.
struct CallSite {
  std::string call;  // in words, for error messages
  Plan plan;
  Op op = Op::sum;
  std::optional<Algorithm> algorithm;  // by thresholds if it is missing

  // The same number on all ranks, and very likely another one for another call.
  uint32_t fingerprint() const;
  int lane() const { return static_cast<int>(fingerprint() % kLanes); }
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

// The kernels to launch, one after the other. The buffers are those of `rank`, all of one dtype. The thresholds must be
// those of the other ranks; where they are not, and choose another algorithm, both sides wait in vain.
std::vector<Launch> launches_of(const Communicator& communicator, int rank, const CallSite& site,
                                const Thresholds& thresholds, DType dtype, const std::vector<Buffer>& buffers,
                                double deadline_seconds);

}  // namespace jax_ring::gpu
