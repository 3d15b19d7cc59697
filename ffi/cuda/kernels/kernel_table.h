// kernel_table.h: tables of the kernels of one element type.
#pragma once

#include "cuda/kernels/call.h"
#include "device/memory/capacity.h"

namespace jax_ring::gpu {

// A kernel of programs. It reads its call from constant memory.
using Kernel = void (*)(Call call);

// By operation and algorithm; null for unused combinations.
template <class AnyKernel>
struct TableOf {
  AnyKernel kernel[static_cast<int>(Op::count)][static_cast<int>(Algorithm::count)];

  AnyKernel along_tree[static_cast<int>(Op::count)][static_cast<int>(Algorithm::count)];

  AnyKernel of(const KernelKey& key) const {
    return (key.along_tree ? along_tree : kernel)[static_cast<int>(key.op)][static_cast<int>(key.algorithm)];
  }
};
using KernelTable = TableOf<Kernel>;

}  // namespace jax_ring::gpu
