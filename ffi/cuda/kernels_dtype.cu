// kernels_dtype.cu: the kernels of one element type, compiled once for each (JAX_RING_DTYPE names it).
#include "cuda/kernel_table.h"
#include "ring/algorithm.h"

namespace jax_ring::gpu {
namespace {

template <class Element, class Op, Algorithm kAlgorithm>
__global__ void __launch_bounds__(kThreadsPerCta)
    collective_kernel(const __grid_constant__ Call single, const Call* calls) {
  const int num_ctas = single.self.capacity.num_ctas;
  const Call& call = calls == nullptr ? single : calls[blockIdx.x / num_ctas];
  run_team<Element, Op, kAlgorithm>(call.self, call.message, call.plan, blockIdx.x % num_ctas, Cta{}, Op{});
}

template <class Element, class Op, Algorithm kAlgorithm>
constexpr Kernel kernel_of() {
  if constexpr (is_needed<Element, Op, kAlgorithm>) {
    return &collective_kernel<Element, Op, kAlgorithm>;
  } else {
    return nullptr;
  }
}

template <class Element>
constexpr KernelTable table_of() {
  return {{
#define JAX_RING_KERNELS(name, op)                                                               \
  {kernel_of<Element, op, Algorithm::one_shot>(), kernel_of<Element, op, Algorithm::two_shot>(), \
   kernel_of<Element, op, Algorithm::ring>()},
      JAX_RING_FOR_EACH_OP(JAX_RING_KERNELS)
#undef JAX_RING_KERNELS
  }};
}

}  // namespace

#define JAX_RING_PICK(name, element) using Element_##name = element;
JAX_RING_FOR_EACH_DTYPE(JAX_RING_PICK)
#undef JAX_RING_PICK

#define JAX_RING_CONCAT_(a, b) a##b
#define JAX_RING_CONCAT(a, b) JAX_RING_CONCAT_(a, b)

extern const KernelTable JAX_RING_CONCAT(kernels_, JAX_RING_DTYPE);
const KernelTable JAX_RING_CONCAT(kernels_, JAX_RING_DTYPE) = table_of<JAX_RING_CONCAT(Element_, JAX_RING_DTYPE)>();

}  // namespace jax_ring::gpu
