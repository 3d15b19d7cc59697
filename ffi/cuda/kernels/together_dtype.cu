// together_dtype.cu: the kernels that run all ranks of a check, compiled once for each element type.
#include "cuda/kernels/make_table.h"
#include "cuda/kernels/together.h"

namespace jax_ring::gpu {
namespace {

// Each rank has num_ctas teams of the grid. The calls are in device memory: the parameters have no room for several.
template <class Element, class Op, Algorithm kAlgorithm>
__global__ void __launch_bounds__(kThreadsPerCta, 1) together_kernel(const Call* calls, int num_ctas) {
  const Call& call = calls[blockIdx.x / num_ctas];
  run_team<Element, Op, kAlgorithm>(call.self, call.message, call.plan, blockIdx.x % num_ctas, Cta{});
}

template <class Element, class Op, Algorithm kAlgorithm>
__global__ void __launch_bounds__(kThreadsPerCta, 1) together_tree_kernel(const Call* calls, int num_ctas) {
  const Call& call = calls[blockIdx.x / num_ctas];
  run_team<Element, Op, kAlgorithm>(call.self, call.message, call.plan, blockIdx.x % num_ctas, Cta{},
                                    TreeTerms{call.tree});
}

template <class Element, class Op, Algorithm kAlgorithm>
struct Make {
  static constexpr TogetherKernel kernel = &together_kernel<Element, Op, kAlgorithm>;
  static constexpr TogetherKernel along_tree = &together_tree_kernel<Element, Op, kAlgorithm>;
};

}  // namespace

extern const TogetherTable JAX_RING_CONCAT(together_, JAX_RING_DTYPE);
const TogetherTable JAX_RING_CONCAT(together_, JAX_RING_DTYPE) =
    table_of<TogetherKernel, Make, JAX_RING_CONCAT(Element_, JAX_RING_DTYPE)>();

}  // namespace jax_ring::gpu
