// team.h: the threads that work on one slice of a message together: a CTA on a GPU, a single thread on the host.
#pragma once

// Team functions run on the GPU in the CUDA engine, and on the host in tests, under the sanitizers and in the GPU
// check.
#if defined(__CUDACC__)
#define JAX_RING_TEAM __device__ __forceinline__
// For code that seldom runs: out of line, it costs the rest neither registers nor space in the instruction cache.
#define JAX_RING_TEAM_CALL inline __device__ __noinline__
#define JAX_RING_UNROLL _Pragma("unroll")
#define JAX_RING_NO_UNROLL _Pragma("unroll 1")
#else
#define JAX_RING_TEAM inline
#define JAX_RING_TEAM_CALL inline
#define JAX_RING_UNROLL
#define JAX_RING_NO_UNROLL
#endif

namespace jax_ring {

#if defined(__CUDACC__)
struct Cta {
  JAX_RING_TEAM int thread() const { return static_cast<int>(threadIdx.x); }
  JAX_RING_TEAM int size() const { return static_cast<int>(blockDim.x); }
  // A barrier: all threads have arrived, and see what the others wrote before it.
  JAX_RING_TEAM void sync() const { __syncthreads(); }
  // As sync(); true on all threads if `mine` is true on all of them.
  JAX_RING_TEAM bool all(bool mine) const { return __syncthreads_and(mine) != 0; }
};
#else
struct Solo {
  int thread() const { return 0; }
  int size() const { return 1; }
  void sync() const {}
  bool all(bool mine) const { return mine; }
};
#endif

}  // namespace jax_ring
