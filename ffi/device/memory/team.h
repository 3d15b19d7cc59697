// team.h: threads that share one slice of a message: a CTA on a GPU, one or several threads on the host.
#pragma once

#if !defined(__CUDACC__)
#include <sched.h>

#include <atomic>
#include <cstdint>
#endif

// Team functions run on the GPU in the CUDA engine, and on the host in tests, under the sanitizers and in the GPU
// check.
#if defined(__CUDACC__)
#define JAX_RING_TEAM __device__ __forceinline__
// For rare code: out of line, it costs the rest neither registers nor space in the instruction cache.
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
  // A barrier: all threads have arrived, and see each other's earlier writes.
  JAX_RING_TEAM void sync() const { __syncthreads(); }
  // As sync(); true on all threads if `mine` is true on all of them.
  JAX_RING_TEAM bool all(bool mine) const { return __syncthreads_and(mine) != 0; }
  // A barrier that gives all threads the first one's value. Once per kernel: no barrier protects the next value.
  JAX_RING_TEAM uint64_t of_first(uint64_t value) const {
    __shared__ uint64_t first;
    if (threadIdx.x == 0) first = value;
    __syncthreads();
    return first;
  }
};
#else
// Barrier of several host threads, like __syncthreads_and() for a CTA. It too waits without a deadline: a thread that
// leaves its team alone is a kernel bug, while waits for a peer are made in await().
class HostBarrier {
 public:
  explicit HostBarrier(int size) : size_(size) {}
  int size() const { return size_; }

  // True on all threads if `mine` is true on all of them.
  bool all(bool mine) {
    const uint32_t generation = generation_.load(std::memory_order_relaxed);
    if (!mine) against_.fetch_add(1, std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < size_) {
      while (generation_.load(std::memory_order_acquire) == generation) sched_yield();  // threads may outnumber cores
    } else {
      verdict_[generation % 2] = against_.exchange(0, std::memory_order_relaxed) == 0;
      arrived_.store(0, std::memory_order_relaxed);
      generation_.store(generation + 1, std::memory_order_release);
    }
    // The next generation writes the other verdict, and the one after it starts only when all have read this one.
    return verdict_[generation % 2];
  }

  // The value of the thread with index 0, on all threads.
  uint64_t of_first(int index, uint64_t value) {
    if (index == 0) first_ = value;
    all(true);
    const uint64_t result = first_;
    all(true);  // before the next value
    return result;
  }

 private:
  const int size_;
  std::atomic<int> arrived_{0};
  std::atomic<int> against_{0};
  std::atomic<uint32_t> generation_{0};
  bool verdict_[2] = {};
  uint64_t first_ = 0;
};

// One thread of a host team. Without a barrier the team has no other.
struct HostTeam {
  HostBarrier* barrier = nullptr;
  int index = 0;

  int thread() const { return index; }
  int size() const { return barrier == nullptr ? 1 : barrier->size(); }
  void sync() const { all(true); }
  bool all(bool mine) const { return barrier == nullptr ? mine : barrier->all(mine); }
  uint64_t of_first(uint64_t value) const { return barrier == nullptr ? value : barrier->of_first(index, value); }
};
#endif

}  // namespace jax_ring
