// call.h: the arguments of a kernel.
#pragma once

#include "collective/collective.h"
#include "collective/fold.h"
#include "device/fold/tree_program.h"
#include "device/memory/endpoint.h"
#include "device/memory/pack.h"

namespace jax_ring::gpu {

// Selects a kernel.
struct KernelKey {
  DType dtype;
  Op op;
  Algorithm algorithm;
  bool along_tree = false;
};

// All data of a kernel. Passed by value in its parameters, so that a captured graph holds no pointer to it.
struct Call {
  Endpoint self;
  Message message;
  Plan plan;
  TreeProgram tree;  // of kernels along a tree
};

static_assert(sizeof(Call) <= 4096, "a kernel's parameters have 4 KiB");

// The teams with a share of the message, the first ones. The others would only start and end.
inline int num_teams(const Call& call) {
  const uint64_t packs = call.message.num_packs;
  const uint64_t shared = requires_ring(call.plan) ? ceil_div(packs, call.self.num_ranks()) : packs;
  const uint64_t share = ceil_div(shared, call.self.capacity.num_ctas);
  return share == 0 ? 1 : static_cast<int>(ceil_div(shared, share));
}

}  // namespace jax_ring::gpu
