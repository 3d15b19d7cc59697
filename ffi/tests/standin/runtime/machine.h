// machine.h: absent GPUs: what a test sets up before it uses the CUDA runtime, and what it reads afterwards.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace jax_ring::standin {

// The stage of a custom call that this thread runs. Each stage forbids some calls of the runtime.
enum class Stage { none, instantiate, initialize, execute };
extern thread_local Stage stage_of_thread;

struct Hardware {
  int num_gpus = 2;
  int threads_per_cta = 2;  // in place of the hundreds in a launch
  int ctas_at_once = 2;     // of each launch; the others follow, as on a GPU too small for all of them
  unsigned seed = 0;        // of random delays; 0: none
  // Whether memory, loading and graphs wait for all kernels of the process, as the driver's lock may make them do.
  bool driver_waits_for_kernels = false;
  int ptx_version = 90;       // of the kernels' code: from 90 on they wait for their stream themselves
  bool has_multicast = true;  // whether an NVSwitch joins the GPUs
};

// One process's view of the machine. Any thread may call any member.
class Machine {
 public:
  static Machine& instance();

  // A machine that has just been switched on. Nothing of the last one may be in use.
  void reset(const Hardware& hardware);
  const Hardware& hardware() const { return hardware_; }

  // ---- What a test sets

  // The GPUs on which this process may have a context. If never called: all.
  void allow_contexts(std::set<int> gpus);
  // This process's GPUs. All of them must have loaded their kernels before any of them runs one.
  void expect_loaded_together(std::vector<int> gpus);
  // Takes away `gpu`'s peer access to the memory of `peer`.
  void sever(int gpu, int peer);
  // Makes `times` calls of a function fail, after `after` calls that do not.
  void fail(const std::string& function, cudaError_t error, int times = 1, int after = 0);

  // ---- What a test reads

  // Violations: things done that must not be done on eight real GPUs, in words.
  std::vector<std::string> violations() const;
  std::set<int> contexts() const;
  // Calls of the runtime so far, of all functions or of one.
  uint64_t num_calls() const;
  uint64_t num_calls(const std::string& function) const;

  // ---- What the stand-in's own files use

  // At the start of each runtime function: counts it, delays it, and returns the error that a test asked for.
  cudaError_t enter(const char* function);
  // At the end of each: the thread's last error, as cudaGetLastError() reports it.
  static cudaError_t leave(cudaError_t error);
  void violate(const std::string& what);
  bool is_severed(int gpu, int peer) const;
  bool has_access(int gpu, int peer) const;
  cudaError_t enable_access(int gpu, int peer);
  void create_context(int gpu, const char* function);
  void mark_loaded(const void* kernel, int gpu);
  bool is_loaded(const void* kernel, int gpu) const;
  // Records a violation if a GPU of expect_loaded_together() has not loaded the kernel.
  void check_loaded_together(const void* kernel);

  void kernel_started();
  void kernel_ended();
  bool kernels_run() const;

  // Captures in progress, by beginning thread.
  void capture_began(cudaStreamCaptureMode mode);
  void capture_ended(cudaStreamCaptureMode mode);
  // For a call that may invalidate a capture: whether the thread may make it now. If not, invalidates all captures that
  // the call would.
  bool may_make_unsafe_call(const char* function);
  uint64_t num_invalidations() const { return invalidations_.load(); }

 private:
  friend class DriverLock;
  struct Injected {
    cudaError_t error;
    int times;
    int after;
  };

  Hardware hardware_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;  // running_kernels_ or driver_taken_
  std::set<int> allowed_contexts_, contexts_;
  bool all_contexts_allowed_ = true;
  std::vector<int> loaded_together_;
  std::set<std::pair<int, int>> severed_, access_;
  std::set<std::pair<const void*, int>> loaded_;
  std::map<std::string, std::deque<Injected>> injected_;
  std::map<std::string, uint64_t> calls_;
  std::vector<std::string> violations_;
  int running_kernels_ = 0;
  int global_captures_ = 0;
  std::atomic<uint64_t> invalidations_{0};
  bool driver_taken_ = false;
};

// The driver's lock, taken by memory, loading and graph functions. A kernel that waits for a rank whose thread waits
// here never ends; after a minute the stand-in gives up, and records it.
class DriverLock {
 public:
  explicit DriverLock(const char* function);
  ~DriverLock();
  DriverLock(const DriverLock&) = delete;
  DriverLock& operator=(const DriverLock&) = delete;
};

// A random delay, if the machine has a seed. Called wherever threads could interact.
void jitter();

// The GPU whose context is current on this thread; -1: none.
int current_gpu();
void set_current_gpu(int gpu);
// Like current_gpu(), but as in the runtime: without a context the thread gets one on GPU 0.
int required_gpu(const char* function);

}  // namespace jax_ring::standin
