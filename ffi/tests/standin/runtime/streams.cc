// streams.cc: runs kernels on threads of the host, in the order of their streams, or captures them.
#include "tests/standin/runtime/streams.h"

#include <algorithm>
#include <chrono>
#include <set>

#include "tests/standin/runtime/device.h"
#include "tests/standin/runtime/machine.h"
#include "tests/standin/runtime/memory.h"

namespace jax_ring::standin {

thread_local uint3 block_of_thread{};
thread_local HostTeam team_of_thread{};

namespace {

constexpr std::chrono::seconds kPatience{60};

// Runs a grid: some of its CTAs at a time, each by a team of threads. The first thread is the caller's.
void run_grid(const std::function<void()>& call, unsigned grid, const Hardware& hardware) {
  const unsigned at_once = std::min(grid, static_cast<unsigned>(hardware.ctas_at_once));
  std::deque<HostBarrier> barriers;
  std::vector<std::thread> threads;
  const auto work = [&](unsigned first, HostTeam team) {
    team_of_thread = team;
    for (unsigned cta = first; cta < grid; cta += at_once) {
      block_of_thread = {cta, 0, 0};
      call();
      team.sync();  // the end of a CTA
    }
  };
  for (unsigned first = 0; first < at_once; ++first) barriers.emplace_back(hardware.threads_per_cta);
  for (unsigned first = 0; first < at_once; ++first) {
    for (int thread = 0; thread < hardware.threads_per_cta; ++thread) {
      if (first + thread > 0) threads.emplace_back(work, first, HostTeam{&barriers[first], thread});
    }
  }
  work(0, {&barriers[0], 0});
  for (std::thread& thread : threads) thread.join();
}

bool is_legacy(cudaStream_t stream) {
  return stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
}

std::mutex streams_mutex;
std::set<CUstream_st*> all_streams;

// Queues a task, or adds it to the capture.
void submit(CUstream_st& stream, Task task) {
  if (stream.capture != nullptr) {
    stream.capture->tasks.push_back(std::move(task));
  } else {
    stream.enqueue(std::move(task));
  }
}

void load(const void* kernel, int gpu, const char* function) {
  Machine& machine = Machine::instance();
  if (machine.is_loaded(kernel, gpu)) return;
  const DriverLock lock(function);
  machine.mark_loaded(kernel, gpu);
}

// Calls that wait for the GPU invalidate captures.
cudaError_t enter_wait(const char* function) {
  Machine& machine = Machine::instance();
  if (stage_of_thread == Stage::execute) machine.violate(std::string(function) + " while a call is executed");
  const cudaError_t error = machine.enter(function);
  if (error != cudaSuccess) return error;
  return machine.may_make_unsafe_call(function) ? cudaSuccess : cudaErrorStreamCaptureUnsupported;
}

}  // namespace

void wait_for_gpu(int gpu) {
  const std::lock_guard<std::mutex> lock(streams_mutex);
  for (CUstream_st* stream : all_streams) {
    if (stream->gpu == gpu) stream->wait();
  }
}

}  // namespace jax_ring::standin

using namespace jax_ring::standin;

CUstream_st::CUstream_st(int gpu, unsigned flags) : gpu(gpu), flags(flags), thread_([this] { work(); }) {
  const std::lock_guard<std::mutex> lock(streams_mutex);
  all_streams.insert(this);
}

CUstream_st::~CUstream_st() {
  {
    const std::lock_guard<std::mutex> lock(streams_mutex);
    all_streams.erase(this);
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ends_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void CUstream_st::enqueue(Task task) {
  Memory::instance().pin(gpu, task.reached);
  const std::lock_guard<std::mutex> lock(mutex_);
  tasks_.push_back(std::move(task));
  ++unfinished_;
  changed_.notify_all();
}

bool CUstream_st::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_until(lock, std::chrono::steady_clock::now() + kPatience, [&] { return unfinished_ == 0; });
}

bool CUstream_st::is_idle() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return unfinished_ == 0;
}

void CUstream_st::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return ends_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    const Task task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    jitter();
    task.run();
    Memory::instance().unpin(task.reached);
    lock.lock();
    --unfinished_;
    changed_.notify_all();
  }
}

extern "C" {

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int flags) {
  Machine& machine = Machine::instance();
  const cudaError_t error = machine.enter("cudaStreamCreateWithFlags");
  if (error != cudaSuccess) return Machine::leave(error);
  if (flags != cudaStreamNonBlocking) machine.violate("a stream was created that waits for the legacy stream");
  const int gpu = required_gpu("cudaStreamCreateWithFlags");
  const DriverLock lock("cudaStreamCreateWithFlags");
  *stream = new CUstream_st(gpu, flags);
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const cudaError_t error = Machine::instance().enter("cudaStreamDestroy");
  if (error == cudaSuccess) delete stream;
  return Machine::leave(error);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Machine& machine = Machine::instance();
  if (is_legacy(stream)) {
    machine.violate("cudaStreamSynchronize of the legacy stream");
    return cudaSuccess;
  }
  cudaError_t error = machine.enter("cudaStreamSynchronize");
  if (error == cudaSuccess && stream->capture != nullptr) {
    stream->capture_fails = true;
    error = cudaErrorStreamCaptureUnsupported;
  }
  if (error == cudaSuccess && stage_of_thread == Stage::execute) {
    machine.violate("cudaStreamSynchronize while a call is executed");
  }
  if (error == cudaSuccess && !stream->wait()) error = cudaErrorLaunchTimeout;
  return Machine::leave(error);
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  const cudaError_t error = Machine::instance().enter("cudaStreamQuery");
  if (error != cudaSuccess) return Machine::leave(error);
  return stream->is_idle() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaDeviceSynchronize() {
  Machine& machine = Machine::instance();
  machine.violate("cudaDeviceSynchronize, which waits for every kernel of the GPU");
  const cudaError_t error = enter_wait("cudaDeviceSynchronize");
  if (error != cudaSuccess) return Machine::leave(error);
  wait_for_gpu(required_gpu("cudaDeviceSynchronize"));
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  Machine& machine = Machine::instance();
  const cudaError_t error = machine.enter("cudaMemsetAsync");
  if (error != cudaSuccess) return Machine::leave(error);
  if (is_legacy(stream)) {
    machine.violate("cudaMemsetAsync on the legacy stream");
    Memory::fill(static_cast<unsigned char*>(memory), value, bytes);
    return cudaSuccess;
  }
  submit(*stream, {[=] { Memory::fill(static_cast<unsigned char*>(memory), value, bytes); }, {memory}});
  return cudaSuccess;
}

// Nothing starts before the stream's earlier work has ended, whatever the attributes allow: only that they are right is
// checked.
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments) {
  Machine& machine = Machine::instance();
  const cudaStream_t stream = config->stream;
  const cudaError_t error = machine.enter("cudaLaunchKernelExC");
  if (error != cudaSuccess) return Machine::leave(error);
  if (is_legacy(stream)) {
    machine.violate("a kernel on the legacy stream");
    return Machine::leave(cudaErrorInvalidResourceHandle);
  }
  if (stream->gpu != required_gpu("cudaLaunchKernelExC")) return Machine::leave(cudaErrorInvalidResourceHandle);
  if ((config->numAttrs == 1) != (machine.hardware().ptx_version >= 90)) {
    machine.violate(config->numAttrs == 1 ? "an early launch of a kernel that does not wait for its stream"
                                          : "no early launch of a kernel that waits for its stream");
  }
  machine.check_loaded_together(kernel);
  load(kernel, stream->gpu, "cudaLaunchKernelExC of a kernel that is not loaded");
  BoundKernel bound = bind_kernel(kernel, arguments);
  const auto run = [call = std::move(bound.call), blocks = config->gridDim.x, &machine] {
    machine.kernel_started();
    run_grid(call, blocks, machine.hardware());
    machine.kernel_ended();
  };
  submit(*stream, {run, std::move(bound.reached)});
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  const cudaError_t error = Machine::instance().enter("cudaFuncGetAttributes");
  if (error != cudaSuccess) return Machine::leave(error);
  load(kernel, required_gpu("cudaFuncGetAttributes"), "cudaFuncGetAttributes");
  *attributes = {};
  attributes->ptxVersion = Machine::instance().hardware().ptx_version;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel, int, size_t) {
  const cudaError_t error = Machine::instance().enter("cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  if (error != cudaSuccess) return Machine::leave(error);
  load(kernel, required_gpu("cudaOccupancyMaxActiveBlocksPerMultiprocessor"), "the question for the occupancy");
  *blocks = 1;
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  const cudaError_t error = Machine::instance().enter("cudaStreamBeginCapture");
  if (error != cudaSuccess) return Machine::leave(error);
  stream->capture = std::make_unique<CUgraph_st>();
  stream->capture->gpu = stream->gpu;
  stream->capture_mode = mode;
  stream->capture_fails = false;
  stream->invalidations_before = Machine::instance().num_invalidations();
  Machine::instance().capture_began(mode);
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  Machine& machine = Machine::instance();
  cudaError_t error = machine.enter("cudaStreamEndCapture");
  machine.capture_ended(stream->capture_mode);
  *graph = stream->capture.release();
  if (stream->capture_fails || machine.num_invalidations() != stream->invalidations_before) {
    error = cudaErrorStreamCaptureInvalidated;
  }
  if (error != cudaSuccess) {
    delete *graph;
    *graph = nullptr;
  }
  return Machine::leave(error);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const cudaError_t error = Machine::instance().enter("cudaStreamIsCapturing");
  if (error != cudaSuccess) return Machine::leave(error);
  *status = stream->capture != nullptr ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  const cudaError_t error = Machine::instance().enter("cudaGraphInstantiate");
  if (error != cudaSuccess) return Machine::leave(error);
  const DriverLock lock("cudaGraphInstantiate");
  *executable = new CUgraphExec_st{*graph};
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  const cudaError_t error = Machine::instance().enter("cudaGraphLaunch");
  if (error != cudaSuccess) return Machine::leave(error);
  for (const Task& task : executable->graph.tasks) stream->enqueue(task);
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete executable;
  return cudaSuccess;
}

}  // extern "C"
