// kernels_dtype.cu: the kernels of one element type, compiled once for each (JAX_RING_DTYPE names it).
#include "cuda/kernels/make_table.h"

namespace jax_ring::gpu {
namespace {

// Waits until the stream's earlier kernels have ended: see launch().
__device__ __forceinline__ void await_stream() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// One CTA per SM: with more, a thread would get 64 registers, which are too few.
template <class Element, class Op, Algorithm kAlgorithm>
__global__ void __launch_bounds__(kThreadsPerCta, 1) collective_kernel(const __grid_constant__ Call call) {
  await_stream();
  run_team<Element, Op, kAlgorithm>(call.self, call.message, call.plan, blockIdx.x, Cta{});
}

template <class Element, class Op, Algorithm kAlgorithm>
__global__ void __launch_bounds__(kThreadsPerCta, 1) tree_kernel(const __grid_constant__ Call call) {
  await_stream();
  run_team<Element, Op, kAlgorithm>(call.self, call.message, call.plan, blockIdx.x, Cta{}, TreeTerms{call.tree});
}

template <class Element, class Op, Algorithm kAlgorithm>
struct Make {
  static constexpr Kernel kernel = &collective_kernel<Element, Op, kAlgorithm>;
  static constexpr Kernel along_tree = &tree_kernel<Element, Op, kAlgorithm>;
};

}  // namespace

extern const KernelTable JAX_RING_CONCAT(kernels_, JAX_RING_DTYPE);
const KernelTable JAX_RING_CONCAT(kernels_,
                                  JAX_RING_DTYPE) = table_of<Kernel, Make, JAX_RING_CONCAT(Element_, JAX_RING_DTYPE)>();

}  // namespace jax_ring::gpu
