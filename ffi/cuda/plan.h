// plan.h: the kernels of one rank in one all-reduce: which algorithm, with which arguments.
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
  std::string call;                    // in words, for error messages
  std::optional<Algorithm> algorithm;  // ours to choose if it is missing
  Order order = Order::rank;

  // The same number on all ranks, and very likely another one for another call.
  uint32_t fingerprint() const;
  int lane() const { return static_cast<int>(fingerprint() % kLanes); }
};

// An operand of one rank.
struct Buffer {
  const void* input;
  void* output;
  uint64_t bytes;
};

struct Launch {
  Algorithm algorithm;
  Call call;
};

// The kernels to launch, one after the other. The buffers are those of `rank`, all of one dtype.
std::vector<Launch> plan(const Communicator& communicator, int rank, const CallSite& site, DType dtype,
                         const std::vector<Buffer>& buffers, double deadline_seconds);

}  // namespace jax_ring::gpu
