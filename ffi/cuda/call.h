// call.h: the arguments of a kernel.
#pragma once

#include "ring/collective.h"
#include "ring/endpoint.h"
#include "ring/fold.h"
#include "ring/pack.h"

namespace jax_ring::gpu {

// Selects a kernel.
struct KernelKey {
  DType dtype;
  Op op;
  Algorithm algorithm;
};

// Everything that a kernel needs. Passed by value in its parameters, so that a captured graph holds no pointer to it.
struct Call {
  Endpoint self;
  Message message;
  Plan plan;
};

static_assert(sizeof(Call) <= 4096, "a kernel's parameters have 4 KiB");

}  // namespace jax_ring::gpu
