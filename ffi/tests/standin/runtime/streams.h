// streams.h: streams, graphs and launches of absent GPUs. A stream is a thread that does its work in order.
#pragma once

#include <cuda_runtime_api.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace jax_ring::standin {

// A launch with its arguments, which is queued, or captured and queued repeatedly.
struct Task {
  std::function<void()> run;
  std::vector<const void*> reached;  // memory that a kernel uses besides its operands
};

// A kernel with copies of its arguments. Defined beside the kernels, because only they know their parameters.
struct BoundKernel {
  std::function<void()> call;  // one thread's part
  std::vector<const void*> reached;
};
BoundKernel bind_kernel(const void* kernel, void** arguments);

// Waits until all streams of a GPU are idle, as cudaFree does.
void wait_for_gpu(int gpu);

}  // namespace jax_ring::standin

// The runtime's opaque types.
struct CUgraph_st {
  int gpu;
  std::vector<jax_ring::standin::Task> tasks;
};

struct CUgraphExec_st {
  CUgraph_st graph;
};

struct CUstream_st {
 public:
  CUstream_st(int gpu, unsigned flags);
  ~CUstream_st();  // after the last task
  void enqueue(jax_ring::standin::Task task);
  // Whether all tasks end within a minute.
  bool wait();
  bool is_idle();

  const int gpu;
  const unsigned flags;
  std::unique_ptr<CUgraph_st> capture;  // in progress
  cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
  uint64_t invalidations_before = 0;
  bool capture_fails = false;

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<jax_ring::standin::Task> tasks_;
  size_t unfinished_ = 0;
  bool ends_ = false;
  std::thread thread_;
};
