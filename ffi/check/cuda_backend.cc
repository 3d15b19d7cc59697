// cuda_backend.cc: ranks on GPUs; several may share one.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "check/backend.h"
#include "cuda/kernels/kernels.h"
#include "cuda/kernels/together.h"
#include "cuda/runtime/gpus.h"
#include "device/fold/kernel_fold.h"

namespace jax_ring::check {
namespace {

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

struct Stream {
  Stream() { check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate"); }
  ~Stream() { cudaStreamDestroy(stream); }
  Stream(const Stream&) = delete;
  cudaStream_t stream = nullptr;
};

struct Event {
  Event() { check(cudaEventCreate(&event), "cudaEventCreate"); }
  ~Event() { cudaEventDestroy(event); }
  Event(const Event&) = delete;
  void record(cudaStream_t stream) { check(cudaEventRecord(event, stream), "cudaEventRecord"); }
  cudaEvent_t event = nullptr;
};

double seconds_between(const Event& begin, const Event& end) {
  float milliseconds = 0;
  check(cudaEventSynchronize(end.event), "cudaEventSynchronize");
  check(cudaEventElapsedTime(&milliseconds, begin.event, end.event), "cudaEventElapsedTime");
  return milliseconds / 1e3;
}

// A rank's kernels, captured as a CUDA graph.
class Graph {
 public:
  Graph(cudaStream_t stream, const Work& work) {
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    for (const gpu::Launch& launch : work.launches) {
      check(gpu::launch(launch.kernel, launch.call, stream), "launch into a graph");
    }
    check(cudaStreamEndCapture(stream, &graph_), "cudaStreamEndCapture");
    check(cudaGraphInstantiate(&executable_, graph_, 0), "cudaGraphInstantiate");
    check(cudaGraphUpload(executable_, stream), "cudaGraphUpload");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }
  ~Graph() {
    cudaGraphExecDestroy(executable_);
    cudaGraphDestroy(graph_);
  }
  Graph(const Graph&) = delete;
  void launch(cudaStream_t stream) { check(cudaGraphLaunch(executable_, stream), "cudaGraphLaunch"); }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

class CudaBackend final : public Backend {
 public:
  gpu::PeerMemory& memory() override { return *memory_; }

  void copy_in(void* to, const void* from_host, size_t bytes) override {
    check(cudaMemcpy(to, from_host, bytes, cudaMemcpyHostToDevice), "cudaMemcpy to the device");
  }
  void copy_out(void* to_host, const void* from, size_t bytes) override {
    check(cudaMemcpy(to_host, from, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy from the device");
  }

  int resident_ctas(int device) override {
    check(cudaSetDevice(device), "cudaSetDevice");
    int processors = 0;
    check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    int least = std::numeric_limits<int>::max();
    for_each_together(
        [&](const gpu::KernelKey& key) { least = std::min(least, gpu::most_teams_at_once(key, device)); });
    for (const void* kernel : gpu::built_kernels()) {
      int per_processor = 0;
      check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, kernel, kThreadsPerCta, 0),
            "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
      least = std::min(least, per_processor * processors);
    }
    return least;
  }

  bool has_kernels(DType dtype) override { return gpu::has_kernel({kernel_type(dtype), Op::sum, Algorithm::two_shot}); }

  double run(const std::vector<Work>& ranks, LaunchMode how, int repeats) override {
    check(cudaSetDevice(ranks.at(0).device), "cudaSetDevice");
    memory_->warm_up(ranks[0].device);
    return how == LaunchMode::together ? run_together(ranks, repeats)
                                       : run_on_streams(ranks, how == LaunchMode::graphs, repeats);
  }

  double copy_seconds(int device, size_t bytes, int repeats) override {
    check(cudaSetDevice(device), "cudaSetDevice");
    void *from = memory_->allocate(device, bytes), *to = memory_->allocate(device, bytes);
    Stream on;
    Event begin, end;
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, on.stream), "cudaMemcpyAsync");
    begin.record(on.stream);
    for (int i = 0; i < repeats; ++i) {
      check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, on.stream), "cudaMemcpyAsync");
    }
    end.record(on.stream);
    const double seconds = seconds_between(begin, end);
    memory_->release(device, from);
    memory_->release(device, to);
    return seconds;
  }

 private:
  template <class Use>
  static void for_each_together(Use use) {
    for (int dtype = 0; dtype < static_cast<int>(DType::count); ++dtype) {
      for (int op = 0; op < static_cast<int>(Op::count); ++op) {
        for (int algorithm = 0; algorithm < static_cast<int>(Algorithm::count); ++algorithm) {
          for (bool along_tree : {false, true}) {
            const gpu::KernelKey key{static_cast<DType>(dtype), static_cast<Op>(op), static_cast<Algorithm>(algorithm),
                                     along_tree};
            if (gpu::has_kernel(key)) use(key);
          }
        }
      }
    }
  }

  double run_together(const std::vector<Work>& ranks, int repeats) {
    const size_t num_launches = ranks[0].launches.size();
    const int device = ranks[0].device, num_ranks = static_cast<int>(ranks.size());
    std::vector<gpu::Call> calls;
    for (size_t i = 0; i < num_launches; ++i) {
      for (const Work& work : ranks) calls.push_back(work.launches[i].call);
    }
    auto* on_device = static_cast<gpu::Call*>(memory_->allocate(device, (calls.size() + 1) * sizeof(gpu::Call)));
    copy_in(on_device, calls.data(), calls.size() * sizeof(gpu::Call));
    Stream on;
    Event begin, end;
    begin.record(on.stream);
    for (int repeat = 0; repeat < repeats; ++repeat) {
      for (size_t i = 0; i < num_launches; ++i) {
        const gpu::Launch& first = ranks[0].launches[i];
        check(gpu::launch_together(first.kernel, on_device + i * num_ranks, num_ranks,
                                   first.call.self.capacity.num_ctas, on.stream),
              "launch of all ranks together");
      }
    }
    end.record(on.stream);
    const double seconds = seconds_between(begin, end);
    memory_->release(device, on_device);
    return seconds;
  }

  double run_on_streams(const std::vector<Work>& ranks, bool recorded, int repeats) {
    std::vector<Stream> streams(ranks.size());
    std::vector<std::unique_ptr<Graph>> graphs;
    for (size_t rank = 0; recorded && rank < ranks.size(); ++rank) {
      graphs.push_back(std::make_unique<Graph>(streams[rank].stream, ranks[rank]));
    }
    Event begin, end;
    begin.record(streams[0].stream);
    for (int repeat = 0; repeat < repeats; ++repeat) {
      for (size_t rank = 0; rank < ranks.size(); ++rank) {
        if (recorded) {
          graphs[rank]->launch(streams[rank].stream);
          continue;
        }
        for (const gpu::Launch& launch : ranks[rank].launches) {
          check(gpu::launch(launch.kernel, launch.call, streams[rank].stream), "launch");
        }
      }
    }
    for (size_t rank = 1; rank < ranks.size(); ++rank) {
      check(cudaStreamSynchronize(streams[rank].stream), "cudaStreamSynchronize");
    }
    end.record(streams[0].stream);
    return seconds_between(begin, end);
  }

  std::unique_ptr<gpu::Gpus> memory_ = gpu::cuda_gpus();
};

}  // namespace

std::unique_ptr<Backend> cuda_backend() { return std::make_unique<CudaBackend>(); }

}  // namespace jax_ring::check
