// call.h: the arguments of a kernel.
#pragma once

#include "ring/collective.h"
#include "ring/endpoint.h"
#include "ring/fold.h"
#include "ring/pack.h"

namespace jax_ring::gpu {

// Which kernel.
struct KernelKey {
  DType dtype;
  Op op;
  Algorithm algorithm;
};

// All that a kernel is told; copied into its parameters, so that a recorded graph needs no memory of ours to live on.
struct Call {
  Endpoint self;
  Message message;
  Plan plan;
};

static_assert(sizeof(Call) < 4096 - sizeof(void*), "a kernel's parameters have 4 KiB");

}  // namespace jax_ring::gpu
