// make_table.h: fills an element type's table with the needed kernels.
#pragma once

#include "cuda/kernels/kernel_table.h"
#include "device/algorithm.h"

namespace jax_ring::gpu {

// The tables of the kernels Make<Element, Op, Algorithm>::kernel, and along_tree.
template <template <class, class, Algorithm> class Make, class Element, class Operation, Algorithm kAlgorithm>
constexpr auto kernel_if_needed() {
  if constexpr (is_needed<Element, Operation, kAlgorithm>) {
    return Make<Element, Operation, kAlgorithm>::kernel;
  } else {
    return nullptr;
  }
}

template <template <class, class, Algorithm> class Make, class Element, class Operation, Algorithm kAlgorithm>
constexpr auto tree_kernel_if_needed() {
  if constexpr (has_tree<Element, Operation, kAlgorithm>) {
    return Make<Element, Operation, kAlgorithm>::along_tree;
  } else {
    return nullptr;
  }
}

template <class AnyKernel, template <class, class, Algorithm> class Make, class Element>
constexpr TableOf<AnyKernel> table_of() {
#define JAX_RING_KERNELS(name, op)                                                                                     \
  {kernel_if_needed<Make, Element, op, Algorithm::one_shot>(),                                                         \
   kernel_if_needed<Make, Element, op, Algorithm::two_shot>(), kernel_if_needed<Make, Element, op, Algorithm::ring>(), \
   kernel_if_needed<Make, Element, op, Algorithm::multicast>()},
#define JAX_RING_TREE_KERNELS(name, op)                             \
  {tree_kernel_if_needed<Make, Element, op, Algorithm::one_shot>(), \
   tree_kernel_if_needed<Make, Element, op, Algorithm::two_shot>(), nullptr, nullptr},
  return {{JAX_RING_FOR_EACH_OP(JAX_RING_KERNELS)}, {JAX_RING_FOR_EACH_OP(JAX_RING_TREE_KERNELS)}};
#undef JAX_RING_KERNELS
#undef JAX_RING_TREE_KERNELS
}

// Element_f32 and so on, for a file compiled once per type (JAX_RING_DTYPE names it).
#define JAX_RING_ELEMENT(name, element) using Element_##name = element;
JAX_RING_FOR_EACH_DTYPE(JAX_RING_ELEMENT)
#undef JAX_RING_ELEMENT

#define JAX_RING_CONCAT_(a, b) a##b
#define JAX_RING_CONCAT(a, b) JAX_RING_CONCAT_(a, b)

}  // namespace jax_ring::gpu
